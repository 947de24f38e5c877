/*
  copied.h: a tile of weights in shared memory, as it lies in global memory: where its rows and their scales are, and how a lane takes its part of a step of them. Whoever copies and
  waits includes it, after TILES_IN_SHARED and tile.h.

  Constants: WARPS, that share the steps of a row.
*/

/* Rows lie so that what the lanes of a row read at once has banks of its own, where each can be copied apart. */
#if FORMAT > FORMAT_GGUF
constexpr u32 BYTES_AT_ONCE = FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K ? 32 : 16, SCALE_ROW_BYTES = 0;
#else
constexpr u32 BYTES_AT_ONCE = 64 / PIECES, SCALE_ROW_BYTES = GROUP != 0 ? NUM_GROUPS * SCALE_BYTES : 0;
#endif
DEVICE constexpr u32 row_stride(u32 bytes) { return bytes % 16 != 0 || (bytes / BYTES_AT_ONCE % 2 == 1 && bytes % BYTES_AT_ONCE == 0) ? bytes : row_stride(bytes + 16); }
constexpr u32 ROW_STRIDE = row_stride(ROW_BYTES);
/* Words of the tile's data; of its scales, and those that are read with the last row's. */
constexpr u32 DATA_WORDS = 4 * ROW_STRIDE, SCALES_END = 4 * SCALE_ROW_BYTES, SCALE_WORDS = SCALES_END ? (SCALES_END + 4 + 31) / 32 * 32 : 0, TILE_WORDS = DATA_WORDS + SCALE_WORDS;

#if FORMAT > FORMAT_GGUF

/* A lane's place in a tile: where its low row begins the warp's first step, in a block. */
struct data_places {
    shared_place rows;
    u32 skew; /* bytes from that word */
};

template <class Words>
DEVICE data_places find_data_places(Words &words, u32 tile) {
    const u32 at = (lane_index() >> 2) * ROW_STRIDE + block_of_step(FIRST_STEP(warp_index(), WARPS)) * BLOCK_BYTES;
    return {shared_place_of(words, tile + at / 4), at % 4};
}

/* A lane's part of its low (half 0) or high (half 1) row in the warp's step `index`, of a tile that lies so many words further. */
DEVICE weight_chunk fetch_chunk_of(const data_places &places, u32 further, u32 half, u32 index) {
    const shared_row row = {shared_place_after(places.rows, further), places.skew, block_of_step(FIRST_STEP(warp_index(), WARPS)), half * 8 * ROW_STRIDE};
    return load_chunk(row, step_of<WARPS>(warp_index(), index), is_inner_step<WARPS>(index));
}

#else

/* A lane's places in a tile. */
struct data_places {
    shared_place rows, scales; /* of the low row; those of the high one are as far away for all lanes */
    u32 skew;                  /* of scales, in their words */
};

template <class Words>
DEVICE data_places find_data_places(Words &words, u32 tile) {
    const u32 t = lane_index() & 3, g = lane_index() >> 2, warp = warp_index();
    data_places p;
    p.rows = shared_place_of(words, tile + g * (ROW_STRIDE / 4) + FIRST_STEP(warp, WARPS) * 16 + t * (4 / PIECES));
    const u32 at = g * SCALE_ROW_BYTES + (u32)scales_at(FIRST_STEP(warp, WARPS));
    p.skew = at % 4;
    p.scales = shared_place_of(words, tile + DATA_WORDS + (SCALE_ROW_BYTES ? at / 4 : 0));
    return p;
}

/* A lane's part of its low (half 0) or high (half 1) row in the warp's step `index`, of a tile that lies so many words further; nothing of what lies
   beyond the row. */
DEVICE weight_chunk fetch_chunk_of(const data_places &places, u32 further, u32 half, u32 index) {
    constexpr u32 SCALES_TAKEN = (SUBS * SCALE_BYTES + 3) / 4;
    const u32 t = lane_index() & 3, first = FIRST_STEP(warp_index(), WARPS), step = step_of<WARPS>(warp_index(), index), from = further + half * 2 * ROW_STRIDE + index * STEP_STRIDE(WARPS) * 16;
    const bool inner = is_inner_step<WARPS>(index);
    weight_chunk c = {};
#pragma unroll
    for (u32 piece = 0; piece < PIECES; piece++) {
        if (ROW_BYTES % 64 != 0 && !inner && step * 64 + piece * BYTES_AT_ONCE + t * (16 / PIECES) >= ROW_BYTES) continue;
        fetch_piece(c, piece, places.rows, from + piece * (BYTES_AT_ONCE / 4));
    }
    if (GROUP == 0) return c;
    /* Words, and where scales lie across them one more. */
    constexpr bool WHOLE = SCALE_ROW_BYTES % 4 == 0 && SUBS * SCALE_BYTES % 4 == 0;
    const u32 at = WHOLE ? 0 : places.skew + (u32)(scales_at(step) - scales_at(first));
    const u32 words = further + half * 2 * SCALE_ROW_BYTES + (WHOLE ? (u32)(scales_at(step) - scales_at(first)) / 4 : at / 4);
    u32 word[SCALES_TAKEN + 1];
#pragma unroll
    for (u32 i = 0; i < SCALES_TAKEN + !WHOLE; i++) word[i] = shared_load_from(places.scales, words + i);
#pragma unroll
    for (u32 i = 0; i < SCALES_TAKEN; i++) {
        c.scale[i] = WHOLE ? word[i] : select_bytes(word[i], word[i + 1], 0x3210u + 0x1111u * (at % 4));
        if (NUM_GROUPS % SUBS != 0 && !inner) { /* the groups that the row has */
            const u32 left = ((u32)NUM_GROUPS - (u32)first_group(step)) * SCALE_BYTES;
            const u32 mask = left >= i * 4 + 4 ? 0xffffffffu : left <= i * 4 ? 0u : (1u << (left % 4 * 8)) - 1;
            c.scale[i] = (c.scale[i] & mask) | (SCALES_BY_SHIFT ? 0x7f7f7f7fu & ~mask : 0u);
        }
    }
    return c;
}

#endif
