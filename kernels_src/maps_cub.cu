/*
  maps_cub.cu: the expert maps of more than 8192 pairs, as maps.cu makes them, ranked by CUB's block primitives. The one kernel family that
  needs headers of others.

  moe_route_maps_cub_count    a block counts the experts of its share of consecutive pairs
  moe_route_maps_cub_scatter  every block adds up the counts of all shares, as in maps.cu, then sorts its share tile by tile

  A tile is ranked by BlockRadixRankMatch with the local expert as the digit, and one more for pairs without a row. It is brought into
  the order of rows in shared memory first: neighbours of a row are written by neighbouring threads, where scattered words would cost
  a store each.

  Constants: E, K (slots a token), FIRST_EXPERT, LOCAL_EXPERTS, those of placement.h, and SORT_THREADS, a power of two up to 1024: shared
  memory has to have a counter for each digit and warp (layer.c chooses).
*/
enum : unsigned int { NUM_EXPERTS = E, SLOTS = K };
#undef E /* names of template parameters there */
#undef K
#include <cub/block/block_radix_rank.cuh>
#include <cub/block/block_scan.cuh>
#define E NUM_EXPERTS
#define K SLOTS
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"
#include "sort.h"

#define TILE 1024u /* pairs that are sorted at a time */
#define PAIRS (TILE / SORT_THREADS)

DEVICE constexpr int digit_bits() {
    int bits = 1;
    while ((1u << bits) <= LOCAL_EXPERTS) bits++;
    return bits;
}

typedef cub::BlockRadixRankMatch<SORT_THREADS, digit_bits(), false, cub::BLOCK_SCAN_WARP_SCANS> tile_rank;
typedef cub::BlockScan<sums, SORT_THREADS, cub::BLOCK_SCAN_WARP_SCANS> expert_scan;
/* Digits of a thread, consecutive ones. */
#define BINS tile_rank::BINS_TRACKED_PER_THREAD

DEVICE constexpr u32 larger(u32 a, u32 b) { return a > b ? a : b; }

struct expert_digit {
    DEVICE u32 Digit(u32 expert) { return expert; }
};

DEVICE sums operator+(const sums &a, const sums &b) { return {a.rows + b.rows, a.distinct + b.distinct, a.aligned + b.aligned}; }

/* A thread's pairs lie 32 apart, a warp's together: the order in which tile_rank ranks equal digits. */
DEVICE u32 place_in_tile(u32 i) { return (warp_index() * PAIRS + i) * 32 + lane_index(); }

/* A thread's part of a ranked tile. */
struct ranked {
    u32 expert[PAIRS]; /* LOCAL_EXPERTS where the pair has no row */
    int rank[PAIRS];
    int count[BINS], start[BINS]; /* of its digits: pairs, and the first rank */
};

template <class Words>
DEVICE void rank_tile(const moer_maps_args &a, u32 begin, u32 num_valid, Words &words, ranked &r) {
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        const u32 pair = begin + place_in_tile(i);
        r.expert[i] = pair < a.num_pairs ? load_4(a.ids + pair) : NOT_LOCAL;
    }
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        const u32 local = local_expert(a, r.expert[i], begin + place_in_tile(i), num_valid);
        r.expert[i] = local != NOT_LOCAL ? local : LOCAL_EXPERTS;
    }
    tile_rank(SHARED_AS(tile_rank::TempStorage, words)).RankKeys(r.expert, r.rank, expert_digit(), r.start, [&](int (&counts)[BINS]) {
#pragma unroll
        for (u32 i = 0; i < BINS; i++) r.count[i] = counts[i];
    });
}

/* The rows of a ranked tile, whose row of rank 0 would be offsets[expert], and which has offsets[LOCAL_EXPERTS] of them; `words` is free
   again after a barrier. */
template <class Words, class Starts, class Aligned, class Offsets>
DEVICE void write_tile(const moer_maps_args &a, u32 begin, u32 all_rows, const ranked &r, Words &words, Starts &starts, Aligned &aligned, Offsets &offsets) {
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        const u32 expert = r.expert[i], place = place_in_tile(i);
        const u32 pair = begin + place;
        words[r.rank[i]] = expert << 16 | place;
        if (pair >= a.num_pairs) continue;
        if (a.maps.pair_to_row) a.maps.pair_to_row[pair] = expert != LOCAL_EXPERTS ? r.rank[i] + (int)offsets[expert] : -1;
        if (pair >= all_rows) { /* the row of this number doesn't exist */
            if (a.maps.row_to_pair) a.maps.row_to_pair[pair] = -1;
            if (a.maps.row_to_expert) a.maps.row_to_expert[pair] = -1;
        }
    }
    block_barrier();
    const u32 tile_rows = offsets[LOCAL_EXPERTS];
    for (u32 rank = thread_index(); rank < tile_rows; rank += SORT_THREADS) {
        const u32 word = words[rank], expert = word >> 16, row = rank + offsets[expert];
        const int pair = (int)(begin + (word & 0xffffu));
        if (a.maps.row_to_pair) a.maps.row_to_pair[row] = pair;
        if (a.maps.row_to_expert) a.maps.row_to_expert[row] = (int)expert;
        if (a.maps.aligned_row_to_pair) a.maps.aligned_row_to_pair[aligned[expert] + (row - starts[expert])] = pair;
    }
}

/* Places all experts, of which a thread has the counts of its digits. Returns the sums over all; ends with a barrier. */
template <class Starts, class Aligned, class Words>
DEVICE sums place_experts(const moer_maps_args &a, const int (&count)[BINS], Starts &starts, Aligned &aligned, Words &scan_words) {
    const u32 first = thread_index() * BINS;
    sums own = {0, 0, 0}, at, total;
#pragma unroll
    for (u32 i = 0; i < BINS; i++)
        if (first + i < LOCAL_EXPERTS) own = own + sums{(u32)count[i], count[i] != 0, align_rows(a, (u32)count[i])};
    expert_scan(SHARED_AS(expert_scan::TempStorage, scan_words)).ExclusiveSum(own, at, total);
#pragma unroll
    for (u32 i = 0; i < BINS; i++)
        if (first + i < LOCAL_EXPERTS) place_expert(a, starts, aligned, first + i, (u32)count[i], at);
    if (thread_index() == 0) place_end(a, starts, aligned, total);
    block_barrier();
    return total;
}

/* Pairs of a share, whole tiles. */
DEVICE u32 share_size(const moer_maps_args &a) { return ((a.num_pairs + a.num_blocks - 1) / a.num_blocks + TILE - 1) / TILE * TILE; }

KERNEL(moe_route_maps_cub_count, SORT_THREADS, moer_maps_args) {
    SHARED(u32, counts, COUNT_VECTORS * 8);
    const u32 begin = block_index_x() * share_size(a), end = begin + share_size(a);
    count_share(a, counts, begin, end < a.num_pairs ? end : a.num_pairs);
}

KERNEL(moe_route_maps_cub_scatter, SORT_THREADS, moer_maps_args) {
    SHARED(u32, starts, LOCAL_EXPERTS + 1);
    SHARED(u32, aligned, LOCAL_EXPERTS + 1);
    SHARED(u32, offsets, LOCAL_EXPERTS + 1); /* of the tile: from rank to row; at the end its number of rows */
    SHARED(u32, words, larger(SHARED_WORDS(tile_rank::TempStorage), TILE));
    SHARED(u32, scan_words, SHARED_WORDS(expert_scan::TempStorage));
    const u32 share = share_size(a), begin = block_index_x() * share, first = thread_index() * BINS;
    for (u32 e = thread_index(); e <= LOCAL_EXPERTS; e += SORT_THREADS) {
        starts[e] = 0;
        offsets[e] = 0;
    }
    block_barrier();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_valid = valid_pairs(a);
    add_counts(a, offsets, starts);
    block_barrier();
    int count[BINS];  /* all pairs of the thread's experts */
    u32 before[BINS]; /* and those of the shares before this one */
#pragma unroll
    for (u32 i = 0; i < BINS; i++) {
        before[i] = first + i < LOCAL_EXPERTS ? (u32)offsets[first + i] : 0;
        count[i] = first + i < LOCAL_EXPERTS ? (int)(starts[first + i] + before[i]) : 0;
    }
    const sums total = place_experts(a, count, starts, aligned, scan_words);
    for (u32 done = 0; done < share && begin + done < a.num_pairs; done += TILE) {
        ranked r;
        rank_tile(a, begin + done, num_valid, words, r);
#pragma unroll
        for (u32 i = 0; i < BINS; i++) {
            const u32 e = first + i;
            if (e < LOCAL_EXPERTS) offsets[e] = starts[e] + before[i] - (u32)r.start[i];
            if (e == LOCAL_EXPERTS) offsets[e] = (u32)r.start[i];
            before[i] += (u32)r.count[i];
        }
        block_barrier();
        write_tile(a, begin + done, total.rows, r, words, starts, aligned, offsets);
        block_barrier();
    }
    if (a.maps.block_size) finish_aligned(a, starts, aligned);
}
