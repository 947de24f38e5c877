/*
  The order in which the last block's threads run: a counter, then each thread's place.
*/
#include "device.h"
struct sample_args { int *count; };

KERNEL(sample, 64, sample_args) {
    a.count[1 + thread_index()] = a.count[0]++;
}
