/*
  config.h: the numbers of a moe_route_model, from a model's config.json, as Hugging Face's transformers writes it, or from the
  keys of a GGUF file. Which keys stand for which number is written down here alone; what a type's router does with them is the
  preset's. Needs cJSON. Include moe_route.h first.
*/
#ifndef CONFIG_H
#define CONFIG_H

#include "files.h"
#include "gguf.h"

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

/* The first of several names (separated by spaces) that the object, or its ffn_config (DBRX), has with a value but null. */
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
    const cJSON *scale = config_find(
        config, "routed_scaling_factor route_scale router_scaling_factor moe_router_scaling_factor moe_routed_scaling_factor");
    const char *method = config_text(config, "topk_method");
    memset(model, 0, sizeof *model);
    model->model_type = config_text(config, "model_type");
    model->num_experts = config_count(config, "num_experts num_local_experts n_routed_experts moe_num_experts", layer);
    model->top_k = config_count(config, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k",
                                layer);
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
    model->intermediate_size = config_count(
        config, "moe_intermediate_size expert_ffn_hidden_size intermediate_size ffn_hidden_size", layer);
}

/* ---- GGUF ---- */

typedef struct config_architecture {
    const char *name, *model_type;
    moe_route_switch norm; /* what llama.cpp does without a key expert_weights_norm, where the model type's default is another */
    int gating;            /* the only expert_gating_func: 1 softmax, 2 sigmoid, 4 sqrt(softplus); 0: any */
} config_architecture;

static const config_architecture config_architectures[] = {
    {"llama", "mixtral", MOE_ROUTE_AUTO, 1},          {"llama4", "llama4_text", MOE_ROUTE_AUTO, 2},
    {"qwen2moe", "qwen2_moe", MOE_ROUTE_OFF, 1},      {"qwen3moe", "qwen3_moe", MOE_ROUTE_ON, 1},
    {"qwen3vlmoe", "qwen3_vl_moe", MOE_ROUTE_AUTO, 1},{"qwen3next", "qwen3_next", MOE_ROUTE_ON, 1},
    {"qwen35moe", "qwen3_5_moe", MOE_ROUTE_AUTO, 1},  {"olmoe", "olmoe", MOE_ROUTE_OFF, 1},
    {"phimoe", "phimoe", MOE_ROUTE_AUTO, 0},          {"gpt-oss", "gpt_oss", MOE_ROUTE_AUTO, 0},
    {"granitemoe", "granitemoe", MOE_ROUTE_AUTO, 0},  {"granitehybrid", "granitemoehybrid", MOE_ROUTE_AUTO, 0},
    {"deepseek2", "deepseek_v2", MOE_ROUTE_AUTO, 1},  {"deepseek2", "deepseek_v3", MOE_ROUTE_AUTO, 2},
    {"deepseek4", "deepseek_v4", MOE_ROUTE_AUTO, 4},
    {"glm4moe", "glm4_moe", MOE_ROUTE_AUTO, 2},       {"glm-dsa", "glm_moe_dsa", MOE_ROUTE_AUTO, 2},
    {"dots1", "dots1", MOE_ROUTE_AUTO, 2},            {"ernie4_5-moe", "ernie4_5_moe", MOE_ROUTE_AUTO, 1},
    {"bailingmoe", "bailing_moe", MOE_ROUTE_AUTO, 1}, {"bailingmoe2", "bailing_moe_v2", MOE_ROUTE_AUTO, 2},
    {"hunyuan-moe", "hunyuan_v1_moe", MOE_ROUTE_AUTO, 1}, {"grok", "grok-1", MOE_ROUTE_AUTO, 1},
    {"dbrx", "dbrx", MOE_ROUTE_ON, 1},                {"gemma4", "gemma4", MOE_ROUTE_AUTO, 1},
    {"lfm2moe", "lfm2_moe", MOE_ROUTE_ON, 2},         {"afmoe", "afmoe", MOE_ROUTE_AUTO, 2},
    {"step35", "step3p5", MOE_ROUTE_AUTO, 2},         {"nemotron_h_moe", "nemotron_h", MOE_ROUTE_AUTO, 2},
    {"mimo2", "mimo_v2_flash", MOE_ROUTE_ON, 2},      {"exaone-moe", "exaone_moe", MOE_ROUTE_AUTO, 2},
    {"jamba", "jamba", MOE_ROUTE_AUTO, 1},            {"minimax-m2", "minimax_m2", MOE_ROUTE_AUTO, 2},
    {"kimi-linear", "kimi_linear", MOE_ROUTE_AUTO, 2},{"mistral4", "mistral4", MOE_ROUTE_AUTO, 1}};

/* `<architecture>.<key>`; `otherwise` when the file has no such number. */
static double config_gguf_number(const gguf_file *file, const char *key, uint32_t index, double otherwise) {
    const char *architecture = gguf_text(file, "general.architecture");
    char full[160];
    double number;
    snprintf(full, sizeof full, "%.64s.%s", architecture ? architecture : "", key);
    if (gguf_number(file, full, index, &number) || (index && gguf_number(file, full, 0, &number))) return number;
    return otherwise;
}

static uint32_t config_gguf_count(const gguf_file *file, const char *key, uint32_t layer, double otherwise) {
    const double number = config_gguf_number(file, key, layer, otherwise);
    return number >= 0 && number < 4294967295.0 && number == floor(number) ? (uint32_t)number : 4294967295u;
}

/* 0 when the architecture isn't known, or routes in another way than its model type; *architecture is then what the file says, or
   NULL. */
FILES_FUNCTION int config_gguf_model(const gguf_file *file, uint32_t layer, moe_route_model *model, const char **architecture) {
    const config_architecture *found = NULL;
    const double gating = config_gguf_number(file, "expert_gating_func", layer, 0),
                 norm = config_gguf_number(file, "expert_weights_norm", layer, -1);
    size_t i;
    memset(model, 0, sizeof *model);
    *architecture = gguf_text(file, "general.architecture");
    for (i = 0; i < sizeof config_architectures / sizeof config_architectures[0] && *architecture && !found; i++) {
        const config_architecture *a = &config_architectures[i];
        if (strcmp(a->name, *architecture) == 0 && (gating == 0 || a->gating == 0 || gating == a->gating)) found = a;
    }
    if (!found) return 0;
    model->model_type = found->model_type;
    model->num_experts = config_gguf_count(file, "expert_count", layer, 0);
    model->top_k = config_gguf_count(file, "expert_used_count", layer, 0);
    model->num_groups = config_gguf_count(file, "expert_group_count", layer, 1);
    model->topk_groups = config_gguf_count(file, "expert_group_used_count", layer, 1);
    model->norm_topk_prob = norm < 0 ? found->norm : norm != 0 ? MOE_ROUTE_ON : MOE_ROUTE_OFF;
    model->scale = (float)config_gguf_number(file, "expert_weights_scale", layer, 1);
    if (model->scale == 0) model->scale = 1;
    if (strcmp(found->model_type, "grok-1") == 0)
        model->softcap = (float)config_gguf_number(file, "router_logit_softcapping", layer, 0);
    if (strcmp(found->model_type, "step3p5") == 0 || strcmp(found->model_type, "deepseek_v4") == 0)
        model->swiglu_limit = (float)config_gguf_number(file, "swiglu_clamp_exp", layer, 0);
    model->hidden_size = config_gguf_count(file, "embedding_length", layer, 0);
    model->intermediate_size = config_gguf_count(file, "expert_feed_forward_length", layer, 0);
    return 1;
}

#endif /* CONFIG_H */
