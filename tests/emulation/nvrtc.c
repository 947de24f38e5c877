/*
  nvrtc.c: libnvrtc.so.13 of the emulation: compiles kernel sources with the host's C++ compiler into a library that the
  emulated driver loads. `device.h` gives way to the emulation's own, which lies in the folder `include` beside this
  library, or in MOE_ROUTE_EMULATION_INCLUDE. What kernels do when they run doesn't belong here.

  The build defines EMULATION_CXX (the compiler) and EMULATION_SANITIZE (flags that this library was built with, too).
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_ARGUMENTS 256
#if defined(__clang__)
#define NO_FUNCTION_TYPES ",function" /* a check that gcc doesn't have, and that needs the C++ library */
#else
#define NO_FUNCTION_TYPES ""
#endif

extern char **environ;

enum {
    NVRTC_SUCCESS = 0,
    OUT_OF_MEMORY = 1,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    INTERNAL_ERROR = 11
};

typedef struct file {
    char *name, *text;
} file;

typedef struct text {
    char *data; /* ends with a NUL that `size` doesn't count */
    size_t size;
} text;

typedef struct program {
    file source;
    file *headers;
    int num_headers;
    text log, code;
    int is_ptx;
} program;

typedef struct arguments {
    char *list[MAX_ARGUMENTS + 1];
    int count, full;
} arguments;

static const int architectures[] = {80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
#define NUM_ARCHITECTURES ((int)(sizeof architectures / sizeof *architectures))

EXPORT int nvrtcVersion(int *major, int *minor) {
    if (!major || !minor) return INVALID_INPUT;
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

EXPORT const char *nvrtcGetErrorString(int result) {
    switch (result) {
    case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
    case OUT_OF_MEMORY: return "NVRTC_ERROR_OUT_OF_MEMORY";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    case INTERNAL_ERROR: return "NVRTC_ERROR_INTERNAL_ERROR";
    default: return "NVRTC_ERROR unknown";
    }
}

EXPORT int nvrtcGetNumSupportedArchs(int *count) {
    if (!count) return INVALID_INPUT;
    *count = NUM_ARCHITECTURES;
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetSupportedArchs(int *list) {
    if (!list) return INVALID_INPUT;
    memcpy(list, architectures, sizeof architectures);
    return NVRTC_SUCCESS;
}

/* ---- programs ---- */
static void program_free(program *p) {
    for (int i = 0; i < p->num_headers; i++) {
        free(p->headers[i].name);
        free(p->headers[i].text);
    }
    free(p->headers);
    free(p->source.name);
    free(p->source.text);
    free(p->log.data);
    free(p->code.data);
    free(p);
}

static int file_copy(file *copy, const char *name, const char *content) {
    copy->name = strdup(name);
    copy->text = strdup(content);
    return copy->name && copy->text;
}

EXPORT int nvrtcCreateProgram(program **made, const char *source, const char *name, int num_headers, const char *const *headers,
                              const char *const *header_names) {
    program *p;
    int complete;
    if (!made || !source || num_headers < 0 || (num_headers && (!headers || !header_names))) return INVALID_INPUT;
    for (int i = 0; i < num_headers; i++)
        if (strchr(header_names[i], '/')) return INVALID_INPUT;
    if (name && strchr(name, '/')) return INVALID_INPUT;
    p = (program *)calloc(1, sizeof *p);
    if (!p) return OUT_OF_MEMORY;
    p->headers = (file *)calloc((size_t)num_headers + 1, sizeof *p->headers);
    p->num_headers = p->headers ? num_headers : 0;
    complete = p->headers && file_copy(&p->source, name ? name : "default_program", source);
    for (int i = 0; i < p->num_headers; i++) complete = file_copy(&p->headers[i], header_names[i], headers[i]) && complete;
    if (!complete) {
        program_free(p);
        return OUT_OF_MEMORY;
    }
    *made = p;
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcDestroyProgram(program **destroyed) {
    if (!destroyed || !*destroyed) return INVALID_PROGRAM;
    program_free(*destroyed);
    *destroyed = NULL;
    return NVRTC_SUCCESS;
}

/* ---- compiling ---- */
__attribute__((format(printf, 2, 3))) static void add(arguments *a, const char *format, ...) {
    va_list values;
    if (a->count == MAX_ARGUMENTS) {
        a->full = 1;
        return;
    }
    va_start(values, format);
    if (vasprintf(&a->list[a->count], format, values) < 0) a->list[a->count] = NULL;
    va_end(values);
    if (a->list[a->count]) a->count++;
    else a->full = 1;
}

static void add_words(arguments *a, const char *words) {
    while (*words) {
        const size_t space = strspn(words, " "), length = strcspn(words + space, " ");
        if (length) add(a, "%.*s", (int)length, words + space);
        words += space + length;
    }
}

static const char *after(const char *option, const char *prefix) {
    return strncmp(option, prefix, strlen(prefix)) ? NULL : option + strlen(prefix);
}

/* The options that NVRTC has and the library may use; the others are errors. */
static int add_options(program *p, arguments *a, int count, const char *const *options) {
    static const char *const ignored[] = {"--std=c++17", "-std=c++17", "-no-source-include", "--no-source-include",
                                          "--modify-stack-limit=false", "-modify-stack-limit=false", "--no-cache", "-no-cache",
                                          "-w", "--disable-warnings", "-lineinfo", "--generate-line-info"};
    static const char *const defines[] = {"-D", "--define-macro="};
    static const char *const folders[] = {"-I", "--include-path="};
    static const char *const targets[] = {"--gpu-architecture=", "-arch=", "-gpu-architecture="};
    int target = 75;
    for (int i = 0; i < count; i++) {
        const char *value = NULL;
        size_t j;
        for (j = 0; j < sizeof ignored / sizeof *ignored && strcmp(options[i], ignored[j]); j++) {}
        if (j < sizeof ignored / sizeof *ignored) continue;
        for (j = 0; j < sizeof defines / sizeof *defines && !value; j++) value = after(options[i], defines[j]);
        if (value) {
            add(a, "-D%s", value);
            continue;
        }
        for (j = 0; j < sizeof folders / sizeof *folders && !value; j++) value = after(options[i], folders[j]);
        if (value) {
            add(a, "-I%s", value);
            continue;
        }
        for (j = 0; j < sizeof targets / sizeof *targets && !value; j++) value = after(options[i], targets[j]);
        if (!value) return 0;
        p->is_ptx = after(value, "compute_") != NULL;
        if (!p->is_ptx && !after(value, "sm_")) return 0;
        target = atoi(strchr(value, '_') + 1);
        for (j = 0; (int)j < NUM_ARCHITECTURES && architectures[j] != target; j++) {}
        if ((int)j == NUM_ARCHITECTURES) return 0;
    }
    add(a, "-DEMULATION_TARGET=%d", target);
    add(a, "-DEMULATION_IS_PTX=%d", p->is_ptx);
    add(a, "-D__CUDA_ARCH__=%d0", target);
    return 1;
}

static int include_folder(char *folder, size_t size) {
    const char *given = getenv("MOE_ROUTE_EMULATION_INCLUDE");
    Dl_info info;
    const char *slash;
    if (given) return snprintf(folder, size, "%s", given) < (int)size;
    if (!dladdr((const void *)architectures, &info) || !info.dli_fname) return 0;
    slash = strrchr(info.dli_fname, '/');
    return snprintf(folder, size, "%.*s/include", slash ? (int)(slash - info.dli_fname) : 1, slash ? info.dli_fname : ".") < (int)size;
}

static int write_file(const char *folder, const file *content) {
    char path[1024];
    FILE *f;
    size_t size = strlen(content->text);
    int complete;
    snprintf(path, sizeof path, "%s/%s", folder, content->name);
    f = fopen(path, "wb");
    if (!f) return 0;
    complete = fwrite(content->text, 1, size, f) == size;
    return !fclose(f) && complete;
}

static void read_file(const char *folder, const char *name, text *content) {
    char path[1024];
    struct stat about;
    FILE *f;
    free(content->data);
    memset(content, 0, sizeof *content);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    f = fopen(path, "rb");
    if (!f) return;
    if (!fstat(fileno(f), &about) && (content->data = (char *)malloc((size_t)about.st_size + 1))) {
        content->size = fread(content->data, 1, (size_t)about.st_size, f);
        content->data[content->size] = 0;
    }
    fclose(f);
}

static void remove_files(const char *folder, const program *p) {
    char path[1024];
    const char *const made[] = {p->source.name, "log", "kernel.so"};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, made[i]);
        unlink(path);
    }
    for (int i = 0; i < p->num_headers; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, p->headers[i].name);
        unlink(path);
    }
    rmdir(folder);
}

/* The compiler's exit status, -1 when it can't be started. Its output goes to the file `log`. */
static int run_compiler(const char *folder, char **list) {
    posix_spawn_file_actions_t actions;
    char log[1024];
    pid_t child;
    int status = -1, error;
    snprintf(log, sizeof log, "%s/log", folder);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    error = posix_spawnp(&child, list[0], &actions, NULL, list, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status);
}

static int compile_in(const char *folder, program *p, int count, const char *const *options) {
    char include[1024];
    arguments a;
    int result = NVRTC_SUCCESS, status;
    memset(&a, 0, sizeof a);
    if (!include_folder(include, sizeof include)) return INTERNAL_ERROR;
    add_words(&a, EMULATION_CXX);
    add_words(&a, "-std=c++17 -Og -g1 -pipe -shared -fPIC -nostdlib -fno-exceptions -fno-rtti -ffp-contract=off "
                  "-fno-strict-aliasing");
    add_words(&a, EMULATION_SANITIZE);
    /* Half of the compile time, for what AddressSanitizer or the machine finds anyway. */
    if (*EMULATION_SANITIZE)
        add_words(&a, "-fno-sanitize-address-use-after-scope -fno-sanitize=null,object-size,vptr,return,nonnull-attribute,"
                      "returns-nonnull-attribute,pointer-overflow,builtin" NO_FUNCTION_TYPES);
    add(&a, "-ffile-prefix-map=%s/=", folder);
    add(&a, "-ffile-prefix-map=%s/=", include);
    if (!add_options(p, &a, count, options)) result = INVALID_OPTION;
    add(&a, "-I%s", include);
    add(&a, "-xc++");
    add(&a, "%s/%s", folder, p->source.name);
    add(&a, "-o");
    add(&a, "%s/kernel.so", folder);
    add_words(&a, "-lgcc -lm");
    if (!result && a.full) result = OUT_OF_MEMORY;
    if (!result && !write_file(folder, &p->source)) result = INTERNAL_ERROR;
    for (int i = 0; i < p->num_headers && !result; i++)
        if (strcmp(p->headers[i].name, "device.h") && !write_file(folder, &p->headers[i])) result = INTERNAL_ERROR;
    if (!result) {
        status = run_compiler(folder, a.list);
        read_file(folder, "log", &p->log);
        read_file(folder, "kernel.so", &p->code);
        if (status < 0) result = INTERNAL_ERROR;
        else if (status || !p->code.size) result = COMPILATION;
    }
    for (int i = 0; i < a.count; i++) free(a.list[i]);
    return result;
}

EXPORT int nvrtcCompileProgram(program *p, int count, const char *const *options) {
    const char *parent = getenv("TMPDIR");
    char folder[256];
    int result;
    if (!p) return INVALID_PROGRAM;
    if (count < 0 || (count && !options)) return INVALID_INPUT;
    snprintf(folder, sizeof folder, "%s/moe_route_nvrtc.XXXXXX", parent && strlen(parent) < 200 ? parent : "/tmp");
    if (!mkdtemp(folder)) return INTERNAL_ERROR;
    result = compile_in(folder, p, count, options);
    remove_files(folder, p);
    if (result) {
        free(p->code.data);
        memset(&p->code, 0, sizeof p->code);
    }
    return result;
}

/* ---- results ---- */
EXPORT int nvrtcGetProgramLogSize(program *p, size_t *size) {
    if (!p || !size) return INVALID_INPUT;
    *size = p->log.size + 1;
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetProgramLog(program *p, char *log) {
    if (!p || !log) return INVALID_INPUT;
    if (p->log.data) memcpy(log, p->log.data, p->log.size);
    log[p->log.size] = 0;
    return NVRTC_SUCCESS;
}

static int get_code(program *p, char *code) {
    if (!p || !code || !p->code.data) return INVALID_INPUT;
    memcpy(code, p->code.data, p->code.size);
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetCUBINSize(program *p, size_t *size) {
    if (!p || !size) return INVALID_INPUT;
    *size = p->is_ptx ? 0 : p->code.size; /* a virtual architecture has no cubin */
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetCUBIN(program *p, char *cubin) { return p && p->is_ptx ? INVALID_INPUT : get_code(p, cubin); }

EXPORT int nvrtcGetPTXSize(program *p, size_t *size) {
    if (!p || !size) return INVALID_INPUT;
    *size = p->code.size;
    return NVRTC_SUCCESS;
}

EXPORT int nvrtcGetPTX(program *p, char *ptx) { return get_code(p, ptx); }
