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
#endif
