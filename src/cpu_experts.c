/*
  cpu_experts.c: the experts on the CPU: decode a weight row once, multiply it with every activation row of its expert. What
  the row's bytes mean belongs to cpu_formats.c. Clear rather than fast; sums are in f64, so that the GPU's f32 sums can be held against them.
*/
#include "internal.h"

typedef struct moer_cpu_product { /* out[r or pair] = W[e] @ x, for all rows of all experts */
    const moer_matrix *matrix;
    const int32_t *expert_offsets, *row_to_pair;
    uint32_t num_local_experts, top_k;
    int x_index; /* 0: x is indexed by token, 1: by pair, 2: by row */
    const void *x;
    moe_route_dtype x_dtype;
    int gated;   /* 0: plain; 1: silu(gate) * up, halves; 2: the same, interleaved */
    int out_by_pair;
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
    const moer_matrix *matrix = p->matrix;
    const uint32_t inner = matrix->inner, columns = p->gated ? matrix->rows / 2 : matrix->rows;
    uint32_t e, n;
    for (e = 0; e < p->num_local_experts; e++) {
        const int32_t first = p->expert_offsets[e], end = p->expert_offsets[e + 1];
        if (first == end) continue;
        for (n = 0; n < columns; n++) {
            const size_t base = (size_t)e * matrix->rows, row = p->gated == 2 ? n * 2 : n, up_row = p->gated == 2 ? n * 2 + 1 : n + columns;
            float *up = p->scratch + inner;
            int32_t r;
            moer_cpu_decode_row(matrix, e, row, p->scratch);
            if (p->gated) moer_cpu_decode_row(matrix, e, up_row, up);
            for (r = first; r < end; r++) {
                const uint32_t pair = (uint32_t)p->row_to_pair[r];
                const size_t x_row = p->x_index == 0 ? pair / p->top_k : p->x_index == 1 ? pair : (size_t)r;
                double value = moer_cpu_dot(p->scratch, p->x, x_row * inner, inner, p->x_dtype) + moer_cpu_bias(matrix, base + row);
                if (p->gated) {
                    const double up_value = moer_cpu_dot(up, p->x, x_row * inner, inner, p->x_dtype) + moer_cpu_bias(matrix, base + up_row);
                    value = value / (1.0 + exp(-value)) * up_value;
                }
                moer_store_value(p->out, (size_t)(p->out_by_pair ? pair : (uint32_t)r) * columns + n, p->out_dtype, (float)value);
            }
        }
    }
}

/* y[t] = sum over j of weights[t, j] * rows[pair_to_row[t, j]]. */
static void moer_cpu_combine(const void *rows, moe_route_dtype rows_dtype, const int32_t *pair_to_row, const float *weights, void *y,
                             moe_route_dtype y_dtype, uint32_t num_tokens, uint32_t top_k, uint32_t hidden_size) {
    const uint32_t num_pairs = num_tokens * top_k;
    uint32_t t, j, n;
    for (t = 0; t < num_tokens; t++)
        for (n = 0; n < hidden_size; n++) {
            double sum = 0.0;
            for (j = 0; j < top_k; j++) {
                const uint32_t pair = t * top_k + j, row = pair_to_row != NULL ? (uint32_t)pair_to_row[pair] : pair;
                if (row < num_pairs) sum += (double)weights[pair] * (double)moer_load_value(rows, (size_t)row * hidden_size + n, rows_dtype);
            }
            moer_store_value(y, (size_t)t * hidden_size + n, y_dtype, (float)sum);
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
