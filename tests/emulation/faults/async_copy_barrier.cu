/*
  Reads what another lane has copied. FAULT: both have waited for their copies, but not for each other.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, part, 128);
    const u32 i = thread_index() * 4;
    copy_async_16(shared_place_of(part, 0), i, a.in + i, 16);
    copy_async_commit();
    copy_async_wait<0>();
#if !FAULT
    warp_barrier();
#endif
    a.out[i] = (int)part[i ^ 4];
}
