/*
  bench_layer.h: whole layers for moe_route bench: the models' shapes that every run measures, or the layer that the options
  describe; its weights in enough copies that they come from memory, and the floor of reading what a call's experts are.
  Include bench.h first.
*/
#ifndef BENCH_LAYER_H
#define BENCH_LAYER_H

typedef struct layer_shape {
    const char *name;
    uint32_t num_experts, top_k, hidden_size, intermediate_size;
    moe_route_format format, down_format;
    uint32_t group_size;
    double distinct; /* mean distinct experts at 16 tokens that the drawn logits aim at */
} layer_shape;

static const layer_shape layer_shapes[] = {
    {"qwen3.6-35b-a3b-int4", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 84.1},
    {"qwen3.6-35b-a3b-bf16", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_BF16, MOE_ROUTE_FORMAT_BF16, 0, 84.1},
    {"qwen3.6-35b-a3b-q4_k-q6_k", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_GGUF_Q4_K, MOE_ROUTE_FORMAT_GGUF_Q6_K, 0, 84.1},
    {"gpt-oss-20b-mxfp4", 32, 4, 2880, 2880, MOE_ROUTE_FORMAT_MXFP4, MOE_ROUTE_FORMAT_MXFP4, 0, 22.9},
    {"gpt-oss-20b-int4", 32, 4, 2880, 2880, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 22.9},
    {"gemma-4-26b-a4b-int4", 128, 8, 2816, 704, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 65.1},
};

enum { BENCH_MATRICES = 3, BENCH_PARTS = 3 }; /* gate_up, down, up; data, scales, zero points */

typedef struct layer_memory { /* of one copy of the weights */
    gpu_address parts[BENCH_MATRICES][BENCH_PARTS], bias[BENCH_MATRICES], global_scales[BENCH_MATRICES];
} layer_memory;

typedef struct layer_run {
    const char *name;
    moe_route_layer_desc desc; /* as the layer is asked for; addresses say only which arrays there are */
    moe_route_dtype dtype;
    uint32_t num_experts, first_expert, num_local, tokens, num_copies, only; /* only: one launch of the sequence */
    int targets;                                                             /* the library's aim is told */
    double distinct;
    size_t part_bytes[BENCH_MATRICES][BENCH_PARTS]; /* of one expert; 0: there is none */
    size_t bias_bytes[BENCH_MATRICES];              /* of all */
    gpu_address logit_bias, selection_bias, expert_scale;
    moe_route_layer *layers[BENCH_COPIES];
    layer_memory memory[BENCH_COPIES];
    moe_route_layer_args args[BENCH_CALLS];
    gpu_address chunk_lists[BENCH_CALLS];
    uint32_t num_chunks[BENCH_CALLS], shift;
} layer_run;

static void run_layer(bench *b, void *user, uint32_t call) {
    layer_run *r = (layer_run *)user;
    must_library(b->context, moe_route_layer_run(r->layers[call % r->num_copies], &r->args[call]));
}

static void call_sequence(const layer_run *r, uint32_t call, moer_sequence *sequence) {
    const moe_route_layer *layer = r->layers[call % r->num_copies];
    moer_workspace w;
    moer_workspace_lay_out(layer, r->tokens, &w);
    sequence->num_launches = 0;
    moer_sequence_layer(sequence, layer, &r->args[call], &w);
}

/* One launch of the call's sequence alone; its inputs are in the call's workspace from an earlier run. */
static void run_one_launch(bench *b, void *user, uint32_t call) {
    const layer_run *r = (const layer_run *)user;
    moer_sequence sequence;
    call_sequence(r, call, &sequence);
    sequence.launches[0] = sequence.launches[r->only];
    sequence.num_launches = 1;
    must_library(b->context, moer_sequence_launch(r->layers[call % r->num_copies], &sequence, b->stream));
}

static void run_floor(bench *b, void *user, uint32_t call) {
    const layer_run *r = (const layer_run *)user;
    must_gpu(b, floors_read(&b->floor, &b->gpu, r->chunk_lists[call], r->num_chunks[call], r->shift, b->stream));
}

/* ---- weights: any bytes, but floats around 0.02 where they are floats ---- */

typedef enum fill_kind { FILL_BYTES, FILL_FP8, FILL_BYTE_SCALES, FILL_F16, FILL_BF16, FILL_F32 } fill_kind;

static fill_kind fill_floats(moe_route_dtype dtype) {
    return dtype == MOE_ROUTE_F32 ? FILL_F32 : dtype == MOE_ROUTE_F16 ? FILL_F16 : FILL_BF16;
}

static fill_kind fill_part(const moer_matrix *matrix, int part) {
    if (part == 1)
        return matrix->scales_kind == MOER_SCALES_F32    ? FILL_F32
               : matrix->scales_kind == MOER_SCALES_F16  ? FILL_F16
               : matrix->scales_kind == MOER_SCALES_BF16 ? FILL_BF16
                                                         : FILL_BYTE_SCALES;
    if (part == 2) return FILL_BYTES;
    return matrix->format == MOE_ROUTE_FORMAT_F32    ? FILL_F32
           : matrix->format == MOE_ROUTE_FORMAT_F16  ? FILL_F16
           : matrix->format == MOE_ROUTE_FORMAT_BF16 ? FILL_BF16
           : matrix->format == MOE_ROUTE_FORMAT_FP8  ? FILL_FP8
                                                     : FILL_BYTES;
}

static gpu_address filled_memory(bench *b, size_t size, fill_kind kind) {
    enum { BLOCK = 1 << 24 };
    static uint16_t *block;
    const gpu_address address = device_memory(b, size);
    const size_t used = size < BLOCK ? (size + 1) / 2 : BLOCK / 2;
    size_t i;
    if (!block) block = (uint16_t *)allocate(BLOCK, 1);
    for (i = 0; i < used; i++) {
        const uint16_t bits = (uint16_t)(bench_random() >> 20);
        switch (kind) {
        case FILL_BYTES: block[i] = bits; break;
        case FILL_FP8: block[i] = bits & 0xf7f7; break;                                /* no NaN */
        case FILL_BYTE_SCALES: block[i] = (uint16_t)((bits & 0x0707) | 0x3838); break; /* as exponents they are very small */
        case FILL_F16: block[i] = (uint16_t)((bits & 0x83ff) | 0x2400); break;
        case FILL_BF16: block[i] = (uint16_t)((bits & 0x80ff) | 0x3c00); break;
        case FILL_F32: block[i] = i % 2 ? (uint16_t)((bits & 0x80ff) | 0x3c00) : bits; break;
        }
    }
    for (i = 0; i < size; i += BLOCK) must_gpu(b, gpu_upload(&b->gpu, address + i, block, size - i < BLOCK ? size - i : BLOCK));
    return address;
}

static const moer_matrix *layer_matrix(const moe_route_layer *layer, int m) {
    return m == 0 ? &layer->gate_up : m == 1 ? &layer->down : &layer->up;
}
static moe_route_weights *desc_matrix(moe_route_layer_desc *desc, int m) {
    return m == 0 ? &desc->experts.gate_up : m == 1 ? &desc->experts.down : &desc->experts.up;
}

/* What the layer needs, from the library's own account of a layer that isn't run. */
static void size_parts(bench *b, layer_run *r) {
    moe_route_layer *layer;
    int m;
    must_library(b->context, moe_route_layer_create(b->context, &r->desc, &layer));
    r->dtype = layer->dtype;
    r->num_experts = layer->router.num_experts;
    r->first_expert = layer->router.first_expert;
    r->num_local = layer->router.num_local_experts;
    for (m = 0; m < BENCH_MATRICES; m++) {
        const moer_matrix *matrix = layer_matrix(layer, m);
        if (matrix->format == MOE_ROUTE_FORMAT_NONE) continue;
        r->part_bytes[m][0] = (size_t)moer_data_bytes(matrix);
        r->part_bytes[m][1] = (size_t)moer_scale_bytes(matrix);
        r->part_bytes[m][2] = matrix->zero_points ? matrix->rows * moer_zero_point_row_bytes(matrix) : 0;
        r->bias_bytes[m] = matrix->bias ? (size_t)r->num_local * matrix->rows * 4 : 0;
    }
    moe_route_layer_destroy(layer);
}

static size_t create_copy(bench *b, layer_run *r, const moe_route_layer *like) {
    layer_memory *memory = &r->memory[r->num_copies];
    moe_route_layer_desc desc = r->desc;
    size_t total = 0;
    int m, part;
    if (desc.router.logit_bias) desc.router.logit_bias = r->logit_bias;
    if (desc.router.selection_bias) desc.router.selection_bias = r->selection_bias;
    if (desc.router.expert_scale) desc.router.expert_scale = r->expert_scale;
    for (m = 0; m < BENCH_MATRICES; m++) {
        moe_route_weights *weights = desc_matrix(&desc, m);
        for (part = 0; part < BENCH_PARTS; part++) {
            if (!r->part_bytes[m][part]) continue;
            memory->parts[m][part] = filled_memory(b, r->part_bytes[m][part] * r->num_local,
                                                   fill_part(layer_matrix(like, m), part));
            total += r->part_bytes[m][part] * r->num_local;
        }
        weights->data = memory->parts[m][0];
        weights->scales = memory->parts[m][1];
        weights->zero_points = memory->parts[m][2];
        if (weights->bias) weights->bias = memory->bias[m] = device_zeros(b, r->bias_bytes[m]);
        if (weights->global_scales) weights->global_scales = memory->global_scales[m] = device_zeros(b, (size_t)r->num_local * 8);
    }
    must_library(b->context, moe_route_layer_create(b->context, &desc, &r->layers[r->num_copies++]));
    return total;
}

static void create_copies(bench *b, layer_run *r) {
    moe_route_layer *like;
    size_t total = 0;
    must_library(b->context, moe_route_layer_create(b->context, &r->desc, &like));
    r->logit_bias = device_zeros(b, (size_t)(r->num_experts + r->desc.router.num_shared_experts) * 4);
    r->selection_bias = device_zeros(b, (size_t)r->num_experts * 4);
    r->expert_scale = device_zeros(b, (size_t)r->num_experts * 4);
    do total += create_copy(b, r, like);
    while (r->num_copies < 2 || (total < BENCH_POOL_BYTES && r->num_copies < BENCH_COPIES));
    moe_route_layer_destroy(like);
}

static void destroy_copies(bench *b, layer_run *r) {
    uint32_t i;
    int m, part;
    for (i = 0; i < r->num_copies; i++) {
        moe_route_layer_destroy(r->layers[i]);
        for (m = 0; m < BENCH_MATRICES; m++) {
            for (part = 0; part < BENCH_PARTS; part++) gpu_free(&b->gpu, r->memory[i].parts[m][part]);
            gpu_free(&b->gpu, r->memory[i].bias[m]);
            gpu_free(&b->gpu, r->memory[i].global_scales[m]);
        }
    }
    gpu_free(&b->gpu, r->logit_bias);
    gpu_free(&b->gpu, r->selection_bias);
    gpu_free(&b->gpu, r->expert_scale);
}

/* ---- the floor ---- */

/* Runs the call once and marks the local experts that it chose; returns how many. */
static uint32_t find_distinct(bench *b, layer_run *r, uint32_t call, gpu_address ids, int32_t *host, unsigned char *marks) {
    moe_route_layer_args args = r->args[call];
    const size_t pairs = (size_t)r->tokens * r->desc.router.top_k;
    uint32_t count = 0;
    size_t p;
    args.ids = ids;
    must_library(b->context, moe_route_layer_run(r->layers[call % r->num_copies], &args));
    must_gpu(b, gpu_download(&b->gpu, host, ids, pairs * sizeof *host));
    memset(marks, 0, r->num_local);
    for (p = 0; p < pairs; p++) {
        const uint32_t expert = (uint32_t)host[p] - r->first_expert; /* others wrap around to large ones */
        if (expert >= r->num_local) continue;
        count += !marks[expert];
        marks[expert] = 1;
    }
    return count;
}

/* Addresses of the chunks that hold the call's distinct experts; returns their bytes. A last piece
   shorter than a chunk is left out. */
static size_t list_chunks(bench *b, layer_run *r, uint32_t call, const unsigned char *marks) {
    const layer_memory *memory = &r->memory[call % r->num_copies];
    const size_t chunk = (size_t)16 << r->shift;
    size_t bytes = 0, count = 0, i;
    gpu_address *list;
    uint32_t e;
    int p;
    for (p = 0; p < BENCH_MATRICES * BENCH_PARTS; p++) bytes += r->part_bytes[p / BENCH_PARTS][p % BENCH_PARTS] / chunk;
    list = (gpu_address *)allocate((bytes + 1) * r->num_local, sizeof *list);
    bytes = 0;
    for (e = 0; e < r->num_local; e++)
        for (p = 0; p < BENCH_MATRICES * BENCH_PARTS && marks[e]; p++) {
            const size_t part = r->part_bytes[p / BENCH_PARTS][p % BENCH_PARTS];
            const gpu_address start = (memory->parts[p / BENCH_PARTS][p % BENCH_PARTS] + e * part) / 16 * 16;
            for (i = 0; i + chunk <= part; i += chunk) list[count++] = start + i;
            bytes += part;
        }
    r->num_chunks[call] = (uint32_t)count;
    r->chunk_lists[call] = device_memory(b, count * sizeof *list);
    must_gpu(b, gpu_upload(&b->gpu, r->chunk_lists[call], list, count * sizeof *list));
    free(list);
    return bytes;
}

/* Chunks of 32 KB, or the largest smaller ones that divide an expert; but never so small that reading the list of them would
   count. */
static void choose_chunks(layer_run *r) {
    int p;
    r->shift = 11;
    for (p = 0; p < BENCH_MATRICES * BENCH_PARTS; p++)
        while (r->shift > 3 && r->part_bytes[p / BENCH_PARTS][p % BENCH_PARTS] % ((size_t)16 << r->shift)) r->shift--;
}

/* ---- measuring ---- */

static void bench_launches(bench *b, layer_run *r, const char *dtype_name) {
    static const char *const fused[] = {"  router", "  gate_up", "  down"};
    moer_sequence sequence;
    call_sequence(r, 0, &sequence);
    for (r->only = 0; r->only < sequence.num_launches; r->only++) {
        char name[24];
        snprintf(name, sizeof name, "  %s", sequence.launches[r->only].variant->family->name);
        report_add(&b->report, sequence.num_launches == 3 ? fused[r->only] : name, r->name, dtype_name, r->tokens, 0, 0,
                   b->report.empty, time_calls(b, run_one_launch, r), 0);
    }
}

static void bench_layer_at(bench *b, layer_run *r, const char *dtype_name, double popularity) {
    const size_t x_bytes = (size_t)r->tokens * r->desc.experts.hidden_size * moer_dtype_size(r->dtype),
                 pairs = (size_t)r->tokens * r->desc.router.top_k;
    const uint32_t columns = r->num_experts + r->desc.router.num_shared_experts;
    const quantize_dtype logits_dtype = r->desc.router.logits_dtype ? (quantize_dtype)r->desc.router.logits_dtype : QUANTIZE_F32;
    const gpu_address logits = make_logits(b, r->tokens, columns, popularity, logits_dtype), ids = device_memory(b, pairs * 4);
    const gpu_address x = filled_memory(b, x_bytes * b->calls, fill_floats(r->dtype)), y = device_memory(b, x_bytes * b->calls);
    unsigned char *marks = (unsigned char *)allocate(r->num_local, 1);
    int32_t *host = (int32_t *)allocate(pairs, sizeof *host);
    gpu_address workspace;
    size_t workspace_size;
    double distinct = 0, bytes = 0, floor, time;
    uint32_t call;
    must_library(b->context, moe_route_layer_workspace_size(r->layers[0], r->tokens, &workspace_size));
    workspace_size = (workspace_size + 255) / 256 * 256;
    workspace = device_memory(b, workspace_size * b->calls);
    for (call = 0; call < b->calls; call++) {
        moe_route_layer_args *args = &r->args[call];
        memset(args, 0, sizeof *args);
        args->num_tokens = r->tokens;
        args->logits = logits + (size_t)call * r->tokens * columns * quantize_dtype_size(logits_dtype);
        args->x = x + call * x_bytes;
        args->y = y + call * x_bytes;
        args->workspace = workspace + call * workspace_size;
        args->workspace_size = workspace_size;
        args->stream = b->stream;
        distinct += find_distinct(b, r, call, ids, host, marks) / (double)b->calls;
        bytes += (double)list_chunks(b, r, call, marks) / b->calls;
    }
    floor = b->has_floors ? time_calls(b, run_floor, r) : 0;
    time = time_calls(b, run_layer, r);
    report_add(&b->report, "layer", r->name, dtype_name, r->tokens, distinct, bytes / 1e6, floor, time,
               r->targets && floor > 0 ? 1.25 * floor + 3.5 : 0);
    if (bench_wanted.kernels) bench_launches(b, r, dtype_name);
    for (call = 0; call < b->calls; call++) gpu_free(&b->gpu, r->chunk_lists[call]);
    gpu_free(&b->gpu, logits);
    gpu_free(&b->gpu, ids);
    gpu_free(&b->gpu, x);
    gpu_free(&b->gpu, y);
    gpu_free(&b->gpu, workspace);
    free(marks);
    free(host);
}

/* r->name, desc, targets and distinct are given. */
static void bench_layer(bench *b, layer_run *r) {
    double popularity;
    uint32_t i;
    r->desc.max_tokens = b->most_tokens;
    size_parts(b, r);
    if (r->desc.router.ids != MOE_ROUTE_IDS_SELECTED)
        stop(STATUS_USAGE, "--hash-vocab: a layer that takes ids from a table isn't measured");
    if (r->desc.experts.expert_map)
        stop(STATUS_USAGE, "--expert-map-columns: a layer with a table of physical experts isn't measured");
    popularity = r->distinct > 0 ? find_popularity(r->num_experts, r->desc.router.top_k, r->distinct) : 0;
    create_copies(b, r);
    choose_chunks(r);
    for (i = 0; i < b->num_tokens; i++) {
        r->tokens = b->tokens[i];
        bench_layer_at(b, r, r->dtype == MOE_ROUTE_BF16 ? "bf16" : r->dtype == MOE_ROUTE_F16 ? "f16" : "f32", popularity);
    }
    destroy_copies(b, r);
}

static moe_route_weights shape_weights(const layer_shape *shape, moe_route_format format, moe_route_dtype dtype) {
    moe_route_weights weights;
    memset(&weights, 0, sizeof weights);
    weights.format = format;
    weights.data = 256;
    if (moer_has_scales(format)) weights.scales = 256;
    if (shape->group_size) {
        weights.scales_dtype = dtype;
        weights.group_size = shape->group_size;
    }
    return weights;
}

static void bench_shape(bench *b, const layer_shape *shape) {
    static layer_run r;
    memset(&r, 0, sizeof r);
    r.name = shape->name;
    r.targets = 1;
    r.distinct = shape->distinct;
    r.desc.router.num_experts = shape->num_experts;
    r.desc.router.top_k = shape->top_k;
    r.desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    r.desc.experts.hidden_size = shape->hidden_size;
    r.desc.experts.intermediate_size = shape->intermediate_size;
    r.desc.experts.dtype = shape->format == MOE_ROUTE_FORMAT_BF16 ? MOE_ROUTE_BF16 : MOE_ROUTE_F16;
    r.desc.experts.gate_up = shape_weights(shape, shape->format, r.desc.experts.dtype);
    r.desc.experts.down = shape_weights(shape, shape->down_format, r.desc.experts.dtype);
    bench_layer(b, &r);
}

/* The layer that the options describe. */
static void bench_described(bench *b) {
    static layer_run r;
    static char name[64];
    const option_choice *format = format_choices;
    memset(&r, 0, sizeof r);
    layer_describe(b->context, &layer_wanted, &r.desc);
    if (!layer_wanted.format || !r.desc.experts.hidden_size)
        stop(STATUS_USAGE, "a layer is measured with its experts: --hidden, --intermediate and --format are needed");
    r.desc.operations = MOE_ROUTE_OPERATION_LAYER;
    while (format->value != layer_wanted.format) format++;
    if (layer_wanted.model_type) snprintf(name, sizeof name, "%.40s %s", layer_wanted.model_type, format->word);
    else
        snprintf(name, sizeof name, "E %u, k %u, %s", (unsigned)r.desc.router.num_experts, (unsigned)r.desc.router.top_k,
                 format->word);
    r.name = name;
    r.distinct = (double)bench_wanted.distinct;
    bench_layer(b, &r);
}

/* ---- the subcommand ---- */

static const option bench_options[] = {
    OPT_TITLE("What is measured; without any of these, the router, the combine and four models' layers"),
    OPT_FLAG("--router", "the router with all maps", &bench_wanted.router),
    OPT_FLAG("--combine", "the combine", &bench_wanted.combine),
    OPT_FLAG("--layer", "the layers; those that options below describe instead, where --experts, --model or --config is given",
             &bench_wanted.layer),
    OPT_FLAG("--kernels", "each launch of a layer alone, too", &bench_wanted.kernels),
    OPT_TEXTS("--shape", "NAME", "only layers whose name starts so; may be repeated", &bench_wanted.shapes),
    OPT_TEXT("--tokens", "LIST", "token counts of layers, 1 to 512 (1,2,4,8,16)", &bench_wanted.tokens),
    OPT_COUNT("--calls", "N", "calls in the graph, each with inputs of its own; 200 without it", &bench_wanted.calls, 1,
              BENCH_CALLS),
    OPT_REAL("--distinct", "X",
             "for a described layer: the mean of distinct experts at 16 tokens that its logits aim at; without it all experts "
             "are as popular",
             &bench_wanted.distinct, 1, 2048),
    OPT_TITLE("Output, beside the table on stdout: FILE may be -, and then the table isn't printed"),
    OPT_TEXT("--csv", "FILE", "the rows as CSV", &bench_wanted.csv),
    OPT_TEXT("--json", "FILE", "the rows as JSON", &bench_wanted.json),
    OPT_TEXT("--svg", "FILE", "plots of time against tokens with the read floor, and of their ratio", &bench_wanted.svg),
    OPT_TEXT("--from", "FILE", "take the rows of an earlier --csv instead of measuring; needs no GPU", &bench_wanted.from),
    OPT_END,
};

static const options bench_command = {
    .command = "bench",
    .usage = "bench [OPTIONS]",
    .about = "Times the router, the combine and whole layers on GPU 0 under CUDA graph replay, beside floors measured in the "
             "same run: an empty graph node, and the plain read of the same experts' bytes.",
    .tables = {bench_options, router_options, experts_options},
    .after = "Example: a model of one's own\n"
             "  moe_route bench --model qwen3_moe --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --format q4_k --svg "
             "layer.svg\n"
             "\n"
             "Status: 0; 1 when the driver refused something; 2 when an option or the layer is wrong; 3 without a GPU; 4 "
             "without NVRTC; 5 when a file can't be read or written.\n",
};

static int shape_is_wanted(const char *name) {
    const option_texts *wanted = &bench_wanted.shapes;
    uint32_t i;
    for (i = 0; i < wanted->count; i++)
        if (!strncmp(name, wanted->values[i], strlen(wanted->values[i]))) return 1;
    return wanted->count == 0;
}

static void bench_open(bench *b) {
    moe_route_context_desc desc;
    moe_route_status status;
    if (!gpu_open(&b->gpu)) stop(STATUS_NO_GPU, "there is no GPU to measure: %s", b->gpu.reason);
    must_gpu(b, gpu_stream_create(&b->gpu, &b->stream));
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_GPU;
    desc.cuda_context = b->gpu.context;
    status = moe_route_context_create(&desc, &b->context);
    if (status == MOE_ROUTE_ERROR_UNSUPPORTED) { /* an older one */
        char text[512];
        moe_route_message(b->context, text, sizeof text);
        stop(STATUS_NO_GPU, "there is no GPU to measure: %s", text);
    }
    must_library(b->context, status);
    b->has_floors = floors_open(&b->floor, &b->gpu) == 0;
    if (!b->has_floors)
        fprintf(stderr, "moe_route bench: no floors are measured, because the driver doesn't take their kernels: %s\n",
                b->gpu.reason);
    b->report.empty = b->has_floors ? time_calls(b, run_empty, NULL) : 0;
    b->report.driver_version = b->gpu.driver_version;
    snprintf(b->report.gpu, sizeof b->report.gpu, "%s", b->gpu.name);
}

static void bench_close(bench *b) {
    moe_route_context_destroy(b->context);
    if (b->has_floors) floors_close(&b->floor, &b->gpu);
    gpu_stream_destroy(&b->gpu, b->stream);
    gpu_close(&b->gpu);
}

static void bench_measure(bench *b, int described) {
    const int all = !bench_wanted.router && !bench_wanted.combine && !bench_wanted.layer;
    char date[32], empty[48] = "";
    const time_t now = time(NULL);
    size_t i;
    bench_open(b);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    if (b->has_floors) snprintf(empty, sizeof empty, "empty graph node %.2f us; ", b->report.empty);
    if (!b->report.quiet)
        printf("%s, driver %d, %s; %smoe_route %s\n", b->gpu.name, b->gpu.driver_version, date, empty, MOE_ROUTE_VERSION);
    if (bench_wanted.router || (all && !described)) {
        report_header(&b->report, "empty");
        for (i = 0; i < sizeof router_shapes / sizeof router_shapes[0]; i++) bench_router(b, &router_shapes[i]);
    }
    if (bench_wanted.combine || (all && !described)) {
        report_header(&b->report, "empty");
        bench_combine(b);
    }
    if (bench_wanted.layer || all) {
        report_header(&b->report, "read");
        if (described) bench_described(b);
        for (i = 0; i < sizeof layer_shapes / sizeof layer_shapes[0] && !described; i++)
            if (shape_is_wanted(layer_shapes[i].name)) bench_shape(b, &layer_shapes[i]);
    }
    bench_close(b);
}

static int bench_main(int argc, char **argv) {
    static bench b;
    uint32_t i;
    options_parse(&bench_command, argc, argv);
    if (layer_wanted.config) config_apply(&layer_wanted);
    b.calls = bench_wanted.calls;
    b.num_tokens = options_numbers("--tokens", bench_wanted.tokens, 1, BENCH_MOST_TOKENS, b.tokens, BENCH_TIMES);
    b.most_tokens = BENCH_TOKENS;
    for (i = 0; i < b.num_tokens; i++)
        if (b.tokens[i] > b.most_tokens) b.most_tokens = b.tokens[i];
    b.report.quiet = output_is_stdout(bench_wanted.csv) || output_is_stdout(bench_wanted.json) ||
                     output_is_stdout(bench_wanted.svg);
    if (bench_wanted.from) {
        report_header(&b.report, "floor");
        report_read_csv(&b.report);
    } else {
        bench_measure(&b, layer_wanted.model_type || layer_wanted.model.num_experts || layer_wanted.model.hidden_size ||
                              layer_wanted.format);
    }
    if (bench_wanted.csv) report_write_csv(&b.report);
    if (bench_wanted.json) report_write_json(&b.report);
    if (bench_wanted.svg) report_write_svg(&b.report);
    return STATUS_OK;
}

#endif /* BENCH_LAYER_H */
