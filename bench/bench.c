/*
  bench.c: microseconds of the router, the combine and whole layers on a GPU, beside floors measured in the same run.

      bench [--router] [--combine] [--layer] [--kernels] [--shape NAME]... [--tokens LIST] [--csv FILE] [--json FILE]

  Method: CALLS calls are captured into one CUDA graph, each with logits, activations and workspace of its own where that
  matters; the graph is replayed, and the median of the replays is divided by the calls. Expert weights are rotated over
  copies of at least 1 GiB in all, and every call routes its tokens differently, so that weights come from memory and not
  from the L2 cache. The read floor is one kernel that reads the bytes of the same distinct experts.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../examples/gpu.h"
#include "floors.h"

enum { CALLS = 200, REPLAYS = 21, MAX_TOKENS = 16, MAX_TIMES = 8, MAX_COPIES = 16 };
#define POOL_BYTES ((size_t)1 << 30)

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

typedef struct layer_shape {
    const char *name;
    uint32_t num_experts, top_k, hidden_size, intermediate_size;
    moe_route_format format;
    uint32_t group_size;
    double distinct; /* mean distinct experts at 16 tokens that the drawn logits aim at */
} layer_shape;

static const layer_shape layer_shapes[] = {
    {"qwen3.6-35b-a3b-int4", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_INT4, 64, 84.1},
    {"qwen3.6-35b-a3b-bf16", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_BF16, 0, 84.1},
    {"gpt-oss-20b-int4", 32, 4, 2880, 2880, MOE_ROUTE_FORMAT_INT4, 64, 22.9},
    {"gemma-4-26b-a4b-int4", 128, 8, 2816, 704, MOE_ROUTE_FORMAT_INT4, 64, 65.1},
};

typedef struct row { /* one line of the report */
    const char *what, *shape;
    char dtype[8];
    uint32_t tokens;
    double distinct, megabytes, floor, microseconds, target; /* floor: the read, or the empty node */
} row;

typedef struct bench {
    gpu_device gpu;
    gpu_stream stream;
    moe_route_context *context;
    floors floor;
    uint32_t tokens[MAX_TIMES], num_tokens;
    int router, combine, layer, kernels;
    const char *shapes[8], *csv, *json;
    uint32_t num_shapes;
    double empty; /* microseconds of an empty node */
    row rows[512];
    uint32_t num_rows;
} bench;

static void die(const char *format, const char *detail) {
    fprintf(stderr, format, detail);
    fputc('\n', stderr);
    exit(1);
}

static void must_gpu(bench *b, int result) {
    if (result) die("bench: %s", b->gpu.reason);
}

static void must(const bench *b, moe_route_status status) {
    static char text[1024];
    if (status == MOE_ROUTE_OK) return;
    moe_route_message(b->context, text, sizeof text);
    die("bench: %s", text);
}

static void *allocate(size_t size) {
    void *memory = calloc(size ? size : 1, 1);
    if (!memory) die("bench: %s", "out of memory");
    return memory;
}

static gpu_address device_memory(bench *b, size_t size) {
    gpu_address address;
    must_gpu(b, gpu_alloc(&b->gpu, &address, size ? size : 1));
    return address;
}

static uint64_t random_state = UINT64_C(88172645463325252);

static uint64_t random_next(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static double random_normal(void) {
    const double u = ((double)(random_next() >> 11) + 1) / 9007199254740993.0, v = (double)(random_next() >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* ---- timing ---- */

typedef void call_function(bench *b, void *user, uint32_t call);

static int by_value(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Microseconds of one call. */
static double time_calls(bench *b, call_function *run, void *user) {
    double milliseconds[REPLAYS];
    gpu_event begin, end;
    gpu_graph graph;
    uint32_t call;
    int i;
    must_gpu(b, gpu_event_create(&b->gpu, &begin));
    must_gpu(b, gpu_event_create(&b->gpu, &end));
    must_gpu(b, gpu_capture_begin(&b->gpu, b->stream));
    for (call = 0; call < CALLS; call++) run(b, user, call);
    must_gpu(b, gpu_capture_end(&b->gpu, b->stream, &graph));
    for (i = -3; i < REPLAYS; i++) { /* the first three warm up */
        double elapsed;
        must_gpu(b, gpu_event_record(&b->gpu, begin, b->stream));
        must_gpu(b, gpu_graph_launch(&b->gpu, graph, b->stream));
        must_gpu(b, gpu_event_record(&b->gpu, end, b->stream));
        must_gpu(b, gpu_event_elapsed(&b->gpu, begin, end, &elapsed));
        if (i >= 0) milliseconds[i] = elapsed;
    }
    must_gpu(b, gpu_graph_destroy(&b->gpu, graph));
    must_gpu(b, gpu_event_destroy(&b->gpu, begin));
    must_gpu(b, gpu_event_destroy(&b->gpu, end));
    qsort(milliseconds, REPLAYS, sizeof milliseconds[0], by_value);
    return 1e3 * milliseconds[REPLAYS / 2] / CALLS;
}

static void report(bench *b, const char *what, const char *shape, const char *dtype, uint32_t tokens, double distinct, double megabytes, double floor, double microseconds, double target) {
    row *r = &b->rows[b->num_rows];
    if (b->num_rows == sizeof b->rows / sizeof b->rows[0]) die("bench: %s", "too many rows");
    b->num_rows++;
    r->what = what;
    r->shape = shape;
    snprintf(r->dtype, sizeof r->dtype, "%s", dtype);
    r->tokens = tokens;
    r->distinct = distinct;
    r->megabytes = megabytes;
    r->floor = floor;
    r->microseconds = microseconds;
    r->target = target;
    printf("%-14s %-26s %-5s %4u ", what, shape, dtype, (unsigned)tokens);
    if (distinct > 0) printf("%8.1f %8.1f ", distinct, megabytes);
    else printf("%8s %8s ", "", "");
    printf("%8.2f %9.2f ", floor, microseconds);
    if (target > 0) printf("%9.2f %s", target, microseconds <= target ? "yes" : "no");
    printf("\n");
    fflush(stdout);
}

static void report_header(const char *floor) {
    printf("\n%-14s %-26s %-5s %4s %8s %8s %8s %9s %9s\n", "what", "shape", "x", "T", "distinct", "MB", floor, "us", "target");
}

static void run_empty(bench *b, void *user, uint32_t call) {
    (void)user;
    (void)call;
    must_gpu(b, floors_empty(&b->floor, &b->gpu, b->stream));
}

/* ---- logits: [CALLS, T, E], popular experts more often as in real models ---- */

typedef struct logits_set {
    float *host;
    gpu_address device;
    double popularity;
} logits_set;

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
    double *popular = (double *)allocate(num_experts * sizeof *popular);
    uint32_t call, i, e;
    for (call = 0; call < calls; call++) {
        for (e = 0; e < num_experts; e++) popular[e] = popularity * random_normal(); /* other experts are popular in each call: another layer's */
        for (i = 0; i < tokens; i++)
            for (e = 0; e < num_experts; e++) logits[((size_t)call * tokens + i) * num_experts + e] = (float)(random_normal() + popular[e]);
    }
    free(popular);
}

/* How much popularity gives the wanted mean of distinct experts at 16 tokens. */
static double find_popularity(const layer_shape *shape) {
    float *logits = (float *)allocate((size_t)40 * MAX_TOKENS * shape->num_experts * sizeof *logits);
    unsigned char marks[MOER_MAX_EXPERTS];
    double low = 0, high = 3;
    int i;
    for (i = 0; i < 10; i++) {
        const double middle = (low + high) / 2;
        double mean = 0;
        uint32_t call;
        draw_logits(logits, 40, MAX_TOKENS, shape->num_experts, middle);
        for (call = 0; call < 40; call++) mean += mark_distinct(logits + (size_t)call * MAX_TOKENS * shape->num_experts, MAX_TOKENS, shape->num_experts, shape->top_k, marks) / 40.0;
        if (mean > shape->distinct) low = middle;
        else high = middle;
    }
    free(logits);
    return low;
}

static void make_logits(bench *b, logits_set *set, uint32_t tokens, uint32_t num_experts) {
    const size_t count = (size_t)CALLS * tokens * num_experts;
    set->host = (float *)allocate(count * sizeof(float));
    draw_logits(set->host, CALLS, tokens, num_experts, set->popularity);
    set->device = device_memory(b, count * sizeof(float));
    must_gpu(b, gpu_upload(&b->gpu, set->device, set->host, count * sizeof(float)));
}

static void free_logits(bench *b, logits_set *set) {
    free(set->host);
    gpu_free(&b->gpu, set->device);
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
    must(b, moe_route_route(r->layer, &r->args));
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
    desc.max_tokens = MAX_TOKENS;
    must(b, moe_route_layer_create(b->context, &desc, &r.layer));
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
        logits_set logits;
        logits.popularity = 0;
        make_logits(b, &logits, tokens[i], shape->num_experts);
        r.args.num_tokens = tokens[i];
        r.logits = logits.device;
        r.logits_stride = (size_t)tokens[i] * shape->num_experts * 4;
        report(b, "router + maps", shape->name, "", tokens[i], 0, 0, b->empty, time_calls(b, run_router, &r), shape->targets[i]);
        free_logits(b, &logits);
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
    must(b, moe_route_combine(r->layer, &r->args));
}

static void bench_combine(bench *b) {
    static const uint32_t tokens[] = {1, 4, 8, 16};
    int32_t map[MAX_TOKENS * 8];
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
    must(b, moe_route_layer_create(b->context, &desc, &r.layer));
    for (i = 0; i < MAX_TOKENS * 8; i++) map[i] = (int32_t)i;
    must_gpu(b, gpu_memset(&b->gpu, memory, 0, 4 << 20));
    must_gpu(b, gpu_upload(&b->gpu, memory, map, sizeof map));
    r.args.stream = b->stream;
    r.args.pair_to_row = memory;
    r.args.weights = memory + 65536;
    r.args.y = memory + 65536 * 2;
    r.args.rows = memory + (1 << 20);
    for (i = 0; i < 4; i++) {
        r.args.num_tokens = tokens[i];
        report(b, "combine", "H 2048, k 8", "bf16", tokens[i], 0, 0, b->empty, time_calls(b, run_combine, &r), 1.4);
    }
    moe_route_layer_destroy(r.layer);
    gpu_free(&b->gpu, memory);
}

/* ---- whole layers ---- */

typedef struct matrix_memory { /* of one copy of the weights */
    gpu_address data, scales;
    size_t data_bytes, scales_bytes; /* of one expert */
} matrix_memory;

typedef struct layer_run {
    const layer_shape *shape;
    uint32_t tokens, num_copies, only; /* only: one launch of the sequence; all: ~0 */
    moe_route_layer *layers[MAX_COPIES];
    matrix_memory memory[MAX_COPIES][2];
    moe_route_layer_args args[CALLS];
    gpu_address chunk_lists[CALLS];
    uint32_t num_chunks[CALLS], shift;
} layer_run;

static void run_layer(bench *b, void *user, uint32_t call) {
    layer_run *r = (layer_run *)user;
    must(b, moe_route_layer_run(r->layers[call % r->num_copies], &r->args[call]));
}

/* One launch of the call's sequence alone; its inputs are in the call's workspace from an earlier run. */
static void run_one_launch(bench *b, void *user, uint32_t call) {
    layer_run *r = (layer_run *)user;
    const moe_route_layer *layer = r->layers[call % r->num_copies];
    moer_sequence sequence;
    moer_workspace w;
    moer_workspace_lay_out(layer, r->tokens, &w);
    sequence.num_launches = 0;
    moer_sequence_layer(&sequence, layer, &r->args[call], &w);
    sequence.launches[0] = sequence.launches[r->only];
    sequence.num_launches = 1;
    must(b, moer_sequence_launch(layer, &sequence, b->stream));
}

static void run_floor(bench *b, void *user, uint32_t call) {
    layer_run *r = (layer_run *)user;
    must_gpu(b, floors_read(&b->floor, &b->gpu, r->chunk_lists[call], r->num_chunks[call], r->shift, b->stream));
}

static size_t format_bits(moe_route_format format) { return format == MOE_ROUTE_FORMAT_INT4 ? 4 : format == MOE_ROUTE_FORMAT_INT8 ? 8 : 16; }

/* Fills device memory with a pattern that is valid in the format: any nibbles or bytes; 16-bit floats around 0.02. */
static void fill(bench *b, gpu_address address, size_t size, int floats, moe_route_dtype dtype) {
    enum { BLOCK = 1 << 24 };
    static uint16_t *block;
    size_t i;
    if (!block) block = (uint16_t *)allocate(BLOCK);
    for (i = 0; i < BLOCK / 2; i++) {
        const uint16_t bits = (uint16_t)(random_next() >> 20);
        block[i] = !floats ? bits : dtype == MOE_ROUTE_F16 ? (uint16_t)((bits & 0x83ff) | 0x2400) : (uint16_t)((bits & 0x80ff) | 0x3c00);
    }
    for (i = 0; i < size; i += BLOCK) must_gpu(b, gpu_upload(&b->gpu, address + i, block, size - i < BLOCK ? size - i : BLOCK));
}

static void describe_matrix(const layer_shape *shape, moe_route_dtype dtype, const matrix_memory *memory, moe_route_weights *weights) {
    memset(weights, 0, sizeof *weights);
    weights->format = shape->format;
    weights->data = memory->data;
    weights->scales = memory->scales;
    weights->scales_dtype = memory->scales ? dtype : MOE_ROUTE_DTYPE_DEFAULT;
    weights->group_size = shape->group_size;
}

static void create_copies(bench *b, layer_run *r, moe_route_dtype dtype) {
    const layer_shape *shape = r->shape;
    size_t total = 0;
    do {
        moe_route_layer_desc desc;
        int m;
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = shape->num_experts;
        desc.router.top_k = shape->top_k;
        desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
        desc.experts.hidden_size = shape->hidden_size;
        desc.experts.intermediate_size = shape->intermediate_size;
        desc.experts.dtype = dtype;
        desc.max_tokens = MAX_TOKENS;
        for (m = 0; m < 2; m++) {
            matrix_memory *memory = &r->memory[r->num_copies][m];
            const size_t rows = m ? shape->hidden_size : 2 * (size_t)shape->intermediate_size, inner = m ? shape->intermediate_size : shape->hidden_size;
            memory->data_bytes = rows * inner * format_bits(shape->format) / 8;
            memory->scales_bytes = shape->group_size ? rows * (inner / shape->group_size) * 2 : 0;
            memory->data = device_memory(b, memory->data_bytes * shape->num_experts);
            fill(b, memory->data, memory->data_bytes * shape->num_experts, shape->format == MOE_ROUTE_FORMAT_BF16 || shape->format == MOE_ROUTE_FORMAT_F16, shape->format == MOE_ROUTE_FORMAT_F16 ? MOE_ROUTE_F16 : MOE_ROUTE_BF16);
            if (memory->scales_bytes) {
                memory->scales = device_memory(b, memory->scales_bytes * shape->num_experts);
                fill(b, memory->scales, memory->scales_bytes * shape->num_experts, 1, dtype);
            }
            total += (memory->data_bytes + memory->scales_bytes) * shape->num_experts;
            describe_matrix(shape, dtype, memory, m ? &desc.experts.down : &desc.experts.gate_up);
        }
        must(b, moe_route_layer_create(b->context, &desc, &r->layers[r->num_copies++]));
    } while (r->num_copies < 2 || (total < POOL_BYTES && r->num_copies < MAX_COPIES));
}

static void destroy_copies(bench *b, layer_run *r) {
    uint32_t i, m;
    for (i = 0; i < r->num_copies; i++) {
        moe_route_layer_destroy(r->layers[i]);
        for (m = 0; m < 2; m++) {
            gpu_free(&b->gpu, r->memory[i][m].data);
            gpu_free(&b->gpu, r->memory[i][m].scales);
        }
    }
}

/* Addresses of the chunks that hold the call's distinct experts; returns their bytes. */
static size_t list_chunks(bench *b, layer_run *r, uint32_t call, const unsigned char *marks) {
    const matrix_memory *memory = r->memory[call % r->num_copies];
    const size_t chunk = (size_t)16 << r->shift;
    const size_t parts[4] = {memory[0].data_bytes, memory[0].scales_bytes, memory[1].data_bytes, memory[1].scales_bytes};
    const gpu_address starts[4] = {memory[0].data, memory[0].scales, memory[1].data, memory[1].scales};
    size_t bytes = 0, count = 0, i;
    gpu_address *list;
    uint32_t e, p;
    for (p = 0; p < 4; p++) bytes += parts[p];
    list = (gpu_address *)allocate((bytes / chunk + 4) * r->shape->num_experts * sizeof *list);
    bytes = 0;
    for (e = 0; e < r->shape->num_experts; e++)
        for (p = 0; p < 4 && marks[e]; p++) {
            for (i = 0; i + chunk <= parts[p]; i += chunk) list[count++] = starts[p] + e * parts[p] + i;
            bytes += parts[p];
        }
    r->num_chunks[call] = (uint32_t)count;
    r->chunk_lists[call] = device_memory(b, count * sizeof *list);
    must_gpu(b, gpu_upload(&b->gpu, r->chunk_lists[call], list, count * sizeof *list));
    free(list);
    return bytes;
}

static void bench_layer_at(bench *b, layer_run *r, const char *dtype_name, double popularity) {
    const layer_shape *shape = r->shape;
    const size_t x_bytes = (size_t)r->tokens * shape->hidden_size * 2;
    unsigned char marks[MOER_MAX_EXPERTS];
    logits_set logits;
    gpu_address x = device_memory(b, x_bytes * CALLS), y = device_memory(b, x_bytes * CALLS), workspace;
    size_t workspace_size;
    double distinct = 0, bytes = 0, floor, time;
    uint32_t call;
    logits.popularity = popularity;
    make_logits(b, &logits, r->tokens, shape->num_experts);
    fill(b, x, x_bytes * CALLS, 1, strcmp(dtype_name, "f16") == 0 ? MOE_ROUTE_F16 : MOE_ROUTE_BF16);
    must(b, moe_route_layer_workspace_size(r->layers[0], r->tokens, &workspace_size));
    workspace = device_memory(b, workspace_size * CALLS);
    for (call = 0; call < CALLS; call++) {
        moe_route_layer_args *args = &r->args[call];
        memset(args, 0, sizeof *args);
        args->num_tokens = r->tokens;
        args->logits = logits.device + (size_t)call * r->tokens * shape->num_experts * 4;
        args->x = x + call * x_bytes;
        args->y = y + call * x_bytes;
        args->workspace = workspace + call * workspace_size;
        args->workspace_size = workspace_size;
        args->stream = b->stream;
        distinct += mark_distinct(logits.host + (size_t)call * r->tokens * shape->num_experts, r->tokens, shape->num_experts, shape->top_k, marks) / (double)CALLS;
        bytes += (double)list_chunks(b, r, call, marks) / CALLS;
    }
    floor = time_calls(b, run_floor, r);
    time = time_calls(b, run_layer, r);
    report(b, "layer", shape->name, dtype_name, r->tokens, distinct, bytes / 1e6, floor, time, 1.25 * floor + 3.5);
    for (r->only = 0; b->kernels && r->only < 3; r->only++) {
        static const char *const names[] = {"  router", "  gate_up", "  down"};
        report(b, names[r->only], shape->name, dtype_name, r->tokens, 0, 0, b->empty, time_calls(b, run_one_launch, r), 0);
    }
    for (call = 0; call < CALLS; call++) gpu_free(&b->gpu, r->chunk_lists[call]);
    free_logits(b, &logits);
    gpu_free(&b->gpu, x);
    gpu_free(&b->gpu, y);
    gpu_free(&b->gpu, workspace);
}

static void bench_layer(bench *b, const layer_shape *shape) {
    static layer_run r;
    const moe_route_dtype dtype = shape->format == MOE_ROUTE_FORMAT_BF16 ? MOE_ROUTE_BF16 : MOE_ROUTE_F16;
    const double popularity = find_popularity(shape);
    uint32_t i;
    memset(&r, 0, sizeof r);
    r.shape = shape;
    create_copies(b, &r, dtype);
    r.shift = 11; /* chunks of 32 KB or the largest smaller ones that divide an expert */
    for (i = 0; i < 2; i++)
        while (r.memory[0][i].data_bytes % ((size_t)16 << r.shift) || r.memory[0][i].scales_bytes % ((size_t)16 << r.shift)) r.shift--;
    for (i = 0; i < b->num_tokens; i++) {
        r.tokens = b->tokens[i];
        bench_layer_at(b, &r, dtype == MOE_ROUTE_BF16 ? "bf16" : "f16", popularity);
    }
    destroy_copies(b, &r);
}

/* ---- files ---- */

static void write_csv(const bench *b) {
    FILE *file = fopen(b->csv, "w");
    uint32_t i;
    if (!file) die("bench: %s can't be written", b->csv);
    fprintf(file, "what,shape,dtype,tokens,distinct,megabytes,floor_us,us,target_us\n");
    for (i = 0; i < b->num_rows; i++) {
        const row *r = &b->rows[i];
        fprintf(file, "%s,\"%s\",%s,%u,%.2f,%.3f,%.3f,%.3f,%.3f\n", r->what, r->shape, r->dtype, (unsigned)r->tokens, r->distinct, r->megabytes, r->floor, r->microseconds, r->target);
    }
    if (fclose(file)) die("bench: %s can't be written", b->csv);
}

static void write_json(const bench *b) {
    FILE *file = fopen(b->json, "w");
    uint32_t i;
    if (!file) die("bench: %s can't be written", b->json);
    fprintf(file, "{\"gpu\": \"%s\", \"driver\": %d, \"empty_node_us\": %.3f, \"rows\": [", b->gpu.name, b->gpu.driver_version, b->empty);
    for (i = 0; i < b->num_rows; i++) {
        const row *r = &b->rows[i];
        fprintf(file, "%s\n {\"what\": \"%s\", \"shape\": \"%s\", \"dtype\": \"%s\", \"tokens\": %u, \"distinct\": %.2f, \"megabytes\": %.3f, \"floor_us\": %.3f, \"us\": %.3f, \"target_us\": %.3f}",
                i ? "," : "", r->what, r->shape, r->dtype, (unsigned)r->tokens, r->distinct, r->megabytes, r->floor, r->microseconds, r->target);
    }
    fprintf(file, "\n]}\n");
    if (fclose(file)) die("bench: %s can't be written", b->json);
}

/* ---- options ---- */

static const char usage[] =
    "usage: bench [OPTIONS]\n"
    "Times the router, the combine and whole layers on GPU 0, beside floors measured in the same run.\n"
    "  --router, --combine, --layer   only these parts; without any of them, all\n"
    "  --kernels                      each launch of a layer alone, too\n"
    "  --shape NAME                   only layers whose name starts so; may be repeated\n"
    "  --tokens LIST                  token counts of layers up to 16, such as 1,4 (default 1,2,4,8,16)\n"
    "  --csv FILE, --json FILE        write the rows there, too\n"
    "  --help                         this text\n";

static void parse_tokens(bench *b, const char *list) {
    char *end;
    for (b->num_tokens = 0; *list && b->num_tokens < MAX_TIMES; list = *end ? end + 1 : end) {
        const unsigned long value = strtoul(list, &end, 10);
        if (end == list || value < 1 || value > MAX_TOKENS) die("bench: --tokens takes numbers from 1 to 16, not %s", list);
        b->tokens[b->num_tokens++] = (uint32_t)value;
    }
}

static void parse_options(bench *b, int argc, char **argv) {
    int i;
    parse_tokens(b, "1,2,4,8,16");
    for (i = 1; i < argc; i++) {
        const char *option = argv[i];
        const int more = i + 1 < argc;
        if (!strcmp(option, "--router")) b->router = 1;
        else if (!strcmp(option, "--combine")) b->combine = 1;
        else if (!strcmp(option, "--layer")) b->layer = 1;
        else if (!strcmp(option, "--kernels")) b->kernels = 1;
        else if (!strcmp(option, "--tokens") && more) parse_tokens(b, argv[++i]);
        else if (!strcmp(option, "--csv") && more) b->csv = argv[++i];
        else if (!strcmp(option, "--json") && more) b->json = argv[++i];
        else if (!strcmp(option, "--shape") && more && b->num_shapes < 8) b->shapes[b->num_shapes++] = argv[++i];
        else if (!strcmp(option, "--help")) {
            fputs(usage, stdout);
            exit(0);
        } else {
            fprintf(stderr, "bench: unknown option or missing value: %s\n%s", option, usage);
            exit(64);
        }
    }
    if (!b->router && !b->combine && !b->layer) b->router = b->combine = b->layer = 1;
}

static int wanted(const bench *b, const char *name) {
    uint32_t i;
    for (i = 0; i < b->num_shapes; i++)
        if (!strncmp(name, b->shapes[i], strlen(b->shapes[i]))) return 1;
    return b->num_shapes == 0;
}

int main(int argc, char **argv) {
    static bench b;
    moe_route_context_desc desc;
    char date[32];
    const time_t now = time(NULL);
    size_t i;
    parse_options(&b, argc, argv);
    if (!gpu_open(&b.gpu)) die("bench: %s", b.gpu.reason);
    must_gpu(&b, gpu_stream_create(&b.gpu, &b.stream));
    must_gpu(&b, floors_open(&b.floor, &b.gpu));
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_GPU;
    desc.cuda_context = b.gpu.context;
    must(&b, moe_route_context_create(&desc, &b.context));
    b.empty = time_calls(&b, run_empty, NULL);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("%s, driver %d, %s; empty graph node %.2f us; moe_route %s\n", b.gpu.name, b.gpu.driver_version, date, b.empty, MOE_ROUTE_VERSION);
    if (b.router) {
        report_header("empty");
        for (i = 0; i < sizeof router_shapes / sizeof router_shapes[0]; i++) bench_router(&b, &router_shapes[i]);
    }
    if (b.combine) {
        report_header("empty");
        bench_combine(&b);
    }
    if (b.layer) {
        report_header("read");
        for (i = 0; i < sizeof layer_shapes / sizeof layer_shapes[0]; i++)
            if (wanted(&b, layer_shapes[i].name)) bench_layer(&b, &layer_shapes[i]);
    }
    if (b.csv) write_csv(&b);
    if (b.json) write_json(&b);
    moe_route_context_destroy(b.context);
    floors_close(&b.floor, &b.gpu);
    gpu_stream_destroy(&b.gpu, b.stream);
    gpu_close(&b.gpu);
    return 0;
}
