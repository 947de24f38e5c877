/*
  parts.h: the sums that the warps have of a tile, each over its part of K: where they lie in shared memory, how a warp leaves its own there, and how an
  output's are added up. When they are there, and when they may be overwritten, is for the kernels to say.

  Constants: WARPS, TILE_TOKENS and GATED as in matmul.cu; UP_ROWS, defined before: from a column's gate row in the tile to its up row.
*/
constexpr u32 PART_SIZE = 16 * TILE_TOKENS, PARTS_SIZE = WARPS * PART_SIZE; /* words: [warp][row][token] */

/* Tokens lie in pairs, which rows that follow each other have in different banks, for those who write and those who read. */
DEVICE u32 part_place(u32 row, u32 token) {
    const u32 pair = token / 2 ^ (GATED && UP_ROWS == 8 ? (row >> 2 & 1) * 2 : row >> 2 & 3);
    return row * TILE_TOKENS + pair * 2 + token % 2;
}

/* A lane's places: of its low row, and its high one. */
struct part_places {
    shared_place low, high;
};

/* `at`: where the parts begin. */
template <class Words>
DEVICE part_places find_part_places(Words &words, u32 at) {
    const u32 g = lane_index() >> 2, t = lane_index() & 3, own = at + warp_index() * PART_SIZE;
    part_places p;
    p.low = shared_place_of(words, own + part_place(g, t * 2));
    p.high = shared_place_of(words, own + part_place(g + 8, t * 2));
    return p;
}

/* So many words further. */
template <int BLOCKS>
DEVICE void leave_part(const part_places &places, u32 further, const float (&sums)[BLOCKS][4]) {
#pragma unroll
    for (u32 b = 0; b < BLOCKS; b++) {
        shared_store_2_to(places.low, further + b * 8, u32x2{{f32_bits(sums[b][0]), f32_bits(sums[b][1])}});
        shared_store_2_to(places.high, further + b * 8, u32x2{{f32_bits(sums[b][2]), f32_bits(sums[b][3])}});
    }
}

/* The sums of a column and a token, of its gate or only row, and its up. */
template <class Words>
DEVICE void add_parts(Words &words, u32 at, u32 c, u32 token, float &value, float &up) {
    const u32 row = GATED && UP_ROWS == 1 ? c * 2 : c, from = at + part_place(row, token), up_from = at + part_place(row + UP_ROWS, token);
    value = up = 0.0f;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        value = f32_add(value, f32_from_bits(words[from + w * PART_SIZE]));
        if (GATED) up = f32_add(up, f32_from_bits(words[up_from + w * PART_SIZE]));
    }
}
