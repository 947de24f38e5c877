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
  set to 0 (1), or by pair_to_slot_row (2); WARPS, a block's, up to 32; RESIDENT_BLOCKS, how many share a multiprocessor;
  ROW_BLOCKS; SHARED_BYTES. Grid: any number of blocks.
*/
#include "device.h"
#include "args.h"
#include "scores.h"
#include "activations.h"
#include "tile.h"
#define STREAM_COPIES (CAN_COPY(WARPS) && ROW_BLOCKS == 1)
#include "stream.h"

#define TILE_TOKENS (8 * ROW_BLOCKS)
#include "passes.h"
#define UP_ROWS 8
#include "parts.h"

constexpr int X_HOW = ROW_BLOCKS > 1 ? X_LATE : can_hold(WARPS) ? X_HELD : X_LOADED;

/* The warps' sums of a tile, for the warps that finish it. Those of a group do, and the groups take turns; a warp that isn't of the group leaves its
   sums and goes on. With a slot more than there are groups, whoever writes to one again has waited for a tile since, as its turn comes once in so many:
   by then the slot's finishers had come to that tile, and were done. The more groups, the less do warps wait, as far as there's memory and work for each. */
constexpr u32 STREAM_WORDS = stream_memory(X_HOW, WARPS);
constexpr u32 ROOM = (SHARED_BYTES / 4 - WARPS * STREAM_WORDS) / PARTS_SIZE; /* slots */
constexpr u32 USEFUL_FINISHERS = (TILE_COLUMNS * TILE_TOKENS + 31) / 32, TURNS_WANTED = WARPS > USEFUL_FINISHERS ? WARPS / USEFUL_FINISHERS : 1;
static_assert(SHARED_BYTES / 4 >= WARPS * STREAM_WORDS + 2 * PARTS_SIZE, "room for the streams, and two slots");
DEVICE constexpr u32 least_of(u32 a, u32 b, u32 c) { return a < b ? a < c ? a : c : b < c ? b : c; }
constexpr u32 FINISHERS = (WARPS + least_of(ROOM - 1, TURNS_WANTED, 14) - 1) / least_of(ROOM - 1, TURNS_WANTED, 14); /* each slot has one of 15 barriers */
constexpr u32 TURNS = (WARPS + FINISHERS - 1) / FINISHERS, SLOTS = TURNS + 1;

/* A tile, its weight rows, and the rows of x. */
struct place {
    tile_place at;
    tile_rows rows;
    stream_source source;
    u32 x_row[ROW_BLOCKS];
};

DEVICE void find_rows(const moer_matmul_args &a, place &p) {
    const u32 g = lane_index() >> 2;
    p.rows.low = find_weight_row(a.weights, p.at.expert, tile_row(p.at.tile, g));
    p.rows.high = find_weight_row(UP_APART ? a.up_weights : a.weights, p.at.expert, tile_row(p.at.tile, g + 8));
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
DEVICE void enter_pass(const moer_matmul_args &a, const Maps &m, place &p) {
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; b++) p.x_row[b] = find_x_row(a, m, p.at, b * 8 + (lane_index() >> 2));
    find_rows(a, p);
}

/* To the next tile, of the same rows of x as long as there is one; otherwise returns true. */
DEVICE bool advance(const moer_matmul_args &a, place &p) {
    const bool other_rows = next_tile(a, p.at);
    if (p.at.left == 0) return false;
    if (other_rows) enter_pass(a, later_maps{}, p);
    else find_next_rows(a, p);
    return other_rows;
}

/* Adds up the warps' parts of the tile's sums, and writes its outputs: as one of some warps. */
template <class Words>
DEVICE void finish_tile(const moer_matmul_args &a, const tile_place &p, Words &words, u32 slot, u32 finisher, u32 finishers) {
    for (u32 i = finisher * 32 + lane_index(); i < TILE_COLUMNS * TILE_TOKENS; i += finishers * 32) {
        const u32 c = i % TILE_COLUMNS, token = i / TILE_COLUMNS;
        const output_place o = find_output(a, p, c, token);
        if (o.at < 0) continue;
        float value, up;
        add_parts(words, slot * PARTS_SIZE, c, token, value, up);
        write_output(a, o, output_bias(a, p.expert, o.column), output_up_bias(a, p.expert, o.column), value, up);
    }
}

/* A warp's places in the first slot, and whose turn it is. */
struct finishing {
    part_places places;
    u32 slot, turn;
};

/* The warp's sums of a tile become those of all warps; those whose turn it is finish it. */
template <class Words>
DEVICE void hand_in(const moer_matmul_args &a, const tile_place &p, Words &words, finishing &f, float (&sums)[ROW_BLOCKS][4]) {
    const u32 warp = warp_index();
    const bool turn = TURNS == 1 || warp / FINISHERS == f.turn;
    leave_part(f.places, f.slot * PARTS_SIZE, sums);
    if (turn) {
        const u32 first = TURNS == 1 ? 0 : f.turn * FINISHERS;
        block_barrier_named(1 + f.slot, WARPS * 32);
        finish_tile(a, p, words, f.slot, warp - first, WARPS % FINISHERS == 0 || first + FINISHERS <= WARPS ? FINISHERS : WARPS % FINISHERS);
    } else {
        block_barrier_arrive(1 + f.slot, WARPS * 32);
    }
    f.slot = f.slot + 1 == SLOTS ? 0 : f.slot + 1;
    f.turn = f.turn + 1 == TURNS ? 0 : f.turn + 1;
}

KERNEL_SHARING(moe_route_matmul, WARPS * 32, RESIDENT_BLOCKS, moer_matmul_args) {
    DYNAMIC_SHARED(words); /* slots: [warp][weight row][token], of f32; then the warps' streams */
    const u32 warp = warp_index();
    wait_if(!MAPS_ARE_THERE);
    const first_maps maps = load_first_maps(a);
    place next = {};
    next.at = enter_range(a, maps, load_map(a.distinct_count));
    if (OUT_INDEX == 1) clear_other_pairs(a);

    const stream_places places = find_stream_places(words, SLOTS * PARTS_SIZE + warp * STREAM_WORDS);
    finishing f = {find_part_places(words, 0), 0, 0};
    weight_stream<X_HOW, WARPS> stream;
    held_activations<WARPS> held;
    bool other_rows = true;
    if (next.at.left) {
        enter_pass(a, maps, next);
        start_weights(stream, places, next.source, warp);
    }
    wait_if(MAPS_ARE_THERE);
    if (X_HOW == X_LOADED && next.at.left) start_activations(stream, activations(a, next.x_row[0]), warp);
#pragma unroll 1
    while (next.at.left) {
        const place here = next;
        const u8 *x[ROW_BLOCKS];
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; b++) x[b] = activations(a, here.x_row[b]);
        if (X_HOW == X_HELD && other_rows) hold_activations(held, x[0], warp);
        other_rows = advance(a, next);
        float sums[ROW_BLOCKS][4];
        multiply_tile(sums, stream, places, held, here.source, x, warp, next.at.left != 0, next.source, activations(a, next.x_row[0]), warp);
        scale_rows<ROW_BLOCKS>(sums, ROW_HAS_SCALE ? row_scale(here.rows.low) : 1.0f, ROW_HAS_SCALE ? row_scale(here.rows.high) : 1.0f);
        hand_in(a, here.at, words, f, sums);
    }
    end_stream();
    prefetch_next(a);
}
