/*
  A maximum over the first n lanes. FAULT: only they take part; otherwise the others take part with 0.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    const u32 i = thread_index();
#if FAULT
    if (i >= a.n) return;
#endif
    const u32 largest = warp_max(i < a.n ? (u32)a.in[i] : 0);
    if (i == 0) a.out[0] = (int)largest;
}
