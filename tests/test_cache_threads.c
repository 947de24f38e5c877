/*
  test_cache_threads.c: many processes of many threads that start at once on one empty folder: all succeed, each process
  compiles a variant at most once, nobody ever sees a part of a file, and none waits for another. The same over a folder that
  fails as network file systems do. Built once more with ThreadSanitizer. NVRTC, driver and disk are stand-ins.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <sys/wait.h>
#include <time.h>

#include "support/test.h"
#include "support/stand_ins.h"
#include "support/folders.h"

#define NUM_PROCESSES 32
#define NUM_THREADS 16
#define NUM_KINDS 4 /* of layers, which differ in their number of experts */

static moe_route_context_desc at_folder;
static uint64_t seed;

static void begin(void) {
    folder_create();
    stand_in_reset();
    memset(&at_folder, 0, sizeof at_folder);
    at_folder.cache_dir = folder;
}

static moe_route_status create_kind(moe_route_context *context, unsigned kind, moe_route_layer **layer) {
    moe_route_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 16 * (1 + kind);
    desc.router.top_k = 4;
    desc.experts.hidden_size = 64;
    desc.operations = ALL_OPERATIONS;
    return moe_route_layer_create(context, &desc, layer);
}

/* ---- one process ---- */

typedef struct worker {
    moe_route_context *context;
    unsigned number;
    moe_route_status status;
    moe_route_layer *layers[NUM_KINDS];
} worker;

static pthread_mutex_t start_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t start_condition = PTHREAD_COND_INITIALIZER;
static int started;

static void *work(void *user) {
    worker *w = (worker *)user;
    unsigned i;
    pthread_mutex_lock(&start_mutex);
    while (!started) pthread_cond_wait(&start_condition, &start_mutex);
    pthread_mutex_unlock(&start_mutex);
    for (i = 0; i < NUM_KINDS && w->status == MOE_ROUTE_OK; i++) {
        const unsigned kind = (i + w->number) % NUM_KINDS;
        w->status = create_kind(w->context, kind, &w->layers[kind]);
    }
    return NULL;
}

static unsigned count_variants(const moe_route_context *context) {
    const moer_variant *v;
    unsigned count = 0;
    for (v = context->variants; v; v = v->next) count++;
    return count;
}

static void log_nothing(moe_route_log_level level, const char *message, void *user) { (void)level, (void)message, (void)user; }

/* All threads create all layers in one context. 0, or a number that says what is wrong. */
static int run_process(stand_in_device kind) {
    static worker workers[NUM_THREADS];
    moe_route_context_desc desc = at_folder;
    moe_route_context *context = NULL;
    moe_route_statistics statistics;
    pthread_t threads[NUM_THREADS];
    unsigned i, k, variants;
    int wrong = 0;
    desc.device = MOE_ROUTE_DEVICE_COMPILE;
    desc.compile_target = 90;
    desc.logger.log = log_nothing;
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) return 1;
    stand_in_take(context, kind);
    memset(workers, 0, sizeof workers);
    started = 0;
    for (i = 0; i < NUM_THREADS; i++) {
        workers[i].context = context;
        workers[i].number = i;
        if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0) return 2;
    }
    pthread_mutex_lock(&start_mutex);
    started = 1;
    pthread_cond_broadcast(&start_condition);
    pthread_mutex_unlock(&start_mutex);
    for (i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    for (i = 0; i < NUM_THREADS; i++) {
        if (workers[i].status != MOE_ROUTE_OK) wrong = 3;
        for (k = 0; k < NUM_KINDS; k++) { /* all threads share the variants */
            const moe_route_layer *a = workers[i].layers[k], *b = workers[0].layers[k];
            if (!a || !b || a->num_variants != b->num_variants || memcmp(a->variants, b->variants, sizeof a->variants) != 0) wrong = 4;
        }
    }
    variants = count_variants(context);
    moe_route_context_get_statistics(context, &statistics);
    if (variants < 5) wrong = 5;
    if (stand_in.compiles != statistics.compiles || statistics.compiles + statistics.cache_hits != variants) wrong = 6;
    if (!fault.percent && (statistics.rejects || statistics.cache_write_failures)) wrong = 7;
    if (stand_in_count_wrong(context)) wrong = 8;
    for (i = 0; i < NUM_THREADS; i++)
        for (k = 0; k < NUM_KINDS; k++) moe_route_layer_destroy(workers[i].layers[k]);
    moe_route_context_destroy(context);
    return wrong;
}

/* ---- many ---- */

/* Every file that has an entry's name must be a whole entry. 0 when one isn't. */
static int all_entries_are_whole(const char *path) {
    static unsigned char bytes[65536];
    DIR *stream = opendir(path);
    struct dirent *found;
    int whole = 1;
    while (stream && (found = readdir(stream)) != NULL) {
        char below[4096];
        struct stat info;
        const size_t length = strlen(found->d_name);
        if (found->d_name[0] == '.') continue;
        snprintf(below, sizeof below, "%s/%s", path, found->d_name);
        if (lstat(below, &info) == 0 && S_ISDIR(info.st_mode)) {
            whole &= all_entries_are_whole(below);
        } else if (length > 5 && strcmp(found->d_name + length - 5, ".moec") == 0) {
            moer_entry entry;
            const size_t size = read_bytes(below, bytes, sizeof bytes);
            if (size && !moer_entry_parse(bytes, size, &entry)) whole = 0;
        }
    }
    if (stream) closedir(stream);
    return whole;
}

/* Children that wait for the pipe to close, then run; meanwhile the parent looks at the folder. */
static void run_processes(unsigned percent, const char *what) {
    pid_t children[NUM_PROCESSES];
    int gate[2], i, running = NUM_PROCESSES, whole = 1;
    char byte;
    if (!CHECK(pipe(gate) == 0, "no pipe")) return;
    fflush(stdout);
    for (i = 0; i < NUM_PROCESSES; i++) {
        children[i] = fork();
        if (children[i] < 0) {
            CHECK(0, "fork failed");
            exit(1);
        }
        if (children[i] == 0) {
            close(gate[1]);
            if (read(gate[0], &byte, 1) != 0) _exit(100);
            stand_in.compile_microseconds = 500;
            fault.percent = percent;
            fault.state = (unsigned)seed + (unsigned)i * 7919u;
            _exit(run_process(i % 2 ? STAND_IN_GPU : STAND_IN_COMPILE));
        }
    }
    close(gate[0]);
    close(gate[1]);
    while (running > 0) {
        int status = 0;
        const pid_t ended = waitpid(-1, &status, WNOHANG);
        if (ended > 0) {
            running--;
            for (i = 0; i < NUM_PROCESSES && children[i] != ended; i++) {}
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: process %d ended with 0x%x", what, i, (unsigned)status);
        }
        whole &= all_entries_are_whole(folder);
    }
    CHECK(whole, "%s: a file with an entry's name isn't whole", what);
}

TEST(processes_and_threads_start_at_once) {
    outcome o;
    begin();
    run_processes(0, "cold");
    stand_in.missing = 1;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE); /* of 32 experts, as one of the kinds */
    CHECK_CACHED(o, "afterwards, without NVRTC");
    CHECK_TROUBLES(o, 0, "afterwards");
    CHECK(o.statistics.cache_hits == o.num_variants, "%u hits of %u", (unsigned)o.statistics.cache_hits, o.num_variants);
    stand_in.missing = 0;
    run_processes(0, "warm");
    remove_tree(folder);
}

TEST(processes_and_threads_start_on_a_network_file_system) {
    outcome o;
    begin();
    run_processes(20, "20% of all operations fail");
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_RIGHT(o, "afterwards");
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_CACHED(o, "afterwards");
    remove_tree(folder);
}

/* In one process, for ThreadSanitizer above all: cold, warm, and with a limit that every write exceeds. */
TEST(threads_share_a_context) {
    int result;
    begin();
    stand_in.compile_microseconds = 2000;
    result = run_process(STAND_IN_GPU);
    CHECK(result == 0, "cold: %d", result);
    stand_in_reset();
    result = run_process(STAND_IN_COMPILE);
    CHECK(result == 0 && stand_in.compiles == 0, "warm: %d, %u compiled", result, stand_in.compiles);
    remove_tree(folder);
    begin();
    at_folder.cache_limit = 1;
    result = run_process(STAND_IN_GPU);
    CHECK(result == 0, "with a limit of one byte: %d", result);
    remove_tree(folder);
}

/* One thread creates one layer: its variants are still compiled side by side. */
TEST(a_layers_variants_are_compiled_side_by_side) {
    outcome o;
    begin();
    if (moer_processors() < 2) {
        remove_tree(folder);
        SKIP("the machine has one processor");
    }
    stand_in.rendezvous = 2;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK_COMPILED(o, "cold");
    CHECK(stand_in.most_under_way >= 2 && stand_in.compiles == o.num_variants, "at most %u of %u compilations were under way at once", stand_in.most_under_way, stand_in.compiles);
    stand_in.rendezvous = 0;
    stand_in.compile_fails = 1;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK_CACHED(o, "warm");
    at_folder.cache_dir = "off";
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK(o.status == MOE_ROUTE_ERROR_COMPILE && o.num_variants == 0, "compilations that fail: %s", moe_route_status_name(o.status));
    stand_in.missing = 1;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK(o.status == MOE_ROUTE_ERROR_NO_COMPILER, "without NVRTC: %s", moe_route_status_name(o.status));
    CHECK_TROUBLES(o, 1, "without NVRTC"); /* not one for each variant */
    remove_tree(folder);
}

/* A process that is stopped in the middle of writing holds nobody up. */
TEST(nobody_waits_for_a_stopped_process) {
    int state = 0;
    pid_t child;
    outcome o;
    begin();
    fflush(stdout);
    child = fork();
    if (child == 0) {
        fault.kind = FAULT_WRITE;
        fault.at = 2;
        fault.count = 1;
        fault.kill = SIGSTOP;
        o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
        _exit(o.status == MOE_ROUTE_OK && !o.wrong && o.statistics.cache_write_failures == 0 ? 0 : 1);
    }
    CHECK(waitpid(child, &state, WUNTRACED) == child && WIFSTOPPED(state), "the child wasn't stopped: 0x%x", (unsigned)state);
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_RIGHT(o, "beside a stopped process");
    CHECK_TROUBLES(o, 0, "beside a stopped process");
    CHECK(o.statistics.cache_writes > 0, "nothing was written");
    kill(child, SIGCONT);
    CHECK(waitpid(child, &state, 0) == child && WIFEXITED(state) && WEXITSTATUS(state) == 0, "the child ended with 0x%x", (unsigned)state);
    CHECK(all_entries_are_whole(folder), "an entry isn't whole");
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_CACHED(o, "after both");
    remove_tree(folder);
}

/* Threads that ask for a variant whose compilation fails all get the failure, and the next one tries again. */
TEST(a_failed_compilation_is_for_all_that_wait) {
    static worker workers[NUM_THREADS];
    moe_route_context *context = NULL;
    pthread_t threads[NUM_THREADS];
    moe_route_layer *layer = NULL;
    outcome o;
    unsigned i;
    begin();
    memset(&o, 0, sizeof o);
    at_folder.device = MOE_ROUTE_DEVICE_COMPILE;
    at_folder.compile_target = 90;
    REQUIRE(moe_route_context_create(&at_folder, &context) == MOE_ROUTE_OK, "no context");
    stand_in_take(context, STAND_IN_COMPILE);
    stand_in.compile_fails = 1;
    stand_in.compile_microseconds = 3000;
    memset(workers, 0, sizeof workers);
    started = 1;
    for (i = 0; i < NUM_THREADS; i++) {
        workers[i].context = context;
        REQUIRE(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "no thread");
    }
    for (i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    for (i = 0; i < NUM_THREADS; i++) CHECK(workers[i].status == MOE_ROUTE_ERROR_COMPILE, "thread %u: %s", i, moe_route_status_name(workers[i].status));
    CHECK(context->variants == NULL, "a failed variant is still there");
    stand_in.compile_fails = 0;
    CHECK(create_kind(context, 0, &layer) == MOE_ROUTE_OK, "after failures");
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    remove_tree(folder);
}

int main(int argc, char **argv) {
    const char *given = getenv("TEST_SEED");
    test_begin(argc, argv);
    umask(022);
    unsetenv("MOE_ROUTE_CACHE");
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    fprintf(stderr, "TEST_SEED=%llu\n", (unsigned long long)seed);
    RUN(processes_and_threads_start_at_once);
    RUN(processes_and_threads_start_on_a_network_file_system);
    RUN(threads_share_a_context);
    RUN(a_layers_variants_are_compiled_side_by_side);
    RUN(nobody_waits_for_a_stopped_process);
    RUN(a_failed_compilation_is_for_all_that_wait);
    return test_end();
}
