/*
  sums.h: the sums of activations that some formats' products need beside the activations: times the zero that all codes of a sub have,
  or for the sub's minimum. How they are found, how a lane holds them for many tiles, and how minima come into the sums.
*/

/* The sum of a sub's activations that the format wants: times its zero, which its sums begin with, or for minima. */
#if CODES_MULTIPLY || SUB_HAS_MIN
#define WANTS_SUMS (SUB_HAS_MIN || CODE_ZERO != 0)
DEVICE void sum_activations(float (&sums)[4], const u32 (&activation)[NUM_PAIRS]) {
    constexpr u32 FACTORS = SUM_FACTOR * 0x10001u;
    const u32 factors[4] = {FACTORS, FACTORS, FACTORS, FACTORS};
#pragma unroll
    for (u32 i = 0; i < NUM_PAIRS / 2; i++) { /* in the pairs of multiply_codes, which then needn't move them */
        const bool apart = FORMAT == FORMAT_INT4 && X == DTYPE_F16;
        const u32 first = apart ? i / 2 * 4 + i % 2 : i * 2, second = first + (apart ? 2 : 1);
        if (i == 0) multiply_fragments<true>(sums, factors, activation[first], activation[second % NUM_PAIRS]);
        else multiply_fragments<false>(sums, factors, activation[first], activation[second % NUM_PAIRS]);
    }
}
#else
#define WANTS_SUMS 0
#endif

/* Such sums of a step, as they are held: of tokens 2t and 2t + 1, or for minima of token g in sub t alone, cut into three bf16 and a zero, by which it's exact. */
struct held_sums {
#if MINS_MULTIPLY
    u32 parts[2];
#else
    float of[SUBS][2];
#endif
};

#if MINS_MULTIPLY
DEVICE void hold_sum(held_sums &held, u32 sub, const float (&sums)[4]) {
    const u32 lane = lane_index(), g = lane >> 2, from = (lane & ~3u) + g / 2;
    const u32 even = warp_shuffle(f32_bits(sums[0]), from), odd = warp_shuffle(f32_bits(sums[1]), from);
    if ((lane & 3) != sub) return;
    float rest = f32_from_bits(g % 2 ? odd : even);
    u16 part[3];
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        part[i] = f32_to_bf16(rest);
        rest = f32_add(rest, -bf16_to_f32(part[i]));
    }
    held.parts[0] = part[0] | (u32)part[1] << 16;
    held.parts[1] = part[2];
}

DEVICE void take_sum(float (&)[4], const held_sums &, u32) {} /* they come in once a step */

DEVICE void add_mins(float (&sums)[4], const weight_chunk &low, const weight_chunk &high, u32 step, const held_sums &held) {
    const u32 low_pair = min_pair(low, step), high_pair = min_pair(high, step), a[4] = {low_pair, high_pair, low_pair, high_pair};
    float product[4];
    matrix_product_bf16(product, a, held.parts[0], held.parts[1]);
    sums[0] = f32_fma(min_scale(low), product[0], sums[0]);
    sums[1] = f32_fma(min_scale(low), product[1], sums[1]);
    sums[2] = f32_fma(min_scale(high), product[2], sums[2]);
    sums[3] = f32_fma(min_scale(high), product[3], sums[3]);
}
#else
DEVICE void hold_sum(held_sums &held, u32 sub, const float (&sums)[4]) {
    held.of[sub][0] = sums[0];
    held.of[sub][1] = sums[1];
}

DEVICE void take_sum(float (&sums)[4], const held_sums &held, u32 sub) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) sums[i] = held.of[sub][i % 2];
}
#endif
