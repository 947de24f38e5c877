/*
  checkpoint.h: the files of a checkpoint as one list of tensors, by name: a safetensors file, a folder with an index of
  several (model.safetensors.index.json), or GGUF, also in parts (-00001-of-00003.gguf). Of safetensors only what belongs to one
  layer is listed, so that the other shards may be missing. What the names mean is layer_names.h's matter.
*/
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "config.h"
#include "gguf.h"
#include "safetensors.h"

#define CHECKPOINT_MAX_RANK 8
#define CHECKPOINT_MAX_FILES 1000
#define CHECKPOINT_MAX_PATH 4096

typedef struct checkpoint_tensor {
    const char *name;
    const char *type;                     /* as the format calls it: "BF16", "F8_E4M3", "Q4_K"; "?" for an unknown one */
    uint32_t gguf_type;                   /* its number, in a GGUF file */
    uint32_t rank;
    uint64_t shape[CHECKPOINT_MAX_RANK];  /* the outermost dimension first, in both formats */
    uint64_t size;                        /* bytes */
    uint32_t file;
    const void *entry;                    /* a safetensors_tensor or gguf_tensor */
} checkpoint_tensor;

typedef struct checkpoint {
    char error[512];                      /* of the last call that failed */
    int is_gguf;
    cJSON *config;                        /* config.json; NULL with GGUF */
    safetensors_file *safetensors;        /* num_files of one or the other */
    gguf_file *gguf;
    uint32_t num_files;
    checkpoint_tensor *tensors;           /* ascending names */
    size_t num_tensors;
} checkpoint;

static int checkpoint_fail(checkpoint *c, const char *format, ...) FILES_PRINTF(2, 3);

/* Keeps the message and returns 0. */
static int checkpoint_fail(checkpoint *c, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->error, sizeof c->error, format, arguments);
    va_end(arguments);
    return 0;
}

static int checkpoint_ends(const char *text, const char *end) {
    const size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

/* What follows "layers.N." (blocks, h, blk) in a tensor's name; NULL when it belongs to no such layer, or to the extra layers
   that some models predict further tokens with (mtp). */
FILES_FUNCTION const char *checkpoint_in_layer(const char *name, uint32_t layer) {
    const char *at = name;
    while (at) {
        const size_t length = strcspn(at, ".");
        char *end;
        if (length == 3 && strncmp(at, "mtp", 3) == 0) return NULL;
        if ((length == 6 && (strncmp(at, "layers", 6) == 0 || strncmp(at, "blocks", 6) == 0)) ||
            (length == 3 && strncmp(at, "blk", 3) == 0) || (length == 1 && *at == 'h')) {
            const char *number = at + length + (at[length] == '.');
            if (*number >= '0' && *number <= '9') return strtoul(number, &end, 10) == layer && *end == '.' ? end + 1 : NULL;
        }
        at = at[length] == '.' ? at + length + 1 : NULL;
    }
    return NULL;
}

/* ---- the list ---- */

static int checkpoint_add(checkpoint *c, const checkpoint_tensor *tensor) {
    if ((c->num_tensors & (c->num_tensors - 1)) == 0) { /* capacities are 0, 1, 2, 4, ... */
        checkpoint_tensor *larger = (checkpoint_tensor *)realloc(c->tensors,
                                                                 (c->num_tensors ? 2 * c->num_tensors : 1) * sizeof *larger);
        if (!larger) return checkpoint_fail(c, "out of memory");
        c->tensors = larger;
    }
    c->tensors[c->num_tensors++] = *tensor;
    return 1;
}

static int checkpoint_add_safetensors(checkpoint *c, uint32_t file, uint32_t layer, const char *prefix) {
    const safetensors_file *from = &c->safetensors[file];
    size_t i, d;
    for (i = 0; i < from->num_tensors; i++) {
        const safetensors_tensor *entry = &from->tensors[i];
        checkpoint_tensor tensor;
        if (!checkpoint_in_layer(entry->name, layer) || strncmp(entry->name, prefix, strlen(prefix)) != 0) continue;
        memset(&tensor, 0, sizeof tensor);
        tensor.name = entry->name;
        tensor.type = safetensors_dtypes[entry->dtype].name;
        tensor.rank = (uint32_t)entry->rank;
        for (d = 0; d < entry->rank; d++) tensor.shape[d] = entry->shape[d];
        tensor.size = entry->end - entry->begin;
        tensor.file = file;
        tensor.entry = entry;
        if (!checkpoint_add(c, &tensor)) return 0;
    }
    return 1;
}

static int checkpoint_add_gguf(checkpoint *c, uint32_t file) {
    const gguf_file *from = &c->gguf[file];
    size_t i, d;
    for (i = 0; i < from->num_tensors; i++) {
        const gguf_tensor *entry = &from->tensors[i];
        checkpoint_tensor tensor;
        memset(&tensor, 0, sizeof tensor);
        tensor.name = entry->name;
        tensor.type = entry->info ? entry->info->name : "?";
        tensor.gguf_type = entry->type;
        tensor.rank = entry->rank;
        for (d = 0; d < entry->rank; d++) tensor.shape[d] = entry->shape[entry->rank - 1 - d];
        tensor.size = entry->size;
        tensor.file = file;
        tensor.entry = entry;
        if (!checkpoint_add(c, &tensor)) return 0;
    }
    return 1;
}

static int checkpoint_by_name(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static int checkpoint_sort(checkpoint *c) {
    size_t i;
    if (c->num_tensors) qsort(c->tensors, c->num_tensors, sizeof *c->tensors, checkpoint_by_name);
    for (i = 1; i < c->num_tensors; i++) {
        if (strcmp(c->tensors[i - 1].name, c->tensors[i].name) == 0)
            return checkpoint_fail(c, "two files hold a tensor \"%.200s\"", c->tensors[i].name);
    }
    return 1;
}

/* ---- files ---- */

/* The folder of `path`, with its separator, and `name`. */
static int checkpoint_beside(checkpoint *c, const char *path, const char *name, char *full) {
    size_t length = strlen(path);
    while (length && path[length - 1] != '/' && path[length - 1] != '\\') length--;
    if (snprintf(full, CHECKPOINT_MAX_PATH, "%.*s%s", (int)length, path, name) >= CHECKPOINT_MAX_PATH)
        return checkpoint_fail(c, "a path is too long");
    return 1;
}

static int checkpoint_open_safetensors(checkpoint *c, const char *path, uint32_t layer, const char *prefix) {
    safetensors_file *file = &c->safetensors[c->num_files];
    if (!safetensors_open_header(file, path)) return checkpoint_fail(c, "%.250s: %s", path, file->error);
    return checkpoint_add_safetensors(c, c->num_files++, layer, prefix);
}

/* The shards that hold something of the layer. Their names are the index's: no folders in them. */
static int checkpoint_open_index(checkpoint *c, const char *path, const cJSON *index, uint32_t layer, const char *prefix) {
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map"), *item;
    const char *opened[CHECKPOINT_MAX_FILES];
    if (!cJSON_IsObject(map)) return checkpoint_fail(c, "%.250s has no weight_map", path);
    cJSON_ArrayForEach(item, map) {
        char shard[CHECKPOINT_MAX_PATH];
        uint32_t i;
        if (!checkpoint_in_layer(item->string, layer) || strncmp(item->string, prefix, strlen(prefix)) != 0) continue;
        if (!cJSON_IsString(item) || strpbrk(item->valuestring, "/\\:") || !checkpoint_ends(item->valuestring, ".safetensors")) {
            return checkpoint_fail(c, "%.200s: the file of \"%.100s\" isn't named as a safetensors file beside it", path,
                                   item->string);
        }
        for (i = 0; i < c->num_files && strcmp(opened[i], item->valuestring) != 0; i++) {}
        if (i < c->num_files) continue;
        if (c->num_files == CHECKPOINT_MAX_FILES)
            return checkpoint_fail(c, "%.250s: the layer lies in more than %d files", path, CHECKPOINT_MAX_FILES);
        opened[c->num_files] = item->valuestring;
        if (!checkpoint_beside(c, path, item->valuestring, shard) || !checkpoint_open_safetensors(c, shard, layer, prefix))
            return 0;
    }
    return 1;
}

static int checkpoint_open_gguf(checkpoint *c, const char *path) {
    static const char pattern[] = "-00001-of-00001.gguf";
    const size_t length = strlen(path), tail = sizeof pattern - 1;
    uint32_t count = 1, i;
    double number;
    char part[CHECKPOINT_MAX_PATH];
    if (length >= CHECKPOINT_MAX_PATH) return checkpoint_fail(c, "a path is too long");
    snprintf(part, sizeof part, "%s", path);
    if (length > tail) { /* does it end as one of several? */
        char *end = part + length - tail;
        for (i = 0; i < tail && (pattern[i] == '0' || pattern[i] == '1' ? end[i] >= '0' && end[i] <= '9' : end[i] == pattern[i]);
             i++) {}
        if (i == tail) count = (uint32_t)strtoul(end + 10, NULL, 10);
    }
    if (count < 1 || count > CHECKPOINT_MAX_FILES)
        return checkpoint_fail(c, "%.250s: %u parts; 1 to %d are possible", path, (unsigned)count, CHECKPOINT_MAX_FILES);
    for (i = 0; i < count; i++) {
        gguf_file *file = &c->gguf[c->num_files];
        if (count > 1)
            snprintf(part + length - tail, tail + 1, "-%05u-of-%05u.gguf", (unsigned)(i + 1) % 100000u,
                     (unsigned)count % 100000u);
        if (!gguf_open(file, part)) return checkpoint_fail(c, "%.250s: %s", part, file->error);
        c->num_files++;
        if (!gguf_number(file, "split.count", 0, &number)) number = 1;
        if (number != (double)count && number > 1)
            return checkpoint_fail(c, "%.250s is one of %g parts, by its name of %u", part, number, (unsigned)count);
        if (!checkpoint_add_gguf(c, i)) return 0;
    }
    return 1;
}

/* A folder has an index, or one file. */
static int checkpoint_open_any(checkpoint *c, const char *path, const char *config_path, uint32_t layer, const char *prefix) {
    char file[CHECKPOINT_MAX_PATH], config[CHECKPOINT_MAX_PATH];
    cJSON *index = NULL;
    int done;
    c->is_gguf = checkpoint_ends(path, ".gguf");
    if (c->is_gguf) return checkpoint_open_gguf(c, path) && checkpoint_sort(c);
    if (checkpoint_ends(path, ".safetensors") || checkpoint_ends(path, ".index.json")) {
        if (snprintf(file, sizeof file, "%s", path) >= (int)sizeof file) return checkpoint_fail(c, "a path is too long");
    } else {
        FILE *found;
        if (snprintf(file, sizeof file, "%s/model.safetensors.index.json", path) >= (int)sizeof file)
            return checkpoint_fail(c, "a path is too long");
        found = fopen(file, "rb");
        if (found) fclose(found);
        else snprintf(file, sizeof file, "%s/model.safetensors", path);
    }
    if (!checkpoint_beside(c, file, "config.json", config)) return 0;
    c->config = config_read(config_path ? config_path : config, c->error, sizeof c->error);
    if (!c->config) return 0;
    if (checkpoint_ends(file, ".index.json")) {
        index = config_read(file, c->error, sizeof c->error);
        if (!index) return 0;
    }
    done = index ? checkpoint_open_index(c, file, index, layer, prefix) : checkpoint_open_safetensors(c, file, layer, prefix);
    cJSON_Delete(index);
    return done && checkpoint_sort(c);
}

FILES_FUNCTION void checkpoint_close(checkpoint *c) {
    char error[sizeof c->error];
    uint32_t i;
    memcpy(error, c->error, sizeof error);
    for (i = 0; i < c->num_files; i++) {
        if (c->is_gguf) gguf_close(&c->gguf[i]);
        else safetensors_close(&c->safetensors[i]);
    }
    free(c->gguf);
    free(c->safetensors);
    free(c->tensors);
    cJSON_Delete(c->config);
    memset(c, 0, sizeof *c);
    memcpy(c->error, error, sizeof error);
}

/* `config_path`: NULL for the config.json beside the tensors. `prefix`: of the names of interest, or "". 0 with a message in
   c->error when it can't be used (then there is nothing to close). */
FILES_FUNCTION int checkpoint_open(checkpoint *c, const char *path, const char *config_path, uint32_t layer, const char *prefix) {
    int done;
    memset(c, 0, sizeof *c);
    c->gguf = (gguf_file *)calloc(CHECKPOINT_MAX_FILES, sizeof *c->gguf);
    c->safetensors = (safetensors_file *)calloc(CHECKPOINT_MAX_FILES, sizeof *c->safetensors);
    done = c->gguf && c->safetensors ? checkpoint_open_any(c, path, config_path, layer, prefix)
                                     : checkpoint_fail(c, "out of memory");
    if (!done) checkpoint_close(c);
    return done;
}

/* NULL when there is no such tensor. */
FILES_FUNCTION const checkpoint_tensor *checkpoint_find(const checkpoint *c, const char *name) {
    return c->num_tensors
               ? (const checkpoint_tensor *)bsearch(&name, c->tensors, c->num_tensors, sizeof *c->tensors, checkpoint_by_name)
               : NULL;
}

/* `size` bytes of a tensor's data, from `offset` on. */
FILES_FUNCTION int checkpoint_read(checkpoint *c, const checkpoint_tensor *tensor, void *to, uint64_t offset, size_t size) {
    if (c->is_gguf) {
        gguf_file *file = &c->gguf[tensor->file];
        return gguf_read(file, (const gguf_tensor *)tensor->entry, to, offset, size) ? 1 : checkpoint_fail(c, "%s", file->error);
    } else {
        safetensors_file *file = &c->safetensors[tensor->file];
        return safetensors_read(file, (const safetensors_tensor *)tensor->entry, to, (size_t)offset, size)
                   ? 1
                   : checkpoint_fail(c, "%s", file->error);
    }
}

/* "BF16 [32, 256]" */
FILES_FUNCTION const char *checkpoint_describe(const checkpoint_tensor *tensor, char *text, size_t size) {
    int length = snprintf(text, size, "%s [", tensor->type);
    uint32_t d;
    for (d = 0; d < tensor->rank && length > 0 && (size_t)length < size; d++) {
        length += snprintf(text + length, size - (size_t)length, "%s%llu", d ? ", " : "", (unsigned long long)tensor->shape[d]);
    }
    if (length > 0 && (size_t)length < size) snprintf(text + length, size - (size_t)length, "]");
    return text;
}

#endif /* CHECKPOINT_H */
