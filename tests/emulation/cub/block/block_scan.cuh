/*
  block_scan.cuh: stands in for CUB's header of this name, as block_radix_rank.cuh does.
*/
#pragma once
#include "device.h"

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_WARP_SCANS };

/* Sums over the threads before each one. A sum is whole words, has an operator+ and is T{} to begin with. */
template <class T, int THREADS, BlockScanAlgorithm SCAN>
struct BlockScan {
    static constexpr u32 WARPS = THREADS / 32, WORDS = sizeof(T) / 4;
    static_assert(THREADS % 32 == 0 && sizeof(T) % 4 == 0, "not needed so far");
    struct TempStorage {
        static constexpr u32 words = WARPS * WORDS;
        emulation_array *array;
        u32 *data;
    };
    struct words_of { u32 word[WORDS]; };

    emulation_shared<u32> totals;
    explicit BlockScan(const TempStorage &storage) : totals{storage.array, storage.data} {}

    static T above(const T &value, u32 delta) { /* that of the lane `delta` before */
        words_of w;
        T result;
        __builtin_memcpy(&w, &value, sizeof w);
        for (u32 i = 0; i < WORDS; i++) w.word[i] = warp_shuffle_up(w.word[i], delta);
        __builtin_memcpy(&result, &w, sizeof w);
        return result;
    }

    void ExclusiveSum(const T &in, T &out, T &total) {
        const u32 lane = lane_index(), warp = warp_index();
        T sum = in;
        for (u32 delta = 1; delta < 32; delta *= 2) {
            const T other = above(sum, delta);
            if (lane >= delta) sum = other + sum;
        }
        if (lane == 31) {
            words_of w;
            __builtin_memcpy(&w, &sum, sizeof w);
            for (u32 i = 0; i < WORDS; i++) totals[warp * WORDS + i] = w.word[i];
        }
        sum = above(sum, 1);
        if (lane == 0) sum = T{};
        block_barrier();
        T before = T{}, all = T{};
        for (u32 w = 0; w < WARPS; w++) {
            words_of words;
            T of_warp;
            for (u32 i = 0; i < WORDS; i++) words.word[i] = totals[w * WORDS + i];
            __builtin_memcpy(&of_warp, &words, sizeof words);
            if (w < warp) before = before + of_warp;
            all = all + of_warp;
        }
        out = before + sum;
        total = all;
    }
};

}
