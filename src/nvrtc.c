/*
  nvrtc.c: compiles a kernel source with NVRTC. Where NVRTC is found is decided in nvrtc_find.c; which variants exist, and what
  becomes of the code, elsewhere.
*/
#include "internal.h"

#define MOER_NVRTC_NO_CACHE_VERSION 12090

#define MOER_NVRTC_ERROR_OUT_OF_MEMORY 1
#define MOER_NVRTC_ERROR_COMPILATION 6
#define MOER_NVRTC_ERROR_BUILTIN_OPERATION 7

/* What one compilation hands to NVRTC. */
typedef struct moer_nvrtc_inputs {
    char *text;           /* all sources, each terminated */
    const char *source;   /* the kernel source, within text */
    const char **headers; /* their texts, within text, and then their names */
    int num_headers;
    char *words;          /* all options, each terminated */
    const char **options;
    int num_options;
    int ptx;              /* the architecture is a virtual one: only PTX can be had */
    moer_cub cub;         /* empty where the source needs none */
} moer_nvrtc_inputs;

static void moer_nvrtc_inputs_free(moe_route_context *context, moer_nvrtc_inputs *inputs) {
    moer_free(context, inputs->text);
    moer_free(context, (void *)inputs->headers);
    moer_free(context, inputs->words);
    moer_free(context, (void *)inputs->options);
    moer_free(context, inputs->cub.text);
}

static int moer_is_header(const char *name) {
    size_t length = strlen(name);
    return length > 2 && strcmp(name + length - 2, ".h") == 0;
}

static size_t moer_source_size(const moer_source *source) { /* with its terminator */
    size_t size = 1, i;
    for (i = 0; source->pieces[i]; i++) size += strlen(source->pieces[i]);
    return size;
}

/* Joins a source at `text` and returns where the next one goes. */
static char *moer_source_join(const moer_source *source, char *text) {
    size_t i;
    for (i = 0; source->pieces[i]; i++) {
        size_t length = strlen(source->pieces[i]);
        memcpy(text, source->pieces[i], length);
        text += length;
    }
    *text = '\0';
    return text + 1;
}

/* CUB's headers for a source that includes some. */
static moe_route_status moer_nvrtc_gather_cub(moe_route_context *context, moer_nvrtc_inputs *inputs, const char *file) {
    const moer_source *source = moer_sources;
    size_t i;
    while (source->name && strcmp(source->name, file) != 0) source++;
    for (i = 0; source->name && source->pieces[i]; i++)
        if (strstr(source->pieces[i], "#include <cub/")) return moer_cub_get(context, &inputs->cub);
    return MOE_ROUTE_OK;
}

static void moer_nvrtc_add_header(moer_nvrtc_inputs *inputs, size_t count, const char *name, const char *text) {
    inputs->headers[inputs->num_headers] = text;
    inputs->headers[count + (size_t)inputs->num_headers++] = name;
}

/* The source `file` and every header. 0: no memory. */
static int moer_nvrtc_gather_sources(moe_route_context *context, moer_nvrtc_inputs *inputs, const char *file) {
    const moer_source *source;
    size_t size = 0, count = inputs->cub.num_headers, i;
    const char *cub = inputs->cub.text;
    char *next;
    for (source = moer_sources; source->name; source++) {
        if (moer_is_header(source->name)) count++;
        if (moer_is_header(source->name) || strcmp(source->name, file) == 0) size += moer_source_size(source);
    }
    inputs->text = (char *)moer_alloc(context, size);
    inputs->headers = (const char **)moer_alloc(context, 2 * count * sizeof *inputs->headers);
    if (!inputs->text || !inputs->headers) return 0;
    next = inputs->text;
    for (source = moer_sources; source->name; source++) {
        if (moer_is_header(source->name)) {
            moer_nvrtc_add_header(inputs, count, source->name, next);
            next = moer_source_join(source, next);
        } else if (strcmp(source->name, file) == 0) {
            inputs->source = next;
            next = moer_source_join(source, next);
        }
    }
    for (i = 0; i < inputs->cub.num_headers; i++) {
        const char *text = cub + strlen(cub) + 1;
        moer_nvrtc_add_header(inputs, count, cub, text);
        cub = text + strlen(text) + 1;
    }
    return 1;
}

/* Which architecture to ask NVRTC for. Code for an architecture runs on the later ones of the same major; where NVRTC
   has none of the target's major, the driver makes the code from PTX. `exact`: the target's own, with what only it can do. */
static moe_route_status moer_nvrtc_architecture(moe_route_context *context, int exact, char *option, size_t size, int *ptx) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    int target = (int)context->target, same_major = 0, below = 0, lowest = 0, highest = 0, count = 0, i;
    int *listed;
    if (nvrtc->nvrtcGetNumSupportedArchs(&count) != 0 || count <= 0 || count > 4096) count = 0;
    listed = (int *)moer_alloc(context, (size_t)count * sizeof *listed);
    if (!listed) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while compiling");
    if (count > 0 && nvrtc->nvrtcGetSupportedArchs(listed) != 0) count = 0;
    for (i = 0; i < count; i++) {
        int arch = listed[i];
        if (arch <= target && arch > below) below = arch;
        if (arch <= target && arch / 10 == target / 10 && arch > same_major) same_major = arch;
        if (lowest == 0 || arch < lowest) lowest = arch;
        if (arch > highest) highest = arch;
    }
    moer_free(context, listed);
    option[0] = '\0';
    *ptx = same_major == 0;
    if (same_major) moer_append(option, size, "--gpu-architecture=sm_%d%s", same_major, exact ? "a" : "");
    else if (below) moer_append(option, size, "--gpu-architecture=compute_%d", below);
    if (option[0]) return MOE_ROUTE_OK;
    return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED,
                     "NVRTC %d.%d (%s) compiles for sm_%d to sm_%d, not for sm_%d. The driver is of CUDA %d.%d",
                     nvrtc->version / 1000, nvrtc->version % 1000 / 10, nvrtc->path, lowest, highest, target,
                     context->driver_version / 1000, context->driver_version % 1000 / 10);
}

/* Adds an option, which `words` has room for, and returns where the next one goes. */
static char *moer_nvrtc_add_option(moer_nvrtc_inputs *inputs, char *next, const char *prefix, const char *word,
                                   size_t length) {
    size_t prefix_length = strlen(prefix);
    inputs->options[inputs->num_options++] = next;
    memcpy(next, prefix, prefix_length);
    memcpy(next + prefix_length, word, length);
    next[prefix_length + length] = '\0';
    return next + prefix_length + length + 1;
}

/* --modify-stack-limit=false keeps NVRTC from changing a limit of the whole process; --no-cache keeps it from starting
   the driver, which would spoil a later fork. */
static moe_route_status moer_nvrtc_gather_options(moe_route_context *context, moer_nvrtc_inputs *inputs,
                                                  const char *defines) {
    static const char *const fixed[] = {"-no-source-include", "--modify-stack-limit=false", "--no-cache"};
    size_t num_fixed = MOER_COUNT(fixed) - (context->nvrtc.version < MOER_NVRTC_NO_CACHE_VERSION ? 1u : 0u);
    const char *include = inputs->cub.folder;
    size_t count = 1 + num_fixed + (include[0] != 0), size, i, w;
    const char *words[2];
    char architecture[64], *next;
    const char *word;
    moe_route_status status = moer_nvrtc_architecture(context, moer_defined(defines, "WARPGROUPS") != 0, architecture, sizeof architecture, &inputs->ptx);
    if (status != MOE_ROUTE_OK) return status;
    size = strlen(architecture) + 1;
    for (i = 0; i < num_fixed; i++) size += strlen(fixed[i]) + 1;
    words[0] = MOER_CODE_OPTIONS;
    words[1] = defines;
    for (w = 0; w < 2; w++) {
        for (word = words[w]; *word; word++) count += *word == ' ';
        count += 1;
        size += strlen(words[w]);
    }
    size += strlen(include) + count * sizeof "-D";
    inputs->words = (char *)moer_alloc(context, size);
    inputs->options = (const char **)moer_alloc(context, count * sizeof *inputs->options);
    if (!inputs->words || !inputs->options) {
        return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while compiling");
    }
    next = moer_nvrtc_add_option(inputs, inputs->words, "", architecture, strlen(architecture));
    for (i = 0; i < num_fixed; i++) next = moer_nvrtc_add_option(inputs, next, "", fixed[i], strlen(fixed[i]));
    if (include[0]) next = moer_nvrtc_add_option(inputs, next, "-I", include, strlen(include));
    for (w = 0; w < 2; w++) {
        for (word = words[w]; *word;) {
            size_t length = strcspn(word, " ");
            if (length > 0) next = moer_nvrtc_add_option(inputs, next, w ? "-D" : "", word, length);
            word += length + (word[length] == ' ');
        }
    }
    return MOE_ROUTE_OK;
}

/* The program's log; NULL when it is empty or there is no memory. */
static char *moer_nvrtc_log(moe_route_context *context, moer_nvrtc_program program) {
    size_t size = 0;
    char *log;
    if (!program || context->nvrtc.nvrtcGetProgramLogSize(program, &size) != 0) return NULL;
    if (size <= 1 || size == (size_t)-1) return NULL;
    log = (char *)moer_alloc(context, size + 1);
    if (log && (context->nvrtc.nvrtcGetProgramLog(program, log) != 0 || !log[0])) {
        moer_free(context, log);
        log = NULL;
    }
    return log;
}

static moe_route_status moer_nvrtc_fail(moe_route_context *context, const moer_nvrtc_inputs *inputs, const char *file,
                                        const char *defines, const char *call, int result, const char *log) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    const char *text = nvrtc->nvrtcGetErrorString(result);
    moe_route_status status =
        result == MOER_NVRTC_ERROR_OUT_OF_MEMORY ? MOE_ROUTE_ERROR_MEMORY : MOE_ROUTE_ERROR_COMPILE;
    char advice[512 + MOER_PATH_MAX] = "";
    if (result == MOER_NVRTC_ERROR_BUILTIN_OPERATION) {
        char name[64];
        moer_nvrtc_builtins_name(nvrtc->version, name, sizeof name);
        moer_append(advice, sizeof advice, "\nNVRTC needs %s, in the same folder or on the library search path.", name);
    }
    if (result == MOER_NVRTC_ERROR_COMPILATION && inputs->cub.folder[0])
        moer_append(advice, sizeof advice, "\nCUB is from %s. That of CUDA 12.9 and later fits every NVRTC from 12.0 on: MOE_ROUTE_CUB_PATH names another; or leave cub_maps OFF.", inputs->cub.folder);
    return moer_fail(context, status, "compiling %s for sm_%u with NVRTC %d.%d (%s): %s: %s%s\nVariant: %s%s%s", file,
                     (unsigned)context->target, nvrtc->version / 1000, nvrtc->version % 1000 / 10, nvrtc->path, call,
                     text ? text : "unknown error", advice, defines, log ? "\n" : "", log ? log : "");
}

/* Copies the compiled code out; *memory is 0 when there is none for it. PTX comes with its terminator, which the driver relies on. */
static int moer_nvrtc_take(moe_route_context *context, moer_nvrtc_program program, int ptx, moer_bytes *code,
                           int *memory) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    size_t size = 0;
    int result = ptx ? nvrtc->nvrtcGetPTXSize(program, &size) : nvrtc->nvrtcGetCUBINSize(program, &size);
    if (result != 0) return result;
    code->data = size < (size_t)-1 ? (unsigned char *)moer_alloc(context, size + 1) : NULL;
    *memory = code->data != NULL;
    if (!code->data) return 0;
    code->size = size;
    result = ptx ? nvrtc->nvrtcGetPTX(program, (char *)code->data) : nvrtc->nvrtcGetCUBIN(program, (char *)code->data);
    if (result != 0) {
        moer_free(context, code->data);
        memset(code, 0, sizeof *code);
    }
    return result;
}

static moe_route_status moer_nvrtc_run(moe_route_context *context, const moer_nvrtc_inputs *inputs, const char *file,
                                       const char *defines, moer_bytes *code) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    const char *call = "nvrtcCreateProgram";
    moer_nvrtc_program program = NULL;
    moe_route_status status = MOE_ROUTE_OK;
    moer_locale locale;
    char *log;
    int result, memory = 1;
    moer_locale_begin(&locale);
    result = nvrtc->nvrtcCreateProgram(&program, inputs->source, file, inputs->num_headers, inputs->headers,
                                       inputs->headers + inputs->num_headers);
    if (result == 0) {
        call = "nvrtcCompileProgram";
        result = nvrtc->nvrtcCompileProgram(program, inputs->num_options, inputs->options);
    }
    if (result == 0) {
        call = inputs->ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN";
        result = moer_nvrtc_take(context, program, inputs->ptx, code, &memory);
    }
    moer_locale_end(&locale);
    log = moer_nvrtc_log(context, program);
    if (result != 0) status = moer_nvrtc_fail(context, inputs, file, defines, call, result, log);
    else if (!memory) status = moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for the code of %s", file);
    else if (log) moer_log(context, MOE_ROUTE_LOG_INFO, "NVRTC on %s (%s): %s", file, defines, log);
    moer_free(context, log);
    if (program) nvrtc->nvrtcDestroyProgram(&program);
    return status;
}

static moe_route_status moer_nvrtc_compile(moe_route_context *context, const char *file, const char *defines,
                                           moer_bytes *code) {
    double start, milliseconds;
    moer_nvrtc_inputs inputs;
    moe_route_status status;
    memset(code, 0, sizeof *code);
    status = moer_nvrtc_open(context);
    if (status != MOE_ROUTE_OK) return status;
    start = moer_milliseconds();
    memset(&inputs, 0, sizeof inputs);
    status = moer_nvrtc_gather_cub(context, &inputs, file);
    if (status == MOE_ROUTE_OK && !moer_nvrtc_gather_sources(context, &inputs, file)) {
        status = moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while compiling");
    }
    if (status == MOE_ROUTE_OK) status = moer_nvrtc_gather_options(context, &inputs, defines);
    if (status == MOE_ROUTE_OK) status = moer_nvrtc_run(context, &inputs, file, defines, code);
    moer_nvrtc_inputs_free(context, &inputs);
    milliseconds = moer_milliseconds() - start;
    moer_mutex_lock(&context->mutex);
    context->statistics.compiles += status == MOE_ROUTE_OK;
    context->statistics.compile_milliseconds += milliseconds;
    moer_mutex_unlock(&context->mutex);
    return status;
}
