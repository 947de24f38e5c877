/*
  slots.cu: a slot row for each pair of a local expert, numbered in the order of pairs from the start of its source's rows:
  how the results of tokens that other ranks sent lie, to be sent back. A block goes through the pairs of one source.

  Constants: K, slots a token; FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h. Grid: sources.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"

#define THREADS 512
#define WARPS (THREADS / 32)

KERNEL(moe_route_slots, THREADS, moer_slots_args) {
    SHARED(u32, counts, 2 * WARPS); /* local pairs of each warp, in this step and the one before */
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 lane = lane_index(), num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens), source = block_index_x();
    u32 next = 0, half = 0;
    for (u32 step = 0; step < a.source_pairs; step += THREADS, half ^= 1) {
        const bool exists = step + thread_index() < a.source_pairs;
        const u32 pair = source * a.source_pairs + step + thread_index();
        bool local = false;
        if (exists && pair / K < num_valid) local = physical_expert(a.expert_map, (u32)a.ids[pair], pair / K) - FIRST_EXPERT < LOCAL_EXPERTS;
        const u32 peers = warp_ballot(local);
        if (lane == 0) counts[half * WARPS + warp_index()] = popcount(peers);
        block_barrier(); /* whoever writes this half again has passed the next one, which all reach after reading it */
        u32 number = next + popcount(peers & ((1u << lane) - 1));
        for (u32 w = 0; w < WARPS; w++) {
            const u32 count = counts[half * WARPS + w];
            if (w < warp_index()) number += count;
            next += count;
        }
        if (exists) a.pair_to_slot_row[pair] = local && number < a.source_rows ? (int)(source * a.source_rows + number) : -1;
    }
}
