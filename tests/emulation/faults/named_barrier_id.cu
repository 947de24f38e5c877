/*
  The last of the named barriers. FAULT: the one after it.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    part[i] = a.in[i];
    block_barrier_named(FAULT ? 16 : 15, 64);
    a.out[i] = part[i ^ 32];
}
