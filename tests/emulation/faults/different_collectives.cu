/*
  Even and odd lanes exchange values by the same shuffle. FAULT: by a shuffle each, in branches of their own.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    const u32 i = thread_index();
    u32 value = (u32)a.in[i];
#if FAULT
    if (i % 2 == 0)
        value = warp_shuffle_xor(value, 1);
    else
        value = warp_shuffle_xor(value, 1);
#else
    value = warp_shuffle_xor(value, 1);
#endif
    a.out[i] = (int)value;
}
