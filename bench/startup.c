/*
  startup.c: what creating a layer costs at the start of a process: with an empty cache, with a warm one, and with a pack. Each
  measurement is a process of its own. With a GPU the driver's start-up (creating the context) is told apart; without one, code
  for sm_90 is made and not loaded.

      build/bench_startup        prints medians, minima and maxima of 11 runs in milliseconds
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define RUNS 11

static void describe(moe_route_layer_desc *desc) { /* as Qwen3-30B-A3B's layers; nothing is run, so that no address is needed */
    memset(desc, 0, sizeof *desc);
    desc->router.num_experts = 128;
    desc->router.top_k = 8;
    desc->router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc->experts.hidden_size = 2048;
    desc->experts.intermediate_size = 768;
    desc->experts.gate_up.format = desc->experts.down.format = MOE_ROUTE_FORMAT_INT4;
    desc->experts.gate_up.group_size = desc->experts.down.group_size = 64;
    desc->experts.gate_up.data = desc->experts.gate_up.scales = 256;
    desc->experts.down.data = desc->experts.down.scales = 256;
}

/* In a process of its own: prints the times, and what the layer was made of. 1: no such device. */
static int measure(const char *device, const char *pack, const char *save) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_statistics s;
    moe_route_status status;
    double start, created, done;
    char message[4096];
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = strcmp(device, "gpu") == 0 ? MOE_ROUTE_DEVICE_GPU : MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = 90;
    if (strncmp(device, "compile", 7) == 0 && device[7]) context_desc.compile_target = (uint32_t)atoi(device + 7);
    start = moer_milliseconds();
    status = moe_route_context_create(&context_desc, &context);
    created = moer_milliseconds();
    if (status == MOE_ROUTE_ERROR_NO_DEVICE) return 1;
    if (status == MOE_ROUTE_OK && pack[0]) status = moe_route_pack_load(context, pack);
    describe(&desc);
    if (status == MOE_ROUTE_OK) status = moe_route_layer_create(context, &desc, &layer);
    done = moer_milliseconds();
    if (status == MOE_ROUTE_OK && save[0]) status = moe_route_pack_save(&context, 1, save);
    if (status != MOE_ROUTE_OK) {
        moe_route_message(context, message, sizeof message);
        fprintf(stderr, "%s\n", message);
        return 2;
    }
    moe_route_context_get_statistics(context, &s);
    printf("%.3f %.3f %u %u %u %u\n", created - start, done - created, context->target, moe_route_layer_num_variants(layer),
           (unsigned)s.compiles, (unsigned)(s.cache_hits + s.pack_hits));
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return 0;
}

typedef struct times {
    double context[RUNS], layer[RUNS];
    unsigned target, variants, compiled, kept;
} times;

static int run_once(const char *program, const char *device, const char *pack, const char *save, times *t, int i) {
    char command[2048];
    FILE *child;
    int fields, ended;
    snprintf(command, sizeof command, "'%s' '%s' '%s' '%s'", program, device, pack, save);
    child = popen(command, "r");
    if (!child) return 2;
    fields = fscanf(child, "%lf %lf %u %u %u %u", &t->context[i], &t->layer[i], &t->target, &t->variants, &t->compiled, &t->kept);
    ended = pclose(child);
    return fields == 6 && ended == 0 ? 0 : WIFEXITED(ended) && WEXITSTATUS(ended) == 1 ? 1 : 2;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void print_times(const char *what, times *t) {
    qsort(t->context, RUNS, sizeof(double), compare);
    qsort(t->layer, RUNS, sizeof(double), compare);
    printf("%-11s  layer %8.2f (%.2f to %.2f)   context %8.2f   %u variants for sm_%u: %u compiled, %u read\n", what, t->layer[RUNS / 2],
           t->layer[0], t->layer[RUNS - 1], t->context[RUNS / 2], t->variants, t->target, t->compiled, t->kept);
}

int main(int argc, char **argv) {
    char folder[] = "/tmp/moe_route_startup.XXXXXX", cache[64], pack[64], command[128], saver[32];
    const char *device = "gpu";
    static times cold, warm, packed, off;
    int i, result;
    if (argc == 4) return measure(argv[1], argv[2], argv[3]);
    if (!mkdtemp(folder)) return 2;
    snprintf(cache, sizeof cache, "%s/cache", folder);
    snprintf(pack, sizeof pack, "%s/layer.moep", folder);
    snprintf(command, sizeof command, "rm -rf '%s'", cache);
    setenv("MOE_ROUTE_CACHE_DIR", cache, 1);
    result = run_once(argv[0], device, "", "", &cold, 0);
    if (result == 1) {
        device = "compile";
        result = run_once(argv[0], device, "", "", &cold, 0);
    }
    for (i = 0; i < RUNS && result == 0; i++) {
        if (system(command) != 0) result = 2;
        if (result == 0) result = run_once(argv[0], device, "", "", &cold, i);
        if (result == 0) result = run_once(argv[0], device, "", "", &warm, i);
    }
    setenv("MOE_ROUTE_CACHE_DIR", "off", 1);
    snprintf(saver, sizeof saver, "compile%u", cold.target);
    if (result == 0) result = run_once(argv[0], saver, "", pack, &off, 0);
    for (i = 0; i < RUNS && result == 0; i++) result = run_once(argv[0], device, pack, "", &packed, i);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) result = 2;
    if (result != 0) return result;
    printf("median (minimum to maximum) of %d processes, milliseconds, on a %s\n", RUNS, strcmp(device, "gpu") == 0 ? "GPU" : "machine without a GPU");
    print_times("cold cache", &cold);
    print_times("warm cache", &warm);
    print_times("pack", &packed);
    return 0;
}
