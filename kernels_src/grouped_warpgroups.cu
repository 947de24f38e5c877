/*
  grouped_warpgroups.cu: what grouped.cu computes, on compute capability 9.0, whose tensor cores read both operands from shared memory:
  four warps, a warpgroup, start a product together and go on while it is done.

  A block has a multiprocessor alone, and goes through tiles of TILE_WEIGHTS weight rows and up to MOST_ROWS rows of one expert. Producers,
  PRODUCER_WARPS warps, bring both into shared memory, a fill of 64 or 128 inputs at a time and up to STAGES fills ahead: past the end of a
  tile into the next one, so that memory is busy while a tile's outputs are made. Consumers, two warpgroups, multiply: 64 weight rows
  are a product's rows, and the expert's rows, up to a multiple of 16, its columns. So a tile takes as long as its rows need, and an expert
  with few rows costs little more than reading its weights. Tiles are wide because L2 is the limit: rows and TILE_WEIGHTS weight rows
  are 2 * rows * TILE_WEIGHTS operations for each of their rows + TILE_WEIGHTS columns of K. Weights that are unpacked are a fourth
  of the bytes, and half the width leaves registers for their loads.

  A warp's weight rows are dealt out so that a lane, once 8 x 8 pieces of sums are transposed, has some consecutive columns of a row.

  Tiles follow each other as in grouped.cu. An expert's rows are shared out evenly among its tiles. Each warp of the producers finds a tile
  by counting those before it, from where it found the last one.

  Constants: those of grouped.cu but RESIDENT_BLOCKS, with X_ALIGN 16, COLUMNS and INNER multiples of 8, and for weights of the activations'
  type WEIGHT_ALIGN 16; TILE_WEIGHTS, 128 or 256; TILE_ROWS, 32, 64 or 128; SHARED_BYTES; PRODUCER_WARPS, 4 or 8; PRODUCER_REGISTERS, of a
  thread: consumers get what is left.
  Grid: as many blocks as run at once; any number will do.
*/
#define WEIGHT_LOADS_STAY
#include "device.h"
#include "args.h"
#include "scan.h"
#include "scores.h"
#include "activations.h"
#include "tile.h"
#include "output.h"

/* Half of the experts that ought to have 128 rows have some more, and those are still one tile. */
#define MOST_ROWS (TILE_ROWS == 128 ? 160 : TILE_ROWS)
#define CONSUMERS 256
#define PRODUCERS (PRODUCER_WARPS * 32)
#define THREADS (CONSUMERS + PRODUCERS)
#define REGISTERS_AT_LAUNCH (65536 / THREADS / 8 * 8) /* of a thread; a block never has more of them than then */
#define REGISTERS_LEFT ((REGISTERS_AT_LAUNCH * THREADS - PRODUCERS * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8)
#define CONSUMER_REGISTERS (REGISTERS_LEFT < 240 ? REGISTERS_LEFT : 240)

#define COPIED_WEIGHTS (FORMAT == X && WEIGHT_ALIGN == 16) /* otherwise through registers */
#define SLICE 64 /* inputs, 128 bytes of a row */
#define FILL_SLICES (COPIED_WEIGHTS ? 1 : STEP / SLICE)
#define FILL_INPUTS (FILL_SLICES * SLICE)
#define NUM_FILLS ((INNER + FILL_INPUTS - 1) / FILL_INPUTS)
#define ROWS_AT (TILE_WEIGHTS * 32) /* in a slice, behind the weights */
#define SLICE_WORDS (ROWS_AT + MOST_ROWS * 32)
#define FILL_WORDS (SLICE_WORDS * FILL_SLICES)
static_assert(FILL_SLICES > 0 && INNER % 8 == 0 && X_ALIGN == 16, "rows in slices and chunks");

/* What is known of a tile: expert, first row, number of rows (0: no more tiles), first column; then its rows' weights. So many tiles at
   once: producers say what comes when they are up to STAGES fills ahead. */
#define TILE_WORDS (4 + MOST_ROWS)
#define MOST_STAGES 7 /* a full and an empty barrier each, of 15 */
#define STAGES_THAT_FIT ((SHARED_BYTES / 4 - (MOST_STAGES / NUM_FILLS + 2) * TILE_WORDS) / FILL_WORDS)
#define STAGES (STAGES_THAT_FIT < MOST_STAGES ? STAGES_THAT_FIT : MOST_STAGES)
#define TILES_AT (STAGES * FILL_WORDS)
#define TILES_END (TILES_AT + (STAGES / NUM_FILLS + 2) * TILE_WORDS)
static_assert(STAGES >= 2 && TILES_END * 4 <= SHARED_BYTES, "shared memory of a block");

#define BLOCKS_OF_64 (TILE_WEIGHTS / 128) /* weight rows of a warpgroup */
#define TILE_COLUMNS (GATED ? TILE_WEIGHTS / 2 : TILE_WEIGHTS)
#define COLUMN_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)
#define WEIGHS (WEIGHT_ON_INPUT || WEIGHT_ON_OUTPUT)

/* The barriers of a stage: it is full, it may be filled. */
DEVICE u32 full_barrier(u32 stage) { return 1 + stage; }
DEVICE u32 empty_barrier(u32 stage) { return 1 + STAGES + stage; }

/* Where chunk `chunk` of row `row` of a slice is, as the products want it. */
DEVICE u32 chunk_word(u32 row, u32 chunk) { return (row * 8 + (chunk ^ (row & 7))) * 4; }
DEVICE u32 weight_place(u32 n, u32 chunk) { return chunk / 8 * SLICE_WORDS + chunk_word(n, chunk & 7); }
#include "unpacked.h"

/* ---- tiles ---- */

struct tile_place { u32 expert, base, rows, first_column; };

/* The output column of the tile's weight row n = ((group * BLOCKS_OF_64 + block) * 4 + warp) * 16 + half * 8 + i, in which half 1 is up where
   there is a gate. Past the matrix: its last one, whose sums nobody uses. */
DEVICE u32 tile_column(u32 first_column, u32 n) {
    const u32 i = n & 7, half = GATED ? 0 : n >> 3 & 1, warp = n >> 4 & 3, block = n >> 6 & (BLOCKS_OF_64 - 1), group = n / (64 * BLOCKS_OF_64);
    const u32 halves = GATED ? 1 : 2, lane_columns = halves * BLOCKS_OF_64 * 2;
    const u32 column = first_column + ((group * 4 + warp) * 4 + i / 2) * lane_columns + (block * halves + half) * 2 + i % 2;
    return column < COLUMNS ? column : COLUMNS - 1;
}

DEVICE bool is_up(u32 n) { return GATED && (n >> 3 & 1) != 0; }

DEVICE weight_row tile_weight_row(const moer_matmul_args &a, const tile_place &p, u32 n) {
    return find_weight_row(UP_APART && is_up(n) ? a.up_weights : a.weights, p.expert, column_row(tile_column(p.first_column, n), is_up(n)));
}

/* How far a warp has counted: the distinct experts before `first` have `before` row tiles. */
struct tile_search { u32 first, before; };

/* Tile `tile`, no less than the last one; false: there are fewer. */
DEVICE bool find_tile(const moer_matmul_args &a, u32 num_distinct, tile_search &s, u32 tile, tile_place &p) {
    const u32 lane = lane_index(), row_tile = tile / COLUMN_TILES;
    for (; s.first < num_distinct; s.first += 32) {
        const u32 d = s.first + lane;
        const u32 begin = d < num_distinct ? (u32)a.distinct_offsets[d] : 0, end = d < num_distinct ? (u32)a.distinct_offsets[d + 1] : 0;
        const u32 count = (end - begin + MOST_ROWS - 1) / MOST_ROWS;
        const u32 sum = scan_warp(count);
        const u32 beyond = warp_ballot(s.before + sum <= row_tile); /* lanes whose tiles all come before */
        if (beyond != 0xffffffffu) {
            const u32 owner = popcount(beyond), index = row_tile - s.before - warp_shuffle(sum - count, owner);
            const u32 first = warp_shuffle(begin, owner), num_rows = warp_shuffle(end, owner) - first;
            const u32 tiles = warp_shuffle(count, owner), even = (num_rows + tiles - 1) / tiles;
            p.expert = (u32)a.distinct_experts[s.first + owner];
            p.base = first + index * even;
            p.rows = num_rows - index * even < even ? num_rows - index * even : even;
            p.first_column = tile % COLUMN_TILES * TILE_COLUMNS;
            return true;
        }
        s.before += warp_shuffle(sum, 31);
    }
    return false;
}

/* ---- producers ---- */

/* Eight threads copy a row's chunks. */
#define ROWS_A_PASS (PRODUCERS / 8)
#define ROW_PASSES ((MOST_ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS)
#define WEIGHT_PASSES (TILE_WEIGHTS / ROWS_A_PASS)
#define GROUPS_A_WARP (TILE_WEIGHTS / 16 / PRODUCER_WARPS) /* of 16 weight rows */
#define LAG (STAGES > 2 ? STAGES - 2 : 0)                  /* fills that are under way when the one before them is said to be full */

struct producer {
    shared_place target;
    u32 thread, place;      /* among the producers; where its chunk of the first rows is, from the first word */
    u32 fills;              /* so far */
    u32 x_row[ROW_PASSES];  /* rows of x, of the tile */
    u32 rows;               /* of them, up to a multiple of 16 */
};

template <class Words>
DEVICE void tell_tile(const moer_matmul_args &a, Words &words, const tile_place &p, u32 at, u32 thread) {
    if (WEIGHS)
        for (u32 r = thread; r < p.rows; r += PRODUCERS) words[at + 4 + r] = f32_bits(load_value(a.router_weights, (u32)a.row_to_pair[p.base + r], WEIGHTS));
    if (thread != 0) return;
    words[at] = p.expert;
    words[at + 1] = p.base;
    words[at + 2] = p.rows;
    words[at + 3] = p.first_column;
}

/* Rows past the tile's last, up to a multiple of 16, are its first. */
DEVICE void find_rows(const moer_matmul_args &a, const tile_place &p, producer &my) {
    my.rows = (p.rows + 15) / 16 * 16;
#pragma unroll
    for (u32 i = 0; i < ROW_PASSES; i++) {
        const u32 r = i * ROWS_A_PASS + my.thread / 8, row = p.base + (r < p.rows ? r : 0);
        my.x_row[i] = r < my.rows ? x_row_of(a, X_INDEX == 2 ? row : (u32)a.row_to_pair[row]) : 0;
    }
}

/* Waits until the stage of the next fill may be filled. */
DEVICE u32 begin_fill(const producer &my) {
    const u32 stage = my.fills % STAGES;
    if (my.fills >= STAGES) block_barrier_named(empty_barrier(stage), THREADS);
    return stage;
}

DEVICE void start_rows(const moer_matmul_args &a, const producer &my, u32 at, u32 fill) {
#pragma unroll
    for (u32 slice = 0; slice < FILL_SLICES; slice++) {
        const u32 k = fill * FILL_INPUTS + slice * SLICE + (my.thread & 7) * 8, size = INNER % FILL_INPUTS == 0 || k < INNER ? 16 : 0;
        const u8 *const x = (const u8 *)a.x + (size ? k * 2 : 0);
#pragma unroll
        for (u32 i = 0; i < ROW_PASSES; i++)
            if (i * ROWS_A_PASS + my.thread / 8 < my.rows)
                copy_async_16(my.target, at + slice * SLICE_WORDS + ROWS_AT + my.place + i * ROWS_A_PASS * 32, x + (u64)my.x_row[i] * (INNER * 2), size);
    }
}

#if COPIED_WEIGHTS

/* Rows of the same warp, half and lane are so many weight rows apart, unless the tile has none of them. */
#define WEIGHT_STRIDES (COLUMNS % TILE_COLUMNS == 0 && ROWS_A_PASS == 16)

DEVICE void start_weights(const moer_matmul_args &a, const producer &my, const tile_place &p, const u8 *first, u32 at, u32 fill) {
    const u32 k = fill * SLICE + (my.thread & 7) * 8, size = INNER % SLICE == 0 || k < INNER ? 16 : 0, offset = size ? k * 2 : 0;
#pragma unroll
    for (u32 i = 0; i < WEIGHT_PASSES; i++) {
        const u8 *const row = WEIGHT_STRIDES ? first + tile_column(0, i * 16) * (GATED && INTERLEAVED ? 2 : 1) * ROW_BYTES : tile_weight_row(a, p, i * ROWS_A_PASS + my.thread / 8).data;
        copy_async_16(my.target, at + my.place + i * ROWS_A_PASS * 32, row + offset, size);
    }
}

DEVICE void fill_tile(const moer_matmul_args &a, producer &my, const tile_place &p) {
    const u8 *const first = tile_weight_row(a, p, my.thread / 8).data;
#pragma unroll 1
    for (u32 fill = 0; fill < NUM_FILLS; fill++) {
        const u32 at = begin_fill(my) * FILL_WORDS;
        start_rows(a, my, at, fill);
        start_weights(a, my, p, first, at, fill);
        copy_async_commit();
        if (my.fills >= LAG) {
            copy_async_wait<LAG>();
            block_barrier_arrive(full_barrier((my.fills - LAG) % STAGES), THREADS);
        }
        my.fills++;
    }
}

DEVICE void finish_fills(const producer &my) {
    copy_async_wait<0>();
    for (u32 left = my.fills < LAG ? my.fills : LAG; left > 0; left--) block_barrier_arrive(full_barrier((my.fills - left) % STAGES), THREADS);
}

#else

/* A lane's weight rows, those of its warp's groups of 16, and its parts of them in one fill. */
struct code_rows { weight_row low[GROUPS_A_WARP], high[GROUPS_A_WARP]; };
struct codes { weight_chunk low[GROUPS_A_WARP], high[GROUPS_A_WARP]; };

DEVICE u32 first_weight_row(const producer &my) { return my.thread / 32 * 16 + (lane_index() >> 2); }

DEVICE void find_code_rows(const moer_matmul_args &a, const producer &my, const tile_place &p, code_rows &rows) {
#pragma unroll
    for (u32 i = 0; i < GROUPS_A_WARP; i++) {
        const u32 n = first_weight_row(my) + i * PRODUCER_WARPS * 16;
        rows.low[i] = tile_weight_row(a, p, n);
        rows.high[i] = tile_weight_row(a, p, n + 8);
    }
}

DEVICE void load_codes(const code_rows &rows, u32 fill, codes &c) {
#pragma unroll
    for (u32 i = 0; i < GROUPS_A_WARP; i++) {
        c.low[i] = load_weight_chunk(rows.low[i], fill, false);
        c.high[i] = load_weight_chunk(rows.high[i], fill, false);
    }
}

/* `rows` and `now` are those of the tile's first fill, and then those of `next`, the tile after it or this one again. Codes are loaded a fill
   ahead, before a barrier, so that the compiler leaves them there: it would rather load them when the fill before is done. */
template <class Words>
DEVICE void fill_tile(const moer_matmul_args &a, Words &words, producer &my, const tile_place &next, code_rows &rows, codes &now) {
#pragma unroll 1
    for (u32 fill = 0; fill < NUM_FILLS; fill++) {
        codes then;
        if (fill + 1 == NUM_FILLS) find_code_rows(a, my, next, rows);
        load_codes(rows, fill + 1 == NUM_FILLS ? 0 : fill + 1, then);
        const u32 stage = begin_fill(my), at = stage * FILL_WORDS;
        start_rows(a, my, at, fill);
        copy_async_commit();
#pragma unroll
        for (u32 i = 0; i < GROUPS_A_WARP; i++) {
            const u32 n = first_weight_row(my) + i * PRODUCER_WARPS * 16;
            arrange_weight_chunk(now.low[i]);
            arrange_weight_chunk(now.high[i]);
            store_weights(words, now.low[i], fill, at, n);
            store_weights(words, now.high[i], fill, at, n + 8);
        }
        copy_async_wait<0>();
        block_barrier_arrive(full_barrier(stage), THREADS);
        my.fills++;
        now = then;
    }
}

DEVICE void finish_fills(const producer &) {}

#endif

template <class Words>
DEVICE void produce(const moer_matmul_args &a, Words &words) {
    const u32 num_distinct = (u32)a.distinct_count[0];
    u32 at = TILES_AT;
    tile_search search = {0, 0};
    tile_place p;
    producer my;
    my.target = shared_place_of(words, 0);
    my.thread = thread_index() - CONSUMERS;
    my.place = chunk_word(my.thread / 8, my.thread & 7);
    my.fills = 0;
#if COPIED_WEIGHTS
    for (u32 tile = block_index_x(); find_tile(a, num_distinct, search, tile, p); tile += grid_blocks_x()) {
        find_rows(a, p, my);
        tell_tile(a, words, p, at, my.thread);
        at = at + TILE_WORDS == TILES_END ? TILES_AT : at + TILE_WORDS;
        fill_tile(a, my, p);
    }
#else
    u32 tile = block_index_x();
    bool found = find_tile(a, num_distinct, search, tile, p);
    code_rows rows;
    codes now;
    if (found) {
        find_code_rows(a, my, p, rows);
        load_codes(rows, 0, now);
    }
    while (found) {
        tile_place next = p;
        find_rows(a, p, my);
        tell_tile(a, words, p, at, my.thread);
        at = at + TILE_WORDS == TILES_END ? TILES_AT : at + TILE_WORDS;
        found = find_tile(a, num_distinct, search, tile += grid_blocks_x(), next);
        fill_tile(a, words, my, next, rows, now);
        p = next;
    }
#endif
    finish_fills(my);
    /* An empty fill for the end, and the barriers at which consumers have left the last ones. */
    if (my.thread == 0) words[at + 2] = 0;
    block_barrier_arrive(full_barrier(begin_fill(my)), THREADS);
    for (u32 i = 1; i < STAGES; i++) {
        my.fills++;
        begin_fill(my);
    }
}

/* ---- consumers ---- */

typedef float tile_sums[BLOCKS_OF_64][MOST_ROWS / 8][4];

/* The products of a tile of up to N rows, whose first fill is there. */
template <u32 N, class Words>
DEVICE void multiply_tile(tile_sums &sums, Words &words, u32 &stage) {
    const u32 group = warp_index() / 4;
    u32 previous = 0;
#pragma unroll
    for (u32 m = 0; m < BLOCKS_OF_64; m++)
#pragma unroll
        for (u32 j = 0; j < N / 8; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[m][j][i] = 0.0f;
#pragma unroll 1
    for (u32 fill = 0; fill < NUM_FILLS; fill++) {
        if (fill != 0) block_barrier_named(full_barrier(stage), THREADS);
        shared_visible_to_products();
        warpgroup_begin();
#pragma unroll
        for (u32 slice = 0; slice < FILL_SLICES; slice++) {
            const u32 at = stage * FILL_WORDS + slice * SLICE_WORDS;
#pragma unroll
            for (u32 k = 0; k < SLICE / 16; k++)
#pragma unroll
                for (u32 m = 0; m < BLOCKS_OF_64; m++)
                    warpgroup_multiply(N, X == DTYPE_F16, sums[m], words, at + (group * BLOCKS_OF_64 + m) * 2048 + k * 8, at + ROWS_AT + k * 8);
        }
        warpgroup_commit();
        if (fill != 0) {
            warpgroup_wait<1>();
            block_barrier_arrive(empty_barrier(previous), THREADS);
        }
        previous = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    warpgroup_wait<0>();
    block_barrier_arrive(empty_barrier(previous), THREADS);
}

/* The outputs of rows r and r + 1 from their sums, of one weight row or of gate and up. */
DEVICE u32 finish_pair(const moer_matmul_args &a, const float (&sums)[4], u32 half, const float (&scale)[2], const float (&bias)[2], const float (&weight)[2]) {
    float value[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float up = GATED ? sums[2 + i] : 0.0f;
        value[i] = sums[half * 2 + i];
        if (ROW_HAS_SCALE) value[i] = f32_mul(value[i], scale[half]);
        if (ROW_HAS_SCALE && GATED) up = f32_mul(up, scale[1]);
        value[i] = finish_sums(a, bias[half], bias[1], weight[i], value[i], up);
        if (WEIGHT_ON_OUTPUT) value[i] = f32_mul(value[i], weight[i]);
    }
    return OUT == DTYPE_F16 ? f32_to_half2(value[0], value[1]) : f32_to_bf162(value[0], value[1]);
}

/* `about` is where what is known of the tile is. */
template <class Words>
DEVICE void finish_tile(const moer_matmul_args &a, const tile_sums &sums, Words &words, const tile_place &p, u32 about) {
    const u32 warp = warp_index() & 3, group = warp_index() / 4, g = lane_index() >> 2, t = lane_index() & 3;
    constexpr u32 halves = GATED ? 1 : 2, lane_words = halves * BLOCKS_OF_64; /* of a lane, in a row */
    const u32 column = p.first_column + ((group * 4 + warp) * 4 + t) * lane_words * 2;
    float scale[BLOCKS_OF_64][2], bias[BLOCKS_OF_64][2];
#pragma unroll
    for (u32 m = 0; m < BLOCKS_OF_64; m++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 n = ((group * BLOCKS_OF_64 + m) * 4 + warp) * 16 + half * 8 + g;
            scale[m][half] = ROW_HAS_SCALE ? row_scale(tile_weight_row(a, p, n)) : 1.0f;
            bias[m][half] = BIAS ? load_value(UP_APART && is_up(n) ? a.up_bias : a.bias, (u64)p.expert * ROWS + column_row(tile_column(p.first_column, n), is_up(n)), BIAS) : 0.0f;
        }
#pragma unroll
    for (u32 j = 0; j < MOST_ROWS / 8; j++) {
        if (j * 8 >= p.rows) break;
        const u32 row = j * 8 + g;
        float weight[2];
        u32 out[lane_words];
#pragma unroll
        for (u32 i = 0; i < 2; i++) weight[i] = WEIGHS && j * 8 + t * 2 + i < p.rows ? f32_from_bits(words[about + 4 + j * 8 + t * 2 + i]) : 1.0f;
#pragma unroll
        for (u32 m = 0; m < BLOCKS_OF_64; m++)
#pragma unroll
            for (u32 half = 0; half < halves; half++) out[m * halves + half] = matrix_transpose(finish_pair(a, sums[m][j], half, scale[m], bias[m], weight));
        if (row >= p.rows || column >= COLUMNS) continue;
        u32 *const to = (u32 *)((u16 *)a.out + (u64)(p.base + row) * COLUMNS + column);
        if (lane_words == 4) store_16(to, u32x4{{out[0], out[1 % lane_words], out[2 % lane_words], out[3 % lane_words]}});
        else if (lane_words == 2) store_8(to, u32x2{{out[0], out[1 % lane_words]}});
        else *to = out[0];
    }
}

template <class Words>
DEVICE void consume(const moer_matmul_args &a, Words &words) {
    tile_sums sums;
    u32 stage = 0;
#pragma unroll 1
    for (u32 about = TILES_AT;; about = about + TILE_WORDS == TILES_END ? TILES_AT : about + TILE_WORDS) {
        block_barrier_named(full_barrier(stage), THREADS);
        const u32 rows = words[about + 2];
        if (rows == 0) break;
        const tile_place p = {words[about], words[about + 1], rows, words[about + 3]};
        switch ((p.rows + 15) / 16) {
        case 1: multiply_tile<16>(sums, words, stage); break;
        case 2: multiply_tile<32>(sums, words, stage); break;
#if MOST_ROWS >= 64
        case 3: multiply_tile<48>(sums, words, stage); break;
        case 4: multiply_tile<64>(sums, words, stage); break;
#endif
#if MOST_ROWS >= 128
        case 5: multiply_tile<80>(sums, words, stage); break;
        case 6: multiply_tile<96>(sums, words, stage); break;
        case 7: multiply_tile<112>(sums, words, stage); break;
        case 8: multiply_tile<128>(sums, words, stage); break;
#endif
#if MOST_ROWS >= 160
        case 9: multiply_tile<144>(sums, words, stage); break;
        case 10: multiply_tile<160>(sums, words, stage); break;
#endif
        }
        finish_tile(a, sums, words, p, about);
    }
}

KERNEL(moe_route_grouped_warpgroups, THREADS, moer_matmul_args) {
    DYNAMIC_SHARED_FOR_PRODUCTS(words);
    wait_for_previous_kernels();
    let_next_kernel_start();
    if (warp_index() >= CONSUMERS / 32) {
        release_registers<PRODUCER_REGISTERS>();
        produce(a, words);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume(a, words);
    }
}
