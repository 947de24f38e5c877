/*
  gpu.h: the little of the CUDA driver that a program needs around moe_route: device memory, copies, streams, events
  and graphs, without the CUDA toolkit. The driver is opened at run time. For the example, test and benchmark programs
  of this repository; the library doesn't use it, and a program that has cuda.h or cuda_runtime.h doesn't need it.

      gpu_device gpu;
      if (!gpu_open(&gpu)) printf("no GPU: %s\n", gpu.reason);

  gpu_open() answers 1 or 0. Every other function returns 0, or the CUDA error number with its text in gpu.reason.
  gpu_open() makes device 0's primary context current on the calling thread, gpu_open_device() another's, a struct for each;
  another thread calls gpu_use() first.
*/
#ifndef GPU_H
#define GPU_H

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#define GPU_LIBRARY "nvcuda.dll"
#else
#include <dlfcn.h>
#define GPU_LIBRARY "libcuda.so.1"
#endif

#if defined(_WIN32) && !defined(_WIN64)
#define GPU_CALL __stdcall
#else
#define GPU_CALL
#endif

#if defined(__GNUC__)
#define GPU_FUNCTION static __attribute__((unused))
#else
#define GPU_FUNCTION static
#endif

#define GPU_ERROR_NOT_FOUND 500 /* CUDA_ERROR_NOT_FOUND: this driver lacks the function */
#define GPU_NOT_READY 600       /* CUDA_ERROR_NOT_READY: no error; gpu_stream_query() alone returns it */

typedef unsigned long long gpu_address;    /* CUdeviceptr */
typedef struct CUctx_st *gpu_context;      /* CUcontext */
typedef struct CUstream_st *gpu_stream;    /* CUstream, cudaStream_t */
typedef struct CUevent_st *gpu_event;      /* CUevent */
typedef struct CUgraph_st *gpu_cu_graph;   /* CUgraph */
typedef struct CUgraphExec_st *gpu_graph;  /* CUgraphExec: a graph that can be launched */
typedef struct CUmod_st *gpu_module;       /* CUmodule */
typedef struct CUfunc_st *gpu_kernel;      /* CUfunction */

typedef struct gpu_device {
    char reason[256]; /* why the last call failed */
    char name[128];
    int driver_version; /* 13000 for CUDA 13.0 */
    int count;          /* of devices that the driver sees */
    int ordinal;
    gpu_context context;
    int(GPU_CALL *cuInit)(unsigned int);
    int(GPU_CALL *cuDriverGetVersion)(int *);
    int(GPU_CALL *cuGetErrorName)(int, const char **);
    int(GPU_CALL *cuGetErrorString)(int, const char **);
    int(GPU_CALL *cuDeviceGetCount)(int *);
    int(GPU_CALL *cuDeviceGet)(int *, int);
    int(GPU_CALL *cuDeviceGetName)(char *, int, int);
    int(GPU_CALL *cuDevicePrimaryCtxRetain)(gpu_context *, int);
    int(GPU_CALL *cuDevicePrimaryCtxRelease)(int);
    int(GPU_CALL *cuCtxSetCurrent)(gpu_context);
    int(GPU_CALL *cuCtxSynchronize)(void);
    int(GPU_CALL *cuMemAlloc)(gpu_address *, size_t);
    int(GPU_CALL *cuMemFree)(gpu_address);
    int(GPU_CALL *cuMemcpyHtoD)(gpu_address, const void *, size_t);
    int(GPU_CALL *cuMemcpyDtoH)(void *, gpu_address, size_t);
    int(GPU_CALL *cuMemsetD8)(gpu_address, unsigned char, size_t);
    int(GPU_CALL *cuStreamCreate)(gpu_stream *, unsigned int);
    int(GPU_CALL *cuStreamDestroy)(gpu_stream);
    int(GPU_CALL *cuStreamSynchronize)(gpu_stream);
    /* From here on NULL where the driver lacks them, so that a small stand-in for the driver will do. */
    int(GPU_CALL *cuStreamQuery)(gpu_stream);
    int(GPU_CALL *cuStreamWaitEvent)(gpu_stream, gpu_event, unsigned int);
    int(GPU_CALL *cuEventCreate)(gpu_event *, unsigned int);
    int(GPU_CALL *cuEventDestroy)(gpu_event);
    int(GPU_CALL *cuEventRecord)(gpu_event, gpu_stream);
    int(GPU_CALL *cuEventSynchronize)(gpu_event);
    int(GPU_CALL *cuEventElapsedTime)(float *, gpu_event, gpu_event);
    int(GPU_CALL *cuStreamBeginCapture)(gpu_stream, int);
    int(GPU_CALL *cuStreamEndCapture)(gpu_stream, gpu_cu_graph *);
    int(GPU_CALL *cuGraphInstantiateWithFlags)(gpu_graph *, gpu_cu_graph, unsigned long long);
    int(GPU_CALL *cuGraphLaunch)(gpu_graph, gpu_stream);
    int(GPU_CALL *cuGraphExecDestroy)(gpu_graph);
    int(GPU_CALL *cuGraphDestroy)(gpu_cu_graph);
    int(GPU_CALL *cuModuleLoadData)(gpu_module *, const void *);
    int(GPU_CALL *cuModuleGetFunction)(gpu_kernel *, gpu_module, const char *);
    int(GPU_CALL *cuModuleUnload)(gpu_module);
    int(GPU_CALL *cuLaunchKernel)(gpu_kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, gpu_stream, void **, void **);
} gpu_device;

typedef void (*gpu_function)(void);

typedef struct gpu_symbol {
    const char *name; /* as the driver exports it: cuda.h hides most of these suffixes behind macros */
    size_t offset;    /* of its pointer in gpu_device */
    int required;
} gpu_symbol;

static const gpu_symbol gpu_symbols[] = {
    {"cuInit", offsetof(gpu_device, cuInit), 1},
    {"cuDriverGetVersion", offsetof(gpu_device, cuDriverGetVersion), 1},
    {"cuGetErrorName", offsetof(gpu_device, cuGetErrorName), 1},
    {"cuGetErrorString", offsetof(gpu_device, cuGetErrorString), 1},
    {"cuDeviceGetCount", offsetof(gpu_device, cuDeviceGetCount), 1},
    {"cuDeviceGet", offsetof(gpu_device, cuDeviceGet), 1},
    {"cuDeviceGetName", offsetof(gpu_device, cuDeviceGetName), 1},
    {"cuDevicePrimaryCtxRetain", offsetof(gpu_device, cuDevicePrimaryCtxRetain), 1},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(gpu_device, cuDevicePrimaryCtxRelease), 1},
    {"cuCtxSetCurrent", offsetof(gpu_device, cuCtxSetCurrent), 1},
    {"cuCtxSynchronize", offsetof(gpu_device, cuCtxSynchronize), 1},
    {"cuMemAlloc_v2", offsetof(gpu_device, cuMemAlloc), 1},
    {"cuMemFree_v2", offsetof(gpu_device, cuMemFree), 1},
    {"cuMemcpyHtoD_v2", offsetof(gpu_device, cuMemcpyHtoD), 1},
    {"cuMemcpyDtoH_v2", offsetof(gpu_device, cuMemcpyDtoH), 1},
    {"cuMemsetD8_v2", offsetof(gpu_device, cuMemsetD8), 1},
    {"cuStreamCreate", offsetof(gpu_device, cuStreamCreate), 1},
    {"cuStreamDestroy_v2", offsetof(gpu_device, cuStreamDestroy), 1},
    {"cuStreamSynchronize", offsetof(gpu_device, cuStreamSynchronize), 1},
    {"cuStreamQuery", offsetof(gpu_device, cuStreamQuery), 0},
    {"cuStreamWaitEvent", offsetof(gpu_device, cuStreamWaitEvent), 0},
    {"cuEventCreate", offsetof(gpu_device, cuEventCreate), 0},
    {"cuEventDestroy_v2", offsetof(gpu_device, cuEventDestroy), 0},
    {"cuEventRecord", offsetof(gpu_device, cuEventRecord), 0},
    {"cuEventSynchronize", offsetof(gpu_device, cuEventSynchronize), 0},
    {"cuEventElapsedTime", offsetof(gpu_device, cuEventElapsedTime), 0},
    {"cuStreamBeginCapture_v2", offsetof(gpu_device, cuStreamBeginCapture), 0},
    {"cuStreamEndCapture", offsetof(gpu_device, cuStreamEndCapture), 0},
    {"cuGraphInstantiateWithFlags", offsetof(gpu_device, cuGraphInstantiateWithFlags), 0},
    {"cuGraphLaunch", offsetof(gpu_device, cuGraphLaunch), 0},
    {"cuGraphExecDestroy", offsetof(gpu_device, cuGraphExecDestroy), 0},
    {"cuGraphDestroy", offsetof(gpu_device, cuGraphDestroy), 0},
    {"cuModuleLoadData", offsetof(gpu_device, cuModuleLoadData), 0},
    {"cuModuleGetFunction", offsetof(gpu_device, cuModuleGetFunction), 0},
    {"cuModuleUnload", offsetof(gpu_device, cuModuleUnload), 0},
    {"cuLaunchKernel", offsetof(gpu_device, cuLaunchKernel), 0},
};

GPU_FUNCTION gpu_function gpu_find(void *library, const char *name) {
    gpu_function function = NULL;
#if defined(_WIN32)
    FARPROC address = GetProcAddress((HMODULE)library, name);
#else
    void *address = dlsym(library, name);
#endif
    memcpy(&function, &address, sizeof function);
    return function;
}

/* Opens the driver and fills in the function pointers. The library is never closed: the driver doesn't like it. */
GPU_FUNCTION int gpu_load(gpu_device *gpu) {
    size_t i;
#if defined(_WIN32)
    void *library = (void *)LoadLibraryExA(GPU_LIBRARY, NULL, LOAD_LIBRARY_SEARCH_SYSTEM32);
#else
    void *library = dlopen(GPU_LIBRARY, RTLD_NOW | RTLD_LOCAL);
#endif
    if (!library) {
        snprintf(gpu->reason, sizeof gpu->reason, "no NVIDIA driver (%s can't be opened)", GPU_LIBRARY);
        return 0;
    }
    for (i = 0; i < sizeof gpu_symbols / sizeof gpu_symbols[0]; i++) {
        gpu_function function = gpu_find(library, gpu_symbols[i].name);
        if (!function && gpu_symbols[i].required) {
            snprintf(gpu->reason, sizeof gpu->reason, "%s has no %s", GPU_LIBRARY, gpu_symbols[i].name);
            return 0;
        }
        memcpy((char *)gpu + gpu_symbols[i].offset, &function, sizeof function);
    }
    return 1;
}

/* Passes `result` on; keeps its text when it is an error. */
GPU_FUNCTION int gpu_result(gpu_device *gpu, const char *call, int result) {
    const char *name = NULL;
    const char *text = NULL;
    if (!result) return 0;
    if (gpu->cuGetErrorName(result, &name) || !name) name = "unknown error";
    if (gpu->cuGetErrorString(result, &text) || !text) text = "no description";
    snprintf(gpu->reason, sizeof gpu->reason, "%s: %s, %d (%s)", call, name, result, text);
    return result;
}

GPU_FUNCTION int gpu_missing(gpu_device *gpu, const char *call) {
    snprintf(gpu->reason, sizeof gpu->reason, "%s: %s has no such function", call, GPU_LIBRARY);
    return GPU_ERROR_NOT_FOUND;
}

/* Retains a device's primary context and makes it current. 1, or 0 without such a GPU: gpu->reason says why. */
GPU_FUNCTION int gpu_open_device(gpu_device *gpu, int which) {
    memset(gpu, 0, sizeof *gpu);
    if (!gpu_load(gpu)) return 0;
    if (gpu_result(gpu, "cuInit", gpu->cuInit(0))) return 0;
    if (gpu_result(gpu, "cuDriverGetVersion", gpu->cuDriverGetVersion(&gpu->driver_version))) return 0;
    if (gpu_result(gpu, "cuDeviceGetCount", gpu->cuDeviceGetCount(&gpu->count))) return 0;
    if (gpu->count < 1) {
        snprintf(gpu->reason, sizeof gpu->reason, "the NVIDIA driver sees no GPU");
        return 0;
    }
    if (which >= gpu->count) {
        snprintf(gpu->reason, sizeof gpu->reason, "device %d isn't there: the NVIDIA driver sees %d", which, gpu->count);
        return 0;
    }
    if (gpu_result(gpu, "cuDeviceGet", gpu->cuDeviceGet(&gpu->ordinal, which))) return 0;
    if (gpu_result(gpu, "cuDeviceGetName", gpu->cuDeviceGetName(gpu->name, (int)sizeof gpu->name, gpu->ordinal))) {
        return 0;
    }
    if (gpu_result(gpu, "cuDevicePrimaryCtxRetain", gpu->cuDevicePrimaryCtxRetain(&gpu->context, gpu->ordinal))) {
        gpu->context = NULL;
        return 0;
    }
    if (gpu_result(gpu, "cuCtxSetCurrent", gpu->cuCtxSetCurrent(gpu->context))) {
        gpu->cuDevicePrimaryCtxRelease(gpu->ordinal);
        gpu->context = NULL;
        return 0;
    }
    return 1;
}

GPU_FUNCTION int gpu_open(gpu_device *gpu) { return gpu_open_device(gpu, 0); }

/* Releases the context. Memory, streams and graphs must be gone; safe after gpu_open() answered 0. */
GPU_FUNCTION void gpu_close(gpu_device *gpu) {
    if (!gpu->context) return;
    gpu->cuCtxSetCurrent(NULL);
    gpu->cuDevicePrimaryCtxRelease(gpu->ordinal);
    gpu->context = NULL;
}

/* Makes the GPU's context current on the calling thread. */
GPU_FUNCTION int gpu_use(gpu_device *gpu) {
    return gpu_result(gpu, "cuCtxSetCurrent", gpu->cuCtxSetCurrent(gpu->context));
}

/* Waits for everything on the GPU. */
GPU_FUNCTION int gpu_synchronize(gpu_device *gpu) {
    return gpu_result(gpu, "cuCtxSynchronize", gpu->cuCtxSynchronize());
}

/* ---- memory: aligned to 256 bytes. Copies wait for all earlier work and are complete when they return ---- */

GPU_FUNCTION int gpu_alloc(gpu_device *gpu, gpu_address *address, size_t size) {
    *address = 0;
    return gpu_result(gpu, "cuMemAlloc", gpu->cuMemAlloc(address, size ? size : 1)); /* 0 bytes are an error in CUDA */
}

GPU_FUNCTION int gpu_free(gpu_device *gpu, gpu_address address) {
    return address ? gpu_result(gpu, "cuMemFree", gpu->cuMemFree(address)) : 0;
}

/* The copy from pageable memory may still be on its way when cuMemcpyHtoD returns, and the streams below don't wait for
   the default stream that it runs on: hence the second wait. */
GPU_FUNCTION int gpu_upload(gpu_device *gpu, gpu_address to, const void *from, size_t size) {
    int result = gpu_synchronize(gpu);
    if (result || size == 0) return result;
    result = gpu_result(gpu, "cuMemcpyHtoD", gpu->cuMemcpyHtoD(to, from, size));
    return result ? result : gpu_synchronize(gpu);
}

GPU_FUNCTION int gpu_download(gpu_device *gpu, void *to, gpu_address from, size_t size) {
    int result = gpu_synchronize(gpu);
    if (result || size == 0) return result;
    return gpu_result(gpu, "cuMemcpyDtoH", gpu->cuMemcpyDtoH(to, from, size));
}

GPU_FUNCTION int gpu_memset(gpu_device *gpu, gpu_address address, unsigned char value, size_t size) {
    int result = gpu_synchronize(gpu);
    if (result || size == 0) return result;
    result = gpu_result(gpu, "cuMemsetD8", gpu->cuMemsetD8(address, value, size));
    return result ? result : gpu_synchronize(gpu);
}

/* ---- streams: none waits for the default stream, nor it for them ---- */

GPU_FUNCTION int gpu_stream_create(gpu_device *gpu, gpu_stream *stream) {
    const unsigned int non_blocking = 1; /* CU_STREAM_NON_BLOCKING */
    *stream = NULL;
    return gpu_result(gpu, "cuStreamCreate", gpu->cuStreamCreate(stream, non_blocking));
}

GPU_FUNCTION int gpu_stream_synchronize(gpu_device *gpu, gpu_stream stream) {
    return gpu_result(gpu, "cuStreamSynchronize", gpu->cuStreamSynchronize(stream));
}

/* 0 when the stream's work is done, GPU_NOT_READY when it isn't. */
GPU_FUNCTION int gpu_stream_query(gpu_device *gpu, gpu_stream stream) {
    int result;
    if (!gpu->cuStreamQuery) return gpu_missing(gpu, "cuStreamQuery");
    result = gpu->cuStreamQuery(stream);
    return result == GPU_NOT_READY ? result : gpu_result(gpu, "cuStreamQuery", result);
}

GPU_FUNCTION int gpu_stream_destroy(gpu_device *gpu, gpu_stream stream) {
    return stream ? gpu_result(gpu, "cuStreamDestroy", gpu->cuStreamDestroy(stream)) : 0;
}

/* ---- events: points in a stream, for timing ---- */

GPU_FUNCTION int gpu_event_create(gpu_device *gpu, gpu_event *event) {
    *event = NULL;
    if (!gpu->cuEventCreate) return gpu_missing(gpu, "cuEventCreate");
    return gpu_result(gpu, "cuEventCreate", gpu->cuEventCreate(event, 0));
}

GPU_FUNCTION int gpu_event_record(gpu_device *gpu, gpu_event event, gpu_stream stream) {
    if (!gpu->cuEventRecord) return gpu_missing(gpu, "cuEventRecord");
    return gpu_result(gpu, "cuEventRecord", gpu->cuEventRecord(event, stream));
}

/* What is put on the stream from now on waits for the event. */
GPU_FUNCTION int gpu_event_await(gpu_device *gpu, gpu_event event, gpu_stream stream) {
    if (!gpu->cuStreamWaitEvent) return gpu_missing(gpu, "cuStreamWaitEvent");
    return gpu_result(gpu, "cuStreamWaitEvent", gpu->cuStreamWaitEvent(stream, event, 0));
}

/* Waits for `end`. */
GPU_FUNCTION int gpu_event_elapsed(gpu_device *gpu, gpu_event begin, gpu_event end, double *milliseconds) {
    float elapsed = 0;
    int result;
    *milliseconds = 0;
    if (!gpu->cuEventSynchronize || !gpu->cuEventElapsedTime) return gpu_missing(gpu, "cuEventElapsedTime");
    result = gpu_result(gpu, "cuEventSynchronize", gpu->cuEventSynchronize(end));
    if (!result) result = gpu_result(gpu, "cuEventElapsedTime", gpu->cuEventElapsedTime(&elapsed, begin, end));
    *milliseconds = (double)elapsed;
    return result;
}

GPU_FUNCTION int gpu_event_destroy(gpu_device *gpu, gpu_event event) {
    if (!event) return 0;
    if (!gpu->cuEventDestroy) return gpu_missing(gpu, "cuEventDestroy");
    return gpu_result(gpu, "cuEventDestroy", gpu->cuEventDestroy(event));
}

/* ---- graphs: what is put on the stream between begin and end is recorded, not run; then it is launched as one ---- */

/* In CUDA's strictest mode: any call that isn't allowed during a capture, on any thread, fails it. */
GPU_FUNCTION int gpu_capture_begin(gpu_device *gpu, gpu_stream stream) {
    const int global = 0; /* CU_STREAM_CAPTURE_MODE_GLOBAL */
    if (!gpu->cuStreamBeginCapture) return gpu_missing(gpu, "cuStreamBeginCapture");
    return gpu_result(gpu, "cuStreamBeginCapture", gpu->cuStreamBeginCapture(stream, global));
}

GPU_FUNCTION int gpu_capture_end(gpu_device *gpu, gpu_stream stream, gpu_graph *graph) {
    gpu_cu_graph recorded = NULL;
    int result;
    *graph = NULL;
    if (!gpu->cuStreamEndCapture || !gpu->cuGraphInstantiateWithFlags || !gpu->cuGraphDestroy) {
        return gpu_missing(gpu, "cuGraphInstantiateWithFlags");
    }
    result = gpu_result(gpu, "cuStreamEndCapture", gpu->cuStreamEndCapture(stream, &recorded));
    if (result) return result;
    result = gpu_result(gpu, "cuGraphInstantiate", gpu->cuGraphInstantiateWithFlags(graph, recorded, 0));
    gpu->cuGraphDestroy(recorded);
    return result;
}

GPU_FUNCTION int gpu_graph_launch(gpu_device *gpu, gpu_graph graph, gpu_stream stream) {
    if (!gpu->cuGraphLaunch) return gpu_missing(gpu, "cuGraphLaunch");
    return gpu_result(gpu, "cuGraphLaunch", gpu->cuGraphLaunch(graph, stream));
}

GPU_FUNCTION int gpu_graph_destroy(gpu_device *gpu, gpu_graph graph) {
    if (!graph) return 0;
    if (!gpu->cuGraphExecDestroy) return gpu_missing(gpu, "cuGraphExecDestroy");
    return gpu_result(gpu, "cuGraphExecDestroy", gpu->cuGraphExecDestroy(graph));
}

GPU_FUNCTION int gpu_compare_values(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Sorts the values; 0 where there are none. */
GPU_FUNCTION double gpu_median(double *values, size_t count) {
    qsort(values, count, sizeof *values, gpu_compare_values);
    return count ? values[count / 2] : 0;
}

enum { GPU_MAX_REPLAYS = 64 };

/* The median time of so many replays, up to GPU_MAX_REPLAYS, after three to warm up; waits for them. */
GPU_FUNCTION int gpu_graph_time(gpu_device *gpu, gpu_graph graph, gpu_stream stream, int replays, double *milliseconds) {
    double times[GPU_MAX_REPLAYS];
    gpu_event begin = NULL, end = NULL;
    int i, result = gpu_event_create(gpu, &begin);
    if (!result) result = gpu_event_create(gpu, &end);
    for (i = -3; i < replays && !result; i++) {
        double elapsed;
        result = gpu_event_record(gpu, begin, stream);
        if (!result) result = gpu_graph_launch(gpu, graph, stream);
        if (!result) result = gpu_event_record(gpu, end, stream);
        if (!result) result = gpu_event_elapsed(gpu, begin, end, &elapsed);
        if (!result && i >= 0) times[i] = elapsed;
    }
    if (!result) *milliseconds = gpu_median(times, (size_t)replays);
    if (begin) gpu_event_destroy(gpu, begin);
    if (end) gpu_event_destroy(gpu, end);
    return result;
}

/* ---- kernels of one's own ---- */

/* From PTX text or a cubin. */
GPU_FUNCTION int gpu_module_load(gpu_device *gpu, gpu_module *module, const void *code) {
    *module = NULL;
    if (!gpu->cuModuleLoadData) return gpu_missing(gpu, "cuModuleLoadData");
    return gpu_result(gpu, "cuModuleLoadData", gpu->cuModuleLoadData(module, code));
}

GPU_FUNCTION int gpu_module_kernel(gpu_device *gpu, gpu_module module, const char *name, gpu_kernel *kernel) {
    *kernel = NULL;
    if (!gpu->cuModuleGetFunction) return gpu_missing(gpu, "cuModuleGetFunction");
    return gpu_result(gpu, "cuModuleGetFunction", gpu->cuModuleGetFunction(kernel, module, name));
}

GPU_FUNCTION int gpu_module_unload(gpu_device *gpu, gpu_module module) {
    if (!module) return 0;
    if (!gpu->cuModuleUnload) return gpu_missing(gpu, "cuModuleUnload");
    return gpu_result(gpu, "cuModuleUnload", gpu->cuModuleUnload(module));
}

/* `arguments` points to the address of each argument. */
GPU_FUNCTION int gpu_launch(gpu_device *gpu, gpu_kernel kernel, unsigned blocks, unsigned threads, gpu_stream stream, void **arguments) {
    if (!gpu->cuLaunchKernel) return gpu_missing(gpu, "cuLaunchKernel");
    return gpu_result(gpu, "cuLaunchKernel", gpu->cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, NULL));
}

#endif /* GPU_H */
