/*
  dispatch_large.cu: dispatch.cu's outputs, for batches whose pairs are too many to be counted by every block, in two launches:

  moe_route_dispatch_count    a block counts the rows and slot rows of its share of consecutive tokens, by rank
  moe_route_dispatch_scatter  every block adds up the counts of all shares and so knows where its own rows begin, and writes them

  Both have the same shares. Adding up costs a block shares * NUM_RANKS * 2 loads from L2, all independent; the host keeps them few.
  Grid (of the count: shares along x) and constants: dispatch.h.
*/
#include "device.h"
#include "args.h"
#include "dispatch.h"

KERNEL(moe_route_dispatch_count, THREADS, moer_dispatch_args) {
    SHARED(u32, rank, THREADS);           /* of the chunk's pairs */
    SHARED(u32, counts, NUM_RANKS * 2);
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 i = thread_index(), num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);
    const token_share share = find_share(a, block_index_x(), grid_blocks_x());
    const u32 end = share.end < num_valid ? share.end : num_valid;
    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) counts[r] = 0;
    for (u32 token = share.begin; token < end; token += CHUNK_TOKENS) {
        find_ranks(a, rank, token, end, num_valid);
        if (i < CHUNK_PAIRS && rank[i] != NOWHERE) count_pair(counts, rank[i], leader(rank, i) == i);
    }
    block_barrier();
    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) a.block_counts[(u64)block_index_x() * NUM_RANKS * 2 + r] = (int)counts[r];
}

/* The counts of all shares, and of those before this one: threads of one entry take every WAYS-th share. */
template <class Counts>
DEVICE void add_shares(const moer_dispatch_args &a, Counts &total, Counts &before) {
    constexpr u32 ENTRIES = NUM_RANKS * 2, WAYS = ENTRIES < THREADS ? THREADS / ENTRIES : 1;
    for (u32 r = thread_index(); r < ENTRIES; r += THREADS) total[r] = before[r] = 0;
    block_barrier();
    for (u32 r = thread_index(); r < ENTRIES * WAYS; r += THREADS) {
        u32 all = 0, earlier = 0;
        for (u32 b = r / ENTRIES; b < grid_blocks_y(); b += 8 * WAYS) { /* no branch between the loads: they are under way together */
            u32 count[8];
#pragma unroll
            for (u32 i = 0; i < 8; i++) count[i] = b + i * WAYS < grid_blocks_y() ? load_4(a.block_counts + (u64)(b + i * WAYS) * ENTRIES + r % ENTRIES) : 0;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                all += count[i];
                earlier += b + i * WAYS < block_index_y() ? count[i] : 0;
            }
        }
        shared_atomic_add(total, r % ENTRIES, all);
        shared_atomic_add(before, r % ENTRIES, earlier);
    }
    block_barrier();
}

KERNEL(moe_route_dispatch_scatter, THREADS, moer_dispatch_args) {
    SHARED(u32, rank, THREADS);               /* as in dispatch.cu */
    SHARED(u32, row_of, THREADS);
    SHARED(u32, slot_of, THREADS);
    SHARED(u32, total, NUM_RANKS * 2);
    SHARED(u32, before, NUM_RANKS * 2);
    SHARED(u32, start, NUM_RANKS * 2 + 2);
    wait_for_previous_kernels();
    let_next_kernel_start();
    add_shares(a, total, before);
    send_share(a, find_share(a, block_index_y(), grid_blocks_y()), valid_tokens(a.num_valid_tokens, a.num_tokens), rank, row_of, slot_of, total, before, start);
}
