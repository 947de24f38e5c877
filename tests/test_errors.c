/*
  test_errors.c: what the library refuses: the status, a message that names the field and its value, and nothing written.
  Wrong descriptions are refused on the CPU backend and when compiling, there before anything is compiled. Then host memory
  that runs out, the logger, and the texts of messages and statuses.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"

#define NO_NVRTC "/nonexistent/libnvrtc.so" /* an attempt to compile would end in ERROR_NO_COMPILER */
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

typedef struct change { /* of one field: its place, its bytes (little-endian) and whether they replace or are added */
    size_t offset, size;
    uint64_t value;
    int add;
} change;

#define MEMBER(type, member) offsetof(type, member), sizeof(((type *)0)->member)
#define SET(member, value) {MEMBER(moe_route_layer_desc, member), (uint64_t)(value), 0}
#define NONE {0, 0, 0, 0}

static uint64_t apply(void *object, const change *c) {
    uint64_t value = 0;
    if (c->size == 0) return 0;
    memcpy(&value, (char *)object + c->offset, c->size);
    value = c->add ? value + c->value : c->value;
    memcpy((char *)object + c->offset, &value, c->size);
    return value;
}

static const char *message_of(const moe_route_context *context) {
    static char text[2048];
    moe_route_message(context, text, sizeof text);
    return text;
}

static moe_route_context *open_context(moe_route_device kind, uint32_t target) {
    moe_route_context_desc desc;
    moe_route_context *context = NULL;
    memset(&desc, 0, sizeof desc);
    desc.device = kind;
    desc.compile_target = target;
    desc.cache_dir = "off";
    desc.nvrtc_path = NO_NVRTC;
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) device_die("a context for the CPU or for compiling can't be created");
    return context;
}

/* ---- descriptions of layers ---- */

typedef enum base { ROUTER, BF16, INT4, INT8, FP8, MXFP4, NVFP4 } base;

static void describe(moe_route_layer_desc *desc, base which) {
    static const moe_route_format formats[] = {MOE_ROUTE_FORMAT_NONE, MOE_ROUTE_FORMAT_BF16, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT8, MOE_ROUTE_FORMAT_FP8, MOE_ROUTE_FORMAT_MXFP4, MOE_ROUTE_FORMAT_NVFP4};
    moe_route_weights *matrices[2];
    int i;
    memset(desc, 0, sizeof *desc);
    desc->router.num_experts = 8;
    desc->router.top_k = 2;
    if (which == ROUTER) return;
    desc->experts.hidden_size = 64;
    desc->experts.intermediate_size = 32;
    matrices[0] = &desc->experts.gate_up;
    matrices[1] = &desc->experts.down;
    for (i = 0; i < 2; i++) {
        matrices[i]->format = formats[which];
        matrices[i]->data = 4096;
        if (which == BF16) continue;
        matrices[i]->scales = 8192;
        matrices[i]->group_size = which == FP8 ? 128 : which == NVFP4 ? 16 : 32;
    }
}

typedef struct refusal {
    base from;
    change changes[2];
    moe_route_status status;
    const char *texts[2]; /* that the message contains */
    int cpu_alone;        /* allowed when compiling, where there is nothing to point at */
} refusal;

#define ARGUMENT MOE_ROUTE_ERROR_ARGUMENT
static const uint32_t five_and_two[] = {5, 2, 4294967295u};
static const refusal refusals[] = {
    {ROUTER, {SET(router.num_experts, 0), NONE}, ARGUMENT, {"router.num_experts is 0", "1 to 2048"}, 0},
    {ROUTER, {SET(router.num_experts, 2049), NONE}, ARGUMENT, {"router.num_experts is 2049", "1 to 2048"}, 0},
    {ROUTER, {SET(router.top_k, 0), NONE}, ARGUMENT, {"router.top_k is 0", "1 to 8"}, 0},
    {ROUTER, {SET(router.top_k, 9), NONE}, ARGUMENT, {"router.top_k is 9", "1 to 8"}, 0},
    {ROUTER, {SET(router.top_k, 65), SET(router.num_experts, 128)}, ARGUMENT, {"router.top_k is 65", "1 to 64"}, 0},
    {ROUTER, {SET(router.logits_dtype, 4), NONE}, ARGUMENT, {"router.logits_dtype is 4", "F32 (1)"}, 0},
    {ROUTER, {SET(router.score, 6), NONE}, ARGUMENT, {"router.score is 6", "0 to 5"}, 0},
    {ROUTER, {SET(router.weight, 4), NONE}, ARGUMENT, {"router.weight is 4", "SOFTMAX_SELECTED (1)"}, 0},
    {ROUTER, {SET(router.renormalize, 4), NONE}, ARGUMENT, {"router.renormalize is 4", "SUM (1)"}, 0},
    {ROUTER, {SET(router.renormalize_epsilon, 0xbf000000u), NONE}, ARGUMENT, {"router.renormalize_epsilon is -0.5", "positive"}, 0},
    {ROUTER, {SET(router.renormalize_epsilon, 0x7fc00000u), NONE}, ARGUMENT, {"router.renormalize_epsilon is ", "nan"}, 0},
    {ROUTER, {SET(router.renormalize_epsilon, 0x7f800000u), NONE}, ARGUMENT, {"router.renormalize_epsilon is ", "inf"}, 0},
    {ROUTER, {SET(router.scale, 0x7f800000u), NONE}, ARGUMENT, {"router.scale is inf", "finite"}, 0},
    {ROUTER, {SET(router.scale, 0xff800000u), NONE}, ARGUMENT, {"router.scale is -inf", "finite"}, 0},
    {ROUTER, {SET(router.scale, 0x7fc00000u), NONE}, ARGUMENT, {"router.scale is ", "nan"}, 0},
    {ROUTER, {SET(router.selection_bias, 4098), NONE}, ARGUMENT, {"router.selection_bias is 4098", "multiple of 4"}, 0},
    {ROUTER, {SET(experts.first_expert, 8), NONE}, ARGUMENT, {"experts.first_expert is 8", "0 to 7"}, 0},
    {ROUTER, {SET(experts.first_expert, 4294967295u), NONE}, ARGUMENT, {"experts.first_expert is 4294967295", "0 to 7"}, 0},
    {ROUTER, {SET(experts.num_local_experts, 9), NONE}, ARGUMENT, {"experts.num_local_experts is 9", "at most 8"}, 0},
    {ROUTER, {SET(experts.first_expert, 6), SET(experts.num_local_experts, 3)}, ARGUMENT, {"experts.num_local_experts is 3", "at most 2 from expert 6"}, 0},
    {ROUTER, {SET(experts.first_expert, 1), SET(experts.num_local_experts, 4294967295u)}, ARGUMENT, {"experts.num_local_experts is 4294967295", "at most 7"}, 0},
    {ROUTER, {SET(experts.num_identity_experts, 8), NONE}, ARGUMENT, {"experts.num_identity_experts is 8", "0 to 7"}, 0},
    {ROUTER, {SET(experts.num_identity_experts, 4294967295u), NONE}, ARGUMENT, {"experts.num_identity_experts is 4294967295", "0 to 7"}, 0},
    {ROUTER, {SET(experts.num_identity_experts, 3), SET(experts.first_expert, 5)}, ARGUMENT, {"experts.first_expert is 5", "0 to 4"}, 0},
    {ROUTER, {SET(experts.num_identity_experts, 3), SET(experts.num_local_experts, 6)}, ARGUMENT, {"experts.num_local_experts is 6", "at most 5 from expert 0"}, 0},
    {ROUTER, {SET(experts.dtype, 4), NONE}, ARGUMENT, {"experts.dtype is 4", "BF16 (3)"}, 0},
    {ROUTER, {SET(experts.hidden_size, 65537), NONE}, ARGUMENT, {"experts.hidden_size is 65537", "1 to 65536"}, 0},
    {BF16, {SET(experts.hidden_size, 65537), NONE}, ARGUMENT, {"experts.hidden_size is 65537", "1 to 65536"}, 0},
    {BF16, {SET(experts.hidden_size, 0), NONE}, ARGUMENT, {"experts.hidden_size is 0", "1 to 65536"}, 0},
    {BF16, {SET(experts.intermediate_size, 0), NONE}, ARGUMENT, {"experts.intermediate_size is 0", "1 to 65536"}, 0},
    {BF16, {SET(experts.intermediate_size, 65537), NONE}, ARGUMENT, {"experts.intermediate_size is 65537", "1 to 65536"}, 0},
    {BF16, {SET(experts.gate_up_order, 3), NONE}, ARGUMENT, {"experts.gate_up_order is 3", "NO_GATE (2)"}, 0},
    {ROUTER, {SET(experts.gate_up_order, 0xffffffffu), NONE}, ARGUMENT, {"experts.gate_up_order is ", "NO_GATE (2)"}, 0},
    {BF16, {SET(experts.activation, 5), NONE}, ARGUMENT, {"experts.activation is 5", "SITU (4)"}, 0},
    {BF16, {SET(experts.situ_beta, 0x40800000u), NONE}, ARGUMENT, {"experts.situ_beta is 4", "0 with others"}, 0},
    {BF16, {SET(experts.situ_beta, 0xc0800000u), SET(experts.activation, MOE_ROUTE_ACTIVATION_SITU)}, ARGUMENT, {"experts.situ_beta is -4", "positive"}, 0},
    {BF16, {SET(experts.situ_up_beta, 0x41c80000u), NONE}, ARGUMENT, {"experts.situ_up_beta is 25", "0 with others"}, 0},
    {BF16, {SET(experts.situ_up_beta, 0x7f800000u), SET(experts.activation, MOE_ROUTE_ACTIVATION_SITU)}, ARGUMENT, {"experts.situ_up_beta is inf", "positive"}, 0},
    {BF16, {SET(experts.activation_alpha, 0x7f800000u), NONE}, ARGUMENT, {"experts.activation_alpha is inf", "finite"}, 0},
    {BF16, {SET(experts.activation_alpha, 0x3fc00000u), SET(experts.activation, MOE_ROUTE_ACTIVATION_GELU_ERF)}, ARGUMENT, {"experts.activation_alpha is 1.5", "0 with others"}, 0},
    {BF16, {SET(experts.up_offset, 0xff800000u), NONE}, ARGUMENT, {"experts.up_offset is -inf", "finite"}, 0},
    {BF16, {SET(experts.up_offset, 0x3f800000u), SET(experts.gate_up_order, MOE_ROUTE_GATE_UP_NO_GATE)}, ARGUMENT, {"experts.up_offset is 1", "0 without gate"}, 0},
    {BF16, {SET(experts.clamp, 0xc0e00000u), NONE}, ARGUMENT, {"experts.clamp is -7", "positive"}, 0},
    {BF16, {SET(experts.clamp, 0x7f800000u), NONE}, ARGUMENT, {"experts.clamp is inf", "positive"}, 0},
    {BF16, {SET(experts.clamp, 0x7fc00000u), NONE}, ARGUMENT, {"experts.clamp is ", "nan"}, 0},
    {BF16, {SET(experts.clamp, 0x40e00000u), SET(experts.clamp_position, 2)}, ARGUMENT, {"experts.clamp_position is 2", "AFTER (1)"}, 0},
    {BF16, {SET(experts.clamp_position, 1), NONE}, ARGUMENT, {"experts.clamp_position is 1", "with a clamp"}, 0},
    {BF16, {SET(experts.gate_up.format, 9), NONE}, ARGUMENT, {"experts.gate_up.format is 9", "moe_route_format"}, 0},
    {BF16, {SET(experts.up.format, MOE_ROUTE_FORMAT_F16), NONE}, ARGUMENT, {"experts.up.format is 2", "that of experts.gate_up"}, 0},
    {BF16, {SET(experts.up.format, MOE_ROUTE_FORMAT_BF16), SET(experts.gate_up_order, 1)}, ARGUMENT, {"experts.gate_up_order is 1", "experts.up"}, 0},
    {BF16, {SET(experts.up.format, MOE_ROUTE_FORMAT_BF16), NONE}, ARGUMENT, {"experts.up.data is 0", "needed"}, 1},
    {BF16, {SET(experts.up.format, MOE_ROUTE_FORMAT_BF16), SET(experts.up.data, 4097)}, ARGUMENT, {"experts.up.data is 0x1001", "multiple of 2"}, 0},
    {BF16, {SET(experts.down.format, 99), NONE}, ARGUMENT, {"experts.down.format is 99", "moe_route_format"}, 0},
    {BF16, {SET(experts.gate_up.data, 0), NONE}, ARGUMENT, {"experts.gate_up.data is 0", "needed"}, 1},
    {BF16, {SET(experts.down.data, 0), NONE}, ARGUMENT, {"experts.down.data is 0", "needed"}, 1},
    {BF16, {SET(experts.gate_up.data, 4097), NONE}, ARGUMENT, {"experts.gate_up.data is 0x1001", "multiple of 2"}, 0},
    {BF16, {SET(experts.down.data, 4098), SET(experts.down.format, MOE_ROUTE_FORMAT_F32)}, ARGUMENT, {"experts.down.data is 0x1002", "multiple of 4"}, 0},
    {BF16, {SET(experts.gate_up.scales, 8192), NONE}, ARGUMENT, {"experts.gate_up has scales", "format has none"}, 0},
    {BF16, {SET(experts.down.group_size, 32), NONE}, ARGUMENT, {"experts.down has scales or a group_size", "format has none"}, 0},
    {BF16, {SET(experts.gate_up.bias, 4097), NONE}, ARGUMENT, {"experts.gate_up.bias is 0x1001", "multiple of 2"}, 0},
    {BF16, {SET(experts.down.bias, 4098), SET(experts.down.bias_dtype, MOE_ROUTE_F32)}, ARGUMENT, {"experts.down.bias is 0x1002", "multiple of 4"}, 0},
    {BF16, {SET(experts.down.bias, 4096), SET(experts.down.bias_dtype, 4)}, ARGUMENT, {"experts.down.bias_dtype is 4", "BF16 (3)"}, 0},
    {INT4, {SET(experts.hidden_size, 63), SET(experts.gate_up.group_size, 0)}, ARGUMENT, {"experts.gate_up has rows of 63", "multiple of 2"}, 0},
    {INT4, {SET(experts.intermediate_size, 31), SET(experts.down.group_size, 0)}, ARGUMENT, {"experts.down has rows of 31", "multiple of 2"}, 0},
    {INT4, {SET(experts.gate_up.group_size, 48), NONE}, ARGUMENT, {"experts.gate_up.group_size is 48", "16, 32, 64 or 128"}, 0},
    {INT8, {SET(experts.down.group_size, 256), NONE}, ARGUMENT, {"experts.down.group_size is 256", "16, 32, 64 or 128"}, 0},
    {FP8, {SET(experts.down.group_size, 64), NONE}, ARGUMENT, {"experts.down.group_size is 64", "128"}, 0},
    {MXFP4, {SET(experts.gate_up.group_size, 16), NONE}, ARGUMENT, {"experts.gate_up.group_size is 16", "is 32"}, 0},
    {NVFP4, {SET(experts.down.group_size, 32), NONE}, ARGUMENT, {"experts.down.group_size is 32", "is 16"}, 0},
    {MXFP4, {SET(experts.hidden_size, 48), NONE}, ARGUMENT, {"experts.gate_up has rows of 48", "multiple of 32"}, 0},
    {NVFP4, {SET(experts.intermediate_size, 40), NONE}, ARGUMENT, {"experts.down has rows of 40", "multiple of 16"}, 0},
    {BF16, {SET(experts.gate_up.format, MOE_ROUTE_FORMAT_GGUF_Q4_K), NONE}, ARGUMENT, {"experts.gate_up has rows of 64", "multiple of 256"}, 0},
    {BF16, {SET(experts.intermediate_size, 48), SET(experts.down.format, MOE_ROUTE_FORMAT_GGUF_MXFP4)}, ARGUMENT, {"experts.down has rows of 48", "multiple of 32"}, 0},
    {BF16, {SET(experts.gate_up.format, MOE_ROUTE_FORMAT_GGUF), NONE}, ARGUMENT, {"experts.gate_up.format is 100", "moe_route_format"}, 0},
    {BF16, {SET(experts.gate_up.format, MOE_ROUTE_FORMAT_GGUF + 15), NONE}, ARGUMENT, {"experts.gate_up.format is 115", "moe_route_format"}, 0},
    {INT4, {SET(experts.down.format, MOE_ROUTE_FORMAT_GGUF_Q4_0), NONE}, ARGUMENT, {"experts.down has scales or a group_size", "format has none"}, 0},
    {MXFP4, {SET(experts.gate_up.scales_dtype, MOE_ROUTE_F16), NONE}, ARGUMENT, {"experts.gate_up.scales_dtype is 2", "allowed is 0"}, 0},
    {NVFP4, {SET(experts.down.scales, 0), NONE}, ARGUMENT, {"experts.down.scales is 0", "needs scales"}, 1},
    {FP8, {SET(experts.down.scales, 8194), NONE}, ARGUMENT, {"experts.down.scales is 0x2002", "multiple of 4"}, 0},
    {FP8, {SET(experts.gate_up.scales_dtype, 4), NONE}, ARGUMENT, {"experts.gate_up.scales_dtype is 4", "F32 (1)"}, 0},
    {FP8, {SET(experts.gate_up.group_rows, 64), NONE}, ARGUMENT, {"experts.gate_up.group_rows is 64", "128 with FP8"}, 0},
    {FP8, {SET(experts.down.group_rows, 128), SET(experts.down.group_size, 0)}, ARGUMENT, {"experts.down.group_rows is 128", "group_size of 128"}, 0},
    {INT4, {SET(experts.down.group_rows, 128), SET(experts.down.group_size, 128)}, ARGUMENT, {"experts.down.group_rows is 128", "with FP8"}, 0},
    {INT4, {SET(experts.gate_up.codes, 3), NONE}, ARGUMENT, {"experts.gate_up.codes is 3", "SIGNED (2)"}, 0},
    {FP8, {SET(experts.down.codes, MOE_ROUTE_CODES_SIGNED), NONE}, ARGUMENT, {"experts.down.codes is 2", "INT8 and INT4"}, 0},
    {BF16, {SET(experts.down.codes, MOE_ROUTE_CODES_UNSIGNED), NONE}, ARGUMENT, {"experts.down.codes is 1", "INT8 and INT4"}, 0},
    {MXFP4, {SET(experts.gate_up.zero_points, 4096), NONE}, ARGUMENT, {"experts.gate_up.zero_points is 0x1000", "has none"}, 0},
    {BF16, {SET(experts.down.zero_points, 4096), NONE}, ARGUMENT, {"experts.down.zero_points is 0x1000", "has none"}, 0},
    {INT8, {SET(experts.down.global_scales, 4096), NONE}, ARGUMENT, {"experts.down.global_scales is 0x1000", "has none"}, 0},
    {NVFP4, {SET(experts.gate_up.global_scales, 4098), NONE}, ARGUMENT, {"experts.gate_up.global_scales is 0x1002", "multiple of 4"}, 0},
    {NVFP4, {SET(experts.gate_up.global_scales_shape, 3), NONE}, ARGUMENT, {"experts.gate_up.global_scales_shape is 3", "PER_PART (2)"}, 0},
    {NVFP4, {SET(experts.down.global_scales_shape, MOE_ROUTE_GLOBAL_SCALES_PER_PART), NONE}, ARGUMENT, {"experts.down.global_scales_shape is 2", "with gate_up"}, 0},
    {INT8, {SET(experts.gate_up.scales, 0), NONE}, ARGUMENT, {"experts.gate_up.scales is 0", "needs scales"}, 1},
    {INT4, {SET(experts.down.scales, 0), NONE}, ARGUMENT, {"experts.down.scales is 0", "needs scales"}, 1},
    {INT4, {SET(experts.gate_up.scales_dtype, 4), NONE}, ARGUMENT, {"experts.gate_up.scales_dtype is 4", "F16 (2)"}, 0},
    {INT8, {SET(experts.gate_up.scales, 8193), NONE}, ARGUMENT, {"experts.gate_up.scales is 0x2001", "multiple of 2"}, 0},
    {INT8, {SET(experts.down.scales, 8194), SET(experts.down.scales_dtype, MOE_ROUTE_F32)}, ARGUMENT, {"experts.down.scales is 0x2002", "multiple of 4"}, 0},
    {ROUTER, {SET(max_tokens, 1048577), NONE}, ARGUMENT, {"max_tokens is 1048577", "1 to 1048576"}, 0},
    {ROUTER, {SET(operations, 512), NONE}, ARGUMENT, {"operations is 512", "moe_route_operation"}, 0},
    {ROUTER, {SET(operations, 0x80000002u), NONE}, ARGUMENT, {"operations is 2147483650", "moe_route_operation"}, 0},
    {BF16, {SET(operations, MOE_ROUTE_OPERATION_LAYER), SET(experts.down.format, 0)}, ARGUMENT, {"experts.down.format is 0", "LAYER"}, 0},
    {BF16, {SET(operations, 0), SET(experts.down.format, 0)}, ARGUMENT, {"experts.down.format is 0", "data are given"}, 0},
    {BF16, {SET(operations, 0), SET(experts.up.data, 4096)}, ARGUMENT, {"experts.up.format is 0", "data are given"}, 0},
    {ROUTER, {SET(operations, 0), SET(experts.gate_up.data, 4096)}, ARGUMENT, {"experts.gate_up.format is 0", "data are given"}, 0},
    {BF16, {SET(operations, MOE_ROUTE_OPERATION_EXPERTS), SET(experts.gate_up.format, 0)}, ARGUMENT, {"experts.gate_up.format is 0", "EXPERTS"}, 0},
    {ROUTER, {SET(operations, MOE_ROUTE_OPERATION_MATMUL), NONE}, ARGUMENT, {"experts.gate_up.format", "MATMUL"}, 0},
    {ROUTER, {SET(operations, MOE_ROUTE_OPERATION_EXPAND), NONE}, ARGUMENT, {"experts.hidden_size is 0", "EXPAND"}, 0},
    {ROUTER, {SET(operations, MOE_ROUTE_OPERATION_COMBINE), NONE}, ARGUMENT, {"experts.hidden_size is 0", "COMBINE"}, 0},
    {ROUTER, {SET(operations, MOE_ROUTE_OPERATION_DISPATCH), SET(experts.num_ranks, 2)}, ARGUMENT, {"experts.hidden_size is 0", "DISPATCH"}, 0},
    {BF16, {SET(operations, MOE_ROUTE_OPERATION_DISPATCH), NONE}, ARGUMENT, {"experts.num_ranks is 0", "DISPATCH"}, 0},
    {BF16, {SET(operations, MOE_ROUTE_OPERATION_EXPERT_ROWS), SET(experts.down.format, 0)}, ARGUMENT, {"experts.down.format is 0", "EXPERT_ROWS"}, 0},
    {ROUTER, {SET(experts.num_ranks, 257), NONE}, ARGUMENT, {"experts.num_ranks is 257", "1 to 256"}, 0},
    {ROUTER, {SET(experts.rank_experts, (uintptr_t)five_and_two), NONE}, ARGUMENT, {"experts.num_ranks is 0", "rank_experts"}, 0},
    {ROUTER, {SET(experts.rank_experts, (uintptr_t)five_and_two), SET(experts.num_ranks, 2)}, ARGUMENT, {"experts.rank_experts adds up to 7", "8"}, 0},
    {ROUTER, {SET(experts.rank_experts, (uintptr_t)five_and_two), SET(experts.num_ranks, 3)}, ARGUMENT, {"experts.rank_experts[2] is 4294967295", "7 of 8"}, 0},
    {ROUTER, {SET(experts.num_physical_experts, 2049), NONE}, ARGUMENT, {"experts.num_physical_experts is 2049", "1 to 2048"}, 0},
    {ROUTER, {SET(experts.num_physical_experts, 8), SET(operations, MOE_ROUTE_OPERATION_ROUTE)}, ARGUMENT, {"experts.num_physical_experts is 8", "ROUTE"}, 0},
    {ROUTER, {SET(experts.expert_map_columns, 1), NONE}, ARGUMENT, {"experts.expert_map is 0", "expert_map_columns"}, 0},
    {ROUTER, {SET(rows_dtype, 4), NONE}, ARGUMENT, {"rows_dtype is 4", "F32 (1)"}, 0},
    {ROUTER, {SET(sums_of_max_tokens, 1048577), NONE}, ARGUMENT, {"sums_of_max_tokens is 1048577", "1 to 1048576"}, 0},
    {ROUTER, {SET(dependent_launch, 3), NONE}, ARGUMENT, {"dependent_launch is 3", "OFF (2)"}, 0},
    {ROUTER, {SET(fused_combine, 3), NONE}, ARGUMENT, {"fused_combine is 3", "OFF (2)"}, 0},
    {ROUTER, {SET(cub_maps, 3), NONE}, ARGUMENT, {"cub_maps is 3", "OFF (2)"}, 0},
    {BF16, {SET(fused_combine, MOE_ROUTE_ON), SET(max_tokens, 257)}, ARGUMENT, {"fused_combine is ON with max_tokens 257", "up to 512"}, 0},
};

static void check_refused(moe_route_context *context, const moe_route_layer_desc *desc, moe_route_status wanted, const char *const texts[2], const char *where) {
    moe_route_layer *layer = (moe_route_layer *)(uintptr_t)256;
    const moe_route_status status = moe_route_layer_create(context, desc, &layer);
    const char *message = message_of(context);
    CHECK(status == wanted, "%s: %s instead of %s for \"%s\": %s", where, moe_route_status_name(status), moe_route_status_name(wanted), texts[0], message);
    CHECK(strstr(message, texts[0]) && strstr(message, texts[1]), "%s: \"%s\" lacks \"%s\" or \"%s\"", where, message, texts[0], texts[1]);
    CHECK(layer == NULL, "%s: *layer isn't NULL for \"%s\"", where, texts[0]);
    if (status == MOE_ROUTE_OK) moe_route_layer_destroy(layer);
}

static void check_descriptions(moe_route_context *context, int cpu) {
    size_t i;
    for (i = 0; i < COUNT(refusals); i++) {
        const refusal *r = &refusals[i];
        moe_route_layer_desc desc;
        if (r->cpu_alone && !cpu) continue;
        describe(&desc, r->from);
        apply(&desc, &r->changes[0]);
        apply(&desc, &r->changes[1]);
        check_refused(context, &desc, r->status, r->texts, cpu ? "cpu" : "compile");
    }
}

TEST(wrong_descriptions_are_refused_on_the_cpu) {
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_CPU, 0);
    int which;
    check_descriptions(context, 1);
    for (which = ROUTER; which <= INT8; which++) { /* what the table changes is right to begin with */
        moe_route_layer_desc desc;
        moe_route_layer *layer = NULL;
        describe(&desc, (base)which);
        CHECK(moe_route_layer_create(context, &desc, &layer) == MOE_ROUTE_OK, "base %d: %s", which, message_of(context));
        moe_route_layer_destroy(layer);
    }
    moe_route_context_destroy(context);
}

TEST(wrong_descriptions_are_refused_before_compiling) {
    static const char *const launch[2] = {"dependent_launch is ON", "sm_80"}, *const compiler[2] = {"NVRTC", NO_NVRTC};
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_COMPILE, 90), *old = open_context(MOE_ROUTE_DEVICE_COMPILE, 80);
    moe_route_layer_desc desc;
    check_descriptions(context, 0);
    describe(&desc, ROUTER);
    check_refused(context, &desc, MOE_ROUTE_ERROR_NO_COMPILER, compiler, "compile");
    desc.dependent_launch = MOE_ROUTE_ON;
    check_refused(old, &desc, MOE_ROUTE_ERROR_UNSUPPORTED, launch, "sm_80");
    moe_route_context_destroy(context);
    moe_route_context_destroy(old);
}

/* ---- contexts ---- */

static void *plain_alloc(size_t size, void *user) {
    (void)user;
    return malloc(size);
}

static void plain_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

TEST(wrong_contexts_are_refused) {
    enum { TARGET_70, TARGET_0, TARGET_1000, ORDINAL, ALLOC_ALONE, FREE_ALONE, DEVICE, LONG_PATH, NUM };
    static const char *const texts[NUM] = {"compile_target is 70", "compile_target is 0", "compile_target is 1000", "device_ordinal is -1", "allocator.alloc and allocator.free",
                                           "allocator.alloc and allocator.free", "device is 4", "nvrtc_path"};
    static char path[5000];
    int i;
    memset(path, 'a', sizeof path - 1);
    for (i = 0; i < NUM; i++) {
        moe_route_context_desc desc;
        moe_route_context *context = NULL;
        moe_route_layer_desc layer_desc;
        moe_route_layer *layer = (moe_route_layer *)(uintptr_t)256;
        moe_route_context_info info;
        moe_route_status status;
        memset(&desc, 0, sizeof desc);
        desc.cache_dir = "off";
        desc.device = i <= TARGET_1000 ? MOE_ROUTE_DEVICE_COMPILE : i == DEVICE ? (moe_route_device)4 : MOE_ROUTE_DEVICE_CPU;
        desc.compile_target = i == TARGET_70 ? 70 : i == TARGET_1000 ? 1000 : 0;
        if (i == ORDINAL) desc.device_ordinal = -1;
        if (i == ALLOC_ALONE) desc.allocator.alloc = plain_alloc;
        if (i == FREE_ALONE) desc.allocator.free = plain_free;
        if (i == LONG_PATH) desc.nvrtc_path = path;
        status = moe_route_context_create(&desc, &context);
        CHECK(status == MOE_ROUTE_ERROR_ARGUMENT, "%s: %s", texts[i], moe_route_status_name(status));
        if (!CHECK(context != NULL, "%s: no context to ask for the message", texts[i])) continue;
        CHECK(strstr(message_of(context), texts[i]), "\"%s\" lacks \"%s\"", message_of(context), texts[i]);
        describe(&layer_desc, ROUTER);
        CHECK(moe_route_layer_create(context, &layer_desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && layer == NULL, "%s: a layer of a failed context", texts[i]);
        moe_route_context_get_info(context, &info);
        CHECK(info.device == (i <= TARGET_1000 ? MOE_ROUTE_DEVICE_COMPILE : MOE_ROUTE_DEVICE_CPU), "%s: the failed context is of device %d", texts[i], (int)info.device);
        CHECK(moe_route_cache_clear(context, NULL) == MOE_ROUTE_ERROR_ARGUMENT && moe_route_pack_use(context, path, sizeof path) == MOE_ROUTE_ERROR_ARGUMENT &&
                  moe_route_pack_save(&context, 1, "/nonexistent/pack") == MOE_ROUTE_ERROR_ARGUMENT, "%s: a failed context has a cache or a pack", texts[i]);
        moe_route_context_destroy(context);
    }
    CHECK(moe_route_context_create(NULL, NULL) == MOE_ROUTE_ERROR_ARGUMENT, "context NULL");
    moe_route_context_destroy(NULL);
    moe_route_layer_destroy(NULL);
}

/* ---- calls ---- */

enum { TOKENS = 3, EXPERTS = 8, TOP_K = 2, HIDDEN = 64, INTERMEDIATE = 32, PAIRS = TOKENS * TOP_K, BLOCK = 4, MAP_BYTES = 1024 };

typedef union any_args {
    moe_route_layer_args layer;
    moe_route_route_args route;
    moe_route_maps_args maps;
    moe_route_matmul_args matmul;
    moe_route_expand_args expand;
    moe_route_combine_args combine;
    moe_route_dispatch_args dispatch;
    moe_route_expert_rows_args expert_rows;
} any_args;

typedef enum function { LAYER, GIVEN, ROUTE, MAPS, MATMUL, EXPAND, COMBINE, DISPATCH, EXPERT_ROWS, NUM_FUNCTIONS } function;
static const char *const operation_names[] = {"LAYER", "EXPERTS", "ROUTE", "MAPS", "MATMUL", "EXPAND", "COMBINE", "DISPATCH", "EXPERT_ROWS"};
static const uint32_t operation_bits[] = {MOE_ROUTE_OPERATION_LAYER, MOE_ROUTE_OPERATION_EXPERTS, MOE_ROUTE_OPERATION_ROUTE, MOE_ROUTE_OPERATION_MAPS,
                                          MOE_ROUTE_OPERATION_MATMUL, MOE_ROUTE_OPERATION_EXPAND, MOE_ROUTE_OPERATION_COMBINE,
                                          MOE_ROUTE_OPERATION_DISPATCH, MOE_ROUTE_OPERATION_EXPERT_ROWS};

static moe_route_status call(function which, const moe_route_layer *layer, const any_args *args) {
    switch (which) {
    case LAYER:
    case GIVEN: return moe_route_layer_run(layer, args ? &args->layer : NULL);
    case ROUTE: return moe_route_route(layer, args ? &args->route : NULL);
    case MAPS: return moe_route_maps(layer, args ? &args->maps : NULL);
    case MATMUL: return moe_route_matmul(layer, args ? &args->matmul : NULL);
    case EXPAND: return moe_route_expand(layer, args ? &args->expand : NULL);
    case DISPATCH: return moe_route_dispatch(layer, args ? &args->dispatch : NULL);
    case EXPERT_ROWS: return moe_route_expert_rows(layer, args ? &args->expert_rows : NULL);
    default: return moe_route_combine(layer, args ? &args->combine : NULL);
    }
}

typedef struct memory {
    device_buffer weights, logits, ids, values, pairs, x, rows;              /* inputs */
    device_buffer out_ids, out_values, out_y, out_rows, out_maps, workspace; /* must keep their poison */
    size_t workspace_size;
} memory;

/* All addresses, from inputs that are right. */
static void fill_args(function which, const memory *m, any_args *args) {
    moe_route_expert_maps *maps = which == ROUTE ? &args->route.maps : &args->maps.maps;
    const moe_route_address workspace = m->workspace.address;
    memset(args, 0, sizeof *args);
    switch (which) {
    case LAYER:
    case GIVEN:
        args->layer.num_tokens = TOKENS;
        args->layer.logits = which == LAYER ? m->logits.address : 0;
        args->layer.ids = which == LAYER ? m->out_ids.address : m->ids.address;
        args->layer.weights = which == LAYER ? m->out_values.address : m->values.address;
        args->layer.x = m->x.address;
        args->layer.y = m->out_y.address;
        args->layer.shared_output = args->layer.residual = m->x.address;
        args->layer.shared_output_weights = m->values.address;
        args->layer.workspace = workspace;
        args->layer.workspace_size = m->workspace_size;
        return;
    case ROUTE:
        args->route.num_tokens = TOKENS;
        args->route.logits = m->logits.address;
        args->route.ids = m->out_ids.address;
        args->route.weights = m->out_values.address;
        break;
    case MAPS:
        args->maps.num_tokens = TOKENS;
        args->maps.ids = m->ids.address;
        break;
    case MATMUL:
        args->matmul.num_tokens = TOKENS;
        args->matmul.matrix = MOE_ROUTE_MATRIX_GATE_UP;
        args->matmul.ids = m->ids.address;
        args->matmul.x = m->x.address;
        args->matmul.out = m->out_rows.address;
        args->matmul.workspace = workspace;
        args->matmul.workspace_size = m->workspace_size;
        return;
    case EXPAND:
        args->expand.num_tokens = TOKENS;
        args->expand.x = m->x.address;
        args->expand.row_to_pair = m->pairs.address;
        args->expand.rows = m->out_rows.address;
        return;
    case DISPATCH:
        args->dispatch.num_tokens = TOKENS;
        args->dispatch.ids = m->ids.address;
        args->dispatch.weights = m->values.address;
        args->dispatch.x = m->x.address;
        args->dispatch.counts = m->out_maps.address;
        args->dispatch.offsets = m->out_maps.address + MAP_BYTES;
        args->dispatch.rows = m->out_rows.address;
        args->dispatch.row_ids = m->out_maps.address + 2 * MAP_BYTES;
        args->dispatch.row_weights = m->out_maps.address + 3 * MAP_BYTES;
        args->dispatch.row_to_token = m->out_maps.address + 4 * MAP_BYTES;
        args->dispatch.pair_to_row = m->out_ids.address;
        args->dispatch.pair_to_slot_row = m->out_values.address;
        return;
    case EXPERT_ROWS:
        args->expert_rows.num_tokens = TOKENS;
        args->expert_rows.ids = m->ids.address;
        args->expert_rows.weights = m->values.address;
        args->expert_rows.x = m->x.address;
        args->expert_rows.rows = m->out_rows.address;
        args->expert_rows.num_rows = PAIRS;
        args->expert_rows.num_sources = TOKENS;
        args->expert_rows.workspace = workspace;
        args->expert_rows.workspace_size = m->workspace_size;
        return;
    default:
        args->combine.num_tokens = TOKENS;
        args->combine.rows = m->rows.address;
        args->combine.pair_to_row = m->pairs.address;
        args->combine.weights = m->values.address;
        args->combine.y = m->out_y.address;
        args->combine.ids = m->ids.address;
        args->combine.x = args->combine.shared_output = args->combine.residual = m->x.address;
        args->combine.shared_output_weights = m->values.address;
        return;
    }
    maps->expert_offsets = m->out_maps.address;
    maps->row_to_pair = m->out_maps.address + MAP_BYTES;
    maps->aligned_row_to_pair = m->out_maps.address + 2 * MAP_BYTES;
    maps->block_to_expert = m->out_maps.address + 3 * MAP_BYTES;
    maps->aligned_rows = m->out_maps.address + 4 * MAP_BYTES;
    maps->block_size = BLOCK;
}

typedef struct call_refusal {
    function which;
    change changed;
    const char *field; /* "x is 0" in the message; "x is 0x..." with the address where it was moved */
} call_refusal;

#define ZERO(type, member) {MEMBER(moe_route_##type##_args, member), 0, 0}
#define TO(type, member, value) {MEMBER(moe_route_##type##_args, member), (uint64_t)(value), 0}
#define MOVE(type, member, bytes) {MEMBER(moe_route_##type##_args, member), (uint64_t)(bytes), 1}
static const call_refusal call_refusals[] = {
    {LAYER, TO(layer, num_tokens, 17), "num_tokens"},
    {LAYER, TO(layer, num_tokens, 4294967295u), "num_tokens"},
    {LAYER, MOVE(layer, logits, 2), "logits"},
    {LAYER, MOVE(layer, ids, 2), "ids"},
    {LAYER, MOVE(layer, weights, 1), "weights"},
    {LAYER, ZERO(layer, x), "x"},
    {LAYER, MOVE(layer, x, 8), "x"},
    {LAYER, ZERO(layer, y), "y"},
    {LAYER, MOVE(layer, y, 2), "y"},
    {LAYER, ZERO(layer, shared_output), "shared_output"},
    {LAYER, MOVE(layer, shared_output, 2), "shared_output"},
    {LAYER, MOVE(layer, shared_output_weights, 2), "shared_output_weights"},
    {LAYER, MOVE(layer, residual, 8), "residual"},
    {LAYER, TO(layer, num_valid_tokens, 4098), "num_valid_tokens"},
    {LAYER, ZERO(layer, workspace), "workspace"},
    {LAYER, MOVE(layer, workspace, 128), "workspace"},
    {LAYER, MOVE(layer, workspace_size, -1), "workspace_size"},
    {LAYER, ZERO(layer, workspace_size), "workspace_size"},
    {GIVEN, TO(layer, num_tokens, 17), "num_tokens"},
    {GIVEN, ZERO(layer, ids), "ids"},
    {GIVEN, MOVE(layer, ids, 2), "ids"},
    {GIVEN, ZERO(layer, weights), "weights"},
    {GIVEN, ZERO(layer, x), "x"},
    {GIVEN, ZERO(layer, y), "y"},
    {GIVEN, ZERO(layer, workspace), "workspace"},
    {ROUTE, TO(route, num_tokens, 17), "num_tokens"},
    {ROUTE, ZERO(route, logits), "logits"},
    {ROUTE, MOVE(route, logits, 2), "logits"},
    {ROUTE, ZERO(route, ids), "ids"},
    {ROUTE, MOVE(route, ids, 1), "ids"},
    {ROUTE, MOVE(route, weights, 2), "weights"},
    {ROUTE, MOVE(route, maps.expert_offsets, 2), "maps.expert_offsets"},
    {ROUTE, ZERO(route, maps.block_size), "maps.block_size"},
    {ROUTE, TO(route, maps.block_size, 2147483648u), "maps.block_size"},
    {ROUTE, TO(route, num_valid_tokens, 4097), "num_valid_tokens"},
    {MAPS, TO(maps, num_tokens, 17), "num_tokens"},
    {MAPS, ZERO(maps, ids), "ids"},
    {MAPS, MOVE(maps, ids, 2), "ids"},
    {MAPS, MOVE(maps, maps.row_to_pair, 1), "maps.row_to_pair"},
    {MAPS, TO(maps, maps.pair_to_row, 4098), "maps.pair_to_row"},
    {MAPS, TO(maps, maps.row_to_expert, 4098), "maps.row_to_expert"},
    {MAPS, TO(maps, maps.distinct_experts, 4098), "maps.distinct_experts"},
    {MAPS, TO(maps, maps.distinct_offsets, 4098), "maps.distinct_offsets"},
    {MAPS, TO(maps, maps.distinct_count, 4098), "maps.distinct_count"},
    {MAPS, MOVE(maps, maps.aligned_row_to_pair, 2), "maps.aligned_row_to_pair"},
    {MAPS, MOVE(maps, maps.block_to_expert, 2), "maps.block_to_expert"},
    {MAPS, MOVE(maps, maps.aligned_rows, 2), "maps.aligned_rows"},
    {MAPS, ZERO(maps, maps.block_size), "maps.block_size"},
    {MAPS, TO(maps, maps.block_size, 4294967295u), "maps.block_size"},
    {MATMUL, TO(matmul, num_tokens, 17), "num_tokens"},
    {MATMUL, TO(matmul, matrix, 2), "matrix"},
    {MATMUL, ZERO(matmul, ids), "ids"},
    {MATMUL, ZERO(matmul, x), "x"},
    {MATMUL, MOVE(matmul, x, 8), "x"},
    {MATMUL, ZERO(matmul, out), "out"},
    {MATMUL, MOVE(matmul, out, 4), "out"},
    {MATMUL, ZERO(matmul, workspace), "workspace"},
    {MATMUL, MOVE(matmul, workspace, 16), "workspace"},
    {MATMUL, MOVE(matmul, workspace_size, -1), "workspace_size"},
    {EXPAND, TO(expand, num_tokens, 17), "num_tokens"},
    {EXPAND, ZERO(expand, x), "x"},
    {EXPAND, MOVE(expand, x, 2), "x"},
    {EXPAND, ZERO(expand, row_to_pair), "row_to_pair"},
    {EXPAND, MOVE(expand, row_to_pair, 2), "row_to_pair"},
    {EXPAND, ZERO(expand, rows), "rows"},
    {EXPAND, MOVE(expand, rows, 8), "rows"},
    {COMBINE, TO(combine, num_tokens, 17), "num_tokens"},
    {COMBINE, ZERO(combine, rows), "rows"},
    {COMBINE, MOVE(combine, rows, 8), "rows"},
    {COMBINE, MOVE(combine, pair_to_row, 2), "pair_to_row"},
    {COMBINE, ZERO(combine, weights), "weights"},
    {COMBINE, MOVE(combine, weights, 2), "weights"},
    {COMBINE, ZERO(combine, y), "y"},
    {COMBINE, MOVE(combine, y, 2), "y"},
    {COMBINE, ZERO(combine, ids), "ids"},
    {COMBINE, MOVE(combine, ids, 2), "ids"},
    {COMBINE, ZERO(combine, x), "x"},
    {COMBINE, MOVE(combine, x, 8), "x"},
    {COMBINE, ZERO(combine, shared_output), "shared_output"},
    {COMBINE, MOVE(combine, shared_output, 8), "shared_output"},
    {COMBINE, MOVE(combine, shared_output_weights, 2), "shared_output_weights"},
    {COMBINE, MOVE(combine, residual, 2), "residual"},
    {COMBINE, TO(combine, num_valid_tokens, 4097), "num_valid_tokens"},
    {DISPATCH, TO(dispatch, num_tokens, 17), "num_tokens"},
    {DISPATCH, TO(dispatch, capacity, 536870912u), "capacity"},
    {DISPATCH, TO(dispatch, slot_capacity, 1), "slot_capacity"},
    {DISPATCH, ZERO(dispatch, ids), "ids"},
    {DISPATCH, MOVE(dispatch, ids, 2), "ids"},
    {DISPATCH, ZERO(dispatch, weights), "weights"},
    {DISPATCH, MOVE(dispatch, weights, 2), "weights"},
    {DISPATCH, ZERO(dispatch, x), "x"},
    {DISPATCH, MOVE(dispatch, x, 8), "x"},
    {DISPATCH, TO(dispatch, num_valid_tokens, 4098), "num_valid_tokens"},
    {DISPATCH, MOVE(dispatch, counts, 2), "counts"},
    {DISPATCH, MOVE(dispatch, offsets, 2), "offsets"},
    {DISPATCH, MOVE(dispatch, rows, 8), "rows"},
    {DISPATCH, MOVE(dispatch, row_ids, 2), "row_ids"},
    {DISPATCH, MOVE(dispatch, row_weights, 2), "row_weights"},
    {DISPATCH, MOVE(dispatch, row_to_token, 2), "row_to_token"},
    {DISPATCH, MOVE(dispatch, pair_to_row, 2), "pair_to_row"},
    {DISPATCH, MOVE(dispatch, pair_to_slot_row, 2), "pair_to_slot_row"},
    {EXPERT_ROWS, TO(expert_rows, num_tokens, 17), "num_tokens"},
    {EXPERT_ROWS, TO(expert_rows, num_rows, 2147483648u), "num_rows"},
    {EXPERT_ROWS, TO(expert_rows, num_sources, 2), "num_sources"},
    {EXPERT_ROWS, TO(expert_rows, num_sources, 4294967295u), "num_sources"},
    {EXPERT_ROWS, ZERO(expert_rows, ids), "ids"},
    {EXPERT_ROWS, MOVE(expert_rows, ids, 2), "ids"},
    {EXPERT_ROWS, MOVE(expert_rows, weights, 2), "weights"},
    {EXPERT_ROWS, ZERO(expert_rows, x), "x"},
    {EXPERT_ROWS, MOVE(expert_rows, x, 8), "x"},
    {EXPERT_ROWS, ZERO(expert_rows, rows), "rows"},
    {EXPERT_ROWS, MOVE(expert_rows, rows, 8), "rows"},
    {EXPERT_ROWS, TO(expert_rows, num_valid_tokens, 4097), "num_valid_tokens"},
    {EXPERT_ROWS, ZERO(expert_rows, workspace), "workspace"},
    {EXPERT_ROWS, MOVE(expert_rows, workspace, 128), "workspace"},
    {EXPERT_ROWS, MOVE(expert_rows, workspace_size, -1), "workspace_size"},
};

static int is_poison(const device_buffer *buffer) {
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)buffer->address;
    size_t i;
    for (i = 0; i < buffer->size; i++)
        if (bytes[i] != DEVICE_POISON) return 0;
    return 1;
}

static int nothing_written(const memory *m) {
    return is_poison(&m->out_ids) && is_poison(&m->out_values) && is_poison(&m->out_y) && is_poison(&m->out_rows) && is_poison(&m->out_maps) && is_poison(&m->workspace);
}

static void describe_runnable(moe_route_layer_desc *desc, const memory *m, uint32_t operations) {
    describe(desc, BF16);
    desc->experts.gate_up.data = desc->experts.down.data = m->weights.address;
    desc->experts.num_identity_experts = 1; /* then the combine needs all its arguments */
    desc->experts.num_ranks = 2;
    desc->operations = operations;
}

static void memory_open(test_device *device, memory *m) {
    static const int32_t order[PAIRS] = {0, 1, 2, 3, 4, 5};
    static const float zeros[EXPERTS * 2 * INTERMEDIATE * HIDDEN / 2];
    memset(m, 0, sizeof *m);
    m->weights = device_create_from(device, zeros, sizeof zeros); /* BF16 zeros: gate_up, and down reads half */
    m->logits = device_create_from(device, zeros, TOKENS * EXPERTS * 4);
    m->ids = device_create_from(device, order, sizeof order);
    m->pairs = device_create_from(device, order, sizeof order);
    m->values = device_create_from(device, zeros, PAIRS * 4);
    m->x = device_create_from(device, zeros, TOKENS * HIDDEN * 2);
    m->rows = device_create_from(device, zeros, PAIRS * HIDDEN * 2);
    m->out_ids = device_create(device, PAIRS * 4);
    m->out_values = device_create(device, PAIRS * 4);
    m->out_y = device_create(device, TOKENS * HIDDEN * 2);
    m->out_rows = device_create(device, PAIRS * 2 * INTERMEDIATE * 2); /* 2I = H: of matmul and of expand */
    m->out_maps = device_create(device, 5 * MAP_BYTES);
}

static void memory_close(test_device *device, memory *m) {
    device_buffer *const all[] = {&m->weights, &m->logits, &m->ids, &m->values, &m->pairs, &m->x, &m->rows, &m->out_ids, &m->out_values, &m->out_y, &m->out_rows, &m->out_maps, &m->workspace};
    size_t i;
    for (i = 0; i < COUNT(all); i++) device_destroy(device, all[i]);
}

TEST(wrong_calls_are_refused) {
    test_device device;
    memory m;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    any_args args;
    size_t i;
    if (!device_open(&device, MOE_ROUTE_DEVICE_CPU, NULL)) device_die(device.reason);
    memory_open(&device, &m);
    describe_runnable(&desc, &m, 511);
    if (!CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device))) device_die("no layer");
    CHECK(moe_route_layer_workspace_size(layer, TOKENS, &m.workspace_size) == MOE_ROUTE_OK, "%s", device_message(&device));
    m.workspace = device_create_workspace(&device, m.workspace_size);
    for (i = 0; i < COUNT(call_refusals); i++) {
        const call_refusal *r = &call_refusals[i];
        char text[96];
        moe_route_status status;
        uint64_t value;
        int address;
        fill_args(r->which, &m, &args);
        value = apply(&args, &r->changed);
        address = value != 0 && (r->changed.add || value == 4097 || value == 4098) && strcmp(r->field, "workspace_size") != 0;
        snprintf(text, sizeof text, address ? ": %s is 0x%llx" : ": %s is %llu", r->field, (unsigned long long)value);
        status = call(r->which, layer, &args);
        CHECK(status == MOE_ROUTE_ERROR_ARGUMENT, "%s%s: %s", operation_names[r->which], text, moe_route_status_name(status));
        CHECK(strstr(device_message(&device), text), "%s: \"%s\" lacks \"%s\"", operation_names[r->which], device_message(&device), text);
        CHECK(nothing_written(&m), "%s%s: something was written", operation_names[r->which], text);
    }
    for (i = 0; i < NUM_FUNCTIONS; i++) {
        fill_args((function)i, &m, &args);
        CHECK(call((function)i, NULL, &args) == MOE_ROUTE_ERROR_ARGUMENT, "%s: layer NULL", operation_names[i]);
        CHECK(call((function)i, layer, NULL) == MOE_ROUTE_ERROR_ARGUMENT, "%s: args NULL", operation_names[i]);
        CHECK(strstr(device_message(&device), "args is NULL"), "%s", device_message(&device));
    }
    CHECK(nothing_written(&m), "something was written");
    for (i = 0; i < NUM_FUNCTIONS; i++) { /* what the table changes is right to begin with */
        fill_args((function)i, &m, &args);
        CHECK(call((function)i, layer, &args) == MOE_ROUTE_OK, "%s: %s", operation_names[i], device_message(&device));
    }
    moe_route_layer_destroy(layer);
    memory_close(&device, &m);
    device_close(&device);
}

TEST(operations_that_were_not_prepared_are_refused) {
    test_device device;
    memory m;
    moe_route_layer_desc desc;
    any_args args;
    size_t i;
    if (!device_open(&device, MOE_ROUTE_DEVICE_CPU, NULL)) device_die(device.reason);
    memory_open(&device, &m);
    m.workspace_size = 65536;
    m.workspace = device_create_workspace(&device, m.workspace_size);
    for (i = 0; i < NUM_FUNCTIONS; i++) {
        moe_route_layer *layer = NULL;
        moe_route_plan plan;
        char text[64];
        describe_runnable(&desc, &m, 511 & ~operation_bits[i]);
        if (!CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device))) continue;
        fill_args((function)i, &m, &args);
        snprintf(text, sizeof text, "MOE_ROUTE_OPERATION_%s;", operation_names[i]);
        CHECK(call((function)i, layer, &args) == MOE_ROUTE_ERROR_NOT_PREPARED, "%s wasn't refused", operation_names[i]);
        CHECK(strstr(device_message(&device), text), "\"%s\" lacks \"%s\"", device_message(&device), text);
        CHECK(moe_route_layer_explain(layer, (moe_route_operation)operation_bits[i], 1, &plan) == MOE_ROUTE_ERROR_NOT_PREPARED, "explaining %s wasn't refused", operation_names[i]);
        CHECK(nothing_written(&m), "%s: something was written", operation_names[i]);
        moe_route_layer_destroy(layer);
    }
    describe_runnable(&desc, &m, MOE_ROUTE_OPERATION_MATMUL);
    desc.experts.down.format = MOE_ROUTE_FORMAT_NONE;
    {
        moe_route_layer *layer = NULL;
        CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
        fill_args(MATMUL, &m, &args);
        args.matmul.matrix = MOE_ROUTE_MATRIX_DOWN;
        CHECK(call(MATMUL, layer, &args) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "matrix is 1"), "a matrix that isn't there: %s", device_message(&device));
        CHECK(nothing_written(&m), "something was written");
        moe_route_layer_destroy(layer);
    }
    memory_close(&device, &m);
    device_close(&device);
}

TEST(null_pointers_are_refused) {
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_CPU, 0);
    moe_route_layer_desc desc;
    moe_route_layer *layer = (moe_route_layer *)(uintptr_t)256;
    moe_route_variant_info variant;
    moe_route_plan plan;
    size_t size = 1;
    uint32_t count = 1;
    describe(&desc, ROUTER);
    CHECK(moe_route_layer_create(NULL, &desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && layer == NULL, "context NULL");
    CHECK(moe_route_layer_create(context, &desc, NULL) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "layer is NULL"), "layer NULL: %s", message_of(context));
    CHECK(moe_route_layer_create(context, NULL, &layer) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "desc is NULL"), "desc NULL: %s", message_of(context));
    CHECK(layer == NULL, "*layer isn't NULL");
    REQUIRE(moe_route_layer_create(context, &desc, &layer) == MOE_ROUTE_OK, "%s", message_of(context));
    CHECK(moe_route_layer_count_variants(NULL, &desc, &count) == MOE_ROUTE_ERROR_ARGUMENT && count == 0, "count_variants: context NULL");
    CHECK(moe_route_layer_count_variants(context, &desc, NULL) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "count is NULL"), "count NULL: %s", message_of(context));
    count = 1;
    CHECK(moe_route_layer_count_variants(context, NULL, &count) == MOE_ROUTE_ERROR_ARGUMENT && count == 0 && strstr(message_of(context), "desc is NULL"), "count_variants: desc NULL: %s", message_of(context));
    desc.router.top_k = 0;
    count = 1;
    CHECK(moe_route_layer_count_variants(context, &desc, &count) == MOE_ROUTE_ERROR_ARGUMENT && count == 0 && strstr(message_of(context), "top_k is 0"), "count_variants: top_k 0: %s", message_of(context));
    CHECK(moe_route_layer_workspace_size(NULL, 1, &size) == MOE_ROUTE_ERROR_ARGUMENT && size == 0, "workspace_size: layer NULL");
    CHECK(moe_route_layer_workspace_size(layer, 1, NULL) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "size is NULL"), "size NULL: %s", message_of(context));
    size = 1;
    CHECK(moe_route_layer_workspace_size(layer, 17, &size) == MOE_ROUTE_ERROR_ARGUMENT && size == 0 && strstr(message_of(context), "num_tokens is 17"), "too many tokens: %s", message_of(context));
    CHECK(moe_route_layer_explain(NULL, MOE_ROUTE_OPERATION_ROUTE, 1, &plan) == MOE_ROUTE_ERROR_ARGUMENT, "explain: layer NULL");
    CHECK(moe_route_layer_explain(layer, MOE_ROUTE_OPERATION_ROUTE, 1, NULL) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "plan is NULL"), "plan NULL: %s", message_of(context));
    CHECK(moe_route_layer_variant(NULL, 0, &variant) == MOE_ROUTE_ERROR_ARGUMENT, "variant: layer NULL");
    CHECK(moe_route_layer_variant(layer, 0, NULL) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "info is NULL"), "info NULL: %s", message_of(context));
    CHECK(moe_route_layer_variant(layer, 7, &variant) == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "index is 7"), "variant 7: %s", message_of(context));
    CHECK(moe_route_aligned_capacity(NULL, 1, 16) == 0 && moe_route_layer_num_variants(NULL) == 0 && moe_route_plan_text(NULL, NULL, 0) == 0, "sizes of nothing");
    moe_route_context_get_info(context, NULL);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
}

TEST(a_context_that_only_compiles_runs_nothing) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_expand_args args;
    unsigned char rows[64];
    moe_route_status status;
    size_t i;
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = 90;
    context_desc.cache_dir = "off";
    REQUIRE(moe_route_context_create(&context_desc, &context) == MOE_ROUTE_OK, "no context");
    describe(&desc, ROUTER);
    desc.experts.hidden_size = 8;
    desc.operations = MOE_ROUTE_OPERATION_EXPAND;
    status = moe_route_layer_create(context, &desc, &layer);
    if (status == MOE_ROUTE_ERROR_NO_COMPILER) {
        test_skip("%s", message_of(context));
    } else if (CHECK(status == MOE_ROUTE_OK, "%s", message_of(context))) {
        memset(&args, 0, sizeof args);
        memset(rows, DEVICE_POISON, sizeof rows);
        args.num_tokens = 1;
        args.x = args.row_to_pair = args.rows = (moe_route_address)(uintptr_t)rows;
        CHECK(moe_route_expand(layer, &args) == MOE_ROUTE_ERROR_UNSUPPORTED && strstr(message_of(context), "only compiles"), "%s", message_of(context));
        for (i = 0; i < sizeof rows; i++) CHECK(rows[i] == DEVICE_POISON, "something was written");
    }
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
}

/* ---- memory, logger, texts ---- */

typedef struct counter {
    unsigned calls, fail_at; /* fail_at: the call that gets nothing, from 1 */
    int refused;
    long held;
    unsigned errors;         /* that the logger received */
    char last_error[2048];
} counter;

static void *counting_alloc(size_t size, void *user) {
    counter *c = (counter *)user;
    void *memory;
    if (++c->calls == c->fail_at) {
        c->refused = 1;
        return NULL;
    }
    memory = malloc(size);
    if (memory) {
        memset(memory, DEVICE_POISON, size);
        c->held++;
    }
    return memory;
}

static void counting_free(void *memory, void *user) {
    if (memory) ((counter *)user)->held--;
    free(memory);
}

static void counting_log(moe_route_log_level level, const char *message, void *user) {
    counter *c = (counter *)user;
    if (level != MOE_ROUTE_LOG_ERROR) return;
    c->errors++;
    snprintf(c->last_error, sizeof c->last_error, "%s", message);
}

/* Creates a context and a layer whose allocation number `fail_at` fails. */
static moe_route_status create_with(counter *c, moe_route_device kind, unsigned fail_at) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    uint32_t count = 0;
    moe_route_layer_desc desc;
    moe_route_status status;
    memset(c, 0, sizeof *c);
    c->fail_at = fail_at;
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = kind;
    context_desc.compile_target = 90;
    context_desc.cache_dir = "off";
    context_desc.allocator.alloc = counting_alloc;
    context_desc.allocator.free = counting_free;
    context_desc.allocator.user = c;
    context_desc.logger.log = counting_log;
    context_desc.logger.user = c;
    status = moe_route_context_create(&context_desc, &context);
    CHECK(context != NULL || status == MOE_ROUTE_ERROR_MEMORY, "no context, and %s", moe_route_status_name(status));
    if (context != NULL) {
        describe(&desc, ROUTER);
        desc.experts.hidden_size = 8;
        desc.operations = MOE_ROUTE_OPERATION_EXPAND;
        if (status == MOE_ROUTE_OK) status = moe_route_layer_count_variants(context, &desc, &count);
        CHECK(count == (status == MOE_ROUTE_OK && kind == MOE_ROUTE_DEVICE_COMPILE), "%u variants and %s", (unsigned)count, moe_route_status_name(status));
        if (status == MOE_ROUTE_OK) status = moe_route_layer_create(context, &desc, &layer);
        CHECK((status == MOE_ROUTE_OK) == (layer != NULL), "a layer and %s", moe_route_status_name(status));
        if (status != MOE_ROUTE_OK) {
            CHECK(c->errors == 1 && strncmp(c->last_error, message_of(context), sizeof c->last_error - 1) == 0, "the logger got %u errors, the last \"%s\"; the message is \"%s\"", c->errors,
                  c->last_error, message_of(context));
            CHECK(status != MOE_ROUTE_ERROR_MEMORY || strstr(c->last_error, "memory"), "%s", c->last_error);
        }
        moe_route_layer_destroy(layer);
    }
    moe_route_context_destroy(context);
    return status;
}

static void check_allocations(moe_route_device kind) {
    static counter c;
    unsigned n;
    for (n = 1; n < 200; n++) {
        const moe_route_status status = create_with(&c, kind, n);
        CHECK(c.held == 0, "allocation %u failed, and %ld were never freed", n, c.held);
        if (!c.refused) {
            CHECK(status == MOE_ROUTE_OK || status == MOE_ROUTE_ERROR_NO_COMPILER, "with all memory: %s", c.last_error);
            CHECK(n > 2, "only %u allocations", n - 1);
            return;
        }
        CHECK(status == MOE_ROUTE_ERROR_MEMORY, "allocation %u failed: %s, %s", n, moe_route_status_name(status), c.last_error);
    }
    CHECK(0, "200 allocations and no end");
}

TEST(memory_may_run_out_on_the_cpu) { check_allocations(MOE_ROUTE_DEVICE_CPU); }
TEST(memory_may_run_out_while_compiling) { check_allocations(MOE_ROUTE_DEVICE_COMPILE); }

TEST(statuses_have_names) {
    static const char *const names[] = {"OK", "ERROR_ARGUMENT", "ERROR_MEMORY", "ERROR_NO_DEVICE", "ERROR_UNSUPPORTED", "ERROR_NO_COMPILER", "ERROR_COMPILE", "ERROR_DRIVER",
                                        "ERROR_NOT_PREPARED", "ERROR_FORKED"};
    size_t i;
    for (i = 0; i < COUNT(names); i++) CHECK(strcmp(moe_route_status_name((moe_route_status)i), names[i]) == 0, "status %u is called %s", (unsigned)i, moe_route_status_name((moe_route_status)i));
    CHECK(moe_route_status_name((moe_route_status)10) != NULL && strncmp(moe_route_status_name((moe_route_status)10), "ERROR", 5) != 0, "an unknown status");
}

TEST(messages_are_cut_and_terminated) {
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_CPU, 0);
    moe_route_layer *layer = NULL;
    moe_route_layer_desc desc;
    char whole[512], text[512];
    size_t length, size;
    CHECK(moe_route_message(context, whole, sizeof whole) == 0 && whole[0] == 0, "a message without a failure: %s", whole);
    describe(&desc, ROUTER);
    desc.router.num_experts = 4000;
    CHECK(moe_route_layer_create(context, &desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT, "4000 experts");
    length = moe_route_message(context, whole, sizeof whole);
    CHECK(length == strlen(whole) && length > 20, "%lu for \"%s\"", (unsigned long)length, whole);
    CHECK(moe_route_message(context, NULL, 0) == length, "the length alone");
    for (size = 0; size <= length + 2; size++) {
        const size_t kept = size == 0 ? 0 : size - 1 < length ? size - 1 : length;
        memset(text, DEVICE_POISON, sizeof text);
        CHECK(moe_route_message(context, text, size) == length, "the length at size %lu", (unsigned long)size);
        CHECK(memcmp(text, whole, kept) == 0 && (size == 0 || text[kept] == 0) && (unsigned char)text[size ? kept + 1 : 0] == DEVICE_POISON, "cut to size %lu", (unsigned long)size);
    }
    CHECK(moe_route_message(NULL, text, sizeof text) == strlen(text) && strstr(text, "memory"), "without a context: %s", text);
    moe_route_context_destroy(context);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(wrong_descriptions_are_refused_on_the_cpu);
    RUN(wrong_descriptions_are_refused_before_compiling);
    RUN(wrong_contexts_are_refused);
    RUN(wrong_calls_are_refused);
    RUN(operations_that_were_not_prepared_are_refused);
    RUN(null_pointers_are_refused);
    RUN(a_context_that_only_compiles_runs_nothing);
    RUN(memory_may_run_out_on_the_cpu);
    RUN(memory_may_run_out_while_compiling);
    RUN(statuses_have_names);
    RUN(messages_are_cut_and_terminated);
    return test_end();
}
