/*
  stand_in_nccl.c: a libnccl.so.2 of a few functions for ranks on one machine, so that examples/expert_parallel runs over its
  NCCL path where there is neither NCCL nor a GPU (on the emulated driver). Bytes go through a shared file. As with a
  communicator that doesn't block, nothing is done within a call: ncclCommGetAsyncError() moves things on.

  STAND_IN_NCCL names what goes wrong on the rank of STAND_IN_NCCL_RANK: "init" (never ends), "send" (refused), "async" (an error
  while others wait), "silent" (stops moving things on).
*/
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { MAX_RANKS = 8, BOX = 65536, MAX_OPERATIONS = 256 };

typedef struct box { /* from one rank to another */
    uint64_t written, read;
    unsigned char bytes[BOX];
} box;

typedef struct shared {
    int joined;
    box boxes[MAX_RANKS][MAX_RANKS]; /* [from][to] */
} shared;

typedef struct operation {
    int sends, peer;
    size_t size, done;
    unsigned char *bytes;
    unsigned long long address; /* of the device: where received bytes go */
} operation;

typedef struct communicator {
    int rank, num_ranks, state, calls;
    shared *shared;
    operation operations[MAX_OPERATIONS];
    int num_operations;
} communicator;

typedef struct unique_id { char internal[128]; } unique_id;
typedef struct config { size_t size; unsigned magic, version; int blocking; } config;

static communicator *grouped; /* what the open group belongs to */

static int fails(const communicator *c, const char *how) {
    const char *wanted = getenv("STAND_IN_NCCL"), *rank = getenv("STAND_IN_NCCL_RANK");
    return wanted && strcmp(wanted, how) == 0 && c->rank == (rank ? atoi(rank) : 0);
}

static int (*driver(const char *name))(unsigned long long, ...) {
    int (*function)(unsigned long long, ...) = NULL;
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *symbol = library ? dlsym(library, name) : NULL;
    if (!symbol) abort();
    memcpy(&function, &symbol, sizeof function);
    return function;
}

int ncclGetVersion(int *version) {
    *version = 22800;
    return SUCCESS;
}

const char *ncclGetErrorString(int result) { return result == REMOTE_ERROR ? "remote error" : result == INVALID ? "invalid argument" : "stand-in error"; }
const char *ncclGetLastError(void *comm) { return comm ? "the stand-in was told to fail" : ""; }

int ncclGetUniqueId(unique_id *id) {
    int file;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/tmp/stand_in_nccl.XXXXXX");
    file = mkstemp(id->internal);
    if (file < 0 || ftruncate(file, (off_t)sizeof(shared)) != 0) return SYSTEM_ERROR;
    close(file);
    return SUCCESS;
}

int ncclCommInitRankConfig(void **comm, int num_ranks, unique_id id, int rank, config *given) {
    communicator *c = (communicator *)calloc(1, sizeof *c);
    const int file = open(id.internal, O_RDWR);
    *comm = c;
    if (!c) return SYSTEM_ERROR;
    c->rank = rank;
    c->num_ranks = num_ranks;
    if (file < 0 || num_ranks > MAX_RANKS || given->magic != 0xcafebeefu || given->size < sizeof *given || given->version < 21400 || given->blocking != 0) return c->state = INVALID;
    c->shared = (shared *)mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->shared == MAP_FAILED) return c->state = SYSTEM_ERROR;
    __atomic_add_fetch(&c->shared->joined, 1, __ATOMIC_SEQ_CST);
    if (rank == 0) { /* all have it open when all have joined; a rank that never comes leaves a file behind */
        int tries;
        for (tries = 0; tries < 2000 && __atomic_load_n(&c->shared->joined, __ATOMIC_SEQ_CST) < num_ranks; tries++) usleep(1000);
        unlink(id.internal);
    }
    return c->state = IN_PROGRESS;
}

/* Moves an operation on; those before it with the same peer are done. */
static void move(communicator *c, operation *o) {
    box *b = o->sends ? &c->shared->boxes[c->rank][o->peer] : &c->shared->boxes[o->peer][c->rank];
    while (o->done < o->size) {
        const uint64_t written = __atomic_load_n(&b->written, __ATOMIC_ACQUIRE), read = __atomic_load_n(&b->read, __ATOMIC_ACQUIRE);
        const uint64_t at = (o->sends ? written : read) % BOX, room = o->sends ? BOX - (written - read) : written - read;
        size_t part = o->size - o->done;
        if (room == 0) return;
        if (part > room) part = (size_t)room;
        if (part > BOX - at) part = (size_t)(BOX - at);
        if (o->sends) memcpy(b->bytes + at, o->bytes + o->done, part);
        else memcpy(o->bytes + o->done, b->bytes + at, part);
        o->done += part;
        if (o->sends) __atomic_store_n(&b->written, written + part, __ATOMIC_RELEASE);
        else __atomic_store_n(&b->read, read + part, __ATOMIC_RELEASE);
    }
    if (!o->sends && driver("cuMemcpyHtoD_v2")(o->address, o->bytes, o->size) != 0) c->state = SYSTEM_ERROR;
}

int ncclCommGetAsyncError(communicator *c, int *result) {
    int i, j, left = 0;
    c->calls++;
    if (fails(c, "async") && c->calls > 20) c->state = REMOTE_ERROR;
    if (c->state == IN_PROGRESS && __atomic_load_n(&c->shared->joined, __ATOMIC_SEQ_CST) == c->num_ranks && !fails(c, "init") && !(fails(c, "silent") && c->calls > 20)) {
        for (i = 0; i < c->num_operations; i++) {
            operation *o = &c->operations[i];
            for (j = 0; j < i; j++) /* in order with each peer */
                if (c->operations[j].peer == o->peer && c->operations[j].sends == o->sends && c->operations[j].done < c->operations[j].size) break;
            if (j == i && o->done < o->size) move(c, o);
            left += o->done < o->size;
        }
        if (!left && c->state == IN_PROGRESS) {
            for (i = 0; i < c->num_operations; i++) free(c->operations[i].bytes);
            c->num_operations = 0;
            c->state = SUCCESS;
        }
    }
    *result = c->state;
    return SUCCESS;
}

int ncclGroupStart(void) {
    grouped = NULL;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (!grouped) return SUCCESS;
    return grouped->state = IN_PROGRESS;
}

static operation *add(communicator *c, int sends, int peer, size_t size) {
    operation *o = &c->operations[c->num_operations];
    if (c->num_operations == MAX_OPERATIONS || peer < 0 || peer >= c->num_ranks) return NULL;
    memset(o, 0, sizeof *o);
    o->sends = sends;
    o->peer = peer;
    o->size = size;
    o->bytes = (unsigned char *)malloc(size);
    if (!o->bytes) return NULL;
    c->num_operations++;
    grouped = c;
    return o;
}

int ncclSend(const void *buffer, size_t count, int type, int peer, communicator *c, void *stream) {
    operation *o = type == 1 && !fails(c, "send") ? add(c, 1, peer, count) : NULL;
    if (!o) return INVALID;
    if (driver("cuStreamSynchronize")((unsigned long long)(uintptr_t)stream) != 0) return SYSTEM_ERROR; /* what is sent has been made */
    return driver("cuMemcpyDtoH_v2")((unsigned long long)(uintptr_t)o->bytes, (unsigned long long)(uintptr_t)buffer, count) == 0 ? SUCCESS : SYSTEM_ERROR;
}

int ncclRecv(void *buffer, size_t count, int type, int peer, communicator *c, void *stream) {
    operation *o = type == 1 ? add(c, 0, peer, count) : NULL;
    (void)stream;
    if (!o) return INVALID;
    o->address = (unsigned long long)(uintptr_t)buffer;
    return SUCCESS;
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *c, void *stream) {
    int r, result = SUCCESS;
    for (r = 0; r < c->num_ranks && result == SUCCESS; r++) {
        result = ncclSend((const char *)from + (size_t)r * count, count, type, r, c, stream);
        if (result == SUCCESS) result = ncclRecv((char *)to + (size_t)r * count, count, type, r, c, stream);
    }
    return result;
}

int ncclCommFinalize(communicator *c) {
    (void)c;
    return SUCCESS;
}

int ncclCommDestroy(communicator *c) {
    int i;
    for (i = 0; i < c->num_operations; i++) free(c->operations[i].bytes);
    if (c->shared && c->shared != MAP_FAILED) munmap(c->shared, sizeof(shared));
    free(c);
    return SUCCESS;
}

int ncclCommAbort(communicator *c) { return ncclCommDestroy(c); }
