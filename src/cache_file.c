/*
  cache_file.c: reading and writing one file. Whether its bytes are an entry is decided in cache_entry.c; which file is asked
  for, and what a failure means, in cache.c.

  A file is read into memory and never mapped: another process may cut it off at any moment. It is written under a temporary
  name in the folder where it will stand, flushed, and renamed: whoever opens it sees all of it or nothing, also after a
  crash. There is no lock: two processes may write the same entry, neither waits, and neither reads back what it wrote.
*/
#include "internal.h"

/* Says why a file isn't used, once it is open. NULL: nothing speaks against it. */
static const char *moer_cache_objection(const moer_cache *cache, const moer_file_info *info, moer_read_kind kind) {
    if (info->kind == MOER_PATH_FOLDER) return "it is a folder";
    if (info->kind != MOER_PATH_FILE) return "it isn't a regular file";
    if (info->size == 0) return "it is empty";
    if (info->size > (kind == MOER_READ_PACK ? MOER_PACK_MAX_SIZE : MOER_ENTRY_MAX_SIZE)) return "it is too large";
    if (cache->trust_shared) return NULL;
    if (info->owner == MOER_OWNER_OTHER || (info->owner == MOER_OWNER_SYSTEM && kind == MOER_READ_OWN)) return "it belongs to another user";
    return info->writable_by_others ? "other users can write to it" : NULL;
}

/* Reads `size` bytes that the file must have, exactly. */
static int moer_cache_read_all(const moer_files *files, moer_file file, unsigned char *data, size_t size) {
    unsigned char more;
    size_t done = 0;
    while (done < size) {
        long count = files->read(file, data + done, size - done);
        if (count <= 0) return 0;
        done += (size_t)count;
    }
    return files->read(file, &more, 1) == 0;
}

static moer_found moer_cache_read(moe_route_context *context, const char *path, moer_read_kind kind, moer_bytes *bytes,
                                  moer_file_info *info, char *why, size_t size) {
    const moer_files *files = context->cache.files;
    const char *objection = NULL;
    moer_file file = files->open(path, kind == MOER_READ_PACK);
    memset(bytes, 0, sizeof *bytes);
    memset(info, 0, sizeof *info);
    why[0] = '\0';
    if (file == MOER_NO_FILE) {
        if (moer_system_error_is_absence()) return MOER_FOUND_NOTHING;
        moer_system_error(why, size);
        return MOER_FOUND_UNUSABLE;
    }
    if (!files->inspect(file, info)) moer_system_error(why, size);
    else objection = moer_cache_objection(&context->cache, info, kind);
    if (!why[0] && !objection) {
        bytes->size = (size_t)info->size;
        bytes->data = (unsigned char *)moer_alloc(context, bytes->size);
        if (!bytes->data) objection = "there is no memory for it";
        else if (!moer_cache_read_all(files, file, bytes->data, bytes->size)) objection = "it can't be read as a whole";
    }
    files->close(file);
    if (!why[0] && !objection) return MOER_FOUND_BYTES;
    if (objection) moer_text_set(why, size, objection);
    moer_free(context, bytes->data);
    memset(bytes, 0, sizeof *bytes);
    return info->kind == MOER_PATH_FOLDER ? MOER_FOUND_FOLDER : MOER_FOUND_UNUSABLE;
}

static int moer_cache_write_file(const moer_files *files, const char *path, const moer_bytes *bytes, int mode, char *why, size_t size) {
    moer_file file = files->create(path, mode);
    size_t done = 0;
    int written;
    if (file == MOER_NO_FILE) {
        moer_system_error(why, size);
        return 0;
    }
    while (done < bytes->size) {
        long count = files->write(file, bytes->data + done, bytes->size - done);
        if (count <= 0) break;
        done += (size_t)count;
    }
    written = done == bytes->size && files->flush(file);
    if (!written) moer_system_error(why, size);
    if (!files->close(file) && written) {
        moer_system_error(why, size);
        written = 0;
    }
    if (!written) files->remove(path);
    return written;
}

/* The folder of the entry, created again where somebody has deleted the cache meanwhile. */
static int moer_cache_open_shelf(moer_cache *cache, const moer_key *key, char *folder, size_t folder_size, char *why, size_t size) {
    const int mode = cache->trust_shared ? 0777 : 0700;
    moer_cache_path(cache->folder, key->digest, 0, folder, folder_size);
    if (!cache->files->folder_create(folder, mode) && moer_system_error_is_absence()) {
        char root[MOER_PATH_MAX];
        if (moer_text_set(root, sizeof root, cache->folder)) moer_cache_create_folders(cache, root);
        if (!moer_cache_check_folder(cache, cache->folder, 0, why, size)) return 0;
        cache->files->folder_create(folder, mode);
    }
    return moer_cache_check_folder(cache, folder, 0, why, size);
}

static int moer_cache_publish(moe_route_context *context, const moer_key *key, const moer_bytes *entry, char *why, size_t size) {
    moer_cache *cache = &context->cache;
    char folder[MOER_PATH_MAX], temporary[MOER_PATH_MAX], path[MOER_PATH_MAX];
    uint64_t random = moer_random();
    unsigned number;
    moer_mutex_lock(&context->mutex);
    number = cache->stores++;
    moer_mutex_unlock(&context->mutex);
    if (!moer_cache_open_shelf(cache, key, folder, sizeof folder, why, size)) return 0;
    moer_cache_path(cache->folder, key->digest, 1, path, sizeof path);
    moer_text_set(temporary, sizeof temporary, folder);
    moer_append(temporary, sizeof temporary, "/%lx-%x-%08lx%08lx.tmp", (unsigned long)moer_process_id(), number,
                (unsigned long)(random >> 32), (unsigned long)(random & 0xffffffffu));
    if (!moer_cache_write_file(cache->files, temporary, entry, cache->trust_shared ? 0666 : 0600, why, size)) return 0;
    if (cache->files->rename(temporary, path)) return 1;
    moer_system_error(why, size);
    cache->files->remove(temporary);
    return 0;
}
