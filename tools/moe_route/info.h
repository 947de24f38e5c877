/*
  info.h: moe_route info: what this machine has for the library: GPUs, driver, NVRTC, the cache and what is in it. It says why
  something isn't used in the library's own words. Nothing is created but, to try NVRTC, a small kernel in memory.
*/
#ifndef INFO_H
#define INFO_H

static struct info_options {
    const char *cache_dir;
    int json, variants;
} info_wanted;

static const option info_options[] = {
    OPT_TITLE("Options"),
    OPT_FLAG("--variants", "list each compiled variant in the cache folder", &info_wanted.variants),
    OPT_TEXT("--cache-dir", "DIR", "look at this cache folder instead of the usual one", &info_wanted.cache_dir),
    OPT_FLAG("--json", "one JSON object, with every variant", &info_wanted.json),
    OPT_END,
};

static const options info_command = {
    .command = "info",
    .usage = "info [OPTIONS]",
    .about = "Tells which GPUs, driver and NVRTC this machine has, which cache folder is used or why none is, and which "
             "compiled variants lie in it.",
    .tables = {info_options},
    .after = "Status: 0, whatever was found; a script reads --json.\n",
};

/* ---- GPUs: asked of the driver directly, so that none is initialised and those that are too old are listed, too ---- */

enum { INFO_DEVICES_MAX = 32 };

typedef struct info_device {
    char name[128];
    uint32_t target, multiprocessors;
    uint64_t memory;
} info_device;

typedef struct info_driver {
    int count, cuda_version;
    char kernel_module[64]; /* "580.159.04"; empty: unknown */
    char reason[512];       /* why there are no devices */
    info_device devices[INFO_DEVICES_MAX];
} info_driver;

/* The version in /proc/driver/nvidia/version: the first word of its first line that is digits and dots. */
static void info_read_kernel_module(info_driver *driver) {
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    char line[512], *word;
    if (file && fgets(line, sizeof line, file))
        for (word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n"))
            if (strchr(word, '.') && strspn(word, "0123456789.") == strlen(word)) {
                snprintf(driver->kernel_module, sizeof driver->kernel_module, "%s", word);
                break;
            }
    if (file) fclose(file);
}

static void info_find_devices(info_driver *driver) {
    enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 }; /* CUdevice_attribute */
    int(GPU_CALL * get_attribute)(int *, int, int) = NULL;
    int(GPU_CALL * total_memory)(size_t *, int) = NULL;
    gpu_function function;
    void *library;
    static gpu_device gpu;
    int i;
    memset(driver, 0, sizeof *driver);
    info_read_kernel_module(driver);
    if (!gpu_load(&gpu) || gpu_result(&gpu, "cuInit", gpu.cuInit(0)) ||
        gpu_result(&gpu, "cuDriverGetVersion", gpu.cuDriverGetVersion(&driver->cuda_version)) ||
        gpu_result(&gpu, "cuDeviceGetCount", gpu.cuDeviceGetCount(&driver->count))) {
        snprintf(driver->reason, sizeof driver->reason, "%s", gpu.reason);
        driver->count = 0;
        return;
    }
    if (driver->count < 1) snprintf(driver->reason, sizeof driver->reason, "the NVIDIA driver sees no GPU");
    if (driver->count > INFO_DEVICES_MAX) driver->count = INFO_DEVICES_MAX;
#if defined(_WIN32)
    library = (void *)LoadLibraryExA(GPU_LIBRARY, NULL, LOAD_LIBRARY_SEARCH_SYSTEM32);
#else
    library = dlopen(GPU_LIBRARY, RTLD_NOW | RTLD_LOCAL);
#endif
    function = gpu_find(library, "cuDeviceGetAttribute");
    memcpy(&get_attribute, &function, sizeof function);
    function = gpu_find(library, "cuDeviceTotalMem_v2");
    memcpy(&total_memory, &function, sizeof function);
    for (i = 0; i < driver->count; i++) {
        info_device *device = &driver->devices[i];
        int ordinal = 0, major = 0, minor = 0, multiprocessors = 0;
        size_t memory = 0;
        if (gpu.cuDeviceGet(&ordinal, i)) continue;
        gpu.cuDeviceGetName(device->name, (int)sizeof device->name, ordinal);
        device->name[sizeof device->name - 1] = 0;
        if (get_attribute) {
            get_attribute(&major, MAJOR, ordinal);
            get_attribute(&minor, MINOR, ordinal);
            get_attribute(&multiprocessors, MULTIPROCESSORS, ordinal);
        }
        if (total_memory) total_memory(&memory, ordinal);
        device->target = (uint32_t)(major * 10 + minor);
        device->multiprocessors = (uint32_t)multiprocessors;
        device->memory = memory;
    }
}

/* ---- NVRTC: looked for by the library, and tried ---- */

typedef struct info_nvrtc {
    uint32_t version;
    char path[512], message[16384];
    moe_route_status status;
    uint32_t target;
} info_nvrtc;

/* What a program would find: with the GPU's driver where there is a GPU, because NVRTC is chosen by it. */
static void info_try_nvrtc(const info_driver *driver, info_nvrtc *nvrtc) {
    moe_route_context_desc desc;
    moe_route_context *context = NULL;
    moe_route_context_info info;
    moe_route_layer_desc layer_desc;
    moe_route_layer *layer = NULL;
    memset(nvrtc, 0, sizeof *nvrtc);
    memset(&desc, 0, sizeof desc);
    memset(&layer_desc, 0, sizeof layer_desc);
    desc.device = MOE_ROUTE_DEVICE_GPU;
    desc.cache_dir = "off";
    if (driver->count == 0 || moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) {
        moe_route_context_destroy(context);
        desc.device = MOE_ROUTE_DEVICE_COMPILE;
        desc.compile_target = 80;
        if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) stop(STATUS_FAILED, "out of memory");
    }
    layer_desc.router.num_experts = 8;
    layer_desc.router.top_k = 2;
    layer_desc.experts.hidden_size = 64;
    layer_desc.operations = MOE_ROUTE_OPERATION_EXPAND;
    nvrtc->status = moe_route_layer_create(context, &layer_desc, &layer);
    if (nvrtc->status != MOE_ROUTE_OK) moe_route_message(context, nvrtc->message, sizeof nvrtc->message);
    moe_route_context_get_info(context, &info);
    nvrtc->version = info.nvrtc_version;
    nvrtc->target = info.target;
    snprintf(nvrtc->path, sizeof nvrtc->path, "%s", info.nvrtc_path);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
}

/* ---- the cache ---- */

typedef struct info_variant {
    moe_route_cache_entry entry;
    char kernel[64];
    char *variant, *path;
} info_variant;

typedef struct info_cache {
    char folder[MOER_PATH_MAX];
    const char *state; /* used, read-only, absent, refused, off */
    char reason[1024];
    info_variant *variants;
    size_t count, room;
    uint64_t bytes;
} info_cache;

static void info_hear_log(moe_route_log_level level, const char *message, void *user) {
    info_cache *cache = (info_cache *)user;
    if (level != MOE_ROUTE_LOG_INFO && !cache->reason[0]) snprintf(cache->reason, sizeof cache->reason, "%s", message);
}

static char *info_copy(const char *text) {
    char *copy = (char *)allocate(strlen(text) + 1, 1);
    strcpy(copy, text);
    return copy;
}

static void info_visit(const moe_route_cache_entry *entry, void *user) {
    info_cache *cache = (info_cache *)user;
    info_variant *variant;
    if (cache->count == cache->room) {
        info_variant *grown = (info_variant *)allocate(cache->room ? cache->room * 2 : 64, sizeof *grown);
        if (cache->count) memcpy(grown, cache->variants, cache->count * sizeof *grown);
        free(cache->variants);
        cache->variants = grown;
        cache->room = cache->room ? cache->room * 2 : 64;
    }
    variant = &cache->variants[cache->count++];
    variant->entry = *entry;
    snprintf(variant->kernel, sizeof variant->kernel, "%s", entry->kernel ? entry->kernel : "");
    variant->variant = info_copy(entry->variant ? entry->variant : "");
    variant->path = info_copy(entry->path);
    cache->bytes += entry->size;
}

static int info_by_kernel(const void *left, const void *right) {
    const info_variant *a = (const info_variant *)left, *b = (const info_variant *)right;
    int order = (a->entry.target > b->entry.target) - (a->entry.target < b->entry.target);
    if (!order) order = strcmp(a->kernel, b->kernel);
    if (!order) order = strcmp(a->variant, b->variant);
    return order ? order : strcmp(a->path, b->path);
}

static int info_can_write(const char *folder) {
#if defined(_WIN32)
    return _access(folder, 2) == 0;
#else
    return access(folder, W_OK) == 0;
#endif
}

static void info_find_cache(info_cache *cache) {
    moe_route_context_desc desc;
    moe_route_context *context = NULL;
    moe_route_context_info info;
    const char *why;
    memset(cache, 0, sizeof *cache);
    if (!moer_cache_root(info_wanted.cache_dir, cache->folder, sizeof cache->folder, &why)) {
        cache->state = why[0] ? "refused" : "off";
        snprintf(cache->reason, sizeof cache->reason, "%s",
                 why[0] ? why : "MOE_ROUTE_CACHE_DIR is off: compiled kernels aren't kept on disk");
        cache->folder[0] = 0;
        return;
    }
    if (moer_path_inspect(cache->folder) == MOER_PATH_OTHER) { /* opening it would create it */
        cache->state = "absent";
        snprintf(cache->reason, sizeof cache->reason, "it is made when something is compiled");
        return;
    }
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_COMPILE;
    desc.compile_target = 80;
    desc.cache_dir = cache->folder;
    desc.logger.log = info_hear_log;
    desc.logger.user = cache;
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) stop(STATUS_FAILED, "out of memory");
    moe_route_context_get_info(context, &info);
    cache->state = info.cache_dir[0] == 0 ? "refused" : info_can_write(info.cache_dir) ? "used" : "read-only";
    if (info.cache_dir[0]) {
        snprintf(cache->folder, sizeof cache->folder, "%s", info.cache_dir);
        if (!info_can_write(info.cache_dir))
            snprintf(cache->reason, sizeof cache->reason, "what is compiled isn't kept: %s", strerror(errno));
        must_library(context, moe_route_cache_list(context, info_visit, cache));
    }
    if (cache->count) qsort(cache->variants, cache->count, sizeof *cache->variants, info_by_kernel);
    moe_route_context_destroy(context);
}

/* ---- the report ---- */

static const char *const info_variables[] = {
    "MOE_ROUTE_CACHE_DIR", "MOE_ROUTE_CACHE", "MOE_ROUTE_NVRTC_PATH", "MOE_ROUTE_CUB_PATH",   "XDG_CACHE_HOME", "CUDA_HOME",
    "CUDA_PATH",           "VIRTUAL_ENV",     "CONDA_PREFIX",         "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"};
enum { INFO_NUM_VARIABLES = sizeof info_variables / sizeof info_variables[0] };

static const char *info_version(uint32_t version) { /* 13000 as 13.0; the next call overwrites it */
    static char text[32];
    snprintf(text, sizeof text, "%u.%u", (unsigned)(version / 1000), (unsigned)(version % 1000 / 10));
    return text;
}

/* The message with its later lines under its first. */
static void info_print_message(const char *message) {
    for (; *message; message++) {
        putchar(*message);
        if (*message == '\n') printf("         ");
    }
    putchar('\n');
}

static void info_print_variants(const info_cache *cache) {
    size_t i, j;
    for (i = 0; i < cache->count; i = j) {
        const info_variant *first = &cache->variants[i];
        uint64_t bytes = 0;
        size_t old = 0;
        for (j = i; j < cache->count && cache->variants[j].entry.target == first->entry.target; j++) {
            bytes += cache->variants[j].entry.size;
            old += cache->variants[j].entry.sound && !cache->variants[j].entry.current;
        }
        if (first->entry.target)
            printf("         sm_%-4u %5u variants, %s", (unsigned)first->entry.target, (unsigned)(j - i), output_size(bytes));
        else printf("         damaged %5u entries, %s: never used", (unsigned)(j - i), output_size(bytes));
        if (old) printf(" (%u of another version of the library)", (unsigned)old);
        printf("\n");
        for (; info_wanted.variants && i < j; i++) {
            const info_variant *v = &cache->variants[i];
            if (!v->entry.sound) printf("           %s, %s\n", v->path, output_size(v->entry.size));
            else
                printf("           %-8s %9s  NVRTC %-5s unused for %.0f h%s  %s\n", v->kernel, output_size(v->entry.size),
                       info_version(v->entry.nvrtc_version), (double)v->entry.seconds_unused / 3600,
                       v->entry.current ? "" : ", of another version", v->variant);
        }
    }
}

static void info_print(const info_driver *driver, const info_nvrtc *nvrtc, const info_cache *cache) {
    int i;
    printf("moe_route %s, kernels %.12s\n\n", MOE_ROUTE_VERSION, moer_sources_digest);
    if (driver->cuda_version)
        printf("driver   CUDA %s%s%s\n", info_version((uint32_t)driver->cuda_version),
               driver->kernel_module[0] ? ", version " : "", driver->kernel_module);
    for (i = 0; i < driver->count; i++) {
        const info_device *device = &driver->devices[i];
        char memory[32] = "";
        if (device->memory) snprintf(memory, sizeof memory, ", %.0f GiB", (double)device->memory / 1073741824);
        printf("GPU %-4d %s: sm_%u, %u multiprocessors%s%s\n", i, device->name, (unsigned)device->target,
               (unsigned)device->multiprocessors, memory, device->target < 80 ? "; not supported: 8.0 or newer is needed" : "");
    }
    if (driver->count == 0) printf("GPU      none: %s\n", driver->reason);
    if (nvrtc->status == MOE_ROUTE_OK) {
        printf("NVRTC    %s: %s; it compiles for sm_%u\n", info_version(nvrtc->version), nvrtc->path, (unsigned)nvrtc->target);
    } else {
        printf("NVRTC    %s: ", nvrtc->status == MOE_ROUTE_ERROR_NO_COMPILER ? "none" : "found, but it fails");
        info_print_message(nvrtc->message);
        printf("         A warm cache or a pack needs no NVRTC: moe_route warm --help.\n");
    }
    printf("cache    %s%s%s%s%s\n", cache->folder, cache->folder[0] ? ": " : "", cache->state, cache->reason[0] ? ": " : "",
           cache->reason);
    if (cache->count || strcmp(cache->state, "used") == 0)
        printf("         %u variants, %s\n", (unsigned)cache->count, output_size(cache->bytes));
    info_print_variants(cache);
    for (i = 0; i < INFO_NUM_VARIABLES; i++)
        if (getenv(info_variables[i])) printf("set      %s=%s\n", info_variables[i], getenv(info_variables[i]));
}

static void info_write_json(const info_driver *driver, const info_nvrtc *nvrtc, const info_cache *cache) {
    json_writer json;
    size_t i;
    json_begin_file(&json, stdout, 2);
    json_begin(&json, NULL, '{');
    json_text(&json, "moe_route", MOE_ROUTE_VERSION);
    json_text(&json, "kernels", moer_sources_digest);
    json_begin(&json, "driver", '{');
    json_text(&json, "cuda", driver->cuda_version ? info_version((uint32_t)driver->cuda_version) : NULL);
    json_text(&json, "version", driver->kernel_module[0] ? driver->kernel_module : NULL);
    json_text(&json, "reason", driver->reason[0] ? driver->reason : NULL);
    json_end(&json, '}');
    json_begin(&json, "devices", '[');
    for (i = 0; i < (size_t)driver->count; i++) {
        const info_device *device = &driver->devices[i];
        json_begin(&json, NULL, '{');
        json_text(&json, "name", device->name);
        json_count(&json, "target", device->target);
        json_count(&json, "multiprocessors", device->multiprocessors);
        json_count(&json, "memory_bytes", device->memory);
        json_truth(&json, "supported", device->target >= 80);
        json_end(&json, '}');
    }
    json_end(&json, ']');
    json_begin(&json, "nvrtc", '{');
    json_truth(&json, "works", nvrtc->status == MOE_ROUTE_OK);
    json_text(&json, "version", nvrtc->version ? info_version(nvrtc->version) : NULL);
    json_text(&json, "path", nvrtc->path[0] ? nvrtc->path : NULL);
    json_text(&json, "message", nvrtc->message[0] ? nvrtc->message : NULL);
    json_end(&json, '}');
    json_begin(&json, "cache", '{');
    json_text(&json, "folder", cache->folder[0] ? cache->folder : NULL);
    json_text(&json, "state", cache->state);
    json_text(&json, "reason", cache->reason[0] ? cache->reason : NULL);
    json_count(&json, "bytes", cache->bytes);
    json_end(&json, '}');
    json_begin(&json, "variants", '[');
    for (i = 0; i < cache->count; i++) {
        const info_variant *v = &cache->variants[i];
        json_begin(&json, NULL, '{');
        json_truth(&json, "sound", v->entry.sound);
        json_truth(&json, "current", v->entry.current);
        json_text(&json, "kernel", v->kernel);
        json_count(&json, "target", v->entry.target);
        json_text(&json, "variant", v->variant);
        json_text(&json, "nvrtc", v->entry.nvrtc_version ? info_version(v->entry.nvrtc_version) : NULL);
        json_count(&json, "bytes", v->entry.size);
        json_number(&json, "seconds_unused", (double)v->entry.seconds_unused, 12);
        json_text(&json, "path", v->path);
        json_end(&json, '}');
    }
    json_end(&json, ']');
    json_begin(&json, "environment", '{');
    for (i = 0; i < INFO_NUM_VARIABLES; i++)
        if (getenv(info_variables[i])) json_text(&json, info_variables[i], getenv(info_variables[i]));
    json_end(&json, '}');
    json_end(&json, '}');
}

static int info_main(int argc, char **argv) {
    static info_driver driver;
    static info_nvrtc nvrtc;
    static info_cache cache;
    options_parse(&info_command, argc, argv);
    info_find_devices(&driver);
    info_find_cache(&cache); /* before NVRTC is tried, so that nothing new is there */
    info_try_nvrtc(&driver, &nvrtc);
    if (info_wanted.json) info_write_json(&driver, &nvrtc, &cache);
    else info_print(&driver, &nvrtc, &cache);
    return STATUS_OK;
}

#endif /* INFO_H */
