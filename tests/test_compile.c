/*
  test_compile.c: every variant that the tests and the demo use compiles with the NVRTC at hand for every architecture, as a
  real cubin; those of large batches for two of them, but for each format, routers for one of each family, and a selection of them for all. Needs NVRTC and no GPU. TEST_TARGETS, a list such as "80 90", replaces the architectures; TEST_SIZE=small a
  selection of the layers.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <pthread.h>

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "support/cases.h"

static int small_size;

typedef struct compilation { /* of all layers for one architecture */
    uint32_t target;
    uint32_t num_variants;
    char failure[4096], warning[4096]; /* of a macro that is defined twice */
    int warned;
    int known; /* to this NVRTC */
    int nvrtc_version;
} compilation;

/* ---- compiling ---- */

static void compile_layer(compilation *c, moe_route_context *context, const moe_route_layer_desc *desc, const char *what) {
    moe_route_layer *layer = NULL;
    uint32_t count;
    if (c->failure[0]) return;
    if (moe_route_layer_count_variants(context, desc, &count) != MOE_ROUTE_OK || moe_route_layer_create(context, desc, &layer) != MOE_ROUTE_OK) {
        const size_t length = (size_t)snprintf(c->failure, sizeof c->failure, "%s: ", what);
        moe_route_message(context, c->failure + length, sizeof c->failure - length);
    } else if (moe_route_layer_num_variants(layer) != count) {
        snprintf(c->failure, sizeof c->failure, "%s: %u variants, counted as %u", what, moe_route_layer_num_variants(layer), count);
    }
    moe_route_layer_destroy(layer);
}

static void compile_layers(compilation *c, moe_route_context *context) {
    /* Kernels of large batches take half of the time, and routers much of the rest; their code hardly depends on the architecture. So two are enough for all of
       the former (but choices, for which the slowest to compile needn't be made each time), and one of each family for all of the latter. */
    const uint32_t layer_tokens = c->target == 90 || c->target == 120 ? 200 : 32;
    const int few_routers = c->target != 80 && c->target != 90 && c->target != 120;
    moe_route_layer_desc desc;
    char what[96];
    uint32_t i;
    for (i = 0; i < NUM_CASES(route_cases); i++) {
        memset(&desc, 0, sizeof desc);
        desc.router = route_cases[i].router;
        desc.router.logit_bias = route_cases[i].logit_bias ? 256 : 0;
        desc.router.selection_bias = route_cases[i].selection_bias ? 256 : 0;
        desc.router.expert_scale = route_cases[i].expert_scale ? 256 : 0;
        desc.max_tokens = 300;
        snprintf(what, sizeof what, "router %u", i);
        if ((!small_size && !few_routers) || route_cases[i].in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < NUM_CASES(maps_cases); i++) {
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = maps_cases[i].num_experts;
        desc.router.top_k = maps_cases[i].top_k;
        desc.experts.first_expert = maps_cases[i].first_expert;
        desc.experts.num_local_experts = maps_cases[i].num_local;
        desc.experts.expert_map = maps_cases[i].columns ? 256 : 0;
        desc.experts.expert_map_columns = maps_cases[i].columns;
        desc.experts.num_physical_experts = maps_cases[i].num_physical;
        desc.max_tokens = 4096;
        desc.operations = MOE_ROUTE_OPERATION_MAPS;
        snprintf(what, sizeof what, "maps %u", i);
        if (!small_size || maps_cases[i].in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < NUM_CASES(layer_cases); i++) {
        model_describe(&layer_cases[i].spec, &desc);
        desc.experts.gate_up.bias = desc.experts.down.bias = layer_cases[i].spec.bias_dtype != MOE_ROUTE_DTYPE_DEFAULT ? 256 : 0;
        desc.max_tokens = layer_tokens;
        desc.operations = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE | (i < 7 ? MOE_ROUTE_OPERATION_MATMUL : 0);
        if (i == 6) { /* every variant that a layer can hold */
            desc.operations = 511;
            desc.experts.num_ranks = 3;
        }
        snprintf(what, sizeof what, "layer %u", i);
        if (!small_size || layer_cases[i].in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < NUM_CASES(choice_cases); i++) {
        model_describe(&choice_cases[i].spec, &desc);
        desc.experts.gate_up.bias = desc.experts.down.bias = choice_cases[i].spec.bias_dtype != MOE_ROUTE_DTYPE_DEFAULT ? 256 : 0;
        if (choice_cases[i].spec.choices.up_apart) desc.experts.up.bias = desc.experts.gate_up.bias;
        desc.max_tokens = c->target == 90 && i % 3 != 0 ? 32 : layer_tokens;
        desc.operations = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_COMBINE;
        snprintf(what, sizeof what, "choices %u", i);
        if (!small_size || choice_cases[i].in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < NUM_CASES(dispatch_cases); i++) {
        const dispatch_case *d = &dispatch_cases[i];
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = d->num_experts;
        desc.router.top_k = d->top_k;
        desc.router.weights_dtype = d->weights_dtype;
        desc.experts.hidden_size = d->hidden_size;
        desc.experts.dtype = d->dtype;
        desc.experts.num_identity_experts = d->num_identity;
        desc.experts.num_ranks = d->num_ranks;
        desc.experts.expert_map = d->columns ? 256 : 0;
        desc.experts.expert_map_columns = d->columns;
        desc.experts.num_physical_experts = d->num_physical;
        desc.rows_dtype = MOE_ROUTE_F32;
        desc.operations = MOE_ROUTE_OPERATION_DISPATCH | MOE_ROUTE_OPERATION_COMBINE;
        snprintf(what, sizeof what, "dispatch %u", i);
        if (!small_size || d->in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < NUM_CASES(ranks_cases); i++) {
        model_describe(&ranks_cases[i].spec, &desc);
        desc.experts.gate_up.bias = desc.experts.down.bias = ranks_cases[i].spec.bias_dtype != MOE_ROUTE_DTYPE_DEFAULT ? 256 : 0;
        desc.experts.num_identity_experts = 0;
        desc.experts.num_physical_experts = desc.router.num_experts + ranks_cases[i].replicas;
        desc.experts.num_local_experts = 1;
        desc.max_tokens = 200;
        desc.rows_dtype = MOE_ROUTE_F32;
        desc.operations = MOE_ROUTE_OPERATION_EXPERTS | MOE_ROUTE_OPERATION_EXPERT_ROWS;
        snprintf(what, sizeof what, "ranks %u", i);
        if (!small_size || ranks_cases[i].in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < NUM_CASES(format_cases); i++) {
        const format_case *f = &format_cases[i];
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = 3;
        desc.router.top_k = 2;
        desc.experts.hidden_size = f->rows;
        desc.experts.intermediate_size = f->inner;
        desc.experts.dtype = i % 3 == 0 ? MOE_ROUTE_F16 : i % 3 == 1 ? MOE_ROUTE_BF16 : MOE_ROUTE_F32;
        desc.experts.down.format = f->format;
        desc.experts.down.group_size = f->group_size;
        desc.experts.down.scales_dtype = f->scales_dtype;
        desc.experts.down.codes = f->codes;
        desc.experts.down.zero_points = f->zero_points ? 256 : 0;
        desc.experts.down.group_rows = f->group_rows;
        desc.experts.down.global_scales = f->global_scales ? 256 : 0;
        desc.max_tokens = 300;
        snprintf(what, sizeof what, "format case %u", i);
        if (!small_size || f->in_small) compile_layer(c, context, &desc, what);
    }
    for (i = 0; i < 2; i++) { /* the demo's layers */
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = 32;
        desc.router.top_k = 4;
        desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
        desc.experts.hidden_size = 256;
        desc.experts.intermediate_size = 128;
        desc.experts.gate_up.format = desc.experts.down.format = i ? MOE_ROUTE_FORMAT_INT4 : MOE_ROUTE_FORMAT_BF16;
        desc.experts.gate_up.group_size = desc.experts.down.group_size = i ? 64 : 0;
        desc.max_tokens = 1024;
        compile_layer(c, context, &desc, i ? "demo INT4" : "demo BF16");
    }
}

static uint32_t count_variants(const moe_route_context *context) {
    const moer_variant *variant;
    uint32_t count = 0;
    for (variant = context->variants; variant != NULL; variant = variant->next) count++;
    return count;
}

/* A macro that two headers define: which one holds depends on the order of includes. NVRTC only warns. Called by several threads. */
static void note_warning(moe_route_log_level level, const char *message, void *user) {
    compilation *c = (compilation *)user;
    (void)level;
    if (strncmp(message, "NVRTC on ", 9) == 0 && strstr(message, "redefinition") && !__atomic_exchange_n(&c->warned, 1, __ATOMIC_SEQ_CST)) snprintf(c->warning, sizeof c->warning, "%s", message);
}

static void *compile_for_target(void *user) {
    compilation *c = (compilation *)user;
    moe_route_context_desc desc;
    moe_route_context *context = NULL;
    int supported[64], count = 0, i;
    memset(&desc, 0, sizeof desc);
    desc.device = MOE_ROUTE_DEVICE_COMPILE;
    desc.compile_target = c->target;
    desc.cache_dir = "off";
    desc.logger.log = note_warning;
    desc.logger.user = c;
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) {
        moe_route_message(context, c->failure, sizeof c->failure);
    } else {
        moe_route_layer_desc first;
        memset(&first, 0, sizeof first);
        first.router.num_experts = 8;
        first.router.top_k = 2;
        compile_layer(c, context, &first, "a first router"); /* loads NVRTC */
        if (!c->failure[0]) {
            c->nvrtc_version = context->nvrtc.version;
            if (context->nvrtc.nvrtcGetNumSupportedArchs(&count) == 0 && count <= 64) context->nvrtc.nvrtcGetSupportedArchs(supported);
            for (i = 0; i < count; i++) c->known |= supported[i] == (int)c->target;
            if (c->known) {
                compile_layers(c, context);
                c->num_variants = count_variants(context);
            }
        }
    }
    moe_route_context_destroy(context);
    if (c->warned && !c->failure[0]) {
        for (i = 0; c->warning[i]; i++)
            if (c->warning[i] == '\n') c->warning[i] = ' ';
        snprintf(c->failure, sizeof c->failure, "%s", c->warning);
    }
    return NULL;
}

/* Two architectures at a time: NVRTC compiles in parallel. */
static void compile_for(const uint32_t *targets, uint32_t count) {
    uint32_t i, j;
    for (i = 0; i < count; i += 2) {
        static compilation results[2];
        pthread_t threads[2];
        const uint32_t n = count - i < 2 ? count - i : 2;
        memset(results, 0, sizeof results);
        for (j = 0; j < n; j++) {
            results[j].target = targets[i + j];
            if (pthread_create(&threads[j], NULL, compile_for_target, &results[j]) != 0) device_die("no thread");
        }
        for (j = 0; j < n; j++) {
            const compilation *c = &results[j];
            pthread_join(threads[j], NULL);
            if (c->failure[0]) printf("FAIL compile_sm_%u: %.*s\n", c->target, (int)strcspn(c->failure, "\n"), c->failure);
            else if (!c->known) printf("SKIP compile_sm_%u: NVRTC %d.%d doesn't know sm_%u\n", c->target, c->nvrtc_version / 1000, c->nvrtc_version % 1000 / 10, c->target);
            else printf("PASS compile_sm_%u (%u variants, NVRTC %d.%d)\n", c->target, c->num_variants, c->nvrtc_version / 1000, c->nvrtc_version % 1000 / 10);
            test_current.failed += c->failure[0] != 0;
            test_current.passed += !c->failure[0];
            fflush(stdout);
        }
    }
}

int main(int argc, char **argv) {
    static const uint32_t all[] = {80, 86, 89, 90, 100, 103, 120, 121};
    uint32_t targets[16], count = 0;
    const char *list = getenv("TEST_TARGETS");
    test_begin(argc, argv);
    small_size = test_is_small();
    while (list && *list && count < 16) {
        char *end;
        targets[count++] = (uint32_t)strtoul(list, &end, 10);
        if (end == list) device_die("TEST_TARGETS isn't a list of numbers");
        list = end + strspn(end, " ");
    }
    if (count) compile_for(targets, count);
    else compile_for(all, 8);
    return test_end();
}
