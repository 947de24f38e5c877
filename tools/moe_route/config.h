/*
  config.h: the numbers of a model from the config.json that its checkpoint has. JSON is parsed with cJSON; where the command
  was built without it, --config says so. The file is a stranger's: every value is checked before it is used.
*/
#ifndef CONFIG_H
#define CONFIG_H

#if defined(HAVE_CJSON)
#include <cjson/cJSON.h>

enum { CONFIG_BYTES_MAX = 16 << 20 };

static char *config_read(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    char *text;
    if (!file) stop(STATUS_FILE, "%s can't be read: %s", path, strerror(errno));
    text = (char *)allocate(CONFIG_BYTES_MAX + 1, 1);
    *length = fread(text, 1, CONFIG_BYTES_MAX + 1, file);
    if (ferror(file)) stop(STATUS_FILE, "%s can't be read: %s", path, strerror(errno));
    if (*length > CONFIG_BYTES_MAX) stop(STATUS_FILE, "%s has more than %d bytes: it is no config.json", path, CONFIG_BYTES_MAX);
    fclose(file);
    return text;
}

typedef struct config { /* the objects that are searched: the text model's own before the whole's */
    const char *path;
    const cJSON *objects[3];
} config;

/* The first of the keys that is there and isn't null; the text `keys` has them with spaces between. */
static const cJSON *config_find(const config *c, const char *keys, char *key, size_t size) {
    while (*keys) {
        const size_t length = strcspn(keys, " ");
        int i;
        snprintf(key, size, "%.*s", (int)length, keys);
        for (i = 0; i < 3; i++) {
            const cJSON *found = cJSON_GetObjectItemCaseSensitive(c->objects[i], key);
            if (found && !cJSON_IsNull(found)) return found;
        }
        keys += length + (keys[length] == ' ');
    }
    return NULL;
}

static void config_count(const config *c, const char *keys, uint32_t *target) {
    char key[64];
    const cJSON *found = config_find(c, keys, key, sizeof key);
    if (!found || *target) return;
    if (cJSON_IsArray(found)) { /* a number for each layer, or for each modality */
        const cJSON *first = cJSON_GetArrayItem(found, 0), *other;
        cJSON_ArrayForEach(other, found) if (!cJSON_Compare(first, other, 1))
            stop(STATUS_FILE, "%s: %s differs from layer to layer; give the layer's own by its option", c->path, key);
        found = first;
    }
    if (!cJSON_IsNumber(found) || !(found->valuedouble >= 0 && found->valuedouble <= 4294967295.0) ||
        floor(found->valuedouble) != found->valuedouble)
        stop(STATUS_FILE, "%s: %s isn't a whole number from 0 to 4294967295", c->path, key);
    *target = (uint32_t)found->valuedouble;
}

static void config_real(const config *c, const char *keys, float *target) {
    char key[64];
    const cJSON *found = config_find(c, keys, key, sizeof key);
    if (!found || *target != 0) return;
    if (!cJSON_IsNumber(found) || !(fabs(found->valuedouble) <= 3e38)) stop(STATUS_FILE, "%s: %s isn't a number", c->path, key);
    *target = (float)found->valuedouble;
}

static const char *config_text(const config *c, const char *keys) {
    char key[64];
    const cJSON *found = config_find(c, keys, key, sizeof key);
    if (!found) return NULL;
    if (!cJSON_IsString(found)) stop(STATUS_FILE, "%s: %s isn't a text", c->path, key);
    return found->valuestring;
}

static int config_dtype(const char *text) {
    if (!text) return 0;
    if (strstr(text, "bfloat16")) return MOE_ROUTE_BF16;
    if (strstr(text, "float16")) return MOE_ROUTE_F16;
    return strstr(text, "float32") ? MOE_ROUTE_F32 : 0;
}

/* Fills in what the options leave open. The parsed file is kept: texts of it are in use until the program ends. */
static void config_apply(layer_options *o) {
    static cJSON *root;
    config c;
    size_t length;
    char *text = config_read(o->config, &length), key[64];
    const cJSON *norm;
    root = cJSON_ParseWithLength(text, length);
    free(text);
    if (!cJSON_IsObject(root)) stop(STATUS_FILE, "%s is no JSON object", o->config);
    memset(&c, 0, sizeof c);
    c.path = o->config;
    c.objects[0] = cJSON_GetObjectItemCaseSensitive(root, "text_config");
    if (!cJSON_IsObject(c.objects[0])) c.objects[0] = cJSON_GetObjectItemCaseSensitive(root, "ffn_config"); /* DBRX */
    if (!cJSON_IsObject(c.objects[0])) c.objects[0] = NULL;
    c.objects[1] = root;
    c.objects[2] = NULL;
    if (!o->model_type) o->model_type = config_text(&c, "model_type");
    if (!o->model_type) stop(STATUS_FILE, "%s has no model_type, and --model isn't given", o->config);
    config_count(&c, "num_experts num_local_experts n_routed_experts moe_num_experts", &o->model.num_experts);
    config_count(&c, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k", &o->model.top_k);
    if (!config_text(&c, "topk_method") || strcmp(config_text(&c, "topk_method"), "greedy") != 0) {
        config_count(&c, "n_group num_expert_group router_n_groups", &o->model.num_groups);
        config_count(&c, "topk_group", &o->model.topk_groups);
    }
    config_count(&c, "n_shared_experts", &o->model.num_shared_experts);
    config_count(&c, "zero_expert_num", &o->model.num_zero_experts);
    config_count(&c, "moe_latent_size hidden_size d_model", &o->model.hidden_size);
    config_count(&c, "moe_intermediate_size intermediate_size ffn_hidden_size", &o->model.intermediate_size);
    config_real(&c, "routed_scaling_factor route_scale router_scaling_factor moe_router_scaling_factor moe_routed_scaling_factor",
                &o->model.scale);
    config_real(&c, "moe_router_logit_softcapping", &o->model.softcap);
    config_real(&c, "moe_norm_min", &o->model.norm_min);
    config_real(&c, "router_jitter_noise", &o->model.jitter);
    config_real(&c, "swiglu_limit", &o->model.swiglu_limit);
    if (!o->scoring_func) o->scoring_func = config_text(&c, "scoring_func expert_selection_fn");
    norm = config_find(&c, "norm_topk_prob moe_renormalize", key, sizeof key);
    if (norm && !o->norm_topk_prob) {
        if (!cJSON_IsBool(norm)) stop(STATUS_FILE, "%s: %s is neither true nor false", c.path, key);
        o->norm_topk_prob = cJSON_IsTrue(norm) ? MOE_ROUTE_ON : MOE_ROUTE_OFF;
    }
    if (!o->dtype) o->dtype = config_dtype(config_text(&c, "dtype torch_dtype"));
}
#else
static void config_apply(layer_options *o) {
    stop(STATUS_USAGE,
         "--config %s: this moe_route was built without cJSON (libcjson-dev), which reads JSON; give the numbers by --model, "
         "--experts, --top-k, ...",
         o->config);
}
#endif

#endif /* CONFIG_H */
