/*
  api.h: every public declaration, with its documentation. What is here is what a user reads; nothing private belongs
  in it. The text becomes the first part of moe_route.h.
*/
#ifndef MOE_ROUTE_H
#define MOE_ROUTE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_ROUTE_VERSION_MAJOR 0
#define MOE_ROUTE_VERSION_MINOR 1
#define MOE_ROUTE_VERSION_PATCH 0
#define MOE_ROUTE_VERSION "0.1.0"

/* Linkage of the public functions. Define MOE_ROUTE_STATIC before every include to keep them private to one file. */
#ifndef MOE_ROUTE_API
#ifdef MOE_ROUTE_STATIC
#if defined(__GNUC__)
#define MOE_ROUTE_API static __attribute__((unused))
#else
#define MOE_ROUTE_API static
#endif
#else
#define MOE_ROUTE_API extern
#endif
#endif

/* --------------------------------------------------------------------------------------------------------------------
   Conventions

   - Descriptions and argument structs are zero-initialised and filled by name. Zero means the default that the field's
     comment gives; 0 as an address means "not given".
   - Every function that can fail returns a moe_route_status. On failure nothing was launched and nothing was written
     (after ERROR_DRIVER an operation's first launches may have been), and moe_route_message() gives the reason: the
     argument, its value and what is allowed.
   - Addresses are moe_route_address: device addresses (CUdeviceptr, or a cudaMalloc pointer cast to an integer) with a
     GPU context, host addresses with the CPU backend. Matrices are row-major and dense. An address must be aligned to
     its element size; x, y, rows and out also to the largest power of two up to 16 that divides a row's size in bytes.
   - The caller owns all memory that it names. Weights and biases must stay valid for the layer's life, the arguments of a
     call until the work has finished on its stream.
   - After a layer is created no call allocates, synchronises, compiles or touches the disk: each one only launches
     kernels on the given stream, and so may be captured into a CUDA graph.
   - A layer is immutable: any number of threads and streams may use it at once, each with a workspace of its own.
   -------------------------------------------------------------------------------------------------------------------- */

typedef unsigned long long moe_route_address;

/* The same types as CUstream and cudaStream_t, and as CUcontext; NULL is the legacy default stream. */
typedef struct CUstream_st *moe_route_stream;
typedef struct CUctx_st *moe_route_cuda_context;

typedef enum moe_route_status {
    MOE_ROUTE_OK = 0,
    MOE_ROUTE_ERROR_ARGUMENT = 1,    /* a description or an argument is wrong */
    MOE_ROUTE_ERROR_MEMORY = 2,      /* no host memory */
    MOE_ROUTE_ERROR_NO_DEVICE = 3,   /* no NVIDIA driver, no such GPU, or no usable CUDA context */
    MOE_ROUTE_ERROR_UNSUPPORTED = 4, /* the GPU, the driver or a combination of choices isn't supported */
    MOE_ROUTE_ERROR_NO_COMPILER = 5, /* a variant has to be compiled and NVRTC can't be found */
    MOE_ROUTE_ERROR_COMPILE = 6,     /* NVRTC refused a variant; the message holds its log */
    MOE_ROUTE_ERROR_DRIVER = 7,      /* a CUDA driver call failed; the message names it */
    MOE_ROUTE_ERROR_NOT_PREPARED = 8,/* the layer was created without this operation */
    MOE_ROUTE_ERROR_FORKED = 9       /* the context was created before fork(); CUDA and NVRTC can't be used in the child.
                                        It can be destroyed there, and so can its layers */
} moe_route_status;

/* The status as a word, such as "ERROR_ARGUMENT". Never NULL. */
MOE_ROUTE_API const char *moe_route_status_name(moe_route_status status);

/* --------------------------------------------------------------------------------------------------------------------
   Context: one device
   -------------------------------------------------------------------------------------------------------------------- */

typedef enum moe_route_device {
    MOE_ROUTE_DEVICE_DEFAULT = 0, /* the GPU where there is one, otherwise the CPU */
    MOE_ROUTE_DEVICE_GPU = 1,
    MOE_ROUTE_DEVICE_CPU = 2,     /* plain C over host addresses: the reference, and the fallback */
    MOE_ROUTE_DEVICE_COMPILE = 3  /* no device: creating a layer compiles its variants for `compile_target` into the
                                     cache, and keeps them in memory for moe_route_pack_save. Nothing can be run. */
} moe_route_device;

/* Host memory. Both functions or neither (then malloc and free). `alloc` returns NULL when it can't, otherwise memory that is
   aligned as malloc's. Both are called by any thread that uses the context, and while a layer is created by up to seven threads
   that the library starts to compile in: they must be thread-safe. The library holds no lock meanwhile. */
typedef struct moe_route_allocator {
    void *(*alloc)(size_t size, void *user);
    void (*free)(void *memory, void *user);
    void *user;
} moe_route_allocator;

typedef enum moe_route_log_level { MOE_ROUTE_LOG_ERROR = 1, MOE_ROUTE_LOG_WARNING = 2, MOE_ROUTE_LOG_INFO = 3 } moe_route_log_level;

/* Receives every error message, every warning (a cache that can't be used) and a line for each variant compiled or
   loaded. Called by the same threads as the allocator, several at a time. Without it the library is silent. */
typedef struct moe_route_logger {
    void (*log)(moe_route_log_level level, const char *message, void *user);
    void *user;
} moe_route_logger;

typedef struct moe_route_context_desc {
    moe_route_device device;
    int32_t device_ordinal;              /* which GPU, from 0, when cuda_context is NULL */
    moe_route_cuda_context cuda_context; /* NULL: the calling thread's current context (unless device_ordinal is above 0 and
                                            names another GPU), otherwise the GPU's primary context, which is retained until
                                            the context is destroyed */
    uint32_t compile_target;             /* DEVICE_COMPILE: the architecture, 90 for sm_90 */
    const char *cache_dir;               /* folder of the cubin cache. NULL: the environment's MOE_ROUTE_CACHE_DIR, else
                                            XDG_CACHE_HOME/moe_route (LOCALAPPDATA on Windows), else HOME/.cache/moe_route.
                                            "off": memory alone. It must belong to the user and not be writable by others */
    const char *const *cache_read_only_dirs; /* folders that were caches elsewhere, such as in a container image: searched
                                            in this order before cache_dir, never written. They may belong to root, too */
    uint32_t num_cache_read_only_dirs;
    uint64_t cache_limit;                /* bytes that cache_dir may hold before what was used longest ago is removed; what
                                            was used within the last hour stays. 0: 1 GiB */
    int32_t trust_shared_cache;          /* 1: use folders, entries and packs that others own or can write, too. They can
                                            then run their code on the GPU, with this process's memory */
    const char *nvrtc_path;              /* libnvrtc, or the folder that holds it. NULL: MOE_ROUTE_NVRTC_PATH, then a
                                            library already loaded, the toolkit, the system, pip's folders */
    moe_route_allocator allocator;
    moe_route_logger logger;
} moe_route_context_desc;

typedef struct moe_route_context moe_route_context;

/* Creates a context. `desc` may be NULL for all defaults. On failure *context is still set, to an object that only
   answers moe_route_message(), and must be destroyed; it is NULL when memory ran out. */
MOE_ROUTE_API moe_route_status moe_route_context_create(const moe_route_context_desc *desc, moe_route_context **context);

/* Destroys a context (NULL is allowed). Its layers must have been destroyed and its work finished. */
MOE_ROUTE_API void moe_route_context_destroy(moe_route_context *context);

/* Copies the message of the context's last failed call into `text` (cut to `size`, always terminated when size > 0) and
   returns its full length. With several threads it is the last failure of any; the logger gets each. */
MOE_ROUTE_API size_t moe_route_message(const moe_route_context *context, char *text, size_t size);

typedef struct moe_route_context_info {
    moe_route_device device;   /* never DEFAULT; when the creation failed, the one that was tried */
    char name[128];            /* the GPU's name, or "CPU" */
    uint32_t target;           /* architecture that variants are made for, 90 for sm_90; 0 on the CPU */
    uint32_t num_multiprocessors;
    uint32_t driver_version;   /* 13000 for CUDA 13.0; 0 without a driver */
    uint32_t nvrtc_version;    /* likewise; 0 while NVRTC isn't loaded: it is loaded when something must be compiled */
    char nvrtc_path[512];      /* empty while NVRTC isn't loaded */
    char cache_dir[512];       /* empty when the disk isn't used */
} moe_route_context_info;

MOE_ROUTE_API void moe_route_context_get_info(const moe_route_context *context, moe_route_context_info *info);

/* --------------------------------------------------------------------------------------------------------------------
   Router description: logits [T, E] -> ids [T, k], weights [T, k]

   The order of a token's ids is: descending selection score, then ascending expert id. A NaN logit or bias counts as
   -inf, +0 and -0 are equal. Every row has k distinct ids in range and finite weights. An expert whose selection score is
   -inf can't be selected: where fewer than k can be, the row ends with the lowest unused ids and weight 0.
   -------------------------------------------------------------------------------------------------------------------- */

typedef enum moe_route_dtype {
    MOE_ROUTE_DTYPE_DEFAULT = 0, /* what the field's comment says */
    MOE_ROUTE_F32 = 1,
    MOE_ROUTE_F16 = 2,
    MOE_ROUTE_BF16 = 3
} moe_route_dtype;

typedef enum moe_route_score {
    MOE_ROUTE_SCORE_SOFTMAX = 0, /* exp(l[e] - max) / sum over all experts. Several logits of +inf share the weight */
    MOE_ROUTE_SCORE_SIGMOID = 1  /* 1 / (1 + exp(-l[e])), which is 0 in f32 for l[e] below -88.7 */
} moe_route_score;

typedef enum moe_route_weight {
    MOE_ROUTE_WEIGHT_SCORE = 0,            /* the expert's score; a selection bias never enters it */
    MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED = 1  /* softmax of the logits over the selected experts */
} moe_route_weight;

typedef enum moe_route_renormalize {
    MOE_ROUTE_RENORMALIZE_NONE = 0,
    MOE_ROUTE_RENORMALIZE_SUM = 1 /* divide by (sum over the selected + renormalize_epsilon); all 0 where that is 0 */
} moe_route_renormalize;

typedef struct moe_route_router {
    uint32_t num_experts;              /* E, 1 to 2048 */
    uint32_t top_k;                    /* k, 1 to min(E, 64) */
    moe_route_dtype logits_dtype;      /* default F32 */
    moe_route_score score;
    moe_route_address selection_bias;  /* f32 [E] or 0: experts are selected by score + bias. Without it they are selected
                                          by logit, the same order before rounding */
    moe_route_weight weight;
    moe_route_renormalize renormalize;
    float renormalize_epsilon;         /* 0 or positive: 1e-20, 1e-6, ... */
    float scale;                       /* multiplies the weights at the end; 0: 1 */
} moe_route_router;

/* --------------------------------------------------------------------------------------------------------------------
   Experts description: y[t] = sum over j of weights[t, j] * (down[e] @ h + down_bias[e]), e = ids[t, j],
                        h = silu(gate) * up, with gate and up the two parts of gate_up[e] @ x[t] + gate_up_bias[e]
   -------------------------------------------------------------------------------------------------------------------- */

typedef enum moe_route_format {
    MOE_ROUTE_FORMAT_NONE = 0,
    MOE_ROUTE_FORMAT_F32 = 1,
    MOE_ROUTE_FORMAT_F16 = 2,
    MOE_ROUTE_FORMAT_BF16 = 3,
    MOE_ROUTE_FORMAT_INT8 = 4, /* two's complement, one a byte; value = q * scale */
    MOE_ROUTE_FORMAT_INT4 = 5  /* two a byte, the even column in the low half; value = (q - 8) * scale. K must be even */
} moe_route_format;

/* E matrices [N, K], each row holding the K inputs of one output column. */
typedef struct moe_route_weights {
    moe_route_format format;
    moe_route_address data;       /* [E, N, K], as the checkpoint stores them */
    moe_route_address scales;     /* INT8, INT4: [E, N, ceil(K / group_size)] */
    moe_route_dtype scales_dtype; /* default F16 */
    uint32_t group_size;          /* inputs that share a scale: 32, 64 or 128 and a divisor of K; 0: one scale a row */
    moe_route_address bias;       /* [E, N], or 0 */
    moe_route_dtype bias_dtype;   /* default: the dtype of the activations */
} moe_route_weights;

typedef enum moe_route_gate_up_order {
    MOE_ROUTE_GATE_UP_HALVES = 0,     /* rows 0 to I-1 are gate, I to 2I-1 are up */
    MOE_ROUTE_GATE_UP_INTERLEAVED = 1 /* even rows are gate, odd rows are up */
} moe_route_gate_up_order;

typedef struct moe_route_experts {
    uint32_t hidden_size;             /* H, 1 to 65536; 0 in a layer that only routes */
    uint32_t intermediate_size;       /* I, 1 to 65536; 0 in a layer without weights */
    moe_route_dtype dtype;            /* of x, y and the values between the two matmuls; default BF16 */
    moe_route_weights gate_up;        /* N = 2I, K = H. FORMAT_NONE: this layer is used for its down matmul alone */
    moe_route_weights down;           /* N = H, K = I. FORMAT_NONE: likewise for gate_up */
    moe_route_gate_up_order gate_up_order;
    uint32_t first_expert;            /* expert parallelism: the weights hold experts first_expert to ... */
    uint32_t num_local_experts;       /* ... first_expert + num_local_experts - 1; 0: all from first_expert on. Ids outside
                                         contribute nothing */
} moe_route_experts;

/* --------------------------------------------------------------------------------------------------------------------
   Layer: a router and, for all but routing, experts
   -------------------------------------------------------------------------------------------------------------------- */

typedef enum moe_route_operation {
    MOE_ROUTE_OPERATION_LAYER = 1,   /* moe_route_layer_run with logits */
    MOE_ROUTE_OPERATION_ROUTE = 2,   /* moe_route_route */
    MOE_ROUTE_OPERATION_MAPS = 4,    /* moe_route_maps */
    MOE_ROUTE_OPERATION_MATMUL = 8,  /* moe_route_matmul */
    MOE_ROUTE_OPERATION_EXPAND = 16, /* moe_route_expand */
    MOE_ROUTE_OPERATION_COMBINE = 32,/* moe_route_combine */
    MOE_ROUTE_OPERATION_EXPERTS = 64 /* moe_route_layer_run with given ids and weights */
} moe_route_operation;

typedef enum moe_route_switch { MOE_ROUTE_AUTO = 0, MOE_ROUTE_ON = 1, MOE_ROUTE_OFF = 2 } moe_route_switch;

typedef struct moe_route_layer_desc {
    moe_route_router router;
    moe_route_experts experts;
    uint32_t max_tokens;               /* largest T of any call, 1 to 1048576; default 16 */
    uint32_t operations;               /* moe_route_operation values, or-ed: what the layer is prepared for. 0: LAYER with
                                          both expert matrices, MATMUL with one, ROUTE with none */
    moe_route_switch dependent_launch; /* programmatic dependent launch: let a kernel start while the one before it ends.
                                          AUTO: on from SM90 on */
    moe_route_switch fused_combine;    /* down matmul and combine in one kernel. AUTO: on while T * k is at most 512.
                                          ON: required, which bounds max_tokens. OFF: two kernels */
} moe_route_layer_desc;

typedef struct moe_route_layer moe_route_layer;

/* Creates a layer, and compiles or loads every kernel variant that it can need up to max_tokens. *layer is NULL on
   failure. */
MOE_ROUTE_API moe_route_status moe_route_layer_create(moe_route_context *context, const moe_route_layer_desc *desc,
                                                      moe_route_layer **layer);

/* Destroys a layer (NULL is allowed). Its work must have finished. */
MOE_ROUTE_API void moe_route_layer_destroy(moe_route_layer *layer);

/* Bytes of workspace that any of the layer's operations needs for `num_tokens` tokens. It grows with num_tokens. The
   workspace must be aligned to 256 bytes; its content is of no interest before or after a call. */
MOE_ROUTE_API moe_route_status moe_route_layer_workspace_size(const moe_route_layer *layer, uint32_t num_tokens,
                                                              size_t *size);

/* Fused layer: logits -> ids and weights -> experts -> y. */
typedef struct moe_route_layer_args {
    uint32_t num_tokens;                /* T, 0 to max_tokens */
    moe_route_address logits;           /* [T, E]. 0: ids and weights are given */
    moe_route_address ids;              /* int32 [T, k]. With logits an optional output, otherwise an input: ids may repeat,
                                           those out of range contribute nothing */
    moe_route_address weights;          /* f32 [T, k], likewise */
    moe_route_address x;                /* [T, H] */
    moe_route_address y;                /* [T, H]; may not overlap x */
    moe_route_address num_valid_tokens; /* int32 [1], read by the kernels, or 0. Rows from there on are padding: id -1,
                                           weight 0, y 0 */
    moe_route_address workspace;
    size_t workspace_size;
    moe_route_stream stream;
} moe_route_layer_args;

MOE_ROUTE_API moe_route_status moe_route_layer_run(const moe_route_layer *layer, const moe_route_layer_args *args);

/* Expert maps: the stable sort by expert of the pairs p = t * k + j, for the local experts (E_local of them, numbered
   from 0). "Row" is a position in that order; R <= T * k rows exist, the pairs of local experts. Each output is optional.
   The two distinct arrays and their count describe the experts that at least one pair chose, in ascending order.
   The block-aligned outputs give every expert a multiple of block_size rows: A rows in all, A = *aligned_rows, at most
   moe_route_aligned_capacity(); all the capacity is written. */
typedef struct moe_route_expert_maps {
    moe_route_address expert_offsets;     /* int32 [E_local + 1]: first row of each expert, then R */
    moe_route_address row_to_pair;        /* int32 [T * k]; -1 from row R on */
    moe_route_address pair_to_row;        /* int32 [T * k]; -1 where the expert isn't local */
    moe_route_address row_to_expert;      /* int32 [T * k]; -1 from row R on */
    moe_route_address distinct_experts;   /* int32 [min(T * k, E_local)]; only the first *distinct_count are written */
    moe_route_address distinct_offsets;   /* int32 [min(T * k, E_local) + 1]: first row of each, then R; likewise */
    moe_route_address distinct_count;     /* int32 [1] */
    uint32_t block_size;                  /* 0: no block-aligned outputs */
    moe_route_address aligned_row_to_pair;/* int32 [capacity]; T * k in padding */
    moe_route_address block_to_expert;    /* int32 [capacity / block_size]; -1 from block A / block_size on */
    moe_route_address aligned_rows;       /* int32 [1] */
} moe_route_expert_maps;

/* Rows to allocate for aligned_row_to_pair, a multiple of block_size; 0 when block_size is 0 or the size overflows. */
MOE_ROUTE_API size_t moe_route_aligned_capacity(const moe_route_layer *layer, uint32_t num_tokens, uint32_t block_size);

/* Top-k, and the maps where any is asked for. One launch while T * k is at most 512. */
typedef struct moe_route_route_args {
    uint32_t num_tokens;
    moe_route_address logits;           /* [T, E] */
    moe_route_address ids;              /* int32 [T, k] */
    moe_route_address weights;          /* f32 [T, k], or 0 */
    moe_route_expert_maps maps;
    moe_route_address num_valid_tokens; /* as in moe_route_layer_args */
    moe_route_address workspace;        /* needed when maps are asked for and T * k is above 512 */
    size_t workspace_size;
    moe_route_stream stream;
} moe_route_route_args;

MOE_ROUTE_API moe_route_status moe_route_route(const moe_route_layer *layer, const moe_route_route_args *args);

/* The maps of given ids. */
typedef struct moe_route_maps_args {
    uint32_t num_tokens;
    moe_route_address ids;              /* int32 [T, k] */
    moe_route_expert_maps maps;
    moe_route_address num_valid_tokens;
    moe_route_address workspace;
    size_t workspace_size;
    moe_route_stream stream;
} moe_route_maps_args;

MOE_ROUTE_API moe_route_status moe_route_maps(const moe_route_layer *layer, const moe_route_maps_args *args);

typedef enum moe_route_matrix { MOE_ROUTE_MATRIX_GATE_UP = 0, MOE_ROUTE_MATRIX_DOWN = 1 } moe_route_matrix;

/* One expert matmul: out[t, j] = W[ids[t, j]] @ x[t] (or x[t, j]) + bias, what ggml calls MUL_MAT_ID. Rows of padding
   and of ids that aren't local are set to 0. */
typedef struct moe_route_matmul_args {
    uint32_t num_tokens;
    moe_route_matrix matrix;
    int32_t x_per_pair;                 /* 0: x is [T, K]. 1: x is [T, k, K] */
    moe_route_address ids;              /* int32 [T, k] */
    moe_route_address x;                /* of the layer's dtype */
    moe_route_address out;              /* [T, k, N] of the layer's dtype */
    moe_route_address num_valid_tokens;
    moe_route_address workspace;
    size_t workspace_size;
    moe_route_stream stream;
} moe_route_matmul_args;

MOE_ROUTE_API moe_route_status moe_route_matmul(const moe_route_layer *layer, const moe_route_matmul_args *args);

/* Expand: rows[r] = x[row_to_pair[r] / k]; rows from R on are set to 0. */
typedef struct moe_route_expand_args {
    uint32_t num_tokens;
    moe_route_address x;           /* [T, H] */
    moe_route_address row_to_pair; /* int32 [T * k], from the maps */
    moe_route_address rows;        /* [T * k, H] */
    moe_route_stream stream;
} moe_route_expand_args;

MOE_ROUTE_API moe_route_status moe_route_expand(const moe_route_layer *layer, const moe_route_expand_args *args);

/* Combine (finalize): y[t] = sum over j of weights[t, j] * rows[pair_to_row[t, j]], in the order of j, accumulated in
   f32; a pair whose row is outside 0 to T * k - 1 is left out. */
typedef struct moe_route_combine_args {
    uint32_t num_tokens;
    moe_route_address rows;        /* [T * k, H] */
    moe_route_address pair_to_row; /* int32 [T * k], from the maps. 0: rows are in pair order */
    moe_route_address weights;     /* f32 [T, k] */
    moe_route_address y;           /* [T, H] */
    moe_route_stream stream;
} moe_route_combine_args;

MOE_ROUTE_API moe_route_status moe_route_combine(const moe_route_layer *layer, const moe_route_combine_args *args);

/* --------------------------------------------------------------------------------------------------------------------
   What a layer will do, and what it was made of
   -------------------------------------------------------------------------------------------------------------------- */

typedef struct moe_route_launch_info {
    char kernel[32];       /* the kernel, such as "route" or "maps_scan" (of the family "maps") */
    char variant[384];     /* its compile-time constants, as NAME=VALUE words */
    uint32_t grid[3];      /* blocks */
    uint32_t block;        /* threads a block */
    uint32_t static_shared_bytes;
    int32_t dependent;     /* launched with programmatic dependent launch */
    uint64_t weight_bytes; /* weights and scales it reads at most: every chosen expert distinct */
} moe_route_launch_info;

#define MOE_ROUTE_MAX_LAUNCHES 8

typedef struct moe_route_plan {
    uint32_t num_launches; /* 0 on the CPU backend */
    moe_route_launch_info launches[MOE_ROUTE_MAX_LAUNCHES];
    size_t workspace_size;
} moe_route_plan;

/* The launches of one operation at `num_tokens` tokens: made by the same code that launches. */
MOE_ROUTE_API moe_route_status moe_route_layer_explain(const moe_route_layer *layer, moe_route_operation operation,
                                                       uint32_t num_tokens, moe_route_plan *plan);

/* The plan as text, a line a launch; copied and cut as moe_route_message() does. */
MOE_ROUTE_API size_t moe_route_plan_text(const moe_route_plan *plan, char *text, size_t size);

typedef enum moe_route_origin {
    MOE_ROUTE_ORIGIN_COMPILED = 1, /* by NVRTC, in this process */
    MOE_ROUTE_ORIGIN_CACHE = 2,    /* read from the cubin cache */
    MOE_ROUTE_ORIGIN_PACK = 3      /* read from a pack */
} moe_route_origin;

typedef struct moe_route_variant_info {
    char kernel[32];
    char variant[384];
    moe_route_origin origin; /* how this process first got it; later layers share it */
    double milliseconds;     /* what that took: compiling, or reading; and loading into the driver */
    size_t cubin_size;
} moe_route_variant_info;

/* How many variants the layer uses, and the description of one (0 to that number - 1; others are refused). */
MOE_ROUTE_API uint32_t moe_route_layer_num_variants(const moe_route_layer *layer);
MOE_ROUTE_API moe_route_status moe_route_layer_variant(const moe_route_layer *layer, uint32_t index,
                                                       moe_route_variant_info *info);

/* --------------------------------------------------------------------------------------------------------------------
   Kept variants: the cache on disk, and packs

   A variant that a layer needs is looked for in the context's packs, then in cache_read_only_dirs, then in cache_dir, and
   compiled when none has it; then it is written into cache_dir. Nothing that is wrong with a file or a folder is an error:
   it costs a compilation, and at most one line in the log. With the environment's MOE_ROUTE_CACHE=refresh folders are not
   read, and what cache_dir holds is replaced as it is needed; packs are still used.
   -------------------------------------------------------------------------------------------------------------------- */

typedef struct moe_route_statistics { /* of one context, since its creation; variants that are in memory aren't counted again */
    uint64_t pack_hits;
    uint64_t cache_hits;           /* in cache_dir or a read-only folder */
    uint64_t cache_misses;         /* no folder had a sound entry; nothing is counted without folders */
    uint64_t rejects;              /* entries that were there and weren't used: damaged, foreign, refused by the driver */
    uint64_t cache_writes;
    uint64_t cache_write_failures; /* the first of them ends writing */
    uint64_t compiles;             /* that succeeded */
    double compile_milliseconds;   /* in NVRTC, added up over all threads; without loading NVRTC */
} moe_route_statistics;

MOE_ROUTE_API void moe_route_context_get_statistics(const moe_route_context *context, moe_route_statistics *statistics);

typedef struct moe_route_cache_entry {
    const char *path;         /* valid during the call, like all texts here */
    int32_t sound;            /* 0: damaged, or not allowed by its owner or mode. It is never used; the fields below but the
                                 last two are then empty */
    int32_t current;          /* 1: made from the kernels of this version of the library; others are never used by it */
    const char *kernel;       /* kernel family */
    const char *variant;      /* its compile-time constants */
    uint32_t target;          /* architecture */
    uint32_t nvrtc_version, driver_version; /* that made it, 13000 for 13.0; 0: unknown */
    uint64_t size;            /* bytes of the file */
    int64_t seconds_unused;   /* since it was written or last read, to the hour */
} moe_route_cache_entry;

typedef void (*moe_route_cache_visitor)(const moe_route_cache_entry *entry, void *user);

/* Calls `visitor` for each entry of cache_dir, in no particular order. It may not use the cache. */
MOE_ROUTE_API moe_route_status moe_route_cache_list(moe_route_context *context, moe_route_cache_visitor visitor, void *user);

/* Checks every entry of cache_dir as before its use, and removes those that fail. Either count may be NULL. */
MOE_ROUTE_API moe_route_status moe_route_cache_verify(moe_route_context *context, uint64_t *num_sound, uint64_t *num_removed);

/* Removes every entry of cache_dir, and left-over temporary files. The count may be NULL. */
MOE_ROUTE_API moe_route_status moe_route_cache_clear(moe_route_context *context, uint64_t *num_removed);

/* Writes a pack: one file with every variant of every layer that was created in these contexts, which are of DEVICE_COMPILE
   and usually of one architecture each. It takes neither a GPU nor a driver, and replaces the file in one step. A failure's
   message is in contexts[0], or in the context that it concerns. */
MOE_ROUTE_API moe_route_status moe_route_pack_save(moe_route_context *const *contexts, uint32_t num_contexts, const char *path);

/* Adds a pack to a context, before its layers are created: from a file, which may belong to root, too, and which is read as
   a whole; or in memory, which must stay as it is for the context's life. A layer whose variants are all in packs touches
   neither the cache nor NVRTC. A pack that isn't sound as a whole is refused with ERROR_ARGUMENT, and the context goes on
   without it; each entry is checked when it is used. */
MOE_ROUTE_API moe_route_status moe_route_pack_load(moe_route_context *context, const char *path);
MOE_ROUTE_API moe_route_status moe_route_pack_use(moe_route_context *context, const void *data, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* MOE_ROUTE_H */
