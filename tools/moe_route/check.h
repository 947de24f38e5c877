/*
  check.h: moe_route check: what it checks, one check after the other, and the report. The checks themselves are in
  check_device.h, and what they are made of is the tests' own: cases.h and the definitions in f64 beside it. A check counts its
  cases, keeps its largest error beside the bound that it was held against, and says what was wrong first.
*/
#ifndef CHECK_H
#define CHECK_H

#include <setjmp.h>
#if !defined(_WIN32)
#include <sys/utsname.h>
#endif

enum { CHECK_RESULTS = 128 };

typedef enum check_outcome { CHECK_PASSED, CHECK_FAILED, CHECK_LEFT_OUT } check_outcome;

typedef struct check_result {
    char name[96], text[512]; /* text: what was wrong, or why it was left out */
    check_outcome outcome;
    unsigned cases;
    double error, bound; /* of the case that came nearest to its bound; bound 0: bits are compared */
    double seconds;
} check_result;

static struct check_options {
    const char *cache_dir, *nvrtc;
    option_texts names;
    uint32_t seed;
    int json, list;
} check_wanted;

static const option check_options[] = {
    OPT_TITLE("Options"),
    OPT_FLAG("--list", "list the checks", &check_wanted.list),
    OPT_COUNT("--seed", "N", "other random inputs, the same for equal N; 0 without it. The report names it", &check_wanted.seed, 0, 1e9),
    OPT_TEXT("--cache-dir", "DIR", "read and keep compiled kernels there; without it all are compiled anew and nothing is kept",
             &check_wanted.cache_dir),
    OPT_TEXT("--nvrtc", "PATH", "NVRTC's library or folder; without it, it is looked for", &check_wanted.nvrtc),
    OPT_FLAG("--json", "one JSON object", &check_wanted.json),
    OPT_END,
};

static const options check_command = {
    .command = "check",
    .usage = "check [NAME]... [OPTIONS]",
    .about = "Checks this GPU (device 0; CUDA_VISIBLE_DEVICES chooses another) against the library's CPU backend, and the CPU "
             "backend against a plain computation in f64, with random inputs: routers, maps, layers in every format, captured "
             "graphs, and that equal inputs give equal bits. With names, only the checks whose names contain one of them. Put "
             "the whole output into a bug report, in the project's issue tracker.",
    .tables = {check_options},
    .rest = &check_wanted.names,
    .rest_name = "the names of checks",
    .after = "Status: 0 when all passed on the GPU; 1 when one failed; 2 for a wrong option; 3 when all passed that can be "
             "checked without a GPU; 4 without NVRTC.\n",
};

typedef struct check_state {
    check_result results[CHECK_RESULTS];
    unsigned count;
    test_device cpu, gpu;
    int has_gpu, gpu_is_lost; /* lost: a failed launch leaves a CUDA context unusable */
    char no_gpu[600];
    moe_route_context_info info;
    char driver_module[64];
    jmp_buf trouble;
    check_result *running;
} check_state;

static check_state check;

/* ---- what checks call ---- */

/* One more case with this error; a NaN is beyond every bound. */
static void check_error(double error, double bound, const char *what) {
    check_result *r = check.running;
    const double part = bound > 0 ? error / bound : error > 0 ? HUGE_VAL : 0, worst = r->bound > 0 ? r->error / r->bound : -1;
    r->cases++;
    if (!(part <= worst)) {
        r->error = error;
        r->bound = bound;
    }
    CHECK(error <= bound, "%s: the error is %.3g, the bound %.3g", what, error, bound);
}

/* One more case whose bits were compared. */
static void check_case(void) { check.running->cases++; }

/* ---- running ---- */

static void check_on_trouble(const char *what) {
    if (test_current.failures++ == 0) snprintf(test_current.text, sizeof test_current.text, "%s", what);
    check.gpu_is_lost = check.has_gpu;
    longjmp(check.trouble, 1);
}

static int check_is_wanted(const char *name) {
    uint32_t i;
    for (i = 0; i < check_wanted.names.count; i++)
        if (strstr(name, check_wanted.names.values[i])) return 1;
    return check_wanted.names.count == 0;
}

static void check_print(const check_result *r) {
    static const char *const words[] = {"ok", "FAIL", "--"};
    char error[64] = "";
    if (r->cases) snprintf(error, sizeof error, "same bits");
    if (r->bound > 0) snprintf(error, sizeof error, "error %.2g of %.2g", r->error, r->bound);
    if (r->outcome == CHECK_LEFT_OUT) printf("%-5s%-50s %s\n", words[r->outcome], r->name, r->text);
    else printf("%-5s%-50s %4u cases, %-24s %6.1f s\n", words[r->outcome], r->name, r->cases, error, r->seconds);
    if (r->outcome == CHECK_FAILED) printf("     %s\n", r->text);
    fflush(stdout);
}

typedef void check_function(const void *data);

/* Runs one check, unless it isn't wanted. */
static void check_run(const char *name, int on_gpu, check_function *function, const void *data) {
    check_result *r;
    const double start = moer_milliseconds();
    if (!check_is_wanted(name)) return;
    if (check.count == CHECK_RESULTS) stop(STATUS_FAILED, "there are more than %d checks", CHECK_RESULTS);
    r = check.running = &check.results[check.count++];
    memset(r, 0, sizeof *r);
    snprintf(r->name, sizeof r->name, "%s", name);
    if (check_wanted.list) {
        printf("%s\n", name);
        return;
    }
    if (on_gpu && (!check.has_gpu || check.gpu_is_lost)) {
        r->outcome = CHECK_LEFT_OUT;
        snprintf(r->text, sizeof r->text, "%s",
                 check.has_gpu ? "not run: the GPU's context was lost in an earlier check" : "not run: no GPU");
    } else {
        test_current.failures = 0;
        test_current.text[0] = 0;
        if (setjmp(check.trouble) == 0) function(data);
        if (!test_current.failures && r->cases == 0) CHECK(0, "nothing was checked");
        r->outcome = test_current.failures ? CHECK_FAILED : CHECK_PASSED;
        snprintf(r->text, sizeof r->text, "%s", test_current.text);
    }
    r->seconds = (moer_milliseconds() - start) / 1000;
    if (!check_wanted.json && (check.has_gpu || r->outcome != CHECK_LEFT_OUT)) check_print(r);
}

/* ---- the report ---- */

static const char *check_system(void) {
    static char text[400];
#if defined(_WIN32)
    snprintf(text, sizeof text, "Windows");
#else
    struct utsname name;
    if (uname(&name) != 0) return "unknown";
    snprintf(text, sizeof text, "%.100s %.100s %.100s", name.sysname, name.release, name.machine);
#endif
    return text;
}

static void check_print_head(void) {
    const char *test_seed = getenv("TEST_SEED"); /* the tests' own, which their random numbers heed here, too */
    printf("moe_route %s, kernels %.12s; %s\n", MOE_ROUTE_VERSION, moer_sources_digest, check_system());
    if (check.has_gpu) {
        printf("GPU 0: %s, sm_%u, %u multiprocessors; driver CUDA %s%s%s", check.info.name, (unsigned)check.info.target,
               (unsigned)check.info.num_multiprocessors, info_version(check.info.driver_version),
               check.driver_module[0] ? ", version " : "", check.driver_module);
        if (check.info.nvrtc_version) printf("; NVRTC %s, %s", info_version(check.info.nvrtc_version), check.info.nvrtc_path);
        printf("\n");
    } else {
        printf("no GPU: %s\n", check.no_gpu);
    }
    printf("inputs: --seed %u%s%.20s\n\n", (unsigned)check_wanted.seed, test_seed ? " and TEST_SEED=" : "", test_seed ? test_seed : "");
    fflush(stdout);
}

static unsigned check_count(check_outcome outcome) {
    unsigned count = 0, i;
    for (i = 0; i < check.count; i++) count += check.results[i].outcome == outcome;
    return count;
}

static void check_write_json(const char *result) {
    static const char *const words[] = {"passed", "failed", "left out"};
    json_writer json;
    unsigned i;
    json_begin_file(&json, stdout, 2);
    json_begin(&json, NULL, '{');
    json_text(&json, "result", result);
    json_text(&json, "moe_route", MOE_ROUTE_VERSION);
    json_text(&json, "kernels", moer_sources_digest);
    json_text(&json, "system", check_system());
    json_text(&json, "gpu", check.has_gpu ? check.info.name : NULL);
    json_text(&json, "reason", check.has_gpu ? NULL : check.no_gpu);
    json_count(&json, "target", check.info.target);
    json_text(&json, "driver", check.info.driver_version ? info_version(check.info.driver_version) : NULL);
    json_text(&json, "driver_version", check.driver_module[0] ? check.driver_module : NULL);
    json_text(&json, "nvrtc", check.info.nvrtc_version ? info_version(check.info.nvrtc_version) : NULL);
    json_text(&json, "nvrtc_path", check.info.nvrtc_path[0] ? check.info.nvrtc_path : NULL);
    json_count(&json, "seed", check_wanted.seed);
    json_text(&json, "test_seed", getenv("TEST_SEED"));
    json_begin(&json, "checks", '[');
    for (i = 0; i < check.count; i++) {
        const check_result *r = &check.results[i];
        json_begin(&json, NULL, '{');
        json_text(&json, "name", r->name);
        json_text(&json, "outcome", words[r->outcome]);
        json_count(&json, "cases", r->cases);
        if (r->bound > 0) json_number(&json, "error", r->error, 4);
        if (r->bound > 0) json_number(&json, "bound", r->bound, 4);
        json_number(&json, "seconds", r->seconds, 4);
        json_text(&json, "text", r->text[0] ? r->text : NULL);
        json_end(&json, '}');
    }
    json_end(&json, ']');
    json_end(&json, '}');
}

/* Tells the outcome in one line, and answers with the status. */
static int check_conclude(void) {
    const unsigned failed = check_count(CHECK_FAILED), passed = check_count(CHECK_PASSED), left_out = check_count(CHECK_LEFT_OUT);
    const char *result = failed ? "fail" : check.has_gpu ? "pass" : passed ? "pass without a GPU" : "nothing checked";
    if (check_wanted.json) check_write_json(result);
    else if (failed) printf("\nFAIL: %u of %u checks failed\n", failed, passed + failed);
    else if (check.has_gpu) printf("\nPASS: %u checks\n", passed);
    else if (passed == 0) printf("\nNOTHING CHECKED: there is no GPU\n");
    else printf("\nPASS WITHOUT A GPU: %u checks of the CPU backend; %u of the GPU weren't run\n", passed, left_out);
    return failed ? STATUS_FAILED : check.has_gpu ? STATUS_OK : STATUS_NO_GPU;
}

#endif /* CHECK_H */
