/*
  down.cu: the down matmul of a small batch, and the combine, in one kernel:
  y[t] = sum over j of weights[t, j] * (down[e] @ h[row] + bias[e]), in the order of j; then what epilogue.h adds. Tokens of
  padding get 0.

  A block is 16 output columns of all experts: a warp takes a distinct expert and one of K_SPLIT parts of K, then others, as a
  stream (stream.h), and leaves the sums of the experts' rows in shared memory. When all are there, a thread adds up one output column of
  one token. So no partial result goes through global memory, nothing is atomic, and the order of every sum is fixed: a
  token's result doesn't depend on the others in the batch.

  Under dependent launch its blocks start while the kernel that computes h still runs. That one has waited for the maps, so
  they are there; and they say which weights are needed: those are on their way when h is waited for.

  Constants: those of tile.h (X is the dtype of h and y, ROWS the hidden size) and epilogue.h; BIAS (dtype, 0: none); K, slots
  a token; WEIGHT_ON_INPUT: h has the router's weight already; K_SPLIT; MAX_PAIRS. Threads: any number of warps up to 16.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "tile.h"
#define STREAM_COPIES 0 /* the partial sums take the room */
#include "stream.h"
#include "vector.h"
#include "epilogue.h"

constexpr u32 PARTIAL_WORDS = K_SPLIT * MAX_PAIRS * 17;
static_assert((PARTIAL_WORDS + 4 * MAX_PAIRS + 1) * 4 <= 49152, "shared memory of a block");

/* Where a warp is in its work: part `item % K_SPLIT` of distinct expert item / K_SPLIT, the expert's rows of h from `base` on. */
struct place {
    u32 item, base, end_row;
    tile_rows rows;
    const u8 *h; /* of the lane's row */
};

/* Where there is no row: another, whose sums nobody uses, or null where multiplying costs time by the row. */
DEVICE void find_h(const moer_down_args &a, place &p) {
    const u32 wanted = p.base + (lane_index() >> 2), row = wanted < p.end_row ? wanted : p.base;
    p.h = TENSOR_CORES || wanted < p.end_row ? (const u8 *)a.h + (u64)row * INNER * X_BYTES : 0;
}

DEVICE void enter_item(const moer_down_args &a, place &p, u32 expert, u32 base, u32 end_row) {
    const u32 column = block_index_x() * 16 + (lane_index() >> 2);
    p.base = base;
    p.end_row = end_row;
    p.rows.low = find_weight_row(a.weights, expert, column < ROWS ? column : ROWS - 1);
    p.rows.high = find_weight_row(a.weights, expert, column + 8 < ROWS ? column + 8 : ROWS - 1);
    find_h(a, p);
}

template <class Experts, class Offsets>
DEVICE void advance(const moer_down_args &a, Experts &experts, Offsets &offsets, place &p, u32 total) {
    p.base += 8;
    if (p.base < p.end_row) return find_h(a, p);
    p.item += block_threads() / 32;
    const u32 d = p.item / K_SPLIT;
    if (p.item < total) enter_item(a, p, (u32)experts[d], (u32)offsets[d], (u32)offsets[d + 1]);
}

KERNEL(moe_route_down, 512, moer_down_args) {
    SHARED(float, partial, PARTIAL_WORDS); /* [part][row][output column], padded against bank conflicts */
    SHARED(int, experts, MAX_PAIRS);     /* the maps */
    SHARED(int, offsets, MAX_PAIRS + 1);
    SHARED(int, pair_row, MAX_PAIRS);
    SHARED(float, pair_weight, MAX_PAIRS);
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, tile = block_index_x();
    /* The maps, with what lies beyond the last distinct expert and isn't used; and a warp's first item at once, since loads that wait for each other would be a
       good part of a step with few tokens. */
    place next = {};
    next.item = warp_index();
    const u32 d = next.item / K_SPLIT;
    weight_stream<X_LOADED, K_SPLIT> stream;
    const stream_places places = {};
    const held_activations<K_SPLIT> held = {};
    const u32 num_distinct = load_fresh_4(a.distinct_count), total = num_distinct * K_SPLIT;
    u32 expert = 0, base = 0, end_row = 0;
    if (d < a.max_distinct) {
        expert = load_fresh_4(a.distinct_experts + d);
        base = load_fresh_4(a.distinct_offsets + d);
        end_row = load_fresh_4(a.distinct_offsets + d + 1);
    }
    if (thread_index() == 0) offsets[0] = 0;
    for (u32 i = thread_index(); i < a.max_distinct; i += block_threads()) {
        experts[i] = (int)load_fresh_4(a.distinct_experts + i);
        offsets[i + 1] = (int)load_fresh_4(a.distinct_offsets + i + 1);
    }
    for (u32 pair = thread_index(); pair < a.num_tokens * K; pair += block_threads()) pair_row[pair] = (int)load_fresh_4(a.pair_to_row + pair);
    if (next.item < total) {
        enter_item(a, next, expert, base, end_row);
        start_weights(stream, places, next.rows, next.item % K_SPLIT);
    }
    block_barrier();
    wait_for_previous_kernels();
    let_next_kernel_start();
    if (next.item < total) start_activations(stream, next.h, next.item % K_SPLIT);
    for (u32 pair = thread_index(); pair < a.num_tokens * K; pair += block_threads()) pair_weight[pair] = WEIGHT_ON_INPUT ? 1.0f : router_weight(a.router_weights, pair);
#pragma unroll 1
    while (next.item < total) {
        const place here = next;
        const u32 part = here.item % K_SPLIT;
        const u8 *h[1] = {here.h};
        float sums[1][4];
        advance(a, experts, offsets, next, total);
        multiply_tile(sums, stream, places, held, here.rows, h, part, next.item < total, next.rows, next.h, next.item % K_SPLIT);
        scale_rows<1>(sums, ROW_HAS_SCALE ? row_scale(here.rows.low) : 1.0f, ROW_HAS_SCALE ? row_scale(here.rows.high) : 1.0f);
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
                value = scale_codes(value);
                if (BIAS) value = f32_add(value, load_value(a.bias, (u64)(u32)a.row_to_expert[row] * ROWS + column, BIAS));
                y[0] = f32_fma(pair_weight[pair], value, y[0]);
            }
            add_shared_and_residual<X>(a.epilogue, token, at, y);
        }
        store_value(a.y, at, X, y[0]);
    }
}
