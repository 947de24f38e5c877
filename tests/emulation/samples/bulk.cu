/*
  The sums of async.cu by bulk copies: the first warp brings tiles to two halves of a buffer, as soon as both have read what was there.
*/
#include "device.h"
struct sample_args { const u32 *in; u32 *out; u32 tiles; };

DEVICE void bring(const sample_args &a, const shared_place &words, const shared_place &barriers, u32 tile) {
    if (!elect_lane()) return;
    shared_barrier_expect(barriers, tile % 2 * 2, 1024);
    copy_bulk(words, tile % 2 * 256, a.in + tile * 256, 512, barriers, tile % 2 * 2);
    copy_bulk(words, tile % 2 * 256 + 128, a.in + tile * 256 + 128, 512, barriers, tile % 2 * 2);
}

KERNEL(sample, 64, sample_args) {
    SHARED(u32, words, 520);
    const shared_place place = shared_place_of(words, 0), barriers = shared_place_of(words, 512); /* full, full, done, done */
    const u32 i = thread_index();
    u32 sum = 0;
    if (i == 0)
        for (u32 b = 0; b < 4; b++) shared_barrier_start(shared_place_of(words, 512 + b * 2), b < 2 ? 1 : 2);
    block_barrier();
    if (warp_index() == 0) bring(a, place, barriers, 0);
    for (u32 tile = 0; tile < a.tiles; tile++) {
        if (warp_index() == 0 && tile + 1 < a.tiles) {
            if (tile) shared_barrier_wait(barriers, 4 + (tile + 1) % 2 * 2, (tile - 1) / 2 % 2);
            bring(a, place, barriers, tile + 1);
        }
        shared_barrier_wait(barriers, tile % 2 * 2, tile / 2 % 2);
        sum = sum * 3 + shared_load_from(place, tile % 2 * 256 + 255 - i * 4);
        warp_barrier();
        if (lane_index() == 0) shared_barrier_arrive(barriers, 4 + tile % 2 * 2);
    }
    a.out[i] = sum;
}
