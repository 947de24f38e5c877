/*
  Each of 192 threads adds 3 << 31 to one counter of all blocks, and takes a number from one of its block's.
*/
#include "device.h"
struct sample_args { long long *count; int *out; };

KERNEL(sample, 64, sample_args) {
    SHARED(u32, taken, 1);
    const u32 i = block_index_x() * 64 + thread_index();
    if (thread_index() == 0) taken[0] = 0;
    block_barrier();
    global_atomic_add_64(a.count, 3ll << 31);
    a.out[i] = (int)shared_atomic_add(taken, 0, 1u);
}
