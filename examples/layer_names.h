/*
  layer_names.h: finds the router and the experts of an MoE layer among the tensors of a checkpoint, by the names that models give
  them, and their sizes. Nothing is loaded here: that is layer_formats.h's and layer_tensors.h's. Include moe_route.h first.
*/
#ifndef LAYER_NAMES_H
#define LAYER_NAMES_H

#include "checkpoint.h"

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
    const checkpoint_tensor *table; /* of ids by token (DeepSeek-V4), or NULL */
    uint32_t num_logits, hidden_size, intermediate_size;
    uint32_t num_experts;         /* that have weights */
    const char *gate, *up, *down; /* the projections' names. gate NULL: there is none; up NULL: gate holds both */
    int per_expert;               /* tensors of single experts */
    int transposed;               /* [E, K, N] */
    layer_matrix gate_up, up_matrix, down_matrix;
    layer_array router_weight;    /* f32 [num_logits, H] */
    layer_array logit_bias, selection_bias, expert_scale; /* f32 */
    layer_array id_table;         /* int32 [rows, k] */
    layer_array router_scale;     /* f32 [H], where the router's input is normalised and scaled (Gemma-4) */
} layer_tensors;

#define LAYER_FAIL(l, ...) checkpoint_fail((l)->from, __VA_ARGS__)

/* "TENSOR is TYPE [SHAPE]", then why that can't be used. */
static int layer_refuse(layer_tensors *l, const checkpoint_tensor *tensor, const char *why) {
    char text[160];
    return LAYER_FAIL(l, "%.200s is %s: %s", tensor->name, checkpoint_describe(tensor, text, sizeof text), why);
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

static moe_route_dtype layer_dtype(const checkpoint_tensor *tensor) {
    return strcmp(tensor->type, "F32") == 0    ? MOE_ROUTE_F32
           : strcmp(tensor->type, "F16") == 0  ? MOE_ROUTE_F16
           : strcmp(tensor->type, "BF16") == 0 ? MOE_ROUTE_BF16
                                               : MOE_ROUTE_DTYPE_DEFAULT;
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
static const checkpoint_tensor *layer_parameter(const layer_tensors *l, const char *projection, uint32_t e,
                                                const char *parameter) {
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

/* What holds a projection's numbers, or their codes. */
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
        {0, "fc1", NULL, "fc2"}, {0, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}, {0, "ffn_gate_up_exps", NULL, "ffn_down_exps"},
        {1, "ffn_gate", "ffn_up", "ffn_down"},
        /* without gate */
        {1, NULL, "up_proj", "down_proj"}, {0, NULL, "up_proj", "down_proj"}, {0, NULL, "ffn_up_exps", "ffn_down_exps"}};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        if (layer_has(l, names[i].per_expert, names[i].gate, names[i].up, names[i].down)) return 1;
    return LAYER_FAIL(
        l, "the experts' projections aren't known by their names: there is no %.300s0.gate_proj.weight, gate_up_proj, w1, ...",
        l->experts);
}

/* Where a name's part ends that belongs to all experts: behind a component "experts", or before a fused projection's. */
static size_t layer_experts_end(const char *name, const char *rest, size_t *module_end) {
    static const struct { const char *ending, *projection; } fused[] = {
        {".block_sparse_moe.input_linear.weight", "input_linear.weight"}, {".mlp.input_linear.weight", "input_linear.weight"},
        {".moe.gate_proj.weight", "gate_proj.weight"}, {".moe.up_proj.weight", "up_proj.weight"}};
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
    for (i = 0; i < sizeof fused / sizeof fused[0]; i++)
        if (checkpoint_ends(name, fused[i].ending)) return *module_end = strlen(name) - strlen(fused[i].projection);
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
            return LAYER_FAIL(l, "there are experts under %.200s and under %.*s: --prefix can choose", l->experts,
                              (int)(end > 200 ? 200 : end), name);
        }
        snprintf(l->experts, sizeof l->experts, "%.*s", (int)end, name);
        snprintf(l->module, sizeof l->module, "%.*s", (int)module_end, name);
    }
    return l->experts[0] ? 1 : LAYER_FAIL(l, "layer %u has no experts in this checkpoint", (unsigned)layer);
}

/* The one tensor of the module whose name ends so; NULL when there is none. */
static const checkpoint_tensor *layer_find_ending(const layer_tensors *l, const char *const *endings, size_t count) {
    size_t i, j;
    for (j = 0; j < count; j++)
        for (i = 0; i < l->from->num_tensors; i++) {
            const char *name = l->from->tensors[i].name;
            if (strncmp(name, l->module, strlen(l->module)) == 0 && checkpoint_ends(name, endings[j]))
                return &l->from->tensors[i];
        }
    return NULL;
}

static int layer_find_router(layer_tensors *l) {
    static const char *const names[] = {"ffn_gate_inp.weight",      "gate.weight",        "router.weight",
                                        "gate.wg.weight",           "router.gate.weight", "router.layer.weight",
                                        "router.classifier.weight", "router.proj.weight", "router.linear.weight"};
    static const char *const tables[] = {"tid2eid", "ffn_gate_tid2eid.weight"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0] && !l->router; i++) l->router = layer_find(l, l->module, names[i]);
    if (!l->router)
        return LAYER_FAIL(l, "the layer has no router under a name that is known, such as %.200s%s", l->module,
                          l->from->is_gguf ? "ffn_gate_inp.weight" : "gate.weight");
    if (l->router->rank != 2 || !layer_is(l->router, "F32 F16 BF16"))
        return layer_refuse(l, l->router, "a router is [experts, hidden size] of F32, F16 or BF16");
    if (l->router->shape[0] < 1 || l->router->shape[0] > 4096 || l->router->shape[1] < 1 || l->router->shape[1] > 65536)
        return layer_refuse(l, l->router, "too many or too few experts or inputs");
    l->num_logits = (uint32_t)l->router->shape[0];
    l->hidden_size = (uint32_t)l->router->shape[1];
    l->table = layer_find_ending(l, tables, 2);
    return 1;
}

/* ---- sizes ---- */

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

/* Finds the router and the experts of a layer, and their sizes; `num_experts` is the model's number of those with weights.
   Nothing is loaded yet. 0 with a message in from->error. */
FILES_FUNCTION int layer_open(layer_tensors *l, checkpoint *from, uint32_t layer, uint32_t num_experts) {
    memset(l, 0, sizeof *l);
    l->from = from;
    l->num_experts = num_experts;
    return layer_find_module(l, layer) && layer_find_router(l) && layer_find_projections(l) && layer_find_sizes(l);
}

#endif /* LAYER_NAMES_H */
