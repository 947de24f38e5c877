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
