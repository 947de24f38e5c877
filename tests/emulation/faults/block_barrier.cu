/*
  A sum over the block through shared memory, in which other warps' parts are read. FAULT: without the block barrier.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(int, part, 128);
    const u32 i = thread_index();
    part[i] = 0;
    block_barrier();
    part[i] = a.in[i];
#if !FAULT
    block_barrier();
#endif
    a.out[i] = part[(i + 32) % 128] + part[i];
}
