/*
  check_cuda_abi.c: compares what the library declares of the CUDA driver and of NVRTC with NVIDIA's own headers:
  layouts, numbers and the names of functions in C, and in C++ the signature of every function as well. Needs a CUDA
  toolkit's headers (12.4 or later, for cuFuncLoad), and neither its libraries nor a GPU. Most of it is checked by the
  compiler, the names when the program runs:

      cc  -std=c99 -I. -isystem $CUDA_HOME/include tests/check_cuda_abi.c -o check_c -lm -ldl -lpthread
      c++ -std=c++17 -I. -isystem $CUDA_HOME/include -x c++ tests/check_cuda_abi.c -o check_cpp -lm -ldl -lpthread
*/
#include <cuda.h>
#include <nvrtc.h>

#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#define JOIN_AGAIN(a, b) a##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define CHECK(condition) typedef char JOIN(check_on_line_, __LINE__)[(condition) ? 1 : -1]
#define CHECK_FIELD(theirs, their_field, ours, our_field) \
    CHECK(offsetof(theirs, their_field) == offsetof(ours, our_field) && \
          sizeof(((theirs *)0)->their_field) <= sizeof(((ours *)0)->our_field))

/* ---- types ---- */
CHECK(sizeof(CUresult) == sizeof(moer_cu_result));
CHECK(sizeof(CUdevice) == sizeof(moer_cu_device));
CHECK(sizeof(CUdeviceptr) == sizeof(moe_route_address));
CHECK(sizeof(CUdevice_attribute) == sizeof(int));
CHECK(sizeof(CUfunction_attribute) == sizeof(int));
CHECK(sizeof(CUstreamCaptureMode) == sizeof(int));
CHECK(sizeof(CUjit_option) == sizeof(int));
CHECK(sizeof(CUlibraryOption) == sizeof(int));
CHECK(sizeof(nvrtcResult) == sizeof(int));

/* ---- launches ---- */
CHECK(sizeof(CUlaunchConfig) == sizeof(moer_cu_launch_config));
CHECK_FIELD(CUlaunchConfig, gridDimX, moer_cu_launch_config, grid[0]);
CHECK_FIELD(CUlaunchConfig, gridDimY, moer_cu_launch_config, grid[1]);
CHECK_FIELD(CUlaunchConfig, gridDimZ, moer_cu_launch_config, grid[2]);
CHECK_FIELD(CUlaunchConfig, blockDimX, moer_cu_launch_config, block[0]);
CHECK_FIELD(CUlaunchConfig, blockDimY, moer_cu_launch_config, block[1]);
CHECK_FIELD(CUlaunchConfig, blockDimZ, moer_cu_launch_config, block[2]);
CHECK_FIELD(CUlaunchConfig, sharedMemBytes, moer_cu_launch_config, shared_bytes);
CHECK_FIELD(CUlaunchConfig, hStream, moer_cu_launch_config, stream);
CHECK_FIELD(CUlaunchConfig, attrs, moer_cu_launch_config, attributes);
CHECK_FIELD(CUlaunchConfig, numAttrs, moer_cu_launch_config, num_attributes);
CHECK(sizeof(CUlaunchAttribute) == sizeof(moer_cu_launch_attribute));
CHECK_FIELD(CUlaunchAttribute, id, moer_cu_launch_attribute, id);
CHECK_FIELD(CUlaunchAttribute, value, moer_cu_launch_attribute, value);
CHECK_FIELD(CUlaunchAttribute, value.programmaticStreamSerializationAllowed, moer_cu_launch_attribute,
            value.programmatic_stream_serialization);

/* ---- numbers ---- */
CHECK((int)CUDA_SUCCESS == 0);
CHECK((int)CUDA_ERROR_STUB_LIBRARY == MOER_CUDA_ERROR_STUB_LIBRARY);
CHECK((int)CUDA_ERROR_NO_DEVICE == MOER_CUDA_ERROR_NO_DEVICE);
CHECK((int)CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE == (int)MOER_CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
CHECK((int)CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == (int)MOER_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
CHECK((int)CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == (int)MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
CHECK((int)CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == (int)MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
CHECK((int)CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK == (int)MOER_CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
CHECK((int)CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES == (int)MOER_CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
CHECK((int)CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == (int)MOER_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
CHECK((int)CU_STREAM_NON_BLOCKING == (int)MOER_CU_STREAM_NON_BLOCKING);
CHECK((int)CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == (int)MOER_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHECK((int)CU_STREAM_CAPTURE_MODE_RELAXED == (int)MOER_CU_STREAM_CAPTURE_MODE_RELAXED);
CHECK((int)CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ==
      (int)MOER_CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
CHECK((int)NVRTC_ERROR_OUT_OF_MEMORY == MOER_NVRTC_ERROR_OUT_OF_MEMORY);
CHECK((int)NVRTC_ERROR_BUILTIN_OPERATION_FAILURE == MOER_NVRTC_ERROR_BUILTIN_OPERATION);

/* ---- functions. cuda.h renames some to a version, which renames the fields of moer_driver here as well ---- */
#define EACH_DRIVER_FUNCTION(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGetCount) X(cuDeviceGet) \
    X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) \
    X(cuCtxGetCurrent) X(cuCtxGetDevice) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuThreadExchangeStreamCaptureMode) \
    X(cuLibraryLoadData) X(cuLibraryUnload) X(cuLibraryGetKernel) X(cuKernelGetFunction) X(cuFuncGetAttribute) X(cuFuncSetAttribute) \
    X(cuFuncLoad) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuLaunchKernelEx) X(cuMemcpyHtoDAsync) \
    X(cuMemcpyDtoHAsync) X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamBeginCapture) X(cuStreamEndCapture) \
    X(cuGraphInstantiateWithFlags) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy) X(cuEventCreate) X(cuEventDestroy) \
    X(cuEventRecord) X(cuEventSynchronize) X(cuEventElapsedTime)
#define EACH_NVRTC_FUNCTION(X) \
    X(nvrtcVersion) X(nvrtcGetErrorString) X(nvrtcGetNumSupportedArchs) X(nvrtcGetSupportedArchs) \
    X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcCompileProgram) X(nvrtcGetProgramLogSize) \
    X(nvrtcGetProgramLog) X(nvrtcGetCUBINSize) X(nvrtcGetCUBIN) X(nvrtcGetPTXSize) X(nvrtcGetPTX)

#define COUNT_ONE(function) +1
CHECK(sizeof moer_driver_symbols / sizeof moer_driver_symbols[0] == 0 EACH_DRIVER_FUNCTION(COUNT_ONE));
CHECK(sizeof(moer_driver) == (0 EACH_DRIVER_FUNCTION(COUNT_ONE)) * sizeof(moer_function));

#ifdef __cplusplus
#include <type_traits>

/* Whether two types are passed alike: numbers and enumerations of one size; pointers to the same, to such numbers, or
   to structs that were compared above. */
template <class A, class B> constexpr bool alike();
template <class A, class B> struct pointers_alike { static constexpr bool value = false; };
template <class A, class B> struct pointers_alike<A *, B *> {
    static constexpr bool value = std::is_const<A>::value == std::is_const<B>::value &&
                                  alike<typename std::remove_cv<A>::type, typename std::remove_cv<B>::type>();
};
template <class A, class B> constexpr bool alike() {
    constexpr bool number_a = std::is_integral<A>::value || std::is_enum<A>::value;
    constexpr bool number_b = std::is_integral<B>::value || std::is_enum<B>::value;
    if constexpr (std::is_same<A, B>::value) return true;
    else if constexpr (number_a && number_b) return sizeof(A) == sizeof(B);
    else if constexpr (std::is_same<A, CUlaunchConfig>::value) return std::is_same<B, moer_cu_launch_config>::value;
    else if constexpr (std::is_same<A, _nvrtcProgram>::value) return std::is_same<B, moer_nvrtc_program_st>::value;
    else return pointers_alike<A, B>::value;
}

template <class A, class B> struct signatures_alike { static constexpr bool value = false; };
template <class R, class... A, class S, class... B> struct signatures_alike<R (*)(A...), S (*)(B...)> {
    template <bool same_count, class = void> struct parameters { static constexpr bool value = false; };
    template <class unused> struct parameters<true, unused> { static constexpr bool value = (alike<A, B>() && ...); };
    static constexpr bool value = alike<R, S>() && parameters<sizeof...(A) == sizeof...(B)>::value;
};

static_assert(!signatures_alike<int (*)(int), int (*)(int, int)>::value, "the comparison counts parameters");
static_assert(!signatures_alike<int (*)(int), int (*)(long long)>::value, "and compares sizes");
static_assert(!signatures_alike<int (*)(int *), int (*)(const int *)>::value, "and const");
static_assert(!signatures_alike<int (*)(int *), int (*)(int **)>::value, "and pointers");
static_assert(!signatures_alike<int (*)(CUkernel), int (*)(CUfunction)>::value, "and handles");
static_assert(std::is_same<CUstream, moe_route_stream>::value, "CUstream");
static_assert(std::is_same<CUcontext, moe_route_cuda_context>::value, "CUcontext");

#define SAME_DRIVER_SIGNATURE(function) \
    static_assert(signatures_alike<decltype(&::function), decltype(moer_driver::function)>::value, "driver function");
#define SAME_NVRTC_SIGNATURE(function) \
    static_assert(signatures_alike<decltype(&::function), decltype(moer_nvrtc::function)>::value, "NVRTC function");
EACH_DRIVER_FUNCTION(SAME_DRIVER_SIGNATURE)
EACH_NVRTC_FUNCTION(SAME_NVRTC_SIGNATURE)
#endif

#define TEXT_AGAIN(name) #name
#define TEXT(name) TEXT_AGAIN(name)

/* The field of `offset` must be looked up by the name that cuda.h gives the function. */
static int check_name(const char *name, size_t offset) {
    size_t i;
    if (strcmp(name, "cuEventElapsedTime_v2") == 0) name = "cuEventElapsedTime"; /* with the same parameters; all drivers have it */
    for (i = 0; i < sizeof moer_driver_symbols / sizeof moer_driver_symbols[0]; i++) {
        if (moer_driver_symbols[i].offset != offset) continue;
        if (strcmp(moer_driver_symbols[i].name, name) == 0) return 0;
        printf("%s is looked up as %s\n", name, moer_driver_symbols[i].name);
        return 1;
    }
    printf("%s isn't looked up\n", name);
    return 1;
}

int main(void) {
    int failures = 0;
#define CHECK_NAME(function) failures += check_name(TEXT(function), offsetof(moer_driver, function));
    EACH_DRIVER_FUNCTION(CHECK_NAME)
    if (failures == 0) printf("they agree with CUDA %d.%d\n", CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
    return failures != 0;
}
