/*
  test.h: a small test harness. A test program includes it once, writes tests, and runs them in order:

      TEST(top_k_is_sorted) {
          CHECK(a < b, "a is %d", a);         counts a failure and goes on; is 1 or 0
          REQUIRE(memory, "out of memory");   leaves the test function at a failure
          if (!gpu) SKIP("no GPU: %s", why);  leaves it, counted as skipped
      }

      int main(int argc, char **argv) {
          test_begin(argc, argv);             arguments: run only the tests whose names contain one of them
          RUN(top_k_is_sorted);
          return test_end();                  0, or 1 when a test failed
      }

  Each test prints one line on stdout: "PASS name", "SKIP name: why", or "FAIL name: file:line: text of the first failed
  check". Checks belong to the main thread: other threads hand their results to it.
*/
#ifndef TEST_H
#define TEST_H

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define TEST_FUNCTION static __attribute__((unused))
#if defined(__MINGW32__)
#define TEST_PRINTF(text, first) __attribute__((format(gnu_printf, text, first)))
#else
#define TEST_PRINTF(text, first) __attribute__((format(printf, text, first)))
#endif
#else
#define TEST_FUNCTION static
#define TEST_PRINTF(text, first)
#endif

#define TEST(name) static void name(void)
#define RUN(name) test_run(#name, name)
#define CHECK(condition, ...) ((condition) ? test_passed() : test_failed(__FILE__, __LINE__, __VA_ARGS__))
#define REQUIRE(condition, ...)                       \
    do {                                              \
        if (!CHECK(condition, __VA_ARGS__)) return;   \
    } while (0)
#define SKIP(...)                \
    do {                         \
        test_skip(__VA_ARGS__);  \
        return;                  \
    } while (0)

typedef struct test_state {
    int num_filters;
    char **filters;
    unsigned passed, failed, skipped; /* tests */
    unsigned failures;                /* checks that failed in the running test */
    int skip;
    char text[512];                   /* of its first failure, or why it is skipped */
} test_state;

static test_state test_current;

TEST_FUNCTION int test_failed(const char *file, int line, const char *format, ...) TEST_PRINTF(3, 4);
TEST_FUNCTION void test_skip(const char *format, ...) TEST_PRINTF(1, 2);

TEST_FUNCTION int test_passed(void) { return 1; }

/* A line is a line: messages that hold several are joined. */
TEST_FUNCTION void test_one_line(char *text) {
    for (; *text; text++) {
        if (*text == '\n' || *text == '\r') *text = ' ';
    }
}

TEST_FUNCTION int test_failed(const char *file, int line, const char *format, ...) {
    char text[400];
    const char *name = file;
    va_list arguments;
    if (test_current.failures++) return 0;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    for (; *file; file++) {
        if (*file == '/' || *file == '\\') name = file + 1;
    }
    snprintf(test_current.text, sizeof test_current.text, "%.80s:%d: %s", name, line, text);
    test_one_line(test_current.text);
    return 0;
}

TEST_FUNCTION void test_skip(const char *format, ...) {
    va_list arguments;
    if (test_current.failures) return; /* a failure counts for more */
    test_current.skip = 1;
    va_start(arguments, format);
    vsnprintf(test_current.text, sizeof test_current.text, format, arguments);
    va_end(arguments);
    test_one_line(test_current.text);
}

TEST_FUNCTION void test_begin(int argc, char **argv) {
    memset(&test_current, 0, sizeof test_current);
    test_current.num_filters = argc > 1 ? argc - 1 : 0;
    test_current.filters = argv + 1;
}

TEST_FUNCTION int test_selected(const char *name) {
    int i;
    for (i = 0; i < test_current.num_filters; i++) {
        if (strstr(name, test_current.filters[i])) return 1;
    }
    return test_current.num_filters == 0;
}

TEST_FUNCTION void test_run(const char *name, void (*function)(void)) {
    if (!test_selected(name)) return;
    test_current.failures = 0;
    test_current.skip = 0;
    test_current.text[0] = 0;
    function();
    if (test_current.failures) {
        test_current.failed++;
        printf("FAIL %s: %s", name, test_current.text);
        if (test_current.failures > 1) printf(" (and %u more)", test_current.failures - 1);
        printf("\n");
    } else if (test_current.skip) {
        test_current.skipped++;
        printf("SKIP %s: %s\n", name, test_current.text);
    } else {
        test_current.passed++;
        printf("PASS %s\n", name);
    }
    fflush(stdout);
}

TEST_FUNCTION int test_end(void) {
    if (test_current.passed + test_current.failed + test_current.skipped == 0) {
        fprintf(stderr, "no test has such a name\n");
        return 1;
    }
    return test_current.failed ? 1 : 0;
}

/* TEST_SIZE=small asks for a selection, as where kernels are emulated. */
TEST_FUNCTION int test_is_small(void) {
    const char *size = getenv("TEST_SIZE");
    return size && strcmp(size, "small") == 0;
}

/* ---- random numbers: the same for a seed on every machine (xorshift64*) ---- */

typedef struct test_random {
    uint64_t state;
} test_random;

TEST_FUNCTION uint64_t random_next(test_random *random) {
    random->state ^= random->state >> 12;
    random->state ^= random->state << 25;
    random->state ^= random->state >> 27;
    return random->state * UINT64_C(2685821657736338717);
}

/* The same numbers in every run, or others for each value of the environment's TEST_SEED. */
TEST_FUNCTION void random_seed(test_random *random, uint64_t seed) {
    const char *extra = getenv("TEST_SEED");
    if (extra) seed += UINT64_C(1000003) * (uint64_t)strtoul(extra, NULL, 10);
    random->state = seed * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x2545f4914f6cdd1d);
    if (random->state == 0) random->state = 1;
    random_next(random);
    random_next(random);
}

/* 0 to limit - 1; limit is at least 1. */
TEST_FUNCTION uint32_t random_below(test_random *random, uint32_t limit) {
    return (uint32_t)(((random_next(random) >> 32) * limit) >> 32);
}

/* [0, 1) */
TEST_FUNCTION float random_uniform(test_random *random) { return (float)(random_next(random) >> 40) / 16777216.0f; }

/* Mean 0, deviation 1. */
TEST_FUNCTION float random_normal(test_random *random) {
    float radius = sqrtf(-2.0f * logf(1.0f - random_uniform(random)));
    return radius * cosf(6.28318531f * random_uniform(random));
}

/* ---- comparisons ---- */

/* |got - want| / |want| in the L2 norm. Infinity when either holds a NaN or an infinity: no bound is ever met. */
TEST_FUNCTION double relative_error(const float *got, const float *want, size_t count) {
    double difference = 0;
    double norm = 0;
    size_t i;
    for (i = 0; i < count; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    if (!(difference <= 1e300) || !(norm <= 1e300)) return HUGE_VAL;
    if (norm > 0) return sqrt(difference / norm);
    return difference > 0 ? HUGE_VAL : 0;
}

/* 1 when all are equal; otherwise a failure that names the first difference. */
#define CHECK_INTS(got, want, count, what) test_same_ints(__FILE__, __LINE__, got, want, count, what)

TEST_FUNCTION int test_same_ints(const char *file, int line, const int32_t *got, const int32_t *want, size_t count,
                                 const char *what) {
    size_t i;
    for (i = 0; i < count; i++) {
        if (got[i] != want[i]) {
            return test_failed(file, line, "%s[%lu] is %ld instead of %ld (%lu in all)", what, (unsigned long)i,
                               (long)got[i], (long)want[i], (unsigned long)count);
        }
    }
    return 1;
}

/* The same for bytes, whatever they mean: for results that must not differ in a single bit. */
#define CHECK_BYTES(got, want, size, what) test_same_bytes(__FILE__, __LINE__, got, want, size, what)

TEST_FUNCTION int test_same_bytes(const char *file, int line, const void *got, const void *want, size_t size,
                                  const char *what) {
    const unsigned char *a = (const unsigned char *)got;
    const unsigned char *b = (const unsigned char *)want;
    size_t i;
    for (i = 0; i < size; i++) {
        if (a[i] != b[i]) {
            return test_failed(file, line, "%s: byte %lu of %lu is 0x%02x instead of 0x%02x", what, (unsigned long)i,
                               (unsigned long)size, (unsigned)a[i], (unsigned)b[i]);
        }
    }
    return 1;
}

#endif /* TEST_H */
