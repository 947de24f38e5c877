/*
  Tiles of 256 words pass through two halves of a buffer: while one is read, the next is on its way to the other.
  out[i] is the polynomial in 3 of word 255 - 4 * i of all tiles.
*/
#include "device.h"
struct sample_args { const u32 *in; u32 *out; u32 tiles; };

KERNEL(sample, 64, sample_args) {
    SHARED(u32, words, 512);
    const u32 i = thread_index();
    u32 sum = 0;
    copy_async_16(shared_place_of(words, 0), i * 4, a.in + i * 4, 16);
    copy_async_commit();
    for (u32 tile = 0; tile < a.tiles; tile++) {
        if (tile + 1 < a.tiles) copy_async_16(shared_place_of(words, 0), (tile + 1) % 2 * 256 + i * 4, a.in + (tile + 1) * 256 + i * 4, 16);
        copy_async_commit();
        copy_async_wait<1>();
        block_barrier();
        sum = sum * 3 + words[tile % 2 * 256 + 255 - i * 4];
        block_barrier();
    }
    a.out[i] = sum;
}
