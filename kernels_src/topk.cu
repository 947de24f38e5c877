/*
  topk.cu: the router alone, for any number of tokens: logits [T, E + S] -> ids [T, k], weights [T, k] and [T, S]. A warp
  chooses the experts of a token, eight a block; then as few warps as have lanes for all slots weigh them. Constants: those of select.h.
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
    const u32 warp = warp_index(), first = block_index_x() * WARPS, token = first + warp;
    const u32 here = a.num_tokens - first < WARPS ? a.num_tokens - first : WARPS; /* tokens of the block */
    u32 key[EXPERTS_PER_LANE];
    const int num_valid = load_valid_tokens(a.num_valid_tokens, a.num_tokens);
    selection chosen = {};
    if (warp < here) {
        load_keys(a, token, key);
        if ((int)token < num_valid) chosen = choose_experts<false>(a, token, key, words, warp * SELECT_WORDS);
    }
#if LEFT
    block_barrier();
#endif
    const u32 done = warp * TOKENS_A_WARP;
    if (done < here) write_tokens(a, first + done, here - done, num_valid, words, done * SELECT_WORDS, SELECT_WORDS, chosen);
}
