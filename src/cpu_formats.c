/*
  cpu_formats.c: what a row of weights stands for, number by number: the plain statement of the formats, which the kernels
  are tested against; GGUF's are in cpu_gguf.c. A value is a product of code and scales (and a difference, where a format has a minimum) that is
  rounded to f32 once.
*/
#include "internal.h"

static float moer_cpu_scale(const moer_matrix *matrix, size_t index) {
    const void *scales = moer_host(matrix->scales);
    if (matrix->scales_kind == MOER_SCALES_E8M0) return moer_e8m0(((const unsigned char *)scales)[index]);
    if (matrix->scales_kind == MOER_SCALES_E4M3) return moer_e4m3(((const unsigned char *)scales)[index]);
    return moer_load_value(scales, index, (moe_route_dtype)matrix->scales_kind);
}

static float moer_cpu_global_scale(const moer_matrix *matrix, size_t expert, size_t row) {
    const float *scales = (const float *)moer_host(matrix->global_scales);
    switch (matrix->global) {
    case MOER_GLOBAL_PER_TENSOR: return scales[0];
    case MOER_GLOBAL_PER_EXPERT: return scales[expert];
    case MOER_GLOBAL_PER_HALF: return scales[expert * 2 + (row >= matrix->rows / 2)];
    case MOER_GLOBAL_INTERLEAVED: return scales[expert * 2 + row % 2];
    default: return 1.0f;
    }
}

static unsigned moer_cpu_nibble(const unsigned char *bytes, size_t index) { return (unsigned)bytes[index / 2] >> (index % 2 * 4) & 15u; }

/* The code less its zero point, both as the matrix has them. */
static float moer_cpu_integer(const moer_matrix *matrix, unsigned code, const unsigned char *zero_points, size_t group) {
    const int four_bits = matrix->format == MOE_ROUTE_FORMAT_INT4;
    const unsigned sign = matrix->signed_codes ? four_bits ? 8u : 128u : 0u; /* turns two's complement into an offset */
    const unsigned usual = four_bits ? 8u : 128u;
    const unsigned zero_point = zero_points == NULL ? usual : (four_bits ? moer_cpu_nibble(zero_points, group) : zero_points[group]) ^ sign;
    return (float)((int)(code ^ sign) - (int)zero_point);
}

static float moer_cpu_e2m1(unsigned code) {
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8u ? -magnitudes[code & 7u] : magnitudes[code & 7u];
}

static void moer_cpu_decode_row(const moer_matrix *matrix, size_t expert, size_t row, float *values) {
    const size_t index = expert * matrix->rows + row, scale_rows = (matrix->rows + matrix->group_rows - 1) / matrix->group_rows;
    const size_t first_scale = (expert * scale_rows + row / matrix->group_rows) * matrix->num_groups;
    const unsigned char *data = (const unsigned char *)moer_host(matrix->data) + index * moer_row_bytes(matrix);
    const unsigned char *zero_points = matrix->zero_points != 0 ? (const unsigned char *)moer_host(matrix->zero_points) + index * moer_zero_point_row_bytes(matrix) : NULL;
    const uint32_t group_size = matrix->group_size != 0 ? matrix->group_size : matrix->inner;
    const float global = moer_cpu_global_scale(matrix, expert, row);
    uint32_t k;
    if (matrix->format > MOE_ROUTE_FORMAT_GGUF) {
        moer_cpu_gguf_row(matrix->format, data, matrix->inner, values);
        return;
    }
    for (k = 0; k < matrix->inner; k++) {
        const uint32_t group = k / group_size;
        switch (matrix->format) {
        case MOE_ROUTE_FORMAT_INT4: values[k] = moer_cpu_integer(matrix, moer_cpu_nibble(data, k), zero_points, group); break;
        case MOE_ROUTE_FORMAT_INT8: values[k] = moer_cpu_integer(matrix, data[k], zero_points, group); break;
        case MOE_ROUTE_FORMAT_FP8: values[k] = moer_e4m3(data[k]); break;
        case MOE_ROUTE_FORMAT_MXFP4:
        case MOE_ROUTE_FORMAT_NVFP4: values[k] = moer_cpu_e2m1(moer_cpu_nibble(data, k)); break;
        case MOE_ROUTE_FORMAT_F16: values[k] = moer_load_value(data, k, MOE_ROUTE_F16); break;
        case MOE_ROUTE_FORMAT_BF16: values[k] = moer_load_value(data, k, MOE_ROUTE_BF16); break;
        default: values[k] = moer_load_value(data, k, MOE_ROUTE_F32); break;
        }
        if (moer_is_quantized(matrix->format)) values[k] = values[k] * moer_cpu_scale(matrix, first_scale + group) * global;
    }
}
