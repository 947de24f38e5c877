/*
  test_presets.c: presets against Hugging Face transformers: the description comes from the model's config.json; the logits, ids
  and weights of its router, and the output of its experts, from transformers. Then what presets refuse, and layers that lack what their model has.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection of rows for slow (emulated) devices. TEST_ROUTERS names one more
  output of tests/tools/transformers_routers.py, without its extension.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "../examples/config.h"
#include "../examples/safetensors.h"

static test_device device;
static int small_size;

/* ---- a model from its config.json ---- */

/* `name` stands for the type where the entry doesn't name it. */
static void entry_model(const cJSON *entry, const char *name, moe_route_model *model) {
    const cJSON *global_scale = cJSON_GetObjectItemCaseSensitive(entry, "global_scale");
    config_model(entry, 0, model);
    if (!model->model_type) model->model_type = name;
    if (global_scale) model->scale *= (float)global_scale->valuedouble; /* which is a tensor of the checkpoint */
}

/* A list of words in a text, to be cut by strtok(). */
static void entry_words(const cJSON *entry, const char *key, char *words, size_t size) {
    const char *text = config_text(entry, key);
    snprintf(words, size, "%s", text ? text : "");
}

/* The same without what the entry calls a default: what presets assume is what transformers assumes. */
static void check_defaults(const cJSON *entry, const char *name, const moe_route_model *model, const moe_route_layer_desc *desc) {
    char defaults[256], *key;
    moe_route_model shorter = *model;
    moe_route_layer_desc other;
    entry_words(entry, "defaults", defaults, sizeof defaults);
    for (key = strtok(defaults, " "); key; key = strtok(NULL, " ")) {
        if (strcmp(key, "norm_topk_prob") == 0 || strcmp(key, "moe_renormalize") == 0) shorter.norm_topk_prob = MOE_ROUTE_AUTO;
        else if (strcmp(key, "router_jitter_noise") == 0) shorter.jitter = 0;
        else if (strcmp(key, "moe_norm_min") == 0) shorter.norm_min = 0;
        else if (strcmp(key, "scoring_func") == 0 || strcmp(key, "expert_selection_fn") == 0) shorter.scoring_func = NULL;
        else if (strcmp(key, "swiglu_limit") == 0) shorter.swiglu_limit = 0;
        else CHECK(0, "%s: %s isn't known here", name, key);
    }
    CHECK(moe_route_preset(device.context, &shorter, &other) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device));
    CHECK_BYTES(&other, desc, sizeof other, name);
}

/* ---- one router ---- */

typedef struct router_data { /* as transformers left it; NULL where the router has none */
    uint32_t rows, width, top_k, num_shared;
    const float *logits, *weights, *shared_weights, *bias, *logit_bias, *expert_scale;
    const int32_t *ids, *id_table, *token_ids;
    uint32_t table_rows;
} router_data;

static const safetensors_tensor *find_tensor(safetensors_file *file, const char *name, const char *what) {
    char full[128];
    snprintf(full, sizeof full, "%s.%s", name, what);
    return safetensors_find(file, full);
}

static const void *tensor_data(safetensors_file *file, const char *name, const char *what) {
    const safetensors_tensor *tensor = find_tensor(file, name, what);
    return tensor ? tensor->data : NULL;
}

static int find_router(safetensors_file *file, const char *name, router_data *data) {
    const safetensors_tensor *logits = find_tensor(file, name, "logits"), *ids = find_tensor(file, name, "ids"), *table = find_tensor(file, name, "id_table"),
                             *shared = find_tensor(file, name, "shared_weights");
    memset(data, 0, sizeof *data);
    if (!CHECK(logits && ids && find_tensor(file, name, "weights"), "%s is missing", name)) return 0;
    data->rows = (uint32_t)logits->shape[0];
    data->width = (uint32_t)logits->shape[1];
    data->top_k = (uint32_t)ids->shape[1];
    data->num_shared = shared ? (uint32_t)shared->shape[1] : 0;
    data->table_rows = table ? (uint32_t)table->shape[0] : 0;
    data->logits = (const float *)logits->data;
    data->ids = (const int32_t *)ids->data;
    data->weights = (const float *)tensor_data(file, name, "weights");
    data->shared_weights = (const float *)tensor_data(file, name, "shared_weights");
    data->bias = (const float *)tensor_data(file, name, "bias");
    data->logit_bias = (const float *)tensor_data(file, name, "logit_bias");
    data->expert_scale = (const float *)tensor_data(file, name, "per_expert_scale");
    data->id_table = (const int32_t *)tensor_data(file, name, "id_table");
    data->token_ids = (const int32_t *)tensor_data(file, name, "token_ids");
    return 1;
}

/* What an expert of one token is selected by, in f64. It doesn't say whether a group rule dropped it. */
static double order_of(const moe_route_router *router, const router_data *data, const float *logits, int32_t e) {
    double l = (double)logits[e] + (data->logit_bias ? (double)data->logit_bias[e] : 0), sum = 0, score = l;
    uint32_t i;
    if (router->softcap != 0) l = (double)router->softcap * tanh(l / (double)router->softcap);
    if (router->score == MOE_ROUTE_SCORE_SIGMOID) score = 1 / (1 + exp(-l));
    else if (router->score == MOE_ROUTE_SCORE_SQRT_SOFTPLUS) score = sqrt(l > 30 ? l : log1p(exp(l)));
    else if (router->score == MOE_ROUTE_SCORE_SOFTMAX) {
        for (i = 0; i < router->num_experts; i++) sum += exp((double)logits[i] - (double)logits[e]); /* no such router has bias or cap of logits here */
        score = 1 / sum;
    }
    return score + (data->bias ? (double)data->bias[e] : 0);
}

/* Inkling normalises the logarithms of its sigmoids, whose rounding in f32 is an error of the weight that grows with them; all
   others agree to a few roundings. `share` is the weight before scaling. */
static int weight_is_close(const router_data *data, double got, double want, double share) {
    const double logarithm = data->num_shared && share > 0 && share < 1 ? -log(share) : 0;
    return fabs(got - want) <= fabs(want) * (1e-6 + 3e-7 * logarithm) + 1e-37;
}

/* One token's choice against transformers'. Ids are compared as sets. One may stand for another only where both are selected by
   the same number within the rounding of f32: transformers leaves the order of equal scores to torch.topk, which doesn't define
   it. It happens where a sigmoid saturates and there is no bias (flint: every logit from 17 on scores 1). Returns whether it did. */
static int check_row(const char *name, uint32_t t, const moe_route_router *router, const router_data *data, const int32_t *ids, const float *weights, const int32_t *want_ids, const float *want_weights) {
    const float *logits = data->logits + (size_t)t * data->width;
    const double scale = router->scale != 0 ? (double)router->scale : 1;
    unsigned char used[MOER_MAX_TOP_K], found[MOER_MAX_TOP_K];
    int excused = 0;
    uint32_t i, j;
    memset(used, 0, sizeof used);
    for (j = 0; j < router->top_k; j++) {
        for (i = 0; i < router->top_k && (used[i] || ids[i] != want_ids[j]); i++) {}
        found[j] = i < router->top_k;
        if (!found[j]) continue;
        used[i] = 1;
        if (!CHECK(weight_is_close(data, (double)weights[i], (double)want_weights[j], (double)want_weights[j] / scale), "%s: token %u expert %d: weight %.9g instead of %.9g", name, t, want_ids[j], (double)weights[i], (double)want_weights[j]))
            return 0;
    }
    for (j = 0; j < router->top_k; j++) {
        const double order = order_of(router, data, logits, want_ids[j]), rounding = 2.4e-7 * (data->bias && fabs(order) < 1 ? 1 : fabs(order)); /* score + bias is rounded where it is small, too */
        if (found[j]) continue;
        excused = 1;
        for (i = 0; i < router->top_k && (used[i] || !(fabs(order - order_of(router, data, logits, ids[i])) <= rounding)); i++) {}
        if (!CHECK(i < router->top_k, "%s: token %u: expert %d isn't chosen", name, t, want_ids[j])) return 1;
        used[i] = 1;
        CHECK(data->bias || weight_is_close(data, (double)weights[i], (double)want_weights[j], (double)want_weights[j] / scale), "%s: token %u: experts %d and %d, of equal score, weigh %.9g and %.9g", name, t, want_ids[j], ids[i],
              (double)want_weights[j], (double)weights[i]);
    }
    return excused;
}

/* Rows that are spread over the file: all, or few on a slow device. */
static uint32_t row_stride(const router_data *data) { return small_size && data->rows > 4 ? data->rows / 4 + 1 : 1; }

/* Runs the described layer over the data; returns how many rows needed an excuse. */
static uint32_t run_router(const char *name, moe_route_layer_desc *desc, const router_data *data) {
    const uint32_t stride = row_stride(data), rows = (data->rows + stride - 1) / stride, top_k = data->top_k;
    device_buffer logits, ids, weights, shared, bias, logit_bias, expert_scale, table, tokens;
    moe_route_layer *layer = NULL;
    moe_route_route_args args;
    uint32_t t, j, excused = 0;
    memset(&shared, 0, sizeof shared);
    bias = logit_bias = expert_scale = table = tokens = shared;
    memset(&args, 0, sizeof args);
    if (data->bias) bias = device_create_from(&device, data->bias, (size_t)desc->router.num_experts * 4);
    if (data->logit_bias) logit_bias = device_create_from(&device, data->logit_bias, (size_t)data->width * 4);
    if (data->expert_scale) expert_scale = device_create_from(&device, data->expert_scale, (size_t)desc->router.num_experts * 4);
    if (data->id_table) table = device_create_from(&device, data->id_table, (size_t)data->table_rows * top_k * 4);
    desc->router.selection_bias = bias.address;
    desc->router.logit_bias = logit_bias.address;
    desc->router.expert_scale = expert_scale.address;
    desc->router.id_table = table.address;
    desc->max_tokens = rows;
    logits = device_create(&device, (size_t)rows * data->width * 4);
    {
        float *gathered = (float *)malloc((size_t)rows * data->width * 4);
        int32_t *gathered_tokens = (int32_t *)malloc((size_t)rows * 4);
        for (t = 0; t < rows; t++) {
            memcpy(gathered + (size_t)t * data->width, data->logits + (size_t)t * stride * data->width, (size_t)data->width * 4);
            gathered_tokens[t] = data->token_ids ? data->token_ids[t * stride] : 0;
        }
        device_upload(&device, &logits, gathered, (size_t)rows * data->width * 4);
        if (data->token_ids) tokens = device_create_from(&device, gathered_tokens, (size_t)rows * 4);
        free(gathered);
        free(gathered_tokens);
    }
    ids = device_create(&device, (size_t)rows * top_k * 4);
    weights = device_create(&device, (size_t)rows * top_k * 4);
    if (data->num_shared) shared = device_create(&device, (size_t)rows * data->num_shared * 4);
    if (CHECK(moe_route_layer_create(device.context, desc, &layer) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device))) {
        int32_t *got_ids = (int32_t *)malloc((size_t)rows * top_k * 4);
        float *got_weights = (float *)malloc((size_t)rows * top_k * 4), *got_shared = (float *)malloc((size_t)rows * (data->num_shared + 1) * 4);
        args.num_tokens = rows;
        args.logits = logits.address;
        args.ids = ids.address;
        args.weights = weights.address;
        args.shared_weights = shared.address;
        args.token_ids = tokens.address;
        args.stream = device.stream;
        CHECK(moe_route_route(layer, &args) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device));
        device_synchronize(&device);
        device_download(&device, got_ids, &ids, (size_t)rows * top_k * 4);
        device_download(&device, got_weights, &weights, (size_t)rows * top_k * 4);
        if (data->num_shared) device_download(&device, got_shared, &shared, (size_t)rows * data->num_shared * 4);
        for (t = 0; t < rows; t++) {
            const size_t at = (size_t)t * stride * top_k;
            excused += (uint32_t)check_row(name, t * stride, &desc->router, data, got_ids + (size_t)t * top_k, got_weights + (size_t)t * top_k, data->ids + at, data->weights + at);
            for (j = 0; j < data->num_shared; j++) {
                const double got = (double)got_shared[t * data->num_shared + j], want = (double)data->shared_weights[(size_t)t * stride * data->num_shared + j];
                CHECK(weight_is_close(data, got, want, want / (double)desc->router.scale), "%s: token %u: weight %.9g of shared expert %u instead of %.9g", name, t * stride, got, j, want);
            }
        }
        free(got_ids);
        free(got_weights);
        free(got_shared);
    }
    moe_route_layer_destroy(layer);
    device_destroy(&device, &logits);
    device_destroy(&device, &ids);
    device_destroy(&device, &weights);
    if (data->num_shared) device_destroy(&device, &shared);
    if (data->bias) device_destroy(&device, &bias);
    if (data->logit_bias) device_destroy(&device, &logit_bias);
    if (data->expert_scale) device_destroy(&device, &expert_scale);
    if (data->id_table) device_destroy(&device, &table);
    if (data->token_ids) device_destroy(&device, &tokens);
    return excused;
}

/* ---- experts ---- */

static device_buffer upload_tensor(safetensors_file *file, const char *name, const char *what) {
    char full[128];
    const safetensors_tensor *tensor;
    device_buffer none;
    snprintf(full, sizeof full, "experts.%s", what);
    tensor = find_tensor(file, name, full);
    memset(&none, 0, sizeof none);
    return tensor ? device_create_from(&device, tensor->data, tensor->end - tensor->begin) : none;
}

/* The experts of one model over given ids and weights: what transformers computed, within the rounding of f32. */
static void run_experts(safetensors_file *file, const char *name, const cJSON *entry) {
    static const char *const inputs[] = {"gate_up", "down", "gate_up_bias", "down_bias", "x", "ids", "expert_weights"};
    moe_route_model model;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_layer_args args;
    device_buffer buffers[7], y, workspace;
    const safetensors_tensor *want = find_tensor(file, name, "experts.y");
    size_t workspace_size = 0, i;
    entry_model(entry, name, &model);
    REQUIRE(want && moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device));
    check_defaults(entry, name, &model, &desc);
    for (i = 0; i < 7; i++) buffers[i] = upload_tensor(file, name, inputs[i]);
    desc.needs &= (uint32_t)~(MOE_ROUTE_NEED_SELECTION_BIAS | MOE_ROUTE_NEED_LOGIT_BIAS | MOE_ROUTE_NEED_EXPERT_SCALE | MOE_ROUTE_NEED_ID_TABLE); /* it doesn't route */
    CHECK(!(desc.needs & MOE_ROUTE_NEED_GATE_UP_BIAS) == !buffers[2].size && !(desc.needs & MOE_ROUTE_NEED_DOWN_BIAS) == !buffers[3].size, "%s: needs is %u", name, (unsigned)desc.needs);
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc.experts.gate_up.data = buffers[0].address;
    desc.experts.down.data = buffers[1].address;
    desc.experts.gate_up.bias = buffers[2].address;
    desc.experts.down.bias = buffers[3].address;
    desc.operations = MOE_ROUTE_OPERATION_EXPERTS;
    if (CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device))) {
        const uint32_t rows = desc.experts.gate_up_order == MOE_ROUTE_GATE_UP_NO_GATE ? model.intermediate_size : 2 * model.intermediate_size;
        float *got = (float *)malloc(want->end - want->begin);
        double error;
        CHECK(buffers[0].size == (size_t)model.num_experts * rows * model.hidden_size * 4, "%s: gate_up has other sizes", name);
        memset(&args, 0, sizeof args);
        args.num_tokens = (uint32_t)want->shape[0];
        CHECK(moe_route_layer_workspace_size(layer, args.num_tokens, &workspace_size) == MOE_ROUTE_OK, "%s", device_message(&device));
        y = device_create_aligned(&device, want->end - want->begin, 16);
        workspace = device_create_workspace(&device, workspace_size);
        args.x = buffers[4].address;
        args.ids = buffers[5].address;
        args.weights = buffers[6].address;
        args.y = y.address;
        args.workspace = workspace.address;
        args.workspace_size = workspace_size;
        args.stream = device.stream;
        CHECK(moe_route_layer_run(layer, &args) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device));
        device_synchronize(&device);
        device_download(&device, got, &y, y.size);
        error = relative_error(got, (const float *)want->data, y.size / 4);
        CHECK(error < 2e-6, "%s: the experts' output is off by %g", name, error);
        device_destroy(&device, &y);
        device_destroy(&device, &workspace);
        free(got);
    }
    moe_route_layer_destroy(layer);
    for (i = 0; i < 7; i++)
        if (buffers[i].size) device_destroy(&device, &buffers[i]);
}

/* ---- files of routers and experts ---- */

/* The preset asks for the addresses that the router of transformers has, and for no others. */
static void check_needs(const char *name, const moe_route_layer_desc *desc, const router_data *data) {
    const uint32_t has = (data->bias ? MOE_ROUTE_NEED_SELECTION_BIAS : 0) | (data->logit_bias ? MOE_ROUTE_NEED_LOGIT_BIAS : 0) |
                         (data->expert_scale ? MOE_ROUTE_NEED_EXPERT_SCALE : 0) | (data->id_table ? MOE_ROUTE_NEED_ID_TABLE : 0);
    const uint32_t of_router = MOE_ROUTE_NEED_SELECTION_BIAS | MOE_ROUTE_NEED_LOGIT_BIAS | MOE_ROUTE_NEED_EXPERT_SCALE | MOE_ROUTE_NEED_ID_TABLE;
    moe_route_layer *layer = NULL;
    CHECK((desc->needs & of_router) == has, "%s: needs is %u, the router has %u", name, (unsigned)desc->needs, (unsigned)has);
    if (has) CHECK(moe_route_layer_create(device.context, desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && !layer, "%s: a layer is made without what needs names", name);
    moe_route_layer_destroy(layer);
}

typedef struct tally {
    uint32_t routers, experts, rows, excused;
} tally;

static unsigned char name_seen[512]; /* by the index of moe_route_preset_name */

static void mark_seen(const char *model_type) {
    uint32_t i;
    for (i = 0; moe_route_preset_name(i) && strcmp(moe_route_preset_name(i), model_type) != 0; i++) {}
    if (CHECK(moe_route_preset_name(i) && i < sizeof name_seen, "%s isn't among the names", model_type)) name_seen[i] = 1;
}

/* `experts`: the object of all types' experts, or NULL. */
static void run_entry(safetensors_file *file, const char *name, const cJSON *entry, const cJSON *experts, int bias_in_logits, tally *sum) {
    moe_route_model model;
    moe_route_layer_desc desc, other;
    router_data data;
    char outer[256], *word;
    entry_model(entry, name, &model);
    if (!CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK, "%s: %s", name, device_message(&device)) || !find_router(file, name, &data)) return;
    mark_seen(model.model_type);
    CHECK(!(desc.needs & MOE_ROUTE_NEED_OTHER_EXPERTS) == (cJSON_GetObjectItemCaseSensitive(experts, model.model_type) != NULL) || !experts, "%s: its experts are %s", name, desc.needs & MOE_ROUTE_NEED_OTHER_EXPERTS ? "there" : "missing");
    if (!CHECK(desc.router.num_experts + desc.router.num_shared_experts == data.width && desc.router.top_k == data.top_k && desc.router.num_shared_experts == data.num_shared,
               "%s: %u + %u experts, top-%u", name, desc.router.num_experts, desc.router.num_shared_experts, desc.router.top_k))
        return;
    check_defaults(entry, name, &model, &desc);
    entry_words(entry, "outer_types", outer, sizeof outer);
    for (word = strtok(outer, " "); word; word = strtok(NULL, " ")) { /* the same layer by the whole model's type */
        model.model_type = word;
        CHECK(moe_route_preset(device.context, &model, &other) == MOE_ROUTE_OK, "%s: %s", word, device_message(&device));
        CHECK_BYTES(&other, &desc, sizeof desc, word);
        mark_seen(word);
    }
    if (bias_in_logits) desc.needs &= ~(uint32_t)MOE_ROUTE_NEED_LOGIT_BIAS;
    check_needs(name, &desc, &data);
    sum->excused += run_router(name, &desc, &data);
    sum->routers++;
    sum->rows += data.rows / row_stride(&data);
}

/* bias_in_logits: a router's logits are those after its bias. */
static tally run_files(const char *tensors, const char *configurations, int bias_in_logits) {
    safetensors_file file;
    char error[256];
    cJSON *tree = config_read(configurations, error, sizeof error);
    const cJSON *routers = cJSON_GetObjectItemCaseSensitive(tree, "routers"), *experts = cJSON_GetObjectItemCaseSensitive(tree, "experts"), *entry;
    tally sum = {0, 0, 0, 0};
    CHECK(tree != NULL, "%s", error);
    if (CHECK(safetensors_open(&file, tensors), "%s: %s", tensors, file.error)) {
        cJSON_ArrayForEach(entry, routers) run_entry(&file, entry->string, entry, experts, bias_in_logits, &sum);
        cJSON_ArrayForEach(entry, experts) {
            run_experts(&file, entry->string, entry);
            sum.experts++;
        }
        safetensors_close(&file);
    }
    cJSON_Delete(tree);
    /* Random logits rarely meet an order that is nobody's definition. */
    CHECK(sum.excused * 50 <= sum.rows, "%u of %u rows choose other experts of the same score", sum.excused, sum.rows);
    return sum;
}

TEST(presets_agree_with_the_golden_routers) {
    const tally sum = run_files("tests/data/routers.safetensors", "tests/data/goldens.json", 1);
    CHECK(sum.routers == 31, "%u of 31 routers ran", sum.routers);
}

/* Names that transformers has no code for. */
static int beyond_transformers(const char *name) {
    static const char *const names[] = {"bailing_moe", "bailing_moe_v2", "grok-1", "interns1_pro", "kimi_k2"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(names[i], name) == 0) return 1;
    return 0;
}

TEST(presets_agree_with_every_router_of_transformers) {
    uint32_t i;
    memset(name_seen, 0, sizeof name_seen);
    run_files("tests/data/transformers_routers.safetensors", "tests/data/transformers_routers.json", 0);
    for (i = 0; moe_route_preset_name(i); i++)
        CHECK(name_seen[i] != beyond_transformers(moe_route_preset_name(i)), "%s: %s", moe_route_preset_name(i), name_seen[i] ? "transformers has it" : "no router of transformers stands beside it");
}

TEST(presets_agree_with_more_routers) {
    const char *prefix = getenv("TEST_ROUTERS");
    char tensors[600], configurations[600];
    REQUIRE(prefix, "TEST_ROUTERS names no output of tests/tools/transformers_routers.py");
    snprintf(tensors, sizeof tensors, "%s.safetensors", prefix);
    snprintf(configurations, sizeof configurations, "%s.json", prefix);
    run_files(tensors, configurations, 0);
}

/* ---- types beyond transformers: what is known of them ---- */

static moe_route_model model_of(const char *model_type) {
    moe_route_model model;
    memset(&model, 0, sizeof model);
    model.model_type = model_type;
    model.num_experts = 64;
    model.top_k = 8;
    return model;
}

static void check_same(const moe_route_model *model, const char *other_type) {
    moe_route_model other = *model;
    moe_route_layer_desc a, b;
    other.model_type = other_type;
    CHECK(moe_route_preset(device.context, model, &a) == MOE_ROUTE_OK, "%s: %s", model->model_type, device_message(&device));
    CHECK(moe_route_preset(device.context, &other, &b) == MOE_ROUTE_OK, "%s: %s", other_type, device_message(&device));
    CHECK_BYTES(&a, &b, sizeof a, model->model_type);
}

TEST(presets_know_types_beyond_transformers) {
    moe_route_model model = model_of("kimi_k2");
    moe_route_layer_desc desc;
    model.num_groups = model.topk_groups = 1;
    model.scale = 2.827f;
    check_same(&model, "deepseek_v3");
    model.model_type = "bailing_moe_v2";
    model.num_groups = 8;
    model.topk_groups = 4;
    check_same(&model, "deepseek_v3");
    model = model_of("bailing_moe");
    check_same(&model, "qwen3_next");
    model = model_of("interns1_pro");
    model.num_groups = 8;
    CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(desc.router.group_rule == MOE_ROUTE_GROUPS_QUOTA && desc.router.num_groups == 8 && desc.router.score == MOE_ROUTE_SCORE_SOFTMAX && desc.router.weight == MOE_ROUTE_WEIGHT_SCORE &&
              desc.router.renormalize == MOE_ROUTE_RENORMALIZE_SUM, "Intern-S1-Pro takes its best expert from each of 8 groups");
    model = model_of("grok-1");
    CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(desc.router.softcap == 30.0f && desc.router.score == MOE_ROUTE_SCORE_SOFTMAX && desc.router.weight == MOE_ROUTE_WEIGHT_SCORE && desc.router.renormalize == MOE_ROUTE_RENORMALIZE_NONE, "Grok caps its logits at 30");
    model.softcap = 20;
    CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK && desc.router.softcap == 20.0f, "a given cap counts");
}

/* ---- what presets refuse ---- */

static void check_refused(const moe_route_model *model, moe_route_status wanted, const char *first, const char *second) {
    moe_route_layer_desc desc, zero;
    moe_route_status status;
    memset(&zero, 0, sizeof zero);
    memset(&desc, 0x5a, sizeof desc);
    status = moe_route_preset(device.context, model, &desc);
    CHECK(status == wanted, "%s: the status is %s instead of %s", first, moe_route_status_name(status), moe_route_status_name(wanted));
    CHECK(strstr(device_message(&device), first) && strstr(device_message(&device), second), "\"%s\" names neither %s nor %s", device_message(&device), first, second);
    CHECK_BYTES(&desc, &zero, sizeof desc, "the description of a refused preset");
}

TEST(presets_refuse_unknown_types_with_similar_names) {
    static const char *const types[][2] = {{"qwen3moe", "qwen3_moe"}, {"qwen3", "qwen3_moe"}, {"kimi_k3", "kimi_k2"}, {"DeepSeek", "deepseek_v3"}, {"Mixtral", "mixtral"}, {"gpt-oss", "gpt_oss"}, {"deepseek_v5", "deepseek_v3"}, {"llama4_txt", "llama4_text"}, {"", "aria"},
        {"a_name_that_is_much_longer_than_any_model_type_ever_was_or_could_reasonably_be", "similar"}, {"new\nline", "new?line"}};
    moe_route_model model;
    char misspelt[64], first[64];
    uint32_t i;
    for (i = 0; i < sizeof types / sizeof types[0]; i++) {
        model = model_of(types[i][0]);
        check_refused(&model, MOE_ROUTE_ERROR_ARGUMENT, "model_type", types[i][1]);
    }
    for (i = 0; moe_route_preset_name(i); i++) { /* a letter too many: the nearest is the name itself, at the head of the list */
        snprintf(misspelt, sizeof misspelt, "%s?", moe_route_preset_name(i));
        snprintf(first, sizeof first, "are %s,", moe_route_preset_name(i));
        model = model_of(misspelt);
        check_refused(&model, MOE_ROUTE_ERROR_ARGUMENT, misspelt, first);
        CHECK(i == 0 || strcmp(moe_route_preset_name(i - 1), moe_route_preset_name(i)) < 0, "%s isn't in alphabetical order", moe_route_preset_name(i));
    }
    model = model_of(NULL);
    check_refused(&model, MOE_ROUTE_ERROR_ARGUMENT, "model_type", "NULL");
    model = model_of("doge");
    check_refused(&model, MOE_ROUTE_ERROR_UNSUPPORTED, "doge", "product-key");
    model = model_of("vitpose_backbone");
    check_refused(&model, MOE_ROUTE_ERROR_UNSUPPORTED, "vitpose", "data set");
    CHECK(moe_route_preset(NULL, &model, NULL) == MOE_ROUTE_ERROR_ARGUMENT, "a NULL context is refused");
    CHECK(moe_route_preset(device.context, &model, NULL) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "desc"), "a NULL desc is refused");
    CHECK(moe_route_preset_name(0xffffffffu) == NULL, "names end");
}

#define REFUSED(type, field, value, text) {                                  \
        moe_route_model wrong = model_of(type);                              \
        wrong.scale = needs_scale ? 2.5f : 0.0f;                             \
        wrong.num_groups = needs_groups ? 4 : 0;                             \
        wrong.topk_groups = needs_groups ? 2 : 0;                            \
        wrong.field = value;                                                 \
        check_refused(&wrong, MOE_ROUTE_ERROR_ARGUMENT, #field " is", text); \
    }

TEST(presets_refuse_missing_and_surplus_numbers) {
    moe_route_model model;
    int needs_scale = 0, needs_groups = 0;
    REFUSED("mixtral", num_experts, 0, "num_local_experts")
    REFUSED("mixtral", num_experts, 2049, "2048")
    REFUSED("mixtral", num_experts, 0xffffffffu, "2048")
    REFUSED("mixtral", top_k, 0, "num_experts_per_tok")
    REFUSED("mixtral", num_groups, 2, "mixtral")
    REFUSED("mixtral", topk_groups, 2, "mixtral")
    REFUSED("mixtral", num_zero_experts, 1, "mixtral")
    REFUSED("mixtral", scale, 2.0f, "0 or 1")
    REFUSED("mixtral", softcap, 30.0f, "mixtral")
    REFUSED("mixtral", norm_min, 1e-12f, "mixtral")
    REFUSED("mixtral", swiglu_limit, 7.0f, "mixtral")
    REFUSED("mixtral", hash_layer, 1, "mixtral")
    REFUSED("mixtral", norm_topk_prob, MOE_ROUTE_OFF, "always")
    REFUSED("jamba", norm_topk_prob, MOE_ROUTE_ON, "never")
    REFUSED("qwen3_moe", norm_topk_prob, (moe_route_switch)3, "AUTO")
    REFUSED("qwen3_moe", scoring_func, "sigmoid", "softmax")
    REFUSED("phimoe", scoring_func, "softmax", "phimoe")
    REFUSED("cohere2_moe", scoring_func, "tanh", "softmax or sigmoid")
    REFUSED("interns1_pro", num_groups, 0, "router_n_groups")
    needs_scale = 1;
    REFUSED("afmoe", scale, 0.0f, "route_scale")
    REFUSED("laguna", scale, 0.0f, "moe_routed_scaling_factor")
    REFUSED("inkling_text", num_shared_experts, 0, "n_shared_experts")
    REFUSED("longcat_flash", num_zero_experts, 0xffffffffu, "1984")
    needs_groups = 1;
    REFUSED("deepseek_v3", num_groups, 0, "n_group")
    REFUSED("deepseek_v3", topk_groups, 0, "topk_group")
    REFUSED("deepseek_v3", scale, 0.0f, "routed_scaling_factor")
    REFUSED("deepseek_v2", topk_groups, 0, "topk_group")
    model = model_of("mixtral"); /* a number that another one asks for */
    model.hidden_size = 64;
    check_refused(&model, MOE_ROUTE_ERROR_ARGUMENT, "intermediate_size is 0", "mixtral");
    model.hidden_size = 0;
    model.intermediate_size = 64;
    check_refused(&model, MOE_ROUTE_ERROR_ARGUMENT, "hidden_size is 0", "mixtral");
    model = model_of("deepseek_v4");
    model.scale = 1.5f;
    model.hash_layer = 1;
    check_refused(&model, MOE_ROUTE_ERROR_ARGUMENT, "vocab_size is 0", "deepseek_v4");
}

/* norm_topk_prob: the default of each type, and both settings. */
TEST(presets_follow_norm_topk_prob) {
    static const struct {
        const char *type;
        moe_route_renormalize by_default;
    } types[] = {{"qwen2_moe", MOE_ROUTE_RENORMALIZE_NONE}, {"qwen3_moe", MOE_ROUTE_RENORMALIZE_NONE}, {"qwen3_next", MOE_ROUTE_RENORMALIZE_SUM}, {"flint", MOE_ROUTE_RENORMALIZE_SUM}, {"kolibri1", MOE_ROUTE_RENORMALIZE_NONE}};
    moe_route_layer_desc desc;
    uint32_t i;
    for (i = 0; i < sizeof types / sizeof types[0]; i++) {
        moe_route_model model = model_of(types[i].type);
        CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK && desc.router.renormalize == types[i].by_default, "%s by default", types[i].type);
        model.norm_topk_prob = MOE_ROUTE_ON;
        CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK && desc.router.renormalize == MOE_ROUTE_RENORMALIZE_SUM, "%s ON", types[i].type);
        model.norm_topk_prob = MOE_ROUTE_OFF;
        CHECK(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK && desc.router.renormalize == MOE_ROUTE_RENORMALIZE_NONE, "%s OFF", types[i].type);
    }
}

/* ---- what a layer of a known model can't do without ---- */

TEST(layers_are_not_made_without_what_the_model_has) {
    static const float bias[32] = {0};
    device_buffer buffer = device_create_from(&device, bias, sizeof bias);
    moe_route_model model = model_of("gpt_oss");
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    model.num_experts = 32;
    model.top_k = 4;
    model.hidden_size = model.intermediate_size = 64;
    REQUIRE(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "router.logit_bias is 0"), "%s", device_message(&device));
    desc.router.logit_bias = buffer.address;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "without matrices it routes: %s", device_message(&device));
    moe_route_layer_destroy(layer);
    desc.experts.gate_up.format = MOE_ROUTE_FORMAT_BF16;
    desc.experts.gate_up.data = 4096;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "experts.gate_up.bias is 0"), "%s", device_message(&device));
    desc.experts.down = desc.experts.gate_up;
    desc.experts.gate_up.bias = 4096;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "experts.down.bias is 0"), "%s", device_message(&device));
    memset(&desc.experts.gate_up, 0, sizeof desc.experts.gate_up);
    memset(&desc.experts.down, 0, sizeof desc.experts.down);
    desc.router.logit_bias = 0;
    desc.needs = 0;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "a need can be cleared: %s", device_message(&device));
    moe_route_layer_destroy(layer);
    model = model_of("switch_transformers"); /* whose experts are ReLU without gate */
    model.top_k = 1;
    model.hidden_size = model.intermediate_size = 64;
    REQUIRE(moe_route_preset(device.context, &model, &desc) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "it routes: %s", device_message(&device));
    moe_route_layer_destroy(layer);
    desc.experts.hidden_size = desc.experts.intermediate_size = 64;
    desc.experts.down.format = MOE_ROUTE_FORMAT_BF16;
    desc.experts.down.data = 4096;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_ERROR_UNSUPPORTED && !layer && strstr(device_message(&device), "experts.down"), "%s", device_message(&device));
    device_destroy(&device, &buffer);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    device_open_wanted(&device);
    RUN(presets_agree_with_the_golden_routers);
    RUN(presets_agree_with_every_router_of_transformers);
    if (getenv("TEST_ROUTERS")) RUN(presets_agree_with_more_routers);
    RUN(presets_know_types_beyond_transformers);
    RUN(presets_refuse_unknown_types_with_similar_names);
    RUN(presets_refuse_missing_and_surplus_numbers);
    RUN(presets_follow_norm_topk_prob);
    RUN(layers_are_not_made_without_what_the_model_has);
    device_close(&device);
    return test_end();
}
