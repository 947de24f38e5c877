/*
  fuzz_pack.c: for libFuzzer: arbitrary bytes as a pack. The first byte says how far the rest is made plausible: 0 not at all, 1
  with the right digest of the index, 2 with lengths that fit and a sound first entry, too. What an accepted pack's index names
  must lie within its bytes; then every entry is looked up, as a layer does.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../../moe_route.h"

#include "repair.h"

static moe_route_context *new_context(void) {
    moe_route_context_desc desc;
    moe_route_context *context = NULL;
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_COMPILE;
    desc.compile_target = 90;
    desc.cache_dir = "off";
    require(moe_route_context_create(&desc, &context) == MOE_ROUTE_OK);
    return context;
}

/* Looks the entry of index `i` up by its own digest, and by the key that its bytes hold where they are sound. */
static void look_up(moe_route_context *context, const moer_pack *pack, uint32_t i) {
    static moer_lookup lookup;
    const unsigned char *found, *digest = pack->data + MOER_PACK_HEAD + (size_t)i * MOER_PACK_INDEX;
    moer_entry entry;
    size_t length;
    int sound;
    require(moer_pack_find(pack, digest, &found, &length));
    require(found >= pack->data + MOER_PACK_HEAD + 32 && found <= pack->data + pack->size && length <= (size_t)(pack->data + pack->size - found));
    memset(&lookup, 0, sizeof lookup);
    memcpy(lookup.key.digest, digest, 32);
    sound = moer_entry_parse(found, length, &entry) && entry.key_size < sizeof lookup.key.text;
    if (sound) {
        memcpy(lookup.key.text, entry.key_text, entry.key_size);
        lookup.key.text_size = entry.key_size;
        lookup.key.target = entry.target;
    }
    if (moer_lookup_next(context, &lookup)) {
        require(sound && lookup.origin == MOE_ROUTE_ORIGIN_PACK && lookup.bytes.size == length && memcmp(lookup.bytes.data, found, length) == 0);
        moer_free(context, lookup.bytes.data);
    } else {
        require(!sound);
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
    moe_route_context *context;
    unsigned char *bytes;
    if (size < 2) return 0;
    bytes = (unsigned char *)malloc(--size); /* of exactly this size, for AddressSanitizer */
    require(bytes != NULL);
    memcpy(bytes, data + 1, size);
    if (data[0] % 3) repair_pack(bytes, size, data[0] % 3 == 2);
    context = new_context();
    if (moe_route_pack_use(context, bytes, size) == MOE_ROUTE_OK) {
        uint32_t i;
        for (i = 0; i < context->packs->count; i++) look_up(context, context->packs, i);
    }
    moe_route_context_destroy(context);
    free(bytes);
    return 0;
}
