/*
  Warp 0 hands numbers to warp 1 twice. FAULT: without the named barrier that says that the buffer may be written again.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 32);
    int sum = 0;
    for (int round = 0; round < 2; round++) {
        if (warp_index() == 0) part[lane_index()] = a.in[lane_index()] + round;
        block_barrier_named(1, 64);
        if (warp_index() == 1) sum += part[31 - lane_index()];
#if !FAULT
        block_barrier_named(2, 64);
#endif
    }
    a.out[thread_index()] = sum;
}
