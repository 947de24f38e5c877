/*
  grouped.h: the product of a tile of activations and a tile of weight rows by a block of eight warps, for batches in which an
  expert has many rows. Both tiles lie in shared memory as f16 or bf16, the activations' type; quantized weights become that on
  their way there (unpacked.h). Which rows they are, and what happens to the sums, belongs to grouped.cu.

  Constants: those of tile.h, with TENSOR_CORES 1; TILE_ROWS, rows of activations in a tile: 32, 64 or 128; SHARED_BYTES, what the tiles may
  take of shared memory.

  K goes through in slices. Activations come by asynchronous copies, STAGES - 1 slices ahead. So do weights that are f16 or bf16 already.
  Others go through registers: while a step of tile.h is multiplied, the codes of the next are loaded, in the layout of packed.h or
  gguf.h: lane 4g + t loads of rows g and g + 8 of its warp's 16.

  Sums are in f32, in the order of K, whatever the tile's size: a row's result doesn't depend on the batch.

  A warp has TILE_ROWS / 2 of the rows, as every other 16 of the tile, and 32 of the 128 weight rows. So a tile with few rows
  shares them among all warps, and multiplies hardly more than them.

  16 bytes are a chunk. Chunks of a row are permuted by the row's number, so that neither rows nor columns of chunks meet in one bank.
  Places in shared memory are sums of what is known when compiled and what a thread works out once.
*/
#include "tile.h"

#define WARPS_ACROSS 4 /* the weight rows; the two halves of the warps share the activations' rows */
#define GROUPED_THREADS 256
#define TILE_WEIGHTS 128
#define COPIED_WEIGHTS (FORMAT == X && WEIGHT_ALIGN == 16) /* otherwise through registers */
#define COPIED_ROWS (X_ALIGN == 16)

/* Slices are of 64 inputs where three stages of them fit, which halves the barriers, else of 32. */
#define STAGES_OF(slice) (COPIED_WEIGHTS ? SHARED_BYTES / 2 / ((TILE_ROWS + TILE_WEIGHTS) * (slice)) : (SHARED_BYTES / 2 - TILE_WEIGHTS * STEP) / (TILE_ROWS * (slice)))
#define SLICE ((COPIED_WEIGHTS || STEP % 64 == 0) && STAGES_OF(64) >= 3 ? 64 : 32)
#define STAGES (STAGES_OF(SLICE) < 6 ? STAGES_OF(SLICE) : 6)
static_assert(STAGES > 1, "a stage to be read, and one to be copied to");
#define NUM_SLICES ((INNER + SLICE - 1) / SLICE)
#define SLICE_CHUNKS (SLICE / 8)
#define ROW_FRAGMENTS (TILE_ROWS / 32) /* of a warp, of 16 rows */
#define COLUMN_FRAGMENTS (TILE_WEIGHTS / 8 / WARPS_ACROSS)

#define FILL_SLICES (COPIED_WEIGHTS ? 1 : STEP / SLICE)    /* whose weights lie in shared memory side by side */
#define FILL_CHUNKS (FILL_SLICES * SLICE_CHUNKS)           /* of a weight row */
#define ROW_WORDS (TILE_ROWS * SLICE / 2)                  /* of a stage */
#define FILL_WORDS (TILE_WEIGHTS * FILL_CHUNKS * 4)
#define WEIGHTS_AT (STAGES * ROW_WORDS)                    /* in shared memory, behind the rows */
#define WEIGHT_STAGES (COPIED_WEIGHTS ? STAGES : 1)
static_assert((WEIGHTS_AT + WEIGHT_STAGES * FILL_WORDS) * 4 <= SHARED_BYTES, "shared memory of a block");

/* The first word of chunk `chunk` of row `row` in a tile with `chunks` a row. Chunks 2i and 2i + 1 are those of 0 and 1, and an exclusive or
   with 8i. */
DEVICE u32 chunk_word(u32 row, u32 chunk, u32 chunks) { return (row * chunks + (chunk ^ (chunks == 4 ? (row >> 1) & 3 : row & 7))) * 4; }

DEVICE u32 weight_place(u32 n, u32 chunk) { return chunk_word(n, chunk, FILL_CHUNKS); }
#include "unpacked.h"

/* ---- what is copied ---- */

/* A thread copies its chunk of every ROWS_A_PASS-th row, 4 KB of a tile at once. */
#define ROWS_A_PASS (GROUPED_THREADS / SLICE_CHUNKS)
#define ROW_PASSES ((TILE_ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS)
#define WEIGHT_PASSES (TILE_WEIGHTS / ROWS_A_PASS)

/* Where from: its chunk of the first slice. */
struct row_sources { const u8 *x[ROW_PASSES]; u32 passes; /* that some warp multiplies */ };
struct weight_sources { const u8 *w[WEIGHT_PASSES]; };

/* Starts to copy slice `slice` to the stage at word `at`. */
template <class Words>
DEVICE void start_rows(Words &words, const shared_place &target, const row_sources &sources, u32 slice, u32 at) {
    if (slice >= NUM_SLICES) return;
    const u32 chunk = thread_index() % SLICE_CHUNKS, k = slice * SLICE + chunk * 8;
    const u32 to = at + chunk_word(thread_index() / SLICE_CHUNKS, chunk, SLICE_CHUNKS);
    const bool inside = INNER % SLICE == 0 || k < INNER;
    const u32 offset = inside || !COPIED_ROWS ? slice * (SLICE * 2) : 0; /* no address past the row, not even for none of its bytes */
#pragma unroll
    for (u32 i = 0; i < ROW_PASSES; i++) {
        if (i >= sources.passes) continue;
        const u8 *const p = sources.x[i] + offset;
        if (COPIED_ROWS) {
            copy_async_16(target, to + i * 1024, p, inside ? 16 : 0);
            continue;
        }
        u32x4 v = {{0, 0, 0, 0}};
#pragma unroll
        for (u32 j = 0; j < 8; j++)
            if (k + j < INNER) v.v[j / 2] |= (u32)load_2(p + j * 2) << (16 * (j % 2));
        shared_store_4(words, to + i * 1024, v);
    }
}

DEVICE void start_weights(const shared_place &target, const weight_sources &sources, u32 slice, u32 at) {
    if (slice >= NUM_SLICES) return;
    const u32 chunk = thread_index() % SLICE_CHUNKS, to = at + chunk_word(thread_index() / SLICE_CHUNKS, chunk, SLICE_CHUNKS);
    const bool inside = INNER % SLICE == 0 || slice * SLICE + chunk * 8 < INNER;
#pragma unroll
    for (u32 i = 0; i < WEIGHT_PASSES; i++) copy_async_16(target, to + i * 1024, sources.w[i] + (inside ? slice * (SLICE * 2) : 0), inside ? 16 : 0);
}

/* ---- the product ---- */

/* sums += 16 inputs, from where the lane's rows of matrices are. Codes that wait to be unpacked leave no registers for all rows at once. */
template <bool ALL, class Words>
DEVICE void multiply_16(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Words &words, u32 rows, u32 weights, u32 fragments) {
    u32 x[ROW_FRAGMENTS][4], w[COLUMN_FRAGMENTS / 2][4];
#pragma unroll
    for (u32 j = 0; j < COLUMN_FRAGMENTS / 2; j++) shared_load_matrices(words, weights + j * 16 * FILL_CHUNKS * 4, w[j]);
#pragma unroll
    for (u32 m = 0; m < ROW_FRAGMENTS; m++)
        if (COPIED_WEIGHTS && (ALL || m < fragments)) shared_load_matrices(words, rows + m * 32 * SLICE_CHUNKS * 4, x[m]);
#pragma unroll
    for (u32 m = 0; m < ROW_FRAGMENTS; m++) {
        if (!ALL && m >= fragments) break;
        if (!COPIED_WEIGHTS) shared_load_matrices(words, rows + m * 32 * SLICE_CHUNKS * 4, x[m]);
#pragma unroll
        for (u32 j = 0; j < COLUMN_FRAGMENTS; j++) multiply_fragments<false>(sums[m][j], x[m], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
    }
}

/* Where the warp's fragments are in a tile of rows and a tile of weights, for the lane. */
DEVICE u32 row_fragment_word() { return chunk_word(warp_index() / WARPS_ACROSS * 16 + (lane_index() & 15), lane_index() >> 4, SLICE_CHUNKS); }
DEVICE u32 weight_fragment_word() {
    return chunk_word(warp_index() % WARPS_ACROSS * (TILE_WEIGHTS / WARPS_ACROSS) + (lane_index() >> 4) * 8 + (lane_index() & 7), (lane_index() >> 3) & 1, FILL_CHUNKS);
}

/* sums += a slice: its rows in the stage at word `rows`, its weights as slice `slice` of the fill at `weights`. The warp has `fragments` of
   its ROW_FRAGMENTS, all with ALL. */
template <bool ALL, class Words>
DEVICE void multiply_slice(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Words &words, u32 rows, u32 weights, u32 slice, u32 fragments) {
    const u32 x = row_fragment_word(), w = weight_fragment_word() ^ slice * (SLICE / 16 * 8);
#pragma unroll
    for (u32 k = 0; k < SLICE / 16; k++) multiply_16<ALL>(sums, words, rows + (x ^ k * 8), weights + (w ^ k * 8), fragments);
}
