/*
  explain.c: what a layer will launch and which variants it has, as fields and as text.
*/
#include "internal.h"

/* The operation's launches with addresses that are only there to be "given". */
static moe_route_status moer_explain_sequence(const moe_route_layer *layer, moe_route_operation operation, uint32_t num_tokens, const moer_workspace *w, moer_sequence *sequence) {
    moe_route_layer_args run;
    moe_route_matmul_args matmul;
    moe_route_expand_args expand;
    moe_route_combine_args combine;
    moe_route_dispatch_args dispatch;
    moe_route_expert_rows_args rows;
    moer_routing routing;
    const moe_route_address given = 256;
    memset(&run, 0, sizeof run);
    memset(&matmul, 0, sizeof matmul);
    memset(&expand, 0, sizeof expand);
    memset(&combine, 0, sizeof combine);
    memset(&dispatch, 0, sizeof dispatch);
    memset(&rows, 0, sizeof rows);
    memset(&routing, 0, sizeof routing);
    run.num_tokens = matmul.num_tokens = expand.num_tokens = combine.num_tokens = dispatch.num_tokens = rows.num_tokens = num_tokens;
    dispatch.rows = given;
    switch (operation) {
    case MOE_ROUTE_OPERATION_LAYER:
    case MOE_ROUTE_OPERATION_EXPERTS:
        run.logits = operation == MOE_ROUTE_OPERATION_LAYER ? given : 0;
        moer_sequence_layer(sequence, layer, &run, w);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_ROUTE:
    case MOE_ROUTE_OPERATION_MAPS:
        routing.logits = operation == MOE_ROUTE_OPERATION_ROUTE ? given : 0;
        routing.any_map = 1;
        moer_sequence_route(sequence, layer, operation == MOE_ROUTE_OPERATION_ROUTE ? layer->route_all : layer->maps_all, num_tokens, &routing, w, 0);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_MATMUL:
        matmul.matrix = layer->gate_up.format != MOE_ROUTE_FORMAT_NONE ? MOE_ROUTE_MATRIX_GATE_UP : MOE_ROUTE_MATRIX_DOWN;
        moer_matmul_routing(&matmul, w, &routing);
        moer_sequence_route(sequence, layer, layer->route_given, num_tokens, &routing, w, 0);
        moer_sequence_matmul(sequence, layer, &matmul, &routing);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_EXPAND:
        moer_sequence_expand(sequence, layer, &expand);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_COMBINE:
        moer_sequence_combine(sequence, layer, &combine);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_DISPATCH:
        moer_sequence_dispatch(sequence, layer, &dispatch, w);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_EXPERT_ROWS:
        moer_expert_rows_routing(&rows, w, &routing);
        moer_sequence_expert_rows(sequence, layer, &rows, &routing, w);
        return MOE_ROUTE_OK;
    default:
        return MOE_ROUTE_ERROR_ARGUMENT;
    }
}

MOE_ROUTE_API moe_route_status moe_route_layer_explain(const moe_route_layer *layer, moe_route_operation operation, uint32_t num_tokens, moe_route_plan *plan) {
    moer_call call;
    moer_workspace w;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t i;
    if (plan != NULL) memset(plan, 0, sizeof *plan);
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_layer_explain";
    if (plan == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: plan is NULL", call.function);
    if (!(layer->operations & (uint32_t)operation) || ((uint32_t)operation & ((uint32_t)operation - 1)) != 0)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_NOT_PREPARED, "%s: operation is %d; allowed is one of the operations that the layer was created for (%u)", call.function, (int)operation,
                         (unsigned)layer->operations);
    status = moer_check_tokens(&call, num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    moer_workspace_lay_out(layer, num_tokens, &w);
    plan->workspace_size = w.size;
    if (moer_is_cpu(layer) || num_tokens == 0) return MOE_ROUTE_OK;
    sequence.num_launches = 0;
    status = moer_explain_sequence(layer, operation, num_tokens, &w, &sequence);
    if (status != MOE_ROUTE_OK) return status;
    plan->num_launches = sequence.num_launches;
    plan->tuned = layer->tuned && (operation == MOE_ROUTE_OPERATION_LAYER || operation == MOE_ROUTE_OPERATION_EXPERTS);
    for (i = 0; i < sequence.num_launches; i++) {
        const moer_launch *launch = &sequence.launches[i];
        moe_route_launch_info *info = &plan->launches[i];
        moer_append(info->kernel, sizeof info->kernel, "%s", launch->variant->family->entries[launch->entry] + strlen("moe_route_"));
        moer_append(info->variant, sizeof info->variant, "%s", launch->variant->defines);
        memcpy(info->grid, launch->grid, sizeof info->grid);
        info->block = launch->block;
        info->shared_bytes = (uint32_t)launch->variant->static_shared_bytes[launch->entry] + launch->variant->dynamic_shared_bytes;
        info->dependent = layer->dependent;
        info->weight_bytes = launch->weight_bytes;
    }
    return MOE_ROUTE_OK;
}

/* Appends and counts as snprintf would, also past the end. */
static size_t moer_text_add(char *text, size_t size, size_t length, const char *format, ...) MOER_PRINTF(4, 5);
static size_t moer_text_add(char *text, size_t size, size_t length, const char *format, ...) {
    va_list arguments;
    int added;
    va_start(arguments, format);
    added = vsnprintf(length < size ? text + length : NULL, length < size ? size - length : 0, format, arguments);
    va_end(arguments);
    return added > 0 ? length + (size_t)added : length;
}

MOE_ROUTE_API size_t moe_route_plan_text(const moe_route_plan *plan, char *text, size_t size) {
    size_t length = 0;
    uint32_t i;
    if (text == NULL) size = 0;
    if (size > 0) text[0] = 0;
    if (plan == NULL) return 0;
    for (i = 0; i < plan->num_launches; i++) {
        const moe_route_launch_info *info = &plan->launches[i];
        length = moer_text_add(text, size, length, "%-16s %5u x %-4u blocks of %4u threads, %5u B shared, %9.3f MB of weights at most%s  [%s]\n", info->kernel, (unsigned)info->grid[0],
                               (unsigned)info->grid[1], (unsigned)info->block, (unsigned)info->shared_bytes, (double)info->weight_bytes * 1e-6, info->dependent ? ", dependent" : "",
                               info->variant);
    }
    if (plan->num_launches == 0) length = moer_text_add(text, size, length, "no launches\n");
    if (plan->tuned) length = moer_text_add(text, size, length, "kernels chosen by tuning\n");
    return moer_text_add(text, size, length, "workspace: %llu bytes\n", (unsigned long long)plan->workspace_size);
}

MOE_ROUTE_API uint32_t moe_route_layer_num_variants(const moe_route_layer *layer) { return layer != NULL ? layer->num_variants : 0; }

MOE_ROUTE_API moe_route_status moe_route_layer_variant(const moe_route_layer *layer, uint32_t index, moe_route_variant_info *info) {
    const moer_variant *variant;
    if (info != NULL) memset(info, 0, sizeof *info);
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    if (info == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_variant: info is NULL");
    if (index >= layer->num_variants)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_variant: index is %u; the layer has %u variants, numbered from 0", (unsigned)index, (unsigned)layer->num_variants);
    variant = layer->variants[index];
    moer_append(info->kernel, sizeof info->kernel, "%s", variant->family->name);
    moer_append(info->variant, sizeof info->variant, "%s", variant->defines);
    info->origin = variant->origin;
    info->milliseconds = variant->milliseconds;
    info->cubin_size = variant->cubin_size;
    return MOE_ROUTE_OK;
}
