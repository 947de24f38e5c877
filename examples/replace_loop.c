/*
  replace_loop.c: from a hand-written loop over experts to a layer. moe_by_hand() is what many programs have: softmax, the k
  best experts, and for each of them two matmuls with SwiGLU between. The same layer is then described to the library, and run
  on the GPU where there is one; the two agree.

      cc -I. -Iexamples examples/replace_loop.c -o replace_loop -lm -ldl -lpthread
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"

#include <math.h>

enum { EXPERTS = 8, TOP_K = 2, HIDDEN = 48, INTERMEDIATE = 32, TOKENS = 3 };

static float gate_up[EXPERTS][2 * INTERMEDIATE][HIDDEN]; /* rows 0 to I-1 are gate, the others up */
static float down[EXPERTS][HIDDEN][INTERMEDIATE];
static float logits[TOKENS][EXPERTS], x[TOKENS][HIDDEN], by_hand[TOKENS][HIDDEN], by_layer[TOKENS][HIDDEN];

/* y += weight * expert(x) */
static void add_expert(int e, const float *input, float weight, float *y) {
    float h[INTERMEDIATE], gate, up;
    int n, i;
    for (n = 0; n < INTERMEDIATE; n++) {
        for (gate = up = 0, i = 0; i < HIDDEN; i++) {
            gate += gate_up[e][n][i] * input[i];
            up += gate_up[e][INTERMEDIATE + n][i] * input[i];
        }
        h[n] = gate / (1.0f + expf(-gate)) * up;
    }
    for (n = 0; n < HIDDEN; n++)
        for (i = 0; i < INTERMEDIATE; i++) y[n] += weight * down[e][n][i] * h[i];
}

static void moe_by_hand(void) {
    int t, j, e;
    for (t = 0; t < TOKENS; t++) {
        int chosen[TOP_K], taken[EXPERTS] = {0};
        float weight[TOP_K], sum = 0;
        for (j = 0; j < TOP_K; j++) {
            int best = -1;
            for (e = 0; e < EXPERTS; e++)
                if (!taken[e] && (best < 0 || logits[t][e] > logits[t][best])) best = e;
            taken[best] = 1;
            chosen[j] = best;
            weight[j] = expf(logits[t][best] - logits[t][chosen[0]]);
            sum += weight[j];
        }
        for (j = 0; j < TOP_K; j++) add_expert(chosen[j], x[t], weight[j] / sum, by_hand[t]);
    }
}

int main(int argc, char **argv) {
    moe_route_layer_desc desc;
    moe_route_layer *layer;
    moe_route_layer_args args;
    example e; /* a context, a stream, and memory on the GPU or the host */
    float worst = 0;
    int i;
    example_open(&e, argc, argv);

    /* Once, when the model is loaded. */
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = TOP_K;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM; /* the chosen weights add up to 1 */
    desc.experts.hidden_size = HIDDEN;
    desc.experts.intermediate_size = INTERMEDIATE;
    desc.experts.dtype = MOE_ROUTE_F32; /* of x and y; usually BF16 or F16 */
    desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc.experts.gate_up.data = example_numbers(&e, sizeof gate_up / sizeof(float), 0.3f, 1, &gate_up[0][0][0]);
    desc.experts.down.data = example_numbers(&e, sizeof down / sizeof(float), 0.3f, 2, &down[0][0][0]);
    desc.max_tokens = TOKENS;
    example_must(&e, moe_route_layer_create(e.context, &desc, &layer));
    memset(&args, 0, sizeof args);
    args.workspace = example_workspace(&e, layer, TOKENS, &args.workspace_size);

    /* For each batch of tokens. */
    args.num_tokens = TOKENS;
    args.logits = example_numbers(&e, TOKENS * EXPERTS, 3.0f, 3, &logits[0][0]);
    args.x = example_numbers(&e, TOKENS * HIDDEN, 1.0f, 4, &x[0][0]);
    args.y = example_memory(&e, NULL, sizeof by_layer);
    args.stream = e.stream;
    example_must(&e, moe_route_layer_run(layer, &args));
    example_read(&e, by_layer, args.y, sizeof by_layer);

    moe_by_hand();
    for (i = 0; i < TOKENS * HIDDEN; i++) {
        const float error = fabsf(by_layer[i / HIDDEN][i % HIDDEN] - by_hand[i / HIDDEN][i % HIDDEN]);
        if (!(error <= worst)) worst = error;
    }
    printf("largest difference from the loop: %.1e\n", (double)worst);
    moe_route_layer_destroy(layer);
    example_close(&e);
    return worst < 1e-4f ? 0 : 1;
}
