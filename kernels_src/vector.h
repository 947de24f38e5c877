/*
  vector.h: N consecutive numbers of a row, loaded and stored in one access where their bytes make one. N is a power of two
  up to 8 and divides the row's length, so that an access is aligned when the array is. Quantized weights belong to tile.h.
*/
#include "values.h"

template <int DTYPE, int N>
DEVICE void load_vector(const void *array, u64 index, float (&value)[N]) {
    if (DTYPE == DTYPE_F32) {
        const u32 *p = (const u32 *)array + index;
        if (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const u32x4 v = load_16(p + i * 4);
#pragma unroll
                for (int j = 0; j < 4; j++) value[(i * 4 + j) % N] = f32_from_bits(v.v[j]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) value[i] = f32_from_bits(load_4(p + i));
        }
    } else {
        const u16 *p = (const u16 *)array + index;
        u32 word[(N + 1) / 2];
        if (N == 8) {
            const u32x4 v = load_16(p);
#pragma unroll
            for (int i = 0; i < N / 2; i++) word[i] = v.v[i % 4];
        } else if (N % 2 == 0) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) word[i] = load_4(p + i * 2);
        } else {
            word[0] = load_2(p);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u16 half = (u16)(word[i / 2] >> (16 * (i % 2)));
            value[i] = DTYPE == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
        }
    }
}

template <int DTYPE, int N>
DEVICE void store_vector(void *array, u64 index, const float (&value)[N]) {
    if (DTYPE == DTYPE_F32) {
        float *p = (float *)array + index;
        if (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                u32x4 v;
#pragma unroll
                for (int j = 0; j < 4; j++) v.v[j] = f32_bits(value[(i * 4 + j) % N]);
                store_16(p + i * 4, v);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) p[i] = value[i];
        }
    } else {
        u16 *p = (u16 *)array + index;
        if (N == 8) {
            u32x4 v;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float lo = value[(i * 2) % N], hi = value[(i * 2 + 1) % N];
                v.v[i] = DTYPE == DTYPE_F16 ? f32_to_half2(lo, hi) : f32_to_bf162(lo, hi);
            }
            store_16(p, v);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) p[i] = DTYPE == DTYPE_F16 ? f32_to_f16(value[i]) : f32_to_bf16(value[i]);
        }
    }
}
