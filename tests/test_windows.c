/*
  test_windows.c: the cache on Windows: paths beyond ASCII and beyond 260 characters, access lists, where libraries are looked
  for. test_windows.sh builds it with mingw-w64 and runs it with wine. NVRTC is a stand-in.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/stand_ins.h"

static char folder[1024]; /* UTF-8, for the running test */
static moe_route_context_desc at_folder;

static void begin(const char *name) {
    wchar_t wide[MAX_PATH];
    static unsigned number;
    stand_in_reset();
    moer_default_files = &moer_system_files;
    GetTempPathW(MAX_PATH, wide);
    if (!moer_narrow(wide, folder, sizeof folder)) folder[0] = 0;
    snprintf(folder + strlen(folder), sizeof folder - strlen(folder), "moe_route_%lu_%u", (unsigned long)GetCurrentProcessId(), number++);
    CHECK(moer_folder_create(folder, 0700), "%s can't be created", folder);
    snprintf(folder + strlen(folder), sizeof folder - strlen(folder), "/%s", name);
    memset(&at_folder, 0, sizeof at_folder);
    at_folder.cache_dir = folder;
}

static void check_cold_and_warm(const char *what) {
    outcome o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_COMPILE);
    CHECK_COMPILED(o, what);
    CHECK_TROUBLES(o, 0, what);
    CHECK(o.statistics.cache_writes == o.num_variants, "%s: %u of %u written", what, (unsigned)o.statistics.cache_writes, o.num_variants);
    stand_in.missing = 1;
    o = create_layer(&at_folder, ALL_OPERATIONS, STAND_IN_GPU);
    CHECK_CACHED(o, what);
    CHECK_TROUBLES(o, 0, what);
    stand_in.missing = 0;
}

TEST(the_cache_works) {
    begin("cache");
    check_cold_and_warm("a plain folder");
}

TEST(paths_are_utf_8) {
    wchar_t wide[MOER_WIDE_MAX];
    begin("\xc3\xa4\xe4\xb8\xad\xf0\x9f\x98\x80 with space");
    check_cold_and_warm("a folder beyond ASCII");
    CHECK(moer_wide_path(folder, wide) && wcsstr(wide, L"\u00e4\u4e2d") && GetFileAttributesW(wide) != INVALID_FILE_ATTRIBUTES, "the folder has another name");
    begin("a\\b/c"); /* both separate */
    check_cold_and_warm("backslashes");
    SetEnvironmentVariableW(L"MOE_ROUTE_CACHE_DIR", wide);
    {
        char value[2048], narrow[2048];
        CHECK(moer_environment("MOE_ROUTE_CACHE_DIR", value, sizeof value) && moer_narrow(wide, narrow, sizeof narrow) && strcmp(value, narrow) == 0, "the environment gives another text");
        CHECK(moer_environment("MOE_ROUTE_CACHE_DIR", value, 5) && strlen(value) < 5 && strncmp(value, narrow, strlen(value)) == 0, "a value that doesn't fit: %s", value);
    }
    SetEnvironmentVariableW(L"MOE_ROUTE_CACHE_DIR", NULL);
    begin("\xff\xfe");
    {
        const outcome o = create_layer(&at_folder, ONE_OPERATION, STAND_IN_COMPILE);
        CHECK_COMPILED(o, "a path that isn't UTF-8");
        CHECK_TROUBLES(o, 1, "a path that isn't UTF-8");
    }
}

TEST(paths_may_be_long) {
    begin("long");
    while (strlen(folder) < 700) snprintf(folder + strlen(folder), sizeof folder - strlen(folder), "/%0100d", 7);
    check_cold_and_warm("a path of 700 characters");
}

TEST(calls_for_operators_work) {
    moe_route_context *context = NULL;
    uint64_t sound = 0, removed = 0;
    outcome o;
    begin("calls");
    check_cold_and_warm("a cache");
    memset(&o, 0, sizeof o);
    REQUIRE(stand_in_context(&at_folder, STAND_IN_COMPILE, &o, &context) == MOE_ROUTE_OK, "no context");
    CHECK(moe_route_cache_verify(context, &sound, &removed) == MOE_ROUTE_OK && sound >= 3 && removed == 0, "%u sound, %u removed", (unsigned)sound, (unsigned)removed);
    CHECK(moe_route_cache_clear(context, &removed) == MOE_ROUTE_OK && removed == sound, "%u of %u removed", (unsigned)removed, (unsigned)sound);
    moe_route_context_destroy(context);
    check_cold_and_warm("after clearing");
}

/* An access list that lets everyone write, and none at all. */
TEST(access_lists_are_checked) {
    SID_IDENTIFIER_AUTHORITY world = {SECURITY_WORLD_SID_AUTHORITY};
    PSID everyone = NULL;
    struct {
        ACL list;
        char space[256];
    } acl;
    moer_file_info info;
    begin("lists");
    CHECK(moer_folder_create(folder, 0700) && moer_folder_inspect(folder, &info), "no folder");
    CHECK(info.owner != MOER_OWNER_OTHER && !info.writable_by_others, "a folder of one's own: owner %d, writable by others %d", (int)info.owner, info.writable_by_others);
    CHECK(moer_list_lets_others_write(NULL), "no list");
    REQUIRE(AllocateAndInitializeSid(&world, 1, SECURITY_WORLD_RID, 0, 0, 0, 0, 0, 0, 0, &everyone), "no SID");
    REQUIRE(InitializeAcl(&acl.list, sizeof acl, ACL_REVISION), "no list");
    CHECK(!moer_list_lets_others_write(&acl.list), "an empty list");
    REQUIRE(AddAccessAllowedAce(&acl.list, ACL_REVISION, FILE_GENERIC_READ | FILE_GENERIC_EXECUTE, everyone), "no entry");
    CHECK(!moer_list_lets_others_write(&acl.list), "all may read");
    REQUIRE(AddAccessDeniedAce(&acl.list, ACL_REVISION, GENERIC_ALL, everyone), "no entry");
    CHECK(!moer_list_lets_others_write(&acl.list), "writing is denied");
    REQUIRE(AddAccessAllowedAce(&acl.list, ACL_REVISION, FILE_APPEND_DATA, everyone), "no entry");
    CHECK(moer_list_lets_others_write(&acl.list), "all may create");
    FreeSid(everyone);
}

/* A library in the current folder isn't loaded by its bare name; by its path it is. */
TEST(libraries_are_not_taken_from_the_current_folder) {
    char path[2048];
    wchar_t wide[MOER_WIDE_MAX], from[MAX_PATH];
    begin("libraries");
    CHECK(moer_folder_create(folder, 0700), "no folder");
    GetSystemDirectoryW(from, MAX_PATH);
    wcscat(from, L"\\version.dll");
    snprintf(path, sizeof path, "%s/moer_planted.dll", folder);
    REQUIRE(moer_wide_path(path, wide) && CopyFileW(from, wide, FALSE), "no library to copy");
    REQUIRE(moer_wide_path(folder, wide) && SetCurrentDirectoryW(wide), "no current folder");
    CHECK(moer_library_open("moer_planted.dll") == NULL, "it was loaded from the current folder");
    CHECK(moer_library_open("kernel32.dll") != NULL, "the system's libraries aren't found");
    CHECK(moer_library_open(path) != NULL, "it isn't loaded by its path");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(the_cache_works);
    RUN(paths_are_utf_8);
    RUN(paths_may_be_long);
    RUN(calls_for_operators_work);
    RUN(access_lists_are_checked);
    RUN(libraries_are_not_taken_from_the_current_folder);
    return test_end();
}
