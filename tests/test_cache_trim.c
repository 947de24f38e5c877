/*
  test_cache_trim.c: the cache as its operator sees it: its limit, listing, verifying and clearing it, and folders that are
  only read. NVRTC, the driver and the disk's failures are stand-ins.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <time.h>

#include "support/test.h"
#include "support/stand_ins.h"
#include "support/folders.h"

static moe_route_context_desc at_folder;

static void begin(void) {
    folder_create();
    stand_in_reset();
    memset(&at_folder, 0, sizeof at_folder);
    at_folder.cache_dir = folder;
}

/* A layer of its own kind for each number: one variant, for k = number. */
static moe_route_status create_number(moe_route_context *context, uint32_t number) {
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_status status;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 64;
    desc.router.top_k = number;
    desc.experts.hidden_size = 64;
    desc.operations = MOE_ROUTE_OPERATION_COMBINE;
    status = moe_route_layer_create(context, &desc, &layer);
    moe_route_layer_destroy(layer);
    return status;
}

/* The path of the entry for a number, and whether it is there. */
static int entry_of(uint32_t number, char *path, size_t size) {
    moe_route_context *context = NULL;
    moe_route_context_desc desc = at_folder;
    struct stat info;
    moer_key key;
    outcome o;
    desc.cache_limit = 0;
    memset(&o, 0, sizeof o);
    path[0] = 0;
    if (stand_in_context(&desc, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK) {
        char saved[MOER_PATH_MAX];
        snprintf(saved, sizeof saved, "%s", context->cache.folder);
        context->cache.folder[0] = 0; /* only the key is wanted */
        if (create_number(context, number) == MOE_ROUTE_OK && moer_key_make(&key, context->variants->family->name, context->variants->defines, context->target))
            moer_cache_path(saved, key.digest, 1, path, size);
    }
    moe_route_context_destroy(context);
    return path[0] && lstat(path, &info) == 0;
}

static void set_age(const char *path, long seconds) {
    struct timespec times[2];
    times[0].tv_sec = times[1].tv_sec = time(NULL) - seconds;
    times[0].tv_nsec = times[1].tv_nsec = 0;
    CHECK(utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW) == 0, "the date of %s can't be changed", path);
}

/* When the folder was last looked through. */
static void set_looked_through(long seconds) {
    char path[600];
    snprintf(path, sizeof path, "%s/v1/looked_through", folder);
    set_age(path, seconds);
}

/* Uses the layers first to last in one context. */
static outcome use_numbers(uint32_t first, uint32_t last) {
    moe_route_context *context = NULL;
    outcome o;
    uint32_t i;
    memset(&o, 0, sizeof o);
    o.status = stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context);
    for (i = first; i <= last && o.status == MOE_ROUTE_OK; i++) o.status = create_number(context, i);
    stand_in_finish(&o, context, NULL);
    CHECK(o.status == MOE_ROUTE_OK && o.wrong == 0 && o.troubles == 0, "%s, %u with wrong code, %u lines: %s", moe_route_status_name(o.status), o.wrong, o.troubles, o.trouble);
    return o;
}

static uint64_t total_size(uint32_t first, uint32_t last, unsigned *count) {
    uint64_t bytes = 0;
    uint32_t i;
    *count = 0;
    for (i = first; i <= last; i++) {
        char path[4096];
        struct stat info;
        if (entry_of(i, path, sizeof path) && stat(path, &info) == 0) {
            bytes += (uint64_t)info.st_size;
            ++*count;
        }
    }
    return bytes;
}

/* ---- the limit ---- */

TEST(the_oldest_entries_go_first) {
    char path[4096];
    unsigned count;
    uint64_t all, left;
    uint32_t i;
    begin();
    use_numbers(1, 40);
    all = total_size(1, 40, &count);
    CHECK(count == 40, "%u entries", count);
    for (i = 1; i <= 40; i++) { /* 40 hours old, 39 hours, ... */
        entry_of(i, path, sizeof path);
        set_age(path, 3600L * (41 - (long)i) + 60);
    }
    use_numbers(3, 3); /* used, and so no longer old */
    at_folder.cache_limit = all / 2;
    use_numbers(42, 42); /* written, but the folder was looked through less than an hour ago */
    total_size(1, 40, &count);
    CHECK(count == 40, "%u of 40 entries are left", count);
    set_looked_through(4000);
    use_numbers(41, 41); /* written, which looks at the limit */
    left = total_size(1, 42, &count);
    CHECK(left <= at_folder.cache_limit && left > at_folder.cache_limit / 2, "%lu bytes are left of %lu, the limit is %lu", (unsigned long)left, (unsigned long)all, (unsigned long)at_folder.cache_limit);
    CHECK(entry_of(3, path, sizeof path), "what was used is gone");
    CHECK(entry_of(41, path, sizeof path), "what was written is gone");
    for (i = 1; i < 40; i++) /* all that is gone is older than all that is left */
        if (i != 3) CHECK(!(entry_of(i, path, sizeof path) && !entry_of(i + 1 == 3 ? 4 : i + 1, path, sizeof path)), "entry %u is left and the next isn't", i);
    remove_tree(folder);
}

TEST(what_is_recent_stays_beyond_the_limit) {
    unsigned count;
    begin();
    at_folder.cache_limit = 1;
    use_numbers(1, 20);
    total_size(1, 20, &count);
    CHECK(count == 20, "%u of 20 entries that were just written are left", count);
    remove_tree(folder);
}

/* A reader that has opened an entry, and a writer's temporary file, are left alone while others trim. */
static const char *race_folder;
static char race_path[4096];
static int race_done;

static moer_file race_open(const char *path, int follow) {
    const moer_file file = moer_file_open(path, follow);
    if (!race_done && strcmp(path, race_path) == 0) { /* between open and read, another process trims */
        moe_route_context *context = NULL;
        moe_route_context_desc desc = at_folder;
        outcome o;
        race_done = 1;
        desc.cache_dir = race_folder;
        desc.cache_limit = 1;
        memset(&o, 0, sizeof o);
        if (stand_in_context(&desc, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK) create_number(context, 60);
        moe_route_context_destroy(context);
    }
    return file;
}

TEST(trimming_disturbs_neither_readers_nor_writers) {
    static moer_files racing;
    char temporary[4200];
    struct stat info;
    outcome o;
    begin();
    use_numbers(1, 1);
    REQUIRE(entry_of(1, race_path, sizeof race_path), "no entry");
    set_age(race_path, 86400);
    snprintf(temporary, sizeof temporary, "%s", race_path);
    snprintf(strrchr(temporary, '/'), 64, "/1234-0-0123456789abcdef.tmp");
    write_bytes(temporary, "a part", 6);
    set_age(temporary, 3000); /* slow, but not yet given up */
    set_looked_through(4000);
    race_folder = folder;
    race_done = 0;
    racing = faulty_files;
    racing.open = race_open;
    moer_default_files = &racing;
    o = use_numbers(1, 1);
    moer_default_files = &faulty_files;
    CHECK(race_done && o.statistics.cache_hits == 1, "%u hits while the entry was removed", (unsigned)o.statistics.cache_hits);
    CHECK(lstat(race_path, &info) != 0, "the old entry wasn't removed: the test shows nothing");
    CHECK(lstat(temporary, &info) == 0, "a temporary file that may be in use was removed");
    set_age(temporary, 4000);
    set_looked_through(4000);
    use_numbers(2, 2);
    CHECK(lstat(temporary, &info) != 0, "an old temporary file wasn't removed");
    remove_tree(folder);
}

/* ---- calls ---- */

typedef struct seen {
    unsigned entries, sound, current, old, for_90;
    uint64_t bytes;
    int combine, named;
} seen;

static void look(const moe_route_cache_entry *entry, void *user) {
    seen *s = (seen *)user;
    s->entries++;
    s->sound += entry->sound != 0;
    s->current += entry->current != 0;
    s->old += entry->seconds_unused > 80000;
    s->for_90 += entry->target == 90 && entry->nvrtc_version == 13000 && entry->driver_version == 0;
    s->bytes += entry->size;
    if (strcmp(entry->kernel, "combine") == 0 && strstr(entry->variant, " K=7 ")) s->combine++;
    if (strncmp(entry->path, folder, strlen(folder)) == 0) s->named++;
}

TEST(the_cache_can_be_listed_verified_and_cleared) {
    moe_route_context *context = NULL;
    char path[4400], odd[4400];
    uint64_t sound = 99, removed = 99;
    struct stat info;
    unsigned count;
    seen s;
    outcome o;
    begin();
    memset(&o, 0, sizeof o);
    memset(&s, 0, sizeof s);
    REQUIRE(stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
    CHECK(moe_route_cache_list(context, look, &s) == MOE_ROUTE_OK && s.entries == 0, "an empty cache lists %u", s.entries);
    use_numbers(1, 10);
    entry_of(4, path, sizeof path);
    set_age(path, 90000);
    CHECK(moe_route_cache_list(context, look, &s) == MOE_ROUTE_OK, "%s", o.trouble);
    CHECK(s.entries == 10 && s.sound == 10 && s.current == 10 && s.old == 1 && s.for_90 == 10 && s.combine == 1 && s.named == 10 && s.bytes == total_size(1, 10, &count),
          "%u entries, %u sound, %u current, %u old, %u for sm_90, %d for k = 7", s.entries, s.sound, s.current, s.old, s.for_90, s.combine);
    CHECK(moe_route_cache_verify(context, &sound, &removed) == MOE_ROUTE_OK && sound == 10 && removed == 0, "%u sound, %u removed", (unsigned)sound, (unsigned)removed);

    write_bytes(path, "damaged", 7);
    entry_of(5, path, sizeof path);
    chmod(path, 0666);
    entry_of(6, path, sizeof path);
    unlink(path);
    CHECK(symlink("/etc/passwd", path) == 0, "no symbolic link");
    entry_of(7, odd, sizeof odd);
    entry_of(8, path, sizeof path);
    CHECK(rename(odd, path) == 0, "rename failed"); /* sound, and under another's name */
    memset(&s, 0, sizeof s);
    CHECK(moe_route_cache_list(context, look, &s) == MOE_ROUTE_OK && s.entries == 9 && s.sound == 5, "%u entries, %u sound", s.entries, s.sound);
    CHECK(moe_route_cache_verify(context, &sound, &removed) == MOE_ROUTE_OK && sound == 5 && removed == 4, "%u sound, %u removed", (unsigned)sound, (unsigned)removed);
    CHECK(lstat("/etc/passwd", &info) == 0, "the target of a symbolic link was removed");
    CHECK(moe_route_cache_verify(context, NULL, NULL) == MOE_ROUTE_OK, "without counts");

    /* what isn't an entry isn't touched; a temporary file only when it is old */
    snprintf(odd, sizeof odd, "%s", path);
    snprintf(strrchr(odd, '/'), 64, "/notes.txt");
    write_bytes(odd, "notes", 5);
    snprintf(path, sizeof path, "%s", odd);
    snprintf(strrchr(path, '/'), 64, "/1-0-0.tmp");
    write_bytes(path, "new", 3);
    CHECK(moe_route_cache_clear(context, &removed) == MOE_ROUTE_OK && removed == 5, "%u removed", (unsigned)removed);
    CHECK(lstat(odd, &info) == 0 && lstat(path, &info) == 0, "a file that isn't an entry was removed");
    set_age(path, 4000);
    CHECK(moe_route_cache_clear(context, NULL) == MOE_ROUTE_OK && lstat(path, &info) != 0, "an old temporary file wasn't removed");
    CHECK(create_number(context, 11) == MOE_ROUTE_OK, "after clearing");
    total_size(1, 11, &count);
    CHECK(count == 1, "%u entries after clearing and one use", count);

    CHECK(moe_route_cache_list(context, NULL, NULL) == MOE_ROUTE_ERROR_ARGUMENT && moe_route_cache_list(NULL, look, &s) == MOE_ROUTE_ERROR_ARGUMENT, "a wrong argument of list");
    CHECK(moe_route_cache_verify(NULL, NULL, NULL) == MOE_ROUTE_ERROR_ARGUMENT && moe_route_cache_clear(NULL, NULL) == MOE_ROUTE_ERROR_ARGUMENT, "no context");
    moe_route_context_destroy(context);

    at_folder.cache_dir = "off";
    context = NULL;
    memset(&s, 0, sizeof s);
    REQUIRE(stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
    CHECK(moe_route_cache_list(context, look, &s) == MOE_ROUTE_OK && s.entries == 0, "without a folder");
    CHECK(moe_route_cache_clear(context, &removed) == MOE_ROUTE_OK && removed == 0, "without a folder");
    moe_route_context_destroy(context);
    remove_tree(folder);
}

/* ---- folders that are only read ---- */

static void run(const char *format, const char *path) {
    char command[1600];
    snprintf(command, sizeof command, format, path);
    CHECK(system(command) == 0, "%s failed", command);
}

TEST(read_only_folders_are_searched_first) {
    char prefilled[600], own[600], missing[600];
    const char *dirs[3];
    char path[4096];
    struct stat before, after;
    outcome o;
    begin();
    snprintf(prefilled, sizeof prefilled, "%s/prefilled", folder);
    snprintf(own, sizeof own, "%s/own", folder);
    snprintf(missing, sizeof missing, "%s/missing", folder);
    at_folder.cache_dir = prefilled;
    use_numbers(1, 5);
    entry_of(1, path, sizeof path);
    set_age(path, 90000);
    stat(path, &before);
    run("chmod -R a-w '%s'", prefilled);

    dirs[0] = prefilled;
    at_folder.cache_dir = own;
    at_folder.cache_read_only_dirs = dirs;
    at_folder.num_cache_read_only_dirs = 1;
    stand_in.missing = 1;
    o = use_numbers(1, 5);
    CHECK(o.statistics.cache_hits == 5 && o.statistics.cache_writes == 0, "%u hits", (unsigned)o.statistics.cache_hits);
    stat(path, &after);
    CHECK(before.st_mtime == after.st_mtime, "an entry in a read-only folder was marked as used");
    stand_in.missing = 0;
    o = use_numbers(4, 8);
    CHECK(o.statistics.cache_hits == 2 && o.statistics.cache_misses == 3 && o.statistics.cache_writes == 3, "%u hits, %u written", (unsigned)o.statistics.cache_hits, (unsigned)o.statistics.cache_writes);
    stand_in.missing = 1;
    o = use_numbers(1, 8);
    CHECK(o.statistics.cache_hits == 8, "%u hits in both folders", (unsigned)o.statistics.cache_hits);
    at_folder.cache_dir = "off"; /* reading alone */
    o = use_numbers(1, 5);
    CHECK(o.statistics.cache_hits == 5, "%u hits without a folder of its own", (unsigned)o.statistics.cache_hits);
    stand_in.missing = 0;

    /* folders that can't be used cost a line each, and the others serve */
    at_folder.cache_dir = own;
    dirs[0] = missing;
    dirs[1] = NULL;
    dirs[2] = prefilled;
    at_folder.num_cache_read_only_dirs = 3;
    o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
    CHECK_RIGHT(o, "missing folders");
    CHECK_TROUBLES(o, 2, "missing folders");
    CHECK(access(missing, F_OK) != 0, "a folder that is only read was created");

    /* the administrator's are trusted, another user's aren't */
    if (geteuid() == 0) {
        at_folder.num_cache_read_only_dirs = 1;
        dirs[0] = prefilled;
        run("chown -R 12345 '%s'", prefilled);
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_TROUBLES(o, 1, "a read-only folder of another user");
        run("chown -R 0 '%s'", prefilled);
        chmod(folder, 0755);
        run("chmod -R a+rX '%s'", prefilled);
        {
            int status = 0;
            pid_t child;
            fflush(stdout);
            child = fork();
            if (child == 0) {
                if (setgid(12345) != 0 || setuid(12345) != 0) _exit(1);
                at_folder.cache_dir = "off";
                stand_in.missing = 1;
                o = use_numbers(1, 5);
                _exit(o.status == MOE_ROUTE_OK && o.statistics.cache_hits == 5 ? 0 : 2);
            }
            waitpid(child, &status, 0);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "another user with root's folder: 0x%x", (unsigned)status);
        }
        run("chmod -R u+w '%s'", prefilled);
        run("chmod o+w '%s'", prefilled);
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_TROUBLES(o, 1, "a read-only folder that others can write");
    }
    at_folder.cache_read_only_dirs = NULL;
    at_folder.num_cache_read_only_dirs = 2;
    o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
    CHECK(o.status == MOE_ROUTE_ERROR_ARGUMENT && strstr(o.message, "cache_read_only_dirs"), "%s", o.message);
    run("chmod -R u+w '%s'", folder);
    remove_tree(folder);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    umask(022);
    unsetenv("MOE_ROUTE_CACHE");
    RUN(the_oldest_entries_go_first);
    RUN(what_is_recent_stays_beyond_the_limit);
    RUN(trimming_disturbs_neither_readers_nor_writers);
    RUN(the_cache_can_be_listed_verified_and_cleared);
    RUN(read_only_folders_are_searched_first);
    return test_end();
}
