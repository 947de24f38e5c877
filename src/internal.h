/*
  internal.h: what the parts of the implementation share: private types, and the functions that one part offers the
  others. Everything is static: the implementation is one translation unit. Nothing public belongs here.
*/
#ifndef MOER_HOST
#define MOER_HOST 1

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels_src/args.h"

#define MOER_MAX_EXPERTS 2048u
#define MOER_MAX_TOP_K 64u
#define MOER_MAX_TOKENS 1048576u
#define MOER_MAX_SIZE 65536u
#define MOER_SMALL_PAIRS 512u /* up to here router and maps are one launch */

typedef struct moer_bytes { /* owned by whoever holds it; freed by moer_free(context, data) */
    unsigned char *data;
    size_t size;
} moer_bytes;

/* ---- the kernel sources, which tools/amalgamate puts between this file and the first part of src/ ----
   static const moer_source moer_sources[]: one for each file of kernels_src/; ends with a NULL name.
   static const char moer_sources_digest[]: SHA-256 over all of them, in hexadecimal. */
typedef struct moer_source {
    const char *name;          /* "route.cu", "device.h" */
    const char *const *pieces; /* string literals under 4,000 characters; joined they are the file. Ends with NULL */
} moer_source;

/* ---- platform.c: what differs between operating systems ---- */
#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
typedef SRWLOCK moer_mutex;
typedef CONDITION_VARIABLE moer_condition;
typedef HANDLE moer_file;
#define MOER_NO_FILE INVALID_HANDLE_VALUE
typedef struct moer_folder { /* being listed */
    HANDLE search;
    WIN32_FIND_DATAA entry;
    int started;
} moer_folder;
typedef struct moer_locale {
    int per_thread;
    char saved[256];
} moer_locale;
#else
#include <dirent.h>
#include <pthread.h>
typedef pthread_mutex_t moer_mutex;
typedef pthread_cond_t moer_condition;
typedef int moer_file;
#define MOER_NO_FILE (-1)
typedef struct moer_folder { /* being listed */
    DIR *stream;
} moer_folder;
typedef struct moer_locale {
    void *saved, *neutral;
} moer_locale;
#endif

#define MOER_PATH_MAX 4096 /* longer paths are refused, not cut */

static void moer_mutex_init(moer_mutex *mutex);
static void moer_mutex_destroy(moer_mutex *mutex);
static void moer_mutex_lock(moer_mutex *mutex);
static void moer_mutex_unlock(moer_mutex *mutex);
static void moer_condition_init(moer_condition *condition);
static void moer_condition_destroy(moer_condition *condition);
static void moer_condition_wait(moer_condition *condition, moer_mutex *mutex);
static void moer_condition_broadcast(moer_condition *condition);

static double moer_milliseconds(void); /* of a clock that only serves for differences */
static long moer_process_id(void);
/* NULL when unset or empty, and always when the process runs with more rights than its user (setuid). */
static const char *moer_environment(const char *name);

typedef void (*moer_function)(void); /* any function's address; cast to its type before use */
static void *moer_library_open(const char *path);   /* NULL when it can't be loaded. Never closed */
static void *moer_library_loaded(const char *name); /* NULL unless this process has it loaded already */
static moer_function moer_library_symbol(void *library, const char *name);
static void moer_library_error(char *text, size_t size); /* why this thread's last moer_library_open failed */
/* Folder of the library that a function lies in, without a closing slash; 0 when unknown. */
static int moer_library_folder(moer_function function, char *folder, size_t size);

/* Makes "C" this thread's locale, and puts back what it was. NVRTC 12 changes it, and reads numbers by it. */
static void moer_locale_begin(moer_locale *locale);
static void moer_locale_end(const moer_locale *locale);

static int moer_home_folder(char *folder, size_t size);       /* of the user that the process acts as; 0: none */
static int moer_executable_folder(char *folder, size_t size); /* without a closing slash; 0 when unknown */
static int moer_path_is_absolute(const char *path);
static int moer_path_absolute(const char *path, char *absolute, size_t size); /* 0 when it doesn't fit */
static uint64_t moer_random(void); /* for names that must not collide; not a secret */

/* Files. A call that failed leaves its reason in moer_system_error; interrupted system calls are repeated within. */
typedef enum moer_path_kind { MOER_PATH_OTHER = 0, MOER_PATH_FILE = 1, MOER_PATH_FOLDER = 2 } moer_path_kind;
typedef struct moer_file_info {
    moer_path_kind kind;
    uint64_t size;
    int owned;              /* by the user that the process acts as */
    int writable_by_others; /* by group or world */
} moer_file_info;

static void moer_system_error(char *text, size_t size);
static moer_path_kind moer_path_inspect(const char *path); /* follows symbolic links; OTHER when there is nothing, too */
static moer_file moer_file_open(const char *path);         /* to read; a symbolic link is refused */
/* To write a file that must not exist. shared: the umask decides who may read and write it. */
static moer_file moer_file_create(const char *path, int shared);
static int moer_file_inspect(moer_file file, moer_file_info *info);
static long moer_file_read(moer_file file, void *data, size_t size); /* bytes read, maybe fewer; 0 at the end; -1 */
static long moer_file_write(moer_file file, const void *data, size_t size); /* bytes written, maybe fewer; -1 */
static int moer_file_flush(moer_file file);
static int moer_file_close(moer_file file); /* 0 when a write that was put off fails now */
static int moer_file_rename(const char *from, const char *to); /* atomic; replaces */
static int moer_file_remove(const char *path);
static double moer_file_age(const char *path); /* seconds since it was written; -1 when unknown */
static int moer_folder_create(const char *path, int shared); /* one level */
static int moer_folder_inspect(const char *path, moer_file_info *info); /* 0 for a symbolic link, too */
static int moer_folder_open(moer_folder *folder, const char *path);
static const char *moer_folder_next(moer_folder *folder); /* a name, valid until the next call; NULL at the end */
static void moer_folder_close(moer_folder *folder);

/* ---- base.c: memory, messages, checked sizes ---- */
static void *moer_alloc(moe_route_context *context, size_t size); /* zeroed; NULL when there is none */
static void moer_free(moe_route_context *context, void *memory);
#if defined(__MINGW32__)
#define MOER_PRINTF(text, first) __attribute__((format(__MINGW_PRINTF_FORMAT, text, first)))
#elif defined(__GNUC__)
#define MOER_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define MOER_PRINTF(text, first)
#endif
/* Keeps the message, logs it as an error, and returns `status`. */
static moe_route_status moer_fail(moe_route_context *context, moe_route_status status, const char *format, ...)
    MOER_PRINTF(3, 4);
static void moer_log(moe_route_context *context, moe_route_log_level level, const char *format, ...) MOER_PRINTF(3, 4);
/* Appends to a NUL-terminated buffer of `size` bytes; returns 0 (and leaves a cut text) when it doesn't fit. */
static int moer_append(char *buffer, size_t size, const char *format, ...) MOER_PRINTF(3, 4);
/* a * b and a + b into *result; 0 when they overflow. */
static int moer_size_mul(size_t a, size_t b, size_t *result);
static int moer_size_add(size_t a, size_t b, size_t *result);

/* ---- sha256.c ---- */
typedef struct moer_sha256 {
    uint32_t state[8];
    uint64_t length;
    unsigned char block[64];
} moer_sha256;
static void moer_sha256_begin(moer_sha256 *hash);
static void moer_sha256_add(moer_sha256 *hash, const void *data, size_t size);
static void moer_sha256_end(moer_sha256 *hash, unsigned char digest[32]);

/* ---- driver.c: the CUDA driver, opened at run time ---- */
#if defined(_WIN32) && !defined(_WIN64)
#define MOER_CUDA_CALL __stdcall
#else
#define MOER_CUDA_CALL
#endif
typedef int moer_cu_result;  /* CUresult */
typedef int moer_cu_device;  /* CUdevice */
enum { /* values of the driver's own enumerations */
    MOER_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    MOER_CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
    MOER_CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    MOER_CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
};
typedef struct CUlib_st *moer_cu_library;
typedef struct CUkern_st *moer_cu_kernel;
typedef struct CUfunc_st *moer_cu_function;

typedef struct moer_cu_launch_attribute { /* CUlaunchAttribute */
    int id;
    char pad[4];
    union {
        char pad[64];
        int programmatic_stream_serialization;
    } value;
} moer_cu_launch_attribute;

typedef struct moer_cu_launch_config { /* CUlaunchConfig */
    unsigned int grid[3], block[3], shared_bytes;
    moe_route_stream stream;
    moer_cu_launch_attribute *attributes;
    unsigned int num_attributes;
} moer_cu_launch_config;

typedef struct moer_driver {
    moer_cu_result(MOER_CUDA_CALL *cuInit)(unsigned int);
    moer_cu_result(MOER_CUDA_CALL *cuDriverGetVersion)(int *);
    moer_cu_result(MOER_CUDA_CALL *cuGetErrorName)(moer_cu_result, const char **);
    moer_cu_result(MOER_CUDA_CALL *cuGetErrorString)(moer_cu_result, const char **);
    moer_cu_result(MOER_CUDA_CALL *cuDeviceGetCount)(int *);
    moer_cu_result(MOER_CUDA_CALL *cuDeviceGet)(moer_cu_device *, int);
    moer_cu_result(MOER_CUDA_CALL *cuDeviceGetName)(char *, int, moer_cu_device);
    moer_cu_result(MOER_CUDA_CALL *cuDeviceGetAttribute)(int *, int, moer_cu_device);
    moer_cu_result(MOER_CUDA_CALL *cuDevicePrimaryCtxRetain)(moe_route_cuda_context *, moer_cu_device);
    moer_cu_result(MOER_CUDA_CALL *cuDevicePrimaryCtxRelease)(moer_cu_device);
    moer_cu_result(MOER_CUDA_CALL *cuCtxGetCurrent)(moe_route_cuda_context *);
    moer_cu_result(MOER_CUDA_CALL *cuCtxGetDevice)(moer_cu_device *);
    moer_cu_result(MOER_CUDA_CALL *cuCtxPushCurrent)(moe_route_cuda_context);
    moer_cu_result(MOER_CUDA_CALL *cuCtxPopCurrent)(moe_route_cuda_context *);
    moer_cu_result(MOER_CUDA_CALL *cuThreadExchangeStreamCaptureMode)(int *);
    moer_cu_result(MOER_CUDA_CALL *cuLibraryLoadData)(moer_cu_library *, const void *, int *, void **, unsigned int,
                                                      int *, void **, unsigned int);
    moer_cu_result(MOER_CUDA_CALL *cuLibraryUnload)(moer_cu_library);
    moer_cu_result(MOER_CUDA_CALL *cuLibraryGetKernel)(moer_cu_kernel *, moer_cu_library, const char *);
    moer_cu_result(MOER_CUDA_CALL *cuKernelGetFunction)(moer_cu_function *, moer_cu_kernel);
    moer_cu_result(MOER_CUDA_CALL *cuFuncGetAttribute)(int *, int, moer_cu_function);
    moer_cu_result(MOER_CUDA_CALL *cuFuncLoad)(moer_cu_function); /* NULL before driver 12.4 */
    moer_cu_result(MOER_CUDA_CALL *cuLaunchKernelEx)(const moer_cu_launch_config *, moer_cu_function, void **, void **);
} moer_driver;

/* Opens the driver and calls cuInit; on failure returns ERROR_NO_DEVICE with a message. Once per context. */
static moe_route_status moer_driver_open(moe_route_context *context);
/* moer_fail with ERROR_DRIVER: "<call>: <name of the error> (<its text>)". */
static moe_route_status moer_driver_fail(moe_route_context *context, const char *call, moer_cu_result result);

/* ---- nvrtc.c: NVRTC, found and opened at run time ---- */
typedef struct moer_nvrtc_program_st *moer_nvrtc_program;
typedef struct moer_nvrtc {
    int state;   /* 1 once the rest is valid; it changes no more then */
    int version; /* 13000 for 13.0 */
    char path[MOER_PATH_MAX];
    int (*nvrtcVersion)(int *, int *);
    const char *(*nvrtcGetErrorString)(int);
    int (*nvrtcGetNumSupportedArchs)(int *);
    int (*nvrtcGetSupportedArchs)(int *);
    int (*nvrtcCreateProgram)(moer_nvrtc_program *, const char *, const char *, int, const char *const *,
                              const char *const *);
    int (*nvrtcDestroyProgram)(moer_nvrtc_program *);
    int (*nvrtcCompileProgram)(moer_nvrtc_program, int, const char *const *);
    int (*nvrtcGetProgramLogSize)(moer_nvrtc_program, size_t *);
    int (*nvrtcGetProgramLog)(moer_nvrtc_program, char *);
    int (*nvrtcGetCUBINSize)(moer_nvrtc_program, size_t *);
    int (*nvrtcGetCUBIN)(moer_nvrtc_program, char *);
    int (*nvrtcGetPTXSize)(moer_nvrtc_program, size_t *);
    int (*nvrtcGetPTX)(moer_nvrtc_program, char *);
} moer_nvrtc;

/* Compiles kernel source `file` ("route.cu") with `defines`, a list of NAME=VALUE words separated by single spaces, for
   context->target. Finds and opens NVRTC the first time. The result is a cubin, or PTX where NVRTC is older than the
   GPU. May be called by several threads at once. */
static moe_route_status moer_nvrtc_compile(moe_route_context *context, const char *file, const char *defines,
                                           moer_bytes *code);

/* ---- cache.c: cubins on disk ---- */
typedef struct moer_cache {
    char folder[MOER_PATH_MAX]; /* <root>/v1 once it is checked; empty: memory alone */
    int trust_shared;           /* others may own or write the folder and its files */
    int refresh;                /* every load is a miss */
    int writable;               /* cleared by the first write that fails */
    int swept;                  /* left-over temporary files have been removed */
    unsigned stores;            /* numbers the temporary files */
} moer_cache;

typedef struct moer_key { /* what a variant is looked up by; needs neither NVRTC nor the driver */
    const char *family;     /* kernel family */
    const char *defines;    /* its constants, canonical */
    uint32_t target;
    char text[1024];        /* the whole key, length-prefixed */
    size_t text_size;
    unsigned char digest[32];
} moer_key;

static int moer_key_make(moer_key *key, const char *family, const char *defines, uint32_t target); /* 0: too long */
/* Decides on the folder, once, when a context is created. Never fails: without a usable folder the cache is memory. */
static void moer_cache_open(moe_route_context *context, const char *folder_or_null, int trust_shared);
/* An entry that passes every check, or code->data == NULL. */
static void moer_cache_load(moe_route_context *context, const moer_key *key, moer_bytes *code);
/* Publishes an entry; a failure turns writing off and is logged once. */
static void moer_cache_store(moe_route_context *context, const moer_key *key, const moer_bytes *code);
/* Removes an entry that the driver refused, if it still has the content `code`. */
static void moer_cache_remove(moe_route_context *context, const moer_key *key, const moer_bytes *code);

/* ---- variant.c: kernel families, and the table of variants that a context has loaded ---- */
#define MOER_MAX_ENTRIES 3 /* kernels in one family */
typedef struct moer_family {
    const char *name;                     /* "route" */
    const char *file;                     /* "route.cu" */
    const char *entries[MOER_MAX_ENTRIES];/* extern "C" names */
} moer_family;

typedef struct moer_variant {
    struct moer_variant *next;
    const moer_family *family;
    char defines[384];
    int state;                /* 0 being made, 1 ready, -1 failed (then only waiters still look at it) */
    int users;                /* threads waiting for a variant being made */
    moe_route_status status;
    moe_route_origin origin;
    double milliseconds;
    size_t cubin_size;
    moer_cu_library library;
    moer_cu_function functions[MOER_MAX_ENTRIES];
    int static_shared_bytes[MOER_MAX_ENTRIES];
} moer_variant;

/* The variant, loaded: from the table, else the cache, else compiled. */
static moe_route_status moer_variant_get(moe_route_context *context, const moer_family *family, const char *defines,
                                         const moer_variant **variant);
static void moer_variants_destroy(moe_route_context *context);

/* ---- context.c ---- */
struct moe_route_context {
    moe_route_device device;
    moe_route_allocator allocator;
    moe_route_logger logger;
    moer_mutex mutex;           /* of everything below that changes after creation */
    moer_condition variant_ready;
    char *message;              /* of the last failure; NULL: none. From malloc: it must work when the allocator doesn't */
    int message_lost;           /* the last failure found no memory for its message */
    int usable;                 /* 0: creation failed */
    uint32_t target;
    uint32_t num_multiprocessors;
    char name[128];
    int driver_version;
    long process_id;
    moer_driver driver;
    moer_cu_device cu_device;
    moe_route_cuda_context cu_context;
    int retained_primary;
    char nvrtc_path[MOER_PATH_MAX]; /* from the description; empty: none */
    moer_nvrtc nvrtc;
    moer_cache cache;
    moer_variant *variants;
};

/* Makes the context's CUDA context current for this thread if another is; *pushed tells moer_context_leave what to undo. */
static moe_route_status moer_context_enter(moe_route_context *context, int *pushed);
static void moer_context_leave(moe_route_context *context, int pushed);

/* ---- layer.c: the descriptions, checked, with every default filled in ---- */
typedef struct moer_router {
    uint32_t num_experts, top_k;
    moe_route_dtype logits_dtype;
    moe_route_score score;
    moe_route_weight weight; /* SOFTMAX_SELECTED also for a softmax without bias that its plain sum renormalises */
    moe_route_renormalize renormalize;
    moe_route_address selection_bias;
    float renormalize_epsilon, scale;
    uint32_t first_expert, num_local_experts;
} moer_router;

typedef enum moer_scales { /* how a scale is stored; the first three as moe_route_dtype */
    MOER_SCALES_F32 = 1,
    MOER_SCALES_F16 = 2,
    MOER_SCALES_BF16 = 3,
    MOER_SCALES_E8M0 = 4,
    MOER_SCALES_E4M3 = 5
} moer_scales;

typedef enum moer_global { /* which of the global scales a row has */
    MOER_GLOBAL_NONE = 0,
    MOER_GLOBAL_PER_TENSOR = 1,
    MOER_GLOBAL_PER_EXPERT = 2,
    MOER_GLOBAL_PER_HALF = 3,   /* [E, 2]: of the first rows / 2 rows, and of the others */
    MOER_GLOBAL_INTERLEAVED = 4 /* [E, 2]: of the even rows, and of the odd ones */
} moer_global;

typedef struct moer_matrix { /* E_local matrices [rows, inner] */
    moe_route_format format; /* NONE: the layer doesn't have it */
    uint32_t rows, inner, group_size, group_rows, num_groups;
    moe_route_address data, scales, zero_points, global_scales, bias;
    moer_scales scales_kind;
    moer_global global;
    int signed_codes;
    moe_route_dtype bias_dtype; /* DEFAULT without a bias */
} moer_matrix;

/* ---- formats.c: the sizes of a matrix in its format ---- */
typedef struct moer_block { /* the smallest whole unit of a row */
    uint32_t values, bytes; /* 0: no such format */
} moer_block;
static moer_block moer_format_block(moe_route_format format);
static int moer_is_quantized(moe_route_format format);
static int moer_has_scales(moe_route_format format); /* in an array of their own */
static size_t moer_scale_size(moer_scales kind);
static size_t moer_row_bytes(const moer_matrix *matrix);            /* of data */
static size_t moer_scale_row_bytes(const moer_matrix *matrix);      /* of scales, for one row or group_rows rows; 0: none */
static size_t moer_zero_point_row_bytes(const moer_matrix *matrix); /* where they are given */
static uint64_t moer_matrix_bytes(const moer_matrix *matrix);       /* of one expert, with scales and zero points */
static uint32_t moer_tile_steps(const moer_matrix *matrix);         /* that tile.h cuts a row into */

#define MOER_MAX_LAYER_VARIANTS 18 /* the pointers to variants that moe_route_layer has; the list can't need more */

struct moe_route_layer {
    moe_route_context *context;
    moer_router router;
    moer_matrix gate_up, down;
    uint32_t hidden_size, intermediate_size; /* 0: no experts */
    moe_route_dtype dtype;
    int interleaved, dependent, fused_combine;
    uint32_t max_tokens, operations;
    uint32_t max_pairs_small; /* MAX_PAIRS of the kernels for small batches */
    uint32_t down_parts;      /* parts that K is cut into in the down matmul */
    /* What the operations launch; NULL where the layer wasn't prepared for it. [0]: up to MOER_SMALL_PAIRS pairs, [1]: more. */
    const moer_variant *topk, *maps, *route_layer, *route_given, *route_all, *maps_all;
    const moer_variant *gate_up_gated[2], *down_rows[2], *down_fused, *combine_rows;
    const moer_variant *matmul[2][2]; /* [moe_route_matrix] */
    const moer_variant *combine, *expand;
    const moer_variant *variants[MOER_MAX_LAYER_VARIANTS];
    uint32_t num_variants;
};

/* Where things lie in the workspace of one call, in bytes from its start. */
typedef struct moer_workspace {
    size_t ids, weights, row_to_pair, pair_to_row, row_to_expert, distinct_experts, distinct_offsets, distinct_count;
    size_t expert_offsets, aligned_offsets, block_counts; /* more than MOER_SMALL_PAIRS pairs, or the CPU */
    size_t h, partial;                                    /* fused layer */
    size_t scratch;                                       /* CPU */
    size_t size;
} moer_workspace;

static uint32_t moer_layer_matmul_warps(const moer_matrix *matrix);
static uint32_t moer_layer_max_distinct(const moe_route_layer *layer, uint32_t num_tokens);
static uint32_t moer_maps_blocks(uint32_t num_pairs); /* blocks of the maps' count and scatter */

/* ---- sequence.c: the launches of one operation ---- */
typedef struct moer_launch {
    const moer_variant *variant;
    uint32_t entry;
    uint32_t grid[3], block;
    uint64_t weight_bytes;
    union {
        moer_route_args route;
        moer_maps_args maps;
        moer_matmul_args matmul;
        moer_down_args down;
        moer_expand_args expand;
        moer_combine_args combine;
    } args;
} moer_launch;

typedef struct moer_sequence {
    uint32_t num_launches;
    moer_launch launches[MOE_ROUTE_MAX_LAUNCHES];
} moer_sequence;

/* ---- cpu_*.c: every operation over host addresses ---- */
static void *moer_host(moe_route_address address); /* the address as a pointer */
static size_t moer_dtype_size(moe_route_dtype dtype);
static float moer_load_value(const void *array, size_t index, moe_route_dtype dtype);
static void moer_store_value(void *array, size_t index, moe_route_dtype dtype, float value);
/* One row as numbers: of GGUF blocks, and of any matrix. */
static void moer_cpu_gguf_row(moe_route_format format, const unsigned char *blocks, uint32_t inner, float *values);
static void moer_cpu_decode_row(const moer_matrix *matrix, size_t expert, size_t row, float *values);
/* ids and weights (either may be NULL) of all tokens. */
static void moer_cpu_topk(const moer_router *router, const void *logits, uint32_t num_tokens, uint32_t num_valid, int32_t *ids, float *weights);
/* Every map that isn't null. */
static void moer_cpu_maps(const moer_router *router, const int32_t *ids, uint32_t num_tokens, uint32_t num_valid, const moer_maps_out *maps);

#endif /* MOER_HOST */
