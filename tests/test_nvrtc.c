/*
  test_nvrtc.c: one real NVRTC, the library or folder that MOE_ROUTE_NVRTC_PATH names: the code that it makes for every
  architecture, and that compiling leaves the process as it was. test_nvrtc.sh runs it with several versions.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <locale.h>
#include <sys/resource.h>
#include <unistd.h>

#include "support/test.h"
#include "support/folders.h"

/* A context that compiles for `target`, and in it a layer of one variant; NULL without NVRTC, with `why`. */
static moe_route_context *compile_one(uint32_t target, moe_route_status *status, char *why, size_t size) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = target;
    context_desc.cache_dir = "off";
    *status = moe_route_context_create(&context_desc, &context);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 8;
    desc.router.top_k = 2;
    desc.experts.hidden_size = 64;
    desc.operations = MOE_ROUTE_OPERATION_EXPAND;
    if (*status == MOE_ROUTE_OK) *status = moe_route_layer_create(context, &desc, &layer);
    moe_route_message(context, why, size);
    moe_route_layer_destroy(layer);
    return context;
}

/* ---- architectures ---- */

typedef struct code { /* what was made */
    int is_ptx;
    uint32_t architecture;
} code;

/* The architecture that a cubin's ELF header or a PTX text names. */
static code read_code(const moer_entry *entry) {
    const unsigned char *p = entry->payload;
    code c;
    memset(&c, 0, sizeof c);
    if (p[0] == 0x7f) {
        const uint32_t flags = (uint32_t)moer_read_number(p + 48, 4);
        const int machine_is_cuda = p[4] == 2 && moer_read_number(p + 18, 2) == 190;
        if (machine_is_cuda) c.architecture = p[8] >= 8 ? flags >> 8 & 0xff : flags & 0xff; /* by version of the ABI */
    } else {
        const char *target = strstr((const char *)p, ".target sm_");
        c.is_ptx = 1;
        if (target) c.architecture = (uint32_t)strtoul(target + strlen(".target sm_"), NULL, 10);
    }
    return c;
}

/* What the list of architectures that NVRTC knows asks for. */
static code expect_code(const int *known, int count, uint32_t target) {
    code c;
    int i;
    memset(&c, 0, sizeof c);
    for (i = 0; i < count; i++)
        if ((uint32_t)known[i] <= target && (uint32_t)known[i] / 10 == target / 10 && (uint32_t)known[i] > c.architecture) c.architecture = (uint32_t)known[i];
    c.is_ptx = c.architecture == 0;
    for (i = 0; i < count && c.is_ptx; i++)
        if ((uint32_t)known[i] <= target && (uint32_t)known[i] > c.architecture) c.architecture = (uint32_t)known[i];
    return c;
}

TEST(every_architecture_gets_code_that_runs_on_it) {
    /* 88, 104, 129 and 130 aren't known to every version, or to none: older code of their major serves, or PTX. */
    static const uint32_t targets[] = {80, 86, 87, 88, 89, 90, 100, 103, 104, 110, 120, 121, 129, 130, 999};
    size_t i;
    for (i = 0; i < sizeof targets / sizeof *targets; i++) {
        moe_route_status status;
        char why[2048];
        moe_route_context *context = compile_one(targets[i], &status, why, sizeof why);
        int known[128], count = 0;
        moer_entry entry;
        if (CHECK(status == MOE_ROUTE_OK && context->variants, "sm_%u: %s", targets[i], why)) {
            const moer_variant *v = context->variants;
            code got, wanted;
            context->nvrtc.nvrtcGetNumSupportedArchs(&count);
            if (CHECK(count > 0 && count <= 128, "%d architectures", count)) context->nvrtc.nvrtcGetSupportedArchs(known);
            wanted = expect_code(known, count, targets[i]);
            if (CHECK(moer_entry_parse(v->entry.data, v->entry.size, &entry), "sm_%u: the entry isn't sound", targets[i])) {
                got = read_code(&entry);
                CHECK(got.is_ptx == wanted.is_ptx && got.architecture == wanted.architecture, "sm_%u: %s for sm_%u instead of %s for sm_%u", targets[i], got.is_ptx ? "PTX" : "a cubin", got.architecture,
                      wanted.is_ptx ? "PTX" : "a cubin", wanted.architecture);
                CHECK(entry.nvrtc_version == (uint32_t)context->nvrtc.version, "the entry is of NVRTC %u", entry.nvrtc_version);
            }
        }
        moe_route_context_destroy(context);
    }
}

static int late_num_archs(int *count) { return (*count = 2, 0); }
static int late_archs(int *list) { return (list[0] = 90, list[1] = 100, 0); }

/* An NVRTC that no longer knows the GPU: a refusal that names both. */
TEST(architectures_older_than_nvrtc_are_refused) {
    moe_route_status status;
    char why[2048];
    moe_route_context *context = compile_one(80, &status, why, sizeof why);
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    REQUIRE(status == MOE_ROUTE_OK, "%s", why);
    context->nvrtc.nvrtcGetNumSupportedArchs = late_num_archs;
    context->nvrtc.nvrtcGetSupportedArchs = late_archs;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 8;
    desc.router.top_k = 2;
    desc.experts.hidden_size = 128;
    desc.operations = MOE_ROUTE_OPERATION_COMBINE;
    status = moe_route_layer_create(context, &desc, &layer);
    moe_route_message(context, why, sizeof why);
    CHECK(status == MOE_ROUTE_ERROR_UNSUPPORTED && strstr(why, "sm_80") && strstr(why, "sm_90") && strstr(why, "sm_100"), "%s: %s", moe_route_status_name(status), why);
    moe_route_context_destroy(context);
}

/* ---- effects ---- */

static int watching, limits_changed;
static struct rlimit stack_limit;

static void *watch_limit(void *user) {
    struct rlimit now;
    (void)user;
    while (__atomic_load_n(&watching, __ATOMIC_SEQ_CST)) {
        getrlimit(RLIMIT_STACK, &now);
        if (now.rlim_cur != stack_limit.rlim_cur || now.rlim_max != stack_limit.rlim_max) limits_changed = 1;
    }
    return NULL;
}

TEST(compiling_leaves_the_process_as_it_was) {
    char folder_before[4096], folder_after[4096], text[32], why[2048];
    static const char *const locales[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8", "C"};
    const char *locale = NULL;
    struct rlimit after;
    moe_route_status status;
    moe_route_context *context;
    pthread_t thread;
    mode_t mask;
    double number;
    int i;
    for (i = 0; i < 4 && !locale; i++) locale = setlocale(LC_ALL, locales[i]);
    locale = setlocale(LC_ALL, NULL);
    snprintf(why, sizeof why, "%s", locale);
    snprintf(text, sizeof text, "%.1f", 1.5);
    REQUIRE(getcwd(folder_before, sizeof folder_before), "no working directory");
    mask = umask(027);
    getrlimit(RLIMIT_STACK, &stack_limit);
    if (stack_limit.rlim_max == RLIM_INFINITY || stack_limit.rlim_max > ((rlim_t)4 << 20)) { /* room for NVRTC to raise it, if it wanted to */
        stack_limit.rlim_cur = (rlim_t)4 << 20;
        setrlimit(RLIMIT_STACK, &stack_limit);
    }
    watching = 1;
    REQUIRE(pthread_create(&thread, NULL, watch_limit, NULL) == 0, "no thread");
    {
        char message[2048];
        context = compile_one(90, &status, message, sizeof message);
        CHECK(status == MOE_ROUTE_OK, "%s", message);
    }
    __atomic_store_n(&watching, 0, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    moe_route_context_destroy(context);
    CHECK(strcmp(setlocale(LC_ALL, NULL), why) == 0, "the locale is %s instead of %s", setlocale(LC_ALL, NULL), why);
    number = strtod(text, NULL);
    CHECK(number == 1.5, "numbers are read differently: %s is %g", text, number);
    CHECK(getcwd(folder_after, sizeof folder_after) && strcmp(folder_before, folder_after) == 0, "the working directory has changed");
    CHECK(umask(mask) == 027, "the umask has changed");
    getrlimit(RLIMIT_STACK, &after);
    CHECK(after.rlim_cur == stack_limit.rlim_cur && after.rlim_max == stack_limit.rlim_max && !limits_changed, "the stack limit has changed");
    setlocale(LC_ALL, "C");
}

/* A comma as decimal sign in the calling thread changes no code. */
TEST(the_locale_changes_no_code) {
    static const char *const locales[] = {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8"};
    moe_route_status status;
    char why[2048];
    moe_route_context *plain = compile_one(90, &status, why, sizeof why), *other;
    int i, found = 0;
    REQUIRE(status == MOE_ROUTE_OK, "%s", why);
    for (i = 0; i < 4 && !found; i++) found = setlocale(LC_ALL, locales[i]) != NULL;
    if (!found) {
        moe_route_context_destroy(plain);
        SKIP("no locale with a decimal comma is installed");
    }
    other = compile_one(90, &status, why, sizeof why);
    setlocale(LC_ALL, "C");
    CHECK(status == MOE_ROUTE_OK, "%s", why);
    if (status == MOE_ROUTE_OK && CHECK(plain->variants->entry.size == other->variants->entry.size, "the sizes differ"))
        CHECK_BYTES(other->variants->entry.data, plain->variants->entry.data, plain->variants->entry.size, "the entry");
    moe_route_context_destroy(plain);
    moe_route_context_destroy(other);
}

/* Maps by CUB: with the headers that NVRTC brings itself from 13.3 on, otherwise with those of this machine, if there are any and this NVRTC
   can take them; else a message that says what to do. */
TEST(maps_by_cub_compile_or_say_why_not) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_status status;
    char why[4096] = "", unpacked[600];
    int version;
    folder_create();
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = 90;
    context_desc.cache_dir = folder;
    status = moe_route_context_create(&context_desc, &context);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 128;
    desc.router.top_k = 8;
    desc.max_tokens = 1100;
    desc.operations = MOE_ROUTE_OPERATION_MAPS;
    desc.cub_maps = MOE_ROUTE_ON;
    if (status == MOE_ROUTE_OK) status = moe_route_layer_create(context, &desc, &layer);
    moe_route_message(context, why, sizeof why);
    version = context->nvrtc.version;
    snprintf(unpacked, sizeof unpacked, "%s/nvrtc_headers_%d.%d/cccl/cub/version.cuh", folder, version / 1000, version % 1000 / 10);
    if (version >= 13030 && !getenv("MOE_ROUTE_CUB_PATH")) CHECK(status == MOE_ROUTE_OK && access(unpacked, R_OK) == 0, "%s: %s", moe_route_status_name(status), why);
    else if (status == MOE_ROUTE_ERROR_NO_COMPILER) CHECK(strstr(why, "pip install nvidia-cuda-cccl") && strstr(why, "MOE_ROUTE_CUB_PATH"), "%s", why);
    else if (status == MOE_ROUTE_ERROR_COMPILE) CHECK(strstr(why, "CUB is from ") && strstr(why, "cub_maps OFF"), "%s", why);
    else CHECK(status == MOE_ROUTE_OK, "%s: %s", moe_route_status_name(status), why);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    remove_tree(folder);
}

int main(int argc, char **argv) {
    moe_route_status status;
    char why[4096];
    moe_route_context *context;
    test_begin(argc, argv);
    context = compile_one(90, &status, why, sizeof why);
    moe_route_context_destroy(context);
    if (status == MOE_ROUTE_ERROR_NO_COMPILER) {
        test_one_line(why);
        printf("SKIP nvrtc: %s\n", why);
        return 0;
    }
    RUN(compiling_leaves_the_process_as_it_was);
    RUN(every_architecture_gets_code_that_runs_on_it);
    RUN(architectures_older_than_nvrtc_are_refused);
    RUN(the_locale_changes_no_code);
    RUN(maps_by_cub_compile_or_say_why_not);
    return test_end();
}
