/*
  grouped.h: the product of a tile of activations and a tile of weight rows by a block of eight warps, for batches in which an
  expert has many rows. Both tiles lie in shared memory as f16 or bf16, the activations' type; quantized weights become that on
  their way there. Which rows they are, and what happens to the sums, belongs to grouped.cu; what the bytes of a format mean, to
  packed.h and gguf.h.

  Constants: those of tile.h, with TENSOR_CORES 1; TILE_ROWS, rows of activations in a tile: 32, 64 or 128.

  K goes through in slices of 32 inputs. Activations come by asynchronous copies, ROW_STAGES - 1 slices ahead. So do weights that
  are f16 or bf16 already. Others go through registers: while a step of tile.h (1, 2 or 4 slices) is multiplied, the codes of the
  next are loaded, in the layout of packed.h or gguf.h: lane 4g + t loads of rows g and g + 8 of its warp's 16.

  A weight is code * scale (+ min), rounded once to the activations' type; what scales a whole row waits for the sum. In f16 that
  is within 2^-12 of the weight, or 2^-25 where that is more, in bf16 within 2^-9. Sums are in f32, in the order of K, whatever the
  tile's size: a row's result doesn't depend on the batch.

  A warp has TILE_ROWS / 2 of the rows, as every other 16 of the tile, and 32 of the 128 weight rows. So a tile with few rows
  shares them among all warps, and multiplies hardly more than them.

  16 bytes are a chunk. Chunks of a row are permuted by the row's number, so that neither rows nor columns of chunks meet in one
  bank. 48 KB in all is what every GPU gives without asking, and twice that fits each of them.
*/
#include "tile.h"

#define WARPS_ACROSS 4 /* the weight rows; the two halves of the warps share the activations' rows */
#define GROUPED_THREADS 256
#define TILE_WEIGHTS 128
#define SLICE 32
#define NUM_SLICES ((INNER + SLICE - 1) / SLICE)
#define ROW_FRAGMENTS (TILE_ROWS / 32) /* of a warp, of 16 rows */
#define COLUMN_FRAGMENTS (TILE_WEIGHTS / 8 / WARPS_ACROSS)

#define COPIED_WEIGHTS (FORMAT == X && WEIGHT_ALIGN == 16) /* otherwise through registers */
#define COPIED_ROWS (X_ALIGN == 16)
#define FILL_SLICES (STEP / SLICE) /* of a step */
#define FILL_CHUNKS (STEP / 8)     /* of a weight row */
#define ROW_WORDS (TILE_ROWS * SLICE / 2)      /* of a stage */
#define FILL_WORDS (TILE_WEIGHTS * STEP / 2)
#define BLOCK_WORDS 12288
#define STAGES_THAT_FIT (COPIED_WEIGHTS ? BLOCK_WORDS / (ROW_WORDS + FILL_WORDS) : (BLOCK_WORDS - FILL_WORDS) / ROW_WORDS)
#define ROW_STAGES (STAGES_THAT_FIT < 4 ? STAGES_THAT_FIT : 4)
#define WEIGHT_STAGES (COPIED_WEIGHTS ? ROW_STAGES : 1)
static_assert(ROW_STAGES > 0 && (ROW_STAGES * ROW_WORDS + WEIGHT_STAGES * FILL_WORDS) * 4 <= 49152, "shared memory of a block");

/* Whether a scale is a number of the activations' type too: then one multiplication of a pair rounds once. */
#if FORMAT > FORMAT_GGUF
#define SCALES_ARE_PAIRS 0
#else
#define SCALES_ARE_PAIRS (SCALES == SCALES_E4M3 || (DECODE == DTYPE_F16 ? SCALES == DTYPE_F16 : SCALES == DTYPE_BF16 || SCALES == SCALES_E8M0))
#endif

/* The first word of chunk `chunk` of row `row` in a tile with `chunks` a row. */
DEVICE u32 chunk_word(u32 row, u32 chunk, u32 chunks) { return (row * chunks + (chunk ^ (chunks == 4 ? (row >> 1) & 3 : row & 7))) * 4; }

/* ---- activations ---- */

/* What a thread brings of each slice: its chunk of every 64th row; null for rows that no warp multiplies. */
struct row_sources { const u8 *x[(TILE_ROWS + 63) / 64]; };

template <class Words>
DEVICE void start_rows(Words &rows, const row_sources &sources, u32 slice) {
    if (slice >= NUM_SLICES) return;
    const u32 chunk = thread_index() & 3, k = slice * SLICE + chunk * 8, stage = slice % ROW_STAGES * ROW_WORDS;
#pragma unroll
    for (u32 i = 0; i < (TILE_ROWS + 63) / 64; i++) {
        if (!sources.x[i]) continue;
        const u32 word = stage + chunk_word(i * 64 + thread_index() / 4, chunk, 4);
        const u8 *p = sources.x[i] + (u64)k * 2;
        if (COPIED_ROWS && (INNER % SLICE == 0 || k < INNER)) {
            copy_async_16(rows, word, p, 16);
            continue;
        }
        u32x4 v = {{0, 0, 0, 0}};
        if (!COPIED_ROWS)
#pragma unroll
            for (u32 j = 0; j < 8; j++)
                if (k + j < INNER) v.v[j / 2] |= (u32)load_2(p + j * 2) << (16 * (j % 2));
        shared_store_4(rows, word, v);
    }
}

/* ---- weights that are copied ---- */

struct weight_sources { const u8 *w[TILE_WEIGHTS / 64]; };

template <class Words>
DEVICE void start_weights(Words &weights, const weight_sources &sources, u32 slice) {
    if (slice >= NUM_SLICES) return;
    const u32 chunk = thread_index() & 3, k = slice * SLICE + chunk * 8, stage = slice % WEIGHT_STAGES * FILL_WORDS;
#pragma unroll
    for (u32 i = 0; i < TILE_WEIGHTS / 64; i++) {
        const u32 word = stage + chunk_word(i * 64 + thread_index() / 4, chunk, 4);
        if (INNER % SLICE == 0 || k < INNER) copy_async_16(weights, word, sources.w[i] + (u64)k * 2, 16);
        else shared_store_4(weights, word, (u32x4{{0, 0, 0, 0}}));
    }
}

/* ---- weights that go through registers ---- */

/* Two codes' floats times their scale, plus min. */
DEVICE u32 scale_pair(u32 pair, u32 scale_pair, float scale, float min) {
    if (!SUB_HAS_SCALE) return pair;
    if (SCALES_ARE_PAIRS) return DECODE == DTYPE_F16 ? half2_fma(pair, scale_pair, 0x80008000u) : bf162_fma(pair, scale_pair, 0x80008000u);
    float low = DECODE == DTYPE_F16 ? f16_to_f32((u16)pair) : f32_from_bits(pair << 16);
    float high = DECODE == DTYPE_F16 ? f16_to_f32((u16)(pair >> 16)) : f32_from_bits(pair & 0xffff0000u);
    low = SUB_HAS_MIN ? f32_fma(scale, low, min) : f32_mul(scale, low);
    high = SUB_HAS_MIN ? f32_fma(scale, high, min) : f32_mul(scale, high);
    return DECODE == DTYPE_F16 ? f32_to_half2(low, high) : f32_to_bf162(low, high);
}

/* A lane's chunk of step `step`, arranged, as numbers in row `n` of the tile. */
template <class Words>
DEVICE void store_weights(Words &weights, const weight_chunk &c, u32 step, u32 n) {
#pragma unroll
    for (u32 sub = 0; sub < SUBS; sub++) {
        u32 pair[NUM_PAIRS], linear[NUM_PAIRS];
        unpack_sub(c, step, sub, pair);
        const float scale = SUB_HAS_SCALE ? sub_scale(c, step, sub) : 1.0f, min = SUB_HAS_MIN ? sub_min(c, step, sub) : 0.0f;
        const u32 scales = SUB_HAS_SCALE && SCALES_ARE_PAIRS ? (DECODE == DTYPE_F16 ? f32_to_half2(scale, scale) : f32_to_bf162(scale, scale)) : 0;
#pragma unroll
        for (u32 i = 0; i < NUM_PAIRS; i++) pair[i] = scale_pair(pair[i], scales, scale, min);
#pragma unroll
        for (u32 i = 0; i < NUM_PAIRS; i++) { /* values 2i and 2i + 1 */
            if (PAIR_ORDER == PAIRS_LINEAR) linear[i] = pair[i];
            else if (PAIR_ORDER == PAIRS_OF_4) linear[i] = select_bytes(pair[i / 2 * 2], pair[i / 2 * 2 + 1], i % 2 == 0 ? 0x5410 : 0x7632);
            else linear[i] = select_bytes(pair[(i / 4 * 4 + i % 2 * 2) % NUM_PAIRS], pair[(i / 4 * 4 + i % 2 * 2 + 1) % NUM_PAIRS], i % 4 < 2 ? 0x5410 : 0x7632);
        }
#pragma unroll
        for (u32 run = 0; run < LANE_SUB; run += LANE_RUN) {
            const u32 k = sub * 4 * LANE_SUB + run * 4 + lane_quarter() * LANE_RUN;
            if (LANE_RUN % 8 == 0) {
#pragma unroll
                for (u32 i = 0; i < LANE_RUN / 8; i++) {
                    const u32x4 v = {{linear[(run / 2 + i * 4) % NUM_PAIRS], linear[(run / 2 + i * 4 + 1) % NUM_PAIRS], linear[(run / 2 + i * 4 + 2) % NUM_PAIRS], linear[(run / 2 + i * 4 + 3) % NUM_PAIRS]}};
                    shared_store_4(weights, chunk_word(n, k / 8 + i, FILL_CHUNKS), v);
                }
            } else {
                const u32x2 v = {{linear[run / 2], linear[run / 2 + 1]}};
                shared_store_2(weights, chunk_word(n, k / 8, FILL_CHUNKS) + k % 8 / 2, v);
            }
        }
    }
}

/* ---- the product ---- */

/* sums += slice `slice`. The warp has `fragments` of its ROW_FRAGMENTS, all with ALL. */
template <bool ALL, class Rows, class Weights>
DEVICE void multiply_slice(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Rows &rows, Weights &weights, u32 slice, u32 fragments) {
    const u32 lane = lane_index(), warp = warp_index();
    const u32 row = warp / WARPS_ACROSS * 16 + (lane & 15), row_stage = slice % ROW_STAGES * ROW_WORDS;
    const u32 column = warp % WARPS_ACROSS * (TILE_WEIGHTS / WARPS_ACROSS) + (lane >> 4) * 8 + (lane & 7);
    const u32 weight_stage = COPIED_WEIGHTS ? slice % WEIGHT_STAGES * FILL_WORDS : 0, first_chunk = COPIED_WEIGHTS ? 0 : slice % FILL_SLICES * 4;
#pragma unroll
    for (u32 half = 0; half < 2; half++) { /* 16 inputs */
        u32 b[COLUMN_FRAGMENTS / 2][4];
#pragma unroll
        for (u32 j = 0; j < COLUMN_FRAGMENTS / 2; j++)
            shared_load_matrices(weights, weight_stage + chunk_word(column, first_chunk + half * 2 + ((lane >> 3) & 1), FILL_CHUNKS) + j * 16 * FILL_CHUNKS * 4, b[j]);
#pragma unroll
        for (u32 m = 0; m < ROW_FRAGMENTS; m++) {
            if (!ALL && m >= fragments) break;
            u32 x[4];
            shared_load_matrices(rows, row_stage + chunk_word(row, half * 2 + (lane >> 4), 4) + m * 32 * 16, x);
#pragma unroll
            for (u32 j = 0; j < COLUMN_FRAGMENTS; j++) {
                if (X == DTYPE_F16) matrix_multiply_f16(sums[m][j], x, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                else matrix_multiply_bf16(sums[m][j], x, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
}
