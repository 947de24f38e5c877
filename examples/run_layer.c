/*
  run_layer.c: runs one MoE layer of a checkpoint as people ship them: a .safetensors file, a folder of them, or a .gguf file; on
  random or given activations, on the GPU where there is one and otherwise on the CPU backend. Needs cJSON; no CUDA toolkit.

      build/run_layer Qwen3-30B-A3B --layer 7 --tokens 8
      build/run_layer gpt-oss-20b-mxfp4.gguf --layer 0 --activations x.f32 --output y.f32

  From names to arrays: layer_tensors.h. From the model's numbers to a description: config.h and moe_route_preset(). This file
  puts the arrays on the device, computes the router's logits, and runs the layer.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "checkpoint.h"
#include "config.h"
#include "gpu.h"
#include "layer_tensors.h"
#include "quantize.h"

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Exit statuses. */
enum { EXIT_WRONG = 1, EXIT_NO_COMPILER = 2, EXIT_USAGE = 64 };

enum { NUM_REPLAYS = 21, MAX_TOKENS = 1048576, TOKENS_SHOWN = 4, VALUES_SHOWN = 6 };

typedef struct options {
    const char *path, *config, *model_type, *prefix, *activations, *token_ids, *output;
    uint32_t layer, num_tokens; /* num_tokens 0: 4, or those of the file */
    uint64_t seed;
    moe_route_dtype dtype;
    moe_route_device device;
} options;

typedef struct memory { /* on the GPU, or on the host for the CPU backend */
    moe_route_address address;
    void *host;
} memory;

enum { MAX_MEMORIES = 32 };

typedef struct run {
    options asked;
    checkpoint files;
    layer_tensors tensors;
    moe_route_model model;
    moe_route_layer_desc desc;
    int on_gpu;
    gpu_device gpu;
    moe_route_stream stream;
    moe_route_context *context;
    moe_route_layer *layer;
    memory memories[MAX_MEMORIES];
    size_t num_memories;
    float *x;      /* [T, H], as the stored ones mean */
    float *logits; /* [T, E + S] */
    moe_route_layer_args args;
} run;

/* ---- small things ---- */

static void die(int status, const char *format, ...) {
    va_list arguments;
    fflush(stdout);
    fprintf(stderr, "run_layer: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    exit(status);
}

/* Ends the program with the library's message when a call failed. */
static void must(const run *r, moe_route_status status) {
    static char text[16384];
    if (status == MOE_ROUTE_OK) return;
    text[0] = 0;
    if (r->context) moe_route_message(r->context, text, sizeof text);
    die(status == MOE_ROUTE_ERROR_NO_COMPILER ? EXIT_NO_COMPILER : EXIT_WRONG, "%s",
        text[0] ? text : moe_route_status_name(status));
}

static void must_gpu(const run *r, int result) {
    if (result) die(EXIT_WRONG, "%s", r->gpu.reason);
}

static void must_read(const run *r, int done) {
    if (!done) die(EXIT_WRONG, "%s", r->files.error);
}

static void *allocate(uint64_t count, size_t element_size) {
    void *host = count <= SIZE_MAX / 2 / element_size ? malloc(count ? (size_t)count * element_size : 1) : NULL;
    if (!host) die(EXIT_WRONG, "out of memory: %llu numbers", (unsigned long long)count);
    return host;
}

static quantize_dtype storage(moe_route_dtype dtype) { return (quantize_dtype)dtype; }

/* ---- memory: the same calls for both devices; all is freed at the end ---- */

static moe_route_address memory_create(run *r, size_t size) {
    const size_t alignment = 256; /* what a workspace needs */
    memory *m = &r->memories[r->num_memories++];
    if (r->num_memories > MAX_MEMORIES) die(EXIT_WRONG, "too many arrays");
    if (r->on_gpu) {
        must_gpu(r, gpu_alloc(&r->gpu, &m->address, size));
    } else {
        m->host = allocate((uint64_t)size + alignment, 1);
        m->address = (moe_route_address)(((uintptr_t)m->host + alignment - 1) / alignment * alignment);
    }
    return m->address;
}

static moe_route_address memory_from(run *r, const void *from, size_t size) {
    const moe_route_address address = memory_create(r, size);
    if (r->on_gpu) must_gpu(r, gpu_upload(&r->gpu, address, from, size));
    else if (size) memcpy((void *)(uintptr_t)address, from, size);
    return address;
}

/* Hands an array over to the device: nothing is kept twice. 0 for one that isn't there. */
static moe_route_address memory_take(run *r, layer_array *array) {
    moe_route_address address = 0;
    if (array->data && r->on_gpu) {
        address = memory_from(r, array->data, array->size);
        free(array->data);
    } else if (array->data) {
        memory *m = &r->memories[r->num_memories++];
        if (r->num_memories > MAX_MEMORIES) die(EXIT_WRONG, "too many arrays");
        m->host = array->data;
        m->address = address = (moe_route_address)(uintptr_t)array->data;
    }
    memset(array, 0, sizeof *array);
    return address;
}

static void memory_read(run *r, void *to, moe_route_address from, size_t size) {
    if (r->on_gpu) must_gpu(r, gpu_download(&r->gpu, to, from, size));
    else memcpy(to, (const void *)(uintptr_t)from, size);
}

/* ---- the device, as in demo.c ---- */

static void open_device(run *r) {
    moe_route_context_desc desc;
    moe_route_context_info info;
    moe_route_status status;
    char why_cpu[300] = "as asked";
    memset(&desc, 0, sizeof desc);
    if (r->asked.device != MOE_ROUTE_DEVICE_CPU) {
        r->on_gpu = gpu_open(&r->gpu);
        if (!r->on_gpu && r->asked.device == MOE_ROUTE_DEVICE_GPU) die(EXIT_WRONG, "%s", r->gpu.reason);
        snprintf(why_cpu, sizeof why_cpu, "%s", r->gpu.reason);
    }
    if (r->on_gpu) {
        desc.device = MOE_ROUTE_DEVICE_GPU;
        desc.cuda_context = r->gpu.context;
        status = moe_route_context_create(&desc, &r->context);
        if (status != MOE_ROUTE_OK && r->asked.device == MOE_ROUTE_DEVICE_DEFAULT) { /* a GPU that is too old, say */
            if (r->context) moe_route_message(r->context, why_cpu, sizeof why_cpu);
            moe_route_context_destroy(r->context);
            gpu_close(&r->gpu);
            r->on_gpu = 0;
        } else {
            must(r, status);
            must_gpu(r, gpu_stream_create(&r->gpu, &r->stream));
        }
    }
    if (!r->on_gpu) {
        desc.device = MOE_ROUTE_DEVICE_CPU;
        desc.cuda_context = NULL;
        must(r, moe_route_context_create(&desc, &r->context));
    }
    moe_route_context_get_info(r->context, &info);
    if (r->on_gpu) printf("Device      %s: sm_%u\n", info.name, (unsigned)info.target);
    else printf("Device      CPU backend: %s\n", why_cpu);
}

/* ---- the model's numbers ---- */

static void describe(run *r) {
    const char *architecture = NULL;
    if (r->files.is_gguf) {
        const int known = config_gguf_model(&r->files.gguf[0], r->asked.layer, &r->model, &architecture);
        if (!known && !r->asked.model_type) {
            die(EXIT_WRONG,
                "general.architecture is %s: none that is known here, or with another expert_gating_func; --model-type can say "
                "what it is",
                architecture ? architecture : "missing");
        }
    } else {
        const cJSON *text = config_text_part(r->files.config);
        config_model(text, r->asked.layer, &r->model);
        if (!r->model.model_type) r->model.model_type = config_text(r->files.config, "model_type");
        if (config_find(text, "moe_latent_size"))
            die(EXIT_WRONG,
                "the experts work on a projection of the layer's input (moe_latent_size), which this program doesn't compute");
    }
    if (r->asked.model_type) r->model.model_type = r->asked.model_type;
    must_read(r, layer_open(&r->tensors, &r->files, r->asked.layer, r->model.num_experts));
    r->model.hidden_size = r->tensors.hidden_size;
    r->model.intermediate_size = r->tensors.intermediate_size;
    if (r->tensors.table) { /* whatever the configuration says of its layers */
        r->model.hash_layer = 1;
        r->model.vocab_size = r->tensors.table->shape[0] < UINT32_MAX ? (uint32_t)r->tensors.table->shape[0] : 0;
    }
    must(r, moe_route_preset(r->context, &r->model, &r->desc));
    if (r->tensors.num_logits != r->desc.router.num_experts + r->desc.router.num_shared_experts) {
        die(EXIT_WRONG, "%s has %u rows; by its configuration the model has %u experts", r->tensors.router->name,
            (unsigned)r->tensors.num_logits, (unsigned)r->desc.router.num_experts);
    }
    printf("Model       %s%s%s%s\n", r->model.model_type, architecture ? " (general.architecture " : "",
           architecture ? architecture : "", architecture ? ")" : "");
    printf("Layer %-5u %u experts, top-%u, hidden size %u, intermediate size %u\n", (unsigned)r->asked.layer,
           (unsigned)r->desc.router.num_experts, (unsigned)r->desc.router.top_k, (unsigned)r->tensors.hidden_size,
           (unsigned)r->tensors.intermediate_size);
}

/* ---- the layer ---- */

static const char *format_name(moe_route_format format) {
    static const char *const plain[] = {"none", "F32", "F16", "BF16", "INT8", "INT4", "FP8", "MXFP4", "NVFP4"};
    const gguf_type_info *info = format > MOE_ROUTE_FORMAT_GGUF ? gguf_find_type((uint32_t)(format - MOE_ROUTE_FORMAT_GGUF))
                                                                : NULL;
    return info ? info->name : plain[format];
}

static void take_matrix(run *r, const char *name, layer_matrix *m, moe_route_weights *weights) {
    printf("  %-9s %s %u x %u", name, format_name(m->weights.format), (unsigned)m->rows, (unsigned)m->inner);
    if (m->weights.group_size)
        printf(", a scale for %u inputs%s", (unsigned)m->weights.group_size, m->weights.group_rows > 1 ? " of 128 rows" : "");
    else if (m->scales.data && m->weights.format <= MOE_ROUTE_FORMAT_FP8) printf(", a scale a row");
    printf("%s%s\n            from %s\n", m->zero_points.data ? ", zero points" : "", m->bias.data ? ", bias" : "", m->text);
    *weights = m->weights;
    weights->data = memory_take(r, &m->data);
    weights->scales = memory_take(r, &m->scales);
    weights->zero_points = memory_take(r, &m->zero_points);
    weights->global_scales = memory_take(r, &m->global_scales);
    weights->bias = memory_take(r, &m->bias);
}

static void make_layer(run *r) {
    layer_tensors *l = &r->tensors;
    moe_route_experts *experts = &r->desc.experts;
    char text[160];
    must_read(r, layer_load(l, &r->desc));
    printf("  %-9s %s %s%s%s\n", "router", l->router->name, checkpoint_describe(l->router, text, sizeof text),
           l->logit_bias.data ? ", bias" : "", l->selection_bias.data ? ", selection bias" : "");
    r->desc.router.logit_bias = memory_take(r, &l->logit_bias);
    r->desc.router.selection_bias = memory_take(r, &l->selection_bias);
    r->desc.router.expert_scale = memory_take(r, &l->expert_scale);
    r->desc.router.id_table = memory_take(r, &l->id_table);
    take_matrix(r, l->gate && l->up ? "gate" : l->gate ? "gate_up" : "up", &l->gate_up, &experts->gate_up);
    if (l->gate && l->up) {
        take_matrix(r, "up", &l->up_matrix, &experts->up);
        experts->gate_up_order = MOE_ROUTE_GATE_UP_HALVES; /* whatever order the type has where it stores both in one */
    }
    take_matrix(r, "down", &l->down_matrix, &experts->down);
    experts->dtype = r->asked.dtype;
    r->desc.max_tokens = r->asked.num_tokens;
    must(r, moe_route_layer_create(r->context, &r->desc, &r->layer));
}

/* ---- its input ---- */

static uint64_t random_next(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static float random_normal(uint64_t *state) {
    const double radius = sqrt(-2 * log(1 - (double)(random_next(state) >> 11) / 9007199254740992.0));
    return (float)(radius * cos(6.283185307179586 * (double)(random_next(state) >> 11) / 9007199254740992.0));
}

/* x, from the file or random; as many tokens as asked for, or as the file has. */
static void make_input(run *r) {
    const uint32_t hidden = r->tensors.hidden_size;
    uint64_t state = r->asked.seed, size, i;
    if (r->asked.activations) {
        FILE *file = fopen(r->asked.activations, "rb");
        const uint64_t row = (uint64_t)hidden * sizeof(float);
        if (!file) die(EXIT_WRONG, "%s can't be opened", r->asked.activations);
        if (!files_size(file, &size) || size == 0 || size % row) {
            die(EXIT_WRONG, "%s has %llu bytes; tokens of %u f32 numbers (%llu bytes) are expected", r->asked.activations,
                (unsigned long long)size, (unsigned)hidden, (unsigned long long)row);
        }
        if (r->asked.num_tokens == 0 && size / row <= MAX_TOKENS) r->asked.num_tokens = (uint32_t)(size / row);
        if (r->asked.num_tokens == 0 || r->asked.num_tokens > size / row) {
            die(EXIT_WRONG, "%s has %llu tokens; 1 to %d can be run, and --tokens may ask for no more than it has",
                r->asked.activations, (unsigned long long)(size / row), (int)MAX_TOKENS);
        }
        r->x = (float *)allocate((uint64_t)r->asked.num_tokens * hidden, sizeof(float));
        if (!files_read(file, 0, r->x, (size_t)r->asked.num_tokens * hidden * sizeof(float)))
            die(EXIT_WRONG, "%s can't be read", r->asked.activations);
        fclose(file);
        printf("Input       %u tokens of %s\n", (unsigned)r->asked.num_tokens, r->asked.activations);
    } else {
        if (r->asked.num_tokens == 0) r->asked.num_tokens = 4;
        r->x = (float *)allocate((uint64_t)r->asked.num_tokens * hidden, sizeof(float));
        for (i = 0; i < (uint64_t)r->asked.num_tokens * hidden; i++) r->x[i] = random_normal(&state);
        printf("Input       %u tokens, normal with deviation 1, seed %llu\n", (unsigned)r->asked.num_tokens,
               (unsigned long long)r->asked.seed);
    }
}

/* x as the layer stores it, and r->x what that means. */
static moe_route_address store_input(run *r) {
    const size_t count = (size_t)r->asked.num_tokens * r->tensors.hidden_size,
                 size = count * quantize_dtype_size(storage(r->asked.dtype));
    void *stored = allocate(size, 1);
    moe_route_address address;
    quantize_convert(stored, storage(r->asked.dtype), r->x, QUANTIZE_F32, count);
    quantize_convert(r->x, QUANTIZE_F32, stored, storage(r->asked.dtype), count);
    address = memory_from(r, stored, size);
    free(stored);
    return address;
}

/* What Gemma-4's router sees: x over its root mean square, scaled by input and by 1 / sqrt(H). */
static void normalise(const run *r, const float *x, float *to) {
    const uint32_t hidden = r->tensors.hidden_size;
    const double epsilon = r->files.is_gguf ? config_gguf_number(&r->files.gguf[0], "attention.layer_norm_rms_epsilon", 0, 1e-6)
                                            : config_number(config_text_part(r->files.config), "rms_norm_eps", 0);
    double sum = 0;
    uint32_t n;
    for (n = 0; n < hidden; n++) sum += (double)x[n] * (double)x[n];
    for (n = 0; n < hidden; n++)
        to[n] = (float)((double)x[n] / sqrt(sum / hidden + epsilon) * (double)((const float *)r->tensors.router_scale.data)[n] /
                        sqrt(hidden));
}

/* logits[t] = router @ x[t]; the bias, the soft-cap and all that follows are the library's. */
static void make_logits(run *r) {
    const uint32_t hidden = r->tensors.hidden_size, width = r->tensors.num_logits;
    const float *router = (const float *)r->tensors.router_weight.data;
    float *seen = (float *)allocate(hidden, sizeof(float));
    uint32_t t, e, n;
    r->logits = (float *)allocate((uint64_t)r->asked.num_tokens * width, sizeof(float));
    for (t = 0; t < r->asked.num_tokens; t++) {
        const float *x = r->x + (size_t)t * hidden;
        if (r->tensors.router_scale.data) normalise(r, x, seen);
        else memcpy(seen, x, hidden * sizeof(float));
        for (e = 0; e < width; e++) {
            double sum = 0;
            for (n = 0; n < hidden; n++) sum += (double)router[(size_t)e * hidden + n] * (double)seen[n];
            r->logits[(size_t)t * width + e] = (float)sum;
        }
    }
    free(seen);
}

static void make_arguments(run *r, moe_route_address x) {
    const size_t num_tokens = r->asked.num_tokens, pairs = num_tokens * r->desc.router.top_k;
    uint64_t state = r->asked.seed + 1;
    size_t workspace_size = 0, i;
    must(r, moe_route_layer_workspace_size(r->layer, r->asked.num_tokens, &workspace_size));
    r->args.num_tokens = r->asked.num_tokens;
    r->args.logits = memory_from(r, r->logits, num_tokens * r->tensors.num_logits * sizeof(float));
    r->args.ids = memory_create(r, pairs * sizeof(int32_t));
    r->args.weights = memory_create(r, pairs * sizeof(float));
    r->args.x = x;
    r->args.y = memory_create(r, num_tokens * r->tensors.hidden_size * quantize_dtype_size(storage(r->asked.dtype)));
    r->args.workspace = memory_create(r, workspace_size ? workspace_size : 1);
    r->args.workspace_size = workspace_size;
    r->args.stream = r->stream;
    if (r->desc.router.ids == MOE_ROUTE_IDS_TABLE) { /* tokens of the vocabulary, at random */
        int32_t *tokens = (int32_t *)allocate(num_tokens, sizeof(int32_t));
        FILE *file = r->asked.token_ids ? fopen(r->asked.token_ids, "rb") : NULL;
        for (i = 0; i < num_tokens; i++) tokens[i] = (int32_t)(random_next(&state) % r->desc.router.id_table_rows);
        if (r->asked.token_ids && (!file || fread(tokens, sizeof(int32_t), num_tokens, file) != num_tokens))
            die(EXIT_WRONG, "%s doesn't hold %lu int32 numbers", r->asked.token_ids, (unsigned long)num_tokens);
        if (file) fclose(file);
        r->args.token_ids = memory_from(r, tokens, num_tokens * sizeof(int32_t));
        free(tokens);
    }
}

/* ---- its output ---- */

/* Microseconds of a call: the median of its replays as a CUDA graph. */
static double time_on_gpu(run *r) {
    double milliseconds;
    gpu_graph graph;
    must_gpu(r, gpu_capture_begin(&r->gpu, r->stream));
    must(r, moe_route_layer_run(r->layer, &r->args));
    must_gpu(r, gpu_capture_end(&r->gpu, r->stream, &graph));
    must_gpu(r, gpu_graph_time(&r->gpu, graph, r->stream, NUM_REPLAYS, &milliseconds));
    must_gpu(r, gpu_graph_destroy(&r->gpu, graph));
    return 1e3 * milliseconds;
}

static void print_routing(run *r) {
    const uint32_t top_k = r->desc.router.top_k, shown = r->asked.num_tokens < TOKENS_SHOWN ? r->asked.num_tokens : TOKENS_SHOWN;
    int32_t *ids = (int32_t *)allocate((uint64_t)shown * top_k, sizeof(int32_t));
    float *weights = (float *)allocate((uint64_t)shown * top_k, sizeof(float));
    uint32_t t, j;
    memory_read(r, ids, r->args.ids, (size_t)shown * top_k * sizeof(int32_t));
    memory_read(r, weights, r->args.weights, (size_t)shown * top_k * sizeof(float));
    for (t = 0; t < shown; t++) {
        printf("  token %-3u ", (unsigned)t);
        for (j = 0; j < top_k; j++) printf(" %d:%.4f", (int)ids[t * top_k + j], (double)weights[t * top_k + j]);
        printf("\n");
    }
    free(ids);
    free(weights);
}

static void print_output(run *r) {
    const uint32_t hidden = r->tensors.hidden_size, shown = hidden < VALUES_SHOWN ? hidden : VALUES_SHOWN;
    const size_t count = (size_t)r->asked.num_tokens * hidden, size = count * quantize_dtype_size(storage(r->asked.dtype));
    unsigned char *stored = (unsigned char *)allocate(size, 1);
    float *y = (float *)allocate(count, sizeof(float));
    uint64_t checksum = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    double sum = 0;
    size_t i;
    memory_read(r, stored, r->args.y, size);
    quantize_convert(y, QUANTIZE_F32, stored, storage(r->asked.dtype), count);
    for (i = 0; i < size; i++) checksum = (checksum ^ stored[i]) * UINT64_C(0x100000001b3);
    for (i = 0; i < count; i++) sum += (double)y[i] * (double)y[i];
    printf("Output      norm %.6g, checksum %016llx; token 0 begins", sqrt(sum), (unsigned long long)checksum);
    for (i = 0; i < shown; i++) printf(" %.4g", (double)y[i]);
    printf("\n            without shared experts and residual\n");
    if (r->asked.output) {
        FILE *file = fopen(r->asked.output, "wb");
        const size_t written = file ? fwrite(y, sizeof(float), count, file) : 0;
        if (!file || (fclose(file) != 0) || written != count) die(EXIT_WRONG, "%s can't be written", r->asked.output);
    }
    free(stored);
    free(y);
}

/* ---- */

static const char usage[] =
    "usage: run_layer MODEL --layer N [options]\n"
    "\n"
    "Runs the MoE layer N of a checkpoint and prints what it found and what came out. MODEL is a\n"
    ".safetensors file with config.json beside it, a folder with model.safetensors or\n"
    "model.safetensors.index.json, or a .gguf file (of several parts: any one of them).\n"
    "\n"
    "  --tokens T          tokens to run: 4, or all of the activations\n"
    "  --activations FILE  x, as f32 numbers [T, hidden size]; without it x is random\n"
    "  --token-ids FILE    int32 [T], where experts are chosen by token; without it at random\n"
    "  --seed S            of what is random (1)\n"
    "  --output FILE       writes y there, as f32 numbers [T, hidden size]\n"
    "  --dtype TYPE        of x and y in the layer: bf16 (default), f16 or f32\n"
    "  --device DEVICE     cpu, or gpu and nothing else; without it the GPU where there is one\n"
    "  --config FILE       the model's config.json, where it isn't beside the tensors\n"
    "  --model-type TYPE   instead of the one that the checkpoint names\n"
    "  --prefix TEXT       look at tensors alone whose names begin so\n"
    "  --help              print this\n"
    "\n"
    "Exit status: 0 when it ran, 1 when something is wrong, 2 when kernels have to be compiled and\n"
    "NVRTC isn't found, 64 when the options are wrong.\n";

static void usage_error(const char *what, const char *option) {
    fprintf(stderr, "run_layer: %s%s\n\n%s", what, option, usage);
    exit(EXIT_USAGE);
}

static uint64_t parse_number(const char *option, const char *text, uint64_t least, uint64_t most) {
    char *end;
    const unsigned long long number = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || number < least || number > most)
        usage_error("a number that can't be is given with ", option);
    return number;
}

static void parse_options(options *asked, int argc, char **argv) {
    int i, layer_given = 0;
    asked->prefix = "";
    asked->seed = 1;
    asked->dtype = MOE_ROUTE_BF16;
    for (i = 1; i < argc; i++) {
        const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(option, "--help") == 0) {
            fputs(usage, stdout);
            exit(0);
        }
        if (option[0] != '-') {
            if (asked->path) usage_error("a second model: ", option);
            asked->path = option;
            continue;
        }
        if (++i == argc) usage_error("a value is missing, or the option is unknown: ", option);
        if (strcmp(option, "--layer") == 0) asked->layer = (uint32_t)parse_number(option, value, 0, 99999), layer_given = 1;
        else if (strcmp(option, "--tokens") == 0) asked->num_tokens = (uint32_t)parse_number(option, value, 1, MAX_TOKENS);
        else if (strcmp(option, "--seed") == 0) asked->seed = parse_number(option, value, 0, UINT64_MAX);
        else if (strcmp(option, "--activations") == 0) asked->activations = value;
        else if (strcmp(option, "--token-ids") == 0) asked->token_ids = value;
        else if (strcmp(option, "--output") == 0) asked->output = value;
        else if (strcmp(option, "--config") == 0) asked->config = value;
        else if (strcmp(option, "--model-type") == 0) asked->model_type = value;
        else if (strcmp(option, "--prefix") == 0) asked->prefix = value;
        else if (strcmp(option, "--device") == 0 && strcmp(value, "cpu") == 0) asked->device = MOE_ROUTE_DEVICE_CPU;
        else if (strcmp(option, "--device") == 0 && strcmp(value, "gpu") == 0) asked->device = MOE_ROUTE_DEVICE_GPU;
        else if (strcmp(option, "--dtype") == 0 && strcmp(value, "bf16") == 0) asked->dtype = MOE_ROUTE_BF16;
        else if (strcmp(option, "--dtype") == 0 && strcmp(value, "f16") == 0) asked->dtype = MOE_ROUTE_F16;
        else if (strcmp(option, "--dtype") == 0 && strcmp(value, "f32") == 0) asked->dtype = MOE_ROUTE_F32;
        else usage_error("unknown option or value: ", option);
    }
    if (!asked->path || !layer_given) usage_error("a model and --layer are needed", "");
}

static void clean_up(run *r) {
    size_t i;
    moe_route_layer_destroy(r->layer);
    for (i = 0; i < r->num_memories; i++) {
        if (r->on_gpu) gpu_free(&r->gpu, r->memories[i].address);
        free(r->memories[i].host);
    }
    moe_route_context_destroy(r->context);
    if (r->on_gpu) gpu_stream_destroy(&r->gpu, r->stream);
    gpu_close(&r->gpu);
    layer_close(&r->tensors);
    checkpoint_close(&r->files);
    free(r->x);
    free(r->logits);
}

int main(int argc, char **argv) {
    static run r;
    moe_route_address x;
    parse_options(&r.asked, argc, argv);
    must_read(&r, checkpoint_open(&r.files, r.asked.path, r.asked.config, r.asked.layer, r.asked.prefix));
    printf("Checkpoint  %s: %lu tensors%s in %u file%s\n", r.asked.path, (unsigned long)r.files.num_tensors,
           r.files.is_gguf ? "" : " of the layer", (unsigned)r.files.num_files, r.files.num_files == 1 ? "" : "s");
    open_device(&r);
    describe(&r);
    make_input(&r);
    make_layer(&r);
    x = store_input(&r);
    make_logits(&r);
    make_arguments(&r, x);
    must(&r, moe_route_layer_run(r.layer, &r.args));
    if (r.on_gpu) must_gpu(&r, gpu_stream_synchronize(&r.gpu, r.stream));
    printf("Routing     ids and weights\n");
    print_routing(&r);
    print_output(&r);
    if (r.on_gpu) printf("Time        %.2f us, median of %d replays\n", time_on_gpu(&r), NUM_REPLAYS);
    clean_up(&r);
    return 0;
}
