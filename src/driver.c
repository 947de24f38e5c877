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
    int required;
} moer_symbol;

static const moer_symbol moer_driver_symbols[] = {
    {"cuInit", offsetof(moer_driver, cuInit), 1},
    {"cuDriverGetVersion", offsetof(moer_driver, cuDriverGetVersion), 1},
    {"cuGetErrorName", offsetof(moer_driver, cuGetErrorName), 1},
    {"cuGetErrorString", offsetof(moer_driver, cuGetErrorString), 1},
    {"cuDeviceGetCount", offsetof(moer_driver, cuDeviceGetCount), 1},
    {"cuDeviceGet", offsetof(moer_driver, cuDeviceGet), 1},
    {"cuDeviceGetName", offsetof(moer_driver, cuDeviceGetName), 1},
    {"cuDeviceGetAttribute", offsetof(moer_driver, cuDeviceGetAttribute), 1},
    {"cuDevicePrimaryCtxRetain", offsetof(moer_driver, cuDevicePrimaryCtxRetain), 1},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(moer_driver, cuDevicePrimaryCtxRelease), 1},
    {"cuCtxGetCurrent", offsetof(moer_driver, cuCtxGetCurrent), 1},
    {"cuCtxGetDevice", offsetof(moer_driver, cuCtxGetDevice), 1},
    {"cuCtxPushCurrent_v2", offsetof(moer_driver, cuCtxPushCurrent), 1},
    {"cuCtxPopCurrent_v2", offsetof(moer_driver, cuCtxPopCurrent), 1},
    {"cuThreadExchangeStreamCaptureMode", offsetof(moer_driver, cuThreadExchangeStreamCaptureMode), 1},
    {"cuLibraryLoadData", offsetof(moer_driver, cuLibraryLoadData), 1},
    {"cuLibraryUnload", offsetof(moer_driver, cuLibraryUnload), 1},
    {"cuLibraryGetKernel", offsetof(moer_driver, cuLibraryGetKernel), 1},
    {"cuKernelGetFunction", offsetof(moer_driver, cuKernelGetFunction), 1},
    {"cuFuncGetAttribute", offsetof(moer_driver, cuFuncGetAttribute), 1},
    {"cuFuncLoad", offsetof(moer_driver, cuFuncLoad), 0},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", offsetof(moer_driver, cuOccupancyMaxActiveBlocksPerMultiprocessor), 1},
    {"cuLaunchKernelEx", offsetof(moer_driver, cuLaunchKernelEx), 1},
};

/* Fills a struct of function pointers. Returns the name of a required function that is missing, or NULL. */
static const char *moer_symbols_find(void *library, const moer_symbol *symbols, size_t count, void *functions) {
    const char *missing = NULL;
    size_t i;
    for (i = 0; i < count; i++) {
        moer_function function = moer_library_symbol(library, symbols[i].name);
        if (!function && symbols[i].required && !missing) missing = symbols[i].name;
        memcpy((char *)functions + symbols[i].offset, &function, sizeof function);
    }
    return missing;
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
