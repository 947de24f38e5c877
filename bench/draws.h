/*
  draws.h: the random numbers of the benchmarks, the same in each run. What is drawn with them stands where it is used.
*/
#ifndef DRAWS_H
#define DRAWS_H

#include <math.h>
#include <stdint.h>

static uint64_t bench_random_state = UINT64_C(88172645463325252);

static uint64_t bench_random(void) {
    bench_random_state ^= bench_random_state << 13;
    bench_random_state ^= bench_random_state >> 7;
    bench_random_state ^= bench_random_state << 17;
    return bench_random_state;
}

static double bench_normal(void) {
    const double u = ((double)(bench_random() >> 11) + 1) / 9007199254740993.0,
                 v = (double)(bench_random() >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

#endif
