/*
  cpu_route.c: the router on the CPU: logits -> ids and weights, the plain statement of what select.h computes, to the
  last bit. Sums run over 32 interleaved parts and then over a butterfly of them, because a warp adds in that order.
*/
#include "internal.h"
#include "../kernels_src/scores.h"

static void *moer_host(moe_route_address address) { return (void *)(uintptr_t)address; }

static size_t moer_dtype_size(moe_route_dtype dtype) { return dtype == MOE_ROUTE_F32 ? 4u : 2u; }

static float moer_f16_to_f32(unsigned int h) {
    const unsigned int sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 31u) return moer_f32_from_bits(sign | MOER_INFINITY_BITS | mantissa << 13);
    if (exponent == 0u) { /* mantissa * 2^-24, exactly */
        const float value = (float)mantissa * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    return moer_f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}

/* Round to nearest, ties to even. */
static unsigned int moer_f32_to_f16(float f) {
    const unsigned int bits = moer_f32_bits(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned int exponent, mantissa, shift, result, rest, half;
    if (magnitude > MOER_INFINITY_BITS) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and up */
    exponent = magnitude >> 23;
    if (exponent < 102u) return sign; /* below half of the smallest subnormal */
    mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    shift = exponent < 113u ? 126u - exponent : 13u; /* subnormals lose more bits */
    result = mantissa >> shift;
    rest = mantissa & ((1u << shift) - 1u);
    half = 1u << (shift - 1u);
    if (rest > half || (rest == half && (result & 1u))) result++;
    /* The implicit bit is still there: it adds one to the exponent field, which is meant. */
    return sign | (exponent < 113u ? result : result + ((exponent - 113u) << 10));
}

static unsigned int moer_f32_to_bf16(float f) {
    const unsigned int bits = moer_f32_bits(f);
    if ((bits & 0x7fffffffu) > MOER_INFINITY_BITS) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

static float moer_load_value(const void *array, size_t index, moe_route_dtype dtype) {
    uint16_t half;
    float value;
    if (dtype == MOE_ROUTE_F32) {
        memcpy(&value, (const char *)array + index * 4, 4);
        return value;
    }
    memcpy(&half, (const char *)array + index * 2, 2);
    return dtype == MOE_ROUTE_F16 ? moer_f16_to_f32(half) : moer_f32_from_bits((unsigned int)half << 16);
}

static void moer_store_value(void *array, size_t index, moe_route_dtype dtype, float value) {
    uint16_t half;
    if (dtype == MOE_ROUTE_F32) {
        memcpy((char *)array + index * 4, &value, 4);
        return;
    }
    half = (uint16_t)(dtype == MOE_ROUTE_F16 ? moer_f32_to_f16(value) : moer_f32_to_bf16(value));
    memcpy((char *)array + index * 2, &half, 2);
}

/* The sum of the 32 lanes' parts, in the order of a warp's xor butterfly. */
static float moer_butterfly_sum(float part[32]) {
    float next[32];
    unsigned int mask, lane;
    for (mask = 16; mask != 0; mask >>= 1) {
        for (lane = 0; lane < 32; lane++) next[lane] = MOER_ADD(part[lane], part[lane ^ mask]);
        memcpy(part, next, sizeof next);
    }
    return part[0];
}

static float moer_score_of(const moer_router *router, float logit, float largest, float sum) {
    return router->score == MOE_ROUTE_SCORE_SOFTMAX ? moer_share(moer_softmax_term(logit, largest), sum) : moer_sigmoid(logit);
}

static void moer_cpu_route_token(const moer_router *router, const void *logits, size_t row, int32_t *ids, float *weights) {
    const uint32_t num_experts = router->num_experts, top_k = router->top_k;
    float logit[MOER_MAX_EXPERTS]; /* NaN is -inf */
    unsigned int key[MOER_MAX_EXPERTS]; /* order of selection; 0: taken */
    float weight[MOER_MAX_TOP_K], part[32];
    uint32_t chosen[MOER_MAX_TOP_K];
    unsigned char counts[MOER_MAX_TOP_K]; /* 0: the expert couldn't be selected, its weight is 0 */
    float largest = moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS), sum = 0.0f;
    uint32_t e, j;

    for (e = 0; e < num_experts; e++) {
        key[e] = moer_order_key(moer_load_value(logits, row * num_experts + e, router->logits_dtype));
        logit[e] = moer_key_value(key[e]);
        if (logit[e] > largest) largest = logit[e];
    }
    if (router->score == MOE_ROUTE_SCORE_SOFTMAX) {
        memset(part, 0, sizeof part);
        for (e = 0; e < num_experts; e++) part[e % 32] = MOER_ADD(part[e % 32], moer_softmax_term(logit[e], largest));
        sum = moer_butterfly_sum(part);
    }
    if (router->selection_bias != 0)
        for (e = 0; e < num_experts; e++) {
            const float bias = moer_load_value(moer_host(router->selection_bias), e, MOE_ROUTE_F32);
            key[e] = moer_order_key(MOER_ADD(moer_score_of(router, logit[e], largest, sum), bias));
        }

    for (j = 0; j < top_k; j++) {
        uint32_t best = 0;
        for (e = 1; e < num_experts; e++)
            if (key[e] > key[best]) best = e;
        chosen[j] = best;
        counts[j] = key[best] > MOER_LOWEST_KEY;
        key[best] = 0;
    }

    if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED) {
        float top = moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS);
        for (j = 0; j < top_k; j++)
            if (counts[j] && logit[chosen[j]] > top) top = logit[chosen[j]];
        for (j = 0; j < top_k; j++) weight[j] = counts[j] ? moer_softmax_term(logit[chosen[j]], top) : 0.0f;
    } else {
        for (j = 0; j < top_k; j++) weight[j] = counts[j] ? moer_score_of(router, logit[chosen[j]], largest, sum) : 0.0f;
    }
    if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED || router->renormalize != MOE_ROUTE_RENORMALIZE_NONE) {
        memset(part, 0, sizeof part);
        for (j = 0; j < top_k; j++) part[j % 32] = j < 32 ? weight[j] : MOER_ADD(part[j % 32], weight[j]);
        sum = moer_butterfly_sum(part);
        if (router->renormalize != MOE_ROUTE_RENORMALIZE_NONE) sum = MOER_ADD(sum, router->renormalize_epsilon);
        for (j = 0; j < top_k; j++) weight[j] = moer_share(weight[j], sum);
    }
    for (j = 0; j < top_k; j++) {
        if (ids != NULL) ids[j] = (int32_t)chosen[j];
        if (weights != NULL) weights[j] = moer_finite(MOER_MUL(weight[j], router->scale));
    }
}

static void moer_cpu_topk(const moer_router *router, const void *logits, uint32_t num_tokens, uint32_t num_valid, int32_t *ids, float *weights) {
    uint32_t t, j;
    for (t = 0; t < num_tokens; t++) {
        int32_t *token_ids = ids != NULL ? ids + (size_t)t * router->top_k : NULL;
        float *token_weights = weights != NULL ? weights + (size_t)t * router->top_k : NULL;
        if (t < num_valid) {
            moer_cpu_route_token(router, logits, t, token_ids, token_weights);
            continue;
        }
        for (j = 0; j < router->top_k; j++) {
            if (ids != NULL) token_ids[j] = -1;
            if (weights != NULL) token_weights[j] = 0.0f;
        }
    }
}
