/*
  two_gpus.c: a thread for each GPU, with its own context, layer, stream and memory: half of the model's layers on each, or the
  same layer for different requests. Contexts share nothing but the cache on disk. With one GPU both threads use that one, each
  through a context of its own.

      cc -I. -Iexamples examples/two_gpus.c -o two_gpus -lm -ldl -lpthread
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"

#include <pthread.h>

enum { EXPERTS = 16, TOP_K = 4, HIDDEN = 64, INTERMEDIATE = 32, TOKENS = 4, STEPS = 10 };

typedef struct worker {
    pthread_t thread;
    int ordinal;
    char name[128], failure[512]; /* empty when all went well */
    float y[TOKENS * HIDDEN];
} worker;

static void work(worker *w, example *e) {
    moe_route_context_desc context_desc;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_layer_args args;
    moe_route_status status;
    int step;
    memset(&context_desc, 0, sizeof context_desc);
    memset(&desc, 0, sizeof desc);
    memset(&args, 0, sizeof args);
    context_desc.device = MOE_ROUTE_DEVICE_GPU;
    context_desc.cuda_context = e->gpu.context; /* or device_ordinal, for that GPU's primary context */
    status = moe_route_context_create(&context_desc, &e->context);
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = TOP_K;
    desc.experts.hidden_size = HIDDEN;
    desc.experts.intermediate_size = INTERMEDIATE;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc.experts.gate_up.data = example_numbers(e, EXPERTS * 2 * INTERMEDIATE * HIDDEN, 0.2f, 1, NULL);
    desc.experts.down.data = example_numbers(e, EXPERTS * HIDDEN * INTERMEDIATE, 0.2f, 2, NULL);
    desc.max_tokens = TOKENS;
    if (status == MOE_ROUTE_OK) status = moe_route_layer_create(e->context, &desc, &layer);
    args.num_tokens = TOKENS;
    args.logits = example_numbers(e, TOKENS * EXPERTS, 2.0f, 3, NULL);
    args.x = example_numbers(e, TOKENS * HIDDEN, 1.0f, 4, NULL);
    args.y = example_memory(e, NULL, sizeof w->y);
    args.stream = e->stream;
    if (status == MOE_ROUTE_OK) args.workspace = example_workspace(e, layer, TOKENS, &args.workspace_size);
    for (step = 0; step < STEPS && status == MOE_ROUTE_OK; step++) status = moe_route_layer_run(layer, &args);
    if (status == MOE_ROUTE_OK) {
        example_read(e, w->y, args.y, sizeof w->y);
    } else {
        snprintf(w->failure, sizeof w->failure, "%s", moe_route_status_name(status));
        if (e->context) moe_route_message(e->context, w->failure, sizeof w->failure);
    }
    moe_route_layer_destroy(layer);
}

static void *run(void *user) {
    worker *w = (worker *)user;
    example e;
    memset(&e, 0, sizeof e);
    if (!gpu_open_device(&e.gpu, w->ordinal) || gpu_stream_create(&e.gpu, &e.stream)) { /* makes the GPU current in this thread */
        snprintf(w->failure, sizeof w->failure, "%s", e.gpu.reason);
        return NULL;
    }
    e.on_gpu = 1;
    memcpy(w->name, e.gpu.name, sizeof w->name);
    work(w, &e);
    example_close(&e);
    return NULL;
}

int main(void) {
    static worker workers[2];
    gpu_device gpu;
    int i, same;
    if (!gpu_open(&gpu)) {
        fprintf(stderr, "no GPU: %s\n", gpu.reason);
        return EXAMPLE_NO_GPU;
    }
    for (i = 0; i < 2; i++) {
        workers[i].ordinal = i % gpu.count;
        if (pthread_create(&workers[i].thread, NULL, run, &workers[i])) example_fail("no thread");
    }
    for (i = 0; i < 2; i++) {
        pthread_join(workers[i].thread, NULL);
        if (workers[i].failure[0]) example_fail(workers[i].failure);
        printf("thread %d on GPU %d, %s: y[0] = %.5f\n", i, workers[i].ordinal, workers[i].name, (double)workers[i].y[0]);
    }
    gpu_close(&gpu);
    same = memcmp(workers[0].y, workers[1].y, sizeof workers[0].y) == 0;
    printf("%s\n", same ? "the same bits" : "DIFFERENT");
    return same || strcmp(workers[0].name, workers[1].name) != 0 ? 0 : 1; /* GPUs of one kind agree */
}
