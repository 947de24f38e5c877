/*
  scores.h: the arithmetic of scores and their order, one text for the kernels and for the CPU backend, so that both give
  the same bits. Everything is a single IEEE f32 operation in a fixed order; no product feeds a sum that a compiler could
  fuse. Loops over experts and reductions don't belong here.
*/
#ifdef MOER_HOST
#define MOER_SCORE static
#define MOER_FMA(a, b, c) fmaf(a, b, c)
#define MOER_ADD(a, b) ((a) + (b))
#define MOER_MUL(a, b) ((a) * (b))
#define MOER_DIV(a, b) ((a) / (b))
static unsigned int moer_f32_bits(float f) { unsigned int u; memcpy(&u, &f, sizeof u); return u; }
static float moer_f32_from_bits(unsigned int u) { float f; memcpy(&f, &u, sizeof f); return f; }
#else
#define MOER_SCORE DEVICE
#define MOER_FMA(a, b, c) f32_fma(a, b, c)
#define MOER_ADD(a, b) f32_add(a, b)
#define MOER_MUL(a, b) f32_mul(a, b)
#define MOER_DIV(a, b) f32_div(a, b)
#define moer_f32_bits f32_bits
#define moer_f32_from_bits f32_from_bits
#endif

#define MOER_INFINITY_BITS 0x7f800000u
#define MOER_LOWEST_KEY 0x007fffffu /* moer_order_key(-inf) */

/* A number that orders as the float does, with NaN as -inf and -0 as +0. No float gives 0. */
MOER_SCORE unsigned int moer_order_key(float value) {
    unsigned int bits = moer_f32_bits(value);
    if ((bits & 0x7fffffffu) > MOER_INFINITY_BITS) return MOER_LOWEST_KEY;
    if (bits == 0x80000000u) bits = 0;
    return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

MOER_SCORE float moer_key_value(unsigned int key) {
    return moer_f32_from_bits((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

/* e^x within 1.3 units of 2^-24, 0 for -inf, +inf from 88.73 on. NaN isn't expected.
   x = n ln2 + r; e^r = 1 + r + r^2 q(r), q fitted for the least relative error on |r| <= ln2 / 2. */
MOER_SCORE float moer_exp(float x) {
    float r, q;
    int n, half;
    if (x > 88.8f) return moer_f32_from_bits(MOER_INFINITY_BITS);
    if (x < -104.0f) return 0.0f;
    n = (int)MOER_FMA(x, 1.44269504f, x < 0.0f ? -0.5f : 0.5f);
    r = MOER_FMA((float)-n, 0.693359375f, x);
    r = MOER_FMA((float)-n, -2.12194440e-4f, r);
    q = MOER_FMA(1.38145371e-3f, r, 8.36874545e-3f);
    q = MOER_FMA(q, r, 4.16683927e-2f);
    q = MOER_FMA(q, r, 1.66665211e-1f);
    q = MOER_FMA(q, r, 4.99999940e-1f);
    q = MOER_FMA(q, r, 1.0f);
    q = MOER_FMA(q, r, 1.0f);
    half = n / 2; /* two factors: 2^n itself may be no normal float */
    q = MOER_MUL(q, moer_f32_from_bits((unsigned int)(half + 127) << 23));
    return MOER_MUL(q, moer_f32_from_bits((unsigned int)(n - half + 127) << 23));
}

MOER_SCORE float moer_sigmoid(float x) {
    return MOER_DIV(1.0f, MOER_ADD(1.0f, moer_exp(-x)));
}

/* exp(x - largest), the numerator of a softmax. Defined where the plain difference is NaN: values equal to an infinite
   largest count 1, and -inf always counts 0. */
MOER_SCORE float moer_softmax_term(float x, float largest) {
    if (moer_f32_bits(x) == (0x80000000u | MOER_INFINITY_BITS)) return 0.0f;
    if (x == largest) return 1.0f;
    return moer_exp(MOER_ADD(x, -largest));
}

/* numerator / denominator, 0 where the denominator is 0. */
MOER_SCORE float moer_share(float numerator, float denominator) {
    return denominator == 0.0f ? 0.0f : MOER_DIV(numerator, denominator);
}

/* The nearest finite float. NaN isn't expected. */
MOER_SCORE float moer_finite(float x) {
    unsigned int bits = moer_f32_bits(x);
    return (bits & 0x7fffffffu) == MOER_INFINITY_BITS ? moer_f32_from_bits(bits - 1u) : x;
}
