/*
  check_device.h: the checks of moe_route check, on random inputs, with outputs poisoned beforehand. On the CPU backend results
  are held against the definitions in f64; on a GPU against the CPU backend: to the last bit where the library promises that,
  within the rounding of both elsewhere. Include check.h and the tests' cases.h first.
*/
#ifndef CHECK_DEVICE_H
#define CHECK_DEVICE_H

static void check_seed(test_random *random, uint64_t seed) { random_seed(random, seed + UINT64_C(7919) * check_wanted.seed); }

/* ---- routers ---- */

typedef struct check_router { /* one router, on one or both devices */
    const route_case *c;
    router_arrays arrays;
    float *vectors[3];
    int32_t *table;
    device_buffer buffers[4];
    moe_route_layer *layer;
} check_router;

static float *check_vector(test_random *random, uint32_t count, float mean, float deviation) {
    float *values = (float *)allocate(count, sizeof *values);
    uint32_t i;
    for (i = 0; i < count; i++) values[i] = mean + random_normal(random) * deviation;
    return values;
}

/* Equal seeds give equal arrays. */
static void check_router_create(test_device *on, const route_case *c, uint64_t seed, check_router *r) {
    const uint32_t num_experts = c->router.num_experts;
    moe_route_layer_desc desc;
    test_random random;
    size_t i;
    check_seed(&random, seed);
    memset(r, 0, sizeof *r);
    memset(&desc, 0, sizeof desc);
    r->c = c;
    desc.router = c->router;
    if (c->logit_bias)
        r->arrays.logit_bias = r->vectors[0] = check_vector(&random, num_experts + c->router.num_shared_experts, 0, 1.5f);
    if (c->selection_bias)
        r->arrays.selection_bias = r->vectors[1] = check_vector(&random, num_experts, c->selection_bias == 2 ? -0.8f : 0, 0.3f);
    if (c->expert_scale) r->arrays.expert_scale = r->vectors[2] = check_vector(&random, num_experts, 1, 0.2f);
    if (c->router.ids == MOE_ROUTE_IDS_TABLE) {
        r->arrays.id_table = r->table = (int32_t *)allocate((size_t)c->router.id_table_rows * c->router.top_k, sizeof *r->table);
        for (i = 0; i < (size_t)c->router.id_table_rows * c->router.top_k; i++)
            r->table[i] = (int32_t)random_below(&random, num_experts + 1) - (random_below(&random, 9) == 0);
        desc.router.id_table =
            (r->buffers[3] = device_create_from(on, r->table, (size_t)c->router.id_table_rows * c->router.top_k * 4)).address;
    }
    if (r->vectors[0])
        desc.router.logit_bias =
            (r->buffers[0] = device_create_from(on, r->vectors[0], (num_experts + c->router.num_shared_experts) * 4)).address;
    if (r->vectors[1])
        desc.router.selection_bias = (r->buffers[1] = device_create_from(on, r->vectors[1], num_experts * 4)).address;
    if (r->vectors[2])
        desc.router.expert_scale = (r->buffers[2] = device_create_from(on, r->vectors[2], num_experts * 4)).address;
    CHECK(moe_route_layer_create(on->context, &desc, &r->layer) == MOE_ROUTE_OK, "%s", device_message(on));
}

static void check_router_destroy(test_device *on, check_router *r) {
    int i;
    moe_route_layer_destroy(r->layer);
    for (i = 0; i < 4; i++)
        if (r->buffers[i].address) device_destroy(on, &r->buffers[i]);
    for (i = 0; i < 3; i++) free(r->vectors[i]);
    free(r->table);
}

typedef struct check_logits {
    void *stored;
    float *meaning;
    int32_t *given, *token_ids;
    routing_input input;
} check_logits;

/* Narrow and wide rows, rows with ties, and where `wild` rows with NaN and infinities. */
static void check_logits_create(const moe_route_router *router, uint32_t num_tokens, int wild, test_random *random,
                                check_logits *l) {
    static const float specials[] = {NAN, HUGE_VALF, -HUGE_VALF, 3e38f, -3e38f, 0.0f, -0.0f, 1e-42f};
    const uint32_t columns = router->num_experts + router->num_shared_experts;
    const size_t count = (size_t)num_tokens * columns;
    float *values = (float *)allocate(count, sizeof *values);
    uint32_t t, e;
    memset(l, 0, sizeof *l);
    for (t = 0; t < num_tokens; t++)
        for (e = 0; e < columns; e++) {
            float *value = &values[(size_t)t * columns + e];
            *value = t % 5 == 4 ? (float)random_below(random, 4) - 2.0f : random_normal(random) * (t % 4 == 3 ? 40.0f : 2.0f);
            if (wild && random_below(random, 4) == 0) *value = specials[random_below(random, 8)];
        }
    l->stored = allocate(count, 4);
    l->meaning = (float *)allocate(count, sizeof *l->meaning);
    quantize_convert(l->stored, routing_storage(router->logits_dtype), values, QUANTIZE_F32, count);
    quantize_convert(l->meaning, QUANTIZE_F32, l->stored, routing_storage(router->logits_dtype), count);
    free(values);
    l->input.num_tokens = num_tokens;
    l->input.logits = l->stored;
    l->input.logits_size = count * quantize_dtype_size(routing_storage(router->logits_dtype));
    if (router->ids == MOE_ROUTE_IDS_GIVEN) {
        l->input.ids = l->given = (int32_t *)allocate((size_t)num_tokens * router->top_k, 4);
        for (e = 0; e < num_tokens * router->top_k; e++) l->given[e] = (int32_t)random_below(random, router->num_experts + 2) - 1;
    }
    if (router->ids == MOE_ROUTE_IDS_TABLE) {
        l->input.token_ids = l->token_ids = (int32_t *)allocate(num_tokens, 4);
        for (t = 0; t < num_tokens; t++) l->token_ids[t] = (int32_t)random_below(random, router->id_table_rows);
    }
}

static void check_logits_destroy(check_logits *l) {
    free(l->stored);
    free(l->meaning);
    free(l->given);
    free(l->token_ids);
}

/* The weights of one token against f64; where scores are too near for f32 to order as f64 does, the token is passed over. */
static void check_token_weights(const check_router *r, const check_logits *l, const routing_output *output, uint32_t t) {
    const moe_route_router *router = &r->c->router;
    const uint32_t columns = router->num_experts + router->num_shared_experts;
    const int32_t *ids = output->ids + (size_t)t * router->top_k;
    const int32_t *told = router->ids == MOE_ROUTE_IDS_GIVEN   ? l->given + (size_t)t * router->top_k
                          : router->ids == MOE_ROUTE_IDS_TABLE ? r->table + (size_t)l->token_ids[t] * router->top_k
                                                               : NULL;
    routing_expectation expected;
    double worst = 0, bound = 1;
    uint32_t i, j;
    routing_expect(router, &r->arrays, l->meaning + (size_t)t * columns, told, &expected);
    if (!expected.exact && expected.gap < 1e-5 * (1 + (double)router->softcap)) return;
    for (j = 0; j < router->top_k; j++) {
        double error;
        i = j;
        if (!told && !expected.exact)
            for (i = 0; i < router->top_k && expected.ids[i] != ids[j]; i++) continue;
        if (!CHECK(told || (i < router->top_k && ids[j] == expected.ids[i]), "%u experts, top-%u: token %u chose %d",
                   (unsigned)router->num_experts, (unsigned)router->top_k, (unsigned)t, (int)ids[j]))
            return;
        if (expected.tolerance[i] < 0) continue;
        error = fabs((double)output->weights[(size_t)t * router->top_k + j] - expected.weights[i]);
        if (expected.tolerance[i] > 0 ? error / expected.tolerance[i] > worst / bound : error > 0) {
            worst = error;
            bound = expected.tolerance[i] > 0 ? expected.tolerance[i] : 1e-45;
        }
    }
    check_error(worst, bound, "a weight");
}

static const uint32_t check_batches[] = {1, 5, 16, 100};

static void check_cpu_routers(const void *unused) {
    uint32_t i, n, t;
    (void)unused;
    for (i = 0; i < NUM_CASES(route_cases); i++) {
        check_router r;
        check_router_create(&check.cpu, &route_cases[i], 100 + i, &r);
        for (n = 0; r.layer && n < 2; n++) {
            check_logits l;
            routing_output output;
            test_random random;
            check_seed(&random, 200 + i * 8 + n);
            check_logits_create(&r.c->router, check_batches[n], 0, &random, &l);
            CHECK(routing_run(&check.cpu, r.layer, &r.c->router, r.c->router.num_experts, &l.input, &output) == MOE_ROUTE_OK,
                  "%s", device_message(&check.cpu));
            for (t = 0; t < l.input.num_tokens; t++) check_token_weights(&r, &l, &output, t);
            routing_output_free(&output);
            check_logits_destroy(&l);
        }
        check_router_destroy(&check.cpu, &r);
    }
}

/* Ids and weights to the last bit of the CPU backend's, also for NaN and infinities. */
static void check_gpu_routers(const void *unused) {
    uint32_t i, n;
    (void)unused;
    for (i = 0; i < NUM_CASES(route_cases); i++) {
        check_router on_gpu, on_cpu;
        if (route_cases[i].router.score == MOE_ROUTE_SCORE_CUSTOM || !route_cases[i].in_small) continue;
        check_router_create(&check.gpu, &route_cases[i], 300 + i, &on_gpu);
        check_router_create(&check.cpu, &route_cases[i], 300 + i, &on_cpu);
        for (n = 0; on_gpu.layer && on_cpu.layer && n < 4; n++) {
            check_logits l;
            routing_output got, want;
            test_random random;
            const uint32_t num_tokens = n < 3 ? check_batches[n] : 3;
            check_seed(&random, 400 + i * 8 + n);
            check_logits_create(&on_gpu.c->router, num_tokens, n == 3, &random, &l);
            CHECK(routing_run(&check.gpu, on_gpu.layer, &on_gpu.c->router, on_gpu.c->router.num_experts, &l.input, &got) ==
                      MOE_ROUTE_OK,
                  "%s", device_message(&check.gpu));
            CHECK(routing_run(&check.cpu, on_cpu.layer, &on_gpu.c->router, on_gpu.c->router.num_experts, &l.input, &want) ==
                      MOE_ROUTE_OK,
                  "%s", device_message(&check.cpu));
            CHECK_INTS(got.ids, want.ids, (size_t)num_tokens * on_gpu.c->router.top_k, "ids");
            CHECK_BYTES(got.stored_weights, want.stored_weights, want.weights_size, "weights");
            CHECK_BYTES(got.stored_shared, want.stored_shared, want.shared_size, "shared weights");
            check_case();
            routing_output_free(&got);
            routing_output_free(&want);
            check_logits_destroy(&l);
        }
        check_router_destroy(&check.gpu, &on_gpu);
        check_router_destroy(&check.cpu, &on_cpu);
    }
}

/* Every map by its definition, of ids with repeats and of some out of range, in one launch and in several. */
static void check_maps(test_device *on) {
    uint32_t i, n, p;
    for (i = 0; i < NUM_CASES(maps_cases); i++) {
        const maps_case *c = &maps_cases[i];
        moe_route_layer_desc desc;
        moe_route_layer *layer = NULL;
        if (c->columns || !c->in_small) continue;
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = c->num_experts;
        desc.router.top_k = c->top_k;
        desc.experts.first_expert = c->first_expert;
        desc.experts.num_local_experts = c->num_local;
        desc.operations = MOE_ROUTE_OPERATION_MAPS;
        desc.max_tokens = 400;
        CHECK(moe_route_layer_create(on->context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(on));
        for (n = 0; layer && n < 3; n++) {
            const uint32_t num_tokens = n == 0   ? 1
                                        : n == 1 ? 16
                                                 : 400,
                           num_local = c->num_local ? c->num_local : c->num_experts - c->first_expert;
            int32_t *ids = (int32_t *)allocate((size_t)num_tokens * c->top_k, 4);
            routing_input input;
            routing_output output;
            test_random random;
            check_seed(&random, 500 + i * 4 + n);
            for (p = 0; p < num_tokens * c->top_k; p++) ids[p] = (int32_t)random_below(&random, c->num_experts + 2) - 1;
            memset(&input, 0, sizeof input);
            input.num_tokens = num_tokens;
            input.ids = ids;
            input.maps = 1;
            input.block_size = 8;
            CHECK(routing_run(on, layer, &desc.router, num_local, &input, &output) == MOE_ROUTE_OK, "%s", device_message(on));
            routing_check_maps(&output, c->first_expert, output.num_pairs, input.block_size, "maps");
            check_case();
            routing_output_free(&output);
            free(ids);
        }
        moe_route_layer_destroy(layer);
    }
}

static void check_cpu_maps(const void *unused) {
    (void)unused;
    check_maps(&check.cpu);
}

static void check_gpu_maps(const void *unused) {
    (void)unused;
    check_maps(&check.gpu);
}

/* ---- layers ---- */

static int check_layer_is_large(const model_spec *spec) { return (size_t)spec->hidden_size * spec->intermediate_size > 150000; }

static void check_layer_name(const char *device_name_, const layer_case *c, char *name, size_t size) {
    static const char *const activations[] = {"silu", "gelu_tanh", "gelu_erf", "relu2", "situ"};
    const model_spec *spec = &c->spec;
    const option_choice *format = format_choices, *dtype = dtype_choices;
    char group[24] = "";
    while (format->value != (int)spec->format) format++;
    while (dtype->value != (int)spec->dtype) dtype++;
    if (spec->group_size) snprintf(group, sizeof group, "/%u", (unsigned)spec->group_size);
    snprintf(name, size, "%s.layer.%s%s.%s %ux%ux%u %s%s", device_name_, format->word, group, dtype->word,
             (unsigned)spec->num_experts, (unsigned)spec->hidden_size, (unsigned)spec->intermediate_size,
             activations[spec->choices.activation],
             spec->choices.no_gate    ? " no gate"
             : spec->choices.up_apart ? " two matrices"
             : spec->zero_points      ? " zero points"
                                      : "");
}

static model_spec check_layer_spec(const void *data, uint32_t max_tokens, uint32_t operations) {
    model_spec spec = ((const layer_case *)data)->spec;
    spec.max_tokens = max_tokens;
    spec.operations = operations;
    return spec;
}

static uint64_t check_layer_seed(const void *data) { /* of the case, whatever list it is in */
    const model_spec *spec = &((const layer_case *)data)->spec;
    return 1000 + spec->format * 64u + spec->hidden_size + spec->intermediate_size * 3u + UINT64_C(7919) * check_wanted.seed;
}

static void check_cpu_layer(const void *data) {
    const model_spec spec = check_layer_spec(data, 16, MOE_ROUTE_OPERATION_LAYER);
    model m;
    uint32_t n;
    model_create(&check.cpu, &spec, check_layer_seed(data), &m);
    for (n = 0; m.layer && n < 2; n++) {
        model_input input;
        model_output output;
        test_random random;
        float *logits;
        void *x;
        check_seed(&random, 600 + n);
        model_random_input(&random, &spec, check_batches[n], &input, &logits, &x);
        CHECK(model_run(&check.cpu, &m, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&check.cpu));
        check_error(model_error(&m, &input, &output, 0, check_batches[n]), model_bound(spec.dtype), "y");
        model_output_free(&output);
        free(logits);
        free(x);
    }
    model_destroy(&check.cpu, &m);
}

/* Both round y, and the values between the matmuls: the bound is that of each against f64, twice. */
static void check_gpu_layer(const void *data) {
    const model_spec spec = check_layer_spec(data, check_layer_is_large(&((const layer_case *)data)->spec) ? 16 : 100,
                                             MOE_ROUTE_OPERATION_LAYER);
    model on_gpu, on_cpu;
    uint32_t n;
    model_create(&check.gpu, &spec, check_layer_seed(data), &on_gpu);
    model_create(&check.cpu, &spec, check_layer_seed(data), &on_cpu);
    for (n = 0; on_gpu.layer && on_cpu.layer && n < 4 && check_batches[n] <= spec.max_tokens; n++) {
        const uint32_t num_tokens = check_batches[n];
        model_input input;
        model_output got, want;
        test_random random;
        float *logits;
        void *x;
        check_seed(&random, 700 + n);
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        CHECK(model_run(&check.gpu, &on_gpu, &input, &got) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
        CHECK(model_run(&check.cpu, &on_cpu, &input, &want) == MOE_ROUTE_OK, "%s", device_message(&check.cpu));
        CHECK_INTS(got.ids, want.ids, (size_t)num_tokens * spec.top_k, "ids");
        check_error(relative_error(got.y_values, want.y_values, (size_t)num_tokens * spec.hidden_size),
                    2 * model_bound(spec.dtype), "y");
        model_output_free(&got);
        model_output_free(&want);
        free(logits);
        free(x);
    }
    model_destroy(&check.gpu, &on_gpu);
    model_destroy(&check.cpu, &on_cpu);
}

/* Given ids repeat and lie out of range, and rows from num_valid_tokens on are padding. */
static void check_gpu_given(const void *data) {
    enum { TOKENS = 12, VALID = 9 };
    const model_spec spec = check_layer_spec(data, TOKENS, MOE_ROUTE_OPERATION_EXPERTS);
    const int32_t valid = VALID;
    model on_gpu, on_cpu;
    model_input input;
    model_output got, want;
    test_random random;
    float *logits, weights[TOKENS * 16];
    int32_t ids[TOKENS * 16];
    void *x;
    uint32_t p;
    check_seed(&random, 800);
    model_create(&check.gpu, &spec, 801, &on_gpu);
    model_create(&check.cpu, &spec, 801, &on_cpu);
    model_random_input(&random, &spec, TOKENS, &input, &logits, &x);
    for (p = 0; p < TOKENS * spec.top_k; p++) {
        ids[p] = (int32_t)random_below(&random, spec.num_experts + 3) - 2;
        weights[p] = random_normal(&random);
    }
    ids[spec.top_k] = ids[spec.top_k + 1] = 1;
    input.logits = NULL;
    input.ids = ids;
    input.weights = weights;
    input.num_valid = &valid;
    if (on_gpu.layer && on_cpu.layer) {
        CHECK(model_run(&check.gpu, &on_gpu, &input, &got) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
        CHECK(model_run(&check.cpu, &on_cpu, &input, &want) == MOE_ROUTE_OK, "%s", device_message(&check.cpu));
        check_error(relative_error(got.y_values, want.y_values, (size_t)TOKENS * spec.hidden_size), 2 * model_bound(spec.dtype),
                    "y");
        for (p = VALID * spec.hidden_size; p < TOKENS * spec.hidden_size; p++)
            if (!CHECK(got.y_values[p] == 0.0f, "padding gives %g", (double)got.y_values[p])) break;
        model_output_free(&got);
        model_output_free(&want);
    }
    free(logits);
    free(x);
    model_destroy(&check.gpu, &on_gpu);
    model_destroy(&check.cpu, &on_cpu);
}

/* The same call gives the same bits each time, and each token the same alone as in the batch. */
static void check_gpu_repeats(const void *data) {
    enum { TOKENS = 16 };
    const model_spec spec = check_layer_spec(data, TOKENS, MOE_ROUTE_OPERATION_LAYER);
    const size_t row = (size_t)spec.hidden_size * model_dtype_size(spec.dtype);
    model m;
    model_input input, one;
    model_output first, again;
    test_random random;
    float *logits;
    void *x;
    uint32_t n;
    check_seed(&random, 900);
    model_create(&check.gpu, &spec, 901, &m);
    if (!m.layer) return;
    model_random_input(&random, &spec, TOKENS, &input, &logits, &x);
    CHECK(model_run(&check.gpu, &m, &input, &first) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
    for (n = 0; n < 4; n++) {
        CHECK(model_run(&check.gpu, &m, &input, &again) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
        CHECK_BYTES(again.y, first.y, TOKENS * row, "y of the same call");
        CHECK_BYTES(again.weights, first.weights, (size_t)TOKENS * spec.top_k * 4, "weights of the same call");
        check_case();
        model_output_free(&again);
    }
    for (n = 0; n < TOKENS; n += 5) {
        one = input;
        one.num_tokens = 1;
        one.logits = logits + (size_t)n * spec.num_experts;
        one.x = (const char *)x + n * row;
        CHECK(model_run(&check.gpu, &m, &one, &again) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
        CHECK_BYTES(again.y, (const char *)first.y + n * row, row, "y of a token alone");
        check_case();
        model_output_free(&again);
    }
    model_output_free(&first);
    free(logits);
    free(x);
    model_destroy(&check.gpu, &m);
}

/* A captured call, replayed with other inputs in the same memory, gives the bits of a call. */
static void check_gpu_graph(const void *data) {
    enum { REPLAYS = 3 };
    const model_spec spec = check_layer_spec(data, 16, MOE_ROUTE_OPERATION_LAYER);
    model m;
    uint32_t n, replay;
    model_create(&check.gpu, &spec, 951, &m);
    for (n = 0; m.layer && n < 3; n++) {
        const uint32_t num_tokens = check_batches[n];
        model_call call;
        gpu_graph graph = NULL;
        model_input input;
        test_random random;
        float *logits;
        void *x;
        check_seed(&random, 950 + n);
        model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
        model_call_create(&check.gpu, &m, &input, &call);
        device_must(&check.gpu, gpu_capture_begin(&check.gpu.gpu, check.gpu.stream));
        CHECK(moe_route_layer_run(m.layer, &call.args) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
        device_must(&check.gpu, gpu_capture_end(&check.gpu.gpu, check.gpu.stream, &graph));
        free(logits);
        free(x);
        for (replay = 0; replay < REPLAYS; replay++) {
            model_output got, want;
            model_random_input(&random, &spec, num_tokens, &input, &logits, &x);
            device_upload(&check.gpu, &call.logits, logits, call.logits.size);
            device_upload(&check.gpu, &call.x, x, call.x.size);
            device_fill(&check.gpu, &call.y, DEVICE_POISON);
            device_fill(&check.gpu, &call.workspace, DEVICE_POISON);
            device_must(&check.gpu, gpu_graph_launch(&check.gpu.gpu, graph, check.gpu.stream));
            model_call_fetch(&check.gpu, &m, &call, &got);
            CHECK(model_run(&check.gpu, &m, &input, &want) == MOE_ROUTE_OK, "%s", device_message(&check.gpu));
            CHECK_INTS(got.ids, want.ids, (size_t)num_tokens * spec.top_k, "ids of a replay");
            CHECK_BYTES(got.y, want.y, call.y.size, "y of a replay");
            check_case();
            model_output_free(&got);
            model_output_free(&want);
            free(logits);
            free(x);
        }
        gpu_graph_destroy(&check.gpu.gpu, graph);
        model_call_destroy(&check.gpu, &call);
    }
    model_destroy(&check.gpu, &m);
}

/* ---- all of them ---- */

static void check_layers(const char *device_name_, int on_gpu, check_function *function, const layer_case *cases, size_t count) {
    char name[96];
    size_t i;
    for (i = 0; i < count; i++) {
        if (!on_gpu && check_layer_is_large(&cases[i].spec)) continue; /* f64 and the CPU backend would take minutes */
        check_layer_name(device_name_, &cases[i], name, sizeof name);
        check_run(name, on_gpu, function, &cases[i]);
    }
}

static void check_all(void) {
    check_run("cpu.router", 0, check_cpu_routers, NULL);
    check_run("cpu.maps", 0, check_cpu_maps, NULL);
    check_layers("cpu", 0, check_cpu_layer, layer_cases, NUM_CASES(layer_cases));
    check_layers("cpu", 0, check_cpu_layer, choice_cases, NUM_CASES(choice_cases));
    check_run("gpu.router", 1, check_gpu_routers, NULL);
    check_run("gpu.maps", 1, check_gpu_maps, NULL);
    check_layers("gpu", 1, check_gpu_layer, layer_cases, NUM_CASES(layer_cases));
    check_layers("gpu", 1, check_gpu_layer, choice_cases, NUM_CASES(choice_cases));
    check_run("gpu.given_ids", 1, check_gpu_given, &layer_cases[1]);
    check_run("gpu.repeats", 1, check_gpu_repeats, &layer_cases[0]);
    check_run("gpu.graph", 1, check_gpu_graph, &layer_cases[0]);
}

/* Opens both devices. Without NVRTC nothing could be checked on the GPU, and the program says so. */
static void check_open(void) {
    static info_driver driver;
    moe_route_context_desc desc;
    moe_route_layer_desc layer_desc;
    moe_route_layer *layer = NULL;
    memset(&desc, 0, sizeof desc);
    desc.cache_dir = check_wanted.cache_dir ? check_wanted.cache_dir : "off";
    desc.nvrtc_path = check_wanted.nvrtc;
    if (!device_open(&check.cpu, MOE_ROUTE_DEVICE_CPU, &desc)) stop(STATUS_FAILED, "%s", check.cpu.reason);
    info_read_kernel_module(&driver);
    snprintf(check.driver_module, sizeof check.driver_module, "%s", driver.kernel_module);
    check.has_gpu = device_open(&check.gpu, MOE_ROUTE_DEVICE_GPU, &desc);
    if (!check.has_gpu) {
        snprintf(check.no_gpu, sizeof check.no_gpu, "%s", check.gpu.reason);
        return;
    }
    memset(&layer_desc, 0, sizeof layer_desc);
    layer_desc.router.num_experts = 8;
    layer_desc.router.top_k = 2;
    layer_desc.experts.hidden_size = 64;
    layer_desc.operations = MOE_ROUTE_OPERATION_EXPAND;
    must_library(check.gpu.context, moe_route_layer_create(check.gpu.context, &layer_desc, &layer));
    moe_route_layer_destroy(layer);
    moe_route_context_get_info(check.gpu.context, &check.info);
}

static int check_main(int argc, char **argv) {
    int status;
    options_parse(&check_command, argc, argv);
    if (check_wanted.list) {
        check_all();
        return STATUS_OK;
    }
    check_open();
    device_trouble = check_on_trouble;
    if (!check_wanted.json) check_print_head();
    check_all();
    if (check.count == 0) stop(STATUS_USAGE, "no check has such a name; --list lists them");
    status = check_conclude();
    if (check.has_gpu && !check.gpu_is_lost) device_close(&check.gpu);
    device_close(&check.cpu);
    return status;
}

#endif /* CHECK_DEVICE_H */
