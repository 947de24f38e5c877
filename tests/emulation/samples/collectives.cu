/*
  Every warp collective, on values [64] of two warps: out[64 * i + thread] is the result of collective i; and what else works on words.
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
    a.out[576 + i] = warp_add(v);
    a.out[640 + i] = count_above(7, v, ~0x80000000u) << 16 | count_above(7, v, ~v);
    a.out[704 + i] = count_above_2(7, v & 1, v, ~1u, ~(v - 1)) << 16 | count_above_2(7, v & 1, v, ~1u, ~v);
}
