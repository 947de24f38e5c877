/*
  test_layer.c: the fused layer and the expert operations: against f64 for every format, dtype, choice and odd sizes; and for
  what must not change a result: the other rows of the batch, the path that the batch takes, a graph's replay, other streams
  and threads.
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

#define LAYER_AND_EXPERTS (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS)

static const uint32_t layer_tokens[] = {0, 1, 2, 3, 8, 9, 16, 17, 65, 200};

static void describe(char *what, size_t size, const model_spec *spec, uint32_t num_tokens) {
    snprintf(what, size, "E %u k %u H %u I %u dtype %d format %d group %u activation %d T %u", spec->num_experts, spec->top_k, spec->hidden_size, spec->intermediate_size, (int)spec->dtype,
             (int)spec->format, spec->group_size, (int)spec->choices.activation, num_tokens);
}

static void check_definition(const layer_case *c, uint32_t max_tokens, uint64_t seed) {
    model_spec spec = c->spec;
    model m;
    test_random random;
    uint32_t n;
    spec.max_tokens = max_tokens;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    random_seed(&random, seed);
    model_create(&device, &spec, seed + 10, &m);
    for (n = 0; m.layer && n < sizeof layer_tokens / sizeof layer_tokens[0]; n++) {
        const uint32_t num_tokens = layer_tokens[n];
        model_input input;
        model_output output;
        float *logits;
        void *x;
        char what[160];
        double error;
        if (num_tokens > spec.max_tokens || (device.kind == MOE_ROUTE_DEVICE_CPU && num_tokens > 17 && (size_t)spec.hidden_size * spec.intermediate_size > 300000)) continue;
        describe(what, sizeof what, &spec, num_tokens);
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        error = num_tokens ? model_error(&m, &input, &output, 0, num_tokens < 17 ? num_tokens : 17) : 0;
        CHECK(error <= model_bound(spec.dtype), "%s: relative error %.3g", what, error);
        if (num_tokens > 17) {
            error = model_error(&m, &input, &output, num_tokens - 3, num_tokens);
            CHECK(error <= model_bound(spec.dtype), "%s: relative error %.3g in the last tokens", what, error);
        }
        model_output_free(&output);
        free(logits);
        free(x);
    }
    model_destroy(&device, &m);
}

TEST(layer_matches_its_definition) {
    uint32_t i;
    for (i = 0; i < NUM_CASES(layer_cases); i++)
        if (!small_size || layer_cases[i].in_small) check_definition(&layer_cases[i], small_size && i >= 2 ? 65 : 200, 10 + i);
    for (i = 0; i < NUM_CASES(choice_cases); i++)
        if (!small_size || choice_cases[i].in_small) check_definition(&choice_cases[i], small_size && i >= 2 ? 65 : 200, 110 + i);
}

/* The bounds are tight enough to tell every choice from its neighbours: a result within the bound of one is outside that of
   each other. */
TEST(layer_heeds_every_choice) {
    enum { NUM_OTHERS = 13 };
    uint32_t i, n;
    for (i = 0; i < NUM_CASES(choice_cases); i++) {
        model_spec spec = choice_cases[i].spec;
        const model_choices *c = &choice_cases[i].spec.choices;
        model m;
        model_input input;
        model_output output;
        test_random random;
        float *logits;
        void *x;
        if (small_size && !choice_cases[i].in_small) continue;
        spec.max_tokens = 16;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        random_seed(&random, 210 + i);
        model_create(&device, &spec, 220 + i, &m);
        REQUIRE(m.layer, "no layer");
        model_random_input(&random, &spec, 16, &input, &logits, &x);
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK(model_error(&m, &input, &output, 0, 16) <= model_bound(spec.dtype), "choices %u: relative error %.3g", i, model_error(&m, &input, &output, 0, 16));
        for (n = 0; n < NUM_OTHERS; n++) {
            static const char *const names[NUM_OTHERS] = {"SILU", "GELU_TANH", "GELU_ERF", "RELU2", "SITU", "alpha", "up_offset", "clamp", "clamp_position", "weight_on_input", "num_identity",
                                                            "interleaved", "situ_up_beta"};
            model other = m;
            model_choices *o = &other.spec.choices;
            double error;
            if (n < 5) o->activation = (moe_route_activation)n;
            if (n == 5) o->alpha = 0;
            if (n == 6) o->up_offset = 0;
            if (n == 7) o->clamp = 0;
            if (n == 8 && c->clamp != 0) o->clamp_position = c->clamp_position == MOE_ROUTE_CLAMP_BEFORE ? MOE_ROUTE_CLAMP_AFTER : MOE_ROUTE_CLAMP_BEFORE;
            if (n == 9) o->weight_on_input = !c->weight_on_input;
            if (n == 10) o->num_identity = 0;
            if (n == 11 && !c->no_gate) other.spec.interleaved = !spec.interleaved;
            if (n == 12) o->situ_up_beta = 0;
            if (memcmp(o, c, sizeof *o) == 0 && other.spec.interleaved == spec.interleaved) continue;
            error = model_error(&other, &input, &output, 0, 16);
            CHECK(error > 3 * model_bound(spec.dtype), "choices %u: another %s differs by %.3g alone", i, names[n], error);
        }
        model_output_free(&output);
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
}

/* A token's result has the same bits alone, in any batch, by the fused path, without it, and in a large batch where that has the same
   kernels; test_large.c has the others. */
TEST(layer_rows_do_not_depend_on_the_batch) {
    static const int cases[] = {0, 1, 18, 21, 2, 6, 16, 17, 19, 22, 23};
    uint32_t i, t;
    for (i = 0; i < (small_size ? 4u : 11u); i++) {
        model_spec spec = layer_cases[cases[i]].spec;
        const int grouped = spec.dtype != MOE_ROUTE_F32;
        const uint32_t num_tokens = (grouped ? MOER_SMALL_PAIRS : 560) / spec.top_k; /* 512 pairs are the most for one launch */
        model m, separate;
        model_input input, part;
        model_output all, some;
        test_random random;
        float *logits;
        void *x;
        size_t row;
        random_seed(&random, 77 + i);
        spec.max_tokens = num_tokens;
        model_create(&device, &spec, 5, &m);
        CHECK(!m.layer || m.layer->grouped == grouped, "case %d: grouped is %d", cases[i], m.layer->grouped);
        spec.fused_combine = MOE_ROUTE_OFF;
        model_create(&device, &spec, 5, &separate);
        REQUIRE(m.layer && separate.layer, "no layer");
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        row = (size_t)spec.hidden_size * model_dtype_size(spec.dtype);
        CHECK(model_run(&device, &m, &input, &all) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (t = 0; t < 40; t += t % 3 + 1) {
            const uint32_t sizes[] = {1, 2, 8, 16, 100};
            uint32_t s;
            for (s = 0; s < 5; s++) {
                part = input;
                part.num_tokens = sizes[s];
                part.logits = logits + (size_t)t * spec.num_experts;
                part.x = (const char *)x + t * row;
                if ((small_size && sizes[s] > 8) || t + sizes[s] > num_tokens) continue;
                CHECK(model_run(&device, s % 2 ? &separate : &m, &part, &some) == MOE_ROUTE_OK, "%s", device_message(&device));
                CHECK_BYTES(some.y, (const char *)all.y + t * row, sizes[s] * row, "y of a smaller batch");
                model_output_free(&some);
            }
            if ((small_size || i >= 4) && t > 6) break;
        }
        model_output_free(&all);
        free(logits);
        free(x);
        model_destroy(&device, &m);
        model_destroy(&device, &separate);
    }
}

/* Ids from the caller: repeats count each time, ids out of range contribute nothing. */
TEST(layer_takes_given_ids) {
    uint32_t n;
    model_spec spec = layer_cases[0].spec;
    model m;
    test_random random;
    spec.max_tokens = 160;
    spec.operations = MOE_ROUTE_OPERATION_EXPERTS;
    random_seed(&random, 31);
    model_create(&device, &spec, 6, &m);
    for (n = 0; m.layer && n < 3; n++) {
        const uint32_t num_tokens = n == 0 ? 5 : n == 1 ? 16 : 160;
        model_input input;
        model_output output;
        float *logits, *weights = (float *)model_alloc(num_tokens * 16);
        int32_t *ids = (int32_t *)model_alloc(num_tokens * 16);
        void *x;
        uint32_t p;
        double error;
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        for (p = 0; p < num_tokens * 4; p++) {
            static const int32_t wild[] = {-1, 16, 2147483647, -2147483647 - 1};
            ids[p] = p % 5 == 3 ? wild[p / 5 % 4] : p % 7 == 0 ? 3 : (int32_t)random_below(&random, 16);
            weights[p] = random_normal(&random);
        }
        for (p = 0; p < 4; p++) ids[4 + p] = -1; /* a token without experts: zeros */
        input.logits = NULL;
        input.ids = ids;
        input.weights = weights;
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
        error = model_error(&m, &input, &output, 0, num_tokens < 20 ? num_tokens : 20);
        CHECK(error <= model_bound(spec.dtype), "T %u: relative error %.3g", num_tokens, error);
        for (p = 0; p < spec.hidden_size; p++) CHECK(output.y_values[spec.hidden_size + p] == 0.0f, "a token without experts gives %g", (double)output.y_values[spec.hidden_size + p]);
        CHECK_INTS(output.ids, ids, num_tokens * 4, "the given ids");
        model_output_free(&output);
        free(logits);
        free(x);
        free(ids);
        free(weights);
    }
    model_destroy(&device, &m);
}

/* Padding rows give zeros, and change nothing else. */
TEST(layer_leaves_padding_out) {
    uint32_t n;
    model_spec spec = layer_cases[1].spec;
    model m;
    test_random random;
    spec.max_tokens = 160;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    random_seed(&random, 32);
    model_create(&device, &spec, 8, &m);
    for (n = 0; m.layer && n < 4; n++) {
        const uint32_t num_tokens = n < 3 ? 12 : 160;
        const int32_t valid = n == 0 ? 0 : n == 1 ? 7 : n == 2 ? 50 : 131;
        const uint32_t real = (uint32_t)valid < num_tokens ? (uint32_t)valid : num_tokens;
        const size_t row = (size_t)spec.hidden_size * 2;
        model_input input;
        model_output output, whole;
        float *logits;
        void *x;
        uint32_t i;
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        for (i = real; i < num_tokens; i++) { /* what stands in padding must not matter */
            logits[(size_t)i * spec.num_experts] = NAN;
            memset((char *)x + i * row, 0xff, row);
        }
        input.num_valid = &valid;
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (i = real * spec.hidden_size; i < num_tokens * spec.hidden_size; i++)
            if (!CHECK(output.y_values[i] == 0.0f, "padding gives %g", (double)output.y_values[i])) break;
        if (real) {
            input.num_valid = NULL;
            input.num_tokens = real;
            CHECK(model_run(&device, &m, &input, &whole) == MOE_ROUTE_OK, "%s", device_message(&device));
            CHECK_BYTES(output.y, whole.y, real * row, "y beside padding");
            model_output_free(&whole);
        }
        model_output_free(&output);
        free(logits);
        free(x);
    }
    model_destroy(&device, &m);
}

/* A token of NaN gives NaN, and changes nothing else. */
TEST(layer_keeps_nan_to_its_token) {
    static const uint32_t cases[] = {0, 2, 5, 10}; /* of choice_cases */
    uint32_t i;
    for (i = 0; i < 4; i++) {
        enum { TOKENS = 5, BROKEN = 2 };
        model_spec spec = choice_cases[cases[i]].spec;
        const size_t row = (size_t)spec.hidden_size * model_dtype_size(spec.dtype);
        model m;
        model_input input;
        model_output whole, broken;
        test_random random;
        float *logits;
        void *x;
        uint32_t n;
        random_seed(&random, 33 + i);
        spec.max_tokens = TOKENS;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        model_create(&device, &spec, 34 + i, &m);
        REQUIRE(m.layer, "no layer");
        model_random_input(&random, &spec, TOKENS, &input, &logits, &x);
        for (n = 0; n < spec.num_experts; n++) logits[n] = logits[BROKEN * spec.num_experts + n]; /* another token shares its experts */
        CHECK(model_run(&device, &m, &input, &whole) == MOE_ROUTE_OK, "%s", device_message(&device));
        memset((char *)x + BROKEN * row, 0xff, row);
        CHECK(model_run(&device, &m, &input, &broken) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK_BYTES(broken.y, whole.y, BROKEN * row, "y before NaN");
        CHECK_BYTES((char *)broken.y + (BROKEN + 1) * row, (char *)whole.y + (BROKEN + 1) * row, (TOKENS - BROKEN - 1) * row, "y after NaN");
        for (n = 0; n < spec.hidden_size; n++)
            if (!CHECK(broken.y_values[BROKEN * spec.hidden_size + n] != broken.y_values[BROKEN * spec.hidden_size + n], "case %u: NaN gives %g", i, (double)broken.y_values[BROKEN * spec.hidden_size + n]))
                break;
        model_output_free(&whole);
        model_output_free(&broken);
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
}

/* Two halves of the experts give the parts of one sum. */
TEST(layer_computes_its_range_of_experts) {
    model_spec spec = layer_cases[2].spec; /* f32: the sum of the parts is the whole but for f32 rounding */
    model whole, parts[3];
    static const uint32_t first[3] = {0, 5, 11}, count[3] = {5, 6, 0};
    const size_t matrix = (size_t)spec.hidden_size * spec.intermediate_size;
    model_input input;
    model_output all, part;
    test_random random;
    float *logits, *sum;
    void *x;
    uint32_t i, n;
    random_seed(&random, 41);
    spec.max_tokens = 16;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    model_create(&device, &spec, 9, &whole);
    REQUIRE(whole.layer, "no layer");
    model_random_input(&random, &spec, 16, &input, &logits, &x);
    CHECK(model_run(&device, &whole, &input, &all) == MOE_ROUTE_OK, "%s", device_message(&device));
    sum = (float *)model_alloc(16 * spec.hidden_size * 4);
    for (n = 0; n < 16 * spec.hidden_size; n++) sum[n] = 0;
    for (i = 0; i < 3; i++) {
        moe_route_layer_desc desc;
        memset(&parts[i], 0, sizeof parts[i]);
        parts[i].spec = spec;
        parts[i].spec.first_expert = first[i];
        parts[i].spec.num_local = count[i];
        model_describe(&parts[i].spec, &desc);
        desc.experts.gate_up.data = whole.gate_up.data_buffer.address + first[i] * matrix; /* INT4: 2 * matrix / 2 bytes an expert */
        desc.experts.down.data = whole.down.data_buffer.address + first[i] * matrix / 2;
        desc.experts.gate_up.scales = whole.gate_up.scales_buffer.address + first[i] * 2 * matrix / spec.group_size * 4;
        desc.experts.down.scales = whole.down.scales_buffer.address + first[i] * matrix / spec.group_size * 4;
        desc.experts.gate_up.bias = whole.gate_up.bias_buffer.address + first[i] * 2 * spec.intermediate_size * 4;
        desc.experts.down.bias = whole.down.bias_buffer.address + first[i] * spec.hidden_size * 4;
        CHECK(moe_route_layer_create(device.context, &desc, &parts[i].layer) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK(model_run(&device, &parts[i], &input, &part) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK_INTS(part.ids, all.ids, 64, "ids of a part");
        for (n = 0; n < 16 * spec.hidden_size; n++) sum[n] += part.y_values[n];
        model_output_free(&part);
        moe_route_layer_destroy(parts[i].layer);
    }
    CHECK(relative_error(sum, all.y_values, 16 * spec.hidden_size) < 1e-6, "the parts differ from the whole by %.3g", relative_error(sum, all.y_values, 16 * spec.hidden_size));
    model_output_free(&all);
    free(sum);
    free(logits);
    free(x);
    model_destroy(&device, &whole);
}

/* ---- the operations on their own ---- */

static void check_matmul(const model *m, moe_route_matrix which, int per_pair, uint32_t num_tokens, uint64_t seed) {
    const model_matrix *matrix = which == MOE_ROUTE_MATRIX_GATE_UP ? &m->gate_up : &m->down;
    const moe_route_dtype dtype = m->spec.dtype;
    const uint32_t top_k = m->spec.top_k, num_pairs = num_tokens * top_k, x_rows = per_pair ? num_pairs : num_tokens;
    float *x = (float *)model_alloc((size_t)x_rows * matrix->inner * 4), *out = (float *)model_alloc((size_t)num_pairs * matrix->rows * 4), *want = (float *)model_alloc((size_t)num_pairs * matrix->rows * 4);
    int32_t *ids = (int32_t *)model_alloc(num_pairs * 4);
    void *stored_x, *stored_out = model_alloc((size_t)num_pairs * matrix->rows * model_dtype_size(dtype));
    test_random random;
    uint32_t p, n;
    double error;
    random_seed(&random, seed);
    stored_x = model_random_array(&random, (size_t)x_rows * matrix->inner, dtype, 1.0f, x);
    for (p = 0; p < num_pairs; p++) ids[p] = random_below(&random, 6) ? (int32_t)random_below(&random, m->spec.num_experts) : p % 2 ? -1 : (int32_t)m->spec.num_experts + 3;
    CHECK(device_matmul(&device, m->layer, which, per_pair, num_tokens, num_pairs, ids, stored_x, (size_t)x_rows * matrix->inner * model_dtype_size(dtype), stored_out,
                        (size_t)num_pairs * matrix->rows * model_dtype_size(dtype)) == MOE_ROUTE_OK, "%s", device_message(&device));
    quantize_convert(out, QUANTIZE_F32, stored_out, model_storage(dtype), (size_t)num_pairs * matrix->rows);
    for (p = 0; p < num_pairs; p++) {
        const float *row = x + (size_t)(per_pair ? p : p / top_k) * matrix->inner;
        for (n = 0; n < matrix->rows; n++) {
            const size_t at = (size_t)p * matrix->rows + n;
            const int local = ids[p] >= 0 && ids[p] < (int32_t)m->spec.num_experts;
            want[at] = local ? (float)model_dot(matrix, (size_t)ids[p] * matrix->rows + n, row, 1.0) : 0.0f;
            if (!local && !CHECK(out[at] == 0.0f, "pair %u has no expert but out %g", p, (double)out[at])) break;
        }
    }
    error = relative_error(out, want, (size_t)num_pairs * matrix->rows);
    CHECK(error <= model_bound(dtype), "matrix %d T %u per_pair %d: relative error %.3g", (int)which, num_tokens, per_pair, error);
    free(x);
    free(out);
    free(want);
    free(ids);
    free(stored_x);
    free(stored_out);
}

TEST(matmul_matches_its_definition) {
    static const int cases[] = {0, 3, 6, 2, 5};
    uint32_t i;
    for (i = 0; i < (small_size ? 2u : 5u); i++) {
        model_spec spec = layer_cases[cases[i]].spec;
        model m;
        spec.max_tokens = small_size ? 16 : 180;
        spec.operations = MOE_ROUTE_OPERATION_MATMUL;
        model_create(&device, &spec, 60 + i, &m);
        if (m.layer) {
            check_matmul(&m, MOE_ROUTE_MATRIX_GATE_UP, 0, 1, 61);
            check_matmul(&m, MOE_ROUTE_MATRIX_GATE_UP, 0, 13, 62);
            check_matmul(&m, MOE_ROUTE_MATRIX_DOWN, 1, 13, 63);
            check_matmul(&m, MOE_ROUTE_MATRIX_GATE_UP, 1, 2, 64);
            if (!small_size) check_matmul(&m, MOE_ROUTE_MATRIX_DOWN, 1, 180, 65);
            if (!small_size) check_matmul(&m, MOE_ROUTE_MATRIX_GATE_UP, 0, 180, 66);
        }
        model_destroy(&device, &m);
    }
}

static void check_expand_and_combine(moe_route_dtype dtype, uint32_t hidden, uint32_t num_tokens, int in_pair_order) {
    const uint32_t top_k = 5, num_pairs = num_tokens * top_k;
    const size_t row = (size_t)hidden * model_dtype_size(dtype);
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_expand_args expand;
    moe_route_combine_args combine;
    float *x = (float *)model_alloc((size_t)num_tokens * hidden * 4), *rows = (float *)model_alloc((size_t)num_pairs * hidden * 4), *y = (float *)model_alloc((size_t)num_tokens * hidden * 4);
    float *want = (float *)model_alloc((size_t)num_tokens * hidden * 4), *weights = (float *)model_alloc(num_pairs * 4);
    int32_t *row_to_pair = (int32_t *)model_alloc(num_pairs * 4), *pair_to_row = (int32_t *)model_alloc(num_pairs * 4);
    void *stored_x, *stored_rows, *got = model_alloc(num_pairs * row);
    device_buffer x_buffer, map_buffer, rows_buffer, inverse_buffer, weight_buffer, y_buffer;
    test_random random;
    uint32_t p, n, t, j;
    random_seed(&random, hidden + num_tokens);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 10;
    desc.router.top_k = top_k;
    desc.experts.hidden_size = hidden;
    desc.experts.dtype = dtype;
    desc.max_tokens = num_tokens;
    desc.operations = MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE;
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    stored_x = model_random_array(&random, (size_t)num_tokens * hidden, dtype, 1.0f, x);
    stored_rows = model_random_array(&random, (size_t)num_pairs * hidden, dtype, 1.0f, rows);
    for (p = 0; p < num_pairs; p++) {
        row_to_pair[p] = p % 7 == 6 ? -1 : (int32_t)((p * 3) % num_pairs);
        pair_to_row[p] = p % 5 == 2 ? -1 : p % 11 == 3 ? (int32_t)num_pairs : (int32_t)((p * 7) % num_pairs);
        weights[p] = random_normal(&random);
    }
    x_buffer = device_create_aligned(&device, num_tokens * row, 16);
    rows_buffer = device_create_aligned(&device, num_pairs * row, 16);
    y_buffer = device_create_aligned(&device, num_tokens * row, 16);
    map_buffer = device_create_from(&device, row_to_pair, num_pairs * 4);
    inverse_buffer = device_create_from(&device, pair_to_row, num_pairs * 4);
    weight_buffer = device_create_from(&device, weights, num_pairs * 4);
    device_upload(&device, &x_buffer, stored_x, num_tokens * row);
    memset(&expand, 0, sizeof expand);
    expand.num_tokens = num_tokens;
    expand.x = x_buffer.address;
    expand.row_to_pair = map_buffer.address;
    expand.rows = rows_buffer.address;
    expand.stream = device.stream;
    CHECK(moe_route_expand(layer, &expand) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    device_download(&device, got, &rows_buffer, num_pairs * row);
    for (p = 0; p < num_pairs; p++) {
        void *zeros = calloc(1, row);
        if (!CHECK_BYTES((char *)got + p * row, row_to_pair[p] < 0 ? zeros : (char *)stored_x + (uint32_t)row_to_pair[p] / top_k * row, row, "an expanded row")) p = num_pairs;
        free(zeros);
    }
    device_upload(&device, &rows_buffer, stored_rows, num_pairs * row);
    memset(&combine, 0, sizeof combine);
    combine.num_tokens = num_tokens;
    combine.rows = rows_buffer.address;
    combine.pair_to_row = in_pair_order ? 0 : inverse_buffer.address;
    combine.weights = weight_buffer.address;
    combine.y = y_buffer.address;
    combine.stream = device.stream;
    CHECK(moe_route_combine(layer, &combine) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    device_download(&device, got, &y_buffer, num_tokens * row);
    quantize_convert(y, QUANTIZE_F32, got, model_storage(dtype), (size_t)num_tokens * hidden);
    for (t = 0; t < num_tokens; t++)
        for (n = 0; n < hidden; n++) {
            double sum = 0;
            for (j = 0; j < top_k; j++) {
                const int32_t r = in_pair_order ? (int32_t)(t * top_k + j) : pair_to_row[t * top_k + j];
                if (r >= 0 && r < (int32_t)num_pairs) sum += (double)weights[t * top_k + j] * (double)rows[(size_t)r * hidden + n];
            }
            want[(size_t)t * hidden + n] = (float)sum;
        }
    CHECK(relative_error(y, want, (size_t)num_tokens * hidden) <= model_bound(dtype) / 2, "dtype %d H %u T %u: relative error %.3g", (int)dtype, hidden, num_tokens, relative_error(y, want, (size_t)num_tokens * hidden));
    device_destroy(&device, &x_buffer);
    device_destroy(&device, &rows_buffer);
    device_destroy(&device, &y_buffer);
    device_destroy(&device, &map_buffer);
    device_destroy(&device, &inverse_buffer);
    device_destroy(&device, &weight_buffer);
    moe_route_layer_destroy(layer);
    free(x);
    free(rows);
    free(y);
    free(want);
    free(weights);
    free(row_to_pair);
    free(pair_to_row);
    free(stored_x);
    free(stored_rows);
    free(got);
}

TEST(expand_and_combine_match_their_definition) {
    check_expand_and_combine(MOE_ROUTE_BF16, 256, 9, 0);
    check_expand_and_combine(MOE_ROUTE_F16, 130, 1, 1);
    check_expand_and_combine(MOE_ROUTE_F32, 67, 17, 0);
    if (small_size) return;
    check_expand_and_combine(MOE_ROUTE_F32, 2048, 16, 1);
    check_expand_and_combine(MOE_ROUTE_F16, 33, 200, 0);
    check_expand_and_combine(MOE_ROUTE_BF16, 2880, 4, 0);
    check_expand_and_combine(MOE_ROUTE_BF16, 4, 20000, 0);
}

/* ---- graphs, streams, threads ---- */

TEST(layer_replays_in_a_graph) {
    model_spec spec = layer_cases[1].spec;
    model m;
    test_random random;
    uint32_t n;
    if (device.kind != MOE_ROUTE_DEVICE_GPU) SKIP("the CPU backend has no graphs");
    random_seed(&random, 81);
    spec.max_tokens = 160;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    model_create(&device, &spec, 82, &m);
    REQUIRE(m.layer, "no layer");
    for (n = 0; n < 3; n++) {
        const uint32_t num_tokens = n == 0 ? 1 : n == 1 ? 16 : 160;
        const size_t logits_size = (size_t)num_tokens * spec.num_experts * 4, x_size = (size_t)num_tokens * spec.hidden_size * 2;
        model_input input, fresh;
        model_call call;
        model_output replayed, direct;
        gpu_graph graph = NULL;
        float *logits, *fresh_logits;
        void *x, *fresh_x;
        uint32_t replay;
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        model_call_create(&device, &m, &input, &call);
        device_must(&device, gpu_capture_begin(&device.gpu, device.stream));
        CHECK(moe_route_layer_run(m.layer, &call.args) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK(moe_route_layer_run(m.layer, &call.args) == MOE_ROUTE_OK, "%s", device_message(&device)); /* twice: nothing is left behind */
        device_must(&device, gpu_capture_end(&device.gpu, device.stream, &graph));
        for (replay = 0; replay < 3; replay++) {
            model_random_input(&random, &spec, num_tokens, &fresh, &fresh_logits, &fresh_x);
            device_upload(&device, &call.logits, fresh_logits, logits_size);
            device_upload(&device, &call.x, fresh_x, x_size);
            device_fill(&device, &call.y, DEVICE_POISON);
            device_fill(&device, &call.workspace, DEVICE_POISON);
            device_must(&device, gpu_graph_launch(&device.gpu, graph, device.stream));
            model_call_fetch(&device, &m, &call, &replayed);
            CHECK(model_run(&device, &m, &fresh, &direct) == MOE_ROUTE_OK, "%s", device_message(&device));
            CHECK_BYTES(replayed.y, direct.y, x_size, "y of a replay");
            model_output_free(&replayed);
            model_output_free(&direct);
            free(fresh_logits);
            free(fresh_x);
        }
        device_must(&device, gpu_graph_destroy(&device.gpu, graph));
        model_call_destroy(&device, &call);
        free(logits);
        free(x);
    }
    model_destroy(&device, &m);
}

/* Many calls in flight on several streams, each with a workspace of its own, give what one call gives. */
TEST(layer_runs_on_several_streams) {
    enum { STREAMS = 4, ROUNDS = 25 };
    model_spec spec = layer_cases[0].spec;
    model m;
    model_input input[STREAMS];
    model_call call[STREAMS];
    model_output direct[STREAMS], again;
    moe_route_stream stream[STREAMS];
    float *logits[STREAMS];
    void *x[STREAMS];
    test_random random;
    uint32_t s, round;
    if (device.kind != MOE_ROUTE_DEVICE_GPU) SKIP("the CPU backend has no streams");
    random_seed(&random, 91);
    spec.max_tokens = 16;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    model_create(&device, &spec, 92, &m);
    REQUIRE(m.layer, "no layer");
    for (s = 0; s < STREAMS; s++) {
        model_random_input(&random, &spec, s == 0 ? 1 : s * 5, &input[s], &logits[s], &x[s]);
        CHECK(model_run(&device, &m, &input[s], &direct[s]) == MOE_ROUTE_OK, "%s", device_message(&device));
        model_call_create(&device, &m, &input[s], &call[s]);
        device_must(&device, gpu_stream_create(&device.gpu, &stream[s]));
        call[s].args.stream = stream[s];
    }
    for (round = 0; round < (small_size ? 2u : (uint32_t)ROUNDS); round++)
        for (s = 0; s < STREAMS; s++) CHECK(moe_route_layer_run(m.layer, &call[s].args) == MOE_ROUTE_OK, "%s", device_message(&device));
    for (s = 0; s < STREAMS; s++) {
        device_must(&device, gpu_stream_synchronize(&device.gpu, stream[s]));
        model_call_fetch(&device, &m, &call[s], &again);
        CHECK_BYTES(again.y, direct[s].y, call[s].y.size, "y of a busy stream");
        model_output_free(&again);
        model_output_free(&direct[s]);
        model_call_destroy(&device, &call[s]);
        device_must(&device, gpu_stream_destroy(&device.gpu, stream[s]));
        free(logits[s]);
        free(x[s]);
    }
    model_destroy(&device, &m);
}

/* ---- explaining ---- */

/* However many multiprocessors there are, and blocks of the matmuls on each: every bit stays, and the plan tells the launched grid. */
TEST(grids_do_not_change_a_result) {
    static const int cases[] = {0, 6, 3, 18};
    static const uint32_t multiprocessors[] = {1, 3, 1000, 7};
    const uint32_t own = device.context->num_multiprocessors;
    uint32_t i, n;
    if (device.kind == MOE_ROUTE_DEVICE_CPU) SKIP("the CPU backend has no grids");
    for (i = 0; i < 4; i++) {
        model_spec spec = layer_cases[cases[i]].spec;
        model m;
        model_input input;
        model_output expected, output;
        moe_route_plan plan;
        test_random random;
        float *logits;
        void *x;
        random_seed(&random, 810 + i);
        spec.max_tokens = 16;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        spec.fused_combine = i % 2 ? MOE_ROUTE_OFF : MOE_ROUTE_ON; /* OFF: the down matmul has such a grid, too */
        if (i == 1) spec.hidden_size = 1024;                       /* blocks of several warps */
        model_create(&device, &spec, 820 + i, &m);
        REQUIRE(m.layer, "no layer");
        model_random_input(&random, &spec, 16, &input, &logits, &x);
        CHECK(model_run(&device, &m, &input, &expected) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (n = 0; n < 4; n++) {
            moer_variant *variant = (moer_variant *)(uintptr_t)m.layer->gate_up_activated[0];
            const uint32_t distinct = moer_layer_max_distinct(m.layer, 16), shared = (uint32_t)variant->static_shared_bytes[0] + variant->dynamic_shared_bytes;
            const uint32_t tiles = (m.layer->gate_up.rows + 15) / 16 * distinct;
            const int resident = variant->resident_blocks[0];
            uint32_t blocks = n % 2 ? 1 : (uint32_t)resident;
            CHECK(resident > 0 && (uint64_t)resident * (shared + 1024) <= 262144, "%d blocks of %u bytes at once", resident, shared);
            device.context->num_multiprocessors = multiprocessors[n];
            if (n % 2) variant->resident_blocks[0] = 1; /* as where shared memory has no room for more */
            blocks *= multiprocessors[n];
            if (blocks > tiles) blocks = tiles;
            CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_LAYER, 16, &plan) == MOE_ROUTE_OK && plan.launches[1].grid[0] == blocks, "case %d: %u blocks on %u multiprocessors, not %u", cases[i],
                  plan.launches[1].grid[0], multiprocessors[n], blocks);
            CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
            CHECK_BYTES(output.y, expected.y, 16 * (size_t)spec.hidden_size * model_dtype_size(spec.dtype), "y by another grid");
            model_output_free(&output);
            variant->resident_blocks[0] = resident;
            device.context->num_multiprocessors = own;
        }
        model_output_free(&expected);
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
}

TEST(layer_explains_its_launches) {
    model_spec spec = layer_cases[0].spec;
    model m;
    moe_route_plan plan;
    moe_route_variant_info info;
    char text[4096], short_text[16];
    size_t size = 0, length;
    uint32_t i;
    spec.max_tokens = 200;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    model_create(&device, &spec, 3, &m);
    REQUIRE(m.layer, "no layer");
    CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_LAYER, 4, &plan) == MOE_ROUTE_OK, "%s", device_message(&device));
    moe_route_layer_workspace_size(m.layer, 4, &size);
    CHECK(plan.workspace_size == size, "workspace is %lu and %lu", (unsigned long)plan.workspace_size, (unsigned long)size);
    length = moe_route_plan_text(&plan, text, sizeof text);
    CHECK(length == strlen(text), "the text has %lu characters, not %lu", (unsigned long)strlen(text), (unsigned long)length);
    CHECK(moe_route_plan_text(&plan, short_text, sizeof short_text) == length && strlen(short_text) == 15, "a short text is %s", short_text);
    CHECK(moe_route_plan_text(&plan, NULL, 0) == length, "the length without a text differs");
    if (device.kind == MOE_ROUTE_DEVICE_CPU) {
        CHECK(plan.num_launches == 0 && moe_route_layer_num_variants(m.layer) == 0, "%u launches on the CPU", plan.num_launches);
    } else {
        const uint64_t gate_up_bytes = 16 * (2ull * 128 * 256 / 2 + 2ull * 128 * 4 * 2), down_bytes = 16 * (256ull * 128 / 2 + 256ull * 2 * 2);
        CHECK(plan.num_launches == 3, "%u launches instead of 3", plan.num_launches);
        const char *matmul = device.context->target >= 90 ? "matmul_bulk" : "matmul";
        CHECK(strcmp(plan.launches[0].kernel, "route") == 0 && strcmp(plan.launches[1].kernel, matmul) == 0 && strcmp(plan.launches[2].kernel, "down") == 0, "%s", text);
        CHECK(plan.launches[1].weight_bytes == gate_up_bytes && plan.launches[2].weight_bytes == down_bytes, "%s", text);
        CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_LAYER, 200, &plan) == MOE_ROUTE_OK && plan.num_launches == 5, "%u launches for 200 tokens", plan.num_launches);
        for (i = 0; i < moe_route_layer_num_variants(m.layer); i++)
            CHECK(moe_route_layer_variant(m.layer, i, &info) == MOE_ROUTE_OK && info.cubin_size > 0 && info.variant[0] && (info.origin == MOE_ROUTE_ORIGIN_CACHE || info.origin == MOE_ROUTE_ORIGIN_COMPILED),
                  "variant %u: %s", i, device_message(&device));
        CHECK(i >= 7, "%u variants", i);
        CHECK(moe_route_layer_variant(m.layer, i, &info) == MOE_ROUTE_ERROR_ARGUMENT, "a variant too many");
    }
    CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_MATMUL, 4, &plan) == MOE_ROUTE_ERROR_NOT_PREPARED, "an operation that isn't there is explained");
    CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_LAYER, 201, &plan) == MOE_ROUTE_ERROR_ARGUMENT, "too many tokens are explained");
    model_destroy(&device, &m);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    device_open_wanted(&device);
    RUN(layer_matches_its_definition);
    RUN(layer_heeds_every_choice);
    RUN(layer_rows_do_not_depend_on_the_batch);
    RUN(layer_takes_given_ids);
    RUN(layer_leaves_padding_out);
    RUN(layer_keeps_nan_to_its_token);
    RUN(layer_computes_its_range_of_experts);
    RUN(matmul_matches_its_definition);
    RUN(expand_and_combine_match_their_definition);
    RUN(layer_replays_in_a_graph);
    RUN(layer_runs_on_several_streams);
    RUN(grids_do_not_change_a_result);
    RUN(layer_explains_its_launches);
    device_close(&device);
    return test_end();
}
