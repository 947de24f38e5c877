/*
  matmul.cu: one expert weight matrix times the rows that chose the expert: gate_up with its activation, and the plain
  product. A tile is 16 weight rows of one distinct expert: the warps split K, meet once in shared memory, and go through
  the expert's rows 8 * ROW_BLOCKS at a time. Each distinct expert's weights are read from memory once
  (and from L2 for each further 8 * ROW_BLOCKS rows).

  h[r] = act(gate[e] @ x + gate_bias[e]) * (up[e] @ x + up_bias[e])   GATED 1: a tile is 8 gate and 8 up rows, out [R, N / 2]
  h[r] = act(W[e] @ x + bias[e])                                      GATED 0: a tile is 16 rows, out [R, N]
  out[r] = W[e] @ x + bias[e]                                         the same with ACTIVATION 0

  A block lives through many tiles and loads the next one's weights before it multiplies those that it has, so that memory
  is never idle; one barrier a tile, since two of them share nothing in shared memory. What the next kernel will read of its
  own weights is brought into L2 at the end.

  Constants: those of tile.h; GATED; INTERLEAVED, order of gate and up; UP_APART, 1: up is a matrix of its own, with N = I; ACTIVATION, moe_route_activation + 1, and CLAMP, as in
  activations.h; WEIGHT_ON_INPUT: the router's weight, of dtype WEIGHTS, multiplies x; BIAS (dtype, 0: none); OUT (dtype);
  K, slots a token; X_INDEX: x is indexed by token (0), by token or pair as the arguments say (1), or by row (2);
  OUT_INDEX: out is indexed by row (0), by pair, pairs without a row being set to 0 (1), or by pair_to_slot_row (2); WARPS, a block's; RESIDENT_BLOCKS, how many share a multiprocessor;
  ROW_BLOCKS. Grid: any number of blocks.
*/
#include "device.h"
#include "args.h"
#include "scores.h"
#include "activations.h"
#include "tile.h"

#ifndef UP_APART
#define UP_APART 0
#endif
#define COLUMNS (GATED && !UP_APART ? ROWS / 2 : ROWS) /* of the output */
#define TILE_COLUMNS (GATED ? 8 : 16)
#define NUM_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)
#define TILE_TOKENS (8 * ROW_BLOCKS)
#define PARTIAL_STRIDE (TILE_TOKENS + 1)
#define PARTIAL_SIZE (WARPS * 16 * PARTIAL_STRIDE)

/* The weight row that is row `i` (0 to 15) of tile `tile`. Past the matrix: its last row, whose sums nobody uses. */
DEVICE u32 tile_row(u32 tile, u32 i) {
    u32 column = tile * TILE_COLUMNS + (GATED ? i & 7 : i);
    if (column >= COLUMNS) column = COLUMNS - 1;
    if (!GATED || UP_APART) return column;
    return INTERLEAVED ? column * 2 + (i >> 3) : column + (i >> 3) * COLUMNS;
}

/* Where a block is in its work: tile `work % NUM_TILES` of distinct expert work / NUM_TILES, the expert's rows from `base`
   on, a round of loads. */
struct place {
    u32 work, expert, base, end_row, round;
    weight_row low, high;
    float low_scale, high_scale;
    const u8 *x[ROW_BLOCKS];
};

/* The activations of the lane's token in each block of rows. Where there is no token: another row, whose sums nobody uses,
   or null where multiplying costs time by the token. */
DEVICE void find_activations(const moer_matmul_args &a, place &p) {
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; b++) {
        const u32 wanted = p.base + b * 8 + (lane_index() >> 2);
        const u32 row = wanted < p.end_row ? wanted : p.base;
        u32 index = row;
        if (X_INDEX != 2) index = (u32)a.row_to_pair[row];
        if (X_INDEX == 0 || (X_INDEX == 1 && !a.x_per_pair)) index /= K;
        p.x[b] = TENSOR_CORES || wanted < p.end_row ? (const u8 *)a.x + (u64)index * INNER * X_BYTES : 0;
    }
}

DEVICE void enter_tile(const moer_matmul_args &a, place &p, u32 work, u32 total) {
    p.work = work;
    p.round = 0;
    if (work >= total) return;
    const u32 d = work / NUM_TILES, tile = work % NUM_TILES, g = lane_index() >> 2;
    p.expert = (u32)a.distinct_experts[d];
    p.base = (u32)a.distinct_offsets[d];
    p.end_row = (u32)a.distinct_offsets[d + 1];
    p.low = find_weight_row(a.weights, p.expert, tile_row(tile, g));
    p.high = find_weight_row(UP_APART ? a.up_weights : a.weights, p.expert, tile_row(tile, g + 8));
    p.low_scale = ROW_HAS_SCALE ? row_scale(p.low) : 1.0f;
    p.high_scale = ROW_HAS_SCALE ? row_scale(p.high) : 1.0f;
    find_activations(a, p);
}

DEVICE void advance(const moer_matmul_args &a, place &p, u32 total) {
    if (++p.round < ROUNDS(WARPS)) return;
    p.round = 0;
    p.base += TILE_TOKENS;
    if (p.base >= p.end_row) enter_tile(a, p, p.work + grid_blocks_x(), total);
    else find_activations(a, p);
}

/* Adds up the warps' parts of the tile's sums, and writes its outputs. */
template <class Partial>
DEVICE void finish_tile(const moer_matmul_args &a, const place &p, Partial &partial, u32 half) {
    const u32 tile = p.work % NUM_TILES;
    for (u32 i = thread_index(); i < TILE_COLUMNS * TILE_TOKENS; i += WARPS * 32) {
        const u32 c = i % TILE_COLUMNS, token = i / TILE_COLUMNS, row = p.base + token, column = tile * TILE_COLUMNS + c;
        if (row >= p.end_row || column >= COLUMNS) continue;
        const u32 pair = OUT_INDEX || WEIGHT_ON_INPUT ? (u32)a.row_to_pair[row] : row;
        const int at = OUT_INDEX == 2 ? a.pair_to_slot_row[pair] : (int)(OUT_INDEX ? pair : row);
        if (OUT_INDEX == 2 && at < 0) continue;
        float value = 0.0f, up = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            value = f32_add(value, partial[half * PARTIAL_SIZE + (w * 16 + c) * PARTIAL_STRIDE + token]);
            if (GATED) up = f32_add(up, partial[half * PARTIAL_SIZE + (w * 16 + c + 8) * PARTIAL_STRIDE + token]);
        }
        /* W @ (weight * x) = weight * (W @ x): without rounding weight * x to x's dtype */
        const float weight = WEIGHT_ON_INPUT ? load_value(a.router_weights, pair, WEIGHTS) : 1.0f;
        if (WEIGHT_ON_INPUT) value = f32_mul(value, weight);
        if (BIAS) value = f32_add(value, load_value(a.bias, (u64)p.expert * ROWS + tile_row(tile, c), BIAS));
        if (ACTIVATION) value = moer_activated_gate(ACTIVATION - 1, CLAMP, value, a.alpha, a.clamp);
        if (GATED) {
            if (WEIGHT_ON_INPUT) up = f32_mul(up, weight);
            if (BIAS) up = f32_add(up, load_value(UP_APART ? a.up_bias : a.bias, (u64)p.expert * ROWS + tile_row(tile, c + 8), BIAS));
            value = f32_mul(value, moer_shifted_up(CLAMP, up, ACTIVATION == MOER_SITU + 1 ? a.up_beta : 0.0f, a.up_offset, a.clamp));
        }
        store_value(a.out, (u64)(u32)at * COLUMNS + column, OUT, value);
    }
}

/* The pairs that no expert here serves. */
DEVICE void clear_other_pairs(const moer_matmul_args &a) {
    const u32 threads = grid_blocks_x() * WARPS * 32;
    for (u64 i = block_index_x() * WARPS * 32 + thread_index(); i < (u64)a.num_pairs * COLUMNS; i += threads)
        if (a.pair_to_row[i / COLUMNS] < 0) store_value(a.out, i, OUT, 0.0f);
}

/* One array of all distinct experts, in pieces that the threads share. */
DEVICE void prefetch_array(const moer_matmul_args &a, const void *data, u64 bytes, u32 num_experts) {
    const u32 pieces = (u32)(bytes + PREFETCH_BYTES - 1) / PREFETCH_BYTES;
    for (u32 i = block_index_x() + grid_blocks_x() * thread_index(); i < pieces * num_experts; i += grid_blocks_x() * WARPS * 32) {
        const u64 at = (u64)(i % pieces) * PREFETCH_BYTES;
        prefetch_weights((const u8 *)data + (u64)(u32)a.distinct_experts[i / pieces] * bytes + at, bytes - at);
    }
}

/* The matrix that the next kernel multiplies, of as many distinct experts as wanted. */
DEVICE void prefetch_next(const moer_matmul_args &a, u32 num_distinct) {
    const u32 num_experts = num_distinct < a.next_experts ? num_distinct : a.next_experts;
    prefetch_array(a, a.next_data, a.next_bytes, num_experts);
    prefetch_array(a, a.next_scales, a.next_scale_bytes, num_experts);
}

KERNEL_SHARING(moe_route_matmul, WARPS * 32, RESIDENT_BLOCKS, moer_matmul_args) {
    SHARED(float, partial, 2 * PARTIAL_SIZE); /* [this tile or the next][warp][weight row][token] */
    const u32 warp = warp_index(), lane = lane_index(), g = lane >> 2, t = lane & 3;
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_distinct = (u32)a.distinct_count[0], total = num_distinct * NUM_TILES;
    if (OUT_INDEX == 1) clear_other_pairs(a);

    place next = {};
    tile_chunks<WARPS> ahead;
    enter_tile(a, next, block_index_x(), total);
    if (next.work < total) load_tile<WARPS>(ahead, next.low, next.high, warp);
    float sums[ROW_BLOCKS][4];
    u32 half = 0;
#pragma unroll 1
    while (next.work < total) {
        const place here = next;
        tile_chunks<WARPS> loaded = ahead;
        advance(a, next, total);
        if (next.work < total) load_tile<WARPS>(ahead, next.low, next.high, warp + next.round * LOADED_STEPS(WARPS) * WARPS);
        if (here.round == 0) {
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[b][i] = 0.0f;
        }
        multiply_loaded<ROW_BLOCKS, WARPS>(sums, loaded, here.low, here.high, here.x, warp + here.round * LOADED_STEPS(WARPS) * WARPS);
        if (here.round != ROUNDS(WARPS) - 1) continue;
        scale_rows<ROW_BLOCKS>(sums, here.low_scale, here.high_scale);
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                partial[half * PARTIAL_SIZE + (warp * 16 + g + (i >> 1) * 8) * PARTIAL_STRIDE + b * 8 + t * 2 + (i & 1)] = sums[b][i];
        block_barrier(); /* whoever writes this half again has passed the next barrier, which all reach after reading it */
        finish_tile(a, here, partial, half);
        half ^= 1;
    }
    prefetch_next(a, num_distinct);
}
