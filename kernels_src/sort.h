/*
  sort.h: what the two sorts of large batches have in common, maps.cu and maps_cub.cu: which pairs have rows, what is counted, and the
  block-aligned form. How pairs are ranked is theirs.

  Constants: those of maps.cu, and SORT_THREADS (threads a block).
*/
#define NOT_LOCAL 0xffffffffu

/* Rows, distinct experts and aligned rows. */
struct sums { u32 rows, distinct, aligned; };

/* Local expert of a pair, or NOT_LOCAL. */
DEVICE u32 local_expert(const moer_maps_args &a, u64 pair, u32 num_valid_pairs) {
    if (pair >= num_valid_pairs) return NOT_LOCAL;
    const u32 local = physical_expert(a.expert_map, (u32)a.ids[pair], (u32)pair / K) - FIRST_EXPERT;
    return local < LOCAL_EXPERTS ? local : NOT_LOCAL;
}

DEVICE u32 valid_pairs(const moer_maps_args &a) { return valid_tokens(a.num_valid_tokens, a.num_pairs / K) * K; }

/* A pair's share in the running totals, which count experts before placement. */
DEVICE void add_load(const moer_maps_args &a, u64 pair) {
    if (a.maps.expert_load && (u32)a.ids[pair] < E) global_atomic_add_64(a.maps.expert_load + a.ids[pair], 1);
}

/* Pairs of each local expert from `first` on, `share` of them. */
template <class Counts>
DEVICE void count_share(const moer_maps_args &a, Counts &counts, u64 first, u32 share) {
    const u32 num_valid = valid_pairs(a);
    for (u32 e = thread_index(); e < LOCAL_EXPERTS; e += SORT_THREADS) counts[e] = 0;
    block_barrier();
    for (u32 i = thread_index(); i < share && first + i < num_valid; i += SORT_THREADS) {
        const u32 expert = local_expert(a, first + i, num_valid);
        if (expert != NOT_LOCAL) shared_atomic_add(counts, expert, 1);
        add_load(a, first + i);
    }
    block_barrier();
    for (u32 e = thread_index(); e < LOCAL_EXPERTS; e += SORT_THREADS) a.block_counts[(u64)block_index_x() * LOCAL_EXPERTS + e] = (int)counts[e];
}

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

/* The padding of every expert's aligned rows, a warp an expert so that lanes write neighbours, and the experts of blocks. */
template <class Starts, class Aligned>
DEVICE void finish_aligned(const moer_maps_args &a, Starts &starts, Aligned &aligned) {
    const u32 thread = block_index_x() * SORT_THREADS + thread_index(), threads = grid_blocks_x() * SORT_THREADS;
    const u32 aligned_rows = aligned[LOCAL_EXPERTS];
    if (a.maps.aligned_row_to_pair) {
        for (u32 e = thread / 32; e < LOCAL_EXPERTS; e += threads / 32) {
            const u32 end = aligned[e + 1];
            for (u32 i = aligned[e] + (starts[e + 1] - starts[e]) + lane_index(); i < end; i += 32) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;
        }
        for (u32 i = aligned_rows + thread; i < a.maps.aligned_capacity; i += threads) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;
    }
    if (a.maps.block_to_expert)
        for (u32 i = thread; i < a.maps.aligned_capacity / a.maps.block_size; i += threads) {
            int expert = -1;
            if (i * a.maps.block_size < aligned_rows) { /* last expert whose blocks start at or before this one */
                u32 low = 0, high = LOCAL_EXPERTS;
                while (high - low > 1) {
                    const u32 middle = (low + high) / 2;
                    if (aligned[middle] <= i * a.maps.block_size) low = middle;
                    else high = middle;
                }
                expert = (int)low;
            }
            a.maps.block_to_expert[i] = expert;
        }
}

