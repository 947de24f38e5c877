/*
  block_radix_rank.cuh: stands in for CUB's header of this name: the one class that kernels use, as CUB documents it, in plain C++ over
  the machine. How CUB itself does it isn't emulated.
*/
#pragma once
#include <cub/block/block_scan.cuh>

namespace cub {

/* Ranks the keys of a block's tile by digit, keys of equal digits in the order of warps, then of a thread's keys, then of lanes. The
   storage is written at once and read to the end: other uses of it need a barrier before and after. */
template <int THREADS, int BITS, bool DESCENDING, BlockScanAlgorithm SCAN>
struct BlockRadixRankMatch {
    static_assert(THREADS % 32 == 0 && !DESCENDING, "not needed so far");
    static constexpr u32 DIGITS = 1u << BITS, WARPS = THREADS / 32;
    static constexpr int BINS_TRACKED_PER_THREAD = (int)((DIGITS + THREADS - 1) / THREADS);
    struct TempStorage {
        static constexpr u32 words = DIGITS * WARPS; /* [digit, warp] */
        emulation_array *array;
        u32 *data;
    };

    emulation_shared<u32> counters;
    explicit BlockRadixRankMatch(const TempStorage &storage) : counters{storage.array, storage.data} {}

    template <class Key, int KEYS, class Extractor, class Callback>
    void RankKeys(Key (&keys)[KEYS], int (&ranks)[KEYS], Extractor extractor, int (&first)[BINS_TRACKED_PER_THREAD], Callback callback) {
        const u32 lane = lane_index(), warp = warp_index();
        u32 at[KEYS];
        int counts[BINS_TRACKED_PER_THREAD] = {};
        /* The threads in reverse: no caller may count on which one touches what. */
        for (u32 i = THREADS - 1 - thread_index(); i < TempStorage::words; i += THREADS) counters[i] = 0;
        block_barrier();
        for (int i = 0; i < KEYS; i++) {
            const u32 digit = extractor.Digit(keys[i]), peers = warp_match(digit), before = peers & ((1u << lane) - 1);
            at[i] = digit * WARPS + warp;
            const u32 earlier = counters[at[i]];
            warp_barrier();
            if (!before) counters[at[i]] = earlier + popcount(peers);
            warp_barrier();
            ranks[i] = (int)(earlier + popcount(before));
        }
        block_barrier();
        if (thread_index() == 0) {
            u32 sum = 0;
            for (u32 i = 0; i < TempStorage::words; i++) {
                const u32 count = counters[i];
                counters[i] = sum;
                sum += count;
            }
        }
        block_barrier();
        for (int i = 0; i < KEYS; i++) ranks[i] += (int)counters[at[i]];
        for (int i = 0; i < BINS_TRACKED_PER_THREAD; i++) {
            const u32 digit = thread_index() * BINS_TRACKED_PER_THREAD + (u32)i;
            if (digit >= DIGITS) continue;
            first[i] = (int)counters[digit * WARPS];
            counts[i] = (digit + 1 < DIGITS ? (int)counters[(digit + 1) * WARPS] : KEYS * THREADS) - first[i];
        }
        callback(counts);
    }
};

}
