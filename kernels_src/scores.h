/*
  scores.h: the arithmetic of scores and their order, one text for the kernels and for the CPU backend, so that both give
  the same bits. Everything is a single IEEE f32 operation in a fixed order; where a product feeds a sum, MOER_FMA says so,
  because a host compiler may otherwise fuse the two or not. Loops over experts and reductions don't belong here.
*/
#ifdef MOER_HOST
#define MOER_SCORE static
#define MOER_FMA(a, b, c) fmaf(a, b, c)
#define MOER_ADD(a, b) ((a) + (b))
#define MOER_MUL(a, b) ((a) * (b))
#define MOER_DIV(a, b) ((a) / (b))
#define MOER_SQRT(a) sqrtf(a)
#define MOER_RECIPROCAL(a) (1.0f / (a))
#define MOER_MAX(a, b) ((a) > (b) ? (a) : (b)) /* b where a is NaN */
#define MOER_MIN(a, b) ((a) < (b) ? (a) : (b))
static unsigned int moer_f32_bits(float f) { unsigned int u; memcpy(&u, &f, sizeof u); return u; }
static float moer_f32_from_bits(unsigned int u) { float f; memcpy(&f, &u, sizeof f); return f; }
#else
#define MOER_SCORE DEVICE
#define MOER_FMA(a, b, c) f32_fma(a, b, c)
#define MOER_ADD(a, b) f32_add(a, b)
#define MOER_MUL(a, b) f32_mul(a, b)
#define MOER_DIV(a, b) f32_div(a, b)
#define MOER_SQRT(a) f32_sqrt(a)
#define MOER_RECIPROCAL(a) f32_reciprocal(a)
#define MOER_MAX(a, b) f32_max(a, b)
#define MOER_MIN(a, b) f32_min(a, b)
#define moer_f32_bits f32_bits
#define moer_f32_from_bits f32_from_bits
#endif

#define MOER_INFINITY_BITS 0x7f800000u
#define MOER_LARGEST_F32 3.40282347e38f
#define MOER_LARGEST_F16 65504.0f
#define MOER_LARGEST_BF16 3.38953139e38f
#define MOER_ZERO_KEY 0x80000000u /* moer_order_key(0) */
#define MOER_LOWEST_KEY 0x007fffffu /* moer_order_key(-inf) */

/* A number that orders as the float does, with NaN as -inf and -0 as +0. No float gives 0. The host looks at bits, so that a program
   compiled for fast rather than IEEE arithmetic selects alike. */
MOER_SCORE unsigned int moer_order_key(float value) {
#ifdef MOER_HOST
    unsigned int bits = moer_f32_bits(value);
    if ((bits & 0x7fffffffu) > MOER_INFINITY_BITS) return MOER_LOWEST_KEY;
    if (bits == 0x80000000u) bits = 0;
#else
    const unsigned int bits = moer_f32_bits(MOER_ADD(MOER_MAX(value, moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS)), 0.0f));
#endif
    return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

MOER_SCORE float moer_key_value(unsigned int key) {
    return moer_f32_from_bits((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

/* e^x within 1.3 units of 2^-24, 0 for -inf, +inf from 88.73 on. NaN isn't expected.
   x = n ln2 + r; e^r = 1 + r + r^2 q(r), q fitted for the least relative error on |r| <= ln2 / 2. No branch: at the limits of x the two
   factors give 0 and +inf by themselves. */
MOER_SCORE float moer_exp(float x) {
    float r, q, n;
    unsigned int exponents;
    x = MOER_MIN(MOER_MAX(x, -104.0f), 89.0f);
    r = MOER_FMA(x, 1.44269504f, 12582912.0f); /* 1.5 * 2^23: what is left of a fraction is rounded to an integer, in the low bits */
    exponents = moer_f32_bits(r) - (0x4b400000u - 254u); /* n + 2 * 127 */
#ifdef MOER_HOST
    n = (float)((int)exponents - 254); /* the same, also where a compiler may reorder sums */
#else
    n = MOER_ADD(r, -12582912.0f);
#endif
    r = MOER_FMA(-n, 0.693359375f, x);
    r = MOER_FMA(-n, -2.12194440e-4f, r);
    q = MOER_FMA(1.38145371e-3f, r, 8.36874545e-3f);
    q = MOER_FMA(q, r, 4.16683927e-2f);
    q = MOER_FMA(q, r, 1.66665211e-1f);
    q = MOER_FMA(q, r, 4.99999940e-1f);
    q = MOER_FMA(q, r, 1.0f);
    q = MOER_FMA(q, r, 1.0f);
    /* two factors: 2^n itself may be no normal float */
    q = MOER_MUL(q, moer_f32_from_bits((exponents >> 1) << 23));
    return MOER_MUL(q, moer_f32_from_bits((exponents - (exponents >> 1)) << 23));
}

MOER_SCORE float moer_sigmoid(float x) {
    return MOER_RECIPROCAL(MOER_ADD(1.0f, moer_exp(-x)));
}

/* log(1 + e^x) within 4 units of 2^-24: max(x, 0) + log(1 + t) with t = e^-|x|. With u = t / (2 + t) the
   logarithm is 2 atanh(u) = 2u + 2u z q(z), z = u^2 up to 1/9, q fitted for the least relative error. */
MOER_SCORE float moer_softplus(float x) {
    const float t = moer_exp(x < 0.0f ? x : -x);
    const float u = MOER_DIV(t, MOER_ADD(2.0f, t)), z = MOER_MUL(u, u);
    float q = MOER_FMA(1.40059933e-1f, z, 1.40009031e-1f);
    q = MOER_FMA(q, z, 2.00107634e-1f);
    q = MOER_FMA(q, z, 3.33332092e-1f);
    q = MOER_FMA(MOER_MUL(q, z), u, u);
    return MOER_FMA(2.0f, q, x > 0.0f ? x : 0.0f);
}

/* Where e^x is the whole sum, its root is taken first: it stays a normal number for longer. */
MOER_SCORE float moer_sqrt_softplus(float x) { return x < -20.0f ? moer_exp(MOER_MUL(0.5f, x)) : MOER_SQRT(moer_softplus(x)); }

/* log(sigmoid(x)), with the error of moer_softplus. */
MOER_SCORE float moer_log_sigmoid(float x) { return -moer_softplus(-x); }

/* tanh(x) within 3 units of 2^-24: x + x z q(z), z = x^2, near 0 (q fitted likewise); 1 - 2 / (e^2|x| + 1) elsewhere. */
MOER_SCORE float moer_tanh(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    float q;
    if (magnitude < 0.625f) {
        const float z = MOER_MUL(x, x);
        q = MOER_FMA(-5.70498640e-3f, z, 2.06390861e-2f);
        q = MOER_FMA(q, z, -5.37397154e-2f);
        q = MOER_FMA(q, z, 1.33314416e-1f);
        q = MOER_FMA(q, z, -3.33332807e-1f);
        return MOER_FMA(MOER_MUL(q, z), x, x);
    }
    q = MOER_ADD(1.0f, -MOER_DIV(2.0f, MOER_ADD(moer_exp(MOER_ADD(magnitude, magnitude)), 1.0f)));
    return x < 0.0f ? -q : q;
}

MOER_SCORE float moer_softcap(float x, float cap) { return MOER_MUL(cap, moer_tanh(MOER_DIV(x, cap))); }

/* exp(x - largest), the numerator of a softmax. Defined where the plain difference is NaN: values equal to an infinite
   largest count 1, and -inf always counts 0. */
MOER_SCORE float moer_softmax_term(float x, float largest) {
    float distance = MOER_ADD(x, -largest);
    if (x == largest) distance = 0.0f;
    if (moer_f32_bits(x) == (0x80000000u | MOER_INFINITY_BITS)) distance = -104.0f;
    return moer_exp(distance);
}

/* The same among experts that SparseMixer keeps beside the largest; others count 0. Where the quotient is NaN (0 / 0, or an
   infinite largest) the expert is kept. */
MOER_SCORE float moer_sparse_mixer_term(float x, float largest, float threshold) {
    const float magnitude = x < 0.0f ? -x : x;
    const float distance = MOER_DIV(MOER_ADD(largest, -x), magnitude > largest ? magnitude : largest);
    return distance > threshold ? 0.0f : moer_softmax_term(x, largest);
}

/* numerator / denominator, 0 where the denominator is 0. */
MOER_SCORE float moer_share(float numerator, float denominator) {
    return denominator == 0.0f ? 0.0f : MOER_DIV(numerator, denominator);
}

/* The nearest float within plus and minus `limit`; NaN gives 0. */
MOER_SCORE float moer_bounded(float x, float limit) {
    if ((moer_f32_bits(x) & 0x7fffffffu) > MOER_INFINITY_BITS) return 0.0f;
    return x > limit ? limit : x < -limit ? -limit : x;
}

/* A score as a weight: -inf, which nobody can select, weighs nothing; +inf weighs as much as a float can. */
MOER_SCORE float moer_score_weight(float score) {
    return moer_f32_bits(score) == (0x80000000u | MOER_INFINITY_BITS) ? 0.0f : moer_bounded(score, MOER_LARGEST_F32);
}
