/*
  c [16, 8] += a [16, 16] * b [16, 8] by one warp: a row-major, b column-major (as [8, 16]), both in 16-bit floats.
*/
#include "device.h"
struct sample_args { const u16 *a, *b; float *c; u32 is_bf16; };

KERNEL(sample, 32, sample_args) {
    const u32 g = lane_index() / 4, t = lane_index() % 4;
    u32 left[4], right[2];
    float sums[4];
    for (u32 i = 0; i < 4; i++) left[i] = load_4(a.a + (g + i % 2 * 8) * 16 + t * 2 + i / 2 * 8);
    for (u32 i = 0; i < 2; i++) right[i] = load_4(a.b + g * 16 + t * 2 + i * 8);
    for (u32 i = 0; i < 4; i++) sums[i] = a.c[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
    if (a.is_bf16) matrix_multiply_bf16(sums, left, right[0], right[1]);
    else matrix_multiply_f16(sums, left, right[0], right[1]);
    for (u32 i = 0; i < 4; i++) a.c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = sums[i];
}
