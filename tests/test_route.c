/*
  test_route.c: the router: every choice against an f64 statement of its definition, every size, inputs at the edge of f32,
  and on a GPU the CPU backend to the last bit. Routers of real models are in test_presets.c.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "support/cases.h"

static test_device device, cpu;
static int small_size;

/* ---- a router on a device ---- */

typedef struct router_fixture { /* one description, on the device and on the CPU */
    moe_route_router router;    /* without addresses */
    router_arrays arrays;
    float *logit_bias, *selection_bias, *expert_scale;
    int32_t *id_table;
    device_buffer buffers[2][4];
    moe_route_layer *layers[2]; /* [0] on the device; [1] on the CPU where that is another one, else NULL */
} router_fixture;

static moe_route_layer *create_router(test_device *on, const router_fixture *f, uint32_t max_tokens, device_buffer buffers[4]) {
    const uint32_t num_experts = f->router.num_experts;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    memset(&desc, 0, sizeof desc);
    desc.router = f->router;
    desc.max_tokens = max_tokens;
    if (f->arrays.logit_bias) desc.router.logit_bias = (buffers[0] = device_create_from(on, f->arrays.logit_bias, (num_experts + f->router.num_shared_experts) * sizeof(float))).address;
    if (f->arrays.selection_bias) desc.router.selection_bias = (buffers[1] = device_create_from(on, f->arrays.selection_bias, num_experts * sizeof(float))).address;
    if (f->arrays.expert_scale) desc.router.expert_scale = (buffers[2] = device_create_from(on, f->arrays.expert_scale, num_experts * sizeof(float))).address;
    if (f->arrays.id_table) desc.router.id_table = (buffers[3] = device_create_from(on, f->arrays.id_table, (size_t)f->router.id_table_rows * f->router.top_k * sizeof(int32_t))).address;
    CHECK(moe_route_layer_create(on->context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(on));
    return layer;
}

/* f->router and f->arrays are set; the rest is made from them. */
static void fixture_create(router_fixture *f, uint32_t max_tokens) {
    memset(f->buffers, 0, sizeof f->buffers);
    f->layers[0] = create_router(&device, f, max_tokens, f->buffers[0]);
    f->layers[1] = device.kind != MOE_ROUTE_DEVICE_CPU ? create_router(&cpu, f, max_tokens, f->buffers[1]) : NULL;
}

static void fixture_destroy(router_fixture *f) {
    uint32_t i;
    for (i = 0; i < 4; i++) {
        device_destroy(&device, &f->buffers[0][i]);
        device_destroy(&cpu, &f->buffers[1][i]);
    }
    moe_route_layer_destroy(f->layers[0]);
    moe_route_layer_destroy(f->layers[1]);
    free(f->logit_bias);
    free(f->selection_bias);
    free(f->expert_scale);
    free(f->id_table);
}

static float *random_floats(test_random *random, uint32_t count, float mean, float deviation) {
    float *values = (float *)malloc(count * sizeof *values);
    uint32_t i;
    for (i = 0; i < count; i++) values[i] = mean + random_normal(random) * deviation;
    return values;
}

/* Ids as a caller may give them: some repeat, some are out of range. */
static void make_ids(test_random *random, int32_t *ids, size_t count, uint32_t num_experts) {
    static const int32_t wild[] = {-1, -2147483647 - 1, 2147483647};
    size_t i;
    for (i = 0; i < count; i++) ids[i] = random_below(random, 9) == 0 ? wild[random_below(random, 3)] : (int32_t)random_below(random, num_experts + 1);
}

static void fixture_from_case(router_fixture *f, const route_case *c, test_random *random, uint32_t max_tokens) {
    const uint32_t num_experts = c->router.num_experts;
    memset(f, 0, sizeof *f);
    f->router = c->router;
    if (c->logit_bias) f->arrays.logit_bias = f->logit_bias = random_floats(random, num_experts + c->router.num_shared_experts, 0, 1.5f);
    if (c->selection_bias) f->arrays.selection_bias = f->selection_bias = random_floats(random, num_experts, c->selection_bias == 2 ? -0.8f : 0, 0.3f);
    if (c->expert_scale) f->arrays.expert_scale = f->expert_scale = random_floats(random, num_experts, 1, 0.2f);
    if (c->router.ids == MOE_ROUTE_IDS_TABLE) {
        f->arrays.id_table = f->id_table = (int32_t *)malloc((size_t)c->router.id_table_rows * c->router.top_k * sizeof(int32_t));
        make_ids(random, f->id_table, (size_t)c->router.id_table_rows * c->router.top_k, num_experts);
    }
    fixture_create(f, max_tokens);
}

/* ---- inputs ---- */

typedef struct route_input {
    float *logits;      /* what the stored ones mean */
    int32_t *given;     /* [T, k], or NULL */
    int32_t *token_ids; /* [T], or NULL */
    routing_input input;
} route_input;

/* Logits as they are stored, and as the f32 that they mean. */
static void *store_logits(const float *from, size_t count, moe_route_dtype dtype, float *meaning, size_t *size) {
    const quantize_dtype storage = routing_storage(dtype);
    void *stored = malloc(count * 4 + 4);
    quantize_convert(stored, storage, from, QUANTIZE_F32, count);
    quantize_convert(meaning, QUANTIZE_F32, stored, storage, count);
    *size = count * quantize_dtype_size(storage);
    return stored;
}

static void make_logits(test_random *random, float *logits, uint32_t num_tokens, uint32_t num_logits) {
    uint32_t t, e;
    for (t = 0; t < num_tokens; t++) {
        const float deviation = t % 4 == 3 ? 40.0f : t % 4 == 2 ? 0.01f : 2.0f;
        for (e = 0; e < num_logits; e++) logits[(size_t)t * num_logits + e] = random_normal(random) * deviation;
        if (t % 5 == 4) /* ties */
            for (e = 0; e < num_logits; e++) logits[(size_t)t * num_logits + e] = (float)random_below(random, 4) - 2.0f;
    }
}

/* `plain` holds [T, E + S] logits, or is NULL for random ones. */
static void input_create(route_input *r, const moe_route_router *router, uint32_t num_tokens, const float *plain, test_random *random) {
    const uint32_t num_logits = router->num_experts + router->num_shared_experts;
    const size_t count = (size_t)num_tokens * num_logits;
    float *values = (float *)malloc(count * 4 + 4);
    uint32_t t;
    memset(r, 0, sizeof *r);
    if (plain) memcpy(values, plain, count * 4);
    else make_logits(random, values, num_tokens, num_logits);
    r->logits = (float *)malloc(count * 4 + 4);
    r->input.num_tokens = num_tokens;
    r->input.logits = store_logits(values, count, router->logits_dtype, r->logits, &r->input.logits_size);
    free(values);
    if (router->ids == MOE_ROUTE_IDS_GIVEN) {
        r->input.ids = r->given = (int32_t *)malloc((size_t)num_tokens * router->top_k * 4 + 4);
        make_ids(random, r->given, (size_t)num_tokens * router->top_k, router->num_experts);
    }
    if (router->ids == MOE_ROUTE_IDS_TABLE) {
        r->input.token_ids = r->token_ids = (int32_t *)malloc(num_tokens * 4 + 4);
        for (t = 0; t < num_tokens; t++) r->token_ids[t] = t % 7 == 6 ? (int32_t)(0x7fffffffu + t % 2) : (int32_t)random_below(random, router->id_table_rows + 1);
    }
}

static void input_destroy(route_input *r) {
    free((void *)(uintptr_t)r->input.logits);
    free(r->logits);
    free(r->given);
    free(r->token_ids);
}

/* The k ids that a token is told to use; NULL where the router selects. */
static const int32_t *told_ids(const router_fixture *f, const route_input *r, uint32_t t, int32_t *none) {
    uint32_t j;
    if (f->router.ids == MOE_ROUTE_IDS_SELECTED) return NULL;
    if (f->router.ids == MOE_ROUTE_IDS_GIVEN) return r->given + (size_t)t * f->router.top_k;
    if ((uint32_t)r->token_ids[t] < f->router.id_table_rows) return f->id_table + (size_t)r->token_ids[t] * f->router.top_k;
    for (j = 0; j < f->router.top_k; j++) none[j] = -1;
    return none;
}

/* ---- outputs against the definition, and against the CPU ---- */

static int weight_is_close(float got, double want, double tolerance) { return tolerance < 0 || fabs((double)got - want) <= tolerance; }

static void check_token(const router_fixture *f, const route_input *r, const routing_output *output, uint32_t t, const char *what) {
    const moe_route_router *router = &f->router;
    const uint32_t top_k = router->top_k, num_shared = router->num_shared_experts;
    const int32_t *ids = output->ids + (size_t)t * top_k;
    const float *weights = output->weights + (size_t)t * top_k, *shared = output->shared + (size_t)t * num_shared;
    int32_t none[MOER_MAX_TOP_K] = {0};
    const int32_t *told = told_ids(f, r, t, none);
    routing_expectation expected;
    uint32_t i, j;
    routing_expect(router, &f->arrays, r->logits + (size_t)t * (router->num_experts + num_shared), told, &expected);
    for (j = 0; j < top_k; j++) {
        if (!CHECK(weights[j] - weights[j] == 0, "%s: token %u slot %u: weight %g", what, t, j, (double)weights[j])) return;
        if (told) {
            const int32_t want = router->ids == MOE_ROUTE_IDS_TABLE && (uint32_t)told[j] >= router->num_experts ? -1 : told[j];
            if (!CHECK(ids[j] == want, "%s: token %u slot %u: id %d instead of %d", what, t, j, ids[j], want)) return;
            continue;
        }
        if (!CHECK(ids[j] >= 0 && ids[j] < (int32_t)router->num_experts, "%s: token %u slot %u: id %d", what, t, j, ids[j])) return;
        for (i = 0; i < j; i++)
            if (!CHECK(ids[i] != ids[j], "%s: token %u: id %d twice", what, t, ids[j])) return;
    }
    if (!expected.exact && expected.gap < 1e-5 * (1 + (double)router->softcap)) return; /* f32 and f64 may order near-equal scores differently */
    if (expected.exact && !CHECK_INTS(ids, expected.ids, router->ids == MOE_ROUTE_IDS_TABLE ? 0 : top_k, what)) return;
    for (j = 0; j < top_k; j++) {
        i = j;
        if (!expected.exact) /* only the set is certain */
            for (i = 0; i < top_k && expected.ids[i] != ids[j]; i++) {}
        if (!CHECK(i < top_k, "%s: token %u: id %d isn't among the best", what, t, ids[j])) return;
        if (!CHECK(weight_is_close(weights[j], expected.weights[i], expected.tolerance[i]), "%s: token %u id %d: weight %.9g instead of %.9g within %.2g", what, t, ids[j],
                   (double)weights[j], expected.weights[i], expected.tolerance[i]))
            return;
    }
    for (j = 0; j < num_shared; j++)
        if (!CHECK(weight_is_close(shared[j], expected.weights[top_k + j], expected.tolerance[top_k + j]), "%s: token %u: shared weight %u is %.9g instead of %.9g", what, t, j, (double)shared[j],
                   expected.weights[top_k + j]))
            return;
}

/* The device's outputs against the CPU backend's: the same bits. */
static void check_against_cpu(const routing_output *output, const routing_output *reference, const char *what) {
    if (!CHECK_INTS(output->ids, reference->ids, output->num_pairs, what)) return;
    if (!CHECK_BYTES(output->stored_weights, reference->stored_weights, output->weights_size, what)) return;
    CHECK_BYTES(output->stored_shared, reference->stored_shared, output->shared_size, what);
}

/* One batch through the router alone and with maps, against the definition (the first `checked` tokens) and the CPU. */
static void check_batch(const router_fixture *f, route_input *r, uint32_t checked, const char *name) {
    const uint32_t num_experts = f->router.num_experts, num_tokens = r->input.num_tokens;
    routing_output output, expected;
    int maps;
    uint32_t t;
    for (maps = 0; maps < 2; maps++) {
        char what[128];
        snprintf(what, sizeof what, "%s T %u%s", name, num_tokens, maps ? " with maps" : "");
        r->input.maps = maps;
        r->input.block_size = maps ? 16 : 0;
        CHECK(routing_run(&device, f->layers[0], &f->router, num_experts - f->router.num_skip_experts, &r->input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        for (t = 0; t < num_tokens && t < checked; t++) check_token(f, r, &output, t, what);
        if (maps) routing_check_maps(&output, 0, output.num_pairs, r->input.block_size, what);
        if (f->layers[1]) {
            routing_run(&cpu, f->layers[1], &f->router, num_experts - f->router.num_skip_experts, &r->input, &expected);
            check_against_cpu(&output, &expected, what);
            routing_output_free(&expected);
        }
        routing_output_free(&output);
    }
}

/* ---- every choice ---- */

static const uint32_t route_tokens[] = {0, 1, 2, 3, 7, 16, 17, 64, 65, 300};

TEST(route_matches_its_definition) {
    uint32_t c, i;
    for (c = 0; c < NUM_CASES(route_cases); c++) {
        router_fixture f;
        test_random random;
        char name[64];
        if (small_size && !route_cases[c].in_small) continue;
        random_seed(&random, 1000 + c);
        snprintf(name, sizeof name, "case %u: E %u k %u", c, route_cases[c].router.num_experts, route_cases[c].router.top_k);
        fixture_from_case(&f, &route_cases[c], &random, 300);
        for (i = 0; f.layers[0] && i < NUM_CASES(route_tokens); i++) {
            route_input r;
            if (small_size && route_tokens[i] > 65) continue;
            input_create(&r, &f.router, route_tokens[i], NULL, &random);
            check_batch(&f, &r, 300, name);
            input_destroy(&r);
        }
        fixture_destroy(&f);
    }
}

/* A router with one of its choices undone; 0 when it isn't made. */
static int undo_choice(uint32_t choice, moe_route_router *router, router_arrays *arrays) {
    switch (choice) {
#define UNDO(place, usual)                        \
    if (place == usual) return 0;                 \
    place = usual;                                \
    return 1
    case 0: UNDO(router->score, MOE_ROUTE_SCORE_SOFTMAX);
    case 1: UNDO(router->softcap, 0);
    case 2: UNDO(arrays->logit_bias, NULL);
    case 3: UNDO(arrays->selection_bias, NULL);
    case 4: UNDO(arrays->expert_scale, NULL);
    case 5: UNDO(router->group_rule, MOE_ROUTE_GROUPS_NONE);
    case 6: UNDO(router->dropped, MOE_ROUTE_DROPPED_MINUS_INFINITY);
    case 7: UNDO(router->weight, MOE_ROUTE_WEIGHT_SCORE);
    case 8: UNDO(router->renormalize, MOE_ROUTE_RENORMALIZE_NONE);
    case 9: UNDO(router->divide_by_top_k, 0);
    case 10: UNDO(router->num_skip_experts, 0);
    case 11: UNDO(router->jitter, 0);
    case 12: UNDO(router->ids, MOE_ROUTE_IDS_SELECTED);
    case 13:
        if (router->scale == 0) return 0;
        UNDO(router->scale, 1);
    case 14:
        if (router->group_rule != MOE_ROUTE_GROUPS_TOP2_SUM) return 0;
        router->group_rule = MOE_ROUTE_GROUPS_MAX;
        return 1;
    case 16:
        if (router->dropped != MOE_ROUTE_DROPPED_ZERO_SCORE) return 0;
        router->dropped = MOE_ROUTE_DROPPED_ZERO;
        return 1;
    case 15:
        if (router->renormalize != MOE_ROUTE_RENORMALIZE_MAX_SUM && router->renormalize != MOE_ROUTE_RENORMALIZE_L2) return 0;
        router->renormalize = MOE_ROUTE_RENORMALIZE_SUM;
        return 1;
    default: return 0;
#undef UNDO
    }
}

/* What the test above expects does depend on each choice that its cases make: a router that ignored one would fail it. */
TEST(route_cases_tell_choices_apart) {
    uint32_t c, choice, seen[17];
    memset(seen, 0, sizeof seen);
    for (c = 0; c < NUM_CASES(route_cases); c++) {
        router_fixture f;
        route_input r;
        test_random random;
        if (small_size && !route_cases[c].in_small) continue;
        random_seed(&random, 1000 + c);
        memset(&f, 0, sizeof f);
        fixture_from_case(&f, &route_cases[c], &random, 64);
        input_create(&r, &f.router, 64, NULL, &random);
        for (choice = 0; choice < 17; choice++) {
            moe_route_router other = f.router;
            router_arrays arrays = f.arrays;
            uint32_t t, j, differ = 0;
            if (!undo_choice(choice, &other, &arrays)) continue;
            for (t = 0; t < 64 && !differ; t++) {
                const float *logits = r.logits + (size_t)t * (f.router.num_experts + f.router.num_shared_experts);
                int32_t none[MOER_MAX_TOP_K];
                const int32_t *told = told_ids(&f, &r, t, none);
                routing_expectation a, b;
                routing_expect(&f.router, &f.arrays, logits, told, &a);
                routing_expect(&other, &arrays, logits, told, &b);
                if (!a.exact && a.gap < 1e-5 * (1 + (double)f.router.softcap)) continue;
                for (j = 0; j < f.router.top_k; j++)
                    if (a.ids[j] != b.ids[j] || (a.tolerance[j] >= 0 && fabs(a.weights[j] - b.weights[j]) > 4 * a.tolerance[j])) differ = 1;
            }
            seen[choice] += differ;
        }
        input_destroy(&r);
        fixture_destroy(&f);
    }
    for (choice = 0; choice < 17; choice++) CHECK(seen[choice], "no case would notice if choice %u were ignored", choice);
}

/* ---- every size ---- */

TEST(route_works_at_every_size) {
    static const uint32_t experts[] = {1, 2, 7, 8, 31, 32, 33, 40, 48, 60, 62, 64, 72, 96, 128, 144, 160, 192, 255, 256, 257, 288, 384, 448, 512, 576, 768, 896, 1024, 1025, 2048};
    static const uint32_t slots[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 22, 32, 64};
    static const uint32_t tokens[] = {0, 1, 2, 3, 7, 16, 17, 64, 300, 4096};
    uint32_t a, b, i, combination = 0;
    for (a = 0; a < NUM_CASES(experts); a++)
        for (b = 0; b < NUM_CASES(slots); b++) {
            /* On a GPU one in three sizes: each is a few kernels to compile. */
            const int here = device.kind == MOE_ROUTE_DEVICE_CPU ? !small_size || (a + b) % 4 == 0 : small_size ? (a * 5 + b) % 31 == 0 : (a + b) % 3 == 0;
            router_fixture f;
            test_random random;
            char name[64];
            route_case c;
            if (slots[b] > experts[a]) continue;
            combination++;
            if (!here) continue;
            random_seed(&random, 9000 + combination);
            memset(&c, 0, sizeof c);
            c.router.num_experts = experts[a];
            c.router.top_k = slots[b];
            c.router.score = combination % 2 ? MOE_ROUTE_SCORE_SIGMOID : MOE_ROUTE_SCORE_SOFTMAX;
            c.router.renormalize = combination % 3 ? MOE_ROUTE_RENORMALIZE_SUM : MOE_ROUTE_RENORMALIZE_NONE;
            c.router.renormalize_epsilon = 1e-20f;
            c.router.logits_dtype = combination % 5 == 0 ? MOE_ROUTE_BF16 : MOE_ROUTE_F32;
            c.selection_bias = combination % 4 < 2;
            if (combination % 7 == 0 && experts[a] % 8 == 0 && experts[a] > 8) {
                c.router.group_rule = MOE_ROUTE_GROUPS_TOP2_SUM;
                c.router.num_groups = 8;
                c.router.topk_groups = 5;
            }
            snprintf(name, sizeof name, "E %u k %u", experts[a], slots[b]);
            fixture_from_case(&f, &c, &random, small_size ? 64 : 4096);
            for (i = 0; f.layers[0] && i < NUM_CASES(tokens); i++) {
                route_input r;
                if (small_size && tokens[i] > (experts[a] * slots[b] > 4096 ? 3u : 17u)) continue;
                if (tokens[i] > 300 && combination % 8) continue;
                input_create(&r, &f.router, tokens[i], NULL, &random);
                check_batch(&f, &r, 64, name);
                input_destroy(&r);
            }
            fixture_destroy(&f);
        }
}

/* ---- inputs at the edge ---- */

enum { EDGE_EXPERTS = 40, EDGE_K = 6, EDGE_ROWS = 17 };

static void make_edge_rows(float *logits, uint32_t num_logits) {
    const float inf = HUGE_VALF, nan_value = NAN;
    uint32_t t, e;
    for (t = 0; t < EDGE_ROWS; t++)
        for (e = 0; e < num_logits; e++) {
            float v = (float)((e * 7 + t * 3) % 23) * 0.25f - 2.0f;
            switch (t) {
            case 0: v = nan_value; break;                                  /* a row of NaN */
            case 1: v = inf; break;
            case 2: v = -inf; break;
            case 3: if (e == 5) v = nan_value; break;                      /* one NaN */
            case 4: if (e == 9) v = inf; break;                            /* one +inf */
            case 5: v = e == 11 || e == 30 ? v : -inf; break;              /* fewer than k can be selected */
            case 6: v = e == 39 ? 1.0f : e % 2 ? nan_value : -inf; break;
            case 7: v = e % 2 ? 0.0f : -0.0f; break;                       /* equal zeros */
            case 8: v = 1.0f; break;                                       /* all equal */
            case 9: v = float_from_bits(e + 1); break;                     /* subnormal */
            case 10: v = (e % 3 ? 1.0f : -1.0f) * 3.0e38f; break;          /* huge */
            case 11: v = e % 4 == 0 ? inf : e % 4 == 1 ? -inf : e % 4 == 2 ? nan_value : v; break;
            case 12: v = -3.4028235e38f + (float)e; break;                 /* lowest finite */
            case 13: v = 88.0f + (float)e; break;                          /* around where exp overflows */
            case 14: v = -100.0f - (float)e; break;                        /* and where it vanishes */
            case 15: v = e == 0 ? -nan_value : v; break;
            default: v = (float)e * 1.0e37f; break;                        /* huge and different */
            }
            logits[t * num_logits + e] = v;
        }
}

/* Rows whose answer is plain to see, for routers that go by the logits alone. */
static void check_plain_edges(const routing_output *output) {
    static const int32_t lowest[EDGE_K] = {0, 1, 2, 3, 4, 5}, two_then_lowest[EDGE_K] = {30, 11, 0, 1, 2, 3}, one_then_lowest[EDGE_K] = {39, 0, 1, 2, 3, 4};
    uint32_t t, e;
    CHECK_INTS(output->ids + 0 * EDGE_K, lowest, EDGE_K, "ids of a row of NaN");
    CHECK_INTS(output->ids + 1 * EDGE_K, lowest, EDGE_K, "ids of a row of +inf");
    CHECK_INTS(output->ids + 2 * EDGE_K, lowest, EDGE_K, "ids of a row of -inf");
    CHECK_INTS(output->ids + 5 * EDGE_K, two_then_lowest, EDGE_K, "ids of a row with two experts");
    CHECK_INTS(output->ids + 6 * EDGE_K, one_then_lowest, EDGE_K, "ids of a row with one expert");
    CHECK_INTS(output->ids + 7 * EDGE_K, lowest, EDGE_K, "ids of +0 and -0");
    CHECK_INTS(output->ids + 8 * EDGE_K, lowest, EDGE_K, "ids of a flat row");
    CHECK(output->ids[4 * EDGE_K] == 9, "one +inf comes first, not %d", output->ids[4 * EDGE_K]);
    for (t = 0; t < 3; t += 2)
        for (e = 0; e < EDGE_K; e++) CHECK(output->weights[t * EDGE_K + e] == 0.0f, "row %u has no selectable expert but weight %g", t, (double)output->weights[t * EDGE_K + e]);
    for (e = 2; e < EDGE_K; e++) CHECK(output->weights[5 * EDGE_K + e] == 0.0f, "an unselectable expert has weight %g", (double)output->weights[5 * EDGE_K + e]);
}

/* bias_kind: 0 none, 1 ordinary, 2 with NaN, +inf and -inf. */
static void run_edge(const moe_route_router *choices, int bias_kind, const char *what) {
    static float logits[EDGE_ROWS * (EDGE_EXPERTS + MOER_MAX_SHARED)];
    float bias[EDGE_EXPERTS], cleaned[EDGE_EXPERTS];
    router_fixture f;
    route_input r;
    routing_output output;
    test_random random;
    uint32_t e, t;
    random_seed(&random, 31);
    memset(&f, 0, sizeof f);
    f.router = *choices;
    f.router.num_experts = EDGE_EXPERTS;
    f.router.top_k = EDGE_K;
    for (e = 0; e < EDGE_EXPERTS; e++) bias[e] = (float)(e % 5) * 0.1f - 0.2f;
    if (bias_kind == 2) {
        bias[3] = NAN;
        bias[4] = HUGE_VALF;
        bias[5] = -HUGE_VALF;
    }
    memcpy(cleaned, bias, sizeof cleaned);
    f.arrays.selection_bias = bias_kind ? cleaned : NULL;
    fixture_create(&f, EDGE_ROWS);
    REQUIRE(f.layers[0], "%s: no layer", what);
    make_edge_rows(logits, EDGE_EXPERTS + f.router.num_shared_experts);
    input_create(&r, &f.router, EDGE_ROWS, logits, &random);
    check_batch(&f, &r, EDGE_ROWS, what);
    r.input.maps = 0;
    CHECK(routing_run(&device, f.layers[0], &f.router, EDGE_EXPERTS, &r.input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
    if (f.router.score != MOE_ROUTE_SCORE_CUSTOM && f.router.ids == MOE_ROUTE_IDS_SELECTED && !bias_kind && f.router.group_rule == MOE_ROUTE_GROUPS_NONE && f.router.softcap == 0) check_plain_edges(&output);
    if (bias_kind == 2 && (f.router.score == MOE_ROUTE_SCORE_SOFTMAX || f.router.score == MOE_ROUTE_SCORE_SIGMOID)) /* whose scores are finite */
        for (t = 1; t < EDGE_ROWS; t++)
            CHECK(output.ids[t * EDGE_K] == 4, "%s: row %u: the expert with bias +inf comes first, not %d", what, t, output.ids[t * EDGE_K]);
    routing_output_free(&output);
    input_destroy(&r);
    fixture_destroy(&f);
}

TEST(route_is_defined_for_every_input) {
    static const struct { moe_route_router router; int bias_kind; const char *what; } edges[] = {
        {{.score = MOE_ROUTE_SCORE_SOFTMAX}, 0, "softmax"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 0, "softmax renormalised"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX}, 2, "softmax with a bad bias"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED}, 2, "softmax of the selected with a bad bias"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 0, "sigmoid renormalised"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 2, "sigmoid with a bad bias"},
        {{.score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 0, "softplus"},
        {{.score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS, .weights_dtype = MOE_ROUTE_F16}, 2, "softplus with a bad bias, weights in f16"},
        {{.score = MOE_ROUTE_SCORE_IDENTITY}, 0, "identity"},
        {{.score = MOE_ROUTE_SCORE_IDENTITY, .renormalize = MOE_ROUTE_RENORMALIZE_L2, .weights_dtype = MOE_ROUTE_BF16}, 0, "identity by its norm, weights in bf16"},
        {{.score = MOE_ROUTE_SCORE_IDENTITY, .renormalize = MOE_ROUTE_RENORMALIZE_MAX_SUM}, 2, "identity with a bad bias"},
        {{.score = MOE_ROUTE_SCORE_SPARSE_MIXER, .jitter = 0.01f}, 0, "SparseMixer"},
        {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = ROUTER_CUSTOM_EXPRESSION, .score_function = router_custom_score}, 0, "own score"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .softcap = 20.0f, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 1, "capped sigmoid"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .softcap = 20.0f}, 0, "capped softmax"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 8, .topk_groups = 1}, 1, "one group of fewer than k"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 8, .topk_groups = 3}, 2, "groups with a bad bias"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 4, .topk_groups = 2, .dropped = MOE_ROUTE_DROPPED_ZERO}, 0, "groups by their maximum"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .group_rule = MOE_ROUTE_GROUPS_QUOTA, .num_groups = 2}, 0, "a quota a group"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .weight = MOE_ROUTE_WEIGHT_SIGMOID_SELECTED, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 0, "sigmoid of the selected"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .num_shared_experts = 3, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 1, "shared experts"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 20, .topk_groups = 2, .dropped = MOE_ROUTE_DROPPED_ZERO_SCORE}, 0, "dropped scores"},
        {{.score = MOE_ROUTE_SCORE_SIGMOID, .num_shared_experts = 2, .weight = MOE_ROUTE_WEIGHT_SIGMOID_SHARE}, 0, "shares of sigmoids"},
        {{.score = MOE_ROUTE_SCORE_SOFTMAX, .ids = MOE_ROUTE_IDS_GIVEN}, 0, "given ids"},
        {{.score = MOE_ROUTE_SCORE_IDENTITY, .ids = MOE_ROUTE_IDS_GIVEN, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, 0, "given ids by logit"},
    };
    uint32_t i;
    for (i = 0; i < NUM_CASES(edges); i++) run_edge(&edges[i].router, edges[i].bias_kind, edges[i].what);
}

/* A bias may select an expert whose softmax is 0 in f32: the sum over the selected is 0, and so is the weight. */
TEST(route_with_a_bias_keeps_its_plain_sum) {
    static const float logits[2] = {200.0f, 0.0f}, bias[2] = {0.0f, 5.0f};
    router_fixture f;
    routing_input input;
    routing_output output;
    memset(&f, 0, sizeof f);
    f.router.num_experts = 2;
    f.router.top_k = 1;
    f.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    f.arrays.selection_bias = bias;
    fixture_create(&f, 1);
    REQUIRE(f.layers[0], "no layer");
    memset(&input, 0, sizeof input);
    input.num_tokens = 1;
    input.logits = logits;
    input.logits_size = sizeof logits;
    CHECK(routing_run(&device, f.layers[0], &f.router, 2, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(output.ids[0] == 1 && output.weights[0] == 0.0f, "expert %d weighs %g", output.ids[0], (double)output.weights[0]);
    routing_output_free(&output);
    fixture_destroy(&f);
}

/* ---- the arithmetic of scores ---- */

TEST(scores_are_as_exact_as_they_say) {
    double worst[4] = {0, 0, 0, 0};
    uint32_t i;
    for (i = 0; i < 2000001; i++) {
        const float x = -104.0f + (float)i * (192.0f / 2000000.0f), small = x * 0.01f;
        const double values[4] = {(double)moer_exp(x), (double)moer_softplus(x), (double)moer_tanh(x), (double)moer_tanh(small)};
        const double want[4] = {exp((double)x), (x > 0 ? (double)x : 0) + log1p(exp(-fabs((double)x))), tanh((double)x), tanh((double)small)};
        uint32_t n;
        for (n = 0; n < 4; n++)
            if (fabs(want[n]) > 2e-38 && fabs(values[n] / want[n] - 1) > worst[n]) worst[n] = fabs(values[n] / want[n] - 1);
    }
    CHECK(worst[0] < 1.3 / 16777216, "moer_exp is off by %.2f units", worst[0] * 16777216);
    CHECK(worst[1] < 4.0 / 16777216, "moer_softplus is off by %.2f units", worst[1] * 16777216);
    CHECK(worst[2] < 3.0 / 16777216 && worst[3] < 3.0 / 16777216, "moer_tanh is off by %.2f and %.2f units", worst[2] * 16777216, worst[3] * 16777216);
    CHECK(moer_softplus(HUGE_VALF) == HUGE_VALF && moer_softplus(-HUGE_VALF) == 0.0f && moer_tanh(HUGE_VALF) == 1.0f && moer_tanh(-HUGE_VALF) == -1.0f && moer_tanh(-0.0f) == 0.0f, "infinities and zero");
}

/* ---- padded batches ---- */

TEST(route_leaves_padding_out) {
    static const int32_t valid_counts[] = {-5, 0, 1, 9, 16, 1000};
    static const uint32_t token_counts[] = {16, 200}; /* one launch, and the general maps */
    router_fixture f;
    test_random random;
    uint32_t i, n, p, t;
    random_seed(&random, 7);
    memset(&f, 0, sizeof f);
    f.router.num_experts = 24;
    f.router.top_k = 3;
    f.router.num_shared_experts = 2;
    f.router.score = MOE_ROUTE_SCORE_SIGMOID;
    f.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    fixture_create(&f, 200);
    for (n = 0; f.layers[0] && n < 2; n++)
        for (i = 0; i < 6; i++) {
            const uint32_t num_tokens = token_counts[n];
            const uint32_t valid = valid_counts[i] < 0 ? 0 : (uint32_t)valid_counts[i] < num_tokens ? (uint32_t)valid_counts[i] : num_tokens;
            route_input r;
            routing_output output;
            input_create(&r, &f.router, num_tokens, NULL, &random);
            r.input.num_valid = &valid_counts[i];
            r.input.maps = 1;
            r.input.block_size = 8;
            CHECK(routing_run(&device, f.layers[0], &f.router, 24, &r.input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
            for (p = valid * 3; p < num_tokens * 3; p++) CHECK(output.ids[p] == -1 && output.weights[p] == 0.0f, "padding has id %d, weight %g", output.ids[p], (double)output.weights[p]);
            for (p = valid * 2; p < num_tokens * 2; p++) CHECK(output.shared[p] == 0.0f, "padding has shared weight %g", (double)output.shared[p]);
            for (t = 0; t < valid; t++) check_token(&f, &r, &output, t, "valid rows");
            routing_check_maps(&output, 0, valid * 3, 8, "padded batch");
            routing_output_free(&output);
            input_destroy(&r);
        }
    fixture_destroy(&f);
}

/* ---- determinism ---- */

TEST(route_gives_the_same_bits_every_time) {
    static const route_case c = {.router = {.num_experts = 256, .top_k = 8, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 2.5f,
                                  .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 8, .topk_groups = 4}, .selection_bias = 1};
    const uint32_t runs = device.kind == MOE_ROUTE_DEVICE_CPU ? 20 : small_size ? 3 : 1000;
    router_fixture f;
    route_input r, busy;
    routing_output first, again, other;
    routing_call call;
    test_device second;
    test_random random;
    uint32_t run;
    random_seed(&random, 99);
    fixture_from_case(&f, &c, &random, 300);
    REQUIRE(f.layers[0], "no layer");
    input_create(&r, &f.router, 16, NULL, &random);
    input_create(&busy, &f.router, 300, NULL, &random);
    r.input.maps = busy.input.maps = 1;
    second = device; /* the same context, and a stream of its own that is kept busy */
    if (device.kind == MOE_ROUTE_DEVICE_GPU) device_must(&device, gpu_stream_create(&device.gpu, &second.stream));
    routing_run(&device, f.layers[0], &f.router, 256, &r.input, &first);
    for (run = 0; run < runs; run++) {
        if (run % 4 == 0) routing_start(&second, f.layers[0], &f.router, 256, &busy.input, &call, &other);
        routing_run(&device, f.layers[0], &f.router, 256, &r.input, &again);
        if (!CHECK_BYTES(again.weights, first.weights, 128 * sizeof(float), "weights") || !CHECK_INTS(again.ids, first.ids, 128, "ids") ||
            !CHECK_INTS(again.row_to_pair, first.row_to_pair, 128, "row_to_pair"))
            break;
        routing_output_free(&again);
        if (run % 4 == 0) {
            routing_finish(&second, &f.router, &busy.input, &call, &other);
            routing_output_free(&other);
        }
    }
    if (device.kind == MOE_ROUTE_DEVICE_GPU) gpu_stream_destroy(&device.gpu, second.stream);
    routing_output_free(&first);
    input_destroy(&r);
    input_destroy(&busy);
    fixture_destroy(&f);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    device_open_wanted(&device);
    if (!device_open(&cpu, MOE_ROUTE_DEVICE_CPU, NULL)) device_die(cpu.reason);
    RUN(route_matches_its_definition);
    RUN(route_cases_tell_choices_apart);
    RUN(route_works_at_every_size);
    RUN(route_is_defined_for_every_input);
    RUN(route_with_a_bias_keeps_its_plain_sum);
    RUN(scores_are_as_exact_as_they_say);
    RUN(route_leaves_padding_out);
    RUN(route_gives_the_same_bits_every_time);
    device_close(&device);
    device_close(&cpu);
    return test_end();
}
