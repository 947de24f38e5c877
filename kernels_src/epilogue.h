/*
  epilogue.h: what the combine adds to a token's sum beside the rows of its experts, in this order: in its slot's place
  weight * x for an identity expert, after all slots shared_weight * shared, then the residual; each in f32, a product and
  its sum as one fma. Shared by the kernels that combine, so that they give the same bits. Include vector.h first.

  Constants: WEIGHTS, the dtype of the router's weights; FIRST_IDENTITY, NUM_IDENTITY: the ids of identity experts that this layer adds; 0: none.
*/

DEVICE float router_weight(const void *weights, u32 pair) {
    float weight[1];
    load_vector<WEIGHTS, 1>(weights, pair, weight);
    return weight[0];
}

/* Slot `pair` of a token, which has no row here. `at` is the first of N columns in [T, H] arrays of DTYPE. */
template <int DTYPE, int N>
DEVICE void add_identity(const moer_epilogue &e, const void *weights, u32 pair, u64 at, float (&sum)[N]) {
#if NUM_IDENTITY
    if ((u32)e.ids[pair] - FIRST_IDENTITY >= NUM_IDENTITY) return;
    const float weight = router_weight(weights, pair);
    float x[N];
    load_vector<DTYPE, N>(e.x, at, x);
#pragma unroll
    for (int i = 0; i < N; i++) sum[i] = f32_fma(weight, x[i], sum[i]);
#endif
}

template <int DTYPE, int N>
DEVICE void add_shared_and_residual(const moer_epilogue &e, u32 token, u64 at, float (&sum)[N]) {
    float value[N];
    if (e.shared) {
        const float weight = e.shared_weights ? e.shared_weights[token] : 1.0f;
        load_vector<DTYPE, N>(e.shared, at, value);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = f32_fma(weight, value[i], sum[i]);
    }
    if (e.residual) {
        load_vector<DTYPE, N>(e.residual, at, value);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = f32_add(sum[i], value[i]);
    }
}
