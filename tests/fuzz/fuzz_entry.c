/*
  fuzz_entry.c: for libFuzzer: arbitrary bytes as a cache entry. The first byte says how far the rest is made plausible: 0 not
  at all, 1 with the right digests, 2 with the right lengths, too. What is accepted must lie within the bytes, and a key that
  passes for one of this library's must be exactly that.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../../moe_route.h"

#include "repair.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
    char family[64], defines[512];
    unsigned char *bytes;
    moer_entry entry;
    int current;
    if (size < 2) return 0;
    bytes = (unsigned char *)malloc(--size); /* of exactly this size, for AddressSanitizer */
    require(bytes != NULL);
    memcpy(bytes, data + 1, size);
    if (data[0] % 3) repair_entry(bytes, size, data[0] % 3 == 2);
    if (moer_entry_parse(bytes, size, &entry)) {
        const unsigned char *key_text = (const unsigned char *)entry.key_text;
        require(entry.payload + entry.payload_size == bytes + size && entry.payload_size > 0);
        require(key_text == bytes + MOER_ENTRY_FIXED_SIZE && key_text + entry.key_size + 32 <= entry.payload);
        require((entry.payload - bytes) % 16 == 0);
        require(entry.payload[0] == 0x7f || bytes[size - 1] == 0);
        if (moer_key_read(&entry, family, sizeof family, defines, sizeof defines, &current)) require(strlen(family) < sizeof family && strlen(defines) < sizeof defines);
    }
    free(bytes);
    return 0;
}
