/*
  router.c: the description of a router, and of where its experts are: checked, completed, and as constants of the kernels.
  Its arithmetic is in kernels_src/select.h and cpu_route.c.
*/
#include "internal.h"

static moe_route_status moer_refuse(moe_route_context *context, const char *field, unsigned long long value, const char *allowed) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: %s is %llu; allowed is %s", field, value, allowed);
}

static moe_route_status moer_refuse_number(moe_route_context *context, const char *field, float value, const char *allowed) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: %s is %g; allowed is %s", field, (double)value, allowed);
}

/* DEFAULT becomes `usual`; other values than the three dtypes become DEFAULT. */
static moe_route_dtype moer_dtype_or(moe_route_dtype dtype, moe_route_dtype usual) {
    if (dtype == MOE_ROUTE_DTYPE_DEFAULT) return usual;
    return dtype == MOE_ROUTE_F32 || dtype == MOE_ROUTE_F16 || dtype == MOE_ROUTE_BF16 ? dtype : MOE_ROUTE_DTYPE_DEFAULT;
}

/* By the bits: a compiler that was told to expect finite numbers only may drop a comparison. */
static int moer_is_finite(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static int moer_drops_groups(moe_route_group_rule rule) { return rule == MOE_ROUTE_GROUPS_MAX || rule == MOE_ROUTE_GROUPS_TOP2_SUM; }

static int moer_is_positive(float value) { return moer_is_finite(value) && value >= 0.0f; }

/* ---- checking ---- */

static moe_route_status moer_router_check_sizes(moe_route_context *context, const moe_route_router *from) {
    if (from->num_experts < 1 || from->num_experts > MOER_MAX_EXPERTS)
        return moer_refuse(context, "router.num_experts", from->num_experts, "1 to 2048");
    if (from->top_k < 1 || from->top_k > MOER_MAX_TOP_K || from->top_k > from->num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.top_k is %u; allowed is 1 to %u with %u experts", (unsigned)from->top_k,
                         (unsigned)(from->num_experts < MOER_MAX_TOP_K ? from->num_experts : MOER_MAX_TOP_K), (unsigned)from->num_experts);
    if (from->num_shared_experts > MOER_MAX_SHARED) return moer_refuse(context, "router.num_shared_experts", from->num_shared_experts, "0 to 32");
    if (from->num_skip_experts >= from->num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_skip_experts is %u; allowed is 0 to %u with %u experts", (unsigned)from->num_skip_experts,
                         (unsigned)from->num_experts - 1, (unsigned)from->num_experts);
    if (moer_dtype_or(from->logits_dtype, MOE_ROUTE_F32) == MOE_ROUTE_DTYPE_DEFAULT)
        return moer_refuse(context, "router.logits_dtype", (unsigned long long)from->logits_dtype, "F32 (1), F16 (2) or BF16 (3)");
    if (moer_dtype_or(from->weights_dtype, MOE_ROUTE_F32) == MOE_ROUTE_DTYPE_DEFAULT)
        return moer_refuse(context, "router.weights_dtype", (unsigned long long)from->weights_dtype, "F32 (1), F16 (2) or BF16 (3)");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_choices(moe_route_context *context, const moe_route_router *from) {
    if (from->score < MOE_ROUTE_SCORE_SOFTMAX || from->score > MOE_ROUTE_SCORE_CUSTOM)
        return moer_refuse(context, "router.score", (unsigned long long)from->score, "a value of moe_route_score, 0 to 5");
    if (from->group_rule < MOE_ROUTE_GROUPS_NONE || from->group_rule > MOE_ROUTE_GROUPS_QUOTA)
        return moer_refuse(context, "router.group_rule", (unsigned long long)from->group_rule, "a value of moe_route_group_rule, 0 to 3");
    if (from->dropped < MOE_ROUTE_DROPPED_MINUS_INFINITY || from->dropped > MOE_ROUTE_DROPPED_ZERO_SCORE)
        return moer_refuse(context, "router.dropped", (unsigned long long)from->dropped, "MINUS_INFINITY (0), ZERO (1) or ZERO_SCORE (2)");
    if (from->ids < MOE_ROUTE_IDS_SELECTED || from->ids > MOE_ROUTE_IDS_TABLE)
        return moer_refuse(context, "router.ids", (unsigned long long)from->ids, "SELECTED (0), GIVEN (1) or TABLE (2)");
    if (from->weight < MOE_ROUTE_WEIGHT_SCORE || from->weight > MOE_ROUTE_WEIGHT_SIGMOID_SHARE)
        return moer_refuse(context, "router.weight", (unsigned long long)from->weight, "SCORE (0), SOFTMAX_SELECTED (1), SIGMOID_SELECTED (2) or SIGMOID_SHARE (3)");
    if (from->renormalize < MOE_ROUTE_RENORMALIZE_NONE || from->renormalize > MOE_ROUTE_RENORMALIZE_L2)
        return moer_refuse(context, "router.renormalize", (unsigned long long)from->renormalize, "NONE (0), SUM (1), MAX_SUM (2) or L2 (3)");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_numbers(moe_route_context *context, const moe_route_router *from) {
    const int addresses = context->device != MOE_ROUTE_DEVICE_COMPILE; /* nothing to point at when only compiling */
    if (!moer_is_positive(from->softcap)) return moer_refuse_number(context, "router.softcap", from->softcap, "0 (none) or a positive number");
    if (!moer_is_positive(from->jitter)) return moer_refuse_number(context, "router.jitter", from->jitter, "0 or a positive number");
    if (!moer_is_positive(from->renormalize_epsilon)) return moer_refuse_number(context, "router.renormalize_epsilon", from->renormalize_epsilon, "0 or a positive number");
    if (!moer_is_finite(from->scale)) return moer_refuse_number(context, "router.scale", from->scale, "a finite number");
    if (from->logit_bias % 4 != 0) return moer_refuse(context, "router.logit_bias", from->logit_bias, "an address that is a multiple of 4, or 0");
    if (from->selection_bias % 4 != 0) return moer_refuse(context, "router.selection_bias", from->selection_bias, "an address that is a multiple of 4, or 0");
    if (from->expert_scale % 4 != 0) return moer_refuse(context, "router.expert_scale", from->expert_scale, "an address that is a multiple of 4, or 0");
    if (from->ids == MOE_ROUTE_IDS_TABLE) {
        if (from->id_table % 4 != 0 || (addresses && from->id_table == 0)) return moer_refuse(context, "router.id_table", from->id_table, "an address that is a multiple of 4");
        if (from->id_table_rows < 1 || from->id_table_rows > 0x7fffffffu) return moer_refuse(context, "router.id_table_rows", from->id_table_rows, "1 to 2147483647");
    } else if (from->id_table != 0 || from->id_table_rows != 0) {
        return moer_refuse(context, "router.ids", (unsigned long long)from->ids, "TABLE (2) with an id_table");
    }
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_groups(moe_route_context *context, const moe_route_router *from) {
    if (from->group_rule == MOE_ROUTE_GROUPS_NONE) {
        if (from->num_groups > 1) return moer_refuse(context, "router.group_rule", 0, "MAX (1), TOP2_SUM (2) or QUOTA (3) with more than one group");
        return MOE_ROUTE_OK;
    }
    if (from->num_groups < 1 || from->num_groups > MOER_MAX_GROUPS || from->num_experts % from->num_groups != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_groups is %u; allowed is a divisor of num_experts, %u, up to 64", (unsigned)from->num_groups, (unsigned)from->num_experts);
    if (moer_drops_groups(from->group_rule) && (from->topk_groups < 1 || from->topk_groups > from->num_groups))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.topk_groups is %u; allowed is 1 to num_groups, %u", (unsigned)from->topk_groups, (unsigned)from->num_groups);
    if (from->group_rule == MOE_ROUTE_GROUPS_TOP2_SUM && from->num_experts / from->num_groups < 2)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_groups is %u; TOP2_SUM needs groups of at least 2 of the %u experts", (unsigned)from->num_groups, (unsigned)from->num_experts);
    if (from->group_rule == MOE_ROUTE_GROUPS_QUOTA && from->top_k % from->num_groups != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_groups is %u; QUOTA needs a divisor of top_k, %u", (unsigned)from->num_groups, (unsigned)from->top_k);
    return MOE_ROUTE_OK;
}

/* Choices that exclude one another. */
static moe_route_status moer_router_check_together(moe_route_context *context, const moe_route_router *from) {
    if (from->score == MOE_ROUTE_SCORE_SPARSE_MIXER) {
        if (from->ids != MOE_ROUTE_IDS_SELECTED) return moer_refuse(context, "router.ids", (unsigned long long)from->ids, "SELECTED (0) with SPARSE_MIXER");
        if (from->selection_bias != 0) return moer_refuse(context, "router.selection_bias", from->selection_bias, "0 with SPARSE_MIXER");
        if (from->group_rule != MOE_ROUTE_GROUPS_NONE) return moer_refuse(context, "router.group_rule", (unsigned long long)from->group_rule, "NONE (0) with SPARSE_MIXER");
    } else if (from->jitter != 0.0f) {
        return moer_refuse_number(context, "router.jitter", from->jitter, "0 with scores other than SPARSE_MIXER");
    }
    if (from->dropped != MOE_ROUTE_DROPPED_MINUS_INFINITY && !moer_drops_groups(from->group_rule))
        return moer_refuse(context, "router.dropped", (unsigned long long)from->dropped, "MINUS_INFINITY (0) unless group_rule is MAX or TOP2_SUM");
    if (from->dropped == MOE_ROUTE_DROPPED_ZERO_SCORE) {
        if (from->selection_bias != 0) return moer_refuse(context, "router.selection_bias", from->selection_bias, "0 with DROPPED_ZERO_SCORE");
        if (from->score == MOE_ROUTE_SCORE_IDENTITY || from->score == MOE_ROUTE_SCORE_CUSTOM)
            return moer_refuse(context, "router.score", (unsigned long long)from->score, "SOFTMAX (0), SIGMOID (1) or SQRT_SOFTPLUS (2) with DROPPED_ZERO_SCORE");
    }
    if (from->num_shared_experts != 0 && from->weight == MOE_ROUTE_WEIGHT_SCORE && (from->score == MOE_ROUTE_SCORE_SOFTMAX || from->score == MOE_ROUTE_SCORE_SPARSE_MIXER))
        return moer_refuse(context, "router.num_shared_experts", from->num_shared_experts, "0 where weights are scores by SOFTMAX or SPARSE_MIXER, which the routed experts share");
    return MOE_ROUTE_OK;
}

static int moer_is_word(char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || c == '.'; }

/* The user's expression as a macro's value. Constants are words without spaces: those that keep two tokens apart become
   comments, which mean the same, the others go. */
static moe_route_status moer_router_take_expression(moe_route_context *context, const char *expression, char *taken) {
    size_t used = 0, length = expression != NULL ? strlen(expression) : 0, i;
    int depth = 0, space = 0;
    if (length == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression is missing; SCORE_CUSTOM needs a CUDA expression of x");
    if (length > MOER_MAX_EXPRESSION)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression has %u characters; allowed is up to %u", (unsigned)length, (unsigned)MOER_MAX_EXPRESSION);
    for (i = 0; i < length && depth >= 0; i++) {
        const char c = expression[i];
        if (c < ' ' || c > '~' || strchr(";{}\"'#\\@`$", c) != NULL || (c == '/' && (expression[i + 1] == '/' || expression[i + 1] == '*')))
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression has character %u (code %u), which no expression needs", (unsigned)i, (unsigned)(unsigned char)c);
        depth += (c == '(') - (c == ')');
        if (c == ' ') {
            space = 1;
            continue;
        }
        if (space && used != 0 && moer_is_word(taken[used - 1]) == moer_is_word(c)) {
            memcpy(taken + used, "/**/", 4);
            used += 4;
        }
        space = 0;
        taken[used++] = c;
    }
    taken[used] = 0;
    if (used == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression is blank; SCORE_CUSTOM needs a CUDA expression of x");
    if (depth != 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression is \"%s\"; its parentheses don't match", expression);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_custom(moe_route_context *context, const moe_route_router *from, moer_router *router) {
    if (from->score != MOE_ROUTE_SCORE_CUSTOM) {
        if (from->score_expression == NULL && from->score_function == NULL) return MOE_ROUTE_OK;
        return moer_refuse(context, "router.score", (unsigned long long)from->score, "CUSTOM (5) with a score_expression or a score_function");
    }
    if (context->device == MOE_ROUTE_DEVICE_CPU && from->score_function == NULL)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_function is NULL; SCORE_CUSTOM on the CPU backend needs it");
    router->score_function = from->score_function;
    router->score_user = from->score_user;
    return context->device == MOE_ROUTE_DEVICE_CPU ? MOE_ROUTE_OK : moer_router_take_expression(context, from->score_expression, router->score_expression);
}

static moe_route_status moer_router_check(moe_route_context *context, const moe_route_router *from, moer_router *router) {
    moe_route_status status = moer_router_check_sizes(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_choices(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_numbers(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_groups(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_together(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_custom(context, from, router);
    if (status != MOE_ROUTE_OK) return status;
    router->num_experts = from->num_experts;
    router->top_k = from->top_k;
    router->num_shared_experts = from->num_shared_experts;
    router->num_skip_experts = from->num_skip_experts;
    router->logits_dtype = moer_dtype_or(from->logits_dtype, MOE_ROUTE_F32);
    router->weights_dtype = moer_dtype_or(from->weights_dtype, MOE_ROUTE_F32);
    router->logit_bias = from->logit_bias;
    router->softcap = from->softcap;
    router->score = from->score;
    router->jitter = from->jitter;
    router->selection_bias = from->selection_bias;
    router->group_rule = from->group_rule;
    router->num_groups = from->group_rule != MOE_ROUTE_GROUPS_NONE ? from->num_groups : 1;
    router->topk_groups = from->topk_groups;
    router->dropped = from->dropped;
    if (moer_drops_groups(router->group_rule) && router->topk_groups == router->num_groups)
        router->group_rule = MOE_ROUTE_GROUPS_NONE; /* every group stays */
    router->ids = from->ids;
    router->id_table = from->id_table;
    router->id_table_rows = from->id_table_rows;
    router->weight = from->weight;
    router->renormalize = from->renormalize;
    router->renormalize_epsilon = from->renormalize_epsilon;
    router->scale = from->scale == 0.0f ? 1.0f : from->scale;
    router->expert_scale = from->expert_scale;
    router->divide_by_top_k = from->divide_by_top_k != 0;
    /* A softmax divided by its sum over the selected is the softmax of the selected: no need for the sum over all. Only
       where the largest logit is among the selected: otherwise the sum over them may be 0. */
    if (router->score == MOE_ROUTE_SCORE_SOFTMAX && router->weight == MOE_ROUTE_WEIGHT_SCORE && router->renormalize == MOE_ROUTE_RENORMALIZE_SUM &&
        router->renormalize_epsilon == 0.0f && router->selection_bias == 0 && router->group_rule == MOE_ROUTE_GROUPS_NONE && router->ids == MOE_ROUTE_IDS_SELECTED) {
        router->weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED;
        router->renormalize = MOE_ROUTE_RENORMALIZE_NONE;
    }
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_placement(moe_route_context *context, const moe_route_experts *from, moer_router *router) {
    const uint32_t can_be_identity = router->num_experts - router->num_skip_experts;
    if (from->num_identity_experts >= can_be_identity)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.num_identity_experts is %u; allowed is 0 to %u", (unsigned)from->num_identity_experts, (unsigned)can_be_identity - 1);
    router->num_physical_experts = can_be_identity - from->num_identity_experts;
    router->first_identity = router->num_physical_experts;
    router->num_identity = from->first_expert == 0 ? from->num_identity_experts : 0;
    if (from->expert_map % 4 != 0) return moer_refuse(context, "experts.expert_map", from->expert_map, "an address that is a multiple of 4, or 0");
    if (from->expert_map != 0) {
        router->expert_map = from->expert_map;
        router->expert_map_columns = from->expert_map_columns != 0 ? from->expert_map_columns : 1;
        if (router->expert_map_columns > MOER_MAX_REPLICAS) return moer_refuse(context, "experts.expert_map_columns", from->expert_map_columns, "1 to 64, or 0 for 1");
        if (from->num_physical_experts > MOER_MAX_EXPERTS) return moer_refuse(context, "experts.num_physical_experts", from->num_physical_experts, "1 to 2048, or 0 for the router's");
        if (from->num_physical_experts != 0) router->num_physical_experts = from->num_physical_experts;
    } else if (from->expert_map_columns != 0) {
        return moer_refuse(context, "experts.expert_map", 0, "an address where expert_map_columns is given");
    } else if (from->num_physical_experts != 0) {
        if (from->num_physical_experts > MOER_MAX_EXPERTS) return moer_refuse(context, "experts.num_physical_experts", from->num_physical_experts, "1 to 2048, or 0 for the router's");
        router->given_physical = 1;
        router->num_physical_experts = from->num_physical_experts;
        router->num_identity = 0; /* they aren't physical experts */
    }
    router->first_expert = from->first_expert;
    if (router->first_expert >= router->num_physical_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.first_expert is %u; allowed is 0 to %u", (unsigned)router->first_expert, (unsigned)router->num_physical_experts - 1);
    router->num_local_experts = from->num_local_experts != 0 ? from->num_local_experts : router->num_physical_experts - router->first_expert;
    if (router->num_local_experts > router->num_physical_experts - router->first_expert)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.num_local_experts is %u; allowed is at most %u from expert %u on", (unsigned)router->num_local_experts,
                         (unsigned)(router->num_physical_experts - router->first_expert), (unsigned)router->first_expert);
    return MOE_ROUTE_OK;
}

/* ---- as constants ---- */

/* Adds NAME=VALUE to a list of constants; a list that grew too long stays marked by its first character. */
static void moer_define(char *defines, const char *name, unsigned long value) {
    if (defines[0] == '!') return;
    if (!moer_append(defines, MOER_DEFINES_MAX, defines[0] != 0 ? " %s=%lu" : "%s=%lu", name, value)) defines[0] = '!';
}

static void moer_define_given(char *defines, const char *name, unsigned long value) {
    if (value != 0) moer_define(defines, name, value);
}

/* The constants of select.h. Rare ones stand there only where they matter, so that ordinary routers have short names. */
static void moer_define_router(char *defines, const moer_router *router) {
    moer_define(defines, "LOGITS", router->logits_dtype);
    moer_define(defines, "WEIGHTS", router->weights_dtype);
    moer_define(defines, "SCORE", router->score);
    moer_define(defines, "BIAS", router->selection_bias != 0);
    moer_define(defines, "WEIGHT", router->weight);
    moer_define(defines, "RENORMALIZE", router->renormalize);
    moer_define_given(defines, "SHARED_EXPERTS", router->num_shared_experts);
    moer_define_given(defines, "SKIP_EXPERTS", router->num_skip_experts);
    moer_define_given(defines, "LOGIT_BIAS", router->logit_bias != 0);
    moer_define_given(defines, "SOFTCAP", router->softcap != 0.0f);
    if (router->group_rule != MOE_ROUTE_GROUPS_NONE) {
        moer_define(defines, "GROUP_RULE", router->group_rule);
        moer_define(defines, "GROUPS", router->num_groups);
        moer_define(defines, "TOPK_GROUPS", router->topk_groups);
        moer_define(defines, "DROPPED", router->dropped);
    }
    moer_define_given(defines, "IDS", router->ids);
    moer_define_given(defines, "EXPERT_SCALE", router->expert_scale != 0);
    moer_define_given(defines, "DIVIDE_BY_K", (unsigned long)router->divide_by_top_k);
    if (router->score == MOE_ROUTE_SCORE_CUSTOM && defines[0] != '!' && !moer_append(defines, MOER_DEFINES_MAX, " SCORE_EXPRESSION=%s", router->score_expression)) defines[0] = '!';
}

/* The constants of placement.h. */
static void moer_define_expert_map(char *defines, const moer_router *router) {
    if (router->expert_map_columns == 0) return;
    moer_define(defines, "MAP_COLUMNS", router->expert_map_columns);
    moer_define(defines, "PLACED_EXPERTS", router->num_experts - router->num_skip_experts - router->num_identity);
}

/* The same, and which physical experts are local. */
static void moer_define_placement(char *defines, const moer_router *router) {
    moer_define(defines, "FIRST_EXPERT", router->first_expert);
    moer_define(defines, "LOCAL_EXPERTS", router->num_local_experts);
    moer_define_expert_map(defines, router);
}
