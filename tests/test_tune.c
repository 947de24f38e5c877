/*
  test_tune.c: moe_route_layer_tune and what is kept of it: that the fastest kernels are chosen, found again in this process and
  from disk, and change no bit; that nothing is kept of a damaged file or after a failure; and that bad arguments are refused.
  A clock that only launches move stands in for the driver's events, so that a test says what is fastest.
  TEST_DEVICE chooses the device; on the CPU backend, where nothing is chosen, most is skipped.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "support/folders.h"

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof((array)[0])))
#define NEEDS_A_GPU if (device.kind == MOE_ROUTE_DEVICE_CPU) SKIP("the CPU backend chooses nothing")

static test_device device;

/* Up to 8 tokens are a small batch, of 512 pairs; 16 take tiles of 64 rows without tuning. Rows of 36 inputs go through grouped.cu on every GPU. */
static const model_spec small_spec = {.num_experts = 70, .top_k = 64, .num_local = 60, .hidden_size = 32, .intermediate_size = 36, .dtype = MOE_ROUTE_BF16, .format = MOE_ROUTE_FORMAT_BF16,
                                      .max_tokens = 16, .operations = MOE_ROUTE_OPERATION_LAYER};

/* ---- a clock ---- */

typedef struct kernel_time {
    const char *kernel;   /* "moe_route_down" */
    double launch, block; /* microseconds of a launch, and of each of its blocks */
} kernel_time;

static struct {
    moer_driver driver; /* the real one */
    moe_route_context *context;
    const kernel_time *times; /* ends with a NULL name */
    double now, captured;     /* microseconds; of the graph that was captured last */
    int capturing, num_captured; /* launches */
    struct mock_event { moer_cu_event event; double time; } events[2]; /* as they were created */
    int alive; /* streams, events and graphs */
    int calls, fail_at; /* driver calls of tuning so far, and the one that fails, from 1; 0: none. The last one is a wait whose failure means nothing */
    int copies, spoil;  /* results fetched so far; 1: every second of them is spoilt */
} mock;

static int mock_fails(void) { return ++mock.calls == mock.fail_at; }

static double mock_time(const moer_cu_launch_config *config, moer_cu_function function) {
    const moer_variant *variant;
    const kernel_time *t;
    int i;
    for (variant = mock.context->variants; variant; variant = variant->next)
        for (i = 0; i < MOER_MAX_ENTRIES && variant->family->entries[i]; i++)
            for (t = mock.times; variant->functions[i] == function && t->kernel; t++)
                if (strcmp(t->kernel, variant->family->entries[i]) == 0) return t->launch + t->block * config->grid[0] * config->grid[1];
    return 0;
}

static moer_cu_result MOER_CUDA_CALL mock_launch(const moer_cu_launch_config *config, moer_cu_function function, void **parameters, void **extra) {
    const int alike = mock.capturing && mock.num_captured++ > 0; /* of the launches of a capture one may fail: they are many */
    const moer_cu_result result = !alike && mock_fails() ? 1 : mock.driver.cuLaunchKernelEx(config, function, parameters, extra);
    *(mock.capturing ? &mock.captured : &mock.now) += mock_time(config, function);
    return result;
}
static moer_cu_result MOER_CUDA_CALL mock_upload(moe_route_address to, const void *from, size_t size, moe_route_stream stream) { return mock_fails() ? 1 : mock.driver.cuMemcpyHtoDAsync(to, from, size, stream); }
static moer_cu_result MOER_CUDA_CALL mock_download(void *to, moe_route_address from, size_t size, moe_route_stream stream) {
    const moer_cu_result result = mock_fails() ? 1 : mock.driver.cuMemcpyDtoHAsync(to, from, size, stream);
    if (mock.driver.cuStreamSynchronize(stream) == 0 && mock.spoil && ++mock.copies % 2 == 0) ((char *)to)[size - 1] ^= 1;
    return result;
}
static moer_cu_result MOER_CUDA_CALL mock_stream_create(moe_route_stream *stream, unsigned flags) {
    const moer_cu_result result = mock_fails() ? 1 : mock.driver.cuStreamCreate(stream, flags);
    mock.alive += result == 0;
    return result;
}
static moer_cu_result MOER_CUDA_CALL mock_stream_destroy(moe_route_stream stream) { return mock.alive--, mock.driver.cuStreamDestroy(stream); }
static moer_cu_result MOER_CUDA_CALL mock_synchronize(moe_route_stream stream) { return mock_fails() ? 1 : mock.driver.cuStreamSynchronize(stream); }
static moer_cu_result MOER_CUDA_CALL mock_begin(moe_route_stream stream, int mode) {
    const moer_cu_result result = mock_fails() ? 1 : mock.driver.cuStreamBeginCapture(stream, mode);
    mock.capturing = result == 0;
    mock.captured = mock.num_captured = 0;
    return result;
}
static moer_cu_result MOER_CUDA_CALL mock_end(moe_route_stream stream, moer_cu_graph *graph) {
    const moer_cu_result result = mock.driver.cuStreamEndCapture(stream, graph);
    mock.capturing = 0;
    mock.alive += result == 0;
    return mock_fails() ? 1 : result;
}
static moer_cu_result MOER_CUDA_CALL mock_instantiate(moer_cu_graph_exec *exec, moer_cu_graph graph, unsigned long long flags) {
    const moer_cu_result result = mock_fails() ? 1 : mock.driver.cuGraphInstantiateWithFlags(exec, graph, flags);
    mock.alive += result == 0;
    return result;
}
static moer_cu_result MOER_CUDA_CALL mock_graph(moer_cu_graph_exec exec, moe_route_stream stream) {
    (void)exec, (void)stream; /* what it would compute nobody looks at */
    mock.now += mock.captured;
    return mock_fails();
}
static moer_cu_result MOER_CUDA_CALL mock_exec_destroy(moer_cu_graph_exec exec) { return mock.alive--, mock.driver.cuGraphExecDestroy(exec); }
static moer_cu_result MOER_CUDA_CALL mock_graph_destroy(moer_cu_graph graph) { return mock.alive--, mock.driver.cuGraphDestroy(graph); }
static moer_cu_result MOER_CUDA_CALL mock_event_create(moer_cu_event *event, unsigned flags) {
    const moer_cu_result result = mock_fails() ? 1 : mock.driver.cuEventCreate(event, flags);
    mock.alive += result == 0;
    mock.events[0] = mock.events[1];
    mock.events[1].event = result == 0 ? *event : NULL;
    return result;
}
static moer_cu_result MOER_CUDA_CALL mock_event_destroy(moer_cu_event event) { return mock.alive--, mock.driver.cuEventDestroy(event); }
static moer_cu_result MOER_CUDA_CALL mock_record(moer_cu_event event, moe_route_stream stream) {
    mock.events[mock.events[0].event == event ? 0 : 1].time = mock.now;
    return mock_fails() ? 1 : mock.driver.cuEventRecord(event, stream);
}
static moer_cu_result MOER_CUDA_CALL mock_wait(moer_cu_event event) { return mock_fails() ? 1 : mock.driver.cuEventSynchronize(event); }
static moer_cu_result MOER_CUDA_CALL mock_elapsed(float *milliseconds, moer_cu_event start, moer_cu_event end) {
    const int first = mock.events[0].event == start ? 0 : 1;
    (void)end;
    *milliseconds = (float)((mock.events[1 - first].time - mock.events[first].time) * 1e-3);
    return mock_fails();
}

/* The context's driver becomes the mock. */
static void mock_open(moe_route_context *context, const kernel_time *times) {
    moer_driver *driver = &context->driver;
    memset(&mock, 0, sizeof mock);
    mock.driver = *driver;
    mock.context = context;
    mock.times = times;
    driver->cuLaunchKernelEx = mock_launch;
    driver->cuMemcpyHtoDAsync = mock_upload;
    driver->cuMemcpyDtoHAsync = mock_download;
    driver->cuStreamCreate = mock_stream_create;
    driver->cuStreamDestroy = mock_stream_destroy;
    driver->cuStreamSynchronize = mock_synchronize;
    driver->cuStreamBeginCapture = mock_begin;
    driver->cuStreamEndCapture = mock_end;
    driver->cuGraphInstantiateWithFlags = mock_instantiate;
    driver->cuGraphLaunch = mock_graph;
    driver->cuGraphExecDestroy = mock_exec_destroy;
    driver->cuGraphDestroy = mock_graph_destroy;
    driver->cuEventCreate = mock_event_create;
    driver->cuEventDestroy = mock_event_destroy;
    driver->cuEventRecord = mock_record;
    driver->cuEventSynchronize = mock_wait;
    driver->cuEventElapsedTime = mock_elapsed;
}

static void mock_close(void) {
    CHECK(mock.alive == 0, "%d streams, events and graphs are left", mock.alive);
    mock.context->driver = mock.driver;
}

/* The fused kernel takes 10 ms whatever the batch; apart, it is 6 ms plus 1 ms for
   each token (a block of combine.cu). Large tiles need fewer blocks. */
static const kernel_time growing[] = {{"moe_route_down", 10000, 0}, {"moe_route_combine", 6000, 1000}, {"moe_route_grouped", 0, 1000}, {NULL, 0, 0}};
/* Here small tiles are the fastest, and nothing beats the fused kernel. */
static const kernel_time shrinking[] = {{"moe_route_down", 6000, 0}, {"moe_route_combine", 6000, 0}, {"moe_route_grouped", 400000, -1000}, {NULL, 0, 0}};
/* So short that many calls and replays are made. */
static const kernel_time quick[] = {{"moe_route_down", 20, 0}, {"moe_route_combine", 5, 0}, {NULL, 0, 0}};

/* ---- contexts and layers ---- */

/* A context like the device's, with a cache folder of its own, which takes kernels from the environment's. */
static moe_route_context *open_context(const char *cache_dir) {
    const char *code = getenv("MOE_ROUTE_CACHE_DIR");
    moe_route_context_desc desc;
    moe_route_context *context;
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_GPU;
    desc.cuda_context = device.gpu.context;
    desc.cache_dir = cache_dir;
    desc.cache_read_only_dirs = &code;
    desc.num_cache_read_only_dirs = code != NULL;
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) device_die("no second context");
    return context;
}

static const char *message_of(const moe_route_context *context) {
    static char text[512];
    moe_route_message(context, text, sizeof text);
    return text;
}

typedef struct tuned_model {
    model m;
    device_buffer memory;
    moe_route_tune_args args;
    uint32_t steps, num_steps;
} tuned_model;

static void count_step(const moe_route_tune_step *step, void *user) {
    tuned_model *t = (tuned_model *)user;
    CHECK(step->step == ++t->steps && step->step <= step->num_steps, "step %u of %u comes as number %u", step->step, step->num_steps, t->steps);
    CHECK(step->choice && step->choice[0] && step->num_tokens >= 1 && step->microseconds >= 0, "step %u says nothing", step->step);
    t->num_steps = step->num_steps;
}

static void tuned_create(const model_spec *spec, tuned_model *t) {
    memset(t, 0, sizeof *t);
    model_create(&device, spec, 11, &t->m);
    t->args.progress = count_step;
    t->args.user = t;
    CHECK(moe_route_layer_tune_workspace_size(device.context, &t->m.desc, &t->args.workspace_size) == MOE_ROUTE_OK, "%s", device_message(&device));
    t->memory = device_create_workspace(&device, t->args.workspace_size);
    t->args.workspace = t->memory.address;
}

static void tuned_destroy(tuned_model *t) {
    device_destroy(&device, &t->memory);
    model_destroy(&device, &t->m);
}

/* Tunes in a context; returns how many measurements that took. */
static uint32_t tune(tuned_model *t, moe_route_context *context, const kernel_time *times) {
    t->steps = 0;
    mock_open(context, times);
    CHECK(moe_route_layer_tune(context, &t->m.desc, &t->args) == MOE_ROUTE_OK, "%s", message_of(context));
    mock_close();
    CHECK(t->steps == 0 || t->steps == t->num_steps, "%u of %u steps", t->steps, t->num_steps);
    return t->steps;
}

/* The layer as it is in a context: `tuned` 1 when it was tuned, and "fused" or "apart" or the rows of a tile at each number of tokens. */
typedef struct expected_choice {
    uint32_t num_tokens;
    const char *choice; /* the last kernel, or a constant of the last but one */
} expected_choice;

static void check_choices(tuned_model *t, moe_route_context *context, int tuned, const expected_choice *expected, uint32_t count, const char *what) {
    static moe_route_plan plan;
    moe_route_layer *layer;
    uint32_t i;
    REQUIRE(moe_route_layer_create(context, &t->m.desc, &layer) == MOE_ROUTE_OK, "%s: %s", what, message_of(context));
    for (i = 0; i < count; i++) {
        const moe_route_launch_info *last;
        char text[64];
        snprintf(text, sizeof text, "%s ", expected[i].choice);
        CHECK(moe_route_layer_explain(layer, MOE_ROUTE_OPERATION_LAYER, expected[i].num_tokens, &plan) == MOE_ROUTE_OK, "%s", message_of(context));
        CHECK(plan.tuned == tuned, "%s: tuned is %d", what, plan.tuned);
        last = &plan.launches[plan.num_launches - 1];
        CHECK(strcmp(last->kernel, expected[i].choice) == 0 || strstr(last[-1].variant, text), "%s: %u tokens don't take %s: %s after %s", what, expected[i].num_tokens, expected[i].choice,
              last->kernel, last[-1].variant);
    }
    moe_route_layer_destroy(layer);
}

static const expected_choice untuned_choices[] = {{1, "down"}, {8, "down"}, {9, "TILE_ROWS=32"}, {16, "TILE_ROWS=64"}};
/* 6 + 2 against 10 ms; 6 + 4; and the largest tile from 9 tokens on. */
static const expected_choice growing_choices[] = {{1, "combine"}, {2, "combine"}, {3, "down"}, {8, "down"}, {9, "TILE_ROWS=128"}, {16, "TILE_ROWS=128"}};
static const expected_choice shrinking_choices[] = {{1, "down"}, {8, "down"}, {9, "TILE_ROWS=32"}, {16, "TILE_ROWS=32"}};
static const expected_choice overridden_choices[] = {{1, "combine"}, {8, "combine"}, {9, "TILE_ROWS=64"}, {16, "TILE_ROWS=64"}};
#define CHOICES(list) list, COUNT(list)

typedef struct found_entry {
    char path[4096];
    uint32_t count;
    const char *kernel;
} found_entry;

static void find_entry(const moe_route_cache_entry *entry, void *user) {
    found_entry *found = (found_entry *)user;
    if (!entry->sound || strcmp(entry->kernel, found->kernel) != 0) return;
    found->count++;
    snprintf(found->path, sizeof found->path, "%s", entry->path);
}

static uint32_t entries_of(moe_route_context *context, const char *kernel, found_entry *found) {
    memset(found, 0, sizeof *found);
    found->kernel = kernel;
    CHECK(moe_route_cache_list(context, find_entry, found) == MOE_ROUTE_OK, "%s", message_of(context));
    return found->count;
}

/* ---- tests ---- */

TEST(tuning_chooses_the_fastest_and_keeps_it) {
    tuned_model t;
    found_entry entry;
    moe_route_statistics statistics;
    moe_route_context *context, *later;
    moe_route_layer_desc other;
    moe_route_layer *layer;
    uint32_t steps;
    NEEDS_A_GPU;
    folder_create();
    context = open_context(folder);
    tuned_create(&small_spec, &t);
    check_choices(&t, context, 0, CHOICES(untuned_choices), "untuned");
    steps = tune(&t, context, growing);
    CHECK(steps == 4 * 3 + 4, "%u steps", steps); /* 1, 2, 4 and 8 tokens: before, apart, after; 16: two other tiles */
    check_choices(&t, context, 1, CHOICES(growing_choices), "tuned");
    CHECK(tune(&t, context, shrinking) == 0, "it measures what is kept");
    t.args.again = 1;
    CHECK(tune(&t, context, shrinking) == steps, "it doesn't measure again");
    check_choices(&t, context, 1, CHOICES(shrinking_choices), "tuned again");
    CHECK(entries_of(context, "tuning", &entry) == 1, "%u files", entry.count);

    t.m.desc.fused_combine = MOE_ROUTE_OFF; /* what a description overrides is neither kept nor replaced by what is */
    t.m.desc.grouped_rows = 64;
    check_choices(&t, context, 1, CHOICES(overridden_choices), "overridden");
    t.args.again = 1;
    CHECK(tune(&t, context, shrinking) == steps, "overrides keep choices from being measured");
    t.m.desc.fused_combine = MOE_ROUTE_AUTO;
    t.m.desc.grouped_rows = 0;
    check_choices(&t, context, 1, CHOICES(shrinking_choices), "tuned with overrides");

    later = open_context(folder); /* as another process */
    t.args.again = 0;
    CHECK(tune(&t, later, growing) == 0, "it measures what is on disk");
    check_choices(&t, later, 1, CHOICES(shrinking_choices), "tuned before");
    moe_route_context_get_statistics(later, &statistics);
    CHECK(statistics.rejects == 0 && statistics.compiles == 0, "%u rejected, %u compiled", (unsigned)statistics.rejects, (unsigned)statistics.compiles);

    other = t.m.desc; /* nothing is kept for it */
    other.max_tokens = 15;
    other.tuned = MOE_ROUTE_ON;
    CHECK(moe_route_layer_create(later, &other, &layer) == MOE_ROUTE_ERROR_NOT_PREPARED && strstr(message_of(later), "tuned is ON") && strstr(message_of(later), "moe_route_layer_tune"), "%s", message_of(later));
    t.m.desc.tuned = MOE_ROUTE_ON;
    check_choices(&t, later, 1, CHOICES(shrinking_choices), "tuned ON");
    t.m.desc.tuned = MOE_ROUTE_OFF;
    check_choices(&t, later, 0, CHOICES(untuned_choices), "tuned OFF");
    moe_route_context_destroy(later);
    moe_route_context_destroy(context);
    tuned_destroy(&t);
    remove_tree(folder);
}

/* An engine may ask one of its layers for the size of a workspace that all share. */
TEST(no_size_depends_on_tuning) {
    tuned_model t;
    moe_route_context *context;
    moe_route_layer *layer;
    uint32_t i, round;
    size_t sizes[2][17];
    NEEDS_A_GPU;
    tuned_create(&small_spec, &t);
    context = open_context("off");
    for (round = 0; round < 2; round++) {
        if (round) tune(&t, context, growing);
        REQUIRE(moe_route_layer_create(context, &t.m.desc, &layer) == MOE_ROUTE_OK, "%s", message_of(context));
        for (i = 0; i <= 16; i++) {
            CHECK(moe_route_layer_workspace_size(layer, i, &sizes[round][i]) == MOE_ROUTE_OK, "%s", message_of(context));
            CHECK(i == 0 || sizes[round][i] >= sizes[round][i - 1], "%u tokens need less than %u", i, i - 1);
            CHECK(sizes[round][i] == sizes[0][i], "%u tokens need %lu bytes, and tuned %lu", i, (unsigned long)sizes[0][i], (unsigned long)sizes[round][i]);
        }
        moe_route_layer_destroy(layer);
    }
    moe_route_context_destroy(context);
    tuned_destroy(&t);
}

TEST(tuning_without_a_folder_lasts_as_long_as_the_context) {
    tuned_model t;
    moe_route_context *context, *later;
    NEEDS_A_GPU;
    tuned_create(&small_spec, &t);
    context = open_context("off");
    tune(&t, context, growing);
    check_choices(&t, context, 1, CHOICES(growing_choices), "the same context");
    later = open_context("off");
    check_choices(&t, later, 0, CHOICES(untuned_choices), "another context");
    moe_route_context_destroy(later);
    moe_route_context_destroy(context);
    tuned_destroy(&t);
}

/* The choice of tiles is below. */
TEST(tuning_changes_no_bit) {
    static const uint32_t sizes[] = {1, 2, 5, 8, 9, 16};
    tuned_model t;
    test_device on = device;
    model tuned;
    model_input input;
    model_output before, after;
    test_random random;
    float *logits;
    void *x;
    uint32_t i;
    NEEDS_A_GPU;
    random_seed(&random, 21);
    tuned_create(&small_spec, &t);
    on.context = open_context("off");
    tune(&t, on.context, growing);
    tuned = t.m;
    REQUIRE(moe_route_layer_create(on.context, &t.m.desc, &tuned.layer) == MOE_ROUTE_OK, "%s", message_of(on.context));
    for (i = 0; i < COUNT(sizes); i++) {
        model_random_input(&random, &small_spec, sizes[i], &input, &logits, &x);
        CHECK(model_run(&device, &t.m, &input, &before) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK(model_run(&on, &tuned, &input, &after) == MOE_ROUTE_OK, "%s", message_of(on.context));
        CHECK_BYTES(after.y, before.y, (size_t)sizes[i] * small_spec.hidden_size * 2, "y of a tuned layer");
        model_output_free(&before);
        model_output_free(&after);
        free(logits);
        free(x);
    }
    moe_route_layer_destroy(tuned.layer);
    moe_route_context_destroy(on.context);
    tuned_destroy(&t);
}

/* With the device's own clock. */
TEST(tuning_works_by_real_times) {
    tuned_model t;
    moe_route_context *context;
    moe_route_layer *layer;
    NEEDS_A_GPU;
    tuned_create(&small_spec, &t);
    context = open_context("off");
    CHECK(moe_route_layer_tune(context, &t.m.desc, &t.args) == MOE_ROUTE_OK, "%s", message_of(context));
    CHECK(t.steps == t.num_steps && t.steps > 0, "%u of %u steps", t.steps, t.num_steps);
    t.m.desc.tuned = MOE_ROUTE_ON;
    CHECK(moe_route_layer_create(context, &t.m.desc, &layer) == MOE_ROUTE_OK, "%s", message_of(context));
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    tuned_destroy(&t);
}

TEST(a_rival_with_another_result_is_not_chosen) {
    tuned_model t;
    moe_route_context *context;
    NEEDS_A_GPU;
    tuned_create(&small_spec, &t);
    context = open_context("off");
    mock_open(context, growing);
    mock.spoil = 1; /* the first rival's, each time: apart, and for large batches another one's than the fastest */
    CHECK(moe_route_layer_tune(context, &t.m.desc, &t.args) == MOE_ROUTE_OK, "%s", message_of(context));
    mock_close();
    {
        static const expected_choice fused[] = {{1, "down"}, {2, "down"}};
        check_choices(&t, context, 1, CHOICES(fused), "spoilt");
    }
    moe_route_context_destroy(context);
    tuned_destroy(&t);
}

static size_t read_file(const char *path, unsigned char *bytes, size_t most) {
    FILE *file = fopen(path, "rb");
    size_t size = 0;
    if (CHECK(file, "%s can't be opened", path)) {
        size = fread(bytes, 1, most, file);
        fclose(file);
    }
    return size;
}

static void write_file(const char *path, const unsigned char *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    if (!CHECK(file, "%s can't be written", path)) return;
    fwrite(bytes, 1, size, file);
    fclose(file);
}

static void check_damaged(tuned_model *t, const char *what) {
    moe_route_context *context = open_context(folder);
    moe_route_statistics statistics;
    check_choices(t, context, 0, CHOICES(untuned_choices), what);
    moe_route_context_get_statistics(context, &statistics);
    CHECK(statistics.rejects >= 1, "%s: nothing was rejected", what);
    moe_route_context_destroy(context);
}

/* Bytes changed, the file cut, a sound one of another layer in its place, and one whose digests fit what can't be a choice. */
TEST(a_damaged_result_is_none) {
    tuned_model t;
    found_entry entry, other;
    moe_route_context *context;
    moe_route_layer_desc desc;
    static unsigned char bytes[8192], others[8192];
    size_t size, at, header;
    NEEDS_A_GPU;
    folder_create();
    tuned_create(&small_spec, &t);
    context = open_context(folder);
    tune(&t, context, growing);
    REQUIRE(entries_of(context, "tuning", &entry) == 1, "%u files", entry.count);
    moe_route_context_destroy(context);
    size = read_file(entry.path, bytes, sizeof bytes);
    REQUIRE(size > 100 && size < sizeof bytes, "%u bytes", (unsigned)size);
    for (at = 0; at < size; at += 197) {
        bytes[at] ^= 0x10;
        write_file(entry.path, bytes, size);
        bytes[at] ^= 0x10;
        check_damaged(&t, "a changed byte");
    }
    write_file(entry.path, bytes, size - 1);
    check_damaged(&t, "cut");
    header = (size_t)moer_read_number(bytes + 12, 4);
    memcpy(others, bytes, size);
    others[size - 1] = 33; /* rows of a tile */
    moer_digest(others + header, size - header, others + 48);
    moer_digest(others, header - 32, others + header - 32);
    write_file(entry.path, others, size);
    check_damaged(&t, "a choice that there isn't");

    remove(entry.path);
    desc = t.m.desc;
    t.m.desc.max_tokens = 2;
    context = open_context(folder);
    tune(&t, context, growing);
    REQUIRE(entries_of(context, "tuning", &other) == 1, "%u files", other.count);
    moe_route_context_destroy(context);
    size = read_file(other.path, others, sizeof others);
    t.m.desc = desc;
    write_file(entry.path, others, size);
    check_damaged(&t, "another layer's");

    remove(entry.path);
    REQUIRE(mkdir(entry.path, 0700) == 0, "%s can't be made", entry.path);
    context = open_context(folder);
    CHECK(tune(&t, context, shrinking) > 0, "a folder is taken for a result");
    check_choices(&t, context, 1, CHOICES(shrinking_choices), "tuned in spite of a folder");
    {
        moe_route_statistics statistics;
        moe_route_context_get_statistics(context, &statistics);
        CHECK(statistics.cache_write_failures == 0, "a folder in its place ends writing");
    }
    moe_route_context_destroy(context);
    rmdir(entry.path);
    context = open_context(folder);
    CHECK(tune(&t, context, shrinking) > 0, "a damaged result is taken for one");
    check_choices(&t, context, 1, CHOICES(shrinking_choices), "tuned after damage");
    moe_route_context_destroy(context);
    tuned_destroy(&t);
    remove_tree(folder);
}

/* One driver call after the other fails, then one allocation after the other. */
static int failing_at, num_allocations;
static void *failing_alloc(size_t size, void *user) {
    (void)user;
    return ++num_allocations == failing_at ? NULL : malloc(size);
}
static void failing_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

static model_spec tiny_spec(void) {
    model_spec spec = small_spec;
    spec.num_experts = 4;
    spec.top_k = 2;
    spec.num_local = 0;
    spec.max_tokens = 1;
    return spec;
}

TEST(a_failure_keeps_nothing_and_leaks_nothing) {
    const model_spec spec = tiny_spec();
    tuned_model t;
    moe_route_context *context;
    moe_route_status status = MOE_ROUTE_ERROR_DRIVER;
    int i;
    NEEDS_A_GPU;
    tuned_create(&spec, &t);
    context = open_context("off");
    for (i = 1; status != MOE_ROUTE_OK && i < 1000; i++) {
        static const expected_choice fused[] = {{1, "down"}};
        mock_open(context, quick);
        mock.fail_at = i;
        t.steps = 0;
        status = moe_route_layer_tune(context, &t.m.desc, &t.args);
        CHECK(status == MOE_ROUTE_OK ? mock.calls <= i : status == MOE_ROUTE_ERROR_DRIVER && strstr(message_of(context), "error 1"), "call %d: %s: %s", i, moe_route_status_name(status), message_of(context));
        mock_close();
        if (status != MOE_ROUTE_OK) check_choices(&t, context, 0, CHOICES(fused), "after a failure");
    }
    CHECK(status == MOE_ROUTE_OK && i > 40, "%d calls", i);
    moe_route_context_destroy(context);
    tuned_destroy(&t);
}

TEST(tuning_without_memory_fails) {
    const model_spec spec = tiny_spec();
    tuned_model t;
    moe_route_context *context;
    moe_route_status status = MOE_ROUTE_ERROR_MEMORY;
    int i;
    NEEDS_A_GPU;
    tuned_create(&spec, &t);
    context = open_context("off");
    mock_open(context, growing);
    CHECK(moe_route_layer_tune(context, &t.m.desc, &t.args) == MOE_ROUTE_OK, "%s", message_of(context)); /* variants are there, then */
    context->allocator.alloc = failing_alloc;
    context->allocator.free = failing_free;
    t.args.again = 1;
    for (i = 1; status != MOE_ROUTE_OK && i < 1000; i++) {
        failing_at = i;
        num_allocations = 0;
        t.steps = 0;
        status = moe_route_layer_tune(context, &t.m.desc, &t.args);
        CHECK(status == MOE_ROUTE_OK || status == MOE_ROUTE_ERROR_MEMORY, "allocation %d: %s: %s", i, moe_route_status_name(status), message_of(context));
    }
    CHECK(status == MOE_ROUTE_OK && i > 4, "%d allocations", i);
    mock_close();
    failing_at = 0;
    moe_route_context_destroy(context);
    tuned_destroy(&t);
}

/* Tuned kernels that can't be had any more. */
static int compile_nothing(moer_nvrtc_program *program, const char *source, const char *name, int num_headers, const char *const *headers, const char *const *names) {
    (void)program, (void)source, (void)name, (void)num_headers, (void)headers, (void)names;
    return 3; /* NVRTC_ERROR_PROGRAM_CREATION_FAILURE */
}

TEST(kernels_that_cannot_be_had_are_not_chosen) {
    static const expected_choice apart[] = {{1, "combine"}}, fused[] = {{1, "down"}};
    const model_spec spec = tiny_spec();
    tuned_model t;
    found_entry entry;
    moe_route_context_desc desc;
    moe_route_context *context;
    moe_route_layer *layer;
    NEEDS_A_GPU;
    folder_create();
    tuned_create(&spec, &t);
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_GPU;
    desc.cuda_context = device.gpu.context;
    desc.cache_dir = folder;
    REQUIRE(moe_route_context_create(&desc, &context) == MOE_ROUTE_OK, "no context");
    check_choices(&t, context, 0, CHOICES(fused), "untuned");
    tune(&t, context, growing);
    check_choices(&t, context, 1, CHOICES(apart), "tuned");
    while (entries_of(context, "combine", &entry) > 0) remove(entry.path);
    moe_route_context_destroy(context);
    REQUIRE(moe_route_context_create(&desc, &context) == MOE_ROUTE_OK, "no context");
    CHECK(moer_nvrtc_open(context) == MOE_ROUTE_OK, "%s", message_of(context));
    context->nvrtc.nvrtcCreateProgram = compile_nothing;
    check_choices(&t, context, 0, CHOICES(fused), "without a compiler");
    t.m.desc.tuned = MOE_ROUTE_ON;
    CHECK(moe_route_layer_create(context, &t.m.desc, &layer) == MOE_ROUTE_ERROR_COMPILE && !layer, "%s", message_of(context));
    moe_route_context_destroy(context);
    tuned_destroy(&t);
    remove_tree(folder);
}

/* The tile's rows by the description: the same bits. */
TEST(tiles_can_be_fixed) {
    static const uint32_t rows[] = {0, 32, 64, 128};
    model_output outputs[4];
    uint32_t i;
    NEEDS_A_GPU;
    for (i = 0; i < 4; i++) {
        static moe_route_plan plan;
        model_spec spec = small_spec;
        model m;
        model_input input;
        test_random random;
        float *logits;
        void *x;
        char text[32];
        spec.max_tokens = 16;
        random_seed(&random, 31);
        model_create(&device, &spec, 32, &m);
        moe_route_layer_destroy(m.layer);
        m.desc.grouped_rows = rows[i];
        REQUIRE(moe_route_layer_create(device.context, &m.desc, &m.layer) == MOE_ROUTE_OK, "%s", device_message(&device));
        model_random_input(&random, &spec, 16, &input, &logits, &x);
        CHECK(model_run(&device, &m, &input, &outputs[i]) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK(moe_route_layer_explain(m.layer, MOE_ROUTE_OPERATION_LAYER, 16, &plan) == MOE_ROUTE_OK, "%s", device_message(&device));
        snprintf(text, sizeof text, "TILE_ROWS=%u ", rows[i] ? rows[i] : 64);
        CHECK(strstr(plan.launches[plan.num_launches - 2].variant, text), "grouped_rows %u: %s", rows[i], plan.launches[plan.num_launches - 2].variant);
        if (i > 0) CHECK_BYTES(outputs[i].y, outputs[0].y, (size_t)16 * spec.hidden_size * 2, "y");
        free(logits);
        free(x);
        model_destroy(&device, &m);
    }
    for (i = 0; i < 4; i++) model_output_free(&outputs[i]);
}

static moe_route_context *compile_context(void) {
    moe_route_context_desc desc;
    moe_route_context *context;
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_COMPILE;
    desc.compile_target = 90;
    desc.cache_dir = "off";
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) device_die("no context to compile");
    return context;
}

#define REFUSED(call, status, first, second)                                                                                                    \
    do {                                                                                                                                        \
        const moe_route_status got = call;                                                                                                      \
        CHECK(got == status && strstr(message_of(context), first) && strstr(message_of(context), second), "%s: %s", moe_route_status_name(got), message_of(context)); \
    } while (0)

TEST(bad_arguments_are_refused) {
    tuned_model t;
    moe_route_context *context = compile_context();
    moe_route_layer_desc desc;
    moe_route_tune_args args;
    moe_route_layer *layer;
    size_t size = 7;
    tuned_create(&small_spec, &t);
    args = t.args;
    desc = t.m.desc;
    CHECK(moe_route_layer_tune(NULL, &desc, &args) == MOE_ROUTE_ERROR_ARGUMENT, "no context");
    CHECK(moe_route_layer_tune_workspace_size(NULL, &desc, &size) == MOE_ROUTE_ERROR_ARGUMENT && size == 0, "no context");
    REFUSED(moe_route_layer_tune(context, NULL, &args), MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune", "desc is NULL");
    REFUSED(moe_route_layer_tune(context, &desc, NULL), MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune", "args is NULL");
    REFUSED(moe_route_layer_tune_workspace_size(context, &desc, NULL), MOE_ROUTE_ERROR_ARGUMENT, "workspace_size", "size is NULL");
    REFUSED(moe_route_layer_tune(context, &desc, &args), MOE_ROUTE_ERROR_UNSUPPORTED, "moe_route_layer_tune", "only compiles");
    desc.tuned = (moe_route_switch)3;
    REFUSED(moe_route_layer_create(context, &desc, &layer), MOE_ROUTE_ERROR_ARGUMENT, "tuned is 3", "OFF (2)");
    desc.tuned = MOE_ROUTE_AUTO;
    desc.grouped_rows = 48;
    REFUSED(moe_route_layer_create(context, &desc, &layer), MOE_ROUTE_ERROR_ARGUMENT, "grouped_rows is 48", "32, 64 or 128");
    desc.grouped_rows = 0;
    memset(&desc.experts.down, 0, sizeof desc.experts.down);
    REFUSED(moe_route_layer_tune(context, &desc, &args), MOE_ROUTE_ERROR_ARGUMENT, "experts.down.format is 0", "both matrices");
    moe_route_context_destroy(context);

    context = device.context;
    desc = t.m.desc;
    if (device.kind == MOE_ROUTE_DEVICE_CPU) {
        CHECK(moe_route_layer_tune(context, &desc, &args) == MOE_ROUTE_OK && t.steps == 0 && t.args.workspace_size == 0, "%s", message_of(context));
    } else {
        moer_driver driver = context->driver;
        args.workspace_size--;
        REFUSED(moe_route_layer_tune(context, &desc, &args), MOE_ROUTE_ERROR_ARGUMENT, "workspace_size is", "needed is at least");
        args.workspace_size++;
        args.workspace += 16;
        REFUSED(moe_route_layer_tune(context, &desc, &args), MOE_ROUTE_ERROR_ARGUMENT, "workspace is 0x", "multiple of 256");
        args.workspace = 0;
        REFUSED(moe_route_layer_tune(context, &desc, &args), MOE_ROUTE_ERROR_ARGUMENT, "workspace is 0x0", "multiple of 256");
        args = t.args;
        context->driver.cuEventCreate = NULL;
        REFUSED(moe_route_layer_tune(context, &desc, &args), MOE_ROUTE_ERROR_UNSUPPORTED, "moe_route_layer_tune", "cuEventCreate");
        context->driver = driver;
        CHECK(t.steps == 0, "something was measured");
    }
    tuned_destroy(&t);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    device_open_wanted(&device);
    RUN(tuning_chooses_the_fastest_and_keeps_it);
    RUN(no_size_depends_on_tuning);
    RUN(tuning_without_a_folder_lasts_as_long_as_the_context);
    RUN(tuning_changes_no_bit);
    RUN(tuning_works_by_real_times);
    RUN(a_rival_with_another_result_is_not_chosen);
    RUN(a_damaged_result_is_none);
    RUN(a_failure_keeps_nothing_and_leaks_nothing);
    RUN(tuning_without_memory_fails);
    RUN(kernels_that_cannot_be_had_are_not_chosen);
    RUN(tiles_can_be_fixed);
    RUN(bad_arguments_are_refused);
    device_close(&device);
    return test_end();
}
