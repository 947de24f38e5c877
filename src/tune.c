/*
  tune.c: measures the kernels between which choices.c chooses, on the GPU at hand, with the layer's own weights and random tokens.

  Each candidate is the whole layer with one choice everywhere. Where few tokens reuse few experts, the calls of a graph go
  through different tokens, so that weights come from memory as they do in a model. What runs without tuning is measured before and
  after its rivals, since clocks rise meanwhile, and stays unless a rival is clearly faster and gives the same bits.
*/
#include "internal.h"

#define MOER_TUNE_MAX_TOKENS 16384u /* beyond, the choice there holds */
#define MOER_TUNE_CALLS 16u         /* in a graph of few tokens, each with tokens of its own */
#define MOER_TUNE_FEW 64u           /* tokens, for that */
#define MOER_TUNE_REPLAYS 5u
#define MOER_TUNE_SLOW 5000.0       /* microseconds of a call, beyond which fewer repetitions do */
#define MOER_TUNE_GAIN 0.97         /* a rival has to take less than this part of the time */
#define MOER_TUNE_BUFFER ((size_t)1 << 20)

typedef struct moer_candidate {
    const char *name;
    moer_choice choice;
} moer_candidate;

#define MOER_CANDIDATES 5
static const moer_candidate moer_candidates[MOER_CANDIDATES] = {
    {"as without tuning", {0, 0}},
    {"down matmul and combine apart", {1, 0}},
    {"tiles of 32 rows", {0, 32}},
    {"tiles of 64 rows", {0, 64}},
    {"tiles of 128 rows", {0, 128}},
};

typedef struct moer_tune {
    moe_route_context *context;
    const moe_route_layer_desc *desc;
    const moe_route_tune_args *args;
    moe_route_layer *layers[MOER_CANDIDATES];                  /* as they are needed; the first always */
    uint32_t max_tokens, num_rows;                             /* measured at most; tokens that there are */
    size_t x, ids, weights, y, workspace, workspace_size, size; /* places in the memory that the caller gives */
    unsigned char *buffer;                                     /* MOER_TUNE_BUFFER bytes of the host */
    uint64_t random;
    moe_route_stream stream;
    moer_cu_event start, end;
    moe_route_tune_step step;
} moer_tune;

/* ---- memory ---- */

static int moer_tune_lay_out(moer_tune *tune, const moe_route_layer *layer) {
    const size_t element = moer_dtype_size(layer->dtype);
    moe_route_layer apart = *layer;
    moer_workspace places, needed;
    int fits = 1;
    tune->max_tokens = layer->max_tokens < MOER_TUNE_MAX_TOKENS ? layer->max_tokens : MOER_TUNE_MAX_TOKENS;
    tune->num_rows = (tune->max_tokens < MOER_TUNE_FEW ? tune->max_tokens : MOER_TUNE_FEW) * MOER_TUNE_CALLS;
    if (tune->num_rows < tune->max_tokens) tune->num_rows = tune->max_tokens;
    apart.may_separate = 1; /* needs the most */
    fits &= moer_workspace_lay_out(&apart, tune->max_tokens, &needed);
    memset(&places, 0, sizeof places);
    fits &= moer_workspace_take(&places, (size_t)tune->num_rows * layer->hidden_size, element, &tune->x);
    fits &= moer_workspace_take(&places, (size_t)tune->num_rows * layer->router.top_k, 4, &tune->ids);
    fits &= moer_workspace_take(&places, (size_t)tune->num_rows * layer->router.top_k, moer_dtype_size(layer->router.weights_dtype), &tune->weights);
    fits &= moer_workspace_take(&places, (size_t)tune->max_tokens * layer->hidden_size, element, &tune->y);
    fits &= moer_workspace_take(&places, needed.size, 1, &tune->workspace);
    tune->workspace_size = needed.size;
    tune->size = places.size;
    return fits;
}

static uint32_t moer_tune_random(moer_tune *tune, uint32_t below) { /* xorshift64* */
    tune->random ^= tune->random >> 12;
    tune->random ^= tune->random << 25;
    tune->random ^= tune->random >> 27;
    return (uint32_t)(((tune->random * 0x2545f4914f6cdd1dull >> 32) * below) >> 32);
}

static moe_route_status moer_tune_upload(moer_tune *tune, size_t to, size_t size) {
    const moer_driver *driver = &tune->context->driver;
    moer_cu_result result = driver->cuMemcpyHtoDAsync(tune->args->workspace + to, tune->buffer, size, tune->stream);
    if (result != 0) return moer_driver_fail(tune->context, "cuMemcpyHtoDAsync", result);
    result = driver->cuStreamSynchronize(tune->stream); /* the buffer is filled again */
    return result == 0 ? MOE_ROUTE_OK : moer_driver_fail(tune->context, "cuStreamSynchronize", result);
}

/* `count` values between 0 and 1, the same ones again and again: they only have to be ordinary numbers. */
static moe_route_status moer_tune_fill_values(moer_tune *tune, size_t to, size_t count, moe_route_dtype dtype) {
    const size_t size = moer_dtype_size(dtype), most = MOER_TUNE_BUFFER / size;
    moe_route_status status = MOE_ROUTE_OK;
    size_t i;
    for (i = 0; i < most && i < count; i++) moer_store_value(tune->buffer, i, dtype, (float)moer_tune_random(tune, 4096) / 4096.0f);
    while (count > 0 && status == MOE_ROUTE_OK) {
        const size_t part = count < most ? count : most;
        status = moer_tune_upload(tune, to, part * size);
        to += part * size;
        count -= part;
    }
    return status;
}

/* Each token's experts: distinct, each set as likely as any other. */
static moe_route_status moer_tune_fill_ids(moer_tune *tune, const moe_route_layer *layer) {
    const uint32_t top_k = layer->router.top_k, num_experts = layer->router.given_physical ? layer->router.num_physical_experts : layer->router.num_experts;
    const uint32_t most = (uint32_t)(MOER_TUNE_BUFFER / 4 / top_k);
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t done = 0, t, j, i;
    while (done < tune->num_rows && status == MOE_ROUTE_OK) {
        const uint32_t part = tune->num_rows - done < most ? tune->num_rows - done : most;
        for (t = 0; t < part; t++) {
            int32_t *ids = (int32_t *)(void *)tune->buffer + (size_t)t * top_k;
            for (j = 0; j < top_k; j++) { /* Floyd's way to draw a set */
                const uint32_t last = num_experts > top_k ? num_experts - top_k + j : j;
                ids[j] = (int32_t)moer_tune_random(tune, last + 1);
                for (i = 0; i < j && ids[i] != ids[j]; i++) {}
                if (i < j) ids[j] = (int32_t)last;
            }
        }
        status = moer_tune_upload(tune, tune->ids + (size_t)done * top_k * 4, (size_t)part * top_k * 4);
        done += part;
    }
    return status;
}

/* ---- measuring ---- */

/* One call, with the tokens of window `window`. */
static moe_route_status moer_tune_call(const moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, uint32_t window) {
    const size_t row = num_tokens <= MOER_TUNE_FEW ? (size_t)num_tokens * window : 0;
    moe_route_layer_args args;
    memset(&args, 0, sizeof args);
    args.num_tokens = num_tokens;
    args.x = tune->args->workspace + tune->x + row * layer->hidden_size * moer_dtype_size(layer->dtype);
    args.ids = tune->args->workspace + tune->ids + row * layer->router.top_k * 4;
    args.weights = tune->args->workspace + tune->weights + row * layer->router.top_k * moer_dtype_size(layer->router.weights_dtype);
    args.y = tune->args->workspace + tune->y;
    args.workspace = tune->args->workspace + tune->workspace;
    args.workspace_size = tune->workspace_size;
    args.stream = tune->stream;
    return moe_route_layer_run(layer, &args);
}

/* Goes on with a hash over the buffer: any byte that differs makes a difference, and nobody wants to deceive it. */
static uint64_t moer_tune_hash(const moer_tune *tune, size_t size, uint64_t hash) {
    size_t i;
    for (i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, tune->buffer + i, size - i < 8 ? size - i : 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    return hash;
}

/* What a call writes, as a hash. */
static moe_route_status moer_tune_result(moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, uint64_t *hash) {
    const moer_driver *driver = &tune->context->driver;
    const size_t size = (size_t)num_tokens * layer->hidden_size * moer_dtype_size(layer->dtype);
    moe_route_status status = MOE_ROUTE_OK;
    size_t done, part;
    *hash = size;
    memset(tune->buffer, 0xcb, size < MOER_TUNE_BUFFER ? size : MOER_TUNE_BUFFER); /* not what the candidate before has left there */
    for (done = 0; done < size && status == MOE_ROUTE_OK; done += part) {
        part = size - done < MOER_TUNE_BUFFER ? size - done : MOER_TUNE_BUFFER;
        status = moer_tune_upload(tune, tune->y + done, part);
    }
    if (status == MOE_ROUTE_OK) status = moer_tune_call(tune, layer, num_tokens, 0);
    for (done = 0; done < size && status == MOE_ROUTE_OK; done += part) {
        moer_cu_result result;
        part = size - done < MOER_TUNE_BUFFER ? size - done : MOER_TUNE_BUFFER;
        result = driver->cuMemcpyDtoHAsync(tune->buffer, tune->args->workspace + tune->y + done, part, tune->stream);
        if (result != 0) return moer_driver_fail(tune->context, "cuMemcpyDtoHAsync", result);
        result = driver->cuStreamSynchronize(tune->stream);
        if (result != 0) return moer_driver_fail(tune->context, "cuStreamSynchronize", result);
        *hash = moer_tune_hash(tune, part, *hash);
    }
    return status;
}

/* Captures `num_calls` calls. */
static moe_route_status moer_tune_capture(const moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, uint32_t num_calls, moer_cu_graph_exec *graph) {
    const moer_driver *driver = &tune->context->driver;
    moer_cu_graph captured = NULL;
    moe_route_status status = MOE_ROUTE_OK;
    moer_cu_result result = driver->cuStreamBeginCapture(tune->stream, MOER_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    uint32_t i;
    *graph = NULL;
    if (result != 0) return moer_driver_fail(tune->context, "cuStreamBeginCapture", result);
    for (i = 0; i < num_calls && status == MOE_ROUTE_OK; i++) status = moer_tune_call(tune, layer, num_tokens, i);
    result = driver->cuStreamEndCapture(tune->stream, &captured);
    if (status == MOE_ROUTE_OK && result != 0) status = moer_driver_fail(tune->context, "cuStreamEndCapture", result);
    if (status == MOE_ROUTE_OK) {
        result = driver->cuGraphInstantiateWithFlags(graph, captured, 0);
        if (result != 0) {
            *graph = NULL;
            status = moer_driver_fail(tune->context, "cuGraphInstantiateWithFlags", result);
        }
    }
    if (captured != NULL) driver->cuGraphDestroy(captured);
    return status;
}

/* The time from before to after a call, where `graph` is NULL, or a replay. */
static moe_route_status moer_tune_time(const moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, moer_cu_graph_exec graph, double *microseconds) {
    const moer_driver *driver = &tune->context->driver;
    moe_route_status status = MOE_ROUTE_OK;
    float milliseconds = 0.0f;
    const char *call = "cuEventRecord";
    moer_cu_result result = driver->cuEventRecord(tune->start, tune->stream);
    if (result == 0 && graph == NULL) {
        status = moer_tune_call(tune, layer, num_tokens, 0);
        if (status != MOE_ROUTE_OK) return status;
    } else if (result == 0) {
        call = "cuGraphLaunch";
        result = driver->cuGraphLaunch(graph, tune->stream);
    }
    if (result == 0) {
        call = "cuEventRecord";
        result = driver->cuEventRecord(tune->end, tune->stream);
    }
    if (result == 0) {
        call = "cuEventSynchronize";
        result = driver->cuEventSynchronize(tune->end);
    }
    if (result == 0) {
        call = "cuEventElapsedTime";
        result = driver->cuEventElapsedTime(&milliseconds, tune->start, tune->end);
    }
    *microseconds = (double)milliseconds * 1000.0;
    return result == 0 ? status : moer_driver_fail(tune->context, call, result);
}

/* Median time of a call in replays of a graph, and the hash of its result. */
static moe_route_status moer_tune_measure(moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, double *microseconds, uint64_t *hash) {
    double times[MOER_TUNE_REPLAYS], time = 0.0;
    moer_cu_graph_exec graph = NULL;
    uint32_t num_calls, num_replays, warm, i, j;
    moe_route_status status = moer_tune_result(tune, layer, num_tokens, hash);
    if (status == MOE_ROUTE_OK) status = moer_tune_time(tune, layer, num_tokens, NULL, &time);
    if (status != MOE_ROUTE_OK) return status;
    num_calls = time > MOER_TUNE_SLOW ? 1 : num_tokens <= MOER_TUNE_FEW ? MOER_TUNE_CALLS : 4;
    num_replays = time > MOER_TUNE_SLOW ? 3 : MOER_TUNE_REPLAYS;
    warm = time > MOER_TUNE_SLOW ? 0 : 1;
    status = moer_tune_capture(tune, layer, num_tokens, num_calls, &graph);
    for (i = 0; i < warm + num_replays && status == MOE_ROUTE_OK; i++) {
        status = moer_tune_time(tune, layer, num_tokens, graph, &time);
        if (i < warm) continue;
        for (j = i - warm; j > 0 && times[j - 1] > time; j--) times[j] = times[j - 1];
        times[j] = time;
    }
    if (graph != NULL) tune->context->driver.cuGraphExecDestroy(graph);
    if (status == MOE_ROUTE_OK) *microseconds = times[num_replays / 2] / num_calls;
    return status;
}

/* ---- choosing ---- */

/* Whether a candidate is another kernel than what runs without tuning. */
static int moer_tune_is_rival(const moer_tune *tune, uint32_t candidate, int large, uint32_t num_tokens) {
    const moe_route_layer *layer = tune->layers[0];
    const moer_choice *choice = &moer_candidates[candidate].choice;
    const uint32_t num_pairs = num_tokens * layer->router.top_k;
    if (choice->separate) return !large && moer_layer_fuses(layer, num_pairs);
    return choice->tile_rows != 0 && moer_layer_runs_grouped(layer, num_pairs) && choice->tile_rows / 64u != moer_grouped_tile(layer, num_pairs);
}

static uint32_t moer_tune_num_rivals(const moer_tune *tune, int large, uint32_t num_tokens) {
    uint32_t candidate, count = 0;
    for (candidate = 1; candidate < MOER_CANDIDATES; candidate++) count += (uint32_t)moer_tune_is_rival(tune, candidate, large, num_tokens);
    return count;
}

/* The number of tokens that stands for a choice; 0: there is nothing to choose. */
static uint32_t moer_tune_tokens(const moer_tune *tune, uint32_t i, int large) {
    uint32_t least, most;
    if (!moer_choice_range(tune->layers[0], i, large, &least, &most) || least > tune->max_tokens) return 0;
    if (most > tune->max_tokens) most = tune->max_tokens;
    return moer_tune_num_rivals(tune, large, most) != 0 ? most : 0;
}

/* The layer with one choice for all numbers of tokens. */
static moe_route_status moer_tune_create(moer_tune *tune, uint32_t candidate) {
    moe_route_layer **layer = &tune->layers[candidate];
    uint32_t i;
    moe_route_status status = moer_layer_begin(tune->context, tune->desc, "moe_route_layer_tune", tune->args, "args", layer);
    if (*layer == NULL) return status;
    for (i = 0; i < MOER_CHOICES; i++) (*layer)->choices[i] = moer_candidates[candidate].choice;
    (*layer)->may_separate = 1;
    return moer_layer_make_variants(*layer);
}

static moe_route_status moer_tune_step(moer_tune *tune, uint32_t candidate, uint32_t num_tokens, uint64_t *hash) {
    moe_route_status status = tune->layers[candidate] != NULL ? MOE_ROUTE_OK : moer_tune_create(tune, candidate);
    if (status == MOE_ROUTE_OK) status = moer_tune_measure(tune, tune->layers[candidate], num_tokens, &tune->step.microseconds, hash);
    if (status != MOE_ROUTE_OK) return status;
    tune->step.step++;
    tune->step.num_tokens = num_tokens;
    tune->step.choice = moer_candidates[candidate].name;
    if (tune->args->progress != NULL) tune->args->progress(&tune->step, tune->args->user);
    return MOE_ROUTE_OK;
}

/* The fastest candidate at a number of tokens. */
static moe_route_status moer_tune_choose(moer_tune *tune, int large, uint32_t num_tokens, uint32_t *chosen) {
    double times[MOER_CANDIDATES] = {0}, best;
    uint64_t expected = 0, hash = 0;
    uint32_t candidate;
    moe_route_status status = moer_tune_step(tune, 0, num_tokens, &expected);
    times[0] = tune->step.microseconds;
    for (candidate = 1; candidate < MOER_CANDIDATES && status == MOE_ROUTE_OK; candidate++) {
        if (!moer_tune_is_rival(tune, candidate, large, num_tokens)) continue;
        status = moer_tune_step(tune, candidate, num_tokens, &hash);
        times[candidate] = tune->step.microseconds;
        if (status == MOE_ROUTE_OK && hash != expected) {
            moer_log(tune->context, MOE_ROUTE_LOG_WARNING, "tuning, %u tokens: %s isn't used, since its result differs", (unsigned)num_tokens, moer_candidates[candidate].name);
            times[candidate] = 0.0;
        }
    }
    if (status == MOE_ROUTE_OK) status = moer_tune_step(tune, 0, num_tokens, &hash);
    if (status != MOE_ROUTE_OK) return status;
    if (times[0] > tune->step.microseconds) times[0] = tune->step.microseconds;
    *chosen = 0;
    best = times[0] * MOER_TUNE_GAIN;
    for (candidate = 1; candidate < MOER_CANDIDATES; candidate++)
        if (times[candidate] > 0.0 && times[candidate] < best) {
            best = times[candidate];
            *chosen = candidate;
        }
    if (*chosen != 0)
        moer_log(tune->context, MOE_ROUTE_LOG_INFO, "tuning, %u tokens: %s, %.1f us instead of %.1f", (unsigned)num_tokens, moer_candidates[*chosen].name, best, times[0]);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_tune_all(moer_tune *tune, moer_choice choices[MOER_CHOICES]) {
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t i, chosen = 0, num_tokens;
    int large;
    for (large = 0; large < 2; large++)
        for (i = 0; i < MOER_CHOICES; i++) {
            num_tokens = moer_tune_tokens(tune, i, large);
            if (num_tokens != 0) tune->step.num_steps += 2 + moer_tune_num_rivals(tune, large, num_tokens);
        }
    for (large = 0; large < 2; large++)
        for (i = 0; i < MOER_CHOICES; i++) {
            num_tokens = moer_tune_tokens(tune, i, large);
            if (num_tokens == 0) {
                if (large && i > 0 && 1u << (i - 1) >= tune->max_tokens) choices[i].tile_rows = choices[i - 1].tile_rows;
                continue;
            }
            status = moer_tune_choose(tune, large, num_tokens, &chosen);
            if (status != MOE_ROUTE_OK) return status;
            if (large) choices[i].tile_rows = moer_candidates[chosen].choice.tile_rows;
            else choices[i].separate = moer_candidates[chosen].choice.separate;
        }
    return MOE_ROUTE_OK;
}

/* ---- the public functions ---- */

static moe_route_status moer_tune_prepare(moer_tune *tune) {
    const moer_driver *driver = &tune->context->driver;
    const moe_route_layer *layer = tune->layers[0];
    moer_cu_result result = driver->cuStreamCreate(&tune->stream, MOER_CU_STREAM_NON_BLOCKING);
    moe_route_status status;
    if (result != 0) {
        tune->stream = NULL;
        return moer_driver_fail(tune->context, "cuStreamCreate", result);
    }
    result = driver->cuEventCreate(&tune->start, 0);
    if (result == 0) result = driver->cuEventCreate(&tune->end, 0);
    if (result != 0) return moer_driver_fail(tune->context, "cuEventCreate", result);
    tune->buffer = (unsigned char *)moer_alloc(tune->context, MOER_TUNE_BUFFER);
    if (tune->buffer == NULL) return moer_fail(tune->context, MOE_ROUTE_ERROR_MEMORY, "out of memory for tuning");
    status = moer_tune_fill_values(tune, tune->x, (size_t)tune->num_rows * layer->hidden_size, layer->dtype);
    if (status == MOE_ROUTE_OK) status = moer_tune_fill_values(tune, tune->weights, (size_t)tune->num_rows * layer->router.top_k, layer->router.weights_dtype);
    return status == MOE_ROUTE_OK ? moer_tune_fill_ids(tune, layer) : status;
}

/* Also after a failure, for as much as there is. */
static void moer_tune_end(moer_tune *tune) {
    const moer_driver *driver = &tune->context->driver;
    uint32_t candidate;
    if (tune->stream != NULL) driver->cuStreamSynchronize(tune->stream);
    if (tune->start != NULL) driver->cuEventDestroy(tune->start);
    if (tune->end != NULL) driver->cuEventDestroy(tune->end);
    if (tune->stream != NULL) driver->cuStreamDestroy(tune->stream);
    moer_free(tune->context, tune->buffer);
    for (candidate = 1; candidate < MOER_CANDIDATES; candidate++) moe_route_layer_destroy(tune->layers[candidate]);
}

static moe_route_status moer_tune_run(moer_tune *tune) {
    moer_choice choices[MOER_CHOICES];
    moe_route_status status = moer_layer_make_variants(tune->layers[0]);
    memset(choices, 0, sizeof choices);
    if (status == MOE_ROUTE_OK) status = moer_tune_prepare(tune);
    if (status == MOE_ROUTE_OK) status = moer_tune_all(tune, choices);
    return status == MOE_ROUTE_OK ? moer_tuning_keep(tune->layers[0], choices) : status;
}

/* Checks the arguments, and does it where something is to be done. */
static moe_route_status moer_tune_checked(moer_tune *tune) {
    moe_route_context *context = tune->context;
    const moe_route_tune_args *args = tune->args;
    const char *missing = moer_driver_missing(&context->driver);
    moe_route_status status;
    int pushed;
    if (context->device == MOE_ROUTE_DEVICE_COMPILE)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "moe_route_layer_tune: the context only compiles (MOE_ROUTE_DEVICE_COMPILE); nothing can be measured");
    if (missing != NULL) return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "moe_route_layer_tune: the NVIDIA driver has no %s", missing);
    if (!moer_tune_lay_out(tune, tune->layers[0]))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune: max_tokens is %u; its workspace is larger than this machine's addresses", (unsigned)tune->layers[0]->max_tokens);
    if (args->workspace_size < tune->size)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune: workspace_size is %llu; needed is at least %llu", (unsigned long long)args->workspace_size,
                         (unsigned long long)tune->size);
    if (args->workspace == 0 || args->workspace % 256 != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune: workspace is 0x%llx; allowed is the address of device memory, a multiple of 256", args->workspace);
    if (!args->again && moer_tuning_find(tune->layers[0], NULL)) return MOE_ROUTE_OK;
    status = moer_context_enter(context, &pushed);
    if (status != MOE_ROUTE_OK) return status;
    tune->random = 0x9e3779b97f4a7c15ull; /* the same tokens each time */
    status = moer_tune_run(tune);
    moer_tune_end(tune);
    moer_context_leave(context, pushed);
    return status;
}

/* The layer that runs without tuning, for a function whose output or argument `given` is named so; NULL on failure. */
static moe_route_status moer_tune_begin(moe_route_context *context, moe_route_layer_desc *desc, const moe_route_layer_desc *from, const char *function, const void *given, const char *name,
                                        moe_route_layer **layer) {
    if (from != NULL) {
        *desc = *from;
        desc->operations = MOE_ROUTE_OPERATION_EXPERTS; /* what choices concern */
        desc->tuned = MOE_ROUTE_OFF;
        desc->fused_combine = MOE_ROUTE_AUTO; /* what is kept doesn't depend on what a description overrides */
        desc->grouped_rows = 0;
    }
    return moer_layer_begin(context, from != NULL ? desc : NULL, function, given, name, layer);
}

MOE_ROUTE_API moe_route_status moe_route_layer_tune(moe_route_context *context, const moe_route_layer_desc *from, const moe_route_tune_args *args) {
    moe_route_layer_desc desc;
    moer_tune tune;
    moe_route_status status;
    memset(&tune, 0, sizeof tune);
    status = moer_tune_begin(context, &desc, from, "moe_route_layer_tune", args, "args", &tune.layers[0]);
    if (tune.layers[0] == NULL) return status;
    tune.context = context;
    tune.desc = &desc;
    tune.args = args;
    if (context->device != MOE_ROUTE_DEVICE_CPU) status = moer_tune_checked(&tune);
    moe_route_layer_destroy(tune.layers[0]);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_layer_tune_workspace_size(moe_route_context *context, const moe_route_layer_desc *from, size_t *size) {
    moe_route_layer_desc desc;
    moer_tune tune;
    moe_route_layer *layer;
    moe_route_status status;
    if (size != NULL) *size = 0;
    memset(&tune, 0, sizeof tune);
    status = moer_tune_begin(context, &desc, from, "moe_route_layer_tune_workspace_size", size, "size", &layer);
    if (layer == NULL) return status;
    if (context->device != MOE_ROUTE_DEVICE_CPU) {
        if (moer_tune_lay_out(&tune, layer)) *size = tune.size;
        else status = moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune_workspace_size: max_tokens is %u; its workspace is larger than this machine's addresses", (unsigned)layer->max_tokens);
    }
    moe_route_layer_destroy(layer);
    return status;
}
