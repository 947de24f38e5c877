/*
  routing.h: runs the router and the maps on a test device and brings every output back, and says in the plainest way what
  they ought to be. Shared by the tests that need ids or maps; include test.h and device.h first.
*/
#ifndef TEST_ROUTING_H
#define TEST_ROUTING_H

#include "../../examples/quantize.h"

/* ---- what a router ought to give, in f64 ---- */

/* A NaN counts as -inf. */
TEST_FUNCTION double routing_clean(float value) { return value == value ? (double)value : -HUGE_VAL; }

typedef struct routing_expectation {
    int32_t ids[MOER_MAX_TOP_K];
    double weights[MOER_MAX_TOP_K];
    double gap; /* least distance between the selection scores of the last expert chosen and the first one not chosen */
} routing_expectation;

/* The router of one token. `bias` may be NULL. */
TEST_FUNCTION void routing_expect(const moe_route_router *router, const float *logits, const float *bias, routing_expectation *expected) {
    static double score[MOER_MAX_EXPERTS], order[MOER_MAX_EXPERTS];
    static unsigned char taken[MOER_MAX_EXPERTS];
    const uint32_t num_experts = router->num_experts, top_k = router->top_k;
    double largest = -HUGE_VAL, sum = 0, best;
    uint32_t e, j, infinite = 0;
    for (e = 0; e < num_experts; e++) {
        const double logit = routing_clean(logits[e]);
        if (logit > largest) largest = logit;
        if (logit == HUGE_VAL) infinite++;
    }
    for (e = 0; e < num_experts; e++) {
        const double logit = routing_clean(logits[e]);
        if (router->score == MOE_ROUTE_SCORE_SIGMOID) score[e] = logit < -88.8 ? 0 : 1 / (1 + exp(-logit)); /* exp(-l) is +inf in f32 */
        else if (largest == -HUGE_VAL) score[e] = 0;
        else if (infinite) score[e] = logit == HUGE_VAL ? 1 : 0;
        else score[e] = exp(logit - largest);
        sum += score[e];
        taken[e] = 0;
    }
    for (e = 0; e < num_experts; e++) {
        if (router->score == MOE_ROUTE_SCORE_SOFTMAX && sum > 0) score[e] /= sum;
        order[e] = bias ? routing_clean((float)(score[e] + routing_clean(bias[e]))) : routing_clean(logits[e]);
        if (bias && routing_clean(bias[e]) != -HUGE_VAL) order[e] = score[e] + (double)bias[e];
    }
    for (j = 0; j <= top_k; j++) {
        uint32_t chosen = num_experts;
        best = -HUGE_VAL;
        for (e = 0; e < num_experts; e++)
            if (!taken[e] && (chosen == num_experts || order[e] > best)) {
                chosen = e;
                best = order[e];
            }
        if (j == top_k) {
            expected->gap = chosen == num_experts ? HUGE_VAL : order[expected->ids[top_k - 1]] - best;
            break;
        }
        taken[chosen] = 1;
        expected->ids[j] = (int32_t)chosen;
        expected->weights[j] = best == -HUGE_VAL ? 0 : score[chosen];
    }
    if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED) {
        double top = -HUGE_VAL;
        for (j = 0; j < top_k; j++)
            if (order[expected->ids[j]] != -HUGE_VAL && routing_clean(logits[expected->ids[j]]) > top) top = routing_clean(logits[expected->ids[j]]);
        sum = 0;
        for (j = 0; j < top_k; j++) {
            const double logit = routing_clean(logits[expected->ids[j]]);
            expected->weights[j] = order[expected->ids[j]] == -HUGE_VAL || logit == -HUGE_VAL ? 0 : logit == top ? 1 : exp(logit - top);
            sum += expected->weights[j];
        }
        for (j = 0; j < top_k; j++) expected->weights[j] = sum > 0 ? expected->weights[j] / sum : 0;
    }
    if (router->renormalize == MOE_ROUTE_RENORMALIZE_SUM) {
        sum = (double)router->renormalize_epsilon;
        for (j = 0; j < top_k; j++) sum += expected->weights[j];
        for (j = 0; j < top_k; j++) expected->weights[j] = sum > 0 ? expected->weights[j] / sum : 0;
    }
    for (j = 0; j < top_k; j++) expected->weights[j] *= router->scale != 0 ? (double)router->scale : 1.0;
}

/* ---- outputs of router and maps, on the host ---- */

typedef struct routing_output {
    uint32_t num_pairs, num_local, distinct_capacity, aligned_capacity, num_blocks;
    int32_t *ids;
    float *weights;
    int32_t *expert_offsets, *row_to_pair, *pair_to_row, *row_to_expert, *distinct_experts, *distinct_offsets, *aligned_row_to_pair, *block_to_expert;
    int32_t distinct_count, aligned_rows;
} routing_output;

TEST_FUNCTION void routing_output_free(routing_output *output) {
    free(output->ids);
    free(output->weights);
    free(output->expert_offsets);
    free(output->row_to_pair);
    free(output->pair_to_row);
    free(output->row_to_expert);
    free(output->distinct_experts);
    free(output->distinct_offsets);
    free(output->aligned_row_to_pair);
    free(output->block_to_expert);
    memset(output, 0, sizeof *output);
}

TEST_FUNCTION void *routing_fetch(test_device *device, device_buffer *buffer) {
    void *memory = malloc(buffer->size ? buffer->size : 1);
    if (!memory) device_die("out of memory");
    device_download(device, memory, buffer, buffer->size);
    device_destroy(device, buffer);
    return memory;
}

typedef struct routing_input {
    uint32_t num_tokens;
    const void *logits;   /* NULL: ids are given */
    size_t logits_size;
    const int32_t *ids;
    const int32_t *num_valid; /* NULL: all */
    uint32_t block_size;
    int maps;             /* 0: the router alone */
} routing_input;

/* Runs moe_route_route or moe_route_maps with every output, each in a buffer of exactly its size. */
TEST_FUNCTION moe_route_status routing_run(test_device *device, const moe_route_layer *layer, const moe_route_router *router, uint32_t num_local, const routing_input *input,
                                           routing_output *output) {
    moe_route_route_args route;
    moe_route_maps_args given;
    moe_route_expert_maps *maps = &route.maps;
    moe_route_status status;
    device_buffer logits, ids, weights, valid, workspace, b[10];
    int32_t *fetched;
    size_t workspace_size = 0;
    memset(&route, 0, sizeof route);
    memset(&given, 0, sizeof given);
    memset(output, 0, sizeof *output);
    memset(&logits, 0, sizeof logits);
    memset(&weights, 0, sizeof weights);
    memset(&valid, 0, sizeof valid);
    memset(b, 0, sizeof b);
    output->num_pairs = input->num_tokens * router->top_k;
    output->num_local = num_local;
    output->distinct_capacity = output->num_pairs < num_local ? output->num_pairs : num_local;
    output->aligned_capacity = (uint32_t)moe_route_aligned_capacity(layer, input->num_tokens, input->block_size);
    output->num_blocks = input->block_size ? output->aligned_capacity / input->block_size : 0;
    if (input->logits) {
        logits = device_create_from(device, input->logits, input->logits_size);
        ids = device_create(device, output->num_pairs * sizeof(int32_t));
        weights = device_create(device, output->num_pairs * sizeof(float));
    } else {
        ids = device_create_from(device, input->ids, output->num_pairs * sizeof(int32_t));
    }
    if (input->num_valid) valid = device_create_from(device, input->num_valid, sizeof(int32_t));
    moe_route_layer_workspace_size(layer, input->num_tokens, &workspace_size);
    workspace = device_create_workspace(device, workspace_size);
    if (input->maps) {
        b[0] = device_create(device, ((size_t)num_local + 1) * 4);
        b[1] = device_create(device, (size_t)output->num_pairs * 4);
        b[2] = device_create(device, (size_t)output->num_pairs * 4);
        b[3] = device_create(device, (size_t)output->num_pairs * 4);
        b[4] = device_create(device, (size_t)output->distinct_capacity * 4);
        b[5] = device_create(device, ((size_t)output->distinct_capacity + 1) * 4);
        b[6] = device_create(device, 4);
        maps->expert_offsets = b[0].address;
        maps->row_to_pair = b[1].address;
        maps->pair_to_row = b[2].address;
        maps->row_to_expert = b[3].address;
        maps->distinct_experts = b[4].address;
        maps->distinct_offsets = b[5].address;
        maps->distinct_count = b[6].address;
        if (input->block_size) {
            b[7] = device_create(device, (size_t)output->aligned_capacity * 4);
            b[8] = device_create(device, (size_t)output->num_blocks * 4);
            b[9] = device_create(device, 4);
            maps->block_size = input->block_size;
            maps->aligned_row_to_pair = b[7].address;
            maps->block_to_expert = b[8].address;
            maps->aligned_rows = b[9].address;
        }
    }
    route.num_tokens = given.num_tokens = input->num_tokens;
    route.logits = logits.address;
    route.ids = given.ids = ids.address;
    route.weights = weights.address;
    given.maps = route.maps;
    route.num_valid_tokens = given.num_valid_tokens = valid.address;
    route.workspace = given.workspace = workspace.address;
    route.workspace_size = given.workspace_size = workspace_size;
    route.stream = given.stream = device->stream;
    status = input->logits ? moe_route_route(layer, &route) : moe_route_maps(layer, &given);
    device_synchronize(device);
    output->ids = (int32_t *)routing_fetch(device, &ids);
    if (input->logits) output->weights = (float *)routing_fetch(device, &weights);
    if (input->maps) {
        output->expert_offsets = (int32_t *)routing_fetch(device, &b[0]);
        output->row_to_pair = (int32_t *)routing_fetch(device, &b[1]);
        output->pair_to_row = (int32_t *)routing_fetch(device, &b[2]);
        output->row_to_expert = (int32_t *)routing_fetch(device, &b[3]);
        output->distinct_experts = (int32_t *)routing_fetch(device, &b[4]);
        output->distinct_offsets = (int32_t *)routing_fetch(device, &b[5]);
        fetched = (int32_t *)routing_fetch(device, &b[6]);
        output->distinct_count = fetched[0];
        free(fetched);
        if (input->block_size) {
            output->aligned_row_to_pair = (int32_t *)routing_fetch(device, &b[7]);
            output->block_to_expert = (int32_t *)routing_fetch(device, &b[8]);
            fetched = (int32_t *)routing_fetch(device, &b[9]);
            output->aligned_rows = fetched[0];
            free(fetched);
        }
    }
    if (input->logits) device_destroy(device, &logits);
    if (input->num_valid) device_destroy(device, &valid);
    device_destroy(device, &workspace);
    return status;
}

/* Holds every map against its definition, for the output's own ids. */
TEST_FUNCTION void routing_check_maps(const routing_output *output, uint32_t first_expert, uint32_t num_valid_pairs, uint32_t block_size, const char *what) {
    const uint32_t num_pairs = output->num_pairs, num_local = output->num_local;
    uint32_t e, p, row = 0, aligned = 0, distinct = 0;
    for (e = 0; e < num_local; e++) {
        const uint32_t first = row;
        if (!CHECK(output->expert_offsets[e] == (int32_t)row, "%s: expert_offsets[%u] is %d instead of %u", what, e, output->expert_offsets[e], row)) return;
        for (p = 0; p < num_valid_pairs; p++) {
            if ((uint32_t)output->ids[p] - first_expert != e || output->ids[p] < (int32_t)first_expert) continue;
            if (!CHECK(output->row_to_pair[row] == (int32_t)p, "%s: row_to_pair[%u] is %d instead of %u", what, row, output->row_to_pair[row], p)) return;
            if (!CHECK(output->pair_to_row[p] == (int32_t)row, "%s: pair_to_row[%u] is %d instead of %u", what, p, output->pair_to_row[p], row)) return;
            if (!CHECK(output->row_to_expert[row] == (int32_t)e, "%s: row_to_expert[%u] is %d instead of %u", what, row, output->row_to_expert[row], e)) return;
            if (block_size && !CHECK(output->aligned_row_to_pair[aligned + row - first] == (int32_t)p, "%s: aligned_row_to_pair[%u] is %d instead of %u", what, aligned + row - first,
                                     output->aligned_row_to_pair[aligned + row - first], p))
                return;
            row++;
        }
        if (row != first) {
            if (!CHECK(output->distinct_experts[distinct] == (int32_t)e && output->distinct_offsets[distinct] == (int32_t)first, "%s: distinct expert %u is %d from row %d instead of %u from %u", what,
                       distinct, output->distinct_experts[distinct], output->distinct_offsets[distinct], e, first))
                return;
            distinct++;
        }
        if (block_size) {
            const uint32_t end = aligned + (row - first + block_size - 1) / block_size * block_size;
            uint32_t i;
            for (i = aligned + row - first; i < end; i++)
                if (!CHECK(output->aligned_row_to_pair[i] == (int32_t)num_pairs, "%s: aligned_row_to_pair[%u] is %d in padding", what, i, output->aligned_row_to_pair[i])) return;
            for (i = aligned / block_size; i < end / block_size; i++)
                if (!CHECK(output->block_to_expert[i] == (int32_t)e, "%s: block_to_expert[%u] is %d instead of %u", what, i, output->block_to_expert[i], e)) return;
            aligned = end;
        }
    }
    CHECK(output->expert_offsets[num_local] == (int32_t)row, "%s: expert_offsets ends with %d instead of %u", what, output->expert_offsets[num_local], row);
    CHECK(output->distinct_count == (int32_t)distinct, "%s: distinct_count is %d instead of %u", what, output->distinct_count, distinct);
    CHECK(output->distinct_offsets[distinct] == (int32_t)row, "%s: distinct_offsets ends with %d instead of %u", what, output->distinct_offsets[distinct], row);
    for (p = row; p < num_pairs; p++)
        if (!CHECK(output->row_to_pair[p] == -1 && output->row_to_expert[p] == -1, "%s: row %u doesn't exist but has pair %d, expert %d", what, p, output->row_to_pair[p], output->row_to_expert[p])) return;
    for (p = 0; p < num_pairs; p++) {
        const int local = p < num_valid_pairs && output->ids[p] >= (int32_t)first_expert && (uint32_t)output->ids[p] - first_expert < num_local;
        if (!CHECK(local || output->pair_to_row[p] == -1, "%s: pair_to_row[%u] is %d for an expert that isn't local", what, p, output->pair_to_row[p])) return;
    }
    if (!block_size) return;
    CHECK(output->aligned_rows == (int32_t)aligned, "%s: aligned_rows is %d instead of %u", what, output->aligned_rows, aligned);
    for (p = aligned; p < output->aligned_capacity; p++)
        if (!CHECK(output->aligned_row_to_pair[p] == (int32_t)num_pairs, "%s: aligned_row_to_pair[%u] is %d past the end", what, p, output->aligned_row_to_pair[p])) return;
    for (p = aligned / block_size; p < output->num_blocks; p++)
        if (!CHECK(output->block_to_expert[p] == -1, "%s: block_to_expert[%u] is %d past the end", what, p, output->block_to_expert[p])) return;
}

#endif /* TEST_ROUTING_H */
