/*
  passes.h: the work of a matmul over the distinct experts of a batch, and who does which part of it: which tiles of weight rows and which
  rows of x there are, the range of them that a block takes, the way from one to the next, and what becomes of a finished
  output. How the products come about belongs to matmul.cu and matmul_bulk.cu.

  Constants: TILE_TOKENS, rows of x that a tile of weights is applied to at once; OUT, OUT_ORDER, X_ORDER, OUT_INDEX and those of output.h as in matmul.cu.
*/
#include "scan.h"
#include "output.h"

#ifndef OUT_ORDER
#define OUT_ORDER PAIRS_LINEAR
#endif

#define TILE_COLUMNS (GATED ? 8 : 16)
#define NUM_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)
#define EVEN_TILES (COLUMNS % TILE_COLUMNS == 0 && ROWS_ALIKE) /* whose rows are always as far from each other */

/* The weight row that is row `i` (0 to 15) of a tile. Past the matrix: its last row, whose sums nobody uses. */
DEVICE u64 tile_row(u32 tile, u32 i) {
    u64 column = (u64)tile * TILE_COLUMNS + (GATED ? i & 7 : i);
    if (COLUMNS % TILE_COLUMNS != 0 && column >= COLUMNS) column = COLUMNS - 1;
    return column_row(column, i >= 8);
}

/* The first entries of the maps, a lane each, all loaded at once: loads that wait for each other would be a good part of a step with few tokens. What
   lies beyond the last distinct expert isn't used. */
struct first_maps { u32 expert, end_row, pair; };

/* Rows of x come from the kernel before this one, which has waited for the maps before it let this one start: so they may be read meanwhile, and tell which weights to begin
   with. */
constexpr bool MAPS_ARE_THERE = X_INDEX == 2;
/* So what reads x or writes waits for the kernel before; what reads the maps alone, unless they are there. */
DEVICE void wait_if(bool wanted) {
    if (!wanted) return;
    wait_for_previous_kernels();
    let_next_kernel_start();
}
DEVICE u32 load_map(const int *p) { return MAPS_ARE_THERE ? load_fresh_4(p) : (u32)*p; }

DEVICE first_maps load_first_maps(const moer_matmul_args &a) {
    const u32 lane = lane_index();
    first_maps m = {0, 0, 0};
    if (lane < a.max_distinct) {
        m.expert = load_map(a.distinct_experts + lane);
        m.end_row = load_map(a.distinct_offsets + lane + 1);
    }
    if (X_INDEX != 2 && lane < a.num_pairs) m.pair = load_map(a.row_to_pair + lane);
    return m;
}

/* Later ones are loaded a tile ahead, and wait for nobody. */
struct later_maps {};
DEVICE u32 expert_of(const moer_matmul_args &a, const later_maps &, u32 d) { return (u32)a.distinct_experts[d]; }
DEVICE u32 end_row_of(const moer_matmul_args &a, const later_maps &, u32 d) { return (u32)a.distinct_offsets[d + 1]; }
DEVICE u32 pair_of(const moer_matmul_args &a, const later_maps &, u32 row, u32) { return (u32)a.row_to_pair[row]; }

/* All lanes ask for the same d; each for a row of its own, below end_row, which is the same for all. */
DEVICE u32 expert_of(const moer_matmul_args &a, const first_maps &m, u32 d) { return d < 32 ? warp_shuffle(m.expert, d) : load_map(a.distinct_experts + d); }
DEVICE u32 end_row_of(const moer_matmul_args &a, const first_maps &m, u32 d) { return d < 32 ? warp_shuffle(m.end_row, d) : load_map(a.distinct_offsets + d + 1); }
DEVICE u32 pair_of(const moer_matmul_args &a, const first_maps &m, u32 row, u32 end_row) { return end_row <= 32 ? warp_shuffle(m.pair, row) : load_map(a.row_to_pair + row); }

/* A pass is all tiles of an expert with up to TILE_TOKENS of its rows. Blocks share the passes' tiles evenly, else one popular expert would keep
   some of them for twice as long. */

/* Passes of distinct expert 32 * chunk + lane. */
DEVICE u32 passes_of(const moer_matmul_args &a, const first_maps &m, u32 chunk, u32 num_distinct) {
    const u32 d = chunk * 32 + lane_index();
    u32 begin = warp_shuffle_up(m.end_row, 1), end = m.end_row;
    if (lane_index() == 0) begin = 0;
    if (chunk != 0 && d < num_distinct) {
        begin = load_map(a.distinct_offsets + d);
        end = load_map(a.distinct_offsets + d + 1);
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

/* A block's share of the tiles of all passes: so many from a tile of a pass on. 32 bits count them, since no memory has room for an output of more. */
struct work_range { u32 pass, tile, num_tiles; };

DEVICE work_range find_range(u32 num_passes) {
    const u64 total = (u64)num_passes * NUM_TILES;
    const u32 blocks = grid_blocks_x(), block = block_index_x();
    const u64 share = total >> 32 ? total / blocks : (u32)total / blocks, rest = total - share * blocks; /* a long division takes long */
    const u64 begin = block * share + (block < rest ? block : rest);
    work_range range;
    range.pass = total >> 32 ? (u32)(begin / NUM_TILES) : (u32)begin / NUM_TILES;
    range.tile = (u32)(begin - (u64)range.pass * NUM_TILES);
    range.num_tiles = (u32)share + (block < rest);
    return range;
}

/* Where a block is in its range: a tile of distinct expert d with its rows of x from `base` on; `left`: tiles to do, with this one. */
struct tile_place {
    u32 left, d, tile;
    u32 expert, base, end_row;
};

/* Tile `tile` of the distinct expert's pass `skipped`. */
template <class Maps>
DEVICE void enter_expert(const moer_matmul_args &a, const Maps &m, tile_place &p, u32 d, u32 skipped, u32 tile) {
    p.d = d;
    p.tile = tile;
    p.expert = expert_of(a, m, d);
    p.base = (d == 0 ? 0 : end_row_of(a, m, d - 1)) + skipped * TILE_TOKENS;
    p.end_row = end_row_of(a, m, d);
}

DEVICE tile_place enter_range(const moer_matmul_args &a, const first_maps &m, u32 num_distinct) {
    const u32 num_passes = a.num_pairs <= TILE_TOKENS ? num_distinct : count_passes(a, m, num_distinct);
    const work_range range = find_range(num_passes);
    tile_place p = {};
    p.left = range.num_tiles;
    if (p.left == 0) return p;
    const pass_place first = num_passes == num_distinct ? pass_place{range.pass, 0} : find_pass(a, m, num_distinct, range.pass);
    enter_expert(a, m, p, first.d, first.pass, range.tile);
    return p;
}

/* To the next tile, if there is one; true where it has other rows of x. */
DEVICE bool next_tile(const moer_matmul_args &a, tile_place &p) {
    if (--p.left == 0) return false;
    if (++p.tile < NUM_TILES) return false;
    p.tile = 0;
    p.base += TILE_TOKENS;
    if (p.base >= p.end_row) enter_expert(a, later_maps{}, p, p.d + 1, 0, 0);
    return true;
}

/* The row of x of token `token` of a tile. Where there is no token: another's, whose sums nobody uses, or none where multiplying costs time by the token. */
#define NO_ROW 0xffffffffu
template <class Maps>
DEVICE u32 find_x_row(const moer_matmul_args &a, const Maps &m, const tile_place &p, u32 token) {
    const u32 wanted = p.base + token, row = wanted < p.end_row ? wanted : p.base;
    const u32 x_row = x_row_of(a, X_INDEX == 2 ? row : pair_of(a, m, row, p.end_row));
    return !TENSOR_CORES && wanted >= p.end_row ? NO_ROW : x_row;
}

DEVICE const u8 *activations(const moer_matmul_args &a, u32 x_row) { return x_row == NO_ROW ? 0 : (const u8 *)a.x + (u64)x_row * INNER * X_BYTES; }

/* Where element i of a row is, whose pairs lie in this order. */
DEVICE u32 place_in_order(int order, u32 i) {
    if (order == PAIRS_OF_4) return i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
    if (order == PAIRS_OF_8) return i / 8 * 8 + i % 4 * 2 + i / 4 % 2;
    return i;
}

/* Where the output of a tile's column c and a token goes. */
struct output_place {
    u32 pair, column;
    int at; /* row of out; -1: nowhere */
};

DEVICE output_place find_output(const moer_matmul_args &a, const tile_place &p, u32 c, u32 token) {
    const u32 row = p.base + token;
    output_place o = {row, p.tile * TILE_COLUMNS + c, -1};
    if (row >= p.end_row || o.column >= COLUMNS) return o;
    if (OUT_INDEX || WEIGHT_ON_INPUT) o.pair = (u32)a.row_to_pair[row];
    o.at = OUT_INDEX == 2 ? a.pair_to_slot_row[o.pair] : (int)(OUT_INDEX ? o.pair : row);
    return o;
}

/* Makes an output of the parts' sums, and writes it. */
DEVICE void write_output(const moer_matmul_args &a, const output_place &o, float bias, float up_bias, float value, float up) {
    value = finish_sums(a, bias, up_bias, WEIGHT_ON_INPUT ? load_value(a.router_weights, o.pair, WEIGHTS) : 1.0f, scale_codes(value), scale_codes(up));
    store_value(a.out, (u64)(u32)o.at * COLUMNS + place_in_order(OUT_ORDER, o.column), OUT, value);
}

/* The pairs that no expert here serves. */
DEVICE void clear_other_pairs(const moer_matmul_args &a) {
    const u32 threads = grid_blocks_x() * block_threads();
    for (u64 i = block_index_x() * block_threads() + thread_index(); i < (u64)a.num_pairs * COLUMNS; i += threads)
        if (a.pair_to_row[i / COLUMNS] < 0) store_value(a.out, i, OUT, 0.0f);
}

/* One array of all distinct experts, in pieces that the threads share. Together they fit L2, or there are none: so 32 bits count them. */
DEVICE void prefetch_array(const moer_matmul_args &a, const void *data, u64 bytes, u32 num_experts) {
    const u32 pieces = (u32)(bytes + PREFETCH_BYTES - 1) / PREFETCH_BYTES;
    for (u32 i = block_index_x() + grid_blocks_x() * thread_index(); i < pieces * num_experts; i += grid_blocks_x() * block_threads()) {
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

