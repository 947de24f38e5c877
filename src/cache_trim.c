/*
  cache_trim.c: what leaves the cache's folder by itself: temporary files that a killed process left, and when the folder has
  outgrown its limit, the entries that were used longest ago. Removing by request belongs to cache_calls.c.

  A file's modification time says when it was last used: a hit sets it, at most once an hour. What was written or used within
  the last hour stays, so that nothing is removed which a process is about to write, to rename or to read; a reader that has
  an older entry open loses nothing. Ages are measured from the entry that was just written, by the clock of the file system:
  this machine's own may differ.

  Looking through the folder opens every file, which takes long on a network. So it is done by the first of all processes
  that writes something an hour after the last time, which the date of an empty file tells, and by a process that has written
  as much as the limit itself.
*/
#include "internal.h"

#define MOER_TEMPORARY_SUFFIX ".tmp"
#define MOER_LOOKED_THROUGH "/looked_through"
#define MOER_ENTRY_NAME 67u /* 62 digits and ".moec" */

/* Value of a hexadecimal digit as the cache writes it; 16 for anything else. */
static unsigned moer_hexadecimal(char digit) {
    if (digit >= '0' && digit <= '9') return (unsigned)(digit - '0');
    return digit >= 'a' && digit <= 'f' ? (unsigned)(digit - 'a') + 10u : 16u;
}

/* An entry's name, into the digest's bytes from the second on. */
static int moer_cache_name_read(const char *name, unsigned char digest[32]) {
    size_t i;
    if (strlen(name) != MOER_ENTRY_NAME || strcmp(name + 62, ".moec") != 0) return 0;
    for (i = 1; i < 32; i++) {
        unsigned high = moer_hexadecimal(name[2 * i - 2]), low = moer_hexadecimal(name[2 * i - 1]);
        if (high > 15 || low > 15) return 0;
        digest[i] = (unsigned char)(high << 4 | low);
    }
    return 1;
}

static int moer_cache_inspect(const moer_files *files, const char *path, moer_file_info *info) {
    moer_file file = files->open(path, 0);
    int inspected;
    if (file == MOER_NO_FILE) return 0;
    inspected = files->inspect(file, info);
    files->close(file);
    return inspected;
}

static int moer_cache_walk(moe_route_context *context, int (*visit)(moe_route_context *, const moer_cache_file *, void *), void *user) {
    const moer_files *files = context->cache.files;
    moer_cache_file *file;
    unsigned shelf;
    int going = 1;
    if (!context->cache.folder[0]) return 1;
    file = (moer_cache_file *)moer_alloc(context, sizeof *file);
    if (!file) return 0;
    for (shelf = 0; shelf < 256 && going; shelf++) {
        char path[MOER_PATH_MAX];
        moer_folder folder;
        const char *name;
        memset(file->digest, 0, sizeof file->digest);
        file->digest[0] = (unsigned char)shelf;
        moer_cache_path(context->cache.folder, file->digest, 0, path, sizeof path);
        if (!files->folder_open(&folder, path)) continue;
        while (going && (name = files->folder_next(&folder)) != NULL) {
            const size_t length = strlen(name), suffix = sizeof MOER_TEMPORARY_SUFFIX - 1;
            file->is_entry = moer_cache_name_read(name, file->digest);
            if (!file->is_entry && (length <= suffix || strcmp(name + length - suffix, MOER_TEMPORARY_SUFFIX) != 0)) continue;
            if (!moer_text_set(file->path, sizeof file->path, path) || !moer_append(file->path, sizeof file->path, "/%s", name)) continue;
            if (!moer_cache_inspect(files, file->path, &file->info)) {
                if (moer_system_error_is_absence()) continue; /* removed meanwhile */
                memset(&file->info, 0, sizeof file->info);
            }
            going = visit(context, file, user);
        }
        files->folder_close(&folder);
    }
    moer_free(context, file);
    return going;
}

/* ---- trimming ---- */

typedef struct moer_trim_entry {
    unsigned char digest[32];
    uint64_t size;
    int64_t modified;
} moer_trim_entry;

typedef struct moer_trim {
    int64_t now;
    uint64_t bytes; /* of all entries */
    moer_trim_entry *entries;
    size_t count, capacity;
} moer_trim;

static int moer_trim_visit(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_trim *trim = (moer_trim *)user;
    moer_trim_entry *entry;
    if (file->info.kind != MOER_PATH_FILE) return 1;
    if (!file->is_entry) {
        if (trim->now - file->info.modified > MOER_CACHE_RECENT) context->cache.files->remove(file->path);
        return 1;
    }
    trim->bytes += file->info.size;
    if (trim->count == trim->capacity) {
        size_t capacity = trim->capacity ? 2 * trim->capacity : 256, bytes;
        moer_trim_entry *grown = moer_size_mul(capacity, sizeof *grown, &bytes) ? (moer_trim_entry *)moer_alloc(context, bytes) : NULL;
        if (!grown) return 0;
        if (trim->count) memcpy(grown, trim->entries, trim->count * sizeof *grown);
        moer_free(context, trim->entries);
        trim->entries = grown;
        trim->capacity = capacity;
    }
    entry = &trim->entries[trim->count++];
    memcpy(entry->digest, file->digest, sizeof entry->digest);
    entry->size = file->info.size;
    entry->modified = file->info.modified;
    return 1;
}

static int moer_trim_compare(const void *a, const void *b) {
    const moer_trim_entry *left = (const moer_trim_entry *)a, *right = (const moer_trim_entry *)b;
    if (left->modified != right->modified) return left->modified < right->modified ? -1 : 1;
    return memcmp(left->digest, right->digest, sizeof left->digest);
}

/* Removes the oldest entries until `target` bytes are left, or only recent ones. */
static void moer_trim_remove(moe_route_context *context, moer_trim *trim, uint64_t target) {
    const moer_files *files = context->cache.files;
    size_t i;
    if (trim->count == 0) return;
    qsort(trim->entries, trim->count, sizeof *trim->entries, moer_trim_compare);
    for (i = 0; i < trim->count && trim->bytes > target; i++) {
        const moer_trim_entry *entry = &trim->entries[i];
        char path[MOER_PATH_MAX];
        moer_file_info info;
        if (trim->now - entry->modified <= MOER_CACHE_RECENT) break;
        moer_cache_path(context->cache.folder, entry->digest, 1, path, sizeof path);
        if (moer_cache_inspect(files, path, &info)) { /* used or written again meanwhile: it stays */
            if (info.modified != entry->modified || info.size != entry->size || !files->remove(path)) continue;
        }
        trim->bytes -= entry->size;
    }
}

/* Was the folder looked through within the hour before `now`? */
static int moer_trim_is_recent(const moer_cache *cache, int64_t now) {
    char path[MOER_PATH_MAX];
    moer_file_info info;
    moer_text_set(path, sizeof path, cache->folder);
    moer_append(path, sizeof path, MOER_LOOKED_THROUGH);
    return moer_cache_inspect(cache->files, path, &info) && now >= info.modified && now - info.modified <= MOER_CACHE_RECENT;
}

/* It was just now. */
static void moer_trim_note(const moer_cache *cache) {
    char path[MOER_PATH_MAX];
    moer_file file;
    moer_text_set(path, sizeof path, cache->folder);
    moer_append(path, sizeof path, MOER_LOOKED_THROUGH);
    if (cache->files->touch(path)) return;
    file = cache->files->create(path, cache->trust_shared ? 0666 : 0600);
    if (file != MOER_NO_FILE) cache->files->close(file);
}

static void moer_cache_trim(moe_route_context *context, const moer_key *written, size_t size) {
    moer_cache *cache = &context->cache;
    char path[MOER_PATH_MAX];
    moer_file_info info;
    moer_trim trim;
    int due, first;
    moer_mutex_lock(&context->mutex);
    cache->bytes += size;
    due = !cache->trimming && cache->bytes >= cache->trim_at;
    first = cache->trim_at == 0;
    if (due) cache->trimming = 1;
    moer_mutex_unlock(&context->mutex);
    if (!due) return;

    memset(&trim, 0, sizeof trim);
    moer_cache_path(cache->folder, written->digest, 1, path, sizeof path);
    due = moer_cache_inspect(cache->files, path, &info) && !(first && moer_trim_is_recent(cache, info.modified));
    if (due) {
        trim.now = info.modified;
        if (moer_cache_walk(context, moer_trim_visit, &trim) && trim.bytes > cache->limit) {
            moer_trim_remove(context, &trim, cache->limit - cache->limit / 8);
        }
        moer_trim_note(cache);
    }
    moer_free(context, trim.entries);
    moer_mutex_lock(&context->mutex);
    cache->trimming = 0;
    cache->bytes = due ? trim.bytes : size;
    cache->trim_at = cache->bytes <= cache->limit ? cache->limit : cache->bytes + cache->limit / 8 + 1;
    moer_mutex_unlock(&context->mutex);
}
