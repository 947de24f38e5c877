/*
  example.h: what the small examples share and a program of your own has already: a context on the GPU where there is one,
  otherwise on the CPU backend (always with --cpu), memory there, and the end of the program with the library's message when a
  call fails. What an example shows stands in its own file.
*/
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXAMPLE_MAX_MEMORIES = 64, EXAMPLE_NO_GPU = 3 }; /* exit status 3: the example needs a GPU */

typedef struct example {
    moe_route_context *context;
    moe_route_stream stream; /* NULL on the CPU */
    int on_gpu;
    gpu_device gpu;
    moe_route_address memories[EXAMPLE_MAX_MEMORIES];
    void *allocated[EXAMPLE_MAX_MEMORIES];
    int num_memories;
} example;

GPU_FUNCTION void example_fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

GPU_FUNCTION void example_must(const example *e, moe_route_status status) {
    static char text[16384];
    if (status == MOE_ROUTE_OK) return;
    if (e->context) moe_route_message(e->context, text, sizeof text);
    example_fail(text[0] ? text : moe_route_status_name(status));
}

GPU_FUNCTION void example_must_gpu(const example *e, int result) {
    if (result) example_fail(e->gpu.reason);
}

GPU_FUNCTION void example_open(example *e, int argc, char **argv) {
    moe_route_context_desc desc;
    memset(e, 0, sizeof *e);
    memset(&desc, 0, sizeof desc);
    e->on_gpu = !(argc > 1 && strcmp(argv[1], "--cpu") == 0) && gpu_open(&e->gpu);
    desc.device = e->on_gpu ? MOE_ROUTE_DEVICE_GPU : MOE_ROUTE_DEVICE_CPU;
    if (e->on_gpu) example_must_gpu(e, gpu_stream_create(&e->gpu, &e->stream));
    example_must(e, moe_route_context_create(&desc, &e->context));
    printf("on %s\n", e->on_gpu ? e->gpu.name : "the CPU backend");
}

GPU_FUNCTION void example_write(example *e, moe_route_address to, const void *from, size_t size) {
    if (e->on_gpu) example_must_gpu(e, gpu_upload(&e->gpu, to, from, size));
    else memcpy((void *)(uintptr_t)to, from, size);
}

/* Waits for what was launched before. */
GPU_FUNCTION void example_read(example *e, void *to, moe_route_address from, size_t size) {
    if (e->on_gpu) example_must_gpu(e, gpu_download(&e->gpu, to, from, size));
    else memcpy(to, (const void *)(uintptr_t)from, size);
}

/* Memory of `size` bytes, aligned to 256, with that content (NULL: none); freed by example_close(). */
GPU_FUNCTION moe_route_address example_memory(example *e, const void *content, size_t size) {
    moe_route_address address = 0;
    if (e->num_memories == EXAMPLE_MAX_MEMORIES) example_fail("too many memories");
    if (e->on_gpu) {
        example_must_gpu(e, gpu_alloc(&e->gpu, &address, size));
    } else {
        void *memory = malloc(size + 255);
        if (!memory) example_fail("out of memory");
        e->allocated[e->num_memories] = memory;
        address = ((moe_route_address)(uintptr_t)memory + 255) / 256 * 256;
    }
    e->memories[e->num_memories++] = address;
    if (content) example_write(e, address, content, size);
    return address;
}

/* f32 numbers between -scale and scale, the same in every run for a seed; `keep` (or NULL) gets them, too. */
GPU_FUNCTION moe_route_address example_numbers(example *e, size_t count, float scale, unsigned seed, float *keep) {
    float *numbers = (float *)malloc(count * sizeof *numbers);
    moe_route_address address;
    size_t i;
    if (!numbers) example_fail("out of memory");
    for (i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        numbers[i] = scale * ((float)(seed >> 8) / 8388608.0f - 1.0f);
    }
    address = example_memory(e, numbers, count * sizeof *numbers);
    if (keep) memcpy(keep, numbers, count * sizeof *numbers);
    free(numbers);
    return address;
}

GPU_FUNCTION moe_route_address example_workspace(example *e, const moe_route_layer *layer, uint32_t num_tokens, size_t *size) {
    example_must(e, moe_route_layer_workspace_size(layer, num_tokens, size));
    return example_memory(e, NULL, *size ? *size : 1);
}

/* The layers must have been destroyed. */
GPU_FUNCTION void example_close(example *e) {
    int i;
    for (i = 0; i < e->num_memories; i++) {
        if (e->on_gpu) example_must_gpu(e, gpu_free(&e->gpu, e->memories[i]));
        else free(e->allocated[i]);
    }
    moe_route_context_destroy(e->context);
    if (e->on_gpu) example_must_gpu(e, gpu_stream_destroy(&e->gpu, e->stream));
    gpu_close(&e->gpu);
}

#endif /* EXAMPLE_H */
