/*
  Copies n values. FAULT: one more than there are, by a plain store.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 64, fault_args) {
    const u32 i = thread_index();
    if (i < a.n + FAULT) a.out[i] = a.in[i % a.n];
}
