/*
  exchange.h: how rows get from rank to rank: the interface, and its two implementations: sockets between processes for the
  CPU backend, and NCCL between GPUs. Neither waits for ever: what a rank that is gone or silent can't finish, ends with an
  error within the deadline.
*/
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "mesh.h"
#include "nccl_api.h"

typedef struct exchange {
    mesh *mesh;
    gpu_device *gpu;    /* NULL: sockets */
    nccl_api nccl;
    nccl_comm comm;
    int use_alltoall;   /* ncclAlltoAll where all parts are of one size and in order */
    unsigned alltoalls; /* how many calls of it there were */
    char error[640];
} exchange;

static int exchange_fail(exchange *x, const char *what, const char *why) {
    snprintf(x->error, sizeof x->error, "%s: %s", what, why && why[0] ? why : "no reason given");
    return -1;
}

/* ---- NCCL ---- */

static const char *exchange_nccl_reason(exchange *x, int result) {
    const char *last = x->nccl.ncclGetLastError(x->comm);
    return last && last[0] ? last : x->nccl.ncclGetErrorString(result);
}

/* Gives up the communicator, so that nothing of it waits any more, here or in a kernel on the GPU. Should that not return, the
   system ends the process. */
static void exchange_abort(exchange *x) {
    if (!x->comm) return;
    alarm(15);
    x->nccl.ncclCommAbort(x->comm);
    x->comm = NULL;
}

/* A communicator that doesn't block leaves its calls in progress: waits until this one is done, failed, or late. */
static int exchange_settle(exchange *x, const char *what, int result) {
    const double begin = mesh_now(), end = begin + x->mesh->deadline;
    char why[400];
    while (result == NCCL_IN_PROGRESS) {
        if (x->nccl.ncclCommGetAsyncError(x->comm, &result) != NCCL_SUCCESS) {
            exchange_fail(x, what, "NCCL doesn't tell its state");
            exchange_abort(x);
            return -1;
        }
        if (result != NCCL_IN_PROGRESS) break;
        if (mesh_check(x->mesh) || mesh_now() > end) {
            exchange_fail(x, what, mesh_now() > end ? "no end within the deadline" : x->mesh->error);
            exchange_abort(x);
            return -1;
        }
        if (mesh_now() - begin > 0.001) usleep(100); /* before, a step may be waiting for it */
    }
    if (result == NCCL_SUCCESS) return 0;
    snprintf(why, sizeof why, "%.380s", exchange_nccl_reason(x, result));
    exchange_fail(x, what, why);
    exchange_abort(x);
    return -1;
}

/* The GPU's context is current, and the mesh is connected. */
static int exchange_open_nccl(exchange *x, mesh *m, gpu_device *gpu, int use_alltoall) {
    static nccl_unique_id all[MESH_MAX_RANKS];
    nccl_unique_id mine;
    nccl_config config;
    int result;
    memset(x, 0, sizeof *x);
    x->mesh = m;
    x->gpu = gpu;
    x->use_alltoall = use_alltoall;
    memset(&mine, 0, sizeof mine);
    if (!nccl_load(&x->nccl)) {
        snprintf(x->error, sizeof x->error, "%s", x->nccl.error);
        return -1;
    }
    if (m->rank == 0 && x->nccl.ncclGetUniqueId(&mine) != NCCL_SUCCESS) return exchange_fail(x, "ncclGetUniqueId", x->nccl.ncclGetLastError(NULL));
    if (mesh_gather(m, &mine, all, sizeof mine)) return exchange_fail(x, "exchanging NCCL's id", m->error);
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.magic = NCCL_CONFIG_MAGIC;
    config.version = NCCL_CONFIG_VERSION;
    config.blocking = 0;
    config.cga_cluster_size = NCCL_UNDEFINED;
    result = x->nccl.ncclCommInitRankConfig(&x->comm, m->num_ranks, all[0], m->rank, &config);
    if (!x->comm) return exchange_fail(x, "ncclCommInitRankConfig", x->nccl.ncclGetErrorString(result));
    return exchange_settle(x, "ncclCommInitRankConfig", result);
}

/* Whether the array's parts are all of one size and lie one after the other, on both sides. */
static int exchange_is_even(const mesh_array *a, int num_ranks) {
    int r;
    for (r = 0; r < num_ranks; r++)
        if (a->send_size[r] != a->send_size[0] || a->recv_size[r] != a->send_size[0] || a->send_at[r] != (size_t)r * a->send_size[0] || a->recv_at[r] != (size_t)r * a->send_size[0]) return 0;
    return a->send_size[0] != 0;
}

/* Puts the transfers on the stream, as one group. */
static int exchange_begin_nccl(exchange *x, const mesh_array *arrays, int num_arrays, gpu_stream stream) {
    int i, r, result = x->nccl.ncclGroupStart(), ended;
    if (result != NCCL_SUCCESS) return exchange_settle(x, "ncclGroupStart", result);
    for (i = 0; i < num_arrays; i++) {
        const mesh_array *a = &arrays[i];
        if (x->use_alltoall && x->nccl.ncclAlltoAll && exchange_is_even(a, x->mesh->num_ranks)) {
            const int done = x->nccl.ncclAlltoAll(a->send, a->recv, a->send_size[0], NCCL_UINT8, x->comm, stream);
            if (done != NCCL_SUCCESS && done != NCCL_IN_PROGRESS) result = done;
            x->alltoalls++;
            continue;
        }
        for (r = 0; r < x->mesh->num_ranks; r++) { /* parts of no bytes are so on both sides */
            int sent = NCCL_SUCCESS, received = NCCL_SUCCESS;
            if (a->send_size[r]) sent = x->nccl.ncclSend(a->send + a->send_at[r], a->send_size[r], NCCL_UINT8, r, x->comm, stream);
            if (a->recv_size[r]) received = x->nccl.ncclRecv(a->recv + a->recv_at[r], a->recv_size[r], NCCL_UINT8, r, x->comm, stream);
            if (sent != NCCL_SUCCESS && sent != NCCL_IN_PROGRESS) result = sent;
            if (received != NCCL_SUCCESS && received != NCCL_IN_PROGRESS) result = received;
        }
    }
    ended = x->nccl.ncclGroupEnd();
    return exchange_settle(x, "exchange", result != NCCL_SUCCESS ? result : ended);
}

/* ---- the interface ---- */

static void exchange_open_sockets(exchange *x, mesh *m) {
    memset(x, 0, sizeof *x);
    x->mesh = m;
}

/* Begins an all-to-all. What arrived may be used after exchange_finish: with sockets it is there then; with NCCL what is put on
   the stream later sees it. */
static int exchange_begin(exchange *x, const mesh_array *arrays, int num_arrays, gpu_stream stream) {
    if (x->gpu) return exchange_begin_nccl(x, arrays, num_arrays, stream);
    return mesh_begin(x->mesh, arrays, num_arrays) ? exchange_fail(x, "exchange", x->mesh->error) : 0;
}

static int exchange_finish(exchange *x) {
    if (x->gpu) return 0;
    return mesh_finish(x->mesh) ? exchange_fail(x, "exchange", x->mesh->error) : 0;
}

/* Waits for the stream's work, exchanges included. Only after this may anything block on the GPU. */
static int exchange_wait(exchange *x, gpu_stream stream) {
    const double begin = mesh_now();
    double next_check = begin + 0.01;
    if (!x->gpu) return 0;
    for (;;) {
        const int state = gpu_stream_query(x->gpu, stream);
        const double now = mesh_now();
        int result = NCCL_SUCCESS;
        if (state == 0) return 0;
        if (state != GPU_NOT_READY) {
            exchange_fail(x, "waiting for the GPU", x->gpu->reason);
            exchange_abort(x);
            return -1;
        }
        if (now < next_check) continue;
        next_check = now + 0.01;
        if (x->comm && x->nccl.ncclCommGetAsyncError(x->comm, &result) == NCCL_SUCCESS && result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS) {
            exchange_fail(x, "waiting for the exchange", exchange_nccl_reason(x, result));
            exchange_abort(x);
            return -1;
        }
        if (mesh_check(x->mesh) || now - begin > x->mesh->deadline) {
            exchange_fail(x, "waiting for the exchange", now - begin > x->mesh->deadline ? "no end within the deadline" : x->mesh->error);
            exchange_abort(x);
            return -1;
        }
    }
}

/* At the end, by all ranks. */
static int exchange_close(exchange *x) {
    if (!x->comm) return 0;
    if (exchange_settle(x, "ncclCommFinalize", x->nccl.ncclCommFinalize(x->comm))) return -1;
    x->nccl.ncclCommDestroy(x->comm);
    x->comm = NULL;
    return 0;
}

#endif /* EXCHANGE_H */
