/*
  test_packs.c: packs: made for several architectures without a GPU, loaded from disk and from memory, and every damage to
  them noticed. A layer that a pack covers touches neither NVRTC nor the cache, which the test makes unavailable. NVRTC and
  the driver are stand-ins.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <time.h>

#include "support/test.h"
#include "support/stand_ins.h"
#include "support/folders.h"

static moe_route_context_desc off; /* a description without a cache */
static char pack_path[600];
static unsigned char pack[1 << 20];
static uint64_t seed;

static void begin(void) {
    folder_create();
    stand_in_reset();
    memset(&off, 0, sizeof off);
    off.cache_dir = "off";
    snprintf(pack_path, sizeof pack_path, "%s/layers.moep", folder);
}

static const uint32_t targets[] = {80, 90, 120};
#define NUM_TARGETS 3u

/* A pack of one layer for all targets, with a cache at `cache_dir` or none. The number of variants a target. */
static uint32_t make_pack(const char *cache_dir, uint32_t operations) {
    moe_route_context *contexts[NUM_TARGETS + 1];
    moe_route_layer *layers[NUM_TARGETS + 1];
    moe_route_context_desc desc = off;
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t i, num_variants = 0;
    outcome o;
    memset(&o, 0, sizeof o);
    memset(contexts, 0, sizeof contexts);
    memset(layers, 0, sizeof layers);
    desc.cache_dir = cache_dir;
    for (i = 0; i < NUM_TARGETS + 1 && status == MOE_ROUTE_OK; i++) { /* the last target twice: it is there once */
        desc.compile_target = targets[i % NUM_TARGETS];
        status = stand_in_context(&desc, STAND_IN_COMPILE, &o, &contexts[i]);
        if (status == MOE_ROUTE_OK) status = stand_in_layer(contexts[i], operations, &layers[i]);
    }
    if (status == MOE_ROUTE_OK) status = moe_route_pack_save(contexts, NUM_TARGETS + 1, pack_path);
    moe_route_message(contexts[0], o.message, sizeof o.message);
    CHECK(status == MOE_ROUTE_OK, "%s: %s", moe_route_status_name(status), o.message);
    num_variants = moe_route_layer_num_variants(layers[0]);
    for (i = 0; i < NUM_TARGETS + 1; i++) {
        moe_route_layer_destroy(layers[i]);
        moe_route_context_destroy(contexts[i]);
    }
    return num_variants;
}

/* A layer in a context that gets a pack first: from the file, or from memory where `size` isn't 0. */
static outcome use_pack(const moe_route_context_desc *desc, uint32_t operations, stand_in_device kind, const void *data, size_t size, moe_route_status *loaded) {
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    outcome o;
    memset(&o, 0, sizeof o);
    o.status = stand_in_context(desc, kind, &o, &context);
    *loaded = size ? moe_route_pack_use(context, data, size) : moe_route_pack_load(context, pack_path);
    if (o.status == MOE_ROUTE_OK) o.status = stand_in_layer(context, operations, &layer);
    stand_in_finish(&o, context, layer);
    return o;
}

#define CHECK_FROM_PACK(o, loaded, what)                                                                                              \
    (CHECK((loaded) == MOE_ROUTE_OK, "%s: the pack: %s", what, moe_route_status_name(loaded)) && CHECK_CACHED(o, what) &&              \
     CHECK_TROUBLES(o, 0, what) &&                                                                                                    \
     CHECK((o).statistics.pack_hits == (o).num_variants && (o).statistics.cache_hits + (o).statistics.cache_misses == 0,              \
           "%s: %u of %u from the pack", what, (unsigned)(o).statistics.pack_hits, (o).num_variants))

TEST(a_pack_covers_its_layers) {
    moe_route_status loaded;
    moe_route_context_desc desc;
    uint32_t num_variants, i;
    size_t size;
    outcome o;
    begin();
    num_variants = make_pack("off", ALL_OPERATIONS);
    CHECK(num_variants >= 3 && stand_in.compiles == num_variants * (NUM_TARGETS + 1), "%u variants, %u compiled", num_variants, stand_in.compiles);
    size = read_bytes(pack_path, pack, sizeof pack);
    CHECK(moer_read_number(pack + 12, 4) == num_variants * NUM_TARGETS, "the pack holds %lu entries", (unsigned long)moer_read_number(pack + 12, 4));
    stand_in.missing = 1; /* from here on NVRTC isn't there, and all operations on files but the pack's own fail */
    for (i = 0; i < NUM_TARGETS; i++) {
        desc = off;
        desc.compile_target = targets[i];
        o = use_pack(&desc, ALL_OPERATIONS, STAND_IN_COMPILE, NULL, 0, &loaded);
        CHECK_FROM_PACK(o, loaded, "from a file");
        o = use_pack(&desc, ALL_OPERATIONS, STAND_IN_GPU, NULL, 0, &loaded);
        CHECK_FROM_PACK(o, loaded, "from a file, on a GPU");
        fault.kind = FAULT_ANY;
        fault.at = 1;
        fault.error = EIO;
        o = use_pack(&desc, ALL_OPERATIONS, STAND_IN_GPU, pack, size, &loaded);
        CHECK_FROM_PACK(o, loaded, "from memory, without a disk");
        fault.kind = FAULT_NONE;
    }
    stand_in.missing = 0;
    desc = off;
    desc.compile_target = 100; /* another architecture: the pack doesn't serve, and nothing is said */
    o = use_pack(&desc, ALL_OPERATIONS, STAND_IN_COMPILE, pack, size, &loaded);
    CHECK_COMPILED(o, "another architecture");
    CHECK_TROUBLES(o, 0, "another architecture");
    remove_tree(folder);
}

/* The folder of the cache is never opened for a layer that a pack covers, and stays as it was. */
TEST(a_covered_layer_leaves_the_cache_alone) {
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    moe_route_context_desc desc;
    char cache[600];
    outcome o;
    begin();
    make_pack("off", ALL_OPERATIONS);
    snprintf(cache, sizeof cache, "%s/cache", folder);
    desc = off;
    desc.cache_dir = cache;
    memset(&o, 0, sizeof o);
    REQUIRE(stand_in_context(&desc, STAND_IN_GPU, &o, &context) == MOE_ROUTE_OK, "no context");
    REQUIRE(moe_route_pack_load(context, pack_path) == MOE_ROUTE_OK, "no pack");
    fault.kind = FAULT_ANY;
    fault.at = 1;
    fault.error = EIO;
    CHECK(stand_in_layer(context, ALL_OPERATIONS, &layer) == MOE_ROUTE_OK, "no layer");
    CHECK(fault.seen == 0, "%u operations on files", fault.seen);
    fault.kind = FAULT_NONE;
    stand_in_finish(&o, context, layer);
    CHECK_TROUBLES(o, 0, "a covered layer");
    /* what the pack doesn't hold goes the usual way */
    remove(pack_path);
    make_pack("off", ONE_OPERATION);
    {
        moe_route_status loaded;
        o = use_pack(&desc, ALL_OPERATIONS, STAND_IN_GPU, NULL, 0, &loaded);
        CHECK_RIGHT(o, "a pack of one variant");
        CHECK(o.statistics.pack_hits == 1 && o.statistics.cache_misses == o.num_variants - 1 && o.statistics.cache_writes == o.num_variants - 1, "%u of %u variants from the pack, %u written",
              (unsigned)o.statistics.pack_hits, o.num_variants, (unsigned)o.statistics.cache_writes);
    }
    remove_tree(folder);
}

TEST(packs_can_be_made_from_a_cache_and_from_packs) {
    moe_route_status loaded;
    char cache[600];
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    size_t first, second;
    static unsigned char again[sizeof pack];
    outcome o;
    begin();
    snprintf(cache, sizeof cache, "%s/cache", folder);
    make_pack(cache, ALL_OPERATIONS);
    first = read_bytes(pack_path, pack, sizeof pack);
    stand_in.missing = 1;
    make_pack(cache, ALL_OPERATIONS); /* nothing is compiled this time */
    second = read_bytes(pack_path, again, sizeof again);
    CHECK(first == second, "%lu and %lu bytes", (unsigned long)first, (unsigned long)second);
    if (first == second) CHECK_BYTES(again, pack, first, "the second pack");
    memset(&o, 0, sizeof o);
    REQUIRE(stand_in_context(&off, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
    REQUIRE(moe_route_pack_load(context, pack_path) == MOE_ROUTE_OK, "no pack");
    REQUIRE(stand_in_layer(context, ONE_OPERATION, &layer) == MOE_ROUTE_OK, "no layer");
    CHECK(moe_route_pack_save(&context, 1, pack_path) == MOE_ROUTE_OK, "no pack of a part");
    stand_in_finish(&o, context, layer);
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK_FROM_PACK(o, loaded, "a part of a pack");
    remove_tree(folder);
}

/* ---- damage ---- */

/* Whatever byte is changed, the pack is refused, or its entry is, or the byte belonged to another architecture. */
TEST(every_damaged_byte_of_a_pack_is_noticed) {
    test_random random;
    moe_route_status loaded;
    size_t size, i, head, served = 0, refused = 0, rejected = 0;
    outcome o;
    begin();
    random_seed(&random, seed);
    make_pack("off", ONE_OPERATION);
    size = read_bytes(pack_path, pack, sizeof pack);
    head = MOER_PACK_HEAD + NUM_TARGETS * MOER_PACK_INDEX + 32;
    REQUIRE(size > head, "a pack of %lu bytes", (unsigned long)size);
    for (i = 0; i < size; i++) {
        const unsigned char flip = (unsigned char)(1u << random_below(&random, 8));
        pack[i] ^= flip;
        o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
        pack[i] ^= flip;
        CHECK_RIGHT(o, "a damaged pack");
        CHECK(o.troubles <= 1, "byte %lu: %u lines in the log", (unsigned long)i, o.troubles);
        CHECK((loaded == MOE_ROUTE_ERROR_ARGUMENT) == (i < head), "byte %lu, changed by 0x%02x: %s", (unsigned long)i, flip, moe_route_status_name(loaded));
        if (loaded != MOE_ROUTE_OK) refused++;
        else if (o.statistics.rejects) rejected++;
        else served++;
        CHECK(o.num_compiled == (loaded != MOE_ROUTE_OK || o.statistics.rejects ? 1u : 0u), "byte %lu: %u compiled", (unsigned long)i, o.num_compiled);
    }
    CHECK(refused == head && rejected > 100 && served == (size - head - rejected), "%lu refused, %lu rejected, %lu served", (unsigned long)refused, (unsigned long)rejected, (unsigned long)served);
    CHECK(rejected * NUM_TARGETS >= size - head - 64 && rejected * NUM_TARGETS <= size - head + 64, "%lu of %lu bytes belong to one of %u entries", (unsigned long)rejected, (unsigned long)(size - head), NUM_TARGETS);
    for (i = 0; i < size; i += 1 + i / 16) {
        o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, i ? i : 1, &loaded);
        CHECK_RIGHT(o, "a cut pack");
        CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT, "cut at byte %lu: %s", (unsigned long)i, moe_route_status_name(loaded));
    }
    remove_tree(folder);
}

static void sign_index(void) {
    const size_t end = MOER_PACK_HEAD + (size_t)moer_read_number(pack + 12, 4) * MOER_PACK_INDEX;
    moer_digest(pack, end, pack + end);
}

/* Indexes that are right by their digest, and wrong. */
TEST(wrong_indexes_are_noticed) {
    static const uint64_t wrong[] = {0, 23, 1000000, (uint64_t)1 << 32, (uint64_t)1 << 63, ~(uint64_t)0, ~(uint64_t)0 - 100};
    moe_route_status loaded;
    size_t size, i, at;
    outcome o;
    begin();
    make_pack("off", ONE_OPERATION);
    size = read_bytes(pack_path, pack, sizeof pack);
    for (at = 32; at <= 40; at += 8)
        for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
            if (at == 40 && wrong[i] < size) continue; /* a short entry is found when it is used */
            read_bytes(pack_path, pack, sizeof pack);
            moer_write_number(pack + MOER_PACK_HEAD + at, wrong[i], 8);
            sign_index();
            o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
            CHECK_COMPILED(o, "a wrong index");
            CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT, "field %lu is %llu: %s", (unsigned long)at, (unsigned long long)wrong[i], moe_route_status_name(loaded));
        }
    for (i = 0; i < NUM_TARGETS; i++) { /* all entries point at the first one's bytes */
        read_bytes(pack_path, pack, sizeof pack);
        moer_write_number(pack + MOER_PACK_HEAD + i * MOER_PACK_INDEX + 40, 0, 8);
        sign_index();
        o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
        CHECK_RIGHT(o, "an empty entry");
        memcpy(pack + MOER_PACK_HEAD + i * MOER_PACK_INDEX + 32, pack + MOER_PACK_HEAD + (i + 1) % NUM_TARGETS * MOER_PACK_INDEX + 32, 16);
        sign_index();
        o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
        CHECK_RIGHT(o, "another entry's bytes");
        CHECK(loaded == MOE_ROUTE_OK && o.statistics.pack_hits + o.statistics.rejects == 1, "%s, %u hits, %u rejects", moe_route_status_name(loaded), (unsigned)o.statistics.pack_hits,
              (unsigned)o.statistics.rejects);
    }
    read_bytes(pack_path, pack, sizeof pack); /* two entries change places: no longer ascending */
    {
        unsigned char kept[MOER_PACK_INDEX];
        memcpy(kept, pack + MOER_PACK_HEAD, sizeof kept);
        memcpy(pack + MOER_PACK_HEAD, pack + MOER_PACK_HEAD + MOER_PACK_INDEX, sizeof kept);
        memcpy(pack + MOER_PACK_HEAD + MOER_PACK_INDEX, kept, sizeof kept);
    }
    sign_index();
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT, "an index out of order: %s", moe_route_status_name(loaded));
    read_bytes(pack_path, pack, sizeof pack);
    moer_write_number(pack + 8, MOER_PACK_FORMAT + 1, 4);
    sign_index();
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "version"), "another version: %s", o.trouble);
    moer_write_number(pack + 8, MOER_PACK_FORMAT, 4);
    moer_write_number(pack + 12, 0xffffffffu, 4);
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, pack, size, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT, "4 thousand million entries: %s", moe_route_status_name(loaded));
    remove_tree(folder);
}

TEST(a_pack_that_the_driver_refuses_gives_way) {
    moe_route_status loaded;
    moe_route_context_desc desc;
    char cache[600];
    outcome o;
    begin();
    make_pack("off", ONE_OPERATION);
    snprintf(cache, sizeof cache, "%s/cache", folder);
    desc = off;
    desc.cache_dir = cache;
    stand_in.compiles = 0;
    stand_in.refuse = 1;
    o = use_pack(&desc, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK_COMPILED(o, "a refused pack");
    CHECK_TROUBLES(o, 1, "a refused pack");
    CHECK(stand_in.compiles == 1 && o.statistics.cache_writes == 1 && o.statistics.rejects == 1, "%u compiled, %u written", stand_in.compiles, (unsigned)o.statistics.cache_writes);
    stand_in.refuse = 1; /* and again: now the cache has the code */
    o = use_pack(&desc, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK_CACHED(o, "a refused pack before a cache");
    CHECK(stand_in.compiles == 1 && o.statistics.cache_hits == 1, "%u compiled, %u hits", stand_in.compiles, (unsigned)o.statistics.cache_hits);
    remove_tree(folder);
}

/* ---- files ---- */

TEST(pack_files_are_checked) {
    moe_route_status loaded;
    char link_path[700], other[700];
    outcome o;
    begin();
    make_pack("off", ONE_OPERATION);
    snprintf(other, sizeof other, "%s/renamed", folder);
    snprintf(link_path, sizeof link_path, "%s", pack_path);
    rename(pack_path, other);
    CHECK(symlink(other, link_path) == 0, "no symbolic link");
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK_FROM_PACK(o, loaded, "a symbolic link");
    chmod(other, 0666);
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "other users"), "writable by all: %s", o.trouble);
    off.trust_shared_cache = 1;
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK_FROM_PACK(o, loaded, "writable by all, and trusted");
    off.trust_shared_cache = 0;
    chmod(other, 0644);
    if (geteuid() == 0) {
        CHECK(chown(other, 12345, (gid_t)-1) == 0, "no other owner");
        o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
        CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "another user"), "of another user: %s", o.trouble);
    }
    unlink(link_path);
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "there is no file"), "no file: %s", o.trouble);
    mkfifo(pack_path, 0600);
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT, "a FIFO: %s", o.trouble);
    unlink(pack_path);
    mkdir(pack_path, 0700);
    o = use_pack(&off, ONE_OPERATION, STAND_IN_GPU, NULL, 0, &loaded);
    CHECK(loaded == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "folder"), "a folder: %s", o.trouble);
    remove_tree(folder);
}

TEST(writing_a_pack_may_fail) {
    static const fault_kind kinds[] = {FAULT_CREATE, FAULT_WRITE, FAULT_FLUSH, FAULT_CLOSE, FAULT_RENAME};
    moe_route_context *context = NULL, *cpu = NULL, *pair[2];
    moe_route_context_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_status status;
    uint32_t entries, others;
    char found[4096], before[8];
    outcome o;
    size_t i;
    begin();
    memset(&o, 0, sizeof o);
    REQUIRE(stand_in_context(&off, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
    CHECK(moe_route_pack_save(&context, 1, pack_path) == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "no layer"), "a pack of nothing: %s", o.trouble);
    REQUIRE(stand_in_layer(context, ONE_OPERATION, &layer) == MOE_ROUTE_OK, "no layer");
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        write_bytes(pack_path, "before", 6);
        fault.kind = kinds[i];
        fault.at = 1;
        fault.seen = 0;
        fault.count = 1;
        fault.error = ENOSPC;
        status = moe_route_pack_save(&context, 1, pack_path);
        fault.kind = FAULT_NONE;
        CHECK(status == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, pack_path) && strstr(o.trouble, "space"), "fault %u: %s, %s", (unsigned)kinds[i], moe_route_status_name(status), o.trouble);
        CHECK(read_bytes(pack_path, (unsigned char *)before, sizeof before) == 6 && memcmp(before, "before", 6) == 0, "fault %u: the file has changed", (unsigned)kinds[i]);
        entries = others = 0;
        count_files(folder, &entries, &others, found, sizeof found);
        CHECK(others == 1, "fault %u: %u files", (unsigned)kinds[i], others);
    }
    CHECK(moe_route_pack_save(&context, 1, pack_path) == MOE_ROUTE_OK, "%s", o.trouble);
    /* wrong arguments */
    CHECK(moe_route_pack_save(&context, 1, NULL) == MOE_ROUTE_ERROR_ARGUMENT, "no path");
    CHECK(moe_route_pack_save(&context, 0, pack_path) == MOE_ROUTE_ERROR_ARGUMENT, "no contexts");
    CHECK(moe_route_pack_save(NULL, 1, pack_path) == MOE_ROUTE_ERROR_ARGUMENT, "NULL contexts");
    pair[0] = context;
    pair[1] = NULL;
    CHECK(moe_route_pack_save(pair, 2, pack_path) == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "contexts[1] is NULL"), "%s", o.trouble);
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_CPU;
    REQUIRE(moe_route_context_create(&desc, &cpu) == MOE_ROUTE_OK, "no CPU context");
    pair[1] = cpu;
    CHECK(moe_route_pack_save(pair, 2, pack_path) == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.trouble, "contexts[1]"), "%s", o.trouble);
    CHECK(moe_route_pack_load(cpu, pack_path) == MOE_ROUTE_ERROR_ARGUMENT, "a pack for the CPU");
    CHECK(moe_route_pack_load(NULL, pack_path) == MOE_ROUTE_ERROR_ARGUMENT && moe_route_pack_use(NULL, pack, 1) == MOE_ROUTE_ERROR_ARGUMENT, "NULL contexts");
    CHECK(moe_route_pack_load(context, NULL) == MOE_ROUTE_ERROR_ARGUMENT && moe_route_pack_use(context, NULL, 1) == MOE_ROUTE_ERROR_ARGUMENT, "NULL packs");
    moe_route_context_destroy(cpu);
    stand_in_finish(&o, context, layer);
    remove_tree(folder);
}

int main(int argc, char **argv) {
    const char *given = getenv("TEST_SEED");
    test_begin(argc, argv);
    umask(002); /* a pack is still for its owner alone to write */
    unsetenv("MOE_ROUTE_CACHE");
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    fprintf(stderr, "TEST_SEED=%llu\n", (unsigned long long)seed);
    RUN(a_pack_covers_its_layers);
    RUN(a_covered_layer_leaves_the_cache_alone);
    RUN(packs_can_be_made_from_a_cache_and_from_packs);
    RUN(every_damaged_byte_of_a_pack_is_noticed);
    RUN(wrong_indexes_are_noticed);
    RUN(a_pack_that_the_driver_refuses_gives_way);
    RUN(pack_files_are_checked);
    RUN(writing_a_pack_may_fail);
    return test_end();
}
