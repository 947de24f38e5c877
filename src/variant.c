/*
  variant.c: kernel families, and the table of variants that a context has loaded: each one compiled or read once, however
  many layers and threads ask for it. How cubins are compiled and kept on disk belongs to nvrtc.c and cache.c; which
  variants a layer needs, to layer.c.
*/
#include "internal.h"

static const moer_family moer_family_route = {"route", "route.cu", {"moe_route_route", NULL, NULL}};
static const moer_family moer_family_topk = {"topk", "topk.cu", {"moe_route_topk", NULL, NULL}};
static const moer_family moer_family_maps = {"maps", "maps.cu", {"moe_route_maps_count", "moe_route_maps_scatter", "moe_route_maps_sort"}};
static const moer_family moer_family_maps_cub = {"maps_cub", "maps_cub.cu", {"moe_route_maps_cub_count", "moe_route_maps_cub_scatter", NULL}};
static const moer_family moer_family_matmul = {"matmul", "matmul.cu", {"moe_route_matmul", NULL, NULL}};
static const moer_family moer_family_matmul_bulk = {"matmul_bulk", "matmul_bulk.cu", {"moe_route_matmul_bulk", NULL, NULL}};
static const moer_family moer_family_grouped = {"grouped", "grouped.cu", {"moe_route_grouped", NULL, NULL}};
static const moer_family moer_family_grouped_warpgroups = {"grouped_warpgroups", "grouped_warpgroups.cu", {"moe_route_grouped_warpgroups", NULL, NULL}};
static const moer_family moer_family_down = {"down", "down.cu", {"moe_route_down", NULL, NULL}};
static const moer_family moer_family_combine = {"combine", "combine.cu", {"moe_route_combine", NULL, NULL}};
static const moer_family moer_family_expand = {"expand", "expand.cu", {"moe_route_expand", NULL, NULL}};
static const moer_family moer_family_dispatch = {"dispatch", "dispatch.cu", {"moe_route_dispatch", NULL, NULL}};
static const moer_family moer_family_dispatch_large = {"dispatch_large", "dispatch_large.cu", {"moe_route_dispatch_count", "moe_route_dispatch_scatter", NULL}};
static const moer_family moer_family_slots = {"slots", "slots.cu", {"moe_route_slots", NULL, NULL}};

static uint32_t moer_most_shared_bytes(uint32_t target) {
    if (target / 10 == 12 || target == 86 || target == 89) return 99 * 1024;
    return (target / 10 == 8 ? 163 : 227) * 1024;
}

static uint32_t moer_defined(const char *defines, const char *name) {
    const size_t length = strlen(name);
    const char *at;
    for (at = defines; (at = strstr(at, name)) != NULL; at += length)
        if ((at == defines || at[-1] == ' ') && at[length] == '=') return (uint32_t)strtoul(at + length + 1, NULL, 10);
    return 0;
}

/* Loads the code and finds its kernels, in the context that is current. `call` is what failed. */
static moer_cu_result moer_variant_load_current(moe_route_context *context, moer_variant *variant, const moer_bytes *code, const char **call) {
    const moer_driver *driver = &context->driver;
    moer_cu_result result;
    int i, threads = 0;
    *call = "cuLibraryLoadData";
    result = driver->cuLibraryLoadData(&variant->library, code->data, NULL, NULL, 0, NULL, NULL, 0);
    if (result != 0) {
        variant->library = NULL;
        return result;
    }
    for (i = 0; i < MOER_MAX_ENTRIES && variant->family->entries[i] != NULL && result == 0; i++) {
        moer_cu_kernel kernel = NULL;
        *call = "cuLibraryGetKernel";
        result = driver->cuLibraryGetKernel(&kernel, variant->library, variant->family->entries[i]);
        if (result != 0) break;
        *call = "cuKernelGetFunction";
        result = driver->cuKernelGetFunction(&variant->functions[i], kernel);
        if (result != 0) break;
        if (driver->cuFuncLoad != NULL) { /* now, not lazily at a first launch that may be captured */
            *call = "cuFuncLoad";
            result = driver->cuFuncLoad(variant->functions[i]);
            if (result != 0) break;
        }
        *call = "cuFuncGetAttribute";
        result = driver->cuFuncGetAttribute(&variant->static_shared_bytes[i], MOER_CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, variant->functions[i]);
        if (result == 0) result = driver->cuFuncGetAttribute(&threads, MOER_CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, variant->functions[i]);
        if (result != 0) break;
        if (variant->dynamic_shared_bytes != 0) {
            *call = "cuFuncSetAttribute";
            result = driver->cuFuncSetAttribute(variant->functions[i], MOER_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)variant->dynamic_shared_bytes);
            if (result != 0) break;
        }
        *call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        result = driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(&variant->resident_blocks[i], variant->functions[i], threads, variant->dynamic_shared_bytes);
    }
    if (result != 0) {
        driver->cuLibraryUnload(variant->library);
        variant->library = NULL;
    }
    return result;
}

/* Loading is forbidden to a thread while it captures a stream, and to all while one captures globally: relaxed for a
   moment, it is allowed, and harmless since nothing here touches the captured stream. */
static moe_route_status moer_variant_load(moe_route_context *context, moer_variant *variant, const moer_bytes *code, moer_cu_result *result,
                                          const char **call) {
    int pushed, mode = MOER_CU_STREAM_CAPTURE_MODE_RELAXED;
    moe_route_status status = moer_context_enter(context, &pushed);
    if (status != MOE_ROUTE_OK) return status;
    context->driver.cuThreadExchangeStreamCaptureMode(&mode);
    *result = moer_variant_load_current(context, variant, code, call);
    context->driver.cuThreadExchangeStreamCaptureMode(&mode);
    moer_context_leave(context, pushed);
    return MOE_ROUTE_OK;
}

/* Tries what is kept on disk and in packs, one after the other; *made tells whether one of them served. */
static moe_route_status moer_variant_read(moe_route_context *context, moer_variant *variant, moer_lookup *lookup, int *made) {
    *made = 0;
    while (!*made && moer_lookup_next(context, lookup)) {
        moer_bytes code;
        moer_cu_result result = 0;
        const char *call = "";
        moe_route_status status = MOE_ROUTE_OK;
        code.data = lookup->bytes.data + (lookup->entry.payload - lookup->bytes.data);
        code.size = lookup->entry.payload_size;
        if (context->device == MOE_ROUTE_DEVICE_GPU) status = moer_variant_load(context, variant, &code, &result, &call);
        if (status != MOE_ROUTE_OK) {
            moer_free(context, lookup->bytes.data);
            return status;
        }
        if (result != 0) {
            moer_log(context, MOE_ROUTE_LOG_WARNING, "variant %s: the driver refused the code that was kept (%s: error %d); it is made again",
                     variant->family->name, call, result);
            moer_lookup_refused(context, lookup);
            continue;
        }
        variant->origin = lookup->origin;
        variant->cubin_size = code.size;
        variant->entry = lookup->bytes;
        *made = 1;
    }
    return MOE_ROUTE_OK;
}

static moe_route_status moer_variant_compile(moe_route_context *context, moer_variant *variant, moer_team *team, const moer_lookup *lookup) {
    moer_bytes code;
    moer_cu_result result = 0;
    const char *call = "";
    moe_route_status status = moer_nvrtc_open(context); /* first, so that a failure is told once */
    if (status == MOE_ROUTE_OK && team != NULL) moer_team_grow(team);
    if (status == MOE_ROUTE_OK) status = moer_nvrtc_compile(context, variant->family->file, variant->defines, &code);
    if (status != MOE_ROUTE_OK) return status;
    if (context->device == MOE_ROUTE_DEVICE_GPU) {
        status = moer_variant_load(context, variant, &code, &result, &call);
        if (status == MOE_ROUTE_OK && result != 0) status = moer_driver_fail(context, call, result);
    }
    if (status == MOE_ROUTE_OK) {
        variant->origin = MOE_ROUTE_ORIGIN_COMPILED;
        variant->cubin_size = code.size;
        variant->entry = moer_entry_make(context, &lookup->key, &code);
        if (variant->entry.data != NULL) moer_cache_store(context, lookup, &variant->entry);
        else if (context->device == MOE_ROUTE_DEVICE_COMPILE)
            status = moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "variant %s: its code, of %lu bytes, can't be kept: it is too large, no cubin, or memory ran out", variant->family->name,
                               (unsigned long)code.size);
    }
    moer_free(context, code.data);
    return status;
}

static moe_route_status moer_variant_make(moe_route_context *context, moer_variant *variant, moer_team *team) {
    const double start = moer_milliseconds();
    moer_lookup *lookup = (moer_lookup *)moer_alloc(context, sizeof *lookup);
    int made = 0;
    moe_route_status status;
    if (lookup == NULL) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a variant of %s", variant->family->name);
    if (!moer_key_make(&lookup->key, variant->family->name, variant->defines, context->target))
        status = moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "variant %s: its constants are too long: %s", variant->family->name, variant->defines);
    else
        status = moer_variant_read(context, variant, lookup, &made);
    if (status == MOE_ROUTE_OK && !made) status = moer_variant_compile(context, variant, team, lookup);
    moer_free(context, lookup);
    if (context->device != MOE_ROUTE_DEVICE_COMPILE || status != MOE_ROUTE_OK) {
        moer_free(context, variant->entry.data);
        memset(&variant->entry, 0, sizeof variant->entry);
    }
    if (status != MOE_ROUTE_OK) return status;
    variant->milliseconds = moer_milliseconds() - start;
    moer_log(context, MOE_ROUTE_LOG_INFO, "variant %s %s for sm_%u: %s in %.1f ms", variant->family->name, variant->defines, (unsigned)context->target,
             variant->origin == MOE_ROUTE_ORIGIN_COMPILED ? "compiled" : variant->origin == MOE_ROUTE_ORIGIN_PACK ? "read from a pack" : "read from the cache", variant->milliseconds);
    return MOE_ROUTE_OK;
}

/* Takes a failed variant, which nobody waits for any more, out of the table. The mutex is held; the caller frees it later,
   because the allocator may not be called under it. */
static void moer_variant_forget(moe_route_context *context, moer_variant *variant) {
    moer_variant **link = &context->variants;
    while (*link != variant) link = &(*link)->next;
    *link = variant->next;
}

static moer_variant *moer_variant_find(const moe_route_context *context, const moer_family *family, const char *defines) {
    moer_variant *variant;
    for (variant = context->variants; variant != NULL; variant = variant->next)
        if (variant->state >= 0 && variant->family == family && strcmp(variant->defines, defines) == 0) return variant;
    return NULL;
}

/* Waits until a variant that is in the table is made, and releases the mutex. */
static moe_route_status moer_variant_wait(moe_route_context *context, moer_variant *variant, const moer_variant **found) {
    moe_route_status status;
    int forgotten;
    variant->users++;
    while (variant->state == 0) moer_condition_wait(&context->variant_ready, &context->mutex);
    status = variant->status;
    variant->users--;
    forgotten = variant->state < 0 && variant->users == 0;
    if (forgotten) moer_variant_forget(context, variant);
    else if (variant->state > 0) *found = variant;
    moer_mutex_unlock(&context->mutex);
    if (forgotten) moer_free(context, variant);
    return status;
}

/* The variant, loaded: from the table, else kept code, else compiled. A thread that asks for one which another thread is
   making waits for it; different variants are made side by side. */
static moe_route_status moer_variant_get(moe_route_context *context, const moer_family *family, const char *defines, moer_team *team, const moer_variant **found) {
    moer_variant *made, *variant;
    moe_route_status status;
    int forgotten = 0;
    *found = NULL;
    moer_mutex_lock(&context->mutex);
    variant = moer_variant_find(context, family, defines);
    if (variant != NULL) return moer_variant_wait(context, variant, found);
    moer_mutex_unlock(&context->mutex);

    made = (moer_variant *)moer_alloc(context, sizeof *made);
    if (made == NULL) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a variant of %s", family->name);
    if (!moer_append(made->defines, sizeof made->defines, "%s", defines)) {
        moer_free(context, made);
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "variant %s: its constants are too long: %s", family->name, defines);
    }
    made->family = family;
    made->dynamic_shared_bytes = moer_defined(made->defines, "SHARED_BYTES");
    made->users = 1;
    moer_mutex_lock(&context->mutex);
    variant = moer_variant_find(context, family, defines);
    if (variant != NULL) { /* another thread came first, while this one had no mutex */
        status = moer_variant_wait(context, variant, found);
        moer_free(context, made);
        return status;
    }
    made->next = context->variants;
    context->variants = made;
    moer_mutex_unlock(&context->mutex);

    status = moer_variant_make(context, made, team);

    moer_mutex_lock(&context->mutex);
    made->status = status;
    made->state = status == MOE_ROUTE_OK ? 1 : -1;
    made->users--;
    if (status == MOE_ROUTE_OK) *found = made;
    else if (made->users == 0) forgotten = 1;
    if (forgotten) moer_variant_forget(context, made);
    moer_condition_broadcast(&context->variant_ready);
    moer_mutex_unlock(&context->mutex);
    if (forgotten) moer_free(context, made);
    return status;
}

static void moer_variants_destroy(moe_route_context *context, int unload) {
    while (context->variants != NULL) {
        moer_variant *variant = context->variants;
        context->variants = variant->next;
        if (unload && variant->library != NULL) context->driver.cuLibraryUnload(variant->library); /* may fail when the driver is already gone */
        moer_free(context, variant->entry.data);
        moer_free(context, variant);
    }
}
