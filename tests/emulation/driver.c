/*
  driver.c: libcuda.so.1 of the emulation: the part of the CUDA driver API that the library, its tests and its examples
  call, over the machine of machine.c. One device, one address space (device memory is host memory of its own), work done
  at once and in order. Stream capture and graphs follow the real rules about what is legal when. How threads run belongs
  in machine.c.

  Stricter than a GPU: every address is checked against the table of allocations, new memory is filled with 0xA5, and a
  kernel that hasn't been loaded can't be launched while a stream captures.
*/
#define _GNU_SOURCE
#include "launch.h"
#include "machine.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_SNAPSHOT_BYTES ((size_t)64 << 20) /* more device memory than this isn't shown as it was */
#define POISON 0xa5
#define FIRST_ALIGNMENT 256u
#define SHARED_BYTES 233472 /* of a multiprocessor; each block takes 1 KB beside its own */

enum {
    CUDA_SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_IMPLICIT = 906,
    CAPTURE_WRONG_THREAD = 908
};
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED };
enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_BROKEN };
#define PROGRAMMATIC_STREAM_SERIALIZATION 6

typedef unsigned long long device_address;

/* ---- objects; a handle is an object's address, and is looked up before it is used ---- */
typedef enum object_kind { STREAM, EVENT, GRAPH, GRAPH_EXEC, LIBRARY, KERNEL, CONTEXT } object_kind;
typedef struct object {
    struct object *next;
    object_kind kind;
} object;

typedef struct library {
    object head;
    void *handle;
    char path[512];
} library;

typedef struct kernel {
    object head;
    library *library;
    char name[128];
    void (*function)(const void *);
    const emulation_kernel *info;
    int loaded;
    unsigned shared_bytes;
} kernel;

typedef struct operation { /* of a stream or a graph */
    enum { LAUNCH, COPY, FILL } kind;
    kernel *kernel;
    unsigned grid_x, grid_y, threads;
    int dependent;
    void *arguments; /* a copy of exactly their size */
    void *to;
    const void *from;
    size_t size;
    unsigned value, value_size;
} operation;

typedef struct graph { /* GRAPH or GRAPH_EXEC */
    object head;
    operation *operations;
    size_t count, capacity;
} graph;

typedef struct stream {
    object head;
    unsigned flags;
    int capture, capture_mode;
    pthread_t capture_thread;
    graph *captured;
} stream;

typedef struct event {
    object head;
    int recorded;
    double milliseconds;
} event;

typedef struct allocation {
    char *address;
    size_t size;
    char *old;    /* content before the kernels that may still run; NULL: none */
    char *before; /* content before the kernel that runs */
} allocation;

typedef struct change { /* bytes that the kernels before this one changed */
    char *address;
    const char *old;
    char *now;
    size_t size;
} change;

static struct {
    pthread_mutex_t mutex;
    pid_t process; /* that called cuInit; 0: none has */
    unsigned target;
    uint64_t seed, launches;
    object *objects;
    object context;
    int retained;
    int sticky; /* the failure that the next synchronisation reports */
    allocation *allocations; /* by address */
    size_t num_allocations, allocations_capacity, device_bytes;
    stream *chain; /* stream whose last operation was a kernel */
    int chain_active;
    change *changes;
    size_t num_changes, changes_capacity, changed_bytes, show_budget;
    char folder[256]; /* of the kernel libraries; empty: not made yet */
    unsigned num_libraries;
} d = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static __thread object *current_contexts[16];
static __thread unsigned num_current;
static __thread int capture_mode = CAPTURE_GLOBAL;

static void lock(void) { pthread_mutex_lock(&d.mutex); }
static int unlock(int result) {
    pthread_mutex_unlock(&d.mutex);
    return result;
}

static int usable(void) { return d.process && d.process == getpid(); }
static object *current_context(void) { return num_current ? current_contexts[num_current - 1] : NULL; }
/* Why a call that needs a context can't go on. */
static int not_ready(void) { return !usable() ? NOT_INITIALIZED : !current_context() ? INVALID_CONTEXT : CUDA_SUCCESS; }

static void *object_add(size_t size, object_kind kind) {
    object *made = (object *)calloc(1, size);
    if (!made) return NULL;
    made->kind = kind;
    made->next = d.objects;
    d.objects = made;
    return made;
}

static void *object_find(const void *handle, object_kind kind) {
    for (object *o = d.objects; o; o = o->next)
        if (o == handle && o->kind == kind) return o;
    return NULL;
}

static void object_remove(void *removed) {
    object **link = &d.objects;
    while (*link != removed) link = &(*link)->next;
    *link = (*link)->next;
    free(removed);
}

/* ---- device memory ---- */
static size_t allocation_after(const void *address) { /* index of the first allocation that starts after it */
    size_t low = 0, high = d.num_allocations;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if ((uintptr_t)d.allocations[middle].address <= (uintptr_t)address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int is_device_memory(const void *address, size_t size) {
    const size_t i = allocation_after(address);
    size_t offset;
    if (!i) return 0;
    offset = (uintptr_t)address - (uintptr_t)d.allocations[i - 1].address;
    return offset <= d.allocations[i - 1].size && size <= d.allocations[i - 1].size - offset;
}

static void forget_snapshot(allocation *a) {
    free(a->old);
    free(a->before);
    a->old = a->before = NULL;
}

/* Everything submitted so far has finished: nothing can overlap what follows. */
static void chain_end(void) {
    for (size_t i = 0; i < d.num_allocations; i++) forget_snapshot(&d.allocations[i]);
    d.chain_active = 0;
}

/* ---- what a dependent launch sees before it waits ----
   A kernel under dependent launch may start while the one before it still runs, or even one further back where that one
   let it start before it had waited itself. So until a block waits, it is shown memory as it was before those kernels. */
static void snapshot(void) {
    for (size_t i = 0; i < d.num_allocations; i++) {
        allocation *a = &d.allocations[i];
        a->before = d.device_bytes <= MAX_SNAPSHOT_BYTES ? (char *)malloc(a->size) : NULL;
        if (a->before) memcpy(a->before, a->address, a->size);
    }
}

static void settle_snapshot(int keep_old) {
    for (size_t i = 0; i < d.num_allocations; i++) {
        allocation *a = &d.allocations[i];
        if (keep_old && a->old) {
            free(a->before);
        } else {
            free(a->old);
            a->old = a->before;
        }
        a->before = NULL;
    }
}

static void forget_changes(void) {
    for (size_t i = 0; i < d.num_changes; i++) free(d.changes[i].now);
    d.num_changes = d.changed_bytes = 0;
}

static int add_change(char *address, const char *old, size_t size) {
    change *c;
    if (d.num_changes == d.changes_capacity) {
        const size_t capacity = d.changes_capacity ? 2 * d.changes_capacity : 64;
        change *grown = (change *)realloc(d.changes, capacity * sizeof *grown);
        if (!grown) return 0;
        d.changes = grown;
        d.changes_capacity = capacity;
    }
    c = &d.changes[d.num_changes];
    c->now = (char *)malloc(size);
    if (!c->now) return 0;
    c->address = address;
    c->old = old;
    c->size = size;
    d.num_changes++;
    d.changed_bytes += size;
    return 1;
}

static void find_changes(void) {
    const size_t step = 256;
    forget_changes();
    for (size_t i = 0; i < d.num_allocations; i++) {
        const allocation *a = &d.allocations[i];
        size_t start = 0, end = 0; /* of the span of differing steps so far */
        if (!a->old) continue;
        for (size_t at = 0; at < a->size; at += step) {
            const size_t size = a->size - at < step ? a->size - at : step;
            if (!memcmp(a->address + at, a->old + at, size)) continue;
            if (end != at) {
                if (end > start && !add_change(a->address + start, a->old + start, end - start)) return;
                start = at;
            }
            end = at + size;
        }
        if (end > start && !add_change(a->address + start, a->old + start, end - start)) return;
    }
    d.show_budget = (size_t)32 << 20;
}

static int show_old_memory(void) {
    if (!d.num_changes || d.show_budget < d.changed_bytes) return 0;
    d.show_budget -= d.changed_bytes;
    for (size_t i = 0; i < d.num_changes; i++) {
        const change *c = &d.changes[i];
        memcpy(c->now, c->address, c->size);
        memcpy(c->address, c->old, c->size);
    }
    return 1;
}

static int hide_old_memory(void) {
    int untouched = 1;
    for (size_t i = 0; i < d.num_changes; i++) {
        const change *c = &d.changes[i];
        if (memcmp(c->address, c->old, c->size)) untouched = 0;
        memcpy(c->address, c->now, c->size);
    }
    return untouched;
}

/* ---- running ---- */
static int run_launch(const operation *o, stream *s) {
    emulation_launch launch;
    emulation_result result;
    if (d.chain_active && d.chain != s) chain_end(); /* streams aren't emulated as concurrent: work is done in order */
    memset(&launch, 0, sizeof launch);
    launch.name = o->kernel->name;
    launch.kernel = o->kernel->function;
    launch.arguments = o->arguments;
    launch.grid_x = o->grid_x;
    launch.grid_y = o->grid_y;
    launch.threads = o->threads;
    launch.dependent = o->dependent;
    launch.is_device_memory = is_device_memory;
    if (o->dependent && d.chain_active) {
        find_changes();
        launch.show_old_memory = show_old_memory;
        launch.hide_old_memory = hide_old_memory;
    }
    snapshot();
    result = emulation_run(&launch, d.seed * 1000003u + d.launches++);
    forget_changes();
    settle_snapshot(o->dependent && result.early);
    d.chain = s;
    d.chain_active = 1;
    if (result.shared_bytes > o->kernel->shared_bytes) o->kernel->shared_bytes = result.shared_bytes;
    if (result.failed) d.sticky = LAUNCH_FAILED;
    return result.failed ? LAUNCH_FAILED : CUDA_SUCCESS;
}

static int run_operation(const operation *o, stream *s) {
    if (d.sticky) return d.sticky;
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

static void operation_free(operation *o) { free(o->arguments); }

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
static int capture_forbids(void) {
    int result = CUDA_SUCCESS;
    for (object *o = d.objects; o; o = o->next) {
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
    for (object *o = d.objects; o; o = o->next) {
        stream *s = (stream *)o;
        if (o->kind == STREAM && s->capture == CAPTURE_ACTIVE && !(s->flags & 1)) return capture_break(s, CAPTURE_IMPLICIT);
    }
    return CUDA_SUCCESS;
}

/* Runs the operation, or records it where the stream captures. */
static int submit(const operation *o, const void *handle) {
    stream *s;
    int result = stream_find(handle, &s);
    if (!result && !s) result = default_stream_forbidden();
    if (result) return result;
    if (s && s->capture == CAPTURE_BROKEN) return CAPTURE_INVALIDATED;
    if (s && s->capture == CAPTURE_ACTIVE) return graph_append(s->captured, o);
    return run_operation(o, s);
}

static int synchronise(void) {
    const int result = d.sticky;
    d.sticky = CUDA_SUCCESS;
    chain_end();
    return result;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- of the emulation itself ---- */
EXPORT unsigned moer_emulation_errors(void) { return emulation_error_count(); }
EXPORT const char *moer_emulation_last_error(void) { return emulation_error_text(); }
EXPORT unsigned long long moer_emulation_launches(void) { return d.launches; }
EXPORT void moer_emulation_set_seed(unsigned long long seed) {
    lock();
    d.seed = seed;
    d.launches = 0;
    unlock(0);
}

/* ---- initialisation, device, context ---- */
EXPORT int cuInit(unsigned flags) {
    const char *target = getenv("MOE_ROUTE_EMULATION_TARGET"), *seed = getenv("MOE_ROUTE_EMULATION_SEED");
    lock();
    if (flags) return unlock(INVALID_VALUE);
    if (d.process) return unlock(usable() ? CUDA_SUCCESS : NOT_INITIALIZED);
    d.process = getpid();
    d.target = target ? (unsigned)strtoul(target, NULL, 10) : 90;
    d.seed = seed ? strtoull(seed, NULL, 10) : 1;
    d.context.kind = CONTEXT;
    d.context.next = d.objects;
    d.objects = &d.context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuDriverGetVersion(int *version) {
    if (!version) return INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}

static const struct {
    int result;
    const char *name, *text;
} result_names[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "dependency created on the implicit stream by a capture"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a capture from another thread"},
};

static int result_text(int result, const char **text, int want_name) {
    if (!text) return INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof result_names / sizeof *result_names; i++)
        if (result_names[i].result == result) *text = want_name ? result_names[i].name : result_names[i].text;
    return *text ? CUDA_SUCCESS : INVALID_VALUE;
}

EXPORT int cuGetErrorName(int result, const char **text) { return result_text(result, text, 1); }
EXPORT int cuGetErrorString(int result, const char **text) { return result_text(result, text, 0); }

EXPORT int cuDeviceGetCount(int *count) {
    if (!usable()) return NOT_INITIALIZED;
    if (!count) return INVALID_VALUE;
    *count = 1;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    if (!usable()) return NOT_INITIALIZED;
    if (!device) return INVALID_VALUE;
    if (ordinal) return INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
    if (!usable()) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    if (!name || size <= 0) return INVALID_VALUE;
    snprintf(name, (size_t)size, "emulated GPU");
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const struct {
        int attribute, value;
    } values[] = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32},
                  {12, 65536}, {13, 1000000}, {16, 4}, {38, 4194304}, {39, 2048}, {81, SHARED_BYTES}, {82, 65536}, {97, 49152}};
    if (!usable()) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    if (!value) return INVALID_VALUE;
    if (attribute == 75 || attribute == 76) { /* compute capability */
        *value = (int)(attribute == 75 ? d.target / 10 : d.target % 10);
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i].attribute == attribute) {
            *value = values[i].value;
            return CUDA_SUCCESS;
        }
    return INVALID_VALUE;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (device) return unlock(INVALID_DEVICE);
    if (!context) return unlock(INVALID_VALUE);
    d.retained++;
    *context = &d.context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (device) return unlock(INVALID_DEVICE);
    if (!d.retained) return unlock(INVALID_CONTEXT);
    d.retained--;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    object *made;
    lock();
    (void)flags;
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (device) return unlock(INVALID_DEVICE);
    if (!context || num_current == sizeof current_contexts / sizeof *current_contexts) return unlock(INVALID_VALUE);
    made = (object *)object_add(sizeof *made, CONTEXT);
    if (!made) return unlock(OUT_OF_MEMORY);
    *context = current_contexts[num_current++] = made;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxDestroy_v2(void *context) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (context == &d.context || !object_find(context, CONTEXT)) return unlock(INVALID_CONTEXT);
    if (current_context() == context) num_current--;
    object_remove(context);
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxGetCurrent(void **context) {
    if (!usable()) return NOT_INITIALIZED;
    if (!context) return INVALID_VALUE;
    *context = current_context();
    return CUDA_SUCCESS;
}

EXPORT int cuCtxGetDevice(int *device) {
    const int result = not_ready();
    if (result) return result;
    if (!device) return INVALID_VALUE;
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (!object_find(context, CONTEXT)) return unlock(INVALID_CONTEXT);
    if (num_current == sizeof current_contexts / sizeof *current_contexts) return unlock(INVALID_VALUE);
    current_contexts[num_current++] = (object *)context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxPopCurrent_v2(void **context) {
    const int result = not_ready();
    if (result) return result;
    if (context) *context = current_context();
    num_current--;
    return CUDA_SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (context && !object_find(context, CONTEXT)) return unlock(INVALID_CONTEXT);
    if (num_current) num_current--;
    if (context) current_contexts[num_current++] = (object *)context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxSynchronize(void) {
    int result;
    lock();
    result = not_ready();
    if (!result) result = capture_forbids();
    if (!result) result = synchronise();
    return unlock(result);
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- memory ---- */
EXPORT int cuMemAlloc_v2(device_address *address, size_t size) {
    void *memory = NULL;
    size_t i;
    int result;
    lock();
    result = not_ready();
    if (!result && (!address || !size)) result = INVALID_VALUE;
    if (!result) result = capture_forbids();
    if (result) return unlock(result);
    if (d.num_allocations == d.allocations_capacity) {
        const size_t capacity = d.allocations_capacity ? 2 * d.allocations_capacity : 64;
        allocation *grown = (allocation *)realloc(d.allocations, capacity * sizeof *grown);
        if (!grown) return unlock(OUT_OF_MEMORY);
        d.allocations = grown;
        d.allocations_capacity = capacity;
    }
    if (posix_memalign(&memory, FIRST_ALIGNMENT, size)) return unlock(OUT_OF_MEMORY);
    memset(memory, POISON, size);
    i = allocation_after(memory);
    memmove(&d.allocations[i + 1], &d.allocations[i], (d.num_allocations - i) * sizeof *d.allocations);
    memset(&d.allocations[i], 0, sizeof d.allocations[i]);
    d.allocations[i].address = (char *)memory;
    d.allocations[i].size = size;
    d.num_allocations++;
    d.device_bytes += size;
    *address = (device_address)(uintptr_t)memory;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuMemFree_v2(device_address address) {
    size_t i;
    int result;
    lock();
    result = not_ready();
    if (!result) result = capture_forbids();
    if (result || !address) return unlock(result);
    i = allocation_after((void *)(uintptr_t)address);
    if (!i || (uintptr_t)d.allocations[i - 1].address != address) return unlock(INVALID_VALUE);
    i--;
    chain_end();
    d.device_bytes -= d.allocations[i].size;
    free(d.allocations[i].address);
    d.num_allocations--;
    memmove(&d.allocations[i], &d.allocations[i + 1], (d.num_allocations - i) * sizeof *d.allocations);
    return unlock(CUDA_SUCCESS);
}

static operation copy_operation(const void *to, const void *from, size_t size) {
    operation o;
    memset(&o, 0, sizeof o);
    o.kind = COPY;
    memcpy(&o.to, &to, sizeof to);
    o.from = from;
    o.size = size;
    return o;
}

/* Ranges of device memory must be that; host memory is AddressSanitizer's concern. */
static int transfer(device_address to, device_address from, int to_device, int from_device, size_t size, const void *s, int async) {
    void *to_memory = (void *)(uintptr_t)to;
    const void *from_memory = (const void *)(uintptr_t)from;
    const operation o = copy_operation(to_memory, from_memory, size);
    int result;
    lock();
    result = not_ready();
    if (!result && ((to_device && !is_device_memory(to_memory, size)) || (from_device && !is_device_memory(from_memory, size))))
        result = INVALID_VALUE;
    if (!result && !async) result = capture_forbids();
    if (!result) result = submit(&o, s);
    if (!result && !async) result = synchronise();
    return unlock(result);
}

EXPORT int cuMemcpyHtoD_v2(device_address to, const void *from, size_t size) {
    return transfer(to, (uintptr_t)from, 1, 0, size, NULL, 0);
}
EXPORT int cuMemcpyDtoH_v2(void *to, device_address from, size_t size) {
    return transfer((uintptr_t)to, from, 0, 1, size, NULL, 0);
}
EXPORT int cuMemcpyDtoD_v2(device_address to, device_address from, size_t size) {
    return transfer(to, from, 1, 1, size, NULL, 0);
}
EXPORT int cuMemcpyHtoDAsync_v2(device_address to, const void *from, size_t size, const void *s) {
    return transfer(to, (uintptr_t)from, 1, 0, size, s, 1);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, device_address from, size_t size, const void *s) {
    return transfer((uintptr_t)to, from, 0, 1, size, s, 1);
}
EXPORT int cuMemcpyDtoDAsync_v2(device_address to, device_address from, size_t size, const void *s) {
    return transfer(to, from, 1, 1, size, s, 1);
}

static int fill(device_address to, unsigned value, unsigned value_size, size_t count, const void *s, int async) {
    operation o;
    int result;
    memset(&o, 0, sizeof o);
    o.kind = FILL;
    o.to = (void *)(uintptr_t)to;
    o.size = count * value_size;
    o.value = value;
    o.value_size = value_size;
    lock();
    result = not_ready();
    if (!result && (to % value_size || !is_device_memory(o.to, o.size))) result = INVALID_VALUE;
    if (!result && !async) result = capture_forbids();
    if (!result) result = submit(&o, s);
    return unlock(result);
}

EXPORT int cuMemsetD8_v2(device_address to, unsigned char value, size_t count) { return fill(to, value, 1, count, NULL, 0); }
EXPORT int cuMemsetD32_v2(device_address to, unsigned value, size_t count) { return fill(to, value, 4, count, NULL, 0); }
EXPORT int cuMemsetD8Async(device_address to, unsigned char value, size_t count, const void *s) {
    return fill(to, value, 1, count, s, 1);
}
EXPORT int cuMemsetD32Async(device_address to, unsigned value, size_t count, const void *s) {
    return fill(to, value, 4, count, s, 1);
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
    if (d.chain == s) chain_end();
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

/* ---- kernels ---- */
static void remove_folder(void) {
    object *o;
    if (!d.folder[0] || d.process != getpid()) return;
    for (o = d.objects; o; o = o->next)
        if (o->kind == LIBRARY) unlink(((library *)o)->path);
    rmdir(d.folder);
    d.folder[0] = 0;
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static int make_folder(void) {
    const char *parent = getenv("TMPDIR");
    if (d.folder[0]) return 1;
    snprintf(d.folder, sizeof d.folder, "%s/moe_route_emulation.XXXXXX", parent && strlen(parent) < 200 ? parent : "/tmp");
    if (!mkdtemp(d.folder)) {
        d.folder[0] = 0;
        return 0;
    }
    atexit(remove_folder);
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(remove_folder);
    return 1;
}

/* Size of an image, which the call doesn't tell: the section headers are last. 0: no library of this host. */
static size_t image_size(const void *image) {
    Elf64_Ehdr header, host;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) || header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_type != ET_DYN) return 0;
    {
        Dl_info info;
        if (!dladdr((void *)&d, &info) || !info.dli_fbase) return 0;
        memcpy(&host, info.dli_fbase, sizeof host);
    }
    if (header.e_machine != host.e_machine) return 0;
    return (size_t)header.e_shoff + (size_t)header.e_shnum * header.e_shentsize;
}

static int write_file(const char *path, const void *content, size_t size) {
    const int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    const char *at = (const char *)content;
    if (file < 0) return 0;
    while (size) {
        const ssize_t written = write(file, at, size);
        if (written <= 0) break;
        at += written;
        size -= (size_t)written;
    }
    return !close(file) && !size;
}

/* The file stays until the library is unloaded, so that sanitizers can name source lines. */
static int library_open(library *l, const void *image, size_t size) {
    const emulation_target_info *target;
    void (*attach)(emulation_machine *);
    void *symbol;
    snprintf(l->path, sizeof l->path, "%s/kernel_%u.so", d.folder, d.num_libraries++);
    if (!write_file(l->path, image, size)) return OUT_OF_MEMORY;
    l->handle = dlopen(l->path, RTLD_NOW | RTLD_LOCAL);
    if (!l->handle) {
        fprintf(stderr, "emulation: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    symbol = dlsym(l->handle, "emulation_attach");
    target = (const emulation_target_info *)dlsym(l->handle, "emulation_target");
    if (!symbol || !target) return INVALID_IMAGE;
    if (target->is_ptx ? target->target > d.target : target->target / 10 != d.target / 10 || target->target > d.target)
        return NO_BINARY_FOR_GPU;
    memcpy(&attach, &symbol, sizeof symbol);
    attach(emulation_machine_of_process());
    return CUDA_SUCCESS;
}

static void library_close(library *l) {
    if (l->handle) dlclose(l->handle);
    unlink(l->path);
    object_remove(l);
}

EXPORT int cuLibraryLoadData(void **loaded, const void *image, const int *options, void **option_values, unsigned num_options,
                             const int *library_options, void **library_option_values, unsigned num_library_options) {
    library *l;
    size_t size;
    int result = CUDA_SUCCESS;
    (void)options, (void)option_values, (void)library_options, (void)library_option_values;
    lock();
    if (!usable()) result = NOT_INITIALIZED;
    else if (!loaded || !image || num_options || num_library_options) result = INVALID_VALUE;
    if (!result) result = capture_forbids();
    if (result) return unlock(result);
    size = image_size(image);
    if (!size) return unlock(INVALID_IMAGE);
    if (!make_folder()) return unlock(OUT_OF_MEMORY);
    l = (library *)object_add(sizeof *l, LIBRARY);
    if (!l) return unlock(OUT_OF_MEMORY);
    result = library_open(l, image, size);
    if (result) library_close(l);
    else *loaded = l;
    return unlock(result);
}

EXPORT int cuLibraryUnload(void *handle) {
    library *l;
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    l = (library *)object_find(handle, LIBRARY);
    if (!l) return unlock(INVALID_HANDLE);
    for (object *o = d.objects, *next; o; o = next) {
        next = o->next;
        if (o->kind == KERNEL && ((kernel *)o)->library == l) object_remove(o);
    }
    library_close(l);
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuLibraryGetKernel(void **found, void *handle, const char *name) {
    library *l;
    kernel *k;
    void *function;
    const emulation_kernel *info;
    char info_name[160];
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    l = (library *)object_find(handle, LIBRARY);
    if (!l) return unlock(INVALID_HANDLE);
    if (!found || !name || strlen(name) >= sizeof k->name) return unlock(INVALID_VALUE);
    for (object *o = d.objects; o; o = o->next) {
        k = (kernel *)o;
        if (o->kind == KERNEL && k->library == l && !strcmp(k->name, name)) {
            *found = k;
            return unlock(CUDA_SUCCESS);
        }
    }
    snprintf(info_name, sizeof info_name, "%s_kernel", name);
    function = dlsym(l->handle, name);
    info = (const emulation_kernel *)dlsym(l->handle, info_name);
    if (!function || !info) return unlock(NOT_FOUND);
    k = (kernel *)object_add(sizeof *k, KERNEL);
    if (!k) return unlock(OUT_OF_MEMORY);
    k->library = l;
    snprintf(k->name, sizeof k->name, "%s", name);
    memcpy(&k->function, &function, sizeof function);
    k->info = info;
    *found = k;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuKernelGetFunction(void **function, void *handle) {
    int result;
    lock();
    result = not_ready();
    if (!result && !object_find(handle, KERNEL)) result = INVALID_HANDLE;
    if (!result && !function) result = INVALID_VALUE;
    if (!result) *function = handle;
    return unlock(result);
}

static int load_kernel(kernel *k) {
    int result = CUDA_SUCCESS;
    if (!k->loaded) result = capture_forbids();
    if (!result) k->loaded = 1;
    return result;
}

EXPORT int cuFuncLoad(void *handle) {
    kernel *k;
    int result;
    lock();
    result = not_ready();
    k = (kernel *)object_find(handle, KERNEL);
    if (!result && !k) result = INVALID_HANDLE;
    if (!result) result = load_kernel(k);
    return unlock(result);
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *handle) {
    const kernel *k;
    int result;
    lock();
    result = not_ready();
    k = (const kernel *)object_find(handle, KERNEL);
    if (!result && !k) result = INVALID_HANDLE;
    if (!result && (!value || attribute < 0 || attribute > 6)) result = INVALID_VALUE;
    if (result) return unlock(result);
    switch (attribute) {
    case 0: *value = (int)k->info->max_threads; break;
    case 1: *value = (int)k->shared_bytes; break; /* what its blocks have used so far */
    case 4: *value = 32; break;                   /* registers */
    case 5:
    case 6: *value = (int)d.target; break;
    default: *value = 0; break;
    }
    return unlock(CUDA_SUCCESS);
}

/* As far as threads and shared memory go. */
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *handle, int threads, size_t dynamic_bytes) {
    const kernel *k;
    int result, most;
    lock();
    result = not_ready();
    k = (const kernel *)object_find(handle, KERNEL);
    if (!result && !k) result = INVALID_HANDLE;
    if (!result && (!blocks || threads <= 0 || (unsigned)threads > k->info->max_threads || dynamic_bytes > SHARED_BYTES)) result = INVALID_VALUE;
    if (result) return unlock(result);
    most = SHARED_BYTES / ((int)k->shared_bytes + (int)dynamic_bytes + 1024);
    *blocks = 2048 / threads < most ? 2048 / threads : most;
    if (*blocks > 32) *blocks = 32;
    return unlock(CUDA_SUCCESS);
}

typedef struct launch_attribute {
    int id;
    char pad[4];
    union {
        char pad[64];
        int programmatic_stream_serialization;
    } value;
} launch_attribute;

typedef struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    const launch_attribute *attributes;
    unsigned num_attributes;
} launch_config;

static int refuse(const kernel *k, const char *why, unsigned value) {
    emulation_report("kernel %s: launch refused: %s: %u", k->name, why, value);
    return INVALID_VALUE;
}

static int check_launch(const kernel *k, const launch_config *config, int *dependent) {
    const unsigned threads = config->block[0];
    *dependent = 0;
    if (!threads || threads % 32) return refuse(k, "threads a block aren't a multiple of 32", threads);
    if (threads > k->info->max_threads) return refuse(k, "more threads a block than the kernel is declared for", threads);
    if (config->block[1] != 1 || config->block[2] != 1) return refuse(k, "blocks have one dimension", config->block[1]);
    if (!config->grid[0] || config->grid[0] > 2147483647u) return refuse(k, "blocks along x", config->grid[0]);
    if (!config->grid[1] || config->grid[1] > 65535u) return refuse(k, "blocks along y", config->grid[1]);
    if (config->grid[2] != 1) return refuse(k, "blocks along z", config->grid[2]);
    if (config->shared_bytes) return refuse(k, "kernels use no dynamic shared memory", config->shared_bytes);
    for (unsigned i = 0; i < config->num_attributes; i++) {
        if (config->attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION)
            return refuse(k, "launch attribute", (unsigned)config->attributes[i].id);
        *dependent = config->attributes[i].value.programmatic_stream_serialization != 0;
    }
    return *dependent && d.target < 90 ? NOT_SUPPORTED : CUDA_SUCCESS;
}

EXPORT int cuLaunchKernelEx(const launch_config *config, void *function, void **parameters, void **extra) {
    operation o;
    kernel *k;
    int result;
    lock();
    result = not_ready();
    k = (kernel *)object_find(function, KERNEL);
    if (!result && !k) result = INVALID_HANDLE;
    if (!result && (!config || !parameters || extra)) result = INVALID_VALUE;
    if (!result && d.sticky) result = d.sticky;
    memset(&o, 0, sizeof o);
    if (!result) result = check_launch(k, config, &o.dependent);
    if (!result) result = load_kernel(k);
    if (result) return unlock(result);
    o.kind = LAUNCH;
    o.kernel = k;
    o.grid_x = config->grid[0];
    o.grid_y = config->grid[1];
    o.threads = config->block[0];
    o.arguments = malloc(k->info->argument_size);
    if (!o.arguments) return unlock(OUT_OF_MEMORY);
    memcpy(o.arguments, parameters[0], k->info->argument_size);
    result = submit(&o, config->stream);
    operation_free(&o);
    return unlock(result);
}
