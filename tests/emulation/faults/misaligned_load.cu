/*
  Four values a thread by one load. FAULT: from an address that is a multiple of 4 bytes, not of 16.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    const u32 i = thread_index();
    if (i < 8) {
        const u32x4 four = load_weights_16(a.in + i * 4 + FAULT);
        a.out[i] = (int)(four.v[0] + four.v[1] + four.v[2] + four.v[3]);
    }
}
