/*
  cache_calls.c: the public functions by which an operator's program looks at the cache: statistics, listing, verifying,
  clearing. They only look at the context's own folder.
*/
#include "internal.h"

MOE_ROUTE_API void moe_route_context_get_statistics(const moe_route_context *context, moe_route_statistics *statistics) {
    moe_route_context *changing = (moe_route_context *)(uintptr_t)context; /* locking changes only the mutex */
    if (!statistics) return;
    memset(statistics, 0, sizeof *statistics);
    if (!context) return;
    moer_mutex_lock(&changing->mutex);
    *statistics = context->statistics;
    moer_mutex_unlock(&changing->mutex);
}

typedef struct moer_cache_visit { /* what one of the calls below has seen so far */
    moe_route_cache_visitor visitor;
    void *user;
    uint64_t num_sound, num_removed;
} moer_cache_visit;

/* The entry's bytes, when they pass the checks that they pass before use; data NULL otherwise. */
static moer_bytes moer_cache_read_entry(moe_route_context *context, const moer_cache_file *file, moer_entry *entry) {
    unsigned char digest[32];
    char why[512];
    moer_bytes bytes;
    moer_file_info info;
    memset(entry, 0, sizeof *entry);
    if (moer_cache_read(context, file->path, MOER_READ_OWN, &bytes, &info, why, sizeof why) != MOER_FOUND_BYTES) return bytes;
    if (moer_entry_parse(bytes.data, bytes.size, entry)) {
        moer_digest(entry->key_text, entry->key_size, digest);
        if (memcmp(digest, file->digest, 32) == 0) return bytes;
    }
    moer_free(context, bytes.data);
    memset(&bytes, 0, sizeof bytes);
    return bytes;
}

static int moer_cache_list_file(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_cache_visit *visit = (moer_cache_visit *)user;
    char kernel[64] = "", variant[MOER_DEFINES_MAX] = "";
    moe_route_cache_entry entry;
    moer_entry parsed;
    moer_bytes bytes;
    int current = 0;
    int64_t age;
    if (!file->is_entry) return 1;
    bytes = moer_cache_read_entry(context, file, &parsed);
    memset(&entry, 0, sizeof entry);
    entry.path = file->path;
    entry.sound = bytes.data != NULL && moer_key_read(&parsed, kernel, sizeof kernel, variant, sizeof variant, &current);
    entry.current = entry.sound && current;
    entry.kernel = kernel;
    entry.variant = variant;
    if (entry.sound) {
        entry.target = parsed.target;
        entry.nvrtc_version = parsed.nvrtc_version;
        entry.driver_version = parsed.driver_version;
    }
    entry.size = file->info.size;
    age = context->cache.files->now() - file->info.modified;
    entry.seconds_unused = age > 0 ? age : 0;
    visit->visitor(&entry, visit->user);
    moer_free(context, bytes.data);
    return 1;
}

static int moer_cache_verify_file(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_cache_visit *visit = (moer_cache_visit *)user;
    moer_entry parsed;
    moer_bytes bytes;
    if (!file->is_entry) return 1;
    bytes = moer_cache_read_entry(context, file, &parsed);
    if (bytes.data) visit->num_sound++;
    else if (context->cache.files->remove(file->path)) visit->num_removed++;
    moer_free(context, bytes.data);
    return 1;
}

static int moer_cache_clear_file(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_cache_visit *visit = (moer_cache_visit *)user;
    if (!file->is_entry && context->cache.files->now() - file->info.modified <= MOER_CACHE_RECENT) return 1; /* being written */
    if (context->cache.files->remove(file->path)) visit->num_removed += (uint64_t)file->is_entry;
    return 1;
}

static moe_route_status moer_cache_call(moe_route_context *context, const char *call, int (*look)(moe_route_context *, const moer_cache_file *, void *),
                                        moer_cache_visit *visit) {
    moe_route_status status = moer_context_check(context, call);
    if (status != MOE_ROUTE_OK || context->device == MOE_ROUTE_DEVICE_CPU) return status;
    if (moer_cache_walk(context, look, visit)) return MOE_ROUTE_OK;
    return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "%s: out of memory", call);
}

MOE_ROUTE_API moe_route_status moe_route_cache_list(moe_route_context *context, moe_route_cache_visitor visitor, void *user) {
    moer_cache_visit visit;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    if (!visitor) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_cache_list: visitor is NULL");
    memset(&visit, 0, sizeof visit);
    visit.visitor = visitor;
    visit.user = user;
    return moer_cache_call(context, "moe_route_cache_list", moer_cache_list_file, &visit);
}

MOE_ROUTE_API moe_route_status moe_route_cache_verify(moe_route_context *context, uint64_t *num_sound, uint64_t *num_removed) {
    moer_cache_visit visit;
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    memset(&visit, 0, sizeof visit);
    status = moer_cache_call(context, "moe_route_cache_verify", moer_cache_verify_file, &visit);
    if (num_sound) *num_sound = visit.num_sound;
    if (num_removed) *num_removed = visit.num_removed;
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_cache_clear(moe_route_context *context, uint64_t *num_removed) {
    moer_cache_visit visit;
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    memset(&visit, 0, sizeof visit);
    status = moer_cache_call(context, "moe_route_cache_clear", moer_cache_clear_file, &visit);
    if (num_removed) *num_removed = visit.num_removed;
    return status;
}
