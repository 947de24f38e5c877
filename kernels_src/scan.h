/*
  scan.h: running sums over the lanes of a warp. Sums over a block are the kernels' own.
*/

/* The sum of the lanes up to this one. */
DEVICE u32 scan_warp(u32 value) {
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 other = warp_shuffle_up(value, delta);
        if (lane_index() >= delta) value += other;
    }
    return value;
}
