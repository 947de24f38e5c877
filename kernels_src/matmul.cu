/*
  matmul.cu: one expert weight matrix times the rows that chose the expert: gate_up with its activation, and the plain
  product. A tile is 16 weight rows of one distinct expert: the warps split K, meet in shared memory, and go through the
  expert's rows 8 * ROW_BLOCKS at a time. Each distinct expert's weights are read from memory once (and from L2 for each
  further 8 * ROW_BLOCKS rows).

  h[r] = act(gate[e] @ x + gate_bias[e]) * (up[e] @ x + up_bias[e])   GATED 1: 16 weight rows are 8 of gate, 8 of up; out [R, N / 2]
  h[r] = act(W[e] @ x + bias[e])                                      GATED 0: they are 16 rows; out [R, N]
  out[r] = W[e] @ x + bias[e]                                         the same with ACTIVATION 0

  A block takes a range of the tiles of all distinct experts and rows, in order. So most of its tiles have the same rows of x as the
  tile before, which a warp keeps in registers where its part of them fits; and memory is never idle, since the stream of
  weights (stream.h) goes on from tile to tile. No warp waits for another, save the one that adds up a tile: they take turns.
  What the next kernel will read of its own weights is brought into L2 at the end.

  Constants: those of tile.h; GATED; INTERLEAVED, order of gate and up; UP_APART, 1: up is a matrix of its own, with N = I; ACTIVATION, moe_route_activation + 1, and CLAMP, as in
  activations.h; WEIGHT_ON_INPUT: the router's weight, of dtype WEIGHTS, multiplies x; BIAS (dtype, 0: none); OUT (dtype);
  K, slots a token; X_INDEX: x is indexed by token (0), by token or pair as the arguments say (1), or by row (2);
  OUT_ORDER: the order of a row of out, X_ORDER of its reader; OUT_INDEX: out is indexed by row (0), by pair, pairs without a row being
  set to 0 (1), or by pair_to_slot_row (2); WARPS, a block's, up to 8; RESIDENT_BLOCKS, how many share a multiprocessor;
  ROW_BLOCKS. Grid: any number of blocks.
*/
#include "device.h"
#include "args.h"
#include "scan.h"
#include "scores.h"
#include "activations.h"
#include "tile.h"
#define STREAM_COPIES (CAN_COPY(WARPS) && ROW_BLOCKS == 1)
#include "stream.h"
#include "output.h"

#ifndef OUT_ORDER
#define OUT_ORDER PAIRS_LINEAR
#endif

constexpr int X_HOW = ROW_BLOCKS > 1 ? X_LATE : can_hold(WARPS) ? X_HELD : X_LOADED;
#define TILE_COLUMNS (GATED ? 8 : 16)
#define NUM_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)
#define TILE_TOKENS (8 * ROW_BLOCKS)
#define EVEN_TILES (COLUMNS % TILE_COLUMNS == 0 && ROWS_ALIKE) /* whose rows are always as far from each other */

/* The warps' sums of a tile, for the warps that finish it, in TURNS. A warp takes part in finishing one of so many tiles, for which
   it waits until all others have written theirs. So with TURNS + 1 slots, whoever writes to one again knows that its finishers, who
   have waited for a tile since, are done. The more turns, the less do warps wait, as far as shared memory goes. With many rows of x
   there's room for two slots only: then all wait for all. */
constexpr u32 PARTIAL_STRIDE = TILE_TOKENS + 1;
constexpr u32 PARTIAL_SIZE = WARPS * 16 * PARTIAL_STRIDE;
DEVICE constexpr bool has_room(u32 turns) { return (turns + 1) * PARTIAL_SIZE + stream_memory(X_HOW, WARPS, WARPS) <= 11776; } /* 46 KB */
constexpr u32 TURNS = WARPS == 1 || has_room(WARPS) ? WARPS : WARPS == 2 || has_room(WARPS / 2) ? WARPS / 2 : WARPS / 4;
constexpr u32 FINISHERS = WARPS / TURNS;
constexpr u32 SLOTS = ROW_BLOCKS == 1 ? TURNS + 1 : 2;
static_assert(TURNS > 0 && TURNS * FINISHERS == WARPS && SLOTS < 16, "every warp takes its turn, and every slot has a barrier");
static_assert((SLOTS * PARTIAL_SIZE + stream_memory(X_HOW, WARPS, WARPS)) * 4 <= 49152, "shared memory of a block");

/* The weight row that is row `i` (0 to 15) of a tile. Past the matrix: its last row, whose sums nobody uses. */
DEVICE u64 tile_row(u32 tile, u32 i) {
    u64 column = (u64)tile * TILE_COLUMNS + (GATED ? i & 7 : i);
    if (COLUMNS % TILE_COLUMNS != 0 && column >= COLUMNS) column = COLUMNS - 1;
    return column_row(column, i >= 8);
}

/* The first entries of the maps, a lane each, all loaded at once: loads that wait for each other would be a good part of a step with few tokens. What
   lies beyond the last distinct expert isn't used. */
struct first_maps { u32 expert, end_row, pair; };

DEVICE first_maps load_first_maps(const moer_matmul_args &a) {
    const u32 lane = lane_index();
    first_maps m = {0, 0, 0};
    if (lane < a.max_distinct) {
        m.expert = (u32)a.distinct_experts[lane];
        m.end_row = (u32)a.distinct_offsets[lane + 1];
    }
    if (X_INDEX != 2 && lane < a.num_pairs) m.pair = (u32)a.row_to_pair[lane];
    return m;
}

/* Later ones are loaded a tile ahead, and wait for nobody. */
struct later_maps {};
DEVICE u32 expert_of(const moer_matmul_args &a, const later_maps &, u32 d) { return (u32)a.distinct_experts[d]; }
DEVICE u32 end_row_of(const moer_matmul_args &a, const later_maps &, u32 d) { return (u32)a.distinct_offsets[d + 1]; }
DEVICE u32 pair_of(const moer_matmul_args &a, const later_maps &, u32 row, u32) { return (u32)a.row_to_pair[row]; }

/* All lanes ask for the same d; each for a row of its own, below end_row, which is the same for all. */
DEVICE u32 expert_of(const moer_matmul_args &a, const first_maps &m, u32 d) { return d < 32 ? warp_shuffle(m.expert, d) : (u32)a.distinct_experts[d]; }
DEVICE u32 end_row_of(const moer_matmul_args &a, const first_maps &m, u32 d) { return d < 32 ? warp_shuffle(m.end_row, d) : (u32)a.distinct_offsets[d + 1]; }
DEVICE u32 pair_of(const moer_matmul_args &a, const first_maps &m, u32 row, u32 end_row) { return end_row <= 32 ? warp_shuffle(m.pair, row) : (u32)a.row_to_pair[row]; }

/* A pass is all tiles of an expert with up to TILE_TOKENS of its rows. Blocks share the passes' tiles evenly, else one popular expert would keep
   some of them for twice as long. */

/* Passes of distinct expert 32 * chunk + lane. */
DEVICE u32 passes_of(const moer_matmul_args &a, const first_maps &m, u32 chunk, u32 num_distinct) {
    const u32 d = chunk * 32 + lane_index();
    u32 begin = warp_shuffle_up(m.end_row, 1), end = m.end_row;
    if (lane_index() == 0) begin = 0;
    if (chunk != 0 && d < num_distinct) {
        begin = (u32)a.distinct_offsets[d];
        end = (u32)a.distinct_offsets[d + 1];
    }
    return d < num_distinct ? (end - begin + TILE_TOKENS - 1) / TILE_TOKENS : 0;
}

DEVICE u32 count_passes(const moer_matmul_args &a, const first_maps &m, u32 num_distinct) {
    u32 own = 0;
    for (u32 chunk = 0; chunk * 32 < num_distinct; chunk++) own += passes_of(a, m, chunk, num_distinct);
    return warp_add(own);
}

/* Which pass of which distinct expert is pass `wanted` of all; it exists. */
struct pass_place { u32 d, pass; };
DEVICE pass_place find_pass(const moer_matmul_args &a, const first_maps &m, u32 num_distinct, u32 wanted) {
    pass_place found = {0, wanted};
    for (u32 chunk = 0, before = 0; chunk * 32 < num_distinct; chunk++) {
        const u32 own = passes_of(a, m, chunk, num_distinct), sum = scan_warp(own), here = warp_ballot(before + sum > wanted);
        if (here) {
            const u32 first = popcount((here & (0u - here)) - 1);
            found.d = chunk * 32 + first;
            found.pass = wanted - before - warp_shuffle(sum - own, first);
            break;
        }
        before += warp_shuffle(sum, 31);
    }
    return found;
}

/* A block's share of the tiles of all passes: from a tile of one pass to a tile, exclusively, of another. No share: first_pass is beyond last_pass. */
struct work_range { u32 first_pass, first_tile, last_pass, end_tile; };

DEVICE work_range find_range(u32 num_passes) {
    const u64 total = (u64)num_passes * NUM_TILES;
    const u32 blocks = grid_blocks_x(), block = block_index_x();
    const u64 share = total >> 32 ? total / blocks : (u32)total / blocks, rest = total - share * blocks; /* a long division takes long */
    const u64 begin = block * share + (block < rest ? block : rest), end = begin + share + (block < rest);
    work_range range = {1, 0, 0, 0};
    if (begin == end) return range;
    range.first_pass = total >> 32 ? (u32)(begin / NUM_TILES) : (u32)begin / NUM_TILES;
    range.first_tile = (u32)(begin - (u64)range.first_pass * NUM_TILES);
    range.last_pass = total >> 32 ? (u32)((end - 1) / NUM_TILES) : (u32)(end - 1) / NUM_TILES;
    range.end_tile = (u32)(end - (u64)range.last_pass * NUM_TILES);
    return range;
}

/* Where a block is in its range: a tile of pass `pass` of all, which is distinct expert d with its rows of x from `base` on. */
struct place {
    u32 pass, d, tile, end_tile;
    u32 expert, base, end_row;
    tile_rows rows;
    stream_source source;
    u32 x_row[ROW_BLOCKS];
};
#define NO_ROW 0xffffffffu

DEVICE bool is_inside(const work_range &range, const place &p) { return p.pass <= range.last_pass; }

/* The rows of x that the lane's token has in each block of rows. Where there is no token: another, whose sums nobody uses, or none
   where multiplying costs time by the token. */
template <class Maps>
DEVICE void find_activations(const moer_matmul_args &a, const Maps &m, place &p) {
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; b++) {
        const u32 wanted = p.base + b * 8 + (lane_index() >> 2);
        const u32 row = wanted < p.end_row ? wanted : p.base;
        p.x_row[b] = x_row_of(a, X_INDEX == 2 ? row : pair_of(a, m, row, p.end_row));
        if (!TENSOR_CORES && wanted >= p.end_row) p.x_row[b] = NO_ROW;
    }
}

DEVICE const u8 *activations(const moer_matmul_args &a, u32 x_row) { return x_row == NO_ROW ? 0 : (const u8 *)a.x + (u64)x_row * INNER * X_BYTES; }

DEVICE void find_rows(const moer_matmul_args &a, place &p) {
    const u32 g = lane_index() >> 2;
    p.rows.low = find_weight_row(a.weights, p.expert, tile_row(p.tile, g));
    p.rows.high = find_weight_row(UP_APART ? a.up_weights : a.weights, p.expert, tile_row(p.tile, g + 8));
    p.source = find_source(p.rows, FIRST_STEP(warp_index(), WARPS));
}

/* The same from the tile before, in fewer instructions and registers. */
DEVICE void find_next_rows(const moer_matmul_args &a, place &p) {
    constexpr u32 TILE_ROWS = TILE_COLUMNS * (GATED && INTERLEAVED && !UP_APART ? 2 : 1), HIGH_ROWS = !GATED ? 8 : INTERLEAVED ? 1 : COLUMNS; /* from low to high */
    if (!EVEN_TILES) return find_rows(a, p);
    p.rows.low = row_after(p.rows.low, TILE_ROWS);
    p.rows.high = UP_APART ? row_after(p.rows.high, TILE_ROWS) : row_after(p.rows.low, HIGH_ROWS);
#if STREAM_COPIES
    if (ROWS_KEEP_WORDS(TILE_ROWS)) {
        p.source = copy_source_after(p.source, TILE_ROWS);
        if (!UP_APART) p.source.high = p.source.low + HIGH_ROWS * ROW_BYTES;
        return;
    }
#endif
    p.source = find_source(p.rows, FIRST_STEP(warp_index(), WARPS));
}

template <class Maps>
DEVICE void enter_pass(const moer_matmul_args &a, const Maps &m, place &p, const work_range &range) {
    p.tile = p.pass == range.first_pass ? range.first_tile : 0;
    p.end_tile = p.pass == range.last_pass ? range.end_tile : NUM_TILES;
    find_activations(a, m, p);
    find_rows(a, p);
}

/* The distinct expert's pass `skipped`. */
template <class Maps>
DEVICE void enter_expert(const moer_matmul_args &a, const Maps &m, place &p, u32 d, u32 skipped, const work_range &range) {
    p.d = d;
    p.expert = expert_of(a, m, d);
    p.base = (d == 0 ? 0 : end_row_of(a, m, d - 1)) + skipped * TILE_TOKENS;
    p.end_row = end_row_of(a, m, d);
    enter_pass(a, m, p, range);
}

/* To the next tile, of the same rows of x as long as there is one; otherwise returns true. */
DEVICE bool advance(const moer_matmul_args &a, place &p, const work_range &range) {
    const later_maps m = {};
    if (++p.tile < p.end_tile) {
        find_next_rows(a, p);
        return false;
    }
    p.pass++;
    p.base += TILE_TOKENS;
    if (!is_inside(range, p)) return true;
    if (p.base >= p.end_row) enter_expert(a, m, p, p.d + 1, 0, range);
    else enter_pass(a, m, p, range);
    return true;
}

/* Where element i of a row is, whose pairs lie in this order. */
DEVICE u32 place_in_order(int order, u32 i) {
    if (order == PAIRS_OF_4) return i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
    if (order == PAIRS_OF_8) return i / 8 * 8 + i % 4 * 2 + i / 4 % 2;
    return i;
}

/* Adds up the warps' parts of the tile's sums, and writes its outputs: as one of FINISHERS warps. */
template <class Partial>
DEVICE void finish_tile(const moer_matmul_args &a, const place &p, Partial &partial, u32 slot, u32 finisher) {
    for (u32 i = finisher * 32 + lane_index(); i < TILE_COLUMNS * TILE_TOKENS; i += FINISHERS * 32) {
        const u32 c = i % TILE_COLUMNS, token = i / TILE_COLUMNS, row = p.base + token, column = p.tile * TILE_COLUMNS + c;
        if (row >= p.end_row || column >= COLUMNS) continue;
        const u32 pair = OUT_INDEX || WEIGHT_ON_INPUT ? (u32)a.row_to_pair[row] : row;
        const int at = OUT_INDEX == 2 ? a.pair_to_slot_row[pair] : (int)(OUT_INDEX ? pair : row);
        if (OUT_INDEX == 2 && at < 0) continue;
        float value = 0.0f, up = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            value = f32_add(value, partial[slot * PARTIAL_SIZE + (w * 16 + c) * PARTIAL_STRIDE + token]);
            if (GATED) up = f32_add(up, partial[slot * PARTIAL_SIZE + (w * 16 + c + 8) * PARTIAL_STRIDE + token]);
        }
        value = finish_value(a, p.expert, column, WEIGHT_ON_INPUT ? load_value(a.router_weights, pair, WEIGHTS) : 1.0f, value, up);
        store_value(a.out, (u64)(u32)at * COLUMNS + place_in_order(OUT_ORDER, column), OUT, value);
    }
}

/* The warp's sums of a tile become those of all warps; those whose turn it is finish it. */
template <class Partial>
DEVICE void hand_in(const moer_matmul_args &a, const place &p, Partial &partial, u32 count, float (&sums)[ROW_BLOCKS][4]) {
    const u32 warp = warp_index(), g = lane_index() >> 2, t = lane_index() & 3, slot = count % SLOTS;
    const bool turn = warp / FINISHERS == count % TURNS;
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) partial[slot * PARTIAL_SIZE + (warp * 16 + g + (i >> 1) * 8) * PARTIAL_STRIDE + b * 8 + t * 2 + (i & 1)] = sums[b][i];
    if (SLOTS <= TURNS) block_barrier();
    else if (turn) block_barrier_named(1 + slot, WARPS * 32);
    else block_barrier_arrive(1 + slot, WARPS * 32);
    if (turn) finish_tile(a, p, partial, slot, warp % FINISHERS);
}

/* The pairs that no expert here serves. */
DEVICE void clear_other_pairs(const moer_matmul_args &a) {
    const u32 threads = grid_blocks_x() * WARPS * 32;
    for (u64 i = block_index_x() * WARPS * 32 + thread_index(); i < (u64)a.num_pairs * COLUMNS; i += threads)
        if (a.pair_to_row[i / COLUMNS] < 0) store_value(a.out, i, OUT, 0.0f);
}

/* One array of all distinct experts, in pieces that the threads share. Together they fit L2, or there are none: so 32 bits count them. */
DEVICE void prefetch_array(const moer_matmul_args &a, const void *data, u64 bytes, u32 num_experts) {
    const u32 pieces = (u32)(bytes + PREFETCH_BYTES - 1) / PREFETCH_BYTES;
    for (u32 i = block_index_x() + grid_blocks_x() * thread_index(); i < pieces * num_experts; i += grid_blocks_x() * WARPS * 32) {
        const u64 at = (u64)(i % pieces) * PREFETCH_BYTES;
        prefetch_weights((const u8 *)data + (u64)(u32)a.distinct_experts[i / pieces] * bytes + at, bytes - at);
    }
}

/* The matrix that the next kernel multiplies, of as many distinct experts as wanted. */
DEVICE void prefetch_next(const moer_matmul_args &a) {
    const u32 num_distinct = (u32)a.distinct_count[0];
    const u32 num_experts = num_distinct < a.next_experts ? num_distinct : a.next_experts;
    prefetch_array(a, a.next_data, a.next_bytes, num_experts);
    prefetch_array(a, a.next_scales, a.next_scale_bytes, num_experts);
}

KERNEL_SHARING(moe_route_matmul, WARPS * 32, RESIDENT_BLOCKS, moer_matmul_args) {
    SHARED(float, partial, SLOTS * PARTIAL_SIZE); /* [slot][warp][weight row][token] */
    SHARED(u32, copies, stream_memory(X_HOW, WARPS, WARPS));
    const u32 warp = warp_index();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const first_maps maps = load_first_maps(a);
    const u32 num_distinct = (u32)a.distinct_count[0], num_passes = a.num_pairs <= TILE_TOKENS ? num_distinct : count_passes(a, maps, num_distinct);
    const work_range range = find_range(num_passes);
    if (OUT_INDEX == 1) clear_other_pairs(a);

    place next = {};
    weight_stream<X_HOW, WARPS> stream;
    held_activations<WARPS> held;
    bool other_rows = true;
    u32 count = 0;
    next.pass = range.first_pass;
    if (is_inside(range, next)) {
        const pass_place first = num_passes == num_distinct ? pass_place{next.pass, 0} : find_pass(a, maps, num_distinct, next.pass);
        enter_expert(a, maps, next, first.d, first.pass, range);
        if (X_HOW == X_LOADED) start_activations(stream, activations(a, next.x_row[0]), warp);
        start_weights(stream, copies, next.source, warp);
    }
#pragma unroll 1
    while (is_inside(range, next)) {
        const place here = next;
        const u8 *x[ROW_BLOCKS];
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; b++) x[b] = activations(a, here.x_row[b]);
        if (X_HOW == X_HELD && other_rows) hold_activations(held, x[0], warp);
        other_rows = advance(a, next, range);
        float sums[ROW_BLOCKS][4];
        multiply_tile(sums, stream, copies, held, here.source, x, warp, is_inside(range, next), next.source, activations(a, next.x_row[0]), warp);
        scale_rows<ROW_BLOCKS>(sums, ROW_HAS_SCALE ? row_scale(here.rows.low) : 1.0f, ROW_HAS_SCALE ? row_scale(here.rows.high) : 1.0f);
        hand_in(a, here, partial, count++, sums);
    }
    end_stream();
    prefetch_next(a);
}
