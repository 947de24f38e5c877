/*
  c [64, 32] = a [64, 64] * b [32, 64] transposed by four warps together, twice over, then c transposed by 8 x 8 pieces of 16-bit integers;
  a and b in 16-bit floats, their rows permuted in shared memory as device.h says.
*/
#include "device.h"
struct sample_args { const u32 *a, *b; float *c; u32 *transposed; u32 is_bf16; };

KERNEL(sample, 128, sample_args) {
    SHARED(u32, words, 96 * 32);
    const u32 lane = lane_index(), g = lane / 4, t = lane % 4;
    float sums[4][4];
    for (u32 i = thread_index(); i < 96 * 32; i += 128) {
        const u32 row = i / 32, word = i % 32;
        words[row * 32 + ((word / 4) ^ (row & 7)) * 4 + word % 4] = row < 64 ? a.a[i] : a.b[i - 64 * 32];
    }
    block_barrier();
    shared_visible_to_products();
    for (u32 j = 0; j < 4; j++)
        for (u32 i = 0; i < 4; i++) sums[j][i] = 0.0f;
    warpgroup_begin();
    for (u32 twice = 0; twice < 2; twice++) {
        for (u32 k = 0; k < 4; k++) {
            if (a.is_bf16) warpgroup_multiply(32, false, sums, words, k * 8, 64 * 32 + k * 8);
            else warpgroup_multiply(32, true, sums, words, k * 8, 64 * 32 + k * 8);
        }
        warpgroup_commit();
        if (twice == 0) warpgroup_wait<1>();
    }
    warpgroup_wait<0>();
    for (u32 j = 0; j < 4; j++)
        for (u32 i = 0; i < 4; i++) a.c[(warp_index() * 16 + i / 2 * 8 + g) * 32 + j * 8 + t * 2 + i % 2] = sums[j][i];
    if (warp_index() == 0) a.transposed[lane] = matrix_transpose((g * 8 + t * 2) | (g * 8 + t * 2 + 1) << 16);
}
