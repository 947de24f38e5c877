/*
  test_cache.c: compiled variants on disk, through the public API and without a GPU: each is compiled once, whatever is
  wrong with an entry or its folder costs a compilation and is never an error, and processes may start at once.
  Needs NVRTC, and a file system with owners and modes.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/test.h"
#include "support/device.h"
#include "support/folders.h"

#define NO_NVRTC "/nonexistent/libnvrtc.so" /* proves that nothing was compiled */
#define NUM_PROCESSES 8
#define CACHE_OPERATIONS (MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE)
#define ONE_OPERATION MOE_ROUTE_OPERATION_EXPAND /* a single variant, soon compiled */

/* ---- one use of a cache ---- */

typedef struct use {
    moe_route_status status;
    uint32_t num_variants, num_compiled, warnings;
    moe_route_context_info info;
    char message[4096];
} use;

static void count_warnings(moe_route_log_level level, const char *message, void *user) {
    (void)message;
    if (level == MOE_ROUTE_LOG_WARNING) __atomic_add_fetch((uint32_t *)user, 1, __ATOMIC_SEQ_CST);
}

/* A context and a layer of 32 experts, top 4, which are destroyed again. */
static use use_cache(const char *cache_dir, const char *nvrtc_path, uint32_t operations) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_variant_info variant;
    use u;
    uint32_t i;
    memset(&u, 0, sizeof u);
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = 90;
    context_desc.cache_dir = cache_dir;
    context_desc.nvrtc_path = nvrtc_path;
    context_desc.logger.log = count_warnings;
    context_desc.logger.user = &u.warnings;
    u.status = moe_route_context_create(&context_desc, &context);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 32;
    desc.router.top_k = 4;
    desc.experts.hidden_size = 64;
    desc.operations = operations;
    if (u.status == MOE_ROUTE_OK && operations) u.status = moe_route_layer_create(context, &desc, &layer);
    if (u.status != MOE_ROUTE_OK) moe_route_message(context, u.message, sizeof u.message);
    u.num_variants = moe_route_layer_num_variants(layer);
    for (i = 0; i < u.num_variants; i++)
        if (moe_route_layer_variant(layer, i, &variant) == MOE_ROUTE_OK) u.num_compiled += variant.origin == MOE_ROUTE_ORIGIN_COMPILED;
    moe_route_context_get_info(context, &u.info);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return u;
}

#define CHECK_COMPILED(u, what) CHECK((u).status == MOE_ROUTE_OK && (u).num_compiled == (u).num_variants && (u).num_variants > 0, "%s: %u of %u compiled; %s", what, (u).num_compiled, (u).num_variants, (u).message)
#define CHECK_CACHED(u, what) CHECK((u).status == MOE_ROUTE_OK && (u).num_compiled == 0 && (u).num_variants > 0, "%s: %u of %u compiled; %s", what, (u).num_compiled, (u).num_variants, (u).message)

/* ---- tests ---- */

/* First of all: the children are forked before this process has a context or NVRTC. */
TEST(processes_may_start_at_once) {
    pid_t children[NUM_PROCESSES];
    int i, without = 0;
    use u;
    folder_create();
    fflush(stdout);
    for (i = 0; i < NUM_PROCESSES; i++) {
        children[i] = fork();
        if (children[i] < 0) device_die("fork failed");
        if (children[i] == 0) {
            u = use_cache(folder, NULL, CACHE_OPERATIONS);
            if (u.status != MOE_ROUTE_OK) fprintf(stderr, "%s\n", u.message);
            _exit(u.status == MOE_ROUTE_OK && u.warnings == 0 ? 0 : u.status == MOE_ROUTE_ERROR_NO_COMPILER ? 77 : 1);
        }
    }
    for (i = 0; i < NUM_PROCESSES; i++) {
        int status = 0;
        waitpid(children[i], &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) without++;
        else CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "process %d ended with 0x%x", i, (unsigned)status);
    }
    u = use_cache(folder, without ? NULL : NO_NVRTC, CACHE_OPERATIONS);
    if (without) {
        test_skip("%s", u.message);
    } else {
        CHECK_CACHED(u, "after all processes");
        check_files(u.num_variants, "after all processes");
    }
    remove_tree(folder);
}

TEST(each_variant_is_compiled_once) {
    use u;
    folder_create();
    u = use_cache(folder, NULL, CACHE_OPERATIONS);
    CHECK_COMPILED(u, "first");
    CHECK(u.num_variants >= 3 && u.warnings == 0, "%u variants, %u warnings", u.num_variants, u.warnings);
    CHECK(u.info.nvrtc_version > 0 && u.info.nvrtc_path[0], "NVRTC isn't in the context's information");
    CHECK(strncmp(u.info.cache_dir, folder, strlen(folder)) == 0, "the cache lies in %s instead of %s", u.info.cache_dir, folder);
    check_files(u.num_variants, "first");
    u = use_cache(folder, NO_NVRTC, CACHE_OPERATIONS);
    CHECK_CACHED(u, "second");
    CHECK(u.info.nvrtc_version == 0 && u.info.nvrtc_path[0] == 0, "NVRTC %u was loaded", u.info.nvrtc_version);
    u = use_cache(folder, NULL, CACHE_OPERATIONS | MOE_ROUTE_OPERATION_MAPS); /* one more */
    CHECK(u.status == MOE_ROUTE_OK && u.num_compiled == 1, "a further operation: %u compiled; %s", u.num_compiled, u.message);
    setenv("MOE_ROUTE_CACHE", "refresh", 1);
    u = use_cache(folder, NULL, ONE_OPERATION);
    CHECK_COMPILED(u, "refresh");
    unsetenv("MOE_ROUTE_CACHE");
    remove_tree(folder);
}

/* A miss compiles; then the entry is sound again, unless something is in its place that isn't ours to remove. */
static void check_healed(const char *what, int heals) {
    use u = use_cache(folder, NULL, ONE_OPERATION);
    CHECK_COMPILED(u, what);
    CHECK(u.warnings == 0, "%s: %u warnings", what, u.warnings);
    if (!heals) return;
    u = use_cache(folder, NO_NVRTC, ONE_OPERATION);
    CHECK_CACHED(u, what);
    check_files(1, what);
}

TEST(damaged_entries_are_replaced) {
    static unsigned char bytes[1 << 20];
    static const char *const sides[] = {"cut", "flipped"};
    char path[1024] = "", elsewhere[1100], what[64];
    uint32_t entries = 0, others = 0;
    size_t places[16], size, header, i;
    int flip;
    use u;
    folder_create();
    u = use_cache(folder, NULL, ONE_OPERATION);
    CHECK_COMPILED(u, "first");
    count_files(folder, &entries, &others, path, sizeof path);
    size = read_bytes(path, bytes, sizeof bytes);
    header = (size_t)bytes[12] | (size_t)bytes[13] << 8;
    if (CHECK(entries == 1 && size > 200 && size < sizeof bytes && header < size, "%u entries, %lu bytes", entries, (unsigned long)size)) {
        const size_t all[] = {0, 8, 12, 16, 20, 28, 32, 36, 40, 48, 80, header - 1, header, size / 2, size - 1};
        memcpy(places, all, sizeof all);
        for (flip = 0; flip < 2; flip++)
            for (i = 0; i < sizeof all / sizeof all[0]; i++) {
                snprintf(what, sizeof what, "%s at byte %lu", sides[flip], (unsigned long)places[i]);
                size = read_bytes(path, bytes, sizeof bytes);
                if (places[i] >= size) continue; /* a compiler may give other bytes each time */
                if (flip) bytes[places[i]] ^= 0x10;
                write_bytes(path, bytes, flip ? size : places[i]);
                check_healed(what, 1);
            }
        size = read_bytes(path, bytes, sizeof bytes);
        write_bytes(path, bytes, size + 1);
        check_healed("one byte more", 1);

        chmod(path, 0666);
        check_healed("writable by others", 1);

        snprintf(elsewhere, sizeof elsewhere, "%s.saved", folder);
        rename(path, elsewhere);
        CHECK(symlink(elsewhere, path) == 0, "no symbolic link");
        check_healed("a symbolic link", 1);
        unlink(elsewhere);

        unlink(path);
        mkdir(path, 0700);
        check_healed("a folder", 0);
        rmdir(path);
        check_healed("after the folder", 1);
    }
    remove_tree(folder);
}

TEST(folders_that_others_can_write_are_not_used) {
    use u;
    folder_create();
    chmod(folder, 0777);
    u = use_cache(folder, NULL, ONE_OPERATION);
    CHECK_COMPILED(u, "mode 0777");
    CHECK(u.info.cache_dir[0] == 0 && u.warnings == 1, "the folder %s is used, %u warnings", u.info.cache_dir, u.warnings);
    check_files(0, "mode 0777");
    remove_tree(folder);
}

TEST(without_a_folder_memory_serves) {
    char path[600];
    use u;
    folder_create();
    u = use_cache("off", NULL, ONE_OPERATION);
    CHECK_COMPILED(u, "off");
    CHECK(u.info.cache_dir[0] == 0 && u.warnings == 0, "off: %s, %u warnings", u.info.cache_dir, u.warnings);
    if (geteuid() != 0) { /* modes don't bind root */
        chmod(folder, 0500);
        u = use_cache(folder, NULL, ONE_OPERATION);
        CHECK_COMPILED(u, "a read-only folder");
        CHECK(u.warnings == 1, "a read-only folder: %u warnings", u.warnings);
        chmod(folder, 0700);
    }
    snprintf(path, sizeof path, "%s/file", folder);
    write_bytes(path, "text", 4);
    snprintf(path, sizeof path, "%s/file/below", folder);
    u = use_cache(path, NULL, ONE_OPERATION);
    CHECK_COMPILED(u, "below a file");
    CHECK(u.info.cache_dir[0] == 0 && u.warnings == 1, "below a file: %s, %u warnings", u.info.cache_dir, u.warnings);
    remove_tree(folder);
}

TEST(the_environment_names_the_folder) {
    static const char *const names[] = {"MOE_ROUTE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}, *const ends[] = {"/v1", "/moe_route/v1", "/.cache/moe_route/v1"};
    const char *home = getenv("HOME");
    char saved[1024] = "", wanted[600];
    use u;
    int i;
    if (home) snprintf(saved, sizeof saved, "%s", home);
    folder_create();
    unsetenv("HOME");
    for (i = 0; i < 3; i++) {
        setenv(names[i], folder, 1);
        u = use_cache(NULL, NULL, ONE_OPERATION);
        CHECK_COMPILED(u, names[i]);
        snprintf(wanted, sizeof wanted, "%s%s", folder, ends[i]);
        CHECK(strcmp(u.info.cache_dir, wanted) == 0, "%s: %s instead of %s", names[i], u.info.cache_dir, wanted);
        u = use_cache(NULL, NO_NVRTC, ONE_OPERATION);
        CHECK_CACHED(u, names[i]);
        unsetenv(names[i]);
    }
    setenv("MOE_ROUTE_CACHE_DIR", "off", 1);
    u = use_cache(NULL, NULL, 0);
    CHECK(u.status == MOE_ROUTE_OK && u.info.cache_dir[0] == 0, "off: %s", u.info.cache_dir);
    unsetenv("MOE_ROUTE_CACHE_DIR");
    u = use_cache(NULL, NULL, 0); /* nothing named: the user's own home, or none */
    CHECK(u.status == MOE_ROUTE_OK, "without any: %s", u.message);
    if (u.info.cache_dir[0] && rmdir(u.info.cache_dir) == 0) { /* only if this made it, or it was as empty */
        *strrchr(u.info.cache_dir, '/') = 0;
        rmdir(u.info.cache_dir);
    }
    if (home) setenv("HOME", saved, 1);
    remove_tree(folder);
}

int main(int argc, char **argv) {
    use u;
    test_begin(argc, argv);
    umask(022);
    unsetenv("MOE_ROUTE_CACHE");
    unsetenv("MOE_ROUTE_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");
    RUN(processes_may_start_at_once);
    u = use_cache("off", NULL, ONE_OPERATION);
    if (u.status == MOE_ROUTE_ERROR_NO_COMPILER) {
        test_one_line(u.message);
        printf("SKIP cache: %s\n", u.message);
        test_current.skipped++;
        return test_end();
    }
    RUN(each_variant_is_compiled_once);
    RUN(damaged_entries_are_replaced);
    RUN(folders_that_others_can_write_are_not_used);
    RUN(without_a_folder_memory_serves);
    RUN(the_environment_names_the_folder);
    return test_end();
}
