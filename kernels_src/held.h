/*
  held.h: the activations of one token for all of a warp's steps, in registers from tile to tile, in the order in which tile.h multiplies
  them. Whether there is room for them is for those who hold them to say.
*/
#if TENSOR_CORES

DEVICE constexpr u32 held_words(u32 parts) { return PART_STEPS(parts) * LANE_VALUES / 2; }
/* Whether the sums of the activations are held, too: where there is room for both. */
DEVICE constexpr bool holds_sums(u32 parts) { return WANTS_SUMS && SUBS <= 4 && held_words(parts) <= 32; }

template <u32 PARTS>
struct held_activations {
    u32 pair[PART_STEPS(PARTS)][SUBS][NUM_PAIRS];
    held_sums sums[holds_sums(PARTS) ? PART_STEPS(PARTS) : 1];
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
#if WANTS_SUMS
                if (!holds_sums(PARTS)) continue;
                float sums[4];
                sum_activations(sums, held.pair[i][sub]);
                hold_sum(held.sums[i], sub, sums);
#endif
            }
}

#else /* f32 multiply-adds hold nothing */

template <u32 PARTS>
struct held_activations {};

template <u32 PARTS>
DEVICE void hold_activations(held_activations<PARTS> &, const u8 *, u32) {}
#endif
