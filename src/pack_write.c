/*
  pack_write.c: writes what contexts of MOE_ROUTE_DEVICE_COMPILE hold into one pack. The format is described in pack.c.
*/
#include "internal.h"

typedef struct moer_pack_item {
    moer_key key;
    const moer_bytes *entry;
} moer_pack_item;

static int moer_pack_item_compare(const void *a, const void *b) {
    return memcmp(((const moer_pack_item *)a)->key.digest, ((const moer_pack_item *)b)->key.digest, 32);
}

static size_t moer_pack_count(moe_route_context *context) {
    const moer_variant *variant;
    size_t count = 0;
    moer_mutex_lock(&context->mutex);
    for (variant = context->variants; variant; variant = variant->next) count++;
    moer_mutex_unlock(&context->mutex);
    return count;
}

/* The context's finished variants; the number of items. They don't change any more while the context lives. */
static size_t moer_pack_gather(moe_route_context *context, moer_pack_item *items, size_t space) {
    const moer_variant *variant;
    size_t count = 0;
    moer_mutex_lock(&context->mutex);
    for (variant = context->variants; variant && count < space; variant = variant->next) {
        if (variant->state != 1 || !moer_key_make(&items[count].key, variant->family->name, variant->defines, context->target)) continue;
        items[count++].entry = &variant->entry;
    }
    moer_mutex_unlock(&context->mutex);
    return count;
}

/* The pack's bytes; data NULL when there is no memory. The items are sorted, and each is there once. */
static moer_bytes moer_pack_build(moe_route_context *context, const moer_pack_item *items, size_t count) {
    size_t index_end = MOER_PACK_HEAD + count * MOER_PACK_INDEX, i, at;
    moer_bytes pack;
    memset(&pack, 0, sizeof pack);
    pack.size = index_end + 32;
    for (i = 0; i < count; i++) {
        if (!moer_size_add(pack.size, items[i].entry->size, &pack.size)) return pack;
    }
    pack.data = (unsigned char *)moer_alloc(context, pack.size);
    if (!pack.data) return pack;
    memcpy(pack.data, moer_pack_magic(), 8);
    moer_write_number(pack.data + 8, MOER_PACK_FORMAT, 4);
    moer_write_number(pack.data + 12, count, 4);
    moer_write_number(pack.data + 16, pack.size, 8);
    for (i = 0, at = index_end + 32; i < count; at += items[i].entry->size, i++) {
        unsigned char *item = pack.data + MOER_PACK_HEAD + i * MOER_PACK_INDEX;
        memcpy(item, items[i].key.digest, 32);
        moer_write_number(item + 32, at, 8);
        moer_write_number(item + 40, items[i].entry->size, 8);
        memcpy(pack.data + at, items[i].entry->data, items[i].entry->size);
    }
    moer_digest(pack.data, index_end, pack.data + index_end);
    return pack;
}

static moe_route_status moer_pack_write(moe_route_context *context, const moer_bytes *pack, const char *path) {
    const moer_files *files = context->cache.files;
    char temporary[MOER_PATH_MAX] = "", why[512] = "";
    uint64_t random = moer_random();
    if (!moer_append(temporary, sizeof temporary, "%s.%08lx%08lx.tmp", path, (unsigned long)(random >> 32), (unsigned long)(random & 0xffffffffu)))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: path has more than %d characters", MOER_PATH_MAX - 1);
    if (!moer_cache_write_file(files, temporary, pack, 0644, why, sizeof why))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: %s can't be written: %s", path, why);
    if (files->rename(temporary, path)) return MOE_ROUTE_OK;
    moer_system_error(why, sizeof why);
    files->remove(temporary);
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: %s can't be written: %s", path, why);
}

static moe_route_status moer_pack_save(moe_route_context *const *contexts, uint32_t num_contexts, moer_pack_item *items, size_t space, const char *path) {
    moe_route_context *context = contexts[0];
    size_t count = 0, kept = 0, i;
    moer_bytes pack;
    moe_route_status status;
    for (i = 0; i < num_contexts; i++) count += moer_pack_gather(contexts[i], items + count, space - count);
    if (count == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: no layer was created in the contexts, so there is nothing to write");
    qsort(items, count, sizeof *items, moer_pack_item_compare);
    for (i = 0; i < count; i++) {
        if (kept == 0 || moer_pack_item_compare(&items[kept - 1], &items[i]) != 0) items[kept++] = items[i];
    }
    pack = moer_pack_build(context, items, kept);
    if (!pack.data) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a pack of %lu variants", (unsigned long)kept);
    status = moer_pack_write(context, &pack, path);
    moer_free(context, pack.data);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_pack_save(moe_route_context *const *contexts, uint32_t num_contexts, const char *path) {
    moer_pack_item *items;
    size_t space = 0, size, i;
    moe_route_status status;
    if (!contexts || num_contexts == 0 || !contexts[0]) return MOE_ROUTE_ERROR_ARGUMENT;
    if (!path) return moer_fail(contexts[0], MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: path is NULL");
    for (i = 0; i < num_contexts; i++) {
        if (!contexts[i]) return moer_fail(contexts[0], MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: contexts[%u] is NULL", (unsigned)i);
        status = moer_context_check(contexts[i], "moe_route_pack_save");
        if (status == MOE_ROUTE_OK && contexts[i]->device != MOE_ROUTE_DEVICE_COMPILE)
            status = moer_fail(contexts[0], MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: contexts[%u] isn't of MOE_ROUTE_DEVICE_COMPILE", (unsigned)i);
        if (status != MOE_ROUTE_OK) return status;
        space += moer_pack_count(contexts[i]);
    }
    items = moer_size_mul(space, sizeof *items, &size) ? (moer_pack_item *)moer_alloc(contexts[0], size) : NULL;
    if (!items) return moer_fail(contexts[0], MOE_ROUTE_ERROR_MEMORY, "out of memory for a pack of %lu variants", (unsigned long)space);
    status = moer_pack_save(contexts, num_contexts, items, space, path);
    moer_free(contexts[0], items);
    return status;
}
