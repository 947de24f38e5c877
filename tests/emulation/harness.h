/*
  harness.h: what the tests of the emulation share: the emulated driver and NVRTC opened as the library opens the real
  ones, compiling and launching a kernel in a line, and the report. Tests of the library don't use it.
*/
#ifndef EMULATION_HARNESS_H
#define EMULATION_HARNESS_H

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

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
    launch_attribute *attributes;
    unsigned num_attributes;
} launch_config;

#define DRIVER_FUNCTIONS(X)                                                                                          \
    X(int, cuInit, (unsigned))                                                                                       \
    X(int, cuDeviceGetAttribute, (int *, int, int))                                                                  \
    X(int, cuDevicePrimaryCtxRetain, (void **, int))                                                                 \
    X(int, cuCtxPushCurrent_v2, (void *))                                                                            \
    X(int, cuCtxPopCurrent_v2, (void **))                                                                            \
    X(int, cuCtxSynchronize, (void))                                                                                 \
    X(int, cuThreadExchangeStreamCaptureMode, (int *))                                                               \
    X(int, cuMemAlloc_v2, (address *, size_t))                                                                       \
    X(int, cuMemFree_v2, (address))                                                                                  \
    X(int, cuMemcpyHtoD_v2, (address, const void *, size_t))                                                         \
    X(int, cuMemcpyDtoH_v2, (void *, address, size_t))                                                               \
    X(int, cuMemcpyHtoDAsync_v2, (address, const void *, size_t, void *))                                            \
    X(int, cuMemcpyDtoHAsync_v2, (void *, address, size_t, void *))                                                  \
    X(int, cuMemsetD8_v2, (address, unsigned char, size_t))                                                          \
    X(int, cuMemsetD8Async, (address, unsigned char, size_t, void *))                                                \
    X(int, cuStreamCreate, (void **, unsigned))                                                                      \
    X(int, cuStreamDestroy_v2, (void *))                                                                             \
    X(int, cuStreamSynchronize, (void *))                                                                            \
    X(int, cuStreamBeginCapture_v2, (void *, int))                                                                   \
    X(int, cuStreamEndCapture, (void *, void **))                                                                    \
    X(int, cuStreamIsCapturing, (void *, int *))                                                                     \
    X(int, cuEventCreate, (void **, unsigned))                                                                       \
    X(int, cuEventRecord, (void *, void *))                                                                          \
    X(int, cuEventSynchronize, (void *))                                                                             \
    X(int, cuEventElapsedTime_v2, (float *, void *, void *))                                                         \
    X(int, cuEventDestroy_v2, (void *))                                                                              \
    X(int, cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                                       \
    X(int, cuGraphLaunch, (void *, void *))                                                                          \
    X(int, cuGraphExecDestroy, (void *))                                                                             \
    X(int, cuGraphDestroy, (void *))                                                                                 \
    X(int, cuLibraryLoadData, (void **, const void *, const int *, void **, unsigned, const int *, void **, unsigned)) \
    X(int, cuLibraryUnload, (void *))                                                                                \
    X(int, cuLibraryGetKernel, (void **, void *, const char *))                                                      \
    X(int, cuKernelGetFunction, (void **, void *))                                                                   \
    X(int, cuFuncGetAttribute, (int *, int, void *))                                                                 \
    X(int, cuFuncLoad, (void *))                                                                                     \
    X(int, cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, void *, int, size_t))                                \
    X(int, cuLaunchKernelEx, (const launch_config *, void *, void **, void **))                                      \
    X(unsigned, moer_emulation_errors, (void))                                                                       \
    X(const char *, moer_emulation_last_error, (void))                                                               \
    X(unsigned long long, moer_emulation_launches, (void))                                                           \
    X(void, moer_emulation_set_seed, (unsigned long long))

#define NVRTC_FUNCTIONS(X)                                                                                       \
    X(int, nvrtcVersion, (int *, int *))                                                                         \
    X(int, nvrtcCreateProgram, (void **, const char *, const char *, int, const char *const *, const char *const *)) \
    X(int, nvrtcDestroyProgram, (void **))                                                                       \
    X(int, nvrtcCompileProgram, (void *, int, const char *const *))                                              \
    X(int, nvrtcGetProgramLogSize, (void *, size_t *))                                                           \
    X(int, nvrtcGetProgramLog, (void *, char *))                                                                 \
    X(int, nvrtcGetCUBINSize, (void *, size_t *))                                                                \
    X(int, nvrtcGetCUBIN, (void *, char *))                                                                      \
    X(int, nvrtcGetPTXSize, (void *, size_t *))                                                                  \
    X(int, nvrtcGetPTX, (void *, char *))

#define DECLARE(result, name, parameters) static result(*name) parameters;
DRIVER_FUNCTIONS(DECLARE)
NVRTC_FUNCTIONS(DECLARE)
#undef DECLARE

static int tests_failed;

static void harness_symbol(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    if (!symbol) {
        printf("FAIL setup: %s is missing\n", name);
        exit(1);
    }
    memcpy(function, &symbol, sizeof symbol);
}

static void harness_open(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *nvrtc = dlopen("libnvrtc.so.13", RTLD_NOW | RTLD_LOCAL), *context;
    if (!driver || !nvrtc) {
        printf("FAIL setup: %s\n", dlerror());
        exit(1);
    }
#define LOAD(result, name, parameters) harness_symbol(driver, #name, &name);
    DRIVER_FUNCTIONS(LOAD)
#undef LOAD
#define LOAD(result, name, parameters) harness_symbol(nvrtc, #name, &name);
    NVRTC_FUNCTIONS(LOAD)
#undef LOAD
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxPushCurrent_v2(context)) {
        printf("FAIL setup: the emulated driver doesn't start\n");
        exit(1);
    }
}

/* One line for a test: PASS when why is NULL. */
static void report(const char *name, const char *why) {
    if (why) {
        tests_failed = 1;
        printf("FAIL %s: %s\n", name, why);
    } else {
        printf("PASS %s\n", name);
    }
    fflush(stdout);
}

__attribute__((format(printf, 1, 2))) static const char *text(const char *format, ...) { /* valid until the next call */
    static char buffer[4096];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    return buffer;
}

/* Compiles with `num_options` options for sm_90, or what an option says. *code is the caller's. Returns NVRTC's result. */
static int compile(const char *source, int num_options, const char *const *options, char **code, size_t *size, char **log) {
    const char *header = "#error the emulation's own device.h has to take this one's place\n", *header_name = "device.h";
    const char *all[16] = {"--gpu-architecture=sm_90", "--std=c++17", "-no-source-include"};
    void *program;
    size_t log_size = 0;
    int result;
    for (int i = 0; i < num_options; i++) all[3 + i] = options[i];
    *code = NULL;
    if (nvrtcCreateProgram(&program, source, "test.cu", 1, &header, &header_name)) return -1;
    result = nvrtcCompileProgram(program, 3 + num_options, all);
    if (!nvrtcGetProgramLogSize(program, &log_size) && (*log = (char *)malloc(log_size))) nvrtcGetProgramLog(program, *log);
    if (!result && !nvrtcGetCUBINSize(program, size)) {
        const int is_ptx = !*size;
        if (is_ptx) nvrtcGetPTXSize(program, size);
        *code = (char *)malloc(*size);
        if (!*code || (is_ptx ? nvrtcGetPTX(program, *code) : nvrtcGetCUBIN(program, *code))) result = -1;
    }
    nvrtcDestroyProgram(&program);
    return result;
}

/* A kernel, ready to launch; exits with a FAIL line when that doesn't work. */
static void *kernel_from(const char *source, const char *name, int num_options, const char *const *options) {
    char *code, *log = NULL;
    size_t size;
    void *library, *kernel, *function = NULL;
    const int result = compile(source, num_options, options, &code, &size, &log);
    if (result || cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0) || cuLibraryGetKernel(&kernel, library, name) ||
        cuKernelGetFunction(&function, kernel) || cuFuncLoad(function)) {
        printf("FAIL %s: compiling or loading: %d\n%s\n", name, result, log ? log : "");
        exit(1);
    }
    free(code);
    free(log);
    return function;
}

static int launch(void *function, unsigned blocks, unsigned threads, void *arguments, void *stream, int dependent) {
    launch_attribute attribute;
    launch_config config;
    memset(&attribute, 0, sizeof attribute);
    memset(&config, 0, sizeof config);
    attribute.id = 6;
    attribute.value.programmatic_stream_serialization = 1;
    config.grid[0] = blocks;
    config.grid[1] = config.grid[2] = 1;
    config.block[0] = threads;
    config.block[1] = config.block[2] = 1;
    config.stream = stream;
    config.attributes = &attribute;
    config.num_attributes = dependent ? 1 : 0;
    return cuLaunchKernelEx(&config, function, &arguments, NULL);
}

static address device_alloc(size_t size) {
    address memory = 0;
    if (cuMemAlloc_v2(&memory, size)) {
        printf("FAIL setup: cuMemAlloc of %zu bytes\n", size);
        exit(1);
    }
    return memory;
}

#endif
