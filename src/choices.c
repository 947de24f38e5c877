/*
  choices.c: which of several kernels with the same result a layer launches at each number of tokens: by rules that need no GPU
  (layer.c), by the description, or by what was measured on this GPU. Keeping such results and finding them again is here,
  measuring is tune.c's.

  Results lie in the context, and in the cache beside the cubins, under a key with the GPU's name and all that decides how long
  the kernels take. Like a cubin, a result that is damaged or missing is never an error. Choices change no bit of any output.
*/
#include "internal.h"

#define MOER_TUNING_HEAD (sizeof MOER_TUNING_MAGIC - 1)
#define MOER_TUNING_SIZE (MOER_TUNING_HEAD + sizeof(moer_choice[MOER_CHOICES]))

static const moer_choice *moer_layer_choice(const moe_route_layer *layer, uint32_t num_tokens) {
    uint32_t i = 0;
    while (i + 1 < MOER_CHOICES && 1u << i < num_tokens) i++;
    return &layer->choices[i];
}

static int moer_choice_range(const moe_route_layer *layer, uint32_t i, int large, uint32_t *least, uint32_t *most) {
    const uint32_t small = MOER_SMALL_PAIRS / layer->router.top_k; /* the most tokens with few pairs */
    *least = (i == 0 ? 0 : 1u << (i - 1)) + 1;
    *most = 1u << i;
    if (*most > layer->max_tokens) *most = layer->max_tokens;
    if (large && *least <= small) *least = small + 1;
    if (!large && *most > small) *most = small;
    return *least <= *most;
}

/* ---- what a layer makes of its choices ---- */

/* Rows of an expert on average decide: a tile of many is efficient where they fill it, and one of few leaves room for more blocks. */
static uint32_t moer_grouped_tile(const moe_route_layer *layer, uint32_t num_pairs) {
    const uint32_t num_local = layer->router.num_local_experts, rows = num_local == 0 ? 0 : num_pairs / num_local;
    const uint32_t chosen = moer_layer_choice(layer, num_pairs / layer->router.top_k)->tile_rows;
    if (chosen != 0) return chosen / 64; /* 32, 64, 128 */
    return rows <= 16 ? 0 : rows <= 40 ? 1 : 2;
}

/* Whether a batch of up to max_tokens tokens meets a size of tiles, which grows with the rows of an expert, or is one for all of a choice. */
static int moer_layer_meets_tile(const moe_route_layer *layer, uint32_t tile) {
    uint32_t i, least, most;
    for (i = 0; i < MOER_CHOICES; i++)
        if (moer_choice_range(layer, i, 1, &least, &most) && moer_layer_runs_grouped(layer, most * layer->router.top_k) &&
            moer_grouped_tile(layer, least * layer->router.top_k) <= tile && tile <= moer_grouped_tile(layer, most * layer->router.top_k))
            return 1;
    return 0;
}

static int moer_layer_fuses(const moe_route_layer *layer, uint32_t num_pairs) {
    return layer->fused_combine && num_pairs <= MOER_SMALL_PAIRS && !moer_layer_choice(layer, num_pairs / layer->router.top_k)->separate;
}

/* Whether some batch of few pairs goes through down.cu, or not through it. */
static int moer_layer_meets_fused(const moe_route_layer *layer, int fused) {
    uint32_t i, least, most;
    for (i = 0; i < MOER_CHOICES; i++)
        if (moer_choice_range(layer, i, 0, &least, &most) && moer_layer_fuses(layer, most * layer->router.top_k) == fused) return 1;
    return 0;
}

/* ---- what is kept ---- */

/* Of what decides how long the kernels take, but for where the weights lie: what is found with one layer's is good for all. */
static int moer_tuning_key(const moe_route_layer *layer, moer_key *key) {
    char defines[MOER_DEFINES_MAX] = "DEVICE=";
    size_t length = strlen(defines);
    moe_route_layer anywhere = *layer;
    const char *name;
    anywhere.gate_up.data = anywhere.gate_up.scales = anywhere.up.data = anywhere.up.scales = anywhere.down.data = anywhere.down.scales = 0;
    for (name = layer->context->name; *name != '\0' && length < 64; name++) {
        const char c = *name;
        defines[length++] = (char)((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' || c == '-' ? c : '_');
    }
    defines[length] = '\0';
    moer_define(defines, "MULTIPROCESSORS", layer->context->num_multiprocessors);
    moer_define(defines, "DEPENDENT", (unsigned long)layer->dependent);
    moer_define(defines, "E", layer->router.given_physical ? layer->router.num_physical_experts : layer->router.num_experts);
    moer_define(defines, "LOCAL_EXPERTS", layer->router.num_local_experts);
    moer_define(defines, "MAX_TOKENS", layer->max_tokens);
    moer_define(defines, "PARTS", layer->down_parts);
    moer_define(defines, "GATED", (unsigned long)layer->gated);
    moer_define(defines, "UP_APART", layer->up.format != MOE_ROUTE_FORMAT_NONE);
    moer_define_tile(defines, &anywhere, &anywhere.gate_up);
    moer_define_tile(defines, &anywhere, &anywhere.down);
    return defines[0] == 'D' /* all of it fitted */ && moer_key_make(key, "tuning", defines, layer->context->target);
}

static void moer_tuning_write(const moer_choice *choices, unsigned char payload[MOER_TUNING_SIZE]) {
    unsigned char *at = payload + MOER_TUNING_HEAD;
    uint32_t i;
    memcpy(payload, MOER_TUNING_MAGIC, MOER_TUNING_HEAD);
    for (i = 0; i < MOER_CHOICES; i++) {
        *at++ = choices[i].separate;
        *at++ = choices[i].tile_rows;
    }
}

/* 0: it isn't what moer_tuning_write writes. */
static int moer_tuning_read(const unsigned char *payload, size_t size, moer_choice *choices) {
    const unsigned char *at = payload + MOER_TUNING_HEAD;
    uint32_t i;
    if (size != MOER_TUNING_SIZE) return 0;
    for (i = 0; i < MOER_CHOICES; i++) {
        choices[i].separate = *at++;
        choices[i].tile_rows = *at++;
        if (choices[i].separate > 1) return 0;
        if (choices[i].tile_rows != 0 && choices[i].tile_rows != 32 && choices[i].tile_rows != 64 && choices[i].tile_rows != 128) return 0;
    }
    return 1;
}

static int moer_tuning_in_folders(moe_route_context *context, const moer_key *key, moer_choice *choices) {
    moer_lookup lookup;
    int sound = 0;
    memset(&lookup, 0, sizeof lookup);
    lookup.key = *key;
    lookup.is_tuning = 1;
    while (!sound && moer_lookup_in_folders(context, &lookup, 0)) {
        sound = moer_tuning_read(lookup.entry.payload, lookup.entry.payload_size, choices);
        moer_free(context, lookup.bytes.data);
        if (!sound) moer_lookup_reject(context, "what tuning kept for a layer", "it has choices that there aren't");
    }
    return sound;
}

/* What this process measured; the mutex is held. */
static moer_tuning *moer_tuning_in_memory(moe_route_context *context, const moer_key *key) {
    moer_tuning *tuning;
    for (tuning = context->tunings; tuning != NULL; tuning = tuning->next)
        if (memcmp(tuning->digest, key->digest, 32) == 0) return tuning;
    return NULL;
}

static int moer_tuning_find(const moe_route_layer *layer, moer_choice *choices) {
    moe_route_context *context = layer->context;
    moer_choice kept[MOER_CHOICES];
    const moer_tuning *tuning;
    moer_key key;
    if (!moer_tuning_key(layer, &key)) return 0;
    moer_mutex_lock(&context->mutex);
    tuning = moer_tuning_in_memory(context, &key);
    if (tuning != NULL) memcpy(kept, tuning->choices, sizeof kept);
    moer_mutex_unlock(&context->mutex);
    if (tuning == NULL && !moer_tuning_in_folders(context, &key, kept)) return 0;
    if (choices != NULL) memcpy(choices, kept, sizeof kept);
    return 1;
}

static moe_route_status moer_tuning_keep(const moe_route_layer *layer, const moer_choice *choices) {
    moe_route_context *context = layer->context;
    unsigned char text[MOER_TUNING_SIZE];
    moer_bytes payload, entry;
    moer_lookup *lookup = (moer_lookup *)moer_alloc(context, sizeof *lookup);
    moer_tuning *tuning = (moer_tuning *)moer_alloc(context, sizeof *tuning), *known;
    if (lookup == NULL || tuning == NULL || !moer_tuning_key(layer, &lookup->key)) {
        moer_free(context, lookup);
        moer_free(context, tuning);
        return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for what tuning found");
    }
    memcpy(tuning->digest, lookup->key.digest, 32);
    memcpy(tuning->choices, choices, sizeof tuning->choices);
    moer_mutex_lock(&context->mutex);
    known = moer_tuning_in_memory(context, &lookup->key);
    if (known != NULL) {
        memcpy(known->choices, choices, sizeof known->choices);
    } else {
        tuning->next = context->tunings;
        context->tunings = tuning;
    }
    moer_mutex_unlock(&context->mutex);
    if (known != NULL) moer_free(context, tuning);

    /* A folder in the entry's place is no reason to write nothing any more. */
    moer_cache_path(context->cache.folder, lookup->key.digest, 1, lookup->path, sizeof lookup->path);
    lookup->blocked = moer_path_inspect(lookup->path) == MOER_PATH_FOLDER;
    moer_tuning_write(choices, text);
    payload.data = text;
    payload.size = sizeof text;
    entry = moer_entry_make(context, &lookup->key, &payload);
    if (entry.data != NULL) moer_cache_store(context, lookup, &entry);
    moer_free(context, entry.data);
    moer_free(context, lookup);
    return MOE_ROUTE_OK;
}

static void moer_tunings_destroy(moe_route_context *context) {
    while (context->tunings != NULL) {
        moer_tuning *tuning = context->tunings;
        context->tunings = tuning->next;
        moer_free(context, tuning);
    }
}

/* ---- of a layer ---- */

static moe_route_status moer_layer_choose(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    moe_route_context *context = layer->context;
    const int has_choices = layer->gate_up.format != MOE_ROUTE_FORMAT_NONE && layer->down.format != MOE_ROUTE_FORMAT_NONE;
    uint32_t i;
    if (desc->tuned < MOE_ROUTE_AUTO || desc->tuned > MOE_ROUTE_OFF) return moer_refuse(context, "tuned", (unsigned long long)desc->tuned, "AUTO (0), ON (1) or OFF (2)");
    if (desc->grouped_rows != 0 && desc->grouped_rows != 32 && desc->grouped_rows != 64 && desc->grouped_rows != 128)
        return moer_refuse(context, "grouped_rows", desc->grouped_rows, "32, 64 or 128, or 0 for a choice by the rows of an expert");
    if (desc->tuned != MOE_ROUTE_OFF && context->device == MOE_ROUTE_DEVICE_GPU && has_choices) layer->tuned = moer_tuning_find(layer, layer->choices);
    if (desc->tuned == MOE_ROUTE_ON && !layer->tuned && context->device == MOE_ROUTE_DEVICE_GPU && has_choices)
        return moer_fail(context, MOE_ROUTE_ERROR_NOT_PREPARED, "layer: tuned is ON, and nothing is kept for this layer on this GPU: call moe_route_layer_tune before");
    layer->may_separate = desc->tuned != MOE_ROUTE_OFF && desc->fused_combine == MOE_ROUTE_AUTO; /* found or not: no size depends on that */
    for (i = 0; i < MOER_CHOICES; i++) {
        if (desc->grouped_rows != 0) layer->choices[i].tile_rows = (unsigned char)desc->grouped_rows;
        if (desc->fused_combine != MOE_ROUTE_AUTO) layer->choices[i].separate = 0;
    }
    return MOE_ROUTE_OK;
}
