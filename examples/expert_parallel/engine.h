/*
  engine.h: one rank of a layer whose experts are spread over ranks: what an engine does to embed it. engine_open() makes the
  layers and memory, engine_step() runs a step: route, dispatch, exchange, experts, exchange, combine, with the shared expert
  beside the exchanges. Options, tokens and comparing belong to the program.
*/
#ifndef ENGINE_H
#define ENGINE_H

#include "exchange.h"
#include "workload.h"

typedef enum engine_way { /* what comes back from the experts' ranks */
    WAY_SLOTS_F32, /* a row of f32 for each slot: the bits of one device */
    WAY_SLOTS,     /* the same rounded to the activations' dtype: the same bits for every number of ranks */
    WAY_SUMS,      /* a row of the activations' dtype for each token: the least to send */
    NUM_WAYS
} engine_way;

typedef struct engine_desc {
    const workload *work;
    uint32_t num_tokens;           /* of a rank's step, T */
    const uint32_t *rank_experts;  /* [num_ranks], or NULL: even ranges */
    uint32_t num_replicas;         /* so many experts, from 0 on, are there twice */
    engine_way way;
    int exact;                     /* 1: counts are exchanged first, then rows that exist alone */
} engine_desc;

typedef struct engine_memory {
    moe_route_address address;
    void *host; /* of the CPU backend */
    size_t size;
} engine_memory;

enum { PHASE_ROUTING, PHASE_OUT, PHASE_EXPERTS, PHASE_BACK, PHASE_COMBINE, NUM_PHASES };

typedef struct engine_counts {
    size_t rows, rows_moved;   /* rows sent, and those of them to other ranks; of slots on the way back likewise */
    size_t bytes_out, bytes_back; /* to and from other ranks */
} engine_counts;

enum { /* memory of the engine */
    LOGITS, X, IDS, WEIGHTS, COUNTS, OFFSETS, COUNTS_IN, SEND_ROWS, SEND_IDS, SEND_WEIGHTS, RECV_ROWS, RECV_IDS, RECV_WEIGHTS, BACK, RETURNED, PAIR_TO_ROW, PAIR_TO_SLOT_ROW,
    SHARED_IDS, SHARED_WEIGHTS, SHARED_OUTPUT, Y, WORKSPACE, SHARED_WORKSPACE, GATE_UP, GATE_UP_SCALES, DOWN, DOWN_SCALES, SHARED_GATE_UP, SHARED_GATE_UP_SCALES, SHARED_DOWN,
    SHARED_DOWN_SCALES, EXPERT_MAP, NUM_MEMORIES
};

typedef struct engine {
    engine_desc desc;
    mesh *mesh;
    exchange *x;
    moe_route_context *context;
    gpu_device *gpu;           /* NULL on the CPU */
    gpu_stream stream, side;
    gpu_event begin[NUM_PHASES + 1], forked, joined;
    moe_route_layer *front, *experts, *shared; /* experts is NULL where this rank has none */
    uint32_t num_physical;
    engine_memory memory[NUM_MEMORIES];
    size_t row_size, back_size; /* bytes */
    size_t sizes[4][MESH_MAX_RANKS], at[4][MESH_MAX_RANKS]; /* rows: sent, received; returned rows: sent, received */
    double times[NUM_PHASES + 1];
    engine_counts counts;
    char error[1024];
} engine;

/* ---- memory ---- */

static int engine_fail(engine *e, const char *what, const char *why) {
    snprintf(e->error, sizeof e->error, "%s: %s", what, why);
    return -1;
}

static int engine_check(engine *e, const char *what, moe_route_status status) {
    char text[900];
    if (status == MOE_ROUTE_OK) return 0;
    moe_route_message(e->context, text, sizeof text);
    return engine_fail(e, what, text);
}

static int engine_check_gpu(engine *e, int result) { return result ? engine_fail(e, "GPU", e->gpu->reason) : 0; }

static int engine_allocate(engine *e, int which, size_t size) {
    engine_memory *m = &e->memory[which];
    m->size = size ? size : 256;
    if (e->gpu) return engine_check_gpu(e, gpu_alloc(e->gpu, &m->address, m->size));
    m->host = malloc(m->size + 255);
    if (!m->host) return engine_fail(e, "memory", "there is none left");
    m->address = (moe_route_address)(((uintptr_t)m->host + 255) / 256 * 256);
    return 0;
}

static int engine_upload(engine *e, moe_route_address to, const void *from, size_t size) {
    if (e->gpu) return engine_check_gpu(e, gpu_upload(e->gpu, to, from, size));
    memcpy((void *)(uintptr_t)to, from, size);
    return 0;
}

static int engine_download(engine *e, void *to, moe_route_address from, size_t size) {
    if (e->gpu) return engine_check_gpu(e, gpu_download(e->gpu, to, from, size));
    memcpy(to, (const void *)(uintptr_t)from, size);
    return 0;
}

static int engine_allocate_from(engine *e, int which, const void *from, size_t size) { return engine_allocate(e, which, size) || engine_upload(e, e->memory[which].address, from, size); }

/* ---- layers ---- */

static void engine_describe_weights(const workload *w, moe_route_address data, moe_route_address scales, moe_route_weights *weights) {
    weights->format = w->group_size ? MOE_ROUTE_FORMAT_INT4 : MOE_ROUTE_FORMAT_BF16;
    weights->data = data;
    weights->scales = scales;
    weights->group_size = w->group_size;
}

/* The whole layer, without weights. All layers add up as one for T tokens does, so that their bits agree. */
static void engine_describe(const workload *w, uint32_t num_tokens, moe_route_layer_desc *desc) {
    memset(desc, 0, sizeof *desc);
    desc->router.num_experts = w->num_experts;
    desc->router.top_k = w->top_k;
    desc->router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc->experts.hidden_size = w->hidden_size;
    desc->experts.intermediate_size = w->intermediate_size;
    desc->experts.dtype = w->dtype == QUANTIZE_F16 ? MOE_ROUTE_F16 : MOE_ROUTE_BF16;
    desc->max_tokens = num_tokens;
    desc->sums_of_max_tokens = num_tokens;
}

/* Makes experts `first` to first + count - 1 of the physical ones, in four arrays. */
static int engine_make_weights(engine *e, uint32_t first, uint32_t count, int which) {
    const workload *w = e->desc.work;
    int matrix, result = 0;
    for (matrix = 0; matrix < 2 && result == 0; matrix++) {
        const size_t data_size = workload_data_size(w, matrix), scales_size = workload_scales_size(w, matrix);
        unsigned char *data = (unsigned char *)malloc(data_size), *scales = (unsigned char *)malloc(scales_size + 1);
        uint32_t i;
        if (!data || !scales) result = engine_fail(e, "memory", "there is none left");
        if (!result) result = engine_allocate(e, which + matrix * 2, data_size * count);
        if (!result && scales_size) result = engine_allocate(e, which + matrix * 2 + 1, scales_size * count);
        for (i = 0; i < count && !result; i++) {
            const uint32_t expert = first + i < w->num_experts || first == w->num_experts + e->desc.num_replicas ? first + i : first + i - w->num_experts; /* a replica */
            workload_expert(w, expert, matrix, data, scales);
            result = engine_upload(e, e->memory[which + matrix * 2].address + i * data_size, data, data_size);
            if (!result && scales_size) result = engine_upload(e, e->memory[which + matrix * 2 + 1].address + i * scales_size, scales, scales_size);
        }
        free(data);
        free(scales);
    }
    return result;
}

static int engine_make_layers(engine *e) {
    const engine_desc *d = &e->desc;
    const workload *w = d->work;
    const int num_ranks = e->mesh->num_ranks, rank = e->mesh->rank;
    moe_route_layer_desc desc;
    uint32_t first, count;
    int r;
    if (d->num_replicas) { /* logical to physical: each expert under its own number, the first ones also behind all */
        int32_t *map = (int32_t *)malloc((size_t)w->num_experts * 2 * sizeof *map);
        uint32_t i;
        if (!map) return engine_fail(e, "memory", "there is none left");
        for (i = 0; i < w->num_experts; i++) {
            map[i * 2] = (int32_t)i;
            map[i * 2 + 1] = i < d->num_replicas ? (int32_t)(w->num_experts + i) : -1;
        }
        r = engine_allocate_from(e, EXPERT_MAP, map, (size_t)w->num_experts * 2 * sizeof *map);
        free(map);
        if (r) return -1;
    }
    engine_describe(w, d->num_tokens, &desc);
    desc.rows_dtype = d->way == WAY_SLOTS_F32 ? MOE_ROUTE_F32 : MOE_ROUTE_DTYPE_DEFAULT;
    desc.experts.num_ranks = (uint32_t)num_ranks;
    desc.experts.rank_experts = d->rank_experts;
    if (d->num_replicas) {
        desc.experts.expert_map = e->memory[EXPERT_MAP].address;
        desc.experts.expert_map_columns = 2;
        desc.experts.num_physical_experts = e->num_physical;
    }
    desc.operations = MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_DISPATCH | MOE_ROUTE_OPERATION_COMBINE;
    if (engine_check(e, "the router's layer", moe_route_layer_create(e->context, &desc, &e->front))) return -1;

    moe_route_rank_range(e->num_physical, (uint32_t)num_ranks, (uint32_t)rank, &first, &count);
    if (d->rank_experts) {
        count = d->rank_experts[rank];
        for (first = 0, r = 0; r < rank; r++) first += d->rank_experts[r];
    }
    if (count) {
        engine_describe(w, d->num_tokens, &desc);
        if (engine_make_weights(e, first, count, GATE_UP)) return -1;
        engine_describe_weights(w, e->memory[GATE_UP].address, e->memory[GATE_UP_SCALES].address, &desc.experts.gate_up);
        engine_describe_weights(w, e->memory[DOWN].address, e->memory[DOWN_SCALES].address, &desc.experts.down);
        desc.experts.first_expert = first;
        desc.experts.num_local_experts = count;
        desc.experts.num_physical_experts = e->num_physical; /* the ids that come are physical experts */
        desc.max_tokens = d->num_tokens * (uint32_t)num_ranks;
        desc.rows_dtype = d->way == WAY_SLOTS_F32 ? MOE_ROUTE_F32 : MOE_ROUTE_DTYPE_DEFAULT;
        desc.operations = d->way == WAY_SUMS ? MOE_ROUTE_OPERATION_EXPERTS : MOE_ROUTE_OPERATION_EXPERT_ROWS;
        if (engine_check(e, "the experts' layer", moe_route_layer_create(e->context, &desc, &e->experts))) return -1;
    }
    if (w->has_shared) { /* a layer of one expert that every token uses */
        engine_describe(w, d->num_tokens, &desc);
        if (engine_make_weights(e, w->num_experts + d->num_replicas, 1, SHARED_GATE_UP)) return -1;
        engine_describe_weights(w, e->memory[SHARED_GATE_UP].address, e->memory[SHARED_GATE_UP_SCALES].address, &desc.experts.gate_up);
        engine_describe_weights(w, e->memory[SHARED_DOWN].address, e->memory[SHARED_DOWN_SCALES].address, &desc.experts.down);
        desc.router.num_experts = desc.router.top_k = 1;
        desc.operations = MOE_ROUTE_OPERATION_EXPERTS;
        if (engine_check(e, "the shared expert's layer", moe_route_layer_create(e->context, &desc, &e->shared))) return -1;
    }
    return 0;
}

static int engine_make_memory(engine *e) {
    const workload *w = e->desc.work;
    const size_t n = (size_t)e->mesh->num_ranks, t = e->desc.num_tokens, k = w->top_k, rows = n * t, back_rows = e->desc.way == WAY_SUMS ? rows : rows * k;
    size_t front = 0, workspace = 0, shared = 0, i;
    int32_t *zeros = (int32_t *)calloc(t, sizeof *zeros);
    float *ones = (float *)malloc(t * sizeof *ones);
    int result = zeros && ones ? 0 : engine_fail(e, "memory", "there is none left");
    for (i = 0; i < t && !result; i++) ones[i] = 1.0f;
    if (!result) result = engine_check(e, "workspace", moe_route_layer_workspace_size(e->front, (uint32_t)t, &front));
    if (!result && e->experts) result = engine_check(e, "workspace", moe_route_layer_workspace_size(e->experts, (uint32_t)rows, &workspace));
    if (workspace < front) workspace = front; /* in one stream they take turns */
    if (!result && e->shared) result = engine_check(e, "workspace", moe_route_layer_workspace_size(e->shared, (uint32_t)t, &shared));
    result = result || engine_allocate_from(e, LOGITS, w->logits, (size_t)w->num_tokens * w->num_experts * sizeof *w->logits);
    result = result || engine_allocate_from(e, X, w->x, w->num_tokens * e->row_size);
    result = result || engine_allocate_from(e, SHARED_IDS, zeros, t * 4) || engine_allocate_from(e, SHARED_WEIGHTS, ones, t * 4);
    result = result || engine_allocate(e, IDS, t * k * 4) || engine_allocate(e, WEIGHTS, t * k * 4);
    result = result || engine_allocate(e, COUNTS, n * 8) || engine_allocate(e, COUNTS_IN, n * 8) || engine_allocate(e, OFFSETS, n * 8 + 8);
    result = result || engine_allocate(e, SEND_ROWS, rows * e->row_size) || engine_allocate(e, RECV_ROWS, rows * e->row_size);
    result = result || engine_allocate(e, SEND_IDS, rows * k * 4) || engine_allocate(e, RECV_IDS, rows * k * 4);
    result = result || engine_allocate(e, SEND_WEIGHTS, rows * k * 4) || engine_allocate(e, RECV_WEIGHTS, rows * k * 4);
    result = result || engine_allocate(e, BACK, back_rows * e->back_size) || engine_allocate(e, RETURNED, back_rows * e->back_size);
    result = result || engine_allocate(e, PAIR_TO_ROW, t * k * 4) || engine_allocate(e, PAIR_TO_SLOT_ROW, t * k * 4);
    result = result || engine_allocate(e, SHARED_OUTPUT, t * e->row_size) || engine_allocate(e, Y, t * e->row_size);
    result = result || engine_allocate(e, WORKSPACE, workspace) || engine_allocate(e, SHARED_WORKSPACE, shared);
    free(zeros);
    free(ones);
    return result ? -1 : 0;
}

/* 0, or -1 with the reason in e->error. What was made is undone by engine_close in either case. */
static int engine_open(engine *e, const engine_desc *desc, mesh *m, exchange *x, moe_route_context *context, gpu_device *gpu) {
    int i;
    memset(e, 0, sizeof *e);
    e->desc = *desc;
    e->mesh = m;
    e->x = x;
    e->context = context;
    e->gpu = gpu;
    e->num_physical = desc->work->num_experts + desc->num_replicas;
    e->row_size = (size_t)desc->work->hidden_size * 2;
    e->back_size = (size_t)desc->work->hidden_size * (desc->way == WAY_SLOTS_F32 ? 4 : 2);
    if (gpu) {
        int result = gpu_stream_create(gpu, &e->stream) || gpu_stream_create(gpu, &e->side) || gpu_event_create(gpu, &e->forked) || gpu_event_create(gpu, &e->joined);
        for (i = 0; i <= NUM_PHASES && !result; i++) result = gpu_event_create(gpu, &e->begin[i]);
        if (engine_check_gpu(e, result)) return -1;
    }
    return engine_make_layers(e) || engine_make_memory(e) ? -1 : 0;
}

static void engine_close(engine *e) {
    int i;
    moe_route_layer_destroy(e->front);
    moe_route_layer_destroy(e->experts);
    moe_route_layer_destroy(e->shared);
    for (i = 0; i < NUM_MEMORIES; i++) {
        if (e->gpu) gpu_free(e->gpu, e->memory[i].address);
        free(e->memory[i].host);
    }
    if (e->gpu) {
        for (i = 0; i <= NUM_PHASES; i++) gpu_event_destroy(e->gpu, e->begin[i]);
        gpu_event_destroy(e->gpu, e->forked);
        gpu_event_destroy(e->gpu, e->joined);
        gpu_stream_destroy(e->gpu, e->stream);
        gpu_stream_destroy(e->gpu, e->side);
    }
    memset(e, 0, sizeof *e);
}

/* ---- a step ---- */

/* A point in time, in the stream or on the clock. */
static int engine_mark(engine *e, int phase) {
    if (e->gpu) return engine_check_gpu(e, gpu_event_record(e->gpu, e->begin[phase], e->stream));
    e->times[phase] = mesh_now();
    return 0;
}

static int engine_route(engine *e, uint32_t first_token) {
    const workload *w = e->desc.work;
    moe_route_route_args route;
    moe_route_dispatch_args dispatch;
    memset(&route, 0, sizeof route);
    route.num_tokens = e->desc.num_tokens;
    route.logits = e->memory[LOGITS].address + (moe_route_address)first_token * w->num_experts * sizeof(float);
    route.ids = e->memory[IDS].address;
    route.weights = e->memory[WEIGHTS].address;
    route.stream = e->stream;
    if (engine_check(e, "route", moe_route_route(e->front, &route))) return -1;
    memset(&dispatch, 0, sizeof dispatch);
    dispatch.num_tokens = e->desc.num_tokens;
    dispatch.ids = route.ids;
    dispatch.weights = route.weights;
    dispatch.x = e->memory[X].address + (moe_route_address)first_token * e->row_size;
    dispatch.capacity = e->desc.exact ? 0 : e->desc.num_tokens;
    dispatch.counts = e->memory[COUNTS].address;
    dispatch.offsets = e->memory[OFFSETS].address;
    dispatch.rows = e->memory[SEND_ROWS].address;
    dispatch.row_ids = e->memory[SEND_IDS].address;
    if (e->desc.way == WAY_SUMS) { /* the experts' rank weighs */
        dispatch.row_weights = e->memory[SEND_WEIGHTS].address;
        dispatch.pair_to_row = e->memory[PAIR_TO_ROW].address;
    } else {
        dispatch.pair_to_slot_row = e->memory[PAIR_TO_SLOT_ROW].address;
    }
    dispatch.workspace = e->memory[WORKSPACE].address; /* for steps of more than 2048 pairs */
    dispatch.workspace_size = e->memory[WORKSPACE].size;
    dispatch.stream = e->stream;
    return engine_check(e, "dispatch", moe_route_dispatch(e->front, &dispatch));
}

/* Rows that go to each rank and come from it, and those that come back. With fixed sizes they are always the same; otherwise the
   counts are exchanged, and the host waits for them. */
static int engine_count(engine *e) {
    const int num_ranks = e->mesh->num_ranks, slots = e->desc.way != WAY_SUMS;
    const size_t fixed = e->desc.num_tokens, fixed_back = slots ? fixed * e->desc.work->top_k : fixed;
    int32_t counts[2][MESH_MAX_RANKS][2];
    size_t at[MESH_MAX_RANKS], eight[MESH_MAX_RANKS];
    int r, i;
    if (e->desc.exact) {
        mesh_array array;
        for (r = 0; r < num_ranks; r++) {
            at[r] = (size_t)r * 8;
            eight[r] = 8;
        }
        array.send = (const char *)(uintptr_t)e->memory[COUNTS].address;
        array.recv = (char *)(uintptr_t)e->memory[COUNTS_IN].address;
        array.send_at = array.recv_at = at;
        array.send_size = array.recv_size = eight;
        if (exchange_begin(e->x, &array, 1, e->stream) || exchange_finish(e->x) || exchange_wait(e->x, e->stream)) return engine_fail(e, "counts", e->x->error);
        if (engine_download(e, counts[0], e->memory[COUNTS].address, (size_t)num_ranks * 8) || engine_download(e, counts[1], e->memory[COUNTS_IN].address, (size_t)num_ranks * 8)) return -1;
    }
    for (i = 0; i < 4; i++) { /* rows sent and received; returned rows sent (of what was received) and received */
        size_t next = 0;
        for (r = 0; r < num_ranks; r++) {
            const int incoming = i == 1 || i == 2, back = i >= 2;
            const int32_t count = e->desc.exact ? counts[incoming][r][back && slots] : (int32_t)(back ? fixed_back : fixed);
            if (count < 0 || (size_t)count > (back ? fixed_back : fixed)) return engine_fail(e, "counts", "a rank sends a count that can't be");
            e->at[i][r] = next;
            e->sizes[i][r] = (size_t)count;
            next += (size_t)count;
        }
    }
    e->counts.bytes_out = e->counts.bytes_back = e->counts.rows = e->counts.rows_moved = 0;
    for (r = 0; r < num_ranks; r++) {
        const size_t row = e->row_size + e->desc.work->top_k * (e->desc.way == WAY_SUMS ? 8u : 4u);
        e->counts.rows += e->sizes[0][r];
        if (r == e->mesh->rank) continue;
        e->counts.rows_moved += e->sizes[0][r];
        e->counts.bytes_out += e->sizes[0][r] * row;
        e->counts.bytes_back += e->sizes[3][r] * e->back_size;
    }
    return 0;
}

/* One array of an exchange: `unit` bytes a row, in the directions of sizes[which] and sizes[which + 1]. */
static void engine_array(const engine *e, int send, int recv, int which, size_t unit, size_t bytes[4][MESH_MAX_RANKS], mesh_array *array) {
    int r;
    for (r = 0; r < e->mesh->num_ranks; r++) {
        bytes[0][r] = e->at[which][r] * unit;
        bytes[1][r] = e->sizes[which][r] * unit;
        bytes[2][r] = e->at[which + 1][r] * unit;
        bytes[3][r] = e->sizes[which + 1][r] * unit;
    }
    array->send = (const char *)(uintptr_t)e->memory[send].address;
    array->recv = (char *)(uintptr_t)e->memory[recv].address;
    array->send_at = bytes[0];
    array->send_size = bytes[1];
    array->recv_at = bytes[2];
    array->recv_size = bytes[3];
}

/* The shared expert, on the stream beside. */
static int engine_shared(engine *e, uint32_t first_token) {
    moe_route_layer_args args;
    if (!e->shared) return 0;
    memset(&args, 0, sizeof args);
    args.num_tokens = e->desc.num_tokens;
    args.ids = e->memory[SHARED_IDS].address;
    args.weights = e->memory[SHARED_WEIGHTS].address;
    args.x = e->memory[X].address + (moe_route_address)first_token * e->row_size;
    args.y = e->memory[SHARED_OUTPUT].address;
    args.workspace = e->memory[SHARED_WORKSPACE].address;
    args.workspace_size = e->memory[SHARED_WORKSPACE].size;
    args.stream = e->side;
    return engine_check(e, "shared expert", moe_route_layer_run(e->shared, &args));
}

static int engine_run_experts(engine *e) {
    const int last = e->mesh->num_ranks - 1;
    const uint32_t num_tokens = (uint32_t)(e->at[1][last] + e->sizes[1][last]), num_rows = (uint32_t)(e->at[2][last] + e->sizes[2][last]);
    if (!e->experts || !num_tokens) return 0;
    if (e->desc.way == WAY_SUMS) {
        moe_route_layer_args args;
        memset(&args, 0, sizeof args);
        args.num_tokens = num_tokens;
        args.ids = e->memory[RECV_IDS].address;
        args.weights = e->memory[RECV_WEIGHTS].address;
        args.x = e->memory[RECV_ROWS].address;
        args.y = e->memory[BACK].address;
        args.workspace = e->memory[WORKSPACE].address;
        args.workspace_size = e->memory[WORKSPACE].size;
        args.stream = e->stream;
        return engine_check(e, "experts", moe_route_layer_run(e->experts, &args));
    } else {
        moe_route_expert_rows_args args;
        memset(&args, 0, sizeof args);
        args.num_tokens = num_tokens;
        args.ids = e->memory[RECV_IDS].address;
        args.x = e->memory[RECV_ROWS].address;
        args.rows = e->memory[BACK].address;
        args.num_rows = num_rows;
        args.num_sources = e->desc.exact ? 1 : (uint32_t)e->mesh->num_ranks;
        args.workspace = e->memory[WORKSPACE].address;
        args.workspace_size = e->memory[WORKSPACE].size;
        args.stream = e->stream;
        return engine_check(e, "experts", moe_route_expert_rows(e->experts, &args));
    }
}

static int engine_combine(engine *e) {
    const int last = e->mesh->num_ranks - 1;
    const uint32_t num_rows = (uint32_t)(e->at[3][last] + e->sizes[3][last]);
    moe_route_combine_args args;
    memset(&args, 0, sizeof args);
    args.num_tokens = e->desc.num_tokens;
    args.rows = e->memory[RETURNED].address;
    args.num_rows = num_rows ? num_rows : 1;
    args.pair_to_row = e->memory[e->desc.way == WAY_SUMS ? PAIR_TO_ROW : PAIR_TO_SLOT_ROW].address;
    args.weights = e->memory[WEIGHTS].address;
    args.weighted_rows = e->desc.way == WAY_SUMS;
    args.y = e->memory[Y].address;
    args.shared_output = e->shared ? e->memory[SHARED_OUTPUT].address : 0;
    args.stream = e->stream;
    return engine_check(e, "combine", moe_route_combine(e->front, &args));
}

/* T tokens from `first_token` of the workload on -> Y. On a GPU everything is on the stream when it returns, but with exact sizes
   the host has waited for the counts; with fixed ones the whole may be captured. */
static int engine_step(engine *e, uint32_t first_token) {
    size_t bytes[3][4][MESH_MAX_RANKS];
    mesh_array arrays[3];
    const size_t ids_size = (size_t)e->desc.work->top_k * 4;
    const int num_arrays = e->desc.way == WAY_SUMS ? 3 : 2;
    if (engine_mark(e, PHASE_ROUTING)) return -1;
    if (e->gpu && e->shared && engine_check_gpu(e, gpu_event_record(e->gpu, e->forked, e->stream) || gpu_event_await(e->gpu, e->forked, e->side))) return -1;
    if (engine_route(e, first_token) || engine_mark(e, PHASE_OUT) || engine_count(e)) return -1;
    engine_array(e, SEND_ROWS, RECV_ROWS, 0, e->row_size, bytes[0], &arrays[0]);
    engine_array(e, SEND_IDS, RECV_IDS, 0, ids_size, bytes[1], &arrays[1]);
    engine_array(e, SEND_WEIGHTS, RECV_WEIGHTS, 0, ids_size, bytes[2], &arrays[2]);
    if (exchange_begin(e->x, arrays, num_arrays, e->stream)) return engine_fail(e, "rows", e->x->error);
    if (engine_shared(e, first_token)) return -1; /* while the rows are on their way */
    if (exchange_finish(e->x)) return engine_fail(e, "rows", e->x->error);
    if (engine_mark(e, PHASE_EXPERTS) || engine_run_experts(e) || engine_mark(e, PHASE_BACK)) return -1;
    engine_array(e, BACK, RETURNED, 2, e->back_size, bytes[0], &arrays[0]);
    if (exchange_begin(e->x, arrays, 1, e->stream) || exchange_finish(e->x)) return engine_fail(e, "results", e->x->error);
    if (e->gpu && e->shared && engine_check_gpu(e, gpu_event_record(e->gpu, e->joined, e->side) || gpu_event_await(e->gpu, e->joined, e->stream))) return -1;
    if (engine_mark(e, PHASE_COMBINE) || engine_combine(e) || engine_mark(e, NUM_PHASES)) return -1;
    return 0;
}

/* Waits for the step; microseconds of each phase. */
static int engine_finish(engine *e, double microseconds[NUM_PHASES]) {
    int i;
    if (exchange_wait(e->x, e->stream)) return engine_fail(e, "step", e->x->error);
    for (i = 0; i < NUM_PHASES && microseconds; i++) {
        if (e->gpu) {
            double milliseconds;
            if (engine_check_gpu(e, gpu_event_elapsed(e->gpu, e->begin[i], e->begin[i + 1], &milliseconds))) return -1;
            microseconds[i] = milliseconds * 1e3;
        } else {
            microseconds[i] = (e->times[i + 1] - e->times[i]) * 1e6;
        }
    }
    return 0;
}

#endif /* ENGINE_H */
