/*
  sequence.c: the launches of each operation, in order, with grids and arguments; and launching them. Running and
  explaining a layer both start from these lists, so an explanation can't differ from what is done. Checking arguments
  belongs to operations.c.
*/
#include "internal.h"

static moer_launch *moer_sequence_add(moer_sequence *sequence, const moer_variant *variant, uint32_t entry, uint32_t grid_x, uint32_t grid_y, uint32_t block) {
    moer_launch *launch = &sequence->launches[sequence->num_launches++];
    memset(launch, 0, sizeof *launch);
    launch->variant = variant;
    launch->entry = entry;
    launch->grid[0] = grid_x;
    launch->grid[1] = grid_y;
    launch->grid[2] = 1;
    launch->block = block;
    return launch;
}

/* ---- router and maps ---- */

static void moer_fill_route(moer_route_args *args, const moer_router *router, uint32_t num_tokens, const moer_routing *routing) {
    args->logits = routing->logits;
    args->logit_bias = router->logit_bias;
    args->selection_bias = router->selection_bias;
    args->expert_scale = router->expert_scale;
    args->id_table = router->id_table;
    args->token_ids = routing->token_ids;
    args->ids = routing->ids;
    args->weights = routing->weights;
    args->shared_weights = routing->shared_weights;
    args->num_valid_tokens = routing->num_valid_tokens;
    args->expert_map = router->expert_map;
    args->maps = routing->maps;
    args->num_tokens = num_tokens;
    args->id_table_rows = router->id_table_rows;
    args->softcap = router->softcap;
    args->jitter = router->jitter;
    args->renormalize_epsilon = router->renormalize_epsilon;
    args->scale = router->scale;
}

static void moer_sequence_topk(moer_sequence *sequence, const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing) {
    moer_fill_route(&moer_sequence_add(sequence, layer->topk, 0, moer_divide_up(num_tokens, 8), 1, 256)->args.route, &layer->router, num_tokens, routing);
}

static void moer_sequence_small_route(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *variant, uint32_t num_tokens, const moer_routing *routing) {
    /* As in route.cu: a warp chooses a token's experts, all compute scores ahead, 32 at a time; then a warp weighs as many tokens as its lanes
       have slots for, or one, while others find the maps, 32 experts each. */
    const moer_router *router = &layer->router;
    const uint32_t experts = routing->logits != 0 ? router->num_experts : 0, num_local = router->num_local_experts, slots = router->top_k + router->num_shared_experts;
    const int packed = router->ids == MOE_ROUTE_IDS_SELECTED && router->score != MOE_ROUTE_SCORE_SPARSE_MIXER && slots <= 16;
    const int by_score = experts != 0 && (router->selection_bias != 0 || moer_drops_groups(router->group_rule) || router->score == MOE_ROUTE_SCORE_CUSTOM);
    const uint32_t most_experts = experts > num_local ? experts : num_local;
    const uint32_t max_warps = experts == 0 ? 32 : most_experts > 1024 ? 8 : most_experts > 512 ? 12 : most_experts > 256 ? 20 : by_score ? 24 : 32;
    const uint32_t max_routing = max_warps > 16 && max_warps < 32 ? 16 : max_warps, routing_warps = experts == 0 ? 0 : num_tokens < max_routing ? num_tokens : max_routing;
    const uint32_t map_warps = num_local > 512 ? 16 : moer_divide_up(num_local, 32);
    uint32_t lanes = packed ? 1 : 32, warps;
    while (lanes < slots && lanes < 32) lanes *= 2;
    warps = moer_divide_up(routing_warps * lanes, 32) + map_warps;
    if (warps < routing_warps + 2) warps = routing_warps + 2; /* that empty the table meanwhile */
    if (experts == 0 && warps < moer_divide_up(num_tokens * router->top_k, 32)) warps = moer_divide_up(num_tokens * router->top_k, 32);
    if (by_score && warps < moer_divide_up(num_tokens * experts, 32)) warps = moer_divide_up(num_tokens * experts, 32);
    if (warps > max_warps) warps = max_warps;
    moer_fill_route(&moer_sequence_add(sequence, variant, 0, 1, 1, warps * 32)->args.route, &layer->router, num_tokens, routing);
}

static void moer_sequence_large_maps(moer_sequence *sequence, const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing,
                                     const moer_workspace *w, moe_route_address workspace) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k;
    const int cub = moer_layer_sorts_by_cub(layer, num_pairs);
    const uint32_t blocks = moer_maps_blocks(layer, num_pairs);
    const moer_variant *variant = cub ? layer->maps_cub : layer->maps;
    const uint32_t threads = cub ? moer_cub_maps_threads(layer) : 512;
    const uint32_t first = num_pairs <= MOER_SORT_PAIRS ? 2 : 0, end = first == 0 ? 2 : 3;
    uint32_t i;
    for (i = first; i < end; i++) {
        moer_maps_args *args = &moer_sequence_add(sequence, variant, i, blocks, 1, threads)->args.maps;
        args->ids = routing->ids;
        args->num_valid_tokens = routing->num_valid_tokens;
        args->expert_map = layer->router.expert_map;
        args->block_counts = workspace + w->block_counts;
        args->maps = routing->maps;
        args->num_pairs = num_pairs;
        args->num_blocks = blocks;
    }
}

/* Router (unless ids are given) and maps (where any is wanted). `small` is the variant for up to MOER_SMALL_PAIRS pairs. */
static void moer_sequence_route(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *small, uint32_t num_tokens,
                                const moer_routing *routing, const moer_workspace *w, moe_route_address workspace) {
    if (!routing->any_map) {
        moer_sequence_topk(sequence, layer, num_tokens, routing);
    } else if (num_tokens * layer->router.top_k <= MOER_SMALL_PAIRS) {
        moer_sequence_small_route(sequence, layer, small, num_tokens, routing);
    } else {
        if (routing->logits != 0) moer_sequence_topk(sequence, layer, num_tokens, routing);
        moer_sequence_large_maps(sequence, layer, num_tokens, routing, w, workspace);
    }
}

/* The maps that the expert kernels read, in the workspace. */
static void moer_routing_layer_maps(moer_routing *routing, const moer_workspace *w, moe_route_address workspace) {
    routing->any_map = 1;
    routing->maps.row_to_pair = workspace + w->row_to_pair;
    routing->maps.pair_to_row = workspace + w->pair_to_row;
    routing->maps.row_to_expert = workspace + w->row_to_expert;
    routing->maps.distinct_experts = workspace + w->distinct_experts;
    routing->maps.distinct_offsets = workspace + w->distinct_offsets;
    routing->maps.distinct_count = workspace + w->distinct_count;
}

/* ---- experts ---- */

static void moer_weights_args_of(moer_weights_args *args, const moer_matrix *matrix) {
    args->data = matrix->data;
    args->scales = matrix->scales;
    args->zero_points = matrix->zero_points;
    args->global_scales = matrix->global_scales;
}

static void moer_matmul_args_matrix(moer_matmul_args *args, const moer_matrix *matrix, const moer_maps_out *maps) {
    moer_weights_args_of(&args->weights, matrix);
    args->bias = matrix->bias;
    args->distinct_experts = maps->distinct_experts;
    args->distinct_offsets = maps->distinct_offsets;
    args->distinct_count = maps->distinct_count;
    args->row_to_pair = maps->row_to_pair;
}

static moer_epilogue moer_layer_epilogue(const moe_route_layer *layer, const moe_route_layer_args *from, const moer_routing *routing) {
    moer_epilogue epilogue;
    memset(&epilogue, 0, sizeof epilogue);
    epilogue.x = layer->router.num_identity != 0 ? from->x : 0;
    epilogue.ids = layer->router.num_identity != 0 ? routing->ids : 0;
    epilogue.num_valid_tokens = from->num_valid_tokens;
    epilogue.shared = from->shared_output;
    epilogue.shared_weights = from->shared_output_weights;
    epilogue.residual = from->residual;
    return epilogue;
}

/* combine.cu's arguments after the down matmul into the workspace; the CPU's, too. */
static void moer_combine_args_layer(moer_combine_args *args, const moe_route_layer *layer, const moe_route_layer_args *from, const moer_routing *routing, const moer_workspace *w) {
    memset(args, 0, sizeof *args);
    args->rows = from->workspace + w->partial;
    args->pair_to_row = routing->maps.pair_to_row;
    args->router_weights = routing->weights;
    args->y = from->y;
    args->epilogue = moer_layer_epilogue(layer, from, routing);
    args->num_tokens = from->num_tokens;
    args->num_rows = from->num_tokens * layer->router.top_k;
}

/* The same for the combine on its own. */
static void moer_combine_args_given(moer_combine_args *args, const moe_route_layer *layer, const moe_route_combine_args *from) {
    memset(args, 0, sizeof *args);
    args->rows = from->rows;
    args->pair_to_row = from->pair_to_row;
    args->router_weights = from->weights;
    args->y = from->y;
    args->epilogue.x = layer->router.num_identity != 0 ? from->x : 0;
    args->epilogue.ids = layer->router.num_identity != 0 ? from->ids : 0;
    args->epilogue.num_valid_tokens = from->num_valid_tokens;
    args->epilogue.shared = from->shared_output;
    args->epilogue.shared_weights = from->shared_output_weights;
    args->epilogue.residual = from->residual;
    args->num_tokens = from->num_tokens;
    args->num_rows = from->num_rows != 0 ? from->num_rows : from->num_tokens * layer->router.top_k;
    args->weighted_rows = from->weighted_rows != 0;
}

static moer_combine_args *moer_sequence_add_combine(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *variant, uint32_t num_tokens) {
    const uint32_t height = num_tokens < 65535 ? num_tokens : 65535;
    return &moer_sequence_add(sequence, variant, 0, moer_divide_up(layer->hidden_size / moer_combine_vector(layer), 128), height, 128)->args.combine;
}

/* matmul.cu with as many blocks as run at once, or fewer where there are fewer tiles. */
static moer_launch *moer_sequence_add_matmul(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *variant, const moer_matrix *matrix, uint32_t distinct, uint32_t warps) {
    const uint32_t matrices = matrix == &layer->gate_up && layer->up.format != MOE_ROUTE_FORMAT_NONE ? 2 : 1; /* gate and up */
    const uint32_t tiles = moer_divide_up(matrix->rows * matrices, 16) * distinct, at_once = layer->context->num_multiprocessors * (uint32_t)variant->resident_blocks[0];
    moer_launch *launch = moer_sequence_add(sequence, variant, 0, at_once != 0 && at_once < tiles ? at_once : tiles, 1, (warps + (variant->family == &moer_family_matmul_bulk ? 2 : 0)) * 32);
    launch->weight_bytes = moer_matrix_bytes(matrix) * matrices * distinct;
    launch->args.matmul.max_distinct = distinct;
    return launch;
}

/* The down matmul's weights, as many as two fifths of L2 hold: the rest of it has the weights that are being read. */
static void moer_prefetch_down(moer_matmul_args *args, const moer_matrix *down, uint64_t l2_bytes) {
    const uint64_t data = moer_data_bytes(down), scales = moer_scale_bytes(down);
    args->next_data = down->data;
    args->next_scales = down->scales;
    args->next_bytes = down->data % 16 == 0 && data % 16 == 0 ? data : 0; /* where every expert is aligned */
    args->next_scale_bytes = down->scales % 16 == 0 && scales % 16 == 0 ? scales : 0;
    args->next_experts = (uint32_t)(l2_bytes / 5 * 2 / (data + scales)); /* L2's size was an int. All that is fetched is smaller, also in pieces */
}

static moer_launch *moer_sequence_add_grouped(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *const *variants, const moer_matrix *matrix, uint32_t num_tokens) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, num_tokens), tile = moer_grouped_tile(layer, num_pairs);
    const uint32_t matrices = matrix == &layer->gate_up && layer->up.format != MOE_ROUTE_FORMAT_NONE ? 2 : 1; /* gate and up */
    const uint32_t tiles = moer_grouped_columns(layer, matrix) * (num_pairs / (32u << tile) + distinct);
    const uint32_t at_once = moer_grouped_takes_warpgroups(layer, matrix) ? layer->context->num_multiprocessors * (uint32_t)variants[tile]->resident_blocks[0] : 0; /* others take a tile a block */
    moer_launch *launch = moer_sequence_add(sequence, variants[tile], 0, at_once != 0 && at_once < tiles ? at_once : tiles, 1, moer_grouped_threads(layer, matrix));
    launch->weight_bytes = moer_matrix_bytes(matrix) * matrices * distinct;
    return launch;
}

/* x up to h, in row order: of the layer, whose large batches may be grouped, and of expert rows. */
static moer_matmul_args *moer_sequence_gate_up(moer_sequence *sequence, const moe_route_layer *layer, moe_route_address x, moe_route_address h, uint32_t num_pairs, int grouped,
                                               const moer_routing *routing) {
    const uint32_t num_tokens = num_pairs / layer->router.top_k, distinct = moer_layer_max_distinct(layer, num_tokens);
    moer_launch *launch = grouped ? moer_sequence_add_grouped(sequence, layer, layer->gate_up_grouped, &layer->gate_up, num_tokens)
                                  : moer_sequence_add_matmul(sequence, layer, layer->gate_up_activated[moer_layer_has_many_rows(layer, num_pairs)], &layer->gate_up, distinct, moer_layer_matmul_warps(layer, &layer->gate_up));
    moer_matmul_args *gate_up = &launch->args.matmul;
    moer_matmul_args_matrix(gate_up, &layer->gate_up, &routing->maps);
    moer_weights_args_of(&gate_up->up_weights, &layer->up);
    gate_up->up_bias = layer->up.bias;
    gate_up->x = x;
    gate_up->out = h;
    gate_up->router_weights = layer->weight_on_input ? routing->weights : 0;
    gate_up->num_pairs = num_pairs;
    gate_up->alpha = layer->alpha;
    gate_up->up_beta = layer->up_beta;
    gate_up->up_offset = layer->up_offset;
    gate_up->clamp = layer->clamp;
    return gate_up;
}

static void moer_sequence_experts(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_layer_args *from, const moer_routing *routing, const moer_workspace *w) {
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, from->num_tokens);
    const int many = moer_layer_has_many_rows(layer, num_pairs), grouped = moer_layer_runs_grouped(layer, num_pairs);
    moer_matmul_args *gate_up = moer_sequence_gate_up(sequence, layer, from->x, from->workspace + w->h, num_pairs, grouped, routing), *down;
    moer_launch *launch;
    if (!grouped) moer_prefetch_down(gate_up, &layer->down, layer->context->l2_bytes);
    if (moer_layer_fuses(layer, num_pairs)) {
        moer_down_args *args;
        uint32_t warps;
        warps = distinct * layer->down_parts;
        warps = warps < 4 ? 4 : warps > 16 ? 16 : warps;
        launch = moer_sequence_add(sequence, layer->down_fused, 0, moer_divide_up(layer->hidden_size, 16), 1, warps * 32);
        launch->weight_bytes = moer_matrix_bytes(&layer->down) * distinct;
        args = &launch->args.down;
        moer_weights_args_of(&args->weights, &layer->down);
        args->bias = layer->down.bias;
        args->h = from->workspace + w->h;
        args->router_weights = routing->weights;
        args->y = from->y;
        args->distinct_experts = routing->maps.distinct_experts;
        args->distinct_offsets = routing->maps.distinct_offsets;
        args->distinct_count = routing->maps.distinct_count;
        args->pair_to_row = routing->maps.pair_to_row;
        args->row_to_expert = routing->maps.row_to_expert;
        args->epilogue = moer_layer_epilogue(layer, from, routing);
        args->num_tokens = from->num_tokens;
        args->max_distinct = distinct;
        return;
    }
    launch = grouped ? moer_sequence_add_grouped(sequence, layer, layer->down_grouped, &layer->down, from->num_tokens)
                     : moer_sequence_add_matmul(sequence, layer, layer->down_rows[many], &layer->down, distinct, layer->down_parts);
    down = &launch->args.matmul;
    moer_matmul_args_matrix(down, &layer->down, &routing->maps);
    down->x = from->workspace + w->h;
    down->out = from->workspace + w->partial;
    down->router_weights = grouped && !layer->weight_on_input ? routing->weights : 0;
    down->num_pairs = num_pairs;
    moer_combine_args_layer(moer_sequence_add_combine(sequence, layer, grouped ? layer->combine_grouped : layer->combine_rows, from->num_tokens), layer, from, routing, w);
}

static void moer_sequence_matmul(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_matmul_args *from, const moer_routing *routing) {
    const moer_matrix *matrix = from->matrix == MOE_ROUTE_MATRIX_GATE_UP ? &layer->gate_up : &layer->down;
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, from->num_tokens);
    moer_matmul_args *args = &moer_sequence_add_matmul(sequence, layer, layer->matmul[from->matrix][moer_layer_has_many_rows(layer, num_pairs)], matrix, distinct, moer_layer_matmul_warps(layer, matrix))->args.matmul;
    moer_matmul_args_matrix(args, matrix, &routing->maps);
    args->pair_to_row = routing->maps.pair_to_row;
    args->x = from->x;
    args->out = from->out;
    args->num_pairs = num_pairs;
    args->x_per_pair = from->x_per_pair != 0;
}

static void moer_sequence_expand(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_expand_args *from) {
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k;
    const uint32_t units = (uint32_t)(layer->hidden_size * moer_dtype_size(layer->dtype)) / moer_expand_unit(layer);
    moer_expand_args *args = &moer_sequence_add(sequence, layer->expand, 0, moer_divide_up(units, 128), num_pairs < 65535 ? num_pairs : 65535, 128)->args.expand;
    args->x = from->x;
    args->row_to_pair = from->row_to_pair;
    args->rows = from->rows;
    args->num_pairs = num_pairs;
}

static void moer_sequence_combine(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_combine_args *from) {
    moer_combine_args_given(moer_sequence_add_combine(sequence, layer, layer->combine, from->num_tokens), layer, from);
}

/* ---- launching ---- */

static moe_route_status moer_sequence_launch(const moe_route_layer *layer, moer_sequence *sequence, moe_route_stream stream) {
    moe_route_context *context = layer->context;
    moer_cu_result result = 0;
    uint32_t i;
    int pushed;
    moe_route_status status = moer_context_enter(context, &pushed);
    if (status != MOE_ROUTE_OK) return status;
    for (i = 0; i < sequence->num_launches && result == 0; i++) {
        moer_launch *launch = &sequence->launches[i];
        moer_cu_launch_attribute attribute;
        moer_cu_launch_config config;
        void *parameters[1];
        memset(&config, 0, sizeof config);
        memcpy(config.grid, launch->grid, sizeof config.grid);
        config.block[0] = launch->block;
        config.block[1] = config.block[2] = 1;
        config.shared_bytes = launch->variant->dynamic_shared_bytes;
        config.stream = stream;
        if (layer->dependent) {
            memset(&attribute, 0, sizeof attribute);
            attribute.id = MOER_CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmatic_stream_serialization = 1;
            config.attributes = &attribute;
            config.num_attributes = 1;
        }
        parameters[0] = &launch->args;
        result = context->driver.cuLaunchKernelEx(&config, launch->variant->functions[launch->entry], parameters, NULL);
        if (result != 0) status = moer_driver_fail(context, launch->variant->family->entries[launch->entry], result);
    }
    moer_context_leave(context, pushed);
    return status;
}
