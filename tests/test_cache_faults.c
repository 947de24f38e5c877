/*
  test_cache_faults.c: whatever stands in an entry's place, whatever a folder is like, whichever operation on files fails and
  whenever a process is killed: a layer gets the right code, nothing crashes, and the log has at most one line about it.
  NVRTC, the driver and the failing disk are stand-ins.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "support/test.h"
#include "support/stand_ins.h"
#include "support/folders.h"

static moe_route_context_desc at_folder; /* a context description that names `folder` */
static uint64_t seed;

static void begin(void) {
    folder_create();
    stand_in_reset();
    memset(&at_folder, 0, sizeof at_folder);
    at_folder.cache_dir = folder;
}

static outcome use_one(void) { return create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE); }

/* An entry in the folder, whose path is `path`. */
static int make_entry(char *path, size_t size) {
    outcome o = use_one();
    return CHECK_COMPILED(o, "the first use") && CHECK_TROUBLES(o, 0, "the first use") && only_entry(path, size);
}

/* What is in the place of the entry isn't used, which a line says; afterwards an entry is there again. */
static void check_replaced(const char *what) {
    outcome o = use_one();
    CHECK_COMPILED(o, what);
    CHECK_TROUBLES(o, 1, what);
    CHECK(o.statistics.rejects == 1 && o.statistics.cache_misses == 1 && o.statistics.cache_writes == 1, "%s: %u rejects, %u misses, %u writes", what, (unsigned)o.statistics.rejects,
          (unsigned)o.statistics.cache_misses, (unsigned)o.statistics.cache_writes);
    o = use_one();
    CHECK_CACHED(o, what);
    CHECK_TROUBLES(o, 0, what);
}

/* ---- digests ---- */

static void check_digest(const void *data, size_t size, size_t step, const char *wanted) {
    moer_sha256 hash;
    unsigned char digest[32];
    char text[65] = "";
    size_t i;
    moer_sha256_begin(&hash);
    for (i = 0; i < size; i += step) moer_sha256_add(&hash, (const unsigned char *)data + i, size - i < step ? size - i : step);
    moer_sha256_end(&hash, digest);
    for (i = 0; i < 32; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
    CHECK(strcmp(text, wanted) == 0, "%lu bytes in steps of %lu: %s", (unsigned long)size, (unsigned long)step, text);
}

/* The examples that NIST publishes for SHA-256, hashed in pieces of every length. */
TEST(digests_are_sha_256) {
    static const char two[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    static char million[1000000];
    size_t step;
    check_digest("", 0, 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_digest("abc", 3, 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    for (step = 1; step <= 56; step++) check_digest(two, 56, step, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    memset(million, 'a', sizeof million);
    for (step = 63; step <= 200; step += 17) check_digest(million, sizeof million, step, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* ---- entries ---- */

static unsigned char entry[65536];

TEST(every_damaged_byte_is_noticed) {
    char path[4096], what[64];
    test_random random;
    size_t size, i;
    begin();
    random_seed(&random, seed);
    if (make_entry(path, sizeof path)) {
        size = read_bytes(path, entry, sizeof entry);
        for (i = 0; i < size; i++) {
            moer_entry parsed;
            const unsigned char flip = (unsigned char)(1u << random_below(&random, 8));
            entry[i] ^= flip;
            CHECK(!moer_entry_parse(entry, size, &parsed), "byte %lu of %lu, changed by 0x%02x", (unsigned long)i, (unsigned long)size, flip);
            CHECK(!moer_entry_parse(entry, i, &parsed), "cut at byte %lu of %lu", (unsigned long)i, (unsigned long)size);
            if (i % 40 == 0) {
                write_bytes(path, entry, size);
                snprintf(what, sizeof what, "byte %lu changed", (unsigned long)i);
                check_replaced(what);
            }
            entry[i] ^= flip;
            if (i % 40 == 0) {
                write_bytes(path, entry, i);
                snprintf(what, sizeof what, "cut at byte %lu", (unsigned long)i);
                check_replaced(what);
            }
        }
    }
    remove_tree(folder);
}

TEST(entries_of_other_variants_are_noticed) {
    char path[4096], other[4096] = "";
    moer_key key;
    moer_bytes code, made;
    moe_route_context *context = NULL;
    outcome o;
    size_t size;
    begin();
    if (make_entry(path, sizeof path)) {
        memset(&o, 0, sizeof o);
        REQUIRE(stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
        /* sound in itself, and of another key: as if it had been renamed */
        code.data = (unsigned char *)"\177ELF of another variant";
        code.size = 24;
        REQUIRE(moer_key_make(&key, "expand", "ELEMENT_BYTES=1", 90), "no key");
        made = moer_entry_make(context, &key, &code);
        write_bytes(path, made.data, made.size);
        moer_free(context, made.data);
        check_replaced("an entry of another variant");
        /* the same variant for another architecture */
        snprintf(other, sizeof other, "%s", path);
        size = read_bytes(path, entry, sizeof entry);
        moer_write_number(entry + 16, 80, 4);
        moer_digest(entry, moer_read_number(entry + 12, 4) - 32, entry + moer_read_number(entry + 12, 4) - 32);
        write_bytes(path, entry, size);
        check_replaced("an entry that says it is for another architecture");
        moe_route_context_destroy(context);
    }
    remove_tree(folder);
}

/* Content that is right by all digests, under the right name, and no code. */
TEST(foreign_payloads_are_noticed) {
    static const char *const payloads[] = {"#!/bin/sh", "", "\177EL"};
    char path[4096];
    size_t i;
    begin();
    if (make_entry(path, sizeof path)) {
        for (i = 0; i < 3; i++) {
            const size_t size = read_bytes(path, entry, sizeof entry), header = (size_t)moer_read_number(entry + 12, 4), length = strlen(payloads[i]);
            REQUIRE(size > header, "no entry");
            memcpy(entry + header, payloads[i], length);
            moer_write_number(entry + 40, length, 8);
            moer_digest(entry + header, length, entry + 48);
            moer_digest(entry, header - 32, entry + header - 32);
            write_bytes(path, entry, header + length);
            check_replaced(payloads[i]);
        }
    }
    remove_tree(folder);
}

TEST(odd_files_in_an_entrys_place_are_replaced) {
    char path[4096], elsewhere[4200], target[64];
    unsigned char byte[1];
    outcome o;
    begin();
    if (make_entry(path, sizeof path)) {
        write_bytes(path, "", 0);
        check_replaced("an empty file");

        snprintf(elsewhere, sizeof elsewhere, "%s.elsewhere", folder);
        rename(path, elsewhere);
        CHECK(symlink(elsewhere, path) == 0, "no symbolic link");
        check_replaced("a symbolic link to a sound entry");
        CHECK(read_bytes(elsewhere, byte, 1) == 1, "the link's target is gone");
        unlink(elsewhere);

        unlink(path);
        CHECK(symlink("/dev/zero", path) == 0, "no symbolic link");
        check_replaced("a symbolic link to a device");
        CHECK(readlink(path, target, sizeof target) < 0, "the link is still there");

        unlink(path);
        CHECK(mkfifo(path, 0600) == 0, "no FIFO");
        check_replaced("a FIFO");

        if (geteuid() == 0) {
            unlink(path);
            if (mknod(path, S_IFCHR | 0600, 1 << 8 | 5) == 0) check_replaced("a device without end");
            else write_bytes(path, "", 0);
        }

        chmod(path, 0620);
        check_replaced("a file that its group can write");
        chmod(path, 0602);
        check_replaced("a file that all can write");
        if (geteuid() == 0) {
            CHECK(chown(path, 12345, (gid_t)-1) == 0, "no other owner");
            check_replaced("a file of another user");
        }

        unlink(path);
        mkdir(path, 0700);
        o = use_one();
        CHECK_COMPILED(o, "a folder");
        CHECK_TROUBLES(o, 1, "a folder");
        CHECK(o.statistics.rejects == 1 && o.statistics.cache_write_failures == 0, "a folder: %u rejects, %u write failures", (unsigned)o.statistics.rejects,
              (unsigned)o.statistics.cache_write_failures);
        o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE); /* the other variants are still written */
        CHECK(o.statistics.cache_writes == o.num_variants - 1, "beside the folder %u of %u variants were written", (unsigned)o.statistics.cache_writes, o.num_variants);
    }
    remove_tree(folder);
}

/* ---- folders ---- */

/* The folder isn't used, which a line says; nothing changes in it. */
static void check_unused(const char *dir, const char *what) {
    moe_route_context_desc desc = at_folder;
    outcome o;
    desc.cache_dir = dir;
    o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
    CHECK_COMPILED(o, what);
    CHECK_TROUBLES(o, 1, what);
    CHECK(o.cache_dir[0] == 0 && o.statistics.cache_misses == 0, "%s: %s is used", what, o.cache_dir);
}

TEST(folders_of_others_are_not_used) {
    char path[4096], shelf[4096], link_path[600];
    outcome o;
    begin();
    if (make_entry(path, sizeof path)) {
        static const mode_t modes[] = {0720, 0702, 0777, 01777};
        size_t i;
        for (i = 0; i < 4; i++) {
            chmod(folder, modes[i]);
            check_unused(folder, "a folder that others can write");
        }
        chmod(folder, 0700);
        snprintf(shelf, sizeof shelf, "%s/v1", folder);
        chmod(shelf, 0777);
        check_unused(folder, "a folder below that others can write");
        chmod(shelf, 0700);
        if (geteuid() == 0) {
            CHECK(chown(folder, 12345, (gid_t)-1) == 0, "no other owner");
            check_unused(folder, "a folder of another user");
            CHECK(chown(folder, 0, (gid_t)-1) == 0, "no own folder");
        }
        snprintf(link_path, sizeof link_path, "%s.link", folder);
        CHECK(symlink(folder, link_path) == 0, "no symbolic link");
        check_unused(link_path, "a symbolic link to the folder");
        strcat(link_path, "/");
        check_unused(link_path, "a symbolic link to the folder, with a slash");
        link_path[strlen(link_path) - 1] = 0;
        unlink(link_path);

        /* Where entries of one first byte lie: read, because the entry itself is checked, and not written. */
        snprintf(shelf, sizeof shelf, "%s", path);
        *strrchr(shelf, '/') = 0;
        unlink(path);
        chmod(shelf, 0777);
        o = use_one();
        CHECK_COMPILED(o, "a shelf that others can write");
        CHECK_TROUBLES(o, 1, "a shelf that others can write");
        CHECK(o.statistics.cache_write_failures == 1, "%u write failures", (unsigned)o.statistics.cache_write_failures);

        chmod(folder, 0777);
        at_folder.trust_shared_cache = 1;
        o = use_one();
        CHECK_COMPILED(o, "a shared folder that is trusted");
        CHECK_TROUBLES(o, 0, "a shared folder that is trusted");
        o = use_one();
        CHECK_CACHED(o, "a shared folder that is trusted");
    }
    remove_tree(folder);
}

TEST(odd_paths_work_or_are_refused) {
    static const char *const names[] = {"a\\b", "with space", "\xc3\xa4\xe4\xb8\xad\xf0\x9f\x98\x80", "\xff\xfe", "%s%n", "-", "a/./b//c"};
    static char path[9000];
    moe_route_context_desc desc;
    struct stat info;
    size_t i, length;
    outcome o;
    begin();
    desc = at_folder;
    desc.cache_dir = path;
    for (i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_COMPILED(o, names[i]);
        CHECK_TROUBLES(o, 0, names[i]);
        o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_CACHED(o, names[i]);
        CHECK(stat(path, &info) == 0 && S_ISDIR(info.st_mode), "there is no folder %s", path);
    }
    /* as long as the system allows: components of 200 characters */
    for (length = 500; length < 9000; length += length < 3800 || length > 4200 ? 500 : 20) {
        snprintf(path, sizeof path, "%s", folder);
        while (strlen(path) < length) {
            const size_t used = strlen(path), part = length - used < 200 ? length - used : 200;
            path[used] = '/';
            memset(path + used + 1, 'x', part);
            path[used + 1 + part] = 0;
        }
        o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_COMPILED(o, "a long path");
        CHECK(o.troubles <= 1, "%u lines about a path of %lu characters", o.troubles, (unsigned long)length);
        o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_RIGHT(o, "a long path");
        if (length <= 3800) CHECK_CACHED(o, "a long path");
    }
    memset(path, 'z', sizeof path - 1);
    memcpy(path, folder, strlen(folder));
    for (length = strlen(folder); length < sizeof path; length += 200) path[length] = '/';
    path[sizeof path - 1] = 0;
    setenv("MOE_ROUTE_CACHE_DIR", path, 1); /* so long that it can't even be kept: no other folder is used in its stead */
    desc.cache_dir = NULL;
    o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
    CHECK_COMPILED(o, "a variable of 9000 characters");
    CHECK_TROUBLES(o, 1, "a variable of 9000 characters");
    CHECK(o.cache_dir[0] == 0, "a variable of 9000 characters: %.80s is used", o.cache_dir);
    unsetenv("MOE_ROUTE_CACHE_DIR");
    desc.cache_dir = path;
    memset(path, 'y', 300); /* one component that no file system has */
    memcpy(path, folder, strlen(folder));
    path[strlen(folder)] = '/';
    path[strlen(folder) + 290] = 0;
    check_unused(path, "a name of 290 characters");
    remove_tree(folder);
}

static void rlimit_files(rlim_t bytes) {
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes == RLIM_INFINITY ? limit.rlim_max : bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

/* The real calls, without stand-ins for the disk: a limit on file sizes makes write fail as a full disk does. */
TEST(a_limit_on_file_sizes_is_a_full_disk) {
    outcome o;
    begin();
    moer_default_files = &moer_system_files;
    signal(SIGXFSZ, SIG_IGN);
    rlimit_files(300);
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    rlimit_files(RLIM_INFINITY);
    signal(SIGXFSZ, SIG_DFL);
    CHECK_COMPILED(o, "a full disk");
    CHECK_TROUBLES(o, 1, "a full disk");
    CHECK(o.statistics.cache_write_failures >= 1 && o.statistics.cache_writes == 0, "%u write failures, %u writes", (unsigned)o.statistics.cache_write_failures, (unsigned)o.statistics.cache_writes);
    check_files(0, "a full disk");
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_COMPILED(o, "after a full disk");
    CHECK_TROUBLES(o, 0, "after a full disk");
    remove_tree(folder);
}

/* As another user than root, whom modes don't bind: in a child process. */
static int as_user(int (*use)(void)) {
    int status = 0;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        if (geteuid() == 0 && (setgid(12345) != 0 || setuid(12345) != 0)) _exit(100);
        _exit(use());
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 101;
}

static uint32_t wanted_hits, wanted_troubles;

static int use_from_child(void) {
    outcome o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    if (o.status != MOE_ROUTE_OK || o.wrong) return 1;
    if (o.troubles != wanted_troubles) return fprintf(stderr, "%u lines, the last: %s\n", o.troubles, o.trouble), 2;
    return o.statistics.cache_hits == wanted_hits ? 0 : 3;
}

static void give_tree(const char *path, uid_t user) {
    char command[1100];
    if (geteuid() != 0) return;
    snprintf(command, sizeof command, "chown -R %u '%s'", (unsigned)user, path);
    CHECK(system(command) == 0, "%s failed", command);
}

TEST(read_only_folders_are_read) {
    char command[1600];
    int result;
    outcome o;
    begin();
    o = use_one();
    CHECK_COMPILED(o, "the first use");
    give_tree(folder, 12345);
    snprintf(command, sizeof command, "chmod -R a-w '%s'", folder);
    CHECK(system(command) == 0, "chmod failed");
    wanted_hits = 1;
    wanted_troubles = 1; /* the variants that aren't there can't be written */
    result = as_user(use_from_child);
    CHECK(result == 0, "a read-only folder: %d", result);
    snprintf(command, sizeof command, "chmod -R u+w '%s'", folder);
    CHECK(system(command) == 0, "chmod failed");
    snprintf(command, sizeof command, "rm -rf '%s'/*; chmod a-w '%s'", folder, folder);
    CHECK(system(command) == 0, "rm failed");
    wanted_hits = 0;
    result = as_user(use_from_child);
    CHECK(result == 0, "an empty read-only folder: %d", result);
    chmod(folder, 0700);
    wanted_troubles = 0;
    give_tree(folder, geteuid());
    remove_tree(folder);
}

/* A user without a home and without an entry in the table of users, as container platforms make them. */
static int use_without_home(void) {
    moe_route_context_desc desc = at_folder;
    outcome o;
    desc.cache_dir = NULL;
    unsetenv("XDG_CACHE_HOME");
    unsetenv("MOE_ROUTE_CACHE_DIR");
    o = create_layer(&desc, ALL_OPERATIONS, STAND_IN_COMPILE);
    if (o.status != MOE_ROUTE_OK || o.wrong || o.num_compiled != o.num_variants) return 1;
    if (o.troubles != 1) return fprintf(stderr, "%u lines, the last: %s\n", o.troubles, o.trouble), 2;
    return o.cache_dir[0] ? 3 : strstr(o.trouble, "MOE_ROUTE_CACHE_DIR") ? 0 : 4;
}

TEST(without_a_home_memory_serves) {
    static const char *const homes[] = {NULL, "", "/", "relative"};
    const char *home = getenv("HOME");
    char saved[1024] = "";
    size_t i;
    begin();
    if (home) snprintf(saved, sizeof saved, "%s", home);
    if (geteuid() != 0) {
        remove_tree(folder);
        SKIP("only root can become a user who isn't in the table of users");
    }
    for (i = 0; i < 4; i++) {
        int result;
        if (homes[i]) setenv("HOME", homes[i], 1);
        else unsetenv("HOME");
        result = as_user(use_without_home);
        CHECK(result == 0, "HOME %s: %d", homes[i] ? homes[i] : "unset", result);
    }
    if (home) setenv("HOME", saved, 1);
    remove_tree(folder);
}

/* As a program with the set-user-id bit: its caller must not choose what it loads. */
static int use_with_more_rights(void) {
    moe_route_context_desc desc = at_folder;
    outcome o;
    desc.cache_dir = NULL;
    if (seteuid(12345) != 0) return 1;
    setenv("MOE_ROUTE_CACHE_DIR", folder, 1);
    setenv("XDG_CACHE_HOME", folder, 1);
    setenv("HOME", folder, 1);
    o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
    if (o.status != MOE_ROUTE_OK || o.wrong || o.cache_dir[0]) return 2;
    desc.cache_dir = folder; /* the program itself may */
    o = create_layer(&desc, ONE_OPERATION, STAND_IN_COMPILE);
    return o.cache_dir[0] && o.statistics.cache_writes == 1 ? 0 : 3;
}

TEST(programs_with_more_rights_ignore_the_environment) {
    int status = 0;
    pid_t child;
    begin();
    if (geteuid() != 0) {
        remove_tree(folder);
        SKIP("only root can have another user's rights");
    }
    give_tree(folder, 12345);
    fflush(stdout);
    child = fork();
    if (child == 0) _exit(use_with_more_rights());
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with 0x%x", (unsigned)status);
    remove_tree(folder);
}

/* ---- failing operations ---- */

typedef struct fault_case {
    fault_kind kind;
    int error;
    unsigned most; /* this many of the kind are made to fail, one after the other */
    const char *name;
} fault_case;

static const fault_case fault_cases[] = {
    {FAULT_OPEN, ESTALE, 6, "open, ESTALE"},       {FAULT_OPEN, EIO, 6, "open, EIO"},         {FAULT_OPEN, ENOENT, 6, "open, late visibility"}, {FAULT_CREATE, ENOSPC, 6, "create, disk full"},
    {FAULT_CREATE, EROFS, 2, "create, read-only"}, {FAULT_CREATE, EDQUOT, 2, "create, quota"}, {FAULT_CREATE, ENOENT, 6, "create, late visibility"}, {FAULT_INSPECT, ESTALE, 9, "fstat, ESTALE"},
    {FAULT_READ, EIO, 30, "read, EIO"},            {FAULT_READ, ESTALE, 30, "read, ESTALE"},  {FAULT_WRITE, ENOSPC, 30, "write, disk full"},      {FAULT_WRITE, EIO, 30, "write, EIO"},
    {FAULT_FLUSH, ENOSPC, 6, "fsync, disk full"},  {FAULT_FLUSH, EIO, 6, "fsync, EIO"},       {FAULT_CLOSE, ENOSPC, 12, "close, disk full"},      {FAULT_CLOSE, EDQUOT, 12, "close, quota"},
    {FAULT_RENAME, EBUSY, 6, "rename, EBUSY"},     {FAULT_RENAME, ESTALE, 6, "rename, ESTALE"}, {FAULT_RENAME_DONE, ENOENT, 6, "rename, done and failed"}, {FAULT_REMOVE, EBUSY, 6, "unlink, EBUSY"},
    {FAULT_TOUCH, EROFS, 2, "utimens, read-only"}, {FAULT_FOLDER_CREATE, ENOSPC, 8, "mkdir, disk full"}, {FAULT_FOLDER_INSPECT, ESTALE, 8, "open of a folder, ESTALE"},
    {FAULT_FOLDER_INSPECT, ENOENT, 8, "open of a folder, late visibility"}, {FAULT_FOLDER_OPEN, EIO, 4, "opendir, EIO"}, {FAULT_ANY, EIO, 60, "any, EIO"}, {FAULT_ANY, ESTALE, 60, "any, ESTALE"}};

/* One layer cold and one warm, with the operation number `at` and `count` - 1 after it failing. Then nothing fails, and the
   cache works as if nothing had been. */
static void check_fault(const fault_case *c, unsigned at, unsigned count) {
    char what[96];
    outcome o;
    int round;
    snprintf(what, sizeof what, "%s, number %u%s", c->name, at, count ? "" : " and on");
    for (round = 0; round < 2; round++) {
        fault.kind = c->kind;
        fault.error = c->error;
        fault.at = at;
        fault.count = count;
        fault.seen = 0;
        o = create_layer(&at_folder, ALL_OPERATIONS, round ? STAND_IN_GPU : STAND_IN_COMPILE);
        CHECK_RIGHT(o, what);
        if (count) CHECK(o.troubles <= 1, "%s, round %d: %u lines in the log, the last: %s", what, round, o.troubles, o.trouble);
        fault.kind = FAULT_NONE;
    }
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_RIGHT(o, what);
    CHECK_TROUBLES(o, 0, what);
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_CACHED(o, what);
}

TEST(every_operation_on_files_may_fail) {
    size_t i;
    for (i = 0; i < sizeof fault_cases / sizeof *fault_cases; i++) {
        unsigned at;
        for (at = 1; at <= fault_cases[i].most; at++) {
            begin();
            check_fault(&fault_cases[i], at, 1);
            remove_tree(folder);
        }
        begin();
        check_fault(&fault_cases[i], 1, 0);
        remove_tree(folder);
    }
}

/* Half of all operations fail, with the errors of network file systems. */
TEST(network_file_systems_may_fail_anywhere) {
    unsigned round;
    outcome o;
    for (round = 0; round < 40; round++) {
        begin();
        fault.percent = round < 20 ? 10 : 50;
        fault.state = (unsigned)seed + round * 1000003u;
        o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
        CHECK_RIGHT(o, "failing operations, cold");
        o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
        CHECK_RIGHT(o, "failing operations, warm");
        fault.percent = 0;
        o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
        CHECK_RIGHT(o, "after failing operations");
        o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
        CHECK_CACHED(o, "after failing operations");
        remove_tree(folder);
    }
}

/* ---- killed processes, changed clocks, deleted folders ---- */

static void set_age(const char *path, long seconds) {
    struct timespec times[2];
    times[0].tv_sec = times[1].tv_sec = time(NULL) - seconds;
    times[0].tv_nsec = times[1].tv_nsec = 0;
    utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

static void set_ages(const char *path, long seconds) {
    DIR *stream = opendir(path);
    struct dirent *found;
    while (stream && (found = readdir(stream)) != NULL) {
        char below[4096];
        struct stat info;
        if (found->d_name[0] == '.') continue;
        snprintf(below, sizeof below, "%s/%s", path, found->d_name);
        if (lstat(below, &info) == 0 && S_ISDIR(info.st_mode)) set_ages(below, seconds);
        else set_age(below, seconds);
    }
    if (stream) closedir(stream);
}

TEST(a_process_may_be_killed_at_any_moment) {
    unsigned at, killed = 0, left = 0;
    for (at = 1; at < 400; at++) {
        char found[4096];
        uint32_t entries = 0, others = 0;
        int status = 0;
        pid_t child;
        outcome o;
        begin();
        fflush(stdout);
        child = fork();
        if (child == 0) {
            fault.kind = FAULT_ANY;
            fault.at = at;
            fault.count = 1;
            fault.kill = SIGKILL;
            o = create_layer(&at_folder, MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE, STAND_IN_COMPILE);
            _exit(o.status == MOE_ROUTE_OK && !o.wrong ? 0 : 1);
        }
        waitpid(child, &status, 0);
        if (WIFEXITED(status)) {
            CHECK(WEXITSTATUS(status) == 0, "operation %u: the process failed without being killed", at);
            remove_tree(folder);
            break;
        }
        killed++;
        count_files(folder, &entries, &others, found, sizeof found);
        CHECK(others <= 2, "killed at operation %u: %u other files", at, others);
        left += others;
        o = create_layer(&at_folder, MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE, STAND_IN_COMPILE);
        CHECK_RIGHT(o, "after a killed process");
        CHECK_TROUBLES(o, 0, "after a killed process");
        CHECK(o.statistics.cache_hits == entries, "killed at operation %u: %u hits of %u entries", at, (unsigned)o.statistics.cache_hits, entries);
        /* what it left goes once it is old, wherever it lies */
        set_ages(folder, 7200);
        setenv("MOE_ROUTE_CACHE", "refresh", 1);
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
        unsetenv("MOE_ROUTE_CACHE");
        CHECK_COMPILED(o, "refresh");
        others = entries = 0;
        count_files(folder, &entries, &others, found, sizeof found);
        CHECK(others == 0, "killed at operation %u: an old temporary file is still there", at);
        remove_tree(folder);
    }
    CHECK(killed > 20 && left > 5 && at < 400, "%u processes were killed and %u left something", killed, left);
}

TEST(the_clock_may_change) {
    static const long ages[] = {-100000000, -86400, -3601, 0, 3601, 86400, 100000000};
    char path[4096];
    struct stat info;
    size_t i;
    outcome o;
    begin();
    if (make_entry(path, sizeof path)) {
        for (i = 0; i < sizeof ages / sizeof *ages; i++) {
            set_age(path, ages[i]);
            o = use_one();
            CHECK_CACHED(o, "another date of the file");
            CHECK_TROUBLES(o, 0, "another date of the file");
            CHECK(stat(path, &info) == 0 && labs((long)(info.st_mtime - time(NULL))) < 600, "the entry of age %ld isn't marked as used", ages[i]);
            fault.clock = ages[i];
            o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
            CHECK_RIGHT(o, "another date of the machine");
            CHECK_TROUBLES(o, 0, "another date of the machine");
            fault.clock = 0;
            o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
            CHECK_CACHED(o, "after another date of the machine");
        }
    }
    remove_tree(folder);
}

TEST(the_folder_may_be_deleted_while_in_use) {
    moe_route_context *context = NULL;
    moe_route_layer *layers[3] = {NULL, NULL, NULL};
    char path[600];
    outcome o;
    begin();
    memset(&o, 0, sizeof o);
    REQUIRE(stand_in_context(&at_folder, STAND_IN_GPU, &o, &context) == MOE_ROUTE_OK, "no context");
    remove_tree(folder);
    CHECK(stand_in_layer(context, MOE_ROUTE_OPERATION_EXPAND, &layers[0]) == MOE_ROUTE_OK, "after deleting all");
    check_files(1, "after deleting all");
    snprintf(path, sizeof path, "%s/v1", folder);
    remove_tree(path);
    CHECK(stand_in_layer(context, MOE_ROUTE_OPERATION_COMBINE, &layers[1]) == MOE_ROUTE_OK, "after deleting a part");
    check_files(1, "after deleting a part");
    remove_tree(folder); /* and somebody else makes it anew, for all to write */
    mkdir(folder, 0777);
    chmod(folder, 0777);
    snprintf(path, sizeof path, "%s/v1", folder);
    mkdir(path, 0777);
    chmod(path, 0777);
    CHECK(stand_in_layer(context, MOE_ROUTE_OPERATION_MAPS, &layers[2]) == MOE_ROUTE_OK, "after making it anew");
    CHECK(stand_in_count_wrong(context) == 0, "wrong code");
    moe_route_layer_destroy(layers[0]);
    moe_route_layer_destroy(layers[1]);
    moe_route_layer_destroy(layers[2]);
    moe_route_context_destroy(context);
    o = create_layer(&at_folder, MOE_ROUTE_OPERATION_MAPS, STAND_IN_GPU);
    CHECK_COMPILED(o, "a folder of others in the place of a deleted one");
    remove_tree(folder);
}

/* ---- versions ---- */

TEST(newer_nvrtc_and_drivers_use_older_entries) {
    outcome o;
    begin();
    stand_in.nvrtc_version = 12000;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK_COMPILED(o, "NVRTC 12.0");
    stand_in.nvrtc_version = 13030;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK_CACHED(o, "NVRTC 13.3");
    stand_in.missing = 1;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK_CACHED(o, "without NVRTC");
    CHECK_TROUBLES(o, 0, "without NVRTC");
    remove_tree(folder);
}

TEST(entries_that_the_driver_refuses_are_replaced_once) {
    char path[4096], now[4096];
    struct stat before, after;
    unsigned compiles;
    outcome o;
    begin();
    if (make_entry(path, sizeof path)) {
        set_age(path, 1000);
        REQUIRE(stat(path, &before) == 0, "no entry");
        compiles = stand_in.compiles;
        stand_in.refuse = 1;
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_GPU);
        CHECK_COMPILED(o, "a refused entry");
        CHECK_TROUBLES(o, 1, "a refused entry");
        CHECK(stand_in.compiles == compiles + 1 && stand_in.refusals == 1 && o.statistics.rejects == 1, "%u compilations, %u refusals", stand_in.compiles - compiles, stand_in.refusals);
        only_entry(now, sizeof now);
        CHECK(strcmp(path, now) == 0 && stat(path, &after) == 0 && after.st_mtime - before.st_mtime > 500, "the entry wasn't replaced");
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_GPU);
        CHECK_CACHED(o, "after a refused entry");

        /* a driver that refuses new code as well: an error, and no loop */
        compiles = stand_in.compiles;
        stand_in.refuse = 1000;
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_GPU);
        CHECK(o.status == MOE_ROUTE_ERROR_DRIVER && stand_in.compiles == compiles + 1 && stand_in.refuse == 998, "%s, %u compilations, %d refusals", moe_route_status_name(o.status),
              stand_in.compiles - compiles, 1000 - stand_in.refuse);
        check_files(0, "a driver that refuses everything");
        stand_in.refuse = 0;
        o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_GPU);
        CHECK_COMPILED(o, "a driver that works again");
    }
    remove_tree(folder);
}

/* Another version of the library, with other sources, has keys of its own in the same folder. */
TEST(two_versions_share_a_folder) {
    char path[4096], other[4096], *digest;
    moer_key key;
    moer_bytes code, bytes;
    moer_entry parsed;
    moe_route_context *context = NULL;
    uint32_t entries = 0, others = 0;
    char family[64], defines[512], why[256];
    int current;
    outcome o;
    begin();
    if (make_entry(path, sizeof path)) {
        size_t size = read_bytes(path, entry, sizeof entry);
        REQUIRE(moer_entry_parse(entry, size, &parsed), "the entry isn't sound");
        CHECK(moer_key_read(&parsed, family, sizeof family, defines, sizeof defines, &current) && current && strcmp(family, "expand") == 0, "the key is of %s, current %d", family, current);
        memset(&o, 0, sizeof o);
        REQUIRE(stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
        memset(&key, 0, sizeof key);
        memcpy(key.text, parsed.key_text, parsed.key_size);
        key.text_size = parsed.key_size;
        key.target = parsed.target;
        digest = strstr(key.text, moer_sources_digest);
        REQUIRE(digest, "the key doesn't hold the digest of the sources");
        CHECK(strstr(key.text, MOER_CODE_OPTIONS) && strstr(key.text, "sm_90"), "the key holds neither options nor architecture: %s", key.text);
        digest[0] = digest[0] == '0' ? '1' : '0';
        moer_digest(key.text, key.text_size, key.digest);
        code.data = (unsigned char *)"\177ELF of another version";
        code.size = 24;
        bytes = moer_entry_make(context, &key, &code);
        CHECK(moer_cache_publish(context, &key, &bytes, why, sizeof why), "%s", why);
        CHECK(moer_entry_parse(bytes.data, bytes.size, &parsed) && moer_key_read(&parsed, family, sizeof family, defines, sizeof defines, &current) && !current, "it passes for current");
        moer_free(context, bytes.data);
        moe_route_context_destroy(context);
        count_files(folder, &entries, &others, other, sizeof other);
        CHECK(entries == 2, "%u entries of two versions", entries);
        o = use_one();
        CHECK_CACHED(o, "beside another version");
        /* its entry under this version's name isn't used */
        snprintf(other, sizeof other, "%s", folder);
        context = NULL;
        memset(&o, 0, sizeof o);
        REQUIRE(stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
        moer_cache_path(context->cache.folder, key.digest, 1, other, sizeof other);
        moe_route_context_destroy(context);
        CHECK(rename(other, path) == 0, "rename failed");
        check_replaced("an entry of another version");
    }
    remove_tree(folder);
}

/* ---- statistics ---- */

TEST(statistics_count_what_happened) {
    outcome o;
    uint32_t n;
    begin();
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    n = o.num_variants;
    CHECK(n >= 3 && o.statistics.cache_hits == 0 && o.statistics.cache_misses == n && o.statistics.compiles == n && o.statistics.cache_writes == n && o.statistics.rejects == 0 &&
              o.statistics.cache_write_failures == 0 && o.statistics.pack_hits == 0,
          "cold: %u hits, %u misses, %u compiled, %u written", (unsigned)o.statistics.cache_hits, (unsigned)o.statistics.cache_misses, (unsigned)o.statistics.compiles, (unsigned)o.statistics.cache_writes);
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK(o.statistics.cache_hits == n && o.statistics.cache_misses == 0 && o.statistics.compiles == 0 && o.statistics.cache_writes == 0 && o.statistics.compile_milliseconds == 0,
          "warm: %u hits of %u, %u misses, %u compiled", (unsigned)o.statistics.cache_hits, n, (unsigned)o.statistics.cache_misses, (unsigned)o.statistics.compiles);
    at_folder.cache_dir = "off";
    stand_in.compile_microseconds = 3000;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK(o.statistics.cache_hits == 0 && o.statistics.cache_misses == 0 && o.statistics.compiles == n && o.statistics.cache_writes == 0, "off: %u misses, %u compiled", (unsigned)o.statistics.cache_misses,
          (unsigned)o.statistics.compiles);
    CHECK(o.statistics.compile_milliseconds >= 3.0 * n, "%u compilations of at least 3 ms took %g ms", n, o.statistics.compile_milliseconds);
    stand_in.compile_fails = 1;
    o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
    CHECK(o.status == MOE_ROUTE_ERROR_COMPILE && o.statistics.compiles == 0, "%s, %u compiled", moe_route_status_name(o.status), (unsigned)o.statistics.compiles);
    moe_route_context_get_statistics(NULL, &o.statistics);
    CHECK(o.statistics.compile_milliseconds == 0, "without a context");
    moe_route_context_get_statistics(NULL, NULL);
    remove_tree(folder);
}

/* ---- hooks ---- */

typedef struct hooks {
    moe_route_context *context;
    unsigned calls, locked;
    long held;
} hooks;

static void hooks_look(hooks *h) {
    h->calls++;
    if (!h->context) return;
    if (pthread_mutex_trylock(&h->context->mutex) != 0) h->locked++;
    else pthread_mutex_unlock(&h->context->mutex);
}

static void *hooks_alloc(size_t size, void *user) {
    hooks *h = (hooks *)user;
    hooks_look(h);
    h->held++;
    return malloc(size);
}

static void hooks_free(void *memory, void *user) {
    hooks *h = (hooks *)user;
    hooks_look(h);
    h->held--;
    free(memory);
}

/* With one variant there is one thread, so that a mutex that is taken is taken by the caller of the hook. */
TEST(hooks_are_called_without_a_lock) {
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    hooks h;
    outcome o;
    begin();
    memset(&h, 0, sizeof h);
    memset(&o, 0, sizeof o);
    at_folder.allocator.alloc = hooks_alloc;
    at_folder.allocator.free = hooks_free;
    at_folder.allocator.user = &h;
    REQUIRE(stand_in_context(&at_folder, STAND_IN_GPU, &o, &context) == MOE_ROUTE_OK, "no context");
    h.context = context;
    stand_in.compile_fails = 1;
    CHECK(stand_in_layer(context, ONE_OPERATION, &layer) == MOE_ROUTE_ERROR_COMPILE, "a compilation that fails");
    stand_in.compile_fails = 0;
    CHECK(stand_in_layer(context, ONE_OPERATION, &layer) == MOE_ROUTE_OK, "a compilation");
    moe_route_layer_destroy(layer);
    CHECK(stand_in_layer(context, ONE_OPERATION, &layer) == MOE_ROUTE_OK, "a variant in memory");
    CHECK(h.calls > 20 && h.locked == 0, "%u of %u calls of the allocator came under the context's mutex", h.locked, h.calls);
    h.context = NULL; /* it is about to go */
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    CHECK(h.held == 0, "%ld allocations are left", h.held);
    remove_tree(folder);
}

/* ---- fork ---- */

TEST(a_forked_child_is_told_and_can_clean_up) {
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL, *another = NULL;
    outcome o;
    int status = 0;
    pid_t child;
    begin();
    memset(&o, 0, sizeof o);
    REQUIRE(stand_in_context(&at_folder, STAND_IN_GPU, &o, &context) == MOE_ROUTE_OK, "no context");
    REQUIRE(stand_in_layer(context, ONE_OPERATION, &layer) == MOE_ROUTE_OK, "no layer");
    fflush(stdout);
    child = fork();
    if (child == 0) {
        const unsigned compiles = stand_in.compiles;
        char message[256];
        int failed = stand_in_layer(context, ALL_OPERATIONS, &another) != MOE_ROUTE_ERROR_FORKED || another || stand_in.compiles != compiles;
        moe_route_message(context, message, sizeof message);
        if (!strstr(message, "fork")) failed |= 2;
        if (stand_in_layer(context, ONE_OPERATION, &another) != MOE_ROUTE_ERROR_FORKED) failed |= 4; /* it is in memory */
        if (moe_route_pack_load(context, "/nonexistent") != MOE_ROUTE_ERROR_FORKED) failed |= 8;
        context->driver.cuLibraryUnload = NULL; /* calling it would crash */
        moe_route_layer_destroy(layer);
        moe_route_context_destroy(context);
        _exit(failed);
    }
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with 0x%x", (unsigned)status);
    CHECK(stand_in_layer(context, ALL_OPERATIONS, &another) == MOE_ROUTE_OK, "the parent's context no longer works");
    moe_route_layer_destroy(another);
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
    RUN(digests_are_sha_256);
    RUN(every_damaged_byte_is_noticed);
    RUN(entries_of_other_variants_are_noticed);
    RUN(foreign_payloads_are_noticed);
    RUN(odd_files_in_an_entrys_place_are_replaced);
    RUN(folders_of_others_are_not_used);
    RUN(odd_paths_work_or_are_refused);
    RUN(a_limit_on_file_sizes_is_a_full_disk);
    RUN(read_only_folders_are_read);
    RUN(without_a_home_memory_serves);
    RUN(programs_with_more_rights_ignore_the_environment);
    RUN(every_operation_on_files_may_fail);
    RUN(network_file_systems_may_fail_anywhere);
    RUN(a_process_may_be_killed_at_any_moment);
    RUN(the_clock_may_change);
    RUN(the_folder_may_be_deleted_while_in_use);
    RUN(newer_nvrtc_and_drivers_use_older_entries);
    RUN(entries_that_the_driver_refuses_are_replaced_once);
    RUN(two_versions_share_a_folder);
    RUN(statistics_count_what_happened);
    RUN(hooks_are_called_without_a_lock);
    RUN(a_forked_child_is_told_and_can_clean_up);
    return test_end();
}
