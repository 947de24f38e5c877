/*
  demo.c: one MoE layer of a trained model, from router logits to its output, checked against what the model itself
  computed. Runs the layer's 1,024 recorded tokens as 1, 4, 8, 16 and 1,024 tokens a call, with the experts in BF16 and
  in INT4, on the GPU where there is one and otherwise on the CPU backend. Needs no CUDA toolkit to build.

      cc -O2 -I. examples/demo.c -o demo -lm -ldl -lpthread && ./demo

  What a program does to use the library is in make_layer() and run_all_tokens(); the rest loads, compares and prints.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "gguf.h"
#include "gpu.h"
#include "quantize.h"

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <io.h> /* windows.h comes with gpu.h */
#else
#include <sys/time.h>
#include <unistd.h>
#endif

enum {
    EXPERTS = 32,
    TOP_K = 4,
    HIDDEN = 256,
    INTERMEDIATE = 128,
    TOKENS = 1024,
    PAIRS = TOKENS * TOP_K,
    GROUP_SIZE = 64 /* inputs that share a scale in INT4 */
};

/* Exit statuses; 0 when all is as expected. */
enum { EXIT_WRONG = 1, EXIT_NO_COMPILER = 2, EXIT_USAGE = 64 };

static const uint32_t batch_sizes[] = {1, 4, 8, 16, TOKENS};
enum { NUM_BATCH_SIZES = 5, NUM_REPLAYS = 21 };

static const double max_weight_error = 1e-5; /* of f32 softmaxes that differ in their order of summation */

typedef struct memory { /* on the GPU, or on the host for the CPU backend */
    moe_route_address address;
    void *host;
} memory;

typedef struct variety { /* the experts in one format */
    const char *name;
    quantize_dtype activations; /* of x and y */
    double max_error;           /* relative, of y against the model's */
    moe_route_layer *layer;
    memory x, gate_up, gate_up_scales, down, down_scales;
} variety;

typedef struct demo {
    const char *path;
    moe_route_device wanted;
    float *logits, *x, *y, *topk_weights; /* the model's: [T, E], [T, H], [T, H], [T, k] */
    int32_t *topk_ids;                    /* [T, k] */
    uint16_t *gate_up, *down;             /* bf16 [E, 2I, H] and [E, H, I] */
    int on_gpu;
    gpu_device gpu;
    moe_route_stream stream;
    moe_route_context *context;
    memory logits_memory, ids, weights, out, workspace;
    size_t workspace_size;
    variety varieties[2];
    float result[TOKENS * HIDDEN]; /* y of the last run */
    int32_t result_ids[PAIRS];
    float result_weights[PAIRS];
    unsigned wrong; /* expectations that failed */
} demo;

/* ---- small things ---- */

static void die(int status, const char *format, ...) {
    va_list arguments;
    fflush(stdout);
    fprintf(stderr, "demo: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    exit(status);
}

/* Ends the program with the library's message when a call failed. */
static void must(const demo *d, moe_route_status status) {
    static char text[16384];
    if (status == MOE_ROUTE_OK) return;
    text[0] = 0;
    if (d->context) moe_route_message(d->context, text, sizeof text);
    die(status == MOE_ROUTE_ERROR_NO_COMPILER ? EXIT_NO_COMPILER : EXIT_WRONG, "%s",
        text[0] ? text : moe_route_status_name(status));
}

static void must_gpu(const demo *d, int result) {
    if (result) die(EXIT_WRONG, "%s", d->gpu.reason);
}

static void *allocate(size_t size) {
    void *host = malloc(size);
    if (!host) die(EXIT_WRONG, "out of memory");
    return host;
}

static double now(void) { /* seconds */
#if defined(_WIN32)
    LARGE_INTEGER count, frequency;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&frequency);
    return (double)count.QuadPart / (double)frequency.QuadPart;
#else
    struct timeval time;
    gettimeofday(&time, NULL);
    return (double)time.tv_sec + 1e-6 * (double)time.tv_usec;
#endif
}

/* Says what was expected, and keeps it for the exit status. */
static void expect(demo *d, int as_expected, const char *what) {
    if (as_expected) return;
    d->wrong++;
    printf("  WRONG: %s\n", what);
}

/* ---- memory: the same calls for both devices ---- */

static memory memory_create(demo *d, size_t size) {
    const size_t alignment = 256; /* what a workspace needs */
    memory m;
    memset(&m, 0, sizeof m);
    if (d->on_gpu) {
        must_gpu(d, gpu_alloc(&d->gpu, &m.address, size));
    } else {
        m.host = allocate(size + alignment - 1);
        m.address = (moe_route_address)(((uintptr_t)m.host + alignment - 1) / alignment * alignment);
    }
    return m;
}

static memory memory_from(demo *d, const void *from, size_t size) {
    memory m = memory_create(d, size);
    if (d->on_gpu) must_gpu(d, gpu_upload(&d->gpu, m.address, from, size));
    else memcpy((void *)(uintptr_t)m.address, from, size);
    return m;
}

static void memory_read(demo *d, void *to, const memory *m, size_t size) {
    if (d->on_gpu) must_gpu(d, gpu_download(&d->gpu, to, m->address, size));
    else memcpy(to, (const void *)(uintptr_t)m->address, size);
}

/* 0xff makes NaN and -1 of everything: what a run doesn't write can't pass. */
static void memory_spoil(demo *d, const memory *m, size_t size) {
    if (d->on_gpu) must_gpu(d, gpu_memset(&d->gpu, m->address, 0xff, size));
    else memset((void *)(uintptr_t)m->address, 0xff, size);
}

static void memory_destroy(demo *d, memory *m) {
    if (d->on_gpu) gpu_free(&d->gpu, m->address);
    free(m->host);
    memset(m, 0, sizeof *m);
}

/* ---- the model's layer ---- */

/* A tensor that must have this type and these dimensions, the outermost first; d2 is 1 where there are two. */
static void *tensor(const demo *d, gguf_file *file, const char *name, uint32_t type, size_t d0, size_t d1, size_t d2) {
    const gguf_tensor *found = gguf_find(file, name);
    const size_t inner = d2 > 1 ? d2 : d1, rows = d2 > 1 ? d1 : d0, matrices = d2 > 1 ? d0 : 1;
    void *data;
    if (!found) die(EXIT_WRONG, "%s has no tensor %s", d->path, name);
    if (found->type != type || found->shape[0] != inner || found->shape[1] != rows || found->shape[2] != matrices ||
        found->shape[3] != 1) {
        die(EXIT_WRONG, "%s: tensor %s has another type or other dimensions", d->path, name);
    }
    data = allocate((size_t)found->size);
    if (!gguf_read(file, found, data, 0, (size_t)found->size)) die(EXIT_WRONG, "%s: %s", d->path, file->error);
    return data;
}

static void load_model(demo *d) {
    gguf_file file;
    if (!gguf_open(&file, d->path)) {
        die(EXIT_WRONG, "%s: %s\nRun the demo from the repository's root, or name the file with --data.", d->path, file.error);
    }
    d->logits = (float *)tensor(d, &file, "layers.2.router_logits", GGUF_TYPE_F32, TOKENS, EXPERTS, 1);
    d->x = (float *)tensor(d, &file, "x", GGUF_TYPE_F32, TOKENS, HIDDEN, 1);
    d->y = (float *)tensor(d, &file, "y", GGUF_TYPE_F32, TOKENS, HIDDEN, 1);
    d->topk_ids = (int32_t *)tensor(d, &file, "topk_ids", GGUF_TYPE_I32, TOKENS, TOP_K, 1);
    d->topk_weights = (float *)tensor(d, &file, "topk_weights", GGUF_TYPE_F32, TOKENS, TOP_K, 1);
    d->gate_up = (uint16_t *)tensor(d, &file, "blk.2.ffn_gate_up_exps.weight", GGUF_TYPE_BF16, EXPERTS, 2 * INTERMEDIATE, HIDDEN);
    d->down = (uint16_t *)tensor(d, &file, "blk.2.ffn_down_exps.weight", GGUF_TYPE_BF16, EXPERTS, HIDDEN, INTERMEDIATE);
    gguf_close(&file);
}

/* ---- the device ---- */

static void open_device(demo *d) {
    moe_route_context_desc desc;
    moe_route_context_info info;
    moe_route_status status;
    char why_cpu[300] = "as asked";
    memset(&desc, 0, sizeof desc);
    if (d->wanted != MOE_ROUTE_DEVICE_CPU) {
        d->on_gpu = gpu_open(&d->gpu);
        if (!d->on_gpu && d->wanted == MOE_ROUTE_DEVICE_GPU) die(EXIT_WRONG, "%s", d->gpu.reason);
        snprintf(why_cpu, sizeof why_cpu, "%s", d->gpu.reason);
    }
    if (d->on_gpu) {
        desc.device = MOE_ROUTE_DEVICE_GPU;
        desc.cuda_context = d->gpu.context;
        status = moe_route_context_create(&desc, &d->context);
        if (status != MOE_ROUTE_OK && d->wanted == MOE_ROUTE_DEVICE_DEFAULT) { /* a GPU that is too old, say */
            if (d->context) moe_route_message(d->context, why_cpu, sizeof why_cpu);
            moe_route_context_destroy(d->context);
            gpu_close(&d->gpu);
            d->on_gpu = 0;
        } else {
            must(d, status);
            must_gpu(d, gpu_stream_create(&d->gpu, &d->stream));
        }
    }
    if (!d->on_gpu) {
        desc.device = MOE_ROUTE_DEVICE_CPU;
        desc.cuda_context = NULL;
        must(d, moe_route_context_create(&desc, &d->context));
    }
    moe_route_context_get_info(d->context, &info);
    if (d->on_gpu) {
        printf("Device   %s: sm_%u, %u multiprocessors, driver for CUDA %u.%u\n", info.name, (unsigned)info.target,
               (unsigned)info.num_multiprocessors, (unsigned)info.driver_version / 1000,
               (unsigned)info.driver_version % 1000 / 10);
    } else {
        printf("Device   CPU backend: %s\n", why_cpu);
    }
}

/* ---- using the library ---- */

static moe_route_weights weights_of(const variety *v, const memory *data, const memory *scales) {
    moe_route_weights weights;
    memset(&weights, 0, sizeof weights);
    weights.format = scales->address ? MOE_ROUTE_FORMAT_INT4 : MOE_ROUTE_FORMAT_BF16;
    weights.data = data->address;
    weights.scales = scales->address;
    weights.scales_dtype = (moe_route_dtype)v->activations;
    weights.group_size = scales->address ? GROUP_SIZE : 0;
    return weights;
}

/* The description of a Qwen3-MoE layer: softmax, top-k, weights divided by their sum; SiLU experts, gate before up. */
static void make_layer(demo *d, variety *v) {
    moe_route_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = TOP_K;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc.experts.hidden_size = HIDDEN;
    desc.experts.intermediate_size = INTERMEDIATE;
    desc.experts.dtype = (moe_route_dtype)v->activations;
    desc.experts.gate_up = weights_of(v, &v->gate_up, &v->gate_up_scales);
    desc.experts.down = weights_of(v, &v->down, &v->down_scales);
    desc.max_tokens = TOKENS;
    must(d, moe_route_layer_create(d->context, &desc, &v->layer));
}

/* One call. On a GPU it puts the layer's kernels on the stream and returns. */
static void run_call(demo *d, const variety *v, uint32_t first_token, uint32_t num_tokens) {
    moe_route_layer_args args;
    memset(&args, 0, sizeof args);
    args.num_tokens = num_tokens;
    args.logits = d->logits_memory.address + (moe_route_address)first_token * EXPERTS * sizeof(float);
    args.ids = d->ids.address + (moe_route_address)first_token * TOP_K * sizeof(int32_t);
    args.weights = d->weights.address + (moe_route_address)first_token * TOP_K * sizeof(float);
    args.x = v->x.address + (moe_route_address)first_token * HIDDEN * sizeof(uint16_t);
    args.y = d->out.address + (moe_route_address)first_token * HIDDEN * sizeof(uint16_t);
    args.workspace = d->workspace.address;
    args.workspace_size = d->workspace_size;
    args.stream = d->stream;
    must(d, moe_route_layer_run(v->layer, &args));
}

/* All tokens, `batch_size` a call; returns the calls. With `seconds`, the time that each took. */
static size_t run_all_tokens(demo *d, const variety *v, uint32_t batch_size, double *seconds) {
    size_t calls = 0;
    uint32_t token;
    for (token = 0; token < TOKENS; token += batch_size) {
        double start = now();
        run_call(d, v, token, TOKENS - token < batch_size ? TOKENS - token : batch_size);
        if (seconds) seconds[calls] = now() - start;
        calls++;
    }
    return calls;
}

/* Microseconds a call. All calls become one CUDA graph, which is replayed: what an engine does with a decode step. */
static double time_on_gpu(demo *d, const variety *v, uint32_t batch_size) {
    const int rounds = batch_size < 256 ? 1 : 16; /* so that one replay outweighs its own launch */
    double milliseconds;
    gpu_graph graph;
    size_t calls = 0;
    int i;
    must_gpu(d, gpu_capture_begin(&d->gpu, d->stream));
    for (i = 0; i < rounds; i++) calls += run_all_tokens(d, v, batch_size, NULL);
    must_gpu(d, gpu_capture_end(&d->gpu, d->stream, &graph));
    memory_spoil(d, &d->out, sizeof(uint16_t) * TOKENS * HIDDEN); /* so that what is compared comes from the replays */
    memory_spoil(d, &d->ids, sizeof d->result_ids);
    memory_spoil(d, &d->weights, sizeof d->result_weights);
    must_gpu(d, gpu_graph_time(&d->gpu, graph, d->stream, NUM_REPLAYS, &milliseconds));
    must_gpu(d, gpu_graph_destroy(&d->gpu, graph));
    return 1e3 * milliseconds / (double)calls;
}

static double time_on_cpu(demo *d, const variety *v, uint32_t batch_size) {
    static double seconds[TOKENS];
    size_t calls = run_all_tokens(d, v, batch_size, seconds);
    return 1e6 * gpu_median(seconds, calls);
}

/* ---- preparing both formats ---- */

static void quantize_experts(demo *d, variety *v, const uint16_t *matrix, size_t rows, size_t columns, memory *codes,
                             memory *scales) {
    size_t codes_size = rows * columns / 2;
    size_t scales_size = rows * (columns / GROUP_SIZE) * sizeof(uint16_t);
    unsigned char *host_codes = (unsigned char *)allocate(codes_size);
    void *host_scales = allocate(scales_size);
    if (!quantize_int4(matrix, QUANTIZE_BF16, rows, columns, GROUP_SIZE, host_codes, host_scales, v->activations)) {
        die(EXIT_WRONG, "out of memory");
    }
    *codes = memory_from(d, host_codes, codes_size);
    *scales = memory_from(d, host_scales, scales_size);
    free(host_codes);
    free(host_scales);
}

static void prepare(demo *d) {
    const size_t gate_up_rows = (size_t)EXPERTS * 2 * INTERMEDIATE;
    const size_t down_rows = (size_t)EXPERTS * HIDDEN;
    variety *bf16 = &d->varieties[0];
    variety *int4 = &d->varieties[1];
    size_t i;
    bf16->name = "BF16";
    bf16->activations = QUANTIZE_BF16;
    bf16->max_error = 1e-2;
    bf16->gate_up = memory_from(d, d->gate_up, gate_up_rows * HIDDEN * sizeof(uint16_t));
    bf16->down = memory_from(d, d->down, down_rows * INTERMEDIATE * sizeof(uint16_t));
    int4->name = "INT4";
    int4->activations = QUANTIZE_F16;
    int4->max_error = 0.15;
    quantize_experts(d, int4, d->gate_up, gate_up_rows, HIDDEN, &int4->gate_up, &int4->gate_up_scales);
    quantize_experts(d, int4, d->down, down_rows, INTERMEDIATE, &int4->down, &int4->down_scales);

    d->logits_memory = memory_from(d, d->logits, sizeof(float) * TOKENS * EXPERTS);
    d->ids = memory_create(d, sizeof d->result_ids);
    d->weights = memory_create(d, sizeof d->result_weights);
    d->out = memory_create(d, sizeof(uint16_t) * TOKENS * HIDDEN);
    for (i = 0; i < 2; i++) {
        variety *v = &d->varieties[i];
        size_t needed = 0;
        uint16_t *x = (uint16_t *)allocate(sizeof(uint16_t) * TOKENS * HIDDEN);
        quantize_convert(x, v->activations, d->x, QUANTIZE_F32, (size_t)TOKENS * HIDDEN);
        v->x = memory_from(d, x, sizeof(uint16_t) * TOKENS * HIDDEN);
        free(x);
        make_layer(d, v);
        must(d, moe_route_layer_workspace_size(v->layer, TOKENS, &needed));
        if (needed > d->workspace_size) d->workspace_size = needed;
    }
    d->workspace = memory_create(d, d->workspace_size ? d->workspace_size : 1);
}

/* A variant's constants in 48 characters: the first and the last, in whole words. */
static void print_constants(const char *text) {
    size_t length = strlen(text);
    size_t head = 26;
    size_t tail = length > 17 ? length - 17 : 0;
    if (length <= 48) {
        printf("%s", text);
        return;
    }
    while (head && text[head] != ' ') head--;
    while (text[tail] && text[tail - 1] != ' ') tail++;
    printf("%.*s ... %s", (int)head, text, text + tail);
}

/* The kernels that the layers use; both use the same router. */
static void print_variants(demo *d) {
    moe_route_context_info info;
    size_t i;
    uint32_t j, k;
    if (!d->on_gpu) {
        printf("Kernels  none: plain C\n\n");
        return;
    }
    moe_route_context_get_info(d->context, &info);
    printf("Kernels  cache: %.60s\n", info.cache_dir[0] ? info.cache_dir : "none, memory alone");
    if (info.nvrtc_version) {
        printf("         compiler: NVRTC %u.%u, %.50s\n", (unsigned)info.nvrtc_version / 1000,
               (unsigned)info.nvrtc_version % 1000 / 10, info.nvrtc_path);
    }
    for (i = 0; i < 2; i++) {
        for (j = 0; j < moe_route_layer_num_variants(d->varieties[i].layer); j++) {
            moe_route_variant_info variant, other;
            int seen = 0;
            must(d, moe_route_layer_variant(d->varieties[i].layer, j, &variant));
            for (k = 0; i == 1 && k < moe_route_layer_num_variants(d->varieties[0].layer); k++) {
                must(d, moe_route_layer_variant(d->varieties[0].layer, k, &other));
                if (strcmp(variant.kernel, other.kernel) == 0 && strcmp(variant.variant, other.variant) == 0) seen = 1;
            }
            if (seen) continue;
            printf("  %s %6.1f ms  %-8.8s ",
                   variant.origin == MOE_ROUTE_ORIGIN_COMPILED ? "compiled in" : "from cache ", variant.milliseconds,
                   variant.kernel);
            print_constants(variant.variant);
            printf("\n");
        }
    }
    printf("\n");
}

/* ---- comparing with the model ---- */

typedef struct agreement {
    unsigned equal_ids;      /* of the 4,096 (token, slot) pairs */
    double max_weight_error; /* among those */
} agreement;

static agreement compare_routing(const demo *d) {
    agreement a = {0, 0};
    int t, i, j;
    for (t = 0; t < TOKENS; t++) {
        for (i = 0; i < TOP_K; i++) {
            for (j = 0; j < TOP_K; j++) { /* the order within a token doesn't matter */
                double error;
                if (d->topk_ids[t * TOP_K + i] != d->result_ids[t * TOP_K + j]) continue;
                a.equal_ids++;
                error = fabs((double)d->topk_weights[t * TOP_K + i] - (double)d->result_weights[t * TOP_K + j]);
                if (!(error <= a.max_weight_error)) a.max_weight_error = error == error ? error : HUGE_VAL;
                break;
            }
        }
    }
    return a;
}

/* |result - y| / |y|; infinite where the result holds a NaN. */
static double output_error(const demo *d) {
    double difference = 0;
    double norm = 0;
    size_t i;
    for (i = 0; i < (size_t)TOKENS * HIDDEN; i++) {
        double error = (double)d->result[i] - (double)d->y[i];
        difference += error * error;
        norm += (double)d->y[i] * (double)d->y[i];
    }
    return difference == difference ? sqrt(difference / norm) : HUGE_VAL;
}

/* Different experts that the tokens of a call choose, on average over the calls. */
static double mean_distinct_experts(const demo *d, uint32_t batch_size) {
    unsigned sum = 0;
    unsigned calls = 0;
    uint32_t first;
    for (first = 0; first < TOKENS; first += batch_size) {
        unsigned char chosen[EXPERTS] = {0};
        uint32_t pair;
        for (pair = first * TOP_K; pair < (first + batch_size) * TOP_K && pair < PAIRS; pair++) {
            int32_t expert = d->result_ids[pair];
            if (expert < 0 || expert >= EXPERTS || chosen[expert]) continue;
            chosen[expert] = 1;
            sum++;
        }
        calls++;
    }
    return (double)sum / calls;
}

/* Runs and times all tokens, and leaves the results in d. */
static double run_and_fetch(demo *d, const variety *v, uint32_t batch_size) {
    uint16_t *out = (uint16_t *)allocate(sizeof(uint16_t) * TOKENS * HIDDEN);
    double microseconds;
    size_t i;
    memory_spoil(d, &d->out, sizeof(uint16_t) * TOKENS * HIDDEN);
    memory_spoil(d, &d->ids, sizeof d->result_ids);
    memory_spoil(d, &d->weights, sizeof d->result_weights);
    microseconds = d->on_gpu ? time_on_gpu(d, v, batch_size) : time_on_cpu(d, v, batch_size);
    memory_read(d, out, &d->out, sizeof(uint16_t) * TOKENS * HIDDEN);
    memory_read(d, d->result_ids, &d->ids, sizeof d->result_ids);
    memory_read(d, d->result_weights, &d->weights, sizeof d->result_weights);
    for (i = 0; i < (size_t)TOKENS * HIDDEN; i++) {
        d->result[i] = v->activations == QUANTIZE_F16 ? f16_to_float(out[i]) : bf16_to_float(out[i]);
    }
    free(out);
    return microseconds;
}

static void print_table(demo *d) {
    agreement worst = {PAIRS, 0};
    double errors[2] = {0, 0};
    size_t i, j;
    printf("                              BF16 weights           INT4 weights\n");
    printf("  tokens  pairs  distinct     error    us/call       error    us/call\n");
    printf("  a call         experts\n");
    for (i = 0; i < NUM_BATCH_SIZES; i++) {
        uint32_t batch_size = batch_sizes[i];
        for (j = 0; j < 2; j++) {
            double microseconds = run_and_fetch(d, &d->varieties[j], batch_size);
            double error = output_error(d);
            agreement routing = compare_routing(d);
            if (routing.equal_ids < worst.equal_ids) worst.equal_ids = routing.equal_ids;
            if (routing.max_weight_error > worst.max_weight_error) worst.max_weight_error = routing.max_weight_error;
            if (error > errors[j]) errors[j] = error;
            if (j == 0) {
                printf("  %6u  %5u  %8.1f", (unsigned)batch_size, (unsigned)batch_size * TOP_K,
                       mean_distinct_experts(d, batch_size));
            }
            printf("%s  %8.5f  %9.*f", j ? "  " : "", error, microseconds < 1000 ? 2 : 0, microseconds);
            fflush(stdout);
        }
        printf("\n");
    }
    printf("  Error: L2 of the output's difference to the model's own, over that of the model's.\n");
    printf("  Activations are BF16 beside BF16 weights, F16 beside INT4 (groups of %d). Time:\n", GROUP_SIZE);
    if (d->on_gpu) {
        printf("  a graph of all %d tokens' calls, median of %d replays, divided by its calls.\n\n", TOKENS,
               NUM_REPLAYS);
    } else {
        printf("  wall clock on the CPU, median of the calls.\n\n");
    }

    printf("Routing  %u of %d chosen experts are the model's; weights differ by %.1e at most\n", worst.equal_ids, PAIRS,
           worst.max_weight_error);
    expect(d, worst.equal_ids == PAIRS, "the chosen experts must be the model's");
    expect(d, worst.max_weight_error < max_weight_error, "the weights must be within 1e-5 of the model's");
    expect(d, errors[0] < d->varieties[0].max_error, "the error with BF16 weights must be below 0.01");
    expect(d, errors[1] < d->varieties[1].max_error, "the error with INT4 weights must be below 0.15");
}

/* ---- the chart ---- */

/* Block characters need a terminal that takes UTF-8; elsewhere plain ASCII. */
static int terminal_takes_utf8(void) {
#if defined(_WIN32)
    return _isatty(_fileno(stdout)) && GetConsoleOutputCP() == CP_UTF8;
#else
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    int i;
    if (!isatty(STDOUT_FILENO)) return 0;
    for (i = 0; i < 3; i++) { /* the first that is set decides */
        const char *value = getenv(names[i]);
        if (!value || !value[0]) continue;
        return strstr(value, "UTF-8") || strstr(value, "utf-8") || strstr(value, "UTF8") || strstr(value, "utf8");
    }
    return 0;
#endif
}

/* A bar that takes `width` characters for `largest`; returns how many it took. */
static unsigned print_bar(unsigned value, unsigned largest, unsigned width, int utf8) {
    static const char *const eighths[] = {"", "\xe2\x96\x8f", "\xe2\x96\x8e", "\xe2\x96\x8d", "\xe2\x96\x8c",
                                          "\xe2\x96\x8b", "\xe2\x96\x8a", "\xe2\x96\x89"};
    unsigned steps = utf8 ? 8 : 1;
    unsigned length = largest ? (value * width * steps + largest / 2) / largest : 0;
    unsigned column;
    if (value && length == 0) length = 1;
    for (column = 0; column < length / steps; column++) fputs(utf8 ? "\xe2\x96\x88" : "#", stdout);
    if (length % steps) {
        fputs(eighths[length % steps], stdout);
        column++;
    }
    return column;
}

static void print_chart(const demo *d) {
    unsigned tokens[EXPERTS] = {0};
    unsigned largest = 0;
    int utf8 = terminal_takes_utf8();
    int i, row;
    for (i = 0; i < PAIRS; i++) {
        int32_t expert = d->result_ids[i];
        if (expert >= 0 && expert < EXPERTS) tokens[expert]++;
    }
    for (i = 0; i < EXPERTS; i++) {
        if (tokens[i] > largest) largest = tokens[i];
    }
    printf("\nTokens that chose each expert\n");
    for (row = 0; row < EXPERTS / 2; row++) { /* two columns of bars */
        int right = row + EXPERTS / 2;
        unsigned width;
        printf("  %2d %3u ", row, tokens[row]);
        width = print_bar(tokens[row], largest, 28, utf8);
        printf("%*s%2d %3u ", (int)(31 - width), "", right, tokens[right]);
        print_bar(tokens[right], largest, 28, utf8);
        printf("\n");
    }
}

/* ---- */

static const char usage[] =
    "usage: demo [--cpu | --gpu] [--data FILE]\n"
    "\n"
    "Runs one MoE layer of a trained model and compares it with what the model computed.\n"
    "\n"
    "  --cpu        use the CPU backend\n"
    "  --gpu        use the GPU, and fail where there is none; without either, the GPU\n"
    "               where there is one\n"
    "  --data FILE  the recorded layer (default tests/data/tiny_moe.gguf)\n"
    "  --help       print this\n"
    "\n"
    "Exit status: 0 when all is as expected, 1 when something is wrong, 2 when kernels have\n"
    "to be compiled and NVRTC isn't found, 64 when the options are wrong.\n";

static void usage_error(const char *what, const char *option) {
    fprintf(stderr, "demo: %s%s\n\n%s", what, option, usage);
    exit(EXIT_USAGE);
}

static void parse_options(demo *d, int argc, char **argv) {
    int i;
    d->path = "tests/data/tiny_moe.gguf";
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(usage, stdout);
            exit(0);
        } else if (strcmp(argv[i], "--cpu") == 0 || strcmp(argv[i], "--gpu") == 0) {
            moe_route_device device = argv[i][2] == 'c' ? MOE_ROUTE_DEVICE_CPU : MOE_ROUTE_DEVICE_GPU;
            if (d->wanted != MOE_ROUTE_DEVICE_DEFAULT && d->wanted != device) {
                usage_error("--cpu and --gpu exclude each other", "");
            }
            d->wanted = device;
        } else if (strcmp(argv[i], "--data") == 0) {
            if (++i == argc) usage_error("--data needs a file", "");
            d->path = argv[i];
        } else {
            usage_error("unknown option ", argv[i]);
        }
    }
}

static void clean_up(demo *d) {
    size_t i;
    for (i = 0; i < 2; i++) {
        variety *v = &d->varieties[i];
        moe_route_layer_destroy(v->layer);
        memory_destroy(d, &v->x);
        memory_destroy(d, &v->gate_up);
        memory_destroy(d, &v->gate_up_scales);
        memory_destroy(d, &v->down);
        memory_destroy(d, &v->down_scales);
    }
    memory_destroy(d, &d->logits_memory);
    memory_destroy(d, &d->ids);
    memory_destroy(d, &d->weights);
    memory_destroy(d, &d->out);
    memory_destroy(d, &d->workspace);
    moe_route_context_destroy(d->context);
    if (d->on_gpu) gpu_stream_destroy(&d->gpu, d->stream);
    gpu_close(&d->gpu);
    free(d->logits);
    free(d->x);
    free(d->y);
    free(d->topk_weights);
    free(d->topk_ids);
    free(d->gate_up);
    free(d->down);
}

int main(int argc, char **argv) {
    static demo d; /* too large for a stack */
    parse_options(&d, argc, argv);
    printf("moe_route %s: one trained MoE layer, from router logits to output\n\n", MOE_ROUTE_VERSION);
    load_model(&d);
    printf("Layer    %d experts, top-%d, hidden size %d, intermediate size %d; %d real tokens\n", EXPERTS, TOP_K,
           HIDDEN, INTERMEDIATE, TOKENS);
    open_device(&d);
    prepare(&d);
    print_variants(&d);
    print_table(&d);
    print_chart(&d);
    clean_up(&d);
    printf("\n%s\n", d.wrong ? "Something is wrong: see above." : "All as expected.");
    return d.wrong ? EXIT_WRONG : 0;
}
