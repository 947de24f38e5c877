/*
  quantize.h: weights as moe_route reads them in FORMAT_INT4 and FORMAT_INT8, and conversions between f32, f16 and bf16.
  For the example, test and benchmark programs of this repository: a plain quantiser that needs no calibration data.

  A matrix is [rows, columns], row-major; for experts rows = E * N and columns = K. `group_size` columns share a scale
  (0: the whole row; a last group may be shorter): scales are [rows, groups] with groups = ceil(columns / group_size).

      INT4  [rows, columns / 2] bytes, the even column in the low half; value = (q - 8) * scale, q from 0 to 15
      INT8  [rows, columns] bytes; value = q * scale, q from -127 to 127

  Weights are expected to be finite.
*/
#ifndef QUANTIZE_H
#define QUANTIZE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define QUANTIZE_FUNCTION static __attribute__((unused))
#else
#define QUANTIZE_FUNCTION static
#endif

/* The same numbers as moe_route_dtype. */
typedef enum quantize_dtype { QUANTIZE_F32 = 1, QUANTIZE_F16 = 2, QUANTIZE_BF16 = 3 } quantize_dtype;

/* ---- f32, f16 and bf16, rounding to nearest even; NaN stays NaN ---- */

QUANTIZE_FUNCTION uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

QUANTIZE_FUNCTION float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

QUANTIZE_FUNCTION uint16_t bf16_from_float(float value) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

QUANTIZE_FUNCTION float bf16_to_float(uint16_t value) { return float_from_bits((uint32_t)value << 16); }

QUANTIZE_FUNCTION uint16_t f16_from_float(float value) {
    uint32_t bits = float_bits(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from 65520 on: infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 leaves the multiple of 2^-24 in the lowest bits */
        return (uint16_t)(sign | (float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

QUANTIZE_FUNCTION float f16_to_float(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t magnitude = value & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x400u) return float_from_bits(sign | float_bits((float)magnitude * (1.0f / 16777216.0f)));
    return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
}

QUANTIZE_FUNCTION float quantize_load(const void *array, quantize_dtype dtype, size_t index) {
    if (dtype == QUANTIZE_F32) return ((const float *)array)[index];
    if (dtype == QUANTIZE_F16) return f16_to_float(((const uint16_t *)array)[index]);
    return bf16_to_float(((const uint16_t *)array)[index]);
}

QUANTIZE_FUNCTION void quantize_store(void *array, quantize_dtype dtype, size_t index, float value) {
    if (dtype == QUANTIZE_F32) ((float *)array)[index] = value;
    else if (dtype == QUANTIZE_F16) ((uint16_t *)array)[index] = f16_from_float(value);
    else ((uint16_t *)array)[index] = bf16_from_float(value);
}

QUANTIZE_FUNCTION size_t quantize_dtype_size(quantize_dtype dtype) { return dtype == QUANTIZE_F32 ? 4 : 2; }

/* A copy of `count` numbers in another type. `from` and `to` may not overlap. */
QUANTIZE_FUNCTION void quantize_convert(void *to, quantize_dtype to_dtype, const void *from, quantize_dtype from_dtype,
                                        size_t count) {
    size_t i;
    for (i = 0; i < count; i++) quantize_store(to, to_dtype, i, quantize_load(from, from_dtype, i));
}

/* ---- quantisation ---- */

QUANTIZE_FUNCTION size_t quantize_groups(size_t columns, size_t group_size) {
    return group_size && columns ? (columns - 1) / group_size + 1 : 1;
}

/* What a scale becomes when it is stored; finite. */
QUANTIZE_FUNCTION float quantize_round_scale(float scale, quantize_dtype dtype) {
    const float limit = dtype == QUANTIZE_F16 ? 65504.0f : 3.3895314e38f;
    if (scale > limit) scale = limit;
    if (scale < -limit) scale = -limit;
    if (dtype == QUANTIZE_F32) return scale;
    return dtype == QUANTIZE_F16 ? f16_to_float(f16_from_float(scale)) : bf16_to_float(bf16_from_float(scale));
}

/* The value of the element furthest from 0, with its sign. */
QUANTIZE_FUNCTION float quantize_extreme(const float *values, size_t count) {
    float extreme = 0;
    size_t i;
    for (i = 0; i < count; i++) {
        if (fabsf(values[i]) > fabsf(extreme)) extreme = values[i];
    }
    return extreme;
}

/* The nearest q; `inverse` is 1 / scale, or 0 for a scale of 0. */
QUANTIZE_FUNCTION unsigned quantize_int4_code(float value, float inverse) {
    float code = value * inverse + 8.5f;
    if (!(code > 0.0f)) return 0;
    return code < 15.0f ? (unsigned)code : 15;
}

QUANTIZE_FUNCTION double quantize_int4_error(const float *values, size_t count, float scale) {
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    double sum = 0;
    size_t i;
    for (i = 0; i < count; i++) {
        double difference = (double)values[i] - ((double)quantize_int4_code(values[i], inverse) - 8) * (double)scale;
        sum += difference * difference;
    }
    return sum;
}

/* The scale with the least squared error of a few: the codes -8 to 7 lie unevenly around 0, so either the extreme value
   becomes -8 (the scale takes the opposite sign) or both ends fit at 7; smaller scales cut the extremes for finer
   steps. */
QUANTIZE_FUNCTION float quantize_int4_scale(const float *values, size_t count, quantize_dtype scales_dtype) {
    static const float factors[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f, 0.80f, 0.75f, 0.70f};
    float extreme = quantize_extreme(values, count);
    float best = 0;
    double least = -1;
    size_t i;
    for (i = 0; i < 2 * sizeof factors / sizeof factors[0]; i++) {
        float scale = quantize_round_scale(extreme / (i % 2 ? 7.0f : -8.0f) * factors[i / 2], scales_dtype);
        double error = quantize_int4_error(values, count, scale);
        if (least < 0 || error < least) {
            least = error;
            best = scale;
        }
    }
    return best;
}

/* One group. `first` is its first column in the row `packed`. */
QUANTIZE_FUNCTION void quantize_int4_group(const float *values, size_t count, float scale, size_t first,
                                           unsigned char *packed) {
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    size_t i;
    for (i = 0; i < count; i++) {
        size_t column = first + i;
        unsigned code = quantize_int4_code(values[i], inverse);
        if (column % 2) packed[column / 2] = (unsigned char)(packed[column / 2] | code << 4);
        else packed[column / 2] = (unsigned char)code;
    }
}

QUANTIZE_FUNCTION void quantize_int8_group(const float *values, size_t count, float scale, signed char *codes) {
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    size_t i;
    for (i = 0; i < count; i++) {
        float code = values[i] * inverse;
        if (!(code > -127.0f)) code = -127.0f;
        if (code > 127.0f) code = 127.0f;
        codes[i] = (signed char)(code < 0 ? code - 0.5f : code + 0.5f);
    }
}

/* Quantises [rows, columns] of `dtype`. `bits` is 4 or 8. Returns 0 when there is no memory, or for 4 bits and an odd
   number of columns. */
QUANTIZE_FUNCTION int quantize_matrix(int bits, const void *matrix, quantize_dtype dtype, size_t rows, size_t columns,
                                      size_t group_size, void *codes, void *scales, quantize_dtype scales_dtype) {
    size_t groups = quantize_groups(columns, group_size);
    size_t width = group_size ? group_size : columns;
    size_t row, group;
    float *values;
    if (width > SIZE_MAX / sizeof(float) || (bits == 4 && columns % 2)) return 0;
    values = (float *)malloc(width ? width * sizeof(float) : 1);
    if (!values) return 0;
    for (row = 0; row < rows; row++) {
        for (group = 0; group < groups; group++) {
            size_t first = group * width;
            size_t count = columns - first < width ? columns - first : width;
            float scale;
            size_t i;
            for (i = 0; i < count; i++) values[i] = quantize_load(matrix, dtype, row * columns + first + i);
            if (bits == 4) {
                scale = quantize_int4_scale(values, count, scales_dtype);
                quantize_int4_group(values, count, scale, first, (unsigned char *)codes + row * (columns / 2));
            } else {
                scale = quantize_round_scale(fabsf(quantize_extreme(values, count)) / 127.0f, scales_dtype);
                quantize_int8_group(values, count, scale, (signed char *)codes + row * columns + first);
            }
            quantize_store(scales, scales_dtype, row * groups + group, scale);
        }
    }
    free(values);
    return 1;
}

/* codes: unsigned char [rows, columns / 2]. */
QUANTIZE_FUNCTION int quantize_int4(const void *matrix, quantize_dtype dtype, size_t rows, size_t columns,
                                    size_t group_size, unsigned char *codes, void *scales,
                                    quantize_dtype scales_dtype) {
    return quantize_matrix(4, matrix, dtype, rows, columns, group_size, codes, scales, scales_dtype);
}

/* codes: signed char [rows, columns]. */
QUANTIZE_FUNCTION int quantize_int8(const void *matrix, quantize_dtype dtype, size_t rows, size_t columns,
                                    size_t group_size, signed char *codes, void *scales, quantize_dtype scales_dtype) {
    return quantize_matrix(8, matrix, dtype, rows, columns, group_size, codes, scales, scales_dtype);
}

/* ---- the values that quantised weights stand for ---- */

QUANTIZE_FUNCTION float quantize_int4_value(const unsigned char *codes, const void *scales, quantize_dtype scales_dtype,
                                            size_t columns, size_t group_size, size_t row, size_t column) {
    size_t group = group_size ? column / group_size : 0;
    unsigned byte = codes[row * (columns / 2) + column / 2];
    int code = (int)(column % 2 ? byte >> 4 : byte & 15u) - 8;
    return (float)code * quantize_load(scales, scales_dtype, row * quantize_groups(columns, group_size) + group);
}

QUANTIZE_FUNCTION float quantize_int8_value(const signed char *codes, const void *scales, quantize_dtype scales_dtype,
                                            size_t columns, size_t group_size, size_t row, size_t column) {
    size_t group = group_size ? column / group_size : 0;
    return (float)codes[row * columns + column] *
           quantize_load(scales, scales_dtype, row * quantize_groups(columns, group_size) + group);
}

#endif /* QUANTIZE_H */
