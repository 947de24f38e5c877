/*
  formats.c: the sizes of a weight matrix in its format, and how finely the kernels cut its rows. Which combinations are
  allowed is decided in layer.c; what the bytes mean is in kernels_src/ and cpu_formats.c.
*/
#include "internal.h"

static int moer_is_quantized(moe_route_format format) { return format > MOE_ROUTE_FORMAT_BF16; }

static unsigned moer_format_bits(moe_route_format format) {
    switch (format) {
    case MOE_ROUTE_FORMAT_F32: return 32;
    case MOE_ROUTE_FORMAT_F16:
    case MOE_ROUTE_FORMAT_BF16: return 16;
    case MOE_ROUTE_FORMAT_INT8:
    case MOE_ROUTE_FORMAT_FP8: return 8;
    case MOE_ROUTE_FORMAT_INT4:
    case MOE_ROUTE_FORMAT_MXFP4:
    case MOE_ROUTE_FORMAT_NVFP4: return 4;
    default: return 0;
    }
}

static size_t moer_scale_size(moer_scales kind) {
    return kind == MOER_SCALES_F32 ? 4 : kind == MOER_SCALES_E8M0 || kind == MOER_SCALES_E4M3 ? 1 : 2;
}

static size_t moer_row_bytes(const moer_matrix *matrix) { return (size_t)matrix->inner * moer_format_bits(matrix->format) / 8; }

static size_t moer_scale_row_bytes(const moer_matrix *matrix) {
    return moer_is_quantized(matrix->format) ? matrix->num_groups * moer_scale_size(matrix->scales_kind) : 0;
}

static size_t moer_zero_point_row_bytes(const moer_matrix *matrix) {
    return moer_format_bits(matrix->format) == 4 ? ((size_t)matrix->num_groups + 1) / 2 : matrix->num_groups;
}

static uint64_t moer_matrix_bytes(const moer_matrix *matrix) {
    const uint64_t scale_rows = (matrix->rows + matrix->group_rows - 1) / matrix->group_rows;
    uint64_t bytes = (uint64_t)matrix->rows * moer_row_bytes(matrix) + scale_rows * moer_scale_row_bytes(matrix);
    if (matrix->zero_points != 0) bytes += (uint64_t)matrix->rows * moer_zero_point_row_bytes(matrix);
    return bytes;
}

/* packed.h: 64 bytes of a row. */
static uint32_t moer_tile_steps(const moer_matrix *matrix) {
    const uint32_t step = 512 / moer_format_bits(matrix->format);
    return (matrix->inner + step - 1) / step;
}
