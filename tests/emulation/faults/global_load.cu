/*
  Loads n values by load_4. FAULT: one more than there are.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    const u32 i = thread_index();
    const u32 value = i < a.n + FAULT ? load_4(a.in + i) : 0;
    if (i < a.n) a.out[i] = (int)value;
}
