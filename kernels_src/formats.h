/*
  formats.h: what the bytes of a weight format mean, as far as kernels and CPU backend say it in the same words: the small
  floats that serve as scales and weights, and the packed scales of GGUF's blocks. Plain C on values and 32-bit words; who
  loads them, and how weights are spread over lanes, belongs to packed.h, gguf.h and cpu_formats.c.
*/
#ifndef MOER_FORMATS
#define MOER_FORMATS
#ifdef MOER_HOST
#define MOER_FORMAT_FUNCTION static
#else
#define MOER_FORMAT_FUNCTION DEVICE
#define moer_f32_from_bits f32_from_bits
#endif

/* E8M0: 2^(e - 127); 255 is NaN. */
MOER_FORMAT_FUNCTION float moer_e8m0(unsigned int e) {
    return moer_f32_from_bits(e == 255u ? 0x7fc00000u : e == 0u ? 0x00400000u : e << 23);
}

/* E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, all ones is NaN. */
MOER_FORMAT_FUNCTION float moer_e4m3(unsigned int code) {
    const unsigned int magnitude = code & 127u, sign = (code & 128u) << 24;
    float value;
    if (magnitude == 127u) return moer_f32_from_bits(0x7fc00000u | sign);
    value = magnitude < 8u ? (float)magnitude * (1.0f / 512.0f) : moer_f32_from_bits((magnitude << 20) + (120u << 23));
    return sign != 0u ? -value : value;
}

/* ---- GGUF ---- */

/* 2^(e - 128), the scale of codes that are twice an E2M1. */
MOER_FORMAT_FUNCTION float moer_e8m0_half(unsigned int e) {
    return moer_f32_from_bits(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
}

/* Q4_K and Q5_K: 8 scales and 8 minima of 6 bits, packed into 12 bytes: words s0, s1, s2. The scales or minima of half a
   block (half 0 or 1) as four bytes. */
MOER_FORMAT_FUNCTION unsigned int moer_k_scales(unsigned int s0, unsigned int s2, unsigned int half) {
    return half != 0u ? (s2 & 0x0f0f0f0fu) | ((s0 >> 2) & 0x30303030u) : s0 & 0x3f3f3f3fu;
}
MOER_FORMAT_FUNCTION unsigned int moer_k_mins(unsigned int s1, unsigned int s2, unsigned int half) {
    return half != 0u ? ((s2 >> 4) & 0x0f0f0f0fu) | ((s1 >> 2) & 0x30303030u) : s1 & 0x3f3f3f3fu;
}

/* Q3_K: 16 scales of 6 bits in 12 bytes, 32 more than they mean. `low` is word 0 or 1 (`which`), `high` word 2: scales
   8 * half + 4 * which and the three after it, as four bytes. */
MOER_FORMAT_FUNCTION unsigned int moer_q3_k_scales(unsigned int low, unsigned int high, unsigned int half, unsigned int which) {
    return ((low >> (4u * half)) & 0x0f0f0f0fu) | ((high >> (4u * half + 2u * which)) & 0x03030303u) << 4;
}

/* IQ4_XS: scale `index` of 8. */
MOER_FORMAT_FUNCTION int moer_iq4_xs_scale(unsigned int low, unsigned int high, unsigned int index) {
    return (int)(((low >> (4u * index)) & 15u) | ((high >> (2u * index)) & 3u) << 4) - 32;
}
#endif
