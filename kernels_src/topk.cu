/*
  topk.cu: the router alone, for any number of tokens: logits [T, E + S] -> ids [T, k], weights [T, k] and [T, S]. A warp a
  token, eight a block. Constants: those of select.h.
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
    route_token(a, token, token < valid_tokens(a.num_valid_tokens, a.num_tokens));
}
