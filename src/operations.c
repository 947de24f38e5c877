/*
  operations.c: the public operations: their arguments are checked here, then they run on the CPU or become launches.
*/
#include "internal.h"

/* ---- checking arguments ---- */

typedef struct moer_call { /* what is being checked, for messages */
    const moe_route_layer *layer;
    const char *function;
} moer_call;

static moe_route_status moer_call_begin(const moer_call *call, const void *args, uint32_t operation, const char *operation_name) {
    moe_route_context *context = call->layer->context;
    if (args == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: args is NULL", call->function);
    if (!(call->layer->operations & operation))
        return moer_fail(context, MOE_ROUTE_ERROR_NOT_PREPARED, "%s: the layer was created without MOE_ROUTE_OPERATION_%s; add it to operations in its description", call->function, operation_name);
    if (context->device == MOE_ROUTE_DEVICE_COMPILE)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "%s: the context only compiles (MOE_ROUTE_DEVICE_COMPILE); nothing can be run", call->function);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_check_tokens(const moer_call *call, uint32_t num_tokens) {
    if (num_tokens <= call->layer->max_tokens) return MOE_ROUTE_OK;
    return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: num_tokens is %u; allowed is 0 to the layer's max_tokens, %u", call->function, (unsigned)num_tokens,
                     (unsigned)call->layer->max_tokens);
}

static moe_route_status moer_check_address(const moer_call *call, const char *name, moe_route_address address, int required, uint32_t alignment) {
    if (required && address == 0) return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: %s is 0; its address is needed", call->function, name);
    if (address % alignment != 0)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: %s is 0x%llx; allowed is a multiple of %u", call->function, name, address, (unsigned)alignment);
    return MOE_ROUTE_OK;
}

/* What the combine adds beside the experts. */
static moe_route_status moer_check_additions(const moer_call *call, moe_route_address shared, moe_route_address weights, moe_route_address residual) {
    const uint32_t alignment = moer_row_alignment(call->layer->hidden_size, call->layer->dtype);
    moe_route_status status = moer_check_address(call, "shared_output", shared, weights != 0, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "shared_output_weights", weights, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "residual", residual, 0, alignment);
    return status;
}

static moe_route_status moer_check_workspace(const moer_call *call, uint32_t num_tokens, moe_route_address address, size_t size, moer_workspace *w) {
    moer_workspace_lay_out(call->layer, num_tokens, w); /* fits: it did at max_tokens */
    if (size < w->size)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: workspace_size is %llu; needed is at least %llu for %u tokens", call->function, (unsigned long long)size,
                         (unsigned long long)w->size, (unsigned)num_tokens);
    return moer_check_address(call, "workspace", address, 1, 256);
}

static moe_route_status moer_check_maps(const moer_call *call, uint32_t num_tokens, const moe_route_expert_maps *maps, moer_routing *routing) {
    const struct { const char *name; moe_route_address address; } outputs[10] = {
        {"maps.expert_offsets", maps->expert_offsets}, {"maps.row_to_pair", maps->row_to_pair}, {"maps.pair_to_row", maps->pair_to_row},
        {"maps.row_to_expert", maps->row_to_expert}, {"maps.distinct_experts", maps->distinct_experts}, {"maps.distinct_offsets", maps->distinct_offsets},
        {"maps.distinct_count", maps->distinct_count}, {"maps.aligned_row_to_pair", maps->aligned_row_to_pair}, {"maps.block_to_expert", maps->block_to_expert},
        {"maps.aligned_rows", maps->aligned_rows}};
    const size_t capacity = moe_route_aligned_capacity(call->layer, num_tokens, maps->block_size);
    moe_route_status load_status = moer_check_address(call, "maps.expert_load", maps->expert_load, 0, 8);
    int i;
    if (load_status != MOE_ROUTE_OK) return load_status;
    if (maps->expert_load != 0) routing->any_map = 1;
    for (i = 0; i < 10; i++) {
        const moe_route_status status = moer_check_address(call, outputs[i].name, outputs[i].address, 0, 4);
        if (status != MOE_ROUTE_OK) return status;
        if (outputs[i].address == 0) continue;
        routing->any_map = 1;
        if (i >= 7 && maps->block_size == 0)
            return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: maps.block_size is 0; %s needs a block size", call->function, outputs[i].name);
    }
    if (maps->block_size != 0 && num_tokens != 0 && capacity == 0)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: maps.block_size is %u; the aligned rows of %u tokens would exceed 2147483647", call->function,
                         (unsigned)maps->block_size, (unsigned)num_tokens);
    routing->maps.expert_offsets = maps->expert_offsets;
    routing->maps.row_to_pair = maps->row_to_pair;
    routing->maps.pair_to_row = maps->pair_to_row;
    routing->maps.row_to_expert = maps->row_to_expert;
    routing->maps.distinct_experts = maps->distinct_experts;
    routing->maps.distinct_offsets = maps->distinct_offsets;
    routing->maps.distinct_count = maps->distinct_count;
    routing->maps.aligned_row_to_pair = maps->aligned_row_to_pair;
    routing->maps.block_to_expert = maps->block_to_expert;
    routing->maps.aligned_rows = maps->aligned_rows;
    routing->maps.expert_load = maps->expert_load;
    routing->maps.block_size = maps->block_size;
    routing->maps.aligned_capacity = (unsigned int)capacity;
    return MOE_ROUTE_OK;
}

/* What a router reads and writes in any call. */
static moe_route_status moer_check_routing(const moer_call *call, uint32_t num_tokens, const moer_routing *routing, int ids_required) {
    const moer_router *router = &call->layer->router;
    const int any = num_tokens != 0;
    moe_route_status status = moer_check_address(call, "logits", routing->logits, any, (uint32_t)moer_dtype_size(router->logits_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "ids", routing->ids, any && (ids_required || router->ids == MOE_ROUTE_IDS_GIVEN), 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "weights", routing->weights, 0, (uint32_t)moer_dtype_size(router->weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "shared_weights", routing->shared_weights, 0, (uint32_t)moer_dtype_size(router->weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "token_ids", routing->token_ids, any && router->ids == MOE_ROUTE_IDS_TABLE, 4);
    if (status == MOE_ROUTE_OK && routing->shared_weights != 0 && router->num_shared_experts == 0)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: shared_weights is given; the router has no shared experts", call->function);
    return status;
}

static int moer_is_cpu(const moe_route_layer *layer) { return layer->context->device == MOE_ROUTE_DEVICE_CPU; }

/* ---- sizes ---- */

MOE_ROUTE_API moe_route_status moe_route_layer_workspace_size(const moe_route_layer *layer, uint32_t num_tokens, size_t *size) {
    moer_call call;
    moer_workspace workspace;
    moe_route_status status;
    if (size != NULL) *size = 0;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_layer_workspace_size";
    if (size == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: size is NULL", call.function);
    status = moer_check_tokens(&call, num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    moer_workspace_lay_out(layer, num_tokens, &workspace);
    *size = workspace.size;
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API size_t moe_route_aligned_capacity(const moe_route_layer *layer, uint32_t num_tokens, uint32_t block_size) {
    uint64_t capacity;
    if (layer == NULL || block_size == 0 || num_tokens > layer->max_tokens) return 0;
    capacity = (uint64_t)num_tokens * layer->router.top_k + (uint64_t)moer_layer_max_distinct(layer, num_tokens) * (block_size - 1);
    capacity = capacity / block_size * block_size; /* each expert's padding ends at a multiple, so no partial block is needed */
    return capacity <= 2147483647u ? (size_t)capacity : 0;
}

/* ---- the fused layer ---- */

static void moer_layer_routing(const moe_route_layer_args *args, const moer_workspace *w, moer_routing *routing) {
    memset(routing, 0, sizeof *routing);
    routing->logits = args->logits;
    routing->ids = args->ids != 0 ? args->ids : args->workspace + w->ids;
    routing->weights = args->weights != 0 ? args->weights : args->workspace + w->weights;
    routing->shared_weights = args->shared_weights;
    routing->token_ids = args->token_ids;
    routing->num_valid_tokens = args->num_valid_tokens;
    moer_routing_layer_maps(routing, w, args->workspace);
    routing->maps.expert_load = args->expert_load;
}

static void moer_sequence_layer(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_layer_args *args, const moer_workspace *w) {
    moer_routing routing;
    moer_layer_routing(args, w, &routing);
    moer_sequence_route(sequence, layer, args->logits != 0 ? layer->route_layer : layer->route_given, args->num_tokens, &routing, w, args->workspace);
    moer_sequence_experts(sequence, layer, args, &routing, w);
}

MOE_ROUTE_API moe_route_status moe_route_layer_run(const moe_route_layer *layer, const moe_route_layer_args *args) {
    moer_call call;
    moer_workspace w;
    moer_routing routing;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment;
    int given;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_layer_run";
    given = args != NULL && args->logits == 0;
    if (given && args->ids == 0 && !(layer->operations & MOE_ROUTE_OPERATION_EXPERTS)) given = 0; /* logits were forgotten */
    status = moer_call_begin(&call, args, given ? MOE_ROUTE_OPERATION_EXPERTS : MOE_ROUTE_OPERATION_LAYER, given ? "EXPERTS" : "LAYER");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK || args->num_tokens == 0) return status;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    memset(&routing, 0, sizeof routing);
    routing.logits = args->logits;
    routing.ids = args->ids;
    routing.weights = args->weights;
    routing.shared_weights = args->shared_weights;
    routing.token_ids = args->token_ids;
    if (given) {
        status = moer_check_address(&call, "ids", args->ids, 1, 4);
        if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, 1, (uint32_t)moer_dtype_size(layer->router.weights_dtype));
        if (status == MOE_ROUTE_OK && args->shared_weights != 0)
            return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: shared_weights is given; it is an output with logits alone", call.function);
    } else {
        status = moer_check_routing(&call, args->num_tokens, &routing, 0);
    }
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "expert_load", args->expert_load, 0, 8);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "y", args->y, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_additions(&call, args->shared_output, args->shared_output_weights, args->residual);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;

    if (moer_is_cpu(layer)) {
        moer_layer_routing(args, &w, &routing);
        routing.maps.expert_offsets = args->workspace + w.expert_offsets;
        moer_cpu_route(layer, args->num_tokens, &routing);
        moer_cpu_experts(layer, args, &routing, &w);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_layer(&sequence, layer, args, &w);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

/* ---- router and maps ---- */

/* Both operations after their own checks; logits are 0 for given ids. `small` is the variant for few pairs. */
static moe_route_status moer_run_routing(const moer_call *call, uint32_t num_tokens, moer_routing *routing, const moe_route_expert_maps *maps, moe_route_address workspace,
                                         size_t workspace_size, moe_route_stream stream, const moer_variant *small) {
    const moe_route_layer *layer = call->layer;
    moer_workspace w;
    moer_sequence sequence;
    moe_route_status status = moer_check_address(call, "num_valid_tokens", routing->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_maps(call, num_tokens, maps, routing);
    if (status != MOE_ROUTE_OK) return status;
    if (!routing->any_map && (num_tokens == 0 || routing->logits == 0)) return MOE_ROUTE_OK; /* with maps their counts are still owed: zeros */
    memset(&w, 0, sizeof w);
    if (!moer_is_cpu(layer) && routing->any_map && num_tokens * layer->router.top_k > MOER_SMALL_PAIRS) {
        status = moer_check_workspace(call, num_tokens, workspace, workspace_size, &w);
        if (status != MOE_ROUTE_OK) return status;
    }
    if (moer_is_cpu(layer)) {
        moer_cpu_route(layer, num_tokens, routing);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_route(&sequence, layer, small, num_tokens, routing, &w, workspace);
    return moer_sequence_launch(layer, &sequence, stream);
}

MOE_ROUTE_API moe_route_status moe_route_route(const moe_route_layer *layer, const moe_route_route_args *args) {
    moer_call call;
    moer_routing routing;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_route";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_ROUTE, "ROUTE");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    memset(&routing, 0, sizeof routing);
    routing.logits = args->logits;
    routing.ids = args->ids;
    routing.weights = args->weights;
    routing.shared_weights = args->shared_weights;
    routing.token_ids = args->token_ids;
    routing.num_valid_tokens = args->num_valid_tokens;
    status = moer_check_routing(&call, args->num_tokens, &routing, 1);
    if (status != MOE_ROUTE_OK) return status;
    return moer_run_routing(&call, args->num_tokens, &routing, &args->maps, args->workspace, args->workspace_size, args->stream, layer->route_all);
}

MOE_ROUTE_API moe_route_status moe_route_maps(const moe_route_layer *layer, const moe_route_maps_args *args) {
    moer_call call;
    moer_routing routing;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_maps";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_MAPS, "MAPS");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    status = moer_check_address(&call, "ids", args->ids, args->num_tokens != 0, 4);
    if (status != MOE_ROUTE_OK) return status;
    memset(&routing, 0, sizeof routing);
    routing.ids = args->ids;
    routing.num_valid_tokens = args->num_valid_tokens;
    return moer_run_routing(&call, args->num_tokens, &routing, &args->maps, args->workspace, args->workspace_size, args->stream, layer->maps_all);
}

/* ---- one expert matmul, expand, combine ---- */

static void moer_matmul_routing(const moe_route_matmul_args *args, const moer_workspace *w, moer_routing *routing) {
    memset(routing, 0, sizeof *routing);
    routing->ids = args->ids;
    routing->num_valid_tokens = args->num_valid_tokens;
    moer_routing_layer_maps(routing, w, args->workspace);
}

MOE_ROUTE_API moe_route_status moe_route_matmul(const moe_route_layer *layer, const moe_route_matmul_args *args) {
    moer_call call;
    moer_workspace w;
    moer_routing routing;
    moer_sequence sequence;
    const moer_matrix *matrix;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_matmul";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_MATMUL, "MATMUL");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    if (args->matrix != MOE_ROUTE_MATRIX_GATE_UP && args->matrix != MOE_ROUTE_MATRIX_DOWN)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: matrix is %d; allowed is GATE_UP (0) or DOWN (1)", call.function, (int)args->matrix);
    matrix = args->matrix == MOE_ROUTE_MATRIX_GATE_UP ? &layer->gate_up : &layer->down;
    if (matrix->format == MOE_ROUTE_FORMAT_NONE)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: matrix is %d; the layer was created without these weights", call.function, (int)args->matrix);
    if (args->num_tokens == 0) return MOE_ROUTE_OK;
    status = moer_check_address(&call, "ids", args->ids, 1, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, 1, moer_row_alignment(matrix->inner, layer->dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "out", args->out, 1, moer_row_alignment(matrix->rows, layer->dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;
    moer_matmul_routing(args, &w, &routing);
    if (moer_is_cpu(layer)) {
        routing.maps.expert_offsets = args->workspace + w.expert_offsets;
        moer_cpu_route(layer, args->num_tokens, &routing);
        moer_cpu_matmul(layer, args, &routing, &w);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_route(&sequence, layer, layer->route_given, args->num_tokens, &routing, &w, args->workspace);
    moer_sequence_matmul(&sequence, layer, args, &routing);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

MOE_ROUTE_API moe_route_status moe_route_expand(const moe_route_layer *layer, const moe_route_expand_args *args) {
    moer_call call;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_expand";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_EXPAND, "EXPAND");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK || args->num_tokens == 0) return status;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    status = moer_check_address(&call, "x", args->x, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_to_pair", args->row_to_pair, 1, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "rows", args->rows, 1, alignment);
    if (status != MOE_ROUTE_OK) return status;
    if (moer_is_cpu(layer)) {
        moer_cpu_expand(moer_host(args->x), (const int32_t *)moer_host(args->row_to_pair), moer_host(args->rows), layer->hidden_size * moer_dtype_size(layer->dtype),
                        args->num_tokens * layer->router.top_k, layer->router.top_k);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_expand(&sequence, layer, args);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

MOE_ROUTE_API moe_route_status moe_route_combine(const moe_route_layer *layer, const moe_route_combine_args *args) {
    moer_call call;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment;
    int identity;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_combine";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_COMBINE, "COMBINE");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK || args->num_tokens == 0) return status;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    identity = layer->router.num_identity != 0;
    status = moer_check_address(&call, "rows", args->rows, 1, moer_row_alignment(layer->hidden_size, layer->rows_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "pair_to_row", args->pair_to_row, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, identity || !(layer->weight_on_input || args->weighted_rows), (uint32_t)moer_dtype_size(layer->router.weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "y", args->y, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "ids", args->ids, identity, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, identity, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_additions(&call, args->shared_output, args->shared_output_weights, args->residual);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status != MOE_ROUTE_OK) return status;
    if (moer_is_cpu(layer)) {
        moer_combine_args combine;
        moer_combine_args_given(&combine, layer, args);
        moer_cpu_combine(layer, &combine, layer->rows_dtype);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_combine(&sequence, layer, args);
    return moer_sequence_launch(layer, &sequence, args->stream);
}
