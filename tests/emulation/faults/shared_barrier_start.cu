/*
  Two warps meet at a barrier in shared memory that one of them started. FAULT: the other doesn't wait for that.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(u32, words, 2);
    const shared_place barrier = shared_place_of(words, 0);
    if (thread_index() == 0) shared_barrier_start(barrier, 2);
    if (!FAULT) block_barrier();
    warp_barrier();
    if (lane_index() == 0) shared_barrier_arrive(barrier, 0);
    shared_barrier_wait(barrier, 0, 0);
    a.out[thread_index()] = a.in[thread_index()];
}
