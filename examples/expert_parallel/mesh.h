/*
  mesh.h: a stream socket between every two ranks: how processes find each other, and an all-to-all of bytes that never hangs.
  Whoever is missing, gone, silent or of another opinion about sizes ends it with an error that names the rank. What is sent
  belongs to other files.

  Ranks that one program forks get pairs of sockets (mesh_fork_begin, mesh_fork_take). Those that a launcher started find each
  other through the address of rank 0 (mesh_connect).
*/
#ifndef MESH_H
#define MESH_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MESH_MAX_RANKS 64
#define MESH_MAX_ARRAYS 4
#define MESH_MAGIC 0x6d657368u

typedef struct mesh_cursor { /* of one message, in one direction */
    size_t header, total, done; /* bytes of the header that have passed, of the message, and those of it that have */
    uint32_t head[4];           /* magic, number of the exchange, bytes in two words */
} mesh_cursor;

/* One array of an exchange: for each rank where its part lies, and how long it is, in bytes. */
typedef struct mesh_array {
    const char *send;
    char *recv;
    const size_t *send_at, *send_size, *recv_at, *recv_size;
} mesh_array;

typedef struct mesh {
    int rank, num_ranks;
    int fds[MESH_MAX_RANKS]; /* -1: oneself */
    double deadline;         /* seconds without progress */
    uint32_t number;         /* of the exchange */
    mesh_array arrays[MESH_MAX_ARRAYS];
    int num_arrays;
    mesh_cursor sent[MESH_MAX_RANKS], received[MESH_MAX_RANKS];
    double last_progress;
    char error[256];
} mesh;

static double mesh_now(void) { /* seconds */
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int mesh_prepare(int fd) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

static void mesh_close(mesh *m) {
    int r;
    for (r = 0; r < m->num_ranks; r++) {
        if (m->fds[r] >= 0) close(m->fds[r]);
        m->fds[r] = -1;
    }
}

/* ---- ranks of one program ---- */

typedef struct mesh_pairs {
    int num_ranks;
    int ends[MESH_MAX_RANKS][MESH_MAX_RANKS]; /* [a][b]: a's end of its socket to b */
} mesh_pairs;

static void mesh_fork_end(mesh_pairs *pairs) { /* the parent's, when all ranks have theirs */
    int a, b;
    for (a = 0; a < pairs->num_ranks; a++)
        for (b = 0; b < pairs->num_ranks; b++)
            if (pairs->ends[a][b] >= 0) close(pairs->ends[a][b]);
}

static int mesh_fork_begin(mesh_pairs *pairs, int num_ranks) {
    int a, b;
    pairs->num_ranks = num_ranks;
    for (a = 0; a < num_ranks; a++)
        for (b = 0; b < num_ranks; b++) pairs->ends[a][b] = -1;
    for (a = 0; a < num_ranks; a++)
        for (b = a + 1; b < num_ranks; b++) {
            int two[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, two) != 0) {
                mesh_fork_end(pairs);
                return 0;
            }
            pairs->ends[a][b] = two[0];
            pairs->ends[b][a] = two[1];
        }
    return 1;
}

/* In a rank's process: keeps its ends. Others' are closed, so that a rank that dies is seen by all. */
static int mesh_fork_take(mesh *m, mesh_pairs *pairs, int rank) {
    int r, good = 1;
    memset(m, 0, sizeof *m);
    m->rank = rank;
    m->num_ranks = pairs->num_ranks;
    for (r = 0; r < m->num_ranks; r++) {
        m->fds[r] = pairs->ends[rank][r];
        pairs->ends[rank][r] = -1;
        if (m->fds[r] >= 0) good &= mesh_prepare(m->fds[r]);
    }
    mesh_fork_end(pairs);
    return good;
}

/* ---- exchanging ---- */

/* Why an exchange with a rank failed. */
static int mesh_fail(mesh *m, int r, const char *what) {
    snprintf(m->error, sizeof m->error, "rank %d %s", r, what);
    return -1;
}

/* Where byte `at` of a rank's message lies, and how many follow it there. */
static char *mesh_place(const mesh *m, int r, int sending, size_t at, size_t *left) {
    int i;
    for (i = 0; i < m->num_arrays; i++) {
        const mesh_array *a = &m->arrays[i];
        const size_t size = sending ? a->send_size[r] : a->recv_size[r];
        if (at < size) {
            *left = size - at;
            return sending ? (char *)(uintptr_t)a->send + a->send_at[r] + at : a->recv + a->recv_at[r] + at;
        }
        at -= size;
    }
    *left = 0;
    return NULL;
}

static int mesh_would_block(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

/* As much as goes at once; -1 on an error. */
static int mesh_send_some(mesh *m, int r) {
    mesh_cursor *c = &m->sent[r];
    while (c->header < sizeof c->head || c->done < c->total) {
        size_t left = sizeof c->head - c->header;
        const char *from = left ? (const char *)c->head + c->header : mesh_place(m, r, 1, c->done, &left);
        const ssize_t sent = send(m->fds[r], from, left, MSG_NOSIGNAL);
        if (sent < 0 && mesh_would_block()) return 0;
        if (sent <= 0) return mesh_fail(m, r, "has gone: nothing can be sent to it");
        m->last_progress = mesh_now();
        if (c->header < sizeof c->head) c->header += (size_t)sent;
        else c->done += (size_t)sent;
    }
    return 0;
}

static int mesh_receive_some(mesh *m, int r) {
    mesh_cursor *c = &m->received[r];
    while (c->header < sizeof c->head || c->done < c->total) {
        size_t left = sizeof c->head - c->header;
        char *to = left ? (char *)c->head + c->header : mesh_place(m, r, 0, c->done, &left);
        const ssize_t got = recv(m->fds[r], to, left, 0);
        if (got < 0 && mesh_would_block()) return 0;
        if (got <= 0) return mesh_fail(m, r, "has gone");
        m->last_progress = mesh_now();
        if (c->header == sizeof c->head) {
            c->done += (size_t)got;
            continue;
        }
        c->header += (size_t)got;
        if (c->header < sizeof c->head) continue;
        if (c->head[0] != MESH_MAGIC) return mesh_fail(m, r, "sends something else than this program");
        if (c->head[1] != m->number) return mesh_fail(m, r, "is at another step");
        if (c->head[2] != (uint32_t)c->total || c->head[3] != (uint32_t)((uint64_t)c->total >> 32)) return mesh_fail(m, r, "sends another number of bytes than expected");
    }
    return 0;
}

/* Begins the exchange of up to MESH_MAX_ARRAYS arrays; what they point to stays until mesh_finish. */
static int mesh_begin(mesh *m, const mesh_array *arrays, int num_arrays) {
    int r, i;
    m->number++;
    m->num_arrays = num_arrays;
    for (i = 0; i < num_arrays; i++) m->arrays[i] = arrays[i];
    m->last_progress = mesh_now();
    for (r = 0; r < m->num_ranks; r++) {
        mesh_cursor *sent = &m->sent[r], *received = &m->received[r];
        memset(sent, 0, sizeof *sent);
        memset(received, 0, sizeof *received);
        for (i = 0; i < num_arrays; i++) {
            sent->total += arrays[i].send_size[r];
            received->total += arrays[i].recv_size[r];
        }
        if (r == m->rank) {
            for (i = 0; i < num_arrays; i++)
                if (arrays[i].send_size[r]) memcpy(arrays[i].recv + arrays[i].recv_at[r], arrays[i].send + arrays[i].send_at[r], arrays[i].send_size[r]);
            sent->header = received->header = sizeof sent->head;
            sent->done = sent->total;
            received->done = received->total;
            continue;
        }
        sent->head[0] = MESH_MAGIC;
        sent->head[1] = m->number;
        sent->head[2] = (uint32_t)sent->total;
        sent->head[3] = (uint32_t)((uint64_t)sent->total >> 32);
        if (mesh_send_some(m, r)) return -1;
    }
    return 0;
}

static int mesh_finish(mesh *m) {
    for (;;) {
        struct pollfd polled[MESH_MAX_RANKS];
        nfds_t count = 0;
        int r, missing = -1;
        for (r = 0; r < m->num_ranks; r++) {
            const mesh_cursor *s = &m->sent[r], *c = &m->received[r];
            const int sends = s->header < sizeof s->head || s->done < s->total, receives = c->header < sizeof c->head || c->done < c->total;
            if (!sends && !receives) continue;
            missing = r;
            polled[count].fd = m->fds[r];
            polled[count].events = (short)((sends ? POLLOUT : 0) | (receives ? POLLIN : 0));
            polled[count++].revents = 0;
        }
        if (!count) return 0;
        if (mesh_now() - m->last_progress > m->deadline) return mesh_fail(m, missing, "doesn't answer");
        if (poll(polled, count, 50) < 0 && errno != EINTR) return mesh_fail(m, missing, "can't be polled");
        for (r = 0; r < m->num_ranks; r++) {
            if (r == m->rank) continue;
            if (mesh_send_some(m, r) || mesh_receive_some(m, r)) return -1;
        }
    }
}

/* The same `size` bytes to all; [num_ranks] of them come. */
static int mesh_gather(mesh *m, const void *mine, void *all, size_t size) {
    size_t at[MESH_MAX_RANKS], zero[MESH_MAX_RANKS], sizes[MESH_MAX_RANKS];
    mesh_array array;
    int r;
    for (r = 0; r < m->num_ranks; r++) {
        at[r] = (size_t)r * size;
        zero[r] = 0;
        sizes[r] = size;
    }
    array.send = (const char *)mine;
    array.recv = (char *)all;
    array.send_at = zero;
    array.recv_at = at;
    array.send_size = array.recv_size = sizes;
    return mesh_begin(m, &array, 1) || mesh_finish(m) ? -1 : 0;
}

/* -1 when a rank has gone meanwhile: for whoever waits for something else. */
static int mesh_check(mesh *m) {
    int r;
    for (r = 0; r < m->num_ranks; r++) {
        char byte;
        ssize_t got;
        if (m->fds[r] < 0) continue;
        got = recv(m->fds[r], &byte, 1, MSG_PEEK);
        if (got == 0 || (got < 0 && !mesh_would_block())) return mesh_fail(m, r, "has gone");
    }
    return 0;
}

/* ---- ranks of a launcher: all but rank 0 tell it where they listen, and it tells everyone ---- */

typedef struct mesh_hello {
    uint32_t magic, rank, num_ranks;
    uint16_t port, reserved;
} mesh_hello;

typedef struct mesh_table { /* in network order, as the sockets have them */
    uint32_t magic, good;
    struct { uint32_t address; uint16_t port, reserved; } ranks[MESH_MAX_RANKS];
} mesh_table;

/* All of it before `end`, or -1. */
static int mesh_transfer(int fd, void *bytes, size_t size, int sending, double end) {
    size_t done = 0;
    while (done < size) {
        struct pollfd polled;
        ssize_t n;
        polled.fd = fd;
        polled.events = sending ? POLLOUT : POLLIN;
        polled.revents = 0;
        if (mesh_now() > end) return -1;
        if (poll(&polled, 1, 50) <= 0) continue;
        n = sending ? send(fd, (char *)bytes + done, size - done, MSG_NOSIGNAL) : recv(fd, (char *)bytes + done, size - done, 0);
        if (n < 0 && mesh_would_block()) continue;
        if (n <= 0) return -1;
        done += (size_t)n;
    }
    return 0;
}

static int mesh_listen(uint32_t address, uint16_t *port) {
    struct sockaddr_in name;
    socklen_t length = sizeof name;
    const int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&name, 0, sizeof name);
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = address;
    name.sin_port = htons(*port);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&name, sizeof name) != 0 || listen(fd, MESH_MAX_RANKS) != 0 || getsockname(fd, (struct sockaddr *)&name, &length) != 0 || !mesh_prepare(fd)) {
        close(fd);
        return -1;
    }
    *port = ntohs(name.sin_port);
    return fd;
}

/* Tries until `end`: whoever listens may not do so yet. */
static int mesh_dial(uint32_t address, uint16_t port, double end) {
    for (;;) {
        struct sockaddr_in name;
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        memset(&name, 0, sizeof name);
        name.sin_family = AF_INET;
        name.sin_addr.s_addr = address;
        name.sin_port = htons(port);
        if (fd < 0) return -1;
        if (connect(fd, (struct sockaddr *)&name, sizeof name) == 0 && mesh_prepare(fd)) return fd;
        close(fd);
        if (mesh_now() > end) return -1;
        usleep(50000);
    }
}

/* Accepts ranks until all from `first` on are there. Strangers are sent away; a rank that says something else than it should is an error. */
static int mesh_accept(mesh *m, int listener, int first, double end, mesh_table *table) {
    int missing = m->num_ranks - first;
    while (missing > 0) {
        struct sockaddr_in from;
        socklen_t length = sizeof from;
        mesh_hello hello;
        const int fd = accept(listener, (struct sockaddr *)&from, &length);
        if (fd < 0) {
            if (mesh_now() > end) {
                int r;
                for (r = first; r < m->num_ranks - 1 && m->fds[r] >= 0; r++) {}
                return mesh_fail(m, r, "hasn't come");
            }
            usleep(10000);
            continue;
        }
        if (!mesh_prepare(fd) || mesh_transfer(fd, &hello, sizeof hello, 0, mesh_now() + 1 < end ? mesh_now() + 1 : end) || hello.magic != MESH_MAGIC) {
            close(fd);
            continue;
        }
        if (hello.num_ranks != (uint32_t)m->num_ranks || hello.rank < (uint32_t)first || hello.rank >= (uint32_t)m->num_ranks || m->fds[hello.rank] >= 0) {
            char what[96];
            snprintf(what, sizeof what, "comes as one of %u; here %d are expected, each once", (unsigned)hello.num_ranks, m->num_ranks);
            close(fd);
            return mesh_fail(m, (int)hello.rank, what);
        }
        m->fds[hello.rank] = fd;
        if (table) {
            table->ranks[hello.rank].address = from.sin_addr.s_addr;
            table->ranks[hello.rank].port = hello.port;
        }
        missing--;
    }
    return 0;
}

/* `address` is HOST:PORT, at which rank 0 listens. 0, or -1 with the reason in m->error. */
static int mesh_connect(mesh *m, int rank, int num_ranks, const char *address, double deadline) {
    const double end = mesh_now() + deadline;
    char host[256];
    const char *colon = strrchr(address, ':');
    struct addrinfo hints, *found = NULL;
    uint32_t ip;
    uint16_t port = 0;
    mesh_table table;
    mesh_hello hello;
    int r, listener, result = -1;
    memset(m, 0, sizeof *m);
    m->rank = rank;
    m->num_ranks = num_ranks;
    m->deadline = deadline;
    for (r = 0; r < num_ranks; r++) m->fds[r] = -1;
    if (num_ranks == 1) return 0;
    if (!colon || colon == address || (size_t)(colon - address) >= sizeof host || atoi(colon + 1) < 1 || atoi(colon + 1) > 65535) {
        snprintf(m->error, sizeof m->error, "\"%.100s\" isn't HOST:PORT", address);
        return -1;
    }
    memcpy(host, address, (size_t)(colon - address));
    host[colon - address] = 0;
    memset(&hints, 0, sizeof hints);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, NULL, &hints, &found) != 0 || !found) {
        snprintf(m->error, sizeof m->error, "host %.100s isn't known", host);
        return -1;
    }
    ip = ((const struct sockaddr_in *)(const void *)found->ai_addr)->sin_addr.s_addr;
    freeaddrinfo(found);
    if (rank == 0) port = (uint16_t)atoi(colon + 1);
    listener = mesh_listen(htonl(INADDR_ANY), &port);
    if (listener < 0) {
        snprintf(m->error, sizeof m->error, "rank %d can't listen at port %d: %s", rank, (int)port, strerror(errno));
        return -1;
    }
    memset(&table, 0, sizeof table);
    memset(&hello, 0, sizeof hello);
    hello.magic = table.magic = MESH_MAGIC;
    hello.rank = (uint32_t)rank;
    hello.num_ranks = (uint32_t)num_ranks;
    hello.port = port;
    if (rank == 0) {
        result = mesh_accept(m, listener, 1, end, &table);
        table.good = result == 0;
        for (r = 1; r < num_ranks; r++)
            if (m->fds[r] >= 0 && mesh_transfer(m->fds[r], &table, sizeof table, 1, end) && result == 0) result = mesh_fail(m, r, "has gone");
    } else {
        m->fds[0] = mesh_dial(ip, (uint16_t)atoi(colon + 1), end);
        if (m->fds[0] < 0) {
            mesh_fail(m, 0, "can't be reached");
        } else if (mesh_transfer(m->fds[0], &hello, sizeof hello, 1, end) || mesh_transfer(m->fds[0], &table, sizeof table, 0, end) || table.magic != MESH_MAGIC || !table.good) {
            mesh_fail(m, 0, "didn't accept this one, or not all ranks came to it");
        } else {
            result = 0;
            for (r = 1; r < rank && result == 0; r++) { /* to those below; those above come */
                m->fds[r] = mesh_dial(table.ranks[r].address, table.ranks[r].port, end);
                if (m->fds[r] < 0 || mesh_transfer(m->fds[r], &hello, sizeof hello, 1, end)) result = mesh_fail(m, r, "can't be reached");
            }
            if (result == 0) result = mesh_accept(m, listener, rank + 1, end, NULL);
        }
    }
    close(listener);
    for (r = 0; r < num_ranks && result == 0; r++) {
        const int one = 1;
        if (m->fds[r] >= 0) setsockopt(m->fds[r], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    if (result) mesh_close(m);
    return result;
}

#endif /* MESH_H */
