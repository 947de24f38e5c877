/*
  driver.c: opens the CUDA driver and finds its functions. No link against libcuda, no CUDA header. What is done with
  the driver belongs to context.c, variant.c and the launches.

  Only libcuda.so.1 is opened: the plain name libcuda.so is that of the toolkit's stub, which fails every call.
  Functions are looked up by the exact name of the version that internal.h declares, so that a newer driver changes no
  signature.
*/
#include "internal.h"

#if defined(_WIN32)
#define MOER_DRIVER_LIBRARY "nvcuda.dll"
#else
#define MOER_DRIVER_LIBRARY "libcuda.so.1"
#endif

#define MOER_CUDA_ERROR_STUB_LIBRARY 34
#define MOER_CUDA_ERROR_NO_DEVICE 100

#define MOER_COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef struct moer_symbol { /* a function to look up, and the field that it goes to */
    const char *name;
    size_t offset;
    int required; /* MOER_OPTIONAL, ... */
} moer_symbol;

#define MOER_OPTIONAL 0
#define MOER_REQUIRED 1
#define MOER_FOR_TUNING 2 /* required by that alone */

static const moer_symbol moer_driver_symbols[] = {
    {"cuInit", offsetof(moer_driver, cuInit), MOER_REQUIRED},
    {"cuDriverGetVersion", offsetof(moer_driver, cuDriverGetVersion), MOER_REQUIRED},
    {"cuGetErrorName", offsetof(moer_driver, cuGetErrorName), MOER_REQUIRED},
    {"cuGetErrorString", offsetof(moer_driver, cuGetErrorString), MOER_REQUIRED},
    {"cuDeviceGetCount", offsetof(moer_driver, cuDeviceGetCount), MOER_REQUIRED},
    {"cuDeviceGet", offsetof(moer_driver, cuDeviceGet), MOER_REQUIRED},
    {"cuDeviceGetName", offsetof(moer_driver, cuDeviceGetName), MOER_REQUIRED},
    {"cuDeviceGetAttribute", offsetof(moer_driver, cuDeviceGetAttribute), MOER_REQUIRED},
    {"cuDevicePrimaryCtxRetain", offsetof(moer_driver, cuDevicePrimaryCtxRetain), MOER_REQUIRED},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(moer_driver, cuDevicePrimaryCtxRelease), MOER_REQUIRED},
    {"cuCtxGetCurrent", offsetof(moer_driver, cuCtxGetCurrent), MOER_REQUIRED},
    {"cuCtxGetDevice", offsetof(moer_driver, cuCtxGetDevice), MOER_REQUIRED},
    {"cuCtxPushCurrent_v2", offsetof(moer_driver, cuCtxPushCurrent), MOER_REQUIRED},
    {"cuCtxPopCurrent_v2", offsetof(moer_driver, cuCtxPopCurrent), MOER_REQUIRED},
    {"cuThreadExchangeStreamCaptureMode", offsetof(moer_driver, cuThreadExchangeStreamCaptureMode), MOER_REQUIRED},
    {"cuLibraryLoadData", offsetof(moer_driver, cuLibraryLoadData), MOER_REQUIRED},
    {"cuLibraryUnload", offsetof(moer_driver, cuLibraryUnload), MOER_REQUIRED},
    {"cuLibraryGetKernel", offsetof(moer_driver, cuLibraryGetKernel), MOER_REQUIRED},
    {"cuKernelGetFunction", offsetof(moer_driver, cuKernelGetFunction), MOER_REQUIRED},
    {"cuFuncGetAttribute", offsetof(moer_driver, cuFuncGetAttribute), MOER_REQUIRED},
    {"cuFuncSetAttribute", offsetof(moer_driver, cuFuncSetAttribute), MOER_REQUIRED},
    {"cuFuncLoad", offsetof(moer_driver, cuFuncLoad), MOER_OPTIONAL},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", offsetof(moer_driver, cuOccupancyMaxActiveBlocksPerMultiprocessor), MOER_REQUIRED},
    {"cuLaunchKernelEx", offsetof(moer_driver, cuLaunchKernelEx), MOER_REQUIRED},
    {"cuMemcpyHtoDAsync_v2", offsetof(moer_driver, cuMemcpyHtoDAsync), MOER_FOR_TUNING},
    {"cuMemcpyDtoHAsync_v2", offsetof(moer_driver, cuMemcpyDtoHAsync), MOER_FOR_TUNING},
    {"cuStreamCreate", offsetof(moer_driver, cuStreamCreate), MOER_FOR_TUNING},
    {"cuStreamDestroy_v2", offsetof(moer_driver, cuStreamDestroy), MOER_FOR_TUNING},
    {"cuStreamSynchronize", offsetof(moer_driver, cuStreamSynchronize), MOER_FOR_TUNING},
    {"cuStreamBeginCapture_v2", offsetof(moer_driver, cuStreamBeginCapture), MOER_FOR_TUNING},
    {"cuStreamEndCapture", offsetof(moer_driver, cuStreamEndCapture), MOER_FOR_TUNING},
    {"cuGraphInstantiateWithFlags", offsetof(moer_driver, cuGraphInstantiateWithFlags), MOER_FOR_TUNING},
    {"cuGraphLaunch", offsetof(moer_driver, cuGraphLaunch), MOER_FOR_TUNING},
    {"cuGraphExecDestroy", offsetof(moer_driver, cuGraphExecDestroy), MOER_FOR_TUNING},
    {"cuGraphDestroy", offsetof(moer_driver, cuGraphDestroy), MOER_FOR_TUNING},
    {"cuEventCreate", offsetof(moer_driver, cuEventCreate), MOER_FOR_TUNING},
    {"cuEventDestroy_v2", offsetof(moer_driver, cuEventDestroy), MOER_FOR_TUNING},
    {"cuEventRecord", offsetof(moer_driver, cuEventRecord), MOER_FOR_TUNING},
    {"cuEventSynchronize", offsetof(moer_driver, cuEventSynchronize), MOER_FOR_TUNING},
    {"cuEventElapsedTime", offsetof(moer_driver, cuEventElapsedTime), MOER_FOR_TUNING},
};

/* Fills a struct of function pointers. Returns the name of a required function that is missing, or NULL. */
static const char *moer_symbols_find(void *library, const moer_symbol *symbols, size_t count, void *functions) {
    const char *missing = NULL;
    size_t i;
    for (i = 0; i < count; i++) {
        moer_function function = moer_library_symbol(library, symbols[i].name);
        if (!function && symbols[i].required == MOER_REQUIRED && !missing) missing = symbols[i].name;
        memcpy((char *)functions + symbols[i].offset, &function, sizeof function);
    }
    return missing;
}

static const char *moer_driver_missing(const moer_driver *driver) {
    size_t i;
    for (i = 0; i < MOER_COUNT(moer_driver_symbols); i++) {
        moer_function function;
        memcpy(&function, (const char *)driver + moer_driver_symbols[i].offset, sizeof function);
        if (function == NULL && moer_driver_symbols[i].required == MOER_FOR_TUNING) return moer_driver_symbols[i].name;
    }
    return NULL;
}

static void moer_driver_describe(const moer_driver *driver, moer_cu_result result, const char **name,
                                 const char **text) {
    *name = *text = NULL;
    if (driver->cuGetErrorName) driver->cuGetErrorName(result, name);
    if (driver->cuGetErrorString) driver->cuGetErrorString(result, text);
    if (!*name) *name = "an error that the driver has no name for";
    if (!*text) *text = "no description";
}

static moe_route_status moer_driver_fail(moe_route_context *context, const char *call, moer_cu_result result) {
    const char *name, *text;
    moer_driver_describe(&context->driver, result, &name, &text);
    return moer_fail(context, MOE_ROUTE_ERROR_DRIVER, "%s: %s, error %d (%s)", call, name, result, text);
}

/* The message for a driver that is there and doesn't start. */
static moe_route_status moer_driver_unusable(moe_route_context *context, const moer_driver *driver, const char *call,
                                             moer_cu_result result) {
    const char *name, *text;
    if (result == MOER_CUDA_ERROR_STUB_LIBRARY) {
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE,
                         MOER_DRIVER_LIBRARY " is the CUDA toolkit's stub and not the NVIDIA driver; "
                                             "take the toolkit's stubs folder out of the library search path");
    }
    if (result == MOER_CUDA_ERROR_NO_DEVICE) {
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE,
                         "the NVIDIA driver is installed, but it finds no GPU (CUDA_VISIBLE_DEVICES may hide it)");
    }
    moer_driver_describe(driver, result, &name, &text);
    return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "the NVIDIA driver doesn't start: %s: %s, error %d (%s)", call,
                     name, result, text);
}

static moe_route_status moer_driver_open(moe_route_context *context) {
    moer_driver driver;
    moer_cu_result result;
    const char *missing;
    int version = 0;
    void *library = moer_library_open(MOER_DRIVER_LIBRARY);
    if (!library) {
        char reason[512];
        moer_library_error(reason, sizeof reason);
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "no NVIDIA driver: %s can't be loaded (%s)",
                         MOER_DRIVER_LIBRARY, reason);
    }
    memset(&driver, 0, sizeof driver);
    missing = moer_symbols_find(library, moer_driver_symbols, MOER_COUNT(moer_driver_symbols), &driver);
    if (!driver.cuInit || !driver.cuDriverGetVersion) {
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "%s has no %s: it isn't the NVIDIA driver",
                         MOER_DRIVER_LIBRARY, missing);
    }
    result = driver.cuDriverGetVersion(&version);
    if (result != 0) return moer_driver_unusable(context, &driver, "cuDriverGetVersion", result);
    context->driver_version = version;
    if (version < 12000) {
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED,
                         "the NVIDIA driver supports CUDA %d.%d; CUDA 12.0 or later is needed (driver 525 or later)",
                         version / 1000, version % 1000 / 10);
    }
    if (missing) {
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "the NVIDIA driver, of CUDA %d.%d, has no %s",
                         version / 1000, version % 1000 / 10, missing);
    }
    result = driver.cuInit(0);
    if (result != 0) return moer_driver_unusable(context, &driver, "cuInit", result);
    context->driver = driver;
    return MOE_ROUTE_OK;
}
