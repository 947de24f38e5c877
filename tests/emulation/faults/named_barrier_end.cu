/*
  Warp 1 arrives at a named barrier for warp 0. FAULT: warp 0 ends without having been there.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    if (warp_index() == 1) block_barrier_arrive(3, 64);
    else if (!FAULT) block_barrier_named(3, 64);
    a.out[thread_index()] = a.in[thread_index()];
}
