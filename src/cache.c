/*
  cache.c: the order in which kept variants are looked for: packs, folders that are only read, the context's own folder; what
  a failure there means; and counting. Anything doubtful about an entry is a miss: it costs a compilation and never an error.
  An entry's format, the folders and the files belong to cache_*.c and pack.c; compiling and loading to variant.c.
*/
#include "internal.h"

static void moer_count(moe_route_context *context, uint64_t *counter) {
    moer_mutex_lock(&context->mutex);
    ++*counter;
    moer_mutex_unlock(&context->mutex);
}

/* Takes the bytes if they are the entry that is looked for, and frees them otherwise. */
static int moer_lookup_accept(moe_route_context *context, moer_lookup *lookup, const moer_bytes *bytes) {
    if (moer_entry_parse(bytes->data, bytes->size, &lookup->entry) && moer_entry_is_for(&lookup->entry, &lookup->key) && lookup->entry.is_code != lookup->is_tuning) {
        lookup->bytes = *bytes;
        return 1;
    }
    moer_free(context, bytes->data);
    return 0;
}

static void moer_lookup_reject(moe_route_context *context, const char *place, const char *why) {
    moer_count(context, &context->statistics.rejects);
    moer_log(context, MOE_ROUTE_LOG_INFO, "%s isn't used: %s", place, why);
}

static int moer_lookup_in_pack(moe_route_context *context, moer_lookup *lookup, const moer_pack *pack) {
    const unsigned char *found;
    moer_bytes bytes;
    if (!moer_pack_find(pack, lookup->key.digest, &found, &bytes.size)) return 0;
    bytes.data = bytes.size <= MOER_ENTRY_MAX_SIZE ? (unsigned char *)moer_alloc(context, bytes.size) : NULL;
    if (bytes.data) {
        memcpy(bytes.data, found, bytes.size);
        if (moer_lookup_accept(context, lookup, &bytes)) {
            lookup->origin = MOE_ROUTE_ORIGIN_PACK;
            lookup->path[0] = '\0';
            return 1;
        }
    }
    moer_lookup_reject(context, pack->name, bytes.data ? "the entry of a variant in this pack is damaged" : "there is no memory for one of its variants");
    return 0;
}

/* Marks an entry as used, for when the folder outgrows its limit. */
static void moer_lookup_touch(moe_route_context *context, const char *path, int64_t modified) {
    const int64_t age = context->cache.files->now() - modified;
    if (age > MOER_CACHE_RECENT || age < -MOER_CACHE_RECENT) context->cache.files->touch(path);
}

static int moer_lookup_in_folder(moe_route_context *context, moer_lookup *lookup, const char *folder, int read_only) {
    char path[MOER_PATH_MAX], why[512];
    moer_bytes bytes;
    moer_file_info info;
    moer_found found;
    moer_cache_path(folder, lookup->key.digest, 1, path, sizeof path);
    found = moer_cache_read(context, path, read_only ? MOER_READ_READ_ONLY : MOER_READ_OWN, &bytes, &info, why, sizeof why);
    if (found == MOER_FOUND_NOTHING) return 0;
    if (found == MOER_FOUND_BYTES) {
        if (moer_lookup_accept(context, lookup, &bytes)) {
            lookup->origin = MOE_ROUTE_ORIGIN_CACHE;
            moer_text_set(lookup->path, sizeof lookup->path, read_only ? "" : path);
            if (!read_only) moer_lookup_touch(context, path, info.modified);
            return 1;
        }
        moer_text_set(why, sizeof why, "it is damaged or isn't the entry of its name");
    }
    if (found == MOER_FOUND_FOLDER && !read_only) lookup->blocked = 1;
    moer_lookup_reject(context, path, why);
    return 0;
}

static int moer_lookup_in_folders(moe_route_context *context, moer_lookup *lookup, uint32_t first) {
    const moer_cache *cache = &context->cache;
    while (!cache->refresh && lookup->place <= first + cache->num_read_only) {
        const uint32_t place = lookup->place++ - first;
        const int read_only = place < cache->num_read_only;
        const char *folder = read_only ? cache->read_only[place].text : cache->folder;
        if (folder[0] && moer_lookup_in_folder(context, lookup, folder, read_only)) return 1;
    }
    return 0;
}

static int moer_lookup_next(moe_route_context *context, moer_lookup *lookup) {
    const moer_cache *cache = &context->cache;
    const moer_pack *pack;
    uint32_t num_packs = 0;
    moer_mutex_lock(&context->mutex);
    pack = context->packs;
    moer_mutex_unlock(&context->mutex);
    while (pack) { /* packs are added at the end and never removed, so that their numbers stay */
        if (num_packs++ == lookup->place) {
            lookup->place++;
            if (moer_lookup_in_pack(context, lookup, pack)) {
                moer_count(context, &context->statistics.pack_hits);
                return 1;
            }
        }
        moer_mutex_lock(&context->mutex);
        pack = pack->next;
        moer_mutex_unlock(&context->mutex);
    }
    if (moer_lookup_in_folders(context, lookup, num_packs)) {
        moer_count(context, &context->statistics.cache_hits);
        return 1;
    }
    if (!lookup->missed && (cache->folder[0] || cache->num_read_only)) moer_count(context, &context->statistics.cache_misses);
    lookup->missed = 1;
    return 0;
}

static void moer_lookup_refused(moe_route_context *context, moer_lookup *lookup) {
    moer_count(context, &context->statistics.rejects);
    if (lookup->path[0]) {
        char why[512];
        moer_bytes bytes;
        moer_file_info info;
        if (moer_cache_read(context, lookup->path, MOER_READ_OWN, &bytes, &info, why, sizeof why) == MOER_FOUND_BYTES) {
            if (bytes.size == lookup->bytes.size && memcmp(bytes.data, lookup->bytes.data, bytes.size) == 0) context->cache.files->remove(lookup->path);
            moer_free(context, bytes.data);
        }
    }
    moer_free(context, lookup->bytes.data);
    memset(&lookup->bytes, 0, sizeof lookup->bytes);
}

static void moer_cache_store(moe_route_context *context, const moer_lookup *lookup, const moer_bytes *entry) {
    moer_cache *cache = &context->cache;
    char why[512] = "";
    int writable, first = 0;
    moer_mutex_lock(&context->mutex);
    writable = cache->folder[0] && cache->writable && !lookup->blocked;
    moer_mutex_unlock(&context->mutex);
    if (!writable) return;
    if (moer_cache_publish(context, &lookup->key, entry, why, sizeof why)) {
        moer_count(context, &context->statistics.cache_writes);
        moer_cache_trim(context, &lookup->key, entry->size);
        return;
    }
    moer_mutex_lock(&context->mutex);
    context->statistics.cache_write_failures++;
    first = cache->writable;
    cache->writable = 0;
    moer_mutex_unlock(&context->mutex);
    if (first) {
        moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk any longer: writing to %s: %s", cache->folder, why);
    }
}
