/*
  bench.h: moe_route bench: microseconds of the router, the combine and whole layers on a GPU, beside floors measured in the
  same run. Here is how they are timed, the router and the combine; bench_layer.h has the layers and the subcommand,
  bench_report.h what becomes of the numbers. Include bench_report.h, bench/draws.h and bench/floors.h first.

  Method: calls are captured into one CUDA graph, each with logits, activations and workspace of its own where that
  matters; the graph is replayed, and the median of the replays is divided by the calls. Expert weights are rotated over
  copies of at least 1 GiB in all, and every call routes its tokens differently, so that weights come from memory and not
  from the L2 cache. The read floor is one kernel that reads the bytes of the same distinct experts.
*/
#ifndef BENCH_H
#define BENCH_H

enum { BENCH_CALLS = 200, BENCH_REPLAYS = 21, BENCH_TOKENS = 16, BENCH_MOST_TOKENS = 512, BENCH_TIMES = 16, BENCH_COPIES = 16 };
#define BENCH_POOL_BYTES ((size_t)1 << 30)

/* ---- what is measured ---- */

typedef struct router_shape {
    const char *name;
    uint32_t num_experts, top_k;
    moe_route_score score;
    int bias;
    uint32_t num_groups, topk_groups;
    double targets[4]; /* microseconds at 1, 4, 8 and 16 tokens on an H200 that this library aims at */
} router_shape;

static const router_shape router_shapes[] = {
    {"E 256, k 8", 256, 8, MOE_ROUTE_SCORE_SOFTMAX, 0, 0, 0, {2.0, 2.1, 2.3, 2.6}},
    {"E 128, k 8", 128, 8, MOE_ROUTE_SCORE_SOFTMAX, 0, 0, 0, {1.8, 1.9, 2.1, 2.4}},
    {"E 32, k 4", 32, 4, MOE_ROUTE_SCORE_SOFTMAX, 0, 0, 0, {1.5, 1.5, 1.6, 1.8}},
    {"E 512, k 10", 512, 10, MOE_ROUTE_SCORE_SOFTMAX, 0, 0, 0, {2.6, 2.9, 3.2, 3.8}},
    {"E 256, k 8, 4 of 8 groups", 256, 8, MOE_ROUTE_SCORE_SIGMOID, 1, 8, 4, {2.2, 2.3, 2.5, 2.8}},
};

typedef struct bench {
    gpu_device gpu;
    gpu_stream stream;
    moe_route_context *context;
    floors floor;
    int has_floors;
    uint32_t tokens[BENCH_TIMES], num_tokens, most_tokens, calls;
    bench_report report;
} bench;

static void must_gpu(bench *b, int result) {
    if (result) stop(STATUS_FAILED, "%s", b->gpu.reason);
}

static gpu_address device_memory(bench *b, size_t size) {
    gpu_address address;
    must_gpu(b, gpu_alloc(&b->gpu, &address, size ? size : 1));
    return address;
}

static gpu_address device_zeros(bench *b, size_t size) {
    const gpu_address address = device_memory(b, size);
    must_gpu(b, gpu_memset(&b->gpu, address, 0, size));
    return address;
}

/* ---- timing ---- */

typedef void call_function(bench *b, void *user, uint32_t call);

/* Microseconds of one call. */
static double time_calls(bench *b, call_function *run, void *user) {
    double milliseconds;
    gpu_graph graph;
    uint32_t call;
    must_gpu(b, gpu_capture_begin(&b->gpu, b->stream));
    for (call = 0; call < b->calls; call++) run(b, user, call);
    must_gpu(b, gpu_capture_end(&b->gpu, b->stream, &graph));
    must_gpu(b, gpu_graph_time(&b->gpu, graph, b->stream, BENCH_REPLAYS, &milliseconds));
    must_gpu(b, gpu_graph_destroy(&b->gpu, graph));
    return 1e3 * milliseconds / b->calls;
}

static void run_empty(bench *b, void *user, uint32_t call) {
    (void)user;
    (void)call;
    must_gpu(b, floors_empty(&b->floor, &b->gpu, b->stream));
}

/* ---- logits: [calls, T, E], popular experts more often as in real models ---- */

/* The distinct experts of one call: marks them, returns how many. */
static uint32_t mark_distinct(const float *logits, uint32_t tokens, uint32_t num_experts, uint32_t top_k, unsigned char *marks) {
    uint32_t t, j, e, count = 0;
    memset(marks, 0, num_experts);
    for (t = 0; t < tokens; t++) {
        unsigned char taken[MOER_MAX_EXPERTS];
        memset(taken, 0, sizeof taken);
        for (j = 0; j < top_k; j++) {
            uint32_t best = num_experts;
            for (e = 0; e < num_experts; e++)
                if (!taken[e] && (best == num_experts || logits[t * num_experts + e] > logits[t * num_experts + best])) best = e;
            taken[best] = 1;
            count += !marks[best];
            marks[best] = 1;
        }
    }
    return count;
}

static void draw_logits(float *logits, uint32_t calls, uint32_t tokens, uint32_t num_experts, double popularity) {
    double *popular = (double *)allocate(num_experts, sizeof *popular);
    uint32_t call, i, e;
    for (call = 0; call < calls; call++) {
        for (e = 0; e < num_experts; e++)
            popular[e] = popularity * bench_normal(); /* other experts are popular in each call: another layer's */
        for (i = 0; i < tokens; i++)
            for (e = 0; e < num_experts; e++)
                logits[((size_t)call * tokens + i) * num_experts + e] = (float)(bench_normal() + popular[e]);
    }
    free(popular);
}

/* How much popularity gives the wanted mean of distinct experts at 16 tokens. */
static double find_popularity(uint32_t num_experts, uint32_t top_k, double distinct) {
    float *logits = (float *)allocate((size_t)40 * BENCH_TOKENS * num_experts, sizeof *logits);
    unsigned char marks[MOER_MAX_EXPERTS];
    double low = 0, high = 3;
    int i;
    for (i = 0; i < 10; i++) {
        const double middle = (low + high) / 2;
        double mean = 0;
        uint32_t call;
        draw_logits(logits, 40, BENCH_TOKENS, num_experts, middle);
        for (call = 0; call < 40; call++)
            mean += mark_distinct(logits + (size_t)call * BENCH_TOKENS * num_experts, BENCH_TOKENS, num_experts, top_k, marks) /
                    40.0;
        if (mean > distinct) low = middle;
        else high = middle;
    }
    free(logits);
    return low;
}

static gpu_address make_logits(bench *b, uint32_t tokens, uint32_t num_experts, double popularity, quantize_dtype dtype) {
    const size_t count = (size_t)b->calls * tokens * num_experts, size = count * quantize_dtype_size(dtype);
    float *values = (float *)allocate(count, sizeof *values);
    void *stored = allocate(count, sizeof *values);
    const gpu_address address = device_memory(b, size);
    draw_logits(values, b->calls, tokens, num_experts, popularity);
    quantize_convert(stored, dtype, values, QUANTIZE_F32, count);
    must_gpu(b, gpu_upload(&b->gpu, address, stored, size));
    free(values);
    free(stored);
    return address;
}

/* ---- the router with all maps ---- */

typedef struct router_run {
    moe_route_layer *layer;
    moe_route_route_args args;
    gpu_address logits;
    size_t logits_stride;
} router_run;

static void run_router(bench *b, void *user, uint32_t call) {
    router_run *r = (router_run *)user;
    r->args.logits = r->logits + call * r->logits_stride;
    must_library(b->context, moe_route_route(r->layer, &r->args));
}

static void bench_router(bench *b, const router_shape *shape) {
    static const uint32_t tokens[] = {1, 4, 8, 16};
    gpu_address out = device_memory(b, 1 << 20), bias = device_memory(b, shape->num_experts * 4);
    moe_route_layer_desc desc;
    router_run r;
    uint32_t i;
    memset(&desc, 0, sizeof desc);
    memset(&r, 0, sizeof r);
    must_gpu(b, gpu_memset(&b->gpu, bias, 0, shape->num_experts * 4));
    desc.router.num_experts = shape->num_experts;
    desc.router.top_k = shape->top_k;
    desc.router.score = shape->score;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc.router.selection_bias = shape->bias ? bias : 0;
    if (shape->num_groups) {
        desc.router.group_rule = MOE_ROUTE_GROUPS_TOP2_SUM;
        desc.router.num_groups = shape->num_groups;
        desc.router.topk_groups = shape->topk_groups;
    }
    desc.max_tokens = BENCH_TOKENS;
    must_library(b->context, moe_route_layer_create(b->context, &desc, &r.layer));
    r.args.stream = b->stream;
    r.args.ids = out;
    r.args.weights = out + 65536;
    r.args.maps.expert_offsets = out + 65536 * 2;
    r.args.maps.row_to_pair = out + 65536 * 3;
    r.args.maps.pair_to_row = out + 65536 * 4;
    r.args.maps.row_to_expert = out + 65536 * 5;
    r.args.maps.distinct_experts = out + 65536 * 6;
    r.args.maps.distinct_offsets = out + 65536 * 7;
    r.args.maps.distinct_count = out + 65536 * 8;
    for (i = 0; i < 4; i++) {
        r.args.num_tokens = tokens[i];
        r.logits = make_logits(b, tokens[i], shape->num_experts, 0, QUANTIZE_F32);
        r.logits_stride = (size_t)tokens[i] * shape->num_experts * 4;
        report_add(&b->report, "router + maps", shape->name, "", tokens[i], 0, 0, b->report.empty, time_calls(b, run_router, &r),
                   shape->targets[i]);
        gpu_free(&b->gpu, r.logits);
    }
    moe_route_layer_destroy(r.layer);
    gpu_free(&b->gpu, out);
    gpu_free(&b->gpu, bias);
}

/* ---- the combine ---- */

typedef struct combine_run {
    moe_route_layer *layer;
    moe_route_combine_args args;
} combine_run;

static void run_combine(bench *b, void *user, uint32_t call) {
    combine_run *r = (combine_run *)user;
    (void)call;
    must_library(b->context, moe_route_combine(r->layer, &r->args));
}

static void bench_combine(bench *b) {
    static const uint32_t tokens[] = {1, 4, 8, 16};
    int32_t map[BENCH_TOKENS * 8];
    gpu_address memory = device_memory(b, 4 << 20);
    moe_route_layer_desc desc;
    combine_run r;
    uint32_t i;
    memset(&desc, 0, sizeof desc);
    memset(&r, 0, sizeof r);
    desc.router.num_experts = 256;
    desc.router.top_k = 8;
    desc.experts.hidden_size = 2048;
    desc.operations = MOE_ROUTE_OPERATION_COMBINE;
    must_library(b->context, moe_route_layer_create(b->context, &desc, &r.layer));
    for (i = 0; i < BENCH_TOKENS * 8; i++) map[i] = (int32_t)i;
    must_gpu(b, gpu_memset(&b->gpu, memory, 0, 4 << 20));
    must_gpu(b, gpu_upload(&b->gpu, memory, map, sizeof map));
    r.args.stream = b->stream;
    r.args.pair_to_row = memory;
    r.args.weights = memory + 65536;
    r.args.y = memory + 65536 * 2;
    r.args.rows = memory + (1 << 20);
    for (i = 0; i < 4; i++) {
        r.args.num_tokens = tokens[i];
        report_add(&b->report, "combine", "H 2048, k 8", "bf16", tokens[i], 0, 0, b->report.empty, time_calls(b, run_combine, &r),
                   1.4);
    }
    moe_route_layer_destroy(r.layer);
    gpu_free(&b->gpu, memory);
}

#endif /* BENCH_H */
