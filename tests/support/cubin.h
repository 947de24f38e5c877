/*
  cubin.h: what the kernels of a cubin take, which is an ELF file. Nothing about tables of what they may take.
*/
#ifndef TEST_CUBIN_H
#define TEST_CUBIN_H

#include <stdint.h>
#include <string.h>

typedef struct resources {
    uint32_t registers, local_bytes, shared_bytes, instructions;
} resources;

static uint64_t read_number(const unsigned char *p, unsigned size) {
    uint64_t value = 0;
    while (size--) value = value << 8 | p[size];
    return value;
}

/* Sums over the kernels of a cubin. 0: it isn't understood. */
static int read_resources(const unsigned char *elf, size_t size, resources *r) {
    uint64_t sections, names, i;
    uint32_t count, section_size;
    memset(r, 0, sizeof *r);
    if (size < 64 || memcmp(elf, "\177ELF\2\1", 6) != 0) return 0;
    sections = read_number(elf + 40, 8);
    section_size = (uint32_t)read_number(elf + 58, 2);
    count = (uint32_t)read_number(elf + 60, 2);
    if (section_size < 64 || sections > size || (uint64_t)count * section_size > size - sections) return 0;
    names = read_number(elf + sections + read_number(elf + 62, 2) * section_size + 24, 8);
    for (i = 0; i < count; i++) {
        const unsigned char *section = elf + sections + i * section_size;
        const uint64_t start = read_number(section + 24, 8), bytes = read_number(section + 32, 8), name_at = names + read_number(section, 4);
        const char *name = (const char *)elf + name_at;
        if (name_at >= size) return 0;
        if (strncmp(name, ".text.", 6) == 0) r->instructions += (uint32_t)(bytes / 16);
        if (strncmp(name, ".nv.shared.moe", 14) == 0) r->shared_bytes += (uint32_t)bytes;
        if (strcmp(name, ".nv.info") == 0) {
            uint64_t at;
            if (start > size || bytes > size - start) return 0;
            for (at = 0; at + 4 <= bytes;) { /* format, attribute, size or value */
                const unsigned char *item = elf + start + at;
                const uint32_t length = item[0] == 4 ? (uint32_t)read_number(item + 2, 2) : 0;
                if (item[0] == 4 && length == 8 && at + 12 <= bytes) {
                    if (item[1] == 0x2f) r->registers += (uint32_t)read_number(item + 8, 4);
                    if (item[1] == 0x11) r->local_bytes += (uint32_t)read_number(item + 8, 4);
                }
                at += 4 + length;
            }
        }
    }
    return r->instructions != 0 && r->registers != 0;
}

#endif /* TEST_CUBIN_H */
