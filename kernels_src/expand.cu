/*
  expand.cu: rows[r] = x[row_to_pair[r] / k], zeros where the row doesn't exist: the activations in the order of the maps,
  for matmuls that can't gather for themselves. A pure copy: the dtype is only a size.

  Constants: ROW_BYTES of x; K, slots a token; UNIT, bytes of one access: 16, 4 or 2, a divisor of ROW_BYTES.
  Grid: (blocks of 128 threads over ROW_BYTES / UNIT, rows in steps of the grid's height).
*/
#include "device.h"
#include "args.h"

KERNEL(moe_route_expand, 128, moer_expand_args) {
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 unit = block_index_x() * 128 + thread_index();
    if (unit >= ROW_BYTES / UNIT) return;
    for (u32 row = block_index_y(); row < a.num_pairs; row += grid_blocks_y()) {
        const u32 pair = (u32)a.row_to_pair[row];
        const u8 *from = (const u8 *)a.x + (u64)(pair / K) * ROW_BYTES + unit * UNIT;
        u8 *to = (u8 *)a.rows + (u64)row * ROW_BYTES + unit * UNIT;
        const bool exists = pair < a.num_pairs;
        if (UNIT == 16) {
            u32x4 v = {{0, 0, 0, 0}};
            if (exists) v = load_16(from);
            store_16(to, v);
        } else if (UNIT == 4) {
            *(u32 *)to = exists ? load_4(from) : 0;
        } else {
            *(u16 *)to = exists ? load_2(from) : 0;
        }
    }
}
