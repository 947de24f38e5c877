/*
  layer.c: a layer's life: its description is checked and completed, the variants it needs are made, its workspace is laid
  out. The router's description belongs to router.c, what an operation launches to sequence.c, the operations' own arguments
  to operations.c.
*/
#include "internal.h"

/* ---- checking a description ---- */

/* Checks what `matrix` takes over from `from` beside its data, and completes it. */
static moe_route_status moer_layer_check_scales(moe_route_layer *layer, const moe_route_weights *from, const char *name, moer_matrix *matrix) {
    moe_route_context *context = layer->context;
    const int addresses = context->device != MOE_ROUTE_DEVICE_COMPILE;
    const moe_route_format format = from->format;
    const int integers = format == MOE_ROUTE_FORMAT_INT8 || format == MOE_ROUTE_FORMAT_INT4, fp8 = format == MOE_ROUTE_FORMAT_FP8;
    const uint32_t size = from->group_size;
    if (!moer_has_scales(format)) {
        if (from->scales != 0 || size != 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s has scales or a group_size; its format has none", name);
    } else if (integers || fp8) {
        const moe_route_dtype dtype = moer_dtype_or(from->scales_dtype, fp8 ? MOE_ROUTE_F32 : MOE_ROUTE_F16);
        if (dtype == MOE_ROUTE_DTYPE_DEFAULT)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales_dtype is %d; allowed is F32 (1), F16 (2) or BF16 (3)", name, (int)from->scales_dtype);
        matrix->scales_kind = (moer_scales)dtype;
        if (integers && size != 0 && size != 16 && size != 32 && size != 64 && size != 128)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_size is %u; allowed is 0 (a scale a row), 16, 32, 64 or 128", name, (unsigned)size);
        if (fp8 && size != 0 && size != 128)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_size is %u; allowed with FP8 is 0 (a scale a row) or 128", name, (unsigned)size);
        matrix->group_size = size;
    } else {
        matrix->group_size = format == MOE_ROUTE_FORMAT_MXFP4 ? 32 : 16;
        matrix->scales_kind = format == MOE_ROUTE_FORMAT_MXFP4 ? MOER_SCALES_E8M0 : MOER_SCALES_E4M3;
        if (size != 0 && size != matrix->group_size)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_size is %u; this format's is %u, or 0 for that", name, (unsigned)size, (unsigned)matrix->group_size);
        if (from->scales_dtype != MOE_ROUTE_DTYPE_DEFAULT)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales_dtype is %d; this format's scales are bytes, allowed is 0", name, (int)from->scales_dtype);
    }
    if (matrix->group_size != 0) matrix->num_groups = (matrix->inner - 1) / matrix->group_size + 1;

    if (from->group_rows > 1) matrix->group_rows = from->group_rows;
    if (matrix->group_rows != 1 && !(fp8 && size == 128 && matrix->group_rows == 128))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_rows is %u; allowed is 0 or 1, or 128 with FP8 and a group_size of 128", name, (unsigned)from->group_rows);
    if (from->codes < MOE_ROUTE_CODES_DEFAULT || from->codes > MOE_ROUTE_CODES_SIGNED || (from->codes != MOE_ROUTE_CODES_DEFAULT && !integers))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.codes is %d; allowed is DEFAULT (0), or with INT8 and INT4 also UNSIGNED (1) or SIGNED (2)", name, (int)from->codes);
    matrix->signed_codes = integers && (from->codes == MOE_ROUTE_CODES_SIGNED || (from->codes == MOE_ROUTE_CODES_DEFAULT && format == MOE_ROUTE_FORMAT_INT8));
    if (from->zero_points != 0 && !integers)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.zero_points is 0x%llx; its format has none, allowed is 0", name, from->zero_points);
    matrix->zero_points = from->zero_points;

    if (moer_has_scales(format)) {
        const unsigned scale_size = (unsigned)moer_scale_size(matrix->scales_kind);
        matrix->scales = from->scales;
        if (addresses && from->scales == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales is 0; this format needs scales", name);
        if (from->scales % scale_size != 0)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales is 0x%llx; allowed is a multiple of %u", name, from->scales, scale_size);
    }

    if (from->global_scales_shape < MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT || from->global_scales_shape > MOE_ROUTE_GLOBAL_SCALES_PER_PART ||
        (from->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_PART && (matrix != &layer->gate_up || !layer->gated)))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.global_scales_shape is %d; allowed is PER_EXPERT (0), PER_TENSOR (1) or, with gate_up and a gate, PER_PART (2)", name,
                         (int)from->global_scales_shape);
    if (from->global_scales == 0) return MOE_ROUTE_OK;
    if (format != MOE_ROUTE_FORMAT_NVFP4)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.global_scales is 0x%llx; its format has none, allowed is 0", name, from->global_scales);
    if (from->global_scales % 4 != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.global_scales is 0x%llx; allowed is a multiple of 4", name, from->global_scales);
    matrix->global_scales = from->global_scales;
    matrix->global = from->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR   ? MOER_GLOBAL_PER_TENSOR
                     : from->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT ? MOER_GLOBAL_PER_EXPERT
                     : layer->interleaved                                              ? MOER_GLOBAL_INTERLEAVED
                                                                                       : MOER_GLOBAL_PER_HALF;
    return MOE_ROUTE_OK;
}

static moe_route_status moer_layer_check_matrix(moe_route_layer *layer, const moe_route_weights *from, const char *name, uint32_t rows, uint32_t inner, moer_matrix *matrix) {
    moe_route_context *context = layer->context;
    const int addresses = context->device != MOE_ROUTE_DEVICE_COMPILE; /* nothing to point at when only compiling */
    const moer_block block = moer_format_block(from->format);
    const unsigned alignment = moer_is_quantized(from->format) ? 1 : block.bytes;
    moe_route_status status;
    memset(matrix, 0, sizeof *matrix);
    if (from->format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (block.values == 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.format is %d; allowed are the values of moe_route_format", name, (int)from->format);
    matrix->format = from->format;
    matrix->rows = rows;
    matrix->inner = inner;
    matrix->num_groups = matrix->group_rows = 1;
    matrix->scales_kind = MOER_SCALES_F16;
    matrix->data = from->data;
    matrix->bias = from->bias;
    if (addresses && from->data == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.data is 0; the weights' address is needed", name);
    if (from->data % alignment != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.data is 0x%llx; allowed is a multiple of %u", name, from->data, alignment);
    if (inner % block.values != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s has rows of %u inputs; its format needs a multiple of %u", name, (unsigned)inner, (unsigned)block.values);
    status = moer_layer_check_scales(layer, from, name, matrix);
    if (status != MOE_ROUTE_OK) return status;
    if (from->bias != 0) {
        matrix->bias_dtype = moer_dtype_or(from->bias_dtype, layer->dtype);
        if (matrix->bias_dtype == MOE_ROUTE_DTYPE_DEFAULT)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.bias_dtype is %d; allowed is F32 (1), F16 (2) or BF16 (3)", name, (int)from->bias_dtype);
        if (from->bias % moer_dtype_size(matrix->bias_dtype) != 0)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.bias is 0x%llx; allowed is a multiple of %u", name, from->bias, (unsigned)moer_dtype_size(matrix->bias_dtype));
    }
    return MOE_ROUTE_OK;
}

/* Gate and up as two matrices go through one kernel: they may differ in nothing that it is compiled for. */
static moe_route_status moer_layer_check_up(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    const moer_matrix *gate = &layer->gate_up, *up = &layer->up;
    moe_route_status status;
    if (experts->up.format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (experts->gate_up_order != MOE_ROUTE_GATE_UP_HALVES) return moer_refuse(context, "experts.gate_up_order", (unsigned long long)experts->gate_up_order, "0 where experts.up is given");
    if (experts->up.format != experts->gate_up.format) return moer_refuse(context, "experts.up.format", (unsigned long long)experts->up.format, "that of experts.gate_up, or NONE (0)");
    if (experts->gate_up.global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_PART)
        return moer_refuse(context, "experts.gate_up.global_scales_shape", MOE_ROUTE_GLOBAL_SCALES_PER_PART, "PER_EXPERT (0) or PER_TENSOR (1) where experts.up is given");
    status = moer_layer_check_matrix(layer, &experts->up, "up", gate->rows, gate->inner, &layer->up);
    if (status != MOE_ROUTE_OK) return status;
    if (up->group_size != gate->group_size || up->group_rows != gate->group_rows) return moer_refuse(context, "experts.up.group_size", up->group_size, "as in experts.gate_up, and so is group_rows");
    if (up->scales_kind != gate->scales_kind) return moer_refuse(context, "experts.up.scales_dtype", (unsigned long long)up->scales_kind, "that of experts.gate_up");
    if (up->signed_codes != gate->signed_codes) return moer_refuse(context, "experts.up.codes", (unsigned long long)experts->up.codes, "that of experts.gate_up");
    if ((up->zero_points != 0) != (gate->zero_points != 0)) return moer_refuse(context, "experts.up.zero_points", up->zero_points, "given where those of experts.gate_up are, and 0 otherwise");
    if (up->global != gate->global) return moer_refuse(context, "experts.up.global_scales", up->global_scales, "given as those of experts.gate_up are");
    if (up->bias_dtype != gate->bias_dtype) return moer_refuse(context, "experts.up.bias", up->bias, "given as that of experts.gate_up is, in the same dtype");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_layer_check_activation(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    if (experts->gate_up_order < MOE_ROUTE_GATE_UP_HALVES || experts->gate_up_order > MOE_ROUTE_GATE_UP_NO_GATE)
        return moer_refuse(context, "experts.gate_up_order", (unsigned long long)experts->gate_up_order, "HALVES (0), INTERLEAVED (1) or NO_GATE (2)");
    if (experts->activation < MOE_ROUTE_ACTIVATION_SILU || experts->activation > MOE_ROUTE_ACTIVATION_SITU)
        return moer_refuse(context, "experts.activation", (unsigned long long)experts->activation, "SILU (0), GELU_TANH (1), GELU_ERF (2), RELU2 (3) or SITU (4)");
    if (!moer_is_finite(experts->activation_alpha) || (experts->activation_alpha != 0.0f && experts->activation != MOE_ROUTE_ACTIVATION_SILU))
        return moer_refuse_number(context, "experts.activation_alpha", experts->activation_alpha, "a finite number with SILU, 0 with others");
    layer->gated = experts->gate_up_order != MOE_ROUTE_GATE_UP_NO_GATE;
    layer->interleaved = experts->gate_up_order == MOE_ROUTE_GATE_UP_INTERLEAVED;
    layer->activation = experts->activation;
    if (!moer_is_positive(experts->situ_beta) || (experts->situ_beta != 0.0f && experts->activation != MOE_ROUTE_ACTIVATION_SITU))
        return moer_refuse_number(context, "experts.situ_beta", experts->situ_beta, "0 or a positive number with SITU, 0 with others");
    if (!moer_is_positive(experts->situ_up_beta) || (experts->situ_up_beta != 0.0f && (experts->activation != MOE_ROUTE_ACTIVATION_SITU || !layer->gated)))
        return moer_refuse_number(context, "experts.situ_up_beta", experts->situ_up_beta, "0 or a positive number with SITU and a gate, 0 with others");
    layer->alpha = experts->activation == MOE_ROUTE_ACTIVATION_SITU ? experts->situ_beta : experts->activation_alpha;
    if (layer->alpha == 0.0f) layer->alpha = 1.0f;
    layer->up_beta = experts->situ_up_beta;
    if (!moer_is_finite(experts->up_offset) || (experts->up_offset != 0.0f && !layer->gated))
        return moer_refuse_number(context, "experts.up_offset", experts->up_offset, "a finite number, 0 without gate");
    if (!moer_is_positive(experts->clamp)) return moer_refuse_number(context, "experts.clamp", experts->clamp, "0 (none) or a positive number");
    if ((experts->clamp_position != MOE_ROUTE_CLAMP_BEFORE && experts->clamp_position != MOE_ROUTE_CLAMP_AFTER) ||
        (experts->clamp_position != MOE_ROUTE_CLAMP_BEFORE && experts->clamp == 0.0f))
        return moer_refuse(context, "experts.clamp_position", (unsigned long long)experts->clamp_position, "BEFORE (0), or AFTER (1) with a clamp");
    layer->up_offset = experts->up_offset;
    layer->clamp = experts->clamp;
    layer->clamp_kind = experts->clamp == 0.0f ? MOER_CLAMP_NONE : experts->clamp_position == MOE_ROUTE_CLAMP_BEFORE ? MOER_CLAMP_BEFORE : MOER_CLAMP_AFTER;
    layer->weight_on_input = experts->weight_on_input != 0;
    return MOE_ROUTE_OK;
}

static moe_route_status moer_layer_check_experts(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    moe_route_status status;
    layer->dtype = moer_dtype_or(experts->dtype, MOE_ROUTE_BF16);
    if (layer->dtype == MOE_ROUTE_DTYPE_DEFAULT)
        return moer_refuse(context, "experts.dtype", (unsigned long long)experts->dtype, "F32 (1), F16 (2) or BF16 (3)");
    if (experts->hidden_size > MOER_MAX_SIZE) return moer_refuse(context, "experts.hidden_size", experts->hidden_size, "1 to 65536, or 0 without experts");
    layer->hidden_size = experts->hidden_size;
    status = moer_layer_check_activation(layer, experts);
    if (status != MOE_ROUTE_OK) return status;
    if (experts->gate_up.format == MOE_ROUTE_FORMAT_NONE && experts->down.format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (experts->hidden_size == 0) return moer_refuse(context, "experts.hidden_size", experts->hidden_size, "1 to 65536 with expert weights");
    if (experts->intermediate_size < 1 || experts->intermediate_size > MOER_MAX_SIZE)
        return moer_refuse(context, "experts.intermediate_size", experts->intermediate_size, "1 to 65536 with expert weights");
    layer->intermediate_size = experts->intermediate_size;
    status = moer_layer_check_matrix(layer, &experts->gate_up, "gate_up", experts->intermediate_size * (layer->gated && experts->up.format == MOE_ROUTE_FORMAT_NONE ? 2 : 1), experts->hidden_size, &layer->gate_up);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_up(layer, experts);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_matrix(layer, &experts->down, "down", experts->hidden_size, experts->intermediate_size, &layer->down);
    return status;
}

/* Whether tile.h multiplies on tensor cores. */
static int moer_uses_tensor_cores(const moe_route_layer *layer, const moer_matrix *matrix) {
    if (layer->dtype == MOE_ROUTE_F32) return 0;
    return moer_is_quantized(matrix->format) || (layer->dtype == MOE_ROUTE_F16 && matrix->format == MOE_ROUTE_FORMAT_F16) ||
           (layer->dtype == MOE_ROUTE_BF16 && matrix->format == MOE_ROUTE_FORMAT_BF16);
}

/* The ranges of physical experts that the ranks hold. */
static moe_route_status moer_layer_check_ranks(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    const uint32_t num_experts = layer->router.num_physical_experts;
    uint32_t rank, begin = 0;
    if (experts->num_ranks > MOER_MAX_RANKS) return moer_refuse(context, "experts.num_ranks", experts->num_ranks, "1 to 256, or 0 without ranks");
    if (experts->num_ranks == 0 && experts->rank_experts != NULL) return moer_refuse(context, "experts.num_ranks", 0, "1 to 256 where rank_experts is given");
    layer->num_ranks = experts->num_ranks;
    for (rank = 0; rank < experts->num_ranks; rank++) {
        uint32_t first, count;
        moe_route_rank_range(num_experts, experts->num_ranks, rank, &first, &count);
        if (experts->rank_experts != NULL) count = experts->rank_experts[rank];
        if (count > num_experts - begin)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.rank_experts[%u] is %u; the ranks before hold %u of %u experts", (unsigned)rank, (unsigned)count, (unsigned)begin,
                             (unsigned)num_experts);
        layer->rank_begin[rank] = (uint16_t)begin;
        begin += count;
    }
    layer->rank_begin[rank] = (uint16_t)begin;
    if (rank != 0 && begin != num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.rank_experts adds up to %u; allowed is the number of physical experts, %u", (unsigned)begin, (unsigned)num_experts);
    return MOE_ROUTE_OK;
}

/* Whether more than MOER_SMALL_PAIRS pairs may come. */
static int moer_layer_is_large(const moe_route_layer *layer) { return layer->max_tokens * layer->router.top_k > MOER_SMALL_PAIRS; }

/* Weights whose format was forgotten would make a layer that can only route, and the first call would tell so. */
static moe_route_status moer_layer_check_forgotten(moe_route_layer *layer, const moe_route_weights *weights, const char *name) {
    if (weights->format != MOE_ROUTE_FORMAT_NONE || weights->data == 0) return MOE_ROUTE_OK;
    return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.format is 0 (NONE), but its data are given; allowed are the values of moe_route_format, or no data", name);
}

static moe_route_status moer_layer_check_operations(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    moe_route_context *context = layer->context;
    const uint32_t all = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_MAPS |
                         MOE_ROUTE_OPERATION_MATMUL | MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | MOE_ROUTE_OPERATION_DISPATCH |
                         MOE_ROUTE_OPERATION_EXPERT_ROWS;
    const int has_gate_up = layer->gate_up.format != MOE_ROUTE_FORMAT_NONE, has_down = layer->down.format != MOE_ROUTE_FORMAT_NONE;
    uint32_t operations = desc->operations;
    moe_route_status status;
    if (operations & ~all) return moer_refuse(context, "operations", operations, "an or of moe_route_operation values");
    if (operations == 0) {
        status = moer_layer_check_forgotten(layer, &desc->experts.gate_up, "gate_up");
        if (status == MOE_ROUTE_OK) status = moer_layer_check_forgotten(layer, &desc->experts.up, "up");
        if (status == MOE_ROUTE_OK) status = moer_layer_check_forgotten(layer, &desc->experts.down, "down");
        operations = has_gate_up && has_down ? MOE_ROUTE_OPERATION_LAYER : has_gate_up || has_down ? MOE_ROUTE_OPERATION_MATMUL : MOE_ROUTE_OPERATION_ROUTE;
        if (status != MOE_ROUTE_OK) return status;
    }
    if ((operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_EXPERT_ROWS)) && !(has_gate_up && has_down))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.format is 0 (NONE); operations LAYER, EXPERTS and EXPERT_ROWS need both matrices", has_gate_up ? "down" : "gate_up");
    if ((operations & MOE_ROUTE_OPERATION_MATMUL) && !has_gate_up && !has_down)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.gate_up.format and experts.down.format are 0 (NONE); operation MATMUL needs one of them");
    if ((operations & MOE_ROUTE_OPERATION_MATMUL) && layer->up.format != MOE_ROUTE_FORMAT_NONE)
        return moer_refuse(context, "experts.up.format", (unsigned long long)layer->up.format, "NONE (0) with operation MATMUL, which multiplies one matrix");
    if ((operations & (MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | MOE_ROUTE_OPERATION_DISPATCH)) && layer->hidden_size == 0)
        return moer_refuse(context, "experts.hidden_size", 0, "1 to 65536 for operations EXPAND, COMBINE and DISPATCH");
    if ((operations & MOE_ROUTE_OPERATION_DISPATCH) && layer->num_ranks == 0) return moer_refuse(context, "experts.num_ranks", 0, "1 to 256 for operation DISPATCH");
    if (layer->router.given_physical && (operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_DISPATCH)))
        return moer_refuse(context, "experts.num_physical_experts", desc->experts.num_physical_experts, "0 with operations LAYER, ROUTE and DISPATCH where experts.expert_map isn't given");
    layer->operations = operations;
    layer->max_tokens = desc->max_tokens != 0 ? desc->max_tokens : 16;
    if (layer->max_tokens > MOER_MAX_TOKENS) return moer_refuse(context, "max_tokens", desc->max_tokens, "1 to 1048576, or 0 for 16");
    if (desc->sums_of_max_tokens > MOER_MAX_TOKENS) return moer_refuse(context, "sums_of_max_tokens", desc->sums_of_max_tokens, "1 to 1048576, or 0 for max_tokens");
    layer->rows_dtype = moer_dtype_or(desc->rows_dtype, layer->dtype);
    if (layer->rows_dtype == MOE_ROUTE_DTYPE_DEFAULT) return moer_refuse(context, "rows_dtype", (unsigned long long)desc->rows_dtype, "F32 (1), F16 (2) or BF16 (3)");
    if (desc->dependent_launch < MOE_ROUTE_AUTO || desc->dependent_launch > MOE_ROUTE_OFF)
        return moer_refuse(context, "dependent_launch", (unsigned long long)desc->dependent_launch, "AUTO (0), ON (1) or OFF (2)");
    if (desc->fused_combine < MOE_ROUTE_AUTO || desc->fused_combine > MOE_ROUTE_OFF)
        return moer_refuse(context, "fused_combine", (unsigned long long)desc->fused_combine, "AUTO (0), ON (1) or OFF (2)");
    if (desc->cub_maps < MOE_ROUTE_AUTO || desc->cub_maps > MOE_ROUTE_OFF) return moer_refuse(context, "cub_maps", (unsigned long long)desc->cub_maps, "AUTO (0), ON (1) or OFF (2)");
    if (desc->dependent_launch == MOE_ROUTE_ON && context->device != MOE_ROUTE_DEVICE_CPU && context->target < 90)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "layer: dependent_launch is ON; sm_%u has none, allowed is AUTO or OFF", (unsigned)context->target);
    if (desc->fused_combine == MOE_ROUTE_ON && moer_layer_is_large(layer))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: fused_combine is ON with max_tokens %u and top_k %u; allowed is max_tokens * top_k up to %u",
                         (unsigned)layer->max_tokens, (unsigned)layer->router.top_k, (unsigned)MOER_SMALL_PAIRS);
    layer->dependent = desc->dependent_launch != MOE_ROUTE_OFF && context->target >= 90;
    layer->fused_combine = desc->fused_combine != MOE_ROUTE_OFF;
    layer->cub_maps = desc->cub_maps == MOE_ROUTE_ON && layer->router.num_local_experts <= MOER_MAX_CUB_EXPERTS;
    layer->grouped = has_gate_up && has_down && moer_uses_tensor_cores(layer, &layer->gate_up) && moer_uses_tensor_cores(layer, &layer->down);
    return MOE_ROUTE_OK;
}

/* ---- the variants ---- */

/* Notes a variant down: all that the layer needs are made together, and then `variant` points to it. */
static moe_route_status moer_layer_need(moe_route_layer *layer, const moer_family *family, const char *defines, const moer_variant **variant) {
    return moer_wanted_add(layer->context, layer->wanted, family, defines, variant);
}

/* route.cu; `maps` is 1 for what the layer needs, 2 for all outputs. */
static moe_route_status moer_layer_need_route(moe_route_layer *layer, int select, int maps, const moer_variant **variant) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "SELECT", (unsigned long)select);
    moer_define(defines, "E", layer->router.num_experts);
    moer_define(defines, "K", layer->router.top_k);
    if (select) moer_define_router(defines, &layer->router);
    moer_define(defines, "MAPS", (unsigned long)maps);
    moer_define_placement(defines, &layer->router);
    moer_define(defines, "MAX_PAIRS", layer->max_pairs_small);
    return moer_layer_need(layer, &moer_family_route, defines, variant);
}

static moe_route_status moer_layer_need_topk(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "E", layer->router.num_experts);
    moer_define(defines, "K", layer->router.top_k);
    moer_define_router(defines, &layer->router);
    return moer_layer_need(layer, &moer_family_topk, defines, &layer->topk);
}

/* Whether the maps of so many pairs are sorted by maps_cub.cu: none that are one launch otherwise. */
static int moer_layer_sorts_by_cub(const moe_route_layer *layer, uint32_t num_pairs) {
    return layer->cub_maps && num_pairs > MOER_SORT_PAIRS;
}

/* Threads of its blocks: shared memory, 48 KB, holds a counter for each warp and digit, digits being a power of two above the local experts.
   1024 threads would have too few registers each: on sm_120 they spill. */
static uint32_t moer_cub_maps_threads(const moe_route_layer *layer) { return layer->router.num_local_experts < 512 ? 512 : 256; }

static moe_route_status moer_layer_need_maps(moe_route_layer *layer) {
    const int cub = moer_layer_sorts_by_cub(layer, layer->max_tokens * layer->router.top_k);
    char defines[MOER_DEFINES_MAX] = "";
    moe_route_status status;
    moer_define(defines, "E", layer->router.num_experts);
    moer_define(defines, "K", layer->router.top_k);
    moer_define_placement(defines, &layer->router);
    status = moer_layer_need(layer, &moer_family_maps, defines, &layer->maps);
    if (status != MOE_ROUTE_OK || !cub) return status;
    moer_define(defines, "SORT_THREADS", moer_cub_maps_threads(layer));
    return moer_layer_need(layer, &moer_family_maps_cub, defines, &layer->maps_cub);
}

/* Largest power of two up to 16 that divides both. */
static unsigned moer_alignment(unsigned long long a, unsigned long long b) {
    unsigned alignment = 16;
    while (a % alignment != 0 || b % alignment != 0) alignment /= 2;
    return alignment;
}

static unsigned moer_row_alignment(uint32_t elements, moe_route_dtype dtype) {
    return moer_alignment((unsigned long long)elements * moer_dtype_size(dtype), 0);
}

/* The matrix that goes through the same loads: of two for gate and up the other one, else the matrix itself. */
static const moer_matrix *moer_layer_twin(const moe_route_layer *layer, const moer_matrix *matrix) {
    return matrix == &layer->gate_up && layer->up.format != MOE_ROUTE_FORMAT_NONE ? &layer->up : matrix;
}

/* The share of a multiprocessor's shared memory that each of some blocks may have, in KB: a block takes one itself. */
static uint32_t moer_block_kilobytes(const moe_route_layer *layer, uint32_t blocks) { return (moer_most_shared_bytes(layer->context->target) / 1024 + 1) / blocks - 1; }

/* K inputs of a warp of matmul_bulk.cu: their activations take 32 registers of a lane. Few inputs are shared by more warps. */
static uint32_t moer_bulk_inputs(const moer_matrix *matrix) { return matrix->inner <= 1024 ? 128 : 256; }

static uint32_t moer_bulk_warps(const moer_matrix *matrix) { return moer_divide_up(matrix->inner, moer_bulk_inputs(matrix)); }

/* Blocks of it that share a multiprocessor, each with two warps more: as many as leave a thread the registers it needs. */
static uint32_t moer_bulk_blocks(const moer_matrix *matrix) {
    const uint32_t blocks = (moer_bulk_inputs(matrix) == 128 ? 26 : 20) / (moer_bulk_warps(matrix) + 2);
    return blocks == 0 ? 1 : blocks;
}

/* About what a tile takes there, with `padding` bytes between its rows. */
static size_t moer_bulk_stage(const moer_matrix *matrix, uint32_t padding) {
    return 16 * (moer_row_bytes(matrix) + padding + moer_scale_row_bytes(matrix)) + 128 + (size_t)moer_bulk_warps(matrix) * 512;
}

/* Their shared memory. Three or four tiles under way are enough, and L1, which gets the rest, is what a kernel that follows loads through. */
static uint32_t moer_bulk_shared(const moe_route_layer *layer, const moer_matrix *matrix) {
    const uint32_t blocks = moer_bulk_blocks(matrix), share = moer_block_kilobytes(layer, blocks), three = (uint32_t)(3 * moer_bulk_stage(matrix, 64) / 1024 + 1);
    const uint32_t enough = 134 / blocks > three ? 134 / blocks : three;
    return 1024 * (share < enough ? share : enough);
}

/* Whether tiles of the matrix are what matmul_bulk.cu can copy, and two fit, as far as its shape says: where it lies decides no sum. */
static int moer_matrix_has_bulk_tiles(const moe_route_layer *layer, const moer_matrix *matrix) {
    const size_t row_bytes = moer_row_bytes(matrix), scale_bytes = moer_scale_row_bytes(matrix);
    if (layer->context->target < 90 || !moer_uses_tensor_cores(layer, matrix) || !moer_is_quantized(matrix->format)) return 0;
    if (row_bytes % (matrix->format > MOE_ROUTE_FORMAT_GGUF ? 2 : 16) != 0) return 0;
    if (matrix->zero_points != 0 || matrix->group_rows != 1 || matrix->global > 2 || scale_bytes % 2 != 0 || matrix->rows % 16 != 0 || matrix->inner > 4096) return 0;
    return 2 * moer_bulk_stage(matrix, 144) + 128 <= moer_bulk_shared(layer, matrix);
}

static int moer_matmul_is_bulk(const moe_route_layer *layer, const moer_matrix *matrix) {
    const moer_matrix *other = moer_layer_twin(layer, matrix);
    return moer_matrix_has_bulk_tiles(layer, matrix) && (matrix->data | other->data) % 16 == 0 && (matrix->scales | other->scales) % 16 == 0;
}

/* Warps that share the steps of a row, which is how a sum is cut into parts: those of matmul_bulk.cu. Otherwise a power of two: as few as can hold the
   activations of their steps in registers (stream.h), since a tile costs each of them something beside its steps; or as many as a block may have. */
static uint32_t moer_layer_matmul_warps(const moe_route_layer *layer, const moer_matrix *matrix) {
    const uint32_t steps = moer_tile_steps(matrix), words = moer_tile_step(matrix) / 8; /* of a lane, a step */
    const uint32_t most = 48;
    uint32_t warps = 1;
    if (moer_matrix_has_bulk_tiles(layer, matrix)) return moer_bulk_warps(matrix);
    while (warps < 8 && moer_divide_up(steps, warps) * words > most) warps *= 2;
    return warps;
}

/* Blocks of matmul.cu that share a multiprocessor: with 16 warps there, each has 128 registers. */
static uint32_t moer_matmul_blocks(uint32_t warps) { return warps > 8 ? 1 : 16 / warps; }

/* The order in which tile.h multiplies pairs of a matrix's inputs: 0 is that of memory; packed.h and gguf.h say why. */
static unsigned long moer_pair_order(const moer_matrix *matrix) {
    if (matrix->format > MOE_ROUTE_FORMAT_GGUF) return 1;
    if (matrix->format != MOE_ROUTE_FORMAT_INT4 && matrix->format != MOE_ROUTE_FORMAT_MXFP4 && matrix->format != MOE_ROUTE_FORMAT_NVFP4) return 0;
    return matrix->group_size == 16 ? 1 : 2;
}

/* That of h, which goes from one kernel of ours to another: that of the down matmul, which then needn't rearrange it. */
static unsigned long moer_h_order(const moe_route_layer *layer) {
    return moer_uses_tensor_cores(layer, &layer->down) && layer->intermediate_size % 8 == 0 ? moer_pair_order(&layer->down) : 0;
}

static void moer_define_tile(char *defines, const moe_route_layer *layer, const moer_matrix *matrix) {
    const moer_matrix *other = moer_layer_twin(layer, matrix);
    moer_define(defines, "FORMAT", matrix->format);
    moer_define(defines, "X", layer->dtype);
    moer_define(defines, "ROWS", matrix->rows);
    moer_define(defines, "INNER", matrix->inner);
    moer_define(defines, "GROUP", matrix->group_size);
    moer_define(defines, "GROUP_ROWS", matrix->group_rows);
    moer_define(defines, "SCALES", matrix->scales_kind);
    moer_define(defines, "SCALE_ALIGN", moer_alignment(moer_scale_row_bytes(matrix), matrix->scales | other->scales));
    moer_define(defines, "ZERO_POINTS", matrix->zero_points != 0);
    moer_define(defines, "SIGNED", (unsigned long)matrix->signed_codes);
    moer_define(defines, "GLOBAL", matrix->global);
    moer_define(defines, "BIAS", matrix->bias_dtype);
    moer_define(defines, "WEIGHT_ALIGN", moer_alignment(moer_row_bytes(matrix), matrix->data | other->data));
    moer_define(defines, "X_ALIGN", moer_row_alignment(matrix->inner, layer->dtype));
    moer_define(defines, "K", layer->router.top_k);
}

typedef struct moer_matmul_kind {
    int activated, x_index, out_index; /* activated: gate_up with what follows it up to h */
    moe_route_dtype out;
    uint32_t warps;
} moer_matmul_kind;

/* What matmul.cu and grouped.cu have in common; `weighs`: they multiply by the router's weights. */
static void moer_define_matmul(char *defines, const moe_route_layer *layer, const moer_matrix *matrix, const moer_matmul_kind *kind, int weighs) {
    moer_define_tile(defines, layer, matrix);
    moer_define(defines, "GATED", kind->activated && layer->gated);
    moer_define(defines, "INTERLEAVED", kind->activated && layer->interleaved);
    moer_define_given(defines, "UP_APART", kind->activated && layer->up.format != MOE_ROUTE_FORMAT_NONE);
    moer_define(defines, "ACTIVATION", kind->activated ? (unsigned long)layer->activation + 1 : 0);
    moer_define(defines, "CLAMP", kind->activated ? (unsigned long)layer->clamp_kind : 0);
    moer_define(defines, "WEIGHT_ON_INPUT", (unsigned long)(kind->activated && layer->weight_on_input));
    moer_define(defines, "WEIGHTS", weighs ? layer->router.weights_dtype : MOE_ROUTE_F32);
    moer_define(defines, "OUT", kind->out);
    moer_define(defines, "X_INDEX", (unsigned long)kind->x_index);
}

/* Whether the matmuls of few rows multiply codes with a zero as they are (packed.h, gguf.h): where a warp has registers for what that takes. Kernels that don't, with zero points or subs of
   16, make nothing of it. */
static int moer_uses_code_sums(const moe_route_layer *layer, const moer_matrix *matrix, int activated) {
    if (matrix->format > MOE_ROUTE_FORMAT_GGUF) return moer_matrix_has_bulk_tiles(layer, matrix) && moer_bulk_inputs(matrix) == 128;
    return matrix->format == MOE_ROUTE_FORMAT_INT4 && activated && moer_divide_up(moer_tile_steps(matrix), moer_layer_matmul_warps(layer, matrix)) <= 2;
}

/* matmul.cu for few and for many rows an expert. */
static moe_route_status moer_layer_need_matmul(moe_route_layer *layer, const moer_matrix *matrix, const moer_matmul_kind *kind, int few, int many, const moer_variant *variants[2]) {
    moe_route_status status = MOE_ROUTE_OK;
    int i;
    for (i = few ? 0 : 1; i < (many ? 2 : 1) && status == MOE_ROUTE_OK; i++) {
        const int bulk = i == 0 && moer_matmul_is_bulk(layer, matrix);
        const uint32_t blocks = bulk ? moer_bulk_blocks(matrix) : moer_matmul_blocks(kind->warps);
        char defines[MOER_DEFINES_MAX] = "";
        moer_define_matmul(defines, layer, matrix, kind, kind->activated && layer->weight_on_input);
        moer_define_given(defines, "CODE_SUMS", (unsigned long)moer_uses_code_sums(layer, matrix, kind->activated));
        moer_define(defines, "OUT_INDEX", (unsigned long)kind->out_index);
        moer_define_given(defines, "OUT_ORDER", kind->activated ? moer_h_order(layer) : 0);
        moer_define_given(defines, "X_ORDER", kind->x_index == 2 ? moer_h_order(layer) : 0);
        moer_define(defines, "WARPS", kind->warps);
        moer_define(defines, "RESIDENT_BLOCKS", blocks);
        moer_define(defines, "SHARED_BYTES", bulk ? moer_bulk_shared(layer, matrix) : MOER_MATMUL_SHARED / blocks);
        if (!bulk) moer_define(defines, "ROW_BLOCKS", i == 1 && moer_uses_tensor_cores(layer, matrix) ? kind->warps <= 8 ? 4 : 2 : 1);
        status = moer_layer_need(layer, bulk ? &moer_family_matmul_bulk : &moer_family_matmul, defines, &variants[i]);
    }
    return status;
}

/* Whether a matrix for tensor cores has weights that are multiplied as they are. */
static int moer_copies_weights(const moer_matrix *matrix) { return matrix->format <= MOE_ROUTE_FORMAT_BF16; }

/* The pairs up to which an expert has few rows on average. */
static uint32_t moer_layer_few_pairs(const moe_route_layer *layer) {
    const uint32_t rows = moer_copies_weights(&layer->gate_up) ? MOER_FEW_ROWS_PLAIN : moer_matrix_has_bulk_tiles(layer, &layer->gate_up) ? MOER_FEW_ROWS_BULK : MOER_FEW_ROWS;
    const uint32_t few = rows * layer->router.num_local_experts;
    return few < MOER_SMALL_PAIRS ? MOER_SMALL_PAIRS : few;
}

static int moer_layer_has_many_rows(const moe_route_layer *layer, uint32_t num_pairs) { return num_pairs > moer_layer_few_pairs(layer); }

static int moer_layer_has_many(const moe_route_layer *layer) { return moer_layer_has_many_rows(layer, layer->max_tokens * layer->router.top_k); }

static int moer_layer_runs_grouped(const moe_route_layer *layer, uint32_t num_pairs) { return layer->grouped && moer_layer_has_many_rows(layer, num_pairs); }

/* Whether the matrix goes through grouped_warpgroups.cu: on compute capability 9.0, where rows are copied in pieces of 16 bytes. */
static int moer_grouped_takes_warpgroups(const moe_route_layer *layer, const moer_matrix *matrix) {
    if (layer->context->target != MOER_WARPGROUPS_TARGET || matrix->inner % 8 != 0 || moer_grouped_outputs(layer, matrix) % 8 != 0) return 0;
    return !moer_copies_weights(matrix) || moer_alignment(moer_row_bytes(matrix), matrix->data | moer_layer_twin(layer, matrix)->data) == 16;
}

/* Columns of what a matrix makes: of h, or of the layer. */
static uint32_t moer_grouped_outputs(const moe_route_layer *layer, const moer_matrix *matrix) {
    return matrix == &layer->gate_up && layer->gated ? layer->intermediate_size : matrix->rows;
}

/* Tiles across the matrix: of 128 weight rows, or 256 where warpgroups multiply weights that needn't be unpacked. */
static uint32_t moer_grouped_weights(const moe_route_layer *layer, const moer_matrix *matrix) {
    return moer_copies_weights(matrix) && moer_grouped_takes_warpgroups(layer, matrix) ? 256 : 128;
}

static uint32_t moer_grouped_columns(const moe_route_layer *layer, const moer_matrix *matrix) {
    const uint32_t weights = moer_grouped_weights(layer, matrix);
    return (moer_grouped_outputs(layer, matrix) - 1) / (matrix == &layer->gate_up && layer->gated ? weights / 2 : weights) + 1;
}

/* Warps of grouped_warpgroups.cu that bring the weights. */
static uint32_t moer_grouped_producers(const moer_matrix *matrix) { return moer_copies_weights(matrix) ? 4 : 8; }

static uint32_t moer_grouped_threads(const moe_route_layer *layer, const moer_matrix *matrix) {
    return 256 + (moer_grouped_takes_warpgroups(layer, matrix) ? moer_grouped_producers(matrix) * 32 : 0);
}

static void moer_define_grouped(char *defines, const moe_route_layer *layer, const moer_matrix *matrix, uint32_t tile) {
    const uint32_t most = moer_most_shared_bytes(layer->context->target) / 1024;
    const int three = tile == 0 && matrix->format < MOE_ROUTE_FORMAT_GGUF && (moer_copies_weights(matrix) || most > 3 * 40); /* unpacked weights alone are 32 KB */
    const uint32_t blocks = three ? 3 : 2, share = moer_block_kilobytes(layer, blocks);
    const uint32_t enough = moer_copies_weights(matrix) ? share : blocks == 3 ? 54 : 64; /* codes are loaded through L1, which is to be left some */
    moer_define(defines, "TILE_ROWS", 32ul << tile);
    if (moer_grouped_takes_warpgroups(layer, matrix)) {
        moer_define(defines, "WARPGROUPS", 1);
        moer_define(defines, "TILE_WEIGHTS", moer_grouped_weights(layer, matrix));
        moer_define(defines, "PRODUCER_WARPS", moer_grouped_producers(matrix));
        moer_define(defines, "PRODUCER_REGISTERS", moer_copies_weights(matrix) ? 56 : 112);
        moer_define(defines, "SHARED_BYTES", 1024ul * most);
        return;
    }
    moer_define(defines, "RESIDENT_BLOCKS", blocks);
    moer_define(defines, "SHARED_BYTES", 1024ul * (share < enough ? share : enough));
}

static moe_route_status moer_layer_need_grouped(moe_route_layer *layer, const moer_matrix *matrix, const moer_matmul_kind *kind, const moer_variant **variants) {
    const int weighs_output = !kind->activated && !layer->weight_on_input;
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t tile;
    for (tile = 0; tile < MOER_GROUPED_TILES && status == MOE_ROUTE_OK; tile++) {
        char defines[MOER_DEFINES_MAX] = "";
        if (!moer_layer_meets_tile(layer, tile)) continue;
        moer_define_matmul(defines, layer, matrix, kind, weighs_output || (kind->activated && layer->weight_on_input));
        moer_define(defines, "WEIGHT_ON_OUTPUT", (unsigned long)weighs_output);
        moer_define_grouped(defines, layer, matrix, tile);
        status = moer_layer_need(layer, moer_grouped_takes_warpgroups(layer, matrix) ? &moer_family_grouped_warpgroups : &moer_family_grouped, defines, &variants[tile]);
    }
    return status;
}

/* The constants of epilogue.h; `weighted`: the rows have the router's weights already. */
static void moer_define_epilogue(char *defines, const moe_route_layer *layer, int weighted) {
    moer_define(defines, "WEIGHTS", layer->router.weights_dtype);
    moer_define(defines, "WEIGHT_ON_INPUT", (unsigned long)weighted);
    moer_define(defines, "FIRST_IDENTITY", layer->router.num_identity != 0 ? layer->router.first_identity : 0);
    moer_define(defines, "NUM_IDENTITY", layer->router.num_identity);
}

static moe_route_status moer_layer_need_down_fused(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define_tile(defines, layer, &layer->down);
    moer_define_epilogue(defines, layer, layer->weight_on_input);
    moer_define_given(defines, "X_ORDER", moer_h_order(layer));
    moer_define(defines, "K_SPLIT", layer->down_parts);
    moer_define(defines, "MAX_PAIRS", layer->max_pairs_small);
    return moer_layer_need(layer, &moer_family_down, defines, &layer->down_fused);
}

/* Columns that a thread of combine.cu takes: 16 bytes of output at most. */
static uint32_t moer_combine_vector(const moe_route_layer *layer) {
    uint32_t vector = layer->dtype == MOE_ROUTE_F32 ? 4 : 8;
    while (layer->hidden_size % vector != 0) vector /= 2;
    return vector;
}

static moe_route_status moer_layer_need_combine(moe_route_layer *layer, moe_route_dtype rows_dtype, int weighted, const moer_variant **variant) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "HIDDEN", layer->hidden_size);
    moer_define(defines, "K", layer->router.top_k);
    moer_define_epilogue(defines, layer, weighted);
    moer_define(defines, "ROWS_DTYPE", rows_dtype);
    moer_define(defines, "OUT", layer->dtype);
    moer_define(defines, "VECTOR", moer_combine_vector(layer));
    return moer_layer_need(layer, &moer_family_combine, defines, variant);
}

/* Bytes that a thread of expand.cu copies. */
static uint32_t moer_expand_unit(const moe_route_layer *layer) {
    const uint32_t alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    return alignment == 16 ? 16 : alignment >= 4 ? 4 : 2;
}

static moe_route_status moer_layer_need_expand(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "ROW_BYTES", (unsigned long)(layer->hidden_size * moer_dtype_size(layer->dtype)));
    moer_define(defines, "K", layer->router.top_k);
    moer_define(defines, "UNIT", moer_expand_unit(layer));
    return moer_layer_need(layer, &moer_family_expand, defines, &layer->expand);
}

/* Whether the layer's own kernels for many rows an expert are matmul.cu's. */
static int moer_layer_runs_many(const moe_route_layer *layer) { return moer_layer_has_many(layer) && !layer->grouped; }

/* x up to h: of the layer (`runs`), and of expert rows (`slots`), which go through matmul.cu whatever their number. */
static moe_route_status moer_layer_need_gate_up(moe_route_layer *layer, int runs, int slots) {
    const int many = slots ? moer_layer_has_many(layer) : moer_layer_runs_many(layer);
    moe_route_status status;
    moer_matmul_kind kind;
    memset(&kind, 0, sizeof kind);
    kind.activated = 1;
    kind.out = layer->dtype;
    kind.warps = moer_layer_matmul_warps(layer, &layer->gate_up);
    status = moer_layer_need_matmul(layer, &layer->gate_up, &kind, 1, many, layer->gate_up_activated);
    if (status == MOE_ROUTE_OK && runs && moer_layer_runs_grouped(layer, layer->max_tokens * layer->router.top_k))
        status = moer_layer_need_grouped(layer, &layer->gate_up, &kind, layer->gate_up_grouped);
    return status;
}

/* The down matmul with the combine. */
static moe_route_status moer_layer_need_down(moe_route_layer *layer) {
    const int many = moer_layer_runs_many(layer), separate = moer_layer_meets_fused(layer, 0) || (moer_layer_is_large(layer) && moer_layer_few_pairs(layer) > MOER_SMALL_PAIRS);
    moer_matmul_kind kind;
    moe_route_status status = MOE_ROUTE_OK;
    memset(&kind, 0, sizeof kind);
    kind.x_index = 2;
    if (moer_layer_meets_fused(layer, 1)) status = moer_layer_need_down_fused(layer);
    if (status == MOE_ROUTE_OK && moer_layer_runs_grouped(layer, layer->max_tokens * layer->router.top_k)) {
        kind.out = layer->dtype;
        status = moer_layer_need_grouped(layer, &layer->down, &kind, layer->down_grouped);
        if (status == MOE_ROUTE_OK) status = moer_layer_need_combine(layer, layer->dtype, 1, &layer->combine_grouped);
    }
    if (status != MOE_ROUTE_OK || (!separate && !many)) return status;
    kind.out = MOE_ROUTE_F32;
    kind.warps = layer->down_parts; /* the same parts of K as down.cu: the same sums, to the last bit */
    status = moer_layer_need_matmul(layer, &layer->down, &kind, separate, many, layer->down_rows);
    if (status == MOE_ROUTE_OK) status = moer_layer_need_combine(layer, MOE_ROUTE_F32, layer->weight_on_input, &layer->combine_rows);
    return status;
}

/* dispatch.cu, and dispatch_large.cu where the layer can meet as many pairs; what they copy of x is what expand.cu does. */
static moe_route_status moer_layer_need_dispatch(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moe_route_status status;
    moer_define(defines, "K", layer->router.top_k);
    moer_define(defines, "NUM_RANKS", layer->num_ranks);
    moer_define(defines, "ROW_BYTES", (unsigned long)(layer->hidden_size * moer_dtype_size(layer->dtype)));
    moer_define(defines, "UNIT", moer_expand_unit(layer));
    moer_define(defines, "WEIGHT_BYTES", (unsigned long)moer_dtype_size(layer->router.weights_dtype));
    moer_define_expert_map(defines, &layer->router);
    status = moer_layer_need(layer, &moer_family_dispatch, defines, &layer->dispatch);
    if (status == MOE_ROUTE_OK && layer->max_tokens * layer->router.top_k > MOER_DISPATCH_PAIRS) status = moer_layer_need(layer, &moer_family_dispatch_large, defines, &layer->dispatch_large);
    return status;
}

/* What follows gate_up in expert rows, with the sums of down.cu. */
static moe_route_status moer_layer_need_slots(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_matmul_kind kind;
    moe_route_status status;
    memset(&kind, 0, sizeof kind);
    kind.x_index = 2;
    kind.out_index = 2;
    kind.out = layer->rows_dtype;
    kind.warps = layer->down_parts;
    status = moer_layer_need_matmul(layer, &layer->down, &kind, 1, moer_layer_has_many(layer), layer->down_slots);
    if (status != MOE_ROUTE_OK) return status;
    moer_define(defines, "K", layer->router.top_k);
    moer_define_placement(defines, &layer->router);
    return moer_layer_need(layer, &moer_family_slots, defines, &layer->slots);
}

static moe_route_status moer_layer_need_plain_matmul(moe_route_layer *layer, const moer_matrix *matrix, const moer_variant *variants[2]) {
    moer_matmul_kind kind;
    if (matrix->format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    memset(&kind, 0, sizeof kind);
    kind.x_index = 1;
    kind.out_index = 1;
    kind.out = layer->dtype;
    kind.warps = moer_layer_matmul_warps(layer, matrix);
    return moer_layer_need_matmul(layer, matrix, &kind, 1, moer_layer_has_many(layer), variants);
}

static moe_route_status moer_layer_need_all(moe_route_layer *layer) {
    const uint32_t operations = layer->operations;
    const int large = moer_layer_is_large(layer);
    const int runs = (operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS)) != 0, slots = (operations & MOE_ROUTE_OPERATION_EXPERT_ROWS) != 0;
    moe_route_status status = MOE_ROUTE_OK;
    if (operations & MOE_ROUTE_OPERATION_LAYER) status = moer_layer_need_route(layer, 1, 1, &layer->route_layer);
    if (status == MOE_ROUTE_OK && (operations & (MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_MATMUL | MOE_ROUTE_OPERATION_EXPERT_ROWS))) status = moer_layer_need_route(layer, 0, 1, &layer->route_given);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_ROUTE)) status = moer_layer_need_route(layer, 1, 2, &layer->route_all);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_MAPS)) status = moer_layer_need_route(layer, 0, 2, &layer->maps_all);
    if (status == MOE_ROUTE_OK && ((operations & MOE_ROUTE_OPERATION_ROUTE) || (large && (operations & MOE_ROUTE_OPERATION_LAYER)))) status = moer_layer_need_topk(layer);
    if (status == MOE_ROUTE_OK && large && (operations & ~(uint32_t)(MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | MOE_ROUTE_OPERATION_DISPATCH))) status = moer_layer_need_maps(layer);
    if (status == MOE_ROUTE_OK && (runs || slots)) status = moer_layer_need_gate_up(layer, runs, slots);
    if (status == MOE_ROUTE_OK && runs) status = moer_layer_need_down(layer);
    if (status == MOE_ROUTE_OK && slots) status = moer_layer_need_slots(layer);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_MATMUL)) {
        status = moer_layer_need_plain_matmul(layer, &layer->gate_up, layer->matmul[MOE_ROUTE_MATRIX_GATE_UP]);
        if (status == MOE_ROUTE_OK) status = moer_layer_need_plain_matmul(layer, &layer->down, layer->matmul[MOE_ROUTE_MATRIX_DOWN]);
    }
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_EXPAND)) status = moer_layer_need_expand(layer);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_COMBINE)) status = moer_layer_need_combine(layer, layer->rows_dtype, layer->weight_on_input, &layer->combine);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_DISPATCH)) status = moer_layer_need_dispatch(layer);
    return status;
}

/* Lists all variants that the layer needs, in layer->wanted; some of them more than once. */
static moe_route_status moer_layer_want_variants(moe_route_layer *layer) {
    layer->wanted = (moer_wanted *)moer_alloc(layer->context, sizeof *layer->wanted);
    if (layer->wanted == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a layer");
    return moer_layer_need_all(layer);
}

/* Makes all variants that the layer needs, and lists each of them once. */
static moe_route_status moer_layer_make_variants(moe_route_layer *layer) {
    moe_route_status status = moer_layer_want_variants(layer);
    uint32_t i, j;
    if (layer->wanted == NULL) return status;
    if (status == MOE_ROUTE_OK) status = moer_wanted_make(layer->context, layer->wanted);
    for (i = 0; i < layer->wanted->count && status == MOE_ROUTE_OK; i++) {
        const moer_variant *variant = *layer->wanted->items[i].variant;
        for (j = 0; j < layer->num_variants && layer->variants[j] != variant; j++) {}
        if (j == layer->num_variants) layer->variants[layer->num_variants++] = variant;
    }
    moer_free(layer->context, layer->wanted);
    layer->wanted = NULL;
    return status;
}

/* ---- workspace ---- */

static uint32_t moer_layer_max_distinct(const moe_route_layer *layer, uint32_t num_tokens) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k;
    return num_pairs < layer->router.num_local_experts ? num_pairs : layer->router.num_local_experts;
}

/* What the blocks of the two launches sort one by one. */
static uint32_t moer_maps_tiles(const moe_route_layer *layer, uint32_t num_pairs) { return moer_divide_up(num_pairs, moer_layer_sorts_by_cub(layer, num_pairs) ? 1024 : 512); }

/* Blocks whose counts have to have room: none in one launch. In two, all blocks read the counts of all, as many bytes as the square of their
   number times the experts, and go through their tiles one by one: the sum is least about here. None has more than 7168 pairs. Never fewer
   for more pairs, so that the workspace of many tokens does for fewer. */
static uint32_t moer_maps_counted(const moe_route_layer *layer, uint32_t num_pairs) {
    const uint32_t tiles = moer_maps_tiles(layer, num_pairs), least = moer_divide_up(num_pairs, 7168);
    uint64_t blocks = 32;
    if (num_pairs <= MOER_SORT_PAIRS) return 0;
    while (blocks * blocks * blocks * layer->router.num_local_experts < (uint64_t)512 * num_pairs) blocks++;
    if (blocks < least) blocks = least;
    return blocks < tiles ? (uint32_t)blocks : tiles;
}

/* In one launch as many as share the aligned form's padding well; in two as many as have work where each has whole tiles. */
static uint32_t moer_maps_blocks(const moe_route_layer *layer, uint32_t num_pairs) {
    const uint32_t tiles = moer_maps_tiles(layer, num_pairs);
    if (num_pairs <= MOER_SORT_PAIRS) return num_pairs <= 2048 ? 16 : moer_divide_up(num_pairs, 128);
    return moer_divide_up(tiles, moer_divide_up(tiles, moer_maps_counted(layer, num_pairs)));
}

/* As many as keep memory busy, or fewer where every block would have too many counts to add up. */
static uint32_t moer_dispatch_shares(const moe_route_layer *layer, uint32_t num_tokens, uint32_t blocks) {
    const uint32_t busy = 1024 / (blocks < 2 ? 2 : blocks), few = 16384 / layer->num_ranks;
    const uint32_t shares = busy < few ? busy : few;
    return num_tokens < shares ? num_tokens : shares;
}

/* Takes count * size bytes; *at is where they start. 0 when the sum overflows. */
static int moer_workspace_take(moer_workspace *workspace, size_t count, size_t size, size_t *at) {
    size_t bytes;
    *at = workspace->size;
    return moer_size_mul(count, size, &bytes) && moer_size_add(bytes, 255, &bytes) && moer_size_add(workspace->size, bytes / 256 * 256, &workspace->size);
}

static int moer_workspace_lay_out(const moe_route_layer *layer, uint32_t num_tokens, moer_workspace *w) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k, num_local = layer->router.num_local_experts;
    const uint32_t distinct = moer_layer_max_distinct(layer, num_tokens);
    const int cpu = layer->context->device == MOE_ROUTE_DEVICE_CPU, small = num_pairs <= MOER_SMALL_PAIRS;
    const int runs = (layer->operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS)) != 0;
    const int slots = (layer->operations & MOE_ROUTE_OPERATION_EXPERT_ROWS) != 0;
    size_t columns, row_bytes = 0; /* of all rows */
    int fits = 1;
    memset(w, 0, sizeof *w);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->ids);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->weights);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->row_to_pair);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->pair_to_row);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->row_to_expert);
    fits &= moer_workspace_take(w, distinct, 4, &w->distinct_experts);
    fits &= moer_workspace_take(w, (size_t)distinct + 1, 4, &w->distinct_offsets);
    fits &= moer_workspace_take(w, 1, 4, &w->distinct_count);
    if (cpu) fits &= moer_workspace_take(w, (size_t)num_local + 1, 4, &w->expert_offsets);
    else if (!small) fits &= moer_workspace_take(w, (size_t)moer_maps_counted(layer, num_pairs) * moer_divide_up(num_local, 8), 16, &w->block_counts);
    if (runs || slots) fits &= moer_size_mul(num_pairs, layer->intermediate_size, &columns) && moer_workspace_take(w, columns, moer_dtype_size(layer->dtype), &w->h);
    if (runs && (cpu || !small || layer->may_separate || !layer->fused_combine)) {
        /* Room for whatever fewer tokens need too: grouped.cu leaves the layer's dtype, other kernels f32. */
        const uint32_t max_f32 = cpu || !moer_layer_runs_grouped(layer, num_pairs) ? num_pairs : moer_layer_few_pairs(layer);
        fits &= moer_size_mul(num_pairs, moer_dtype_size(layer->dtype), &row_bytes);
        if (row_bytes < (size_t)max_f32 * 4) row_bytes = (size_t)max_f32 * 4;
        fits &= moer_workspace_take(w, row_bytes, layer->hidden_size, &w->partial);
    }
    if (slots) fits &= moer_workspace_take(w, num_pairs, 4, &w->slot_rows);
    if (!cpu && (layer->operations & MOE_ROUTE_OPERATION_DISPATCH) && num_pairs > MOER_DISPATCH_PAIRS)
        fits &= moer_workspace_take(w, (size_t)moer_dispatch_shares(layer, num_tokens, 1) * layer->num_ranks * 2, 4, &w->dispatch_counts);
    if (cpu) fits &= moer_workspace_take(w, (size_t)2 * (layer->hidden_size > layer->intermediate_size ? layer->hidden_size : layer->intermediate_size), 4, &w->scratch);
    return fits;
}

/* ---- creating and destroying ---- */

/* The pairs that the kernels for small batches are made for: few sizes rather than the exact one, so that layers for 1 to 16
   tokens share their variants more often. */
static uint32_t moer_small_pairs(const moe_route_layer *layer, uint32_t max_tokens) {
    uint32_t pairs = 32;
    while (pairs < max_tokens * layer->router.top_k && pairs < MOER_SMALL_PAIRS) pairs *= 2;
    return pairs;
}

/* Whether down.cu's partial sums fit into shared memory. */
static int moer_parts_fit(uint32_t parts, uint32_t pairs) { return parts * pairs * 17 * 4 <= 40960; }

/* The parts that the down matmul cuts K into: those of matmul_bulk.cu, where it makes up for a launch more. Otherwise enough that a block of down.cu has work for its
   warps at one token; each at least two steps long, which a warp loads together; and the partial sums of all pairs fit. */
static moe_route_status moer_layer_choose_parts(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    const uint32_t pairs = desc->sums_of_max_tokens != 0 ? moer_small_pairs(layer, desc->sums_of_max_tokens) : layer->max_pairs_small;
    if (layer->down.format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (desc->fused_combine != MOE_ROUTE_ON && (layer->down.inner > MOER_FUSED_INPUTS || layer->down.format > MOE_ROUTE_FORMAT_GGUF) && moer_matrix_has_bulk_tiles(layer, &layer->down)) {
        layer->down_parts = moer_bulk_warps(&layer->down);
        layer->fused_combine = 0;
        return MOE_ROUTE_OK;
    }
    layer->down_parts = 4;
    while (layer->down_parts > 1 && (moer_tile_steps(&layer->down) < layer->down_parts * 2 || !moer_parts_fit(layer->down_parts, pairs))) layer->down_parts /= 2;
    if (layer->fused_combine && !moer_parts_fit(layer->down_parts, layer->max_pairs_small)) {
        if (desc->fused_combine == MOE_ROUTE_ON)
            return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "layer: sums_of_max_tokens is %u with max_tokens %u; shared memory has no room for that with fused_combine ON",
                             (unsigned)desc->sums_of_max_tokens, (unsigned)layer->max_tokens);
        layer->fused_combine = 0;
    }
    return MOE_ROUTE_OK;
}

/* All but the variants. */
static moe_route_status moer_layer_fill(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    moer_workspace workspace;
    moe_route_status status = moer_check_needs(layer->context, desc);
    if (status == MOE_ROUTE_OK) status = moer_router_check(layer->context, &desc->router, &layer->router);
    if (status == MOE_ROUTE_OK) status = moer_router_check_placement(layer->context, &desc->experts, &layer->router);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_experts(layer, &desc->experts);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_ranks(layer, &desc->experts);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_operations(layer, desc);
    if (status != MOE_ROUTE_OK) return status;
    layer->max_pairs_small = moer_small_pairs(layer, layer->max_tokens);
    status = moer_layer_choose_parts(layer, desc);
    if (status == MOE_ROUTE_OK) status = moer_layer_choose(layer, desc);
    if (status != MOE_ROUTE_OK) return status;
    if (!moer_workspace_lay_out(layer, layer->max_tokens, &workspace))
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "layer: max_tokens is %u; its workspace is larger than this machine's addresses", (unsigned)layer->max_tokens);
    return MOE_ROUTE_OK;
}

/* A filled layer for a function whose output `out` is named so; NULL on failure. */
static moe_route_status moer_layer_begin(moe_route_context *context, const moe_route_layer_desc *desc, const char *function, const void *out, const char *name, moe_route_layer **layer) {
    moe_route_status status;
    *layer = NULL;
    if (context == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    if (desc == NULL || out == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: %s is NULL", function, desc == NULL ? "desc" : name);
    status = moer_context_check(context, function);
    if (status != MOE_ROUTE_OK) return status;
    *layer = (moe_route_layer *)moer_alloc(context, sizeof **layer);
    if (*layer == NULL) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a layer");
    (*layer)->context = context;
    status = moer_layer_fill(*layer, desc);
    if (status == MOE_ROUTE_OK) return status;
    moer_free(context, *layer);
    *layer = NULL;
    return status;
}

/* *tuned: its kernels were to be those that tuning chose. */
static moe_route_status moer_layer_create(moe_route_context *context, const moe_route_layer_desc *desc, moe_route_layer **out, int *tuned) {
    moe_route_layer *layer;
    moe_route_status status = moer_layer_begin(context, desc, "moe_route_layer_create", out, "layer", &layer);
    *tuned = 0;
    if (layer == NULL) return status;
    *tuned = layer->tuned;
    if (context->device != MOE_ROUTE_DEVICE_CPU) status = moer_layer_make_variants(layer);
    if (status == MOE_ROUTE_OK) *out = layer;
    else moer_free(context, layer);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_layer_create(moe_route_context *context, const moe_route_layer_desc *desc, moe_route_layer **out) {
    moe_route_layer_desc untuned;
    moe_route_status status;
    int tuned;
    if (out != NULL) *out = NULL;
    status = moer_layer_create(context, desc, out, &tuned);
    if ((status != MOE_ROUTE_ERROR_NO_COMPILER && status != MOE_ROUTE_ERROR_COMPILE) || !tuned || desc->tuned == MOE_ROUTE_ON) return status;
    /* Those without tuning may be in a pack, or in the cache still. */
    moer_log(context, MOE_ROUTE_LOG_WARNING, "the kernels that tuning chose for a layer can't be had; it takes those of an untuned one");
    untuned = *desc;
    untuned.tuned = MOE_ROUTE_OFF;
    return moer_layer_create(context, &untuned, out, &tuned);
}

MOE_ROUTE_API moe_route_status moe_route_layer_count_variants(moe_route_context *context, const moe_route_layer_desc *desc, uint32_t *count) {
    moe_route_layer *layer;
    moe_route_status status;
    uint32_t i, j;
    if (count != NULL) *count = 0;
    status = moer_layer_begin(context, desc, "moe_route_layer_count_variants", count, "count", &layer);
    if (layer == NULL) return status;
    if (context->device != MOE_ROUTE_DEVICE_CPU) status = moer_layer_want_variants(layer);
    for (i = 0; status == MOE_ROUTE_OK && layer->wanted != NULL && i < layer->wanted->count; i++) {
        for (j = 0; layer->wanted->items[j].family != layer->wanted->items[i].family || strcmp(layer->wanted->items[j].defines, layer->wanted->items[i].defines) != 0; j++) {}
        *count += j == i; /* the first of its kind */
    }
    moer_free(context, layer->wanted);
    moer_free(context, layer);
    return status;
}

MOE_ROUTE_API void moe_route_layer_destroy(moe_route_layer *layer) {
    if (layer != NULL) moer_free(layer->context, layer);
}
