/*
  route.cu: router and maps of a small batch in one launch of one block: logits [T, E + S] -> ids, weights, the sort of the
  T * k <= 512 pairs by expert. With SELECT 0 the ids are given.

  A warp routes a token (select.h) and leaves the ids in shared memory. Then a thread owns pair p: its row is the number of
  pairs that sort before it, counted over all pairs, four at a time. That is quadratic, yet at these sizes shorter than any
  sort: no pass waits for another. Pairs whose expert isn't local get the largest key: they take the rows from R on.

  Constants: E, K; with SELECT those of select.h; MAPS: 1 for what the layer's next kernels read, 2 for every output that isn't null;
  FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h; MAX_PAIRS, a multiple of 32, at most 512.
  Threads: any multiple of 32 up to MAX_THREADS.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"
#if SELECT
#include "scores.h"
#include "select.h"
#endif

#define NOT_LOCAL 0x7fffffff
#define MAX_THREADS (SELECT && E > 1024 ? 256 : 512) /* more experts a lane need more registers a thread */

/* Number of set bits below bit `end` of a row of masks. */
template <class Masks>
DEVICE u32 count_below(Masks &masks, u32 end) {
    u32 count = 0;
    for (u32 m = 0; m < end / 32; m++) count += popcount(masks[m]);
    if (end & 31) count += popcount(masks[end / 32] & ((1u << (end & 31)) - 1));
    return count;
}

/* Row r of the sorted experts belongs to a local expert; it is the first of its expert. */
template <class Experts>
DEVICE bool row_exists(Experts &sorted, u32 r) { return sorted[r] != NOT_LOCAL; }
template <class Experts>
DEVICE bool row_starts_expert(Experts &sorted, u32 r) {
    return sorted[r] != NOT_LOCAL && (r == 0 || sorted[r - 1] != sorted[r]);
}

/* Counts a pair into its expert's load, and returns the local expert that serves it, or NOT_LOCAL. */
DEVICE int place_pair(const moer_route_args &a, u32 id, u32 token) {
    if (a.maps.expert_load && id < E) global_atomic_add_64(a.maps.expert_load + id, 1);
    const u32 local = physical_expert(a.expert_map, id, token) - FIRST_EXPERT;
    return local < LOCAL_EXPERTS ? (int)local : NOT_LOCAL;
}

KERNEL(moe_route_route, MAX_THREADS, moer_route_args) {
    SHARED(int, pair_expert, MAX_PAIRS);    /* local expert of each pair, or NOT_LOCAL */
    SHARED(int, sorted_expert, MAX_PAIRS);  /* the same, by row */
    SHARED(u32, head_masks, MAX_PAIRS / 32);/* rows that start an expert */
    SHARED(u32, local_masks, MAX_PAIRS / 32);/* rows that exist */
#if MAPS == 2
    SHARED(int, sorted_pair, MAX_PAIRS);
    SHARED(int, head_row, MAX_PAIRS + 1);   /* first row of each distinct expert, then R */
    SHARED(int, aligned_start, MAX_PAIRS + 1);
#endif
    const u32 thread = thread_index(), lane = lane_index(), threads = block_threads();
    const u32 num_pairs = a.num_tokens * K;
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);

#if SELECT
    for (u32 token = warp_index(); token < a.num_tokens; token += threads / 32) {
        const bool valid = token < num_valid;
        const selection chosen = route_token(a, token, valid);
#pragma unroll
        for (u32 s = 0; s < SLOTS_PER_LANE; s++)
            if (s * 32 + lane < K) pair_expert[token * K + s * 32 + lane] = valid ? place_pair(a, chosen.id[s], token) : NOT_LOCAL;
    }
    for (u32 p = num_pairs + thread; p < (num_pairs + 3) / 4 * 4; p += threads) pair_expert[p] = NOT_LOCAL;
#else
    for (u32 p = thread; p < (num_pairs + 3) / 4 * 4; p += threads) {
        pair_expert[p] = p < num_valid * K ? place_pair(a, (u32)a.ids[p], p / K) : NOT_LOCAL;
    }
#endif
    block_barrier();

    for (u32 p = thread; p < num_pairs; p += threads) {
        const int expert = pair_expert[p];
        u32 row = 0;
        for (u32 q = 0; q < num_pairs; q += 4) { /* entries past the last pair are NOT_LOCAL and later: they count 0 */
            const auto other = shared_load_4(pair_expert, q);
            row += (other.x < expert || (other.x == expert && q < p)) + (other.y < expert || (other.y == expert && q + 1 < p)) +
                   (other.z < expert || (other.z == expert && q + 2 < p)) + (other.w < expert || (other.w == expert && q + 3 < p));
        }
        const bool local = expert != NOT_LOCAL;
        sorted_expert[row] = expert;
#if MAPS == 1
        a.maps.row_to_pair[row] = local ? (int)p : -1;
        a.maps.pair_to_row[p] = local ? (int)row : -1;
        a.maps.row_to_expert[row] = local ? expert : -1;
#else
        sorted_pair[row] = (int)p;
        if (a.maps.row_to_pair) a.maps.row_to_pair[row] = local ? (int)p : -1;
        if (a.maps.pair_to_row) a.maps.pair_to_row[p] = local ? (int)row : -1;
        if (a.maps.row_to_expert) a.maps.row_to_expert[row] = local ? expert : -1;
#endif
    }
    block_barrier();

    const u32 num_masks = (num_pairs + 31) / 32;
    for (u32 r = thread; r < num_masks * 32; r += threads) {
        const bool inside = r < num_pairs;
        const u32 heads = warp_ballot(inside && row_starts_expert(sorted_expert, r));
        const u32 locals = warp_ballot(inside && row_exists(sorted_expert, r));
        if (lane == 0) {
            head_masks[r >> 5] = heads;
            local_masks[r >> 5] = locals;
        }
    }
    block_barrier();

    u32 num_distinct = 0, num_rows = 0;
    for (u32 m = 0; m < num_masks; m++) {
        num_distinct += popcount(head_masks[m]);
        num_rows += popcount(local_masks[m]);
    }
    for (u32 r = thread; r < num_rows; r += threads)
        if (row_starts_expert(sorted_expert, r)) {
            const u32 d = count_below(head_masks, r);
#if MAPS == 1
            a.maps.distinct_experts[d] = sorted_expert[r];
            a.maps.distinct_offsets[d] = (int)r;
#else
            head_row[d] = (int)r;
            if (a.maps.distinct_experts) a.maps.distinct_experts[d] = sorted_expert[r];
            if (a.maps.distinct_offsets) a.maps.distinct_offsets[d] = (int)r;
#endif
        }
#if MAPS == 1
    if (thread == 0) {
        a.maps.distinct_offsets[num_distinct] = (int)num_rows;
        a.maps.distinct_count[0] = (int)num_distinct;
    }
#else
    if (thread == 0) {
        head_row[num_distinct] = (int)num_rows;
        if (a.maps.distinct_offsets) a.maps.distinct_offsets[num_distinct] = (int)num_rows;
        if (a.maps.distinct_count) a.maps.distinct_count[0] = (int)num_distinct;
    }
    if (a.maps.expert_offsets)
        for (u32 e = thread; e <= LOCAL_EXPERTS; e += threads) { /* first row whose expert is at least e */
            u32 low = 0, high = num_rows;
            while (low < high) {
                const u32 middle = (low + high) / 2;
                if (sorted_expert[middle] < (int)e) low = middle + 1;
                else high = middle;
            }
            a.maps.expert_offsets[e] = (int)low;
        }
    if (a.maps.block_size) {
        const u32 block = a.maps.block_size;
        if (a.maps.aligned_row_to_pair)
            for (u32 i = thread; i < a.maps.aligned_capacity; i += threads) a.maps.aligned_row_to_pair[i] = (int)num_pairs;
        block_barrier();
        for (u32 d = thread; d <= num_distinct; d += threads) {
            u32 start = 0;
            for (u32 c = 0; c < d; c++) start += ((u32)(head_row[c + 1] - head_row[c]) + block - 1) / block * block;
            aligned_start[d] = (int)start;
        }
        block_barrier();
        const u32 aligned_rows = (u32)aligned_start[num_distinct];
        if (thread == 0 && a.maps.aligned_rows) a.maps.aligned_rows[0] = (int)aligned_rows;
        if (a.maps.aligned_row_to_pair)
            for (u32 r = thread; r < num_rows; r += threads) {
                const u32 d = count_below(head_masks, r + 1) - 1; /* heads at or before r */
                a.maps.aligned_row_to_pair[aligned_start[d] + (int)r - head_row[d]] = sorted_pair[r];
            }
        if (a.maps.block_to_expert)
            for (u32 i = thread; i < a.maps.aligned_capacity / block; i += threads) {
                int expert = -1;
                if (i * block < aligned_rows) { /* last distinct expert that starts at or before the block */
                    u32 low = 0, high = num_distinct;
                    while (high - low > 1) {
                        const u32 middle = (low + high) / 2;
                        if ((u32)aligned_start[middle] <= i * block) low = middle;
                        else high = middle;
                    }
                    expert = sorted_expert[head_row[low]];
                }
                a.maps.block_to_expert[i] = expert;
            }
    }
#endif
}
