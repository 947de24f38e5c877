/*
  topk.cu: the router alone, for any number of tokens: logits [T, E] -> ids [T, k], weights [T, k]. A warp a token, eight
  a block. Constants: those of select.h.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "scores.h"
#include "select.h"

KERNEL(moe_route_topk, 256, moer_route_args) {
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 token = block_index_x() * (block_threads() / 32) + warp_index();
    if (token >= a.num_tokens) return;
    const bool valid = token < valid_tokens(a.num_valid_tokens, a.num_tokens);
    selection chosen = {};
    if (valid) chosen = select_experts(a, token);
#pragma unroll
    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
        const u32 slot = s * 32 + lane_index();
        if (slot < K) {
            a.ids[(u64)token * K + slot] = valid ? (int)chosen.id[s] : -1;
            if (a.weights) a.weights[(u64)token * K + slot] = valid ? chosen.weight[s] : 0.0f;
        }
    }
}
