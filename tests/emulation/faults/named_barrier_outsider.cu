/*
  Two warps exchange numbers behind a named barrier, and a third one reads them. FAULT: it isn't part of the barrier.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 96, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    if (i < 64) part[i] = 0;
    block_barrier();
    if (i < 64) part[i] = a.in[i];
    if (!FAULT || i < 64) block_barrier_named(3, FAULT ? 64 : 96);
    if (i < 64) a.out[i] = part[i ^ 32];
    else if (part[i - 64] < 0) a.out[0] = -1;
}
