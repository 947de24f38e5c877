/*
  Sets the values that the same kernel set before, to those of an array plus 1. FAULT: it clears them before it waits.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    const u32 i = thread_index();
#if FAULT
    a.out[i] = 0;
    wait_for_previous_kernels();
#else
    wait_for_previous_kernels();
    a.out[i] = 0;
#endif
    let_next_kernel_start();
    a.out[i] += a.in[i] + 1;
}
