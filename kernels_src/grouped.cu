/*
  grouped.cu: an expert weight matrix times the rows that chose the expert, in batches with many rows an expert: the same products as
  matmul.cu, with rows as the matrix fragments' rows and weights as their columns. A block computes a tile of TILE_ROWS rows of
  one expert and 128 weight rows (grouped.h).

  out[r] = act(gate[e] @ x + gate_bias[e]) * (up[e] @ x + up_bias[e])   GATED 1: a tile has 64 gate rows and their 64 up rows
  out[r] = act(W[e] @ x + bias[e])                                      GATED 0
  out[r] = (W[e] @ x + bias[e]) * weight                                with ACTIVATION 0; the weight where WEIGHT_ON_OUTPUT

  Weights on the output stand before it is rounded: so a row that overflows its dtype does so only where its part of the sum would.

  Tiles of one expert follow each other, those of the same rows first, so that blocks that run at the same time find activations and
  weights in L2. Each block finds its expert by counting tiles over the distinct experts: those without rows have none, and one with
  all rows is as good as any. The grid has room for the most tiles that may be; blocks beyond the last tile end.

  Constants: those of grouped.h; GATED, INTERLEAVED, UP_APART, ACTIVATION, CLAMP, WEIGHT_ON_INPUT, BIAS, OUT, K, X_INDEX
  as in matmul.cu; WEIGHT_ON_OUTPUT; WEIGHTS, dtype of either weights; RESIDENT_BLOCKS, how many share a multiprocessor.
  Grid: column tiles * (pairs / TILE_ROWS + distinct experts, at most).
*/
#include "device.h"
#include "args.h"
#include "scan.h"
#include "scores.h"
#include "activations.h"
#include "grouped.h"
#include "output.h"

#define TILE_COLUMNS (GATED ? TILE_WEIGHTS / 2 : TILE_WEIGHTS)
#define COLUMN_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)

struct tile_place { u32 expert, base, end_row, first_column; };

/* The output column of the tile's weight row n: gate and up rows alternate by eights, so that a thread has both sums. Past the
   matrix: its last one, whose sums nobody uses. */
DEVICE u32 tile_column(const tile_place &p, u32 n) {
    const u32 column = p.first_column + (GATED ? n / 16 * 8 + n % 8 : n);
    return column < COLUMNS ? column : COLUMNS - 1;
}

DEVICE bool is_up(u32 n) { return GATED && n / 8 % 2 != 0; }

DEVICE weight_row tile_weight_row(const moer_matmul_args &a, const tile_place &p, u32 n) {
    return find_weight_row(UP_APART && is_up(n) ? a.up_weights : a.weights, p.expert, column_row(tile_column(p, n), is_up(n)));
}

/* Finds row tile `tile`; false: there are fewer. */
template <class Words>
DEVICE bool find_tile(const moer_matmul_args &a, Words &scratch, u32 tile, tile_place &p) {
    const u32 lane = lane_index(), warp = warp_index(), num_distinct = (u32)a.distinct_count[0];
    u32 before = 0; /* tiles of the experts that have been looked at */
    for (u32 first = 0; first < num_distinct && tile >= before; first += GROUPED_THREADS) {
        const u32 d = first + thread_index();
        const u32 begin = d < num_distinct ? (u32)a.distinct_offsets[d] : 0, end = d < num_distinct ? (u32)a.distinct_offsets[d + 1] : 0;
        const u32 count = (end - begin + TILE_ROWS - 1) / TILE_ROWS;
        const u32 sum = scan_warp(count);
        u32 start = before;
        if (lane == 31) scratch[warp] = sum;
        block_barrier();
        for (u32 w = 0; w < GROUPED_THREADS / 32; w++) {
            const u32 tiles = scratch[w];
            if (w < warp) start += tiles;
            before += tiles;
        }
        start += sum - count;
        if (tile >= start && tile - start < count) {
            scratch[8] = (u32)a.distinct_experts[d];
            scratch[9] = begin + (tile - start) * TILE_ROWS;
            scratch[10] = end;
        }
        block_barrier();
    }
    if (tile >= before) return false;
    p.expert = scratch[8];
    p.base = scratch[9];
    p.end_row = scratch[10];
    block_barrier(); /* the scratch becomes a tile */
    return true;
}

DEVICE void find_rows(const moer_matmul_args &a, const tile_place &p, row_sources &sources) {
    sources.passes = 0;
#pragma unroll
    for (u32 i = 0; i < ROW_PASSES; i++) {
        const u32 r = i * ROWS_A_PASS + thread_index() / SLICE_CHUNKS, row = p.base + r < p.end_row ? p.base + r : p.base;
        sources.x[i] = 0;
        if (r >= TILE_ROWS || p.base + r / 16 * 16 >= p.end_row) continue;
        sources.x[i] = (const u8 *)a.x + (u64)x_row_of(a, X_INDEX == 2 ? row : (u32)a.row_to_pair[row]) * (INNER * 2) + thread_index() % SLICE_CHUNKS * 16;
        sources.passes = i + 1;
    }
}

/* Multiplies by what scales the whole weight row. */
DEVICE void scale_columns(const moer_matmul_args &a, const tile_place &p, float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4]) {
    if (!ROW_HAS_SCALE) return;
#pragma unroll
    for (u32 j = 0; j < COLUMN_FRAGMENTS; j++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 n = (warp_index() % WARPS_ACROSS * COLUMN_FRAGMENTS + j) * 8 + (lane_index() & 3) * 2 + i;
            const float scale = row_scale(tile_weight_row(a, p, n));
#pragma unroll
            for (u32 m = 0; m < ROW_FRAGMENTS; m++) {
                sums[m][j][i] = f32_mul(sums[m][j][i], scale);
                sums[m][j][i + 2] = f32_mul(sums[m][j][i + 2], scale);
            }
        }
}

DEVICE float finish_output(const moer_matmul_args &a, const tile_place &p, u32 column, float weight, float value, float up) {
    value = finish_sums(a, output_bias(a, p.expert, column), output_up_bias(a, p.expert, column), weight, value, up);
    return WEIGHT_ON_OUTPUT ? f32_mul(value, weight) : value;
}

DEVICE void finish_tile(const moer_matmul_args &a, const tile_place &p, const float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4]) {
    const u32 lane = lane_index(), warp = warp_index();
#pragma unroll
    for (u32 m = 0; m < ROW_FRAGMENTS; m++)
#pragma unroll
        for (u32 i = 0; i < 4; i += 2) { /* rows g and g + 8 of the fragment */
            const u32 row = p.base + (m * 2 + warp / WARPS_ACROSS) * 16 + i * 4 + (lane >> 2);
            if (row >= p.end_row) continue;
            const u32 pair = WEIGHT_ON_INPUT || WEIGHT_ON_OUTPUT ? (u32)a.row_to_pair[row] : row;
            const float weight = WEIGHT_ON_INPUT || WEIGHT_ON_OUTPUT ? load_value(a.router_weights, pair, WEIGHTS) : 1.0f;
            const u64 at = (u64)row * COLUMNS;
#pragma unroll
            for (u32 j = 0; j < COLUMN_FRAGMENTS; j += GATED ? 2 : 1) {
                const u32 n = (warp % WARPS_ACROSS * COLUMN_FRAGMENTS + j) * 8, up = (j + GATED) % COLUMN_FRAGMENTS;
                const u32 column = p.first_column + (GATED ? n / 2 : n) + (lane & 3) * 2;
                if (column >= COLUMNS) continue;
                const float first = finish_output(a, p, column, weight, sums[m][j][i], sums[m][up][i]);
                if (COLUMNS % 2 != 0 && column + 1 >= COLUMNS) {
                    store_value(a.out, at + column, OUT, first);
                    continue;
                }
                const float second = finish_output(a, p, column + 1, weight, sums[m][j][i + 1], sums[m][up][i + 1]);
                if (OUT == DTYPE_F32 || COLUMNS % 2 != 0) {
                    store_value(a.out, at + column, OUT, first);
                    store_value(a.out, at + column + 1, OUT, second);
                } else {
                    ((u32 *)a.out)[(at + column) / 2] = OUT == DTYPE_F16 ? f32_to_half2(first, second) : f32_to_bf162(first, second);
                }
            }
        }
}

template <class Words>
DEVICE void multiply(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Words &words, u32 rows, u32 weights, u32 slice, u32 fragments) {
    if (fragments == ROW_FRAGMENTS) multiply_slice<true>(sums, words, rows, weights, slice, fragments);
    else multiply_slice<false>(sums, words, rows, weights, slice, fragments);
}

DEVICE u32 next_stage(u32 stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

KERNEL_SHARING(moe_route_grouped, GROUPED_THREADS, RESIDENT_BLOCKS, moer_matmul_args) {
    DYNAMIC_SHARED(words);
    wait_for_previous_kernels();
    let_next_kernel_start();
    tile_place p;
    if (!find_tile(a, words, block_index_x() / COLUMN_TILES, p)) return;
    p.first_column = block_index_x() % COLUMN_TILES * TILE_COLUMNS;

    const u32 num_rows = p.end_row - p.base < TILE_ROWS ? p.end_row - p.base : TILE_ROWS;
    const u32 first_fragment = warp_index() / WARPS_ACROSS, num_fragments = (num_rows + 15) / 16; /* of all warps */
    const u32 fragments = (num_fragments + 1 - first_fragment) / 2;
    row_sources x;
    find_rows(a, p, x);
    float sums[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4];
#pragma unroll
    for (u32 m = 0; m < ROW_FRAGMENTS; m++)
#pragma unroll
        for (u32 j = 0; j < COLUMN_FRAGMENTS; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[m][j][i] = 0.0f;

    const shared_place target = shared_place_of(words, 0);
    u32 stage = 0, free_stage = STAGES - 1; /* whose slice is multiplied, and which is copied to */
#if COPIED_WEIGHTS
    weight_sources w;
#pragma unroll
    for (u32 i = 0; i < WEIGHT_PASSES; i++) w.w[i] = tile_weight_row(a, p, i * ROWS_A_PASS + thread_index() / SLICE_CHUNKS).data + thread_index() % SLICE_CHUNKS * 16;
    for (u32 slice = 0; slice < STAGES - 1; slice++) {
        start_rows(words, target, x, slice, slice * ROW_WORDS);
        start_weights(target, w, slice, WEIGHTS_AT + slice * FILL_WORDS);
        copy_async_commit();
    }
#pragma unroll 1
    for (u32 slice = 0; slice < NUM_SLICES; slice++) {
        copy_async_wait<STAGES - 2>();
        block_barrier(); /* all have what was copied, and none reads the stage that comes next */
        start_rows(words, target, x, slice + STAGES - 1, free_stage * ROW_WORDS);
        start_weights(target, w, slice + STAGES - 1, WEIGHTS_AT + free_stage * FILL_WORDS);
        copy_async_commit();
        multiply(sums, words, stage * ROW_WORDS, WEIGHTS_AT + stage * FILL_WORDS, 0, fragments);
        stage = next_stage(stage);
        free_stage = next_stage(free_stage);
    }
#else
    const u32 n = warp_index() * 16 + (lane_index() >> 2);
    const weight_row low = tile_weight_row(a, p, n), high = tile_weight_row(a, p, n + 8);
    weight_chunk low_chunk = load_weight_chunk(low, 0, false), high_chunk = load_weight_chunk(high, 0, false);
    for (u32 slice = 0; slice < STAGES - 1; slice++) {
        start_rows(words, target, x, slice, slice * ROW_WORDS);
        copy_async_commit();
    }
#pragma unroll 1
    for (u32 step = 0; step < NUM_STEPS; step++) {
        arrange_weight_chunk(low_chunk);
        arrange_weight_chunk(high_chunk);
        if (step != 0) block_barrier(); /* none reads the weights before these */
        store_weights(words, low_chunk, step, WEIGHTS_AT, n);
        store_weights(words, high_chunk, step, WEIGHTS_AT, n + 8);
        if (step + 1 < NUM_STEPS) {
            low_chunk = load_weight_chunk(low, step + 1, false);
            high_chunk = load_weight_chunk(high, step + 1, false);
        }
#pragma unroll 1
        for (u32 i = 0; i < FILL_SLICES && step * FILL_SLICES + i < NUM_SLICES; i++) {
            copy_async_wait<STAGES - 2>();
            block_barrier();
            start_rows(words, target, x, step * FILL_SLICES + i + STAGES - 1, free_stage * ROW_WORDS);
            copy_async_commit();
            multiply(sums, words, stage * ROW_WORDS, WEIGHTS_AT, i, fragments);
            stage = next_stage(stage);
            free_stage = next_stage(free_stage);
        }
    }
#endif
    copy_async_wait<0>();
    scale_columns(a, p, sums);
    finish_tile(a, p, sums);
}
