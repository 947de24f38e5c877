/*
  tile.h: the product of 16 weight rows and the activations of 8 (or a few times 8) tokens by one warp: quantized weights
  are turned into numbers here, on their way from memory to the multiplication. Which rows and tokens they are, and what
  happens to the sums, belongs to the kernels; how the weights come in time, to stream.h and copied.h; what the bytes of a format mean, to
  packed.h and gguf.h; the sums of activations that some formats want, to sums.h.

  Constants: FORMAT (weights) and X (dtype of the activations), values as in moe_route.h; ROWS, the number N of rows of a
  matrix; INNER, the length K of a row; X_ORDER, the order in which pairs of activations lie in memory: linear (also if not
  defined), or that in which they are multiplied; WEIGHT_ALIGN and X_ALIGN, bytes that every row's start is known to be aligned to, at
  most 16; and those of packed.h.

  Lane 4g + t holds weight rows g and g + 8, and the activations of token g. K is cut into steps; in a step lane t takes
  LANE_VALUES inputs of its rows and of its token, in SUBS subs of LANE_SUB values with one scale each. A sub is a fourth of
  4 * LANE_SUB consecutive inputs: pieces of LANE_RUN inputs, so that each lane's pieces lie beside those of the others. Any
  order of K is right as long as weights and activations agree. Integers and small floats are multiplied as they are, exact
  in f16 and bf16, and the f32 sum of a sub is scaled. So the only rounding is that of the f32 sums.

  Activations in f16 or bf16 are multiplied on tensor cores, with weights in the same type. Otherwise (f32 on either side,
  or f16 against bf16) f32 multiply-adds on the same lane layout take their place.

  A format's header says for a lane: load_weight_chunk, what it loads of a row in a step; arrange_weight_chunk, the exchange
  with the three other lanes of the row; unpack_sub, a sub as pairs of floats in the order PAIR_ORDER; sub_scale and
  sub_min, by which sub_scale * sum(code * x) + sub_min * sum(x) is the sub's part of the sum; where CODES_MULTIPLY, unpack_codes and code_scale,
  the same for codes that are multiplied as they are; row_scale, for all of a row (where ROW_HAS_SCALE); CHUNK_WORDS, 32-bit registers that a chunk takes.
*/
#include "values.h"

#define FORMAT_F32 1
#define FORMAT_F16 2
#define FORMAT_BF16 3
#define FORMAT_INT8 4
#define FORMAT_INT4 5
#define FORMAT_FP8 6
#define FORMAT_MXFP4 7
#define FORMAT_NVFP4 8
#define FORMAT_GGUF 100
#define FORMAT_Q4_0 102
#define FORMAT_Q4_1 103
#define FORMAT_Q5_0 106
#define FORMAT_Q5_1 107
#define FORMAT_Q8_0 108
#define FORMAT_Q2_K 110
#define FORMAT_Q3_K 111
#define FORMAT_Q4_K 112
#define FORMAT_Q5_K 113
#define FORMAT_Q6_K 114
#define FORMAT_IQ4_NL 120
#define FORMAT_IQ4_XS 123
#define FORMAT_GGUF_MXFP4 139

/* Which two of a sub's values make a pair. */
#define PAIRS_LINEAR 0 /* (0, 1), (2, 3), ... */
#define PAIRS_OF_4 1   /* (0, 2), (1, 3) of each 4 */
#define PAIRS_OF_8 2   /* (0, 4), (1, 5), (2, 6), (3, 7) of each 8 */

#ifndef X_ORDER
#define X_ORDER PAIRS_LINEAR
#endif

#define X_BYTES (X == DTYPE_F32 ? 4 : 2)
#define TENSOR_CORES (X != DTYPE_F32 && FORMAT != FORMAT_F32 && (FORMAT > FORMAT_BF16 || FORMAT == X))
#define DECODE (X == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F16) /* what codes are unpacked to */
#define STEP (4 * LANE_VALUES)
#define NUM_STEPS ((INNER + STEP - 1) / STEP)
/* Where `parts` warps share the steps of a row, each takes this many: those that follow each other, since what lies together comes
   fastest (STEPS_TOGETHER), if all get as many and their scales stay at one place in words; otherwise every parts-th. */
#define PART_STEPS(parts) ((NUM_STEPS + (parts) - 1) / (parts))
#define STEP_STRIDE(parts) (STEPS_TOGETHER(parts) ? 1 : (parts))
#define FIRST_STEP(part, parts) (STEPS_TOGETHER(parts) ? (part) * PART_STEPS(parts) : (part))
/* BYTES bytes of weights from `p` on, a power of two up to 32, of which the row has `left`; zero bits for the others. */
template <u32 BYTES, u32 ALIGN, u32 WORDS>
DEVICE void load_weights(u32 (&word)[WORDS], const u8 *p, u32 left) {
    static_assert((BYTES + 3) / 4 <= WORDS, "room for the bytes");
#pragma unroll
    for (u32 i = 0; i < WORDS; i++) word[i] = 0;
    if (ALIGN >= (BYTES < 4 ? BYTES : 4) && left >= BYTES) {
        if (BYTES % 16 == 0 && ALIGN >= 16) {
#pragma unroll
            for (u32 i = 0; i < BYTES / 16; i++) {
                const u32x4 v = load_weights_16(p + i * 16);
#pragma unroll
                for (u32 j = 0; j < 4; j++) word[(i * 4 + j) % WORDS] = v.v[j];
            }
        } else if (BYTES % 8 == 0 && ALIGN >= 8) {
#pragma unroll
            for (u32 i = 0; i < BYTES / 8; i++) {
                const u32x2 v = load_weights_8(p + i * 8);
                word[i * 2 % WORDS] = v.v[0];
                word[(i * 2 + 1) % WORDS] = v.v[1];
            }
        } else if (BYTES % 4 == 0) {
#pragma unroll
            for (u32 i = 0; i < BYTES / 4; i++) word[i] = load_weights_4(p + i * 4);
        } else {
            word[0] = BYTES == 2 ? (u32)load_2(p) : (u32)load_1(p);
        }
    } else if (ALIGN == 2 && BYTES % 2 == 0 && left >= BYTES) {
#pragma unroll
        for (u32 i = 0; i < BYTES / 2; i++) word[i / 2] |= (u32)load_2(p + i * 2) << (16 * (i % 2));
    } else { /* rows of odd sizes, and the end of a row */
#pragma unroll
        for (u32 i = 0; i < BYTES; i++)
            if (i < left) word[i / 4] |= (u32)load_1(p + i) << (8 * (i % 4));
    }
}

/* Between lanes t and t ^ MASK: the lower one gets the other's first word as its second, and gives its second as the other's
   first. */
template <u32 MASK>
DEVICE void exchange_words(u32 &first, u32 &second) {
    const bool upper = (lane_index() & MASK) != 0;
    const u32 received = warp_shuffle_xor(upper ? first : second, MASK);
    if (upper) first = received;
    else second = received;
}

#ifndef CODE_SUMS
#define CODE_SUMS 0
#endif
#if FORMAT > FORMAT_GGUF
#include "gguf.h"
#else
#include "packed.h"
#endif

#ifndef CODES_MULTIPLY
#define CODES_MULTIPLY 0
#define CODE_SCALE 1.0f
#define CODE_ZERO 0u
#endif
#ifndef MINS_MULTIPLY
#define MINS_MULTIPLY 0
#endif
/* Whether all of a step's scales are had at once, by shifts: where a kernel has registers for them. */
#if defined(SCALES_AT_ONCE) && defined(SCALES_ARE_EXPONENTS)
#define SCALES_BY_SHIFT SCALES_ARE_EXPONENTS
#else
#define SCALES_BY_SHIFT 0
#endif
#define NUM_PAIRS (LANE_SUB / 2) /* in a sub */

/* The number of a part's step `index`; it is one of the row's; it isn't the row's last, in any part. Known when compiled, where index is, for most. */
template <u32 PARTS>
DEVICE u32 step_of(u32 part, u32 index) { return FIRST_STEP(part, PARTS) + index * STEP_STRIDE(PARTS); }
template <u32 PARTS>
DEVICE bool step_exists(u32 part, u32 index) {
    return STEPS_TOGETHER(PARTS) || (index + 1) * PARTS <= NUM_STEPS || step_of<PARTS>(part, index) < NUM_STEPS;
}
template <u32 PARTS>
DEVICE bool is_inner_step(u32 index) { return (index + 1) * PARTS < NUM_STEPS; }

static_assert(X_ORDER == PAIRS_LINEAR || (X_ORDER == PAIR_ORDER && TENSOR_CORES && INNER % 8 == 0), "activations in an order that this format can use");

/* Position in the sub of the first (half 0) or second (half 1) value of a pair. */
DEVICE u32 pair_element(u32 pair, u32 half) {
    if (PAIR_ORDER == PAIRS_OF_4) return pair / 2 * 4 + pair % 2 + half * 2;
    if (PAIR_ORDER == PAIRS_OF_8) return pair / 4 * 8 + pair % 4 + half * 4;
    return pair * 2 + half;
}

/* The input that is value i of a lane's sub. */
DEVICE u32 sub_input(u32 step, u32 sub, u32 i) { return step * STEP + sub * 4 * LANE_SUB + i / LANE_RUN * 4 * LANE_RUN + lane_quarter() * LANE_RUN + i % LANE_RUN; }

/* How the activations come: loaded beside the weights; loaded when needed, where those of several blocks of tokens would take
   too many registers; or held, in the order of pairs, for many tiles. */
constexpr int X_LOADED = 0, X_LATE = 1, X_HELD = 2;

/* A lane's two rows of a tile. */
struct tile_rows {
    weight_row low, high;
};

/* What a sum over codes lacks: once the parts are added up, since a power of two rounds nothing. */
DEVICE float scale_codes(float sum) { return TENSOR_CORES && CODE_SCALE != 1.0f ? f32_mul(sum, CODE_SCALE) : sum; }

#if TENSOR_CORES

/* The activations of a token that belong to a sub, as they lie in memory. */
DEVICE void load_activations(const u8 *x, u32 step, u32 sub, bool inner, u32 (&word)[NUM_PAIRS]) {
#pragma unroll
    for (u32 i = 0; i < NUM_PAIRS; i++) word[i] = 0;
#pragma unroll
    for (u32 run = 0; run < LANE_SUB; run += LANE_RUN) {
        const u32 k = sub_input(step, sub, run);
        const u8 *p = x + (u64)k * 2;
        if (X_ALIGN >= 4 && (INNER % STEP == 0 || inner || k + LANE_RUN <= INNER)) {
            if (LANE_RUN % 8 == 0 && X_ALIGN == 16) {
#pragma unroll
                for (u32 i = 0; i < LANE_RUN / 8; i++) {
                    const u32x4 v = load_16(p + i * 16);
#pragma unroll
                    for (u32 j = 0; j < 4; j++) word[(run / 2 + i * 4 + j) % NUM_PAIRS] = v.v[j];
                }
            } else if (X_ALIGN >= 8) {
#pragma unroll
                for (u32 i = 0; i < LANE_RUN / 4; i++) {
                    const u32x2 v = load_8(p + i * 8);
                    word[run / 2 + i * 2] = v.v[0];
                    word[run / 2 + i * 2 + 1] = v.v[1];
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < LANE_RUN / 2; i++) word[run / 2 + i] = load_4(p + i * 4);
            }
        } else if (X_ALIGN < 4 || INNER % LANE_RUN != 0) { /* otherwise a run is all there, or none of it */
#pragma unroll
            for (u32 i = 0; i < LANE_RUN; i++)
                if (k + i < INNER) word[(run + i) / 2] |= (u32)load_2(p + i * 2) << (16 * (i % 2));
        }
    }
}

/* The same in the order of the sub's pairs. */
DEVICE void pair_activations(const u32 (&word)[NUM_PAIRS], u32 (&pair)[NUM_PAIRS]) {
#pragma unroll
    for (u32 i = 0; i < NUM_PAIRS; i++) {
        const u32 first = pair_element(i, 0), second = pair_element(i, 1);
        pair[i] = PAIR_ORDER == X_ORDER ? word[i] : select_bytes(word[first / 2], word[second / 2], first % 2 == 0 ? 0x5410 : 0x7632);
    }
}

/* sums += one fragment times another, or with BEGIN sums = that. */
template <bool BEGIN>
DEVICE void multiply_fragments(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BEGIN && X == DTYPE_F16) matrix_product_f16(sums, a, b0, b1);
    else if (BEGIN) matrix_product_bf16(sums, a, b0, b1);
    else if (X == DTYPE_F16) matrix_multiply_f16(sums, a, b0, b1);
    else matrix_multiply_bf16(sums, a, b0, b1);
}

/* sums += one sub, or with BEGIN sums = one sub: rows' pairs against the activations. The layout of sums is that of the matrix
   fragment: sums[0], [1] are row g of tokens 2t, 2t + 1; sums[2], [3] row g + 8. */
template <bool BEGIN>
DEVICE void multiply_pairs(float (&sums)[4], const u32 (&low)[NUM_PAIRS], const u32 (&high)[NUM_PAIRS], const u32 (&activation)[NUM_PAIRS]) {
#pragma unroll
    for (u32 i = 0; i < NUM_PAIRS / 2; i++) {
        const u32 a[4] = {low[i * 2], high[i * 2], low[i * 2 + 1], high[i * 2 + 1]};
        if (BEGIN && i == 0) multiply_fragments<true>(sums, a, activation[0], activation[1]);
        else multiply_fragments<false>(sums, a, activation[i * 2], activation[i * 2 + 1]);
    }
}

#include "sums.h"

#if CODES_MULTIPLY
/* One sub's codes, smaller than weights by CODE_SCALE: those with a zero are added to what sum_activations gives, others are all of the sums. */
DEVICE void multiply_codes(float (&sums)[4], const u32 (&low)[NUM_PAIRS], const u32 (&high)[NUM_PAIRS], const u32 (&activation)[NUM_PAIRS]) {
    if (FORMAT != FORMAT_INT4 || X == DTYPE_BF16) return multiply_pairs<CODE_ZERO == 0>(sums, low, high, activation);
    float upper[4]; /* the odd pairs, larger by 16 */
#pragma unroll
    for (u32 i = 0; i < NUM_PAIRS; i += 4) {
        const u32 even[4] = {low[i], high[i], low[i + 2], high[i + 2]}, odd[4] = {low[i + 1], high[i + 1], low[i + 3], high[i + 3]};
        matrix_multiply_f16(sums, even, activation[i], activation[i + 2]);
        if (i == 0) matrix_product_f16(upper, odd, activation[1], activation[3]);
        else matrix_multiply_f16(upper, odd, activation[i + 1], activation[i + 3]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) sums[i] = f32_fma(upper[i], 0.0625f, sums[i]);
}
#endif

#if SCALES_BY_SHIFT
/* The scales of a step's subs. */
DEVICE void find_scales(const weight_chunk &low, const weight_chunk &high, u32 step, float (&low_scales)[SUBS], float (&high_scales)[SUBS]) {
#pragma unroll
    for (u32 sub = 0; sub < SUBS; sub++) {
        low_scales[sub] = even_scale(low, sub);
        high_scales[sub] = even_scale(high, sub);
    }
    if (!warp_ballot(has_odd_scales(low) || has_odd_scales(high))) return;
#pragma unroll
    for (u32 sub = 0; sub < SUBS; sub++) {
        low_scales[sub] = sub_scale(low, step, sub);
        high_scales[sub] = sub_scale(high, step, sub);
    }
}
#endif

/* One step: sums[b] += rows' chunks against the activations, those of x[b] where they are late; with HAS_SUMS `held` has the sums of the
   activations. */
template <int BLOCKS, int HOW, bool HAS_SUMS>
DEVICE void multiply_step(float (&sums)[BLOCKS][4], weight_chunk &low, weight_chunk &high, const u8 *const (&x)[BLOCKS], u32 step, const u32 (&words)[SUBS][NUM_PAIRS],
                          const held_sums &held) {
    arrange_weight_chunk(low);
    arrange_weight_chunk(high);
#if SCALES_BY_SHIFT
    float low_scales[SUBS], high_scales[SUBS];
    find_scales(low, high, step, low_scales, high_scales);
#endif
#pragma unroll
    for (u32 sub = 0; sub < SUBS; sub++) {
        u32 low_pairs[NUM_PAIRS], high_pairs[NUM_PAIRS];
#if CODES_MULTIPLY
        unpack_codes(low, step, sub, low_pairs);
        unpack_codes(high, step, sub, high_pairs);
#else
        unpack_sub(low, step, sub, low_pairs);
        unpack_sub(high, step, sub, high_pairs);
#endif
#if SCALES_BY_SHIFT
        const float low_scale = low_scales[sub], high_scale = high_scales[sub];
#else
        const float low_scale = SUB_HAS_SCALE ? code_scale(low, step, sub) : 1.0f, high_scale = SUB_HAS_SCALE ? code_scale(high, step, sub) : 1.0f;
#endif
        const float low_min = SUB_HAS_MIN ? sub_min(low, step, sub) : 0.0f, high_min = SUB_HAS_MIN ? sub_min(high, step, sub) : 0.0f;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            u32 activation[NUM_PAIRS];
            if (HOW == X_LATE) {
                u32 word[NUM_PAIRS];
                load_activations(x[b], step, sub, false, word);
                pair_activations(word, activation);
            } else if (HOW == X_LOADED) {
                pair_activations(words[sub], activation);
            } else {
#pragma unroll
                for (u32 i = 0; i < NUM_PAIRS; i++) activation[i] = words[sub][i];
            }
            if (!SUB_HAS_SCALE) {
                multiply_pairs<false>(sums[b], low_pairs, high_pairs, activation);
                continue;
            }
            float part[4];
#if WANTS_SUMS
            float total[4];
            if (HAS_SUMS) take_sum(total, held, sub);
            else sum_activations(total, activation);
#endif
#if CODES_MULTIPLY
#if WANTS_SUMS
            if (!SUB_HAS_MIN)
#pragma unroll
                for (u32 i = 0; i < 4; i++) part[i] = total[i];
#endif
            multiply_codes(part, low_pairs, high_pairs, activation);
#else
            multiply_pairs<true>(part, low_pairs, high_pairs, activation);
#endif
            sums[b][0] = f32_fma(low_scale, part[0], sums[b][0]);
            sums[b][1] = f32_fma(low_scale, part[1], sums[b][1]);
            sums[b][2] = f32_fma(high_scale, part[2], sums[b][2]);
            sums[b][3] = f32_fma(high_scale, part[3], sums[b][3]);
#if SUB_HAS_MIN
            if (MINS_MULTIPLY && HAS_SUMS) continue;
            sums[b][0] = f32_fma(low_min, total[0], sums[b][0]);
            sums[b][1] = f32_fma(low_min, total[1], sums[b][1]);
            sums[b][2] = f32_fma(high_min, total[2], sums[b][2]);
            sums[b][3] = f32_fma(high_min, total[3], sums[b][3]);
#endif
        }
    }
#if MINS_MULTIPLY
    if (HAS_SUMS)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) add_mins(sums[b], low, high, step, held);
#endif
}

#else /* f32 multiply-adds */

#if FORMAT > FORMAT_BF16
DEVICE void unpack_sub_values(const weight_chunk &c, u32 step, u32 sub, float (&value)[LANE_SUB]) {
    u32 pair[NUM_PAIRS];
    unpack_sub(c, step, sub, pair);
#pragma unroll
    for (u32 i = 0; i < LANE_SUB; i++) {
        const u16 half = (u16)(pair[i / 2] >> (16 * (i % 2)));
        value[pair_element(i / 2, i % 2)] = DECODE == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
}
#endif

/* All steps of a part of K: sums[b] = rows times the activations x[b], in any dtype. Each lane multiplies its two rows with all
   8 tokens of a block, whose addresses (null: no token) are in the lanes 4 * token. */
template <int BLOCKS, u32 PARTS>
DEVICE void multiply_part(float (&sums)[BLOCKS][4], const weight_row &low, const weight_row &high, const u8 *const (&x)[BLOCKS], u32 part) {
    const u32 t = lane_index() & 3;
#pragma unroll 1
    for (int b = 0; b < BLOCKS; b++) {
        float sum[2][8];
#pragma unroll
        for (u32 n = 0; n < 8; n++) sum[0][n] = sum[1][n] = 0.0f;
        const u64 own = (u64)x[b];
#pragma unroll 1
        for (u32 step = part; step < NUM_STEPS; step += PARTS) {
            weight_chunk low_chunk = load_weight_chunk(low, step, false), high_chunk = load_weight_chunk(high, step, false);
            arrange_weight_chunk(low_chunk);
            arrange_weight_chunk(high_chunk);
#pragma unroll
            for (u32 sub = 0; sub < SUBS; sub++) {
                float low_value[LANE_SUB], high_value[LANE_SUB];
                unpack_sub_values(low_chunk, step, sub, low_value);
                unpack_sub_values(high_chunk, step, sub, high_value);
                const float low_scale = SUB_HAS_SCALE ? sub_scale(low_chunk, step, sub) : 1.0f, high_scale = SUB_HAS_SCALE ? sub_scale(high_chunk, step, sub) : 1.0f;
#pragma unroll
                for (u32 n = 0; n < 8; n++) {
                    const u64 address = (u64)warp_shuffle((u32)own, n * 4) | (u64)warp_shuffle((u32)(own >> 32), n * 4) << 32;
                    float part[2] = {0.0f, 0.0f}, total = 0.0f;
                    if (address)
#pragma unroll
                        for (u32 i = 0; i < LANE_SUB; i++) {
                            const u32 k = sub_input(step, sub, i);
                            if (k < INNER) {
                                const float value = load_value((const void *)address, k, X);
                                part[0] = f32_fma(low_value[i], value, part[0]);
                                part[1] = f32_fma(high_value[i], value, part[1]);
                                if (SUB_HAS_MIN) total = f32_add(total, value);
                            }
                        }
                    sum[0][n] = f32_fma(low_scale, part[0], sum[0][n]);
                    sum[1][n] = f32_fma(high_scale, part[1], sum[1][n]);
                    if (SUB_HAS_MIN) {
                        sum[0][n] = f32_fma(sub_min(low_chunk, step, sub), total, sum[0][n]);
                        sum[1][n] = f32_fma(sub_min(high_chunk, step, sub), total, sum[1][n]);
                    }
                }
            }
        }
        /* Add the four lanes of a row, then keep the tokens that the matrix fragment would give this lane. */
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                float v = sum[row][n];
                v = f32_add(v, f32_from_bits(warp_shuffle_xor(f32_bits(v), 1)));
                v = f32_add(v, f32_from_bits(warp_shuffle_xor(f32_bits(v), 2)));
                if (n / 2 == t) sums[b][row * 2 + n % 2] = v;
            }
    }
}
#endif

/* Multiplies the sums of whole rows by what scales all of a row. */
template <int BLOCKS>
DEVICE void scale_rows(float (&sums)[BLOCKS][4], float low_scale, float high_scale) {
    if (!ROW_HAS_SCALE) return;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        sums[b][0] = f32_mul(sums[b][0], low_scale);
        sums[b][1] = f32_mul(sums[b][1], low_scale);
        sums[b][2] = f32_mul(sums[b][2], high_scale);
        sums[b][3] = f32_mul(sums[b][3], high_scale);
    }
}
