/*
  values.h: single numbers of the three dtypes in global memory. Several at once belong to vector.h, quantized weights to
  packed.h and gguf.h.
*/
#ifndef MOER_VALUES
#define MOER_VALUES
#define DTYPE_F32 1
#define DTYPE_F16 2
#define DTYPE_BF16 3

DEVICE float load_value(const void *array, u64 index, int dtype) {
    if (dtype == DTYPE_F32) return f32_from_bits(load_4((const u32 *)array + index));
    const u16 half = load_2((const u16 *)array + index);
    return dtype == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

DEVICE void store_value(void *array, u64 index, int dtype, float value) {
    if (dtype == DTYPE_F32) ((float *)array)[index] = value;
    else ((u16 *)array)[index] = dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}
#endif
