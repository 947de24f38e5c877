/*
  Reads shared memory that half of the threads wrote. FAULT: all of it; what an earlier block left there doesn't count.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    if (i < 32 || (FAULT && block_index_x() == 0)) part[i] = a.in[i];
    block_barrier();
    a.out[i] = part[FAULT ? i : i % 32];
}
