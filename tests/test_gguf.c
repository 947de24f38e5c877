/*
  test_gguf.c: the GGUF reader of examples/gguf.h: what it reads, and that damaged files are refused. Nothing of the library.
  Files that the package gguf wrote are read by test_demo.sh and test_run_layer.sh. Run from the repository's root.
*/
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* fmemopen */
#endif
#include "support/test.h"

#include "../examples/gguf.h"

typedef struct image { /* a file in memory, while it is written */
    unsigned char bytes[4096];
    size_t size;
} image;

static void put(image *file, const void *bytes, size_t size) {
    if (file->size + size > sizeof file->bytes) exit(1);
    memcpy(file->bytes + file->size, bytes, size);
    file->size += size;
}

static void put_u32(image *file, uint32_t value) { put(file, &value, sizeof value); }
static void put_u64(image *file, uint64_t value) { put(file, &value, sizeof value); }

static void put_text(image *file, const char *text) {
    put_u64(file, strlen(text));
    put(file, text, strlen(text));
}

static void put_header(image *file, uint32_t version, uint64_t num_tensors, uint64_t num_pairs) {
    memset(file, 0, sizeof *file);
    put(file, "GGUF", 4);
    put_u32(file, version);
    put_u64(file, num_tensors);
    put_u64(file, num_pairs);
}

static void put_tensor(image *file, const char *name, uint32_t type, uint32_t rank, uint64_t d0, uint64_t d1, uint64_t d2,
                       uint64_t offset) {
    const uint64_t shape[3] = {d0, d1, d2};
    put_text(file, name);
    put_u32(file, rank);
    put(file, shape, (rank < 3 ? rank : 3) * sizeof *shape);
    put_u32(file, type);
    put_u64(file, offset);
}

static void put_padding(image *file, size_t alignment) {
    while (file->size % alignment) put(file, "", 1);
}

/* Everything that a file may hold: 13 keys, 4 tensors, data of 0, 1, 2, ... */
static void put_everything(image *file) {
    const int8_t i8 = -3;
    const uint16_t u16 = 65535;
    const int16_t i16 = -2;
    const float f32 = 0.5f, array[3] = {1, 2.5f, -4};
    const double f64 = 1e-3;
    const uint64_t u64 = 1ull << 40;
    const int64_t i64 = -5;
    unsigned char data[256];
    unsigned i;
    put_header(file, 3, 4, 13);
    put_text(file, "general.architecture"), put_u32(file, GGUF_STRING), put_text(file, "llama");
    put_text(file, "general.alignment"), put_u32(file, GGUF_UINT32), put_u32(file, 64);
    put_text(file, "i8"), put_u32(file, GGUF_INT8), put(file, &i8, 1);
    put_text(file, "u16"), put_u32(file, GGUF_UINT16), put(file, &u16, 2);
    put_text(file, "i16"), put_u32(file, GGUF_INT16), put(file, &i16, 2);
    put_text(file, "f32"), put_u32(file, GGUF_FLOAT32), put(file, &f32, 4);
    put_text(file, "f64"), put_u32(file, GGUF_FLOAT64), put(file, &f64, 8);
    put_text(file, "u64"), put_u32(file, GGUF_UINT64), put(file, &u64, 8);
    put_text(file, "i64"), put_u32(file, GGUF_INT64), put(file, &i64, 8);
    put_text(file, "yes"), put_u32(file, GGUF_BOOL), put(file, "\1", 1);
    put_text(file, "floats"), put_u32(file, GGUF_ARRAY), put_u32(file, GGUF_FLOAT32), put_u64(file, 3), put(file, array, 12);
    put_text(file, "words"), put_u32(file, GGUF_ARRAY), put_u32(file, GGUF_STRING), put_u64(file, 2), put_text(file, "one"),
        put_text(file, "");
    put_text(file, "none"), put_u32(file, GGUF_ARRAY), put_u32(file, GGUF_INT32), put_u64(file, 0);
    put_tensor(file, "blk.0.w", 8, 3, 32, 2, 3, 64); /* Q8_0, 204 bytes */
    put_tensor(file, "a", GGUF_TYPE_F32, 1, 16, 0, 0, 0);
    put_tensor(file, "future", 250, 2, 7, 9, 0, 128);
    put_tensor(file, "one", GGUF_TYPE_F16, 0, 0, 0, 0, 128);
    put_padding(file, 64);
    for (i = 0; i < sizeof data; i++) data[i] = (unsigned char)i;
    put(file, data, 64 + 204 > sizeof data ? sizeof data : 64 + 204);
    put(file, data, 12);
}

/* From memory of exactly its size, for AddressSanitizer. */
static int open_bytes(gguf_file *file, const void *bytes, size_t size) {
    void *copy = malloc(size ? size : 1);
    FILE *stream;
    int done;
    if (!copy) exit(1);
    memcpy(copy, bytes, size);
    stream = fmemopen(copy, size ? size : 1, "rb");
    if (!stream) exit(1);
    done = gguf_open_stream(file, stream);
    if (!done) free(copy);
    else file->at = (uint64_t)(uintptr_t)copy; /* which nothing reads any more */
    return done;
}

static void close_bytes(gguf_file *file) {
    void *copy = (void *)(uintptr_t)file->at;
    gguf_close(file);
    free(copy);
}

TEST(reads_keys) {
    static const struct { const char *key; uint64_t index; double value; } numbers[] = {
        {"general.alignment", 0, 64}, {"i8", 0, -3}, {"u16", 0, 65535}, {"i16", 0, -2}, {"f32", 0, 0.5}, {"f64", 0, 1e-3},
        {"u64", 0, 1099511627776.0}, {"i64", 0, -5}, {"yes", 0, 1}, {"floats", 0, 1}, {"floats", 2, -4}};
    image memory;
    gguf_file file;
    double number;
    size_t i;
    put_everything(&memory);
    REQUIRE(open_bytes(&file, memory.bytes, memory.size), "%s", file.error);
    CHECK(gguf_text(&file, "general.architecture") && strcmp(gguf_text(&file, "general.architecture"), "llama") == 0,
          "the text is wrong");
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        CHECK(gguf_number(&file, numbers[i].key, numbers[i].index, &number) && number == numbers[i].value, "%s is %g",
              numbers[i].key, number);
    CHECK(!gguf_number(&file, "floats", 3, &number) && !gguf_number(&file, "none", 0, &number) &&
              !gguf_number(&file, "words", 0, &number) && !gguf_number(&file, "x", 0, &number) &&
              !gguf_number(&file, "general.architecture", 0, &number),
          "a number where there is none");
    CHECK(!gguf_text(&file, "words") && !gguf_text(&file, "f32") && !gguf_text(&file, ""), "a text where there is none");
    close_bytes(&file);
}

TEST(reads_tensors) {
    image memory;
    gguf_file file;
    const gguf_tensor *w, *one, *future;
    unsigned char bytes[204];
    put_everything(&memory);
    REQUIRE(open_bytes(&file, memory.bytes, memory.size), "%s", file.error);
    w = gguf_find(&file, "blk.0.w");
    one = gguf_find(&file, "one");
    future = gguf_find(&file, "future");
    REQUIRE(w && one && future && gguf_find(&file, "a") && !gguf_find(&file, "b") && !gguf_find(&file, ""), "names go wrong");
    CHECK(w->info && strcmp(w->info->name, "Q8_0") == 0 && w->rank == 3 && w->shape[0] == 32 && w->shape[1] == 2 &&
              w->shape[2] == 3 && w->shape[3] == 1 && w->size == 204,
          "w is described wrongly");
    CHECK(gguf_read(&file, w, bytes, 0, 204) && bytes[0] == 64 && bytes[1] == 65 && bytes[191] == 255, "w's data are wrong: %s",
          file.error);
    CHECK(gguf_read(&file, w, bytes, 100, 2) && bytes[0] == 164, "a part of w is wrong");
    CHECK(!gguf_read(&file, w, bytes, 100, 105) && !gguf_read(&file, w, bytes, 205, 0), "read beyond a tensor");
    CHECK(one->size == 2 && one->shape[0] == 1, "the single value has %lu bytes", (unsigned long)one->size);
    CHECK(!future->info && future->size == 0, "a type that isn't known has a size");
    close_bytes(&file);
}

TEST(refuses_bad_files) {
    static const char *const messages[] = {"doesn't begin with GGUF",
                                           "version 1",
                                           "version 50331648",
                                           "ends within",
                                           "ends within",
                                           "a name of 0 bytes",
                                           "a name of 65536 bytes",
                                           "0 character",
                                           "unknown type 13",
                                           "unknown type 9",
                                           "array of 4611686018427387904",
                                           "array of 100",
                                           "two keys",
                                           "two tensors",
                                           "5 dimensions",
                                           "no whole blocks",
                                           "overflow",
                                           "overflow",
                                           "overflow",
                                           "isn't aligned",
                                           "beyond the file's end",
                                           "beyond the file's end",
                                           "general.alignment is 0",
                                           "general.alignment is 48",
                                           "general.alignment is 0",
                                           "general.alignment is 131072",
                                           "beyond the file's end"};
    unsigned i;
    for (i = 0; i < sizeof messages / sizeof messages[0]; i++) {
        image memory;
        gguf_file file;
        char name[65536];
        int done;
        put_header(&memory,
                   i == 1   ? 1
                   : i == 2 ? 0x03000000
                            : 3,
                   i == 3    ? UINT64_MAX
                   : i == 13 ? 2
                   : i > 13  ? 1
                             : 0,
                   i == 4                                    ? UINT64_MAX
                   : i == 12                                 ? 2
                   : (i > 4 && i < 12) || (i > 21 && i < 26) ? 1
                                                             : 0);
        switch (i) {
        case 0: memory.bytes[0] = 'g'; break;
        case 5: put_u64(&memory, 0); break;
        case 6: put_u64(&memory, 65536); break;
        case 7: put_u64(&memory, 3), put(&memory, "a\0b", 3); break;
        case 8: put_text(&memory, "a"), put_u32(&memory, 13); break;
        case 9: put_text(&memory, "a"), put_u32(&memory, GGUF_ARRAY), put_u32(&memory, GGUF_ARRAY), put_u64(&memory, 1); break;
        case 10:
            put_text(&memory, "a"), put_u32(&memory, GGUF_ARRAY), put_u32(&memory, GGUF_UINT64), put_u64(&memory, 1ull << 62);
            break;
        case 11: put_text(&memory, "a"), put_u32(&memory, GGUF_ARRAY), put_u32(&memory, GGUF_UINT8), put_u64(&memory, 100); break;
        case 12:
            put_text(&memory, "a"), put_u32(&memory, GGUF_UINT32), put_u32(&memory, 1), put_text(&memory, "a"),
                put_u32(&memory, GGUF_BOOL), put(&memory, "", 1);
            break;
        case 13: put_tensor(&memory, "a", 0, 1, 0, 0, 0, 0), put_tensor(&memory, "a", 0, 1, 0, 0, 0, 0); break;
        case 14: put_tensor(&memory, "a", 0, 5, 1, 1, 1, 0); break;
        case 15: put_tensor(&memory, "a", 12, 1, 32, 0, 0, 0); break;
        case 16: put_tensor(&memory, "a", 0, 3, 1, 1ull << 32, 1ull << 32, 0); break;
        case 17: put_tensor(&memory, "a", 0, 1, 1ull << 62, 0, 0, 0); break;
        case 18: put_tensor(&memory, "a", 0, 2, 1ull << 31, 1ull << 31, 0, 0); break;
        case 19: put_tensor(&memory, "a", 0, 1, 0, 0, 0, 4); break;
        case 20: put_tensor(&memory, "a", 0, 1, 4, 0, 0, 0); break;
        case 21: put_tensor(&memory, "a", 0, 1, 0, 0, 0, ~31ull); break;
        case 22: put_text(&memory, "general.alignment"), put_u32(&memory, GGUF_UINT32), put_u32(&memory, 0); break;
        case 23: put_text(&memory, "general.alignment"), put_u32(&memory, GGUF_UINT32), put_u32(&memory, 48); break;
        case 24: put_text(&memory, "general.alignment"), put_u32(&memory, GGUF_STRING), put_text(&memory, "32"); break;
        case 25: put_text(&memory, "general.alignment"), put_u32(&memory, GGUF_UINT32), put_u32(&memory, 131072); break;
        case 26: put_tensor(&memory, "a", 0, 2, 4, 4, 0, 0), put_padding(&memory, 32), put(&memory, name, 63); break;
        default: break;
        }
        if (i >= 22 && i <= 25) put_tensor(&memory, "a", 0, 1, 0, 0, 0, 0);
        if (i == 6) {
            memset(name, 'a', sizeof name);
            put(&memory, name, 2000);
        }
        done = open_bytes(&file, memory.bytes, memory.size);
        CHECK(!done, "case %u is accepted", i);
        if (!done) CHECK(strstr(file.error, messages[i]) != NULL, "case %u: the message is: %s", i, file.error);
        else close_bytes(&file);
    }
}

TEST(refuses_every_truncation) {
    image memory;
    size_t size;
    put_everything(&memory);
    for (size = 0; size < memory.size; size++) {
        gguf_file file;
        if (!CHECK(!open_bytes(&file, memory.bytes, size), "accepted when cut to %lu bytes", (unsigned long)size))
            close_bytes(&file);
    }
}

/* Damaged files are refused, or all that is read from them lies within the file. */
TEST(survives_random_damage) {
    test_random random;
    unsigned round, accepted = 0;
    random_seed(&random, 1);
    for (round = 0; round < 20000; round++) {
        image memory;
        gguf_file file;
        unsigned changes = 1 + random_below(&random, 4);
        size_t i;
        put_everything(&memory);
        while (changes--) {
            const uint32_t at = random_below(&random, (uint32_t)memory.size);
            memory.bytes[at] = random_below(&random, 2) ? (unsigned char)random_next(&random)
                                                        : (unsigned char)(memory.bytes[at] ^ 1u << random_below(&random, 8));
        }
        if (!open_bytes(&file, memory.bytes, memory.size)) {
            CHECK(file.error[0], "round %u: refused without a message", round);
            continue;
        }
        accepted++;
        for (i = 0; i < file.num_tensors; i++) {
            const gguf_tensor *tensor = &file.tensors[i];
            unsigned char *data = (unsigned char *)malloc(tensor->size ? (size_t)tensor->size : 1);
            CHECK(data && gguf_find(&file, tensor->name) == tensor && gguf_read(&file, tensor, data, 0, (size_t)tensor->size),
                  "round %u: %s", round, file.error);
            free(data);
        }
        for (i = 0; i < file.num_pairs; i++) {
            double number = 0;
            const char *text = gguf_text(&file, file.pairs[i].key);
            CHECK(gguf_number(&file, file.pairs[i].key, file.pairs[i].count - 1, &number) || number == 0, "round %u", round);
            CHECK(!text || strlen(text) < memory.size, "round %u", round);
        }
        close_bytes(&file);
    }
    CHECK(accepted > 0 && accepted < 20000, "%u accepted", accepted); /* damage in data and names goes unseen */
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(reads_keys);
    RUN(reads_tensors);
    RUN(refuses_bad_files);
    RUN(refuses_every_truncation);
    RUN(survives_random_damage);
    return test_end();
}
