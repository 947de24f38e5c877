/*
  cases.h: the routers, maps and layers that the tests run, in one place: what runs on a device is also compiled for every
  architecture. Include router.h and model.h first.
*/
#ifndef TEST_CASES_H
#define TEST_CASES_H

typedef struct route_case {
    moe_route_router router; /* without addresses */
    int logit_bias, selection_bias, expert_scale; /* arrays to give; a selection bias of 2 is large enough to turn scores negative */
    int in_small;                                /* part of TEST_SIZE=small */
} route_case;

static const route_case route_cases[] = {
    {.router = {.num_experts = 256, .top_k = 8, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, .in_small = 1},
    {.router = {.num_experts = 256, .top_k = 8, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 2.5f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 128, .top_k = 8}, .in_small = 1},
    {.router = {.num_experts = 32, .top_k = 4, .logits_dtype = MOE_ROUTE_F16, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED}, .in_small = 1},
    {.router = {.num_experts = 512, .top_k = 10, .scale = 6.0f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 1, .top_k = 1, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-6f}, .in_small = 1},
    {.router = {.num_experts = 7, .top_k = 7, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, .in_small = 1},
    {.router = {.num_experts = 33, .top_k = 5, .logits_dtype = MOE_ROUTE_BF16, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, .scale = 0.5f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 65, .top_k = 64, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f}, .in_small = 1},
    {.router = {.num_experts = 2048, .top_k = 64, .logits_dtype = MOE_ROUTE_F16, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-6f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 2, .top_k = 1, .score = MOE_ROUTE_SCORE_SIGMOID}, .selection_bias = 1},
    {.router = {.num_experts = 8, .top_k = 2, .logits_dtype = MOE_ROUTE_BF16, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}},
    {.router = {.num_experts = 31, .top_k = 3, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f}},
    {.router = {.num_experts = 60, .top_k = 4, .logits_dtype = MOE_ROUTE_F16}},
    {.router = {.num_experts = 64, .top_k = 6, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, .selection_bias = 1},
    {.router = {.num_experts = 72, .top_k = 12, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED}},
    {.router = {.num_experts = 160, .top_k = 6, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 2.5f}, .selection_bias = 1},
    {.router = {.num_experts = 257, .top_k = 9, .score = MOE_ROUTE_SCORE_SIGMOID, .scale = 1.5f}, .selection_bias = 1},
    {.router = {.num_experts = 384, .top_k = 8, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 2.827f}, .selection_bias = 1},
    {.router = {.num_experts = 512, .top_k = 22, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 5.0f}, .selection_bias = 1},
    {.router = {.num_experts = 768, .top_k = 12, .scale = 6.0f}, .selection_bias = 1},
    {.router = {.num_experts = 896, .top_k = 16, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM}, .selection_bias = 1},
    {.router = {.num_experts = 1025, .top_k = 32}},
    /* the router's bias, soft-cap, other scores */
    {.router = {.num_experts = 32, .top_k = 4, .logits_dtype = MOE_ROUTE_BF16, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED}, .logit_bias = 1, .in_small = 1},
    {.router = {.num_experts = 256, .top_k = 8, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .scale = 1.25f, .softcap = 30.0f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 64, .top_k = 6, .logits_dtype = MOE_ROUTE_F16, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .softcap = 2.5f}, .logit_bias = 1},
    {.router = {.num_experts = 256, .top_k = 6, .score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 1.5f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 40, .top_k = 5, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS}},
    {.router = {.num_experts = 48, .top_k = 3, .score = MOE_ROUTE_SCORE_IDENTITY, .scale = 0.5f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 31, .top_k = 4, .score = MOE_ROUTE_SCORE_IDENTITY, .renormalize = MOE_ROUTE_RENORMALIZE_L2, .renormalize_epsilon = 1e-6f}},
    {.router = {.num_experts = 16, .top_k = 2, .score = MOE_ROUTE_SCORE_SPARSE_MIXER, .jitter = 0.01f}, .in_small = 1},
    {.router = {.num_experts = 62, .top_k = 5, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SPARSE_MIXER, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .scale = 2.0f, .jitter = 0.2f}},
    {.router = {.num_experts = 96, .top_k = 7, .score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = ROUTER_CUSTOM_EXPRESSION, .score_function = router_custom_score}, .in_small = 1},
    {.router = {.num_experts = 144, .top_k = 6, .logits_dtype = MOE_ROUTE_F16, .score = MOE_ROUTE_SCORE_CUSTOM, .renormalize = MOE_ROUTE_RENORMALIZE_MAX_SUM, .renormalize_epsilon = 0.5f, .score_expression = ROUTER_CUSTOM_EXPRESSION, .score_function = router_custom_score}, .selection_bias = 1},
    /* groups */
    {.router = {.num_experts = 256, .top_k = 8, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 2.5f, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 8, .topk_groups = 4}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 192, .top_k = 8, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 8, .topk_groups = 2, .dropped = MOE_ROUTE_DROPPED_ZERO}, .selection_bias = 2},
    {.router = {.num_experts = 160, .top_k = 6, .scale = 16.0f, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 8, .topk_groups = 3, .dropped = MOE_ROUTE_DROPPED_ZERO}, .in_small = 1},
    {.router = {.num_experts = 32, .top_k = 6, .score = MOE_ROUTE_SCORE_SIGMOID, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 8, .topk_groups = 1, .dropped = MOE_ROUTE_DROPPED_ZERO_SCORE}, .in_small = 1},
    {.router = {.num_experts = 128, .top_k = 4, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 4, .topk_groups = 1}},
    {.router = {.num_experts = 72, .top_k = 8, .score = MOE_ROUTE_SCORE_SIGMOID, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 24, .topk_groups = 5, .dropped = MOE_ROUTE_DROPPED_ZERO}, .selection_bias = 2, .in_small = 1},
    {.router = {.num_experts = 576, .top_k = 10, .group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 48, .topk_groups = 40}, .selection_bias = 2},
    {.router = {.num_experts = 512, .top_k = 8, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .group_rule = MOE_ROUTE_GROUPS_QUOTA, .num_groups = 8}, .in_small = 1},
    {.router = {.num_experts = 288, .top_k = 36, .logits_dtype = MOE_ROUTE_F16, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .group_rule = MOE_ROUTE_GROUPS_QUOTA, .num_groups = 12}, .selection_bias = 1},
    /* given ids, and ids from a table */
    {.router = {.num_experts = 255, .top_k = 6, .score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .renormalize_epsilon = 1e-20f, .scale = 1.5f, .ids = MOE_ROUTE_IDS_TABLE, .id_table_rows = 100}, .in_small = 1},
    {.router = {.num_experts = 64, .top_k = 4, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .ids = MOE_ROUTE_IDS_GIVEN}, .in_small = 1},
    {.router = {.num_experts = 33, .top_k = 9, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SIGMOID, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, .ids = MOE_ROUTE_IDS_GIVEN}, .expert_scale = 1},
    /* weights */
    {.router = {.num_experts = 128, .top_k = 1, .weight = MOE_ROUTE_WEIGHT_SIGMOID_SELECTED}, .in_small = 1},
    {.router = {.num_experts = 128, .top_k = 8, .weight = MOE_ROUTE_WEIGHT_SIGMOID_SELECTED, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .weights_dtype = MOE_ROUTE_BF16}},
    {.router = {.num_experts = 64, .top_k = 6, .renormalize = MOE_ROUTE_RENORMALIZE_MAX_SUM, .renormalize_epsilon = 0.2f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 16, .top_k = 4, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_L2}, .in_small = 1},
    {.router = {.num_experts = 128, .top_k = 8, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .weights_dtype = MOE_ROUTE_F16}, .expert_scale = 1, .in_small = 1},
    {.router = {.num_experts = 128, .top_k = 4, .logits_dtype = MOE_ROUTE_BF16, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, .divide_by_top_k = 1}, .in_small = 1},
    {.router = {.num_experts = 17, .top_k = 1, .num_skip_experts = 9}, .selection_bias = 1, .in_small = 1},
    /* shared experts */
    {.router = {.num_experts = 256, .top_k = 6, .score = MOE_ROUTE_SCORE_SIGMOID, .renormalize = MOE_ROUTE_RENORMALIZE_SUM, .scale = 3.0f, .num_shared_experts = 2}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 48, .top_k = 5, .num_shared_experts = 2, .score = MOE_ROUTE_SCORE_SIGMOID, .weight = MOE_ROUTE_WEIGHT_SIGMOID_SHARE, .scale = 2.0f}, .selection_bias = 1, .in_small = 1},
    {.router = {.num_experts = 60, .top_k = 31, .logits_dtype = MOE_ROUTE_BF16, .score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS, .weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, .num_shared_experts = 7, .weights_dtype = MOE_ROUTE_BF16}, .logit_bias = 1},
};

typedef struct maps_case {
    uint32_t num_experts, top_k, first_expert, num_local; /* num_local 0: all */
    uint32_t columns, num_physical;                       /* of an expert map; 0: none */
    int in_small;
} maps_case;

static const maps_case maps_cases[] = {
    {256, 8, 0, 0, 0, 0, 1}, {32, 4, 8, 16, 0, 0, 1}, {1, 1, 0, 0, 0, 0, 1}, {2048, 64, 0, 0, 0, 0, 1}, {60, 6, 30, 30, 0, 0, 1}, {7, 5, 6, 1, 0, 0, 0}, {512, 10, 100, 257, 0, 0, 0},
    {1025, 3, 0, 0, 0, 0, 0}, {2048, 8, 1024, 1024, 0, 0, 0},
    /* experts elsewhere, with replicas */
    {24, 4, 0, 0, 1, 24, 1}, {32, 4, 10, 20, 3, 48, 1}, {256, 8, 144, 144, 2, 288, 0}, {40, 5, 0, 0, 64, 2048, 0},
};

typedef struct layer_case {
    model_spec spec;
    int in_small;
} layer_case;

#define PLAIN {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 0}
#define WITH(codes, zero_points, group_rows, global_scales) 0, 0, 0, 0, MOE_ROUTE_AUTO, MOE_ROUTE_AUTO, codes, zero_points, group_rows, global_scales, PLAIN
#define ALL 0, 0, 0, 0, MOE_ROUTE_AUTO, MOE_ROUTE_AUTO, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0 /* experts; tokens and operations as the test sets them */
#define REST ALL, PLAIN

static const layer_case layer_cases[] = {
    /* E, k, H, I, dtype, format, group, scales, interleaved, bias */
    {{16, 4, 256, 128, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}, 1},
    {{16, 4, 256, 128, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, 32, MOE_ROUTE_BF16, 1, MOE_ROUTE_BF16, REST}, 1},
    {{16, 4, 256, 128, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_INT4, 128, MOE_ROUTE_F32, 0, MOE_ROUTE_F32, REST}, 1},
    {{9, 3, 272, 70, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, 0, MOE_ROUTE_F32, 1, MOE_ROUTE_DTYPE_DEFAULT, REST}, 1},
    {{16, 4, 256, 128, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT8, 64, MOE_ROUTE_BF16, 0, MOE_ROUTE_F16, REST}, 1},
    {{7, 2, 131, 61, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT8, 0, MOE_ROUTE_F16, 1, MOE_ROUTE_DTYPE_DEFAULT, REST}, 1},
    {{16, 4, 256, 128, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_F32, REST}, 1},
    {{5, 5, 97, 33, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_DTYPE_DEFAULT, REST}, 1},
    {{8, 2, 65, 31, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}, 1},
    {{8, 2, 128, 64, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_F16, REST}, 0},
    {{8, 2, 128, 64, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_F16, REST}, 0},
    {{8, 2, 128, 96, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_INT8, 32, MOE_ROUTE_F16, 1, MOE_ROUTE_DTYPE_DEFAULT, REST}, 0},
    {{8, 2, 256, 256, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT8, 128, MOE_ROUTE_F32, 0, MOE_ROUTE_BF16, REST}, 0},
    {{32, 4, 2880, 576, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_F16, 1, MOE_ROUTE_BF16, REST}, 0},
    {{24, 8, 2048, 512, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, 128, MOE_ROUTE_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}, 0},
    {{16, 8, 704, 1056, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}, 0},
    {{4, 2, 544, 70, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, 128, MOE_ROUTE_BF16, 1, MOE_ROUTE_BF16, WITH(MOE_ROUTE_CODES_UNSIGNED, 1, 0, 0)}, 1},
    {{4, 2, 160, 129, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_FP8, 128, MOE_ROUTE_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, WITH(MOE_ROUTE_CODES_DEFAULT, 0, 128, 0)}, 1},
    {{4, 2, 288, 96, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_MXFP4, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_BF16, REST}, 1},
    {{4, 2, 208, 112, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_NVFP4, 16, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, WITH(MOE_ROUTE_CODES_DEFAULT, 0, 0, 3)}, 1},
    {{4, 2, 144, 48, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_NVFP4, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_F32, WITH(MOE_ROUTE_CODES_DEFAULT, 0, 0, 3)}, 1},
    {{4, 2, 256, 256, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_GGUF_Q4_K, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}, 1},
    {{4, 2, 512, 256, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_GGUF_Q6_K, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_F32, REST}, 0},
    {{4, 2, 288, 96, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_GGUF_Q8_0, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_BF16, REST}, 1},
    {{4, 2, 704, 352, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT8, 128, MOE_ROUTE_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, WITH(MOE_ROUTE_CODES_UNSIGNED, 1, 0, 0)}, 0},
    {{2, 1, 2880, 96, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_MXFP4, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_BF16, REST}, 0},
};

/* What stands between the matmuls, the weight's place, identity experts. Limits are low enough to bite. */
static const layer_case choice_cases[] = {
    /* activation, no gate, alpha or beta, up offset, clamp, its position, weight on input, identity experts, up's beta, up apart */
    {{8, 2, 64, 48, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_F32, ALL, {MOE_ROUTE_ACTIVATION_GELU_TANH, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 0}}, 1},
    {{8, 2, 64, 48, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_GELU_ERF, 0, 0, 0.5f, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 0}}, 1},
    {{16, 4, 256, 128, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_F16, 0, MOE_ROUTE_BF16, ALL, {MOE_ROUTE_ACTIVATION_RELU2, 1, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 0}}, 1},
    {{7, 3, 65, 31, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_GELU_ERF, 1, 0, 0, 0.4f, MOE_ROUTE_CLAMP_AFTER, 0, 0, 0, 0}}, 1},
    {{8, 4, 128, 64, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_BF16, ALL, {MOE_ROUTE_ACTIVATION_SILU, 0, 1.3f, 1, 0.8f, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 0}}, 1},
    {{8, 2, 128, 64, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0.3f, MOE_ROUTE_CLAMP_AFTER, 0, 0, 0, 0}}, 1},
    {{8, 2, 96, 40, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_F16, ALL, {MOE_ROUTE_ACTIVATION_SILU, 1, 0.7f, 0, 1, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 0}}, 1},
    {{16, 4, 256, 128, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT8, 64, MOE_ROUTE_F16, 0, MOE_ROUTE_F16, ALL, {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 1, 0, 0, 0}}, 1},
    {{12, 4, 128, 64, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 4, 0, 0}}, 1},
    {{11, 5, 67, 35, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_F32, ALL, {MOE_ROUTE_ACTIVATION_RELU2, 0, 0, -0.5f, 1.5f, MOE_ROUTE_CLAMP_BEFORE, 1, 6, 0, 0}}, 1},
    {{8, 2, 64, 48, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_SITU, 0, 4, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 25, 0}}, 1},
    {{8, 2, 64, 48, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_SITU, 0, 0.5f, 1, 0.2f, MOE_ROUTE_CLAMP_AFTER, 0, 0, 0.5f, 0}}, 1},
    /* gate and up as two matrices */
    {{16, 4, 256, 128, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_F16, 0, MOE_ROUTE_F16, 0, 0, 0, 0, MOE_ROUTE_AUTO, MOE_ROUTE_AUTO, MOE_ROUTE_CODES_DEFAULT, 1, 0, 0, {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 1}}, 1},
    {{6, 2, 256, 512, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_GGUF_Q4_K, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, ALL, {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 1}}, 1},
    {{5, 3, 61, 29, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_F32, ALL, {MOE_ROUTE_ACTIVATION_GELU_TANH, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, 0, 0, 0, 1}}, 1},
};

/* ---- expert parallelism ---- */

#define MAX_RANKS 9

typedef struct dispatch_case {
    uint32_t num_experts, top_k, hidden_size, columns, num_physical, num_ranks;
    moe_route_dtype dtype, weights_dtype;
    uint32_t rank_experts[MAX_RANKS]; /* all 0: even ranges */
    uint32_t num_identity;
    int in_small;
} dispatch_case;

static const dispatch_case dispatch_cases[] = {
    {16, 4, 64, 0, 0, 2, MOE_ROUTE_BF16, MOE_ROUTE_F32, {0}, 0, 1},
    {33, 5, 37, 0, 0, 7, MOE_ROUTE_F16, MOE_ROUTE_F16, {9, 0, 0, 20, 3, 1, 0}, 0, 1},
    {12, 3, 2050, 3, 20, 4, MOE_ROUTE_F16, MOE_ROUTE_F32, {0, 11, 2, 7}, 0, 1},
    {10, 6, 66, 0, 0, 3, MOE_ROUTE_F32, MOE_ROUTE_BF16, {0}, 4, 1},
    {8, 2, 16, 0, 0, 1, MOE_ROUTE_BF16, MOE_ROUTE_F32, {0}, 0, 0},
    {4, 4, 8, 0, 0, 9, MOE_ROUTE_BF16, MOE_ROUTE_F32, {0}, 0, 0},
    {256, 8, 520, 0, 0, 8, MOE_ROUTE_BF16, MOE_ROUTE_F32, {0}, 0, 0},
    {70, 64, 24, 0, 0, 5, MOE_ROUTE_F16, MOE_ROUTE_F32, {0}, 0, 0},
    {64, 1, 32, 2, 80, 4, MOE_ROUTE_F32, MOE_ROUTE_F32, {0}, 0, 0},
    {300, 9, 8, 0, 0, 200, MOE_ROUTE_BF16, MOE_ROUTE_F32, {0}, 0, 1}, /* more ranks than half a block has threads */
};

/* A model whose experts are spread, against one device that has all. */
typedef struct ranks_case {
    model_spec spec;
    uint32_t num_ranks, replicas;
    uint32_t rank_experts[MAX_RANKS]; /* all 0: even ranges */
    uint32_t tokens[MAX_RANKS];
    uint32_t max_tokens;              /* of the one device */
    int skewed;                       /* logits that send most tokens to the first experts */
    int in_small;
} ranks_case;

#define INT4_SPEC {16, 4, 256, 128, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_F16, 0, MOE_ROUTE_F16, REST}
#define LONG_SPEC {16, 4, 128, 512, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}
#define ODD_SPEC {9, 3, 272, 70, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, 0, MOE_ROUTE_F32, 1, MOE_ROUTE_DTYPE_DEFAULT, REST}
#define CHOICES(weight_on_input, num_identity) ALL, {MOE_ROUTE_ACTIVATION_SILU, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, weight_on_input, num_identity, 0, 0}
static const ranks_case ranks_cases[] = {
    {INT4_SPEC, 1, 0, {0}, {7}, 16, 0, 0},
    {LONG_SPEC, 2, 0, {0}, {5, 3}, 300, 0, 1}, /* alone they would cut the down matmul's sums otherwise than the one device */
    {ODD_SPEC, 3, 0, {5, 0, 4}, {4, 0, 6}, 16, 0, 1},
    {INT4_SPEC, 4, 6, {0}, {16, 1, 9, 16}, 64, 1, 0},
    {INT4_SPEC, 7, 0, {5, 0, 1, 7, 0, 3, 0}, {3, 2, 0, 9, 1, 0, 4}, 16, 0, 0},
    {INT4_SPEC, 2, 0, {0}, {90, 50}, 16, 1, 1}, /* more than 512 pairs */
    {{12, 4, 64, 96, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_BF16, CHOICES(1, 0)}, 3, 3, {0}, {4, 5, 2}, 16, 0, 0},
    {{12, 4, 64, 96, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_F16, 0, MOE_ROUTE_DTYPE_DEFAULT, 1, MOE_ROUTE_DTYPE_DEFAULT, CHOICES(0, 4)}, 2, 6, {0}, {8, 8}, 16, 0, 1}, /* more physical experts than E */
    {{8, 4, 32, 16, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_DTYPE_DEFAULT, REST}, 3, 2, {3, 0, 7}, {523, 17, 0}, 16, 1, 1}, /* more pairs than one launch dispatches */
    {{10, 5, 65, 31, MOE_ROUTE_F32, MOE_ROUTE_FORMAT_F32, 0, MOE_ROUTE_DTYPE_DEFAULT, 0, MOE_ROUTE_F32, REST}, 4, 0, {0}, {2, 3, 1, 2}, 16, 0, 0},
};

#undef REST
#undef ALL
#undef WITH
#undef PLAIN

/* A format of weights, and rows that it is tried on. */
typedef struct format_case {
    moe_route_format format;
    uint32_t group_size;
    moe_route_dtype scales_dtype;
    moe_route_codes codes;
    int zero_points;
    uint32_t group_rows;
    int global_scales; /* as in model_spec */
    uint32_t rows, inner;
    int in_small;
} format_case;

static const format_case format_cases[] = {
    {MOE_ROUTE_FORMAT_INT4, 16, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 17, 704, 1},
    {MOE_ROUTE_FORMAT_INT4, 16, MOE_ROUTE_BF16, MOE_ROUTE_CODES_DEFAULT, 1, 0, 0, 9, 264, 1},
    {MOE_ROUTE_FORMAT_INT4, 32, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 1, 0, 0, 21, 544, 1},
    {MOE_ROUTE_FORMAT_INT4, 32, MOE_ROUTE_F32, MOE_ROUTE_CODES_SIGNED, 0, 0, 0, 5, 32, 1},
    {MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_BF16, MOE_ROUTE_CODES_SIGNED, 1, 0, 0, 19, 544, 1},
    {MOE_ROUTE_FORMAT_INT4, 64, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 3, 1856, 0},
    {MOE_ROUTE_FORMAT_INT4, 128, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 1, 0, 0, 17, 704, 1},
    {MOE_ROUTE_FORMAT_INT4, 128, MOE_ROUTE_F32, MOE_ROUTE_CODES_UNSIGNED, 0, 0, 0, 7, 2880, 0},
    {MOE_ROUTE_FORMAT_INT4, 0, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 1, 0, 0, 33, 70, 1},
    {MOE_ROUTE_FORMAT_INT8, 16, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 1, 0, 0, 17, 544, 1},
    {MOE_ROUTE_FORMAT_INT8, 32, MOE_ROUTE_BF16, MOE_ROUTE_CODES_UNSIGNED, 0, 0, 0, 9, 32, 1},
    {MOE_ROUTE_FORMAT_INT8, 32, MOE_ROUTE_F32, MOE_ROUTE_CODES_SIGNED, 0, 0, 0, 21, 1856, 0},
    {MOE_ROUTE_FORMAT_INT8, 64, MOE_ROUTE_F16, MOE_ROUTE_CODES_UNSIGNED, 1, 0, 0, 17, 151, 1},
    {MOE_ROUTE_FORMAT_INT8, 128, MOE_ROUTE_BF16, MOE_ROUTE_CODES_SIGNED, 1, 0, 0, 5, 704, 1},
    {MOE_ROUTE_FORMAT_INT8, 128, MOE_ROUTE_F16, MOE_ROUTE_CODES_UNSIGNED, 0, 0, 0, 3, 2880, 0},
    {MOE_ROUTE_FORMAT_INT8, 0, MOE_ROUTE_F32, MOE_ROUTE_CODES_UNSIGNED, 1, 0, 0, 17, 61, 1},
    {MOE_ROUTE_FORMAT_FP8, 0, MOE_ROUTE_F32, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 19, 544, 1},
    {MOE_ROUTE_FORMAT_FP8, 0, MOE_ROUTE_BF16, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 7, 77, 1},
    {MOE_ROUTE_FORMAT_FP8, 128, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 128, 0, 145, 704, 1},
    {MOE_ROUTE_FORMAT_FP8, 128, MOE_ROUTE_BF16, MOE_ROUTE_CODES_DEFAULT, 0, 128, 0, 17, 2880, 0},
    {MOE_ROUTE_FORMAT_FP8, 128, MOE_ROUTE_F16, MOE_ROUTE_CODES_DEFAULT, 0, 1, 0, 5, 1856, 0},
    {MOE_ROUTE_FORMAT_MXFP4, 0, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 17, 704, 1},
    {MOE_ROUTE_FORMAT_MXFP4, 32, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 3, 32, 1},
    {MOE_ROUTE_FORMAT_MXFP4, 0, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 5, 2880, 0},
    {MOE_ROUTE_FORMAT_NVFP4, 0, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 17, 144, 1},
    {MOE_ROUTE_FORMAT_NVFP4, 16, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 1, 21, 544, 1},
    {MOE_ROUTE_FORMAT_NVFP4, 16, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 2, 3, 1856, 0},
#define GGUF(format, rows, inner, in_small) {MOE_ROUTE_FORMAT_GGUF_##format, 0, MOE_ROUTE_DTYPE_DEFAULT, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, rows, inner, in_small}
    GGUF(Q4_0, 17, 704, 1),
    GGUF(Q4_0, 3, 2880, 0),
    GGUF(Q4_1, 9, 544, 1),
    GGUF(Q5_0, 21, 544, 1),
    GGUF(Q5_0, 5, 1856, 0),
    GGUF(Q5_1, 5, 32, 1),
    GGUF(Q8_0, 19, 544, 1),
    GGUF(Q8_0, 3, 2880, 0),
    GGUF(Q8_0, 7, 256, 1),
    GGUF(Q2_K, 17, 512, 1),
    GGUF(Q3_K, 5, 256, 1),
    GGUF(Q4_K, 21, 768, 1),
    GGUF(Q5_K, 17, 512, 1),
    GGUF(Q6_K, 19, 512, 1),
    GGUF(Q6_K, 3, 2816, 0),
    GGUF(IQ4_NL, 9, 544, 1),
    GGUF(IQ4_XS, 17, 512, 1),
    GGUF(MXFP4, 19, 544, 1),
    GGUF(MXFP4, 3, 2880, 0),
    /* whole tiles of 16 rows, which are copied as they are where there's an engine for it */
    GGUF(Q4_0, 16, 704, 1),
    GGUF(Q4_1, 32, 544, 1),
    GGUF(Q5_0, 16, 1184, 1),
    GGUF(Q5_1, 16, 288, 1),
    GGUF(Q8_0, 32, 544, 1),
    GGUF(Q2_K, 16, 512, 1),
    GGUF(Q3_K, 32, 768, 1),
    GGUF(Q4_K, 48, 768, 1),
    GGUF(Q4_K, 16, 1280, 1),
    GGUF(Q5_K, 16, 512, 1),
    GGUF(Q6_K, 32, 768, 1),
    GGUF(Q6_K, 16, 1280, 1),
    GGUF(IQ4_NL, 16, 544, 1),
    GGUF(IQ4_XS, 16, 1280, 1),
    GGUF(MXFP4, 16, 1088, 1),
#undef GGUF
    {MOE_ROUTE_FORMAT_INT4, 16, MOE_ROUTE_F32, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 17, 512, 1},
    {MOE_ROUTE_FORMAT_INT4, 16, MOE_ROUTE_F32, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 5, 712, 1},
    {MOE_ROUTE_FORMAT_INT8, 16, MOE_ROUTE_F32, MOE_ROUTE_CODES_DEFAULT, 0, 0, 0, 9, 256, 0},
};

#define NUM_CASES(cases) (sizeof (cases) / sizeof (cases)[0])

#endif /* TEST_CASES_H */
