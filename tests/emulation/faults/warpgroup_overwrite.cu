/*
  Four warps multiply together and reuse the shared memory. FAULT: they write before they have waited for the products.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 128, fault_args) {
    SHARED(u32, part, 80 * 32);
    float sums[2][4] = {};
    for (u32 i = thread_index(); i < 80 * 32; i += 128) part[i] = 0;
    block_barrier();
    warpgroup_begin();
    warpgroup_multiply(16, true, sums, part, 0, 64 * 32);
    warpgroup_commit();
#if !FAULT
    warpgroup_wait<0>();
    block_barrier();
#endif
    part[64 * 32 + thread_index()] = 1;
#if FAULT
    warpgroup_wait<0>();
#endif
    a.out[thread_index()] = (int)sums[0][0];
}
