/*
  Copies 16 bytes to a place in the array. FAULT: it is aligned to 8 bytes only.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, part, 128);
    const u32 i = thread_index() * 4;
    if (i < 124) copy_async_16(shared_place_of(part, 0), i + (FAULT ? 2 : 4), a.in + i, 16);
    copy_async_commit();
    copy_async_wait<0>();
    if (i < 124) a.out[i] = (int)part[i + 4];
}
