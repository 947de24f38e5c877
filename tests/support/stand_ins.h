/*
  stand_ins.h: function tables that stand in for NVRTC, the driver and the disk, so that the cache is tested fast, without
  either of the first two, and with every operation on files failing when a test wants it to. Include after moe_route.h and
  test.h.

      stand_in_reset();
      fault.kind = FAULT_WRITE; fault.at = 2; fault.error = ENOSPC;    the second write fails
      outcome o = create_layer(&desc, ROUTE_OPERATIONS, STAND_IN_GPU);

  The stand-in for NVRTC makes as code a text that names the kernel source and every option, so that a test sees whether a
  variant got its own code: "\177ELFexpand.cu --gpu-architecture=sm_90 --std=c++17 -DELEMENT_BYTES=2 ...".
*/
#ifndef TEST_STAND_INS_H
#define TEST_STAND_INS_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#if defined(_WIN32) && !defined(ESTALE)
#define ESTALE EIO
#endif

#define ALL_OPERATIONS (MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_MAPS | MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE)
#define ONE_OPERATION MOE_ROUTE_OPERATION_EXPAND /* a single variant */
#define COUNTED(counter) __atomic_add_fetch(&(counter), 1, __ATOMIC_SEQ_CST)
#define STAND_IN_FUNCTION static __attribute__((unused))

static struct {
    unsigned compiles;      /* by the stand-in for NVRTC, in this process */
    unsigned loads;         /* images that the stand-in for the driver took, */
    unsigned refusals;      /* and that it refused */
    int refuse;             /* images that it is still to refuse */
    int compile_fails;
    unsigned compile_microseconds;
    unsigned rendezvous;    /* compilations wait, 10 seconds at most, until so many are under way at once, */
    unsigned under_way, most_under_way; /* which these count */
    int nvrtc_version;
    int missing;            /* NVRTC isn't there */
} stand_in;

/* ---- NVRTC ---- */

typedef struct stand_in_program {
    char *code;
    size_t size;
    char name[64];
} stand_in_program;

static int stand_in_version(int *major, int *minor) { return (*major = 13, *minor = 0, 0); }
static const char *stand_in_error_string(int result) { return result ? "STAND_IN_ERROR" : "STAND_IN_SUCCESS"; }
static int stand_in_num_archs(int *count) { return (*count = 4, 0); }
static int stand_in_archs(int *list) { return (list[0] = 80, list[1] = 90, list[2] = 100, list[3] = 120, 0); }

static int stand_in_create(moer_nvrtc_program *made, const char *source, const char *name, int num_headers, const char *const *headers, const char *const *names) {
    stand_in_program *p = (stand_in_program *)calloc(1, sizeof *p);
    (void)source, (void)num_headers, (void)headers, (void)names;
    snprintf(p->name, sizeof p->name, "%s", name);
    *made = (moer_nvrtc_program)(void *)p;
    return 0;
}

static int stand_in_destroy(moer_nvrtc_program *program) {
    stand_in_program *p = (stand_in_program *)(void *)*program;
    free(p->code);
    free(p);
    *program = NULL;
    return 0;
}

/* The code that options give, with its terminator. */
STAND_IN_FUNCTION char *stand_in_code(const char *name, int count, const char *const *options, size_t *size) {
    size_t length = 4 + strlen(name) + 1;
    char *code;
    int i;
    for (i = 0; i < count; i++) length += strlen(options[i]) + 1;
    code = (char *)calloc(1, length);
    snprintf(code, length, "\177ELF%s", name);
    for (i = 0; i < count; i++) {
        static const char *const kept[] = {"-D", "--gpu-architecture=", "--std="};
        int k;
        for (k = 0; k < 3; k++)
            if (strncmp(options[i], kept[k], strlen(kept[k])) == 0) snprintf(code + strlen(code), length - strlen(code), " %s", options[i]);
    }
    *size = strlen(code) + 1;
    return code;
}

static int stand_in_compile(moer_nvrtc_program program, int count, const char *const *options) {
    stand_in_program *p = (stand_in_program *)(void *)program;
    const unsigned under_way = COUNTED(stand_in.under_way);
    unsigned most = __atomic_load_n(&stand_in.most_under_way, __ATOMIC_SEQ_CST), waited;
    COUNTED(stand_in.compiles);
    while (under_way > most && !__atomic_compare_exchange_n(&stand_in.most_under_way, &most, under_way, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    for (waited = 0; waited < 10000 && __atomic_load_n(&stand_in.most_under_way, __ATOMIC_SEQ_CST) < stand_in.rendezvous; waited++) usleep(1000);
    __atomic_sub_fetch(&stand_in.under_way, 1, __ATOMIC_SEQ_CST);
    if (stand_in.compile_microseconds) usleep(stand_in.compile_microseconds);
    if (stand_in.compile_fails) return 6;
    p->code = stand_in_code(p->name, count, options, &p->size);
    return 0;
}

static int stand_in_log_size(moer_nvrtc_program program, size_t *size) { return ((void)program, *size = 1, 0); }
static int stand_in_log(moer_nvrtc_program program, char *log) { return ((void)program, *log = 0, 0); }
static int stand_in_code_size(moer_nvrtc_program program, size_t *size) { return (*size = ((stand_in_program *)(void *)program)->size, 0); }

static int stand_in_get_code(moer_nvrtc_program program, char *code) {
    const stand_in_program *p = (const stand_in_program *)(void *)program;
    memcpy(code, p->code, p->size);
    return 0;
}

/* ---- driver ---- */

static moer_cu_result stand_in_error_name(moer_cu_result result, const char **name) { return (*name = result ? "STAND_IN_ERROR" : "STAND_IN_SUCCESS", 0); }
static moer_cu_result stand_in_get_current(moe_route_cuda_context *current) { return (*current = NULL, 0); }
static moer_cu_result stand_in_push(moe_route_cuda_context pushed) { return ((void)pushed, 0); }
static moer_cu_result stand_in_exchange(int *mode) { return ((void)mode, 0); }

static moer_cu_result stand_in_load(moer_cu_library *library, const void *image, int *o, void **ov, unsigned n, int *lo, void **lov, unsigned ln) {
    (void)o, (void)ov, (void)n, (void)lo, (void)lov, (void)ln;
    if (stand_in.refuse > 0) {
        stand_in.refuse--;
        stand_in.refusals++;
        return 200;
    }
    COUNTED(stand_in.loads);
    *library = (moer_cu_library)(void *)strdup((const char *)image);
    return 0;
}

static moer_cu_result stand_in_unload(moer_cu_library library) { return (free((void *)library), 0); }
static moer_cu_result stand_in_get_kernel(moer_cu_kernel *kernel, moer_cu_library library, const char *name) { return ((void)name, *kernel = (moer_cu_kernel)(void *)library, 0); }
static moer_cu_result stand_in_get_function(moer_cu_function *function, moer_cu_kernel kernel) { return (*function = (moer_cu_function)(void *)kernel, 0); }
static moer_cu_result stand_in_attribute(int *value, int attribute, moer_cu_function function) { return ((void)attribute, (void)function, *value = 0, 0); }
static moer_cu_result stand_in_set_attribute(moer_cu_function function, int attribute, int value) { return ((void)function, (void)attribute, (void)value, 0); }
static moer_cu_result stand_in_occupancy(int *blocks, moer_cu_function function, int threads, size_t shared) { return ((void)function, (void)threads, (void)shared, *blocks = 1, 0); }

/* ---- files ---- */

typedef enum fault_kind {
    FAULT_NONE,
    FAULT_OPEN,
    FAULT_CREATE,
    FAULT_INSPECT,
    FAULT_READ,
    FAULT_WRITE,
    FAULT_FLUSH,
    FAULT_CLOSE,
    FAULT_RENAME,
    FAULT_RENAME_DONE, /* it is done, and reported as failed, as by a network file system whose answer was lost */
    FAULT_REMOVE,
    FAULT_TOUCH,
    FAULT_FOLDER_CREATE,
    FAULT_FOLDER_INSPECT,
    FAULT_FOLDER_OPEN,
    FAULT_ANY, /* counts all of them */
    NUM_FAULTS
} fault_kind;

static struct {
    fault_kind kind;
    unsigned at, count; /* which of that kind fails, from 1; how many from there on, 0: all */
    int error;
    int kill;           /* instead of failing, the process gets this signal: before the operation; in a write, after a part of it */
    unsigned seen;
    unsigned percent;   /* instead: each operation fails with this probability, seeded by `state` */
    unsigned state;
    int64_t clock;      /* added to the time */
} fault;

STAND_IN_FUNCTION int fault_random(void) {
    const unsigned drawn = __atomic_add_fetch(&fault.state, 0x9e3779b9u, __ATOMIC_SEQ_CST);
    unsigned mixed = drawn ^ drawn >> 16;
    mixed *= 0x85ebca6bu;
    mixed ^= mixed >> 13;
    mixed *= 0xc2b2ae35u;
    mixed ^= mixed >> 16;
    if (mixed % 100 >= fault.percent) return 0;
    errno = mixed >> 8 & 1 ? ESTALE : mixed >> 9 & 1 ? EBUSY : mixed >> 10 & 1 ? EIO : ENOENT;
    return 1;
}

STAND_IN_FUNCTION int fault_hits(fault_kind kind) {
    unsigned seen;
    if (fault.percent) return kind == FAULT_RENAME_DONE ? 0 : fault_random();
    if (fault.kind == FAULT_NONE || (fault.kind != kind && (fault.kind != FAULT_ANY || kind == FAULT_RENAME_DONE))) return 0;
    seen = COUNTED(fault.seen);
    if (seen < fault.at || (fault.count && seen >= fault.at + fault.count)) return 0;
    if (fault.kill && kind != FAULT_WRITE) raise(fault.kill);
    errno = fault.error;
    return 1;
}

static int64_t faulty_now(void) { return moer_files_now() + fault.clock; }
static moer_file faulty_open(const char *path, int follow) { return fault_hits(FAULT_OPEN) ? MOER_NO_FILE : moer_file_open(path, follow); }
static moer_file faulty_create(const char *path, int mode) { return fault_hits(FAULT_CREATE) ? MOER_NO_FILE : moer_file_create(path, mode); }
static int faulty_inspect(moer_file file, moer_file_info *info) { return fault_hits(FAULT_INSPECT) ? 0 : moer_file_inspect(file, info); }
static long faulty_read(moer_file file, void *data, size_t size) { return fault_hits(FAULT_READ) ? -1 : moer_file_read(file, data, size > 100 ? 100 : size); }

static long faulty_write(moer_file file, const void *data, size_t size) { /* in small parts, so that there are several */
    const size_t part = size > 100 ? 100 : size;
    if (!fault_hits(FAULT_WRITE)) return moer_file_write(file, data, part);
    if (fault.kill) {
        const long written = moer_file_write(file, data, part / 2);
        raise(fault.kill);
        return written;
    }
    return -1;
}

static int faulty_flush(moer_file file) { return ((void)file, !fault_hits(FAULT_FLUSH)); } /* real flushing takes most of a test's time */
static int faulty_close(moer_file file) {
    const int hit = fault_hits(FAULT_CLOSE), error = errno, closed = moer_file_close(file);
    errno = error;
    return !hit && closed;
}
static int faulty_rename(const char *from, const char *to) {
    int renamed;
    if (fault_hits(FAULT_RENAME)) return 0;
    renamed = moer_file_rename(from, to);
    return fault_hits(FAULT_RENAME_DONE) ? 0 : renamed;
}
static int faulty_remove(const char *path) { return fault_hits(FAULT_REMOVE) ? 0 : moer_file_remove(path); }
static int faulty_touch(const char *path) { return fault_hits(FAULT_TOUCH) ? 0 : moer_file_touch(path); }
static int faulty_folder_create(const char *path, int mode) { return fault_hits(FAULT_FOLDER_CREATE) ? 0 : moer_folder_create(path, mode); }
static int faulty_folder_inspect(const char *path, moer_file_info *info) { return fault_hits(FAULT_FOLDER_INSPECT) ? 0 : moer_folder_inspect(path, info); }
static int faulty_folder_open(moer_folder *f, const char *path) { return fault_hits(FAULT_FOLDER_OPEN) ? 0 : moer_folder_open(f, path); }

static const moer_files faulty_files = {faulty_now,    faulty_open,   faulty_create, faulty_inspect, faulty_read,          faulty_write,
                                        faulty_flush,  faulty_close,  faulty_rename, faulty_remove,  faulty_touch,         faulty_folder_create,
                                        faulty_folder_inspect, faulty_folder_open, moer_folder_next, moer_folder_close};

/* ---- using them ---- */

STAND_IN_FUNCTION void stand_in_reset(void) {
    memset(&stand_in, 0, sizeof stand_in);
    memset(&fault, 0, sizeof fault);
    stand_in.nvrtc_version = 13000;
    moer_default_files = &faulty_files;
}

typedef enum stand_in_device { STAND_IN_COMPILE, STAND_IN_GPU } stand_in_device;

/* Gives a context of DEVICE_COMPILE the stand-ins, and makes it one of a GPU when wanted. */
STAND_IN_FUNCTION void stand_in_take(moe_route_context *context, stand_in_device kind) {
    moer_nvrtc *n = &context->nvrtc;
    moer_driver *d = &context->driver;
    if (!stand_in.missing) {
        n->state = 1;
        n->version = stand_in.nvrtc_version;
        n->nvrtcVersion = stand_in_version;
        n->nvrtcGetErrorString = stand_in_error_string;
        n->nvrtcGetNumSupportedArchs = stand_in_num_archs;
        n->nvrtcGetSupportedArchs = stand_in_archs;
        n->nvrtcCreateProgram = stand_in_create;
        n->nvrtcDestroyProgram = stand_in_destroy;
        n->nvrtcCompileProgram = stand_in_compile;
        n->nvrtcGetProgramLogSize = stand_in_log_size;
        n->nvrtcGetProgramLog = stand_in_log;
        n->nvrtcGetCUBINSize = n->nvrtcGetPTXSize = stand_in_code_size;
        n->nvrtcGetCUBIN = n->nvrtcGetPTX = stand_in_get_code;
    }
    if (kind != STAND_IN_GPU) return;
    context->device = MOE_ROUTE_DEVICE_GPU;
    d->cuGetErrorName = d->cuGetErrorString = stand_in_error_name;
    d->cuCtxGetCurrent = stand_in_get_current;
    d->cuCtxPushCurrent = stand_in_push;
    d->cuCtxPopCurrent = stand_in_get_current;
    d->cuThreadExchangeStreamCaptureMode = stand_in_exchange;
    d->cuLibraryLoadData = stand_in_load;
    d->cuLibraryUnload = stand_in_unload;
    d->cuLibraryGetKernel = stand_in_get_kernel;
    d->cuKernelGetFunction = stand_in_get_function;
    d->cuFuncGetAttribute = stand_in_attribute;
    d->cuFuncSetAttribute = stand_in_set_attribute;
    d->cuOccupancyMaxActiveBlocksPerMultiprocessor = stand_in_occupancy;
}

typedef struct outcome { /* of creating one layer in a context of its own */
    moe_route_status status;
    uint32_t num_variants, num_compiled;
    unsigned troubles; /* lines of the log about anything but a variant that was made */
    unsigned wrong;    /* variants whose code isn't the one that they should have */
    moe_route_statistics statistics;
    char cache_dir[512];
    char trouble[600]; /* the last such line */
    char message[600];
} outcome;

static pthread_mutex_t stand_in_mutex = PTHREAD_MUTEX_INITIALIZER;

STAND_IN_FUNCTION void stand_in_logger(moe_route_log_level level, const char *message, void *user) {
    outcome *o = (outcome *)user;
    (void)level;
    if (strncmp(message, "variant ", 8) == 0 && (strstr(message, ": compiled in") || strstr(message, ": read from"))) return;
    if (strncmp(message, "the pack ", 9) == 0 && strstr(message, " holds ")) return;
    pthread_mutex_lock(&stand_in_mutex); /* the library's own threads log, too */
    o->troubles++;
    snprintf(o->trouble, sizeof o->trouble, "%s", message);
    pthread_mutex_unlock(&stand_in_mutex);
}

/* Is `code` what the stand-in for NVRTC makes for the variant? */
STAND_IN_FUNCTION int stand_in_is_code_of(const moe_route_context *context, const moer_variant *variant, const char *code) {
    char wanted[2048], defines[MOER_DEFINES_MAX], *word, *next;
    snprintf(wanted, sizeof wanted, "\177ELF%s --gpu-architecture=sm_%u%s " MOER_CODE_OPTIONS, variant->family->file, context->target, moer_defined(variant->defines, "WARPGROUPS") ? "a" : "");
    snprintf(defines, sizeof defines, "%s", variant->defines);
    for (word = defines; *word; word = next) {
        next = word + strcspn(word, " ");
        if (*next) *next++ = 0;
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), " -D%s", word);
    }
    return strcmp(wanted, code) == 0;
}

STAND_IN_FUNCTION unsigned stand_in_count_wrong(moe_route_context *context) {
    const moer_variant *v;
    unsigned wrong = 0;
    for (v = context->variants; v; v = v->next) {
        moer_entry entry;
        if (context->device == MOE_ROUTE_DEVICE_GPU) wrong += !v->library || !stand_in_is_code_of(context, v, (const char *)(void *)v->library);
        else wrong += !moer_entry_parse(v->entry.data, v->entry.size, &entry) || !stand_in_is_code_of(context, v, (const char *)entry.payload);
    }
    return wrong;
}

STAND_IN_FUNCTION moe_route_status stand_in_layer(moe_route_context *context, uint32_t operations, moe_route_layer **layer) {
    moe_route_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 32;
    desc.router.top_k = 4;
    desc.experts.hidden_size = 64;
    desc.operations = operations;
    return moe_route_layer_create(context, &desc, layer);
}

STAND_IN_FUNCTION moe_route_status stand_in_context(const moe_route_context_desc *given, stand_in_device kind, outcome *o, moe_route_context **context) {
    moe_route_context_desc desc = *given;
    moe_route_status status;
    desc.device = MOE_ROUTE_DEVICE_COMPILE;
    if (!desc.compile_target) desc.compile_target = 90;
    if (stand_in.missing) desc.nvrtc_path = "/nonexistent/libnvrtc.so";
    desc.logger.log = stand_in_logger;
    desc.logger.user = o;
    status = moe_route_context_create(&desc, context);
    if (status == MOE_ROUTE_OK) stand_in_take(*context, kind);
    return status;
}

STAND_IN_FUNCTION void stand_in_finish(outcome *o, moe_route_context *context, moe_route_layer *layer) {
    moe_route_variant_info variant;
    moe_route_context_info info;
    uint32_t i;
    moe_route_message(context, o->message, sizeof o->message);
    o->num_variants = moe_route_layer_num_variants(layer);
    for (i = 0; i < o->num_variants; i++)
        if (moe_route_layer_variant(layer, i, &variant) == MOE_ROUTE_OK) o->num_compiled += variant.origin == MOE_ROUTE_ORIGIN_COMPILED;
    o->wrong = stand_in_count_wrong(context);
    moe_route_context_get_statistics(context, &o->statistics);
    moe_route_context_get_info(context, &info);
    snprintf(o->cache_dir, sizeof o->cache_dir, "%s", info.cache_dir);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
}

STAND_IN_FUNCTION outcome create_layer(const moe_route_context_desc *desc, uint32_t operations, stand_in_device kind) {
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    outcome o;
    memset(&o, 0, sizeof o);
    o.status = stand_in_context(desc, kind, &o, &context);
    if (o.status == MOE_ROUTE_OK) o.status = stand_in_layer(context, operations, &layer);
    stand_in_finish(&o, context, layer);
    return o;
}

#define CHECK_RIGHT(o, what) \
    CHECK((o).status == MOE_ROUTE_OK && (o).num_variants > 0 && (o).wrong == 0, "%s: %s, %u variants, %u with wrong code; %s", what, moe_route_status_name((o).status), (o).num_variants, (o).wrong, (o).message)
#define CHECK_COMPILED(o, what) \
    (CHECK_RIGHT(o, what) && CHECK((o).num_compiled == (o).num_variants, "%s: %u of %u variants were compiled", what, (o).num_compiled, (o).num_variants))
#define CHECK_CACHED(o, what) \
    (CHECK_RIGHT(o, what) && CHECK((o).num_compiled == 0, "%s: %u of %u variants were compiled; %s", what, (o).num_compiled, (o).num_variants, (o).trouble))
#define CHECK_TROUBLES(o, wanted, what) CHECK((o).troubles == (wanted), "%s: %u lines in the log instead of %u, the last: %s", what, (o).troubles, (unsigned)(wanted), (o).trouble)

#endif /* TEST_STAND_INS_H */
