/*
  output.h: what matmul.cu and grouped.cu share about the rows of x that they read and the outputs that they write: which row of
  x belongs to a row, which weight rows make an output column, and what follows the sums. How the sums come about belongs to
  the kernels.

  Constants: ROWS, of a weight matrix; GATED, INTERLEAVED, UP_APART, ACTIVATION, CLAMP, WEIGHT_ON_INPUT, BIAS, K and X_INDEX as in
  matmul.cu.
*/
#ifndef UP_APART
#define UP_APART 0
#endif
#define COLUMNS (GATED && !UP_APART ? ROWS / 2 : ROWS) /* of the output */

/* The row of x of a pair; with X_INDEX 2 of a sorted row. */
DEVICE u32 x_row_of(const moer_matmul_args &a, u32 index) { return X_INDEX == 0 || (X_INDEX == 1 && !a.x_per_pair) ? index / K : index; }

/* The weight row of an output column: of its gate, or of what has none; or of its up. */
DEVICE u64 column_row(u64 column, bool up) {
    if (!GATED || UP_APART) return column;
    return INTERLEAVED ? column * 2 + up : column + (up ? COLUMNS : 0);
}

/* An output from its sums, before a router's weight on it; `weight` is that on the input, the biases those of its weight rows. */
DEVICE float finish_sums(const moer_matmul_args &a, float bias, float up_bias, float weight, float value, float up) {
    if (WEIGHT_ON_INPUT) value = f32_mul(value, weight); /* W @ (weight * x) = weight * (W @ x): without rounding weight * x to x's dtype */
    if (BIAS) value = f32_add(value, bias);
    if (ACTIVATION) value = moer_activated_gate(ACTIVATION - 1, CLAMP, value, a.alpha, a.clamp);
    if (GATED) {
        if (WEIGHT_ON_INPUT) up = f32_mul(up, weight);
        if (BIAS) up = f32_add(up, up_bias);
        value = f32_mul(value, moer_shifted_up(CLAMP, up, ACTIVATION == MOER_SITU + 1 ? a.up_beta : 0.0f, a.up_offset, a.clamp));
    }
    return value;
}

DEVICE float output_bias(const moer_matmul_args &a, u32 expert, u32 column) {
    return BIAS ? load_value(a.bias, (u64)expert * ROWS + column_row(column, false), BIAS) : 0.0f;
}
DEVICE float output_up_bias(const moer_matmul_args &a, u32 expert, u32 column) {
    return BIAS && GATED ? load_value(UP_APART ? a.up_bias : a.bias, (u64)expert * ROWS + column_row(column, true), BIAS) : 0.0f;
}
