/*
  select.h: the router: a warp chooses the k best experts of a token by its logits [E + S], and then one warp or another computes their
  weights and those of the S shared experts. The formula is in moe_route.h, above moe_route_router. The maps don't belong here.

  Constants: E, K, LOGITS and WEIGHTS (dtypes), SCORE, BIAS (selection bias given), WEIGHT, RENORMALIZE, and those below
  where they aren't 0; values as in moe_route.h.

  Each lane holds the experts lane, lane + 32, ... as order-preserving integers. All orders are by key, then by ascending id:
  the one that moe_route.h defines, ties included.

  Three to 16 experts are chosen by counting. Of the largest keys of 16 (or 32) groups of lanes, the K-th is a bound that at least K
  experts reach, and few more: 11 for K 8, 15 for K 10. Those go to shared memory; a lane then counts how many come before its own,
  which is its slot. Every step is a count over what all lanes read together, so that nothing waits for the slot before.
  Where more than 32 experts reach the bound (many equal ones), and for other numbers of slots, k rounds take the largest one by one,
  by two redux each.

  Floating-point sums run over the lane's own experts in ascending order, then over the lanes by an xor butterfly: an order
  that the CPU backend repeats, so that both agree to the last bit.
*/
#ifndef SHARED_EXPERTS
#define SHARED_EXPERTS 0 /* S */
#endif
#ifndef SKIP_EXPERTS
#define SKIP_EXPERTS 0
#endif
#ifndef LOGIT_BIAS
#define LOGIT_BIAS 0 /* given */
#endif
#ifndef SOFTCAP
#define SOFTCAP 0 /* given */
#endif
#ifndef GROUP_RULE
#define GROUP_RULE 0
#define GROUPS 1
#define TOPK_GROUPS 1
#define DROPPED 0
#endif
#ifndef IDS
#define IDS 0
#endif
#ifndef EXPERT_SCALE
#define EXPERT_SCALE 0 /* given */
#endif
#ifndef DIVIDE_BY_K
#define DIVIDE_BY_K 0
#endif

#define EXPERTS_PER_LANE ((E + 31) / 32)
#define SLOTS (K + SHARED_EXPERTS) /* slots 0 to K - 1 hold selected experts, the rest shared ones */
#define SLOTS_PER_LANE ((SLOTS + 31) / 32)
#define GROUP_SIZE (E / GROUPS)
#define GROUPS_PER_LANE ((GROUPS + 31) / 32)

#define SOFTMAX_SCORE (SCORE == 0)
#define SPARSE_MIXER (SCORE == 4)
#define DROPS_GROUPS (GROUP_RULE == 1 || GROUP_RULE == 2)
/* Experts are ordered by their scores; otherwise by their logits. */
#define ORDER_BY_SCORE (BIAS || DROPS_GROUPS || SCORE == 5)
#define NEEDS_SCORE_SCALE (SOFTMAX_SCORE && ((IDS == 0 && ORDER_BY_SCORE) || WEIGHT == 0))

/* Not by counting: for more slots; for so few that rounds are shorter, as measured on an H200; where a round depends on the one before. */
#define IN_ROUNDS (K > 16 || SLOTS > 32 || K <= 2 || (K <= 4 && E <= 128) || SPARSE_MIXER || GROUP_RULE == 3)
/* Groups of lanes whose largest keys give the bound. */
#define BOUND_GROUPS (K <= 10 ? 16 : 32)
/* Candidates that a lane looks at together: usually all. */
#define RANKED_TOGETHER (EXPERTS_PER_LANE == 1 ? 32 : K <= 4 || E > 512 ? 8 : 16)
/* Chosen experts are left in shared memory, so that the weights of several tokens are one warp's work, SLOT_LANES lanes each. */
#define LEFT (IDS == 0 && K <= 16 && SLOTS <= 32 && !SPARSE_MIXER)
#define SLOT_LANES (!LEFT || SLOTS > 16 ? 32 : SLOTS > 8 ? 16 : SLOTS > 4 ? 8 : SLOTS > 2 ? 4 : SLOTS)
#define TOKENS_A_WARP (32 / SLOT_LANES)

/* Words of shared memory for a token: largest keys; candidates, two words each; slots, likewise; what the softmax needs to know. */
#define CANDIDATES_AT 32u
#define SLOTS_AT (IN_ROUNDS ? 0u : CANDIDATES_AT + 64)
#define SCALE_AT (SLOTS_AT + 32)
#define SELECT_WORDS (LEFT ? SCALE_AT + 4 : 4)

/* Where the order isn't that of logits, scores take more than all the rest; other warps may compute them ahead, 32 experts at a time,
   and the scores of groups of 32 with them. The words of a token are then its keys, which make room for those above, and its groups'. */
#ifdef LOCAL_EXPERTS
#define AHEAD (ORDER_BY_SCORE && !SOFTMAX_SCORE && IDS == 0 && E <= 384 && LOCAL_EXPERTS <= 512) /* with room for route.cu's maps */
#else
#define AHEAD 0 /* topk.cu has enough tokens for every warp */
#endif
#define GROUPS_AHEAD (AHEAD && DROPS_GROUPS && GROUP_SIZE == 32)
#define GROUPS_AT (EXPERTS_PER_LANE * 32 > SELECT_WORDS ? EXPERTS_PER_LANE * 32 : SELECT_WORDS)
#define TOKEN_WORDS (AHEAD ? GROUPS_AT + 16 : SELECT_WORDS)

/* What the softmax of one expert needs to know of all of them. */
struct score_scale {
    float largest, sum;
};

/* Chosen experts. Slot j of the token is slot j / 32 of lane j % 32; but after counting lanes have experts of any slot, or none:
   K or more. */
struct selection {
    u32 slot[SLOTS_PER_LANE];
    u32 id[SLOTS_PER_LANE];  /* out of range where a given id is */
    u32 key[SLOTS_PER_LANE]; /* by which it was selected */
    float mixer_weight[SLOTS_PER_LANE];
    score_scale scale;
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

#define LARGEST_WEIGHT (WEIGHTS == 1 ? MOER_LARGEST_F32 : WEIGHTS == 2 ? MOER_LARGEST_F16 : MOER_LARGEST_BF16)

DEVICE void store_weight(void *weights, u64 index, float weight) {
#if WEIGHTS == 1
    ((float *)weights)[index] = weight;
#elif WEIGHTS == 2
    ((u16 *)weights)[index] = f32_to_f16(weight);
#else
    ((u16 *)weights)[index] = f32_to_bf16(weight);
#endif
}

/* l[e] as an order key, from what was loaded; NaN is -inf. */
DEVICE u32 loaded_key(const moer_route_args &a, u32 e, float logit) {
#if LOGIT_BIAS
    logit = f32_add(logit, a.logit_bias[e]);
#endif
#if SOFTCAP
    logit = moer_softcap(moer_key_value(moer_order_key(logit)), a.softcap);
#endif
    return moer_order_key(logit);
}
DEVICE u32 logit_key(const moer_route_args &a, u64 row, u32 e) { return loaded_key(a, e, load_logit(a.logits, row + e)); }

DEVICE float warp_sum(float value) {
#pragma unroll
    for (u32 mask = 16; mask; mask >>= 1) value = f32_add(value, f32_from_bits(warp_shuffle_xor(f32_bits(value), mask)));
    return value;
}

/* The sum over the slots of a token, and the largest of its keys, where lanes without a slot have 0. */
DEVICE float slots_sum(float value) {
#pragma unroll
    for (u32 mask = 16; mask; mask >>= 1)
        if (mask < SLOTS) value = f32_add(value, f32_from_bits(warp_shuffle_xor(f32_bits(value), mask)));
    return value;
}
DEVICE u32 slots_max(u32 key) {
#pragma unroll
    for (u32 mask = 16; mask && SLOT_LANES < 32; mask >>= 1)
        if (mask < SLOT_LANES) {
            const u32 other = warp_shuffle_xor(key, mask);
            key = other > key ? other : key;
        }
    return SLOT_LANES < 32 ? key : warp_max(key);
}

/* The lowest id that has the warp's largest key; id i * 32 + lane is key i of a lane. */
template <u32 N>
DEVICE u32 find_best(const u32 (&key)[N], u32 &best) {
    best = key[0];
#pragma unroll
    for (u32 i = 1; i < N; i++) best = key[i] > best ? key[i] : best;
    best = warp_max(best);
    if constexpr (N == 1) { /* the lowest lane */
        const u32 owners = warp_ballot(key[0] == best);
        return popcount(~owners & (owners - 1));
    } else {
        u32 id = 0xffffffffu;
#pragma unroll
        for (u32 i = N; i-- > 0;)
            if (key[i] == best) id = i * 32 + lane_index();
        return warp_min(id);
    }
}

DEVICE float score_of(float x, const score_scale &s) {
#if SCORE == 0
    return moer_share(moer_softmax_term(x, s.largest), s.sum);
#elif SCORE == 1
    return moer_sigmoid(x);
#elif SCORE == 2
    return moer_sqrt_softplus(x);
#elif SCORE == 5
    return moer_key_value(moer_order_key((float)(SCORE_EXPRESSION)));
#else
    return x;
#endif
}

#if DROPS_GROUPS
/* The score of a group, as an order key, from the best two keys that each lane has of it. */
DEVICE u32 group_score(u32 best, u32 second) {
    const u32 largest = warp_max(best);
    if (GROUP_RULE != 2) return largest;
    const u32 owners = warp_ballot(best == largest), lowest_owner = owners & (0u - owners);
    const u32 rest = warp_max((1u << lane_index()) == lowest_owner ? second : best); /* without one of the best */
    return moer_order_key(f32_add(moer_key_value(largest), moer_key_value(rest)));
}

/* The scores of all groups, as order keys: that of group s * 32 + lane; 0: no group. */
DEVICE void score_groups(const u32 (&key)[EXPERTS_PER_LANE], u32 (&group_key)[GROUPS_PER_LANE]) {
    const u32 lane = lane_index();
#pragma unroll
    for (u32 s = 0; s < GROUPS_PER_LANE; s++) group_key[s] = 0;
#if GROUP_SIZE % 32 == 0 /* a group is a few of every lane's keys, the same ones: nothing waits */
#pragma unroll
#else
#pragma unroll 1
#endif
    for (u32 g = 0; g < GROUPS; g++) {
        u32 best = 0, second = 0;
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
            if (GROUP_SIZE % 32 == 0 && i / (GROUP_SIZE / 32 ? GROUP_SIZE / 32 : 1) != g) continue;
            const u32 k = GROUP_SIZE % 32 == 0 || (i * 32 + lane < E && (i * 32 + lane) / GROUP_SIZE == g) ? key[i] : 0;
            second = k > best ? best : k > second ? k : second;
            best = k > best ? k : best;
        }
        const u32 score = group_score(best, second);
#pragma unroll
        for (u32 s = 0; s < GROUPS_PER_LANE; s++)
            if (s * 32 + lane == g) group_key[s] = score;
    }
}

/* Marks the experts of groups that are dropped, in keys that order all experts. */
DEVICE void drop_groups(u32 (&key)[EXPERTS_PER_LANE], u32 (&group_key)[GROUPS_PER_LANE]) {
    const u32 lane = lane_index();
    u32 kept[GROUPS_PER_LANE]; /* bit masks of the groups that stay */
#pragma unroll
    for (u32 s = 0; s < GROUPS_PER_LANE; s++) kept[s] = 0;
#if GROUPS <= 16 /* a lane counts the groups that come before its own */
    u32 before = 0;
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        const u32 other = warp_shuffle(group_key[0], g);
        before += other > group_key[0] || (other == group_key[0] && g < lane);
    }
    kept[0] = warp_ballot(lane < GROUPS && before < TOPK_GROUPS);
#else
#pragma unroll 1
    for (u32 j = 0; j < TOPK_GROUPS; j++) {
        u32 best;
        const u32 id = find_best(group_key, best);
#pragma unroll
        for (u32 s = 0; s < GROUPS_PER_LANE; s++) {
            if (s * 32 + lane == id) group_key[s] = 0;
            if (s == id / 32) kept[s] |= 1u << (id & 31);
        }
    }
#endif
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
        const u32 e = i * 32 + lane, g = e / GROUP_SIZE;
        u32 word = 0;
#pragma unroll
        for (u32 s = 0; s < GROUPS_PER_LANE; s++)
            if (s == g / 32) word = kept[s];
        if (e < E && !(word >> (g & 31) & 1u)) key[i] = DROPPED ? MOER_ZERO_KEY : MOER_LOWEST_KEY;
    }
}
#endif

#if IDS == 0 && !IN_ROUNDS
/* Chooses by counting, `at` being where the warp's words begin. An expert that is chosen is in some lane then, with its slot. False
   where too many experts reach the bound. */
template <class Words>
DEVICE bool choose_by_counting(Words &words, u32 at, const u32 (&key)[EXPERTS_PER_LANE], selection &chosen) {
    const u32 lane = lane_index();
    u32x2 own = {{~lane, key[0]}}; /* as one number, the larger comes first */
#if EXPERTS_PER_LANE == 1
    const bool more = false;
    shared_store_2(words, at + CANDIDATES_AT + lane * 2, own);
    warp_barrier();
#else
    u32 largest = key[0], before[2] = {0, 0};
#pragma unroll
    for (u32 i = 1; i < EXPERTS_PER_LANE; i++) largest = key[i] > largest ? key[i] : largest;
    if (BOUND_GROUPS == 16) {
        const u32 other = warp_shuffle_xor(largest, 16);
        largest = other > largest ? other : largest;
    }
    own.v[0] = own.v[1] = 0; /* what comes after all candidates, where there are no more */
    shared_store_2(words, at + CANDIDATES_AT + lane * 2, own);
    if (lane < BOUND_GROUPS) words[at + lane] = largest;
    warp_barrier();
#pragma unroll
    for (u32 i = 0; i < BOUND_GROUPS; i += 4) {
        const auto other = shared_load_4(words, at + i);
        before[0] = count_above(before[0], (u32)other.x, ~largest);
        before[1] = count_above(before[1], (u32)other.y, ~largest);
        before[0] = count_above(before[0], (u32)other.z, ~largest);
        before[1] = count_above(before[1], (u32)other.w, ~largest);
    }
    const u32 bound = warp_min(before[0] + before[1] < K ? largest : 0xffffffffu), not_less = ~(bound - 1);

    u32 counts[2] = {0, 0}, position = 0;
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) counts[i % 2] = count_above(counts[i % 2], key[i], not_less);
    const u32 count = counts[0] + counts[1];
#pragma unroll
    for (u32 bit = 0; EXPERTS_PER_LANE >> bit; bit++) position += popcount(warp_ballot(count >> bit & 1) & ((1u << lane) - 1)) << bit;
    const bool more = warp_ballot(position + count > RANKED_TOGETHER);
    if (warp_ballot(position + count > 32)) return false;
    u32 to = at + CANDIDATES_AT + position * 2;
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
        if (key[i] >= bound) {
            const u32x2 candidate = {{~(i * 32 + lane), key[i]}};
            shared_store_2(words, to, candidate);
            to += 2;
        }
    warp_barrier();
    const auto candidate = shared_load_2(words, at + CANDIDATES_AT + lane * 2);
    own.v[0] = (u32)candidate.x;
    own.v[1] = (u32)candidate.y;
#endif
    u32 slots[2] = {0, 0};
#pragma unroll 1
    for (u32 first = 0; first == 0 || (more && first < 32); first += RANKED_TOGETHER)
#pragma unroll
        for (u32 i = 0; i < RANKED_TOGETHER; i += 2) {
            const auto two = shared_load_4(words, at + CANDIDATES_AT + (first + i) * 2);
            slots[0] = count_above_2(slots[0], (u32)two.y, (u32)two.x, ~own.v[1], ~own.v[0]);
            slots[1] = count_above_2(slots[1], (u32)two.w, (u32)two.z, ~own.v[1], ~own.v[0]);
        }
    chosen.id[0] = ~own.v[0];
    chosen.key[0] = own.v[1];
    chosen.slot[0] = own.v[1] ? slots[0] + slots[1] : K;
    return true;
}
#endif

/* Chooses in k rounds. */
DEVICE void choose_in_rounds(const moer_route_args &a, u32 (&key)[EXPERTS_PER_LANE], selection &chosen) {
    const u32 lane = lane_index();
#pragma unroll 1
    for (u32 j = 0; j < K; j++) {
        u32 best;
        const u32 id = find_best(key, best);
#if SPARSE_MIXER
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
            if (key[i]) sum = f32_add(sum, moer_sparse_mixer_term(moer_key_value(key[i]), moer_key_value(best), f32_mul(2.0f, a.jitter)));
        sum = warp_sum(sum);
#endif
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
            if (i * 32 + lane == id) key[i] = 0;
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++)
            if (s * 32 + lane == j) {
                chosen.id[s] = id;
                chosen.key[s] = best;
#if SPARSE_MIXER
                chosen.mixer_weight[s] = moer_share(1.0f, sum);
#endif
            }
#if GROUP_RULE == 3 /* a group that has given its share is out */
        u32 given = 0;
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) given += popcount(warp_ballot(s * 32 + lane <= j && chosen.id[s] / GROUP_SIZE == id / GROUP_SIZE));
        if (given == K / GROUPS) {
#pragma unroll
            for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
                if ((i * 32 + lane) / GROUP_SIZE == id / GROUP_SIZE) key[i] = 0;
        }
#endif
    }
}

#if ORDER_BY_SCORE
/* The key that orders an expert, from the key of its logit and its selection bias. */
DEVICE u32 score_key(u32 logit, float bias, const score_scale &scale) {
    const float order = score_of(moer_key_value(logit), scale);
    return moer_order_key(BIAS ? f32_add(order, bias) : order);
}
DEVICE float selection_bias(const moer_route_args &a, u32 e) { return BIAS ? a.selection_bias[e] : 0.0f; }
#endif

#if AHEAD
/* The scores of so many 32 experts of tokens from `first_token` on, by all `warps` of the block, into the tokens' words. A warp loads
   a few turns' logits together, since each has to come from L2; then takes one after the other, which keeps the code short. */
#define TURNS 6
template <class Words>
DEVICE void score_ahead(const moer_route_args &a, u32 first_token, u32 units, u32 warps, Words &words) {
    const score_scale none = {0.0f, 1.0f};
    const u32 lane = lane_index();
#pragma unroll 1
    for (u32 first = warp_index(); first < units; first += warps * TURNS) {
        float logit[TURNS], bias[TURNS];
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 here = first + i * warps, u = here < units ? here : first, e = u % EXPERTS_PER_LANE * 32 + lane;
            logit[i] = e < E ? load_logit(a.logits, (u64)(first_token + u / EXPERTS_PER_LANE) * (E + SHARED_EXPERTS) + e) : 0.0f;
            bias[i] = e < E ? selection_bias(a, e) : 0.0f;
        }
#pragma unroll 1
        for (u32 u = first, turn = 0; turn < TURNS && u < units; turn++, u += warps) {
            const u32 unit = u % EXPERTS_PER_LANE, e = unit * 32 + lane, at = u / EXPERTS_PER_LANE * TOKEN_WORDS;
            const u32 key = e < E ? score_key(loaded_key(a, e, logit[0]), bias[0], none) : 0;
            words[at + e] = key;
#if GROUPS_AHEAD
            const u32 group = group_score(key, 0);
            if (lane == 0) words[at + GROUPS_AT + unit] = group;
#endif
#pragma unroll
            for (u32 i = 0; i + 1 < TURNS; i++) {
                logit[i] = logit[i + 1];
                bias[i] = bias[i + 1];
            }
        }
    }
}
#endif

/* A token's logits as keys, of a token that may be padding, so that nobody waits for the number of tokens first. */
DEVICE void load_keys(const moer_route_args &a, u32 token, u32 (&key)[EXPERTS_PER_LANE]) {
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {
        const u32 e = i * 32 + lane_index();
        key[i] = (IDS == 0 || NEEDS_SCORE_SCALE) && e < E ? logit_key(a, (u64)token * (E + SHARED_EXPERTS), e) : 0; /* 0: no expert */
    }
}

/* The experts of a token, and what their weights need, which is left in the token's words where LEFT says so; `at` is where they begin.
   With SCORED the keys are there already, from score_ahead, and TOKEN_WORDS are needed; otherwise `key` is what load_keys gave, and
   SELECT_WORDS are enough. */
template <bool SCORED, class Words>
DEVICE selection choose_experts(const moer_route_args &a, u32 token, u32 (&key)[EXPERTS_PER_LANE], Words &words, u32 at) {
    const u32 lane = lane_index();
    selection chosen;
    chosen.scale = {0.0f, 1.0f};
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        chosen.slot[s] = s * 32 + lane;
        chosen.id[s] = chosen.key[s] = 0;
        chosen.mixer_weight[s] = 0.0f;
    }

    if (SCORED)
#pragma unroll
        for (u32 i = 0; i < EXPERTS_PER_LANE; i++) key[i] = words[at + i * 32 + lane];
#if NEEDS_SCORE_SCALE
    u32 largest = 0;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) largest = key[i] > largest ? key[i] : largest;
    chosen.scale.largest = moer_key_value(warp_max(largest));
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
        if (key[i]) sum = f32_add(sum, moer_softmax_term(moer_key_value(key[i]), chosen.scale.largest));
    chosen.scale.sum = warp_sum(sum);
#endif

#if IDS == 0
#if ORDER_BY_SCORE
#pragma unroll
    for (u32 i = 0; i < EXPERTS_PER_LANE; i++)
        if (!SCORED && i * 32 + lane < E) key[i] = score_key(key[i], selection_bias(a, i * 32 + lane), chosen.scale);
#endif
#if DROPS_GROUPS
    u32 group_key[GROUPS_PER_LANE];
    if (SCORED && GROUPS_AHEAD) group_key[0] = lane < GROUPS ? words[at + GROUPS_AT + lane] : 0;
    else score_groups(key, group_key);
    drop_groups(key, group_key);
#endif
    if (SCORED) warp_barrier(); /* the keys are read, their words free */
#if IN_ROUNDS
    choose_in_rounds(a, key, chosen);
#else
    if (!choose_by_counting(words, at, key, chosen)) choose_in_rounds(a, key, chosen);
#endif
#if LEFT
    const u32x2 expert = {{chosen.id[0], chosen.key[0]}};
    if (chosen.slot[0] < K) shared_store_2(words, at + SLOTS_AT + chosen.slot[0] * 2, expert);
    if (NEEDS_SCORE_SCALE && lane == 0) {
        words[at + SCALE_AT] = f32_bits(chosen.scale.largest);
        words[at + SCALE_AT + 1] = f32_bits(chosen.scale.sum);
    }
#endif
#else
#if IDS == 1
    const bool known = true;
    const u64 ids_row = token;
#else
    const u64 ids_row = (u32)a.token_ids[token];
    const bool known = ids_row < a.id_table_rows;
#endif
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++)
        if (s * 32 + lane < K) chosen.id[s] = known ? (u32)(IDS == 1 ? a.ids : a.id_table)[ids_row * K + s * 32 + lane] : 0xffffffffu;
#endif
    return chosen;
}

/* The weights of the slots of tokens, those of shared experts after the others; of a `valid` token. */
DEVICE void weigh_experts(const moer_route_args &a, u32 token, bool valid, const selection &chosen, float (&weight)[SLOTS_PER_LANE]) {
    const u32 lane = lane_index(), first_slot = lane % SLOT_LANES;
    const u64 row = (u64)token * (E + SHARED_EXPERTS);
    /* Lanes without a slot, slots that hold an expert nobody could select, and given ids out of range count 0. */
    float x[SLOTS_PER_LANE];
    bool counts[SLOTS_PER_LANE];
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        const u32 slot = s * 32 + first_slot;
        const bool selectable = IDS == 0 ? chosen.key[s] > (DROPPED == 2 ? MOER_ZERO_KEY : MOER_LOWEST_KEY) : chosen.id[s] < E;
        counts[s] = valid && slot < SLOTS && (slot >= K || selectable);
        if (IDS == 0 && !ORDER_BY_SCORE && slot < K) x[s] = counts[s] ? moer_key_value(chosen.key[s]) : 0.0f;
        else x[s] = counts[s] ? moer_key_value(logit_key(a, row, slot < K ? chosen.id[s] : E + slot - K)) : 0.0f;
    }
    if (WEIGHT == 1 || WEIGHT == 3) {
        float top, sum = 0.0f;
        if (WEIGHT == 1 && IDS == 0 && !ORDER_BY_SCORE && !SHARED_EXPERTS) { /* the first slot's, if it counts; otherwise none does */
            top = f32_from_bits(warp_shuffle(f32_bits(x[0]), lane - first_slot));
        } else {
            u32 largest = 0;
            if (WEIGHT == 3)
#pragma unroll
                for (u32 s = 0; s < SLOTS_PER_LANE; s++) x[s] = moer_log_sigmoid(x[s]);
#pragma unroll
            for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
                const u32 k = counts[s] ? moer_order_key(x[s]) : 0;
                largest = k > largest ? k : largest;
            }
            top = moer_key_value(slots_max(largest));
        }
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
            const float term = moer_softmax_term(x[s], top);
            weight[s] = counts[s] ? term : 0.0f;
            sum = s == 0 ? weight[s] : f32_add(sum, weight[s]);
        }
        sum = slots_sum(sum);
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) weight[s] = moer_share(weight[s], sum);
    } else {
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
            if (SPARSE_MIXER && WEIGHT == 0) weight[s] = counts[s] ? chosen.mixer_weight[s] : 0.0f;
            else weight[s] = !counts[s] ? 0.0f : WEIGHT == 2 ? moer_sigmoid(x[s]) : moer_score_weight(score_of(x[s], chosen.scale));
        }
    }
    if (RENORMALIZE) {
        float sum = 0.0f;
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
            const float w = weight[s];
            if (RENORMALIZE == 3) sum = f32_fma(w, w, sum);
            else sum = s == 0 ? w : f32_add(sum, w);
        }
        sum = slots_sum(sum);
        if (RENORMALIZE == 3) sum = f32_sqrt(sum);
        if (RENORMALIZE == 2) sum = sum > a.renormalize_epsilon ? sum : a.renormalize_epsilon;
        else sum = f32_add(sum, a.renormalize_epsilon);
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++) weight[s] = moer_share(weight[s], sum);
    }
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        float w = f32_mul(weight[s], a.scale);
        const bool selected = counts[s] && s * 32 + first_slot < K;
#if EXPERT_SCALE
        if (selected) w = f32_mul(w, a.expert_scale[chosen.id[s]]);
#endif
        if (DIVIDE_BY_K) w = f32_div(w, (float)K);
        weight[s] = SKIP_EXPERTS && selected && chosen.id[s] >= E - SKIP_EXPERTS ? 0.0f : moer_bounded(w, LARGEST_WEIGHT);
    }
}

/* Writes ids and weights of `num_tokens` tokens from `first_token` on, in the lanes of a warp; those of padding from `num_valid` on.
   `at` is where the words of the first begin, `words_a_token` where those of the next do; or, where chosen experts aren't left there, it is
   one token, and `chosen` its experts. */
template <class Words>
DEVICE void write_tokens(const moer_route_args &a, u32 first_token, u32 num_tokens, int num_valid, Words &words, u32 at, u32 words_a_token,
                         selection chosen) {
    const u32 lane = lane_index(), here = lane / SLOT_LANES, token = first_token + here, first_slot = lane % SLOT_LANES;
    const bool exists = here < num_tokens, valid = exists && (int)token < num_valid;
    float weight[SLOTS_PER_LANE];
#if LEFT
    chosen.id[0] = chosen.key[0] = 0;
    if (valid && first_slot < K) {
        const auto expert = shared_load_2(words, at + here * words_a_token + SLOTS_AT + first_slot * 2);
        chosen.id[0] = (u32)expert.x;
        chosen.key[0] = (u32)expert.y;
    }
    if (NEEDS_SCORE_SCALE && valid) {
        chosen.scale.largest = f32_from_bits(words[at + here * words_a_token + SCALE_AT]);
        chosen.scale.sum = f32_from_bits(words[at + here * words_a_token + SCALE_AT + 1]);
    }
#endif
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        const u32 slot = s * 32 + first_slot;
        if (IDS != 1 && exists && slot < K) a.ids[(u64)token * K + slot] = valid && (IDS == 0 || chosen.id[s] < E) ? (int)chosen.id[s] : -1;
    }
    weigh_experts(a, token, valid, chosen, weight);
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        const u32 slot = s * 32 + first_slot;
        if (exists && slot < K) {
            if (a.weights) store_weight(a.weights, (u64)token * K + slot, weight[s]);
        }
#if SHARED_EXPERTS
        else if (exists && slot < SLOTS && a.shared_weights) store_weight(a.shared_weights, (u64)token * SHARED_EXPERTS + slot - K, weight[s]);
#endif
    }
}
