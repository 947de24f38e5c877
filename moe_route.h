/*
  moe_route.h: the Mixture-of-Experts layer at decode time on NVIDIA GPUs, from router logits to the combined output.
  One header, no nvcc: the CUDA kernels are carried as text, compiled for the exact model by NVRTC on first use, kept on
  disk, and launched through the driver API. SM80 to SM120; a CPU backend with the same API runs everywhere.

  Version 0.1.0. SPDX-License-Identifier: MIT (the text stands at the end of this file).

  Use: in ONE source file

      #define MOE_ROUTE_IMPLEMENTATION
      #include "moe_route.h"

  and a plain #include "moe_route.h" wherever else it is used. C99, C11 or C++11 and newer; no CUDA header is needed, and
  cuda.h or cuda_runtime.h beside it do no harm. Link with -lm, and with -ldl -lpthread where the C library keeps these
  apart (glibc before 2.34).

  This file is made from the project's src/ and kernels_src/; change those, not this.
*/

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
     its element size; x, y, rows, out, shared_output and residual also to the largest power of two up to 16 that divides a row's
     size in bytes.
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
    MOE_ROUTE_ERROR_NO_COMPILER = 5, /* a variant has to be compiled and NVRTC, or CUB where it needs that, can't be found */
    MOE_ROUTE_ERROR_COMPILE = 6,     /* NVRTC refused a variant; the message holds its log */
    MOE_ROUTE_ERROR_DRIVER = 7,      /* a CUDA driver call failed; the message names it */
    MOE_ROUTE_ERROR_NOT_PREPARED = 8,/* the layer was created without this operation, or has to be tuned before */
    MOE_ROUTE_ERROR_FORKED = 9       /* the context was created before fork(); CUDA and NVRTC can't be used in the child.
                                        It can be destroyed there, and so can its layers */
} moe_route_status;

/* The status as a word, such as "ERROR_ARGUMENT". Never NULL. */
MOE_ROUTE_API const char *moe_route_status_name(moe_route_status status);

/* The version of the implementation: MOE_ROUTE_VERSION of the header that it was compiled from. A program that loads it as a
   shared library compares the two. */
MOE_ROUTE_API const char *moe_route_version(void);

/* --------------------------------------------------------------------------------------------------------------------
   Context: one device
   -------------------------------------------------------------------------------------------------------------------- */

typedef enum moe_route_device {
    MOE_ROUTE_DEVICE_DEFAULT = 0, /* the GPU where there is one, otherwise the CPU */
    MOE_ROUTE_DEVICE_GPU = 1,
    MOE_ROUTE_DEVICE_CPU = 2,     /* plain C over host addresses: the reference, and the fallback */
    MOE_ROUTE_DEVICE_COMPILE = 3  /* no device: creating a layer compiles its variants for `compile_target` into the
                                     cache, and keeps them in memory for moe_route_pack_save. Nothing can be run. Addresses
                                     aren't read, but a variant depends on which are given, and for data and scales on their
                                     alignment up to 16 bytes: let them be as where the layer will run */
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
   Router description: logits [T, E + S] -> ids [T, k], weights [T, k], shared weights [T, S]

   For one token, with every choice made:
     l[e]       = logits[e] + logit_bias[e], then softcap * tanh(l[e] / softcap)
     score[e]   = score(l[e])
     order[e]   = score[e] + selection_bias[e], dropped where a group rule says so
     ids        = the k experts of largest order[e], or given ids, or a row of a table
     w[j]       = weight(ids[j]), renormalised over the k (and the S shared experts)
     weights[j] = w[j] * scale * expert_scale[ids[j]] / k

   The order of a token's ids is: descending selection score, then ascending expert id. A NaN logit or bias counts as
   -inf, +0 and -0 are equal. Where ids are selected, every row has k distinct ids in range; weights are always finite. An expert whose selection score is
   -inf can't be selected: where fewer than k can be, the row ends with the lowest unused ids and weight 0. Without bias
   and groups, and with a built-in score, experts are ordered by l[e]: the same order before rounding.
   -------------------------------------------------------------------------------------------------------------------- */

typedef enum moe_route_dtype {
    MOE_ROUTE_DTYPE_DEFAULT = 0, /* what the field's comment says */
    MOE_ROUTE_F32 = 1,
    MOE_ROUTE_F16 = 2,
    MOE_ROUTE_BF16 = 3
} moe_route_dtype;

typedef enum moe_route_score {
    MOE_ROUTE_SCORE_SOFTMAX = 0,      /* exp(l[e] - max) / sum over all experts. Several logits of +inf share the weight */
    MOE_ROUTE_SCORE_SIGMOID = 1,      /* 1 / (1 + exp(-l[e])), which is 0 in f32 for l[e] below -88.7 */
    MOE_ROUTE_SCORE_SQRT_SOFTPLUS = 2,/* sqrt(log(1 + exp(l[e]))) (DeepSeek-V4) */
    MOE_ROUTE_SCORE_IDENTITY = 3,     /* l[e] */
    MOE_ROUTE_SCORE_SPARSE_MIXER = 4, /* SparseMixer (Phi-3.5-MoE), in inference: slot j takes the largest l among the experts
                                         that are left, m; its weight is its softmax among those of them for which
                                         (m - l[e]) / max(|l[e]|, m) is at most 2 * jitter */
    MOE_ROUTE_SCORE_CUSTOM = 5        /* score_expression, score_function */
} moe_route_score;

/* A score of one's own on the CPU backend. */
typedef float (*moe_route_score_function)(float x, void *user);

typedef enum moe_route_group_rule { /* experts in num_groups groups of neighbours */
    MOE_ROUTE_GROUPS_NONE = 0,
    MOE_ROUTE_GROUPS_MAX = 1,      /* only the topk_groups groups whose best expert has the largest order stay */
    MOE_ROUTE_GROUPS_TOP2_SUM = 2, /* the same by the sum of the best two */
    MOE_ROUTE_GROUPS_QUOTA = 3     /* every group gives its best k / num_groups experts */
} moe_route_group_rule;

typedef enum moe_route_dropped { /* the order of experts in dropped groups: it matters where biased scores are negative */
    MOE_ROUTE_DROPPED_MINUS_INFINITY = 0,
    MOE_ROUTE_DROPPED_ZERO = 1,
    MOE_ROUTE_DROPPED_ZERO_SCORE = 2 /* their scores are 0, too, as weights (DeepSeek-V2). Without a selection bias, and with
                                        scores that aren't negative */
} moe_route_dropped;

typedef enum moe_route_ids_source {
    MOE_ROUTE_IDS_SELECTED = 0,
    MOE_ROUTE_IDS_GIVEN = 1, /* by the call, in `ids`; only weights are computed. Ids may repeat, each one counts; those out
                                of range have weight 0 */
    MOE_ROUTE_IDS_TABLE = 2  /* a row of id_table (hash routing), chosen by the call's token_ids; otherwise likewise. Ids out
                                of range become -1 */
} moe_route_ids_source;

typedef enum moe_route_weight {
    MOE_ROUTE_WEIGHT_SCORE = 0,            /* the expert's score; a selection bias never enters it */
    MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED = 1, /* softmax of l over the selected experts */
    MOE_ROUTE_WEIGHT_SIGMOID_SELECTED = 2, /* sigmoid of l */
    MOE_ROUTE_WEIGHT_SIGMOID_SHARE = 3     /* sigmoid of l over the sum of those of the selected and shared experts, by
                                              logarithms: also where the sigmoids are 0 in f32 (Inkling) */
} moe_route_weight;

typedef enum moe_route_renormalize {
    MOE_ROUTE_RENORMALIZE_NONE = 0,
    MOE_ROUTE_RENORMALIZE_SUM = 1,     /* divide by (sum + renormalize_epsilon); all 0 where that is 0 */
    MOE_ROUTE_RENORMALIZE_MAX_SUM = 2, /* divide by max(sum, renormalize_epsilon) */
    MOE_ROUTE_RENORMALIZE_L2 = 3       /* divide by (square root of the sum of squares + renormalize_epsilon) */
} moe_route_renormalize;

typedef struct moe_route_router {
    uint32_t num_experts;              /* E, 1 to 2048: every id that can be selected, identity and skip experts included */
    uint32_t top_k;                    /* k, 1 to min(E, 64) */
    uint32_t num_shared_experts;       /* S, 0 to 32: experts that every token uses, with logits after those of the E, whose
                                          weights are part of the renormalisation and a second output (Inkling). Not
                                          with SOFTMAX or SPARSE_MIXER scores as weights */
    uint32_t num_skip_experts;         /* the last so many of the E do nothing: their weight is 0 after renormalising (Zaya) */
    moe_route_dtype logits_dtype;      /* default F32. Whatever it is, the arithmetic is f32 */
    moe_route_dtype weights_dtype;     /* of the weights, whether they are output or given; default F32 */
    moe_route_address logit_bias;      /* f32 [E + S] or 0 */
    float softcap;                     /* 0: none */
    moe_route_score score;
    const char *score_expression;      /* SCORE_CUSTOM on a GPU: a CUDA expression of `float x` (l[e]) with a float as its
                                          value, such as "x > 0.0f ? x * x : 0.0f"; up to 160 characters, without ; { } " ' #
                                          and backslash. NaN counts as -inf. Not kept: it may be freed after creation */
    moe_route_score_function score_function; /* SCORE_CUSTOM on the CPU backend */
    void *score_user;                  /* second argument of score_function */
    float jitter;                      /* SCORE_SPARSE_MIXER: 0 or more */
    moe_route_address selection_bias;  /* f32 [E] or 0 */
    moe_route_group_rule group_rule;
    uint32_t num_groups;               /* with a group rule: 1 to 64, a divisor of E (QUOTA: of k, too) */
    uint32_t topk_groups;              /* MAX, TOP2_SUM: 1 to num_groups */
    moe_route_dropped dropped;         /* MAX, TOP2_SUM */
    moe_route_ids_source ids;
    moe_route_address id_table;        /* IDS_TABLE: int32 [id_table_rows, k] */
    uint32_t id_table_rows;            /* IDS_TABLE: the vocabulary's size, at least 1 */
    moe_route_weight weight;
    moe_route_renormalize renormalize;
    float renormalize_epsilon;         /* 0 or positive: 1e-20, 1e-6, ... */
    float scale;                       /* multiplies the weights; 0: 1 */
    moe_route_address expert_scale;    /* f32 [E] or 0: multiplies the weights of each expert (Gemma-4) */
    int32_t divide_by_top_k;           /* 1: the weights are divided by k at the end */
} moe_route_router;

/* --------------------------------------------------------------------------------------------------------------------
   Experts description: y[t] = sum over j of weights[t, j] * (down[e] @ h + down_bias[e]), e = ids[t, j],
                        h = act(gate) * (up + up_offset), with gate and up the two parts of gate_up[e] @ x[t] + gate_up_bias[e],
                        or h = act(up) in experts without gate
   h is computed in f32 and rounded to the layer's dtype.
   -------------------------------------------------------------------------------------------------------------------- */

/* How weights are stored. q is a weight's code; a scale belongs to a group of group_size consecutive inputs of a row, or to a
   whole row, and the last group of a row may be shorter. In the 4-bit formats the even input of two has the low half of a
   byte. Nothing is repacked: the kernels read these bytes. GGUF blocks are those of ggml's files, whole blocks a row, at any
   address; their formats are MOE_ROUTE_FORMAT_GGUF plus the type number that the file gives for the tensor. */
typedef enum moe_route_format {
    MOE_ROUTE_FORMAT_NONE = 0,
    MOE_ROUTE_FORMAT_F32 = 1,
    MOE_ROUTE_FORMAT_F16 = 2,
    MOE_ROUTE_FORMAT_BF16 = 3,
    MOE_ROUTE_FORMAT_INT8 = 4,  /* a byte each; value = (q - zero point) * scale */
    MOE_ROUTE_FORMAT_INT4 = 5,  /* two a byte; value = (q - zero point) * scale. K must be even */
    MOE_ROUTE_FORMAT_FP8 = 6,   /* E4M3 (the variant without infinities), a byte each; value = q * scale */
    MOE_ROUTE_FORMAT_MXFP4 = 7, /* E2M1, two a byte; a scale byte 2^(e - 127) for 32 inputs. K must be a multiple of 32 */
    MOE_ROUTE_FORMAT_NVFP4 = 8, /* E2M1, two a byte; an E4M3 scale for 16 inputs; value = q * scale * global scale. K must be
                                   a multiple of 16 */
    MOE_ROUTE_FORMAT_GGUF = 100,
    MOE_ROUTE_FORMAT_GGUF_Q4_0 = 102, /* K must be a multiple of 32 */
    MOE_ROUTE_FORMAT_GGUF_Q4_1 = 103,
    MOE_ROUTE_FORMAT_GGUF_Q5_0 = 106,
    MOE_ROUTE_FORMAT_GGUF_Q5_1 = 107,
    MOE_ROUTE_FORMAT_GGUF_Q8_0 = 108,
    MOE_ROUTE_FORMAT_GGUF_Q2_K = 110, /* K must be a multiple of 256, as for the others named _K and for IQ4_XS */
    MOE_ROUTE_FORMAT_GGUF_Q3_K = 111,
    MOE_ROUTE_FORMAT_GGUF_Q4_K = 112,
    MOE_ROUTE_FORMAT_GGUF_Q5_K = 113,
    MOE_ROUTE_FORMAT_GGUF_Q6_K = 114,
    MOE_ROUTE_FORMAT_GGUF_IQ4_NL = 120, /* 32 */
    MOE_ROUTE_FORMAT_GGUF_IQ4_XS = 123,
    MOE_ROUTE_FORMAT_GGUF_MXFP4 = 139   /* 32 */
} moe_route_format;

/* How INT8 and INT4 codes, and their zero points, stand for integers. */
typedef enum moe_route_codes {
    MOE_ROUTE_CODES_DEFAULT = 0, /* INT8: SIGNED; INT4: UNSIGNED */
    MOE_ROUTE_CODES_UNSIGNED = 1,/* 0 to 255 or 15; without zero_points the zero point is 128 or 8 */
    MOE_ROUTE_CODES_SIGNED = 2   /* two's complement; without zero_points the zero point is 0 */
} moe_route_codes;

typedef enum moe_route_global_scales {
    MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT = 0, /* [E] */
    MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR = 1, /* [1] */
    MOE_ROUTE_GLOBAL_SCALES_PER_PART = 2    /* [E, 2], for an expert's gate and its up rows; gate_up alone */
} moe_route_global_scales;

/* E matrices [N, K], each row holding the K inputs of one output column. G = ceil(K / group_size), 1 where group_size is 0.

   Where checkpoints store such matrices, and what to fill in:
   - ONNX Runtime's QMoE, 4 bits: format INT4; data [E, N, K / 2] bytes, scales [E, N, G], zero points [E, N, ceil(G / 2)] as
     they are. 8 bits: INT8 with codes UNSIGNED. Byte 0x7a holds 10 for the even input and 7 for the odd one: 2 and -1 times
     the scale, or 4 and 1 with a zero point of 6.
   - compressed-tensors, "pack-quantized", 4 bits: format INT4; weight_packed, int32 [N, K / 8] an expert, is the same bytes on
     a little-endian machine: word 0x98765432 holds 2 to 9 in order, -6 to 1 times the scale. Its zero points are packed
     along N: unpack them into [N, ceil(G / 2)]. "int-quantized", 8 bits: INT8, byte 0xff is -1 times the scale. NVFP4: pass the
     reciprocal of weight_global_scale as the global scale.
   - GPTQ: qweight is int32 [K / 8, N]. As [N, K / 8], which is a transposition of words, it is INT4: word 0x98765432 holds 2
     to 9, the zero points taken from qzeros with 1 added where the checkpoint is of version 1. A reordering of inputs (g_idx)
     isn't supported.
   - GPT-OSS: format MXFP4; blocks [E, N, K / 32, 16] are data, scales [E, N, K / 32] are scales, as they are. Byte 0x52 holds
     code 2, which is 1, and code 5, which is 3.
   - GGUF: ffn_gate_exps, ffn_up_exps and ffn_down_exps (experts.gate_up, up and down), or ffn_gate_up_exps, as they lie in the
     file; its dimensions are listed innermost first, [K, N, E]. Its F32, F16 and BF16 tensors are formats F32, F16 and BF16.
   - DeepSeek's FP8: format FP8, group_size and group_rows 128, scales (weight_scale_inv) f32 [E, ceil(N / 128), ceil(K / 128)].
     Blocks are counted over all N rows: gate and up make one matrix only where I is a multiple of 128; otherwise give them as
     experts.gate_up and experts.up. */
typedef struct moe_route_weights {
    moe_route_format format;
    moe_route_address data;       /* [E, N, K], as the checkpoint stores them */
    moe_route_address scales;     /* INT8, INT4: [E, N, G]. FP8: [E, ceil(N / group_rows), G]. MXFP4, NVFP4: bytes [E, N, G].
                                     The others have none */
    moe_route_dtype scales_dtype; /* INT8, INT4, FP8; default F16, with FP8 F32 */
    uint32_t group_size;          /* INT8, INT4: 16, 32, 64 or 128, or 0 for one scale a row. FP8: 128 or 0. MXFP4: 32.
                                     NVFP4: 16. The last two may be left 0 */
    uint32_t group_rows;          /* rows that share a scale: 1 (default), or 128 with FP8 and a group_size of 128 */
    moe_route_codes codes;        /* INT8, INT4 */
    moe_route_address zero_points;/* INT8: bytes [E, N, G], or 0. INT4: bytes [E, N, ceil(G / 2)], that of an even group in the
                                     low half, or 0 */
    moe_route_address global_scales; /* NVFP4: f32, or 0 for 1 */
    moe_route_global_scales global_scales_shape;
    moe_route_address bias;       /* [E, N], or 0 */
    moe_route_dtype bias_dtype;   /* default: the dtype of the activations */
} moe_route_weights;

typedef enum moe_route_gate_up_order {
    MOE_ROUTE_GATE_UP_HALVES = 0,     /* rows 0 to I-1 are gate, I to 2I-1 are up */
    MOE_ROUTE_GATE_UP_INTERLEAVED = 1,/* even rows are gate, odd rows are up */
    MOE_ROUTE_GATE_UP_NO_GATE = 2     /* rows 0 to I-1 are up */
} moe_route_gate_up_order;

/* act(z), computed in f32: the same bits on every device, within 4 units of 2^-24 |z|; RELU2 is rounded once. A NaN
   stays one. */
typedef enum moe_route_activation {
    MOE_ROUTE_ACTIVATION_SILU = 0,      /* z / (1 + exp(-alpha * z)) */
    MOE_ROUTE_ACTIVATION_GELU_TANH = 1, /* z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3))) */
    MOE_ROUTE_ACTIVATION_GELU_ERF = 2,  /* z / 2 * (1 + erf(z / sqrt(2))) */
    MOE_ROUTE_ACTIVATION_RELU2 = 3,     /* max(z, 0)^2 */
    MOE_ROUTE_ACTIVATION_SITU = 4       /* situ_beta * tanh(z / situ_beta) / (1 + exp(-z)), and up becomes
                                           situ_up_beta * tanh(up / situ_up_beta) before up_offset is added (Kimi-K3) */
} moe_route_activation;

typedef enum moe_route_clamp_position {
    MOE_ROUTE_CLAMP_BEFORE = 0, /* act(min(z, clamp)); up is kept within -clamp and clamp before up_offset is added */
    MOE_ROUTE_CLAMP_AFTER = 1   /* min(act(z), clamp); up likewise */
} moe_route_clamp_position;

typedef struct moe_route_experts {
    uint32_t hidden_size;             /* H, 1 to 65536; 0 in a layer that only routes */
    uint32_t intermediate_size;       /* I, 1 to 65536; 0 in a layer without weights */
    moe_route_dtype dtype;            /* of x, y and the values between the two matmuls; default BF16 */
    moe_route_weights gate_up;        /* N = 2I, or I without gate; K = H. FORMAT_NONE, without data: this layer is used for its
                                         down matmul alone */
    moe_route_weights down;           /* N = H, K = I. FORMAT_NONE: likewise for gate_up */
    moe_route_weights up;             /* FORMAT_NONE: gate_up holds gate and up. Otherwise gate_up is the gate alone and this is
                                         up, both N = I and alike in all but their addresses, as in GGUF files; not with
                                         operation MATMUL */
    moe_route_gate_up_order gate_up_order;
    moe_route_activation activation;
    float activation_alpha;           /* SILU's alpha; 0: 1. GPT-OSS: 1.702 */
    float situ_beta, situ_up_beta;    /* SITU's, 0 or positive; 0: 1, and no change to up. Kimi-K3: 4 and 25 */
    float up_offset;                  /* GPT-OSS: 1 */
    float clamp;                      /* limit of the clamps, positive; 0: none. Without gate there is no up to clamp */
    moe_route_clamp_position clamp_position;
    int32_t weight_on_input;          /* 1: weights[t, j] multiplies the expert's input x[t] instead of its output. The f32
                                         gate_up[e] @ x[t] is multiplied, before its bias: weight * x itself isn't rounded */
    uint32_t first_expert;            /* expert parallelism: the weights hold experts first_expert to ... */
    uint32_t num_local_experts;       /* ... first_expert + num_local_experts - 1; 0: all from first_expert on. Ids outside
                                         contribute nothing */
    uint32_t num_identity_experts;    /* Z: the last Z of the router's experts before those that skip have no weights and return
                                         their input: each adds weights[t, j] * x[t] to y[t], in slot j's place, whatever
                                         weight_on_input is. They aren't local experts, have no place in maps and -1 in an
                                         expert_map. With expert parallelism they are added where first_expert is 0 */
    moe_route_address expert_map;     /* int32 [E, expert_map_columns] or 0: the physical experts that hold each expert, as
                                         many as there are before a -1; token t uses number t modulo that count. The weights,
                                         first_expert and num_local_experts, and the maps then speak of physical experts */
    uint32_t expert_map_columns;      /* with expert_map: 1 to 64; default 1 */
    uint32_t num_physical_experts;    /* with expert_map: 1 to 2048; default as many as have weights. Without it: the ids that this
                                         layer is given are physical experts already, 0 to num_physical_experts - 1, as
                                         moe_route_dispatch() sends them (and expert_load counts those below E); not with
                                         operations LAYER, ROUTE and DISPATCH */
    uint32_t num_ranks;               /* operation DISPATCH: the ranks that hold the physical experts, in ranges; 1 to 256 */
    const uint32_t *rank_experts;     /* [num_ranks]: how many each of them holds, 0 or more, all together. NULL: as
                                         moe_route_rank_range() says. Read while the layer is created, not kept */
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
    MOE_ROUTE_OPERATION_EXPERTS = 64,/* moe_route_layer_run with given ids and weights */
    MOE_ROUTE_OPERATION_DISPATCH = 128,   /* moe_route_dispatch */
    MOE_ROUTE_OPERATION_EXPERT_ROWS = 256 /* moe_route_expert_rows */
} moe_route_operation;

typedef enum moe_route_switch { MOE_ROUTE_AUTO = 0, MOE_ROUTE_ON = 1, MOE_ROUTE_OFF = 2 } moe_route_switch;

/* What a model's layer has, so that no layer is made without it by oversight: creating it is refused while the address is 0.
   moe_route_preset() fills this in. Clear a value to do without, as where a checkpoint lacks the tensor. */
typedef enum moe_route_need {
    MOE_ROUTE_NEED_SELECTION_BIAS = 1, /* router.selection_bias: e_score_correction_bias, expert_bias, balancing_biases, ... */
    MOE_ROUTE_NEED_LOGIT_BIAS = 2,     /* router.logit_bias: the bias of the router's linear layer */
    MOE_ROUTE_NEED_EXPERT_SCALE = 4,   /* router.expert_scale: per_expert_scale */
    MOE_ROUTE_NEED_ID_TABLE = 8,       /* router.id_table: tid2eid */
    MOE_ROUTE_NEED_GATE_UP_BIAS = 16,  /* experts.gate_up.bias, where experts.gate_up is given */
    MOE_ROUTE_NEED_DOWN_BIAS = 32,     /* experts.down.bias, likewise */
    MOE_ROUTE_NEED_OTHER_EXPERTS = 64  /* the model's experts compute something that a moe_route_experts can't say: the layer
                                          may only route, expert matrices are refused */
} moe_route_need;

typedef struct moe_route_layer_desc {
    moe_route_router router;
    moe_route_experts experts;
    uint32_t needs;                    /* moe_route_need values, or-ed */
    uint32_t max_tokens;               /* largest T of any call, 1 to 1048576; default 16 */
    uint32_t operations;               /* moe_route_operation values, or-ed: what the layer is prepared for. 0: LAYER with
                                          both expert matrices, MATMUL with one, ROUTE with none */
    moe_route_switch dependent_launch; /* programmatic dependent launch: let a kernel start while the one before it ends.
                                          AUTO: on from SM90 on */
    moe_route_switch fused_combine;    /* down matmul and combine in one kernel. AUTO: on while T * k is at most 512, but for
                                          quantized matrices of more than 640 inputs from SM90 on, where two kernels are
                                          faster. ON: required, which bounds max_tokens. OFF: two kernels. The K inputs may be
                                          added up in other parts with ON than otherwise */
    moe_route_dtype rows_dtype;        /* of the rows that COMBINE reads and EXPERT_ROWS writes; default the experts' dtype */
    uint32_t sums_of_max_tokens;       /* the down matmul adds up its K inputs in parts, and how many depends on max_tokens. Here
                                          layers of different max_tokens agree on one, and then on every bit. 0: max_tokens.
                                          Where that leaves no room for the fused combine, AUTO means OFF */
    moe_route_switch tuned;            /* kernels by what moe_route_layer_tune kept. AUTO: where something is kept. ON: on a GPU the
                                          layer is refused without. OFF: by built-in rules. No output depends on it */
    uint32_t grouped_rows;             /* rows of a tile of the kernels for many rows an expert: 32, 64 or 128. 0: by
                                          what was tuned, else by the average rows of an expert. No output depends on it */
    moe_route_switch cub_maps;         /* maps of more than 8192 pairs by CUB's block primitives: the same maps, to the bit. AUTO: off, since
                                          it isn't faster. ON: required; where a kernel has to be compiled and CUB's headers aren't found,
                                          creating the layer fails with ERROR_NO_COMPILER and says what to do. More than 768 local experts
                                          are sorted as with OFF */
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

/* Fused layer: logits -> ids and weights -> experts -> y. A token's y has the same bits in every batch in which experts have few rows: T * k
   up to 512, and up to 12 times the local experts (twice where weights are F16 or BF16; 26 times from SM90 on, where
   moe_route_layer_explain tells matmul_bulk for gate_up); and the same bits in every larger one. On a
   GPU and with f16 or bf16 activations, larger batches round each quantized weight to the activations'
   dtype (relative 2^-12 or 2^-9; in f16 absolute 2^-25 where that is more) and each slot's weighted row to it before the sum. */
typedef struct moe_route_layer_args {
    uint32_t num_tokens;                /* T, 0 to max_tokens */
    moe_route_address logits;           /* [T, E + S]. 0: ids and weights are given */
    moe_route_address ids;              /* int32 [T, k]. With logits an optional output (with IDS_GIVEN an input), otherwise
                                           an input: ids may repeat, those out of range contribute nothing */
    moe_route_address weights;          /* [T, k] of weights_dtype, likewise */
    moe_route_address shared_weights;   /* [T, S] of weights_dtype, or 0: an output with logits */
    moe_route_address token_ids;        /* int32 [T]: with IDS_TABLE, the row of each token */
    moe_route_address expert_load;      /* as in moe_route_expert_maps, or 0 */
    moe_route_address x;                /* [T, H] */
    moe_route_address y;                /* [T, H]; may not overlap x */
    moe_route_address shared_output;    /* [T, H] or 0, a shared expert's. After the sum over slots y[t] gets */
    moe_route_address shared_output_weights; /* f32 [T] or 0: 1.       + shared_output_weights[t] * shared_output[t] */
    moe_route_address residual;         /* [T, H] or 0.                + residual[t]
                                           All in f32, in this order; then y[t] is rounded once. Both may be y itself. With
                                           expert parallelism give them on one rank */
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
    moe_route_address expert_load;        /* int64 [E]: the pairs of each expert (before expert_map, local or not) are added */
} moe_route_expert_maps;

/* Rows to allocate for aligned_row_to_pair, a multiple of block_size; 0 when block_size is 0 or the size overflows. */
MOE_ROUTE_API size_t moe_route_aligned_capacity(const moe_route_layer *layer, uint32_t num_tokens, uint32_t block_size);

/* Top-k, and the maps where any is asked for. One launch while T * k is at most 512. */
typedef struct moe_route_route_args {
    uint32_t num_tokens;
    moe_route_address logits;           /* [T, E + S] */
    moe_route_address ids;              /* int32 [T, k]; with IDS_GIVEN an input */
    moe_route_address weights;          /* [T, k] of weights_dtype, or 0 */
    moe_route_address shared_weights;   /* [T, S] of weights_dtype, or 0 */
    moe_route_address token_ids;        /* int32 [T]: with IDS_TABLE, the row of each token */
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

/* One expert matmul: out[t, j] = W[ids[t, j]] @ x[t] (or x[t, j]) + bias, what ggml calls MUL_MAT_ID: no activation,
   no router weight. Rows of padding and of ids that aren't local are set to 0. */
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
   f32; a pair whose row is outside 0 to num_rows - 1 is left out, or adds weights[t, j] * x[t] for an identity expert. Then
   shared expert and residual as in moe_route_layer_args. */
typedef struct moe_route_combine_args {
    uint32_t num_tokens;
    moe_route_address rows;        /* [num_rows, H] of rows_dtype */
    uint32_t num_rows;             /* 0: T * k */
    moe_route_address pair_to_row; /* int32 [T * k], from the maps or from moe_route_dispatch(). 0: rows are in pair order */
    moe_route_address weights;     /* [T, k] of the router's weights_dtype. Where the rows have them already only identity
                                      experts need them */
    int32_t weighted_rows;         /* 1: they have, and so with weight_on_input; each row is added as it is */
    moe_route_address y;           /* [T, H] */
    moe_route_address ids;         /* int32 [T, k] and */
    moe_route_address x;           /* [T, H], needed and read where the layer adds identity experts */
    moe_route_address shared_output; /* [T, H] or 0 */
    moe_route_address shared_output_weights; /* f32 [T] or 0 */
    moe_route_address residual;    /* [T, H] or 0 */
    moe_route_address num_valid_tokens; /* as in moe_route_layer_args: y is 0 from there on */
    moe_route_stream stream;
} moe_route_combine_args;

MOE_ROUTE_API moe_route_status moe_route_combine(const moe_route_layer *layer, const moe_route_combine_args *args);

/* --------------------------------------------------------------------------------------------------------------------
   Expert parallelism: what stands between the router, the exchange of tokens, and the experts of N ranks

   A rank routes its own tokens, packs what each other rank needs (moe_route_dispatch), and exchanges it, which is the
   caller's (NCCL's all-to-all, say). For the tokens that it received it runs its experts, in one of two ways, and sends
   the results back the same way; combining them in slot order needs no atomics:

     slot rows   moe_route_expert_rows() gives a row for each slot, moe_route_combine() adds them with pair_to_slot_row.
                 With rows_dtype F32 the bits of y are those of one GPU that has all experts, in calls with few rows an expert,
                 whatever the number of ranks and of tokens, where the layers agree on sums_of_max_tokens. (Larger calls of
                 that one GPU round as moe_route_layer_args says, unless activations are f32; expert rows never do.) With
                 16-bit rows they are still the same for every number of ranks, and y, before it is rounded, is within 2^-8
                 (BF16) or 2^-11 (F16) of the sum of |weights[t, j] * rows[j]| of that
     sums        moe_route_layer_run() with ids and weights gives a row for each token, the sum of its slots here;
                 moe_route_combine() adds them with pair_to_row and weighted_rows. Less to send; the order of the sum then
                 depends on which rank has which expert: within as much, and k * 2^-23 more for the f32 additions, where
                 a rank's call has few rows an expert

   docs/expert_parallelism.md shows the whole; examples/expert_parallel.c is a program.
   -------------------------------------------------------------------------------------------------------------------- */

/* The physical experts of a rank where experts.rank_experts isn't given: *first to *first + *count - 1. As even as can be,
   the first ranks hold one more. *count is 0 for a rank without experts, and where rank is not below num_ranks. */
MOE_ROUTE_API void moe_route_rank_range(uint32_t num_physical_experts, uint32_t num_ranks, uint32_t rank, uint32_t *first,
                                        uint32_t *count);

/* Dispatch: ids and weights of T tokens -> what to send to each of N ranks, in one launch while T * k is at most 2048, and in two
   beyond.

   A token is a row of every rank that holds an expert of it, once, in the order of tokens; a slot row is a slot that such
   a rank serves, in the order of pairs. Ids out of range, of identity and skip experts, and padding go nowhere. Each
   output is optional.

   Exact sizes (capacity 0): the rows of rank r are offsets[r][0] to offsets[r + 1][0] - 1, without gaps; there are at most
   T * min(k, N), and T * k slot rows. Whoever sends reads the counts first.
   Fixed sizes (capacity C): they begin at r * C, and the N * C rows can be sent as they are, also from a graph. Rows that
   don't exist have id -1 and weight 0, row_to_token -1, and nothing is written to their x. Slot rows begin at
   r * slot_capacity. What doesn't fit isn't sent and contributes nothing: counts tell (with C = T and slot_capacity 0
   everything fits). */
typedef struct moe_route_dispatch_args {
    uint32_t num_tokens;
    moe_route_address ids;              /* int32 [T, k] */
    moe_route_address weights;          /* [T, k] of weights_dtype, where row_weights is given */
    moe_route_address x;                /* [T, H], where rows is given */
    moe_route_address num_valid_tokens; /* as in moe_route_layer_args */
    uint32_t capacity;                  /* C, 0 or more; 0: exact sizes */
    uint32_t slot_capacity;             /* with C: slot rows of a rank, at most C * k; 0: C * k */
    moe_route_address counts;           /* int32 [N, 2]: rows and slot rows of each rank, with those that don't fit */
    moe_route_address offsets;          /* int32 [N + 1, 2]: first row and first slot row of each rank, then the end */
    moe_route_address rows;             /* [N * C or T * min(k, N), H]: x of each row */
    moe_route_address row_ids;          /* int32 [N * C or T * min(k, N), k]: physical experts; -1 in slots of other ranks */
    moe_route_address row_weights;      /* [N * C or T * min(k, N), k] of weights_dtype; 0 in slots of other ranks */
    moe_route_address row_to_token;     /* int32 [N * C or T * min(k, N)] */
    moe_route_address pair_to_row;      /* int32 [T * k]: the row of the token at the rank of the pair, for the first slot that has
                                           it; -1 for its other slots and for pairs that weren't sent */
    moe_route_address pair_to_slot_row; /* int32 [T * k]: -1 for pairs that weren't sent */
    moe_route_address workspace;        /* needed when T * k is above 2048 */
    size_t workspace_size;
    moe_route_stream stream;
} moe_route_dispatch_args;

MOE_ROUTE_API moe_route_status moe_route_dispatch(const moe_route_layer *layer, const moe_route_dispatch_args *args);

/* Expert rows: the layer for given ids, before the weights and without the sum over slots: a row down[e] @ h + down_bias[e]
   for each pair of a local expert, in the order of pairs. They are the slot rows of the rank that the tokens came from. A row
   has the same bits in every batch, of whatever size. */
typedef struct moe_route_expert_rows_args {
    uint32_t num_tokens;
    moe_route_address ids;              /* int32 [T, k] */
    moe_route_address weights;          /* [T, k] of weights_dtype, needed with weight_on_input */
    moe_route_address x;                /* [T, H] */
    moe_route_address rows;             /* [num_rows, H] of rows_dtype; rows without a pair aren't written */
    uint32_t num_rows;                  /* at most 2147483647. Pairs beyond aren't written */
    uint32_t num_sources;               /* S, a divisor of T and num_rows; 0: 1. Tokens s * T / S and on came from source s, and their
                                           rows begin at s * num_rows / S: S is N with fixed sizes, and 1 with exact ones */
    moe_route_address num_valid_tokens; /* as in moe_route_layer_args */
    moe_route_address workspace;
    size_t workspace_size;
    moe_route_stream stream;
} moe_route_expert_rows_args;

MOE_ROUTE_API moe_route_status moe_route_expert_rows(const moe_route_layer *layer, const moe_route_expert_rows_args *args);

/* --------------------------------------------------------------------------------------------------------------------
   Presets: a layer's description from the model's config.json
   -------------------------------------------------------------------------------------------------------------------- */

/* A model in the words of its config.json (of its text_config, where it has one). 0 means "not given". Numbers in which the
   checkpoints of a type differ are needed; a number that the type's router doesn't have is refused. */
typedef struct moe_route_model {
    const char *model_type;         /* of the model or of its text part: "qwen3_moe", "llama4", "llama4_text", ... */
    uint32_t num_experts;           /* needed: num_experts, num_local_experts, n_routed_experts, moe_num_experts */
    uint32_t top_k;                 /* needed: num_experts_per_tok, num_experts_per_token, moe_topk, moe_k, top_k_experts */
    uint32_t num_groups;            /* n_group, num_expert_group, router_n_groups: needed where the type has groups; A.X-K2 and
                                       DeepSeek-V2: 0 where it is null or topk_method "greedy" */
    uint32_t topk_groups;           /* topk_group: needed with more than one group, unless the type takes a quota from each */
    uint32_t num_shared_experts;    /* n_shared_experts of Inkling, whose router has logits for them. Elsewhere ignored: shared
                                       experts are the caller's */
    uint32_t num_zero_experts;      /* zero_expert_num of LongCat: identity experts after the num_experts */
    moe_route_switch norm_topk_prob;/* norm_topk_prob, moe_renormalize. AUTO: what transformers assumes without the key, which
                                       for qwen3_moe is OFF, though its models were trained with ON; a GGUF file of it hasn't the key */
    float scale;                    /* routed_scaling_factor, route_scale, router_scaling_factor, moe_router_scaling_factor,
                                       moe_routed_scaling_factor: needed where the type has one. Inkling: times the checkpoint's
                                       global_scale */
    float softcap;                  /* moe_router_logit_softcapping of Laguna; Grok: 0 for 30 */
    float jitter;                   /* router_jitter_noise of Phi-3.5-MoE, 0 for 0.01. Elsewhere it is for training: ignored */
    float norm_min;                 /* moe_norm_min of ERNIE 4.5; 0 for 1e-12 */
    float swiglu_limit;             /* where the experts clamp; 0: the type's usual limit. Step-3.7: swiglu_limits of the layer */
    const char *scoring_func;       /* scoring_func, expert_selection_fn. NULL: the type's */
    int32_t hash_layer;             /* DeepSeek-V4: 1 in layers of type "hash_moe", which take ids from a table */
    uint32_t vocab_size;            /* with hash_layer: the table's rows */
    uint32_t hidden_size;           /* of the experts' input (moe_latent_size, where there is one). Both 0: the layer routes */
    uint32_t intermediate_size;     /* moe_intermediate_size, or intermediate_size where there is none */
} moe_route_model;

/* Zero-initialises *desc and fills its router, its experts' sizes and activation, and `needs`. The caller adds addresses and
   formats of weights, dtypes, max_tokens and operations. Factors that a model applies to the sum of its experts are part of
   the router's scale, so that y is the model's, before shared experts. Logits are what the model's router makes of its input:
   norms and factors before (Gemma-4, Muse), and a router of several layers (Zaya), are the caller's.
   An unknown type is ERROR_ARGUMENT, with the most similar names; one that no description can express ERROR_UNSUPPORTED, with
   the reason. *desc is then all zero. */
MOE_ROUTE_API moe_route_status moe_route_preset(moe_route_context *context, const moe_route_model *model,
                                                moe_route_layer_desc *desc);

/* The model types that have a preset, from 0 in alphabetical order; NULL at the end. */
MOE_ROUTE_API const char *moe_route_preset_name(uint32_t index);

/* --------------------------------------------------------------------------------------------------------------------
   What a layer will do, and what it was made of
   -------------------------------------------------------------------------------------------------------------------- */

typedef struct moe_route_launch_info {
    char kernel[32];       /* the kernel, such as "route" or "maps_scatter" (of the family "maps") */
    char variant[768];     /* its compile-time constants, as NAME=VALUE words */
    uint32_t grid[3];      /* blocks */
    uint32_t block;        /* threads a block */
    uint32_t shared_bytes; /* of a block */
    int32_t dependent;     /* launched with programmatic dependent launch */
    uint64_t weight_bytes; /* weights, scales and zero points it reads at most: every chosen expert distinct */
} moe_route_launch_info;

#define MOE_ROUTE_MAX_LAUNCHES 8

typedef struct moe_route_plan {
    uint32_t num_launches; /* 0 on the CPU backend */
    int32_t tuned;         /* by what moe_route_layer_tune kept */
    moe_route_launch_info launches[MOE_ROUTE_MAX_LAUNCHES];
    size_t workspace_size;
} moe_route_plan;

/* The launches of one operation at `num_tokens` tokens: made by the same code that launches. ROUTE is explained with maps,
   MATMUL for gate_up, or for down where there is no gate_up. */
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
    char variant[768];
    moe_route_origin origin; /* how this process first got it; later layers share it */
    double milliseconds;     /* what that took: compiling, or reading; and loading into the driver */
    size_t cubin_size;
} moe_route_variant_info;

/* How many variants a layer of this description will use, 0 on the CPU backend: for showing how far its creation has come, which
   logs a line for each that isn't in memory yet. The description is checked as when the layer is created; nothing is compiled. */
MOE_ROUTE_API moe_route_status moe_route_layer_count_variants(moe_route_context *context, const moe_route_layer_desc *desc,
                                                              uint32_t *count);

/* How many variants the layer uses, and the description of one (0 to that number - 1; others are refused). */
MOE_ROUTE_API uint32_t moe_route_layer_num_variants(const moe_route_layer *layer);
MOE_ROUTE_API moe_route_status moe_route_layer_variant(const moe_route_layer *layer, uint32_t index,
                                                       moe_route_variant_info *info);

/* --------------------------------------------------------------------------------------------------------------------
   Tuning: some steps can be done by more than one kernel, with the same bits, and which is fastest depends on the GPU, the
   layer and the number of tokens. moe_route_layer_tune() times them on the context's GPU with the description's own weights and
   random tokens, for 1, 2, 4, ... tokens up to max_tokens (at most 16384; beyond, what is best there holds), and keeps what it
   finds: in the context, and in cache_dir beside the kernels. Layers that are created after that use it, in this process and
   in later ones, where the GPU and the layer are of the same kind: experts, top_k, sizes, formats, dtypes, max_tokens,
   dependent_launch and which biases there are, wherever the weights lie. It doesn't measure again what is kept. Without it,
   built-in rules decide. No size of a workspace depends on what is kept.
   -------------------------------------------------------------------------------------------------------------------- */

typedef struct moe_route_tune_step { /* one measurement */
    uint32_t step, num_steps; /* 1 to num_steps */
    uint32_t num_tokens;
    const char *choice;       /* such as "as without tuning" or "tiles of 64 rows"; valid during the call */
    double microseconds;      /* of the experts' part of the layer, one call of a graph of several */
} moe_route_tune_step;

typedef void (*moe_route_tune_progress)(const moe_route_tune_step *step, void *user);

typedef struct moe_route_tune_args {
    moe_route_address workspace;      /* device memory, aligned to 256 bytes; moe_route_layer_tune_workspace_size() bytes */
    size_t workspace_size;
    moe_route_tune_progress progress; /* called after each measurement by the thread that tunes, or NULL. It may not tune */
    void *user;
    int32_t again;                    /* 1: measure also where something is kept, and replace it */
} moe_route_tune_args;

/* Takes seconds: it compiles what is compared, and measures; and device memory beyond the layer's workspace for x, y and ids of
   max_tokens. The weights must be in place and the GPU otherwise idle; streams of other threads may not be under capture in
   global mode. It waits for its own work, on a stream of its own. The description needs both expert matrices. On failure
   nothing is kept. On the CPU backend there is nothing to choose: it returns OK. */
MOE_ROUTE_API moe_route_status moe_route_layer_tune(moe_route_context *context, const moe_route_layer_desc *desc,
                                                    const moe_route_tune_args *args);
MOE_ROUTE_API moe_route_status moe_route_layer_tune_workspace_size(moe_route_context *context, const moe_route_layer_desc *desc,
                                                                   size_t *size);

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
    const char *kernel;       /* kernel family; "tuning": what moe_route_layer_tune found */
    const char *variant;      /* its compile-time constants; of a tuning what it is for */
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
   a whole; or in memory, which must stay as it is for the context's life. A layer whose variants are all in packs needs
   neither the cache, where it only looks for what was tuned, nor NVRTC. A pack that isn't sound as a whole is refused with
   ERROR_ARGUMENT, and the context goes on without it; each entry is checked when it is used. */
MOE_ROUTE_API moe_route_status moe_route_pack_load(moe_route_context *context, const char *path);
MOE_ROUTE_API moe_route_status moe_route_pack_use(moe_route_context *context, const void *data, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* MOE_ROUTE_H */

#if defined(MOE_ROUTE_IMPLEMENTATION) && !defined(MOE_ROUTE_IMPLEMENTED)
#define MOE_ROUTE_IMPLEMENTED

/* ---- src/internal.h ---- */
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


/* ---- kernels_src/args.h ---- */
/*
  args.h: the argument struct of every kernel, one definition for the host C and for the kernels. A kernel takes one such
  struct by value. Addresses are 8 bytes on both sides and come first, so that the layouts agree on every host.
  Shapes are those of moe_route.h: T tokens, k slots a token, E experts, S shared ones, E_local local ones, pair p = t * k + j, row r.
*/
#ifdef MOER_HOST
#define MOER_ADDRESS(type) moe_route_address
#else
#define MOER_ADDRESS(type) type *
#endif

/* Outputs of the maps; null where not wanted. */
typedef struct moer_maps_out {
    MOER_ADDRESS(int) expert_offsets;      /* [E_local + 1] */
    MOER_ADDRESS(int) row_to_pair;         /* [T * k] */
    MOER_ADDRESS(int) pair_to_row;         /* [T * k] */
    MOER_ADDRESS(int) row_to_expert;       /* [T * k] */
    MOER_ADDRESS(int) distinct_experts;    /* [min(T * k, E_local)] */
    MOER_ADDRESS(int) distinct_offsets;    /* [min(T * k, E_local) + 1] */
    MOER_ADDRESS(int) distinct_count;      /* [1] */
    MOER_ADDRESS(int) aligned_row_to_pair; /* [aligned_capacity] */
    MOER_ADDRESS(int) block_to_expert;     /* [aligned_capacity / block_size] */
    MOER_ADDRESS(int) aligned_rows;        /* [1] */
    MOER_ADDRESS(long long) expert_load;   /* [E] */
    unsigned int block_size;               /* 0: no aligned outputs */
    unsigned int aligned_capacity;         /* a multiple of block_size */
} moer_maps_out;

/* route.cu and topk.cu */
typedef struct moer_route_args {
    MOER_ADDRESS(const void) logits;          /* [T, E + S] */
    MOER_ADDRESS(const float) logit_bias;     /* [E + S] */
    MOER_ADDRESS(const float) selection_bias; /* [E] */
    MOER_ADDRESS(const float) expert_scale;   /* [E] */
    MOER_ADDRESS(const int) id_table;         /* [id_table_rows, k] */
    MOER_ADDRESS(const int) token_ids;        /* [T] */
    MOER_ADDRESS(int) ids;                    /* [T, k]; an input where SELECT is 0 or IDS is 1 */
    MOER_ADDRESS(void) weights;               /* [T, k] or null */
    MOER_ADDRESS(void) shared_weights;        /* [T, S] or null */
    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */
    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */
    moer_maps_out maps;
    unsigned int num_tokens;
    unsigned int id_table_rows;
    float softcap;
    float jitter;
    float renormalize_epsilon;
    float scale;
} moer_route_args;

/* maps.cu and maps_cub.cu: the sort of any number of pairs */
typedef struct moer_maps_args {
    MOER_ADDRESS(const int) ids;              /* [T, k] */
    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */
    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */
    MOER_ADDRESS(int) block_counts;           /* sort.h's counts of each block's share */
    moer_maps_out maps;
    unsigned int num_pairs;                   /* T * k */
    unsigned int num_blocks;
} moer_maps_args;

/* The matrices [N, K] of the local experts, as moe_route_weights describes them; null where the format has none. */
typedef struct moer_weights_args {
    MOER_ADDRESS(const void) data;
    MOER_ADDRESS(const void) scales;
    MOER_ADDRESS(const void) zero_points;
    MOER_ADDRESS(const float) global_scales;
} moer_weights_args;

/* matmul.cu: one expert weight matrix times the rows that chose the expert */
typedef struct moer_matmul_args {
    moer_weights_args weights;
    moer_weights_args up_weights;              /* [E_local, N, K] where UP_APART is 1 */
    MOER_ADDRESS(const void) bias;             /* [E_local, N] or null */
    MOER_ADDRESS(const void) up_bias;          /* likewise */
    MOER_ADDRESS(const void) x;                /* [T, K], or [T * k, K] in pair or row order */
    MOER_ADDRESS(void) out;                    /* [T * k, N or I] in row or pair order */
    MOER_ADDRESS(const int) distinct_experts;
    MOER_ADDRESS(const int) distinct_offsets;
    MOER_ADDRESS(const int) distinct_count;
    MOER_ADDRESS(const int) row_to_pair;       /* [T * k] */
    MOER_ADDRESS(const int) pair_to_row;       /* [T * k], to find the pairs without a row; null where they don't matter */
    MOER_ADDRESS(const int) pair_to_slot_row;  /* [T * k], where out is indexed by it; -1: not to be written */
    MOER_ADDRESS(const void) router_weights;   /* [T, k], where they go on the input */
    MOER_ADDRESS(const void) next_data;        /* of the matrix that the next kernel multiplies, to be brought into L2 */
    MOER_ADDRESS(const void) next_scales;
    unsigned long long next_bytes, next_scale_bytes; /* of one expert */
    unsigned int next_experts;                 /* at most so many distinct ones; 0: nothing */
    unsigned int num_pairs;
    unsigned int max_distinct;                 /* experts: the room that distinct_experts has */
    unsigned int x_per_pair;                   /* read where X_INDEX is 1: x is indexed by pair, not by token */
    float alpha, up_beta, up_offset, clamp;    /* of the activation; alpha may be SITU's beta */
} moer_matmul_args;

/* What down.cu and combine.cu add beside the rows of experts (epilogue.h); null where there is none. */
typedef struct moer_epilogue {
    MOER_ADDRESS(const void) x;                /* [T, H] and */
    MOER_ADDRESS(const int) ids;               /* [T, k], for identity experts */
    MOER_ADDRESS(const int) num_valid_tokens;  /* [1]; the y of tokens from there on is 0 */
    MOER_ADDRESS(const void) shared;           /* [T, H] */
    MOER_ADDRESS(const float) shared_weights;  /* [T], or null: 1 */
    MOER_ADDRESS(const void) residual;         /* [T, H] */
} moer_epilogue;

/* down.cu: the down matmul of a small batch, combined */
typedef struct moer_down_args {
    moer_weights_args weights;                 /* N = H, K = I */
    MOER_ADDRESS(const void) bias;             /* [E_local, H] or null */
    MOER_ADDRESS(const void) h;                /* [T * k, I] in row order */
    MOER_ADDRESS(const void) router_weights;   /* [T, k] */
    MOER_ADDRESS(void) y;                      /* [T, H] */
    MOER_ADDRESS(const int) distinct_experts;
    MOER_ADDRESS(const int) distinct_offsets;
    MOER_ADDRESS(const int) distinct_count;
    MOER_ADDRESS(const int) pair_to_row;       /* [T * k] */
    MOER_ADDRESS(const int) row_to_expert;     /* [T * k] */
    moer_epilogue epilogue;
    unsigned int num_tokens, max_distinct;     /* the arrays of distinct experts have room for so many */
} moer_down_args;

/* expand.cu */
typedef struct moer_expand_args {
    MOER_ADDRESS(const void) x;         /* [T, H] */
    MOER_ADDRESS(const int) row_to_pair;/* [T * k] */
    MOER_ADDRESS(void) rows;            /* [T * k, H] */
    unsigned int num_pairs;
} moer_expand_args;

/* combine.cu */
typedef struct moer_combine_args {
    MOER_ADDRESS(const void) rows;            /* [num_rows, H] */
    MOER_ADDRESS(const int) pair_to_row;      /* [T * k], or null: rows are in pair order */
    MOER_ADDRESS(const void) router_weights;  /* [T, k]; null where nothing needs them */
    MOER_ADDRESS(void) y;                     /* [T, H] */
    moer_epilogue epilogue;
    unsigned int num_tokens;
    unsigned int num_rows;
    unsigned int weighted_rows;               /* 1: the rows have the router's weight already */
} moer_combine_args;

/* dispatch.cu and dispatch_large.cu */
#define MOER_MAX_RANKS 256
typedef struct moer_dispatch_args {
    MOER_ADDRESS(const int) ids;              /* [T, k] */
    MOER_ADDRESS(const void) weights;         /* [T, k] */
    MOER_ADDRESS(const void) x;               /* [T, H] */
    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */
    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */
    MOER_ADDRESS(int) block_counts;           /* [shares, N, 2]: dispatch_large.cu's, rows and slot rows of a share for each rank */
    MOER_ADDRESS(int) counts;                 /* [N, 2]; this and what follows is null where not wanted */
    MOER_ADDRESS(int) offsets;                /* [N + 1, 2] */
    MOER_ADDRESS(void) rows;                  /* [rows, H] */
    MOER_ADDRESS(int) row_ids;                /* [rows, k] */
    MOER_ADDRESS(void) row_weights;           /* [rows, k] */
    MOER_ADDRESS(int) row_to_token;           /* [rows] */
    MOER_ADDRESS(int) pair_to_row;            /* [T * k] */
    MOER_ADDRESS(int) pair_to_slot_row;       /* [T * k] */
    unsigned int num_tokens;
    unsigned int capacity, slot_capacity;     /* of a rank; 0: exact sizes */
    unsigned short rank_begin[MOER_MAX_RANKS + 4]; /* [N + 1]: first physical expert of each rank, then the end */
} moer_dispatch_args;

/* slots.cu */
typedef struct moer_slots_args {
    MOER_ADDRESS(const int) ids;              /* [T, k] */
    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */
    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */
    MOER_ADDRESS(int) pair_to_slot_row;       /* [T * k] */
    unsigned int num_tokens;
    unsigned int source_pairs;                /* of each source: T * k / S */
    unsigned int source_rows;                 /* that each source has room for */
} moer_slots_args;

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


/* ---- src/platform.h ---- */
/*
  platform.h: what platform.c, platform_posix.c and platform_windows.c offer the others: threads, the clock, the
  environment, shared libraries, the locale, files. Included by internal.h; part of the implementation's one translation
  unit. Nothing that knows CUDA, caches or experts belongs here.

  Texts are bytes on POSIX systems, and UTF-8 on Windows.
*/
#ifndef MOER_PLATFORM
#define MOER_PLATFORM 1

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
typedef HANDLE moer_thread_handle;
typedef HANDLE moer_file;
#define MOER_NO_FILE INVALID_HANDLE_VALUE
typedef struct moer_folder { /* being listed */
    HANDLE search;
    WIN32_FIND_DATAW entry;
    char name[4 * MAX_PATH];
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
typedef pthread_t moer_thread_handle;
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

typedef struct moer_thread {
    moer_thread_handle handle;
    void (*function)(void *user);
    void *user;
} moer_thread;
static int moer_thread_start(moer_thread *thread, void (*function)(void *user), void *user); /* *thread stays until the join */
static void moer_thread_join(moer_thread *thread);
static uint32_t moer_processors(void); /* at least 1 */

static double moer_milliseconds(void); /* of a clock that only serves for differences */
static long moer_process_id(void);
/* The value, copied into `value`, and cut where it doesn't fit: a path of that length is refused everywhere. NULL when it is
   unset or empty, and always when the process runs with more rights than its user (setuid). */
static const char *moer_environment(const char *name, char *value, size_t size);

typedef void (*moer_function)(void); /* any function's address; cast to its type before use */
/* NULL when it can't be loaded. Never closed. On Windows a bare name means the system's folder or the program's, and what
   an absolute path's library needs is looked for beside it, too; never in the current folder or along PATH. */
static void *moer_library_open(const char *path);
static void *moer_library_loaded(const char *name); /* NULL unless this process has it loaded already */
static moer_function moer_library_symbol(void *library, const char *name);
static void moer_library_error(char *text, size_t size); /* why this thread's last moer_library_open failed */
/* Folder of the library that a function lies in, without a closing slash; 0 when unknown. */
static int moer_library_folder(moer_function function, char *folder, size_t size);

/* Makes "C" this thread's locale, and puts back what it was, for the process, too. NVRTC 12 changes both, and reads numbers by
   them. */
static void moer_locale_begin(moer_locale *locale);
static void moer_locale_end(const moer_locale *locale);

static int moer_home_folder(char *folder, size_t size);       /* of the user that the process acts as; 0: none */
static int moer_executable_folder(char *folder, size_t size); /* without a closing slash; 0 when unknown */
static int moer_path_is_separator(char character);
static int moer_path_is_absolute(const char *path);
static int moer_path_absolute(const char *path, char *absolute, size_t size); /* 0 when it doesn't fit */
static int moer_path_parent(char *path); /* cuts the last component off, in place; 0 when there is none */
static int moer_text_set(char *buffer, size_t size, const char *text); /* copies; 0 when it doesn't fit */
static uint64_t moer_random(void); /* for names that must not collide; not a secret */

typedef enum moer_path_kind { MOER_PATH_OTHER = 0, MOER_PATH_FILE = 1, MOER_PATH_FOLDER = 2 } moer_path_kind;
static moer_path_kind moer_path_inspect(const char *path); /* follows symbolic links; OTHER when there is nothing, too */
static void moer_system_error(char *text, size_t size);    /* the reason of this thread's last failed file operation */
static int moer_system_error_is_absence(void);             /* it is that there is no such file or folder */

typedef enum moer_owner { MOER_OWNER_OTHER = 0, MOER_OWNER_SELF = 1, MOER_OWNER_SYSTEM = 2 } moer_owner;
typedef struct moer_file_info {
    moer_path_kind kind;
    uint64_t size;
    int64_t modified;       /* seconds, by the file system's clock */
    moer_owner owner;       /* SELF: the user that the process acts as; SYSTEM: root, when that is another */
    int writable_by_others; /* by anyone but the owner and the system's own accounts */
} moer_file_info;

/* Every operation by which the cache and packs read, change and list files, so that tests can make each of them fail.
   int results are 1 or 0; a failure leaves its reason for moer_system_error. Interrupted calls are repeated within. */
typedef struct moer_files {
    int64_t (*now)(void);                             /* seconds, comparable to moer_file_info.modified */
    moer_file (*open)(const char *path, int follow);  /* to read, without ever waiting; a symbolic link is refused unless `follow` */
    moer_file (*create)(const char *path, int mode);  /* to write a file that must not exist; POSIX mode, under the umask */
    int (*inspect)(moer_file file, moer_file_info *info);
    long (*read)(moer_file file, void *data, size_t size);        /* bytes read, maybe fewer; 0 at the end; -1 */
    long (*write)(moer_file file, const void *data, size_t size); /* bytes written, maybe fewer; -1 */
    int (*flush)(moer_file file);
    int (*close)(moer_file file);                     /* 0 when a write that was put off fails now */
    int (*rename)(const char *from, const char *to);  /* atomic; replaces a file or a link, not a folder */
    int (*remove)(const char *path);
    int (*touch)(const char *path);                   /* modified: now */
    int (*folder_create)(const char *path, int mode); /* one level */
    int (*folder_inspect)(const char *path, moer_file_info *info); /* 0 for a symbolic link, too */
    int (*folder_open)(moer_folder *folder, const char *path);
    const char *(*folder_next)(moer_folder *folder);  /* a name, valid until the next call; NULL at the end */
    void (*folder_close)(moer_folder *folder);
} moer_files;

#endif /* MOER_PLATFORM */

/* ---- src/cache.h ---- */
/*
  cache.h: what the parts that keep compiled variants offer the others: cache_entry.c (key and entry), cache_folder.c (which
  folders), cache_file.c (reading and writing one entry), cache_trim.c (what leaves the folder), pack.c and pack_write.c
  (many entries in one file), cache.c (the order in which all these are asked) and cache_calls.c (public functions).
  Included by internal.h. How code is compiled, and what the driver makes of it, doesn't belong here.
*/
#ifndef MOER_CACHE
#define MOER_CACHE 1

#define MOER_CACHE_DEFAULT_LIMIT ((uint64_t)1 << 30) /* bytes */
#define MOER_CACHE_RECENT 3600 /* seconds: what was used or written within them stays, and isn't marked as used again */

/* ---- cache_entry.c ---- */
typedef struct moer_key { /* what a variant is looked up by; needs neither NVRTC nor the driver */
    char text[1152]; /* the whole key, length-prefixed */
    size_t text_size;
    uint32_t target;
    unsigned char digest[32]; /* SHA-256 of the text */
} moer_key;

typedef struct moer_entry { /* an entry that passed every check; the pointers lie within its bytes */
    const unsigned char *payload;
    size_t payload_size;
    const char *key_text; /* not terminated */
    size_t key_size;
    uint32_t target, nvrtc_version, driver_version, library_version;
    int is_code; /* 0: results of tuning */
} moer_entry;

#define MOER_ENTRY_MAX_PAYLOAD (16u << 20)
#define MOER_ENTRY_MAX_SIZE (MOER_ENTRY_MAX_PAYLOAD + 4096u) /* a header is below 4 KB */

static void moer_write_number(unsigned char *bytes, uint64_t value, unsigned size); /* little-endian */
static uint64_t moer_read_number(const unsigned char *bytes, unsigned size);
static void moer_digest(const void *data, size_t size, unsigned char digest[32]);
static int moer_key_make(moer_key *key, const char *family, const char *defines, uint32_t target); /* 0: too long */
/* The texts that an entry's key is made of, cut where they don't fit; 0 when it isn't such a key. `current`: the kernels
   and switches are those of this library. */
static int moer_key_read(const moer_entry *entry, char *family, size_t family_size, char *defines, size_t defines_size, int *current);
static int moer_entry_parse(const unsigned char *bytes, size_t size, moer_entry *entry); /* 0: anything is wrong with it */
static int moer_entry_is_for(const moer_entry *entry, const moer_key *key);
/* The payload of results of tuning begins so. */
#define MOER_TUNING_MAGIC "moe_route tuning 1\n"
/* The bytes of an entry; data NULL when there is no memory, or the payload is none that can be kept. */
static moer_bytes moer_entry_make(moe_route_context *context, const moer_key *key, const moer_bytes *payload);

/* ---- cache_folder.c ---- */
typedef struct moer_path { char text[MOER_PATH_MAX]; } moer_path;

typedef struct moer_cache {
    const moer_files *files;
    char folder[MOER_PATH_MAX];  /* <root>/v1 once it is checked; empty: the disk isn't written */
    moer_path *read_only;        /* folders that are searched before it, likewise */
    uint32_t num_read_only;
    int trust_shared;            /* others may own or write folders, entries and packs */
    int refresh;                 /* nothing is read from folders */
    uint64_t limit;              /* bytes that the folder may hold */
    /* under the context's mutex: */
    int writable;                /* cleared by the first write that fails */
    int trimming;                /* a thread is about it */
    unsigned stores;             /* numbers the temporary files */
    uint64_t bytes;              /* what the folder holds, as far as this context knows */
    uint64_t trim_at;            /* where that makes it look again; 0: it hasn't looked yet */
} moer_cache;

/* Decides on the folders, once, when a context is created. Never fails: without a usable folder the cache is memory. */
static void moer_cache_open(moe_route_context *context, const moe_route_context_desc *desc);
static void moer_cache_close(moe_route_context *context);
static void moer_cache_create_folders(const moer_cache *cache, char *path); /* as far as they don't exist */
/* Whether entries may lie in a folder. On refusal `why` says what is wrong with it. */
static int moer_cache_check_folder(const moer_cache *cache, const char *path, int read_only, char *why, size_t size);
/* <folder>/<first byte of the digest>, and with `whole` the entry's path in it. */
static void moer_cache_path(const char *folder, const unsigned char digest[32], int whole, char *path, size_t size);

/* ---- cache_file.c ---- */
typedef enum moer_found {
    MOER_FOUND_NOTHING = 0,
    MOER_FOUND_BYTES = 1,
    MOER_FOUND_UNUSABLE = 2, /* there is something that may not or can't be used */
    MOER_FOUND_FOLDER = 3    /* likewise, and writing an entry wouldn't replace it */
} moer_found;
typedef enum moer_read_kind {
    MOER_READ_OWN = 0,       /* an entry of the context's own folder: nobody else may have written it */
    MOER_READ_READ_ONLY = 1, /* an entry of another folder: the system's administrator may have, too */
    MOER_READ_PACK = 2       /* likewise, larger, and the path may be a symbolic link */
} moer_read_kind;
/* A whole file that may be used by its kind, owner, mode and size. On UNUSABLE or FOLDER `why` tells the reason. */
static moer_found moer_cache_read(moe_route_context *context, const char *path, moer_read_kind kind, moer_bytes *bytes,
                                  moer_file_info *info, char *why, size_t size);
/* Writes a new file and flushes it; on failure nothing stays behind, and `why` says what happened. */
static int moer_cache_write_file(const moer_files *files, const char *path, const moer_bytes *bytes, int mode, char *why, size_t size);
/* Publishes an entry in the context's folder. 0: `why` tells what failed. */
static int moer_cache_publish(moe_route_context *context, const moer_key *key, const moer_bytes *entry, char *why, size_t size);

/* ---- cache_trim.c ---- */
typedef struct moer_cache_file { /* a file of the folder */
    char path[MOER_PATH_MAX];
    unsigned char digest[32]; /* its name, for an entry */
    int is_entry;             /* 0: a temporary file */
    moer_file_info info;
} moer_cache_file;
/* Visits all entries and temporary files of the context's folder. A visitor's 0 ends it, and is returned. */
static int moer_cache_walk(moe_route_context *context, int (*visit)(moe_route_context *context, const moer_cache_file *file, void *user), void *user);
/* After an entry of `size` bytes was written: now and then removes left-over temporary files, and the entries that were used
   longest ago when the folder has outgrown its limit. */
static void moer_cache_trim(moe_route_context *context, const moer_key *written, size_t size);

/* ---- pack.c ---- */
typedef struct moer_pack {
    struct moer_pack *next;
    const unsigned char *data;
    unsigned char *owned; /* the same bytes when they were read from a file */
    size_t size;
    uint32_t count;
    char *name;           /* for messages */
} moer_pack;

#define MOER_PACK_MAX_SIZE ((size_t)1 << 30)
#define MOER_PACK_FORMAT 1u
#define MOER_PACK_HEAD 24u  /* header in front of the index */
#define MOER_PACK_INDEX 48u /* one entry of the index */
static const unsigned char *moer_pack_magic(void);
static const char *moer_pack_check(const unsigned char *data, size_t size, uint32_t *count); /* NULL, or what is wrong */
/* The bytes that the index has for a digest: not yet checked in any way. 0: none. */
static int moer_pack_find(const moer_pack *pack, const unsigned char digest[32], const unsigned char **bytes, size_t *size);
static void moer_packs_close(moe_route_context *context);

/* ---- cache.c ---- */
typedef struct moer_lookup { /* a variant being looked for, or what tuning found */
    moer_key key;
    int is_tuning;
    uint32_t place;           /* of the next one to ask: packs, read-only folders, the folder */
    int blocked;              /* a folder stands where the entry would be written */
    int missed;               /* the folders were asked and had nothing sound */
    moe_route_origin origin;
    moer_bytes bytes;         /* the entry that was found */
    moer_entry entry;
    char path[MOER_PATH_MAX]; /* of a file in the context's own folder; otherwise empty */
} moer_lookup;
/* The next sound entry, in lookup->bytes and lookup->entry; 0 when there is none (any more). */
static int moer_lookup_next(moe_route_context *context, moer_lookup *lookup);
/* The same in folders alone, without counting what is found; the first of them has number `first`. */
static int moer_lookup_in_folders(moe_route_context *context, moer_lookup *lookup, uint32_t first);
/* The driver refused the entry that was found: frees it, and removes its file if that is still the same. */
static void moer_lookup_refused(moe_route_context *context, moer_lookup *lookup);
/* Publishes an entry in the folder; a failure turns writing off and is logged once. */
static void moer_cache_store(moe_route_context *context, const moer_lookup *lookup, const moer_bytes *entry);
static void moer_count(moe_route_context *context, uint64_t *counter); /* one more, of context->statistics */

#endif /* MOER_CACHE */

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

/* ---- the kernel sources, as NVRTC gets them ---- */
static const char *const moer_source_0[] = { /* device.h */
    "/*\n"
    "  device.h: everything that a kernel needs from the machine: thread indices, barriers, warp collectives, rounding-exact\n"
    "  arithmetic, conversions, matrix fragments, memory access. Intrinsics and inline PTX stand here and nowhere else, so that\n"
    "  a second implementation of this one file runs the same kernels elsewhere. Nothing about experts or tokens belongs here.\n"
    "\n"
    "  Names: f32_* are single IEEE operations that the compiler may not fuse; half2 and bf162 are two 16-bit floats in one\n"
    "  32-bit word, the first in the low half.\n"
    "*/\n"
    "typedef unsigned char u8;\n"
    "typedef unsigned short u16;\n"
    "typedef unsigned int u32;\n"
    "typedef unsigned long long u64;\n"
    "\n"
    "#define DEVICE static __device__ __forceinline__\n"
    "#define KERNEL(name, max_threads, type) KERNEL_SHARING(name, max_threads, 1, type)\n"
    "/* Registers are kept low enough for `blocks` blocks to share a multiprocessor. */\n"
    "#define KERNEL_SHARING(name, max_threads, blocks, type) \\\n"
    "    extern \"C\" __global__ void __launch_bounds__(max_threads, blocks) name(const __grid_constant__ type a)\n"
    "/* Arrays in shared memory are declared by this alone and used by index, or by the shared_* functions below. */\n"
    "#define SHARED(type, name, count) __shared__ __align__(16) type name[count]\n"
    "/* One array of u32 beside them, as large as the launch says: SHARED_BYTES, a constant of the kernel's, more than the others could\n"
    "   have. */\n"
    "#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u32 name[]\n"
    "/* The same, aligned as warpgroup_multiply wants it; then without other arrays beside it. */\n"
    "#define DYNAMIC_SHARED_FOR_PRODUCTS(name) extern __shared__ __align__(1024) u32 name[]\n"
    "\n"
    "/* Words that a SHARED u32 array needs to be used as an object of a type that isn't ours; and the array as one. */\n"
    "#define SHARED_WORDS(type) ((u32)(sizeof(type) + 3) / 4)\n"
    "#define SHARED_AS(type, array) (*(type *)(array))\n"
    "\n"
    "struct __align__(16) u32x4 { u32 v[4]; };\n"
    "struct __align__(8) u32x2 { u32 v[2]; };\n"
    "\n"
    "/* ---- where am I ---- */\n"
    "DEVICE u32 thread_index() { return threadIdx.x; }\n"
    "DEVICE u32 block_threads() { return blockDim.x; }\n"
    "DEVICE u32 block_index_x() { return blockIdx.x; }\n"
    "DEVICE u32 block_index_y() { return blockIdx.y; }\n"
    "DEVICE u32 grid_blocks_x() { return gridDim.x; }\n"
    "DEVICE u32 grid_blocks_y() { return gridDim.y; }\n"
    "DEVICE u32 lane_index() { return threadIdx.x & 31u; }\n"
    "DEVICE u32 warp_index() { return threadIdx.x >> 5; }\n"
    "\n"
    "/* ---- barriers, and the order between kernels ---- */\n"
    "DEVICE void block_barrier() { __syncthreads(); }\n"
    "DEVICE void warp_barrier() { __syncwarp(); }\n"
    "/* A barrier of some warps alone: `threads` of the block, whole warps, which all name the same `id` of 1 to 15. */\n"
    "DEVICE void block_barrier_named(u32 id, u32 threads) {\n"
    "    asm volatile(\"bar.sync %0, %1;\" :: \"r\"(id), \"r\"(threads) : \"memory\");\n"
    "}\n"
    "/* Takes part in such a barrier without waiting at it: what this warp has written is there for those who wait. */\n"
    "DEVICE void block_barrier_arrive(u32 id, u32 threads) {\n"
    "    asm volatile(\"bar.arrive %0, %1;\" :: \"r\"(id), \"r\"(threads) : \"memory\");\n"
    "}\n"
    "\n"
    "/* Waits until the kernels before this one in the stream have finished and their writes are visible. Every block calls it\n"
    "   before it reads what they wrote, writes anything, or ends: only so is the kernel before them finished too when this one\n"
    "   is. What a kernel further back wrote may be read earlier, by load_fresh_4, if the one before this has waited for it before it let this\n"
    "   one start. Nothing where the GPU has no dependent launch. */\n"
    "DEVICE void wait_for_previous_kernels() {\n"
    "#if __CUDA_ARCH__ >= 900\n"
    "    asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
    "#endif\n"
    "}\n"
    "/* Lets the next kernel start its blocks; it still waits as above for what this one writes. */\n"
    "DEVICE void let_next_kernel_start() {\n"
    "#if __CUDA_ARCH__ >= 900\n"
    "    asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");\n"
    "#endif\n"
    "}\n"
    "\n"
    "/* ---- warp collectives: all 32 lanes take part ---- */\n",
    "DEVICE u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }\n"
    "DEVICE u32 warp_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }\n"
    "DEVICE u32 warp_add(u32 v) { return __reduce_add_sync(0xffffffffu, v); }\n"
    "DEVICE u32 warp_ballot(bool p) { return __ballot_sync(0xffffffffu, p); }\n"
    "DEVICE u32 warp_match(u32 v) { return __match_any_sync(0xffffffffu, v); }\n"
    "DEVICE u32 warp_shuffle(u32 v, u32 lane) { return __shfl_sync(0xffffffffu, v, (int)lane); }\n"
    "DEVICE u32 warp_shuffle_xor(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, (int)mask); }\n"
    "DEVICE u32 warp_shuffle_up(u32 v, u32 delta) { return __shfl_up_sync(0xffffffffu, v, delta); }\n"
    "\n"
    "/* ---- bits ---- */\n"
    "DEVICE u32 popcount(u32 v) { return (u32)__popc(v); }\n"
    "DEVICE u32 f32_bits(float f) { return __float_as_uint(f); }\n"
    "DEVICE float f32_from_bits(u32 u) { return __uint_as_float(u); }\n"
    "/* (a & mask) | bits in one instruction: the compiler makes two of it where both are constants. */\n"
    "DEVICE u32 and_or(u32 a, u32 mask, u32 bits) { u32 d; asm(\"lop3.b32 %0, %1, %2, %3, 0xea;\" : \"=r\"(d) : \"r\"(a), \"r\"(mask), \"r\"(bits)); return d; }\n"
    "/* (a | b) & mask in one instruction. */\n"
    "DEVICE u32 or_and(u32 a, u32 b, u32 mask) { u32 d; asm(\"lop3.b32 %0, %1, %2, %3, 0xa8;\" : \"=r\"(d) : \"r\"(a), \"r\"(b), \"r\"(mask)); return d; }\n"
    "/* The four bytes of the result are chosen by the four hex digits of `selector` from the bytes of a (0-3) and b (4-7). */\n"
    "DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }\n"
    "/* A constant that has a register, by being unknown to the compiler: an instruction takes one constant, and to move another one costs as much as it does. */\n"
    "DEVICE u32 in_register(u32 constant) {\n"
    "    u32 thread;\n"
    "    asm volatile(\"mov.u32 %0, %%tid.x;\" : \"=r\"(thread));\n"
    "    return constant + (thread >> 16);\n"
    "}\n"
    "\n"
    "/* count + (a > b) for a given ~b, by the carry of a sum: half of what a comparison and its use take. */\n"
    "DEVICE u32 count_above(u32 count, u32 a, u32 not_b) {\n"
    "    asm(\"{ .reg .u32 t; add.cc.u32 t, %1, %2; addc.u32 %0, %0, 0; }\" : \"+r\"(count) : \"r\"(a), \"r\"(not_b));\n"
    "    return count;\n"
    "}\n"
    "/* The same for numbers of two words. */\n"
    "DEVICE u32 count_above_2(u32 count, u32 a_high, u32 a_low, u32 not_b_high, u32 not_b_low) {\n"
    "    asm(\"{ .reg .u32 t; add.cc.u32 t, %2, %4; addc.cc.u32 t, %1, %3; addc.u32 %0, %0, 0; }\" : \"+r\"(count) : \"r\"(a_high), \"r\"(a_low), \"r\"(not_b_high), \"r\"(not_b_low));\n"
    "    return count;\n"
    "}\n"
    "\n"
    "/* ---- exact single operations ---- */\n"
    "DEVICE float f32_add(float a, float b) { return __fadd_rn(a, b); }\n"
    "DEVICE float f32_mul(float a, float b) { return __fmul_rn(a, b); }\n"
    "DEVICE float f32_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }\n"
    "DEVICE float f32_div(float a, float b) { return __fdiv_rn(a, b); }\n"
    "DEVICE float f32_sqrt(float a) { return __fsqrt_rn(a); }\n"
    "DEVICE float f32_reciprocal(float a) { return __frcp_rn(a); } /* the bits of f32_div(1, a), in fewer instructions */\n"
    "\n"
    "/* The larger and the smaller; b where a is NaN. */\n"
    "DEVICE float f32_max(float a, float b) { return fmaxf(a, b); }\n"
    "DEVICE float f32_min(float a, float b) { return fminf(a, b); }\n"
    "\n"
    "/* ---- 16-bit floats ---- */\n"
    "DEVICE float f16_to_f32(u16 h) { float f; asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(f) : \"h\"(h)); return f; }\n"
    "DEVICE u16 f32_to_f16(float f) { u16 h; asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(h) : \"f\"(f)); return h; }\n"
    "DEVICE float bf16_to_f32(u16 h) { return f32_from_bits((u32)h << 16); }\n"
    "DEVICE u16 f32_to_bf16(float f) { u16 h; asm(\"cvt.rn.bf16.f32 %0, %1;\" : \"=h\"(h) : \"f\"(f)); return h; }\n"
    "DEVICE u32 f32_to_half2(float lo, float hi) { u32 d; asm(\"cvt.rn.f16x2.f32 %0, %1, %2;\" : \"=r\"(d) : \"f\"(hi), \"f\"(lo)); return d; }\n"
    "DEVICE u32 f32_to_bf162(float lo, float hi) { u32 d; asm(\"cvt.rn.bf16x2.f32 %0, %1, %2;\" : \"=r\"(d) : \"f\"(hi), \"f\"(lo)); return d; }\n"
    "DEVICE u32 half2_sub(u32 a, u32 b) { u32 d; asm(\"sub.f16x2 %0, %1, %2;\" : \"=r\"(d) : \"r\"(a), \"r\"(b)); return d; }\n",
    "DEVICE u32 half2_fma(u32 a, u32 b, u32 c) { u32 d; asm(\"fma.rn.f16x2 %0, %1, %2, %3;\" : \"=r\"(d) : \"r\"(a), \"r\"(b), \"r\"(c)); return d; }\n"
    "DEVICE u32 bf162_fma(u32 a, u32 b, u32 c) { u32 d; asm(\"fma.rn.bf16x2 %0, %1, %2, %3;\" : \"=r\"(d) : \"r\"(a), \"r\"(b), \"r\"(c)); return d; }\n"
    "\n"
    "/* ---- matrix fragments: c[16 x 8] += a[16 x 16] * b[16 x 8], products exact, sums in f32 ----\n"
    "   With lane = 4 * g + t: a[0] is row g, a[1] row g + 8, both at k = 2t, 2t + 1; a[2], a[3] the same rows at k + 8.\n"
    "   b[0] is column g at k = 2t, 2t + 1; b[1] at k + 8. c[0], c[1] are row g, columns 2t, 2t + 1; c[2], c[3] row g + 8. */\n"
    "DEVICE void matrix_multiply_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {\n"
    "    asm(\"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\"\n"
    "        : \"+f\"(c[0]), \"+f\"(c[1]), \"+f\"(c[2]), \"+f\"(c[3]) : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b0), \"r\"(b1));\n"
    "}\n"
    "DEVICE void matrix_multiply_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {\n"
    "    asm(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\"\n"
    "        : \"+f\"(c[0]), \"+f\"(c[1]), \"+f\"(c[2]), \"+f\"(c[3]) : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b0), \"r\"(b1));\n"
    "}\n"
    "/* The same without a sum to begin with: c = a * b. */\n"
    "DEVICE void matrix_product_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {\n"
    "    asm(\"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\"\n"
    "        : \"=f\"(c[0]), \"=f\"(c[1]), \"=f\"(c[2]), \"=f\"(c[3]) : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b0), \"r\"(b1), \"f\"(0.0f));\n"
    "}\n"
    "DEVICE void matrix_product_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {\n"
    "    asm(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\"\n"
    "        : \"=f\"(c[0]), \"=f\"(c[1]), \"=f\"(c[2]), \"=f\"(c[3]) : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b0), \"r\"(b1), \"f\"(0.0f));\n"
    "}\n"
    "\n"
    "/* ---- global memory ---- */\n"
    "/* For weights: read once, by nobody else, never written while a kernel runs; not kept in L1. Where WEIGHT_LOADS_STAY is defined, the compiler\n"
    "   doesn't move them over barriers, which it is free to do otherwise. */\n"
    "#ifdef WEIGHT_LOADS_STAY\n"
    "#define WEIGHT_LOAD \"ld.global.L1::no_allocate\"\n"
    "#define WEIGHT_LOAD_CLOBBERS \"memory\"\n"
    "#else\n"
    "#define WEIGHT_LOAD \"ld.global.nc.L1::no_allocate\"\n"
    "#define WEIGHT_LOAD_CLOBBERS\n"
    "#endif\n"
    "DEVICE u32x4 load_weights_16(const void *p) {\n"
    "    u32x4 d;\n"
    "    asm volatile(WEIGHT_LOAD \".v4.u32 {%0,%1,%2,%3}, [%4];\"\n"
    "        : \"=r\"(d.v[0]), \"=r\"(d.v[1]), \"=r\"(d.v[2]), \"=r\"(d.v[3]) : \"l\"(p) : WEIGHT_LOAD_CLOBBERS);\n"
    "    return d;\n"
    "}\n"
    "DEVICE u32x2 load_weights_8(const void *p) {\n"
    "    u32x2 d;\n"
    "    asm volatile(WEIGHT_LOAD \".v2.u32 {%0,%1}, [%2];\" : \"=r\"(d.v[0]), \"=r\"(d.v[1]) : \"l\"(p) : WEIGHT_LOAD_CLOBBERS);\n"
    "    return d;\n"
    "}\n"
    "DEVICE u32 load_weights_4(const void *p) {\n"
    "    u32 d;\n"
    "    asm volatile(WEIGHT_LOAD \".u32 %0, [%1];\" : \"=r\"(d) : \"l\"(p) : WEIGHT_LOAD_CLOBBERS);\n"
    "    return d;\n"
    "}\n"
    "/* Brings up to PREFETCH_BYTES bytes of weights from p on, aligned to 16, into L2 for a kernel after this one; of `left` bytes\n"
    "   only whole 16. */\n"
    "#define PREFETCH_BYTES 4096u\n"
    "DEVICE void prefetch_weights(const void *p, u64 left) {\n"
    "    const u32 size = left < PREFETCH_BYTES \? (u32)left & ~15u : PREFETCH_BYTES;\n"
    "#if __CUDA_ARCH__ >= 900\n"
    "    if (size) asm volatile(\"cp.async.bulk.prefetch.L2.global [%0], %1;\" :: \"l\"(p), \"r\"(size));\n"
    "#else\n"
    "    for (u32 at = 0; at < size; at += 128) asm volatile(\"prefetch.global.L2 [%0];\" :: \"l\"((const u8 *)p + at));\n"
    "#endif\n"
    "}\n"
    "/* For what a kernel before this one wrote, and everything else: ordinary loads. */\n"
    "DEVICE u32x4 load_16(const void *p) { return *(const u32x4 *)p; }\n"
    "DEVICE u32x2 load_8(const void *p) { return *(const u32x2 *)p; }\n"
    "DEVICE u32 load_4(const void *p) { return *(const u32 *)p; }\n",
    "DEVICE u16 load_2(const void *p) { return *(const u16 *)p; }\n"
    "DEVICE u8 load_1(const void *p) { return *(const u8 *)p; }\n"
    "/* For what a kernel further back wrote, read before the one before this has been waited for: from L2, since L1 may hold what\n"
    "   was there earlier. */\n"
    "DEVICE u32 load_fresh_4(const void *p) {\n"
    "    u32 d;\n"
    "    asm volatile(\"ld.relaxed.gpu.global.u32 %0, [%1];\" : \"=r\"(d) : \"l\"(p) : \"memory\");\n"
    "    return d;\n"
    "}\n"
    "DEVICE void store_16(void *p, u32x4 v) { *(u32x4 *)p = v; }\n"
    "DEVICE void store_8(void *p, u32x2 v) { *(u32x2 *)p = v; }\n"
    "/* Atomic among all blocks of the device, and orders nothing else. */\n"
    "DEVICE void global_atomic_add_64(long long *p, long long v) { atomicAdd((u64 *)p, (u64)v); }\n"
    "\n"
    "/* ---- shared memory ---- */\n"
    "/* Words i to i + 3 of a SHARED int or u32 array; i is a multiple of 4. */\n"
    "#define shared_load_4(array, i) (*(const int4 *)&(array)[i])\n"
    "/* Words i and i + 1; i is even. */\n"
    "#define shared_load_2(array, i) (*(const int2 *)&(array)[i])\n"
    "/* Words i and i + 1, or i to i + 3, of a SHARED u32 array; i is a multiple of 2 or 4. */\n"
    "#define shared_store_2(array, i, value) (*(u32x2 *)&(array)[i] = (value))\n"
    "#define shared_store_4(array, i, value) (*(u32x4 *)&(array)[i] = (value))\n"
    "/* Four 8 x 8 matrices of 16-bit numbers from a SHARED u32 array: lane 8m + r names the first word, a multiple of 4, of row r of\n"
    "   matrix m. d[m] of lane 4g + t is elements 2t and 2t + 1 of row g of matrix m. All 32 lanes take part. */\n"
    "#define shared_load_matrices(array, i, d) shared_load_matrices_from(&(array)[i], d)\n"
    "DEVICE void shared_load_matrices_from(const u32 *shared, u32 (&d)[4]) {\n"
    "    asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\"\n"
    "        : \"=r\"(d[0]), \"=r\"(d[1]), \"=r\"(d[2]), \"=r\"(d[3]) : \"r\"((u32)__cvta_generic_to_shared(shared)) : \"memory\");\n"
    "}\n"
    "/* Adds to element i of a SHARED int or u32 array, and returns what was there before. Orders nothing else. */\n"
    "#define shared_atomic_add(array, i, v) atomicAdd(&(array)[i], v)\n"
    "/* Sets bits of element i of a SHARED u32 array, likewise. */\n"
    "#define shared_atomic_or(array, i, v) atomicOr(&(array)[i], v)\n"
    "\n"
    "/* A word of a SHARED u32 array whose address is worked out once, where the compiler would do it at each use; and words from there on,\n"
    "   whose numbers add up to a multiple of 2 or 4 where so many are taken at once. */\n"
    "struct shared_place { u32 address; };\n"
    "#define shared_place_of(array, i) shared_place_at(&(array)[i])\n"
    "DEVICE shared_place shared_place_at(const u32 *word) {\n"
    "    shared_place place;\n"
    "    asm volatile(\"mov.u32 %0, %1;\" : \"=r\"(place.address) : \"r\"((u32)__cvta_generic_to_shared(word)));\n"
    "    return place;\n"
    "}\n"
    "/* So many words further on. */\n"
    "DEVICE shared_place shared_place_after(const shared_place &place, u32 i) { return {place.address + i * 4}; }\n"
    "DEVICE u32 shared_load_from(const shared_place &from, u32 i) {\n"
    "    u32 d;\n"
    "    asm volatile(\"ld.shared.u32 %0, [%1];\" : \"=r\"(d) : \"r\"(from.address + i * 4) : \"memory\");\n"
    "    return d;\n"
    "}\n"
    "DEVICE u32x2 shared_load_2_from(const shared_place &from, u32 i) {\n"
    "    u32x2 d;\n"
    "    asm volatile(\"ld.shared.v2.u32 {%0,%1}, [%2];\" : \"=r\"(d.v[0]), \"=r\"(d.v[1]) : \"r\"(from.address + i * 4) : \"memory\");\n"
    "    return d;\n"
    "}\n"
    "DEVICE u32x4 shared_load_4_from(const shared_place &from, u32 i) {\n"
    "    u32x4 d;\n"
    "    asm volatile(\"ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\" : \"=r\"(d.v[0]), \"=r\"(d.v[1]), \"=r\"(d.v[2]), \"=r\"(d.v[3]) : \"r\"(from.address + i * 4) : \"memory\");\n"
    "    return d;\n"
    "}\n"
    "DEVICE void shared_store_to(const shared_place &to, u32 i, u32 v) { asm volatile(\"st.shared.u32 [%0], %1;\" :: \"r\"(to.address + i * 4), \"r\"(v) : \"memory\"); }\n"
    "DEVICE void shared_store_2_to(const shared_place &to, u32 i, u32x2 v) {\n"
    "    asm volatile(\"st.shared.v2.u32 [%0], {%1,%2};\" :: \"r\"(to.address + i * 4), \"r\"(v.v[0]), \"r\"(v.v[1]) : \"memory\");\n"
    "}\n"
    "\n"
    "/* ---- copies from global to shared memory that go on while the thread does ----\n",
    "   A thread starts copies, and closes a group of them by a commit. copy_async_wait<N> waits until all groups of this thread\n"
    "   but its N latest have landed. What landed is the thread's own write: others need a barrier after the wait. Nobody may\n"
    "   touch the destination before. */\n"
    "/* 16 bytes to word i and on from a place, of which only the first `size` are read; the others become 0. Or 4 bytes, if `wanted`. Both\n"
    "   ends are aligned to as many bytes. The 16 aren't kept in L1. Those of copy_async_line_16 belong to whole lines of 128 bytes that are wanted: L2 brings the rest. */\n"
    "DEVICE void copy_async_16(const shared_place &to, u32 i, const void *p, u32 size) {\n"
    "    asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16, %2;\" :: \"r\"(to.address + i * 4), \"l\"(p), \"r\"(size) : \"memory\");\n"
    "}\n"
    "DEVICE void copy_async_line_16(const shared_place &to, u32 i, const void *p, u32 size) {\n"
    "    asm volatile(\"cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\" :: \"r\"(to.address + i * 4), \"l\"(p), \"r\"(size) : \"memory\");\n"
    "}\n"
    "DEVICE void copy_async_4(const shared_place &to, u32 i, const void *p, bool wanted) { /* without a branch */\n"
    "    asm volatile(\"{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4; }\"\n"
    "        :: \"r\"(to.address + i * 4), \"l\"(p), \"r\"((u32)wanted) : \"memory\");\n"
    "}\n"
    "DEVICE void copy_async_commit() { asm volatile(\"cp.async.commit_group;\" ::: \"memory\"); }\n"
    "template <int N> DEVICE void copy_async_wait() { asm volatile(\"cp.async.wait_group %0;\" :: \"n\"(N) : \"memory\"); }\n"
    "\n"
    "/* ---- barriers in shared memory, and copies by the bulk engine: compute capability 9.0 and newer ----\n"
    "   A barrier is two words of a SHARED u32 array, at an even place. shared_barrier_start, by one thread and before a barrier of the block, says how many arrivals\n"
    "   end each of its phases; shared_barrier_wait waits for the end of the phase of this parity: 0 for the first, 1 for the second, 0 again. What those who\n"
    "   arrived did before is then there. A thread that arrives by shared_barrier_expect makes the phase wait for so many bytes, too, which copies bring:\n"
    "   whole 16 bytes from global memory, both ends aligned to 16. Then they are there for all who wait, and until then nobody touches them; what was there\n"
    "   has been read before a barrier that whoever copies has waited at. */\n"
    "#if __CUDA_ARCH__ >= 900\n"
    "/* True in one lane of the warp, all of whose lanes are there: what that one does alone, the compiler then works out once for all. */\n"
    "DEVICE bool elect_lane() {\n"
    "    u32 chosen;\n"
    "    asm volatile(\"{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }\" : \"=r\"(chosen) :: \"memory\");\n"
    "    return chosen != 0;\n"
    "}\n"
    "DEVICE void shared_barrier_start(const shared_place &barrier, u32 arrivals) {\n"
    "    asm volatile(\"mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;\" :: \"r\"(barrier.address), \"r\"(arrivals) : \"memory\");\n"
    "}\n"
    "DEVICE void shared_barrier_arrive(const shared_place &barrier, u32 i) {\n"
    "    asm volatile(\"mbarrier.arrive.shared::cta.b64 _, [%0];\" :: \"r\"(barrier.address + i * 4) : \"memory\");\n"
    "}\n"
    "DEVICE void shared_barrier_expect(const shared_place &barrier, u32 i, u32 bytes) {\n"
    "    asm volatile(\"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\" :: \"r\"(barrier.address + i * 4), \"r\"(bytes) : \"memory\");\n"
    "}\n"
    "DEVICE void shared_barrier_wait(const shared_place &barrier, u32 i, u32 parity) {\n"
    "    asm volatile(\"{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }\" :: \"r\"(barrier.address + i * 4), \"r\"(parity) : \"memory\");\n"
    "}\n"
    "DEVICE void copy_bulk(const shared_place &to, u32 i, const void *p, u32 bytes, const shared_place &barrier, u32 barrier_i) {\n"
    "    asm volatile(\"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\"\n"
    "        :: \"r\"(to.address + i * 4), \"l\"(p), \"r\"(bytes), \"r\"(barrier.address + barrier_i * 4) : \"memory\");\n"
    "}\n"
    "#endif\n"
    "\n",
    "/* ---- products by four warps together, a warpgroup, from shared memory: real architecture sm_90a alone ----\n"
    "   c[64 x N] += a[64 x 16] * b[16 x N], products exact, sums in f32. `a` has 64 weight rows, `b` N rows of activations, each row 64 inputs\n"
    "   in 128 bytes of a DYNAMIC_SHARED_FOR_PRODUCTS array, where chunk c of 16 bytes lies at place c ^ (row % 8); `a` and `b` name the first word of\n"
    "   the first row, a multiple of 256 (1024 bytes), plus 8 for each 16 inputs. Warp w of the four has rows 16w to 16w + 15 of c, and of those\n"
    "   lane 4g + t c[j][0], c[j][1]: row g, columns 8j + 2t and 8j + 2t + 1; c[j][2], c[j][3]: row g + 8.\n"
    "   They go on while the warps do: warpgroup_begin before the first after anything else that touched c, warpgroup_commit closes a group,\n"
    "   warpgroup_wait<n> waits for all but the n latest groups, and until then nobody touches c or the shared memory. What any thread has written there, also by\n"
    "   asynchronous copies, is multiplied after a barrier and, by those who multiply, shared_visible_to_products. */\n"
    "#if __CUDA_ARCH_FEAT_SM90_ALL\n"
    "DEVICE void shared_visible_to_products() { asm volatile(\"fence.proxy.async.shared::cta;\" ::: \"memory\"); }\n"
    "DEVICE void warpgroup_begin() { asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\"); }\n"
    "DEVICE void warpgroup_commit() { asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\"); }\n"
    "template <int N> DEVICE void warpgroup_wait() { asm volatile(\"wgmma.wait_group.sync.aligned %0;\" :: \"n\"(N) : \"memory\"); }\n"
    "/* Registers of a thread from here on: fewer, or more when other warps have given theirs away; a multiple of 8. */\n"
    "template <u32 N> DEVICE void release_registers() { asm volatile(\"setmaxnreg.dec.sync.aligned.u32 %0;\" :: \"n\"(N)); }\n"
    "template <u32 N> DEVICE void take_registers() { asm volatile(\"setmaxnreg.inc.sync.aligned.u32 %0;\" :: \"n\"(N)); }\n"
    "\n"
    "#define WARPGROUP_REGISTERS_16 \"%0,%1,%2,%3,%4,%5,%6,%7\"\n"
    "#define WARPGROUP_REGISTERS_32 WARPGROUP_REGISTERS_16 \",%8,%9,%10,%11,%12,%13,%14,%15\"\n"
    "#define WARPGROUP_REGISTERS_48 WARPGROUP_REGISTERS_32 \",%16,%17,%18,%19,%20,%21,%22,%23\"\n"
    "#define WARPGROUP_REGISTERS_64 WARPGROUP_REGISTERS_48 \",%24,%25,%26,%27,%28,%29,%30,%31\"\n"
    "#define WARPGROUP_REGISTERS_80 WARPGROUP_REGISTERS_64 \",%32,%33,%34,%35,%36,%37,%38,%39\"\n"
    "#define WARPGROUP_REGISTERS_96 WARPGROUP_REGISTERS_80 \",%40,%41,%42,%43,%44,%45,%46,%47\"\n"
    "#define WARPGROUP_REGISTERS_112 WARPGROUP_REGISTERS_96 \",%48,%49,%50,%51,%52,%53,%54,%55\"\n"
    "#define WARPGROUP_REGISTERS_128 WARPGROUP_REGISTERS_112 \",%56,%57,%58,%59,%60,%61,%62,%63\"\n"
    "#define WARPGROUP_REGISTERS_144 WARPGROUP_REGISTERS_128 \",%64,%65,%66,%67,%68,%69,%70,%71\"\n"
    "#define WARPGROUP_REGISTERS_160 WARPGROUP_REGISTERS_144 \",%72,%73,%74,%75,%76,%77,%78,%79\"\n"
    "#define WARPGROUP_SUMS(j) \"+f\"(c[j][0]), \"+f\"(c[j][1]), \"+f\"(c[j][2]), \"+f\"(c[j][3]), \"+f\"(c[j + 1][0]), \"+f\"(c[j + 1][1]), \"+f\"(c[j + 1][2]), \"+f\"(c[j + 1][3])\n"
    "#define WARPGROUP_SUMS_16 WARPGROUP_SUMS(0)\n"
    "#define WARPGROUP_SUMS_32 WARPGROUP_SUMS_16, WARPGROUP_SUMS(2)\n"
    "#define WARPGROUP_SUMS_48 WARPGROUP_SUMS_32, WARPGROUP_SUMS(4)\n"
    "#define WARPGROUP_SUMS_64 WARPGROUP_SUMS_48, WARPGROUP_SUMS(6)\n"
    "#define WARPGROUP_SUMS_80 WARPGROUP_SUMS_64, WARPGROUP_SUMS(8)\n"
    "#define WARPGROUP_SUMS_96 WARPGROUP_SUMS_80, WARPGROUP_SUMS(10)\n"
    "#define WARPGROUP_SUMS_112 WARPGROUP_SUMS_96, WARPGROUP_SUMS(12)\n"
    "#define WARPGROUP_SUMS_128 WARPGROUP_SUMS_112, WARPGROUP_SUMS(14)\n"
    "#define WARPGROUP_SUMS_144 WARPGROUP_SUMS_128, WARPGROUP_SUMS(16)\n"
    "#define WARPGROUP_SUMS_160 WARPGROUP_SUMS_144, WARPGROUP_SUMS(18)\n"
    "#define WARPGROUP_MULTIPLY(n, a_at, b_at)                                                                                      \\\n"
    "    if constexpr (N == n && MOST >= n / 8) {                                                                                    \\\n",
    "        if (F16) asm volatile(\"wgmma.mma_async.sync.aligned.m64n\" #n \"k16.f32.f16.f16 {\" WARPGROUP_REGISTERS_##n \"}, %\" #a_at \", %\" #b_at \", 1, 1, 1, 0, 0;\" : WARPGROUP_SUMS_##n : \"l\"(a), \"l\"(b)); \\\n"
    "        else asm volatile(\"wgmma.mma_async.sync.aligned.m64n\" #n \"k16.f32.bf16.bf16 {\" WARPGROUP_REGISTERS_##n \"}, %\" #a_at \", %\" #b_at \", 1, 1, 1, 0, 0;\" : WARPGROUP_SUMS_##n : \"l\"(a), \"l\"(b)); \\\n"
    "    }\n"
    "template <u32 N, bool F16, u32 MOST>\n"
    "DEVICE void warpgroup_multiply_at(float (&c)[MOST][4], u64 a, u64 b) {\n"
    "    WARPGROUP_MULTIPLY(16, 8, 9)\n"
    "    WARPGROUP_MULTIPLY(32, 16, 17)\n"
    "    WARPGROUP_MULTIPLY(48, 24, 25)\n"
    "    WARPGROUP_MULTIPLY(64, 32, 33)\n"
    "    WARPGROUP_MULTIPLY(80, 40, 41)\n"
    "    WARPGROUP_MULTIPLY(96, 48, 49)\n"
    "    WARPGROUP_MULTIPLY(112, 56, 57)\n"
    "    WARPGROUP_MULTIPLY(128, 64, 65)\n"
    "    WARPGROUP_MULTIPLY(144, 72, 73)\n"
    "    WARPGROUP_MULTIPLY(160, 80, 81)\n"
    "}\n"
    "/* Rows of 128 bytes whose chunks are permuted so, in groups of 8 that are 1024 bytes apart. */\n"
    "DEVICE u64 warpgroup_descriptor(const u32 *shared) {\n"
    "    return (u64)(((u32)__cvta_generic_to_shared(shared) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;\n"
    "}\n"
    "#define warpgroup_multiply(N, F16, c, array, a, b) warpgroup_multiply_at<N, F16>(c, warpgroup_descriptor(&(array)[a]), warpgroup_descriptor(&(array)[b]))\n"
    "#endif\n"
    "\n"
    "/* An 8 x 8 matrix of 16-bit numbers, of which lane 4g + t has elements 2t and 2t + 1 of row g, transposed. All 32 lanes take part. */\n"
    "DEVICE u32 matrix_transpose(u32 a) { u32 d; asm(\"movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\" : \"=r\"(d) : \"r\"(a)); return d; }\n",
    NULL};
static const char *const moer_source_1[] = { /* args.h */
    "/*\n"
    "  args.h: the argument struct of every kernel, one definition for the host C and for the kernels. A kernel takes one such\n"
    "  struct by value. Addresses are 8 bytes on both sides and come first, so that the layouts agree on every host.\n"
    "  Shapes are those of moe_route.h: T tokens, k slots a token, E experts, S shared ones, E_local local ones, pair p = t * k + j, row r.\n"
    "*/\n"
    "#ifdef MOER_HOST\n"
    "#define MOER_ADDRESS(type) moe_route_address\n"
    "#else\n"
    "#define MOER_ADDRESS(type) type *\n"
    "#endif\n"
    "\n"
    "/* Outputs of the maps; null where not wanted. */\n"
    "typedef struct moer_maps_out {\n"
    "    MOER_ADDRESS(int) expert_offsets;      /* [E_local + 1] */\n"
    "    MOER_ADDRESS(int) row_to_pair;         /* [T * k] */\n"
    "    MOER_ADDRESS(int) pair_to_row;         /* [T * k] */\n"
    "    MOER_ADDRESS(int) row_to_expert;       /* [T * k] */\n"
    "    MOER_ADDRESS(int) distinct_experts;    /* [min(T * k, E_local)] */\n"
    "    MOER_ADDRESS(int) distinct_offsets;    /* [min(T * k, E_local) + 1] */\n"
    "    MOER_ADDRESS(int) distinct_count;      /* [1] */\n"
    "    MOER_ADDRESS(int) aligned_row_to_pair; /* [aligned_capacity] */\n"
    "    MOER_ADDRESS(int) block_to_expert;     /* [aligned_capacity / block_size] */\n"
    "    MOER_ADDRESS(int) aligned_rows;        /* [1] */\n"
    "    MOER_ADDRESS(long long) expert_load;   /* [E] */\n"
    "    unsigned int block_size;               /* 0: no aligned outputs */\n"
    "    unsigned int aligned_capacity;         /* a multiple of block_size */\n"
    "} moer_maps_out;\n"
    "\n"
    "/* route.cu and topk.cu */\n"
    "typedef struct moer_route_args {\n"
    "    MOER_ADDRESS(const void) logits;          /* [T, E + S] */\n"
    "    MOER_ADDRESS(const float) logit_bias;     /* [E + S] */\n"
    "    MOER_ADDRESS(const float) selection_bias; /* [E] */\n"
    "    MOER_ADDRESS(const float) expert_scale;   /* [E] */\n"
    "    MOER_ADDRESS(const int) id_table;         /* [id_table_rows, k] */\n"
    "    MOER_ADDRESS(const int) token_ids;        /* [T] */\n"
    "    MOER_ADDRESS(int) ids;                    /* [T, k]; an input where SELECT is 0 or IDS is 1 */\n"
    "    MOER_ADDRESS(void) weights;               /* [T, k] or null */\n"
    "    MOER_ADDRESS(void) shared_weights;        /* [T, S] or null */\n"
    "    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */\n"
    "    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */\n"
    "    moer_maps_out maps;\n"
    "    unsigned int num_tokens;\n"
    "    unsigned int id_table_rows;\n"
    "    float softcap;\n"
    "    float jitter;\n"
    "    float renormalize_epsilon;\n"
    "    float scale;\n"
    "} moer_route_args;\n"
    "\n"
    "/* maps.cu and maps_cub.cu: the sort of any number of pairs */\n"
    "typedef struct moer_maps_args {\n"
    "    MOER_ADDRESS(const int) ids;              /* [T, k] */\n"
    "    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */\n"
    "    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */\n"
    "    MOER_ADDRESS(int) block_counts;           /* sort.h's counts of each block's share */\n"
    "    moer_maps_out maps;\n"
    "    unsigned int num_pairs;                   /* T * k */\n"
    "    unsigned int num_blocks;\n"
    "} moer_maps_args;\n"
    "\n"
    "/* The matrices [N, K] of the local experts, as moe_route_weights describes them; null where the format has none. */\n"
    "typedef struct moer_weights_args {\n"
    "    MOER_ADDRESS(const void) data;\n"
    "    MOER_ADDRESS(const void) scales;\n"
    "    MOER_ADDRESS(const void) zero_points;\n"
    "    MOER_ADDRESS(const float) global_scales;\n"
    "} moer_weights_args;\n"
    "\n"
    "/* matmul.cu: one expert weight matrix times the rows that chose the expert */\n"
    "typedef struct moer_matmul_args {\n"
    "    moer_weights_args weights;\n"
    "    moer_weights_args up_weights;              /* [E_local, N, K] where UP_APART is 1 */\n"
    "    MOER_ADDRESS(const void) bias;             /* [E_local, N] or null */\n"
    "    MOER_ADDRESS(const void) up_bias;          /* likewise */\n"
    "    MOER_ADDRESS(const void) x;                /* [T, K], or [T * k, K] in pair or row order */\n"
    "    MOER_ADDRESS(void) out;                    /* [T * k, N or I] in row or pair order */\n"
    "    MOER_ADDRESS(const int) distinct_experts;\n"
    "    MOER_ADDRESS(const int) distinct_offsets;\n",
    "    MOER_ADDRESS(const int) distinct_count;\n"
    "    MOER_ADDRESS(const int) row_to_pair;       /* [T * k] */\n"
    "    MOER_ADDRESS(const int) pair_to_row;       /* [T * k], to find the pairs without a row; null where they don't matter */\n"
    "    MOER_ADDRESS(const int) pair_to_slot_row;  /* [T * k], where out is indexed by it; -1: not to be written */\n"
    "    MOER_ADDRESS(const void) router_weights;   /* [T, k], where they go on the input */\n"
    "    MOER_ADDRESS(const void) next_data;        /* of the matrix that the next kernel multiplies, to be brought into L2 */\n"
    "    MOER_ADDRESS(const void) next_scales;\n"
    "    unsigned long long next_bytes, next_scale_bytes; /* of one expert */\n"
    "    unsigned int next_experts;                 /* at most so many distinct ones; 0: nothing */\n"
    "    unsigned int num_pairs;\n"
    "    unsigned int max_distinct;                 /* experts: the room that distinct_experts has */\n"
    "    unsigned int x_per_pair;                   /* read where X_INDEX is 1: x is indexed by pair, not by token */\n"
    "    float alpha, up_beta, up_offset, clamp;    /* of the activation; alpha may be SITU's beta */\n"
    "} moer_matmul_args;\n"
    "\n"
    "/* What down.cu and combine.cu add beside the rows of experts (epilogue.h); null where there is none. */\n"
    "typedef struct moer_epilogue {\n"
    "    MOER_ADDRESS(const void) x;                /* [T, H] and */\n"
    "    MOER_ADDRESS(const int) ids;               /* [T, k], for identity experts */\n"
    "    MOER_ADDRESS(const int) num_valid_tokens;  /* [1]; the y of tokens from there on is 0 */\n"
    "    MOER_ADDRESS(const void) shared;           /* [T, H] */\n"
    "    MOER_ADDRESS(const float) shared_weights;  /* [T], or null: 1 */\n"
    "    MOER_ADDRESS(const void) residual;         /* [T, H] */\n"
    "} moer_epilogue;\n"
    "\n"
    "/* down.cu: the down matmul of a small batch, combined */\n"
    "typedef struct moer_down_args {\n"
    "    moer_weights_args weights;                 /* N = H, K = I */\n"
    "    MOER_ADDRESS(const void) bias;             /* [E_local, H] or null */\n"
    "    MOER_ADDRESS(const void) h;                /* [T * k, I] in row order */\n"
    "    MOER_ADDRESS(const void) router_weights;   /* [T, k] */\n"
    "    MOER_ADDRESS(void) y;                      /* [T, H] */\n"
    "    MOER_ADDRESS(const int) distinct_experts;\n"
    "    MOER_ADDRESS(const int) distinct_offsets;\n"
    "    MOER_ADDRESS(const int) distinct_count;\n"
    "    MOER_ADDRESS(const int) pair_to_row;       /* [T * k] */\n"
    "    MOER_ADDRESS(const int) row_to_expert;     /* [T * k] */\n"
    "    moer_epilogue epilogue;\n"
    "    unsigned int num_tokens, max_distinct;     /* the arrays of distinct experts have room for so many */\n"
    "} moer_down_args;\n"
    "\n"
    "/* expand.cu */\n"
    "typedef struct moer_expand_args {\n"
    "    MOER_ADDRESS(const void) x;         /* [T, H] */\n"
    "    MOER_ADDRESS(const int) row_to_pair;/* [T * k] */\n"
    "    MOER_ADDRESS(void) rows;            /* [T * k, H] */\n"
    "    unsigned int num_pairs;\n"
    "} moer_expand_args;\n"
    "\n"
    "/* combine.cu */\n"
    "typedef struct moer_combine_args {\n"
    "    MOER_ADDRESS(const void) rows;            /* [num_rows, H] */\n"
    "    MOER_ADDRESS(const int) pair_to_row;      /* [T * k], or null: rows are in pair order */\n"
    "    MOER_ADDRESS(const void) router_weights;  /* [T, k]; null where nothing needs them */\n"
    "    MOER_ADDRESS(void) y;                     /* [T, H] */\n"
    "    moer_epilogue epilogue;\n"
    "    unsigned int num_tokens;\n"
    "    unsigned int num_rows;\n"
    "    unsigned int weighted_rows;               /* 1: the rows have the router's weight already */\n"
    "} moer_combine_args;\n"
    "\n"
    "/* dispatch.cu and dispatch_large.cu */\n"
    "#define MOER_MAX_RANKS 256\n"
    "typedef struct moer_dispatch_args {\n"
    "    MOER_ADDRESS(const int) ids;              /* [T, k] */\n"
    "    MOER_ADDRESS(const void) weights;         /* [T, k] */\n"
    "    MOER_ADDRESS(const void) x;               /* [T, H] */\n"
    "    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */\n"
    "    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */\n",
    "    MOER_ADDRESS(int) block_counts;           /* [shares, N, 2]: dispatch_large.cu's, rows and slot rows of a share for each rank */\n"
    "    MOER_ADDRESS(int) counts;                 /* [N, 2]; this and what follows is null where not wanted */\n"
    "    MOER_ADDRESS(int) offsets;                /* [N + 1, 2] */\n"
    "    MOER_ADDRESS(void) rows;                  /* [rows, H] */\n"
    "    MOER_ADDRESS(int) row_ids;                /* [rows, k] */\n"
    "    MOER_ADDRESS(void) row_weights;           /* [rows, k] */\n"
    "    MOER_ADDRESS(int) row_to_token;           /* [rows] */\n"
    "    MOER_ADDRESS(int) pair_to_row;            /* [T * k] */\n"
    "    MOER_ADDRESS(int) pair_to_slot_row;       /* [T * k] */\n"
    "    unsigned int num_tokens;\n"
    "    unsigned int capacity, slot_capacity;     /* of a rank; 0: exact sizes */\n"
    "    unsigned short rank_begin[MOER_MAX_RANKS + 4]; /* [N + 1]: first physical expert of each rank, then the end */\n"
    "} moer_dispatch_args;\n"
    "\n"
    "/* slots.cu */\n"
    "typedef struct moer_slots_args {\n"
    "    MOER_ADDRESS(const int) ids;              /* [T, k] */\n"
    "    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */\n"
    "    MOER_ADDRESS(const int) expert_map;       /* [E, MAP_COLUMNS] */\n"
    "    MOER_ADDRESS(int) pair_to_slot_row;       /* [T * k] */\n"
    "    unsigned int num_tokens;\n"
    "    unsigned int source_pairs;                /* of each source: T * k / S */\n"
    "    unsigned int source_rows;                 /* that each source has room for */\n"
    "} moer_slots_args;\n",
    NULL};
static const char *const moer_source_2[] = { /* scan.h */
    "/*\n"
    "  scan.h: running sums over the lanes of a warp. Sums over a block are the kernels' own.\n"
    "*/\n"
    "\n"
    "/* The sum of the lanes up to this one. */\n"
    "DEVICE u32 scan_warp(u32 value) {\n"
    "#pragma unroll\n"
    "    for (u32 delta = 1; delta < 32; delta *= 2) {\n"
    "        const u32 other = warp_shuffle_up(value, delta);\n"
    "        if (lane_index() >= delta) value += other;\n"
    "    }\n"
    "    return value;\n"
    "}\n",
    NULL};
static const char *const moer_source_3[] = { /* tokens.h */
    "/*\n"
    "  tokens.h: which rows of a batch are tokens and which are padding. Nothing else.\n"
    "*/\n"
    "/* The number of tokens that aren't padding, as it is read from the device, all where none is given. It may be negative or too large:\n"
    "   a token isn't padding if its index, as an int, is smaller. For who has something to do while it comes. */\n"
    "DEVICE int load_valid_tokens(const int *num_valid_tokens, u32 num_tokens) { return num_valid_tokens \? (int)load_4(num_valid_tokens) : (int)num_tokens; }\n"
    "/* The same within 0 and num_tokens. */\n"
    "DEVICE u32 valid_tokens(const int *num_valid_tokens, u32 num_tokens) {\n"
    "    const int valid = load_valid_tokens(num_valid_tokens, num_tokens);\n"
    "    return valid < 0 \? 0 : (u32)valid < num_tokens \? (u32)valid : num_tokens;\n"
    "}\n",
    NULL};
static const char *const moer_source_4[] = { /* placement.h */
    "/*\n"
    "  placement.h: which physical expert serves an expert. Which of those are local is the maps' business.\n"
    "\n"
    "  Constants: where an expert map [E, MAP_COLUMNS] is given, MAP_COLUMNS and PLACED_EXPERTS: identity and skip experts, from\n"
    "  there on, are nowhere.\n"
    "*/\n"
    "#ifndef MAP_COLUMNS\n"
    "#define MAP_COLUMNS 0\n"
    "#endif\n"
    "\n"
    "/* The physical expert that serves expert `id` of a token: the token takes its turn among the replicas. 0xffffffff when\n"
    "   there is none. */\n"
    "DEVICE u32 physical_expert(const int *expert_map, u32 id, u32 token) {\n"
    "#if MAP_COLUMNS\n"
    "    if (id >= PLACED_EXPERTS) return 0xffffffffu;\n"
    "    const int *replicas = expert_map + id * MAP_COLUMNS;\n"
    "    u32 count = 0;\n"
    "#pragma unroll 1\n"
    "    while (count < MAP_COLUMNS && replicas[count] >= 0) count++;\n"
    "    return count \? (u32)replicas[token % count] : 0xffffffffu;\n"
    "#else\n"
    "    return id;\n"
    "#endif\n"
    "}\n",
    NULL};
static const char *const moer_source_5[] = { /* scores.h */
    "/*\n"
    "  scores.h: the arithmetic of scores and their order, one text for the kernels and for the CPU backend, so that both give\n"
    "  the same bits. Everything is a single IEEE f32 operation in a fixed order; where a product feeds a sum, MOER_FMA says so,\n"
    "  because a host compiler may otherwise fuse the two or not. Loops over experts and reductions don't belong here.\n"
    "*/\n"
    "#ifdef MOER_HOST\n"
    "#define MOER_SCORE static\n"
    "#define MOER_FMA(a, b, c) fmaf(a, b, c)\n"
    "#define MOER_ADD(a, b) ((a) + (b))\n"
    "#define MOER_MUL(a, b) ((a) * (b))\n"
    "#define MOER_DIV(a, b) ((a) / (b))\n"
    "#define MOER_SQRT(a) sqrtf(a)\n"
    "#define MOER_RECIPROCAL(a) (1.0f / (a))\n"
    "#define MOER_MAX(a, b) ((a) > (b) \? (a) : (b)) /* b where a is NaN */\n"
    "#define MOER_MIN(a, b) ((a) < (b) \? (a) : (b))\n"
    "static unsigned int moer_f32_bits(float f) { unsigned int u; memcpy(&u, &f, sizeof u); return u; }\n"
    "static float moer_f32_from_bits(unsigned int u) { float f; memcpy(&f, &u, sizeof f); return f; }\n"
    "#else\n"
    "#define MOER_SCORE DEVICE\n"
    "#define MOER_FMA(a, b, c) f32_fma(a, b, c)\n"
    "#define MOER_ADD(a, b) f32_add(a, b)\n"
    "#define MOER_MUL(a, b) f32_mul(a, b)\n"
    "#define MOER_DIV(a, b) f32_div(a, b)\n"
    "#define MOER_SQRT(a) f32_sqrt(a)\n"
    "#define MOER_RECIPROCAL(a) f32_reciprocal(a)\n"
    "#define MOER_MAX(a, b) f32_max(a, b)\n"
    "#define MOER_MIN(a, b) f32_min(a, b)\n"
    "#define moer_f32_bits f32_bits\n"
    "#define moer_f32_from_bits f32_from_bits\n"
    "#endif\n"
    "\n"
    "#define MOER_INFINITY_BITS 0x7f800000u\n"
    "#define MOER_LARGEST_F32 3.40282347e38f\n"
    "#define MOER_LARGEST_F16 65504.0f\n"
    "#define MOER_LARGEST_BF16 3.38953139e38f\n"
    "#define MOER_ZERO_KEY 0x80000000u /* moer_order_key(0) */\n"
    "#define MOER_LOWEST_KEY 0x007fffffu /* moer_order_key(-inf) */\n"
    "\n"
    "/* A number that orders as the float does, with NaN as -inf and -0 as +0. No float gives 0. The host looks at bits, so that a program\n"
    "   compiled for fast rather than IEEE arithmetic selects alike. */\n"
    "MOER_SCORE unsigned int moer_order_key(float value) {\n"
    "#ifdef MOER_HOST\n"
    "    unsigned int bits = moer_f32_bits(value);\n"
    "    if ((bits & 0x7fffffffu) > MOER_INFINITY_BITS) return MOER_LOWEST_KEY;\n"
    "    if (bits == 0x80000000u) bits = 0;\n"
    "#else\n"
    "    const unsigned int bits = moer_f32_bits(MOER_ADD(MOER_MAX(value, moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS)), 0.0f));\n"
    "#endif\n"
    "    return bits ^ ((0u - (bits >> 31)) | 0x80000000u);\n"
    "}\n"
    "\n"
    "MOER_SCORE float moer_key_value(unsigned int key) {\n"
    "    return moer_f32_from_bits((key & 0x80000000u) \? key & 0x7fffffffu : ~key);\n"
    "}\n"
    "\n"
    "/* e^x within 1.3 units of 2^-24, 0 for -inf, +inf from 88.73 on. NaN isn't expected.\n"
    "   x = n ln2 + r; e^r = 1 + r + r^2 q(r), q fitted for the least relative error on |r| <= ln2 / 2. No branch: at the limits of x the two\n"
    "   factors give 0 and +inf by themselves. */\n"
    "MOER_SCORE float moer_exp(float x) {\n"
    "    float r, q, n;\n"
    "    unsigned int exponents;\n"
    "    x = MOER_MIN(MOER_MAX(x, -104.0f), 89.0f);\n"
    "    r = MOER_FMA(x, 1.44269504f, 12582912.0f); /* 1.5 * 2^23: what is left of a fraction is rounded to an integer, in the low bits */\n"
    "    exponents = moer_f32_bits(r) - (0x4b400000u - 254u); /* n + 2 * 127 */\n"
    "#ifdef MOER_HOST\n"
    "    n = (float)((int)exponents - 254); /* the same, also where a compiler may reorder sums */\n"
    "#else\n"
    "    n = MOER_ADD(r, -12582912.0f);\n"
    "#endif\n"
    "    r = MOER_FMA(-n, 0.693359375f, x);\n"
    "    r = MOER_FMA(-n, -2.12194440e-4f, r);\n"
    "    q = MOER_FMA(1.38145371e-3f, r, 8.36874545e-3f);\n"
    "    q = MOER_FMA(q, r, 4.16683927e-2f);\n"
    "    q = MOER_FMA(q, r, 1.66665211e-1f);\n"
    "    q = MOER_FMA(q, r, 4.99999940e-1f);\n"
    "    q = MOER_FMA(q, r, 1.0f);\n"
    "    q = MOER_FMA(q, r, 1.0f);\n"
    "    /* two factors: 2^n itself may be no normal float */\n"
    "    q = MOER_MUL(q, moer_f32_from_bits((exponents >> 1) << 23));\n"
    "    return MOER_MUL(q, moer_f32_from_bits((exponents - (exponents >> 1)) << 23));\n"
    "}\n"
    "\n"
    "MOER_SCORE float moer_sigmoid(float x) {\n"
    "    return MOER_RECIPROCAL(MOER_ADD(1.0f, moer_exp(-x)));\n"
    "}\n"
    "\n"
    "/* log(1 + e^x) within 4 units of 2^-24: max(x, 0) + log(1 + t) with t = e^-|x|. With u = t / (2 + t) the\n",
    "   logarithm is 2 atanh(u) = 2u + 2u z q(z), z = u^2 up to 1/9, q fitted for the least relative error. */\n"
    "MOER_SCORE float moer_softplus(float x) {\n"
    "    const float t = moer_exp(x < 0.0f \? x : -x);\n"
    "    const float u = MOER_DIV(t, MOER_ADD(2.0f, t)), z = MOER_MUL(u, u);\n"
    "    float q = MOER_FMA(1.40059933e-1f, z, 1.40009031e-1f);\n"
    "    q = MOER_FMA(q, z, 2.00107634e-1f);\n"
    "    q = MOER_FMA(q, z, 3.33332092e-1f);\n"
    "    q = MOER_FMA(MOER_MUL(q, z), u, u);\n"
    "    return MOER_FMA(2.0f, q, x > 0.0f \? x : 0.0f);\n"
    "}\n"
    "\n"
    "/* Where e^x is the whole sum, its root is taken first: it stays a normal number for longer. */\n"
    "MOER_SCORE float moer_sqrt_softplus(float x) { return x < -20.0f \? moer_exp(MOER_MUL(0.5f, x)) : MOER_SQRT(moer_softplus(x)); }\n"
    "\n"
    "/* log(sigmoid(x)), with the error of moer_softplus. */\n"
    "MOER_SCORE float moer_log_sigmoid(float x) { return -moer_softplus(-x); }\n"
    "\n"
    "/* tanh(x) within 3 units of 2^-24: x + x z q(z), z = x^2, near 0 (q fitted likewise); 1 - 2 / (e^2|x| + 1) elsewhere. */\n"
    "MOER_SCORE float moer_tanh(float x) {\n"
    "    const float magnitude = x < 0.0f \? -x : x;\n"
    "    float q;\n"
    "    if (magnitude < 0.625f) {\n"
    "        const float z = MOER_MUL(x, x);\n"
    "        q = MOER_FMA(-5.70498640e-3f, z, 2.06390861e-2f);\n"
    "        q = MOER_FMA(q, z, -5.37397154e-2f);\n"
    "        q = MOER_FMA(q, z, 1.33314416e-1f);\n"
    "        q = MOER_FMA(q, z, -3.33332807e-1f);\n"
    "        return MOER_FMA(MOER_MUL(q, z), x, x);\n"
    "    }\n"
    "    q = MOER_ADD(1.0f, -MOER_DIV(2.0f, MOER_ADD(moer_exp(MOER_ADD(magnitude, magnitude)), 1.0f)));\n"
    "    return x < 0.0f \? -q : q;\n"
    "}\n"
    "\n"
    "MOER_SCORE float moer_softcap(float x, float cap) { return MOER_MUL(cap, moer_tanh(MOER_DIV(x, cap))); }\n"
    "\n"
    "/* exp(x - largest), the numerator of a softmax. Defined where the plain difference is NaN: values equal to an infinite\n"
    "   largest count 1, and -inf always counts 0. */\n"
    "MOER_SCORE float moer_softmax_term(float x, float largest) {\n"
    "    float distance = MOER_ADD(x, -largest);\n"
    "    if (x == largest) distance = 0.0f;\n"
    "    if (moer_f32_bits(x) == (0x80000000u | MOER_INFINITY_BITS)) distance = -104.0f;\n"
    "    return moer_exp(distance);\n"
    "}\n"
    "\n"
    "/* The same among experts that SparseMixer keeps beside the largest; others count 0. Where the quotient is NaN (0 / 0, or an\n"
    "   infinite largest) the expert is kept. */\n"
    "MOER_SCORE float moer_sparse_mixer_term(float x, float largest, float threshold) {\n"
    "    const float magnitude = x < 0.0f \? -x : x;\n"
    "    const float distance = MOER_DIV(MOER_ADD(largest, -x), magnitude > largest \? magnitude : largest);\n"
    "    return distance > threshold \? 0.0f : moer_softmax_term(x, largest);\n"
    "}\n"
    "\n"
    "/* numerator / denominator, 0 where the denominator is 0. */\n"
    "MOER_SCORE float moer_share(float numerator, float denominator) {\n"
    "    return denominator == 0.0f \? 0.0f : MOER_DIV(numerator, denominator);\n"
    "}\n"
    "\n"
    "/* The nearest float within plus and minus `limit`; NaN gives 0. */\n"
    "MOER_SCORE float moer_bounded(float x, float limit) {\n"
    "    if ((moer_f32_bits(x) & 0x7fffffffu) > MOER_INFINITY_BITS) return 0.0f;\n"
    "    return x > limit \? limit : x < -limit \? -limit : x;\n"
    "}\n"
    "\n"
    "/* A score as a weight: -inf, which nobody can select, weighs nothing; +inf weighs as much as a float can. */\n"
    "MOER_SCORE float moer_score_weight(float score) {\n"
    "    return moer_f32_bits(score) == (0x80000000u | MOER_INFINITY_BITS) \? 0.0f : moer_bounded(score, MOER_LARGEST_F32);\n"
    "}\n",
    NULL};
static const char *const moer_source_6[] = { /* activations.h */
    "/*\n"
    "  activations.h: what stands between an expert's two matmuls: clamps, activation, and the product of gate and up; one text\n"
    "  for the kernels and for the CPU backend, so that both give the same bits. As in scores.h everything is a single IEEE f32\n"
    "  operation in a fixed order, and no rounded product feeds a sum that a compiler could fuse. Include scores.h first.\n"
    "  Matmuls and biases don't belong here.\n"
    "*/\n"
    "#define MOER_SILU 0 /* values of moe_route_activation */\n"
    "#define MOER_GELU_TANH 1\n"
    "#define MOER_GELU_ERF 2\n"
    "#define MOER_RELU2 3\n"
    "#define MOER_SITU 4\n"
    "#define MOER_CLAMP_NONE 0\n"
    "#define MOER_CLAMP_BEFORE 1 /* moe_route_clamp_position + 1 */\n"
    "#define MOER_CLAMP_AFTER 2\n"
    "\n"
    "/* The normal distribution (1 + erf(x / sqrt(2))) / 2, relative error within 7 units of 2^-24 from x = -12.9 on, below which\n"
    "   the result is no normal float. With a = |x|, t = 1 / (1 + 0.3 a): the lower tail is e^(-a^2 / 2) t p(t), p fitted for the least relative error up\n"
    "   to a = 14.5, where the tail is below every float. The part of a^2 that its rounding loses goes back in as a factor. */\n"
    "MOER_SCORE float moer_normal_cdf(float x) {\n"
    "    const float a = x < 0.0f \? -x : x;\n"
    "    float t, p, square, lost, density;\n"
    "    if (a > 14.5f) return x < 0.0f \? 0.0f : 1.0f;\n"
    "    t = MOER_RECIPROCAL(MOER_FMA(0.3f, a, 1.0f));\n"
    "    p = MOER_FMA(-2.06234697e-2f, t, 1.12435617e-1f);\n"
    "    p = MOER_FMA(p, t, -2.28213608e-1f);\n"
    "    p = MOER_FMA(p, t, 1.91784531e-1f);\n"
    "    p = MOER_FMA(p, t, -7.94234946e-2f);\n"
    "    p = MOER_FMA(p, t, 9.61568356e-2f);\n"
    "    p = MOER_FMA(p, t, 7.83896521e-2f);\n"
    "    p = MOER_FMA(p, t, 1.10235423e-1f);\n"
    "    p = MOER_FMA(p, t, 1.19571812e-1f);\n"
    "    p = MOER_FMA(p, t, 1.19686693e-1f);\n"
    "    p = MOER_MUL(p, t);\n"
    "    square = MOER_MUL(a, a);\n"
    "    lost = MOER_FMA(a, a, -square);\n"
    "    density = MOER_MUL(moer_exp(MOER_MUL(-0.5f, square)), MOER_FMA(-0.5f, lost, 1.0f));\n"
    "    return x < 0.0f \? MOER_MUL(density, p) : MOER_FMA(-density, p, 1.0f);\n"
    "}\n"
    "\n"
    "/* The activation of x. `alpha` is SILU's, or SITU's beta. A NaN stays one.\n"
    "   SILU x sigmoid(alpha x); GELU_TANH x (1 + tanh(u)) / 2 = x sigmoid(2u), 2u = sqrt(8 / pi) (x + 0.044715 x^3): relative error\n"
    "   within 4 + 3 |v| units of 2^-24 from v = -87 on, v the argument of sigmoid, whose rounding is what v enters by.\n"
    "   SITU alpha tanh(x / alpha) sigmoid(x): within 9 + 3 |x| units from x = -87 on.\n"
    "   GELU_ERF x moer_normal_cdf(x): within 8 units from x = -12.9 on. Below these x the result is 1e-35 |x| at most.\n"
    "   RELU2 is rounded once. */\n"
    "MOER_SCORE float moer_activation(int activation, float x, float alpha) {\n"
    "    if (x != x) return x;\n"
    "    if (activation == MOER_SILU) return MOER_MUL(x, moer_sigmoid(MOER_MUL(alpha, x)));\n"
    "    if (activation == MOER_GELU_TANH) return MOER_MUL(x, moer_sigmoid(MOER_MUL(x, MOER_FMA(7.13548163e-2f, MOER_MUL(x, x), 1.59576912f))));\n"
    "    if (activation == MOER_GELU_ERF) return MOER_MUL(x, moer_normal_cdf(x));\n"
    "    if (activation == MOER_SITU) return MOER_MUL(moer_softcap(x, alpha), moer_sigmoid(x));\n"
    "    return x > 0.0f \? MOER_MUL(x, x) : 0.0f;\n"
    "}\n"
    "\n"
    "/* The gate's part of h, or all of it in experts without gate. */\n"
    "MOER_SCORE float moer_activated_gate(int activation, int clamp, float gate, float alpha, float limit) {\n"
    "    float value = gate;\n"
    "    if (clamp == MOER_CLAMP_BEFORE && value > limit) value = limit;\n"
    "    value = moer_activation(activation, value, alpha);\n"
    "    if (clamp == MOER_CLAMP_AFTER && value > limit) value = limit;\n"
    "    return value;\n"
    "}\n"
    "\n"
    "/* up's part of h. `beta` is SITU's for up, 0: none. */\n"
    "MOER_SCORE float moer_shifted_up(int clamp, float up, float beta, float offset, float limit) {\n"
    "    float value = up;\n"
    "    if (clamp != MOER_CLAMP_NONE && value > limit) value = limit;\n"
    "    if (clamp != MOER_CLAMP_NONE && value < -limit) value = -limit;\n"
    "    if (beta != 0.0f && value == value) value = moer_softcap(value, beta);\n"
    "    return MOER_ADD(value, offset);\n"
    "}\n",
    NULL};
static const char *const moer_source_7[] = { /* select.h */
    "/*\n"
    "  select.h: the router: a warp chooses the k best experts of a token by its logits [E + S], and then one warp or another computes their\n"
    "  weights and those of the S shared experts. The formula is in moe_route.h, above moe_route_router. The maps don't belong here.\n"
    "\n"
    "  Constants: E, K, LOGITS and WEIGHTS (dtypes), SCORE, BIAS (selection bias given), WEIGHT, RENORMALIZE, and those below\n"
    "  where they aren't 0; values as in moe_route.h.\n"
    "\n"
    "  Each lane holds the experts lane, lane + 32, ... as order-preserving integers. All orders are by key, then by ascending id:\n"
    "  the one that moe_route.h defines, ties included.\n"
    "\n"
    "  Three to 16 experts are chosen by counting. Of the largest keys of 16 (or 32) groups of lanes, the K-th is a bound that at least K\n"
    "  experts reach, and few more: 11 for K 8, 15 for K 10. Those go to shared memory; a lane then counts how many come before its own,\n"
    "  which is its slot. Every step is a count over what all lanes read together, so that nothing waits for the slot before.\n"
    "  Where more than 32 experts reach the bound (many equal ones), and for other numbers of slots, k rounds take the largest one by one,\n"
    "  by two redux each.\n"
    "\n"
    "  Floating-point sums run over the lane's own experts in ascending order, then over the lanes by an xor butterfly: an order\n"
    "  that the CPU backend repeats, so that both agree to the last bit.\n"
    "*/\n"
    "#ifndef SHARED_EXPERTS\n"
    "#define SHARED_EXPERTS 0 /* S */\n"
    "#endif\n"
    "#ifndef SKIP_EXPERTS\n"
    "#define SKIP_EXPERTS 0\n"
    "#endif\n"
    "#ifndef LOGIT_BIAS\n"
    "#define LOGIT_BIAS 0 /* given */\n"
    "#endif\n"
    "#ifndef SOFTCAP\n"
    "#define SOFTCAP 0 /* given */\n"
    "#endif\n"
    "#ifndef GROUP_RULE\n"
    "#define GROUP_RULE 0\n"
    "#define GROUPS 1\n"
    "#define TOPK_GROUPS 1\n"
    "#define DROPPED 0\n"
    "#endif\n"
    "#ifndef IDS\n"
    "#define IDS 0\n"
    "#endif\n"
    "#ifndef EXPERT_SCALE\n"
    "#define EXPERT_SCALE 0 /* given */\n"
    "#endif\n"
    "#ifndef DIVIDE_BY_K\n"
    "#define DIVIDE_BY_K 0\n"
    "#endif\n"
    "\n"
    "#define EXPERTS_PER_LANE ((E + 31) / 32)\n"
    "#define SLOTS (K + SHARED_EXPERTS) /* slots 0 to K - 1 hold selected experts, the rest shared ones */\n"
    "#define SLOTS_PER_LANE ((SLOTS + 31) / 32)\n"
    "#define GROUP_SIZE (E / GROUPS)\n"
    "#define GROUPS_PER_LANE ((GROUPS + 31) / 32)\n"
    "\n"
    "#define SOFTMAX_SCORE (SCORE == 0)\n"
    "#define SPARSE_MIXER (SCORE == 4)\n"
    "#define DROPS_GROUPS (GROUP_RULE == 1 || GROUP_RULE == 2)\n"
    "/* Experts are ordered by their scores; otherwise by their logits. */\n"
    "#define ORDER_BY_SCORE (BIAS || DROPS_GROUPS || SCORE == 5)\n"
    "#define NEEDS_SCORE_SCALE (SOFTMAX_SCORE && ((IDS == 0 && ORDER_BY_SCORE) || WEIGHT == 0))\n"
    "\n"
    "/* Not by counting: for more slots; for so few that rounds are shorter, as measured on an H200; where a round depends on the one before. */\n"
    "#define IN_ROUNDS (K > 16 || SLOTS > 32 || K <= 2 || (K <= 4 && E <= 128) || SPARSE_MIXER || GROUP_RULE == 3)\n"
    "/* Groups of lanes whose largest keys give the bound. */\n"
    "#define BOUND_GROUPS (K <= 10 \? 16 : 32)\n"
    "/* Candidates that a lane looks at together: usually all. */\n"
    "#define RANKED_TOGETHER (EXPERTS_PER_LANE == 1 \? 32 : K <= 4 || E > 512 \? 8 : 16)\n"
    "/* Chosen experts are left in shared memory, so that the weights of several tokens are one warp's work, SLOT_LANES lanes each. */\n"
    "#define LEFT (IDS == 0 && K <= 16 && SLOTS <= 32 && !SPARSE_MIXER)\n"
    "#define SLOT_LANES (!LEFT || SLOTS > 16 \? 32 : SLOTS > 8 \? 16 : SLOTS > 4 \? 8 : SLOTS > 2 \? 4 : SLOTS)\n"
    "#define TOKENS_A_WARP (32 / SLOT_LANES)\n"
    "\n"
    "/* Words of shared memory for a token: largest keys; candidates, two words each; slots, likewise; what the softmax needs to know. */\n"
    "#define CANDIDATES_AT 32u\n"
    "#define SLOTS_AT (IN_ROUNDS \? 0u : CANDIDATES_AT + 64)\n"
    "#define SCALE_AT (SLOTS_AT + 32)\n"
    "#define SELECT_WORDS (LEFT \? SCALE_AT + 4 : 4)\n"
    "\n"
    "/* Where the order isn't that of logits, scores take more than all the rest; other warps may compute them ahead, 32 experts at a time,\n"
    "   and the scores of groups of 32 with them. The words of a token are then its keys, which make room for those above, and its groups'. */\n"
    "#ifdef LOCAL_EXPERTS\n",
    "#define AHEAD (ORDER_BY_SCORE && !SOFTMAX_SCORE && IDS == 0 && E <= 384 && LOCAL_EXPERTS <= 512) /* with room for route.cu's maps */\n"
    "#else\n"
    "#define AHEAD 0 /* topk.cu has enough tokens for every warp */\n"
    "#endif\n"
    "#define GROUPS_AHEAD (AHEAD && DROPS_GROUPS && GROUP_SIZE == 32)\n"
    "#define GROUPS_AT (EXPERTS_PER_LANE * 32 > SELECT_WORDS \? EXPERTS_PER_LANE * 32 : SELECT_WORDS)\n"
    "#define TOKEN_WORDS (AHEAD \? GROUPS_AT + 16 : SELECT_WORDS)\n"
    "\n"
    "/* What the softmax of one expert needs to know of all of them. */\n"
    "struct score_scale {\n"
    "    float largest, sum;\n"
    "};\n"
    "\n"
    "/* Chosen experts. Slot j of the token is slot j / 32 of lane j % 32; but after counting lanes have experts of any slot, or none:\n"
    "   K or more. */\n"
    "struct selection {\n"
    "    u32 slot[SLOTS_PER_LANE];\n"
    "    u32 id[SLOTS_PER_LANE];  /* out of range where a given id is */\n"
    "    u32 key[SLOTS_PER_LANE]; /* by which it was selected */\n"
    "    float mixer_weight[SLOTS_PER_LANE];\n"
    "    score_scale scale;\n"
    "};\n"
    "\n"
    "DEVICE float load_logit(const void *logits, u64 index) {\n"
    "#if LOGITS == 1\n"
    "    return f32_from_bits(load_4((const u32 *)logits + index));\n"
    "#elif LOGITS == 2\n"
    "    return f16_to_f32(load_2((const u16 *)logits + index));\n"
    "#else\n"
    "    return bf16_to_f32(load_2((const u16 *)logits + index));\n"
    "#endif\n"
    "}\n"
    "\n"
    "#define LARGEST_WEIGHT (WEIGHTS == 1 \? MOER_LARGEST_F32 : WEIGHTS == 2 \? MOER_LARGEST_F16 : MOER_LARGEST_BF16)\n"
    "\n"
    "DEVICE void store_weight(void *weights, u64 index, float weight) {\n"
    "#if WEIGHTS == 1\n"
    "    ((float *)weights)[index] = weight;\n"
    "#elif WEIGHTS == 2\n"
    "    ((u16 *)weights)[index] = f32_to_f16(weight);\n"
    "#else\n"
    "    ((u16 *)weights)[index] = f32_to_bf16(weight);\n"
    "#endif\n"
    "}\n"
    "\n"
    "/* l[e] as an order key, from what was loaded; NaN is -inf. */\n"
    "DEVICE u32 loaded_key(const moer_route_args &a, u32 e, float logit) {\n"
    "#if LOGIT_BIAS\n"
    "    logit = f32_add(logit, a.logit_bias[e]);\n"
    "#endif\n"
    "#if SOFTCAP\n"
    "    logit = moer_softcap(moer_key_value(moer_order_key(logit)), a.softcap);\n"
    "#endif\n"
    "    return moer_order_key(logit);\n"
    "}\n"
    "DEVICE u32 logit_key(const moer_route_args &a, u64 row, u32 e) { return loaded_key(a, e, load_logit(a.logits, row + e)); }\n"
    "\n"
    "DEVICE float warp_sum(float value) {\n"
    "#pragma unroll\n"
    "    for (u32 mask = 16; mask; mask >>= 1) value = f32_add(value, f32_from_bits(warp_shuffle_xor(f32_bits(value), mask)));\n"
    "    return value;\n"
    "}\n"
    "\n"
    "/* The sum over the slots of a token, and the largest of its keys, where lanes without a slot have 0. */\n"
    "DEVICE float slots_sum(float value) {\n"
    "#pragma unroll\n"
    "    for (u32 mask = 16; mask; mask >>= 1)\n"
    "        if (mask < SLOTS) value = f32_add(value, f32_from_bits(warp_shuffle_xor(f32_bits(value), mask)));\n"
    "    return value;\n"
    "}\n"
    "DEVICE u32 slots_max(u32 key) {\n"
    "#pragma unroll\n"
    "    for (u32 mask = 16; mask && SLOT_LANES < 32; mask >>= 1)\n"
    "        if (mask < SLOT_LANES) {\n"
    "            const u32 other = warp_shuffle_xor(key, mask);\n"
    "            key = other > key \? other : key;\n"
    "        }\n"
    "    return SLOT_LANES < 32 \? key : warp_max(key);\n"
    "}\n"
    "\n"
    "/* The lowest id that has the warp's largest key; id i * 32 + lane is key i of a lane. */\n"
    "template <u32 N>\n"
    "DEVICE u32 find_best(const u32 (&key)[N], u32 &best) {\n"
    "    best = key[0];\n"
    "#pragma unroll\n"
    "    for (u32 i = 1; i < N; i++) best = key[i] > best \? key[i] : best;\n"
    "    best = warp_max(best);\n"
    "    if constexpr (N == 1) { /* the lowest lane */\n"
    "        const u32 owners = warp_ballot(key[0] == best);\n"
    "        return popcount(~owners & (owners - 1));\n"
    "    } else {\n"
    "        u32 id = 0xffffffffu;\n"
    "#pragma unroll\n"
    "        for (u32 i = N; i-- > 0;)\n"
    "            if (key[i] == best) id = i * 32 + lane_index();\n"
    "        return warp_min(id);\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE float score_of(float x, const score_scale &s) {\n"
    "#if SCORE == 0\n"
    "    return moer_share(moer_softmax_term(x, s.largest), s.sum);\n"
    "#elif SCORE == 1\n"
    "    return moer_sigmoid(x);\n"
    "#elif SCORE == 2\n"
    "    return moer_sqrt_softplus(x);\n"
    "#elif SCORE == 5\n"
    "    return moer_key_value(moer_order_key((float)(SCORE_EXPRESSION)));\n"
    "#else\n"
    "    return x;\n"
    "#endif\n"
    "}\n"
    "\n"
    "#if DROPS_GROUPS\n",
    "/* The score of a group, as an order key, from the best two keys that each lane has of it. */\n"
    "DEVICE u32 group_score(u32 best, u32 second) {\n"
    "    const u32 largest = warp_max(best);\n"
    "    if (GROUP_RULE != 2) return largest;\n"
    "    const u32 owners = warp_ballot(best == largest), lowest_owner = owners & (0u - owners);\n"
    "    const u32 rest = warp_max((1u << lane_index()) == lowest_owner \? second : best); /* without one of the best */\n"
    "    return moer_order_key(f32_add(moer_key_value(largest), moer_key_value(rest)));\n"
    "}\n"
    "\n"
    "/* The scores of all groups, as order keys: that of group s * 32 + lane; 0: no group. */\n"
    "DEVICE void score_groups(const u32 (&key)[EXPERTS_PER_LANE], u32 (&group_key)[GROUPS_PER_LANE]) {\n"
    "    const u32 lane = lane_index();\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < GROUPS_PER_LANE; s++) group_key[s] = 0;\n"
    "#if GROUP_SIZE % 32 == 0 /* a group is a few of every lane's keys, the same ones: nothing waits */\n"
    "#pragma unroll\n"
    "#else\n"
    "#pragma unroll 1\n"
    "#endif\n"
    "    for (u32 g = 0; g < GROUPS; g++) {\n"
    "        u32 best = 0, second = 0;\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {\n"
    "            if (GROUP_SIZE % 32 == 0 && i / (GROUP_SIZE / 32 \? GROUP_SIZE / 32 : 1) != g) continue;\n"
    "            const u32 k = GROUP_SIZE % 32 == 0 || (i * 32 + lane < E && (i * 32 + lane) / GROUP_SIZE == g) \? key[i] : 0;\n"
    "            second = k > best \? best : k > second \? k : second;\n"
    "            best = k > best \? k : best;\n"
    "        }\n"
    "        const u32 score = group_score(best, second);\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < GROUPS_PER_LANE; s++)\n"
    "            if (s * 32 + lane == g) group_key[s] = score;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Marks the experts of groups that are dropped, in keys that order all experts. */\n"
    "DEVICE void drop_groups(u32 (&key)[EXPERTS_PER_LANE], u32 (&group_key)[GROUPS_PER_LANE]) {\n"
    "    const u32 lane = lane_index();\n"
    "    u32 kept[GROUPS_PER_LANE]; /* bit masks of the groups that stay */\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < GROUPS_PER_LANE; s++) kept[s] = 0;\n"
    "#if GROUPS <= 16 /* a lane counts the groups that come before its own */\n"
    "    u32 before = 0;\n"
    "#pragma unroll\n"
    "    for (u32 g = 0; g < GROUPS; g++) {\n"
    "        const u32 other = warp_shuffle(group_key[0], g);\n"
    "        before += other > group_key[0] || (other == group_key[0] && g < lane);\n"
    "    }\n"
    "    kept[0] = warp_ballot(lane < GROUPS && before < TOPK_GROUPS);\n"
    "#else\n"
    "#pragma unroll 1\n"
    "    for (u32 j = 0; j < TOPK_GROUPS; j++) {\n"
    "        u32 best;\n"
    "        const u32 id = find_best(group_key, best);\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < GROUPS_PER_LANE; s++) {\n"
    "            if (s * 32 + lane == id) group_key[s] = 0;\n"
    "            if (s == id / 32) kept[s] |= 1u << (id & 31);\n"
    "        }\n"
    "    }\n"
    "#endif\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {\n"
    "        const u32 e = i * 32 + lane, g = e / GROUP_SIZE;\n"
    "        u32 word = 0;\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < GROUPS_PER_LANE; s++)\n"
    "            if (s == g / 32) word = kept[s];\n"
    "        if (e < E && !(word >> (g & 31) & 1u)) key[i] = DROPPED \? MOER_ZERO_KEY : MOER_LOWEST_KEY;\n"
    "    }\n"
    "}\n"
    "#endif\n"
    "\n"
    "#if IDS == 0 && !IN_ROUNDS\n"
    "/* Chooses by counting, `at` being where the warp's words begin. An expert that is chosen is in some lane then, with its slot. False\n"
    "   where too many experts reach the bound. */\n"
    "template <class Words>\n"
    "DEVICE bool choose_by_counting(Words &words, u32 at, const u32 (&key)[EXPERTS_PER_LANE], selection &chosen) {\n"
    "    const u32 lane = lane_index();\n"
    "    u32x2 own = {{~lane, key[0]}}; /* as one number, the larger comes first */\n"
    "#if EXPERTS_PER_LANE == 1\n"
    "    const bool more = false;\n"
    "    shared_store_2(words, at + CANDIDATES_AT + lane * 2, own);\n"
    "    warp_barrier();\n"
    "#else\n"
    "    u32 largest = key[0], before[2] = {0, 0};\n"
    "#pragma unroll\n"
    "    for (u32 i = 1; i < EXPERTS_PER_LANE; i++) largest = key[i] > largest \? key[i] : largest;\n"
    "    if (BOUND_GROUPS == 16) {\n"
    "        const u32 other = warp_shuffle_xor(largest, 16);\n",
    "        largest = other > largest \? other : largest;\n"
    "    }\n"
    "    own.v[0] = own.v[1] = 0; /* what comes after all candidates, where there are no more */\n"
    "    shared_store_2(words, at + CANDIDATES_AT + lane * 2, own);\n"
    "    if (lane < BOUND_GROUPS) words[at + lane] = largest;\n"
    "    warp_barrier();\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < BOUND_GROUPS; i += 4) {\n"
    "        const auto other = shared_load_4(words, at + i);\n"
    "        before[0] = count_above(before[0], (u32)other.x, ~largest);\n"
    "        before[1] = count_above(before[1], (u32)other.y, ~largest);\n"
    "        before[0] = count_above(before[0], (u32)other.z, ~largest);\n"
    "        before[1] = count_above(before[1], (u32)other.w, ~largest);\n"
    "    }\n"
    "    const u32 bound = warp_min(before[0] + before[1] < K \? largest : 0xffffffffu), not_less = ~(bound - 1);\n"
    "\n"
    "    u32 counts[2] = {0, 0}, position = 0;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) counts[i % 2] = count_above(counts[i % 2], key[i], not_less);\n"
    "    const u32 count = counts[0] + counts[1];\n"
    "#pragma unroll\n"
    "    for (u32 bit = 0; EXPERTS_PER_LANE >> bit; bit++) position += popcount(warp_ballot(count >> bit & 1) & ((1u << lane) - 1)) << bit;\n"
    "    const bool more = warp_ballot(position + count > RANKED_TOGETHER);\n"
    "    if (warp_ballot(position + count > 32)) return false;\n"
    "    u32 to = at + CANDIDATES_AT + position * 2;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++)\n"
    "        if (key[i] >= bound) {\n"
    "            const u32x2 candidate = {{~(i * 32 + lane), key[i]}};\n"
    "            shared_store_2(words, to, candidate);\n"
    "            to += 2;\n"
    "        }\n"
    "    warp_barrier();\n"
    "    const auto candidate = shared_load_2(words, at + CANDIDATES_AT + lane * 2);\n"
    "    own.v[0] = (u32)candidate.x;\n"
    "    own.v[1] = (u32)candidate.y;\n"
    "#endif\n"
    "    u32 slots[2] = {0, 0};\n"
    "#pragma unroll 1\n"
    "    for (u32 first = 0; first == 0 || (more && first < 32); first += RANKED_TOGETHER)\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < RANKED_TOGETHER; i += 2) {\n"
    "            const auto two = shared_load_4(words, at + CANDIDATES_AT + (first + i) * 2);\n"
    "            slots[0] = count_above_2(slots[0], (u32)two.y, (u32)two.x, ~own.v[1], ~own.v[0]);\n"
    "            slots[1] = count_above_2(slots[1], (u32)two.w, (u32)two.z, ~own.v[1], ~own.v[0]);\n"
    "        }\n"
    "    chosen.id[0] = ~own.v[0];\n"
    "    chosen.key[0] = own.v[1];\n"
    "    chosen.slot[0] = own.v[1] \? slots[0] + slots[1] : K;\n"
    "    return true;\n"
    "}\n"
    "#endif\n"
    "\n"
    "/* Chooses in k rounds. */\n"
    "DEVICE void choose_in_rounds(const moer_route_args &a, u32 (&key)[EXPERTS_PER_LANE], selection &chosen) {\n"
    "    const u32 lane = lane_index();\n"
    "#pragma unroll 1\n"
    "    for (u32 j = 0; j < K; j++) {\n"
    "        u32 best;\n"
    "        const u32 id = find_best(key, best);\n"
    "#if SPARSE_MIXER\n"
    "        float sum = 0.0f;\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < EXPERTS_PER_LANE; i++)\n"
    "            if (key[i]) sum = f32_add(sum, moer_sparse_mixer_term(moer_key_value(key[i]), moer_key_value(best), f32_mul(2.0f, a.jitter)));\n"
    "        sum = warp_sum(sum);\n"
    "#endif\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < EXPERTS_PER_LANE; i++)\n"
    "            if (i * 32 + lane == id) key[i] = 0;\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++)\n"
    "            if (s * 32 + lane == j) {\n"
    "                chosen.id[s] = id;\n"
    "                chosen.key[s] = best;\n"
    "#if SPARSE_MIXER\n"
    "                chosen.mixer_weight[s] = moer_share(1.0f, sum);\n"
    "#endif\n"
    "            }\n"
    "#if GROUP_RULE == 3 /* a group that has given its share is out */\n"
    "        u32 given = 0;\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++) given += popcount(warp_ballot(s * 32 + lane <= j && chosen.id[s] / GROUP_SIZE == id / GROUP_SIZE));\n"
    "        if (given == K / GROUPS) {\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < EXPERTS_PER_LANE; i++)\n"
    "                if ((i * 32 + lane) / GROUP_SIZE == id / GROUP_SIZE) key[i] = 0;\n"
    "        }\n"
    "#endif\n"
    "    }\n"
    "}\n"
    "\n"
    "#if ORDER_BY_SCORE\n",
    "/* The key that orders an expert, from the key of its logit and its selection bias. */\n"
    "DEVICE u32 score_key(u32 logit, float bias, const score_scale &scale) {\n"
    "    const float order = score_of(moer_key_value(logit), scale);\n"
    "    return moer_order_key(BIAS \? f32_add(order, bias) : order);\n"
    "}\n"
    "DEVICE float selection_bias(const moer_route_args &a, u32 e) { return BIAS \? a.selection_bias[e] : 0.0f; }\n"
    "#endif\n"
    "\n"
    "#if AHEAD\n"
    "/* The scores of so many 32 experts of tokens from `first_token` on, by all `warps` of the block, into the tokens' words. A warp loads\n"
    "   a few turns' logits together, since each has to come from L2; then takes one after the other, which keeps the code short. */\n"
    "#define TURNS 6\n"
    "template <class Words>\n"
    "DEVICE void score_ahead(const moer_route_args &a, u32 first_token, u32 units, u32 warps, Words &words) {\n"
    "    const score_scale none = {0.0f, 1.0f};\n"
    "    const u32 lane = lane_index();\n"
    "#pragma unroll 1\n"
    "    for (u32 first = warp_index(); first < units; first += warps * TURNS) {\n"
    "        float logit[TURNS], bias[TURNS];\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < TURNS; i++) {\n"
    "            const u32 here = first + i * warps, u = here < units \? here : first, e = u % EXPERTS_PER_LANE * 32 + lane;\n"
    "            logit[i] = e < E \? load_logit(a.logits, (u64)(first_token + u / EXPERTS_PER_LANE) * (E + SHARED_EXPERTS) + e) : 0.0f;\n"
    "            bias[i] = e < E \? selection_bias(a, e) : 0.0f;\n"
    "        }\n"
    "#pragma unroll 1\n"
    "        for (u32 u = first, turn = 0; turn < TURNS && u < units; turn++, u += warps) {\n"
    "            const u32 unit = u % EXPERTS_PER_LANE, e = unit * 32 + lane, at = u / EXPERTS_PER_LANE * TOKEN_WORDS;\n"
    "            const u32 key = e < E \? score_key(loaded_key(a, e, logit[0]), bias[0], none) : 0;\n"
    "            words[at + e] = key;\n"
    "#if GROUPS_AHEAD\n"
    "            const u32 group = group_score(key, 0);\n"
    "            if (lane == 0) words[at + GROUPS_AT + unit] = group;\n"
    "#endif\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i + 1 < TURNS; i++) {\n"
    "                logit[i] = logit[i + 1];\n"
    "                bias[i] = bias[i + 1];\n"
    "            }\n"
    "        }\n"
    "    }\n"
    "}\n"
    "#endif\n"
    "\n"
    "/* A token's logits as keys, of a token that may be padding, so that nobody waits for the number of tokens first. */\n"
    "DEVICE void load_keys(const moer_route_args &a, u32 token, u32 (&key)[EXPERTS_PER_LANE]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) {\n"
    "        const u32 e = i * 32 + lane_index();\n"
    "        key[i] = (IDS == 0 || NEEDS_SCORE_SCALE) && e < E \? logit_key(a, (u64)token * (E + SHARED_EXPERTS), e) : 0; /* 0: no expert */\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The experts of a token, and what their weights need, which is left in the token's words where LEFT says so; `at` is where they begin.\n"
    "   With SCORED the keys are there already, from score_ahead, and TOKEN_WORDS are needed; otherwise `key` is what load_keys gave, and\n"
    "   SELECT_WORDS are enough. */\n"
    "template <bool SCORED, class Words>\n"
    "DEVICE selection choose_experts(const moer_route_args &a, u32 token, u32 (&key)[EXPERTS_PER_LANE], Words &words, u32 at) {\n"
    "    const u32 lane = lane_index();\n"
    "    selection chosen;\n"
    "    chosen.scale = {0.0f, 1.0f};\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "        chosen.slot[s] = s * 32 + lane;\n"
    "        chosen.id[s] = chosen.key[s] = 0;\n"
    "        chosen.mixer_weight[s] = 0.0f;\n"
    "    }\n"
    "\n"
    "    if (SCORED)\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < EXPERTS_PER_LANE; i++) key[i] = words[at + i * 32 + lane];\n"
    "#if NEEDS_SCORE_SCALE\n"
    "    u32 largest = 0;\n"
    "    float sum = 0.0f;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++) largest = key[i] > largest \? key[i] : largest;\n"
    "    chosen.scale.largest = moer_key_value(warp_max(largest));\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++)\n"
    "        if (key[i]) sum = f32_add(sum, moer_softmax_term(moer_key_value(key[i]), chosen.scale.largest));\n"
    "    chosen.scale.sum = warp_sum(sum);\n"
    "#endif\n"
    "\n"
    "#if IDS == 0\n"
    "#if ORDER_BY_SCORE\n"
    "#pragma unroll\n",
    "    for (u32 i = 0; i < EXPERTS_PER_LANE; i++)\n"
    "        if (!SCORED && i * 32 + lane < E) key[i] = score_key(key[i], selection_bias(a, i * 32 + lane), chosen.scale);\n"
    "#endif\n"
    "#if DROPS_GROUPS\n"
    "    u32 group_key[GROUPS_PER_LANE];\n"
    "    if (SCORED && GROUPS_AHEAD) group_key[0] = lane < GROUPS \? words[at + GROUPS_AT + lane] : 0;\n"
    "    else score_groups(key, group_key);\n"
    "    drop_groups(key, group_key);\n"
    "#endif\n"
    "    if (SCORED) warp_barrier(); /* the keys are read, their words free */\n"
    "#if IN_ROUNDS\n"
    "    choose_in_rounds(a, key, chosen);\n"
    "#else\n"
    "    if (!choose_by_counting(words, at, key, chosen)) choose_in_rounds(a, key, chosen);\n"
    "#endif\n"
    "#if LEFT\n"
    "    const u32x2 expert = {{chosen.id[0], chosen.key[0]}};\n"
    "    if (chosen.slot[0] < K) shared_store_2(words, at + SLOTS_AT + chosen.slot[0] * 2, expert);\n"
    "    if (NEEDS_SCORE_SCALE && lane == 0) {\n"
    "        words[at + SCALE_AT] = f32_bits(chosen.scale.largest);\n"
    "        words[at + SCALE_AT + 1] = f32_bits(chosen.scale.sum);\n"
    "    }\n"
    "#endif\n"
    "#else\n"
    "#if IDS == 1\n"
    "    const bool known = true;\n"
    "    const u64 ids_row = token;\n"
    "#else\n"
    "    const u64 ids_row = (u32)a.token_ids[token];\n"
    "    const bool known = ids_row < a.id_table_rows;\n"
    "#endif\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < SLOTS_PER_LANE; s++)\n"
    "        if (s * 32 + lane < K) chosen.id[s] = known \? (u32)(IDS == 1 \? a.ids : a.id_table)[ids_row * K + s * 32 + lane] : 0xffffffffu;\n"
    "#endif\n"
    "    return chosen;\n"
    "}\n"
    "\n"
    "/* The weights of the slots of tokens, those of shared experts after the others; of a `valid` token. */\n"
    "DEVICE void weigh_experts(const moer_route_args &a, u32 token, bool valid, const selection &chosen, float (&weight)[SLOTS_PER_LANE]) {\n"
    "    const u32 lane = lane_index(), first_slot = lane % SLOT_LANES;\n"
    "    const u64 row = (u64)token * (E + SHARED_EXPERTS);\n"
    "    /* Lanes without a slot, slots that hold an expert nobody could select, and given ids out of range count 0. */\n"
    "    float x[SLOTS_PER_LANE];\n"
    "    bool counts[SLOTS_PER_LANE];\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "        const u32 slot = s * 32 + first_slot;\n"
    "        const bool selectable = IDS == 0 \? chosen.key[s] > (DROPPED == 2 \? MOER_ZERO_KEY : MOER_LOWEST_KEY) : chosen.id[s] < E;\n"
    "        counts[s] = valid && slot < SLOTS && (slot >= K || selectable);\n"
    "        if (IDS == 0 && !ORDER_BY_SCORE && slot < K) x[s] = counts[s] \? moer_key_value(chosen.key[s]) : 0.0f;\n"
    "        else x[s] = counts[s] \? moer_key_value(logit_key(a, row, slot < K \? chosen.id[s] : E + slot - K)) : 0.0f;\n"
    "    }\n"
    "    if (WEIGHT == 1 || WEIGHT == 3) {\n"
    "        float top, sum = 0.0f;\n"
    "        if (WEIGHT == 1 && IDS == 0 && !ORDER_BY_SCORE && !SHARED_EXPERTS) { /* the first slot's, if it counts; otherwise none does */\n"
    "            top = f32_from_bits(warp_shuffle(f32_bits(x[0]), lane - first_slot));\n"
    "        } else {\n"
    "            u32 largest = 0;\n"
    "            if (WEIGHT == 3)\n"
    "#pragma unroll\n"
    "                for (u32 s = 0; s < SLOTS_PER_LANE; s++) x[s] = moer_log_sigmoid(x[s]);\n"
    "#pragma unroll\n"
    "            for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "                const u32 k = counts[s] \? moer_order_key(x[s]) : 0;\n"
    "                largest = k > largest \? k : largest;\n"
    "            }\n"
    "            top = moer_key_value(slots_max(largest));\n"
    "        }\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "            const float term = moer_softmax_term(x[s], top);\n"
    "            weight[s] = counts[s] \? term : 0.0f;\n"
    "            sum = s == 0 \? weight[s] : f32_add(sum, weight[s]);\n"
    "        }\n"
    "        sum = slots_sum(sum);\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++) weight[s] = moer_share(weight[s], sum);\n"
    "    } else {\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "            if (SPARSE_MIXER && WEIGHT == 0) weight[s] = counts[s] \? chosen.mixer_weight[s] : 0.0f;\n"
    "            else weight[s] = !counts[s] \? 0.0f : WEIGHT == 2 \? moer_sigmoid(x[s]) : moer_score_weight(score_of(x[s], chosen.scale));\n"
    "        }\n",
    "    }\n"
    "    if (RENORMALIZE) {\n"
    "        float sum = 0.0f;\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "            const float w = weight[s];\n"
    "            if (RENORMALIZE == 3) sum = f32_fma(w, w, sum);\n"
    "            else sum = s == 0 \? w : f32_add(sum, w);\n"
    "        }\n"
    "        sum = slots_sum(sum);\n"
    "        if (RENORMALIZE == 3) sum = f32_sqrt(sum);\n"
    "        if (RENORMALIZE == 2) sum = sum > a.renormalize_epsilon \? sum : a.renormalize_epsilon;\n"
    "        else sum = f32_add(sum, a.renormalize_epsilon);\n"
    "#pragma unroll\n"
    "        for (u32 s = 0; s < SLOTS_PER_LANE; s++) weight[s] = moer_share(weight[s], sum);\n"
    "    }\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "        float w = f32_mul(weight[s], a.scale);\n"
    "        const bool selected = counts[s] && s * 32 + first_slot < K;\n"
    "#if EXPERT_SCALE\n"
    "        if (selected) w = f32_mul(w, a.expert_scale[chosen.id[s]]);\n"
    "#endif\n"
    "        if (DIVIDE_BY_K) w = f32_div(w, (float)K);\n"
    "        weight[s] = SKIP_EXPERTS && selected && chosen.id[s] >= E - SKIP_EXPERTS \? 0.0f : moer_bounded(w, LARGEST_WEIGHT);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Writes ids and weights of `num_tokens` tokens from `first_token` on, in the lanes of a warp; those of padding from `num_valid` on.\n"
    "   `at` is where the words of the first begin, `words_a_token` where those of the next do; or, where chosen experts aren't left there, it is\n"
    "   one token, and `chosen` its experts. */\n"
    "template <class Words>\n"
    "DEVICE void write_tokens(const moer_route_args &a, u32 first_token, u32 num_tokens, int num_valid, Words &words, u32 at, u32 words_a_token,\n"
    "                         selection chosen) {\n"
    "    const u32 lane = lane_index(), here = lane / SLOT_LANES, token = first_token + here, first_slot = lane % SLOT_LANES;\n"
    "    const bool exists = here < num_tokens, valid = exists && (int)token < num_valid;\n"
    "    float weight[SLOTS_PER_LANE];\n"
    "#if LEFT\n"
    "    chosen.id[0] = chosen.key[0] = 0;\n"
    "    if (valid && first_slot < K) {\n"
    "        const auto expert = shared_load_2(words, at + here * words_a_token + SLOTS_AT + first_slot * 2);\n"
    "        chosen.id[0] = (u32)expert.x;\n"
    "        chosen.key[0] = (u32)expert.y;\n"
    "    }\n"
    "    if (NEEDS_SCORE_SCALE && valid) {\n"
    "        chosen.scale.largest = f32_from_bits(words[at + here * words_a_token + SCALE_AT]);\n"
    "        chosen.scale.sum = f32_from_bits(words[at + here * words_a_token + SCALE_AT + 1]);\n"
    "    }\n"
    "#endif\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "        const u32 slot = s * 32 + first_slot;\n"
    "        if (IDS != 1 && exists && slot < K) a.ids[(u64)token * K + slot] = valid && (IDS == 0 || chosen.id[s] < E) \? (int)chosen.id[s] : -1;\n"
    "    }\n"
    "    weigh_experts(a, token, valid, chosen, weight);\n"
    "#pragma unroll\n"
    "    for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "        const u32 slot = s * 32 + first_slot;\n"
    "        if (exists && slot < K) {\n"
    "            if (a.weights) store_weight(a.weights, (u64)token * K + slot, weight[s]);\n"
    "        }\n"
    "#if SHARED_EXPERTS\n"
    "        else if (exists && slot < SLOTS && a.shared_weights) store_weight(a.shared_weights, (u64)token * SHARED_EXPERTS + slot - K, weight[s]);\n"
    "#endif\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_8[] = { /* formats.h */
    "/*\n"
    "  formats.h: what the bytes of a weight format mean, as far as kernels and CPU backend say it in the same words: the small\n"
    "  floats that serve as scales and weights, and the packed scales of GGUF's blocks. Plain C on values and 32-bit words; who\n"
    "  loads them, and how weights are spread over lanes, belongs to packed.h, gguf.h and cpu_formats.c.\n"
    "*/\n"
    "#ifndef MOER_FORMATS\n"
    "#define MOER_FORMATS\n"
    "#ifdef MOER_HOST\n"
    "#define MOER_FORMAT_FUNCTION static\n"
    "#else\n"
    "#define MOER_FORMAT_FUNCTION DEVICE\n"
    "#define moer_f32_from_bits f32_from_bits\n"
    "#endif\n"
    "\n"
    "/* E8M0: 2^(e - 127); 255 is NaN. */\n"
    "MOER_FORMAT_FUNCTION float moer_e8m0(unsigned int e) {\n"
    "    return moer_f32_from_bits(e == 255u \? 0x7fc00000u : e == 0u \? 0x00400000u : e << 23);\n"
    "}\n"
    "\n"
    "/* E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, all ones is NaN. */\n"
    "MOER_FORMAT_FUNCTION float moer_e4m3(unsigned int code) {\n"
    "    const unsigned int magnitude = code & 127u, sign = (code & 128u) << 24;\n"
    "    float value;\n"
    "    if (magnitude == 127u) return moer_f32_from_bits(0x7fc00000u | sign);\n"
    "    value = magnitude < 8u \? (float)magnitude * (1.0f / 512.0f) : moer_f32_from_bits((magnitude << 20) + (120u << 23));\n"
    "    return sign != 0u \? -value : value;\n"
    "}\n"
    "\n"
    "/* ---- GGUF ---- */\n"
    "\n"
    "/* 2^(e - 128), the scale of codes that are twice an E2M1. */\n"
    "MOER_FORMAT_FUNCTION float moer_e8m0_half(unsigned int e) {\n"
    "    return moer_f32_from_bits(e < 2u \? 0x00200000u << e : (e - 1u) << 23);\n"
    "}\n"
    "\n"
    "/* Q4_K and Q5_K: 8 scales and 8 minima of 6 bits, packed into 12 bytes: words s0, s1, s2. The scales or minima of half a\n"
    "   block (half 0 or 1) as four bytes. */\n"
    "MOER_FORMAT_FUNCTION unsigned int moer_k_scales(unsigned int s0, unsigned int s2, unsigned int half) {\n"
    "    return half != 0u \? (s2 & 0x0f0f0f0fu) | ((s0 >> 2) & 0x30303030u) : s0 & 0x3f3f3f3fu;\n"
    "}\n"
    "MOER_FORMAT_FUNCTION unsigned int moer_k_mins(unsigned int s1, unsigned int s2, unsigned int half) {\n"
    "    return half != 0u \? ((s2 >> 4) & 0x0f0f0f0fu) | ((s1 >> 2) & 0x30303030u) : s1 & 0x3f3f3f3fu;\n"
    "}\n"
    "\n"
    "/* Q3_K: 16 scales of 6 bits in 12 bytes, 32 more than they mean. `low` is word 0 or 1 (`which`), `high` word 2: scales\n"
    "   8 * half + 4 * which and the three after it, as four bytes. */\n"
    "MOER_FORMAT_FUNCTION unsigned int moer_q3_k_scales(unsigned int low, unsigned int high, unsigned int half, unsigned int which) {\n"
    "    return ((low >> (4u * half)) & 0x0f0f0f0fu) | ((high >> (4u * half + 2u * which)) & 0x03030303u) << 4;\n"
    "}\n"
    "\n"
    "/* IQ4_XS: scale `index` of 8. */\n"
    "MOER_FORMAT_FUNCTION int moer_iq4_xs_scale(unsigned int low, unsigned int high, unsigned int index) {\n"
    "    return (int)(((low >> (4u * index)) & 15u) | ((high >> (2u * index)) & 3u) << 4) - 32;\n"
    "}\n"
    "#endif\n",
    NULL};
static const char *const moer_source_9[] = { /* packed.h */
    "/*\n"
    "  packed.h: weights in rows of equally wide codes, with scales and zero points in arrays of their own: F32, F16, BF16, INT8,\n"
    "  INT4, FP8, MXFP4, NVFP4. What a lane loads of a row in one step of tile.h, and how it becomes pairs of 16-bit floats.\n"
    "\n"
    "  A step is 64 bytes of a row; lane t loads bytes 16t to 16t + 15. Where a group is longer than a step, or a row has one\n"
    "  scale, that is all. Shorter groups: a matrix fragment adds up what four lanes hold, which then has to belong to one group.\n"
    "  Each lane needs a fourth of every group (a \"sub\"): with two or four groups it loads them as pieces of 8 or 4 bytes, with eight the\n"
    "  four lanes exchange words until each holds its fourths.\n"
    "\n"
    "  Constants, beside tile.h's: GROUP, inputs that share a scale, 0: one scale a row; GROUP_ROWS, rows that share a scale;\n"
    "  SCALES, dtype of the scales, also E8M0 and E4M3; SCALE_ALIGN, bytes that the scales of every row are aligned to;\n"
    "  ZERO_POINTS, 1: given, in the form of the codes; SIGNED, 1: codes and zero points are two's complement; GLOBAL, a global\n"
    "  scale: none (0), one (1), by expert (2), by expert and half of its rows (3), by expert and parity of the row (4); CODE_SUMS, 1: codes\n"
    "  with a zero are multiplied as they are, GGUF's, too (0 where it isn't defined). A matrix has the same in all of its kernels, whose sums are the same bits.\n"
    "*/\n"
    "#include \"formats.h\"\n"
    "\n"
    "#define SCALES_E8M0 4\n"
    "#define SCALES_E4M3 5\n"
    "\n"
    "#define WEIGHT_BITS (FORMAT == FORMAT_F32 \? 32 : FORMAT == FORMAT_F16 || FORMAT == FORMAT_BF16 \? 16 : FORMAT == FORMAT_INT8 || FORMAT == FORMAT_FP8 \? 8 : 4)\n"
    "#define QUANTIZED (WEIGHT_BITS <= 8)\n"
    "#define FOUR_BIT_FLOATS (FORMAT == FORMAT_MXFP4 || FORMAT == FORMAT_NVFP4)\n"
    "#define LANE_VALUES (128 / WEIGHT_BITS)\n"
    "#define SUBS (GROUP != 0 && GROUP / 4 < LANE_VALUES \? LANE_VALUES * 4 / GROUP : 1)\n"
    "#define LANE_SUB (LANE_VALUES / SUBS)\n"
    "#define PIECES (SUBS == 2 || SUBS == 4 \? SUBS : 1)\n"
    "#define LANE_RUN LANE_SUB\n"
    "#define SUB_HAS_SCALE (GROUP != 0)\n"
    "#define SUB_HAS_MIN 0\n"
    "#define PAIR_ORDER (WEIGHT_BITS != 4 \? PAIRS_LINEAR : LANE_SUB == 4 \? PAIRS_OF_4 : PAIRS_OF_8)\n"
    "#define CHUNK_WORDS (4 + (GROUP != 0 \? (SUBS * SCALE_BYTES + 3) / 4 : 0) + ZERO_POINTS)\n"
    "#define ROW_HAS_SCALE (GLOBAL || (QUANTIZED && GROUP == 0))\n"
    "\n"
    "#define NUM_GROUPS (GROUP != 0 \? (INNER + GROUP - 1) / (GROUP != 0 \? GROUP : 1) : 1)\n"
    "#define SCALE_ROWS ((ROWS + GROUP_ROWS - 1) / GROUP_ROWS)\n"
    "#define SCALE_BYTES (SCALES == DTYPE_F32 \? 4 : SCALES == SCALES_E8M0 || SCALES == SCALES_E4M3 \? 1 : 2)\n"
    "#define ROW_BYTES ((u64)INNER * WEIGHT_BITS / 8)\n"
    "#define ZERO_POINT_ROW_BYTES (WEIGHT_BITS == 4 \? (NUM_GROUPS + 1) / 2 : NUM_GROUPS)\n"
    "/* In unsigned codes, without zero points. */\n"
    "#define USUAL_ZERO_POINT (WEIGHT_BITS == 4 \? 8u : 128u)\n"
    "\n"
    "struct weight_row {\n"
    "    const u8 *data, *scales, *zero_points;\n"
    "    const float *global_scale;\n"
    "};\n"
    "\n"
    "DEVICE weight_row find_weight_row(const moer_weights_args &w, u32 expert, u64 row) {\n"
    "    const u64 index = (u64)expert * ROWS + row;\n"
    "    weight_row r;\n"
    "    r.data = (const u8 *)w.data + index * ROW_BYTES;\n"
    "    r.scales = QUANTIZED \? (const u8 *)w.scales + ((u64)expert * SCALE_ROWS + row / GROUP_ROWS) * NUM_GROUPS * SCALE_BYTES : 0;\n"
    "    r.zero_points = ZERO_POINTS \? (const u8 *)w.zero_points + index * ZERO_POINT_ROW_BYTES : 0;\n"
    "    r.global_scale = GLOBAL < 2 \? w.global_scales : w.global_scales + (GLOBAL == 2 \? expert : expert * 2 + (GLOBAL == 3 \? row >= ROWS / 2 : row % 2));\n"
    "    return r;\n"
    "}\n"
    "\n"
    "/* The row that comes so many rows after; not where rows share scales. */\n"
    "DEVICE weight_row row_after(const weight_row &row, u32 rows) {\n"
    "    weight_row r = row;\n"
    "    r.data += rows * ROW_BYTES;\n"
    "    r.scales += (u64)rows * NUM_GROUPS * SCALE_BYTES;\n"
    "    r.zero_points += (u64)rows * ZERO_POINT_ROW_BYTES;\n"
    "    return r;\n"
    "}\n"
    "#define ROWS_ALIKE (GROUP_ROWS == 1 && GLOBAL < 3)\n"
    "\n"
    "/* A lane's part of a row's step, as it lies in memory. */\n"
    "struct weight_chunk {\n"
    "    u32 word[4];\n",
    "    u32 scale[(SUBS * SCALE_BYTES + 3) / 4];\n"
    "    u32 zero_point[1]; /* INT8: bytes; INT4: nibbles */\n"
    "};\n"
    "\n"
    "/* The first group of a step, and where its scales are in their row. */\n"
    "DEVICE u64 first_group(u64 step) { return GROUP == 0 \? 0 : SUBS > 1 \? step * SUBS : step * STEP / (GROUP != 0 \? GROUP : 1); }\n"
    "DEVICE u64 scales_at(u64 step) { return first_group(step) * SCALE_BYTES; }\n"
    "\n"
    "/* The scales of a step's groups; 0 for those past the row, of which an inner step has none. */\n"
    "DEVICE void load_scales(u32 (&word)[(SUBS * SCALE_BYTES + 3) / 4], const u8 *scales, u64 group, bool inner) {\n"
    "    constexpr u32 BYTES = SUBS * SCALE_BYTES, ALIGN = SCALE_ALIGN < BYTES \? SCALE_ALIGN : BYTES;\n"
    "    const u8 *p = scales + group * SCALE_BYTES;\n"
    "    if (NUM_GROUPS % SUBS == 0 && ALIGN >= (BYTES < 4 \? BYTES : 4)) {\n"
    "        load_weights<BYTES, ALIGN>(word, p, BYTES);\n"
    "        return;\n"
    "    }\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < (BYTES + 3) / 4; i++) word[i] = 0;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < SUBS; i++)\n"
    "        if (NUM_GROUPS % SUBS == 0 || inner || group + i < NUM_GROUPS) {\n"
    "            const u32 scale = SCALE_BYTES == 4 \? load_weights_4(p + i * SCALE_BYTES) : SCALE_BYTES == 2 \? load_2(p + i * SCALE_BYTES) : load_1(p + i * SCALE_BYTES);\n"
    "            word[i * SCALE_BYTES / 4] |= scale << (i * SCALE_BYTES % 4 * 8);\n"
    "        }\n"
    "}\n"
    "\n"
    "DEVICE weight_chunk load_weight_chunk(const weight_row &row, u64 step, bool inner) {\n"
    "    weight_chunk c;\n"
    "#pragma unroll\n"
    "    for (u32 piece = 0; piece < PIECES; piece++) {\n"
    "        constexpr u32 BYTES = 16 / PIECES;\n"
    "        const u64 at = step * 64 + (lane_index() & 3) * BYTES + piece * (64 / PIECES); /* from the row's start */\n"
    "        u32 word[BYTES / 4];\n"
    "        if (ROW_BYTES % BYTES != 0 && !inner) {\n"
    "            load_weights<BYTES, WEIGHT_ALIGN>(word, row.data + at, at < ROW_BYTES \? (u32)(ROW_BYTES - at) : 0);\n"
    "        } else if (ROW_BYTES % 64 == 0 || inner || at < ROW_BYTES) { /* a piece is all there, or none of it */\n"
    "            load_weights<BYTES, WEIGHT_ALIGN>(word, row.data + at, BYTES);\n"
    "        } else {\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < BYTES / 4; i++) word[i] = 0;\n"
    "        }\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < BYTES / 4; i++) c.word[piece * (BYTES / 4) + i] = word[i];\n"
    "    }\n"
    "    if (GROUP != 0) load_scales(c.scale, row.scales, first_group(step), inner);\n"
    "    if (ZERO_POINTS) {\n"
    "        const u64 group = first_group(step);\n"
    "        const u64 first = WEIGHT_BITS == 4 \? group / 2 : group;\n"
    "        load_weights<(WEIGHT_BITS == 4 \? (SUBS + 1) / 2 : SUBS), 1>(c.zero_point, row.zero_points + first, first < ZERO_POINT_ROW_BYTES \? (u32)(ZERO_POINT_ROW_BYTES - first) : 0);\n"
    "        if (WEIGHT_BITS == 4 && SUBS == 1) c.zero_point[0] >>= group % 2 * 4;\n"
    "        if (SIGNED) c.zero_point[0] ^= WEIGHT_BITS == 4 \? 0x88888888u : 0x80808080u;\n"
    "    }\n"
    "    return c;\n"
    "}\n"
    "\n"
    "/* A step of 16 rows in shared memory, for stream.h: the low rows' 64 bytes each, the high rows', then a word or two of scales by\n"
    "   row. Scales that don't fill words are copied with what is beside them, but nothing past the row. */\n"
    "#define STEP_SCALE_BYTES (GROUP != 0 \? SUBS * SCALE_BYTES : 0)\n"
    "#define SCALES_FILL_WORDS (SCALE_ALIGN >= 4 && STEP_SCALE_BYTES % 4 == 0)\n"
    "#define STEP_SCALE_WORDS (SCALES_FILL_WORDS || STEP_SCALE_BYTES <= SCALE_ALIGN \? (STEP_SCALE_BYTES + 3) / 4 : (STEP_SCALE_BYTES + 6) / 4)\n"
    "#define STEP_WORDS (256 + 16 * STEP_SCALE_WORDS)\n"
    "/* A warp's steps have their scales at the same place in words. */\n"
    "#define STEPS_TOGETHER(parts) (NUM_STEPS % (parts) == 0 && (GROUP == 0 || (SUBS > 1 && SUBS * SCALE_BYTES % 4 == 0)))\n"
    "#define STEPS_KEEP_WORDS(parts) (STEPS_TOGETHER(parts) || SCALES_FILL_WORDS || (SUBS > 1 \? (parts) * SUBS * SCALE_BYTES % 4 == 0 : GROUP != 0 && (parts) * STEP % (4 * GROUP) == 0))\n"
    "/* They lie in the row where its first step and the distance to it say, scales_at(first) + scales_at(steps): where steps share a group,\n",
    "   the warp steps over whole groups. */\n"
    "#define STEPS_KEEP_GROUPS(parts) (STEPS_TOGETHER(parts) || (parts) == 1 || GROUP == 0 || SUBS > 1 || (parts) * STEP % (GROUP != 0 \? GROUP : 1) == 0)\n"
    "#define CAN_COPY(parts) (TENSOR_CORES && STEPS_KEEP_WORDS(parts) && WEIGHT_ALIGN == 16 && INNER * WEIGHT_BITS % 128 == 0 && !ZERO_POINTS && STEP_SCALE_WORDS <= 2)\n"
    "\n"
    "/* What a lane copies of a warp's first step in two rows, and how it finds its own scales beside others. */\n"
    "struct copy_source {\n"
    "    const u8 *low, *high, *scales;\n"
    "    u32 low_scales, high_scales; /* selectors of bytes */\n"
    "};\n"
    "\n"
    "/* Lane 4g + t copies bytes 16t to 16t + 15 of rows g and g + 8, and a word of scales: word t / 2 of the low row if t is even. */\n"
    "DEVICE copy_source find_copy_source(const weight_row &low, const weight_row &high, u32 first_step) {\n"
    "    const u32 t = lane_index() & 3;\n"
    "    copy_source s;\n"
    "    s.low = low.data + first_step * 64 + t * 16;\n"
    "    s.high = high.data + first_step * 64 + t * 16;\n"
    "    const u8 *const low_scales = low.scales + scales_at(first_step), *const high_scales = high.scales + scales_at(first_step);\n"
    "    s.scales = t % 2 \? high_scales : low_scales;\n"
    "    if (!SCALES_FILL_WORDS) s.scales -= (u64)s.scales & 3;\n"
    "    s.scales += t / 2 * 4;\n"
    "    s.low_scales = 0x3210u + 0x1111u * ((u32)(u64)low_scales & 3);\n"
    "    s.high_scales = 0x3210u + 0x1111u * ((u32)(u64)high_scales & 3);\n"
    "    return s;\n"
    "}\n"
    "\n"
    "/* So many rows later, where that leaves words of scales words. */\n"
    "#define ROWS_KEEP_WORDS(rows) (STEP_SCALE_BYTES == 0 || (rows) * NUM_GROUPS * SCALE_BYTES % 4 == 0)\n"
    "DEVICE copy_source copy_source_after(const copy_source &source, u32 rows) {\n"
    "    copy_source s = source;\n"
    "    s.low += rows * ROW_BYTES;\n"
    "    s.high += rows * ROW_BYTES;\n"
    "    s.scales += (u64)rows * NUM_GROUPS * SCALE_BYTES;\n"
    "    return s;\n"
    "}\n"
    "\n"
    "/* Whether the words of scales of a warp's step `index` are the row's to their end. The second of two may begin with the next\n"
    "   step's, which then has to be whole. */\n"
    "#define NEXT_SCALES_TOO (!SCALES_FILL_WORDS && STEP_SCALE_WORDS == 2 && NUM_GROUPS % SUBS != 0)\n"
    "template <u32 PARTS>\n"
    "DEVICE bool has_whole_scales(u32 index) {\n"
    "    return STEPS_TOGETHER(PARTS) \? index + 1 + NEXT_SCALES_TOO < PART_STEPS(PARTS) : (index + 1) * PARTS + NEXT_SCALES_TOO < NUM_STEPS;\n"
    "}\n"
    "\n"
    "/* Where 16 bytes of row g lie among its 64. Where a lane takes several pieces out again, rows differ, against bank conflicts. */\n"
    "DEVICE u32 swizzled(u32 g, u32 chunk) { return PIECES == 2 \? chunk ^ (g & 2) : PIECES == 4 \? chunk ^ (g >> 1 & 3) : chunk; }\n"
    "\n"
    "/* A lane's places in its warp's steps, of the first: to copy to, and to take its own part of the low row from. */\n"
    "struct copy_places {\n"
    "    shared_place data, scales, pieces[PIECES], own_scales;\n"
    "};\n"
    "\n"
    "template <class Words>\n"
    "DEVICE copy_places find_copy_places(Words &words, u32 at) {\n"
    "    const u32 t = lane_index() & 3, g = lane_index() >> 2;\n"
    "    copy_places p;\n"
    "    p.data = shared_place_of(words, at + g * 16 + swizzled(g, t) * 4);\n"
    "#pragma unroll\n"
    "    for (u32 piece = 0; piece < PIECES; piece++)\n"
    "        p.pieces[piece] = shared_place_of(words, at + g * 16 + (PIECES == 2 \? swizzled(g, piece * 2 + t / 2) * 4 + t % 2 * 2 : PIECES == 4 \? swizzled(g, piece) * 4 + t : t * 4));\n"
    "    p.scales = shared_place_of(words, at + (STEP_SCALE_WORDS \? 256 + t / 2 * 16 + t % 2 * 8 + g : 0));\n"
    "    p.own_scales = shared_place_of(words, at + (STEP_SCALE_WORDS \? 256 + g : 0));\n"
    "    return p;\n"
    "}\n"
    "\n"
    "/* Copies the step that comes `steps` after the warp's first, to so many words from its places. */\n"
    "DEVICE void copy_step(const copy_places &places, u32 at, const copy_source &s, u32 first_step, u32 steps, bool inner, bool whole_scales) {\n"
    "    const u32 t = lane_index() & 3;\n"
    "    const u32 size = INNER * WEIGHT_BITS % 512 == 0 || inner || ((u64)first_step + steps) * 64 + t * 16 < ROW_BYTES \? 16 : 0;\n"
    "    copy_async_line_16(places.data, at, s.low + steps * 64, size);\n",
    "    copy_async_line_16(places.data, at + 128, s.high + steps * 64, size);\n"
    "    if (STEP_SCALE_WORDS == 0) return;\n"
    "    const u8 *const p = s.scales + scales_at(steps);\n"
    "    const bool wanted = t / 2 < STEP_SCALE_WORDS;\n"
    "    if (whole_scales || (NUM_GROUPS % SUBS == 0 && SCALES_FILL_WORDS)) return copy_async_4(places.scales, at, p, wanted);\n"
    "    const u32 begin = (u32)scales_at((u64)first_step + steps) + t / 2 * 4, skew = (t % 2 \? s.high_scales : s.low_scales) & 3, end = NUM_GROUPS * SCALE_BYTES + skew;\n"
    "    copy_async_4(places.scales, at, p, wanted && begin + 4 <= end);\n"
    "    if (!wanted || begin + 4 <= end) return;\n"
    "    u32 bytes = 0; /* nothing past the row */\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 3; i++)\n"
    "        if (begin + i < end) bytes |= (u32)load_1(p + i) << (8 * i);\n"
    "    shared_store_to(places.scales, at, bytes);\n"
    "}\n"
    "\n"
    "/* A piece of a lane's part of a row, from shared memory. */\n"
    "DEVICE void fetch_piece(weight_chunk &c, u32 piece, const shared_place &place, u32 from) {\n"
    "    if (PIECES == 2) {\n"
    "        const u32x2 two = shared_load_2_from(place, from);\n"
    "        c.word[piece * 2 % 4] = two.v[0];\n"
    "        c.word[(piece * 2 + 1) % 4] = two.v[1];\n"
    "    } else if (PIECES == 4) {\n"
    "        c.word[piece] = shared_load_from(place, from);\n"
    "    } else {\n"
    "        const u32x4 four = shared_load_4_from(place, from);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 4; i++) c.word[i] = four.v[i];\n"
    "    }\n"
    "}\n"
    "\n"
    "/* A lane's part of its low (half 0) or high (half 1) row. */\n"
    "DEVICE weight_chunk fetch_chunk(const copy_places &places, u32 at, u32 half, const copy_source &s) {\n"
    "    weight_chunk c = {};\n"
    "#pragma unroll\n"
    "    for (u32 piece = 0; piece < PIECES; piece++) fetch_piece(c, piece, places.pieces[piece], at + half * 128);\n"
    "    if (STEP_SCALE_WORDS) {\n"
    "        const u32 first = shared_load_from(places.own_scales, at + half * 8), second = STEP_SCALE_WORDS == 2 \? shared_load_from(places.own_scales, at + 16 + half * 8) : 0;\n"
    "        c.scale[0] = SCALES_FILL_WORDS \? first : select_bytes(first, second, half \? s.high_scales : s.low_scales);\n"
    "        if (SCALES_FILL_WORDS && STEP_SCALE_WORDS == 2) c.scale[STEP_SCALE_WORDS - 1] = second;\n"
    "    }\n"
    "    return c;\n"
    "}\n"
    "\n"
    "/* The fourth of a group that lane t has after arrange_weight_chunk. */\n"
    "DEVICE u32 lane_quarter() {\n"
    "    const u32 t = lane_index() & 3;\n"
    "    return SUBS == 8 \? (t >> 1) | (t & 1) << 1 : t;\n"
    "}\n"
    "\n"
    "/* Gives every lane its fourth of each sub: SUBS 2 (loaded so): sub s is words 2s and 2s + 1; 4 (loaded so): word s; 8: half s % 2 of word s / 2. */\n"
    "DEVICE void arrange_weight_chunk(weight_chunk &c) {\n"
    "    if (SUBS != 8) return;\n"
    "    exchange_words<1>(c.word[0], c.word[1]);\n"
    "    exchange_words<1>(c.word[2], c.word[3]);\n"
    "    exchange_words<2>(c.word[0], c.word[2]);\n"
    "    exchange_words<2>(c.word[1], c.word[3]);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i += 2) { /* lanes 0 and 1 hold even subs, 2 and 3 odd ones: the same again, in halves of words */\n"
    "        u32 low = select_bytes(c.word[i], c.word[i + 1], 0x5410), high = select_bytes(c.word[i], c.word[i + 1], 0x7632);\n"
    "        exchange_words<2>(low, high);\n"
    "        c.word[i] = select_bytes(low, high, 0x5410);\n"
    "        c.word[i + 1] = select_bytes(low, high, 0x7632);\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE float sub_scale(const weight_chunk &c, u32, u32 sub) {\n"
    "    const u32 word = c.scale[sub * SCALE_BYTES / 4] >> (sub * SCALE_BYTES % 4 * 8);\n"
    "    if (SCALES == DTYPE_F32) return f32_from_bits(word);\n"
    "    if (SCALES == SCALES_E8M0) return moer_e8m0(word & 255);\n"
    "    if (SCALES == SCALES_E4M3) return moer_e4m3(word & 255);\n"
    "    return SCALES == DTYPE_F16 \? f16_to_f32((u16)word) : bf16_to_f32((u16)word);\n"
    "}\n"
    "\n"
    "DEVICE float code_scale(const weight_chunk &c, u32 step, u32 sub) { return sub_scale(c, step, sub); }\n"
    "DEVICE float sub_min(const weight_chunk &, u32, u32) { return 0.0f; }\n"
    "\n"
    "#define SCALES_ARE_EXPONENTS (SUB_HAS_SCALE && SCALES == SCALES_E8M0)\n",
    "/* E8M0 is the exponent of an f32, but for 0 and 255. Whether a row's step has one of these, so that the others are had by a shift. */\n"
    "DEVICE bool has_odd_scales(const weight_chunk &c) {\n"
    "    u32 odd = 0;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < (SUBS * SCALE_BYTES + 3) / 4; i++) {\n"
    "        const u32 w = SUBS * SCALE_BYTES < 4 \? c.scale[i] | 0x01010101u << (SUBS * SCALE_BYTES * 8 % 32) : c.scale[i];\n"
    "        odd |= ((w - 0x01010101u) & ~w) | ((~w - 0x01010101u) & w);\n"
    "    }\n"
    "    return (odd & 0x80808080u) != 0;\n"
    "}\n"
    "DEVICE float even_scale(const weight_chunk &c, u32 sub) {\n"
    "    const u32 w = c.scale[sub / 4];\n"
    "    return f32_from_bits((sub % 4 == 3 \? w >> 1 : w << (23 - sub % 4 * 8)) & 0x7f800000u);\n"
    "}\n"
    "\n"
    "/* What every weight of a row is multiplied by, once the sum is there. */\n"
    "DEVICE float row_scale(const weight_row &row) {\n"
    "    if (GLOBAL) return load_value(row.global_scale, 0, DTYPE_F32);\n"
    "    return QUANTIZED && GROUP == 0 \? load_value(row.scales, 0, SCALES) : 1.0f;\n"
    "}\n"
    "\n"
    "#if FORMAT == FORMAT_F32 || FORMAT == FORMAT_F16 || FORMAT == FORMAT_BF16\n"
    "\n"
    "/* The pairs are those of memory. */\n"
    "DEVICE void unpack_sub(const weight_chunk &c, u32, u32, u32 (&pair)[LANE_SUB / 2]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB / 2; i++) pair[i] = c.word[i];\n"
    "}\n"
    "\n"
    "DEVICE void unpack_sub_values(const weight_chunk &c, u32, u32, float (&value)[LANE_SUB]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB; i++) {\n"
    "        if (FORMAT == FORMAT_F32) value[i] = f32_from_bits(c.word[i % 4]);\n"
    "        else value[i] = FORMAT == FORMAT_F16 \? f16_to_f32((u16)(c.word[i / 2 % 4] >> (16 * (i % 2)))) : bf16_to_f32((u16)(c.word[i / 2 % 4] >> (16 * (i % 2))));\n"
    "    }\n"
    "}\n"
    "\n"
    "#else\n"
    "\n"
    "/* Two codes of four bits, one in the low bits of each half of `codes`, as floats. They stand in the mantissa of 1024 (f16)\n"
    "   or 128 (bf16), from which 1024 or 128 and the zero point are taken away: exact. */\n"
    "DEVICE u32 int4_pair(u32 codes, u32 zero_point) {\n"
    "    if (DECODE == DTYPE_F16) return half2_sub(and_or(codes, 0x000f000fu, 0x64006400u), zero_point * 0x10001u + 0x64006400u);\n"
    "    return bf162_fma(and_or(codes, 0x000f000fu, 0x43004300u), 0x3f803f80u, zero_point * 0x10001u + 0xc300c300u);\n"
    "}\n"
    "\n"
    "/* The same for the bits above those: in f16 they can stay where they are, as 1024 + 16 q, and are divided by 16. */\n"
    "DEVICE u32 int4_upper_pair(u32 codes, u32 zero_point) {\n"
    "    if (DECODE == DTYPE_F16) return half2_fma(and_or(codes, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero_point * 0x100010u + 0xd400d400u);\n"
    "    return int4_pair(codes >> 4, zero_point);\n"
    "}\n"
    "\n"
    "/* E2M1: the exponent is put where a 16-bit float has its own, then corrected by a power of two. Subnormals come out right. */\n"
    "DEVICE u32 fp4_pair(u32 codes) {\n"
    "    const u32 sign = (codes << 12) & 0x80008000u;\n"
    "    if (DECODE == DTYPE_F16) return half2_fma(and_or(codes << 9, 0x0e000e00u, sign), 0x74007400u, 0x80008000u); /* * 2^14 */\n"
    "    return bf162_fma(and_or(codes << 6, 0x01c001c0u, sign), 0x7e807e80u, 0x80008000u);                          /* * 2^126 */\n"
    "}\n"
    "\n"
    "/* E4M3 likewise; the code is the upper byte of each half. All ones would come out as 480, and become NaN. */\n"
    "DEVICE u32 fp8_pair(u32 codes) {\n"
    "    const u32 sign = codes & 0x80008000u;\n"
    "    const u32 all_ones = ((codes & 0x7f007f00u) + 0x01000100u) & 0x80008000u;\n"
    "    const u32 pair = DECODE == DTYPE_F16 \? half2_fma(and_or(codes >> 1, 0x3f803f80u, sign), 0x5c005c00u, 0x80008000u)  /* * 2^8 */\n"
    "                                         : bf162_fma(and_or(codes >> 4, 0x07f007f0u, sign), 0x7b807b80u, 0x80008000u); /* * 2^120 */\n"
    "    return pair | (all_ones - (all_ones >> 15));\n"
    "}\n"
    "\n"
    "/* f16 has subnormals, and tensor cores multiply them exactly: a code of four bits is one as it is, code * 2^-24, or four bits further up\n"
    "   code * 2^-20, and E2M1 is one in the place of the lowest bits of the exponent, times 2^-14. So nothing but masks is needed; what\n",
    "   the codes lack of their weights, in CODE_SCALE, is made up for once a tile. In bf16, whose subnormals are too small for the sums, a code stands in the mantissa of 128. INT4's zero\n"
    "   point, and that 128, are made up for by the sums of the activations: so it pays where these are held (CODE_SUMS). */\n"
    "#define CODES_MULTIPLY (TENSOR_CORES && SUB_HAS_SCALE && LANE_SUB >= 8 && !ZERO_POINTS && (FOUR_BIT_FLOATS \? DECODE == DTYPE_F16 : FORMAT == FORMAT_INT4 && CODE_SUMS))\n"
    "#define CODE_SCALE (!CODES_MULTIPLY || DECODE == DTYPE_BF16 \? 1.0f : FORMAT == FORMAT_INT4 \? 16777216.0f : 16384.0f)\n"
    "#define CODE_ZERO (FORMAT == FORMAT_INT4 \? USUAL_ZERO_POINT : 0u)\n"
    "#define SUM_FACTOR ((DECODE == DTYPE_BF16 \? 0xc300u : 0x8000u) | CODE_ZERO)\n"
    "\n"
    "/* The codes of sub `sub` in the order PAIR_ORDER; INT4 in f16: even pairs times 2^-24, odd ones times 2^-20. */\n"
    "DEVICE void unpack_codes(const weight_chunk &c, u32, u32 sub, u32 (&pair)[LANE_SUB / 2]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB / 8; i++) {\n"
    "        u32 w = c.word[sub * (LANE_SUB / 8) + i];\n"
    "        if (FORMAT == FORMAT_INT4) {\n"
    "            if (SIGNED) w ^= 0x88888888u;\n"
    "#pragma unroll\n"
    "            for (u32 j = 0; j < 4; j++)\n"
    "                if (DECODE == DTYPE_BF16) pair[(i * 4 + j) % (LANE_SUB / 2)] = and_or(w >> (4 * j), 0x000f000fu, 0x43004300u);\n"
    "                else pair[(i * 4 + j) % (LANE_SUB / 2)] = (j < 2 \? w : w >> 8) & (j % 2 == 0 \? 0x000f000fu : 0x00f000f0u);\n"
    "            continue;\n"
    "        }\n"
    "        /* Each code's sign and the rest of it go to their places by two shifts, and a mask takes both. Shifts to the left are multiplications elsewhere than in the ALUs, which are\n"
    "           the limit here; so the compiler mustn't exchange shifts and masks. */\n"
    "        const u32 lower = and_or(w, 0x0f0f0f0fu, 0), upper = and_or(w, 0xf0f0f0f0u, 0);\n"
    "        pair[i * 4 % (LANE_SUB / 2)] = or_and(lower << 12, lower << 9, 0x8e008e00u);\n"
    "        pair[(i * 4 + 1) % (LANE_SUB / 2)] = or_and(upper << 8, upper << 5, 0x8e008e00u);\n"
    "        pair[(i * 4 + 2) % (LANE_SUB / 2)] = or_and(lower << 4, lower << 1, 0x8e008e00u);\n"
    "        pair[(i * 4 + 3) % (LANE_SUB / 2)] = or_and(upper, upper >> 3, 0x8e008e00u);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The lane's weights of sub `sub` as pairs of 16-bit floats of type DECODE, in the order PAIR_ORDER. */\n"
    "DEVICE void unpack_sub(const weight_chunk &c, u32, u32 sub, u32 (&pair)[LANE_SUB / 2]) {\n"
    "    u32 zero_point = USUAL_ZERO_POINT;\n"
    "    if (ZERO_POINTS) zero_point = WEIGHT_BITS == 4 \? (c.zero_point[0] >> (4 * sub)) & 15u : (c.zero_point[0] >> (8 * sub)) & 255u;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < (LANE_SUB * WEIGHT_BITS + 31) / 32; i++) {\n"
    "        u32 w = c.word[LANE_SUB * WEIGHT_BITS < 32 \? sub / 2 : sub * (LANE_SUB * WEIGHT_BITS / 32) + i];\n"
    "#if FORMAT == FORMAT_INT8\n"
    "        if (SIGNED) w ^= 0x80808080u;\n"
    "        if (DECODE == DTYPE_F16) {\n"
    "            pair[i * 2 + 0] = half2_sub(select_bytes(w, 0x64646464u, 0x4140), zero_point * 0x10001u + 0x64006400u);\n"
    "            pair[i * 2 + 1] = half2_sub(select_bytes(w, 0x64646464u, 0x4342), zero_point * 0x10001u + 0x64006400u);\n"
    "        } else { /* through the mantissa of 2^23: bf16 has no room for eight bits and the one before them */\n"
    "            float q[4];\n"
    "#pragma unroll\n"
    "            for (u32 j = 0; j < 4; j++) q[j] = f32_add(f32_from_bits(select_bytes(w, 0x4b000000u, 0x7440u + j)), f32_from_bits(0xcb000000u + zero_point));\n"
    "            pair[i * 2 + 0] = f32_to_bf162(q[0], q[1]);\n"
    "            pair[i * 2 + 1] = f32_to_bf162(q[2], q[3]);\n"
    "        }\n"
    "#elif FORMAT == FORMAT_FP8\n"
    "        pair[i * 2 + 0] = fp8_pair(select_bytes(w, 0, 0x1404));\n"
    "        pair[i * 2 + 1] = fp8_pair(select_bytes(w, 0, 0x3424));\n"
    "#else\n"
    "        if (SIGNED) w ^= 0x88888888u;\n"
    "        if (LANE_SUB == 4) { /* the four nibbles of two bytes, a byte in each half: pairs (0, 2) and (1, 3) */\n"
    "            w = select_bytes(w, 0, sub % 2 == 0 \? 0x4140 : 0x4342);\n",
    "            pair[0] = FOUR_BIT_FLOATS \? fp4_pair(w) : int4_pair(w, zero_point);\n"
    "            pair[1] = FOUR_BIT_FLOATS \? fp4_pair(w >> 4) : int4_upper_pair(w, zero_point);\n"
    "        } else { /* eight nibbles: pairs (0, 4), (1, 5), (2, 6), (3, 7) */\n"
    "#pragma unroll\n"
    "            for (u32 j = 0; j < 4; j += 2) {\n"
    "                pair[(i * 4 + j) % (LANE_SUB / 2)] = FOUR_BIT_FLOATS \? fp4_pair(w >> (4 * j)) : int4_pair(w >> (4 * j), zero_point);\n"
    "                pair[(i * 4 + j + 1) % (LANE_SUB / 2)] = FOUR_BIT_FLOATS \? fp4_pair(w >> (4 * j + 4)) : int4_upper_pair(w >> (4 * j), zero_point);\n"
    "            }\n"
    "        }\n"
    "#endif\n"
    "    }\n"
    "}\n"
    "\n"
    "#endif\n",
    NULL};
static const char *const moer_source_10[] = { /* gguf.h */
    "/*\n"
    "  gguf.h: weights in the blocks of GGUF files, in which codes and scales lie together: 32 values a block (Q4_0, Q4_1, Q5_0,\n"
    "  Q5_1, Q8_0, IQ4_NL, MXFP4) or 256 (Q2_K to Q6_K, IQ4_XS). What a lane loads of a row in one step of tile.h, and how it\n"
    "  becomes pairs of 16-bit floats. cpu_gguf.c states the same formats value by value.\n"
    "\n"
    "  A step is 128 inputs: four blocks, or half a block. Blocks of most types are only aligned to 2 bytes, and lanes load\n"
    "  nothing that isn't theirs: the accesses are as wide as a lane's piece and its alignment allow. In Q4_K and Q5_K that is 16\n"
    "  bytes, half of which belongs to the neighbouring lane and is exchanged.\n"
    "\n"
    "  Every code becomes an unsigned byte first, of which CODE_ZERO is taken away again when it becomes a float.\n"
    "*/\n"
    "#include \"formats.h\"\n"
    "\n"
    "#define SMALL_BLOCKS (FORMAT != FORMAT_Q2_K && FORMAT != FORMAT_Q3_K && FORMAT != FORMAT_Q4_K && FORMAT != FORMAT_Q5_K && FORMAT != FORMAT_Q6_K && FORMAT != FORMAT_IQ4_XS)\n"
    "#define BLOCK_VALUES (SMALL_BLOCKS \? 32 : 256)\n"
    "#define LANE_VALUES 32\n"
    "#define SUB_HAS_SCALE 1\n"
    "#define SUB_HAS_MIN (FORMAT == FORMAT_Q4_1 || FORMAT == FORMAT_Q5_1 || FORMAT == FORMAT_Q2_K || FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K)\n"
    "#define PAIR_ORDER PAIRS_OF_4\n"
    "\n"
    "/* Bytes of a block; CODES, its nibbles (or bytes), and FIFTH_BITS, where they start; WORDS that a lane loads in a step, codes\n"
    "   first, then scales; LANE_SUB, values of a lane that share a scale, and LANE_RUN, as in tile.h. */\n"
    "#if FORMAT == FORMAT_Q4_0 || FORMAT == FORMAT_IQ4_NL\n"
    "#define BLOCK_BYTES 18\n"
    "#define CODES 2\n"
    "#elif FORMAT == FORMAT_Q4_1\n"
    "#define BLOCK_BYTES 20\n"
    "#define CODES 4\n"
    "#elif FORMAT == FORMAT_Q5_0\n"
    "#define BLOCK_BYTES 22\n"
    "#define FIFTH_BITS 2\n"
    "#define CODES 6\n"
    "#elif FORMAT == FORMAT_Q5_1\n"
    "#define BLOCK_BYTES 24\n"
    "#define FIFTH_BITS 4\n"
    "#define CODES 8\n"
    "#elif FORMAT == FORMAT_Q8_0\n"
    "#define BLOCK_BYTES 34\n"
    "#define CODES 2\n"
    "#elif FORMAT == FORMAT_GGUF_MXFP4\n"
    "#define BLOCK_BYTES 17\n"
    "#define CODES 1\n"
    "#elif FORMAT == FORMAT_Q2_K\n"
    "#define BLOCK_BYTES 84\n"
    "#elif FORMAT == FORMAT_Q3_K\n"
    "#define BLOCK_BYTES 110\n"
    "#elif FORMAT == FORMAT_Q4_K\n"
    "#define BLOCK_BYTES 144\n"
    "#define CODES 16\n"
    "#elif FORMAT == FORMAT_Q5_K\n"
    "#define BLOCK_BYTES 176\n"
    "#define CODES 48\n"
    "#elif FORMAT == FORMAT_Q6_K\n"
    "#define BLOCK_BYTES 210\n"
    "#elif FORMAT == FORMAT_IQ4_XS\n"
    "#define BLOCK_BYTES 136\n"
    "#define CODES 8\n"
    "#endif\n"
    "\n"
    "#define CODE_WORDS (FORMAT == FORMAT_Q8_0 \? 8 : FORMAT == FORMAT_Q2_K \? 2 : FORMAT == FORMAT_Q5_K || FORMAT == FORMAT_Q6_K \? 6 : FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_Q5_1 \? 8 : 4)\n"
    "#define HEAD_WORDS (FORMAT == FORMAT_Q2_K || FORMAT == FORMAT_Q6_K \? 3 : FORMAT == FORMAT_IQ4_XS \? 2 : 4)\n"
    "#define LANE_SUB (FORMAT == FORMAT_Q2_K || FORMAT == FORMAT_Q3_K || FORMAT == FORMAT_Q6_K \? 4 : 8)\n"
    "#define LANE_RUN (FORMAT == FORMAT_Q8_0 || FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K \? 8 : 4)\n"
    "#define SUBS (LANE_VALUES / LANE_SUB)\n"
    "#define CHUNK_WORDS (CODE_WORDS + HEAD_WORDS)\n"
    "#define ROW_HAS_SCALE 0\n"
    "\n"
    "#define CODE_IS_8_BITS (FORMAT == FORMAT_Q8_0 || FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS)\n"
    "#define CODE_ZERO (CODE_IS_8_BITS \? 128u : FORMAT == FORMAT_Q6_K \? 32u : FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_GGUF_MXFP4 \? 16u : FORMAT == FORMAT_Q4_0 \? 8u : FORMAT == FORMAT_Q3_K \? 4u : 0u)\n"
    "\n"
    "/* As in packed.h: codes are multiplied as they are, or in the mantissa of 128, where no zero is to be taken away again, or where CODE_SUMS says that this is done by the\n"
    "   sums of the activations. For subs of 16 these would take as many instructions as they save, and more registers. In bf16 there is always a zero, and the other use of those sums, minima, is\n"
    "   left alone. */\n"
    "#define CODES_MULTIPLY (TENSOR_CORES && (DECODE == DTYPE_F16 \? CODE_ZERO == 0 || (CODE_SUMS && LANE_SUB == 8) : CODE_SUMS && LANE_SUB == 8 && !CODE_IS_8_BITS && !SUB_HAS_MIN))\n"
    "#define CODE_SCALE (CODES_MULTIPLY && DECODE == DTYPE_F16 \? 16777216.0f : 1.0f)\n",
    "#define SUM_FACTOR (!CODES_MULTIPLY \? (DECODE == DTYPE_BF16 \? 0x3f80u : 0x3c00u) : DECODE == DTYPE_BF16 \? 0xc300u | CODE_ZERO : SUB_HAS_MIN \? 0x0001u : 0x8000u | CODE_ZERO)\n"
    "/* Minima are integers times one number a block: tensor cores multiply them by the sums of the activations, where these are held. */\n"
    "#define MINS_MULTIPLY (TENSOR_CORES && (FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K))\n"
    "#define UPPER_CODES (CODES_MULTIPLY && FORMAT == FORMAT_Q4_K) /* in f16 */\n"
    "\n"
    "#define ROW_BYTES ((u64)INNER / BLOCK_VALUES * BLOCK_BYTES)\n"
    "/* What an address at a multiple of UNIT in a block is aligned to. */\n"
    "#define BLOCK_ALIGN(UNIT) (((BLOCK_BYTES | (UNIT) | WEIGHT_ALIGN) & -(BLOCK_BYTES | (UNIT) | WEIGHT_ALIGN)))\n"
    "\n"
    "struct weight_row { const u8 *data; };\n"
    "\n"
    "DEVICE weight_row find_weight_row(const moer_weights_args &w, u32 expert, u64 row) {\n"
    "    weight_row r;\n"
    "    r.data = (const u8 *)w.data + ((u64)expert * ROWS + row) * ROW_BYTES;\n"
    "    return r;\n"
    "}\n"
    "\n"
    "DEVICE weight_row row_after(const weight_row &row, u32 rows) {\n"
    "    weight_row r;\n"
    "    r.data = row.data + rows * ROW_BYTES;\n"
    "    return r;\n"
    "}\n"
    "#define ROWS_ALIKE 1\n"
    "#define CAN_COPY(parts) 0 /* few blocks are aligned for it */\n"
    "#define STEPS_TOGETHER(parts) (NUM_STEPS % (parts) == 0)\n"
    "#define SCALES_FILL_WORDS 0\n"
    "#define STEP_SCALE_WORDS 0\n"
    "\n"
    "/* A lane's part of a row's step. Blocks of 32: word i and head i belong to block i of the step; head holds the scale below\n"
    "   and the minimum above; Q8_0 has two words a block, Q5_0 and Q5_1 a block's fifth bits in word 4 + i. */\n"
    "struct weight_chunk { u32 word[CODE_WORDS], head[HEAD_WORDS]; };\n"
    "\n"
    "DEVICE u32 lane_quarter() {\n"
    "    const u32 t = lane_index() & 3;\n"
    "    return FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K \? (t >> 1) | (t & 1) << 1 : t;\n"
    "}\n"
    "\n"
    "/* BYTES (1, 2 or 4) bytes of a block at a multiple of UNIT, which is known when compiled but for `more`, a multiple of 4. What is above 2 bytes in the word isn't cleared. */\n"
    "template <u32 BYTES, u32 UNIT>\n"
    "DEVICE u32 load_block(const u8 *block, u32 offset, u32 more) {\n"
    "    u32 word[1];\n"
    "    load_weights<BYTES, BLOCK_ALIGN(UNIT)>(word, block + offset + more, BYTES);\n"
    "    return word[0];\n"
    "}\n"
    "DEVICE u32 block_of_step(u32 step) { return SMALL_BLOCKS \? step * 4 : step / 2; } /* the first */\n"
    "DEVICE const u8 *block_of(const weight_row &row, u64 index) { return row.data + index * BLOCK_BYTES; }\n"
    "\n"
    "#ifdef TILES_IN_SHARED\n"
    "/* A row of a tile in shared memory: its block `first` is `skew` bytes, fewer than 4, and others, known when compiled, from a word. Likewise a block. */\n"
    "struct shared_row {\n"
    "    shared_place words;\n"
    "    u32 skew, first, bytes;\n"
    "};\n"
    "struct shared_block {\n"
    "    shared_place words;\n"
    "    u32 skew, bytes;\n"
    "};\n"
    "DEVICE shared_block block_of(const shared_row &row, u32 index) { return {row.words, row.skew, row.bytes + (index - row.first) * BLOCK_BYTES}; }\n"
    "\n"
    "/* What doesn't lie in one word is taken from two, the same one twice where it does. Places differ by what is known: few of them are had. */\n"
    "template <u32 BYTES, u32 UNIT>\n"
    "DEVICE u32 load_block(const shared_block &block, u32 offset, u32 more) {\n"
    "    constexpr u32 ALIGN = BLOCK_ALIGN(UNIT);\n"
    "    const u32 word = (block.bytes + offset) / 4, rest = (block.bytes + offset) % 4 + (ALIGN % 4 == 0 \? 0 : block.skew);\n"
    "    const u32 first = shared_load_from(shared_place_after(block.words, more / 4 + rest / 4), word);\n"
    "    if (BYTES == 1) return (first >> rest % 4 * 8) & 255u;\n"
    "    if (BYTES <= ALIGN) return BYTES == 4 \? first : first >> rest % 4 * 8;\n"
    "    return select_bytes(first, shared_load_from(shared_place_after(block.words, more / 4 + (rest + BYTES - 1) / 4), word), 0x3210u + 0x1111u * (rest % 4));\n"
    "}\n"
    "#endif\n"
    "\n"
    "#if FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K\n"
    "/* The lane's codes of half a block: it holds those of two subs in words 0 and 1, and of the others in 2 and 3, at once or when arrange_weight_chunk has exchanged them. */\n"
    "DEVICE void load_codes(weight_chunk &c, const u8 *block, u32 half) {\n",
    "    load_weights<16, BLOCK_ALIGN(16)>(c.word, block + CODES + half * 64 + (lane_index() & 3) * 16, 16);\n"
    "}\n"
    "DEVICE void load_head(weight_chunk &c, const u8 *block) { load_weights<16, BLOCK_ALIGN(16)>(c.head, block, 16); }\n"
    "#ifdef TILES_IN_SHARED\n"
    "DEVICE void load_codes(weight_chunk &c, const shared_block &block, u32 half) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i += 2) {\n"
    "        const u32x2 two = shared_load_2_from(shared_place_after(block.words, half * 16 + lane_quarter() * 2), (block.bytes + CODES) / 4 + i * 4);\n"
    "        c.word[i] = two.v[0];\n"
    "        c.word[i + 1] = two.v[1];\n"
    "    }\n"
    "}\n"
    "DEVICE void load_head(weight_chunk &c, const shared_block &block) {\n"
    "    const u32x4 four = shared_load_4_from(block.words, block.bytes / 4);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i++) c.head[i] = four.v[i];\n"
    "}\n"
    "#endif\n"
    "#endif\n"
    "\n"
    "template <class Row>\n"
    "DEVICE weight_chunk load_chunk(const Row &row, u32 step, bool inner) {\n"
    "    const u32 t = lane_index() & 3;\n"
    "    weight_chunk c;\n"
    "#if SMALL_BLOCKS\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < CODE_WORDS; i++) c.word[i] = c.head[i % 4] = 0;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i++) {\n"
    "        if (INNER % STEP != 0 && !inner && step * 4 + i >= INNER / 32) continue;\n"
    "        const auto block = block_of(row, block_of_step(step) + i);\n"
    "        c.head[i] = load_block<(FORMAT == FORMAT_GGUF_MXFP4 \? 1 : SUB_HAS_MIN \? 4 : 2), 16>(block, 0, 0);\n"
    "#if FORMAT == FORMAT_Q8_0\n"
    "        c.word[i * 2 + 0] = load_block<4, 2>(block, CODES, t * 8);\n"
    "        c.word[i * 2 + 1] = load_block<4, 2>(block, CODES + 4, t * 8);\n"
    "#else\n"
    "        c.word[i] = load_block<4, (CODES | 4)>(block, CODES, t * 4);\n"
    "#if FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_Q5_1\n"
    "        c.word[4 + i] = load_block<4, FIFTH_BITS>(block, FIFTH_BITS, 0);\n"
    "#endif\n"
    "#endif\n"
    "    }\n"
    "#else\n"
    "    const auto block = block_of(row, block_of_step(step));\n"
    "    const u32 half = step % 2;\n"
    "#if FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K\n"
    "    load_codes(c, block, half);\n"
    "    load_head(c, block);\n"
    "#if FORMAT == FORMAT_Q5_K\n"
    "    c.word[4] = load_block<4, 8>(block, 16, lane_quarter() * 8);\n"
    "    c.word[5] = load_block<4, 4>(block, 20, lane_quarter() * 8);\n"
    "#endif\n"
    "#elif FORMAT == FORMAT_IQ4_XS\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i++) c.word[i] = load_block<4, 4>(block, CODES + i * 16, half * 64 + t * 4);\n"
    "    c.head[0] = load_block<4, 16>(block, 0, 0);\n"
    "    c.head[1] = load_block<4, 4>(block, 4, 0);\n"
    "#else /* subs of 16: the lane's four of the first and of the second 16 */\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 2; i++) {\n"
    "#if FORMAT == FORMAT_Q6_K\n"
    "        c.word[i] = load_block<4, 4>(block, i * 16, half * 64 + t * 4);\n"
    "        c.word[2 + i] = load_block<4, 4>(block, 32 + i * 16, half * 64 + t * 4);\n"
    "        c.word[4 + i] = load_block<4, 4>(block, 128 + i * 16, half * 32 + t * 4);\n"
    "        c.head[i] = load_block<4, 4>(block, 192 + i * 4, half * 8);\n"
    "#elif FORMAT == FORMAT_Q3_K\n"
    "        c.word[i] = load_block<4, 4>(block, 32 + i * 16, half * 32 + t * 4);\n"
    "        c.word[2 + i] = load_block<4, 4>(block, i * 16, t * 4);\n"
    "        c.head[i] = load_block<4, 4>(block, 96 + i * 4, 0);\n"
    "#else\n"
    "        c.word[i] = load_block<4, 4>(block, 16 + i * 16, half * 32 + t * 4);\n"
    "        c.head[i] = load_block<4, 4>(block, i * 4, half * 8);\n"
    "#endif\n"
    "    }\n"
    "#if FORMAT == FORMAT_Q6_K\n"
    "    c.head[2] = load_block<2, 2>(block, 208, 0);\n"
    "#elif FORMAT == FORMAT_Q3_K\n"
    "    c.head[2] = load_block<4, 4>(block, 104, 0);\n"
    "    c.head[3] = load_block<2, 2>(block, 108, 0);\n"
    "#else\n"
    "    c.head[2] = load_block<4, 4>(block, 80, 0);\n"
    "#endif\n"
    "#endif\n"
    "#endif\n"
    "    return c;\n"
    "}\n"
    "\n"
    "DEVICE weight_chunk load_weight_chunk(const weight_row &row, u32 step, bool inner) { return load_chunk(row, step, inner); }\n"
    "\n"
    "/* Q4_K and Q5_K: lanes 0 and 1 hold the codes of subs 0 and 1, the others those of 2 and 3. */\n"
    "DEVICE void arrange_weight_chunk(weight_chunk &c) {\n"
    "#ifndef TILES_IN_SHARED\n"
    "    if (FORMAT != FORMAT_Q4_K && FORMAT != FORMAT_Q5_K) return;\n",
    "    exchange_words<2>(c.word[0], c.word[2 % CODE_WORDS]);\n"
    "    exchange_words<2>(c.word[1], c.word[3 % CODE_WORDS]);\n"
    "#else\n"
    "    (void)c;\n"
    "#endif\n"
    "}\n"
    "\n"
    "DEVICE float low_half(u32 word) { return f16_to_f32((u16)word); }\n"
    "DEVICE float high_half(u32 word) { return f16_to_f32((u16)(word >> 16)); }\n"
    "\n"
    "/* A scale times what byte `index` of a word has above `zero`: exact, and cheaper than a conversion, by way of 256 + byte / 128. */\n"
    "DEVICE float scaled_byte(float scale, u32 word, u32 index, u32 zero) {\n"
    "    const float larger = f32_mul(scale, 128.0f);\n"
    "    return f32_fma(larger, f32_from_bits(select_bytes(word, in_register(0x43800000u), 0x7604u + 0x10u * index)), f32_mul(larger, -256.0f - (float)zero * 0.0078125f));\n"
    "}\n"
    "\n"
    "/* Products of an f16 and a small integer: exact. Of weights times 2^-4 with `upper`, in Q4_K. */\n"
    "DEVICE float find_sub_scale(const weight_chunk &c, u32 step, u32 sub, bool upper) {\n"
    "#if FORMAT == FORMAT_GGUF_MXFP4\n"
    "    return moer_e8m0_half(c.head[sub]);\n"
    "#elif SMALL_BLOCKS\n"
    "    return low_half(c.head[sub]);\n"
    "#elif FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K\n"
    "    const float scale = upper \? f32_mul(low_half(c.head[0]), 0.0625f) : low_half(c.head[0]);\n"
    "    return scaled_byte(scale, moer_k_scales(c.head[1], c.head[3], step % 2), sub, 0);\n"
    "#elif FORMAT == FORMAT_Q6_K\n"
    "    return scaled_byte(low_half(c.head[2]), c.head[sub / 4] ^ 0x80808080u, sub % 4, 128);\n"
    "#elif FORMAT == FORMAT_Q2_K\n"
    "    return scaled_byte(low_half(c.head[2]), c.head[sub / 4] & 0x0f0f0f0fu, sub % 4, 0);\n"
    "#elif FORMAT == FORMAT_Q3_K\n"
    "    return scaled_byte(low_half(c.head[3]), moer_q3_k_scales(c.head[sub / 4], c.head[2], step % 2, sub / 4), sub % 4, 32);\n"
    "#else\n"
    "    return f32_mul(low_half(c.head[0]), (float)moer_iq4_xs_scale(c.head[1], c.head[0] >> 16, step % 2 * 4 + sub));\n"
    "#endif\n"
    "}\n"
    "\n"
    "DEVICE float sub_scale(const weight_chunk &c, u32 step, u32 sub) { return find_sub_scale(c, step, sub, false); }\n"
    "/* Of the codes of unpack_codes. */\n"
    "DEVICE float code_scale(const weight_chunk &c, u32 step, u32 sub) { return find_sub_scale(c, step, sub, UPPER_CODES && sub % 2 == 1); }\n"
    "\n"
    "DEVICE float sub_min(const weight_chunk &c, u32 step, u32 sub) {\n"
    "#if FORMAT == FORMAT_Q4_1 || FORMAT == FORMAT_Q5_1\n"
    "    return high_half(c.head[sub]);\n"
    "#elif FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K\n"
    "    return scaled_byte(-high_half(c.head[0]), moer_k_mins(c.head[2], c.head[3], step % 2), sub, 0);\n"
    "#elif FORMAT == FORMAT_Q2_K\n"
    "    return scaled_byte(-high_half(c.head[2]), (c.head[sub / 4] >> 4) & 0x0f0f0f0fu, sub % 4, 0);\n"
    "#else\n"
    "    return 0.0f;\n"
    "#endif\n"
    "}\n"
    "\n"
    "#if MINS_MULTIPLY\n"
    "/* A lane's sub of a step is that of its number: that sub's minimum over min_scale, twice as bf16. */\n"
    "DEVICE u32 min_pair(const weight_chunk &c, u32 step) {\n"
    "    return bf162_fma(select_bytes(moer_k_mins(c.head[2], c.head[3], step % 2), 0x43434343u, 0x4040u + 0x0101u * (lane_index() & 3)), 0x3f803f80u, 0xc300c300u);\n"
    "}\n"
    "DEVICE float min_scale(const weight_chunk &c) { return -high_half(c.head[0]); }\n"
    "#endif\n"
    "\n"
    "DEVICE float row_scale(const weight_row &) { return 1.0f; }\n"
    "\n"
    "/* The codes in bits 0 to 7 and 16 to 23 as floats, less CODE_ZERO. */\n"
    "DEVICE u32 byte_pair(u32 codes) {\n"
    "    if (DECODE == DTYPE_F16) return half2_sub(and_or(codes, 0x00ff00ffu, 0x64006400u), CODE_ZERO * 0x10001u + 0x64006400u);\n"
    "    if (!CODE_IS_8_BITS) return bf162_fma(and_or(codes, 0x007f007fu, 0x43004300u), 0x3f803f80u, CODE_ZERO * 0x10001u + 0xc300c300u);\n"
    "    return f32_to_bf162(f32_add(f32_from_bits((codes & 255u) | 0x4b000000u), f32_from_bits(0xcb000000u + CODE_ZERO)),\n"
    "                        f32_add(f32_from_bits(((codes >> 16) & 255u) | 0x4b000000u), f32_from_bits(0xcb000000u + CODE_ZERO)));\n"
    "}\n"
    "\n"
    "#if FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS || FORMAT == FORMAT_GGUF_MXFP4\n"
    "/* The table's bytes, CODE_ZERO added, for four nibbles. */\n"
    "DEVICE u32 look_up(u32 nibbles) {\n"
    "#if FORMAT == FORMAT_GGUF_MXFP4\n"
    "    const u32 table[4] = {0x13121110u, 0x1c181614u, 0x0d0e0f10u, 0x04080a0cu};\n",
    "#else\n"
    "    const u32 table[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};\n"
    "#endif\n"
    "    const u32 lower = select_bytes(table[0], table[1], nibbles & 0x7777u), upper = select_bytes(table[2], table[3], nibbles & 0x7777u);\n"
    "    return select_bytes(lower, upper, 0x3210u | ((nibbles & 0x8888u) >> 1));\n"
    "}\n"
    "#endif\n"
    "\n"
    "/* Four bits, each in bit 4 of a byte. */\n"
    "DEVICE u32 fifth_bits(u32 bits) { return (((bits & 15u) * 0x00204081u) & 0x01010101u) << 4; }\n"
    "\n"
    "/* A sub's codes, a byte each. */\n"
    "DEVICE void unpack_bytes(const weight_chunk &c, u32 step, u32 sub, u32 (&codes)[LANE_SUB / 4]) {\n"
    "#if FORMAT == FORMAT_Q8_0\n"
    "    codes[0] = c.word[sub * 2] ^ 0x80808080u;\n"
    "    codes[1] = c.word[sub * 2 + 1] ^ 0x80808080u;\n"
    "#elif FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS || FORMAT == FORMAT_GGUF_MXFP4\n"
    "    const u32 first = look_up(c.word[sub] & 0xffffu), second = look_up(c.word[sub] >> 16);\n"
    "    codes[0] = select_bytes(first, second, 0x6420);\n"
    "    codes[1] = select_bytes(first, second, 0x7531);\n"
    "#elif SMALL_BLOCKS\n"
    "    codes[0] = c.word[sub] & 0x0f0f0f0fu;\n"
    "    codes[1] = (c.word[sub] >> 4) & 0x0f0f0f0fu;\n"
    "#if FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_Q5_1\n"
    "    codes[0] |= fifth_bits(c.word[4 + sub] >> (lane_quarter() * 4));\n"
    "    codes[1] |= fifth_bits(c.word[4 + sub] >> (16 + lane_quarter() * 4));\n"
    "#endif\n"
    "#elif FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 2; i++) {\n"
    "        codes[i] = (c.word[sub / 2 * 2 + i] >> (sub % 2 * 4)) & 0x0f0f0f0fu;\n"
    "#if FORMAT == FORMAT_Q5_K\n"
    "        codes[i] |= ((c.word[4 + i] >> (step % 2 * 4 + sub)) & 0x01010101u) << 4;\n"
    "#endif\n"
    "    }\n"
    "#elif FORMAT == FORMAT_Q6_K\n"
    "    codes[0] = ((c.word[sub / 2 % 2 * 2 + sub % 2] >> (sub / 4 * 4)) & 0x0f0f0f0fu) | ((c.word[4 + sub % 2] >> (sub / 2 * 2)) & 0x03030303u) << 4;\n"
    "#elif FORMAT == FORMAT_Q3_K\n"
    "    codes[0] = ((c.word[sub % 2] >> (sub / 2 * 2)) & 0x03030303u) | ((c.word[2 + sub % 2] >> (step % 2 * 4 + sub / 2)) & 0x01010101u) << 2;\n"
    "#else\n"
    "    codes[0] = (c.word[sub % 2] >> (sub / 2 * 2)) & 0x03030303u;\n"
    "#endif\n"
    "}\n"
    "\n"
    "DEVICE void unpack_sub(const weight_chunk &c, u32 step, u32 sub, u32 (&pair)[LANE_SUB / 2]) {\n"
    "    u32 codes[LANE_SUB / 4];\n"
    "    unpack_bytes(c, step, sub, codes);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB / 4; i++) {\n"
    "        pair[i * 2] = byte_pair(codes[i]);\n"
    "        pair[i * 2 + 1] = byte_pair(codes[i] >> 8);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The same with CODE_ZERO: as f16 subnormals, code * 2^-24, Q4_K's upper codes where they are, times 2^-20; or 128 more, in bf16. */\n"
    "DEVICE u32 code_pair(u32 codes, u32 mask) { return DECODE == DTYPE_BF16 \? and_or(codes, mask, 0x43004300u) : codes & mask; }\n"
    "DEVICE void unpack_codes(const weight_chunk &c, u32 step, u32 sub, u32 (&pair)[LANE_SUB / 2]) {\n"
    "    u32 codes[LANE_SUB / 4];\n"
    "    if (!UPPER_CODES) unpack_bytes(c, step, sub, codes);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB / 4; i++) {\n"
    "        const u32 bytes = UPPER_CODES \? c.word[(sub / 2 * 2 + i) % CODE_WORDS] : codes[i], mask = !UPPER_CODES \? 0x00ff00ffu : sub % 2 == 1 \? 0x00f000f0u : 0x000f000fu;\n"
    "        pair[i * 2] = code_pair(bytes, mask);\n"
    "        pair[i * 2 + 1] = code_pair(bytes >> 8, mask);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_11[] = { /* values.h */
    "/*\n"
    "  values.h: single numbers of the three dtypes in global memory. Several at once belong to vector.h, quantized weights to\n"
    "  packed.h and gguf.h.\n"
    "*/\n"
    "#ifndef MOER_VALUES\n"
    "#define MOER_VALUES\n"
    "#define DTYPE_F32 1\n"
    "#define DTYPE_F16 2\n"
    "#define DTYPE_BF16 3\n"
    "\n"
    "DEVICE float load_value(const void *array, u64 index, int dtype) {\n"
    "    if (dtype == DTYPE_F32) return f32_from_bits(load_4((const u32 *)array + index));\n"
    "    const u16 half = load_2((const u16 *)array + index);\n"
    "    return dtype == DTYPE_F16 \? f16_to_f32(half) : bf16_to_f32(half);\n"
    "}\n"
    "\n"
    "DEVICE void store_value(void *array, u64 index, int dtype, float value) {\n"
    "    if (dtype == DTYPE_F32) ((float *)array)[index] = value;\n"
    "    else ((u16 *)array)[index] = dtype == DTYPE_F16 \? f32_to_f16(value) : f32_to_bf16(value);\n"
    "}\n"
    "#endif\n",
    NULL};
static const char *const moer_source_12[] = { /* sums.h */
    "/*\n"
    "  sums.h: the sums of activations that some formats' products need beside the activations: times the zero that all codes of a sub have,\n"
    "  or for the sub's minimum. How they are found, how a lane holds them for many tiles, and how minima come into the sums.\n"
    "*/\n"
    "\n"
    "/* The sum of a sub's activations that the format wants: times its zero, which its sums begin with, or for minima. */\n"
    "#if CODES_MULTIPLY || SUB_HAS_MIN\n"
    "#define WANTS_SUMS (SUB_HAS_MIN || CODE_ZERO != 0)\n"
    "DEVICE void sum_activations(float (&sums)[4], const u32 (&activation)[NUM_PAIRS]) {\n"
    "    constexpr u32 FACTORS = SUM_FACTOR * 0x10001u;\n"
    "    const u32 factors[4] = {FACTORS, FACTORS, FACTORS, FACTORS};\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < NUM_PAIRS / 2; i++) { /* in the pairs of multiply_codes, which then needn't move them */\n"
    "        const bool apart = FORMAT == FORMAT_INT4 && X == DTYPE_F16;\n"
    "        const u32 first = apart \? i / 2 * 4 + i % 2 : i * 2, second = first + (apart \? 2 : 1);\n"
    "        if (i == 0) multiply_fragments<true>(sums, factors, activation[first], activation[second % NUM_PAIRS]);\n"
    "        else multiply_fragments<false>(sums, factors, activation[first], activation[second % NUM_PAIRS]);\n"
    "    }\n"
    "}\n"
    "#else\n"
    "#define WANTS_SUMS 0\n"
    "#endif\n"
    "\n"
    "/* Such sums of a step, as they are held: of tokens 2t and 2t + 1, or for minima of token g in sub t alone, cut into three bf16 and a zero, by which it's exact. */\n"
    "struct held_sums {\n"
    "#if MINS_MULTIPLY\n"
    "    u32 parts[2];\n"
    "#else\n"
    "    float of[SUBS][2];\n"
    "#endif\n"
    "};\n"
    "\n"
    "#if MINS_MULTIPLY\n"
    "DEVICE void hold_sum(held_sums &held, u32 sub, const float (&sums)[4]) {\n"
    "    const u32 lane = lane_index(), g = lane >> 2, from = (lane & ~3u) + g / 2;\n"
    "    const u32 even = warp_shuffle(f32_bits(sums[0]), from), odd = warp_shuffle(f32_bits(sums[1]), from);\n"
    "    if ((lane & 3) != sub) return;\n"
    "    float rest = f32_from_bits(g % 2 \? odd : even);\n"
    "    u16 part[3];\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 3; i++) {\n"
    "        part[i] = f32_to_bf16(rest);\n"
    "        rest = f32_add(rest, -bf16_to_f32(part[i]));\n"
    "    }\n"
    "    held.parts[0] = part[0] | (u32)part[1] << 16;\n"
    "    held.parts[1] = part[2];\n"
    "}\n"
    "\n"
    "DEVICE void take_sum(float (&)[4], const held_sums &, u32) {} /* they come in once a step */\n"
    "\n"
    "DEVICE void add_mins(float (&sums)[4], const weight_chunk &low, const weight_chunk &high, u32 step, const held_sums &held) {\n"
    "    const u32 low_pair = min_pair(low, step), high_pair = min_pair(high, step), a[4] = {low_pair, high_pair, low_pair, high_pair};\n"
    "    float product[4];\n"
    "    matrix_product_bf16(product, a, held.parts[0], held.parts[1]);\n"
    "    sums[0] = f32_fma(min_scale(low), product[0], sums[0]);\n"
    "    sums[1] = f32_fma(min_scale(low), product[1], sums[1]);\n"
    "    sums[2] = f32_fma(min_scale(high), product[2], sums[2]);\n"
    "    sums[3] = f32_fma(min_scale(high), product[3], sums[3]);\n"
    "}\n"
    "#else\n"
    "DEVICE void hold_sum(held_sums &held, u32 sub, const float (&sums)[4]) {\n"
    "    held.of[sub][0] = sums[0];\n"
    "    held.of[sub][1] = sums[1];\n"
    "}\n"
    "\n"
    "DEVICE void take_sum(float (&sums)[4], const held_sums &held, u32 sub) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i++) sums[i] = held.of[sub][i % 2];\n"
    "}\n"
    "#endif\n",
    NULL};
static const char *const moer_source_13[] = { /* tile.h */
    "/*\n"
    "  tile.h: the product of 16 weight rows and the activations of 8 (or a few times 8) tokens by one warp: quantized weights\n"
    "  are turned into numbers here, on their way from memory to the multiplication. Which rows and tokens they are, and what\n"
    "  happens to the sums, belongs to the kernels; how the weights come in time, to stream.h and copied.h; what the bytes of a format mean, to\n"
    "  packed.h and gguf.h; the sums of activations that some formats want, to sums.h.\n"
    "\n"
    "  Constants: FORMAT (weights) and X (dtype of the activations), values as in moe_route.h; ROWS, the number N of rows of a\n"
    "  matrix; INNER, the length K of a row; X_ORDER, the order in which pairs of activations lie in memory: linear (also if not\n"
    "  defined), or that in which they are multiplied; WEIGHT_ALIGN and X_ALIGN, bytes that every row's start is known to be aligned to, at\n"
    "  most 16; and those of packed.h.\n"
    "\n"
    "  Lane 4g + t holds weight rows g and g + 8, and the activations of token g. K is cut into steps; in a step lane t takes\n"
    "  LANE_VALUES inputs of its rows and of its token, in SUBS subs of LANE_SUB values with one scale each. A sub is a fourth of\n"
    "  4 * LANE_SUB consecutive inputs: pieces of LANE_RUN inputs, so that each lane's pieces lie beside those of the others. Any\n"
    "  order of K is right as long as weights and activations agree. Integers and small floats are multiplied as they are, exact\n"
    "  in f16 and bf16, and the f32 sum of a sub is scaled. So the only rounding is that of the f32 sums.\n"
    "\n"
    "  Activations in f16 or bf16 are multiplied on tensor cores, with weights in the same type. Otherwise (f32 on either side,\n"
    "  or f16 against bf16) f32 multiply-adds on the same lane layout take their place.\n"
    "\n"
    "  A format's header says for a lane: load_weight_chunk, what it loads of a row in a step; arrange_weight_chunk, the exchange\n"
    "  with the three other lanes of the row; unpack_sub, a sub as pairs of floats in the order PAIR_ORDER; sub_scale and\n"
    "  sub_min, by which sub_scale * sum(code * x) + sub_min * sum(x) is the sub's part of the sum; where CODES_MULTIPLY, unpack_codes and code_scale,\n"
    "  the same for codes that are multiplied as they are; row_scale, for all of a row (where ROW_HAS_SCALE); CHUNK_WORDS, 32-bit registers that a chunk takes.\n"
    "*/\n"
    "#include \"values.h\"\n"
    "\n"
    "#define FORMAT_F32 1\n"
    "#define FORMAT_F16 2\n"
    "#define FORMAT_BF16 3\n"
    "#define FORMAT_INT8 4\n"
    "#define FORMAT_INT4 5\n"
    "#define FORMAT_FP8 6\n"
    "#define FORMAT_MXFP4 7\n"
    "#define FORMAT_NVFP4 8\n"
    "#define FORMAT_GGUF 100\n"
    "#define FORMAT_Q4_0 102\n"
    "#define FORMAT_Q4_1 103\n"
    "#define FORMAT_Q5_0 106\n"
    "#define FORMAT_Q5_1 107\n"
    "#define FORMAT_Q8_0 108\n"
    "#define FORMAT_Q2_K 110\n"
    "#define FORMAT_Q3_K 111\n"
    "#define FORMAT_Q4_K 112\n"
    "#define FORMAT_Q5_K 113\n"
    "#define FORMAT_Q6_K 114\n"
    "#define FORMAT_IQ4_NL 120\n"
    "#define FORMAT_IQ4_XS 123\n"
    "#define FORMAT_GGUF_MXFP4 139\n"
    "\n"
    "/* Which two of a sub's values make a pair. */\n"
    "#define PAIRS_LINEAR 0 /* (0, 1), (2, 3), ... */\n"
    "#define PAIRS_OF_4 1   /* (0, 2), (1, 3) of each 4 */\n"
    "#define PAIRS_OF_8 2   /* (0, 4), (1, 5), (2, 6), (3, 7) of each 8 */\n"
    "\n"
    "#ifndef X_ORDER\n"
    "#define X_ORDER PAIRS_LINEAR\n"
    "#endif\n"
    "\n"
    "#define X_BYTES (X == DTYPE_F32 \? 4 : 2)\n"
    "#define TENSOR_CORES (X != DTYPE_F32 && FORMAT != FORMAT_F32 && (FORMAT > FORMAT_BF16 || FORMAT == X))\n"
    "#define DECODE (X == DTYPE_BF16 \? DTYPE_BF16 : DTYPE_F16) /* what codes are unpacked to */\n"
    "#define STEP (4 * LANE_VALUES)\n"
    "#define NUM_STEPS ((INNER + STEP - 1) / STEP)\n"
    "/* Where `parts` warps share the steps of a row, each takes this many: those that follow each other, since what lies together comes\n"
    "   fastest (STEPS_TOGETHER), if all get as many and their scales stay at one place in words; otherwise every parts-th. */\n"
    "#define PART_STEPS(parts) ((NUM_STEPS + (parts) - 1) / (parts))\n"
    "#define STEP_STRIDE(parts) (STEPS_TOGETHER(parts) \? 1 : (parts))\n"
    "#define FIRST_STEP(part, parts) (STEPS_TOGETHER(parts) \? (part) * PART_STEPS(parts) : (part))\n",
    "/* BYTES bytes of weights from `p` on, a power of two up to 32, of which the row has `left`; zero bits for the others. */\n"
    "template <u32 BYTES, u32 ALIGN, u32 WORDS>\n"
    "DEVICE void load_weights(u32 (&word)[WORDS], const u8 *p, u32 left) {\n"
    "    static_assert((BYTES + 3) / 4 <= WORDS, \"room for the bytes\");\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < WORDS; i++) word[i] = 0;\n"
    "    if (ALIGN >= (BYTES < 4 \? BYTES : 4) && left >= BYTES) {\n"
    "        if (BYTES % 16 == 0 && ALIGN >= 16) {\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < BYTES / 16; i++) {\n"
    "                const u32x4 v = load_weights_16(p + i * 16);\n"
    "#pragma unroll\n"
    "                for (u32 j = 0; j < 4; j++) word[(i * 4 + j) % WORDS] = v.v[j];\n"
    "            }\n"
    "        } else if (BYTES % 8 == 0 && ALIGN >= 8) {\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < BYTES / 8; i++) {\n"
    "                const u32x2 v = load_weights_8(p + i * 8);\n"
    "                word[i * 2 % WORDS] = v.v[0];\n"
    "                word[(i * 2 + 1) % WORDS] = v.v[1];\n"
    "            }\n"
    "        } else if (BYTES % 4 == 0) {\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < BYTES / 4; i++) word[i] = load_weights_4(p + i * 4);\n"
    "        } else {\n"
    "            word[0] = BYTES == 2 \? (u32)load_2(p) : (u32)load_1(p);\n"
    "        }\n"
    "    } else if (ALIGN == 2 && BYTES % 2 == 0 && left >= BYTES) {\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < BYTES / 2; i++) word[i / 2] |= (u32)load_2(p + i * 2) << (16 * (i % 2));\n"
    "    } else { /* rows of odd sizes, and the end of a row */\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < BYTES; i++)\n"
    "            if (i < left) word[i / 4] |= (u32)load_1(p + i) << (8 * (i % 4));\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Between lanes t and t ^ MASK: the lower one gets the other's first word as its second, and gives its second as the other's\n"
    "   first. */\n"
    "template <u32 MASK>\n"
    "DEVICE void exchange_words(u32 &first, u32 &second) {\n"
    "    const bool upper = (lane_index() & MASK) != 0;\n"
    "    const u32 received = warp_shuffle_xor(upper \? first : second, MASK);\n"
    "    if (upper) first = received;\n"
    "    else second = received;\n"
    "}\n"
    "\n"
    "#ifndef CODE_SUMS\n"
    "#define CODE_SUMS 0\n"
    "#endif\n"
    "#if FORMAT > FORMAT_GGUF\n"
    "#include \"gguf.h\"\n"
    "#else\n"
    "#include \"packed.h\"\n"
    "#endif\n"
    "\n"
    "#ifndef CODES_MULTIPLY\n"
    "#define CODES_MULTIPLY 0\n"
    "#define CODE_SCALE 1.0f\n"
    "#define CODE_ZERO 0u\n"
    "#endif\n"
    "#ifndef MINS_MULTIPLY\n"
    "#define MINS_MULTIPLY 0\n"
    "#endif\n"
    "/* Whether all of a step's scales are had at once, by shifts: where a kernel has registers for them. */\n"
    "#if defined(SCALES_AT_ONCE) && defined(SCALES_ARE_EXPONENTS)\n"
    "#define SCALES_BY_SHIFT SCALES_ARE_EXPONENTS\n"
    "#else\n"
    "#define SCALES_BY_SHIFT 0\n"
    "#endif\n"
    "#define NUM_PAIRS (LANE_SUB / 2) /* in a sub */\n"
    "\n"
    "/* The number of a part's step `index`; it is one of the row's; it isn't the row's last, in any part. Known when compiled, where index is, for most. */\n"
    "template <u32 PARTS>\n"
    "DEVICE u32 step_of(u32 part, u32 index) { return FIRST_STEP(part, PARTS) + index * STEP_STRIDE(PARTS); }\n"
    "template <u32 PARTS>\n"
    "DEVICE bool step_exists(u32 part, u32 index) {\n"
    "    return STEPS_TOGETHER(PARTS) || (index + 1) * PARTS <= NUM_STEPS || step_of<PARTS>(part, index) < NUM_STEPS;\n"
    "}\n"
    "template <u32 PARTS>\n"
    "DEVICE bool is_inner_step(u32 index) { return (index + 1) * PARTS < NUM_STEPS; }\n"
    "\n"
    "static_assert(X_ORDER == PAIRS_LINEAR || (X_ORDER == PAIR_ORDER && TENSOR_CORES && INNER % 8 == 0), \"activations in an order that this format can use\");\n"
    "\n"
    "/* Position in the sub of the first (half 0) or second (half 1) value of a pair. */\n"
    "DEVICE u32 pair_element(u32 pair, u32 half) {\n"
    "    if (PAIR_ORDER == PAIRS_OF_4) return pair / 2 * 4 + pair % 2 + half * 2;\n"
    "    if (PAIR_ORDER == PAIRS_OF_8) return pair / 4 * 8 + pair % 4 + half * 4;\n"
    "    return pair * 2 + half;\n"
    "}\n"
    "\n"
    "/* The input that is value i of a lane's sub. */\n"
    "DEVICE u32 sub_input(u32 step, u32 sub, u32 i) { return step * STEP + sub * 4 * LANE_SUB + i / LANE_RUN * 4 * LANE_RUN + lane_quarter() * LANE_RUN + i % LANE_RUN; }\n"
    "\n",
    "/* How the activations come: loaded beside the weights; loaded when needed, where those of several blocks of tokens would take\n"
    "   too many registers; or held, in the order of pairs, for many tiles. */\n"
    "constexpr int X_LOADED = 0, X_LATE = 1, X_HELD = 2;\n"
    "\n"
    "/* A lane's two rows of a tile. */\n"
    "struct tile_rows {\n"
    "    weight_row low, high;\n"
    "};\n"
    "\n"
    "/* What a sum over codes lacks: once the parts are added up, since a power of two rounds nothing. */\n"
    "DEVICE float scale_codes(float sum) { return TENSOR_CORES && CODE_SCALE != 1.0f \? f32_mul(sum, CODE_SCALE) : sum; }\n"
    "\n"
    "#if TENSOR_CORES\n"
    "\n"
    "/* The activations of a token that belong to a sub, as they lie in memory. */\n"
    "DEVICE void load_activations(const u8 *x, u32 step, u32 sub, bool inner, u32 (&word)[NUM_PAIRS]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < NUM_PAIRS; i++) word[i] = 0;\n"
    "#pragma unroll\n"
    "    for (u32 run = 0; run < LANE_SUB; run += LANE_RUN) {\n"
    "        const u32 k = sub_input(step, sub, run);\n"
    "        const u8 *p = x + (u64)k * 2;\n"
    "        if (X_ALIGN >= 4 && (INNER % STEP == 0 || inner || k + LANE_RUN <= INNER)) {\n"
    "            if (LANE_RUN % 8 == 0 && X_ALIGN == 16) {\n"
    "#pragma unroll\n"
    "                for (u32 i = 0; i < LANE_RUN / 8; i++) {\n"
    "                    const u32x4 v = load_16(p + i * 16);\n"
    "#pragma unroll\n"
    "                    for (u32 j = 0; j < 4; j++) word[(run / 2 + i * 4 + j) % NUM_PAIRS] = v.v[j];\n"
    "                }\n"
    "            } else if (X_ALIGN >= 8) {\n"
    "#pragma unroll\n"
    "                for (u32 i = 0; i < LANE_RUN / 4; i++) {\n"
    "                    const u32x2 v = load_8(p + i * 8);\n"
    "                    word[run / 2 + i * 2] = v.v[0];\n"
    "                    word[run / 2 + i * 2 + 1] = v.v[1];\n"
    "                }\n"
    "            } else {\n"
    "#pragma unroll\n"
    "                for (u32 i = 0; i < LANE_RUN / 2; i++) word[run / 2 + i] = load_4(p + i * 4);\n"
    "            }\n"
    "        } else if (X_ALIGN < 4 || INNER % LANE_RUN != 0) { /* otherwise a run is all there, or none of it */\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < LANE_RUN; i++)\n"
    "                if (k + i < INNER) word[(run + i) / 2] |= (u32)load_2(p + i * 2) << (16 * (i % 2));\n"
    "        }\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The same in the order of the sub's pairs. */\n"
    "DEVICE void pair_activations(const u32 (&word)[NUM_PAIRS], u32 (&pair)[NUM_PAIRS]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < NUM_PAIRS; i++) {\n"
    "        const u32 first = pair_element(i, 0), second = pair_element(i, 1);\n"
    "        pair[i] = PAIR_ORDER == X_ORDER \? word[i] : select_bytes(word[first / 2], word[second / 2], first % 2 == 0 \? 0x5410 : 0x7632);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* sums += one fragment times another, or with BEGIN sums = that. */\n"
    "template <bool BEGIN>\n"
    "DEVICE void multiply_fragments(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {\n"
    "    if (BEGIN && X == DTYPE_F16) matrix_product_f16(sums, a, b0, b1);\n"
    "    else if (BEGIN) matrix_product_bf16(sums, a, b0, b1);\n"
    "    else if (X == DTYPE_F16) matrix_multiply_f16(sums, a, b0, b1);\n"
    "    else matrix_multiply_bf16(sums, a, b0, b1);\n"
    "}\n"
    "\n"
    "/* sums += one sub, or with BEGIN sums = one sub: rows' pairs against the activations. The layout of sums is that of the matrix\n"
    "   fragment: sums[0], [1] are row g of tokens 2t, 2t + 1; sums[2], [3] row g + 8. */\n"
    "template <bool BEGIN>\n"
    "DEVICE void multiply_pairs(float (&sums)[4], const u32 (&low)[NUM_PAIRS], const u32 (&high)[NUM_PAIRS], const u32 (&activation)[NUM_PAIRS]) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < NUM_PAIRS / 2; i++) {\n"
    "        const u32 a[4] = {low[i * 2], high[i * 2], low[i * 2 + 1], high[i * 2 + 1]};\n"
    "        if (BEGIN && i == 0) multiply_fragments<true>(sums, a, activation[0], activation[1]);\n"
    "        else multiply_fragments<false>(sums, a, activation[i * 2], activation[i * 2 + 1]);\n"
    "    }\n"
    "}\n"
    "\n"
    "#include \"sums.h\"\n"
    "\n"
    "#if CODES_MULTIPLY\n"
    "/* One sub's codes, smaller than weights by CODE_SCALE: those with a zero are added to what sum_activations gives, others are all of the sums. */\n",
    "DEVICE void multiply_codes(float (&sums)[4], const u32 (&low)[NUM_PAIRS], const u32 (&high)[NUM_PAIRS], const u32 (&activation)[NUM_PAIRS]) {\n"
    "    if (FORMAT != FORMAT_INT4 || X == DTYPE_BF16) return multiply_pairs<CODE_ZERO == 0>(sums, low, high, activation);\n"
    "    float upper[4]; /* the odd pairs, larger by 16 */\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < NUM_PAIRS; i += 4) {\n"
    "        const u32 even[4] = {low[i], high[i], low[i + 2], high[i + 2]}, odd[4] = {low[i + 1], high[i + 1], low[i + 3], high[i + 3]};\n"
    "        matrix_multiply_f16(sums, even, activation[i], activation[i + 2]);\n"
    "        if (i == 0) matrix_product_f16(upper, odd, activation[1], activation[3]);\n"
    "        else matrix_multiply_f16(upper, odd, activation[i + 1], activation[i + 3]);\n"
    "    }\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 4; i++) sums[i] = f32_fma(upper[i], 0.0625f, sums[i]);\n"
    "}\n"
    "#endif\n"
    "\n"
    "#if SCALES_BY_SHIFT\n"
    "/* The scales of a step's subs. */\n"
    "DEVICE void find_scales(const weight_chunk &low, const weight_chunk &high, u32 step, float (&low_scales)[SUBS], float (&high_scales)[SUBS]) {\n"
    "#pragma unroll\n"
    "    for (u32 sub = 0; sub < SUBS; sub++) {\n"
    "        low_scales[sub] = even_scale(low, sub);\n"
    "        high_scales[sub] = even_scale(high, sub);\n"
    "    }\n"
    "    if (!warp_ballot(has_odd_scales(low) || has_odd_scales(high))) return;\n"
    "#pragma unroll\n"
    "    for (u32 sub = 0; sub < SUBS; sub++) {\n"
    "        low_scales[sub] = sub_scale(low, step, sub);\n"
    "        high_scales[sub] = sub_scale(high, step, sub);\n"
    "    }\n"
    "}\n"
    "#endif\n"
    "\n"
    "/* One step: sums[b] += rows' chunks against the activations, those of x[b] where they are late; with HAS_SUMS `held` has the sums of the\n"
    "   activations. */\n"
    "template <int BLOCKS, int HOW, bool HAS_SUMS>\n"
    "DEVICE void multiply_step(float (&sums)[BLOCKS][4], weight_chunk &low, weight_chunk &high, const u8 *const (&x)[BLOCKS], u32 step, const u32 (&words)[SUBS][NUM_PAIRS],\n"
    "                          const held_sums &held) {\n"
    "    arrange_weight_chunk(low);\n"
    "    arrange_weight_chunk(high);\n"
    "#if SCALES_BY_SHIFT\n"
    "    float low_scales[SUBS], high_scales[SUBS];\n"
    "    find_scales(low, high, step, low_scales, high_scales);\n"
    "#endif\n"
    "#pragma unroll\n"
    "    for (u32 sub = 0; sub < SUBS; sub++) {\n"
    "        u32 low_pairs[NUM_PAIRS], high_pairs[NUM_PAIRS];\n"
    "#if CODES_MULTIPLY\n"
    "        unpack_codes(low, step, sub, low_pairs);\n"
    "        unpack_codes(high, step, sub, high_pairs);\n"
    "#else\n"
    "        unpack_sub(low, step, sub, low_pairs);\n"
    "        unpack_sub(high, step, sub, high_pairs);\n"
    "#endif\n"
    "#if SCALES_BY_SHIFT\n"
    "        const float low_scale = low_scales[sub], high_scale = high_scales[sub];\n"
    "#else\n"
    "        const float low_scale = SUB_HAS_SCALE \? code_scale(low, step, sub) : 1.0f, high_scale = SUB_HAS_SCALE \? code_scale(high, step, sub) : 1.0f;\n"
    "#endif\n"
    "        const float low_min = SUB_HAS_MIN \? sub_min(low, step, sub) : 0.0f, high_min = SUB_HAS_MIN \? sub_min(high, step, sub) : 0.0f;\n"
    "#pragma unroll\n"
    "        for (int b = 0; b < BLOCKS; b++) {\n"
    "            u32 activation[NUM_PAIRS];\n"
    "            if (HOW == X_LATE) {\n"
    "                u32 word[NUM_PAIRS];\n"
    "                load_activations(x[b], step, sub, false, word);\n"
    "                pair_activations(word, activation);\n"
    "            } else if (HOW == X_LOADED) {\n"
    "                pair_activations(words[sub], activation);\n"
    "            } else {\n"
    "#pragma unroll\n"
    "                for (u32 i = 0; i < NUM_PAIRS; i++) activation[i] = words[sub][i];\n"
    "            }\n"
    "            if (!SUB_HAS_SCALE) {\n"
    "                multiply_pairs<false>(sums[b], low_pairs, high_pairs, activation);\n"
    "                continue;\n"
    "            }\n"
    "            float part[4];\n"
    "#if WANTS_SUMS\n"
    "            float total[4];\n"
    "            if (HAS_SUMS) take_sum(total, held, sub);\n"
    "            else sum_activations(total, activation);\n"
    "#endif\n"
    "#if CODES_MULTIPLY\n"
    "#if WANTS_SUMS\n"
    "            if (!SUB_HAS_MIN)\n"
    "#pragma unroll\n"
    "                for (u32 i = 0; i < 4; i++) part[i] = total[i];\n"
    "#endif\n",
    "            multiply_codes(part, low_pairs, high_pairs, activation);\n"
    "#else\n"
    "            multiply_pairs<true>(part, low_pairs, high_pairs, activation);\n"
    "#endif\n"
    "            sums[b][0] = f32_fma(low_scale, part[0], sums[b][0]);\n"
    "            sums[b][1] = f32_fma(low_scale, part[1], sums[b][1]);\n"
    "            sums[b][2] = f32_fma(high_scale, part[2], sums[b][2]);\n"
    "            sums[b][3] = f32_fma(high_scale, part[3], sums[b][3]);\n"
    "#if SUB_HAS_MIN\n"
    "            if (MINS_MULTIPLY && HAS_SUMS) continue;\n"
    "            sums[b][0] = f32_fma(low_min, total[0], sums[b][0]);\n"
    "            sums[b][1] = f32_fma(low_min, total[1], sums[b][1]);\n"
    "            sums[b][2] = f32_fma(high_min, total[2], sums[b][2]);\n"
    "            sums[b][3] = f32_fma(high_min, total[3], sums[b][3]);\n"
    "#endif\n"
    "        }\n"
    "    }\n"
    "#if MINS_MULTIPLY\n"
    "    if (HAS_SUMS)\n"
    "#pragma unroll\n"
    "        for (int b = 0; b < BLOCKS; b++) add_mins(sums[b], low, high, step, held);\n"
    "#endif\n"
    "}\n"
    "\n"
    "#else /* f32 multiply-adds */\n"
    "\n"
    "#if FORMAT > FORMAT_BF16\n"
    "DEVICE void unpack_sub_values(const weight_chunk &c, u32 step, u32 sub, float (&value)[LANE_SUB]) {\n"
    "    u32 pair[NUM_PAIRS];\n"
    "    unpack_sub(c, step, sub, pair);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB; i++) {\n"
    "        const u16 half = (u16)(pair[i / 2] >> (16 * (i % 2)));\n"
    "        value[pair_element(i / 2, i % 2)] = DECODE == DTYPE_F16 \? f16_to_f32(half) : bf16_to_f32(half);\n"
    "    }\n"
    "}\n"
    "#endif\n"
    "\n"
    "/* All steps of a part of K: sums[b] = rows times the activations x[b], in any dtype. Each lane multiplies its two rows with all\n"
    "   8 tokens of a block, whose addresses (null: no token) are in the lanes 4 * token. */\n"
    "template <int BLOCKS, u32 PARTS>\n"
    "DEVICE void multiply_part(float (&sums)[BLOCKS][4], const weight_row &low, const weight_row &high, const u8 *const (&x)[BLOCKS], u32 part) {\n"
    "    const u32 t = lane_index() & 3;\n"
    "#pragma unroll 1\n"
    "    for (int b = 0; b < BLOCKS; b++) {\n"
    "        float sum[2][8];\n"
    "#pragma unroll\n"
    "        for (u32 n = 0; n < 8; n++) sum[0][n] = sum[1][n] = 0.0f;\n"
    "        const u64 own = (u64)x[b];\n"
    "#pragma unroll 1\n"
    "        for (u32 step = part; step < NUM_STEPS; step += PARTS) {\n"
    "            weight_chunk low_chunk = load_weight_chunk(low, step, false), high_chunk = load_weight_chunk(high, step, false);\n"
    "            arrange_weight_chunk(low_chunk);\n"
    "            arrange_weight_chunk(high_chunk);\n"
    "#pragma unroll\n"
    "            for (u32 sub = 0; sub < SUBS; sub++) {\n"
    "                float low_value[LANE_SUB], high_value[LANE_SUB];\n"
    "                unpack_sub_values(low_chunk, step, sub, low_value);\n"
    "                unpack_sub_values(high_chunk, step, sub, high_value);\n"
    "                const float low_scale = SUB_HAS_SCALE \? sub_scale(low_chunk, step, sub) : 1.0f, high_scale = SUB_HAS_SCALE \? sub_scale(high_chunk, step, sub) : 1.0f;\n"
    "#pragma unroll\n"
    "                for (u32 n = 0; n < 8; n++) {\n"
    "                    const u64 address = (u64)warp_shuffle((u32)own, n * 4) | (u64)warp_shuffle((u32)(own >> 32), n * 4) << 32;\n"
    "                    float part[2] = {0.0f, 0.0f}, total = 0.0f;\n"
    "                    if (address)\n"
    "#pragma unroll\n"
    "                        for (u32 i = 0; i < LANE_SUB; i++) {\n"
    "                            const u32 k = sub_input(step, sub, i);\n"
    "                            if (k < INNER) {\n"
    "                                const float value = load_value((const void *)address, k, X);\n"
    "                                part[0] = f32_fma(low_value[i], value, part[0]);\n"
    "                                part[1] = f32_fma(high_value[i], value, part[1]);\n"
    "                                if (SUB_HAS_MIN) total = f32_add(total, value);\n"
    "                            }\n"
    "                        }\n"
    "                    sum[0][n] = f32_fma(low_scale, part[0], sum[0][n]);\n"
    "                    sum[1][n] = f32_fma(high_scale, part[1], sum[1][n]);\n"
    "                    if (SUB_HAS_MIN) {\n"
    "                        sum[0][n] = f32_fma(sub_min(low_chunk, step, sub), total, sum[0][n]);\n",
    "                        sum[1][n] = f32_fma(sub_min(high_chunk, step, sub), total, sum[1][n]);\n"
    "                    }\n"
    "                }\n"
    "            }\n"
    "        }\n"
    "        /* Add the four lanes of a row, then keep the tokens that the matrix fragment would give this lane. */\n"
    "#pragma unroll\n"
    "        for (u32 n = 0; n < 8; n++)\n"
    "#pragma unroll\n"
    "            for (u32 row = 0; row < 2; row++) {\n"
    "                float v = sum[row][n];\n"
    "                v = f32_add(v, f32_from_bits(warp_shuffle_xor(f32_bits(v), 1)));\n"
    "                v = f32_add(v, f32_from_bits(warp_shuffle_xor(f32_bits(v), 2)));\n"
    "                if (n / 2 == t) sums[b][row * 2 + n % 2] = v;\n"
    "            }\n"
    "    }\n"
    "}\n"
    "#endif\n"
    "\n"
    "/* Multiplies the sums of whole rows by what scales all of a row. */\n"
    "template <int BLOCKS>\n"
    "DEVICE void scale_rows(float (&sums)[BLOCKS][4], float low_scale, float high_scale) {\n"
    "    if (!ROW_HAS_SCALE) return;\n"
    "#pragma unroll\n"
    "    for (int b = 0; b < BLOCKS; b++) {\n"
    "        sums[b][0] = f32_mul(sums[b][0], low_scale);\n"
    "        sums[b][1] = f32_mul(sums[b][1], low_scale);\n"
    "        sums[b][2] = f32_mul(sums[b][2], high_scale);\n"
    "        sums[b][3] = f32_mul(sums[b][3], high_scale);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_14[] = { /* held.h */
    "/*\n"
    "  held.h: the activations of one token for all of a warp's steps, in registers from tile to tile, in the order in which tile.h multiplies\n"
    "  them. Whether there is room for them is for those who hold them to say.\n"
    "*/\n"
    "#if TENSOR_CORES\n"
    "\n"
    "DEVICE constexpr u32 held_words(u32 parts) { return PART_STEPS(parts) * LANE_VALUES / 2; }\n"
    "/* Whether the sums of the activations are held, too: where there is room for both. */\n"
    "DEVICE constexpr bool holds_sums(u32 parts) { return WANTS_SUMS && SUBS <= 4 && held_words(parts) <= 32; }\n"
    "\n"
    "template <u32 PARTS>\n"
    "struct held_activations {\n"
    "    u32 pair[PART_STEPS(PARTS)][SUBS][NUM_PAIRS];\n"
    "    held_sums sums[holds_sums(PARTS) \? PART_STEPS(PARTS) : 1];\n"
    "};\n"
    "\n"
    "template <u32 PARTS>\n"
    "DEVICE void hold_activations(held_activations<PARTS> &held, const u8 *x, u32 part) {\n"
    "    u32 word[PART_STEPS(PARTS)][SUBS][NUM_PAIRS];\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PART_STEPS(PARTS); i++)\n"
    "        if (step_exists<PARTS>(part, i))\n"
    "#pragma unroll\n"
    "            for (u32 sub = 0; sub < SUBS; sub++) load_activations(x, step_of<PARTS>(part, i), sub, is_inner_step<PARTS>(i), word[i][sub]);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PART_STEPS(PARTS); i++)\n"
    "        if (step_exists<PARTS>(part, i))\n"
    "#pragma unroll\n"
    "            for (u32 sub = 0; sub < SUBS; sub++) {\n"
    "                pair_activations(word[i][sub], held.pair[i][sub]);\n"
    "#if WANTS_SUMS\n"
    "                if (!holds_sums(PARTS)) continue;\n"
    "                float sums[4];\n"
    "                sum_activations(sums, held.pair[i][sub]);\n"
    "                hold_sum(held.sums[i], sub, sums);\n"
    "#endif\n"
    "            }\n"
    "}\n"
    "\n"
    "#else /* f32 multiply-adds hold nothing */\n"
    "\n"
    "template <u32 PARTS>\n"
    "struct held_activations {};\n"
    "\n"
    "template <u32 PARTS>\n"
    "DEVICE void hold_activations(held_activations<PARTS> &, const u8 *, u32) {}\n"
    "#endif\n",
    NULL};
static const char *const moer_source_15[] = { /* copied.h */
    "/*\n"
    "  copied.h: a tile of weights in shared memory, as it lies in global memory: where its rows and their scales are, and how a lane takes its part of a step of them. Whoever copies and\n"
    "  waits includes it, after TILES_IN_SHARED and tile.h.\n"
    "\n"
    "  Constants: WARPS, that share the steps of a row.\n"
    "*/\n"
    "\n"
    "/* Rows lie so that what the lanes of a row read at once has banks of its own, where each can be copied apart. */\n"
    "#if FORMAT > FORMAT_GGUF\n"
    "constexpr u32 BYTES_AT_ONCE = FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K \? 32 : 16, SCALE_ROW_BYTES = 0;\n"
    "#else\n"
    "constexpr u32 BYTES_AT_ONCE = 64 / PIECES, SCALE_ROW_BYTES = GROUP != 0 \? NUM_GROUPS * SCALE_BYTES : 0;\n"
    "#endif\n"
    "DEVICE constexpr u32 row_stride(u32 bytes) { return bytes % 16 != 0 || (bytes / BYTES_AT_ONCE % 2 == 1 && bytes % BYTES_AT_ONCE == 0) \? bytes : row_stride(bytes + 16); }\n"
    "constexpr u32 ROW_STRIDE = row_stride(ROW_BYTES);\n"
    "/* Words of the tile's data; of its scales, and those that are read with the last row's. */\n"
    "constexpr u32 DATA_WORDS = 4 * ROW_STRIDE, SCALES_END = 4 * SCALE_ROW_BYTES, SCALE_WORDS = SCALES_END \? (SCALES_END + 4 + 31) / 32 * 32 : 0, TILE_WORDS = DATA_WORDS + SCALE_WORDS;\n"
    "\n"
    "#if FORMAT > FORMAT_GGUF\n"
    "\n"
    "/* A lane's place in a tile: where its low row begins the warp's first step, in a block. */\n"
    "struct data_places {\n"
    "    shared_place rows;\n"
    "    u32 skew; /* bytes from that word */\n"
    "};\n"
    "\n"
    "template <class Words>\n"
    "DEVICE data_places find_data_places(Words &words, u32 tile) {\n"
    "    const u32 at = (lane_index() >> 2) * ROW_STRIDE + block_of_step(FIRST_STEP(warp_index(), WARPS)) * BLOCK_BYTES;\n"
    "    return {shared_place_of(words, tile + at / 4), at % 4};\n"
    "}\n"
    "\n"
    "/* A lane's part of its low (half 0) or high (half 1) row in the warp's step `index`, of a tile that lies so many words further. */\n"
    "DEVICE weight_chunk fetch_chunk_of(const data_places &places, u32 further, u32 half, u32 index) {\n"
    "    const shared_row row = {shared_place_after(places.rows, further), places.skew, block_of_step(FIRST_STEP(warp_index(), WARPS)), half * 8 * ROW_STRIDE};\n"
    "    return load_chunk(row, step_of<WARPS>(warp_index(), index), is_inner_step<WARPS>(index));\n"
    "}\n"
    "\n"
    "#else\n"
    "\n"
    "/* A lane's places in a tile. */\n"
    "struct data_places {\n"
    "    shared_place rows, scales; /* of the low row; those of the high one are as far away for all lanes */\n"
    "    u32 skew;                  /* of scales, in their words */\n"
    "};\n"
    "\n"
    "template <class Words>\n"
    "DEVICE data_places find_data_places(Words &words, u32 tile) {\n"
    "    const u32 t = lane_index() & 3, g = lane_index() >> 2, warp = warp_index();\n"
    "    data_places p;\n"
    "    p.rows = shared_place_of(words, tile + g * (ROW_STRIDE / 4) + FIRST_STEP(warp, WARPS) * 16 + t * (4 / PIECES));\n"
    "    const u32 at = g * SCALE_ROW_BYTES + (u32)scales_at(FIRST_STEP(warp, WARPS));\n"
    "    p.skew = at % 4;\n"
    "    p.scales = shared_place_of(words, tile + DATA_WORDS + (SCALE_ROW_BYTES \? at / 4 : 0));\n"
    "    return p;\n"
    "}\n"
    "\n"
    "/* A lane's part of its low (half 0) or high (half 1) row in the warp's step `index`, of a tile that lies so many words further; nothing of what lies\n"
    "   beyond the row. */\n"
    "DEVICE weight_chunk fetch_chunk_of(const data_places &places, u32 further, u32 half, u32 index) {\n"
    "    constexpr u32 SCALES_TAKEN = (SUBS * SCALE_BYTES + 3) / 4;\n"
    "    const u32 t = lane_index() & 3, first = FIRST_STEP(warp_index(), WARPS), step = step_of<WARPS>(warp_index(), index), from = further + half * 2 * ROW_STRIDE + index * STEP_STRIDE(WARPS) * 16;\n"
    "    const bool inner = is_inner_step<WARPS>(index);\n"
    "    weight_chunk c = {};\n"
    "#pragma unroll\n"
    "    for (u32 piece = 0; piece < PIECES; piece++) {\n"
    "        if (ROW_BYTES % 64 != 0 && !inner && step * 64 + piece * BYTES_AT_ONCE + t * (16 / PIECES) >= ROW_BYTES) continue;\n"
    "        fetch_piece(c, piece, places.rows, from + piece * (BYTES_AT_ONCE / 4));\n"
    "    }\n"
    "    if (GROUP == 0) return c;\n"
    "    /* Words, and where scales lie across them one more. */\n",
    "    constexpr bool WHOLE = SCALE_ROW_BYTES % 4 == 0 && SUBS * SCALE_BYTES % 4 == 0;\n"
    "    const u32 at = WHOLE \? 0 : places.skew + (u32)(scales_at(step) - scales_at(first));\n"
    "    const u32 words = further + half * 2 * SCALE_ROW_BYTES + (WHOLE \? (u32)(scales_at(step) - scales_at(first)) / 4 : at / 4);\n"
    "    u32 word[SCALES_TAKEN + 1];\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < SCALES_TAKEN + !WHOLE; i++) word[i] = shared_load_from(places.scales, words + i);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < SCALES_TAKEN; i++) {\n"
    "        c.scale[i] = WHOLE \? word[i] : select_bytes(word[i], word[i + 1], 0x3210u + 0x1111u * (at % 4));\n"
    "        if (NUM_GROUPS % SUBS != 0 && !inner) { /* the groups that the row has */\n"
    "            const u32 left = ((u32)NUM_GROUPS - (u32)first_group(step)) * SCALE_BYTES;\n"
    "            const u32 mask = left >= i * 4 + 4 \? 0xffffffffu : left <= i * 4 \? 0u : (1u << (left % 4 * 8)) - 1;\n"
    "            c.scale[i] = (c.scale[i] & mask) | (SCALES_BY_SHIFT \? 0x7f7f7f7fu & ~mask : 0u);\n"
    "        }\n"
    "    }\n"
    "    return c;\n"
    "}\n"
    "\n"
    "#endif\n",
    NULL};
static const char *const moer_source_16[] = { /* stream.h */
    "/*\n"
    "  stream.h: the weights of a warp's tiles as one stream of steps that never stops: as soon as a step has been taken out, the\n"
    "  one that comes some steps later is on its way, of this tile or of the next. What a step is, and its product, are in\n"
    "  tile.h.\n"
    "\n"
    "  Where rows and scales are aligned for it, the steps under way are in shared memory, filled by asynchronous copies\n"
    "  (STREAM_COPIES 1; a kernel that has no room there defines 0). Otherwise they are in registers; then the compiler decides when\n"
    "  they are loaded, and puts that off to the end of the tile.\n"
    "\n"
    "  multiply_tile does a tile; start_weights and start_activations begin a stream, end_stream ends it.\n"
    "*/\n"
    "#include \"held.h\"\n"
    "\n"
    "#if TENSOR_CORES\n"
    "\n"
    "/* Functions rather than macros, whose expansions would be most of what the compiler reads. */\n"
    "/* Whether the activations of all of a warp's steps stay in registers from tile to tile. */\n"
    "DEVICE constexpr bool can_hold(u32 parts) { return held_words(parts) <= (!STREAM_COPIES && CHUNK_WORDS > 6 \? 0 : STREAM_COPIES && SCALES_FILL_WORDS \? 48 : 32); }\n"
    "/* Steps under way: three or four of 1 KB in each of 16 warps, to keep memory busy. In registers there is room for 40 to 50\n"
    "   words a lane, or less beside what is held; of copies with two words of scales three leave eight warps room in 48 KB. MXFP4 in bf16 takes more registers than others. */\n"
    "DEVICE constexpr u32 stream_words(int how) { return (STREAM_COPIES \? 0 : 2 * CHUNK_WORDS) + (how == X_LOADED \? LANE_VALUES / 2 : 0); }\n"
    "DEVICE constexpr u32 stream_room(int how, u32 parts) { return how == X_HELD \? 62 - held_words(parts) : SUBS == 4 && X == DTYPE_BF16 \? 40 : 52; }\n"
    "constexpr u32 STREAM_LIMIT = STREAM_COPIES && STEP_SCALE_WORDS == 2 \? 3 : 4;\n"
    "DEVICE constexpr u32 stream_most(int how, u32 parts) {\n"
    "    return stream_words(how) == 0 || stream_room(how, parts) >= STREAM_LIMIT * stream_words(how) \? STREAM_LIMIT\n"
    "           : stream_room(how, parts) < stream_words(how)                                         \? 1\n"
    "                                                                                                 : stream_room(how, parts) / stream_words(how);\n"
    "}\n"
    "DEVICE constexpr u32 stream_rounds(int how, u32 parts) { return (PART_STEPS(parts) + stream_most(how, parts) - 1) / stream_most(how, parts); }\n"
    "DEVICE constexpr u32 stream_depth(int how, u32 parts) { return (PART_STEPS(parts) + stream_rounds(how, parts) - 1) / stream_rounds(how, parts); }\n"
    "/* Words of shared memory for a warp's stream. */\n"
    "#if STREAM_COPIES\n"
    "DEVICE constexpr u32 stream_memory(int how, u32 parts) { return stream_depth(how, parts) * STEP_WORDS; }\n"
    "#else\n"
    "DEVICE constexpr u32 stream_memory(int, u32) { return 0; }\n"
    "#endif\n"
    "\n"
    "template <int HOW, u32 PARTS>\n"
    "struct weight_stream {\n"
    "    weight_chunk low[STREAM_COPIES \? 1 : stream_depth(HOW, PARTS)], high[STREAM_COPIES \? 1 : stream_depth(HOW, PARTS)];\n"
    "    u32 x[HOW == X_LOADED \? stream_depth(HOW, PARTS) : 1][SUBS][NUM_PAIRS];\n"
    "};\n"
    "\n"
    "#if STREAM_COPIES\n"
    "typedef copy_source stream_source;\n"
    "typedef copy_places stream_places;\n"
    "DEVICE stream_source find_source(const tile_rows &rows, u32 first_step) { return find_copy_source(rows.low, rows.high, first_step); }\n"
    "template <class Words>\n"
    "DEVICE stream_places find_stream_places(Words &words, u32 at) { return find_copy_places(words, at); }\n"
    "#else\n"
    "typedef tile_rows stream_source;\n"
    "struct stream_places {};\n"
    "DEVICE stream_source find_source(const tile_rows &rows, u32) { return rows; }\n"
    "template <class Words>\n"
    "DEVICE stream_places find_stream_places(Words &, u32) { return {}; }\n"
    "#endif\n"
    "\n"
    "/* Into place d of the stream: a warp's step `index` of some rows. A place is a group of copies, also where nothing is copied. */\n"
    "template <int HOW, u32 PARTS>\n"
    "DEVICE void load_step_weights(weight_stream<HOW, PARTS> &stream, const stream_places &places, u32 d, const stream_source &source, u32 part, u32 index, bool wanted) {\n",
    "    if (wanted && index < PART_STEPS(PARTS) && step_exists<PARTS>(part, index)) {\n"
    "#if STREAM_COPIES\n"
    "        static_assert(STEPS_KEEP_GROUPS(PARTS), \"the scales of a warp's steps are found from the first\");\n"
    "        copy_step(places, d * STEP_WORDS, source, FIRST_STEP(part, PARTS), index * STEP_STRIDE(PARTS), is_inner_step<PARTS>(index), has_whole_scales<PARTS>(index));\n"
    "#else\n"
    "        stream.low[d] = load_weight_chunk(source.low, step_of<PARTS>(part, index), is_inner_step<PARTS>(index));\n"
    "        stream.high[d] = load_weight_chunk(source.high, step_of<PARTS>(part, index), is_inner_step<PARTS>(index));\n"
    "#endif\n"
    "    }\n"
    "    if (STREAM_COPIES) copy_async_commit();\n"
    "}\n"
    "\n"
    "template <int HOW, u32 PARTS>\n"
    "DEVICE void load_step_activations(weight_stream<HOW, PARTS> &stream, u32 d, const u8 *x, u32 part, u32 index) {\n"
    "    if (HOW != X_LOADED || index >= PART_STEPS(PARTS) || !step_exists<PARTS>(part, index)) return;\n"
    "#pragma unroll\n"
    "    for (u32 sub = 0; sub < SUBS; sub++) load_activations(x, step_of<PARTS>(part, index), sub, is_inner_step<PARTS>(index), stream.x[d][sub]);\n"
    "}\n"
    "\n"
    "/* A stream begins with its weights, which may be known before the activations. */\n"
    "template <int HOW, u32 PARTS>\n"
    "DEVICE void start_weights(weight_stream<HOW, PARTS> &stream, const stream_places &places, const stream_source &source, u32 part) {\n"
    "#pragma unroll\n"
    "    for (u32 d = 0; d < stream_depth(HOW, PARTS); d++) load_step_weights(stream, places, d, source, part, d, true);\n"
    "}\n"
    "\n"
    "template <int HOW, u32 PARTS>\n"
    "DEVICE void start_activations(weight_stream<HOW, PARTS> &stream, const u8 *x, u32 part) {\n"
    "#pragma unroll\n"
    "    for (u32 d = 0; d < stream_depth(HOW, PARTS); d++) load_step_activations(stream, d, x, part, d);\n"
    "}\n"
    "\n"
    "DEVICE void end_stream() {\n"
    "    if (STREAM_COPIES) copy_async_wait<0>();\n"
    "}\n"
    "\n"
    "/* sums = the tile's rows times the activations of the blocks of tokens, over the warp's part of K. Meanwhile the stream goes on\n"
    "   with the `next` tile, if there are `more`, and its part of K. */\n"
    "template <int HOW, int BLOCKS, u32 PARTS>\n"
    "DEVICE void multiply_tile(float (&sums)[BLOCKS][4], weight_stream<HOW, PARTS> &stream, const stream_places &places, const held_activations<PARTS> &held, const stream_source &source,\n"
    "                          const u8 *const (&x)[BLOCKS], u32 part, bool more, const stream_source &next, const u8 *next_x, u32 next_part) {\n"
    "    constexpr u32 DEPTH = stream_depth(HOW, PARTS), ROUNDS = stream_rounds(HOW, PARTS), UNROLLED = HOW == X_HELD \? ROUNDS : 1;\n"
    "#pragma unroll\n"
    "    for (int b = 0; b < BLOCKS; b++)\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 4; i++) sums[b][i] = 0.0f;\n"
    "#pragma unroll UNROLLED\n"
    "    for (u32 round = 0; round < ROUNDS; round++)\n"
    "#pragma unroll\n"
    "        for (u32 d = 0; d < DEPTH; d++) {\n"
    "            const u32 index = round * DEPTH + d, step = step_of<PARTS>(part, index);\n"
    "            const bool exists = index < PART_STEPS(PARTS) && step_exists<PARTS>(part, index);\n"
    "            const auto go_on = [&] {\n"
    "                if (round + 1 < ROUNDS) load_step_weights(stream, places, d, source, part, index + DEPTH, true);\n"
    "                else load_step_weights(stream, places, d, next, next_part, d, more);\n"
    "            };\n"
    "#if STREAM_COPIES /* taken out at once, so that its place is free again */\n"
    "            copy_async_wait<DEPTH - 1>();\n"
    "            warp_barrier();\n"
    "            weight_chunk low, high;\n"
    "            if (exists) {\n"
    "                low = fetch_chunk(places, d * STEP_WORDS, 0, source);\n"
    "                high = fetch_chunk(places, d * STEP_WORDS, 1, source);\n"
    "            }\n"
    "            warp_barrier();\n"
    "            go_on();\n"
    "#else\n"
    "            weight_chunk &low = stream.low[d], &high = stream.high[d];\n"
    "#endif\n"
    "            if (exists) {\n"
    "                if (HOW == X_HELD) multiply_step<BLOCKS, HOW, holds_sums(PARTS)>(sums, low, high, x, step, held.pair[index], held.sums[holds_sums(PARTS) \? index : 0]);\n",
    "                else multiply_step<BLOCKS, HOW, false>(sums, low, high, x, step, stream.x[HOW == X_LOADED \? d : 0], held.sums[0]);\n"
    "            }\n"
    "            if (round + 1 < ROUNDS) load_step_activations(stream, d, x[0], part, index + DEPTH);\n"
    "            else if (more) load_step_activations(stream, d, next_x, next_part, d);\n"
    "            if (!STREAM_COPIES) go_on();\n"
    "        }\n"
    "}\n"
    "\n"
    "#else /* f32 multiply-adds: without a stream */\n"
    "\n"
    "DEVICE constexpr bool can_hold(u32) { return false; }\n"
    "DEVICE constexpr u32 stream_memory(int, u32) { return 0; }\n"
    "\n"
    "typedef tile_rows stream_source;\n"
    "struct stream_places {};\n"
    "DEVICE stream_source find_source(const tile_rows &rows, u32) { return rows; }\n"
    "template <class Words>\n"
    "DEVICE stream_places find_stream_places(Words &, u32) { return {}; }\n"
    "\n"
    "template <int HOW, u32 PARTS>\n"
    "struct weight_stream {};\n"
    "\n"
    "template <int HOW, u32 PARTS>\n"
    "DEVICE void start_weights(weight_stream<HOW, PARTS> &, const stream_places &, const stream_source &, u32) {}\n"
    "\n"
    "template <int HOW, u32 PARTS>\n"
    "DEVICE void start_activations(weight_stream<HOW, PARTS> &, const u8 *, u32) {}\n"
    "\n"
    "DEVICE void end_stream() {}\n"
    "\n"
    "template <int HOW, int BLOCKS, u32 PARTS>\n"
    "DEVICE void multiply_tile(float (&sums)[BLOCKS][4], weight_stream<HOW, PARTS> &, const stream_places &, const held_activations<PARTS> &, const stream_source &source, const u8 *const (&x)[BLOCKS],\n"
    "                          u32 part, bool, const stream_source &, const u8 *, u32) {\n"
    "    multiply_part<BLOCKS, PARTS>(sums, source.low, source.high, x, part);\n"
    "}\n"
    "#endif\n",
    NULL};
static const char *const moer_source_17[] = { /* unpacked.h */
    "/*\n"
    "  unpacked.h: quantized weights on their way into a tile in shared memory, as numbers of the activations' type, f16 or bf16, in the order\n"
    "  of K. What is done with the tile belongs to grouped.cu and grouped_warpgroups.cu; what the bytes of a format mean, to packed.h and gguf.h,\n"
    "  in whose layout the lanes hold them: lane 4g + t a part of row g of eight.\n"
    "\n"
    "  A weight is code * scale (+ min), rounded once to the activations' type; what scales a whole row waits for the sum. In f16 that is within\n"
    "  2^-12 of the weight, or 2^-25 where that is more, in bf16 within 2^-9.\n"
    "\n"
    "  Include tile.h first. Who includes this has weight_place(n, chunk): the word, from the tile's first, where the 8 numbers of chunk `chunk`\n"
    "  of its row n go.\n"
    "*/\n"
    "/* Whether a scale is a number of the activations' type too: then one multiplication of a pair rounds once. */\n"
    "#if FORMAT > FORMAT_GGUF\n"
    "#define SCALES_ARE_PAIRS 0\n"
    "#else\n"
    "#define SCALES_ARE_PAIRS (SCALES == SCALES_E4M3 || (DECODE == DTYPE_F16 \? SCALES == DTYPE_F16 : SCALES == DTYPE_BF16 || SCALES == SCALES_E8M0))\n"
    "#endif\n"
    "\n"
    "/* ---- weights that go through registers ---- */\n"
    "\n"
    "/* Two codes' floats times their scale, plus min. */\n"
    "DEVICE u32 scale_pair(u32 pair, u32 scale_pair, float scale, float min) {\n"
    "    if (!SUB_HAS_SCALE) return pair;\n"
    "    if (SCALES_ARE_PAIRS) return DECODE == DTYPE_F16 \? half2_fma(pair, scale_pair, 0x80008000u) : bf162_fma(pair, scale_pair, 0x80008000u);\n"
    "    float low = DECODE == DTYPE_F16 \? f16_to_f32((u16)pair) : f32_from_bits(pair << 16);\n"
    "    float high = DECODE == DTYPE_F16 \? f16_to_f32((u16)(pair >> 16)) : f32_from_bits(pair & 0xffff0000u);\n"
    "    low = SUB_HAS_MIN \? f32_fma(scale, low, min) : f32_mul(scale, low);\n"
    "    high = SUB_HAS_MIN \? f32_fma(scale, high, min) : f32_mul(scale, high);\n"
    "    return DECODE == DTYPE_F16 \? f32_to_half2(low, high) : f32_to_bf162(low, high);\n"
    "}\n"
    "\n"
    "#if FORMAT == FORMAT_INT4\n"
    "/* INT4 codes with f16 scales become bf16 by one fma each, in f32: a code in the mantissa of 1 is 1 + q / 2^k, and with 2^k * scale and\n"
    "   -(2^k + zero point) * scale, both exact, that is (q - zero point) * scale. k is 23 less the bit where the code is: 8, 12 or 16, or\n"
    "   where the zero point has bits of its own, 12 or 16. An infinite scale gives NaN. */\n"
    "#define SCALES_BY_FMA (SCALES == DTYPE_F16 && GROUP != 0 && DECODE == DTYPE_BF16 && LANE_SUB >= 8)\n"
    "DEVICE void unpack_sub_by_fma(const weight_chunk &c, u32 sub, float scale, u32 (&linear)[LANE_SUB / 2]) {\n"
    "    const float zero_point = (float)(int)(ZERO_POINTS \? (c.zero_point[0] >> (4 * sub)) & 15u : USUAL_ZERO_POINT);\n"
    "    const float by[3] = {f32_mul(scale, 32768.0f), f32_mul(scale, 2048.0f), f32_mul(scale, 128.0f)};\n"
    "    const float plus[3] = {f32_mul(scale, -32768.0f - zero_point), f32_mul(scale, -2048.0f - zero_point), f32_mul(scale, -128.0f - zero_point)};\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < LANE_SUB / 8; i++) {\n"
    "        u32 w = c.word[sub * (LANE_SUB / 8) + i];\n"
    "        if (SIGNED) w ^= 0x88888888u;\n"
    "        float value[8];\n"
    "#pragma unroll\n"
    "        for (u32 q = 0; q < 8; q++) {\n"
    "            const u32 at = ZERO_POINTS \? (q == 0 || q % 2 != 0 \? 1 : 2) : (q < 5 \? q == 4 \? 2 : q % 2 : q - 5), bit = 8 + 4 * at;\n"
    "            const u32 moved = q * 4 < bit \? w << (bit - q * 4) : w >> (q * 4 - bit);\n"
    "            value[q] = f32_fma(f32_from_bits(and_or(moved, 15u << bit, 0x3f800000u)), by[at], plus[at]);\n"
    "        }\n"
    "#pragma unroll\n"
    "        for (u32 q = 0; q < 4; q++) linear[i * 4 + q] = f32_to_bf162(value[q * 2], value[q * 2 + 1]);\n"
    "    }\n"
    "}\n"
    "#else\n"
    "#define SCALES_BY_FMA 0\n"
    "#endif\n"
    "\n"
    "/* A lane's chunk of step `step`, arranged, as numbers in row `n` of the tile. */\n"
    "template <class Words>\n"
    "DEVICE void store_weights(Words &weights, const weight_chunk &c, u32 step, u32 at, u32 n) {\n"
    "#pragma unroll\n"
    "    for (u32 sub = 0; sub < SUBS; sub++) {\n"
    "        u32 linear[NUM_PAIRS];\n"
    "        const float scale = SUB_HAS_SCALE \? sub_scale(c, step, sub) : 1.0f;\n"
    "#if SCALES_BY_FMA\n",
    "        unpack_sub_by_fma(c, sub, scale, linear);\n"
    "#else\n"
    "        u32 pair[NUM_PAIRS];\n"
    "        unpack_sub(c, step, sub, pair);\n"
    "        const float min = SUB_HAS_MIN \? sub_min(c, step, sub) : 0.0f;\n"
    "        const u32 scales = SUB_HAS_SCALE && SCALES_ARE_PAIRS \? (DECODE == DTYPE_F16 \? f32_to_half2(scale, scale) : f32_to_bf162(scale, scale)) : 0;\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < NUM_PAIRS; i++) pair[i] = scale_pair(pair[i], scales, scale, min);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < NUM_PAIRS; i++) { /* values 2i and 2i + 1 */\n"
    "            if (PAIR_ORDER == PAIRS_LINEAR) linear[i] = pair[i];\n"
    "            else if (PAIR_ORDER == PAIRS_OF_4) linear[i] = select_bytes(pair[i / 2 * 2], pair[i / 2 * 2 + 1], i % 2 == 0 \? 0x5410 : 0x7632);\n"
    "            else linear[i] = select_bytes(pair[(i / 4 * 4 + i % 2 * 2) % NUM_PAIRS], pair[(i / 4 * 4 + i % 2 * 2 + 1) % NUM_PAIRS], i % 4 < 2 \? 0x5410 : 0x7632);\n"
    "        }\n"
    "#endif\n"
    "#pragma unroll\n"
    "        for (u32 run = 0; run < LANE_SUB; run += LANE_RUN) {\n"
    "            const u32 k = sub * 4 * LANE_SUB + run * 4 + lane_quarter() * LANE_RUN;\n"
    "            if (LANE_RUN % 8 == 0) {\n"
    "#pragma unroll\n"
    "                for (u32 i = 0; i < LANE_RUN / 8; i++) {\n"
    "                    const u32x4 v = {{linear[(run / 2 + i * 4) % NUM_PAIRS], linear[(run / 2 + i * 4 + 1) % NUM_PAIRS], linear[(run / 2 + i * 4 + 2) % NUM_PAIRS], linear[(run / 2 + i * 4 + 3) % NUM_PAIRS]}};\n"
    "                    shared_store_4(weights, at + weight_place(n, k / 8 + i), v);\n"
    "                }\n"
    "            } else {\n"
    "                const u32x2 v = {{linear[run / 2], linear[run / 2 + 1]}};\n"
    "                shared_store_2(weights, at + weight_place(n, k / 8) + k % 8 / 2, v);\n"
    "            }\n"
    "        }\n"
    "    }\n"
    "}\n"
    "\n",
    NULL};
static const char *const moer_source_18[] = { /* grouped.h */
    "/*\n"
    "  grouped.h: the product of a tile of activations and a tile of weight rows by a block of eight warps, for batches in which an\n"
    "  expert has many rows. Both tiles lie in shared memory as f16 or bf16, the activations' type; quantized weights become that on\n"
    "  their way there (unpacked.h). Which rows they are, and what happens to the sums, belongs to grouped.cu.\n"
    "\n"
    "  Constants: those of tile.h, with TENSOR_CORES 1; TILE_ROWS, rows of activations in a tile: 32, 64 or 128; SHARED_BYTES, what the tiles may\n"
    "  take of shared memory.\n"
    "\n"
    "  K goes through in slices. Activations come by asynchronous copies, STAGES - 1 slices ahead. So do weights that are f16 or bf16 already.\n"
    "  Others go through registers: while a step of tile.h is multiplied, the codes of the next are loaded, in the layout of packed.h or\n"
    "  gguf.h: lane 4g + t loads of rows g and g + 8 of its warp's 16.\n"
    "\n"
    "  Sums are in f32, in the order of K, whatever the tile's size: a row's result doesn't depend on the batch.\n"
    "\n"
    "  A warp has TILE_ROWS / 2 of the rows, as every other 16 of the tile, and 32 of the 128 weight rows. So a tile with few rows\n"
    "  shares them among all warps, and multiplies hardly more than them.\n"
    "\n"
    "  16 bytes are a chunk. Chunks of a row are permuted by the row's number, so that neither rows nor columns of chunks meet in one bank.\n"
    "  Places in shared memory are sums of what is known when compiled and what a thread works out once.\n"
    "*/\n"
    "#include \"tile.h\"\n"
    "\n"
    "#define WARPS_ACROSS 4 /* the weight rows; the two halves of the warps share the activations' rows */\n"
    "#define GROUPED_THREADS 256\n"
    "#define TILE_WEIGHTS 128\n"
    "#define COPIED_WEIGHTS (FORMAT == X && WEIGHT_ALIGN == 16) /* otherwise through registers */\n"
    "#define COPIED_ROWS (X_ALIGN == 16)\n"
    "\n"
    "/* Slices are of 64 inputs where three stages of them fit, which halves the barriers, else of 32. */\n"
    "#define STAGES_OF(slice) (COPIED_WEIGHTS \? SHARED_BYTES / 2 / ((TILE_ROWS + TILE_WEIGHTS) * (slice)) : (SHARED_BYTES / 2 - TILE_WEIGHTS * STEP) / (TILE_ROWS * (slice)))\n"
    "#define SLICE ((COPIED_WEIGHTS || STEP % 64 == 0) && STAGES_OF(64) >= 3 \? 64 : 32)\n"
    "#define STAGES (STAGES_OF(SLICE) < 6 \? STAGES_OF(SLICE) : 6)\n"
    "static_assert(STAGES > 1, \"a stage to be read, and one to be copied to\");\n"
    "#define NUM_SLICES ((INNER + SLICE - 1) / SLICE)\n"
    "#define SLICE_CHUNKS (SLICE / 8)\n"
    "#define ROW_FRAGMENTS (TILE_ROWS / 32) /* of a warp, of 16 rows */\n"
    "#define COLUMN_FRAGMENTS (TILE_WEIGHTS / 8 / WARPS_ACROSS)\n"
    "\n"
    "#define FILL_SLICES (COPIED_WEIGHTS \? 1 : STEP / SLICE)    /* whose weights lie in shared memory side by side */\n"
    "#define FILL_CHUNKS (FILL_SLICES * SLICE_CHUNKS)           /* of a weight row */\n"
    "#define ROW_WORDS (TILE_ROWS * SLICE / 2)                  /* of a stage */\n"
    "#define FILL_WORDS (TILE_WEIGHTS * FILL_CHUNKS * 4)\n"
    "#define WEIGHTS_AT (STAGES * ROW_WORDS)                    /* in shared memory, behind the rows */\n"
    "#define WEIGHT_STAGES (COPIED_WEIGHTS \? STAGES : 1)\n"
    "static_assert((WEIGHTS_AT + WEIGHT_STAGES * FILL_WORDS) * 4 <= SHARED_BYTES, \"shared memory of a block\");\n"
    "\n"
    "/* The first word of chunk `chunk` of row `row` in a tile with `chunks` a row. Chunks 2i and 2i + 1 are those of 0 and 1, and an exclusive or\n"
    "   with 8i. */\n"
    "DEVICE u32 chunk_word(u32 row, u32 chunk, u32 chunks) { return (row * chunks + (chunk ^ (chunks == 4 \? (row >> 1) & 3 : row & 7))) * 4; }\n"
    "\n"
    "DEVICE u32 weight_place(u32 n, u32 chunk) { return chunk_word(n, chunk, FILL_CHUNKS); }\n"
    "#include \"unpacked.h\"\n"
    "\n"
    "/* ---- what is copied ---- */\n"
    "\n"
    "/* A thread copies its chunk of every ROWS_A_PASS-th row, 4 KB of a tile at once. */\n"
    "#define ROWS_A_PASS (GROUPED_THREADS / SLICE_CHUNKS)\n"
    "#define ROW_PASSES ((TILE_ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS)\n"
    "#define WEIGHT_PASSES (TILE_WEIGHTS / ROWS_A_PASS)\n"
    "\n"
    "/* Where from: its chunk of the first slice. */\n"
    "struct row_sources { const u8 *x[ROW_PASSES]; u32 passes; /* that some warp multiplies */ };\n"
    "struct weight_sources { const u8 *w[WEIGHT_PASSES]; };\n"
    "\n",
    "/* Starts to copy slice `slice` to the stage at word `at`. */\n"
    "template <class Words>\n"
    "DEVICE void start_rows(Words &words, const shared_place &target, const row_sources &sources, u32 slice, u32 at) {\n"
    "    if (slice >= NUM_SLICES) return;\n"
    "    const u32 chunk = thread_index() % SLICE_CHUNKS, k = slice * SLICE + chunk * 8;\n"
    "    const u32 to = at + chunk_word(thread_index() / SLICE_CHUNKS, chunk, SLICE_CHUNKS);\n"
    "    const bool inside = INNER % SLICE == 0 || k < INNER;\n"
    "    const u32 offset = inside || !COPIED_ROWS \? slice * (SLICE * 2) : 0; /* no address past the row, not even for none of its bytes */\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < ROW_PASSES; i++) {\n"
    "        if (i >= sources.passes) continue;\n"
    "        const u8 *const p = sources.x[i] + offset;\n"
    "        if (COPIED_ROWS) {\n"
    "            copy_async_16(target, to + i * 1024, p, inside \? 16 : 0);\n"
    "            continue;\n"
    "        }\n"
    "        u32x4 v = {{0, 0, 0, 0}};\n"
    "#pragma unroll\n"
    "        for (u32 j = 0; j < 8; j++)\n"
    "            if (k + j < INNER) v.v[j / 2] |= (u32)load_2(p + j * 2) << (16 * (j % 2));\n"
    "        shared_store_4(words, to + i * 1024, v);\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE void start_weights(const shared_place &target, const weight_sources &sources, u32 slice, u32 at) {\n"
    "    if (slice >= NUM_SLICES) return;\n"
    "    const u32 chunk = thread_index() % SLICE_CHUNKS, to = at + chunk_word(thread_index() / SLICE_CHUNKS, chunk, SLICE_CHUNKS);\n"
    "    const bool inside = INNER % SLICE == 0 || slice * SLICE + chunk * 8 < INNER;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < WEIGHT_PASSES; i++) copy_async_16(target, to + i * 1024, sources.w[i] + (inside \? slice * (SLICE * 2) : 0), inside \? 16 : 0);\n"
    "}\n"
    "\n"
    "/* ---- the product ---- */\n"
    "\n"
    "/* sums += 16 inputs, from where the lane's rows of matrices are. Codes that wait to be unpacked leave no registers for all rows at once. */\n"
    "template <bool ALL, class Words>\n"
    "DEVICE void multiply_16(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Words &words, u32 rows, u32 weights, u32 fragments) {\n"
    "    u32 x[ROW_FRAGMENTS][4], w[COLUMN_FRAGMENTS / 2][4];\n"
    "#pragma unroll\n"
    "    for (u32 j = 0; j < COLUMN_FRAGMENTS / 2; j++) shared_load_matrices(words, weights + j * 16 * FILL_CHUNKS * 4, w[j]);\n"
    "#pragma unroll\n"
    "    for (u32 m = 0; m < ROW_FRAGMENTS; m++)\n"
    "        if (COPIED_WEIGHTS && (ALL || m < fragments)) shared_load_matrices(words, rows + m * 32 * SLICE_CHUNKS * 4, x[m]);\n"
    "#pragma unroll\n"
    "    for (u32 m = 0; m < ROW_FRAGMENTS; m++) {\n"
    "        if (!ALL && m >= fragments) break;\n"
    "        if (!COPIED_WEIGHTS) shared_load_matrices(words, rows + m * 32 * SLICE_CHUNKS * 4, x[m]);\n"
    "#pragma unroll\n"
    "        for (u32 j = 0; j < COLUMN_FRAGMENTS; j++) multiply_fragments<false>(sums[m][j], x[m], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Where the warp's fragments are in a tile of rows and a tile of weights, for the lane. */\n"
    "DEVICE u32 row_fragment_word() { return chunk_word(warp_index() / WARPS_ACROSS * 16 + (lane_index() & 15), lane_index() >> 4, SLICE_CHUNKS); }\n"
    "DEVICE u32 weight_fragment_word() {\n"
    "    return chunk_word(warp_index() % WARPS_ACROSS * (TILE_WEIGHTS / WARPS_ACROSS) + (lane_index() >> 4) * 8 + (lane_index() & 7), (lane_index() >> 3) & 1, FILL_CHUNKS);\n"
    "}\n"
    "\n"
    "/* sums += a slice: its rows in the stage at word `rows`, its weights as slice `slice` of the fill at `weights`. The warp has `fragments` of\n"
    "   its ROW_FRAGMENTS, all with ALL. */\n"
    "template <bool ALL, class Words>\n"
    "DEVICE void multiply_slice(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Words &words, u32 rows, u32 weights, u32 slice, u32 fragments) {\n"
    "    const u32 x = row_fragment_word(), w = weight_fragment_word() ^ slice * (SLICE / 16 * 8);\n"
    "#pragma unroll\n"
    "    for (u32 k = 0; k < SLICE / 16; k++) multiply_16<ALL>(sums, words, rows + (x ^ k * 8), weights + (w ^ k * 8), fragments);\n"
    "}\n",
    NULL};
static const char *const moer_source_19[] = { /* output.h */
    "/*\n"
    "  output.h: what matmul.cu and grouped.cu share about the rows of x that they read and the outputs that they write: which row of\n"
    "  x belongs to a row, which weight rows make an output column, and what follows the sums. How the sums come about belongs to\n"
    "  the kernels.\n"
    "\n"
    "  Constants: ROWS, of a weight matrix; GATED, INTERLEAVED, UP_APART, ACTIVATION, CLAMP, WEIGHT_ON_INPUT, BIAS, K and X_INDEX as in\n"
    "  matmul.cu.\n"
    "*/\n"
    "#ifndef UP_APART\n"
    "#define UP_APART 0\n"
    "#endif\n"
    "#define COLUMNS (GATED && !UP_APART \? ROWS / 2 : ROWS) /* of the output */\n"
    "\n"
    "/* The row of x of a pair; with X_INDEX 2 of a sorted row. */\n"
    "DEVICE u32 x_row_of(const moer_matmul_args &a, u32 index) { return X_INDEX == 0 || (X_INDEX == 1 && !a.x_per_pair) \? index / K : index; }\n"
    "\n"
    "/* The weight row of an output column: of its gate, or of what has none; or of its up. */\n"
    "DEVICE u64 column_row(u64 column, bool up) {\n"
    "    if (!GATED || UP_APART) return column;\n"
    "    return INTERLEAVED \? column * 2 + up : column + (up \? COLUMNS : 0);\n"
    "}\n"
    "\n"
    "/* An output from its sums, before a router's weight on it; `weight` is that on the input, the biases those of its weight rows. */\n"
    "DEVICE float finish_sums(const moer_matmul_args &a, float bias, float up_bias, float weight, float value, float up) {\n"
    "    if (WEIGHT_ON_INPUT) value = f32_mul(value, weight); /* W @ (weight * x) = weight * (W @ x): without rounding weight * x to x's dtype */\n"
    "    if (BIAS) value = f32_add(value, bias);\n"
    "    if (ACTIVATION) value = moer_activated_gate(ACTIVATION - 1, CLAMP, value, a.alpha, a.clamp);\n"
    "    if (GATED) {\n"
    "        if (WEIGHT_ON_INPUT) up = f32_mul(up, weight);\n"
    "        if (BIAS) up = f32_add(up, up_bias);\n"
    "        value = f32_mul(value, moer_shifted_up(CLAMP, up, ACTIVATION == MOER_SITU + 1 \? a.up_beta : 0.0f, a.up_offset, a.clamp));\n"
    "    }\n"
    "    return value;\n"
    "}\n"
    "\n"
    "DEVICE float output_bias(const moer_matmul_args &a, u32 expert, u32 column) {\n"
    "    return BIAS \? load_value(a.bias, (u64)expert * ROWS + column_row(column, false), BIAS) : 0.0f;\n"
    "}\n"
    "DEVICE float output_up_bias(const moer_matmul_args &a, u32 expert, u32 column) {\n"
    "    return BIAS && GATED \? load_value(UP_APART \? a.up_bias : a.bias, (u64)expert * ROWS + column_row(column, true), BIAS) : 0.0f;\n"
    "}\n",
    NULL};
static const char *const moer_source_20[] = { /* passes.h */
    "/*\n"
    "  passes.h: the work of a matmul over the distinct experts of a batch, and who does which part of it: which tiles of weight rows and which\n"
    "  rows of x there are, the range of them that a block takes, the way from one to the next, and what becomes of a finished\n"
    "  output. How the products come about belongs to matmul.cu and matmul_bulk.cu.\n"
    "\n"
    "  Constants: TILE_TOKENS, rows of x that a tile of weights is applied to at once; OUT, OUT_ORDER, X_ORDER, OUT_INDEX and those of output.h as in matmul.cu.\n"
    "*/\n"
    "#include \"scan.h\"\n"
    "#include \"output.h\"\n"
    "\n"
    "#ifndef OUT_ORDER\n"
    "#define OUT_ORDER PAIRS_LINEAR\n"
    "#endif\n"
    "\n"
    "#define TILE_COLUMNS (GATED \? 8 : 16)\n"
    "#define NUM_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)\n"
    "#define EVEN_TILES (COLUMNS % TILE_COLUMNS == 0 && ROWS_ALIKE) /* whose rows are always as far from each other */\n"
    "\n"
    "/* The weight row that is row `i` (0 to 15) of a tile. Past the matrix: its last row, whose sums nobody uses. */\n"
    "DEVICE u64 tile_row(u32 tile, u32 i) {\n"
    "    u64 column = (u64)tile * TILE_COLUMNS + (GATED \? i & 7 : i);\n"
    "    if (COLUMNS % TILE_COLUMNS != 0 && column >= COLUMNS) column = COLUMNS - 1;\n"
    "    return column_row(column, i >= 8);\n"
    "}\n"
    "\n"
    "/* The first entries of the maps, a lane each, all loaded at once: loads that wait for each other would be a good part of a step with few tokens. What\n"
    "   lies beyond the last distinct expert isn't used. */\n"
    "struct first_maps { u32 expert, end_row, pair; };\n"
    "\n"
    "/* Rows of x come from the kernel before this one, which has waited for the maps before it let this one start: so they may be read meanwhile, and tell which weights to begin\n"
    "   with. */\n"
    "constexpr bool MAPS_ARE_THERE = X_INDEX == 2;\n"
    "/* So what reads x or writes waits for the kernel before; what reads the maps alone, unless they are there. */\n"
    "DEVICE void wait_if(bool wanted) {\n"
    "    if (!wanted) return;\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "}\n"
    "DEVICE u32 load_map(const int *p) { return MAPS_ARE_THERE \? load_fresh_4(p) : (u32)*p; }\n"
    "\n"
    "DEVICE first_maps load_first_maps(const moer_matmul_args &a) {\n"
    "    const u32 lane = lane_index();\n"
    "    first_maps m = {0, 0, 0};\n"
    "    if (lane < a.max_distinct) {\n"
    "        m.expert = load_map(a.distinct_experts + lane);\n"
    "        m.end_row = load_map(a.distinct_offsets + lane + 1);\n"
    "    }\n"
    "    if (X_INDEX != 2 && lane < a.num_pairs) m.pair = load_map(a.row_to_pair + lane);\n"
    "    return m;\n"
    "}\n"
    "\n"
    "/* Later ones are loaded a tile ahead, and wait for nobody. */\n"
    "struct later_maps {};\n"
    "DEVICE u32 expert_of(const moer_matmul_args &a, const later_maps &, u32 d) { return (u32)a.distinct_experts[d]; }\n"
    "DEVICE u32 end_row_of(const moer_matmul_args &a, const later_maps &, u32 d) { return (u32)a.distinct_offsets[d + 1]; }\n"
    "DEVICE u32 pair_of(const moer_matmul_args &a, const later_maps &, u32 row, u32) { return (u32)a.row_to_pair[row]; }\n"
    "\n"
    "/* All lanes ask for the same d; each for a row of its own, below end_row, which is the same for all. */\n"
    "DEVICE u32 expert_of(const moer_matmul_args &a, const first_maps &m, u32 d) { return d < 32 \? warp_shuffle(m.expert, d) : load_map(a.distinct_experts + d); }\n"
    "DEVICE u32 end_row_of(const moer_matmul_args &a, const first_maps &m, u32 d) { return d < 32 \? warp_shuffle(m.end_row, d) : load_map(a.distinct_offsets + d + 1); }\n"
    "DEVICE u32 pair_of(const moer_matmul_args &a, const first_maps &m, u32 row, u32 end_row) { return end_row <= 32 \? warp_shuffle(m.pair, row) : load_map(a.row_to_pair + row); }\n"
    "\n"
    "/* A pass is all tiles of an expert with up to TILE_TOKENS of its rows. Blocks share the passes' tiles evenly, else one popular expert would keep\n"
    "   some of them for twice as long. */\n"
    "\n"
    "/* Passes of distinct expert 32 * chunk + lane. */\n"
    "DEVICE u32 passes_of(const moer_matmul_args &a, const first_maps &m, u32 chunk, u32 num_distinct) {\n"
    "    const u32 d = chunk * 32 + lane_index();\n"
    "    u32 begin = warp_shuffle_up(m.end_row, 1), end = m.end_row;\n"
    "    if (lane_index() == 0) begin = 0;\n",
    "    if (chunk != 0 && d < num_distinct) {\n"
    "        begin = load_map(a.distinct_offsets + d);\n"
    "        end = load_map(a.distinct_offsets + d + 1);\n"
    "    }\n"
    "    return d < num_distinct \? (end - begin + TILE_TOKENS - 1) / TILE_TOKENS : 0;\n"
    "}\n"
    "\n"
    "DEVICE u32 count_passes(const moer_matmul_args &a, const first_maps &m, u32 num_distinct) {\n"
    "    u32 own = 0;\n"
    "    for (u32 chunk = 0; chunk * 32 < num_distinct; chunk++) own += passes_of(a, m, chunk, num_distinct);\n"
    "    return warp_add(own);\n"
    "}\n"
    "\n"
    "/* Which pass of which distinct expert is pass `wanted` of all; it exists. */\n"
    "struct pass_place { u32 d, pass; };\n"
    "DEVICE pass_place find_pass(const moer_matmul_args &a, const first_maps &m, u32 num_distinct, u32 wanted) {\n"
    "    pass_place found = {0, wanted};\n"
    "    for (u32 chunk = 0, before = 0; chunk * 32 < num_distinct; chunk++) {\n"
    "        const u32 own = passes_of(a, m, chunk, num_distinct), sum = scan_warp(own), here = warp_ballot(before + sum > wanted);\n"
    "        if (here) {\n"
    "            const u32 first = popcount((here & (0u - here)) - 1);\n"
    "            found.d = chunk * 32 + first;\n"
    "            found.pass = wanted - before - warp_shuffle(sum - own, first);\n"
    "            break;\n"
    "        }\n"
    "        before += warp_shuffle(sum, 31);\n"
    "    }\n"
    "    return found;\n"
    "}\n"
    "\n"
    "/* A block's share of the tiles of all passes: so many from a tile of a pass on. 32 bits count them, since no memory has room for an output of more. */\n"
    "struct work_range { u32 pass, tile, num_tiles; };\n"
    "\n"
    "DEVICE work_range find_range(u32 num_passes) {\n"
    "    const u64 total = (u64)num_passes * NUM_TILES;\n"
    "    const u32 blocks = grid_blocks_x(), block = block_index_x();\n"
    "    const u64 share = total >> 32 \? total / blocks : (u32)total / blocks, rest = total - share * blocks; /* a long division takes long */\n"
    "    const u64 begin = block * share + (block < rest \? block : rest);\n"
    "    work_range range;\n"
    "    range.pass = total >> 32 \? (u32)(begin / NUM_TILES) : (u32)begin / NUM_TILES;\n"
    "    range.tile = (u32)(begin - (u64)range.pass * NUM_TILES);\n"
    "    range.num_tiles = (u32)share + (block < rest);\n"
    "    return range;\n"
    "}\n"
    "\n"
    "/* Where a block is in its range: a tile of distinct expert d with its rows of x from `base` on; `left`: tiles to do, with this one. */\n"
    "struct tile_place {\n"
    "    u32 left, d, tile;\n"
    "    u32 expert, base, end_row;\n"
    "};\n"
    "\n"
    "/* Tile `tile` of the distinct expert's pass `skipped`. */\n"
    "template <class Maps>\n"
    "DEVICE void enter_expert(const moer_matmul_args &a, const Maps &m, tile_place &p, u32 d, u32 skipped, u32 tile) {\n"
    "    p.d = d;\n"
    "    p.tile = tile;\n"
    "    p.expert = expert_of(a, m, d);\n"
    "    p.base = (d == 0 \? 0 : end_row_of(a, m, d - 1)) + skipped * TILE_TOKENS;\n"
    "    p.end_row = end_row_of(a, m, d);\n"
    "}\n"
    "\n"
    "DEVICE tile_place enter_range(const moer_matmul_args &a, const first_maps &m, u32 num_distinct) {\n"
    "    const u32 num_passes = a.num_pairs <= TILE_TOKENS \? num_distinct : count_passes(a, m, num_distinct);\n"
    "    const work_range range = find_range(num_passes);\n"
    "    tile_place p = {};\n"
    "    p.left = range.num_tiles;\n"
    "    if (p.left == 0) return p;\n"
    "    const pass_place first = num_passes == num_distinct \? pass_place{range.pass, 0} : find_pass(a, m, num_distinct, range.pass);\n"
    "    enter_expert(a, m, p, first.d, first.pass, range.tile);\n"
    "    return p;\n"
    "}\n"
    "\n"
    "/* To the next tile, if there is one; true where it has other rows of x. */\n"
    "DEVICE bool next_tile(const moer_matmul_args &a, tile_place &p) {\n"
    "    if (--p.left == 0) return false;\n"
    "    if (++p.tile < NUM_TILES) return false;\n"
    "    p.tile = 0;\n"
    "    p.base += TILE_TOKENS;\n"
    "    if (p.base >= p.end_row) enter_expert(a, later_maps{}, p, p.d + 1, 0, 0);\n"
    "    return true;\n"
    "}\n"
    "\n"
    "/* The row of x of token `token` of a tile. Where there is no token: another's, whose sums nobody uses, or none where multiplying costs time by the token. */\n"
    "#define NO_ROW 0xffffffffu\n"
    "template <class Maps>\n"
    "DEVICE u32 find_x_row(const moer_matmul_args &a, const Maps &m, const tile_place &p, u32 token) {\n",
    "    const u32 wanted = p.base + token, row = wanted < p.end_row \? wanted : p.base;\n"
    "    const u32 x_row = x_row_of(a, X_INDEX == 2 \? row : pair_of(a, m, row, p.end_row));\n"
    "    return !TENSOR_CORES && wanted >= p.end_row \? NO_ROW : x_row;\n"
    "}\n"
    "\n"
    "DEVICE const u8 *activations(const moer_matmul_args &a, u32 x_row) { return x_row == NO_ROW \? 0 : (const u8 *)a.x + (u64)x_row * INNER * X_BYTES; }\n"
    "\n"
    "/* Where element i of a row is, whose pairs lie in this order. */\n"
    "DEVICE u32 place_in_order(int order, u32 i) {\n"
    "    if (order == PAIRS_OF_4) return i / 4 * 4 + i % 2 * 2 + i / 2 % 2;\n"
    "    if (order == PAIRS_OF_8) return i / 8 * 8 + i % 4 * 2 + i / 4 % 2;\n"
    "    return i;\n"
    "}\n"
    "\n"
    "/* Where the output of a tile's column c and a token goes. */\n"
    "struct output_place {\n"
    "    u32 pair, column;\n"
    "    int at; /* row of out; -1: nowhere */\n"
    "};\n"
    "\n"
    "DEVICE output_place find_output(const moer_matmul_args &a, const tile_place &p, u32 c, u32 token) {\n"
    "    const u32 row = p.base + token;\n"
    "    output_place o = {row, p.tile * TILE_COLUMNS + c, -1};\n"
    "    if (row >= p.end_row || o.column >= COLUMNS) return o;\n"
    "    if (OUT_INDEX || WEIGHT_ON_INPUT) o.pair = (u32)a.row_to_pair[row];\n"
    "    o.at = OUT_INDEX == 2 \? a.pair_to_slot_row[o.pair] : (int)(OUT_INDEX \? o.pair : row);\n"
    "    return o;\n"
    "}\n"
    "\n"
    "/* Makes an output of the parts' sums, and writes it. */\n"
    "DEVICE void write_output(const moer_matmul_args &a, const output_place &o, float bias, float up_bias, float value, float up) {\n"
    "    value = finish_sums(a, bias, up_bias, WEIGHT_ON_INPUT \? load_value(a.router_weights, o.pair, WEIGHTS) : 1.0f, scale_codes(value), scale_codes(up));\n"
    "    store_value(a.out, (u64)(u32)o.at * COLUMNS + place_in_order(OUT_ORDER, o.column), OUT, value);\n"
    "}\n"
    "\n"
    "/* The pairs that no expert here serves. */\n"
    "DEVICE void clear_other_pairs(const moer_matmul_args &a) {\n"
    "    const u32 threads = grid_blocks_x() * block_threads();\n"
    "    for (u64 i = block_index_x() * block_threads() + thread_index(); i < (u64)a.num_pairs * COLUMNS; i += threads)\n"
    "        if (a.pair_to_row[i / COLUMNS] < 0) store_value(a.out, i, OUT, 0.0f);\n"
    "}\n"
    "\n"
    "/* One array of all distinct experts, in pieces that the threads share. Together they fit L2, or there are none: so 32 bits count them. */\n"
    "DEVICE void prefetch_array(const moer_matmul_args &a, const void *data, u64 bytes, u32 num_experts) {\n"
    "    const u32 pieces = (u32)(bytes + PREFETCH_BYTES - 1) / PREFETCH_BYTES;\n"
    "    for (u32 i = block_index_x() + grid_blocks_x() * thread_index(); i < pieces * num_experts; i += grid_blocks_x() * block_threads()) {\n"
    "        const u64 at = (u64)(i % pieces) * PREFETCH_BYTES;\n"
    "        prefetch_weights((const u8 *)data + (u64)(u32)a.distinct_experts[i / pieces] * bytes + at, bytes - at);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The matrix that the next kernel multiplies, of as many distinct experts as wanted. */\n"
    "DEVICE void prefetch_next(const moer_matmul_args &a) {\n"
    "    const u32 num_distinct = (u32)a.distinct_count[0];\n"
    "    const u32 num_experts = num_distinct < a.next_experts \? num_distinct : a.next_experts;\n"
    "    prefetch_array(a, a.next_data, a.next_bytes, num_experts);\n"
    "    prefetch_array(a, a.next_scales, a.next_scale_bytes, num_experts);\n"
    "}\n"
    "\n",
    NULL};
static const char *const moer_source_21[] = { /* parts.h */
    "/*\n"
    "  parts.h: the sums that the warps have of a tile, each over its part of K: where they lie in shared memory, how a warp leaves its own there, and how an\n"
    "  output's are added up. When they are there, and when they may be overwritten, is for the kernels to say.\n"
    "\n"
    "  Constants: WARPS, TILE_TOKENS and GATED as in matmul.cu; UP_ROWS, defined before: from a column's gate row in the tile to its up row.\n"
    "*/\n"
    "constexpr u32 PART_SIZE = 16 * TILE_TOKENS, PARTS_SIZE = WARPS * PART_SIZE; /* words: [warp][row][token] */\n"
    "\n"
    "/* Tokens lie in pairs, which rows that follow each other have in different banks, for those who write and those who read. */\n"
    "DEVICE u32 part_place(u32 row, u32 token) {\n"
    "    const u32 pair = token / 2 ^ (GATED && UP_ROWS == 8 \? (row >> 2 & 1) * 2 : row >> 2 & 3);\n"
    "    return row * TILE_TOKENS + pair * 2 + token % 2;\n"
    "}\n"
    "\n"
    "/* A lane's places: of its low row, and its high one. */\n"
    "struct part_places {\n"
    "    shared_place low, high;\n"
    "};\n"
    "\n"
    "/* `at`: where the parts begin. */\n"
    "template <class Words>\n"
    "DEVICE part_places find_part_places(Words &words, u32 at) {\n"
    "    const u32 g = lane_index() >> 2, t = lane_index() & 3, own = at + warp_index() * PART_SIZE;\n"
    "    part_places p;\n"
    "    p.low = shared_place_of(words, own + part_place(g, t * 2));\n"
    "    p.high = shared_place_of(words, own + part_place(g + 8, t * 2));\n"
    "    return p;\n"
    "}\n"
    "\n"
    "/* So many words further. */\n"
    "template <int BLOCKS>\n"
    "DEVICE void leave_part(const part_places &places, u32 further, const float (&sums)[BLOCKS][4]) {\n"
    "#pragma unroll\n"
    "    for (u32 b = 0; b < BLOCKS; b++) {\n"
    "        shared_store_2_to(places.low, further + b * 8, u32x2{{f32_bits(sums[b][0]), f32_bits(sums[b][1])}});\n"
    "        shared_store_2_to(places.high, further + b * 8, u32x2{{f32_bits(sums[b][2]), f32_bits(sums[b][3])}});\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The sums of a column and a token, of its gate or only row, and its up. */\n"
    "template <class Words>\n"
    "DEVICE void add_parts(Words &words, u32 at, u32 c, u32 token, float &value, float &up) {\n"
    "    const u32 row = GATED && UP_ROWS == 1 \? c * 2 : c, from = at + part_place(row, token), up_from = at + part_place(row + UP_ROWS, token);\n"
    "    value = up = 0.0f;\n"
    "#pragma unroll\n"
    "    for (u32 w = 0; w < WARPS; w++) {\n"
    "        value = f32_add(value, f32_from_bits(words[from + w * PART_SIZE]));\n"
    "        if (GATED) up = f32_add(up, f32_from_bits(words[up_from + w * PART_SIZE]));\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_22[] = { /* vector.h */
    "/*\n"
    "  vector.h: N consecutive numbers of a row, loaded and stored in one access where their bytes make one. N is a power of two\n"
    "  up to 8 and divides the row's length, so that an access is aligned when the array is. Quantized weights belong to tile.h.\n"
    "*/\n"
    "#include \"values.h\"\n"
    "\n"
    "template <int DTYPE, int N>\n"
    "DEVICE void load_vector(const void *array, u64 index, float (&value)[N]) {\n"
    "    if (DTYPE == DTYPE_F32) {\n"
    "        const u32 *p = (const u32 *)array + index;\n"
    "        if (N % 4 == 0) {\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N / 4; i++) {\n"
    "                const u32x4 v = load_16(p + i * 4);\n"
    "#pragma unroll\n"
    "                for (int j = 0; j < 4; j++) value[(i * 4 + j) % N] = f32_from_bits(v.v[j]);\n"
    "            }\n"
    "        } else {\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N; i++) value[i] = f32_from_bits(load_4(p + i));\n"
    "        }\n"
    "    } else {\n"
    "        const u16 *p = (const u16 *)array + index;\n"
    "        u32 word[(N + 1) / 2];\n"
    "        if (N == 8) {\n"
    "            const u32x4 v = load_16(p);\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N / 2; i++) word[i] = v.v[i % 4];\n"
    "        } else if (N % 2 == 0) {\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N / 2; i++) word[i] = load_4(p + i * 2);\n"
    "        } else {\n"
    "            word[0] = load_2(p);\n"
    "        }\n"
    "#pragma unroll\n"
    "        for (int i = 0; i < N; i++) {\n"
    "            const u16 half = (u16)(word[i / 2] >> (16 * (i % 2)));\n"
    "            value[i] = DTYPE == DTYPE_F16 \? f16_to_f32(half) : bf16_to_f32(half);\n"
    "        }\n"
    "    }\n"
    "}\n"
    "\n"
    "template <int DTYPE, int N>\n"
    "DEVICE void store_vector(void *array, u64 index, const float (&value)[N]) {\n"
    "    if (DTYPE == DTYPE_F32) {\n"
    "        float *p = (float *)array + index;\n"
    "        if (N % 4 == 0) {\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N / 4; i++) {\n"
    "                u32x4 v;\n"
    "#pragma unroll\n"
    "                for (int j = 0; j < 4; j++) v.v[j] = f32_bits(value[(i * 4 + j) % N]);\n"
    "                store_16(p + i * 4, v);\n"
    "            }\n"
    "        } else {\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N; i++) p[i] = value[i];\n"
    "        }\n"
    "    } else {\n"
    "        u16 *p = (u16 *)array + index;\n"
    "        if (N == 8) {\n"
    "            u32x4 v;\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < 4; i++) {\n"
    "                const float lo = value[(i * 2) % N], hi = value[(i * 2 + 1) % N];\n"
    "                v.v[i] = DTYPE == DTYPE_F16 \? f32_to_half2(lo, hi) : f32_to_bf162(lo, hi);\n"
    "            }\n"
    "            store_16(p, v);\n"
    "        } else {\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < N; i++) p[i] = DTYPE == DTYPE_F16 \? f32_to_f16(value[i]) : f32_to_bf16(value[i]);\n"
    "        }\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_23[] = { /* epilogue.h */
    "/*\n"
    "  epilogue.h: what the combine adds to a token's sum beside the rows of its experts, in this order: in its slot's place\n"
    "  weight * x for an identity expert, after all slots shared_weight * shared, then the residual; each in f32, a product and\n"
    "  its sum as one fma. Shared by the kernels that combine, so that they give the same bits. Include vector.h first.\n"
    "\n"
    "  Constants: WEIGHTS, the dtype of the router's weights; FIRST_IDENTITY, NUM_IDENTITY: the ids of identity experts that this layer adds; 0: none.\n"
    "*/\n"
    "\n"
    "DEVICE float router_weight(const void *weights, u32 pair) {\n"
    "    float weight[1];\n"
    "    load_vector<WEIGHTS, 1>(weights, pair, weight);\n"
    "    return weight[0];\n"
    "}\n"
    "\n"
    "/* Slot `pair` of a token, which has no row here. `at` is the first of N columns in [T, H] arrays of DTYPE. */\n"
    "template <int DTYPE, int N>\n"
    "DEVICE void add_identity(const moer_epilogue &e, const void *weights, u32 pair, u64 at, float (&sum)[N]) {\n"
    "#if NUM_IDENTITY\n"
    "    if ((u32)e.ids[pair] - FIRST_IDENTITY >= NUM_IDENTITY) return;\n"
    "    const float weight = router_weight(weights, pair);\n"
    "    float x[N];\n"
    "    load_vector<DTYPE, N>(e.x, at, x);\n"
    "#pragma unroll\n"
    "    for (int i = 0; i < N; i++) sum[i] = f32_fma(weight, x[i], sum[i]);\n"
    "#endif\n"
    "}\n"
    "\n"
    "template <int DTYPE, int N>\n"
    "DEVICE void add_shared_and_residual(const moer_epilogue &e, u32 token, u64 at, float (&sum)[N]) {\n"
    "    float value[N];\n"
    "    if (e.shared) {\n"
    "        const float weight = e.shared_weights \? e.shared_weights[token] : 1.0f;\n"
    "        load_vector<DTYPE, N>(e.shared, at, value);\n"
    "#pragma unroll\n"
    "        for (int i = 0; i < N; i++) sum[i] = f32_fma(weight, value[i], sum[i]);\n"
    "    }\n"
    "    if (e.residual) {\n"
    "        load_vector<DTYPE, N>(e.residual, at, value);\n"
    "#pragma unroll\n"
    "        for (int i = 0; i < N; i++) sum[i] = f32_add(sum[i], value[i]);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_24[] = { /* dispatch.h */
    "/*\n"
    "  dispatch.h: what dispatch.cu and dispatch_large.cu share: which rank a pair goes to, and writing the rows and slot rows of a\n"
    "  block's share of consecutive tokens once it is known how many those before it have. How that is counted belongs to the\n"
    "  kernels.\n"
    "\n"
    "  A block copies the rows of its share, THREADS units of UNIT bytes of each (x of the grid; shares are y). Blocks with x = 0\n"
    "  write what isn't x. Only integer counters are atomic, and only in shared memory: the result is the same each time.\n"
    "\n"
    "  Constants: K, slots a token; NUM_RANKS; ROW_BYTES of x; UNIT, bytes of one access: 16, 4 or 2, a divisor of ROW_BYTES;\n"
    "  WEIGHT_BYTES, 4 or 2; those of placement.h.\n"
    "*/\n"
    "#include \"tokens.h\"\n"
    "#include \"placement.h\"\n"
    "\n"
    "#define THREADS 256\n"
    "#define CHUNK_TOKENS (THREADS / K) /* that the block looks at together, a thread a pair */\n"
    "#define CHUNK_PAIRS (CHUNK_TOKENS * K)\n"
    "#define NOWHERE 0xffffffffu\n"
    "\n"
    "/* Block `block` of `blocks` takes tokens begin to end - 1. */\n"
    "struct token_share { u32 begin, end; };\n"
    "\n"
    "DEVICE token_share find_share(const moer_dispatch_args &a, u32 block, u32 blocks) {\n"
    "    const u32 share = (a.num_tokens + blocks - 1) / blocks;\n"
    "    token_share s;\n"
    "    s.begin = block * share < a.num_tokens \? block * share : a.num_tokens;\n"
    "    s.end = s.begin + share < a.num_tokens \? s.begin + share : a.num_tokens;\n"
    "    return s;\n"
    "}\n"
    "\n"
    "/* The rank that a pair goes to, or NOWHERE. */\n"
    "DEVICE u32 rank_of_pair(const moer_dispatch_args &a, u32 pair, u32 num_valid) {\n"
    "    if (pair / K >= num_valid) return NOWHERE;\n"
    "    const u32 expert = physical_expert(a.expert_map, (u32)a.ids[pair], pair / K);\n"
    "    if (expert >= a.rank_begin[NUM_RANKS]) return NOWHERE;\n"
    "    u32 low = 0, high = NUM_RANKS; /* the last rank that begins at or before the expert: ranks without experts are passed over */\n"
    "#pragma unroll 1\n"
    "    while (high - low > 1) {\n"
    "        const u32 middle = (low + high) / 2;\n"
    "        if (a.rank_begin[middle] <= expert) low = middle;\n"
    "        else high = middle;\n"
    "    }\n"
    "    return low;\n"
    "}\n"
    "\n"
    "/* Ranks of the chunk's pairs; those of tokens from `end` on are nowhere. */\n"
    "template <class Ranks>\n"
    "DEVICE void find_ranks(const moer_dispatch_args &a, Ranks &rank, u32 first_token, u32 end, u32 num_valid) {\n"
    "    const u32 i = thread_index();\n"
    "    block_barrier(); /* the chunk before may still be read */\n"
    "    if (i < CHUNK_PAIRS) rank[i] = first_token + i / K < end \? rank_of_pair(a, first_token * K + i, num_valid) : NOWHERE;\n"
    "    block_barrier();\n"
    "}\n"
    "\n"
    "/* The first slot of pair i's token that goes to the same rank. */\n"
    "template <class Ranks>\n"
    "DEVICE u32 leader(const Ranks &rank, u32 i) {\n"
    "    u32 first = i - i % K;\n"
    "#pragma unroll 1\n"
    "    while (rank[first] != rank[i]) first++;\n"
    "    return first;\n"
    "}\n"
    "\n"
    "/* Counts a pair: rows at 2r, slot rows at 2r + 1. */\n"
    "template <class Counts>\n"
    "DEVICE void count_pair(Counts &counts, u32 rank, bool leads) {\n"
    "    shared_atomic_add(counts, rank * 2 + 1, 1u);\n"
    "    if (leads) shared_atomic_add(counts, rank * 2, 1u);\n"
    "}\n"
    "\n"
    "/* Numbers what the lanes want of their ranks' cursors, in the order of lanes. */\n"
    "template <class Cursors>\n"
    "DEVICE u32 take_numbers(Cursors &cursors, u32 which, u32 rank) {\n"
    "    const u32 peers = warp_match(rank), lane = lane_index();\n"
    "    u32 number = NOWHERE;\n"
    "    if (rank != NOWHERE) number = cursors[rank * 2 + which] + popcount(peers & ((1u << lane) - 1));\n"
    "    warp_barrier();\n"
    "    if (rank != NOWHERE && (peers >> lane) == 1u) cursors[rank * 2 + which] = number + 1; /* the last of its peers */\n"
    "    warp_barrier();\n"
    "    return number;\n"
    "}\n"
    "\n"
    "DEVICE void copy_weight(void *to, u64 to_index, const void *from, u64 from_index, bool there) {\n"
    "    if (WEIGHT_BYTES == 4) ((u32 *)to)[to_index] = there \? load_4((const u32 *)from + from_index) : 0;\n"
    "    else ((u16 *)to)[to_index] = there \? load_2((const u16 *)from + from_index) : (u16)0;\n"
    "}\n"
    "\n"
    "/* With fixed sizes: the rows that don't exist. */\n"
    "template <class Counts>\n",
    "DEVICE void clear_rows(const moer_dispatch_args &a, const Counts &total) {\n"
    "    const u64 entries = (u64)NUM_RANKS * a.capacity * K;\n"
    "    for (u64 i = (u64)block_index_y() * THREADS + thread_index(); i < entries; i += (u64)grid_blocks_y() * THREADS) {\n"
    "        const u32 row = (u32)(i / K), rank = row / a.capacity;\n"
    "        if (row - rank * a.capacity < total[rank * 2]) continue;\n"
    "        if (a.row_ids) a.row_ids[i] = -1;\n"
    "        if (a.row_weights) copy_weight(a.row_weights, i, 0, 0, false);\n"
    "        if (a.row_to_token && i % K == 0) a.row_to_token[row] = -1;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* What belongs to pair i of the chunk, and to its place in each row of its token. */\n"
    "template <class Numbers>\n"
    "DEVICE void write_pair(const moer_dispatch_args &a, u32 pair, u32 i, const Numbers &rank, const Numbers &row_of, const Numbers &slot_of) {\n"
    "    const u32 token = pair / K, first = i - i % K;\n"
    "    if (a.pair_to_row) a.pair_to_row[pair] = (int)row_of[i];\n"
    "    if (a.pair_to_slot_row) {\n"
    "        const bool sent = rank[i] != NOWHERE && row_of[leader(rank, i)] != NOWHERE;\n"
    "        a.pair_to_slot_row[pair] = sent \? (int)slot_of[i] : -1;\n"
    "    }\n"
    "    if (a.row_to_token && row_of[i] != NOWHERE) a.row_to_token[row_of[i]] = (int)token;\n"
    "    if (!a.row_ids && !a.row_weights) return;\n"
    "    const int expert = rank[i] != NOWHERE \? (int)physical_expert(a.expert_map, (u32)a.ids[pair], token) : -1;\n"
    "#pragma unroll 1\n"
    "    for (u32 other = first; other < first + K; other++) {\n"
    "        const u32 row = row_of[other];\n"
    "        if (row == NOWHERE) continue;\n"
    "        const u64 at = (u64)row * K + (i - first);\n"
    "        const bool here = rank[other] == rank[i];\n"
    "        if (a.row_ids) a.row_ids[at] = here \? expert : -1;\n"
    "        if (a.row_weights) copy_weight(a.row_weights, at, a.weights, pair, here);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* A unit of the rows of the chunk's tokens. */\n"
    "template <class Numbers>\n"
    "DEVICE void copy_rows(const moer_dispatch_args &a, u32 first_token, u32 num_tokens, u32 unit, const Numbers &row_of) {\n"
    "#pragma unroll 1\n"
    "    for (u32 t = 0; t < num_tokens; t++) {\n"
    "        const u8 *from = (const u8 *)a.x + (u64)(first_token + t) * ROW_BYTES + unit * UNIT;\n"
    "        u32x4 value = {{0, 0, 0, 0}};\n"
    "        bool loaded = false;\n"
    "#pragma unroll 1\n"
    "        for (u32 j = 0; j < K; j++) {\n"
    "            const u32 row = row_of[t * K + j];\n"
    "            if (row == NOWHERE) continue;\n"
    "            if (!loaded) {\n"
    "                if (UNIT == 16) value = load_16(from);\n"
    "                else value.v[0] = UNIT == 4 \? load_4(from) : load_2(from);\n"
    "            }\n"
    "            loaded = true;\n"
    "            u8 *to = (u8 *)a.rows + (u64)row * ROW_BYTES + unit * UNIT;\n"
    "            if (UNIT == 16) store_16(to, value);\n"
    "            else if (UNIT == 4) *(u32 *)to = value.v[0];\n"
    "            else *(u16 *)to = (u16)value.v[0];\n"
    "        }\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Everything that a block writes. `total`: rows and slot rows of each rank; `before`: those of tokens before its share; `start` becomes\n"
    "   where each rank's begin. The other arrays are for the chunk at hand. */\n"
    "template <class Numbers, class Counts, class Starts>\n"
    "DEVICE void send_share(const moer_dispatch_args &a, const token_share &share, u32 num_valid, Numbers &rank, Numbers &row_of, Numbers &slot_of, Counts &total, Counts &before, Starts &start) {\n"
    "    const u32 i = thread_index();\n"
    "    for (u32 r = i; r < NUM_RANKS * 2 + 2; r += THREADS) {\n"
    "        u32 at = r / 2 * (r % 2 \? a.slot_capacity : a.capacity);\n"
    "        if (!a.capacity)\n"
    "            for (u32 other = r % 2; other < r; other += 2) at += total[other];\n"
    "        start[r] = at;\n"
    "    }\n"
    "    block_barrier();\n"
    "    if (block_index_x() == 0) {\n"
    "        for (u32 r = i; r < NUM_RANKS * 2 + 2 && block_index_y() == 0; r += THREADS) {\n"
    "            if (a.offsets) a.offsets[r] = (int)start[r];\n"
    "            if (a.counts && r < NUM_RANKS * 2) a.counts[r] = (int)total[r];\n"
    "        }\n"
    "        if (a.capacity && (a.row_ids || a.row_weights || a.row_to_token)) clear_rows(a, total);\n"
    "    }\n",
    "    block_barrier();\n"
    "    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) before[r] += start[r]; /* now the next of this block's */\n"
    "\n"
    "    for (u32 token = share.begin; token < share.end; token += CHUNK_TOKENS) {\n"
    "        const u32 tokens = share.end - token < CHUNK_TOKENS \? share.end - token : CHUNK_TOKENS;\n"
    "        find_ranks(a, rank, token, share.end, num_valid);\n"
    "        if (warp_index() == 0) {\n"
    "            for (u32 c = lane_index(); c < (CHUNK_PAIRS + 31) / 32 * 32; c += 32) {\n"
    "                const u32 r = c < CHUNK_PAIRS \? rank[c] : NOWHERE;\n"
    "                const bool leads = r != NOWHERE && leader(rank, c) == c;\n"
    "                u32 slot = take_numbers(before, 1, r), row = take_numbers(before, 0, leads \? r : NOWHERE);\n"
    "                if (a.capacity && slot != NOWHERE && slot >= start[r * 2 + 3]) slot = NOWHERE; /* the next rank's begin */\n"
    "                if (a.capacity && row != NOWHERE && row >= start[r * 2 + 2]) row = NOWHERE;\n"
    "                if (c < CHUNK_PAIRS) {\n"
    "                    row_of[c] = row;\n"
    "                    slot_of[c] = slot;\n"
    "                }\n"
    "            }\n"
    "        }\n"
    "        block_barrier();\n"
    "        if (block_index_x() == 0 && i < tokens * K) write_pair(a, token * K + i, i, rank, row_of, slot_of);\n"
    "        const u32 unit = block_index_x() * THREADS + i;\n"
    "        if (a.rows && unit < ROW_BYTES / UNIT) copy_rows(a, token, tokens, unit, row_of);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_25[] = { /* sort.h */
    "/*\n"
    "  sort.h: what the two sorts of large batches have in common, maps.cu and maps_cub.cu: which pairs have rows, what is counted and added\n"
    "  up, and the block-aligned form. How pairs are ranked is theirs.\n"
    "\n"
    "  Constants: those of maps.cu, and SORT_THREADS (threads a block).\n"
    "*/\n"
    "#define NOT_LOCAL 0xffffffffu\n"
    "\n"
    "/* Rows, distinct experts and aligned rows. */\n"
    "struct sums { u32 rows, distinct, aligned; };\n"
    "\n"
    "DEVICE u32 valid_pairs(const moer_maps_args &a) { return valid_tokens(a.num_valid_tokens, a.num_pairs / K) * K; }\n"
    "\n"
    "/* Local expert of a pair with this id, or NOT_LOCAL, which is also an id that no expert has. */\n"
    "DEVICE u32 local_expert(const moer_maps_args &a, u32 id, u32 pair, u32 num_valid_pairs) {\n"
    "    if (pair >= num_valid_pairs) return NOT_LOCAL;\n"
    "    const u32 local = physical_expert(a.expert_map, id, pair / K) - FIRST_EXPERT;\n"
    "    return local < LOCAL_EXPERTS \? local : NOT_LOCAL;\n"
    "}\n"
    "\n"
    "/* A pair's share in the running totals, which count experts before placement. */\n"
    "DEVICE void add_load(const moer_maps_args &a, u32 id, u32 pair, u32 num_valid_pairs) {\n"
    "    if (a.maps.expert_load && pair < num_valid_pairs && id < E) global_atomic_add_64(a.maps.expert_load + id, 1);\n"
    "}\n"
    "\n"
    "/* ---- the counts of shares of consecutive pairs: [num_blocks, COUNT_VECTORS, 8], 16 bits each ----\n"
    "   Vector v has the experts v, v + COUNT_VECTORS and so on: threads that take neighbours add to neighbours. A share has under 8192 pairs, so that\n"
    "   sums over eight of them have 16 bits, too. */\n"
    "\n"
    "#define COUNT_VECTORS ((LOCAL_EXPERTS + 7) / 8)\n"
    "\n"
    "/* A kernel that counts each local expert's pairs from `first` to before `end`. `counts` has 8 * COUNT_VECTORS words. */\n"
    "template <class Counts>\n"
    "DEVICE void count_share(const moer_maps_args &a, Counts &counts, u32 first, u32 end) {\n"
    "    const u32 thread = thread_index();\n"
    "    for (u32 e = thread; e < 8 * COUNT_VECTORS; e += SORT_THREADS) counts[e] = 0;\n"
    "    block_barrier();\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 num_valid = valid_pairs(a);\n"
    "    for (u32 pair = first + thread; pair < end; pair += 4 * SORT_THREADS) {\n"
    "        u32 id[4];\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 4; i++) id[i] = pair + i * SORT_THREADS < end \? load_4(a.ids + pair + i * SORT_THREADS) : NOT_LOCAL;\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 4; i++) {\n"
    "            const u32 expert = local_expert(a, id[i], pair + i * SORT_THREADS, num_valid);\n"
    "            if (expert != NOT_LOCAL) shared_atomic_add(counts, expert, 1);\n"
    "            add_load(a, id[i], pair + i * SORT_THREADS, num_valid);\n"
    "        }\n"
    "    }\n"
    "    block_barrier();\n"
    "    for (u32 v = thread; v < COUNT_VECTORS; v += SORT_THREADS) {\n"
    "        u32x4 words;\n"
    "#pragma unroll\n"
    "        for (u32 w = 0; w < 4; w++) words.v[w] = counts[v + 2 * w * COUNT_VECTORS] | counts[v + (2 * w + 1) * COUNT_VECTORS] << 16;\n"
    "        store_16(a.block_counts + (block_index_x() * COUNT_VECTORS + v) * 4, words);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Adds the halves of a word to the counts of two experts; 0 where there is no such expert. */\n"
    "template <class Counts>\n"
    "DEVICE void add_word(Counts &counts, u32 expert, u32 word) {\n"
    "    if (word & 0xffffu) shared_atomic_add(counts, expert, word & 0xffffu);\n"
    "    if (word >> 16) shared_atomic_add(counts, expert + COUNT_VECTORS, word >> 16);\n"
    "}\n"
    "\n"
    "/* Adds up the counts of the shares before this block's, and of the others. A thread takes eight shares' at a time, with no branch between\n"
    "   the loads: so they are under way together. */\n"
    "template <class Before, class Others>\n"
    "DEVICE void add_counts(const moer_maps_args &a, Before &before, Others &others) {\n"
    "    const u32 most = SORT_THREADS / COUNT_VECTORS, wanted = (a.num_blocks + 7) / 8, parts = wanted < most \? wanted : most;\n"
    "    const u32 part = thread_index() / COUNT_VECTORS, vector = thread_index() % COUNT_VECTORS, shares = (a.num_blocks + parts - 1) / parts;\n",
    "    const u32 first = part * shares, end = first + shares < a.num_blocks \? first + shares : a.num_blocks;\n"
    "    if (part >= parts) return;\n"
    "    for (u32 b = first; b < end; b += 8) {\n"
    "        u32x4 count[8];\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 8; i++) {\n"
    "            count[i] = {};\n"
    "            if (b + i < end) count[i] = load_16(a.block_counts + ((b + i) * COUNT_VECTORS + vector) * 4);\n"
    "        }\n"
    "#pragma unroll\n"
    "        for (u32 w = 0; w < 4; w++) {\n"
    "            u32 all = 0, earlier = 0;\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < 8; i++) {\n"
    "                all += count[i].v[w];\n"
    "                earlier += b + i < block_index_x() \? count[i].v[w] : 0;\n"
    "            }\n"
    "            add_word(before, vector + 2 * w * COUNT_VECTORS, earlier);\n"
    "            add_word(others, vector + 2 * w * COUNT_VECTORS, all - earlier);\n"
    "        }\n"
    "    }\n"
    "}\n"
    "\n"
    "/* ---- what has an entry per expert, and the block-aligned form ---- */\n"
    "\n"
    "DEVICE u32 align_rows(const moer_maps_args &a, u32 rows) { return a.maps.block_size \? (rows + a.maps.block_size - 1) / a.maps.block_size * a.maps.block_size : 0; }\n"
    "\n"
    "/* Where an expert's rows are, and what else has an entry per expert. `at`: sums over the experts before it, and then with it. */\n"
    "template <class Starts, class Aligned>\n"
    "DEVICE void place_expert(const moer_maps_args &a, Starts &starts, Aligned &aligned, u32 e, u32 count, sums &at) {\n"
    "    starts[e] = at.rows;\n"
    "    aligned[e] = at.aligned;\n"
    "    if (block_index_x() == 0) {\n"
    "        if (a.maps.expert_offsets) a.maps.expert_offsets[e] = (int)at.rows;\n"
    "        if (count && a.maps.distinct_experts) a.maps.distinct_experts[at.distinct] = (int)e;\n"
    "        if (count && a.maps.distinct_offsets) a.maps.distinct_offsets[at.distinct] = (int)at.rows;\n"
    "    }\n"
    "    at.rows += count;\n"
    "    at.distinct += count != 0;\n"
    "    at.aligned += align_rows(a, count);\n"
    "}\n"
    "\n"
    "/* The same for the end, by one thread. */\n"
    "template <class Starts, class Aligned>\n"
    "DEVICE void place_end(const moer_maps_args &a, Starts &starts, Aligned &aligned, const sums &total) {\n"
    "    starts[LOCAL_EXPERTS] = total.rows;\n"
    "    aligned[LOCAL_EXPERTS] = total.aligned;\n"
    "    if (block_index_x() == 0) {\n"
    "        if (a.maps.expert_offsets) a.maps.expert_offsets[LOCAL_EXPERTS] = (int)total.rows;\n"
    "        if (a.maps.distinct_offsets) a.maps.distinct_offsets[total.distinct] = (int)total.rows;\n"
    "        if (a.maps.distinct_count) a.maps.distinct_count[0] = (int)total.distinct;\n"
    "        if (a.maps.block_size && a.maps.aligned_rows) a.maps.aligned_rows[0] = (int)total.aligned;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* The padding of every expert's aligned rows, and the expert of every block: a warp an expert, so that lanes write neighbours. */\n"
    "template <class Starts, class Aligned>\n"
    "DEVICE void finish_aligned(const moer_maps_args &a, Starts &starts, Aligned &aligned) {\n"
    "    const u32 thread = block_index_x() * SORT_THREADS + thread_index(), threads = grid_blocks_x() * SORT_THREADS;\n"
    "    const u32 block_size = a.maps.block_size, aligned_rows = aligned[LOCAL_EXPERTS];\n"
    "    for (u32 e = thread / 32; e < LOCAL_EXPERTS; e += threads / 32) {\n"
    "        const u32 begin = aligned[e], end = aligned[e + 1];\n"
    "        if (a.maps.aligned_row_to_pair)\n"
    "            for (u32 i = begin + (starts[e + 1] - starts[e]) + lane_index(); i < end; i += 32) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;\n"
    "        if (a.maps.block_to_expert)\n"
    "            for (u32 i = begin / block_size + lane_index(); i < end / block_size; i += 32) a.maps.block_to_expert[i] = (int)e;\n"
    "    }\n"
    "    if (a.maps.aligned_row_to_pair)\n"
    "        for (u32 i = aligned_rows + thread; i < a.maps.aligned_capacity; i += threads) a.maps.aligned_row_to_pair[i] = (int)a.num_pairs;\n"
    "    if (a.maps.block_to_expert)\n"
    "        for (u32 i = aligned_rows / block_size + thread; i < a.maps.aligned_capacity / block_size; i += threads) a.maps.block_to_expert[i] = -1;\n"
    "}\n",
    NULL};
static const char *const moer_source_26[] = { /* route.cu */
    "/*\n"
    "  route.cu: router and maps of a small batch in one launch of one block: logits [T, E + S] -> ids, weights, the sort of the\n"
    "  T * k <= 512 pairs by expert. With SELECT 0 the ids are given.\n"
    "\n"
    "  What takes time is the chain of things that wait for each other, not their number. So a warp chooses the experts of a token (select.h)\n"
    "  and leaves in shared memory which pairs chose which local expert. Only after the block's barrier the first warps compute and write the\n"
    "  weights, of as many tokens as a warp has lanes for, while the others (the map warps; all, where each has tokens) find the maps from what\n"
    "  lies there, without waiting for each other. A map warp has 32 experts, one a lane. The first row of a lane's expert is the number of\n"
    "  rows of earlier warps' experts, kept beside the masks, and of earlier lanes. Then the lane writes its pairs, the bits of its expert's\n"
    "  mask, in order; or, beyond 32 pairs, threads have pairs after another barrier, and count the bits before theirs.\n"
    "\n"
    "  Masks take LOCAL_EXPERTS * MAX_PAIRS bits. Where that is too much, a byte for each 32 pairs counts how often they chose an expert, four\n"
    "  in a word; every map warp adds up all of them for itself, and takes the pairs 32 at a time.\n"
    "\n"
    "  Row r of a pair is the number of pairs that sort before it. Pairs whose expert isn't local have no row.\n"
    "\n"
    "  Constants: E, K; with SELECT those of select.h; MAPS: 1 for what the layer's next kernels read, 2 for every output that isn't null;\n"
    "  FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h; MAX_PAIRS, a multiple of 32, at most 512.\n"
    "  Threads: any multiple of 32 up to MAX_THREADS.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"scan.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"placement.h\"\n"
    "#if SELECT\n"
    "#include \"scores.h\"\n"
    "#include \"select.h\"\n"
    "#else\n"
    "#define TOKEN_WORDS 4\n"
    "#define AHEAD 0\n"
    "#endif\n"
    "\n"
    "#define NOT_LOCAL 0x7fffffff\n"
    "/* More experts a lane need more registers a thread, scores ahead more shared memory a token, and local experts a table. */\n"
    "#define MOST_EXPERTS (E > LOCAL_EXPERTS \? E : LOCAL_EXPERTS)\n"
    "#define MAX_THREADS (!SELECT \? 1024 : MOST_EXPERTS > 1024 \? 256 : MOST_EXPERTS > 512 \? 384 : MOST_EXPERTS > 256 \? 640 : AHEAD \? 768 : 1024)\n"
    "/* Warps that route, at most. */\n"
    "#define WARPS_ROUTING (MAX_THREADS == 640 || MAX_THREADS == 768 \? 16 : MAX_THREADS / 32)\n"
    "#define ROUTING_WARPS (WARPS_ROUTING < MAX_PAIRS / K \? WARPS_ROUTING : MAX_PAIRS / K)\n"
    "\n"
    "/* By masks: word w * MASKS + e of the table has a bit for each of the pairs 32 w to 32 w + 31 that chose expert e. */\n"
    "#define EXPERT_WARPS ((LOCAL_EXPERTS + 31) / 32) /* warps' turns */\n"
    "#define MASKS (EXPERT_WARPS * 32)\n"
    "#define BY_MASKS (MASKS / 32 * MAX_PAIRS <= 4096)\n"
    "\n"
    "/* Otherwise word place(e) of part w holds the counts of expert e in pairs 128 w to 128 w + 127. Lanes that read words LANE_EXPERTS\n"
    "   apart meet different banks. */\n"
    "#define TABLE_PARTS ((MAX_PAIRS + 127) / 128)\n"
    "#define LANE_EXPERTS ((LOCAL_EXPERTS + 31) / 32)\n"
    "#define TABLE_PART (LANE_EXPERTS * 33)\n"
    "#define TABLE_WORDS (BY_MASKS \? MASKS * (MAX_PAIRS / 32) : TABLE_PARTS * TABLE_PART)\n"
    "\n"
    "/* Rows and distinct experts in one number: a tally, of an expert or of many. */\n"
    "DEVICE u32 rows_of(u32 sum) { return sum & 0xffff; }\n"
    "DEVICE u32 distinct_of(u32 sum) { return sum >> 16; }\n"
    "\n"
    "#if !BY_MASKS\n"
    "DEVICE u32 place(u32 expert) { return expert + expert / 32; }\n"
    "DEVICE u32 add_bytes(u32 word) { return word * 0x01010101u >> 24; }\n"
    "DEVICE u32 tally(u32 count) { return count | (u32)(count != 0) << 16; }\n"
    "\n"
    "/* The pairs of an expert in the table. */\n"
    "template <class Table>\n"
    "DEVICE u32 count_expert(Table &table, u32 expert) {\n"
    "    u32 count = 0;\n"
    "#pragma unroll\n"
    "    for (u32 part = 0; part < TABLE_PARTS; part++) count += add_bytes(table[part * TABLE_PART + place(expert)]);\n"
    "    return count;\n"
    "}\n"
    "#endif\n"
    "\n"
    "DEVICE u32 place_pair(const moer_route_args &a, u32 id, u32 token) {\n"
    "    const u32 local = physical_expert(a.expert_map, id, token) - FIRST_EXPERT;\n",
    "    return local < LOCAL_EXPERTS \? local : NOT_LOCAL;\n"
    "}\n"
    "\n"
    "/* A pair's share in the running totals, which count experts before placement. */\n"
    "DEVICE void add_load(const moer_route_args &a, u32 id) {\n"
    "    if (a.maps.expert_load && id < E) global_atomic_add_64(a.maps.expert_load + id, 1);\n"
    "}\n"
    "\n"
    "/* Whether an output is wanted: those that MAPS 1 has are. */\n"
    "#if MAPS == 1\n"
    "#define WANTED(output) true\n"
    "#else\n"
    "#define WANTED(output) (a.maps.output)\n"
    "#endif\n"
    "\n"
    "/* What is left for the block-aligned maps, in shared memory. */\n"
    "#if MAPS == 2\n"
    "#define LEAVE(statement) statement\n"
    "#else\n"
    "#define LEAVE(statement)\n"
    "#endif\n"
    "\n"
    "/* A pair that has a row. */\n"
    "DEVICE void write_row(const moer_route_args &a, u32 p, u32 row, u32 expert) {\n"
    "    if (WANTED(row_to_pair)) a.maps.row_to_pair[row] = (int)p;\n"
    "    if (WANTED(pair_to_row)) a.maps.pair_to_row[p] = (int)row;\n"
    "    if (WANTED(row_to_expert)) a.maps.row_to_expert[row] = (int)expert;\n"
    "}\n"
    "\n"
    "/* A pair that has none; and the row of a number that none has. */\n"
    "DEVICE void write_no_row(const moer_route_args &a, u32 p) {\n"
    "    if (WANTED(pair_to_row)) a.maps.pair_to_row[p] = -1;\n"
    "}\n"
    "DEVICE void write_empty_row(const moer_route_args &a, u32 row) {\n"
    "    if (WANTED(row_to_pair)) a.maps.row_to_pair[row] = -1;\n"
    "    if (WANTED(row_to_expert)) a.maps.row_to_expert[row] = -1;\n"
    "}\n"
    "\n"
    "/* Leaves a pair's local expert for the map warps. */\n"
    "template <class Table, class Warps, class Pairs>\n"
    "DEVICE void leave_pair(const moer_route_args &a, Table &table, Warps &warp_rows, Warps &warp_experts, Pairs &pair_expert, u32 p,\n"
    "                       u32 expert) {\n"
    "    pair_expert[p] = expert;\n"
    "#if BY_MASKS\n"
    "    if (expert == NOT_LOCAL) {\n"
    "        write_no_row(a, p);\n"
    "        return;\n"
    "    }\n"
    "    shared_atomic_or(table, p / 32 * MASKS + expert, 1u << p % 32);\n"
    "    shared_atomic_or(warp_experts, expert / 32, 1u << expert % 32);\n"
    "    shared_atomic_add(warp_rows, expert / 32, 1);\n"
    "#else\n"
    "    if (expert != NOT_LOCAL) shared_atomic_add(table, p / 128 * TABLE_PART + place(expert), 1u << p % 128 / 32 * 8);\n"
    "#endif\n"
    "}\n"
    "\n"
    "/* Distinct expert d, whose first row is `row`. */\n"
    "DEVICE void write_distinct(const moer_route_args &a, u32 d, u32 expert, u32 row) {\n"
    "    if (WANTED(distinct_experts)) a.maps.distinct_experts[d] = (int)expert;\n"
    "    if (WANTED(distinct_offsets)) a.maps.distinct_offsets[d] = (int)row;\n"
    "}\n"
    "\n"
    "/* What follows the last. */\n"
    "DEVICE void write_end(const moer_route_args &a, u32 num_distinct, u32 num_rows) {\n"
    "    if (WANTED(distinct_offsets)) a.maps.distinct_offsets[num_distinct] = (int)num_rows;\n"
    "    if (WANTED(distinct_count)) a.maps.distinct_count[0] = (int)num_distinct;\n"
    "#if MAPS == 2\n"
    "    if (a.maps.expert_offsets) a.maps.expert_offsets[LOCAL_EXPERTS] = (int)num_rows;\n"
    "#endif\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_route, MAX_THREADS, moer_route_args) {\n"
    "    SHARED(u32, table, TABLE_WORDS);\n"
    "    SHARED(u32, warp_rows, EXPERT_WARPS);    /* of each 32 experts, how many pairs chose them, */\n"
    "    SHARED(u32, warp_experts, EXPERT_WARPS); /* and which were chosen, as bits */\n"
    "    SHARED(u32, pair_expert, MAX_PAIRS);     /* local expert of each pair, or NOT_LOCAL */\n"
    "#if BY_MASKS\n"
    "    SHARED(u32, expert_start, MASKS); /* tally before each expert */\n"
    "#endif\n"
    "    SHARED(u32, words, ROUTING_WARPS * TOKEN_WORDS);\n"
    "#if MAPS == 2\n"
    "    SHARED(u32, pair_place, MAX_PAIRS);     /* where there is a row: tally before the pair's expert, plus the row among those of the expert */\n"
    "    SHARED(u32, first_row, MAX_PAIRS + 1);  /* of each distinct expert, then R */\n"
    "    SHARED(u32, distinct_expert, MAX_PAIRS);\n"
    "    SHARED(u32, aligned_start, MAX_PAIRS + 1);\n"
    "    SHARED(u32, totals, 4);                 /* R and the distinct experts, as a tally */\n"
    "#endif\n"
    "    const u32 thread = thread_index(), lane = lane_index(), warp = warp_index(), warps = block_threads() / 32, below = (1u << lane) - 1;\n"
    "    const u32 num_pairs = a.num_tokens * K, pair_words = (num_pairs + 31) / 32;\n"
    "    /* Warps that route have something to wait for first, if there are others. */\n",
    "    const u32 busy_warps = SELECT && a.num_tokens < warps \? a.num_tokens : 0;\n"
    "    if (warp >= busy_warps) {\n"
    "        const u32 words_used = BY_MASKS \? MASKS * (pair_words \? pair_words : 1) : TABLE_WORDS, step = (warps - busy_warps) * 32;\n"
    "        for (u32 i = thread - busy_warps * 32; i < words_used; i += step) table[i] = 0;\n"
    "        for (u32 i = thread - busy_warps * 32; i < EXPERT_WARPS; i += step) warp_rows[i] = warp_experts[i] = 0;\n"
    "    }\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "\n"
    "#if SELECT\n"
    "    const u32 routing_warps = warps < WARPS_ROUTING \? warps : WARPS_ROUTING;\n"
    "    u32 first_map_warp = 0;\n"
    "    const int num_valid = load_valid_tokens(a.num_valid_tokens, a.num_tokens);\n"
    "#pragma unroll 1\n"
    "    for (u32 first = 0; first == 0 || first < a.num_tokens; first += routing_warps) { /* all warps take as many turns */\n"
    "        const u32 left = a.num_tokens - first, here = left < routing_warps \? left : routing_warps, token = first + warp;\n"
    "        const bool mine = warp < here;\n"
    "        u32 key[EXPERTS_PER_LANE];\n"
    "#if AHEAD\n"
    "        if (first) block_barrier(); /* the words of the tokens before are free */\n"
    "        score_ahead(a, first, here * EXPERTS_PER_LANE, warps, words);\n"
    "        block_barrier(); /* also between the empty table and what comes into it */\n"
    "#else\n"
    "        if (mine) load_keys(a, token, key);\n"
    "        if (LEFT || first == 0) block_barrier(); /* the table is empty, the words of the tokens before are free */\n"
    "#endif\n"
    "        selection chosen = {};\n"
    "        if (mine) {\n"
    "            const bool valid = (int)token < num_valid;\n"
    "            if (valid) chosen = choose_experts<AHEAD>(a, token, key, words, warp * TOKEN_WORDS);\n"
    "#pragma unroll\n"
    "            for (u32 s = 0; s < SLOTS_PER_LANE; s++) {\n"
    "                const u32 slot = valid \? chosen.slot[s] : s * 32 + lane;\n"
    "                if (slot >= K) continue;\n"
    "                const u32 expert = valid \? place_pair(a, chosen.id[s], token) : NOT_LOCAL;\n"
    "                leave_pair(a, table, warp_rows, warp_experts, pair_expert, token * K + slot, expert);\n"
    "            }\n"
    "        }\n"
    "        if (LEFT || first + routing_warps >= a.num_tokens) block_barrier();\n"
    "        if (mine) {\n"
    "#pragma unroll\n"
    "            for (u32 s = 0; s < SLOTS_PER_LANE; s++)\n"
    "                if ((int)token < num_valid && chosen.slot[s] < K) add_load(a, chosen.id[s]);\n"
    "        }\n"
    "        const u32 done = warp * TOKENS_A_WARP;\n"
    "        if (done < here) write_tokens(a, first + done, here - done, num_valid, words, done * TOKEN_WORDS, TOKEN_WORDS, chosen);\n"
    "        first_map_warp = (here + TOKENS_A_WARP - 1) / TOKENS_A_WARP; /* those that have no tokens to write, if there are any */\n"
    "    }\n"
    "    if (first_map_warp == warps) first_map_warp = 0;\n"
    "#else\n"
    "    const u32 first_map_warp = 0, num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);\n"
    "    block_barrier(); /* the table is empty */\n"
    "    for (u32 p = thread; p < num_pairs; p += warps * 32) {\n"
    "        u32 expert = NOT_LOCAL;\n"
    "        if (p < num_valid * K) {\n"
    "            const u32 id = (u32)a.ids[p];\n"
    "            expert = place_pair(a, id, p / K);\n"
    "            add_load(a, id);\n"
    "        }\n"
    "        leave_pair(a, table, warp_rows, warp_experts, pair_expert, p, expert);\n"
    "    }\n"
    "    block_barrier();\n"
    "#endif\n"
    "\n"
    "    if (warp >= first_map_warp) {\n"
    "        const u32 map_warps = warps - first_map_warp, map_warp = warp - first_map_warp;\n"
    "        u32 total = 0;\n"
    "#if BY_MASKS\n"
    "#pragma unroll 1\n"
    "        for (u32 w = map_warp; w < EXPERT_WARPS; w += map_warps) {\n"
    "            const u32 e = w * 32 + lane;\n"
    "            const u32 first_mask = table[e];\n"
    "            u32 count = popcount(first_mask), all = 0, earlier = 0;\n"
    "            for (u32 i = lane; i < EXPERT_WARPS; i += 32) {\n"
    "                const u32 sum = popcount(warp_experts[i]) << 16 | warp_rows[i];\n"
    "                all += sum;\n"
    "                earlier += i < w \? sum : 0;\n"
    "            }\n"
    "#pragma unroll 4\n",
    "            for (u32 i = 1; i < pair_words; i++) count += popcount(table[i * MASKS + e]);\n"
    "            total = warp_add(all);\n"
    "            earlier = warp_add(earlier);\n"
    "            u32 row = scan_warp(count) + rows_of(earlier) - count;\n"
    "            const u32 d = distinct_of(earlier) + popcount(warp_experts[w] & below);\n"
    "#if MAPS == 2\n"
    "            if (a.maps.expert_offsets && e < LOCAL_EXPERTS) a.maps.expert_offsets[e] = (int)row;\n"
    "#endif\n"
    "            if (pair_words > 1) expert_start[e] = d << 16 | row;\n"
    "            if (count) {\n"
    "                write_distinct(a, d, e, row);\n"
    "                LEAVE(first_row[d] = row);\n"
    "                LEAVE(distinct_expert[d] = e);\n"
    "            }\n"
    "            if (pair_words == 1) {\n"
    "#pragma unroll 1\n"
    "                for (u32 left = first_mask; left; left &= left - 1) {\n"
    "                    const u32 p = popcount(~left & (left - 1)); /* the lowest bit */\n"
    "                    write_row(a, p, row, e);\n"
    "                    LEAVE(pair_place[p] = d << 16 | row);\n"
    "                    row++;\n"
    "                }\n"
    "            }\n"
    "        }\n"
    "#else\n"
    "        const u32 first = lane * LANE_EXPERTS;\n"
    "        u32 own = 0;\n"
    "#pragma unroll 8\n"
    "        for (u32 i = 0; i < LANE_EXPERTS; i++) own += tally(count_expert(table, first + i));\n"
    "        u32 sum = scan_warp(own);\n"
    "        total = warp_shuffle(sum, 31);\n"
    "        sum -= own; /* before the lane's experts */\n"
    "\n"
    "#pragma unroll 1\n"
    "        for (u32 group = map_warp; group < pair_words; group += map_warps) {\n"
    "            const u32 p = group * 32 + lane, expert = p < num_pairs \? pair_expert[p] : NOT_LOCAL;\n"
    "            const bool local = expert != NOT_LOCAL;\n"
    "            const u32 e = local \? expert : 0, owner = e / LANE_EXPERTS;\n"
    "            u32 start = warp_shuffle(sum, owner), earlier = popcount(warp_match(expert) & below);\n"
    "#pragma unroll 8\n"
    "            for (u32 i = 0; i + 1 < LANE_EXPERTS; i++) {\n"
    "                const u32 other = owner * LANE_EXPERTS + i;\n"
    "                if (other < e) start += tally(count_expert(table, other));\n"
    "            }\n"
    "#pragma unroll\n"
    "            for (u32 part = 0; part < TABLE_PARTS; part++) {\n"
    "                const u32 word = table[part * TABLE_PART + place(e)];\n"
    "                if (part < group / 4) earlier += add_bytes(word);\n"
    "                if (part == group / 4) earlier += add_bytes(word & ((1u << group % 4 * 8) - 1));\n"
    "            }\n"
    "            if (local) {\n"
    "                write_row(a, p, rows_of(start) + earlier, e);\n"
    "                LEAVE(pair_place[p] = start + earlier);\n"
    "            } else if (p < num_pairs) {\n"
    "                write_no_row(a, p);\n"
    "            }\n"
    "        }\n"
    "\n"
    "        u32 turn = 0; /* of the map warps, which take the experts of a lane in turns */\n"
    "#pragma unroll 8\n"
    "        for (u32 i = 0; i < LANE_EXPERTS; i++) {\n"
    "            const u32 count = count_expert(table, first + i);\n"
    "            if (turn == map_warp) {\n"
    "#if MAPS == 2\n"
    "                if (a.maps.expert_offsets && first + i < LOCAL_EXPERTS) a.maps.expert_offsets[first + i] = (int)rows_of(sum);\n"
    "#endif\n"
    "                if (count) {\n"
    "                    write_distinct(a, distinct_of(sum), first + i, rows_of(sum));\n"
    "                    LEAVE(first_row[distinct_of(sum)] = rows_of(sum));\n"
    "                    LEAVE(distinct_expert[distinct_of(sum)] = first + i);\n"
    "                }\n"
    "            }\n"
    "            turn = turn + 1 == map_warps \? 0 : turn + 1;\n"
    "            sum += tally(count);\n"
    "        }\n"
    "#endif\n"
    "        if (map_warp == 0) { /* rows that no pair has, and what follows the last */\n"
    "            for (u32 r = rows_of(total) + lane; r < num_pairs; r += 32) write_empty_row(a, r);\n"
    "            if (lane == 0) {\n"
    "                write_end(a, distinct_of(total), rows_of(total));\n"
    "                LEAVE(first_row[distinct_of(total)] = rows_of(total));\n"
    "                LEAVE(totals[0] = total);\n"
    "            }\n"
    "        }\n"
    "    }\n"
    "\n"
    "#if BY_MASKS\n"
    "    if (pair_words > 1) { /* a thread a pair */\n"
    "        block_barrier();\n",
    "        for (u32 p = thread; p < num_pairs; p += warps * 32) {\n"
    "            const u32 e = pair_expert[p], word = p / 32;\n"
    "            if (e == NOT_LOCAL) continue;\n"
    "            u32 place = expert_start[e] + popcount(table[word * MASKS + e] & below);\n"
    "#pragma unroll 4\n"
    "            for (u32 i = 0; i < word; i++) place += popcount(table[i * MASKS + e]);\n"
    "            write_row(a, p, rows_of(place), e);\n"
    "            LEAVE(pair_place[p] = place);\n"
    "        }\n"
    "    }\n"
    "#endif\n"
    "\n"
    "#if MAPS == 2\n"
    "    if (a.maps.block_size) {\n"
    "        const u32 block = a.maps.block_size;\n"
    "        if (a.maps.aligned_row_to_pair)\n"
    "            for (u32 i = thread; i < a.maps.aligned_capacity; i += warps * 32) a.maps.aligned_row_to_pair[i] = (int)num_pairs;\n"
    "        block_barrier();\n"
    "        const u32 num_distinct = distinct_of(totals[0]);\n"
    "        if (warp == 0) { /* one scan, 32 distinct experts at a time */\n"
    "            u32 start = 0;\n"
    "#pragma unroll 1\n"
    "            for (u32 d = lane; d < (num_distinct + 32) / 32 * 32; d += 32) {\n"
    "                const u32 own = d < num_distinct \? (first_row[d + 1] - first_row[d] + block - 1) / block * block : 0;\n"
    "                u32 sum = own;\n"
    "#pragma unroll\n"
    "                for (u32 delta = 1; delta < 32; delta *= 2) {\n"
    "                    const u32 other = warp_shuffle_up(sum, delta);\n"
    "                    if (lane >= delta) sum += other;\n"
    "                }\n"
    "                if (d <= num_distinct) aligned_start[d] = start + sum - own;\n"
    "                start += warp_shuffle(sum, 31);\n"
    "            }\n"
    "        }\n"
    "        block_barrier();\n"
    "        const u32 aligned_rows = aligned_start[num_distinct];\n"
    "        if (thread == 0 && a.maps.aligned_rows) a.maps.aligned_rows[0] = (int)aligned_rows;\n"
    "        if (a.maps.aligned_row_to_pair)\n"
    "            for (u32 p = thread; p < num_pairs; p += warps * 32)\n"
    "                if (pair_expert[p] != NOT_LOCAL) {\n"
    "                    const u32 d = distinct_of(pair_place[p]);\n"
    "                    a.maps.aligned_row_to_pair[aligned_start[d] + rows_of(pair_place[p]) - first_row[d]] = (int)p;\n"
    "                }\n"
    "        if (a.maps.block_to_expert)\n"
    "            for (u32 i = thread; i < a.maps.aligned_capacity / block; i += warps * 32) {\n"
    "                int expert = -1;\n"
    "                if (i * block < aligned_rows) { /* last distinct expert that starts at or before the block */\n"
    "                    u32 low = 0, high = num_distinct;\n"
    "                    while (high - low > 1) {\n"
    "                        const u32 middle = (low + high) / 2;\n"
    "                        if (aligned_start[middle] <= i * block) low = middle;\n"
    "                        else high = middle;\n"
    "                    }\n"
    "                    expert = (int)distinct_expert[low];\n"
    "                }\n"
    "                a.maps.block_to_expert[i] = expert;\n"
    "            }\n"
    "    }\n"
    "#endif\n"
    "}\n",
    NULL};
static const char *const moer_source_27[] = { /* topk.cu */
    "/*\n"
    "  topk.cu: the router alone, for any number of tokens: logits [T, E + S] -> ids [T, k], weights [T, k] and [T, S]. A warp\n"
    "  chooses the experts of a token, eight a block; then as few warps as have lanes for all slots weigh them. Constants: those of select.h.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"scores.h\"\n"
    "#include \"select.h\"\n"
    "\n"
    "#define WARPS 8\n"
    "\n"
    "KERNEL(moe_route_topk, WARPS * 32, moer_route_args) {\n"
    "    SHARED(u32, words, WARPS * SELECT_WORDS);\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 warp = warp_index(), first = block_index_x() * WARPS, token = first + warp;\n"
    "    const u32 here = a.num_tokens - first < WARPS \? a.num_tokens - first : WARPS; /* tokens of the block */\n"
    "    u32 key[EXPERTS_PER_LANE];\n"
    "    const int num_valid = load_valid_tokens(a.num_valid_tokens, a.num_tokens);\n"
    "    selection chosen = {};\n"
    "    if (warp < here) {\n"
    "        load_keys(a, token, key);\n"
    "        if ((int)token < num_valid) chosen = choose_experts<false>(a, token, key, words, warp * SELECT_WORDS);\n"
    "    }\n"
    "#if LEFT\n"
    "    block_barrier();\n"
    "#endif\n"
    "    const u32 done = warp * TOKENS_A_WARP;\n"
    "    if (done < here) write_tokens(a, first + done, here - done, num_valid, words, done * SELECT_WORDS, SELECT_WORDS, chosen);\n"
    "}\n",
    NULL};
static const char *const moer_source_28[] = { /* maps.cu */
    "/*\n"
    "  maps.cu: the expert maps of any number of pairs: a stable counting sort by expert, in one launch of several blocks or in two.\n"
    "\n"
    "  moe_route_maps_sort     up to 8192 pairs: every block counts all of them, those before its own share and the others\n"
    "  moe_route_maps_count    more: a block counts the experts of its share of consecutive pairs\n"
    "  moe_route_maps_scatter  and then every block adds up the counts of all shares\n"
    "\n"
    "  So a block knows where its own pairs of each expert begin, without a word from the others. It ranks them tile by tile: a pair is a bit\n"
    "  in its expert's words of shared memory, and its rank the number of bits before it. No pass over the pairs waits for another, and the\n"
    "  result is the same each time: atomic are only counts, and bits of which each is set once. What has an entry per expert is written by\n"
    "  the first block, and what the aligned form has beside the rows by all, which is why there are 16 of them or more. Small batches\n"
    "  don't come here: route.cu sorts them in the router's launch.\n"
    "\n"
    "  Shared memory is cleared, and the scatter kernel's first ids are read, before the kernel before this one has ended.\n"
    "\n"
    "  Constants: E, K (slots a token), FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h. Pairs whose expert isn't local have no row.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"placement.h\"\n"
    "\n"
    "#define SORT_THREADS 512\n"
    "#include \"sort.h\"\n"
    "\n"
    "/* Pairs that one launch sorts at most. */\n"
    "#define SORT_PAIRS 8192u\n"
    "/* Warps with a pair each lane: as many as 48 KB have room for a word each of every expert, beside three words an expert. */\n"
    "#define TILE_WARPS (LOCAL_EXPERTS <= 512 \? 16 : LOCAL_EXPERTS <= 1024 \? 8 : LOCAL_EXPERTS <= 1536 \? 4 : 2)\n"
    "#define TILE (TILE_WARPS * 32)\n"
    "/* Experts that a thread adds up, consecutive ones, and the warps for that. */\n"
    "#define THREAD_EXPERTS ((LOCAL_EXPERTS + 255) / 256)\n"
    "#define SCAN_WARPS ((LOCAL_EXPERTS + 32 * THREAD_EXPERTS - 1) / (32 * THREAD_EXPERTS))\n"
    "\n"
    "/* Pairs of a block. */\n"
    "DEVICE u32 share_size(const moer_maps_args &a) { return ((a.num_pairs + a.num_blocks - 1) / a.num_blocks + 31) / 32 * 32; }\n"
    "\n"
    "/* The end of a block's pairs. */\n"
    "DEVICE u32 share_end(const moer_maps_args &a, u32 begin) { return begin + share_size(a) < a.num_pairs \? begin + share_size(a) : a.num_pairs; }\n"
    "\n"
    "/* Whether the thread has this pair, of a tile that starts at `begin` in a share with this end. */\n"
    "DEVICE bool is_inside(u32 pair, u32 begin, u32 end) { return pair < end && pair - begin < TILE; }\n"
    "\n"
    "/* Sums over the threads before this one; all threads of SCAN_WARPS warps have some, and a barrier is passed by all threads. */\n"
    "template <class Words>\n"
    "DEVICE sums scan_block(Words &warp_sums, const sums &own, sums &total) {\n"
    "    const u32 lane = lane_index(), warp = warp_index();\n"
    "    sums s = own;\n"
    "    if (warp < SCAN_WARPS) {\n"
    "#pragma unroll\n"
    "        for (u32 delta = 1; delta < 32; delta *= 2) {\n"
    "            const u32 rows = warp_shuffle_up(s.rows, delta), distinct = warp_shuffle_up(s.distinct, delta), aligned = warp_shuffle_up(s.aligned, delta);\n"
    "            if (lane < delta) continue;\n"
    "            s.rows += rows;\n"
    "            s.distinct += distinct;\n"
    "            s.aligned += aligned;\n"
    "        }\n"
    "        if (lane == 31) {\n"
    "            const u32x4 words = {{s.rows, s.distinct, s.aligned, 0}};\n"
    "            shared_store_4(warp_sums, warp * 4, words);\n"
    "        }\n"
    "    }\n"
    "    block_barrier();\n"
    "    s.rows -= own.rows;\n"
    "    s.distinct -= own.distinct;\n"
    "    s.aligned -= own.aligned;\n"
    "    total.rows = total.distinct = total.aligned = 0;\n"
    "    if (warp >= SCAN_WARPS) return s;\n"
    "#pragma unroll\n"
    "    for (u32 w = 0; w < SCAN_WARPS; w++) {\n"
    "        const auto words = shared_load_4(warp_sums, w * 4);\n"
    "        if (w < warp) {\n"
    "            s.rows += (u32)words.x;\n"
    "            s.distinct += (u32)words.y;\n"
    "            s.aligned += (u32)words.z;\n"
    "        }\n"
    "        total.rows += (u32)words.x;\n"
    "        total.distinct += (u32)words.y;\n",
    "        total.aligned += (u32)words.z;\n"
    "    }\n"
    "    return s;\n"
    "}\n"
    "\n"
    "/* Sets the pair's bit. */\n"
    "template <class Marks>\n"
    "DEVICE void mark(Marks &marks, u32 expert) {\n"
    "    if (expert != NOT_LOCAL) shared_atomic_add(marks, warp_index() * LOCAL_EXPERTS + expert, 1u << lane_index());\n"
    "}\n"
    "\n"
    "/* From the counts of each expert in the pairs before the block's share, `next`, and in the others, `starts`, and with the first tile\n"
    "   marked, all maps. `id` is that of the thread's pair of it. */\n"
    "template <class Starts, class Aligned, class Next, class Marks, class Words>\n"
    "DEVICE void sort_share(const moer_maps_args &a, u32 begin, u32 end, u32 num_valid, u32 id, u32 expert, bool adds_load, Starts &starts, Aligned &aligned, Next &next, Marks &marks, Words &warp_sums) {\n"
    "    const u32 thread = thread_index(), lane = lane_index(), warp = warp_index(), first = thread * THREAD_EXPERTS;\n"
    "    u32 count[THREAD_EXPERTS], before[THREAD_EXPERTS];\n"
    "    sums own = {0, 0, 0}, total;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < THREAD_EXPERTS; i++) {\n"
    "        count[i] = before[i] = 0;\n"
    "        if (first + i >= LOCAL_EXPERTS) continue;\n"
    "        before[i] = next[first + i];\n"
    "        count[i] = starts[first + i] + before[i];\n"
    "        own.rows += count[i];\n"
    "        own.distinct += count[i] != 0;\n"
    "        own.aligned += align_rows(a, count[i]);\n"
    "    }\n"
    "    sums at = scan_block(warp_sums, own, total);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < THREAD_EXPERTS; i++) {\n"
    "        if (first + i >= LOCAL_EXPERTS) break;\n"
    "        next[first + i] = at.rows + before[i];\n"
    "        place_expert(a, starts, aligned, first + i, count[i], at);\n"
    "    }\n"
    "    if (thread == 0) place_end(a, starts, aligned, total);\n"
    "    block_barrier();\n"
    "\n"
    "    const u32 num_rows = starts[LOCAL_EXPERTS];\n"
    "    for (;;) {\n"
    "        const u32 pair = begin + thread, next_pair = pair + TILE;\n"
    "        const bool inside = is_inside(pair, begin, end);\n"
    "        const u32 next_id = is_inside(next_pair, begin + TILE, end) \? load_4(a.ids + next_pair) : NOT_LOCAL;\n"
    "        if (expert != NOT_LOCAL) {\n"
    "            u32 row = next[expert] + popcount(marks[warp * LOCAL_EXPERTS + expert] & ((1u << lane) - 1));\n"
    "#pragma unroll 4\n"
    "            for (u32 w = 0; w < warp; w++) row += popcount(marks[w * LOCAL_EXPERTS + expert]);\n"
    "            if (a.maps.row_to_pair) a.maps.row_to_pair[row] = (int)pair;\n"
    "            if (a.maps.row_to_expert) a.maps.row_to_expert[row] = (int)expert;\n"
    "            if (a.maps.pair_to_row) a.maps.pair_to_row[pair] = (int)row;\n"
    "            if (a.maps.aligned_row_to_pair) a.maps.aligned_row_to_pair[aligned[expert] + (row - starts[expert])] = (int)pair;\n"
    "        } else if (inside && a.maps.pair_to_row) {\n"
    "            a.maps.pair_to_row[pair] = -1;\n"
    "        }\n"
    "        if (inside && pair >= num_rows) { /* the row of this number doesn't exist */\n"
    "            if (a.maps.row_to_pair) a.maps.row_to_pair[pair] = -1;\n"
    "            if (a.maps.row_to_expert) a.maps.row_to_expert[pair] = -1;\n"
    "        }\n"
    "        if (inside && adds_load) add_load(a, id, pair, num_valid);\n"
    "        begin += TILE;\n"
    "        if (begin >= end) break;\n"
    "        id = next_id;\n"
    "        expert = local_expert(a, id, next_pair, num_valid);\n"
    "        block_barrier();\n"
    "        for (u32 e = thread; e < LOCAL_EXPERTS; e += SORT_THREADS) {\n"
    "            u32 pairs = 0;\n"
    "#pragma unroll\n"
    "            for (u32 w = 0; w < TILE_WARPS; w++) {\n"
    "                pairs += popcount(marks[w * LOCAL_EXPERTS + e]);\n"
    "                marks[w * LOCAL_EXPERTS + e] = 0;\n"
    "            }\n"
    "            next[e] += pairs;\n"
    "        }\n"
    "        block_barrier();\n"
    "        mark(marks, expert);\n"
    "        block_barrier();\n"
    "    }\n"
    "    if (a.maps.block_size) finish_aligned(a, starts, aligned);\n"
    "}\n"
    "\n"
    "template <class Starts, class Next, class Marks>\n"
    "DEVICE void clear(Starts &starts, Next &next, Marks &marks) {\n"
    "    for (u32 e = thread_index(); e <= LOCAL_EXPERTS; e += SORT_THREADS) {\n"
    "        starts[e] = 0;\n"
    "        next[e] = 0;\n"
    "    }\n",
    "    for (u32 i = thread_index(); i < TILE_WARPS * LOCAL_EXPERTS; i += SORT_THREADS) marks[i] = 0;\n"
    "}\n"
    "\n"
    "/* Counts all pairs, PAIRS a thread: those before `begin`, and the others. */\n"
    "template <u32 PAIRS, class Before, class Others>\n"
    "DEVICE void count_all(const moer_maps_args &a, u32 begin, u32 num_valid, Before &before, Others &others) {\n"
    "    u32 id[PAIRS];\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PAIRS; i++) id[i] = i * SORT_THREADS + thread_index() < a.num_pairs \? load_4(a.ids + i * SORT_THREADS + thread_index()) : NOT_LOCAL;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PAIRS; i++) {\n"
    "        const u32 pair = i * SORT_THREADS + thread_index(), expert = local_expert(a, id[i], pair, num_valid);\n"
    "        if (expert == NOT_LOCAL) continue;\n"
    "        if (pair < begin) shared_atomic_add(before, expert, 1);\n"
    "        else shared_atomic_add(others, expert, 1);\n"
    "    }\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_maps_sort, SORT_THREADS, moer_maps_args) {\n"
    "    SHARED(u32, starts, LOCAL_EXPERTS + 1);  /* first row of each expert */\n"
    "    SHARED(u32, aligned, LOCAL_EXPERTS + 1); /* likewise among the aligned rows */\n"
    "    SHARED(u32, next, LOCAL_EXPERTS + 1);    /* row of the tile's first pair of each expert */\n"
    "    SHARED(u32, marks, TILE_WARPS * LOCAL_EXPERTS);\n"
    "    SHARED(u32, warp_sums, SCAN_WARPS * 4);\n"
    "    clear(starts, next, marks);\n"
    "    block_barrier();\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 begin = block_index_x() * share_size(a), end = share_end(a, begin), pair = begin + thread_index();\n"
    "    const u32 id = is_inside(pair, begin, end) \? load_4(a.ids + pair) : NOT_LOCAL, num_valid = valid_pairs(a);\n"
    "    if (a.num_pairs <= SORT_PAIRS / 4) count_all<SORT_PAIRS / 4 / SORT_THREADS>(a, begin, num_valid, next, starts);\n"
    "    else count_all<SORT_PAIRS / SORT_THREADS>(a, begin, num_valid, next, starts);\n"
    "    const u32 expert = local_expert(a, id, pair, num_valid);\n"
    "    mark(marks, expert);\n"
    "    block_barrier();\n"
    "    sort_share(a, begin, end, num_valid, id, expert, true, starts, aligned, next, marks, warp_sums);\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_maps_count, SORT_THREADS, moer_maps_args) {\n"
    "    SHARED(u32, counts, COUNT_VECTORS * 8);\n"
    "    const u32 begin = block_index_x() * share_size(a);\n"
    "    count_share(a, counts, begin, share_end(a, begin));\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_maps_scatter, SORT_THREADS, moer_maps_args) {\n"
    "    SHARED(u32, starts, LOCAL_EXPERTS + 1);\n"
    "    SHARED(u32, aligned, LOCAL_EXPERTS + 1);\n"
    "    SHARED(u32, next, LOCAL_EXPERTS + 1);\n"
    "    SHARED(u32, marks, TILE_WARPS * LOCAL_EXPERTS);\n"
    "    SHARED(u32, warp_sums, SCAN_WARPS * 4);\n"
    "    clear(starts, next, marks);\n"
    "    block_barrier();\n"
    "    const u32 begin = block_index_x() * share_size(a), end = share_end(a, begin), pair = begin + thread_index();\n"
    "    const u32 id = is_inside(pair, begin, end) \? load_fresh_4(a.ids + pair) : NOT_LOCAL; /* of a kernel before the count */\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 num_valid = valid_pairs(a);\n"
    "    add_counts(a, next, starts);\n"
    "    const u32 expert = local_expert(a, id, pair, num_valid);\n"
    "    mark(marks, expert);\n"
    "    block_barrier();\n"
    "    sort_share(a, begin, end, num_valid, id, expert, false, starts, aligned, next, marks, warp_sums);\n"
    "}\n",
    NULL};
static const char *const moer_source_29[] = { /* maps_cub.cu */
    "/*\n"
    "  maps_cub.cu: the expert maps of more than 8192 pairs, as maps.cu makes them, ranked by CUB's block primitives. The one kernel family that\n"
    "  needs headers of others.\n"
    "\n"
    "  moe_route_maps_cub_count    a block counts the experts of its share of consecutive pairs\n"
    "  moe_route_maps_cub_scatter  every block adds up the counts of all shares, as in maps.cu, then sorts its share tile by tile\n"
    "\n"
    "  A tile is ranked by BlockRadixRankMatch with the local expert as the digit, and one more for pairs without a row. It is brought into\n"
    "  the order of rows in shared memory first: neighbours of a row are written by neighbouring threads, where scattered words would cost\n"
    "  a store each.\n"
    "\n"
    "  Constants: E, K (slots a token), FIRST_EXPERT, LOCAL_EXPERTS, those of placement.h, and SORT_THREADS, a power of two up to 1024: shared\n"
    "  memory has to have a counter for each digit and warp (layer.c chooses).\n"
    "*/\n"
    "enum : unsigned int { NUM_EXPERTS = E, SLOTS = K };\n"
    "#undef E /* names of template parameters there */\n"
    "#undef K\n"
    "#include <cub/block/block_radix_rank.cuh>\n"
    "#include <cub/block/block_scan.cuh>\n"
    "#define E NUM_EXPERTS\n"
    "#define K SLOTS\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"placement.h\"\n"
    "#include \"sort.h\"\n"
    "\n"
    "#define TILE 1024u /* pairs that are sorted at a time */\n"
    "#define PAIRS (TILE / SORT_THREADS)\n"
    "\n"
    "DEVICE constexpr int digit_bits() {\n"
    "    int bits = 1;\n"
    "    while ((1u << bits) <= LOCAL_EXPERTS) bits++;\n"
    "    return bits;\n"
    "}\n"
    "\n"
    "typedef cub::BlockRadixRankMatch<SORT_THREADS, digit_bits(), false, cub::BLOCK_SCAN_WARP_SCANS> tile_rank;\n"
    "typedef cub::BlockScan<sums, SORT_THREADS, cub::BLOCK_SCAN_WARP_SCANS> expert_scan;\n"
    "/* Digits of a thread, consecutive ones. */\n"
    "#define BINS tile_rank::BINS_TRACKED_PER_THREAD\n"
    "\n"
    "DEVICE constexpr u32 larger(u32 a, u32 b) { return a > b \? a : b; }\n"
    "\n"
    "struct expert_digit {\n"
    "    DEVICE u32 Digit(u32 expert) { return expert; }\n"
    "};\n"
    "\n"
    "DEVICE sums operator+(const sums &a, const sums &b) { return {a.rows + b.rows, a.distinct + b.distinct, a.aligned + b.aligned}; }\n"
    "\n"
    "/* A thread's pairs lie 32 apart, a warp's together: the order in which tile_rank ranks equal digits. */\n"
    "DEVICE u32 place_in_tile(u32 i) { return (warp_index() * PAIRS + i) * 32 + lane_index(); }\n"
    "\n"
    "/* A thread's part of a ranked tile. */\n"
    "struct ranked {\n"
    "    u32 expert[PAIRS]; /* LOCAL_EXPERTS where the pair has no row */\n"
    "    int rank[PAIRS];\n"
    "    int count[BINS], start[BINS]; /* of its digits: pairs, and the first rank */\n"
    "};\n"
    "\n"
    "template <class Words>\n"
    "DEVICE void rank_tile(const moer_maps_args &a, u32 begin, u32 num_valid, Words &words, ranked &r) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PAIRS; i++) {\n"
    "        const u32 pair = begin + place_in_tile(i);\n"
    "        r.expert[i] = pair < a.num_pairs \? load_4(a.ids + pair) : NOT_LOCAL;\n"
    "    }\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PAIRS; i++) {\n"
    "        const u32 local = local_expert(a, r.expert[i], begin + place_in_tile(i), num_valid);\n"
    "        r.expert[i] = local != NOT_LOCAL \? local : LOCAL_EXPERTS;\n"
    "    }\n"
    "    tile_rank(SHARED_AS(tile_rank::TempStorage, words)).RankKeys(r.expert, r.rank, expert_digit(), r.start, [&](int (&counts)[BINS]) {\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < BINS; i++) r.count[i] = counts[i];\n"
    "    });\n"
    "}\n"
    "\n"
    "/* The rows of a ranked tile, whose row of rank 0 would be offsets[expert], and which has offsets[LOCAL_EXPERTS] of them; `words` is free\n"
    "   again after a barrier. */\n"
    "template <class Words, class Starts, class Aligned, class Offsets>\n"
    "DEVICE void write_tile(const moer_maps_args &a, u32 begin, u32 all_rows, const ranked &r, Words &words, Starts &starts, Aligned &aligned, Offsets &offsets) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < PAIRS; i++) {\n"
    "        const u32 expert = r.expert[i], place = place_in_tile(i);\n"
    "        const u32 pair = begin + place;\n"
    "        words[r.rank[i]] = expert << 16 | place;\n"
    "        if (pair >= a.num_pairs) continue;\n",
    "        if (a.maps.pair_to_row) a.maps.pair_to_row[pair] = expert != LOCAL_EXPERTS \? r.rank[i] + (int)offsets[expert] : -1;\n"
    "        if (pair >= all_rows) { /* the row of this number doesn't exist */\n"
    "            if (a.maps.row_to_pair) a.maps.row_to_pair[pair] = -1;\n"
    "            if (a.maps.row_to_expert) a.maps.row_to_expert[pair] = -1;\n"
    "        }\n"
    "    }\n"
    "    block_barrier();\n"
    "    const u32 tile_rows = offsets[LOCAL_EXPERTS];\n"
    "    for (u32 rank = thread_index(); rank < tile_rows; rank += SORT_THREADS) {\n"
    "        const u32 word = words[rank], expert = word >> 16, row = rank + offsets[expert];\n"
    "        const int pair = (int)(begin + (word & 0xffffu));\n"
    "        if (a.maps.row_to_pair) a.maps.row_to_pair[row] = pair;\n"
    "        if (a.maps.row_to_expert) a.maps.row_to_expert[row] = (int)expert;\n"
    "        if (a.maps.aligned_row_to_pair) a.maps.aligned_row_to_pair[aligned[expert] + (row - starts[expert])] = pair;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Places all experts, of which a thread has the counts of its digits. Returns the sums over all; ends with a barrier. */\n"
    "template <class Starts, class Aligned, class Words>\n"
    "DEVICE sums place_experts(const moer_maps_args &a, const int (&count)[BINS], Starts &starts, Aligned &aligned, Words &scan_words) {\n"
    "    const u32 first = thread_index() * BINS;\n"
    "    sums own = {0, 0, 0}, at, total;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < BINS; i++)\n"
    "        if (first + i < LOCAL_EXPERTS) own = own + sums{(u32)count[i], count[i] != 0, align_rows(a, (u32)count[i])};\n"
    "    expert_scan(SHARED_AS(expert_scan::TempStorage, scan_words)).ExclusiveSum(own, at, total);\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < BINS; i++)\n"
    "        if (first + i < LOCAL_EXPERTS) place_expert(a, starts, aligned, first + i, (u32)count[i], at);\n"
    "    if (thread_index() == 0) place_end(a, starts, aligned, total);\n"
    "    block_barrier();\n"
    "    return total;\n"
    "}\n"
    "\n"
    "/* Pairs of a share, whole tiles. */\n"
    "DEVICE u32 share_size(const moer_maps_args &a) { return ((a.num_pairs + a.num_blocks - 1) / a.num_blocks + TILE - 1) / TILE * TILE; }\n"
    "\n"
    "KERNEL(moe_route_maps_cub_count, SORT_THREADS, moer_maps_args) {\n"
    "    SHARED(u32, counts, COUNT_VECTORS * 8);\n"
    "    const u32 begin = block_index_x() * share_size(a), end = begin + share_size(a);\n"
    "    count_share(a, counts, begin, end < a.num_pairs \? end : a.num_pairs);\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_maps_cub_scatter, SORT_THREADS, moer_maps_args) {\n"
    "    SHARED(u32, starts, LOCAL_EXPERTS + 1);\n"
    "    SHARED(u32, aligned, LOCAL_EXPERTS + 1);\n"
    "    SHARED(u32, offsets, LOCAL_EXPERTS + 1); /* of the tile: from rank to row; at the end its number of rows */\n"
    "    SHARED(u32, words, larger(SHARED_WORDS(tile_rank::TempStorage), TILE));\n"
    "    SHARED(u32, scan_words, SHARED_WORDS(expert_scan::TempStorage));\n"
    "    const u32 share = share_size(a), begin = block_index_x() * share, first = thread_index() * BINS;\n"
    "    for (u32 e = thread_index(); e <= LOCAL_EXPERTS; e += SORT_THREADS) {\n"
    "        starts[e] = 0;\n"
    "        offsets[e] = 0;\n"
    "    }\n"
    "    block_barrier();\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 num_valid = valid_pairs(a);\n"
    "    add_counts(a, offsets, starts);\n"
    "    block_barrier();\n"
    "    int count[BINS];  /* all pairs of the thread's experts */\n"
    "    u32 before[BINS]; /* and those of the shares before this one */\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < BINS; i++) {\n"
    "        before[i] = first + i < LOCAL_EXPERTS \? (u32)offsets[first + i] : 0;\n"
    "        count[i] = first + i < LOCAL_EXPERTS \? (int)(starts[first + i] + before[i]) : 0;\n"
    "    }\n"
    "    const sums total = place_experts(a, count, starts, aligned, scan_words);\n"
    "    for (u32 done = 0; done < share && begin + done < a.num_pairs; done += TILE) {\n"
    "        ranked r;\n"
    "        rank_tile(a, begin + done, num_valid, words, r);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < BINS; i++) {\n"
    "            const u32 e = first + i;\n"
    "            if (e < LOCAL_EXPERTS) offsets[e] = starts[e] + before[i] - (u32)r.start[i];\n",
    "            if (e == LOCAL_EXPERTS) offsets[e] = (u32)r.start[i];\n"
    "            before[i] += (u32)r.count[i];\n"
    "        }\n"
    "        block_barrier();\n"
    "        write_tile(a, begin + done, total.rows, r, words, starts, aligned, offsets);\n"
    "        block_barrier();\n"
    "    }\n"
    "    if (a.maps.block_size) finish_aligned(a, starts, aligned);\n"
    "}\n",
    NULL};
static const char *const moer_source_30[] = { /* matmul.cu */
    "/*\n"
    "  matmul.cu: one expert weight matrix times the rows that chose the expert: gate_up with its activation, and the plain\n"
    "  product. A tile is 16 weight rows of one distinct expert: the warps split K, meet in shared memory, and go through the\n"
    "  expert's rows 8 * ROW_BLOCKS at a time. Each distinct expert's weights are read from memory once (and from L2 for each\n"
    "  further 8 * ROW_BLOCKS rows).\n"
    "\n"
    "  h[r] = act(gate[e] @ x + gate_bias[e]) * (up[e] @ x + up_bias[e])   GATED 1: 16 weight rows are 8 of gate, 8 of up; out [R, N / 2]\n"
    "  h[r] = act(W[e] @ x + bias[e])                                      GATED 0: they are 16 rows; out [R, N]\n"
    "  out[r] = W[e] @ x + bias[e]                                         the same with ACTIVATION 0\n"
    "\n"
    "  A block takes a range of the tiles of all distinct experts and rows, in order. So most of its tiles have the same rows of x as the\n"
    "  tile before, which a warp keeps in registers where its part of them fits; and memory is never idle, since the stream of\n"
    "  weights (stream.h) goes on from tile to tile. No warp waits for another, save the one that adds up a tile: they take turns.\n"
    "  What the next kernel will read of its own weights is brought into L2 at the end.\n"
    "\n"
    "  Constants: those of tile.h; GATED; INTERLEAVED, order of gate and up; UP_APART, 1: up is a matrix of its own, with N = I; ACTIVATION, moe_route_activation + 1, and CLAMP, as in\n"
    "  activations.h; WEIGHT_ON_INPUT: the router's weight, of dtype WEIGHTS, multiplies x; BIAS (dtype, 0: none); OUT (dtype);\n"
    "  K, slots a token; X_INDEX: x is indexed by token (0), by token or pair as the arguments say (1), or by row (2);\n"
    "  OUT_ORDER: the order of a row of out, X_ORDER of its reader; OUT_INDEX: out is indexed by row (0), by pair, pairs without a row being\n"
    "  set to 0 (1), or by pair_to_slot_row (2); WARPS, a block's, up to 32; RESIDENT_BLOCKS, how many share a multiprocessor;\n"
    "  ROW_BLOCKS; SHARED_BYTES. Grid: any number of blocks.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"scores.h\"\n"
    "#include \"activations.h\"\n"
    "#include \"tile.h\"\n"
    "#define STREAM_COPIES (CAN_COPY(WARPS) && ROW_BLOCKS == 1)\n"
    "#include \"stream.h\"\n"
    "\n"
    "#define TILE_TOKENS (8 * ROW_BLOCKS)\n"
    "#include \"passes.h\"\n"
    "#define UP_ROWS 8\n"
    "#include \"parts.h\"\n"
    "\n"
    "constexpr int X_HOW = ROW_BLOCKS > 1 \? X_LATE : can_hold(WARPS) \? X_HELD : X_LOADED;\n"
    "\n"
    "/* The warps' sums of a tile, for the warps that finish it. Those of a group do, and the groups take turns; a warp that isn't of the group leaves its\n"
    "   sums and goes on. With a slot more than there are groups, whoever writes to one again has waited for a tile since, as its turn comes once in so many:\n"
    "   by then the slot's finishers had come to that tile, and were done. The more groups, the less do warps wait, as far as there's memory and work for each. */\n"
    "constexpr u32 STREAM_WORDS = stream_memory(X_HOW, WARPS);\n"
    "constexpr u32 ROOM = (SHARED_BYTES / 4 - WARPS * STREAM_WORDS) / PARTS_SIZE; /* slots */\n"
    "constexpr u32 USEFUL_FINISHERS = (TILE_COLUMNS * TILE_TOKENS + 31) / 32, TURNS_WANTED = WARPS > USEFUL_FINISHERS \? WARPS / USEFUL_FINISHERS : 1;\n"
    "static_assert(SHARED_BYTES / 4 >= WARPS * STREAM_WORDS + 2 * PARTS_SIZE, \"room for the streams, and two slots\");\n"
    "DEVICE constexpr u32 least_of(u32 a, u32 b, u32 c) { return a < b \? a < c \? a : c : b < c \? b : c; }\n"
    "constexpr u32 FINISHERS = (WARPS + least_of(ROOM - 1, TURNS_WANTED, 14) - 1) / least_of(ROOM - 1, TURNS_WANTED, 14); /* each slot has one of 15 barriers */\n"
    "constexpr u32 TURNS = (WARPS + FINISHERS - 1) / FINISHERS, SLOTS = TURNS + 1;\n"
    "\n"
    "/* A tile, its weight rows, and the rows of x. */\n"
    "struct place {\n"
    "    tile_place at;\n"
    "    tile_rows rows;\n"
    "    stream_source source;\n"
    "    u32 x_row[ROW_BLOCKS];\n"
    "};\n"
    "\n"
    "DEVICE void find_rows(const moer_matmul_args &a, place &p) {\n"
    "    const u32 g = lane_index() >> 2;\n"
    "    p.rows.low = find_weight_row(a.weights, p.at.expert, tile_row(p.at.tile, g));\n",
    "    p.rows.high = find_weight_row(UP_APART \? a.up_weights : a.weights, p.at.expert, tile_row(p.at.tile, g + 8));\n"
    "    p.source = find_source(p.rows, FIRST_STEP(warp_index(), WARPS));\n"
    "}\n"
    "\n"
    "/* The same from the tile before, in fewer instructions and registers. */\n"
    "DEVICE void find_next_rows(const moer_matmul_args &a, place &p) {\n"
    "    constexpr u32 TILE_ROWS = TILE_COLUMNS * (GATED && INTERLEAVED && !UP_APART \? 2 : 1), HIGH_ROWS = !GATED \? 8 : INTERLEAVED \? 1 : COLUMNS; /* from low to high */\n"
    "    if (!EVEN_TILES) return find_rows(a, p);\n"
    "    p.rows.low = row_after(p.rows.low, TILE_ROWS);\n"
    "    p.rows.high = UP_APART \? row_after(p.rows.high, TILE_ROWS) : row_after(p.rows.low, HIGH_ROWS);\n"
    "#if STREAM_COPIES\n"
    "    if (ROWS_KEEP_WORDS(TILE_ROWS)) {\n"
    "        p.source = copy_source_after(p.source, TILE_ROWS);\n"
    "        if (!UP_APART) p.source.high = p.source.low + HIGH_ROWS * ROW_BYTES;\n"
    "        return;\n"
    "    }\n"
    "#endif\n"
    "    p.source = find_source(p.rows, FIRST_STEP(warp_index(), WARPS));\n"
    "}\n"
    "\n"
    "template <class Maps>\n"
    "DEVICE void enter_pass(const moer_matmul_args &a, const Maps &m, place &p) {\n"
    "#pragma unroll\n"
    "    for (u32 b = 0; b < ROW_BLOCKS; b++) p.x_row[b] = find_x_row(a, m, p.at, b * 8 + (lane_index() >> 2));\n"
    "    find_rows(a, p);\n"
    "}\n"
    "\n"
    "/* To the next tile, of the same rows of x as long as there is one; otherwise returns true. */\n"
    "DEVICE bool advance(const moer_matmul_args &a, place &p) {\n"
    "    const bool other_rows = next_tile(a, p.at);\n"
    "    if (p.at.left == 0) return false;\n"
    "    if (other_rows) enter_pass(a, later_maps{}, p);\n"
    "    else find_next_rows(a, p);\n"
    "    return other_rows;\n"
    "}\n"
    "\n"
    "/* Adds up the warps' parts of the tile's sums, and writes its outputs: as one of some warps. */\n"
    "template <class Words>\n"
    "DEVICE void finish_tile(const moer_matmul_args &a, const tile_place &p, Words &words, u32 slot, u32 finisher, u32 finishers) {\n"
    "    for (u32 i = finisher * 32 + lane_index(); i < TILE_COLUMNS * TILE_TOKENS; i += finishers * 32) {\n"
    "        const u32 c = i % TILE_COLUMNS, token = i / TILE_COLUMNS;\n"
    "        const output_place o = find_output(a, p, c, token);\n"
    "        if (o.at < 0) continue;\n"
    "        float value, up;\n"
    "        add_parts(words, slot * PARTS_SIZE, c, token, value, up);\n"
    "        write_output(a, o, output_bias(a, p.expert, o.column), output_up_bias(a, p.expert, o.column), value, up);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* A warp's places in the first slot, and whose turn it is. */\n"
    "struct finishing {\n"
    "    part_places places;\n"
    "    u32 slot, turn;\n"
    "};\n"
    "\n"
    "/* The warp's sums of a tile become those of all warps; those whose turn it is finish it. */\n"
    "template <class Words>\n"
    "DEVICE void hand_in(const moer_matmul_args &a, const tile_place &p, Words &words, finishing &f, float (&sums)[ROW_BLOCKS][4]) {\n"
    "    const u32 warp = warp_index();\n"
    "    const bool turn = TURNS == 1 || warp / FINISHERS == f.turn;\n"
    "    leave_part(f.places, f.slot * PARTS_SIZE, sums);\n"
    "    if (turn) {\n"
    "        const u32 first = TURNS == 1 \? 0 : f.turn * FINISHERS;\n"
    "        block_barrier_named(1 + f.slot, WARPS * 32);\n"
    "        finish_tile(a, p, words, f.slot, warp - first, WARPS % FINISHERS == 0 || first + FINISHERS <= WARPS \? FINISHERS : WARPS % FINISHERS);\n"
    "    } else {\n"
    "        block_barrier_arrive(1 + f.slot, WARPS * 32);\n"
    "    }\n"
    "    f.slot = f.slot + 1 == SLOTS \? 0 : f.slot + 1;\n"
    "    f.turn = f.turn + 1 == TURNS \? 0 : f.turn + 1;\n"
    "}\n"
    "\n"
    "KERNEL_SHARING(moe_route_matmul, WARPS * 32, RESIDENT_BLOCKS, moer_matmul_args) {\n"
    "    DYNAMIC_SHARED(words); /* slots: [warp][weight row][token], of f32; then the warps' streams */\n"
    "    const u32 warp = warp_index();\n"
    "    wait_if(!MAPS_ARE_THERE);\n"
    "    const first_maps maps = load_first_maps(a);\n"
    "    place next = {};\n"
    "    next.at = enter_range(a, maps, load_map(a.distinct_count));\n"
    "    if (OUT_INDEX == 1) clear_other_pairs(a);\n"
    "\n"
    "    const stream_places places = find_stream_places(words, SLOTS * PARTS_SIZE + warp * STREAM_WORDS);\n"
    "    finishing f = {find_part_places(words, 0), 0, 0};\n"
    "    weight_stream<X_HOW, WARPS> stream;\n",
    "    held_activations<WARPS> held;\n"
    "    bool other_rows = true;\n"
    "    if (next.at.left) {\n"
    "        enter_pass(a, maps, next);\n"
    "        start_weights(stream, places, next.source, warp);\n"
    "    }\n"
    "    wait_if(MAPS_ARE_THERE);\n"
    "    if (X_HOW == X_LOADED && next.at.left) start_activations(stream, activations(a, next.x_row[0]), warp);\n"
    "#pragma unroll 1\n"
    "    while (next.at.left) {\n"
    "        const place here = next;\n"
    "        const u8 *x[ROW_BLOCKS];\n"
    "#pragma unroll\n"
    "        for (u32 b = 0; b < ROW_BLOCKS; b++) x[b] = activations(a, here.x_row[b]);\n"
    "        if (X_HOW == X_HELD && other_rows) hold_activations(held, x[0], warp);\n"
    "        other_rows = advance(a, next);\n"
    "        float sums[ROW_BLOCKS][4];\n"
    "        multiply_tile(sums, stream, places, held, here.source, x, warp, next.at.left != 0, next.source, activations(a, next.x_row[0]), warp);\n"
    "        scale_rows<ROW_BLOCKS>(sums, ROW_HAS_SCALE \? row_scale(here.rows.low) : 1.0f, ROW_HAS_SCALE \? row_scale(here.rows.high) : 1.0f);\n"
    "        hand_in(a, here.at, words, f, sums);\n"
    "    }\n"
    "    end_stream();\n"
    "    prefetch_next(a);\n"
    "}\n",
    NULL};
static const char *const moer_source_31[] = { /* matmul_bulk.cu */
    "/*\n"
    "  matmul_bulk.cu: what matmul.cu does with up to 8 rows of x, for weights whose tiles the bulk copy engine can bring: on compute capability 9.0 and newer. Beside\n"
    "  the warps that multiply, each its part of K, a block has one that keeps STAGES tiles under way, and one that adds up the parts of\n"
    "  finished tiles and writes the outputs. So those that multiply wait for nothing but weights, and copy nothing.\n"
    "\n"
    "  A stage is a tile's weights, its scales, and then its parts' sums. The warps that multiply arrive at its barrier `done` when they have read the\n"
    "  one and written the other: then the next tile's weights may come. Its barrier `full` says that they are there, and that the sums have been read.\n"
    "\n"
    "  Constants: those of matmul.cu without ROW_BLOCKS; WARPS, those that multiply: as many as the parts of K. 8 rows of weights (16, where a\n"
    "  tile's rows follow each other) are whole 16 bytes and aligned to them; their scales too, or there are none; COLUMNS fill tiles. Threads: (WARPS + 2) * 32; grid: any number of blocks.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"scores.h\"\n"
    "#include \"activations.h\"\n"
    "#define SCALES_AT_ONCE\n"
    "#define TILES_IN_SHARED\n"
    "#include \"tile.h\"\n"
    "#include \"held.h\"\n"
    "#include \"copied.h\"\n"
    "#define TILE_TOKENS 8\n"
    "#include \"passes.h\"\n"
    "/* The 16 rows of a tile in the order of memory: all after each other, or eight of gate and eight of up. */\n"
    "#define ROWS_FOLLOW (!UP_APART && (!GATED || INTERLEAVED))\n"
    "#define UP_ROWS (ROWS_FOLLOW && GATED \? 1 : 8)\n"
    "#include \"parts.h\"\n"
    "\n"
    "constexpr u32 RUN = ROWS_FOLLOW \? 16 : 8; /* rows after each other */\n"
    "static_assert(TENSOR_CORES && !ZERO_POINTS && RUN * ROW_BYTES % 16 == 0 && EVEN_TILES, \"tiles that the bulk engine can copy\");\n"
    "\n"
    "/* ---- a stage ---- */\n"
    "\n"
    "constexpr u32 STEPS = PART_STEPS(WARPS);\n"
    "constexpr u32 STAGE_WORDS = TILE_WORDS + PARTS_SIZE;\n"
    "constexpr u32 BARRIER_WORDS = 32, STAGES_THAT_FIT = (SHARED_BYTES / 4 - BARRIER_WORDS) / STAGE_WORDS, STAGES = STAGES_THAT_FIT < 6 \? STAGES_THAT_FIT : 6;\n"
    "static_assert(STAGES >= 2, \"room for two stages\");\n"
    "\n"
    "/* Row i of a tile. */\n"
    "DEVICE weight_row find_tile_row(const moer_matmul_args &a, u32 expert, u32 tile, u32 i) {\n"
    "    const u64 row = ROWS_FOLLOW \? (u64)tile * 16 + i : column_row((u64)tile * 8 + i % 8, i >= 8);\n"
    "    return find_weight_row(UP_APART && i >= 8 \? a.up_weights : a.weights, expert, row);\n"
    "}\n"
    "\n"
    "struct stage_place {\n"
    "    u32 index, parity;\n"
    "};\n"
    "DEVICE void next_stage(stage_place &s) {\n"
    "    s.index++;\n"
    "    if (s.index == STAGES) {\n"
    "        s.index = 0;\n"
    "        s.parity ^= 1;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* ---- those that multiply ---- */\n"
    "\n"
    "template <class Words>\n"
    "DEVICE void multiply_tiles(const moer_matmul_args &a, const first_maps &maps, tile_place p, Words &words, const shared_place &barriers) {\n"
    "    const data_places places = find_data_places(words, BARRIER_WORDS);\n"
    "    const u32 warp = warp_index();\n"
    "    const u8 *const no_x[1] = {0};\n"
    "    held_activations<WARPS> held;\n"
    "    stage_place s = {0, 0};\n"
    "    bool other_rows = true;\n"
    "    u32 x_row = p.left \? find_x_row(a, maps, p, lane_index() >> 2) : 0;\n"
    "#pragma unroll 1\n"
    "    while (p.left) {\n"
    "        if (other_rows) hold_activations(held, activations(a, x_row), warp);\n"
    "        float sums[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};\n"
    "        const u32 stage = s.index * STAGE_WORDS;\n"
    "        shared_barrier_wait(barriers, s.index * 2, s.parity);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < STEPS; i++)\n"
    "            if (step_exists<WARPS>(warp, i)) {\n"
    "                weight_chunk low = fetch_chunk_of(places, stage, 0, i), high = fetch_chunk_of(places, stage, 1, i);\n"
    "                multiply_step<1, X_HELD, holds_sums(WARPS)>(sums, low, high, no_x, step_of<WARPS>(warp, i), held.pair[i], held.sums[holds_sums(WARPS) \? i : 0]);\n"
    "            }\n"
    "        if (ROW_HAS_SCALE) {\n"
    "            const u32 g = lane_index() >> 2;\n"
    "            scale_rows<1>(sums, row_scale(find_tile_row(a, p.expert, p.tile, g)), row_scale(find_tile_row(a, p.expert, p.tile, g + 8)));\n"
    "        }\n",
    "        leave_part(find_part_places(words, BARRIER_WORDS + TILE_WORDS), stage, sums); /* found anew: registers are what this loop has least of */\n"
    "        shared_barrier_arrive(barriers, (STAGES + s.index) * 2);\n"
    "        next_stage(s);\n"
    "        other_rows = next_tile(a, p);\n"
    "        if (other_rows) x_row = find_x_row(a, later_maps{}, p, lane_index() >> 2);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* ---- the one that copies, and the one that finishes ---- */\n"
    "\n"
    "/* A tile's weights into a stage: row by row where rows have others' banks only with words between them. What is the same in all lanes, and known to be,\n"
    "   is worked out once for all of them, and by one lane in line: 120 instructions, where each copy's own choice of a lane would make 520. */\n"
    "template <class Words>\n"
    "DEVICE void copy_tile(const moer_matmul_args &a, const tile_place &p, Words &words, const shared_place &barriers, u32 stage) {\n"
    "    constexpr u32 ROWS_AT_ONCE = ROW_STRIDE == ROW_BYTES \? RUN : 1;\n"
    "    const shared_place memory = shared_place_of(words, BARRIER_WORDS);\n"
    "    const u32 expert = warp_shuffle(p.expert, 0), tile = warp_shuffle(p.tile, 0), s = warp_shuffle(stage, 0);\n"
    "    if (!elect_lane()) return;\n"
    "    shared_barrier_expect(barriers, s * 2, 16 * ((u32)ROW_BYTES + SCALE_ROW_BYTES));\n"
    "#pragma unroll\n"
    "    for (u32 first = 0; first < 16; first += RUN) {\n"
    "        const weight_row run = find_tile_row(a, expert, tile, first);\n"
    "#pragma unroll\n"
    "        for (u32 r = 0; r < RUN; r += ROWS_AT_ONCE)\n"
    "            copy_bulk(memory, s * STAGE_WORDS + (first + r) * ROW_STRIDE / 4, run.data + r * ROW_BYTES, ROWS_AT_ONCE * (u32)ROW_BYTES, barriers, s * 2);\n"
    "#if FORMAT < FORMAT_GGUF\n"
    "        if (GROUP != 0) copy_bulk(memory, s * STAGE_WORDS + DATA_WORDS + first * SCALE_ROW_BYTES / 4, run.scales, RUN * SCALE_ROW_BYTES, barriers, s * 2);\n"
    "#endif\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Keeps as many tiles under way as there are stages. */\n"
    "template <class Words>\n"
    "DEVICE void copy_tiles(const moer_matmul_args &a, tile_place p, Words &words, const shared_place &barriers) {\n"
    "    stage_place s = {0, 1};\n"
    "#pragma unroll 1\n"
    "    for (u32 i = 0; p.left; i++) {\n"
    "        if (i >= STAGES) shared_barrier_wait(barriers, (STAGES + s.index) * 2, s.parity);\n"
    "        copy_tile(a, p, words, barriers, s.index);\n"
    "        next_stage(s);\n"
    "        next_tile(a, p);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Adds up the parts of finished tiles, and writes their outputs. */\n"
    "template <class Words>\n"
    "DEVICE void finish_tiles(const moer_matmul_args &a, tile_place p, Words &words, const shared_place &barriers) {\n"
    "    constexpr u32 LANE_OUTPUTS = TILE_COLUMNS * 8 / 32;\n"
    "    const u32 c = lane_index() % TILE_COLUMNS, first_token = lane_index() / TILE_COLUMNS;\n"
    "    stage_place s = {0, 0};\n"
    "    for (u32 i = 0; i < STAGES; i++) shared_barrier_arrive(barriers, i * 2); /* nothing was there to be read */\n"
    "#pragma unroll 1\n"
    "    while (p.left) {\n"
    "        const u32 column = p.tile * TILE_COLUMNS + c;\n"
    "        const float bias = output_bias(a, p.expert, column), up_bias = output_up_bias(a, p.expert, column);\n"
    "        output_place o[LANE_OUTPUTS];\n"
    "        float value[LANE_OUTPUTS], up[LANE_OUTPUTS];\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < LANE_OUTPUTS; i++) o[i] = find_output(a, p, c, first_token + i * (32 / TILE_COLUMNS));\n"
    "        shared_barrier_wait(barriers, (STAGES + s.index) * 2, s.parity);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < LANE_OUTPUTS; i++)\n"
    "            if (o[i].at >= 0) add_parts(words, BARRIER_WORDS + s.index * STAGE_WORDS + TILE_WORDS, c, first_token + i * (32 / TILE_COLUMNS), value[i], up[i]);\n"
    "        shared_barrier_arrive(barriers, s.index * 2);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < LANE_OUTPUTS; i++)\n"
    "            if (o[i].at >= 0) write_output(a, o[i], bias, up_bias, value[i], up[i]);\n"
    "        next_stage(s);\n"
    "        next_tile(a, p);\n"
    "    }\n"
    "}\n"
    "\n"
    "KERNEL_SHARING(moe_route_matmul_bulk, (WARPS + 2) * 32, RESIDENT_BLOCKS, moer_matmul_args) {\n",
    "    DYNAMIC_SHARED(words); /* the barriers `full` and `done` of all stages; then the stages */\n"
    "    const shared_place barriers = shared_place_of(words, 0);\n"
    "    const u32 warp = warp_index();\n"
    "    if (thread_index() == 0)\n"
    "        for (u32 i = 0; i < STAGES; i++) {\n"
    "            shared_barrier_start(shared_place_of(words, i * 2), 1 + 32);\n"
    "            shared_barrier_start(shared_place_of(words, (STAGES + i) * 2), WARPS * 32);\n"
    "        }\n"
    "    if (SCALE_WORDS) { /* words that are read with the last row's scales */\n"
    "        constexpr u32 REST = SCALE_WORDS - SCALES_END + (SCALE_WORDS == 0);\n"
    "        for (u32 i = thread_index(); i < STAGES * REST; i += block_threads()) words[BARRIER_WORDS + i / REST * STAGE_WORDS + DATA_WORDS + SCALES_END + i % REST] = 0;\n"
    "    }\n"
    "    wait_if(!MAPS_ARE_THERE);\n"
    "    const first_maps maps = load_first_maps(a);\n"
    "    const tile_place p = enter_range(a, maps, load_map(a.distinct_count));\n"
    "    if (OUT_INDEX == 1) clear_other_pairs(a);\n"
    "    block_barrier();\n"
    "    if (warp == WARPS) {\n"
    "        copy_tiles(a, p, words, barriers);\n"
    "    } else {\n"
    "        wait_if(MAPS_ARE_THERE);\n"
    "        if (warp < WARPS) multiply_tiles(a, maps, p, words, barriers);\n"
    "        else finish_tiles(a, p, words, barriers);\n"
    "    }\n"
    "    prefetch_next(a);\n"
    "}\n",
    NULL};
static const char *const moer_source_32[] = { /* grouped.cu */
    "/*\n"
    "  grouped.cu: an expert weight matrix times the rows that chose the expert, in batches with many rows an expert: the same products as\n"
    "  matmul.cu, with rows as the matrix fragments' rows and weights as their columns. A block computes a tile of TILE_ROWS rows of\n"
    "  one expert and 128 weight rows (grouped.h).\n"
    "\n"
    "  out[r] = act(gate[e] @ x + gate_bias[e]) * (up[e] @ x + up_bias[e])   GATED 1: a tile has 64 gate rows and their 64 up rows\n"
    "  out[r] = act(W[e] @ x + bias[e])                                      GATED 0\n"
    "  out[r] = (W[e] @ x + bias[e]) * weight                                with ACTIVATION 0; the weight where WEIGHT_ON_OUTPUT\n"
    "\n"
    "  Weights on the output stand before it is rounded: so a row that overflows its dtype does so only where its part of the sum would.\n"
    "\n"
    "  Tiles of one expert follow each other, those of the same rows first, so that blocks that run at the same time find activations and\n"
    "  weights in L2. Each block finds its expert by counting tiles over the distinct experts: those without rows have none, and one with\n"
    "  all rows is as good as any. The grid has room for the most tiles that may be; blocks beyond the last tile end.\n"
    "\n"
    "  Constants: those of grouped.h; GATED, INTERLEAVED, UP_APART, ACTIVATION, CLAMP, WEIGHT_ON_INPUT, BIAS, OUT, K, X_INDEX\n"
    "  as in matmul.cu; WEIGHT_ON_OUTPUT; WEIGHTS, dtype of either weights; RESIDENT_BLOCKS, how many share a multiprocessor.\n"
    "  Grid: column tiles * (pairs / TILE_ROWS + distinct experts, at most).\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"scan.h\"\n"
    "#include \"scores.h\"\n"
    "#include \"activations.h\"\n"
    "#include \"grouped.h\"\n"
    "#include \"output.h\"\n"
    "\n"
    "#define TILE_COLUMNS (GATED \? TILE_WEIGHTS / 2 : TILE_WEIGHTS)\n"
    "#define COLUMN_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)\n"
    "\n"
    "struct tile_place { u32 expert, base, end_row, first_column; };\n"
    "\n"
    "/* The output column of the tile's weight row n: gate and up rows alternate by eights, so that a thread has both sums. Past the\n"
    "   matrix: its last one, whose sums nobody uses. */\n"
    "DEVICE u32 tile_column(const tile_place &p, u32 n) {\n"
    "    const u32 column = p.first_column + (GATED \? n / 16 * 8 + n % 8 : n);\n"
    "    return column < COLUMNS \? column : COLUMNS - 1;\n"
    "}\n"
    "\n"
    "DEVICE bool is_up(u32 n) { return GATED && n / 8 % 2 != 0; }\n"
    "\n"
    "DEVICE weight_row tile_weight_row(const moer_matmul_args &a, const tile_place &p, u32 n) {\n"
    "    return find_weight_row(UP_APART && is_up(n) \? a.up_weights : a.weights, p.expert, column_row(tile_column(p, n), is_up(n)));\n"
    "}\n"
    "\n"
    "/* Finds row tile `tile`; false: there are fewer. */\n"
    "template <class Words>\n"
    "DEVICE bool find_tile(const moer_matmul_args &a, Words &scratch, u32 tile, tile_place &p) {\n"
    "    const u32 lane = lane_index(), warp = warp_index(), num_distinct = (u32)a.distinct_count[0];\n"
    "    u32 before = 0; /* tiles of the experts that have been looked at */\n"
    "    for (u32 first = 0; first < num_distinct && tile >= before; first += GROUPED_THREADS) {\n"
    "        const u32 d = first + thread_index();\n"
    "        const u32 begin = d < num_distinct \? (u32)a.distinct_offsets[d] : 0, end = d < num_distinct \? (u32)a.distinct_offsets[d + 1] : 0;\n"
    "        const u32 count = (end - begin + TILE_ROWS - 1) / TILE_ROWS;\n"
    "        const u32 sum = scan_warp(count);\n"
    "        u32 start = before;\n"
    "        if (lane == 31) scratch[warp] = sum;\n"
    "        block_barrier();\n"
    "        for (u32 w = 0; w < GROUPED_THREADS / 32; w++) {\n"
    "            const u32 tiles = scratch[w];\n"
    "            if (w < warp) start += tiles;\n"
    "            before += tiles;\n"
    "        }\n"
    "        start += sum - count;\n"
    "        if (tile >= start && tile - start < count) {\n"
    "            scratch[8] = (u32)a.distinct_experts[d];\n"
    "            scratch[9] = begin + (tile - start) * TILE_ROWS;\n"
    "            scratch[10] = end;\n"
    "        }\n"
    "        block_barrier();\n"
    "    }\n"
    "    if (tile >= before) return false;\n"
    "    p.expert = scratch[8];\n"
    "    p.base = scratch[9];\n"
    "    p.end_row = scratch[10];\n",
    "    block_barrier(); /* the scratch becomes a tile */\n"
    "    return true;\n"
    "}\n"
    "\n"
    "DEVICE void find_rows(const moer_matmul_args &a, const tile_place &p, row_sources &sources) {\n"
    "    sources.passes = 0;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < ROW_PASSES; i++) {\n"
    "        const u32 r = i * ROWS_A_PASS + thread_index() / SLICE_CHUNKS, row = p.base + r < p.end_row \? p.base + r : p.base;\n"
    "        sources.x[i] = 0;\n"
    "        if (r >= TILE_ROWS || p.base + r / 16 * 16 >= p.end_row) continue;\n"
    "        sources.x[i] = (const u8 *)a.x + (u64)x_row_of(a, X_INDEX == 2 \? row : (u32)a.row_to_pair[row]) * (INNER * 2) + thread_index() % SLICE_CHUNKS * 16;\n"
    "        sources.passes = i + 1;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Multiplies by what scales the whole weight row. */\n"
    "DEVICE void scale_columns(const moer_matmul_args &a, const tile_place &p, float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4]) {\n"
    "    if (!ROW_HAS_SCALE) return;\n"
    "#pragma unroll\n"
    "    for (u32 j = 0; j < COLUMN_FRAGMENTS; j++)\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 2; i++) {\n"
    "            const u32 n = (warp_index() % WARPS_ACROSS * COLUMN_FRAGMENTS + j) * 8 + (lane_index() & 3) * 2 + i;\n"
    "            const float scale = row_scale(tile_weight_row(a, p, n));\n"
    "#pragma unroll\n"
    "            for (u32 m = 0; m < ROW_FRAGMENTS; m++) {\n"
    "                sums[m][j][i] = f32_mul(sums[m][j][i], scale);\n"
    "                sums[m][j][i + 2] = f32_mul(sums[m][j][i + 2], scale);\n"
    "            }\n"
    "        }\n"
    "}\n"
    "\n"
    "DEVICE float finish_output(const moer_matmul_args &a, const tile_place &p, u32 column, float weight, float value, float up) {\n"
    "    value = finish_sums(a, output_bias(a, p.expert, column), output_up_bias(a, p.expert, column), weight, value, up);\n"
    "    return WEIGHT_ON_OUTPUT \? f32_mul(value, weight) : value;\n"
    "}\n"
    "\n"
    "DEVICE void finish_tile(const moer_matmul_args &a, const tile_place &p, const float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4]) {\n"
    "    const u32 lane = lane_index(), warp = warp_index();\n"
    "#pragma unroll\n"
    "    for (u32 m = 0; m < ROW_FRAGMENTS; m++)\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 4; i += 2) { /* rows g and g + 8 of the fragment */\n"
    "            const u32 row = p.base + (m * 2 + warp / WARPS_ACROSS) * 16 + i * 4 + (lane >> 2);\n"
    "            if (row >= p.end_row) continue;\n"
    "            const u32 pair = WEIGHT_ON_INPUT || WEIGHT_ON_OUTPUT \? (u32)a.row_to_pair[row] : row;\n"
    "            const float weight = WEIGHT_ON_INPUT || WEIGHT_ON_OUTPUT \? load_value(a.router_weights, pair, WEIGHTS) : 1.0f;\n"
    "            const u64 at = (u64)row * COLUMNS;\n"
    "#pragma unroll\n"
    "            for (u32 j = 0; j < COLUMN_FRAGMENTS; j += GATED \? 2 : 1) {\n"
    "                const u32 n = (warp % WARPS_ACROSS * COLUMN_FRAGMENTS + j) * 8, up = (j + GATED) % COLUMN_FRAGMENTS;\n"
    "                const u32 column = p.first_column + (GATED \? n / 2 : n) + (lane & 3) * 2;\n"
    "                if (column >= COLUMNS) continue;\n"
    "                const float first = finish_output(a, p, column, weight, sums[m][j][i], sums[m][up][i]);\n"
    "                if (COLUMNS % 2 != 0 && column + 1 >= COLUMNS) {\n"
    "                    store_value(a.out, at + column, OUT, first);\n"
    "                    continue;\n"
    "                }\n"
    "                const float second = finish_output(a, p, column + 1, weight, sums[m][j][i + 1], sums[m][up][i + 1]);\n"
    "                if (OUT == DTYPE_F32 || COLUMNS % 2 != 0) {\n"
    "                    store_value(a.out, at + column, OUT, first);\n"
    "                    store_value(a.out, at + column + 1, OUT, second);\n"
    "                } else {\n"
    "                    ((u32 *)a.out)[(at + column) / 2] = OUT == DTYPE_F16 \? f32_to_half2(first, second) : f32_to_bf162(first, second);\n"
    "                }\n"
    "            }\n"
    "        }\n"
    "}\n"
    "\n"
    "template <class Words>\n"
    "DEVICE void multiply(float (&sums)[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4], Words &words, u32 rows, u32 weights, u32 slice, u32 fragments) {\n"
    "    if (fragments == ROW_FRAGMENTS) multiply_slice<true>(sums, words, rows, weights, slice, fragments);\n",
    "    else multiply_slice<false>(sums, words, rows, weights, slice, fragments);\n"
    "}\n"
    "\n"
    "DEVICE u32 next_stage(u32 stage) { return stage + 1 == STAGES \? 0 : stage + 1; }\n"
    "\n"
    "KERNEL_SHARING(moe_route_grouped, GROUPED_THREADS, RESIDENT_BLOCKS, moer_matmul_args) {\n"
    "    DYNAMIC_SHARED(words);\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    tile_place p;\n"
    "    if (!find_tile(a, words, block_index_x() / COLUMN_TILES, p)) return;\n"
    "    p.first_column = block_index_x() % COLUMN_TILES * TILE_COLUMNS;\n"
    "\n"
    "    const u32 num_rows = p.end_row - p.base < TILE_ROWS \? p.end_row - p.base : TILE_ROWS;\n"
    "    const u32 first_fragment = warp_index() / WARPS_ACROSS, num_fragments = (num_rows + 15) / 16; /* of all warps */\n"
    "    const u32 fragments = (num_fragments + 1 - first_fragment) / 2;\n"
    "    row_sources x;\n"
    "    find_rows(a, p, x);\n"
    "    float sums[ROW_FRAGMENTS][COLUMN_FRAGMENTS][4];\n"
    "#pragma unroll\n"
    "    for (u32 m = 0; m < ROW_FRAGMENTS; m++)\n"
    "#pragma unroll\n"
    "        for (u32 j = 0; j < COLUMN_FRAGMENTS; j++)\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < 4; i++) sums[m][j][i] = 0.0f;\n"
    "\n"
    "    const shared_place target = shared_place_of(words, 0);\n"
    "    u32 stage = 0, free_stage = STAGES - 1; /* whose slice is multiplied, and which is copied to */\n"
    "#if COPIED_WEIGHTS\n"
    "    weight_sources w;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < WEIGHT_PASSES; i++) w.w[i] = tile_weight_row(a, p, i * ROWS_A_PASS + thread_index() / SLICE_CHUNKS).data + thread_index() % SLICE_CHUNKS * 16;\n"
    "    for (u32 slice = 0; slice < STAGES - 1; slice++) {\n"
    "        start_rows(words, target, x, slice, slice * ROW_WORDS);\n"
    "        start_weights(target, w, slice, WEIGHTS_AT + slice * FILL_WORDS);\n"
    "        copy_async_commit();\n"
    "    }\n"
    "#pragma unroll 1\n"
    "    for (u32 slice = 0; slice < NUM_SLICES; slice++) {\n"
    "        copy_async_wait<STAGES - 2>();\n"
    "        block_barrier(); /* all have what was copied, and none reads the stage that comes next */\n"
    "        start_rows(words, target, x, slice + STAGES - 1, free_stage * ROW_WORDS);\n"
    "        start_weights(target, w, slice + STAGES - 1, WEIGHTS_AT + free_stage * FILL_WORDS);\n"
    "        copy_async_commit();\n"
    "        multiply(sums, words, stage * ROW_WORDS, WEIGHTS_AT + stage * FILL_WORDS, 0, fragments);\n"
    "        stage = next_stage(stage);\n"
    "        free_stage = next_stage(free_stage);\n"
    "    }\n"
    "#else\n"
    "    const u32 n = warp_index() * 16 + (lane_index() >> 2);\n"
    "    const weight_row low = tile_weight_row(a, p, n), high = tile_weight_row(a, p, n + 8);\n"
    "    weight_chunk low_chunk = load_weight_chunk(low, 0, false), high_chunk = load_weight_chunk(high, 0, false);\n"
    "    for (u32 slice = 0; slice < STAGES - 1; slice++) {\n"
    "        start_rows(words, target, x, slice, slice * ROW_WORDS);\n"
    "        copy_async_commit();\n"
    "    }\n"
    "#pragma unroll 1\n"
    "    for (u32 step = 0; step < NUM_STEPS; step++) {\n"
    "        arrange_weight_chunk(low_chunk);\n"
    "        arrange_weight_chunk(high_chunk);\n"
    "        if (step != 0) block_barrier(); /* none reads the weights before these */\n"
    "        store_weights(words, low_chunk, step, WEIGHTS_AT, n);\n"
    "        store_weights(words, high_chunk, step, WEIGHTS_AT, n + 8);\n"
    "        if (step + 1 < NUM_STEPS) {\n"
    "            low_chunk = load_weight_chunk(low, step + 1, false);\n"
    "            high_chunk = load_weight_chunk(high, step + 1, false);\n"
    "        }\n"
    "#pragma unroll 1\n"
    "        for (u32 i = 0; i < FILL_SLICES && step * FILL_SLICES + i < NUM_SLICES; i++) {\n"
    "            copy_async_wait<STAGES - 2>();\n"
    "            block_barrier();\n"
    "            start_rows(words, target, x, step * FILL_SLICES + i + STAGES - 1, free_stage * ROW_WORDS);\n"
    "            copy_async_commit();\n"
    "            multiply(sums, words, stage * ROW_WORDS, WEIGHTS_AT, i, fragments);\n"
    "            stage = next_stage(stage);\n"
    "            free_stage = next_stage(free_stage);\n"
    "        }\n"
    "    }\n"
    "#endif\n"
    "    copy_async_wait<0>();\n"
    "    scale_columns(a, p, sums);\n"
    "    finish_tile(a, p, sums);\n"
    "}\n",
    NULL};
static const char *const moer_source_33[] = { /* grouped_warpgroups.cu */
    "/*\n"
    "  grouped_warpgroups.cu: what grouped.cu computes, on compute capability 9.0, whose tensor cores read both operands from shared memory:\n"
    "  four warps, a warpgroup, start a product together and go on while it is done.\n"
    "\n"
    "  A block has a multiprocessor alone, and goes through tiles of TILE_WEIGHTS weight rows and up to MOST_ROWS rows of one expert. Producers,\n"
    "  PRODUCER_WARPS warps, bring both into shared memory, a fill of 64 or 128 inputs at a time and up to STAGES fills ahead: past the end of a\n"
    "  tile into the next one, so that memory is busy while a tile's outputs are made. Consumers, two warpgroups, multiply: 64 weight rows\n"
    "  are a product's rows, and the expert's rows, up to a multiple of 16, its columns. So a tile takes as long as its rows need, and an expert\n"
    "  with few rows costs little more than reading its weights. Tiles are wide because L2 is the limit: rows and TILE_WEIGHTS weight rows\n"
    "  are 2 * rows * TILE_WEIGHTS operations for each of their rows + TILE_WEIGHTS columns of K. Weights that are unpacked are a fourth\n"
    "  of the bytes, and half the width leaves registers for their loads.\n"
    "\n"
    "  A warp's weight rows are dealt out so that a lane, once 8 x 8 pieces of sums are transposed, has some consecutive columns of a row.\n"
    "\n"
    "  Tiles follow each other as in grouped.cu. An expert's rows are shared out evenly among its tiles. Each warp of the producers finds a tile\n"
    "  by counting those before it, from where it found the last one.\n"
    "\n"
    "  Constants: those of grouped.cu but RESIDENT_BLOCKS, with X_ALIGN 16, COLUMNS and INNER multiples of 8, and for weights of the activations'\n"
    "  type WEIGHT_ALIGN 16; TILE_WEIGHTS, 128 or 256; TILE_ROWS, 32, 64 or 128; SHARED_BYTES; PRODUCER_WARPS, 4 or 8; PRODUCER_REGISTERS, of a\n"
    "  thread: consumers get what is left.\n"
    "  Grid: as many blocks as run at once; any number will do.\n"
    "*/\n"
    "#define WEIGHT_LOADS_STAY\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"scan.h\"\n"
    "#include \"scores.h\"\n"
    "#include \"activations.h\"\n"
    "#include \"tile.h\"\n"
    "#include \"output.h\"\n"
    "\n"
    "/* Half of the experts that ought to have 128 rows have some more, and those are still one tile. */\n"
    "#define MOST_ROWS (TILE_ROWS == 128 \? 160 : TILE_ROWS)\n"
    "#define CONSUMERS 256\n"
    "#define PRODUCERS (PRODUCER_WARPS * 32)\n"
    "#define THREADS (CONSUMERS + PRODUCERS)\n"
    "#define REGISTERS_AT_LAUNCH (65536 / THREADS / 8 * 8) /* of a thread; a block never has more of them than then */\n"
    "#define REGISTERS_LEFT ((REGISTERS_AT_LAUNCH * THREADS - PRODUCERS * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8)\n"
    "#define CONSUMER_REGISTERS (REGISTERS_LEFT < 240 \? REGISTERS_LEFT : 240)\n"
    "\n"
    "#define COPIED_WEIGHTS (FORMAT == X && WEIGHT_ALIGN == 16) /* otherwise through registers */\n"
    "#define SLICE 64 /* inputs, 128 bytes of a row */\n"
    "#define FILL_SLICES (COPIED_WEIGHTS \? 1 : STEP / SLICE)\n"
    "#define FILL_INPUTS (FILL_SLICES * SLICE)\n"
    "#define NUM_FILLS ((INNER + FILL_INPUTS - 1) / FILL_INPUTS)\n"
    "#define ROWS_AT (TILE_WEIGHTS * 32) /* in a slice, behind the weights */\n"
    "#define SLICE_WORDS (ROWS_AT + MOST_ROWS * 32)\n"
    "#define FILL_WORDS (SLICE_WORDS * FILL_SLICES)\n"
    "static_assert(FILL_SLICES > 0 && INNER % 8 == 0 && X_ALIGN == 16, \"rows in slices and chunks\");\n"
    "\n"
    "/* What is known of a tile: expert, first row, number of rows (0: no more tiles), first column; then its rows' weights. So many tiles at\n"
    "   once: producers say what comes when they are up to STAGES fills ahead. */\n"
    "#define TILE_WORDS (4 + MOST_ROWS)\n"
    "#define MOST_STAGES 7 /* a full and an empty barrier each, of 15 */\n"
    "#define STAGES_THAT_FIT ((SHARED_BYTES / 4 - (MOST_STAGES / NUM_FILLS + 2) * TILE_WORDS) / FILL_WORDS)\n"
    "#define STAGES (STAGES_THAT_FIT < MOST_STAGES \? STAGES_THAT_FIT : MOST_STAGES)\n"
    "#define TILES_AT (STAGES * FILL_WORDS)\n"
    "#define TILES_END (TILES_AT + (STAGES / NUM_FILLS + 2) * TILE_WORDS)\n"
    "static_assert(STAGES >= 2 && TILES_END * 4 <= SHARED_BYTES, \"shared memory of a block\");\n"
    "\n"
    "#define BLOCKS_OF_64 (TILE_WEIGHTS / 128) /* weight rows of a warpgroup */\n",
    "#define TILE_COLUMNS (GATED \? TILE_WEIGHTS / 2 : TILE_WEIGHTS)\n"
    "#define COLUMN_TILES ((COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS)\n"
    "#define WEIGHS (WEIGHT_ON_INPUT || WEIGHT_ON_OUTPUT)\n"
    "\n"
    "/* The barriers of a stage: it is full, it may be filled. */\n"
    "DEVICE u32 full_barrier(u32 stage) { return 1 + stage; }\n"
    "DEVICE u32 empty_barrier(u32 stage) { return 1 + STAGES + stage; }\n"
    "\n"
    "/* Where chunk `chunk` of row `row` of a slice is, as the products want it. */\n"
    "DEVICE u32 chunk_word(u32 row, u32 chunk) { return (row * 8 + (chunk ^ (row & 7))) * 4; }\n"
    "DEVICE u32 weight_place(u32 n, u32 chunk) { return chunk / 8 * SLICE_WORDS + chunk_word(n, chunk & 7); }\n"
    "#include \"unpacked.h\"\n"
    "\n"
    "/* ---- tiles ---- */\n"
    "\n"
    "struct tile_place { u32 expert, base, rows, first_column; };\n"
    "\n"
    "/* The output column of the tile's weight row n = ((group * BLOCKS_OF_64 + block) * 4 + warp) * 16 + half * 8 + i, in which half 1 is up where\n"
    "   there is a gate. Past the matrix: its last one, whose sums nobody uses. */\n"
    "DEVICE u32 tile_column(u32 first_column, u32 n) {\n"
    "    const u32 i = n & 7, half = GATED \? 0 : n >> 3 & 1, warp = n >> 4 & 3, block = n >> 6 & (BLOCKS_OF_64 - 1), group = n / (64 * BLOCKS_OF_64);\n"
    "    const u32 halves = GATED \? 1 : 2, lane_columns = halves * BLOCKS_OF_64 * 2;\n"
    "    const u32 column = first_column + ((group * 4 + warp) * 4 + i / 2) * lane_columns + (block * halves + half) * 2 + i % 2;\n"
    "    return column < COLUMNS \? column : COLUMNS - 1;\n"
    "}\n"
    "\n"
    "DEVICE bool is_up(u32 n) { return GATED && (n >> 3 & 1) != 0; }\n"
    "\n"
    "DEVICE weight_row tile_weight_row(const moer_matmul_args &a, const tile_place &p, u32 n) {\n"
    "    return find_weight_row(UP_APART && is_up(n) \? a.up_weights : a.weights, p.expert, column_row(tile_column(p.first_column, n), is_up(n)));\n"
    "}\n"
    "\n"
    "/* How far a warp has counted: the distinct experts before `first` have `before` row tiles. */\n"
    "struct tile_search { u32 first, before; };\n"
    "\n"
    "/* Tile `tile`, no less than the last one; false: there are fewer. */\n"
    "DEVICE bool find_tile(const moer_matmul_args &a, u32 num_distinct, tile_search &s, u32 tile, tile_place &p) {\n"
    "    const u32 lane = lane_index(), row_tile = tile / COLUMN_TILES;\n"
    "    for (; s.first < num_distinct; s.first += 32) {\n"
    "        const u32 d = s.first + lane;\n"
    "        const u32 begin = d < num_distinct \? (u32)a.distinct_offsets[d] : 0, end = d < num_distinct \? (u32)a.distinct_offsets[d + 1] : 0;\n"
    "        const u32 count = (end - begin + MOST_ROWS - 1) / MOST_ROWS;\n"
    "        const u32 sum = scan_warp(count);\n"
    "        const u32 beyond = warp_ballot(s.before + sum <= row_tile); /* lanes whose tiles all come before */\n"
    "        if (beyond != 0xffffffffu) {\n"
    "            const u32 owner = popcount(beyond), index = row_tile - s.before - warp_shuffle(sum - count, owner);\n"
    "            const u32 first = warp_shuffle(begin, owner), num_rows = warp_shuffle(end, owner) - first;\n"
    "            const u32 tiles = warp_shuffle(count, owner), even = (num_rows + tiles - 1) / tiles;\n"
    "            p.expert = (u32)a.distinct_experts[s.first + owner];\n"
    "            p.base = first + index * even;\n"
    "            p.rows = num_rows - index * even < even \? num_rows - index * even : even;\n"
    "            p.first_column = tile % COLUMN_TILES * TILE_COLUMNS;\n"
    "            return true;\n"
    "        }\n"
    "        s.before += warp_shuffle(sum, 31);\n"
    "    }\n"
    "    return false;\n"
    "}\n"
    "\n"
    "/* ---- producers ---- */\n"
    "\n"
    "/* Eight threads copy a row's chunks. */\n"
    "#define ROWS_A_PASS (PRODUCERS / 8)\n"
    "#define ROW_PASSES ((MOST_ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS)\n"
    "#define WEIGHT_PASSES (TILE_WEIGHTS / ROWS_A_PASS)\n"
    "#define GROUPS_A_WARP (TILE_WEIGHTS / 16 / PRODUCER_WARPS) /* of 16 weight rows */\n"
    "#define LAG (STAGES > 2 \? STAGES - 2 : 0)                  /* fills that are under way when the one before them is said to be full */\n"
    "\n"
    "struct producer {\n"
    "    shared_place target;\n"
    "    u32 thread, place;      /* among the producers; where its chunk of the first rows is, from the first word */\n",
    "    u32 fills;              /* so far */\n"
    "    u32 x_row[ROW_PASSES];  /* rows of x, of the tile */\n"
    "    u32 rows;               /* of them, up to a multiple of 16 */\n"
    "};\n"
    "\n"
    "template <class Words>\n"
    "DEVICE void tell_tile(const moer_matmul_args &a, Words &words, const tile_place &p, u32 at, u32 thread) {\n"
    "    if (WEIGHS)\n"
    "        for (u32 r = thread; r < p.rows; r += PRODUCERS) words[at + 4 + r] = f32_bits(load_value(a.router_weights, (u32)a.row_to_pair[p.base + r], WEIGHTS));\n"
    "    if (thread != 0) return;\n"
    "    words[at] = p.expert;\n"
    "    words[at + 1] = p.base;\n"
    "    words[at + 2] = p.rows;\n"
    "    words[at + 3] = p.first_column;\n"
    "}\n"
    "\n"
    "/* Rows past the tile's last, up to a multiple of 16, are its first. */\n"
    "DEVICE void find_rows(const moer_matmul_args &a, const tile_place &p, producer &my) {\n"
    "    my.rows = (p.rows + 15) / 16 * 16;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < ROW_PASSES; i++) {\n"
    "        const u32 r = i * ROWS_A_PASS + my.thread / 8, row = p.base + (r < p.rows \? r : 0);\n"
    "        my.x_row[i] = r < my.rows \? x_row_of(a, X_INDEX == 2 \? row : (u32)a.row_to_pair[row]) : 0;\n"
    "    }\n"
    "}\n"
    "\n"
    "/* Waits until the stage of the next fill may be filled. */\n"
    "DEVICE u32 begin_fill(const producer &my) {\n"
    "    const u32 stage = my.fills % STAGES;\n"
    "    if (my.fills >= STAGES) block_barrier_named(empty_barrier(stage), THREADS);\n"
    "    return stage;\n"
    "}\n"
    "\n"
    "DEVICE void start_rows(const moer_matmul_args &a, const producer &my, u32 at, u32 fill) {\n"
    "#pragma unroll\n"
    "    for (u32 slice = 0; slice < FILL_SLICES; slice++) {\n"
    "        const u32 k = fill * FILL_INPUTS + slice * SLICE + (my.thread & 7) * 8, size = INNER % FILL_INPUTS == 0 || k < INNER \? 16 : 0;\n"
    "        const u8 *const x = (const u8 *)a.x + (size \? k * 2 : 0);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < ROW_PASSES; i++)\n"
    "            if (i * ROWS_A_PASS + my.thread / 8 < my.rows)\n"
    "                copy_async_16(my.target, at + slice * SLICE_WORDS + ROWS_AT + my.place + i * ROWS_A_PASS * 32, x + (u64)my.x_row[i] * (INNER * 2), size);\n"
    "    }\n"
    "}\n"
    "\n"
    "#if COPIED_WEIGHTS\n"
    "\n"
    "/* Rows of the same warp, half and lane are so many weight rows apart, unless the tile has none of them. */\n"
    "#define WEIGHT_STRIDES (COLUMNS % TILE_COLUMNS == 0 && ROWS_A_PASS == 16)\n"
    "\n"
    "DEVICE void start_weights(const moer_matmul_args &a, const producer &my, const tile_place &p, const u8 *first, u32 at, u32 fill) {\n"
    "    const u32 k = fill * SLICE + (my.thread & 7) * 8, size = INNER % SLICE == 0 || k < INNER \? 16 : 0, offset = size \? k * 2 : 0;\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < WEIGHT_PASSES; i++) {\n"
    "        const u8 *const row = WEIGHT_STRIDES \? first + tile_column(0, i * 16) * (GATED && INTERLEAVED \? 2 : 1) * ROW_BYTES : tile_weight_row(a, p, i * ROWS_A_PASS + my.thread / 8).data;\n"
    "        copy_async_16(my.target, at + my.place + i * ROWS_A_PASS * 32, row + offset, size);\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE void fill_tile(const moer_matmul_args &a, producer &my, const tile_place &p) {\n"
    "    const u8 *const first = tile_weight_row(a, p, my.thread / 8).data;\n"
    "#pragma unroll 1\n"
    "    for (u32 fill = 0; fill < NUM_FILLS; fill++) {\n"
    "        const u32 at = begin_fill(my) * FILL_WORDS;\n"
    "        start_rows(a, my, at, fill);\n"
    "        start_weights(a, my, p, first, at, fill);\n"
    "        copy_async_commit();\n"
    "        if (my.fills >= LAG) {\n"
    "            copy_async_wait<LAG>();\n"
    "            block_barrier_arrive(full_barrier((my.fills - LAG) % STAGES), THREADS);\n"
    "        }\n"
    "        my.fills++;\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE void finish_fills(const producer &my) {\n"
    "    copy_async_wait<0>();\n"
    "    for (u32 left = my.fills < LAG \? my.fills : LAG; left > 0; left--) block_barrier_arrive(full_barrier((my.fills - left) % STAGES), THREADS);\n"
    "}\n"
    "\n"
    "#else\n"
    "\n"
    "/* A lane's weight rows, those of its warp's groups of 16, and its parts of them in one fill. */\n"
    "struct code_rows { weight_row low[GROUPS_A_WARP], high[GROUPS_A_WARP]; };\n"
    "struct codes { weight_chunk low[GROUPS_A_WARP], high[GROUPS_A_WARP]; };\n"
    "\n",
    "DEVICE u32 first_weight_row(const producer &my) { return my.thread / 32 * 16 + (lane_index() >> 2); }\n"
    "\n"
    "DEVICE void find_code_rows(const moer_matmul_args &a, const producer &my, const tile_place &p, code_rows &rows) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < GROUPS_A_WARP; i++) {\n"
    "        const u32 n = first_weight_row(my) + i * PRODUCER_WARPS * 16;\n"
    "        rows.low[i] = tile_weight_row(a, p, n);\n"
    "        rows.high[i] = tile_weight_row(a, p, n + 8);\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE void load_codes(const code_rows &rows, u32 fill, codes &c) {\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < GROUPS_A_WARP; i++) {\n"
    "        c.low[i] = load_weight_chunk(rows.low[i], fill, false);\n"
    "        c.high[i] = load_weight_chunk(rows.high[i], fill, false);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* `rows` and `now` are those of the tile's first fill, and then those of `next`, the tile after it or this one again. Codes are loaded a fill\n"
    "   ahead, before a barrier, so that the compiler leaves them there: it would rather load them when the fill before is done. */\n"
    "template <class Words>\n"
    "DEVICE void fill_tile(const moer_matmul_args &a, Words &words, producer &my, const tile_place &next, code_rows &rows, codes &now) {\n"
    "#pragma unroll 1\n"
    "    for (u32 fill = 0; fill < NUM_FILLS; fill++) {\n"
    "        codes then;\n"
    "        if (fill + 1 == NUM_FILLS) find_code_rows(a, my, next, rows);\n"
    "        load_codes(rows, fill + 1 == NUM_FILLS \? 0 : fill + 1, then);\n"
    "        const u32 stage = begin_fill(my), at = stage * FILL_WORDS;\n"
    "        start_rows(a, my, at, fill);\n"
    "        copy_async_commit();\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < GROUPS_A_WARP; i++) {\n"
    "            const u32 n = first_weight_row(my) + i * PRODUCER_WARPS * 16;\n"
    "            arrange_weight_chunk(now.low[i]);\n"
    "            arrange_weight_chunk(now.high[i]);\n"
    "            store_weights(words, now.low[i], fill, at, n);\n"
    "            store_weights(words, now.high[i], fill, at, n + 8);\n"
    "        }\n"
    "        copy_async_wait<0>();\n"
    "        block_barrier_arrive(full_barrier(stage), THREADS);\n"
    "        my.fills++;\n"
    "        now = then;\n"
    "    }\n"
    "}\n"
    "\n"
    "DEVICE void finish_fills(const producer &) {}\n"
    "\n"
    "#endif\n"
    "\n"
    "template <class Words>\n"
    "DEVICE void produce(const moer_matmul_args &a, Words &words) {\n"
    "    const u32 num_distinct = (u32)a.distinct_count[0];\n"
    "    u32 at = TILES_AT;\n"
    "    tile_search search = {0, 0};\n"
    "    tile_place p;\n"
    "    producer my;\n"
    "    my.target = shared_place_of(words, 0);\n"
    "    my.thread = thread_index() - CONSUMERS;\n"
    "    my.place = chunk_word(my.thread / 8, my.thread & 7);\n"
    "    my.fills = 0;\n"
    "#if COPIED_WEIGHTS\n"
    "    for (u32 tile = block_index_x(); find_tile(a, num_distinct, search, tile, p); tile += grid_blocks_x()) {\n"
    "        find_rows(a, p, my);\n"
    "        tell_tile(a, words, p, at, my.thread);\n"
    "        at = at + TILE_WORDS == TILES_END \? TILES_AT : at + TILE_WORDS;\n"
    "        fill_tile(a, my, p);\n"
    "    }\n"
    "#else\n"
    "    u32 tile = block_index_x();\n"
    "    bool found = find_tile(a, num_distinct, search, tile, p);\n"
    "    code_rows rows;\n"
    "    codes now;\n"
    "    if (found) {\n"
    "        find_code_rows(a, my, p, rows);\n"
    "        load_codes(rows, 0, now);\n"
    "    }\n"
    "    while (found) {\n"
    "        tile_place next = p;\n"
    "        find_rows(a, p, my);\n"
    "        tell_tile(a, words, p, at, my.thread);\n"
    "        at = at + TILE_WORDS == TILES_END \? TILES_AT : at + TILE_WORDS;\n"
    "        found = find_tile(a, num_distinct, search, tile += grid_blocks_x(), next);\n"
    "        fill_tile(a, words, my, next, rows, now);\n"
    "        p = next;\n"
    "    }\n"
    "#endif\n"
    "    finish_fills(my);\n"
    "    /* An empty fill for the end, and the barriers at which consumers have left the last ones. */\n"
    "    if (my.thread == 0) words[at + 2] = 0;\n"
    "    block_barrier_arrive(full_barrier(begin_fill(my)), THREADS);\n"
    "    for (u32 i = 1; i < STAGES; i++) {\n"
    "        my.fills++;\n"
    "        begin_fill(my);\n"
    "    }\n"
    "}\n"
    "\n"
    "/* ---- consumers ---- */\n"
    "\n"
    "typedef float tile_sums[BLOCKS_OF_64][MOST_ROWS / 8][4];\n"
    "\n"
    "/* The products of a tile of up to N rows, whose first fill is there. */\n"
    "template <u32 N, class Words>\n",
    "DEVICE void multiply_tile(tile_sums &sums, Words &words, u32 &stage) {\n"
    "    const u32 group = warp_index() / 4;\n"
    "    u32 previous = 0;\n"
    "#pragma unroll\n"
    "    for (u32 m = 0; m < BLOCKS_OF_64; m++)\n"
    "#pragma unroll\n"
    "        for (u32 j = 0; j < N / 8; j++)\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < 4; i++) sums[m][j][i] = 0.0f;\n"
    "#pragma unroll 1\n"
    "    for (u32 fill = 0; fill < NUM_FILLS; fill++) {\n"
    "        if (fill != 0) block_barrier_named(full_barrier(stage), THREADS);\n"
    "        shared_visible_to_products();\n"
    "        warpgroup_begin();\n"
    "#pragma unroll\n"
    "        for (u32 slice = 0; slice < FILL_SLICES; slice++) {\n"
    "            const u32 at = stage * FILL_WORDS + slice * SLICE_WORDS;\n"
    "#pragma unroll\n"
    "            for (u32 k = 0; k < SLICE / 16; k++)\n"
    "#pragma unroll\n"
    "                for (u32 m = 0; m < BLOCKS_OF_64; m++)\n"
    "                    warpgroup_multiply(N, X == DTYPE_F16, sums[m], words, at + (group * BLOCKS_OF_64 + m) * 2048 + k * 8, at + ROWS_AT + k * 8);\n"
    "        }\n"
    "        warpgroup_commit();\n"
    "        if (fill != 0) {\n"
    "            warpgroup_wait<1>();\n"
    "            block_barrier_arrive(empty_barrier(previous), THREADS);\n"
    "        }\n"
    "        previous = stage;\n"
    "        stage = stage + 1 == STAGES \? 0 : stage + 1;\n"
    "    }\n"
    "    warpgroup_wait<0>();\n"
    "    block_barrier_arrive(empty_barrier(previous), THREADS);\n"
    "}\n"
    "\n"
    "/* The outputs of rows r and r + 1 from their sums, of one weight row or of gate and up. */\n"
    "DEVICE u32 finish_pair(const moer_matmul_args &a, const float (&sums)[4], u32 half, const float (&scale)[2], const float (&bias)[2], const float (&weight)[2]) {\n"
    "    float value[2];\n"
    "#pragma unroll\n"
    "    for (u32 i = 0; i < 2; i++) {\n"
    "        float up = GATED \? sums[2 + i] : 0.0f;\n"
    "        value[i] = sums[half * 2 + i];\n"
    "        if (ROW_HAS_SCALE) value[i] = f32_mul(value[i], scale[half]);\n"
    "        if (ROW_HAS_SCALE && GATED) up = f32_mul(up, scale[1]);\n"
    "        value[i] = finish_sums(a, bias[half], bias[1], weight[i], value[i], up);\n"
    "        if (WEIGHT_ON_OUTPUT) value[i] = f32_mul(value[i], weight[i]);\n"
    "    }\n"
    "    return OUT == DTYPE_F16 \? f32_to_half2(value[0], value[1]) : f32_to_bf162(value[0], value[1]);\n"
    "}\n"
    "\n"
    "/* `about` is where what is known of the tile is. */\n"
    "template <class Words>\n"
    "DEVICE void finish_tile(const moer_matmul_args &a, const tile_sums &sums, Words &words, const tile_place &p, u32 about) {\n"
    "    const u32 warp = warp_index() & 3, group = warp_index() / 4, g = lane_index() >> 2, t = lane_index() & 3;\n"
    "    constexpr u32 halves = GATED \? 1 : 2, lane_words = halves * BLOCKS_OF_64; /* of a lane, in a row */\n"
    "    const u32 column = p.first_column + ((group * 4 + warp) * 4 + t) * lane_words * 2;\n"
    "    float scale[BLOCKS_OF_64][2], bias[BLOCKS_OF_64][2];\n"
    "#pragma unroll\n"
    "    for (u32 m = 0; m < BLOCKS_OF_64; m++)\n"
    "#pragma unroll\n"
    "        for (u32 half = 0; half < 2; half++) {\n"
    "            const u32 n = ((group * BLOCKS_OF_64 + m) * 4 + warp) * 16 + half * 8 + g;\n"
    "            scale[m][half] = ROW_HAS_SCALE \? row_scale(tile_weight_row(a, p, n)) : 1.0f;\n"
    "            bias[m][half] = BIAS \? load_value(UP_APART && is_up(n) \? a.up_bias : a.bias, (u64)p.expert * ROWS + column_row(tile_column(p.first_column, n), is_up(n)), BIAS) : 0.0f;\n"
    "        }\n"
    "#pragma unroll\n"
    "    for (u32 j = 0; j < MOST_ROWS / 8; j++) {\n"
    "        if (j * 8 >= p.rows) break;\n"
    "        const u32 row = j * 8 + g;\n"
    "        float weight[2];\n"
    "        u32 out[lane_words];\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 2; i++) weight[i] = WEIGHS && j * 8 + t * 2 + i < p.rows \? f32_from_bits(words[about + 4 + j * 8 + t * 2 + i]) : 1.0f;\n"
    "#pragma unroll\n"
    "        for (u32 m = 0; m < BLOCKS_OF_64; m++)\n"
    "#pragma unroll\n"
    "            for (u32 half = 0; half < halves; half++) out[m * halves + half] = matrix_transpose(finish_pair(a, sums[m][j], half, scale[m], bias[m], weight));\n"
    "        if (row >= p.rows || column >= COLUMNS) continue;\n"
    "        u32 *const to = (u32 *)((u16 *)a.out + (u64)(p.base + row) * COLUMNS + column);\n",
    "        if (lane_words == 4) store_16(to, u32x4{{out[0], out[1 % lane_words], out[2 % lane_words], out[3 % lane_words]}});\n"
    "        else if (lane_words == 2) store_8(to, u32x2{{out[0], out[1 % lane_words]}});\n"
    "        else *to = out[0];\n"
    "    }\n"
    "}\n"
    "\n"
    "template <class Words>\n"
    "DEVICE void consume(const moer_matmul_args &a, Words &words) {\n"
    "    tile_sums sums;\n"
    "    u32 stage = 0;\n"
    "#pragma unroll 1\n"
    "    for (u32 about = TILES_AT;; about = about + TILE_WORDS == TILES_END \? TILES_AT : about + TILE_WORDS) {\n"
    "        block_barrier_named(full_barrier(stage), THREADS);\n"
    "        const u32 rows = words[about + 2];\n"
    "        if (rows == 0) break;\n"
    "        const tile_place p = {words[about], words[about + 1], rows, words[about + 3]};\n"
    "        switch ((p.rows + 15) / 16) {\n"
    "        case 1: multiply_tile<16>(sums, words, stage); break;\n"
    "        case 2: multiply_tile<32>(sums, words, stage); break;\n"
    "#if MOST_ROWS >= 64\n"
    "        case 3: multiply_tile<48>(sums, words, stage); break;\n"
    "        case 4: multiply_tile<64>(sums, words, stage); break;\n"
    "#endif\n"
    "#if MOST_ROWS >= 128\n"
    "        case 5: multiply_tile<80>(sums, words, stage); break;\n"
    "        case 6: multiply_tile<96>(sums, words, stage); break;\n"
    "        case 7: multiply_tile<112>(sums, words, stage); break;\n"
    "        case 8: multiply_tile<128>(sums, words, stage); break;\n"
    "#endif\n"
    "#if MOST_ROWS >= 160\n"
    "        case 9: multiply_tile<144>(sums, words, stage); break;\n"
    "        case 10: multiply_tile<160>(sums, words, stage); break;\n"
    "#endif\n"
    "        }\n"
    "        finish_tile(a, sums, words, p, about);\n"
    "    }\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_grouped_warpgroups, THREADS, moer_matmul_args) {\n"
    "    DYNAMIC_SHARED_FOR_PRODUCTS(words);\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    if (warp_index() >= CONSUMERS / 32) {\n"
    "        release_registers<PRODUCER_REGISTERS>();\n"
    "        produce(a, words);\n"
    "    } else {\n"
    "        take_registers<CONSUMER_REGISTERS>();\n"
    "        consume(a, words);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_34[] = { /* down.cu */
    "/*\n"
    "  down.cu: the down matmul of a small batch, and the combine, in one kernel:\n"
    "  y[t] = sum over j of weights[t, j] * (down[e] @ h[row] + bias[e]), in the order of j; then what epilogue.h adds. Tokens of\n"
    "  padding get 0.\n"
    "\n"
    "  A block is 16 output columns of all experts: a warp takes a distinct expert and one of K_SPLIT parts of K, then others, as a\n"
    "  stream (stream.h), and leaves the sums of the experts' rows in shared memory. When all are there, a thread adds up one output column of\n"
    "  one token. So no partial result goes through global memory, nothing is atomic, and the order of every sum is fixed: a\n"
    "  token's result doesn't depend on the others in the batch.\n"
    "\n"
    "  Under dependent launch its blocks start while the kernel that computes h still runs. That one has waited for the maps, so\n"
    "  they are there; and they say which weights are needed: those are on their way when h is waited for.\n"
    "\n"
    "  Constants: those of tile.h (X is the dtype of h and y, ROWS the hidden size) and epilogue.h; BIAS (dtype, 0: none); K, slots\n"
    "  a token; WEIGHT_ON_INPUT: h has the router's weight already; K_SPLIT; MAX_PAIRS. Threads: any number of warps up to 16.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"tile.h\"\n"
    "#define STREAM_COPIES 0 /* the partial sums take the room */\n"
    "#include \"stream.h\"\n"
    "#include \"vector.h\"\n"
    "#include \"epilogue.h\"\n"
    "\n"
    "constexpr u32 PARTIAL_WORDS = K_SPLIT * MAX_PAIRS * 17;\n"
    "static_assert((PARTIAL_WORDS + 4 * MAX_PAIRS + 1) * 4 <= 49152, \"shared memory of a block\");\n"
    "\n"
    "/* Where a warp is in its work: part `item % K_SPLIT` of distinct expert item / K_SPLIT, the expert's rows of h from `base` on. */\n"
    "struct place {\n"
    "    u32 item, base, end_row;\n"
    "    tile_rows rows;\n"
    "    const u8 *h; /* of the lane's row */\n"
    "};\n"
    "\n"
    "/* Where there is no row: another, whose sums nobody uses, or null where multiplying costs time by the row. */\n"
    "DEVICE void find_h(const moer_down_args &a, place &p) {\n"
    "    const u32 wanted = p.base + (lane_index() >> 2), row = wanted < p.end_row \? wanted : p.base;\n"
    "    p.h = TENSOR_CORES || wanted < p.end_row \? (const u8 *)a.h + (u64)row * INNER * X_BYTES : 0;\n"
    "}\n"
    "\n"
    "DEVICE void enter_item(const moer_down_args &a, place &p, u32 expert, u32 base, u32 end_row) {\n"
    "    const u32 column = block_index_x() * 16 + (lane_index() >> 2);\n"
    "    p.base = base;\n"
    "    p.end_row = end_row;\n"
    "    p.rows.low = find_weight_row(a.weights, expert, column < ROWS \? column : ROWS - 1);\n"
    "    p.rows.high = find_weight_row(a.weights, expert, column + 8 < ROWS \? column + 8 : ROWS - 1);\n"
    "    find_h(a, p);\n"
    "}\n"
    "\n"
    "template <class Experts, class Offsets>\n"
    "DEVICE void advance(const moer_down_args &a, Experts &experts, Offsets &offsets, place &p, u32 total) {\n"
    "    p.base += 8;\n"
    "    if (p.base < p.end_row) return find_h(a, p);\n"
    "    p.item += block_threads() / 32;\n"
    "    const u32 d = p.item / K_SPLIT;\n"
    "    if (p.item < total) enter_item(a, p, (u32)experts[d], (u32)offsets[d], (u32)offsets[d + 1]);\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_down, 512, moer_down_args) {\n"
    "    SHARED(float, partial, PARTIAL_WORDS); /* [part][row][output column], padded against bank conflicts */\n"
    "    SHARED(int, experts, MAX_PAIRS);     /* the maps */\n"
    "    SHARED(int, offsets, MAX_PAIRS + 1);\n"
    "    SHARED(int, pair_row, MAX_PAIRS);\n"
    "    SHARED(float, pair_weight, MAX_PAIRS);\n"
    "    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, tile = block_index_x();\n"
    "    /* The maps, with what lies beyond the last distinct expert and isn't used; and a warp's first item at once, since loads that wait for each other would be a\n"
    "       good part of a step with few tokens. */\n"
    "    place next = {};\n"
    "    next.item = warp_index();\n"
    "    const u32 d = next.item / K_SPLIT;\n"
    "    weight_stream<X_LOADED, K_SPLIT> stream;\n"
    "    const stream_places places = {};\n"
    "    const held_activations<K_SPLIT> held = {};\n"
    "    const u32 num_distinct = load_fresh_4(a.distinct_count), total = num_distinct * K_SPLIT;\n"
    "    u32 expert = 0, base = 0, end_row = 0;\n",
    "    if (d < a.max_distinct) {\n"
    "        expert = load_fresh_4(a.distinct_experts + d);\n"
    "        base = load_fresh_4(a.distinct_offsets + d);\n"
    "        end_row = load_fresh_4(a.distinct_offsets + d + 1);\n"
    "    }\n"
    "    if (thread_index() == 0) offsets[0] = 0;\n"
    "    for (u32 i = thread_index(); i < a.max_distinct; i += block_threads()) {\n"
    "        experts[i] = (int)load_fresh_4(a.distinct_experts + i);\n"
    "        offsets[i + 1] = (int)load_fresh_4(a.distinct_offsets + i + 1);\n"
    "    }\n"
    "    for (u32 pair = thread_index(); pair < a.num_tokens * K; pair += block_threads()) pair_row[pair] = (int)load_fresh_4(a.pair_to_row + pair);\n"
    "    if (next.item < total) {\n"
    "        enter_item(a, next, expert, base, end_row);\n"
    "        start_weights(stream, places, next.rows, next.item % K_SPLIT);\n"
    "    }\n"
    "    block_barrier();\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    if (next.item < total) start_activations(stream, next.h, next.item % K_SPLIT);\n"
    "    for (u32 pair = thread_index(); pair < a.num_tokens * K; pair += block_threads()) pair_weight[pair] = WEIGHT_ON_INPUT \? 1.0f : router_weight(a.router_weights, pair);\n"
    "#pragma unroll 1\n"
    "    while (next.item < total) {\n"
    "        const place here = next;\n"
    "        const u32 part = here.item % K_SPLIT;\n"
    "        const u8 *h[1] = {here.h};\n"
    "        float sums[1][4];\n"
    "        advance(a, experts, offsets, next, total);\n"
    "        multiply_tile(sums, stream, places, held, here.rows, h, part, next.item < total, next.rows, next.h, next.item % K_SPLIT);\n"
    "        scale_rows<1>(sums, ROW_HAS_SCALE \? row_scale(here.rows.low) : 1.0f, ROW_HAS_SCALE \? row_scale(here.rows.high) : 1.0f);\n"
    "#pragma unroll\n"
    "        for (u32 i = 0; i < 4; i++) {\n"
    "            const u32 token_row = here.base + t * 2 + (i & 1);\n"
    "            if (token_row < here.end_row) partial[(part * MAX_PAIRS + token_row) * 17 + g + (i >> 1) * 8] = sums[0][i];\n"
    "        }\n"
    "    }\n"
    "    block_barrier();\n"
    "\n"
    "    const u32 num_valid = valid_tokens(a.epilogue.num_valid_tokens, a.num_tokens);\n"
    "    for (u32 i = thread_index(); i < a.num_tokens * 16; i += block_threads()) {\n"
    "        const u32 token = i / 16, c = i % 16, column = tile * 16 + c;\n"
    "        if (column >= ROWS) continue;\n"
    "        const u64 at = (u64)token * ROWS + column;\n"
    "        float y[1] = {0.0f};\n"
    "        if (token < num_valid) {\n"
    "            for (u32 j = 0; j < K; j++) {\n"
    "                const u32 pair = token * K + j;\n"
    "                const int row = pair_row[pair];\n"
    "                if (row < 0) {\n"
    "                    add_identity<X>(a.epilogue, a.router_weights, pair, at, y);\n"
    "                    continue;\n"
    "                }\n"
    "                float value = partial[(u32)row * 17 + c];\n"
    "#pragma unroll\n"
    "                for (u32 part = 1; part < K_SPLIT; part++) value = f32_add(value, partial[(part * MAX_PAIRS + (u32)row) * 17 + c]);\n"
    "                value = scale_codes(value);\n"
    "                if (BIAS) value = f32_add(value, load_value(a.bias, (u64)(u32)a.row_to_expert[row] * ROWS + column, BIAS));\n"
    "                y[0] = f32_fma(pair_weight[pair], value, y[0]);\n"
    "            }\n"
    "            add_shared_and_residual<X>(a.epilogue, token, at, y);\n"
    "        }\n"
    "        store_value(a.y, at, X, y[0]);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_35[] = { /* combine.cu */
    "/*\n"
    "  combine.cu: y[t] = sum over j of weights[t, j] * rows[pair_to_row[t, j]], in the order of j, in f32; then what epilogue.h\n"
    "  adds. Tokens of padding get 0. No atomics: a thread owns VECTOR output columns of a token.\n"
    "\n"
    "  Constants: those of epilogue.h; HIDDEN; K, slots a token; ROWS_DTYPE, OUT (dtypes); WEIGHT_ON_INPUT: the rows have the\n"
    "  router's weight already, as they may by the arguments; VECTOR, columns a thread, a divisor of HIDDEN.\n"
    "  Grid: (blocks of 128 threads over HIDDEN / VECTOR, tokens in steps of the grid's height).\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"vector.h\"\n"
    "#include \"epilogue.h\"\n"
    "\n"
    "#define BATCH (K < 8 \? K : 8)\n"
    "\n"
    "KERNEL(moe_route_combine, 128, moer_combine_args) {\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 column = (block_index_x() * 128 + thread_index()) * VECTOR;\n"
    "    if (column >= HIDDEN) return;\n"
    "    const u32 num_valid = valid_tokens(a.epilogue.num_valid_tokens, a.num_tokens);\n"
    "    for (u32 token = block_index_y(); token < a.num_tokens; token += grid_blocks_y()) {\n"
    "        const u64 at = (u64)token * HIDDEN + column;\n"
    "        float sum[VECTOR];\n"
    "#pragma unroll\n"
    "        for (u32 v = 0; v < VECTOR; v++) sum[v] = 0.0f;\n"
    "        if (token < num_valid) {\n"
    "#pragma unroll 1\n"
    "            for (u32 first = 0; first < K; first += BATCH) { /* the batch's loads don't wait for one another */\n"
    "                u32 row[BATCH];\n"
    "                float weight[BATCH], value[BATCH][VECTOR];\n"
    "#pragma unroll\n"
    "                for (u32 j = 0; j < BATCH; j++) {\n"
    "                    const u32 pair = token * K + (K % BATCH == 0 || first + j < K \? first + j : K - 1);\n"
    "                    row[j] = a.pair_to_row \? (u32)a.pair_to_row[pair] : pair;\n"
    "                    weight[j] = WEIGHT_ON_INPUT || a.weighted_rows \? 1.0f : router_weight(a.router_weights, pair);\n"
    "                }\n"
    "#pragma unroll\n"
    "                for (u32 j = 0; j < BATCH; j++) /* a row that doesn't exist: another one, which isn't used */\n"
    "                    load_vector<ROWS_DTYPE, VECTOR>(a.rows, (u64)(row[j] < a.num_rows \? row[j] : 0) * HIDDEN + column, value[j]);\n"
    "#pragma unroll\n"
    "                for (u32 j = 0; j < BATCH; j++) {\n"
    "                    if (K % BATCH != 0 && first + j >= K) continue;\n"
    "                    if (row[j] >= a.num_rows) {\n"
    "                        add_identity<OUT>(a.epilogue, a.router_weights, token * K + first + j, at, sum);\n"
    "                        continue;\n"
    "                    }\n"
    "#pragma unroll\n"
    "                    for (u32 v = 0; v < VECTOR; v++) sum[v] = f32_fma(weight[j], value[j][v], sum[v]);\n"
    "                }\n"
    "            }\n"
    "            add_shared_and_residual<OUT>(a.epilogue, token, at, sum);\n"
    "        }\n"
    "        store_vector<OUT, VECTOR>(a.y, at, sum);\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_36[] = { /* expand.cu */
    "/*\n"
    "  expand.cu: rows[r] = x[row_to_pair[r] / k], zeros where the row doesn't exist: the activations in the order of the maps,\n"
    "  for matmuls that can't gather for themselves. A pure copy: the dtype is only a size.\n"
    "\n"
    "  Constants: ROW_BYTES of x; K, slots a token; UNIT, bytes of one access: 16, 4 or 2, a divisor of ROW_BYTES.\n"
    "  Grid: (blocks of 128 threads over ROW_BYTES / UNIT, rows in steps of the grid's height).\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "\n"
    "KERNEL(moe_route_expand, 128, moer_expand_args) {\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 unit = block_index_x() * 128 + thread_index();\n"
    "    if (unit >= ROW_BYTES / UNIT) return;\n"
    "    for (u32 row = block_index_y(); row < a.num_pairs; row += grid_blocks_y()) {\n"
    "        const u32 pair = (u32)a.row_to_pair[row];\n"
    "        const u8 *from = (const u8 *)a.x + (u64)(pair / K) * ROW_BYTES + unit * UNIT;\n"
    "        u8 *to = (u8 *)a.rows + (u64)row * ROW_BYTES + unit * UNIT;\n"
    "        const bool exists = pair < a.num_pairs;\n"
    "        if (UNIT == 16) {\n"
    "            u32x4 v = {{0, 0, 0, 0}};\n"
    "            if (exists) v = load_16(from);\n"
    "            store_16(to, v);\n"
    "        } else if (UNIT == 4) {\n"
    "            *(u32 *)to = exists \? load_4(from) : 0;\n"
    "        } else {\n"
    "            *(u16 *)to = exists \? load_2(from) : 0;\n"
    "        }\n"
    "    }\n"
    "}\n",
    NULL};
static const char *const moer_source_37[] = { /* dispatch.cu */
    "/*\n"
    "  dispatch.cu: what each of NUM_RANKS ranks gets of a batch: a token is a row of every rank that has an expert of it, once;\n"
    "  a slot that such a rank serves is a slot row. Rows of a rank are in the order of tokens, its slot rows in that of pairs.\n"
    "\n"
    "  One launch, for batches up to a few thousand pairs. A block counts all pairs, to know where its own begin: reading the ids again costs\n"
    "  less than a second launch, or waiting for other blocks. Larger ones are dispatch_large.cu's. Grid and constants: dispatch.h.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"dispatch.h\"\n"
    "\n"
    "KERNEL(moe_route_dispatch, THREADS, moer_dispatch_args) {\n"
    "    SHARED(u32, rank, THREADS);               /* of the chunk's pairs */\n"
    "    SHARED(u32, row_of, THREADS);             /* likewise, for the first slot of a token at a rank */\n"
    "    SHARED(u32, slot_of, THREADS);\n"
    "    SHARED(u32, total, NUM_RANKS * 2);        /* rows and slot rows of each rank */\n"
    "    SHARED(u32, before, NUM_RANKS * 2);       /* those of tokens before the block's */\n"
    "    SHARED(u32, start, NUM_RANKS * 2 + 2);    /* where they begin */\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 i = thread_index(), num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);\n"
    "    const token_share share = find_share(a, block_index_y(), grid_blocks_y());\n"
    "    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) total[r] = before[r] = 0;\n"
    "    for (u32 token = 0; token < num_valid; token += CHUNK_TOKENS) {\n"
    "        find_ranks(a, rank, token, num_valid, num_valid);\n"
    "        if (i >= CHUNK_PAIRS || rank[i] == NOWHERE) continue;\n"
    "        const bool leads = leader(rank, i) == i;\n"
    "        count_pair(total, rank[i], leads);\n"
    "        if (token + i / K < share.begin) count_pair(before, rank[i], leads);\n"
    "    }\n"
    "    block_barrier();\n"
    "    send_share(a, share, num_valid, rank, row_of, slot_of, total, before, start);\n"
    "}\n",
    NULL};
static const char *const moer_source_38[] = { /* dispatch_large.cu */
    "/*\n"
    "  dispatch_large.cu: dispatch.cu's outputs, for batches whose pairs are too many to be counted by every block, in two launches:\n"
    "\n"
    "  moe_route_dispatch_count    a block counts the rows and slot rows of its share of consecutive tokens, by rank\n"
    "  moe_route_dispatch_scatter  every block adds up the counts of all shares and so knows where its own rows begin, and writes them\n"
    "\n"
    "  Both have the same shares. Adding up costs a block shares * NUM_RANKS * 2 loads from L2, all independent; the host keeps them few.\n"
    "  Grid (of the count: shares along x) and constants: dispatch.h.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"dispatch.h\"\n"
    "\n"
    "KERNEL(moe_route_dispatch_count, THREADS, moer_dispatch_args) {\n"
    "    SHARED(u32, rank, THREADS);           /* of the chunk's pairs */\n"
    "    SHARED(u32, counts, NUM_RANKS * 2);\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 i = thread_index(), num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens);\n"
    "    const token_share share = find_share(a, block_index_x(), grid_blocks_x());\n"
    "    const u32 end = share.end < num_valid \? share.end : num_valid;\n"
    "    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) counts[r] = 0;\n"
    "    for (u32 token = share.begin; token < end; token += CHUNK_TOKENS) {\n"
    "        find_ranks(a, rank, token, end, num_valid);\n"
    "        if (i < CHUNK_PAIRS && rank[i] != NOWHERE) count_pair(counts, rank[i], leader(rank, i) == i);\n"
    "    }\n"
    "    block_barrier();\n"
    "    for (u32 r = i; r < NUM_RANKS * 2; r += THREADS) a.block_counts[(u64)block_index_x() * NUM_RANKS * 2 + r] = (int)counts[r];\n"
    "}\n"
    "\n"
    "/* The counts of all shares, and of those before this one: threads of one entry take every WAYS-th share. */\n"
    "template <class Counts>\n"
    "DEVICE void add_shares(const moer_dispatch_args &a, Counts &total, Counts &before) {\n"
    "    constexpr u32 ENTRIES = NUM_RANKS * 2, WAYS = ENTRIES < THREADS \? THREADS / ENTRIES : 1;\n"
    "    for (u32 r = thread_index(); r < ENTRIES; r += THREADS) total[r] = before[r] = 0;\n"
    "    block_barrier();\n"
    "    for (u32 r = thread_index(); r < ENTRIES * WAYS; r += THREADS) {\n"
    "        u32 all = 0, earlier = 0;\n"
    "        for (u32 b = r / ENTRIES; b < grid_blocks_y(); b += 8 * WAYS) { /* no branch between the loads: they are under way together */\n"
    "            u32 count[8];\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < 8; i++) count[i] = b + i * WAYS < grid_blocks_y() \? load_4(a.block_counts + (u64)(b + i * WAYS) * ENTRIES + r % ENTRIES) : 0;\n"
    "#pragma unroll\n"
    "            for (u32 i = 0; i < 8; i++) {\n"
    "                all += count[i];\n"
    "                earlier += b + i * WAYS < block_index_y() \? count[i] : 0;\n"
    "            }\n"
    "        }\n"
    "        shared_atomic_add(total, r % ENTRIES, all);\n"
    "        shared_atomic_add(before, r % ENTRIES, earlier);\n"
    "    }\n"
    "    block_barrier();\n"
    "}\n"
    "\n"
    "KERNEL(moe_route_dispatch_scatter, THREADS, moer_dispatch_args) {\n"
    "    SHARED(u32, rank, THREADS);               /* as in dispatch.cu */\n"
    "    SHARED(u32, row_of, THREADS);\n"
    "    SHARED(u32, slot_of, THREADS);\n"
    "    SHARED(u32, total, NUM_RANKS * 2);\n"
    "    SHARED(u32, before, NUM_RANKS * 2);\n"
    "    SHARED(u32, start, NUM_RANKS * 2 + 2);\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    add_shares(a, total, before);\n"
    "    send_share(a, find_share(a, block_index_y(), grid_blocks_y()), valid_tokens(a.num_valid_tokens, a.num_tokens), rank, row_of, slot_of, total, before, start);\n"
    "}\n",
    NULL};
static const char *const moer_source_39[] = { /* slots.cu */
    "/*\n"
    "  slots.cu: a slot row for each pair of a local expert, numbered in the order of pairs from the start of its source's rows:\n"
    "  how the results of tokens that other ranks sent lie, to be sent back. A block goes through the pairs of one source.\n"
    "\n"
    "  Constants: K, slots a token; FIRST_EXPERT, LOCAL_EXPERTS and those of placement.h. Grid: sources.\n"
    "*/\n"
    "#include \"device.h\"\n"
    "#include \"args.h\"\n"
    "#include \"tokens.h\"\n"
    "#include \"placement.h\"\n"
    "\n"
    "#define THREADS 512\n"
    "#define WARPS (THREADS / 32)\n"
    "\n"
    "KERNEL(moe_route_slots, THREADS, moer_slots_args) {\n"
    "    SHARED(u32, counts, 2 * WARPS); /* local pairs of each warp, in this step and the one before */\n"
    "    wait_for_previous_kernels();\n"
    "    let_next_kernel_start();\n"
    "    const u32 lane = lane_index(), num_valid = valid_tokens(a.num_valid_tokens, a.num_tokens), source = block_index_x();\n"
    "    u32 next = 0, half = 0;\n"
    "    for (u32 step = 0; step < a.source_pairs; step += THREADS, half ^= 1) {\n"
    "        const bool exists = step + thread_index() < a.source_pairs;\n"
    "        const u32 pair = source * a.source_pairs + step + thread_index();\n"
    "        bool local = false;\n"
    "        if (exists && pair / K < num_valid) local = physical_expert(a.expert_map, (u32)a.ids[pair], pair / K) - FIRST_EXPERT < LOCAL_EXPERTS;\n"
    "        const u32 peers = warp_ballot(local);\n"
    "        if (lane == 0) counts[half * WARPS + warp_index()] = popcount(peers);\n"
    "        block_barrier(); /* whoever writes this half again has passed the next one, which all reach after reading it */\n"
    "        u32 number = next + popcount(peers & ((1u << lane) - 1));\n"
    "        for (u32 w = 0; w < WARPS; w++) {\n"
    "            const u32 count = counts[half * WARPS + w];\n"
    "            if (w < warp_index()) number += count;\n"
    "            next += count;\n"
    "        }\n"
    "        if (exists) a.pair_to_slot_row[pair] = local && number < a.source_rows \? (int)(source * a.source_rows + number) : -1;\n"
    "    }\n"
    "}\n",
    NULL};
static const moer_source moer_sources[] = {
    {"device.h", moer_source_0},
    {"args.h", moer_source_1},
    {"scan.h", moer_source_2},
    {"tokens.h", moer_source_3},
    {"placement.h", moer_source_4},
    {"scores.h", moer_source_5},
    {"activations.h", moer_source_6},
    {"select.h", moer_source_7},
    {"formats.h", moer_source_8},
    {"packed.h", moer_source_9},
    {"gguf.h", moer_source_10},
    {"values.h", moer_source_11},
    {"sums.h", moer_source_12},
    {"tile.h", moer_source_13},
    {"held.h", moer_source_14},
    {"copied.h", moer_source_15},
    {"stream.h", moer_source_16},
    {"unpacked.h", moer_source_17},
    {"grouped.h", moer_source_18},
    {"output.h", moer_source_19},
    {"passes.h", moer_source_20},
    {"parts.h", moer_source_21},
    {"vector.h", moer_source_22},
    {"epilogue.h", moer_source_23},
    {"dispatch.h", moer_source_24},
    {"sort.h", moer_source_25},
    {"route.cu", moer_source_26},
    {"topk.cu", moer_source_27},
    {"maps.cu", moer_source_28},
    {"maps_cub.cu", moer_source_29},
    {"matmul.cu", moer_source_30},
    {"matmul_bulk.cu", moer_source_31},
    {"grouped.cu", moer_source_32},
    {"grouped_warpgroups.cu", moer_source_33},
    {"down.cu", moer_source_34},
    {"combine.cu", moer_source_35},
    {"expand.cu", moer_source_36},
    {"dispatch.cu", moer_source_37},
    {"dispatch_large.cu", moer_source_38},
    {"slots.cu", moer_source_39},
    {NULL, NULL}};
static const char moer_sources_digest[] = "4f5ff4b85f2bd9ed55705948fc66af499848eec1d23d42c3d02e18502803fbea";

/* ---- src/base.c ---- */
/*
  base.c: memory, messages, checked sizes, status names and the version: what every other part uses. Nothing that knows an
  operating system, CUDA or experts belongs here.
*/

static void *moer_alloc(moe_route_context *context, size_t size) {
    void *memory;
    size_t bytes = size ? size : 1;
    if (context->allocator.alloc) memory = context->allocator.alloc(bytes, context->allocator.user);
    else memory = malloc(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void moer_free(moe_route_context *context, void *memory) {
    if (!memory) return;
    if (context->allocator.free) context->allocator.free(memory, context->allocator.user);
    else free(memory);
}

static int moer_size_mul(size_t a, size_t b, size_t *result) {
    if (a != 0 && b > (size_t)-1 / a) return 0;
    *result = a * b;
    return 1;
}

static uint32_t moer_divide_up(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

static int moer_size_add(size_t a, size_t b, size_t *result) {
    if (b > (size_t)-1 - a) return 0;
    *result = a + b;
    return 1;
}

static int moer_append(char *buffer, size_t size, const char *format, ...) {
    size_t used = strlen(buffer);
    int length;
    va_list arguments;
    va_start(arguments, format);
    length = vsnprintf(buffer + used, size - used, format, arguments);
    va_end(arguments);
    return length >= 0 && (size_t)length < size - used;
}

/* The formatted text from malloc; NULL when there is no memory. */
static char *moer_format(const char *format, va_list arguments) {
    va_list again;
    char *text;
    int length;
    va_copy(again, arguments);
    length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    if (length < 0) return NULL;
    text = (char *)malloc((size_t)length + 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, arguments);
    return text;
}

static const char moer_text_lost[] = "the call failed, and there was no memory left for a message that says why";

/* The context's logger, called without its mutex: it may call moe_route_message. */
static void moer_log_text(moe_route_context *context, moe_route_log_level level, const char *text) {
    if (context->logger.log) context->logger.log(level, text, context->logger.user);
}

static void moer_log(moe_route_context *context, moe_route_log_level level, const char *format, ...) {
    va_list arguments;
    char *text;
    if (!context->logger.log) return;
    va_start(arguments, format);
    text = moer_format(format, arguments);
    va_end(arguments);
    if (text) moer_log_text(context, level, text);
    free(text);
}

static moe_route_status moer_fail(moe_route_context *context, moe_route_status status, const char *format, ...) {
    va_list arguments;
    char *text, *replaced;
    va_start(arguments, format);
    text = moer_format(format, arguments);
    va_end(arguments);
    /* logged before it is stored, from where another thread's failure may free it */
    moer_log_text(context, MOE_ROUTE_LOG_ERROR, text ? text : moer_text_lost);
    moer_mutex_lock(&context->mutex);
    replaced = context->message;
    context->message = text;
    context->message_lost = text == NULL;
    moer_mutex_unlock(&context->mutex);
    free(replaced);
    return status;
}

/* Copies as much of a text as fits, terminated, and returns its full length. */
static size_t moer_copy_text(const char *from, char *text, size_t size) {
    size_t length = strlen(from);
    if (size > 0) {
        size_t copied = length < size ? length : size - 1;
        memcpy(text, from, copied);
        text[copied] = '\0';
    }
    return length;
}

MOE_ROUTE_API size_t moe_route_message(const moe_route_context *context, char *text, size_t size) {
    moer_mutex *mutex;
    size_t length;
    if (!context) return moer_copy_text("out of memory", text, size);
    mutex = (moer_mutex *)&context->mutex; /* reading a message changes nothing that the caller can see */
    moer_mutex_lock(mutex);
    if (context->message) length = moer_copy_text(context->message, text, size);
    else length = moer_copy_text(context->message_lost ? moer_text_lost : "", text, size);
    moer_mutex_unlock(mutex);
    return length;
}

MOE_ROUTE_API const char *moe_route_version(void) { return MOE_ROUTE_VERSION; }

MOE_ROUTE_API const char *moe_route_status_name(moe_route_status status) {
    switch (status) {
        case MOE_ROUTE_OK: return "OK";
        case MOE_ROUTE_ERROR_ARGUMENT: return "ERROR_ARGUMENT";
        case MOE_ROUTE_ERROR_MEMORY: return "ERROR_MEMORY";
        case MOE_ROUTE_ERROR_NO_DEVICE: return "ERROR_NO_DEVICE";
        case MOE_ROUTE_ERROR_UNSUPPORTED: return "ERROR_UNSUPPORTED";
        case MOE_ROUTE_ERROR_NO_COMPILER: return "ERROR_NO_COMPILER";
        case MOE_ROUTE_ERROR_COMPILE: return "ERROR_COMPILE";
        case MOE_ROUTE_ERROR_DRIVER: return "ERROR_DRIVER";
        case MOE_ROUTE_ERROR_NOT_PREPARED: return "ERROR_NOT_PREPARED";
        case MOE_ROUTE_ERROR_FORKED: return "ERROR_FORKED";
    }
    return "unknown status";
}

/* ---- src/platform_posix.c ---- */
/*
  platform_posix.c: threads, the clock, the environment, shared libraries, the locale and files of POSIX systems. Thin
  functions without policy: what a cache folder must look like, or where NVRTC is looked for, stands elsewhere.

  Only what a strict C99 compiler declares is called by name, because a program may have included system headers before
  this file can ask for more. The few functions beyond that are reached through moer_hidden.
*/

#if !defined(_WIN32)

#include <locale.h>
#include <time.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

/* glibc hides the plain names in strict modes and always has the others. */
#if defined(O_NOFOLLOW)
#define MOER_O_NOFOLLOW O_NOFOLLOW
#elif defined(__O_NOFOLLOW)
#define MOER_O_NOFOLLOW __O_NOFOLLOW
#else
#define MOER_O_NOFOLLOW 0
#endif
#if defined(O_CLOEXEC)
#define MOER_O_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC)
#define MOER_O_CLOEXEC __O_CLOEXEC
#else
#define MOER_O_CLOEXEC 0
#endif
#if defined(O_DIRECTORY)
#define MOER_O_DIRECTORY O_DIRECTORY
#elif defined(__O_DIRECTORY)
#define MOER_O_DIRECTORY __O_DIRECTORY
#else
#define MOER_O_DIRECTORY 0
#endif

static void moer_mutex_init(moer_mutex *mutex) { pthread_mutex_init(mutex, NULL); }
static void moer_mutex_destroy(moer_mutex *mutex) { pthread_mutex_destroy(mutex); }
static void moer_mutex_lock(moer_mutex *mutex) { pthread_mutex_lock(mutex); }
static void moer_mutex_unlock(moer_mutex *mutex) { pthread_mutex_unlock(mutex); }
static void moer_condition_init(moer_condition *condition) { pthread_cond_init(condition, NULL); }
static void moer_condition_destroy(moer_condition *condition) { pthread_cond_destroy(condition); }
static void moer_condition_wait(moer_condition *condition, moer_mutex *mutex) { pthread_cond_wait(condition, mutex); }
static void moer_condition_broadcast(moer_condition *condition) { pthread_cond_broadcast(condition); }

static void *moer_thread_run(void *user) {
    moer_thread *thread = (moer_thread *)user;
    thread->function(thread->user);
    return NULL;
}

static int moer_thread_start(moer_thread *thread, void (*function)(void *user), void *user) {
    thread->function = function;
    thread->user = user;
    return pthread_create(&thread->handle, NULL, moer_thread_run, thread) == 0;
}

static void moer_thread_join(moer_thread *thread) { pthread_join(thread->handle, NULL); }

static uint32_t moer_processors(void) {
#if defined(_SC_NPROCESSORS_ONLN)
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 1 ? (uint32_t)count : 1;
#else
    return 1;
#endif
}

static double moer_milliseconds(void) {
#if defined(CLOCK_MONOTONIC)
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
#else
    struct timeval now;
    gettimeofday(&now, NULL);
    return (double)now.tv_sec * 1e3 + (double)now.tv_usec * 1e-3;
#endif
}

static long moer_process_id(void) { return (long)getpid(); }

static const char *moer_environment(const char *name, char *value, size_t size) {
    const char *found;
    if (getuid() != geteuid() || getgid() != getegid()) return NULL;
#if defined(AT_SECURE)
    if (getauxval(AT_SECURE)) return NULL; /* file capabilities, too */
#endif
    found = getenv(name);
    if (!found || !found[0]) return NULL;
    snprintf(value, size, "%s", found);
    return value;
}

static void moer_system_error(char *text, size_t size) { snprintf(text, size, "%s", strerror(errno)); }
static int moer_system_error_is_absence(void) { return errno == ENOENT || errno == ENOTDIR; }

static void *moer_library_open(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void *moer_library_loaded(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); }

static moer_function moer_library_symbol(void *library, const char *name) {
    void *address = dlsym(library, name);
    moer_function function = NULL;
    memcpy(&function, &address, sizeof function);
    return function;
}

static void moer_library_error(char *text, size_t size) {
    const char *error = dlerror();
    snprintf(text, size, "%s", error ? error : "unknown reason");
}

/* A function of the C library that strict C99 doesn't declare; NULL when there is none. */
static moer_function moer_hidden(const char *name) {
    void *program = dlopen(NULL, RTLD_NOW | RTLD_LOCAL);
    moer_function function = program ? moer_library_symbol(program, name) : NULL;
    if (program) dlclose(program);
    return function;
}

static int moer_library_folder(moer_function function, char *folder, size_t size) {
    struct { /* Dl_info */
        const char *file;
        void *base;
        const char *symbol;
        void *symbol_address;
    } info;
    int (*address_info)(const void *, void *) = (int (*)(const void *, void *))moer_hidden("dladdr");
    void *address;
    memcpy(&address, &function, sizeof address);
    memset(&info, 0, sizeof info);
    return address_info && address_info(address, &info) && info.file && moer_text_set(folder, size, info.file) &&
           moer_path_parent(folder);
}

static int moer_executable_folder(char *folder, size_t size) {
    ssize_t (*read_link)(const char *, char *, size_t) =
        (ssize_t(*)(const char *, char *, size_t))moer_hidden("readlink");
    ssize_t length = read_link ? read_link("/proc/self/exe", folder, size) : -1;
    if (length <= 0 || (size_t)length >= size) return 0;
    folder[length] = '\0';
    return moer_path_parent(folder);
}

/* NVRTC before 12.4 sets the whole process's LC_NUMERIC to "C" and leaves it. The first of the threads that compile at once
   keeps what it was, and the last puts it back. */
static pthread_mutex_t moer_locale_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned moer_locale_users;
static char moer_locale_numeric[128]; /* empty: unknown */

static void moer_locale_keep(void) {
    const char *name;
    moer_mutex_lock(&moer_locale_mutex);
    if (moer_locale_users++ == 0) {
        name = setlocale(LC_NUMERIC, NULL);
        if (!name || !moer_text_set(moer_locale_numeric, sizeof moer_locale_numeric, name)) moer_locale_numeric[0] = '\0';
    }
    moer_mutex_unlock(&moer_locale_mutex);
}

static void moer_locale_put_back(void) {
    const char *name;
    moer_mutex_lock(&moer_locale_mutex);
    if (--moer_locale_users == 0 && moer_locale_numeric[0]) {
        name = setlocale(LC_NUMERIC, NULL);
        if (name && strcmp(name, "C") == 0 && strcmp(name, moer_locale_numeric) != 0) setlocale(LC_NUMERIC, moer_locale_numeric);
    }
    moer_mutex_unlock(&moer_locale_mutex);
}

/* locale_t is a pointer in every C library that NVRTC runs with. */
static void moer_locale_begin(moer_locale *locale) {
#if defined(LC_ALL_MASK)
    const int mask = LC_ALL_MASK;
#else
    const int mask = 1 << LC_NUMERIC; /* the categories left out come from "C" as well */
#endif
    void *(*new_locale)(int, const char *, void *) = (void *(*)(int, const char *, void *))moer_hidden("newlocale");
    void *(*use_locale)(void *) = (void *(*)(void *))moer_hidden("uselocale");
    moer_locale_keep();
    locale->saved = locale->neutral = NULL;
    if (!new_locale || !use_locale) return;
    locale->neutral = new_locale(mask, "C", NULL);
    if (locale->neutral) locale->saved = use_locale(locale->neutral);
}

static void moer_locale_end(const moer_locale *locale) {
    void *(*use_locale)(void *) = (void *(*)(void *))moer_hidden("uselocale");
    void (*free_locale)(void *) = (void (*)(void *))moer_hidden("freelocale");
    if (locale->saved) use_locale(locale->saved);
    if (locale->neutral && free_locale) free_locale(locale->neutral);
    moer_locale_put_back();
}

static int moer_home_folder(char *folder, size_t size) {
    typedef int (*password_entry)(uid_t, struct passwd *, char *, size_t, struct passwd **);
    password_entry get_entry;
    struct passwd entry, *found = NULL;
    char text[8192];
    const char *home = moer_environment("HOME", text, sizeof text);
    if (home && home[0] == '/' && home[1] != '\0') return moer_text_set(folder, size, home);
    get_entry = (password_entry)moer_hidden("getpwuid_r");
    if (!get_entry || get_entry(geteuid(), &entry, text, sizeof text, &found) != 0) return 0;
    if (!found || !found->pw_dir) return 0;
    return found->pw_dir[0] == '/' && found->pw_dir[1] != '\0' && moer_text_set(folder, size, found->pw_dir);
}

static int moer_path_is_separator(char character) { return character == '/'; }
static int moer_path_is_absolute(const char *path) { return path[0] == '/'; }

static int moer_path_absolute(const char *path, char *absolute, size_t size) {
    if (moer_path_is_absolute(path)) return moer_text_set(absolute, size, path);
    return getcwd(absolute, size) && moer_append(absolute, size, "/%s", path);
}

static uint64_t moer_random(void) {
    struct timeval now;
    uint64_t value = 0;
    int file = open("/dev/urandom", O_RDONLY | MOER_O_CLOEXEC);
    if (file >= 0) {
        ssize_t count = read(file, &value, sizeof value);
        close(file);
        if (count == (ssize_t)sizeof value) return value;
    }
    gettimeofday(&now, NULL);
    value ^= ((uint64_t)now.tv_sec << 20) ^ (uint64_t)now.tv_usec ^ ((uint64_t)getpid() << 40) ^
             (uint64_t)(uintptr_t)&now;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static void moer_info_of_stat(const struct stat *status, moer_file_info *info) {
    memset(info, 0, sizeof *info);
    if (S_ISREG(status->st_mode)) info->kind = MOER_PATH_FILE;
    else if (S_ISDIR(status->st_mode)) info->kind = MOER_PATH_FOLDER;
    info->size = status->st_size > 0 ? (uint64_t)status->st_size : 0;
    info->modified = (int64_t)status->st_mtime;
    if (status->st_uid == geteuid()) info->owner = MOER_OWNER_SELF;
    else if (status->st_uid == 0) info->owner = MOER_OWNER_SYSTEM;
    info->writable_by_others = (status->st_mode & 022) != 0;
}

static moer_path_kind moer_path_inspect(const char *path) {
    struct stat status;
    moer_file_info info;
    if (stat(path, &status) != 0) return MOER_PATH_OTHER;
    moer_info_of_stat(&status, &info);
    return info.kind;
}

/* Without waiting, should the name turn out to be a pipe, and without side effects on a terminal. */
static int moer_open(const char *path, int flags, int mode) {
    int file;
    do {
        file = open(path, flags | MOER_O_CLOEXEC | O_NONBLOCK | O_NOCTTY, mode);
    } while (file < 0 && errno == EINTR);
    return file;
}

static moer_file moer_file_open(const char *path, int follow) {
    return moer_open(path, O_RDONLY | (follow ? 0 : MOER_O_NOFOLLOW), 0);
}

static moer_file moer_file_create(const char *path, int mode) {
    return moer_open(path, O_WRONLY | O_CREAT | O_EXCL | MOER_O_NOFOLLOW, mode);
}

static int moer_file_inspect(moer_file file, moer_file_info *info) {
    struct stat status;
    if (fstat(file, &status) != 0) return 0;
    moer_info_of_stat(&status, info);
    return 1;
}

static long moer_file_read(moer_file file, void *data, size_t size) {
    ssize_t count;
    do {
        count = read(file, data, size);
    } while (count < 0 && errno == EINTR);
    return (long)count;
}

static long moer_file_write(moer_file file, const void *data, size_t size) {
    ssize_t count;
    do {
        count = write(file, data, size);
    } while (count < 0 && errno == EINTR);
    return (long)count;
}

static int moer_file_flush(moer_file file) {
    int result;
    do {
        result = fsync(file);
    } while (result != 0 && errno == EINTR);
    return result == 0;
}

/* Not repeated when interrupted: the descriptor is gone by then, and the data were flushed. */
static int moer_file_close(moer_file file) { return close(file) == 0 || errno == EINTR; }

static int moer_file_rename(const char *from, const char *to) { return rename(from, to) == 0; }
static int moer_file_remove(const char *path) { return unlink(path) == 0; }

static int64_t moer_files_now(void) { return (int64_t)time(NULL); }

static int moer_file_touch(const char *path) {
    int (*set_times)(int, const void *) = (int (*)(int, const void *))moer_hidden("futimens");
    int file = set_times ? moer_file_open(path, 0) : -1, touched;
    if (file < 0) return 0;
    touched = set_times(file, NULL) == 0;
    close(file);
    return touched;
}

static int moer_folder_create(const char *path, int mode) { return mkdir(path, (mode_t)mode) == 0; }

static int moer_folder_inspect(const char *path, moer_file_info *info) {
    int file = moer_open(path, O_RDONLY | MOER_O_NOFOLLOW | MOER_O_DIRECTORY, 0), inspected;
    if (file < 0) return 0;
    inspected = moer_file_inspect(file, info);
    close(file);
    return inspected && info->kind == MOER_PATH_FOLDER;
}

static int moer_folder_open(moer_folder *folder, const char *path) {
    folder->stream = opendir(path);
    return folder->stream != NULL;
}

static const char *moer_folder_next(moer_folder *folder) {
    struct dirent *entry = readdir(folder->stream);
    return entry ? entry->d_name : NULL;
}

static void moer_folder_close(moer_folder *folder) { closedir(folder->stream); }

#endif

/* ---- src/platform_windows.c ---- */
/*
  platform_windows.c: threads, the clock, the environment, shared libraries, the locale and files of Windows. Thin
  functions without policy: what a cache folder must look like, or where NVRTC is looked for, stands elsewhere.

  All texts are UTF-8; the system gets them as UTF-16, so that every path works whatever the code page is.
*/

#if defined(_WIN32)

#include <aclapi.h>
#include <locale.h>
#if defined(_MSC_VER)
#pragma comment(lib, "advapi32.lib")
#endif

#define MOER_ENVIRONMENT_MAX 32768 /* the system's own limit */
#define MOER_WIDE_MAX (MOER_PATH_MAX + 8)
#define MOER_WIDE_SHORT 240u /* longer paths need the prefix that lifts the limit of 260 characters */

/* UTF-16 with backslashes; 0 when the text is no UTF-8 or too long. */
static int moer_wide(const char *text, wchar_t *wide, int size) {
    int i;
    if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, size) == 0) {
        SetLastError(ERROR_INVALID_NAME);
        return 0;
    }
    for (i = 0; wide[i]; i++) {
        if (wide[i] == L'/') wide[i] = L'\\';
    }
    return 1;
}

static int moer_wide_path(const char *path, wchar_t wide[MOER_WIDE_MAX]) {
    static const wchar_t prefix[] = L"\\\\?\\";
    const int prefix_length = 4;
    size_t length = strlen(path);
    int lifted = length > MOER_WIDE_SHORT && length < MOER_PATH_MAX && path[1] == ':';
    if (lifted) memcpy(wide, prefix, sizeof prefix);
    return moer_wide(path, wide + (lifted ? prefix_length : 0), MOER_WIDE_MAX - prefix_length);
}

static int moer_narrow(const wchar_t *wide, char *text, size_t size) {
    return WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, (int)size, NULL, NULL) > 0;
}

static void moer_mutex_init(moer_mutex *mutex) { InitializeSRWLock(mutex); }
static void moer_mutex_destroy(moer_mutex *mutex) { (void)mutex; }
static void moer_mutex_lock(moer_mutex *mutex) { AcquireSRWLockExclusive(mutex); }
static void moer_mutex_unlock(moer_mutex *mutex) { ReleaseSRWLockExclusive(mutex); }
static void moer_condition_init(moer_condition *condition) { InitializeConditionVariable(condition); }
static void moer_condition_destroy(moer_condition *condition) { (void)condition; }
static void moer_condition_wait(moer_condition *condition, moer_mutex *mutex) {
    SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}
static void moer_condition_broadcast(moer_condition *condition) { WakeAllConditionVariable(condition); }

static DWORD WINAPI moer_thread_run(LPVOID user) {
    moer_thread *thread = (moer_thread *)user;
    thread->function(thread->user);
    return 0;
}

static int moer_thread_start(moer_thread *thread, void (*function)(void *user), void *user) {
    thread->function = function;
    thread->user = user;
    thread->handle = CreateThread(NULL, 0, moer_thread_run, thread, 0, NULL);
    return thread->handle != NULL;
}

static void moer_thread_join(moer_thread *thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
}

static uint32_t moer_processors(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwNumberOfProcessors > 1 ? (uint32_t)info.dwNumberOfProcessors : 1;
}

static double moer_milliseconds(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return (double)ticks.QuadPart * 1000.0 / (double)frequency.QuadPart;
}

static long moer_process_id(void) { return (long)GetCurrentProcessId(); }

static const char *moer_environment(const char *name, char *value, size_t size) {
    wchar_t wide_name[64], wide[MOER_ENVIRONMENT_MAX];
    DWORD length;
    if (!moer_wide(name, wide_name, 64)) return NULL;
    length = GetEnvironmentVariableW(wide_name, wide, MOER_ENVIRONMENT_MAX);
    if (length == 0 || length >= MOER_ENVIRONMENT_MAX) return NULL;
    if (length >= size) wide[size - 1] = L'\0';
    while (!moer_narrow(wide, value, size)) wide[--length] = L'\0'; /* a character may take several bytes */
    return value;
}

static void moer_system_error(char *text, size_t size) {
    snprintf(text, size, "Windows error %lu", (unsigned long)GetLastError());
}

static int moer_system_error_is_absence(void) {
    return GetLastError() == ERROR_FILE_NOT_FOUND || GetLastError() == ERROR_PATH_NOT_FOUND;
}

/* ---- libraries ---- */

static void *moer_library_open(const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    HMODULE module;
    UINT mode;
    if (!moer_wide(path, wide, MOER_WIDE_MAX)) return NULL;
    mode = SetErrorMode(SEM_FAILCRITICALERRORS); /* no dialog about a broken library */
    module = LoadLibraryExW(wide, NULL,
                            moer_path_is_absolute(path) ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS
                                                        : LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
    SetErrorMode(mode);
    return (void *)module;
}

static void *moer_library_loaded(const char *name) {
    wchar_t wide[MOER_WIDE_MAX];
    return moer_wide(name, wide, MOER_WIDE_MAX) ? (void *)GetModuleHandleW(wide) : NULL;
}

static moer_function moer_library_symbol(void *library, const char *name) {
    FARPROC address = GetProcAddress((HMODULE)library, name);
    moer_function function = NULL;
    memcpy(&function, &address, sizeof function);
    return function;
}

static void moer_library_error(char *text, size_t size) { moer_system_error(text, size); }

/* Folder of a loaded module; NULL is the program itself. */
static int moer_module_folder(HMODULE module, char *folder, size_t size) {
    wchar_t wide[MOER_PATH_MAX];
    DWORD length = GetModuleFileNameW(module, wide, MOER_PATH_MAX);
    return length > 0 && length < MOER_PATH_MAX && moer_narrow(wide, folder, size) && moer_path_parent(folder);
}

static int moer_library_folder(moer_function function, char *folder, size_t size) {
    HMODULE module;
    LPCWSTR address;
    memcpy(&address, &function, sizeof address);
    return GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                              address, &module) &&
           moer_module_folder(module, folder, size);
}

static int moer_executable_folder(char *folder, size_t size) { return moer_module_folder(NULL, folder, size); }

static void moer_locale_begin(moer_locale *locale) {
    const char *name;
    locale->per_thread = _configthreadlocale(_ENABLE_PER_THREAD_LOCALE);
    name = setlocale(LC_ALL, NULL);
    if (!name || !moer_text_set(locale->saved, sizeof locale->saved, name)) locale->saved[0] = '\0';
    if (locale->saved[0]) setlocale(LC_ALL, "C");
}

static void moer_locale_end(const moer_locale *locale) {
    if (locale->saved[0]) setlocale(LC_ALL, locale->saved);
    if (locale->per_thread != -1) _configthreadlocale(locale->per_thread);
}

/* ---- paths ---- */

static int moer_home_folder(char *folder, size_t size) {
    return moer_environment("USERPROFILE", folder, size) && moer_path_is_absolute(folder);
}

static int moer_path_is_separator(char character) { return character == '/' || character == '\\'; }

static int moer_path_is_absolute(const char *path) {
    int drive = (path[0] >= 'A' && path[0] <= 'Z') || (path[0] >= 'a' && path[0] <= 'z');
    if (moer_path_is_separator(path[0]) && moer_path_is_separator(path[1])) return 1;
    return drive && path[1] == ':' && moer_path_is_separator(path[2]);
}

static int moer_path_absolute(const char *path, char *absolute, size_t size) {
    wchar_t wide[MOER_WIDE_MAX], full[MOER_PATH_MAX];
    DWORD length;
    if (!moer_wide(path, wide, MOER_WIDE_MAX)) return 0;
    length = GetFullPathNameW(wide, MOER_PATH_MAX, full, NULL);
    return length > 0 && length < MOER_PATH_MAX && moer_narrow(full, absolute, size);
}

static uint64_t moer_random(void) {
    LARGE_INTEGER ticks;
    uint64_t value;
    QueryPerformanceCounter(&ticks);
    value = (uint64_t)ticks.QuadPart ^ ((uint64_t)GetCurrentProcessId() << 40) ^
            ((uint64_t)GetCurrentThreadId() << 20) ^ (uint64_t)(uintptr_t)&ticks;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static moer_path_kind moer_kind_of_attributes(DWORD attributes) {
    if (attributes & FILE_ATTRIBUTE_DIRECTORY) return MOER_PATH_FOLDER;
    return (attributes & FILE_ATTRIBUTE_DEVICE) ? MOER_PATH_OTHER : MOER_PATH_FILE;
}

static moer_path_kind moer_path_inspect(const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    DWORD attributes = moer_wide_path(path, wide) ? GetFileAttributesW(wide) : INVALID_FILE_ATTRIBUTES;
    return attributes == INVALID_FILE_ATTRIBUTES ? MOER_PATH_OTHER : moer_kind_of_attributes(attributes);
}

/* ---- files ---- */

static int64_t moer_seconds_of(FILETIME time) {
    return (int64_t)(((uint64_t)time.dwHighDateTime << 32 | time.dwLowDateTime) / 10000000u);
}

static int64_t moer_files_now(void) {
    FILETIME now;
    GetSystemTimeAsFileTime(&now);
    return moer_seconds_of(now);
}

static HANDLE moer_open(const char *path, DWORD access, DWORD disposition, DWORD flags) {
    wchar_t wide[MOER_WIDE_MAX];
    if (!moer_wide_path(path, wide)) return MOER_NO_FILE;
    return CreateFileW(wide, access, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, disposition, flags, NULL);
}

static moer_file moer_file_open(const char *path, int follow) {
    return moer_open(path, GENERIC_READ, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL | (follow ? 0u : (DWORD)FILE_FLAG_OPEN_REPARSE_POINT));
}

/* The folder's access list decides who may read and write the file. */
static moer_file moer_file_create(const char *path, int mode) {
    (void)mode;
    return moer_open(path, GENERIC_WRITE, CREATE_NEW, FILE_ATTRIBUTE_NORMAL);
}

/* What the process's token says of its user: [0] the user, [1] the owner of what the process creates. */
static int moer_token_owns(PSID owner) {
    union {
        TOKEN_USER user;
        TOKEN_OWNER owner;
        char space[sizeof(TOKEN_USER) + SECURITY_MAX_SID_SIZE];
    } data;
    HANDLE token;
    DWORD size;
    int owns;
    if (!OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &token)) return 0;
    owns = GetTokenInformation(token, TokenUser, &data, sizeof data, &size) && EqualSid(owner, data.user.User.Sid);
    if (!owns) owns = GetTokenInformation(token, TokenOwner, &data, sizeof data, &size) && EqualSid(owner, data.owner.Owner);
    CloseHandle(token);
    return owns;
}

static int moer_sid_is_system(PSID sid) {
    return IsWellKnownSid(sid, WinLocalSystemSid) || IsWellKnownSid(sid, WinBuiltinAdministratorsSid);
}

/* Does the access list let anyone write but the user and the system's own accounts? What isn't understood does. */
static int moer_list_lets_others_write(PACL list) {
    const ACCESS_MASK writing = FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_DELETE_CHILD | DELETE | WRITE_DAC | WRITE_OWNER |
                                GENERIC_WRITE | GENERIC_ALL;
    DWORD i;
    if (!list) return 1; /* no list: everyone may do everything */
    for (i = 0; i < list->AceCount; i++) {
        void *entry;
        ACCESS_ALLOWED_ACE *allowed;
        PSID sid;
        if (!GetAce(list, i, &entry)) return 1;
        allowed = (ACCESS_ALLOWED_ACE *)entry;
        if (allowed->Header.AceType == ACCESS_DENIED_ACE_TYPE || (allowed->Header.AceFlags & INHERIT_ONLY_ACE)) continue;
        if (allowed->Header.AceType != ACCESS_ALLOWED_ACE_TYPE) return 1;
        if (!(allowed->Mask & writing)) continue;
        sid = (PSID)&allowed->SidStart;
        if (!moer_token_owns(sid) && !moer_sid_is_system(sid) && !IsWellKnownSid(sid, WinCreatorOwnerSid)) return 1;
    }
    return 0;
}

static void moer_inspect_access(HANDLE file, moer_file_info *info) {
    PSECURITY_DESCRIPTOR descriptor = NULL;
    PSID owner = NULL;
    PACL list = NULL;
    info->owner = MOER_OWNER_OTHER;
    info->writable_by_others = 1;
    if (GetSecurityInfo(file, SE_FILE_OBJECT, OWNER_SECURITY_INFORMATION | DACL_SECURITY_INFORMATION, &owner, NULL, &list,
                        NULL, &descriptor) != ERROR_SUCCESS) {
        return;
    }
    if (owner && moer_token_owns(owner)) info->owner = MOER_OWNER_SELF;
    else if (owner && moer_sid_is_system(owner)) info->owner = MOER_OWNER_SYSTEM;
    info->writable_by_others = moer_list_lets_others_write(list);
    LocalFree(descriptor);
}

static int moer_file_inspect(moer_file file, moer_file_info *info) {
    BY_HANDLE_FILE_INFORMATION data;
    memset(info, 0, sizeof *info);
    if (!GetFileInformationByHandle(file, &data)) return 0;
    if (data.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) info->kind = MOER_PATH_OTHER;
    else info->kind = moer_kind_of_attributes(data.dwFileAttributes);
    info->size = (uint64_t)data.nFileSizeHigh << 32 | data.nFileSizeLow;
    info->modified = moer_seconds_of(data.ftLastWriteTime);
    moer_inspect_access(file, info);
    return 1;
}

static long moer_file_read(moer_file file, void *data, size_t size) {
    DWORD count = 0;
    if (!ReadFile(file, data, size > 0x10000000u ? 0x10000000u : (DWORD)size, &count, NULL)) return -1;
    return (long)count;
}

static long moer_file_write(moer_file file, const void *data, size_t size) {
    DWORD count = 0;
    if (!WriteFile(file, data, size > 0x10000000u ? 0x10000000u : (DWORD)size, &count, NULL)) return -1;
    return (long)count;
}

static int moer_file_flush(moer_file file) { return FlushFileBuffers(file) != 0; }
static int moer_file_close(moer_file file) { return CloseHandle(file) != 0; }

static int moer_file_remove(const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    return moer_wide_path(path, wide) && DeleteFileW(wide);
}

/* Virus scanners and indexers open new files for a moment; hence the repetitions, 150 ms at most. */
static int moer_file_rename(const char *from, const char *to) {
    wchar_t wide_from[MOER_WIDE_MAX], wide_to[MOER_WIDE_MAX];
    DWORD wait;
    if (!moer_wide_path(from, wide_from) || !moer_wide_path(to, wide_to)) return 0;
    for (wait = 10; wait <= 80; wait *= 2) {
        if (MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING)) return 1;
        if (GetLastError() != ERROR_SHARING_VIOLATION && GetLastError() != ERROR_ACCESS_DENIED) return 0;
        Sleep(wait);
    }
    return MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING) != 0;
}

static int moer_file_touch(const char *path) {
    HANDLE file = moer_open(path, FILE_WRITE_ATTRIBUTES, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL | FILE_FLAG_OPEN_REPARSE_POINT);
    FILETIME now;
    int touched;
    if (file == MOER_NO_FILE) return 0;
    GetSystemTimeAsFileTime(&now);
    touched = SetFileTime(file, NULL, NULL, &now) != 0;
    CloseHandle(file);
    return touched;
}

static int moer_folder_create(const char *path, int mode) {
    wchar_t wide[MOER_WIDE_MAX];
    (void)mode;
    return moer_wide_path(path, wide) && CreateDirectoryW(wide, NULL);
}

static int moer_folder_inspect(const char *path, moer_file_info *info) {
    HANDLE folder = moer_open(path, GENERIC_READ, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT);
    int inspected;
    if (folder == MOER_NO_FILE) return 0;
    inspected = moer_file_inspect(folder, info);
    CloseHandle(folder);
    if (inspected && info->kind != MOER_PATH_FOLDER) SetLastError(ERROR_DIRECTORY);
    return inspected && info->kind == MOER_PATH_FOLDER;
}

static int moer_folder_open(moer_folder *folder, const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    char pattern[MOER_PATH_MAX];
    if (!moer_text_set(pattern, sizeof pattern, path) || !moer_append(pattern, sizeof pattern, "/*")) return 0;
    if (!moer_wide_path(pattern, wide)) return 0;
    folder->search = FindFirstFileW(wide, &folder->entry);
    folder->started = 0;
    return folder->search != INVALID_HANDLE_VALUE;
}

static const char *moer_folder_next(moer_folder *folder) {
    do {
        if (folder->started && !FindNextFileW(folder->search, &folder->entry)) return NULL;
        folder->started = 1;
    } while (!moer_narrow(folder->entry.cFileName, folder->name, sizeof folder->name));
    return folder->name;
}

static void moer_folder_close(moer_folder *folder) { FindClose(folder->search); }

#endif

/* ---- src/platform.c ---- */
/*
  platform.c: the part of platform.h that is the same on every operating system, and the table of file operations. What
  differs stands in platform_posix.c and platform_windows.c.
*/

static const moer_files moer_system_files = {
    moer_files_now,   moer_file_open,     moer_file_create,     moer_file_inspect,   moer_file_read,   moer_file_write,
    moer_file_flush,  moer_file_close,    moer_file_rename,     moer_file_remove,    moer_file_touch,  moer_folder_create,
    moer_folder_inspect, moer_folder_open, moer_folder_next,    moer_folder_close};

/* What contexts use that are created from now on. Only tests put another table here. */
static const moer_files *moer_default_files = &moer_system_files;

static int moer_text_set(char *buffer, size_t size, const char *text) {
    size_t length = strlen(text);
    if (length >= size) return 0;
    memcpy(buffer, text, length + 1);
    return 1;
}

static int moer_path_parent(char *path) {
    size_t length = strlen(path);
    while (length > 0 && !moer_path_is_separator(path[length - 1])) length--;
    if (length == 0) return 0;
    path[length > 1 ? length - 1 : 1] = '\0';
    return 1;
}

/* ---- src/sha256.c ---- */
/*
  sha256.c: SHA-256 as FIPS 180-4 defines it, for cache keys and for checking entries. Every cubin that is
  read is hashed, some 20 to 100 KB for each variant of a layer, which is most of what a warm start costs: so the eight state
  words keep their places in registers, and the rounds take turns in what they call them.
*/

static const uint32_t moer_sha256_constants[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
    0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
    0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
    0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
    0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
    0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
    0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};

static uint32_t moer_rotate_right(uint32_t value, unsigned bits) {
    return (value >> bits) | (value << (32 - bits));
}

/* One round: with a to h the state's words, only d and h change. */
static void moer_sha256_round(uint32_t a, uint32_t b, uint32_t c, uint32_t *d, uint32_t e, uint32_t f, uint32_t g, uint32_t *h, uint32_t added) {
    uint32_t s1 = moer_rotate_right(e, 6) ^ moer_rotate_right(e, 11) ^ moer_rotate_right(e, 25);
    uint32_t s0 = moer_rotate_right(a, 2) ^ moer_rotate_right(a, 13) ^ moer_rotate_right(a, 22);
    uint32_t t1 = *h + s1 + ((e & f) ^ (~e & g)) + added;
    *d += t1;
    *h = t1 + s0 + ((a & b) ^ (a & c) ^ (b & c));
}

/* One block of 64 bytes. */
static void moer_sha256_block(uint32_t state[8], const unsigned char *block) {
    uint32_t words[64], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    size_t i;
    for (i = 0; i < 16; i++) {
        words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
                   (uint32_t)block[4 * i + 3];
    }
    for (i = 16; i < 64; i++) {
        uint32_t x = words[i - 15], y = words[i - 2];
        uint32_t s0 = moer_rotate_right(x, 7) ^ moer_rotate_right(x, 18) ^ (x >> 3);
        uint32_t s1 = moer_rotate_right(y, 17) ^ moer_rotate_right(y, 19) ^ (y >> 10);
        words[i] = words[i - 16] + s0 + words[i - 7] + s1;
    }
    for (i = 0; i < 64; i++) words[i] += moer_sha256_constants[i];
    for (i = 0; i < 64; i += 8) {
        moer_sha256_round(a, b, c, &d, e, f, g, &h, words[i]);
        moer_sha256_round(h, a, b, &c, d, e, f, &g, words[i + 1]);
        moer_sha256_round(g, h, a, &b, c, d, e, &f, words[i + 2]);
        moer_sha256_round(f, g, h, &a, b, c, d, &e, words[i + 3]);
        moer_sha256_round(e, f, g, &h, a, b, c, &d, words[i + 4]);
        moer_sha256_round(d, e, f, &g, h, a, b, &c, words[i + 5]);
        moer_sha256_round(c, d, e, &f, g, h, a, &b, words[i + 6]);
        moer_sha256_round(b, c, d, &e, f, g, h, &a, words[i + 7]);
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

static void moer_sha256_begin(moer_sha256 *hash) {
    static const uint32_t initial[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    memcpy(hash->state, initial, sizeof initial);
    hash->length = 0;
}

static void moer_sha256_add(moer_sha256 *hash, const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    while (size > 0) {
        size_t used = (size_t)(hash->length % 64), count = 64 - used;
        if (used == 0 && size >= 64) { /* a whole block, where it is */
            moer_sha256_block(hash->state, bytes);
            hash->length += 64;
            bytes += 64;
            size -= 64;
            continue;
        }
        if (count > size) count = size;
        memcpy(hash->block + used, bytes, count);
        hash->length += count;
        bytes += count;
        size -= count;
        if (used + count == 64) moer_sha256_block(hash->state, hash->block);
    }
}

static void moer_sha256_end(moer_sha256 *hash, unsigned char digest[32]) {
    static const unsigned char padding[64] = {0x80};
    uint64_t bits = hash->length * 8;
    size_t used = (size_t)(hash->length % 64);
    unsigned char length[8];
    unsigned i;
    for (i = 0; i < 8; i++) length[i] = (unsigned char)(bits >> (56 - 8 * i));
    moer_sha256_add(hash, padding, used < 56 ? 56 - used : 120 - used);
    moer_sha256_add(hash, length, 8);
    for (i = 0; i < 32; i++) digest[i] = (unsigned char)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

/* ---- src/driver.c ---- */
/*
  driver.c: opens the CUDA driver and finds its functions. No link against libcuda, no CUDA header. What is done with
  the driver belongs to context.c, variant.c and the launches.

  Only libcuda.so.1 is opened: the plain name libcuda.so is that of the toolkit's stub, which fails every call.
  Functions are looked up by the exact name of the version that internal.h declares, so that a newer driver changes no
  signature.
*/

#if defined(_WIN32)
#define MOER_DRIVER_LIBRARY "nvcuda.dll"
#else
#define MOER_DRIVER_LIBRARY "libcuda.so.1"
#endif

#define MOER_CUDA_ERROR_STUB_LIBRARY 34
#define MOER_CUDA_ERROR_NO_DEVICE 100

#define MOER_COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef struct moer_symbol { /* a function to look up, and the field that it goes to */
    const char *name;
    size_t offset;
    int required; /* MOER_OPTIONAL, ... */
} moer_symbol;

#define MOER_OPTIONAL 0
#define MOER_REQUIRED 1
#define MOER_FOR_TUNING 2 /* required by that alone */

static const moer_symbol moer_driver_symbols[] = {
    {"cuInit", offsetof(moer_driver, cuInit), MOER_REQUIRED},
    {"cuDriverGetVersion", offsetof(moer_driver, cuDriverGetVersion), MOER_REQUIRED},
    {"cuGetErrorName", offsetof(moer_driver, cuGetErrorName), MOER_REQUIRED},
    {"cuGetErrorString", offsetof(moer_driver, cuGetErrorString), MOER_REQUIRED},
    {"cuDeviceGetCount", offsetof(moer_driver, cuDeviceGetCount), MOER_REQUIRED},
    {"cuDeviceGet", offsetof(moer_driver, cuDeviceGet), MOER_REQUIRED},
    {"cuDeviceGetName", offsetof(moer_driver, cuDeviceGetName), MOER_REQUIRED},
    {"cuDeviceGetAttribute", offsetof(moer_driver, cuDeviceGetAttribute), MOER_REQUIRED},
    {"cuDevicePrimaryCtxRetain", offsetof(moer_driver, cuDevicePrimaryCtxRetain), MOER_REQUIRED},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(moer_driver, cuDevicePrimaryCtxRelease), MOER_REQUIRED},
    {"cuCtxGetCurrent", offsetof(moer_driver, cuCtxGetCurrent), MOER_REQUIRED},
    {"cuCtxGetDevice", offsetof(moer_driver, cuCtxGetDevice), MOER_REQUIRED},
    {"cuCtxPushCurrent_v2", offsetof(moer_driver, cuCtxPushCurrent), MOER_REQUIRED},
    {"cuCtxPopCurrent_v2", offsetof(moer_driver, cuCtxPopCurrent), MOER_REQUIRED},
    {"cuThreadExchangeStreamCaptureMode", offsetof(moer_driver, cuThreadExchangeStreamCaptureMode), MOER_REQUIRED},
    {"cuLibraryLoadData", offsetof(moer_driver, cuLibraryLoadData), MOER_REQUIRED},
    {"cuLibraryUnload", offsetof(moer_driver, cuLibraryUnload), MOER_REQUIRED},
    {"cuLibraryGetKernel", offsetof(moer_driver, cuLibraryGetKernel), MOER_REQUIRED},
    {"cuKernelGetFunction", offsetof(moer_driver, cuKernelGetFunction), MOER_REQUIRED},
    {"cuFuncGetAttribute", offsetof(moer_driver, cuFuncGetAttribute), MOER_REQUIRED},
    {"cuFuncSetAttribute", offsetof(moer_driver, cuFuncSetAttribute), MOER_REQUIRED},
    {"cuFuncLoad", offsetof(moer_driver, cuFuncLoad), MOER_OPTIONAL},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", offsetof(moer_driver, cuOccupancyMaxActiveBlocksPerMultiprocessor), MOER_REQUIRED},
    {"cuLaunchKernelEx", offsetof(moer_driver, cuLaunchKernelEx), MOER_REQUIRED},
    {"cuMemcpyHtoDAsync_v2", offsetof(moer_driver, cuMemcpyHtoDAsync), MOER_FOR_TUNING},
    {"cuMemcpyDtoHAsync_v2", offsetof(moer_driver, cuMemcpyDtoHAsync), MOER_FOR_TUNING},
    {"cuStreamCreate", offsetof(moer_driver, cuStreamCreate), MOER_FOR_TUNING},
    {"cuStreamDestroy_v2", offsetof(moer_driver, cuStreamDestroy), MOER_FOR_TUNING},
    {"cuStreamSynchronize", offsetof(moer_driver, cuStreamSynchronize), MOER_FOR_TUNING},
    {"cuStreamBeginCapture_v2", offsetof(moer_driver, cuStreamBeginCapture), MOER_FOR_TUNING},
    {"cuStreamEndCapture", offsetof(moer_driver, cuStreamEndCapture), MOER_FOR_TUNING},
    {"cuGraphInstantiateWithFlags", offsetof(moer_driver, cuGraphInstantiateWithFlags), MOER_FOR_TUNING},
    {"cuGraphLaunch", offsetof(moer_driver, cuGraphLaunch), MOER_FOR_TUNING},
    {"cuGraphExecDestroy", offsetof(moer_driver, cuGraphExecDestroy), MOER_FOR_TUNING},
    {"cuGraphDestroy", offsetof(moer_driver, cuGraphDestroy), MOER_FOR_TUNING},
    {"cuEventCreate", offsetof(moer_driver, cuEventCreate), MOER_FOR_TUNING},
    {"cuEventDestroy_v2", offsetof(moer_driver, cuEventDestroy), MOER_FOR_TUNING},
    {"cuEventRecord", offsetof(moer_driver, cuEventRecord), MOER_FOR_TUNING},
    {"cuEventSynchronize", offsetof(moer_driver, cuEventSynchronize), MOER_FOR_TUNING},
    {"cuEventElapsedTime", offsetof(moer_driver, cuEventElapsedTime), MOER_FOR_TUNING},
};

/* Fills a struct of function pointers. Returns the name of a required function that is missing, or NULL. */
static const char *moer_symbols_find(void *library, const moer_symbol *symbols, size_t count, void *functions) {
    const char *missing = NULL;
    size_t i;
    for (i = 0; i < count; i++) {
        moer_function function = moer_library_symbol(library, symbols[i].name);
        if (!function && symbols[i].required == MOER_REQUIRED && !missing) missing = symbols[i].name;
        memcpy((char *)functions + symbols[i].offset, &function, sizeof function);
    }
    return missing;
}

static const char *moer_driver_missing(const moer_driver *driver) {
    size_t i;
    for (i = 0; i < MOER_COUNT(moer_driver_symbols); i++) {
        moer_function function;
        memcpy(&function, (const char *)driver + moer_driver_symbols[i].offset, sizeof function);
        if (function == NULL && moer_driver_symbols[i].required == MOER_FOR_TUNING) return moer_driver_symbols[i].name;
    }
    return NULL;
}

static void moer_driver_describe(const moer_driver *driver, moer_cu_result result, const char **name,
                                 const char **text) {
    *name = *text = NULL;
    if (driver->cuGetErrorName) driver->cuGetErrorName(result, name);
    if (driver->cuGetErrorString) driver->cuGetErrorString(result, text);
    if (!*name) *name = "an error that the driver has no name for";
    if (!*text) *text = "no description";
}

static moe_route_status moer_driver_fail(moe_route_context *context, const char *call, moer_cu_result result) {
    const char *name, *text;
    moer_driver_describe(&context->driver, result, &name, &text);
    return moer_fail(context, MOE_ROUTE_ERROR_DRIVER, "%s: %s, error %d (%s)", call, name, result, text);
}

/* The message for a driver that is there and doesn't start. */
static moe_route_status moer_driver_unusable(moe_route_context *context, const moer_driver *driver, const char *call,
                                             moer_cu_result result) {
    const char *name, *text;
    if (result == MOER_CUDA_ERROR_STUB_LIBRARY) {
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE,
                         MOER_DRIVER_LIBRARY " is the CUDA toolkit's stub and not the NVIDIA driver; "
                                             "take the toolkit's stubs folder out of the library search path");
    }
    if (result == MOER_CUDA_ERROR_NO_DEVICE) {
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE,
                         "the NVIDIA driver is installed, but it finds no GPU (CUDA_VISIBLE_DEVICES may hide it)");
    }
    moer_driver_describe(driver, result, &name, &text);
    return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "the NVIDIA driver doesn't start: %s: %s, error %d (%s)", call,
                     name, result, text);
}

static moe_route_status moer_driver_open(moe_route_context *context) {
    moer_driver driver;
    moer_cu_result result;
    const char *missing;
    int version = 0;
    void *library = moer_library_open(MOER_DRIVER_LIBRARY);
    if (!library) {
        char reason[512];
        moer_library_error(reason, sizeof reason);
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "no NVIDIA driver: %s can't be loaded (%s)",
                         MOER_DRIVER_LIBRARY, reason);
    }
    memset(&driver, 0, sizeof driver);
    missing = moer_symbols_find(library, moer_driver_symbols, MOER_COUNT(moer_driver_symbols), &driver);
    if (!driver.cuInit || !driver.cuDriverGetVersion) {
        return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "%s has no %s: it isn't the NVIDIA driver",
                         MOER_DRIVER_LIBRARY, missing);
    }
    result = driver.cuDriverGetVersion(&version);
    if (result != 0) return moer_driver_unusable(context, &driver, "cuDriverGetVersion", result);
    context->driver_version = version;
    if (version < 12000) {
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED,
                         "the NVIDIA driver supports CUDA %d.%d; CUDA 12.0 or later is needed (driver 525 or later)",
                         version / 1000, version % 1000 / 10);
    }
    if (missing) {
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "the NVIDIA driver, of CUDA %d.%d, has no %s",
                         version / 1000, version % 1000 / 10, missing);
    }
    result = driver.cuInit(0);
    if (result != 0) return moer_driver_unusable(context, &driver, "cuInit", result);
    context->driver = driver;
    return MOE_ROUTE_OK;
}

/* ---- src/nvrtc_find.c ---- */
/*
  nvrtc_find.c: finds NVRTC and opens it. What is compiled with it belongs to nvrtc.c.

  NVRTC is opened when something has to be compiled and never before: it costs 30 ms and 30 MB, and a warm cache needs
  none. It asks for a library of builtins of exactly its own version, by bare name, when it first compiles. That library
  is opened before, from NVRTC's own folder, since the name alone may not be found or may find another installation's.
*/

#define MOER_NVRTC_OLDEST_MAJOR 12
#define MOER_NVRTC_NEWEST_MAJOR 13 /* newer ones are tried when the driver is as new */

#if defined(_WIN32)
#define MOER_CONDA_FOLDER "/Library/bin"
#else
#define MOER_CONDA_FOLDER "/lib"
#endif

/* ---- finding the library ---- */

typedef struct moer_nvrtc_search {
    int newest, oldest; /* majors of this pass, newest first */
    int listed;         /* an earlier pass has listed the places already */
    moer_nvrtc found;
    char tried[8192];   /* a line for each place, for the message */
} moer_nvrtc_search;

static void moer_nvrtc_library_name(int major, char *name, size_t size) {
    name[0] = '\0';
#if defined(_WIN32)
    moer_append(name, size, "nvrtc64_%d0_0.dll", major);
#else
    moer_append(name, size, "libnvrtc.so.%d", major);
#endif
}

static void moer_nvrtc_builtins_name(int version, char *name, size_t size) {
    name[0] = '\0';
#if defined(_WIN32)
    moer_append(name, size, "nvrtc-builtins64_%d%d.dll", version / 1000, version % 1000 / 10);
#else
    moer_append(name, size, "libnvrtc-builtins.so.%d.%d", version / 1000, version % 1000 / 10);
#endif
}

/* Where the library lies: its path, for the context's information; its folder, for the builtins, empty when unknown. */
static void moer_nvrtc_locate(moer_nvrtc *found, const char *name, char *folder, size_t size) {
    found->path[0] = folder[0] = '\0';
    if (moer_path_is_absolute(name)) {
        moer_text_set(found->path, sizeof found->path, name);
        if (!moer_text_set(folder, size, name) || !moer_path_parent(folder)) folder[0] = '\0';
    } else if (moer_library_folder((moer_function)found->nvrtcVersion, folder, size)) {
        moer_append(found->path, sizeof found->path, "%s/%s", folder, name);
    } else {
        folder[0] = '\0';
        moer_text_set(found->path, sizeof found->path, name);
    }
}

/* Takes an opened library if it is an NVRTC that can be used. `name` is what it was opened by. */
static int moer_nvrtc_accept(moer_nvrtc_search *search, void *library, const char *name) {
    static const moer_symbol symbols[] = {
        {"nvrtcVersion", offsetof(moer_nvrtc, nvrtcVersion), MOER_REQUIRED},
        {"nvrtcGetErrorString", offsetof(moer_nvrtc, nvrtcGetErrorString), MOER_REQUIRED},
        {"nvrtcGetNumSupportedArchs", offsetof(moer_nvrtc, nvrtcGetNumSupportedArchs), MOER_REQUIRED},
        {"nvrtcGetSupportedArchs", offsetof(moer_nvrtc, nvrtcGetSupportedArchs), MOER_REQUIRED},
        {"nvrtcCreateProgram", offsetof(moer_nvrtc, nvrtcCreateProgram), MOER_REQUIRED},
        {"nvrtcDestroyProgram", offsetof(moer_nvrtc, nvrtcDestroyProgram), MOER_REQUIRED},
        {"nvrtcCompileProgram", offsetof(moer_nvrtc, nvrtcCompileProgram), MOER_REQUIRED},
        {"nvrtcGetProgramLogSize", offsetof(moer_nvrtc, nvrtcGetProgramLogSize), MOER_REQUIRED},
        {"nvrtcGetProgramLog", offsetof(moer_nvrtc, nvrtcGetProgramLog), MOER_REQUIRED},
        {"nvrtcGetCUBINSize", offsetof(moer_nvrtc, nvrtcGetCUBINSize), MOER_REQUIRED},
        {"nvrtcGetCUBIN", offsetof(moer_nvrtc, nvrtcGetCUBIN), MOER_REQUIRED},
        {"nvrtcGetPTXSize", offsetof(moer_nvrtc, nvrtcGetPTXSize), MOER_REQUIRED},
        {"nvrtcGetPTX", offsetof(moer_nvrtc, nvrtcGetPTX), MOER_REQUIRED},
        {"nvrtcInstallBundledHeaders", offsetof(moer_nvrtc, nvrtcInstallBundledHeaders), MOER_OPTIONAL},
    };
    moer_nvrtc *found = &search->found;
    const char *missing = moer_symbols_find(library, symbols, MOER_COUNT(symbols), found);
    char builtins[MOER_PATH_MAX], builtins_name[64];
    int major = 0, minor = 0;
    if (missing) {
        moer_append(search->tried, sizeof search->tried, "\n  %s, which has no function %s", name, missing);
        return 0;
    }
    if (found->nvrtcVersion(&major, &minor) != 0 || major < MOER_NVRTC_OLDEST_MAJOR) {
        moer_append(search->tried, sizeof search->tried, "\n  %s, which is version %d.%d; 12.0 or later is needed",
                    name, major, minor);
        return 0;
    }
    found->version = major * 1000 + minor * 10;
    moer_nvrtc_locate(found, name, builtins, sizeof builtins);
    moer_nvrtc_builtins_name(found->version, builtins_name, sizeof builtins_name);
    if (builtins[0] && moer_append(builtins, sizeof builtins, "/%s", builtins_name)) moer_library_open(builtins);
    found->state = 1;
    return 1;
}

static void moer_nvrtc_list(moer_nvrtc_search *search, const char *place) {
    if (!search->listed) moer_append(search->tried, sizeof search->tried, "\n  %s", place);
}

static int moer_nvrtc_try(moer_nvrtc_search *search, const char *name) {
    void *library = moer_library_open(name);
    if (library) return moer_nvrtc_accept(search, library, name);
    if (moer_path_inspect(name) == MOER_PATH_FILE) {
        char reason[512];
        moer_library_error(reason, sizeof reason);
        moer_append(search->tried, sizeof search->tried, "\n  %s, which can't be loaded (%s)", name, reason);
    }
    return 0;
}

static int moer_nvrtc_try_folder(moer_nvrtc_search *search, const char *folder) {
    int major;
    moer_nvrtc_list(search, folder);
    for (major = search->newest; major >= search->oldest; major--) {
        char path[MOER_PATH_MAX], name[64];
        moer_nvrtc_library_name(major, name, sizeof name);
        if (!moer_text_set(path, sizeof path, folder) || !moer_append(path, sizeof path, "/%s", name)) continue;
        if (moer_path_inspect(path) == MOER_PATH_FILE && moer_nvrtc_try(search, path)) return 1;
    }
    return 0;
}

/* A toolkit's root. */
static int moer_nvrtc_try_toolkit(moer_nvrtc_search *search, const char *root) {
#if defined(_WIN32)
    static const char *const folders[] = {"bin", "bin/x64"};
#else
    static const char *const folders[] = {"lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"};
#endif
    size_t i;
    if (!root || !moer_path_is_absolute(root)) return 0;
    for (i = 0; i < MOER_COUNT(folders); i++) {
        char folder[MOER_PATH_MAX];
        folder[0] = '\0';
        if (moer_append(folder, sizeof folder, "%s/%s", root, folders[i]) && moer_nvrtc_try_folder(search, folder)) {
            return 1;
        }
    }
    return 0;
}

/* A folder into which pip installs packages. CUDA 12's NVRTC has a folder of its own, later ones share one a major. */
static int moer_nvrtc_try_packages(void *user, const char *packages) {
    moer_nvrtc_search *search = (moer_nvrtc_search *)user;
#if defined(_WIN32)
    static const char own[] = "/nvidia/cuda_nvrtc/bin", shared_format[] = "%s/nvidia/cu%d/bin/x86_64";
#else
    static const char own[] = "/nvidia/cuda_nvrtc/lib", shared_format[] = "%s/nvidia/cu%d/lib";
#endif
    char folder[MOER_PATH_MAX];
    int major;
    for (major = search->newest; major >= search->oldest; major--) {
        folder[0] = '\0';
        if (moer_append(folder, sizeof folder, shared_format, packages, major) &&
            moer_path_inspect(folder) == MOER_PATH_FOLDER && moer_nvrtc_try_folder(search, folder)) {
            return 1;
        }
    }
    folder[0] = '\0';
    return moer_append(folder, sizeof folder, "%s%s", packages, own) && moer_path_inspect(folder) == MOER_PATH_FOLDER &&
           moer_nvrtc_try_folder(search, folder);
}

static int moer_python_packages(const char *prefix, int (*visit)(void *user, const char *packages), void *user) {
    char packages[MOER_PATH_MAX];
    if (!prefix || !moer_path_is_absolute(prefix)) return 0;
#if defined(_WIN32)
    packages[0] = '\0';
    return moer_append(packages, sizeof packages, "%s/Lib/site-packages", prefix) && visit(user, packages);
#else
    {
        static const char *const names[] = {"site-packages", "dist-packages"};
        size_t i;
        int minor;
        for (minor = 40; minor >= 6; minor--) { /* Python 3.minor; asking for each is less than listing the folder */
            for (i = 0; i < MOER_COUNT(names); i++) {
                packages[0] = '\0';
                if (moer_append(packages, sizeof packages, "%s/lib/python3.%d/%s", prefix, minor, names[i]) &&
                    moer_path_inspect(packages) == MOER_PATH_FOLDER && visit(user, packages)) {
                    return 1;
                }
            }
        }
        return 0;
    }
#endif
}

static int moer_nvrtc_try_python(moer_nvrtc_search *search, const char *prefix) {
    return moer_python_packages(prefix, moer_nvrtc_try_packages, search);
}

/* A path that the user gave: the library, or the folder that holds it. */
static int moer_nvrtc_try_named(moer_nvrtc_search *search, const char *path) {
    char absolute[MOER_PATH_MAX], reason[512];
    moer_path_kind kind = moer_path_inspect(path);
    if (kind != MOER_PATH_OTHER && !moer_path_absolute(path, absolute, sizeof absolute)) return 0;
    if (kind == MOER_PATH_FOLDER) return moer_nvrtc_try_folder(search, absolute);
    if (kind == MOER_PATH_FILE) return moer_nvrtc_try(search, absolute);
    if (moer_nvrtc_try(search, path)) return 1; /* a name for the system's loader */
    moer_library_error(reason, sizeof reason);
    moer_append(search->tried, sizeof search->tried, "\n  %s (%s)", path, reason);
    return 0;
}

#if defined(_WIN32)
/* The toolkit's installer adds its folder to PATH. The loader isn't asked to search PATH, because it would look in the
   current folder, too. */
static int moer_nvrtc_try_path_folders(moer_nvrtc_search *search) {
    char value[32768], *folder, *end;
    int found = 0;
    if (!moer_environment("PATH", value, sizeof value)) return 0;
    for (folder = value; folder && !found; folder = end) {
        end = strchr(folder, ';');
        if (end) *end++ = '\0';
        if (moer_path_is_absolute(folder)) found = moer_nvrtc_try_folder(search, folder);
    }
    return found;
}
#endif

static int moer_nvrtc_try_places(moer_nvrtc_search *search) {
    char folder[MOER_PATH_MAX], value[MOER_PATH_MAX], name[64];
    const char *conda;
    int major;
    for (major = search->newest; major >= search->oldest; major--) {
        void *library;
        moer_nvrtc_library_name(major, name, sizeof name);
        library = moer_library_loaded(name);
        if (library && moer_nvrtc_accept(search, library, name)) return 1;
    }
    if (moer_nvrtc_try_toolkit(search, moer_environment("CUDA_HOME", value, sizeof value))) return 1;
    if (moer_nvrtc_try_toolkit(search, moer_environment("CUDA_PATH", value, sizeof value))) return 1;
#if defined(_WIN32)
    if (moer_nvrtc_try_path_folders(search)) return 1;
#else
    if (moer_nvrtc_try_toolkit(search, "/usr/local/cuda")) return 1;
    for (major = search->newest; major >= search->oldest; major--) {
        folder[0] = '\0';
        moer_append(folder, sizeof folder, "/usr/local/cuda-%d", major);
        if (moer_path_inspect(folder) == MOER_PATH_FOLDER && moer_nvrtc_try_toolkit(search, folder)) return 1;
    }
#endif
    moer_nvrtc_list(search, "the system's library path");
    for (major = search->newest; major >= search->oldest; major--) {
        moer_nvrtc_library_name(major, name, sizeof name);
        if (moer_nvrtc_try(search, name)) return 1;
    }
    if (moer_nvrtc_try_python(search, moer_environment("VIRTUAL_ENV", value, sizeof value))) return 1;
    conda = moer_environment("CONDA_PREFIX", value, sizeof value);
    if (moer_nvrtc_try_python(search, conda)) return 1;
    if (conda && moer_path_is_absolute(conda)) {
        folder[0] = '\0';
        if (moer_append(folder, sizeof folder, "%s" MOER_CONDA_FOLDER, conda) &&
            moer_nvrtc_try_folder(search, folder)) {
            return 1;
        }
    }
#if !defined(_WIN32)
    if (moer_home_folder(folder, sizeof folder) && moer_append(folder, sizeof folder, "/.local") &&
        moer_nvrtc_try_python(search, folder)) {
        return 1;
    }
    if (moer_nvrtc_try_python(search, "/usr/local")) return 1;
#endif
    return moer_executable_folder(folder, sizeof folder) && moer_nvrtc_try_folder(search, folder);
}

/* One pass over the places for the majors that the driver can load code of, then one for newer ones. */
static int moer_nvrtc_find(moer_nvrtc_search *search, int driver_version, const char *named) {
    int driver_major = driver_version / 1000;
    int newest = driver_major > MOER_NVRTC_NEWEST_MAJOR ? driver_major : MOER_NVRTC_NEWEST_MAJOR;
    int preferred = driver_major > 0 ? driver_major : newest, found;
    search->newest = preferred;
    search->oldest = MOER_NVRTC_OLDEST_MAJOR;
    found = named ? moer_nvrtc_try_named(search, named) : moer_nvrtc_try_places(search);
    if (found || newest <= preferred || (named && moer_path_inspect(named) != MOER_PATH_FOLDER)) return found;
    search->listed = 1;
    search->newest = newest;
    search->oldest = preferred + 1;
    return named ? moer_nvrtc_try_named(search, named) : moer_nvrtc_try_places(search);
}

/* Opens NVRTC if it isn't yet. A failure isn't kept: a later compilation looks again, and so has the full message. */
static moe_route_status moer_nvrtc_open(moe_route_context *context) {
    char value[MOER_PATH_MAX];
    const char *named = NULL, *named_by = "nvrtc_path";
    moer_nvrtc_search *search;
    moe_route_status status = MOE_ROUTE_OK;
    int state;
    moer_mutex_lock(&context->mutex);
    state = context->nvrtc.state;
    moer_mutex_unlock(&context->mutex);
    if (state == 1) return MOE_ROUTE_OK;

    if (context->nvrtc_path[0]) {
        named = context->nvrtc_path;
    } else {
        named = moer_environment("MOE_ROUTE_NVRTC_PATH", value, sizeof value);
        named_by = "MOE_ROUTE_NVRTC_PATH";
    }
    search = (moer_nvrtc_search *)moer_alloc(context, sizeof *search);
    if (!search) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while looking for NVRTC");
    if (moer_nvrtc_find(search, context->driver_version, named)) {
        moer_mutex_lock(&context->mutex);
        state = context->nvrtc.state;
        if (state != 1) context->nvrtc = search->found; /* another thread may have been faster */
        moer_mutex_unlock(&context->mutex);
        if (state != 1) {
            moer_log(context, MOE_ROUTE_LOG_INFO, "NVRTC %d.%d: %s", search->found.version / 1000,
                     search->found.version % 1000 / 10, search->found.path);
        }
    } else if (named) {
        status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                           "NVRTC, which compiles the kernels, can't be loaded from where %s says:%s", named_by,
                           search->tried);
    } else {
        status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                           "NVRTC, which compiles the kernels, isn't there. Install the CUDA toolkit, or do "
                           "`pip install nvidia-cuda-nvrtc` (CUDA 13) or `pip install nvidia-cuda-nvrtc-cu12` "
                           "(CUDA 12), or set MOE_ROUTE_NVRTC_PATH to the library or its folder. Looked for it in:%s",
                           search->tried);
    }
    moer_free(context, search);
    return status;
}

/* ---- src/cub_find.c ---- */
/*
  cub_find.c: finds CUB's headers, which the kernel sources that include some are compiled with: in the CUDA toolkit, in a pip package, or
  bundled with NVRTC. What is compiled with them belongs to nvrtc.c.

  CUB brings the rest of CCCL that it includes, libcu++ and a little of Thrust, in the same folder. In dist/moe_route.h all of that is
  embedded, and nothing is looked for.
*/

#ifndef MOER_EMBEDDED_CUB

#define MOER_CUB_HEADER "cub/block/block_radix_rank.cuh"

typedef struct moer_cub_search {
    moer_cub *found;
    char tried[8192]; /* a line for each place, for the message */
} moer_cub_search;

static int moer_cub_try(moer_cub_search *search, const char *folder) {
    char path[MOER_PATH_MAX];
    path[0] = '\0';
    moer_append(search->tried, sizeof search->tried, "\n  %s", folder);
    return moer_append(path, sizeof path, "%s/" MOER_CUB_HEADER, folder) && moer_path_inspect(path) == MOER_PATH_FILE &&
           moer_text_set(search->found->folder, sizeof search->found->folder, folder);
}

/* A folder of header files: from CUDA 13 on CUB has one in it. */
static int moer_cub_try_include(moer_cub_search *search, const char *root, const char *include) {
    char folder[MOER_PATH_MAX];
    size_t length;
    if (!root || !moer_path_is_absolute(root)) return 0;
    folder[0] = '\0';
    if (!moer_append(folder, sizeof folder, "%s%s", root, include) || moer_path_inspect(folder) != MOER_PATH_FOLDER) return 0;
    length = strlen(folder);
    if (moer_append(folder, sizeof folder, "/cccl") && moer_path_inspect(folder) == MOER_PATH_FOLDER && moer_cub_try(search, folder)) return 1;
    folder[length] = '\0';
    return moer_cub_try(search, folder);
}

static int moer_cub_try_toolkit(moer_cub_search *search, const char *root) {
#if defined(_WIN32)
    static const char *const folders[] = {"/include", "/Library/include"};
#else
    static const char *const folders[] = {"/include", "/targets/x86_64-linux/include", "/targets/sbsa-linux/include"};
#endif
    size_t i;
    for (i = 0; i < MOER_COUNT(folders); i++)
        if (moer_cub_try_include(search, root, folders[i])) return 1;
    return 0;
}

/* A folder into which pip installs packages. CUDA 12's CUB has a folder of its own, later ones share one a major. */
static int moer_cub_try_packages(void *user, const char *packages) {
    moer_cub_search *search = (moer_cub_search *)user;
    char folder[64];
    int major;
    for (major = MOER_NVRTC_NEWEST_MAJOR; major > MOER_NVRTC_OLDEST_MAJOR; major--) {
        folder[0] = '\0';
        moer_append(folder, sizeof folder, "/nvidia/cu%d/include", major);
        if (moer_cub_try_include(search, packages, folder)) return 1;
    }
    return moer_cub_try_include(search, packages, "/nvidia/cuda_cccl/include");
}

/* Beside NVRTC: of the same toolkit, or installed by the same pip. */
static int moer_cub_try_beside_nvrtc(moer_cub_search *search, const char *library) {
    char folder[MOER_PATH_MAX];
    int level;
    if (!moer_path_is_absolute(library) || !moer_text_set(folder, sizeof folder, library) || !moer_path_parent(folder)) return 0;
    for (level = 0; level < 2 && moer_path_parent(folder); level++)
        if (moer_cub_try_include(search, folder, "/include") || moer_cub_try_include(search, folder, "/cuda_cccl/include")) return 1;
    return 0;
}

/* Headers that NVRTC brings itself have to be unpacked, 26 MB: into the cache folder, where they stay. */
static int moer_cub_try_bundled(moe_route_context *context, moer_cub_search *search) {
    const moer_nvrtc *nvrtc = &context->nvrtc;
    const char *log = NULL;
    char folder[MOER_PATH_MAX], why[512] = "";
    int result;
    if (!nvrtc->nvrtcInstallBundledHeaders) return 0;
    if (!context->cache.folder[0] || !moer_text_set(folder, sizeof folder, context->cache.folder) || !moer_path_parent(folder)) {
        moer_append(search->tried, sizeof search->tried, "\n  NVRTC itself, which can't unpack its headers: there is no cache folder");
        return 0;
    }
    if (!moer_append(folder, sizeof folder, "/nvrtc_headers_%d.%d", nvrtc->version / 1000, nvrtc->version % 1000 / 10)) return 0;
    result = nvrtc->nvrtcInstallBundledHeaders(folder, 0, &log);
    if (result == 0 && moer_cache_check_folder(&context->cache, folder, 0, why, sizeof why)) return moer_cub_try_include(search, folder, "");
    moer_append(search->tried, sizeof search->tried, "\n  %s, for NVRTC's own headers: %s", folder, result == 0 ? why : log ? log : nvrtc->nvrtcGetErrorString(result));
    return 0;
}

static int moer_cub_try_places(moe_route_context *context, moer_cub_search *search) {
    char value[MOER_PATH_MAX];
    if (moer_cub_try_bundled(context, search)) return 1;
    if (moer_cub_try_beside_nvrtc(search, context->nvrtc.path)) return 1;
    if (moer_cub_try_toolkit(search, moer_environment("CUDA_HOME", value, sizeof value))) return 1;
    if (moer_cub_try_toolkit(search, moer_environment("CUDA_PATH", value, sizeof value))) return 1;
#if !defined(_WIN32)
    if (moer_cub_try_toolkit(search, "/usr/local/cuda")) return 1;
#endif
    if (moer_python_packages(moer_environment("VIRTUAL_ENV", value, sizeof value), moer_cub_try_packages, search)) return 1;
    if (moer_python_packages(moer_environment("CONDA_PREFIX", value, sizeof value), moer_cub_try_packages, search)) return 1;
    if (moer_cub_try_toolkit(search, moer_environment("CONDA_PREFIX", value, sizeof value))) return 1;
#if !defined(_WIN32)
    if (moer_home_folder(value, sizeof value) && moer_append(value, sizeof value, "/.local") && moer_python_packages(value, moer_cub_try_packages, search)) return 1;
    return moer_python_packages("/usr/local", moer_cub_try_packages, search);
#else
    return 0;
#endif
}

static moe_route_status moer_cub_get(moe_route_context *context, moer_cub *cub) {
    char value[MOER_PATH_MAX], absolute[MOER_PATH_MAX];
    const char *named = moer_environment("MOE_ROUTE_CUB_PATH", value, sizeof value);
    moer_cub_search *search;
    moe_route_status status = MOE_ROUTE_OK;
    memset(cub, 0, sizeof *cub);
    search = (moer_cub_search *)moer_alloc(context, sizeof *search);
    if (!search) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory while looking for CUB");
    search->found = cub;
    if (named) {
        if (!moer_path_absolute(named, absolute, sizeof absolute) || !moer_cub_try(search, absolute))
            status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                               "CUB's headers, which cub_maps needs, aren't where MOE_ROUTE_CUB_PATH says: %s has no " MOER_CUB_HEADER, named);
    } else if (!moer_cub_try_places(context, search)) {
        status = moer_fail(context, MOE_ROUTE_ERROR_NO_COMPILER,
                           "CUB's headers, which cub_maps needs, aren't there. Install the CUDA toolkit, or do `pip install nvidia-cuda-cccl`, or "
                           "set MOE_ROUTE_CUB_PATH to the folder that holds cub/ and cuda/, or build the program with dist/moe_route.h, which has "
                           "them in it (`make dist`), or leave cub_maps OFF. Looked for %s in:%s",
                           MOER_CUB_HEADER, search->tried);
    }
    moer_free(context, search);
    if (status == MOE_ROUTE_OK) moer_log(context, MOE_ROUTE_LOG_INFO, "CUB: %s", cub->folder);
    return status;
}

#endif /* MOER_EMBEDDED_CUB */

/* ---- src/cub_embedded.c ---- */
/*
  cub_embedded.c: unpacks CUB's headers where tools/embed_cub.c has put them into the library, as it does for dist/moe_route.h. Where they are
  looked for otherwise is decided in cub_find.c.

  They were packed for string literals: what is packed is printable, and most of it stands for itself. $ is a line feed. ` and @ copy
  something from before: digits in base 88 tell how far back it begins (two digits, or three behind @), and then how much it is beyond 5
  (or 6) characters: a digit of 87 is followed by more. `$ and one of 0 to 3 is a zero byte, `, @ or $.
*/

#ifdef MOER_EMBEDDED_CUB

#define MOER_PACKED_DIGITS "#%&'()*+,-./0123456789:;<=>ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz{|}~!"

#define MOER_PACKED_BASE (sizeof MOER_PACKED_DIGITS - 1)

typedef struct moer_packed { /* a place in the pieces */
    const char *const *piece;
    const char *at;
    unsigned char values[256]; /* of digits */
} moer_packed;

static char moer_packed_next(moer_packed *from) { /* 0 at the end */
    if (*from->at == '\0' && *from->piece != NULL && *++from->piece != NULL) from->at = *from->piece;
    return *from->at != '\0' ? *from->at++ : '\0';
}

static size_t moer_packed_digit(moer_packed *from) { return from->values[(unsigned char)moer_packed_next(from)]; }

static void moer_cub_unpack(char *text) {
    static const char escaped[] = {'\0', '`', '@', '$'};
    moer_packed from;
    size_t size = 0, i;
    char c;
    memset(&from, 0, sizeof from);
    for (i = 0; i < MOER_PACKED_BASE; i++) from.values[(unsigned char)MOER_PACKED_DIGITS[i]] = (unsigned char)i;
    from.piece = moer_embedded_cub;
    from.at = *from.piece;
    while (size < MOER_EMBEDDED_CUB_SIZE && (c = moer_packed_next(&from)) != '\0') {
        if (c == '`' || c == '@') {
            const char first = moer_packed_next(&from);
            size_t distance, length, more;
            if (c == '`' && first == '$') {
                text[size++] = escaped[(moer_packed_next(&from) - '0') & 3];
                continue;
            }
            distance = from.values[(unsigned char)first];
            for (i = 0; i < (c == '`' ? 1u : 2u); i++) distance = distance * MOER_PACKED_BASE + moer_packed_digit(&from);
            length = c == '`' ? 5 : 6;
            do {
                more = moer_packed_digit(&from);
                length += more;
            } while (more == MOER_PACKED_BASE - 1);
            for (; length > 0 && size < MOER_EMBEDDED_CUB_SIZE && distance > 0 && distance <= size; length--, size++) text[size] = text[size - distance];
        } else {
            text[size++] = c == '$' ? '\n' : c;
        }
    }
}

static moe_route_status moer_cub_get(moe_route_context *context, moer_cub *cub) {
    memset(cub, 0, sizeof *cub);
    cub->text = (char *)moer_alloc(context, MOER_EMBEDDED_CUB_SIZE + 1);
    if (!cub->text) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for CUB's headers");
    cub->num_headers = MOER_EMBEDDED_CUB_HEADERS;
    moer_cub_unpack(cub->text);
    return MOE_ROUTE_OK;
}

#endif /* MOER_EMBEDDED_CUB */

/* ---- src/nvrtc.c ---- */
/*
  nvrtc.c: compiles a kernel source with NVRTC. Where NVRTC is found is decided in nvrtc_find.c; which variants exist, and what
  becomes of the code, elsewhere.
*/

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

/* ---- src/cache_entry.c ---- */
/*
  cache_entry.c: the key that a variant, or what tuning found, is looked up by, and the bytes in which it is kept: made, and
  checked. Files and folders don't belong here: the same bytes lie in packs.

  The key holds only what is known without NVRTC and without the driver, so that a hit needs neither. The versions that
  made an entry stand in its header. A digest guards against damage; against others, the owner and mode of the file do.

  An entry, all numbers little-endian:

    0 magic (8)           8 format version      12 header length     16 target           20 NVRTC's version
   24 driver's version   28 library's version   32 flags             36 key text length  40 payload length (8)
   48 SHA-256 of the payload (32)               80 key text, then zeros that make the header's length a multiple of 16
   then SHA-256 of all before it (32), then the payload, which so is as aligned as the memory that the entry is read to
*/

#define MOER_KEY_SCHEMA "2"
#define MOER_KEY_PAYLOAD "cubin"
#define MOER_KEY_FIELDS 7

#define MOER_ENTRY_FORMAT 1u
#define MOER_ENTRY_FIXED_SIZE 80u /* the header up to the key text */
/* What the payload is, in the flags. */
#define MOER_ENTRY_CUBIN 0u
#define MOER_ENTRY_PTX 1u    /* with its terminator */
#define MOER_ENTRY_TUNING 2u /* choices.c knows more of it */
#define MOER_ENTRY_NONE 3u   /* nothing that can be kept */
#define MOER_LIBRARY_VERSION (MOE_ROUTE_VERSION_MAJOR * 10000 + MOE_ROUTE_VERSION_MINOR * 100 + MOE_ROUTE_VERSION_PATCH)

/* ---- numbers and digests ---- */

static void moer_write_number(unsigned char *bytes, uint64_t value, unsigned size) {
    unsigned i;
    for (i = 0; i < size; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t moer_read_number(const unsigned char *bytes, unsigned size) {
    uint64_t value = 0;
    unsigned i;
    for (i = size; i-- > 0;) value = value << 8 | bytes[i];
    return value;
}

static void moer_digest(const void *data, size_t size, unsigned char digest[32]) {
    moer_sha256 hash;
    moer_sha256_begin(&hash);
    moer_sha256_add(&hash, data, size);
    moer_sha256_end(&hash, digest);
}

/* ---- key ---- */

static int moer_key_add(moer_key *key, const char *text) {
    return moer_append(key->text, sizeof key->text, "%lu:%s,", (unsigned long)strlen(text), text);
}

static int moer_key_make(moer_key *key, const char *family, const char *defines, uint32_t target) {
    char target_name[32] = "";
    memset(key, 0, sizeof *key);
    key->target = target;
    moer_append(target_name, sizeof target_name, "sm_%lu", (unsigned long)target);
    if (!moer_key_add(key, MOER_KEY_SCHEMA) || !moer_key_add(key, moer_sources_digest) || !moer_key_add(key, target_name) ||
        !moer_key_add(key, MOER_CODE_OPTIONS) || !moer_key_add(key, family) || !moer_key_add(key, defines) ||
        !moer_key_add(key, MOER_KEY_PAYLOAD)) {
        return 0;
    }
    key->text_size = strlen(key->text);
    moer_digest(key->text, key->text_size, key->digest);
    return 1;
}

/* The next field of a key, "5:route,"; NULL when there is none. */
static const char *moer_key_field(const char **next, const char *end, size_t *length) {
    const char *at = *next, *field;
    size_t size = 0;
    if (at == end || *at < '0' || *at > '9') return NULL;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        size = size * 10 + (size_t)(*at - '0');
        if (size > (size_t)(end - *next)) return NULL;
    }
    if (at == end || *at != ':') return NULL;
    field = at + 1;
    if ((size_t)(end - field) <= size || field[size] != ',') return NULL;
    *next = field + size + 1;
    *length = size;
    return field;
}

static int moer_key_read(const moer_entry *entry, char *family, size_t family_size, char *defines, size_t defines_size, int *current) {
    const char *const wanted[] = {MOER_KEY_SCHEMA, moer_sources_digest, NULL, MOER_CODE_OPTIONS, NULL, NULL, MOER_KEY_PAYLOAD};
    const char *next = entry->key_text, *end = next + entry->key_size;
    int i;
    *current = 1;
    family[0] = defines[0] = '\0';
    for (i = 0; i < MOER_KEY_FIELDS; i++) {
        size_t length;
        const char *field = moer_key_field(&next, end, &length);
        if (!field) return 0;
        if (wanted[i] && (length != strlen(wanted[i]) || memcmp(field, wanted[i], length) != 0)) *current = 0;
        if (i == 4) moer_append(family, family_size, "%.*s", (int)length, field);
        if (i == 5) moer_append(defines, defines_size, "%.*s", (int)length, field);
    }
    return next == end;
}

/* ---- entry ---- */

static uint64_t moer_entry_header_size(uint64_t key_size) { return (MOER_ENTRY_FIXED_SIZE + key_size + 32 + 15) / 16 * 16; }

static const unsigned char moer_entry_magic[8] = {'M', 'O', 'E', 'C', '\r', '\n', 0x1a, '\n'};

static int moer_is_elf(const unsigned char *data, size_t size) {
    return size >= 4 && data[0] == 0x7f && data[1] == 'E' && data[2] == 'L' && data[3] == 'F';
}

/* PTX is kept with its terminator and has no other. */
static int moer_is_ptx(const unsigned char *data, size_t size) {
    return size >= 2 && memchr(data, 0, size) == data + size - 1;
}

static int moer_is_tuning(const unsigned char *data, size_t size) {
    return size > strlen(MOER_TUNING_MAGIC) && memcmp(data, MOER_TUNING_MAGIC, strlen(MOER_TUNING_MAGIC)) == 0;
}

static uint32_t moer_entry_kind(const unsigned char *payload, size_t size) {
    if (moer_is_tuning(payload, size)) return MOER_ENTRY_TUNING;
    if (moer_is_elf(payload, size)) return MOER_ENTRY_CUBIN;
    return moer_is_ptx(payload, size) ? MOER_ENTRY_PTX : MOER_ENTRY_NONE;
}

static int moer_entry_parse(const unsigned char *bytes, size_t size, moer_entry *entry) {
    unsigned char digest[32];
    uint64_t header_size, payload_size, key_size;
    uint32_t flags;
    memset(entry, 0, sizeof *entry);
    if (size < MOER_ENTRY_FIXED_SIZE + 32 || memcmp(bytes, moer_entry_magic, 8) != 0) return 0;
    if (moer_read_number(bytes + 8, 4) != MOER_ENTRY_FORMAT) return 0;
    header_size = moer_read_number(bytes + 12, 4);
    key_size = moer_read_number(bytes + 36, 4);
    payload_size = moer_read_number(bytes + 40, 8);
    flags = (uint32_t)moer_read_number(bytes + 32, 4);
    if (header_size != moer_entry_header_size(key_size) || header_size > size) return 0;
    if (payload_size > MOER_ENTRY_MAX_PAYLOAD || payload_size != size - header_size) return 0;
    moer_digest(bytes, (size_t)header_size - 32, digest);
    if (memcmp(bytes + header_size - 32, digest, 32) != 0) return 0;
    entry->payload = bytes + header_size;
    entry->payload_size = (size_t)payload_size;
    moer_digest(entry->payload, entry->payload_size, digest);
    if (memcmp(bytes + 48, digest, 32) != 0) return 0;
    if (flags == MOER_ENTRY_NONE || flags != moer_entry_kind(entry->payload, entry->payload_size)) return 0;
    entry->is_code = flags != MOER_ENTRY_TUNING;
    entry->key_text = (const char *)bytes + MOER_ENTRY_FIXED_SIZE;
    entry->key_size = (size_t)key_size;
    entry->target = (uint32_t)moer_read_number(bytes + 16, 4);
    entry->nvrtc_version = (uint32_t)moer_read_number(bytes + 20, 4);
    entry->driver_version = (uint32_t)moer_read_number(bytes + 24, 4);
    entry->library_version = (uint32_t)moer_read_number(bytes + 28, 4);
    return 1;
}

static int moer_entry_is_for(const moer_entry *entry, const moer_key *key) {
    return entry->target == key->target && entry->key_size == key->text_size && memcmp(entry->key_text, key->text, key->text_size) == 0;
}

static moer_bytes moer_entry_make(moe_route_context *context, const moer_key *key, const moer_bytes *payload) {
    const uint32_t kind = moer_entry_kind(payload->data, payload->size);
    size_t start = (size_t)moer_entry_header_size(key->text_size);
    int nvrtc_version;
    moer_bytes entry;
    unsigned char *data;
    memset(&entry, 0, sizeof entry);
    if (payload->size > MOER_ENTRY_MAX_PAYLOAD || kind == MOER_ENTRY_NONE) return entry;
    data = (unsigned char *)moer_alloc(context, start + payload->size);
    if (!data) return entry;
    moer_mutex_lock(&context->mutex);
    nvrtc_version = context->nvrtc.version;
    moer_mutex_unlock(&context->mutex);
    memcpy(data, moer_entry_magic, 8);
    moer_write_number(data + 8, MOER_ENTRY_FORMAT, 4);
    moer_write_number(data + 12, start, 4);
    moer_write_number(data + 16, key->target, 4);
    moer_write_number(data + 20, (uint64_t)nvrtc_version, 4);
    moer_write_number(data + 24, (uint64_t)context->driver_version, 4);
    moer_write_number(data + 28, MOER_LIBRARY_VERSION, 4);
    moer_write_number(data + 32, kind, 4);
    moer_write_number(data + 36, key->text_size, 4);
    moer_write_number(data + 40, payload->size, 8);
    moer_digest(payload->data, payload->size, data + 48);
    memcpy(data + MOER_ENTRY_FIXED_SIZE, key->text, key->text_size);
    moer_digest(data, start - 32, data + start - 32);
    memcpy(data + start, payload->data, payload->size);
    entry.data = data;
    entry.size = start + payload->size;
    return entry;
}

/* ---- src/cache_folder.c ---- */
/*
  cache_folder.c: which folders compiled variants are kept in: the one that this process writes, and those that are only
  read. What lies in a folder belongs to cache_file.c and cache_trim.c.

  A cubin is a program that the GPU runs with the process's memory. So a folder is used only when nobody but the user (and
  for one that is only read, the system's administrator) can put something there. There is no folder for all users, and no
  fall-back to one such as /tmp.
*/

#if defined(_WIN32)
#define MOER_HOME_CACHE "/AppData/Local"
#define MOER_CACHE_HOME "LOCALAPPDATA"
#else
#define MOER_HOME_CACHE "/.cache"
#define MOER_CACHE_HOME "XDG_CACHE_HOME"
#endif

#define MOER_CACHE_FORMAT_FOLDER "/v1"
#define MOER_ENTRY_PATH_SPACE 128u /* what is added to the folder's path, at most */

/* The folder that the description or the environment asks for. 1: in `root`; 0: none, without a complaint when *why is
   empty. */
static int moer_cache_root(const char *given, char *root, size_t size, const char **why) {
    char value[MOER_PATH_MAX];
    const char *path = given && given[0] ? given : moer_environment("MOE_ROUTE_CACHE_DIR", value, sizeof value);
    int found;
    *why = "";
    if (path) {
        if (strcmp(path, "off") == 0) return 0;
        *why = "the path of the cache folder is too long";
        return moer_path_absolute(path, root, size);
    }
    path = moer_environment(MOER_CACHE_HOME, value, sizeof value);
    if (path && moer_path_is_absolute(path)) found = moer_text_set(root, size, path);
    else found = moer_home_folder(root, size) && moer_append(root, size, MOER_HOME_CACHE);
    *why = "the user has no home folder; set MOE_ROUTE_CACHE_DIR";
    return found && moer_append(root, size, "/moe_route");
}

static int moer_cache_check_folder(const moer_cache *cache, const char *path, int read_only, char *why, size_t size) {
    moer_file_info info;
    int owned;
    why[0] = '\0';
    if (!cache->files->folder_inspect(path, &info)) {
        char reason[256];
        moer_system_error(reason, sizeof reason);
        moer_append(why, size, "it can't be opened as a folder (%s); symbolic links aren't followed", reason);
        return 0;
    }
    if (cache->trust_shared) return 1;
    owned = info.owner == MOER_OWNER_SELF || (read_only && info.owner == MOER_OWNER_SYSTEM);
    if (!owned) moer_append(why, size, "it belongs to another user");
    else if (info.writable_by_others) moer_append(why, size, "other users can write to it");
    return owned && !info.writable_by_others;
}

static void moer_cache_create_folders(const moer_cache *cache, char *path) {
    const int mode = cache->trust_shared ? 0777 : 0700;
    size_t i;
    for (i = 1; path[i]; i++) {
        if (moer_path_is_separator(path[i])) {
            char separator = path[i];
            path[i] = '\0';
            if (moer_path_inspect(path) == MOER_PATH_OTHER) cache->files->folder_create(path, mode);
            path[i] = separator;
        }
    }
    cache->files->folder_create(path, mode);
}

/* Makes the path absolute and without closing separators, behind which a symbolic link would be followed. */
static int moer_cache_normalize(char *root) {
    size_t length;
    for (length = strlen(root); length > 1 && moer_path_is_separator(root[length - 1]); length--) root[length - 1] = '\0';
    return root[0] != '\0';
}

/* Checks <root> and <root>/v1, and leaves the latter in `root`. */
static int moer_cache_check_root(const moer_cache *cache, char *root, size_t size, int read_only, char *why, size_t why_size) {
    int created = read_only || moer_path_inspect(root) == MOER_PATH_FOLDER;
    if (!created) moer_cache_create_folders(cache, root);
    if (!moer_cache_check_folder(cache, root, read_only, why, why_size)) return 0;
    moer_append(root, size, MOER_CACHE_FORMAT_FOLDER);
    if (!read_only) cache->files->folder_create(root, cache->trust_shared ? 0777 : 0700);
    return moer_cache_check_folder(cache, root, read_only, why, why_size);
}

static void moer_cache_open_own(moe_route_context *context, const char *given) {
    moer_cache *cache = &context->cache;
    char root[MOER_PATH_MAX], why[512];
    const char *no_root;
    if (!moer_cache_root(given, root, sizeof root - MOER_ENTRY_PATH_SPACE, &no_root) || !moer_cache_normalize(root)) {
        if (no_root[0]) moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk: %s", no_root);
    } else if (!moer_cache_check_root(cache, root, sizeof root, 0, why, sizeof why)) {
        moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk: the folder %s isn't used: %s", root, why);
    } else {
        moer_text_set(cache->folder, sizeof cache->folder, root);
        cache->writable = 1;
    }
}

static void moer_cache_open_read_only(moe_route_context *context, const char *const *given, uint32_t count) {
    moer_cache *cache = &context->cache;
    size_t bytes;
    uint32_t i;
    if (moer_size_mul(count, sizeof *cache->read_only, &bytes)) cache->read_only = (moer_path *)moer_alloc(context, bytes);
    for (i = 0; i < count; i++) {
        char why[512] = "there is no memory for it";
        char *root = cache->read_only ? cache->read_only[cache->num_read_only].text : NULL;
        if (root && given[i] && !moer_path_absolute(given[i], root, sizeof *cache->read_only - MOER_ENTRY_PATH_SPACE)) {
            moer_text_set(why, sizeof why, "its path is too long");
        } else if (root && given[i] && moer_cache_normalize(root) &&
                   moer_cache_check_root(cache, root, sizeof *cache->read_only, 1, why, sizeof why)) {
            cache->num_read_only++;
            continue;
        }
        moer_log(context, MOE_ROUTE_LOG_WARNING, "the read-only cache folder %s isn't used: %s", given[i] ? given[i] : "NULL", given[i] ? why : "it has no path");
    }
}

static void moer_cache_open(moe_route_context *context, const moe_route_context_desc *desc) {
    moer_cache *cache = &context->cache;
    char value[32];
    const char *refresh = moer_environment("MOE_ROUTE_CACHE", value, sizeof value);
    memset(cache, 0, sizeof *cache);
    cache->files = moer_default_files;
    cache->trust_shared = desc->trust_shared_cache != 0;
    cache->refresh = refresh && strcmp(refresh, "refresh") == 0;
    cache->limit = desc->cache_limit ? desc->cache_limit : MOER_CACHE_DEFAULT_LIMIT;
    if (desc->num_cache_read_only_dirs > 0) moer_cache_open_read_only(context, desc->cache_read_only_dirs, desc->num_cache_read_only_dirs);
    moer_cache_open_own(context, desc->cache_dir);
}

static void moer_cache_close(moe_route_context *context) {
    moer_free(context, context->cache.read_only);
    context->cache.read_only = NULL;
    context->cache.num_read_only = 0;
}

static void moer_cache_path(const char *folder, const unsigned char digest[32], int whole, char *path, size_t size) {
    size_t i;
    moer_text_set(path, size, folder);
    moer_append(path, size, "/%02x", (unsigned)digest[0]);
    if (!whole) return;
    moer_append(path, size, "/");
    for (i = 1; i < 32; i++) moer_append(path, size, "%02x", (unsigned)digest[i]);
    moer_append(path, size, ".moec");
}

/* ---- src/cache_file.c ---- */
/*
  cache_file.c: reading and writing one file. Whether its bytes are an entry is decided in cache_entry.c; which file is asked
  for, and what a failure means, in cache.c.

  A file is read into memory and never mapped: another process may cut it off at any moment. It is written under a temporary
  name in the folder where it will stand, flushed, and renamed: whoever opens it sees all of it or nothing, also after a
  crash. There is no lock: two processes may write the same entry, neither waits, and neither reads back what it wrote.
*/

/* Says why a file isn't used, once it is open. NULL: nothing speaks against it. */
static const char *moer_cache_objection(const moer_cache *cache, const moer_file_info *info, moer_read_kind kind) {
    if (info->kind == MOER_PATH_FOLDER) return "it is a folder";
    if (info->kind != MOER_PATH_FILE) return "it isn't a regular file";
    if (info->size == 0) return "it is empty";
    if (info->size > (kind == MOER_READ_PACK ? MOER_PACK_MAX_SIZE : MOER_ENTRY_MAX_SIZE)) return "it is too large";
    if (cache->trust_shared) return NULL;
    if (info->owner == MOER_OWNER_OTHER || (info->owner == MOER_OWNER_SYSTEM && kind == MOER_READ_OWN)) return "it belongs to another user";
    return info->writable_by_others ? "other users can write to it" : NULL;
}

/* Reads `size` bytes that the file must have, exactly. */
static int moer_cache_read_all(const moer_files *files, moer_file file, unsigned char *data, size_t size) {
    unsigned char more;
    size_t done = 0;
    while (done < size) {
        long count = files->read(file, data + done, size - done);
        if (count <= 0) return 0;
        done += (size_t)count;
    }
    return files->read(file, &more, 1) == 0;
}

static moer_found moer_cache_read(moe_route_context *context, const char *path, moer_read_kind kind, moer_bytes *bytes,
                                  moer_file_info *info, char *why, size_t size) {
    const moer_files *files = context->cache.files;
    const char *objection = NULL;
    moer_file file = files->open(path, kind == MOER_READ_PACK);
    memset(bytes, 0, sizeof *bytes);
    memset(info, 0, sizeof *info);
    why[0] = '\0';
    if (file == MOER_NO_FILE) {
        if (moer_system_error_is_absence()) return MOER_FOUND_NOTHING;
        moer_system_error(why, size);
        return MOER_FOUND_UNUSABLE;
    }
    if (!files->inspect(file, info)) moer_system_error(why, size);
    else objection = moer_cache_objection(&context->cache, info, kind);
    if (!why[0] && !objection) {
        bytes->size = (size_t)info->size;
        bytes->data = (unsigned char *)moer_alloc(context, bytes->size);
        if (!bytes->data) objection = "there is no memory for it";
        else if (!moer_cache_read_all(files, file, bytes->data, bytes->size)) objection = "it can't be read as a whole";
    }
    files->close(file);
    if (!why[0] && !objection) return MOER_FOUND_BYTES;
    if (objection) moer_text_set(why, size, objection);
    moer_free(context, bytes->data);
    memset(bytes, 0, sizeof *bytes);
    return info->kind == MOER_PATH_FOLDER ? MOER_FOUND_FOLDER : MOER_FOUND_UNUSABLE;
}

static int moer_cache_write_file(const moer_files *files, const char *path, const moer_bytes *bytes, int mode, char *why, size_t size) {
    moer_file file = files->create(path, mode);
    size_t done = 0;
    int written;
    if (file == MOER_NO_FILE) {
        moer_system_error(why, size);
        return 0;
    }
    while (done < bytes->size) {
        long count = files->write(file, bytes->data + done, bytes->size - done);
        if (count <= 0) break;
        done += (size_t)count;
    }
    written = done == bytes->size && files->flush(file);
    if (!written) moer_system_error(why, size);
    if (!files->close(file) && written) {
        moer_system_error(why, size);
        written = 0;
    }
    if (!written) files->remove(path);
    return written;
}

/* The folder of the entry, created again where somebody has deleted the cache meanwhile. */
static int moer_cache_open_shelf(moer_cache *cache, const moer_key *key, char *folder, size_t folder_size, char *why, size_t size) {
    const int mode = cache->trust_shared ? 0777 : 0700;
    moer_cache_path(cache->folder, key->digest, 0, folder, folder_size);
    if (!cache->files->folder_create(folder, mode) && moer_system_error_is_absence()) {
        char root[MOER_PATH_MAX];
        if (moer_text_set(root, sizeof root, cache->folder)) moer_cache_create_folders(cache, root);
        if (!moer_cache_check_folder(cache, cache->folder, 0, why, size)) return 0;
        cache->files->folder_create(folder, mode);
    }
    return moer_cache_check_folder(cache, folder, 0, why, size);
}

static int moer_cache_publish(moe_route_context *context, const moer_key *key, const moer_bytes *entry, char *why, size_t size) {
    moer_cache *cache = &context->cache;
    char folder[MOER_PATH_MAX], temporary[MOER_PATH_MAX], path[MOER_PATH_MAX];
    uint64_t random = moer_random();
    unsigned number;
    moer_mutex_lock(&context->mutex);
    number = cache->stores++;
    moer_mutex_unlock(&context->mutex);
    if (!moer_cache_open_shelf(cache, key, folder, sizeof folder, why, size)) return 0;
    moer_cache_path(cache->folder, key->digest, 1, path, sizeof path);
    moer_text_set(temporary, sizeof temporary, folder);
    moer_append(temporary, sizeof temporary, "/%lx-%x-%08lx%08lx.tmp", (unsigned long)moer_process_id(), number,
                (unsigned long)(random >> 32), (unsigned long)(random & 0xffffffffu));
    if (!moer_cache_write_file(cache->files, temporary, entry, cache->trust_shared ? 0666 : 0600, why, size)) return 0;
    if (cache->files->rename(temporary, path)) return 1;
    moer_system_error(why, size);
    cache->files->remove(temporary);
    return 0;
}

/* ---- src/cache_trim.c ---- */
/*
  cache_trim.c: what leaves the cache's folder by itself: temporary files that a killed process left, and when the folder has
  outgrown its limit, the entries that were used longest ago. Removing by request belongs to cache_calls.c.

  A file's modification time says when it was last used: a hit sets it, at most once an hour. What was written or used within
  the last hour stays, so that nothing is removed which a process is about to write, to rename or to read; a reader that has
  an older entry open loses nothing. Ages are measured from the entry that was just written, by the clock of the file system:
  this machine's own may differ.

  Looking through the folder opens every file, which takes long on a network. So it is done by the first of all processes
  that writes something an hour after the last time, which the date of an empty file tells, and by a process that has written
  as much as the limit itself.
*/

#define MOER_TEMPORARY_SUFFIX ".tmp"
#define MOER_LOOKED_THROUGH "/looked_through"
#define MOER_ENTRY_NAME 67u /* 62 digits and ".moec" */

/* Value of a hexadecimal digit as the cache writes it; 16 for anything else. */
static unsigned moer_hexadecimal(char digit) {
    if (digit >= '0' && digit <= '9') return (unsigned)(digit - '0');
    return digit >= 'a' && digit <= 'f' ? (unsigned)(digit - 'a') + 10u : 16u;
}

/* An entry's name, into the digest's bytes from the second on. */
static int moer_cache_name_read(const char *name, unsigned char digest[32]) {
    size_t i;
    if (strlen(name) != MOER_ENTRY_NAME || strcmp(name + 62, ".moec") != 0) return 0;
    for (i = 1; i < 32; i++) {
        unsigned high = moer_hexadecimal(name[2 * i - 2]), low = moer_hexadecimal(name[2 * i - 1]);
        if (high > 15 || low > 15) return 0;
        digest[i] = (unsigned char)(high << 4 | low);
    }
    return 1;
}

static int moer_cache_inspect(const moer_files *files, const char *path, moer_file_info *info) {
    moer_file file = files->open(path, 0);
    int inspected;
    if (file == MOER_NO_FILE) return 0;
    inspected = files->inspect(file, info);
    files->close(file);
    return inspected;
}

static int moer_cache_walk(moe_route_context *context, int (*visit)(moe_route_context *, const moer_cache_file *, void *), void *user) {
    const moer_files *files = context->cache.files;
    moer_cache_file *file;
    unsigned shelf;
    int going = 1;
    if (!context->cache.folder[0]) return 1;
    file = (moer_cache_file *)moer_alloc(context, sizeof *file);
    if (!file) return 0;
    for (shelf = 0; shelf < 256 && going; shelf++) {
        char path[MOER_PATH_MAX];
        moer_folder folder;
        const char *name;
        memset(file->digest, 0, sizeof file->digest);
        file->digest[0] = (unsigned char)shelf;
        moer_cache_path(context->cache.folder, file->digest, 0, path, sizeof path);
        if (!files->folder_open(&folder, path)) continue;
        while (going && (name = files->folder_next(&folder)) != NULL) {
            const size_t length = strlen(name), suffix = sizeof MOER_TEMPORARY_SUFFIX - 1;
            file->is_entry = moer_cache_name_read(name, file->digest);
            if (!file->is_entry && (length <= suffix || strcmp(name + length - suffix, MOER_TEMPORARY_SUFFIX) != 0)) continue;
            if (!moer_text_set(file->path, sizeof file->path, path) || !moer_append(file->path, sizeof file->path, "/%s", name)) continue;
            if (!moer_cache_inspect(files, file->path, &file->info)) {
                if (moer_system_error_is_absence()) continue; /* removed meanwhile */
                memset(&file->info, 0, sizeof file->info);
            }
            going = visit(context, file, user);
        }
        files->folder_close(&folder);
    }
    moer_free(context, file);
    return going;
}

/* ---- trimming ---- */

typedef struct moer_trim_entry {
    unsigned char digest[32];
    uint64_t size;
    int64_t modified;
} moer_trim_entry;

typedef struct moer_trim {
    int64_t now;
    uint64_t bytes; /* of all entries */
    moer_trim_entry *entries;
    size_t count, capacity;
} moer_trim;

static int moer_trim_visit(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_trim *trim = (moer_trim *)user;
    moer_trim_entry *entry;
    if (file->info.kind != MOER_PATH_FILE) return 1;
    if (!file->is_entry) {
        if (trim->now - file->info.modified > MOER_CACHE_RECENT) context->cache.files->remove(file->path);
        return 1;
    }
    trim->bytes += file->info.size;
    if (trim->count == trim->capacity) {
        size_t capacity = trim->capacity ? 2 * trim->capacity : 256, bytes;
        moer_trim_entry *grown = moer_size_mul(capacity, sizeof *grown, &bytes) ? (moer_trim_entry *)moer_alloc(context, bytes) : NULL;
        if (!grown) return 0;
        if (trim->count) memcpy(grown, trim->entries, trim->count * sizeof *grown);
        moer_free(context, trim->entries);
        trim->entries = grown;
        trim->capacity = capacity;
    }
    entry = &trim->entries[trim->count++];
    memcpy(entry->digest, file->digest, sizeof entry->digest);
    entry->size = file->info.size;
    entry->modified = file->info.modified;
    return 1;
}

static int moer_trim_compare(const void *a, const void *b) {
    const moer_trim_entry *left = (const moer_trim_entry *)a, *right = (const moer_trim_entry *)b;
    if (left->modified != right->modified) return left->modified < right->modified ? -1 : 1;
    return memcmp(left->digest, right->digest, sizeof left->digest);
}

/* Removes the oldest entries until `target` bytes are left, or only recent ones. */
static void moer_trim_remove(moe_route_context *context, moer_trim *trim, uint64_t target) {
    const moer_files *files = context->cache.files;
    size_t i;
    if (trim->count == 0) return;
    qsort(trim->entries, trim->count, sizeof *trim->entries, moer_trim_compare);
    for (i = 0; i < trim->count && trim->bytes > target; i++) {
        const moer_trim_entry *entry = &trim->entries[i];
        char path[MOER_PATH_MAX];
        moer_file_info info;
        if (trim->now - entry->modified <= MOER_CACHE_RECENT) break;
        moer_cache_path(context->cache.folder, entry->digest, 1, path, sizeof path);
        if (moer_cache_inspect(files, path, &info)) { /* used or written again meanwhile: it stays */
            if (info.modified != entry->modified || info.size != entry->size || !files->remove(path)) continue;
        }
        trim->bytes -= entry->size;
    }
}

/* Was the folder looked through within the hour before `now`? */
static int moer_trim_is_recent(const moer_cache *cache, int64_t now) {
    char path[MOER_PATH_MAX];
    moer_file_info info;
    moer_text_set(path, sizeof path, cache->folder);
    moer_append(path, sizeof path, MOER_LOOKED_THROUGH);
    return moer_cache_inspect(cache->files, path, &info) && now >= info.modified && now - info.modified <= MOER_CACHE_RECENT;
}

/* It was just now. */
static void moer_trim_note(const moer_cache *cache) {
    char path[MOER_PATH_MAX];
    moer_file file;
    moer_text_set(path, sizeof path, cache->folder);
    moer_append(path, sizeof path, MOER_LOOKED_THROUGH);
    if (cache->files->touch(path)) return;
    file = cache->files->create(path, cache->trust_shared ? 0666 : 0600);
    if (file != MOER_NO_FILE) cache->files->close(file);
}

static void moer_cache_trim(moe_route_context *context, const moer_key *written, size_t size) {
    moer_cache *cache = &context->cache;
    char path[MOER_PATH_MAX];
    moer_file_info info;
    moer_trim trim;
    int due, first;
    moer_mutex_lock(&context->mutex);
    cache->bytes += size;
    due = !cache->trimming && cache->bytes >= cache->trim_at;
    first = cache->trim_at == 0;
    if (due) cache->trimming = 1;
    moer_mutex_unlock(&context->mutex);
    if (!due) return;

    memset(&trim, 0, sizeof trim);
    moer_cache_path(cache->folder, written->digest, 1, path, sizeof path);
    due = moer_cache_inspect(cache->files, path, &info) && !(first && moer_trim_is_recent(cache, info.modified));
    if (due) {
        trim.now = info.modified;
        if (moer_cache_walk(context, moer_trim_visit, &trim) && trim.bytes > cache->limit) {
            moer_trim_remove(context, &trim, cache->limit - cache->limit / 8);
        }
        moer_trim_note(cache);
    }
    moer_free(context, trim.entries);
    moer_mutex_lock(&context->mutex);
    cache->trimming = 0;
    cache->bytes = due ? trim.bytes : size;
    cache->trim_at = cache->bytes <= cache->limit ? cache->limit : cache->bytes + cache->limit / 8 + 1;
    moer_mutex_unlock(&context->mutex);
}

/* ---- src/pack.c ---- */
/*
  pack.c: packs: many compiled variants in one file or piece of memory, found through an index. Reading them; writing belongs
  to pack_write.c. An entry in a pack has the same bytes as a file of the cache, and passes the same checks before it is used.

    0 magic (8)      8 format version (4)     12 number of entries (4)     16 size of the pack (8)
   24 index: for each entry its key's SHA-256 (32), its offset (8) and size (8); ascending by SHA-256
   then SHA-256 of all before it (32), then the entries
*/

static const unsigned char *moer_pack_magic(void) {
    static const unsigned char magic[8] = {'M', 'O', 'E', 'P', '\r', '\n', 0x1a, '\n'};
    return magic;
}

static const char *moer_pack_check(const unsigned char *data, size_t size, uint32_t *count) {
    unsigned char digest[32];
    size_t index_end, i;
    if (size < MOER_PACK_HEAD + 32 || memcmp(data, moer_pack_magic(), 8) != 0) return "it isn't a pack";
    if (moer_read_number(data + 8, 4) != MOER_PACK_FORMAT) return "it is of another version of the format";
    if (moer_read_number(data + 16, 8) != size) return "it isn't as long as it says: a part is missing, or something follows it";
    *count = (uint32_t)moer_read_number(data + 12, 4);
    if (*count > (size - MOER_PACK_HEAD - 32) / MOER_PACK_INDEX) return "its index is damaged";
    index_end = MOER_PACK_HEAD + (size_t)*count * MOER_PACK_INDEX;
    moer_digest(data, index_end, digest);
    if (memcmp(data + index_end, digest, 32) != 0) return "its index is damaged";
    for (i = 0; i < *count; i++) {
        const unsigned char *item = data + MOER_PACK_HEAD + i * MOER_PACK_INDEX;
        uint64_t offset = moer_read_number(item + 32, 8), length = moer_read_number(item + 40, 8);
        if (offset < index_end + 32 || offset > size || length > size - offset) return "its index is wrong";
        if (i > 0 && memcmp(item - MOER_PACK_INDEX, item, 32) >= 0) return "its index is wrong";
    }
    return NULL;
}

static int moer_pack_find(const moer_pack *pack, const unsigned char digest[32], const unsigned char **bytes, size_t *size) {
    size_t low = 0, high = pack->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const unsigned char *item = pack->data + MOER_PACK_HEAD + middle * MOER_PACK_INDEX;
        int order = memcmp(item, digest, 32);
        if (order == 0) {
            *bytes = pack->data + moer_read_number(item + 32, 8);
            *size = (size_t)moer_read_number(item + 40, 8);
            return 1;
        }
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return 0;
}

/* Takes over `owned`, also when it fails. */
static moe_route_status moer_pack_add(moe_route_context *context, const unsigned char *data, unsigned char *owned, size_t size, const char *name) {
    moer_pack *pack, **link;
    uint32_t count = 0;
    const char *wrong = moer_pack_check(data, size, &count);
    if (wrong) {
        moer_free(context, owned);
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "the pack %s isn't used: %s", name, wrong);
    }
    pack = (moer_pack *)moer_alloc(context, sizeof *pack + strlen(name) + 1);
    if (!pack) {
        moer_free(context, owned);
        return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for the pack %s", name);
    }
    pack->data = data;
    pack->owned = owned;
    pack->size = size;
    pack->count = count;
    pack->name = (char *)(pack + 1);
    memcpy(pack->name, name, strlen(name) + 1);
    moer_mutex_lock(&context->mutex);
    for (link = &context->packs; *link; link = &(*link)->next) {}
    *link = pack;
    moer_mutex_unlock(&context->mutex);
    moer_log(context, MOE_ROUTE_LOG_INFO, "the pack %s holds %u variants", name, (unsigned)count);
    return MOE_ROUTE_OK;
}

static void moer_packs_close(moe_route_context *context) {
    while (context->packs) {
        moer_pack *pack = context->packs;
        context->packs = pack->next;
        moer_free(context, pack->owned);
        moer_free(context, pack);
    }
}

/* Packs are for contexts with variants. */
static moe_route_status moer_pack_check_context(moe_route_context *context, const char *call) {
    moe_route_status status = moer_context_check(context, call);
    if (status == MOE_ROUTE_OK && context->device == MOE_ROUTE_DEVICE_CPU)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: the context is of the CPU backend, which has no variants", call);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_pack_load(moe_route_context *context, const char *path) {
    moer_bytes bytes;
    moer_file_info info;
    char why[512];
    moer_found found;
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    status = moer_pack_check_context(context, "moe_route_pack_load");
    if (status != MOE_ROUTE_OK) return status;
    if (!path) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_load: path is NULL");
    found = moer_cache_read(context, path, MOER_READ_PACK, &bytes, &info, why, sizeof why);
    if (found == MOER_FOUND_NOTHING) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_load: there is no file %s", path);
    if (found != MOER_FOUND_BYTES) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_load: %s isn't used: %s", path, why);
    return moer_pack_add(context, bytes.data, bytes.data, bytes.size, path);
}

MOE_ROUTE_API moe_route_status moe_route_pack_use(moe_route_context *context, const void *data, size_t size) {
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    status = moer_pack_check_context(context, "moe_route_pack_use");
    if (status != MOE_ROUTE_OK) return status;
    if (!data) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_use: data is NULL");
    return moer_pack_add(context, (const unsigned char *)data, NULL, size, "in memory");
}

/* ---- src/pack_write.c ---- */
/*
  pack_write.c: writes what contexts of MOE_ROUTE_DEVICE_COMPILE hold into one pack. The format is described in pack.c.
*/

typedef struct moer_pack_item {
    moer_key key;
    const moer_bytes *entry;
} moer_pack_item;

static int moer_pack_item_compare(const void *a, const void *b) {
    return memcmp(((const moer_pack_item *)a)->key.digest, ((const moer_pack_item *)b)->key.digest, 32);
}

static size_t moer_pack_count(moe_route_context *context) {
    const moer_variant *variant;
    size_t count = 0;
    moer_mutex_lock(&context->mutex);
    for (variant = context->variants; variant; variant = variant->next) count++;
    moer_mutex_unlock(&context->mutex);
    return count;
}

/* The context's finished variants; the number of items. They don't change any more while the context lives. */
static size_t moer_pack_gather(moe_route_context *context, moer_pack_item *items, size_t space) {
    const moer_variant *variant;
    size_t count = 0;
    moer_mutex_lock(&context->mutex);
    for (variant = context->variants; variant && count < space; variant = variant->next) {
        if (variant->state != 1 || !moer_key_make(&items[count].key, variant->family->name, variant->defines, context->target)) continue;
        items[count++].entry = &variant->entry;
    }
    moer_mutex_unlock(&context->mutex);
    return count;
}

/* The pack's bytes; data NULL when there is no memory. The items are sorted, and each is there once. */
static moer_bytes moer_pack_build(moe_route_context *context, const moer_pack_item *items, size_t count) {
    size_t index_end = MOER_PACK_HEAD + count * MOER_PACK_INDEX, i, at;
    moer_bytes pack;
    memset(&pack, 0, sizeof pack);
    pack.size = index_end + 32;
    for (i = 0; i < count; i++) {
        if (!moer_size_add(pack.size, items[i].entry->size, &pack.size)) return pack;
    }
    pack.data = (unsigned char *)moer_alloc(context, pack.size);
    if (!pack.data) return pack;
    memcpy(pack.data, moer_pack_magic(), 8);
    moer_write_number(pack.data + 8, MOER_PACK_FORMAT, 4);
    moer_write_number(pack.data + 12, count, 4);
    moer_write_number(pack.data + 16, pack.size, 8);
    for (i = 0, at = index_end + 32; i < count; at += items[i].entry->size, i++) {
        unsigned char *item = pack.data + MOER_PACK_HEAD + i * MOER_PACK_INDEX;
        memcpy(item, items[i].key.digest, 32);
        moer_write_number(item + 32, at, 8);
        moer_write_number(item + 40, items[i].entry->size, 8);
        memcpy(pack.data + at, items[i].entry->data, items[i].entry->size);
    }
    moer_digest(pack.data, index_end, pack.data + index_end);
    return pack;
}

static moe_route_status moer_pack_write(moe_route_context *context, const moer_bytes *pack, const char *path) {
    const moer_files *files = context->cache.files;
    char temporary[MOER_PATH_MAX] = "", why[512] = "";
    uint64_t random = moer_random();
    if (!moer_append(temporary, sizeof temporary, "%s.%08lx%08lx.tmp", path, (unsigned long)(random >> 32), (unsigned long)(random & 0xffffffffu)))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: path has more than %d characters", MOER_PATH_MAX - 1);
    if (!moer_cache_write_file(files, temporary, pack, 0644, why, sizeof why))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: %s can't be written: %s", path, why);
    if (files->rename(temporary, path)) return MOE_ROUTE_OK;
    moer_system_error(why, sizeof why);
    files->remove(temporary);
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: %s can't be written: %s", path, why);
}

static moe_route_status moer_pack_save(moe_route_context *const *contexts, uint32_t num_contexts, moer_pack_item *items, size_t space, const char *path) {
    moe_route_context *context = contexts[0];
    size_t count = 0, kept = 0, i;
    moer_bytes pack;
    moe_route_status status;
    for (i = 0; i < num_contexts; i++) count += moer_pack_gather(contexts[i], items + count, space - count);
    if (count == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: no layer was created in the contexts, so there is nothing to write");
    qsort(items, count, sizeof *items, moer_pack_item_compare);
    for (i = 0; i < count; i++) {
        if (kept == 0 || moer_pack_item_compare(&items[kept - 1], &items[i]) != 0) items[kept++] = items[i];
    }
    pack = moer_pack_build(context, items, kept);
    if (!pack.data) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a pack of %lu variants", (unsigned long)kept);
    status = moer_pack_write(context, &pack, path);
    moer_free(context, pack.data);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_pack_save(moe_route_context *const *contexts, uint32_t num_contexts, const char *path) {
    moer_pack_item *items;
    size_t space = 0, size, i;
    moe_route_status status;
    if (!contexts || num_contexts == 0 || !contexts[0]) return MOE_ROUTE_ERROR_ARGUMENT;
    if (!path) return moer_fail(contexts[0], MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: path is NULL");
    for (i = 0; i < num_contexts; i++) {
        if (!contexts[i]) return moer_fail(contexts[0], MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: contexts[%u] is NULL", (unsigned)i);
        status = moer_context_check(contexts[i], "moe_route_pack_save");
        if (status == MOE_ROUTE_OK && contexts[i]->device != MOE_ROUTE_DEVICE_COMPILE)
            status = moer_fail(contexts[0], MOE_ROUTE_ERROR_ARGUMENT, "moe_route_pack_save: contexts[%u] isn't of MOE_ROUTE_DEVICE_COMPILE", (unsigned)i);
        if (status != MOE_ROUTE_OK) return status;
        space += moer_pack_count(contexts[i]);
    }
    items = moer_size_mul(space, sizeof *items, &size) ? (moer_pack_item *)moer_alloc(contexts[0], size) : NULL;
    if (!items) return moer_fail(contexts[0], MOE_ROUTE_ERROR_MEMORY, "out of memory for a pack of %lu variants", (unsigned long)space);
    status = moer_pack_save(contexts, num_contexts, items, space, path);
    moer_free(contexts[0], items);
    return status;
}

/* ---- src/cache.c ---- */
/*
  cache.c: the order in which kept variants are looked for: packs, folders that are only read, the context's own folder; what
  a failure there means; and counting. Anything doubtful about an entry is a miss: it costs a compilation and never an error.
  An entry's format, the folders and the files belong to cache_*.c and pack.c; compiling and loading to variant.c.
*/

static void moer_count(moe_route_context *context, uint64_t *counter) {
    moer_mutex_lock(&context->mutex);
    ++*counter;
    moer_mutex_unlock(&context->mutex);
}

/* Takes the bytes if they are the entry that is looked for, and frees them otherwise. */
static int moer_lookup_accept(moe_route_context *context, moer_lookup *lookup, const moer_bytes *bytes) {
    if (moer_entry_parse(bytes->data, bytes->size, &lookup->entry) && moer_entry_is_for(&lookup->entry, &lookup->key) && lookup->entry.is_code != lookup->is_tuning) {
        lookup->bytes = *bytes;
        return 1;
    }
    moer_free(context, bytes->data);
    return 0;
}

static void moer_lookup_reject(moe_route_context *context, const char *place, const char *why) {
    moer_count(context, &context->statistics.rejects);
    moer_log(context, MOE_ROUTE_LOG_INFO, "%s isn't used: %s", place, why);
}

static int moer_lookup_in_pack(moe_route_context *context, moer_lookup *lookup, const moer_pack *pack) {
    const unsigned char *found;
    moer_bytes bytes;
    if (!moer_pack_find(pack, lookup->key.digest, &found, &bytes.size)) return 0;
    bytes.data = bytes.size <= MOER_ENTRY_MAX_SIZE ? (unsigned char *)moer_alloc(context, bytes.size) : NULL;
    if (bytes.data) {
        memcpy(bytes.data, found, bytes.size);
        if (moer_lookup_accept(context, lookup, &bytes)) {
            lookup->origin = MOE_ROUTE_ORIGIN_PACK;
            lookup->path[0] = '\0';
            return 1;
        }
    }
    moer_lookup_reject(context, pack->name, bytes.data ? "the entry of a variant in this pack is damaged" : "there is no memory for one of its variants");
    return 0;
}

/* Marks an entry as used, for when the folder outgrows its limit. */
static void moer_lookup_touch(moe_route_context *context, const char *path, int64_t modified) {
    const int64_t age = context->cache.files->now() - modified;
    if (age > MOER_CACHE_RECENT || age < -MOER_CACHE_RECENT) context->cache.files->touch(path);
}

static int moer_lookup_in_folder(moe_route_context *context, moer_lookup *lookup, const char *folder, int read_only) {
    char path[MOER_PATH_MAX], why[512];
    moer_bytes bytes;
    moer_file_info info;
    moer_found found;
    moer_cache_path(folder, lookup->key.digest, 1, path, sizeof path);
    found = moer_cache_read(context, path, read_only ? MOER_READ_READ_ONLY : MOER_READ_OWN, &bytes, &info, why, sizeof why);
    if (found == MOER_FOUND_NOTHING) return 0;
    if (found == MOER_FOUND_BYTES) {
        if (moer_lookup_accept(context, lookup, &bytes)) {
            lookup->origin = MOE_ROUTE_ORIGIN_CACHE;
            moer_text_set(lookup->path, sizeof lookup->path, read_only ? "" : path);
            if (!read_only) moer_lookup_touch(context, path, info.modified);
            return 1;
        }
        moer_text_set(why, sizeof why, "it is damaged or isn't the entry of its name");
    }
    if (found == MOER_FOUND_FOLDER && !read_only) lookup->blocked = 1;
    moer_lookup_reject(context, path, why);
    return 0;
}

static int moer_lookup_in_folders(moe_route_context *context, moer_lookup *lookup, uint32_t first) {
    const moer_cache *cache = &context->cache;
    while (!cache->refresh && lookup->place <= first + cache->num_read_only) {
        const uint32_t place = lookup->place++ - first;
        const int read_only = place < cache->num_read_only;
        const char *folder = read_only ? cache->read_only[place].text : cache->folder;
        if (folder[0] && moer_lookup_in_folder(context, lookup, folder, read_only)) return 1;
    }
    return 0;
}

static int moer_lookup_next(moe_route_context *context, moer_lookup *lookup) {
    const moer_cache *cache = &context->cache;
    const moer_pack *pack;
    uint32_t num_packs = 0;
    moer_mutex_lock(&context->mutex);
    pack = context->packs;
    moer_mutex_unlock(&context->mutex);
    while (pack) { /* packs are added at the end and never removed, so that their numbers stay */
        if (num_packs++ == lookup->place) {
            lookup->place++;
            if (moer_lookup_in_pack(context, lookup, pack)) {
                moer_count(context, &context->statistics.pack_hits);
                return 1;
            }
        }
        moer_mutex_lock(&context->mutex);
        pack = pack->next;
        moer_mutex_unlock(&context->mutex);
    }
    if (moer_lookup_in_folders(context, lookup, num_packs)) {
        moer_count(context, &context->statistics.cache_hits);
        return 1;
    }
    if (!lookup->missed && (cache->folder[0] || cache->num_read_only)) moer_count(context, &context->statistics.cache_misses);
    lookup->missed = 1;
    return 0;
}

static void moer_lookup_refused(moe_route_context *context, moer_lookup *lookup) {
    moer_count(context, &context->statistics.rejects);
    if (lookup->path[0]) {
        char why[512];
        moer_bytes bytes;
        moer_file_info info;
        if (moer_cache_read(context, lookup->path, MOER_READ_OWN, &bytes, &info, why, sizeof why) == MOER_FOUND_BYTES) {
            if (bytes.size == lookup->bytes.size && memcmp(bytes.data, lookup->bytes.data, bytes.size) == 0) context->cache.files->remove(lookup->path);
            moer_free(context, bytes.data);
        }
    }
    moer_free(context, lookup->bytes.data);
    memset(&lookup->bytes, 0, sizeof lookup->bytes);
}

static void moer_cache_store(moe_route_context *context, const moer_lookup *lookup, const moer_bytes *entry) {
    moer_cache *cache = &context->cache;
    char why[512] = "";
    int writable, first = 0;
    moer_mutex_lock(&context->mutex);
    writable = cache->folder[0] && cache->writable && !lookup->blocked;
    moer_mutex_unlock(&context->mutex);
    if (!writable) return;
    if (moer_cache_publish(context, &lookup->key, entry, why, sizeof why)) {
        moer_count(context, &context->statistics.cache_writes);
        moer_cache_trim(context, &lookup->key, entry->size);
        return;
    }
    moer_mutex_lock(&context->mutex);
    context->statistics.cache_write_failures++;
    first = cache->writable;
    cache->writable = 0;
    moer_mutex_unlock(&context->mutex);
    if (first) {
        moer_log(context, MOE_ROUTE_LOG_WARNING, "compiled kernels aren't kept on disk any longer: writing to %s: %s", cache->folder, why);
    }
}

/* ---- src/cache_calls.c ---- */
/*
  cache_calls.c: the public functions by which an operator's program looks at the cache: statistics, listing, verifying,
  clearing. They only look at the context's own folder.
*/

MOE_ROUTE_API void moe_route_context_get_statistics(const moe_route_context *context, moe_route_statistics *statistics) {
    moe_route_context *changing = (moe_route_context *)(uintptr_t)context; /* locking changes only the mutex */
    if (!statistics) return;
    memset(statistics, 0, sizeof *statistics);
    if (!context) return;
    moer_mutex_lock(&changing->mutex);
    *statistics = context->statistics;
    moer_mutex_unlock(&changing->mutex);
}

typedef struct moer_cache_visit { /* what one of the calls below has seen so far */
    moe_route_cache_visitor visitor;
    void *user;
    uint64_t num_sound, num_removed;
} moer_cache_visit;

/* The entry's bytes, when they pass the checks that they pass before use; data NULL otherwise. */
static moer_bytes moer_cache_read_entry(moe_route_context *context, const moer_cache_file *file, moer_entry *entry) {
    unsigned char digest[32];
    char why[512];
    moer_bytes bytes;
    moer_file_info info;
    memset(entry, 0, sizeof *entry);
    if (moer_cache_read(context, file->path, MOER_READ_OWN, &bytes, &info, why, sizeof why) != MOER_FOUND_BYTES) return bytes;
    if (moer_entry_parse(bytes.data, bytes.size, entry)) {
        moer_digest(entry->key_text, entry->key_size, digest);
        if (memcmp(digest, file->digest, 32) == 0) return bytes;
    }
    moer_free(context, bytes.data);
    memset(&bytes, 0, sizeof bytes);
    return bytes;
}

static int moer_cache_list_file(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_cache_visit *visit = (moer_cache_visit *)user;
    char kernel[64] = "", variant[MOER_DEFINES_MAX] = "";
    moe_route_cache_entry entry;
    moer_entry parsed;
    moer_bytes bytes;
    int current = 0;
    int64_t age;
    if (!file->is_entry) return 1;
    bytes = moer_cache_read_entry(context, file, &parsed);
    memset(&entry, 0, sizeof entry);
    entry.path = file->path;
    entry.sound = bytes.data != NULL && moer_key_read(&parsed, kernel, sizeof kernel, variant, sizeof variant, &current);
    entry.current = entry.sound && current;
    entry.kernel = kernel;
    entry.variant = variant;
    if (entry.sound) {
        entry.target = parsed.target;
        entry.nvrtc_version = parsed.nvrtc_version;
        entry.driver_version = parsed.driver_version;
    }
    entry.size = file->info.size;
    age = context->cache.files->now() - file->info.modified;
    entry.seconds_unused = age > 0 ? age : 0;
    visit->visitor(&entry, visit->user);
    moer_free(context, bytes.data);
    return 1;
}

static int moer_cache_verify_file(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_cache_visit *visit = (moer_cache_visit *)user;
    moer_entry parsed;
    moer_bytes bytes;
    if (!file->is_entry) return 1;
    bytes = moer_cache_read_entry(context, file, &parsed);
    if (bytes.data) visit->num_sound++;
    else if (context->cache.files->remove(file->path)) visit->num_removed++;
    moer_free(context, bytes.data);
    return 1;
}

static int moer_cache_clear_file(moe_route_context *context, const moer_cache_file *file, void *user) {
    moer_cache_visit *visit = (moer_cache_visit *)user;
    if (!file->is_entry && context->cache.files->now() - file->info.modified <= MOER_CACHE_RECENT) return 1; /* being written */
    if (context->cache.files->remove(file->path)) visit->num_removed += (uint64_t)file->is_entry;
    return 1;
}

static moe_route_status moer_cache_call(moe_route_context *context, const char *call, int (*look)(moe_route_context *, const moer_cache_file *, void *),
                                        moer_cache_visit *visit) {
    moe_route_status status = moer_context_check(context, call);
    if (status != MOE_ROUTE_OK || context->device == MOE_ROUTE_DEVICE_CPU) return status;
    if (moer_cache_walk(context, look, visit)) return MOE_ROUTE_OK;
    return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "%s: out of memory", call);
}

MOE_ROUTE_API moe_route_status moe_route_cache_list(moe_route_context *context, moe_route_cache_visitor visitor, void *user) {
    moer_cache_visit visit;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    if (!visitor) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_cache_list: visitor is NULL");
    memset(&visit, 0, sizeof visit);
    visit.visitor = visitor;
    visit.user = user;
    return moer_cache_call(context, "moe_route_cache_list", moer_cache_list_file, &visit);
}

MOE_ROUTE_API moe_route_status moe_route_cache_verify(moe_route_context *context, uint64_t *num_sound, uint64_t *num_removed) {
    moer_cache_visit visit;
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    memset(&visit, 0, sizeof visit);
    status = moer_cache_call(context, "moe_route_cache_verify", moer_cache_verify_file, &visit);
    if (num_sound) *num_sound = visit.num_sound;
    if (num_removed) *num_removed = visit.num_removed;
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_cache_clear(moe_route_context *context, uint64_t *num_removed) {
    moer_cache_visit visit;
    moe_route_status status;
    if (!context) return MOE_ROUTE_ERROR_ARGUMENT;
    memset(&visit, 0, sizeof visit);
    status = moer_cache_call(context, "moe_route_cache_clear", moer_cache_clear_file, &visit);
    if (num_removed) *num_removed = visit.num_removed;
    return status;
}

/* ---- src/context.c ---- */
/*
  context.c: a context's life: which device it stands for, and entering its CUDA context. The driver's loading belongs to
  driver.c.
*/

/* A process that fork made can use neither CUDA nor NVRTC, whose threads it hasn't inherited. */
static int moer_context_is_forked(const moe_route_context *context) { return context->process_id != moer_process_id(); }

static moe_route_status moer_context_forked(moe_route_context *context) {
    return moer_fail(context, MOE_ROUTE_ERROR_FORKED, "the context was created before fork(); CUDA and NVRTC can't be used in the child process");
}

static moe_route_status moer_context_check(moe_route_context *context, const char *call) {
    if (!context->usable) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: the context's creation failed", call);
    if (context->device != MOE_ROUTE_DEVICE_CPU && moer_context_is_forked(context)) return moer_context_forked(context);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_context_enter(moe_route_context *context, int *pushed) {
    moe_route_cuda_context current = NULL;
    moer_cu_result result;
    *pushed = 0;
    if (moer_context_is_forked(context)) return moer_context_forked(context);
    result = context->driver.cuCtxGetCurrent(&current);
    if (result == 0 && current == context->cu_context) return MOE_ROUTE_OK;
    result = context->driver.cuCtxPushCurrent(context->cu_context);
    if (result != 0) return moer_driver_fail(context, "cuCtxPushCurrent", result);
    *pushed = 1;
    return MOE_ROUTE_OK;
}

static void moer_context_leave(moe_route_context *context, int pushed) {
    moe_route_cuda_context popped;
    if (pushed) context->driver.cuCtxPopCurrent(&popped);
}

/* Decides on the CUDA context and its device. */
static moe_route_status moer_context_bind(moe_route_context *context, int ordinal, moe_route_cuda_context wanted) {
    const moer_driver *driver = &context->driver;
    moer_cu_result result;
    moe_route_cuda_context current = NULL, popped;
    moer_cu_device device = 0;
    int count = 0;

    if (wanted == NULL && driver->cuCtxGetCurrent(&current) == 0 && current != NULL) {
        result = driver->cuCtxGetDevice(&device);
        if (result != 0) return moer_driver_fail(context, "cuCtxGetDevice", result);
        if (ordinal == 0 || device == ordinal) wanted = current;
    }
    if (wanted != NULL) {
        result = driver->cuCtxPushCurrent(wanted);
        if (result != 0) return moer_driver_fail(context, "cuCtxPushCurrent of the given context", result);
        result = driver->cuCtxGetDevice(&context->cu_device);
        driver->cuCtxPopCurrent(&popped);
        if (result != 0) return moer_driver_fail(context, "cuCtxGetDevice", result);
        context->cu_context = wanted;
        return MOE_ROUTE_OK;
    }
    result = driver->cuDeviceGetCount(&count);
    if (result != 0) return moer_driver_fail(context, "cuDeviceGetCount", result);
    if (count == 0) return moer_fail(context, MOE_ROUTE_ERROR_NO_DEVICE, "the NVIDIA driver sees no GPU");
    if (ordinal >= count)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: device_ordinal is %d; there are %d GPUs, numbered from 0", ordinal, count);
    result = driver->cuDeviceGet(&context->cu_device, ordinal);
    if (result != 0) return moer_driver_fail(context, "cuDeviceGet", result);
    result = driver->cuDevicePrimaryCtxRetain(&context->cu_context, context->cu_device);
    if (result != 0) return moer_driver_fail(context, "cuDevicePrimaryCtxRetain", result);
    context->retained_primary = 1;
    return MOE_ROUTE_OK;
}

static moe_route_status moer_context_open_gpu(moe_route_context *context, const moe_route_context_desc *desc) {
    const moer_driver *driver = &context->driver;
    int major = 0, minor = 0, multiprocessors = 0, l2_bytes = 0;
    moer_cu_result result;
    moe_route_status status = moer_driver_open(context);
    if (status == MOE_ROUTE_OK) status = moer_context_bind(context, desc->device_ordinal, desc->cuda_context);
    if (status != MOE_ROUTE_OK) return status;
    result = driver->cuDeviceGetName(context->name, (int)sizeof context->name, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&major, MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&minor, MOER_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&multiprocessors, MOER_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, context->cu_device);
    if (result == 0) result = driver->cuDeviceGetAttribute(&l2_bytes, MOER_CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, context->cu_device);
    if (result != 0) return moer_driver_fail(context, "cuDeviceGetAttribute", result);
    context->l2_bytes = l2_bytes > 0 ? (uint64_t)l2_bytes : 0;
    context->target = (uint32_t)(major * 10 + minor);
    context->num_multiprocessors = (uint32_t)multiprocessors;
    if (major < 8)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "%s has compute capability %d.%d; 8.0 or newer is needed (the CPU backend runs everywhere: MOE_ROUTE_DEVICE_CPU)",
                         context->name, major, minor);
    return MOE_ROUTE_OK;
}

/* What the context's information names, also when the creation fails. */
static moe_route_device moer_context_device(moe_route_device wanted) {
    if (wanted == MOE_ROUTE_DEVICE_DEFAULT) return MOE_ROUTE_DEVICE_GPU;
    return wanted == MOE_ROUTE_DEVICE_GPU || wanted == MOE_ROUTE_DEVICE_COMPILE ? wanted : MOE_ROUTE_DEVICE_CPU;
}

static moe_route_status moer_context_open(moe_route_context *context, const moe_route_context_desc *desc) {
    moe_route_status status;
    context->device = moer_context_device(desc->device);
    if (desc->num_cache_read_only_dirs > 0 && desc->cache_read_only_dirs == NULL)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: cache_read_only_dirs is NULL and num_cache_read_only_dirs is %u", (unsigned)desc->num_cache_read_only_dirs);
    if ((desc->allocator.alloc == NULL) != (desc->allocator.free == NULL))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: allocator.alloc and allocator.free are given both or neither");
    if (desc->device_ordinal < 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: device_ordinal is %d; allowed is 0 and up", (int)desc->device_ordinal);
    if (desc->nvrtc_path != NULL && !moer_append(context->nvrtc_path, sizeof context->nvrtc_path, "%s", desc->nvrtc_path))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: nvrtc_path has more than %d characters", MOER_PATH_MAX - 1);
    switch (desc->device) {
    case MOE_ROUTE_DEVICE_DEFAULT:
    case MOE_ROUTE_DEVICE_GPU: {
        int falls_back;
        memset(&context->logger, 0, sizeof context->logger); /* whether a failure is an error shows afterwards */
        status = moer_context_open_gpu(context, desc);
        context->logger = desc->logger;
        falls_back = status == MOE_ROUTE_ERROR_NO_DEVICE && desc->device == MOE_ROUTE_DEVICE_DEFAULT;
        if (status != MOE_ROUTE_OK)
            moer_log(context, falls_back ? MOE_ROUTE_LOG_INFO : MOE_ROUTE_LOG_ERROR, "%s%s", falls_back ? "using the CPU backend: " : "",
                     context->message != NULL ? context->message : moe_route_status_name(status));
        if (falls_back) {
            free(context->message);
            context->message = NULL;
            break;
        }
        if (status == MOE_ROUTE_OK) moer_cache_open(context, desc);
        return status;
    }
    case MOE_ROUTE_DEVICE_CPU:
        break;
    case MOE_ROUTE_DEVICE_COMPILE:
        if (desc->compile_target < 80 || desc->compile_target > 999)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: compile_target is %u; allowed is an architecture from 80 on, such as 90 for sm_90",
                             (unsigned)desc->compile_target);
        context->target = desc->compile_target;
        moer_append(context->name, sizeof context->name, "compiling for sm_%u", (unsigned)context->target);
        moer_cache_open(context, desc);
        return MOE_ROUTE_OK;
    default:
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "context: device is %d; allowed are the values of moe_route_device", (int)desc->device);
    }
    context->device = MOE_ROUTE_DEVICE_CPU;
    moer_append(context->name, sizeof context->name, "CPU");
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API moe_route_status moe_route_context_create(const moe_route_context_desc *desc, moe_route_context **out) {
    moe_route_context_desc defaults;
    moe_route_context *context;
    moe_route_status status;
    if (out == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    *out = NULL;
    memset(&defaults, 0, sizeof defaults);
    if (desc == NULL) desc = &defaults;
    context = desc->allocator.alloc != NULL && desc->allocator.free != NULL ? (moe_route_context *)desc->allocator.alloc(sizeof *context, desc->allocator.user)
                                                                           : (moe_route_context *)malloc(sizeof *context);
    if (context == NULL) return MOE_ROUTE_ERROR_MEMORY;
    memset(context, 0, sizeof *context);
    if (desc->allocator.alloc != NULL && desc->allocator.free != NULL) context->allocator = desc->allocator;
    context->logger = desc->logger;
    context->process_id = moer_process_id();
    moer_mutex_init(&context->mutex);
    moer_condition_init(&context->variant_ready);
    *out = context;
    status = moer_context_open(context, desc);
    context->usable = status == MOE_ROUTE_OK;
    return status;
}

MOE_ROUTE_API void moe_route_context_destroy(moe_route_context *context) {
    moe_route_allocator allocator;
    if (context == NULL) return;
    moer_variants_destroy(context, !moer_context_is_forked(context));
    moer_packs_close(context);
    moer_cache_close(context);
    moer_tunings_destroy(context);
    if (!moer_context_is_forked(context)) { /* a child's copies may look as if threads waited on them, forever */
        if (context->retained_primary) context->driver.cuDevicePrimaryCtxRelease(context->cu_device);
        moer_condition_destroy(&context->variant_ready);
        moer_mutex_destroy(&context->mutex);
    }
    free(context->message);
    allocator = context->allocator;
    if (allocator.free != NULL) allocator.free(context, allocator.user);
    else free(context);
}

MOE_ROUTE_API void moe_route_context_get_info(const moe_route_context *context, moe_route_context_info *info) {
    moe_route_context *changing = (moe_route_context *)(uintptr_t)context; /* locking changes only the mutex */
    if (info == NULL) return;
    memset(info, 0, sizeof *info);
    if (context == NULL) return;
    info->device = context->device;
    info->target = context->target;
    info->num_multiprocessors = context->num_multiprocessors;
    info->driver_version = (uint32_t)context->driver_version;
    moer_append(info->name, sizeof info->name, "%s", context->name);
    moer_mutex_lock(&changing->mutex);
    info->nvrtc_version = context->nvrtc.state > 0 ? (uint32_t)context->nvrtc.version : 0u;
    moer_append(info->nvrtc_path, sizeof info->nvrtc_path, "%s", context->nvrtc.state > 0 ? context->nvrtc.path : "");
    moer_mutex_unlock(&changing->mutex);
    moer_append(info->cache_dir, sizeof info->cache_dir, "%s", context->cache.folder);
}

/* ---- src/variant.c ---- */
/*
  variant.c: kernel families, and the table of variants that a context has loaded: each one compiled or read once, however
  many layers and threads ask for it. How cubins are compiled and kept on disk belongs to nvrtc.c and cache.c; which
  variants a layer needs, to layer.c.
*/

static const moer_family moer_family_route = {"route", "route.cu", {"moe_route_route", NULL, NULL}};
static const moer_family moer_family_topk = {"topk", "topk.cu", {"moe_route_topk", NULL, NULL}};
static const moer_family moer_family_maps = {"maps", "maps.cu", {"moe_route_maps_count", "moe_route_maps_scatter", "moe_route_maps_sort"}};
static const moer_family moer_family_maps_cub = {"maps_cub", "maps_cub.cu", {"moe_route_maps_cub_count", "moe_route_maps_cub_scatter", NULL}};
static const moer_family moer_family_matmul = {"matmul", "matmul.cu", {"moe_route_matmul", NULL, NULL}};
static const moer_family moer_family_matmul_bulk = {"matmul_bulk", "matmul_bulk.cu", {"moe_route_matmul_bulk", NULL, NULL}};
static const moer_family moer_family_grouped = {"grouped", "grouped.cu", {"moe_route_grouped", NULL, NULL}};
static const moer_family moer_family_grouped_warpgroups = {"grouped_warpgroups", "grouped_warpgroups.cu", {"moe_route_grouped_warpgroups", NULL, NULL}};
static const moer_family moer_family_down = {"down", "down.cu", {"moe_route_down", NULL, NULL}};
static const moer_family moer_family_combine = {"combine", "combine.cu", {"moe_route_combine", NULL, NULL}};
static const moer_family moer_family_expand = {"expand", "expand.cu", {"moe_route_expand", NULL, NULL}};
static const moer_family moer_family_dispatch = {"dispatch", "dispatch.cu", {"moe_route_dispatch", NULL, NULL}};
static const moer_family moer_family_dispatch_large = {"dispatch_large", "dispatch_large.cu", {"moe_route_dispatch_count", "moe_route_dispatch_scatter", NULL}};
static const moer_family moer_family_slots = {"slots", "slots.cu", {"moe_route_slots", NULL, NULL}};

static uint32_t moer_most_shared_bytes(uint32_t target) {
    if (target / 10 == 12 || target == 86 || target == 89) return 99 * 1024;
    return (target / 10 == 8 ? 163 : 227) * 1024;
}

static uint32_t moer_defined(const char *defines, const char *name) {
    const size_t length = strlen(name);
    const char *at;
    for (at = defines; (at = strstr(at, name)) != NULL; at += length)
        if ((at == defines || at[-1] == ' ') && at[length] == '=') return (uint32_t)strtoul(at + length + 1, NULL, 10);
    return 0;
}

/* Loads the code and finds its kernels, in the context that is current. `call` is what failed. */
static moer_cu_result moer_variant_load_current(moe_route_context *context, moer_variant *variant, const moer_bytes *code, const char **call) {
    const moer_driver *driver = &context->driver;
    moer_cu_result result;
    int i, threads = 0;
    *call = "cuLibraryLoadData";
    result = driver->cuLibraryLoadData(&variant->library, code->data, NULL, NULL, 0, NULL, NULL, 0);
    if (result != 0) {
        variant->library = NULL;
        return result;
    }
    for (i = 0; i < MOER_MAX_ENTRIES && variant->family->entries[i] != NULL && result == 0; i++) {
        moer_cu_kernel kernel = NULL;
        *call = "cuLibraryGetKernel";
        result = driver->cuLibraryGetKernel(&kernel, variant->library, variant->family->entries[i]);
        if (result != 0) break;
        *call = "cuKernelGetFunction";
        result = driver->cuKernelGetFunction(&variant->functions[i], kernel);
        if (result != 0) break;
        if (driver->cuFuncLoad != NULL) { /* now, not lazily at a first launch that may be captured */
            *call = "cuFuncLoad";
            result = driver->cuFuncLoad(variant->functions[i]);
            if (result != 0) break;
        }
        *call = "cuFuncGetAttribute";
        result = driver->cuFuncGetAttribute(&variant->static_shared_bytes[i], MOER_CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, variant->functions[i]);
        if (result == 0) result = driver->cuFuncGetAttribute(&threads, MOER_CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, variant->functions[i]);
        if (result != 0) break;
        if (variant->dynamic_shared_bytes != 0) {
            *call = "cuFuncSetAttribute";
            result = driver->cuFuncSetAttribute(variant->functions[i], MOER_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)variant->dynamic_shared_bytes);
            if (result != 0) break;
        }
        *call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        result = driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(&variant->resident_blocks[i], variant->functions[i], threads, variant->dynamic_shared_bytes);
    }
    if (result != 0) {
        driver->cuLibraryUnload(variant->library);
        variant->library = NULL;
    }
    return result;
}

/* Loading is forbidden to a thread while it captures a stream, and to all while one captures globally: relaxed for a
   moment, it is allowed, and harmless since nothing here touches the captured stream. */
static moe_route_status moer_variant_load(moe_route_context *context, moer_variant *variant, const moer_bytes *code, moer_cu_result *result,
                                          const char **call) {
    int pushed, mode = MOER_CU_STREAM_CAPTURE_MODE_RELAXED;
    moe_route_status status = moer_context_enter(context, &pushed);
    if (status != MOE_ROUTE_OK) return status;
    context->driver.cuThreadExchangeStreamCaptureMode(&mode);
    *result = moer_variant_load_current(context, variant, code, call);
    context->driver.cuThreadExchangeStreamCaptureMode(&mode);
    moer_context_leave(context, pushed);
    return MOE_ROUTE_OK;
}

/* Tries what is kept on disk and in packs, one after the other; *made tells whether one of them served. */
static moe_route_status moer_variant_read(moe_route_context *context, moer_variant *variant, moer_lookup *lookup, int *made) {
    *made = 0;
    while (!*made && moer_lookup_next(context, lookup)) {
        moer_bytes code;
        moer_cu_result result = 0;
        const char *call = "";
        moe_route_status status = MOE_ROUTE_OK;
        code.data = lookup->bytes.data + (lookup->entry.payload - lookup->bytes.data);
        code.size = lookup->entry.payload_size;
        if (context->device == MOE_ROUTE_DEVICE_GPU) status = moer_variant_load(context, variant, &code, &result, &call);
        if (status != MOE_ROUTE_OK) {
            moer_free(context, lookup->bytes.data);
            return status;
        }
        if (result != 0) {
            moer_log(context, MOE_ROUTE_LOG_WARNING, "variant %s: the driver refused the code that was kept (%s: error %d); it is made again",
                     variant->family->name, call, result);
            moer_lookup_refused(context, lookup);
            continue;
        }
        variant->origin = lookup->origin;
        variant->cubin_size = code.size;
        variant->entry = lookup->bytes;
        *made = 1;
    }
    return MOE_ROUTE_OK;
}

static moe_route_status moer_variant_compile(moe_route_context *context, moer_variant *variant, moer_team *team, const moer_lookup *lookup) {
    moer_bytes code;
    moer_cu_result result = 0;
    const char *call = "";
    moe_route_status status = moer_nvrtc_open(context); /* first, so that a failure is told once */
    if (status == MOE_ROUTE_OK && team != NULL) moer_team_grow(team);
    if (status == MOE_ROUTE_OK) status = moer_nvrtc_compile(context, variant->family->file, variant->defines, &code);
    if (status != MOE_ROUTE_OK) return status;
    if (context->device == MOE_ROUTE_DEVICE_GPU) {
        status = moer_variant_load(context, variant, &code, &result, &call);
        if (status == MOE_ROUTE_OK && result != 0) status = moer_driver_fail(context, call, result);
    }
    if (status == MOE_ROUTE_OK) {
        variant->origin = MOE_ROUTE_ORIGIN_COMPILED;
        variant->cubin_size = code.size;
        variant->entry = moer_entry_make(context, &lookup->key, &code);
        if (variant->entry.data != NULL) moer_cache_store(context, lookup, &variant->entry);
        else if (context->device == MOE_ROUTE_DEVICE_COMPILE)
            status = moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "variant %s: its code, of %lu bytes, can't be kept: it is too large, no cubin, or memory ran out", variant->family->name,
                               (unsigned long)code.size);
    }
    moer_free(context, code.data);
    return status;
}

static moe_route_status moer_variant_make(moe_route_context *context, moer_variant *variant, moer_team *team) {
    const double start = moer_milliseconds();
    moer_lookup *lookup = (moer_lookup *)moer_alloc(context, sizeof *lookup);
    int made = 0;
    moe_route_status status;
    if (lookup == NULL) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a variant of %s", variant->family->name);
    if (!moer_key_make(&lookup->key, variant->family->name, variant->defines, context->target))
        status = moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "variant %s: its constants are too long: %s", variant->family->name, variant->defines);
    else
        status = moer_variant_read(context, variant, lookup, &made);
    if (status == MOE_ROUTE_OK && !made) status = moer_variant_compile(context, variant, team, lookup);
    moer_free(context, lookup);
    if (context->device != MOE_ROUTE_DEVICE_COMPILE || status != MOE_ROUTE_OK) {
        moer_free(context, variant->entry.data);
        memset(&variant->entry, 0, sizeof variant->entry);
    }
    if (status != MOE_ROUTE_OK) return status;
    variant->milliseconds = moer_milliseconds() - start;
    moer_log(context, MOE_ROUTE_LOG_INFO, "variant %s %s for sm_%u: %s in %.1f ms", variant->family->name, variant->defines, (unsigned)context->target,
             variant->origin == MOE_ROUTE_ORIGIN_COMPILED ? "compiled" : variant->origin == MOE_ROUTE_ORIGIN_PACK ? "read from a pack" : "read from the cache", variant->milliseconds);
    return MOE_ROUTE_OK;
}

/* Takes a failed variant, which nobody waits for any more, out of the table. The mutex is held; the caller frees it later,
   because the allocator may not be called under it. */
static void moer_variant_forget(moe_route_context *context, moer_variant *variant) {
    moer_variant **link = &context->variants;
    while (*link != variant) link = &(*link)->next;
    *link = variant->next;
}

static moer_variant *moer_variant_find(const moe_route_context *context, const moer_family *family, const char *defines) {
    moer_variant *variant;
    for (variant = context->variants; variant != NULL; variant = variant->next)
        if (variant->state >= 0 && variant->family == family && strcmp(variant->defines, defines) == 0) return variant;
    return NULL;
}

/* Waits until a variant that is in the table is made, and releases the mutex. */
static moe_route_status moer_variant_wait(moe_route_context *context, moer_variant *variant, const moer_variant **found) {
    moe_route_status status;
    int forgotten;
    variant->users++;
    while (variant->state == 0) moer_condition_wait(&context->variant_ready, &context->mutex);
    status = variant->status;
    variant->users--;
    forgotten = variant->state < 0 && variant->users == 0;
    if (forgotten) moer_variant_forget(context, variant);
    else if (variant->state > 0) *found = variant;
    moer_mutex_unlock(&context->mutex);
    if (forgotten) moer_free(context, variant);
    return status;
}

/* The variant, loaded: from the table, else kept code, else compiled. A thread that asks for one which another thread is
   making waits for it; different variants are made side by side. */
static moe_route_status moer_variant_get(moe_route_context *context, const moer_family *family, const char *defines, moer_team *team, const moer_variant **found) {
    moer_variant *made, *variant;
    moe_route_status status;
    int forgotten = 0;
    *found = NULL;
    moer_mutex_lock(&context->mutex);
    variant = moer_variant_find(context, family, defines);
    if (variant != NULL) return moer_variant_wait(context, variant, found);
    moer_mutex_unlock(&context->mutex);

    made = (moer_variant *)moer_alloc(context, sizeof *made);
    if (made == NULL) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a variant of %s", family->name);
    if (!moer_append(made->defines, sizeof made->defines, "%s", defines)) {
        moer_free(context, made);
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "variant %s: its constants are too long: %s", family->name, defines);
    }
    made->family = family;
    made->dynamic_shared_bytes = moer_defined(made->defines, "SHARED_BYTES");
    made->users = 1;
    moer_mutex_lock(&context->mutex);
    variant = moer_variant_find(context, family, defines);
    if (variant != NULL) { /* another thread came first, while this one had no mutex */
        status = moer_variant_wait(context, variant, found);
        moer_free(context, made);
        return status;
    }
    made->next = context->variants;
    context->variants = made;
    moer_mutex_unlock(&context->mutex);

    status = moer_variant_make(context, made, team);

    moer_mutex_lock(&context->mutex);
    made->status = status;
    made->state = status == MOE_ROUTE_OK ? 1 : -1;
    made->users--;
    if (status == MOE_ROUTE_OK) *found = made;
    else if (made->users == 0) forgotten = 1;
    if (forgotten) moer_variant_forget(context, made);
    moer_condition_broadcast(&context->variant_ready);
    moer_mutex_unlock(&context->mutex);
    if (forgotten) moer_free(context, made);
    return status;
}

static void moer_variants_destroy(moe_route_context *context, int unload) {
    while (context->variants != NULL) {
        moer_variant *variant = context->variants;
        context->variants = variant->next;
        if (unload && variant->library != NULL) context->driver.cuLibraryUnload(variant->library); /* may fail when the driver is already gone */
        moer_free(context, variant->entry.data);
        moer_free(context, variant);
    }
}

/* ---- src/wanted.c ---- */
/*
  wanted.c: the variants that a layer needs, made side by side: NVRTC compiles in several threads as fast as in one, and a layer
  has several variants. The threads exist only while a layer is created that has something to compile: reading from the cache
  isn't worth one. Which variants these are is decided in layer.c; how one is made, in variant.c.
*/

#define MOER_TEAM_MAX 7 /* helpers; each compilation takes some 40 MB */

struct moer_team {
    moe_route_context *context; /* whose mutex guards the rest */
    moer_wanted *wanted;
    uint32_t next;              /* the first that nobody has taken yet */
    moe_route_status status;    /* of the last failure; nothing is taken after one */
    uint32_t num_helpers;       /* only the thread that creates the layer looks at these */
    moer_thread helpers[MOER_TEAM_MAX];
    int grown;
};

static moe_route_status moer_wanted_add(moe_route_context *context, moer_wanted *wanted, const moer_family *family, const char *defines,
                                        const moer_variant **variant) {
    if (wanted->count == MOER_MAX_LAYER_VARIANTS)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "layer: it needs more than %u kernel variants", (unsigned)MOER_MAX_LAYER_VARIANTS);
    wanted->items[wanted->count].family = family;
    wanted->items[wanted->count].variant = variant;
    moer_text_set(wanted->items[wanted->count].defines, sizeof wanted->items[0].defines, defines);
    wanted->count++;
    return MOE_ROUTE_OK;
}

static void moer_team_work(moer_team *team, moer_team *grows) {
    moe_route_context *context = team->context;
    moe_route_status status = MOE_ROUTE_OK;
    for (;;) {
        uint32_t i;
        moer_mutex_lock(&context->mutex);
        if (status != MOE_ROUTE_OK) team->status = status;
        i = team->status == MOE_ROUTE_OK && team->next < team->wanted->count ? team->next++ : team->wanted->count;
        moer_mutex_unlock(&context->mutex);
        if (i == team->wanted->count) return;
        status = moer_variant_get(context, team->wanted->items[i].family, team->wanted->items[i].defines, grows, team->wanted->items[i].variant);
    }
}

static void moer_team_help(void *user) { moer_team_work((moer_team *)user, NULL); }

static void moer_team_grow(moer_team *team) {
    uint32_t left, processors = moer_processors();
    if (team->grown) return;
    team->grown = 1;
    moer_mutex_lock(&team->context->mutex);
    left = team->wanted->count - team->next;
    moer_mutex_unlock(&team->context->mutex);
    while (team->num_helpers < left && team->num_helpers + 1 < processors && team->num_helpers < MOER_TEAM_MAX) {
        if (!moer_thread_start(&team->helpers[team->num_helpers], moer_team_help, team)) return; /* then with fewer */
        team->num_helpers++;
    }
}

static moe_route_status moer_wanted_make(moe_route_context *context, moer_wanted *wanted) {
    moer_team team;
    uint32_t i;
    memset(&team, 0, sizeof team);
    team.context = context;
    team.wanted = wanted;
    moer_team_work(&team, &team);
    for (i = 0; i < team.num_helpers; i++) moer_thread_join(&team.helpers[i]);
    return team.status;
}

/* ---- src/formats.c ---- */
/*
  formats.c: the sizes of a weight matrix in its format, and how finely the kernels cut its rows. Which combinations are
  allowed is decided in layer.c; what the bytes mean is in kernels_src/ and cpu_formats.c.
*/

static moer_block moer_format_block(moe_route_format format) {
    moer_block block = {0, 0};
    switch (format) {
#define MOER_BLOCK(name, of_values, of_bytes) case MOE_ROUTE_FORMAT_##name: block.values = of_values; block.bytes = of_bytes; break;
    MOER_BLOCK(F32, 1, 4)
    MOER_BLOCK(F16, 1, 2)
    MOER_BLOCK(BF16, 1, 2)
    MOER_BLOCK(INT8, 1, 1)
    MOER_BLOCK(INT4, 2, 1)
    MOER_BLOCK(FP8, 1, 1)
    MOER_BLOCK(MXFP4, 32, 16)
    MOER_BLOCK(NVFP4, 16, 8)
    MOER_BLOCK(GGUF_Q4_0, 32, 18)
    MOER_BLOCK(GGUF_Q4_1, 32, 20)
    MOER_BLOCK(GGUF_Q5_0, 32, 22)
    MOER_BLOCK(GGUF_Q5_1, 32, 24)
    MOER_BLOCK(GGUF_Q8_0, 32, 34)
    MOER_BLOCK(GGUF_Q2_K, 256, 84)
    MOER_BLOCK(GGUF_Q3_K, 256, 110)
    MOER_BLOCK(GGUF_Q4_K, 256, 144)
    MOER_BLOCK(GGUF_Q5_K, 256, 176)
    MOER_BLOCK(GGUF_Q6_K, 256, 210)
    MOER_BLOCK(GGUF_IQ4_NL, 32, 18)
    MOER_BLOCK(GGUF_IQ4_XS, 256, 136)
    MOER_BLOCK(GGUF_MXFP4, 32, 17)
#undef MOER_BLOCK
    default: break;
    }
    return block;
}

static int moer_is_quantized(moe_route_format format) { return format > MOE_ROUTE_FORMAT_BF16; }
static int moer_has_scales(moe_route_format format) { return format > MOE_ROUTE_FORMAT_BF16 && format < MOE_ROUTE_FORMAT_GGUF; }

static size_t moer_scale_size(moer_scales kind) {
    return kind == MOER_SCALES_F32 ? 4 : kind == MOER_SCALES_E8M0 || kind == MOER_SCALES_E4M3 ? 1 : 2;
}

static size_t moer_row_bytes(const moer_matrix *matrix) {
    const moer_block block = moer_format_block(matrix->format);
    return (size_t)(matrix->inner / block.values) * block.bytes;
}

static size_t moer_scale_row_bytes(const moer_matrix *matrix) {
    return moer_has_scales(matrix->format) ? matrix->num_groups * moer_scale_size(matrix->scales_kind) : 0;
}

static size_t moer_zero_point_row_bytes(const moer_matrix *matrix) {
    return matrix->format == MOE_ROUTE_FORMAT_INT4 ? ((size_t)matrix->num_groups + 1) / 2 : matrix->num_groups;
}

static uint64_t moer_data_bytes(const moer_matrix *matrix) { return (uint64_t)matrix->rows * moer_row_bytes(matrix); }

static uint64_t moer_scale_bytes(const moer_matrix *matrix) {
    return (uint64_t)((matrix->rows + matrix->group_rows - 1) / matrix->group_rows) * moer_scale_row_bytes(matrix);
}

static uint64_t moer_matrix_bytes(const moer_matrix *matrix) {
    uint64_t bytes = moer_data_bytes(matrix) + moer_scale_bytes(matrix);
    if (matrix->zero_points != 0) bytes += (uint64_t)matrix->rows * moer_zero_point_row_bytes(matrix);
    return bytes;
}

/* A step is 64 bytes of a row in packed.h, 128 inputs in gguf.h. */
static uint32_t moer_tile_step(const moer_matrix *matrix) {
    const moer_block block = moer_format_block(matrix->format);
    return matrix->format > MOE_ROUTE_FORMAT_GGUF ? 128 : 64 * block.values / block.bytes;
}

static uint32_t moer_tile_steps(const moer_matrix *matrix) { return moer_divide_up(matrix->inner, moer_tile_step(matrix)); }

/* ---- src/cpu_route.c ---- */
/*
  cpu_route.c: the router on the CPU: logits -> ids and weights, the plain statement of what select.h computes, to the
  last bit. Sums run over 32 interleaved parts and then over a butterfly of them, because a warp adds in that order.
*/

/* ---- kernels_src/scores.h ---- */
/*
  scores.h: the arithmetic of scores and their order, one text for the kernels and for the CPU backend, so that both give
  the same bits. Everything is a single IEEE f32 operation in a fixed order; where a product feeds a sum, MOER_FMA says so,
  because a host compiler may otherwise fuse the two or not. Loops over experts and reductions don't belong here.
*/
#ifdef MOER_HOST
#define MOER_SCORE static
#define MOER_FMA(a, b, c) fmaf(a, b, c)
#define MOER_ADD(a, b) ((a) + (b))
#define MOER_MUL(a, b) ((a) * (b))
#define MOER_DIV(a, b) ((a) / (b))
#define MOER_SQRT(a) sqrtf(a)
#define MOER_RECIPROCAL(a) (1.0f / (a))
#define MOER_MAX(a, b) ((a) > (b) ? (a) : (b)) /* b where a is NaN */
#define MOER_MIN(a, b) ((a) < (b) ? (a) : (b))
static unsigned int moer_f32_bits(float f) { unsigned int u; memcpy(&u, &f, sizeof u); return u; }
static float moer_f32_from_bits(unsigned int u) { float f; memcpy(&f, &u, sizeof f); return f; }
#else
#define MOER_SCORE DEVICE
#define MOER_FMA(a, b, c) f32_fma(a, b, c)
#define MOER_ADD(a, b) f32_add(a, b)
#define MOER_MUL(a, b) f32_mul(a, b)
#define MOER_DIV(a, b) f32_div(a, b)
#define MOER_SQRT(a) f32_sqrt(a)
#define MOER_RECIPROCAL(a) f32_reciprocal(a)
#define MOER_MAX(a, b) f32_max(a, b)
#define MOER_MIN(a, b) f32_min(a, b)
#define moer_f32_bits f32_bits
#define moer_f32_from_bits f32_from_bits
#endif

#define MOER_INFINITY_BITS 0x7f800000u
#define MOER_LARGEST_F32 3.40282347e38f
#define MOER_LARGEST_F16 65504.0f
#define MOER_LARGEST_BF16 3.38953139e38f
#define MOER_ZERO_KEY 0x80000000u /* moer_order_key(0) */
#define MOER_LOWEST_KEY 0x007fffffu /* moer_order_key(-inf) */

/* A number that orders as the float does, with NaN as -inf and -0 as +0. No float gives 0. The host looks at bits, so that a program
   compiled for fast rather than IEEE arithmetic selects alike. */
MOER_SCORE unsigned int moer_order_key(float value) {
#ifdef MOER_HOST
    unsigned int bits = moer_f32_bits(value);
    if ((bits & 0x7fffffffu) > MOER_INFINITY_BITS) return MOER_LOWEST_KEY;
    if (bits == 0x80000000u) bits = 0;
#else
    const unsigned int bits = moer_f32_bits(MOER_ADD(MOER_MAX(value, moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS)), 0.0f));
#endif
    return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

MOER_SCORE float moer_key_value(unsigned int key) {
    return moer_f32_from_bits((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

/* e^x within 1.3 units of 2^-24, 0 for -inf, +inf from 88.73 on. NaN isn't expected.
   x = n ln2 + r; e^r = 1 + r + r^2 q(r), q fitted for the least relative error on |r| <= ln2 / 2. No branch: at the limits of x the two
   factors give 0 and +inf by themselves. */
MOER_SCORE float moer_exp(float x) {
    float r, q, n;
    unsigned int exponents;
    x = MOER_MIN(MOER_MAX(x, -104.0f), 89.0f);
    r = MOER_FMA(x, 1.44269504f, 12582912.0f); /* 1.5 * 2^23: what is left of a fraction is rounded to an integer, in the low bits */
    exponents = moer_f32_bits(r) - (0x4b400000u - 254u); /* n + 2 * 127 */
#ifdef MOER_HOST
    n = (float)((int)exponents - 254); /* the same, also where a compiler may reorder sums */
#else
    n = MOER_ADD(r, -12582912.0f);
#endif
    r = MOER_FMA(-n, 0.693359375f, x);
    r = MOER_FMA(-n, -2.12194440e-4f, r);
    q = MOER_FMA(1.38145371e-3f, r, 8.36874545e-3f);
    q = MOER_FMA(q, r, 4.16683927e-2f);
    q = MOER_FMA(q, r, 1.66665211e-1f);
    q = MOER_FMA(q, r, 4.99999940e-1f);
    q = MOER_FMA(q, r, 1.0f);
    q = MOER_FMA(q, r, 1.0f);
    /* two factors: 2^n itself may be no normal float */
    q = MOER_MUL(q, moer_f32_from_bits((exponents >> 1) << 23));
    return MOER_MUL(q, moer_f32_from_bits((exponents - (exponents >> 1)) << 23));
}

MOER_SCORE float moer_sigmoid(float x) {
    return MOER_RECIPROCAL(MOER_ADD(1.0f, moer_exp(-x)));
}

/* log(1 + e^x) within 4 units of 2^-24: max(x, 0) + log(1 + t) with t = e^-|x|. With u = t / (2 + t) the
   logarithm is 2 atanh(u) = 2u + 2u z q(z), z = u^2 up to 1/9, q fitted for the least relative error. */
MOER_SCORE float moer_softplus(float x) {
    const float t = moer_exp(x < 0.0f ? x : -x);
    const float u = MOER_DIV(t, MOER_ADD(2.0f, t)), z = MOER_MUL(u, u);
    float q = MOER_FMA(1.40059933e-1f, z, 1.40009031e-1f);
    q = MOER_FMA(q, z, 2.00107634e-1f);
    q = MOER_FMA(q, z, 3.33332092e-1f);
    q = MOER_FMA(MOER_MUL(q, z), u, u);
    return MOER_FMA(2.0f, q, x > 0.0f ? x : 0.0f);
}

/* Where e^x is the whole sum, its root is taken first: it stays a normal number for longer. */
MOER_SCORE float moer_sqrt_softplus(float x) { return x < -20.0f ? moer_exp(MOER_MUL(0.5f, x)) : MOER_SQRT(moer_softplus(x)); }

/* log(sigmoid(x)), with the error of moer_softplus. */
MOER_SCORE float moer_log_sigmoid(float x) { return -moer_softplus(-x); }

/* tanh(x) within 3 units of 2^-24: x + x z q(z), z = x^2, near 0 (q fitted likewise); 1 - 2 / (e^2|x| + 1) elsewhere. */
MOER_SCORE float moer_tanh(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    float q;
    if (magnitude < 0.625f) {
        const float z = MOER_MUL(x, x);
        q = MOER_FMA(-5.70498640e-3f, z, 2.06390861e-2f);
        q = MOER_FMA(q, z, -5.37397154e-2f);
        q = MOER_FMA(q, z, 1.33314416e-1f);
        q = MOER_FMA(q, z, -3.33332807e-1f);
        return MOER_FMA(MOER_MUL(q, z), x, x);
    }
    q = MOER_ADD(1.0f, -MOER_DIV(2.0f, MOER_ADD(moer_exp(MOER_ADD(magnitude, magnitude)), 1.0f)));
    return x < 0.0f ? -q : q;
}

MOER_SCORE float moer_softcap(float x, float cap) { return MOER_MUL(cap, moer_tanh(MOER_DIV(x, cap))); }

/* exp(x - largest), the numerator of a softmax. Defined where the plain difference is NaN: values equal to an infinite
   largest count 1, and -inf always counts 0. */
MOER_SCORE float moer_softmax_term(float x, float largest) {
    float distance = MOER_ADD(x, -largest);
    if (x == largest) distance = 0.0f;
    if (moer_f32_bits(x) == (0x80000000u | MOER_INFINITY_BITS)) distance = -104.0f;
    return moer_exp(distance);
}

/* The same among experts that SparseMixer keeps beside the largest; others count 0. Where the quotient is NaN (0 / 0, or an
   infinite largest) the expert is kept. */
MOER_SCORE float moer_sparse_mixer_term(float x, float largest, float threshold) {
    const float magnitude = x < 0.0f ? -x : x;
    const float distance = MOER_DIV(MOER_ADD(largest, -x), magnitude > largest ? magnitude : largest);
    return distance > threshold ? 0.0f : moer_softmax_term(x, largest);
}

/* numerator / denominator, 0 where the denominator is 0. */
MOER_SCORE float moer_share(float numerator, float denominator) {
    return denominator == 0.0f ? 0.0f : MOER_DIV(numerator, denominator);
}

/* The nearest float within plus and minus `limit`; NaN gives 0. */
MOER_SCORE float moer_bounded(float x, float limit) {
    if ((moer_f32_bits(x) & 0x7fffffffu) > MOER_INFINITY_BITS) return 0.0f;
    return x > limit ? limit : x < -limit ? -limit : x;
}

/* A score as a weight: -inf, which nobody can select, weighs nothing; +inf weighs as much as a float can. */
MOER_SCORE float moer_score_weight(float score) {
    return moer_f32_bits(score) == (0x80000000u | MOER_INFINITY_BITS) ? 0.0f : moer_bounded(score, MOER_LARGEST_F32);
}

static void *moer_host(moe_route_address address) { return (void *)(uintptr_t)address; }

static size_t moer_dtype_size(moe_route_dtype dtype) { return dtype == MOE_ROUTE_F32 ? 4u : 2u; }

static float moer_f16_to_f32(unsigned int h) {
    const unsigned int sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 31u) return moer_f32_from_bits(sign | MOER_INFINITY_BITS | mantissa << 13);
    if (exponent == 0u) { /* mantissa * 2^-24, exactly */
        const float value = (float)mantissa * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    return moer_f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}

/* Round to nearest, ties to even. */
static unsigned int moer_f32_to_f16(float f) {
    const unsigned int bits = moer_f32_bits(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned int exponent, mantissa, shift, result, rest, half;
    if (magnitude > MOER_INFINITY_BITS) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and up */
    exponent = magnitude >> 23;
    if (exponent < 102u) return sign; /* below half of the smallest subnormal */
    mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    shift = exponent < 113u ? 126u - exponent : 13u; /* subnormals lose more bits */
    result = mantissa >> shift;
    rest = mantissa & ((1u << shift) - 1u);
    half = 1u << (shift - 1u);
    if (rest > half || (rest == half && (result & 1u))) result++;
    /* The implicit bit is still there: it adds one to the exponent field, which is meant. */
    return sign | (exponent < 113u ? result : result + ((exponent - 113u) << 10));
}

static unsigned int moer_f32_to_bf16(float f) {
    const unsigned int bits = moer_f32_bits(f);
    if ((bits & 0x7fffffffu) > MOER_INFINITY_BITS) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

static float moer_load_value(const void *array, size_t index, moe_route_dtype dtype) {
    uint16_t half;
    float value;
    if (dtype == MOE_ROUTE_F32) {
        memcpy(&value, (const char *)array + index * 4, 4);
        return value;
    }
    memcpy(&half, (const char *)array + index * 2, 2);
    return dtype == MOE_ROUTE_F16 ? moer_f16_to_f32(half) : moer_f32_from_bits((unsigned int)half << 16);
}

static void moer_store_value(void *array, size_t index, moe_route_dtype dtype, float value) {
    uint16_t half;
    if (dtype == MOE_ROUTE_F32) {
        memcpy((char *)array + index * 4, &value, 4);
        return;
    }
    half = (uint16_t)(dtype == MOE_ROUTE_F16 ? moer_f32_to_f16(value) : moer_f32_to_bf16(value));
    memcpy((char *)array + index * 2, &half, 2);
}

/* The sum of the 32 lanes' parts, in the order of a warp's xor butterfly. */
static float moer_butterfly_sum(float part[32]) {
    float next[32];
    unsigned int mask, lane;
    for (mask = 16; mask != 0; mask >>= 1) {
        for (lane = 0; lane < 32; lane++) next[lane] = MOER_ADD(part[lane], part[lane ^ mask]);
        memcpy(part, next, sizeof next);
    }
    return part[0];
}

typedef struct moer_token { /* the router's work on one token */
    const moer_router *router;
    float x[MOER_MAX_EXPERTS + MOER_MAX_SHARED]; /* l[e] of moe_route.h; NaN is -inf */
    float largest, sum;                          /* of the softmax over all experts */
    unsigned int key[MOER_MAX_EXPERTS];          /* order of selection; 0: taken */
    uint32_t id[MOER_MAX_TOP_K];
    unsigned char counts[MOER_MAX_TOP_K + MOER_MAX_SHARED]; /* 0: the weight is 0: nobody could select it, or it's out of range */
    float weight[MOER_MAX_TOP_K + MOER_MAX_SHARED];         /* those of the shared experts follow the k selected */
} moer_token;

static void moer_token_load(moer_token *token, const void *logits, size_t row) {
    const moer_router *router = token->router;
    const uint32_t num_logits = router->num_experts + router->num_shared_experts;
    uint32_t e;
    for (e = 0; e < num_logits; e++) {
        float x = moer_load_value(logits, row * num_logits + e, router->logits_dtype);
        if (router->logit_bias != 0) x = MOER_ADD(x, moer_load_value(moer_host(router->logit_bias), e, MOE_ROUTE_F32));
        if (router->softcap != 0.0f) x = moer_softcap(moer_key_value(moer_order_key(x)), router->softcap);
        token->x[e] = moer_key_value(moer_order_key(x));
    }
}

static void moer_token_sum(moer_token *token) {
    float part[32];
    uint32_t e;
    token->largest = token->x[0];
    for (e = 1; e < token->router->num_experts; e++)
        if (token->x[e] > token->largest) token->largest = token->x[e];
    memset(part, 0, sizeof part);
    for (e = 0; e < token->router->num_experts; e++) part[e % 32] = MOER_ADD(part[e % 32], moer_softmax_term(token->x[e], token->largest));
    token->sum = moer_butterfly_sum(part);
}

static float moer_token_score(const moer_token *token, float x) {
    const moer_router *router = token->router;
    switch (router->score) {
    case MOE_ROUTE_SCORE_SOFTMAX: return moer_share(moer_softmax_term(x, token->largest), token->sum);
    case MOE_ROUTE_SCORE_SIGMOID: return moer_sigmoid(x);
    case MOE_ROUTE_SCORE_SQRT_SOFTPLUS: return moer_sqrt_softplus(x);
    case MOE_ROUTE_SCORE_CUSTOM: return moer_key_value(moer_order_key(router->score_function(x, router->score_user)));
    default: return x;
    }
}

/* Marks the experts of groups that are dropped. */
static void moer_token_drop_groups(moer_token *token) {
    const moer_router *router = token->router;
    const uint32_t size = router->num_experts / router->num_groups;
    unsigned int group_key[MOER_MAX_GROUPS];
    unsigned char kept[MOER_MAX_GROUPS];
    uint32_t g, e, j;
    for (g = 0; g < router->num_groups; g++) {
        unsigned int best = 0, second = 0;
        for (e = g * size; e < (g + 1) * size; e++) {
            const unsigned int key = token->key[e];
            second = key > best ? best : key > second ? key : second;
            best = key > best ? key : best;
        }
        group_key[g] = router->group_rule == MOE_ROUTE_GROUPS_MAX ? best : moer_order_key(MOER_ADD(moer_key_value(best), moer_key_value(second)));
        kept[g] = 0;
    }
    for (j = 0; j < router->topk_groups; j++) {
        uint32_t best = 0;
        for (g = 1; g < router->num_groups; g++)
            if (group_key[g] > group_key[best]) best = g;
        group_key[best] = 0;
        kept[best] = 1;
    }
    for (e = 0; e < router->num_experts; e++)
        if (!kept[e / size]) token->key[e] = router->dropped != MOE_ROUTE_DROPPED_MINUS_INFINITY ? MOER_ZERO_KEY : MOER_LOWEST_KEY;
}

/* Softmax of the largest of the experts that are left, among those that SparseMixer keeps beside it. */
static float moer_token_mixer_weight(const moer_token *token, float largest) {
    float part[32];
    uint32_t e;
    memset(part, 0, sizeof part);
    for (e = 0; e < token->router->num_experts; e++)
        if (token->key[e] != 0) part[e % 32] = MOER_ADD(part[e % 32], moer_sparse_mixer_term(token->x[e], largest, MOER_MUL(2.0f, token->router->jitter)));
    return moer_share(1.0f, moer_butterfly_sum(part));
}

static void moer_token_select(moer_token *token) {
    const moer_router *router = token->router;
    const int drops = moer_drops_groups(router->group_rule);
    const int by_score = router->selection_bias != 0 || drops || router->score == MOE_ROUTE_SCORE_CUSTOM;
    uint32_t given[MOER_MAX_GROUPS], e, j;
    for (e = 0; e < router->num_experts; e++) {
        float order = by_score ? moer_token_score(token, token->x[e]) : token->x[e];
        if (router->selection_bias != 0) order = MOER_ADD(order, moer_load_value(moer_host(router->selection_bias), e, MOE_ROUTE_F32));
        token->key[e] = moer_order_key(order);
    }
    if (drops) moer_token_drop_groups(token);
    memset(given, 0, sizeof given);
    for (j = 0; j < router->top_k; j++) {
        uint32_t best = 0;
        for (e = 1; e < router->num_experts; e++)
            if (token->key[e] > token->key[best]) best = e;
        token->id[j] = best;
        token->counts[j] = token->key[best] > (drops && router->dropped == MOE_ROUTE_DROPPED_ZERO_SCORE ? MOER_ZERO_KEY : MOER_LOWEST_KEY);
        if (router->score == MOE_ROUTE_SCORE_SPARSE_MIXER) token->weight[j] = moer_token_mixer_weight(token, token->x[best]);
        token->key[best] = 0;
        if (router->group_rule == MOE_ROUTE_GROUPS_QUOTA) { /* a group that has given its share is out */
            const uint32_t size = router->num_experts / router->num_groups, g = best / size;
            if (++given[g] == router->top_k / router->num_groups)
                for (e = g * size; e < (g + 1) * size; e++) token->key[e] = 0;
        }
    }
}

/* Ids from the caller, or from the table. */
static void moer_token_take_ids(moer_token *token, const moer_routing *routing, uint32_t t) {
    const moer_router *router = token->router;
    size_t row = t;
    int known = 1;
    uint32_t j;
    if (router->ids == MOE_ROUTE_IDS_TABLE) {
        row = ((const uint32_t *)moer_host(routing->token_ids))[t];
        known = row < router->id_table_rows;
    }
    for (j = 0; j < router->top_k; j++) {
        const uint32_t *ids = (const uint32_t *)moer_host(router->ids == MOE_ROUTE_IDS_TABLE ? router->id_table : routing->ids);
        token->id[j] = known ? ids[row * router->top_k + j] : 0xffffffffu;
        token->counts[j] = token->id[j] < router->num_experts;
    }
}

static void moer_token_weigh(moer_token *token) {
    const moer_router *router = token->router;
    const uint32_t top_k = router->top_k, slots = top_k + router->num_shared_experts;
    float x[MOER_MAX_TOP_K + MOER_MAX_SHARED], part[32], sum;
    const float largest_weight = router->weights_dtype == MOE_ROUTE_F32 ? MOER_LARGEST_F32 : router->weights_dtype == MOE_ROUTE_F16 ? MOER_LARGEST_F16 : MOER_LARGEST_BF16;
    float *weight = token->weight;
    uint32_t j;
    for (j = top_k; j < slots; j++) token->counts[j] = 1;
    for (j = 0; j < slots; j++) x[j] = !token->counts[j] ? 0.0f : token->x[j < top_k ? token->id[j] : router->num_experts + j - top_k];

    if (router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE)
        for (j = 0; j < slots; j++) x[j] = moer_log_sigmoid(x[j]);
    if (router->weight == MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED || router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SHARE) {
        float top = moer_f32_from_bits(0x80000000u | MOER_INFINITY_BITS);
        for (j = 0; j < slots; j++)
            if (token->counts[j] && x[j] > top) top = x[j];
        memset(part, 0, sizeof part);
        for (j = 0; j < slots; j++) {
            weight[j] = token->counts[j] ? moer_softmax_term(x[j], top) : 0.0f;
            part[j % 32] = j < 32 ? weight[j] : MOER_ADD(part[j % 32], weight[j]);
        }
        sum = moer_butterfly_sum(part);
        for (j = 0; j < slots; j++) weight[j] = moer_share(weight[j], sum);
    } else {
        for (j = 0; j < slots; j++) {
            if (!token->counts[j]) weight[j] = 0.0f;
            else if (router->weight == MOE_ROUTE_WEIGHT_SIGMOID_SELECTED) weight[j] = moer_sigmoid(x[j]);
            else if (router->score != MOE_ROUTE_SCORE_SPARSE_MIXER) weight[j] = moer_score_weight(moer_token_score(token, x[j]));
        }
    }
    if (router->renormalize != MOE_ROUTE_RENORMALIZE_NONE) {
        const int squares = router->renormalize == MOE_ROUTE_RENORMALIZE_L2;
        memset(part, 0, sizeof part);
        for (j = 0; j < slots; j++) {
            if (squares) part[j % 32] = MOER_FMA(weight[j], weight[j], part[j % 32]);
            else part[j % 32] = j < 32 ? weight[j] : MOER_ADD(part[j % 32], weight[j]);
        }
        sum = moer_butterfly_sum(part);
        if (squares) sum = MOER_SQRT(sum);
        if (router->renormalize == MOE_ROUTE_RENORMALIZE_MAX_SUM) sum = sum > router->renormalize_epsilon ? sum : router->renormalize_epsilon;
        else sum = MOER_ADD(sum, router->renormalize_epsilon);
        for (j = 0; j < slots; j++) weight[j] = moer_share(weight[j], sum);
    }
    for (j = 0; j < slots; j++) {
        float w = MOER_MUL(weight[j], router->scale);
        const int selected = j < top_k && token->counts[j];
        if (selected && router->expert_scale != 0) w = MOER_MUL(w, moer_load_value(moer_host(router->expert_scale), token->id[j], MOE_ROUTE_F32));
        if (router->divide_by_top_k) w = MOER_DIV(w, (float)top_k);
        weight[j] = selected && token->id[j] >= router->num_experts - router->num_skip_experts ? 0.0f : moer_bounded(w, largest_weight);
    }
}

static void moer_cpu_topk(const moer_router *router, const moer_routing *routing, uint32_t num_tokens, uint32_t num_valid) {
    const uint32_t top_k = router->top_k, num_shared = router->num_shared_experts;
    int32_t *ids = (int32_t *)moer_host(routing->ids);
    moer_token token;
    uint32_t t, j;
    token.router = router;
    for (t = 0; t < num_tokens; t++) {
        const int valid = t < num_valid;
        if (valid) {
            moer_token_load(&token, moer_host(routing->logits), t);
            moer_token_sum(&token);
            if (router->ids == MOE_ROUTE_IDS_SELECTED) moer_token_select(&token);
            else moer_token_take_ids(&token, routing, t);
            moer_token_weigh(&token);
        }
        for (j = 0; j < top_k; j++) {
            if (router->ids != MOE_ROUTE_IDS_GIVEN) ids[(size_t)t * top_k + j] = valid && token.id[j] < router->num_experts ? (int32_t)token.id[j] : -1;
            if (routing->weights != 0) moer_store_value(moer_host(routing->weights), (size_t)t * top_k + j, router->weights_dtype, valid ? token.weight[j] : 0.0f);
        }
        for (j = 0; j < num_shared && routing->shared_weights != 0; j++)
            moer_store_value(moer_host(routing->shared_weights), (size_t)t * num_shared + j, router->weights_dtype, valid ? token.weight[top_k + j] : 0.0f);
    }
}

/* ---- src/cpu_maps.c ---- */
/*
  cpu_maps.c: the expert maps on the CPU: which physical expert serves a pair, and a stable counting sort of
  the pairs by local expert.
*/

/* The physical expert that serves a token's expert `id`; placement.h says the same. */
static uint32_t moer_physical_expert(const moer_router *router, int32_t id, uint32_t token) {
    const int32_t *replicas = (const int32_t *)moer_host(router->expert_map);
    uint32_t count = 0;
    if (router->expert_map == 0) return (uint32_t)id;
    if ((uint32_t)id >= router->num_experts - router->num_skip_experts - router->num_identity) return 0xffffffffu; /* identity and skip experts are nowhere */
    replicas += (size_t)id * router->expert_map_columns;
    while (count < router->expert_map_columns && replicas[count] >= 0) count++;
    return count != 0 ? (uint32_t)replicas[token % count] : 0xffffffffu;
}

static void moer_cpu_maps(const moer_router *router, const int32_t *ids, uint32_t num_tokens, uint32_t num_valid, const moer_maps_out *maps) {
    const uint32_t num_pairs = num_tokens * router->top_k, num_valid_pairs = num_valid * router->top_k;
    const uint32_t num_local = router->num_local_experts, block = maps->block_size;
    int32_t offset[MOER_MAX_EXPERTS + 1], aligned[MOER_MAX_EXPERTS + 1]; /* first row of each expert; the same, aligned */
    int32_t next[MOER_MAX_EXPERTS];
    int32_t *expert_offsets = (int32_t *)moer_host(maps->expert_offsets), *row_to_pair = (int32_t *)moer_host(maps->row_to_pair);
    int32_t *pair_to_row = (int32_t *)moer_host(maps->pair_to_row), *row_to_expert = (int32_t *)moer_host(maps->row_to_expert);
    int32_t *distinct_experts = (int32_t *)moer_host(maps->distinct_experts), *distinct_offsets = (int32_t *)moer_host(maps->distinct_offsets);
    int32_t *distinct_count = (int32_t *)moer_host(maps->distinct_count), *aligned_row_to_pair = (int32_t *)moer_host(maps->aligned_row_to_pair);
    int32_t *block_to_expert = (int32_t *)moer_host(maps->block_to_expert), *aligned_rows = (int32_t *)moer_host(maps->aligned_rows);
    int64_t *expert_load = (int64_t *)moer_host(maps->expert_load);
    uint32_t e, p, i;
    int32_t distinct = 0;

    memset(next, 0, sizeof next);
    for (p = 0; p < num_valid_pairs; p++) {
        const uint32_t local = moer_physical_expert(router, ids[p], p / router->top_k) - router->first_expert;
        if (local < num_local) next[local]++;
        if (expert_load != NULL && (uint32_t)ids[p] < router->num_experts) expert_load[ids[p]]++;
    }
    offset[0] = aligned[0] = 0;
    for (e = 0; e < num_local; e++) {
        offset[e + 1] = offset[e] + next[e];
        aligned[e + 1] = block != 0 ? aligned[e] + (int32_t)(((uint32_t)next[e] + block - 1) / block * block) : 0;
        if (next[e] != 0) {
            if (distinct_experts != NULL) distinct_experts[distinct] = (int32_t)e;
            if (distinct_offsets != NULL) distinct_offsets[distinct] = offset[e];
            distinct++;
        }
    }
    if (distinct_offsets != NULL) distinct_offsets[distinct] = offset[num_local];
    if (distinct_count != NULL) distinct_count[0] = distinct;
    if (expert_offsets != NULL) memcpy(expert_offsets, offset, (num_local + 1) * sizeof offset[0]);

    if (block != 0) {
        if (aligned_rows != NULL) aligned_rows[0] = aligned[num_local];
        if (aligned_row_to_pair != NULL)
            for (i = 0; i < maps->aligned_capacity; i++) aligned_row_to_pair[i] = (int32_t)num_pairs;
        if (block_to_expert != NULL) {
            for (i = 0; i < maps->aligned_capacity / block; i++) block_to_expert[i] = -1;
            for (e = 0; e < num_local; e++)
                for (i = (uint32_t)aligned[e] / block; i < (uint32_t)aligned[e + 1] / block; i++) block_to_expert[i] = (int32_t)e;
        }
    }
    for (p = (uint32_t)offset[num_local]; p < num_pairs; p++) {
        if (row_to_pair != NULL) row_to_pair[p] = -1;
        if (row_to_expert != NULL) row_to_expert[p] = -1;
    }
    memcpy(next, offset, num_local * sizeof next[0]);
    for (p = 0; p < num_pairs; p++) {
        const uint32_t local = p < num_valid_pairs ? moer_physical_expert(router, ids[p], p / router->top_k) - router->first_expert : num_local;
        int32_t row = -1;
        if (local < num_local) {
            row = next[local]++;
            if (row_to_pair != NULL) row_to_pair[row] = (int32_t)p;
            if (row_to_expert != NULL) row_to_expert[row] = (int32_t)local;
            if (block != 0 && aligned_row_to_pair != NULL) aligned_row_to_pair[aligned[local] + row - offset[local]] = (int32_t)p;
        }
        if (pair_to_row != NULL) pair_to_row[p] = row;
    }
}

/* ---- src/cpu_gguf.c ---- */
/*
  cpu_gguf.c: what the blocks of GGUF's formats stand for, value by value: the plain statement, which the kernels are tested
  against. Products of a scale (f16), its factor and a code are exact in f32; where a minimum is added, that sum is rounded.

  Blocks, with sizes in bytes; d and m are f16:
      Q4_0    d, codes[16]                       (q - 8) * d
      Q4_1    d, m, codes[16]                    q * d + m
      Q5_0    d, bits[4], codes[16]              (q - 16) * d
      Q5_1    d, m, bits[4], codes[16]           q * d + m
      Q8_0    d, codes[32]                       q * d
      IQ4_NL  d, codes[16]                       table[q] * d
      MXFP4   e[1], codes[16]                    table[q] * 2^(e - 128)
      Q2_K    scales[16], codes[64], d, m        q * d * scale - m * minimum
      Q3_K    bits[32], codes[64], scales[12], d (q - 4) * d * (scale - 32)
      Q4_K    d, m, scales[12], codes[128]       q * d * scale - m * minimum
      Q5_K    d, m, scales[12], bits[32], codes[128]   likewise
      Q6_K    codes[128], bits[64], scales[16], d      (q - 32) * d * scale
      IQ4_XS  d, high[2], low[4], codes[128]     table[q] * d * (scale - 32)
*/

/* ---- kernels_src/formats.h ---- */
/*
  formats.h: what the bytes of a weight format mean, as far as kernels and CPU backend say it in the same words: the small
  floats that serve as scales and weights, and the packed scales of GGUF's blocks. Plain C on values and 32-bit words; who
  loads them, and how weights are spread over lanes, belongs to packed.h, gguf.h and cpu_formats.c.
*/
#ifndef MOER_FORMATS
#define MOER_FORMATS
#ifdef MOER_HOST
#define MOER_FORMAT_FUNCTION static
#else
#define MOER_FORMAT_FUNCTION DEVICE
#define moer_f32_from_bits f32_from_bits
#endif

/* E8M0: 2^(e - 127); 255 is NaN. */
MOER_FORMAT_FUNCTION float moer_e8m0(unsigned int e) {
    return moer_f32_from_bits(e == 255u ? 0x7fc00000u : e == 0u ? 0x00400000u : e << 23);
}

/* E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, all ones is NaN. */
MOER_FORMAT_FUNCTION float moer_e4m3(unsigned int code) {
    const unsigned int magnitude = code & 127u, sign = (code & 128u) << 24;
    float value;
    if (magnitude == 127u) return moer_f32_from_bits(0x7fc00000u | sign);
    value = magnitude < 8u ? (float)magnitude * (1.0f / 512.0f) : moer_f32_from_bits((magnitude << 20) + (120u << 23));
    return sign != 0u ? -value : value;
}

/* ---- GGUF ---- */

/* 2^(e - 128), the scale of codes that are twice an E2M1. */
MOER_FORMAT_FUNCTION float moer_e8m0_half(unsigned int e) {
    return moer_f32_from_bits(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
}

/* Q4_K and Q5_K: 8 scales and 8 minima of 6 bits, packed into 12 bytes: words s0, s1, s2. The scales or minima of half a
   block (half 0 or 1) as four bytes. */
MOER_FORMAT_FUNCTION unsigned int moer_k_scales(unsigned int s0, unsigned int s2, unsigned int half) {
    return half != 0u ? (s2 & 0x0f0f0f0fu) | ((s0 >> 2) & 0x30303030u) : s0 & 0x3f3f3f3fu;
}
MOER_FORMAT_FUNCTION unsigned int moer_k_mins(unsigned int s1, unsigned int s2, unsigned int half) {
    return half != 0u ? ((s2 >> 4) & 0x0f0f0f0fu) | ((s1 >> 2) & 0x30303030u) : s1 & 0x3f3f3f3fu;
}

/* Q3_K: 16 scales of 6 bits in 12 bytes, 32 more than they mean. `low` is word 0 or 1 (`which`), `high` word 2: scales
   8 * half + 4 * which and the three after it, as four bytes. */
MOER_FORMAT_FUNCTION unsigned int moer_q3_k_scales(unsigned int low, unsigned int high, unsigned int half, unsigned int which) {
    return ((low >> (4u * half)) & 0x0f0f0f0fu) | ((high >> (4u * half + 2u * which)) & 0x03030303u) << 4;
}

/* IQ4_XS: scale `index` of 8. */
MOER_FORMAT_FUNCTION int moer_iq4_xs_scale(unsigned int low, unsigned int high, unsigned int index) {
    return (int)(((low >> (4u * index)) & 15u) | ((high >> (2u * index)) & 3u) << 4) - 32;
}
#endif

static const signed char moer_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const signed char moer_twice_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static float moer_gguf_f16(const unsigned char *bytes) {
    uint16_t half = (uint16_t)(bytes[0] | bytes[1] << 8);
    return moer_load_value(&half, 0, MOE_ROUTE_F16);
}

static uint32_t moer_gguf_word(const unsigned char *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static unsigned moer_gguf_byte(uint32_t word, unsigned index) { return word >> (8 * index) & 255u; }

/* 32 values: byte j holds the codes of values j and j + 16. */
static void moer_gguf_small_block(moe_route_format format, const unsigned char *block, float *values) {
    const int has_min = format == MOE_ROUTE_FORMAT_GGUF_Q4_1 || format == MOE_ROUTE_FORMAT_GGUF_Q5_1;
    const int five_bits = format == MOE_ROUTE_FORMAT_GGUF_Q5_0 || format == MOE_ROUTE_FORMAT_GGUF_Q5_1;
    const unsigned head = format == MOE_ROUTE_FORMAT_GGUF_MXFP4 ? 1u : has_min ? 4u : 2u;
    const unsigned char *codes = block + head + (five_bits ? 4 : 0);
    const float d = format == MOE_ROUTE_FORMAT_GGUF_MXFP4 ? moer_e8m0_half(block[0]) : moer_gguf_f16(block);
    const float m = has_min ? moer_gguf_f16(block + 2) : 0.0f;
    const uint32_t bits = five_bits ? moer_gguf_word(block + head) : 0;
    unsigned i;
    for (i = 0; i < 32; i++) {
        const int q = (int)((unsigned)codes[i % 16] >> (i / 16 * 4) & 15u) | (int)(bits >> i & 1u) << 4;
        switch (format) {
        case MOE_ROUTE_FORMAT_GGUF_Q4_0: values[i] = (float)(q - 8) * d; break;
        case MOE_ROUTE_FORMAT_GGUF_Q5_0: values[i] = (float)(q - 16) * d; break;
        case MOE_ROUTE_FORMAT_GGUF_Q8_0: values[i] = (float)(codes[i] < 128 ? (int)codes[i] : (int)codes[i] - 256) * d; break;
        case MOE_ROUTE_FORMAT_GGUF_IQ4_NL: values[i] = (float)moer_iq4_values[q] * d; break;
        case MOE_ROUTE_FORMAT_GGUF_MXFP4: values[i] = (float)moer_twice_e2m1[q] * d; break;
        default: values[i] = (float)q * d + m; break;
        }
    }
}

/* Q4_K, Q5_K: each 32 bytes hold 32 values in their low halves, and the next 32 in their high ones. */
static void moer_gguf_q4_k_block(int five_bits, const unsigned char *block, float *values) {
    const unsigned char *bits = block + 16, *codes = block + (five_bits ? 48 : 16);
    const float d = moer_gguf_f16(block), m = moer_gguf_f16(block + 2);
    const uint32_t s0 = moer_gguf_word(block + 4), s1 = moer_gguf_word(block + 8), s2 = moer_gguf_word(block + 12);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned group = i / 32, half = group / 4, in_group = i % 32;
        const unsigned scale = moer_gguf_byte(moer_k_scales(s0, s2, half), group % 4), minimum = moer_gguf_byte(moer_k_mins(s1, s2, half), group % 4);
        unsigned q = (unsigned)codes[group / 2 * 32 + in_group] >> (group % 2 * 4) & 15u;
        if (five_bits) q |= ((unsigned)bits[in_group] >> group & 1u) << 4;
        values[i] = (float)q * (d * (float)scale) - m * (float)minimum;
    }
}

/* Q2_K: each 32 bytes hold four times 32 values, two bits each, with a scale for 16. */
static void moer_gguf_q2_k_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block + 80), m = moer_gguf_f16(block + 82);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned q = (unsigned)block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3u, scale = block[i / 16];
        values[i] = (float)q * (d * (float)(scale & 15u)) - m * (float)(scale >> 4);
    }
}

/* Q3_K: likewise; bit i / 32 of bits[i % 32] is the code's third. */
static void moer_gguf_q3_k_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block + 108);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned group = i / 16, half = group / 8, which = group / 4 % 2;
        const unsigned scale = moer_gguf_byte(moer_q3_k_scales(moer_gguf_word(block + (96 + which * 4)), moer_gguf_word(block + 104), half, which), group % 4);
        const unsigned q = ((unsigned)block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3u) | ((unsigned)block[i % 32] >> (i / 32) & 1u) << 2;
        values[i] = (float)((int)q - 4) * (d * (float)((int)scale - 32));
    }
}

/* Q6_K: in each 128 values, the low halves of 64 bytes are the first 64, the high ones the others; a scale for 16. */
static void moer_gguf_q6_k_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block + 208);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned part = i / 128, in_part = i % 128, scale = block[192 + i / 16];
        const unsigned q = ((unsigned)block[part * 64 + in_part % 64] >> (in_part / 64 * 4) & 15u) | ((unsigned)block[128 + part * 32 + i % 32] >> (in_part / 32 * 2) & 3u) << 4;
        values[i] = (float)((int)q - 32) * (d * (float)(scale < 128u ? (int)scale : (int)scale - 256));
    }
}

/* IQ4_XS: 32 values as in the small blocks, eight times. */
static void moer_gguf_iq4_xs_block(const unsigned char *block, float *values) {
    const float d = moer_gguf_f16(block);
    const uint32_t high = (uint32_t)(block[2] | block[3] << 8), low = moer_gguf_word(block + 4);
    unsigned i;
    for (i = 0; i < 256; i++) {
        const unsigned q = (unsigned)block[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15u;
        values[i] = (float)moer_iq4_values[q] * (d * (float)moer_iq4_xs_scale(low, high, i / 32));
    }
}

static void moer_cpu_gguf_row(moe_route_format format, const unsigned char *blocks, uint32_t inner, float *values) {
    const moer_block block = moer_format_block(format);
    uint32_t k;
    for (k = 0; k < inner; k += block.values, blocks += block.bytes) {
        switch (format) {
        case MOE_ROUTE_FORMAT_GGUF_Q2_K: moer_gguf_q2_k_block(blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q3_K: moer_gguf_q3_k_block(blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q4_K: moer_gguf_q4_k_block(0, blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q5_K: moer_gguf_q4_k_block(1, blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_Q6_K: moer_gguf_q6_k_block(blocks, values + k); break;
        case MOE_ROUTE_FORMAT_GGUF_IQ4_XS: moer_gguf_iq4_xs_block(blocks, values + k); break;
        default: moer_gguf_small_block(format, blocks, values + k); break;
        }
    }
}

/* ---- src/cpu_formats.c ---- */
/*
  cpu_formats.c: what a row of weights stands for, number by number: the plain statement of the formats, which the kernels
  are tested against; GGUF's are in cpu_gguf.c. A value is a product of code and scales (and a difference, where a format has a minimum) that is
  rounded to f32 once.
*/

static float moer_cpu_scale(const moer_matrix *matrix, size_t index) {
    const void *scales = moer_host(matrix->scales);
    if (matrix->scales_kind == MOER_SCALES_E8M0) return moer_e8m0(((const unsigned char *)scales)[index]);
    if (matrix->scales_kind == MOER_SCALES_E4M3) return moer_e4m3(((const unsigned char *)scales)[index]);
    return moer_load_value(scales, index, (moe_route_dtype)matrix->scales_kind);
}

static float moer_cpu_global_scale(const moer_matrix *matrix, size_t expert, size_t row) {
    const float *scales = (const float *)moer_host(matrix->global_scales);
    switch (matrix->global) {
    case MOER_GLOBAL_PER_TENSOR: return scales[0];
    case MOER_GLOBAL_PER_EXPERT: return scales[expert];
    case MOER_GLOBAL_PER_HALF: return scales[expert * 2 + (row >= matrix->rows / 2)];
    case MOER_GLOBAL_INTERLEAVED: return scales[expert * 2 + row % 2];
    default: return 1.0f;
    }
}

static unsigned moer_cpu_nibble(const unsigned char *bytes, size_t index) { return (unsigned)bytes[index / 2] >> (index % 2 * 4) & 15u; }

/* The code less its zero point, both as the matrix has them. */
static float moer_cpu_integer(const moer_matrix *matrix, unsigned code, const unsigned char *zero_points, size_t group) {
    const int four_bits = matrix->format == MOE_ROUTE_FORMAT_INT4;
    const unsigned sign = matrix->signed_codes ? four_bits ? 8u : 128u : 0u; /* turns two's complement into an offset */
    const unsigned usual = four_bits ? 8u : 128u;
    const unsigned zero_point = zero_points == NULL ? usual : (four_bits ? moer_cpu_nibble(zero_points, group) : zero_points[group]) ^ sign;
    return (float)((int)(code ^ sign) - (int)zero_point);
}

static float moer_cpu_e2m1(unsigned code) {
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8u ? -magnitudes[code & 7u] : magnitudes[code & 7u];
}

static void moer_cpu_decode_row(const moer_matrix *matrix, size_t expert, size_t row, float *values) {
    const size_t index = expert * matrix->rows + row, scale_rows = (matrix->rows + matrix->group_rows - 1) / matrix->group_rows;
    const size_t first_scale = (expert * scale_rows + row / matrix->group_rows) * matrix->num_groups;
    const unsigned char *data = (const unsigned char *)moer_host(matrix->data) + index * moer_row_bytes(matrix);
    const unsigned char *zero_points = matrix->zero_points != 0 ? (const unsigned char *)moer_host(matrix->zero_points) + index * moer_zero_point_row_bytes(matrix) : NULL;
    const uint32_t group_size = matrix->group_size != 0 ? matrix->group_size : matrix->inner;
    const float global = moer_cpu_global_scale(matrix, expert, row);
    uint32_t k;
    if (matrix->format > MOE_ROUTE_FORMAT_GGUF) {
        moer_cpu_gguf_row(matrix->format, data, matrix->inner, values);
        return;
    }
    for (k = 0; k < matrix->inner; k++) {
        const uint32_t group = k / group_size;
        switch (matrix->format) {
        case MOE_ROUTE_FORMAT_INT4: values[k] = moer_cpu_integer(matrix, moer_cpu_nibble(data, k), zero_points, group); break;
        case MOE_ROUTE_FORMAT_INT8: values[k] = moer_cpu_integer(matrix, data[k], zero_points, group); break;
        case MOE_ROUTE_FORMAT_FP8: values[k] = moer_e4m3(data[k]); break;
        case MOE_ROUTE_FORMAT_MXFP4:
        case MOE_ROUTE_FORMAT_NVFP4: values[k] = moer_cpu_e2m1(moer_cpu_nibble(data, k)); break;
        case MOE_ROUTE_FORMAT_F16: values[k] = moer_load_value(data, k, MOE_ROUTE_F16); break;
        case MOE_ROUTE_FORMAT_BF16: values[k] = moer_load_value(data, k, MOE_ROUTE_BF16); break;
        default: values[k] = moer_load_value(data, k, MOE_ROUTE_F32); break;
        }
        if (moer_is_quantized(matrix->format)) values[k] = values[k] * moer_cpu_scale(matrix, first_scale + group) * global;
    }
}

/* ---- src/cpu_experts.c ---- */
/*
  cpu_experts.c: the experts on the CPU: decode a weight row once, multiply it with every activation row of its expert. What
  the row's bytes mean belongs to cpu_formats.c. Clear rather than fast; the sums of products are in f64, so that the
  GPU's f32 sums can be held against them. The activation is the kernels' own text.
*/

/* ---- kernels_src/activations.h ---- */
/*
  activations.h: what stands between an expert's two matmuls: clamps, activation, and the product of gate and up; one text
  for the kernels and for the CPU backend, so that both give the same bits. As in scores.h everything is a single IEEE f32
  operation in a fixed order, and no rounded product feeds a sum that a compiler could fuse. Include scores.h first.
  Matmuls and biases don't belong here.
*/
#define MOER_SILU 0 /* values of moe_route_activation */
#define MOER_GELU_TANH 1
#define MOER_GELU_ERF 2
#define MOER_RELU2 3
#define MOER_SITU 4
#define MOER_CLAMP_NONE 0
#define MOER_CLAMP_BEFORE 1 /* moe_route_clamp_position + 1 */
#define MOER_CLAMP_AFTER 2

/* The normal distribution (1 + erf(x / sqrt(2))) / 2, relative error within 7 units of 2^-24 from x = -12.9 on, below which
   the result is no normal float. With a = |x|, t = 1 / (1 + 0.3 a): the lower tail is e^(-a^2 / 2) t p(t), p fitted for the least relative error up
   to a = 14.5, where the tail is below every float. The part of a^2 that its rounding loses goes back in as a factor. */
MOER_SCORE float moer_normal_cdf(float x) {
    const float a = x < 0.0f ? -x : x;
    float t, p, square, lost, density;
    if (a > 14.5f) return x < 0.0f ? 0.0f : 1.0f;
    t = MOER_RECIPROCAL(MOER_FMA(0.3f, a, 1.0f));
    p = MOER_FMA(-2.06234697e-2f, t, 1.12435617e-1f);
    p = MOER_FMA(p, t, -2.28213608e-1f);
    p = MOER_FMA(p, t, 1.91784531e-1f);
    p = MOER_FMA(p, t, -7.94234946e-2f);
    p = MOER_FMA(p, t, 9.61568356e-2f);
    p = MOER_FMA(p, t, 7.83896521e-2f);
    p = MOER_FMA(p, t, 1.10235423e-1f);
    p = MOER_FMA(p, t, 1.19571812e-1f);
    p = MOER_FMA(p, t, 1.19686693e-1f);
    p = MOER_MUL(p, t);
    square = MOER_MUL(a, a);
    lost = MOER_FMA(a, a, -square);
    density = MOER_MUL(moer_exp(MOER_MUL(-0.5f, square)), MOER_FMA(-0.5f, lost, 1.0f));
    return x < 0.0f ? MOER_MUL(density, p) : MOER_FMA(-density, p, 1.0f);
}

/* The activation of x. `alpha` is SILU's, or SITU's beta. A NaN stays one.
   SILU x sigmoid(alpha x); GELU_TANH x (1 + tanh(u)) / 2 = x sigmoid(2u), 2u = sqrt(8 / pi) (x + 0.044715 x^3): relative error
   within 4 + 3 |v| units of 2^-24 from v = -87 on, v the argument of sigmoid, whose rounding is what v enters by.
   SITU alpha tanh(x / alpha) sigmoid(x): within 9 + 3 |x| units from x = -87 on.
   GELU_ERF x moer_normal_cdf(x): within 8 units from x = -12.9 on. Below these x the result is 1e-35 |x| at most.
   RELU2 is rounded once. */
MOER_SCORE float moer_activation(int activation, float x, float alpha) {
    if (x != x) return x;
    if (activation == MOER_SILU) return MOER_MUL(x, moer_sigmoid(MOER_MUL(alpha, x)));
    if (activation == MOER_GELU_TANH) return MOER_MUL(x, moer_sigmoid(MOER_MUL(x, MOER_FMA(7.13548163e-2f, MOER_MUL(x, x), 1.59576912f))));
    if (activation == MOER_GELU_ERF) return MOER_MUL(x, moer_normal_cdf(x));
    if (activation == MOER_SITU) return MOER_MUL(moer_softcap(x, alpha), moer_sigmoid(x));
    return x > 0.0f ? MOER_MUL(x, x) : 0.0f;
}

/* The gate's part of h, or all of it in experts without gate. */
MOER_SCORE float moer_activated_gate(int activation, int clamp, float gate, float alpha, float limit) {
    float value = gate;
    if (clamp == MOER_CLAMP_BEFORE && value > limit) value = limit;
    value = moer_activation(activation, value, alpha);
    if (clamp == MOER_CLAMP_AFTER && value > limit) value = limit;
    return value;
}

/* up's part of h. `beta` is SITU's for up, 0: none. */
MOER_SCORE float moer_shifted_up(int clamp, float up, float beta, float offset, float limit) {
    float value = up;
    if (clamp != MOER_CLAMP_NONE && value > limit) value = limit;
    if (clamp != MOER_CLAMP_NONE && value < -limit) value = -limit;
    if (beta != 0.0f && value == value) value = moer_softcap(value, beta);
    return MOER_ADD(value, offset);
}

typedef struct moer_cpu_product { /* out[r or pair] = W[e] @ x, for all rows of all experts */
    const moe_route_layer *layer;
    const moer_matrix *matrix, *up; /* up: where gate and up are two matrices */
    const int32_t *expert_offsets, *row_to_pair;
    int x_index; /* 0: x is indexed by token, 1: by pair, 2: by row */
    const void *x;
    moe_route_dtype x_dtype;
    int activated; /* 1: gate_up with what follows it up to h */
    const void *input_weights; /* of the router's weights_dtype, by pair, or NULL: they multiply x */
    int out_by_pair;
    const int32_t *pair_to_slot_row; /* out is indexed by it, or NULL; -1: not to be written */
    void *out;
    moe_route_dtype out_dtype;
    float *scratch; /* [2, inner] */
} moer_cpu_product;

static double moer_cpu_dot(const float *values, const void *x, size_t first, uint32_t inner, moe_route_dtype dtype) {
    double sum = 0.0;
    uint32_t k;
    for (k = 0; k < inner; k++) sum += (double)values[k] * (double)moer_load_value(x, first + k, dtype);
    return sum;
}

static double moer_cpu_bias(const moer_matrix *matrix, size_t row) {
    return matrix->bias != 0 ? (double)moer_load_value(moer_host(matrix->bias), row, matrix->bias_dtype) : 0.0;
}

static void moer_cpu_multiply(const moer_cpu_product *p) {
    const moe_route_layer *layer = p->layer;
    const moer_matrix *matrix = p->matrix;
    const int gated = p->activated && layer->gated, interleaved = gated && layer->interleaved;
    const uint32_t inner = matrix->inner, columns = gated && p->up == NULL ? matrix->rows / 2 : matrix->rows, top_k = layer->router.top_k;
    uint32_t e, n;
    for (e = 0; e < layer->router.num_local_experts; e++) {
        const int32_t first = p->expert_offsets[e], end = p->expert_offsets[e + 1];
        if (first == end) continue;
        for (n = 0; n < columns; n++) {
            const size_t base = (size_t)e * matrix->rows;
            const size_t row = interleaved ? n * 2 : n, up_row = p->up != NULL ? n : interleaved ? n * 2 + 1 : n + columns;
            const moer_matrix *up_matrix = p->up != NULL ? p->up : matrix;
            float *up = p->scratch + inner;
            int32_t r;
            moer_cpu_decode_row(matrix, e, row, p->scratch);
            if (gated) moer_cpu_decode_row(up_matrix, e, up_row, up);
            for (r = first; r < end; r++) {
                const uint32_t pair = (uint32_t)p->row_to_pair[r];
                int32_t out_row;
                const size_t x_row = p->x_index == 0 ? pair / top_k : p->x_index == 1 ? pair : (size_t)r;
                const double weight = p->input_weights != NULL ? (double)moer_load_value(p->input_weights, pair, layer->router.weights_dtype) : 1.0;
                float value = (float)(weight * moer_cpu_dot(p->scratch, p->x, x_row * inner, inner, p->x_dtype) + moer_cpu_bias(matrix, base + row));
                if (p->activated) value = moer_activated_gate((int)layer->activation, layer->clamp_kind, value, layer->alpha, layer->clamp);
                if (gated) {
                    const float up_value = (float)(weight * moer_cpu_dot(up, p->x, x_row * inner, inner, p->x_dtype) + moer_cpu_bias(up_matrix, base + up_row));
                    value *= moer_shifted_up(layer->clamp_kind, up_value, layer->up_beta, layer->up_offset, layer->clamp);
                }
                out_row = p->pair_to_slot_row != NULL ? p->pair_to_slot_row[pair] : p->out_by_pair ? (int32_t)pair : r;
                if (out_row >= 0) moer_store_value(p->out, (size_t)out_row * columns + n, p->out_dtype, value);
            }
        }
    }
}

static uint32_t moer_cpu_num_valid(moe_route_address num_valid_tokens, uint32_t num_tokens) {
    int32_t valid;
    if (num_valid_tokens == 0) return num_tokens;
    memcpy(&valid, moer_host(num_valid_tokens), sizeof valid);
    return valid < 0 ? 0 : (uint32_t)valid < num_tokens ? (uint32_t)valid : num_tokens;
}

/* Element `at` of an array [T, H] of the layer's dtype. */
static float moer_cpu_element(const moe_route_layer *layer, moe_route_address array, size_t at) { return moer_load_value(moer_host(array), at, layer->dtype); }

static float moer_cpu_weight(const moe_route_layer *layer, const moer_combine_args *args, uint32_t pair) {
    return moer_load_value(moer_host(args->router_weights), pair, layer->router.weights_dtype);
}

/* combine.cu over the same arguments, and to the same bits: sums are f32 here. */
static void moer_cpu_combine(const moe_route_layer *layer, const moer_combine_args *args, moe_route_dtype rows_dtype) {
    const moer_epilogue *epilogue = &args->epilogue;
    const uint32_t top_k = layer->router.top_k, hidden_size = layer->hidden_size;
    const uint32_t num_valid = moer_cpu_num_valid(epilogue->num_valid_tokens, args->num_tokens);
    const int32_t *pair_to_row = (const int32_t *)moer_host(args->pair_to_row), *ids = (const int32_t *)moer_host(epilogue->ids);
    const float *shared_weights = (const float *)moer_host(epilogue->shared_weights);
    const int weighted = layer->weight_on_input || args->weighted_rows;
    uint32_t t, j, n;
    for (t = 0; t < args->num_tokens; t++)
        for (n = 0; n < hidden_size; n++) {
            const size_t at = (size_t)t * hidden_size + n;
            float sum = 0.0f;
            if (t < num_valid) {
                for (j = 0; j < top_k; j++) {
                    const uint32_t pair = t * top_k + j, row = pair_to_row != NULL ? (uint32_t)pair_to_row[pair] : pair;
                    if (row < args->num_rows)
                        sum = fmaf(weighted ? 1.0f : moer_cpu_weight(layer, args, pair), moer_load_value(moer_host(args->rows), (size_t)row * hidden_size + n, rows_dtype), sum);
                    else if (layer->router.num_identity != 0 && (uint32_t)ids[pair] - layer->router.first_identity < layer->router.num_identity)
                        sum = fmaf(moer_cpu_weight(layer, args, pair), moer_cpu_element(layer, epilogue->x, at), sum);
                }
                if (epilogue->shared != 0) sum = fmaf(shared_weights != NULL ? shared_weights[t] : 1.0f, moer_cpu_element(layer, epilogue->shared, at), sum);
                if (epilogue->residual != 0) sum += moer_cpu_element(layer, epilogue->residual, at);
            }
            moer_store_value(moer_host(args->y), at, layer->dtype, sum);
        }
}

static void moer_cpu_expand(const void *x, const int32_t *row_to_pair, void *rows, size_t row_bytes, uint32_t num_pairs, uint32_t top_k) {
    uint32_t r;
    for (r = 0; r < num_pairs; r++) {
        char *to = (char *)rows + r * row_bytes;
        const uint32_t pair = (uint32_t)row_to_pair[r];
        if (pair < num_pairs) memcpy(to, (const char *)x + pair / top_k * row_bytes, row_bytes);
        else memset(to, 0, row_bytes);
    }
}

/* ---- src/cpu_ranks.c ---- */
/*
  cpu_ranks.c: on the CPU, what goes to which rank, and how the rows that come back are numbered. The experts' products
  belong to cpu_experts.c.
*/

/* The rank that holds a physical expert, or num_ranks. */
static uint32_t moer_cpu_rank(const moe_route_layer *layer, uint32_t expert) {
    uint32_t rank = 0;
    if (expert >= layer->rank_begin[layer->num_ranks]) return layer->num_ranks;
    while (layer->rank_begin[rank + 1] <= expert) rank++;
    return rank;
}

/* The rank of slot j of a token. */
static uint32_t moer_cpu_slot_rank(const moe_route_layer *layer, const int32_t *ids, uint32_t token, uint32_t j) {
    return moer_cpu_rank(layer, moer_physical_expert(&layer->router, ids[(size_t)token * layer->router.top_k + j], token));
}

/* Whether slot j is the token's first at its rank. */
static int moer_cpu_slot_leads(const moe_route_layer *layer, const int32_t *ids, uint32_t token, uint32_t j) {
    const uint32_t rank = moer_cpu_slot_rank(layer, ids, token, j);
    uint32_t other = 0;
    while (other < j && moer_cpu_slot_rank(layer, ids, token, other) != rank) other++;
    return rank < layer->num_ranks && other == j;
}

/* A row: x, and what each slot of the token has there. */
static void moer_cpu_write_row(const moe_route_layer *layer, const moer_dispatch_args *args, const int32_t *ids, uint32_t token, uint32_t rank, size_t row) {
    const uint32_t top_k = layer->router.top_k;
    const size_t row_bytes = layer->hidden_size * moer_dtype_size(layer->dtype), weight_size = moer_dtype_size(layer->router.weights_dtype);
    uint32_t j;
    if (args->rows != 0) memcpy((char *)moer_host(args->rows) + row * row_bytes, (const char *)moer_host(args->x) + token * row_bytes, row_bytes);
    if (args->row_to_token != 0) ((int32_t *)moer_host(args->row_to_token))[row] = (int32_t)token;
    for (j = 0; j < top_k; j++) {
        const size_t pair = (size_t)token * top_k + j, at = row * top_k + j;
        const uint32_t expert = moer_physical_expert(&layer->router, ids[pair], token);
        const int here = moer_cpu_rank(layer, expert) == rank;
        if (args->row_ids != 0) ((int32_t *)moer_host(args->row_ids))[at] = here ? (int32_t)expert : -1;
        if (args->row_weights == 0) continue;
        if (here) memcpy((char *)moer_host(args->row_weights) + at * weight_size, (const char *)moer_host(args->weights) + pair * weight_size, weight_size);
        else memset((char *)moer_host(args->row_weights) + at * weight_size, 0, weight_size);
    }
}

/* With fixed sizes: the rows of a rank that don't exist. */
static void moer_cpu_clear_rows(const moe_route_layer *layer, const moer_dispatch_args *args, size_t begin, size_t end) {
    const size_t top_k = layer->router.top_k, weight_size = moer_dtype_size(layer->router.weights_dtype);
    size_t row, i;
    for (row = begin; row < end; row++) {
        if (args->row_to_token != 0) ((int32_t *)moer_host(args->row_to_token))[row] = -1;
        if (args->row_weights != 0) memset((char *)moer_host(args->row_weights) + row * top_k * weight_size, 0, top_k * weight_size);
        for (i = 0; i < top_k && args->row_ids != 0; i++) ((int32_t *)moer_host(args->row_ids))[row * top_k + i] = -1;
    }
}

static void moer_cpu_dispatch(const moe_route_layer *layer, const moer_dispatch_args *args) {
    const uint32_t top_k = layer->router.top_k, num_ranks = layer->num_ranks, num_valid = moer_cpu_num_valid(args->num_valid_tokens, args->num_tokens);
    const int32_t *ids = (const int32_t *)moer_host(args->ids);
    int32_t *pair_to_row = (int32_t *)moer_host(args->pair_to_row), *pair_to_slot_row = (int32_t *)moer_host(args->pair_to_slot_row);
    int32_t total[MOER_MAX_RANKS][2], start[MOER_MAX_RANKS + 1][2], next[MOER_MAX_RANKS][2];
    int32_t row_of[MOER_MAX_RANKS]; /* of the token at hand */
    uint32_t t, j, r;
    memset(total, 0, sizeof total);
    for (t = 0; t < num_valid; t++)
        for (j = 0; j < top_k; j++) {
            r = moer_cpu_slot_rank(layer, ids, t, j);
            if (r == num_ranks) continue;
            total[r][1]++;
            total[r][0] += moer_cpu_slot_leads(layer, ids, t, j);
        }
    start[0][0] = start[0][1] = 0;
    for (r = 0; r < num_ranks; r++) {
        start[r + 1][0] = start[r][0] + (args->capacity != 0 ? (int32_t)args->capacity : total[r][0]);
        start[r + 1][1] = start[r][1] + (args->capacity != 0 ? (int32_t)args->slot_capacity : total[r][1]);
    }
    if (args->counts != 0) memcpy(moer_host(args->counts), total, num_ranks * sizeof total[0]);
    if (args->offsets != 0) memcpy(moer_host(args->offsets), start, (num_ranks + 1) * sizeof start[0]);
    memcpy(next, start, num_ranks * sizeof next[0]);
    for (t = 0; t < args->num_tokens; t++)
        for (j = 0; j < top_k; j++) {
            const size_t pair = (size_t)t * top_k + j;
            int32_t row = -1, slot_row = -1;
            r = t < num_valid ? moer_cpu_slot_rank(layer, ids, t, j) : num_ranks;
            if (r < num_ranks) {
                if (moer_cpu_slot_leads(layer, ids, t, j)) {
                    row_of[r] = row = next[r][0] < start[r + 1][0] ? next[r][0] : -1;
                    next[r][0]++;
                    if (row >= 0) moer_cpu_write_row(layer, args, ids, t, r, (size_t)row);
                }
                if (row_of[r] >= 0 && next[r][1] < start[r + 1][1]) slot_row = next[r][1];
                next[r][1]++;
            }
            if (pair_to_row != NULL) pair_to_row[pair] = row;
            if (pair_to_slot_row != NULL) pair_to_slot_row[pair] = slot_row;
        }
    for (r = 0; r < num_ranks && args->capacity != 0; r++)
        if (next[r][0] < start[r + 1][0]) moer_cpu_clear_rows(layer, args, (size_t)next[r][0], (size_t)start[r + 1][0]);
}

static void moer_cpu_slots(const moer_router *router, const moer_slots_args *args) {
    const uint32_t num_pairs = args->num_tokens * router->top_k, num_valid = moer_cpu_num_valid(args->num_valid_tokens, args->num_tokens);
    const int32_t *ids = (const int32_t *)moer_host(args->ids);
    int32_t *pair_to_slot_row = (int32_t *)moer_host(args->pair_to_slot_row);
    uint32_t p, number = 0;
    for (p = 0; p < num_pairs; p++) {
        const uint32_t token = p / router->top_k, source = p / args->source_pairs;
        const int local = token < num_valid && moer_physical_expert(router, ids[p], token) - router->first_expert < router->num_local_experts;
        if (p % args->source_pairs == 0) number = 0;
        pair_to_slot_row[p] = local && number < args->source_rows ? (int32_t)(source * args->source_rows + number) : -1;
        number += local != 0;
    }
}

/* ---- src/router.c ---- */
/*
  router.c: the description of a router, and of where its experts are: checked, completed, and as constants of the kernels.
  Its arithmetic is in kernels_src/select.h and cpu_route.c.
*/

static moe_route_status moer_refuse(moe_route_context *context, const char *field, unsigned long long value, const char *allowed) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: %s is %llu; allowed is %s", field, value, allowed);
}

static moe_route_status moer_refuse_number(moe_route_context *context, const char *field, float value, const char *allowed) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: %s is %g; allowed is %s", field, (double)value, allowed);
}

/* DEFAULT becomes `usual`; other values than the three dtypes become DEFAULT. */
static moe_route_dtype moer_dtype_or(moe_route_dtype dtype, moe_route_dtype usual) {
    if (dtype == MOE_ROUTE_DTYPE_DEFAULT) return usual;
    return dtype == MOE_ROUTE_F32 || dtype == MOE_ROUTE_F16 || dtype == MOE_ROUTE_BF16 ? dtype : MOE_ROUTE_DTYPE_DEFAULT;
}

/* By the bits: a compiler that was told to expect finite numbers only may drop a comparison. */
static int moer_is_finite(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static int moer_drops_groups(moe_route_group_rule rule) { return rule == MOE_ROUTE_GROUPS_MAX || rule == MOE_ROUTE_GROUPS_TOP2_SUM; }

static int moer_is_positive(float value) { return moer_is_finite(value) && value >= 0.0f; }

/* ---- checking ---- */

static moe_route_status moer_router_check_sizes(moe_route_context *context, const moe_route_router *from) {
    if (from->num_experts < 1 || from->num_experts > MOER_MAX_EXPERTS)
        return moer_refuse(context, "router.num_experts", from->num_experts, "1 to 2048");
    if (from->top_k < 1 || from->top_k > MOER_MAX_TOP_K || from->top_k > from->num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.top_k is %u; allowed is 1 to %u with %u experts", (unsigned)from->top_k,
                         (unsigned)(from->num_experts < MOER_MAX_TOP_K ? from->num_experts : MOER_MAX_TOP_K), (unsigned)from->num_experts);
    if (from->num_shared_experts > MOER_MAX_SHARED) return moer_refuse(context, "router.num_shared_experts", from->num_shared_experts, "0 to 32");
    if (from->num_skip_experts >= from->num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_skip_experts is %u; allowed is 0 to %u with %u experts", (unsigned)from->num_skip_experts,
                         (unsigned)from->num_experts - 1, (unsigned)from->num_experts);
    if (moer_dtype_or(from->logits_dtype, MOE_ROUTE_F32) == MOE_ROUTE_DTYPE_DEFAULT)
        return moer_refuse(context, "router.logits_dtype", (unsigned long long)from->logits_dtype, "F32 (1), F16 (2) or BF16 (3)");
    if (moer_dtype_or(from->weights_dtype, MOE_ROUTE_F32) == MOE_ROUTE_DTYPE_DEFAULT)
        return moer_refuse(context, "router.weights_dtype", (unsigned long long)from->weights_dtype, "F32 (1), F16 (2) or BF16 (3)");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_choices(moe_route_context *context, const moe_route_router *from) {
    if (from->score < MOE_ROUTE_SCORE_SOFTMAX || from->score > MOE_ROUTE_SCORE_CUSTOM)
        return moer_refuse(context, "router.score", (unsigned long long)from->score, "a value of moe_route_score, 0 to 5");
    if (from->group_rule < MOE_ROUTE_GROUPS_NONE || from->group_rule > MOE_ROUTE_GROUPS_QUOTA)
        return moer_refuse(context, "router.group_rule", (unsigned long long)from->group_rule, "a value of moe_route_group_rule, 0 to 3");
    if (from->dropped < MOE_ROUTE_DROPPED_MINUS_INFINITY || from->dropped > MOE_ROUTE_DROPPED_ZERO_SCORE)
        return moer_refuse(context, "router.dropped", (unsigned long long)from->dropped, "MINUS_INFINITY (0), ZERO (1) or ZERO_SCORE (2)");
    if (from->ids < MOE_ROUTE_IDS_SELECTED || from->ids > MOE_ROUTE_IDS_TABLE)
        return moer_refuse(context, "router.ids", (unsigned long long)from->ids, "SELECTED (0), GIVEN (1) or TABLE (2)");
    if (from->weight < MOE_ROUTE_WEIGHT_SCORE || from->weight > MOE_ROUTE_WEIGHT_SIGMOID_SHARE)
        return moer_refuse(context, "router.weight", (unsigned long long)from->weight, "SCORE (0), SOFTMAX_SELECTED (1), SIGMOID_SELECTED (2) or SIGMOID_SHARE (3)");
    if (from->renormalize < MOE_ROUTE_RENORMALIZE_NONE || from->renormalize > MOE_ROUTE_RENORMALIZE_L2)
        return moer_refuse(context, "router.renormalize", (unsigned long long)from->renormalize, "NONE (0), SUM (1), MAX_SUM (2) or L2 (3)");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_numbers(moe_route_context *context, const moe_route_router *from) {
    const int addresses = context->device != MOE_ROUTE_DEVICE_COMPILE; /* nothing to point at when only compiling */
    if (!moer_is_positive(from->softcap)) return moer_refuse_number(context, "router.softcap", from->softcap, "0 (none) or a positive number");
    if (!moer_is_positive(from->jitter)) return moer_refuse_number(context, "router.jitter", from->jitter, "0 or a positive number");
    if (!moer_is_positive(from->renormalize_epsilon)) return moer_refuse_number(context, "router.renormalize_epsilon", from->renormalize_epsilon, "0 or a positive number");
    if (!moer_is_finite(from->scale)) return moer_refuse_number(context, "router.scale", from->scale, "a finite number");
    if (from->logit_bias % 4 != 0) return moer_refuse(context, "router.logit_bias", from->logit_bias, "an address that is a multiple of 4, or 0");
    if (from->selection_bias % 4 != 0) return moer_refuse(context, "router.selection_bias", from->selection_bias, "an address that is a multiple of 4, or 0");
    if (from->expert_scale % 4 != 0) return moer_refuse(context, "router.expert_scale", from->expert_scale, "an address that is a multiple of 4, or 0");
    if (from->ids == MOE_ROUTE_IDS_TABLE) {
        if (from->id_table % 4 != 0 || (addresses && from->id_table == 0)) return moer_refuse(context, "router.id_table", from->id_table, "an address that is a multiple of 4");
        if (from->id_table_rows < 1 || from->id_table_rows > 0x7fffffffu) return moer_refuse(context, "router.id_table_rows", from->id_table_rows, "1 to 2147483647");
    } else if (from->id_table != 0 || from->id_table_rows != 0) {
        return moer_refuse(context, "router.ids", (unsigned long long)from->ids, "TABLE (2) with an id_table");
    }
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_groups(moe_route_context *context, const moe_route_router *from) {
    if (from->group_rule == MOE_ROUTE_GROUPS_NONE) {
        if (from->num_groups > 1) return moer_refuse(context, "router.group_rule", 0, "MAX (1), TOP2_SUM (2) or QUOTA (3) with more than one group");
        return MOE_ROUTE_OK;
    }
    if (from->num_groups < 1 || from->num_groups > MOER_MAX_GROUPS || from->num_experts % from->num_groups != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_groups is %u; allowed is a divisor of num_experts, %u, up to 64", (unsigned)from->num_groups, (unsigned)from->num_experts);
    if (moer_drops_groups(from->group_rule) && (from->topk_groups < 1 || from->topk_groups > from->num_groups))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.topk_groups is %u; allowed is 1 to num_groups, %u", (unsigned)from->topk_groups, (unsigned)from->num_groups);
    if (from->group_rule == MOE_ROUTE_GROUPS_TOP2_SUM && from->num_experts / from->num_groups < 2)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_groups is %u; TOP2_SUM needs groups of at least 2 of the %u experts", (unsigned)from->num_groups, (unsigned)from->num_experts);
    if (from->group_rule == MOE_ROUTE_GROUPS_QUOTA && from->top_k % from->num_groups != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.num_groups is %u; QUOTA needs a divisor of top_k, %u", (unsigned)from->num_groups, (unsigned)from->top_k);
    return MOE_ROUTE_OK;
}

/* Choices that exclude one another. */
static moe_route_status moer_router_check_together(moe_route_context *context, const moe_route_router *from) {
    if (from->score == MOE_ROUTE_SCORE_SPARSE_MIXER) {
        if (from->ids != MOE_ROUTE_IDS_SELECTED) return moer_refuse(context, "router.ids", (unsigned long long)from->ids, "SELECTED (0) with SPARSE_MIXER");
        if (from->selection_bias != 0) return moer_refuse(context, "router.selection_bias", from->selection_bias, "0 with SPARSE_MIXER");
        if (from->group_rule != MOE_ROUTE_GROUPS_NONE) return moer_refuse(context, "router.group_rule", (unsigned long long)from->group_rule, "NONE (0) with SPARSE_MIXER");
    } else if (from->jitter != 0.0f) {
        return moer_refuse_number(context, "router.jitter", from->jitter, "0 with scores other than SPARSE_MIXER");
    }
    if (from->dropped != MOE_ROUTE_DROPPED_MINUS_INFINITY && !moer_drops_groups(from->group_rule))
        return moer_refuse(context, "router.dropped", (unsigned long long)from->dropped, "MINUS_INFINITY (0) unless group_rule is MAX or TOP2_SUM");
    if (from->dropped == MOE_ROUTE_DROPPED_ZERO_SCORE) {
        if (from->selection_bias != 0) return moer_refuse(context, "router.selection_bias", from->selection_bias, "0 with DROPPED_ZERO_SCORE");
        if (from->score == MOE_ROUTE_SCORE_IDENTITY || from->score == MOE_ROUTE_SCORE_CUSTOM)
            return moer_refuse(context, "router.score", (unsigned long long)from->score, "SOFTMAX (0), SIGMOID (1) or SQRT_SOFTPLUS (2) with DROPPED_ZERO_SCORE");
    }
    if (from->num_shared_experts != 0 && from->weight == MOE_ROUTE_WEIGHT_SCORE && (from->score == MOE_ROUTE_SCORE_SOFTMAX || from->score == MOE_ROUTE_SCORE_SPARSE_MIXER))
        return moer_refuse(context, "router.num_shared_experts", from->num_shared_experts, "0 where weights are scores by SOFTMAX or SPARSE_MIXER, which the routed experts share");
    return MOE_ROUTE_OK;
}

static int moer_is_word(char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || c == '.'; }

/* The user's expression as a macro's value. Constants are words without spaces: those that keep two tokens apart become
   comments, which mean the same, the others go. */
static moe_route_status moer_router_take_expression(moe_route_context *context, const char *expression, char *taken) {
    size_t used = 0, length = expression != NULL ? strlen(expression) : 0, i;
    int depth = 0, space = 0;
    if (length == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression is missing; SCORE_CUSTOM needs a CUDA expression of x");
    if (length > MOER_MAX_EXPRESSION)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression has %u characters; allowed is up to %u", (unsigned)length, (unsigned)MOER_MAX_EXPRESSION);
    for (i = 0; i < length && depth >= 0; i++) {
        const char c = expression[i];
        if (c < ' ' || c > '~' || strchr(";{}\"'#\\@`$", c) != NULL || (c == '/' && (expression[i + 1] == '/' || expression[i + 1] == '*')))
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression has character %u (code %u), which no expression needs", (unsigned)i, (unsigned)(unsigned char)c);
        depth += (c == '(') - (c == ')');
        if (c == ' ') {
            space = 1;
            continue;
        }
        if (space && used != 0 && moer_is_word(taken[used - 1]) == moer_is_word(c)) {
            memcpy(taken + used, "/**/", 4);
            used += 4;
        }
        space = 0;
        taken[used++] = c;
    }
    taken[used] = 0;
    if (used == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression is blank; SCORE_CUSTOM needs a CUDA expression of x");
    if (depth != 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_expression is \"%s\"; its parentheses don't match", expression);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_custom(moe_route_context *context, const moe_route_router *from, moer_router *router) {
    if (from->score != MOE_ROUTE_SCORE_CUSTOM) {
        if (from->score_expression == NULL && from->score_function == NULL) return MOE_ROUTE_OK;
        return moer_refuse(context, "router.score", (unsigned long long)from->score, "CUSTOM (5) with a score_expression or a score_function");
    }
    if (context->device == MOE_ROUTE_DEVICE_CPU && from->score_function == NULL)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: router.score_function is NULL; SCORE_CUSTOM on the CPU backend needs it");
    router->score_function = from->score_function;
    router->score_user = from->score_user;
    return context->device == MOE_ROUTE_DEVICE_CPU ? MOE_ROUTE_OK : moer_router_take_expression(context, from->score_expression, router->score_expression);
}

static moe_route_status moer_router_check(moe_route_context *context, const moe_route_router *from, moer_router *router) {
    moe_route_status status = moer_router_check_sizes(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_choices(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_numbers(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_groups(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_together(context, from);
    if (status == MOE_ROUTE_OK) status = moer_router_check_custom(context, from, router);
    if (status != MOE_ROUTE_OK) return status;
    router->num_experts = from->num_experts;
    router->top_k = from->top_k;
    router->num_shared_experts = from->num_shared_experts;
    router->num_skip_experts = from->num_skip_experts;
    router->logits_dtype = moer_dtype_or(from->logits_dtype, MOE_ROUTE_F32);
    router->weights_dtype = moer_dtype_or(from->weights_dtype, MOE_ROUTE_F32);
    router->logit_bias = from->logit_bias;
    router->softcap = from->softcap;
    router->score = from->score;
    router->jitter = from->jitter;
    router->selection_bias = from->selection_bias;
    router->group_rule = from->group_rule;
    router->num_groups = from->group_rule != MOE_ROUTE_GROUPS_NONE ? from->num_groups : 1;
    router->topk_groups = from->topk_groups;
    router->dropped = from->dropped;
    if (moer_drops_groups(router->group_rule) && router->topk_groups == router->num_groups)
        router->group_rule = MOE_ROUTE_GROUPS_NONE; /* every group stays */
    router->ids = from->ids;
    router->id_table = from->id_table;
    router->id_table_rows = from->id_table_rows;
    router->weight = from->weight;
    router->renormalize = from->renormalize;
    router->renormalize_epsilon = from->renormalize_epsilon;
    router->scale = from->scale == 0.0f ? 1.0f : from->scale;
    router->expert_scale = from->expert_scale;
    router->divide_by_top_k = from->divide_by_top_k != 0;
    /* A softmax divided by its sum over the selected is the softmax of the selected: no need for the sum over all. Only
       where the largest logit is among the selected: otherwise the sum over them may be 0. */
    if (router->score == MOE_ROUTE_SCORE_SOFTMAX && router->weight == MOE_ROUTE_WEIGHT_SCORE && router->renormalize == MOE_ROUTE_RENORMALIZE_SUM &&
        router->renormalize_epsilon == 0.0f && router->selection_bias == 0 && router->group_rule == MOE_ROUTE_GROUPS_NONE && router->ids == MOE_ROUTE_IDS_SELECTED) {
        router->weight = MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED;
        router->renormalize = MOE_ROUTE_RENORMALIZE_NONE;
    }
    return MOE_ROUTE_OK;
}

static moe_route_status moer_router_check_placement(moe_route_context *context, const moe_route_experts *from, moer_router *router) {
    const uint32_t can_be_identity = router->num_experts - router->num_skip_experts;
    if (from->num_identity_experts >= can_be_identity)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.num_identity_experts is %u; allowed is 0 to %u", (unsigned)from->num_identity_experts, (unsigned)can_be_identity - 1);
    router->num_physical_experts = can_be_identity - from->num_identity_experts;
    router->first_identity = router->num_physical_experts;
    router->num_identity = from->first_expert == 0 ? from->num_identity_experts : 0;
    if (from->expert_map % 4 != 0) return moer_refuse(context, "experts.expert_map", from->expert_map, "an address that is a multiple of 4, or 0");
    if (from->expert_map != 0) {
        router->expert_map = from->expert_map;
        router->expert_map_columns = from->expert_map_columns != 0 ? from->expert_map_columns : 1;
        if (router->expert_map_columns > MOER_MAX_REPLICAS) return moer_refuse(context, "experts.expert_map_columns", from->expert_map_columns, "1 to 64, or 0 for 1");
        if (from->num_physical_experts > MOER_MAX_EXPERTS) return moer_refuse(context, "experts.num_physical_experts", from->num_physical_experts, "1 to 2048, or 0 for the router's");
        if (from->num_physical_experts != 0) router->num_physical_experts = from->num_physical_experts;
    } else if (from->expert_map_columns != 0) {
        return moer_refuse(context, "experts.expert_map", 0, "an address where expert_map_columns is given");
    } else if (from->num_physical_experts != 0) {
        if (from->num_physical_experts > MOER_MAX_EXPERTS) return moer_refuse(context, "experts.num_physical_experts", from->num_physical_experts, "1 to 2048, or 0 for the router's");
        router->given_physical = 1;
        router->num_physical_experts = from->num_physical_experts;
        router->num_identity = 0; /* they aren't physical experts */
    }
    router->first_expert = from->first_expert;
    if (router->first_expert >= router->num_physical_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.first_expert is %u; allowed is 0 to %u", (unsigned)router->first_expert, (unsigned)router->num_physical_experts - 1);
    router->num_local_experts = from->num_local_experts != 0 ? from->num_local_experts : router->num_physical_experts - router->first_expert;
    if (router->num_local_experts > router->num_physical_experts - router->first_expert)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.num_local_experts is %u; allowed is at most %u from expert %u on", (unsigned)router->num_local_experts,
                         (unsigned)(router->num_physical_experts - router->first_expert), (unsigned)router->first_expert);
    return MOE_ROUTE_OK;
}

/* ---- as constants ---- */

/* Adds NAME=VALUE to a list of constants; a list that grew too long stays marked by its first character. */
static void moer_define(char *defines, const char *name, unsigned long value) {
    if (defines[0] == '!') return;
    if (!moer_append(defines, MOER_DEFINES_MAX, defines[0] != 0 ? " %s=%lu" : "%s=%lu", name, value)) defines[0] = '!';
}

static void moer_define_given(char *defines, const char *name, unsigned long value) {
    if (value != 0) moer_define(defines, name, value);
}

/* The constants of select.h. Rare ones stand there only where they matter, so that ordinary routers have short names. */
static void moer_define_router(char *defines, const moer_router *router) {
    moer_define(defines, "LOGITS", router->logits_dtype);
    moer_define(defines, "WEIGHTS", router->weights_dtype);
    moer_define(defines, "SCORE", router->score);
    moer_define(defines, "BIAS", router->selection_bias != 0);
    moer_define(defines, "WEIGHT", router->weight);
    moer_define(defines, "RENORMALIZE", router->renormalize);
    moer_define_given(defines, "SHARED_EXPERTS", router->num_shared_experts);
    moer_define_given(defines, "SKIP_EXPERTS", router->num_skip_experts);
    moer_define_given(defines, "LOGIT_BIAS", router->logit_bias != 0);
    moer_define_given(defines, "SOFTCAP", router->softcap != 0.0f);
    if (router->group_rule != MOE_ROUTE_GROUPS_NONE) {
        moer_define(defines, "GROUP_RULE", router->group_rule);
        moer_define(defines, "GROUPS", router->num_groups);
        moer_define(defines, "TOPK_GROUPS", router->topk_groups);
        moer_define(defines, "DROPPED", router->dropped);
    }
    moer_define_given(defines, "IDS", router->ids);
    moer_define_given(defines, "EXPERT_SCALE", router->expert_scale != 0);
    moer_define_given(defines, "DIVIDE_BY_K", (unsigned long)router->divide_by_top_k);
    if (router->score == MOE_ROUTE_SCORE_CUSTOM && defines[0] != '!' && !moer_append(defines, MOER_DEFINES_MAX, " SCORE_EXPRESSION=%s", router->score_expression)) defines[0] = '!';
}

/* The constants of placement.h. */
static void moer_define_expert_map(char *defines, const moer_router *router) {
    if (router->expert_map_columns == 0) return;
    moer_define(defines, "MAP_COLUMNS", router->expert_map_columns);
    moer_define(defines, "PLACED_EXPERTS", router->num_experts - router->num_skip_experts - router->num_identity);
}

/* The same, and which physical experts are local. */
static void moer_define_placement(char *defines, const moer_router *router) {
    moer_define(defines, "FIRST_EXPERT", router->first_expert);
    moer_define(defines, "LOCAL_EXPERTS", router->num_local_experts);
    moer_define_expert_map(defines, router);
}

/* ---- src/preset_table.c ---- */
/*
  preset_table.c: what routers and experts of known models compute: programs, and the model types of Hugging Face that use
  them. Data alone; presets.c turns it into a description. Numbers that differ between the checkpoints of one type don't
  belong here: the caller gives them.
*/

/* Whether the selected weights are normalised: fixed, or by norm_topk_prob with this default. */
typedef enum moer_norm { MOER_NORM_NEVER, MOER_NORM_ALWAYS, MOER_NORM_OFF, MOER_NORM_ON } moer_norm;

/* What a program reads of a moe_route_model beside num_experts, top_k and norm_topk_prob. */
enum {
    MOER_HAS_SCALE = 1,    /* needed */
    MOER_HAS_GROUPS = 2,   /* needed: num_groups, and topk_groups with a rule that drops groups */
    MOER_MAY_GROUP = 4,    /* 0 groups: none */
    MOER_HAS_SHARED = 8,   /* needed: num_shared_experts */
    MOER_MAY_ZERO = 16,    /* num_zero_experts */
    MOER_MAY_CAP = 32,     /* softcap */
    MOER_HAS_JITTER = 64,
    MOER_HAS_NORM_MIN = 128,
    MOER_MAY_HASH = 256,   /* hash_layer */
    MOER_SKIPS_LAST = 512, /* one more class after the num_experts, which does nothing */
    MOER_MAY_SIGMOID = 1024,       /* scoring_func may be "sigmoid", */
    MOER_MAY_SQRT_SOFTPLUS = 2048, /* "sqrtsoftplus" instead of the program's own */
    MOER_CAPS_30 = 4096    /* a softcap of 30 without one given */
};

typedef enum moer_program_id {
    MOER_PROGRAM_SOFTMAX,
    MOER_PROGRAM_SOFTMAX_NORM,
    MOER_PROGRAM_SOFTMAX_NORM_OFF,
    MOER_PROGRAM_SOFTMAX_NORM_ON,
    MOER_PROGRAM_SELECTED,
    MOER_PROGRAM_SELECTED_BIAS,
    MOER_PROGRAM_COHERE2,
    MOER_PROGRAM_SIGMOID,
    MOER_PROGRAM_MINIMAX_M2,
    MOER_PROGRAM_MINIMAX_M3,
    MOER_PROGRAM_LAGUNA,
    MOER_PROGRAM_AFMOE,
    MOER_PROGRAM_MUSE_SPARK,
    MOER_PROGRAM_LFM2,
    MOER_PROGRAM_INKLING,
    MOER_PROGRAM_INKLING2,
    MOER_PROGRAM_DEEPSEEK_V3,
    MOER_PROGRAM_DOTS1,
    MOER_PROGRAM_AXK2,
    MOER_PROGRAM_DEEPSEEK_V2,
    MOER_PROGRAM_MISTRAL4,
    MOER_PROGRAM_MISTRAL_LARGE4,
    MOER_PROGRAM_DEEPSEEK_V4,
    MOER_PROGRAM_LONGCAT,
    MOER_PROGRAM_ERNIE,
    MOER_PROGRAM_ZAYA,
    MOER_PROGRAM_LLAMA4,
    MOER_PROGRAM_KOLIBRI,
    MOER_PROGRAM_PHIMOE,
    MOER_PROGRAM_GEMMA4,
    MOER_PROGRAM_INTERNS1_PRO,
    MOER_PROGRAM_GROK,
    MOER_PROGRAM_NLLB
} moer_program_id;

typedef struct moer_program {
    moe_route_score score;
    moe_route_weight weight;
    moer_norm norm;
    moe_route_renormalize renormalize; /* where it normalises */
    float epsilon;
    moe_route_group_rule group_rule; /* where there are groups */
    moe_route_dropped dropped;
    uint32_t needs, reads;
} moer_program;

#define MOER_BIAS MOE_ROUTE_NEED_SELECTION_BIAS
#define MOER_UNGROUPED MOE_ROUTE_GROUPS_NONE, MOE_ROUTE_DROPPED_MINUS_INFINITY
#define MOER_TOP2_SUM MOE_ROUTE_GROUPS_TOP2_SUM, MOE_ROUTE_DROPPED_MINUS_INFINITY
#define MOER_TOP2_SUM_ZERO MOE_ROUTE_GROUPS_TOP2_SUM, MOE_ROUTE_DROPPED_ZERO
#define MOER_SUM MOE_ROUTE_RENORMALIZE_SUM

static const moer_program moer_programs[] = { /* in the order of moer_program_id */
    /* softmax over all experts -> top-k -> normalised or not */
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, 0},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, 0},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_OFF, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, 0},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, 0},
    /* top-k of the logits -> softmax over the k */
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOER_NORM_ALWAYS, MOE_ROUTE_RENORMALIZE_NONE, 0.0f, MOER_UNGROUPED, 0, 0},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOER_NORM_ALWAYS, MOE_ROUTE_RENORMALIZE_NONE, 0.0f, MOER_UNGROUPED, MOE_ROUTE_NEED_LOGIT_BIAS, 0},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED, MOER_NORM_ON, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, MOER_MAY_SIGMOID},
    /* sigmoid, mostly selected by score + bias and normalised; epsilons differ */
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, 0},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 0.0f, MOER_UNGROUPED, MOER_BIAS, 0},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 0.0f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 0.0f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE | MOER_MAY_CAP},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 1e-20f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 1e-15f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 1e-6f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SIGMOID_SHARE, MOER_NORM_ALWAYS, MOE_ROUTE_RENORMALIZE_NONE, 0.0f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE | MOER_HAS_SHARED},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 1e-20f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE | MOER_MAY_SQRT_SOFTPLUS},
    /* limited to groups: DeepSeek-V3 and those after it, 1.. whose dropped experts count 0 instead of -inf, then DeepSeek-V2
       and Mistral's of softmax */
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 1e-20f, MOER_TOP2_SUM, MOER_BIAS, MOER_HAS_SCALE | MOER_HAS_GROUPS},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_OFF, MOER_SUM, 1e-20f, MOER_TOP2_SUM, MOER_BIAS, MOER_HAS_SCALE | MOER_HAS_GROUPS},
    {MOE_ROUTE_SCORE_SIGMOID, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 1e-20f, MOER_TOP2_SUM_ZERO, MOER_BIAS, MOER_HAS_SCALE | MOER_MAY_GROUP},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOE_ROUTE_GROUPS_MAX, MOE_ROUTE_DROPPED_ZERO_SCORE, 0, MOER_HAS_SCALE | MOER_MAY_GROUP},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 1e-20f, MOER_TOP2_SUM_ZERO, 0, MOER_HAS_SCALE | MOER_HAS_GROUPS},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 1e-20f, MOER_TOP2_SUM_ZERO, 0, MOER_HAS_SCALE | MOER_HAS_GROUPS},
    /* DeepSeek-V4 */
    {MOE_ROUTE_SCORE_SQRT_SOFTPLUS, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 1e-20f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE | MOER_MAY_HASH | MOER_MAY_SIGMOID},
    /* softmax, selected by score + bias: LongCat, ERNIE, Zaya */
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_SCALE | MOER_MAY_ZERO},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOE_ROUTE_RENORMALIZE_MAX_SUM, 1e-12f, MOER_UNGROUPED, MOER_BIAS, MOER_HAS_NORM_MIN},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOER_UNGROUPED, MOER_BIAS, MOER_SKIPS_LAST},
    /* top-k of the logits, or of logits + bias -> sigmoid */
    {MOE_ROUTE_SCORE_IDENTITY, MOE_ROUTE_WEIGHT_SIGMOID_SELECTED, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, 0},
    {MOE_ROUTE_SCORE_IDENTITY, MOE_ROUTE_WEIGHT_SIGMOID_SELECTED, MOER_NORM_OFF, MOER_SUM, 0.0f, MOER_UNGROUPED, MOER_BIAS, 0},
    /* one of a kind: Phi-3.5-MoE, Gemma-4, Intern-S1-Pro, Grok, NLLB */
    {MOE_ROUTE_SCORE_SPARSE_MIXER, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, MOER_HAS_JITTER},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOER_SUM, 0.0f, MOER_UNGROUPED, MOE_ROUTE_NEED_EXPERT_SCALE, 0},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ON, MOER_SUM, 0.0f, MOE_ROUTE_GROUPS_QUOTA, MOE_ROUTE_DROPPED_MINUS_INFINITY, 0, MOER_HAS_GROUPS},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_NEVER, MOER_SUM, 0.0f, MOER_UNGROUPED, 0, MOER_MAY_CAP | MOER_CAPS_30},
    {MOE_ROUTE_SCORE_SOFTMAX, MOE_ROUTE_WEIGHT_SCORE, MOER_NORM_ALWAYS, MOE_ROUTE_RENORMALIZE_MAX_SUM, 1.1920929e-7f, MOER_UNGROUPED, 0, 0}
};

typedef enum moer_experts_id {
    MOER_EXPERTS_SILU,
    MOER_EXPERTS_SILU_CLAMPED,
    MOER_EXPERTS_STEP,
    MOER_EXPERTS_GPT_OSS,
    MOER_EXPERTS_GPT_OSS_HALVES,
    MOER_EXPERTS_MINIMAX_M3,
    MOER_EXPERTS_GELU,
    MOER_EXPERTS_RELU2,
    MOER_EXPERTS_LLAMA4,
    MOER_EXPERTS_OTHER
} moer_experts_id;

typedef struct moer_experts_kind {
    moe_route_gate_up_order order;
    moe_route_activation activation;
    float alpha, up_offset;
    int clamps;   /* reads swiglu_limit */
    float clamp;  /* without one; 0: none */
    moe_route_clamp_position clamp_position;
    int weight_on_input;
    uint32_t needs;
} moer_experts_kind;

#define MOER_NO_CLAMP 0, 0.0f, MOE_ROUTE_CLAMP_BEFORE
#define MOER_BIASES (MOE_ROUTE_NEED_GATE_UP_BIAS | MOE_ROUTE_NEED_DOWN_BIAS)

static const moer_experts_kind moer_experts_kinds[] = { /* in the order of moer_experts_id */
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 0.0f, 0.0f, MOER_NO_CLAMP, 0, 0},
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 0.0f, 0.0f, 1, 10.0f, MOE_ROUTE_CLAMP_BEFORE, 0, 0},
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 0.0f, 0.0f, 1, 0.0f, MOE_ROUTE_CLAMP_AFTER, 0, 0},
    {MOE_ROUTE_GATE_UP_INTERLEAVED, MOE_ROUTE_ACTIVATION_SILU, 1.702f, 1.0f, 1, 7.0f, MOE_ROUTE_CLAMP_BEFORE, 0, MOER_BIASES},
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 1.702f, 1.0f, 1, 7.0f, MOE_ROUTE_CLAMP_BEFORE, 0, MOER_BIASES},
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 1.702f, 1.0f, 1, 7.0f, MOE_ROUTE_CLAMP_BEFORE, 0, 0},
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_GELU_TANH, 0.0f, 0.0f, MOER_NO_CLAMP, 0, 0},
    {MOE_ROUTE_GATE_UP_NO_GATE, MOE_ROUTE_ACTIVATION_RELU2, 0.0f, 0.0f, MOER_NO_CLAMP, 0, 0},
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 0.0f, 0.0f, MOER_NO_CLAMP, 1, 0},
    /* ReLU without gate (NLLB, Switch Transformers), a soft-capped SwiGLU (Inkling-2), a norm after the experts (Muse) */
    {MOE_ROUTE_GATE_UP_HALVES, MOE_ROUTE_ACTIVATION_SILU, 0.0f, 0.0f, MOER_NO_CLAMP, 0, MOE_ROUTE_NEED_OTHER_EXPERTS}
};

typedef struct moer_preset {
    const char *model_type;
    moer_program_id program;
    moer_experts_id experts;
} moer_preset;

static const moer_preset moer_presets[] = { /* in alphabetical order */
    {"afmoe", MOER_PROGRAM_AFMOE, MOER_EXPERTS_SILU},
    {"aria", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"aria_text", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"axk1", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"axk2", MOER_PROGRAM_AXK2, MOER_EXPERTS_SILU},
    {"bailing_hybrid", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"bailing_moe", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"bailing_moe_v2", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"beam", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"cohere2_moe", MOER_PROGRAM_COHERE2, MOER_EXPERTS_SILU},
    {"dbrx", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"deepseek_ocr2", MOER_PROGRAM_DEEPSEEK_V2, MOER_EXPERTS_SILU},
    {"deepseek_ocr2_text", MOER_PROGRAM_DEEPSEEK_V2, MOER_EXPERTS_SILU},
    {"deepseek_v2", MOER_PROGRAM_DEEPSEEK_V2, MOER_EXPERTS_SILU},
    {"deepseek_v3", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"deepseek_v32", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"deepseek_v4", MOER_PROGRAM_DEEPSEEK_V4, MOER_EXPERTS_SILU_CLAMPED},
    {"diffusion_gemma", MOER_PROGRAM_GEMMA4, MOER_EXPERTS_GELU},
    {"diffusion_gemma_text", MOER_PROGRAM_GEMMA4, MOER_EXPERTS_GELU},
    {"dots1", MOER_PROGRAM_DOTS1, MOER_EXPERTS_SILU},
    {"dots3_note", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"dots3_note_text", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"dots3_note_vision_encoder", MOER_PROGRAM_AFMOE, MOER_EXPERTS_SILU},
    {"ernie4_5_moe", MOER_PROGRAM_ERNIE, MOER_EXPERTS_SILU},
    {"ernie4_5_vl_moe", MOER_PROGRAM_ERNIE, MOER_EXPERTS_SILU},
    {"ernie4_5_vl_moe_text", MOER_PROGRAM_ERNIE, MOER_EXPERTS_SILU},
    {"exaone_moe", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"flex_olmo", MOER_PROGRAM_SOFTMAX_NORM_OFF, MOER_EXPERTS_SILU},
    {"flint", MOER_PROGRAM_SIGMOID, MOER_EXPERTS_SILU},
    {"gemma4", MOER_PROGRAM_GEMMA4, MOER_EXPERTS_GELU},
    {"gemma4_text", MOER_PROGRAM_GEMMA4, MOER_EXPERTS_GELU},
    {"glm4_moe", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"glm4_moe_lite", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"glm4v_moe", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"glm4v_moe_text", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"glm5_next", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU_CLAMPED},
    {"glm5_next_text", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU_CLAMPED},
    {"glm_moe_dsa", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"gpt_oss", MOER_PROGRAM_SELECTED_BIAS, MOER_EXPERTS_GPT_OSS},
    {"granitemoe", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"granitemoe_swa", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"granitemoehybrid", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"granitemoeshared", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"grok-1", MOER_PROGRAM_GROK, MOER_EXPERTS_GELU},
    {"hunyuan_v1_moe", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"hy_v3", MOER_PROGRAM_AFMOE, MOER_EXPERTS_SILU},
    {"hy_v4", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU_CLAMPED},
    {"hy_v4_vl", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU_CLAMPED},
    {"hy_v4_vl_text", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU_CLAMPED},
    {"inkling2", MOER_PROGRAM_INKLING2, MOER_EXPERTS_OTHER},
    {"inkling2_loop", MOER_PROGRAM_INKLING2, MOER_EXPERTS_OTHER},
    {"inkling2_loop_text", MOER_PROGRAM_INKLING2, MOER_EXPERTS_OTHER},
    {"inkling2_text", MOER_PROGRAM_INKLING2, MOER_EXPERTS_OTHER},
    {"inkling_mm_model", MOER_PROGRAM_INKLING, MOER_EXPERTS_SILU},
    {"inkling_text", MOER_PROGRAM_INKLING, MOER_EXPERTS_SILU},
    {"interns1_pro", MOER_PROGRAM_INTERNS1_PRO, MOER_EXPERTS_SILU},
    {"jamba", MOER_PROGRAM_SOFTMAX, MOER_EXPERTS_SILU},
    {"jetmoe", MOER_PROGRAM_SELECTED, MOER_EXPERTS_SILU},
    {"kimi_k2", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"kimi_k25", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"kimi_linear", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"kolibri1", MOER_PROGRAM_KOLIBRI, MOER_EXPERTS_SILU},
    {"laguna", MOER_PROGRAM_LAGUNA, MOER_EXPERTS_SILU},
    {"lara_mini", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"lfm2_moe", MOER_PROGRAM_LFM2, MOER_EXPERTS_SILU},
    {"llama4", MOER_PROGRAM_LLAMA4, MOER_EXPERTS_LLAMA4},
    {"llama4_text", MOER_PROGRAM_LLAMA4, MOER_EXPERTS_LLAMA4},
    {"longcat_flash", MOER_PROGRAM_LONGCAT, MOER_EXPERTS_SILU},
    {"mellum", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"mimo_v2_flash", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"minimax", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"minimax_m2", MOER_PROGRAM_MINIMAX_M2, MOER_EXPERTS_SILU},
    {"minimax_m3_vl", MOER_PROGRAM_MINIMAX_M3, MOER_EXPERTS_MINIMAX_M3},
    {"minimax_m3_vl_text", MOER_PROGRAM_MINIMAX_M3, MOER_EXPERTS_MINIMAX_M3},
    {"mistral4", MOER_PROGRAM_MISTRAL4, MOER_EXPERTS_SILU},
    {"mistral_large4", MOER_PROGRAM_MISTRAL_LARGE4, MOER_EXPERTS_SILU},
    {"mistral_large4_text", MOER_PROGRAM_MISTRAL_LARGE4, MOER_EXPERTS_SILU},
    {"mixtral", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"muse_spark", MOER_PROGRAM_MUSE_SPARK, MOER_EXPERTS_OTHER},
    {"muse_spark_text", MOER_PROGRAM_MUSE_SPARK, MOER_EXPERTS_OTHER},
    {"nemo_speechlm", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_RELU2},
    {"nemotron_h", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_RELU2},
    {"nemotron_h_omni", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_RELU2},
    {"nllb-moe", MOER_PROGRAM_NLLB, MOER_EXPERTS_OTHER},
    {"olmoe", MOER_PROGRAM_SOFTMAX_NORM_OFF, MOER_EXPERTS_SILU},
    {"openai_privacy_filter", MOER_PROGRAM_SELECTED_BIAS, MOER_EXPERTS_GPT_OSS_HALVES},
    {"phimoe", MOER_PROGRAM_PHIMOE, MOER_EXPERTS_SILU},
    {"qwen2_moe", MOER_PROGRAM_SOFTMAX_NORM_OFF, MOER_EXPERTS_SILU},
    {"qwen3_5_moe", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"qwen3_5_moe_text", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"qwen3_moe", MOER_PROGRAM_SOFTMAX_NORM_OFF, MOER_EXPERTS_SILU},
    {"qwen3_next", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"qwen3_omni_moe", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"qwen3_omni_moe_talker_text", MOER_PROGRAM_SOFTMAX_NORM_OFF, MOER_EXPERTS_SILU},
    {"qwen3_omni_moe_text", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"qwen3_omni_moe_thinker", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"qwen3_vl_moe", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"qwen3_vl_moe_text", MOER_PROGRAM_SOFTMAX_NORM, MOER_EXPERTS_SILU},
    {"qwen4_exp", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"qwen4_exp_text", MOER_PROGRAM_SOFTMAX_NORM_ON, MOER_EXPERTS_SILU},
    {"sarvam_mla", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"sarvam_moe", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"solar_open", MOER_PROGRAM_DEEPSEEK_V3, MOER_EXPERTS_SILU},
    {"step3p5", MOER_PROGRAM_MINIMAX_M3, MOER_EXPERTS_STEP},
    {"step3p7", MOER_PROGRAM_MINIMAX_M3, MOER_EXPERTS_STEP},
    {"switch_transformers", MOER_PROGRAM_SOFTMAX, MOER_EXPERTS_OTHER},
    {"unlimited_ocr", MOER_PROGRAM_DEEPSEEK_V2, MOER_EXPERTS_SILU},
    {"unlimited_ocr_text", MOER_PROGRAM_DEEPSEEK_V2, MOER_EXPERTS_SILU},
    {"zaya", MOER_PROGRAM_ZAYA, MOER_EXPERTS_SILU}
};

typedef struct moer_beyond {
    const char *model_type, *reason;
} moer_beyond;

static const moer_beyond moer_models_beyond[] = {
    {"doge", "its experts are the best pairs out of two sets of keys (product-key retrieval), each a single vector"},
    {"vitpose", "its experts are chosen by the data set, without a router"},
    {"vitpose_backbone", "its experts are chosen by the data set, without a router"}
};

/* ---- src/presets.c ---- */
/*
  presets.c: from a model's config.json to the description of its layer, by the data of preset_table.c; and the addresses
  that such a layer can't do without.
*/

#define MOER_NAME_MAX 48 /* characters of a model type that are compared and shown */

static const char *moer_scoring_name(const moer_program *program) {
    if (program->weight == MOE_ROUTE_WEIGHT_SIGMOID_SELECTED) return "sigmoid";
    switch (program->score) {
    case MOE_ROUTE_SCORE_SOFTMAX: return "softmax";
    case MOE_ROUTE_SCORE_SIGMOID: return "sigmoid";
    case MOE_ROUTE_SCORE_SQRT_SOFTPLUS: return "sqrtsoftplus";
    default: return "";
    }
}

/* ---- unknown types ---- */

static int moer_fold(int c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c == '-' ? '_' : c; }

/* How unlike a known name is: insertions, deletions and replacements that make `a` the beginning of `b`, four times, and how
   much longer `b` is than that beginning: "qwen3" is like "qwen3_moe". Case and kind of dash don't matter. */
static uint32_t moer_edit_distance(const char *a, const char *b) {
    uint32_t row[MOER_NAME_MAX + 1], i, j, least = ~0u;
    const uint32_t length = (uint32_t)strlen(b);
    for (j = 0; j <= length; j++) row[j] = j;
    for (i = 0; a[i] != 0; i++) {
        uint32_t diagonal = row[0];
        row[0] = i + 1;
        for (j = 1; j <= length; j++) {
            uint32_t best = diagonal + (moer_fold(a[i]) != moer_fold(b[j - 1]));
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    for (j = 0; j <= length; j++)
        if (row[j] * 4 + length - j < least) least = row[j] * 4 + length - j;
    return least;
}

static moe_route_status moer_preset_unknown(moe_route_context *context, const char *model_type) {
    const uint32_t num_presets = (uint32_t)(sizeof moer_presets / sizeof moer_presets[0]);
    char shown[MOER_NAME_MAX + 1];
    uint32_t best[3] = {0, 0, 0}, distance[3] = {~0u, ~0u, ~0u}, i, j;
    for (i = 0; i < MOER_NAME_MAX && model_type[i] != 0; i++) shown[i] = (char)(model_type[i] >= ' ' && model_type[i] <= '~' ? model_type[i] : '?');
    shown[i] = 0;
    for (i = 0; i < sizeof moer_models_beyond / sizeof moer_models_beyond[0]; i++)
        if (strcmp(model_type, moer_models_beyond[i].model_type) == 0)
            return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "preset: %s has no router that could be described: %s", shown, moer_models_beyond[i].reason);
    for (i = 0; i < num_presets; i++) {
        const uint32_t d = moer_edit_distance(shown, moer_presets[i].model_type);
        uint32_t place = 3;
        while (place > 0 && d < distance[place - 1]) place--;
        for (j = 2; j > place; j--) {
            distance[j] = distance[j - 1];
            best[j] = best[j - 1];
        }
        if (place < 3) {
            distance[place] = d;
            best[place] = i;
        }
    }
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: model_type is \"%s\", which is unknown; the most similar are %s, %s and %s", shown, moer_presets[best[0]].model_type,
                     moer_presets[best[1]].model_type, moer_presets[best[2]].model_type);
}

/* ---- the numbers ---- */

static moe_route_status moer_preset_missing(moe_route_context *context, const char *type, const char *field, const char *keys) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: %s is 0; %s needs it (%s in config.json)", field, type, keys);
}

static moe_route_status moer_preset_surplus(moe_route_context *context, const char *type, const char *field, double value, const char *allowed) {
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: %s is %g; %s has none, allowed is %s", field, value, type, allowed);
}

static moe_route_status moer_preset_check_needed(moe_route_context *context, const moe_route_model *model, const moer_program *program) {
    const char *type = model->model_type;
    if (model->num_experts == 0) return moer_preset_missing(context, type, "num_experts", "num_experts, num_local_experts, n_routed_experts or moe_num_experts");
    if (model->num_experts > MOER_MAX_EXPERTS)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: num_experts is %u; allowed is 1 to %u", (unsigned)model->num_experts, (unsigned)MOER_MAX_EXPERTS);
    if (model->top_k == 0) return moer_preset_missing(context, type, "top_k", "num_experts_per_tok, num_experts_per_token, moe_topk, moe_k or top_k_experts");
    if ((program->reads & MOER_HAS_GROUPS) && model->num_groups == 0) return moer_preset_missing(context, type, "num_groups", "n_group, num_expert_group or router_n_groups");
    if ((program->reads & (MOER_HAS_GROUPS | MOER_MAY_GROUP)) && model->num_groups > 1 && model->topk_groups == 0 && program->group_rule != MOE_ROUTE_GROUPS_QUOTA)
        return moer_preset_missing(context, type, "topk_groups", "topk_group");
    if ((program->reads & MOER_HAS_SCALE) && model->scale == 0.0f)
        return moer_preset_missing(context, type, "scale", "routed_scaling_factor, route_scale, router_scaling_factor, moe_router_scaling_factor or moe_routed_scaling_factor");
    if ((program->reads & MOER_HAS_SHARED) && model->num_shared_experts == 0) return moer_preset_missing(context, type, "num_shared_experts", "n_shared_experts");
    if (model->hash_layer && (program->reads & MOER_MAY_HASH) && model->vocab_size == 0) return moer_preset_missing(context, type, "vocab_size", "vocab_size");
    if ((model->hidden_size == 0) != (model->intermediate_size == 0))
        return moer_preset_missing(context, type, model->hidden_size == 0 ? "hidden_size" : "intermediate_size",
                                   model->hidden_size == 0 ? "hidden_size; both are 0 in a layer that only routes" : "moe_intermediate_size or intermediate_size; both are 0 in a layer that only routes");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_preset_check_surplus(moe_route_context *context, const moe_route_model *model, const moer_program *program) {
    const char *type = model->model_type;
    if (!(program->reads & (MOER_HAS_GROUPS | MOER_MAY_GROUP))) {
        if (model->num_groups > 1) return moer_preset_surplus(context, type, "num_groups", model->num_groups, "0 or 1");
        if (model->topk_groups > 1) return moer_preset_surplus(context, type, "topk_groups", model->topk_groups, "0 or 1");
    }
    if (!(program->reads & MOER_MAY_ZERO) && model->num_zero_experts != 0) return moer_preset_surplus(context, type, "num_zero_experts", model->num_zero_experts, "0");
    if (model->num_zero_experts > MOER_MAX_EXPERTS - model->num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: num_zero_experts is %u; allowed is up to %u with %u experts", (unsigned)model->num_zero_experts,
                         (unsigned)(MOER_MAX_EXPERTS - model->num_experts), (unsigned)model->num_experts);
    if (!(program->reads & MOER_HAS_SCALE) && model->scale != 0.0f && model->scale != 1.0f) return moer_preset_surplus(context, type, "scale", (double)model->scale, "0 or 1");
    if (!(program->reads & MOER_MAY_CAP) && model->softcap != 0.0f) return moer_preset_surplus(context, type, "softcap", (double)model->softcap, "0");
    if (!(program->reads & MOER_HAS_NORM_MIN) && model->norm_min != 0.0f) return moer_preset_surplus(context, type, "norm_min", (double)model->norm_min, "0");
    if (!(program->reads & MOER_MAY_HASH) && model->hash_layer) return moer_preset_surplus(context, type, "hash_layer", model->hash_layer, "0");
    if (model->norm_topk_prob < MOE_ROUTE_AUTO || model->norm_topk_prob > MOE_ROUTE_OFF)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: norm_topk_prob is %d; allowed is AUTO (0), ON (1) or OFF (2)", (int)model->norm_topk_prob);
    if ((program->norm == MOER_NORM_NEVER && model->norm_topk_prob == MOE_ROUTE_ON) || (program->norm == MOER_NORM_ALWAYS && model->norm_topk_prob == MOE_ROUTE_OFF))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: norm_topk_prob is %s; %s %s normalises its weights, allowed is AUTO (0) or %s",
                         program->norm == MOER_NORM_NEVER ? "ON (1)" : "OFF (2)", type, program->norm == MOER_NORM_NEVER ? "never" : "always", program->norm == MOER_NORM_NEVER ? "OFF (2)" : "ON (1)");
    return MOE_ROUTE_OK;
}

/* The program with the score that the model names. */
static moe_route_status moer_preset_score(moe_route_context *context, const moe_route_model *model, moer_program *program) {
    const char *usual = moer_scoring_name(program), *wanted = model->scoring_func;
    if (wanted == NULL || strcmp(wanted, usual) == 0) return MOE_ROUTE_OK;
    if ((program->reads & MOER_MAY_SIGMOID) && strcmp(wanted, "sigmoid") == 0) {
        program->score = MOE_ROUTE_SCORE_SIGMOID;
    } else if ((program->reads & MOER_MAY_SQRT_SOFTPLUS) && strcmp(wanted, "sqrtsoftplus") == 0) {
        program->score = MOE_ROUTE_SCORE_SQRT_SOFTPLUS;
    } else {
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: scoring_func is \"%.40s\"; allowed for %s is NULL%s%s%s%s", wanted, model->model_type, usual[0] != 0 ? " or " : "", usual,
                         program->reads & MOER_MAY_SIGMOID ? " or sigmoid" : "", program->reads & MOER_MAY_SQRT_SOFTPLUS ? " or sqrtsoftplus" : "");
    }
    program->weight = MOE_ROUTE_WEIGHT_SCORE;
    return MOE_ROUTE_OK;
}

/* ---- the description ---- */

static void moer_preset_fill_router(const moe_route_model *model, const moer_program *program, moe_route_layer_desc *desc) {
    moe_route_router *router = &desc->router;
    const int normalises = program->norm == MOER_NORM_ALWAYS || (program->norm == MOER_NORM_ON && model->norm_topk_prob != MOE_ROUTE_OFF) ||
                           (program->norm == MOER_NORM_OFF && model->norm_topk_prob == MOE_ROUTE_ON);
    router->num_skip_experts = (program->reads & MOER_SKIPS_LAST) ? 1 : 0;
    router->num_experts = model->num_experts + model->num_zero_experts + router->num_skip_experts;
    router->top_k = model->top_k;
    if (program->reads & MOER_HAS_SHARED) router->num_shared_experts = model->num_shared_experts;
    router->softcap = model->softcap == 0.0f && (program->reads & MOER_CAPS_30) ? 30.0f : model->softcap;
    router->score = program->score;
    if (program->reads & MOER_HAS_JITTER) router->jitter = model->jitter != 0.0f ? model->jitter : 0.01f;
    if (model->num_groups > 1) {
        router->group_rule = program->group_rule;
        router->num_groups = model->num_groups;
        router->topk_groups = program->group_rule == MOE_ROUTE_GROUPS_QUOTA ? 0 : model->topk_groups;
        router->dropped = program->dropped;
    }
    router->weight = program->weight;
    /* A softmax over the selected has the sum 1 already. */
    if (normalises && program->weight != MOE_ROUTE_WEIGHT_SOFTMAX_SELECTED) {
        router->renormalize = program->renormalize;
        router->renormalize_epsilon = (program->reads & MOER_HAS_NORM_MIN) && model->norm_min != 0.0f ? model->norm_min : program->epsilon;
    }
    if (program->reads & MOER_HAS_SCALE) router->scale = model->scale;
    desc->needs = program->needs;
    if (model->hash_layer) {
        router->ids = MOE_ROUTE_IDS_TABLE;
        router->id_table_rows = model->vocab_size;
        desc->needs = MOE_ROUTE_NEED_ID_TABLE;
    }
}

static void moer_preset_fill_experts(const moe_route_model *model, const moer_experts_kind *kind, moe_route_layer_desc *desc) {
    moe_route_experts *experts = &desc->experts;
    desc->needs |= kind->needs;
    experts->num_identity_experts = model->num_zero_experts;
    if (kind->needs & MOE_ROUTE_NEED_OTHER_EXPERTS) return;
    experts->hidden_size = model->hidden_size;
    experts->intermediate_size = model->intermediate_size;
    experts->gate_up_order = kind->order;
    experts->activation = kind->activation;
    experts->activation_alpha = kind->alpha;
    experts->up_offset = kind->up_offset;
    experts->clamp = kind->clamps && model->swiglu_limit != 0.0f ? model->swiglu_limit : kind->clamp;
    if (experts->clamp != 0.0f) experts->clamp_position = kind->clamp_position;
    experts->weight_on_input = kind->weight_on_input;
}

MOE_ROUTE_API moe_route_status moe_route_preset(moe_route_context *context, const moe_route_model *model, moe_route_layer_desc *desc) {
    const moer_preset *preset = NULL;
    moer_program program;
    moe_route_status status;
    size_t i;
    if (desc != NULL) memset(desc, 0, sizeof *desc);
    if (context == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    if (model == NULL || desc == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_preset: %s is NULL", model == NULL ? "model" : "desc");
    if (model->model_type == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "preset: model_type is NULL; a name such as \"qwen3_moe\" is needed");
    for (i = 0; i < sizeof moer_presets / sizeof moer_presets[0] && preset == NULL; i++)
        if (strcmp(moer_presets[i].model_type, model->model_type) == 0) preset = &moer_presets[i];
    if (preset == NULL) return moer_preset_unknown(context, model->model_type);
    program = moer_programs[preset->program];
    status = moer_preset_check_needed(context, model, &program);
    if (status == MOE_ROUTE_OK) status = moer_preset_check_surplus(context, model, &program);
    if (status == MOE_ROUTE_OK) status = moer_preset_score(context, model, &program);
    if (status == MOE_ROUTE_OK && !moer_experts_kinds[preset->experts].clamps && model->swiglu_limit != 0.0f)
        status = moer_preset_surplus(context, model->model_type, "swiglu_limit", (double)model->swiglu_limit, "0");
    if (status != MOE_ROUTE_OK) return status;
    moer_preset_fill_router(model, &program, desc);
    moer_preset_fill_experts(model, &moer_experts_kinds[preset->experts], desc);
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API const char *moe_route_preset_name(uint32_t index) {
    return index < sizeof moer_presets / sizeof moer_presets[0] ? moer_presets[index].model_type : NULL;
}

/* ---- what a layer of a known model can't do without ---- */

static moe_route_status moer_check_need(moe_route_context *context, const moe_route_layer_desc *desc, uint32_t need, const char *field, moe_route_address address) {
    if (!(desc->needs & need) || address != 0) return MOE_ROUTE_OK;
    return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: %s is 0; the model has one (needs holds %u: clear it to do without)", field, (unsigned)need);
}

static moe_route_status moer_check_needs(moe_route_context *context, const moe_route_layer_desc *desc) {
    const int has_gate_up = desc->experts.gate_up.format != MOE_ROUTE_FORMAT_NONE, has_down = desc->experts.down.format != MOE_ROUTE_FORMAT_NONE;
    moe_route_status status = moer_check_need(context, desc, MOE_ROUTE_NEED_SELECTION_BIAS, "router.selection_bias", desc->router.selection_bias);
    if (status == MOE_ROUTE_OK) status = moer_check_need(context, desc, MOE_ROUTE_NEED_LOGIT_BIAS, "router.logit_bias", desc->router.logit_bias);
    if (status == MOE_ROUTE_OK) status = moer_check_need(context, desc, MOE_ROUTE_NEED_EXPERT_SCALE, "router.expert_scale", desc->router.expert_scale);
    if (status == MOE_ROUTE_OK) status = moer_check_need(context, desc, MOE_ROUTE_NEED_ID_TABLE, "router.id_table", desc->router.id_table);
    if (status == MOE_ROUTE_OK && has_gate_up) status = moer_check_need(context, desc, MOE_ROUTE_NEED_GATE_UP_BIAS, "experts.gate_up.bias", desc->experts.gate_up.bias);
    if (status == MOE_ROUTE_OK && has_down) status = moer_check_need(context, desc, MOE_ROUTE_NEED_DOWN_BIAS, "experts.down.bias", desc->experts.down.bias);
    if (status != MOE_ROUTE_OK) return status;
    if ((desc->needs & MOE_ROUTE_NEED_OTHER_EXPERTS) && (has_gate_up || has_down))
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "layer: experts.%s.format is %d; the model's experts compute something else than this library's (needs holds %u), its layer may only route",
                         has_gate_up ? "gate_up" : "down", (int)(has_gate_up ? desc->experts.gate_up.format : desc->experts.down.format), (unsigned)MOE_ROUTE_NEED_OTHER_EXPERTS);
    return MOE_ROUTE_OK;
}

/* ---- src/layer.c ---- */
/*
  layer.c: a layer's life: its description is checked and completed, the variants it needs are made, its workspace is laid
  out. The router's description belongs to router.c, what an operation launches to sequence.c, the operations' own arguments
  to operations.c.
*/

/* ---- checking a description ---- */

/* Checks what `matrix` takes over from `from` beside its data, and completes it. */
static moe_route_status moer_layer_check_scales(moe_route_layer *layer, const moe_route_weights *from, const char *name, moer_matrix *matrix) {
    moe_route_context *context = layer->context;
    const int addresses = context->device != MOE_ROUTE_DEVICE_COMPILE;
    const moe_route_format format = from->format;
    const int integers = format == MOE_ROUTE_FORMAT_INT8 || format == MOE_ROUTE_FORMAT_INT4, fp8 = format == MOE_ROUTE_FORMAT_FP8;
    const uint32_t size = from->group_size;
    if (!moer_has_scales(format)) {
        if (from->scales != 0 || size != 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s has scales or a group_size; its format has none", name);
    } else if (integers || fp8) {
        const moe_route_dtype dtype = moer_dtype_or(from->scales_dtype, fp8 ? MOE_ROUTE_F32 : MOE_ROUTE_F16);
        if (dtype == MOE_ROUTE_DTYPE_DEFAULT)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales_dtype is %d; allowed is F32 (1), F16 (2) or BF16 (3)", name, (int)from->scales_dtype);
        matrix->scales_kind = (moer_scales)dtype;
        if (integers && size != 0 && size != 16 && size != 32 && size != 64 && size != 128)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_size is %u; allowed is 0 (a scale a row), 16, 32, 64 or 128", name, (unsigned)size);
        if (fp8 && size != 0 && size != 128)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_size is %u; allowed with FP8 is 0 (a scale a row) or 128", name, (unsigned)size);
        matrix->group_size = size;
    } else {
        matrix->group_size = format == MOE_ROUTE_FORMAT_MXFP4 ? 32 : 16;
        matrix->scales_kind = format == MOE_ROUTE_FORMAT_MXFP4 ? MOER_SCALES_E8M0 : MOER_SCALES_E4M3;
        if (size != 0 && size != matrix->group_size)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_size is %u; this format's is %u, or 0 for that", name, (unsigned)size, (unsigned)matrix->group_size);
        if (from->scales_dtype != MOE_ROUTE_DTYPE_DEFAULT)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales_dtype is %d; this format's scales are bytes, allowed is 0", name, (int)from->scales_dtype);
    }
    if (matrix->group_size != 0) matrix->num_groups = (matrix->inner - 1) / matrix->group_size + 1;

    if (from->group_rows > 1) matrix->group_rows = from->group_rows;
    if (matrix->group_rows != 1 && !(fp8 && size == 128 && matrix->group_rows == 128))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.group_rows is %u; allowed is 0 or 1, or 128 with FP8 and a group_size of 128", name, (unsigned)from->group_rows);
    if (from->codes < MOE_ROUTE_CODES_DEFAULT || from->codes > MOE_ROUTE_CODES_SIGNED || (from->codes != MOE_ROUTE_CODES_DEFAULT && !integers))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.codes is %d; allowed is DEFAULT (0), or with INT8 and INT4 also UNSIGNED (1) or SIGNED (2)", name, (int)from->codes);
    matrix->signed_codes = integers && (from->codes == MOE_ROUTE_CODES_SIGNED || (from->codes == MOE_ROUTE_CODES_DEFAULT && format == MOE_ROUTE_FORMAT_INT8));
    if (from->zero_points != 0 && !integers)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.zero_points is 0x%llx; its format has none, allowed is 0", name, from->zero_points);
    matrix->zero_points = from->zero_points;

    if (moer_has_scales(format)) {
        const unsigned scale_size = (unsigned)moer_scale_size(matrix->scales_kind);
        matrix->scales = from->scales;
        if (addresses && from->scales == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales is 0; this format needs scales", name);
        if (from->scales % scale_size != 0)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.scales is 0x%llx; allowed is a multiple of %u", name, from->scales, scale_size);
    }

    if (from->global_scales_shape < MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT || from->global_scales_shape > MOE_ROUTE_GLOBAL_SCALES_PER_PART ||
        (from->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_PART && (matrix != &layer->gate_up || !layer->gated)))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.global_scales_shape is %d; allowed is PER_EXPERT (0), PER_TENSOR (1) or, with gate_up and a gate, PER_PART (2)", name,
                         (int)from->global_scales_shape);
    if (from->global_scales == 0) return MOE_ROUTE_OK;
    if (format != MOE_ROUTE_FORMAT_NVFP4)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.global_scales is 0x%llx; its format has none, allowed is 0", name, from->global_scales);
    if (from->global_scales % 4 != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.global_scales is 0x%llx; allowed is a multiple of 4", name, from->global_scales);
    matrix->global_scales = from->global_scales;
    matrix->global = from->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_TENSOR   ? MOER_GLOBAL_PER_TENSOR
                     : from->global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_EXPERT ? MOER_GLOBAL_PER_EXPERT
                     : layer->interleaved                                              ? MOER_GLOBAL_INTERLEAVED
                                                                                       : MOER_GLOBAL_PER_HALF;
    return MOE_ROUTE_OK;
}

static moe_route_status moer_layer_check_matrix(moe_route_layer *layer, const moe_route_weights *from, const char *name, uint32_t rows, uint32_t inner, moer_matrix *matrix) {
    moe_route_context *context = layer->context;
    const int addresses = context->device != MOE_ROUTE_DEVICE_COMPILE; /* nothing to point at when only compiling */
    const moer_block block = moer_format_block(from->format);
    const unsigned alignment = moer_is_quantized(from->format) ? 1 : block.bytes;
    moe_route_status status;
    memset(matrix, 0, sizeof *matrix);
    if (from->format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (block.values == 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.format is %d; allowed are the values of moe_route_format", name, (int)from->format);
    matrix->format = from->format;
    matrix->rows = rows;
    matrix->inner = inner;
    matrix->num_groups = matrix->group_rows = 1;
    matrix->scales_kind = MOER_SCALES_F16;
    matrix->data = from->data;
    matrix->bias = from->bias;
    if (addresses && from->data == 0) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.data is 0; the weights' address is needed", name);
    if (from->data % alignment != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.data is 0x%llx; allowed is a multiple of %u", name, from->data, alignment);
    if (inner % block.values != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s has rows of %u inputs; its format needs a multiple of %u", name, (unsigned)inner, (unsigned)block.values);
    status = moer_layer_check_scales(layer, from, name, matrix);
    if (status != MOE_ROUTE_OK) return status;
    if (from->bias != 0) {
        matrix->bias_dtype = moer_dtype_or(from->bias_dtype, layer->dtype);
        if (matrix->bias_dtype == MOE_ROUTE_DTYPE_DEFAULT)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.bias_dtype is %d; allowed is F32 (1), F16 (2) or BF16 (3)", name, (int)from->bias_dtype);
        if (from->bias % moer_dtype_size(matrix->bias_dtype) != 0)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.bias is 0x%llx; allowed is a multiple of %u", name, from->bias, (unsigned)moer_dtype_size(matrix->bias_dtype));
    }
    return MOE_ROUTE_OK;
}

/* Gate and up as two matrices go through one kernel: they may differ in nothing that it is compiled for. */
static moe_route_status moer_layer_check_up(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    const moer_matrix *gate = &layer->gate_up, *up = &layer->up;
    moe_route_status status;
    if (experts->up.format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (experts->gate_up_order != MOE_ROUTE_GATE_UP_HALVES) return moer_refuse(context, "experts.gate_up_order", (unsigned long long)experts->gate_up_order, "0 where experts.up is given");
    if (experts->up.format != experts->gate_up.format) return moer_refuse(context, "experts.up.format", (unsigned long long)experts->up.format, "that of experts.gate_up, or NONE (0)");
    if (experts->gate_up.global_scales_shape == MOE_ROUTE_GLOBAL_SCALES_PER_PART)
        return moer_refuse(context, "experts.gate_up.global_scales_shape", MOE_ROUTE_GLOBAL_SCALES_PER_PART, "PER_EXPERT (0) or PER_TENSOR (1) where experts.up is given");
    status = moer_layer_check_matrix(layer, &experts->up, "up", gate->rows, gate->inner, &layer->up);
    if (status != MOE_ROUTE_OK) return status;
    if (up->group_size != gate->group_size || up->group_rows != gate->group_rows) return moer_refuse(context, "experts.up.group_size", up->group_size, "as in experts.gate_up, and so is group_rows");
    if (up->scales_kind != gate->scales_kind) return moer_refuse(context, "experts.up.scales_dtype", (unsigned long long)up->scales_kind, "that of experts.gate_up");
    if (up->signed_codes != gate->signed_codes) return moer_refuse(context, "experts.up.codes", (unsigned long long)experts->up.codes, "that of experts.gate_up");
    if ((up->zero_points != 0) != (gate->zero_points != 0)) return moer_refuse(context, "experts.up.zero_points", up->zero_points, "given where those of experts.gate_up are, and 0 otherwise");
    if (up->global != gate->global) return moer_refuse(context, "experts.up.global_scales", up->global_scales, "given as those of experts.gate_up are");
    if (up->bias_dtype != gate->bias_dtype) return moer_refuse(context, "experts.up.bias", up->bias, "given as that of experts.gate_up is, in the same dtype");
    return MOE_ROUTE_OK;
}

static moe_route_status moer_layer_check_activation(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    if (experts->gate_up_order < MOE_ROUTE_GATE_UP_HALVES || experts->gate_up_order > MOE_ROUTE_GATE_UP_NO_GATE)
        return moer_refuse(context, "experts.gate_up_order", (unsigned long long)experts->gate_up_order, "HALVES (0), INTERLEAVED (1) or NO_GATE (2)");
    if (experts->activation < MOE_ROUTE_ACTIVATION_SILU || experts->activation > MOE_ROUTE_ACTIVATION_SITU)
        return moer_refuse(context, "experts.activation", (unsigned long long)experts->activation, "SILU (0), GELU_TANH (1), GELU_ERF (2), RELU2 (3) or SITU (4)");
    if (!moer_is_finite(experts->activation_alpha) || (experts->activation_alpha != 0.0f && experts->activation != MOE_ROUTE_ACTIVATION_SILU))
        return moer_refuse_number(context, "experts.activation_alpha", experts->activation_alpha, "a finite number with SILU, 0 with others");
    layer->gated = experts->gate_up_order != MOE_ROUTE_GATE_UP_NO_GATE;
    layer->interleaved = experts->gate_up_order == MOE_ROUTE_GATE_UP_INTERLEAVED;
    layer->activation = experts->activation;
    if (!moer_is_positive(experts->situ_beta) || (experts->situ_beta != 0.0f && experts->activation != MOE_ROUTE_ACTIVATION_SITU))
        return moer_refuse_number(context, "experts.situ_beta", experts->situ_beta, "0 or a positive number with SITU, 0 with others");
    if (!moer_is_positive(experts->situ_up_beta) || (experts->situ_up_beta != 0.0f && (experts->activation != MOE_ROUTE_ACTIVATION_SITU || !layer->gated)))
        return moer_refuse_number(context, "experts.situ_up_beta", experts->situ_up_beta, "0 or a positive number with SITU and a gate, 0 with others");
    layer->alpha = experts->activation == MOE_ROUTE_ACTIVATION_SITU ? experts->situ_beta : experts->activation_alpha;
    if (layer->alpha == 0.0f) layer->alpha = 1.0f;
    layer->up_beta = experts->situ_up_beta;
    if (!moer_is_finite(experts->up_offset) || (experts->up_offset != 0.0f && !layer->gated))
        return moer_refuse_number(context, "experts.up_offset", experts->up_offset, "a finite number, 0 without gate");
    if (!moer_is_positive(experts->clamp)) return moer_refuse_number(context, "experts.clamp", experts->clamp, "0 (none) or a positive number");
    if ((experts->clamp_position != MOE_ROUTE_CLAMP_BEFORE && experts->clamp_position != MOE_ROUTE_CLAMP_AFTER) ||
        (experts->clamp_position != MOE_ROUTE_CLAMP_BEFORE && experts->clamp == 0.0f))
        return moer_refuse(context, "experts.clamp_position", (unsigned long long)experts->clamp_position, "BEFORE (0), or AFTER (1) with a clamp");
    layer->up_offset = experts->up_offset;
    layer->clamp = experts->clamp;
    layer->clamp_kind = experts->clamp == 0.0f ? MOER_CLAMP_NONE : experts->clamp_position == MOE_ROUTE_CLAMP_BEFORE ? MOER_CLAMP_BEFORE : MOER_CLAMP_AFTER;
    layer->weight_on_input = experts->weight_on_input != 0;
    return MOE_ROUTE_OK;
}

static moe_route_status moer_layer_check_experts(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    moe_route_status status;
    layer->dtype = moer_dtype_or(experts->dtype, MOE_ROUTE_BF16);
    if (layer->dtype == MOE_ROUTE_DTYPE_DEFAULT)
        return moer_refuse(context, "experts.dtype", (unsigned long long)experts->dtype, "F32 (1), F16 (2) or BF16 (3)");
    if (experts->hidden_size > MOER_MAX_SIZE) return moer_refuse(context, "experts.hidden_size", experts->hidden_size, "1 to 65536, or 0 without experts");
    layer->hidden_size = experts->hidden_size;
    status = moer_layer_check_activation(layer, experts);
    if (status != MOE_ROUTE_OK) return status;
    if (experts->gate_up.format == MOE_ROUTE_FORMAT_NONE && experts->down.format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (experts->hidden_size == 0) return moer_refuse(context, "experts.hidden_size", experts->hidden_size, "1 to 65536 with expert weights");
    if (experts->intermediate_size < 1 || experts->intermediate_size > MOER_MAX_SIZE)
        return moer_refuse(context, "experts.intermediate_size", experts->intermediate_size, "1 to 65536 with expert weights");
    layer->intermediate_size = experts->intermediate_size;
    status = moer_layer_check_matrix(layer, &experts->gate_up, "gate_up", experts->intermediate_size * (layer->gated && experts->up.format == MOE_ROUTE_FORMAT_NONE ? 2 : 1), experts->hidden_size, &layer->gate_up);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_up(layer, experts);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_matrix(layer, &experts->down, "down", experts->hidden_size, experts->intermediate_size, &layer->down);
    return status;
}

/* Whether tile.h multiplies on tensor cores. */
static int moer_uses_tensor_cores(const moe_route_layer *layer, const moer_matrix *matrix) {
    if (layer->dtype == MOE_ROUTE_F32) return 0;
    return moer_is_quantized(matrix->format) || (layer->dtype == MOE_ROUTE_F16 && matrix->format == MOE_ROUTE_FORMAT_F16) ||
           (layer->dtype == MOE_ROUTE_BF16 && matrix->format == MOE_ROUTE_FORMAT_BF16);
}

/* The ranges of physical experts that the ranks hold. */
static moe_route_status moer_layer_check_ranks(moe_route_layer *layer, const moe_route_experts *experts) {
    moe_route_context *context = layer->context;
    const uint32_t num_experts = layer->router.num_physical_experts;
    uint32_t rank, begin = 0;
    if (experts->num_ranks > MOER_MAX_RANKS) return moer_refuse(context, "experts.num_ranks", experts->num_ranks, "1 to 256, or 0 without ranks");
    if (experts->num_ranks == 0 && experts->rank_experts != NULL) return moer_refuse(context, "experts.num_ranks", 0, "1 to 256 where rank_experts is given");
    layer->num_ranks = experts->num_ranks;
    for (rank = 0; rank < experts->num_ranks; rank++) {
        uint32_t first, count;
        moe_route_rank_range(num_experts, experts->num_ranks, rank, &first, &count);
        if (experts->rank_experts != NULL) count = experts->rank_experts[rank];
        if (count > num_experts - begin)
            return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.rank_experts[%u] is %u; the ranks before hold %u of %u experts", (unsigned)rank, (unsigned)count, (unsigned)begin,
                             (unsigned)num_experts);
        layer->rank_begin[rank] = (uint16_t)begin;
        begin += count;
    }
    layer->rank_begin[rank] = (uint16_t)begin;
    if (rank != 0 && begin != num_experts)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.rank_experts adds up to %u; allowed is the number of physical experts, %u", (unsigned)begin, (unsigned)num_experts);
    return MOE_ROUTE_OK;
}

/* Whether more than MOER_SMALL_PAIRS pairs may come. */
static int moer_layer_is_large(const moe_route_layer *layer) { return layer->max_tokens * layer->router.top_k > MOER_SMALL_PAIRS; }

/* Weights whose format was forgotten would make a layer that can only route, and the first call would tell so. */
static moe_route_status moer_layer_check_forgotten(moe_route_layer *layer, const moe_route_weights *weights, const char *name) {
    if (weights->format != MOE_ROUTE_FORMAT_NONE || weights->data == 0) return MOE_ROUTE_OK;
    return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.format is 0 (NONE), but its data are given; allowed are the values of moe_route_format, or no data", name);
}

static moe_route_status moer_layer_check_operations(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    moe_route_context *context = layer->context;
    const uint32_t all = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_MAPS |
                         MOE_ROUTE_OPERATION_MATMUL | MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | MOE_ROUTE_OPERATION_DISPATCH |
                         MOE_ROUTE_OPERATION_EXPERT_ROWS;
    const int has_gate_up = layer->gate_up.format != MOE_ROUTE_FORMAT_NONE, has_down = layer->down.format != MOE_ROUTE_FORMAT_NONE;
    uint32_t operations = desc->operations;
    moe_route_status status;
    if (operations & ~all) return moer_refuse(context, "operations", operations, "an or of moe_route_operation values");
    if (operations == 0) {
        status = moer_layer_check_forgotten(layer, &desc->experts.gate_up, "gate_up");
        if (status == MOE_ROUTE_OK) status = moer_layer_check_forgotten(layer, &desc->experts.up, "up");
        if (status == MOE_ROUTE_OK) status = moer_layer_check_forgotten(layer, &desc->experts.down, "down");
        operations = has_gate_up && has_down ? MOE_ROUTE_OPERATION_LAYER : has_gate_up || has_down ? MOE_ROUTE_OPERATION_MATMUL : MOE_ROUTE_OPERATION_ROUTE;
        if (status != MOE_ROUTE_OK) return status;
    }
    if ((operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_EXPERT_ROWS)) && !(has_gate_up && has_down))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.%s.format is 0 (NONE); operations LAYER, EXPERTS and EXPERT_ROWS need both matrices", has_gate_up ? "down" : "gate_up");
    if ((operations & MOE_ROUTE_OPERATION_MATMUL) && !has_gate_up && !has_down)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: experts.gate_up.format and experts.down.format are 0 (NONE); operation MATMUL needs one of them");
    if ((operations & MOE_ROUTE_OPERATION_MATMUL) && layer->up.format != MOE_ROUTE_FORMAT_NONE)
        return moer_refuse(context, "experts.up.format", (unsigned long long)layer->up.format, "NONE (0) with operation MATMUL, which multiplies one matrix");
    if ((operations & (MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | MOE_ROUTE_OPERATION_DISPATCH)) && layer->hidden_size == 0)
        return moer_refuse(context, "experts.hidden_size", 0, "1 to 65536 for operations EXPAND, COMBINE and DISPATCH");
    if ((operations & MOE_ROUTE_OPERATION_DISPATCH) && layer->num_ranks == 0) return moer_refuse(context, "experts.num_ranks", 0, "1 to 256 for operation DISPATCH");
    if (layer->router.given_physical && (operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_ROUTE | MOE_ROUTE_OPERATION_DISPATCH)))
        return moer_refuse(context, "experts.num_physical_experts", desc->experts.num_physical_experts, "0 with operations LAYER, ROUTE and DISPATCH where experts.expert_map isn't given");
    layer->operations = operations;
    layer->max_tokens = desc->max_tokens != 0 ? desc->max_tokens : 16;
    if (layer->max_tokens > MOER_MAX_TOKENS) return moer_refuse(context, "max_tokens", desc->max_tokens, "1 to 1048576, or 0 for 16");
    if (desc->sums_of_max_tokens > MOER_MAX_TOKENS) return moer_refuse(context, "sums_of_max_tokens", desc->sums_of_max_tokens, "1 to 1048576, or 0 for max_tokens");
    layer->rows_dtype = moer_dtype_or(desc->rows_dtype, layer->dtype);
    if (layer->rows_dtype == MOE_ROUTE_DTYPE_DEFAULT) return moer_refuse(context, "rows_dtype", (unsigned long long)desc->rows_dtype, "F32 (1), F16 (2) or BF16 (3)");
    if (desc->dependent_launch < MOE_ROUTE_AUTO || desc->dependent_launch > MOE_ROUTE_OFF)
        return moer_refuse(context, "dependent_launch", (unsigned long long)desc->dependent_launch, "AUTO (0), ON (1) or OFF (2)");
    if (desc->fused_combine < MOE_ROUTE_AUTO || desc->fused_combine > MOE_ROUTE_OFF)
        return moer_refuse(context, "fused_combine", (unsigned long long)desc->fused_combine, "AUTO (0), ON (1) or OFF (2)");
    if (desc->cub_maps < MOE_ROUTE_AUTO || desc->cub_maps > MOE_ROUTE_OFF) return moer_refuse(context, "cub_maps", (unsigned long long)desc->cub_maps, "AUTO (0), ON (1) or OFF (2)");
    if (desc->dependent_launch == MOE_ROUTE_ON && context->device != MOE_ROUTE_DEVICE_CPU && context->target < 90)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "layer: dependent_launch is ON; sm_%u has none, allowed is AUTO or OFF", (unsigned)context->target);
    if (desc->fused_combine == MOE_ROUTE_ON && moer_layer_is_large(layer))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "layer: fused_combine is ON with max_tokens %u and top_k %u; allowed is max_tokens * top_k up to %u",
                         (unsigned)layer->max_tokens, (unsigned)layer->router.top_k, (unsigned)MOER_SMALL_PAIRS);
    layer->dependent = desc->dependent_launch != MOE_ROUTE_OFF && context->target >= 90;
    layer->fused_combine = desc->fused_combine != MOE_ROUTE_OFF;
    layer->cub_maps = desc->cub_maps == MOE_ROUTE_ON && layer->router.num_local_experts <= MOER_MAX_CUB_EXPERTS;
    layer->grouped = has_gate_up && has_down && moer_uses_tensor_cores(layer, &layer->gate_up) && moer_uses_tensor_cores(layer, &layer->down);
    return MOE_ROUTE_OK;
}

/* ---- the variants ---- */

/* Notes a variant down: all that the layer needs are made together, and then `variant` points to it. */
static moe_route_status moer_layer_need(moe_route_layer *layer, const moer_family *family, const char *defines, const moer_variant **variant) {
    return moer_wanted_add(layer->context, layer->wanted, family, defines, variant);
}

/* route.cu; `maps` is 1 for what the layer needs, 2 for all outputs. */
static moe_route_status moer_layer_need_route(moe_route_layer *layer, int select, int maps, const moer_variant **variant) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "SELECT", (unsigned long)select);
    moer_define(defines, "E", layer->router.num_experts);
    moer_define(defines, "K", layer->router.top_k);
    if (select) moer_define_router(defines, &layer->router);
    moer_define(defines, "MAPS", (unsigned long)maps);
    moer_define_placement(defines, &layer->router);
    moer_define(defines, "MAX_PAIRS", layer->max_pairs_small);
    return moer_layer_need(layer, &moer_family_route, defines, variant);
}

static moe_route_status moer_layer_need_topk(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "E", layer->router.num_experts);
    moer_define(defines, "K", layer->router.top_k);
    moer_define_router(defines, &layer->router);
    return moer_layer_need(layer, &moer_family_topk, defines, &layer->topk);
}

/* Whether the maps of so many pairs are sorted by maps_cub.cu: none that are one launch otherwise. */
static int moer_layer_sorts_by_cub(const moe_route_layer *layer, uint32_t num_pairs) {
    return layer->cub_maps && num_pairs > MOER_SORT_PAIRS;
}

/* Threads of its blocks: shared memory, 48 KB, holds a counter for each warp and digit, digits being a power of two above the local experts.
   1024 threads would have too few registers each: on sm_120 they spill. */
static uint32_t moer_cub_maps_threads(const moe_route_layer *layer) { return layer->router.num_local_experts < 512 ? 512 : 256; }

static moe_route_status moer_layer_need_maps(moe_route_layer *layer) {
    const int cub = moer_layer_sorts_by_cub(layer, layer->max_tokens * layer->router.top_k);
    char defines[MOER_DEFINES_MAX] = "";
    moe_route_status status;
    moer_define(defines, "E", layer->router.num_experts);
    moer_define(defines, "K", layer->router.top_k);
    moer_define_placement(defines, &layer->router);
    status = moer_layer_need(layer, &moer_family_maps, defines, &layer->maps);
    if (status != MOE_ROUTE_OK || !cub) return status;
    moer_define(defines, "SORT_THREADS", moer_cub_maps_threads(layer));
    return moer_layer_need(layer, &moer_family_maps_cub, defines, &layer->maps_cub);
}

/* Largest power of two up to 16 that divides both. */
static unsigned moer_alignment(unsigned long long a, unsigned long long b) {
    unsigned alignment = 16;
    while (a % alignment != 0 || b % alignment != 0) alignment /= 2;
    return alignment;
}

static unsigned moer_row_alignment(uint32_t elements, moe_route_dtype dtype) {
    return moer_alignment((unsigned long long)elements * moer_dtype_size(dtype), 0);
}

/* The matrix that goes through the same loads: of two for gate and up the other one, else the matrix itself. */
static const moer_matrix *moer_layer_twin(const moe_route_layer *layer, const moer_matrix *matrix) {
    return matrix == &layer->gate_up && layer->up.format != MOE_ROUTE_FORMAT_NONE ? &layer->up : matrix;
}

/* The share of a multiprocessor's shared memory that each of some blocks may have, in KB: a block takes one itself. */
static uint32_t moer_block_kilobytes(const moe_route_layer *layer, uint32_t blocks) { return (moer_most_shared_bytes(layer->context->target) / 1024 + 1) / blocks - 1; }

/* K inputs of a warp of matmul_bulk.cu: their activations take 32 registers of a lane. Few inputs are shared by more warps. */
static uint32_t moer_bulk_inputs(const moer_matrix *matrix) { return matrix->inner <= 1024 ? 128 : 256; }

static uint32_t moer_bulk_warps(const moer_matrix *matrix) { return moer_divide_up(matrix->inner, moer_bulk_inputs(matrix)); }

/* Blocks of it that share a multiprocessor, each with two warps more: as many as leave a thread the registers it needs. */
static uint32_t moer_bulk_blocks(const moer_matrix *matrix) {
    const uint32_t blocks = (moer_bulk_inputs(matrix) == 128 ? 26 : 20) / (moer_bulk_warps(matrix) + 2);
    return blocks == 0 ? 1 : blocks;
}

/* About what a tile takes there, with `padding` bytes between its rows. */
static size_t moer_bulk_stage(const moer_matrix *matrix, uint32_t padding) {
    return 16 * (moer_row_bytes(matrix) + padding + moer_scale_row_bytes(matrix)) + 128 + (size_t)moer_bulk_warps(matrix) * 512;
}

/* Their shared memory. Three or four tiles under way are enough, and L1, which gets the rest, is what a kernel that follows loads through. */
static uint32_t moer_bulk_shared(const moe_route_layer *layer, const moer_matrix *matrix) {
    const uint32_t blocks = moer_bulk_blocks(matrix), share = moer_block_kilobytes(layer, blocks), three = (uint32_t)(3 * moer_bulk_stage(matrix, 64) / 1024 + 1);
    const uint32_t enough = 134 / blocks > three ? 134 / blocks : three;
    return 1024 * (share < enough ? share : enough);
}

/* Whether tiles of the matrix are what matmul_bulk.cu can copy, and two fit, as far as its shape says: where it lies decides no sum. */
static int moer_matrix_has_bulk_tiles(const moe_route_layer *layer, const moer_matrix *matrix) {
    const size_t row_bytes = moer_row_bytes(matrix), scale_bytes = moer_scale_row_bytes(matrix);
    if (layer->context->target < 90 || !moer_uses_tensor_cores(layer, matrix) || !moer_is_quantized(matrix->format)) return 0;
    if (row_bytes % (matrix->format > MOE_ROUTE_FORMAT_GGUF ? 2 : 16) != 0) return 0;
    if (matrix->zero_points != 0 || matrix->group_rows != 1 || matrix->global > 2 || scale_bytes % 2 != 0 || matrix->rows % 16 != 0 || matrix->inner > 4096) return 0;
    return 2 * moer_bulk_stage(matrix, 144) + 128 <= moer_bulk_shared(layer, matrix);
}

static int moer_matmul_is_bulk(const moe_route_layer *layer, const moer_matrix *matrix) {
    const moer_matrix *other = moer_layer_twin(layer, matrix);
    return moer_matrix_has_bulk_tiles(layer, matrix) && (matrix->data | other->data) % 16 == 0 && (matrix->scales | other->scales) % 16 == 0;
}

/* Warps that share the steps of a row, which is how a sum is cut into parts: those of matmul_bulk.cu. Otherwise a power of two: as few as can hold the
   activations of their steps in registers (stream.h), since a tile costs each of them something beside its steps; or as many as a block may have. */
static uint32_t moer_layer_matmul_warps(const moe_route_layer *layer, const moer_matrix *matrix) {
    const uint32_t steps = moer_tile_steps(matrix), words = moer_tile_step(matrix) / 8; /* of a lane, a step */
    const uint32_t most = 48;
    uint32_t warps = 1;
    if (moer_matrix_has_bulk_tiles(layer, matrix)) return moer_bulk_warps(matrix);
    while (warps < 8 && moer_divide_up(steps, warps) * words > most) warps *= 2;
    return warps;
}

/* Blocks of matmul.cu that share a multiprocessor: with 16 warps there, each has 128 registers. */
static uint32_t moer_matmul_blocks(uint32_t warps) { return warps > 8 ? 1 : 16 / warps; }

/* The order in which tile.h multiplies pairs of a matrix's inputs: 0 is that of memory; packed.h and gguf.h say why. */
static unsigned long moer_pair_order(const moer_matrix *matrix) {
    if (matrix->format > MOE_ROUTE_FORMAT_GGUF) return 1;
    if (matrix->format != MOE_ROUTE_FORMAT_INT4 && matrix->format != MOE_ROUTE_FORMAT_MXFP4 && matrix->format != MOE_ROUTE_FORMAT_NVFP4) return 0;
    return matrix->group_size == 16 ? 1 : 2;
}

/* That of h, which goes from one kernel of ours to another: that of the down matmul, which then needn't rearrange it. */
static unsigned long moer_h_order(const moe_route_layer *layer) {
    return moer_uses_tensor_cores(layer, &layer->down) && layer->intermediate_size % 8 == 0 ? moer_pair_order(&layer->down) : 0;
}

static void moer_define_tile(char *defines, const moe_route_layer *layer, const moer_matrix *matrix) {
    const moer_matrix *other = moer_layer_twin(layer, matrix);
    moer_define(defines, "FORMAT", matrix->format);
    moer_define(defines, "X", layer->dtype);
    moer_define(defines, "ROWS", matrix->rows);
    moer_define(defines, "INNER", matrix->inner);
    moer_define(defines, "GROUP", matrix->group_size);
    moer_define(defines, "GROUP_ROWS", matrix->group_rows);
    moer_define(defines, "SCALES", matrix->scales_kind);
    moer_define(defines, "SCALE_ALIGN", moer_alignment(moer_scale_row_bytes(matrix), matrix->scales | other->scales));
    moer_define(defines, "ZERO_POINTS", matrix->zero_points != 0);
    moer_define(defines, "SIGNED", (unsigned long)matrix->signed_codes);
    moer_define(defines, "GLOBAL", matrix->global);
    moer_define(defines, "BIAS", matrix->bias_dtype);
    moer_define(defines, "WEIGHT_ALIGN", moer_alignment(moer_row_bytes(matrix), matrix->data | other->data));
    moer_define(defines, "X_ALIGN", moer_row_alignment(matrix->inner, layer->dtype));
    moer_define(defines, "K", layer->router.top_k);
}

typedef struct moer_matmul_kind {
    int activated, x_index, out_index; /* activated: gate_up with what follows it up to h */
    moe_route_dtype out;
    uint32_t warps;
} moer_matmul_kind;

/* What matmul.cu and grouped.cu have in common; `weighs`: they multiply by the router's weights. */
static void moer_define_matmul(char *defines, const moe_route_layer *layer, const moer_matrix *matrix, const moer_matmul_kind *kind, int weighs) {
    moer_define_tile(defines, layer, matrix);
    moer_define(defines, "GATED", kind->activated && layer->gated);
    moer_define(defines, "INTERLEAVED", kind->activated && layer->interleaved);
    moer_define_given(defines, "UP_APART", kind->activated && layer->up.format != MOE_ROUTE_FORMAT_NONE);
    moer_define(defines, "ACTIVATION", kind->activated ? (unsigned long)layer->activation + 1 : 0);
    moer_define(defines, "CLAMP", kind->activated ? (unsigned long)layer->clamp_kind : 0);
    moer_define(defines, "WEIGHT_ON_INPUT", (unsigned long)(kind->activated && layer->weight_on_input));
    moer_define(defines, "WEIGHTS", weighs ? layer->router.weights_dtype : MOE_ROUTE_F32);
    moer_define(defines, "OUT", kind->out);
    moer_define(defines, "X_INDEX", (unsigned long)kind->x_index);
}

/* Whether the matmuls of few rows multiply codes with a zero as they are (packed.h, gguf.h): where a warp has registers for what that takes. Kernels that don't, with zero points or subs of
   16, make nothing of it. */
static int moer_uses_code_sums(const moe_route_layer *layer, const moer_matrix *matrix, int activated) {
    if (matrix->format > MOE_ROUTE_FORMAT_GGUF) return moer_matrix_has_bulk_tiles(layer, matrix) && moer_bulk_inputs(matrix) == 128;
    return matrix->format == MOE_ROUTE_FORMAT_INT4 && activated && moer_divide_up(moer_tile_steps(matrix), moer_layer_matmul_warps(layer, matrix)) <= 2;
}

/* matmul.cu for few and for many rows an expert. */
static moe_route_status moer_layer_need_matmul(moe_route_layer *layer, const moer_matrix *matrix, const moer_matmul_kind *kind, int few, int many, const moer_variant *variants[2]) {
    moe_route_status status = MOE_ROUTE_OK;
    int i;
    for (i = few ? 0 : 1; i < (many ? 2 : 1) && status == MOE_ROUTE_OK; i++) {
        const int bulk = i == 0 && moer_matmul_is_bulk(layer, matrix);
        const uint32_t blocks = bulk ? moer_bulk_blocks(matrix) : moer_matmul_blocks(kind->warps);
        char defines[MOER_DEFINES_MAX] = "";
        moer_define_matmul(defines, layer, matrix, kind, kind->activated && layer->weight_on_input);
        moer_define_given(defines, "CODE_SUMS", (unsigned long)moer_uses_code_sums(layer, matrix, kind->activated));
        moer_define(defines, "OUT_INDEX", (unsigned long)kind->out_index);
        moer_define_given(defines, "OUT_ORDER", kind->activated ? moer_h_order(layer) : 0);
        moer_define_given(defines, "X_ORDER", kind->x_index == 2 ? moer_h_order(layer) : 0);
        moer_define(defines, "WARPS", kind->warps);
        moer_define(defines, "RESIDENT_BLOCKS", blocks);
        moer_define(defines, "SHARED_BYTES", bulk ? moer_bulk_shared(layer, matrix) : MOER_MATMUL_SHARED / blocks);
        if (!bulk) moer_define(defines, "ROW_BLOCKS", i == 1 && moer_uses_tensor_cores(layer, matrix) ? kind->warps <= 8 ? 4 : 2 : 1);
        status = moer_layer_need(layer, bulk ? &moer_family_matmul_bulk : &moer_family_matmul, defines, &variants[i]);
    }
    return status;
}

/* Whether a matrix for tensor cores has weights that are multiplied as they are. */
static int moer_copies_weights(const moer_matrix *matrix) { return matrix->format <= MOE_ROUTE_FORMAT_BF16; }

/* The pairs up to which an expert has few rows on average. */
static uint32_t moer_layer_few_pairs(const moe_route_layer *layer) {
    const uint32_t rows = moer_copies_weights(&layer->gate_up) ? MOER_FEW_ROWS_PLAIN : moer_matrix_has_bulk_tiles(layer, &layer->gate_up) ? MOER_FEW_ROWS_BULK : MOER_FEW_ROWS;
    const uint32_t few = rows * layer->router.num_local_experts;
    return few < MOER_SMALL_PAIRS ? MOER_SMALL_PAIRS : few;
}

static int moer_layer_has_many_rows(const moe_route_layer *layer, uint32_t num_pairs) { return num_pairs > moer_layer_few_pairs(layer); }

static int moer_layer_has_many(const moe_route_layer *layer) { return moer_layer_has_many_rows(layer, layer->max_tokens * layer->router.top_k); }

static int moer_layer_runs_grouped(const moe_route_layer *layer, uint32_t num_pairs) { return layer->grouped && moer_layer_has_many_rows(layer, num_pairs); }

/* Whether the matrix goes through grouped_warpgroups.cu: on compute capability 9.0, where rows are copied in pieces of 16 bytes. */
static int moer_grouped_takes_warpgroups(const moe_route_layer *layer, const moer_matrix *matrix) {
    if (layer->context->target != MOER_WARPGROUPS_TARGET || matrix->inner % 8 != 0 || moer_grouped_outputs(layer, matrix) % 8 != 0) return 0;
    return !moer_copies_weights(matrix) || moer_alignment(moer_row_bytes(matrix), matrix->data | moer_layer_twin(layer, matrix)->data) == 16;
}

/* Columns of what a matrix makes: of h, or of the layer. */
static uint32_t moer_grouped_outputs(const moe_route_layer *layer, const moer_matrix *matrix) {
    return matrix == &layer->gate_up && layer->gated ? layer->intermediate_size : matrix->rows;
}

/* Tiles across the matrix: of 128 weight rows, or 256 where warpgroups multiply weights that needn't be unpacked. */
static uint32_t moer_grouped_weights(const moe_route_layer *layer, const moer_matrix *matrix) {
    return moer_copies_weights(matrix) && moer_grouped_takes_warpgroups(layer, matrix) ? 256 : 128;
}

static uint32_t moer_grouped_columns(const moe_route_layer *layer, const moer_matrix *matrix) {
    const uint32_t weights = moer_grouped_weights(layer, matrix);
    return (moer_grouped_outputs(layer, matrix) - 1) / (matrix == &layer->gate_up && layer->gated ? weights / 2 : weights) + 1;
}

/* Warps of grouped_warpgroups.cu that bring the weights. */
static uint32_t moer_grouped_producers(const moer_matrix *matrix) { return moer_copies_weights(matrix) ? 4 : 8; }

static uint32_t moer_grouped_threads(const moe_route_layer *layer, const moer_matrix *matrix) {
    return 256 + (moer_grouped_takes_warpgroups(layer, matrix) ? moer_grouped_producers(matrix) * 32 : 0);
}

static void moer_define_grouped(char *defines, const moe_route_layer *layer, const moer_matrix *matrix, uint32_t tile) {
    const uint32_t most = moer_most_shared_bytes(layer->context->target) / 1024;
    const int three = tile == 0 && matrix->format < MOE_ROUTE_FORMAT_GGUF && (moer_copies_weights(matrix) || most > 3 * 40); /* unpacked weights alone are 32 KB */
    const uint32_t blocks = three ? 3 : 2, share = moer_block_kilobytes(layer, blocks);
    const uint32_t enough = moer_copies_weights(matrix) ? share : blocks == 3 ? 54 : 64; /* codes are loaded through L1, which is to be left some */
    moer_define(defines, "TILE_ROWS", 32ul << tile);
    if (moer_grouped_takes_warpgroups(layer, matrix)) {
        moer_define(defines, "WARPGROUPS", 1);
        moer_define(defines, "TILE_WEIGHTS", moer_grouped_weights(layer, matrix));
        moer_define(defines, "PRODUCER_WARPS", moer_grouped_producers(matrix));
        moer_define(defines, "PRODUCER_REGISTERS", moer_copies_weights(matrix) ? 56 : 112);
        moer_define(defines, "SHARED_BYTES", 1024ul * most);
        return;
    }
    moer_define(defines, "RESIDENT_BLOCKS", blocks);
    moer_define(defines, "SHARED_BYTES", 1024ul * (share < enough ? share : enough));
}

static moe_route_status moer_layer_need_grouped(moe_route_layer *layer, const moer_matrix *matrix, const moer_matmul_kind *kind, const moer_variant **variants) {
    const int weighs_output = !kind->activated && !layer->weight_on_input;
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t tile;
    for (tile = 0; tile < MOER_GROUPED_TILES && status == MOE_ROUTE_OK; tile++) {
        char defines[MOER_DEFINES_MAX] = "";
        if (!moer_layer_meets_tile(layer, tile)) continue;
        moer_define_matmul(defines, layer, matrix, kind, weighs_output || (kind->activated && layer->weight_on_input));
        moer_define(defines, "WEIGHT_ON_OUTPUT", (unsigned long)weighs_output);
        moer_define_grouped(defines, layer, matrix, tile);
        status = moer_layer_need(layer, moer_grouped_takes_warpgroups(layer, matrix) ? &moer_family_grouped_warpgroups : &moer_family_grouped, defines, &variants[tile]);
    }
    return status;
}

/* The constants of epilogue.h; `weighted`: the rows have the router's weights already. */
static void moer_define_epilogue(char *defines, const moe_route_layer *layer, int weighted) {
    moer_define(defines, "WEIGHTS", layer->router.weights_dtype);
    moer_define(defines, "WEIGHT_ON_INPUT", (unsigned long)weighted);
    moer_define(defines, "FIRST_IDENTITY", layer->router.num_identity != 0 ? layer->router.first_identity : 0);
    moer_define(defines, "NUM_IDENTITY", layer->router.num_identity);
}

static moe_route_status moer_layer_need_down_fused(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define_tile(defines, layer, &layer->down);
    moer_define_epilogue(defines, layer, layer->weight_on_input);
    moer_define_given(defines, "X_ORDER", moer_h_order(layer));
    moer_define(defines, "K_SPLIT", layer->down_parts);
    moer_define(defines, "MAX_PAIRS", layer->max_pairs_small);
    return moer_layer_need(layer, &moer_family_down, defines, &layer->down_fused);
}

/* Columns that a thread of combine.cu takes: 16 bytes of output at most. */
static uint32_t moer_combine_vector(const moe_route_layer *layer) {
    uint32_t vector = layer->dtype == MOE_ROUTE_F32 ? 4 : 8;
    while (layer->hidden_size % vector != 0) vector /= 2;
    return vector;
}

static moe_route_status moer_layer_need_combine(moe_route_layer *layer, moe_route_dtype rows_dtype, int weighted, const moer_variant **variant) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "HIDDEN", layer->hidden_size);
    moer_define(defines, "K", layer->router.top_k);
    moer_define_epilogue(defines, layer, weighted);
    moer_define(defines, "ROWS_DTYPE", rows_dtype);
    moer_define(defines, "OUT", layer->dtype);
    moer_define(defines, "VECTOR", moer_combine_vector(layer));
    return moer_layer_need(layer, &moer_family_combine, defines, variant);
}

/* Bytes that a thread of expand.cu copies. */
static uint32_t moer_expand_unit(const moe_route_layer *layer) {
    const uint32_t alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    return alignment == 16 ? 16 : alignment >= 4 ? 4 : 2;
}

static moe_route_status moer_layer_need_expand(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_define(defines, "ROW_BYTES", (unsigned long)(layer->hidden_size * moer_dtype_size(layer->dtype)));
    moer_define(defines, "K", layer->router.top_k);
    moer_define(defines, "UNIT", moer_expand_unit(layer));
    return moer_layer_need(layer, &moer_family_expand, defines, &layer->expand);
}

/* Whether the layer's own kernels for many rows an expert are matmul.cu's. */
static int moer_layer_runs_many(const moe_route_layer *layer) { return moer_layer_has_many(layer) && !layer->grouped; }

/* x up to h: of the layer (`runs`), and of expert rows (`slots`), which go through matmul.cu whatever their number. */
static moe_route_status moer_layer_need_gate_up(moe_route_layer *layer, int runs, int slots) {
    const int many = slots ? moer_layer_has_many(layer) : moer_layer_runs_many(layer);
    moe_route_status status;
    moer_matmul_kind kind;
    memset(&kind, 0, sizeof kind);
    kind.activated = 1;
    kind.out = layer->dtype;
    kind.warps = moer_layer_matmul_warps(layer, &layer->gate_up);
    status = moer_layer_need_matmul(layer, &layer->gate_up, &kind, 1, many, layer->gate_up_activated);
    if (status == MOE_ROUTE_OK && runs && moer_layer_runs_grouped(layer, layer->max_tokens * layer->router.top_k))
        status = moer_layer_need_grouped(layer, &layer->gate_up, &kind, layer->gate_up_grouped);
    return status;
}

/* The down matmul with the combine. */
static moe_route_status moer_layer_need_down(moe_route_layer *layer) {
    const int many = moer_layer_runs_many(layer), separate = moer_layer_meets_fused(layer, 0) || (moer_layer_is_large(layer) && moer_layer_few_pairs(layer) > MOER_SMALL_PAIRS);
    moer_matmul_kind kind;
    moe_route_status status = MOE_ROUTE_OK;
    memset(&kind, 0, sizeof kind);
    kind.x_index = 2;
    if (moer_layer_meets_fused(layer, 1)) status = moer_layer_need_down_fused(layer);
    if (status == MOE_ROUTE_OK && moer_layer_runs_grouped(layer, layer->max_tokens * layer->router.top_k)) {
        kind.out = layer->dtype;
        status = moer_layer_need_grouped(layer, &layer->down, &kind, layer->down_grouped);
        if (status == MOE_ROUTE_OK) status = moer_layer_need_combine(layer, layer->dtype, 1, &layer->combine_grouped);
    }
    if (status != MOE_ROUTE_OK || (!separate && !many)) return status;
    kind.out = MOE_ROUTE_F32;
    kind.warps = layer->down_parts; /* the same parts of K as down.cu: the same sums, to the last bit */
    status = moer_layer_need_matmul(layer, &layer->down, &kind, separate, many, layer->down_rows);
    if (status == MOE_ROUTE_OK) status = moer_layer_need_combine(layer, MOE_ROUTE_F32, layer->weight_on_input, &layer->combine_rows);
    return status;
}

/* dispatch.cu, and dispatch_large.cu where the layer can meet as many pairs; what they copy of x is what expand.cu does. */
static moe_route_status moer_layer_need_dispatch(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moe_route_status status;
    moer_define(defines, "K", layer->router.top_k);
    moer_define(defines, "NUM_RANKS", layer->num_ranks);
    moer_define(defines, "ROW_BYTES", (unsigned long)(layer->hidden_size * moer_dtype_size(layer->dtype)));
    moer_define(defines, "UNIT", moer_expand_unit(layer));
    moer_define(defines, "WEIGHT_BYTES", (unsigned long)moer_dtype_size(layer->router.weights_dtype));
    moer_define_expert_map(defines, &layer->router);
    status = moer_layer_need(layer, &moer_family_dispatch, defines, &layer->dispatch);
    if (status == MOE_ROUTE_OK && layer->max_tokens * layer->router.top_k > MOER_DISPATCH_PAIRS) status = moer_layer_need(layer, &moer_family_dispatch_large, defines, &layer->dispatch_large);
    return status;
}

/* What follows gate_up in expert rows, with the sums of down.cu. */
static moe_route_status moer_layer_need_slots(moe_route_layer *layer) {
    char defines[MOER_DEFINES_MAX] = "";
    moer_matmul_kind kind;
    moe_route_status status;
    memset(&kind, 0, sizeof kind);
    kind.x_index = 2;
    kind.out_index = 2;
    kind.out = layer->rows_dtype;
    kind.warps = layer->down_parts;
    status = moer_layer_need_matmul(layer, &layer->down, &kind, 1, moer_layer_has_many(layer), layer->down_slots);
    if (status != MOE_ROUTE_OK) return status;
    moer_define(defines, "K", layer->router.top_k);
    moer_define_placement(defines, &layer->router);
    return moer_layer_need(layer, &moer_family_slots, defines, &layer->slots);
}

static moe_route_status moer_layer_need_plain_matmul(moe_route_layer *layer, const moer_matrix *matrix, const moer_variant *variants[2]) {
    moer_matmul_kind kind;
    if (matrix->format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    memset(&kind, 0, sizeof kind);
    kind.x_index = 1;
    kind.out_index = 1;
    kind.out = layer->dtype;
    kind.warps = moer_layer_matmul_warps(layer, matrix);
    return moer_layer_need_matmul(layer, matrix, &kind, 1, moer_layer_has_many(layer), variants);
}

static moe_route_status moer_layer_need_all(moe_route_layer *layer) {
    const uint32_t operations = layer->operations;
    const int large = moer_layer_is_large(layer);
    const int runs = (operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS)) != 0, slots = (operations & MOE_ROUTE_OPERATION_EXPERT_ROWS) != 0;
    moe_route_status status = MOE_ROUTE_OK;
    if (operations & MOE_ROUTE_OPERATION_LAYER) status = moer_layer_need_route(layer, 1, 1, &layer->route_layer);
    if (status == MOE_ROUTE_OK && (operations & (MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_MATMUL | MOE_ROUTE_OPERATION_EXPERT_ROWS))) status = moer_layer_need_route(layer, 0, 1, &layer->route_given);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_ROUTE)) status = moer_layer_need_route(layer, 1, 2, &layer->route_all);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_MAPS)) status = moer_layer_need_route(layer, 0, 2, &layer->maps_all);
    if (status == MOE_ROUTE_OK && ((operations & MOE_ROUTE_OPERATION_ROUTE) || (large && (operations & MOE_ROUTE_OPERATION_LAYER)))) status = moer_layer_need_topk(layer);
    if (status == MOE_ROUTE_OK && large && (operations & ~(uint32_t)(MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | MOE_ROUTE_OPERATION_DISPATCH))) status = moer_layer_need_maps(layer);
    if (status == MOE_ROUTE_OK && (runs || slots)) status = moer_layer_need_gate_up(layer, runs, slots);
    if (status == MOE_ROUTE_OK && runs) status = moer_layer_need_down(layer);
    if (status == MOE_ROUTE_OK && slots) status = moer_layer_need_slots(layer);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_MATMUL)) {
        status = moer_layer_need_plain_matmul(layer, &layer->gate_up, layer->matmul[MOE_ROUTE_MATRIX_GATE_UP]);
        if (status == MOE_ROUTE_OK) status = moer_layer_need_plain_matmul(layer, &layer->down, layer->matmul[MOE_ROUTE_MATRIX_DOWN]);
    }
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_EXPAND)) status = moer_layer_need_expand(layer);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_COMBINE)) status = moer_layer_need_combine(layer, layer->rows_dtype, layer->weight_on_input, &layer->combine);
    if (status == MOE_ROUTE_OK && (operations & MOE_ROUTE_OPERATION_DISPATCH)) status = moer_layer_need_dispatch(layer);
    return status;
}

/* Lists all variants that the layer needs, in layer->wanted; some of them more than once. */
static moe_route_status moer_layer_want_variants(moe_route_layer *layer) {
    layer->wanted = (moer_wanted *)moer_alloc(layer->context, sizeof *layer->wanted);
    if (layer->wanted == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a layer");
    return moer_layer_need_all(layer);
}

/* Makes all variants that the layer needs, and lists each of them once. */
static moe_route_status moer_layer_make_variants(moe_route_layer *layer) {
    moe_route_status status = moer_layer_want_variants(layer);
    uint32_t i, j;
    if (layer->wanted == NULL) return status;
    if (status == MOE_ROUTE_OK) status = moer_wanted_make(layer->context, layer->wanted);
    for (i = 0; i < layer->wanted->count && status == MOE_ROUTE_OK; i++) {
        const moer_variant *variant = *layer->wanted->items[i].variant;
        for (j = 0; j < layer->num_variants && layer->variants[j] != variant; j++) {}
        if (j == layer->num_variants) layer->variants[layer->num_variants++] = variant;
    }
    moer_free(layer->context, layer->wanted);
    layer->wanted = NULL;
    return status;
}

/* ---- workspace ---- */

static uint32_t moer_layer_max_distinct(const moe_route_layer *layer, uint32_t num_tokens) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k;
    return num_pairs < layer->router.num_local_experts ? num_pairs : layer->router.num_local_experts;
}

/* What the blocks of the two launches sort one by one. */
static uint32_t moer_maps_tiles(const moe_route_layer *layer, uint32_t num_pairs) { return moer_divide_up(num_pairs, moer_layer_sorts_by_cub(layer, num_pairs) ? 1024 : 512); }

/* Blocks whose counts have to have room: none in one launch. In two, all blocks read the counts of all, as many bytes as the square of their
   number times the experts, and go through their tiles one by one: the sum is least about here. None has more than 7168 pairs. Never fewer
   for more pairs, so that the workspace of many tokens does for fewer. */
static uint32_t moer_maps_counted(const moe_route_layer *layer, uint32_t num_pairs) {
    const uint32_t tiles = moer_maps_tiles(layer, num_pairs), least = moer_divide_up(num_pairs, 7168);
    uint64_t blocks = 32;
    if (num_pairs <= MOER_SORT_PAIRS) return 0;
    while (blocks * blocks * blocks * layer->router.num_local_experts < (uint64_t)512 * num_pairs) blocks++;
    if (blocks < least) blocks = least;
    return blocks < tiles ? (uint32_t)blocks : tiles;
}

/* In one launch as many as share the aligned form's padding well; in two as many as have work where each has whole tiles. */
static uint32_t moer_maps_blocks(const moe_route_layer *layer, uint32_t num_pairs) {
    const uint32_t tiles = moer_maps_tiles(layer, num_pairs);
    if (num_pairs <= MOER_SORT_PAIRS) return num_pairs <= 2048 ? 16 : moer_divide_up(num_pairs, 128);
    return moer_divide_up(tiles, moer_divide_up(tiles, moer_maps_counted(layer, num_pairs)));
}

/* As many as keep memory busy, or fewer where every block would have too many counts to add up. */
static uint32_t moer_dispatch_shares(const moe_route_layer *layer, uint32_t num_tokens, uint32_t blocks) {
    const uint32_t busy = 1024 / (blocks < 2 ? 2 : blocks), few = 16384 / layer->num_ranks;
    const uint32_t shares = busy < few ? busy : few;
    return num_tokens < shares ? num_tokens : shares;
}

/* Takes count * size bytes; *at is where they start. 0 when the sum overflows. */
static int moer_workspace_take(moer_workspace *workspace, size_t count, size_t size, size_t *at) {
    size_t bytes;
    *at = workspace->size;
    return moer_size_mul(count, size, &bytes) && moer_size_add(bytes, 255, &bytes) && moer_size_add(workspace->size, bytes / 256 * 256, &workspace->size);
}

static int moer_workspace_lay_out(const moe_route_layer *layer, uint32_t num_tokens, moer_workspace *w) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k, num_local = layer->router.num_local_experts;
    const uint32_t distinct = moer_layer_max_distinct(layer, num_tokens);
    const int cpu = layer->context->device == MOE_ROUTE_DEVICE_CPU, small = num_pairs <= MOER_SMALL_PAIRS;
    const int runs = (layer->operations & (MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS)) != 0;
    const int slots = (layer->operations & MOE_ROUTE_OPERATION_EXPERT_ROWS) != 0;
    size_t columns, row_bytes = 0; /* of all rows */
    int fits = 1;
    memset(w, 0, sizeof *w);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->ids);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->weights);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->row_to_pair);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->pair_to_row);
    fits &= moer_workspace_take(w, num_pairs, 4, &w->row_to_expert);
    fits &= moer_workspace_take(w, distinct, 4, &w->distinct_experts);
    fits &= moer_workspace_take(w, (size_t)distinct + 1, 4, &w->distinct_offsets);
    fits &= moer_workspace_take(w, 1, 4, &w->distinct_count);
    if (cpu) fits &= moer_workspace_take(w, (size_t)num_local + 1, 4, &w->expert_offsets);
    else if (!small) fits &= moer_workspace_take(w, (size_t)moer_maps_counted(layer, num_pairs) * moer_divide_up(num_local, 8), 16, &w->block_counts);
    if (runs || slots) fits &= moer_size_mul(num_pairs, layer->intermediate_size, &columns) && moer_workspace_take(w, columns, moer_dtype_size(layer->dtype), &w->h);
    if (runs && (cpu || !small || layer->may_separate || !layer->fused_combine)) {
        /* Room for whatever fewer tokens need too: grouped.cu leaves the layer's dtype, other kernels f32. */
        const uint32_t max_f32 = cpu || !moer_layer_runs_grouped(layer, num_pairs) ? num_pairs : moer_layer_few_pairs(layer);
        fits &= moer_size_mul(num_pairs, moer_dtype_size(layer->dtype), &row_bytes);
        if (row_bytes < (size_t)max_f32 * 4) row_bytes = (size_t)max_f32 * 4;
        fits &= moer_workspace_take(w, row_bytes, layer->hidden_size, &w->partial);
    }
    if (slots) fits &= moer_workspace_take(w, num_pairs, 4, &w->slot_rows);
    if (!cpu && (layer->operations & MOE_ROUTE_OPERATION_DISPATCH) && num_pairs > MOER_DISPATCH_PAIRS)
        fits &= moer_workspace_take(w, (size_t)moer_dispatch_shares(layer, num_tokens, 1) * layer->num_ranks * 2, 4, &w->dispatch_counts);
    if (cpu) fits &= moer_workspace_take(w, (size_t)2 * (layer->hidden_size > layer->intermediate_size ? layer->hidden_size : layer->intermediate_size), 4, &w->scratch);
    return fits;
}

/* ---- creating and destroying ---- */

/* The pairs that the kernels for small batches are made for: few sizes rather than the exact one, so that layers for 1 to 16
   tokens share their variants more often. */
static uint32_t moer_small_pairs(const moe_route_layer *layer, uint32_t max_tokens) {
    uint32_t pairs = 32;
    while (pairs < max_tokens * layer->router.top_k && pairs < MOER_SMALL_PAIRS) pairs *= 2;
    return pairs;
}

/* Whether down.cu's partial sums fit into shared memory. */
static int moer_parts_fit(uint32_t parts, uint32_t pairs) { return parts * pairs * 17 * 4 <= 40960; }

/* The parts that the down matmul cuts K into: those of matmul_bulk.cu, where it makes up for a launch more. Otherwise enough that a block of down.cu has work for its
   warps at one token; each at least two steps long, which a warp loads together; and the partial sums of all pairs fit. */
static moe_route_status moer_layer_choose_parts(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    const uint32_t pairs = desc->sums_of_max_tokens != 0 ? moer_small_pairs(layer, desc->sums_of_max_tokens) : layer->max_pairs_small;
    if (layer->down.format == MOE_ROUTE_FORMAT_NONE) return MOE_ROUTE_OK;
    if (desc->fused_combine != MOE_ROUTE_ON && (layer->down.inner > MOER_FUSED_INPUTS || layer->down.format > MOE_ROUTE_FORMAT_GGUF) && moer_matrix_has_bulk_tiles(layer, &layer->down)) {
        layer->down_parts = moer_bulk_warps(&layer->down);
        layer->fused_combine = 0;
        return MOE_ROUTE_OK;
    }
    layer->down_parts = 4;
    while (layer->down_parts > 1 && (moer_tile_steps(&layer->down) < layer->down_parts * 2 || !moer_parts_fit(layer->down_parts, pairs))) layer->down_parts /= 2;
    if (layer->fused_combine && !moer_parts_fit(layer->down_parts, layer->max_pairs_small)) {
        if (desc->fused_combine == MOE_ROUTE_ON)
            return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "layer: sums_of_max_tokens is %u with max_tokens %u; shared memory has no room for that with fused_combine ON",
                             (unsigned)desc->sums_of_max_tokens, (unsigned)layer->max_tokens);
        layer->fused_combine = 0;
    }
    return MOE_ROUTE_OK;
}

/* All but the variants. */
static moe_route_status moer_layer_fill(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    moer_workspace workspace;
    moe_route_status status = moer_check_needs(layer->context, desc);
    if (status == MOE_ROUTE_OK) status = moer_router_check(layer->context, &desc->router, &layer->router);
    if (status == MOE_ROUTE_OK) status = moer_router_check_placement(layer->context, &desc->experts, &layer->router);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_experts(layer, &desc->experts);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_ranks(layer, &desc->experts);
    if (status == MOE_ROUTE_OK) status = moer_layer_check_operations(layer, desc);
    if (status != MOE_ROUTE_OK) return status;
    layer->max_pairs_small = moer_small_pairs(layer, layer->max_tokens);
    status = moer_layer_choose_parts(layer, desc);
    if (status == MOE_ROUTE_OK) status = moer_layer_choose(layer, desc);
    if (status != MOE_ROUTE_OK) return status;
    if (!moer_workspace_lay_out(layer, layer->max_tokens, &workspace))
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "layer: max_tokens is %u; its workspace is larger than this machine's addresses", (unsigned)layer->max_tokens);
    return MOE_ROUTE_OK;
}

/* A filled layer for a function whose output `out` is named so; NULL on failure. */
static moe_route_status moer_layer_begin(moe_route_context *context, const moe_route_layer_desc *desc, const char *function, const void *out, const char *name, moe_route_layer **layer) {
    moe_route_status status;
    *layer = NULL;
    if (context == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    if (desc == NULL || out == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: %s is NULL", function, desc == NULL ? "desc" : name);
    status = moer_context_check(context, function);
    if (status != MOE_ROUTE_OK) return status;
    *layer = (moe_route_layer *)moer_alloc(context, sizeof **layer);
    if (*layer == NULL) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for a layer");
    (*layer)->context = context;
    status = moer_layer_fill(*layer, desc);
    if (status == MOE_ROUTE_OK) return status;
    moer_free(context, *layer);
    *layer = NULL;
    return status;
}

/* *tuned: its kernels were to be those that tuning chose. */
static moe_route_status moer_layer_create(moe_route_context *context, const moe_route_layer_desc *desc, moe_route_layer **out, int *tuned) {
    moe_route_layer *layer;
    moe_route_status status = moer_layer_begin(context, desc, "moe_route_layer_create", out, "layer", &layer);
    *tuned = 0;
    if (layer == NULL) return status;
    *tuned = layer->tuned;
    if (context->device != MOE_ROUTE_DEVICE_CPU) status = moer_layer_make_variants(layer);
    if (status == MOE_ROUTE_OK) *out = layer;
    else moer_free(context, layer);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_layer_create(moe_route_context *context, const moe_route_layer_desc *desc, moe_route_layer **out) {
    moe_route_layer_desc untuned;
    moe_route_status status;
    int tuned;
    if (out != NULL) *out = NULL;
    status = moer_layer_create(context, desc, out, &tuned);
    if ((status != MOE_ROUTE_ERROR_NO_COMPILER && status != MOE_ROUTE_ERROR_COMPILE) || !tuned || desc->tuned == MOE_ROUTE_ON) return status;
    /* Those without tuning may be in a pack, or in the cache still. */
    moer_log(context, MOE_ROUTE_LOG_WARNING, "the kernels that tuning chose for a layer can't be had; it takes those of an untuned one");
    untuned = *desc;
    untuned.tuned = MOE_ROUTE_OFF;
    return moer_layer_create(context, &untuned, out, &tuned);
}

MOE_ROUTE_API moe_route_status moe_route_layer_count_variants(moe_route_context *context, const moe_route_layer_desc *desc, uint32_t *count) {
    moe_route_layer *layer;
    moe_route_status status;
    uint32_t i, j;
    if (count != NULL) *count = 0;
    status = moer_layer_begin(context, desc, "moe_route_layer_count_variants", count, "count", &layer);
    if (layer == NULL) return status;
    if (context->device != MOE_ROUTE_DEVICE_CPU) status = moer_layer_want_variants(layer);
    for (i = 0; status == MOE_ROUTE_OK && layer->wanted != NULL && i < layer->wanted->count; i++) {
        for (j = 0; layer->wanted->items[j].family != layer->wanted->items[i].family || strcmp(layer->wanted->items[j].defines, layer->wanted->items[i].defines) != 0; j++) {}
        *count += j == i; /* the first of its kind */
    }
    moer_free(context, layer->wanted);
    moer_free(context, layer);
    return status;
}

MOE_ROUTE_API void moe_route_layer_destroy(moe_route_layer *layer) {
    if (layer != NULL) moer_free(layer->context, layer);
}

/* ---- src/choices.c ---- */
/*
  choices.c: which of several kernels with the same result a layer launches at each number of tokens: by rules that need no GPU
  (layer.c), by the description, or by what was measured on this GPU. Keeping such results and finding them again is here,
  measuring is tune.c's.

  Results lie in the context, and in the cache beside the cubins, under a key with the GPU's name and all that decides how long
  the kernels take. Like a cubin, a result that is damaged or missing is never an error. Choices change no bit of any output.
*/

#define MOER_TUNING_HEAD (sizeof MOER_TUNING_MAGIC - 1)
#define MOER_TUNING_SIZE (MOER_TUNING_HEAD + sizeof(moer_choice[MOER_CHOICES]))

static const moer_choice *moer_layer_choice(const moe_route_layer *layer, uint32_t num_tokens) {
    uint32_t i = 0;
    while (i + 1 < MOER_CHOICES && 1u << i < num_tokens) i++;
    return &layer->choices[i];
}

static int moer_choice_range(const moe_route_layer *layer, uint32_t i, int large, uint32_t *least, uint32_t *most) {
    const uint32_t small = MOER_SMALL_PAIRS / layer->router.top_k; /* the most tokens with few pairs */
    *least = (i == 0 ? 0 : 1u << (i - 1)) + 1;
    *most = 1u << i;
    if (*most > layer->max_tokens) *most = layer->max_tokens;
    if (large && *least <= small) *least = small + 1;
    if (!large && *most > small) *most = small;
    return *least <= *most;
}

/* ---- what a layer makes of its choices ---- */

/* Rows of an expert on average decide: a tile of many is efficient where they fill it, and one of few leaves room for more blocks. */
static uint32_t moer_grouped_tile(const moe_route_layer *layer, uint32_t num_pairs) {
    const uint32_t num_local = layer->router.num_local_experts, rows = num_local == 0 ? 0 : num_pairs / num_local;
    const uint32_t chosen = moer_layer_choice(layer, num_pairs / layer->router.top_k)->tile_rows;
    if (chosen != 0) return chosen / 64; /* 32, 64, 128 */
    return rows <= 16 ? 0 : rows <= 40 ? 1 : 2;
}

/* Whether a batch of up to max_tokens tokens meets a size of tiles, which grows with the rows of an expert, or is one for all of a choice. */
static int moer_layer_meets_tile(const moe_route_layer *layer, uint32_t tile) {
    uint32_t i, least, most;
    for (i = 0; i < MOER_CHOICES; i++)
        if (moer_choice_range(layer, i, 1, &least, &most) && moer_layer_runs_grouped(layer, most * layer->router.top_k) &&
            moer_grouped_tile(layer, least * layer->router.top_k) <= tile && tile <= moer_grouped_tile(layer, most * layer->router.top_k))
            return 1;
    return 0;
}

static int moer_layer_fuses(const moe_route_layer *layer, uint32_t num_pairs) {
    return layer->fused_combine && num_pairs <= MOER_SMALL_PAIRS && !moer_layer_choice(layer, num_pairs / layer->router.top_k)->separate;
}

/* Whether some batch of few pairs goes through down.cu, or not through it. */
static int moer_layer_meets_fused(const moe_route_layer *layer, int fused) {
    uint32_t i, least, most;
    for (i = 0; i < MOER_CHOICES; i++)
        if (moer_choice_range(layer, i, 0, &least, &most) && moer_layer_fuses(layer, most * layer->router.top_k) == fused) return 1;
    return 0;
}

/* ---- what is kept ---- */

/* Of what decides how long the kernels take, but for where the weights lie: what is found with one layer's is good for all. */
static int moer_tuning_key(const moe_route_layer *layer, moer_key *key) {
    char defines[MOER_DEFINES_MAX] = "DEVICE=";
    size_t length = strlen(defines);
    moe_route_layer anywhere = *layer;
    const char *name;
    anywhere.gate_up.data = anywhere.gate_up.scales = anywhere.up.data = anywhere.up.scales = anywhere.down.data = anywhere.down.scales = 0;
    for (name = layer->context->name; *name != '\0' && length < 64; name++) {
        const char c = *name;
        defines[length++] = (char)((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' || c == '-' ? c : '_');
    }
    defines[length] = '\0';
    moer_define(defines, "MULTIPROCESSORS", layer->context->num_multiprocessors);
    moer_define(defines, "DEPENDENT", (unsigned long)layer->dependent);
    moer_define(defines, "E", layer->router.given_physical ? layer->router.num_physical_experts : layer->router.num_experts);
    moer_define(defines, "LOCAL_EXPERTS", layer->router.num_local_experts);
    moer_define(defines, "MAX_TOKENS", layer->max_tokens);
    moer_define(defines, "PARTS", layer->down_parts);
    moer_define(defines, "GATED", (unsigned long)layer->gated);
    moer_define(defines, "UP_APART", layer->up.format != MOE_ROUTE_FORMAT_NONE);
    moer_define_tile(defines, &anywhere, &anywhere.gate_up);
    moer_define_tile(defines, &anywhere, &anywhere.down);
    return defines[0] == 'D' /* all of it fitted */ && moer_key_make(key, "tuning", defines, layer->context->target);
}

static void moer_tuning_write(const moer_choice *choices, unsigned char payload[MOER_TUNING_SIZE]) {
    unsigned char *at = payload + MOER_TUNING_HEAD;
    uint32_t i;
    memcpy(payload, MOER_TUNING_MAGIC, MOER_TUNING_HEAD);
    for (i = 0; i < MOER_CHOICES; i++) {
        *at++ = choices[i].separate;
        *at++ = choices[i].tile_rows;
    }
}

/* 0: it isn't what moer_tuning_write writes. */
static int moer_tuning_read(const unsigned char *payload, size_t size, moer_choice *choices) {
    const unsigned char *at = payload + MOER_TUNING_HEAD;
    uint32_t i;
    if (size != MOER_TUNING_SIZE) return 0;
    for (i = 0; i < MOER_CHOICES; i++) {
        choices[i].separate = *at++;
        choices[i].tile_rows = *at++;
        if (choices[i].separate > 1) return 0;
        if (choices[i].tile_rows != 0 && choices[i].tile_rows != 32 && choices[i].tile_rows != 64 && choices[i].tile_rows != 128) return 0;
    }
    return 1;
}

static int moer_tuning_in_folders(moe_route_context *context, const moer_key *key, moer_choice *choices) {
    moer_lookup lookup;
    int sound = 0;
    memset(&lookup, 0, sizeof lookup);
    lookup.key = *key;
    lookup.is_tuning = 1;
    while (!sound && moer_lookup_in_folders(context, &lookup, 0)) {
        sound = moer_tuning_read(lookup.entry.payload, lookup.entry.payload_size, choices);
        moer_free(context, lookup.bytes.data);
        if (!sound) moer_lookup_reject(context, "what tuning kept for a layer", "it has choices that there aren't");
    }
    return sound;
}

/* What this process measured; the mutex is held. */
static moer_tuning *moer_tuning_in_memory(moe_route_context *context, const moer_key *key) {
    moer_tuning *tuning;
    for (tuning = context->tunings; tuning != NULL; tuning = tuning->next)
        if (memcmp(tuning->digest, key->digest, 32) == 0) return tuning;
    return NULL;
}

static int moer_tuning_find(const moe_route_layer *layer, moer_choice *choices) {
    moe_route_context *context = layer->context;
    moer_choice kept[MOER_CHOICES];
    const moer_tuning *tuning;
    moer_key key;
    if (!moer_tuning_key(layer, &key)) return 0;
    moer_mutex_lock(&context->mutex);
    tuning = moer_tuning_in_memory(context, &key);
    if (tuning != NULL) memcpy(kept, tuning->choices, sizeof kept);
    moer_mutex_unlock(&context->mutex);
    if (tuning == NULL && !moer_tuning_in_folders(context, &key, kept)) return 0;
    if (choices != NULL) memcpy(choices, kept, sizeof kept);
    return 1;
}

static moe_route_status moer_tuning_keep(const moe_route_layer *layer, const moer_choice *choices) {
    moe_route_context *context = layer->context;
    unsigned char text[MOER_TUNING_SIZE];
    moer_bytes payload, entry;
    moer_lookup *lookup = (moer_lookup *)moer_alloc(context, sizeof *lookup);
    moer_tuning *tuning = (moer_tuning *)moer_alloc(context, sizeof *tuning), *known;
    if (lookup == NULL || tuning == NULL || !moer_tuning_key(layer, &lookup->key)) {
        moer_free(context, lookup);
        moer_free(context, tuning);
        return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for what tuning found");
    }
    memcpy(tuning->digest, lookup->key.digest, 32);
    memcpy(tuning->choices, choices, sizeof tuning->choices);
    moer_mutex_lock(&context->mutex);
    known = moer_tuning_in_memory(context, &lookup->key);
    if (known != NULL) {
        memcpy(known->choices, choices, sizeof known->choices);
    } else {
        tuning->next = context->tunings;
        context->tunings = tuning;
    }
    moer_mutex_unlock(&context->mutex);
    if (known != NULL) moer_free(context, tuning);

    /* A folder in the entry's place is no reason to write nothing any more. */
    moer_cache_path(context->cache.folder, lookup->key.digest, 1, lookup->path, sizeof lookup->path);
    lookup->blocked = moer_path_inspect(lookup->path) == MOER_PATH_FOLDER;
    moer_tuning_write(choices, text);
    payload.data = text;
    payload.size = sizeof text;
    entry = moer_entry_make(context, &lookup->key, &payload);
    if (entry.data != NULL) moer_cache_store(context, lookup, &entry);
    moer_free(context, entry.data);
    moer_free(context, lookup);
    return MOE_ROUTE_OK;
}

static void moer_tunings_destroy(moe_route_context *context) {
    while (context->tunings != NULL) {
        moer_tuning *tuning = context->tunings;
        context->tunings = tuning->next;
        moer_free(context, tuning);
    }
}

/* ---- of a layer ---- */

static moe_route_status moer_layer_choose(moe_route_layer *layer, const moe_route_layer_desc *desc) {
    moe_route_context *context = layer->context;
    const int has_choices = layer->gate_up.format != MOE_ROUTE_FORMAT_NONE && layer->down.format != MOE_ROUTE_FORMAT_NONE;
    uint32_t i;
    if (desc->tuned < MOE_ROUTE_AUTO || desc->tuned > MOE_ROUTE_OFF) return moer_refuse(context, "tuned", (unsigned long long)desc->tuned, "AUTO (0), ON (1) or OFF (2)");
    if (desc->grouped_rows != 0 && desc->grouped_rows != 32 && desc->grouped_rows != 64 && desc->grouped_rows != 128)
        return moer_refuse(context, "grouped_rows", desc->grouped_rows, "32, 64 or 128, or 0 for a choice by the rows of an expert");
    if (desc->tuned != MOE_ROUTE_OFF && context->device == MOE_ROUTE_DEVICE_GPU && has_choices) layer->tuned = moer_tuning_find(layer, layer->choices);
    if (desc->tuned == MOE_ROUTE_ON && !layer->tuned && context->device == MOE_ROUTE_DEVICE_GPU && has_choices)
        return moer_fail(context, MOE_ROUTE_ERROR_NOT_PREPARED, "layer: tuned is ON, and nothing is kept for this layer on this GPU: call moe_route_layer_tune before");
    layer->may_separate = desc->tuned != MOE_ROUTE_OFF && desc->fused_combine == MOE_ROUTE_AUTO; /* found or not: no size depends on that */
    for (i = 0; i < MOER_CHOICES; i++) {
        if (desc->grouped_rows != 0) layer->choices[i].tile_rows = (unsigned char)desc->grouped_rows;
        if (desc->fused_combine != MOE_ROUTE_AUTO) layer->choices[i].separate = 0;
    }
    return MOE_ROUTE_OK;
}

/* ---- src/sequence.c ---- */
/*
  sequence.c: the launches of each operation, in order, with grids and arguments; and launching them. Running and
  explaining a layer both start from these lists, so an explanation can't differ from what is done. Checking arguments
  belongs to operations.c.
*/

static moer_launch *moer_sequence_add(moer_sequence *sequence, const moer_variant *variant, uint32_t entry, uint32_t grid_x, uint32_t grid_y, uint32_t block) {
    moer_launch *launch = &sequence->launches[sequence->num_launches++];
    memset(launch, 0, sizeof *launch);
    launch->variant = variant;
    launch->entry = entry;
    launch->grid[0] = grid_x;
    launch->grid[1] = grid_y;
    launch->grid[2] = 1;
    launch->block = block;
    return launch;
}

/* ---- router and maps ---- */

static void moer_fill_route(moer_route_args *args, const moer_router *router, uint32_t num_tokens, const moer_routing *routing) {
    args->logits = routing->logits;
    args->logit_bias = router->logit_bias;
    args->selection_bias = router->selection_bias;
    args->expert_scale = router->expert_scale;
    args->id_table = router->id_table;
    args->token_ids = routing->token_ids;
    args->ids = routing->ids;
    args->weights = routing->weights;
    args->shared_weights = routing->shared_weights;
    args->num_valid_tokens = routing->num_valid_tokens;
    args->expert_map = router->expert_map;
    args->maps = routing->maps;
    args->num_tokens = num_tokens;
    args->id_table_rows = router->id_table_rows;
    args->softcap = router->softcap;
    args->jitter = router->jitter;
    args->renormalize_epsilon = router->renormalize_epsilon;
    args->scale = router->scale;
}

static void moer_sequence_topk(moer_sequence *sequence, const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing) {
    moer_fill_route(&moer_sequence_add(sequence, layer->topk, 0, moer_divide_up(num_tokens, 8), 1, 256)->args.route, &layer->router, num_tokens, routing);
}

static void moer_sequence_small_route(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *variant, uint32_t num_tokens, const moer_routing *routing) {
    /* As in route.cu: a warp chooses a token's experts, all compute scores ahead, 32 at a time; then a warp weighs as many tokens as its lanes
       have slots for, or one, while others find the maps, 32 experts each. */
    const moer_router *router = &layer->router;
    const uint32_t experts = routing->logits != 0 ? router->num_experts : 0, num_local = router->num_local_experts, slots = router->top_k + router->num_shared_experts;
    const int packed = router->ids == MOE_ROUTE_IDS_SELECTED && router->score != MOE_ROUTE_SCORE_SPARSE_MIXER && slots <= 16;
    const int by_score = experts != 0 && (router->selection_bias != 0 || moer_drops_groups(router->group_rule) || router->score == MOE_ROUTE_SCORE_CUSTOM);
    const uint32_t most_experts = experts > num_local ? experts : num_local;
    const uint32_t max_warps = experts == 0 ? 32 : most_experts > 1024 ? 8 : most_experts > 512 ? 12 : most_experts > 256 ? 20 : by_score ? 24 : 32;
    const uint32_t max_routing = max_warps > 16 && max_warps < 32 ? 16 : max_warps, routing_warps = experts == 0 ? 0 : num_tokens < max_routing ? num_tokens : max_routing;
    const uint32_t map_warps = num_local > 512 ? 16 : moer_divide_up(num_local, 32);
    uint32_t lanes = packed ? 1 : 32, warps;
    while (lanes < slots && lanes < 32) lanes *= 2;
    warps = moer_divide_up(routing_warps * lanes, 32) + map_warps;
    if (warps < routing_warps + 2) warps = routing_warps + 2; /* that empty the table meanwhile */
    if (experts == 0 && warps < moer_divide_up(num_tokens * router->top_k, 32)) warps = moer_divide_up(num_tokens * router->top_k, 32);
    if (by_score && warps < moer_divide_up(num_tokens * experts, 32)) warps = moer_divide_up(num_tokens * experts, 32);
    if (warps > max_warps) warps = max_warps;
    moer_fill_route(&moer_sequence_add(sequence, variant, 0, 1, 1, warps * 32)->args.route, &layer->router, num_tokens, routing);
}

static void moer_sequence_large_maps(moer_sequence *sequence, const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing,
                                     const moer_workspace *w, moe_route_address workspace) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k;
    const int cub = moer_layer_sorts_by_cub(layer, num_pairs);
    const uint32_t blocks = moer_maps_blocks(layer, num_pairs);
    const moer_variant *variant = cub ? layer->maps_cub : layer->maps;
    const uint32_t threads = cub ? moer_cub_maps_threads(layer) : 512;
    const uint32_t first = num_pairs <= MOER_SORT_PAIRS ? 2 : 0, end = first == 0 ? 2 : 3;
    uint32_t i;
    for (i = first; i < end; i++) {
        moer_maps_args *args = &moer_sequence_add(sequence, variant, i, blocks, 1, threads)->args.maps;
        args->ids = routing->ids;
        args->num_valid_tokens = routing->num_valid_tokens;
        args->expert_map = layer->router.expert_map;
        args->block_counts = workspace + w->block_counts;
        args->maps = routing->maps;
        args->num_pairs = num_pairs;
        args->num_blocks = blocks;
    }
}

/* Router (unless ids are given) and maps (where any is wanted). `small` is the variant for up to MOER_SMALL_PAIRS pairs. */
static void moer_sequence_route(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *small, uint32_t num_tokens,
                                const moer_routing *routing, const moer_workspace *w, moe_route_address workspace) {
    if (!routing->any_map) {
        moer_sequence_topk(sequence, layer, num_tokens, routing);
    } else if (num_tokens * layer->router.top_k <= MOER_SMALL_PAIRS) {
        moer_sequence_small_route(sequence, layer, small, num_tokens, routing);
    } else {
        if (routing->logits != 0) moer_sequence_topk(sequence, layer, num_tokens, routing);
        moer_sequence_large_maps(sequence, layer, num_tokens, routing, w, workspace);
    }
}

/* The maps that the expert kernels read, in the workspace. */
static void moer_routing_layer_maps(moer_routing *routing, const moer_workspace *w, moe_route_address workspace) {
    routing->any_map = 1;
    routing->maps.row_to_pair = workspace + w->row_to_pair;
    routing->maps.pair_to_row = workspace + w->pair_to_row;
    routing->maps.row_to_expert = workspace + w->row_to_expert;
    routing->maps.distinct_experts = workspace + w->distinct_experts;
    routing->maps.distinct_offsets = workspace + w->distinct_offsets;
    routing->maps.distinct_count = workspace + w->distinct_count;
}

/* ---- experts ---- */

static void moer_weights_args_of(moer_weights_args *args, const moer_matrix *matrix) {
    args->data = matrix->data;
    args->scales = matrix->scales;
    args->zero_points = matrix->zero_points;
    args->global_scales = matrix->global_scales;
}

static void moer_matmul_args_matrix(moer_matmul_args *args, const moer_matrix *matrix, const moer_maps_out *maps) {
    moer_weights_args_of(&args->weights, matrix);
    args->bias = matrix->bias;
    args->distinct_experts = maps->distinct_experts;
    args->distinct_offsets = maps->distinct_offsets;
    args->distinct_count = maps->distinct_count;
    args->row_to_pair = maps->row_to_pair;
}

static moer_epilogue moer_layer_epilogue(const moe_route_layer *layer, const moe_route_layer_args *from, const moer_routing *routing) {
    moer_epilogue epilogue;
    memset(&epilogue, 0, sizeof epilogue);
    epilogue.x = layer->router.num_identity != 0 ? from->x : 0;
    epilogue.ids = layer->router.num_identity != 0 ? routing->ids : 0;
    epilogue.num_valid_tokens = from->num_valid_tokens;
    epilogue.shared = from->shared_output;
    epilogue.shared_weights = from->shared_output_weights;
    epilogue.residual = from->residual;
    return epilogue;
}

/* combine.cu's arguments after the down matmul into the workspace; the CPU's, too. */
static void moer_combine_args_layer(moer_combine_args *args, const moe_route_layer *layer, const moe_route_layer_args *from, const moer_routing *routing, const moer_workspace *w) {
    memset(args, 0, sizeof *args);
    args->rows = from->workspace + w->partial;
    args->pair_to_row = routing->maps.pair_to_row;
    args->router_weights = routing->weights;
    args->y = from->y;
    args->epilogue = moer_layer_epilogue(layer, from, routing);
    args->num_tokens = from->num_tokens;
    args->num_rows = from->num_tokens * layer->router.top_k;
}

/* The same for the combine on its own. */
static void moer_combine_args_given(moer_combine_args *args, const moe_route_layer *layer, const moe_route_combine_args *from) {
    memset(args, 0, sizeof *args);
    args->rows = from->rows;
    args->pair_to_row = from->pair_to_row;
    args->router_weights = from->weights;
    args->y = from->y;
    args->epilogue.x = layer->router.num_identity != 0 ? from->x : 0;
    args->epilogue.ids = layer->router.num_identity != 0 ? from->ids : 0;
    args->epilogue.num_valid_tokens = from->num_valid_tokens;
    args->epilogue.shared = from->shared_output;
    args->epilogue.shared_weights = from->shared_output_weights;
    args->epilogue.residual = from->residual;
    args->num_tokens = from->num_tokens;
    args->num_rows = from->num_rows != 0 ? from->num_rows : from->num_tokens * layer->router.top_k;
    args->weighted_rows = from->weighted_rows != 0;
}

static moer_combine_args *moer_sequence_add_combine(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *variant, uint32_t num_tokens) {
    const uint32_t height = num_tokens < 65535 ? num_tokens : 65535;
    return &moer_sequence_add(sequence, variant, 0, moer_divide_up(layer->hidden_size / moer_combine_vector(layer), 128), height, 128)->args.combine;
}

/* matmul.cu with as many blocks as run at once, or fewer where there are fewer tiles. */
static moer_launch *moer_sequence_add_matmul(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *variant, const moer_matrix *matrix, uint32_t distinct, uint32_t warps) {
    const uint32_t matrices = matrix == &layer->gate_up && layer->up.format != MOE_ROUTE_FORMAT_NONE ? 2 : 1; /* gate and up */
    const uint32_t tiles = moer_divide_up(matrix->rows * matrices, 16) * distinct, at_once = layer->context->num_multiprocessors * (uint32_t)variant->resident_blocks[0];
    moer_launch *launch = moer_sequence_add(sequence, variant, 0, at_once != 0 && at_once < tiles ? at_once : tiles, 1, (warps + (variant->family == &moer_family_matmul_bulk ? 2 : 0)) * 32);
    launch->weight_bytes = moer_matrix_bytes(matrix) * matrices * distinct;
    launch->args.matmul.max_distinct = distinct;
    return launch;
}

/* The down matmul's weights, as many as two fifths of L2 hold: the rest of it has the weights that are being read. */
static void moer_prefetch_down(moer_matmul_args *args, const moer_matrix *down, uint64_t l2_bytes) {
    const uint64_t data = moer_data_bytes(down), scales = moer_scale_bytes(down);
    args->next_data = down->data;
    args->next_scales = down->scales;
    args->next_bytes = down->data % 16 == 0 && data % 16 == 0 ? data : 0; /* where every expert is aligned */
    args->next_scale_bytes = down->scales % 16 == 0 && scales % 16 == 0 ? scales : 0;
    args->next_experts = (uint32_t)(l2_bytes / 5 * 2 / (data + scales)); /* L2's size was an int. All that is fetched is smaller, also in pieces */
}

static moer_launch *moer_sequence_add_grouped(moer_sequence *sequence, const moe_route_layer *layer, const moer_variant *const *variants, const moer_matrix *matrix, uint32_t num_tokens) {
    const uint32_t num_pairs = num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, num_tokens), tile = moer_grouped_tile(layer, num_pairs);
    const uint32_t matrices = matrix == &layer->gate_up && layer->up.format != MOE_ROUTE_FORMAT_NONE ? 2 : 1; /* gate and up */
    const uint32_t tiles = moer_grouped_columns(layer, matrix) * (num_pairs / (32u << tile) + distinct);
    const uint32_t at_once = moer_grouped_takes_warpgroups(layer, matrix) ? layer->context->num_multiprocessors * (uint32_t)variants[tile]->resident_blocks[0] : 0; /* others take a tile a block */
    moer_launch *launch = moer_sequence_add(sequence, variants[tile], 0, at_once != 0 && at_once < tiles ? at_once : tiles, 1, moer_grouped_threads(layer, matrix));
    launch->weight_bytes = moer_matrix_bytes(matrix) * matrices * distinct;
    return launch;
}

/* x up to h, in row order: of the layer, whose large batches may be grouped, and of expert rows. */
static moer_matmul_args *moer_sequence_gate_up(moer_sequence *sequence, const moe_route_layer *layer, moe_route_address x, moe_route_address h, uint32_t num_pairs, int grouped,
                                               const moer_routing *routing) {
    const uint32_t num_tokens = num_pairs / layer->router.top_k, distinct = moer_layer_max_distinct(layer, num_tokens);
    moer_launch *launch = grouped ? moer_sequence_add_grouped(sequence, layer, layer->gate_up_grouped, &layer->gate_up, num_tokens)
                                  : moer_sequence_add_matmul(sequence, layer, layer->gate_up_activated[moer_layer_has_many_rows(layer, num_pairs)], &layer->gate_up, distinct, moer_layer_matmul_warps(layer, &layer->gate_up));
    moer_matmul_args *gate_up = &launch->args.matmul;
    moer_matmul_args_matrix(gate_up, &layer->gate_up, &routing->maps);
    moer_weights_args_of(&gate_up->up_weights, &layer->up);
    gate_up->up_bias = layer->up.bias;
    gate_up->x = x;
    gate_up->out = h;
    gate_up->router_weights = layer->weight_on_input ? routing->weights : 0;
    gate_up->num_pairs = num_pairs;
    gate_up->alpha = layer->alpha;
    gate_up->up_beta = layer->up_beta;
    gate_up->up_offset = layer->up_offset;
    gate_up->clamp = layer->clamp;
    return gate_up;
}

static void moer_sequence_experts(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_layer_args *from, const moer_routing *routing, const moer_workspace *w) {
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, from->num_tokens);
    const int many = moer_layer_has_many_rows(layer, num_pairs), grouped = moer_layer_runs_grouped(layer, num_pairs);
    moer_matmul_args *gate_up = moer_sequence_gate_up(sequence, layer, from->x, from->workspace + w->h, num_pairs, grouped, routing), *down;
    moer_launch *launch;
    if (!grouped) moer_prefetch_down(gate_up, &layer->down, layer->context->l2_bytes);
    if (moer_layer_fuses(layer, num_pairs)) {
        moer_down_args *args;
        uint32_t warps;
        warps = distinct * layer->down_parts;
        warps = warps < 4 ? 4 : warps > 16 ? 16 : warps;
        launch = moer_sequence_add(sequence, layer->down_fused, 0, moer_divide_up(layer->hidden_size, 16), 1, warps * 32);
        launch->weight_bytes = moer_matrix_bytes(&layer->down) * distinct;
        args = &launch->args.down;
        moer_weights_args_of(&args->weights, &layer->down);
        args->bias = layer->down.bias;
        args->h = from->workspace + w->h;
        args->router_weights = routing->weights;
        args->y = from->y;
        args->distinct_experts = routing->maps.distinct_experts;
        args->distinct_offsets = routing->maps.distinct_offsets;
        args->distinct_count = routing->maps.distinct_count;
        args->pair_to_row = routing->maps.pair_to_row;
        args->row_to_expert = routing->maps.row_to_expert;
        args->epilogue = moer_layer_epilogue(layer, from, routing);
        args->num_tokens = from->num_tokens;
        args->max_distinct = distinct;
        return;
    }
    launch = grouped ? moer_sequence_add_grouped(sequence, layer, layer->down_grouped, &layer->down, from->num_tokens)
                     : moer_sequence_add_matmul(sequence, layer, layer->down_rows[many], &layer->down, distinct, layer->down_parts);
    down = &launch->args.matmul;
    moer_matmul_args_matrix(down, &layer->down, &routing->maps);
    down->x = from->workspace + w->h;
    down->out = from->workspace + w->partial;
    down->router_weights = grouped && !layer->weight_on_input ? routing->weights : 0;
    down->num_pairs = num_pairs;
    moer_combine_args_layer(moer_sequence_add_combine(sequence, layer, grouped ? layer->combine_grouped : layer->combine_rows, from->num_tokens), layer, from, routing, w);
}

static void moer_sequence_matmul(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_matmul_args *from, const moer_routing *routing) {
    const moer_matrix *matrix = from->matrix == MOE_ROUTE_MATRIX_GATE_UP ? &layer->gate_up : &layer->down;
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, from->num_tokens);
    moer_matmul_args *args = &moer_sequence_add_matmul(sequence, layer, layer->matmul[from->matrix][moer_layer_has_many_rows(layer, num_pairs)], matrix, distinct, moer_layer_matmul_warps(layer, matrix))->args.matmul;
    moer_matmul_args_matrix(args, matrix, &routing->maps);
    args->pair_to_row = routing->maps.pair_to_row;
    args->x = from->x;
    args->out = from->out;
    args->num_pairs = num_pairs;
    args->x_per_pair = from->x_per_pair != 0;
}

static void moer_sequence_expand(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_expand_args *from) {
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k;
    const uint32_t units = (uint32_t)(layer->hidden_size * moer_dtype_size(layer->dtype)) / moer_expand_unit(layer);
    moer_expand_args *args = &moer_sequence_add(sequence, layer->expand, 0, moer_divide_up(units, 128), num_pairs < 65535 ? num_pairs : 65535, 128)->args.expand;
    args->x = from->x;
    args->row_to_pair = from->row_to_pair;
    args->rows = from->rows;
    args->num_pairs = num_pairs;
}

static void moer_sequence_combine(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_combine_args *from) {
    moer_combine_args_given(moer_sequence_add_combine(sequence, layer, layer->combine, from->num_tokens), layer, from);
}

/* ---- launching ---- */

static moe_route_status moer_sequence_launch(const moe_route_layer *layer, moer_sequence *sequence, moe_route_stream stream) {
    moe_route_context *context = layer->context;
    moer_cu_result result = 0;
    uint32_t i;
    int pushed;
    moe_route_status status = moer_context_enter(context, &pushed);
    if (status != MOE_ROUTE_OK) return status;
    for (i = 0; i < sequence->num_launches && result == 0; i++) {
        moer_launch *launch = &sequence->launches[i];
        moer_cu_launch_attribute attribute;
        moer_cu_launch_config config;
        void *parameters[1];
        memset(&config, 0, sizeof config);
        memcpy(config.grid, launch->grid, sizeof config.grid);
        config.block[0] = launch->block;
        config.block[1] = config.block[2] = 1;
        config.shared_bytes = launch->variant->dynamic_shared_bytes;
        config.stream = stream;
        if (layer->dependent) {
            memset(&attribute, 0, sizeof attribute);
            attribute.id = MOER_CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmatic_stream_serialization = 1;
            config.attributes = &attribute;
            config.num_attributes = 1;
        }
        parameters[0] = &launch->args;
        result = context->driver.cuLaunchKernelEx(&config, launch->variant->functions[launch->entry], parameters, NULL);
        if (result != 0) status = moer_driver_fail(context, launch->variant->family->entries[launch->entry], result);
    }
    moer_context_leave(context, pushed);
    return status;
}

/* ---- src/cpu_operations.c ---- */
/*
  cpu_operations.c: each operation on the CPU, over the same arguments and the same workspace as on the GPU. Arguments are
  checked before, in operations.c.
*/

static void moer_cpu_route(const moe_route_layer *layer, uint32_t num_tokens, const moer_routing *routing) {
    const uint32_t num_valid = moer_cpu_num_valid(routing->num_valid_tokens, num_tokens);
    if (routing->logits != 0) moer_cpu_topk(&layer->router, routing, num_tokens, num_valid);
    if (routing->any_map) moer_cpu_maps(&layer->router, (const int32_t *)moer_host(routing->ids), num_tokens, num_valid, &routing->maps);
}

static void moer_cpu_product_begin(moer_cpu_product *product, const moe_route_layer *layer, const moer_matrix *matrix, const moer_routing *routing,
                                   const moer_workspace *w, moe_route_address workspace) {
    memset(product, 0, sizeof *product);
    product->layer = layer;
    product->matrix = matrix;
    product->expert_offsets = (const int32_t *)moer_host(routing->maps.expert_offsets);
    product->row_to_pair = (const int32_t *)moer_host(routing->maps.row_to_pair);
    product->x_dtype = product->out_dtype = layer->dtype;
    product->scratch = (float *)moer_host(workspace + w->scratch);
}

/* x up to h. */
static void moer_cpu_gate_up(const moe_route_layer *layer, moe_route_address x, moe_route_address workspace, const moer_routing *routing, const moer_workspace *w) {
    moer_cpu_product product;
    moer_cpu_product_begin(&product, layer, &layer->gate_up, routing, w, workspace);
    product.x = moer_host(x);
    product.activated = 1;
    product.up = layer->up.format != MOE_ROUTE_FORMAT_NONE ? &layer->up : NULL;
    product.input_weights = layer->weight_on_input ? moer_host(routing->weights) : NULL;
    product.out = moer_host(workspace + w->h);
    moer_cpu_multiply(&product);
}

/* The maps are those of moer_routing_layer_maps and the expert offsets. */
static void moer_cpu_experts(const moe_route_layer *layer, const moe_route_layer_args *args, const moer_routing *routing, const moer_workspace *w) {
    moer_cpu_product product;
    moer_combine_args combine;
    moer_cpu_gate_up(layer, args->x, args->workspace, routing, w);
    moer_cpu_product_begin(&product, layer, &layer->down, routing, w, args->workspace);
    product.x = moer_host(args->workspace + w->h);
    product.x_index = 2;
    product.out = moer_host(args->workspace + w->partial);
    product.out_dtype = MOE_ROUTE_F32;
    moer_cpu_multiply(&product);

    moer_combine_args_layer(&combine, layer, args, routing, w);
    moer_cpu_combine(layer, &combine, MOE_ROUTE_F32);
}

/* The same maps, and the slot rows. */
static void moer_cpu_expert_rows(const moe_route_layer *layer, const moe_route_expert_rows_args *args, const moer_routing *routing, const moer_workspace *w) {
    moer_cpu_product product;
    moer_cpu_gate_up(layer, args->x, args->workspace, routing, w);
    moer_cpu_product_begin(&product, layer, &layer->down, routing, w, args->workspace);
    product.x = moer_host(args->workspace + w->h);
    product.x_index = 2;
    product.out = moer_host(args->rows);
    product.out_dtype = layer->rows_dtype;
    product.pair_to_slot_row = (const int32_t *)moer_host(args->workspace + w->slot_rows);
    moer_cpu_multiply(&product);
}

static void moer_cpu_matmul(const moe_route_layer *layer, const moe_route_matmul_args *args, const moer_routing *routing, const moer_workspace *w) {
    const moer_matrix *matrix = args->matrix == MOE_ROUTE_MATRIX_GATE_UP ? &layer->gate_up : &layer->down;
    moer_cpu_product product;
    memset(moer_host(args->out), 0, (size_t)args->num_tokens * layer->router.top_k * matrix->rows * moer_dtype_size(layer->dtype));
    moer_cpu_product_begin(&product, layer, matrix, routing, w, args->workspace);
    product.x = moer_host(args->x);
    product.x_index = args->x_per_pair ? 1 : 0;
    product.out = moer_host(args->out);
    product.out_by_pair = 1;
    moer_cpu_multiply(&product);
}

/* ---- src/operations.c ---- */
/*
  operations.c: the public operations: their arguments are checked here, then they run on the CPU or become launches.
*/

/* ---- checking arguments ---- */

typedef struct moer_call { /* what is being checked, for messages */
    const moe_route_layer *layer;
    const char *function;
} moer_call;

static moe_route_status moer_call_begin(const moer_call *call, const void *args, uint32_t operation, const char *operation_name) {
    moe_route_context *context = call->layer->context;
    if (args == NULL) return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "%s: args is NULL", call->function);
    if (!(call->layer->operations & operation))
        return moer_fail(context, MOE_ROUTE_ERROR_NOT_PREPARED, "%s: the layer was created without MOE_ROUTE_OPERATION_%s; add it to operations in its description", call->function, operation_name);
    if (context->device == MOE_ROUTE_DEVICE_COMPILE)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "%s: the context only compiles (MOE_ROUTE_DEVICE_COMPILE); nothing can be run", call->function);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_check_tokens(const moer_call *call, uint32_t num_tokens) {
    if (num_tokens <= call->layer->max_tokens) return MOE_ROUTE_OK;
    return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: num_tokens is %u; allowed is 0 to the layer's max_tokens, %u", call->function, (unsigned)num_tokens,
                     (unsigned)call->layer->max_tokens);
}

static moe_route_status moer_check_address(const moer_call *call, const char *name, moe_route_address address, int required, uint32_t alignment) {
    if (required && address == 0) return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: %s is 0; its address is needed", call->function, name);
    if (address % alignment != 0)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: %s is 0x%llx; allowed is a multiple of %u", call->function, name, address, (unsigned)alignment);
    return MOE_ROUTE_OK;
}

/* What the combine adds beside the experts. */
static moe_route_status moer_check_additions(const moer_call *call, moe_route_address shared, moe_route_address weights, moe_route_address residual) {
    const uint32_t alignment = moer_row_alignment(call->layer->hidden_size, call->layer->dtype);
    moe_route_status status = moer_check_address(call, "shared_output", shared, weights != 0, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "shared_output_weights", weights, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "residual", residual, 0, alignment);
    return status;
}

static moe_route_status moer_check_workspace(const moer_call *call, uint32_t num_tokens, moe_route_address address, size_t size, moer_workspace *w) {
    moer_workspace_lay_out(call->layer, num_tokens, w); /* fits: it did at max_tokens */
    if (size < w->size)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: workspace_size is %llu; needed is at least %llu for %u tokens", call->function, (unsigned long long)size,
                         (unsigned long long)w->size, (unsigned)num_tokens);
    return moer_check_address(call, "workspace", address, 1, 256);
}

static moe_route_status moer_check_maps(const moer_call *call, uint32_t num_tokens, const moe_route_expert_maps *maps, moer_routing *routing) {
    const struct { const char *name; moe_route_address address; } outputs[10] = {
        {"maps.expert_offsets", maps->expert_offsets}, {"maps.row_to_pair", maps->row_to_pair}, {"maps.pair_to_row", maps->pair_to_row},
        {"maps.row_to_expert", maps->row_to_expert}, {"maps.distinct_experts", maps->distinct_experts}, {"maps.distinct_offsets", maps->distinct_offsets},
        {"maps.distinct_count", maps->distinct_count}, {"maps.aligned_row_to_pair", maps->aligned_row_to_pair}, {"maps.block_to_expert", maps->block_to_expert},
        {"maps.aligned_rows", maps->aligned_rows}};
    const size_t capacity = moe_route_aligned_capacity(call->layer, num_tokens, maps->block_size);
    moe_route_status load_status = moer_check_address(call, "maps.expert_load", maps->expert_load, 0, 8);
    int i;
    if (load_status != MOE_ROUTE_OK) return load_status;
    if (maps->expert_load != 0) routing->any_map = 1;
    for (i = 0; i < 10; i++) {
        const moe_route_status status = moer_check_address(call, outputs[i].name, outputs[i].address, 0, 4);
        if (status != MOE_ROUTE_OK) return status;
        if (outputs[i].address == 0) continue;
        routing->any_map = 1;
        if (i >= 7 && maps->block_size == 0)
            return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: maps.block_size is 0; %s needs a block size", call->function, outputs[i].name);
    }
    if (maps->block_size != 0 && num_tokens != 0 && capacity == 0)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: maps.block_size is %u; the aligned rows of %u tokens would exceed 2147483647", call->function,
                         (unsigned)maps->block_size, (unsigned)num_tokens);
    routing->maps.expert_offsets = maps->expert_offsets;
    routing->maps.row_to_pair = maps->row_to_pair;
    routing->maps.pair_to_row = maps->pair_to_row;
    routing->maps.row_to_expert = maps->row_to_expert;
    routing->maps.distinct_experts = maps->distinct_experts;
    routing->maps.distinct_offsets = maps->distinct_offsets;
    routing->maps.distinct_count = maps->distinct_count;
    routing->maps.aligned_row_to_pair = maps->aligned_row_to_pair;
    routing->maps.block_to_expert = maps->block_to_expert;
    routing->maps.aligned_rows = maps->aligned_rows;
    routing->maps.expert_load = maps->expert_load;
    routing->maps.block_size = maps->block_size;
    routing->maps.aligned_capacity = (unsigned int)capacity;
    return MOE_ROUTE_OK;
}

/* What a router reads and writes in any call. */
static moe_route_status moer_check_routing(const moer_call *call, uint32_t num_tokens, const moer_routing *routing, int ids_required) {
    const moer_router *router = &call->layer->router;
    const int any = num_tokens != 0;
    moe_route_status status = moer_check_address(call, "logits", routing->logits, any, (uint32_t)moer_dtype_size(router->logits_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "ids", routing->ids, any && (ids_required || router->ids == MOE_ROUTE_IDS_GIVEN), 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "weights", routing->weights, 0, (uint32_t)moer_dtype_size(router->weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "shared_weights", routing->shared_weights, 0, (uint32_t)moer_dtype_size(router->weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(call, "token_ids", routing->token_ids, any && router->ids == MOE_ROUTE_IDS_TABLE, 4);
    if (status == MOE_ROUTE_OK && routing->shared_weights != 0 && router->num_shared_experts == 0)
        return moer_fail(call->layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: shared_weights is given; the router has no shared experts", call->function);
    return status;
}

static int moer_is_cpu(const moe_route_layer *layer) { return layer->context->device == MOE_ROUTE_DEVICE_CPU; }

/* ---- sizes ---- */

MOE_ROUTE_API moe_route_status moe_route_layer_workspace_size(const moe_route_layer *layer, uint32_t num_tokens, size_t *size) {
    moer_call call;
    moer_workspace workspace;
    moe_route_status status;
    if (size != NULL) *size = 0;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_layer_workspace_size";
    if (size == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: size is NULL", call.function);
    status = moer_check_tokens(&call, num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    moer_workspace_lay_out(layer, num_tokens, &workspace);
    *size = workspace.size;
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API size_t moe_route_aligned_capacity(const moe_route_layer *layer, uint32_t num_tokens, uint32_t block_size) {
    uint64_t capacity;
    if (layer == NULL || block_size == 0 || num_tokens > layer->max_tokens) return 0;
    capacity = (uint64_t)num_tokens * layer->router.top_k + (uint64_t)moer_layer_max_distinct(layer, num_tokens) * (block_size - 1);
    capacity = capacity / block_size * block_size; /* each expert's padding ends at a multiple, so no partial block is needed */
    return capacity <= 2147483647u ? (size_t)capacity : 0;
}

/* ---- the fused layer ---- */

static void moer_layer_routing(const moe_route_layer_args *args, const moer_workspace *w, moer_routing *routing) {
    memset(routing, 0, sizeof *routing);
    routing->logits = args->logits;
    routing->ids = args->ids != 0 ? args->ids : args->workspace + w->ids;
    routing->weights = args->weights != 0 ? args->weights : args->workspace + w->weights;
    routing->shared_weights = args->shared_weights;
    routing->token_ids = args->token_ids;
    routing->num_valid_tokens = args->num_valid_tokens;
    moer_routing_layer_maps(routing, w, args->workspace);
    routing->maps.expert_load = args->expert_load;
}

static void moer_sequence_layer(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_layer_args *args, const moer_workspace *w) {
    moer_routing routing;
    moer_layer_routing(args, w, &routing);
    moer_sequence_route(sequence, layer, args->logits != 0 ? layer->route_layer : layer->route_given, args->num_tokens, &routing, w, args->workspace);
    moer_sequence_experts(sequence, layer, args, &routing, w);
}

MOE_ROUTE_API moe_route_status moe_route_layer_run(const moe_route_layer *layer, const moe_route_layer_args *args) {
    moer_call call;
    moer_workspace w;
    moer_routing routing;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment;
    int given;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_layer_run";
    given = args != NULL && args->logits == 0;
    if (given && args->ids == 0 && !(layer->operations & MOE_ROUTE_OPERATION_EXPERTS)) given = 0; /* logits were forgotten */
    status = moer_call_begin(&call, args, given ? MOE_ROUTE_OPERATION_EXPERTS : MOE_ROUTE_OPERATION_LAYER, given ? "EXPERTS" : "LAYER");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK || args->num_tokens == 0) return status;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    memset(&routing, 0, sizeof routing);
    routing.logits = args->logits;
    routing.ids = args->ids;
    routing.weights = args->weights;
    routing.shared_weights = args->shared_weights;
    routing.token_ids = args->token_ids;
    if (given) {
        status = moer_check_address(&call, "ids", args->ids, 1, 4);
        if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, 1, (uint32_t)moer_dtype_size(layer->router.weights_dtype));
        if (status == MOE_ROUTE_OK && args->shared_weights != 0)
            return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: shared_weights is given; it is an output with logits alone", call.function);
    } else {
        status = moer_check_routing(&call, args->num_tokens, &routing, 0);
    }
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "expert_load", args->expert_load, 0, 8);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "y", args->y, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_additions(&call, args->shared_output, args->shared_output_weights, args->residual);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;

    if (moer_is_cpu(layer)) {
        moer_layer_routing(args, &w, &routing);
        routing.maps.expert_offsets = args->workspace + w.expert_offsets;
        moer_cpu_route(layer, args->num_tokens, &routing);
        moer_cpu_experts(layer, args, &routing, &w);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_layer(&sequence, layer, args, &w);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

/* ---- router and maps ---- */

/* Both operations after their own checks; logits are 0 for given ids. `small` is the variant for few pairs. */
static moe_route_status moer_run_routing(const moer_call *call, uint32_t num_tokens, moer_routing *routing, const moe_route_expert_maps *maps, moe_route_address workspace,
                                         size_t workspace_size, moe_route_stream stream, const moer_variant *small) {
    const moe_route_layer *layer = call->layer;
    moer_workspace w;
    moer_sequence sequence;
    moe_route_status status = moer_check_address(call, "num_valid_tokens", routing->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_maps(call, num_tokens, maps, routing);
    if (status != MOE_ROUTE_OK) return status;
    if (!routing->any_map && (num_tokens == 0 || routing->logits == 0)) return MOE_ROUTE_OK; /* with maps their counts are still owed: zeros */
    memset(&w, 0, sizeof w);
    if (!moer_is_cpu(layer) && routing->any_map && num_tokens * layer->router.top_k > MOER_SMALL_PAIRS) {
        status = moer_check_workspace(call, num_tokens, workspace, workspace_size, &w);
        if (status != MOE_ROUTE_OK) return status;
    }
    if (moer_is_cpu(layer)) {
        moer_cpu_route(layer, num_tokens, routing);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_route(&sequence, layer, small, num_tokens, routing, &w, workspace);
    return moer_sequence_launch(layer, &sequence, stream);
}

MOE_ROUTE_API moe_route_status moe_route_route(const moe_route_layer *layer, const moe_route_route_args *args) {
    moer_call call;
    moer_routing routing;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_route";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_ROUTE, "ROUTE");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    memset(&routing, 0, sizeof routing);
    routing.logits = args->logits;
    routing.ids = args->ids;
    routing.weights = args->weights;
    routing.shared_weights = args->shared_weights;
    routing.token_ids = args->token_ids;
    routing.num_valid_tokens = args->num_valid_tokens;
    status = moer_check_routing(&call, args->num_tokens, &routing, 1);
    if (status != MOE_ROUTE_OK) return status;
    return moer_run_routing(&call, args->num_tokens, &routing, &args->maps, args->workspace, args->workspace_size, args->stream, layer->route_all);
}

MOE_ROUTE_API moe_route_status moe_route_maps(const moe_route_layer *layer, const moe_route_maps_args *args) {
    moer_call call;
    moer_routing routing;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_maps";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_MAPS, "MAPS");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    status = moer_check_address(&call, "ids", args->ids, args->num_tokens != 0, 4);
    if (status != MOE_ROUTE_OK) return status;
    memset(&routing, 0, sizeof routing);
    routing.ids = args->ids;
    routing.num_valid_tokens = args->num_valid_tokens;
    return moer_run_routing(&call, args->num_tokens, &routing, &args->maps, args->workspace, args->workspace_size, args->stream, layer->maps_all);
}

/* ---- one expert matmul, expand, combine ---- */

static void moer_matmul_routing(const moe_route_matmul_args *args, const moer_workspace *w, moer_routing *routing) {
    memset(routing, 0, sizeof *routing);
    routing->ids = args->ids;
    routing->num_valid_tokens = args->num_valid_tokens;
    moer_routing_layer_maps(routing, w, args->workspace);
}

MOE_ROUTE_API moe_route_status moe_route_matmul(const moe_route_layer *layer, const moe_route_matmul_args *args) {
    moer_call call;
    moer_workspace w;
    moer_routing routing;
    moer_sequence sequence;
    const moer_matrix *matrix;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_matmul";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_MATMUL, "MATMUL");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    if (args->matrix != MOE_ROUTE_MATRIX_GATE_UP && args->matrix != MOE_ROUTE_MATRIX_DOWN)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: matrix is %d; allowed is GATE_UP (0) or DOWN (1)", call.function, (int)args->matrix);
    matrix = args->matrix == MOE_ROUTE_MATRIX_GATE_UP ? &layer->gate_up : &layer->down;
    if (matrix->format == MOE_ROUTE_FORMAT_NONE)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: matrix is %d; the layer was created without these weights", call.function, (int)args->matrix);
    if (args->num_tokens == 0) return MOE_ROUTE_OK;
    status = moer_check_address(&call, "ids", args->ids, 1, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, 1, moer_row_alignment(matrix->inner, layer->dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "out", args->out, 1, moer_row_alignment(matrix->rows, layer->dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;
    moer_matmul_routing(args, &w, &routing);
    if (moer_is_cpu(layer)) {
        routing.maps.expert_offsets = args->workspace + w.expert_offsets;
        moer_cpu_route(layer, args->num_tokens, &routing);
        moer_cpu_matmul(layer, args, &routing, &w);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_route(&sequence, layer, layer->route_given, args->num_tokens, &routing, &w, args->workspace);
    moer_sequence_matmul(&sequence, layer, args, &routing);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

MOE_ROUTE_API moe_route_status moe_route_expand(const moe_route_layer *layer, const moe_route_expand_args *args) {
    moer_call call;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_expand";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_EXPAND, "EXPAND");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK || args->num_tokens == 0) return status;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    status = moer_check_address(&call, "x", args->x, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_to_pair", args->row_to_pair, 1, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "rows", args->rows, 1, alignment);
    if (status != MOE_ROUTE_OK) return status;
    if (moer_is_cpu(layer)) {
        moer_cpu_expand(moer_host(args->x), (const int32_t *)moer_host(args->row_to_pair), moer_host(args->rows), layer->hidden_size * moer_dtype_size(layer->dtype),
                        args->num_tokens * layer->router.top_k, layer->router.top_k);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_expand(&sequence, layer, args);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

MOE_ROUTE_API moe_route_status moe_route_combine(const moe_route_layer *layer, const moe_route_combine_args *args) {
    moer_call call;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment;
    int identity;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_combine";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_COMBINE, "COMBINE");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK || args->num_tokens == 0) return status;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    identity = layer->router.num_identity != 0;
    status = moer_check_address(&call, "rows", args->rows, 1, moer_row_alignment(layer->hidden_size, layer->rows_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "pair_to_row", args->pair_to_row, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, identity || !(layer->weight_on_input || args->weighted_rows), (uint32_t)moer_dtype_size(layer->router.weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "y", args->y, 1, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "ids", args->ids, identity, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, identity, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_additions(&call, args->shared_output, args->shared_output_weights, args->residual);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status != MOE_ROUTE_OK) return status;
    if (moer_is_cpu(layer)) {
        moer_combine_args combine;
        moer_combine_args_given(&combine, layer, args);
        moer_cpu_combine(layer, &combine, layer->rows_dtype);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_combine(&sequence, layer, args);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

/* ---- src/ranks.c ---- */
/*
  ranks.c: the operations of expert parallelism: what goes to which rank, and the rows that come back. Their launches and
  arguments, checked here; the exchange itself is the caller's. Combining what came back is an operation of operations.c.
*/

MOE_ROUTE_API void moe_route_rank_range(uint32_t num_physical_experts, uint32_t num_ranks, uint32_t rank, uint32_t *first, uint32_t *count) {
    const uint32_t each = num_ranks != 0 ? num_physical_experts / num_ranks : 0, more = num_ranks != 0 ? num_physical_experts % num_ranks : 0;
    const int exists = rank < num_ranks;
    if (first != NULL) *first = exists ? rank * each + (rank < more ? rank : more) : num_physical_experts;
    if (count != NULL) *count = exists ? each + (rank < more) : 0;
}

/* ---- dispatch ---- */

static void moer_dispatch_args_of(moer_dispatch_args *args, const moe_route_layer *layer, const moe_route_dispatch_args *from) {
    memset(args, 0, sizeof *args);
    args->ids = from->ids;
    args->weights = from->weights;
    args->x = from->x;
    args->num_valid_tokens = from->num_valid_tokens;
    args->expert_map = layer->router.expert_map;
    args->counts = from->counts;
    args->offsets = from->offsets;
    args->rows = from->rows;
    args->row_ids = from->row_ids;
    args->row_weights = from->row_weights;
    args->row_to_token = from->row_to_token;
    args->pair_to_row = from->pair_to_row;
    args->pair_to_slot_row = from->pair_to_slot_row;
    args->num_tokens = from->num_tokens;
    args->capacity = from->capacity;
    args->slot_capacity = from->slot_capacity != 0 ? from->slot_capacity : from->capacity * layer->router.top_k;
    memcpy(args->rank_begin, layer->rank_begin, sizeof layer->rank_begin);
}

static int moer_dispatch_is_large(const moe_route_layer *layer, uint32_t num_tokens) { return num_tokens * layer->router.top_k > MOER_DISPATCH_PAIRS; }

static void moer_sequence_dispatch(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_dispatch_args *from, const moer_workspace *w) {
    const uint32_t units = (uint32_t)(layer->hidden_size * moer_dtype_size(layer->dtype)) / moer_expand_unit(layer);
    const uint32_t width = from->rows != 0 ? moer_divide_up(units, 256) : 1;
    if (moer_dispatch_is_large(layer, from->num_tokens)) {
        const uint32_t shares = moer_dispatch_shares(layer, from->num_tokens, width);
        uint32_t i;
        for (i = 0; i < 2; i++) {
            moer_launch *launch = moer_sequence_add(sequence, layer->dispatch_large, i, i == 0 ? shares : width, i == 0 ? 1 : shares, 256);
            moer_dispatch_args_of(&launch->args.dispatch, layer, from);
            launch->args.dispatch.block_counts = from->workspace + w->dispatch_counts;
        }
    } else {
        const uint32_t height = from->num_tokens < 1 ? 1 : from->num_tokens < 512 ? from->num_tokens : 512;
        moer_launch *launch = moer_sequence_add(sequence, layer->dispatch, 0, width, height, 256);
        moer_dispatch_args_of(&launch->args.dispatch, layer, from);
    }
}

/* The sizes of the outputs, which are numbered in 31 bits. */
static moe_route_status moer_check_capacity(const moer_call *call, const moe_route_dispatch_args *args) {
    const moe_route_layer *layer = call->layer;
    const uint64_t top_k = layer->router.top_k, limit = 2147483647u / layer->num_ranks;
    if (args->capacity * top_k > limit)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: capacity is %u; allowed is 0 to %u with %u ranks and top_k %u", call->function, (unsigned)args->capacity,
                         (unsigned)(limit / top_k), (unsigned)layer->num_ranks, (unsigned)top_k);
    if (args->slot_capacity > args->capacity * top_k)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: slot_capacity is %u; allowed is 0 to %u, capacity * top_k", call->function, (unsigned)args->slot_capacity,
                         (unsigned)(args->capacity * top_k));
    return MOE_ROUTE_OK;
}

MOE_ROUTE_API moe_route_status moe_route_dispatch(const moe_route_layer *layer, const moe_route_dispatch_args *args) {
    moer_call call;
    moer_workspace w;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t alignment, weight_size;
    int any;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_dispatch";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_DISPATCH, "DISPATCH");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status == MOE_ROUTE_OK) status = moer_check_capacity(&call, args);
    if (status != MOE_ROUTE_OK) return status;
    any = args->num_tokens != 0;
    alignment = moer_row_alignment(layer->hidden_size, layer->dtype);
    weight_size = (uint32_t)moer_dtype_size(layer->router.weights_dtype);
    status = moer_check_address(&call, "ids", args->ids, any, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, any && args->row_weights != 0, weight_size);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, any && args->rows != 0, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "counts", args->counts, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "offsets", args->offsets, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "rows", args->rows, 0, alignment);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_ids", args->row_ids, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_weights", args->row_weights, 0, weight_size);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "row_to_token", args->row_to_token, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "pair_to_row", args->pair_to_row, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "pair_to_slot_row", args->pair_to_slot_row, 0, 4);
    memset(&w, 0, sizeof w);
    if (status == MOE_ROUTE_OK && moer_dispatch_is_large(layer, args->num_tokens)) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;
    if (moer_is_cpu(layer)) {
        moer_dispatch_args dispatch;
        moer_dispatch_args_of(&dispatch, layer, args);
        moer_cpu_dispatch(layer, &dispatch);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_dispatch(&sequence, layer, args, &w);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

/* ---- expert rows ---- */

static void moer_slots_args_of(moer_slots_args *args, const moe_route_layer *layer, const moe_route_expert_rows_args *from, const moer_workspace *w) {
    const uint32_t sources = from->num_sources != 0 ? from->num_sources : 1;
    memset(args, 0, sizeof *args);
    args->ids = from->ids;
    args->num_valid_tokens = from->num_valid_tokens;
    args->expert_map = layer->router.expert_map;
    args->pair_to_slot_row = from->workspace + w->slot_rows;
    args->num_tokens = from->num_tokens;
    args->source_pairs = from->num_tokens / sources * layer->router.top_k;
    args->source_rows = from->num_rows / sources;
}

static void moer_expert_rows_routing(const moe_route_expert_rows_args *args, const moer_workspace *w, moer_routing *routing) {
    memset(routing, 0, sizeof *routing);
    routing->ids = args->ids;
    routing->weights = args->weights;
    routing->num_valid_tokens = args->num_valid_tokens;
    moer_routing_layer_maps(routing, w, args->workspace);
}

static void moer_sequence_expert_rows(moer_sequence *sequence, const moe_route_layer *layer, const moe_route_expert_rows_args *from, const moer_routing *routing, const moer_workspace *w) {
    const uint32_t num_pairs = from->num_tokens * layer->router.top_k, distinct = moer_layer_max_distinct(layer, from->num_tokens);
    const int many = moer_layer_has_many_rows(layer, num_pairs);
    moer_matmul_args *args;
    moer_sequence_route(sequence, layer, layer->route_given, from->num_tokens, routing, w, from->workspace);
    moer_slots_args_of(&moer_sequence_add(sequence, layer->slots, 0, from->num_sources != 0 ? from->num_sources : 1, 1, 512)->args.slots, layer, from, w);
    moer_sequence_gate_up(sequence, layer, from->x, from->workspace + w->h, num_pairs, 0, routing);
    args = &moer_sequence_add_matmul(sequence, layer, layer->down_slots[many], &layer->down, distinct, layer->down_parts)->args.matmul;
    moer_matmul_args_matrix(args, &layer->down, &routing->maps);
    args->pair_to_slot_row = from->workspace + w->slot_rows;
    args->x = from->workspace + w->h;
    args->out = from->rows;
    args->num_pairs = num_pairs;
}

MOE_ROUTE_API moe_route_status moe_route_expert_rows(const moe_route_layer *layer, const moe_route_expert_rows_args *args) {
    moer_call call;
    moer_workspace w;
    moer_routing routing;
    moer_sequence sequence;
    moe_route_status status;
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_expert_rows";
    status = moer_call_begin(&call, args, MOE_ROUTE_OPERATION_EXPERT_ROWS, "EXPERT_ROWS");
    if (status == MOE_ROUTE_OK) status = moer_check_tokens(&call, args->num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    if (args->num_rows > 2147483647u)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: num_rows is %u; allowed is 0 to 2147483647", call.function, (unsigned)args->num_rows);
    if (args->num_sources > 1 && (args->num_tokens % args->num_sources != 0 || args->num_rows % args->num_sources != 0))
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: num_sources is %u; allowed is a divisor of num_tokens, %u, and of num_rows, %u", call.function, (unsigned)args->num_sources,
                         (unsigned)args->num_tokens, (unsigned)args->num_rows);
    if (args->num_tokens == 0 || args->num_rows == 0) return MOE_ROUTE_OK;
    status = moer_check_address(&call, "ids", args->ids, 1, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "weights", args->weights, layer->weight_on_input, (uint32_t)moer_dtype_size(layer->router.weights_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "x", args->x, 1, moer_row_alignment(layer->hidden_size, layer->dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "rows", args->rows, 1, moer_row_alignment(layer->hidden_size, layer->rows_dtype));
    if (status == MOE_ROUTE_OK) status = moer_check_address(&call, "num_valid_tokens", args->num_valid_tokens, 0, 4);
    if (status == MOE_ROUTE_OK) status = moer_check_workspace(&call, args->num_tokens, args->workspace, args->workspace_size, &w);
    if (status != MOE_ROUTE_OK) return status;
    moer_expert_rows_routing(args, &w, &routing);
    if (moer_is_cpu(layer)) {
        moer_slots_args slots;
        routing.maps.expert_offsets = args->workspace + w.expert_offsets;
        moer_slots_args_of(&slots, layer, args, &w);
        moer_cpu_route(layer, args->num_tokens, &routing);
        moer_cpu_slots(&layer->router, &slots);
        moer_cpu_expert_rows(layer, args, &routing, &w);
        return MOE_ROUTE_OK;
    }
    sequence.num_launches = 0;
    moer_sequence_expert_rows(&sequence, layer, args, &routing, &w);
    return moer_sequence_launch(layer, &sequence, args->stream);
}

/* ---- src/explain.c ---- */
/*
  explain.c: what a layer will launch and which variants it has, as fields and as text.
*/

/* The operation's launches with addresses that are only there to be "given". */
static moe_route_status moer_explain_sequence(const moe_route_layer *layer, moe_route_operation operation, uint32_t num_tokens, const moer_workspace *w, moer_sequence *sequence) {
    moe_route_layer_args run;
    moe_route_matmul_args matmul;
    moe_route_expand_args expand;
    moe_route_combine_args combine;
    moe_route_dispatch_args dispatch;
    moe_route_expert_rows_args rows;
    moer_routing routing;
    const moe_route_address given = 256;
    memset(&run, 0, sizeof run);
    memset(&matmul, 0, sizeof matmul);
    memset(&expand, 0, sizeof expand);
    memset(&combine, 0, sizeof combine);
    memset(&dispatch, 0, sizeof dispatch);
    memset(&rows, 0, sizeof rows);
    memset(&routing, 0, sizeof routing);
    run.num_tokens = matmul.num_tokens = expand.num_tokens = combine.num_tokens = dispatch.num_tokens = rows.num_tokens = num_tokens;
    dispatch.rows = given;
    switch (operation) {
    case MOE_ROUTE_OPERATION_LAYER:
    case MOE_ROUTE_OPERATION_EXPERTS:
        run.logits = operation == MOE_ROUTE_OPERATION_LAYER ? given : 0;
        moer_sequence_layer(sequence, layer, &run, w);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_ROUTE:
    case MOE_ROUTE_OPERATION_MAPS:
        routing.logits = operation == MOE_ROUTE_OPERATION_ROUTE ? given : 0;
        routing.any_map = 1;
        moer_sequence_route(sequence, layer, operation == MOE_ROUTE_OPERATION_ROUTE ? layer->route_all : layer->maps_all, num_tokens, &routing, w, 0);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_MATMUL:
        matmul.matrix = layer->gate_up.format != MOE_ROUTE_FORMAT_NONE ? MOE_ROUTE_MATRIX_GATE_UP : MOE_ROUTE_MATRIX_DOWN;
        moer_matmul_routing(&matmul, w, &routing);
        moer_sequence_route(sequence, layer, layer->route_given, num_tokens, &routing, w, 0);
        moer_sequence_matmul(sequence, layer, &matmul, &routing);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_EXPAND:
        moer_sequence_expand(sequence, layer, &expand);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_COMBINE:
        moer_sequence_combine(sequence, layer, &combine);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_DISPATCH:
        moer_sequence_dispatch(sequence, layer, &dispatch, w);
        return MOE_ROUTE_OK;
    case MOE_ROUTE_OPERATION_EXPERT_ROWS:
        moer_expert_rows_routing(&rows, w, &routing);
        moer_sequence_expert_rows(sequence, layer, &rows, &routing, w);
        return MOE_ROUTE_OK;
    default:
        return MOE_ROUTE_ERROR_ARGUMENT;
    }
}

MOE_ROUTE_API moe_route_status moe_route_layer_explain(const moe_route_layer *layer, moe_route_operation operation, uint32_t num_tokens, moe_route_plan *plan) {
    moer_call call;
    moer_workspace w;
    moer_sequence sequence;
    moe_route_status status;
    uint32_t i;
    if (plan != NULL) memset(plan, 0, sizeof *plan);
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    call.layer = layer;
    call.function = "moe_route_layer_explain";
    if (plan == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "%s: plan is NULL", call.function);
    if (!(layer->operations & (uint32_t)operation) || ((uint32_t)operation & ((uint32_t)operation - 1)) != 0)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_NOT_PREPARED, "%s: operation is %d; allowed is one of the operations that the layer was created for (%u)", call.function, (int)operation,
                         (unsigned)layer->operations);
    status = moer_check_tokens(&call, num_tokens);
    if (status != MOE_ROUTE_OK) return status;
    moer_workspace_lay_out(layer, num_tokens, &w);
    plan->workspace_size = w.size;
    if (moer_is_cpu(layer) || num_tokens == 0) return MOE_ROUTE_OK;
    sequence.num_launches = 0;
    status = moer_explain_sequence(layer, operation, num_tokens, &w, &sequence);
    if (status != MOE_ROUTE_OK) return status;
    plan->num_launches = sequence.num_launches;
    plan->tuned = layer->tuned && (operation == MOE_ROUTE_OPERATION_LAYER || operation == MOE_ROUTE_OPERATION_EXPERTS);
    for (i = 0; i < sequence.num_launches; i++) {
        const moer_launch *launch = &sequence.launches[i];
        moe_route_launch_info *info = &plan->launches[i];
        moer_append(info->kernel, sizeof info->kernel, "%s", launch->variant->family->entries[launch->entry] + strlen("moe_route_"));
        moer_append(info->variant, sizeof info->variant, "%s", launch->variant->defines);
        memcpy(info->grid, launch->grid, sizeof info->grid);
        info->block = launch->block;
        info->shared_bytes = (uint32_t)launch->variant->static_shared_bytes[launch->entry] + launch->variant->dynamic_shared_bytes;
        info->dependent = layer->dependent;
        info->weight_bytes = launch->weight_bytes;
    }
    return MOE_ROUTE_OK;
}

/* Appends and counts as snprintf would, also past the end. */
static size_t moer_text_add(char *text, size_t size, size_t length, const char *format, ...) MOER_PRINTF(4, 5);
static size_t moer_text_add(char *text, size_t size, size_t length, const char *format, ...) {
    va_list arguments;
    int added;
    va_start(arguments, format);
    added = vsnprintf(length < size ? text + length : NULL, length < size ? size - length : 0, format, arguments);
    va_end(arguments);
    return added > 0 ? length + (size_t)added : length;
}

MOE_ROUTE_API size_t moe_route_plan_text(const moe_route_plan *plan, char *text, size_t size) {
    size_t length = 0;
    uint32_t i;
    if (text == NULL) size = 0;
    if (size > 0) text[0] = 0;
    if (plan == NULL) return 0;
    for (i = 0; i < plan->num_launches; i++) {
        const moe_route_launch_info *info = &plan->launches[i];
        length = moer_text_add(text, size, length, "%-16s %5u x %-4u blocks of %4u threads, %5u B shared, %9.3f MB of weights at most%s  [%s]\n", info->kernel, (unsigned)info->grid[0],
                               (unsigned)info->grid[1], (unsigned)info->block, (unsigned)info->shared_bytes, (double)info->weight_bytes * 1e-6, info->dependent ? ", dependent" : "",
                               info->variant);
    }
    if (plan->num_launches == 0) length = moer_text_add(text, size, length, "no launches\n");
    if (plan->tuned) length = moer_text_add(text, size, length, "kernels chosen by tuning\n");
    return moer_text_add(text, size, length, "workspace: %llu bytes\n", (unsigned long long)plan->workspace_size);
}

MOE_ROUTE_API uint32_t moe_route_layer_num_variants(const moe_route_layer *layer) { return layer != NULL ? layer->num_variants : 0; }

MOE_ROUTE_API moe_route_status moe_route_layer_variant(const moe_route_layer *layer, uint32_t index, moe_route_variant_info *info) {
    const moer_variant *variant;
    if (info != NULL) memset(info, 0, sizeof *info);
    if (layer == NULL) return MOE_ROUTE_ERROR_ARGUMENT;
    if (info == NULL) return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_variant: info is NULL");
    if (index >= layer->num_variants)
        return moer_fail(layer->context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_variant: index is %u; the layer has %u variants, numbered from 0", (unsigned)index, (unsigned)layer->num_variants);
    variant = layer->variants[index];
    moer_append(info->kernel, sizeof info->kernel, "%s", variant->family->name);
    moer_append(info->variant, sizeof info->variant, "%s", variant->defines);
    info->origin = variant->origin;
    info->milliseconds = variant->milliseconds;
    info->cubin_size = variant->cubin_size;
    return MOE_ROUTE_OK;
}

/* ---- src/tune.c ---- */
/*
  tune.c: measures the kernels between which choices.c chooses, on the GPU at hand, with the layer's own weights and random tokens.

  Each candidate is the whole layer with one choice everywhere. Where few tokens reuse few experts, the calls of a graph go
  through different tokens, so that weights come from memory as they do in a model. What runs without tuning is measured before and
  after its rivals, since clocks rise meanwhile, and stays unless a rival is clearly faster and gives the same bits.
*/

#define MOER_TUNE_MAX_TOKENS 16384u /* beyond, the choice there holds */
#define MOER_TUNE_CALLS 16u         /* in a graph of few tokens, each with tokens of its own */
#define MOER_TUNE_FEW 64u           /* tokens, for that */
#define MOER_TUNE_REPLAYS 5u
#define MOER_TUNE_SLOW 5000.0       /* microseconds of a call, beyond which fewer repetitions do */
#define MOER_TUNE_GAIN 0.97         /* a rival has to take less than this part of the time */
#define MOER_TUNE_BUFFER ((size_t)1 << 20)

typedef struct moer_candidate {
    const char *name;
    moer_choice choice;
} moer_candidate;

#define MOER_CANDIDATES 5
static const moer_candidate moer_candidates[MOER_CANDIDATES] = {
    {"as without tuning", {0, 0}},
    {"down matmul and combine apart", {1, 0}},
    {"tiles of 32 rows", {0, 32}},
    {"tiles of 64 rows", {0, 64}},
    {"tiles of 128 rows", {0, 128}},
};

typedef struct moer_tune {
    moe_route_context *context;
    const moe_route_layer_desc *desc;
    const moe_route_tune_args *args;
    moe_route_layer *layers[MOER_CANDIDATES];                  /* as they are needed; the first always */
    uint32_t max_tokens, num_rows;                             /* measured at most; tokens that there are */
    size_t x, ids, weights, y, workspace, workspace_size, size; /* places in the memory that the caller gives */
    unsigned char *buffer;                                     /* MOER_TUNE_BUFFER bytes of the host */
    uint64_t random;
    moe_route_stream stream;
    moer_cu_event start, end;
    moe_route_tune_step step;
} moer_tune;

/* ---- memory ---- */

static int moer_tune_lay_out(moer_tune *tune, const moe_route_layer *layer) {
    const size_t element = moer_dtype_size(layer->dtype);
    moe_route_layer apart = *layer;
    moer_workspace places, needed;
    int fits = 1;
    tune->max_tokens = layer->max_tokens < MOER_TUNE_MAX_TOKENS ? layer->max_tokens : MOER_TUNE_MAX_TOKENS;
    tune->num_rows = (tune->max_tokens < MOER_TUNE_FEW ? tune->max_tokens : MOER_TUNE_FEW) * MOER_TUNE_CALLS;
    if (tune->num_rows < tune->max_tokens) tune->num_rows = tune->max_tokens;
    apart.may_separate = 1; /* needs the most */
    fits &= moer_workspace_lay_out(&apart, tune->max_tokens, &needed);
    memset(&places, 0, sizeof places);
    fits &= moer_workspace_take(&places, (size_t)tune->num_rows * layer->hidden_size, element, &tune->x);
    fits &= moer_workspace_take(&places, (size_t)tune->num_rows * layer->router.top_k, 4, &tune->ids);
    fits &= moer_workspace_take(&places, (size_t)tune->num_rows * layer->router.top_k, moer_dtype_size(layer->router.weights_dtype), &tune->weights);
    fits &= moer_workspace_take(&places, (size_t)tune->max_tokens * layer->hidden_size, element, &tune->y);
    fits &= moer_workspace_take(&places, needed.size, 1, &tune->workspace);
    tune->workspace_size = needed.size;
    tune->size = places.size;
    return fits;
}

static uint32_t moer_tune_random(moer_tune *tune, uint32_t below) { /* xorshift64* */
    tune->random ^= tune->random >> 12;
    tune->random ^= tune->random << 25;
    tune->random ^= tune->random >> 27;
    return (uint32_t)(((tune->random * 0x2545f4914f6cdd1dull >> 32) * below) >> 32);
}

static moe_route_status moer_tune_upload(moer_tune *tune, size_t to, size_t size) {
    const moer_driver *driver = &tune->context->driver;
    moer_cu_result result = driver->cuMemcpyHtoDAsync(tune->args->workspace + to, tune->buffer, size, tune->stream);
    if (result != 0) return moer_driver_fail(tune->context, "cuMemcpyHtoDAsync", result);
    result = driver->cuStreamSynchronize(tune->stream); /* the buffer is filled again */
    return result == 0 ? MOE_ROUTE_OK : moer_driver_fail(tune->context, "cuStreamSynchronize", result);
}

/* `count` values between 0 and 1, the same ones again and again: they only have to be ordinary numbers. */
static moe_route_status moer_tune_fill_values(moer_tune *tune, size_t to, size_t count, moe_route_dtype dtype) {
    const size_t size = moer_dtype_size(dtype), most = MOER_TUNE_BUFFER / size;
    moe_route_status status = MOE_ROUTE_OK;
    size_t i;
    for (i = 0; i < most && i < count; i++) moer_store_value(tune->buffer, i, dtype, (float)moer_tune_random(tune, 4096) / 4096.0f);
    while (count > 0 && status == MOE_ROUTE_OK) {
        const size_t part = count < most ? count : most;
        status = moer_tune_upload(tune, to, part * size);
        to += part * size;
        count -= part;
    }
    return status;
}

/* Each token's experts: distinct, each set as likely as any other. */
static moe_route_status moer_tune_fill_ids(moer_tune *tune, const moe_route_layer *layer) {
    const uint32_t top_k = layer->router.top_k, num_experts = layer->router.given_physical ? layer->router.num_physical_experts : layer->router.num_experts;
    const uint32_t most = (uint32_t)(MOER_TUNE_BUFFER / 4 / top_k);
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t done = 0, t, j, i;
    while (done < tune->num_rows && status == MOE_ROUTE_OK) {
        const uint32_t part = tune->num_rows - done < most ? tune->num_rows - done : most;
        for (t = 0; t < part; t++) {
            int32_t *ids = (int32_t *)(void *)tune->buffer + (size_t)t * top_k;
            for (j = 0; j < top_k; j++) { /* Floyd's way to draw a set */
                const uint32_t last = num_experts > top_k ? num_experts - top_k + j : j;
                ids[j] = (int32_t)moer_tune_random(tune, last + 1);
                for (i = 0; i < j && ids[i] != ids[j]; i++) {}
                if (i < j) ids[j] = (int32_t)last;
            }
        }
        status = moer_tune_upload(tune, tune->ids + (size_t)done * top_k * 4, (size_t)part * top_k * 4);
        done += part;
    }
    return status;
}

/* ---- measuring ---- */

/* One call, with the tokens of window `window`. */
static moe_route_status moer_tune_call(const moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, uint32_t window) {
    const size_t row = num_tokens <= MOER_TUNE_FEW ? (size_t)num_tokens * window : 0;
    moe_route_layer_args args;
    memset(&args, 0, sizeof args);
    args.num_tokens = num_tokens;
    args.x = tune->args->workspace + tune->x + row * layer->hidden_size * moer_dtype_size(layer->dtype);
    args.ids = tune->args->workspace + tune->ids + row * layer->router.top_k * 4;
    args.weights = tune->args->workspace + tune->weights + row * layer->router.top_k * moer_dtype_size(layer->router.weights_dtype);
    args.y = tune->args->workspace + tune->y;
    args.workspace = tune->args->workspace + tune->workspace;
    args.workspace_size = tune->workspace_size;
    args.stream = tune->stream;
    return moe_route_layer_run(layer, &args);
}

/* Goes on with a hash over the buffer: any byte that differs makes a difference, and nobody wants to deceive it. */
static uint64_t moer_tune_hash(const moer_tune *tune, size_t size, uint64_t hash) {
    size_t i;
    for (i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, tune->buffer + i, size - i < 8 ? size - i : 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    return hash;
}

/* What a call writes, as a hash. */
static moe_route_status moer_tune_result(moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, uint64_t *hash) {
    const moer_driver *driver = &tune->context->driver;
    const size_t size = (size_t)num_tokens * layer->hidden_size * moer_dtype_size(layer->dtype);
    moe_route_status status = MOE_ROUTE_OK;
    size_t done, part;
    *hash = size;
    memset(tune->buffer, 0xcb, size < MOER_TUNE_BUFFER ? size : MOER_TUNE_BUFFER); /* not what the candidate before has left there */
    for (done = 0; done < size && status == MOE_ROUTE_OK; done += part) {
        part = size - done < MOER_TUNE_BUFFER ? size - done : MOER_TUNE_BUFFER;
        status = moer_tune_upload(tune, tune->y + done, part);
    }
    if (status == MOE_ROUTE_OK) status = moer_tune_call(tune, layer, num_tokens, 0);
    for (done = 0; done < size && status == MOE_ROUTE_OK; done += part) {
        moer_cu_result result;
        part = size - done < MOER_TUNE_BUFFER ? size - done : MOER_TUNE_BUFFER;
        result = driver->cuMemcpyDtoHAsync(tune->buffer, tune->args->workspace + tune->y + done, part, tune->stream);
        if (result != 0) return moer_driver_fail(tune->context, "cuMemcpyDtoHAsync", result);
        result = driver->cuStreamSynchronize(tune->stream);
        if (result != 0) return moer_driver_fail(tune->context, "cuStreamSynchronize", result);
        *hash = moer_tune_hash(tune, part, *hash);
    }
    return status;
}

/* Captures `num_calls` calls. */
static moe_route_status moer_tune_capture(const moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, uint32_t num_calls, moer_cu_graph_exec *graph) {
    const moer_driver *driver = &tune->context->driver;
    moer_cu_graph captured = NULL;
    moe_route_status status = MOE_ROUTE_OK;
    moer_cu_result result = driver->cuStreamBeginCapture(tune->stream, MOER_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    uint32_t i;
    *graph = NULL;
    if (result != 0) return moer_driver_fail(tune->context, "cuStreamBeginCapture", result);
    for (i = 0; i < num_calls && status == MOE_ROUTE_OK; i++) status = moer_tune_call(tune, layer, num_tokens, i);
    result = driver->cuStreamEndCapture(tune->stream, &captured);
    if (status == MOE_ROUTE_OK && result != 0) status = moer_driver_fail(tune->context, "cuStreamEndCapture", result);
    if (status == MOE_ROUTE_OK) {
        result = driver->cuGraphInstantiateWithFlags(graph, captured, 0);
        if (result != 0) {
            *graph = NULL;
            status = moer_driver_fail(tune->context, "cuGraphInstantiateWithFlags", result);
        }
    }
    if (captured != NULL) driver->cuGraphDestroy(captured);
    return status;
}

/* The time from before to after a call, where `graph` is NULL, or a replay. */
static moe_route_status moer_tune_time(const moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, moer_cu_graph_exec graph, double *microseconds) {
    const moer_driver *driver = &tune->context->driver;
    moe_route_status status = MOE_ROUTE_OK;
    float milliseconds = 0.0f;
    const char *call = "cuEventRecord";
    moer_cu_result result = driver->cuEventRecord(tune->start, tune->stream);
    if (result == 0 && graph == NULL) {
        status = moer_tune_call(tune, layer, num_tokens, 0);
        if (status != MOE_ROUTE_OK) return status;
    } else if (result == 0) {
        call = "cuGraphLaunch";
        result = driver->cuGraphLaunch(graph, tune->stream);
    }
    if (result == 0) {
        call = "cuEventRecord";
        result = driver->cuEventRecord(tune->end, tune->stream);
    }
    if (result == 0) {
        call = "cuEventSynchronize";
        result = driver->cuEventSynchronize(tune->end);
    }
    if (result == 0) {
        call = "cuEventElapsedTime";
        result = driver->cuEventElapsedTime(&milliseconds, tune->start, tune->end);
    }
    *microseconds = (double)milliseconds * 1000.0;
    return result == 0 ? status : moer_driver_fail(tune->context, call, result);
}

/* Median time of a call in replays of a graph, and the hash of its result. */
static moe_route_status moer_tune_measure(moer_tune *tune, const moe_route_layer *layer, uint32_t num_tokens, double *microseconds, uint64_t *hash) {
    double times[MOER_TUNE_REPLAYS], time = 0.0;
    moer_cu_graph_exec graph = NULL;
    uint32_t num_calls, num_replays, warm, i, j;
    moe_route_status status = moer_tune_result(tune, layer, num_tokens, hash);
    if (status == MOE_ROUTE_OK) status = moer_tune_time(tune, layer, num_tokens, NULL, &time);
    if (status != MOE_ROUTE_OK) return status;
    num_calls = time > MOER_TUNE_SLOW ? 1 : num_tokens <= MOER_TUNE_FEW ? MOER_TUNE_CALLS : 4;
    num_replays = time > MOER_TUNE_SLOW ? 3 : MOER_TUNE_REPLAYS;
    warm = time > MOER_TUNE_SLOW ? 0 : 1;
    status = moer_tune_capture(tune, layer, num_tokens, num_calls, &graph);
    for (i = 0; i < warm + num_replays && status == MOE_ROUTE_OK; i++) {
        status = moer_tune_time(tune, layer, num_tokens, graph, &time);
        if (i < warm) continue;
        for (j = i - warm; j > 0 && times[j - 1] > time; j--) times[j] = times[j - 1];
        times[j] = time;
    }
    if (graph != NULL) tune->context->driver.cuGraphExecDestroy(graph);
    if (status == MOE_ROUTE_OK) *microseconds = times[num_replays / 2] / num_calls;
    return status;
}

/* ---- choosing ---- */

/* Whether a candidate is another kernel than what runs without tuning. */
static int moer_tune_is_rival(const moer_tune *tune, uint32_t candidate, int large, uint32_t num_tokens) {
    const moe_route_layer *layer = tune->layers[0];
    const moer_choice *choice = &moer_candidates[candidate].choice;
    const uint32_t num_pairs = num_tokens * layer->router.top_k;
    if (choice->separate) return !large && moer_layer_fuses(layer, num_pairs);
    return choice->tile_rows != 0 && moer_layer_runs_grouped(layer, num_pairs) && choice->tile_rows / 64u != moer_grouped_tile(layer, num_pairs);
}

static uint32_t moer_tune_num_rivals(const moer_tune *tune, int large, uint32_t num_tokens) {
    uint32_t candidate, count = 0;
    for (candidate = 1; candidate < MOER_CANDIDATES; candidate++) count += (uint32_t)moer_tune_is_rival(tune, candidate, large, num_tokens);
    return count;
}

/* The number of tokens that stands for a choice; 0: there is nothing to choose. */
static uint32_t moer_tune_tokens(const moer_tune *tune, uint32_t i, int large) {
    uint32_t least, most;
    if (!moer_choice_range(tune->layers[0], i, large, &least, &most) || least > tune->max_tokens) return 0;
    if (most > tune->max_tokens) most = tune->max_tokens;
    return moer_tune_num_rivals(tune, large, most) != 0 ? most : 0;
}

/* The layer with one choice for all numbers of tokens. */
static moe_route_status moer_tune_create(moer_tune *tune, uint32_t candidate) {
    moe_route_layer **layer = &tune->layers[candidate];
    uint32_t i;
    moe_route_status status = moer_layer_begin(tune->context, tune->desc, "moe_route_layer_tune", tune->args, "args", layer);
    if (*layer == NULL) return status;
    for (i = 0; i < MOER_CHOICES; i++) (*layer)->choices[i] = moer_candidates[candidate].choice;
    (*layer)->may_separate = 1;
    return moer_layer_make_variants(*layer);
}

static moe_route_status moer_tune_step(moer_tune *tune, uint32_t candidate, uint32_t num_tokens, uint64_t *hash) {
    moe_route_status status = tune->layers[candidate] != NULL ? MOE_ROUTE_OK : moer_tune_create(tune, candidate);
    if (status == MOE_ROUTE_OK) status = moer_tune_measure(tune, tune->layers[candidate], num_tokens, &tune->step.microseconds, hash);
    if (status != MOE_ROUTE_OK) return status;
    tune->step.step++;
    tune->step.num_tokens = num_tokens;
    tune->step.choice = moer_candidates[candidate].name;
    if (tune->args->progress != NULL) tune->args->progress(&tune->step, tune->args->user);
    return MOE_ROUTE_OK;
}

/* The fastest candidate at a number of tokens. */
static moe_route_status moer_tune_choose(moer_tune *tune, int large, uint32_t num_tokens, uint32_t *chosen) {
    double times[MOER_CANDIDATES] = {0}, best;
    uint64_t expected = 0, hash = 0;
    uint32_t candidate;
    moe_route_status status = moer_tune_step(tune, 0, num_tokens, &expected);
    times[0] = tune->step.microseconds;
    for (candidate = 1; candidate < MOER_CANDIDATES && status == MOE_ROUTE_OK; candidate++) {
        if (!moer_tune_is_rival(tune, candidate, large, num_tokens)) continue;
        status = moer_tune_step(tune, candidate, num_tokens, &hash);
        times[candidate] = tune->step.microseconds;
        if (status == MOE_ROUTE_OK && hash != expected) {
            moer_log(tune->context, MOE_ROUTE_LOG_WARNING, "tuning, %u tokens: %s isn't used, since its result differs", (unsigned)num_tokens, moer_candidates[candidate].name);
            times[candidate] = 0.0;
        }
    }
    if (status == MOE_ROUTE_OK) status = moer_tune_step(tune, 0, num_tokens, &hash);
    if (status != MOE_ROUTE_OK) return status;
    if (times[0] > tune->step.microseconds) times[0] = tune->step.microseconds;
    *chosen = 0;
    best = times[0] * MOER_TUNE_GAIN;
    for (candidate = 1; candidate < MOER_CANDIDATES; candidate++)
        if (times[candidate] > 0.0 && times[candidate] < best) {
            best = times[candidate];
            *chosen = candidate;
        }
    if (*chosen != 0)
        moer_log(tune->context, MOE_ROUTE_LOG_INFO, "tuning, %u tokens: %s, %.1f us instead of %.1f", (unsigned)num_tokens, moer_candidates[*chosen].name, best, times[0]);
    return MOE_ROUTE_OK;
}

static moe_route_status moer_tune_all(moer_tune *tune, moer_choice choices[MOER_CHOICES]) {
    moe_route_status status = MOE_ROUTE_OK;
    uint32_t i, chosen = 0, num_tokens;
    int large;
    for (large = 0; large < 2; large++)
        for (i = 0; i < MOER_CHOICES; i++) {
            num_tokens = moer_tune_tokens(tune, i, large);
            if (num_tokens != 0) tune->step.num_steps += 2 + moer_tune_num_rivals(tune, large, num_tokens);
        }
    for (large = 0; large < 2; large++)
        for (i = 0; i < MOER_CHOICES; i++) {
            num_tokens = moer_tune_tokens(tune, i, large);
            if (num_tokens == 0) {
                if (large && i > 0 && 1u << (i - 1) >= tune->max_tokens) choices[i].tile_rows = choices[i - 1].tile_rows;
                continue;
            }
            status = moer_tune_choose(tune, large, num_tokens, &chosen);
            if (status != MOE_ROUTE_OK) return status;
            if (large) choices[i].tile_rows = moer_candidates[chosen].choice.tile_rows;
            else choices[i].separate = moer_candidates[chosen].choice.separate;
        }
    return MOE_ROUTE_OK;
}

/* ---- the public functions ---- */

static moe_route_status moer_tune_prepare(moer_tune *tune) {
    const moer_driver *driver = &tune->context->driver;
    const moe_route_layer *layer = tune->layers[0];
    moer_cu_result result = driver->cuStreamCreate(&tune->stream, MOER_CU_STREAM_NON_BLOCKING);
    moe_route_status status;
    if (result != 0) {
        tune->stream = NULL;
        return moer_driver_fail(tune->context, "cuStreamCreate", result);
    }
    result = driver->cuEventCreate(&tune->start, 0);
    if (result == 0) result = driver->cuEventCreate(&tune->end, 0);
    if (result != 0) return moer_driver_fail(tune->context, "cuEventCreate", result);
    tune->buffer = (unsigned char *)moer_alloc(tune->context, MOER_TUNE_BUFFER);
    if (tune->buffer == NULL) return moer_fail(tune->context, MOE_ROUTE_ERROR_MEMORY, "out of memory for tuning");
    status = moer_tune_fill_values(tune, tune->x, (size_t)tune->num_rows * layer->hidden_size, layer->dtype);
    if (status == MOE_ROUTE_OK) status = moer_tune_fill_values(tune, tune->weights, (size_t)tune->num_rows * layer->router.top_k, layer->router.weights_dtype);
    return status == MOE_ROUTE_OK ? moer_tune_fill_ids(tune, layer) : status;
}

/* Also after a failure, for as much as there is. */
static void moer_tune_end(moer_tune *tune) {
    const moer_driver *driver = &tune->context->driver;
    uint32_t candidate;
    if (tune->stream != NULL) driver->cuStreamSynchronize(tune->stream);
    if (tune->start != NULL) driver->cuEventDestroy(tune->start);
    if (tune->end != NULL) driver->cuEventDestroy(tune->end);
    if (tune->stream != NULL) driver->cuStreamDestroy(tune->stream);
    moer_free(tune->context, tune->buffer);
    for (candidate = 1; candidate < MOER_CANDIDATES; candidate++) moe_route_layer_destroy(tune->layers[candidate]);
}

static moe_route_status moer_tune_run(moer_tune *tune) {
    moer_choice choices[MOER_CHOICES];
    moe_route_status status = moer_layer_make_variants(tune->layers[0]);
    memset(choices, 0, sizeof choices);
    if (status == MOE_ROUTE_OK) status = moer_tune_prepare(tune);
    if (status == MOE_ROUTE_OK) status = moer_tune_all(tune, choices);
    return status == MOE_ROUTE_OK ? moer_tuning_keep(tune->layers[0], choices) : status;
}

/* Checks the arguments, and does it where something is to be done. */
static moe_route_status moer_tune_checked(moer_tune *tune) {
    moe_route_context *context = tune->context;
    const moe_route_tune_args *args = tune->args;
    const char *missing = moer_driver_missing(&context->driver);
    moe_route_status status;
    int pushed;
    if (context->device == MOE_ROUTE_DEVICE_COMPILE)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "moe_route_layer_tune: the context only compiles (MOE_ROUTE_DEVICE_COMPILE); nothing can be measured");
    if (missing != NULL) return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "moe_route_layer_tune: the NVIDIA driver has no %s", missing);
    if (!moer_tune_lay_out(tune, tune->layers[0]))
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune: max_tokens is %u; its workspace is larger than this machine's addresses", (unsigned)tune->layers[0]->max_tokens);
    if (args->workspace_size < tune->size)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune: workspace_size is %llu; needed is at least %llu", (unsigned long long)args->workspace_size,
                         (unsigned long long)tune->size);
    if (args->workspace == 0 || args->workspace % 256 != 0)
        return moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune: workspace is 0x%llx; allowed is the address of device memory, a multiple of 256", args->workspace);
    if (!args->again && moer_tuning_find(tune->layers[0], NULL)) return MOE_ROUTE_OK;
    status = moer_context_enter(context, &pushed);
    if (status != MOE_ROUTE_OK) return status;
    tune->random = 0x9e3779b97f4a7c15ull; /* the same tokens each time */
    status = moer_tune_run(tune);
    moer_tune_end(tune);
    moer_context_leave(context, pushed);
    return status;
}

/* The layer that runs without tuning, for a function whose output or argument `given` is named so; NULL on failure. */
static moe_route_status moer_tune_begin(moe_route_context *context, moe_route_layer_desc *desc, const moe_route_layer_desc *from, const char *function, const void *given, const char *name,
                                        moe_route_layer **layer) {
    if (from != NULL) {
        *desc = *from;
        desc->operations = MOE_ROUTE_OPERATION_EXPERTS; /* what choices concern */
        desc->tuned = MOE_ROUTE_OFF;
        desc->fused_combine = MOE_ROUTE_AUTO; /* what is kept doesn't depend on what a description overrides */
        desc->grouped_rows = 0;
    }
    return moer_layer_begin(context, from != NULL ? desc : NULL, function, given, name, layer);
}

MOE_ROUTE_API moe_route_status moe_route_layer_tune(moe_route_context *context, const moe_route_layer_desc *from, const moe_route_tune_args *args) {
    moe_route_layer_desc desc;
    moer_tune tune;
    moe_route_status status;
    memset(&tune, 0, sizeof tune);
    status = moer_tune_begin(context, &desc, from, "moe_route_layer_tune", args, "args", &tune.layers[0]);
    if (tune.layers[0] == NULL) return status;
    tune.context = context;
    tune.desc = &desc;
    tune.args = args;
    if (context->device != MOE_ROUTE_DEVICE_CPU) status = moer_tune_checked(&tune);
    moe_route_layer_destroy(tune.layers[0]);
    return status;
}

MOE_ROUTE_API moe_route_status moe_route_layer_tune_workspace_size(moe_route_context *context, const moe_route_layer_desc *from, size_t *size) {
    moe_route_layer_desc desc;
    moer_tune tune;
    moe_route_layer *layer;
    moe_route_status status;
    if (size != NULL) *size = 0;
    memset(&tune, 0, sizeof tune);
    status = moer_tune_begin(context, &desc, from, "moe_route_layer_tune_workspace_size", size, "size", &layer);
    if (layer == NULL) return status;
    if (context->device != MOE_ROUTE_DEVICE_CPU) {
        if (moer_tune_lay_out(&tune, layer)) *size = tune.size;
        else status = moer_fail(context, MOE_ROUTE_ERROR_ARGUMENT, "moe_route_layer_tune_workspace_size: max_tokens is %u; its workspace is larger than this machine's addresses", (unsigned)layer->max_tokens);
    }
    moe_route_layer_destroy(layer);
    return status;
}

#endif /* MOE_ROUTE_IMPLEMENTATION */

/*
MIT License

Copyright (c) 2026 the moe_route authors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
