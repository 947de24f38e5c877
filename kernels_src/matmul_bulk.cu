/*
  matmul_bulk.cu: what matmul.cu does with up to 8 rows of x, for weights whose tiles the bulk copy engine can bring: on compute capability 9.0 and newer. Beside
  the warps that multiply, each its part of K, a block has one that keeps STAGES tiles under way, and one that adds up the parts of
  finished tiles and writes the outputs. So those that multiply wait for nothing but weights, and copy nothing.

  A stage is a tile's weights, its scales, and then its parts' sums. The warps that multiply arrive at its barrier `done` when they have read the
  one and written the other: then the next tile's weights may come. Its barrier `full` says that they are there, and that the sums have been read.

  Constants: those of matmul.cu without ROW_BLOCKS; WARPS, those that multiply: as many as the parts of K. 8 rows of weights (16, where a
  tile's rows follow each other) are whole 16 bytes and aligned to them; their scales too, or there are none; COLUMNS fill tiles. Threads: (WARPS + 2) * 32; grid: any number of blocks.
*/
#include "device.h"
#include "args.h"
#include "scores.h"
#include "activations.h"
#define SCALES_AT_ONCE
#define TILES_IN_SHARED
#include "tile.h"
#include "held.h"
#include "copied.h"
#define TILE_TOKENS 8
#include "passes.h"
/* The 16 rows of a tile in the order of memory: all after each other, or eight of gate and eight of up. */
#define ROWS_FOLLOW (!UP_APART && (!GATED || INTERLEAVED))
#define UP_ROWS (ROWS_FOLLOW && GATED ? 1 : 8)
#include "parts.h"

constexpr u32 RUN = ROWS_FOLLOW ? 16 : 8; /* rows after each other */
static_assert(TENSOR_CORES && !ZERO_POINTS && RUN * ROW_BYTES % 16 == 0 && EVEN_TILES, "tiles that the bulk engine can copy");

/* ---- a stage ---- */

constexpr u32 STEPS = PART_STEPS(WARPS);
constexpr u32 STAGE_WORDS = TILE_WORDS + PARTS_SIZE;
constexpr u32 BARRIER_WORDS = 32, STAGES_THAT_FIT = (SHARED_BYTES / 4 - BARRIER_WORDS) / STAGE_WORDS, STAGES = STAGES_THAT_FIT < 6 ? STAGES_THAT_FIT : 6;
static_assert(STAGES >= 2, "room for two stages");

/* Row i of a tile. */
DEVICE weight_row find_tile_row(const moer_matmul_args &a, u32 expert, u32 tile, u32 i) {
    const u64 row = ROWS_FOLLOW ? (u64)tile * 16 + i : column_row((u64)tile * 8 + i % 8, i >= 8);
    return find_weight_row(UP_APART && i >= 8 ? a.up_weights : a.weights, expert, row);
}

struct stage_place {
    u32 index, parity;
};
DEVICE void next_stage(stage_place &s) {
    s.index++;
    if (s.index == STAGES) {
        s.index = 0;
        s.parity ^= 1;
    }
}

/* ---- those that multiply ---- */

template <class Words>
DEVICE void multiply_tiles(const moer_matmul_args &a, const first_maps &maps, tile_place p, Words &words, const shared_place &barriers) {
    const data_places places = find_data_places(words, BARRIER_WORDS);
    const u32 warp = warp_index();
    const u8 *const no_x[1] = {0};
    held_activations<WARPS> held;
    stage_place s = {0, 0};
    bool other_rows = true;
    u32 x_row = p.left ? find_x_row(a, maps, p, lane_index() >> 2) : 0;
#pragma unroll 1
    while (p.left) {
        if (other_rows) hold_activations(held, activations(a, x_row), warp);
        float sums[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
        const u32 stage = s.index * STAGE_WORDS;
        shared_barrier_wait(barriers, s.index * 2, s.parity);
#pragma unroll
        for (u32 i = 0; i < STEPS; i++)
            if (step_exists<WARPS>(warp, i)) {
                weight_chunk low = fetch_chunk_of(places, stage, 0, i), high = fetch_chunk_of(places, stage, 1, i);
                multiply_step<1, X_HELD, holds_sums(WARPS)>(sums, low, high, no_x, step_of<WARPS>(warp, i), held.pair[i], held.sums[holds_sums(WARPS) ? i : 0]);
            }
        if (ROW_HAS_SCALE) {
            const u32 g = lane_index() >> 2;
            scale_rows<1>(sums, row_scale(find_tile_row(a, p.expert, p.tile, g)), row_scale(find_tile_row(a, p.expert, p.tile, g + 8)));
        }
        leave_part(find_part_places(words, BARRIER_WORDS + TILE_WORDS), stage, sums); /* found anew: registers are what this loop has least of */
        shared_barrier_arrive(barriers, (STAGES + s.index) * 2);
        next_stage(s);
        other_rows = next_tile(a, p);
        if (other_rows) x_row = find_x_row(a, later_maps{}, p, lane_index() >> 2);
    }
}

/* ---- the one that copies, and the one that finishes ---- */

/* A tile's weights into a stage: row by row where rows have others' banks only with words between them. What is the same in all lanes, and known to be,
   is worked out once for all of them, and by one lane in line: 120 instructions, where each copy's own choice of a lane would make 520. */
template <class Words>
DEVICE void copy_tile(const moer_matmul_args &a, const tile_place &p, Words &words, const shared_place &barriers, u32 stage) {
    constexpr u32 ROWS_AT_ONCE = ROW_STRIDE == ROW_BYTES ? RUN : 1;
    const shared_place memory = shared_place_of(words, BARRIER_WORDS);
    const u32 expert = warp_shuffle(p.expert, 0), tile = warp_shuffle(p.tile, 0), s = warp_shuffle(stage, 0);
    if (!elect_lane()) return;
    shared_barrier_expect(barriers, s * 2, 16 * ((u32)ROW_BYTES + SCALE_ROW_BYTES));
#pragma unroll
    for (u32 first = 0; first < 16; first += RUN) {
        const weight_row run = find_tile_row(a, expert, tile, first);
#pragma unroll
        for (u32 r = 0; r < RUN; r += ROWS_AT_ONCE)
            copy_bulk(memory, s * STAGE_WORDS + (first + r) * ROW_STRIDE / 4, run.data + r * ROW_BYTES, ROWS_AT_ONCE * (u32)ROW_BYTES, barriers, s * 2);
#if FORMAT < FORMAT_GGUF
        if (GROUP != 0) copy_bulk(memory, s * STAGE_WORDS + DATA_WORDS + first * SCALE_ROW_BYTES / 4, run.scales, RUN * SCALE_ROW_BYTES, barriers, s * 2);
#endif
    }
}

/* Keeps as many tiles under way as there are stages. */
template <class Words>
DEVICE void copy_tiles(const moer_matmul_args &a, tile_place p, Words &words, const shared_place &barriers) {
    stage_place s = {0, 1};
#pragma unroll 1
    for (u32 i = 0; p.left; i++) {
        if (i >= STAGES) shared_barrier_wait(barriers, (STAGES + s.index) * 2, s.parity);
        copy_tile(a, p, words, barriers, s.index);
        next_stage(s);
        next_tile(a, p);
    }
}

/* Adds up the parts of finished tiles, and writes their outputs. */
template <class Words>
DEVICE void finish_tiles(const moer_matmul_args &a, tile_place p, Words &words, const shared_place &barriers) {
    constexpr u32 LANE_OUTPUTS = TILE_COLUMNS * 8 / 32;
    const u32 c = lane_index() % TILE_COLUMNS, first_token = lane_index() / TILE_COLUMNS;
    stage_place s = {0, 0};
    for (u32 i = 0; i < STAGES; i++) shared_barrier_arrive(barriers, i * 2); /* nothing was there to be read */
#pragma unroll 1
    while (p.left) {
        const u32 column = p.tile * TILE_COLUMNS + c;
        const float bias = output_bias(a, p.expert, column), up_bias = output_up_bias(a, p.expert, column);
        output_place o[LANE_OUTPUTS];
        float value[LANE_OUTPUTS], up[LANE_OUTPUTS];
#pragma unroll
        for (u32 i = 0; i < LANE_OUTPUTS; i++) o[i] = find_output(a, p, c, first_token + i * (32 / TILE_COLUMNS));
        shared_barrier_wait(barriers, (STAGES + s.index) * 2, s.parity);
#pragma unroll
        for (u32 i = 0; i < LANE_OUTPUTS; i++)
            if (o[i].at >= 0) add_parts(words, BARRIER_WORDS + s.index * STAGE_WORDS + TILE_WORDS, c, first_token + i * (32 / TILE_COLUMNS), value[i], up[i]);
        shared_barrier_arrive(barriers, s.index * 2);
#pragma unroll
        for (u32 i = 0; i < LANE_OUTPUTS; i++)
            if (o[i].at >= 0) write_output(a, o[i], bias, up_bias, value[i], up[i]);
        next_stage(s);
        next_tile(a, p);
    }
}

KERNEL_SHARING(moe_route_matmul_bulk, (WARPS + 2) * 32, RESIDENT_BLOCKS, moer_matmul_args) {
    DYNAMIC_SHARED(words); /* the barriers `full` and `done` of all stages; then the stages */
    const shared_place barriers = shared_place_of(words, 0);
    const u32 warp = warp_index();
    if (thread_index() == 0)
        for (u32 i = 0; i < STAGES; i++) {
            shared_barrier_start(shared_place_of(words, i * 2), 1 + 32);
            shared_barrier_start(shared_place_of(words, (STAGES + i) * 2), WARPS * 32);
        }
    if (SCALE_WORDS) { /* words that are read with the last row's scales */
        constexpr u32 REST = SCALE_WORDS - SCALES_END + (SCALE_WORDS == 0);
        for (u32 i = thread_index(); i < STAGES * REST; i += block_threads()) words[BARRIER_WORDS + i / REST * STAGE_WORDS + DATA_WORDS + SCALES_END + i % REST] = 0;
    }
    wait_if(!MAPS_ARE_THERE);
    const first_maps maps = load_first_maps(a);
    const tile_place p = enter_range(a, maps, load_map(a.distinct_count));
    if (OUT_INDEX == 1) clear_other_pairs(a);
    block_barrier();
    if (warp == WARPS) {
        copy_tiles(a, p, words, barriers);
    } else {
        wait_if(MAPS_ARE_THERE);
        if (warp < WARPS) multiply_tiles(a, maps, p, words, barriers);
        else finish_tiles(a, p, words, barriers);
    }
    prefetch_next(a);
}
