/*
  cache.c: compiled variants on disk. The key, the folder, the entry format, and the protocol of reading and writing.
  What is compiled, and what the driver makes of an entry, is decided in variant.c; system calls are in platform.c.

  The key holds only what is known without NVRTC and without the driver, so that a hit needs neither. The versions that
  made an entry stand in its header. Anything doubtful about an entry is a miss; a digest guards against damage, and the
  owner and mode of folder and file guard against others. There is no lock: an entry appears by a rename, two processes
  may make the same one, and neither reads back what it wrote.
*/
#include "internal.h"

#define MOER_KEY_SCHEMA "1"
#define MOER_KEY_PAYLOAD "cubin"

#define MOER_ENTRY_FORMAT 1u
#define MOER_ENTRY_FIXED_SIZE 80u   /* the header up to the key text */
#define MOER_ENTRY_MAX_PAYLOAD (16u << 20)
#define MOER_ENTRY_MAX_SIZE (MOER_ENTRY_MAX_PAYLOAD + 4096u) /* a header is below 4 KB */
#define MOER_ENTRY_PTX 1u           /* flag: the payload is PTX, with its terminator */
#define MOER_LIBRARY_VERSION (MOE_ROUTE_VERSION_MAJOR * 10000 + MOE_ROUTE_VERSION_MINOR * 100 + MOE_ROUTE_VERSION_PATCH)

#define MOER_TEMPORARY_SUFFIX ".tmp"
#define MOER_TEMPORARY_MAX_AGE 3600.0 /* seconds; whoever wrote one for longer is gone */
#define MOER_ENTRY_PATH_SPACE 128u    /* what is added to the folder's path, at most */

/* ---- key ---- */

static int moer_key_add(moer_key *key, const char *text) {
    return moer_append(key->text, sizeof key->text, "%lu:%s,", (unsigned long)strlen(text), text);
}

static int moer_key_make(moer_key *key, const char *family, const char *defines, uint32_t target) {
    moer_sha256 hash;
    char target_name[32] = "";
    memset(key, 0, sizeof *key);
    key->family = family;
    key->defines = defines;
    key->target = target;
    moer_append(target_name, sizeof target_name, "sm_%lu", (unsigned long)target);
    if (!moer_key_add(key, MOER_KEY_SCHEMA) || !moer_key_add(key, moer_sources_digest) ||
        !moer_key_add(key, target_name) || !moer_key_add(key, family) || !moer_key_add(key, defines) ||
        !moer_key_add(key, MOER_KEY_PAYLOAD)) {
        return 0;
    }
    key->text_size = strlen(key->text);
    moer_sha256_begin(&hash);
    moer_sha256_add(&hash, key->text, key->text_size);
    moer_sha256_end(&hash, key->digest);
    return 1;
}

/* ---- folder ---- */

#if defined(_WIN32)
#define MOER_HOME_CACHE "/AppData/Local"
#else
#define MOER_HOME_CACHE "/.cache"
#endif

/* The folder that the description or the environment asks for. 1: in `root`; 0: none, without a complaint when *why is
   empty. */
static int moer_cache_root(const char *given, char *root, size_t size, const char **why) {
    const char *path = given && given[0] ? given : moer_environment("MOE_ROUTE_CACHE_DIR");
    int found;
    *why = "";
    if (path) {
        if (strcmp(path, "off") == 0) return 0;
        *why = "the path of the cache folder is too long";
        return moer_path_absolute(path, root, size);
    }
#if defined(_WIN32)
    path = moer_environment("LOCALAPPDATA");
#else
    path = moer_environment("XDG_CACHE_HOME");
#endif
    if (path && moer_path_is_absolute(path)) found = moer_text_set(root, size, path);
    else found = moer_home_folder(root, size) && moer_append(root, size, MOER_HOME_CACHE);
    *why = "the user has no home folder; set MOE_ROUTE_CACHE_DIR";
    return found && moer_append(root, size, "/moe_route");
}

/* Checks a folder that entries lie in. On refusal `why` says what is wrong with it. */
static int moer_cache_check_folder(const char *path, int trust_shared, char *why, size_t size) {
    moer_file_info info;
    why[0] = '\0';
    if (!moer_folder_inspect(path, &info)) {
        char reason[256];
        moer_system_error(reason, sizeof reason);
        moer_append(why, size, "it can't be opened as a folder (%s); symbolic links aren't followed", reason);
        return 0;
    }
    if (trust_shared) return 1;
    if (!info.owned) moer_append(why, size, "it belongs to another user");
    else if (info.writable_by_others) moer_append(why, size, "other users can write to it");
    return info.owned && !info.writable_by_others;
}

/* Creates a folder and those above it, as far as they don't exist. */
static void moer_cache_create_folders(char *path, int shared) {
    size_t i;
    if (moer_path_inspect(path) == MOER_PATH_FOLDER) return;
    for (i = 1; path[i]; i++) {
        if (path[i] == '/' || path[i] == '\\') {
            char separator = path[i];
            path[i] = '\0';
            if (moer_path_inspect(path) == MOER_PATH_OTHER) moer_folder_create(path, shared);
            path[i] = separator;
        }
    }
    moer_folder_create(path, shared);
}

static void moer_cache_open(moe_route_context *context, const char *folder_or_null, int trust_shared) {
    moer_cache *cache = &context->cache;
    const char *refresh = moer_environment("MOE_ROUTE_CACHE"), *no_root;
    char root[MOER_PATH_MAX], why[512];
    size_t length;
    int usable;
    memset(cache, 0, sizeof *cache);
    cache->trust_shared = trust_shared != 0;
    cache->refresh = refresh && strcmp(refresh, "refresh") == 0;
    if (!moer_cache_root(folder_or_null, root, sizeof root - MOER_ENTRY_PATH_SPACE, &no_root)) {
        if (no_root[0]) moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk: %s", no_root);
        return;
    }
    for (length = strlen(root); length > 1 && (root[length - 1] == '/' || root[length - 1] == '\\'); length--) {
        root[length - 1] = '\0'; /* behind a slash a symbolic link would be followed */
    }
    moer_cache_create_folders(root, cache->trust_shared);
    usable = moer_cache_check_folder(root, cache->trust_shared, why, sizeof why);
    if (usable) {
        moer_append(root, sizeof root, "/v1");
        moer_folder_create(root, cache->trust_shared);
        usable = moer_cache_check_folder(root, cache->trust_shared, why, sizeof why);
    }
    if (!usable) {
        moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk: the folder %s isn't used: %s",
                 root, why);
        return;
    }
    moer_text_set(cache->folder, sizeof cache->folder, root);
    cache->writable = 1;
}

/* <folder>/<first byte of the digest>, and with `whole` the entry's path in it. The folder's length was checked. */
static void moer_cache_path(const moer_cache *cache, const moer_key *key, int whole, char *path, size_t size) {
    size_t i;
    moer_text_set(path, size, cache->folder);
    moer_append(path, size, "/%02x", (unsigned)key->digest[0]);
    if (!whole) return;
    moer_append(path, size, "/");
    for (i = 1; i < sizeof key->digest; i++) moer_append(path, size, "%02x", (unsigned)key->digest[i]);
    moer_append(path, size, ".moec");
}

/* ---- entry: all numbers little-endian

    0 magic (8)           8 format version      12 header length     16 target           20 NVRTC's version
   24 driver's version   28 library's version   32 flags             36 key text length  40 payload length (8)
   48 SHA-256 of the payload (32)               80 key text
   then SHA-256 of all before it (32), then the payload ---- */

static const unsigned char moer_entry_magic[8] = {'M', 'O', 'E', 'C', '\r', '\n', 0x1a, '\n'};

static void moer_write_number(unsigned char *bytes, uint64_t value, unsigned size) {
    unsigned i;
    for (i = 0; i < size; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t moer_read_number(const unsigned char *bytes, unsigned size) {
    uint64_t value = 0;
    unsigned i;
    for (i = size; i-- > 0;) value = value << 8 | bytes[i];
    return value;
}

static void moer_digest(const void *data, size_t size, unsigned char digest[32]) {
    moer_sha256 hash;
    moer_sha256_begin(&hash);
    moer_sha256_add(&hash, data, size);
    moer_sha256_end(&hash, digest);
}

static int moer_is_elf(const unsigned char *data, size_t size) {
    return size >= 4 && data[0] == 0x7f && data[1] == 'E' && data[2] == 'L' && data[3] == 'F';
}

/* PTX is kept with its terminator and has no other. */
static int moer_is_ptx(const unsigned char *data, size_t size) {
    return size >= 2 && memchr(data, 0, size) == data + size - 1;
}

/* Where the payload begins in the `size` bytes of an entry for `key`; 0 when anything is wrong with it. */
static size_t moer_entry_check(const moer_key *key, const unsigned char *entry, size_t size) {
    unsigned char digest[32];
    uint64_t header_size, payload_size;
    uint32_t flags;
    size_t start;
    if (size < MOER_ENTRY_FIXED_SIZE + 32 || memcmp(entry, moer_entry_magic, 8) != 0) return 0;
    if (moer_read_number(entry + 8, 4) != MOER_ENTRY_FORMAT || moer_read_number(entry + 16, 4) != key->target) return 0;
    if (moer_read_number(entry + 36, 4) != key->text_size) return 0;
    header_size = moer_read_number(entry + 12, 4);
    payload_size = moer_read_number(entry + 40, 8);
    flags = (uint32_t)moer_read_number(entry + 32, 4);
    if (header_size != MOER_ENTRY_FIXED_SIZE + key->text_size + 32 || header_size > size) return 0;
    if (payload_size > MOER_ENTRY_MAX_PAYLOAD || payload_size != size - header_size) return 0;
    start = (size_t)header_size;
    if (memcmp(entry + MOER_ENTRY_FIXED_SIZE, key->text, key->text_size) != 0) return 0;
    moer_digest(entry, start - 32, digest);
    if (memcmp(entry + start - 32, digest, 32) != 0) return 0;
    moer_digest(entry + start, size - start, digest);
    if (memcmp(entry + 48, digest, 32) != 0) return 0;
    if (flags == 0 && moer_is_elf(entry + start, size - start)) return start;
    if (flags == MOER_ENTRY_PTX && moer_is_ptx(entry + start, size - start)) return start;
    return 0;
}

/* An entry in memory; data NULL when there is none or the code can't be kept. */
static moer_bytes moer_entry_make(moe_route_context *context, const moer_key *key, const moer_bytes *code,
                                  int nvrtc_version) {
    size_t start = MOER_ENTRY_FIXED_SIZE + key->text_size + 32;
    int elf = moer_is_elf(code->data, code->size);
    moer_bytes entry;
    unsigned char *data;
    memset(&entry, 0, sizeof entry);
    if (code->size > MOER_ENTRY_MAX_PAYLOAD || (!elf && !moer_is_ptx(code->data, code->size))) return entry;
    data = (unsigned char *)moer_alloc(context, start + code->size);
    if (!data) return entry;
    memcpy(data, moer_entry_magic, 8);
    moer_write_number(data + 8, MOER_ENTRY_FORMAT, 4);
    moer_write_number(data + 12, start, 4);
    moer_write_number(data + 16, key->target, 4);
    moer_write_number(data + 20, (uint64_t)nvrtc_version, 4);
    moer_write_number(data + 24, (uint64_t)context->driver_version, 4);
    moer_write_number(data + 28, MOER_LIBRARY_VERSION, 4);
    moer_write_number(data + 32, elf ? 0 : MOER_ENTRY_PTX, 4);
    moer_write_number(data + 36, key->text_size, 4);
    moer_write_number(data + 40, code->size, 8);
    moer_digest(code->data, code->size, data + 48);
    memcpy(data + MOER_ENTRY_FIXED_SIZE, key->text, key->text_size);
    moer_digest(data, start - 32, data + start - 32);
    memcpy(data + start, code->data, code->size);
    entry.data = data;
    entry.size = start + code->size;
    return entry;
}

/* ---- reading ---- */

/* A whole file that is allowed to be an entry; data NULL otherwise. */
static moer_bytes moer_cache_read(moe_route_context *context, const char *path) {
    moer_bytes bytes;
    moer_file_info info;
    moer_file file = moer_file_open(path);
    size_t done = 0;
    memset(&bytes, 0, sizeof bytes);
    if (file == MOER_NO_FILE) return bytes;
    if (moer_file_inspect(file, &info) && info.kind == MOER_PATH_FILE && info.size <= MOER_ENTRY_MAX_SIZE &&
        (context->cache.trust_shared || (info.owned && !info.writable_by_others))) {
        bytes.size = (size_t)info.size;
        bytes.data = (unsigned char *)moer_alloc(context, bytes.size);
    }
    while (bytes.data && done < bytes.size) {
        long count = moer_file_read(file, bytes.data + done, bytes.size - done);
        if (count <= 0) break;
        done += (size_t)count;
    }
    moer_file_close(file);
    if (bytes.data && done == bytes.size) return bytes;
    moer_free(context, bytes.data);
    memset(&bytes, 0, sizeof bytes);
    return bytes;
}

static void moer_cache_load(moe_route_context *context, const moer_key *key, moer_bytes *code) {
    char path[MOER_PATH_MAX];
    size_t start;
    memset(code, 0, sizeof *code);
    if (!context->cache.folder[0] || context->cache.refresh) return;
    moer_cache_path(&context->cache, key, 1, path, sizeof path);
    *code = moer_cache_read(context, path);
    if (!code->data) return;
    start = moer_entry_check(key, code->data, code->size);
    if (start == 0) {
        moer_log(context, MOE_ROUTE_LOG_INFO, "%s is damaged or isn't the entry of its name; it is replaced", path);
        moer_free(context, code->data);
        memset(code, 0, sizeof *code);
        return;
    }
    code->size -= start;
    memmove(code->data, code->data + start, code->size);
}

/* ---- writing ---- */

/* Writes a new file and flushes it; on failure nothing stays behind, and `why` says what happened. */
static int moer_cache_write_file(const char *path, const moer_bytes *bytes, int shared, char *why, size_t size) {
    moer_file file = moer_file_create(path, shared);
    size_t done = 0;
    int written;
    if (file == MOER_NO_FILE) {
        moer_system_error(why, size);
        return 0;
    }
    while (done < bytes->size) {
        long count = moer_file_write(file, bytes->data + done, bytes->size - done);
        if (count <= 0) break;
        done += (size_t)count;
    }
    written = done == bytes->size && moer_file_flush(file);
    if (!written) moer_system_error(why, size);
    if (!moer_file_close(file) && written) {
        moer_system_error(why, size);
        written = 0;
    }
    if (!written) moer_file_remove(path);
    return written;
}

/* Removes temporary files that a killed process left in a folder. */
static void moer_cache_sweep(const char *path) {
    moer_folder folder;
    const char *name;
    const size_t suffix = sizeof MOER_TEMPORARY_SUFFIX - 1;
    if (!moer_folder_open(&folder, path)) return;
    while ((name = moer_folder_next(&folder)) != NULL) {
        size_t length = strlen(name);
        char file[MOER_PATH_MAX];
        if (length <= suffix || strcmp(name + length - suffix, MOER_TEMPORARY_SUFFIX) != 0) continue;
        if (!moer_text_set(file, sizeof file, path) || !moer_append(file, sizeof file, "/%s", name)) continue;
        if (moer_file_age(file) > MOER_TEMPORARY_MAX_AGE) moer_file_remove(file);
    }
    moer_folder_close(&folder);
}

/* Writes an entry under a temporary name and renames it. 0: `why` tells what failed. */
static int moer_cache_publish(moe_route_context *context, const moer_key *key, const moer_bytes *entry, unsigned number,
                              char *why, size_t size) {
    const moer_cache *cache = &context->cache;
    char folder[MOER_PATH_MAX], temporary[MOER_PATH_MAX], path[MOER_PATH_MAX];
    uint64_t random = moer_random();
    moer_cache_path(cache, key, 0, folder, sizeof folder);
    moer_cache_path(cache, key, 1, path, sizeof path);
    moer_folder_create(folder, cache->trust_shared);
    if (!moer_cache_check_folder(folder, cache->trust_shared, why, size)) return 0;
    moer_text_set(temporary, sizeof temporary, folder);
    moer_append(temporary, sizeof temporary, "/%lx-%x-%08lx%08lx" MOER_TEMPORARY_SUFFIX,
                (unsigned long)moer_process_id(), number, (unsigned long)(random >> 32),
                (unsigned long)(random & 0xffffffffu));
    if (!moer_cache_write_file(temporary, entry, cache->trust_shared, why, size)) return 0;
    if (moer_file_rename(temporary, path)) return 1;
    moer_system_error(why, size);
    moer_file_remove(temporary);
    return 0;
}

static void moer_cache_store(moe_route_context *context, const moer_key *key, const moer_bytes *code) {
    moer_cache *cache = &context->cache;
    moer_bytes entry;
    char why[512] = "";
    unsigned number;
    int writable, published, first, nvrtc_version;
    moer_mutex_lock(&context->mutex);
    writable = cache->folder[0] && cache->writable;
    number = cache->stores++;
    nvrtc_version = context->nvrtc.version;
    moer_mutex_unlock(&context->mutex);
    if (!writable) return;
    entry = moer_entry_make(context, key, code, nvrtc_version);
    if (!entry.data) return;
    published = moer_cache_publish(context, key, &entry, number, why, sizeof why);
    moer_free(context, entry.data);

    moer_mutex_lock(&context->mutex);
    if (published) {
        first = !cache->swept;
        cache->swept = 1;
    } else {
        first = cache->writable;
        cache->writable = 0;
    }
    moer_mutex_unlock(&context->mutex);
    if (published && first) {
        char folder[MOER_PATH_MAX];
        moer_cache_path(cache, key, 0, folder, sizeof folder);
        moer_cache_sweep(folder);
    } else if (!published && first) {
        moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk any longer: writing to %s: %s",
                 cache->folder, why);
    }
}

static void moer_cache_remove(moe_route_context *context, const moer_key *key, const moer_bytes *code) {
    char path[MOER_PATH_MAX];
    moer_bytes entry;
    size_t start;
    if (!context->cache.folder[0]) return;
    moer_cache_path(&context->cache, key, 1, path, sizeof path);
    entry = moer_cache_read(context, path);
    if (!entry.data) return;
    start = moer_entry_check(key, entry.data, entry.size);
    if (start > 0 && entry.size - start == code->size && memcmp(entry.data + start, code->data, code->size) == 0) {
        moer_file_remove(path);
    }
    moer_free(context, entry.data);
}
