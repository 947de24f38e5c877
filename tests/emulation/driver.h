/*
  driver.h: what the parts of the emulated driver share: objects and their handles, the driver's state, and what each part offers
  the others. The machine is known to modules.c alone, which gives it the launches.
*/
#ifndef EMULATION_DRIVER_H
#define EMULATION_DRIVER_H

#include "launch.h"
#include "machine.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
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
    unsigned shared_bytes, most_dynamic_bytes;
} kernel;

typedef struct operation { /* of a stream or a graph */
    enum { LAUNCH, COPY, FILL } kind;
    kernel *kernel;
    unsigned grid_x, grid_y, threads, dynamic_bytes;
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

typedef struct driver_state {
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
} driver_state;
extern driver_state driver;

/* ---- driver.c ---- */
void lock(void);
int unlock(int result); /* returns it */
int usable(void);
int not_ready(void);    /* why a call that needs a context can't go on */
void *object_add(size_t size, object_kind kind);
void *object_find(const void *handle, object_kind kind);
void object_remove(void *removed);

/* ---- memory.c ---- */
int is_device_memory(const void *address, size_t size);
void chain_end(void);   /* everything submitted so far has finished: nothing can overlap what follows */
void snapshot(void);    /* before a kernel */
void settle_snapshot(int keep_old); /* after it */
void find_changes(void);
void forget_changes(void);
int show_old_memory(void); /* as emulation_launch says */
int hide_old_memory(void);

/* ---- streams.c ---- */
int capture_forbids(void); /* for calls that are illegal while a capture goes on */
int submit(const operation *o, const void *handle); /* runs the operation, or records it where the stream captures */
int synchronise(void);
void operation_free(operation *o);

/* ---- modules.c ---- */
int run_launch(const operation *o, stream *s);

#endif
