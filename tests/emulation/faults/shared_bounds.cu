/*
  Reads the element after one's own. FAULT: the last thread does so, too.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    part[i] = a.in[i];
    block_barrier();
    a.out[i] = FAULT || i < 63 ? part[i + 1] : 0;
}
