/*
  test_large.c: the fused layer in large batches, where grouped.cu computes the experts: against f64 for every format and choice, with tiles of
  each size, experts without rows, one with all of them, ranges of experts, padding, ids out of range; and on a real GPU with arrays
  of more than 2^31 elements. A result has the same bits in every large batch, and those of small batches while experts have few rows.
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

static test_device device;
static int small_size;

/* The fewest tokens that are a large batch. */
static uint32_t large_tokens(const model_spec *spec) {
    const uint32_t few = (device.context->target >= 90 ? MOER_FEW_ROWS_BULK : MOER_FEW_ROWS) * spec->num_experts;
    return (few < MOER_SMALL_PAIRS ? MOER_SMALL_PAIRS : few) / spec->top_k + 1;
}

/* Weights are rounded to the layer's dtype, and so are the rows before they are combined: two roundings more than model_bound knows. */
static double large_bound(moe_route_dtype dtype) { return 1.4 * model_bound(dtype); }

/* Errors of some of the first tokens, and of the last ones. */
static void check_output(const model *m, const model_input *input, const model_output *output, const char *what) {
    const uint32_t n = input->num_tokens, first = n < 6 ? n : 6, last = n < 3 ? n : 3;
    double error = model_error(m, input, output, 0, first);
    CHECK(error <= large_bound(m->spec.dtype), "%s: relative error %.3g", what, error);
    error = model_error(m, input, output, n - last, n);
    CHECK(error <= large_bound(m->spec.dtype), "%s: relative error %.3g in the last tokens", what, error);
}

static void check_launches(const model *m, uint32_t num_tokens, uint32_t tile_rows) {
    moe_route_plan plan;
    char tile[32];
    if (device.kind == MOE_ROUTE_DEVICE_CPU) return;
    snprintf(tile, sizeof tile, "TILE_ROWS=%u ", tile_rows);
    CHECK(moe_route_layer_explain(m->layer, MOE_ROUTE_OPERATION_LAYER, num_tokens, &plan) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(plan.num_launches > 3 && strncmp(plan.launches[plan.num_launches - 3].kernel, "grouped", 7) == 0, "%u tokens don't go through grouped.cu", num_tokens);
    CHECK(strstr(plan.launches[plan.num_launches - 2].variant, tile), "%u tokens don't take tiles of %u rows: %s", num_tokens, tile_rows, plan.launches[plan.num_launches - 2].variant);
}

static void check_model(const model_spec *from, uint32_t num_tokens, uint64_t seed, const char *what) {
    model_spec spec = *from;
    model m;
    model_input input;
    model_output output;
    test_random random;
    const int32_t valid = (int32_t)num_tokens / 6; /* the rest is padding, where time counts */
    float *logits;
    void *x;
    spec.max_tokens = num_tokens;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    random_seed(&random, seed);
    model_create(&device, &spec, seed + 1, &m);
    REQUIRE(m.layer, "%s: no layer", what);
    model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
    if (small_size) input.num_valid = &valid;
    CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
    if (small_size) input.num_tokens = (uint32_t)valid;
    check_output(&m, &input, &output, what);
    model_output_free(&output);
    free(logits);
    free(x);
    model_destroy(&device, &m);
}

TEST(large_batches_match_their_definition_in_every_format) {
    uint32_t i;
    for (i = 0; i < NUM_CASES(format_cases); i++) {
        const format_case *f = &format_cases[i];
        model_spec spec;
        char what[96];
        if (small_size && !f->in_small) continue;
        memset(&spec, 0, sizeof spec);
        spec.num_experts = 3;
        spec.top_k = 2;
        spec.hidden_size = !small_size || f->inner < 300 ? f->inner : f->inner % 256 == 0 ? 256 : 160;
        spec.intermediate_size = f->inner % 256 == 0 ? 256 : f->inner % 32 == 0 ? 96 : f->format == MOE_ROUTE_FORMAT_NVFP4 ? 48 : 70;
        spec.dtype = i % 2 ? MOE_ROUTE_F16 : MOE_ROUTE_BF16;
        spec.format = f->format;
        spec.group_size = f->group_size;
        spec.scales_dtype = f->scales_dtype;
        spec.codes = f->codes;
        spec.zero_points = f->zero_points;
        spec.group_rows = f->group_rows;
        spec.global_scales = f->global_scales;
        spec.interleaved = i / 2 % 2 != 0;
        snprintf(what, sizeof what, "format case %u, dtype %d", i, (int)spec.dtype);
        check_model(&spec, large_tokens(&spec), 300 + i, what);
    }
}

/* Beyond what one launch routes, yet with few rows an expert, though one has many. */
TEST(few_rows_have_the_bits_of_small_batches) {
    static const moe_route_format formats[] = {MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_BF16};
    uint32_t i, t;
    for (i = 0; i < 2; i++) {
        model_spec spec;
        model m;
        model_input input, part;
        model_output all, some;
        test_random random;
        moe_route_plan plan;
        uint32_t num_tokens;
        float *logits;
        void *x;
        memset(&spec, 0, sizeof spec);
        spec.num_experts = 100;
        spec.top_k = 8;
        spec.hidden_size = spec.intermediate_size = 64;
        spec.dtype = i == 0 ? MOE_ROUTE_F16 : MOE_ROUTE_BF16;
        spec.format = formats[i];
        spec.group_size = i == 0 ? 32 : 0;
        spec.max_tokens = 75;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        random_seed(&random, 90 + i);
        model_create(&device, &spec, 91 + i, &m);
        REQUIRE(m.layer, "no layer");
        num_tokens = moer_layer_few_pairs(m.layer) / spec.top_k < 75 ? moer_layer_few_pairs(m.layer) / spec.top_k : 75;
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        for (t = 0; t < num_tokens; t++) logits[(size_t)t * spec.num_experts + 7] = 9.0f;
        CHECK(model_run(&device, &m, &input, &all) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_LAYER, num_tokens, &plan) == MOE_ROUTE_OK, "%s", device_message(&device));
        if (device.kind != MOE_ROUTE_DEVICE_CPU) CHECK(strcmp(plan.launches[plan.num_launches - 2].kernel, "grouped") != 0, "%u tokens go through grouped.cu", num_tokens);
        for (t = 0; t + 5 <= num_tokens; t += 31) {
            part = input;
            part.num_tokens = 5;
            part.logits = logits + (size_t)t * spec.num_experts;
            part.x = (const char *)x + (size_t)t * spec.hidden_size * 2;
            CHECK(model_run(&device, &m, &part, &some) == MOE_ROUTE_OK, "%s", device_message(&device));
            CHECK_BYTES(some.y, (const char *)all.y + (size_t)t * spec.hidden_size * 2, 5 * (size_t)spec.hidden_size * 2, "y of a small batch");
            model_output_free(&some);
        }
        model_output_free(&all);
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
}

TEST(large_batches_heed_every_choice) {
    uint32_t i;
    for (i = 0; i < NUM_CASES(choice_cases); i++) {
        char what[64];
        snprintf(what, sizeof what, "choices %u", i);
        if (choice_cases[i].spec.dtype != MOE_ROUTE_F32) check_model(&choice_cases[i].spec, large_tokens(&choice_cases[i].spec), 400 + i, what);
    }
    for (i = 0; i < NUM_CASES(layer_cases); i++) {
        const model_spec *spec = &layer_cases[i].spec;
        char what[64];
        snprintf(what, sizeof what, "layer %u", i);
        if (small_size && i != 6 && i != 7) continue; /* copied weights, and rows of odd sizes */
        if (device.kind == MOE_ROUTE_DEVICE_CPU && (size_t)spec->hidden_size * spec->intermediate_size > 100000) continue;
        check_model(spec, large_tokens(spec), 500 + i, what);
    }
}

static const model_spec tiled[] = {
    {.num_experts = 44, .top_k = 4, .hidden_size = 64, .intermediate_size = 72, .dtype = MOE_ROUTE_BF16, .format = MOE_ROUTE_FORMAT_BF16},
    {.num_experts = 44, .top_k = 4, .hidden_size = 160, .intermediate_size = 64, .dtype = MOE_ROUTE_F16, .format = MOE_ROUTE_FORMAT_INT4, .group_size = 32, .bias_dtype = MOE_ROUTE_F16},
};

/* Tiles of 32, 64 and 128 rows give the same bits. Those of 32 are met where weights aren't quantized, or before compute capability 9.0. */
TEST(large_rows_do_not_depend_on_the_batch) {
    static const uint32_t all_sizes[2][2] = {{140, 190}, {290, 330}}, all_tiles[2][2] = {{32, 64}, {64, 64}};
    enum { TOKENS = 455 };
    uint32_t i, s;
    for (i = 0; i < NUM_CASES(tiled); i++) {
        const int bulk = i == 1 && device.context->target >= 90;
        const uint32_t *const sizes = all_sizes[bulk], *const tiles = all_tiles[bulk];
        model_spec spec = tiled[i];
        model m;
        model_input input, part;
        model_output all, some;
        test_random random;
        float *logits;
        void *x;
        const size_t row = (size_t)spec.hidden_size * 2;
        random_seed(&random, 600 + i);
        spec.max_tokens = TOKENS;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        model_create(&device, &spec, 610 + i, &m);
        REQUIRE(m.layer, "no layer");
        model_random_input(&random, &spec, TOKENS, &input, &logits, &x);
        check_launches(&m, TOKENS, 128);
        CHECK(model_run(&device, &m, &input, &all) == MOE_ROUTE_OK, "%s", device_message(&device));
        check_output(&m, &input, &all, "tiles of 128 rows");
        for (s = 0; s < 2; s++) {
            const uint32_t first = s * 100;
            part = input;
            part.num_tokens = sizes[s];
            part.logits = logits + (size_t)first * spec.num_experts;
            part.x = (const char *)x + first * row;
            check_launches(&m, sizes[s], tiles[s]);
            CHECK(model_run(&device, &m, &part, &some) == MOE_ROUTE_OK, "%s", device_message(&device));
            CHECK_BYTES(some.y, (const char *)all.y + first * row, sizes[s] * row, "y of a smaller batch");
            model_output_free(&some);
        }
        model_output_free(&all);
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
}

/* Given ids: all to one expert, half of the experts without a token, ids out of range and repeated; all experts or a range of them;
   with and without padding. */
TEST(large_batches_take_any_ids) {
    uint32_t i;
    for (i = 0; i < 8; i++) {
        model_spec spec = tiled[i % 2];
        const uint32_t num_tokens = large_tokens(&spec) + 30, k = spec.top_k;
        const int32_t valid = (int32_t)num_tokens - 9;
        model m;
        model_input input;
        model_output output;
        test_random random;
        int32_t *ids = (int32_t *)model_alloc((size_t)num_tokens * k * 4);
        float *logits, *weights = (float *)model_alloc((size_t)num_tokens * k * 4);
        void *x;
        uint32_t p;
        char what[64];
        snprintf(what, sizeof what, "ids %u", i);
        spec.num_experts = 8;
        spec.max_tokens = num_tokens;
        spec.operations = MOE_ROUTE_OPERATION_EXPERTS;
        if (i >= 4) {
            spec.first_expert = 2;
            spec.num_local = 3;
        }
        random_seed(&random, 700 + i);
        model_create(&device, &spec, 710 + i, &m);
        REQUIRE(m.layer, "no layer");
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        for (p = 0; p < num_tokens * k; p++) {
            static const int32_t wild[] = {-1, 8, 2147483647, -2147483647 - 1};
            ids[p] = i % 4 == 0 ? 3 : i % 4 == 1 ? (int32_t)random_below(&random, 4) * 2 : random_below(&random, 5) == 0 ? wild[random_below(&random, 4)] : (int32_t)random_below(&random, 8);
            weights[p] = random_normal(&random);
        }
        for (p = 0; p < k; p++) ids[k + p] = -1;
        input.logits = NULL;
        input.ids = ids;
        input.weights = weights;
        if (i % 4 == 3) input.num_valid = &valid;
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        for (p = 0; p < spec.hidden_size; p++) CHECK(output.y_values[spec.hidden_size + p] == 0.0f, "%s: a token without experts gives %g", what, (double)output.y_values[spec.hidden_size + p]);
        for (p = (uint32_t)valid * spec.hidden_size; input.num_valid && p < num_tokens * spec.hidden_size; p++)
            if (!CHECK(output.y_values[p] == 0.0f, "%s: padding gives %g", what, (double)output.y_values[p])) break;
        if (input.num_valid) input.num_tokens = (uint32_t)valid;
        check_output(&m, &input, &output, what);
        model_output_free(&output);
        free(ids);
        free(weights);
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
}

/* Thousands of tokens, the sizes of real models but for the number of experts: the host holds their weights in f32, too. */
TEST(large_batches_of_real_sizes) {
    static const model_spec real[] = {
        {.num_experts = 32, .top_k = 8, .hidden_size = 2048, .intermediate_size = 512, .dtype = MOE_ROUTE_BF16, .format = MOE_ROUTE_FORMAT_BF16},
        {.num_experts = 32, .top_k = 8, .hidden_size = 2048, .intermediate_size = 512, .dtype = MOE_ROUTE_BF16, .format = MOE_ROUTE_FORMAT_INT4, .group_size = 64},
        {.num_experts = 4, .top_k = 2, .hidden_size = 2880, .intermediate_size = 2880, .dtype = MOE_ROUTE_BF16, .format = MOE_ROUTE_FORMAT_MXFP4, .interleaved = 1, .bias_dtype = MOE_ROUTE_BF16},
        {.num_experts = 16, .top_k = 8, .hidden_size = 2816, .intermediate_size = 704, .dtype = MOE_ROUTE_F16, .format = MOE_ROUTE_FORMAT_GGUF_Q4_0},
    };
    uint32_t i;
    if (small_size || device.kind == MOE_ROUTE_DEVICE_CPU) SKIP("too slow here");
    for (i = 0; i < NUM_CASES(real); i++) {
        char what[64];
        snprintf(what, sizeof what, "real size %u", i);
        check_model(&real[i], 4096, 800 + i, what);
    }
}

/* x, y and the rows between the matmuls have more than 2^31 elements. All tokens are alike but for two groups of eight, one at each end, which have
   the same activations as each other: what is right at the start is right at the end. */
TEST(large_batches_beyond_32_bits) {
    enum { TOKENS = 1048576, HIDDEN = 2304, ENDS = 8 };
    const size_t row = (size_t)HIDDEN * 2;
    model_spec spec = {.num_experts = 5, .top_k = 2, .hidden_size = HIDDEN, .intermediate_size = 64, .dtype = MOE_ROUTE_BF16, .format = MOE_ROUTE_FORMAT_INT8, .group_size = 64};
    model m;
    model_input input;
    model_output first;
    test_random random;
    moe_route_layer_args args;
    device_buffer x, y, ids, weights, workspace, part;
    size_t size = 0;
    float *logits, *host_weights;
    int32_t *host_ids;
    void *host_x, *host_y;
    uint32_t p;
    if (small_size || device.kind == MOE_ROUTE_DEVICE_CPU) SKIP("too slow here");
    random_seed(&random, 900);
    spec.max_tokens = TOKENS;
    spec.operations = MOE_ROUTE_OPERATION_EXPERTS;
    model_create(&device, &spec, 901, &m);
    REQUIRE(m.layer, "no layer");
    model_random_input(&random, &spec, ENDS, &input, &logits, &host_x);
    host_ids = (int32_t *)model_alloc((size_t)TOKENS * 8);
    host_weights = (float *)model_alloc((size_t)TOKENS * 8);
    for (p = 0; p < TOKENS * 2u; p++) {
        const uint32_t from = p >= (TOKENS - ENDS) * 2u ? p - (TOKENS - ENDS) * 2u : p;
        host_ids[p] = from == p ? (int32_t)random_below(&random, 5) : host_ids[from];
        host_weights[p] = from == p ? random_normal(&random) : host_weights[from];
    }
    x = device_create_aligned(&device, TOKENS * row, 256);
    y = device_create_aligned(&device, TOKENS * row, 256);
    device_fill(&device, &x, 0x3c);
    part = x;
    part.size = ENDS * row;
    device_upload(&device, &part, host_x, ENDS * row);
    part.address += (TOKENS - ENDS) * row;
    device_upload(&device, &part, host_x, ENDS * row);
    ids = device_create_from(&device, host_ids, (size_t)TOKENS * 8);
    weights = device_create_from(&device, host_weights, (size_t)TOKENS * 8);
    CHECK(moe_route_layer_workspace_size(m.layer, TOKENS, &size) == MOE_ROUTE_OK, "%s", device_message(&device));
    workspace = device_create_workspace(&device, size);
    memset(&args, 0, sizeof args);
    args.num_tokens = TOKENS;
    args.ids = ids.address;
    args.weights = weights.address;
    args.x = x.address;
    args.y = y.address;
    args.workspace = workspace.address;
    args.workspace_size = size;
    args.stream = device.stream;
    CHECK(moe_route_layer_run(m.layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    host_y = model_alloc(2 * ENDS * row);
    part = y;
    part.size = ENDS * row;
    device_download(&device, host_y, &part, ENDS * row);
    part.address += (TOKENS - ENDS) * row;
    device_download(&device, (char *)host_y + ENDS * row, &part, ENDS * row);
    CHECK_BYTES((const char *)host_y + ENDS * row, host_y, ENDS * row, "y of the last tokens");
    memset(&first, 0, sizeof first);
    first.ids = host_ids;
    first.weights = host_weights;
    first.y_values = (float *)model_alloc(ENDS * (size_t)HIDDEN * 4);
    quantize_convert(first.y_values, QUANTIZE_F32, host_y, QUANTIZE_BF16, ENDS * (size_t)HIDDEN);
    check_output(&m, &input, &first, "the first tokens");
    free(first.y_values);
    free(logits);
    free(host_x);
    free(host_y);
    free(host_ids);
    free(host_weights);
    device_destroy(&device, &x);
    device_destroy(&device, &y);
    device_destroy(&device, &ids);
    device_destroy(&device, &weights);
    device_destroy(&device, &workspace);
    model_destroy(&device, &m);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    device_open_wanted(&device);
    RUN(large_batches_match_their_definition_in_every_format);
    RUN(few_rows_have_the_bits_of_small_batches);
    RUN(large_batches_heed_every_choice);
    RUN(large_rows_do_not_depend_on_the_batch);
    RUN(large_batches_take_any_ids);
    RUN(large_batches_of_real_sizes);
    RUN(large_batches_beyond_32_bits);
    device_close(&device);
    return test_end();
}
