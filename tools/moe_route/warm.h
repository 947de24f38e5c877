/*
  warm.h: moe_route warm: compiles a model's variants for given architectures into a cache folder or a pack, without a GPU, so
  that no program has to later. Variants are made in the library's own threads; progress comes from its log.
*/
#ifndef WARM_H
#define WARM_H

enum { WARM_ARCHITECTURES_MAX = 16, WARM_LAYERS_MAX = 16 };

static struct warm_options {
    const char *architectures, *pack, *cache_dir, *nvrtc;
    int json;
} warm_wanted;

static const option warm_options[] = {
    OPT_TITLE("What is made"),
    OPT_TEXT("--arch", "LIST",
             "architectures, such as 80,90,120: every one that will be met, since variants are looked up by the exact one",
             &warm_wanted.architectures),
    OPT_TEXT("--pack", "FILE", "write a pack; the cache is then neither read nor written, unless --cache-dir names one",
             &warm_wanted.pack),
    OPT_TEXT("--cache-dir", "DIR", "the cache folder; without it the usual one", &warm_wanted.cache_dir),
    OPT_TEXT("--nvrtc", "PATH", "NVRTC's library or folder; without it, it is looked for", &warm_wanted.nvrtc),
    OPT_FLAG("--json", "a JSON object a line: each variant, then a summary", &warm_wanted.json),
    OPT_TEXT("--and", "...", "begins another layer, which differs in the options that follow", NULL),
    OPT_END,
};

static const options warm_command = {
    .command = "warm",
    .usage = "warm --model TYPE --experts N --top-k N --hidden N --intermediate N --format FORMAT --arch LIST [OPTIONS]",
    .about = "Compiles every kernel variant that a layer needs into the cache folder, or into one file that a program loads "
             "with moe_route_pack_load. It takes NVRTC, but neither a GPU nor a driver. A variant depends on everything that "
             "the layer's description says, so say here what the program says there: formats, types, which arrays are given, "
             "max_tokens and operations. Addresses are taken to be aligned to 16 bytes at least.",
    .tables = {warm_options, router_options, experts_options},
    .after = "Example: the two kinds of layers of a GGUF file in Q4_K_M, for A100 and H100, in one pack\n"
             "  moe_route warm --model qwen3_moe --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --separate-up \\\n"
             "      --format q4_k --arch 80,90 --pack qwen3.moep --and --down-format q6_k\n"
             "\n"
             "Status: 0; 1 when NVRTC refused a kernel; 2 when an option or the layer is wrong; 4 without NVRTC; 5 when the "
             "pack can't be written.\n",
    .joins = 1,
};

/* ---- progress: a bar where stderr is a terminal ---- */

typedef struct warm_progress {
    int is_terminal, is_unicode;
    uint32_t target, done, total, layer, num_layers; /* variants of the layer that is being made; layers of all architectures */
    char warning[1024];
} warm_progress;

static void warm_draw(const warm_progress *p, const char *what) {
    enum { WIDTH = 24 };
    const double part = p->total ? (double)p->done / p->total : 0;
    const unsigned full = (unsigned)((p->layer + part) / p->num_layers * WIDTH + 0.5);
    unsigned i;
    fprintf(stderr, "\r\033[Ksm_%-4u ", (unsigned)p->target);
    for (i = 0; i < WIDTH; i++) fputs(i < full ? (p->is_unicode ? "█" : "#") : (p->is_unicode ? "░" : "."), stderr);
    fprintf(stderr, " %u/%u %.48s", (unsigned)p->done, (unsigned)p->total, what);
    fflush(stderr);
}

/* Called by several threads at once: stderr's lock guards the progress. */
static void warm_hear_log(moe_route_log_level level, const char *message, void *user) {
    warm_progress *p = (warm_progress *)user;
#if !defined(_WIN32)
    flockfile(stderr);
#endif
    if (level == MOE_ROUTE_LOG_WARNING && !p->warning[0]) snprintf(p->warning, sizeof p->warning, "%s", message);
    if (strncmp(message, "variant ", 8) == 0 && level == MOE_ROUTE_LOG_INFO) {
        char what[64], time[32] = "";
        const char *at = strstr(message, " in ");
        if (p->done < p->total) p->done++;
        if (at) sscanf(at, " in %24[0-9.] ms", time);
        snprintf(what, sizeof what, "%.*s %s ms", (int)strcspn(message + 8, " "), message + 8, time);
        if (p->is_terminal) warm_draw(p, what);
    }
#if !defined(_WIN32)
    funlockfile(stderr);
#endif
}

static void warm_clear(const warm_progress *p) {
    if (p->is_terminal) fprintf(stderr, "\r\033[K");
}

/* ---- variants ---- */

typedef struct warm_sums {
    unsigned variants, compiled;
    double milliseconds;
    uint64_t bytes;
} warm_sums;

static const char *warm_origin(moe_route_origin origin) {
    return origin == MOE_ROUTE_ORIGIN_COMPILED ? "compiled" : origin == MOE_ROUTE_ORIGIN_CACHE ? "cache" : "pack";
}

/* Layers share variants: those that an earlier layer of the architecture had aren't told again. */
static int warm_is_new(moe_route_layer *const *layers, uint32_t count, const moe_route_variant_info *info) {
    uint32_t l, i;
    for (l = 0; l < count; l++)
        for (i = 0; i < moe_route_layer_num_variants(layers[l]); i++) {
            moe_route_variant_info other;
            if (moe_route_layer_variant(layers[l], i, &other) == MOE_ROUTE_OK && strcmp(other.kernel, info->kernel) == 0 &&
                strcmp(other.variant, info->variant) == 0)
                return 0;
        }
    return 1;
}

static void warm_tell(uint32_t target, const moe_route_variant_info *info, warm_sums *sums) {
    sums->variants++;
    sums->compiled += info->origin == MOE_ROUTE_ORIGIN_COMPILED;
    sums->bytes += info->cubin_size;
    if (warm_wanted.json) {
        json_writer json;
        json_begin_file(&json, stdout, 0);
        json_begin(&json, NULL, '{');
        json_count(&json, "target", target);
        json_text(&json, "kernel", info->kernel);
        json_text(&json, "origin", warm_origin(info->origin));
        json_number(&json, "milliseconds", info->milliseconds, 5);
        json_count(&json, "bytes", info->cubin_size);
        json_text(&json, "variant", info->variant);
        json_end(&json, '}');
    } else {
        const int is_cut = OUTPUT_IS_TERMINAL(stdout) && strlen(info->variant) > 48; /* the rest is for files */
        printf("sm_%-4u %-8s %-8s %8.1f ms %9s  %.*s%s\n", (unsigned)target, info->kernel, warm_origin(info->origin),
               info->milliseconds, output_size(info->cubin_size), is_cut ? 45 : (int)sizeof info->variant, info->variant,
               is_cut ? "..." : "");
    }
    fflush(stdout);
}

static void warm_summarise(const warm_sums *sums, uint32_t num_targets, const char *folder, double seconds) {
    if (warm_wanted.json) {
        json_writer json;
        json_begin_file(&json, stdout, 0);
        json_begin(&json, NULL, '{');
        json_count(&json, "variants", sums->variants);
        json_count(&json, "compiled", sums->compiled);
        json_count(&json, "bytes", sums->bytes);
        json_number(&json, "seconds", seconds, 4);
        json_text(&json, "cache", folder[0] ? folder : NULL);
        json_text(&json, "pack", warm_wanted.pack);
        json_end(&json, '}');
        return;
    }
    printf("%u variants for %u architecture%s, %s: %u compiled, %u were there; %.1f s\n", sums->variants, (unsigned)num_targets,
           num_targets == 1 ? "" : "s", output_size(sums->bytes), sums->compiled, sums->variants - sums->compiled, seconds);
    if (folder[0]) printf("cache: %s\n", folder);
    if (warm_wanted.pack) printf("pack: %s\n", warm_wanted.pack);
}

/* ---- the whole ---- */

static double warm_seconds(void) { return moer_milliseconds() / 1000; }

/* The layers that the command line describes, each checked by the preset alone so far. */
static uint32_t warm_parse(int argc, char **argv, layer_options *layers) {
    uint32_t count = 0;
    int used = 0, ended;
    do {
        const int part = options_parse(&warm_command, argc - used, argv + used);
        used += part;
        ended = used == argc && (part == 0 || strcmp(argv[used - 1], "--and") != 0);
        if (count == WARM_LAYERS_MAX) stop(STATUS_USAGE, "there are more than %d layers", WARM_LAYERS_MAX);
        layers[count] = layer_wanted;
        if (layers[count].config) config_apply(&layers[count]);
        count++;
    } while (!ended);
    return count;
}

static int warm_main(int argc, char **argv) {
    static layer_options layers[WARM_LAYERS_MAX];
    static warm_progress progress;
    uint32_t targets[WARM_ARCHITECTURES_MAX];
    moe_route_context *contexts[WARM_ARCHITECTURES_MAX];
    moe_route_layer *made[WARM_LAYERS_MAX];
    moe_route_context_info info;
    warm_sums sums;
    const double start = warm_seconds();
    const uint32_t num_layers = warm_parse(argc, argv, layers);
    uint32_t num_targets, a, l, i;
    if (!warm_wanted.architectures)
        stop(STATUS_USAGE, "--arch is missing: the architectures to compile for, such as --arch 80,90");
    num_targets = options_numbers("--arch", warm_wanted.architectures, 80, 999, targets, WARM_ARCHITECTURES_MAX);
    memset(&sums, 0, sizeof sums);
    memset(&info, 0, sizeof info);
    progress.is_terminal = OUTPUT_IS_TERMINAL(stderr);
    progress.is_unicode = output_is_unicode();
    progress.num_layers = num_targets * num_layers;
    for (a = 0; a < num_targets; a++) {
        moe_route_context_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.device = MOE_ROUTE_DEVICE_COMPILE;
        desc.compile_target = targets[a];
        desc.cache_dir = warm_wanted.cache_dir ? warm_wanted.cache_dir : warm_wanted.pack ? "off" : NULL;
        desc.nvrtc_path = warm_wanted.nvrtc;
        desc.logger.log = warm_hear_log;
        desc.logger.user = &progress;
        progress.target = targets[a];
        must_library(contexts[a], moe_route_context_create(&desc, &contexts[a]));
        moe_route_context_get_info(contexts[a], &info);
        if (!warm_wanted.pack && info.cache_dir[0] == 0)
            stop(STATUS_FILE, "there is nothing to warm: %s",
                 progress.warning[0] ? progress.warning
                                     : "MOE_ROUTE_CACHE_DIR is off; name a folder by --cache-dir, or a pack by --pack");
        for (l = 0; l < num_layers; l++) {
            moe_route_layer_desc layer_desc;
            moe_route_status status;
            layer_describe(contexts[a], &layers[l], &layer_desc);
            progress.layer = a * num_layers + l;
            progress.done = 0;
            must_library(contexts[a], moe_route_layer_count_variants(contexts[a], &layer_desc, &progress.total));
            if (progress.is_terminal) warm_draw(&progress, "");
            status = moe_route_layer_create(contexts[a], &layer_desc, &made[l]);
            warm_clear(&progress);
            must_library(contexts[a], status);
            for (i = 0; i < moe_route_layer_num_variants(made[l]); i++) {
                moe_route_variant_info variant;
                must_library(contexts[a], moe_route_layer_variant(made[l], i, &variant));
                if (warm_is_new(made, l, &variant)) warm_tell(targets[a], &variant, &sums);
            }
        }
        for (l = 0; l < num_layers; l++) moe_route_layer_destroy(made[l]);
        if (progress.warning[0]) {
            fprintf(stderr, "moe_route warm: %s\n", progress.warning);
            if (!warm_wanted.pack) exit(STATUS_FILE);
            progress.warning[0] = 0;
        }
    }
    if (warm_wanted.pack && moe_route_pack_save(contexts, num_targets, warm_wanted.pack) != MOE_ROUTE_OK) {
        char text[1024];
        moe_route_message(contexts[0], text, sizeof text);
        stop(STATUS_FILE, "%s", text);
    }
    warm_summarise(&sums, num_targets, info.cache_dir, warm_seconds() - start);
    for (a = 0; a < num_targets; a++) moe_route_context_destroy(contexts[a]);
    return STATUS_OK;
}

#endif /* WARM_H */
