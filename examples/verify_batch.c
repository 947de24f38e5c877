/*
  verify_batch.c: speculative decoding verifies a few drafted tokens in one batch. Tokens that follow each other choose many of
  the same experts, and the layer reads each distinct expert once for all rows that chose it; and a row has the same bits as when
  its token is decoded alone, so that what is accepted doesn't depend on how it was batched.

      cc -I. -Iexamples examples/verify_batch.c -o verify_batch -lm -ldl -lpthread
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"

enum { EXPERTS = 64, TOP_K = 8, HIDDEN = 128, INTERMEDIATE = 32, DRAFTED = 6 };

int main(int argc, char **argv) {
    static float x[DRAFTED * HIDDEN], logits[DRAFTED * EXPERTS], together[DRAFTED * HIDDEN], alone[DRAFTED * HIDDEN];
    moe_route_layer_desc desc;
    moe_route_layer *layer;
    moe_route_layer_args args;
    moe_route_route_args route;
    example e;
    int32_t distinct;
    size_t expert_bytes;
    int t, i;
    example_open(&e, argc, argv);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = TOP_K;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc.experts.hidden_size = HIDDEN;
    desc.experts.intermediate_size = INTERMEDIATE;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc.experts.gate_up.data = example_numbers(&e, EXPERTS * 2 * INTERMEDIATE * HIDDEN, 0.2f, 1, NULL);
    desc.experts.down.data = example_numbers(&e, EXPERTS * HIDDEN * INTERMEDIATE, 0.2f, 2, NULL);
    desc.max_tokens = DRAFTED;
    desc.operations = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_ROUTE;
    example_must(&e, moe_route_layer_create(e.context, &desc, &layer));

    /* Each token's logits are a little unlike those of the one before. */
    for (i = 0; i < DRAFTED * HIDDEN; i++) x[i] = (float)((i * 37) % 101 - 50) / 50.0f;
    for (i = 0; i < EXPERTS; i++) logits[i] = (float)((i * 29) % 67) / 10.0f;
    for (i = EXPERTS; i < DRAFTED * EXPERTS; i++) logits[i] = logits[i - EXPERTS] + (float)((i * 53) % 41 - 20) / 25.0f;

    memset(&args, 0, sizeof args);
    args.logits = example_memory(&e, logits, sizeof logits);
    args.x = example_memory(&e, x, sizeof x);
    args.y = example_memory(&e, NULL, sizeof together);
    args.workspace = example_workspace(&e, layer, DRAFTED, &args.workspace_size);
    args.stream = e.stream;

    /* How many distinct experts the batch has: one of the maps. The layer makes its own. */
    memset(&route, 0, sizeof route);
    route.num_tokens = DRAFTED;
    route.logits = args.logits;
    route.ids = example_memory(&e, NULL, DRAFTED * TOP_K * sizeof(int32_t));
    route.maps.distinct_count = example_memory(&e, NULL, sizeof distinct);
    route.stream = e.stream;
    example_must(&e, moe_route_route(layer, &route));
    example_read(&e, &distinct, route.maps.distinct_count, sizeof distinct);
    expert_bytes = 3 * HIDDEN * INTERMEDIATE * sizeof(float);
    printf("%d tokens x %d experts = %d pairs, %d distinct experts: %zu KiB read once instead of %zu KiB\n", DRAFTED, TOP_K, DRAFTED * TOP_K,
           (int)distinct, (size_t)distinct * expert_bytes / 1024, DRAFTED * TOP_K * expert_bytes / 1024);

    args.num_tokens = DRAFTED;
    example_must(&e, moe_route_layer_run(layer, &args));
    example_read(&e, together, args.y, sizeof together);

    args.num_tokens = 1;
    for (t = 0; t < DRAFTED; t++) {
        example_must(&e, moe_route_layer_run(layer, &args));
        example_read(&e, alone + t * HIDDEN, args.y, HIDDEN * sizeof(float));
        args.logits += EXPERTS * sizeof(float);
        args.x += HIDDEN * sizeof(float);
    }
    i = memcmp(together, alone, sizeof together) == 0;
    printf("together and one by one: %s\n", i ? "the same bits" : "DIFFERENT");
    moe_route_layer_destroy(layer);
    example_close(&e);
    return i && distinct < DRAFTED * TOP_K ? 0 : 1;
}
