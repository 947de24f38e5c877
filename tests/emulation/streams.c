/*
  streams.c: streams, events, capture and graphs of the emulated driver. Work is done at once and in order, whatever its stream;
  capture and graphs follow the real rules about what is legal when.
*/
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static __thread int capture_mode = CAPTURE_GLOBAL;

/* ---- operations ---- */
static int run_operation(const operation *o, stream *s) {
    if (driver.sticky) return driver.sticky;
    switch (o->kind) {
    case LAUNCH: return run_launch(o, s);
    case COPY:
        chain_end();
        memmove(o->to, o->from, o->size);
        return CUDA_SUCCESS;
    default:
        chain_end();
        if (o->value_size == 1) memset(o->to, (int)o->value, o->size);
        else
            for (size_t i = 0; i < o->size; i += 4) memcpy((char *)o->to + i, &o->value, 4);
        return CUDA_SUCCESS;
    }
}

void operation_free(operation *o) { free(o->arguments); }

static int graph_append(graph *g, const operation *o) {
    operation *copy;
    if (g->count == g->capacity) {
        const size_t capacity = g->capacity ? 2 * g->capacity : 16;
        operation *grown = (operation *)realloc(g->operations, capacity * sizeof *grown);
        if (!grown) return OUT_OF_MEMORY;
        g->operations = grown;
        g->capacity = capacity;
    }
    copy = &g->operations[g->count];
    *copy = *o;
    if (o->arguments) {
        copy->arguments = malloc(o->kernel->info->argument_size);
        if (!copy->arguments) return OUT_OF_MEMORY;
        memcpy(copy->arguments, o->arguments, o->kernel->info->argument_size);
    }
    g->count++;
    return CUDA_SUCCESS;
}

static void graph_free(graph *g) {
    for (size_t i = 0; i < g->count; i++) operation_free(&g->operations[i]);
    free(g->operations);
    object_remove(g);
}

/* ---- streams and capture ---- */
static int is_default_stream(const void *handle) { return (uintptr_t)handle <= 2; }

/* NULL with CUDA_SUCCESS for the default streams. */
static int stream_find(const void *handle, stream **found) {
    *found = is_default_stream(handle) ? NULL : (stream *)object_find(handle, STREAM);
    return *found || is_default_stream(handle) ? CUDA_SUCCESS : INVALID_HANDLE;
}

static int capture_break(stream *s, int result) {
    s->capture = CAPTURE_BROKEN;
    return result;
}

/* For calls that are illegal while a capture goes on. */
int capture_forbids(void) {
    int result = CUDA_SUCCESS;
    for (object *o = driver.objects; o; o = o->next) {
        stream *s = (stream *)o;
        if (o->kind != STREAM || s->capture != CAPTURE_ACTIVE) continue;
        if ((capture_mode == CAPTURE_GLOBAL && s->capture_mode == CAPTURE_GLOBAL) ||
            (capture_mode != CAPTURE_RELAXED && s->capture_mode != CAPTURE_RELAXED &&
             pthread_equal(s->capture_thread, pthread_self())))
            result = capture_break(s, CAPTURE_UNSUPPORTED);
    }
    return result;
}

/* The legacy default stream waits for every blocking stream, which a capture can't express. */
static int default_stream_forbidden(void) {
    for (object *o = driver.objects; o; o = o->next) {
        stream *s = (stream *)o;
        if (o->kind == STREAM && s->capture == CAPTURE_ACTIVE && !(s->flags & 1)) return capture_break(s, CAPTURE_IMPLICIT);
    }
    return CUDA_SUCCESS;
}

/* Runs the operation, or records it where the stream captures. */
int submit(const operation *o, const void *handle) {
    stream *s;
    int result = stream_find(handle, &s);
    if (!result && !s) result = default_stream_forbidden();
    if (result) return result;
    if (s && s->capture == CAPTURE_BROKEN) return CAPTURE_INVALIDATED;
    if (s && s->capture == CAPTURE_ACTIVE) return graph_append(s->captured, o);
    return run_operation(o, s);
}

int synchronise(void) {
    const int result = driver.sticky;
    driver.sticky = CUDA_SUCCESS;
    chain_end();
    return result;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- streams and events ---- */
EXPORT int cuStreamCreate(void **created, unsigned flags) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result && (!created || flags > 1)) result = INVALID_VALUE;
    if (result) return unlock(result);
    s = (stream *)object_add(sizeof *s, STREAM);
    if (!s) return unlock(OUT_OF_MEMORY);
    s->flags = flags;
    *created = s;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuStreamDestroy_v2(void *handle) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result) result = stream_find(handle, &s);
    if (!result && !s) result = INVALID_HANDLE;
    if (result) return unlock(result);
    if (s->captured) graph_free(s->captured);
    if (driver.chain == s) chain_end();
    object_remove(s);
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuStreamSynchronize(void *handle) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result) result = stream_find(handle, &s);
    if (!result && s && s->capture) result = capture_break(s, CAPTURE_UNSUPPORTED);
    if (!result) result = capture_forbids();
    if (!result) result = synchronise();
    return unlock(result);
}

/* There is nothing that could be unfinished once the work has been done. */
EXPORT int cuStreamQuery(void *handle) { return cuStreamSynchronize(handle); }

EXPORT int cuStreamBeginCapture_v2(void *handle, int mode) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result) result = stream_find(handle, &s);
    if (!result && !s) result = CAPTURE_UNSUPPORTED; /* the legacy stream can't be captured */
    if (!result && s->capture) result = ILLEGAL_STATE;
    if (!result && (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED)) result = INVALID_VALUE;
    if (result) return unlock(result);
    s->captured = (graph *)object_add(sizeof(graph), GRAPH);
    if (!s->captured) return unlock(OUT_OF_MEMORY);
    s->capture = CAPTURE_ACTIVE;
    s->capture_mode = mode;
    s->capture_thread = pthread_self();
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuStreamEndCapture(void *handle, void **captured) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result) result = stream_find(handle, &s);
    if (!result && !captured) result = INVALID_VALUE;
    if (!result && (!s || !s->capture)) result = ILLEGAL_STATE;
    if (!result && s->capture_mode != CAPTURE_RELAXED && !pthread_equal(s->capture_thread, pthread_self()))
        result = capture_break(s, CAPTURE_WRONG_THREAD);
    if (result) return unlock(result);
    if (s->capture == CAPTURE_BROKEN) {
        graph_free(s->captured);
        *captured = NULL;
        result = CAPTURE_INVALIDATED;
    } else {
        *captured = s->captured;
    }
    s->captured = NULL;
    s->capture = CAPTURE_NONE;
    return unlock(result);
}

EXPORT int cuStreamIsCapturing(void *handle, int *status) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result) result = stream_find(handle, &s);
    if (!result && !status) result = INVALID_VALUE;
    if (!result && !s) result = default_stream_forbidden();
    if (!result) *status = s ? s->capture : CAPTURE_NONE;
    return unlock(result);
}

EXPORT int cuEventCreate(void **created, unsigned flags) {
    event *e;
    int result;
    lock();
    (void)flags;
    result = not_ready();
    if (!result && !created) result = INVALID_VALUE;
    if (result) return unlock(result);
    e = (event *)object_add(sizeof *e, EVENT);
    if (!e) return unlock(OUT_OF_MEMORY);
    *created = e;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuEventDestroy_v2(void *handle) {
    int result;
    lock();
    result = not_ready();
    if (!result && !object_find(handle, EVENT)) result = INVALID_HANDLE;
    if (!result) object_remove(handle);
    return unlock(result);
}

EXPORT int cuEventRecord(void *handle, void *stream_handle) {
    event *e;
    stream *s;
    int result;
    lock();
    result = not_ready();
    e = (event *)object_find(handle, EVENT);
    if (!result && !e) result = INVALID_HANDLE;
    if (!result) result = stream_find(stream_handle, &s);
    if (!result && !s) result = default_stream_forbidden();
    if (!result && s && s->capture == CAPTURE_BROKEN) result = CAPTURE_INVALIDATED;
    if (!result && !(s && s->capture)) {
        e->recorded = 1;
        e->milliseconds = now();
    }
    return unlock(result);
}

/* Work is done in the order in which it was given, whatever its stream: nothing needs to wait. Not while a stream is captured. */
EXPORT int cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    stream *s;
    int result;
    lock();
    result = not_ready();
    if (!result && !object_find(handle, EVENT)) result = INVALID_HANDLE;
    if (!result) result = stream_find(stream_handle, &s);
    if (!result && flags > 1) result = INVALID_VALUE;
    if (!result && s && s->capture) result = capture_break(s, CAPTURE_UNSUPPORTED);
    return unlock(result);
}

EXPORT int cuEventSynchronize(void *handle) {
    int result;
    lock();
    result = not_ready();
    if (!result && !object_find(handle, EVENT)) result = INVALID_HANDLE;
    if (!result) result = capture_forbids();
    if (!result) result = synchronise();
    return unlock(result);
}

static int event_elapsed(float *milliseconds, void *start, void *end) {
    const event *first, *last;
    int result;
    lock();
    result = not_ready();
    first = (const event *)object_find(start, EVENT);
    last = (const event *)object_find(end, EVENT);
    if (!result && !milliseconds) result = INVALID_VALUE;
    if (!result && (!first || !last || !first->recorded || !last->recorded)) result = INVALID_HANDLE;
    if (!result) *milliseconds = (float)(last->milliseconds - first->milliseconds);
    return unlock(result);
}

EXPORT int cuEventElapsedTime(float *milliseconds, void *start, void *end) { return event_elapsed(milliseconds, start, end); }
EXPORT int cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) { return event_elapsed(milliseconds, start, end); }

/* ---- graphs ---- */
EXPORT int cuGraphInstantiateWithFlags(void **made, void *handle, unsigned long long flags) {
    const graph *g;
    graph *exec;
    int result;
    lock();
    result = not_ready();
    g = (const graph *)object_find(handle, GRAPH);
    if (!result && !g) result = INVALID_HANDLE;
    if (!result && (!made || flags)) result = INVALID_VALUE;
    if (result) return unlock(result);
    exec = (graph *)object_add(sizeof *exec, GRAPH_EXEC);
    if (!exec) return unlock(OUT_OF_MEMORY);
    for (size_t i = 0; i < g->count && !result; i++) result = graph_append(exec, &g->operations[i]);
    if (result) graph_free(exec);
    else *made = exec;
    return unlock(result);
}

EXPORT int cuGraphLaunch(void *handle, void *stream_handle) {
    const graph *exec;
    int result;
    lock();
    result = not_ready();
    exec = (const graph *)object_find(handle, GRAPH_EXEC);
    if (!result && !exec) result = INVALID_HANDLE;
    if (!result) chain_end(); /* a graph as a whole waits for what is before it in the stream */
    for (size_t i = 0; !result && i < exec->count; i++) result = submit(&exec->operations[i], stream_handle);
    if (!result) chain_end();
    return unlock(result);
}

static int graph_destroy(void *handle, object_kind kind) {
    int result;
    lock();
    result = not_ready();
    if (!result && !object_find(handle, kind)) result = INVALID_HANDLE;
    if (!result) graph_free((graph *)handle);
    return unlock(result);
}

EXPORT int cuGraphExecDestroy(void *handle) { return graph_destroy(handle, GRAPH_EXEC); }
EXPORT int cuGraphDestroy(void *handle) { return graph_destroy(handle, GRAPH); }
