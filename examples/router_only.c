/*
  router_only.c: the router and the expert maps for an engine that has its own expert matmuls: DeepSeek-V3's router from a
  preset, for 5 tokens. One launch gives ids, weights, and the pairs (token, slot) sorted by expert, which is how a grouped matmul
  wants them.

      cc -I. -Iexamples examples/router_only.c -o router_only -lm -ldl -lpthread
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"

enum { EXPERTS = 256, TOP_K = 8, TOKENS = 5, PAIRS = TOKENS * TOP_K };

/* Stands for the engine's matmul of one expert with `num_rows` rows of activations. */
static void engine_matmul(int expert, const int32_t *row_to_pair, int num_rows) {
    int r;
    printf("expert %3d:", expert);
    for (r = 0; r < num_rows; r++) printf(" token %d (slot %d)", (int)row_to_pair[r] / TOP_K, (int)row_to_pair[r] % TOP_K);
    printf("\n");
}

int main(int argc, char **argv) {
    moe_route_model model;
    moe_route_layer_desc desc;
    moe_route_layer *layer;
    moe_route_route_args args;
    example e;
    int32_t row_to_pair[PAIRS], experts[PAIRS], offsets[PAIRS + 1], num_distinct;
    float weights[TOKENS][TOP_K], sum;
    int i, j, rows = 0, ok = 1;
    example_open(&e, argc, argv);

    memset(&model, 0, sizeof model); /* numbers of the model's config.json */
    model.model_type = "deepseek_v3";
    model.num_experts = EXPERTS;
    model.top_k = TOP_K;
    model.num_groups = 8;
    model.topk_groups = 4;
    model.scale = 2.5f;
    example_must(&e, moe_route_preset(e.context, &model, &desc));
    desc.router.selection_bias = example_numbers(&e, EXPERTS, 0.1f, 1, NULL); /* e_score_correction_bias */
    desc.max_tokens = TOKENS;
    example_must(&e, moe_route_layer_create(e.context, &desc, &layer));

    memset(&args, 0, sizeof args);
    args.num_tokens = TOKENS;
    args.logits = example_numbers(&e, TOKENS * EXPERTS, 3.0f, 2, NULL);
    args.ids = example_memory(&e, NULL, PAIRS * sizeof(int32_t));
    args.weights = example_memory(&e, NULL, sizeof weights);
    args.maps.row_to_pair = example_memory(&e, NULL, sizeof row_to_pair); /* any of the maps may be left out */
    args.maps.distinct_experts = example_memory(&e, NULL, sizeof experts);
    args.maps.distinct_offsets = example_memory(&e, NULL, sizeof offsets);
    args.maps.distinct_count = example_memory(&e, NULL, sizeof num_distinct);
    args.stream = e.stream;
    example_must(&e, moe_route_route(layer, &args)); /* on a GPU the maps stay there, for the engine's kernels */

    example_read(&e, row_to_pair, args.maps.row_to_pair, sizeof row_to_pair);
    example_read(&e, &num_distinct, args.maps.distinct_count, sizeof num_distinct);
    example_read(&e, experts, args.maps.distinct_experts, (size_t)num_distinct * sizeof(int32_t)); /* what was written */
    example_read(&e, offsets, args.maps.distinct_offsets, ((size_t)num_distinct + 1) * sizeof(int32_t));
    example_read(&e, weights, args.weights, sizeof weights);
    for (i = 0; i < num_distinct; i++) {
        engine_matmul(experts[i], row_to_pair + offsets[i], offsets[i + 1] - offsets[i]);
        rows += offsets[i + 1] - offsets[i];
    }
    for (i = 0; i < TOKENS; i++) {
        for (sum = 0, j = 0; j < TOP_K; j++) sum += weights[i][j];
        ok = ok && sum > 2.499f && sum < 2.501f; /* normalised, times 2.5 */
    }
    printf("%d rows for %d distinct experts\n", rows, (int)num_distinct);
    moe_route_layer_destroy(layer);
    example_close(&e);
    return ok && rows == PAIRS ? 0 : 1;
}
