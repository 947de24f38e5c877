/*
  A named barrier that whole warps pass. FAULT: half of a warp has ended before it.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    part[i] = a.in[i];
    if (FAULT && i >= 48) return;
    block_barrier_named(1, 64);
    a.out[i] = part[i ^ 32];
}
