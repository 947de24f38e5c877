/*
  Each of 192 threads adds 3 << 31 to one counter of all blocks, takes a number from one of its block's, and sets its even bit of its
  warp's word: bits [6].
*/
#include "device.h"
struct sample_args { long long *count; int *out; int *bits; };

KERNEL(sample, 64, sample_args) {
    SHARED(u32, taken, 1);
    SHARED(u32, set, 2);
    const u32 i = block_index_x() * 64 + thread_index();
    if (thread_index() == 0) taken[0] = set[0] = set[1] = 0;
    block_barrier();
    global_atomic_add_64(a.count, 3ll << 31);
    a.out[i] = (int)shared_atomic_add(taken, 0, 1u);
    shared_atomic_or(set, warp_index(), 1u << (lane_index() & ~1u));
    block_barrier();
    if (lane_index() == 0) a.bits[i / 32] = (int)set[warp_index()];
}
