/*
  config.h: a model's config.json, as Hugging Face's transformers writes it, as a moe_route_model. Which keys stand for which
  number is written down here alone; what a type's router does with them is the preset's. Needs cJSON. Include moe_route.h first.
*/
#ifndef CONFIG_H
#define CONFIG_H

#include "files.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_MAX_SIZE (256u << 20) /* bytes of a JSON file; the index of a model's shards takes up to 20 MB */

/* A JSON file as a tree for cJSON_Delete(); NULL with a message when it can't be had. */
FILES_FUNCTION cJSON *config_read(const char *path, char *error, size_t error_size) {
    FILE *stream = fopen(path, "rb");
    uint64_t size = 0;
    char *text = NULL;
    const char *end = NULL;
    cJSON *tree = NULL;
    error[0] = 0;
    if (!stream) {
        snprintf(error, error_size, "%.200s can't be opened", path);
        return NULL;
    }
    if (!files_size(stream, &size) || size > CONFIG_MAX_SIZE) {
        snprintf(error, error_size, "%.200s has no size, or one above %u bytes", path, CONFIG_MAX_SIZE);
    } else if ((text = (char *)malloc((size_t)size + 1)) == NULL || !files_read(stream, 0, text, (size_t)size)) {
        snprintf(error, error_size, "%.200s can't be read", path);
    } else {
        text[size] = 0;
        tree = cJSON_ParseWithOpts(text, &end, 1);
        if (tree && end != text + size) { /* a 0 character */
            cJSON_Delete(tree);
            tree = NULL;
        }
        if (!tree) snprintf(error, error_size, "%.200s: byte %lu: no valid JSON", path, (unsigned long)(end ? end - text : 0));
    }
    free(text);
    fclose(stream);
    return tree;
}

/* The first of several names (separated by spaces) that the object, or its ffn_config (DBRX), has with a value other than null. */
FILES_FUNCTION const cJSON *config_find(const cJSON *object, const char *names) {
    const char *at = names;
    const cJSON *inner;
    while (*at) {
        char name[64];
        const size_t length = strcspn(at, " ");
        const cJSON *item;
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        item = cJSON_GetObjectItemCaseSensitive(object, name);
        if (item && !cJSON_IsNull(item)) return item;
        at += length;
        while (*at == ' ') at++;
    }
    inner = cJSON_GetObjectItemCaseSensitive(object, "ffn_config");
    return cJSON_IsObject(inner) ? config_find(inner, names) : NULL;
}

/* NULL when there is no such text. */
FILES_FUNCTION const char *config_text(const cJSON *object, const char *names) {
    const cJSON *item = config_find(object, names);
    return cJSON_IsString(item) && item->valuestring[0] ? item->valuestring : NULL;
}

/* What a key says for a layer: some models list a value for each. */
static const cJSON *config_of_layer(const cJSON *item, uint32_t layer) {
    const cJSON *element = cJSON_IsArray(item) ? cJSON_GetArrayItem(item, layer > 100000 ? -1 : (int)layer) : item;
    return element ? element : cJSON_IsArray(item) ? item->child : NULL;
}

/* 0 when there is none; true counts 1. */
FILES_FUNCTION double config_number(const cJSON *object, const char *names, uint32_t layer) {
    const cJSON *item = config_of_layer(config_find(object, names), layer);
    return cJSON_IsTrue(item) ? 1 : cJSON_IsNumber(item) ? item->valuedouble : 0;
}

/* What no count can be becomes one that presets refuse. */
FILES_FUNCTION uint32_t config_count(const cJSON *object, const char *names, uint32_t layer) {
    const double number = config_number(object, names, layer);
    return number >= 0 && number < 4294967295.0 && number == floor(number) ? (uint32_t)number : 4294967295u;
}

/* The part of a configuration that describes the language model: itself, where it has no parts. */
FILES_FUNCTION const cJSON *config_text_part(const cJSON *config) {
    static const char *const parts[] = {"text_config", "llm_config", "language_config", "thinker_config"};
    size_t i;
    for (i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const cJSON *part = cJSON_GetObjectItemCaseSensitive(config, parts[i]);
        if (cJSON_IsObject(part)) return config_text_part(part);
    }
    return config;
}

static int config_is_hash_layer(const cJSON *config, uint32_t layer) {
    const cJSON *types = cJSON_GetObjectItemCaseSensitive(config, "mlp_layer_types"), *type = config_of_layer(types, layer);
    if (cJSON_IsString(type)) return strcmp(type->valuestring, "hash_moe") == 0;
    if (cJSON_GetObjectItemCaseSensitive(config, "num_hash_layers")) return layer < config_count(config, "num_hash_layers", 0);
    return config_count(config, "hash_layer", 0) == 1;
}

/* `config` is the text part. Texts stay the tree's. */
FILES_FUNCTION void config_model(const cJSON *config, uint32_t layer, moe_route_model *model) {
    const cJSON *norm = config_find(config, "norm_topk_prob moe_renormalize");
    const cJSON *scale = config_find(config, "routed_scaling_factor route_scale router_scaling_factor moe_router_scaling_factor moe_routed_scaling_factor");
    const char *method = config_text(config, "topk_method");
    memset(model, 0, sizeof *model);
    model->model_type = config_text(config, "model_type");
    model->num_experts = config_count(config, "num_experts num_local_experts n_routed_experts moe_num_experts", layer);
    model->top_k = config_count(config, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k", layer);
    if (!method || strcmp(method, "greedy") != 0) {
        model->num_groups = config_count(config, "n_group num_expert_group router_n_groups", layer);
        model->topk_groups = config_count(config, "topk_group", layer);
    }
    model->num_shared_experts = config_count(config, "n_shared_experts", layer);
    model->num_zero_experts = config_count(config, "zero_expert_num", layer);
    model->norm_topk_prob = !norm ? MOE_ROUTE_AUTO : cJSON_IsTrue(norm) ? MOE_ROUTE_ON : MOE_ROUTE_OFF;
    model->scale = cJSON_IsNumber(scale) ? (float)scale->valuedouble : 1.0f;
    model->softcap = (float)config_number(config, "moe_router_logit_softcapping", layer);
    model->jitter = (float)config_number(config, "router_jitter_noise", layer);
    model->norm_min = (float)config_number(config, "moe_norm_min", layer);
    model->swiglu_limit = (float)config_number(config, "swiglu_limit swiglu_limits", layer);
    model->scoring_func = config_text(config, "scoring_func expert_selection_fn");
    model->hash_layer = config_is_hash_layer(config, layer);
    model->vocab_size = config_count(config, "vocab_size", layer);
    model->hidden_size = config_count(config, "moe_latent_size hidden_size d_model", layer);
    model->intermediate_size = config_count(config, "moe_intermediate_size expert_ffn_hidden_size intermediate_size ffn_hidden_size", layer);
}

#endif /* CONFIG_H */
