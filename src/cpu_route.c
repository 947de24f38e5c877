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

typedef struct moer_token { /* the router's work on one token */
    const moer_router *router;
    float x[MOER_MAX_EXPERTS + MOER_MAX_SHARED]; /* l[e] of moe_route.h; NaN is -inf */
    float largest, sum;                          /* of the softmax over all experts */
    unsigned int key[MOER_MAX_EXPERTS];          /* order of selection; 0: taken */
    uint32_t id[MOER_MAX_TOP_K];
    unsigned char counts[MOER_MAX_TOP_K + MOER_MAX_SHARED]; /* 0: the weight is 0: nobody could select it, or it's out of range */
    float weight[MOER_MAX_TOP_K + MOER_MAX_SHARED];         /* those of the shared experts follow the k selected */
} moer_token;

static void moer_token_load(moer_token *token, const void *logits, size_t row) {
    const moer_router *router = token->router;
    const uint32_t num_logits = router->num_experts + router->num_shared_experts;
    uint32_t e;
    for (e = 0; e < num_logits; e++) {
        float x = moer_load_value(logits, row * num_logits + e, router->logits_dtype);
        if (router->logit_bias != 0) x = MOER_ADD(x, moer_load_value(moer_host(router->logit_bias), e, MOE_ROUTE_F32));
        if (router->softcap != 0.0f) x = moer_softcap(moer_key_value(moer_order_key(x)), router->softcap);
        token->x[e] = moer_key_value(moer_order_key(x));
    }
}

static void moer_token_sum(moer_token *token) {
    float part[32];
    uint32_t e;
    token->largest = token->x[0];
    for (e = 1; e < token->router->num_experts; e++)
        if (token->x[e] > token->largest) token->largest = token->x[e];
    memset(part, 0, sizeof part);
    for (e = 0; e < token->router->num_experts; e++) part[e % 32] = MOER_ADD(part[e % 32], moer_softmax_term(token->x[e], token->largest));
    token->sum = moer_butterfly_sum(part);
}

static float moer_token_score(const moer_token *token, float x) {
    const moer_router *router = token->router;
    switch (router->score) {
    case MOE_ROUTE_SCORE_SOFTMAX: return moer_share(moer_softmax_term(x, token->largest), token->sum);
    case MOE_ROUTE_SCORE_SIGMOID: return moer_sigmoid(x);
    case MOE_ROUTE_SCORE_SQRT_SOFTPLUS: return moer_sqrt_softplus(x);
    case MOE_ROUTE_SCORE_CUSTOM: return moer_key_value(moer_order_key(router->score_function(x, router->score_user)));
    default: return x;
    }
}

/* Marks the experts of groups that are dropped. */
static void moer_token_drop_groups(moer_token *token) {
    const moer_router *router = token->router;
    const uint32_t size = router->num_experts / router->num_groups;
    unsigned int group_key[MOER_MAX_GROUPS];
    unsigned char kept[MOER_MAX_GROUPS];
    uint32_t g, e, j;
    for (g = 0; g < router->num_groups; g++) {
        unsigned int best = 0, second = 0;
        for (e = g * size; e < (g + 1) * size; e++) {
            const unsigned int key = token->key[e];
            second = key > best ? best : key > second ? key : second;
            best = key > best ? key : best;
        }
        group_key[g] = router->group_rule == MOE_ROUTE_GROUPS_MAX ? best : moer_order_key(MOER_ADD(moer_key_value(best), moer_key_value(second)));
        kept[g] = 0;
    }
    for (j = 0; j < router->topk_groups; j++) {
        uint32_t best = 0;
        for (g = 1; g < router->num_groups; g++)
            if (group_key[g] > group_key[best]) best = g;
        group_key[best] = 0;
        kept[best] = 1;
    }
    for (e = 0; e < router->num_experts; e++)
        if (!kept[e / size]) token->key[e] = router->dropped != MOE_ROUTE_DROPPED_MINUS_INFINITY ? MOER_ZERO_KEY : MOER_LOWEST_KEY;
}

/* Softmax of the largest of the experts that are left, among those that SparseMixer keeps beside it. */
static float moer_token_mixer_weight(const moer_token *token, float largest) {
    float part[32];
    uint32_t e;
    memset(part, 0, sizeof part);
    for (e = 0; e < token->router->num_experts; e++)
        if (token->key[e] != 0) part[e % 32] = MOER_ADD(part[e % 32], moer_sparse_mixer_term(token->x[e], largest, MOER_MUL(2.0f, token->router->jitter)));
    return moer_share(1.0f, moer_butterfly_sum(part));
}

static void moer_token_select(moer_token *token) {
    const moer_router *router = token->router;
    const int drops = moer_drops_groups(router->group_rule);
    const int by_score = router->selection_bias != 0 || drops || router->score == MOE_ROUTE_SCORE_CUSTOM;
    uint32_t given[MOER_MAX_GROUPS], e, j;
    for (e = 0; e < router->num_experts; e++) {
        float order = by_score ? moer_token_score(token, token->x[e]) : token->x[e];
        if (router->selection_bias != 0) order = MOER_ADD(order, moer_load_value(moer_host(router->selection_bias), e, MOE_ROUTE_F32));
        token->key[e] = moer_order_key(order);
    }
    if (drops) moer_token_drop_groups(token);
    memset(given, 0, sizeof given);
    for (j = 0; j < router->top_k; j++) {
        uint32_t best = 0;
        for (e = 1; e < router->num_experts; e++)
            if (token->key[e] > token->key[best]) best = e;
        token->id[j] = best;
        token->counts[j] = token->key[best] > (drops && router->dropped == MOE_ROUTE_DROPPED_ZERO_SCORE ? MOER_ZERO_KEY : MOER_LOWEST_KEY);
        if (router->score == MOE_ROUTE_SCORE_SPARSE_MIXER) token->weight[j] = moer_token_mixer_weight(token, token->x[best]);
        token->key[best] = 0;
        if (router->group_rule == MOE_ROUTE_GROUPS_QUOTA) { /* a group that has given its share is out */
            const uint32_t size = router->num_experts / router->num_groups, g = best / size;
            if (++given[g] == router->top_k / router->num_groups)
                for (e = g * size; e < (g + 1) * size; e++) token->key[e] = 0;
        }
    }
}

/* Ids from the caller, or from the table. */
static void moer_token_take_ids(moer_token *token, const moer_routing *routing, uint32_t t) {
    const moer_router *router = token->router;
    size_t row = t;
    int known = 1;
    uint32_t j;
    if (router->ids == MOE_ROUTE_IDS_TABLE) {
        row = ((const uint32_t *)moer_host(routing->token_ids))[t];
        known = row < router->id_table_rows;
    }
    for (j = 0; j < router->top_k; j++) {
        const uint32_t *ids = (const uint32_t *)moer_host(router->ids == MOE_ROUTE_IDS_TABLE ? router->id_table : routing->ids);
        token->id[j] = known ? ids[row * router->top_k + j] : 0xffffffffu;
        token->counts[j] = token->id[j] < router->num_experts;
    }
}

static void moer_token_weigh(moer_token *token) {
    const moer_router *router = token->router;
    const uint32_t top_k = router->top_k, slots = top_k + router->num_shared_experts;
    float x[MOER_MAX_TOP_K + MOER_MAX_SHARED], part[32], sum;
    const float largest_weight = router->weights_dtype == MOE_ROUTE_F32 ? MOER_LARGEST_F32 : router->weights_dtype == MOE_ROUTE_F16 ? MOER_LARGEST_F16 : MOER_LARGEST_BF16;
    float *weight = token->weight;
    uint32_t j;
    for (j = top_k; j < slots; j++) token->counts[j] = 1;
    for (j = 0; j < slots; j++) x[j] = !token->counts[j] ? 0.0f : token->x[j < top_k ? token->id[j] : router->num_experts + j - top_k];

    if (router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE)
        for (j = 0; j < slots; j++) x[j] = moer_log_sigmoid(x[j]);
    if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED || router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE) {
        float top = moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS);
        for (j = 0; j < slots; j++)
            if (token->counts[j] && x[j] > top) top = x[j];
        memset(part, 0, sizeof part);
        for (j = 0; j < slots; j++) {
            weight[j] = token->counts[j] ? moer_softmax_term(x[j], top) : 0.0f;
            part[j % 32] = j < 32 ? weight[j] : MOER_ADD(part[j % 32], weight[j]);
        }
        sum = moer_butterfly_sum(part);
        for (j = 0; j < slots; j++) weight[j] = moer_share(weight[j], sum);
    } else {
        for (j = 0; j < slots; j++) {
            if (!token->counts[j]) weight[j] = 0.0f;
            else if (router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SELECTED) weight[j] = moer_sigmoid(x[j]);
            else if (router->score != MOE_ROUTE_SCORE_SPARSE_MIXER) weight[j] = moer_score_weight(moer_token_score(token, x[j]));
        }
    }
    if (router->renormalize != MOE_ROUTE_RENORMALIZE_NONE) {
        const int squares = router->renormalize == MOE_ROUTE_RENORMALIZE_L2;
        memset(part, 0, sizeof part);
        for (j = 0; j < slots; j++) {
            if (squares) part[j % 32] = MOER_FMA(weight[j], weight[j], part[j % 32]);
            else part[j % 32] = j < 32 ? weight[j] : MOER_ADD(part[j % 32], weight[j]);
        }
        sum = moer_butterfly_sum(part);
        if (squares) sum = MOER_SQRT(sum);
        if (router->renormalize == MOE_ROUTE_RENORMALIZE_MAX_SUM) sum = sum > router->renormalize_epsilon ? sum : router->renormalize_epsilon;
        else sum = MOER_ADD(sum, router->renormalize_epsilon);
        for (j = 0; j < slots; j++) weight[j] = moer_share(weight[j], sum);
    }
    for (j = 0; j < slots; j++) {
        float w = MOER_MUL(weight[j], router->scale);
        const int selected = j < top_k && token->counts[j];
        if (selected && router->expert_scale != 0) w = MOER_MUL(w, moer_load_value(moer_host(router->expert_scale), token->id[j], MOE_ROUTE_F32));
        if (router->divide_by_top_k) w = MOER_DIV(w, (float)top_k);
        weight[j] = selected && token->id[j] >= router->num_experts - router->num_skip_experts ? 0.0f : moer_bounded(w, largest_weight);
    }
}

static void moer_cpu_topk(const moer_router *router, const moer_routing *routing, uint32_t num_tokens, uint32_t num_valid) {
    const uint32_t top_k = router->top_k, num_shared = router->num_shared_experts;
    int32_t *ids = (int32_t *)moer_host(routing->ids);
    moer_token token;
    uint32_t t, j;
    token.router = router;
    for (t = 0; t < num_tokens; t++) {
        const int valid = t < num_valid;
        if (valid) {
            moer_token_load(&token, moer_host(routing->logits), t);
            moer_token_sum(&token);
            if (router->ids == MOE_ROUTE_IDS_SELECTED) moer_token_select(&token);
            else moer_token_take_ids(&token, routing, t);
            moer_token_weigh(&token);
        }
        for (j = 0; j < top_k; j++) {
            if (router->ids != MOE_ROUTE_IDS_GIVEN) ids[(size_t)t * top_k + j] = valid && token.id[j] < router->num_experts ? (int32_t)token.id[j] : -1;
            if (routing->weights != 0) moer_store_value(moer_host(routing->weights), (size_t)t * top_k + j, router->weights_dtype, valid ? token.weight[j] : 0.0f);
        }
        for (j = 0; j < num_shared && routing->shared_weights != 0; j++)
            moer_store_value(moer_host(routing->shared_weights), (size_t)t * num_shared + j, router->weights_dtype, valid ? token.weight[top_k + j] : 0.0f);
    }
}
