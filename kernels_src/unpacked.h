/*
  unpacked.h: quantized weights on their way into a tile in shared memory, as numbers of the activations' type, f16 or bf16, in the order
  of K. What is done with the tile belongs to grouped.cu and grouped_warpgroups.cu; what the bytes of a format mean, to packed.h and gguf.h,
  in whose layout the lanes hold them: lane 4g + t a part of row g of eight.

  A weight is code * scale (+ min), rounded once to the activations' type; what scales a whole row waits for the sum. In f16 that is within
  2^-12 of the weight, or 2^-25 where that is more, in bf16 within 2^-9.

  Include tile.h first. Who includes this has weight_place(n, chunk): the word, from the tile's first, where the 8 numbers of chunk `chunk`
  of its row n go.
*/
/* Whether a scale is a number of the activations' type too: then one multiplication of a pair rounds once. */
#if FORMAT > FORMAT_GGUF
#define SCALES_ARE_PAIRS 0
#else
#define SCALES_ARE_PAIRS (SCALES == SCALES_E4M3 || (DECODE == DTYPE_F16 ? SCALES == DTYPE_F16 : SCALES == DTYPE_BF16 || SCALES == SCALES_E8M0))
#endif

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

#if FORMAT == FORMAT_INT4
/* INT4 codes with f16 scales become bf16 by one fma each, in f32: a code in the mantissa of 1 is 1 + q / 2^k, and with 2^k * scale and
   -(2^k + zero point) * scale, both exact, that is (q - zero point) * scale. k is 23 less the bit where the code is: 8, 12 or 16, or
   where the zero point has bits of its own, 12 or 16. An infinite scale gives NaN. */
#define SCALES_BY_FMA (SCALES == DTYPE_F16 && GROUP != 0 && DECODE == DTYPE_BF16 && LANE_SUB >= 8)
DEVICE void unpack_sub_by_fma(const weight_chunk &c, u32 sub, float scale, u32 (&linear)[LANE_SUB / 2]) {
    const float zero_point = (float)(int)(ZERO_POINTS ? (c.zero_point[0] >> (4 * sub)) & 15u : USUAL_ZERO_POINT);
    const float by[3] = {f32_mul(scale, 32768.0f), f32_mul(scale, 2048.0f), f32_mul(scale, 128.0f)};
    const float plus[3] = {f32_mul(scale, -32768.0f - zero_point), f32_mul(scale, -2048.0f - zero_point), f32_mul(scale, -128.0f - zero_point)};
#pragma unroll
    for (u32 i = 0; i < LANE_SUB / 8; i++) {
        u32 w = c.word[sub * (LANE_SUB / 8) + i];
        if (SIGNED) w ^= 0x88888888u;
        float value[8];
#pragma unroll
        for (u32 q = 0; q < 8; q++) {
            const u32 at = ZERO_POINTS ? (q == 0 || q % 2 != 0 ? 1 : 2) : (q < 5 ? q == 4 ? 2 : q % 2 : q - 5), bit = 8 + 4 * at;
            const u32 moved = q * 4 < bit ? w << (bit - q * 4) : w >> (q * 4 - bit);
            value[q] = f32_fma(f32_from_bits(and_or(moved, 15u << bit, 0x3f800000u)), by[at], plus[at]);
        }
#pragma unroll
        for (u32 q = 0; q < 4; q++) linear[i * 4 + q] = f32_to_bf162(value[q * 2], value[q * 2 + 1]);
    }
}
#else
#define SCALES_BY_FMA 0
#endif

/* A lane's chunk of step `step`, arranged, as numbers in row `n` of the tile. */
template <class Words>
DEVICE void store_weights(Words &weights, const weight_chunk &c, u32 step, u32 at, u32 n) {
#pragma unroll
    for (u32 sub = 0; sub < SUBS; sub++) {
        u32 linear[NUM_PAIRS];
        const float scale = SUB_HAS_SCALE ? sub_scale(c, step, sub) : 1.0f;
#if SCALES_BY_FMA
        unpack_sub_by_fma(c, sub, scale, linear);
#else
        u32 pair[NUM_PAIRS];
        unpack_sub(c, step, sub, pair);
        const float min = SUB_HAS_MIN ? sub_min(c, step, sub) : 0.0f;
        const u32 scales = SUB_HAS_SCALE && SCALES_ARE_PAIRS ? (DECODE == DTYPE_F16 ? f32_to_half2(scale, scale) : f32_to_bf162(scale, scale)) : 0;
#pragma unroll
        for (u32 i = 0; i < NUM_PAIRS; i++) pair[i] = scale_pair(pair[i], scales, scale, min);
#pragma unroll
        for (u32 i = 0; i < NUM_PAIRS; i++) { /* values 2i and 2i + 1 */
            if (PAIR_ORDER == PAIRS_LINEAR) linear[i] = pair[i];
            else if (PAIR_ORDER == PAIRS_OF_4) linear[i] = select_bytes(pair[i / 2 * 2], pair[i / 2 * 2 + 1], i % 2 == 0 ? 0x5410 : 0x7632);
            else linear[i] = select_bytes(pair[(i / 4 * 4 + i % 2 * 2) % NUM_PAIRS], pair[(i / 4 * 4 + i % 2 * 2 + 1) % NUM_PAIRS], i % 4 < 2 ? 0x5410 : 0x7632);
        }
#endif
#pragma unroll
        for (u32 run = 0; run < LANE_SUB; run += LANE_RUN) {
            const u32 k = sub * 4 * LANE_SUB + run * 4 + lane_quarter() * LANE_RUN;
            if (LANE_RUN % 8 == 0) {
#pragma unroll
                for (u32 i = 0; i < LANE_RUN / 8; i++) {
                    const u32x4 v = {{linear[(run / 2 + i * 4) % NUM_PAIRS], linear[(run / 2 + i * 4 + 1) % NUM_PAIRS], linear[(run / 2 + i * 4 + 2) % NUM_PAIRS], linear[(run / 2 + i * 4 + 3) % NUM_PAIRS]}};
                    shared_store_4(weights, at + weight_place(n, k / 8 + i), v);
                }
            } else {
                const u32x2 v = {{linear[run / 2], linear[run / 2 + 1]}};
                shared_store_2(weights, at + weight_place(n, k / 8) + k % 8 / 2, v);
            }
        }
    }
}

