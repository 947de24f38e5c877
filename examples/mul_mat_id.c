/*
  mul_mat_id.c: what ggml calls MUL_MAT_ID, by moe_route_matmul, on a Q4_0 tensor as it lies in a GGUF file. The correspondence:

      ggml                              here
      src0 [K, N, E] of a GGUF type     gate_up.data with format MOE_ROUTE_FORMAT_GGUF + type; its N, K, E are the layer's sizes
      src1 [K, 1, T] f32                x [T, K] (x_per_pair 0)
      src1 [K, k, T] f32                x [T, k, K] (x_per_pair 1)
      ids  [k, T] int32                 ids [T, k]: dense rows. In ggml they may be a view of longer rows: copy the k of each
      dst  [N, k, T] f32                out [T, k, N], of the layer's dtype: F32

      cc -I. -Iexamples examples/mul_mat_id.c -o mul_mat_id -lm -ldl -lpthread
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"
#include "quantize.h" /* f16 */

#include <math.h>

enum { EXPERTS = 8, USED = 2, N = 96, K = 128, TOKENS = 5, BLOCK = 32, BLOCK_BYTES = 18, GGML_TYPE_Q4_0 = 2 };

/* Q4_0: f16 scale d, then 16 bytes; byte i holds value i in its low half and value i + 16 in its high half: (q - 8) * d. */
static void make_q4_0(unsigned char *blocks, size_t num_blocks) {
    size_t b;
    int i;
    for (b = 0; b < num_blocks; b++, blocks += BLOCK_BYTES) {
        const uint16_t d = f16_from_float(0.01f + 0.001f * (float)(b % 17));
        memcpy(blocks, &d, sizeof d);
        for (i = 0; i < 16; i++) blocks[2 + i] = (unsigned char)(b * 31 + (size_t)i * 73 + b * (size_t)i);
    }
}

static double value_of(const unsigned char *blocks, size_t index) {
    const unsigned char *block = blocks + index / BLOCK * BLOCK_BYTES;
    const size_t i = index % BLOCK;
    uint16_t d;
    memcpy(&d, block, sizeof d);
    return ((int)(i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4) - 8) * (double)f16_to_float(d);
}

int main(int argc, char **argv) {
    static unsigned char weights[EXPERTS * N * K / BLOCK * BLOCK_BYTES];
    static float x[TOKENS * K], out[TOKENS * USED * N];
    static const int32_t ids[TOKENS * USED] = {3, 1, 0, 3, 7, 6, 3, 7, 2, 3};
    moe_route_layer_desc desc;
    moe_route_layer *layer;
    moe_route_matmul_args args;
    example e;
    double worst = 0;
    int pair, n, i;
    example_open(&e, argc, argv);
    make_q4_0(weights, sizeof weights / BLOCK_BYTES);

    memset(&desc, 0, sizeof desc); /* a layer with one matrix is for MATMUL; it takes the matrix's sizes from these */
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = USED;
    desc.experts.hidden_size = K;
    desc.experts.intermediate_size = N; /* N rows, as without a gate */
    desc.experts.gate_up_order = MOE_ROUTE_GATE_UP_NO_GATE;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.gate_up.format = (moe_route_format)(MOE_ROUTE_FORMAT_GGUF + GGML_TYPE_Q4_0);
    desc.experts.gate_up.data = example_memory(&e, weights, sizeof weights);
    example_must(&e, moe_route_layer_create(e.context, &desc, &layer));

    memset(&args, 0, sizeof args);
    args.num_tokens = TOKENS;
    args.matrix = MOE_ROUTE_MATRIX_GATE_UP;
    args.ids = example_memory(&e, ids, sizeof ids);
    args.x = example_numbers(&e, TOKENS * K, 1.0f, 3, x);
    args.out = example_memory(&e, NULL, sizeof out);
    args.workspace = example_workspace(&e, layer, TOKENS, &args.workspace_size);
    args.stream = e.stream;
    example_must(&e, moe_route_matmul(layer, &args));
    example_read(&e, out, args.out, sizeof out);

    for (pair = 0; pair < TOKENS * USED; pair++) {
        for (n = 0; n < N; n++) {
            const size_t row = ((size_t)ids[pair] * N + (size_t)n) * K;
            double sum = 0, error;
            for (i = 0; i < K; i++) sum += value_of(weights, row + (size_t)i) * (double)x[pair / USED * K + i];
            error = fabs(sum - (double)out[pair * N + n]);
            if (!(error <= worst)) worst = error;
        }
    }
    printf("%d tokens x %d experts, Q4_0 [%d, %d, %d]: largest difference from a plain loop %.1e\n", TOKENS, USED, EXPERTS, N, K, worst);
    moe_route_layer_destroy(layer);
    example_close(&e);
    return worst < 1e-4 ? 0 : 1;
}
