/*
  pack.c: a program that ships with its compiled kernels and runs where there is no NVRTC. Built twice from this file:

      cc -I. -Iexamples examples/pack.c -o pack_make -lm -ldl -lpthread
      ./pack_make model.moep 80 90                                     # at build time: takes NVRTC, neither GPU nor driver
      od -An -v -tx1 model.moep | sed 's/ *\([0-9a-f][0-9a-f]\)/0x\1,/g' >model_pack.inc     # or xxd -i, or #embed of C23
      cc -DPACK='"model_pack.inc"' -I. -Iexamples examples/pack.c -o pack_run -lm -ldl -lpthread
      ./pack_run                                                       # at the customer's

  Maker and program describe the layer by the same function. The maker has no weights: their addresses are placeholders, aligned
  as the real ones are.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include "example.h"

enum { EXPERTS = 16, TOP_K = 2, HIDDEN = 64, INTERMEDIATE = 32, TOKENS = 4 };

static void describe(moe_route_layer_desc *desc, moe_route_address gate_up, moe_route_address down) {
    memset(desc, 0, sizeof *desc);
    desc->router.num_experts = EXPERTS;
    desc->router.top_k = TOP_K;
    desc->experts.hidden_size = HIDDEN;
    desc->experts.intermediate_size = INTERMEDIATE;
    desc->experts.dtype = MOE_ROUTE_F32;
    desc->experts.gate_up.format = desc->experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc->experts.gate_up.data = gate_up;
    desc->experts.down.data = down;
    desc->max_tokens = TOKENS;
}

#if !defined(PACK)

int main(int argc, char **argv) {
    moe_route_context *contexts[16];
    example e; /* for its way to end the program */
    uint32_t i, num_targets = argc > 2 ? (uint32_t)argc - 2 : 0;
    if (num_targets == 0 || num_targets > 16) example_fail("usage: pack_make FILE TARGET...   up to 16, such as 80 90 for sm_80 and sm_90");
    memset(&e, 0, sizeof e);
    for (i = 0; i < num_targets; i++) {
        const moe_route_address aligned = 256; /* nothing is read from it */
        moe_route_context_desc context_desc;
        moe_route_layer_desc desc;
        moe_route_layer *layer;
        moe_route_status status;
        memset(&context_desc, 0, sizeof context_desc);
        context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
        context_desc.compile_target = (uint32_t)strtoul(argv[i + 2], NULL, 10);
        context_desc.cache_dir = "off";
        status = moe_route_context_create(&context_desc, &contexts[i]);
        e.context = contexts[i];
        example_must(&e, status);
        describe(&desc, aligned, aligned);
        example_must(&e, moe_route_layer_create(contexts[i], &desc, &layer)); /* once for every layer that the model has */
        printf("sm_%u: %u variants\n", (unsigned)context_desc.compile_target, (unsigned)moe_route_layer_num_variants(layer));
        moe_route_layer_destroy(layer);
    }
    e.context = contexts[0];
    example_must(&e, moe_route_pack_save(contexts, num_targets, argv[1]));
    for (i = 0; i < num_targets; i++) moe_route_context_destroy(contexts[i]);
    return 0;
}

#else

static const unsigned char pack[] = {
#include PACK
};

int main(int argc, char **argv) {
    static float y[TOKENS * HIDDEN];
    moe_route_layer_desc desc;
    moe_route_layer *layer;
    moe_route_layer_args args;
    moe_route_context_info info;
    moe_route_statistics statistics;
    example e;
    example_open(&e, argc, argv);
    example_must(&e, moe_route_pack_use(e.context, pack, sizeof pack));
    describe(&desc, example_numbers(&e, EXPERTS * 2 * INTERMEDIATE * HIDDEN, 0.2f, 1, NULL),
             example_numbers(&e, EXPERTS * HIDDEN * INTERMEDIATE, 0.2f, 2, NULL));
    example_must(&e, moe_route_layer_create(e.context, &desc, &layer));
    memset(&args, 0, sizeof args);
    args.num_tokens = TOKENS;
    args.logits = example_numbers(&e, TOKENS * EXPERTS, 2.0f, 3, NULL);
    args.x = example_numbers(&e, TOKENS * HIDDEN, 1.0f, 4, NULL);
    args.y = example_memory(&e, NULL, sizeof y);
    args.workspace = example_workspace(&e, layer, TOKENS, &args.workspace_size);
    args.stream = e.stream;
    example_must(&e, moe_route_layer_run(layer, &args));
    example_read(&e, y, args.y, sizeof y);
    moe_route_context_get_info(e.context, &info);
    moe_route_context_get_statistics(e.context, &statistics);
    printf("y[0] = %.5f; %u variants from the pack, %u compiled, NVRTC %s\n", (double)y[0], (unsigned)statistics.pack_hits,
           (unsigned)statistics.compiles, info.nvrtc_version ? "loaded" : "not loaded");
    moe_route_layer_destroy(layer);
    example_close(&e);
    return statistics.compiles == 0 ? 0 : 1;
}

#endif
