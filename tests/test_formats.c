/*
  test_formats.c: every weight format, read in place by the matmul: each weight comes out as the number that its bytes stand
  for, to the last bit, and sums of many agree with f64. Odd numbers of rows, rows that end within a group or a load, and
  data at odd addresses. TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices, TEST_SEED
  other weights.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "support/cases.h"
#include "../examples/safetensors.h"

static test_device device;
static int small_size;
static uint64_t seed;

static void describe(char *what, size_t size, const format_case *c, moe_route_dtype dtype) {
    snprintf(what, size, "format %d group %u scales %d codes %d zero points %d N %u K %u dtype %d seed %llu", (int)c->format, c->group_size, (int)c->scales_dtype, (int)c->codes, c->zero_points, c->rows,
             c->inner, (int)dtype, (unsigned long long)seed);
}

typedef struct format_matrix { /* the down matrix of a layer that has no other */
    model_matrix matrix;
    moe_route_layer *layer;
    moe_route_dtype dtype;
    uint32_t num_experts, top_k;
} format_matrix;

/* The array again, `offset` bytes behind an aligned address. */
static moe_route_address move_array(device_buffer *buffer, const void *from, size_t size, size_t offset) {
    char *moved = (char *)model_alloc(size + offset);
    memcpy(moved + offset, from, size);
    device_destroy(&device, buffer);
    *buffer = device_create_aligned(&device, size + offset, 16);
    device_upload(&device, buffer, moved, size + offset);
    free(moved);
    return buffer->address + offset;
}

/* `golden`: [3, rows, inner] weights to use, or NULL for random ones. `misaligned`: arrays start at odd elements. */
static void format_matrix_create(test_random *random, const format_case *c, const stored_weights *golden, int misaligned, moe_route_dtype dtype, uint32_t max_tokens, format_matrix *f) {
    model_spec spec;
    moe_route_layer_desc desc;
    memset(f, 0, sizeof *f);
    memset(&spec, 0, sizeof spec);
    spec.num_experts = f->num_experts = 3;
    spec.top_k = f->top_k = 2;
    spec.hidden_size = c->rows;
    spec.intermediate_size = c->inner;
    spec.dtype = f->dtype = dtype;
    spec.format = c->format;
    spec.group_size = c->group_size;
    spec.scales_dtype = c->scales_dtype;
    spec.codes = c->codes;
    spec.zero_points = c->zero_points;
    spec.group_rows = c->group_rows;
    spec.global_scales = c->global_scales;
    spec.max_tokens = max_tokens;
    spec.operations = MOE_ROUTE_OPERATION_MATMUL;
    model_describe(&spec, &desc);
    memset(&desc.experts.gate_up, 0, sizeof desc.experts.gate_up);
    model_matrix_create(&device, random, &spec, spec.num_experts, c->rows, c->inner, &f->matrix, &desc.experts.down);
    if (golden) {
        memcpy(f->matrix.stored.values, golden->values, (size_t)spec.num_experts * c->rows * c->inner * 4);
        device_upload(&device, &f->matrix.data_buffer, golden->data, golden->data_size);
    }
    if (misaligned) {
        const stored_weights *stored = &f->matrix.stored;
        const moe_route_dtype scales = c->scales_dtype ? c->scales_dtype : c->format == MOE_ROUTE_FORMAT_FP8 ? MOE_ROUTE_F32 : MOE_ROUTE_F16;
        desc.experts.down.data = move_array(&f->matrix.data_buffer, stored->data, stored->data_size, 1);
        if (stored->scales) desc.experts.down.scales = move_array(&f->matrix.scales_buffer, stored->scales, stored->scales_size, c->format == MOE_ROUTE_FORMAT_MXFP4 || c->format == MOE_ROUTE_FORMAT_NVFP4 ? 1 : model_dtype_size(scales));
        if (stored->zero_points) desc.experts.down.zero_points = move_array(&f->matrix.zero_points_buffer, stored->zero_points, stored->zero_points_size, 1);
    }
    CHECK(moe_route_layer_create(device.context, &desc, &f->layer) == MOE_ROUTE_OK, "%s", device_message(&device));
}

static void format_matrix_destroy(format_matrix *f) {
    moe_route_layer_destroy(f->layer);
    model_matrix_destroy(&device, &f->matrix);
}

/* out[t, j] = W[ids[t, j]] @ x[t] on the device; both in the matrix's dtype. */
static void format_matrix_multiply(const format_matrix *f, uint32_t num_tokens, const int32_t *ids, const void *x, void *out) {
    const size_t x_size = (size_t)num_tokens * f->matrix.inner * model_dtype_size(f->dtype), out_size = (size_t)num_tokens * f->top_k * f->matrix.rows * model_dtype_size(f->dtype);
    CHECK(device_matmul(&device, f->layer, MOE_ROUTE_MATRIX_DOWN, 0, num_tokens, num_tokens * f->top_k, ids, x, x_size, out, out_size) == MOE_ROUTE_OK, "%s", device_message(&device));
}

/* x is 1 at one input and 0 elsewhere: the output is a column of weights, rounded to the dtype and nothing else. The inputs
   are `count` from `first` on, `stride` apart. */
static void check_columns(const format_matrix *f, uint32_t first, uint32_t stride, uint32_t count, const char *what) {
    const uint32_t rows = f->matrix.rows, inner = f->matrix.inner;
    const quantize_dtype storage = model_storage(f->dtype);
    void *x = model_alloc((size_t)count * inner * 4), *out = model_alloc((size_t)count * f->top_k * rows * 4), *rounded = model_alloc(4);
    int32_t *ids = (int32_t *)model_alloc(count * f->top_k * 4);
    uint32_t t, j, n, wrong = 0;
    for (t = 0; t < count; t++) {
        quantize_store(x, storage, (size_t)t * inner + (first + t * stride) % inner, 1.0f);
        for (j = 0; j < f->top_k; j++) ids[t * f->top_k + j] = (int32_t)((t + j * 2) % f->num_experts);
    }
    format_matrix_multiply(f, count, ids, x, out);
    for (t = 0; t < count && !wrong; t++)
        for (j = 0; j < f->top_k && !wrong; j++)
            for (n = 0; n < rows && !wrong; n++) {
                const uint32_t k = (first + t * stride) % inner, pair = t * f->top_k + j;
                const float got = quantize_load(out, storage, (size_t)pair * rows + n);
                float want;
                quantize_store(rounded, storage, 0, f->matrix.stored.values[((size_t)ids[pair] * rows + n) * inner + k]);
                want = quantize_load(rounded, storage, 0);
                wrong = !CHECK(got == want, "%s: expert %d row %u input %u is %.9g instead of %.9g", what, ids[pair], n, k, (double)got, (double)want);
            }
    free(x);
    free(out);
    free(rounded);
    free(ids);
}

static void check_sums(const format_matrix *f, test_random *random, uint32_t num_tokens, const char *what) {
    const uint32_t rows = f->matrix.rows, inner = f->matrix.inner, num_pairs = num_tokens * f->top_k;
    float *x = (float *)model_alloc((size_t)num_tokens * inner * 4), *got = (float *)model_alloc((size_t)num_pairs * rows * 4), *want = (float *)model_alloc((size_t)num_pairs * rows * 4);
    void *stored = model_random_array(random, (size_t)num_tokens * inner, f->dtype, 1.0f, x), *out = model_alloc((size_t)num_pairs * rows * 4);
    int32_t *ids = (int32_t *)model_alloc(num_pairs * 4);
    uint32_t p, n;
    double error;
    for (p = 0; p < num_pairs; p++) ids[p] = (int32_t)random_below(random, f->num_experts);
    format_matrix_multiply(f, num_tokens, ids, stored, out);
    quantize_convert(got, QUANTIZE_F32, out, model_storage(f->dtype), (size_t)num_pairs * rows);
    for (p = 0; p < num_pairs; p++)
        for (n = 0; n < rows; n++) want[(size_t)p * rows + n] = (float)model_dot(&f->matrix, (size_t)ids[p] * rows + n, x + (size_t)(p / f->top_k) * inner, 1.0);
    error = relative_error(got, want, (size_t)num_pairs * rows);
    CHECK(error <= model_bound(f->dtype), "%s: relative error %.3g", what, error);
    free(x);
    free(got);
    free(want);
    free(stored);
    free(out);
    free(ids);
}

static void check_format(const format_case *c, int misaligned, moe_route_dtype dtype, uint32_t max_tokens, uint64_t which) {
    format_matrix f;
    test_random random;
    char what[192];
    random_seed(&random, seed + which);
    describe(what, sizeof what, c, dtype);
    format_matrix_create(&random, c, NULL, misaligned, dtype, max_tokens, &f);
    if (f.layer) {
        const uint32_t few = max_tokens < 16 ? max_tokens : 16;
        /* The last inputs, and as many as fit at a distance that meets every place of a group. */
        check_columns(&f, c->inner > few ? c->inner - few : 0, 1, few < c->inner ? few : c->inner, what);
        check_columns(&f, random_below(&random, c->inner), c->inner / max_tokens | 1u, max_tokens, what);
        check_sums(&f, &random, few, what);
        check_sums(&f, &random, max_tokens, what);
    }
    format_matrix_destroy(&f);
}

TEST(weights_are_read_exactly) {
    static const moe_route_dtype dtypes[] = {MOE_ROUTE_BF16, MOE_ROUTE_F16, MOE_ROUTE_F32};
    uint32_t i, d;
    for (i = 0; i < NUM_CASES(format_cases); i++) {
        const format_case *c = &format_cases[i];
        if (small_size && !c->in_small) continue;
        for (d = 0; d < 3; d++) {
            if (small_size && d != i % 3 && d != (i + 1) % 3) continue;
            check_format(c, 0, dtypes[d], small_size ? 40 : 300, 1000 + i * 3 + d);
        }
    }
}

TEST(weights_may_lie_at_any_address) {
    static const moe_route_dtype dtypes[] = {MOE_ROUTE_F16, MOE_ROUTE_F32, MOE_ROUTE_BF16};
    uint32_t i;
    for (i = 0; i < NUM_CASES(format_cases); i++) {
        if (small_size && (!format_cases[i].in_small || i % 3 != 0)) continue;
        check_format(&format_cases[i], 1, dtypes[i % 3], 24, 2000 + i);
    }
}

/* Blocks and their values by ggml's own rules: every weight of them. */
TEST(gguf_agrees_with_ggml) {
    static const struct { moe_route_format format; const char *name; } formats[] = {
        {MOE_ROUTE_FORMAT_GGUF_Q4_0, "Q4_0"}, {MOE_ROUTE_FORMAT_GGUF_Q4_1, "Q4_1"}, {MOE_ROUTE_FORMAT_GGUF_Q5_0, "Q5_0"}, {MOE_ROUTE_FORMAT_GGUF_Q5_1, "Q5_1"}, {MOE_ROUTE_FORMAT_GGUF_Q8_0, "Q8_0"},
        {MOE_ROUTE_FORMAT_GGUF_Q2_K, "Q2_K"}, {MOE_ROUTE_FORMAT_GGUF_Q3_K, "Q3_K"}, {MOE_ROUTE_FORMAT_GGUF_Q4_K, "Q4_K"}, {MOE_ROUTE_FORMAT_GGUF_Q5_K, "Q5_K"}, {MOE_ROUTE_FORMAT_GGUF_Q6_K, "Q6_K"},
        {MOE_ROUTE_FORMAT_GGUF_IQ4_NL, "IQ4_NL"}, {MOE_ROUTE_FORMAT_GGUF_IQ4_XS, "IQ4_XS"}, {MOE_ROUTE_FORMAT_GGUF_MXFP4, "MXFP4"},
    };
    static const moe_route_dtype dtypes[] = {MOE_ROUTE_F32, MOE_ROUTE_BF16, MOE_ROUTE_F16};
    safetensors_file file;
    uint32_t i, d;
    REQUIRE(safetensors_open(&file, "tests/data/gguf.safetensors"), "%s", file.error);
    for (i = 0; i < NUM_CASES(formats); i++) {
        char name[32];
        const safetensors_tensor *blocks, *values;
        stored_weights golden;
        format_case c;
        snprintf(name, sizeof name, "%s.blocks", formats[i].name);
        blocks = safetensors_find(&file, name);
        snprintf(name, sizeof name, "%s.values", formats[i].name);
        values = safetensors_find(&file, name);
        REQUIRE(blocks && values && values->rank == 2 && values->shape[0] == 3, "no %s", name);
        memset(&golden, 0, sizeof golden);
        memset(&c, 0, sizeof c);
        c.format = formats[i].format;
        c.rows = 1;
        c.inner = (uint32_t)values->shape[1];
        golden.data = (void *)(uintptr_t)blocks->data;
        golden.data_size = blocks->end - blocks->begin;
        golden.values = (float *)(uintptr_t)values->data;
        for (d = 0; d < 3; d++) {
            format_matrix f;
            test_random random;
            if (small_size && d != i % 3) continue;
            random_seed(&random, i);
            format_matrix_create(&random, &c, &golden, 0, dtypes[d], c.inner, &f);
            CHECK(f.matrix.stored.data_size == golden.data_size, "%s: %lu bytes instead of %lu", formats[i].name, (unsigned long)f.matrix.stored.data_size, (unsigned long)golden.data_size);
            if (f.layer) check_columns(&f, 0, 1, c.inner, formats[i].name);
            format_matrix_destroy(&f);
        }
    }
    safetensors_close(&file);
}

/* A code without a value spoils its own row and no other. */
TEST(fp8_nan_stays_in_its_row) {
    static const format_case c = {MOE_ROUTE_FORMAT_FP8, 128, MOE_ROUTE_F32, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 19, 160, 1};
    static const moe_route_dtype dtypes[] = {MOE_ROUTE_BF16, MOE_ROUTE_F16, MOE_ROUTE_F32};
    uint32_t d, n, p;
    for (d = 0; d < 3; d++) {
        enum { TOKENS = 3, PAIRS = 6 };
        format_matrix f;
        test_random random;
        float *x = (float *)model_alloc(TOKENS * 160 * 4), out[PAIRS * 19];
        void *stored, *stored_out = model_alloc(sizeof out);
        int32_t ids[PAIRS];
        random_seed(&random, seed + 77 + d);
        format_matrix_create(&random, &c, NULL, 0, dtypes[d], TOKENS, &f);
        for (n = 0; n < 19; n++) { /* rows 1, 4, 7, ... of every expert: a NaN of either sign, at any input */
            uint32_t e;
            for (e = 0; n % 3 == 1 && e < 3; e++) ((unsigned char *)f.matrix.stored.data)[(e * 19 + n) * 160 + random_below(&random, 160)] = n % 2 ? 0x7f : 0xff;
        }
        device_upload(&device, &f.matrix.data_buffer, f.matrix.stored.data, f.matrix.stored.data_size);
        stored = model_random_array(&random, TOKENS * 160, dtypes[d], 1.0f, x);
        for (p = 0; p < PAIRS; p++) ids[p] = (int32_t)random_below(&random, 3);
        if (f.layer) {
            format_matrix_multiply(&f, TOKENS, ids, stored, stored_out);
            quantize_convert(out, QUANTIZE_F32, stored_out, model_storage(dtypes[d]), PAIRS * 19);
            for (p = 0; p < PAIRS; p++)
                for (n = 0; n < 19; n++) CHECK(isnan(out[p * 19 + n]) == (n % 3 == 1), "dtype %d pair %u row %u is %g", (int)dtypes[d], p, n, (double)out[p * 19 + n]);
        }
        format_matrix_destroy(&f);
        free(x);
        free(stored);
        free(stored_out);
    }
}

int main(int argc, char **argv) {
    const char *number = getenv("TEST_SEED");
    test_begin(argc, argv);
    small_size = test_is_small();
    seed = number ? strtoull(number, NULL, 10) : 1;
    device_open_wanted(&device);
    RUN(weights_are_read_exactly);
    RUN(weights_may_lie_at_any_address);
    RUN(gguf_agrees_with_ggml);
    RUN(fp8_nan_stays_in_its_row);
    device_close(&device);
    return test_end();
}
