/*
  Copies to where another lane has read. FAULT: only a collective between, which orders nothing.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, part, 128);
    const u32 i = thread_index() * 4;
    for (u32 j = 0; j < 4; j++) part[thread_index() + j * 32] = 0;
    block_barrier();
    for (u32 j = 0; j < 4; j++) a.out[i + j] = (int)part[i + j];
    warp_max(0);
#if !FAULT
    warp_barrier();
#endif
    copy_async_16(shared_place_of(part, 0), i ^ 4, a.in + i, 16);
    copy_async_commit();
    copy_async_wait<0>();
}
