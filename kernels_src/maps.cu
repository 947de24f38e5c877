/*
  maps.cu: the expert maps of any number of pairs: a stable counting sort by expert in three launches.

  moe_route_maps_count    a warp counts the experts of its share of consecutive pairs
  moe_route_maps_scan     one block turns the counts into each share's first row of each expert, and writes the outputs
                          that have an entry per expert
  moe_route_maps_scatter  the warp walks its share again, in order, and gives every pair its row

  Order within a warp's 32 pairs comes from match and popcount, order between them from the warp's own cursors: nothing is
  atomic but the integer counters of expert_load, the result is the same each time. Small batches don't come here: route.cu sorts them in the router's launch.

  Constants: E, K (slots a token), FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h. Pairs whose expert isn't local have no row.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"

#define SCAN_THREADS 1024
#define SCAN_WARPS (SCAN_THREADS / 32)
/* Experts a thread of the scan holds, consecutive ones. */
#define SCAN_EXPERTS ((LOCAL_EXPERTS + SCAN_THREADS - 1) / SCAN_THREADS)
#define NOT_LOCAL 0xffffffffu

DEVICE u32 share_size(const moer_maps_args &a) { return ((a.num_pairs + a.num_blocks - 1) / a.num_blocks + 31) / 32 * 32; }

/* Local expert of a pair, or NOT_LOCAL. */
DEVICE u32 local_expert(const moer_maps_args &a, u32 pair, u32 num_valid_pairs) {
    if (pair >= num_valid_pairs) return NOT_LOCAL;
    const u32 local = physical_expert(a.expert_map, (u32)a.ids[pair], pair / K) - FIRST_EXPERT;
    return local < LOCAL_EXPERTS ? local : NOT_LOCAL;
}

DEVICE u32 valid_pairs(const moer_maps_args &a) { return valid_tokens(a.num_valid_tokens, a.num_pairs / K) * K; }

/* Advances the warp's cursors by 32 pairs; returns the cursor of the lane's expert before them plus its rank among them. */
template <class Cursors>
DEVICE u32 take_rows(Cursors &cursors, u32 expert) {
    const u32 peers = warp_match(expert), lane = lane_index();
    u32 row = 0;
    if (expert != NOT_LOCAL) row = cursors[expert] + popcount(peers & ((1u << lane) - 1));
    warp_barrier();
    if (expert != NOT_LOCAL && (peers >> lane) == 1u) cursors[expert] = row + 1; /* the last of its peers */
    warp_barrier();
    return row;
}

KERNEL(moe_route_maps_count, 32, moer_maps_args) {
    SHARED(u32, counts, LOCAL_EXPERTS);
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 lane = lane_index(), block = block_index_x(), share = share_size(a), num_valid = valid_pairs(a);
    for (u32 e = lane; e < LOCAL_EXPERTS; e += 32) counts[e] = 0;
    warp_barrier();
    for (u32 i = 0; i < share; i += 32) {
        const u64 pair = (u64)block * share + i + lane;
        take_rows(counts, pair < a.num_pairs ? local_expert(a, (u32)pair, num_valid) : NOT_LOCAL);
        if (a.maps.expert_load && pair < num_valid && (u32)a.ids[pair] < E) global_atomic_add_64(a.maps.expert_load + a.ids[pair], 1);
    }
    for (u32 e = lane; e < LOCAL_EXPERTS; e += 32) a.block_counts[(u64)block * LOCAL_EXPERTS + e] = (int)counts[e];
}

/* Sum of the values of the threads before this one; *total is the sum of all. */
template <class Sums>
DEVICE u32 scan_block(Sums &warp_sums, u32 value, u32 *total) {
    const u32 lane = lane_index(), warp = warp_index();
    u32 inclusive = value;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 other = warp_shuffle_up(inclusive, delta);
        if (lane >= delta) inclusive += other;
    }
    block_barrier(); /* the sums of the scan before may still be read */
    if (lane == 31) warp_sums[warp] = inclusive;
    block_barrier();
    u32 before = 0, sum = 0;
    for (u32 w = 0; w < SCAN_WARPS; w++) {
        if (w == warp) before = sum;
        sum += warp_sums[w];
    }
    *total = sum;
    return before + inclusive - value;
}

KERNEL(moe_route_maps_scan, SCAN_THREADS, moer_maps_args) {
    SHARED(u32, warp_sums, SCAN_WARPS);
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 first = thread_index() * SCAN_EXPERTS;
    const u32 block = a.maps.block_size;
    u32 count[SCAN_EXPERTS], rows = 0, distinct = 0, aligned = 0;
#pragma unroll
    for (u32 i = 0; i < SCAN_EXPERTS; i++) {
        count[i] = 0;
        if (first + i < LOCAL_EXPERTS)
            for (u32 b = 0; b < a.num_blocks; b++) {
                int *entry = a.block_counts + (u64)b * LOCAL_EXPERTS + first + i;
                const u32 c = (u32)*entry;
                *entry = (int)count[i];
                count[i] += c;
            }
        rows += count[i];
        distinct += count[i] != 0;
        if (block) aligned += (count[i] + block - 1) / block * block;
    }
    u32 num_rows, num_distinct, num_aligned;
    u32 row = scan_block(warp_sums, rows, &num_rows);
    u32 index = scan_block(warp_sums, distinct, &num_distinct);
    u32 start = scan_block(warp_sums, aligned, &num_aligned);
#pragma unroll
    for (u32 i = 0; i < SCAN_EXPERTS; i++) {
        if (first + i >= LOCAL_EXPERTS) break;
        a.expert_offsets[first + i] = (int)row;
        if (count[i]) {
            if (a.maps.distinct_experts) a.maps.distinct_experts[index] = (int)(first + i);
            if (a.maps.distinct_offsets) a.maps.distinct_offsets[index] = (int)row;
            index++;
        }
        if (block) {
            a.aligned_offsets[first + i] = (int)start;
            start += (count[i] + block - 1) / block * block;
        }
        row += count[i];
    }
    if (thread_index() == 0) {
        a.expert_offsets[LOCAL_EXPERTS] = (int)num_rows;
        if (a.maps.distinct_offsets) a.maps.distinct_offsets[num_distinct] = (int)num_rows;
        if (a.maps.distinct_count) a.maps.distinct_count[0] = (int)num_distinct;
        if (block) a.aligned_offsets[LOCAL_EXPERTS] = (int)num_aligned;
        if (block && a.maps.aligned_rows) a.maps.aligned_rows[0] = (int)num_aligned;
    }
}

KERNEL(moe_route_maps_scatter, 32, moer_maps_args) {
    SHARED(u32, cursors, LOCAL_EXPERTS); /* next row of each expert in this share */
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 lane = lane_index(), block = block_index_x(), share = share_size(a), num_valid = valid_pairs(a);
    const u32 num_rows = (u32)a.expert_offsets[LOCAL_EXPERTS];
    for (u32 e = lane; e < LOCAL_EXPERTS; e += 32)
        cursors[e] = (u32)(a.expert_offsets[e] + a.block_counts[(u64)block * LOCAL_EXPERTS + e]);
    warp_barrier();
    for (u32 i = 0; i < share; i += 32) {
        const u64 position = (u64)block * share + i + lane;
        const bool exists = position < a.num_pairs;
        const u32 pair = (u32)position;
        const u32 expert = exists ? local_expert(a, pair, num_valid) : NOT_LOCAL;
        const u32 row = take_rows(cursors, expert);
        if (expert != NOT_LOCAL) {
            if (a.maps.row_to_pair) a.maps.row_to_pair[row] = (int)pair;
            if (a.maps.row_to_expert) a.maps.row_to_expert[row] = (int)expert;
            if (a.maps.aligned_row_to_pair)
                a.maps.aligned_row_to_pair[a.aligned_offsets[expert] + (int)row - a.expert_offsets[expert]] = (int)pair;
        }
        if (exists) {
            if (a.maps.pair_to_row) a.maps.pair_to_row[pair] = expert != NOT_LOCAL ? (int)row : -1;
            if (pair >= num_rows) { /* the row of this number doesn't exist */
                if (a.maps.row_to_pair) a.maps.row_to_pair[pair] = -1;
                if (a.maps.row_to_expert) a.maps.row_to_expert[pair] = -1;
            }
        }
    }
    if (!a.maps.block_size) return;
    const u32 thread = block * 32 + lane, threads = grid_blocks_x() * 32;
    const u32 aligned_rows = (u32)a.aligned_offsets[LOCAL_EXPERTS];
    if (a.maps.aligned_row_to_pair) {
        for (u32 e = thread; e < LOCAL_EXPERTS; e += threads) {
            const int rows = a.expert_offsets[e + 1] - a.expert_offsets[e];
            for (int i = a.aligned_offsets[e] + rows; i < a.aligned_offsets[e + 1]; i++) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;
        }
        for (u32 i = aligned_rows + thread; i < a.maps.aligned_capacity; i += threads) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;
    }
    if (a.maps.block_to_expert)
        for (u32 i = thread; i < a.maps.aligned_capacity / a.maps.block_size; i += threads) {
            int expert = -1;
            if (i * a.maps.block_size < aligned_rows) { /* last expert whose blocks start at or before this one */
                u32 low = 0, high = LOCAL_EXPERTS;
                while (high - low > 1) {
                    const u32 middle = (low + high) / 2;
                    if ((u32)a.aligned_offsets[middle] <= i * a.maps.block_size) low = middle;
                    else high = middle;
                }
                expert = (int)low;
            }
            a.maps.block_to_expert[i] = expert;
        }
}
