/*
  route.cu: router and maps of a small batch in one launch of one block: logits [T, E + S] -> ids, weights, the sort of the
  T * k <= 512 pairs by expert. With SELECT 0 the ids are given.

  What takes time is the chain of things that wait for each other, not their number. So a warp routes a token (select.h), leaves the
  local experts of its pairs in shared memory, and only after the block's barrier computes and writes the weights, while the other
  warps (the map warps; all, where each has tokens) find the maps from what is in shared memory, without waiting for each other again:

  - up to 32 pairs: one warp has them all, and every lane looks at all of them;
  - more: beside the pairs there is a table of how often each 32 pairs in a row chose each expert, a byte each, four in a word. Every map
    warp adds it up for itself, over a share of the experts in each lane and then over the lanes, and takes what it has to write from that.

  Row r of a pair is the number of pairs that sort before it. Pairs whose expert isn't local have no row.

  Constants: E, K; with SELECT those of select.h; MAPS: 1 for what the layer's next kernels read, 2 for every output that isn't null;
  FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h; MAX_PAIRS, a multiple of 32, at most 512.
  Threads: any multiple of 32 up to MAX_THREADS; map warps are those beyond one for each token.
*/
#include "device.h"
#include "args.h"
#include "tokens.h"
#include "placement.h"
#if SELECT
#include "scores.h"
#include "select.h"
#else
#define TOKEN_WORDS 4
#define AHEAD 0
#endif

#define NOT_LOCAL 0x7fffffff
/* More experts a lane need more registers a thread, scores ahead more shared memory a token. */
#define MAX_THREADS (SELECT && E > 1024 ? 256 : SELECT && (E > 256 || AHEAD) ? 512 : 1024)
/* Warps that route, at most. */
#define ROUTING_WARPS (MAX_THREADS / 32 < MAX_PAIRS / K ? MAX_THREADS / 32 : MAX_PAIRS / K)

/* The table: word place(e) of part w holds the counts of expert e in pairs 128 w to 128 w + 127. Lanes that read words LANE_EXPERTS
   apart meet different banks. */
#define TABLE_PARTS ((MAX_PAIRS + 127) / 128)
#define LANE_EXPERTS ((LOCAL_EXPERTS + 31) / 32)
#define TABLE_PART (LANE_EXPERTS * 33)
DEVICE u32 place(u32 expert) { return expert + expert / 32; }
DEVICE u32 add_bytes(u32 word) { return word * 0x01010101u >> 24; }

/* Rows and distinct experts in one number: of an expert, or of many. */
DEVICE u32 tally(u32 count) { return count | (u32)(count != 0) << 16; }
DEVICE u32 rows_of(u32 sum) { return sum & 0xffff; }
DEVICE u32 distinct_of(u32 sum) { return sum >> 16; }

/* The pairs of an expert in the table. */
template <class Table>
DEVICE u32 count_expert(Table &table, u32 expert) {
    u32 count = 0;
#pragma unroll
    for (u32 part = 0; part < TABLE_PARTS; part++) count += add_bytes(table[part * TABLE_PART + place(expert)]);
    return count;
}

/* The pairs q, by bit, whose expert is below `expert`; for up to 32 pairs. */
template <class Pairs>
DEVICE u32 pairs_below(Pairs &pair_expert, u32 num_pairs, int expert) {
    u32 below = 0;
#pragma unroll
    for (u32 q = 0; q < 32 && q < MAX_PAIRS; q += 4) {
        if (q >= num_pairs) break;
        const auto other = shared_load_4(pair_expert, q);
        below |= other.x < expert ? 1u << q : 0;
        below |= other.y < expert ? 2u << q : 0;
        below |= other.z < expert ? 4u << q : 0;
        below |= other.w < expert ? 8u << q : 0;
    }
    return below;
}

DEVICE int place_pair(const moer_route_args &a, u32 id, u32 token) {
    const u32 local = physical_expert(a.expert_map, id, token) - FIRST_EXPERT;
    return local < LOCAL_EXPERTS ? (int)local : NOT_LOCAL;
}

/* Leaves a pair's local expert for the map warps. */
template <class Pairs, class Table>
DEVICE void leave_pair(Pairs &pair_expert, Table &table, u32 num_pairs, u32 p, int expert) {
    pair_expert[p] = expert;
    if (num_pairs > 32 && expert != NOT_LOCAL) shared_atomic_add(table, p / 128 * TABLE_PART + place((u32)expert), 1u << p % 128 / 32 * 8);
}

/* A pair's share in the running totals, which count experts before placement. */
DEVICE void add_load(const moer_route_args &a, u32 id) {
    if (a.maps.expert_load && id < E) global_atomic_add_64(a.maps.expert_load + id, 1);
}

/* Whether an output is wanted: those that MAPS 1 has are. */
#if MAPS == 1
#define WANTED(output) true
#else
#define WANTED(output) (a.maps.output)
#endif

/* What is left for the block-aligned maps, in shared memory. */
#if MAPS == 2
#define LEAVE(statement) statement
#else
#define LEAVE(statement)
#endif

/* A pair that has a row. */
DEVICE void write_row(const moer_route_args &a, u32 p, u32 row, int expert) {
    if (WANTED(row_to_pair)) a.maps.row_to_pair[row] = (int)p;
    if (WANTED(pair_to_row)) a.maps.pair_to_row[p] = (int)row;
    if (WANTED(row_to_expert)) a.maps.row_to_expert[row] = expert;
}

/* A pair that has none; and the row of a number that none has. */
DEVICE void write_no_row(const moer_route_args &a, u32 p) {
    if (WANTED(pair_to_row)) a.maps.pair_to_row[p] = -1;
}
DEVICE void write_empty_row(const moer_route_args &a, u32 row) {
    if (WANTED(row_to_pair)) a.maps.row_to_pair[row] = -1;
    if (WANTED(row_to_expert)) a.maps.row_to_expert[row] = -1;
}

/* Distinct expert d, whose first row is `row`. */
DEVICE void write_distinct(const moer_route_args &a, u32 d, u32 expert, u32 row) {
    if (WANTED(distinct_experts)) a.maps.distinct_experts[d] = (int)expert;
    if (WANTED(distinct_offsets)) a.maps.distinct_offsets[d] = (int)row;
}

/* What follows the last. */
DEVICE void write_end(const moer_route_args &a, u32 num_distinct, u32 num_rows) {
    if (WANTED(distinct_offsets)) a.maps.distinct_offsets[num_distinct] = (int)num_rows;
    if (WANTED(distinct_count)) a.maps.distinct_count[0] = (int)num_distinct;
#if MAPS == 2
    if (a.maps.expert_offsets) a.maps.expert_offsets[LOCAL_EXPERTS] = (int)num_rows;
#endif
}

KERNEL(moe_route_route, MAX_THREADS, moer_route_args) {
    SHARED(int, pair_expert, MAX_PAIRS); /* local expert of each pair, or NOT_LOCAL */
#if MAX_PAIRS > 32
    SHARED(u32, table, TABLE_PARTS * TABLE_PART);
#else
    SHARED(u32, table, 4);
#endif
    SHARED(u32, words, ROUTING_WARPS * TOKEN_WORDS);
#if MAPS == 2
    SHARED(u32, pair_place, MAX_PAIRS);     /* tally before the pair's expert, and its row */
    SHARED(u32, first_row, MAX_PAIRS + 1);  /* of each distinct expert, then R */
    SHARED(u32, distinct_expert, MAX_PAIRS);
    SHARED(u32, aligned_start, MAX_PAIRS + 1);
    SHARED(u32, totals, 4);                 /* R and the distinct experts, as a tally */
#endif
    const u32 thread = thread_index(), lane = lane_index(), warp = warp_index(), warps = block_threads() / 32, below = (1u << lane) - 1;
    const u32 num_pairs = a.num_tokens * K;
#if MAX_PAIRS > 32
    if (num_pairs > 32) {
        for (u32 i = thread; i < TABLE_PARTS * TABLE_PART; i += warps * 32) table[i] = 0;
        block_barrier();
    }
#endif
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);
    for (u32 p = num_pairs + thread; p < (num_pairs + 3) / 4 * 4; p += warps * 32) pair_expert[p] = NOT_LOCAL;

#if SELECT
    const u32 first_map_warp = a.num_tokens < warps ? a.num_tokens : 0;
#pragma unroll 1
    for (u32 first = 0; first < a.num_tokens; first += warps) { /* all warps take as many turns */
        const u32 token = first + warp;
        const bool mine = token < a.num_tokens, valid = token < num_valid, last = first + warps >= a.num_tokens;
#if AHEAD
        const u32 left = a.num_tokens - first, units = (left < warps ? left : warps) * EXPERTS_PER_LANE;
        if (first) block_barrier(); /* the words of the tokens before are free */
        for (u32 u = warp; u < units; u += warps) score_ahead(a, first + u / EXPERTS_PER_LANE, u % EXPERTS_PER_LANE, words, u / EXPERTS_PER_LANE * TOKEN_WORDS);
        block_barrier();
#endif
        selection chosen = {};
        if (mine) {
            if (valid) chosen = choose_experts<AHEAD>(a, token, words, warp * TOKEN_WORDS);
#pragma unroll
            for (u32 s = 0; s < SLOTS_PER_LANE; s++)
                if (!valid && s * 32 + lane < K) leave_pair(pair_expert, table, num_pairs, token * K + s * 32 + lane, NOT_LOCAL);
                else if (valid && chosen.slot[s] < K) leave_pair(pair_expert, table, num_pairs, token * K + chosen.slot[s], place_pair(a, chosen.id[s], token));
        }
        if (last) block_barrier();
        else warp_barrier();
        if (mine) {
            if (valid) put_in_slots(words, warp * TOKEN_WORDS, chosen);
#pragma unroll
            for (u32 s = 0; s < SLOTS_PER_LANE; s++)
                if (valid && s * 32 + lane < K) add_load(a, chosen.id[s]);
            write_token(a, token, valid, chosen);
        }
    }
#else
    const u32 first_map_warp = 0;
    for (u32 p = thread; p < num_pairs; p += warps * 32) {
        int expert = NOT_LOCAL;
        if (p < num_valid * K) {
            const u32 id = (u32)a.ids[p];
            expert = place_pair(a, id, p / K);
            add_load(a, id);
        }
        leave_pair(pair_expert, table, num_pairs, p, expert);
    }
    block_barrier();
#endif

    if (warp >= first_map_warp) {
        const u32 map_warps = warps - first_map_warp, map_warp = warp - first_map_warp;
        if (num_pairs <= 32) {
            /* The first share is the pairs', the others 32 experts each. */
            u32 shares = 1;
#if MAPS == 2
            if (a.maps.expert_offsets) shares += LANE_EXPERTS;
#endif
#pragma unroll 1
            for (u32 share = map_warp; share < shares; share += map_warps) {
                int expert = (int)((share - 1) * 32 + lane);
                if (share == 0) expert = lane < num_pairs ? pair_expert[lane] : NOT_LOCAL;
                const u32 smaller = pairs_below(pair_expert, num_pairs, expert);
                if (share != 0) {
#if MAPS == 2
                    if (expert < LOCAL_EXPERTS) a.maps.expert_offsets[expert] = (int)popcount(smaller);
#endif
                    continue;
                }
                const u32 peers = warp_match((u32)expert), earlier = popcount(peers & below), locals = warp_ballot(expert != NOT_LOCAL);
                const u32 heads = warp_ballot(expert != NOT_LOCAL && earlier == 0);
                const u32 num_rows = popcount(locals), num_distinct = popcount(heads), start = popcount(smaller), d = popcount(smaller & heads);
                if (expert != NOT_LOCAL) {
                    write_row(a, lane, start + earlier, expert);
                    LEAVE(pair_place[lane] = d << 16 | (start + earlier));
                    if (earlier == 0) {
                        write_distinct(a, d, (u32)expert, start);
                        LEAVE(first_row[d] = start);
                        LEAVE(distinct_expert[d] = (u32)expert);
                    }
                } else if (lane < num_pairs) {
                    write_no_row(a, lane);
                }
                if (lane >= num_rows && lane < num_pairs) write_empty_row(a, lane);
                if (lane == 0) {
                    write_end(a, num_distinct, num_rows);
                    LEAVE(first_row[num_distinct] = num_rows);
                    LEAVE(totals[0] = num_distinct << 16 | num_rows);
                }
            }
        }
#if MAX_PAIRS > 32
        else {
            const u32 first = lane * LANE_EXPERTS;
            u32 own = 0;
#pragma unroll 8
            for (u32 i = 0; i < LANE_EXPERTS; i++) own += tally(count_expert(table, first + i));
            u32 sum = own;
#pragma unroll
            for (u32 delta = 1; delta < 32; delta *= 2) {
                const u32 other = warp_shuffle_up(sum, delta);
                if (lane >= delta) sum += other;
            }
            const u32 total = warp_shuffle(sum, 31), num_rows = rows_of(total);
            sum -= own; /* before the lane's experts */

#pragma unroll 1
            for (u32 group = map_warp; group * 32 < num_pairs; group += map_warps) {
                const u32 p = group * 32 + lane;
                const int expert = p < num_pairs ? pair_expert[p] : NOT_LOCAL;
                const bool local = expert != NOT_LOCAL;
                const u32 e = local ? (u32)expert : 0, owner = e / LANE_EXPERTS;
                u32 start = warp_shuffle(sum, owner), earlier = popcount(warp_match((u32)expert) & below);
#pragma unroll 8
                for (u32 i = 0; i + 1 < LANE_EXPERTS; i++) {
                    const u32 other = owner * LANE_EXPERTS + i;
                    if (other < e) start += tally(count_expert(table, other));
                }
#pragma unroll
                for (u32 part = 0; part < TABLE_PARTS; part++) {
                    const u32 word = table[part * TABLE_PART + place(e)];
                    if (part < group / 4) earlier += add_bytes(word);
                    if (part == group / 4) earlier += add_bytes(word & ((1u << group % 4 * 8) - 1));
                }
                if (local) {
                    write_row(a, p, rows_of(start) + earlier, expert);
                    LEAVE(pair_place[p] = start + earlier);
                } else if (p < num_pairs) {
                    write_no_row(a, p);
                }
                if (p >= num_rows && p < num_pairs) write_empty_row(a, p);
            }

#pragma unroll 8
            for (u32 i = 0; i < LANE_EXPERTS; i++) {
                const u32 count = count_expert(table, first + i);
                if (i % map_warps == map_warp) {
#if MAPS == 2
                    if (a.maps.expert_offsets && first + i < LOCAL_EXPERTS) a.maps.expert_offsets[first + i] = (int)rows_of(sum);
#endif
                    if (count) {
                        write_distinct(a, distinct_of(sum), first + i, rows_of(sum));
                        LEAVE(first_row[distinct_of(sum)] = rows_of(sum));
                        LEAVE(distinct_expert[distinct_of(sum)] = first + i);
                    }
                }
                sum += tally(count);
            }
            if (map_warp == 0 && lane == 0) {
                write_end(a, distinct_of(total), num_rows);
                LEAVE(first_row[distinct_of(total)] = num_rows);
                LEAVE(totals[0] = total);
            }
        }
#endif
    }

#if MAPS == 2
    if (a.maps.block_size) {
        const u32 block = a.maps.block_size;
        if (a.maps.aligned_row_to_pair)
            for (u32 i = thread; i < a.maps.aligned_capacity; i += warps * 32) a.maps.aligned_row_to_pair[i] = (int)num_pairs;
        block_barrier();
        const u32 num_distinct = distinct_of(totals[0]);
        if (warp == 0) { /* one scan, 32 distinct experts at a time */
            u32 start = 0;
#pragma unroll 1
            for (u32 d = lane; d < (num_distinct + 32) / 32 * 32; d += 32) {
                const u32 own = d < num_distinct ? (first_row[d + 1] - first_row[d] + block - 1) / block * block : 0;
                u32 sum = own;
#pragma unroll
                for (u32 delta = 1; delta < 32; delta *= 2) {
                    const u32 other = warp_shuffle_up(sum, delta);
                    if (lane >= delta) sum += other;
                }
                if (d <= num_distinct) aligned_start[d] = start + sum - own;
                start += warp_shuffle(sum, 31);
            }
        }
        block_barrier();
        const u32 aligned_rows = aligned_start[num_distinct];
        if (thread == 0 && a.maps.aligned_rows) a.maps.aligned_rows[0] = (int)aligned_rows;
        if (a.maps.aligned_row_to_pair)
            for (u32 p = thread; p < num_pairs; p += warps * 32)
                if (pair_expert[p] != NOT_LOCAL) {
                    const u32 d = distinct_of(pair_place[p]);
                    a.maps.aligned_row_to_pair[aligned_start[d] + rows_of(pair_place[p]) - first_row[d]] = (int)p;
                }
        if (a.maps.block_to_expert)
            for (u32 i = thread; i < a.maps.aligned_capacity / block; i += warps * 32) {
                int expert = -1;
                if (i * block < aligned_rows) { /* last distinct expert that starts at or before the block */
                    u32 low = 0, high = num_distinct;
                    while (high - low > 1) {
                        const u32 middle = (low + high) / 2;
                        if (aligned_start[middle] <= i * block) low = middle;
                        else high = middle;
                    }
                    expert = (int)distinct_expert[low];
                }
                a.maps.block_to_expert[i] = expert;
            }
    }
#endif
}
