/*
  layer_tensors.h: the tensors of one MoE layer of a checkpoint, found by the names that models give them, gathered on the host in
  the arrays that a moe_route_layer_desc asks for. Experts that a checkpoint holds one by one become one array; formats stay what
  they are, but for what is stored transposed. Include moe_route.h first.

  What can't be used is refused with a message that names the tensor, its type and its shape. Sizes come from the file and are
  checked against the file: each tensor must have exactly the shape that the router and the other tensors imply.
*/
#ifndef LAYER_TENSORS_H
#define LAYER_TENSORS_H

#include "checkpoint.h"
#include "quantize.h"

#define LAYER_MAX_NAME 512

typedef struct layer_array {
    void *data;  /* NULL: there is none */
    size_t size; /* bytes */
} layer_array;

typedef struct layer_matrix {
    moe_route_weights weights; /* without addresses; FORMAT_NONE where the layer has no such matrix */
    uint32_t rows, inner;      /* N, K */
    layer_array data, scales, zero_points, global_scales, bias;
    char text[320];            /* what it was made of */
} layer_matrix;

typedef struct layer_tensors {
    checkpoint *from;
    char module[LAYER_MAX_NAME];  /* what the names of the MoE module begin with */
    char experts[LAYER_MAX_NAME]; /* those of its experts' tensors */
    const checkpoint_tensor *router;
    uint32_t num_logits, hidden_size, intermediate_size;
    uint32_t num_experts;         /* that have weights */
    const char *gate, *up, *down; /* names of the projections; gate NULL: without gate, or up holds both; up NULL: gate holds both */
    int per_expert;               /* tensors of single experts */
    int transposed;               /* [E, K, N] */
    layer_matrix gate_up, up_matrix, down_matrix;
    layer_array router_weight;    /* f32 [num_logits, H] */
    layer_array logit_bias, selection_bias, expert_scale; /* f32 */
    layer_array id_table;         /* int32 [rows, k] */
    uint32_t id_table_rows;
    layer_array router_scale;     /* f32 [H], where the router's input is normalised and scaled (Gemma-4) */
} layer_tensors;

#define LAYER_FAIL(l, ...) checkpoint_fail((l)->from, __VA_ARGS__)

/* "TENSOR is TYPE [SHAPE]", then why that can't be used. */
static int layer_refuse(layer_tensors *l, const checkpoint_tensor *tensor, const char *why) {
    char text[160];
    return LAYER_FAIL(l, "%.200s is %s: %s", tensor->name, checkpoint_describe(tensor, text, sizeof text), why);
}

static void *layer_alloc(layer_tensors *l, layer_array *array, uint64_t count, uint64_t element_size) {
    array->data = NULL;
    array->size = 0;
    if (count <= SIZE_MAX / 2 / element_size) array->data = calloc(count ? (size_t)count : 1, (size_t)element_size);
    if (array->data) array->size = (size_t)(count * element_size);
    else LAYER_FAIL(l, "out of memory: %llu numbers", (unsigned long long)count);
    return array->data;
}

static void layer_free(layer_array *array) {
    free(array->data);
    memset(array, 0, sizeof *array);
}

static int layer_is(const checkpoint_tensor *tensor, const char *types) { /* separated by spaces */
    const size_t length = strlen(tensor->type);
    const char *at = strstr(types, tensor->type);
    for (; at; at = strstr(at + 1, tensor->type))
        if ((at == types || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0)) return 1;
    return 0;
}

static uint64_t layer_count(const checkpoint_tensor *tensor) { /* elements; a size that the file's reader checked */
    uint64_t count = 1;
    uint32_t d;
    for (d = 0; d < tensor->rank; d++) count *= tensor->shape[d];
    return count;
}

/* The same dimensions, those of 1 aside. */
static int layer_has_shape(const checkpoint_tensor *tensor, const uint64_t *shape, uint32_t rank) {
    uint32_t d = 0, s = 0;
    for (;;) {
        while (d < tensor->rank && tensor->shape[d] == 1) d++;
        while (s < rank && shape[s] == 1) s++;
        if (d == tensor->rank || s == rank) return d == tensor->rank && s == rank;
        if (tensor->shape[d++] != shape[s++]) return 0;
    }
}

/* ---- names ---- */

static const checkpoint_tensor *layer_find(const layer_tensors *l, const char *prefix, const char *rest) {
    char name[2 * LAYER_MAX_NAME];
    if (snprintf(name, sizeof name, "%s%s", prefix, rest) >= (int)sizeof name) return NULL;
    return checkpoint_find(l->from, name);
}

/* A tensor of a projection, by what checkpoints call it ("weight", "weight_scale"): of expert e, or of all. */
static const checkpoint_tensor *layer_parameter(const layer_tensors *l, const char *projection, uint32_t e, const char *parameter) {
    char rest[256];
    const checkpoint_tensor *found;
    const char *joint;
    if (l->per_expert) {
        snprintf(rest, sizeof rest, "%u.%s.%s", (unsigned)e, projection, parameter);
        found = layer_find(l, l->experts, rest);
        if (found || !l->from->is_gguf) return found;
        snprintf(rest, sizeof rest, "%s.%u.%s", projection, (unsigned)e, parameter); /* as GGUF files had them in 2023 */
        return layer_find(l, l->experts, rest);
    }
    for (joint = "._"; *joint; joint++) {
        snprintf(rest, sizeof rest, "%s%c%s", projection, *joint, parameter);
        if ((found = layer_find(l, l->experts, rest)) != NULL) return found;
    }
    return strcmp(parameter, "weight") == 0 ? layer_find(l, l->experts, projection) : NULL;
}

/* The first of several names, separated by spaces, that a projection has for its codes. */
static const checkpoint_tensor *layer_codes(const layer_tensors *l, const char *projection) {
    static const char *const names[] = {"weight", "weight_packed", "blocks", "qweight"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        const checkpoint_tensor *found = layer_parameter(l, projection, 0, names[i]);
        if (found) return found;
    }
    return NULL;
}

static int layer_has(layer_tensors *l, int per_expert, const char *gate, const char *up, const char *down) {
    l->per_expert = per_expert;
    l->gate = gate;
    l->up = up;
    l->down = down;
    return (!gate || layer_codes(l, gate)) && (!up || layer_codes(l, up)) && layer_codes(l, down);
}

/* How models call their projections. */
static int layer_find_projections(layer_tensors *l) {
    static const struct { int per_expert; const char *gate, *up, *down; } names[] = {
        {1, "gate_proj", "up_proj", "down_proj"}, {1, "w1", "w3", "w2"}, {0, "gate_up_proj", NULL, "down_proj"},
        {0, "gate_proj", "up_proj", "down_proj"}, {0, "input_linear", NULL, "output_linear"}, {0, "mlp.w1", "mlp.v1", "mlp.w2"},
        {0, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}, {0, "ffn_gate_up_exps", NULL, "ffn_down_exps"}, {1, "ffn_gate", "ffn_up", "ffn_down"},
        /* without gate */
        {1, NULL, "up_proj", "down_proj"}, {0, NULL, "up_proj", "down_proj"}, {0, NULL, "ffn_up_exps", "ffn_down_exps"}};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        if (layer_has(l, names[i].per_expert, names[i].gate, names[i].up, names[i].down)) return 1;
    return LAYER_FAIL(l, "the experts' projections aren't known by their names: there is no %.300s0.gate_proj.weight, gate_up_proj, w1, ...", l->experts);
}

/* Where a name's part ends that belongs to all experts: behind a component "experts", or before a fused projection's. */
static size_t layer_experts_end(const char *name, const char *rest, size_t *module_end) {
    static const char *const fused[] = {"input_linear.weight", "moe.gate_proj.weight", "moe.up_proj.weight"};
    const char *at = rest;
    size_t i;
    while (at) {
        const size_t length = strcspn(at, ".");
        if (length == 7 && strncmp(at, "experts", 7) == 0 && at[length] == '.') {
            *module_end = (size_t)(at - name);
            return (size_t)(at - name) + 8;
        }
        at = at[length] == '.' ? at + length + 1 : NULL;
    }
    for (i = 0; i < 3; i++)
        if (checkpoint_ends(name, fused[i])) return *module_end = strlen(name) - strlen(fused[i]) + (i ? 4 : 0);
    return 0;
}

/* The MoE module of the layer; there must be one. */
static int layer_find_module(layer_tensors *l, uint32_t layer) {
    size_t i;
    if (l->from->is_gguf) {
        snprintf(l->module, sizeof l->module, "blk.%u.", (unsigned)layer);
        snprintf(l->experts, sizeof l->experts, "blk.%u.", (unsigned)layer);
        return 1;
    }
    for (i = 0; i < l->from->num_tensors; i++) {
        const char *name = l->from->tensors[i].name;
        size_t module_end = 0;
        const size_t end = layer_experts_end(name, checkpoint_in_layer(name, layer), &module_end);
        if (end == 0) continue;
        if (end >= LAYER_MAX_NAME) return LAYER_FAIL(l, "%.200s...: a name is too long", name);
        if (l->experts[0] && (strlen(l->experts) != end || strncmp(l->experts, name, end) != 0)) {
            return LAYER_FAIL(l, "there are experts under %.200s and under %.*s: --prefix can choose", l->experts, (int)(end > 200 ? 200 : end), name);
        }
        snprintf(l->experts, sizeof l->experts, "%.*s", (int)end, name);
        snprintf(l->module, sizeof l->module, "%.*s", (int)module_end, name);
    }
    return l->experts[0] ? 1 : LAYER_FAIL(l, "layer %u has no experts in this checkpoint", (unsigned)layer);
}

static int layer_find_router(layer_tensors *l) {
    static const char *const names[] = {"ffn_gate_inp.weight", "gate.weight", "router.weight", "gate.wg.weight", "router.gate.weight", "router.layer.weight",
                                        "router.classifier.weight", "router.proj.weight", "router.linear.weight"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0] && !l->router; i++) l->router = layer_find(l, l->module, names[i]);
    if (!l->router) return LAYER_FAIL(l, "the layer has no router under a name that is known, such as %.200s%s", l->module, l->from->is_gguf ? "ffn_gate_inp.weight" : "gate.weight");
    if (l->router->rank != 2 || !layer_is(l->router, "F32 F16 BF16")) return layer_refuse(l, l->router, "a router is [experts, hidden size] of F32, F16 or BF16");
    if (l->router->shape[0] < 1 || l->router->shape[0] > 4096 || l->router->shape[1] < 1 || l->router->shape[1] > 65536) return layer_refuse(l, l->router, "too many or too few experts or inputs");
    l->num_logits = (uint32_t)l->router->shape[0];
    l->hidden_size = (uint32_t)l->router->shape[1];
    return 1;
}

/* The one tensor of the module whose name ends so; NULL when there is none. */
static const checkpoint_tensor *layer_find_ending(const layer_tensors *l, const char *const *endings, size_t count) {
    size_t i, j;
    for (j = 0; j < count; j++)
        for (i = 0; i < l->from->num_tensors; i++) {
            const char *name = l->from->tensors[i].name;
            if (strncmp(name, l->module, strlen(l->module)) == 0 && checkpoint_ends(name, endings[j])) return &l->from->tensors[i];
        }
    return NULL;
}

/* ---- numbers ---- */

/* Numbers of any type that stands for floats, as f32. */
static int layer_floats(layer_tensors *l, const checkpoint_tensor *tensor, uint64_t count, float *to) {
    void *raw;
    uint64_t i;
    int done = 1;
    if (!layer_is(tensor, "F32 F16 BF16 F8_E8M0")) return layer_refuse(l, tensor, "F32, F16 or BF16 is expected");
    if (layer_count(tensor) != count) return LAYER_FAIL(l, "%.200s has %llu numbers instead of %llu", tensor->name, (unsigned long long)layer_count(tensor), (unsigned long long)count);
    raw = malloc(tensor->size ? (size_t)tensor->size : 1);
    if (!raw) return LAYER_FAIL(l, "out of memory");
    if (!checkpoint_read(l->from, tensor, raw, 0, (size_t)tensor->size)) done = 0;
    for (i = 0; i < count && done; i++) {
        if (strcmp(tensor->type, "F8_E8M0") == 0) to[i] = (float)ldexp(1.0, ((const unsigned char *)raw)[i] - 127);
        else to[i] = quantize_load(raw, strcmp(tensor->type, "F32") == 0 ? QUANTIZE_F32 : strcmp(tensor->type, "F16") == 0 ? QUANTIZE_F16 : QUANTIZE_BF16, (size_t)i);
    }
    free(raw);
    return done;
}

static int layer_vector(layer_tensors *l, const checkpoint_tensor *tensor, uint64_t count, layer_array *to) {
    return layer_alloc(l, to, count, sizeof(float)) && layer_floats(l, tensor, count, (float *)to->data);
}

static moe_route_dtype layer_dtype(const checkpoint_tensor *tensor) {
    return strcmp(tensor->type, "F32") == 0 ? MOE_ROUTE_F32 : strcmp(tensor->type, "F16") == 0 ? MOE_ROUTE_F16 : strcmp(tensor->type, "BF16") == 0 ? MOE_ROUTE_BF16 : MOE_ROUTE_DTYPE_DEFAULT;
}

/* The bytes of a parameter of all experts, one after the other; each must have the first one's type and this shape. */
static int layer_gather(layer_tensors *l, const char *projection, const char *parameter, uint64_t d0, uint64_t d1, uint64_t d2, layer_array *to) {
    const checkpoint_tensor *first = layer_parameter(l, projection, 0, parameter);
    const uint32_t count = l->per_expert ? l->num_experts : 1;
    uint64_t shape[4], size;
    uint32_t e;
    shape[0] = l->per_expert ? 1 : l->num_experts;
    shape[1] = d0;
    shape[2] = d1;
    shape[3] = d2;
    if (!first) return LAYER_FAIL(l, "%.200s: its %s has no %s", l->experts, projection, parameter);
    size = first->size;
    if (!layer_alloc(l, to, count, size ? size : 1)) return 0;
    for (e = 0; e < count; e++) {
        const checkpoint_tensor *tensor = layer_parameter(l, projection, e, parameter);
        const uint64_t flat[2] = {shape[0] * d0, d1 * d2}; /* DBRX has the experts' rows one after the other */
        if (!tensor) return LAYER_FAIL(l, "%.200s: expert %u of %u has no %s.%s", l->experts, (unsigned)e, (unsigned)count, projection, parameter);
        if (!layer_has_shape(tensor, shape, 4) && !layer_has_shape(tensor, flat, 2)) {
            char why[128];
            snprintf(why, sizeof why, "the others imply [%u, %llu, %llu, %llu]", l->per_expert ? 1u : (unsigned)l->num_experts, (unsigned long long)d0, (unsigned long long)d1, (unsigned long long)d2);
            return layer_refuse(l, tensor, why);
        }
        if (strcmp(tensor->type, first->type) != 0 || tensor->size != size) return layer_refuse(l, tensor, "another type than the first expert's");
        if (!checkpoint_read(l->from, tensor, (char *)to->data + e * size, 0, (size_t)size)) return 0;
    }
    return 1;
}

/* The same as f32, with `per_expert` numbers an expert; reciprocals on request. */
static int layer_gather_floats(layer_tensors *l, const char *projection, const char *parameter, uint64_t per_expert, int reciprocal, layer_array *to) {
    const uint32_t count = l->per_expert ? l->num_experts : 1;
    uint32_t e;
    size_t i;
    if (!layer_alloc(l, to, l->num_experts * per_expert, sizeof(float))) return 0;
    for (e = 0; e < count; e++) {
        const checkpoint_tensor *tensor = layer_parameter(l, projection, e, parameter);
        if (!tensor) return LAYER_FAIL(l, "%.200s: expert %u of %u has no %s.%s", l->experts, (unsigned)e, (unsigned)count, projection, parameter);
        if (!layer_floats(l, tensor, l->num_experts / count * per_expert, (float *)to->data + e * per_expert)) return 0;
    }
    for (i = 0; i < to->size / sizeof(float) && reciprocal; i++) ((float *)to->data)[i] = 1.0f / ((float *)to->data)[i];
    return 1;
}

/* ---- one matrix in its format ---- */

/* Inputs that share a scale, when there are `groups` of them to a row; 0 for one. */
static int layer_group_size(layer_tensors *l, const checkpoint_tensor *scales, uint32_t inner, uint64_t groups, uint32_t *group_size) {
    static const uint32_t sizes[] = {32, 64, 128, 16};
    int i;
    *group_size = 0;
    if (groups == 1) return 1;
    for (i = 0; i < 4 && !*group_size; i++)
        if ((inner - 1) / sizes[i] + 1 == groups) *group_size = sizes[i];
    return *group_size ? 1 : layer_refuse(l, scales, "its columns are no groups of 16, 32, 64 or 128 inputs");
}

/* A scale a row from one for the whole matrix. */
static int layer_spread(layer_tensors *l, layer_array *scales, uint32_t rows) {
    layer_array spread;
    size_t i;
    if (!layer_alloc(l, &spread, (uint64_t)l->num_experts * rows, sizeof(float))) return 0;
    for (i = 0; i < (size_t)l->num_experts * rows; i++) ((float *)spread.data)[i] = ((const float *)scales->data)[i / rows];
    layer_free(scales);
    *scales = spread;
    return 1;
}

/* INT8 and FP8, a byte a weight: scales by 128 x 128, by row, by group, or one. */
static int layer_load_bytes(layer_tensors *l, const char *projection, moe_route_format format, layer_matrix *m) {
    static const char *const names[] = {"weight_scale_inv", "weight_scale", "scale_inv", "scale"};
    const checkpoint_tensor *scale = NULL;
    const uint64_t blocks[2] = {(m->rows - 1) / 128 + 1, (m->inner - 1) / 128 + 1};
    uint64_t count;
    size_t i = 0;
    while (i < 4 && (scale = layer_parameter(l, projection, 0, names[i])) == NULL) i++;
    if (!scale) return LAYER_FAIL(l, "%.200s: %s has 8-bit weights and no scales by a name that is known, such as weight_scale_inv", l->experts, projection);
    count = layer_count(scale) / (l->per_expert ? 1 : l->num_experts);
    m->weights.format = format;
    m->weights.scales_dtype = layer_dtype(scale);
    if (!layer_gather(l, projection, "weight", m->rows, m->inner, 1, &m->data)) return 0;
    if (count == 1) { /* one for the matrix */
        m->weights.scales_dtype = MOE_ROUTE_F32;
        return layer_gather_floats(l, projection, names[i], 1, 0, &m->scales) && layer_spread(l, &m->scales, m->rows);
    }
    if (count != m->rows && format == MOE_ROUTE_FORMAT_FP8 && count == blocks[0] * blocks[1]) {
        const cJSON *quantization = config_find(config_text_part(l->from->config), "quantization_config");
        const cJSON *size = config_find(quantization ? quantization : config_find(l->from->config, "quantization_config"), "weight_block_size"), *item;
        cJSON_ArrayForEach(item, size)
            if (!cJSON_IsNumber(item) || item->valuedouble != 128) return LAYER_FAIL(l, "quantization_config.weight_block_size isn't [128, 128]");
        m->weights.group_size = m->weights.group_rows = 128;
        if (m->weights.scales_dtype == MOE_ROUTE_DTYPE_DEFAULT) { /* E8M0: powers of two */
            m->weights.scales_dtype = MOE_ROUTE_F32;
            return layer_gather_floats(l, projection, names[i], count, 0, &m->scales);
        }
        return layer_gather(l, projection, names[i], blocks[0], blocks[1], 1, &m->scales);
    }
    if (m->weights.scales_dtype == MOE_ROUTE_DTYPE_DEFAULT || count % m->rows) return layer_refuse(l, scale, "scales are F32, F16 or BF16, by 128 x 128, by row, by group of a row, or one");
    if (!layer_group_size(l, scale, m->inner, count / m->rows, &m->weights.group_size)) return 0;
    if (format == MOE_ROUTE_FORMAT_FP8 && m->weights.group_size % 128) return layer_refuse(l, scale, "FP8 has a scale for 128 inputs, or for a row");
    return layer_gather(l, projection, names[i], m->rows, count / m->rows, 1, &m->scales);
}

/* compressed-tensors' zero points: int32 [N / 8, G], 4 bits each along N; the library's: bytes [N, ceil(G / 2)]. */
static int layer_load_packed_zero_points(layer_tensors *l, const char *projection, uint32_t groups, layer_matrix *m) {
    layer_array words;
    const size_t row_bytes = (groups + 1) / 2;
    uint32_t e, n, g;
    int done;
    memset(&words, 0, sizeof words);
    if (m->weights.format != MOE_ROUTE_FORMAT_INT4 || m->rows % 8) return LAYER_FAIL(l, "%.200s: the zero points of %s are packed in a way that isn't known", l->experts, projection);
    done = layer_gather(l, projection, "weight_zero_point", m->rows / 8, groups, 1, &words) && layer_alloc(l, &m->zero_points, (uint64_t)l->num_experts * m->rows, row_bytes);
    if (done && words.size != (size_t)l->num_experts * m->rows / 8 * groups * 4) done = LAYER_FAIL(l, "%.200s: the zero points of %s aren't I32", l->experts, projection);
    for (e = 0; e < l->num_experts && done; e++)
        for (n = 0; n < m->rows; n++)
            for (g = 0; g < groups; g++) {
                const uint32_t word = ((const uint32_t *)words.data)[((size_t)e * (m->rows / 8) + n / 8) * groups + g];
                unsigned char *byte = (unsigned char *)m->zero_points.data + ((size_t)e * m->rows + n) * row_bytes + g / 2;
                *byte = (unsigned char)(*byte | (word >> n % 8 * 4 & 15u) << g % 2 * 4);
            }
    layer_free(&words);
    return done;
}

/* compressed-tensors' pack-quantized: int32 [N, K / 8] or [N, K / 4], codes without sign. */
static int layer_load_packed(layer_tensors *l, const char *projection, const checkpoint_tensor *codes, layer_matrix *m) {
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, "weight_scale");
    const uint64_t columns = codes->shape[codes->rank - 1];
    uint64_t groups;
    if (columns * 8 == m->inner) m->weights.format = MOE_ROUTE_FORMAT_INT4;
    else if (columns * 4 == m->inner) m->weights.format = MOE_ROUTE_FORMAT_INT8;
    else return layer_refuse(l, codes, "words of 4 or 8 bits for each input are expected");
    if (!scale || layer_dtype(scale) == MOE_ROUTE_DTYPE_DEFAULT) return scale ? layer_refuse(l, scale, "scales are F32, F16 or BF16") : LAYER_FAIL(l, "%.200s: its %s has no weight_scale", l->experts, projection);
    if (layer_parameter(l, projection, 0, "weight_g_idx")) return LAYER_FAIL(l, "%.200s: %s reorders its inputs (weight_g_idx), which isn't supported", l->experts, projection);
    groups = layer_count(scale) / ((uint64_t)m->rows * (l->per_expert ? 1 : l->num_experts));
    m->weights.codes = MOE_ROUTE_CODES_UNSIGNED;
    m->weights.scales_dtype = layer_dtype(scale);
    return layer_group_size(l, scale, m->inner, groups, &m->weights.group_size) && layer_gather(l, projection, "weight_packed", m->rows, columns, 1, &m->data) &&
           layer_gather(l, projection, "weight_scale", m->rows, groups, 1, &m->scales) &&
           (!layer_parameter(l, projection, 0, "weight_zero_point") || layer_load_packed_zero_points(l, projection, (uint32_t)groups, m));
}

/* E2M1, two a byte: MXFP4 with power-of-two scales for 32 inputs, NVFP4 with E4M3 scales for 16 and one above. */
static int layer_load_fp4(layer_tensors *l, const char *projection, const char *parameter, layer_matrix *m) {
    const char *scales = layer_parameter(l, projection, 0, "weight_scale") ? "weight_scale" : "scale";
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, scales);
    if (!scale) return LAYER_FAIL(l, "%.200s: %s has 4-bit weights and no weight_scale", l->experts, projection);
    if (!layer_gather(l, projection, parameter, m->rows, m->inner / 2, 1, &m->data)) return 0;
    if (layer_is(scale, "F8_E4M3")) {
        m->weights.format = MOE_ROUTE_FORMAT_NVFP4;
        if (!layer_gather(l, projection, scales, m->rows, m->inner / 16, 1, &m->scales)) return 0;
        if (layer_parameter(l, projection, 0, "weight_scale_2")) return layer_gather_floats(l, projection, "weight_scale_2", 1, 0, &m->global_scales);
        if (layer_parameter(l, projection, 0, "weight_global_scale")) return layer_gather_floats(l, projection, "weight_global_scale", 1, 1, &m->global_scales);
        return 1;
    }
    if (!layer_is(scale, "U8 F8_E8M0")) return layer_refuse(l, scale, "4-bit floats have scales of E4M3, E8M0 or U8");
    m->weights.format = MOE_ROUTE_FORMAT_MXFP4;
    return layer_gather(l, projection, scales, m->rows, m->inner / 32, 1, &m->scales);
}

/* GPT-OSS: blocks [E, N, K / 32, 16]. */
static int layer_load_blocks(layer_tensors *l, const char *projection, const checkpoint_tensor *codes, layer_matrix *m) {
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, "scales");
    if (!layer_is(codes, "U8") || !scale || !layer_is(scale, "U8")) return layer_refuse(l, codes, "blocks and scales of U8 are expected");
    m->weights.format = MOE_ROUTE_FORMAT_MXFP4;
    return layer_gather(l, projection, "blocks", m->rows, m->inner / 32, 16, &m->data) && layer_gather(l, projection, "scales", m->rows, m->inner / 32, 1, &m->scales);
}

/* GPTQ: qweight int32 [K / 8, N], scales [G, N], qzeros int32 [G, N / 8] with the zero point less 1 (version 1), g_idx [K]. */
static int layer_load_gptq(layer_tensors *l, const char *projection, layer_matrix *m) {
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, "scales"), *order = layer_parameter(l, projection, 0, "g_idx");
    const uint32_t rows = m->rows, words = m->inner / 8;
    layer_array codes, scales, zeros, index;
    uint32_t groups, e, n, i;
    int done;
    memset(&codes, 0, sizeof codes);
    memset(&scales, 0, sizeof scales);
    memset(&zeros, 0, sizeof zeros);
    memset(&index, 0, sizeof index);
    if (!scale || layer_dtype(scale) == MOE_ROUTE_DTYPE_DEFAULT || layer_dtype(scale) == MOE_ROUTE_F32) return LAYER_FAIL(l, "%.200s: the GPTQ weights of %s have no scales of F16 or BF16", l->experts, projection);
    if (m->inner % 8 || rows % 8) return LAYER_FAIL(l, "%.200s: %s has %u x %u GPTQ weights, no multiples of 8", l->experts, projection, (unsigned)rows, (unsigned)m->inner);
    groups = (uint32_t)(layer_count(scale) / rows);
    m->weights.format = MOE_ROUTE_FORMAT_INT4;
    m->weights.scales_dtype = layer_dtype(scale);
    done = layer_group_size(l, scale, m->inner, groups, &m->weights.group_size) && layer_gather(l, projection, "qweight", words, rows, 1, &codes) &&
           layer_gather(l, projection, "scales", groups, rows, 1, &scales) && layer_gather(l, projection, "qzeros", groups, rows / 8, 1, &zeros);
    if (done && (codes.size != (size_t)l->num_experts * words * rows * 4 || zeros.size != (size_t)l->num_experts * groups * (rows / 8) * 4)) done = LAYER_FAIL(l, "%.200s: %s: GPTQ's words aren't I32 of 4 bits each", l->experts, projection);
    if (done && order) {
        done = layer_gather(l, projection, "g_idx", m->inner, 1, 1, &index);
        if (done && index.size != (size_t)l->num_experts * m->inner * 4) done = layer_refuse(l, order, "I32 is expected");
        for (i = 0; done && i < l->num_experts * m->inner; i++)
            if (((const uint32_t *)index.data)[i] != (m->weights.group_size ? i % m->inner / m->weights.group_size : 0)) done = layer_refuse(l, order, "it reorders the inputs, which isn't supported");
    }
    done = done && layer_alloc(l, &m->data, (uint64_t)l->num_experts * rows, m->inner / 2) && layer_alloc(l, &m->scales, (uint64_t)l->num_experts * rows, (uint64_t)groups * 2) &&
           layer_alloc(l, &m->zero_points, (uint64_t)l->num_experts * rows, (groups + 1) / 2);
    for (e = 0; done && e < l->num_experts; e++)
        for (n = 0; n < rows; n++) {
            const size_t row = (size_t)e * rows + n;
            for (i = 0; i < words; i++) ((uint32_t *)m->data.data)[row * words + i] = ((const uint32_t *)codes.data)[((size_t)e * words + i) * rows + n];
            for (i = 0; i < groups; i++) {
                const uint32_t word = ((const uint32_t *)zeros.data)[((size_t)e * groups + i) * (rows / 8) + n / 8];
                unsigned char *byte = (unsigned char *)m->zero_points.data + row * ((groups + 1) / 2) + i / 2;
                const unsigned zero_point = (word >> n % 8 * 4 & 15u) + 1;
                if (zero_point > 15) {
                    done = LAYER_FAIL(l, "%.200s: a zero point of %s is 16, which has no 4-bit code", l->experts, projection);
                    break;
                }
                ((uint16_t *)m->scales.data)[row * groups + i] = ((const uint16_t *)scales.data)[((size_t)e * groups + i) * rows + n];
                *byte = (unsigned char)(*byte | zero_point << i % 2 * 4);
            }
        }
    layer_free(&codes);
    layer_free(&scales);
    layer_free(&zeros);
    layer_free(&index);
    return done;
}

/* [E, K, N] becomes [E, N, K]. */
static int layer_transpose(layer_tensors *l, layer_matrix *m) {
    const size_t width = m->data.size / ((size_t)l->num_experts * m->rows * m->inner);
    layer_array turned;
    uint32_t e, n, k;
    if (!layer_alloc(l, &turned, (uint64_t)l->num_experts * m->rows * m->inner, width)) return 0;
    for (e = 0; e < l->num_experts; e++)
        for (n = 0; n < m->rows; n++)
            for (k = 0; k < m->inner; k++)
                memcpy((char *)turned.data + (((size_t)e * m->rows + n) * m->inner + k) * width, (const char *)m->data.data + (((size_t)e * m->inner + k) * m->rows + n) * width, width);
    layer_free(&m->data);
    m->data = turned;
    return 1;
}

static int layer_load_codes(layer_tensors *l, const char *projection, const checkpoint_tensor *codes, int transposed, layer_matrix *m) {
    const moe_route_dtype dtype = layer_dtype(codes);
    const uint64_t columns = codes->rank ? codes->shape[codes->rank - 1] : 0;
    if (dtype != MOE_ROUTE_DTYPE_DEFAULT) {
        m->weights.format = dtype == MOE_ROUTE_F32 ? MOE_ROUTE_FORMAT_F32 : dtype == MOE_ROUTE_F16 ? MOE_ROUTE_FORMAT_F16 : MOE_ROUTE_FORMAT_BF16;
        if (!transposed) return layer_gather(l, projection, "weight", m->rows, m->inner, 1, &m->data);
        return layer_gather(l, projection, "weight", m->inner, m->rows, 1, &m->data) && layer_transpose(l, m);
    }
    if (transposed) return layer_refuse(l, codes, "of matrices that are stored [experts, in, out], F32, F16 and BF16 can be turned");
    if (l->from->is_gguf) {
        switch (codes->gguf_type) {
        case 2: case 3: case 6: case 7: case 8: case 10: case 11: case 12: case 13: case 14: case 20: case 23: case 39:
            m->weights.format = (moe_route_format)(MOE_ROUTE_FORMAT_GGUF + codes->gguf_type);
            return layer_gather(l, projection, "weight", m->rows, m->inner, 1, &m->data);
        default: return layer_refuse(l, codes, "of GGUF's types F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 are supported");
        }
    }
    if (checkpoint_ends(codes->name, "blocks")) return layer_load_blocks(l, projection, codes, m);
    if (checkpoint_ends(codes->name, "qweight")) return layer_is(codes, "I32") ? layer_load_gptq(l, projection, m) : layer_refuse(l, codes, "GPTQ has I32");
    if (layer_is(codes, "F8_E4M3")) return layer_load_bytes(l, projection, MOE_ROUTE_FORMAT_FP8, m);
    if (layer_is(codes, "I32") && checkpoint_ends(codes->name, "weight_packed")) return layer_load_packed(l, projection, codes, m);
    if (layer_is(codes, "U8 I8") && columns * 2 == m->inner) return layer_load_fp4(l, projection, checkpoint_ends(codes->name, "weight_packed") ? "weight_packed" : "weight", m);
    if (layer_is(codes, "I8")) return layer_load_bytes(l, projection, MOE_ROUTE_FORMAT_INT8, m);
    return layer_refuse(l, codes, "weights of this type aren't supported");
}

/* A projection [N, K] of all experts, with its bias where there is one. */
static int layer_load_matrix(layer_tensors *l, const char *projection, uint32_t rows, uint32_t inner, int transposed, layer_matrix *m) {
    const checkpoint_tensor *codes = layer_codes(l, projection), *bias = layer_parameter(l, projection, 0, "bias");
    char text[160];
    m->rows = rows;
    m->inner = inner;
    if (l->from->is_gguf && layer_parameter(l, projection, 0, "scale") && strcmp(projection, l->down) != 0) return LAYER_FAIL(l, "%.200s%s has scales of its own, which aren't supported", l->experts, projection);
    if (!layer_load_codes(l, projection, codes, transposed, m)) return 0;
    if (bias) {
        m->weights.bias_dtype = layer_dtype(bias);
        if (m->weights.bias_dtype == MOE_ROUTE_DTYPE_DEFAULT) return layer_refuse(l, bias, "a bias is F32, F16 or BF16");
        if (!layer_gather(l, projection, "bias", rows, 1, 1, &m->bias)) return 0;
    }
    snprintf(m->text, sizeof m->text, "%.200s %s%s", codes->name, checkpoint_describe(codes, text, sizeof text), l->per_expert ? " and the other experts'" : "");
    return 1;
}

/* ---- the layer ---- */

/* Rows and columns of a projection that holds plain numbers for all experts; 0 where it doesn't. */
static int layer_plain_shape(const layer_tensors *l, const char *projection, uint64_t *rows, uint64_t *columns) {
    const checkpoint_tensor *codes = layer_codes(l, projection);
    if (l->per_expert || layer_dtype(codes) == MOE_ROUTE_DTYPE_DEFAULT || codes->rank < 2) return 0;
    *rows = codes->rank == 3 ? codes->shape[1] : codes->shape[0] / (l->num_experts ? l->num_experts : 1);
    *columns = codes->shape[codes->rank - 1];
    return 1;
}

/* Rows of the first projection, and so the intermediate size, and whether matrices are stored [E, in, out]: then the gate's
   columns aren't H or down's rows aren't, one of which shows even where a matrix is square. */
static int layer_find_sizes(layer_tensors *l) {
    const char *first = l->gate ? l->gate : l->up;
    const checkpoint_tensor *codes = layer_codes(l, first);
    const uint64_t hidden = l->hidden_size;
    uint64_t rows, columns, down_rows, down_columns;
    if (codes->rank < 2) return layer_refuse(l, codes, "a matrix is expected");
    if (layer_plain_shape(l, first, &rows, &columns) && layer_plain_shape(l, l->down, &down_rows, &down_columns)) {
        l->transposed = !(columns == hidden && down_rows == hidden) && rows == hidden && down_columns == hidden;
        if (l->transposed) rows = columns;
    } else if (checkpoint_ends(codes->name, "blocks")) {
        rows = codes->rank == 4 ? codes->shape[1] : 0;
    } else if (checkpoint_ends(codes->name, "qweight")) {
        rows = codes->shape[codes->rank - 1];
    } else {
        rows = codes->shape[codes->rank - 2];
    }
    if (l->gate && !l->up && rows % 2) return layer_refuse(l, codes, "gate and up have an odd number of rows");
    rows /= l->gate && !l->up ? 2 : 1;
    if (rows < 1 || rows > 65536) return layer_refuse(l, codes, "an intermediate size of 1 to 65536 is expected");
    l->intermediate_size = (uint32_t)rows;
    return 1;
}

/* DBRX stores w2 [E, I, H] beside w1 and v1 [E, I, H]. */
static int layer_down_is_transposed(const layer_tensors *l) { return l->transposed || strcmp(l->down, "mlp.w2") == 0; }

/* Finds the router and the experts of a layer, and their sizes; `num_experts` is the model's number of those with weights.
   Nothing is loaded yet. 0 with a message in from->error. */
FILES_FUNCTION int layer_open(layer_tensors *l, checkpoint *from, uint32_t layer, uint32_t num_experts) {
    memset(l, 0, sizeof *l);
    l->from = from;
    l->num_experts = num_experts;
    return layer_find_module(l, layer) && layer_find_router(l) && layer_find_projections(l) && layer_find_sizes(l);
}

static int layer_load_router(layer_tensors *l, const moe_route_layer_desc *desc) {
    static const char *const biases[] = {"e_score_correction_bias", "expert_bias", "router_bias", "balancing_biases", "exp_probs_b.bias", "exp_probs_b"};
    static const char *const tables[] = {"tid2eid"};
    static const char *const expert_scales[] = {"per_expert_scale", "ffn_down_exps.scale"};
    static const char *const router_scales[] = {"router.scale", "ffn_gate_inp.scale"};
    const checkpoint_tensor *bias = layer_find_ending(l, biases, sizeof biases / sizeof biases[0]), *logit_bias, *table = layer_find_ending(l, tables, 1);
    const checkpoint_tensor *expert_scale = layer_find_ending(l, expert_scales, 2), *router_scale = layer_find_ending(l, router_scales, 2);
    char name[LAYER_MAX_NAME];
    snprintf(name, sizeof name, "%.*sbias", (int)(strlen(l->router->name) - strlen("weight")), l->router->name);
    logit_bias = checkpoint_find(l->from, name);
    if ((desc->needs & MOE_ROUTE_NEED_SELECTION_BIAS) && !bias) { /* DeepSeek's own files */
        bias = logit_bias;
        logit_bias = NULL;
    }
    if (!layer_vector(l, l->router, (uint64_t)l->num_logits * l->hidden_size, &l->router_weight)) return 0;
    if (logit_bias && logit_bias != bias && !layer_vector(l, logit_bias, l->num_logits, &l->logit_bias)) return 0;
    if ((desc->needs & MOE_ROUTE_NEED_SELECTION_BIAS) && bias && !layer_vector(l, bias, desc->router.num_experts, &l->selection_bias)) return 0;
    if ((desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && expert_scale && !layer_vector(l, expert_scale, desc->router.num_experts, &l->expert_scale)) return 0;
    if ((desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && router_scale && !layer_vector(l, router_scale, l->hidden_size, &l->router_scale)) return 0;
    if ((desc->needs & MOE_ROUTE_NEED_ID_TABLE) && table) {
        const size_t count = (size_t)layer_count(table);
        void *raw = malloc(table->size ? (size_t)table->size : 1);
        size_t i;
        int done = raw && table->rank == 2 && table->shape[1] == desc->router.top_k && layer_is(table, "I32 I64") && table->shape[0] == desc->router.id_table_rows;
        if (!done) layer_refuse(l, table, "a table of I32 or I64 [vocabulary, top_k] is expected");
        done = done && checkpoint_read(l->from, table, raw, 0, (size_t)table->size) && layer_alloc(l, &l->id_table, count, sizeof(int32_t));
        for (i = 0; done && i < count; i++) {
            const int64_t id = table->type[1] == '3' ? ((const int32_t *)raw)[i] : ((const int64_t *)raw)[i];
            ((int32_t *)l->id_table.data)[i] = id >= 0 && id < 2048 ? (int32_t)id : -1;
        }
        free(raw);
        if (!done) return 0;
        l->id_table_rows = (uint32_t)table->shape[0];
    }
    return 1;
}

/* Loads everything; `desc` is the preset's. */
FILES_FUNCTION int layer_load(layer_tensors *l, const moe_route_layer_desc *desc) {
    const uint32_t rows = l->intermediate_size;
    const char *first = l->gate ? l->gate : l->up;
    if (!l->gate != (desc->experts.gate_up_order == MOE_ROUTE_GATE_UP_NO_GATE)) {
        return LAYER_FAIL(l, "%.200s: the model's experts have %s gate, the checkpoint's have %s", l->experts, l->gate ? "no" : "a", l->gate ? "one" : "none");
    }
    if (l->from->is_gguf && !(desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && layer_parameter(l, l->down, 0, "scale")) {
        return LAYER_FAIL(l, "%.200s%s has scales of its own, which aren't supported", l->experts, l->down);
    }
    if (!layer_load_router(l, desc)) return 0;
    if (!layer_load_matrix(l, first, l->gate && !l->up ? 2 * rows : rows, l->hidden_size, l->transposed, &l->gate_up)) return 0;
    if (l->gate && l->up && !layer_load_matrix(l, l->up, rows, l->hidden_size, l->transposed, &l->up_matrix)) return 0;
    if (l->gate && l->up && memcmp(&l->gate_up.weights, &l->up_matrix.weights, sizeof l->gate_up.weights) != 0) {
        return LAYER_FAIL(l, "gate and up are stored in different formats: %.150s; %.150s", l->gate_up.text, l->up_matrix.text);
    }
    return layer_load_matrix(l, l->down, l->hidden_size, rows, layer_down_is_transposed(l), &l->down_matrix);
}

static void layer_matrix_close(layer_matrix *m) {
    layer_free(&m->data);
    layer_free(&m->scales);
    layer_free(&m->zero_points);
    layer_free(&m->global_scales);
    layer_free(&m->bias);
}

/* Also what a failure left. */
FILES_FUNCTION void layer_close(layer_tensors *l) {
    layer_matrix_close(&l->gate_up);
    layer_matrix_close(&l->up_matrix);
    layer_matrix_close(&l->down_matrix);
    layer_free(&l->router_weight);
    layer_free(&l->logit_bias);
    layer_free(&l->selection_bias);
    layer_free(&l->expert_scale);
    layer_free(&l->router_scale);
    layer_free(&l->id_table);
}

#endif /* LAYER_TENSORS_H */
