/*
  route.h: moe_route route: router logits, or a trace of chosen experts, in; ids and weights out, and what they say about the
  experts: how many tokens each gets, which are chosen together, how many distinct ones a batch reads. The pictures are in
  route_picture.h. The library's CPU backend routes: a GPU would give the same bits.
*/
#ifndef ROUTE_H
#define ROUTE_H

enum { ROUTE_EXPERTS_MAX = 2048, ROUTE_TOP_K_MAX = 64, ROUTE_BATCHES_MAX = 24, ROUTE_PAIRS_MAX = 32 };

static struct route_options {
    const char *logits, *trace, *logit_bias, *selection_bias, *expert_scale, *csv, *json, *text, *svg;
    int type, without_biases;
} route_wanted = {.type = MOE_ROUTE_F32};

static const option route_options[] = {
    OPT_TITLE("Input: one of"),
    OPT_TEXT("--logits", "FILE",
             "router logits [tokens, experts]: a .npy file of float32 or float16, or the bare values, row by row",
             &route_wanted.logits),
    OPT_TEXT("--trace", "FILE",
             "a line a token: its experts' ids, with spaces or commas between; id:weight is read, too, -1 is none",
             &route_wanted.trace),
    OPT_TITLE("Arrays of the router"),
    OPT_CHOICE("--type", "TYPE", "of bare logits; without it f32", &route_wanted.type, dtype_choices),
    OPT_TEXT("--selection-bias", "FILE", "[experts] (e_score_correction_bias), as .npy or bare f32",
             &route_wanted.selection_bias),
    OPT_TEXT("--logit-bias", "FILE", "[experts], likewise: the bias of the router's linear layer", &route_wanted.logit_bias),
    OPT_TEXT("--expert-scale", "FILE", "[experts], likewise: factors of the weights", &route_wanted.expert_scale),
    OPT_FLAG("--without-biases", "do without the arrays that the model's type has", &route_wanted.without_biases),
    OPT_TITLE("Output: a summary on the terminal, and where FILE is - that on stdout instead"),
    OPT_TEXT("--csv", "FILE", "token, slot, id and weight", &route_wanted.csv),
    OPT_TEXT("--json", "FILE", "ids, weights and all that is counted", &route_wanted.json),
    OPT_TEXT("--text", "FILE", "a line a token, id:weight; --trace reads it", &route_wanted.text),
    OPT_TEXT("--svg", "FILE", "a picture of all three counts", &route_wanted.svg),
    OPT_END,
};

static const options route_command = {
    .command = "route",
    .usage = "route (--logits FILE | --trace FILE) [OPTIONS]",
    .about = "Routes logits as a model would, or reads ids that were chosen elsewhere, and shows what that means: tokens per "
             "expert, experts that are chosen together, and how many distinct experts a batch of consecutive tokens needs, "
             "which is what decides how much memory a decode step reads. Needs no GPU.",
    .tables = {route_options, router_options},
    .after = "Examples:\n"
             "  moe_route route --model qwen3_moe --top-k 8 --logits logits.npy --svg routing.svg\n"
             "  moe_route route --trace ids.txt --experts 128 --json -\n"
             "\n"
             "Status: 0; 2 when an option or the router is wrong; 5 when a file can't be read, isn't what it should be, or "
             "can't be written.\n",
};

typedef struct route_pair {
    uint32_t a, b, tokens;
} route_pair;

typedef struct routing {
    const char *source; /* the file */
    uint32_t num_tokens, num_experts, top_k, num_shared;
    int32_t *ids;                    /* [T, k]; -1: none */
    float *weights, *shared_weights; /* [T, k], [T, S], or NULL */
    uint32_t *tokens;                /* [E] that chose each expert */
    uint32_t *together;              /* [E, E] tokens that chose both */
    uint32_t num_batches, batches[ROUTE_BATCHES_MAX];
    double distinct[ROUTE_BATCHES_MAX], uniform[ROUTE_BATCHES_MAX]; /* mean distinct experts; what uniform routing would need */
    uint32_t num_pairs;
    route_pair pairs[ROUTE_PAIRS_MAX]; /* most often together first */
    uint32_t unused, most;             /* experts without tokens; tokens of the fullest */
    double mean, effective;            /* tokens an expert; the number of equally used experts that has the same entropy */
} routing;

/* ---- in: logits ---- */

static moe_route_address route_vector(const char *path, const char *option_name, uint32_t count) {
    array a;
    if (!path) return 0;
    array_load(path, QUANTIZE_F32, &a);
    if ((a.rows > 1 ? a.rows : 1) * a.columns != count)
        stop(STATUS_FILE, "%s %s holds %lu numbers; needed is one for each of the %u experts", option_name, path,
             (unsigned long)((a.rows > 1 ? a.rows : 1) * a.columns), (unsigned)count);
    return (moe_route_address)(uintptr_t)a.values;
}

/* Arrays that the model's type has must be given, or done without on purpose. */
static void route_give(moe_route_layer_desc *desc, uint32_t need, const char *path, const char *option_name, const char *tensor,
                       uint32_t count, moe_route_address *address) {
    *address = route_vector(path, option_name, count);
    if ((desc->needs & need) && !path && !route_wanted.without_biases)
        stop(STATUS_USAGE, "%s has %s: give it by %s FILE, or do without by --without-biases", layer_wanted.model_type, tensor,
             option_name);
    desc->needs &= ~need;
}

/* Where the numbers stop short of bare logits' experts, they are asked for; .npy files have them. */
static void route_describe(moe_route_context *context, const array *logits, moe_route_layer_desc *desc) {
    layer_options *o = &layer_wanted;
    uint32_t columns;
    if (o->config) config_apply(o);
    o->model.hidden_size = o->model.intermediate_size = 0; /* this layer only routes */
    if (!o->model.num_experts && logits->rows && logits->columns <= ROUTE_EXPERTS_MAX)
        o->model.num_experts = (uint32_t)logits->columns;
    if (!o->model.num_experts && !o->model_type) stop(STATUS_USAGE, "--experts is missing: how many logits a token has");
    if (!o->model.top_k && !o->model_type) stop(STATUS_USAGE, "--top-k is missing: how many experts a token gets");
    layer_describe_router(context, o, desc);
    columns = desc->router.num_experts + desc->router.num_shared_experts;
    route_give(desc, MOE_ROUTE_NEED_SELECTION_BIAS, route_wanted.selection_bias, "--selection-bias", "a selection bias",
               desc->router.num_experts, &desc->router.selection_bias);
    route_give(desc, MOE_ROUTE_NEED_LOGIT_BIAS, route_wanted.logit_bias, "--logit-bias", "a bias of the logits", columns,
               &desc->router.logit_bias);
    route_give(desc, MOE_ROUTE_NEED_EXPERT_SCALE, route_wanted.expert_scale, "--expert-scale", "a factor for each expert",
               desc->router.num_experts, &desc->router.expert_scale);
    if (desc->needs & MOE_ROUTE_NEED_ID_TABLE)
        stop(STATUS_USAGE, "--hash-vocab: such a layer takes its ids from a table; give them by --trace");
    desc->needs = 0;
    desc->experts.num_identity_experts = 0;
    desc->experts.hidden_size = desc->experts.intermediate_size = 0;
    if (columns == 0 || (logits->rows ? logits->columns != columns : logits->columns % columns != 0))
        stop(STATUS_FILE, "%s holds %s%lu numbers%s; the router has %u logits a token", route_wanted.logits,
             logits->rows ? "rows of " : "", (unsigned long)logits->columns, logits->rows ? "" : " in all", (unsigned)columns);
}

static void route_logits(routing *r) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_route_args args;
    array logits;
    size_t tokens, t;
    uint32_t columns;
    const uint32_t chunk = 4096;
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = MOE_ROUTE_DEVICE_CPU;
    must_library(context, moe_route_context_create(&context_desc, &context));
    array_load(route_wanted.logits, (quantize_dtype)route_wanted.type, &logits);
    route_describe(context, &logits, &desc);
    columns = desc.router.num_experts + desc.router.num_shared_experts;
    tokens = logits.rows ? logits.rows : logits.columns / columns;
    if (tokens > UINT32_MAX / ROUTE_TOP_K_MAX)
        stop(STATUS_FILE, "%s holds %lu tokens, too many to count", route_wanted.logits, (unsigned long)tokens);
    desc.max_tokens = chunk;
    desc.operations = MOE_ROUTE_OPERATION_ROUTE;
    must_library(context, moe_route_layer_create(context, &desc, &layer));
    r->num_tokens = (uint32_t)tokens;
    r->num_experts = desc.router.num_experts;
    r->top_k = desc.router.top_k;
    r->num_shared = desc.router.num_shared_experts;
    r->ids = (int32_t *)allocate(tokens * r->top_k, sizeof *r->ids);
    r->weights = (float *)allocate(tokens * r->top_k, sizeof *r->weights);
    r->shared_weights = r->num_shared ? (float *)allocate(tokens * r->num_shared, sizeof *r->shared_weights) : NULL;
    memset(&args, 0, sizeof args);
    for (t = 0; t < tokens; t += chunk) {
        args.num_tokens = tokens - t < chunk ? (uint32_t)(tokens - t) : chunk;
        args.logits = (moe_route_address)(uintptr_t)(logits.values + t * columns);
        args.ids = (moe_route_address)(uintptr_t)(r->ids + t * r->top_k);
        args.weights = (moe_route_address)(uintptr_t)(r->weights + t * r->top_k);
        if (r->num_shared) args.shared_weights = (moe_route_address)(uintptr_t)(r->shared_weights + t * r->num_shared);
        must_library(context, moe_route_route(layer, &args));
    }
    free(logits.values);
    free((void *)(uintptr_t)desc.router.selection_bias);
    free((void *)(uintptr_t)desc.router.logit_bias);
    free((void *)(uintptr_t)desc.router.expert_scale);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
}

/* ---- in: a trace ---- */

/* Reads the ids of one line, which is terminated; their number. */
static uint32_t route_parse_line(const char *line, unsigned long number, int32_t *ids, float *weights, int *weighted) {
    uint32_t count = 0;
    while (*line) {
        char *end;
        long id;
        line += strspn(line, " \t,\r");
        if (*line == 0 || *line == '#') break;
        errno = 0;
        id = strtol(line, &end, 10);
        if (end == line || errno || id < -1 || id >= ROUTE_EXPERTS_MAX)
            stop(STATUS_FILE, "%s, line %lu: \"%.12s\" is no expert's id; allowed is -1 to %d", route_wanted.trace, number, line,
                 ROUTE_EXPERTS_MAX - 1);
        if (count == ROUTE_TOP_K_MAX)
            stop(STATUS_FILE, "%s, line %lu has more than %d ids", route_wanted.trace, number, ROUTE_TOP_K_MAX);
        weights[count] = 0;
        if (*end == ':') {
            const char *weight = end + 1;
            weights[count] = (float)strtod(weight, &end);
            if (end == weight) stop(STATUS_FILE, "%s, line %lu: \"%.12s\" is no weight", route_wanted.trace, number, weight);
            *weighted = 1;
        }
        if (*end && !strchr(" \t,\r#", *end))
            stop(STATUS_FILE, "%s, line %lu: \"%.12s\" is no expert's id", route_wanted.trace, number, line);
        ids[count++] = (int32_t)id;
        line = end;
    }
    return count;
}

static void route_trace(routing *r) {
    size_t size, i, room = 1024, first;
    unsigned char *bytes = array_read(route_wanted.trace, &size);
    unsigned long number = 1;
    int weighted = 0;
    int32_t largest = -1;
    char *text = (char *)allocate(size + 1, 1);
    memcpy(text, bytes, size);
    free(bytes);
    if (memchr(text, 0, size)) stop(STATUS_FILE, "%s holds a zero byte: it is no text", route_wanted.trace);
    if (layer_wanted.config) config_apply(&layer_wanted);
    r->ids = (int32_t *)allocate(room * ROUTE_TOP_K_MAX, sizeof *r->ids);
    r->weights = (float *)allocate(room * ROUTE_TOP_K_MAX, sizeof *r->weights);
    for (first = 0; first < size; first = i + 1, number++) {
        int32_t ids[ROUTE_TOP_K_MAX];
        float weights[ROUTE_TOP_K_MAX];
        uint32_t count, j;
        for (i = first; i < size && text[i] != '\n'; i++) continue;
        text[i] = 0;
        count = route_parse_line(text + first, number, ids, weights, &weighted);
        if (count == 0) continue;
        if (r->num_tokens == 0) r->top_k = count;
        if (count != r->top_k)
            stop(STATUS_FILE, "%s, line %lu has %u ids; the lines before have %u (-1 stands for none)", route_wanted.trace,
                 number, (unsigned)count, (unsigned)r->top_k);
        if ((size_t)(r->num_tokens + 1) * count > room * ROUTE_TOP_K_MAX) {
            room *= 2;
            r->ids = (int32_t *)realloc(r->ids, room * ROUTE_TOP_K_MAX * sizeof *r->ids);
            r->weights = (float *)realloc(r->weights, room * ROUTE_TOP_K_MAX * sizeof *r->weights);
            if (!r->ids || !r->weights) stop(STATUS_FAILED, "out of memory");
        }
        for (j = 0; j < count; j++) {
            r->ids[(size_t)r->num_tokens * count + j] = ids[j];
            r->weights[(size_t)r->num_tokens * count + j] = weights[j];
            if (ids[j] > largest) largest = ids[j];
        }
        r->num_tokens++;
    }
    free(text);
    if (r->num_tokens == 0) stop(STATUS_FILE, "%s holds no ids", route_wanted.trace);
    if (layer_wanted.model.num_experts > ROUTE_EXPERTS_MAX)
        stop(STATUS_USAGE, "--experts is %u; allowed is up to %d", (unsigned)layer_wanted.model.num_experts, ROUTE_EXPERTS_MAX);
    r->num_experts = layer_wanted.model.num_experts + layer_wanted.model.num_zero_experts;
    if (!r->num_experts) r->num_experts = largest < 0 ? 1 : (uint32_t)largest + 1;
    if (largest >= (int32_t)r->num_experts)
        stop(STATUS_FILE, "%s holds the id %d; there are %u experts", route_wanted.trace, (int)largest, (unsigned)r->num_experts);
    if (!weighted) {
        free(r->weights);
        r->weights = NULL;
    }
}

/* ---- counts ---- */

/* Whether slot j of a token holds an expert that no slot before it holds: one that is chosen twice is one expert. */
static int route_is_new(const int32_t *ids, uint32_t j) {
    uint32_t i;
    for (i = 0; i < j && ids[i] != ids[j]; i++) continue;
    return ids[j] >= 0 && i == j;
}

/* Mean number of distinct experts over the whole batches of `batch` consecutive tokens. */
static double route_distinct(const routing *r, uint32_t batch) {
    uint32_t *seen = (uint32_t *)allocate(r->num_experts, sizeof *seen), number;
    const uint32_t num_batches = r->num_tokens / batch;
    double sum = 0;
    for (number = 1; number <= num_batches; number++) {
        size_t p;
        for (p = (size_t)(number - 1) * batch * r->top_k; p < (size_t)number * batch * r->top_k; p++) {
            if (r->ids[p] < 0 || seen[r->ids[p]] == number) continue;
            seen[r->ids[p]] = number;
            sum++;
        }
    }
    free(seen);
    return sum / num_batches;
}

static int route_by_tokens(const void *left, const void *right) {
    const route_pair *a = (const route_pair *)left, *b = (const route_pair *)right;
    if (a->tokens != b->tokens) return a->tokens < b->tokens ? 1 : -1;
    return a->a != b->a ? (a->a > b->a) - (a->a < b->a) : (a->b > b->b) - (a->b < b->b);
}

static void route_count_pairs(routing *r) {
    const size_t e = r->num_experts;
    uint32_t t, i, j;
    r->together = (uint32_t *)allocate(e * e, sizeof *r->together);
    for (t = 0; t < r->num_tokens; t++) {
        const int32_t *ids = r->ids + (size_t)t * r->top_k;
        for (i = 0; i < r->top_k; i++)
            for (j = 0; j < r->top_k; j++)
                if (i != j && route_is_new(ids, i) && route_is_new(ids, j)) r->together[(size_t)ids[i] * e + (size_t)ids[j]]++;
    }
    for (i = 0; i < e; i++)
        for (j = i + 1; j < e; j++) {
            route_pair pair;
            pair.a = i;
            pair.b = j;
            pair.tokens = r->together[i * e + j];
            if (pair.tokens == 0 ||
                (r->num_pairs == ROUTE_PAIRS_MAX && route_by_tokens(&pair, &r->pairs[ROUTE_PAIRS_MAX - 1]) > 0))
                continue;
            if (r->num_pairs < ROUTE_PAIRS_MAX) r->num_pairs++;
            r->pairs[r->num_pairs - 1] = pair;
            qsort(r->pairs, r->num_pairs, sizeof *r->pairs, route_by_tokens);
        }
}

static void route_count(routing *r) {
    const double pairs_a_token = r->top_k;
    uint32_t batch, e, t, j;
    double sum = 0, entropy = 0;
    r->tokens = (uint32_t *)allocate(r->num_experts, sizeof *r->tokens);
    for (t = 0; t < r->num_tokens; t++)
        for (j = 0; j < r->top_k; j++) {
            const int32_t *ids = r->ids + (size_t)t * r->top_k;
            if (route_is_new(ids, j)) r->tokens[ids[j]]++;
        }
    for (e = 0; e < r->num_experts; e++) {
        sum += r->tokens[e];
        r->unused += r->tokens[e] == 0;
        if (r->tokens[e] > r->most) r->most = r->tokens[e];
    }
    for (e = 0; e < r->num_experts; e++)
        if (r->tokens[e]) entropy -= r->tokens[e] / sum * log(r->tokens[e] / sum);
    r->mean = sum / r->num_experts;
    r->effective = sum > 0 ? exp(entropy) : 0;
    for (batch = 1; batch <= r->num_tokens && batch <= 65536; batch *= 2) {
        r->batches[r->num_batches] = batch;
        r->distinct[r->num_batches] = route_distinct(r, batch);
        r->uniform[r->num_batches] =
            r->num_experts *
            (1 - pow(1 - (pairs_a_token < r->num_experts ? pairs_a_token : r->num_experts) / r->num_experts, batch));
        r->num_batches++;
    }
    route_count_pairs(r);
}

/* ---- out: files ---- */

static void route_write_csv(const routing *r) {
    FILE *file = output_open(route_wanted.csv);
    uint32_t t, j;
    fprintf(file, "token,slot,id,weight\n");
    for (t = 0; t < r->num_tokens; t++)
        for (j = 0; j < r->top_k; j++) {
            fprintf(file, "%u,%u,%d,", (unsigned)t, (unsigned)j, (int)r->ids[(size_t)t * r->top_k + j]);
            if (r->weights) fprintf(file, "%.9g", (double)r->weights[(size_t)t * r->top_k + j]);
            fprintf(file, "\n");
        }
    output_close(file, route_wanted.csv);
}

static void route_write_text(const routing *r) {
    FILE *file = output_open(route_wanted.text);
    uint32_t t, j;
    for (t = 0; t < r->num_tokens; t++)
        for (j = 0; j < r->top_k; j++) {
            fprintf(file, "%s%d", j ? " " : "", (int)r->ids[(size_t)t * r->top_k + j]);
            if (r->weights) fprintf(file, ":%.9g", (double)r->weights[(size_t)t * r->top_k + j]);
            if (j + 1 == r->top_k) fprintf(file, "\n");
        }
    output_close(file, route_wanted.text);
}

static void route_write_rows(json_writer *json, const char *name, const routing *r, const float *weights, uint32_t columns) {
    uint32_t t, j;
    json_begin(json, name, '[');
    for (t = 0; t < r->num_tokens; t++) {
        json_begin(json, NULL, '[');
        for (j = 0; j < columns; j++)
            if (weights) json_number(json, NULL, (double)weights[(size_t)t * columns + j], 9);
            else json_number(json, NULL, r->ids[(size_t)t * columns + j], 9);
        json_end(json, ']');
    }
    json_end(json, ']');
}

static void route_write_json(const routing *r) {
    FILE *file = output_open(route_wanted.json);
    json_writer json;
    uint32_t i;
    json_begin_file(&json, file, 2);
    json_begin(&json, NULL, '{');
    json_text(&json, "source", r->source);
    json_count(&json, "tokens", r->num_tokens);
    json_count(&json, "experts", r->num_experts);
    json_count(&json, "top_k", r->top_k);
    route_write_rows(&json, "ids", r, NULL, r->top_k);
    if (r->weights) route_write_rows(&json, "weights", r, r->weights, r->top_k);
    if (r->shared_weights) route_write_rows(&json, "shared_weights", r, r->shared_weights, r->num_shared);
    json_begin(&json, "tokens_per_expert", '[');
    for (i = 0; i < r->num_experts; i++) json_count(&json, NULL, r->tokens[i]);
    json_end(&json, ']');
    json_count(&json, "unused_experts", r->unused);
    json_number(&json, "effective_experts", r->effective, 6);
    json_begin(&json, "most_together", '[');
    for (i = 0; i < r->num_pairs; i++) {
        json_begin(&json, NULL, '{');
        json_count(&json, "a", r->pairs[i].a);
        json_count(&json, "b", r->pairs[i].b);
        json_count(&json, "tokens", r->pairs[i].tokens);
        json_end(&json, '}');
    }
    json_end(&json, ']');
    json_begin(&json, "distinct_experts", '[');
    for (i = 0; i < r->num_batches; i++) {
        json_begin(&json, NULL, '{');
        json_count(&json, "batch", r->batches[i]);
        json_number(&json, "mean", r->distinct[i], 6);
        json_number(&json, "uniform", r->uniform[i], 6);
        json_end(&json, '}');
    }
    json_end(&json, ']');
    json_end(&json, '}');
    output_close(file, route_wanted.json);
}

#endif /* ROUTE_H */
