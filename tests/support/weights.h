/*
  weights.h: random expert weights in any format, as they are stored and as the numbers that they stand for, read one by one
  from the stored bytes by rules that are written down here again, independent of the library's; but for GGUF. Include test.h
  and device.h first.
*/
#ifndef TEST_WEIGHTS_H
#define TEST_WEIGHTS_H

#include "../../examples/quantize.h"

TEST_FUNCTION quantize_dtype model_storage(moe_route_dtype dtype) { return dtype == MOE_ROUTE_F32 ? QUANTIZE_F32 : dtype == MOE_ROUTE_F16 ? QUANTIZE_F16 : QUANTIZE_BF16; }
TEST_FUNCTION size_t model_dtype_size(moe_route_dtype dtype) { return dtype == MOE_ROUTE_F32 ? 4 : 2; }

TEST_FUNCTION void *model_alloc(size_t size) {
    void *memory = calloc(1, size ? size : 1);
    if (!memory) device_die("out of memory");
    return memory;
}

/* Random numbers as they are stored in `dtype`, and what is left of them. */
TEST_FUNCTION void *model_random_array(test_random *random, size_t count, moe_route_dtype dtype, float deviation, float *values) {
    void *stored = model_alloc(count * model_dtype_size(dtype));
    size_t i;
    for (i = 0; i < count; i++) {
        quantize_store(stored, model_storage(dtype), i, random_normal(random) * deviation);
        values[i] = quantize_load(stored, model_storage(dtype), i);
    }
    return stored;
}

typedef struct stored_weights {
    void *data, *scales, *zero_points, *global_scales;
    size_t data_size, scales_size, zero_points_size, global_scales_size;
    float *values; /* [E, rows, inner] */
} stored_weights;

TEST_FUNCTION void stored_weights_free(stored_weights *stored) {
    free(stored->data);
    free(stored->scales);
    free(stored->zero_points);
    free(stored->global_scales);
    free(stored->values);
    memset(stored, 0, sizeof *stored);
}

/* ---- single codes ---- */

TEST_FUNCTION double read_e2m1(unsigned code) {
    const unsigned exponent = code >> 1 & 3u, mantissa = code & 1u;
    const double magnitude = exponent ? ldexp(1.0 + mantissa / 2.0, (int)exponent - 1) : mantissa / 2.0;
    return code & 8u ? -magnitude : magnitude;
}

TEST_FUNCTION double read_e4m3(unsigned code) {
    const unsigned exponent = code >> 3 & 15u, mantissa = code & 7u;
    const double magnitude = exponent == 15u && mantissa == 7u ? NAN : exponent ? ldexp(1.0 + mantissa / 8.0, (int)exponent - 7) : ldexp(mantissa, -9);
    return code & 128u ? -magnitude : magnitude;
}

TEST_FUNCTION unsigned read_nibble(const void *bytes, size_t row_bytes, size_t row, size_t index) {
    const unsigned byte = ((const unsigned char *)bytes)[row * row_bytes + index / 2];
    return index % 2 ? byte >> 4 : byte & 15u;
}

/* A code of `bits` bits as an integer. */
TEST_FUNCTION int read_integer(unsigned code, unsigned bits, int is_signed) { return is_signed && code >> (bits - 1) ? (int)code - (1 << bits) : (int)code; }

/* ---- whole matrices ---- */

typedef struct weights_shape {
    uint32_t num_experts, rows, inner, groups, group_size, scale_rows, group_rows;
    unsigned bits;
} weights_shape;

TEST_FUNCTION void fill_random_bytes(test_random *random, void *bytes, size_t size) {
    size_t i;
    for (i = 0; i < size; i += 8) {
        const uint64_t some = random_next(random);
        memcpy((unsigned char *)bytes + i, &some, size - i < 8 ? size - i : 8);
    }
}

/* How large codes of a format are on average, so that scales can make weights of a wanted size. */
TEST_FUNCTION float weights_code_deviation(moe_route_format format, int zero_points) {
    switch (format) {
    case MOE_ROUTE_FORMAT_INT8: return zero_points ? 104.0f : 74.0f;
    case MOE_ROUTE_FORMAT_INT4: return zero_points ? 6.5f : 4.6f;
    case MOE_ROUTE_FORMAT_FP8: return 100.0f;
    default: return 2.9f;
    }
}

/* The value of one weight, exact in f64 before it is rounded. */
TEST_FUNCTION float stored_value(const moe_route_weights *description, const stored_weights *stored, const weights_shape *shape, int interleaved, uint32_t expert, uint32_t row, uint32_t k) {
    const moe_route_format format = description->format;
    const size_t index = (size_t)expert * shape->rows + row, group = shape->group_size ? k / shape->group_size : 0;
    const size_t scale = ((size_t)expert * shape->scale_rows + row / shape->group_rows) * shape->groups + group;
    const int is_signed = description->codes == MOE_ROUTE_CODES_SIGNED || (description->codes == MOE_ROUTE_CODES_DEFAULT && format == MOE_ROUTE_FORMAT_INT8);
    const unsigned code = shape->bits == 8 ? ((const unsigned char *)stored->data)[index * shape->inner + k] : read_nibble(stored->data, shape->inner / 2, index, k);
    double value;
    if (format == MOE_ROUTE_FORMAT_INT8 || format == MOE_ROUTE_FORMAT_INT4) {
        int zero_point = is_signed ? 0 : 1 << (shape->bits - 1);
        if (stored->zero_points) {
            const unsigned at = shape->bits == 8 ? ((const unsigned char *)stored->zero_points)[index * shape->groups + group] : read_nibble(stored->zero_points, (shape->groups + 1) / 2, index, group);
            zero_point = read_integer(at, shape->bits, is_signed);
        }
        value = read_integer(code, shape->bits, is_signed) - zero_point;
    } else {
        value = format == MOE_ROUTE_FORMAT_FP8 ? read_e4m3(code) : read_e2m1(code);
    }
    if (format == MOE_ROUTE_FORMAT_MXFP4) return (float)ldexp(value, ((const unsigned char *)stored->scales)[scale] - 127);
    if (format != MOE_ROUTE_FORMAT_NVFP4)
        return (float)(value * (double)quantize_load(stored->scales, model_storage(description->scales_dtype ? description->scales_dtype : format == MOE_ROUTE_FORMAT_FP8 ? MOE_ROUTE_F32 : MOE_ROUTE_F16), scale));
    value *= read_e4m3(((const unsigned char *)stored->scales)[scale]);
    if (stored->global_scales) {
        const size_t part = interleaved ? row % 2 : row >= shape->rows / 2;
        const size_t at = description->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR ? 0 : description->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT ? expert : expert * 2u + part;
        value *= (double)((const float *)stored->global_scales)[at];
    }
    return (float)value;
}

/* GGUF blocks: anything in the codes, and f16 scales that make weights of about the wanted size. What they stand for is
   asked of the library's CPU backend, which test_formats.c holds against values from elsewhere. */
TEST_FUNCTION void stored_gguf_create(test_random *random, moe_route_format format, size_t num_rows, uint32_t inner, stored_weights *stored) {
    static const struct { int format, halves[2]; float codes[2]; } scales[] = { /* where d and m lie, and how much they are multiplied by */
        {MOE_ROUTE_FORMAT_GGUF_Q4_0, {0, -1}, {4.6f, 0}},   {MOE_ROUTE_FORMAT_GGUF_Q4_1, {0, 2}, {9, 2}},        {MOE_ROUTE_FORMAT_GGUF_Q5_0, {0, -1}, {9.2f, 0}},
        {MOE_ROUTE_FORMAT_GGUF_Q5_1, {0, 2}, {18, 2}},      {MOE_ROUTE_FORMAT_GGUF_Q8_0, {0, -1}, {74, 0}},      {MOE_ROUTE_FORMAT_GGUF_Q2_K, {80, 82}, {17, 9}},
        {MOE_ROUTE_FORMAT_GGUF_Q3_K, {108, -1}, {43, 0}},   {MOE_ROUTE_FORMAT_GGUF_Q4_K, {0, 2}, {320, 37}},     {MOE_ROUTE_FORMAT_GGUF_Q5_K, {0, 2}, {660, 37}},
        {MOE_ROUTE_FORMAT_GGUF_Q6_K, {208, -1}, {1350, 0}}, {MOE_ROUTE_FORMAT_GGUF_IQ4_NL, {0, -1}, {69, 0}},    {MOE_ROUTE_FORMAT_GGUF_IQ4_XS, {0, -1}, {1270, 0}},
        {MOE_ROUTE_FORMAT_GGUF_MXFP4, {-1, -1}, {5.8f, 0}},
    };
    const moer_block block = moer_format_block(format);
    const size_t num_blocks = num_rows * inner / block.values;
    const float deviation = 1.0f / sqrtf((float)inner);
    size_t i, b;
    int which;
    stored->data_size = num_blocks * block.bytes;
    stored->data = model_alloc(stored->data_size);
    fill_random_bytes(random, stored->data, stored->data_size);
    for (i = 0; scales[i].format != (int)format; i++) continue;
    for (b = 0; b < num_blocks; b++) {
        unsigned char *bytes = (unsigned char *)stored->data + b * block.bytes;
        for (which = 0; which < 2; which++)
            if (scales[i].halves[which] >= 0) {
                const uint16_t half = f16_from_float(deviation / scales[i].codes[which] * (random_uniform(random) + 0.5f) * (random_below(random, 8) ? 1.0f : -1.0f));
                memcpy(bytes + scales[i].halves[which], &half, 2);
            }
        if (format == MOE_ROUTE_FORMAT_GGUF_MXFP4) bytes[0] = (unsigned char)(128 + (int)floorf(log2f(deviation / scales[i].codes[0])) + (int)random_below(random, 3) - 1);
    }
    for (i = 0; i < num_rows; i++) moer_cpu_gguf_row(format, (const unsigned char *)stored->data + i * (inner / block.values) * block.bytes, inner, stored->values + i * inner);
}

TEST_FUNCTION weights_shape weights_shape_of(const moe_route_weights *description, uint32_t num_experts, uint32_t rows, uint32_t inner) {
    const moe_route_format format = description->format;
    weights_shape shape;
    shape.num_experts = num_experts;
    shape.rows = rows;
    shape.inner = inner;
    shape.bits = format == MOE_ROUTE_FORMAT_INT8 || format == MOE_ROUTE_FORMAT_FP8 ? 8 : 4;
    shape.group_size = format == MOE_ROUTE_FORMAT_MXFP4 ? 32 : format == MOE_ROUTE_FORMAT_NVFP4 ? 16 : description->group_size;
    shape.groups = (uint32_t)quantize_groups(inner, shape.group_size);
    shape.group_rows = description->group_rows ? description->group_rows : 1;
    shape.scale_rows = (rows + shape.group_rows - 1) / shape.group_rows;
    return shape;
}

/* What is stored, of weights of deviation 1 / sqrt(inner), in INT8 to NVFP4. `stored` is all zero. */
TEST_FUNCTION void stored_weights_fill(test_random *random, const moe_route_weights *description, int zero_points, int global_scales, const weights_shape *shape, stored_weights *stored) {
    const moe_route_format format = description->format;
    const size_t num_rows = (size_t)shape->num_experts * shape->rows;
    const float deviation = 1.0f / sqrtf((float)shape->inner), scale_deviation = deviation / weights_code_deviation(format, zero_points);
    size_t i, num_scales;
    num_scales = (size_t)shape->num_experts * shape->scale_rows * shape->groups;
    stored->data_size = num_rows * shape->inner * shape->bits / 8;
    stored->data = model_alloc(stored->data_size);
    fill_random_bytes(random, stored->data, stored->data_size);
    for (i = 0; format == MOE_ROUTE_FORMAT_FP8 && i < stored->data_size; i++) {
        unsigned char *code = (unsigned char *)stored->data + i;
        if ((*code & 127) == 127) *code &= 0x80; /* no NaN */
    }
    if (format == MOE_ROUTE_FORMAT_MXFP4 || format == MOE_ROUTE_FORMAT_NVFP4) {
        stored->scales_size = num_scales;
        stored->scales = model_alloc(num_scales);
        for (i = 0; i < num_scales; i++) {
            const int exponent = (int)floorf(log2f(scale_deviation)) + (int)random_below(random, 3) - 1;
            ((unsigned char *)stored->scales)[i] = format == MOE_ROUTE_FORMAT_MXFP4 ? (unsigned char)(127 + exponent) : (unsigned char)(random_below(random, 8) ? 40 + random_below(random, 24) : random_below(random, 8));
        }
    } else {
        const moe_route_dtype dtype = description->scales_dtype ? description->scales_dtype : format == MOE_ROUTE_FORMAT_FP8 ? MOE_ROUTE_F32 : MOE_ROUTE_F16;
        float *scale_values = (float *)model_alloc(num_scales * 4);
        stored->scales_size = num_scales * model_dtype_size(dtype);
        stored->scales = model_random_array(random, num_scales, dtype, scale_deviation, scale_values);
        free(scale_values);
    }
    if (zero_points && (format == MOE_ROUTE_FORMAT_INT8 || format == MOE_ROUTE_FORMAT_INT4)) {
        stored->zero_points_size = num_rows * (shape->bits == 8 ? shape->groups : (shape->groups + 1) / 2);
        stored->zero_points = model_alloc(stored->zero_points_size);
        fill_random_bytes(random, stored->zero_points, stored->zero_points_size);
    }
    if (global_scales) {
        const size_t global_count = description->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR ? 1 : description->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT ? shape->num_experts : shape->num_experts * 2u;
        stored->global_scales_size = global_count * 4;
        stored->global_scales = model_alloc(stored->global_scales_size);
        for (i = 0; i < global_count; i++) ((float *)stored->global_scales)[i] = (random_uniform(random) + 0.5f) * scale_deviation;
    }
}

/* Weights of deviation 1 / sqrt(inner), as `description` says without its addresses; finite. */
TEST_FUNCTION void stored_weights_create(test_random *random, const moe_route_weights *description, int zero_points, int global_scales, int interleaved, uint32_t num_experts, uint32_t rows, uint32_t inner,
                                         stored_weights *stored) {
    const moe_route_format format = description->format;
    const size_t num_rows = (size_t)num_experts * rows, count = num_rows * inner;
    weights_shape shape;
    uint32_t e, n, k;
    memset(stored, 0, sizeof *stored);
    stored->values = (float *)model_alloc(count * 4);
    if (format <= MOE_ROUTE_FORMAT_BF16) {
        const moe_route_dtype dtype = format == MOE_ROUTE_FORMAT_F32 ? MOE_ROUTE_F32 : format == MOE_ROUTE_FORMAT_F16 ? MOE_ROUTE_F16 : MOE_ROUTE_BF16;
        stored->data_size = count * model_dtype_size(dtype);
        stored->data = model_random_array(random, count, dtype, 1.0f / sqrtf((float)inner), stored->values);
        return;
    }
    if (format > MOE_ROUTE_FORMAT_GGUF) {
        stored_gguf_create(random, format, num_rows, inner, stored);
        return;
    }
    shape = weights_shape_of(description, num_experts, rows, inner);
    stored_weights_fill(random, description, zero_points, global_scales, &shape, stored);
    for (e = 0; e < num_experts; e++)
        for (n = 0; n < rows; n++)
            for (k = 0; k < inner; k++) stored->values[((size_t)e * rows + n) * inner + k] = stored_value(description, stored, &shape, interleaved, e, n, k);
}

#endif /* TEST_WEIGHTS_H */
