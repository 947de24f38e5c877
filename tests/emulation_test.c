/*
  Tests of the emulation itself: 16-bit floats against a reference that searches all of them, collectives and matrix
  fragments against plain loops, and the rules of the driver (memory, launches, capture, graphs, images) and of NVRTC.
  Mistakes of kernels that it has to find are in emulation_faults.c. Run in the repository's root.
*/
#include "harness.h"
#include "numbers.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t random_state = 88172645463325252ull;
static uint32_t draw(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static char *read_sample(const char *name) {
    char path[256], *content;
    size_t size;
    FILE *f;
    snprintf(path, sizeof path, "tests/emulation/samples/%s.cu", name);
    f = fopen(path, "rb");
    content = (char *)calloc(1 << 16, 1);
    if (!f || !content) {
        printf("FAIL setup: %s can't be read\n", path);
        exit(1);
    }
    size = fread(content, 1, (1 << 16) - 1, f);
    content[size] = 0;
    fclose(f);
    return content;
}

static void *sample(const char *name) {
    char *source = read_sample(name);
    void *function = kernel_from(source, "sample", 0, NULL);
    free(source);
    return function;
}

/* ---- 16-bit floats ---- */
static double decode(unsigned h, int fraction) { /* finite values; by the definition of the format */
    const int bias = (1 << (14 - fraction)) - 1;
    const int exponent = (int)(h >> fraction & ((1u << (15 - fraction)) - 1u));
    const double significand = (double)(h & ((1u << fraction) - 1u)) / (double)(1 << fraction);
    const double magnitude = exponent ? ldexp(1.0 + significand, exponent - bias) : ldexp(significand, 1 - bias);
    return h >> 15 ? -magnitude : magnitude;
}

static unsigned infinity_of(int fraction) { return ((1u << (15 - fraction)) - 1u) << fraction; }

/* By bisection over the positive values, then by distance. The value after the largest stands for infinity. */
static unsigned nearest(double x, int fraction) {
    const unsigned infinity = infinity_of(fraction), sign = signbit(x) ? 0x8000u : 0;
    const double limit = ldexp(1.0, 1 << (14 - fraction)), magnitude = fabs(x);
    unsigned low = 0, high = infinity;
    double below, above;
    if (magnitude >= limit) return sign | infinity;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (decode(middle, fraction) <= magnitude) low = middle;
        else high = middle;
    }
    below = magnitude - decode(low, fraction);
    above = (high == infinity ? limit : decode(high, fraction)) - magnitude;
    if (below != above) return sign | (below < above ? low : high);
    return sign | (low & 1 ? high : low);
}

static int same_float(float a, float b) { return emulation_bits(a) == emulation_bits(b) || (isnan(a) && isnan(b)); }

static const char *test_widening(void) {
    for (unsigned h = 0; h < 65536; h++)
        for (int fraction = 7; fraction <= 10; fraction += 3) {
            const unsigned magnitude = h & 0x7fffu, infinity = infinity_of(fraction);
            const float wide = fraction == 10 ? emulation_f16_to_f32((unsigned short)h) : emulation_bf16_to_f32((unsigned short)h);
            const float expected = magnitude < infinity ? (float)decode(h, fraction) : magnitude > infinity ? NAN : h >> 15 ? -INFINITY : INFINITY;
            const unsigned back = fraction == 10 ? emulation_f32_to_f16(wide) : emulation_f32_to_bf16(wide);
            if (!same_float(wide, expected)) return text("%04x with %d fraction bits gives %a, not %a", h, fraction, wide, expected);
            if (back != (magnitude > infinity ? 0x7fffu : h)) return text("%04x with %d fraction bits comes back as %04x", h, fraction, back);
        }
    return NULL;
}

static const char *check_narrowing(float f) {
    const unsigned f16 = isnan(f) ? 0x7fffu : nearest(f, 10), bf16 = isnan(f) ? 0x7fffu : nearest(f, 7);
    if (emulation_f32_to_f16(f) != f16) return text("%a as f16 gives %04x, not %04x", f, emulation_f32_to_f16(f), f16);
    if (emulation_f32_to_bf16(f) != bf16) return text("%a as bf16 gives %04x, not %04x", f, emulation_f32_to_bf16(f), bf16);
    return NULL;
}

static const char *test_narrowing(void) {
    const char *why = NULL;
    for (unsigned i = 0; i < 400000 && !why; i++) why = check_narrowing(emulation_float(draw()));
    for (unsigned i = 0; i < 400000 && !why; i++) /* the exponents of f16 and their neighbours */
        why = check_narrowing(emulation_float((draw() & 0x807fffffu) | (100u + draw() % 45u) << 23));
    for (unsigned h = 0; h < 65536 && !why; h++) /* midpoints, and the floats beside them */
        for (int fraction = 7; fraction <= 10 && !why; fraction += 3) {
            if ((h & 0x7fffu) + 1 >= infinity_of(fraction)) continue;
            const float middle = (float)(0.5 * (decode(h, fraction) + decode(h + 1, fraction)));
            why = check_narrowing(middle);
            if (!why) why = check_narrowing(nextafterf(middle, INFINITY));
            if (!why) why = check_narrowing(nextafterf(middle, -INFINITY));
        }
    if (!why) why = check_narrowing(65519.996f);
    if (!why) why = check_narrowing(65520.0f);
    return why;
}

/* Multiples of 2^-48 hold every product and sum of f16 exactly. */
static __int128 fixed(double x) { return (__int128)ldexp(x, 48); }

static unsigned nearest_fixed(__int128 x, int negative_zero) {
    const unsigned sign = x < 0 || (x == 0 && negative_zero) ? 0x8000u : 0;
    const __int128 magnitude = x < 0 ? -x : x;
    unsigned low = 0, high = 0x7c00;
    __int128 below, above;
    if (magnitude >= (__int128)65536 << 48) return sign | 0x7c00u;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (fixed(decode(middle, 10)) <= magnitude) low = middle;
        else high = middle;
    }
    below = magnitude - fixed(decode(low, 10));
    above = (high == 0x7c00 ? (__int128)65536 << 48 : fixed(decode(high, 10))) - magnitude;
    if (below != above) return sign | (below < above ? low : high);
    return sign | (low & 1 ? high : low);
}

static const char *test_f16_arithmetic(void) {
    for (unsigned i = 0; i < 300000; i++) {
        const unsigned a = draw() & 0xffffu, b = draw() & 0xffffu;
        unsigned c = draw() & 0xffffu, expected;
        __int128 product;
        if ((a & 0x7fff) >= 0x7c00 || (b & 0x7fff) >= 0x7c00 || (c & 0x7fff) >= 0x7c00) continue;
        if (i % 3 == 0) c &= 0x83ffu; /* subnormal */
        product = fixed(decode(a, 10) * decode(b, 10));
        expected = nearest_fixed(product + fixed(decode(c, 10)), ((a ^ b) & 0x8000u) && (c & 0x8000u));
        if (emulation_f16_fma((unsigned short)a, (unsigned short)b, (unsigned short)c) != expected)
            return text("%04x * %04x + %04x gives %04x, not %04x", a, b, c,
                        emulation_f16_fma((unsigned short)a, (unsigned short)b, (unsigned short)c), expected);
        expected = nearest_fixed(fixed(decode(a, 10)) - fixed(decode(b, 10)), (a & 0x8000u) && !(b & 0x8000u));
        if (emulation_f16_sub((unsigned short)a, (unsigned short)b) != expected)
            return text("%04x - %04x gives %04x, not %04x", a, b, emulation_f16_sub((unsigned short)a, (unsigned short)b), expected);
    }
    return NULL;
}

static const char *test_bf16_fma(void) {
    static const struct {
        unsigned short a, b, c, expected;
    } cases[] = {
        {0x3f81, 0x3fc0, 0x0000, 0x3fc2}, /* 1.0078125 * 1.5, halfway between 3fc1 and 3fc2: to even */
        {0x3f81, 0x3fc0, 0x0080, 0x3fc2}, /* + 2^-126 */
        {0x3f81, 0x3fc0, 0x8080, 0x3fc1}, /* - 2^-126 */
        {0x3f83, 0x3fc0, 0x0000, 0x3fc4}, /* halfway between 3fc4 and 3fc5 */
        {0x3f83, 0x3fc0, 0x0001, 0x3fc5}, /* + the smallest */
        {0x3f83, 0x3fc0, 0x8001, 0x3fc4},
        {0xbf83, 0x3fc0, 0x8001, 0xbfc5},
        {0x0001, 0x3f00, 0x0000, 0x0000}, /* half of the smallest: to even */
        {0x0001, 0x3f01, 0x0000, 0x0001},
        {0x7f7f, 0x4000, 0x0000, 0x7f80}, /* overflow */
        {0x7f80, 0x0000, 0x3f80, 0x7fff}, /* inf * 0 */
        {0x3f80, 0x3f80, 0xbf80, 0x0000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const unsigned got = emulation_bf16_fma(cases[i].a, cases[i].b, cases[i].c);
        if (got != cases[i].expected)
            return text("%04x * %04x + %04x gives %04x, not %04x", cases[i].a, cases[i].b, cases[i].c, got, cases[i].expected);
    }
    return NULL;
}

static const char *test_device_conversions(void) {
    void *function = sample("conversions");
    static uint32_t wide[2][65536], packed[65536];
    static uint16_t narrow[2][65536];
    struct {
        address from_f16, from_bf16, to_f16, to_bf16, packed;
    } arguments = {device_alloc(sizeof wide[0]), device_alloc(sizeof wide[1]), device_alloc(sizeof narrow[0]),
                   device_alloc(sizeof narrow[1]), device_alloc(sizeof packed)};
    if (launch(function, 256, 256, &arguments, NULL, 0) || cuMemcpyDtoH_v2(wide[0], arguments.from_f16, sizeof wide[0]) ||
        cuMemcpyDtoH_v2(wide[1], arguments.from_bf16, sizeof wide[1]) ||
        cuMemcpyDtoH_v2(narrow[0], arguments.to_f16, sizeof narrow[0]) ||
        cuMemcpyDtoH_v2(narrow[1], arguments.to_bf16, sizeof narrow[1]) || cuMemcpyDtoH_v2(packed, arguments.packed, sizeof packed))
        return "launch or copy failed";
    for (unsigned h = 0; h < 65536; h++) {
        const float f16 = emulation_f16_to_f32((unsigned short)h), bf16 = emulation_bf16_to_f32((unsigned short)h);
        if (wide[0][h] != emulation_bits(f16) || wide[1][h] != emulation_bits(bf16) ||
            narrow[0][h] != emulation_f32_to_f16(f16) || narrow[1][h] != emulation_f32_to_bf16(bf16) ||
            packed[h] != ((uint32_t)emulation_f32_to_f16(bf16) << 16 | emulation_f32_to_f16(f16)))
            return text("%04x", h);
    }
    cuMemFree_v2(arguments.from_f16);
    cuMemFree_v2(arguments.from_bf16);
    cuMemFree_v2(arguments.to_f16);
    cuMemFree_v2(arguments.to_bf16);
    cuMemFree_v2(arguments.packed);
    return NULL;
}

/* ---- collectives, fragments, shared memory ---- */
static const char *test_collectives(void) {
    void *function = sample("collectives");
    uint32_t in[64], out[12 * 64];
    struct {
        address in, out;
    } arguments = {device_alloc(sizeof in), device_alloc(sizeof out)};
    for (unsigned i = 0; i < 64; i++) in[i] = draw();
    cuMemcpyHtoD_v2(arguments.in, in, sizeof in);
    for (unsigned long long seed = 1; seed <= 20; seed++) {
        moer_emulation_set_seed(seed);
        if (launch(function, 1, 64, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.out, sizeof out)) return "launch failed";
        for (unsigned i = 0; i < 64; i++) {
            const uint32_t *warp = in + i / 32 * 32;
            const unsigned lane = i % 32;
            uint32_t expected[12] = {0, 0xffffffffu, 0, 0, warp[(lane * 7 + 3) % 32], warp[lane ^ 5], lane < 3 ? warp[lane] : warp[lane - 3], 0, 0, 0, 0, 0};
            for (unsigned j = 0; j < 32; j++) {
                if (warp[j] > expected[0]) expected[0] = warp[j];
                if (warp[j] < expected[1]) expected[1] = warp[j];
                expected[2] |= (warp[j] & 1u) << j;
                expected[3] |= (uint32_t)((warp[j] & 3) == (in[i] & 3)) << j;
                expected[7] += in[i] >> j & 1;
                expected[9] += warp[j];
            }
            expected[8] = (in[i] & 0xffu) | 0x07u << 8 | (in[i] >> 8 & 0xffu) << 16 | 0x06u << 24;
            expected[10] = (in[i] > 0x80000000u ? 8u : 7u) << 16 | 7u;
            expected[11] = (in[i] & 1 && in[i] != 0 ? 8u : 7u) << 16 | 7u;
            for (unsigned c = 0; c < 12; c++)
                if (out[c * 64 + i] != expected[c]) return text("result %u of thread %u is %08x, not %08x", c, i, out[c * 64 + i], expected[c]);
        }
    }
    cuMemFree_v2(arguments.in);
    cuMemFree_v2(arguments.out);
    return NULL;
}

static const char *test_matrix(void) {
    void *function = sample("matrix");
    uint16_t a[16][16], b[8][16];
    float c[16][8], out[16][8];
    struct {
        address a, b, c;
        unsigned is_bf16;
    } arguments = {device_alloc(sizeof a), device_alloc(sizeof b), device_alloc(sizeof c), 0};
    for (unsigned is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        unsigned short (*narrow)(float) = is_bf16 ? emulation_f32_to_bf16 : emulation_f32_to_f16;
        float (*wide)(unsigned short) = is_bf16 ? emulation_bf16_to_f32 : emulation_f16_to_f32;
        for (unsigned i = 0; i < 256; i++) a[i / 16][i % 16] = narrow((float)((int)(draw() % 2001) - 1000) / 256.0f);
        for (unsigned i = 0; i < 128; i++) b[i / 16][i % 16] = narrow((float)((int)(draw() % 2001) - 1000) / 512.0f);
        for (unsigned i = 0; i < 128; i++) c[i / 8][i % 8] = (float)((int)(draw() % 2001) - 1000);
        arguments.is_bf16 = is_bf16;
        cuMemcpyHtoD_v2(arguments.a, a, sizeof a);
        cuMemcpyHtoD_v2(arguments.b, b, sizeof b);
        cuMemcpyHtoD_v2(arguments.c, c, sizeof c);
        if (launch(function, 1, 32, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.c, sizeof out)) return "launch failed";
        for (unsigned i = 0; i < 16; i++)
            for (unsigned j = 0; j < 8; j++) {
                double sum = c[i][j];
                for (unsigned k = 0; k < 16; k++) sum += (double)wide(a[i][k]) * (double)wide(b[j][k]);
                if (out[i][j] != (float)sum) return text("bf16 %u: c[%u][%u] is %a, not %a", is_bf16, i, j, out[i][j], (float)sum);
            }
    }
    cuMemFree_v2(arguments.a);
    cuMemFree_v2(arguments.b);
    cuMemFree_v2(arguments.c);
    return NULL;
}

static const char *test_warpgroup(void) {
    void *function = sample("warpgroup");
    static uint16_t a[64][64], b[32][64];
    static float out[64][32];
    uint32_t transposed[32];
    struct {
        address a, b, c, transposed;
        unsigned is_bf16;
    } arguments = {device_alloc(sizeof a), device_alloc(sizeof b), device_alloc(sizeof out), device_alloc(sizeof transposed), 0};
    for (unsigned is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        unsigned short (*narrow)(float) = is_bf16 ? emulation_f32_to_bf16 : emulation_f32_to_f16;
        float (*wide)(unsigned short) = is_bf16 ? emulation_bf16_to_f32 : emulation_f16_to_f32;
        for (unsigned i = 0; i < 64 * 64; i++) a[i / 64][i % 64] = narrow((float)((int)(draw() % 201) - 100)); /* small integers: every sum is exact */
        for (unsigned i = 0; i < 32 * 64; i++) b[i / 64][i % 64] = narrow((float)((int)(draw() % 201) - 100));
        arguments.is_bf16 = is_bf16;
        cuMemcpyHtoD_v2(arguments.a, a, sizeof a);
        cuMemcpyHtoD_v2(arguments.b, b, sizeof b);
        if (launch(function, 1, 128, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.c, sizeof out) || cuMemcpyDtoH_v2(transposed, arguments.transposed, sizeof transposed))
            return "launch failed";
        for (unsigned i = 0; i < 64; i++)
            for (unsigned j = 0; j < 32; j++) {
                float sum = 0;
                for (unsigned k = 0; k < 64; k++) sum += 2 * wide(a[i][k]) * wide(b[j][k]);
                if (out[i][j] != sum) return text("bf16 %u: c[%u][%u] is %a, not %a", is_bf16, i, j, out[i][j], sum);
            }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        const unsigned g = lane / 4, t = lane % 4, wanted = (t * 2 * 8 + g) | ((t * 2 + 1) * 8 + g) << 16;
        if (transposed[lane] != wanted) return text("lane %u has %x of the transposed matrix, not %x", lane, transposed[lane], wanted);
    }
    cuMemFree_v2(arguments.a);
    cuMemFree_v2(arguments.b);
    cuMemFree_v2(arguments.c);
    cuMemFree_v2(arguments.transposed);
    return NULL;
}

static const char *test_shared(void) {
    void *function = sample("shared");
    int in[64], out[64], bytes = 0, limit = 0, blocks = 0;
    struct {
        address in, out;
    } arguments = {device_alloc(sizeof in), device_alloc(sizeof out)};
    for (int i = 0; i < 64; i++) in[i] = i * 3;
    cuMemcpyHtoD_v2(arguments.in, in, sizeof in);
    for (unsigned long long seed = 1; seed <= 20; seed++) {
        moer_emulation_set_seed(seed);
        if (launch(function, 3, 64, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.out, sizeof out))
            return text("launch failed: %s", moer_emulation_last_error());
        for (int i = 0; i < 64; i++) {
            const int other = in[63 - i] + (i < 32 ? in[i] : 0), value = (in[i] + 5) ^ 1, four = in[i / 4 * 4] + in[i / 4 * 4 + 3];
            const int expected = other + 2 * value + (63 - i) + 2 + four + 64 * 63 / 2 + 100000 * (63 - i > 0);
            if (out[i] != expected) return text("seed %llu: out[%d] is %d, not %d", seed, i, out[i], expected);
        }
    }
    if (cuFuncGetAttribute(&bytes, 1, function) || bytes != 256 + 256 + 512 + 16 + 128) return text("%d bytes of shared memory", bytes);
    if (cuFuncGetAttribute(&limit, 0, function) || limit != 64) return text("%d threads at most", limit);
    if (cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 64, 0) || blocks != 32) return text("%d blocks at once", blocks);
    if (cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 64, 49152) || blocks != 4) return text("%d large blocks at once", blocks);
    if (!cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 96, 0)) return "blocks larger than the kernel's are counted";
    cuMemFree_v2(arguments.in);
    cuMemFree_v2(arguments.out);
    return NULL;
}

/* Warps that hand over through named barriers; the fifth takes no part. */
static const char *test_named_barriers(void) {
    void *function = sample("named");
    int in[4 * 64], out[64];
    struct {
        address in, out;
    } arguments = {device_alloc(sizeof in), device_alloc(sizeof out)};
    for (int i = 0; i < 4 * 64; i++) in[i] = (int)(draw() % 1000);
    cuMemcpyHtoD_v2(arguments.in, in, sizeof in);
    for (unsigned long long seed = 1; seed <= 20; seed++) {
        moer_emulation_set_seed(seed);
        if (launch(function, 2, 160, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.out, sizeof out))
            return text("seed %llu: launch failed: %s", seed, moer_emulation_last_error());
        for (int i = 0; i < 64; i++) {
            int expected = 0;
            for (int round = 0; round < 4; round++) expected += (round + 1) * in[round * 64 + (i ^ 31)];
            if (out[i] != expected) return text("seed %llu: out[%d] is %d, not %d", seed, i, out[i], expected);
        }
    }
    cuMemFree_v2(arguments.in);
    cuMemFree_v2(arguments.out);
    return NULL;
}

/* Every thread takes a number from the counter of its block, and adds to that of all blocks. */
static const char *test_atomics(void) {
    void *function = sample("atomics");
    long long count;
    int out[192], bits[6];
    struct {
        address count, out, bits;
    } arguments = {device_alloc(sizeof count), device_alloc(sizeof out), device_alloc(sizeof bits)};
    for (unsigned long long seed = 1; seed <= 20; seed++) {
        int taken[192] = {0};
        moer_emulation_set_seed(seed);
        cuMemsetD8_v2(arguments.count, 0, sizeof count);
        if (launch(function, 3, 64, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.out, sizeof out) ||
            cuMemcpyDtoH_v2(&count, arguments.count, sizeof count) || cuMemcpyDtoH_v2(bits, arguments.bits, sizeof bits))
            return text("seed %llu: launch failed: %s", seed, moer_emulation_last_error());
        for (int i = 0; i < 6; i++)
            if (bits[i] != 0x55555555) return text("seed %llu: bits[%d] are %08x", seed, i, (unsigned)bits[i]);
        if (count != 192 * (3ll << 31)) return text("seed %llu: the count is %lld", seed, count);
        for (int i = 0; i < 192; i++) {
            const int number = out[i];
            if (number < 0 || number >= 64 || taken[i / 64 * 64 + number]++) return text("seed %llu: out[%d] is %d", seed, i, number);
        }
    }
    cuMemFree_v2(arguments.count);
    cuMemFree_v2(arguments.out);
    cuMemFree_v2(arguments.bits);
    return NULL;
}

/* Tiles of 256 words, of which the next one is on its way while one is read. */
static const char *test_async_copies(const char *name) {
    enum { TILES = 5 };
    void *function = sample(name);
    uint32_t in[TILES * 256], out[64];
    struct {
        address in, out;
        unsigned tiles;
    } arguments = {device_alloc(sizeof in), device_alloc(sizeof out), TILES};
    for (int i = 0; i < TILES * 256; i++) in[i] = draw();
    cuMemcpyHtoD_v2(arguments.in, in, sizeof in);
    for (unsigned long long seed = 1; seed <= 20; seed++) {
        moer_emulation_set_seed(seed);
        if (launch(function, 2, 64, &arguments, NULL, 0) || cuMemcpyDtoH_v2(out, arguments.out, sizeof out))
            return text("seed %llu: launch failed: %s", seed, moer_emulation_last_error());
        for (unsigned i = 0; i < 64; i++) {
            uint32_t expected = 0;
            for (unsigned tile = 0; tile < TILES; tile++) expected = expected * 3 + in[tile * 256 + 255 - i * 4];
            if (out[i] != expected) return text("seed %llu: out[%u] is %08x, not %08x", seed, i, out[i], expected);
        }
    }
    cuMemFree_v2(arguments.in);
    cuMemFree_v2(arguments.out);
    return NULL;
}

/* ---- the driver ---- */
#define EXPECT(call, expected)                                                              \
    do {                                                                                    \
        const int got = (call);                                                             \
        if (got != (expected)) return text("line %d: %s is %d, not %d", __LINE__, #call, got, (expected)); \
    } while (0)

typedef struct add_args {
    address values;
    int amount;
    unsigned n;
} add_args;

static const char *test_memory(void) {
    unsigned char bytes[300];
    address memory = device_alloc(300), other = device_alloc(1);
    if (memory % 256 || other % 256) return "allocations aren't aligned to 256 bytes";
    EXPECT(cuMemcpyDtoH_v2(bytes, memory, 300), 0);
    for (int i = 0; i < 300; i++)
        if (bytes[i] != 0xa5) return "new memory isn't poisoned";
    EXPECT(cuMemsetD8_v2(memory + 10, 7, 5), 0);
    EXPECT(cuMemcpyDtoH_v2(bytes, memory, 300), 0);
    if (bytes[9] != 0xa5 || bytes[10] != 7 || bytes[14] != 7 || bytes[15] != 0xa5) return "cuMemsetD8 sets other bytes";
    EXPECT(cuMemcpyDtoH_v2(bytes, memory + 1, 300), 1);
    EXPECT(cuMemcpyHtoD_v2(memory + 300, bytes, 1), 1);
    EXPECT(cuMemcpyHtoD_v2((address)(uintptr_t)bytes, bytes, 1), 1);
    EXPECT(cuMemsetD8_v2(memory, 0, 301), 1);
    EXPECT(cuMemFree_v2(memory + 1), 1);
    EXPECT(cuMemFree_v2(memory), 0);
    EXPECT(cuMemFree_v2(memory), 1);
    EXPECT(cuMemFree_v2(other), 0);
    EXPECT(cuMemAlloc_v2(&memory, 0), 1);
    return NULL;
}

static const char *test_launches(void) {
    void *function = sample("add"), *context;
    int values[100], value;
    add_args arguments = {device_alloc(sizeof values), 3, 100};
    unsigned long long launches;
    memset(values, 0, sizeof values);
    EXPECT(cuMemcpyHtoD_v2(arguments.values, values, sizeof values), 0);
    EXPECT(launch(function, 2, 64, &arguments, NULL, 0), 0);
    EXPECT(launch(function, 2, 64, &arguments, NULL, 1), 0);
    EXPECT(cuMemcpyDtoH_v2(values, arguments.values, sizeof values), 0);
    for (int i = 0; i < 100; i++)
        if (values[i] != 6) return text("values[%d] is %d", i, values[i]);
    launches = moer_emulation_launches();
    EXPECT(launch(function, 2, 48, &arguments, NULL, 0), 1);
    EXPECT(launch(function, 2, 96, &arguments, NULL, 0), 1);
    EXPECT(launch(function, 0, 64, &arguments, NULL, 0), 1);
    EXPECT(launch(&value, 1, 64, &arguments, NULL, 0), 400);
    EXPECT(launch(function, 1, 64, &arguments, &value, 0), 400);
    if (moer_emulation_launches() != launches) return "a refused launch ran";
    EXPECT(cuCtxPopCurrent_v2(&context), 0);
    EXPECT(launch(function, 1, 64, &arguments, NULL, 0), 201);
    EXPECT(cuMemAlloc_v2(&arguments.values, 16), 201);
    EXPECT(cuCtxPushCurrent_v2(context), 0);
    EXPECT(cuDeviceGetAttribute(&value, 75, 0), 0);
    EXPECT(value, 9);
    EXPECT(cuDeviceGetAttribute(&value, 16, 0), 0);
    EXPECT(value, 4);
    EXPECT(cuMemFree_v2(arguments.values), 0);
    return NULL;
}

static const char *test_graphs(void) {
    void *function = sample("add"), *stream, *graph, *exec;
    int values[100], copied[100], status;
    add_args arguments = {device_alloc(sizeof values), 3, 100};
    EXPECT(cuStreamCreate(&stream, 1), 0);
    EXPECT(cuMemsetD8_v2(arguments.values, 0, sizeof values), 0);
    EXPECT(cuStreamBeginCapture_v2(stream, 0), 0);
    EXPECT(cuStreamIsCapturing(stream, &status), 0);
    EXPECT(status, 1);
    EXPECT(launch(function, 2, 64, &arguments, stream, 0), 0);
    arguments.amount = 10;
    EXPECT(launch(function, 2, 64, &arguments, stream, 1), 0);
    EXPECT(cuMemcpyDtoHAsync_v2(copied, arguments.values, sizeof copied, stream), 0);
    EXPECT(cuMemsetD8Async(arguments.values, 0, 4, stream), 0);
    arguments.amount = 1000; /* the graph has its own copy */
    EXPECT(cuStreamEndCapture(stream, &graph), 0);
    EXPECT(cuMemcpyDtoH_v2(values, arguments.values, sizeof values), 0);
    EXPECT(values[0], 0); /* nothing has run */
    EXPECT(cuGraphInstantiateWithFlags(&exec, graph, 0), 0);
    EXPECT(cuGraphDestroy(graph), 0);
    for (int i = 1; i <= 3; i++) {
        EXPECT(cuGraphLaunch(exec, stream), 0);
        EXPECT(cuStreamSynchronize(stream), 0);
        EXPECT(copied[0], 13);
        EXPECT(copied[1], 13 * i);
        EXPECT(copied[99], 13 * i);
    }
    EXPECT(cuGraphExecDestroy(exec), 0);
    EXPECT(cuGraphExecDestroy(exec), 400);
    EXPECT(cuStreamDestroy_v2(stream), 0);
    EXPECT(cuMemFree_v2(arguments.values), 0);
    return NULL;
}

static int allocate_for_thread(void) {
    address memory;
    const int result = cuMemAlloc_v2(&memory, 16);
    if (!result) cuMemFree_v2(memory);
    return result;
}

static void *other_thread(void *result) {
    void *context;
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxPushCurrent_v2(context);
    *(int *)result = allocate_for_thread();
    return NULL;
}

/* What an allocation gives during a capture in `mode`, by a thread in `thread_mode`, and then the end of the capture. */
static const char *capture_case(void *stream, int mode, int thread_mode, int expected) {
    void *graph;
    int before = thread_mode;
    EXPECT(cuStreamBeginCapture_v2(stream, mode), 0);
    EXPECT(cuThreadExchangeStreamCaptureMode(&before), 0);
    EXPECT(allocate_for_thread(), expected);
    EXPECT(cuThreadExchangeStreamCaptureMode(&before), 0);
    EXPECT(cuStreamEndCapture(stream, &graph), expected ? 901 : 0);
    if (!expected) EXPECT(cuGraphDestroy(graph), 0);
    return NULL;
}

static const char *test_capture_rules(void) {
    char *source = read_sample("add"), *code, *log = NULL;
    void *function = sample("add"), *stream, *graph, *library, *kernel, *lazy;
    add_args arguments = {device_alloc(16), 1, 4};
    int modes[3][3] = {{900, 900, 0}, {900, 900, 0}, {0, 0, 0}}, values[4], from_thread;
    size_t size;
    const char *why;
    pthread_t thread;
    EXPECT(cuStreamCreate(&stream, 0), 0);
    for (int mode = 0; mode < 3; mode++)
        for (int thread_mode = 0; thread_mode < 3; thread_mode++)
            if ((why = capture_case(stream, mode, thread_mode, modes[mode][thread_mode]))) return why;

    EXPECT(cuStreamBeginCapture_v2(stream, 0), 0); /* another thread: a global capture binds it too */
    pthread_create(&thread, NULL, other_thread, &from_thread);
    pthread_join(thread, NULL);
    EXPECT(from_thread, 900);
    EXPECT(cuStreamEndCapture(stream, &graph), 901);
    EXPECT(cuStreamBeginCapture_v2(stream, 1), 0); /* a thread's own doesn't */
    pthread_create(&thread, NULL, other_thread, &from_thread);
    pthread_join(thread, NULL);
    EXPECT(from_thread, 0);
    EXPECT(cuStreamEndCapture(stream, &graph), 0);
    EXPECT(cuGraphDestroy(graph), 0);

    EXPECT(cuStreamBeginCapture_v2(stream, 2), 0); /* waiting for the captured stream is illegal in every mode */
    EXPECT(cuStreamSynchronize(stream), 900);
    EXPECT(launch(function, 1, 64, &arguments, stream, 0), 901);
    EXPECT(cuStreamEndCapture(stream, &graph), 901);

    EXPECT(cuStreamBeginCapture_v2(stream, 2), 0); /* the default stream depends on a blocking one */
    EXPECT(launch(function, 1, 64, &arguments, NULL, 0), 906);
    EXPECT(cuStreamEndCapture(stream, &graph), 901);

    EXPECT(cuStreamBeginCapture_v2(stream, 0), 0);
    EXPECT(cuMemcpyDtoH_v2(values, arguments.values, sizeof values), 900);
    EXPECT(cuStreamEndCapture(stream, &graph), 901);

    EXPECT(compile(source, 0, NULL, &code, &size, &log), 0);
    EXPECT(cuStreamBeginCapture_v2(stream, 0), 0);
    EXPECT(cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0), 900);
    EXPECT(cuStreamEndCapture(stream, &graph), 901);
    EXPECT(cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0), 0);
    EXPECT(cuLibraryGetKernel(&kernel, library, "sample"), 0);
    EXPECT(cuKernelGetFunction(&lazy, kernel), 0);
    EXPECT(cuStreamBeginCapture_v2(stream, 0), 0); /* a kernel that the driver has yet to load */
    EXPECT(launch(lazy, 1, 64, &arguments, stream, 0), 900);
    EXPECT(cuStreamEndCapture(stream, &graph), 901);

    EXPECT(cuStreamBeginCapture_v2(NULL, 0), 900);
    EXPECT(cuStreamEndCapture(stream, &graph), 401);
    EXPECT(cuLibraryUnload(library), 0);
    EXPECT(cuStreamDestroy_v2(stream), 0);
    EXPECT(cuMemFree_v2(arguments.values), 0);
    free(source);
    free(code);
    free(log);
    return NULL;
}

static const char *test_events(void) {
    void *start, *end;
    float milliseconds = -1.0f;
    EXPECT(cuEventCreate(&start, 0), 0);
    EXPECT(cuEventCreate(&end, 0), 0);
    EXPECT(cuEventElapsedTime_v2(&milliseconds, start, end), 400);
    EXPECT(cuEventRecord(start, NULL), 0);
    EXPECT(cuEventRecord(end, NULL), 0);
    EXPECT(cuEventSynchronize(end), 0);
    EXPECT(cuEventElapsedTime_v2(&milliseconds, start, end), 0);
    if (!(milliseconds >= 0.0f)) return "negative time";
    EXPECT(cuEventDestroy_v2(start), 0);
    EXPECT(cuEventDestroy_v2(end), 0);
    return NULL;
}

static const char *test_images(void) {
    char *source = read_sample("add"), *code, *log = NULL;
    const char *options[1];
    void *library, *kernel;
    size_t size;
    static const struct {
        const char *option;
        int expected;
    } targets[] = {{"--gpu-architecture=sm_90", 0}, {"--gpu-architecture=sm_89", 209}, {"--gpu-architecture=sm_100", 209},
                   {"--gpu-architecture=compute_80", 0}, {"--gpu-architecture=compute_100", 209}};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        options[0] = targets[i].option;
        EXPECT(compile(source, 1, options, &code, &size, &log), 0);
        EXPECT(cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0), targets[i].expected);
        if (!targets[i].expected) {
            EXPECT(cuLibraryGetKernel(&kernel, library, "nothing"), 500);
            EXPECT(cuLibraryUnload(library), 0);
            EXPECT(cuLibraryUnload(library), 400);
        }
        code[18] = (char)190; /* the machine number of CUDA */
        EXPECT(cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0), 200);
        code[0] = 0;
        EXPECT(cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0), 200);
        free(code);
        free(log);
    }
    free(source);
    return NULL;
}

static const char *test_compiler(void) {
    char *code, *log = NULL;
    const char *options[1] = {"--gpu-architecture=sm_93"};
    size_t size;
    int major, minor;
    EXPECT(nvrtcVersion(&major, &minor), 0);
    EXPECT(major * 1000 + minor * 10, 13000);
    EXPECT(compile("#include \"device.h\"\nint broken(\n", 0, NULL, &code, &size, &log), 6);
    if (!log || !strstr(log, "test.cu:") || !strstr(log, "error")) return text("log: %s", log ? log : "none");
    free(log);
    log = NULL;
    EXPECT(compile("#include \"device.h\"\n", 1, options, &code, &size, &log), 5);
    free(log);
    log = NULL;
    options[0] = "--no-such-option";
    EXPECT(compile("#include \"device.h\"\n", 1, options, &code, &size, &log), 5);
    free(log);
    log = NULL;
    options[0] = "-DFOO=a b";
    EXPECT(compile("#include \"device.h\"\n#define TEXT(x) #x\n#define VALUE(x) TEXT(x)\nstatic_assert(VALUE(FOO)[1] == ' ');\n"
                   "static_assert(__CUDA_ARCH__ == 900);\n", 1, options, &code, &size, &log), 0);
    free(code);
    free(log);
    return NULL;
}

/* After a fork the driver can't be used. */
static const char *test_fork(void) {
    int status = 0;
    const pid_t child = fork();
    if (!child) {
        address memory;
        _exit(cuMemAlloc_v2(&memory, 16) == 3 && cuInit(0) == 3 ? 0 : 1);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status) return "the child could use the driver";
    return NULL;
}

/* The order of threads and blocks is that of the seed. */
static const char *test_seeds(void) {
    char *source = read_sample("order");
    void *function = kernel_from(source, "sample", 0, NULL);
    int orders[3][64];
    address memory = device_alloc(sizeof orders[0] + sizeof(int)), arguments = memory;
    int different = 0;
    free(source);
    for (int i = 0; i < 3; i++) {
        EXPECT(cuMemsetD8_v2(memory, 0, sizeof orders[0] + sizeof(int)), 0);
        moer_emulation_set_seed(i < 2 ? 5 : 6);
        EXPECT(launch(function, 4, 64, &arguments, NULL, 0), 0);
        EXPECT(cuMemcpyDtoH_v2(orders[i], memory + sizeof(int), sizeof orders[i]), 0);
    }
    if (memcmp(orders[0], orders[1], sizeof orders[0])) return "one seed, two orders";
    if (!memcmp(orders[0], orders[2], sizeof orders[0])) return "two seeds, one order";
    for (int i = 0; i < 64; i++) different += orders[0][i] != i;
    if (!different) return "threads run in the order of their numbers";
    EXPECT(cuMemFree_v2(memory), 0);
    return NULL;
}

int main(void) {
    harness_open();
    report("emulation_widening", test_widening());
    report("emulation_narrowing", test_narrowing());
    report("emulation_f16_arithmetic", test_f16_arithmetic());
    report("emulation_bf16_fma", test_bf16_fma());
    report("emulation_device_conversions", test_device_conversions());
    report("emulation_collectives", test_collectives());
    report("emulation_matrix", test_matrix());
    report("emulation_warpgroup", test_warpgroup());
    report("emulation_shared", test_shared());
    report("emulation_named_barriers", test_named_barriers());
    report("emulation_atomics", test_atomics());
    report("emulation_async_copies", test_async_copies("async"));
    report("emulation_bulk_copies", test_async_copies("bulk"));
    report("emulation_memory", test_memory());
    report("emulation_launches", test_launches());
    report("emulation_graphs", test_graphs());
    report("emulation_capture_rules", test_capture_rules());
    report("emulation_events", test_events());
    report("emulation_images", test_images());
    report("emulation_compiler", test_compiler());
    report("emulation_fork", test_fork());
    report("emulation_seeds", test_seeds());
    return tests_failed;
}
