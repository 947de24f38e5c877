/*
  A neighbour's value through shared memory, within each warp. FAULT: without the warp barrier; a shuffle stands in its
  place, which orders no memory.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(int, part, 128);
    const u32 i = thread_index(), neighbour = warp_index() * 32 + (lane_index() + 1) % 32;
    part[i] = a.in[i];
#if FAULT
    warp_shuffle_xor(i, 1);
#else
    warp_barrier();
#endif
    a.out[i] = part[neighbour];
}
