/*
  Warp 1 hands two numbers to warp 0, each at a named barrier, before warp 0 comes to any. FAULT: both at the same one.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(int, part, 64);
    const u32 i = lane_index();
    if (warp_index() == 1) {
        for (u32 round = 0; round < 2; round++) {
            part[round * 32 + i] = a.in[i] + (int)round;
            block_barrier_arrive(FAULT ? 1 : 1 + round, 64);
        }
        block_barrier_arrive(3, 64);
        return;
    }
    block_barrier_named(3, 64);
    for (u32 round = 0; round < 2; round++) {
        block_barrier_named(FAULT ? 1 : 1 + round, 64);
        a.out[round * 32 + i] = part[round * 32 + i];
    }
}
