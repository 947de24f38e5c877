/*
  One warp copies twice to the same place; the other reads what came first. FAULT: the first doesn't wait until it has.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    SHARED(u32, words, 128);
    const shared_place full = shared_place_of(words, 64), done = shared_place_of(words, 66), part = shared_place_of(words, 0);
    if (thread_index() == 0) {
        shared_barrier_start(full, 1);
        shared_barrier_start(done, 1);
    }
    block_barrier();
    if (warp_index() == 0) {
        for (u32 i = 0; i < 2; i++) {
            if (i && !FAULT) shared_barrier_wait(done, 0, 0);
            if (!elect_lane()) continue;
            shared_barrier_expect(full, 0, 128);
            copy_bulk(part, 0, a.in + 32 * i, 128, full, 0);
        }
    } else {
        shared_barrier_wait(full, 0, 0);
        a.out[lane_index()] = (int)shared_load_from(part, lane_index());
        warp_barrier();
        if (lane_index() == 0) shared_barrier_arrive(done, 0);
    }
    shared_barrier_wait(full, 0, 1);
}
