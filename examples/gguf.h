/*
  gguf.h: reads a GGUF file, as llama.cpp's tools and the PyPI package gguf write it: a header, keys with values, the tensors'
  names, types and dimensions, then their data. Versions 2 and 3, little-endian. For the example and test programs of this
  repository, on little-endian machines; the library itself reads no files.

      gguf_file file;
      if (!gguf_open(&file, "model.gguf")) puts(file.error);
      const gguf_tensor *tensor = gguf_find(&file, "blk.0.ffn_down_exps.weight");
      if (tensor && !gguf_read(&file, tensor, memory, 0, tensor->size)) puts(file.error);
      if (gguf_number(&file, "qwen3moe.expert_count", 0, &number)) ...
      gguf_close(&file);

  Opening reads everything but the data. Nothing of the file is trusted: every length is held against the file's size before
  memory is taken for it, names must differ, and each tensor must lie within the file.
*/
#ifndef GGUF_H
#define GGUF_H

#include "files.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define GGUF_MAX_RANK 4
#define GGUF_MAX_NAME 65535     /* bytes of a name, the format's own limit for keys */
#define GGUF_MAX_KEPT (1 << 20) /* bytes of a value that is kept; larger ones, such as vocabularies, are passed over */

typedef enum gguf_value_type {
    GGUF_UINT8, GGUF_INT8, GGUF_UINT16, GGUF_INT16, GGUF_UINT32, GGUF_INT32, GGUF_FLOAT32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY,
    GGUF_UINT64, GGUF_INT64, GGUF_FLOAT64, GGUF_NUM_VALUE_TYPES
} gguf_value_type;

/* Tensor types, by the numbers that files give them. */
typedef struct gguf_type_info {
    uint32_t type;
    const char *name;
    uint32_t block_values, block_bytes;
} gguf_type_info;

enum { GGUF_TYPE_F32 = 0, GGUF_TYPE_F16 = 1, GGUF_TYPE_I32 = 26, GGUF_TYPE_I64 = 27, GGUF_TYPE_BF16 = 30 };

static const gguf_type_info gguf_types[] = {
    {GGUF_TYPE_F32, "F32", 1, 4}, {GGUF_TYPE_F16, "F16", 1, 2}, {2, "Q4_0", 32, 18},     {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},          {7, "Q5_1", 32, 24},          {8, "Q8_0", 32, 34},     {9, "Q8_1", 32, 40},
    {10, "Q2_K", 256, 84},        {11, "Q3_K", 256, 110},       {12, "Q4_K", 256, 144},  {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},       {15, "Q8_K", 256, 292},       {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98},     {19, "IQ1_S", 256, 50},       {20, "IQ4_NL", 32, 18},  {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},       {23, "IQ4_XS", 256, 136},     {24, "I8", 1, 1},        {25, "I16", 1, 2},
    {GGUF_TYPE_I32, "I32", 1, 4}, {GGUF_TYPE_I64, "I64", 1, 8}, {28, "F64", 1, 8},       {29, "IQ1_M", 256, 56},
    {GGUF_TYPE_BF16, "BF16", 1, 2}, {34, "TQ1_0", 256, 54},     {35, "TQ2_0", 256, 66},  {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36}};

typedef struct gguf_tensor {
    const char *name;
    uint32_t type;
    const gguf_type_info *info;   /* NULL for a type that isn't known here; then size is 0 and the tensor can't be read */
    uint32_t rank;
    uint64_t shape[GGUF_MAX_RANK];/* the innermost dimension first, as the file lists them; 1 beyond the rank */
    uint64_t offset;              /* of its data, from the file's start */
    uint64_t size;                /* bytes */
} gguf_tensor;

typedef struct gguf_pair {
    const char *key;
    gguf_value_type type;         /* of the value, or of an array's elements */
    int is_array;
    uint64_t count;               /* elements; 1 without an array */
    void *value;                  /* a string with a 0 at its end, or the numbers as in the file; NULL where it isn't kept */
} gguf_pair;

typedef struct gguf_file {
    char error[256];              /* of the last call that failed */
    gguf_tensor *tensors;         /* ascending names */
    size_t num_tensors;
    gguf_pair *pairs;             /* ascending keys */
    size_t num_pairs;
    FILE *stream;
    uint64_t at, size;            /* of the file; `at` while the header is read */
} gguf_file;

static int gguf_fail(gguf_file *file, const char *format, ...) FILES_PRINTF(2, 3);

/* Keeps the message and returns 0. */
static int gguf_fail(gguf_file *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(file->error, sizeof file->error, format, arguments);
    va_end(arguments);
    return 0;
}

static const gguf_type_info *gguf_find_type(uint32_t type) {
    size_t i;
    for (i = 0; i < sizeof gguf_types / sizeof gguf_types[0]; i++) {
        if (gguf_types[i].type == type) return &gguf_types[i];
    }
    return NULL;
}

/* ---- the header, in the order of the file ---- */

static int gguf_take(gguf_file *file, void *to, uint64_t size) {
    if (size > file->size - file->at || fread(to, 1, (size_t)size, file->stream) != size) {
        return gguf_fail(file, "the file ends within its header: is it cut?");
    }
    file->at += size;
    return 1;
}

static int gguf_skip(gguf_file *file, uint64_t size) {
    if (size > file->size - file->at || !files_seek(file->stream, file->at + size)) {
        return gguf_fail(file, "the file ends within its header: is it cut?");
    }
    file->at += size;
    return 1;
}

static int gguf_take_u32(gguf_file *file, uint32_t *value) { return gguf_take(file, value, sizeof *value); }
static int gguf_take_u64(gguf_file *file, uint64_t *value) { return gguf_take(file, value, sizeof *value); }

/* `size` bytes in memory of their own, with a 0 behind them. */
static int gguf_take_copy(gguf_file *file, uint64_t size, void **copy) {
    char *memory;
    if (size > file->size - file->at) return gguf_fail(file, "the file ends within its header: is it cut?");
    if (size >= SIZE_MAX || (memory = (char *)malloc((size_t)size + 1)) == NULL) return gguf_fail(file, "out of memory");
    if (!gguf_take(file, memory, size)) {
        free(memory);
        return 0;
    }
    memory[size] = 0;
    *copy = memory;
    return 1;
}

static int gguf_take_name(gguf_file *file, const char **name) {
    uint64_t length;
    void *copy;
    if (!gguf_take_u64(file, &length)) return 0;
    if (length == 0 || length > GGUF_MAX_NAME)
        return gguf_fail(file, "byte %llu: a name of %llu bytes", (unsigned long long)file->at, (unsigned long long)length);
    if (!gguf_take_copy(file, length, &copy)) return 0;
    *name = (const char *)copy;
    if (strlen(*name) != length) return gguf_fail(file, "byte %llu: a name holds a 0 character", (unsigned long long)file->at);
    return 1;
}

/* Makes room for one more element; `*list` is an array of `count` elements that only grows through here. */
static int gguf_grow(gguf_file *file, void **list, size_t count, size_t element_size) {
    void *larger;
    if (count & (count - 1)) return 1; /* capacities are 0, 1, 2, 4, ... */
    larger = count > SIZE_MAX / 2 / element_size ? NULL : realloc(*list, (count ? 2 * count : 1) * element_size);
    if (!larger) return gguf_fail(file, "out of memory");
    *list = larger;
    return 1;
}

/* Bytes of a number; 0 for a string or an array. */
static uint32_t gguf_value_size(uint32_t type) {
    static const unsigned char sizes[GGUF_NUM_VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return sizes[type];
}

static int gguf_take_value(gguf_file *file, gguf_pair *pair) {
    uint32_t type;
    uint64_t i, length;
    if (!gguf_take_u32(file, &type)) return 0;
    pair->is_array = type == GGUF_ARRAY;
    pair->count = 1;
    if (pair->is_array && (!gguf_take_u32(file, &type) || !gguf_take_u64(file, &pair->count))) return 0;
    if (type >= GGUF_NUM_VALUE_TYPES || type == GGUF_ARRAY)
        return gguf_fail(file, "key \"%.64s\": unknown type %u", pair->key, (unsigned)type);
    pair->type = (gguf_value_type)type;
    if (type != GGUF_STRING) {
        const uint64_t size = gguf_value_size(type);
        if (pair->count > (file->size - file->at) / size)
            return gguf_fail(file, "key \"%.64s\": an array of %llu elements in a file of %llu bytes: is it cut?", pair->key,
                             (unsigned long long)pair->count, (unsigned long long)file->size);
        return pair->count * size > GGUF_MAX_KEPT ? gguf_skip(file, pair->count * size)
                                                  : gguf_take_copy(file, pair->count * size, &pair->value);
    }
    for (i = 0; i < pair->count; i++) {
        if (!gguf_take_u64(file, &length)) return 0;
        if (pair->is_array || length > GGUF_MAX_KEPT) {
            if (!gguf_skip(file, length)) return 0;
        } else if (!gguf_take_copy(file, length, &pair->value)) {
            return 0;
        }
    }
    return 1;
}

static int gguf_take_pair(gguf_file *file) {
    void *list = file->pairs;
    gguf_pair *pair;
    if (!gguf_grow(file, &list, file->num_pairs, sizeof *pair)) return 0;
    file->pairs = (gguf_pair *)list;
    pair = &file->pairs[file->num_pairs++]; /* from here on it is freed with the others */
    memset(pair, 0, sizeof *pair);
    return gguf_take_name(file, &pair->key) && gguf_take_value(file, pair);
}

/* The size from type and dimensions. Rows are whole blocks. */
static int gguf_check_size(gguf_file *file, gguf_tensor *tensor) {
    uint64_t rows = 1;
    uint32_t i;
    tensor->info = gguf_find_type(tensor->type);
    if (tensor->info && tensor->shape[0] % tensor->info->block_values) {
        return gguf_fail(file, "tensor \"%.64s\": rows of %llu values are no whole blocks of %s", tensor->name,
                         (unsigned long long)tensor->shape[0], tensor->info->name);
    }
    for (i = 1; i < tensor->rank; i++) {
        if (tensor->shape[i] && rows > UINT64_MAX / tensor->shape[i])
            return gguf_fail(file, "tensor \"%.64s\": its dimensions overflow", tensor->name);
        rows *= tensor->shape[i];
    }
    if (tensor->info) {
        const uint64_t blocks = tensor->shape[0] / tensor->info->block_values;
        if (blocks > UINT64_MAX / tensor->info->block_bytes || (rows && blocks * tensor->info->block_bytes > UINT64_MAX / rows)) {
            return gguf_fail(file, "tensor \"%.64s\": its dimensions overflow", tensor->name);
        }
        tensor->size = blocks * tensor->info->block_bytes * rows;
    }
    return 1;
}

static int gguf_take_tensor(gguf_file *file) {
    void *list = file->tensors;
    gguf_tensor *tensor;
    uint32_t i;
    if (!gguf_grow(file, &list, file->num_tensors, sizeof *tensor)) return 0;
    file->tensors = (gguf_tensor *)list;
    tensor = &file->tensors[file->num_tensors++];
    memset(tensor, 0, sizeof *tensor);
    if (!gguf_take_name(file, &tensor->name) || !gguf_take_u32(file, &tensor->rank)) return 0;
    if (tensor->rank > GGUF_MAX_RANK)
        return gguf_fail(file, "tensor \"%.64s\": %u dimensions", tensor->name, (unsigned)tensor->rank);
    for (i = 0; i < GGUF_MAX_RANK; i++) tensor->shape[i] = 1;
    for (i = 0; i < tensor->rank; i++) {
        if (!gguf_take_u64(file, &tensor->shape[i])) return 0;
    }
    return gguf_take_u32(file, &tensor->type) && gguf_take_u64(file, &tensor->offset) && gguf_check_size(file, tensor);
}

/* Both lists begin with their name or key. */
static int gguf_by_name(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static int gguf_sort(gguf_file *file, void *list, size_t count, size_t element_size, const char *what) {
    size_t i;
    if (count) qsort(list, count, element_size, gguf_by_name);
    for (i = 1; i < count; i++) {
        const char *const *before = (const char *const *)(const void *)((const char *)list + (i - 1) * element_size);
        const char *const *after = (const char *const *)(const void *)((const char *)list + i * element_size);
        if (strcmp(*before, *after) == 0) return gguf_fail(file, "two %s are named \"%.64s\"", what, *after);
    }
    return 1;
}

static const gguf_pair *gguf_find_pair(const gguf_file *file, const char *key) {
    return file->num_pairs ? (const gguf_pair *)bsearch(&key, file->pairs, file->num_pairs, sizeof *file->pairs, gguf_by_name)
                           : NULL;
}

/* Element `index` of a number or an array of numbers; true counts 1. Returns 0 when there is none. */
FILES_FUNCTION int gguf_number(const gguf_file *file, const char *key, uint64_t index, double *number) {
    const gguf_pair *pair = gguf_find_pair(file, key);
    const char *value;
    if (!pair || !pair->value || pair->type == GGUF_STRING || index >= pair->count) return 0;
    value = (const char *)pair->value + index * gguf_value_size(pair->type);
    switch (pair->type) {
#define GGUF_VALUE(which, type)                                                                                                  \
    case which: {                                                                                                                \
        type element;                                                                                                            \
        memcpy(&element, value, sizeof element);                                                                                 \
        *number = (double)element;                                                                                               \
        return 1;                                                                                                                \
    }
        GGUF_VALUE(GGUF_UINT8, uint8_t)
        GGUF_VALUE(GGUF_INT8, int8_t)
        GGUF_VALUE(GGUF_UINT16, uint16_t)
        GGUF_VALUE(GGUF_INT16, int16_t)
        GGUF_VALUE(GGUF_UINT32, uint32_t)
        GGUF_VALUE(GGUF_INT32, int32_t)
        GGUF_VALUE(GGUF_FLOAT32, float)
        GGUF_VALUE(GGUF_BOOL, uint8_t)
        GGUF_VALUE(GGUF_UINT64, uint64_t)
        GGUF_VALUE(GGUF_INT64, int64_t)
        GGUF_VALUE(GGUF_FLOAT64, double)
#undef GGUF_VALUE
    default: return 0;
    }
}

/* NULL when there is no such text. */
FILES_FUNCTION const char *gguf_text(const gguf_file *file, const char *key) {
    const gguf_pair *pair = gguf_find_pair(file, key);
    return pair && !pair->is_array && pair->type == GGUF_STRING ? (const char *)pair->value : NULL;
}

/* NULL when there is no such tensor. */
FILES_FUNCTION const gguf_tensor *gguf_find(const gguf_file *file, const char *name) {
    return file->num_tensors
               ? (const gguf_tensor *)bsearch(&name, file->tensors, file->num_tensors, sizeof *file->tensors, gguf_by_name)
               : NULL;
}

/* Offsets count from the data's start, which is aligned, and are aligned themselves. */
static int gguf_check_layout(gguf_file *file) {
    double alignment = 32;
    uint64_t start, step;
    size_t i;
    if (gguf_find_pair(file, "general.alignment") && !gguf_number(file, "general.alignment", 0, &alignment)) alignment = 0;
    if (!(alignment >= 1 && alignment <= 65536) || ((uint32_t)alignment & ((uint32_t)alignment - 1))) {
        return gguf_fail(file, "general.alignment is %g; allowed are powers of two up to 65536", alignment);
    }
    step = (uint64_t)alignment;
    start = (file->at + step - 1) / step * step;
    for (i = 0; i < file->num_tensors; i++) {
        gguf_tensor *tensor = &file->tensors[i];
        if (tensor->offset % step)
            return gguf_fail(file, "tensor \"%.64s\": offset %llu isn't aligned to %llu", tensor->name,
                             (unsigned long long)tensor->offset, (unsigned long long)step);
        if (start > file->size || tensor->offset > file->size - start || tensor->size > file->size - start - tensor->offset) {
            return gguf_fail(file, "tensor \"%.64s\": %llu bytes at offset %llu lie beyond the file's end: is it cut?",
                             tensor->name, (unsigned long long)tensor->size, (unsigned long long)tensor->offset);
        }
        tensor->offset += start;
    }
    return 1;
}

static int gguf_read_header(gguf_file *file) {
    char magic[4];
    uint32_t version;
    uint64_t num_tensors, num_pairs, i;
    if (file->size < 24 || !gguf_take(file, magic, 4) || memcmp(magic, "GGUF", 4) != 0)
        return gguf_fail(file, "no GGUF file: it doesn't begin with GGUF");
    if (!gguf_take_u32(file, &version) || !gguf_take_u64(file, &num_tensors) || !gguf_take_u64(file, &num_pairs)) return 0;
    if (version != 2 && version != 3)
        return gguf_fail(file, "GGUF version %u; 2 and 3, little-endian, can be read", (unsigned)version);
    for (i = 0; i < num_pairs; i++) { /* each takes bytes of the file, so a false count ends soon */
        if (!gguf_take_pair(file)) return 0;
    }
    if (!gguf_sort(file, file->pairs, file->num_pairs, sizeof *file->pairs, "keys")) return 0;
    for (i = 0; i < num_tensors; i++) {
        if (!gguf_take_tensor(file)) return 0;
    }
    return gguf_sort(file, file->tensors, file->num_tensors, sizeof *file->tensors, "tensors") && gguf_check_layout(file);
}

/* ---- files ---- */

/* Frees everything but the message. */
FILES_FUNCTION void gguf_close(gguf_file *file) {
    char error[sizeof file->error];
    size_t i;
    memcpy(error, file->error, sizeof error);
    for (i = 0; i < file->num_pairs; i++) {
        free((void *)(uintptr_t)file->pairs[i].key);
        free(file->pairs[i].value);
    }
    for (i = 0; i < file->num_tensors; i++) free((void *)(uintptr_t)file->tensors[i].name);
    free(file->pairs);
    free(file->tensors);
    if (file->stream) fclose(file->stream);
    memset(file, 0, sizeof *file);
    memcpy(file->error, error, sizeof error);
}

/* Takes the stream, which it closes in the end. 0 with a message in file->error when it can't be used (then there is nothing
   to close). */
FILES_FUNCTION int gguf_open_stream(gguf_file *file, FILE *stream) {
    int done;
    memset(file, 0, sizeof *file);
    file->stream = stream;
    done = files_size(stream, &file->size) ? gguf_read_header(file) : gguf_fail(file, "it has no size");
    if (!done) gguf_close(file);
    return done;
}

/* Messages don't name the file. */
FILES_FUNCTION int gguf_open(gguf_file *file, const char *path) {
    FILE *stream = fopen(path, "rb");
    memset(file, 0, sizeof *file);
    return stream ? gguf_open_stream(file, stream) : gguf_fail(file, "it can't be opened");
}

/* `size` bytes of a tensor's data, from `offset` on. */
FILES_FUNCTION int gguf_read(gguf_file *file, const gguf_tensor *tensor, void *to, uint64_t offset, size_t size) {
    if (offset > tensor->size || size > tensor->size - offset)
        return gguf_fail(file, "tensor \"%.64s\" has %llu bytes", tensor->name, (unsigned long long)tensor->size);
    if (!files_read(file->stream, tensor->offset + offset, to, size))
        return gguf_fail(file, "tensor \"%.64s\" can't be read", tensor->name);
    return 1;
}

#endif /* GGUF_H */
