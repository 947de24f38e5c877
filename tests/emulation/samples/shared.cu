/*
  What can be done with a SHARED array: of several types, indexed by an element of another, changed in place, passed to a
  function, read four at a time, added to by all threads. out[thread] takes a check of each.
*/
#include "device.h"
struct sample_args { const int *in; int *out; };
struct pair { float x, y; };

template <class Array>
DEVICE int twice(Array &array, u32 i) { return array[i] + array[i]; }

DEVICE int helper(u32 i, int value) {
    SHARED(u16, halves, 64);
    halves[i] = (u16)value;
    block_barrier();
    return halves[63 - i] > halves[0] ? 1 : 0;
}

KERNEL(sample, 64, sample_args) {
    SHARED(int, values, 64);
    SHARED(u32, order, 64);
    SHARED(pair, pairs, 64);
    SHARED(u32, sum, 1);
    const u32 i = thread_index();
    values[i] = a.in[i];
    order[i] = 63 - i;
    pairs[i] = {(float)i, 2.0f};
    if (i == 0) sum[0] = 0;
    block_barrier();
    const int other = values[order[i]] + (i < 32 ? values[i] : 0);
    const auto four = shared_load_4(values, i / 4 * 4);
    const pair mine = pairs[63 - i];
    shared_atomic_add(sum, 0, i);
    block_barrier();
    values[i] += 5;
    values[i] ^= 1;
    order[i] = order[i];
    a.out[i] = other + twice(values, i) + (int)mine.x + (int)mine.y + four.x + four.w + (int)sum[0] + 100000 * helper(i, (int)i);
}
