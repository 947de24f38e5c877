/*
  test_router_errors.c: routers that are described wrongly, calls that lack what their router needs, and scores of one's own
  that no compiler would take. Other wrong descriptions and calls are test_errors.c's.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"

#define COUNT(array) (sizeof (array) / sizeof (array)[0])

static float double_of(float x, void *user) {
    (void)user;
    return x + x;
}

static const char *message_of(const moe_route_context *context) {
    static char text[2048];
    moe_route_message(context, text, sizeof text);
    return text;
}

static moe_route_context *open_context(moe_route_device kind, const char *nvrtc_path) {
    moe_route_context_desc desc;
    moe_route_context *context = NULL;
    memset(&desc, 0, sizeof desc);
    desc.device = kind;
    desc.compile_target = kind == MOE_ROUTE_DEVICE_COMPILE ? 90 : 0;
    desc.cache_dir = "off";
    desc.nvrtc_path = nvrtc_path;
    if (moe_route_context_create(&desc, &context) != MOE_ROUTE_OK) device_die("a context for the CPU or for compiling can't be created");
    return context;
}

typedef struct refusal {
    moe_route_router router;   /* 24 experts, top 4, unless it says otherwise */
    moe_route_experts experts;
    const char *texts[2];      /* that the message contains */
    int cpu, compile;          /* where it is refused: 1 */
} refusal;

static const refusal refusals[] = {
    {{.num_shared_experts = 33, .score = MOE_ROUTE_SCORE_SIGMOID}, {0}, {"router.num_shared_experts is 33", "0 to 32"}, 1, 1},
    {{.num_shared_experts = 1}, {0}, {"router.num_shared_experts is 1", "SOFTMAX"}, 1, 1},
    {{.num_shared_experts = 1, .score = MOE_ROUTE_SCORE_SPARSE_MIXER}, {0}, {"router.num_shared_experts is 1", "SPARSE_MIXER"}, 1, 1},
    {{.num_skip_experts = 24}, {0}, {"router.num_skip_experts is 24", "0 to 23"}, 1, 1},
    {{.weights_dtype = (moe_route_dtype)4}, {0}, {"router.weights_dtype is 4", "BF16 (3)"}, 1, 1},
    {{.logit_bias = 4098}, {0}, {"router.logit_bias is 4098", "multiple of 4"}, 1, 1},
    {{.expert_scale = 4097}, {0}, {"router.expert_scale is 4097", "multiple of 4"}, 1, 1},
    {{.softcap = -1.0f}, {0}, {"router.softcap is -1", "positive"}, 1, 1},
    {{.softcap = NAN}, {0}, {"router.softcap is", "nan"}, 1, 1},
    {{.softcap = HUGE_VALF}, {0}, {"router.softcap is inf", "positive"}, 1, 1},
    {{.jitter = 0.5f}, {0}, {"router.jitter is 0.5", "SPARSE_MIXER"}, 1, 1},
    {{.jitter = -0.5f, .score = MOE_ROUTE_SCORE_SPARSE_MIXER}, {0}, {"router.jitter is -0.5", "positive"}, 1, 1},
    {{.group_rule = (moe_route_group_rule)4}, {0}, {"router.group_rule is 4", "0 to 3"}, 1, 1},
    {{.dropped = (moe_route_dropped)3}, {0}, {"router.dropped is 3", "ZERO_SCORE (2)"}, 1, 1},
    {{.dropped = MOE_ROUTE_DROPPED_ZERO}, {0}, {"router.dropped is 1", "unless group_rule"}, 1, 1},
    {{.dropped = MOE_ROUTE_DROPPED_ZERO_SCORE, .group_rule = MOE_ROUTE_GROUPS_QUOTA, .num_groups = 2}, {0}, {"router.dropped is 2", "unless group_rule"}, 1, 1},
    {{.dropped = MOE_ROUTE_DROPPED_ZERO_SCORE, .selection_bias = 4096, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 2, .topk_groups = 1}, {0}, {"router.selection_bias is 4096", "DROPPED_ZERO_SCORE"}, 1, 1},
    {{.dropped = MOE_ROUTE_DROPPED_ZERO_SCORE, .score = MOE_ROUTE_SCORE_IDENTITY, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 2, .topk_groups = 1}, {0}, {"router.score is 3", "DROPPED_ZERO_SCORE"}, 1, 1},
    {{.ids = (moe_route_ids_source)3}, {0}, {"router.ids is 3", "TABLE (2)"}, 1, 1},
    {{.num_groups = 4}, {0}, {"router.group_rule is 0", "more than one group"}, 1, 1},
    {{.group_rule = MOE_ROUTE_GROUPS_MAX}, {0}, {"router.num_groups is 0", "divisor of num_experts, 24"}, 1, 1},
    {{.group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 5, .topk_groups = 1}, {0}, {"router.num_groups is 5", "divisor of num_experts, 24"}, 1, 1},
    {{.num_experts = 130, .group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 65, .topk_groups = 1}, {0}, {"router.num_groups is 65", "up to 64"}, 1, 1},
    {{.group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 4}, {0}, {"router.topk_groups is 0", "1 to num_groups, 4"}, 1, 1},
    {{.group_rule = MOE_ROUTE_GROUPS_MAX, .num_groups = 4, .topk_groups = 5}, {0}, {"router.topk_groups is 5", "1 to num_groups, 4"}, 1, 1},
    {{.group_rule = MOE_ROUTE_GROUPS_TOP2_SUM, .num_groups = 24, .topk_groups = 8}, {0}, {"router.num_groups is 24", "at least 2"}, 1, 1},
    {{.group_rule = MOE_ROUTE_GROUPS_QUOTA, .num_groups = 3}, {0}, {"router.num_groups is 3", "divisor of top_k, 4"}, 1, 1},
    {{.ids = MOE_ROUTE_IDS_TABLE, .id_table_rows = 9}, {0}, {"router.id_table is 0", "multiple of 4"}, 1, 0},
    {{.ids = MOE_ROUTE_IDS_TABLE, .id_table_rows = 9, .id_table = 4098}, {0}, {"router.id_table is 4098", "multiple of 4"}, 1, 1},
    {{.ids = MOE_ROUTE_IDS_TABLE, .id_table = 4096}, {0}, {"router.id_table_rows is 0", "1 to 2147483647"}, 1, 1},
    {{.id_table = 4096}, {0}, {"router.ids is 0", "TABLE (2)"}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_SPARSE_MIXER, .ids = MOE_ROUTE_IDS_GIVEN}, {0}, {"router.ids is 1", "SPARSE_MIXER"}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_SPARSE_MIXER, .selection_bias = 4096}, {0}, {"router.selection_bias is 4096", "SPARSE_MIXER"}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_SPARSE_MIXER, .group_rule = MOE_ROUTE_GROUPS_QUOTA, .num_groups = 2}, {0}, {"router.group_rule is 3", "SPARSE_MIXER"}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x + x"}, {0}, {"router.score_function is NULL", "CPU"}, 1, 0},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_function = double_of}, {0}, {"router.score_expression is missing", "CUDA expression"}, 0, 1},
    {{.score_expression = "x + x"}, {0}, {"router.score is 0", "CUSTOM (5)"}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = ""}, {0}, {"router.score_", ""}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "   "}, {0}, {"router.score_", ""}, 1, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x); return x; ("}, {0}, {"router.score_expression is", "parentheses"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x; x"}, {0}, {"router.score_expression has character 1", "code 59"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x) + (x"}, {0}, {"router.score_expression is", "parentheses"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "(x"}, {0}, {"router.score_expression is", "parentheses"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x // y"}, {0}, {"router.score_expression has character 2", "code 47"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x /* y"}, {0}, {"router.score_expression has character 2", "code 47"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x\n+ 1"}, {0}, {"router.score_expression has character 1", "code 10"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "x\\"}, {0}, {"router.score_expression has character 1", "code 92"}, 0, 1},
    {{.score = MOE_ROUTE_SCORE_CUSTOM, .score_expression = "\"x\""}, {0}, {"router.score_expression has character 0", "code 34"}, 0, 1},
    {{0}, {.expert_map = 4098}, {"experts.expert_map is 4098", "multiple of 4"}, 1, 1},
    {{0}, {.expert_map_columns = 2}, {"experts.expert_map is 0", "expert_map_columns"}, 1, 1},
    {{0}, {.num_physical_experts = 30}, {"experts.num_physical_experts is 30", "where experts.expert_map isn't given"}, 1, 1},
    {{0}, {.expert_map = 4096, .expert_map_columns = 65}, {"experts.expert_map_columns is 65", "1 to 64"}, 1, 1},
    {{0}, {.expert_map = 4096, .num_physical_experts = 2049}, {"experts.num_physical_experts is 2049", "1 to 2048"}, 1, 1},
    {{0}, {.expert_map = 4096, .num_physical_experts = 30, .first_expert = 30}, {"experts.first_expert is 30", "0 to 29"}, 1, 1},
    {{0}, {.expert_map = 4096, .num_physical_experts = 30, .first_expert = 20, .num_local_experts = 11}, {"experts.num_local_experts is 11", "at most 10"}, 1, 1},
    {{.num_skip_experts = 4}, {.num_local_experts = 21}, {"experts.num_local_experts is 21", "at most 20"}, 1, 1},
};

static void describe(moe_route_layer_desc *desc, const moe_route_router *router, const moe_route_experts *experts) {
    memset(desc, 0, sizeof *desc);
    desc->router = *router;
    if (desc->router.num_experts == 0) desc->router.num_experts = 24;
    if (desc->router.top_k == 0) desc->router.top_k = 4;
    if (experts) desc->experts = *experts;
}

static void check_refused(moe_route_context *context, const refusal *r, const char *where) {
    moe_route_layer_desc desc;
    moe_route_layer *layer = (moe_route_layer *)(uintptr_t)256;
    moe_route_status status;
    const char *message;
    describe(&desc, &r->router, &r->experts);
    status = moe_route_layer_create(context, &desc, &layer);
    message = message_of(context);
    CHECK(status == MOE_ROUTE_ERROR_ARGUMENT, "%s: %s for \"%s\": %s", where, moe_route_status_name(status), r->texts[0], message);
    CHECK(strstr(message, r->texts[0]) && strstr(message, r->texts[1]), "%s: \"%s\" lacks \"%s\" or \"%s\"", where, message, r->texts[0], r->texts[1]);
    CHECK(layer == NULL, "%s: *layer isn't NULL for \"%s\"", where, r->texts[0]);
    if (status == MOE_ROUTE_OK) moe_route_layer_destroy(layer);
}

TEST(wrong_routers_are_refused) {
    moe_route_context *on_cpu = open_context(MOE_ROUTE_DEVICE_CPU, NULL), *compiling = open_context(MOE_ROUTE_DEVICE_COMPILE, "/nonexistent/libnvrtc.so");
    size_t i;
    for (i = 0; i < COUNT(refusals); i++) {
        if (refusals[i].cpu) check_refused(on_cpu, &refusals[i], "cpu");
        if (refusals[i].compile) check_refused(compiling, &refusals[i], "compile");
    }
    moe_route_context_destroy(on_cpu);
    moe_route_context_destroy(compiling);
}

/* The longest expression that is allowed is taken, however many spaces it has, and one more character isn't. */
TEST(long_scores_are_refused) {
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_COMPILE, "/nonexistent/libnvrtc.so");
    char expression[200];
    size_t length;
    for (length = 160; length <= 161; length++) {
        moe_route_layer_desc desc;
        moe_route_router router;
        moe_route_layer *layer = NULL;
        moe_route_status status;
        size_t i;
        for (i = 0; i < length; i++) expression[i] = "x "[i % 2];
        expression[length] = 0;
        memset(&router, 0, sizeof router);
        router.score = MOE_ROUTE_SCORE_CUSTOM;
        router.score_expression = expression;
        describe(&desc, &router, NULL);
        status = moe_route_layer_create(context, &desc, &layer);
        if (length == 160) CHECK(status == MOE_ROUTE_ERROR_NO_COMPILER, "160 characters: %s: %s", moe_route_status_name(status), message_of(context));
        else CHECK(status == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), "161 characters"), "161 characters: %s: %s", moe_route_status_name(status), message_of(context));
        moe_route_layer_destroy(layer);
    }
    moe_route_context_destroy(context);
}

/* NVRTC's own words come back for an expression that doesn't compile. */
TEST(scores_that_do_not_compile_come_back_with_the_log) {
    static const struct { const char *expression, *text; } wrong[] = {{"x + undeclared_name", "undeclared_name"}, {"x +", "error"}, {"float(", ""}};
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_COMPILE, NULL);
    size_t i;
    for (i = 0; i < COUNT(wrong); i++) {
        moe_route_layer_desc desc;
        moe_route_router router;
        moe_route_layer *layer = NULL;
        moe_route_status status;
        memset(&router, 0, sizeof router);
        router.score = MOE_ROUTE_SCORE_CUSTOM;
        router.score_expression = wrong[i].expression;
        describe(&desc, &router, NULL);
        status = moe_route_layer_create(context, &desc, &layer);
        if (status == MOE_ROUTE_ERROR_NO_COMPILER) SKIP("NVRTC isn't here");
        CHECK(status == (i == 2 ? MOE_ROUTE_ERROR_ARGUMENT : MOE_ROUTE_ERROR_COMPILE) && layer == NULL, "\"%s\": %s", wrong[i].expression, moe_route_status_name(status));
        CHECK(strstr(message_of(context), wrong[i].text), "\"%s\" lacks \"%s\"", message_of(context), wrong[i].text);
    }
    moe_route_context_destroy(context);
}

/* ---- calls that lack what their router needs ---- */

static void check_call(moe_route_router router, moe_route_address ids, moe_route_address token_ids, moe_route_address shared_weights, const char *text) {
    static float logits[2 * 32];
    static int32_t table[4], out_ids[8];
    moe_route_context *context = open_context(MOE_ROUTE_DEVICE_CPU, NULL);
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_route_args args;
    moe_route_status status;
    if (router.ids == MOE_ROUTE_IDS_TABLE) {
        router.id_table = (moe_route_address)(uintptr_t)table;
        router.id_table_rows = 1;
    }
    describe(&desc, &router, NULL);
    REQUIRE(moe_route_layer_create(context, &desc, &layer) == MOE_ROUTE_OK, "%s", message_of(context));
    memset(&args, 0, sizeof args);
    args.num_tokens = 2;
    args.logits = (moe_route_address)(uintptr_t)logits;
    args.ids = ids == 1 ? (moe_route_address)(uintptr_t)out_ids : ids;
    args.token_ids = token_ids;
    args.shared_weights = shared_weights;
    memset(out_ids, 0x5a, sizeof out_ids);
    status = moe_route_route(layer, &args);
    CHECK(status == MOE_ROUTE_ERROR_ARGUMENT && strstr(message_of(context), text), "%s: %s: %s", text, moe_route_status_name(status), message_of(context));
    CHECK(out_ids[0] == 0x5a5a5a5a, "%s: ids were written", text);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
}

TEST(calls_without_what_the_router_needs_are_refused) {
    moe_route_router router;
    memset(&router, 0, sizeof router);
    check_call(router, 1, 0, 4096, "shared_weights is given");
    router.ids = MOE_ROUTE_IDS_TABLE;
    check_call(router, 1, 0, 0, "token_ids is 0");
    check_call(router, 1, 4098, 0, "token_ids is 0x1002");
    router.ids = MOE_ROUTE_IDS_GIVEN;
    check_call(router, 0, 0, 0, "ids is 0");
    router.ids = MOE_ROUTE_IDS_SELECTED;
    router.score = MOE_ROUTE_SCORE_SIGMOID;
    router.num_shared_experts = 2;
    check_call(router, 1, 0, 4097, "shared_weights is 0x1001");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(wrong_routers_are_refused);
    RUN(long_scores_are_refused);
    RUN(scores_that_do_not_compile_come_back_with_the_log);
    RUN(calls_without_what_the_router_needs_are_refused);
    return test_end();
}
