/*
  matmul.cu: one expert weight matrix times the rows that chose the expert: gate_up with its activation, and the plain
  product. A block is 16 weight rows of one distinct expert: the warps split K, meet once in shared memory, and the block
  goes through the expert's rows 8 * ROW_BLOCKS at a time. Each distinct expert's weights are read from memory once.

  h[r] = act(gate[e] @ x + gate_bias[e]) * (up[e] @ x + up_bias[e])   GATED 1: a tile is 8 gate and 8 up rows, out [R, N / 2]
  h[r] = act(W[e] @ x + bias[e])                                      GATED 0: a tile is 16 rows, out [R, N]
  out[r] = W[e] @ x + bias[e]                                         the same with ACTIVATION 0

  Constants: those of tile.h; ROWS, the number N of rows of a matrix; GATED; INTERLEAVED, order of gate and up; ACTIVATION,
  moe_route_activation + 1, and CLAMP, as in activations.h; WEIGHT_ON_INPUT: the router's weight, of dtype WEIGHTS, multiplies
  x; BIAS (dtype, 0: none); OUT (dtype); K, slots a token; X_INDEX: x is indexed by token (0), by token or pair as the
  arguments say (1), or by row (2); OUT_BY_PAIR: out is indexed by pair, and pairs without a row are set to 0; WARPS;
  ROW_BLOCKS.
  Grid: (tiles, distinct experts at most, with OUT_BY_PAIR one more for the pairs without a row).
*/
#include "device.h"
#include "args.h"
#include "scores.h"
#include "activations.h"
#include "tile.h"

#define COLUMNS (GATED ? ROWS / 2 : ROWS)        /* of the output */
#define TILE_COLUMNS (GATED ? 8 : 16)
#define TILE_TOKENS (8 * ROW_BLOCKS)
#define PARTIAL_STRIDE (TILE_TOKENS + 1)

/* The weight row that is row `i` (0 to 15) of tile `tile`. Past the matrix: its last row, whose sums nobody uses. */
DEVICE u32 weight_row(u32 tile, u32 i) {
    u32 column = tile * TILE_COLUMNS + (GATED ? i & 7 : i);
    if (column >= COLUMNS) column = COLUMNS - 1;
    if (!GATED) return column;
    return INTERLEAVED ? column * 2 + (i >> 3) : column + (i >> 3) * COLUMNS;
}

KERNEL(moe_route_matmul, WARPS * 32, moer_matmul_args) {
    SHARED(float, partial, WARPS * 16 * PARTIAL_STRIDE); /* [warp][weight row][token] */
    const u32 warp = warp_index(), lane = lane_index(), g = lane >> 2, t = lane & 3;
    const u32 tile = block_index_x(), distinct = block_index_y();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_distinct = (u32)a.distinct_count[0];
#if OUT_BY_PAIR
    if (distinct == 0) { /* the pairs that no expert here serves */
        for (u32 i = thread_index(); i / TILE_COLUMNS < a.num_pairs; i += WARPS * 32) {
            const u32 pair = i / TILE_COLUMNS, column = tile * TILE_COLUMNS + i % TILE_COLUMNS;
            if (column < COLUMNS && a.pair_to_row[pair] < 0) store_value(a.out, (u64)pair * COLUMNS + column, OUT, 0.0f);
        }
        return;
    }
#endif
    const u32 d = distinct - OUT_BY_PAIR;
    if (d >= num_distinct) return;
    const u32 expert = (u32)a.distinct_experts[d], first_row = (u32)a.distinct_offsets[d], end_row = (u32)a.distinct_offsets[d + 1];
    const u64 low_row = (u64)expert * ROWS + weight_row(tile, g), high_row = (u64)expert * ROWS + weight_row(tile, g + 8);
    const u8 *low = (const u8 *)a.weights + low_row * ROW_BYTES, *high = (const u8 *)a.weights + high_row * ROW_BYTES;

    for (u32 base = first_row; base < end_row; base += TILE_TOKENS) {
        const u8 *x[ROW_BLOCKS];
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; b++) {
            const u32 row = base + b * 8 + g;
            x[b] = 0;
            if (row < end_row) {
                u32 index = row;
                if (X_INDEX != 2) index = (u32)a.row_to_pair[row];
                if (X_INDEX == 0 || (X_INDEX == 1 && !a.x_per_pair)) index /= K;
                x[b] = (const u8 *)a.x + (u64)index * INNER * X_BYTES;
            }
        }
        float sums[ROW_BLOCKS][4];
        multiply_tile<ROW_BLOCKS>(sums, low, high, a.scales, low_row, high_row, x, warp, WARPS);
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                partial[(warp * 16 + g + (i >> 1) * 8) * PARTIAL_STRIDE + b * 8 + t * 2 + (i & 1)] = sums[b][i];
        block_barrier();

        for (u32 i = thread_index(); i < TILE_COLUMNS * TILE_TOKENS; i += WARPS * 32) {
            const u32 c = i % TILE_COLUMNS, token = i / TILE_COLUMNS, row = base + token, column = tile * TILE_COLUMNS + c;
            if (row >= end_row || column >= COLUMNS) continue;
            float value = 0.0f;
            for (u32 w = 0; w < WARPS; w++) value = f32_add(value, partial[(w * 16 + c) * PARTIAL_STRIDE + token]);
            /* W @ (weight * x) = weight * (W @ x): without rounding weight * x to x's dtype */
            const float weight = WEIGHT_ON_INPUT ? load_value(a.router_weights, (u32)a.row_to_pair[row], WEIGHTS) : 1.0f;
            if (WEIGHT_ON_INPUT) value = f32_mul(value, weight);
            if (BIAS) value = f32_add(value, load_value(a.bias, (u64)expert * ROWS + weight_row(tile, c), BIAS));
            if (ACTIVATION) value = moer_activated_gate(ACTIVATION - 1, CLAMP, value, a.alpha, a.clamp);
            if (GATED) {
                float up = 0.0f;
                for (u32 w = 0; w < WARPS; w++) up = f32_add(up, partial[(w * 16 + c + 8) * PARTIAL_STRIDE + token]);
                if (WEIGHT_ON_INPUT) up = f32_mul(up, weight);
                if (BIAS) up = f32_add(up, load_value(a.bias, (u64)expert * ROWS + weight_row(tile, c + 8), BIAS));
                value = f32_mul(value, moer_shifted_up(CLAMP, up, ACTIVATION == MOER_SITU + 1 ? a.up_beta : 0.0f, a.up_offset, a.clamp));
            }
            store_value(a.out, (u64)(OUT_BY_PAIR ? (u32)a.row_to_pair[row] : row) * COLUMNS + column, OUT, value);
        }
        block_barrier(); /* partial is written again */
    }
}
