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
