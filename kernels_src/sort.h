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

/* ---- the counts of shares of consecutive pairs: [num_blocks, COUNT_VECTORS, 8], 16 bits each ----
   Vector v has the experts v, v + COUNT_VECTORS and so on: threads that take neighbours add to neighbours. A share has under 8192 pairs, so that
   sums over eight of them have 16 bits, too. */

#define COUNT_VECTORS ((LOCAL_EXPERTS + 7) / 8)

/* A kernel that counts each local expert's pairs from `first` to before `end`. `counts` has 8 * COUNT_VECTORS words. */
template <class Counts>
DEVICE void count_share(const moer_maps_args &a, Counts &counts, u32 first, u32 end) {
    const u32 thread = thread_index();
    for (u32 e = thread; e < 8 * COUNT_VECTORS; e += SORT_THREADS) counts[e] = 0;
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
    for (u32 v = thread; v < COUNT_VECTORS; v += SORT_THREADS) {
        u32x4 words;
#pragma unroll
        for (u32 w = 0; w < 4; w++) words.v[w] = counts[v + 2 * w * COUNT_VECTORS] | counts[v + (2 * w + 1) * COUNT_VECTORS] << 16;
        store_16(a.block_counts + (block_index_x() * COUNT_VECTORS + v) * 4, words);
    }
}

/* Adds the halves of a word to the counts of two experts; 0 where there is no such expert. */
template <class Counts>
DEVICE void add_word(Counts &counts, u32 expert, u32 word) {
    if (word & 0xffffu) shared_atomic_add(counts, expert, word & 0xffffu);
    if (word >> 16) shared_atomic_add(counts, expert + COUNT_VECTORS, word >> 16);
}

/* Adds up the counts of the shares before this block's, and of the others. A thread takes eight shares' at a time, with no branch between
   the loads: so they are under way together. */
template <class Before, class Others>
DEVICE void add_counts(const moer_maps_args &a, Before &before, Others &others) {
    const u32 most = SORT_THREADS / COUNT_VECTORS, wanted = (a.num_blocks + 7) / 8, parts = wanted < most ? wanted : most;
    const u32 part = thread_index() / COUNT_VECTORS, vector = thread_index() % COUNT_VECTORS, shares = (a.num_blocks + parts - 1) / parts;
    const u32 first = part * shares, end = first + shares < a.num_blocks ? first + shares : a.num_blocks;
    if (part >= parts) return;
    for (u32 b = first; b < end; b += 8) {
        u32x4 count[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            count[i] = {};
            if (b + i < end) count[i] = load_16(a.block_counts + ((b + i) * COUNT_VECTORS + vector) * 4);
        }
#pragma unroll
        for (u32 w = 0; w < 4; w++) {
            u32 all = 0, earlier = 0;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                all += count[i].v[w];
                earlier += b + i < block_index_x() ? count[i].v[w] : 0;
            }
            add_word(before, vector + 2 * w * COUNT_VECTORS, earlier);
            add_word(others, vector + 2 * w * COUNT_VECTORS, all - earlier);
        }
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
