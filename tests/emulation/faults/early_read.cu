/*
  A chain of launches, each adding 1 to the values of the one before. FAULT: it reads them before it waits.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    const u32 i = thread_index();
#if FAULT
    const int value = a.in[i];
    wait_for_previous_kernels();
#else
    wait_for_previous_kernels();
    const int value = a.in[i];
#endif
    let_next_kernel_start();
    a.out[i] = value + 1;
}
