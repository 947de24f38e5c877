/*
  test_blocks.c: whole MoE blocks of Hugging Face transformers, from tests/data: the layer gives their output, in every dtype.
  What lies outside this library, the router's matmul and the shared expert, is computed plainly here.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "../examples/safetensors.h"

enum { HIDDEN = 128, COLUMNS = 64, TOKENS = 16 }; /* of all blocks */

static test_device device;
static int small_size;
static safetensors_file file;

typedef struct block {
    const char *name;
    const char *gate, *gate_bias;/* of the router's matmul */
    const char *selection_bias;
    const char *shared;          /* the shared expert's matrices without _proj.weight, or NULL */
    int transposed;              /* expert matrices are stored [E, in, out] */
    int biases;                  /* of the experts */
    int interleaved;
    moe_route_router router;
    model_choices choices;
} block;

static const block mixtral = {.name = "mixtral", .gate = "gate.weight", .router = {.num_experts = 8, .top_k = 2, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}};
static const block qwen3_moe = {.name = "qwen3_moe", .gate = "gate.weight", .router = {.num_experts = 8, .top_k = 4, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}};
static const block gpt_oss = {.name = "gpt_oss", .gate = "router.weight", .gate_bias = "router.bias", .transposed = 1, .biases = 1, .interleaved = 1,
                              .router = {.num_experts = 8, .top_k = 4, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED}, .choices = {.alpha = 1.702f, .up_offset = 1, .clamp = 7}};
static const block deepseek_v3 = {.name = "deepseek_v3", .gate = "gate.weight", .selection_bias = "gate.e_score_correction_bias", .shared = "shared_experts",
                                  .router = {.num_experts = 16, .top_k = 4, .score = MOE_ROUTE_SCORE_SIGMOID, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 4, .topk_groups = 2,
                                             .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 2.5f}};
static const block llama4 = {.name = "llama4", .gate = "router.weight", .shared = "shared_expert", .transposed = 1,
                             .router = {.num_experts = 8, .top_k = 1, .weight = MOE_ROUTE_WEIGHT_SIGMOID_SELECTED}, .choices = {.weight_on_input = 1}};
static const block longcat_flash = {.name = "longcat_flash", .gate = "router.classifier.weight", .selection_bias = "router.e_score_correction_bias",
                                    .router = {.num_experts = 12, .top_k = 4, .scale = 6}, .choices = {.num_identity = 4}};

static const float *find(const block *b, const char *tensor) {
    char name[128];
    const safetensors_tensor *found;
    snprintf(name, sizeof name, "%s.%s", b->name, tensor);
    found = safetensors_find(&file, name);
    if (!found) device_die(name);
    return (const float *)found->data;
}

/* ---- what lies outside the layer ---- */

/* out[t] = matrix @ x[t] + bias; `bias` may be NULL. */
static float *multiply(const float *matrix, const float *bias, const float *x, uint32_t rows, uint32_t inner) {
    float *out = (float *)model_alloc((size_t)TOKENS * rows * 4);
    uint32_t t, r, n;
    for (t = 0; t < TOKENS; t++)
        for (r = 0; r < rows; r++) {
            double sum = bias ? (double)bias[r] : 0.0;
            for (n = 0; n < inner; n++) sum += (double)x[t * inner + n] * (double)matrix[r * inner + n];
            out[t * rows + r] = (float)sum;
        }
    return out;
}

static float *shared_expert(const block *b, const float *x) {
    char name[96];
    float *gate, *up, *out;
    uint32_t i;
    snprintf(name, sizeof name, "%s.gate_proj.weight", b->shared);
    gate = multiply(find(b, name), NULL, x, COLUMNS, HIDDEN);
    snprintf(name, sizeof name, "%s.up_proj.weight", b->shared);
    up = multiply(find(b, name), NULL, x, COLUMNS, HIDDEN);
    for (i = 0; i < TOKENS * COLUMNS; i++) up[i] *= gate[i] / (1 + expf(-gate[i]));
    snprintf(name, sizeof name, "%s.down_proj.weight", b->shared);
    out = multiply(find(b, name), NULL, up, HIDDEN, COLUMNS);
    free(gate);
    free(up);
    return out;
}

/* ---- the layer ---- */

/* An expert matrix [E, rows, inner] as `storage`, on the device. */
static device_buffer expert_matrix(const block *b, const char *name, uint32_t num_experts, uint32_t rows, uint32_t inner, quantize_dtype storage) {
    const size_t count = (size_t)num_experts * rows * inner;
    const float *from = find(b, name);
    void *stored = model_alloc(count * 4);
    device_buffer buffer;
    size_t i;
    for (i = 0; i < count; i++) {
        const size_t e = i / inner / rows, r = i / inner % rows, n = i % inner;
        quantize_store(stored, storage, i, b->transposed ? from[(e * inner + n) * rows + r] : from[i]);
    }
    buffer = device_create_from(&device, stored, count * (storage == QUANTIZE_F32 ? 4 : 2));
    free(stored);
    return buffer;
}

static void check_block(const block *b, moe_route_dtype dtype, moe_route_format format, double bound) {
    const uint32_t num_experts = b->router.num_experts, num_real = num_experts - b->choices.num_identity;
    const quantize_dtype storage = format == MOE_ROUTE_FORMAT_F32 ? QUANTIZE_F32 : format == MOE_ROUTE_FORMAT_F16 ? QUANTIZE_F16 : QUANTIZE_BF16;
    const float *x = find(b, "x"), *y = find(b, "y");
    void *stored_x = model_alloc(TOKENS * HIDDEN * 4), *stored_shared = model_alloc(TOKENS * HIDDEN * 4);
    float *logits = multiply(find(b, b->gate), b->gate_bias ? find(b, b->gate_bias) : NULL, x, num_experts, HIDDEN);
    device_buffer bias;
    model m;
    model_input input;
    moe_route_layer_desc desc;
    memset(&m, 0, sizeof m);
    memset(&input, 0, sizeof input);
    memset(&bias, 0, sizeof bias);
    m.spec.num_experts = num_experts;
    m.spec.top_k = b->router.top_k;
    m.spec.hidden_size = HIDDEN;
    m.spec.intermediate_size = COLUMNS;
    m.spec.dtype = dtype;
    m.spec.format = format;
    m.spec.interleaved = b->interleaved;
    m.spec.choices = b->choices;
    model_describe(&m.spec, &desc);
    desc.router = b->router;
    if (b->selection_bias) {
        bias = device_create_from(&device, find(b, b->selection_bias), (size_t)num_experts * 4);
        desc.router.selection_bias = bias.address;
    }
    m.gate_up.data_buffer = expert_matrix(b, "experts.gate_up_proj", num_real, 2 * COLUMNS, HIDDEN, storage);
    m.down.data_buffer = expert_matrix(b, "experts.down_proj", num_real, HIDDEN, COLUMNS, storage);
    desc.experts.gate_up.data = m.gate_up.data_buffer.address;
    desc.experts.down.data = m.down.data_buffer.address;
    if (b->biases) {
        desc.experts.gate_up.bias_dtype = desc.experts.down.bias_dtype = MOE_ROUTE_F32;
        m.gate_up.bias_buffer = device_create_from(&device, find(b, "experts.gate_up_proj_bias"), (size_t)num_real * 2 * COLUMNS * 4);
        m.down.bias_buffer = device_create_from(&device, find(b, "experts.down_proj_bias"), (size_t)num_real * HIDDEN * 4);
        desc.experts.gate_up.bias = m.gate_up.bias_buffer.address;
        desc.experts.down.bias = m.down.bias_buffer.address;
    }
    quantize_convert(stored_x, model_storage(dtype), x, QUANTIZE_F32, TOKENS * HIDDEN);
    input.num_tokens = TOKENS;
    input.x = stored_x;
    input.logits = logits;
    if (b->shared) {
        float *shared = shared_expert(b, x);
        quantize_convert(stored_shared, model_storage(dtype), shared, QUANTIZE_F32, TOKENS * HIDDEN);
        input.shared = stored_shared;
        free(shared);
    }
    if (CHECK(moe_route_layer_create(device.context, &desc, &m.layer) == MOE_ROUTE_OK, "%s: %s", b->name, device_message(&device))) {
        model_output output;
        double error;
        CHECK(model_run(&device, &m, &input, &output) == MOE_ROUTE_OK, "%s: %s", b->name, device_message(&device));
        error = relative_error(output.y_values, y, TOKENS * HIDDEN);
        CHECK(error <= bound, "%s dtype %d format %d: relative error %.3g", b->name, (int)dtype, (int)format, error);
        model_output_free(&output);
    }
    model_destroy(&device, &m);
    if (bias.address) device_destroy(&device, &bias);
    free(stored_x);
    free(stored_shared);
    free(logits);
}

/* Tolerances: sums of f32; weights and activations rounded to 8 or 11 bits. */
static void check_dtypes(const block *b) {
    check_block(b, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 1e-6);
    check_block(b, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 7e-3);
    check_block(b, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_F16, 9e-4);
    if (!small_size) check_block(b, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_BF16, 4e-3);
}

TEST(mixtral_block) { check_dtypes(&mixtral); }
TEST(qwen3_moe_block) { check_dtypes(&qwen3_moe); }
TEST(gpt_oss_block) { check_dtypes(&gpt_oss); }
TEST(deepseek_v3_block) { check_dtypes(&deepseek_v3); }
TEST(llama4_block) { check_dtypes(&llama4); }
TEST(longcat_flash_block) { check_dtypes(&longcat_flash); }

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    if (!safetensors_open(&file, "tests/data/blocks.safetensors")) device_die(file.error);
    device_open_wanted(&device);
    RUN(mixtral_block);
    RUN(qwen3_moe_block);
    RUN(gpt_oss_block);
    RUN(deepseek_v3_block);
    RUN(llama4_block);
    RUN(longcat_flash_block);
    device_close(&device);
    safetensors_close(&file);
    return test_end();
}
