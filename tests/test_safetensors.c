/*
  test_safetensors.c: the programs' own tools: the safetensors reader (examples/safetensors.h) and the quantiser
  (examples/quantize.h). Nothing of the library. Run from the repository's root.
*/
#include "support/test.h"

#include "../examples/quantize.h"
#include "../examples/safetensors.h"

/* ---- the reader ---- */

typedef struct image { /* a file in memory; exactly its size, for AddressSanitizer */
    unsigned char *bytes;
    size_t size;
} image;

/* A file with this header and `data_size` bytes of data: 0, 1, 2, ... */
static image image_make(const char *header, size_t data_size) {
    size_t header_size = strlen(header);
    size_t i;
    image file;
    file.size = 8 + header_size + data_size;
    file.bytes = (unsigned char *)malloc(file.size);
    if (!file.bytes) exit(1);
    for (i = 0; i < 8; i++) file.bytes[i] = (unsigned char)((uint64_t)header_size >> (8 * i));
    memcpy(file.bytes + 8, header, header_size);
    for (i = 0; i < data_size; i++) file.bytes[8 + header_size + i] = (unsigned char)i;
    return file;
}

static int parse(safetensors_file *file, const char *header, size_t data_size) {
    image memory = image_make(header, data_size);
    int done = safetensors_parse(file, memory.bytes, memory.size);
    free(memory.bytes);
    return done;
}

static const char valid_header[] =
    "{\"__metadata__\":{\"format\":\"pt\",\"a \\\"quoted\\\" key\":\"\\u00e9\\ud83d\\ude00\\n\"},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[16,28]},"
    "\"a\":{\"shape\":[4],\"data_offsets\":[0,16],\"dtype\":\"F32\"},"
    "\"scalar\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[28,29]},"
    "\"empty\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[28,28]}}   ";

TEST(reads_tensors) {
    safetensors_file file;
    const safetensors_tensor *b;
    REQUIRE(parse(&file, valid_header, 29), "%s", file.error);
    CHECK(file.num_tensors == 4, "%lu tensors", (unsigned long)file.num_tensors);
    b = safetensors_find(&file, "b");
    if (CHECK(b != NULL, "b isn't found")) {
        CHECK(b->dtype == SAFETENSORS_BF16 && b->rank == 2 && b->shape[0] == 2 && b->shape[1] == 3,
              "b is described wrongly");
        CHECK(b->data[0] == 16 && b->end - b->begin == 12, "b's data is in the wrong place");
        CHECK((uintptr_t)b->data % 2 == 0, "b's data isn't aligned");
    }
    CHECK(safetensors_find(&file, "scalar") && safetensors_find(&file, "scalar")->rank == 0, "the scalar is wrong");
    CHECK(safetensors_find(&file, "empty") != NULL, "the empty tensor isn't found");
    CHECK(!safetensors_find(&file, "") && !safetensors_find(&file, "c") && !safetensors_find(&file, "zz"),
          "found what isn't there");
    safetensors_close(&file);
}

TEST(reads_metadata_and_escapes) {
    safetensors_file file;
    const char *value;
    REQUIRE(parse(&file, valid_header, 29), "%s", file.error);
    value = safetensors_metadata(&file, "a \"quoted\" key");
    CHECK(value && strcmp(value, "\xc3\xa9\xf0\x9f\x98\x80\n") == 0, "the value is %s", value ? value : "missing");
    value = safetensors_metadata(&file, "format");
    CHECK(value && strcmp(value, "pt") == 0, "format is %s", value ? value : "missing");
    CHECK(!safetensors_metadata(&file, "b"), "a tensor is taken for metadata");
    safetensors_close(&file);
    REQUIRE(
        parse(&file, "{\"\\/\\\\\\b\\f\\n\\r\\t\\u0041\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1),
        "%s", file.error);
    CHECK(safetensors_find(&file, "/\\\b\f\n\r\tA") != NULL, "the escaped name isn't found");
    safetensors_close(&file);
}

TEST(expects_type_and_shape) {
    safetensors_file file;
    REQUIRE(parse(&file, valid_header, 29), "%s", file.error);
    CHECK(safetensors_expect(&file, "b", SAFETENSORS_BF16, 2, 3, 0) != NULL, "%s", file.error);
    CHECK(!safetensors_expect(&file, "b", SAFETENSORS_F16, 2, 3, 0), "a wrong dtype passes");
    CHECK(!safetensors_expect(&file, "b", SAFETENSORS_BF16, 3, 2, 0), "a wrong shape passes");
    CHECK(!safetensors_expect(&file, "b", SAFETENSORS_BF16, 2, 3, 1), "a wrong rank passes");
    CHECK(strcmp(file.error, "tensor \"b\" is BF16 [2, 3] instead of BF16 [2, 3, 1]") == 0, "the message is: %s",
          file.error);
    CHECK(!safetensors_expect(&file, "c", SAFETENSORS_BF16, 2, 3, 0), "a missing tensor passes");
    safetensors_close(&file);
    REQUIRE(parse(&file, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]}}", 5), "%s", file.error);
    CHECK(!safetensors_expect(&file, "b", SAFETENSORS_F32, 1, 0, 0), "an unaligned tensor passes");
    safetensors_close(&file);
}

TEST(skips_what_it_does_not_know) {
    safetensors_file file;
    REQUIRE(parse(&file, "{ \t\r\n}", 0), "%s", file.error);
    safetensors_close(&file);
    REQUIRE(parse(&file,
                  "{\"a\":{\"x\":{\"y\":[1,-0.5e+3,[],{},{\"z\":[true,false,null,\"s\"]}]},\"dtype\":\"U8\",\"v\":0,"
                  "\"shape\" : [ 2 ] ,\n\"data_offsets\":[0,2]}}",
                  2),
            "%s", file.error);
    CHECK(file.num_tensors == 1, "%lu tensors", (unsigned long)file.num_tensors);
    safetensors_close(&file);
}

#define ENTRY(dtype, shape, offsets) \
    "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" offsets "]}}"
#define NAMED(name, offsets) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[" offsets "]}"

TEST(refuses_bad_headers) {
    static const struct {
        const char *header;
        const char *message; /* a part of it */
    } cases[] = {
        {"[]", "no safetensors file"},
        {"  ", "no safetensors file"},
        {" {}", "no safetensors file"},
        {"{}x", "no valid JSON"},
        {"{},", "no valid JSON"},
        {"{}{}", "no valid JSON"},
        {"{,}", "no valid JSON"},
        {"{\"a\"}", "no valid JSON"},
        {"{\"a\":1}", "object is expected"},
        {"{\"a\":[]}", "object is expected"},
        {"{\"a\":null}", "object is expected"},
        {"{\"a\":{}}", "lacks"},
        {"{" NAMED("a", "0,1") ",}", "no valid JSON"},
        {"{" NAMED("a", "0,1") " " NAMED("b", "1,2") "}", "no valid JSON"},
        {"{" NAMED("a", "0,1"), "no valid JSON"},
        {"{\"a", "no valid JSON"},
        {"{\"a\\", "no valid JSON"},
        {"{\"a\\x\":{}}", "no valid JSON"},
        {"{\"a\n\":{}}", "control character"},
        {"{\"a\":\v{}}", "control character"},
        {"{\"\\u12", "no valid JSON"},
        {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "0 character"},
        {"{\"\\ud800\":{}}", "no valid JSON"},
        {"{\"\\ud800\\u0041\":{}}", "no valid JSON"},
        {"{\"\\udc00\":{}}", "no valid JSON"},
        {"{\"\xff\":{}}", "UTF-8"},
        {"{\"\xc0\x80\":{}}", "UTF-8"},
        {"{\"\xed\xa0\x80\":{}}", "UTF-8"},
        {"{\"\xf4\x90\x80\x80\":{}}", "UTF-8"},
        {"{\"\xe2\x82\":{}}", "UTF-8"},
        {"{\"\xe2", "UTF-8"},
        {"{\"\\\xc3\xa9\":{}}", "UTF-8"},
        {"{\"__metadata__\":1}", "must be an object"},
        {"{\"__metadata__\":{\"a\":1}}", "must be a string"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "second __metadata__"},
        {"{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", "lacks"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", "must be lists"},
        {ENTRY("F31", "1", "0,1"), "unknown dtype \"F31\""},
        {ENTRY("U8", "1", "0,1,2"), "more than 2"},
        {ENTRY("U8", "1", "0"), "two numbers"},
        {ENTRY("U8", "-1", "0,1"), "whole numbers"},
        {ENTRY("U8", "1.5", "0,1"), "whole numbers"},
        {ENTRY("U8", "1e400", "0,1"), "too large"},
        {ENTRY("U8", "1,", "0,1"), "no valid JSON"},
        {ENTRY("U8", "\"1\"", "0,1"), "whole numbers"},
        {ENTRY("U8", "null", "0,1"), "whole numbers"},
        {ENTRY("U8", "[1]", "0,1"), "whole numbers"},
        {ENTRY("U8", "9007199254740992", "0,1"), "too large"},
        {ENTRY("U8", "18446744073709551616", "0,1"), "too large"},
        {ENTRY("F64", "4294967296,4294967296", "0,1"), "overflows"},
        {ENTRY("F64", "1125899906842624,256", "0,0"), "overflows"},
        {ENTRY("U8", "1,1,1,1,1,1,1,1,1", "0,1"), "more than 8"},
        {ENTRY("F32", "1", "0,1"), "don't fit its shape"},
        {ENTRY("F4", "1", "0,1"), "don't fit its shape"},
        {ENTRY("U8", "1", "1,0"), "don't fit its shape"},
        {ENTRY("U8", "2", "0,2"), "is it cut?"},
        {ENTRY("U8", "1", "9007199254740990,9007199254740991"), "is it cut?"},
        {ENTRY("U8", "0", "0,0"), "1 bytes after"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"data_offsets\":[0,1]}}", "twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":tru}}", "no valid JSON"},
        {"{\"a\":{\"x\":[1,]}}", "no valid JSON"},
        {"{" NAMED("a", "0,1") "," NAMED("b", "0,1") "}", "begins at byte 0 instead of 1"},
        {"{" NAMED("a", "0,1") ",\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]}}", "two tensors"},
    };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        safetensors_file file;
        int done = parse(&file, cases[i].header, 1);
        CHECK(!done, "accepted: %s", cases[i].header);
        if (!done) CHECK(strstr(file.error, cases[i].message) != NULL, "%s: %s", cases[i].header, file.error);
        if (done) safetensors_close(&file);
    }
}

/* Whatever stands in a file must not exhaust the stack. */
TEST(refuses_deep_nesting) {
    enum { DEPTH = 1000000 };
    safetensors_file file;
    char *header = (char *)malloc(2 * DEPTH + 16);
    REQUIRE(header != NULL, "out of memory");
    memcpy(header, "{\"a\":", 5);
    memset(header + 5, '[', DEPTH);
    memset(header + 5 + DEPTH, ']', DEPTH);
    memcpy(header + 5 + 2 * DEPTH, "}", 2);
    CHECK(!parse(&file, header, 0) && strstr(file.error, "no valid JSON"), "the message is: %s", file.error);
    free(header);
}

TEST(refuses_a_zero_byte_in_the_header) {
    safetensors_file file;
    image memory = image_make("{}  ", 0);
    memory.bytes[11] = 0;
    CHECK(!safetensors_parse(&file, memory.bytes, memory.size), "accepted");
    free(memory.bytes);
}

TEST(refuses_every_truncation) {
    image whole = image_make(valid_header, 29);
    size_t size;
    for (size = 0; size < whole.size; size++) {
        safetensors_file file;
        unsigned char *cut = (unsigned char *)malloc(size ? size : 1);
        REQUIRE(cut != NULL, "out of memory");
        memcpy(cut, whole.bytes, size);
        if (!CHECK(!safetensors_parse(&file, cut, size), "accepted when cut to %lu bytes", (unsigned long)size)) {
            safetensors_close(&file);
        }
        free(cut);
    }
    free(whole.bytes);
}

/* Damaged files are refused, or what is read from them lies within the file. */
TEST(survives_random_damage) {
    test_random random;
    unsigned round;
    unsigned accepted = 0;
    random_seed(&random, 1);
    for (round = 0; round < 20000; round++) {
        static const char pieces[] = "{}[]\",:\\0123456789eE+-.truefalsnx \x7f\x80\xff";
        image memory = image_make(valid_header, 29);
        unsigned changes = 1 + random_below(&random, 4);
        safetensors_file file;
        size_t i;
        if (round % 16 == 0) { /* nothing but noise */
            for (i = 8; i < memory.size; i++) memory.bytes[i] = (unsigned char)random_next(&random);
        }
        while (changes--) {
            size_t at = random_below(&random, 4) ? 8 + random_below(&random, (uint32_t)sizeof valid_header)
                                                 : random_below(&random, (uint32_t)memory.size);
            memory.bytes[at] = random_below(&random, 2)
                                   ? (unsigned char)pieces[random_below(&random, (uint32_t)sizeof pieces - 1)]
                                   : (unsigned char)random_next(&random);
        }
        if (safetensors_parse(&file, memory.bytes, memory.size)) {
            accepted++;
            for (i = 0; i < file.num_tensors; i++) {
                const safetensors_tensor *tensor = &file.tensors[i];
                CHECK(tensor->begin <= tensor->end && tensor->end <= file.data_size,
                      "round %u: a tensor outside the data", round);
                CHECK(safetensors_find(&file, tensor->name) == tensor, "round %u: a tensor isn't found", round);
            }
            safetensors_close(&file);
        } else {
            CHECK(file.error[0], "round %u: refused without a message", round);
        }
        free(memory.bytes);
    }
    CHECK(accepted > 0 && accepted < 20000, "%u accepted", accepted); /* damage in data and names goes unseen */
}

TEST(reads_files) {
    static const char path[] = "tests/data/gguf.safetensors";
    safetensors_file file, header;
    const safetensors_tensor *whole, *part;
    unsigned char bytes[100];
    REQUIRE(safetensors_open(&file, path), "%s", file.error);
    REQUIRE(safetensors_open_header(&header, path), "%s", header.error);
    CHECK(safetensors_expect(&file, "Q4_0.values", SAFETENSORS_F32, 3, 512, 0) != NULL, "%s", file.error);
    CHECK(safetensors_metadata(&file, "gguf") != NULL, "the metadata are missing");
    whole = safetensors_find(&file, "Q6_K.blocks");
    part = safetensors_find(&header, "Q6_K.blocks");
    REQUIRE(whole && whole->data && part && !part->data, "data where it isn't expected");
    CHECK(safetensors_read(&header, part, bytes, 33, sizeof bytes) && memcmp(bytes, whole->data + 33, sizeof bytes) == 0, "a part differs: %s", header.error);
    CHECK(!safetensors_read(&header, part, bytes, part->end - part->begin - 99, sizeof bytes), "read beyond a tensor");
    CHECK(!safetensors_read(&header, part, bytes, part->end - part->begin + 1, 0), "read behind a tensor");
    safetensors_close(&file);
    safetensors_close(&header);
    CHECK(!safetensors_open(&file, "tests/data/none.safetensors"), "opened a file that isn't there");
    CHECK(strcmp(file.error, "tests/data/none.safetensors can't be opened") == 0, "the message is: %s", file.error);
    CHECK(!safetensors_open(&file, "tests/data/goldens.json"), "opened a file of another kind");
    CHECK(!safetensors_open(&file, "tests/data"), "opened a folder");
}

/* ---- conversions ---- */

TEST(f16_and_bf16_round_trip) {
    uint32_t bits;
    for (bits = 0; bits < 65536; bits++) {
        float half = f16_to_float((uint16_t)bits);
        float brain = bf16_to_float((uint16_t)bits);
        if (half == half) CHECK(f16_from_float(half) == bits, "f16 0x%04x", (unsigned)bits);
        else CHECK((f16_from_float(half) & 0x7fff) > 0x7c00, "f16 NaN 0x%04x", (unsigned)bits);
        if (brain == brain) CHECK(bf16_from_float(brain) == bits, "bf16 0x%04x", (unsigned)bits);
        else CHECK((bf16_from_float(brain) & 0x7fff) > 0x7f80, "bf16 NaN 0x%04x", (unsigned)bits);
    }
}

/* Between two neighbours the midpoint goes to the even one and everything else to the nearer. */
TEST(f16_and_bf16_round_to_nearest_even) {
    uint32_t bits;
    for (bits = 0; bits < 0x7bff; bits++) {
        float low = f16_to_float((uint16_t)bits);
        float middle = low + (f16_to_float((uint16_t)(bits + 1)) - low) / 2;
        uint16_t even = (uint16_t)(bits + (bits & 1));
        CHECK(f16_from_float(middle) == even, "f16 0x%04x: midpoint", (unsigned)bits);
        CHECK(f16_from_float(-middle) == (even | 0x8000), "f16 -0x%04x: midpoint", (unsigned)bits);
        CHECK(f16_from_float(nextafterf(middle, 0.0f)) == bits, "f16 0x%04x: below the midpoint", (unsigned)bits);
        CHECK(f16_from_float(nextafterf(middle, 1e9f)) == bits + 1, "f16 0x%04x: above the midpoint", (unsigned)bits);
    }
    for (bits = 0; bits < 0x7f7f; bits++) {
        uint32_t middle = bits << 16 | 0x8000u;
        CHECK(bf16_from_float(float_from_bits(middle)) == bits + (bits & 1), "bf16 0x%04x: midpoint", (unsigned)bits);
        CHECK(bf16_from_float(float_from_bits(middle - 1)) == bits, "bf16 0x%04x: below the midpoint", (unsigned)bits);
        CHECK(bf16_from_float(float_from_bits(middle + 1)) == bits + 1, "bf16 0x%04x: above the midpoint",
              (unsigned)bits);
    }
    CHECK(f16_from_float(65519.0f) == 0x7bff && f16_from_float(65520.0f) == 0x7c00, "f16 at its limit");
    CHECK(f16_from_float(1e-30f) == 0 && f16_from_float(-1e-30f) == 0x8000, "f16 below its smallest");
}

/* ---- the quantiser ---- */

static double int4_error(const float *matrix, size_t rows, size_t columns, size_t group_size,
                         quantize_dtype scales_dtype) {
    size_t groups = quantize_groups(columns, group_size);
    unsigned char *codes = (unsigned char *)malloc(rows * columns / 2);
    void *scales = malloc(rows * groups * quantize_dtype_size(scales_dtype));
    float *values = (float *)malloc(rows * columns * sizeof(float));
    double error = HUGE_VAL;
    size_t i;
    if (codes && scales && values &&
        quantize_int4(matrix, QUANTIZE_F32, rows, columns, group_size, codes, scales, scales_dtype)) {
        for (i = 0; i < rows * columns; i++) {
            values[i] = quantize_int4_value(codes, scales, scales_dtype, columns, group_size, i / columns, i % columns);
        }
        error = relative_error(values, matrix, rows * columns);
    }
    free(codes);
    free(scales);
    free(values);
    return error;
}

TEST(int4_layout) {
    const float row[8] = {-8, 7, -7, 0, 1, -1, 6, 2}; /* whole numbers: the scale is 1 or -1 */
    unsigned char codes[4] = {0};
    float scale = 0;
    size_t i;
    REQUIRE(quantize_int4(row, QUANTIZE_F32, 1, 8, 0, codes, &scale, QUANTIZE_F32), "refused");
    CHECK(scale == 1.0f, "the scale is %g", (double)scale);
    CHECK(codes[0] == 0xf0 && codes[1] == 0x81 && codes[2] == 0x79 && codes[3] == 0xae,
          "the codes are %02x %02x %02x %02x", (unsigned)codes[0], (unsigned)codes[1], (unsigned)codes[2],
          (unsigned)codes[3]);
    for (i = 0; i < 8; i++) {
        float value = quantize_int4_value(codes, &scale, QUANTIZE_F32, 8, 0, 0, i);
        CHECK(value == row[i], "column %lu is %g", (unsigned long)i, (double)value);
    }
    CHECK(!quantize_int4(row, QUANTIZE_F32, 1, 7, 0, codes, &scale, QUANTIZE_F32), "an odd number of columns passes");
}

TEST(int4_uses_the_longer_side) { /* 8 as -8 with a negative scale: exact, which a scale of 8/7 can't be */
    const float row[4] = {8, -7, 3, -1};
    CHECK(int4_error(row, 1, 4, 0, QUANTIZE_F16) == 0, "the error is %g", int4_error(row, 1, 4, 0, QUANTIZE_F16));
}

TEST(int4_error_of_normal_weights) {
    static const size_t group_sizes[] = {32, 64, 128, 0};
    static const quantize_dtype dtypes[] = {QUANTIZE_F32, QUANTIZE_F16, QUANTIZE_BF16};
    static float matrix[64 * 256];
    test_random random;
    double before = 0;
    size_t i, j;
    random_seed(&random, 2);
    for (i = 0; i < sizeof matrix / sizeof *matrix; i++) matrix[i] = 0.02f * random_normal(&random);
    for (i = 0; i < 4; i++) {
        double error = 0;
        for (j = 0; j < 3; j++) {
            error = int4_error(matrix, 64, 256, group_sizes[i], dtypes[j]);
            CHECK(error < 0.125, "groups of %lu: the error is %.4f", (unsigned long)group_sizes[i], error);
        }
        CHECK(error > before, "groups of %lu: %.4f, no more than with smaller groups", (unsigned long)group_sizes[i],
              error);
        before = error;
    }
    CHECK(int4_error(matrix, 163, 100, 32, QUANTIZE_F16) < 0.125, "a shorter last group goes wrong");
}

TEST(int4_extremes) {
    static const float values[] = {0.0f, 1e-30f, 1e-8f, 65000.0f, 1e6f, 3.4e38f};
    size_t i, j;
    for (i = 0; i < sizeof values / sizeof *values; i++) {
        float row[4];
        unsigned char codes[2] = {0};
        uint16_t scale = 0;
        row[0] = values[i];
        row[1] = -values[i] / 2;
        row[2] = 0;
        row[3] = values[i] / 3;
        REQUIRE(quantize_int4(row, QUANTIZE_F32, 1, 4, 0, codes, &scale, QUANTIZE_F16), "refused");
        for (j = 0; j < 4; j++) {
            float value = quantize_int4_value(codes, &scale, QUANTIZE_F16, 4, 0, 0, j);
            CHECK(fabsf(value) <= 8 * 65504.0f, "%g becomes %g", (double)row[j], (double)value);
            if (row[j] == 0) CHECK(value == 0, "0 becomes %g", (double)value);
        }
    }
}

TEST(int8_error) {
    static float matrix[16 * 128];
    static signed char codes[16 * 128];
    static uint16_t scales[16 * 4];
    static float values[16 * 128];
    static const size_t group_sizes[] = {32, 0};
    test_random random;
    size_t i, g;
    random_seed(&random, 3);
    for (i = 0; i < 16 * 128; i++) matrix[i] = random_normal(&random);
    for (g = 0; g < 2; g++) {
        REQUIRE(quantize_int8(matrix, QUANTIZE_F32, 16, 128, group_sizes[g], codes, scales, QUANTIZE_F16), "refused");
        for (i = 0; i < 16 * 128; i++) {
            values[i] = quantize_int8_value(codes, scales, QUANTIZE_F16, 128, group_sizes[g], i / 128, i % 128);
            CHECK(codes[i] >= -127, "a code is %d", codes[i]);
        }
        CHECK(relative_error(values, matrix, 16 * 128) < 0.008, "the error is %g",
              relative_error(values, matrix, 16 * 128));
    }
}

TEST(reads_bf16_matrices) {
    uint16_t row[4];
    unsigned char codes[2] = {0};
    signed char bytes[4];
    float scale = 0;
    size_t i;
    for (i = 0; i < 4; i++) row[i] = bf16_from_float((float)i - 2.0f);
    REQUIRE(quantize_int4(row, QUANTIZE_BF16, 1, 4, 0, codes, &scale, QUANTIZE_F32), "refused");
    CHECK(fabsf(quantize_int4_value(codes, &scale, QUANTIZE_F32, 4, 0, 0, 0) + 2.0f) < 0.2f, "INT4 goes wrong");
    REQUIRE(quantize_int8(row, QUANTIZE_BF16, 1, 4, 0, bytes, &scale, QUANTIZE_F32), "refused");
    CHECK(bytes[0] == -127 && bytes[2] == 0 && bytes[3] == 64, "INT8 codes are %d %d %d", bytes[0], bytes[2], bytes[3]);
}

/* ---- the harness itself: what every other test relies on ---- */

TEST(relative_error_never_passes_nan) {
    float got[2] = {1, 2};
    float want[2] = {1, 2};
    const float zeros[2] = {0, 0};
    CHECK(relative_error(got, want, 2) == 0, "equal arrays differ");
    got[1] = 2.2f;
    CHECK(fabs(relative_error(got, want, 2) - 0.2 / sqrt(5.0)) < 1e-6, "the error is %g", relative_error(got, want, 2));
    CHECK(!(relative_error(got, zeros, 2) < 1e30), "a bound is met against zeros");
    got[1] = float_from_bits(0x7fc00000u);
    CHECK(!(relative_error(got, want, 2) < 1e30), "a NaN passes");
    CHECK(!(relative_error(want, got, 2) < 1e30), "a NaN that is expected passes");
    got[1] = float_from_bits(0x7f800000u);
    CHECK(!(relative_error(got, got, 2) < 1e30), "an infinity passes");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(reads_tensors);
    RUN(reads_metadata_and_escapes);
    RUN(expects_type_and_shape);
    RUN(skips_what_it_does_not_know);
    RUN(refuses_bad_headers);
    RUN(refuses_deep_nesting);
    RUN(refuses_a_zero_byte_in_the_header);
    RUN(refuses_every_truncation);
    RUN(survives_random_damage);
    RUN(reads_files);
    RUN(f16_and_bf16_round_trip);
    RUN(f16_and_bf16_round_to_nearest_even);
    RUN(int4_layout);
    RUN(int4_uses_the_longer_side);
    RUN(int4_error_of_normal_weights);
    RUN(int4_extremes);
    RUN(int8_error);
    RUN(reads_bf16_matrices);
    RUN(relative_error_never_passes_nan);
    return test_end();
}
