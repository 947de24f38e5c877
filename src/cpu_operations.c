/*
  cpu_operations.c: each operation on the CPU, over the same arguments and the same workspace as on the GPU. Arguments are
  checked before, in operations.c.
*/
#include "internal.h"

static uint32_t moer_cpu_num_valid(moe_route_address num_valid_tokens, uint32_t num_tokens) {
    int32_t valid;
    if (num_valid_tokens == 0) return num_tokens;
    memcpy(&valid, moer_host(num_valid_tokens), sizeof valid);
    return valid < 0 ? 0 : (uint32_t)valid < num_tokens ? (uint32_t)valid : num_tokens;
}

static void moer_cpu_route(const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing) {
    const uint32_t num_valid = moer_cpu_num_valid(routing->num_valid_tokens, num_tokens);
    if (routing->logits != 0) moer_cpu_topk(&layer->router, routing, num_tokens, num_valid);
    if (routing->any_map) moer_cpu_maps(&layer->router, (const int32_t *)moer_host(routing->ids), num_tokens, num_valid, &routing->maps);
}

static void moer_cpu_product_begin(moer_cpu_product *product, const moe_route_layer *layer, const moer_matrix *matrix, const moer_routing *routing,
                                   const moer_workspace *w, moe_route_address workspace) {
    memset(product, 0, sizeof *product);
    product->matrix = matrix;
    product->expert_offsets = (const int32_t *)moer_host(routing->maps.expert_offsets);
    product->row_to_pair = (const int32_t *)moer_host(routing->maps.row_to_pair);
    product->num_local_experts = layer->router.num_local_experts;
    product->top_k = layer->router.top_k;
    product->x_dtype = product->out_dtype = layer->dtype;
    product->scratch = (float *)moer_host(workspace + w->scratch);
}

/* The maps are those of moer_routing_layer_maps and the expert offsets. */
static void moer_cpu_experts(const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing, moe_route_address x, moe_route_address y,
                             const moer_workspace *w, moe_route_address workspace) {
    moer_cpu_product product;
    moer_cpu_product_begin(&product, layer, &layer->gate_up, routing, w, workspace);
    product.x = moer_host(x);
    product.gated = layer->interleaved ? 2 : 1;
    product.out = moer_host(workspace + w->h);
    moer_cpu_multiply(&product);

    moer_cpu_product_begin(&product, layer, &layer->down, routing, w, workspace);
    product.x = moer_host(workspace + w->h);
    product.x_index = 2;
    product.out = moer_host(workspace + w->partial);
    product.out_dtype = MOE_ROUTE_F32;
    moer_cpu_multiply(&product);

    moer_cpu_combine(moer_host(workspace + w->partial), MOE_ROUTE_F32, (const int32_t *)moer_host(routing->maps.pair_to_row), (const float *)moer_host(routing->weights),
                     moer_host(y), layer->dtype, num_tokens, layer->router.top_k, layer->hidden_size);
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
