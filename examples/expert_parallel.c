/*
  expert_parallel.c: MoE layers whose experts are spread over ranks, one process a GPU: the trained layer of the demo, and a
  made-up one of 256 experts. Every step is compared with one device that has all experts. NCCL is opened at run time; on the CPU
  backend the ranks exchange their rows through sockets.

      cc -O2 -I. examples/expert_parallel.c -o expert_parallel -lm -ldl -lpthread
      ./expert_parallel --ranks 2                          it starts the ranks itself
      torchrun --no-python --nproc-per-node 2 ./expert_parallel
      mpirun -n 2 ./expert_parallel --rendezvous 127.0.0.1:29700

  What an engine takes over is in expert_parallel/engine.h, what carries the rows in expert_parallel/exchange.h. Here are
  options, processes, comparing and printing.
*/
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1
#endif
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "gpu.h"

#include "expert_parallel/engine.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/wait.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

enum { EXIT_WRONG = 1, EXIT_USAGE = 64, MAX_STEPS = 64, NUM_REPLAYS = 20 };

typedef struct options {
    int device_gpu, ranks, share_gpu, graph, no_alltoall, skew;
    uint32_t tokens, hidden_size, intermediate_size, replicas, steps;
    int layers, ways, sizes; /* bits: trained, synthetic; engine_way; fixed, exact */
    uint32_t rank_experts[MESH_MAX_RANKS], num_rank_experts;
    double deadline;
    const char *data, *rendezvous, *fault;
    int fault_rank;
} options;

/* What all ranks must agree on, and what is wrong when they don't. */
enum { CONFIG_VERSION, CONFIG_RANKS, CONFIG_DEVICE, CONFIG_TOKENS, CONFIG_HIDDEN, CONFIG_INTERMEDIATE, CONFIG_TOP_K, CONFIG_REPLICAS, CONFIG_PLACEMENT, CONFIG_STEPS, CONFIG_LAYERS,
       CONFIG_WAYS, CONFIG_SIZES, CONFIG_OTHERS, CONFIG_FIELDS };
static const char *const config_names[CONFIG_FIELDS] = {"version", "number of ranks", "device", "tokens", "hidden size", "intermediate size", "top_k", "replicas", "placement of experts",
                                                        "steps", "layers", "ways", "sizes", "other options"};

typedef struct report { /* of one rank's run of a layer, for rank 0 to print */
    double times[NUM_PHASES], total, alone, replayed; /* microseconds; 0: not measured */
    double rows, rows_moved, bytes_out, bytes_back;   /* a step */
    double error;  /* relative, against one device; 0: the same bits */
    double alltoalls;
} report;

typedef struct rank {
    const options *o;
    mesh mesh;
    exchange x;
    gpu_device gpu;
    moe_route_context *context;
    int on_gpu;
} rank;

/* ---- failing: a rank that can't go on says why and ends at once, and its sockets tell the others ---- */

static void die(rank *r, const char *format, ...) {
    char text[1200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fflush(stdout);
    fprintf(stderr, "rank %d: %s\n", r->mesh.rank, text);
    fflush(stderr);
    mesh_close(&r->mesh); /* first, so that nobody waits for what follows */
    if (r->on_gpu) exchange_abort(&r->x);
    _exit(EXIT_WRONG);
}

/* A last resort against calls that don't return: the system ends the process. */
static void watch(const rank *r) { alarm((unsigned)(r->o->deadline * 2) + 60); }

/* What --fault asks of this rank, at a place in the program. */
static int is_fault(const rank *r, const char *kind) { return r->o->fault && r->mesh.rank == r->o->fault_rank && strcmp(r->o->fault, kind) == 0; }

static void provoke(const rank *r, const char *dies, const char *hangs) {
    if (is_fault(r, dies)) raise(SIGKILL);
    while (is_fault(r, hangs)) pause();
}

/* ---- agreeing ---- */

static void agree(rank *r) {
    const options *o = r->o;
    uint64_t mine[CONFIG_FIELDS] = {0}, all[MESH_MAX_RANKS][CONFIG_FIELDS];
    uint64_t placement = UINT64_C(14695981039346656037);
    uint32_t i;
    int other, field;
    for (i = 0; i < o->num_rank_experts; i++) placement = (placement ^ o->rank_experts[i]) * UINT64_C(1099511628211);
    mine[CONFIG_VERSION] = 1;
    mine[CONFIG_RANKS] = (uint64_t)r->mesh.num_ranks + (uint64_t)is_fault(r, "mismatch-ranks");
    mine[CONFIG_DEVICE] = (uint64_t)o->device_gpu;
    mine[CONFIG_TOKENS] = o->tokens + (uint64_t)is_fault(r, "mismatch-tokens");
    mine[CONFIG_HIDDEN] = o->hidden_size * (1 + (uint64_t)is_fault(r, "mismatch-hidden"));
    mine[CONFIG_INTERMEDIATE] = o->intermediate_size;
    mine[CONFIG_TOP_K] = 8 - (uint64_t)is_fault(r, "mismatch-top-k") * 2;
    mine[CONFIG_REPLICAS] = o->replicas;
    mine[CONFIG_PLACEMENT] = placement;
    mine[CONFIG_STEPS] = o->steps;
    mine[CONFIG_LAYERS] = (uint64_t)o->layers;
    mine[CONFIG_WAYS] = (uint64_t)o->ways;
    mine[CONFIG_SIZES] = (uint64_t)o->sizes;
    mine[CONFIG_OTHERS] = (uint64_t)(o->graph | o->no_alltoall << 1 | o->skew << 2);
    provoke(r, "die-early", "hang-early");
    if (mesh_gather(&r->mesh, mine, all, sizeof mine)) die(r, "comparing configurations: %s", r->mesh.error);
    for (other = 0; other < r->mesh.num_ranks; other++)
        for (field = 0; field < CONFIG_FIELDS; field++)
            if (all[other][field] != mine[field])
                die(r, "rank %d has another %s: %llu, here %llu", other, config_names[field], (unsigned long long)all[other][field], (unsigned long long)mine[field]);
}

/* ---- one device that has all experts ---- */

typedef struct reference {
    uint16_t *y;         /* [steps, T, H], of this rank's tokens */
    double microseconds; /* of all ranks' tokens of a step */
} reference;

static uint32_t num_steps(const rank *r, const workload *w) {
    const uint32_t possible = w->num_tokens / (r->o->tokens * (uint32_t)r->mesh.num_ranks);
    return r->o->steps && r->o->steps < possible ? r->o->steps : possible < MAX_STEPS ? possible : MAX_STEPS;
}

/* What `args` says of one device's tokens, so many a call; a layer without logits is the shared expert, of one slot a token. */
static void run_in_parts(rank *r, engine *e, const char *what, const moe_route_layer *layer, const moe_route_layer_args *args, uint32_t part) {
    const moe_route_address row = (moe_route_address)e->desc.work->hidden_size * 2;
    uint32_t first;
    for (first = 0; first < args->num_tokens; first += part) {
        moe_route_layer_args some = *args;
        if (some.num_tokens - first < part) part = some.num_tokens - first;
        some.num_tokens = part;
        some.x += first * row;
        some.y += first * row;
        if (some.shared_output) some.shared_output += first * row;
        if (some.logits) some.logits += (moe_route_address)first * e->desc.work->num_experts * 4;
        if (some.ids) some.ids += (moe_route_address)first * 4;
        if (some.weights) some.weights += (moe_route_address)first * 4;
        if (engine_check(e, what, moe_route_layer_run(layer, &some))) die(r, "%s", e->error);
    }
}

/* Through an engine without exchange: the same memory and weights' making. The bits are those of calls that are as large as the library
   computes alike: up to 512 pairs, and the shared expert as many tokens at once as a rank has. */
static void make_reference(rank *r, const workload *w, reference *ref) {
    const uint32_t t = r->o->tokens, all = t * (uint32_t)r->mesh.num_ranks, steps = num_steps(r, w);
    const size_t row = (size_t)w->hidden_size * 2;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL, *fast = NULL, *shared = NULL; /* fast: adds up as is best for so many tokens */
    moe_route_layer_args args;
    mesh alone;
    exchange none;
    engine e;
    size_t size = 0, shared_size = 0;
    double times[MAX_STEPS];
    uint32_t step, i;
    int32_t *zeros = (int32_t *)calloc(all, 4);
    float *ones = (float *)malloc((size_t)all * 4);
    memset(ref, 0, sizeof *ref);
    memset(&e, 0, sizeof e);
    memset(&alone, 0, sizeof alone);
    alone.num_ranks = 1;
    alone.fds[0] = -1;
    alone.deadline = r->o->deadline;
    exchange_open_sockets(&none, &alone);
    none.gpu = r->on_gpu ? &r->gpu : NULL;
    e.desc.work = w;
    e.desc.num_replicas = r->o->replicas;
    e.mesh = &alone;
    e.x = &none;
    e.context = r->context;
    e.gpu = none.gpu;
    ref->y = (uint16_t *)malloc((size_t)steps * t * row);
    if (!zeros || !ones || !ref->y) die(r, "out of memory");
    for (i = 0; i < all; i++) ones[i] = 1.0f;
    if (e.gpu && (gpu_stream_create(&r->gpu, &e.stream) || gpu_event_create(&r->gpu, &e.begin[0]) || gpu_event_create(&r->gpu, &e.begin[1]))) die(r, "%s", r->gpu.reason);
    engine_describe(w, t, &desc);
    desc.max_tokens = all;
    if (engine_make_weights(&e, 0, w->num_experts, GATE_UP)) die(r, "%s", e.error);
    engine_describe_weights(w, e.memory[GATE_UP].address, e.memory[GATE_UP_SCALES].address, &desc.experts.gate_up);
    engine_describe_weights(w, e.memory[DOWN].address, e.memory[DOWN_SCALES].address, &desc.experts.down);
    desc.operations = MOE_ROUTE_OPERATION_LAYER;
    if (engine_check(&e, "the whole layer", moe_route_layer_create(r->context, &desc, &layer))) die(r, "%s", e.error);
    desc.sums_of_max_tokens = 0;
    if (engine_check(&e, "the whole layer", moe_route_layer_create(r->context, &desc, &fast))) die(r, "%s", e.error);
    if (w->has_shared) {
        engine_describe(w, t, &desc);
        desc.max_tokens = all;
        if (engine_make_weights(&e, w->num_experts + r->o->replicas, 1, SHARED_GATE_UP)) die(r, "%s", e.error);
        engine_describe_weights(w, e.memory[SHARED_GATE_UP].address, e.memory[SHARED_GATE_UP_SCALES].address, &desc.experts.gate_up);
        engine_describe_weights(w, e.memory[SHARED_DOWN].address, e.memory[SHARED_DOWN_SCALES].address, &desc.experts.down);
        desc.router.num_experts = desc.router.top_k = 1;
        desc.operations = MOE_ROUTE_OPERATION_EXPERTS;
        if (engine_check(&e, "the shared expert", moe_route_layer_create(r->context, &desc, &shared))) die(r, "%s", e.error);
        moe_route_layer_workspace_size(shared, all, &shared_size);
    }
    moe_route_layer_workspace_size(layer, all, &size); /* the larger of both */
    if (engine_allocate_from(&e, LOGITS, w->logits, (size_t)w->num_tokens * w->num_experts * 4) || engine_allocate_from(&e, X, w->x, w->num_tokens * row) || engine_allocate(&e, Y, all * row) ||
        engine_allocate(&e, SHARED_OUTPUT, all * row) || engine_allocate(&e, WORKSPACE, size) || engine_allocate(&e, SHARED_WORKSPACE, shared_size) ||
        engine_allocate_from(&e, SHARED_IDS, zeros, (size_t)all * 4) || engine_allocate_from(&e, SHARED_WEIGHTS, ones, (size_t)all * 4))
        die(r, "%s", e.error);
    for (step = 0; step < steps; step++) {
        uint32_t run;
        watch(r);
        for (run = e.gpu ? 0 : 1; run < (e.gpu ? 3u : 2u); run++) { /* to warm up, for the time, and for the bits, which on the CPU are the same */
            const int bits = run == 2 || !e.gpu;
            const double start = mesh_now();
            if (e.gpu && gpu_event_record(&r->gpu, e.begin[0], e.stream)) die(r, "%s", r->gpu.reason);
            memset(&args, 0, sizeof args);
            args.num_tokens = all;
            args.stream = e.stream;
            args.x = e.memory[X].address + (moe_route_address)step * all * row;
            if (shared) {
                args.ids = e.memory[SHARED_IDS].address;
                args.weights = e.memory[SHARED_WEIGHTS].address;
                args.y = e.memory[SHARED_OUTPUT].address;
                args.workspace = e.memory[SHARED_WORKSPACE].address;
                args.workspace_size = shared_size;
                run_in_parts(r, &e, "the shared expert", shared, &args, bits ? t : all);
                args.shared_output = args.y;
            }
            args.ids = args.weights = 0;
            args.logits = e.memory[LOGITS].address + (moe_route_address)step * all * w->num_experts * 4;
            args.y = e.memory[Y].address;
            args.workspace = e.memory[WORKSPACE].address;
            args.workspace_size = size;
            run_in_parts(r, &e, "the whole layer", bits ? layer : fast, &args, bits ? 512 / w->top_k : all);
            if (run == 1) times[step] = (mesh_now() - start) * 1e6;
            if (e.gpu) {
                double milliseconds;
                if (gpu_event_record(&r->gpu, e.begin[1], e.stream) || gpu_event_elapsed(&r->gpu, e.begin[0], e.begin[1], &milliseconds)) die(r, "%s", r->gpu.reason);
                if (run == 1) times[step] = milliseconds * 1e3;
            }
        }
        if (engine_download(&e, (char *)ref->y + (size_t)step * t * row, e.memory[Y].address + (moe_route_address)r->mesh.rank * t * row, t * row)) die(r, "%s", e.error);
    }
    ref->microseconds = gpu_median(times, steps);
    moe_route_layer_destroy(layer);
    moe_route_layer_destroy(fast);
    moe_route_layer_destroy(shared);
    engine_close(&e);
    free(zeros);
    free(ones);
}

/* ---- a layer over the ranks ---- */

/* |y - reference| / |reference| of one step, or 0 where all bits are the same. */
static double compare(rank *r, engine *e, const reference *ref, uint32_t step) {
    const workload *w = e->desc.work;
    const size_t count = (size_t)e->desc.num_tokens * w->hidden_size;
    const uint16_t *want = ref->y + step * count;
    uint16_t *got = (uint16_t *)malloc(count * 2);
    double difference = 0, norm = 0;
    size_t i;
    if (!got || engine_download(e, got, e->memory[Y].address, count * 2)) die(r, "%s", got ? e->error : "out of memory");
    if (memcmp(got, want, count * 2) != 0)
        for (i = 0; i < count; i++) {
            const double a = (double)quantize_load(got, w->dtype, i), b = (double)quantize_load(want, w->dtype, i);
            difference += (a - b) * (a - b);
            norm += b * b;
        }
    free(got);
    if (difference != difference) return HUGE_VAL;
    return norm > 0 ? sqrt(difference / norm) : 0;
}

/* The whole step as one graph; 0 where it can't be captured. */
static double replay(rank *r, engine *e, const reference *ref, double *error) {
    double times[NUM_REPLAYS];
    gpu_cu_graph recorded = NULL;
    gpu_graph graph = NULL;
    int i, result;
    const int relaxed = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED: NCCL's own threads call CUDA meanwhile */
    if (!r->gpu.cuStreamBeginCapture || !r->gpu.cuStreamEndCapture || !r->gpu.cuGraphInstantiateWithFlags) die(r, "the driver has no graphs");
    if (gpu_result(&r->gpu, "cuStreamBeginCapture", r->gpu.cuStreamBeginCapture(e->stream, relaxed))) die(r, "%s", r->gpu.reason);
    result = engine_step(e, (uint32_t)r->mesh.rank * e->desc.num_tokens);
    if (gpu_result(&r->gpu, "cuStreamEndCapture", r->gpu.cuStreamEndCapture(e->stream, &recorded)) || result) die(r, "capturing a step: %s", result ? e->error : r->gpu.reason);
    if (gpu_result(&r->gpu, "cuGraphInstantiate", r->gpu.cuGraphInstantiateWithFlags(&graph, recorded, 0))) die(r, "%s", r->gpu.reason);
    if (gpu_memset(&r->gpu, e->memory[Y].address, 0xff, e->memory[Y].size)) die(r, "%s", r->gpu.reason);
    for (i = -3; i < NUM_REPLAYS; i++) {
        double milliseconds;
        watch(r);
        if (gpu_event_record(&r->gpu, e->forked, e->stream) || gpu_graph_launch(&r->gpu, graph, e->stream) || gpu_event_record(&r->gpu, e->joined, e->stream)) die(r, "%s", r->gpu.reason);
        if (exchange_wait(e->x, e->stream)) die(r, "replaying a step: %s", e->x->error);
        if (gpu_event_elapsed(&r->gpu, e->forked, e->joined, &milliseconds)) die(r, "%s", r->gpu.reason);
        if (i >= 0) times[i] = milliseconds * 1e3;
    }
    *error = fmax(*error, compare(r, e, ref, 0));
    gpu_graph_destroy(&r->gpu, graph);
    r->gpu.cuGraphDestroy(recorded);
    return gpu_median(times, NUM_REPLAYS);
}

static void run_layer(rank *r, const workload *w, const reference *ref, engine_way way, int exact, report *out) {
    static double times[NUM_PHASES + 1][MAX_STEPS];
    const options *o = r->o;
    const uint32_t steps = num_steps(r, w), all = o->tokens * (uint32_t)r->mesh.num_ranks;
    engine_desc desc;
    engine e;
    uint32_t step, run;
    int i;
    memset(out, 0, sizeof *out);
    memset(&desc, 0, sizeof desc);
    desc.work = w;
    desc.num_tokens = o->tokens;
    desc.rank_experts = o->num_rank_experts ? o->rank_experts : NULL;
    desc.num_replicas = o->replicas;
    desc.way = way;
    desc.exact = exact;
    watch(r);
    if (engine_open(&e, &desc, &r->mesh, &r->x, r->context, r->on_gpu ? &r->gpu : NULL)) die(r, "%s", e.error);
    r->x.alltoalls = 0;
    for (step = 0; step < steps; step++) {
        const uint32_t first = step * all + (uint32_t)r->mesh.rank * o->tokens;
        double phases[NUM_PHASES];
        watch(r);
        if (step == steps / 2) provoke(r, "die", "hang");
        for (run = step == 0 ? 0 : 1; run < 2; run++)
            if (engine_step(&e, first) || engine_finish(&e, phases)) die(r, "%s", e.error);
        times[NUM_PHASES][step] = 0;
        for (i = 0; i < NUM_PHASES; i++) {
            times[i][step] = phases[i];
            times[NUM_PHASES][step] += phases[i];
        }
        out->rows += (double)e.counts.rows / steps;
        out->rows_moved += (double)e.counts.rows_moved / steps;
        out->bytes_out += (double)e.counts.bytes_out / steps;
        out->bytes_back += (double)e.counts.bytes_back / steps;
        out->error = fmax(out->error, compare(r, &e, ref, step));
    }
    for (i = 0; i < NUM_PHASES; i++) out->times[i] = gpu_median(times[i], steps);
    out->total = gpu_median(times[NUM_PHASES], steps);
    out->alone = ref->microseconds;
    out->alltoalls = r->x.alltoalls;
    if (o->graph && r->on_gpu && !exact) out->replayed = replay(r, &e, ref, &out->error);
    engine_close(&e);
}

/* Rank 0 prints; all know whether the layer was as it should be. */
static int print_report(rank *r, const workload *w, engine_way way, int exact, const report *mine) {
    static const char *const ways[] = {"f32 slot rows", "16-bit slot rows", "sums"};
    const double bound = way == WAY_SLOTS_F32 ? 0 : w->dtype == QUANTIZE_F16 ? 0x1p-10 : 0x1p-7;
    report all[MESH_MAX_RANKS], most;
    int i, n = r->mesh.num_ranks, good;
    if (mesh_gather(&r->mesh, mine, all, sizeof *mine)) die(r, "gathering results: %s", r->mesh.error);
    most = all[0];
    for (i = 1; i < n; i++) { /* times of the slowest, sizes of all */
        int p;
        for (p = 0; p < NUM_PHASES; p++) most.times[p] = fmax(most.times[p], all[i].times[p]);
        most.total = fmax(most.total, all[i].total);
        most.replayed = fmax(most.replayed, all[i].replayed);
        most.error = fmax(most.error, all[i].error);
        most.rows += all[i].rows;
        most.rows_moved += all[i].rows_moved;
        most.bytes_out += all[i].bytes_out;
        most.bytes_back += all[i].bytes_back;
    }
    good = most.error <= bound;
    if (r->mesh.rank == 0) {
        printf("  %-17s %-6s %8.1f %8.1f %9.1f %9.1f  %8.1f %8.1f %8.1f %8.1f %8.1f %9.1f", ways[way], exact ? "exact" : "fixed", most.rows, most.rows_moved, most.bytes_out / 1024, most.bytes_back / 1024,
               most.times[PHASE_ROUTING], most.times[PHASE_OUT], most.times[PHASE_EXPERTS], most.times[PHASE_BACK], most.times[PHASE_COMBINE], most.total);
        if (most.replayed > 0) printf(" %9.1f", most.replayed);
        if (most.error > 0) printf("  error %.1e%s\n", most.error, good ? "" : ": WRONG");
        else printf("  the same bits\n");
        if (r->on_gpu && most.alltoalls > 0) printf("    (ncclAlltoAll: %.0f calls a rank)\n", most.alltoalls);
        fflush(stdout);
    }
    return good;
}

static int run_workload(rank *r, const workload *w) {
    const options *o = r->o;
    reference ref;
    int way, exact, good = 1;
    if (o->tokens * (uint32_t)r->mesh.num_ranks > w->num_tokens) die(r, "%d ranks of %u tokens are more than the %u of the %s", r->mesh.num_ranks, (unsigned)o->tokens, (unsigned)w->num_tokens, w->name);
    make_reference(r, w, &ref);
    if (r->mesh.rank == 0) {
        printf("\n%s: %u experts, top-%u, hidden size %u, intermediate size %u%s; %u tokens a rank and step, %u steps\n", w->name, (unsigned)w->num_experts, (unsigned)w->top_k, (unsigned)w->hidden_size,
               (unsigned)w->intermediate_size, w->has_shared ? ", a shared expert beside the exchange" : "", (unsigned)o->tokens, (unsigned)num_steps(r, w));
        printf("one device with all experts, %u tokens: %.1f us\n", (unsigned)(o->tokens * (uint32_t)r->mesh.num_ranks), ref.microseconds);
        printf("                              rows    moved    KB out   KB back   routing exchange  experts exchange  combine  total us%s\n", o->graph && r->on_gpu ? "     graph" : "");
    }
    for (way = 0; way < NUM_WAYS; way++)
        for (exact = 0; exact < 2; exact++) {
            report mine;
            if (!(o->ways >> way & 1) || !(o->sizes >> exact & 1)) continue;
            run_layer(r, w, &ref, (engine_way)way, exact, &mine);
            good &= print_report(r, w, (engine_way)way, exact, &mine);
        }
    free(ref.y);
    return good;
}

/* ---- a rank ---- */

static void open_device(rank *r, int local_rank) {
    moe_route_context_desc desc;
    moe_route_context_info info;
    char text[900] = "out of memory";
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_CPU;
    if (r->o->device_gpu) {
        if (!gpu_open_device(&r->gpu, r->o->share_gpu ? 0 : local_rank)) die(r, "%s", r->gpu.reason);
        desc.device = MOE_ROUTE_DEVICE_GPU;
        desc.cuda_context = r->gpu.context;
    }
    if (moe_route_context_create(&desc, &r->context) != MOE_ROUTE_OK) {
        if (r->context) moe_route_message(r->context, text, sizeof text);
        die(r, "%s", text);
    }
    if (r->o->device_gpu) {
        if (exchange_open_nccl(&r->x, &r->mesh, &r->gpu, !r->o->no_alltoall)) die(r, "%s", r->x.error);
        r->on_gpu = 1;
    } else {
        exchange_open_sockets(&r->x, &r->mesh);
    }
    moe_route_context_get_info(r->context, &info);
    if (r->mesh.rank == 0) {
        printf("%d ranks, %s", r->mesh.num_ranks, info.name);
        if (r->on_gpu)
            printf(", NCCL %d.%d.%d (%s)%s\n", r->x.nccl.version / 10000, r->x.nccl.version / 100 % 100, r->x.nccl.version % 100, r->x.nccl.path,
                   r->x.nccl.ncclAlltoAll && !r->o->no_alltoall ? ", with ncclAlltoAll" : "");
        else printf(" backend, sockets\n");
        fflush(stdout);
    }
}

/* The mesh is connected. Returns the exit status. */
static int run_rank(rank *r, int local_rank) {
    workload w;
    char error[512];
    int good = 1, done = 1, all[MESH_MAX_RANKS];
    watch(r);
    agree(r);
    open_device(r, local_rank);
    provoke(r, "die-opened", "hang-opened");
    if (r->o->layers & 1) {
        if (!workload_trained(&w, r->o->data, error, sizeof error)) die(r, "%s", error);
        good &= run_workload(r, &w);
        workload_free(&w);
    }
    if (r->o->layers & 2) {
        const uint32_t steps = r->o->steps ? r->o->steps : 4;
        if (!workload_synthetic(&w, r->o->hidden_size, r->o->intermediate_size, r->o->tokens * (uint32_t)r->mesh.num_ranks * steps, r->o->skew)) die(r, "out of memory");
        good &= run_workload(r, &w);
        workload_free(&w);
    }
    if (exchange_close(&r->x)) die(r, "%s", r->x.error);
    if (mesh_gather(&r->mesh, &done, all, sizeof done)) die(r, "ending: %s", r->mesh.error); /* nobody leaves before all have what they need */
    moe_route_context_destroy(r->context);
    if (r->on_gpu) gpu_close(&r->gpu);
    mesh_close(&r->mesh);
    if (r->mesh.rank == 0) printf("\n%s\n", good ? "All as expected." : "Something is wrong: see above.");
    return good ? 0 : EXIT_WRONG;
}

/* ---- the parent of ranks that it starts itself ---- */

static int start_ranks(const options *o) {
    static mesh_pairs pairs;
    pid_t children[MESH_MAX_RANKS];
    int status, i, left = o->ranks, failed = 0;
    double limit = 0;
    if (!mesh_fork_begin(&pairs, o->ranks)) {
        fprintf(stderr, "expert_parallel: no sockets: %s\n", strerror(errno));
        return EXIT_WRONG;
    }
    fflush(stdout);
    for (i = 0; i < o->ranks; i++) {
        children[i] = fork(); /* before any call of CUDA */
        if (children[i] == 0) {
            static rank r;
            memset(&r, 0, sizeof r);
            r.o = o;
#if defined(__linux__)
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* no rank outlives the program that was asked for */
#endif
            if (!mesh_fork_take(&r.mesh, &pairs, i)) die(&r, "its sockets can't be used: %s", strerror(errno));
            r.mesh.deadline = o->deadline;
            exit(run_rank(&r, i));
        }
        if (children[i] < 0) {
            fprintf(stderr, "expert_parallel: rank %d can't be started: %s\n", i, strerror(errno));
            left--;
            failed++;
        }
    }
    mesh_fork_end(&pairs);
    while (left > 0) {
        for (i = 0; i < o->ranks; i++) {
            if (children[i] <= 0 || waitpid(children[i], &status, WNOHANG) != children[i]) continue;
            children[i] = 0;
            left--;
            if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
            if (WIFEXITED(status)) fprintf(stderr, "rank %d ended with status %d\n", i, WEXITSTATUS(status));
            else fprintf(stderr, "rank %d was ended by signal %d\n", i, WTERMSIG(status));
            failed++;
            if (limit == 0) limit = mesh_now() + o->deadline + 5;
        }
        if (limit > 0 && mesh_now() > limit) { /* the rank that hangs, and who hangs with it */
            for (i = 0; i < o->ranks; i++)
                if (children[i] > 0) kill(children[i], SIGKILL);
            limit = 0;
        }
        usleep(10000);
    }
    return failed ? EXIT_WRONG : 0;
}

/* ---- options ---- */

static const char usage[] =
    "usage: expert_parallel [options]\n"
    "\n"
    "Runs MoE layers with their experts spread over ranks, and compares with one device.\n"
    "\n"
    "  --ranks N             start N ranks (default 2; from the environment under torchrun or mpirun)\n"
    "  --device cpu|gpu      default: gpu where there is one\n"
    "  --tokens T            tokens of a rank's step (default 16)\n"
    "  --layer trained|synthetic|both\n"
    "  --rows f32|16|sums|all    what comes back (see docs/expert_parallelism.md)\n"
    "  --sizes fixed|exact|both\n"
    "  --hidden H, --intermediate I    of the synthetic layer (default 2048 and 512; on the CPU 128 and 64)\n"
    "  --steps S             at most so many steps a layer\n"
    "  --rank-experts A,B,...    experts of each rank, 0 or more (replicas included); one layer at a time\n"
    "  --replicas R          the first R experts are there twice\n"
    "  --skew                the synthetic tokens prefer the first experts\n"
    "  --graph               also replay the step with fixed sizes as a CUDA graph\n"
    "  --no-alltoall         ncclSend and ncclRecv alone\n"
    "  --share-gpu           all ranks on device 0 (NCCL refuses that; stand-ins may not)\n"
    "  --deadline SECONDS    without progress before a rank gives up (default 20)\n"
    "  --rendezvous HOST:PORT    where rank 0 of a launcher's ranks listens (default MASTER_ADDR and MASTER_PORT + 1)\n"
    "  --data FILE           the trained layer (default tests/data/tiny_moe.gguf)\n"
    "  --fault KIND:RANK     die, die-early, die-opened, hang, hang-early, hang-opened, mismatch-ranks,\n"
    "                        mismatch-tokens, mismatch-hidden or mismatch-top-k: what that rank does wrong\n"
    "  --help\n"
    "\n"
    "Exit status: 0 when all is as expected, 1 when something is wrong, 64 when the options are.\n";

static void usage_error(const char *what, const char *option) {
    fprintf(stderr, "expert_parallel: %s%s\n\n%s", what, option, usage);
    exit(EXIT_USAGE);
}

static uint32_t parse_number(const char *option, const char *text, uint32_t least, uint32_t most) {
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || value < least || value > most) usage_error("a number that is too small, too large, or none: ", option);
    return (uint32_t)value;
}

/* The position of `text` among words separated by '|'. */
static int parse_word(const char *option, const char *text, const char *words) {
    const size_t length = strlen(text);
    int index = 0;
    for (;; index++) {
        const char *end = strchr(words, '|');
        const size_t size = end ? (size_t)(end - words) : strlen(words);
        if (size == length && strncmp(words, text, size) == 0) return index;
        if (!end) usage_error("an unknown value of ", option);
        words = end + 1;
    }
}

static void parse_fault(options *o, char *text) {
    static const char *const kinds[] = {"die", "die-early", "die-opened", "hang", "hang-early", "hang-opened", "mismatch-ranks", "mismatch-tokens", "mismatch-hidden", "mismatch-top-k"};
    char *colon = strchr(text, ':');
    size_t i;
    if (!colon) usage_error("--fault needs KIND:RANK, not ", text);
    *colon = 0;
    o->fault = text;
    o->fault_rank = (int)parse_number("--fault", colon + 1, 0, MESH_MAX_RANKS - 1);
    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kinds[i], text) == 0) return;
    usage_error("an unknown fault: ", text);
}

static void parse_options(options *o, int argc, char **argv) {
    int i;
    memset(o, 0, sizeof *o);
    o->device_gpu = access("/dev/nvidiactl", F_OK) == 0;
    o->tokens = 16;
    o->layers = o->sizes = 3;
    o->ways = 7;
    o->deadline = 20;
    o->data = "tests/data/tiny_moe.gguf";
    for (i = 1; i < argc; i++) {
        char *name = argv[i], *value;
        if (strcmp(name, "--help") == 0) {
            fputs(usage, stdout);
            exit(0);
        }
        if (strcmp(name, "--skew") == 0) { o->skew = 1; continue; }
        if (strcmp(name, "--graph") == 0) { o->graph = 1; continue; }
        if (strcmp(name, "--no-alltoall") == 0) { o->no_alltoall = 1; continue; }
        if (strcmp(name, "--share-gpu") == 0) { o->share_gpu = 1; continue; }
        if (i + 1 == argc || strncmp(name, "--", 2) != 0) usage_error("an unknown option, or one without its value: ", name);
        value = argv[++i];
        if (strcmp(name, "--ranks") == 0) o->ranks = (int)parse_number(name, value, 1, MESH_MAX_RANKS);
        else if (strcmp(name, "--device") == 0) o->device_gpu = parse_word(name, value, "cpu|gpu");
        else if (strcmp(name, "--tokens") == 0) o->tokens = parse_number(name, value, 1, 4096);
        else if (strcmp(name, "--layer") == 0) o->layers = parse_word(name, value, "trained|synthetic|both") + 1;
        else if (strcmp(name, "--rows") == 0) o->ways = parse_word(name, value, "f32|16|sums|all") == 3 ? 7 : 1 << parse_word(name, value, "f32|16|sums|all");
        else if (strcmp(name, "--sizes") == 0) o->sizes = parse_word(name, value, "fixed|exact|both") + 1;
        else if (strcmp(name, "--hidden") == 0) o->hidden_size = parse_number(name, value, 1, 65536);
        else if (strcmp(name, "--intermediate") == 0) o->intermediate_size = parse_number(name, value, 1, 65536);
        else if (strcmp(name, "--steps") == 0) o->steps = parse_number(name, value, 1, MAX_STEPS);
        else if (strcmp(name, "--replicas") == 0) o->replicas = parse_number(name, value, 0, 32);
        else if (strcmp(name, "--deadline") == 0) o->deadline = parse_number(name, value, 1, 600);
        else if (strcmp(name, "--rendezvous") == 0) o->rendezvous = value;
        else if (strcmp(name, "--data") == 0) o->data = value;
        else if (strcmp(name, "--fault") == 0) parse_fault(o, value);
        else if (strcmp(name, "--rank-experts") == 0) {
            char *part = strtok(value, ",");
            for (; part; part = strtok(NULL, ",")) {
                if (o->num_rank_experts == MESH_MAX_RANKS) usage_error("too many numbers in ", name);
                o->rank_experts[o->num_rank_experts++] = parse_number(name, part, 0, 2048);
            }
        } else usage_error("unknown option ", name);
    }
    if (!o->hidden_size) o->hidden_size = o->device_gpu ? 2048 : 128;
    if (!o->intermediate_size) o->intermediate_size = o->device_gpu ? 512 : 64;
    if (o->hidden_size % 64 || o->intermediate_size % 64) usage_error("a size that isn't a multiple of 64: ", "--hidden or --intermediate");
}

/* A number that a launcher sets; -1: it doesn't. */
static int launched(const char *torchrun, const char *mpirun) {
    const char *text = getenv(torchrun) ? getenv(torchrun) : getenv(mpirun);
    char *end;
    const long value = text ? strtol(text, &end, 10) : -1;
    return text && text[0] && !*end && value >= 0 && value <= 1000000 ? (int)value : -1;
}

int main(int argc, char **argv) {
    static options o;
    static rank r;
    const int launched_rank = launched("RANK", "OMPI_COMM_WORLD_RANK"), launched_size = launched("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE");
    int local = launched("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), size;
    char address[300];
    parse_options(&o, argc, argv);
    size = o.ranks ? o.ranks : launched_rank >= 0 && launched_size > 0 ? launched_size : 2;
    if (size > MESH_MAX_RANKS) usage_error("too many ranks", "");
    if (o.num_rank_experts && (int)o.num_rank_experts != size) usage_error("--rank-experts needs a number for each rank", "");
    if (o.ranks || launched_rank < 0 || launched_size < 1) {
        o.ranks = size;
        return start_ranks(&o);
    }
    r.o = &o;
    r.mesh.rank = launched_rank;
    if (launched_rank >= launched_size) die(&r, "the launcher's number of ranks is %d", launched_size);
    if (!o.rendezvous) {
        const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
        if (!host || !port) die(&r, "MASTER_ADDR and MASTER_PORT aren't set: --rendezvous HOST:PORT is needed");
        snprintf(address, sizeof address, "%.200s:%d", host, atoi(port) + 1);
        o.rendezvous = address;
    }
    watch(&r);
    if (mesh_connect(&r.mesh, launched_rank, launched_size, o.rendezvous, o.deadline)) die(&r, "%s", r.mesh.error);
    return run_rank(&r, local >= 0 ? local : launched_rank);
}
