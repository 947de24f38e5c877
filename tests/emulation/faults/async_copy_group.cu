/*
  Waits for all groups but the latest, and reads what an earlier one copied. FAULT: the copy is in the latest.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, part, 128);
    const u32 i = thread_index() * 4;
    if (FAULT) copy_async_commit();
    copy_async_16(shared_place_of(part, 0), i, a.in + i, 16);
    copy_async_commit();
    if (!FAULT) copy_async_commit();
    copy_async_wait<1>();
    a.out[i] = (int)part[i];
    copy_async_wait<0>();
}
