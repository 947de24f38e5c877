/*
  Warp 0 reads what warp 1 wrote before a named barrier. FAULT: it only arrives there, and doesn't wait.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 64);
    const u32 i = thread_index();
    part[i] = a.in[i];
    if (warp_index() == 1) block_barrier_arrive(1, 64);
    else if (FAULT) block_barrier_arrive(1, 64);
    else block_barrier_named(1, 64);
    a.out[i] = part[warp_index() == 0 ? i ^ 32 : i];
}
