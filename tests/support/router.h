/*
  router.h: what a router ought to give, said in f64 and in the plainest way, with the error that f32 may make; and the
  arrays a router's description refers to. Running one is routing.h's. Include moe_route.h and test.h first.
*/
#ifndef TEST_ROUTER_H
#define TEST_ROUTER_H

/* The arrays of a description, on the host; NULL where not given. */
typedef struct router_arrays {
    const float *logit_bias, *selection_bias, *expert_scale;
    const int32_t *id_table;
} router_arrays;

typedef struct routing_expectation {
    int32_t ids[MOER_MAX_TOP_K];
    double weights[MOER_MAX_TOP_K + MOER_MAX_SHARED];   /* the shared experts' follow the k */
    double tolerance[MOER_MAX_TOP_K + MOER_MAX_SHARED]; /* what f32 may be off; negative: f32 can't say */
    double gap; /* least distance between what was chosen (experts, groups) and what wasn't */
    int exact;  /* the order rests on numbers that f32 has exactly */
} routing_expectation;

/* A NaN counts as -inf. */
TEST_FUNCTION double routing_clean(float value) { return value == value ? (double)value : -HUGE_VAL; }

/* The score that tests call their own: router_custom_score on the CPU, ROUTER_CUSTOM_EXPRESSION on a GPU. */
#define ROUTER_CUSTOM_EXPRESSION "x > 0.5f ? 3.0f - x : x < -4.0f ? x * x : 0.25f * x"
TEST_FUNCTION float router_custom_score(float x, void *user) {
    (void)user;
    return x > 0.5f ? 3.0f - x : x < -4.0f ? x * x : 0.25f * x;
}

typedef struct router_token { /* one token on its way */
    double x[MOER_MAX_EXPERTS + MOER_MAX_SHARED], score[MOER_MAX_EXPERTS], order[MOER_MAX_EXPERTS];
    double largest, sum;
    unsigned char taken[MOER_MAX_EXPERTS], dropped[MOER_MAX_EXPERTS]; /* dropped: the order is exactly 0 */
} router_token;

TEST_FUNCTION double router_score(const moe_route_router *router, const router_token *token, double x) {
    switch (router->score) {
    case MOE_ROUTE_SCORE_SOFTMAX: return token->largest == -HUGE_VAL ? 0 : x == token->largest ? 1 / token->sum : x == -HUGE_VAL || token->largest == HUGE_VAL ? 0 : exp(x - token->largest) / token->sum;
    case MOE_ROUTE_SCORE_SIGMOID: return 1 / (1 + exp(-x));
    case MOE_ROUTE_SCORE_SQRT_SOFTPLUS: return sqrt((x > 0 ? x : 0) + log1p(exp(-fabs(x))));
    case MOE_ROUTE_SCORE_CUSTOM: return routing_clean(router_custom_score((float)x, NULL));
    default: return x;
    }
}

/* Index of the largest of the `count` values that isn't taken, the first of equals; `count` when all are. */
TEST_FUNCTION uint32_t router_largest(const double *values, const unsigned char *taken, uint32_t count) {
    uint32_t i, best = count;
    for (i = 0; i < count; i++)
        if (!taken[i] && (best == count || values[i] > values[best])) best = i;
    return best;
}

TEST_FUNCTION void router_expect_groups(const moe_route_router *router, router_token *token, routing_expectation *expected) {
    const uint32_t size = router->num_experts / router->num_groups;
    double score[MOER_MAX_GROUPS];
    unsigned char kept[MOER_MAX_GROUPS];
    uint32_t g, e, j;
    for (g = 0; g < router->num_groups; g++) {
        double best = -HUGE_VAL, second = -HUGE_VAL;
        for (e = g * size; e < (g + 1) * size; e++) {
            if (token->order[e] > best) {
                second = best;
                best = token->order[e];
            } else if (token->order[e] > second) {
                second = token->order[e];
            }
        }
        score[g] = router->group_rule == MOE_ROUTE_GROUPS_MAX ? best : best == -HUGE_VAL || second == -HUGE_VAL ? -HUGE_VAL : best + second;
        kept[g] = 0;
    }
    for (j = 0; j < router->topk_groups; j++) {
        const uint32_t best = router_largest(score, kept, router->num_groups);
        kept[best] = 1;
        g = router_largest(score, kept, router->num_groups);
        if (j + 1 == router->topk_groups && g < router->num_groups && score[best] - score[g] < expected->gap) expected->gap = score[best] - score[g];
    }
    for (e = 0; e < router->num_experts; e++)
        if (!kept[e / size]) {
            token->order[e] = router->dropped != MOE_ROUTE_DROPPED_MINUS_INFINITY ? 0 : -HUGE_VAL;
            token->dropped[e] = router->dropped != MOE_ROUTE_DROPPED_MINUS_INFINITY;
        }
}

/* SparseMixer's comparison is made in f32, as the formula is. */
TEST_FUNCTION int router_mixer_keeps(const moe_route_router *router, float x, float largest) {
    const float distance = (largest - x) / (fabsf(x) > largest ? fabsf(x) : largest);
    return !(distance > 2.0f * router->jitter);
}

TEST_FUNCTION void router_expect_ids(const moe_route_router *router, router_token *token, routing_expectation *expected) {
    const uint32_t num_experts = router->num_experts;
    const int drops = router->group_rule == MOE_ROUTE_GROUPS_MAX || router->group_rule == MOE_ROUTE_GROUPS_TOP2_SUM;
    uint32_t given[MOER_MAX_GROUPS], e, j;
    memset(given, 0, sizeof given);
    memset(token->taken, 0, sizeof token->taken);
    memset(token->dropped, 0, sizeof token->dropped);
    if (drops) router_expect_groups(router, token, expected);
    for (j = 0; j < router->top_k; j++) {
        const uint32_t best = router_largest(token->order, token->taken, num_experts);
        uint32_t next;
        expected->ids[j] = (int32_t)best;
        if (router->score == MOE_ROUTE_SCORE_SPARSE_MIXER) {
            double sum = 0;
            for (e = 0; e < num_experts; e++)
                if (!token->taken[e] && router_mixer_keeps(router, (float)token->x[e], (float)token->x[best])) sum += token->x[e] == token->x[best] ? 1 : exp(token->x[e] - token->x[best]);
            expected->weights[j] = sum > 0 ? 1 / sum : 0;
        }
        token->taken[best] = 1;
        if (router->group_rule == MOE_ROUTE_GROUPS_QUOTA) {
            const uint32_t size = num_experts / router->num_groups, g = best / size;
            if (++given[g] == router->top_k / router->num_groups)
                for (e = g * size; e < (g + 1) * size; e++) { /* what the quota leaves out isn't a near miss, but the group's next is */
                    if (!token->taken[e] && token->order[best] - token->order[e] < expected->gap) expected->gap = token->order[best] - token->order[e];
                    token->taken[e] = 1;
                }
            continue;
        }
        next = router_largest(token->order, token->taken, num_experts);
        if (j + 1 == router->top_k && next < num_experts && !(token->dropped[best] && token->dropped[next]) && token->order[best] - token->order[next] < expected->gap) expected->gap = token->order[best] - token->order[next];
    }
}

/* Weights from base weights, and what f32 may be off: a relative error of each base weight, an absolute one where f32 runs
   out of exponents, and both again from the sum that divides. */
TEST_FUNCTION void router_expect_weights(const moe_route_router *router, const router_arrays *arrays, routing_expectation *expected, const double *relative) {
    const uint32_t slots = router->top_k + router->num_shared_experts;
    const double lost = router->score == MOE_ROUTE_SCORE_SIGMOID || router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SELECTED ? 3e-39 : 3e-45; /* smallest base weights */
    double sum = 0, absolute = 0, sum_error = 0, divisor = 1, divisor_error = 0;
    uint32_t j;
    for (j = 0; j < slots; j++) {
        const double w = expected->weights[j];
        if (router->renormalize == MOE_ROUTE_RENORMALIZE_L2) {
            sum += w * w;
            absolute += w * w;
            sum_error += 2 * relative[j] * w * w + 2e-45;
        } else {
            sum += w;
            absolute += fabs(w);
            sum_error += relative[j] * fabs(w) + lost;
        }
    }
    if (router->renormalize != MOE_ROUTE_RENORMALIZE_NONE) {
        const double epsilon = (double)router->renormalize_epsilon;
        if (absolute > 3.4028235677973366e38) sum = HUGE_VAL; /* as in f32 */
        divisor_error = sum_error + 3e-7 * absolute;
        if (router->renormalize == MOE_ROUTE_RENORMALIZE_L2) {
            divisor = sqrt(sum) + epsilon;
            divisor_error = sum > 0 ? divisor_error / (2 * sqrt(sum)) : 0;
        } else if (router->renormalize == MOE_ROUTE_RENORMALIZE_MAX_SUM) {
            divisor = sum > epsilon ? sum : epsilon;
        } else {
            divisor = sum + epsilon;
        }
    }
    for (j = 0; j < slots; j++) {
        double factor = router->scale != 0 ? (double)router->scale : 1.0;
        const int selected = j < router->top_k, in_range = !selected || (uint32_t)expected->ids[j] < router->num_experts;
        const double base = expected->weights[j];
        if (selected && in_range && arrays->expert_scale) factor *= (double)arrays->expert_scale[expected->ids[j]];
        if (router->divide_by_top_k) factor /= router->top_k;
        if (selected && (!in_range || (uint32_t)expected->ids[j] >= router->num_experts - router->num_skip_experts)) factor = 0;
        expected->weights[j] = divisor == 0 || divisor == HUGE_VAL ? 0 : base / divisor * factor;
        expected->tolerance[j] = divisor == 0 ? 0 : fabs(factor) * ((relative[j] * fabs(base) + lost) / fabs(divisor) + fabs(base) / fabs(divisor) * (divisor_error / fabs(divisor))) + 4e-7 * fabs(expected->weights[j]) + 3e-45;
        if (divisor_error > 0.01 * fabs(divisor)) expected->tolerance[j] = -1;
        if (router->weights_dtype == MOE_ROUTE_F16) expected->tolerance[j] += fabs(expected->weights[j]) / 2000 + 4e-8;
        if (router->weights_dtype == MOE_ROUTE_BF16) expected->tolerance[j] += fabs(expected->weights[j]) / 250 + 1e-40;
        if (fabs(expected->weights[j]) > 3.3e38 || (router->weights_dtype == MOE_ROUTE_F16 && fabs(expected->weights[j]) > 65000)) expected->tolerance[j] = -1;
    }
}

/* Whether slot j holds an expert that somebody could select, or was told to. */
TEST_FUNCTION int router_counts(const moe_route_router *router, const router_token *token, const routing_expectation *expected, uint32_t j) {
    if (j >= router->top_k) return 1;
    if ((uint32_t)expected->ids[j] >= router->num_experts) return 0;
    if (router->ids != MOE_ROUTE_IDS_SELECTED) return 1;
    if (router->dropped == MOE_ROUTE_DROPPED_ZERO_SCORE && token->dropped[expected->ids[j]]) return 0;
    return token->order[expected->ids[j]] != -HUGE_VAL;
}

/* log(sigmoid(x)) where it is the base of weights, else x. */
TEST_FUNCTION double router_share_exponent(const moe_route_router *router, double x) {
    return router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE ? (x < 0 ? x : 0) - log1p(exp(-fabs(x))) : x;
}

/* The router of one token: `logits` [E + S]; `ids` [k] where they are given or come from a table. */
TEST_FUNCTION void routing_expect(const moe_route_router *router, const router_arrays *arrays, const float *logits, const int32_t *ids, routing_expectation *expected) {
    static router_token token;
    const uint32_t num_experts = router->num_experts, slots = router->top_k + router->num_shared_experts;
    const int drops = router->group_rule == MOE_ROUTE_GROUPS_MAX || router->group_rule == MOE_ROUTE_GROUPS_TOP2_SUM;
    double relative[MOER_MAX_TOP_K + MOER_MAX_SHARED], blur = 0, selected_sum = 0, top = -HUGE_VAL;
    uint32_t e, j;
    memset(expected, 0, sizeof *expected);
    expected->gap = HUGE_VAL;
    expected->exact = router->softcap == 0 && (router->ids != MOE_ROUTE_IDS_SELECTED || (!arrays->selection_bias && !drops));
    for (e = 0; e < num_experts + router->num_shared_experts; e++) {
        float logit = logits[e];
        if (arrays->logit_bias) logit += arrays->logit_bias[e];
        token.x[e] = routing_clean(logit);
        if (router->softcap != 0) token.x[e] = (double)router->softcap * tanh(token.x[e] / (double)router->softcap);
    }
    if (router->softcap != 0) blur = 4e-7 * (double)router->softcap; /* error of a capped logit */
    token.largest = token.x[router_largest(token.x, (const unsigned char *)memset(token.taken, 0, sizeof token.taken), num_experts)];
    token.sum = 0;
    for (e = 0; e < num_experts; e++)
        if (token.x[e] != -HUGE_VAL) token.sum += token.x[e] == token.largest ? 1 : token.largest == HUGE_VAL ? 0 : exp(token.x[e] - token.largest);
    for (e = 0; e < num_experts; e++) {
        token.score[e] = router_score(router, &token, token.x[e]);
        token.order[e] = arrays->selection_bias || drops || router->score == MOE_ROUTE_SCORE_CUSTOM ? token.score[e] : token.x[e];
        if (arrays->selection_bias) token.order[e] += routing_clean(arrays->selection_bias[e]);
        if (token.order[e] != token.order[e]) token.order[e] = -HUGE_VAL; /* +inf and -inf */
    }
    if (router->ids == MOE_ROUTE_IDS_SELECTED) router_expect_ids(router, &token, expected);
    else memcpy(expected->ids, ids, router->top_k * sizeof *ids);

    for (j = 0; j < slots; j++) {
        if (router_counts(router, &token, expected, j)) {
            const int selected = j < router->top_k;
            const double x = token.x[selected ? (uint32_t)expected->ids[j] : num_experts + j - router->top_k];
            if (router_share_exponent(router, x) > top) top = router_share_exponent(router, x);
        }
    }
    for (j = 0; j < slots; j++) {
        const int selected = j < router->top_k, in_range = !selected || (uint32_t)expected->ids[j] < num_experts;
        const int counts = router_counts(router, &token, expected, j);
        const double x = !in_range ? 0 : token.x[selected ? (uint32_t)expected->ids[j] : num_experts + j - router->top_k];
        double weight = expected->weights[j], distance = 0; /* of SparseMixer */
        if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED || router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE) {
            const double exponent = router_share_exponent(router, x);
            weight = exponent == top && top != -HUGE_VAL ? 1 : exponent == -HUGE_VAL || top == HUGE_VAL ? 0 : exp(exponent - top);
            distance = fabs(exponent - top) + 5 * (fabs(exponent) < 200 ? fabs(exponent) : 0) * (router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE);
        } else if (router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SELECTED) {
            weight = 1 / (1 + exp(-x));
        } else if (router->score != MOE_ROUTE_SCORE_SPARSE_MIXER) {
            weight = router_score(router, &token, x);
            distance = router->score == MOE_ROUTE_SCORE_SOFTMAX ? fabs(x - token.largest) : 0;
            if (weight == -HUGE_VAL) weight = 0;
            if (weight > 3.4028234663852886e38) weight = 3.4028234663852886e38;
        }
        expected->weights[j] = counts ? weight : 0;
        /* f32 rounds the difference of two logits before exp: an error of the weight that grows with it. */
        relative[j] = 6e-7 + blur + (distance < 200 ? 6.1e-8 * distance : 0);
    }
    if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED || router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE) {
        for (j = 0; j < slots; j++) selected_sum += expected->weights[j];
        for (j = 0; j < slots; j++) expected->weights[j] = selected_sum > 0 ? expected->weights[j] / selected_sum : 0;
    }
    router_expect_weights(router, arrays, expected, relative);
}

#endif /* TEST_ROUTER_H */
