/*
  numbers.h: 16-bit floats, in integer and double arithmetic that any host has: what the conversions and the packed
  instructions of a GPU return, to the bit. Shared by kernels, machine and tests; valid C and C++.
*/
#ifndef EMULATION_NUMBERS_H
#define EMULATION_NUMBERS_H

static inline unsigned emulation_bits(float f) {
    unsigned u;
    __builtin_memcpy(&u, &f, sizeof u);
    return u;
}

static inline float emulation_float(unsigned u) {
    float f;
    __builtin_memcpy(&f, &u, sizeof f);
    return f;
}

/* x to the nearest 16-bit float with `fraction` fraction bits, ties to even; overflow gives infinity, and every NaN gives
   0x7fff. The exponent has the remaining 15 - fraction bits. */
static inline unsigned short emulation_round(double x, int fraction) {
    const int bias = (1 << (14 - fraction)) - 1;
    const unsigned infinity = ((1u << (15 - fraction)) - 1u) << fraction;
    unsigned long long bits, significand, quotient, rest, half;
    unsigned sign, result;
    int exponent, shift, scale;
    __builtin_memcpy(&bits, &x, sizeof bits);
    sign = (unsigned)(bits >> 63) << 15;
    exponent = (int)(bits >> 52 & 0x7ff);
    significand = bits & 0xfffffffffffffull;
    if (exponent == 0x7ff) return (unsigned short)(significand ? 0x7fffu : sign | infinity);
    if (exponent == 0) return (unsigned short)sign; /* 0, or far below the smallest 16-bit float */
    significand |= 1ull << 52;
    exponent -= 1023;
    scale = exponent < 1 - bias ? 1 - bias : exponent;
    shift = scale - fraction - (exponent - 52); /* bits below the last one that stays */
    if (shift > 60) return (unsigned short)sign;
    quotient = significand >> shift;
    rest = significand & ((1ull << shift) - 1);
    half = 1ull << (shift - 1);
    if (rest > half || (rest == half && (quotient & 1))) quotient++;
    /* The leading bit of a normal quotient adds the 1 that the exponent field lacks here. */
    result = ((unsigned)(scale + bias - 1) << fraction) + (unsigned)quotient;
    return (unsigned short)(sign | (result > infinity ? infinity : result));
}

static inline float emulation_f16_to_f32(unsigned short h) {
    const unsigned sign = (unsigned)(h >> 15) << 31, exponent = (unsigned)h >> 10 & 31, fraction = h & 0x3ffu;
    if (exponent == 31) return emulation_float(fraction ? 0x7fffffffu : sign | 0x7f800000u);
    if (exponent) return emulation_float(sign | (exponent + 112) << 23 | fraction << 13);
    return emulation_float(sign | emulation_bits((float)fraction * 5.9604644775390625e-8f)); /* 2^-24 */
}

static inline float emulation_bf16_to_f32(unsigned short h) { return emulation_float((unsigned)h << 16); }
static inline unsigned short emulation_f32_to_f16(float f) { return emulation_round((double)f, 10); }
static inline unsigned short emulation_f32_to_bf16(float f) { return emulation_round((double)f, 7); }

static inline unsigned emulation_pack(unsigned short low, unsigned short high) { return (unsigned)high << 16 | low; }
static inline unsigned short emulation_low(unsigned pair) { return (unsigned short)(pair & 0xffff); }
static inline unsigned short emulation_high(unsigned pair) { return (unsigned short)(pair >> 16); }

/* The difference of two f16 is exact in double: at most 41 bits. */
static inline unsigned short emulation_f16_sub(unsigned short a, unsigned short b) {
    return emulation_round((double)emulation_f16_to_f32(a) - (double)emulation_f16_to_f32(b), 10);
}

/* The product is exact in double, the sum may not be; still it rounds as the exact sum does. For that to fail, the sum has
   to lie within 2^-53 of a midpoint between two f16 without being it: only a product that is a midpoint plus a far smaller
   addend does, and no addend is smaller than 2^-24, no such product above 2^17. */
static inline unsigned short emulation_f16_fma(unsigned short a, unsigned short b, unsigned short c) {
    const double product = (double)emulation_f16_to_f32(a) * (double)emulation_f16_to_f32(b);
    return emulation_round(product + (double)emulation_f16_to_f32(c), 10);
}

/* bf16 has the exponents of f32, and an addend far below a product that is a midpoint decides which way it rounds. So the
   sum is rounded to odd: where bits were lost, the last bit of the double is made 1, and no midpoint is met by accident. */
static inline unsigned short emulation_bf16_fma(unsigned short a, unsigned short b, unsigned short c) {
    const double product = (double)emulation_bf16_to_f32(a) * (double)emulation_bf16_to_f32(b);
    const double addend = (double)emulation_bf16_to_f32(c);
    double sum = product + addend;
    if (sum - sum == 0.0) { /* finite */
        const double other = sum - product;
        const double lost = (product - (sum - other)) + (addend - other);
        unsigned long long bits;
        __builtin_memcpy(&bits, &sum, sizeof bits);
        if (lost != 0.0 && !(bits & 1)) {
            bits += (lost > 0.0) == (sum > 0.0) ? 1ull : ~0ull;
            __builtin_memcpy(&sum, &bits, sizeof sum);
        }
    }
    return emulation_round(sum, 7);
}

#endif
