/*
  repair.h: makes arbitrary bytes plausible, so that a fuzzer gets behind the digests: no mutation finds a SHA-256.
*/
#ifndef FUZZ_REPAIR_H
#define FUZZ_REPAIR_H

static void require(int condition) {
    if (!condition) abort();
}

/* An entry: gets the right digests, and with `lengths` the magic, version and lengths that fit its size, too. */
static void repair_entry(unsigned char *bytes, size_t size, int lengths) {
    uint64_t header;
    if (size < MOER_ENTRY_FIXED_SIZE + 32) return;
    if (lengths) {
        const uint64_t key = moer_read_number(bytes + 36, 4) % 256;
        header = moer_entry_header_size(key);
        if (header > size) return;
        memcpy(bytes, moer_entry_magic, 8);
        moer_write_number(bytes + 8, MOER_ENTRY_FORMAT, 4);
        moer_write_number(bytes + 12, header, 4);
        moer_write_number(bytes + 36, key, 4);
        moer_write_number(bytes + 40, size - header, 8);
    }
    header = moer_read_number(bytes + 12, 4);
    if (header < MOER_ENTRY_FIXED_SIZE + 32 || header > size) return;
    moer_digest(bytes + header, size - (size_t)header, bytes + 48);
    moer_digest(bytes, (size_t)header - 32, bytes + header - 32);
}

/* A pack, likewise; then its first entry as well. */
static void repair_pack(unsigned char *bytes, size_t size, int lengths) {
    const size_t room = size < MOER_PACK_HEAD + 32 ? 0 : size - MOER_PACK_HEAD - 32;
    uint64_t count, end;
    if (room == 0) return;
    if (lengths) {
        memcpy(bytes, moer_pack_magic(), 8);
        moer_write_number(bytes + 8, MOER_PACK_FORMAT, 4);
        moer_write_number(bytes + 12, moer_read_number(bytes + 12, 4) % (room / MOER_PACK_INDEX + 1), 4);
        moer_write_number(bytes + 16, size, 8);
    }
    count = moer_read_number(bytes + 12, 4);
    end = MOER_PACK_HEAD + count * MOER_PACK_INDEX;
    if (end + 32 > size) return;
    if (lengths && count > 0) {
        unsigned char *item = bytes + MOER_PACK_HEAD;
        const uint64_t offset = end + 32 + moer_read_number(item + 32, 8) % (size - end - 32 + 1);
        moer_write_number(item + 32, offset, 8);
        moer_write_number(item + 40, moer_read_number(item + 40, 8) % (size - offset + 1), 8);
        repair_entry(bytes + offset, (size_t)moer_read_number(item + 40, 8), 1);
    }
    moer_digest(bytes, (size_t)end, bytes + end);
}

#endif /* FUZZ_REPAIR_H */
