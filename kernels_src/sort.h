/*
  sort.h: what the two sorts of large batches have in common, maps.cu and maps_cub.cu: which pairs have rows, what is counted and added
  up, and the block-aligned form. How pairs are ranked is theirs.

  Constants: those of maps.cu, and SORT_THREADS (threads a block).
*/
#define NOT_LOCAL 0xffffffffu

/* Rows, distinct experts and aligned rows. */
struct sums { u32 rows, distinct, aligned; };

DEVICE u32 valid_pairs(const moer_maps_args &a) { return valid_tokens(a.num_valid_tokens, a.num_pairs / K) * K; }

/* Local expert of a pair with this id, or NOT_LOCAL, which is also an id that no expert has. */
DEVICE u32 local_expert(const moer_maps_args &a, u32 id, u32 pair, u32 num_valid_pairs) {
    if (pair >= num_valid_pairs) return NOT_LOCAL;
    const u32 local = physical_expert(a.expert_map, id, pair / K) - FIRST_EXPERT;
    return local < LOCAL_EXPERTS ? local : NOT_LOCAL;
}

/* A pair's share in the running totals, which count experts before placement. */
DEVICE void add_load(const moer_maps_args &a, u32 id, u32 pair, u32 num_valid_pairs) {
    if (a.maps.expert_load && pair < num_valid_pairs && id < E) global_atomic_add_64(a.maps.expert_load + id, 1);
}

/* ---- the counts of shares of consecutive pairs: [num_blocks, COUNT_WORDS], two experts a word, so that shares have under 65,536 pairs ---- */

#define COUNT_WORDS ((LOCAL_EXPERTS + 1) / 2)

/* A kernel that counts each local expert's pairs from `first` to before `end`. `counts` has 2 * COUNT_WORDS words. */
template <class Counts>
DEVICE void count_share(const moer_maps_args &a, Counts &counts, u32 first, u32 end) {
    const u32 thread = thread_index();
    for (u32 e = thread; e < 2 * COUNT_WORDS; e += SORT_THREADS) counts[e] = 0;
    block_barrier();
    wait_for_previous_kernels();
    let_next_kernel_start();
    const u32 num_valid = valid_pairs(a);
    for (u32 pair = first + thread; pair < end; pair += 4 * SORT_THREADS) {
        u32 id[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) id[i] = pair + i * SORT_THREADS < end ? load_4(a.ids + pair + i * SORT_THREADS) : NOT_LOCAL;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 expert = local_expert(a, id[i], pair + i * SORT_THREADS, num_valid);
            if (expert != NOT_LOCAL) shared_atomic_add(counts, expert, 1);
            add_load(a, id[i], pair + i * SORT_THREADS, num_valid);
        }
    }
    block_barrier();
    for (u32 w = thread; w < COUNT_WORDS; w += SORT_THREADS) {
        const auto pairs = shared_load_2(counts, 2 * w);
        a.block_counts[block_index_x() * COUNT_WORDS + w] = (int)((u32)pairs.x | (u32)pairs.y << 16);
    }
}

/* Adds the counts of shares `first` to `end` to those of each expert. Loads are independent, and no branch stands between them: then
   they are under way together. */
template <class Counts>
DEVICE void add_counts_of(const moer_maps_args &a, Counts &counts, u32 word, u32 first, u32 end) {
    u32 low = 0, high = 0;
    for (u32 b = first; b < end; b += 16) {
        u32 count[16];
#pragma unroll
        for (u32 i = 0; i < 16; i++) count[i] = b + i < end ? load_4(a.block_counts + (b + i) * COUNT_WORDS + word) : 0;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            low += count[i] & 0xffffu;
            high += count[i] >> 16;
        }
    }
    if (low) shared_atomic_add(counts, word * 2, low);
    if (high) shared_atomic_add(counts, word * 2 + 1, high); /* 0 where there is no such expert */
}

/* Adds up the counts of the shares before this block's, and of the others. Threads share the shares where there are more of them than words. */
template <class Before, class Others>
DEVICE void add_counts(const moer_maps_args &a, Before &before, Others &others) {
    const u32 row_threads = COUNT_WORDS < SORT_THREADS ? (COUNT_WORDS + 31) / 32 * 32 : SORT_THREADS, parts = SORT_THREADS / row_threads;
    const u32 thread = thread_index(), block = block_index_x(), shares = (a.num_blocks + parts - 1) / parts;
    const u32 first = thread / row_threads * shares, end = first + shares < a.num_blocks ? first + shares : a.num_blocks;
    if (thread >= parts * row_threads) return;
    for (u32 word = thread % row_threads; word < COUNT_WORDS; word += row_threads) {
        add_counts_of(a, before, word, first, block < end ? block : end);
        add_counts_of(a, others, word, first > block ? first : block, end);
    }
}

/* ---- what has an entry per expert, and the block-aligned form ---- */

DEVICE u32 align_rows(const moer_maps_args &a, u32 rows) { return a.maps.block_size ? (rows + a.maps.block_size - 1) / a.maps.block_size * a.maps.block_size : 0; }

/* Where an expert's rows are, and what else has an entry per expert. `at`: sums over the experts before it, and then with it. */
template <class Starts, class Aligned>
DEVICE void place_expert(const moer_maps_args &a, Starts &starts, Aligned &aligned, u32 e, u32 count, sums &at) {
    starts[e] = at.rows;
    aligned[e] = at.aligned;
    if (block_index_x() == 0) {
        if (a.maps.expert_offsets) a.maps.expert_offsets[e] = (int)at.rows;
        if (count && a.maps.distinct_experts) a.maps.distinct_experts[at.distinct] = (int)e;
        if (count && a.maps.distinct_offsets) a.maps.distinct_offsets[at.distinct] = (int)at.rows;
    }
    at.rows += count;
    at.distinct += count != 0;
    at.aligned += align_rows(a, count);
}

/* The same for the end, by one thread. */
template <class Starts, class Aligned>
DEVICE void place_end(const moer_maps_args &a, Starts &starts, Aligned &aligned, const sums &total) {
    starts[LOCAL_EXPERTS] = total.rows;
    aligned[LOCAL_EXPERTS] = total.aligned;
    if (block_index_x() == 0) {
        if (a.maps.expert_offsets) a.maps.expert_offsets[LOCAL_EXPERTS] = (int)total.rows;
        if (a.maps.distinct_offsets) a.maps.distinct_offsets[total.distinct] = (int)total.rows;
        if (a.maps.distinct_count) a.maps.distinct_count[0] = (int)total.distinct;
        if (a.maps.block_size && a.maps.aligned_rows) a.maps.aligned_rows[0] = (int)total.aligned;
    }
}

/* The padding of every expert's aligned rows, and the expert of every block: a warp an expert, so that lanes write neighbours. */
template <class Starts, class Aligned>
DEVICE void finish_aligned(const moer_maps_args &a, Starts &starts, Aligned &aligned) {
    const u32 thread = block_index_x() * SORT_THREADS + thread_index(), threads = grid_blocks_x() * SORT_THREADS;
    const u32 block_size = a.maps.block_size, aligned_rows = aligned[LOCAL_EXPERTS];
    for (u32 e = thread / 32; e < LOCAL_EXPERTS; e += threads / 32) {
        const u32 begin = aligned[e], end = aligned[e + 1];
        if (a.maps.aligned_row_to_pair)
            for (u32 i = begin + (starts[e + 1] - starts[e]) + lane_index(); i < end; i += 32) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;
        if (a.maps.block_to_expert)
            for (u32 i = begin / block_size + lane_index(); i < end / block_size; i += 32) a.maps.block_to_expert[i] = (int)e;
    }
    if (a.maps.aligned_row_to_pair)
        for (u32 i = aligned_rows + thread; i < a.maps.aligned_capacity; i += threads) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;
    if (a.maps.block_to_expert)
        for (u32 i = aligned_rows / block_size + thread; i < a.maps.aligned_capacity / block_size; i += threads) a.maps.block_to_expert[i] = -1;
}
