/*
  A warp copies 32 numbers. FAULT: it ends while the barrier, at which a second arrival is missing, hasn't let them come.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, words, 128);
    const shared_place barrier = shared_place_of(words, 64);
    if (thread_index() == 0) shared_barrier_start(barrier, 2);
    block_barrier();
    if (elect_lane()) {
        shared_barrier_expect(barrier, 0, 128);
        copy_bulk(shared_place_of(words, 0), 0, a.in, 128, barrier, 0);
    }
    if (thread_index() == 0 && !FAULT) shared_barrier_arrive(barrier, 0);
    if (!FAULT) shared_barrier_wait(barrier, 0, 0);
    a.out[thread_index()] = a.in[thread_index()];
}
