/*
  Every warp collective, on values [64] of two warps: out[64 * i + thread] is the result of collective i.
*/
#include "device.h"
struct sample_args { const u32 *in; u32 *out; };

KERNEL(sample, 64, sample_args) {
    const u32 i = thread_index(), v = a.in[i];
    a.out[i] = warp_max(v);
    a.out[64 + i] = warp_min(v);
    a.out[128 + i] = warp_ballot(v & 1);
    a.out[192 + i] = warp_match(v & 3);
    a.out[256 + i] = warp_shuffle(v, lane_index() * 7 + 3);
    a.out[320 + i] = warp_shuffle_xor(v, 5);
    a.out[384 + i] = warp_shuffle_up(v, 3);
    a.out[448 + i] = popcount(v);
    a.out[512 + i] = select_bytes(v, 0x07060504u, 0x6170u);
}
