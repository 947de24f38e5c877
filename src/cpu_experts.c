/*
  cpu_experts.c: the experts on the CPU: decode a weight row once, multiply it with every activation row of its expert. What
  the row's bytes mean belongs to cpu_formats.c. Clear rather than fast; the sums of products are in f64, so that the
  GPU's f32 sums can be held against them. The activation is the kernels' own text.
*/
#include "internal.h"
#include "../kernels_src/activations.h"

typedef struct moer_cpu_product { /* out[r or pair] = W[e] @ x, for all rows of all experts */
    const moe_route_layer *layer;
    const moer_matrix *matrix, *up; /* up: where gate and up are two matrices */
    const int32_t *expert_offsets, *row_to_pair;
    int x_index; /* 0: x is indexed by token, 1: by pair, 2: by row */
    const void *x;
    moe_route_dtype x_dtype;
    int activated; /* 1: gate_up with what follows it up to h */
    const void *input_weights; /* of the router's weights_dtype, by pair, or NULL: they multiply x */
    int out_by_pair;
    const int32_t *pair_to_slot_row; /* out is indexed by it, or NULL; -1: not to be written */
    void *out;
    moe_route_dtype out_dtype;
    float *scratch; /* [2, inner] */
} moer_cpu_product;

static double moer_cpu_dot(const float *values, const void *x, size_t first, uint32_t inner, moe_route_dtype dtype) {
    double sum = 0.0;
    uint32_t k;
    for (k = 0; k < inner; k++) sum += (double)values[k] * (double)moer_load_value(x, first + k, dtype);
    return sum;
}

static double moer_cpu_bias(const moer_matrix *matrix, size_t row) {
    return matrix->bias != 0 ? (double)moer_load_value(moer_host(matrix->bias), row, matrix->bias_dtype) : 0.0;
}

static void moer_cpu_multiply(const moer_cpu_product *p) {
    const moe_route_layer *layer = p->layer;
    const moer_matrix *matrix = p->matrix;
    const int gated = p->activated && layer->gated, interleaved = gated && layer->interleaved;
    const uint32_t inner = matrix->inner, columns = gated && p->up == NULL ? matrix->rows / 2 : matrix->rows, top_k = layer->router.top_k;
    uint32_t e, n;
    for (e = 0; e < layer->router.num_local_experts; e++) {
        const int32_t first = p->expert_offsets[e], end = p->expert_offsets[e + 1];
        if (first == end) continue;
        for (n = 0; n < columns; n++) {
            const size_t base = (size_t)e * matrix->rows;
            const size_t row = interleaved ? n * 2 : n, up_row = p->up != NULL ? n : interleaved ? n * 2 + 1 : n + columns;
            const moer_matrix *up_matrix = p->up != NULL ? p->up : matrix;
            float *up = p->scratch + inner;
            int32_t r;
            moer_cpu_decode_row(matrix, e, row, p->scratch);
            if (gated) moer_cpu_decode_row(up_matrix, e, up_row, up);
            for (r = first; r < end; r++) {
                const uint32_t pair = (uint32_t)p->row_to_pair[r];
                int32_t out_row;
                const size_t x_row = p->x_index == 0 ? pair / top_k : p->x_index == 1 ? pair : (size_t)r;
                const double weight = p->input_weights != NULL ? (double)moer_load_value(p->input_weights, pair, layer->router.weights_dtype) : 1.0;
                float value = (float)(weight * moer_cpu_dot(p->scratch, p->x, x_row * inner, inner, p->x_dtype) + moer_cpu_bias(matrix, base + row));
                if (p->activated) value = moer_activated_gate((int)layer->activation, layer->clamp_kind, value, layer->alpha, layer->clamp);
                if (gated) {
                    const float up_value = (float)(weight * moer_cpu_dot(up, p->x, x_row * inner, inner, p->x_dtype) + moer_cpu_bias(up_matrix, base + up_row));
                    value *= moer_shifted_up(layer->clamp_kind, up_value, layer->up_beta, layer->up_offset, layer->clamp);
                }
                out_row = p->pair_to_slot_row != NULL ? p->pair_to_slot_row[pair] : p->out_by_pair ? (int32_t)pair : r;
                if (out_row >= 0) moer_store_value(p->out, (size_t)out_row * columns + n, p->out_dtype, value);
            }
        }
    }
}

static uint32_t moer_cpu_num_valid(moe_route_address num_valid_tokens, uint32_t num_tokens) {
    int32_t valid;
    if (num_valid_tokens == 0) return num_tokens;
    memcpy(&valid, moer_host(num_valid_tokens), sizeof valid);
    return valid < 0 ? 0 : (uint32_t)valid < num_tokens ? (uint32_t)valid : num_tokens;
}

/* Element `at` of an array [T, H] of the layer's dtype. */
static float moer_cpu_element(const moe_route_layer *layer, moe_route_address array, size_t at) { return moer_load_value(moer_host(array), at, layer->dtype); }

static float moer_cpu_weight(const moe_route_layer *layer, const moer_combine_args *args, uint32_t pair) {
    return moer_load_value(moer_host(args->router_weights), pair, layer->router.weights_dtype);
}

/* combine.cu over the same arguments, and to the same bits: sums are f32 here. */
static void moer_cpu_combine(const moe_route_layer *layer, const moer_combine_args *args, moe_route_dtype rows_dtype) {
    const moer_epilogue *epilogue = &args->epilogue;
    const uint32_t top_k = layer->router.top_k, hidden_size = layer->hidden_size;
    const uint32_t num_valid = moer_cpu_num_valid(epilogue->num_valid_tokens, args->num_tokens);
    const int32_t *pair_to_row = (const int32_t *)moer_host(args->pair_to_row), *ids = (const int32_t *)moer_host(epilogue->ids);
    const float *shared_weights = (const float *)moer_host(epilogue->shared_weights);
    const int weighted = layer->weight_on_input || args->weighted_rows;
    uint32_t t, j, n;
    for (t = 0; t < args->num_tokens; t++)
        for (n = 0; n < hidden_size; n++) {
            const size_t at = (size_t)t * hidden_size + n;
            float sum = 0.0f;
            if (t < num_valid) {
                for (j = 0; j < top_k; j++) {
                    const uint32_t pair = t * top_k + j, row = pair_to_row != NULL ? (uint32_t)pair_to_row[pair] : pair;
                    if (row < args->num_rows)
                        sum = fmaf(weighted ? 1.0f : moer_cpu_weight(layer, args, pair), moer_load_value(moer_host(args->rows), (size_t)row * hidden_size + n, rows_dtype), sum);
                    else if (layer->router.num_identity != 0 && (uint32_t)ids[pair] - layer->router.first_identity < layer->router.num_identity)
                        sum = fmaf(moer_cpu_weight(layer, args, pair), moer_cpu_element(layer, epilogue->x, at), sum);
                }
                if (epilogue->shared != 0) sum = fmaf(shared_weights != NULL ? shared_weights[t] : 1.0f, moer_cpu_element(layer, epilogue->shared, at), sum);
                if (epilogue->residual != 0) sum += moer_cpu_element(layer, epilogue->residual, at);
            }
            moer_store_value(moer_host(args->y), at, layer->dtype, sum);
        }
}

static void moer_cpu_expand(const void *x, const int32_t *row_to_pair, void *rows, size_t row_bytes, uint32_t num_pairs, uint32_t top_k) {
    uint32_t r;
    for (r = 0; r < num_pairs; r++) {
        char *to = (char *)rows + r * row_bytes;
        const uint32_t pair = (uint32_t)row_to_pair[r];
        if (pair < num_pairs) memcpy(to, (const char *)x + pair / top_k * row_bytes, row_bytes);
        else memset(to, 0, row_bytes);
    }
}
