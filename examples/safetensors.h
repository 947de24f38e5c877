/*
  safetensors.h: reads a safetensors file: 8 bytes with the header's length, a JSON header, then the tensors' data, all
  little-endian. For the example, test and benchmark programs of this repository, on little-endian machines; the library
  itself reads no files.

      safetensors_file file;
      if (!safetensors_open(&file, "model.safetensors")) puts(file.error);
      const float *x = (const float *)safetensors_expect(&file, "x", SAFETENSORS_F32, 1024, 256, 0);

  Everything is checked before it is used: the header is parsed as strict JSON, a tensor's shape has to fit its length,
  and the tensors have to cover the data without holes or overlaps, as the format demands.
*/
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define SAFETENSORS_FUNCTION static __attribute__((unused))
#define SAFETENSORS_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define SAFETENSORS_FUNCTION static
#define SAFETENSORS_PRINTF(text, first)
#endif

#define SAFETENSORS_MAX_HEADER 100000000u /* the format's own limit, in bytes */
#define SAFETENSORS_MAX_RANK 8
#define SAFETENSORS_MAX_DEPTH 32 /* of objects and arrays inside each other */

typedef enum safetensors_dtype {
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
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
    SAFETENSORS_NUM_DTYPES
} safetensors_dtype;

typedef struct safetensors_dtype_info {
    const char *name;
    size_t size; /* bytes an element */
} safetensors_dtype_info;

/* In the order of safetensors_dtype. */
static const safetensors_dtype_info safetensors_dtypes[SAFETENSORS_NUM_DTYPES] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2},
    {"F16", 2},  {"BF16", 2}, {"U32", 4}, {"I32", 4},     {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};

typedef struct safetensors_tensor {
    const char *name;
    safetensors_dtype dtype;
    size_t rank;                        /* 0 for a single value */
    size_t shape[SAFETENSORS_MAX_RANK];
    size_t begin, end;                  /* bytes in the file's data */
    const unsigned char *data;          /* aligned to its elements wherever its offset is */
} safetensors_tensor;

typedef struct safetensors_pair { /* an entry of __metadata__ */
    const char *key, *value;
} safetensors_pair;

typedef struct safetensors_file {
    char error[256]; /* of the last call that failed */
    safetensors_tensor *tensors;
    size_t num_tensors;
    safetensors_pair *metadata;
    size_t num_metadata;
    char *header; /* names and metadata lie in it */
    size_t header_size;
    unsigned char *data;
    size_t data_size;
} safetensors_file;

/* Keeps the message and returns 0. */
static int safetensors_fail(safetensors_file *file, const char *format, ...) SAFETENSORS_PRINTF(2, 3);

static int safetensors_fail(safetensors_file *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(file->error, sizeof file->error, format, arguments);
    va_end(arguments);
    return 0;
}

/* Makes room for one more element; `*list` is an array of `count` elements that only grows through here. */
static int safetensors_grow(safetensors_file *file, void **list, size_t count, size_t element_size) {
    void *larger;
    if (count & (count - 1)) return 1; /* capacities are 0, 1, 2, 4, ... */
    larger = count > SIZE_MAX / 2 / element_size ? NULL : realloc(*list, (count ? 2 * count : 1) * element_size);
    if (!larger) return safetensors_fail(file, "out of memory");
    *list = larger;
    return 1;
}

/* ---- JSON. The text ends with a 0 byte, which no token contains, so looking one byte ahead is always safe ---- */

typedef struct safetensors_json {
    safetensors_file *file;
    char *at;
} safetensors_json;

static int safetensors_json_fail(safetensors_json *json, const char *what) {
    return safetensors_fail(json->file, "header, byte %lu: %s", (unsigned long)(json->at - json->file->header), what);
}

static void safetensors_space(safetensors_json *json) {
    while (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r') json->at++;
}

/* Passes `character` if it comes next, after white space. */
static int safetensors_accept(safetensors_json *json, char character) {
    safetensors_space(json);
    if (*json->at != character) return 0;
    json->at++;
    return 1;
}

static int safetensors_need(safetensors_json *json, char character) {
    char what[] = "'?' expected";
    what[1] = character;
    return safetensors_accept(json, character) ? 1 : safetensors_json_fail(json, what);
}

/* Between the members of an object or array: 1 and *more = 0 at the closing bracket, *more = 1 after a comma. */
static int safetensors_next(safetensors_json *json, char close, int *more) {
    *more = safetensors_accept(json, ',');
    return *more ? 1 : safetensors_need(json, close);
}

static int safetensors_hex4(safetensors_json *json, unsigned *value) {
    int i;
    *value = 0;
    for (i = 0; i < 4; i++, json->at++) {
        char c = *json->at;
        unsigned digit;
        if (c >= '0' && c <= '9') digit = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (unsigned)(c - 'a') + 10;
        else if (c >= 'A' && c <= 'F') digit = (unsigned)(c - 'A') + 10;
        else return safetensors_json_fail(json, "four hexadecimal digits expected");
        *value = *value * 16 + digit;
    }
    return 1;
}

/* After "\u": one code point, which may take two escapes, written as UTF-8. It is never longer than the escapes. */
static int safetensors_unicode(safetensors_json *json, char **out) {
    unsigned code, low, shift = 0, lead = 0;
    if (!safetensors_hex4(json, &code)) return 0;
    if (code == 0) return safetensors_json_fail(json, "a string holds a 0 character");
    if (code >= 0xdc00 && code <= 0xdfff) return safetensors_json_fail(json, "second half of a surrogate pair alone");
    if (code >= 0xd800 && code <= 0xdbff) {
        if (json->at[0] != '\\' || json->at[1] != 'u') return safetensors_json_fail(json, "half a surrogate pair");
        json->at += 2;
        if (!safetensors_hex4(json, &low)) return 0;
        if (low < 0xdc00 || low > 0xdfff) return safetensors_json_fail(json, "half a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code >= 0x10000) shift = 18, lead = 0xf0;
    else if (code >= 0x800) shift = 12, lead = 0xe0;
    else if (code >= 0x80) shift = 6, lead = 0xc0;
    *(*out)++ = (char)(lead | (code >> shift));
    while (shift) {
        shift -= 6;
        *(*out)++ = (char)(0x80 | ((code >> shift) & 0x3f));
    }
    return 1;
}

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

static int safetensors_escape(safetensors_json *json, char **out) {
    static const char letters[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    const char *letter;
    if (*json->at == 'u') {
        json->at++;
        return safetensors_unicode(json, out);
    }
    letter = *json->at ? strchr(letters, *json->at) : NULL;
    if (!letter) return safetensors_json_fail(json, "unknown escape in a string");
    *(*out)++ = meanings[letter - letters];
    json->at++;
    return 1;
}

/* Decodes a string where it stands: what it means is never longer than what is written. */
static int safetensors_string(safetensors_json *json, const char **text) {
    char *out;
    if (!safetensors_need(json, '"')) return 0;
    *text = out = json->at;
    while (*json->at != '"') {
        unsigned char c = (unsigned char)*json->at;
        if (c < 0x20) return safetensors_json_fail(json, "control character, or the header's end, in a string");
        if (c == '\\') {
            json->at++;
            if (!safetensors_escape(json, &out)) return 0;
        } else {
            int length = c < 0x80 ? 1 : safetensors_utf8(json->at);
            if (length == 0) return safetensors_json_fail(json, "invalid UTF-8 in a string");
            while (length-- > 0) *out++ = *json->at++;
        }
    }
    json->at++;
    *out = 0;
    return 1;
}

static int safetensors_digits(safetensors_json *json) {
    if (*json->at < '0' || *json->at > '9') return safetensors_json_fail(json, "digit expected");
    while (*json->at >= '0' && *json->at <= '9') json->at++;
    return 1;
}

/* A size: a whole number that fits size_t, without sign, fraction or exponent. */
static int safetensors_size(safetensors_json *json, size_t *value) {
    const char *digit;
    safetensors_space(json);
    digit = json->at;
    if (!safetensors_digits(json)) return 0;
    if (*digit == '0' && json->at - digit > 1) return safetensors_json_fail(json, "number with a leading 0");
    if (*json->at == '.' || *json->at == 'e' || *json->at == 'E') {
        return safetensors_json_fail(json, "whole number expected");
    }
    for (*value = 0; digit < json->at; digit++) {
        size_t add = (size_t)(*digit - '0');
        if (*value > (SIZE_MAX - add) / 10) return safetensors_json_fail(json, "number too large");
        *value = *value * 10 + add;
    }
    return 1;
}

static int safetensors_skip_number(safetensors_json *json) {
    if (*json->at == '-') json->at++;
    if (*json->at == '0' && json->at[1] >= '0' && json->at[1] <= '9') {
        return safetensors_json_fail(json, "number with a leading 0");
    }
    if (!safetensors_digits(json)) return 0;
    if (*json->at == '.') {
        json->at++;
        if (!safetensors_digits(json)) return 0;
    }
    if (*json->at == 'e' || *json->at == 'E') {
        json->at++;
        if (*json->at == '+' || *json->at == '-') json->at++;
        if (!safetensors_digits(json)) return 0;
    }
    return 1;
}

static int safetensors_skip(safetensors_json *json, int depth);

static int safetensors_skip_members(safetensors_json *json, char close, int depth) {
    const char *key;
    int more = 1;
    if (depth >= SAFETENSORS_MAX_DEPTH) return safetensors_json_fail(json, "nested too deeply");
    if (safetensors_accept(json, close)) return 1;
    while (more) {
        if (close == '}' && (!safetensors_string(json, &key) || !safetensors_need(json, ':'))) return 0;
        if (!safetensors_skip(json, depth + 1) || !safetensors_next(json, close, &more)) return 0;
    }
    return 1;
}

/* Passes any value: keys that this reader doesn't know. */
static int safetensors_skip(safetensors_json *json, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    const char *text;
    int i;
    safetensors_space(json);
    if (*json->at == '"') return safetensors_string(json, &text);
    if (safetensors_accept(json, '{')) return safetensors_skip_members(json, '}', depth);
    if (safetensors_accept(json, '[')) return safetensors_skip_members(json, ']', depth);
    for (i = 0; i < 3; i++) {
        size_t length = strlen(words[i]);
        if (strncmp(json->at, words[i], length) == 0) {
            json->at += length;
            return 1;
        }
    }
    return safetensors_skip_number(json);
}

/* ---- the header ---- */

static int safetensors_shape(safetensors_json *json, safetensors_tensor *tensor) {
    int more = 1;
    tensor->rank = 0;
    if (!safetensors_need(json, '[')) return 0;
    if (safetensors_accept(json, ']')) return 1;
    while (more) {
        if (tensor->rank == SAFETENSORS_MAX_RANK) return safetensors_json_fail(json, "more than 8 dimensions");
        if (!safetensors_size(json, &tensor->shape[tensor->rank++])) return 0;
        if (!safetensors_next(json, ']', &more)) return 0;
    }
    return 1;
}

static int safetensors_offsets(safetensors_json *json, safetensors_tensor *tensor) {
    return safetensors_need(json, '[') && safetensors_size(json, &tensor->begin) && safetensors_need(json, ',') &&
           safetensors_size(json, &tensor->end) && safetensors_need(json, ']');
}

static int safetensors_dtype_name(safetensors_json *json, safetensors_tensor *tensor) {
    const char *name;
    int i;
    if (!safetensors_string(json, &name)) return 0;
    for (i = 0; i < SAFETENSORS_NUM_DTYPES; i++) {
        if (strcmp(name, safetensors_dtypes[i].name) == 0) {
            tensor->dtype = (safetensors_dtype)i;
            return 1;
        }
    }
    return safetensors_fail(json->file, "tensor \"%.64s\": unknown dtype \"%.32s\"", tensor->name, name);
}

/* The shape's bytes must be the length that the offsets give. */
static int safetensors_check_size(safetensors_file *file, const safetensors_tensor *tensor) {
    size_t size = safetensors_dtypes[tensor->dtype].size;
    size_t i;
    for (i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] && size > SIZE_MAX / tensor->shape[i]) {
            return safetensors_fail(file, "tensor \"%.64s\": its shape overflows", tensor->name);
        }
        size *= tensor->shape[i];
    }
    if (tensor->begin > tensor->end || tensor->end - tensor->begin != size) {
        return safetensors_fail(
            file, "tensor \"%.64s\": data_offsets [%lu, %lu] don't fit its shape, which takes %lu bytes", tensor->name,
            (unsigned long)tensor->begin, (unsigned long)tensor->end, (unsigned long)size);
    }
    return 1;
}

/* {"dtype": ..., "shape": [...], "data_offsets": [...]}, in any order. */
static int safetensors_entry(safetensors_json *json, const char *name) {
    safetensors_file *file = json->file;
    safetensors_tensor tensor;
    void *list = file->tensors;
    int seen[3] = {0, 0, 0};
    int more = 1;
    memset(&tensor, 0, sizeof tensor);
    tensor.name = name;
    if (!safetensors_need(json, '{')) return 0;
    if (safetensors_accept(json, '}')) more = 0;
    while (more) {
        const char *key;
        int known = -1;
        if (!safetensors_string(json, &key) || !safetensors_need(json, ':')) return 0;
        if (strcmp(key, "dtype") == 0) known = 0;
        if (strcmp(key, "shape") == 0) known = 1;
        if (strcmp(key, "data_offsets") == 0) known = 2;
        if (known >= 0 && seen[known]++) return safetensors_json_fail(json, "a key appears twice");
        if (known == 0 && !safetensors_dtype_name(json, &tensor)) return 0;
        if (known == 1 && !safetensors_shape(json, &tensor)) return 0;
        if (known == 2 && !safetensors_offsets(json, &tensor)) return 0;
        if (known < 0 && !safetensors_skip(json, 2)) return 0;
        if (!safetensors_next(json, '}', &more)) return 0;
    }
    if (!seen[0] || !seen[1] || !seen[2]) {
        return safetensors_fail(file, "tensor \"%.64s\" lacks its dtype, shape or data_offsets", name);
    }
    if (!safetensors_check_size(file, &tensor)) return 0;
    if (!safetensors_grow(file, &list, file->num_tensors, sizeof tensor)) return 0;
    file->tensors = (safetensors_tensor *)list;
    file->tensors[file->num_tensors++] = tensor;
    return 1;
}

/* {"key": "value", ...}: strings alone. */
static int safetensors_read_metadata(safetensors_json *json) {
    safetensors_file *file = json->file;
    int more = 1;
    if (!safetensors_need(json, '{')) return 0;
    if (safetensors_accept(json, '}')) return 1;
    while (more) {
        safetensors_pair pair;
        void *list = file->metadata;
        if (!safetensors_string(json, &pair.key) || !safetensors_need(json, ':')) return 0;
        if (!safetensors_string(json, &pair.value) || !safetensors_next(json, '}', &more)) return 0;
        if (!safetensors_grow(file, &list, file->num_metadata, sizeof pair)) return 0;
        file->metadata = (safetensors_pair *)list;
        file->metadata[file->num_metadata++] = pair;
    }
    return 1;
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
        tensor->data = file->data + tensor->begin;
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

static int safetensors_read_header(safetensors_file *file) {
    safetensors_json json;
    int more = 1;
    int metadata_seen = 0;
    json.file = file;
    json.at = file->header;
    if (*json.at != '{') return safetensors_json_fail(&json, "'{' expected: this is no safetensors file");
    json.at++;
    if (safetensors_accept(&json, '}')) more = 0;
    while (more) {
        const char *name;
        if (!safetensors_string(&json, &name) || !safetensors_need(&json, ':')) return 0;
        if (strcmp(name, "__metadata__") == 0) {
            if (metadata_seen++) return safetensors_json_fail(&json, "a second __metadata__");
            if (!safetensors_read_metadata(&json)) return 0;
        } else if (!safetensors_entry(&json, name)) {
            return 0;
        }
        if (!safetensors_next(&json, '}', &more)) return 0;
    }
    safetensors_space(&json);
    if (json.at != file->header + file->header_size) {
        return safetensors_json_fail(&json, "something follows the header's '}'");
    }
    return safetensors_check_layout(file);
}

/* ---- files ---- */

/* Frees everything but the message. */
SAFETENSORS_FUNCTION void safetensors_close(safetensors_file *file) {
    char error[sizeof file->error];
    memcpy(error, file->error, sizeof error);
    free(file->tensors);
    free(file->metadata);
    free(file->header);
    free(file->data);
    memset(file, 0, sizeof *file);
    memcpy(file->error, error, sizeof error);
}

/* The header's length from a file's first 8 bytes, and memory for it. */
static int safetensors_start(safetensors_file *file, const unsigned char *bytes) {
    uint64_t size = 0;
    int i;
    for (i = 7; i >= 0; i--) size = size << 8 | bytes[i];
    if (size < 2 || size > SAFETENSORS_MAX_HEADER) {
        return safetensors_fail(file, "no safetensors file: its header's length is wrong");
    }
    file->header_size = (size_t)size;
    file->header = (char *)malloc(file->header_size + 1);
    if (!file->header) return safetensors_fail(file, "out of memory");
    file->header[file->header_size] = 0;
    return 1;
}

/* Header and data lie in memory of their own, so that the data is aligned whatever the header's length. */
static int safetensors_read(safetensors_file *file, FILE *stream) {
    unsigned char start[8];
    size_t capacity = (size_t)1 << 20;
    size_t count;
    if (fread(start, 1, sizeof start, stream) != sizeof start) {
        return safetensors_fail(file, "no safetensors file: under 8 bytes");
    }
    if (!safetensors_start(file, start)) return 0;
    if (fread(file->header, 1, file->header_size, stream) != file->header_size) {
        return safetensors_fail(file, "the file ends within its header");
    }
    for (;;) {
        unsigned char *larger = (unsigned char *)realloc(file->data, capacity);
        if (!larger) return safetensors_fail(file, "out of memory");
        file->data = larger;
        count = fread(file->data + file->data_size, 1, capacity - file->data_size, stream);
        file->data_size += count;
        if (file->data_size < capacity) break;
        if (capacity > SIZE_MAX / 2) return safetensors_fail(file, "out of memory");
        capacity *= 2;
    }
    if (ferror(stream)) return safetensors_fail(file, "read error");
    return safetensors_read_header(file);
}

/* Reads a whole file; 0 with a message in file->error when it can't be used (then there is nothing to close). */
SAFETENSORS_FUNCTION int safetensors_open(safetensors_file *file, const char *path) {
    FILE *stream = fopen(path, "rb");
    int done;
    memset(file, 0, sizeof *file);
    if (!stream) return safetensors_fail(file, "%.200s can't be opened", path);
    done = safetensors_read(file, stream);
    fclose(stream);
    if (!done) safetensors_close(file);
    return done;
}

/* The same from memory, which is copied. */
SAFETENSORS_FUNCTION int safetensors_parse(safetensors_file *file, const void *memory, size_t size) {
    const unsigned char *bytes = (const unsigned char *)memory;
    int done = 0;
    memset(file, 0, sizeof *file);
    if (size < 8) return safetensors_fail(file, "no safetensors file: under 8 bytes");
    if (!safetensors_start(file, bytes)) return 0;
    if (file->header_size > size - 8) {
        safetensors_fail(file, "the file ends within its header");
    } else {
        memcpy(file->header, bytes + 8, file->header_size);
        file->data_size = size - 8 - file->header_size;
        file->data = (unsigned char *)malloc(file->data_size ? file->data_size : 1);
        if (!file->data) {
            safetensors_fail(file, "out of memory");
        } else {
            memcpy(file->data, bytes + 8 + file->header_size, file->data_size);
            done = safetensors_read_header(file);
        }
    }
    if (!done) safetensors_close(file);
    return done;
}

/* NULL when there is no such tensor. */
SAFETENSORS_FUNCTION const safetensors_tensor *safetensors_find(const safetensors_file *file, const char *name) {
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
SAFETENSORS_FUNCTION const char *safetensors_metadata(const safetensors_file *file, const char *key) {
    size_t i;
    for (i = 0; i < file->num_metadata; i++) {
        if (strcmp(file->metadata[i].key, key) == 0) return file->metadata[i].value;
    }
    return NULL;
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
SAFETENSORS_FUNCTION const void *safetensors_expect(safetensors_file *file, const char *name, safetensors_dtype dtype,
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
    if (tensor->begin % safetensors_dtypes[dtype].size) {
        safetensors_fail(file, "tensor \"%.64s\" isn't aligned to its elements", name);
        return NULL;
    }
    return tensor->data;
}

#endif /* SAFETENSORS_H */
