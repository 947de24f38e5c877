/*
  maps.cu: the expert maps of any number of pairs: a stable counting sort by expert, in one launch of several blocks or in two.

  moe_route_maps_sort     up to 8192 pairs: every block counts all of them, those before its own share and the others
  moe_route_maps_count    more: a block counts the experts of its share of consecutive pairs
  moe_route_maps_scatter  and then every block adds up the counts of all shares

  So a block knows where its own pairs of each expert begin, without a word from the others. It ranks them tile by tile: a pair is a bit
  in its expert's words of shared memory, and its rank the number of bits before it. No pass over the pairs waits for another, and the
  result is the same each time: atomic are only counts, and bits of which each is set once. What has an entry per expert is written by
  the first block, and what the aligned form has beside the rows by all, which is why there are 16 of them or more. Small batches
  don't come here: route.cu sorts them in the router's launch.

  Shared memory is cleared, and the scatter kernel's first ids are read, before the kernel before this one has ended.

  Constants: E, K (slots a token), FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h. Pairs whose expert isn't local have no row.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"

#define SORT_THREADS 512
#include "sort.h"

/* Pairs that one launch sorts at most. */
#define SORT_PAIRS 8192u
/* Warps with a pair each lane: as many as 48 KB have room for a word each of every expert, beside three words an expert. */
#define TILE_WARPS (LOCAL_EXPERTS <= 512 ? 16 : LOCAL_EXPERTS <= 1024 ? 8 : LOCAL_EXPERTS <= 1536 ? 4 : 2)
#define TILE (TILE_WARPS * 32)
/* Experts that a thread adds up, consecutive ones, and the warps for that. */
#define THREAD_EXPERTS ((LOCAL_EXPERTS + 255) / 256)
#define SCAN_WARPS ((LOCAL_EXPERTS + 32 * THREAD_EXPERTS - 1) / (32 * THREAD_EXPERTS))

/* Pairs of a block. */
DEVICE u32 share_size(const moer_maps_args &a) { return ((a.num_pairs + a.num_blocks - 1) / a.num_blocks + 31) / 32 * 32; }

/* The end of a block's pairs. */
DEVICE u32 share_end(const moer_maps_args &a, u32 begin) { return begin + share_size(a) < a.num_pairs ? begin + share_size(a) : a.num_pairs; }

/* Whether the thread has this pair, of a tile that starts at `begin` in a share with this end. */
DEVICE bool is_inside(u32 pair, u32 begin, u32 end) { return pair < end && pair - begin < TILE; }

/* Sums over the threads before this one; all threads of SCAN_WARPS warps have some, and a barrier is passed by all threads. */
template <class Words>
DEVICE sums scan_block(Words &warp_sums, const sums &own, sums &total) {
    const u32 lane = lane_index(), warp = warp_index();
    sums s = own;
    if (warp < SCAN_WARPS) {
#pragma unroll
        for (u32 delta = 1; delta < 32; delta *= 2) {
            const u32 rows = warp_shuffle_up(s.rows, delta), distinct = warp_shuffle_up(s.distinct, delta), aligned = warp_shuffle_up(s.aligned, delta);
            if (lane < delta) continue;
            s.rows += rows;
            s.distinct += distinct;
            s.aligned += aligned;
        }
        if (lane == 31) {
            const u32x4 words = {{s.rows, s.distinct, s.aligned, 0}};
            shared_store_4(warp_sums, warp * 4, words);
        }
    }
    block_barrier();
    s.rows -= own.rows;
    s.distinct -= own.distinct;
    s.aligned -= own.aligned;
    total.rows = total.distinct = total.aligned = 0;
    if (warp >= SCAN_WARPS) return s;
#pragma unroll
    for (u32 w = 0; w < SCAN_WARPS; w++) {
        const auto words = shared_load_4(warp_sums, w * 4);
        if (w < warp) {
            s.rows += (u32)words.x;
            s.distinct += (u32)words.y;
            s.aligned += (u32)words.z;
        }
        total.rows += (u32)words.x;
        total.distinct += (u32)words.y;
        total.aligned += (u32)words.z;
    }
    return s;
}

/* Sets the pair's bit. */
template <class Marks>
DEVICE void mark(Marks &marks, u32 expert) {
    if (expert != NOT_LOCAL) shared_atomic_add(marks, warp_index() * LOCAL_EXPERTS + expert, 1u << lane_index());
}

/* From the counts of each expert in the pairs before the block's share, `next`, and in the others, `starts`, and with the first tile
   marked, all maps. `id` is that of the thread's pair of it. */
template <class Starts, class Aligned, class Next, class Marks, class Words>
DEVICE void sort_share(const moer_maps_args &a, u32 begin, u32 end, u32 num_valid, u32 id, u32 expert, bool adds_load, Starts &starts, Aligned &aligned, Next &next, Marks &marks, Words &warp_sums) {
    const u32 thread = thread_index(), lane = lane_index(), warp = warp_index(), first = thread * THREAD_EXPERTS;
    u32 count[THREAD_EXPERTS], before[THREAD_EXPERTS];
    sums own = {0, 0, 0}, total;
#pragma unroll
    for (u32 i = 0; i < THREAD_EXPERTS; i++) {
        count[i] = before[i] = 0;
        if (first + i >= LOCAL_EXPERTS) continue;
        before[i] = next[first + i];
        count[i] = starts[first + i] + before[i];
        own.rows += count[i];
        own.distinct += count[i] != 0;
        own.aligned += align_rows(a, count[i]);
    }
    sums at = scan_block(warp_sums, own, total);
#pragma unroll
    for (u32 i = 0; i < THREAD_EXPERTS; i++) {
        if (first + i >= LOCAL_EXPERTS) break;
        next[first + i] = at.rows + before[i];
        place_expert(a, starts, aligned, first + i, count[i], at);
    }
    if (thread == 0) place_end(a, starts, aligned, total);
    block_barrier();

    const u32 num_rows = starts[LOCAL_EXPERTS];
    for (;;) {
        const u32 pair = begin + thread, next_pair = pair + TILE;
        const bool inside = is_inside(pair, begin, end);
        const u32 next_id = is_inside(next_pair, begin + TILE, end) ? load_4(a.ids + next_pair) : NOT_LOCAL;
        if (expert != NOT_LOCAL) {
            u32 row = next[expert] + popcount(marks[warp * LOCAL_EXPERTS + expert] & ((1u << lane) - 1));
#pragma unroll 4
            for (u32 w = 0; w < warp; w++) row += popcount(marks[w * LOCAL_EXPERTS + expert]);
            if (a.maps.row_to_pair) a.maps.row_to_pair[row] = (int)pair;
            if (a.maps.row_to_expert) a.maps.row_to_expert[row] = (int)expert;
            if (a.maps.pair_to_row) a.maps.pair_to_row[pair] = (int)row;
            if (a.maps.aligned_row_to_pair) a.maps.aligned_row_to_pair[aligned[expert] + (row - starts[expert])] = (int)pair;
        } else if (inside && a.maps.pair_to_row) {
            a.maps.pair_to_row[pair] = -1;
        }
        if (inside && pair >= num_rows) { /* the row of this number doesn't exist */
            if (a.maps.row_to_pair) a.maps.row_to_pair[pair] = -1;
            if (a.maps.row_to_expert) a.maps.row_to_expert[pair] = -1;
        }
        if (inside && adds_load) add_load(a, id, pair, num_valid);
        begin += TILE;
        if (begin >= end) break;
        id = next_id;
        expert = local_expert(a, id, next_pair, num_valid);
        block_barrier();
        for (u32 e = thread; e < LOCAL_EXPERTS; e += SORT_THREADS) {
            u32 pairs = 0;
#pragma unroll
            for (u32 w = 0; w < TILE_WARPS; w++) {
                pairs += popcount(marks[w * LOCAL_EXPERTS + e]);
                marks[w * LOCAL_EXPERTS + e] = 0;
            }
            next[e] += pairs;
        }
        block_barrier();
        mark(marks, expert);
        block_barrier();
    }
    if (a.maps.block_size) finish_aligned(a, starts, aligned);
}

template <class Starts, class Next, class Marks>
DEVICE void clear(Starts &starts, Next &next, Marks &marks) {
    for (u32 e = thread_index(); e <= LOCAL_EXPERTS; e += SORT_THREADS) {
        starts[e] = 0;
        next[e] = 0;
    }
    for (u32 i = thread_index(); i < TILE_WARPS * LOCAL_EXPERTS; i += SORT_THREADS) marks[i] = 0;
}

/* Counts all pairs, PAIRS a thread: those before `begin`, and the others. */
template <u32 PAIRS, class Before, class Others>
DEVICE void count_all(const moer_maps_args &a, u32 begin, u32 num_valid, Before &before, Others &others) {
    u32 id[PAIRS];
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) id[i] = i * SORT_THREADS + thread_index() < a.num_pairs ? load_4(a.ids + i * SORT_THREADS + thread_index()) : NOT_LOCAL;
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        const u32 pair = i * SORT_THREADS + thread_index(), expert = local_expert(a, id[i], pair, num_valid);
        if (expert == NOT_LOCAL) continue;
        if (pair < begin) shared_atomic_add(before, expert, 1);
        else shared_atomic_add(others, expert, 1);
    }
}

KERNEL(moe_route_maps_sort, SORT_THREADS, moer_maps_args) {
    SHARED(u32, starts, LOCAL_EXPERTS + 1);  /* first row of each expert */
    SHARED(u32, aligned, LOCAL_EXPERTS + 1); /* likewise among the aligned rows */
    SHARED(u32, next, LOCAL_EXPERTS + 1);    /* row of the tile's first pair of each expert */
    SHARED(u32, marks, TILE_WARPS * LOCAL_EXPERTS);
    SHARED(u32, warp_sums, SCAN_WARPS * 4);
    clear(starts, next, marks);
    block_barrier();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 begin = block_index_x() * share_size(a), end = share_end(a, begin), pair = begin + thread_index();
    const u32 id = is_inside(pair, begin, end) ? load_4(a.ids + pair) : NOT_LOCAL, num_valid = valid_pairs(a);
    if (a.num_pairs <= SORT_PAIRS / 4) count_all<SORT_PAIRS / 4 / SORT_THREADS>(a, begin, num_valid, next, starts);
    else count_all<SORT_PAIRS / SORT_THREADS>(a, begin, num_valid, next, starts);
    const u32 expert = local_expert(a, id, pair, num_valid);
    mark(marks, expert);
    block_barrier();
    sort_share(a, begin, end, num_valid, id, expert, true, starts, aligned, next, marks, warp_sums);
}

KERNEL(moe_route_maps_count, SORT_THREADS, moer_maps_args) {
    SHARED(u32, counts, COUNT_VECTORS * 8);
    const u32 begin = block_index_x() * share_size(a);
    count_share(a, counts, begin, share_end(a, begin));
}

KERNEL(moe_route_maps_scatter, SORT_THREADS, moer_maps_args) {
    SHARED(u32, starts, LOCAL_EXPERTS + 1);
    SHARED(u32, aligned, LOCAL_EXPERTS + 1);
    SHARED(u32, next, LOCAL_EXPERTS + 1);
    SHARED(u32, marks, TILE_WARPS * LOCAL_EXPERTS);
    SHARED(u32, warp_sums, SCAN_WARPS * 4);
    clear(starts, next, marks);
    block_barrier();
    const u32 begin = block_index_x() * share_size(a), end = share_end(a, begin), pair = begin + thread_index();
    const u32 id = is_inside(pair, begin, end) ? load_fresh_4(a.ids + pair) : NOT_LOCAL; /* of a kernel before the count */
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_valid = valid_pairs(a);
    add_counts(a, next, starts);
    const u32 expert = local_expert(a, id, pair, num_valid);
    mark(marks, expert);
    block_barrier();
    sort_share(a, begin, end, num_valid, id, expert, false, starts, aligned, next, marks, warp_sums);
}
