/*
  model.h: a made-up MoE layer for tests: random weights in any format, on the host as they are stored and as the numbers
  that they stand for, and on the device; and its output in f64. Include test.h, device.h and routing.h first.
*/
#ifndef TEST_MODEL_H
#define TEST_MODEL_H

#include "weights.h"

typedef struct model_choices { /* of moe_route_experts, beside the weights; all zero: the defaults */
    moe_route_activation activation;
    int no_gate;
    float alpha, up_offset, clamp; /* alpha: SILU's, or SITU's beta */
    moe_route_clamp_position clamp_position;
    int weight_on_input;
    uint32_t num_identity;
    float situ_up_beta;
    int up_apart; /* gate and up as two matrices */
} model_choices;

typedef struct model_spec {
    uint32_t num_experts, top_k, hidden_size, intermediate_size;
    moe_route_dtype dtype;
    moe_route_format format;
    uint32_t group_size;
    moe_route_dtype scales_dtype;
    int interleaved;
    moe_route_dtype bias_dtype; /* DEFAULT: no biases */
    uint32_t first_expert, num_local; /* num_local 0: all */
    uint32_t max_tokens, operations;
    moe_route_switch dependent_launch, fused_combine;
    moe_route_codes codes;
    int zero_points;     /* 1: given */
    uint32_t group_rows; /* 0: 1 */
    int global_scales;   /* 0: none; 1, 2, 3: by expert, one, by expert and part; in a down matrix the last is by expert */
    model_choices choices;
} model_spec;

typedef struct model_matrix {
    uint32_t rows, inner;
    stored_weights stored; /* of the local experts */
    void *bias;
    size_t bias_size;
    float *bias_values;    /* [E_local, rows], or NULL */
    device_buffer data_buffer, scales_buffer, zero_points_buffer, global_scales_buffer, bias_buffer;
} model_matrix;

typedef struct model {
    model_spec spec;
    uint32_t num_local;
    model_matrix gate_up, down;
    device_buffer up_buffers[4]; /* data, scales, zero points, bias of an up matrix of its own */
    moe_route_layer_desc desc;   /* of the layer */
    moe_route_layer *layer;
} model;

/* The layer's description without addresses. The router is a renormalised softmax. */
TEST_FUNCTION void model_describe(const model_spec *spec, moe_route_layer_desc *desc) {
    moe_route_weights *weights[2];
    int i;
    memset(desc, 0, sizeof *desc);
    weights[0] = &desc->experts.gate_up;
    weights[1] = &desc->experts.down;
    desc->router.num_experts = spec->num_experts;
    desc->router.top_k = spec->top_k;
    desc->router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc->experts.hidden_size = spec->hidden_size;
    desc->experts.intermediate_size = spec->intermediate_size;
    desc->experts.dtype = spec->dtype;
    desc->experts.gate_up_order = spec->choices.no_gate ? MOE_ROUTE_GATE_UP_NO_GATE : spec->interleaved ? MOE_ROUTE_GATE_UP_INTERLEAVED : MOE_ROUTE_GATE_UP_HALVES;
    desc->experts.activation = spec->choices.activation;
    if (spec->choices.activation == MOE_ROUTE_ACTIVATION_SITU) desc->experts.situ_beta = spec->choices.alpha;
    else desc->experts.activation_alpha = spec->choices.alpha;
    desc->experts.situ_up_beta = spec->choices.situ_up_beta;
    desc->experts.up_offset = spec->choices.up_offset;
    desc->experts.clamp = spec->choices.clamp;
    desc->experts.clamp_position = spec->choices.clamp_position;
    desc->experts.weight_on_input = spec->choices.weight_on_input;
    desc->experts.num_identity_experts = spec->choices.num_identity;
    desc->experts.first_expert = spec->first_expert;
    desc->experts.num_local_experts = spec->num_local;
    desc->max_tokens = spec->max_tokens;
    desc->operations = spec->operations;
    desc->dependent_launch = spec->dependent_launch;
    desc->fused_combine = spec->fused_combine;
    for (i = 0; i < 2; i++) {
        weights[i]->format = spec->format;
        weights[i]->scales_dtype = spec->scales_dtype;
        weights[i]->group_size = spec->group_size;
        weights[i]->group_rows = spec->group_rows;
        weights[i]->codes = spec->codes;
        weights[i]->global_scales_shape = spec->global_scales == 2 ? MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR : spec->global_scales == 3 && i == 0 ? MOE_ROUTE_GLOBAL_SCALES_PER_PART : MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT;
        weights[i]->bias_dtype = spec->bias_dtype;
    }
    if (spec->choices.up_apart) desc->experts.up = desc->experts.gate_up;
}

TEST_FUNCTION moe_route_address model_upload(test_device *on, const void *from, size_t size, device_buffer *buffer) {
    if (size == 0) return 0;
    *buffer = device_create_from(on, from, size);
    return buffer->address;
}

/* `weights` has the description without addresses, and gets them. */
TEST_FUNCTION void model_matrix_create(test_device *on, test_random *random, const model_spec *spec, uint32_t num_local, uint32_t rows, uint32_t inner, model_matrix *matrix, moe_route_weights *weights) {
    const size_t num_rows = (size_t)num_local * rows;
    memset(matrix, 0, sizeof *matrix);
    matrix->rows = rows;
    matrix->inner = inner;
    stored_weights_create(random, weights, spec->zero_points, spec->global_scales != 0, spec->interleaved, num_local, rows, inner, &matrix->stored);
    weights->data = model_upload(on, matrix->stored.data, matrix->stored.data_size, &matrix->data_buffer);
    weights->scales = model_upload(on, matrix->stored.scales, matrix->stored.scales_size, &matrix->scales_buffer);
    weights->zero_points = model_upload(on, matrix->stored.zero_points, matrix->stored.zero_points_size, &matrix->zero_points_buffer);
    weights->global_scales = model_upload(on, matrix->stored.global_scales, matrix->stored.global_scales_size, &matrix->global_scales_buffer);
    if (spec->bias_dtype != MOE_ROUTE_DTYPE_DEFAULT) {
        matrix->bias_values = (float *)model_alloc(num_rows * 4);
        matrix->bias_size = num_rows * model_dtype_size(spec->bias_dtype);
        matrix->bias = model_random_array(random, num_rows, spec->bias_dtype, 0.3f, matrix->bias_values);
        weights->bias = model_upload(on, matrix->bias, matrix->bias_size, &matrix->bias_buffer);
    }
}

TEST_FUNCTION void model_matrix_destroy(test_device *on, model_matrix *matrix) {
    stored_weights_free(&matrix->stored);
    free(matrix->bias);
    free(matrix->bias_values);
    device_destroy(on, &matrix->data_buffer);
    if (matrix->scales_buffer.address) device_destroy(on, &matrix->scales_buffer);
    if (matrix->zero_points_buffer.address) device_destroy(on, &matrix->zero_points_buffer);
    if (matrix->global_scales_buffer.address) device_destroy(on, &matrix->global_scales_buffer);
    if (matrix->bias_buffer.address) device_destroy(on, &matrix->bias_buffer);
}

/* Replaces an array whose first half of each expert's bytes is the gate's and whose second half is up's by two. */
TEST_FUNCTION void model_split(test_device *on, const void *from, uint32_t num_local, device_buffer *gate_buffer, moe_route_address *gate, device_buffer *up_buffer, moe_route_address *up) {
    const size_t half = gate_buffer->size / num_local / 2;
    unsigned char *parts = (unsigned char *)model_alloc(2 * half * num_local + 1);
    uint32_t e, part;
    if (*gate == 0) {
        free(parts);
        return;
    }
    for (e = 0; e < num_local; e++)
        for (part = 0; part < 2; part++) memcpy(parts + (part * num_local + e) * half, (const unsigned char *)from + (e * 2 + part) * half, half);
    device_destroy(on, gate_buffer);
    *gate = model_upload(on, parts, half * num_local, gate_buffer);
    *up = model_upload(on, parts + half * num_local, half * num_local, up_buffer);
    free(parts);
}

/* Equal seeds give equal weights, on any device. m->layer is NULL on failure. */
TEST_FUNCTION void model_create(test_device *on, const model_spec *spec, uint64_t seed, model *m) {
    moe_route_layer_desc desc;
    test_random random;
    random_seed(&random, seed);
    memset(m, 0, sizeof *m);
    m->spec = *spec;
    m->num_local = spec->num_local ? spec->num_local : spec->num_experts - spec->choices.num_identity - spec->first_expert;
    model_describe(spec, &desc);
    model_matrix_create(on, &random, spec, m->num_local, spec->intermediate_size * (spec->choices.no_gate ? 1 : 2), spec->hidden_size, &m->gate_up, &desc.experts.gate_up);
    model_matrix_create(on, &random, spec, m->num_local, spec->hidden_size, spec->intermediate_size, &m->down, &desc.experts.down);
    if (spec->choices.up_apart) {
        moe_route_weights *gate = &desc.experts.gate_up, *up = &desc.experts.up;
        *up = *gate;
        model_split(on, m->gate_up.stored.data, m->num_local, &m->gate_up.data_buffer, &gate->data, &m->up_buffers[0], &up->data);
        model_split(on, m->gate_up.stored.scales, m->num_local, &m->gate_up.scales_buffer, &gate->scales, &m->up_buffers[1], &up->scales);
        model_split(on, m->gate_up.stored.zero_points, m->num_local, &m->gate_up.zero_points_buffer, &gate->zero_points, &m->up_buffers[2], &up->zero_points);
        model_split(on, m->gate_up.bias, m->num_local, &m->gate_up.bias_buffer, &gate->bias, &m->up_buffers[3], &up->bias);
    }
    m->desc = desc;
    CHECK(moe_route_layer_create(on->context, &desc, &m->layer) == MOE_ROUTE_OK, "%s", device_message(on));
}

TEST_FUNCTION void model_destroy(test_device *on, model *m) {
    int i;
    moe_route_layer_destroy(m->layer);
    for (i = 0; i < 4; i++)
        if (m->up_buffers[i].address) device_destroy(on, &m->up_buffers[i]);
    model_matrix_destroy(on, &m->gate_up);
    model_matrix_destroy(on, &m->down);
}

/* weight * (W @ x) + bias of one row. */
TEST_FUNCTION double model_dot(const model_matrix *matrix, size_t row, const float *x, double weight) {
    const float *values = matrix->stored.values + row * matrix->inner;
    double sum = 0;
    uint32_t k;
    for (k = 0; k < matrix->inner; k++) sum += (double)values[k] * (double)x[k];
    return weight * sum + (matrix->bias_values ? (double)matrix->bias_values[row] : 0.0);
}

/* h of one column. */
TEST_FUNCTION double model_activate(const model_choices *c, double gate, double up) {
    const double limit = c->clamp != 0 ? (double)c->clamp : HUGE_VAL, alpha = c->alpha != 0 ? (double)c->alpha : 1.0;
    double value = c->clamp_position == MOE_ROUTE_CLAMP_BEFORE ? fmin(gate, limit) : gate;
    switch (c->activation) {
    case MOE_ROUTE_ACTIVATION_SILU: value = value / (1 + exp(-alpha * value)); break;
    case MOE_ROUTE_ACTIVATION_GELU_TANH: value = value / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (value + 0.044715 * value * value * value))); break;
    case MOE_ROUTE_ACTIVATION_GELU_ERF: value = value / 2 * (1 + erf(value / sqrt(2.0))); break;
    case MOE_ROUTE_ACTIVATION_SITU: value = alpha * tanh(value / alpha) / (1 + exp(-value)); break;
    default: value = value > 0 ? value * value : 0; break;
    }
    if (c->clamp_position == MOE_ROUTE_CLAMP_AFTER) value = fmin(value, limit);
    up = fmax(fmin(up, limit), -limit);
    if (c->situ_up_beta != 0) up = (double)c->situ_up_beta * tanh(up / (double)c->situ_up_beta);
    return c->no_gate ? value : value * (up + (double)c->up_offset);
}

/* y of one token, with the values between the matmuls rounded as they are stored. `x` is what the stored x means. */
TEST_FUNCTION void model_expect(const model *m, const int32_t *ids, const float *weights, const float *x, double *y) {
    const uint32_t hidden = m->spec.hidden_size, columns = m->spec.intermediate_size;
    float *h = (float *)model_alloc((size_t)columns * 4), *meaning = (float *)model_alloc((size_t)columns * 4);
    uint32_t j, n;
    for (n = 0; n < hidden; n++) y[n] = 0;
    for (j = 0; j < m->spec.top_k; j++) {
        const model_choices *c = &m->spec.choices;
        const size_t e = (size_t)ids[j] - m->spec.first_expert;
        const double weight = c->weight_on_input ? (double)weights[j] : 1.0;
        if (m->spec.first_expert == 0 && ids[j] >= (int32_t)(m->spec.num_experts - c->num_identity) && ids[j] < (int32_t)m->spec.num_experts)
            for (n = 0; n < hidden; n++) y[n] += (double)weights[j] * (double)x[n];
        if (ids[j] < (int32_t)m->spec.first_expert || e >= m->num_local) continue;
        for (n = 0; n < columns; n++) {
            const size_t base = e * m->gate_up.rows, gate = base + (m->spec.interleaved && !c->no_gate ? n * 2 : n), up = base + (m->spec.interleaved ? n * 2 + 1 : n + columns);
            quantize_store(h, model_storage(m->spec.dtype), n, (float)model_activate(c, model_dot(&m->gate_up, gate, x, weight), c->no_gate ? 0 : model_dot(&m->gate_up, up, x, weight)));
        }
        quantize_convert(meaning, QUANTIZE_F32, h, model_storage(m->spec.dtype), columns);
        for (n = 0; n < hidden; n++) y[n] += (c->weight_on_input ? 1.0 : (double)weights[j]) * model_dot(&m->down, e * hidden + n, meaning, 1.0);
    }
    free(h);
    free(meaning);
}

typedef struct model_input {
    uint32_t num_tokens;
    const void *x;              /* as stored */
    const float *logits;        /* [T, E], or NULL: */
    const int32_t *ids;         /* [T, k] and */
    const float *weights;       /* [T, k] are given */
    const int32_t *num_valid;   /* NULL: all */
    const void *shared, *residual; /* [T, H] as stored, or NULL */
    const float *shared_weights;   /* [T], or NULL */
} model_input;

/* Normal logits and x, which the caller frees. */
TEST_FUNCTION void model_random_input(test_random *random, const model_spec *spec, uint32_t num_tokens, model_input *input, float **logits, void **x) {
    const size_t count = (size_t)num_tokens * spec->num_experts;
    float *values = (float *)model_alloc((size_t)num_tokens * spec->hidden_size * 4);
    size_t i;
    memset(input, 0, sizeof *input);
    *logits = (float *)model_alloc(count * 4);
    for (i = 0; i < count; i++) (*logits)[i] = random_normal(random) * 1.5f;
    *x = model_random_array(random, (size_t)num_tokens * spec->hidden_size, spec->dtype, 1.0f, values);
    free(values);
    input->num_tokens = num_tokens;
    input->logits = *logits;
    input->x = *x;
}

typedef struct model_output { /* fetched; freed by model_output_free */
    int32_t *ids;
    float *weights;
    void *y;     /* as stored */
    float *y_values;
} model_output;

TEST_FUNCTION void model_output_free(model_output *output) {
    free(output->ids);
    free(output->weights);
    free(output->y);
    free(output->y_values);
    memset(output, 0, sizeof *output);
}

/* Everything that moe_route_layer_run gets, in device memory. */
typedef struct model_call {
    device_buffer x, y, logits, ids, weights, valid, shared, shared_weights, residual, workspace;
    moe_route_layer_args args;
} model_call;

TEST_FUNCTION void model_call_create(test_device *on, const model *m, const model_input *input, model_call *call) {
    const size_t pairs = (size_t)input->num_tokens * m->spec.top_k, row = (size_t)m->spec.hidden_size * model_dtype_size(m->spec.dtype);
    size_t size = 0;
    memset(call, 0, sizeof *call);
    call->x = device_create_aligned(on, input->num_tokens * row, 16);
    device_upload(on, &call->x, input->x, input->num_tokens * row);
    call->y = device_create_aligned(on, input->num_tokens * row, 16);
    if (input->logits) call->logits = device_create_from(on, input->logits, (size_t)input->num_tokens * m->spec.num_experts * 4);
    call->ids = input->ids ? device_create_from(on, input->ids, pairs * 4) : device_create(on, pairs * 4);
    call->weights = input->weights ? device_create_from(on, input->weights, pairs * 4) : device_create(on, pairs * 4);
    if (input->num_valid) call->valid = device_create_from(on, input->num_valid, 4);
    if (input->shared) {
        call->shared = device_create_aligned(on, input->num_tokens * row, 16);
        device_upload(on, &call->shared, input->shared, input->num_tokens * row);
    }
    if (input->shared_weights) call->shared_weights = device_create_from(on, input->shared_weights, (size_t)input->num_tokens * 4);
    if (input->residual) {
        call->residual = device_create_aligned(on, input->num_tokens * row, 16);
        device_upload(on, &call->residual, input->residual, input->num_tokens * row);
    }
    CHECK(moe_route_layer_workspace_size(m->layer, input->num_tokens, &size) == MOE_ROUTE_OK, "%s", device_message(on));
    call->workspace = device_create_workspace(on, size);
    call->args.num_tokens = input->num_tokens;
    call->args.logits = call->logits.address;
    call->args.ids = call->ids.address;
    call->args.weights = call->weights.address;
    call->args.x = call->x.address;
    call->args.y = call->y.address;
    call->args.shared_output = call->shared.address;
    call->args.shared_output_weights = call->shared_weights.address;
    call->args.residual = call->residual.address;
    call->args.num_valid_tokens = call->valid.address;
    call->args.workspace = call->workspace.address;
    call->args.workspace_size = size;
    call->args.stream = on->stream;
}

TEST_FUNCTION void model_call_fetch(test_device *on, const model *m, const model_call *call, model_output *output) {
    const size_t pairs = (size_t)call->args.num_tokens * m->spec.top_k, count = (size_t)call->args.num_tokens * m->spec.hidden_size;
    memset(output, 0, sizeof *output);
    device_synchronize(on);
    output->ids = (int32_t *)model_alloc(pairs * 4);
    output->weights = (float *)model_alloc(pairs * 4);
    output->y = model_alloc(call->y.size);
    output->y_values = (float *)model_alloc(count * 4);
    device_download(on, output->ids, &call->ids, pairs * 4);
    device_download(on, output->weights, &call->weights, pairs * 4);
    device_download(on, output->y, &call->y, call->y.size);
    quantize_convert(output->y_values, QUANTIZE_F32, output->y, model_storage(m->spec.dtype), count);
}

TEST_FUNCTION void model_call_destroy(test_device *on, model_call *call) {
    device_destroy(on, &call->x);
    device_destroy(on, &call->y);
    if (call->logits.address) device_destroy(on, &call->logits);
    device_destroy(on, &call->ids);
    device_destroy(on, &call->weights);
    if (call->valid.address) device_destroy(on, &call->valid);
    if (call->shared.address) device_destroy(on, &call->shared);
    if (call->shared_weights.address) device_destroy(on, &call->shared_weights);
    if (call->residual.address) device_destroy(on, &call->residual);
    device_destroy(on, &call->workspace);
}

TEST_FUNCTION moe_route_status model_run(test_device *on, const model *m, const model_input *input, model_output *output) {
    model_call call;
    moe_route_status status;
    model_call_create(on, m, input, &call);
    status = moe_route_layer_run(m->layer, &call.args);
    model_call_fetch(on, m, &call, output);
    model_call_destroy(on, &call);
    return status;
}

/* Relative L2 error of y, over the tokens from `first` to `end` - 1, against f64. HUGE_VAL for a NaN. */
TEST_FUNCTION double model_error(const model *m, const model_input *input, const model_output *output, uint32_t first, uint32_t end) {
    const uint32_t hidden = m->spec.hidden_size;
    float *x = (float *)model_alloc((size_t)hidden * 4), *want = (float *)model_alloc((size_t)(end - first) * hidden * 4);
    double *y = (double *)model_alloc((size_t)hidden * 8), error;
    uint32_t t, n;
    for (t = first; t < end; t++) {
        const quantize_dtype storage = model_storage(m->spec.dtype);
        for (n = 0; n < hidden; n++) x[n] = quantize_load(input->x, storage, (size_t)t * hidden + n);
        model_expect(m, output->ids + (size_t)t * m->spec.top_k, output->weights + (size_t)t * m->spec.top_k, x, y);
        for (n = 0; n < hidden && input->shared; n++)
            y[n] += (input->shared_weights ? (double)input->shared_weights[t] : 1.0) * (double)quantize_load(input->shared, storage, (size_t)t * hidden + n);
        for (n = 0; n < hidden && input->residual; n++) y[n] += (double)quantize_load(input->residual, storage, (size_t)t * hidden + n);
        for (n = 0; n < hidden; n++) want[(size_t)(t - first) * hidden + n] = (float)y[n];
    }
    error = relative_error(output->y_values + (size_t)first * hidden, want, (size_t)(end - first) * hidden);
    free(x);
    free(want);
    free(y);
    return error;
}

/* How far a result may be from f64: the rounding of y and of the values between the matmuls, and f32 sums. */
TEST_FUNCTION double model_bound(moe_route_dtype dtype) { return dtype == MOE_ROUTE_F32 ? 2e-6 : dtype == MOE_ROUTE_F16 ? 1e-3 : 6e-3; }

#endif /* TEST_MODEL_H */
