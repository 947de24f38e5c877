/*
  tile.h: the product of 16 weight rows and the activations of 8 (or a few times 8) tokens by one warp: quantized weights
  are turned into numbers here, on their way from memory to the multiplication. Which rows and tokens they are, and what
  happens to the sums, belongs to the kernels.

  Constants: FORMAT (weights) and X (dtype of the activations), values as in moe_route.h; INNER, the length K of a row;
  GROUP, inputs that share a scale, 0: one scale a row; SCALES (dtype); WEIGHT_ALIGN and X_ALIGN, bytes that every row's
  start is known to be aligned to, at most 16.

  Lane 4g + t holds weight rows g and g + 8, and the activations of token g. K is cut into steps of 4 * LANE_VALUES; in a
  step lane t takes LANE_VALUES consecutive inputs of its rows and of its token: one 16-byte load of weights where the
  group is long enough. Any order of K is right as long as weights and activations agree, and this one needs no exchange
  between lanes. A step never crosses a group: integers are multiplied as they are, exact in f16 and bf16, and the f32 sum
  of the step is scaled. So the only rounding is that of the f32 sums.

  Activations in f16 or bf16 are multiplied on tensor cores, with weights in the same type. Otherwise (f32 on either side,
  or f16 against bf16) f32 multiply-adds on the same lane layout take their place.
*/
#define FORMAT_F32 1
#define FORMAT_F16 2
#define FORMAT_BF16 3
#define FORMAT_INT8 4
#define FORMAT_INT4 5
#define DTYPE_F32 1
#define DTYPE_F16 2
#define DTYPE_BF16 3

#define WEIGHT_BITS (FORMAT == FORMAT_F32 ? 32 : FORMAT == FORMAT_INT8 ? 8 : FORMAT == FORMAT_INT4 ? 4 : 16)
#define X_BYTES (X == DTYPE_F32 ? 4 : 2)
#define QUANTIZED (FORMAT == FORMAT_INT8 || FORMAT == FORMAT_INT4)
#define TENSOR_CORES (X != DTYPE_F32 && FORMAT != FORMAT_F32 && (QUANTIZED || FORMAT == X))
#define LANE_VALUES (GROUP != 0 && GROUP / 4 < 128 / WEIGHT_BITS ? GROUP / 4 : 128 / WEIGHT_BITS)
#define LANE_BYTES (LANE_VALUES * WEIGHT_BITS / 8)
#define STEP (4 * LANE_VALUES)
#define NUM_STEPS ((INNER + STEP - 1) / STEP)
#define NUM_GROUPS (GROUP != 0 ? INNER / GROUP : 1)
#define ROW_BYTES ((u64)INNER * WEIGHT_BITS / 8)

DEVICE float load_value(const void *array, u64 index, int dtype) {
    if (dtype == DTYPE_F32) return f32_from_bits(load_4((const u32 *)array + index));
    const u16 half = load_2((const u16 *)array + index);
    return dtype == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

DEVICE void store_value(void *array, u64 index, int dtype, float value) {
    if (dtype == DTYPE_F32) ((float *)array)[index] = value;
    else ((u16 *)array)[index] = dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

/* LANE_BYTES of weights, as they lie in memory. */
struct weight_chunk { u32 word[(LANE_BYTES + 3) / 4]; };

/* Inputs k to k + LANE_VALUES - 1 of a row; zero bits for those past the row's end. */
DEVICE weight_chunk load_weight_chunk(const u8 *row, u32 k) {
    weight_chunk c;
#pragma unroll
    for (u32 i = 0; i < (LANE_BYTES + 3) / 4; i++) c.word[i] = 0;
    if (k >= INNER) return c;
    const u8 *p = row + (u64)k * WEIGHT_BITS / 8;
    if (k + LANE_VALUES <= INNER && WEIGHT_ALIGN >= 4) {
        if (LANE_BYTES == 16 && WEIGHT_ALIGN == 16) {
            const u32x4 v = load_weights_16(p);
#pragma unroll
            for (u32 i = 0; i < LANE_BYTES / 4; i++) c.word[i] = v.v[i & 3];
        } else if (LANE_BYTES % 8 == 0 && WEIGHT_ALIGN >= 8) {
#pragma unroll
            for (u32 i = 0; i < LANE_BYTES / 8; i++) {
                const u32x2 v = load_weights_8(p + i * 8);
                c.word[i * 2] = v.v[0];
                c.word[i * 2 + 1] = v.v[1];
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < LANE_BYTES / 4; i++) c.word[i] = load_weights_4(p + i * 4);
        }
    } else { /* rows of odd sizes, and the end of a row */
        const u32 left = (u32)(((u64)(INNER - k) * WEIGHT_BITS + 7) / 8);
#pragma unroll
        for (u32 i = 0; i < LANE_BYTES; i++)
            if (i < left) c.word[i / 4] |= (u32)load_1(p + i) << (8 * (i % 4));
    }
    return c;
}

DEVICE float load_scale(const void *scales, u64 row, u32 step) {
    return load_value(scales, row * NUM_GROUPS + (GROUP != 0 ? step * STEP / (GROUP != 0 ? GROUP : 1) : 0), SCALES);
}

#if TENSOR_CORES

/* Weights as pairs of 16-bit floats in the order in which pair_activations gives the activations. */
DEVICE void unpack_weights(const weight_chunk &c, u32 (&pair)[LANE_VALUES / 2]) {
#if FORMAT == FORMAT_INT4
    /* Four bits become a float by standing in the mantissa of 1024 (f16) or 128 (bf16); then the offset is taken away.
       A word's nibbles are 0 to 7: the pairs are (0,4) (1,5) (2,6) (3,7). */
#pragma unroll
    for (u32 i = 0; i < LANE_BYTES / 4; i++) {
        const u32 w = c.word[i];
#if X == DTYPE_F16
        pair[i * 4 + 0] = half2_sub((w & 0x000f000fu) | 0x64006400u, 0x64086408u);              /* - 1032 */
        pair[i * 4 + 1] = half2_fma((w & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u); /* / 16 - 72 */
        pair[i * 4 + 2] = half2_sub(((w >> 8) & 0x000f000fu) | 0x64006400u, 0x64086408u);
        pair[i * 4 + 3] = half2_fma(((w >> 8) & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u);
#else
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            pair[i * 4 + j] = bf162_fma(((w >> (4 * j)) & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u); /* - 136 */
#endif
    }
#elif FORMAT == FORMAT_INT8
#pragma unroll
    for (u32 i = 0; i < LANE_BYTES / 4; i++) {
        const u32 w = c.word[i] ^ 0x80808080u; /* q + 128 */
#if X == DTYPE_F16
        pair[i * 2 + 0] = half2_sub(select_bytes(w, 0x64646464u, 0x4140), 0x64806480u); /* - 1152 */
        pair[i * 2 + 1] = half2_sub(select_bytes(w, 0x64646464u, 0x4342), 0x64806480u);
#else
        float q[4]; /* through the mantissa of 2^23: bf16 has no room for eight bits and the one before them */
#pragma unroll
        for (u32 j = 0; j < 4; j++) q[j] = f32_add(f32_from_bits(select_bytes(w, 0x4b000000u, 0x7440u + j)), -8388736.0f);
        pair[i * 2 + 0] = f32_to_bf162(q[0], q[1]);
        pair[i * 2 + 1] = f32_to_bf162(q[2], q[3]);
#endif
    }
#else
#pragma unroll
    for (u32 i = 0; i < LANE_BYTES / 4; i++) pair[i] = c.word[i];
#endif
}

/* Activations k to k + LANE_VALUES - 1 of a token (null: zeros), in pairs of the order that unpack_weights uses. */
DEVICE void load_activations(const u8 *x, u32 k, u32 (&pair)[LANE_VALUES / 2]) {
    u32 word[LANE_VALUES / 2];
#pragma unroll
    for (u32 i = 0; i < LANE_VALUES / 2; i++) word[i] = 0;
    if (x && k < INNER) {
        const u8 *p = x + (u64)k * 2;
        if (k + LANE_VALUES <= INNER && X_ALIGN >= 4) {
            if (LANE_VALUES % 8 == 0 && X_ALIGN == 16) {
#pragma unroll
                for (u32 i = 0; i < LANE_VALUES / 8; i++) {
                    const u32x4 v = load_16(p + i * 16);
#pragma unroll
                    for (u32 j = 0; j < 4; j++) word[i * 4 + j] = v.v[j];
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < LANE_VALUES / 2; i++) word[i] = load_4(p + i * 4);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < LANE_VALUES; i++)
                if (k + i < INNER) word[i / 2] |= (u32)load_2(p + i * 2) << (16 * (i % 2));
        }
    }
#if FORMAT == FORMAT_INT4
#pragma unroll
    for (u32 i = 0; i < LANE_VALUES / 8; i++) {
        pair[i * 4 + 0] = select_bytes(word[i * 4 + 0], word[i * 4 + 2], 0x5410);
        pair[i * 4 + 1] = select_bytes(word[i * 4 + 0], word[i * 4 + 2], 0x7632);
        pair[i * 4 + 2] = select_bytes(word[i * 4 + 1], word[i * 4 + 3], 0x5410);
        pair[i * 4 + 3] = select_bytes(word[i * 4 + 1], word[i * 4 + 3], 0x7632);
    }
#else
#pragma unroll
    for (u32 i = 0; i < LANE_VALUES / 2; i++) pair[i] = word[i];
#endif
}

/* sums += one step: rows' chunks against the token's activations. The layout of sums is that of the matrix fragment:
   sums[0], [1] are row g of tokens 2t, 2t + 1; sums[2], [3] row g + 8. */
DEVICE void multiply_chunk(float (&sums)[4], const u32 (&low)[LANE_VALUES / 2], const u32 (&high)[LANE_VALUES / 2], const u8 *x, u32 k) {
    u32 activation[LANE_VALUES / 2];
    load_activations(x, k, activation);
#pragma unroll
    for (u32 i = 0; i < LANE_VALUES / 4; i++) {
        const u32 a[4] = {low[i * 2], high[i * 2], low[i * 2 + 1], high[i * 2 + 1]};
#if X == DTYPE_F16
        matrix_multiply_f16(sums, a, activation[i * 2], activation[i * 2 + 1]);
#else
        matrix_multiply_bf16(sums, a, activation[i * 2], activation[i * 2 + 1]);
#endif
    }
}

#else /* f32 multiply-adds */

DEVICE float weight_value(const weight_chunk &c, u32 i) {
#if FORMAT == FORMAT_F32
    return f32_from_bits(c.word[i]);
#elif FORMAT == FORMAT_F16
    return f16_to_f32((u16)(c.word[i / 2] >> (16 * (i % 2))));
#elif FORMAT == FORMAT_BF16
    return bf16_to_f32((u16)(c.word[i / 2] >> (16 * (i % 2))));
#elif FORMAT == FORMAT_INT8
    return (float)(int)(signed char)(c.word[i / 4] >> (8 * (i % 4)));
#else
    return (float)((int)((c.word[i / 8] >> (4 * (i % 8))) & 15u) - 8);
#endif
}

#endif

/* sums[b] = 16 weight rows times the 8 tokens of block b, over steps first_step, first_step + step_stride, ...
   `low` and `high` are the lane's two rows, low_scale and high_scale the indices of those rows in `scales`; x[b] is the
   activations of the lane's token g (of every token, with f32 multiply-adds: then x[b] is asked for through `rows`). */
#if TENSOR_CORES
template <int BLOCKS>
DEVICE void multiply_tile(float (&sums)[BLOCKS][4], const u8 *low, const u8 *high, const void *scales, u64 low_scale, u64 high_scale,
                          const u8 *const (&x)[BLOCKS], u32 first_step, u32 step_stride) {
    /* Chunks loaded before the first is used: enough to keep memory busy, few enough for the registers. */
    constexpr u32 DEPTH = 4;
    const u32 offset = (lane_index() & 3) * LANE_VALUES;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[b][i] = 0.0f;
#pragma unroll 1
    for (u32 start = first_step; start < NUM_STEPS; start += step_stride * DEPTH) {
        weight_chunk low_chunk[DEPTH], high_chunk[DEPTH];
        float scale_low[DEPTH], scale_high[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            const u32 step = start + d * step_stride;
            if (step < NUM_STEPS) {
                low_chunk[d] = load_weight_chunk(low, step * STEP + offset);
                high_chunk[d] = load_weight_chunk(high, step * STEP + offset);
                if (GROUP != 0) {
                    scale_low[d] = load_scale(scales, low_scale, step);
                    scale_high[d] = load_scale(scales, high_scale, step);
                }
            }
        }
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            const u32 step = start + d * step_stride;
            if (step >= NUM_STEPS) break;
            u32 low_pairs[LANE_VALUES / 2], high_pairs[LANE_VALUES / 2];
            unpack_weights(low_chunk[d], low_pairs);
            unpack_weights(high_chunk[d], high_pairs);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                if (GROUP != 0) {
                    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    multiply_chunk(part, low_pairs, high_pairs, x[b], step * STEP + offset);
                    sums[b][0] = f32_fma(scale_low[d], part[0], sums[b][0]);
                    sums[b][1] = f32_fma(scale_low[d], part[1], sums[b][1]);
                    sums[b][2] = f32_fma(scale_high[d], part[2], sums[b][2]);
                    sums[b][3] = f32_fma(scale_high[d], part[3], sums[b][3]);
                } else {
                    multiply_chunk(sums[b], low_pairs, high_pairs, x[b], step * STEP + offset);
                }
            }
        }
    }
    if (QUANTIZED && GROUP == 0) {
        const float scale_low = load_scale(scales, low_scale, 0), scale_high = load_scale(scales, high_scale, 0);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            sums[b][0] = f32_mul(sums[b][0], scale_low);
            sums[b][1] = f32_mul(sums[b][1], scale_low);
            sums[b][2] = f32_mul(sums[b][2], scale_high);
            sums[b][3] = f32_mul(sums[b][3], scale_high);
        }
    }
}
#else
template <int BLOCKS>
DEVICE void multiply_tile(float (&sums)[BLOCKS][4], const u8 *low, const u8 *high, const void *scales, u64 low_scale, u64 high_scale,
                          const u8 *const (&x)[BLOCKS], u32 first_step, u32 step_stride) {
    const u32 lane = lane_index(), t = lane & 3;
#pragma unroll 1
    for (int b = 0; b < BLOCKS; b++) {
        /* Each lane multiplies its two rows with all 8 tokens, whose addresses are in the lanes 4 * token. */
        float sum[2][8];
#pragma unroll
        for (u32 n = 0; n < 8; n++) sum[0][n] = sum[1][n] = 0.0f;
        const u64 own = (u64)x[b];
#pragma unroll 1
        for (u32 step = first_step; step < NUM_STEPS; step += step_stride) {
            const u32 k = step * STEP + t * LANE_VALUES;
            const weight_chunk low_chunk = load_weight_chunk(low, k), high_chunk = load_weight_chunk(high, k);
            const float scale_low = GROUP != 0 ? load_scale(scales, low_scale, step) : 1.0f;
            const float scale_high = GROUP != 0 ? load_scale(scales, high_scale, step) : 1.0f;
#pragma unroll
            for (u32 n = 0; n < 8; n++) {
                const u64 address = (u64)warp_shuffle((u32)own, n * 4) | (u64)warp_shuffle((u32)(own >> 32), n * 4) << 32;
                float part[2] = {0.0f, 0.0f};
                if (address)
#pragma unroll
                    for (u32 i = 0; i < LANE_VALUES; i++)
                        if (k + i < INNER) {
                            const float value = load_value((const void *)address, k + i, X);
                            part[0] = f32_fma(weight_value(low_chunk, i), value, part[0]);
                            part[1] = f32_fma(weight_value(high_chunk, i), value, part[1]);
                        }
                sum[0][n] = f32_fma(scale_low, part[0], sum[0][n]);
                sum[1][n] = f32_fma(scale_high, part[1], sum[1][n]);
            }
        }
        if (QUANTIZED && GROUP == 0) {
            const float scale_low = load_scale(scales, low_scale, 0), scale_high = load_scale(scales, high_scale, 0);
#pragma unroll
            for (u32 n = 0; n < 8; n++) {
                sum[0][n] = f32_mul(sum[0][n], scale_low);
                sum[1][n] = f32_mul(sum[1][n], scale_high);
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
