/*
  pack.c: packs: many compiled variants in one file or piece of memory, found through an index. Reading them; writing belongs
  to pack_write.c. An entry in a pack has the same bytes as a file of the cache, and passes the same checks before it is used.

    0 magic (8)      8 format version (4)     12 number of entries (4)     16 size of the pack (8)
   24 index: for each entry its key's SHA-256 (32), its offset (8) and size (8); ascending by SHA-256
   then SHA-256 of all before it (32), then the entries
*/
#include "internal.h"

static const unsigned char *moer_pack_magic(void) {
    static const unsigned char magic[8] = {'M', 'O', 'E', 'P', '\r', '\n', 0x1a, '\n'};
    return magic;
}

static const char *moer_pack_check(const unsigned char *data, size_t size, uint32_t *count) {
    unsigned char digest[32];
    size_t index_end, i;
    if (size < MOER_PACK_HEAD + 32 || memcmp(data, moer_pack_magic(), 8) != 0) return "it isn't a pack";
    if (moer_read_number(data + 8, 4) != MOER_PACK_FORMAT) return "it is of another version of the format";
    if (moer_read_number(data + 16, 8) != size) return "it isn't as long as it says: a part is missing, or something follows it";
    *count = (uint32_t)moer_read_number(data + 12, 4);
    if (*count > (size - MOER_PACK_HEAD - 32) / MOER_PACK_INDEX) return "its index is damaged";
    index_end = MOER_PACK_HEAD + (size_t)*count * MOER_PACK_INDEX;
    moer_digest(data, index_end, digest);
    if (memcmp(data + index_end, digest, 32) != 0) return "its index is damaged";
    for (i = 0; i < *count; i++) {
        const unsigned char *item = data + MOER_PACK_HEAD + i * MOER_PACK_INDEX;
        uint64_t offset = moer_read_number(item + 32, 8), length = moer_read_number(item + 40, 8);
        if (offset < index_end + 32 || offset > size || length > size - offset) return "its index is wrong";
        if (i > 0 && memcmp(item - MOER_PACK_INDEX, item, 32) >= 0) return "its index is wrong";
    }
    return NULL;
}

static int moer_pack_find(const moer_pack *pack, const unsigned char digest[32], const unsigned char **bytes, size_t *size) {
    size_t low = 0, high = pack->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const unsigned char *item = pack->data + MOER_PACK_HEAD + middle * MOER_PACK_INDEX;
        int order = memcmp(item, digest, 32);
        if (order == 0) {
            *bytes = pack->data + moer_read_number(item + 32, 8);
            *size = (size_t)moer_read_number(item + 40, 8);
            return 1;
        }
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return 0;
}

/* Takes over `owned`, also when it fails. */
static moe_route_status moer_pack_add(moe_route_context *context, const unsigned char *data, unsigned char *owned, size_t size, const char *name) {
    moer_pack *pack, **link;
    uint32_t count = 0;
    const char *wrong = moer_pack_check(data, size, &count);
    if (wrong) {
        moer_free(context, owned);
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "the pack %s isn't used: %s", name, wrong);
    }
    pack = (moer_pack *)moer_alloc(context, sizeof *pack + strlen(name) + 1);
    if (!pack) {
        moer_free(context, owned);
        return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for the pack %s", name);
    }
    pack->data = data;
    pack->owned = owned;
    pack->size = size;
    pack->count = count;
    pack->name = (char *)(pack + 1);
    memcpy(pack->name, name, strlen(name) + 1);
    moer_mutex_lock(&context->mutex);
    for (link = &context->packs; *link; link = &(*link)->next) {}
    *link = pack;
    moer_mutex_unlock(&context->mutex);
    moer_log(context, MOE_ROUTE_LOG_INFO, "the pack %s holds %u variants", name, (unsigned)count);
    return MOE_ROUTE_OK;
}

static void moer_packs_close(moe_route_context *context) {
    while (context->packs) {
        moer_pack *pack = context->packs;
        context->packs = pack->next;
        moer_free(context, pack->owned);
        moer_free(context, pack);
    }
}

/* Packs are for contexts with variants. */
static moe_route_status moer_pack_check_context(moe_route_context *context, const char *call) {
    moe_route_status status = moer_context_check(context, call);
    if (status == MOE_ROUTE_OK && context->device == MOE_ROUTE_DEVICE_CPU)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: the context is of the CPU backend, which has no variants", call);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_pack_load(moe_route_context *context, const char *path) {
    moer_bytes bytes;
    moer_file_info info;
    char why[512];
    moer_found found;
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    status = moer_pack_check_context(context, "moe_route_pack_load");
    if (status != MOE_ROUTE_OK) return status;
    if (!path) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_load: path is NULL");
    found = moer_cache_read(context, path, MOER_READ_PACK, &bytes, &info, why, sizeof why);
    if (found == MOER_FOUND_NOTHING) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_load: there is no file %s", path);
    if (found != MOER_FOUND_BYTES) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_load: %s isn't used: %s", path, why);
    return moer_pack_add(context, bytes.data, bytes.data, bytes.size, path);
}

MOE_ROUTE_API moe_route_status moe_route_pack_use(moe_route_context *context, const void *data, size_t size) {
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    status = moer_pack_check_context(context, "moe_route_pack_use");
    if (status != MOE_ROUTE_OK) return status;
    if (!data) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_use: data is NULL");
    return moer_pack_add(context, (const unsigned char *)data, NULL, size, "in memory");
}
