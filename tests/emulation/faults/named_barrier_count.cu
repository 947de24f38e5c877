/*
  A named barrier of two warps of four. FAULT: one of them names another number of threads.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    if (i >= 64) return;
    part[i] = a.in[i];
    block_barrier_named(1, FAULT && warp_index() == 1 ? 96 : 64);
    a.out[i] = part[i ^ 32];
}
