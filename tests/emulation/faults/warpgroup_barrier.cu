/*
  Four warps multiply what each of them has written a part of. FAULT: they don't wait for each other.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(u32, part, 80 * 32);
    float sums[2][4] = {};
    for (u32 i = thread_index(); i < 80 * 32; i += 128) part[i] = 0;
#if !FAULT
    block_barrier();
#endif
    warpgroup_begin();
    warpgroup_multiply(16, true, sums, part, 0, 64 * 32);
    warpgroup_commit();
    warpgroup_wait<0>();
    a.out[thread_index()] = (int)sums[0][0];
}
