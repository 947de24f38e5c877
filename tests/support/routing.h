/*
  routing.h: runs the router and the maps on a test device and brings every output back, and says in the plainest way what
  the maps ought to be (router.h says it of the router). Include test.h, device.h and router.h first.
*/
#ifndef TEST_ROUTING_H
#define TEST_ROUTING_H

#include "../../examples/quantize.h"

TEST_FUNCTION quantize_dtype routing_storage(moe_route_dtype dtype) { return dtype == MOE_ROUTE_F16 ? QUANTIZE_F16 : dtype == MOE_ROUTE_BF16 ? QUANTIZE_BF16 : QUANTIZE_F32; }

/* ---- outputs of router and maps, on the host ---- */

typedef struct routing_output {
    uint32_t num_pairs, num_local, distinct_capacity, aligned_capacity, num_blocks;
    int32_t *ids;
    void *stored_weights, *stored_shared; /* as the device wrote them, of weights_size bytes each */
    float *weights, *shared;              /* what they mean; NULL where ids were given without logits */
    size_t weights_size, shared_size;
    int64_t *expert_load;
    int32_t *placed; /* [num_pairs] physical expert of each pair, where a test has an expert map; NULL: the ids */
    int32_t *expert_offsets, *row_to_pair, *pair_to_row, *row_to_expert, *distinct_experts, *distinct_offsets, *aligned_row_to_pair, *block_to_expert;
    int32_t distinct_count, aligned_rows;
} routing_output;

TEST_FUNCTION void routing_output_free(routing_output *output) {
    free(output->ids);
    free(output->stored_weights);
    free(output->stored_shared);
    free(output->weights);
    free(output->shared);
    free(output->expert_load);
    free(output->placed);
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
    const void *logits;   /* NULL: the maps of given ids alone */
    size_t logits_size;
    const int32_t *ids;       /* without logits, and where the router takes given ids */
    const int32_t *token_ids; /* where it takes them from a table */
    const int64_t *expert_load; /* [E] to begin with; NULL: not wanted */
    const int32_t *num_valid; /* NULL: all */
    uint32_t block_size;
    int maps;             /* 0: the router alone */
} routing_input;

typedef struct routing_call { /* a run whose outputs are still on the device */
    device_buffer logits, ids, weights, shared, token_ids, load, valid, workspace, b[10];
} routing_call;

/* Starts moe_route_route or moe_route_maps with every output, each in a buffer of exactly its size. */
TEST_FUNCTION moe_route_status routing_start(test_device *device, const moe_route_layer *layer, const moe_route_router *router, uint32_t num_local, const routing_input *input,
                                             routing_call *call, routing_output *output) {
    moe_route_route_args route;
    moe_route_maps_args given;
    moe_route_expert_maps *maps = &route.maps;
    device_buffer *b = call->b;
    const size_t weight_size = quantize_dtype_size(routing_storage(router->weights_dtype));
    size_t workspace_size = 0;
    memset(&route, 0, sizeof route);
    memset(&given, 0, sizeof given);
    memset(output, 0, sizeof *output);
    memset(call, 0, sizeof *call);
    output->num_pairs = input->num_tokens * router->top_k;
    output->num_local = num_local;
    output->distinct_capacity = output->num_pairs < num_local ? output->num_pairs : num_local;
    output->aligned_capacity = (uint32_t)moe_route_aligned_capacity(layer, input->num_tokens, input->block_size);
    output->num_blocks = input->block_size ? output->aligned_capacity / input->block_size : 0;
    if (input->logits) {
        call->logits = device_create_from(device, input->logits, input->logits_size);
        call->ids = device_create(device, output->num_pairs * sizeof(int32_t));
        if (input->ids) device_upload(device, &call->ids, input->ids, call->ids.size);
        call->weights = device_create(device, output->num_pairs * weight_size);
        call->shared = device_create(device, (size_t)input->num_tokens * router->num_shared_experts * weight_size);
        if (input->token_ids) call->token_ids = device_create_from(device, input->token_ids, input->num_tokens * sizeof(int32_t));
    } else {
        call->ids = device_create_from(device, input->ids, output->num_pairs * sizeof(int32_t));
    }
    if (input->expert_load) {
        call->load = device_create_from(device, input->expert_load, router->num_experts * sizeof(int64_t));
        maps->expert_load = call->load.address;
    }
    if (input->num_valid) call->valid = device_create_from(device, input->num_valid, sizeof(int32_t));
    moe_route_layer_workspace_size(layer, input->num_tokens, &workspace_size);
    call->workspace = device_create_workspace(device, workspace_size);
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
    route.logits = call->logits.address;
    route.ids = given.ids = call->ids.address;
    route.weights = call->weights.address;
    route.shared_weights = router->num_shared_experts ? call->shared.address : 0;
    route.token_ids = call->token_ids.address;
    given.maps = route.maps;
    route.num_valid_tokens = given.num_valid_tokens = call->valid.address;
    route.workspace = given.workspace = call->workspace.address;
    route.workspace_size = given.workspace_size = workspace_size;
    route.stream = given.stream = device->stream;
    return input->logits ? moe_route_route(layer, &route) : moe_route_maps(layer, &given);
}

/* Waits for it and brings the outputs back. */
TEST_FUNCTION void routing_finish(test_device *device, const moe_route_router *router, const routing_input *input, routing_call *call, routing_output *output) {
    device_buffer *b = call->b;
    int32_t *fetched;
    device_synchronize(device);
    output->ids = (int32_t *)routing_fetch(device, &call->ids);
    if (input->logits) {
        const size_t num_shared = (size_t)input->num_tokens * router->num_shared_experts;
        output->weights_size = call->weights.size;
        output->shared_size = call->shared.size;
        output->stored_weights = routing_fetch(device, &call->weights);
        output->stored_shared = routing_fetch(device, &call->shared);
        output->weights = (float *)malloc(output->num_pairs * sizeof(float) + 1);
        output->shared = (float *)malloc(num_shared * sizeof(float) + 1);
        quantize_convert(output->weights, QUANTIZE_F32, output->stored_weights, routing_storage(router->weights_dtype), output->num_pairs);
        quantize_convert(output->shared, QUANTIZE_F32, output->stored_shared, routing_storage(router->weights_dtype), num_shared);
    }
    if (input->expert_load) output->expert_load = (int64_t *)routing_fetch(device, &call->load);
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
    if (input->logits) device_destroy(device, &call->logits);
    if (input->token_ids) device_destroy(device, &call->token_ids);
    if (input->num_valid) device_destroy(device, &call->valid);
    device_destroy(device, &call->workspace);
}

TEST_FUNCTION moe_route_status routing_run(test_device *device, const moe_route_layer *layer, const moe_route_router *router, uint32_t num_local, const routing_input *input,
                                           routing_output *output) {
    routing_call call;
    const moe_route_status status = routing_start(device, layer, router, num_local, input, &call, output);
    routing_finish(device, router, input, &call, output);
    return status;
}

/* Holds every map against its definition, for the output's own ids. */
TEST_FUNCTION void routing_check_maps(const routing_output *output, uint32_t first_expert, uint32_t num_valid_pairs, uint32_t block_size, const char *what) {
    const int32_t *experts = output->placed ? output->placed : output->ids;
    const uint32_t num_pairs = output->num_pairs, num_local = output->num_local;
    uint32_t e, p, row = 0, aligned = 0, distinct = 0;
    for (e = 0; e < num_local; e++) {
        const uint32_t first = row;
        if (!CHECK(output->expert_offsets[e] == (int32_t)row, "%s: expert_offsets[%u] is %d instead of %u", what, e, output->expert_offsets[e], row)) return;
        for (p = 0; p < num_valid_pairs; p++) {
            if ((uint32_t)experts[p] - first_expert != e || experts[p] < (int32_t)first_expert) continue;
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
        const int local = p < num_valid_pairs && experts[p] >= (int32_t)first_expert && (uint32_t)experts[p] - first_expert < num_local;
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
