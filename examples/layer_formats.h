/*
  layer_formats.h: an expert matrix of a checkpoint, gathered from the tensors of its experts into the arrays that a
  moe_route_weights asks for. Formats stay what they are, but for what is stored transposed or packed along N. Sizes come from the
  file and are checked against it: each tensor must have exactly the shape that the router and the other tensors imply.
*/
#ifndef LAYER_FORMATS_H
#define LAYER_FORMATS_H

#include "layer_names.h"
#include "quantize.h"

static void *layer_alloc(layer_tensors *l, layer_array *array, uint64_t count, uint64_t element_size) {
    array->data = NULL;
    array->size = 0;
    if (count <= SIZE_MAX / 2 / element_size) array->data = calloc(count ? (size_t)count : 1, (size_t)element_size);
    if (array->data) array->size = (size_t)(count * element_size);
    else LAYER_FAIL(l, "out of memory: %llu numbers", (unsigned long long)count);
    return array->data;
}

static void layer_free(layer_array *array) {
    free(array->data);
    memset(array, 0, sizeof *array);
}

/* ---- numbers ---- */

/* Numbers of any type that stands for floats, as f32. */
static int layer_floats(layer_tensors *l, const checkpoint_tensor *tensor, uint64_t count, float *to) {
    void *raw;
    uint64_t i;
    int done = 1;
    if (!layer_is(tensor, "F32 F16 BF16 F8_E8M0")) return layer_refuse(l, tensor, "F32, F16 or BF16 is expected");
    if (layer_count(tensor) != count)
        return LAYER_FAIL(l, "%.200s has %llu numbers instead of %llu", tensor->name, (unsigned long long)layer_count(tensor),
                          (unsigned long long)count);
    raw = malloc(tensor->size ? (size_t)tensor->size : 1);
    if (!raw) return LAYER_FAIL(l, "out of memory");
    if (!checkpoint_read(l->from, tensor, raw, 0, (size_t)tensor->size)) done = 0;
    for (i = 0; i < count && done; i++) {
        if (strcmp(tensor->type, "F8_E8M0") == 0) to[i] = (float)ldexp(1.0, ((const unsigned char *)raw)[i] - 127);
        else
            to[i] = quantize_load(raw,
                                  strcmp(tensor->type, "F32") == 0   ? QUANTIZE_F32
                                  : strcmp(tensor->type, "F16") == 0 ? QUANTIZE_F16
                                                                     : QUANTIZE_BF16,
                                  (size_t)i);
    }
    free(raw);
    return done;
}

static int layer_vector(layer_tensors *l, const checkpoint_tensor *tensor, uint64_t count, layer_array *to) {
    return layer_alloc(l, to, count, sizeof(float)) && layer_floats(l, tensor, count, (float *)to->data);
}

/* The bytes of a parameter of all experts, one after the other; each must have the first one's type and this shape. */
static int layer_gather(layer_tensors *l, const char *projection, const char *parameter, uint64_t d0, uint64_t d1, uint64_t d2,
                        layer_array *to) {
    const checkpoint_tensor *first = layer_parameter(l, projection, 0, parameter);
    const uint32_t count = l->per_expert ? l->num_experts : 1;
    uint64_t shape[4], size;
    uint32_t e;
    shape[0] = l->per_expert ? 1 : l->num_experts;
    shape[1] = d0;
    shape[2] = d1;
    shape[3] = d2;
    if (!first) return LAYER_FAIL(l, "%.200s: its %s has no %s", l->experts, projection, parameter);
    size = first->size;
    if (!layer_alloc(l, to, count, size ? size : 1)) return 0;
    for (e = 0; e < count; e++) {
        const checkpoint_tensor *tensor = layer_parameter(l, projection, e, parameter);
        const uint64_t flat[2] = {shape[0] * d0, d1 * d2}; /* DBRX has the experts' rows one after the other */
        if (!tensor)
            return LAYER_FAIL(l, "%.200s: expert %u of %u has no %s.%s", l->experts, (unsigned)e, (unsigned)count, projection,
                              parameter);
        if (!layer_has_shape(tensor, shape, 4) && !layer_has_shape(tensor, flat, 2)) {
            char why[128];
            snprintf(why, sizeof why, "the others imply [%u, %llu, %llu, %llu]", l->per_expert ? 1u : (unsigned)l->num_experts,
                     (unsigned long long)d0, (unsigned long long)d1, (unsigned long long)d2);
            return layer_refuse(l, tensor, why);
        }
        if (strcmp(tensor->type, first->type) != 0 || tensor->size != size)
            return layer_refuse(l, tensor, "another type than the first expert's");
        if (!checkpoint_read(l->from, tensor, (char *)to->data + e * size, 0, (size_t)size)) return 0;
    }
    return 1;
}

/* The same as f32, with `per_expert` numbers an expert; reciprocals on request. */
static int layer_gather_floats(layer_tensors *l, const char *projection, const char *parameter, uint64_t per_expert,
                               int reciprocal, layer_array *to) {
    const uint32_t count = l->per_expert ? l->num_experts : 1;
    uint32_t e;
    size_t i;
    if (!layer_alloc(l, to, l->num_experts * per_expert, sizeof(float))) return 0;
    for (e = 0; e < count; e++) {
        const checkpoint_tensor *tensor = layer_parameter(l, projection, e, parameter);
        if (!tensor)
            return LAYER_FAIL(l, "%.200s: expert %u of %u has no %s.%s", l->experts, (unsigned)e, (unsigned)count, projection,
                              parameter);
        if (!layer_floats(l, tensor, l->num_experts / count * per_expert, (float *)to->data + e * per_expert)) return 0;
    }
    for (i = 0; i < to->size / sizeof(float) && reciprocal; i++) ((float *)to->data)[i] = 1.0f / ((float *)to->data)[i];
    return 1;
}

/* ---- one matrix in its format ---- */

/* Inputs that share a scale, when there are `groups` of them to a row; 0 for one. */
static int layer_group_size(layer_tensors *l, const checkpoint_tensor *scales, uint32_t inner, uint64_t groups,
                            uint32_t *group_size) {
    static const uint32_t sizes[] = {32, 64, 128, 16};
    int i;
    *group_size = 0;
    if (groups == 1) return 1;
    for (i = 0; i < 4 && !*group_size; i++)
        if ((inner - 1) / sizes[i] + 1 == groups) *group_size = sizes[i];
    return *group_size ? 1 : layer_refuse(l, scales, "its columns are no groups of 16, 32, 64 or 128 inputs");
}

/* A scale a row from one for the whole matrix. */
static int layer_spread(layer_tensors *l, layer_array *scales, uint32_t rows) {
    layer_array spread;
    size_t i;
    if (!layer_alloc(l, &spread, (uint64_t)l->num_experts * rows, sizeof(float))) return 0;
    for (i = 0; i < (size_t)l->num_experts * rows; i++) ((float *)spread.data)[i] = ((const float *)scales->data)[i / rows];
    layer_free(scales);
    *scales = spread;
    return 1;
}

/* quantization_config, which composite models have inside or outside of their text part; NULL without one. */
static const cJSON *layer_quantization(const layer_tensors *l) {
    const cJSON *inside = config_find(config_text_part(l->from->config), "quantization_config");
    return inside ? inside : config_find(l->from->config, "quantization_config");
}

/* INT8 and FP8, a byte a weight: scales by 128 x 128, by row, by group, or one. */
static int layer_load_bytes(layer_tensors *l, const char *projection, moe_route_format format, layer_matrix *m) {
    static const char *const names[] = {"weight_scale_inv", "weight_scale", "scale_inv", "scale"};
    const checkpoint_tensor *scale = NULL;
    const uint64_t blocks[2] = {(m->rows - 1) / 128 + 1, (m->inner - 1) / 128 + 1};
    uint64_t count;
    size_t i = 0;
    while (i < 4 && (scale = layer_parameter(l, projection, 0, names[i])) == NULL) i++;
    if (!scale)
        return LAYER_FAIL(l, "%.200s: %s has 8-bit weights and no scales by a name that is known, such as weight_scale_inv",
                          l->experts, projection);
    count = layer_count(scale) / (l->per_expert ? 1 : l->num_experts);
    m->weights.format = format;
    m->weights.scales_dtype = layer_dtype(scale);
    if (!layer_gather(l, projection, "weight", m->rows, m->inner, 1, &m->data)) return 0;
    if (count == 1) { /* one for the matrix */
        m->weights.scales_dtype = MOE_ROUTE_F32;
        return layer_gather_floats(l, projection, names[i], 1, 0, &m->scales) && layer_spread(l, &m->scales, m->rows);
    }
    if (count != m->rows && format == MOE_ROUTE_FORMAT_FP8 && count == blocks[0] * blocks[1]) {
        const cJSON *size = config_find(layer_quantization(l), "weight_block_size"), *item;
        cJSON_ArrayForEach(item, size)
            if (!cJSON_IsNumber(item) || item->valuedouble != 128)
                return LAYER_FAIL(l, "quantization_config.weight_block_size isn't [128, 128]");
        m->weights.group_size = m->weights.group_rows = 128;
        if (m->weights.scales_dtype == MOE_ROUTE_DTYPE_DEFAULT) { /* E8M0: powers of two */
            m->weights.scales_dtype = MOE_ROUTE_F32;
            return layer_gather_floats(l, projection, names[i], count, 0, &m->scales);
        }
        return layer_gather(l, projection, names[i], blocks[0], blocks[1], 1, &m->scales);
    }
    if (m->weights.scales_dtype == MOE_ROUTE_DTYPE_DEFAULT || count % m->rows)
        return layer_refuse(l, scale, "scales are F32, F16 or BF16, by 128 x 128, by row, by group of a row, or one");
    if (!layer_group_size(l, scale, m->inner, count / m->rows, &m->weights.group_size)) return 0;
    if (format == MOE_ROUTE_FORMAT_FP8 && m->weights.group_size % 128)
        return layer_refuse(l, scale, "FP8 has a scale for 128 inputs, or for a row");
    return layer_gather(l, projection, names[i], m->rows, count / m->rows, 1, &m->scales);
}

/* compressed-tensors' zero points: int32 [N / 8, G], 4 bits each along N; the library's: bytes [N, ceil(G / 2)]. */
static int layer_load_packed_zero_points(layer_tensors *l, const char *projection, uint32_t groups, layer_matrix *m) {
    layer_array words;
    const size_t row_bytes = (groups + 1) / 2;
    uint32_t e, n, g;
    int done;
    memset(&words, 0, sizeof words);
    if (m->weights.format != MOE_ROUTE_FORMAT_INT4 || m->rows % 8)
        return LAYER_FAIL(l, "%.200s: the zero points of %s are packed in a way that isn't known", l->experts, projection);
    done = layer_gather(l, projection, "weight_zero_point", m->rows / 8, groups, 1, &words) &&
           layer_alloc(l, &m->zero_points, (uint64_t)l->num_experts * m->rows, row_bytes);
    if (done && words.size != (size_t)l->num_experts * m->rows / 8 * groups * 4)
        done = LAYER_FAIL(l, "%.200s: the zero points of %s aren't I32", l->experts, projection);
    for (e = 0; e < l->num_experts && done; e++)
        for (n = 0; n < m->rows; n++)
            for (g = 0; g < groups; g++) {
                const uint32_t word = ((const uint32_t *)words.data)[((size_t)e * (m->rows / 8) + n / 8) * groups + g];
                unsigned char *byte = (unsigned char *)m->zero_points.data + ((size_t)e * m->rows + n) * row_bytes + g / 2;
                *byte = (unsigned char)(*byte | (word >> n % 8 * 4 & 15u) << g % 2 * 4);
            }
    layer_free(&words);
    return done;
}

/* compressed-tensors' pack-quantized: int32 [N, K / 8] or [N, K / 4], codes without sign. */
static int layer_load_packed(layer_tensors *l, const char *projection, const checkpoint_tensor *codes, layer_matrix *m) {
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, "weight_scale");
    const uint64_t columns = codes->shape[codes->rank - 1];
    uint64_t groups;
    if (columns * 8 == m->inner) m->weights.format = MOE_ROUTE_FORMAT_INT4;
    else if (columns * 4 == m->inner) m->weights.format = MOE_ROUTE_FORMAT_INT8;
    else return layer_refuse(l, codes, "words of 4 or 8 bits for each input are expected");
    if (!scale || layer_dtype(scale) == MOE_ROUTE_DTYPE_DEFAULT)
        return scale ? layer_refuse(l, scale, "scales are F32, F16 or BF16")
                     : LAYER_FAIL(l, "%.200s: its %s has no weight_scale", l->experts, projection);
    if (layer_parameter(l, projection, 0, "weight_g_idx"))
        return LAYER_FAIL(l, "%.200s: %s reorders its inputs (weight_g_idx), which isn't supported", l->experts, projection);
    groups = layer_count(scale) / ((uint64_t)m->rows * (l->per_expert ? 1 : l->num_experts));
    m->weights.codes = MOE_ROUTE_CODES_UNSIGNED;
    m->weights.scales_dtype = layer_dtype(scale);
    return layer_group_size(l, scale, m->inner, groups, &m->weights.group_size) &&
           layer_gather(l, projection, "weight_packed", m->rows, columns, 1, &m->data) &&
           layer_gather(l, projection, "weight_scale", m->rows, groups, 1, &m->scales) &&
           (!layer_parameter(l, projection, 0, "weight_zero_point") ||
            layer_load_packed_zero_points(l, projection, (uint32_t)groups, m));
}

/* E2M1, two a byte: MXFP4 with power-of-two scales for 32 inputs, NVFP4 with E4M3 scales for 16 and one above. */
static int layer_load_fp4(layer_tensors *l, const char *projection, const char *parameter, layer_matrix *m) {
    const char *scales = layer_parameter(l, projection, 0, "weight_scale") ? "weight_scale" : "scale";
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, scales);
    if (!scale) return LAYER_FAIL(l, "%.200s: %s has 4-bit weights and no weight_scale", l->experts, projection);
    if (!layer_gather(l, projection, parameter, m->rows, m->inner / 2, 1, &m->data)) return 0;
    if (layer_is(scale, "F8_E4M3")) {
        m->weights.format = MOE_ROUTE_FORMAT_NVFP4;
        if (!layer_gather(l, projection, scales, m->rows, m->inner / 16, 1, &m->scales)) return 0;
        if (layer_parameter(l, projection, 0, "weight_scale_2"))
            return layer_gather_floats(l, projection, "weight_scale_2", 1, 0, &m->global_scales);
        if (layer_parameter(l, projection, 0, "weight_global_scale"))
            return layer_gather_floats(l, projection, "weight_global_scale", 1, 1, &m->global_scales);
        return 1;
    }
    if (!layer_is(scale, "U8 F8_E8M0")) return layer_refuse(l, scale, "4-bit floats have scales of E4M3, E8M0 or U8");
    m->weights.format = MOE_ROUTE_FORMAT_MXFP4;
    return layer_gather(l, projection, scales, m->rows, m->inner / 32, 1, &m->scales);
}

/* GPT-OSS: blocks [E, N, K / 32, 16]. */
static int layer_load_blocks(layer_tensors *l, const char *projection, const checkpoint_tensor *codes, layer_matrix *m) {
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, "scales");
    if (!layer_is(codes, "U8") || !scale || !layer_is(scale, "U8"))
        return layer_refuse(l, codes, "blocks and scales of U8 are expected");
    m->weights.format = MOE_ROUTE_FORMAT_MXFP4;
    return layer_gather(l, projection, "blocks", m->rows, m->inner / 32, 16, &m->data) &&
           layer_gather(l, projection, "scales", m->rows, m->inner / 32, 1, &m->scales);
}

/* GPTQ: qweight int32 [K / 8, N], scales [G, N], qzeros int32 [G, N / 8] with the zero point, in version 1 less 1, g_idx [K]. */
static int layer_load_gptq(layer_tensors *l, const char *projection, layer_matrix *m) {
    const checkpoint_tensor *scale = layer_parameter(l, projection, 0, "scales"),
                            *order = layer_parameter(l, projection, 0, "g_idx");
    const uint32_t rows = m->rows, words = m->inner / 8;
    const char *method = config_text(layer_quantization(l), "quant_method");
    const char *version = config_text(layer_quantization(l), "checkpoint_format");
    const unsigned less = version && strcmp(version, "gptq_v2") == 0 ? 0 : 1;
    layer_array codes, scales, zeros, index;
    uint32_t groups, e, n, i;
    int done;
    memset(&codes, 0, sizeof codes);
    memset(&scales, 0, sizeof scales);
    memset(&zeros, 0, sizeof zeros);
    memset(&index, 0, sizeof index);
    if (method && strcmp(method, "gptq") != 0)
        return LAYER_FAIL(l, "%.200s: %s.qweight is of quant_method %.64s; gptq is supported", l->experts, projection, method);
    if (!scale || layer_dtype(scale) == MOE_ROUTE_DTYPE_DEFAULT || layer_dtype(scale) == MOE_ROUTE_F32)
        return LAYER_FAIL(l, "%.200s: the GPTQ weights of %s have no scales of F16 or BF16", l->experts, projection);
    if (m->inner % 8 || rows % 8)
        return LAYER_FAIL(l, "%.200s: %s has %u x %u GPTQ weights, no multiples of 8", l->experts, projection, (unsigned)rows,
                          (unsigned)m->inner);
    groups = (uint32_t)(layer_count(scale) / rows);
    m->weights.format = MOE_ROUTE_FORMAT_INT4;
    m->weights.scales_dtype = layer_dtype(scale);
    done = layer_group_size(l, scale, m->inner, groups, &m->weights.group_size) &&
           layer_gather(l, projection, "qweight", words, rows, 1, &codes) &&
           layer_gather(l, projection, "scales", groups, rows, 1, &scales) &&
           layer_gather(l, projection, "qzeros", groups, rows / 8, 1, &zeros);
    if (done && (codes.size != (size_t)l->num_experts * words * rows * 4 ||
                 zeros.size != (size_t)l->num_experts * groups * (rows / 8) * 4))
        done = LAYER_FAIL(l, "%.200s: %s: GPTQ's words aren't I32 of 4 bits each", l->experts, projection);
    if (done && order) {
        done = layer_gather(l, projection, "g_idx", m->inner, 1, 1, &index);
        if (done && index.size != (size_t)l->num_experts * m->inner * 4) done = layer_refuse(l, order, "I32 is expected");
        for (i = 0; done && i < l->num_experts * m->inner; i++)
            if (((const uint32_t *)index.data)[i] != (m->weights.group_size ? i % m->inner / m->weights.group_size : 0))
                done = layer_refuse(l, order, "it reorders the inputs, which isn't supported");
    }
    done = done && layer_alloc(l, &m->data, (uint64_t)l->num_experts * rows, m->inner / 2) &&
           layer_alloc(l, &m->scales, (uint64_t)l->num_experts * rows, (uint64_t)groups * 2) &&
           layer_alloc(l, &m->zero_points, (uint64_t)l->num_experts * rows, (groups + 1) / 2);
    for (e = 0; done && e < l->num_experts; e++)
        for (n = 0; n < rows; n++) {
            const size_t row = (size_t)e * rows + n;
            for (i = 0; i < words; i++)
                ((uint32_t *)m->data.data)[row * words + i] = ((const uint32_t *)codes.data)[((size_t)e * words + i) * rows + n];
            for (i = 0; i < groups; i++) {
                const uint32_t word = ((const uint32_t *)zeros.data)[((size_t)e * groups + i) * (rows / 8) + n / 8];
                unsigned char *byte = (unsigned char *)m->zero_points.data + row * ((groups + 1) / 2) + i / 2;
                const unsigned zero_point = (word >> n % 8 * 4 & 15u) + less;
                if (zero_point > 15) {
                    done = LAYER_FAIL(l, "%.200s: a zero point of %s is 16, which has no 4-bit code", l->experts, projection);
                    break;
                }
                ((uint16_t *)m->scales.data)[row * groups + i] =
                    ((const uint16_t *)scales.data)[((size_t)e * groups + i) * rows + n];
                *byte = (unsigned char)(*byte | zero_point << i % 2 * 4);
            }
        }
    layer_free(&codes);
    layer_free(&scales);
    layer_free(&zeros);
    layer_free(&index);
    return done;
}

/* [E, K, N] becomes [E, N, K]. */
static int layer_transpose(layer_tensors *l, layer_matrix *m) {
    const size_t width = m->data.size / ((size_t)l->num_experts * m->rows * m->inner);
    layer_array turned;
    uint32_t e, n, k;
    if (!layer_alloc(l, &turned, (uint64_t)l->num_experts * m->rows * m->inner, width)) return 0;
    for (e = 0; e < l->num_experts; e++)
        for (n = 0; n < m->rows; n++)
            for (k = 0; k < m->inner; k++)
                memcpy((char *)turned.data + (((size_t)e * m->rows + n) * m->inner + k) * width,
                       (const char *)m->data.data + (((size_t)e * m->inner + k) * m->rows + n) * width, width);
    layer_free(&m->data);
    m->data = turned;
    return 1;
}

static int layer_load_codes(layer_tensors *l, const char *projection, const checkpoint_tensor *codes, int transposed,
                            layer_matrix *m) {
    const moe_route_dtype dtype = layer_dtype(codes);
    const uint64_t columns = codes->rank ? codes->shape[codes->rank - 1] : 0;
    if (dtype != MOE_ROUTE_DTYPE_DEFAULT) {
        m->weights.format = dtype == MOE_ROUTE_F32   ? MOE_ROUTE_FORMAT_F32
                            : dtype == MOE_ROUTE_F16 ? MOE_ROUTE_FORMAT_F16
                                                     : MOE_ROUTE_FORMAT_BF16;
        if (!transposed) return layer_gather(l, projection, "weight", m->rows, m->inner, 1, &m->data);
        return layer_gather(l, projection, "weight", m->inner, m->rows, 1, &m->data) && layer_transpose(l, m);
    }
    if (transposed)
        return layer_refuse(l, codes, "of matrices that are stored [experts, in, out], F32, F16 and BF16 can be turned");
    if (l->from->is_gguf) {
        switch (codes->gguf_type) {
        case 2: case 3: case 6: case 7: case 8: case 10: case 11: case 12: case 13: case 14: case 20: case 23: case 39:
            m->weights.format = (moe_route_format)(MOE_ROUTE_FORMAT_GGUF + codes->gguf_type);
            return layer_gather(l, projection, "weight", m->rows, m->inner, 1, &m->data);
        default:
            return layer_refuse(
                l, codes, "of GGUF's types F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 are supported");
        }
    }
    if (checkpoint_ends(codes->name, "blocks")) return layer_load_blocks(l, projection, codes, m);
    if (checkpoint_ends(codes->name, "qweight"))
        return layer_is(codes, "I32") ? layer_load_gptq(l, projection, m) : layer_refuse(l, codes, "GPTQ has I32");
    if (layer_is(codes, "F8_E4M3")) return layer_load_bytes(l, projection, MOE_ROUTE_FORMAT_FP8, m);
    if (layer_is(codes, "I32") && checkpoint_ends(codes->name, "weight_packed"))
        return layer_load_packed(l, projection, codes, m);
    if (layer_is(codes, "U8 I8") && columns * 2 == m->inner)
        return layer_load_fp4(l, projection, checkpoint_ends(codes->name, "weight_packed") ? "weight_packed" : "weight", m);
    if (layer_is(codes, "I8")) return layer_load_bytes(l, projection, MOE_ROUTE_FORMAT_INT8, m);
    return layer_refuse(l, codes, "weights of this type aren't supported");
}

/* A projection [N, K] of all experts, with its bias where there is one. */
static int layer_load_matrix(layer_tensors *l, const char *projection, uint32_t rows, uint32_t inner, int transposed,
                             layer_matrix *m) {
    const checkpoint_tensor *codes = layer_codes(l, projection), *bias = layer_parameter(l, projection, 0, "bias");
    char text[160];
    m->rows = rows;
    m->inner = inner;
    if (l->from->is_gguf && layer_parameter(l, projection, 0, "scale") && strcmp(projection, l->down) != 0)
        return LAYER_FAIL(l, "%.200s%s has scales of its own, which aren't supported", l->experts, projection);
    if (!layer_load_codes(l, projection, codes, transposed, m)) return 0;
    if (bias) {
        m->weights.bias_dtype = layer_dtype(bias);
        if (m->weights.bias_dtype == MOE_ROUTE_DTYPE_DEFAULT) return layer_refuse(l, bias, "a bias is F32, F16 or BF16");
        if (!layer_gather(l, projection, "bias", rows, 1, 1, &m->bias)) return 0;
    }
    snprintf(m->text, sizeof m->text, "%.200s %s%s", codes->name, checkpoint_describe(codes, text, sizeof text),
             l->per_expert ? " and the other experts'" : "");
    return 1;
}

#endif /* LAYER_FORMATS_H */
