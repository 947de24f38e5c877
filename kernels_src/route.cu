/*
  route.cu: router and maps of a small batch in one launch of one block: logits [T, E + S] -> ids, weights, the sort of the
  T * k <= 512 pairs by expert. With SELECT 0 the ids are given.

  What takes time is the chain of things that wait for each other, not their number. So a warp chooses the experts of a token (select.h)
  and leaves in shared memory which pairs chose which local expert. Only after the block's barrier the first warps compute and write the
  weights, of as many tokens as a warp has lanes for, while the others (the map warps; all, where each has tokens) find the maps from what
  lies there, without waiting for each other. A map warp has 32 experts, one a lane. The first row of a lane's expert is the number of
  rows of earlier warps' experts, kept beside the masks, and of earlier lanes. Then the lane writes its pairs, the bits of its expert's
  mask, in order; or, beyond 32 pairs, threads have pairs after another barrier, and count the bits before theirs.

  Masks take LOCAL_EXPERTS * MAX_PAIRS bits. Where that is too much, a byte for each 32 pairs counts how often they chose an expert, four
  in a word; every map warp adds up all of them for itself, and takes the pairs 32 at a time.

  Row r of a pair is the number of pairs that sort before it. Pairs whose expert isn't local have no row.

  Constants: E, K; with SELECT those of select.h; MAPS: 1 for what the layer's next kernels read, 2 for every output that isn't null;
  FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h; MAX_PAIRS, a multiple of 32, at most 512.
  Threads: any multiple of 32 up to MAX_THREADS.
*/
#include "device.h"
#include "args.h"
#include "scan.h"
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
/* More experts a lane need more registers a thread, scores ahead more shared memory a token, and local experts a table. */
#define MOST_EXPERTS (E > LOCAL_EXPERTS ? E : LOCAL_EXPERTS)
#define MAX_THREADS (!SELECT ? 1024 : MOST_EXPERTS > 1024 ? 256 : MOST_EXPERTS > 512 ? 384 : MOST_EXPERTS > 256 ? 640 : AHEAD ? 768 : 1024)
/* Warps that route, at most. */
#define WARPS_ROUTING (MAX_THREADS == 640 || MAX_THREADS == 768 ? 16 : MAX_THREADS / 32)
#define ROUTING_WARPS (WARPS_ROUTING < MAX_PAIRS / K ? WARPS_ROUTING : MAX_PAIRS / K)

/* By masks: word w * MASKS + e of the table has a bit for each of the pairs 32 w to 32 w + 31 that chose expert e. */
#define EXPERT_WARPS ((LOCAL_EXPERTS + 31) / 32) /* warps' turns */
#define MASKS (EXPERT_WARPS * 32)
#define BY_MASKS (MASKS / 32 * MAX_PAIRS <= 4096)

/* Otherwise word place(e) of part w holds the counts of expert e in pairs 128 w to 128 w + 127. Lanes that read words LANE_EXPERTS
   apart meet different banks. */
#define TABLE_PARTS ((MAX_PAIRS + 127) / 128)
#define LANE_EXPERTS ((LOCAL_EXPERTS + 31) / 32)
#define TABLE_PART (LANE_EXPERTS * 33)
#define TABLE_WORDS (BY_MASKS ? MASKS * (MAX_PAIRS / 32) : TABLE_PARTS * TABLE_PART)

/* Rows and distinct experts in one number: a tally, of an expert or of many. */
DEVICE u32 rows_of(u32 sum) { return sum & 0xffff; }
DEVICE u32 distinct_of(u32 sum) { return sum >> 16; }

#if !BY_MASKS
DEVICE u32 place(u32 expert) { return expert + expert / 32; }
DEVICE u32 add_bytes(u32 word) { return word * 0x01010101u >> 24; }
DEVICE u32 tally(u32 count) { return count | (u32)(count != 0) << 16; }

/* The pairs of an expert in the table. */
template <class Table>
DEVICE u32 count_expert(Table &table, u32 expert) {
    u32 count = 0;
#pragma unroll
    for (u32 part = 0; part < TABLE_PARTS; part++) count += add_bytes(table[part * TABLE_PART + place(expert)]);
    return count;
}
#endif

DEVICE u32 place_pair(const moer_route_args &a, u32 id, u32 token) {
    const u32 local = physical_expert(a.expert_map, id, token) - FIRST_EXPERT;
    return local < LOCAL_EXPERTS ? local : NOT_LOCAL;
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
DEVICE void write_row(const moer_route_args &a, u32 p, u32 row, u32 expert) {
    if (WANTED(row_to_pair)) a.maps.row_to_pair[row] = (int)p;
    if (WANTED(pair_to_row)) a.maps.pair_to_row[p] = (int)row;
    if (WANTED(row_to_expert)) a.maps.row_to_expert[row] = (int)expert;
}

/* A pair that has none; and the row of a number that none has. */
DEVICE void write_no_row(const moer_route_args &a, u32 p) {
    if (WANTED(pair_to_row)) a.maps.pair_to_row[p] = -1;
}
DEVICE void write_empty_row(const moer_route_args &a, u32 row) {
    if (WANTED(row_to_pair)) a.maps.row_to_pair[row] = -1;
    if (WANTED(row_to_expert)) a.maps.row_to_expert[row] = -1;
}

/* Leaves a pair's local expert for the map warps. */
template <class Table, class Warps, class Pairs>
DEVICE void leave_pair(const moer_route_args &a, Table &table, Warps &warp_rows, Warps &warp_experts, Pairs &pair_expert, u32 p,
                       u32 expert) {
    pair_expert[p] = expert;
#if BY_MASKS
    if (expert == NOT_LOCAL) {
        write_no_row(a, p);
        return;
    }
    shared_atomic_or(table, p / 32 * MASKS + expert, 1u << p % 32);
    shared_atomic_or(warp_experts, expert / 32, 1u << expert % 32);
    shared_atomic_add(warp_rows, expert / 32, 1);
#else
    if (expert != NOT_LOCAL) shared_atomic_add(table, p / 128 * TABLE_PART + place(expert), 1u << p % 128 / 32 * 8);
#endif
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
    SHARED(u32, table, TABLE_WORDS);
    SHARED(u32, warp_rows, EXPERT_WARPS);    /* of each 32 experts, how many pairs chose them, */
    SHARED(u32, warp_experts, EXPERT_WARPS); /* and which were chosen, as bits */
    SHARED(u32, pair_expert, MAX_PAIRS);     /* local expert of each pair, or NOT_LOCAL */
#if BY_MASKS
    SHARED(u32, expert_start, MASKS); /* tally before each expert */
#endif
    SHARED(u32, words, ROUTING_WARPS * TOKEN_WORDS);
#if MAPS == 2
    SHARED(u32, pair_place, MAX_PAIRS);     /* where there is a row: tally before the pair's expert, plus the row among those of the expert */
    SHARED(u32, first_row, MAX_PAIRS + 1);  /* of each distinct expert, then R */
    SHARED(u32, distinct_expert, MAX_PAIRS);
    SHARED(u32, aligned_start, MAX_PAIRS + 1);
    SHARED(u32, totals, 4);                 /* R and the distinct experts, as a tally */
#endif
    const u32 thread = thread_index(), lane = lane_index(), warp = warp_index(), warps = block_threads() / 32, below = (1u << lane) - 1;
    const u32 num_pairs = a.num_tokens * K, pair_words = (num_pairs + 31) / 32;
    /* Warps that route have something to wait for first, if there are others. */
    const u32 busy_warps = SELECT && a.num_tokens < warps ? a.num_tokens : 0;
    if (warp >= busy_warps) {
        const u32 words_used = BY_MASKS ? MASKS * (pair_words ? pair_words : 1) : TABLE_WORDS, step = (warps - busy_warps) * 32;
        for (u32 i = thread - busy_warps * 32; i < words_used; i += step) table[i] = 0;
        for (u32 i = thread - busy_warps * 32; i < EXPERT_WARPS; i += step) warp_rows[i] = warp_experts[i] = 0;
    }
    wait_for_previous_kernels();
    let_next_kernel_start();

#if SELECT
    const u32 routing_warps = warps < WARPS_ROUTING ? warps : WARPS_ROUTING;
    u32 first_map_warp = 0;
    const int num_valid = load_valid_tokens(a.num_valid_tokens, a.num_tokens);
#pragma unroll 1
    for (u32 first = 0; first == 0 || first < a.num_tokens; first += routing_warps) { /* all warps take as many turns */
        const u32 left = a.num_tokens - first, here = left < routing_warps ? left : routing_warps, token = first + warp;
        const bool mine = warp < here;
        u32 key[EXPERTS_PER_LANE];
#if AHEAD
        if (first) block_barrier(); /* the words of the tokens before are free */
        score_ahead(a, first, here * EXPERTS_PER_LANE, warps, words);
        block_barrier(); /* also between the empty table and what comes into it */
#else
        if (mine) load_keys(a, token, key);
        if (LEFT || first == 0) block_barrier(); /* the table is empty, the words of the tokens before are free */
#endif
        selection chosen = {};
        if (mine) {
            const bool valid = (int)token < num_valid;
            if (valid) chosen = choose_experts<AHEAD>(a, token, key, words, warp * TOKEN_WORDS);
#pragma unroll
            for (u32 s = 0; s < SLOTS_PER_LANE; s++) {
                const u32 slot = valid ? chosen.slot[s] : s * 32 + lane;
                if (slot >= K) continue;
                const u32 expert = valid ? place_pair(a, chosen.id[s], token) : NOT_LOCAL;
                leave_pair(a, table, warp_rows, warp_experts, pair_expert, token * K + slot, expert);
            }
        }
        if (LEFT || first + routing_warps >= a.num_tokens) block_barrier();
        if (mine) {
#pragma unroll
            for (u32 s = 0; s < SLOTS_PER_LANE; s++)
                if ((int)token < num_valid && chosen.slot[s] < K) add_load(a, chosen.id[s]);
        }
        const u32 done = warp * TOKENS_A_WARP;
        if (done < here) write_tokens(a, first + done, here - done, num_valid, words, done * TOKEN_WORDS, TOKEN_WORDS, chosen);
        first_map_warp = (here + TOKENS_A_WARP - 1) / TOKENS_A_WARP; /* those that have no tokens to write, if there are any */
    }
    if (first_map_warp == warps) first_map_warp = 0;
#else
    const u32 first_map_warp = 0, num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);
    block_barrier(); /* the table is empty */
    for (u32 p = thread; p < num_pairs; p += warps * 32) {
        u32 expert = NOT_LOCAL;
        if (p < num_valid * K) {
            const u32 id = (u32)a.ids[p];
            expert = place_pair(a, id, p / K);
            add_load(a, id);
        }
        leave_pair(a, table, warp_rows, warp_experts, pair_expert, p, expert);
    }
    block_barrier();
#endif

    if (warp >= first_map_warp) {
        const u32 map_warps = warps - first_map_warp, map_warp = warp - first_map_warp;
        u32 total = 0;
#if BY_MASKS
#pragma unroll 1
        for (u32 w = map_warp; w < EXPERT_WARPS; w += map_warps) {
            const u32 e = w * 32 + lane;
            const u32 first_mask = table[e];
            u32 count = popcount(first_mask), all = 0, earlier = 0;
            for (u32 i = lane; i < EXPERT_WARPS; i += 32) {
                const u32 sum = popcount(warp_experts[i]) << 16 | warp_rows[i];
                all += sum;
                earlier += i < w ? sum : 0;
            }
#pragma unroll 4
            for (u32 i = 1; i < pair_words; i++) count += popcount(table[i * MASKS + e]);
            total = warp_add(all);
            earlier = warp_add(earlier);
            u32 row = scan_warp(count) + rows_of(earlier) - count;
            const u32 d = distinct_of(earlier) + popcount(warp_experts[w] & below);
#if MAPS == 2
            if (a.maps.expert_offsets && e < LOCAL_EXPERTS) a.maps.expert_offsets[e] = (int)row;
#endif
            if (pair_words > 1) expert_start[e] = d << 16 | row;
            if (count) {
                write_distinct(a, d, e, row);
                LEAVE(first_row[d] = row);
                LEAVE(distinct_expert[d] = e);
            }
            if (pair_words == 1) {
#pragma unroll 1
                for (u32 left = first_mask; left; left &= left - 1) {
                    const u32 p = popcount(~left & (left - 1)); /* the lowest bit */
                    write_row(a, p, row, e);
                    LEAVE(pair_place[p] = d << 16 | row);
                    row++;
                }
            }
        }
#else
        const u32 first = lane * LANE_EXPERTS;
        u32 own = 0;
#pragma unroll 8
        for (u32 i = 0; i < LANE_EXPERTS; i++) own += tally(count_expert(table, first + i));
        u32 sum = scan_warp(own);
        total = warp_shuffle(sum, 31);
        sum -= own; /* before the lane's experts */

#pragma unroll 1
        for (u32 group = map_warp; group < pair_words; group += map_warps) {
            const u32 p = group * 32 + lane, expert = p < num_pairs ? pair_expert[p] : NOT_LOCAL;
            const bool local = expert != NOT_LOCAL;
            const u32 e = local ? expert : 0, owner = e / LANE_EXPERTS;
            u32 start = warp_shuffle(sum, owner), earlier = popcount(warp_match(expert) & below);
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
                write_row(a, p, rows_of(start) + earlier, e);
                LEAVE(pair_place[p] = start + earlier);
            } else if (p < num_pairs) {
                write_no_row(a, p);
            }
        }

        u32 turn = 0; /* of the map warps, which take the experts of a lane in turns */
#pragma unroll 8
        for (u32 i = 0; i < LANE_EXPERTS; i++) {
            const u32 count = count_expert(table, first + i);
            if (turn == map_warp) {
#if MAPS == 2
                if (a.maps.expert_offsets && first + i < LOCAL_EXPERTS) a.maps.expert_offsets[first + i] = (int)rows_of(sum);
#endif
                if (count) {
                    write_distinct(a, distinct_of(sum), first + i, rows_of(sum));
                    LEAVE(first_row[distinct_of(sum)] = rows_of(sum));
                    LEAVE(distinct_expert[distinct_of(sum)] = first + i);
                }
            }
            turn = turn + 1 == map_warps ? 0 : turn + 1;
            sum += tally(count);
        }
#endif
        if (map_warp == 0) { /* rows that no pair has, and what follows the last */
            for (u32 r = rows_of(total) + lane; r < num_pairs; r += 32) write_empty_row(a, r);
            if (lane == 0) {
                write_end(a, distinct_of(total), rows_of(total));
                LEAVE(first_row[distinct_of(total)] = rows_of(total));
                LEAVE(totals[0] = total);
            }
        }
    }

#if BY_MASKS
    if (pair_words > 1) { /* a thread a pair */
        block_barrier();
        for (u32 p = thread; p < num_pairs; p += warps * 32) {
            const u32 e = pair_expert[p], word = p / 32;
            if (e == NOT_LOCAL) continue;
            u32 place = expert_start[e] + popcount(table[word * MASKS + e] & below);
#pragma unroll 4
            for (u32 i = 0; i < word; i++) place += popcount(table[i * MASKS + e]);
            write_row(a, p, rows_of(place), e);
            LEAVE(pair_place[p] = place);
        }
    }
#endif

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
