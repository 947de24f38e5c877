/*
  cpu_operations.c: each operation on the CPU, over the same arguments and the same workspace as on the GPU. Arguments are
  checked before, in operations.c.
*/
#include "internal.h"

static void moer_cpu_route(const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing) {
    const uint32_t num_valid = moer_cpu_num_valid(routing->num_valid_tokens, num_tokens);
    if (routing->logits != 0) moer_cpu_topk(&layer->router, routing, num_tokens, num_valid);
    if (routing->any_map) moer_cpu_maps(&layer->router, (const int32_t *)moer_host(routing->ids), num_tokens, num_valid, &routing->maps);
}

static void moer_cpu_product_begin(moer_cpu_product *product, const moe_route_layer *layer, const moer_matrix *matrix, const moer_routing *routing,
                                   const moer_workspace *w, moe_route_address workspace) {
    memset(product, 0, sizeof *product);
    product->layer = layer;
    product->matrix = matrix;
    product->expert_offsets = (const int32_t *)moer_host(routing->maps.expert_offsets);
    product->row_to_pair = (const int32_t *)moer_host(routing->maps.row_to_pair);
    product->x_dtype = product->out_dtype = layer->dtype;
    product->scratch = (float *)moer_host(workspace + w->scratch);
}

/* x up to h. */
static void moer_cpu_gate_up(const moe_route_layer *layer, moe_route_address x, moe_route_address workspace, const moer_routing *routing, const moer_workspace *w) {
    moer_cpu_product product;
    moer_cpu_product_begin(&product, layer, &layer->gate_up, routing, w, workspace);
    product.x = moer_host(x);
    product.activated = 1;
    product.up = layer->up.format != MOE_ROUTE_FORMAT_NONE ? &layer->up : NULL;
    product.input_weights = layer->weight_on_input ? moer_host(routing->weights) : NULL;
    product.out = moer_host(workspace + w->h);
    moer_cpu_multiply(&product);
}

/* The maps are those of moer_routing_layer_maps and the expert offsets. */
static void moer_cpu_experts(const moe_route_layer *layer, const moe_route_layer_args *args, const moer_routing *routing, const moer_workspace *w) {
    moer_cpu_product product;
    moer_combine_args combine;
    moer_cpu_gate_up(layer, args->x, args->workspace, routing, w);
    moer_cpu_product_begin(&product, layer, &layer->down, routing, w, args->workspace);
    product.x = moer_host(args->workspace + w->h);
    product.x_index = 2;
    product.out = moer_host(args->workspace + w->partial);
    product.out_dtype = MOE_ROUTE_F32;
    moer_cpu_multiply(&product);

    moer_combine_args_layer(&combine, layer, args, routing, w);
    moer_cpu_combine(layer, &combine, MOE_ROUTE_F32);
}

/* The same maps, and the slot rows. */
static void moer_cpu_expert_rows(const moe_route_layer *layer, const moe_route_expert_rows_args *args, const moer_routing *routing, const moer_workspace *w) {
    moer_cpu_product product;
    moer_cpu_gate_up(layer, args->x, args->workspace, routing, w);
    moer_cpu_product_begin(&product, layer, &layer->down, routing, w, args->workspace);
    product.x = moer_host(args->workspace + w->h);
    product.x_index = 2;
    product.out = moer_host(args->rows);
    product.out_dtype = layer->rows_dtype;
    product.pair_to_slot_row = (const int32_t *)moer_host(args->workspace + w->slot_rows);
    moer_cpu_multiply(&product);
}

static void moer_cpu_matmul(const moe_route_layer *layer, const moe_route_matmul_args *args, const moer_routing *routing, const moer_workspace *w) {
    const moer_matrix *matrix = args->matrix == MOE_ROUTE_MATRIX_GATE_UP ? &layer->gate_up : &layer->down;
    moer_cpu_product product;
    memset(moer_host(args->out), 0, (size_t)args->num_tokens * layer->router.top_k * matrix->rows * moer_dtype_size(layer->dtype));
    moer_cpu_product_begin(&product, layer, matrix, routing, w, args->workspace);
    product.x = moer_host(args->x);
    product.x_index = args->x_per_pair ? 1 : 0;
    product.out = moer_host(args->out);
    product.out_by_pair = 1;
    moer_cpu_multiply(&product);
}
