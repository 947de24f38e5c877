/*
  modules.c: modules and launches of the emulated driver: images, which are shared libraries of this host (nvrtc.c makes them),
  their kernels, and running these on the machine.
*/
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PROGRAMMATIC_STREAM_SERIALIZATION 6

/* ---- images and kernels ---- */
static void remove_folder(void) {
    object *o;
    if (!driver.folder[0] || driver.process != getpid()) return;
    for (o = driver.objects; o; o = o->next)
        if (o->kind == LIBRARY) unlink(((library *)o)->path);
    rmdir(driver.folder);
    driver.folder[0] = 0;
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static int make_folder(void) {
    const char *parent = getenv("TMPDIR");
    if (driver.folder[0]) return 1;
    snprintf(driver.folder, sizeof driver.folder, "%s/moe_route_emulation.XXXXXX", parent && strlen(parent) < 200 ? parent : "/tmp");
    if (!mkdtemp(driver.folder)) {
        driver.folder[0] = 0;
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
        if (!dladdr((void *)&driver, &info) || !info.dli_fbase) return 0;
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
    snprintf(l->path, sizeof l->path, "%s/kernel_%u.so", driver.folder, driver.num_libraries++);
    if (!write_file(l->path, image, size)) return OUT_OF_MEMORY;
    l->handle = dlopen(l->path, RTLD_NOW | RTLD_LOCAL);
    if (!l->handle) {
        fprintf(stderr, "emulation: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    symbol = dlsym(l->handle, "emulation_attach");
    target = (const emulation_target_info *)dlsym(l->handle, "emulation_target");
    if (!symbol || !target) return INVALID_IMAGE;
    if (target->is_ptx ? target->target > driver.target : target->target / 10 != driver.target / 10 || target->target > driver.target)
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
    for (object *o = driver.objects, *next; o; o = next) {
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
    for (object *o = driver.objects; o; o = o->next) {
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

/* What a block may have, of every kind, by the GPU that is emulated. */
static unsigned most_shared_bytes(void) {
    const unsigned family = driver.target / 10, minor = driver.target % 10;
    if (family == 12 || (family == 8 && (minor == 6 || minor == 9))) return 101376;
    return family == 8 ? 166912 : family < 8 ? 65536 : 232448;
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
    case 6: *value = (int)driver.target; break;
    default: *value = 0; break;
    }
    return unlock(CUDA_SUCCESS);
}

/* MAX_DYNAMIC_SHARED_SIZE_BYTES alone. */
EXPORT int cuFuncSetAttribute(void *handle, int attribute, int value) {
    kernel *k;
    int result;
    lock();
    result = not_ready();
    k = (kernel *)object_find(handle, KERNEL);
    if (!result && !k) result = INVALID_HANDLE;
    if (!result && (attribute != 8 || value < 0 || (unsigned)value > most_shared_bytes())) result = INVALID_VALUE;
    if (!result) k->most_dynamic_bytes = (unsigned)value;
    return unlock(result);
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

/* ---- launches ---- */
int run_launch(const operation *o, stream *s) {
    emulation_launch launch;
    emulation_result result;
    if (driver.chain_active && driver.chain != s) chain_end(); /* streams aren't emulated as concurrent: work is done in order */
    memset(&launch, 0, sizeof launch);
    launch.name = o->kernel->name;
    launch.kernel = o->kernel->function;
    launch.arguments = o->arguments;
    launch.grid_x = o->grid_x;
    launch.grid_y = o->grid_y;
    launch.threads = o->threads;
    launch.dynamic_bytes = o->dynamic_bytes;
    launch.dependent = o->dependent;
    launch.is_device_memory = is_device_memory;
    if (o->dependent && driver.chain_active) {
        find_changes();
        launch.show_old_memory = show_old_memory;
        launch.hide_old_memory = hide_old_memory;
    }
    snapshot();
    result = emulation_run(&launch, driver.seed * 1000003u + driver.launches++);
    forget_changes();
    settle_snapshot(o->dependent && result.early);
    driver.chain = s;
    driver.chain_active = 1;
    if (result.shared_bytes > o->kernel->shared_bytes) o->kernel->shared_bytes = result.shared_bytes;
    if (result.failed) driver.sticky = LAUNCH_FAILED;
    return result.failed ? LAUNCH_FAILED : CUDA_SUCCESS;
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
    if (config->shared_bytes > k->most_dynamic_bytes && k->shared_bytes + config->shared_bytes > 49152)
        return refuse(k, "more dynamic shared memory than the function was set for", config->shared_bytes);
    for (unsigned i = 0; i < config->num_attributes; i++) {
        if (config->attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION)
            return refuse(k, "launch attribute", (unsigned)config->attributes[i].id);
        *dependent = config->attributes[i].value.programmatic_stream_serialization != 0;
    }
    return *dependent && driver.target < 90 ? NOT_SUPPORTED : CUDA_SUCCESS;
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
    if (!result && driver.sticky) result = driver.sticky;
    memset(&o, 0, sizeof o);
    if (!result) result = check_launch(k, config, &o.dependent);
    if (!result) result = load_kernel(k);
    if (result) return unlock(result);
    o.kind = LAUNCH;
    o.kernel = k;
    o.grid_x = config->grid[0];
    o.grid_y = config->grid[1];
    o.threads = config->block[0];
    o.dynamic_bytes = config->shared_bytes;
    o.arguments = malloc(k->info->argument_size);
    if (!o.arguments) return unlock(OUT_OF_MEMORY);
    memcpy(o.arguments, parameters[0], k->info->argument_size);
    result = submit(&o, config->stream);
    operation_free(&o);
    return unlock(result);
}
