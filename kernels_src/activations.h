/*
  activations.h: what stands between an expert's two matmuls: clamps, activation, and the product of gate and up; one text
  for the kernels and for the CPU backend, so that both give the same bits. As in scores.h everything is a single IEEE f32
  operation in a fixed order, and no rounded product feeds a sum that a compiler could fuse. Include scores.h first.
  Matmuls and biases don't belong here.
*/
#define MOER_SILU 0 /* values of moe_route_activation */
#define MOER_GELU_TANH 1
#define MOER_GELU_ERF 2
#define MOER_RELU2 3
#define MOER_SITU 4
#define MOER_CLAMP_NONE 0
#define MOER_CLAMP_BEFORE 1 /* moe_route_clamp_position + 1 */
#define MOER_CLAMP_AFTER 2

/* The normal distribution (1 + erf(x / sqrt(2))) / 2, relative error within 7 units of 2^-24 from x = -12.9 on, below which
   the result is no normal float. With a = |x|, t = 1 / (1 + 0.3 a): the lower tail is e^(-a^2 / 2) t p(t), p fitted for the least relative error up
   to a = 14.5, where the tail is below every float. The part of a^2 that its rounding loses goes back in as a factor. */
MOER_SCORE float moer_normal_cdf(float x) {
    const float a = x < 0.0f ? -x : x;
    float t, p, square, lost, density;
    if (a > 14.5f) return x < 0.0f ? 0.0f : 1.0f;
    t = MOER_RECIPROCAL(MOER_FMA(0.3f, a, 1.0f));
    p = MOER_FMA(-2.06234697e-2f, t, 1.12435617e-1f);
    p = MOER_FMA(p, t, -2.28213608e-1f);
    p = MOER_FMA(p, t, 1.91784531e-1f);
    p = MOER_FMA(p, t, -7.94234946e-2f);
    p = MOER_FMA(p, t, 9.61568356e-2f);
    p = MOER_FMA(p, t, 7.83896521e-2f);
    p = MOER_FMA(p, t, 1.10235423e-1f);
    p = MOER_FMA(p, t, 1.19571812e-1f);
    p = MOER_FMA(p, t, 1.19686693e-1f);
    p = MOER_MUL(p, t);
    square = MOER_MUL(a, a);
    lost = MOER_FMA(a, a, -square);
    density = MOER_MUL(moer_exp(MOER_MUL(-0.5f, square)), MOER_FMA(-0.5f, lost, 1.0f));
    return x < 0.0f ? MOER_MUL(density, p) : MOER_FMA(-density, p, 1.0f);
}

/* The activation of x. `alpha` is SILU's, or SITU's beta. A NaN stays one.
   SILU x sigmoid(alpha x); GELU_TANH x (1 + tanh(u)) / 2 = x sigmoid(2u), 2u = sqrt(8 / pi) (x + 0.044715 x^3): relative error
   within 4 + 3 |v| units of 2^-24 from v = -87 on, v the argument of sigmoid, whose rounding is what v enters by.
   SITU alpha tanh(x / alpha) sigmoid(x): within 9 + 3 |x| units from x = -87 on.
   GELU_ERF x moer_normal_cdf(x): within 8 units from x = -12.9 on. Below these x the result is 1e-35 |x| at most.
   RELU2 is rounded once. */
MOER_SCORE float moer_activation(int activation, float x, float alpha) {
    if (x != x) return x;
    if (activation == MOER_SILU) return MOER_MUL(x, moer_sigmoid(MOER_MUL(alpha, x)));
    if (activation == MOER_GELU_TANH) return MOER_MUL(x, moer_sigmoid(MOER_MUL(x, MOER_FMA(7.13548163e-2f, MOER_MUL(x, x), 1.59576912f))));
    if (activation == MOER_GELU_ERF) return MOER_MUL(x, moer_normal_cdf(x));
    if (activation == MOER_SITU) return MOER_MUL(moer_softcap(x, alpha), moer_sigmoid(x));
    return x > 0.0f ? MOER_MUL(x, x) : 0.0f;
}

/* The gate's part of h, or all of it in experts without gate. */
MOER_SCORE float moer_activated_gate(int activation, int clamp, float gate, float alpha, float limit) {
    float value = gate;
    if (clamp == MOER_CLAMP_BEFORE && value > limit) value = limit;
    value = moer_activation(activation, value, alpha);
    if (clamp == MOER_CLAMP_AFTER && value > limit) value = limit;
    return value;
}

/* up's part of h. `beta` is SITU's for up, 0: none. */
MOER_SCORE float moer_shifted_up(int clamp, float up, float beta, float offset, float limit) {
    float value = up;
    if (clamp != MOER_CLAMP_NONE && value > limit) value = limit;
    if (clamp != MOER_CLAMP_NONE && value < -limit) value = -limit;
    if (beta != 0.0f && value == value) value = moer_softcap(value, beta);
    return MOER_ADD(value, offset);
}
