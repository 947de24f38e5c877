/*
  presets.c: from a model's config.json to the description of its layer, by the data of preset_table.c; and the addresses
  that such a layer can't do without.
*/
#include "internal.h"

#define MOER_NAME_MAX 48 /* characters of a model type that are compared and shown */

static const char *moer_scoring_name(const moer_program *program) {
    if (program->weight == MOE_ROUTE_WEIGHT_SIGMOID_SELECTED) return "sigmoid";
    switch (program->score) {
    case MOE_ROUTE_SCORE_SOFTMAX: return "softmax";
    case MOE_ROUTE_SCORE_SIGMOID: return "sigmoid";
    case MOE_ROUTE_SCORE_SQRT_SOFTPLUS: return "sqrtsoftplus";
    default: return "";
    }
}

/* ---- unknown types ---- */

static int moer_fold(int c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c == '-' ? '_' : c; }

/* How unlike a known name is: insertions, deletions and replacements that make `a` the beginning of `b`, four times, and how
   much longer `b` is than that beginning: "qwen3" is like "qwen3_moe". Case and kind of dash don't matter. */
static uint32_t moer_edit_distance(const char *a, const char *b) {
    uint32_t row[MOER_NAME_MAX + 1], i, j, least = ~0u;
    const uint32_t length = (uint32_t)strlen(b);
    for (j = 0; j <= length; j++) row[j] = j;
    for (i = 0; a[i] != 0; i++) {
        uint32_t diagonal = row[0];
        row[0] = i + 1;
        for (j = 1; j <= length; j++) {
            uint32_t best = diagonal + (moer_fold(a[i]) != moer_fold(b[j - 1]));
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    for (j = 0; j <= length; j++)
        if (row[j] * 4 + length - j < least) least = row[j] * 4 + length - j;
    return least;
}

static moe_route_status moer_preset_unknown(moe_route_context *context, const char *model_type) {
    const uint32_t num_presets = (uint32_t)(sizeof moer_presets / sizeof moer_presets[0]);
    char shown[MOER_NAME_MAX + 1];
    uint32_t best[3] = {0, 0, 0}, distance[3] = {~0u, ~0u, ~0u}, i, j;
    for (i = 0; i < MOER_NAME_MAX && model_type[i] != 0; i++) shown[i] = (char)(model_type[i] >= ' ' && model_type[i] <= '~' ? model_type[i] : '?');
    shown[i] = 0;
    for (i = 0; i < sizeof moer_models_beyond / sizeof moer_models_beyond[0]; i++)
        if (strcmp(model_type, moer_models_beyond[i].model_type) == 0)
            return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "preset: %s has no router that could be described: %s", shown, moer_models_beyond[i].reason);
    for (i = 0; i < num_presets; i++) {
        const uint32_t d = moer_edit_distance(shown, moer_presets[i].model_type);
        uint32_t place = 3;
        while (place > 0 && d < distance[place - 1]) place--;
        for (j = 2; j > place; j--) {
            distance[j] = distance[j - 1];
            best[j] = best[j - 1];
        }
        if (place < 3) {
            distance[place] = d;
            best[place] = i;
        }
    }
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: model_type is \"%s\", which is unknown; the most similar are %s, %s and %s", shown, moer_presets[best[0]].model_type,
                     moer_presets[best[1]].model_type, moer_presets[best[2]].model_type);
}

/* ---- the numbers ---- */

static moe_route_status moer_preset_missing(moe_route_context *context, const char *type, const char *field, const char *keys) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: %s is 0; %s needs it (%s in config.json)", field, type, keys);
}

static moe_route_status moer_preset_surplus(moe_route_context *context, const char *type, const char *field, double value, const char *allowed) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: %s is %g; %s has none, allowed is %s", field, value, type, allowed);
}

static moe_route_status moer_preset_check_needed(moe_route_context *context, const moe_route_model *model, const moer_program *program) {
    const char *type = model->model_type;
    if (model->num_experts == 0) return moer_preset_missing(context, type, "num_experts", "num_experts, num_local_experts, n_routed_experts or moe_num_experts");
    if (model->num_experts > MOER_MAX_EXPERTS)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: num_experts is %u; allowed is 1 to %u", (unsigned)model->num_experts, (unsigned)MOER_MAX_EXPERTS);
    if (model->top_k == 0) return moer_preset_missing(context, type, "top_k", "num_experts_per_tok, num_experts_per_token, moe_topk, moe_k or top_k_experts");
    if ((program->reads & MOER_HAS_GROUPS) && model->num_groups == 0) return moer_preset_missing(context, type, "num_groups", "n_group, num_expert_group or router_n_groups");
    if ((program->reads & (MOER_HAS_GROUPS | MOER_MAY_GROUP)) && model->num_groups > 1 && model->topk_groups == 0 && program->group_rule != MOE_ROUTE_GROUPS_QUOTA)
        return moer_preset_missing(context, type, "topk_groups", "topk_group");
    if ((program->reads & MOER_HAS_SCALE) && model->scale == 0.0f)
        return moer_preset_missing(context, type, "scale", "routed_scaling_factor, route_scale, router_scaling_factor, moe_router_scaling_factor or moe_routed_scaling_factor");
    if ((program->reads & MOER_HAS_SHARED) && model->num_shared_experts == 0) return moer_preset_missing(context, type, "num_shared_experts", "n_shared_experts");
    if (model->hash_layer && (program->reads & MOER_MAY_HASH) && model->vocab_size == 0) return moer_preset_missing(context, type, "vocab_size", "vocab_size");
    if ((model->hidden_size == 0) != (model->intermediate_size == 0))
        return moer_preset_missing(context, type, model->hidden_size == 0 ? "hidden_size" : "intermediate_size",
                                   model->hidden_size == 0 ? "hidden_size; both are 0 in a layer that only routes" : "moe_intermediate_size or intermediate_size; both are 0 in a layer that only routes");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_preset_check_surplus(moe_route_context *context, const moe_route_model *model, const moer_program *program) {
    const char *type = model->model_type;
    if (!(program->reads & (MOER_HAS_GROUPS | MOER_MAY_GROUP))) {
        if (model->num_groups > 1) return moer_preset_surplus(context, type, "num_groups", model->num_groups, "0 or 1");
        if (model->topk_groups > 1) return moer_preset_surplus(context, type, "topk_groups", model->topk_groups, "0 or 1");
    }
    if (!(program->reads & MOER_MAY_ZERO) && model->num_zero_experts != 0) return moer_preset_surplus(context, type, "num_zero_experts", model->num_zero_experts, "0");
    if (model->num_zero_experts > MOER_MAX_EXPERTS - model->num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: num_zero_experts is %u; allowed is up to %u with %u experts", (unsigned)model->num_zero_experts,
                         (unsigned)(MOER_MAX_EXPERTS - model->num_experts), (unsigned)model->num_experts);
    if (!(program->reads & MOER_HAS_SCALE) && model->scale != 0.0f && model->scale != 1.0f) return moer_preset_surplus(context, type, "scale", (double)model->scale, "0 or 1");
    if (!(program->reads & MOER_MAY_CAP) && model->softcap != 0.0f) return moer_preset_surplus(context, type, "softcap", (double)model->softcap, "0");
    if (!(program->reads & MOER_HAS_NORM_MIN) && model->norm_min != 0.0f) return moer_preset_surplus(context, type, "norm_min", (double)model->norm_min, "0");
    if (!(program->reads & MOER_MAY_HASH) && model->hash_layer) return moer_preset_surplus(context, type, "hash_layer", model->hash_layer, "0");
    if (model->norm_topk_prob < MOE_ROUTE_AUTO || model->norm_topk_prob > MOE_ROUTE_OFF)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: norm_topk_prob is %d; allowed is AUTO (0), ON (1) or OFF (2)", (int)model->norm_topk_prob);
    if ((program->norm == MOER_NORM_NEVER && model->norm_topk_prob == MOE_ROUTE_ON) || (program->norm == MOER_NORM_ALWAYS && model->norm_topk_prob == MOE_ROUTE_OFF))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: norm_topk_prob is %s; %s %s normalises its weights, allowed is AUTO (0) or %s",
                         program->norm == MOER_NORM_NEVER ? "ON (1)" : "OFF (2)", type, program->norm == MOER_NORM_NEVER ? "never" : "always", program->norm == MOER_NORM_NEVER ? "OFF (2)" : "ON (1)");
    return MOE_ROUTE_OK;
}

/* The program with the score that the model names. */
static moe_route_status moer_preset_score(moe_route_context *context, const moe_route_model *model, moer_program *program) {
    const char *usual = moer_scoring_name(program), *wanted = model->scoring_func;
    if (wanted == NULL || strcmp(wanted, usual) == 0) return MOE_ROUTE_OK;
    if ((program->reads & MOER_MAY_SIGMOID) && strcmp(wanted, "sigmoid") == 0) {
        program->score = MOE_ROUTE_SCORE_SIGMOID;
    } else if ((program->reads & MOER_MAY_SQRT_SOFTPLUS) && strcmp(wanted, "sqrtsoftplus") == 0) {
        program->score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS;
    } else {
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: scoring_func is \"%.40s\"; allowed for %s is NULL%s%s%s%s", wanted, model->model_type, usual[0] != 0 ? " or " : "", usual,
                         program->reads & MOER_MAY_SIGMOID ? " or sigmoid" : "", program->reads & MOER_MAY_SQRT_SOFTPLUS ? " or sqrtsoftplus" : "");
    }
    program->weight = MOE_ROUTE_WEIGHT_SCORE;
    return MOE_ROUTE_OK;
}

/* ---- the description ---- */

static void moer_preset_fill_router(const moe_route_model *model, const moer_program *program, moe_route_layer_desc *desc) {
    moe_route_router *router = &desc->router;
    const int normalises = program->norm == MOER_NORM_ALWAYS || (program->norm == MOER_NORM_ON && model->norm_topk_prob != MOE_ROUTE_OFF) ||
                           (program->norm == MOER_NORM_OFF && model->norm_topk_prob == MOE_ROUTE_ON);
    router->num_skip_experts = (program->reads & MOER_SKIPS_LAST) ? 1 : 0;
    router->num_experts = model->num_experts + model->num_zero_experts + router->num_skip_experts;
    router->top_k = model->top_k;
    if (program->reads & MOER_HAS_SHARED) router->num_shared_experts = model->num_shared_experts;
    router->softcap = model->softcap == 0.0f && (program->reads & MOER_CAPS_30) ? 30.0f : model->softcap;
    router->score = program->score;
    if (program->reads & MOER_HAS_JITTER) router->jitter = model->jitter != 0.0f ? model->jitter : 0.01f;
    if (model->num_groups > 1) {
        router->group_rule = program->group_rule;
        router->num_groups = model->num_groups;
        router->topk_groups = program->group_rule == MOE_ROUTE_GROUPS_QUOTA ? 0 : model->topk_groups;
        router->dropped = program->dropped;
    }
    router->weight = program->weight;
    /* A softmax over the selected has the sum 1 already. */
    if (normalises && program->weight != MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED) {
        router->renormalize = program->renormalize;
        router->renormalize_epsilon = (program->reads & MOER_HAS_NORM_MIN) && model->norm_min != 0.0f ? model->norm_min : program->epsilon;
    }
    if (program->reads & MOER_HAS_SCALE) router->scale = model->scale;
    desc->needs = program->needs;
    if (model->hash_layer) {
        router->ids = MOE_ROUTE_IDS_TABLE;
        router->id_table_rows = model->vocab_size;
        desc->needs = MOE_ROUTE_NEED_ID_TABLE;
    }
}

static void moer_preset_fill_experts(const moe_route_model *model, const moer_experts_kind *kind, moe_route_layer_desc *desc) {
    moe_route_experts *experts = &desc->experts;
    desc->needs |= kind->needs;
    experts->num_identity_experts = model->num_zero_experts;
    if (kind->needs & MOE_ROUTE_NEED_OTHER_EXPERTS) return;
    experts->hidden_size = model->hidden_size;
    experts->intermediate_size = model->intermediate_size;
    experts->gate_up_order = kind->order;
    experts->activation = kind->activation;
    experts->activation_alpha = kind->alpha;
    experts->up_offset = kind->up_offset;
    experts->clamp = kind->clamps && model->swiglu_limit != 0.0f ? model->swiglu_limit : kind->clamp;
    if (experts->clamp != 0.0f) experts->clamp_position = kind->clamp_position;
    experts->weight_on_input = kind->weight_on_input;
}

MOE_ROUTE_API moe_route_status moe_route_preset(moe_route_context *context, const moe_route_model *model, moe_route_layer_desc *desc) {
    const moer_preset *preset = NULL;
    moer_program program;
    moe_route_status status;
    size_t i;
    if (desc != NULL) memset(desc, 0, sizeof *desc);
    if (context == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    if (model == NULL || desc == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_preset: %s is NULL", model == NULL ? "model" : "desc");
    if (model->model_type == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: model_type is NULL; a name such as \"qwen3_moe\" is needed");
    for (i = 0; i < sizeof moer_presets / sizeof moer_presets[0] && preset == NULL; i++)
        if (strcmp(moer_presets[i].model_type, model->model_type) == 0) preset = &moer_presets[i];
    if (preset == NULL) return moer_preset_unknown(context, model->model_type);
    program = moer_programs[preset->program];
    status = moer_preset_check_needed(context, model, &program);
    if (status == MOE_ROUTE_OK) status = moer_preset_check_surplus(context, model, &program);
    if (status == MOE_ROUTE_OK) status = moer_preset_score(context, model, &program);
    if (status == MOE_ROUTE_OK && !moer_experts_kinds[preset->experts].clamps && model->swiglu_limit != 0.0f)
        status = moer_preset_surplus(context, model->model_type, "swiglu_limit", (double)model->swiglu_limit, "0");
    if (status != MOE_ROUTE_OK) return status;
    moer_preset_fill_router(model, &program, desc);
    moer_preset_fill_experts(model, &moer_experts_kinds[preset->experts], desc);
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API const char *moe_route_preset_name(uint32_t index) {
    return index < sizeof moer_presets / sizeof moer_presets[0] ? moer_presets[index].model_type : NULL;
}

/* ---- what a layer of a known model can't do without ---- */

static moe_route_status moer_check_need(moe_route_context *context, const moe_route_layer_desc *desc, uint32_t need, const char *field, moe_route_address address) {
    if (!(desc->needs & need) || address != 0) return MOE_ROUTE_OK;
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: %s is 0; the model has one (needs holds %u: clear it to do without)", field, (unsigned)need);
}

static moe_route_status moer_check_needs(moe_route_context *context, const moe_route_layer_desc *desc) {
    const int has_gate_up = desc->experts.gate_up.format != MOE_ROUTE_FORMAT_NONE, has_down = desc->experts.down.format != MOE_ROUTE_FORMAT_NONE;
    moe_route_status status = moer_check_need(context, desc, MOE_ROUTE_NEED_SELECTION_BIAS, "router.selection_bias", desc->router.selection_bias);
    if (status == MOE_ROUTE_OK) status = moer_check_need(context, desc, MOE_ROUTE_NEED_LOGIT_BIAS, "router.logit_bias", desc->router.logit_bias);
    if (status == MOE_ROUTE_OK) status = moer_check_need(context, desc, MOE_ROUTE_NEED_EXPERT_SCALE, "router.expert_scale", desc->router.expert_scale);
    if (status == MOE_ROUTE_OK) status = moer_check_need(context, desc, MOE_ROUTE_NEED_ID_TABLE, "router.id_table", desc->router.id_table);
    if (status == MOE_ROUTE_OK && has_gate_up) status = moer_check_need(context, desc, MOE_ROUTE_NEED_GATE_UP_BIAS, "experts.gate_up.bias", desc->experts.gate_up.bias);
    if (status == MOE_ROUTE_OK && has_down) status = moer_check_need(context, desc, MOE_ROUTE_NEED_DOWN_BIAS, "experts.down.bias", desc->experts.down.bias);
    if (status != MOE_ROUTE_OK) return status;
    if ((desc->needs & MOE_ROUTE_NEED_OTHER_EXPERTS) && (has_gate_up || has_down))
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "layer: experts.%s.format is %d; the model's experts compute something else than this library's (needs holds %u), its layer may only route",
                         has_gate_up ? "gate_up" : "down", (int)(has_gate_up ? desc->experts.gate_up.format : desc->experts.down.format), (unsigned)MOE_ROUTE_NEED_OTHER_EXPERTS);
    return MOE_ROUTE_OK;
}
