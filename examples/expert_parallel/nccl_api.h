/*
  nccl_api.h: the few functions of NCCL that an all-to-all takes, declared here and opened at run time: no NCCL is needed to
  build, and any from 2.14 on will do. tests/check_nccl_abi.c holds these declarations against NCCL's own header.

  libnccl.so.2 is looked for at NCCL_LIBRARY (a file, in the environment), in the process, on the system's path, and in the
  folders where pip puts it.
*/
#ifndef NCCL_API_H
#define NCCL_API_H

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../gpu.h"

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 }; /* ncclResult_t */
enum { NCCL_UINT8 = 1 };                         /* ncclDataType_t */

typedef struct nccl_comm_st *nccl_comm; /* ncclComm_t */

typedef struct nccl_unique_id { /* ncclUniqueId */
    char internal[128];
} nccl_unique_id;

/* ncclConfig_t as of 2.14. NCCL reads `size` bytes of it, takes what came later as not given, and so `cga_cluster_size`, which
   stands where 2.14's padding is. */
typedef struct nccl_config {
    size_t size;
    unsigned int magic, version;
    int blocking;
    int cga_cluster_size;
} nccl_config;
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_CONFIG_VERSION 21400u
#define NCCL_UNDEFINED INT_MIN

typedef struct nccl_api {
    char path[512], error[512];
    int version; /* 22809 for 2.28.9 */
    int (*ncclGetVersion)(int *);
    int (*ncclGetUniqueId)(nccl_unique_id *);
    int (*ncclCommInitRankConfig)(nccl_comm *, int, nccl_unique_id, int, nccl_config *);
    int (*ncclCommFinalize)(nccl_comm);
    int (*ncclCommDestroy)(nccl_comm);
    int (*ncclCommAbort)(nccl_comm);
    int (*ncclCommGetAsyncError)(nccl_comm, int *);
    int (*ncclGroupStart)(void);
    int (*ncclGroupEnd)(void);
    int (*ncclSend)(const void *, size_t, int, int, nccl_comm, gpu_stream);
    int (*ncclRecv)(void *, size_t, int, int, nccl_comm, gpu_stream);
    int (*ncclAlltoAll)(const void *, void *, size_t, int, nccl_comm, gpu_stream); /* from 2.28 on; NULL */
    const char *(*ncclGetErrorString)(int);
    const char *(*ncclGetLastError)(nccl_comm);
} nccl_api;

static const struct { const char *name; size_t offset; int required; } nccl_symbols[] = {
    {"ncclGetVersion", offsetof(nccl_api, ncclGetVersion), 1},
    {"ncclGetUniqueId", offsetof(nccl_api, ncclGetUniqueId), 1},
    {"ncclCommInitRankConfig", offsetof(nccl_api, ncclCommInitRankConfig), 1},
    {"ncclCommFinalize", offsetof(nccl_api, ncclCommFinalize), 1},
    {"ncclCommDestroy", offsetof(nccl_api, ncclCommDestroy), 1},
    {"ncclCommAbort", offsetof(nccl_api, ncclCommAbort), 1},
    {"ncclCommGetAsyncError", offsetof(nccl_api, ncclCommGetAsyncError), 1},
    {"ncclGroupStart", offsetof(nccl_api, ncclGroupStart), 1},
    {"ncclGroupEnd", offsetof(nccl_api, ncclGroupEnd), 1},
    {"ncclSend", offsetof(nccl_api, ncclSend), 1},
    {"ncclRecv", offsetof(nccl_api, ncclRecv), 1},
    {"ncclAlltoAll", offsetof(nccl_api, ncclAlltoAll), 0},
    {"ncclGetErrorString", offsetof(nccl_api, ncclGetErrorString), 1},
    {"ncclGetLastError", offsetof(nccl_api, ncclGetLastError), 1},
};

static void *nccl_try(nccl_api *api, const char *path, int flags) {
    void *library = dlopen(path, flags);
    if (library) snprintf(api->path, sizeof api->path, "%s", path);
    return library;
}

/* Where pip leaves it. */
static void *nccl_try_pip(nccl_api *api) {
    static const struct { const char *variable, *rest; } places[] = {
        {"VIRTUAL_ENV", "/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2"},
        {"HOME", "/.local/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2"},
        {NULL, "/usr/local/lib/python3*/dist-packages/nvidia/nccl/lib/libnccl.so.2"},
        {NULL, "/usr/local/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2"}};
    void *library = NULL;
    size_t i, j;
    for (i = 0; i < sizeof places / sizeof places[0] && !library; i++) {
        const char *root = places[i].variable ? getenv(places[i].variable) : "";
        char pattern[512];
        glob_t found;
        if (!root || snprintf(pattern, sizeof pattern, "%s%s", root, places[i].rest) >= (int)sizeof pattern) continue;
        if (glob(pattern, 0, NULL, &found) != 0) continue;
        for (j = 0; j < found.gl_pathc && !library; j++) library = nccl_try(api, found.gl_pathv[j], RTLD_NOW | RTLD_LOCAL);
        globfree(&found);
    }
    return library;
}

/* 1, or 0 with the reason in api->error. The library is never closed. */
static int nccl_load(nccl_api *api) {
    const char *named = getenv("NCCL_LIBRARY");
    void *library = NULL;
    size_t i;
    memset(api, 0, sizeof *api);
    if (named && named[0]) {
        library = nccl_try(api, named, RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            snprintf(api->error, sizeof api->error, "NCCL_LIBRARY can't be opened: %s", dlerror());
            return 0;
        }
    }
    if (!library) library = nccl_try(api, "libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = nccl_try(api, "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) library = nccl_try_pip(api);
    if (!library) {
        snprintf(api->error, sizeof api->error, "libnccl.so.2 isn't found; install it (pip install nvidia-nccl-cu13, or -cu12) or name the file in NCCL_LIBRARY");
        return 0;
    }
    for (i = 0; i < sizeof nccl_symbols / sizeof nccl_symbols[0]; i++) {
        void *symbol = dlsym(library, nccl_symbols[i].name);
        if (!symbol && nccl_symbols[i].required) {
            snprintf(api->error, sizeof api->error, "%s has no %s: NCCL 2.14 or later is needed", api->path, nccl_symbols[i].name);
            return 0;
        }
        memcpy((char *)api + nccl_symbols[i].offset, &symbol, sizeof symbol);
    }
    if (api->ncclGetVersion(&api->version) != NCCL_SUCCESS) {
        snprintf(api->error, sizeof api->error, "%s doesn't tell its version", api->path);
        return 0;
    }
    return 1;
}

#endif /* NCCL_API_H */
