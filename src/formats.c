/*
  formats.c: the sizes of a weight matrix in its format, and how finely the kernels cut its rows. Which combinations are
  allowed is decided in layer.c; what the bytes mean is in kernels_src/ and cpu_formats.c.
*/
#include "internal.h"

static moer_block moer_format_block(moe_route_format format) {
    moer_block block = {0, 0};
    switch (format) {
#define MOER_BLOCK(name, of_values, of_bytes) case MOE_ROUTE_FORMAT_##name: block.values = of_values; block.bytes = of_bytes; break;
    MOER_BLOCK(F32, 1, 4)
    MOER_BLOCK(F16, 1, 2)
    MOER_BLOCK(BF16, 1, 2)
    MOER_BLOCK(INT8, 1, 1)
    MOER_BLOCK(INT4, 2, 1)
    MOER_BLOCK(FP8, 1, 1)
    MOER_BLOCK(MXFP4, 32, 16)
    MOER_BLOCK(NVFP4, 16, 8)
    MOER_BLOCK(GGUF_Q4_0, 32, 18)
    MOER_BLOCK(GGUF_Q4_1, 32, 20)
    MOER_BLOCK(GGUF_Q5_0, 32, 22)
    MOER_BLOCK(GGUF_Q5_1, 32, 24)
    MOER_BLOCK(GGUF_Q8_0, 32, 34)
    MOER_BLOCK(GGUF_Q2_K, 256, 84)
    MOER_BLOCK(GGUF_Q3_K, 256, 110)
    MOER_BLOCK(GGUF_Q4_K, 256, 144)
    MOER_BLOCK(GGUF_Q5_K, 256, 176)
    MOER_BLOCK(GGUF_Q6_K, 256, 210)
    MOER_BLOCK(GGUF_IQ4_NL, 32, 18)
    MOER_BLOCK(GGUF_IQ4_XS, 256, 136)
    MOER_BLOCK(GGUF_MXFP4, 32, 17)
#undef MOER_BLOCK
    default: break;
    }
    return block;
}

static int moer_is_quantized(moe_route_format format) { return format > MOE_ROUTE_FORMAT_BF16; }
static int moer_has_scales(moe_route_format format) { return format > MOE_ROUTE_FORMAT_BF16 && format < MOE_ROUTE_FORMAT_GGUF; }

static size_t moer_scale_size(moer_scales kind) {
    return kind == MOER_SCALES_F32 ? 4 : kind == MOER_SCALES_E8M0 || kind == MOER_SCALES_E4M3 ? 1 : 2;
}

static size_t moer_row_bytes(const moer_matrix *matrix) {
    const moer_block block = moer_format_block(matrix->format);
    return (size_t)(matrix->inner / block.values) * block.bytes;
}

static size_t moer_scale_row_bytes(const moer_matrix *matrix) {
    return moer_has_scales(matrix->format) ? matrix->num_groups * moer_scale_size(matrix->scales_kind) : 0;
}

static size_t moer_zero_point_row_bytes(const moer_matrix *matrix) {
    return matrix->format == MOE_ROUTE_FORMAT_INT4 ? ((size_t)matrix->num_groups + 1) / 2 : matrix->num_groups;
}

static uint64_t moer_data_bytes(const moer_matrix *matrix) { return (uint64_t)matrix->rows * moer_row_bytes(matrix); }

static uint64_t moer_scale_bytes(const moer_matrix *matrix) {
    return (uint64_t)((matrix->rows + matrix->group_rows - 1) / matrix->group_rows) * moer_scale_row_bytes(matrix);
}

static uint64_t moer_matrix_bytes(const moer_matrix *matrix) {
    uint64_t bytes = moer_data_bytes(matrix) + moer_scale_bytes(matrix);
    if (matrix->zero_points != 0) bytes += (uint64_t)matrix->rows * moer_zero_point_row_bytes(matrix);
    return bytes;
}

/* A step is 64 bytes of a row in packed.h, 128 inputs in gguf.h. */
static uint32_t moer_tile_step(const moer_matrix *matrix) {
    const moer_block block = moer_format_block(matrix->format);
    return matrix->format > MOE_ROUTE_FORMAT_GGUF ? 128 : 64 * block.values / block.bytes;
}

static uint32_t moer_tile_steps(const moer_matrix *matrix) { return moer_divide_up(matrix->inner, moer_tile_step(matrix)); }
