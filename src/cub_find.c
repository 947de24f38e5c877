/*
  cub_find.c: finds CUB's headers, which the kernel sources that include some are compiled with: in the CUDA toolkit, in a pip package, or
  bundled with NVRTC. What is compiled with them belongs to nvrtc.c.

  CUB brings the rest of CCCL that it includes, libcu++ and a little of Thrust, in the same folder. In dist/moe_route.h all of that is
  embedded, and nothing is looked for.
*/
#include "internal.h"

#ifndef MOER_EMBEDDED_CUB

#define MOER_CUB_HEADER "cub/block/block_radix_rank.cuh"

typedef struct moer_cub_search {
    moer_cub *found;
    char tried[8192]; /* a line for each place, for the message */
} moer_cub_search;

static int moer_cub_try(moer_cub_search *search, const char *folder) {
    char path[MOER_PATH_MAX];
    path[0] = '\0';
    moer_append(search->tried, sizeof search->tried, "\n  %s", folder);
    return moer_append(path, sizeof path, "%s/" MOER_CUB_HEADER, folder) && moer_path_inspect(path) == MOER_PATH_FILE &&
           moer_text_set(search->found->folder, sizeof search->found->folder, folder);
}

/* A folder of header files: from CUDA 13 on CUB has one in it. */
static int moer_cub_try_include(moer_cub_search *search, const char *root, const char *include) {
    char folder[MOER_PATH_MAX];
    size_t length;
    if (!root || !moer_path_is_absolute(root)) return 0;
    folder[0] = '\0';
    if (!moer_append(folder, sizeof folder, "%s%s", root, include) || moer_path_inspect(folder) != MOER_PATH_FOLDER) return 0;
    length = strlen(folder);
    if (moer_append(folder, sizeof folder, "/cccl") && moer_path_inspect(folder) == MOER_PATH_FOLDER && moer_cub_try(search, folder)) return 1;
    folder[length] = '\0';
    return moer_cub_try(search, folder);
}

static int moer_cub_try_toolkit(moer_cub_search *search, const char *root) {
#if defined(_WIN32)
    static const char *const folders[] = {"/include", "/Library/include"};
#else
    static const char *const folders[] = {"/include", "/targets/x86_64-linux/include", "/targets/sbsa-linux/include"};
#endif
    size_t i;
    for (i = 0; i < MOER_COUNT(folders); i++)
        if (moer_cub_try_include(search, root, folders[i])) return 1;
    return 0;
}

/* A folder into which pip installs packages. CUDA 12's CUB has a folder of its own, later ones share one a major. */
static int moer_cub_try_packages(void *user, const char *packages) {
    moer_cub_search *search = (moer_cub_search *)user;
    char folder[64];
    int major;
    for (major = MOER_NVRTC_NEWEST_MAJOR; major > MOER_NVRTC_OLDEST_MAJOR; major--) {
        folder[0] = '\0';
        moer_append(folder, sizeof folder, "/nvidia/cu%d/include", major);
        if (moer_cub_try_include(search, packages, folder)) return 1;
    }
    return moer_cub_try_include(search, packages, "/nvidia/cuda_cccl/include");
}

/* Beside NVRTC: of the same toolkit, or installed by the same pip. */
static int moer_cub_try_beside_nvrtc(moer_cub_search *search, const char *library) {
    char folder[MOER_PATH_MAX];
    int level;
    if (!moer_path_is_absolute(library) || !moer_text_set(folder, sizeof folder, library) || !moer_path_parent(folder)) return 0;
    for (level = 0; level < 2 && moer_path_parent(folder); level++)
        if (moer_cub_try_include(search, folder, "/include") || moer_cub_try_include(search, folder, "/cuda_cccl/include")) return 1;
    return 0;
}

/* Headers that NVRTC brings itself have to be unpacked, 26 MB: into the cache folder, where they stay. */
static int moer_cub_try_bundled(moe_route_context *context, moer_cub_search *search) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    const char *log = NULL;
    char folder[MOER_PATH_MAX], why[512] = "";
    int result;
    if (!nvrtc->nvrtcInstallBundledHeaders) return 0;
    if (!context->cache.folder[0] || !moer_text_set(folder, sizeof folder, context->cache.folder) || !moer_path_parent(folder)) {
        moer_append(search->tried, sizeof search->tried, "\n  NVRTC itself, which can't unpack its headers: there is no cache folder");
        return 0;
    }
    if (!moer_append(folder, sizeof folder, "/nvrtc_headers_%d.%d", nvrtc->version / 1000, nvrtc->version % 1000 / 10)) return 0;
    result = nvrtc->nvrtcInstallBundledHeaders(folder, 0, &log);
    if (result == 0 && moer_cache_check_folder(&context->cache, folder, 0, why, sizeof why)) return moer_cub_try_include(search, folder, "");
    moer_append(search->tried, sizeof search->tried, "\n  %s, for NVRTC's own headers: %s", folder, result == 0 ? why : log ? log : nvrtc->nvrtcGetErrorString(result));
    return 0;
}

static int moer_cub_try_places(moe_route_context *context, moer_cub_search *search) {
    char value[MOER_PATH_MAX];
    if (moer_cub_try_bundled(context, search)) return 1;
    if (moer_cub_try_beside_nvrtc(search, context->nvrtc.path)) return 1;
    if (moer_cub_try_toolkit(search, moer_environment("CUDA_HOME", value, sizeof value))) return 1;
    if (moer_cub_try_toolkit(search, moer_environment("CUDA_PATH", value, sizeof value))) return 1;
#if !defined(_WIN32)
    if (moer_cub_try_toolkit(search, "/usr/local/cuda")) return 1;
#endif
    if (moer_python_packages(moer_environment("VIRTUAL_ENV", value, sizeof value), moer_cub_try_packages, search)) return 1;
    if (moer_python_packages(moer_environment("CONDA_PREFIX", value, sizeof value), moer_cub_try_packages, search)) return 1;
    if (moer_cub_try_toolkit(search, moer_environment("CONDA_PREFIX", value, sizeof value))) return 1;
#if !defined(_WIN32)
    if (moer_home_folder(value, sizeof value) && moer_append(value, sizeof value, "/.local") && moer_python_packages(value, moer_cub_try_packages, search)) return 1;
    return moer_python_packages("/usr/local", moer_cub_try_packages, search);
#else
    return 0;
#endif
}

static moe_route_status moer_cub_get(moe_route_context *context, moer_cub *cub) {
    char value[MOER_PATH_MAX], absolute[MOER_PATH_MAX];
    const char *named = moer_environment("MOE_ROUTE_CUB_PATH", value, sizeof value);
    moer_cub_search *search;
    moe_route_status status = MOE_ROUTE_OK;
    memset(cub, 0, sizeof *cub);
    search = (moer_cub_search *)moer_alloc(context, sizeof *search);
    if (!search) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while looking for CUB");
    search->found = cub;
    if (named) {
        if (!moer_path_absolute(named, absolute, sizeof absolute) || !moer_cub_try(search, absolute))
            status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                               "CUB's headers, which cub_maps needs, aren't where MOE_ROUTE_CUB_PATH says: %s has no " MOER_CUB_HEADER, named);
    } else if (!moer_cub_try_places(context, search)) {
        status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                           "CUB's headers, which cub_maps needs, aren't there. Install the CUDA toolkit, or do `pip install nvidia-cuda-cccl`, or "
                           "set MOE_ROUTE_CUB_PATH to the folder that holds cub/ and cuda/, or build the program with dist/moe_route.h, which has "
                           "them in it (`make dist`), or leave cub_maps OFF. Looked for %s in:%s",
                           MOER_CUB_HEADER, search->tried);
    }
    moer_free(context, search);
    if (status == MOE_ROUTE_OK) moer_log(context, MOE_ROUTE_LOG_INFO, "CUB: %s", cub->folder);
    return status;
}

#endif /* MOER_EMBEDDED_CUB */
