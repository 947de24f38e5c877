/*
  workload.h: the layers that the example runs, on the host: the trained one of tests/data, and a made-up one of any size, whose
  experts each rank can make alone. Tokens belong to nobody here: rank and step choose their rows.
*/
#ifndef WORKLOAD_H
#define WORKLOAD_H

#include "../gguf.h"
#include "../quantize.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct workload {
    const char *name;
    uint32_t num_experts, top_k, hidden_size, intermediate_size, num_tokens;
    int has_shared;           /* a shared expert, of the same shape: number num_experts */
    quantize_dtype dtype;     /* of x and y */
    uint32_t group_size;      /* 0: BF16 weights; otherwise INT4 in groups, f16 scales */
    float *logits;            /* [num_tokens, num_experts] */
    uint16_t *x;              /* [num_tokens, hidden_size] */
    uint16_t *weights[2];     /* the trained gate_up [E, 2I, H] and down [E, H, I]; NULL: made up */
} workload;

/* Of one expert's matrix: gate_up (0) or down (1). */
static size_t workload_data_size(const workload *w, int matrix) {
    const size_t values = (size_t)w->hidden_size * w->intermediate_size * (matrix ? 1 : 2);
    return w->group_size ? values / 2 : values * 2;
}

static size_t workload_scales_size(const workload *w, int matrix) {
    const size_t values = (size_t)w->hidden_size * w->intermediate_size * (matrix ? 1 : 2);
    return w->group_size ? values / w->group_size * 2 : 0;
}

static uint64_t workload_random(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* About normal, deviation 1. */
static float workload_normal(uint64_t *state) {
    const uint64_t bits = workload_random(state);
    const float sum = (float)(bits & 0xffff) + (float)(bits >> 16 & 0xffff) + (float)(bits >> 32 & 0xffff) + (float)(bits >> 48);
    return (sum / 65535.0f - 2.0f) * 1.7320508f;
}

/* One expert's data and scales. */
static void workload_expert(const workload *w, uint32_t expert, int matrix, unsigned char *data, unsigned char *scales) {
    const size_t size = workload_data_size(w, matrix), num_scales = workload_scales_size(w, matrix) / 2;
    const uint32_t inner = matrix ? w->intermediate_size : w->hidden_size;
    uint64_t state = UINT64_C(0x9e3779b97f4a7c15) * (expert * 2 + (uint32_t)matrix + 1);
    size_t i;
    if (w->weights[matrix]) {
        memcpy(data, (const char *)w->weights[matrix] + expert * size, size);
        return;
    }
    for (i = 0; i + 8 <= size; i += 8) {
        const uint64_t bits = workload_random(&state);
        memcpy(data + i, &bits, 8);
    }
    for (i = 0; i < num_scales; i++) { /* codes have a deviation of 4.6 */
        const uint16_t scale = f16_from_float((0.75f + (float)(workload_random(&state) >> 61) / 16.0f) / (4.6f * sqrtf((float)inner)));
        memcpy(scales + i * 2, &scale, 2);
    }
}

static void workload_free(workload *w) {
    free(w->logits);
    free(w->x);
    free(w->weights[0]);
    free(w->weights[1]);
    memset(w, 0, sizeof *w);
}

/* A tensor of this type and these dimensions, the outermost first, which the caller frees; NULL with the reason in file->error. */
static void *workload_tensor(gguf_file *file, const char *name, uint32_t type, uint64_t d0, uint64_t d1, uint64_t d2) {
    const gguf_tensor *found = gguf_find(file, name);
    void *data;
    if (!found || found->type != type || found->shape[0] != d2 || found->shape[1] != d1 || found->shape[2] != d0 || found->shape[3] != 1) {
        gguf_fail(file, "%s %s", name, found ? "has another type or other dimensions" : "isn't there");
        return NULL;
    }
    data = malloc((size_t)found->size);
    if (!data) gguf_fail(file, "out of memory");
    else if (gguf_read(file, found, data, 0, (size_t)found->size)) return data;
    free(data);
    return NULL;
}

/* The trained layer and its 1,024 recorded tokens. 1, or 0 with the reason in error. */
static int workload_trained(workload *w, const char *path, char *error, size_t error_size) {
    gguf_file file;
    float *x = NULL;
    int good;
    memset(w, 0, sizeof *w);
    w->name = "trained layer";
    w->num_experts = 32;
    w->top_k = 4;
    w->hidden_size = 256;
    w->intermediate_size = 128;
    w->num_tokens = 1024;
    w->dtype = QUANTIZE_BF16;
    good = gguf_open(&file, path);
    if (good) good = (w->logits = (float *)workload_tensor(&file, "layers.2.router_logits", GGUF_TYPE_F32, 1, 1024, 32)) != NULL;
    if (good) good = (x = (float *)workload_tensor(&file, "x", GGUF_TYPE_F32, 1, 1024, 256)) != NULL;
    if (good) good = (w->weights[0] = (uint16_t *)workload_tensor(&file, "blk.2.ffn_gate_up_exps.weight", GGUF_TYPE_BF16, 32, 256, 256)) != NULL;
    if (good) good = (w->weights[1] = (uint16_t *)workload_tensor(&file, "blk.2.ffn_down_exps.weight", GGUF_TYPE_BF16, 32, 256, 128)) != NULL;
    if (!good) snprintf(error, error_size, "%s: %s", path, file.error);
    gguf_close(&file);
    if (good && !(w->x = (uint16_t *)malloc((size_t)1024 * 256 * sizeof *w->x))) {
        snprintf(error, error_size, "out of memory");
        good = 0;
    }
    if (good) quantize_convert(w->x, QUANTIZE_BF16, x, QUANTIZE_F32, 1024 * 256);
    free(x);
    if (!good) workload_free(w);
    return good;
}

/* 256 experts, top-8, and a shared one; INT4 in groups of 64. `skew` sends most tokens to the first experts. */
static int workload_synthetic(workload *w, uint32_t hidden_size, uint32_t intermediate_size, uint32_t num_tokens, int skew) {
    uint64_t state = 20260801;
    size_t i;
    memset(w, 0, sizeof *w);
    w->name = "256 experts";
    w->num_experts = 256;
    w->top_k = 8;
    w->hidden_size = hidden_size;
    w->intermediate_size = intermediate_size;
    w->num_tokens = num_tokens;
    w->has_shared = 1;
    w->dtype = QUANTIZE_F16;
    w->group_size = 64;
    w->logits = (float *)malloc((size_t)num_tokens * 256 * sizeof *w->logits);
    w->x = (uint16_t *)malloc((size_t)num_tokens * hidden_size * sizeof *w->x);
    if (!w->logits || !w->x) return 0;
    for (i = 0; i < (size_t)num_tokens * 256; i++) w->logits[i] = workload_normal(&state) - (skew ? 0.1f * (float)(i % 256) : 0.0f);
    for (i = 0; i < (size_t)num_tokens * hidden_size; i++) w->x[i] = f16_from_float(workload_normal(&state));
    return 1;
}

#endif /* WORKLOAD_H */
