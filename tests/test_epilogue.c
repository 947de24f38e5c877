/*
  test_epilogue.c: what the combine adds to the routed sum: identity experts, a shared expert's output, the residual; in the
  fused layer, in batches of any size, with padding, over several ranks, and in the combine on its own.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices. TEST_SEED replaces the seed.
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
static uint64_t seed = 1;

/* choice_cases: a weight on the input; identity experts in bf16; both in f32, with odd sizes. */
static const uint32_t epilogue_cases[] = {7, 8, 9};
enum { NUM_EPILOGUE_CASES = 3 };

typedef struct additions { /* [T, H], [T], [T, H] */
    void *shared, *residual;
    float *shared_weights;
} additions;

static void make_additions(test_random *random, const model_spec *spec, uint32_t num_tokens, additions *a) {
    const size_t count = (size_t)num_tokens * spec->hidden_size;
    float *values = (float *)model_alloc(count * 4);
    uint32_t t;
    a->shared = model_random_array(random, count, spec->dtype, 1.0f, values);
    a->residual = model_random_array(random, count, spec->dtype, 1.0f, values);
    a->shared_weights = (float *)model_alloc((size_t)num_tokens * 4);
    for (t = 0; t < num_tokens; t++) a->shared_weights[t] = 0.1f + random_uniform(random) / 2; /* far from 1, which stands for none */
    free(values);
}

static void free_additions(additions *a) {
    free(a->shared);
    free(a->residual);
    free(a->shared_weights);
}

TEST(layer_adds_shared_experts_and_residual) {
    static const uint32_t token_counts[] = {1, 9, 17, 150};
    uint32_t i, n, which;
    for (i = 0; i < NUM_EPILOGUE_CASES; i++) {
        model_spec spec = choice_cases[epilogue_cases[i]].spec;
        model m;
        test_random random;
        random_seed(&random, seed * 100 + i);
        spec.max_tokens = 150;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        model_create(&device, &spec, seed * 100 + 50 + i, &m);
        for (n = 0; m.layer && n < 4; n++)
            for (which = 1; which < 8; which++) { /* bits: shared, its weights, residual */
                const uint32_t num_tokens = token_counts[n];
                model_input input, less;
                model_output output;
                additions a;
                float *logits;
                void *x;
                double error;
                if ((which & 3) == 2 || (small_size && n == 3 && which != 7)) continue;
                model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
                make_additions(&random, &spec, num_tokens, &a);
                input.shared = which & 1 ? a.shared : NULL;
                input.shared_weights = which & 2 ? a.shared_weights : NULL;
                input.residual = which & 4 ? a.residual : NULL;
                CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
                error = model_error(&m, &input, &output, 0, num_tokens < 17 ? num_tokens : 17);
                CHECK(error <= model_bound(spec.dtype), "seed %llu: case %u T %u additions %u: relative error %.3g", (unsigned long long)seed, i, num_tokens, which, error);
                less = input; /* the bound tells what is left out */
                if (which & 2) less.shared_weights = NULL;
                else if (which & 1) less.shared = NULL;
                else less.residual = NULL;
                error = model_error(&m, &less, &output, 0, num_tokens < 17 ? num_tokens : 17);
                CHECK(error > 3 * model_bound(spec.dtype), "seed %llu: case %u T %u additions %u: without one the error is %.3g alone", (unsigned long long)seed, i, num_tokens, which, error);
                model_output_free(&output);
                free_additions(&a);
                free(logits);
                free(x);
            }
        model_destroy(&device, &m);
    }
}

/* The residual and the shared expert's output may lie where y will. */
TEST(layer_adds_to_y_in_place) {
    uint32_t i, which;
    for (i = 0; i < NUM_EPILOGUE_CASES; i++)
        for (which = 0; which < 4; which++) {
            model_spec spec = choice_cases[epilogue_cases[i]].spec;
            const uint32_t num_tokens = which & 2 ? 150 : 5;
            model m;
            test_random random;
            model_input input;
            model_call call;
            model_output apart, inside;
            additions a;
            float *logits;
            void *x;
            if (small_size && which == 3) continue;
            random_seed(&random, seed * 100 + 10 + i);
            spec.max_tokens = num_tokens;
            spec.operations = MOE_ROUTE_OPERATION_LAYER;
            model_create(&device, &spec, seed * 100 + 60 + i, &m);
            REQUIRE(m.layer, "no layer");
            model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
            make_additions(&random, &spec, num_tokens, &a);
            input.shared = a.shared;
            input.residual = a.residual;
            CHECK(model_run(&device, &m, &input, &apart) == MOE_ROUTE_OK, "%s", device_message(&device));
            model_call_create(&device, &m, &input, &call);
            device_upload(&device, &call.y, which & 1 ? a.shared : a.residual, call.y.size);
            if (which & 1) call.args.shared_output = call.args.y;
            else call.args.residual = call.args.y;
            CHECK(moe_route_layer_run(m.layer, &call.args) == MOE_ROUTE_OK, "%s", device_message(&device));
            model_call_fetch(&device, &m, &call, &inside);
            CHECK_BYTES(inside.y, apart.y, call.y.size, which & 1 ? "y over the shared expert's output" : "y over the residual");
            model_call_destroy(&device, &call);
            model_output_free(&apart);
            model_output_free(&inside);
            free_additions(&a);
            free(logits);
            free(x);
            model_destroy(&device, &m);
        }
}

/* A token's result has the same bits alone, in any batch, by the fused path, without it, and in a large batch that has the same kernels. */
TEST(rows_do_not_depend_on_the_batch) {
    uint32_t i, t, s;
    for (i = 0; i < NUM_EPILOGUE_CASES; i++) {
        const uint32_t sizes[] = {1, 2, 8, 16, 100};
        model_spec spec = choice_cases[epilogue_cases[i]].spec;
        const uint32_t num_tokens = spec.dtype != MOE_ROUTE_F32 && 140 * spec.top_k > MOER_SMALL_PAIRS ? MOER_SMALL_PAIRS / spec.top_k : 140;
        model m, separate;
        model_input input, part;
        model_output all, some;
        additions a;
        test_random random;
        float *logits;
        void *x;
        size_t row;
        if (small_size && i == 0) continue;
        random_seed(&random, seed * 100 + 20 + i);
        spec.max_tokens = num_tokens;
        spec.operations = MOE_ROUTE_OPERATION_LAYER;
        model_create(&device, &spec, seed * 100 + 70, &m);
        spec.fused_combine = MOE_ROUTE_OFF;
        model_create(&device, &spec, seed * 100 + 70, &separate);
        REQUIRE(m.layer && separate.layer, "no layer");
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        make_additions(&random, &spec, num_tokens, &a);
        input.shared = a.shared;
        input.shared_weights = a.shared_weights;
        input.residual = a.residual;
        row = (size_t)spec.hidden_size * model_dtype_size(spec.dtype);
        CHECK(model_run(&device, &m, &input, &all) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (t = 0; t < (small_size ? 4u : 40u); t += t % 3 + 1)
            for (s = 0; s < (small_size ? 3u : 5u); s++) {
                part = input;
                if (t + sizes[s] > num_tokens) continue;
                part.num_tokens = sizes[s];
                part.logits = logits + (size_t)t * spec.num_experts;
                part.x = (const char *)x + t * row;
                part.shared = (const char *)a.shared + t * row;
                part.residual = (const char *)a.residual + t * row;
                part.shared_weights = a.shared_weights + t;
                CHECK(model_run(&device, s % 2 ? &separate : &m, &part, &some) == MOE_ROUTE_OK, "%s", device_message(&device));
                CHECK_BYTES(some.y, (const char *)all.y + t * row, sizes[s] * row, "y of a smaller batch");
                model_output_free(&some);
            }
        model_output_free(&all);
        free_additions(&a);
        free(logits);
        free(x);
        model_destroy(&device, &m);
        model_destroy(&device, &separate);
    }
}

/* Padding gives zeros whatever would be added there, also where given ids name identity experts; ids outside give nothing. */
TEST(padding_gets_nothing) {
    uint32_t n;
    model_spec spec = choice_cases[8].spec;
    model m;
    test_random random;
    random_seed(&random, seed * 100 + 30);
    spec.max_tokens = 150;
    spec.operations = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS;
    model_create(&device, &spec, seed * 100 + 80, &m);
    for (n = 0; m.layer && n < 4; n++) {
        const uint32_t num_tokens = n < 2 ? 12 : 150, real = num_tokens - 5;
        const int32_t valid = (int32_t)real;
        const int given = n % 2;
        int32_t *ids = (int32_t *)model_alloc((size_t)num_tokens * spec.top_k * 4);
        float *weights = (float *)model_alloc((size_t)num_tokens * spec.top_k * 4), *logits;
        model_input input;
        model_output output;
        additions a;
        void *x;
        uint32_t i;
        double error;
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        make_additions(&random, &spec, num_tokens, &a);
        for (i = 0; i < num_tokens * spec.top_k; i++) {
            ids[i] = (int32_t)random_below(&random, spec.num_experts + 1) - (i % 9 == 0 ? 14 : 0); /* 12: out of range, as below 0 */
            if (i >= real * spec.top_k) ids[i] = (int32_t)spec.num_experts - 1;
            weights[i] = random_normal(&random);
        }
        input.shared = a.shared;
        input.shared_weights = a.shared_weights;
        input.residual = a.residual;
        input.num_valid = &valid;
        if (given) {
            input.logits = NULL;
            input.ids = ids;
            input.weights = weights;
        }
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (i = real * spec.hidden_size; i < num_tokens * spec.hidden_size; i++)
            if (!CHECK(output.y_values[i] == 0.0f, "padding gives %g", (double)output.y_values[i])) break;
        error = model_error(&m, &input, &output, real - 7, real);
        CHECK(error <= model_bound(spec.dtype), "seed %llu: T %u given %d: relative error %.3g beside padding", (unsigned long long)seed, num_tokens, given, error);
        model_output_free(&output);
        free_additions(&a);
        free(ids);
        free(weights);
        free(logits);
        free(x);
    }
    model_destroy(&device, &m);
}

/* Of several ranks the one with expert 0 adds the identity experts, and the parts make the whole. */
TEST(one_rank_adds_identity_experts) {
    static const uint32_t first[2] = {0, 3}, count[2] = {3, 2};
    model_spec spec = choice_cases[9].spec; /* f32: 5 experts with weights, 6 without */
    const size_t gate_up = 2 * (size_t)spec.intermediate_size * spec.hidden_size * 4, down = (size_t)spec.intermediate_size * spec.hidden_size * 4;
    model whole;
    model_input input;
    model_output all;
    test_random random;
    float *logits, *sum;
    void *x;
    uint32_t i, n;
    random_seed(&random, seed * 100 + 40);
    spec.max_tokens = 16;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    model_create(&device, &spec, seed * 100 + 90, &whole);
    REQUIRE(whole.layer, "no layer");
    model_random_input(&random, &spec, 16, &input, &logits, &x);
    CHECK(model_run(&device, &whole, &input, &all) == MOE_ROUTE_OK, "%s", device_message(&device));
    sum = (float *)model_alloc((size_t)16 * spec.hidden_size * 4);
    for (i = 0; i < 2; i++) {
        moe_route_layer_desc desc;
        model part;
        model_output output;
        memset(&part, 0, sizeof part);
        part.spec = spec;
        part.spec.first_expert = first[i];
        part.spec.num_local = i == 0 ? count[i] : 0; /* of the last rank: all that have weights */
        model_describe(&part.spec, &desc);
        desc.experts.gate_up.data = whole.gate_up.data_buffer.address + first[i] * gate_up;
        desc.experts.down.data = whole.down.data_buffer.address + first[i] * down;
        desc.experts.gate_up.bias = whole.gate_up.bias_buffer.address + (size_t)first[i] * 2 * spec.intermediate_size * 4;
        desc.experts.down.bias = whole.down.bias_buffer.address + (size_t)first[i] * spec.hidden_size * 4;
        if (!CHECK(moe_route_layer_create(device.context, &desc, &part.layer) == MOE_ROUTE_OK, "%s", device_message(&device))) continue;
        CHECK(model_run(&device, &part, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (n = 0; n < 16 * spec.hidden_size; n++) sum[n] += output.y_values[n];
        model_output_free(&output);
        moe_route_layer_destroy(part.layer);
    }
    CHECK(relative_error(sum, all.y_values, (size_t)16 * spec.hidden_size) < 1e-6, "seed %llu: the parts differ from the whole by %.3g", (unsigned long long)seed,
          relative_error(sum, all.y_values, (size_t)16 * spec.hidden_size));
    model_output_free(&all);
    free(sum);
    free(logits);
    free(x);
    model_destroy(&device, &whole);
}

/* Router weights of 16 bits count as the numbers that they stand for, wherever they are read. */
TEST(router_weights_may_be_16_bit) {
    uint32_t i, n, d;
    for (i = 0; i < NUM_EPILOGUE_CASES; i++)
        for (d = 0; d < 2; d++)
            for (n = 0; n < (small_size ? 1u : 2u); n++) {
                const moe_route_dtype dtype = d ? MOE_ROUTE_F16 : MOE_ROUTE_BF16;
                const uint32_t num_tokens = n ? 150 : 7;
                model_spec spec = choice_cases[epilogue_cases[i]].spec;
                const size_t pairs = (size_t)num_tokens * spec.top_k;
                model m;
                model_input input;
                model_call call;
                model_output want, got;
                moe_route_layer *layer = NULL;
                moe_route_layer_desc desc;
                device_buffer stored;
                test_random random;
                float *logits, *weights = (float *)model_alloc(pairs * 4);
                int32_t *ids = (int32_t *)model_alloc(pairs * 4);
                void *x, *weights_16;
                size_t p;
                random_seed(&random, seed * 100 + 45 + i);
                spec.max_tokens = num_tokens;
                spec.operations = MOE_ROUTE_OPERATION_EXPERTS;
                model_create(&device, &spec, seed * 100 + 95 + i, &m);
                model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
                weights_16 = model_random_array(&random, pairs, dtype, 1.0f, weights);
                for (p = 0; p < pairs; p++) ids[p] = (int32_t)random_below(&random, spec.num_experts);
                input.logits = NULL;
                input.ids = ids;
                input.weights = weights;
                CHECK(model_run(&device, &m, &input, &want) == MOE_ROUTE_OK, "%s", device_message(&device));
                model_describe(&spec, &desc);
                desc.router.weights_dtype = dtype;
                desc.experts.gate_up.data = m.gate_up.data_buffer.address;
                desc.experts.gate_up.scales = m.gate_up.scales_buffer.address;
                desc.experts.gate_up.bias = m.gate_up.bias_buffer.address;
                desc.experts.down.data = m.down.data_buffer.address;
                desc.experts.down.scales = m.down.scales_buffer.address;
                desc.experts.down.bias = m.down.bias_buffer.address;
                CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
                model_call_create(&device, &m, &input, &call);
                stored = device_create_from(&device, weights_16, pairs * 2);
                call.args.weights = stored.address;
                CHECK(moe_route_layer_run(layer, &call.args) == MOE_ROUTE_OK, "%s", device_message(&device));
                model_call_fetch(&device, &m, &call, &got);
                CHECK_BYTES(got.y, want.y, call.y.size, "y with 16-bit router weights");
                model_call_destroy(&device, &call);
                device_destroy(&device, &stored);
                moe_route_layer_destroy(layer);
                model_output_free(&want);
                model_output_free(&got);
                free(logits);
                free(weights);
                free(ids);
                free(x);
                free(weights_16);
                model_destroy(&device, &m);
            }
}

/* Identity experts come before those that skip, which add nothing even where given weights aren't 0. */
TEST(skip_experts_come_last) {
    model_spec spec = choice_cases[8].spec; /* 8 experts with weights, 4 without */
    model m;
    model_input input;
    model_call call;
    model_output output;
    moe_route_layer *layer = NULL;
    moe_route_layer_desc desc;
    test_random random;
    float *logits, weights[6 * 4];
    int32_t ids[6 * 4];
    void *x;
    uint32_t i;
    double error;
    random_seed(&random, seed * 100 + 48);
    spec.max_tokens = 6;
    spec.operations = MOE_ROUTE_OPERATION_EXPERTS;
    model_create(&device, &spec, seed * 100 + 98, &m);
    model_random_input(&random, &spec, 6, &input, &logits, &x);
    for (i = 0; i < 24; i++) {
        ids[i] = i < 16 ? (int32_t)(random_below(&random, 6) + 8) : (int32_t)random_below(&random, 14); /* 12 and 13 skip */
        weights[i] = random_normal(&random);
    }
    input.logits = NULL;
    input.ids = ids;
    input.weights = weights;
    model_describe(&spec, &desc);
    desc.router.num_experts += 2;
    desc.router.num_skip_experts = 2;
    desc.experts.gate_up.data = m.gate_up.data_buffer.address;
    desc.experts.down.data = m.down.data_buffer.address;
    if (CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device))) {
        model_call_create(&device, &m, &input, &call);
        CHECK(moe_route_layer_run(layer, &call.args) == MOE_ROUTE_OK, "%s", device_message(&device));
        model_call_fetch(&device, &m, &call, &output);
        error = model_error(&m, &input, &output, 0, 6); /* for m the ids 12 and 13 are out of range */
        CHECK(error <= model_bound(spec.dtype), "seed %llu: relative error %.3g", (unsigned long long)seed, error);
        model_call_destroy(&device, &call);
        model_output_free(&output);
    }
    moe_route_layer_destroy(layer);
    free(logits);
    free(x);
    model_destroy(&device, &m);
}

/* ---- the combine on its own ---- */

static void check_combine(moe_route_dtype dtype, uint32_t hidden, uint32_t num_tokens, int weight_on_input, uint64_t salt) {
    const uint32_t top_k = 5, num_experts = 10, num_identity = 3, num_pairs = num_tokens * top_k, num_valid = num_tokens - num_tokens / 4;
    const size_t count = (size_t)num_tokens * hidden, size = count * model_dtype_size(dtype);
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_combine_args args;
    float *rows = (float *)model_alloc(count * top_k * 4), *x = (float *)model_alloc(count * 4), *shared = (float *)model_alloc(count * 4), *residual = (float *)model_alloc(count * 4);
    float *y = (float *)model_alloc(count * 4), *want = (float *)model_alloc(count * 4), *weights = (float *)model_alloc(num_pairs * 4), *shared_weights = (float *)model_alloc(num_tokens * 4);
    int32_t *ids = (int32_t *)model_alloc(num_pairs * 4), *pair_to_row = (int32_t *)model_alloc(num_pairs * 4), valid = (int32_t)num_valid;
    void *stored[4], *got = model_alloc(size);
    device_buffer b[9];
    test_random random;
    uint32_t p, i, t, j, n;
    random_seed(&random, seed * 1000 + salt);
    stored[0] = model_random_array(&random, count * top_k, dtype, 1.0f, rows);
    stored[1] = model_random_array(&random, count, dtype, 1.0f, x);
    stored[2] = model_random_array(&random, count, dtype, 1.0f, shared);
    stored[3] = model_random_array(&random, count, dtype, 1.0f, residual);
    for (p = 0; p < num_pairs; p++) {
        ids[p] = (int32_t)random_below(&random, num_experts + 2);
        pair_to_row[p] = ids[p] < (int32_t)(num_experts - num_identity) ? (int32_t)random_below(&random, num_pairs) : p % 2 ? -1 : (int32_t)num_pairs;
        weights[p] = random_normal(&random);
    }
    for (t = 0; t < num_tokens; t++) shared_weights[t] = random_uniform(&random);
    for (i = 0; i < 4; i++) {
        b[i] = device_create_aligned(&device, i == 0 ? size * top_k : size, 16);
        device_upload(&device, &b[i], stored[i], b[i].size);
    }
    b[4] = device_create_from(&device, ids, num_pairs * 4);
    b[5] = device_create_from(&device, pair_to_row, num_pairs * 4);
    b[6] = device_create_from(&device, weights, num_pairs * 4);
    b[7] = device_create_from(&device, shared_weights, num_tokens * 4);
    b[8] = device_create_from(&device, &valid, 4);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = num_experts;
    desc.router.top_k = top_k;
    desc.experts.hidden_size = hidden;
    desc.experts.dtype = dtype;
    desc.experts.weight_on_input = weight_on_input;
    desc.experts.num_identity_experts = num_identity;
    desc.max_tokens = num_tokens;
    desc.operations = MOE_ROUTE_OPERATION_COMBINE;
    if (CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device))) {
        device_buffer y_buffer = device_create_aligned(&device, size, 16);
        memset(&args, 0, sizeof args);
        args.num_tokens = num_tokens;
        args.rows = b[0].address;
        args.x = b[1].address;
        args.shared_output = b[2].address;
        args.residual = b[3].address;
        args.ids = b[4].address;
        args.pair_to_row = b[5].address;
        args.weights = b[6].address;
        args.shared_output_weights = b[7].address;
        args.num_valid_tokens = b[8].address;
        args.y = y_buffer.address;
        args.stream = device.stream;
        CHECK(moe_route_combine(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
        device_synchronize(&device);
        device_download(&device, got, &y_buffer, size);
        quantize_convert(y, QUANTIZE_F32, got, model_storage(dtype), count);
        for (t = 0; t < num_tokens; t++)
            for (n = 0; n < hidden; n++) {
                const size_t at = (size_t)t * hidden + n;
                double sum = 0;
                for (j = 0; j < top_k; j++) {
                    p = t * top_k + j;
                    if (ids[p] < (int32_t)(num_experts - num_identity)) sum += (weight_on_input ? 1.0 : (double)weights[p]) * (double)rows[(size_t)pair_to_row[p] * hidden + n];
                    else if (ids[p] < (int32_t)num_experts) sum += (double)weights[p] * (double)x[at];
                }
                sum += (double)shared_weights[t] * (double)shared[at] + (double)residual[at];
                want[at] = t < num_valid ? (float)sum : 0.0f;
                if (t >= num_valid) CHECK(y[at] == 0.0f, "padding gives %g", (double)y[at]);
            }
        CHECK(relative_error(y, want, count) <= model_bound(dtype) / 2, "seed %llu: dtype %d H %u T %u: relative error %.3g", (unsigned long long)seed, (int)dtype, hidden, num_tokens,
              relative_error(y, want, count));
        device_destroy(&device, &y_buffer);
    }
    moe_route_layer_destroy(layer);
    for (i = 0; i < 9; i++) device_destroy(&device, &b[i]);
    for (i = 0; i < 4; i++) free(stored[i]);
    free(rows);
    free(x);
    free(shared);
    free(residual);
    free(y);
    free(want);
    free(weights);
    free(shared_weights);
    free(ids);
    free(pair_to_row);
    free(got);
}

TEST(combine_adds_everything) {
    check_combine(MOE_ROUTE_BF16, 256, 9, 0, 1);
    check_combine(MOE_ROUTE_F16, 130, 3, 1, 2);
    check_combine(MOE_ROUTE_F32, 67, 17, 0, 3);
    if (small_size) return;
    check_combine(MOE_ROUTE_F32, 2048, 16, 1, 4);
    check_combine(MOE_ROUTE_F16, 33, 200, 0, 5);
    check_combine(MOE_ROUTE_BF16, 2880, 4, 0, 6);
}

/* Rows that have their weights already need none, where there are no identity experts. */
TEST(combine_of_weighted_rows_needs_no_weights) {
    enum { TOKENS = 3, TOP_K = 2, HIDDEN = 8 };
    float rows[TOKENS * TOP_K * HIDDEN], y[TOKENS * HIDDEN];
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_combine_args args;
    device_buffer rows_buffer, y_buffer;
    test_random random;
    uint32_t i;
    random_seed(&random, seed);
    for (i = 0; i < TOKENS * TOP_K * HIDDEN; i++) rows[i] = random_normal(&random);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 4;
    desc.router.top_k = TOP_K;
    desc.experts.hidden_size = HIDDEN;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.weight_on_input = 1;
    desc.operations = MOE_ROUTE_OPERATION_COMBINE;
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    rows_buffer = device_create_aligned(&device, sizeof rows, 16);
    device_upload(&device, &rows_buffer, rows, sizeof rows);
    y_buffer = device_create_aligned(&device, sizeof y, 16);
    memset(&args, 0, sizeof args);
    args.num_tokens = TOKENS;
    args.rows = rows_buffer.address;
    args.y = y_buffer.address;
    args.stream = device.stream;
    CHECK(moe_route_combine(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    device_download(&device, y, &y_buffer, sizeof y);
    for (i = 0; i < TOKENS * HIDDEN; i++) {
        const float *row = rows + i / HIDDEN * TOP_K * HIDDEN + i % HIDDEN;
        CHECK(y[i] == row[0] + row[HIDDEN], "y[%u] is %g instead of %g", i, (double)y[i], (double)(row[0] + row[HIDDEN]));
    }
    device_destroy(&device, &rows_buffer);
    device_destroy(&device, &y_buffer);
    moe_route_layer_destroy(layer);
}

int main(int argc, char **argv) {
    const char *text = getenv("TEST_SEED");
    test_begin(argc, argv);
    small_size = test_is_small();
    if (text) seed = strtoull(text, NULL, 10);
    device_open_wanted(&device);
    RUN(layer_adds_shared_experts_and_residual);
    RUN(layer_adds_to_y_in_place);
    RUN(rows_do_not_depend_on_the_batch);
    RUN(padding_gets_nothing);
    RUN(one_rank_adds_identity_experts);
    RUN(router_weights_may_be_16_bit);
    RUN(skip_experts_come_last);
    RUN(combine_adds_everything);
    RUN(combine_of_weighted_rows_needs_no_weights);
    device_close(&device);
    return test_end();
}
