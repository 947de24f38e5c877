/*
  graph_decode.c: a decode loop as a CUDA graph. Two layers are captured once, for up to 4 tokens; then each step writes its
  inputs where the graph reads them, and replays it. Which experts are chosen, and how many of the rows are real tokens, changes
  from step to step: both are read on the GPU, so one graph serves all. Each step is compared with plain launches.

      cc -I. -Iexamples examples/graph_decode.c -o graph_decode -lm -ldl -lpthread
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"

enum { EXPERTS = 16, TOP_K = 4, HIDDEN = 64, INTERMEDIATE = 32, ROWS = 4, LAYERS = 2, STEPS = 8 };

static moe_route_layer *make_layer(example *e, unsigned seed) {
    moe_route_layer_desc desc;
    moe_route_layer *layer;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = TOP_K;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc.experts.hidden_size = HIDDEN;
    desc.experts.intermediate_size = INTERMEDIATE;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc.experts.gate_up.data = example_numbers(e, EXPERTS * 2 * INTERMEDIATE * HIDDEN, 0.2f, seed, NULL);
    desc.experts.down.data = example_numbers(e, EXPERTS * HIDDEN * INTERMEDIATE, 0.2f, seed + 1, NULL);
    desc.max_tokens = ROWS;
    example_must(e, moe_route_layer_create(e->context, &desc, &layer)); /* compiles, before anything is captured */
    return layer;
}

/* The layers of one step, one after the other on the stream. They only launch: this may be captured. */
static void launch_step(example *e, moe_route_layer *const *layers, const moe_route_layer_args *args) {
    int l;
    for (l = 0; l < LAYERS; l++) example_must(e, moe_route_layer_run(layers[l], &args[l]));
}

int main(int argc, char **argv) {
    static float x[ROWS * HIDDEN], logits[ROWS * EXPERTS], replayed[ROWS * HIDDEN], launched[ROWS * HIDDEN];
    moe_route_layer *layers[LAYERS];
    moe_route_layer_args args[LAYERS];
    moe_route_address hidden[LAYERS + 1], ids, valid;
    gpu_graph graph;
    example e;
    int32_t chosen[ROWS * TOP_K];
    int l, step, i, same = 1;
    example_open(&e, argc, argv);
    if (!e.on_gpu) {
        fprintf(stderr, "CUDA graphs need a GPU: %s\n", e.gpu.reason[0] ? e.gpu.reason : "--cpu was given");
        example_close(&e);
        return EXAMPLE_NO_GPU;
    }
    for (l = 0; l <= LAYERS; l++) hidden[l] = example_memory(&e, NULL, sizeof x);
    ids = example_memory(&e, NULL, sizeof chosen);
    valid = example_memory(&e, NULL, sizeof(int32_t));
    memset(args, 0, sizeof args);
    for (l = 0; l < LAYERS; l++) {
        layers[l] = make_layer(&e, 10u * (unsigned)l);
        args[l].num_tokens = ROWS;
        args[l].num_valid_tokens = valid; /* how many rows are tokens; the others give 0 */
        args[l].logits = example_memory(&e, NULL, sizeof logits);
        args[l].ids = l == 0 ? ids : 0; /* optional: to look at */
        args[l].x = hidden[l];
        args[l].y = hidden[l + 1];
        args[l].residual = hidden[l];
        args[l].workspace = example_workspace(&e, layers[l], ROWS, &args[l].workspace_size);
        args[l].stream = e.stream;
    }

    example_must_gpu(&e, gpu_capture_begin(&e.gpu, e.stream));
    launch_step(&e, layers, args);
    example_must_gpu(&e, gpu_capture_end(&e.gpu, e.stream, &graph));

    for (step = 0; step < STEPS; step++) {
        const int32_t num_valid = step % ROWS + 1;
        for (i = 0; i < ROWS * HIDDEN; i++) x[i] = (float)((i * 7 + step * 13) % 31 - 15) / 15.0f;
        for (i = 0; i < ROWS * EXPERTS; i++) logits[i] = (float)((i * 11 + step * 5) % 29) / 10.0f;
        example_write(&e, hidden[0], x, sizeof x);
        for (l = 0; l < LAYERS; l++) example_write(&e, args[l].logits, logits, sizeof logits);
        example_write(&e, valid, &num_valid, sizeof num_valid);

        example_must_gpu(&e, gpu_graph_launch(&e.gpu, graph, e.stream));
        example_read(&e, replayed, hidden[LAYERS], sizeof replayed);
        example_read(&e, chosen, ids, sizeof chosen);

        launch_step(&e, layers, args);
        example_read(&e, launched, hidden[LAYERS], sizeof launched);
        same = same && memcmp(replayed, launched, sizeof replayed) == 0;
        printf("step %d: %d tokens, the first goes to experts %d %d %d %d, y[0] = %.5f\n", step, (int)num_valid, (int)chosen[0], (int)chosen[1],
               (int)chosen[2], (int)chosen[3], (double)replayed[0]);
    }
    printf("replays and plain launches: %s\n", same ? "the same bits" : "DIFFERENT");
    example_must_gpu(&e, gpu_graph_destroy(&e.gpu, graph));
    for (l = 0; l < LAYERS; l++) moe_route_layer_destroy(layers[l]);
    example_close(&e);
    return same ? 0 : 1;
}
