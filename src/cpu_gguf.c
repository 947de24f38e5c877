/*
  cpu_gguf.c: what the blocks of GGUF's formats stand for, value by value: the plain statement, which the kernels are tested
  against. Products of a scale (f16), its factor and a code are exact in f32; where a minimum is added, that sum is rounded.

  Blocks, with sizes in bytes; d and m are f16:
      Q4_0    d, codes[16]                       (q - 8) * d
      Q4_1    d, m, codes[16]                    q * d + m
      Q5_0    d, bits[4], codes[16]              (q - 16) * d
      Q5_1    d, m, bits[4], codes[16]           q * d + m
      Q8_0    d, codes[32]                       q * d
      IQ4_NL  d, codes[16]                       table[q] * d
      MXFP4   e[1], codes[16]                    table[q] * 2^(e - 128)
      Q2_K    scales[16], codes[64], d, m        q * d * scale - m * minimum
      Q3_K    bits[32], codes[64], scales[12], d (q - 4) * d * (scale - 32)
      Q4_K    d, m, scales[12], codes[128]       q * d * scale - m * minimum
      Q5_K    d, m, scales[12], bits[32], codes[128]   likewise
      Q6_K    codes[128], bits[64], scales[16], d      (q - 32) * d * scale
      IQ4_XS  d, high[2], low[4], codes[128]     table[q] * d * (scale - 32)
*/
#include "internal.h"
#include "../kernels_src/scores.h"
#include "../kernels_src/formats.h"

static const signed char moer_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const signed char moer_twice_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static float moer_gguf_f16(const unsigned char *bytes) {
    uint16_t half = (uint16_t)(bytes[0] | bytes[1] << 8);
    return moer_load_value(&half, 0, MOE_ROUTE_F16);
}

static uint32_t moer_gguf_word(const unsigned char *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static unsigned moer_gguf_byte(uint32_t word, unsigned index) { return word >> (8 * index) & 255u; }

/* 32 values: byte j holds the codes of values j and j + 16. */
static void moer_gguf_small_block(moe_route_format format, const unsigned char *block, float *values) {
    const int has_min = format == MOE_ROUTE_FORMAT_GGUF_Q4_1 || format == MOE_ROUTE_FORMAT_GGUF_Q5_1;
    const int five_bits = format == MOE_ROUTE_FORMAT_GGUF_Q5_0 || format == MOE_ROUTE_FORMAT_GGUF_Q5_1;
    const unsigned head = format == MOE_ROUTE_FORMAT_GGUF_MXFP4 ? 1u : has_min ? 4u : 2u;
    const unsigned char *codes = block + head + (five_bits ? 4 : 0);
    const float d = format == MOE_ROUTE_FORMAT_GGUF_MXFP4 ? moer_e8m0_half(block[0]) : moer_gguf_f16(block);
    const float m = has_min ? moer_gguf_f16(block + 2) : 0.0f;
    const uint32_t bits = five_bits ? moer_gguf_word(block + head) : 0;
    unsigned i;
    for (i = 0; i < 32; i++) {
        const int q = (int)((unsigned)codes[i % 16] >> (i / 16 * 4) & 15u) | (int)(bits >> i & 1u) << 4;
        switch (format) {
        case MOE_ROUTE_FORMAT_GGUF_Q4_0: values[i] = (float)(q - 8) * d; break;
        case MOE_ROUTE_FORMAT_GGUF_Q5_0: values[i] = (float)(q - 16) * d; break;
        case MOE_ROUTE_FORMAT_GGUF_Q8_0: values[i] = (float)(codes[i] < 128 ? (int)codes[i] : (int)codes[i] - 256) * d; break;
        case MOE_ROUTE_FORMAT_GGUF_IQ4_NL: values[i] = (float)moer_iq4_values[q] * d; break;
        case MOE_ROUTE_FORMAT_GGUF_MXFP4: values[i] = (float)moer_twice_e2m1[q] * d; break;
        default: values[i] = (float)q * d + m; break;
        }
    }
}

/* Q4_K, Q5_K: each 32 bytes hold 32 values in their low halves, and the next 32 in their high ones. */
static void moer_gguf_q4_k_block(int five_bits, const unsigned char *block, float *values) {
    const unsigned char *bits = block + 16, *codes = block + (five_bits ? 48 : 16);
    const float d = moer_gguf_f16(block), m = moer_gguf_f16(block + 2);
    const uint32_t s0 = moer_gguf_word(block + 4), s1 = moer_gguf_word(block + 8), s2 = moer_gguf_word(block + 12);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned group = i / 32, half = group / 4, in_group = i % 32;
        const unsigned scale = moer_gguf_byte(moer_k_scales(s0, s2, half), group % 4), minimum = moer_gguf_byte(moer_k_mins(s1, s2, half), group % 4);
        unsigned q = (unsigned)codes[group / 2 * 32 + in_group] >> (group % 2 * 4) & 15u;
        if (five_bits) q |= ((unsigned)bits[in_group] >> group & 1u) << 4;
        values[i] = (float)q * (d * (float)scale) - m * (float)minimum;
    }
}

/* Q2_K: each 32 bytes hold four times 32 values, two bits each, with a scale for 16. */
static void moer_gguf_q2_k_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block + 80), m = moer_gguf_f16(block + 82);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned q = (unsigned)block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3u, scale = block[i / 16];
        values[i] = (float)q * (d * (float)(scale & 15u)) - m * (float)(scale >> 4);
    }
}

/* Q3_K: likewise; bit i / 32 of bits[i % 32] is the code's third. */
static void moer_gguf_q3_k_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block + 108);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned group = i / 16, half = group / 8, which = group / 4 % 2;
        const unsigned scale = moer_gguf_byte(moer_q3_k_scales(moer_gguf_word(block + (96 + which * 4)), moer_gguf_word(block + 104), half, which), group % 4);
        const unsigned q = ((unsigned)block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3u) | ((unsigned)block[i % 32] >> (i / 32) & 1u) << 2;
        values[i] = (float)((int)q - 4) * (d * (float)((int)scale - 32));
    }
}

/* Q6_K: in each 128 values, the low halves of 64 bytes are the first 64, the high ones the others; a scale for 16. */
static void moer_gguf_q6_k_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block + 208);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned part = i / 128, in_part = i % 128, scale = block[192 + i / 16];
        const unsigned q = ((unsigned)block[part * 64 + in_part % 64] >> (in_part / 64 * 4) & 15u) | ((unsigned)block[128 + part * 32 + i % 32] >> (in_part / 32 * 2) & 3u) << 4;
        values[i] = (float)((int)q - 32) * (d * (float)(scale < 128u ? (int)scale : (int)scale - 256));
    }
}

/* IQ4_XS: 32 values as in the small blocks, eight times. */
static void moer_gguf_iq4_xs_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block);
    const uint32_t high = (uint32_t)(block[2] | block[3] << 8), low = moer_gguf_word(block + 4);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned q = (unsigned)block[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15u;
        values[i] = (float)moer_iq4_values[q] * (d * (float)moer_iq4_xs_scale(low, high, i / 32));
    }
}

static void moer_cpu_gguf_row(moe_route_format format, const unsigned char *blocks, uint32_t inner, float *values) {
    const moer_block block = moer_format_block(format);
    uint32_t k;
    for (k = 0; k < inner; k += block.values, blocks += block.bytes) {
        switch (format) {
        case MOE_ROUTE_FORMAT_GGUF_Q2_K: moer_gguf_q2_k_block(blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q3_K: moer_gguf_q3_k_block(blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q4_K: moer_gguf_q4_k_block(0, blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q5_K: moer_gguf_q4_k_block(1, blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q6_K: moer_gguf_q6_k_block(blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_IQ4_XS: moer_gguf_iq4_xs_block(blocks, values + k); break;
        default: moer_gguf_small_block(format, blocks, values + k); break;
        }
    }
}
