/*
  A block barrier that all threads pass. FAULT: one warp has ended before it.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(int, part, 128);
    const u32 i = thread_index();
    if (FAULT && warp_index() == 3) return;
    part[i] = a.in[i];
    block_barrier();
    a.out[i] = part[i ^ 32];
}
