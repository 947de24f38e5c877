/*
  test_dispatch.c: what a dispatch sends to which rank: every output against its definition, for exact and fixed sizes, with
  repeated and out-of-range ids, replicas, empty ranks and rows that don't fit. What ranks do with it is test_ranks.c's.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"
#include "support/router.h"
#include "support/routing.h"
#include "support/model.h"
#include "support/cases.h"

static test_device device;
static int small_size;

TEST(rank_ranges_are_even) {
    static const uint32_t experts[] = {0, 1, 7, 16, 2048}, ranks[] = {1, 2, 3, 7, 16, 256};
    uint32_t i, j, r, first, count;
    for (i = 0; i < 5; i++)
        for (j = 0; j < 6; j++) {
            uint32_t next = 0;
            for (r = 0; r < ranks[j]; r++) {
                moe_route_rank_range(experts[i], ranks[j], r, &first, &count);
                CHECK(first == next && (count == experts[i] / ranks[j] || count == experts[i] / ranks[j] + 1), "rank %u of %u, %u experts: %u from %u", r, ranks[j], experts[i], count, first);
                next = first + count;
            }
            CHECK(next == experts[i], "%u of %u experts", next, experts[i]);
            moe_route_rank_range(experts[i], ranks[j], ranks[j], &first, &count);
            CHECK(first == experts[i] && count == 0, "a rank that doesn't exist has %u from %u", count, first);
        }
    moe_route_rank_range(5, 0, 0, &first, &count);
    CHECK(count == 0, "no ranks, %u experts", count);
    moe_route_rank_range(5, 2, 1, NULL, NULL);
}

/* ---- dispatch ---- */

enum { COUNTS, OFFSETS, ROWS, ROW_IDS, ROW_WEIGHTS, ROW_TO_TOKEN, PAIR_TO_ROW, PAIR_TO_SLOT_ROW, NUM_OUTPUTS };
static const char *const output_names[] = {"counts", "offsets", "rows", "row_ids", "row_weights", "row_to_token", "pair_to_row", "pair_to_slot_row"};

typedef struct dispatch_problem {
    const dispatch_case *c;
    const int32_t *ids, *map;
    const unsigned char *weights, *x;
    uint32_t num_tokens, num_valid, capacity, slot_capacity;
    uint32_t rank_begin[MOER_MAX_RANKS + 1];
    size_t weight_size, row_size;
    size_t sizes[NUM_OUTPUTS];
} dispatch_problem;

static int32_t placed_expert(const dispatch_problem *p, uint32_t pair) {
    const dispatch_case *c = p->c;
    const uint32_t token = pair / c->top_k;
    const int32_t id = p->ids[pair];
    uint32_t replicas = 0;
    if (token >= p->num_valid || id < 0 || (uint32_t)id >= c->num_experts - c->num_identity) return -1;
    if (!p->map) return id;
    while (replicas < c->columns && p->map[(uint32_t)id * c->columns + replicas] != -1) replicas++;
    return replicas ? p->map[(uint32_t)id * c->columns + token % replicas] : -1;
}

static uint32_t placed_rank(const dispatch_problem *p, uint32_t pair) {
    const int32_t expert = placed_expert(p, pair);
    uint32_t r;
    for (r = 0; r < p->c->num_ranks; r++)
        if (expert >= (int32_t)p->rank_begin[r] && expert < (int32_t)p->rank_begin[r + 1]) return r;
    return r;
}

/* By the definition: rank after rank, token after token. What isn't defined keeps the poison. */
static void expect_dispatch(const dispatch_problem *p, unsigned char *out[NUM_OUTPUTS]) {
    const uint32_t k = p->c->top_k, n = p->c->num_ranks;
    const size_t row_limit = p->capacity ? p->capacity : SIZE_MAX, slot_limit = p->capacity ? p->slot_capacity : SIZE_MAX;
    size_t row = 0, slot_row = 0, i;
    uint32_t r, t, j, *ranks = (uint32_t *)model_alloc((size_t)p->num_tokens * k * 4 + 1);
    for (i = 0; i < (size_t)p->num_tokens * k; i++) ranks[i] = placed_rank(p, (uint32_t)i);
    for (i = 0; i < NUM_OUTPUTS; i++) memset(out[i], DEVICE_POISON, p->sizes[i]);
    memset(out[PAIR_TO_ROW], 0xff, p->sizes[PAIR_TO_ROW]);
    memset(out[PAIR_TO_SLOT_ROW], 0xff, p->sizes[PAIR_TO_SLOT_ROW]);
    if (p->capacity) {
        memset(out[ROW_IDS], 0xff, p->sizes[ROW_IDS]);
        memset(out[ROW_TO_TOKEN], 0xff, p->sizes[ROW_TO_TOKEN]);
        memset(out[ROW_WEIGHTS], 0, p->sizes[ROW_WEIGHTS]);
    }
    for (r = 0; r <= n; r++) {
        size_t rows = 0, slots = 0;
        if (p->capacity) {
            row = (size_t)r * p->capacity;
            slot_row = (size_t)r * p->slot_capacity;
        }
        ((int32_t *)out[OFFSETS])[r * 2] = (int32_t)row;
        ((int32_t *)out[OFFSETS])[r * 2 + 1] = (int32_t)slot_row;
        if (r == n) break;
        for (t = 0; t < p->num_tokens; t++) {
            int there = 0, fits = rows < row_limit;
            for (j = 0; j < k; j++) {
                const uint32_t pair = t * k + j;
                if (ranks[pair] != r) continue;
                if (!there && fits) ((int32_t *)out[PAIR_TO_ROW])[pair] = (int32_t)row;
                there = 1;
                if (fits && slots < slot_limit) ((int32_t *)out[PAIR_TO_SLOT_ROW])[pair] = (int32_t)(slot_row + (p->capacity ? slots : 0));
                slots++;
                if (!p->capacity) slot_row++;
            }
            if (!there) continue;
            rows++;
            if (!fits) continue;
            memcpy(out[ROWS] + row * p->row_size, p->x + t * p->row_size, p->row_size);
            ((int32_t *)out[ROW_TO_TOKEN])[row] = (int32_t)t;
            for (j = 0; j < k; j++) {
                const int here = ranks[t * k + j] == r;
                ((int32_t *)out[ROW_IDS])[row * k + j] = here ? placed_expert(p, t * k + j) : -1;
                if (here) memcpy(out[ROW_WEIGHTS] + (row * k + j) * p->weight_size, p->weights + (t * k + j) * p->weight_size, p->weight_size);
                else memset(out[ROW_WEIGHTS] + (row * k + j) * p->weight_size, 0, p->weight_size);
            }
            row++;
        }
        ((int32_t *)out[COUNTS])[r * 2] = (int32_t)rows;
        ((int32_t *)out[COUNTS])[r * 2 + 1] = (int32_t)slots;
    }
    free(ranks);
}

/* `wanted` has a bit for each output. */
static void check_dispatch(moe_route_layer *layer, dispatch_problem *p, unsigned wanted, int give_valid, const char *what) {
    const dispatch_case *c = p->c;
    const size_t pairs = (size_t)p->num_tokens * c->top_k, width = c->top_k < c->num_ranks ? c->top_k : c->num_ranks;
    const size_t rows = p->capacity ? (size_t)p->capacity * c->num_ranks : p->num_tokens * width;
    const int32_t valid = (int32_t)p->num_valid;
    device_buffer ids, weights, x, valid_buffer, workspace, outputs[NUM_OUTPUTS];
    unsigned char *expected[NUM_OUTPUTS], *got;
    moe_route_dispatch_args args;
    size_t size = 0;
    uint32_t i;
    p->sizes[COUNTS] = (size_t)c->num_ranks * 8;
    p->sizes[OFFSETS] = (size_t)c->num_ranks * 8 + 8;
    p->sizes[ROWS] = rows * p->row_size;
    p->sizes[ROW_IDS] = rows * c->top_k * 4;
    p->sizes[ROW_WEIGHTS] = rows * c->top_k * p->weight_size;
    p->sizes[ROW_TO_TOKEN] = rows * 4;
    p->sizes[PAIR_TO_ROW] = p->sizes[PAIR_TO_SLOT_ROW] = pairs * 4;
    ids = device_create_from(&device, p->ids, pairs * 4);
    weights = device_create_from(&device, p->weights, pairs * p->weight_size);
    x = device_create_aligned(&device, p->num_tokens * p->row_size, 16);
    device_upload(&device, &x, p->x, p->num_tokens * p->row_size);
    valid_buffer = device_create_from(&device, &valid, 4);
    memset(&args, 0, sizeof args);
    args.num_tokens = p->num_tokens;
    args.ids = ids.address;
    args.weights = weights.address;
    args.x = x.address;
    args.num_valid_tokens = give_valid ? valid_buffer.address : 0;
    args.capacity = p->capacity;
    args.slot_capacity = p->slot_capacity == p->capacity * c->top_k ? 0 : p->slot_capacity;
    args.stream = device.stream;
    memset(&workspace, 0, sizeof workspace);
    if (pairs > MOER_DISPATCH_PAIRS) {
        CHECK(moe_route_layer_workspace_size(layer, p->num_tokens, &size) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        workspace = device_create_workspace(&device, size);
        args.workspace = workspace.address;
        args.workspace_size = size;
    }
    for (i = 0; i < NUM_OUTPUTS; i++) {
        outputs[i] = device_create_aligned(&device, p->sizes[i], 16);
        expected[i] = (unsigned char *)model_alloc(p->sizes[i] + 1);
    }
    args.counts = wanted >> COUNTS & 1 ? outputs[COUNTS].address : 0;
    args.offsets = wanted >> OFFSETS & 1 ? outputs[OFFSETS].address : 0;
    args.rows = wanted >> ROWS & 1 ? outputs[ROWS].address : 0;
    args.row_ids = wanted >> ROW_IDS & 1 ? outputs[ROW_IDS].address : 0;
    args.row_weights = wanted >> ROW_WEIGHTS & 1 ? outputs[ROW_WEIGHTS].address : 0;
    args.row_to_token = wanted >> ROW_TO_TOKEN & 1 ? outputs[ROW_TO_TOKEN].address : 0;
    args.pair_to_row = wanted >> PAIR_TO_ROW & 1 ? outputs[PAIR_TO_ROW].address : 0;
    args.pair_to_slot_row = wanted >> PAIR_TO_SLOT_ROW & 1 ? outputs[PAIR_TO_SLOT_ROW].address : 0;
    if (device.kind == MOE_ROUTE_DEVICE_GPU && pairs > MOER_DISPATCH_PAIRS && p->capacity) { /* captured, and replayed over what a first replay left */
        gpu_graph graph = NULL;
        device_must(&device, gpu_capture_begin(&device.gpu, device.stream));
        CHECK(moe_route_dispatch(layer, &args) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
        device_must(&device, gpu_capture_end(&device.gpu, device.stream, &graph));
        for (i = 0; i < 2; i++) device_must(&device, gpu_graph_launch(&device.gpu, graph, device.stream));
        device_synchronize(&device);
        device_must(&device, gpu_graph_destroy(&device.gpu, graph));
    } else {
        CHECK(moe_route_dispatch(layer, &args) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
    }
    device_synchronize(&device);
    expect_dispatch(p, expected);
    for (i = 0; i < NUM_OUTPUTS; i++) {
        char name[160];
        snprintf(name, sizeof name, "%s: %s", what, output_names[i]);
        got = (unsigned char *)model_alloc(p->sizes[i] + 1);
        device_download(&device, got, &outputs[i], p->sizes[i]);
        if (!(wanted >> i & 1)) memset(expected[i], DEVICE_POISON, p->sizes[i]);
        if (i == ROWS || i == ROW_WEIGHTS) CHECK_BYTES(got, expected[i], p->sizes[i], name);
        else CHECK_INTS((int32_t *)(void *)got, (int32_t *)(void *)expected[i], p->sizes[i] / 4, name);
        free(got);
        free(expected[i]);
        device_destroy(&device, &outputs[i]);
    }
    device_destroy(&device, &ids);
    device_destroy(&device, &weights);
    device_destroy(&device, &x);
    device_destroy(&device, &valid_buffer);
    if (workspace.address) device_destroy(&device, &workspace);
}

static void make_ids(test_random *random, uint32_t kind, const dispatch_case *c, uint32_t num_pairs, int32_t *ids) {
    static const int32_t wild[] = {-1, -2147483647 - 1, 2147483647, 100000};
    uint32_t p;
    for (p = 0; p < num_pairs; p++) {
        ids[p] = (int32_t)random_below(random, c->num_experts);
        if (kind == 1) ids[p] = (int32_t)(c->num_experts - 1 - c->num_identity);                          /* all to one rank */
        if (kind == 2) ids[p] = (int32_t)random_below(random, 1 + random_below(random, c->num_experts)); /* skewed */
        if (kind == 3 && random_below(random, 3) == 0) ids[p] = wild[random_below(random, 4)];
        if (kind == 4) ids[p] = -1; /* nowhere */
    }
}

static void describe_dispatch(const dispatch_case *c, uint32_t max_tokens, const device_buffer *map, moe_route_layer_desc *desc) {
    memset(desc, 0, sizeof *desc);
    desc->router.num_experts = c->num_experts;
    desc->router.top_k = c->top_k;
    desc->router.weights_dtype = c->weights_dtype;
    desc->experts.hidden_size = c->hidden_size;
    desc->experts.dtype = c->dtype;
    desc->experts.num_identity_experts = c->num_identity;
    desc->experts.num_ranks = c->num_ranks;
    if (c->rank_experts[0] + c->rank_experts[1] + c->rank_experts[2]) desc->experts.rank_experts = c->rank_experts;
    if (c->columns) {
        desc->experts.expert_map = map->address;
        desc->experts.expert_map_columns = c->columns;
        desc->experts.num_physical_experts = c->num_physical;
    }
    desc->max_tokens = max_tokens;
    desc->operations = MOE_ROUTE_OPERATION_DISPATCH;
}

/* Tokens of a batch just too large for one launch, and odd. */
static uint32_t large_tokens(const dispatch_case *c) { return (MOER_DISPATCH_PAIRS / c->top_k + 1) | 1; }

static void run_dispatch_case(const dispatch_case *c, uint64_t seed) {
    const uint32_t large = large_tokens(c), token_counts[] = {0, 1, 2, 7, 16, 67, MOER_DISPATCH_PAIRS / c->top_k, large, 3 * large + 1};
    const uint32_t max_tokens = small_size ? large : 3 * large + 1, num_physical = c->columns ? c->num_physical : c->num_experts - c->num_identity;
    int32_t *ids = (int32_t *)model_alloc((size_t)max_tokens * c->top_k * 4), *map = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    device_buffer map_buffer;
    dispatch_problem p;
    test_random random;
    uint32_t i, r, kind, first;
    unsigned char *weights, *x;
    random_seed(&random, seed);
    memset(&map_buffer, 0, sizeof map_buffer);
    memset(&p, 0, sizeof p);
    p.c = c;
    p.weight_size = c->weights_dtype == MOE_ROUTE_F32 ? 4 : 2;
    p.row_size = (size_t)c->hidden_size * (c->dtype == MOE_ROUTE_F32 ? 4 : 2);
    weights = (unsigned char *)model_alloc((size_t)max_tokens * c->top_k * p.weight_size);
    x = (unsigned char *)model_alloc(max_tokens * p.row_size);
    fill_random_bytes(&random, weights, (size_t)max_tokens * c->top_k * p.weight_size);
    fill_random_bytes(&random, x, max_tokens * p.row_size);
    if (c->columns) {
        map = (int32_t *)model_alloc((size_t)c->num_experts * c->columns * 4);
        for (i = 0; i < c->num_experts * c->columns; i++)
            map[i] = i % c->columns != 0 && random_below(&random, 3) == 0 ? -1 : i % 7 == 3 ? -1 : i % 11 == 5 ? 1000000 : (int32_t)random_below(&random, c->num_physical);
        map_buffer = device_create_from(&device, map, (size_t)c->num_experts * c->columns * 4);
    }
    describe_dispatch(c, max_tokens, &map_buffer, &desc);
    for (r = 0, first = 0; r < c->num_ranks; r++) {
        uint32_t begin, count;
        moe_route_rank_range(num_physical, c->num_ranks, r, &begin, &count);
        p.rank_begin[r] = first;
        first += desc.experts.rank_experts ? c->rank_experts[r] : count;
    }
    p.rank_begin[r] = first;
    p.ids = ids;
    p.map = map;
    p.weights = weights;
    p.x = x;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    for (i = 0; layer && i < 9; i++)
        for (kind = 0; kind < 5; kind++) {
            const uint32_t num_tokens = token_counts[i], some = (num_tokens + 3) / 4;
            const uint32_t capacities[] = {0, num_tokens ? num_tokens : 3, some ? some : 1};
            char what[128];
            uint32_t mode;
            if (num_tokens > max_tokens || (num_tokens > 67 && kind == 4)) continue;
            if (small_size && i == 6) continue;
            make_ids(&random, kind, c, num_tokens * c->top_k, ids);
            for (mode = 0; mode < 4; mode++) {
                const int padded = (i + kind + mode) % 3 == 0;
                if (small_size && (i == 7 ? kind + mode != 1 && kind + mode != 5 : kind % 2 != mode % 2)) continue;
                p.num_tokens = num_tokens;
                p.num_valid = padded && num_tokens ? num_tokens - 1 - random_below(&random, num_tokens) : num_tokens;
                p.capacity = capacities[mode == 3 ? 2 : mode];
                p.slot_capacity = mode == 3 ? p.capacity : p.capacity * c->top_k; /* fewer slot rows than there may be */
                snprintf(what, sizeof what, "E %u k %u N %u T %u of %u, ids %u, capacity %u, %u", c->num_experts, c->top_k, c->num_ranks, p.num_valid, num_tokens, kind, p.capacity, p.slot_capacity);
                check_dispatch(layer, &p, (i + kind + mode) % 4 != 1 ? 0xffu : 1u << random_below(&random, NUM_OUTPUTS), padded, what);
            }
        }
    moe_route_layer_destroy(layer);
    if (c->columns) device_destroy(&device, &map_buffer);
    free(map);
    free(ids);
    free(weights);
    free(x);
}

TEST(dispatch_matches_its_definition) {
    uint32_t i;
    for (i = 0; i < NUM_CASES(dispatch_cases); i++)
        if (!small_size || dispatch_cases[i].in_small) run_dispatch_case(&dispatch_cases[i], 900 + i);
}

/* One launch up to MOER_DISPATCH_PAIRS, then two, which the plan tells; they need a workspace, and say so before anything is written. */
TEST(large_dispatches_are_two_launches) {
    const dispatch_case *c = &dispatch_cases[0];
    const uint32_t few = MOER_DISPATCH_PAIRS / c->top_k, many = few + 1, pairs = many * c->top_k;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_dispatch_args args;
    moe_route_plan plan;
    device_buffer ids, counts, pair_to_row, workspace, no_map;
    int32_t *zeros = (int32_t *)model_alloc((size_t)pairs * 4), *got = (int32_t *)model_alloc((size_t)pairs * 4), total[4] = {0, 0, 0, 0};
    size_t size = 0, small_workspace = 0;
    uint32_t i;
    memset(&no_map, 0, sizeof no_map);
    memset(zeros, 0, (size_t)pairs * 4);
    describe_dispatch(c, many, &no_map, &desc);
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(moe_route_layer_explain(layer, MOE_ROUTE_OPERATION_DISPATCH, few, &plan) == MOE_ROUTE_OK && plan.num_launches == (device.kind != MOE_ROUTE_DEVICE_CPU), "%u launches for %u tokens", plan.num_launches, few);
    CHECK(moe_route_layer_explain(layer, MOE_ROUTE_OPERATION_DISPATCH, many, &plan) == MOE_ROUTE_OK && plan.num_launches == (device.kind != MOE_ROUTE_DEVICE_CPU ? 2u : 0u), "%u launches for %u tokens", plan.num_launches,
          many);
    if (plan.num_launches == 2)
        CHECK(strcmp(plan.launches[0].kernel, "dispatch_count") == 0 && strcmp(plan.launches[1].kernel, "dispatch_scatter") == 0 && plan.launches[0].grid[0] == plan.launches[1].grid[1], "%s, %s",
              plan.launches[0].kernel, plan.launches[1].kernel);
    moe_route_layer_workspace_size(layer, few, &small_workspace);
    moe_route_layer_workspace_size(layer, many, &size);
    CHECK(size > small_workspace, "workspaces of %lu and %lu bytes", (unsigned long)small_workspace, (unsigned long)size);
    ids = device_create_from(&device, zeros, (size_t)pairs * 4);
    counts = device_create(&device, (size_t)c->num_ranks * 8);
    pair_to_row = device_create(&device, (size_t)pairs * 4);
    workspace = device_create_workspace(&device, size);
    memset(&args, 0, sizeof args);
    args.num_tokens = many;
    args.ids = ids.address;
    args.counts = counts.address;
    args.pair_to_row = pair_to_row.address;
    args.workspace = workspace.address;
    args.stream = device.stream;
    for (i = 0; i < 3; i++) {
        args.workspace_size = i == 0 ? 0 : i == 1 ? size - 1 : size;
        args.workspace = i == 2 ? workspace.address + 128 : workspace.address;
        CHECK(moe_route_dispatch(layer, &args) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "moe_route_dispatch: workspace"), "workspace %u: %s", i, device_message(&device));
    }
    device_synchronize(&device);
    device_download(&device, got, &pair_to_row, (size_t)pairs * 4);
    for (i = 0; i < pairs && got[i] == (int32_t)0xcbcbcbcb; i++) {}
    CHECK(i == pairs, "pair %u was written by a refused call", i);
    args.workspace = workspace.address;
    CHECK(moe_route_dispatch(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    device_download(&device, total, &counts, sizeof total);
    CHECK(total[0] == (int32_t)many && total[1] == (int32_t)pairs && total[2] == 0 && total[3] == 0, "rank 0 has %d rows and %d slot rows", (int)total[0], (int)total[1]);
    args.num_tokens = few; /* and without one where it is one launch */
    args.workspace = args.workspace_size = 0;
    CHECK(moe_route_dispatch(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    device_download(&device, total, &counts, sizeof total);
    CHECK(total[0] == (int32_t)few, "rank 0 has %d rows", (int)total[0]);
    device_destroy(&device, &ids);
    device_destroy(&device, &counts);
    device_destroy(&device, &pair_to_row);
    device_destroy(&device, &workspace);
    moe_route_layer_destroy(layer);
    free(zeros);
    free(got);
}

int main(int argc, char **argv) {
    small_size = test_is_small();
    test_begin(argc, argv);
    device_open_wanted(&device);
    RUN(rank_ranges_are_even);
    RUN(dispatch_matches_its_definition);
    RUN(large_dispatches_are_two_launches);
    device_close(&device);
    return test_end();
}
