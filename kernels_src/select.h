/*
  select.h: the router of one token by one warp: logits [E] -> the k best experts and their weights.
  The maps don't belong here.

  Constants: E, K, LOGITS (dtype), SCORE, BIAS (selection bias given), WEIGHT, RENORMALIZE; values as in moe_route.h.

  Each lane holds the experts lane, lane + 32, ... as order-preserving integers. A round takes the warp's maximum, and the
  lowest expert id that has it, by two redux instructions; k rounds give the order that moe_route.h defines, ties included.
  Floating-point sums run over the lane's own experts in ascending order, then over the lanes by an xor butterfly: an order
  that the CPU backend repeats, so that both agree to the last bit.
*/
#define EXPERTS_PER_LANE ((E + 31) / 32)
#define SLOTS_PER_LANE ((K + 31) / 32)

/* Slot j of the token is slot j / 32 of lane j % 32. */
struct selection {
    u32 id[SLOTS_PER_LANE];
    float weight[SLOTS_PER_LANE];
};

DEVICE float load_logit(const void *logits, u64 index) {
#if LOGITS == 1
    return f32_from_bits(load_4((const u32 *)logits + index));
#elif LOGITS == 2
    return f16_to_f32(load_2((const u16 *)logits + index));
#else
    return bf16_to_f32(load_2((const u16 *)logits + index));
#endif
}

DEVICE float clean_logit(float logit) { return moer_key_value(moer_order_key(logit)); }

DEVICE float warp_sum(float value) {
#pragma unroll
    for (u32 mask = 16; mask; mask >>= 1) value = f32_add(value, f32_from_bits(warp_shuffle_xor(f32_bits(value), mask)));
    return value;
}

/* What the score of one expert needs to know of all of them. */
struct score_scale {
    float largest, sum;
};

DEVICE float score_of(float logit, const score_scale &s) {
    return SCORE == 0 ? moer_share(moer_softmax_term(logit, s.largest), s.sum) : moer_sigmoid(logit);
}

DEVICE selection select_experts(const moer_route_args &a, u32 token) {
    const u32 lane = lane_index();
    const u64 row = (u64)token * E;
    u32 key[EXPERTS_PER_LANE]; /* 0: no expert, or taken */
    selection result;
    u32 taken_key[SLOTS_PER_LANE];
    score_scale scale = {0.0f, 1.0f};

#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
        const u32 e = i * 32 + lane;
        key[i] = e < E ? moer_order_key(load_logit(a.logits, row + e)) : 0;
    }

    if (SCORE == 0 && (BIAS || WEIGHT == 0)) {
        u32 largest = 0;
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++) largest = key[i] > largest ? key[i] : largest;
        scale.largest = moer_key_value(warp_max(largest));
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
            if (key[i]) sum = f32_add(sum, moer_softmax_term(moer_key_value(key[i]), scale.largest));
        scale.sum = warp_sum(sum);
    }
#if BIAS
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
        const u32 e = i * 32 + lane;
        if (e < E) key[i] = moer_order_key(f32_add(score_of(moer_key_value(key[i]), scale), a.selection_bias[e]));
    }
#endif

#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) result.id[s] = taken_key[s] = 0;
#pragma unroll 1
    for (u32 j = 0; j < K; j++) {
        u32 best = key[0], id = 0xffffffffu;
#pragma unroll
        for (u32 i = 1; i < EXPERTS_PER_LANE; i++) best = key[i] > best ? key[i] : best;
        best = warp_max(best);
#pragma unroll
        for (u32 i = EXPERTS_PER_LANE; i-- > 0;)
            if (key[i] == best) id = i * 32 + lane;
        id = warp_min(id);
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
            if (i * 32 + lane == id) key[i] = 0;
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++)
            if (s * 32 + lane == j) {
                result.id[s] = id;
                taken_key[s] = best;
            }
    }

    /* Weights: one slot a lane. Lanes without a slot, and slots that hold an expert nobody could select, count 0. */
    float logit[SLOTS_PER_LANE];
    bool counts[SLOTS_PER_LANE];
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        counts[s] = s * 32 + lane < K && taken_key[s] > MOER_LOWEST_KEY;
#if BIAS
        logit[s] = counts[s] ? clean_logit(load_logit(a.logits, row + result.id[s])) : 0.0f;
#else
        logit[s] = counts[s] ? moer_key_value(taken_key[s]) : 0.0f;
#endif
    }
    if (WEIGHT == 1) {
        u32 largest = 0;
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
            const u32 k = counts[s] ? moer_order_key(logit[s]) : 0;
            largest = k > largest ? k : largest;
        }
        const float top = moer_key_value(warp_max(largest));
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) result.weight[s] = counts[s] ? moer_softmax_term(logit[s], top) : 0.0f;
    } else {
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) result.weight[s] = counts[s] ? score_of(logit[s], scale) : 0.0f;
    }
    if (WEIGHT == 1 || RENORMALIZE) {
        float sum = result.weight[0];
#pragma unroll
        for (u32 s = 1; s < SLOTS_PER_LANE; s++) sum = f32_add(sum, result.weight[s]);
        sum = warp_sum(sum);
        if (RENORMALIZE) sum = f32_add(sum, a.renormalize_epsilon);
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) result.weight[s] = moer_share(result.weight[s], sum);
    }
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) result.weight[s] = moer_finite(f32_mul(result.weight[s], a.scale));
    return result;
}
