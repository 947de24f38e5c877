/*
  values[i] += amount, under dependent launch or not.
*/
#include "device.h"
struct sample_args { int *values; int amount; u32 n; };

KERNEL(sample, 64, sample_args) {
    const u32 i = block_index_x() * block_threads() + thread_index();
    wait_for_previous_kernels();
    let_next_kernel_start();
    if (i < a.n) a.values[i] += a.amount;
}
