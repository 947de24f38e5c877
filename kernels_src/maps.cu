/*
  maps.cu: the expert maps of any number of pairs: a stable counting sort by expert in two launches, or one where there is one share.

  moe_route_maps_count    a block counts the experts of its share of consecutive pairs
  moe_route_maps_scatter  every block adds up the counts of all shares and so knows where its own pairs of each expert begin; then its
                          warps, which share its pairs in order, give each pair its row. What has an entry per expert is written by the first.
                          One share alone needs no count before.

  Adding up in every block costs shares * E loads from L2, all independent, and saves a launch and a second trip through memory; shares
  are few (at most 128) for that. Order within a warp's 32 pairs comes from match and popcount, between them from the warp's cursors, between warps from
  their counts: the result is the same each time. Atomic are only counts. Small batches don't come here: route.cu sorts
  them in the router's launch.

  Constants: E, K (slots a token), FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h. Pairs whose expert isn't local have no row.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"

#define SORT_THREADS 256
#include "sort.h"

#define SCAN_WARPS (SORT_THREADS / 32)
/* Warps that have cursors: as many as shared memory has room for. */
#define SORT_WARPS (LOCAL_EXPERTS <= 512 ? 8 : LOCAL_EXPERTS <= 1024 ? 4 : 2)
/* Experts that a thread adds up, consecutive ones. */
#define THREAD_EXPERTS ((LOCAL_EXPERTS + SORT_THREADS - 1) / SORT_THREADS)

/* Pairs of a warp's part of a share; a share has SORT_WARPS of them. */
DEVICE u32 part_size(const moer_maps_args &a) { return ((a.num_pairs + a.num_blocks - 1) / a.num_blocks + 32 * SORT_WARPS - 1) / (32 * SORT_WARPS) * 32; }

KERNEL(moe_route_maps_count, SORT_THREADS, moer_maps_args) {
    SHARED(u32, counts, LOCAL_EXPERTS);
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 share = part_size(a) * SORT_WARPS;
    count_share(a, counts, (u64)block_index_x() * share, share);
}

/* Sums over the threads before this one; total: over all. */
template <class Words>
DEVICE sums scan_block(Words &warp_sums, const sums &own, sums &total) {
    const u32 lane = lane_index(), warp = warp_index();
    sums s = own;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 rows = warp_shuffle_up(s.rows, delta), distinct = warp_shuffle_up(s.distinct, delta), aligned = warp_shuffle_up(s.aligned, delta);
        if (lane < delta) continue;
        s.rows += rows;
        s.distinct += distinct;
        s.aligned += aligned;
    }
    if (lane == 31) {
        warp_sums[warp] = s.rows;
        warp_sums[SCAN_WARPS + warp] = s.distinct;
        warp_sums[SCAN_WARPS * 2 + warp] = s.aligned;
    }
    block_barrier();
    s.rows -= own.rows;
    s.distinct -= own.distinct;
    s.aligned -= own.aligned;
    total.rows = total.distinct = total.aligned = 0;
    for (u32 w = 0; w < SCAN_WARPS; w++) {
        const u32 rows = warp_sums[w], distinct = warp_sums[SCAN_WARPS + w], aligned = warp_sums[SCAN_WARPS * 2 + w];
        if (w < warp) {
            s.rows += rows;
            s.distinct += distinct;
            s.aligned += aligned;
        }
        total.rows += rows;
        total.distinct += distinct;
        total.aligned += aligned;
    }
    return s;
}

/* Advances the warp's cursors by 32 pairs; returns the cursor of the lane's expert before them plus its rank among them. */
template <class Cursors>
DEVICE u32 take_row(Cursors &cursors, u32 expert) {
    const u32 peers = warp_match(expert), lane = lane_index(), at = warp_index() * LOCAL_EXPERTS + expert;
    u32 row = 0;
    if (expert != NOT_LOCAL) row = cursors[at] + popcount(peers & ((1u << lane) - 1));
    warp_barrier();
    if (expert != NOT_LOCAL && (peers >> lane) == 1u) cursors[at] = row + 1; /* the last of its peers */
    warp_barrier();
    return row;
}

KERNEL(moe_route_maps_scatter, SORT_THREADS, moer_maps_args) {
    SHARED(u32, starts, LOCAL_EXPERTS + 1);  /* first row of each expert */
    SHARED(u32, aligned, LOCAL_EXPERTS + 1); /* likewise among the aligned rows */
    SHARED(u32, cursors, SORT_WARPS * LOCAL_EXPERTS);
    SHARED(u32, warp_sums, SCAN_WARPS * 3);
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 thread = thread_index(), block = block_index_x(), lane = lane_index(), warp = warp_index();
    const u32 num_valid = valid_pairs(a), part = part_size(a), first = thread * THREAD_EXPERTS;
    const u64 begin = ((u64)block * SORT_WARPS + warp) * part;

    /* Pairs of each warp's part. */
    for (u32 i = thread; i < SORT_WARPS * LOCAL_EXPERTS; i += SORT_THREADS) cursors[i] = 0;
    block_barrier();
    if (warp < SORT_WARPS)
        for (u32 i = lane; i < part && begin + i < num_valid; i += 32) {
            const u32 expert = local_expert(a, begin + i, num_valid);
            if (expert != NOT_LOCAL) shared_atomic_add(cursors, warp * LOCAL_EXPERTS + expert, 1);
            if (a.num_blocks == 1) add_load(a, begin + i);
        }
    if (a.num_blocks == 1) block_barrier();

    /* All pairs of the thread's experts, and those of the shares before this one. */
    u32 count[THREAD_EXPERTS], before[THREAD_EXPERTS];
    sums own = {0, 0, 0}, total;
#pragma unroll
    for (u32 i = 0; i < THREAD_EXPERTS; i++) {
        count[i] = before[i] = 0;
        if (first + i >= LOCAL_EXPERTS) continue;
        const int *counts = a.block_counts + first + i;
        for (u32 w = 0; w < SORT_WARPS && a.num_blocks == 1; w++) count[i] += cursors[w * LOCAL_EXPERTS + first + i];
#pragma unroll 16
        for (u32 b = 0; b < a.num_blocks && a.num_blocks != 1; b++) {
            const u32 c = load_4(counts + (u64)b * LOCAL_EXPERTS);
            count[i] += c;
            before[i] += b < block ? c : 0;
        }
        own.rows += count[i];
        own.distinct += count[i] != 0;
        own.aligned += align_rows(a, count[i]);
    }
    sums at = scan_block(warp_sums, own, total); /* its barrier is also between the parts' counts and their cursors */
#pragma unroll
    for (u32 i = 0; i < THREAD_EXPERTS; i++) {
        const u32 e = first + i;
        if (e >= LOCAL_EXPERTS) break;
        u32 row = at.rows + before[i];
        for (u32 w = 0; w < SORT_WARPS; w++) {
            const u32 pairs = cursors[w * LOCAL_EXPERTS + e];
            cursors[w * LOCAL_EXPERTS + e] = row;
            row += pairs;
        }
        place_expert(a, starts, aligned, e, count[i], at);
    }
    if (thread == 0) place_end(a, starts, aligned, total);
    block_barrier();

    for (u32 i = 0; warp < SORT_WARPS && i < part; i += 32) {
        const u64 position = begin + i + lane;
        const bool exists = position < a.num_pairs;
        const u32 pair = (u32)position, expert = local_expert(a, position, num_valid), row = take_row(cursors, expert);
        if (expert != NOT_LOCAL) {
            if (a.maps.row_to_pair) a.maps.row_to_pair[row] = (int)pair;
            if (a.maps.row_to_expert) a.maps.row_to_expert[row] = (int)expert;
            if (a.maps.aligned_row_to_pair) a.maps.aligned_row_to_pair[aligned[expert] + (row - starts[expert])] = (int)pair;
        }
        if (exists) {
            if (a.maps.pair_to_row) a.maps.pair_to_row[pair] = expert != NOT_LOCAL ? (int)row : -1;
            if (pair >= total.rows) { /* the row of this number doesn't exist */
                if (a.maps.row_to_pair) a.maps.row_to_pair[pair] = -1;
                if (a.maps.row_to_expert) a.maps.row_to_expert[pair] = -1;
            }
        }
    }
    if (a.maps.block_size) finish_aligned(a, starts, aligned);
}
