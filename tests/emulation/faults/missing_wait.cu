/*
  A block of a dependent launch that waits. FAULT: the last block has nothing to do and ends without waiting.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    if (FAULT && block_index_x() == grid_blocks_x() - 1) return;
    wait_for_previous_kernels();
    let_next_kernel_start();
    a.out[thread_index()] = a.in[thread_index()];
}
