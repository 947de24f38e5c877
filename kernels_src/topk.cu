/*
  topk.cu: the router alone, for any number of tokens: logits [T, E + S] -> ids [T, k], weights [T, k] and [T, S]. A warp a
  token, eight a block. Constants: those of select.h.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "scores.h"
#include "select.h"

#define WARPS 8

KERNEL(moe_route_topk, WARPS * 32, moer_route_args) {
    SHARED(u32, words, WARPS * SELECT_WORDS);
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 token = block_index_x() * WARPS + warp_index();
    if (token >= a.num_tokens) return;
    u32 key[EXPERTS_PER_LANE];
    load_keys(a, token, key);
    const bool valid = token < valid_tokens(a.num_valid_tokens, a.num_tokens);
    selection chosen = {};
    if (valid) chosen = choose_experts<false>(a, token, key, words, warp_index() * SELECT_WORDS);
    warp_barrier();
    if (valid) put_in_slots(words, warp_index() * SELECT_WORDS, chosen);
    write_token(a, token, valid, chosen);
}
