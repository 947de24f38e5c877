/*
  combine.cu: y[t] = sum over j of weights[t, j] * rows[pair_to_row[t, j]], in the order of j, in f32; then what epilogue.h
  adds. Tokens of padding get 0. No atomics: a thread owns VECTOR output columns of a token.

  Constants: those of epilogue.h; HIDDEN; K, slots a token; ROWS_DTYPE, OUT (dtypes); WEIGHT_ON_INPUT: the rows have the
  router's weight already, as they may by the arguments; VECTOR, columns a thread, a divisor of HIDDEN.
  Grid: (blocks of 128 threads over HIDDEN / VECTOR, tokens in steps of the grid's height).
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "vector.h"
#include "epilogue.h"

#define BATCH (K < 8 ? K : 8)

KERNEL(moe_route_combine, 128, moer_combine_args) {
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 column = (block_index_x() * 128 + thread_index()) * VECTOR;
    if (column >= HIDDEN) return;
    const u32 num_valid = valid_tokens(a.epilogue.num_valid_tokens, a.num_tokens);
    for (u32 token = block_index_y(); token < a.num_tokens; token += grid_blocks_y()) {
        const u64 at = (u64)token * HIDDEN + column;
        float sum[VECTOR];
#pragma unroll
        for (u32 v = 0; v < VECTOR; v++) sum[v] = 0.0f;
        if (token < num_valid) {
#pragma unroll 1
            for (u32 first = 0; first < K; first += BATCH) { /* the batch's loads don't wait for one another */
                u32 row[BATCH];
                float weight[BATCH], value[BATCH][VECTOR];
#pragma unroll
                for (u32 j = 0; j < BATCH; j++) {
                    const u32 pair = token * K + (K % BATCH == 0 || first + j < K ? first + j : K - 1);
                    row[j] = a.pair_to_row ? (u32)a.pair_to_row[pair] : pair;
                    weight[j] = WEIGHT_ON_INPUT || a.weighted_rows ? 1.0f : router_weight(a.router_weights, pair);
                }
#pragma unroll
                for (u32 j = 0; j < BATCH; j++) /* a row that doesn't exist: another one, which isn't used */
                    load_vector<ROWS_DTYPE, VECTOR>(a.rows, (u64)(row[j] < a.num_rows ? row[j] : 0) * HIDDEN + column, value[j]);
#pragma unroll
                for (u32 j = 0; j < BATCH; j++) {
                    if (K % BATCH != 0 && first + j >= K) continue;
                    if (row[j] >= a.num_rows) {
                        add_identity<OUT>(a.epilogue, a.router_weights, token * K + first + j, at, sum);
                        continue;
                    }
#pragma unroll
                    for (u32 v = 0; v < VECTOR; v++) sum[v] = f32_fma(weight[j], value[j][v], sum[v]);
                }
            }
            add_shared_and_residual<OUT>(a.epilogue, token, at, sum);
        }
        store_vector<OUT, VECTOR>(a.y, at, sum);
    }
}
