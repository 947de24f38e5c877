/*
  safetensors.h: reads a safetensors file: 8 bytes with the header's length, a JSON header, then the tensors' data, all
  little-endian. For the example and test programs of this repository, on little-endian machines; the library itself reads
  no files. Needs cJSON (Debian: libcjson-dev).

      safetensors_file file;
      if (!safetensors_open(&file, "model.safetensors")) puts(file.error);
      const float *x = (const float *)safetensors_expect(&file, "x", SAFETENSORS_F32, 1024, 256, 0);

  safetensors_open() reads everything, safetensors_open_header() leaves the data to safetensors_read().

  Everything is checked before it is used: the header must be JSON in UTF-8 without names that appear twice, a tensor's shape
  has to fit its length, and the tensors have to cover the data without holes or overlaps, as the format demands.
*/
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "files.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define SAFETENSORS_MAX_HEADER 100000000u /* the format's own limit, in bytes */
#define SAFETENSORS_MAX_RANK 8
#define SAFETENSORS_MAX_SIZE 9007199254740992.0 /* 2^53: up to there JSON's numbers are exact, which cJSON keeps as double */

typedef enum safetensors_dtype {
    SAFETENSORS_BOOL,
    SAFETENSORS_F4,
    SAFETENSORS_F6_E2M3,
    SAFETENSORS_F6_E3M2,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E4M3FNUZ,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_F8_E5M2FNUZ,
    SAFETENSORS_F8_E8M0,
    SAFETENSORS_U16,
    SAFETENSORS_I16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_U32,
    SAFETENSORS_I32,
    SAFETENSORS_F32,
    SAFETENSORS_U64,
    SAFETENSORS_I64,
    SAFETENSORS_F64,
    SAFETENSORS_C64,
    SAFETENSORS_NUM_DTYPES
} safetensors_dtype;

typedef struct safetensors_dtype_info {
    const char *name;
    unsigned bits; /* an element */
} safetensors_dtype_info;

/* In the order of safetensors_dtype. */
static const safetensors_dtype_info safetensors_dtypes[SAFETENSORS_NUM_DTYPES] = {
    {"BOOL", 8}, {"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8}, {"I8", 8}, {"F8_E4M3", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8}, {"U16", 16}, {"I16", 16}, {"F16", 16}, {"BF16", 16}, {"U32", 32},
    {"I32", 32}, {"F32", 32}, {"U64", 64}, {"I64", 64}, {"F64", 64}, {"C64", 64}};

typedef struct safetensors_tensor {
    const char *name;
    safetensors_dtype dtype;
    size_t rank;                        /* 0 for a single value */
    size_t shape[SAFETENSORS_MAX_RANK];
    size_t begin, end;                  /* bytes in the file's data */
    const unsigned char *data;          /* aligned to its elements wherever its offset is; NULL when only the header was read */
} safetensors_tensor;

typedef struct safetensors_file {
    char error[256]; /* of the last call that failed */
    safetensors_tensor *tensors; /* ascending names */
    size_t num_tensors;
    cJSON *header;   /* names and metadata lie in it */
    uint64_t header_size, data_size;
    unsigned char *data;
    FILE *stream;    /* where the data was left in the file */
} safetensors_file;

/* Keeps the message and returns 0. */
static int safetensors_fail(safetensors_file *file, const char *format, ...) FILES_PRINTF(2, 3);

static int safetensors_fail(safetensors_file *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(file->error, sizeof file->error, format, arguments);
    va_end(arguments);
    return 0;
}

/* ---- the header ---- */

/* Bytes of the UTF-8 character at `at` that starts with a byte above 0x7f; 0 when it isn't valid. */
static int safetensors_utf8(const char *at) {
    const unsigned char *byte = (const unsigned char *)at;
    int length = byte[0] < 0xc2 ? 0 : byte[0] < 0xe0 ? 2 : byte[0] < 0xf0 ? 3 : byte[0] < 0xf5 ? 4 : 0;
    int i;
    for (i = 1; i < length; i++) {
        if ((byte[i] & 0xc0) != 0x80) return 0;
    }
    if (byte[0] == 0xe0 && byte[1] < 0xa0) return 0; /* longer than needed */
    if (byte[0] == 0xf0 && byte[1] < 0x90) return 0;
    if (byte[0] == 0xed && byte[1] > 0x9f) return 0; /* surrogate */
    if (byte[0] == 0xf4 && byte[1] > 0x8f) return 0; /* above 0x10ffff */
    return length;
}

/* What JSON demands and cJSON lets pass: valid UTF-8, no control characters and no \u0000 in strings, which would cut names
   short. The text ends with a 0 byte, so looking one byte ahead is safe. */
static int safetensors_check_text(safetensors_file *file, const char *text) {
    const char *at = text;
    int in_string = 0;
    while (at < text + file->header_size) {
        const unsigned char c = (unsigned char)*at;
        const int length = c < 0x80 ? 1 : safetensors_utf8(at);
        const char *wrong = NULL;
        if (length == 0) wrong = "invalid UTF-8";
        else if (c < 0x20 && (in_string || (c != '\t' && c != '\n' && c != '\r'))) wrong = "a control character";
        else if (in_string && strncmp(at, "\\u0000", 6) == 0) wrong = "a string holds a 0 character";
        if (wrong) return safetensors_fail(file, "header, byte %lu: %s", (unsigned long)(at - text), wrong);
        if (c == '"') in_string = !in_string;
        at += in_string && c == '\\' && at[1] ? 2 : length; /* what is escaped is ASCII, or no JSON */
    }
    return 1;
}

/* A size: a whole number that is exact. */
static int safetensors_size(safetensors_file *file, const char *name, const cJSON *item, size_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble != floor(item->valuedouble)) {
        return safetensors_fail(file, "tensor \"%.64s\": shape and data_offsets must be whole numbers", name);
    }
    if (item->valuedouble >= SAFETENSORS_MAX_SIZE || item->valuedouble > (double)(SIZE_MAX / 2))
        return safetensors_fail(file, "tensor \"%.64s\": a number is too large", name);
    *value = (size_t)item->valuedouble;
    return 1;
}

static int safetensors_sizes(safetensors_file *file, const char *name, const cJSON *list, size_t *values, size_t capacity,
                             size_t *count) {
    const cJSON *item;
    *count = 0;
    if (!cJSON_IsArray(list)) return safetensors_fail(file, "tensor \"%.64s\": shape and data_offsets must be lists", name);
    for (item = list->child; item; item = item->next) {
        if (*count == capacity)
            return safetensors_fail(file, "tensor \"%.64s\": more than %lu numbers in a list", name, (unsigned long)capacity);
        if (!safetensors_size(file, name, item, &values[(*count)++])) return 0;
    }
    return 1;
}

/* The shape's bytes must be the length that the offsets give. */
static int safetensors_check_size(safetensors_file *file, const safetensors_tensor *tensor) {
    size_t size = safetensors_dtypes[tensor->dtype].bits;
    size_t i;
    for (i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] && size > SIZE_MAX / tensor->shape[i]) {
            return safetensors_fail(file, "tensor \"%.64s\": its shape overflows", tensor->name);
        }
        size *= tensor->shape[i];
    }
    if (size % 8 || tensor->begin > tensor->end || tensor->end - tensor->begin != size / 8) {
        return safetensors_fail(
            file, "tensor \"%.64s\": data_offsets [%lu, %lu] don't fit its shape, which takes %lu bits", tensor->name,
            (unsigned long)tensor->begin, (unsigned long)tensor->end, (unsigned long)size);
    }
    return 1;
}

/* {"dtype": ..., "shape": [...], "data_offsets": [...]}, in any order, each once. */
static int safetensors_entry(safetensors_file *file, const cJSON *entry, safetensors_tensor *tensor) {
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    const cJSON *found[3] = {NULL, NULL, NULL}, *item;
    size_t offsets[2] = {0, 0}, count;
    int i;
    memset(tensor, 0, sizeof *tensor);
    tensor->name = entry->string;
    if (!cJSON_IsObject(entry)) return safetensors_fail(file, "tensor \"%.64s\": an object is expected", tensor->name);
    for (item = entry->child; item; item = item->next) {
        for (i = 0; i < 3; i++) {
            if (strcmp(item->string, keys[i]) != 0) continue;
            if (found[i]) return safetensors_fail(file, "tensor \"%.64s\": %s appears twice", tensor->name, keys[i]);
            found[i] = item;
        }
    }
    if (!cJSON_IsString(found[0]) || !found[1] || !found[2])
        return safetensors_fail(file, "tensor \"%.64s\" lacks its dtype, shape or data_offsets", tensor->name);
    for (i = 0; i < SAFETENSORS_NUM_DTYPES && strcmp(found[0]->valuestring, safetensors_dtypes[i].name) != 0; i++) {}
    if (i == SAFETENSORS_NUM_DTYPES)
        return safetensors_fail(file, "tensor \"%.64s\": unknown dtype \"%.32s\"", tensor->name, found[0]->valuestring);
    tensor->dtype = (safetensors_dtype)i;
    if (!safetensors_sizes(file, tensor->name, found[1], tensor->shape, SAFETENSORS_MAX_RANK, &tensor->rank)) return 0;
    if (!safetensors_sizes(file, tensor->name, found[2], offsets, 2, &count)) return 0;
    if (count != 2) return safetensors_fail(file, "tensor \"%.64s\": data_offsets must be two numbers", tensor->name);
    tensor->begin = offsets[0];
    tensor->end = offsets[1];
    return safetensors_check_size(file, tensor);
}

static int safetensors_by_offset(const void *left, const void *right) {
    const safetensors_tensor *a = (const safetensors_tensor *)left;
    const safetensors_tensor *b = (const safetensors_tensor *)right;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

static int safetensors_by_name(const void *left, const void *right) {
    return strcmp(((const safetensors_tensor *)left)->name, ((const safetensors_tensor *)right)->name);
}

/* Checks that the tensors cover the data without holes or overlaps, and sorts them by name; names must differ. */
static int safetensors_check_layout(safetensors_file *file) {
    size_t expected = 0;
    size_t i;
    if (file->num_tensors) qsort(file->tensors, file->num_tensors, sizeof *file->tensors, safetensors_by_offset);
    for (i = 0; i < file->num_tensors; i++) {
        safetensors_tensor *tensor = &file->tensors[i];
        if (tensor->end > file->data_size) {
            return safetensors_fail(
                file, "tensor \"%.64s\" ends at byte %lu, but the file holds %lu bytes of data: is it cut?",
                tensor->name, (unsigned long)tensor->end, (unsigned long)file->data_size);
        }
        if (tensor->begin != expected) {
            return safetensors_fail(file, "tensor \"%.64s\" begins at byte %lu instead of %lu", tensor->name,
                                    (unsigned long)tensor->begin, (unsigned long)expected);
        }
        expected = tensor->end;
        if (file->data) tensor->data = file->data + tensor->begin;
    }
    if (expected != file->data_size) {
        return safetensors_fail(file, "%lu bytes after the last tensor", (unsigned long)(file->data_size - expected));
    }
    if (file->num_tensors) qsort(file->tensors, file->num_tensors, sizeof *file->tensors, safetensors_by_name);
    for (i = 1; i < file->num_tensors; i++) {
        if (strcmp(file->tensors[i - 1].name, file->tensors[i].name) == 0) {
            return safetensors_fail(file, "two tensors are named \"%.64s\"", file->tensors[i].name);
        }
    }
    return 1;
}

/* {"key": "value", ...}: strings alone. */
static int safetensors_check_metadata(safetensors_file *file, const cJSON *metadata) {
    const cJSON *item;
    if (!cJSON_IsObject(metadata)) return safetensors_fail(file, "__metadata__ must be an object");
    for (item = metadata->child; item; item = item->next) {
        if (!cJSON_IsString(item)) return safetensors_fail(file, "__metadata__: \"%.64s\" must be a string", item->string);
    }
    return 1;
}

/* `text` has header_size bytes and a 0 behind them. */
static int safetensors_read_header(safetensors_file *file, const char *text) {
    const char *end = NULL;
    const cJSON *item;
    size_t count = 0;
    int metadata_seen = 0;
    if (text[0] != '{') return safetensors_fail(file, "no safetensors file: its header is no JSON object");
    if (!safetensors_check_text(file, text)) return 0;
    file->header = cJSON_ParseWithOpts(text, &end, 1);
    if (!file->header) return safetensors_fail(file, "header, byte %lu: no valid JSON", (unsigned long)(end ? end - text : 0));
    for (item = file->header->child; item; item = item->next) count++;
    file->tensors = (safetensors_tensor *)calloc(count ? count : 1, sizeof *file->tensors);
    if (!file->tensors) return safetensors_fail(file, "out of memory");
    for (item = file->header->child; item; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) {
            if (metadata_seen++) return safetensors_fail(file, "a second __metadata__");
            if (!safetensors_check_metadata(file, item)) return 0;
        } else if (!safetensors_entry(file, item, &file->tensors[file->num_tensors++])) {
            return 0;
        }
    }
    return safetensors_check_layout(file);
}

/* ---- files ---- */

/* Frees everything but the message. */
FILES_FUNCTION void safetensors_close(safetensors_file *file) {
    char error[sizeof file->error];
    memcpy(error, file->error, sizeof error);
    free(file->tensors);
    cJSON_Delete(file->header);
    free(file->data);
    if (file->stream) fclose(file->stream);
    memset(file, 0, sizeof *file);
    memcpy(file->error, error, sizeof error);
}

/* The header's length from a file's first 8 bytes. */
static int safetensors_start(safetensors_file *file, const unsigned char *bytes, uint64_t file_size) {
    int i;
    for (i = 7; i >= 0; i--) file->header_size = file->header_size << 8 | bytes[i];
    if (file->header_size < 2 || file->header_size > SAFETENSORS_MAX_HEADER) {
        return safetensors_fail(file, "no safetensors file: its header's length is wrong");
    }
    if (file->header_size > file_size - 8) return safetensors_fail(file, "the file ends within its header");
    file->data_size = file_size - 8 - file->header_size;
    return 1;
}

/* Memory for the data; its own, so that it is aligned whatever the header's length. */
static int safetensors_take_data(safetensors_file *file) {
    if (file->data_size < SIZE_MAX) file->data = (unsigned char *)malloc(file->data_size ? (size_t)file->data_size : 1);
    return file->data ? 1 : safetensors_fail(file, "out of memory");
}

static int safetensors_read_file(safetensors_file *file, int with_data) {
    unsigned char start[8];
    uint64_t size;
    char *text;
    int done;
    if (!files_size(file->stream, &size)) return safetensors_fail(file, "it has no size");
    if (size < 8 || !files_read(file->stream, 0, start, 8)) return safetensors_fail(file, "no safetensors file: under 8 bytes");
    if (!safetensors_start(file, start, size)) return 0;
    text = (char *)malloc((size_t)file->header_size + 1);
    if (!text) return safetensors_fail(file, "out of memory");
    text[file->header_size] = 0;
    done = files_read(file->stream, 8, text, (size_t)file->header_size) ? 1 : safetensors_fail(file, "read error");
    if (done && with_data) {
        done = safetensors_take_data(file);
        if (done && !files_read(file->stream, 8 + file->header_size, file->data, (size_t)file->data_size))
            done = safetensors_fail(file, "read error");
    }
    if (done) done = safetensors_read_header(file, text);
    free(text);
    return done;
}

static int safetensors_open_file(safetensors_file *file, const char *path, int with_data) {
    int done;
    memset(file, 0, sizeof *file);
    file->stream = fopen(path, "rb");
    done = file->stream ? safetensors_read_file(file, with_data) : safetensors_fail(file, "%.200s can't be opened", path);
    if (!done) safetensors_close(file);
    return done;
}

/* Reads a whole file; 0 with a message in file->error when it can't be used (then there is nothing to close). */
FILES_FUNCTION int safetensors_open(safetensors_file *file, const char *path) { return safetensors_open_file(file, path, 1); }

/* Reads the header alone. */
FILES_FUNCTION int safetensors_open_header(safetensors_file *file, const char *path) {
    return safetensors_open_file(file, path, 0);
}

/* After safetensors_open_header(): `size` bytes of a tensor's data, from `offset` on. */
FILES_FUNCTION int safetensors_read(safetensors_file *file, const safetensors_tensor *tensor, void *to, size_t offset,
                                    size_t size) {
    const size_t length = tensor->end - tensor->begin;
    if (offset > length || size > length - offset)
        return safetensors_fail(file, "tensor \"%.64s\" has %lu bytes", tensor->name, (unsigned long)length);
    if (!files_read(file->stream, 8 + file->header_size + tensor->begin + offset, to, size))
        return safetensors_fail(file, "tensor \"%.64s\" can't be read", tensor->name);
    return 1;
}

/* A whole file in memory, which is copied. */
FILES_FUNCTION int safetensors_parse(safetensors_file *file, const void *memory, size_t size) {
    const unsigned char *bytes = (const unsigned char *)memory;
    char *text = NULL;
    int done = 0;
    memset(file, 0, sizeof *file);
    if (size < 8) return safetensors_fail(file, "no safetensors file: under 8 bytes");
    if (!safetensors_start(file, bytes, size)) return 0;
    text = (char *)malloc((size_t)file->header_size + 1);
    if (!text) {
        safetensors_fail(file, "out of memory");
    } else if (safetensors_take_data(file)) {
        memcpy(text, bytes + 8, (size_t)file->header_size);
        text[file->header_size] = 0;
        memcpy(file->data, bytes + 8 + file->header_size, (size_t)file->data_size);
        done = safetensors_read_header(file, text);
    }
    free(text);
    if (!done) safetensors_close(file);
    return done;
}

/* NULL when there is no such tensor. */
FILES_FUNCTION const safetensors_tensor *safetensors_find(const safetensors_file *file, const char *name) {
    size_t low = 0;
    size_t high = file->num_tensors;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->tensors[middle].name);
        if (order == 0) return &file->tensors[middle];
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

/* The value of a key in __metadata__, or NULL. */
FILES_FUNCTION const char *safetensors_metadata(const safetensors_file *file, const char *key) {
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(file->header, "__metadata__");
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(metadata, key);
    return value ? value->valuestring : NULL;
}

/* "F32 [1024, 256]" */
static void safetensors_describe(char *text, size_t size, safetensors_dtype dtype, const size_t *shape, size_t rank) {
    size_t i;
    int length = snprintf(text, size, "%s [", safetensors_dtypes[dtype].name);
    for (i = 0; i < rank && length > 0 && (size_t)length < size; i++) {
        length += snprintf(text + length, size - (size_t)length, "%s%lu", i ? ", " : "", (unsigned long)shape[i]);
    }
    if (length > 0 && (size_t)length < size) snprintf(text + length, size - (size_t)length, "]");
}

/* The data of a tensor that must have this type and shape (0 for the dimensions that it doesn't have); NULL with a
   message in file->error when it is missing or different. */
FILES_FUNCTION const void *safetensors_expect(safetensors_file *file, const char *name, safetensors_dtype dtype,
                                                    size_t d0, size_t d1, size_t d2) {
    const safetensors_tensor *tensor = safetensors_find(file, name);
    char is[96], wanted[96];
    size_t shape[3];
    size_t rank = 0;
    shape[0] = d0;
    shape[1] = d1;
    shape[2] = d2;
    while (rank < 3 && shape[rank]) rank++;
    if (!tensor) {
        safetensors_fail(file, "there is no tensor \"%.64s\"", name);
        return NULL;
    }
    if (tensor->dtype != dtype || tensor->rank != rank || memcmp(tensor->shape, shape, rank * sizeof *shape) != 0) {
        safetensors_describe(is, sizeof is, tensor->dtype, tensor->shape, tensor->rank);
        safetensors_describe(wanted, sizeof wanted, dtype, shape, rank);
        safetensors_fail(file, "tensor \"%.64s\" is %s instead of %s", name, is, wanted);
        return NULL;
    }
    if (tensor->begin * 8 % safetensors_dtypes[dtype].bits) {
        safetensors_fail(file, "tensor \"%.64s\" isn't aligned to its elements", name);
        return NULL;
    }
    return tensor->data;
}

#endif /* SAFETENSORS_H */
