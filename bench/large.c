/*
  large.c: microseconds of whole layers, of each of their launches, and of router and maps alone, from 16 to 16,384 tokens on a GPU; for
  layers also the TFLOP/s of both matmuls and the read of all experts' weights as a floor.

      bench_large [--router] [--layer] [--kernels] [--cub] [--tune] [--shape NAME] [--tokens LIST]

  Method: CALLS calls are captured into one CUDA graph that is replayed; the median of the replays is divided by the calls. Two copies of
  the weights take turns, so that a layer's weights come from memory where they don't all fit L2. Logits are normal: experts get about as many
  rows as each other. Decode steps belong to moe_route bench.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../examples/gpu.h"
#include "draws.h"
#include "floors.h"

enum { CALLS = 8, REPLAYS = 11, COPIES = 2, MAX_TIMES = 24, MAX_TOKENS = 16384 };

typedef struct layer_shape {
    const char *name;
    uint32_t num_experts, top_k, hidden_size, intermediate_size;
    moe_route_format format;
    uint32_t group_size;
} layer_shape;

static const layer_shape layer_shapes[] = {
    {"qwen3.6-35b-a3b-bf16", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_BF16, 0},
    {"qwen3.6-35b-a3b-int4", 256, 8, 2048, 512, MOE_ROUTE_FORMAT_INT4, 64},
    {"gpt-oss-20b-mxfp4", 32, 4, 2880, 2880, MOE_ROUTE_FORMAT_MXFP4, 0},
    {"gemma-4-26b-a4b-int4", 128, 8, 2816, 704, MOE_ROUTE_FORMAT_INT4, 64},
    {"gemma-4-26b-a4b-q4_0", 128, 8, 2816, 704, MOE_ROUTE_FORMAT_GGUF_Q4_0, 0},
};

typedef struct bench {
    gpu_device gpu;
    gpu_stream stream;
    moe_route_context *context;
    floors floor;
    uint32_t tokens[MAX_TIMES], num_tokens;
    int router, layer, kernels, cub, tune;
    const char *shape;
} bench;

static void die(const char *format, const char *detail) {
    fprintf(stderr, format, detail);
    fputc('\n', stderr);
    exit(1);
}

static void must_gpu(bench *b, int result) {
    if (result) die("bench_large: %s", b->gpu.reason);
}

static void must(const bench *b, moe_route_status status) {
    static char text[1024];
    if (status == MOE_ROUTE_OK) return;
    moe_route_message(b->context, text, sizeof text);
    die("bench_large: %s", text);
}

static gpu_address device_memory(bench *b, size_t size) {
    gpu_address address;
    must_gpu(b, gpu_alloc(&b->gpu, &address, size ? size : 1));
    return address;
}

typedef void call_function(bench *b, void *user, uint32_t call);

/* Microseconds of one call. */
static double time_calls(bench *b, call_function *run, void *user) {
    double milliseconds;
    gpu_graph graph;
    uint32_t call;
    must_gpu(b, gpu_capture_begin(&b->gpu, b->stream));
    for (call = 0; call < CALLS; call++) run(b, user, call);
    must_gpu(b, gpu_capture_end(&b->gpu, b->stream, &graph));
    must_gpu(b, gpu_graph_time(&b->gpu, graph, b->stream, REPLAYS, &milliseconds));
    must_gpu(b, gpu_graph_destroy(&b->gpu, graph));
    return 1e3 * milliseconds / CALLS;
}

/* Random bytes, or with a mask 16-bit words (bits & keep) | set. */
static gpu_address random_memory(bench *b, size_t size, unsigned keep, unsigned set) {
    enum { BLOCK = 1 << 24 };
    static uint16_t block[BLOCK / 2];
    const gpu_address address = device_memory(b, size);
    size_t i;
    for (i = 0; i < BLOCK / 2; i++) block[i] = (uint16_t)(((unsigned)(bench_random() >> 20) & keep) | set);
    for (i = 0; i < size; i += BLOCK) must_gpu(b, gpu_upload(&b->gpu, address + i, block, size - i < BLOCK ? size - i : BLOCK));
    return address;
}

static gpu_address random_logits(bench *b, uint32_t tokens, uint32_t num_experts) {
    const size_t count = (size_t)tokens * num_experts;
    float *host = (float *)malloc(count * 4);
    gpu_address address = device_memory(b, count * 4);
    size_t i;
    if (!host) die("bench_large: %s", "out of memory");
    for (i = 0; i < count; i++) host[i] = (float)bench_normal();
    must_gpu(b, gpu_upload(&b->gpu, address, host, count * 4));
    free(host);
    return address;
}

/* ---- router and maps alone ---- */

typedef struct router_run {
    moe_route_layer *layer;
    moe_route_route_args route;
    moe_route_maps_args maps;
} router_run;

static void run_route(bench *b, void *user, uint32_t call) {
    const router_run *r = (const router_run *)user;
    (void)call;
    must(b, moe_route_route(r->layer, &r->route));
}

static void run_maps(bench *b, void *user, uint32_t call) {
    const router_run *r = (const router_run *)user;
    (void)call;
    must(b, moe_route_maps(r->layer, &r->maps));
}

/* Maps without and with the aligned form, which goes to `aligned` where there is room for it. */
static void print_maps(bench *b, router_run *r, const char *what, uint32_t num_tokens, gpu_address aligned, size_t room) {
    const uint32_t block_size = 64;
    double plain;
    r->maps.num_tokens = num_tokens;
    r->maps.maps.block_size = 0;
    r->maps.maps.aligned_row_to_pair = r->maps.maps.block_to_expert = 0;
    plain = time_calls(b, run_maps, r);
    if (moe_route_aligned_capacity(r->layer, num_tokens, block_size) * 4 <= room) {
        r->maps.maps.block_size = block_size;
        r->maps.maps.aligned_row_to_pair = aligned;
        r->maps.maps.block_to_expert = aligned + room;
    }
    printf("  %s %8.2f us  with aligned form %8.2f us", what, plain, time_calls(b, run_maps, r));
    fflush(stdout);
}

static void bench_router(bench *b, uint32_t num_experts, uint32_t top_k) {
    static const uint32_t tokens[] = {16, 64, 128, 1024, 4096, 16384};
    const gpu_address logits = random_logits(b, MAX_TOKENS, num_experts), pairs = (gpu_address)MAX_TOKENS * top_k;
    const gpu_address out = device_memory(b, (size_t)(pairs * 4 * 9));
    moe_route_layer_desc desc;
    router_run r, by_cub;
    size_t cub_size = 0;
    uint32_t i;
    memset(&desc, 0, sizeof desc);
    memset(&r, 0, sizeof r);
    memset(&by_cub, 0, sizeof by_cub);
    desc.router.num_experts = num_experts;
    desc.router.top_k = top_k;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc.max_tokens = MAX_TOKENS;
    desc.operations = MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_MAPS;
    must(b, moe_route_layer_create(b->context, &desc, &r.layer));
    must(b, moe_route_layer_workspace_size(r.layer, MAX_TOKENS, &r.maps.workspace_size));
    if (b->cub) {
        desc.cub_maps = MOE_ROUTE_ON;
        desc.operations = MOE_ROUTE_OPERATION_MAPS;
        must(b, moe_route_layer_create(b->context, &desc, &by_cub.layer));
        must(b, moe_route_layer_workspace_size(by_cub.layer, MAX_TOKENS, &cub_size));
        if (r.maps.workspace_size < cub_size) r.maps.workspace_size = cub_size;
    }
    r.maps.workspace = device_memory(b, r.maps.workspace_size);
    r.route.stream = r.maps.stream = b->stream;
    r.route.logits = logits;
    r.route.ids = r.maps.ids = out;
    r.route.weights = out + pairs * 4;
    r.maps.maps.row_to_pair = out + pairs * 8;
    r.maps.maps.pair_to_row = out + pairs * 12;
    r.maps.maps.expert_offsets = out + pairs * 16;
    by_cub.maps = r.maps;
    for (i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        r.route.num_tokens = tokens[i];
        printf("E %4u k %2u  T %5u  router %8.2f us", (unsigned)num_experts, (unsigned)top_k, (unsigned)tokens[i], time_calls(b, run_route, &r));
        print_maps(b, &r, "maps", tokens[i], out + pairs * 20, (size_t)(pairs * 8));
        if (b->cub && tokens[i] * top_k > MOER_SORT_PAIRS) print_maps(b, &by_cub, "by CUB", tokens[i], out + pairs * 20, (size_t)(pairs * 8));
        printf("\n");
    }
    moe_route_layer_destroy(r.layer);
    moe_route_layer_destroy(by_cub.layer);
    gpu_free(&b->gpu, r.maps.workspace);
    gpu_free(&b->gpu, logits);
    gpu_free(&b->gpu, out);
}

/* ---- layers ---- */

typedef struct layer_run {
    const layer_shape *shape;
    moe_route_layer *layers[COPIES];
    moe_route_layer_args args;
    uint32_t only; /* the launch that runs alone */
    gpu_address chunks[COPIES];
    uint32_t num_chunks, shift;
} layer_run;

static void run_layer(bench *b, void *user, uint32_t call) {
    const layer_run *r = (const layer_run *)user;
    must(b, moe_route_layer_run(r->layers[call % COPIES], &r->args));
}

/* One launch of the call's sequence alone; its inputs are in the workspace from an earlier run. */
static void run_one_launch(bench *b, void *user, uint32_t call) {
    const layer_run *r = (const layer_run *)user;
    const moe_route_layer *layer = r->layers[call % COPIES];
    moer_sequence sequence;
    moer_workspace w;
    moer_workspace_lay_out(layer, r->args.num_tokens, &w);
    sequence.num_launches = 0;
    moer_sequence_layer(&sequence, layer, &r->args, &w);
    sequence.launches[0] = sequence.launches[r->only];
    sequence.num_launches = 1;
    must(b, moer_sequence_launch(layer, &sequence, b->stream));
}

static void run_read(bench *b, void *user, uint32_t call) {
    const layer_run *r = (const layer_run *)user;
    must_gpu(b, floors_read(&b->floor, &b->gpu, r->chunks[call % COPIES], r->num_chunks, r->shift, b->stream));
}

static void describe_matrix(bench *b, const layer_shape *shape, size_t rows, size_t inner, moe_route_weights *weights, size_t *size) {
    const size_t count = rows * inner * shape->num_experts;
    weights->format = shape->format;
    weights->group_size = shape->group_size;
    if (shape->format == MOE_ROUTE_FORMAT_BF16) {
        weights->data = random_memory(b, *size = count * 2, 0x80ff, 0x3c00);
    } else if (shape->format == MOE_ROUTE_FORMAT_INT4) {
        weights->data = random_memory(b, *size = count / 2, 0xffff, 0);
        weights->scales = random_memory(b, count / shape->group_size * 2, 0x03ff, 0x1c00);
    } else if (shape->format == MOE_ROUTE_FORMAT_MXFP4) {
        weights->data = random_memory(b, *size = count / 2, 0xffff, 0);
        weights->scales = random_memory(b, count / 32, 0x0101, 0x7878);
    } else { /* Q4_0: its scales among the codes may be any number but NaN and infinity */
        weights->data = random_memory(b, *size = count / 32 * 18, 0x3fff, 0);
    }
}

static void bench_layer_at(bench *b, layer_run *r, uint32_t tokens, gpu_address logits) {
    const layer_shape *s = r->shape;
    const double flops = 6.0 * tokens * s->top_k * s->hidden_size * s->intermediate_size;
    size_t row = (size_t)s->hidden_size * 2;
    gpu_address x = random_memory(b, tokens * row, 0x80ff, 0x3c00), y = device_memory(b, tokens * row);
    moe_route_plan plan;
    double time;
    memset(&r->args, 0, sizeof r->args);
    r->args.num_tokens = tokens;
    r->args.logits = logits;
    r->args.x = x;
    r->args.y = y;
    r->args.stream = b->stream;
    must(b, moe_route_layer_workspace_size(r->layers[0], tokens, &r->args.workspace_size));
    r->args.workspace = device_memory(b, r->args.workspace_size);
    time = time_calls(b, run_layer, r);
    printf("%-22s T %5u  layer %9.2f us %7.1f TFLOP/s", s->name, (unsigned)tokens, time, flops / time * 1e-6);
    must(b, moe_route_layer_explain(r->layers[0], MOE_ROUTE_OPERATION_LAYER, tokens, &plan));
    for (r->only = 0; b->kernels && r->only < plan.num_launches; r->only++) {
        const char *tile = strstr(plan.launches[r->only].variant, "TILE_ROWS=");
        printf("  %s", plan.launches[r->only].kernel);
        if (tile) printf("-%d", atoi(tile + 10));
        printf(" %.2f", time_calls(b, run_one_launch, r));
    }
    printf("\n");
    fflush(stdout);
    gpu_free(&b->gpu, x);
    gpu_free(&b->gpu, y);
    gpu_free(&b->gpu, r->args.workspace);
}

static void print_step(const moe_route_tune_step *step, void *user) {
    (void)user;
    printf("  tuning %2u of %2u  T %5u  %9.2f us  %s\n", (unsigned)step->step, (unsigned)step->num_steps, (unsigned)step->num_tokens, step->microseconds, step->choice);
}

/* Measures again what may be kept from before. */
static void tune_layer(bench *b, const moe_route_layer_desc *desc) {
    moe_route_tune_args args;
    memset(&args, 0, sizeof args);
    must(b, moe_route_layer_tune_workspace_size(b->context, desc, &args.workspace_size));
    args.workspace = device_memory(b, args.workspace_size);
    args.progress = print_step;
    args.again = 1;
    must(b, moe_route_layer_tune(b->context, desc, &args));
    gpu_free(&b->gpu, args.workspace);
}

static void bench_layer(bench *b, const layer_shape *shape) {
    const gpu_address logits = random_logits(b, MAX_TOKENS, shape->num_experts);
    moe_route_layer_desc desc[COPIES];
    layer_run r;
    size_t sizes[2] = {0, 0}, chunk, i, n;
    uint32_t c;
    memset(&r, 0, sizeof r);
    r.shape = shape;
    for (c = 0; c < COPIES; c++) {
        memset(&desc[c], 0, sizeof desc[c]);
        desc[c].router.num_experts = shape->num_experts;
        desc[c].router.top_k = shape->top_k;
        desc[c].router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
        desc[c].experts.hidden_size = shape->hidden_size;
        desc[c].experts.intermediate_size = shape->intermediate_size;
        desc[c].experts.dtype = MOE_ROUTE_BF16;
        desc[c].max_tokens = MAX_TOKENS;
        desc[c].cub_maps = b->cub ? MOE_ROUTE_ON : MOE_ROUTE_AUTO;
        describe_matrix(b, shape, 2 * (size_t)shape->intermediate_size, shape->hidden_size, &desc[c].experts.gate_up, &sizes[0]);
        describe_matrix(b, shape, shape->hidden_size, shape->intermediate_size, &desc[c].experts.down, &sizes[1]);
        if (b->tune && c == 0) tune_layer(b, &desc[c]);
        desc[c].tuned = b->tune ? MOE_ROUTE_ON : MOE_ROUTE_OFF;
        must(b, moe_route_layer_create(b->context, &desc[c], &r.layers[c]));
    }
    r.shift = 11; /* 32 KB */
    chunk = (size_t)16 << r.shift;
    for (c = 0; c < COPIES; c++) {
        gpu_address *list = (gpu_address *)malloc((sizes[0] / chunk + sizes[1] / chunk + 1) * sizeof *list);
        if (!list) die("bench_large: %s", "out of memory");
        for (n = 0, i = 0; i + chunk <= sizes[0]; i += chunk) list[n++] = desc[c].experts.gate_up.data + i;
        for (i = 0; i + chunk <= sizes[1]; i += chunk) list[n++] = desc[c].experts.down.data + i;
        r.num_chunks = (uint32_t)n;
        r.chunks[c] = device_memory(b, n * sizeof *list);
        must_gpu(b, gpu_upload(&b->gpu, r.chunks[c], list, n * sizeof *list));
        free(list);
    }
    printf("%-22s all experts: %.1f MB without scales, read in %.2f us\n", shape->name, (double)(sizes[0] + sizes[1]) * 1e-6, time_calls(b, run_read, &r));
    for (i = 0; i < b->num_tokens; i++) bench_layer_at(b, &r, b->tokens[i], logits);
    for (c = 0; c < COPIES; c++) {
        moe_route_layer_destroy(r.layers[c]);
        gpu_free(&b->gpu, r.chunks[c]);
        gpu_free(&b->gpu, desc[c].experts.gate_up.data);
        gpu_free(&b->gpu, desc[c].experts.gate_up.scales);
        gpu_free(&b->gpu, desc[c].experts.down.data);
        gpu_free(&b->gpu, desc[c].experts.down.scales);
    }
    gpu_free(&b->gpu, logits);
}

static const char usage[] =
    "usage: bench_large [OPTIONS]\n"
    "Times large batches on GPU 0.\n"
    "  --router, --layer   router and maps alone, or layers; without either, both\n"
    "  --kernels           each launch of a layer alone, too\n"
    "  --cub               maps by CUB: beside the others with --router, instead of them in layers\n"
    "  --tune              layers by moe_route_layer_tune, which is run before; without it by the built-in rules\n"
    "  --shape NAME        only layers whose name starts so\n"
    "  --tokens LIST       up to 24 token counts of layers up to 16384 (default 16,32,64,65,96,128,256,512,1024,2048,4096,8192,16384)\n"
    "  --help              this text\n";

static void parse_tokens(bench *b, const char *list) {
    char *end;
    for (b->num_tokens = 0; *list && b->num_tokens < MAX_TIMES; list = *end ? end + 1 : end) {
        const unsigned long value = strtoul(list, &end, 10);
        if (end == list || value < 1 || value > MAX_TOKENS) die("bench_large: --tokens takes numbers from 1 to 16384, not %s", list);
        b->tokens[b->num_tokens++] = (uint32_t)value;
    }
}

static void parse_options(bench *b, int argc, char **argv) {
    int i;
    parse_tokens(b, "16,32,64,65,96,128,256,512,1024,2048,4096,8192,16384");
    for (i = 1; i < argc; i++) {
        const char *option = argv[i];
        const int more = i + 1 < argc;
        if (!strcmp(option, "--router")) b->router = 1;
        else if (!strcmp(option, "--layer")) b->layer = 1;
        else if (!strcmp(option, "--kernels")) b->kernels = 1;
        else if (!strcmp(option, "--tune")) b->tune = 1;
        else if (!strcmp(option, "--cub")) b->cub = 1;
        else if (!strcmp(option, "--tokens") && more) parse_tokens(b, argv[++i]);
        else if (!strcmp(option, "--shape") && more) b->shape = argv[++i];
        else if (!strcmp(option, "--help")) {
            fputs(usage, stdout);
            exit(0);
        } else {
            fprintf(stderr, "bench_large: unknown option or missing value: %s\n%s", option, usage);
            exit(64);
        }
    }
    if (!b->router && !b->layer) b->router = b->layer = 1;
}

int main(int argc, char **argv) {
    static bench b;
    moe_route_context_desc desc;
    size_t i;
    parse_options(&b, argc, argv);
    if (!gpu_open(&b.gpu)) die("bench_large: %s", b.gpu.reason);
    must_gpu(&b, gpu_stream_create(&b.gpu, &b.stream));
    must_gpu(&b, floors_open(&b.floor, &b.gpu));
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_GPU;
    desc.cuda_context = b.gpu.context;
    must(&b, moe_route_context_create(&desc, &b.context));
    printf("%s, driver %d; moe_route %s\n", b.gpu.name, b.gpu.driver_version, MOE_ROUTE_VERSION);
    if (b.router) {
        bench_router(&b, 256, 8);
        bench_router(&b, 32, 4);
        bench_router(&b, 512, 10);
    }
    for (i = 0; b.layer && i < sizeof layer_shapes / sizeof layer_shapes[0]; i++)
        if (!b.shape || !strncmp(layer_shapes[i].name, b.shape, strlen(b.shape))) bench_layer(&b, &layer_shapes[i]);
    moe_route_context_destroy(b.context);
    floors_close(&b.floor, &b.gpu);
    gpu_stream_destroy(&b.gpu, b.stream);
    gpu_close(&b.gpu);
    return 0;
}
