/*
  test_sizes.c: every weight format at 1, 8, 32, 128 and 256 experts, and at N and K from 32 to 8192, odd ones too where the
  format allows: the stand-alone matmul, and the fused layer. What a stored weight stands for is said

      of F32, F16, BF16                   by quantize.h's conversions
      of INT8, INT4, FP8, MXFP4, NVFP4    by support/weights.h, code by code
      of GGUF                             by the PyPI package gguf: its single blocks in tests/data/gguf.safetensors make matrices

  and none of it by the library. Sums are f64's; inputs that are 1 at one place and 0 elsewhere show columns of weights, which
  must be right to the last bit. Large matrices are never decoded as a whole: only rows of chosen experts are looked at.
  TEST_DEVICE chooses the device (a GPU gets matrices up to 2 GB), TEST_SIZE=small a selection for slow (emulated) devices,
  TEST_SEED other weights.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "../examples/safetensors.h"

static test_device device;
static int small_size;
static safetensors_file blocks_file;

/* ---- the formats ---- */

typedef struct sized_format {
    const char *name;
    moe_route_format format;
    uint32_t step;       /* K must be a multiple of it */
    uint32_t group_rows; /* 128: a scale for 128 x 128; 0: as usual */
} sized_format;

static const sized_format formats[] = {
    {"F32", MOE_ROUTE_FORMAT_F32, 1, 0}, {"F16", MOE_ROUTE_FORMAT_F16, 1, 0}, {"BF16", MOE_ROUTE_FORMAT_BF16, 1, 0},
    {"INT8", MOE_ROUTE_FORMAT_INT8, 1, 0}, {"INT4", MOE_ROUTE_FORMAT_INT4, 2, 0}, {"FP8 by row", MOE_ROUTE_FORMAT_FP8, 1, 0},
    {"FP8 by 128 x 128", MOE_ROUTE_FORMAT_FP8, 1, 128}, {"MXFP4", MOE_ROUTE_FORMAT_MXFP4, 32, 0},
    {"NVFP4", MOE_ROUTE_FORMAT_NVFP4, 16, 0}, {"Q4_0", MOE_ROUTE_FORMAT_GGUF_Q4_0, 32, 0},
    {"Q4_1", MOE_ROUTE_FORMAT_GGUF_Q4_1, 32, 0}, {"Q5_0", MOE_ROUTE_FORMAT_GGUF_Q5_0, 32, 0},
    {"Q5_1", MOE_ROUTE_FORMAT_GGUF_Q5_1, 32, 0}, {"Q8_0", MOE_ROUTE_FORMAT_GGUF_Q8_0, 32, 0},
    {"Q2_K", MOE_ROUTE_FORMAT_GGUF_Q2_K, 256, 0}, {"Q3_K", MOE_ROUTE_FORMAT_GGUF_Q3_K, 256, 0},
    {"Q4_K", MOE_ROUTE_FORMAT_GGUF_Q4_K, 256, 0}, {"Q5_K", MOE_ROUTE_FORMAT_GGUF_Q5_K, 256, 0},
    {"Q6_K", MOE_ROUTE_FORMAT_GGUF_Q6_K, 256, 0}, {"IQ4_NL", MOE_ROUTE_FORMAT_GGUF_IQ4_NL, 32, 0},
    {"IQ4_XS", MOE_ROUTE_FORMAT_GGUF_IQ4_XS, 256, 0}, {"MXFP4", MOE_ROUTE_FORMAT_GGUF_MXFP4, 32, 0}};
enum { NUM_FORMATS = sizeof formats / sizeof formats[0], NUM_SIZES = 10, NUM_COUNTS = 5 };

static const uint32_t expert_counts[NUM_COUNTS] = {1, 8, 32, 128, 256};
static const uint32_t all_rows[NUM_SIZES] = {32, 33, 96, 151, 544, 704, 1856, 2880, 4097, 8192};
/* K, by the step that the format has. */
static const uint32_t all_inner[][1 + NUM_SIZES] = {
    {1, 32, 33, 96, 151, 544, 704, 1856, 2880, 4097, 8192},
    {2, 32, 34, 96, 150, 544, 704, 1856, 2880, 4098, 8192},
    {16, 32, 48, 96, 144, 544, 704, 1856, 2880, 4112, 8192},
    {32, 32, 64, 96, 160, 544, 704, 1856, 2880, 4128, 8192},
    {256, 256, 512, 768, 1024, 1280, 1792, 2048, 2816, 4352, 8192}};

static const uint32_t *inner_of(const sized_format *format) {
    size_t i = 0;
    while (all_inner[i][0] != format->step) i++;
    return all_inner[i] + 1;
}

/* ---- a matrix of which single weights can be asked ---- */

typedef struct sized_matrix {
    moe_route_weights weights; /* with addresses */
    weights_shape shape;
    stored_weights stored;
    uint64_t seed;             /* of the choice of blocks */
    uint32_t num_blocks, block_values, block_bytes;
    const unsigned char *blocks;
    const float *block_values_of;
    device_buffer data, scales, zero_points, global_scales;
} sized_matrix;

static uint32_t block_at(const sized_matrix *m, uint64_t index) {
    uint64_t z = (index + m->seed) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)(((z >> 32) * m->num_blocks) >> 32);
}

static double weight_at(const sized_matrix *m, uint32_t expert, uint32_t row, uint32_t k) {
    const size_t index = ((size_t)expert * m->shape.rows + row) * m->shape.inner + k;
    const moe_route_format format = m->weights.format;
    if (format > MOE_ROUTE_FORMAT_GGUF)
        return (double)m->block_values_of[block_at(m, index / m->block_values) * m->block_values + index % m->block_values];
    if (format <= MOE_ROUTE_FORMAT_BF16) return (double)quantize_load(m->stored.data, (quantize_dtype)format, index);
    return (double)stored_value(&m->weights, &m->stored, &m->shape, 0, expert, row, k);
}

static double dot(const sized_matrix *m, uint32_t expert, uint32_t row, const float *x) {
    double sum = 0;
    uint32_t k;
    for (k = 0; k < m->shape.inner; k++) sum += weight_at(m, expert, row, k) * (double)x[k];
    return sum;
}

/* Blocks of the package gguf, in an order of our own. */
static void fill_gguf(sized_matrix *m, const sized_format *format) {
    char name[64];
    const safetensors_tensor *blocks, *values;
    uint64_t i, count;
    snprintf(name, sizeof name, "%s.single.blocks", format->name);
    blocks = safetensors_find(&blocks_file, name);
    snprintf(name, sizeof name, "%s.single.values", format->name);
    values = safetensors_find(&blocks_file, name);
    if (!blocks || !values || blocks->rank != 2 || values->rank != 2 || blocks->shape[0] != values->shape[0])
        device_die("tests/data/gguf.safetensors lacks single blocks");
    m->num_blocks = (uint32_t)blocks->shape[0];
    m->block_bytes = (uint32_t)blocks->shape[1];
    m->block_values = (uint32_t)values->shape[1];
    m->blocks = blocks->data;
    m->block_values_of = (const float *)values->data;
    count = (uint64_t)m->shape.num_experts * m->shape.rows * m->shape.inner / m->block_values;
    m->stored.data_size = count * m->block_bytes;
    m->stored.data = malloc(m->stored.data_size);
    if (!m->stored.data) device_die("out of memory");
    for (i = 0; i < count; i++)
        memcpy((char *)m->stored.data + i * m->block_bytes, m->blocks + (size_t)block_at(m, i) * m->block_bytes, m->block_bytes);
}

/* Normal numbers; of a large matrix, the same ones at random. */
static void fill_plain(test_random *random, sized_matrix *m) {
    enum { TABLE = 4096 };
    const quantize_dtype dtype = (quantize_dtype)m->weights.format;
    const size_t width = quantize_dtype_size(dtype), count = (size_t)m->shape.num_experts * m->shape.rows * m->shape.inner;
    unsigned char *table = (unsigned char *)model_alloc(TABLE * width), *to;
    size_t i, j;
    for (i = 0; i < TABLE; i++) quantize_store(table, dtype, i, random_normal(random) / sqrtf((float)m->shape.inner));
    m->stored.data_size = count * width;
    m->stored.data = malloc(m->stored.data_size);
    if (!m->stored.data) device_die("out of memory");
    to = (unsigned char *)m->stored.data;
    for (i = 0; i < count; i += 5) {
        const uint64_t some = random_next(random);
        for (j = 0; j < 5 && i + j < count; j++)
            memcpy(to + (i + j) * width, table + (some >> (4 + j * 12) & (TABLE - 1)) * width, width);
    }
    free(table);
}

/* `which` turns group sizes, zero points and the types of scales over. */
static void sized_matrix_create(test_random *random, const sized_format *format, uint32_t which, uint32_t num_experts,
                                uint32_t rows, uint32_t inner, sized_matrix *m) {
    static const uint32_t group_sizes[] = {32, 128, 0, 64, 16};
    static const moe_route_dtype scales[] = {MOE_ROUTE_F16, MOE_ROUTE_BF16, MOE_ROUTE_F32};
    moe_route_weights *w = &m->weights;
    memset(m, 0, sizeof *m);
    w->format = format->format;
    if (w->format == MOE_ROUTE_FORMAT_INT8 || w->format == MOE_ROUTE_FORMAT_INT4) {
        w->group_size = group_sizes[which % 5];
        w->codes = which % 2 ? MOE_ROUTE_CODES_SIGNED : MOE_ROUTE_CODES_UNSIGNED;
    }
    if (w->format >= MOE_ROUTE_FORMAT_INT8 && w->format <= MOE_ROUTE_FORMAT_FP8) w->scales_dtype = scales[which % 3];
    if (format->group_rows) w->group_size = w->group_rows = format->group_rows;
    m->shape = weights_shape_of(w, num_experts, rows, inner);
    m->seed = random_next(random) >> 8;
    if (w->format > MOE_ROUTE_FORMAT_GGUF) fill_gguf(m, format);
    else if (w->format <= MOE_ROUTE_FORMAT_BF16) fill_plain(random, m);
    else stored_weights_fill(random, w, (which / 2) % 2 == 0, w->format == MOE_ROUTE_FORMAT_NVFP4, &m->shape, &m->stored);
    w->data = model_upload(&device, m->stored.data, m->stored.data_size, &m->data);
    w->scales = model_upload(&device, m->stored.scales, m->stored.scales_size, &m->scales);
    w->zero_points = model_upload(&device, m->stored.zero_points, m->stored.zero_points_size, &m->zero_points);
    w->global_scales = model_upload(&device, m->stored.global_scales, m->stored.global_scales_size, &m->global_scales);
}

static void sized_matrix_destroy(sized_matrix *m) {
    stored_weights_free(&m->stored);
    device_destroy(&device, &m->data);
    if (m->scales.address) device_destroy(&device, &m->scales);
    if (m->zero_points.address) device_destroy(&device, &m->zero_points);
    if (m->global_scales.address) device_destroy(&device, &m->global_scales);
}

static moe_route_dtype dtype_of(uint32_t which) {
    static const moe_route_dtype dtypes[] = {MOE_ROUTE_BF16, MOE_ROUTE_F32, MOE_ROUTE_F16};
    return dtypes[which % 3];
}

/* x of `num_tokens`, normal, but for the last `num_single`, which are 1 at one input: the last, then any. `values` is what is
   stored. */
static void *random_input(test_random *random, uint32_t num_tokens, uint32_t num_single, uint32_t inner, moe_route_dtype dtype,
                          float *values) {
    void *stored = model_random_array(random, (size_t)num_tokens * inner, dtype, 1.0f, values);
    uint32_t t, k;
    for (t = num_tokens - num_single; t < num_tokens; t++) {
        const uint32_t at = t == num_tokens - num_single ? inner - 1 : random_below(random, inner);
        for (k = 0; k < inner; k++) {
            values[(size_t)t * inner + k] = k == at ? 1.0f : 0.0f;
            quantize_store(stored, model_storage(dtype), (size_t)t * inner + k, k == at ? 1.0f : 0.0f);
        }
    }
    return stored;
}

/* ---- the matmul ---- */

/* Rows of the output of one pair against f64: all of them where x is a single 1, otherwise the first, the last and some. */
static void check_pair(test_random *random, const sized_matrix *m, int is_single, uint32_t expert, const float *x,
                       const void *out, size_t pair, moe_route_dtype dtype, const char *what) {
    enum { SAMPLES = 40 };
    const uint32_t rows = m->shape.rows;
    float got[SAMPLES], want[SAMPLES], rounded;
    uint32_t n, k = 0, i;
    if (is_single) {
        while (x[k] == 0) k++;
        for (n = 0; n < rows; n++) {
            const float value = quantize_load(out, model_storage(dtype), pair * rows + n);
            quantize_store(&rounded, model_storage(dtype), 0, (float)weight_at(m, expert, n, k));
            if (!CHECK(value == quantize_load(&rounded, model_storage(dtype), 0),
                       "%s: expert %u row %u input %u is %.9g instead of %.9g", what, expert, n, k, (double)value,
                       weight_at(m, expert, n, k)))
                return;
        }
        return;
    }
    for (i = 0; i < SAMPLES; i++) {
        n = i == 0 ? 0 : i == 1 ? rows - 1 : random_below(random, rows);
        got[i] = quantize_load(out, model_storage(dtype), pair * rows + n);
        want[i] = (float)dot(m, expert, n, x);
    }
    CHECK(relative_error(got, want, SAMPLES) <= model_bound(dtype), "%s: expert %u: relative error %.3g", what, expert,
          relative_error(got, want, SAMPLES));
}

static void check_matmul(const sized_format *format, uint32_t which, uint32_t num_experts, uint32_t rows, uint32_t inner) {
    const moe_route_dtype dtype = dtype_of(which);
    const int large = device.kind == MOE_ROUTE_DEVICE_CPU &&
                      (uint64_t)rows * inner > 3000000; /* slow on a CPU: a token of each kind */
    const uint32_t num_tokens = large ? 2 : 5, num_single = large ? 1 : 2, top_k = num_experts == 1 || large ? 1 : 2,
                   num_pairs = num_tokens * top_k;
    float *values = (float *)model_alloc((size_t)num_tokens * inner * 4);
    moe_route_layer *layer = NULL;
    moe_route_layer_desc desc;
    sized_matrix m;
    test_random random;
    int32_t ids[16];
    void *x, *out = model_alloc((size_t)num_pairs * rows * 4);
    uint32_t p;
    char what[128];
    snprintf(what, sizeof what, "%s, %u experts, N %u, K %u, dtype %d, choices %u", format->name, num_experts, rows, inner,
             (int)dtype, which);
    random_seed(&random, which * 1000 + num_experts);
    sized_matrix_create(&random, format, which, num_experts, rows, inner, &m);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = num_experts;
    desc.router.top_k = top_k;
    desc.experts.hidden_size = rows;
    desc.experts.intermediate_size = inner;
    desc.experts.dtype = dtype;
    desc.experts.down = m.weights;
    desc.max_tokens = num_tokens;
    desc.operations = MOE_ROUTE_OPERATION_MATMUL;
    for (p = 0; p < num_pairs; p++)
        ids[p] = (int32_t)(p == 0 ? num_experts - 1 : p == 1 ? 0 : random_below(&random, num_experts));
    x = random_input(&random, num_tokens, num_single, inner, dtype, values);
    if (CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device))) {
        CHECK(device_matmul(&device, layer, MOE_ROUTE_MATRIX_DOWN, 0, num_tokens, num_pairs, ids, x, (size_t)num_tokens * inner * model_dtype_size(dtype), out,
                            (size_t)num_pairs * rows * model_dtype_size(dtype)) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        for (p = 0; p < num_pairs; p++)
            check_pair(&random, &m, p / top_k >= num_tokens - num_single, (uint32_t)ids[p], values + (size_t)(p / top_k) * inner,
                       out, p, dtype, what);
    }
    moe_route_layer_destroy(layer);
    sized_matrix_destroy(&m);
    free(values);
    free(x);
    free(out);
}

/* Bytes of [E, N, K], about. */
static uint64_t matrix_bytes(const sized_format *format, uint64_t num_experts, uint32_t rows, uint32_t inner) {
    const moer_block block = moer_format_block(format->format);
    return num_experts * rows * inner / block.values * block.bytes * 9 / 8;
}

/* Every N and every K of a format once, with a number of experts that memory has room for; then the numbers that weren't met. */
TEST(matmuls_of_every_size) {
    const uint64_t limit = device.kind == MOE_ROUTE_DEVICE_GPU ? UINT64_C(2000000000) : UINT64_C(250000000);
    uint32_t f, i;
    for (f = 0; f < NUM_FORMATS; f++) {
        const uint32_t *inner = inner_of(&formats[f]);
        int met[NUM_COUNTS] = {0, 0, 0, 0, 0};
        if (small_size) {
            if (f % 4 == 0) check_matmul(&formats[f], f, 256, 33, inner[0]);
            continue;
        }
        for (i = 0; i < NUM_SIZES; i++) {
            const uint32_t rows = all_rows[i], columns = inner[(i * 3 + f) % NUM_SIZES];
            uint32_t count = (i + f) % NUM_COUNTS;
            while (count && matrix_bytes(&formats[f], expert_counts[count], rows, columns) > limit) count--;
            met[count] = 1;
            check_matmul(&formats[f], f + i, expert_counts[count], rows, columns);
        }
        for (i = 0; i < NUM_COUNTS; i++)
            if (!met[i]) check_matmul(&formats[f], f + i, expert_counts[i], 151, inner[5]);
    }
}

/* ---- the layer ---- */

static void check_layer(const sized_format *format, uint32_t which, uint32_t num_experts, uint32_t hidden, uint32_t columns) {
    enum { TOKENS = 3 };
    const moe_route_dtype dtype = dtype_of(which);
    const quantize_dtype storage = model_storage(dtype);
    const uint32_t top_k = num_experts == 1 ? 1 : 2;
    device_buffer buffers[5], workspace;
    moe_route_layer *layer = NULL;
    moe_route_layer_desc desc;
    moe_route_layer_args args;
    sized_matrix gate_up, down;
    test_random random;
    float *values = (float *)model_alloc(TOKENS * hidden * 4), *logits = (float *)model_alloc(TOKENS * num_experts * 4),
          *got = (float *)model_alloc(TOKENS * hidden * 4), *want = (float *)model_alloc(TOKENS * hidden * 4);
    float *h = (float *)model_alloc(columns * 4), *meaning = (float *)model_alloc(columns * 4), weights[2 * TOKENS];
    int32_t ids[2 * TOKENS];
    void *x, *out = model_alloc(TOKENS * hidden * 4), *alone = model_alloc(hidden * 4);
    const size_t row = hidden * model_dtype_size(dtype);
    size_t size = 0;
    uint32_t t, j, n, i;
    char what[128];
    snprintf(what, sizeof what, "%s, %u experts, hidden size %u, intermediate size %u, dtype %d, choices %u", format->name,
             num_experts, hidden, columns, (int)dtype, which);
    random_seed(&random, which * 1000 + num_experts + 500);
    sized_matrix_create(&random, format, which, num_experts, 2 * columns, hidden, &gate_up);
    sized_matrix_create(&random, format, which, num_experts, hidden, columns, &down);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = num_experts;
    desc.router.top_k = top_k;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc.experts.hidden_size = hidden;
    desc.experts.intermediate_size = columns;
    desc.experts.dtype = dtype;
    desc.experts.gate_up = gate_up.weights;
    desc.experts.down = down.weights;
    desc.max_tokens = TOKENS;
    for (i = 0; i < TOKENS * num_experts; i++) logits[i] = random_normal(&random);
    x = random_input(&random, TOKENS, 0, hidden, dtype, values);
    buffers[0] = device_create_aligned(&device, TOKENS * hidden * model_dtype_size(dtype), 16);
    device_upload(&device, &buffers[0], x, buffers[0].size);
    buffers[1] = device_create_aligned(&device, buffers[0].size, 16);
    buffers[2] = device_create_from(&device, logits, TOKENS * num_experts * 4);
    buffers[3] = device_create(&device, TOKENS * top_k * 4);
    buffers[4] = device_create(&device, TOKENS * top_k * 4);
    if (CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device))) {
        CHECK(moe_route_layer_workspace_size(layer, TOKENS, &size) == MOE_ROUTE_OK, "%s", device_message(&device));
        workspace = device_create_workspace(&device, size);
        memset(&args, 0, sizeof args);
        args.num_tokens = TOKENS;
        args.x = buffers[0].address;
        args.y = buffers[1].address;
        args.logits = buffers[2].address;
        args.ids = buffers[3].address;
        args.weights = buffers[4].address;
        args.workspace = workspace.address;
        args.workspace_size = size;
        args.stream = device.stream;
        CHECK(moe_route_layer_run(layer, &args) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        device_synchronize(&device);
        device_download(&device, out, &buffers[1], buffers[1].size);
        device_download(&device, ids, &buffers[3], buffers[3].size);
        device_download(&device, weights, &buffers[4], buffers[4].size);
        quantize_convert(got, QUANTIZE_F32, out, storage, TOKENS * hidden);
        args.num_tokens = 1; /* the last token alone: the same bits */
        args.x += (TOKENS - 1) * row;
        args.logits += (TOKENS - 1) * num_experts * 4;
        args.ids = args.weights = 0;
        CHECK(moe_route_layer_run(layer, &args) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        device_synchronize(&device);
        device_download(&device, alone, &buffers[1], row);
        CHECK_BYTES(alone, (const char *)out + (TOKENS - 1) * row, row, what);
        for (i = 0; i < TOKENS * top_k; i++)
            if (!CHECK(ids[i] >= 0 && ids[i] < (int32_t)num_experts, "%s: id %d", what, ids[i])) ids[i] = 0;
        for (t = 0; t < TOKENS; t++)
            for (j = 0; j < top_k; j++) {
                const uint32_t expert = (uint32_t)ids[t * top_k + j];
                for (n = 0; n < columns; n++) {
                    const double gate = dot(&gate_up, expert, n, values + t * hidden),
                                 up = dot(&gate_up, expert, n + columns, values + t * hidden);
                    quantize_store(h, storage, n, (float)(gate / (1 + exp(-gate)) * up));
                }
                quantize_convert(meaning, QUANTIZE_F32, h, storage, columns);
                for (n = 0; n < hidden; n++)
                    want[t * hidden + n] += (float)((double)weights[t * top_k + j] * dot(&down, expert, n, meaning));
            }
        CHECK(relative_error(got, want, TOKENS * hidden) <= model_bound(dtype), "%s: relative error %.3g", what,
              relative_error(got, want, TOKENS * hidden));
        device_destroy(&device, &workspace);
    }
    moe_route_layer_destroy(layer);
    sized_matrix_destroy(&gate_up);
    sized_matrix_destroy(&down);
    for (i = 0; i < 5; i++) device_destroy(&device, &buffers[i]);
    free(values);
    free(logits);
    free(got);
    free(want);
    free(h);
    free(meaning);
    free(x);
    free(out);
    free(alone);
}

/* The numbers of experts turned over against sizes of both matrices; and a token of a batch has the bits that it has alone. */
/* Arrays of scales that end with their memory, and not at a word, in kernels that copy them by words: nothing is read past them. In
   each the step before the last has its scales in two words, of which the second may be the end of the array. */
TEST(scales_may_end_with_their_memory) {
    static const struct {
        moe_route_format format;
        uint32_t which, group_size, inner[2]; /* choices without zero points; a row has an odd number of groups */
    } cases[] = {{MOE_ROUTE_FORMAT_INT4, 3, 64, {192, 2240}}, {MOE_ROUTE_FORMAT_INT8, 15, 32, {96, 1120}}, {MOE_ROUTE_FORMAT_MXFP4, 3, 32, {160, 2208}}};
    uint32_t i, j, f;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (j = 0; j < 2; j++) { /* one warp, and several that share a row */
            for (f = 0; formats[f].format != cases[i].format; f++) {}
            check_matmul(&formats[f], cases[i].which, 1, 33, cases[i].inner[j]);
            check_matmul(&formats[f], cases[i].which, 3, 35, cases[i].inner[j]);
        }
}

TEST(layers_of_every_number_of_experts) {
    uint32_t f, i;
    for (f = 0; f < NUM_FORMATS; f++) {
        const uint32_t *inner = inner_of(&formats[f]);
        for (i = 0; i < NUM_COUNTS; i++) {
            const uint32_t count = expert_counts[(i + f) % NUM_COUNTS], hidden = inner[formats[f].step == 256 ? i % 2 : i],
                           columns = inner[formats[f].step == 256 ? (i + 1) % 2 : (i * 2 + 1) % NUM_COUNTS];
            if (small_size && (f % 4 != 1 || i != 1)) continue;
            check_layer(&formats[f], f + i, small_size && count > 32 ? 32 : count, hidden, columns);
        }
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    if (!safetensors_open(&blocks_file, "tests/data/gguf.safetensors")) device_die(blocks_file.error);
    device_open_wanted(&device);
    RUN(matmuls_of_every_size);
    RUN(scales_may_end_with_their_memory);
    RUN(layers_of_every_number_of_experts);
    device_close(&device);
    safetensors_close(&blocks_file);
    return test_end();
}
