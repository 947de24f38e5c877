/*
  nvrtc_find.c: finds NVRTC and opens it. What is compiled with it belongs to nvrtc.c.

  NVRTC is opened when something has to be compiled and never before: it costs 30 ms and 30 MB, and a warm cache needs
  none. It asks for a library of builtins of exactly its own version, by bare name, when it first compiles. That library
  is opened before, from NVRTC's own folder, since the name alone may not be found or may find another installation's.
*/
#include "internal.h"

#define MOER_NVRTC_OLDEST_MAJOR 12
#define MOER_NVRTC_NEWEST_MAJOR 13 /* newer ones are tried when the driver is as new */

#if defined(_WIN32)
#define MOER_CONDA_FOLDER "/Library/bin"
#else
#define MOER_CONDA_FOLDER "/lib"
#endif

/* ---- finding the library ---- */

typedef struct moer_nvrtc_search {
    int newest, oldest; /* majors of this pass, newest first */
    int listed;         /* an earlier pass has listed the places already */
    moer_nvrtc found;
    char tried[8192];   /* a line for each place, for the message */
} moer_nvrtc_search;

static void moer_nvrtc_library_name(int major, char *name, size_t size) {
    name[0] = '\0';
#if defined(_WIN32)
    moer_append(name, size, "nvrtc64_%d0_0.dll", major);
#else
    moer_append(name, size, "libnvrtc.so.%d", major);
#endif
}

static void moer_nvrtc_builtins_name(int version, char *name, size_t size) {
    name[0] = '\0';
#if defined(_WIN32)
    moer_append(name, size, "nvrtc-builtins64_%d%d.dll", version / 1000, version % 1000 / 10);
#else
    moer_append(name, size, "libnvrtc-builtins.so.%d.%d", version / 1000, version % 1000 / 10);
#endif
}

/* Where the library lies: its path, for the context's information; its folder, for the builtins, empty when unknown. */
static void moer_nvrtc_locate(moer_nvrtc *found, const char *name, char *folder, size_t size) {
    found->path[0] = folder[0] = '\0';
    if (moer_path_is_absolute(name)) {
        moer_text_set(found->path, sizeof found->path, name);
        if (!moer_text_set(folder, size, name) || !moer_path_parent(folder)) folder[0] = '\0';
    } else if (moer_library_folder((moer_function)found->nvrtcVersion, folder, size)) {
        moer_append(found->path, sizeof found->path, "%s/%s", folder, name);
    } else {
        folder[0] = '\0';
        moer_text_set(found->path, sizeof found->path, name);
    }
}

/* Takes an opened library if it is an NVRTC that can be used. `name` is what it was opened by. */
static int moer_nvrtc_accept(moer_nvrtc_search *search, void *library, const char *name) {
    static const moer_symbol symbols[] = {
        {"nvrtcVersion", offsetof(moer_nvrtc, nvrtcVersion), MOER_REQUIRED},
        {"nvrtcGetErrorString", offsetof(moer_nvrtc, nvrtcGetErrorString), MOER_REQUIRED},
        {"nvrtcGetNumSupportedArchs", offsetof(moer_nvrtc, nvrtcGetNumSupportedArchs), MOER_REQUIRED},
        {"nvrtcGetSupportedArchs", offsetof(moer_nvrtc, nvrtcGetSupportedArchs), MOER_REQUIRED},
        {"nvrtcCreateProgram", offsetof(moer_nvrtc, nvrtcCreateProgram), MOER_REQUIRED},
        {"nvrtcDestroyProgram", offsetof(moer_nvrtc, nvrtcDestroyProgram), MOER_REQUIRED},
        {"nvrtcCompileProgram", offsetof(moer_nvrtc, nvrtcCompileProgram), MOER_REQUIRED},
        {"nvrtcGetProgramLogSize", offsetof(moer_nvrtc, nvrtcGetProgramLogSize), MOER_REQUIRED},
        {"nvrtcGetProgramLog", offsetof(moer_nvrtc, nvrtcGetProgramLog), MOER_REQUIRED},
        {"nvrtcGetCUBINSize", offsetof(moer_nvrtc, nvrtcGetCUBINSize), MOER_REQUIRED},
        {"nvrtcGetCUBIN", offsetof(moer_nvrtc, nvrtcGetCUBIN), MOER_REQUIRED},
        {"nvrtcGetPTXSize", offsetof(moer_nvrtc, nvrtcGetPTXSize), MOER_REQUIRED},
        {"nvrtcGetPTX", offsetof(moer_nvrtc, nvrtcGetPTX), MOER_REQUIRED},
        {"nvrtcInstallBundledHeaders", offsetof(moer_nvrtc, nvrtcInstallBundledHeaders), MOER_OPTIONAL},
    };
    moer_nvrtc *found = &search->found;
    const char *missing = moer_symbols_find(library, symbols, MOER_COUNT(symbols), found);
    char builtins[MOER_PATH_MAX], builtins_name[64];
    int major = 0, minor = 0;
    if (missing) {
        moer_append(search->tried, sizeof search->tried, "\n  %s, which has no function %s", name, missing);
        return 0;
    }
    if (found->nvrtcVersion(&major, &minor) != 0 || major < MOER_NVRTC_OLDEST_MAJOR) {
        moer_append(search->tried, sizeof search->tried, "\n  %s, which is version %d.%d; 12.0 or later is needed",
                    name, major, minor);
        return 0;
    }
    found->version = major * 1000 + minor * 10;
    moer_nvrtc_locate(found, name, builtins, sizeof builtins);
    moer_nvrtc_builtins_name(found->version, builtins_name, sizeof builtins_name);
    if (builtins[0] && moer_append(builtins, sizeof builtins, "/%s", builtins_name)) moer_library_open(builtins);
    found->state = 1;
    return 1;
}

static void moer_nvrtc_list(moer_nvrtc_search *search, const char *place) {
    if (!search->listed) moer_append(search->tried, sizeof search->tried, "\n  %s", place);
}

static int moer_nvrtc_try(moer_nvrtc_search *search, const char *name) {
    void *library = moer_library_open(name);
    if (library) return moer_nvrtc_accept(search, library, name);
    if (moer_path_inspect(name) == MOER_PATH_FILE) {
        char reason[512];
        moer_library_error(reason, sizeof reason);
        moer_append(search->tried, sizeof search->tried, "\n  %s, which can't be loaded (%s)", name, reason);
    }
    return 0;
}

static int moer_nvrtc_try_folder(moer_nvrtc_search *search, const char *folder) {
    int major;
    moer_nvrtc_list(search, folder);
    for (major = search->newest; major >= search->oldest; major--) {
        char path[MOER_PATH_MAX], name[64];
        moer_nvrtc_library_name(major, name, sizeof name);
        if (!moer_text_set(path, sizeof path, folder) || !moer_append(path, sizeof path, "/%s", name)) continue;
        if (moer_path_inspect(path) == MOER_PATH_FILE && moer_nvrtc_try(search, path)) return 1;
    }
    return 0;
}

/* A toolkit's root. */
static int moer_nvrtc_try_toolkit(moer_nvrtc_search *search, const char *root) {
#if defined(_WIN32)
    static const char *const folders[] = {"bin", "bin/x64"};
#else
    static const char *const folders[] = {"lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"};
#endif
    size_t i;
    if (!root || !moer_path_is_absolute(root)) return 0;
    for (i = 0; i < MOER_COUNT(folders); i++) {
        char folder[MOER_PATH_MAX];
        folder[0] = '\0';
        if (moer_append(folder, sizeof folder, "%s/%s", root, folders[i]) && moer_nvrtc_try_folder(search, folder)) {
            return 1;
        }
    }
    return 0;
}

/* A folder into which pip installs packages. CUDA 12's NVRTC has a folder of its own, later ones share one a major. */
static int moer_nvrtc_try_packages(void *user, const char *packages) {
    moer_nvrtc_search *search = (moer_nvrtc_search *)user;
#if defined(_WIN32)
    static const char own[] = "/nvidia/cuda_nvrtc/bin", shared_format[] = "%s/nvidia/cu%d/bin/x86_64";
#else
    static const char own[] = "/nvidia/cuda_nvrtc/lib", shared_format[] = "%s/nvidia/cu%d/lib";
#endif
    char folder[MOER_PATH_MAX];
    int major;
    for (major = search->newest; major >= search->oldest; major--) {
        folder[0] = '\0';
        if (moer_append(folder, sizeof folder, shared_format, packages, major) &&
            moer_path_inspect(folder) == MOER_PATH_FOLDER && moer_nvrtc_try_folder(search, folder)) {
            return 1;
        }
    }
    folder[0] = '\0';
    return moer_append(folder, sizeof folder, "%s%s", packages, own) && moer_path_inspect(folder) == MOER_PATH_FOLDER &&
           moer_nvrtc_try_folder(search, folder);
}

static int moer_python_packages(const char *prefix, int (*visit)(void *user, const char *packages), void *user) {
    char packages[MOER_PATH_MAX];
    if (!prefix || !moer_path_is_absolute(prefix)) return 0;
#if defined(_WIN32)
    packages[0] = '\0';
    return moer_append(packages, sizeof packages, "%s/Lib/site-packages", prefix) && visit(user, packages);
#else
    {
        static const char *const names[] = {"site-packages", "dist-packages"};
        size_t i;
        int minor;
        for (minor = 40; minor >= 6; minor--) { /* Python 3.minor; asking for each is less than listing the folder */
            for (i = 0; i < MOER_COUNT(names); i++) {
                packages[0] = '\0';
                if (moer_append(packages, sizeof packages, "%s/lib/python3.%d/%s", prefix, minor, names[i]) &&
                    moer_path_inspect(packages) == MOER_PATH_FOLDER && visit(user, packages)) {
                    return 1;
                }
            }
        }
        return 0;
    }
#endif
}

static int moer_nvrtc_try_python(moer_nvrtc_search *search, const char *prefix) {
    return moer_python_packages(prefix, moer_nvrtc_try_packages, search);
}

/* A path that the user gave: the library, or the folder that holds it. */
static int moer_nvrtc_try_named(moer_nvrtc_search *search, const char *path) {
    char absolute[MOER_PATH_MAX], reason[512];
    moer_path_kind kind = moer_path_inspect(path);
    if (kind != MOER_PATH_OTHER && !moer_path_absolute(path, absolute, sizeof absolute)) return 0;
    if (kind == MOER_PATH_FOLDER) return moer_nvrtc_try_folder(search, absolute);
    if (kind == MOER_PATH_FILE) return moer_nvrtc_try(search, absolute);
    if (moer_nvrtc_try(search, path)) return 1; /* a name for the system's loader */
    moer_library_error(reason, sizeof reason);
    moer_append(search->tried, sizeof search->tried, "\n  %s (%s)", path, reason);
    return 0;
}

#if defined(_WIN32)
/* The toolkit's installer adds its folder to PATH. The loader isn't asked to search PATH, because it would look in the
   current folder, too. */
static int moer_nvrtc_try_path_folders(moer_nvrtc_search *search) {
    char value[32768], *folder, *end;
    int found = 0;
    if (!moer_environment("PATH", value, sizeof value)) return 0;
    for (folder = value; folder && !found; folder = end) {
        end = strchr(folder, ';');
        if (end) *end++ = '\0';
        if (moer_path_is_absolute(folder)) found = moer_nvrtc_try_folder(search, folder);
    }
    return found;
}
#endif

static int moer_nvrtc_try_places(moer_nvrtc_search *search) {
    char folder[MOER_PATH_MAX], value[MOER_PATH_MAX], name[64];
    const char *conda;
    int major;
    for (major = search->newest; major >= search->oldest; major--) {
        void *library;
        moer_nvrtc_library_name(major, name, sizeof name);
        library = moer_library_loaded(name);
        if (library && moer_nvrtc_accept(search, library, name)) return 1;
    }
    if (moer_nvrtc_try_toolkit(search, moer_environment("CUDA_HOME", value, sizeof value))) return 1;
    if (moer_nvrtc_try_toolkit(search, moer_environment("CUDA_PATH", value, sizeof value))) return 1;
#if defined(_WIN32)
    if (moer_nvrtc_try_path_folders(search)) return 1;
#else
    if (moer_nvrtc_try_toolkit(search, "/usr/local/cuda")) return 1;
    for (major = search->newest; major >= search->oldest; major--) {
        folder[0] = '\0';
        moer_append(folder, sizeof folder, "/usr/local/cuda-%d", major);
        if (moer_path_inspect(folder) == MOER_PATH_FOLDER && moer_nvrtc_try_toolkit(search, folder)) return 1;
    }
#endif
    moer_nvrtc_list(search, "the system's library path");
    for (major = search->newest; major >= search->oldest; major--) {
        moer_nvrtc_library_name(major, name, sizeof name);
        if (moer_nvrtc_try(search, name)) return 1;
    }
    if (moer_nvrtc_try_python(search, moer_environment("VIRTUAL_ENV", value, sizeof value))) return 1;
    conda = moer_environment("CONDA_PREFIX", value, sizeof value);
    if (moer_nvrtc_try_python(search, conda)) return 1;
    if (conda && moer_path_is_absolute(conda)) {
        folder[0] = '\0';
        if (moer_append(folder, sizeof folder, "%s" MOER_CONDA_FOLDER, conda) &&
            moer_nvrtc_try_folder(search, folder)) {
            return 1;
        }
    }
#if !defined(_WIN32)
    if (moer_home_folder(folder, sizeof folder) && moer_append(folder, sizeof folder, "/.local") &&
        moer_nvrtc_try_python(search, folder)) {
        return 1;
    }
    if (moer_nvrtc_try_python(search, "/usr/local")) return 1;
#endif
    return moer_executable_folder(folder, sizeof folder) && moer_nvrtc_try_folder(search, folder);
}

/* One pass over the places for the majors that the driver can load code of, then one for newer ones. */
static int moer_nvrtc_find(moer_nvrtc_search *search, int driver_version, const char *named) {
    int driver_major = driver_version / 1000;
    int newest = driver_major > MOER_NVRTC_NEWEST_MAJOR ? driver_major : MOER_NVRTC_NEWEST_MAJOR;
    int preferred = driver_major > 0 ? driver_major : newest, found;
    search->newest = preferred;
    search->oldest = MOER_NVRTC_OLDEST_MAJOR;
    found = named ? moer_nvrtc_try_named(search, named) : moer_nvrtc_try_places(search);
    if (found || newest <= preferred || (named && moer_path_inspect(named) != MOER_PATH_FOLDER)) return found;
    search->listed = 1;
    search->newest = newest;
    search->oldest = preferred + 1;
    return named ? moer_nvrtc_try_named(search, named) : moer_nvrtc_try_places(search);
}

/* Opens NVRTC if it isn't yet. A failure isn't kept: a later compilation looks again, and so has the full message. */
static moe_route_status moer_nvrtc_open(moe_route_context *context) {
    char value[MOER_PATH_MAX];
    const char *named = NULL, *named_by = "nvrtc_path";
    moer_nvrtc_search *search;
    moe_route_status status = MOE_ROUTE_OK;
    int state;
    moer_mutex_lock(&context->mutex);
    state = context->nvrtc.state;
    moer_mutex_unlock(&context->mutex);
    if (state == 1) return MOE_ROUTE_OK;

    if (context->nvrtc_path[0]) {
        named = context->nvrtc_path;
    } else {
        named = moer_environment("MOE_ROUTE_NVRTC_PATH", value, sizeof value);
        named_by = "MOE_ROUTE_NVRTC_PATH";
    }
    search = (moer_nvrtc_search *)moer_alloc(context, sizeof *search);
    if (!search) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while looking for NVRTC");
    if (moer_nvrtc_find(search, context->driver_version, named)) {
        moer_mutex_lock(&context->mutex);
        state = context->nvrtc.state;
        if (state != 1) context->nvrtc = search->found; /* another thread may have been faster */
        moer_mutex_unlock(&context->mutex);
        if (state != 1) {
            moer_log(context, MOE_ROUTE_LOG_INFO, "NVRTC %d.%d: %s", search->found.version / 1000,
                     search->found.version % 1000 / 10, search->found.path);
        }
    } else if (named) {
        status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                           "NVRTC, which compiles the kernels, can't be loaded from where %s says:%s", named_by,
                           search->tried);
    } else {
        status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                           "NVRTC, which compiles the kernels, isn't there. Install the CUDA toolkit, or do "
                           "`pip install nvidia-cuda-nvrtc` (CUDA 13) or `pip install nvidia-cuda-nvrtc-cu12` "
                           "(CUDA 12), or set MOE_ROUTE_NVRTC_PATH to the library or its folder. Looked for it in:%s",
                           search->tried);
    }
    moer_free(context, search);
    return status;
}
