/*
  held.h: the activations of one token for all of a warp's steps, in registers from tile to tile, in the order in which tile.h multiplies
  them. Whether there is room for them is for those who hold them to say.
*/
#if TENSOR_CORES

DEVICE constexpr u32 held_words(u32 parts) { return PART_STEPS(parts) * LANE_VALUES / 2; }
/* Whether what INT4's sums begin with is held, too: where there is room for both. */
DEVICE constexpr bool holds_begin(u32 parts) { return CODES_MULTIPLY && FORMAT == FORMAT_INT4 && held_words(parts) <= 32; }

template <u32 PARTS>
struct held_activations {
    u32 pair[PART_STEPS(PARTS)][SUBS][NUM_PAIRS];
    float begin[holds_begin(PARTS) ? PART_STEPS(PARTS) : 1][SUBS][2];
};

template <u32 PARTS>
DEVICE void hold_activations(held_activations<PARTS> &held, const u8 *x, u32 part) {
    u32 word[PART_STEPS(PARTS)][SUBS][NUM_PAIRS];
#pragma unroll
    for (u32 i = 0; i < PART_STEPS(PARTS); i++)
        if (step_exists<PARTS>(part, i))
#pragma unroll
            for (u32 sub = 0; sub < SUBS; sub++) load_activations(x, step_of<PARTS>(part, i), sub, is_inner_step<PARTS>(i), word[i][sub]);
#pragma unroll
    for (u32 i = 0; i < PART_STEPS(PARTS); i++)
        if (step_exists<PARTS>(part, i))
#pragma unroll
            for (u32 sub = 0; sub < SUBS; sub++) {
                pair_activations(word[i][sub], held.pair[i][sub]);
#if CODES_MULTIPLY
                if (!holds_begin(PARTS)) continue;
                float begin[4];
                multiply_zero_point(begin, held.pair[i][sub]);
                held.begin[i][sub][0] = begin[0];
                held.begin[i][sub][1] = begin[1];
#endif
            }
}

#else /* f32 multiply-adds hold nothing */

template <u32 PARTS>
struct held_activations {};

template <u32 PARTS>
DEVICE void hold_activations(held_activations<PARTS> &, const u8 *, u32) {}
#endif
