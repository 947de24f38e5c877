/*
  ranks.c: the operations of expert parallelism: what goes to which rank, and the rows that come back. Their launches and
  arguments, checked here; the exchange itself is the caller's. Combining what came back is an operation of operations.c.
*/
#include "internal.h"

MOE_ROUTE_API void moe_route_rank_range(uint32_t num_physical_experts, uint32_t num_ranks, uint32_t rank, uint32_t *first, uint32_t *count) {
    const uint32_t each = num_ranks != 0 ? num_physical_experts / num_ranks : 0, more = num_ranks != 0 ? num_physical_experts % num_ranks : 0;
    const int exists = rank < num_ranks;
    if (first != NULL) *first = exists ? rank * each + (rank < more ? rank : more) : num_physical_experts;
    if (count != NULL) *count = exists ? each + (rank < more) : 0;
}

/* ---- dispatch ---- */

static void moer_dispatch_args_of(moer_dispatch_args *args, const moe_route_layer *layer, const moe_route_dispatch_args *from) {
    memset(args, 0, sizeof *args);
    args->ids = from->ids;
    args->weights = from->weights;
    args->x = from->x;
    args->num_valid_tokens = from->num_valid_tokens;
    args->expert_map = layer->router.expert_map;
    args->counts = from->counts;
    args->offsets = from->offsets;
    args->rows = from->rows;
    args->row_ids = from->row_ids;
    args->row_weights = from->row_weights;
    args->row_to_token = from->row_to_token;
    args->pair_to_row = from->pair_to_row;
    args->pair_to_slot_row = from->pair_to_slot_row;
    args->num_tokens = from->num_tokens;
    args->capacity = from->capacity;
    args->slot_capacity = from->slot_capacity != 0 ? from->slot_capacity : from->capacity * layer->router.top_k;
    memcpy(args->rank_begin, layer->rank_begin, sizeof layer->rank_begin);
}

static int moer_dispatch_is_large(const moe_route_layer *layer, uint32_t num_tokens) { return num_tokens * layer->router.top_k > MOER_DISPATCH_PAIRS; }

static void moer_sequence_dispatch(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_dispatch_args *from, const moer_workspace *w) {
    const uint32_t units = (uint32_t)(layer->hidden_size * moer_dtype_size(layer->dtype)) / moer_expand_unit(layer);
    const uint32_t width = from->rows != 0 ? moer_divide_up(units, 256) : 1;
    if (moer_dispatch_is_large(layer, from->num_tokens)) {
        const uint32_t shares = moer_dispatch_shares(layer, from->num_tokens, width);
        uint32_t i;
        for (i = 0; i < 2; i++) {
            moer_launch *launch = moer_sequence_add(sequence, layer->dispatch_large, i, i == 0 ? shares : width, i == 0 ? 1 : shares, 256);
            moer_dispatch_args_of(&launch->args.dispatch, layer, from);
            launch->args.dispatch.block_counts = from->workspace + w->dispatch_counts;
        }
    } else {
        const uint32_t height = from->num_tokens < 1 ? 1 : from->num_tokens < 512 ? from->num_tokens : 512;
        moer_launch *launch = moer_sequence_add(sequence, layer->dispatch, 0, width, height, 256);
        moer_dispatch_args_of(&launch->args.dispatch, layer, from);
    }
}

/* The sizes of the outputs, which are numbered in 31 bits. */
static moe_route_status moer_check_capacity(const moer_call *call, const moe_route_dispatch_args *args) {
    const moe_route_layer *layer = call->layer;
    const uint64_t top_k = layer->router.top_k, limit = 2147483647u / layer->num_ranks;
    if (args->capacity * top_k > limit)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: capacity is %u; allowed is 0 to %u with %u ranks and top_k %u", call->function, (unsigned)args->capacity,
                         (unsigned)(limit / top_k), (unsigned)layer->num_ranks, (unsigned)top_k);
    if (args->slot_capacity > args->capacity * top_k)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: slot_capacity is %u; allowed is 0 to %u, capacity * top_k", call->function, (unsigned)args->slot_capacity,
                         (unsigned)(args->capacity * top_k));
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API moe_route_status moe_route_dispatch(const moe_route_layer *layer, const moe_route_dispatch_args *args) {
    moer_call call;
    moer_workspace w;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment, weight_size;
    int any;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_dispatch";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_DISPATCH, "DISPATCH");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status == MOE_ROUTE_OK) status = moer_check_capacity(&call, args);
    if (status != MOE_ROUTE_OK) return status;
    any = args->num_tokens != 0;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    weight_size = (uint32_t)moer_dtype_size(layer->router.weights_dtype);
    status = moer_check_address(&call, "ids", args->ids, any, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, any && args->row_weights != 0, weight_size);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, any && args->rows != 0, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "counts", args->counts, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "offsets", args->offsets, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "rows", args->rows, 0, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_ids", args->row_ids, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_weights", args->row_weights, 0, weight_size);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_to_token", args->row_to_token, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "pair_to_row", args->pair_to_row, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "pair_to_slot_row", args->pair_to_slot_row, 0, 4);
    memset(&w, 0, sizeof w);
    if (status == MOE_ROUTE_OK && moer_dispatch_is_large(layer, args->num_tokens)) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;
    if (moer_is_cpu(layer)) {
        moer_dispatch_args dispatch;
        moer_dispatch_args_of(&dispatch, layer, args);
        moer_cpu_dispatch(layer, &dispatch);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_dispatch(&sequence, layer, args, &w);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

/* ---- expert rows ---- */

static void moer_slots_args_of(moer_slots_args *args, const moe_route_layer *layer, const moe_route_expert_rows_args *from, const moer_workspace *w) {
    const uint32_t sources = from->num_sources != 0 ? from->num_sources : 1;
    memset(args, 0, sizeof *args);
    args->ids = from->ids;
    args->num_valid_tokens = from->num_valid_tokens;
    args->expert_map = layer->router.expert_map;
    args->pair_to_slot_row = from->workspace + w->slot_rows;
    args->num_tokens = from->num_tokens;
    args->source_pairs = from->num_tokens / sources * layer->router.top_k;
    args->source_rows = from->num_rows / sources;
}

static void moer_expert_rows_routing(const moe_route_expert_rows_args *args, const moer_workspace *w, moer_routing *routing) {
    memset(routing, 0, sizeof *routing);
    routing->ids = args->ids;
    routing->weights = args->weights;
    routing->num_valid_tokens = args->num_valid_tokens;
    moer_routing_layer_maps(routing, w, args->workspace);
}

static void moer_sequence_expert_rows(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_expert_rows_args *from, const moer_routing *routing, const moer_workspace *w) {
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, from->num_tokens);
    const int many = moer_layer_has_many_rows(layer, num_pairs);
    moer_matmul_args *args;
    moer_sequence_route(sequence, layer, layer->route_given, from->num_tokens, routing, w, from->workspace);
    moer_slots_args_of(&moer_sequence_add(sequence, layer->slots, 0, from->num_sources != 0 ? from->num_sources : 1, 1, 512)->args.slots, layer, from, w);
    moer_sequence_gate_up(sequence, layer, from->x, from->workspace + w->h, num_pairs, 0, routing);
    args = &moer_sequence_add_matmul(sequence, layer, layer->down_slots[many], &layer->down, distinct, layer->down_parts)->args.matmul;
    moer_matmul_args_matrix(args, &layer->down, &routing->maps);
    args->pair_to_slot_row = from->workspace + w->slot_rows;
    args->x = from->workspace + w->h;
    args->out = from->rows;
    args->num_pairs = num_pairs;
}

MOE_ROUTE_API moe_route_status moe_route_expert_rows(const moe_route_layer *layer, const moe_route_expert_rows_args *args) {
    moer_call call;
    moer_workspace w;
    moer_routing routing;
    moer_sequence sequence;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_expert_rows";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_EXPERT_ROWS, "EXPERT_ROWS");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    if (args->num_rows > 2147483647u)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: num_rows is %u; allowed is 0 to 2147483647", call.function, (unsigned)args->num_rows);
    if (args->num_sources > 1 && (args->num_tokens % args->num_sources != 0 || args->num_rows % args->num_sources != 0))
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: num_sources is %u; allowed is a divisor of num_tokens, %u, and of num_rows, %u", call.function, (unsigned)args->num_sources,
                         (unsigned)args->num_tokens, (unsigned)args->num_rows);
    if (args->num_tokens == 0 || args->num_rows == 0) return MOE_ROUTE_OK;
    status = moer_check_address(&call, "ids", args->ids, 1, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, layer->weight_on_input, (uint32_t)moer_dtype_size(layer->router.weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, 1, moer_row_alignment(layer->hidden_size, layer->dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "rows", args->rows, 1, moer_row_alignment(layer->hidden_size, layer->rows_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;
    moer_expert_rows_routing(args, &w, &routing);
    if (moer_is_cpu(layer)) {
        moer_slots_args slots;
        routing.maps.expert_offsets = args->workspace + w.expert_offsets;
        moer_slots_args_of(&slots, layer, args, &w);
        moer_cpu_route(layer, args->num_tokens, &routing);
        moer_cpu_slots(&layer->router, &slots);
        moer_cpu_expert_rows(layer, args, &routing, &w);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_expert_rows(&sequence, layer, args, &routing, &w);
    return moer_sequence_launch(layer, &sequence, args->stream);
}
