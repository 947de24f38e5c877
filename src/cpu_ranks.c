/*
  cpu_ranks.c: on the CPU, what goes to which rank, and how the rows that come back are numbered. The experts' products
  belong to cpu_experts.c.
*/
#include "internal.h"

/* The rank that holds a physical expert, or num_ranks. */
static uint32_t moer_cpu_rank(const moe_route_layer *layer, uint32_t expert) {
    uint32_t rank = 0;
    if (expert >= layer->rank_begin[layer->num_ranks]) return layer->num_ranks;
    while (layer->rank_begin[rank + 1] <= expert) rank++;
    return rank;
}

/* The rank of slot j of a token. */
static uint32_t moer_cpu_slot_rank(const moe_route_layer *layer, const int32_t *ids, uint32_t token, uint32_t j) {
    return moer_cpu_rank(layer, moer_physical_expert(&layer->router, ids[(size_t)token * layer->router.top_k + j], token));
}

/* Whether slot j is the token's first at its rank. */
static int moer_cpu_slot_leads(const moe_route_layer *layer, const int32_t *ids, uint32_t token, uint32_t j) {
    const uint32_t rank = moer_cpu_slot_rank(layer, ids, token, j);
    uint32_t other = 0;
    while (other < j && moer_cpu_slot_rank(layer, ids, token, other) != rank) other++;
    return rank < layer->num_ranks && other == j;
}

/* A row: x, and what each slot of the token has there. */
static void moer_cpu_write_row(const moe_route_layer *layer, const moer_dispatch_args *args, const int32_t *ids, uint32_t token, uint32_t rank, size_t row) {
    const uint32_t top_k = layer->router.top_k;
    const size_t row_bytes = layer->hidden_size * moer_dtype_size(layer->dtype), weight_size = moer_dtype_size(layer->router.weights_dtype);
    uint32_t j;
    if (args->rows != 0) memcpy((char *)moer_host(args->rows) + row * row_bytes, (const char *)moer_host(args->x) + token * row_bytes, row_bytes);
    if (args->row_to_token != 0) ((int32_t *)moer_host(args->row_to_token))[row] = (int32_t)token;
    for (j = 0; j < top_k; j++) {
        const size_t pair = (size_t)token * top_k + j, at = row * top_k + j;
        const uint32_t expert = moer_physical_expert(&layer->router, ids[pair], token);
        const int here = moer_cpu_rank(layer, expert) == rank;
        if (args->row_ids != 0) ((int32_t *)moer_host(args->row_ids))[at] = here ? (int32_t)expert : -1;
        if (args->row_weights == 0) continue;
        if (here) memcpy((char *)moer_host(args->row_weights) + at * weight_size, (const char *)moer_host(args->weights) + pair * weight_size, weight_size);
        else memset((char *)moer_host(args->row_weights) + at * weight_size, 0, weight_size);
    }
}

/* With fixed sizes: the rows of a rank that don't exist. */
static void moer_cpu_clear_rows(const moe_route_layer *layer, const moer_dispatch_args *args, size_t begin, size_t end) {
    const size_t top_k = layer->router.top_k, weight_size = moer_dtype_size(layer->router.weights_dtype);
    size_t row, i;
    for (row = begin; row < end; row++) {
        if (args->row_to_token != 0) ((int32_t *)moer_host(args->row_to_token))[row] = -1;
        if (args->row_weights != 0) memset((char *)moer_host(args->row_weights) + row * top_k * weight_size, 0, top_k * weight_size);
        for (i = 0; i < top_k && args->row_ids != 0; i++) ((int32_t *)moer_host(args->row_ids))[row * top_k + i] = -1;
    }
}

static void moer_cpu_dispatch(const moe_route_layer *layer, const moer_dispatch_args *args) {
    const uint32_t top_k = layer->router.top_k, num_ranks = layer->num_ranks, num_valid = moer_cpu_num_valid(args->num_valid_tokens, args->num_tokens);
    const int32_t *ids = (const int32_t *)moer_host(args->ids);
    int32_t *pair_to_row = (int32_t *)moer_host(args->pair_to_row), *pair_to_slot_row = (int32_t *)moer_host(args->pair_to_slot_row);
    int32_t total[MOER_MAX_RANKS][2], start[MOER_MAX_RANKS + 1][2], next[MOER_MAX_RANKS][2];
    int32_t row_of[MOER_MAX_RANKS]; /* of the token at hand */
    uint32_t t, j, r;
    memset(total, 0, sizeof total);
    for (t = 0; t < num_valid; t++)
        for (j = 0; j < top_k; j++) {
            r = moer_cpu_slot_rank(layer, ids, t, j);
            if (r == num_ranks) continue;
            total[r][1]++;
            total[r][0] += moer_cpu_slot_leads(layer, ids, t, j);
        }
    start[0][0] = start[0][1] = 0;
    for (r = 0; r < num_ranks; r++) {
        start[r + 1][0] = start[r][0] + (args->capacity != 0 ? (int32_t)args->capacity : total[r][0]);
        start[r + 1][1] = start[r][1] + (args->capacity != 0 ? (int32_t)args->slot_capacity : total[r][1]);
    }
    if (args->counts != 0) memcpy(moer_host(args->counts), total, num_ranks * sizeof total[0]);
    if (args->offsets != 0) memcpy(moer_host(args->offsets), start, (num_ranks + 1) * sizeof start[0]);
    memcpy(next, start, num_ranks * sizeof next[0]);
    for (t = 0; t < args->num_tokens; t++)
        for (j = 0; j < top_k; j++) {
            const size_t pair = (size_t)t * top_k + j;
            int32_t row = -1, slot_row = -1;
            r = t < num_valid ? moer_cpu_slot_rank(layer, ids, t, j) : num_ranks;
            if (r < num_ranks) {
                if (moer_cpu_slot_leads(layer, ids, t, j)) {
                    row_of[r] = row = next[r][0] < start[r + 1][0] ? next[r][0] : -1;
                    next[r][0]++;
                    if (row >= 0) moer_cpu_write_row(layer, args, ids, t, r, (size_t)row);
                }
                if (row_of[r] >= 0 && next[r][1] < start[r + 1][1]) slot_row = next[r][1];
                next[r][1]++;
            }
            if (pair_to_row != NULL) pair_to_row[pair] = row;
            if (pair_to_slot_row != NULL) pair_to_slot_row[pair] = slot_row;
        }
    for (r = 0; r < num_ranks && args->capacity != 0; r++)
        if (next[r][0] < start[r + 1][0]) moer_cpu_clear_rows(layer, args, (size_t)next[r][0], (size_t)start[r + 1][0]);
}

static void moer_cpu_slots(const moer_router *router, const moer_slots_args *args) {
    const uint32_t num_pairs = args->num_tokens * router->top_k, num_valid = moer_cpu_num_valid(args->num_valid_tokens, args->num_tokens);
    const int32_t *ids = (const int32_t *)moer_host(args->ids);
    int32_t *pair_to_slot_row = (int32_t *)moer_host(args->pair_to_slot_row);
    uint32_t p, number = 0;
    for (p = 0; p < num_pairs; p++) {
        const uint32_t token = p / router->top_k, source = p / args->source_pairs;
        const int local = token < num_valid && moer_physical_expert(router, ids[p], token) - router->first_expert < router->num_local_experts;
        if (p % args->source_pairs == 0) number = 0;
        pair_to_slot_row[p] = local && number < args->source_rows ? (int32_t)(source * args->source_rows + number) : -1;
        number += local != 0;
    }
}
