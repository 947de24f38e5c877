/*
  cache_entry.c: the key that a variant, or what tuning found, is looked up by, and the bytes in which it is kept: made, and
  checked. Files and folders don't belong here: the same bytes lie in packs.

  The key holds only what is known without NVRTC and without the driver, so that a hit needs neither. The versions that
  made an entry stand in its header. A digest guards against damage; against others, the owner and mode of the file do.

  An entry, all numbers little-endian:

    0 magic (8)           8 format version      12 header length     16 target           20 NVRTC's version
   24 driver's version   28 library's version   32 flags             36 key text length  40 payload length (8)
   48 SHA-256 of the payload (32)               80 key text, then zeros that make the header's length a multiple of 16
   then SHA-256 of all before it (32), then the payload, which so is as aligned as the memory that the entry is read to
*/
#include "internal.h"

#define MOER_KEY_SCHEMA "2"
#define MOER_KEY_PAYLOAD "cubin"
#define MOER_KEY_FIELDS 7

#define MOER_ENTRY_FORMAT 1u
#define MOER_ENTRY_FIXED_SIZE 80u /* the header up to the key text */
/* What the payload is, in the flags. */
#define MOER_ENTRY_CUBIN 0u
#define MOER_ENTRY_PTX 1u    /* with its terminator */
#define MOER_ENTRY_TUNING 2u /* choices.c knows more of it */
#define MOER_ENTRY_NONE 3u   /* nothing that can be kept */
#define MOER_LIBRARY_VERSION (MOE_ROUTE_VERSION_MAJOR * 10000 + MOE_ROUTE_VERSION_MINOR * 100 + MOE_ROUTE_VERSION_PATCH)

/* ---- numbers and digests ---- */

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

/* ---- key ---- */

static int moer_key_add(moer_key *key, const char *text) {
    return moer_append(key->text, sizeof key->text, "%lu:%s,", (unsigned long)strlen(text), text);
}

static int moer_key_make(moer_key *key, const char *family, const char *defines, uint32_t target) {
    char target_name[32] = "";
    memset(key, 0, sizeof *key);
    key->target = target;
    moer_append(target_name, sizeof target_name, "sm_%lu", (unsigned long)target);
    if (!moer_key_add(key, MOER_KEY_SCHEMA) || !moer_key_add(key, moer_sources_digest) || !moer_key_add(key, target_name) ||
        !moer_key_add(key, MOER_CODE_OPTIONS) || !moer_key_add(key, family) || !moer_key_add(key, defines) ||
        !moer_key_add(key, MOER_KEY_PAYLOAD)) {
        return 0;
    }
    key->text_size = strlen(key->text);
    moer_digest(key->text, key->text_size, key->digest);
    return 1;
}

/* The next field of a key, "5:route,"; NULL when there is none. */
static const char *moer_key_field(const char **next, const char *end, size_t *length) {
    const char *at = *next, *field;
    size_t size = 0;
    if (at == end || *at < '0' || *at > '9') return NULL;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        size = size * 10 + (size_t)(*at - '0');
        if (size > (size_t)(end - *next)) return NULL;
    }
    if (at == end || *at != ':') return NULL;
    field = at + 1;
    if ((size_t)(end - field) <= size || field[size] != ',') return NULL;
    *next = field + size + 1;
    *length = size;
    return field;
}

static int moer_key_read(const moer_entry *entry, char *family, size_t family_size, char *defines, size_t defines_size, int *current) {
    const char *const wanted[] = {MOER_KEY_SCHEMA, moer_sources_digest, NULL, MOER_CODE_OPTIONS, NULL, NULL, MOER_KEY_PAYLOAD};
    const char *next = entry->key_text, *end = next + entry->key_size;
    int i;
    *current = 1;
    family[0] = defines[0] = '\0';
    for (i = 0; i < MOER_KEY_FIELDS; i++) {
        size_t length;
        const char *field = moer_key_field(&next, end, &length);
        if (!field) return 0;
        if (wanted[i] && (length != strlen(wanted[i]) || memcmp(field, wanted[i], length) != 0)) *current = 0;
        if (i == 4) moer_append(family, family_size, "%.*s", (int)length, field);
        if (i == 5) moer_append(defines, defines_size, "%.*s", (int)length, field);
    }
    return next == end;
}

/* ---- entry ---- */

static uint64_t moer_entry_header_size(uint64_t key_size) { return (MOER_ENTRY_FIXED_SIZE + key_size + 32 + 15) / 16 * 16; }

static const unsigned char moer_entry_magic[8] = {'M', 'O', 'E', 'C', '\r', '\n', 0x1a, '\n'};

static int moer_is_elf(const unsigned char *data, size_t size) {
    return size >= 4 && data[0] == 0x7f && data[1] == 'E' && data[2] == 'L' && data[3] == 'F';
}

/* PTX is kept with its terminator and has no other. */
static int moer_is_ptx(const unsigned char *data, size_t size) {
    return size >= 2 && memchr(data, 0, size) == data + size - 1;
}

static int moer_is_tuning(const unsigned char *data, size_t size) {
    return size > strlen(MOER_TUNING_MAGIC) && memcmp(data, MOER_TUNING_MAGIC, strlen(MOER_TUNING_MAGIC)) == 0;
}

static uint32_t moer_entry_kind(const unsigned char *payload, size_t size) {
    if (moer_is_tuning(payload, size)) return MOER_ENTRY_TUNING;
    if (moer_is_elf(payload, size)) return MOER_ENTRY_CUBIN;
    return moer_is_ptx(payload, size) ? MOER_ENTRY_PTX : MOER_ENTRY_NONE;
}

static int moer_entry_parse(const unsigned char *bytes, size_t size, moer_entry *entry) {
    unsigned char digest[32];
    uint64_t header_size, payload_size, key_size;
    uint32_t flags;
    memset(entry, 0, sizeof *entry);
    if (size < MOER_ENTRY_FIXED_SIZE + 32 || memcmp(bytes, moer_entry_magic, 8) != 0) return 0;
    if (moer_read_number(bytes + 8, 4) != MOER_ENTRY_FORMAT) return 0;
    header_size = moer_read_number(bytes + 12, 4);
    key_size = moer_read_number(bytes + 36, 4);
    payload_size = moer_read_number(bytes + 40, 8);
    flags = (uint32_t)moer_read_number(bytes + 32, 4);
    if (header_size != moer_entry_header_size(key_size) || header_size > size) return 0;
    if (payload_size > MOER_ENTRY_MAX_PAYLOAD || payload_size != size - header_size) return 0;
    moer_digest(bytes, (size_t)header_size - 32, digest);
    if (memcmp(bytes + header_size - 32, digest, 32) != 0) return 0;
    entry->payload = bytes + header_size;
    entry->payload_size = (size_t)payload_size;
    moer_digest(entry->payload, entry->payload_size, digest);
    if (memcmp(bytes + 48, digest, 32) != 0) return 0;
    if (flags == MOER_ENTRY_NONE || flags != moer_entry_kind(entry->payload, entry->payload_size)) return 0;
    entry->is_code = flags != MOER_ENTRY_TUNING;
    entry->key_text = (const char *)bytes + MOER_ENTRY_FIXED_SIZE;
    entry->key_size = (size_t)key_size;
    entry->target = (uint32_t)moer_read_number(bytes + 16, 4);
    entry->nvrtc_version = (uint32_t)moer_read_number(bytes + 20, 4);
    entry->driver_version = (uint32_t)moer_read_number(bytes + 24, 4);
    entry->library_version = (uint32_t)moer_read_number(bytes + 28, 4);
    return 1;
}

static int moer_entry_is_for(const moer_entry *entry, const moer_key *key) {
    return entry->target == key->target && entry->key_size == key->text_size && memcmp(entry->key_text, key->text, key->text_size) == 0;
}

static moer_bytes moer_entry_make(moe_route_context *context, const moer_key *key, const moer_bytes *payload) {
    const uint32_t kind = moer_entry_kind(payload->data, payload->size);
    size_t start = (size_t)moer_entry_header_size(key->text_size);
    int nvrtc_version;
    moer_bytes entry;
    unsigned char *data;
    memset(&entry, 0, sizeof entry);
    if (payload->size > MOER_ENTRY_MAX_PAYLOAD || kind == MOER_ENTRY_NONE) return entry;
    data = (unsigned char *)moer_alloc(context, start + payload->size);
    if (!data) return entry;
    moer_mutex_lock(&context->mutex);
    nvrtc_version = context->nvrtc.version;
    moer_mutex_unlock(&context->mutex);
    memcpy(data, moer_entry_magic, 8);
    moer_write_number(data + 8, MOER_ENTRY_FORMAT, 4);
    moer_write_number(data + 12, start, 4);
    moer_write_number(data + 16, key->target, 4);
    moer_write_number(data + 20, (uint64_t)nvrtc_version, 4);
    moer_write_number(data + 24, (uint64_t)context->driver_version, 4);
    moer_write_number(data + 28, MOER_LIBRARY_VERSION, 4);
    moer_write_number(data + 32, kind, 4);
    moer_write_number(data + 36, key->text_size, 4);
    moer_write_number(data + 40, payload->size, 8);
    moer_digest(payload->data, payload->size, data + 48);
    memcpy(data + MOER_ENTRY_FIXED_SIZE, key->text, key->text_size);
    moer_digest(data, start - 32, data + start - 32);
    memcpy(data + start, payload->data, payload->size);
    entry.data = data;
    entry.size = start + payload->size;
    return entry;
}
