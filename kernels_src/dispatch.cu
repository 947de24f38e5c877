/*
  dispatch.cu: what each of NUM_RANKS ranks gets of a batch: a token is a row of every rank that has an expert of it, once;
  a slot that such a rank serves is a slot row. Rows of a rank are in the order of tokens, its slot rows in that of pairs.

  One launch, for batches up to a few thousand pairs. A block counts all pairs, to know where its own begin: reading the ids again costs
  less than a second launch, or waiting for other blocks. Larger ones are dispatch_large.cu's. Grid and constants: dispatch.h.
*/
#include "device.h"
#include "args.h"
#include "dispatch.h"

KERNEL(moe_route_dispatch, THREADS, moer_dispatch_args) {
    SHARED(u32, rank, THREADS);               /* of the chunk's pairs */
    SHARED(u32, row_of, THREADS);             /* likewise, for the first slot of a token at a rank */
    SHARED(u32, slot_of, THREADS);
    SHARED(u32, total, NUM_RANKS * 2);        /* rows and slot rows of each rank */
    SHARED(u32, before, NUM_RANKS * 2);       /* those of tokens before the block's */
    SHARED(u32, start, NUM_RANKS * 2 + 2);    /* where they begin */
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 i = thread_index(), num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);
    const token_share share = find_share(a, block_index_y(), grid_blocks_y());
    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) total[r] = before[r] = 0;
    for (u32 token = 0; token < num_valid; token += CHUNK_TOKENS) {
        find_ranks(a, rank, token, num_valid, num_valid);
        if (i >= CHUNK_PAIRS || rank[i] == NOWHERE) continue;
        const bool leads = leader(rank, i) == i;
        count_pair(total, rank[i], leads);
        if (token + i / K < share.begin) count_pair(before, rank[i], leads);
    }
    block_barrier();
    send_share(a, share, num_valid, rank, row_of, slot_of, total, before, start);
}
