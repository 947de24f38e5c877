/*
  combine.cu: y[t] = sum over j of weights[t, j] * rows[pair_to_row[t, j]], in the order of j, in f32. No atomics: a thread
  owns VECTOR output columns of a token.

  Constants: HIDDEN; K, slots a token; ROWS_DTYPE, OUT (dtypes); VECTOR, columns a thread, a divisor of HIDDEN.
  Grid: (blocks of 128 threads over HIDDEN / VECTOR, tokens in steps of the grid's height).
*/
#include "device.h"
#include "args.h"
#include "vector.h"

KERNEL(moe_route_combine, 128, moer_combine_args) {
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 column = (block_index_x() * 128 + thread_index()) * VECTOR;
    if (column >= HIDDEN) return;
    const u32 num_pairs = a.num_tokens * K;
    for (u32 token = block_index_y(); token < a.num_tokens; token += grid_blocks_y()) {
        float sum[VECTOR];
#pragma unroll
        for (u32 v = 0; v < VECTOR; v++) sum[v] = 0.0f;
#pragma unroll 4
        for (u32 j = 0; j < K; j++) {
            const u32 pair = token * K + j;
            const u32 row = a.pair_to_row ? (u32)a.pair_to_row[pair] : pair;
            if (row >= num_pairs) continue;
            float value[VECTOR];
            load_vector<ROWS_DTYPE, VECTOR>(a.rows, (u64)row * HIDDEN + column, value);
            const float weight = a.router_weights[pair];
#pragma unroll
            for (u32 v = 0; v < VECTOR; v++) sum[v] = f32_fma(weight, value[v], sum[v]);
        }
        store_vector<OUT, VECTOR>(a.y, (u64)token * HIDDEN + column, sum);
    }
}
