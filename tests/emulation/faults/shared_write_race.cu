/*
  Every warp counts into a word of its own, the first lane of the block adds them up. FAULT: all warps write one word.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(int, count, 4);
    const u32 i = thread_index();
    const int bits = (int)popcount(warp_ballot(a.in[i] & 1));
    if (lane_index() == 0) count[FAULT ? 0 : warp_index()] = bits;
    block_barrier();
    if (i == 0) a.out[0] = FAULT ? (int)count[0] : count[0] + count[1] + count[2] + count[3];
}
