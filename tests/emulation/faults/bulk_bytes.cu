/*
  A warp copies 64 numbers, and reads them. FAULT: it waits for twice as many.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, words, 128);
    const shared_place barrier = shared_place_of(words, 64), part = shared_place_of(words, 0);
    if (thread_index() == 0) shared_barrier_start(barrier, 1);
    block_barrier();
    if (elect_lane()) {
        shared_barrier_expect(barrier, 0, FAULT ? 512 : 256);
        copy_bulk(part, 0, a.in, 256, barrier, 0);
    }
    shared_barrier_wait(barrier, 0, 0);
    a.out[thread_index()] = (int)shared_load_from(part, 2 * thread_index());
}
