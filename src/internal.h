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
#define MOER_MAX_SHARED 32u
#define MOER_MAX_GROUPS 64u
#define MOER_MAX_REPLICAS 64u
#define MOER_MAX_TOP_K 64u
#define MOER_MAX_TOKENS 1048576u
#define MOER_MAX_SIZE 65536u
#define MOER_SMALL_PAIRS 512u /* up to here router and maps are one launch */
#define MOER_SORT_PAIRS 8192u /* up to here maps of more pairs are one launch: counting all in every block costs less than another one */
#define MOER_DISPATCH_PAIRS 2048u /* up to here dispatch is one launch: counting in every block costs less than another one */
/* Rows of an expert, on average, up to which matmul.cu is faster than grouped.cu, though it reads weights again for each further 8 rows: of quantized weights, of
   those that go through matmul_bulk.cu, and of others. */
#define MOER_FEW_ROWS 12u
#define MOER_FEW_ROWS_BULK 26u
#define MOER_FEW_ROWS_PLAIN 2u
#define MOER_MATMUL_SHARED 98304u /* bytes that the blocks of matmul.cu on a multiprocessor share, on every GPU */
/* Inputs of the down matmul up to which down.cu is faster than matmul_bulk.cu and combine.cu, but for GGUF's blocks. */
#define MOER_FUSED_INPUTS 640u
#define MOER_MAX_CUB_EXPERTS 768u /* local experts that maps_cub.cu has shared memory for */

typedef struct moer_bytes { /* owned by whoever holds it; freed by moer_free(context, data) */
    unsigned char *data;
    size_t size;
} moer_bytes;

#include "platform.h"
#include "cache.h"

/* ---- the kernel sources, which tools/amalgamate puts between this file and the first part of src/ ----
   static const moer_source moer_sources[]: one for each file of kernels_src/; ends with a NULL name.
   static const char moer_sources_digest[]: SHA-256 over all of them, in hexadecimal. */
typedef struct moer_source {
    const char *name;          /* "route.cu", "device.h" */
    const char *const *pieces; /* string literals under 4,000 characters; joined they are the file. Ends with NULL */
} moer_source;

#define MOER_DEFINES_MAX 768 /* the text of a variant's constants; as in moe_route.h */
#define MOER_MAX_EXPRESSION 160u
#define MOER_EXPRESSION_MAX 401 /* the same as a macro's value: every second character a space that takes four */

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
static uint32_t moer_divide_up(uint32_t a, uint32_t b);

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
    MOER_CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
    MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    MOER_CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
    MOER_CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
    MOER_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    MOER_CU_STREAM_NON_BLOCKING = 1,
    MOER_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    MOER_CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    MOER_CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
};
typedef struct CUlib_st *moer_cu_library;
typedef struct CUkern_st *moer_cu_kernel;
typedef struct CUfunc_st *moer_cu_function;
typedef struct CUevent_st *moer_cu_event;
typedef struct CUgraph_st *moer_cu_graph;
typedef struct CUgraphExec_st *moer_cu_graph_exec;

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
    moer_cu_result(MOER_CUDA_CALL *cuFuncSetAttribute)(moer_cu_function, int, int);
    moer_cu_result(MOER_CUDA_CALL *cuFuncLoad)(moer_cu_function); /* NULL before driver 12.4 */
    moer_cu_result(MOER_CUDA_CALL *cuOccupancyMaxActiveBlocksPerMultiprocessor)(int *, moer_cu_function, int, size_t);
    moer_cu_result(MOER_CUDA_CALL *cuLaunchKernelEx)(const moer_cu_launch_config *, moer_cu_function, void **, void **);
    /* For tuning alone; NULL where a driver lacks them. */
    moer_cu_result(MOER_CUDA_CALL *cuMemcpyHtoDAsync)(moe_route_address, const void *, size_t, moe_route_stream);
    moer_cu_result(MOER_CUDA_CALL *cuMemcpyDtoHAsync)(void *, moe_route_address, size_t, moe_route_stream);
    moer_cu_result(MOER_CUDA_CALL *cuStreamCreate)(moe_route_stream *, unsigned int);
    moer_cu_result(MOER_CUDA_CALL *cuStreamDestroy)(moe_route_stream);
    moer_cu_result(MOER_CUDA_CALL *cuStreamSynchronize)(moe_route_stream);
    moer_cu_result(MOER_CUDA_CALL *cuStreamBeginCapture)(moe_route_stream, int);
    moer_cu_result(MOER_CUDA_CALL *cuStreamEndCapture)(moe_route_stream, moer_cu_graph *);
    moer_cu_result(MOER_CUDA_CALL *cuGraphInstantiateWithFlags)(moer_cu_graph_exec *, moer_cu_graph, unsigned long long);
    moer_cu_result(MOER_CUDA_CALL *cuGraphLaunch)(moer_cu_graph_exec, moe_route_stream);
    moer_cu_result(MOER_CUDA_CALL *cuGraphExecDestroy)(moer_cu_graph_exec);
    moer_cu_result(MOER_CUDA_CALL *cuGraphDestroy)(moer_cu_graph);
    moer_cu_result(MOER_CUDA_CALL *cuEventCreate)(moer_cu_event *, unsigned int);
    moer_cu_result(MOER_CUDA_CALL *cuEventDestroy)(moer_cu_event);
    moer_cu_result(MOER_CUDA_CALL *cuEventRecord)(moer_cu_event, moe_route_stream);
    moer_cu_result(MOER_CUDA_CALL *cuEventSynchronize)(moer_cu_event);
    moer_cu_result(MOER_CUDA_CALL *cuEventElapsedTime)(float *, moer_cu_event, moer_cu_event);
} moer_driver;

/* Opens the driver and calls cuInit; on failure returns ERROR_NO_DEVICE with a message. Once per context. */
static moe_route_status moer_driver_open(moe_route_context *context);
/* Name of a function that only tuning needs, and that this driver lacks; NULL: it has all. */
static const char *moer_driver_missing(const moer_driver *driver);
/* moer_fail with ERROR_DRIVER: "<call>: <name of the error> (<its text>)". */
static moe_route_status moer_driver_fail(moe_route_context *context, const char *call, moer_cu_result result);

/* ---- nvrtc_find.c, nvrtc.c: NVRTC, found and opened at run time ---- */
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
    int (*nvrtcInstallBundledHeaders)(const char *, unsigned int, const char **); /* NULL before 13.3 */
} moer_nvrtc;

/* Options of NVRTC that change the code it makes, apart from the architecture: single words, separated by single spaces.
   They are part of every cache key. */
#define MOER_CODE_OPTIONS "--std=c++17"

/* Finds and opens NVRTC if it isn't yet. A failure isn't kept: a later call looks again. */
static moe_route_status moer_nvrtc_open(moe_route_context *context);
/* Calls `visit` for the folders into which pip installs packages of a Python under `prefix`, which may be NULL, until one returns
   1; returns that. */
static int moer_python_packages(const char *prefix, int (*visit)(void *user, const char *packages), void *user);
/* Name of the library of builtins that an NVRTC needs. */
static void moer_nvrtc_builtins_name(int version, char *name, size_t size);

/* Compiles kernel source `file` ("route.cu") with `defines`, a list of NAME=VALUE words separated by single spaces, for
   context->target. Finds and opens NVRTC the first time. The result is a cubin, or PTX where NVRTC is older than the
   GPU. May be called by several threads at once. */
static moe_route_status moer_nvrtc_compile(moe_route_context *context, const char *file, const char *defines,
                                           moer_bytes *code);

/* ---- cub_find.c, or in dist/moe_route.h cub_embedded.c: CUB's headers, for the kernel sources that include some ---- */
typedef struct moer_cub {
    char folder[MOER_PATH_MAX]; /* that holds cub/ and cuda/; empty where this library has the headers in it: */
    char *text;                 /* of each header the name and the content, both terminated; freed by whoever asked for it */
    size_t num_headers;
} moer_cub;
/* NVRTC is open. Each compilation that needs the headers asks for them, and nothing else does. */
static moe_route_status moer_cub_get(moe_route_context *context, moer_cub *cub);

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
    char defines[MOER_DEFINES_MAX];
    int state;                /* 0 being made, 1 ready, -1 failed (then only waiters still look at it) */
    int users;                /* threads waiting for a variant being made */
    moe_route_status status;
    moe_route_origin origin;
    double milliseconds;
    size_t cubin_size;
    moer_bytes entry; /* DEVICE_COMPILE: kept for a pack */
    moer_cu_library library;
    moer_cu_function functions[MOER_MAX_ENTRIES];
    int static_shared_bytes[MOER_MAX_ENTRIES];
    uint32_t dynamic_shared_bytes; /* SHARED_BYTES of its constants */
    int resident_blocks[MOER_MAX_ENTRIES]; /* of as many threads as the kernel may have, that a multiprocessor holds; 0: no device */
} moer_variant;

typedef struct moer_team moer_team;
/* The variant, loaded: from the table, else kept code, else compiled. `team` gets help before the first compilation; it may be
   NULL. */
static moe_route_status moer_variant_get(moe_route_context *context, const moer_family *family, const char *defines,
                                         moer_team *team, const moer_variant **variant);
static void moer_variants_destroy(moe_route_context *context, int unload); /* 0: leave the driver alone */
/* The value of a constant, 0 where it isn't defined. */
static uint32_t moer_defined(const char *defines, const char *name);
/* The shared memory that a block may have on a GPU of this target, SHARED_BYTES and static arrays together. */
static uint32_t moer_most_shared_bytes(uint32_t target);

/* ---- wanted.c: the variants of a layer, made side by side ---- */
#define MOER_MAX_LAYER_VARIANTS 31 /* the pointers to variants that moe_route_layer has; the list can't need more */

typedef struct moer_wanted {
    uint32_t count;
    struct {
        const moer_family *family;
        char defines[sizeof ((moer_variant *)0)->defines];
        const moer_variant **variant; /* set by moer_wanted_make */
    } items[MOER_MAX_LAYER_VARIANTS];
} moer_wanted;

static moe_route_status moer_wanted_add(moe_route_context *context, moer_wanted *wanted, const moer_family *family, const char *defines,
                                        const moer_variant **variant);
static moe_route_status moer_wanted_make(moe_route_context *context, moer_wanted *wanted);
static void moer_team_grow(moer_team *team); /* threads that take over what is still to be made */

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
    uint64_t l2_bytes;          /* 0: unknown */
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
    moer_pack *packs;          /* in the order in which they were added; none is removed while the context lives */
    moe_route_statistics statistics;
    moer_variant *variants;
    struct moer_tuning *tunings; /* kept in this process */
};

/* Whether `call` may use the context: its creation succeeded, and in this process. */
static moe_route_status moer_context_check(moe_route_context *context, const char *call);

/* Makes the context's CUDA context current for this thread if another is; *pushed tells moer_context_leave what to undo. */
static moe_route_status moer_context_enter(moe_route_context *context, int *pushed);
static void moer_context_leave(moe_route_context *context, int pushed);

/* ---- router.c, layer.c: the descriptions, checked, with every default filled in ---- */
typedef struct moer_router {
    uint32_t num_experts, top_k, num_shared_experts, num_skip_experts;
    moe_route_dtype logits_dtype, weights_dtype;
    moe_route_address logit_bias, selection_bias, expert_scale, id_table;
    uint32_t id_table_rows;
    float softcap, jitter;
    moe_route_score score;
    char score_expression[MOER_EXPRESSION_MAX]; /* as a macro's value: without spaces */
    moe_route_score_function score_function;
    void *score_user;
    moe_route_group_rule group_rule;
    uint32_t num_groups, topk_groups;
    moe_route_dropped dropped;
    moe_route_ids_source ids;
    moe_route_weight weight; /* SOFTMAX_SELECTED also for a softmax that its plain sum renormalises, where that is the same */
    moe_route_renormalize renormalize;
    float renormalize_epsilon, scale;
    int divide_by_top_k;
    moe_route_address expert_map; /* [E, expert_map_columns]; 0: experts are their own physical experts */
    uint32_t expert_map_columns, num_physical_experts;
    uint32_t first_expert, num_local_experts; /* physical */
    uint32_t num_identity, first_identity;    /* experts without weights that this layer adds, and the id of the first */
    int given_physical;                       /* given ids are physical experts */
} moer_router;

/* Whether a rule drops whole groups. */
static int moer_drops_groups(moe_route_group_rule rule);

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
static uint64_t moer_data_bytes(const moer_matrix *matrix);         /* of one expert */
static uint64_t moer_scale_bytes(const moer_matrix *matrix);        /* likewise */
static uint64_t moer_matrix_bytes(const moer_matrix *matrix);       /* likewise: data, scales and zero points */
static uint32_t moer_tile_step(const moer_matrix *matrix);          /* inputs in one of tile.h's steps */
static uint32_t moer_tile_steps(const moer_matrix *matrix);         /* that a row is cut into */

#define MOER_WARPGROUPS_TARGET 90 /* the GPUs that grouped_warpgroups.cu is for */
#define MOER_GROUPED_TILES 3 /* sizes of grouped.cu's tiles: 32, 64 and 128 rows */

/* ---- choices.c: which of several kernels of the same result a layer launches ---- */
#define MOER_CHOICES 21 /* of the token counts up to 1, 2, 4, ..., MOER_MAX_TOKENS */
typedef struct moer_choice {
    unsigned char separate;  /* up to MOER_SMALL_PAIRS pairs: 1: down matmul and combine are two kernels even where one can do both */
    unsigned char tile_rows; /* beyond, in grouped.cu: rows of a tile, 32, 64 or 128; 0: by the average rows of an expert */
} moer_choice;

typedef struct moer_tuning { /* what was measured for one kind of layer */
    struct moer_tuning *next;
    unsigned char digest[32]; /* of its key */
    moer_choice choices[MOER_CHOICES];
} moer_tuning;

/* Fills layer->choices from the description, and from what moe_route_layer_tune kept. */
static moe_route_status moer_layer_choose(moe_route_layer *layer, const moe_route_layer_desc *desc);
/* The token counts that choice i is for, up to max_tokens, and of these those with more than MOER_SMALL_PAIRS pairs (`large`), or those
   without. 0: there are none. */
static int moer_choice_range(const moe_route_layer *layer, uint32_t i, int large, uint32_t *least, uint32_t *most);
/* What the choices come to: the size of grouped.cu's tiles, 0 to MOER_GROUPED_TILES - 1, and whether down matmul and combine are one kernel;
   and whether some batch of up to max_tokens tokens meets such a tile, or of few pairs such a kernel, or the lack of it. */
static uint32_t moer_grouped_tile(const moe_route_layer *layer, uint32_t num_pairs);
static int moer_layer_fuses(const moe_route_layer *layer, uint32_t num_pairs);
static int moer_layer_meets_tile(const moe_route_layer *layer, uint32_t tile);
static int moer_layer_meets_fused(const moe_route_layer *layer, int fused);
/* Whether something is kept for the layer; then into `choices`, which may be NULL. */
static int moer_tuning_find(const moe_route_layer *layer, moer_choice *choices);
/* Keeps it in the context, and in its cache folder. */
static moe_route_status moer_tuning_keep(const moe_route_layer *layer, const moer_choice *choices);
static void moer_tunings_destroy(moe_route_context *context);

struct moe_route_layer {
    moe_route_context *context;
    moer_router router;
    moer_matrix gate_up, down, up; /* up: where it is a matrix of its own, and gate_up the gate alone */
    uint32_t hidden_size, intermediate_size; /* 0: no experts */
    moe_route_dtype dtype, rows_dtype;
    int gated, interleaved, weight_on_input, dependent, fused_combine;
    int cub_maps;             /* more than MOER_SORT_PAIRS pairs go through maps_cub.cu */
    int grouped;              /* more than moer_layer_few_pairs() pairs go through grouped.cu */
    int tuned;                /* choices are what moe_route_layer_tune kept */
    int may_separate;         /* tuning could make down matmul and combine two kernels */
    moer_choice choices[MOER_CHOICES];
    moe_route_activation activation;
    int clamp_kind;           /* of activations.h */
    float alpha, up_beta, up_offset, clamp; /* alpha is SILU's, or SITU's beta; up_beta 0: none */
    uint32_t max_tokens, operations;
    uint32_t max_pairs_small; /* MAX_PAIRS of the kernels for small batches */
    uint32_t down_parts;      /* parts that K is cut into in the down matmul */
    uint32_t num_ranks;
    uint16_t rank_begin[MOER_MAX_RANKS + 1]; /* first physical expert of each rank, then the end */
    /* What the operations launch; NULL where the layer wasn't prepared for it. [0]: up to moer_layer_few_pairs() pairs, [1]: more. */
    const moer_variant *topk, *maps, *maps_cub, *route_layer, *route_given, *route_all, *maps_all;
    const moer_variant *gate_up_activated[2], *down_rows[2], *down_fused, *combine_rows;
    const moer_variant *matmul[2][2]; /* [moe_route_matrix] */
    const moer_variant *gate_up_grouped[MOER_GROUPED_TILES], *down_grouped[MOER_GROUPED_TILES], *combine_grouped;
    const moer_variant *combine, *expand, *dispatch, *dispatch_large, *slots;
    const moer_variant *down_slots[2];
    moer_wanted *wanted; /* while the layer is created */
    const moer_variant *variants[MOER_MAX_LAYER_VARIANTS];
    uint32_t num_variants;
};

/* Where things lie in the workspace of one call, in bytes from its start. */
typedef struct moer_workspace {
    size_t ids, weights, row_to_pair, pair_to_row, row_to_expert, distinct_experts, distinct_offsets, distinct_count;
    size_t expert_offsets, block_counts;                  /* of the CPU; of more than MOER_SMALL_PAIRS pairs */
    size_t h, partial;                                    /* fused layer, and h of expert rows */
    size_t slot_rows;                                     /* expert rows: of each pair */
    size_t dispatch_counts;                               /* of more than MOER_DISPATCH_PAIRS pairs */
    size_t scratch;                                       /* CPU */
    size_t size;
} moer_workspace;

static uint32_t moer_layer_matmul_warps(const moe_route_layer *layer, const moer_matrix *matrix);
static uint32_t moer_layer_max_distinct(const moe_route_layer *layer, uint32_t num_tokens);
static uint32_t moer_layer_few_pairs(const moe_route_layer *layer);
static int moer_layer_has_many_rows(const moe_route_layer *layer, uint32_t num_pairs);
static int moer_layer_runs_grouped(const moe_route_layer *layer, uint32_t num_pairs);
static int moer_grouped_takes_warpgroups(const moe_route_layer *layer, const moer_matrix *matrix);
static uint32_t moer_grouped_outputs(const moe_route_layer *layer, const moer_matrix *matrix);
static uint32_t moer_grouped_columns(const moe_route_layer *layer, const moer_matrix *matrix);
static uint32_t moer_grouped_threads(const moe_route_layer *layer, const moer_matrix *matrix);
static uint32_t moer_dispatch_shares(const moe_route_layer *layer, uint32_t num_tokens, uint32_t blocks); /* of tokens, of a large dispatch with so many blocks for each */
static int moer_layer_sorts_by_cub(const moe_route_layer *layer, uint32_t num_pairs);
static uint32_t moer_cub_maps_threads(const moe_route_layer *layer);
static uint32_t moer_maps_blocks(const moe_route_layer *layer, uint32_t num_pairs); /* shares of the maps' pairs */

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
        moer_dispatch_args dispatch;
        moer_slots_args slots;
    } args;
} moer_launch;

typedef struct moer_sequence {
    uint32_t num_launches;
    moer_launch launches[MOE_ROUTE_MAX_LAUNCHES];
} moer_sequence;

typedef struct moer_routing { /* addresses of one routing */
    moe_route_address logits; /* 0: the ids are given, and no weights are computed */
    moe_route_address token_ids, ids, weights, shared_weights, num_valid_tokens;
    moer_maps_out maps;
    int any_map;
} moer_routing;

/* ---- cpu_*.c: every operation over host addresses ---- */
static void *moer_host(moe_route_address address); /* the address as a pointer */
static size_t moer_dtype_size(moe_route_dtype dtype);
static float moer_load_value(const void *array, size_t index, moe_route_dtype dtype);
static void moer_store_value(void *array, size_t index, moe_route_dtype dtype, float value);
/* Ids and weights of all tokens, and of the shared experts; the latter two may be 0. */
static void moer_cpu_topk(const moer_router *router, const moer_routing *routing, uint32_t num_tokens, uint32_t num_valid);
/* One row as numbers: of GGUF blocks, and of any matrix. */
static void moer_cpu_gguf_row(moe_route_format format, const unsigned char *blocks, uint32_t inner, float *values);
static void moer_cpu_decode_row(const moer_matrix *matrix, size_t expert, size_t row, float *values);
/* dispatch.cu and slots.cu over the same arguments. */
static void moer_cpu_dispatch(const moe_route_layer *layer, const moer_dispatch_args *args);
static void moer_cpu_slots(const moer_router *router, const moer_slots_args *args);
/* Every map that isn't null. */
static void moer_cpu_maps(const moer_router *router, const int32_t *ids, uint32_t num_tokens, uint32_t num_valid, const moer_maps_out *maps);

#endif /* MOER_HOST */
