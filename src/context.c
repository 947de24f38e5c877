/*
  context.c: a context's life: which device it stands for, and entering its CUDA context. The driver's loading belongs to
  driver.c.
*/
#include "internal.h"

/* A process that fork made can use neither CUDA nor NVRTC, whose threads it hasn't inherited. */
static int moer_context_is_forked(const moe_route_context *context) { return context->process_id != moer_process_id(); }

static moe_route_status moer_context_forked(moe_route_context *context) {
    return moer_fail(context, MOE_ROUTE_ERROR_FORKED, "the context was created before fork(); CUDA and NVRTC can't be used in the child process");
}

static moe_route_status moer_context_check(moe_route_context *context, const char *call) {
    if (!context->usable) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: the context's creation failed", call);
    if (context->device != MOE_ROUTE_DEVICE_CPU && moer_context_is_forked(context)) return moer_context_forked(context);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_context_enter(moe_route_context *context, int *pushed) {
    moe_route_cuda_context current = NULL;
    moer_cu_result result;
    *pushed = 0;
    if (moer_context_is_forked(context)) return moer_context_forked(context);
    result = context->driver.cuCtxGetCurrent(&current);
    if (result == 0 && current == context->cu_context) return MOE_ROUTE_OK;
    result = context->driver.cuCtxPushCurrent(context->cu_context);
    if (result != 0) return moer_driver_fail(context, "cuCtxPushCurrent", result);
    *pushed = 1;
    return MOE_ROUTE_OK;
}

static void moer_context_leave(moe_route_context *context, int pushed) {
    moe_route_cuda_context popped;
    if (pushed) context->driver.cuCtxPopCurrent(&popped);
}

/* Decides on the CUDA context and its device. */
static moe_route_status moer_context_bind(moe_route_context *context, int ordinal, moe_route_cuda_context wanted) {
    const moer_driver *driver = &context->driver;
    moer_cu_result result;
    moe_route_cuda_context current = NULL, popped;
    moer_cu_device device = 0;
    int count = 0;

    if (wanted == NULL && driver->cuCtxGetCurrent(&current) == 0 && current != NULL) {
        result = driver->cuCtxGetDevice(&device);
        if (result != 0) return moer_driver_fail(context, "cuCtxGetDevice", result);
        if (ordinal == 0 || device == ordinal) wanted = current;
    }
    if (wanted != NULL) {
        result = driver->cuCtxPushCurrent(wanted);
        if (result != 0) return moer_driver_fail(context, "cuCtxPushCurrent of the given context", result);
        result = driver->cuCtxGetDevice(&context->cu_device);
        driver->cuCtxPopCurrent(&popped);
        if (result != 0) return moer_driver_fail(context, "cuCtxGetDevice", result);
        context->cu_context = wanted;
        return MOE_ROUTE_OK;
    }
    result = driver->cuDeviceGetCount(&count);
    if (result != 0) return moer_driver_fail(context, "cuDeviceGetCount", result);
    if (count == 0) return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "the NVIDIA driver sees no GPU");
    if (ordinal >= count)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: device_ordinal is %d; there are %d GPUs, numbered from 0", ordinal, count);
    result = driver->cuDeviceGet(&context->cu_device, ordinal);
    if (result != 0) return moer_driver_fail(context, "cuDeviceGet", result);
    result = driver->cuDevicePrimaryCtxRetain(&context->cu_context, context->cu_device);
    if (result != 0) return moer_driver_fail(context, "cuDevicePrimaryCtxRetain", result);
    context->retained_primary = 1;
    return MOE_ROUTE_OK;
}

static moe_route_status moer_context_open_gpu(moe_route_context *context, const moe_route_context_desc *desc) {
    const moer_driver *driver = &context->driver;
    int major = 0, minor = 0, multiprocessors = 0, l2_bytes = 0;
    moer_cu_result result;
    moe_route_status status = moer_driver_open(context);
    if (status == MOE_ROUTE_OK) status = moer_context_bind(context, desc->device_ordinal, desc->cuda_context);
    if (status != MOE_ROUTE_OK) return status;
    result = driver->cuDeviceGetName(context->name, (int)sizeof context->name, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&major, MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&minor, MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&multiprocessors, MOER_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&l2_bytes, MOER_CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, context->cu_device);
    if (result != 0) return moer_driver_fail(context, "cuDeviceGetAttribute", result);
    context->l2_bytes = l2_bytes > 0 ? (uint64_t)l2_bytes : 0;
    context->target = (uint32_t)(major * 10 + minor);
    context->num_multiprocessors = (uint32_t)multiprocessors;
    if (major < 8)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "%s has compute capability %d.%d; 8.0 or newer is needed (the CPU backend runs everywhere: MOE_ROUTE_DEVICE_CPU)",
                         context->name, major, minor);
    return MOE_ROUTE_OK;
}

/* What the context's information names, also when the creation fails. */
static moe_route_device moer_context_device(moe_route_device wanted) {
    if (wanted == MOE_ROUTE_DEVICE_DEFAULT) return MOE_ROUTE_DEVICE_GPU;
    return wanted == MOE_ROUTE_DEVICE_GPU || wanted == MOE_ROUTE_DEVICE_COMPILE ? wanted : MOE_ROUTE_DEVICE_CPU;
}

static moe_route_status moer_context_open(moe_route_context *context, const moe_route_context_desc *desc) {
    moe_route_status status;
    context->device = moer_context_device(desc->device);
    if (desc->num_cache_read_only_dirs > 0 && desc->cache_read_only_dirs == NULL)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: cache_read_only_dirs is NULL and num_cache_read_only_dirs is %u", (unsigned)desc->num_cache_read_only_dirs);
    if ((desc->allocator.alloc == NULL) != (desc->allocator.free == NULL))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: allocator.alloc and allocator.free are given both or neither");
    if (desc->device_ordinal < 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: device_ordinal is %d; allowed is 0 and up", (int)desc->device_ordinal);
    if (desc->nvrtc_path != NULL && !moer_append(context->nvrtc_path, sizeof context->nvrtc_path, "%s", desc->nvrtc_path))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: nvrtc_path has more than %d characters", MOER_PATH_MAX - 1);
    switch (desc->device) {
    case MOE_ROUTE_DEVICE_DEFAULT:
    case MOE_ROUTE_DEVICE_GPU: {
        int falls_back;
        memset(&context->logger, 0, sizeof context->logger); /* whether a failure is an error shows afterwards */
        status = moer_context_open_gpu(context, desc);
        context->logger = desc->logger;
        falls_back = status == MOE_ROUTE_ERROR_NO_DEVICE && desc->device == MOE_ROUTE_DEVICE_DEFAULT;
        if (status != MOE_ROUTE_OK)
            moer_log(context, falls_back ? MOE_ROUTE_LOG_INFO : MOE_ROUTE_LOG_ERROR, "%s%s", falls_back ? "using the CPU backend: " : "",
                     context->message != NULL ? context->message : moe_route_status_name(status));
        if (falls_back) {
            free(context->message);
            context->message = NULL;
            break;
        }
        if (status == MOE_ROUTE_OK) moer_cache_open(context, desc);
        return status;
    }
    case MOE_ROUTE_DEVICE_CPU:
        break;
    case MOE_ROUTE_DEVICE_COMPILE:
        if (desc->compile_target < 80 || desc->compile_target > 999)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: compile_target is %u; allowed is an architecture from 80 on, such as 90 for sm_90",
                             (unsigned)desc->compile_target);
        context->target = desc->compile_target;
        moer_append(context->name, sizeof context->name, "compiling for sm_%u", (unsigned)context->target);
        moer_cache_open(context, desc);
        return MOE_ROUTE_OK;
    default:
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: device is %d; allowed are the values of moe_route_device", (int)desc->device);
    }
    context->device = MOE_ROUTE_DEVICE_CPU;
    moer_append(context->name, sizeof context->name, "CPU");
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API moe_route_status moe_route_context_create(const moe_route_context_desc *desc, moe_route_context **out) {
    moe_route_context_desc defaults;
    moe_route_context *context;
    moe_route_status status;
    if (out == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    *out = NULL;
    memset(&defaults, 0, sizeof defaults);
    if (desc == NULL) desc = &defaults;
    context = desc->allocator.alloc != NULL && desc->allocator.free != NULL ? (moe_route_context *)desc->allocator.alloc(sizeof *context, desc->allocator.user)
                                                                           : (moe_route_context *)malloc(sizeof *context);
    if (context == NULL) return MOE_ROUTE_ERROR_MEMORY;
    memset(context, 0, sizeof *context);
    if (desc->allocator.alloc != NULL && desc->allocator.free != NULL) context->allocator = desc->allocator;
    context->logger = desc->logger;
    context->process_id = moer_process_id();
    moer_mutex_init(&context->mutex);
    moer_condition_init(&context->variant_ready);
    *out = context;
    status = moer_context_open(context, desc);
    context->usable = status == MOE_ROUTE_OK;
    return status;
}

MOE_ROUTE_API void moe_route_context_destroy(moe_route_context *context) {
    moe_route_allocator allocator;
    if (context == NULL) return;
    moer_variants_destroy(context, !moer_context_is_forked(context));
    moer_packs_close(context);
    moer_cache_close(context);
    moer_tunings_destroy(context);
    if (!moer_context_is_forked(context)) { /* a child's copies may look as if threads waited on them, forever */
        if (context->retained_primary) context->driver.cuDevicePrimaryCtxRelease(context->cu_device);
        moer_condition_destroy(&context->variant_ready);
        moer_mutex_destroy(&context->mutex);
    }
    free(context->message);
    allocator = context->allocator;
    if (allocator.free != NULL) allocator.free(context, allocator.user);
    else free(context);
}

MOE_ROUTE_API void moe_route_context_get_info(const moe_route_context *context, moe_route_context_info *info) {
    moe_route_context *changing = (moe_route_context *)(uintptr_t)context; /* locking changes only the mutex */
    if (info == NULL) return;
    memset(info, 0, sizeof *info);
    if (context == NULL) return;
    info->device = context->device;
    info->target = context->target;
    info->num_multiprocessors = context->num_multiprocessors;
    info->driver_version = (uint32_t)context->driver_version;
    moer_append(info->name, sizeof info->name, "%s", context->name);
    moer_mutex_lock(&changing->mutex);
    info->nvrtc_version = context->nvrtc.state > 0 ? (uint32_t)context->nvrtc.version : 0u;
    moer_append(info->nvrtc_path, sizeof info->nvrtc_path, "%s", context->nvrtc.state > 0 ? context->nvrtc.path : "");
    moer_mutex_unlock(&changing->mutex);
    moer_append(info->cache_dir, sizeof info->cache_dir, "%s", context->cache.folder);
}
