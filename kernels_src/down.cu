/*
  down.cu: the down matmul of a small batch, and the combine, in one kernel:
  y[t] = sum over j of weights[t, j] * (down[e] @ h[row] + bias[e]), in the order of j; then what epilogue.h adds. Tokens of
  padding get 0.

  A block is 16 output columns of all experts: a warp takes a distinct expert and one of K_SPLIT parts of K, and leaves the
  sums of that expert's rows in shared memory. When all are there, a thread adds up one output column of one token. So no
  partial result goes through global memory, nothing is atomic, and the order of every sum is fixed: a token's result
  doesn't depend on the others in the batch.

  Constants: those of tile.h (X is the dtype of h and y) and epilogue.h; ROWS, the hidden size; BIAS (dtype, 0: none); K,
  slots a token; WEIGHT_ON_INPUT: h has the router's weight already; K_SPLIT; MAX_PAIRS. Threads: any number of warps up to 16.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "tile.h"
#include "vector.h"
#include "epilogue.h"

KERNEL(moe_route_down, 512, moer_down_args) {
    SHARED(float, partial, K_SPLIT * MAX_PAIRS * 17); /* [part][row][output column], padded against bank conflicts */
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, tile = block_index_x();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_distinct = (u32)a.distinct_count[0];
    const u32 low_column = tile * 16 + g < ROWS ? tile * 16 + g : ROWS - 1;
    const u32 high_column = tile * 16 + g + 8 < ROWS ? tile * 16 + g + 8 : ROWS - 1;

    for (u32 item = warp_index(); item < num_distinct * K_SPLIT; item += block_threads() / 32) {
        const u32 d = item / K_SPLIT, part = item % K_SPLIT;
        const u32 expert = (u32)a.distinct_experts[d], first_row = (u32)a.distinct_offsets[d], end_row = (u32)a.distinct_offsets[d + 1];
        const u64 low_row = (u64)expert * ROWS + low_column, high_row = (u64)expert * ROWS + high_column;
        const u8 *low = (const u8 *)a.weights + low_row * ROW_BYTES, *high = (const u8 *)a.weights + high_row * ROW_BYTES;
        for (u32 base = first_row; base < end_row; base += 8) {
            const u8 *x[1] = {base + g < end_row ? (const u8 *)a.h + (u64)(base + g) * INNER * X_BYTES : 0};
            float sums[1][4];
            multiply_tile<1>(sums, low, high, a.scales, low_row, high_row, x, part, K_SPLIT);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 row = base + t * 2 + (i & 1);
                if (row < end_row) partial[(part * MAX_PAIRS + row) * 17 + g + (i >> 1) * 8] = sums[0][i];
            }
        }
    }
    block_barrier();

    const u32 num_valid = valid_tokens(a.epilogue.num_valid_tokens, a.num_tokens);
    for (u32 i = thread_index(); i < a.num_tokens * 16; i += block_threads()) {
        const u32 token = i / 16, c = i % 16, column = tile * 16 + c;
        if (column >= ROWS) continue;
        const u64 at = (u64)token * ROWS + column;
        float y[1] = {0.0f};
        if (token < num_valid) {
            for (u32 j = 0; j < K; j++) {
                const u32 pair = token * K + j;
                const int row = a.pair_to_row[pair];
                if (row < 0) {
                    add_identity<X>(a.epilogue, a.router_weights, pair, at, y);
                    continue;
                }
                float value = partial[(u32)row * 17 + c];
#pragma unroll
                for (u32 part = 1; part < K_SPLIT; part++) value = f32_add(value, partial[(part * MAX_PAIRS + (u32)row) * 17 + c]);
                if (BIAS) value = f32_add(value, load_value(a.bias, (u64)(u32)a.row_to_expert[row] * ROWS + column, BIAS));
                y[0] = f32_fma(WEIGHT_ON_INPUT ? 1.0f : router_weight(a.router_weights, pair), value, y[0]);
            }
            add_shared_and_residual<X>(a.epilogue, token, at, y);
        }
        store_value(a.y, at, X, y[0]);
    }
}
