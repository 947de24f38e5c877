/*
  device.h: one interface over CPU memory and GPU memory, so that a test runs unchanged on the CPU backend, on a GPU,
  and on a driver emulated in software that LD_LIBRARY_PATH puts in libcuda.so.1's place. Include moe_route.h first.

      test_device device;
      if (!device_open(&device, MOE_ROUTE_DEVICE_GPU, NULL)) SKIP("%s", device.reason);
      device_buffer x = device_create_from(&device, host_x, size);
      ...
      device_destroy(&device, &x);
      device_close(&device);

  Buffers start filled with 0xCB, so that what a call fails to write shows: as f32 it is -26711958, as int32 it is
  -875836469. On the CPU each is a malloc of exactly its size, for AddressSanitizer. Trouble with memory or copies is no
  test's subject: it ends the program with a FAIL line, unless device_trouble says
  otherwise.
*/
#ifndef TEST_DEVICE_H
#define TEST_DEVICE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../examples/gpu.h"

#if defined(__SANITIZE_ADDRESS__)
#define DEVICE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DEVICE_ASAN 1
#endif
#endif
#if defined(DEVICE_ASAN)
#include <sanitizer/asan_interface.h>
#define DEVICE_FORBID(memory, size) ASAN_POISON_MEMORY_REGION(memory, size)
#define DEVICE_ALLOW(memory, size) ASAN_UNPOISON_MEMORY_REGION(memory, size)
#else
#define DEVICE_FORBID(memory, size) ((void)(memory), (void)(size))
#define DEVICE_ALLOW(memory, size) ((void)(memory), (void)(size))
#endif

#define DEVICE_POISON 0xCB
#define DEVICE_WORKSPACE_ALIGNMENT 256

typedef struct test_device {
    moe_route_device kind;      /* MOE_ROUTE_DEVICE_CPU or MOE_ROUTE_DEVICE_GPU */
    moe_route_context *context;
    moe_route_stream stream;    /* NULL on the CPU */
    gpu_device gpu;
    char reason[512];           /* why it can't be opened */
} test_device;

typedef struct device_buffer {
    moe_route_address address;
    size_t size;
    void *memory;     /* on the CPU: what malloc returned */
    size_t allocated;
} device_buffer;

/* Opens a context of the wanted kind, with `desc` (NULL: all defaults) for the rest; 0 with device->reason when it
   can't be had. On a GPU it is made in the primary context of device 0, with a stream of its own. */
GPU_FUNCTION int device_open(test_device *device, moe_route_device kind, const moe_route_context_desc *desc) {
    moe_route_context_desc wanted;
    memset(device, 0, sizeof *device);
    memset(&wanted, 0, sizeof wanted);
    if (desc) wanted = *desc;
    wanted.device = kind;
    device->kind = kind;
    if (kind == MOE_ROUTE_DEVICE_GPU) {
        if (!gpu_open(&device->gpu) || gpu_stream_create(&device->gpu, &device->stream)) {
            snprintf(device->reason, sizeof device->reason, "%s", device->gpu.reason);
            gpu_close(&device->gpu);
            return 0;
        }
        wanted.cuda_context = device->gpu.context;
    }
    if (moe_route_context_create(&wanted, &device->context) != MOE_ROUTE_OK) {
        if (device->context) moe_route_message(device->context, device->reason, sizeof device->reason);
        moe_route_context_destroy(device->context);
        device->context = NULL;
        if (kind == MOE_ROUTE_DEVICE_GPU) gpu_stream_destroy(&device->gpu, device->stream);
        gpu_close(&device->gpu);
        return 0;
    }
    return 1;
}

GPU_FUNCTION void device_close(test_device *device) {
    moe_route_context_destroy(device->context);
    if (device->kind == MOE_ROUTE_DEVICE_GPU) gpu_stream_destroy(&device->gpu, device->stream);
    gpu_close(&device->gpu);
    memset(device, 0, sizeof *device);
}

GPU_FUNCTION const char *device_name(const test_device *device) {
    return device->kind == MOE_ROUTE_DEVICE_GPU ? "gpu" : "cpu";
}

/* The kind that the environment's TEST_DEVICE asks for, cpu or gpu; cpu without it. */
GPU_FUNCTION moe_route_device device_wanted(void) {
    const char *name = getenv("TEST_DEVICE");
    if (!name || strcmp(name, "cpu") == 0) return MOE_ROUTE_DEVICE_CPU;
    if (strcmp(name, "gpu") == 0) return MOE_ROUTE_DEVICE_GPU;
    printf("FAIL device: TEST_DEVICE is %s, neither cpu nor gpu\n", name);
    exit(1);
}

/* The message of the context's last failure, in a buffer that the next call overwrites. */
GPU_FUNCTION const char *device_message(const test_device *device) {
    static char text[512];
    moe_route_message(device->context, text, sizeof text);
    return text;
}

static void (*device_trouble)(const char *what); /* instead of ending the program; doesn't return */

GPU_FUNCTION void device_die(const char *what) {
    if (device_trouble) device_trouble(what);
    printf("FAIL device: %s\n", what);
    exit(1);
}

/* Opens the device that TEST_DEVICE asks for, or ends the program. */
GPU_FUNCTION void device_open_wanted(test_device *device) {
    if (!device_open(device, device_wanted(), NULL)) device_die(device->reason);
}

/* Ends the program when a CUDA call failed. */
GPU_FUNCTION void device_must(test_device *device, int result) {
    if (result) device_die(device->gpu.reason);
}

GPU_FUNCTION void device_synchronize(test_device *device) {
    if (device->kind == MOE_ROUTE_DEVICE_GPU) device_must(device, gpu_stream_synchronize(&device->gpu, device->stream));
}

/* Sets all bytes. Waits for earlier work, as upload and download do. */
GPU_FUNCTION void device_fill(test_device *device, const device_buffer *buffer, int byte) {
    if (device->kind == MOE_ROUTE_DEVICE_GPU) {
        device_must(device, gpu_memset(&device->gpu, buffer->address, (unsigned char)byte, buffer->size));
    } else {
        memset((void *)(uintptr_t)buffer->address, byte, buffer->size);
    }
}

/* A buffer of `size` bytes, aligned to `alignment`: 1 for what malloc gives, or a power of two up to 256. */
GPU_FUNCTION device_buffer device_create_aligned(test_device *device, size_t size, size_t alignment) {
    device_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    buffer.size = size;
    if (device->kind == MOE_ROUTE_DEVICE_GPU) {
        device_must(device, gpu_alloc(&device->gpu, &buffer.address, size));
    } else {
        char *start;
        buffer.allocated = size + alignment - 1;
        buffer.memory = malloc(buffer.allocated ? buffer.allocated : 1);
        if (!buffer.memory) device_die("out of memory");
        start = (char *)buffer.memory + (alignment - (uintptr_t)buffer.memory % alignment) % alignment;
        buffer.address = (moe_route_address)(uintptr_t)start;
        if (alignment > 1) { /* the bytes that aligning left over */
            DEVICE_FORBID(buffer.memory, (size_t)(start - (char *)buffer.memory));
            DEVICE_FORBID(start + size, buffer.allocated - size - (size_t)(start - (char *)buffer.memory));
        }
    }
    device_fill(device, &buffer, DEVICE_POISON);
    return buffer;
}

GPU_FUNCTION device_buffer device_create(test_device *device, size_t size) {
    return device_create_aligned(device, size, 1);
}

GPU_FUNCTION device_buffer device_create_workspace(test_device *device, size_t size) {
    return device_create_aligned(device, size, DEVICE_WORKSPACE_ALIGNMENT);
}

/* `size` bytes from or to the buffer's start. */
GPU_FUNCTION void device_upload(test_device *device, const device_buffer *buffer, const void *from, size_t size) {
    if (size > buffer->size) device_die("an upload is larger than its buffer");
    if (device->kind == MOE_ROUTE_DEVICE_GPU) {
        device_must(device, gpu_upload(&device->gpu, buffer->address, from, size));
    } else if (size) {
        memcpy((void *)(uintptr_t)buffer->address, from, size);
    }
}

GPU_FUNCTION void device_download(test_device *device, void *to, const device_buffer *buffer, size_t size) {
    if (size > buffer->size) device_die("a download is larger than its buffer");
    if (device->kind == MOE_ROUTE_DEVICE_GPU) {
        device_must(device, gpu_download(&device->gpu, to, buffer->address, size));
    } else if (size) {
        memcpy(to, (const void *)(uintptr_t)buffer->address, size);
    }
}

GPU_FUNCTION device_buffer device_create_from(test_device *device, const void *from, size_t size) {
    device_buffer buffer = device_create(device, size);
    device_upload(device, &buffer, from, size);
    return buffer;
}

/* Frees the buffer and forgets its address; one that was never created (all zero) is allowed. */
GPU_FUNCTION void device_destroy(test_device *device, device_buffer *buffer) {
    if (device->kind == MOE_ROUTE_DEVICE_GPU) {
        device_must(device, gpu_free(&device->gpu, buffer->address));
    } else if (buffer->memory) {
        DEVICE_ALLOW(buffer->memory, buffer->allocated);
        free(buffer->memory);
    }
    memset(buffer, 0, sizeof *buffer);
}

/* out[t, j] = W[ids[t, j]] @ x[t], or x[t, j] with per_pair: moe_route_matmul with host arrays of `x_size` and `out_size` bytes; `out` is
   poisoned before. */
GPU_FUNCTION moe_route_status device_matmul(test_device *device, const moe_route_layer *layer, moe_route_matrix matrix, int per_pair, uint32_t num_tokens, uint32_t num_pairs,
                                            const int32_t *ids, const void *x, size_t x_size, void *out, size_t out_size) {
    device_buffer x_buffer = device_create_aligned(device, x_size, 16), out_buffer = device_create_aligned(device, out_size, 16), id_buffer = device_create_from(device, ids, num_pairs * 4), workspace;
    moe_route_matmul_args args;
    moe_route_status status;
    size_t size = 0;
    device_upload(device, &x_buffer, x, x_size);
    status = moe_route_layer_workspace_size(layer, num_tokens, &size);
    workspace = device_create_workspace(device, size);
    memset(&args, 0, sizeof args);
    args.num_tokens = num_tokens;
    args.matrix = matrix;
    args.x_per_pair = per_pair;
    args.ids = id_buffer.address;
    args.x = x_buffer.address;
    args.out = out_buffer.address;
    args.workspace = workspace.address;
    args.workspace_size = size;
    args.stream = device->stream;
    if (status == MOE_ROUTE_OK) status = moe_route_matmul(layer, &args);
    device_synchronize(device);
    device_download(device, out, &out_buffer, out_size);
    device_destroy(device, &x_buffer);
    device_destroy(device, &out_buffer);
    device_destroy(device, &id_buffer);
    device_destroy(device, &workspace);
    return status;
}

#endif /* TEST_DEVICE_H */
