/*
  args.h: the argument struct of every kernel, one definition for the host C and for the kernels. A kernel takes one such
  struct by value. Addresses are 8 bytes on both sides and come first, so that the layouts agree on every host.
  Shapes are those of moe_route.h: T tokens, k slots a token, E experts, E_local local ones, pair p = t * k + j, row r.
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
    unsigned int block_size;               /* 0: no aligned outputs */
    unsigned int aligned_capacity;         /* a multiple of block_size */
} moer_maps_out;

/* route.cu and topk.cu */
typedef struct moer_route_args {
    MOER_ADDRESS(const void) logits;          /* [T, E] */
    MOER_ADDRESS(const float) selection_bias; /* [E] */
    MOER_ADDRESS(int) ids;                    /* [T, k]; an input where SELECT is 0 */
    MOER_ADDRESS(float) weights;              /* [T, k] or null */
    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */
    moer_maps_out maps;
    unsigned int num_tokens;
    float renormalize_epsilon;
    float scale;
} moer_route_args;

/* maps.cu: the sort of any number of pairs, in three launches */
typedef struct moer_maps_args {
    MOER_ADDRESS(const int) ids;              /* [T, k] */
    MOER_ADDRESS(const int) num_valid_tokens; /* [1] or null */
    MOER_ADDRESS(int) block_counts;           /* [num_blocks, E_local]: pairs of each expert in a block's share, then the
                                                 first row of that share */
    MOER_ADDRESS(int) expert_offsets;         /* [E_local + 1], always kept */
    MOER_ADDRESS(int) aligned_offsets;        /* [E_local + 1], or null without aligned outputs */
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
    MOER_ADDRESS(const void) bias;             /* [E_local, N] or null */
    MOER_ADDRESS(const void) x;                /* [T, K], or [T * k, K] in pair or row order */
    MOER_ADDRESS(void) out;                    /* [T * k, N or I] in row or pair order */
    MOER_ADDRESS(const int) distinct_experts;
    MOER_ADDRESS(const int) distinct_offsets;
    MOER_ADDRESS(const int) distinct_count;
    MOER_ADDRESS(const int) row_to_pair;       /* [T * k] */
    MOER_ADDRESS(const int) pair_to_row;       /* [T * k], to find the pairs without a row; null where they don't matter */
    unsigned int num_pairs;
    unsigned int x_per_pair;                   /* read where X_INDEX is 1: x is indexed by pair, not by token */
} moer_matmul_args;

/* down.cu: the down matmul of a small batch, combined */
typedef struct moer_down_args {
    moer_weights_args weights;                 /* N = H, K = I */
    MOER_ADDRESS(const void) bias;             /* [E_local, H] or null */
    MOER_ADDRESS(const void) h;                /* [T * k, I] in row order */
    MOER_ADDRESS(const float) router_weights;  /* [T, k] */
    MOER_ADDRESS(void) y;                      /* [T, H] */
    MOER_ADDRESS(const int) distinct_experts;
    MOER_ADDRESS(const int) distinct_offsets;
    MOER_ADDRESS(const int) distinct_count;
    MOER_ADDRESS(const int) pair_to_row;       /* [T * k] */
    MOER_ADDRESS(const int) row_to_expert;     /* [T * k] */
    unsigned int num_tokens;
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
    MOER_ADDRESS(const void) rows;            /* [T * k, H] */
    MOER_ADDRESS(const int) pair_to_row;      /* [T * k], or null: rows are in pair order */
    MOER_ADDRESS(const float) router_weights; /* [T, k] */
    MOER_ADDRESS(void) y;                     /* [T, H] */
    unsigned int num_tokens;
} moer_combine_args;
