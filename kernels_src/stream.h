/*
  stream.h: the weights of a warp's tiles as one stream of steps that never stops: as soon as a step has been taken out, the
  one that comes some steps later is on its way, of this tile or of the next. What a step is, and its product, are in
  tile.h.

  Where rows and scales are aligned for it, the steps under way are in shared memory, filled by asynchronous copies
  (STREAM_COPIES 1; a kernel that has no room there defines 0). Otherwise they are in registers; then the compiler decides when
  they are loaded, and puts that off to the end of the tile.

  multiply_tile does a tile; start_weights and start_activations begin a stream, end_stream ends it.
*/
#include "held.h"

#if TENSOR_CORES

/* Functions rather than macros, whose expansions would be most of what the compiler reads. */
/* Whether the activations of all of a warp's steps stay in registers from tile to tile. */
DEVICE constexpr bool can_hold(u32 parts) { return held_words(parts) <= (!STREAM_COPIES && CHUNK_WORDS > 6 ? 0 : STREAM_COPIES && SCALES_FILL_WORDS ? 48 : 32); }
/* Steps under way: three or four of 1 KB in each of 16 warps, to keep memory busy. In registers there is room for 40 to 50
   words a lane, or less beside what is held; of copies with two words of scales three leave eight warps room in 48 KB. MXFP4 in bf16 takes more registers than others. */
DEVICE constexpr u32 stream_words(int how) { return (STREAM_COPIES ? 0 : 2 * CHUNK_WORDS) + (how == X_LOADED ? LANE_VALUES / 2 : 0); }
DEVICE constexpr u32 stream_room(int how, u32 parts) { return how == X_HELD ? 62 - held_words(parts) : SUBS == 4 && X == DTYPE_BF16 ? 40 : 52; }
constexpr u32 STREAM_LIMIT = STREAM_COPIES && STEP_SCALE_WORDS == 2 ? 3 : 4;
DEVICE constexpr u32 stream_most(int how, u32 parts) {
    return stream_words(how) == 0 || stream_room(how, parts) >= STREAM_LIMIT * stream_words(how) ? STREAM_LIMIT
           : stream_room(how, parts) < stream_words(how)                                         ? 1
                                                                                                 : stream_room(how, parts) / stream_words(how);
}
DEVICE constexpr u32 stream_rounds(int how, u32 parts) { return (PART_STEPS(parts) + stream_most(how, parts) - 1) / stream_most(how, parts); }
DEVICE constexpr u32 stream_depth(int how, u32 parts) { return (PART_STEPS(parts) + stream_rounds(how, parts) - 1) / stream_rounds(how, parts); }
/* Words of shared memory for a warp's stream. */
#if STREAM_COPIES
DEVICE constexpr u32 stream_memory(int how, u32 parts) { return stream_depth(how, parts) * STEP_WORDS; }
#else
DEVICE constexpr u32 stream_memory(int, u32) { return 0; }
#endif

template <int HOW, u32 PARTS>
struct weight_stream {
    weight_chunk low[STREAM_COPIES ? 1 : stream_depth(HOW, PARTS)], high[STREAM_COPIES ? 1 : stream_depth(HOW, PARTS)];
    u32 x[HOW == X_LOADED ? stream_depth(HOW, PARTS) : 1][SUBS][NUM_PAIRS];
};

#if STREAM_COPIES
typedef copy_source stream_source;
typedef copy_places stream_places;
DEVICE stream_source find_source(const tile_rows &rows, u32 first_step) { return find_copy_source(rows.low, rows.high, first_step); }
template <class Words>
DEVICE stream_places find_stream_places(Words &words, u32 at) { return find_copy_places(words, at); }
#else
typedef tile_rows stream_source;
struct stream_places {};
DEVICE stream_source find_source(const tile_rows &rows, u32) { return rows; }
template <class Words>
DEVICE stream_places find_stream_places(Words &, u32) { return {}; }
#endif

/* Into place d of the stream: a warp's step `index` of some rows. A place is a group of copies, also where nothing is copied. */
template <int HOW, u32 PARTS>
DEVICE void load_step_weights(weight_stream<HOW, PARTS> &stream, const stream_places &places, u32 d, const stream_source &source, u32 part, u32 index, bool wanted) {
    if (wanted && index < PART_STEPS(PARTS) && step_exists<PARTS>(part, index)) {
#if STREAM_COPIES
        static_assert(STEPS_KEEP_GROUPS(PARTS), "the scales of a warp's steps are found from the first");
        copy_step(places, d * STEP_WORDS, source, FIRST_STEP(part, PARTS), index * STEP_STRIDE(PARTS), is_inner_step<PARTS>(index), has_whole_scales<PARTS>(index));
#else
        stream.low[d] = load_weight_chunk(source.low, step_of<PARTS>(part, index), is_inner_step<PARTS>(index));
        stream.high[d] = load_weight_chunk(source.high, step_of<PARTS>(part, index), is_inner_step<PARTS>(index));
#endif
    }
    if (STREAM_COPIES) copy_async_commit();
}

template <int HOW, u32 PARTS>
DEVICE void load_step_activations(weight_stream<HOW, PARTS> &stream, u32 d, const u8 *x, u32 part, u32 index) {
    if (HOW != X_LOADED || index >= PART_STEPS(PARTS) || !step_exists<PARTS>(part, index)) return;
#pragma unroll
    for (u32 sub = 0; sub < SUBS; sub++) load_activations(x, step_of<PARTS>(part, index), sub, is_inner_step<PARTS>(index), stream.x[d][sub]);
}

/* A stream begins with its weights, which may be known before the activations. */
template <int HOW, u32 PARTS>
DEVICE void start_weights(weight_stream<HOW, PARTS> &stream, const stream_places &places, const stream_source &source, u32 part) {
#pragma unroll
    for (u32 d = 0; d < stream_depth(HOW, PARTS); d++) load_step_weights(stream, places, d, source, part, d, true);
}

template <int HOW, u32 PARTS>
DEVICE void start_activations(weight_stream<HOW, PARTS> &stream, const u8 *x, u32 part) {
#pragma unroll
    for (u32 d = 0; d < stream_depth(HOW, PARTS); d++) load_step_activations(stream, d, x, part, d);
}

DEVICE void end_stream() {
    if (STREAM_COPIES) copy_async_wait<0>();
}

/* sums = the tile's rows times the activations of the blocks of tokens, over the warp's part of K. Meanwhile the stream goes on
   with the `next` tile, if there are `more`, and its part of K. */
template <int HOW, int BLOCKS, u32 PARTS>
DEVICE void multiply_tile(float (&sums)[BLOCKS][4], weight_stream<HOW, PARTS> &stream, const stream_places &places, const held_activations<PARTS> &held, const stream_source &source,
                          const u8 *const (&x)[BLOCKS], u32 part, bool more, const stream_source &next, const u8 *next_x, u32 next_part) {
    constexpr u32 DEPTH = stream_depth(HOW, PARTS), ROUNDS = stream_rounds(HOW, PARTS), UNROLLED = HOW == X_HELD ? ROUNDS : 1;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[b][i] = 0.0f;
#pragma unroll UNROLLED
    for (u32 round = 0; round < ROUNDS; round++)
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            const u32 index = round * DEPTH + d, step = step_of<PARTS>(part, index);
            const bool exists = index < PART_STEPS(PARTS) && step_exists<PARTS>(part, index);
            const auto go_on = [&] {
                if (round + 1 < ROUNDS) load_step_weights(stream, places, d, source, part, index + DEPTH, true);
                else load_step_weights(stream, places, d, next, next_part, d, more);
            };
#if STREAM_COPIES /* taken out at once, so that its place is free again */
            copy_async_wait<DEPTH - 1>();
            warp_barrier();
            weight_chunk low, high;
            if (exists) {
                low = fetch_chunk(places, d * STEP_WORDS, 0, source);
                high = fetch_chunk(places, d * STEP_WORDS, 1, source);
            }
            warp_barrier();
            go_on();
#else
            weight_chunk &low = stream.low[d], &high = stream.high[d];
#endif
            if (exists) {
                if (HOW == X_HELD) multiply_step<BLOCKS, HOW, holds_sums(PARTS)>(sums, low, high, x, step, held.pair[index], held.sums[holds_sums(PARTS) ? index : 0]);
                else multiply_step<BLOCKS, HOW, false>(sums, low, high, x, step, stream.x[HOW == X_LOADED ? d : 0], held.sums[0]);
            }
            if (round + 1 < ROUNDS) load_step_activations(stream, d, x[0], part, index + DEPTH);
            else if (more) load_step_activations(stream, d, next_x, next_part, d);
            if (!STREAM_COPIES) go_on();
        }
}

#else /* f32 multiply-adds: without a stream */

DEVICE constexpr bool can_hold(u32) { return false; }
DEVICE constexpr u32 stream_memory(int, u32) { return 0; }

typedef tile_rows stream_source;
struct stream_places {};
DEVICE stream_source find_source(const tile_rows &rows, u32) { return rows; }
template <class Words>
DEVICE stream_places find_stream_places(Words &, u32) { return {}; }

template <int HOW, u32 PARTS>
struct weight_stream {};

template <int HOW, u32 PARTS>
DEVICE void start_weights(weight_stream<HOW, PARTS> &, const stream_places &, const stream_source &, u32) {}

template <int HOW, u32 PARTS>
DEVICE void start_activations(weight_stream<HOW, PARTS> &, const u8 *, u32) {}

DEVICE void end_stream() {}

template <int HOW, int BLOCKS, u32 PARTS>
DEVICE void multiply_tile(float (&sums)[BLOCKS][4], weight_stream<HOW, PARTS> &, const stream_places &, const held_activations<PARTS> &, const stream_source &source, const u8 *const (&x)[BLOCKS],
                          u32 part, bool, const stream_source &, const u8 *, u32) {
    multiply_part<BLOCKS, PARTS>(sums, source.low, source.high, x, part);
}
#endif
