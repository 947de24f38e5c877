/*
  A copy that nobody needs in the end, waited for all the same. FAULT: not.
*/
#include "device.h"
struct fault_args { const int *in; int *out; unsigned n; };

KERNEL(fault, 32, fault_args) {
    SHARED(u32, part, 128);
    const u32 i = thread_index() * 4;
    a.out[i] = a.in[i];
    copy_async_16(shared_place_of(part, 0), i, a.in + i, 16);
    copy_async_commit();
#if !FAULT
    copy_async_wait<0>();
#endif
}
