/*
  test_route.c: the router: against an f64 statement of its definition, against the routers of Hugging Face transformers,
  for inputs at the edge of f32, and on a GPU against the CPU backend to the last bit.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/routing.h"
#include "support/model.h"
#include "support/cases.h"
#include "../examples/safetensors.h"

static test_device device, cpu;
static int small_size;

static const uint32_t route_tokens[] = {0, 1, 2, 3, 7, 16, 17, 64, 65, 300};

/* Creates a layer that routes, on a device, with the bias uploaded there. */
static moe_route_layer *create_router(test_device *on, const moe_route_router *router, const float *bias, device_buffer *bias_buffer, uint32_t max_tokens) {
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    memset(&desc, 0, sizeof desc);
    memset(bias_buffer, 0, sizeof *bias_buffer);
    desc.router = *router;
    desc.max_tokens = max_tokens;
    if (bias) {
        *bias_buffer = device_create_from(on, bias, router->num_experts * sizeof(float));
        desc.router.selection_bias = bias_buffer->address;
    }
    CHECK(moe_route_layer_create(on->context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(on));
    return layer;
}

/* Logits as they are stored, and as the f32 that they mean. */
static void *store_logits(const float *from, size_t count, moe_route_dtype dtype, float *meaning, size_t *size) {
    void *stored = malloc(count * 4 + 4);
    quantize_convert(stored, model_storage(dtype), from, QUANTIZE_F32, count);
    quantize_convert(meaning, QUANTIZE_F32, stored, model_storage(dtype), count);
    *size = count * quantize_dtype_size(model_storage(dtype));
    return stored;
}

/* f32 rounds the difference of two logits before exp: an error of the weight that grows with its logarithm. */
static int weight_is_close(float got, double want) {
    return fabs((double)got - want) <= fabs(want) * (1e-6 - 2e-7 * (want > 0 && want < 1 ? log(want) : 0)) + 1e-30;
}

static void check_against_definition(const moe_route_router *router, const float *logits, const float *bias, const routing_output *output, uint32_t num_tokens, const char *what) {
    uint32_t t, j, i;
    for (t = 0; t < num_tokens; t++) {
        const int32_t *ids = output->ids + (size_t)t * router->top_k;
        const float *weights = output->weights + (size_t)t * router->top_k;
        routing_expectation expected;
        routing_expect(router, logits + (size_t)t * router->num_experts, bias, &expected);
        for (j = 0; j < router->top_k; j++) {
            if (!CHECK(ids[j] >= 0 && ids[j] < (int32_t)router->num_experts, "%s: token %u slot %u: id %d", what, t, j, ids[j])) return;
            for (i = 0; i < j; i++)
                if (!CHECK(ids[i] != ids[j], "%s: token %u: id %d twice", what, t, ids[j])) return;
            if (!CHECK(weights[j] - weights[j] == 0, "%s: token %u slot %u: weight %g", what, t, j, (double)weights[j])) return;
        }
        if (bias) { /* f32 and f64 scores may order near-equal experts differently: only the set is certain, and with a gap */
            if (expected.gap < 1e-5) continue;
            for (j = 0; j < router->top_k; j++) {
                for (i = 0; i < router->top_k && expected.ids[i] != ids[j]; i++) {}
                if (!CHECK(i < router->top_k, "%s: token %u: id %d isn't among the best", what, t, ids[j])) return;
                if (!CHECK(weight_is_close(weights[j], expected.weights[i]), "%s: token %u id %d: weight %.9g instead of %.9g", what, t, ids[j],
                           (double)weights[j], expected.weights[i]))
                    return;
            }
            continue;
        }
        if (!CHECK_INTS(ids, expected.ids, router->top_k, what)) return;
        for (j = 0; j < router->top_k; j++)
            if (!CHECK(weight_is_close(weights[j], expected.weights[j]), "%s: token %u slot %u: weight %.9g instead of %.9g", what, t, j, (double)weights[j],
                       expected.weights[j]))
                return;
    }
}

/* The device's outputs against the CPU backend's: the same bits. */
static void check_against_cpu(const routing_output *output, const routing_output *reference, const char *what) {
    if (!CHECK_INTS(output->ids, reference->ids, output->num_pairs, what)) return;
    CHECK_BYTES(output->weights, reference->weights, output->num_pairs * sizeof(float), what);
}

static void make_logits(test_random *random, float *logits, uint32_t num_tokens, uint32_t num_experts) {
    uint32_t t, e;
    for (t = 0; t < num_tokens; t++) {
        const float deviation = t % 4 == 3 ? 40.0f : t % 4 == 2 ? 0.01f : 2.0f;
        for (e = 0; e < num_experts; e++) logits[(size_t)t * num_experts + e] = random_normal(random) * deviation;
        if (t % 5 == 4) /* ties */
            for (e = 0; e < num_experts; e++) logits[(size_t)t * num_experts + e] = (float)random_below(random, 4) - 2.0f;
    }
}

static void run_case(const route_case *c, uint64_t seed) {
    const uint32_t max_tokens = 300;
    moe_route_router router;
    moe_route_layer *layer, *reference = NULL;
    device_buffer bias_buffer, cpu_bias;
    float *logits = (float *)malloc((size_t)max_tokens * c->num_experts * 4), *meaning = (float *)malloc((size_t)max_tokens * c->num_experts * 4), *bias = NULL;
    test_random random;
    uint32_t i, e;
    random_seed(&random, seed);
    fill_router(&router, c);
    if (c->bias) {
        bias = (float *)malloc(c->num_experts * 4);
        for (e = 0; e < c->num_experts; e++) bias[e] = random_normal(&random) * 0.3f;
    }
    layer = create_router(&device, &router, bias, &bias_buffer, max_tokens);
    if (layer && device.kind != MOE_ROUTE_DEVICE_CPU) reference = create_router(&cpu, &router, bias, &cpu_bias, max_tokens);
    for (i = 0; layer && i < sizeof route_tokens / sizeof route_tokens[0]; i++) {
        const uint32_t num_tokens = route_tokens[i];
        routing_input input;
        routing_output output, expected;
        char what[96];
        int maps;
        memset(&input, 0, sizeof input);
        if (small_size && num_tokens > 65) continue;
        make_logits(&random, logits, num_tokens, c->num_experts);
        input.num_tokens = num_tokens;
        input.logits = store_logits(logits, (size_t)num_tokens * c->num_experts, c->dtype, meaning, &input.logits_size);
        for (maps = 0; maps < 2; maps++) { /* the router alone, and with maps */
            snprintf(what, sizeof what, "E %u k %u T %u%s", c->num_experts, c->top_k, num_tokens, maps ? " with maps" : "");
            input.maps = maps;
            input.block_size = maps ? 16 : 0;
            CHECK(routing_run(&device, layer, &router, c->num_experts, &input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
            check_against_definition(&router, meaning, bias, &output, num_tokens, what);
            if (maps) routing_check_maps(&output, 0, output.num_pairs, input.block_size, what);
            if (reference) {
                routing_run(&cpu, reference, &router, c->num_experts, &input, &expected);
                check_against_cpu(&output, &expected, what);
                routing_output_free(&expected);
            }
            routing_output_free(&output);
        }
        free((void *)(uintptr_t)input.logits);
    }
    moe_route_layer_destroy(layer);
    moe_route_layer_destroy(reference);
    if (bias) {
        device_destroy(&device, &bias_buffer);
        if (reference) device_destroy(&cpu, &cpu_bias);
    }
    free(bias);
    free(logits);
    free(meaning);
}

TEST(route_matches_its_definition) {
    uint32_t i;
    for (i = 0; i < NUM_CASES(route_cases); i++)
        if (!small_size || route_cases[i].in_small) run_case(&route_cases[i], 1000 + i);
}

/* ---- inputs at the edge ---- */

enum { EDGE_EXPERTS = 40, EDGE_K = 6, EDGE_ROWS = 16 };

static void make_edge_rows(float *logits) {
    const float inf = HUGE_VALF, nan_value = NAN;
    uint32_t t, e;
    for (t = 0; t < EDGE_ROWS; t++)
        for (e = 0; e < EDGE_EXPERTS; e++) {
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
            default: v = e == 0 ? -nan_value : v; break;
            }
            logits[t * EDGE_EXPERTS + e] = v;
        }
}

static void run_edge(moe_route_score score, int bias_kind, moe_route_weight weight, moe_route_renormalize renormalize, const char *what) {
    static float logits[EDGE_ROWS * EDGE_EXPERTS];
    float bias[EDGE_EXPERTS];
    moe_route_router router;
    moe_route_layer *layer, *reference;
    device_buffer bias_buffer, cpu_bias;
    routing_input input;
    routing_output output, expected;
    const route_case c = {EDGE_EXPERTS, EDGE_K, MOE_ROUTE_F32, score, bias_kind, weight, renormalize, 0, 0, 0};
    uint32_t e, t;
    make_edge_rows(logits);
    fill_router(&router, &c);
    for (e = 0; e < EDGE_EXPERTS; e++) bias[e] = (float)(e % 5) * 0.1f - 0.2f;
    if (bias_kind == 2) {
        bias[3] = NAN;
        bias[4] = HUGE_VALF;
        bias[5] = -HUGE_VALF;
    }
    layer = create_router(&device, &router, bias_kind ? bias : NULL, &bias_buffer, EDGE_ROWS);
    reference = create_router(&cpu, &router, bias_kind ? bias : NULL, &cpu_bias, EDGE_ROWS);
    REQUIRE(layer && reference, "%s: no layer", what);
    memset(&input, 0, sizeof input);
    input.num_tokens = EDGE_ROWS;
    input.logits = logits;
    input.logits_size = sizeof logits;
    input.maps = 1;
    CHECK(routing_run(&device, layer, &router, EDGE_EXPERTS, &input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
    routing_run(&cpu, reference, &router, EDGE_EXPERTS, &input, &expected);
    check_against_definition(&router, logits, bias_kind ? bias : NULL, &output, EDGE_ROWS, what);
    routing_check_maps(&output, 0, output.num_pairs, 0, what);
    check_against_cpu(&output, &expected, what);
    if (!bias_kind) { /* rows whose answer is plain to see */
        static const int32_t lowest[EDGE_K] = {0, 1, 2, 3, 4, 5}, two_then_lowest[EDGE_K] = {30, 11, 0, 1, 2, 3}, one_then_lowest[EDGE_K] = {39, 0, 1, 2, 3, 4};
        CHECK_INTS(output.ids + 0 * EDGE_K, lowest, EDGE_K, "ids of a row of NaN");
        CHECK_INTS(output.ids + 1 * EDGE_K, lowest, EDGE_K, "ids of a row of +inf");
        CHECK_INTS(output.ids + 2 * EDGE_K, lowest, EDGE_K, "ids of a row of -inf");
        CHECK_INTS(output.ids + 5 * EDGE_K, two_then_lowest, EDGE_K, "ids of a row with two experts");
        CHECK_INTS(output.ids + 6 * EDGE_K, one_then_lowest, EDGE_K, "ids of a row with one expert");
        CHECK_INTS(output.ids + 7 * EDGE_K, lowest, EDGE_K, "ids of +0 and -0");
        CHECK_INTS(output.ids + 8 * EDGE_K, lowest, EDGE_K, "ids of a flat row");
        CHECK(output.ids[4 * EDGE_K] == 9, "one +inf comes first, not %d", output.ids[4 * EDGE_K]);
        for (t = 0; t < 3; t += 2)
            for (e = 0; e < EDGE_K; e++) CHECK(output.weights[t * EDGE_K + e] == 0.0f, "row %u has no selectable expert but weight %g", t, (double)output.weights[t * EDGE_K + e]);
        for (e = 2; e < EDGE_K; e++) CHECK(output.weights[5 * EDGE_K + e] == 0.0f, "an unselectable expert has weight %g", (double)output.weights[5 * EDGE_K + e]);
    }
    if (bias_kind == 2)
        for (t = 0; t < EDGE_ROWS * EDGE_K; t++)
            if (t % EDGE_K == 0 && t / EDGE_K != 0) CHECK(output.ids[t] == 4, "the expert with bias +inf comes first, not %d", output.ids[t]);
    routing_output_free(&output);
    routing_output_free(&expected);
    moe_route_layer_destroy(layer);
    moe_route_layer_destroy(reference);
    if (bias_kind) {
        device_destroy(&device, &bias_buffer);
        device_destroy(&cpu, &cpu_bias);
    }
}

TEST(route_is_defined_for_every_input) {
    run_edge(MOE_ROUTE_SCORE_SOFTMAX, 0, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_NONE, "softmax");
    run_edge(MOE_ROUTE_SCORE_SOFTMAX, 0, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, "softmax renormalised");
    run_edge(MOE_ROUTE_SCORE_SOFTMAX, 2, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_NONE, "softmax with a bad bias");
    run_edge(MOE_ROUTE_SCORE_SOFTMAX, 2, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOE_ROUTE_RENORMALIZE_NONE, "softmax of the selected with a bad bias");
    run_edge(MOE_ROUTE_SCORE_SIGMOID, 0, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, "sigmoid renormalised");
    run_edge(MOE_ROUTE_SCORE_SIGMOID, 2, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, "sigmoid with a bad bias");
}

/* A bias may select an expert whose softmax is 0 in f32: the sum over the selected is 0, and so is the weight. */
TEST(route_with_a_bias_keeps_its_plain_sum) {
    const route_case c = {2, 1, MOE_ROUTE_F32, MOE_ROUTE_SCORE_SOFTMAX, 1, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 0, 0};
    static const float logits[2] = {200.0f, 0.0f}, bias[2] = {0.0f, 5.0f};
    moe_route_router router;
    moe_route_layer *layer;
    device_buffer bias_buffer;
    routing_input input;
    routing_output output;
    fill_router(&router, &c);
    layer = create_router(&device, &router, bias, &bias_buffer, 1);
    REQUIRE(layer, "no layer");
    memset(&input, 0, sizeof input);
    input.num_tokens = 1;
    input.logits = logits;
    input.logits_size = sizeof logits;
    CHECK(routing_run(&device, layer, &router, 2, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(output.ids[0] == 1 && output.weights[0] == 0.0f, "expert %d weighs %g", output.ids[0], (double)output.weights[0]);
    routing_output_free(&output);
    moe_route_layer_destroy(layer);
    device_destroy(&device, &bias_buffer);
}

/* ---- padded batches ---- */

TEST(route_leaves_padding_out) {
    const route_case c = {24, 3, MOE_ROUTE_F32, MOE_ROUTE_SCORE_SOFTMAX, 0, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 0, 0};
    static const int32_t valid_counts[] = {-5, 0, 1, 9, 16, 1000};
    static const uint32_t token_counts[] = {16, 200}; /* one launch, and the general maps */
    moe_route_router router;
    moe_route_layer *layer;
    device_buffer unused;
    float *logits = (float *)malloc(200 * 24 * 4);
    test_random random;
    uint32_t i, n, p;
    random_seed(&random, 7);
    fill_router(&router, &c);
    layer = create_router(&device, &router, NULL, &unused, 200);
    for (n = 0; layer && n < 2; n++)
        for (i = 0; i < 6; i++) {
            const uint32_t num_tokens = token_counts[n];
            const uint32_t valid = valid_counts[i] < 0 ? 0 : (uint32_t)valid_counts[i] < num_tokens ? (uint32_t)valid_counts[i] : num_tokens;
            routing_input input;
            routing_output output;
            make_logits(&random, logits, num_tokens, 24);
            memset(&input, 0, sizeof input);
            input.num_tokens = num_tokens;
            input.logits = logits;
            input.logits_size = (size_t)num_tokens * 24 * 4;
            input.num_valid = &valid_counts[i];
            input.maps = 1;
            input.block_size = 8;
            CHECK(routing_run(&device, layer, &router, 24, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
            for (p = valid * 3; p < num_tokens * 3; p++) CHECK(output.ids[p] == -1 && output.weights[p] == 0.0f, "padding has id %d, weight %g", output.ids[p], (double)output.weights[p]);
            check_against_definition(&router, logits, NULL, &output, valid, "valid rows");
            routing_check_maps(&output, 0, valid * 3, 8, "padded batch");
            routing_output_free(&output);
        }
    moe_route_layer_destroy(layer);
    free(logits);
}

/* ---- the routers of transformers ---- */

typedef struct golden_router {
    const char *name;
    moe_route_score score;
    moe_route_weight weight;
    moe_route_renormalize renormalize;
    float epsilon, scale;
} golden_router;

/* Those that need only what this router offers. */
static const golden_router golden_routers[] = {
    {"mixtral", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"qwen2_moe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_NONE, 0, 1},
    {"qwen3_moe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"qwen3_next", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"qwen3_5_moe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"olmoe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_NONE, 0, 1},
    {"flex_olmo", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_NONE, 0, 1},
    {"mellum", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"minimax", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"minimax_m2", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"gpt_oss", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOE_ROUTE_RENORMALIZE_NONE, 0, 1},
    {"granitemoe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOE_ROUTE_RENORMALIZE_NONE, 0, 1},
    {"jetmoe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOE_ROUTE_RENORMALIZE_NONE, 0, 1},
    {"hunyuan_v1_moe", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 0, 1},
    {"afmoe", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.448f},
    {"glm4_moe", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.5f},
    {"kimi_linear", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.446f},
    {"dots1", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.5f},
    {"nemotron_h", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.5f},
    {"mimo_v2_flash", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 1},
    {"exaone_moe", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.5f},
    {"solar_open", MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 1},
    {"longcat_flash", MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_NONE, 0, 6},
};

static void run_golden(safetensors_file *file, const golden_router *golden) {
    char name[64];
    const safetensors_tensor *logits, *ids, *weights, *bias;
    moe_route_router router;
    moe_route_layer *layer;
    device_buffer bias_buffer;
    routing_input input;
    routing_output output;
    uint32_t t, i, j;
    snprintf(name, sizeof name, "%s.logits", golden->name);
    logits = safetensors_find(file, name);
    snprintf(name, sizeof name, "%s.ids", golden->name);
    ids = safetensors_find(file, name);
    snprintf(name, sizeof name, "%s.weights", golden->name);
    weights = safetensors_find(file, name);
    snprintf(name, sizeof name, "%s.bias", golden->name);
    bias = safetensors_find(file, name);
    REQUIRE(logits && ids && weights, "%s is missing", golden->name);
    memset(&router, 0, sizeof router);
    router.num_experts = (uint32_t)logits->shape[1];
    router.top_k = (uint32_t)ids->shape[1];
    router.score = golden->score;
    router.weight = golden->weight;
    router.renormalize = golden->renormalize;
    router.renormalize_epsilon = golden->epsilon;
    router.scale = golden->scale;
    layer = create_router(&device, &router, bias ? (const float *)bias->data : NULL, &bias_buffer, 48);
    if (!layer) return;
    memset(&input, 0, sizeof input);
    input.num_tokens = 48;
    input.logits = logits->data;
    input.logits_size = (size_t)48 * router.num_experts * 4;
    CHECK(routing_run(&device, layer, &router, router.num_experts, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
    for (t = 0; t < 48; t++)
        for (j = 0; j < router.top_k; j++) { /* the golden ids are in ascending order: compare as sets */
            const size_t at = (size_t)t * router.top_k + j;
            const int32_t want = ((const int32_t *)ids->data)[at];
            const float want_weight = ((const float *)weights->data)[at];
            for (i = 0; i < router.top_k && output.ids[(size_t)t * router.top_k + i] != want; i++) {}
            if (!CHECK(i < router.top_k, "%s: token %u: expert %d isn't chosen", golden->name, t, want)) goto done;
            if (!CHECK(fabs((double)output.weights[(size_t)t * router.top_k + i] - (double)want_weight) <= 1e-6 * fabs((double)want_weight) + 1e-37, "%s: token %u expert %d: weight %.9g instead of %.9g", golden->name, t,
                       want, (double)output.weights[(size_t)t * router.top_k + i], (double)want_weight))
                goto done;
        }
done:
    routing_output_free(&output);
    moe_route_layer_destroy(layer);
    if (bias) device_destroy(&device, &bias_buffer);
}

TEST(route_agrees_with_transformers) {
    safetensors_file file;
    uint32_t i;
    REQUIRE(safetensors_open(&file, "tests/data/routers.safetensors"), "%s", file.error);
    for (i = 0; i < sizeof golden_routers / sizeof golden_routers[0]; i++)
        if (!small_size || i % 5 == 0) run_golden(&file, &golden_routers[i]);
    safetensors_close(&file);
}

/* ---- determinism ---- */

TEST(route_gives_the_same_bits_every_time) {
    const route_case c = {256, 8, MOE_ROUTE_F32, MOE_ROUTE_SCORE_SIGMOID, 1, MOE_ROUTE_WEIGHT_SCORE, MOE_ROUTE_RENORMALIZE_SUM, 1e-20f, 2.5f, 0};
    moe_route_router router;
    moe_route_layer *layer;
    device_buffer bias_buffer;
    routing_input input;
    routing_output first, again;
    static float logits[16 * 256];
    float bias[256];
    test_random random;
    uint32_t e, run;
    random_seed(&random, 99);
    for (e = 0; e < 256; e++) bias[e] = random_normal(&random) * 0.1f;
    make_logits(&random, logits, 16, 256);
    fill_router(&router, &c);
    layer = create_router(&device, &router, bias, &bias_buffer, 16);
    REQUIRE(layer, "no layer");
    memset(&input, 0, sizeof input);
    input.num_tokens = 16;
    input.logits = logits;
    input.logits_size = sizeof logits;
    input.maps = 1;
    routing_run(&device, layer, &router, 256, &input, &first);
    for (run = 0; run < (small_size ? 3u : 100u); run++) {
        routing_run(&device, layer, &router, 256, &input, &again);
        CHECK_BYTES(again.weights, first.weights, 128 * sizeof(float), "weights");
        CHECK_INTS(again.ids, first.ids, 128, "ids");
        CHECK_INTS(again.row_to_pair, first.row_to_pair, 128, "row_to_pair");
        routing_output_free(&again);
    }
    routing_output_free(&first);
    moe_route_layer_destroy(layer);
    device_destroy(&device, &bias_buffer);
}

int main(int argc, char **argv) {
    const char *size = getenv("TEST_SIZE");
    test_begin(argc, argv);
    small_size = size && strcmp(size, "small") == 0;
    if (!device_open(&device, device_wanted(), NULL) || !device_open(&cpu, MOE_ROUTE_DEVICE_CPU, NULL)) device_die(device.reason);
    RUN(route_matches_its_definition);
    RUN(route_is_defined_for_every_input);
    RUN(route_with_a_bias_keeps_its_plain_sum);
    RUN(route_leaves_padding_out);
    RUN(route_agrees_with_transformers);
    RUN(route_gives_the_same_bits_every_time);
    device_close(&device);
    device_close(&cpu);
    return test_end();
}
