/*
  layer_options.h: the options that describe a model's router and experts, and the layer's description made of them. Shared by
  warm, bench and route. Numbers come from the options, and what they leave open from a config.json (config.h).
*/
#ifndef LAYER_OPTIONS_H
#define LAYER_OPTIONS_H

/* Presence of arrays, beyond what the preset's model always has. */
typedef struct layer_options {
    const char *config, *model_type, *scoring_func;
    moe_route_model model; /* but for its two texts */
    int norm_topk_prob;    /* moe_route_switch */
    /* the router by its fields: -1 or 0 where the preset's value, or the default, stays */
    int score, weight, renormalize, group_rule, dropped, logits, weights;
    float renormalize_epsilon;
    int divide_by_top_k, has_logit_bias, has_selection_bias, has_expert_scale;
    uint32_t skip_experts;
    /* experts */
    int dtype, format, down_format, scales, codes, zero_points, global_scales, bias, bias_dtype, separate_up;
    uint32_t group_size, group_rows, first_expert, local_experts;
    int activation, order, clamp_after, weight_on_input;
    float activation_alpha, situ_beta, situ_up_beta, up_offset, clamp;
    uint32_t expert_map_columns, physical_experts;
    /* the layer */
    const char *score_expression;
    uint32_t max_tokens, operations;
    int dependent_launch, fused_combine, cub_maps, tuned;
    uint32_t grouped_rows;
} layer_options;

static layer_options layer_wanted = {.score = -1,
                                     .weight = -1,
                                     .renormalize = -1,
                                     .group_rule = -1,
                                     .dropped = -1,
                                     .global_scales = -1,
                                     .activation = -1,
                                     .order = -1};

static const option_choice switch_choices[] = {{"auto", MOE_ROUTE_AUTO}, {"on", MOE_ROUTE_ON}, {"off", MOE_ROUTE_OFF}, {NULL, 0}};
static const option_choice yes_choices[] = {{"yes", MOE_ROUTE_ON}, {"no", MOE_ROUTE_OFF}, {NULL, 0}};
static const option_choice dtype_choices[] = {
    {"f32", MOE_ROUTE_F32}, {"f16", MOE_ROUTE_F16}, {"bf16", MOE_ROUTE_BF16}, {NULL, 0}};
static const option_choice score_choices[] = {{"softmax", MOE_ROUTE_SCORE_SOFTMAX},
                                              {"sigmoid", MOE_ROUTE_SCORE_SIGMOID},
                                              {"sqrt_softplus", MOE_ROUTE_SCORE_SQRT_SOFTPLUS},
                                              {"identity", MOE_ROUTE_SCORE_IDENTITY},
                                              {"sparse_mixer", MOE_ROUTE_SCORE_SPARSE_MIXER},
                                              {NULL, 0}};
static const option_choice weight_choices[] = {{"score", MOE_ROUTE_WEIGHT_SCORE},
                                               {"softmax_selected", MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED},
                                               {"sigmoid_selected", MOE_ROUTE_WEIGHT_SIGMOID_SELECTED},
                                               {"sigmoid_share", MOE_ROUTE_WEIGHT_SIGMOID_SHARE},
                                               {NULL, 0}};
static const option_choice renormalize_choices[] = {{"none", MOE_ROUTE_RENORMALIZE_NONE},
                                                    {"sum", MOE_ROUTE_RENORMALIZE_SUM},
                                                    {"max_sum", MOE_ROUTE_RENORMALIZE_MAX_SUM},
                                                    {"l2", MOE_ROUTE_RENORMALIZE_L2},
                                                    {NULL, 0}};
static const option_choice group_choices[] = {{"none", MOE_ROUTE_GROUPS_NONE},
                                              {"max", MOE_ROUTE_GROUPS_MAX},
                                              {"top2_sum", MOE_ROUTE_GROUPS_TOP2_SUM},
                                              {"quota", MOE_ROUTE_GROUPS_QUOTA},
                                              {NULL, 0}};
static const option_choice dropped_choices[] = {{"minus_infinity", MOE_ROUTE_DROPPED_MINUS_INFINITY},
                                                {"zero", MOE_ROUTE_DROPPED_ZERO},
                                                {"zero_score", MOE_ROUTE_DROPPED_ZERO_SCORE},
                                                {NULL, 0}};
static const option_choice format_choices[] = {{"int4", MOE_ROUTE_FORMAT_INT4},
                                               {"int8", MOE_ROUTE_FORMAT_INT8},
                                               {"fp8", MOE_ROUTE_FORMAT_FP8},
                                               {"mxfp4", MOE_ROUTE_FORMAT_MXFP4},
                                               {"nvfp4", MOE_ROUTE_FORMAT_NVFP4},
                                               {"bf16", MOE_ROUTE_FORMAT_BF16},
                                               {"f16", MOE_ROUTE_FORMAT_F16},
                                               {"f32", MOE_ROUTE_FORMAT_F32},
                                               {"q4_0", MOE_ROUTE_FORMAT_GGUF_Q4_0},
                                               {"q4_1", MOE_ROUTE_FORMAT_GGUF_Q4_1},
                                               {"q5_0", MOE_ROUTE_FORMAT_GGUF_Q5_0},
                                               {"q5_1", MOE_ROUTE_FORMAT_GGUF_Q5_1},
                                               {"q8_0", MOE_ROUTE_FORMAT_GGUF_Q8_0},
                                               {"q2_k", MOE_ROUTE_FORMAT_GGUF_Q2_K},
                                               {"q3_k", MOE_ROUTE_FORMAT_GGUF_Q3_K},
                                               {"q4_k", MOE_ROUTE_FORMAT_GGUF_Q4_K},
                                               {"q5_k", MOE_ROUTE_FORMAT_GGUF_Q5_K},
                                               {"q6_k", MOE_ROUTE_FORMAT_GGUF_Q6_K},
                                               {"iq4_nl", MOE_ROUTE_FORMAT_GGUF_IQ4_NL},
                                               {"iq4_xs", MOE_ROUTE_FORMAT_GGUF_IQ4_XS},
                                               {"gguf_mxfp4", MOE_ROUTE_FORMAT_GGUF_MXFP4},
                                               {NULL, 0}};
static const option_choice codes_choices[] = {
    {"unsigned", MOE_ROUTE_CODES_UNSIGNED}, {"signed", MOE_ROUTE_CODES_SIGNED}, {NULL, 0}};
static const option_choice global_choices[] = {{"expert", MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT},
                                               {"tensor", MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR},
                                               {"part", MOE_ROUTE_GLOBAL_SCALES_PER_PART},
                                               {NULL, 0}};
static const option_choice activation_choices[] = {
    {"silu", MOE_ROUTE_ACTIVATION_SILU},         {"gelu_tanh", MOE_ROUTE_ACTIVATION_GELU_TANH},
    {"gelu_erf", MOE_ROUTE_ACTIVATION_GELU_ERF}, {"relu2", MOE_ROUTE_ACTIVATION_RELU2},
    {"situ", MOE_ROUTE_ACTIVATION_SITU},         {NULL, 0}};
static const option_choice order_choices[] = {{"halves", MOE_ROUTE_GATE_UP_HALVES},
                                              {"interleaved", MOE_ROUTE_GATE_UP_INTERLEAVED},
                                              {"no_gate", MOE_ROUTE_GATE_UP_NO_GATE},
                                              {NULL, 0}};
static const option_choice operation_choices[] = {
    {"layer", MOE_ROUTE_OPERATION_LAYER},     {"route", MOE_ROUTE_OPERATION_ROUTE},
    {"maps", MOE_ROUTE_OPERATION_MAPS},       {"matmul", MOE_ROUTE_OPERATION_MATMUL},
    {"expand", MOE_ROUTE_OPERATION_EXPAND},   {"combine", MOE_ROUTE_OPERATION_COMBINE},
    {"experts", MOE_ROUTE_OPERATION_EXPERTS}, {NULL, 0}};

#define LAYER_MOST 4294967295.0

static const option router_options[] = {
    OPT_TITLE("The model, in the words of its config.json"),
    OPT_TEXT("--model", "TYPE", "its model_type: the router and the kind of experts are this model's", &layer_wanted.model_type),
    OPT_TEXT("--config", "FILE", "Hugging Face's config.json: the numbers that other options don't give", &layer_wanted.config),
    OPT_COUNT("--experts", "N", "num_experts, num_local_experts, n_routed_experts", &layer_wanted.model.num_experts, 1,
              LAYER_MOST),
    OPT_COUNT("--top-k", "N", "num_experts_per_tok", &layer_wanted.model.top_k, 1, LAYER_MOST),
    OPT_COUNT("--groups", "N", "n_group", &layer_wanted.model.num_groups, 0, LAYER_MOST),
    OPT_COUNT("--topk-groups", "N", "topk_group", &layer_wanted.model.topk_groups, 0, LAYER_MOST),
    OPT_COUNT("--shared-experts", "N", "n_shared_experts, where the router has logits for them",
              &layer_wanted.model.num_shared_experts, 0, LAYER_MOST),
    OPT_COUNT("--zero-experts", "N", "zero_expert_num: identity experts", &layer_wanted.model.num_zero_experts, 0, LAYER_MOST),
    OPT_CHOICE("--norm-topk-prob", "WORD", "norm_topk_prob", &layer_wanted.norm_topk_prob, yes_choices),
    OPT_REAL("--scale", "X", "routed_scaling_factor", &layer_wanted.model.scale, -3e38, 3e38),
    OPT_REAL("--softcap", "X", "soft-cap of the logits", &layer_wanted.model.softcap, 0, 3e38),
    OPT_REAL("--jitter", "X", "router_jitter_noise of SparseMixer", &layer_wanted.model.jitter, 0, 3e38),
    OPT_REAL("--norm-min", "X", "moe_norm_min", &layer_wanted.model.norm_min, 0, 3e38),
    OPT_TEXT("--scoring-func", "NAME", "scoring_func", &layer_wanted.scoring_func),
    OPT_TITLE("The router by its fields, instead of a model's or in its place"),
    OPT_CHOICE("--score", "WORD", "score of a logit", &layer_wanted.score, score_choices),
    OPT_CHOICE("--weight", "WORD", "weight of a selected expert", &layer_wanted.weight, weight_choices),
    OPT_CHOICE("--renormalize", "WORD", "of the selected weights", &layer_wanted.renormalize, renormalize_choices),
    OPT_REAL("--renormalize-epsilon", "X", "what is added to their sum, or its least value", &layer_wanted.renormalize_epsilon, 0,
             3e38),
    OPT_CHOICE("--group-rule", "WORD", "how groups are chosen", &layer_wanted.group_rule, group_choices),
    OPT_CHOICE("--dropped", "WORD", "what experts of other groups count", &layer_wanted.dropped, dropped_choices),
    OPT_FLAG("--divide-by-top-k", "divide the weights by k", &layer_wanted.divide_by_top_k),
    OPT_COUNT("--skip-experts", "N", "the last so many experts do nothing", &layer_wanted.skip_experts, 0, LAYER_MOST),
    OPT_END,
};

static const option experts_options[] = {
    OPT_TITLE("The experts"),
    OPT_COUNT("--hidden", "N", "hidden_size", &layer_wanted.model.hidden_size, 1, LAYER_MOST),
    OPT_COUNT("--intermediate", "N", "moe_intermediate_size", &layer_wanted.model.intermediate_size, 1, LAYER_MOST),
    OPT_CHOICE("--format", "FORMAT", "of the weights", &layer_wanted.format, format_choices),
    OPT_CHOICE("--down-format", "FORMAT", "of the down matrices, where it is another", &layer_wanted.down_format, format_choices),
    OPT_COUNT("--group-size", "N", "inputs that share a scale", &layer_wanted.group_size, 0, LAYER_MOST),
    OPT_COUNT("--group-rows", "N", "rows that share a scale: 128 with fp8 in blocks", &layer_wanted.group_rows, 0, LAYER_MOST),
    OPT_CHOICE("--scales", "TYPE", "type of the scales", &layer_wanted.scales, dtype_choices),
    OPT_CHOICE("--codes", "WORD", "how int4 and int8 codes stand for integers", &layer_wanted.codes, codes_choices),
    OPT_FLAG("--zero-points", "int4 and int8 have zero points", &layer_wanted.zero_points),
    OPT_CHOICE("--global-scales", "WORD", "nvfp4 has one for each", &layer_wanted.global_scales, global_choices),
    OPT_FLAG("--bias", "both matrices have biases (those of the model's type are assumed)", &layer_wanted.bias),
    OPT_CHOICE("--bias-type", "TYPE", "type of the biases; without it that of x", &layer_wanted.bias_dtype, dtype_choices),
    OPT_FLAG("--separate-up", "gate and up are two matrices, as in GGUF files", &layer_wanted.separate_up),
    OPT_CHOICE("--order", "WORD", "rows of gate and up", &layer_wanted.order, order_choices),
    OPT_CHOICE("--activation", "WORD", "instead of the model's", &layer_wanted.activation, activation_choices),
    OPT_REAL("--swiglu-limit", "X", "swiglu_limit, where the model's experts clamp", &layer_wanted.model.swiglu_limit, 0, 3e38),
    OPT_REAL("--activation-alpha", "X", "silu's alpha", &layer_wanted.activation_alpha, -3e38, 3e38),
    OPT_REAL("--situ-beta", "X", "situ's beta", &layer_wanted.situ_beta, 0, 3e38),
    OPT_REAL("--situ-up-beta", "X", "and that of up", &layer_wanted.situ_up_beta, 0, 3e38),
    OPT_REAL("--up-offset", "X", "what is added to up", &layer_wanted.up_offset, -3e38, 3e38),
    OPT_REAL("--clamp", "X", "limit of gate and up", &layer_wanted.clamp, 0, 3e38),
    OPT_FLAG("--clamp-after", "which holds after the activation", &layer_wanted.clamp_after),
    OPT_FLAG("--weight-on-input", "the router's weight multiplies the expert's input", &layer_wanted.weight_on_input),
    OPT_COUNT("--first-expert", "N", "expert parallelism: the first of this rank", &layer_wanted.first_expert, 0, LAYER_MOST),
    OPT_COUNT("--local-experts", "N", "and how many it has", &layer_wanted.local_experts, 0, LAYER_MOST),
    OPT_COUNT("--expert-map-columns", "N", "physical experts by a table: how many replicas an expert may have",
              &layer_wanted.expert_map_columns, 1, LAYER_MOST),
    OPT_COUNT("--physical-experts", "N", "and how many physical experts there are", &layer_wanted.physical_experts, 1,
              LAYER_MOST),
    OPT_TITLE("The layer"),
    OPT_CHOICE("--dtype", "TYPE", "of x and y; without it the config's, or bf16", &layer_wanted.dtype, dtype_choices),
    OPT_CHOICE("--logits", "TYPE", "of the logits; without it f32", &layer_wanted.logits, dtype_choices),
    OPT_CHOICE("--weights", "TYPE", "of the router's weights; without it f32", &layer_wanted.weights, dtype_choices),
    OPT_COUNT("--max-tokens", "N", "largest batch; without it 16", &layer_wanted.max_tokens, 1, LAYER_MOST),
    OPT_SET("--operations", "LIST", "what is called, with commas between; without it the layer, or the router without experts",
            &layer_wanted.operations, operation_choices),
    OPT_FLAG("--logit-bias", "the router's linear layer has a bias (assumed where the model's type has)",
             &layer_wanted.has_logit_bias),
    OPT_FLAG("--selection-bias", "experts are selected with a bias (likewise)", &layer_wanted.has_selection_bias),
    OPT_FLAG("--expert-scale", "weights have a factor by expert (likewise)", &layer_wanted.has_expert_scale),
    OPT_TEXT("--score-expression", "TEXT", "a score of one's own: a CUDA expression of float x", &layer_wanted.score_expression),
    OPT_COUNT("--hash-vocab", "N", "DeepSeek-V4's layers that take ids from a table: vocab_size", &layer_wanted.model.vocab_size,
              1, LAYER_MOST),
    OPT_CHOICE("--dependent-launch", "WORD", "programmatic dependent launch", &layer_wanted.dependent_launch, switch_choices),
    OPT_CHOICE("--fused-combine", "WORD", "down matmul and combine in one kernel", &layer_wanted.fused_combine, switch_choices),
    OPT_CHOICE("--cub-maps", "WORD", "maps of more than 8192 pairs by CUB", &layer_wanted.cub_maps, switch_choices),
    OPT_CHOICE("--tuned", "WORD", "kernels by what was tuned on this GPU: off: never, on: or not at all", &layer_wanted.tuned, switch_choices),
    OPT_COUNT("--grouped-rows", "N", "rows of a tile of more than 512 pairs: 32, 64 or 128", &layer_wanted.grouped_rows, 32, 128),
    OPT_END,
};

/* Ends the program when the library refused something. */
static void must_library(moe_route_context *context, moe_route_status status) {
    static char text[16384];
    if (status == MOE_ROUTE_OK) return;
    text[0] = 0;
    if (context) moe_route_message(context, text, sizeof text);
    stop(status == MOE_ROUTE_ERROR_ARGUMENT || status == MOE_ROUTE_ERROR_UNSUPPORTED ? STATUS_USAGE
         : status == MOE_ROUTE_ERROR_NO_DEVICE                                       ? STATUS_NO_GPU
         : status == MOE_ROUTE_ERROR_NO_COMPILER                                     ? STATUS_NO_NVRTC
                                                                                     : STATUS_FAILED,
         "%s", text[0] ? text : moe_route_status_name(status));
}

/* The router of the options: a model's, or the fields' own, or both. */
static void layer_describe_router(moe_route_context *context, const layer_options *o, moe_route_layer_desc *desc) {
    moe_route_router *router = &desc->router;
    if (o->model_type) {
        moe_route_model model = o->model;
        model.model_type = o->model_type;
        model.scoring_func = o->scoring_func;
        model.norm_topk_prob = (moe_route_switch)o->norm_topk_prob;
        model.hash_layer = o->model.vocab_size != 0;
        must_library(context, moe_route_preset(context, &model, desc));
    } else {
        memset(desc, 0, sizeof *desc);
        if (o->scoring_func)
            stop(STATUS_USAGE, "--scoring-func is a model's: it goes with --model; without, the score is --score");
        if (o->model.norm_min != 0 || o->model.swiglu_limit != 0 || o->model.vocab_size)
            stop(STATUS_USAGE, "--norm-min, --swiglu-limit and --hash-vocab are a model's: they go with --model");
        router->num_experts = o->model.num_experts + o->model.num_zero_experts;
        router->top_k = o->model.top_k;
        router->num_groups = o->model.num_groups;
        router->topk_groups = o->model.topk_groups;
        router->num_shared_experts = o->model.num_shared_experts;
        router->scale = o->model.scale;
        router->softcap = o->model.softcap;
        router->jitter = o->model.jitter;
        if (o->norm_topk_prob == MOE_ROUTE_ON) router->renormalize = MOE_ROUTE_RENORMALIZE_SUM;
        desc->experts.hidden_size = o->model.hidden_size;
        desc->experts.intermediate_size = o->model.intermediate_size;
        desc->experts.num_identity_experts = o->model.num_zero_experts;
    }
    if (o->score >= 0) router->score = (moe_route_score)o->score;
    if (o->weight >= 0) router->weight = (moe_route_weight)o->weight;
    if (o->renormalize >= 0) router->renormalize = (moe_route_renormalize)o->renormalize;
    if (o->renormalize_epsilon > 0) router->renormalize_epsilon = o->renormalize_epsilon;
    if (o->group_rule >= 0) router->group_rule = (moe_route_group_rule)o->group_rule;
    if (o->dropped >= 0) router->dropped = (moe_route_dropped)o->dropped;
    if (o->divide_by_top_k) router->divide_by_top_k = 1;
    if (o->skip_experts) router->num_skip_experts = o->skip_experts;
}

static void layer_describe_matrix(const layer_options *o, int format, moe_route_address data, moe_route_address scales,
                                  moe_route_weights *weights) {
    memset(weights, 0, sizeof *weights);
    weights->format = (moe_route_format)format;
    weights->data = data;
    if (format > MOE_ROUTE_FORMAT_BF16 && format < MOE_ROUTE_FORMAT_GGUF) {
        const int is_integer = format == MOE_ROUTE_FORMAT_INT4 || format == MOE_ROUTE_FORMAT_INT8;
        weights->scales = scales;
        weights->group_size = o->group_size;
        if (is_integer || format == MOE_ROUTE_FORMAT_FP8) weights->scales_dtype = (moe_route_dtype)o->scales;
        if (format == MOE_ROUTE_FORMAT_FP8) weights->group_rows = o->group_rows;
        if (is_integer) weights->codes = (moe_route_codes)o->codes;
        if (is_integer && o->zero_points) weights->zero_points = scales;
        if (format == MOE_ROUTE_FORMAT_NVFP4 && o->global_scales >= 0) {
            weights->global_scales = scales;
            weights->global_scales_shape = (moe_route_global_scales)o->global_scales;
        }
    }
}

/* A description to compile for: an address that stands for any which is aligned to 256 bytes, where the layer will have one. */
static void layer_describe(moe_route_context *context, const layer_options *o, moe_route_layer_desc *desc) {
    const moe_route_address somewhere = 256;
    moe_route_experts *experts = &desc->experts;
    layer_describe_router(context, o, desc);
    if (o->has_logit_bias || (desc->needs & MOE_ROUTE_NEED_LOGIT_BIAS)) desc->router.logit_bias = somewhere;
    if (o->has_selection_bias || (desc->needs & MOE_ROUTE_NEED_SELECTION_BIAS)) desc->router.selection_bias = somewhere;
    if (o->has_expert_scale || (desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE)) desc->router.expert_scale = somewhere;
    if (desc->needs & MOE_ROUTE_NEED_ID_TABLE) desc->router.id_table = somewhere;
    desc->router.logits_dtype = (moe_route_dtype)o->logits;
    desc->router.weights_dtype = (moe_route_dtype)o->weights;
    desc->max_tokens = o->max_tokens;
    desc->operations = o->operations;
    desc->dependent_launch = (moe_route_switch)o->dependent_launch;
    desc->fused_combine = (moe_route_switch)o->fused_combine;
    desc->cub_maps = (moe_route_switch)o->cub_maps;
    desc->tuned = (moe_route_switch)o->tuned;
    desc->grouped_rows = o->grouped_rows;
    experts->dtype = (moe_route_dtype)o->dtype;
    experts->first_expert = o->first_expert;
    experts->num_local_experts = o->local_experts;
    if (o->activation >= 0) experts->activation = (moe_route_activation)o->activation;
    if (o->order >= 0) experts->gate_up_order = (moe_route_gate_up_order)o->order;
    if (o->activation_alpha != 0) experts->activation_alpha = o->activation_alpha;
    if (o->situ_beta != 0) experts->situ_beta = o->situ_beta;
    if (o->situ_up_beta != 0) experts->situ_up_beta = o->situ_up_beta;
    if (o->up_offset != 0) experts->up_offset = o->up_offset;
    if (o->clamp != 0) experts->clamp = o->clamp;
    if (o->clamp_after) experts->clamp_position = MOE_ROUTE_CLAMP_AFTER;
    if (o->weight_on_input) experts->weight_on_input = 1;
    if (o->expert_map_columns) experts->expert_map = somewhere;
    experts->expert_map_columns = o->expert_map_columns;
    experts->num_physical_experts = o->physical_experts;
    if (o->score_expression) {
        desc->router.score = MOE_ROUTE_SCORE_CUSTOM;
        desc->router.score_expression = o->score_expression;
    }
    if (!o->format) {
        if (experts->intermediate_size &&
            (o->operations == 0 ||
             (o->operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_MATMUL))))
            stop(STATUS_USAGE,
                 "the experts have an intermediate size of %u, but --format doesn't say how their weights are stored (int4, "
                 "bf16, q4_k, ...)",
                 (unsigned)experts->intermediate_size);
        return;
    }
    layer_describe_matrix(o, o->format, somewhere, somewhere, &experts->gate_up);
    layer_describe_matrix(o, o->down_format ? o->down_format : o->format, somewhere, somewhere, &experts->down);
    if (experts->down.global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_PART)
        experts->down.global_scales_shape = MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT;
    if (o->bias || (desc->needs & MOE_ROUTE_NEED_GATE_UP_BIAS)) experts->gate_up.bias = somewhere;
    if (o->bias || (desc->needs & MOE_ROUTE_NEED_DOWN_BIAS)) experts->down.bias = somewhere;
    if (experts->gate_up.bias) experts->gate_up.bias_dtype = (moe_route_dtype)o->bias_dtype;
    if (experts->down.bias) experts->down.bias_dtype = (moe_route_dtype)o->bias_dtype;
    if (o->separate_up) experts->up = experts->gate_up;
}

#endif /* LAYER_OPTIONS_H */
