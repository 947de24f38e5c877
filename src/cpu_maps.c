/*
  cpu_maps.c: the expert maps on the CPU: which physical expert serves a pair, and a stable counting sort of
  the pairs by local expert.
*/
#include "internal.h"

/* The physical expert that serves a token's expert `id`; placement.h says the same. */
static uint32_t moer_physical_expert(const moer_router *router, int32_t id, uint32_t token) {
    const int32_t *replicas = (const int32_t *)moer_host(router->expert_map);
    uint32_t count = 0;
    if (router->expert_map == 0) return (uint32_t)id;
    if ((uint32_t)id >= router->num_experts - router->num_skip_experts - router->num_identity) return 0xffffffffu; /* identity and skip experts are nowhere */
    replicas += (size_t)id * router->expert_map_columns;
    while (count < router->expert_map_columns && replicas[count] >= 0) count++;
    return count != 0 ? (uint32_t)replicas[token % count] : 0xffffffffu;
}

static void moer_cpu_maps(const moer_router *router, const int32_t *ids, uint32_t num_tokens, uint32_t num_valid, const moer_maps_out *maps) {
    const uint32_t num_pairs = num_tokens * router->top_k, num_valid_pairs = num_valid * router->top_k;
    const uint32_t num_local = router->num_local_experts, block = maps->block_size;
    int32_t offset[MOER_MAX_EXPERTS + 1], aligned[MOER_MAX_EXPERTS + 1]; /* first row of each expert; the same, aligned */
    int32_t next[MOER_MAX_EXPERTS];
    int32_t *expert_offsets = (int32_t *)moer_host(maps->expert_offsets), *row_to_pair = (int32_t *)moer_host(maps->row_to_pair);
    int32_t *pair_to_row = (int32_t *)moer_host(maps->pair_to_row), *row_to_expert = (int32_t *)moer_host(maps->row_to_expert);
    int32_t *distinct_experts = (int32_t *)moer_host(maps->distinct_experts), *distinct_offsets = (int32_t *)moer_host(maps->distinct_offsets);
    int32_t *distinct_count = (int32_t *)moer_host(maps->distinct_count), *aligned_row_to_pair = (int32_t *)moer_host(maps->aligned_row_to_pair);
    int32_t *block_to_expert = (int32_t *)moer_host(maps->block_to_expert), *aligned_rows = (int32_t *)moer_host(maps->aligned_rows);
    int64_t *expert_load = (int64_t *)moer_host(maps->expert_load);
    uint32_t e, p, i;
    int32_t distinct = 0;

    memset(next, 0, sizeof next);
    for (p = 0; p < num_valid_pairs; p++) {
        const uint32_t local = moer_physical_expert(router, ids[p], p / router->top_k) - router->first_expert;
        if (local < num_local) next[local]++;
        if (expert_load != NULL && (uint32_t)ids[p] < router->num_experts) expert_load[ids[p]]++;
    }
    offset[0] = aligned[0] = 0;
    for (e = 0; e < num_local; e++) {
        offset[e + 1] = offset[e] + next[e];
        aligned[e + 1] = block != 0 ? aligned[e] + (int32_t)(((uint32_t)next[e] + block - 1) / block * block) : 0;
        if (next[e] != 0) {
            if (distinct_experts != NULL) distinct_experts[distinct] = (int32_t)e;
            if (distinct_offsets != NULL) distinct_offsets[distinct] = offset[e];
            distinct++;
        }
    }
    if (distinct_offsets != NULL) distinct_offsets[distinct] = offset[num_local];
    if (distinct_count != NULL) distinct_count[0] = distinct;
    if (expert_offsets != NULL) memcpy(expert_offsets, offset, (num_local + 1) * sizeof offset[0]);

    if (block != 0) {
        if (aligned_rows != NULL) aligned_rows[0] = aligned[num_local];
        if (aligned_row_to_pair != NULL)
            for (i = 0; i < maps->aligned_capacity; i++) aligned_row_to_pair[i] = (int32_t)num_pairs;
        if (block_to_expert != NULL) {
            for (i = 0; i < maps->aligned_capacity / block; i++) block_to_expert[i] = -1;
            for (e = 0; e < num_local; e++)
                for (i = (uint32_t)aligned[e] / block; i < (uint32_t)aligned[e + 1] / block; i++) block_to_expert[i] = (int32_t)e;
        }
    }
    for (p = (uint32_t)offset[num_local]; p < num_pairs; p++) {
        if (row_to_pair != NULL) row_to_pair[p] = -1;
        if (row_to_expert != NULL) row_to_expert[p] = -1;
    }
    memcpy(next, offset, num_local * sizeof next[0]);
    for (p = 0; p < num_pairs; p++) {
        const uint32_t local = p < num_valid_pairs ? moer_physical_expert(router, ids[p], p / router->top_k) - router->first_expert : num_local;
        int32_t row = -1;
        if (local < num_local) {
            row = next[local]++;
            if (row_to_pair != NULL) row_to_pair[row] = (int32_t)p;
            if (row_to_expert != NULL) row_to_expert[row] = (int32_t)local;
            if (block != 0 && aligned_row_to_pair != NULL) aligned_row_to_pair[aligned[local] + row - offset[local]] = (int32_t)p;
        }
        if (pair_to_row != NULL) pair_to_row[p] = row;
    }
}
