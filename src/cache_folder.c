/*
  cache_folder.c: which folders compiled variants are kept in: the one that this process writes, and those that are only
  read. What lies in a folder belongs to cache_file.c and cache_trim.c.

  A cubin is a program that the GPU runs with the process's memory. So a folder is used only when nobody but the user (and
  for one that is only read, the system's administrator) can put something there. There is no folder for all users, and no
  fall-back to one such as /tmp.
*/
#include "internal.h"

#if defined(_WIN32)
#define MOER_HOME_CACHE "/AppData/Local"
#define MOER_CACHE_HOME "LOCALAPPDATA"
#else
#define MOER_HOME_CACHE "/.cache"
#define MOER_CACHE_HOME "XDG_CACHE_HOME"
#endif

#define MOER_CACHE_FORMAT_FOLDER "/v1"
#define MOER_ENTRY_PATH_SPACE 128u /* what is added to the folder's path, at most */

/* The folder that the description or the environment asks for. 1: in `root`; 0: none, without a complaint when *why is
   empty. */
static int moer_cache_root(const char *given, char *root, size_t size, const char **why) {
    char value[MOER_PATH_MAX];
    const char *path = given && given[0] ? given : moer_environment("MOE_ROUTE_CACHE_DIR", value, sizeof value);
    int found;
    *why = "";
    if (path) {
        if (strcmp(path, "off") == 0) return 0;
        *why = "the path of the cache folder is too long";
        return moer_path_absolute(path, root, size);
    }
    path = moer_environment(MOER_CACHE_HOME, value, sizeof value);
    if (path && moer_path_is_absolute(path)) found = moer_text_set(root, size, path);
    else found = moer_home_folder(root, size) && moer_append(root, size, MOER_HOME_CACHE);
    *why = "the user has no home folder; set MOE_ROUTE_CACHE_DIR";
    return found && moer_append(root, size, "/moe_route");
}

static int moer_cache_check_folder(const moer_cache *cache, const char *path, int read_only, char *why, size_t size) {
    moer_file_info info;
    int owned;
    why[0] = '\0';
    if (!cache->files->folder_inspect(path, &info)) {
        char reason[256];
        moer_system_error(reason, sizeof reason);
        moer_append(why, size, "it can't be opened as a folder (%s); symbolic links aren't followed", reason);
        return 0;
    }
    if (cache->trust_shared) return 1;
    owned = info.owner == MOER_OWNER_SELF || (read_only && info.owner == MOER_OWNER_SYSTEM);
    if (!owned) moer_append(why, size, "it belongs to another user");
    else if (info.writable_by_others) moer_append(why, size, "other users can write to it");
    return owned && !info.writable_by_others;
}

static void moer_cache_create_folders(const moer_cache *cache, char *path) {
    const int mode = cache->trust_shared ? 0777 : 0700;
    size_t i;
    for (i = 1; path[i]; i++) {
        if (moer_path_is_separator(path[i])) {
            char separator = path[i];
            path[i] = '\0';
            if (moer_path_inspect(path) == MOER_PATH_OTHER) cache->files->folder_create(path, mode);
            path[i] = separator;
        }
    }
    cache->files->folder_create(path, mode);
}

/* Makes the path absolute and without closing separators, behind which a symbolic link would be followed. */
static int moer_cache_normalize(char *root) {
    size_t length;
    for (length = strlen(root); length > 1 && moer_path_is_separator(root[length - 1]); length--) root[length - 1] = '\0';
    return root[0] != '\0';
}

/* Checks <root> and <root>/v1, and leaves the latter in `root`. */
static int moer_cache_check_root(const moer_cache *cache, char *root, size_t size, int read_only, char *why, size_t why_size) {
    int created = read_only || moer_path_inspect(root) == MOER_PATH_FOLDER;
    if (!created) moer_cache_create_folders(cache, root);
    if (!moer_cache_check_folder(cache, root, read_only, why, why_size)) return 0;
    moer_append(root, size, MOER_CACHE_FORMAT_FOLDER);
    if (!read_only) cache->files->folder_create(root, cache->trust_shared ? 0777 : 0700);
    return moer_cache_check_folder(cache, root, read_only, why, why_size);
}

static void moer_cache_open_own(moe_route_context *context, const char *given) {
    moer_cache *cache = &context->cache;
    char root[MOER_PATH_MAX], why[512];
    const char *no_root;
    if (!moer_cache_root(given, root, sizeof root - MOER_ENTRY_PATH_SPACE, &no_root) || !moer_cache_normalize(root)) {
        if (no_root[0]) moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk: %s", no_root);
    } else if (!moer_cache_check_root(cache, root, sizeof root, 0, why, sizeof why)) {
        moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk: the folder %s isn't used: %s", root, why);
    } else {
        moer_text_set(cache->folder, sizeof cache->folder, root);
        cache->writable = 1;
    }
}

static void moer_cache_open_read_only(moe_route_context *context, const char *const *given, uint32_t count) {
    moer_cache *cache = &context->cache;
    size_t bytes;
    uint32_t i;
    if (moer_size_mul(count, sizeof *cache->read_only, &bytes)) cache->read_only = (moer_path *)moer_alloc(context, bytes);
    for (i = 0; i < count; i++) {
        char why[512] = "there is no memory for it";
        char *root = cache->read_only ? cache->read_only[cache->num_read_only].text : NULL;
        if (root && given[i] && !moer_path_absolute(given[i], root, sizeof *cache->read_only - MOER_ENTRY_PATH_SPACE)) {
            moer_text_set(why, sizeof why, "its path is too long");
        } else if (root && given[i] && moer_cache_normalize(root) &&
                   moer_cache_check_root(cache, root, sizeof *cache->read_only, 1, why, sizeof why)) {
            cache->num_read_only++;
            continue;
        }
        moer_log(context, MOE_ROUTE_LOG_WARNING, "the read-only cache folder %s isn't used: %s", given[i] ? given[i] : "NULL", given[i] ? why : "it has no path");
    }
}

static void moer_cache_open(moe_route_context *context, const moe_route_context_desc *desc) {
    moer_cache *cache = &context->cache;
    char value[32];
    const char *refresh = moer_environment("MOE_ROUTE_CACHE", value, sizeof value);
    memset(cache, 0, sizeof *cache);
    cache->files = moer_default_files;
    cache->trust_shared = desc->trust_shared_cache != 0;
    cache->refresh = refresh && strcmp(refresh, "refresh") == 0;
    cache->limit = desc->cache_limit ? desc->cache_limit : MOER_CACHE_DEFAULT_LIMIT;
    if (desc->num_cache_read_only_dirs > 0) moer_cache_open_read_only(context, desc->cache_read_only_dirs, desc->num_cache_read_only_dirs);
    moer_cache_open_own(context, desc->cache_dir);
}

static void moer_cache_close(moe_route_context *context) {
    moer_free(context, context->cache.read_only);
    context->cache.read_only = NULL;
    context->cache.num_read_only = 0;
}

static void moer_cache_path(const char *folder, const unsigned char digest[32], int whole, char *path, size_t size) {
    size_t i;
    moer_text_set(path, size, folder);
    moer_append(path, size, "/%02x", (unsigned)digest[0]);
    if (!whole) return;
    moer_append(path, size, "/");
    for (i = 1; i < 32; i++) moer_append(path, size, "%02x", (unsigned)digest[i]);
    moer_append(path, size, ".moec");
}
