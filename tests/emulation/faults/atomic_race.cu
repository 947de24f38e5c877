/*
  All threads add to one word; after a barrier it is read. FAULT: it is read before.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(int, sum, 1);
    const u32 i = thread_index();
    if (i == 0) sum[0] = 0;
    block_barrier();
    shared_atomic_add(sum, 0, a.in[i]);
#if !FAULT
    block_barrier();
#endif
    if (i == 0) a.out[0] = sum[0];
}
