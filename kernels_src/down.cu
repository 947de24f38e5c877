/*
  down.cu: the down matmul of a small batch, and the combine, in one kernel:
  y[t] = sum over j of weights[t, j] * (down[e] @ h[row] + bias[e]), in the order of j; then what epilogue.h adds. Tokens of
  padding get 0.

  A block is 16 output columns of all experts: a warp takes a distinct expert and one of K_SPLIT parts of K, loads the next
  one's weights before it multiplies those that it has, and leaves the sums of the expert's rows in shared memory. When all are there, a thread adds up one output column of one token. So no
  partial result goes through global memory, nothing is atomic, and the order of every sum is fixed: a token's result
  doesn't depend on the others in the batch.

  Constants: those of tile.h (X is the dtype of h and y, ROWS the hidden size) and epilogue.h; BIAS (dtype, 0: none); K, slots
  a token; WEIGHT_ON_INPUT: h has the router's weight already; K_SPLIT; MAX_PAIRS. Threads: any number of warps up to 16.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "tile.h"
#include "vector.h"
#include "epilogue.h"

/* Where a warp is in its work: part `item % K_SPLIT` of distinct expert item / K_SPLIT, the expert's rows from `base` on, a
   round of loads. */
struct place {
    u32 item, base, end_row, round;
    weight_row low, high;
    float low_scale, high_scale;
};

DEVICE void enter_item(const moer_down_args &a, place &p, u32 item, u32 total) {
    p.item = item;
    p.round = 0;
    if (item >= total) return;
    const u32 d = item / K_SPLIT, column = block_index_x() * 16 + (lane_index() >> 2), expert = (u32)a.distinct_experts[d];
    p.base = (u32)a.distinct_offsets[d];
    p.end_row = (u32)a.distinct_offsets[d + 1];
    p.low = find_weight_row(a.weights, expert, column < ROWS ? column : ROWS - 1);
    p.high = find_weight_row(a.weights, expert, column + 8 < ROWS ? column + 8 : ROWS - 1);
    p.low_scale = ROW_HAS_SCALE ? row_scale(p.low) : 1.0f;
    p.high_scale = ROW_HAS_SCALE ? row_scale(p.high) : 1.0f;
}

DEVICE void advance(const moer_down_args &a, place &p, u32 total) {
    if (++p.round < ROUNDS(K_SPLIT)) return;
    p.round = 0;
    p.base += 8;
    if (p.base >= p.end_row) enter_item(a, p, p.item + block_threads() / 32, total);
}

KERNEL(moe_route_down, 512, moer_down_args) {
    SHARED(float, partial, K_SPLIT * MAX_PAIRS * 17); /* [part][row][output column], padded against bank conflicts */
    SHARED(int, pair_row, MAX_PAIRS);
    SHARED(float, pair_weight, MAX_PAIRS);
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, tile = block_index_x();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 total = (u32)a.distinct_count[0] * K_SPLIT;
    place next = {};
    tile_chunks<K_SPLIT> ahead;
    enter_item(a, next, warp_index(), total);
    if (next.item < total) load_tile<K_SPLIT>(ahead, next.low, next.high, next.item % K_SPLIT);
    for (u32 pair = thread_index(); pair < a.num_tokens * K; pair += block_threads()) {
        pair_row[pair] = a.pair_to_row[pair];
        pair_weight[pair] = WEIGHT_ON_INPUT ? 1.0f : router_weight(a.router_weights, pair);
    }
    float sums[1][4];
#pragma unroll 1
    while (next.item < total) {
        const place here = next;
        const u32 part = here.item % K_SPLIT;
        tile_chunks<K_SPLIT> loaded = ahead;
        advance(a, next, total);
        if (next.item < total) load_tile<K_SPLIT>(ahead, next.low, next.high, next.item % K_SPLIT + next.round * LOADED_STEPS(K_SPLIT) * K_SPLIT);
        /* Where there is no token: another row, whose sums nobody uses, or null where multiplying costs time by the token. */
        const u32 wanted = here.base + g, row = wanted < here.end_row ? wanted : here.base;
        const u8 *x[1] = {TENSOR_CORES || wanted < here.end_row ? (const u8 *)a.h + (u64)row * INNER * X_BYTES : 0};
        if (here.round == 0) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[0][i] = 0.0f;
        }
        multiply_loaded<1, K_SPLIT>(sums, loaded, here.low, here.high, x, part + here.round * LOADED_STEPS(K_SPLIT) * K_SPLIT);
        if (here.round != ROUNDS(K_SPLIT) - 1) continue;
        scale_rows<1>(sums, here.low_scale, here.high_scale);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 token_row = here.base + t * 2 + (i & 1);
            if (token_row < here.end_row) partial[(part * MAX_PAIRS + token_row) * 17 + g + (i >> 1) * 8] = sums[0][i];
        }
    }
    block_barrier();

    const u32 num_valid = valid_tokens(a.epilogue.num_valid_tokens, a.num_tokens);
    for (u32 i = thread_index(); i < a.num_tokens * 16; i += block_threads()) {
        const u32 token = i / 16, c = i % 16, column = tile * 16 + c;
        if (column >= ROWS) continue;
        const u64 at = (u64)token * ROWS + column;
        float y[1] = {0.0f};
        if (token < num_valid) {
            for (u32 j = 0; j < K; j++) {
                const u32 pair = token * K + j;
                const int row = pair_row[pair];
                if (row < 0) {
                    add_identity<X>(a.epilogue, a.router_weights, pair, at, y);
                    continue;
                }
                float value = partial[(u32)row * 17 + c];
#pragma unroll
                for (u32 part = 1; part < K_SPLIT; part++) value = f32_add(value, partial[(part * MAX_PAIRS + (u32)row) * 17 + c]);
                if (BIAS) value = f32_add(value, load_value(a.bias, (u64)(u32)a.row_to_expert[row] * ROWS + column, BIAS));
                y[0] = f32_fma(pair_weight[pair], value, y[0]);
            }
            add_shared_and_residual<X>(a.epilogue, token, at, y);
        }
        store_value(a.y, at, X, y[0]);
    }
}
