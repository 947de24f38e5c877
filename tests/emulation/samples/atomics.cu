/*
  Each of 192 threads takes a number: from one counter for all blocks, which moves by 2, and from one of its block's.
*/
#include "device.h"
struct sample_args { int *count; int *out; };

KERNEL(sample, 64, sample_args) {
    SHARED(u32, taken, 1);
    const u32 i = block_index_x() * 64 + thread_index();
    if (thread_index() == 0) taken[0] = 0;
    block_barrier();
    a.out[i] = global_atomic_add(a.count, 2);
    a.out[192 + i] = (int)shared_atomic_add(taken, 0, 1u);
}
