/*
  driver.c: libcuda.so.1 of the emulation: the part of the CUDA driver API that the library, its tests and its examples
  call, over the machine of machine.c. One device, one address space (device memory is host memory of its own), work done
  at once and in order. Here are the objects behind handles, initialisation, the device and its contexts; memory is in memory.c,
  streams, events and graphs in streams.c, modules and launches in modules.c. How threads run belongs in machine.c.

  Stricter than a GPU: every address is checked against the table of allocations, new memory is filled with 0xA5, and a
  kernel that hasn't been loaded can't be launched while a stream captures.
*/
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

driver_state driver = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static __thread object *current_contexts[16];
static __thread unsigned num_current;

void lock(void) { pthread_mutex_lock(&driver.mutex); }
int unlock(int result) {
    pthread_mutex_unlock(&driver.mutex);
    return result;
}

int usable(void) { return driver.process && driver.process == getpid(); }
static object *current_context(void) { return num_current ? current_contexts[num_current - 1] : NULL; }
/* Why a call that needs a context can't go on. */
int not_ready(void) { return !usable() ? NOT_INITIALIZED : !current_context() ? INVALID_CONTEXT : CUDA_SUCCESS; }

void *object_add(size_t size, object_kind kind) {
    object *made = (object *)calloc(1, size);
    if (!made) return NULL;
    made->kind = kind;
    made->next = driver.objects;
    driver.objects = made;
    return made;
}

void *object_find(const void *handle, object_kind kind) {
    for (object *o = driver.objects; o; o = o->next)
        if (o == handle && o->kind == kind) return o;
    return NULL;
}

void object_remove(void *removed) {
    object **link = &driver.objects;
    while (*link != removed) link = &(*link)->next;
    *link = (*link)->next;
    free(removed);
}

/* ---- of the emulation itself ---- */
EXPORT unsigned moer_emulation_errors(void) { return emulation_error_count(); }
EXPORT const char *moer_emulation_last_error(void) { return emulation_error_text(); }
EXPORT unsigned long long moer_emulation_launches(void) { return driver.launches; }
EXPORT void moer_emulation_set_seed(unsigned long long seed) {
    lock();
    driver.seed = seed;
    driver.launches = 0;
    unlock(0);
}

/* ---- initialisation, device, context ---- */
EXPORT int cuInit(unsigned flags) {
    const char *target = getenv("MOE_ROUTE_EMULATION_TARGET"), *seed = getenv("MOE_ROUTE_EMULATION_SEED");
    lock();
    if (flags) return unlock(INVALID_VALUE);
    if (driver.process) return unlock(usable() ? CUDA_SUCCESS : NOT_INITIALIZED);
    driver.process = getpid();
    driver.target = target ? (unsigned)strtoul(target, NULL, 10) : 90;
    driver.seed = seed ? strtoull(seed, NULL, 10) : 1;
    driver.context.kind = CONTEXT;
    driver.context.next = driver.objects;
    driver.objects = &driver.context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuDriverGetVersion(int *version) {
    if (!version) return INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}

static const struct {
    int result;
    const char *name, *text;
} result_names[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "dependency created on the implicit stream by a capture"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a capture from another thread"},
};

static int result_text(int result, const char **text, int want_name) {
    if (!text) return INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof result_names / sizeof *result_names; i++)
        if (result_names[i].result == result) *text = want_name ? result_names[i].name : result_names[i].text;
    return *text ? CUDA_SUCCESS : INVALID_VALUE;
}

EXPORT int cuGetErrorName(int result, const char **text) { return result_text(result, text, 1); }
EXPORT int cuGetErrorString(int result, const char **text) { return result_text(result, text, 0); }

EXPORT int cuDeviceGetCount(int *count) {
    if (!usable()) return NOT_INITIALIZED;
    if (!count) return INVALID_VALUE;
    *count = 1;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    if (!usable()) return NOT_INITIALIZED;
    if (!device) return INVALID_VALUE;
    if (ordinal) return INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
    if (!usable()) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    if (!name || size <= 0) return INVALID_VALUE;
    snprintf(name, (size_t)size, "emulated GPU");
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const struct {
        int attribute, value;
    } values[] = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32},
                  {12, 65536}, {13, 1000000}, {16, 4}, {38, 4194304}, {39, 2048}, {81, SHARED_BYTES}, {82, 65536}, {97, 49152}};
    if (!usable()) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    if (!value) return INVALID_VALUE;
    if (attribute == 75 || attribute == 76) { /* compute capability */
        *value = (int)(attribute == 75 ? driver.target / 10 : driver.target % 10);
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i].attribute == attribute) {
            *value = values[i].value;
            return CUDA_SUCCESS;
        }
    return INVALID_VALUE;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (device) return unlock(INVALID_DEVICE);
    if (!context) return unlock(INVALID_VALUE);
    driver.retained++;
    *context = &driver.context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (device) return unlock(INVALID_DEVICE);
    if (!driver.retained) return unlock(INVALID_CONTEXT);
    driver.retained--;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    object *made;
    lock();
    (void)flags;
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (device) return unlock(INVALID_DEVICE);
    if (!context || num_current == sizeof current_contexts / sizeof *current_contexts) return unlock(INVALID_VALUE);
    made = (object *)object_add(sizeof *made, CONTEXT);
    if (!made) return unlock(OUT_OF_MEMORY);
    *context = current_contexts[num_current++] = made;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxDestroy_v2(void *context) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (context == &driver.context || !object_find(context, CONTEXT)) return unlock(INVALID_CONTEXT);
    if (current_context() == context) num_current--;
    object_remove(context);
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxGetCurrent(void **context) {
    if (!usable()) return NOT_INITIALIZED;
    if (!context) return INVALID_VALUE;
    *context = current_context();
    return CUDA_SUCCESS;
}

EXPORT int cuCtxGetDevice(int *device) {
    const int result = not_ready();
    if (result) return result;
    if (!device) return INVALID_VALUE;
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (!object_find(context, CONTEXT)) return unlock(INVALID_CONTEXT);
    if (num_current == sizeof current_contexts / sizeof *current_contexts) return unlock(INVALID_VALUE);
    current_contexts[num_current++] = (object *)context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxPopCurrent_v2(void **context) {
    const int result = not_ready();
    if (result) return result;
    if (context) *context = current_context();
    num_current--;
    return CUDA_SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) {
    lock();
    if (!usable()) return unlock(NOT_INITIALIZED);
    if (context && !object_find(context, CONTEXT)) return unlock(INVALID_CONTEXT);
    if (num_current) num_current--;
    if (context) current_contexts[num_current++] = (object *)context;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuCtxSynchronize(void) {
    int result;
    lock();
    result = not_ready();
    if (!result) result = capture_forbids();
    if (!result) result = synchronise();
    return unlock(result);
}
