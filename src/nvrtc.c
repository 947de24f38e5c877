/*
  nvrtc.c: finds NVRTC, opens it, and compiles a kernel source with it. Which variants exist, and what becomes of the
  code, is decided elsewhere.

  NVRTC is opened when something has to be compiled and never before: it costs 30 ms and 30 MB, and a warm cache needs
  none. It asks for a library of builtins of exactly its own version, by bare name, when it first compiles. That library
  is opened before, from NVRTC's own folder, since the name alone may not be found or may find another installation's.
*/
#include "internal.h"

#define MOER_NVRTC_OLDEST_MAJOR 12
#define MOER_NVRTC_NEWEST_MAJOR 13 /* newer ones are tried when the driver is as new */
#define MOER_NVRTC_NO_CACHE_VERSION 12090

#define MOER_NVRTC_ERROR_OUT_OF_MEMORY 1
#define MOER_NVRTC_ERROR_BUILTIN_OPERATION 7

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
        {"nvrtcVersion", offsetof(moer_nvrtc, nvrtcVersion), 1},
        {"nvrtcGetErrorString", offsetof(moer_nvrtc, nvrtcGetErrorString), 1},
        {"nvrtcGetNumSupportedArchs", offsetof(moer_nvrtc, nvrtcGetNumSupportedArchs), 1},
        {"nvrtcGetSupportedArchs", offsetof(moer_nvrtc, nvrtcGetSupportedArchs), 1},
        {"nvrtcCreateProgram", offsetof(moer_nvrtc, nvrtcCreateProgram), 1},
        {"nvrtcDestroyProgram", offsetof(moer_nvrtc, nvrtcDestroyProgram), 1},
        {"nvrtcCompileProgram", offsetof(moer_nvrtc, nvrtcCompileProgram), 1},
        {"nvrtcGetProgramLogSize", offsetof(moer_nvrtc, nvrtcGetProgramLogSize), 1},
        {"nvrtcGetProgramLog", offsetof(moer_nvrtc, nvrtcGetProgramLog), 1},
        {"nvrtcGetCUBINSize", offsetof(moer_nvrtc, nvrtcGetCUBINSize), 1},
        {"nvrtcGetCUBIN", offsetof(moer_nvrtc, nvrtcGetCUBIN), 1},
        {"nvrtcGetPTXSize", offsetof(moer_nvrtc, nvrtcGetPTXSize), 1},
        {"nvrtcGetPTX", offsetof(moer_nvrtc, nvrtcGetPTX), 1},
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
static int moer_nvrtc_try_packages(moer_nvrtc_search *search, const char *packages) {
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

/* A prefix that Python is installed under. */
static int moer_nvrtc_try_python(moer_nvrtc_search *search, const char *prefix) {
    char packages[MOER_PATH_MAX];
    if (!prefix || !moer_path_is_absolute(prefix)) return 0;
#if defined(_WIN32)
    packages[0] = '\0';
    return moer_append(packages, sizeof packages, "%s/Lib/site-packages", prefix) &&
           moer_nvrtc_try_packages(search, packages);
#else
    {
        static const char *const names[] = {"site-packages", "dist-packages"};
        size_t i;
        int minor;
        for (minor = 40; minor >= 6; minor--) { /* Python 3.minor; asking for each is less than listing the folder */
            for (i = 0; i < MOER_COUNT(names); i++) {
                packages[0] = '\0';
                if (moer_append(packages, sizeof packages, "%s/lib/python3.%d/%s", prefix, minor, names[i]) &&
                    moer_path_inspect(packages) == MOER_PATH_FOLDER && moer_nvrtc_try_packages(search, packages)) {
                    return 1;
                }
            }
        }
        return 0;
    }
#endif
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

/* ---- compiling ---- */

/* What one compilation hands to NVRTC. */
typedef struct moer_nvrtc_inputs {
    char *text;           /* all sources, each terminated */
    const char *source;   /* the kernel source, within text */
    const char **headers; /* their texts, within text, and then their names */
    int num_headers;
    char *words;          /* all options, each terminated */
    const char **options;
    int num_options;
    int ptx;              /* the architecture is a virtual one: only PTX can be had */
} moer_nvrtc_inputs;

static void moer_nvrtc_inputs_free(moe_route_context *context, moer_nvrtc_inputs *inputs) {
    moer_free(context, inputs->text);
    moer_free(context, (void *)inputs->headers);
    moer_free(context, inputs->words);
    moer_free(context, (void *)inputs->options);
}

static int moer_is_header(const char *name) {
    size_t length = strlen(name);
    return length > 2 && strcmp(name + length - 2, ".h") == 0;
}

static size_t moer_source_size(const moer_source *source) { /* with its terminator */
    size_t size = 1, i;
    for (i = 0; source->pieces[i]; i++) size += strlen(source->pieces[i]);
    return size;
}

/* Joins a source at `text` and returns where the next one goes. */
static char *moer_source_join(const moer_source *source, char *text) {
    size_t i;
    for (i = 0; source->pieces[i]; i++) {
        size_t length = strlen(source->pieces[i]);
        memcpy(text, source->pieces[i], length);
        text += length;
    }
    *text = '\0';
    return text + 1;
}

/* The source `file` and every header. 0: no memory. */
static int moer_nvrtc_gather_sources(moe_route_context *context, moer_nvrtc_inputs *inputs, const char *file) {
    const moer_source *source;
    size_t size = 0, count = 0;
    char *next;
    for (source = moer_sources; source->name; source++) {
        if (moer_is_header(source->name)) count++;
        if (moer_is_header(source->name) || strcmp(source->name, file) == 0) size += moer_source_size(source);
    }
    inputs->text = (char *)moer_alloc(context, size);
    inputs->headers = (const char **)moer_alloc(context, 2 * count * sizeof *inputs->headers);
    if (!inputs->text || !inputs->headers) return 0;
    next = inputs->text;
    for (source = moer_sources; source->name; source++) {
        if (moer_is_header(source->name)) {
            inputs->headers[inputs->num_headers] = next;
            inputs->headers[count + (size_t)inputs->num_headers++] = source->name;
            next = moer_source_join(source, next);
        } else if (strcmp(source->name, file) == 0) {
            inputs->source = next;
            next = moer_source_join(source, next);
        }
    }
    return 1;
}

/* Which architecture to ask NVRTC for. Code for an architecture runs on the later ones of the same major; where NVRTC
   has none of the target's major, the driver makes the code from PTX. */
static moe_route_status moer_nvrtc_architecture(moe_route_context *context, char *option, size_t size, int *ptx) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    int target = (int)context->target, same_major = 0, below = 0, lowest = 0, highest = 0, count = 0, i;
    int *listed;
    if (nvrtc->nvrtcGetNumSupportedArchs(&count) != 0 || count <= 0 || count > 4096) count = 0;
    listed = (int *)moer_alloc(context, (size_t)count * sizeof *listed);
    if (!listed) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while compiling");
    if (count > 0 && nvrtc->nvrtcGetSupportedArchs(listed) != 0) count = 0;
    for (i = 0; i < count; i++) {
        int arch = listed[i];
        if (arch <= target && arch > below) below = arch;
        if (arch <= target && arch / 10 == target / 10 && arch > same_major) same_major = arch;
        if (lowest == 0 || arch < lowest) lowest = arch;
        if (arch > highest) highest = arch;
    }
    moer_free(context, listed);
    option[0] = '\0';
    *ptx = same_major == 0;
    if (same_major) moer_append(option, size, "--gpu-architecture=sm_%d", same_major);
    else if (below) moer_append(option, size, "--gpu-architecture=compute_%d", below);
    if (option[0]) return MOE_ROUTE_OK;
    return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED,
                     "NVRTC %d.%d (%s) compiles for sm_%d to sm_%d, not for sm_%d. The driver is of CUDA %d.%d",
                     nvrtc->version / 1000, nvrtc->version % 1000 / 10, nvrtc->path, lowest, highest, target,
                     context->driver_version / 1000, context->driver_version % 1000 / 10);
}

/* Adds an option, which `words` has room for, and returns where the next one goes. */
static char *moer_nvrtc_add_option(moer_nvrtc_inputs *inputs, char *next, const char *prefix, const char *word,
                                   size_t length) {
    size_t prefix_length = strlen(prefix);
    inputs->options[inputs->num_options++] = next;
    memcpy(next, prefix, prefix_length);
    memcpy(next + prefix_length, word, length);
    next[prefix_length + length] = '\0';
    return next + prefix_length + length + 1;
}

/* --modify-stack-limit=false keeps NVRTC from changing a limit of the whole process; --no-cache keeps it from starting
   the driver, which would spoil a later fork. */
static moe_route_status moer_nvrtc_gather_options(moe_route_context *context, moer_nvrtc_inputs *inputs,
                                                  const char *defines) {
    static const char *const fixed[] = {"-no-source-include", "--modify-stack-limit=false", "--no-cache"};
    size_t num_fixed = MOER_COUNT(fixed) - (context->nvrtc.version < MOER_NVRTC_NO_CACHE_VERSION ? 1u : 0u);
    size_t count = 1 + num_fixed, size, i, w;
    const char *words[2];
    char architecture[64], *next;
    const char *word;
    moe_route_status status = moer_nvrtc_architecture(context, architecture, sizeof architecture, &inputs->ptx);
    if (status != MOE_ROUTE_OK) return status;
    size = strlen(architecture) + 1;
    for (i = 0; i < num_fixed; i++) size += strlen(fixed[i]) + 1;
    words[0] = MOER_CODE_OPTIONS;
    words[1] = defines;
    for (w = 0; w < 2; w++) {
        for (word = words[w]; *word; word++) count += *word == ' ';
        count += 1;
        size += strlen(words[w]);
    }
    size += count * sizeof "-D";
    inputs->words = (char *)moer_alloc(context, size);
    inputs->options = (const char **)moer_alloc(context, count * sizeof *inputs->options);
    if (!inputs->words || !inputs->options) {
        return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while compiling");
    }
    next = moer_nvrtc_add_option(inputs, inputs->words, "", architecture, strlen(architecture));
    for (i = 0; i < num_fixed; i++) next = moer_nvrtc_add_option(inputs, next, "", fixed[i], strlen(fixed[i]));
    for (w = 0; w < 2; w++) {
        for (word = words[w]; *word;) {
            size_t length = strcspn(word, " ");
            if (length > 0) next = moer_nvrtc_add_option(inputs, next, w ? "-D" : "", word, length);
            word += length + (word[length] == ' ');
        }
    }
    return MOE_ROUTE_OK;
}

/* The program's log; NULL when it is empty or there is no memory. */
static char *moer_nvrtc_log(moe_route_context *context, moer_nvrtc_program program) {
    size_t size = 0;
    char *log;
    if (!program || context->nvrtc.nvrtcGetProgramLogSize(program, &size) != 0) return NULL;
    if (size <= 1 || size == (size_t)-1) return NULL;
    log = (char *)moer_alloc(context, size + 1);
    if (log && (context->nvrtc.nvrtcGetProgramLog(program, log) != 0 || !log[0])) {
        moer_free(context, log);
        log = NULL;
    }
    return log;
}

static moe_route_status moer_nvrtc_fail(moe_route_context *context, const char *file, const char *defines,
                                        const char *call, int result, const char *log) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    const char *text = nvrtc->nvrtcGetErrorString(result);
    moe_route_status status =
        result == MOER_NVRTC_ERROR_OUT_OF_MEMORY ? MOE_ROUTE_ERROR_MEMORY : MOE_ROUTE_ERROR_COMPILE;
    char advice[256] = "";
    if (result == MOER_NVRTC_ERROR_BUILTIN_OPERATION) {
        char name[64];
        moer_nvrtc_builtins_name(nvrtc->version, name, sizeof name);
        moer_append(advice, sizeof advice, "\nNVRTC needs %s, in the same folder or on the library search path.", name);
    }
    return moer_fail(context, status, "compiling %s for sm_%u with NVRTC %d.%d (%s): %s: %s%s\nVariant: %s%s%s", file,
                     (unsigned)context->target, nvrtc->version / 1000, nvrtc->version % 1000 / 10, nvrtc->path, call,
                     text ? text : "unknown error", advice, defines, log ? "\n" : "", log ? log : "");
}

/* Copies the compiled code out; *memory is 0 when there is none for it. PTX comes with its terminator, which the driver relies on. */
static int moer_nvrtc_take(moe_route_context *context, moer_nvrtc_program program, int ptx, moer_bytes *code,
                           int *memory) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    size_t size = 0;
    int result = ptx ? nvrtc->nvrtcGetPTXSize(program, &size) : nvrtc->nvrtcGetCUBINSize(program, &size);
    if (result != 0) return result;
    code->data = size < (size_t)-1 ? (unsigned char *)moer_alloc(context, size + 1) : NULL;
    *memory = code->data != NULL;
    if (!code->data) return 0;
    code->size = size;
    result = ptx ? nvrtc->nvrtcGetPTX(program, (char *)code->data) : nvrtc->nvrtcGetCUBIN(program, (char *)code->data);
    if (result != 0) {
        moer_free(context, code->data);
        memset(code, 0, sizeof *code);
    }
    return result;
}

static moe_route_status moer_nvrtc_run(moe_route_context *context, const moer_nvrtc_inputs *inputs, const char *file,
                                       const char *defines, moer_bytes *code) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    const char *call = "nvrtcCreateProgram";
    moer_nvrtc_program program = NULL;
    moe_route_status status = MOE_ROUTE_OK;
    moer_locale locale;
    char *log;
    int result, memory = 1;
    moer_locale_begin(&locale);
    result = nvrtc->nvrtcCreateProgram(&program, inputs->source, file, inputs->num_headers, inputs->headers,
                                       inputs->headers + inputs->num_headers);
    if (result == 0) {
        call = "nvrtcCompileProgram";
        result = nvrtc->nvrtcCompileProgram(program, inputs->num_options, inputs->options);
    }
    if (result == 0) {
        call = inputs->ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN";
        result = moer_nvrtc_take(context, program, inputs->ptx, code, &memory);
    }
    moer_locale_end(&locale);
    log = moer_nvrtc_log(context, program);
    if (result != 0) status = moer_nvrtc_fail(context, file, defines, call, result, log);
    else if (!memory) status = moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for the code of %s", file);
    else if (log) moer_log(context, MOE_ROUTE_LOG_INFO, "NVRTC on %s (%s): %s", file, defines, log);
    moer_free(context, log);
    if (program) nvrtc->nvrtcDestroyProgram(&program);
    return status;
}

static moe_route_status moer_nvrtc_compile(moe_route_context *context, const char *file, const char *defines,
                                           moer_bytes *code) {
    double start, milliseconds;
    moer_nvrtc_inputs inputs;
    moe_route_status status;
    memset(code, 0, sizeof *code);
    status = moer_nvrtc_open(context);
    if (status != MOE_ROUTE_OK) return status;
    start = moer_milliseconds();
    memset(&inputs, 0, sizeof inputs);
    if (!moer_nvrtc_gather_sources(context, &inputs, file)) {
        status = moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while compiling");
    }
    if (status == MOE_ROUTE_OK) status = moer_nvrtc_gather_options(context, &inputs, defines);
    if (status == MOE_ROUTE_OK) status = moer_nvrtc_run(context, &inputs, file, defines, code);
    moer_nvrtc_inputs_free(context, &inputs);
    milliseconds = moer_milliseconds() - start;
    moer_mutex_lock(&context->mutex);
    context->statistics.compiles += status == MOE_ROUTE_OK;
    context->statistics.compile_milliseconds += milliseconds;
    moer_mutex_unlock(&context->mutex);
    return status;
}
