/*
  test_maps.c: the expert maps of given ids: every output against its definition, for few pairs (one launch) and many, with
  repeated and out-of-range ids, ranges of local experts, experts that an expert map places, skewed and empty experts.
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

typedef enum ids_kind { IDS_RANDOM, IDS_ONE_EXPERT, IDS_SKEWED, IDS_WILD, NUM_IDS_KINDS } ids_kind;

static void make_ids(test_random *random, ids_kind kind, int32_t *ids, uint32_t num_pairs, uint32_t num_experts) {
    uint32_t p;
    for (p = 0; p < num_pairs; p++) {
        ids[p] = (int32_t)random_below(random, num_experts);
        if (kind == IDS_ONE_EXPERT) ids[p] = (int32_t)(num_experts - 1);
        if (kind == IDS_SKEWED) ids[p] = (int32_t)random_below(random, 1 + random_below(random, num_experts));
        if (kind == IDS_WILD) {
            static const int32_t wild[] = {-1, -2147483647 - 1, 2147483647, 0, 100000};
            if (random_below(random, 3) == 0) ids[p] = wild[random_below(random, 5)];
            if (random_below(random, 8) == 0) ids[p] = (int32_t)num_experts;
        }
    }
}

/* [E, columns]: some experts have no physical expert, some as many as there are columns, others fewer. */
static int32_t *make_expert_map(test_random *random, const maps_case *c) {
    int32_t *map = (int32_t *)malloc((size_t)c->num_experts * c->columns * sizeof *map);
    uint32_t e, i;
    for (e = 0; e < c->num_experts; e++) {
        const uint32_t replicas = e % 7 == 3 ? 0 : e % 5 == 0 ? c->columns : 1 + random_below(random, c->columns);
        for (i = 0; i < c->columns; i++) map[e * c->columns + i] = i < replicas ? (int32_t)random_below(random, c->num_physical) : i == replicas ? -1 : 0;
    }
    return map;
}

/* The physical expert of every pair, by the definition in moe_route.h. */
static int32_t *place_pairs(const maps_case *c, const int32_t *map, const int32_t *ids, uint32_t num_pairs) {
    int32_t *placed = (int32_t *)malloc((size_t)num_pairs * sizeof *placed + 1);
    uint32_t p, replicas;
    for (p = 0; p < num_pairs; p++) {
        const int32_t *row = map + (size_t)(ids[p] < 0 ? 0 : ids[p]) * c->columns;
        placed[p] = -1;
        if (ids[p] < 0 || ids[p] >= (int32_t)c->num_experts) continue;
        for (replicas = 0; replicas < c->columns && row[replicas] != -1; replicas++) {}
        if (replicas) placed[p] = row[p / c->top_k % replicas];
    }
    return placed;
}

/* Counters that begin with numbers beyond 32 bits have grown by the valid pairs of each expert. */
static void check_load(const routing_output *output, const int64_t *before, uint32_t num_experts, uint32_t num_valid_pairs, const char *what) {
    uint32_t e, p;
    for (e = 0; e < num_experts; e++) {
        int64_t want = before[e];
        for (p = 0; p < num_valid_pairs; p++) want += output->ids[p] == (int32_t)e;
        if (!CHECK(output->expert_load[e] == want, "%s: load of expert %u is %lld instead of %lld", what, e, (long long)output->expert_load[e], (long long)want)) return;
    }
}

/* Each number of tokens with ids of each kind from `first_kind` on. */
static void run_case(const maps_case *c, uint64_t seed, moe_route_switch cub_maps, const uint32_t *token_counts, uint32_t num_counts, uint32_t first_kind) {
    static const uint32_t block_sizes[] = {0, 1, 16, 64, 7};
    const uint32_t max_tokens = token_counts[num_counts - 1];
    const uint32_t num_local = c->num_local ? c->num_local : (c->columns ? c->num_physical : c->num_experts) - c->first_expert;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    int32_t *ids = (int32_t *)malloc((size_t)max_tokens * c->top_k * 4), *map = NULL;
    int64_t *load = (int64_t *)malloc(c->num_experts * sizeof *load);
    device_buffer map_buffer;
    test_random random;
    uint32_t i, kind;
    random_seed(&random, seed);
    memset(&map_buffer, 0, sizeof map_buffer);
    for (i = 0; i < c->num_experts; i++) load[i] = INT64_C(5000000000) * (int64_t)i - 1;
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = c->num_experts;
    desc.router.top_k = c->top_k;
    desc.experts.first_expert = c->first_expert;
    desc.experts.num_local_experts = c->num_local;
    if (c->columns) {
        map = make_expert_map(&random, c);
        map_buffer = device_create_from(&device, map, (size_t)c->num_experts * c->columns * sizeof *map);
        desc.experts.expert_map = map_buffer.address;
        desc.experts.expert_map_columns = c->columns;
        desc.experts.num_physical_experts = c->num_physical;
    }
    desc.max_tokens = max_tokens;
    desc.operations = MOE_ROUTE_OPERATION_MAPS;
    desc.cub_maps = cub_maps;
    CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    for (i = 0; layer && i < num_counts; i++)
        for (kind = first_kind; kind < NUM_IDS_KINDS; kind++) {
            const uint32_t num_tokens = token_counts[i];
            const int32_t valid = (int32_t)(num_tokens / 2 + 1);
            routing_input input;
            routing_output output;
            uint32_t num_valid_pairs;
            char what[96];
            make_ids(&random, (ids_kind)kind, ids, num_tokens * c->top_k, c->num_experts);
            memset(&input, 0, sizeof input);
            input.num_tokens = num_tokens;
            input.ids = ids;
            input.maps = 1;
            input.block_size = block_sizes[(i + kind) % 5];
            input.num_valid = (i + kind) % 3 == 0 ? &valid : NULL;
            snprintf(what, sizeof what, "E %u k %u local %u+%u T %u ids %u block %u%s", c->num_experts, c->top_k, c->first_expert, num_local, num_tokens, kind, input.block_size,
                     input.num_valid ? " padded" : "");
            input.expert_load = kind % 2 ? load : NULL;
            CHECK(routing_run(&device, layer, &desc.router, num_local, &input, &output) == MOE_ROUTE_OK, "%s: %s", what, device_message(&device));
            num_valid_pairs = input.num_valid && (uint32_t)valid < num_tokens ? (uint32_t)valid * c->top_k : output.num_pairs;
            if (map) output.placed = place_pairs(c, map, ids, output.num_pairs);
            routing_check_maps(&output, c->first_expert, num_valid_pairs, input.block_size, what);
            if (input.expert_load) check_load(&output, load, c->num_experts, num_valid_pairs, what);
            routing_output_free(&output);
        }
    moe_route_layer_destroy(layer);
    device_destroy(&device, &map_buffer);
    free(ids);
    free(map);
    free(load);
}

TEST(maps_match_their_definition) {
    static const uint32_t token_counts[] = {0, 1, 2, 3, 7, 16, 17, 33, 64, 65, 300, 4096};
    uint32_t i;
    for (i = 0; i < NUM_CASES(maps_cases); i++)
        if (!small_size || maps_cases[i].in_small) run_case(&maps_cases[i], 50 + i, MOE_ROUTE_AUTO, token_counts, small_size ? 10 : 12, 0);
}

/* Whether so many tokens are sorted by maps_cub.cu, and in how many launches; -1 where CUB or NVRTC isn't there. */
static int goes_by_cub(const maps_case *c, uint32_t num_tokens, uint32_t *num_launches) {
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_plan plan;
    moe_route_status status;
    memset(&desc, 0, sizeof desc);
    memset(&plan, 0, sizeof plan);
    desc.router.num_experts = c->num_experts;
    desc.router.top_k = c->top_k;
    desc.max_tokens = num_tokens;
    desc.operations = MOE_ROUTE_OPERATION_MAPS;
    desc.cub_maps = MOE_ROUTE_ON;
    status = moe_route_layer_create(device.context, &desc, &layer);
    if (status == MOE_ROUTE_ERROR_NO_COMPILER) return -1;
    CHECK(status == MOE_ROUTE_OK, "%s", device_message(&device));
    if (layer) CHECK(moe_route_layer_explain(layer, MOE_ROUTE_OPERATION_MAPS, num_tokens, &plan) == MOE_ROUTE_OK, "%s", device_message(&device));
    moe_route_layer_destroy(layer);
    *num_launches = plan.num_launches;
    return plan.num_launches && strncmp(plan.launches[0].kernel, "maps_cub", 8) == 0;
}

/* Sorts of many pairs: tiles that are full, one pair over and nearly empty, one block and several, one launch and two, shares of more than
   one tile; experts around the powers of two and the sizes that decide on a block's tile, or whether CUB takes them. */
static const maps_case many_pairs_cases[] = {
    {255, 8, 0, 0, 0, 0, 0}, {256, 8, 0, 0, 0, 0, 1}, {511, 2, 0, 0, 0, 0, 0}, {512, 10, 0, 0, 0, 0, 1}, {768, 3, 0, 0, 0, 0, 0}, {769, 8, 0, 0, 0, 0, 0}, {2048, 7, 900, 300, 0, 0, 0},
    {1, 1, 0, 0, 0, 0, 0}, {60, 6, 30, 30, 0, 0, 1}, {32, 4, 10, 20, 3, 48, 1}, {40, 5, 0, 0, 64, 2048, 0}, {100, 64, 3, 64, 0, 0, 0}, {1025, 4, 0, 0, 0, 0, 0}, {1537, 2, 0, 0, 0, 0, 1},
};

static void run_many_pairs(moe_route_switch cub_maps) {
    static const uint32_t pair_counts[] = {520, 1024, 1032, 2050, 4100, 8192, 8200, 20010};
    static const maps_case long_shares = {300, 4, 0, 0, 0, 0, 0};
    static const uint32_t long_shares_tokens = 34000; /* five tiles a block */
    uint32_t i, j;
    for (i = 0; i < NUM_CASES(many_pairs_cases); i++) {
        uint32_t token_counts[8];
        const uint32_t num_counts = small_size ? 7 : 8;
        if (small_size && !many_pairs_cases[i].in_small) continue;
        for (j = 0; j < num_counts; j++) token_counts[j] = pair_counts[j] / many_pairs_cases[i].top_k;
        run_case(&many_pairs_cases[i], 80 + i, cub_maps, token_counts, num_counts, 0);
    }
    run_case(&long_shares, 99, cub_maps, &long_shares_tokens, 1, small_size ? IDS_WILD : IDS_RANDOM);
}

TEST(maps_of_many_pairs_match_their_definition) { run_many_pairs(MOE_ROUTE_OFF); }

TEST(maps_by_cub_match_their_definition) {
    const maps_case *cases = many_pairs_cases;
    uint32_t num_launches;
    if (device.kind == MOE_ROUTE_DEVICE_GPU && goes_by_cub(&cases[1], 1025, &num_launches) < 0) SKIP("%s", device_message(&device));
    run_many_pairs(MOE_ROUTE_ON);
    if (device.kind == MOE_ROUTE_DEVICE_CPU) return;
    CHECK(goes_by_cub(&cases[1], 1024, &num_launches) == 0 && num_launches == 1, "8192 pairs of 256 experts take %u launches, or go by CUB", num_launches);
    CHECK(goes_by_cub(&cases[1], 1025, &num_launches) == 1 && num_launches == 2, "8200 pairs of 256 experts take %u launches, or don't go by CUB", num_launches);
    CHECK(goes_by_cub(&cases[4], 3000, &num_launches) == 1, "768 experts aren't sorted by CUB");
    CHECK(goes_by_cub(&cases[5], 3000, &num_launches) == 0, "769 experts are sorted by CUB");
}

/* A workspace for many tokens does for fewer. */
TEST(workspaces_grow_with_the_tokens) {
    static const uint32_t experts[] = {8, 256, 2048};
    moe_route_layer_desc desc;
    uint32_t i, t;
    for (i = 0; i < 3; i++) {
        moe_route_layer *layer = NULL;
        size_t size, before = 0;
        memset(&desc, 0, sizeof desc);
        desc.router.num_experts = experts[i];
        desc.router.top_k = 8;
        desc.max_tokens = 20000;
        desc.operations = MOE_ROUTE_OPERATION_MAPS;
        REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
        for (t = 0; t <= desc.max_tokens; t++, before = size)
            if (!CHECK(moe_route_layer_workspace_size(layer, t, &size) == MOE_ROUTE_OK && size >= before, "E %u: %u bytes for %u tokens, %u for one fewer", experts[i], (unsigned)size, t, (unsigned)before)) break;
        moe_route_layer_destroy(layer);
    }
}

/* All of them may: then there is nothing to do. */
TEST(maps_without_outputs_do_nothing) {
    static const int32_t ids[8] = {0, 1, 2, 3, 0, 1, 2, 3};
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_maps_args args;
    device_buffer id_buffer = device_create_from(&device, ids, sizeof ids);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 4;
    desc.router.top_k = 2;
    desc.operations = MOE_ROUTE_OPERATION_MAPS;
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    memset(&args, 0, sizeof args);
    args.num_tokens = 4;
    args.ids = id_buffer.address;
    args.maps.block_size = 8;
    args.stream = device.stream;
    CHECK(moe_route_maps(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    moe_route_layer_destroy(layer);
    device_destroy(&device, &id_buffer);
}

/* Each output may be left out. */
TEST(maps_are_optional_one_by_one) {
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    int32_t ids[130 * 4];
    test_random random;
    uint32_t n, left_out;
    random_seed(&random, 3);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 20;
    desc.router.top_k = 4;
    desc.max_tokens = 130;
    desc.operations = MOE_ROUTE_OPERATION_MAPS;
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    make_ids(&random, IDS_RANDOM, ids, 130 * 4, 20);
    for (n = 0; n < 2; n++)
        for (left_out = 0; left_out <= 10; left_out++) { /* 10: all but the first */
            const uint32_t num_tokens = n ? 130 : 9;
            device_buffer id_buffer = device_create_from(&device, ids, num_tokens * 16), outputs = device_create(&device, 10 * 4096), workspace;
            moe_route_maps_args args;
            moe_route_address *map[10];
            size_t size = 0;
            uint32_t i;
            memset(&args, 0, sizeof args);
            map[0] = &args.maps.expert_offsets; map[1] = &args.maps.row_to_pair; map[2] = &args.maps.pair_to_row; map[3] = &args.maps.row_to_expert; map[4] = &args.maps.distinct_experts;
            map[5] = &args.maps.distinct_offsets; map[6] = &args.maps.distinct_count; map[7] = &args.maps.aligned_row_to_pair; map[8] = &args.maps.block_to_expert; map[9] = &args.maps.aligned_rows;
            for (i = 0; i < 10; i++)
                if (left_out == 10 ? i == 0 : i != left_out) *map[i] = outputs.address + i * 4096;
            args.num_tokens = num_tokens;
            args.ids = id_buffer.address;
            args.maps.block_size = 4;
            moe_route_layer_workspace_size(layer, num_tokens, &size);
            workspace = device_create_workspace(&device, size);
            args.workspace = workspace.address;
            args.workspace_size = size;
            args.stream = device.stream;
            CHECK(moe_route_maps(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
            device_synchronize(&device);
            {
                unsigned char *bytes = (unsigned char *)malloc(10 * 4096);
                device_download(&device, bytes, &outputs, 10 * 4096);
                for (i = 0; i < 10; i++) {
                    const int given = *map[i] != 0, written = bytes[i * 4096] != DEVICE_POISON || bytes[i * 4096 + 1] != DEVICE_POISON;
                    CHECK(given == written, "output %u was %sgiven but %swritten (without %u, T %u)", i, given ? "" : "not ", written ? "" : "not ", left_out, num_tokens);
                }
                free(bytes);
            }
            device_destroy(&device, &id_buffer);
            device_destroy(&device, &outputs);
            device_destroy(&device, &workspace);
        }
    moe_route_layer_destroy(layer);
}

/* Experts without weights have no place in maps, those of the router included. */
TEST(maps_leave_identity_experts_out) {
    enum { EXPERTS = 20, IDENTITY = 6, TOP_K = 4, MOST = 150 };
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    static int32_t ids[MOST * TOP_K];
    static float logits[MOST * EXPERTS];
    test_random random;
    uint32_t n, i, given, identities = 0;
    random_seed(&random, 4);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = EXPERTS;
    desc.router.top_k = TOP_K;
    desc.experts.num_identity_experts = IDENTITY;
    desc.max_tokens = MOST;
    desc.operations = MOE_ROUTE_OPERATION_MAPS | MOE_ROUTE_OPERATION_ROUTE;
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    for (n = 0; n < 3; n++)
        for (given = 0; given < 2; given++) {
            const uint32_t num_tokens = n == 0 ? 1 : n == 1 ? 16 : MOST;
            routing_input input;
            routing_output output;
            make_ids(&random, IDS_RANDOM, ids, num_tokens * TOP_K, EXPERTS);
            for (i = 0; i < num_tokens * EXPERTS; i++) logits[i] = random_normal(&random);
            memset(&input, 0, sizeof input);
            input.num_tokens = num_tokens;
            if (given) {
                input.ids = ids;
            } else {
                input.logits = logits;
                input.logits_size = (size_t)num_tokens * EXPERTS * 4;
            }
            input.maps = 1;
            input.block_size = 8;
            CHECK(routing_run(&device, layer, &desc.router, EXPERTS - IDENTITY, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
            routing_check_maps(&output, 0, output.num_pairs, 8, given ? "identity experts among given ids" : "identity experts among routed ids");
            for (i = 0; i < output.num_pairs; i++) identities += output.ids[i] >= EXPERTS - IDENTITY;
            routing_output_free(&output);
        }
    CHECK(identities > 0, "no identity expert was chosen");
    moe_route_layer_destroy(layer);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    small_size = test_is_small();
    device_open_wanted(&device);
    RUN(maps_match_their_definition);
    RUN(maps_of_many_pairs_match_their_definition);
    RUN(maps_by_cub_match_their_definition);
    RUN(maps_are_optional_one_by_one);
    RUN(workspaces_grow_with_the_tokens);
    RUN(maps_without_outputs_do_nothing);
    RUN(maps_leave_identity_experts_out);
    device_close(&device);
    return test_end();
}
