/*
  Planted faults: every kind of mistake that the emulation promises to find, in a kernel of emulation/faults, must be
  found and named whatever the order of threads; the same kernel without the fault must pass. Tests of what the emulation
  computes belong in emulation_test.c. Run in the repository's root.
*/
#include "harness.h"

#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#if !defined(WITH_ASAN)
#define WITH_ASAN 0
#endif

#define COUNT 128
#define SEEDS 8
#define KILLED "the process must die" /* by AddressSanitizer */
#define WRONG "the result must be wrong"

typedef struct fault {
    const char *name;
    unsigned blocks, threads, n;
    int dependent; /* number of dependent launches that follow the first launch */
    const char *expected[3];
} fault;

static const fault faults[] = {
    {"block_barrier", 1, 128, 128, 0, {"kernel fault block (0,0) warp ", "race: ", "no block barrier between"}},
    {"warp_barrier", 1, 128, 128, 0, {"race: ", "of part[", "no warp barrier between"}},
    {"shared_bounds", 1, 64, 64, 0, {"warp 1 lane 31: part[64] at test.cu:", "outside the array of 64", ""}},
    {"global_bounds", 1, 64, 33, 0, {KILLED, "heap-buffer-overflow", "test.cu:9"}},
    {"global_load", 1, 64, 33, 0, {"warp 1 lane 1: access to 4 bytes", "outside every allocation", "test.cu:9"}},
    {"shared_uninitialised", 2, 64, 64, 0, {"block (1,0) warp 1", "read of part[", "never wrote"}},
    {"shared_write_race", 1, 128, 128, 0, {"race: write of count[0]", "and write by warp", "no block barrier between"}},
    {"atomic_race", 1, 128, 128, 0, {"race: ", "atomic addition", "barrier between"}},
    {"partial_collective", 1, 32, 20, 0, {"warp_max at test.cu:", "kernel fault block (0,0) warp 0 lane ", ""}},
    {"partial_barrier", 1, 128, 128, 0, {"block_barrier at test.cu:", "kernel fault", ""}},
    {"different_collectives", 1, 32, 32, 0, {"warp_shuffle_xor at test.cu:", "waits in warp_shuffle_xor at test.cu:", "lane"}},
    {"misaligned_load", 1, 32, 32, 0, {"misaligned access to 16 bytes", "test.cu:10", ""}},
    {"named_barrier_missing", 1, 64, 64, 0, {"race: ", "of part[", "no block barrier between"}},
    {"named_barrier_outsider", 1, 96, 64, 0, {"race: ", "of part[", "no block barrier between"}},
    {"named_barrier_count", 1, 128, 64, 0, {"block_barrier_named(1, ", "while others wait there for ", "test.cu:"}},
    {"named_barrier_deadlock", 1, 128, 64, 0, {"deadlock: waits in block_barrier_named at test.cu:", "", ""}},
    {"named_barrier_partial", 1, 64, 64, 0, {"warp 1 lane ", "block_barrier_named", ""}},
    {"named_barrier_arrival", 1, 64, 64, 0, {"read of part[", "at test.cu:14", ""}},
    {"named_barrier_twice", 1, 64, 64, 0, {"block_barrier_arrive(1, 64) at test.cu:", "the warp has come there before", ""}},
    {"named_barrier_end", 1, 64, 64, 0, {"the block ended while named barrier 3, reached at test.cu:", "wanted more warps", ""}},
    {"named_barrier_id", 1, 64, 64, 0, {"block_barrier_named(16, 64) at test.cu:", "an id is 1 to 15", ""}},
    {"async_copy_wait", 1, 32, 128, 0, {"read of part[", "hasn't waited for its asynchronous copy at test.cu:", ""}},
    {"async_copy_group", 1, 32, 128, 0, {"read of part[", "hasn't waited for its asynchronous copy at test.cu:", ""}},
    {"async_copy_barrier", 1, 32, 128, 0, {"read of part[", "at test.cu:", ""}},
    {"async_copy_overwrite", 1, 32, 128, 0, {"race: write of part[", "and read by", "no warp barrier between"}},
    {"async_copy_alignment", 1, 32, 128, 0, {"copy_async_16 to part[", "is misaligned", ""}},
    {"async_copy_end", 1, 32, 128, 0, {"the thread ends without copy_async_wait", "test.cu:", ""}},
    {"bulk_wait", 1, 32, 64, 0, {"read of words[", "hasn't waited for its asynchronous copy at test.cu:", ""}},
    {"bulk_bytes", 1, 32, 64, 0, {"deadlock: waits in shared_barrier_wait at test.cu:", "", ""}},
    {"bulk_overwrite", 1, 64, 64, 0, {"kernel fault block (0,0) warp ", "at test.cu:", ""}},
    {"bulk_end", 1, 32, 32, 0, {"the block ended while copies were under way to the barrier at words[64]", "test.cu:", ""}},
    {"shared_barrier_start", 1, 64, 64, 0, {"at test.cu:", "", ""}},
    {"warpgroup_overwrite", 1, 128, 128, 0, {"race: write of part[", "and read by warp ", "barrier between"}},
    {"warpgroup_barrier", 1, 128, 128, 0, {"read of part[", "at test.cu:", ""}},
    {"missing_wait", 3, 32, 32, 1, {"block (2,0): ", "without wait_for_previous_kernels", ""}},
    {"early_read", 1, 32, 32, 2, {WRONG, "", ""}},
    {"early_write", 1, 32, 32, 1, {"wrote to memory of the kernels before", "block (0,0)", ""}},
};
#define NUM_FAULTS (sizeof faults / sizeof *faults)

static char *read_source(const char *name) {
    char path[256], *content;
    long size;
    FILE *f;
    snprintf(path, sizeof path, "tests/emulation/faults/%s.cu", name);
    f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET)) {
        printf("FAIL setup: %s can't be read\n", path);
        exit(1);
    }
    content = (char *)calloc((size_t)size + 1, 1);
    if (!content || fread(content, 1, (size_t)size, f) != (size_t)size) exit(1);
    fclose(f);
    return content;
}

typedef struct outcome {
    int result;  /* of the launches, or of the synchronisation after them */
    int correct; /* early_read: the values passed through every launch of the chain */
} outcome;

/* The first launch, then the dependent ones, each from what the one before wrote. */
static outcome run(void *function, const fault *f, unsigned long long seed) {
    int values[COUNT];
    struct {
        address in, out;
        unsigned n;
    } arguments;
    const size_t bytes = sizeof(int) * f->n;
    address buffers[2] = {device_alloc(bytes), device_alloc(bytes)};
    outcome o = {0, 1};
    for (int i = 0; i < COUNT; i++) values[i] = i;
    moer_emulation_set_seed(seed);
    memset(&arguments, 0, sizeof arguments);
    arguments.n = f->n;
    for (int i = 0; i < 2; i++) cuMemcpyHtoD_v2(buffers[i], values, bytes);
    for (int i = 0; i <= f->dependent && !o.result; i++) {
        arguments.in = buffers[i % 2];
        arguments.out = buffers[1 - i % 2];
        if (!strcmp(f->name, "early_write")) arguments.out = buffers[1], arguments.in = buffers[0];
        o.result = launch(function, f->blocks, f->threads, &arguments, NULL, i > 0);
    }
    {
        const int reported = cuCtxSynchronize();
        if (reported != o.result) o.result = -1; /* the failure must be told again, once */
        if (cuCtxSynchronize()) o.result = -2;
    }
    if (!strcmp(f->name, "early_read") && !o.result) {
        cuMemcpyDtoH_v2(values, buffers[(f->dependent + 1) % 2], bytes);
        for (int i = 0; i < (int)f->n; i++) o.correct = o.correct && values[i] == i + f->dependent + 1;
    }
    for (int i = 0; i < 2; i++) cuMemFree_v2(buffers[i]);
    return o;
}

static void *load(const char *source, int is_fault) {
    const char *option = is_fault ? "-DFAULT=1" : "-DFAULT=0";
    return kernel_from(source, "fault", 1, &option);
}

static const char *check_twin(const fault *f, const char *source) {
    void *function = load(source, 0);
    for (unsigned long long seed = 1; seed <= SEEDS; seed++) {
        const outcome o = run(function, f, seed);
        if (o.result) return text("without the fault, seed %llu: error %d: %s", seed, o.result, moer_emulation_last_error());
        if (!o.correct) return text("without the fault, seed %llu: wrong values", seed);
    }
    return NULL;
}

static const char *check_fault(const fault *f, const char *source) {
    void *function = load(source, 1);
    for (unsigned long long seed = 1; seed <= SEEDS; seed++) {
        const unsigned errors = moer_emulation_errors();
        const outcome o = run(function, f, seed);
        if (!strcmp(f->expected[0], WRONG)) {
            if (o.result || o.correct) return text("seed %llu: not seen: error %d, values %s", seed, o.result, o.correct ? "right" : "wrong");
            continue;
        }
        if (o.result != 719) return text("seed %llu: the launch returned %d", seed, o.result);
        if (moer_emulation_errors() != errors + 1) return text("seed %llu: %u errors counted", seed, moer_emulation_errors() - errors);
        for (int i = 0; i < 3; i++)
            if (!strstr(moer_emulation_last_error(), f->expected[i]))
                return text("seed %llu: \"%s\" isn't in: %s", seed, f->expected[i], moer_emulation_last_error());
    }
    return NULL;
}

/* The same in a child process, which has to die; its output is searched for the expected words. */
static const char *check_deadly_fault(const fault *f) {
    static char output[1 << 16];
    size_t size = 0;
    int ends[2], status = 0;
    pid_t child;
    if (pipe(ends)) return "no pipe";
    fflush(stdout);
    child = fork();
    if (child < 0) return "no child process";
    if (!child) {
        /* The driver refuses to work in a child of its process, so the child starts over. */
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "emulation_faults", "--one", f->name, (char *)NULL);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t n; size < sizeof output - 1 && (n = read(ends[0], output + size, sizeof output - 1 - size)) > 0;) size += (size_t)n;
    close(ends[0]);
    output[size] = 0;
    if (waitpid(child, &status, 0) != child || (WIFEXITED(status) && !WEXITSTATUS(status))) return "the process didn't die";
    for (int i = 1; i < 3; i++)
        if (!strstr(output, f->expected[i])) return text("\"%s\" isn't in: %.2000s", f->expected[i], output);
    return NULL;
}

static int run_one(const char *name) {
    for (size_t i = 0; i < NUM_FAULTS; i++)
        if (!strcmp(faults[i].name, name)) {
            char *source = read_source(name);
            run(load(source, 1), &faults[i], 1);
            free(source);
        }
    return 0;
}

int main(int count, char **arguments) {
    harness_open();
    if (count == 3 && !strcmp(arguments[1], "--one")) return run_one(arguments[2]);
    freopen("/dev/null", "w", stderr); /* the errors that are planted here; a failing test prints them itself */
    for (size_t i = 0; i < NUM_FAULTS; i++) {
        const fault *f = &faults[i];
        char *source, name[64];
        const char *why;
        snprintf(name, sizeof name, "fault_%s", f->name);
        if (!WITH_ASAN && !strcmp(f->expected[0], KILLED)) {
            printf("SKIP %s: built without AddressSanitizer\n", name);
            continue;
        }
        source = read_source(f->name);
        why = check_twin(f, source);
        if (!why) why = strcmp(f->expected[0], KILLED) ? check_fault(f, source) : check_deadly_fault(f);
        report(name, why);
        free(source);
    }
    return tests_failed;
}
