/*
  dispatch.h: what dispatch.cu and dispatch_large.cu share: which rank a pair goes to, and writing the rows and slot rows of a
  block's share of consecutive tokens once it is known how many those before it have. How that is counted belongs to the
  kernels.

  A block copies the rows of its share, THREADS units of UNIT bytes of each (x of the grid; shares are y). Blocks with x = 0
  write what isn't x. Only integer counters are atomic, and only in shared memory: the result is the same each time.

  Constants: K, slots a token; NUM_RANKS; ROW_BYTES of x; UNIT, bytes of one access: 16, 4 or 2, a divisor of ROW_BYTES;
  WEIGHT_BYTES, 4 or 2; those of placement.h.
*/
#include "tokens.h"
#include "placement.h"

#define THREADS 256
#define CHUNK_TOKENS (THREADS / K) /* that the block looks at together, a thread a pair */
#define CHUNK_PAIRS (CHUNK_TOKENS * K)
#define NOWHERE 0xffffffffu

/* Block `block` of `blocks` takes tokens begin to end - 1. */
struct token_share { u32 begin, end; };

DEVICE token_share find_share(const moer_dispatch_args &a, u32 block, u32 blocks) {
    const u32 share = (a.num_tokens + blocks - 1) / blocks;
    token_share s;
    s.begin = block * share < a.num_tokens ? block * share : a.num_tokens;
    s.end = s.begin + share < a.num_tokens ? s.begin + share : a.num_tokens;
    return s;
}

/* The rank that a pair goes to, or NOWHERE. */
DEVICE u32 rank_of_pair(const moer_dispatch_args &a, u32 pair, u32 num_valid) {
    if (pair / K >= num_valid) return NOWHERE;
    const u32 expert = physical_expert(a.expert_map, (u32)a.ids[pair], pair / K);
    if (expert >= a.rank_begin[NUM_RANKS]) return NOWHERE;
    u32 low = 0, high = NUM_RANKS; /* the last rank that begins at or before the expert: ranks without experts are passed over */
#pragma unroll 1
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (a.rank_begin[middle] <= expert) low = middle;
        else high = middle;
    }
    return low;
}

/* Ranks of the chunk's pairs; those of tokens from `end` on are nowhere. */
template <class Ranks>
DEVICE void find_ranks(const moer_dispatch_args &a, Ranks &rank, u32 first_token, u32 end, u32 num_valid) {
    const u32 i = thread_index();
    block_barrier(); /* the chunk before may still be read */
    if (i < CHUNK_PAIRS) rank[i] = first_token + i / K < end ? rank_of_pair(a, first_token * K + i, num_valid) : NOWHERE;
    block_barrier();
}

/* The first slot of pair i's token that goes to the same rank. */
template <class Ranks>
DEVICE u32 leader(const Ranks &rank, u32 i) {
    u32 first = i - i % K;
#pragma unroll 1
    while (rank[first] != rank[i]) first++;
    return first;
}

/* Counts a pair: rows at 2r, slot rows at 2r + 1. */
template <class Counts>
DEVICE void count_pair(Counts &counts, u32 rank, bool leads) {
    shared_atomic_add(counts, rank * 2 + 1, 1u);
    if (leads) shared_atomic_add(counts, rank * 2, 1u);
}

/* Numbers what the lanes want of their ranks' cursors, in the order of lanes. */
template <class Cursors>
DEVICE u32 take_numbers(Cursors &cursors, u32 which, u32 rank) {
    const u32 peers = warp_match(rank), lane = lane_index();
    u32 number = NOWHERE;
    if (rank != NOWHERE) number = cursors[rank * 2 + which] + popcount(peers & ((1u << lane) - 1));
    warp_barrier();
    if (rank != NOWHERE && (peers >> lane) == 1u) cursors[rank * 2 + which] = number + 1; /* the last of its peers */
    warp_barrier();
    return number;
}

DEVICE void copy_weight(void *to, u64 to_index, const void *from, u64 from_index, bool there) {
    if (WEIGHT_BYTES == 4) ((u32 *)to)[to_index] = there ? load_4((const u32 *)from + from_index) : 0;
    else ((u16 *)to)[to_index] = there ? load_2((const u16 *)from + from_index) : (u16)0;
}

/* With fixed sizes: the rows that don't exist. */
template <class Counts>
DEVICE void clear_rows(const moer_dispatch_args &a, const Counts &total) {
    const u64 entries = (u64)NUM_RANKS * a.capacity * K;
    for (u64 i = (u64)block_index_y() * THREADS + thread_index(); i < entries; i += (u64)grid_blocks_y() * THREADS) {
        const u32 row = (u32)(i / K), rank = row / a.capacity;
        if (row - rank * a.capacity < total[rank * 2]) continue;
        if (a.row_ids) a.row_ids[i] = -1;
        if (a.row_weights) copy_weight(a.row_weights, i, 0, 0, false);
        if (a.row_to_token && i % K == 0) a.row_to_token[row] = -1;
    }
}

/* What belongs to pair i of the chunk, and to its place in each row of its token. */
template <class Numbers>
DEVICE void write_pair(const moer_dispatch_args &a, u32 pair, u32 i, const Numbers &rank, const Numbers &row_of, const Numbers &slot_of) {
    const u32 token = pair / K, first = i - i % K;
    if (a.pair_to_row) a.pair_to_row[pair] = (int)row_of[i];
    if (a.pair_to_slot_row) {
        const bool sent = rank[i] != NOWHERE && row_of[leader(rank, i)] != NOWHERE;
        a.pair_to_slot_row[pair] = sent ? (int)slot_of[i] : -1;
    }
    if (a.row_to_token && row_of[i] != NOWHERE) a.row_to_token[row_of[i]] = (int)token;
    if (!a.row_ids && !a.row_weights) return;
    const int expert = rank[i] != NOWHERE ? (int)physical_expert(a.expert_map, (u32)a.ids[pair], token) : -1;
#pragma unroll 1
    for (u32 other = first; other < first + K; other++) {
        const u32 row = row_of[other];
        if (row == NOWHERE) continue;
        const u64 at = (u64)row * K + (i - first);
        const bool here = rank[other] == rank[i];
        if (a.row_ids) a.row_ids[at] = here ? expert : -1;
        if (a.row_weights) copy_weight(a.row_weights, at, a.weights, pair, here);
    }
}

/* A unit of the rows of the chunk's tokens. */
template <class Numbers>
DEVICE void copy_rows(const moer_dispatch_args &a, u32 first_token, u32 num_tokens, u32 unit, const Numbers &row_of) {
#pragma unroll 1
    for (u32 t = 0; t < num_tokens; t++) {
        const u8 *from = (const u8 *)a.x + (u64)(first_token + t) * ROW_BYTES + unit * UNIT;
        u32x4 value = {{0, 0, 0, 0}};
        bool loaded = false;
#pragma unroll 1
        for (u32 j = 0; j < K; j++) {
            const u32 row = row_of[t * K + j];
            if (row == NOWHERE) continue;
            if (!loaded) {
                if (UNIT == 16) value = load_16(from);
                else value.v[0] = UNIT == 4 ? load_4(from) : load_2(from);
            }
            loaded = true;
            u8 *to = (u8 *)a.rows + (u64)row * ROW_BYTES + unit * UNIT;
            if (UNIT == 16) store_16(to, value);
            else if (UNIT == 4) *(u32 *)to = value.v[0];
            else *(u16 *)to = (u16)value.v[0];
        }
    }
}

/* Everything that a block writes. `total`: rows and slot rows of each rank; `before`: those of tokens before its share; `start` becomes
   where each rank's begin. The other arrays are for the chunk at hand. */
template <class Numbers, class Counts, class Starts>
DEVICE void send_share(const moer_dispatch_args &a, const token_share &share, u32 num_valid, Numbers &rank, Numbers &row_of, Numbers &slot_of, Counts &total, Counts &before, Starts &start) {
    const u32 i = thread_index();
    for (u32 r = i; r < NUM_RANKS * 2 + 2; r += THREADS) {
        u32 at = r / 2 * (r % 2 ? a.slot_capacity : a.capacity);
        if (!a.capacity)
            for (u32 other = r % 2; other < r; other += 2) at += total[other];
        start[r] = at;
    }
    block_barrier();
    if (block_index_x() == 0) {
        for (u32 r = i; r < NUM_RANKS * 2 + 2 && block_index_y() == 0; r += THREADS) {
            if (a.offsets) a.offsets[r] = (int)start[r];
            if (a.counts && r < NUM_RANKS * 2) a.counts[r] = (int)total[r];
        }
        if (a.capacity && (a.row_ids || a.row_weights || a.row_to_token)) clear_rows(a, total);
    }
    block_barrier();
    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) before[r] += start[r]; /* now the next of this block's */

    for (u32 token = share.begin; token < share.end; token += CHUNK_TOKENS) {
        const u32 tokens = share.end - token < CHUNK_TOKENS ? share.end - token : CHUNK_TOKENS;
        find_ranks(a, rank, token, share.end, num_valid);
        if (warp_index() == 0) {
            for (u32 c = lane_index(); c < (CHUNK_PAIRS + 31) / 32 * 32; c += 32) {
                const u32 r = c < CHUNK_PAIRS ? rank[c] : NOWHERE;
                const bool leads = r != NOWHERE && leader(rank, c) == c;
                u32 slot = take_numbers(before, 1, r), row = take_numbers(before, 0, leads ? r : NOWHERE);
                if (a.capacity && slot != NOWHERE && slot >= start[r * 2 + 3]) slot = NOWHERE; /* the next rank's begin */
                if (a.capacity && row != NOWHERE && row >= start[r * 2 + 2]) row = NOWHERE;
                if (c < CHUNK_PAIRS) {
                    row_of[c] = row;
                    slot_of[c] = slot;
                }
            }
        }
        block_barrier();
        if (block_index_x() == 0 && i < tokens * K) write_pair(a, token * K + i, i, rank, row_of, slot_of);
        const u32 unit = block_index_x() * THREADS + i;
        if (a.rows && unit < ROW_BYTES / UNIT) copy_rows(a, token, tokens, unit, row_of);
    }
}
