/*
  test_ranks.c: expert parallelism without a network: whole layers whose ranks are this one process, which carries the rows
  between them: the same bits as one device that has all experts, or within the bound; and the operations that bring rows back.
  Dispatching alone is test_dispatch.c's. TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices.
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

typedef enum way { SLOTS_F32, SLOTS, SUMS, NUM_WAYS } way; /* what comes back */

typedef struct split { /* a model's experts over ranks */
    const model *whole;
    moe_route_layer_desc desc;   /* of the whole */
    uint32_t num_ranks, num_physical;
    uint32_t rank_begin[MAX_RANKS + 1];
    uint32_t *logical;           /* [num_physical] */
    int32_t *map;                /* [E, 2], or NULL */
    device_buffer map_buffer;
    moe_route_layer *front[2];   /* routes, dispatches and combines; [1]: rows in the layer's dtype */
    moe_route_layer *experts[2][MAX_RANKS]; /* NULL for a rank without experts */
    device_buffer buffers[MAX_RANKS][8];
} split;

/* The part of an array of the whole model that a rank holds. */
static void split_array(split *s, uint32_t rank, int which, const void *from, size_t size, moe_route_address *address) {
    const uint32_t begin = s->rank_begin[rank], count = s->rank_begin[rank + 1] - begin;
    const size_t each = size / s->whole->num_local;
    unsigned char *part;
    uint32_t i;
    if (size == 0) return;
    part = (unsigned char *)model_alloc(each * count);
    for (i = 0; i < count; i++) memcpy(part + i * each, (const unsigned char *)from + s->logical[begin + i] * each, each);
    *address = model_upload(&device, part, each * count, &s->buffers[rank][which]);
    free(part);
}

static void split_matrix(split *s, uint32_t rank, int first, const model_matrix *matrix, moe_route_weights *weights) {
    split_array(s, rank, first, matrix->stored.data, matrix->stored.data_size, &weights->data);
    split_array(s, rank, first + 1, matrix->stored.scales, matrix->stored.scales_size, &weights->scales);
    split_array(s, rank, first + 2, matrix->stored.zero_points, matrix->stored.zero_points_size, &weights->zero_points);
    split_array(s, rank, first + 3, matrix->bias, matrix->bias_size, &weights->bias);
}

/* `rank_experts` NULL: even ranges. `replicas`: so many experts more, in turn those from 0 on, numbered at the end. */
static void split_create(split *s, const model *whole, uint32_t num_ranks, const uint32_t *rank_experts, uint32_t replicas, uint32_t max_tokens) {
    const uint32_t num_experts = whole->num_local;
    uint32_t i, r;
    memset(s, 0, sizeof *s);
    s->whole = whole;
    s->num_ranks = num_ranks;
    s->num_physical = num_experts + replicas;
    model_describe(&whole->spec, &s->desc);
    s->logical = (uint32_t *)model_alloc(s->num_physical * sizeof *s->logical);
    for (i = 0; i < s->num_physical; i++) s->logical[i] = i % num_experts;
    for (r = 0; r < num_ranks; r++) {
        uint32_t first, count;
        moe_route_rank_range(s->num_physical, num_ranks, r, &first, &count);
        s->rank_begin[r + 1] = s->rank_begin[r] + (rank_experts ? rank_experts[r] : count);
    }
    if (replicas) {
        s->map = (int32_t *)model_alloc((size_t)whole->spec.num_experts * 8);
        for (i = 0; i < whole->spec.num_experts; i++) {
            s->map[i * 2] = i < num_experts ? (int32_t)i : -1;
            s->map[i * 2 + 1] = i < replicas ? (int32_t)(num_experts + i) : -1;
        }
        s->map_buffer = device_create_from(&device, s->map, (size_t)whole->spec.num_experts * 8);
    }
    for (i = 0; i < 2; i++) {
        moe_route_layer_desc desc = s->desc;
        desc.rows_dtype = i ? MOE_ROUTE_DTYPE_DEFAULT : MOE_ROUTE_F32;
        desc.sums_of_max_tokens = whole->spec.max_tokens;
        memset(&desc.experts.gate_up, 0, sizeof desc.experts.gate_up);
        memset(&desc.experts.down, 0, sizeof desc.experts.down);
        desc.experts.num_ranks = num_ranks;
        desc.experts.rank_experts = rank_experts;
        if (replicas) {
            desc.experts.expert_map = s->map_buffer.address;
            desc.experts.expert_map_columns = 2;
            desc.experts.num_physical_experts = s->num_physical;
        }
        desc.max_tokens = max_tokens;
        desc.operations = MOE_ROUTE_OPERATION_DISPATCH | MOE_ROUTE_OPERATION_COMBINE | (i ? 0 : MOE_ROUTE_OPERATION_ROUTE);
        CHECK(moe_route_layer_create(device.context, &desc, &s->front[i]) == MOE_ROUTE_OK, "%s", device_message(&device));
    }
    for (r = 0; r < num_ranks; r++) {
        moe_route_layer_desc desc = s->desc;
        if (s->rank_begin[r] == s->rank_begin[r + 1]) continue;
        split_matrix(s, r, 0, &whole->gate_up, &desc.experts.gate_up);
        split_matrix(s, r, 4, &whole->down, &desc.experts.down);
        desc.experts.num_identity_experts = 0;
        desc.experts.num_physical_experts = s->num_physical;
        desc.experts.first_expert = s->rank_begin[r];
        desc.experts.num_local_experts = s->rank_begin[r + 1] - s->rank_begin[r];
        desc.max_tokens = max_tokens * num_ranks;
        desc.sums_of_max_tokens = whole->spec.max_tokens;
        for (i = 0; i < 2; i++) {
            desc.rows_dtype = i ? MOE_ROUTE_DTYPE_DEFAULT : MOE_ROUTE_F32;
            desc.operations = MOE_ROUTE_OPERATION_EXPERT_ROWS | (i ? MOE_ROUTE_OPERATION_EXPERTS : 0);
            CHECK(moe_route_layer_create(device.context, &desc, &s->experts[i][r]) == MOE_ROUTE_OK, "%s", device_message(&device));
        }
    }
}

static void split_destroy(split *s) {
    uint32_t i, r;
    for (i = 0; i < 2; i++) {
        moe_route_layer_destroy(s->front[i]);
        for (r = 0; r < s->num_ranks; r++) moe_route_layer_destroy(s->experts[i][r]);
    }
    for (r = 0; r < s->num_ranks; r++)
        for (i = 0; i < 8; i++)
            if (s->buffers[r][i].address) device_destroy(&device, &s->buffers[r][i]);
    if (s->map) device_destroy(&device, &s->map_buffer);
    free(s->map);
    free(s->logical);
}

typedef struct sender { /* a rank's tokens, and what it dispatched; all on the host but for what stays on the device */
    uint32_t num_tokens;
    const model_input *input;
    device_buffer x, logits, ids, weights, pair_to_row, pair_to_slot_row;
    int32_t counts[MAX_RANKS * 2], offsets[MAX_RANKS * 2 + 2];
    unsigned char *rows;
    int32_t *row_ids;
    float *row_weights;
    unsigned char *returned; /* rows in the order of offsets */
} sender;

static void send_tokens(const split *s, uint32_t capacity, sender *from) {
    const model_spec *spec = &s->whole->spec;
    const size_t pairs = (size_t)from->num_tokens * spec->top_k, row = (size_t)spec->hidden_size * model_dtype_size(spec->dtype);
    const size_t rows = capacity ? (size_t)capacity * s->num_ranks : pairs;
    device_buffer counts = device_create(&device, s->num_ranks * 8), offsets = device_create(&device, s->num_ranks * 8 + 8);
    device_buffer packed = device_create_aligned(&device, rows * row, 16), ids = device_create(&device, rows * spec->top_k * 4), weights = device_create(&device, rows * spec->top_k * 4);
    device_buffer workspace;
    moe_route_route_args route;
    moe_route_dispatch_args args;
    size_t size = 0;
    CHECK(moe_route_layer_workspace_size(s->front[0], from->num_tokens, &size) == MOE_ROUTE_OK, "%s", device_message(&device));
    workspace = device_create_workspace(&device, size);
    from->x = device_create_aligned(&device, from->num_tokens * row, 16);
    device_upload(&device, &from->x, from->input->x, from->num_tokens * row);
    from->logits = device_create_from(&device, from->input->logits, (size_t)from->num_tokens * spec->num_experts * 4);
    from->ids = device_create(&device, pairs * 4);
    from->weights = device_create(&device, pairs * 4);
    from->pair_to_row = device_create(&device, pairs * 4);
    from->pair_to_slot_row = device_create(&device, pairs * 4);
    memset(&route, 0, sizeof route);
    route.num_tokens = from->num_tokens;
    route.logits = from->logits.address;
    route.ids = from->ids.address;
    route.weights = from->weights.address;
    route.stream = device.stream;
    CHECK(moe_route_route(s->front[0], &route) == MOE_ROUTE_OK, "%s", device_message(&device));
    memset(&args, 0, sizeof args);
    args.num_tokens = from->num_tokens;
    args.ids = from->ids.address;
    args.weights = from->weights.address;
    args.x = from->x.address;
    args.capacity = capacity;
    args.counts = counts.address;
    args.offsets = offsets.address;
    args.rows = packed.address;
    args.row_ids = ids.address;
    args.row_weights = weights.address;
    args.pair_to_row = from->pair_to_row.address;
    args.pair_to_slot_row = from->pair_to_slot_row.address;
    args.workspace = workspace.address;
    args.workspace_size = size;
    args.stream = device.stream;
    CHECK(moe_route_dispatch(s->front[0], &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    from->rows = (unsigned char *)model_alloc(rows * row);
    from->row_ids = (int32_t *)model_alloc(rows * spec->top_k * 4);
    from->row_weights = (float *)model_alloc(rows * spec->top_k * 4);
    device_download(&device, from->counts, &counts, s->num_ranks * 8);
    device_download(&device, from->offsets, &offsets, s->num_ranks * 8 + 8);
    device_download(&device, from->rows, &packed, rows * row);
    device_download(&device, from->row_ids, &ids, rows * spec->top_k * 4);
    device_download(&device, from->row_weights, &weights, rows * spec->top_k * 4);
    device_destroy(&device, &counts);
    device_destroy(&device, &offsets);
    device_destroy(&device, &packed);
    device_destroy(&device, &ids);
    device_destroy(&device, &weights);
    device_destroy(&device, &workspace);
}

/* What rank `to` computes of all that was sent to it, and its return. */
static void compute_rank(const split *s, uint32_t to, way how, uint32_t capacity, sender *from) {
    const model_spec *spec = &s->whole->spec;
    const moe_route_layer *layer = s->experts[how != SLOTS_F32][to];
    const size_t row = (size_t)spec->hidden_size * model_dtype_size(spec->dtype), back = how == SLOTS_F32 ? (size_t)spec->hidden_size * 4 : row;
    const uint32_t k = spec->top_k, slots = how != SUMS;
    size_t total = 0, total_back = 0, size = 0, at = 0;
    device_buffer x, ids, weights, out, workspace;
    unsigned char *bytes;
    uint32_t r;
    for (r = 0; r < s->num_ranks; r++) { /* offsets are what is sent; counts are what of it exists */
        total += (size_t)(from[r].offsets[to * 2 + 2] - from[r].offsets[to * 2]);
        total_back += (size_t)(from[r].offsets[to * 2 + 2 + slots] - from[r].offsets[to * 2 + slots]);
    }
    if (!layer) {
        if (!capacity) CHECK(total == 0, "a rank without experts got %u rows", (unsigned)total);
        return;
    }
    x = device_create_aligned(&device, total * row, 16);
    ids = device_create(&device, total * k * 4);
    weights = device_create(&device, total * k * 4);
    out = device_create_aligned(&device, total_back * back, 16);
    bytes = (unsigned char *)model_alloc(total * row + total * k * 8);
    for (r = 0; r < s->num_ranks; r++) {
        const size_t first = (size_t)from[r].offsets[to * 2], count = (size_t)(from[r].offsets[to * 2 + 2]) - first;
        memcpy(bytes + at * row, from[r].rows + first * row, count * row);
        memcpy(bytes + total * row + at * k * 4, from[r].row_ids + first * k, count * k * 4);
        memcpy(bytes + total * (row + k * 4) + at * k * 4, from[r].row_weights + first * k, count * k * 4);
        at += count;
    }
    device_upload(&device, &x, bytes, total * row);
    device_upload(&device, &ids, bytes + total * row, total * k * 4);
    device_upload(&device, &weights, bytes + total * (row + k * 4), total * k * 4);
    free(bytes);
    CHECK(moe_route_layer_workspace_size(layer, (uint32_t)total, &size) == MOE_ROUTE_OK, "%s", device_message(&device));
    workspace = device_create_workspace(&device, size);
    if (how == SUMS) {
        moe_route_layer_args args;
        memset(&args, 0, sizeof args);
        args.num_tokens = (uint32_t)total;
        args.ids = ids.address;
        args.weights = weights.address;
        args.x = x.address;
        args.y = out.address;
        args.workspace = workspace.address;
        args.workspace_size = size;
        args.stream = device.stream;
        CHECK(moe_route_layer_run(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    } else {
        moe_route_expert_rows_args args;
        memset(&args, 0, sizeof args);
        args.num_tokens = (uint32_t)total;
        args.ids = ids.address;
        args.weights = spec->choices.weight_on_input ? weights.address : 0;
        args.x = x.address;
        args.rows = out.address;
        args.num_rows = (uint32_t)total_back;
        args.num_sources = capacity ? s->num_ranks : 0;
        args.workspace = workspace.address;
        args.workspace_size = size;
        args.stream = device.stream;
        CHECK(moe_route_expert_rows(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    }
    device_synchronize(&device);
    bytes = (unsigned char *)model_alloc(total_back * back);
    device_download(&device, bytes, &out, total_back * back);
    for (r = 0, at = 0; r < s->num_ranks; r++) {
        const size_t first = (size_t)from[r].offsets[to * 2 + slots], count = (size_t)from[r].offsets[to * 2 + 2 + slots] - first;
        memcpy(from[r].returned + first * back, bytes + at * back, count * back);
        at += count;
    }
    free(bytes);
    device_destroy(&device, &x);
    device_destroy(&device, &ids);
    device_destroy(&device, &weights);
    device_destroy(&device, &out);
    device_destroy(&device, &workspace);
}

/* y of a rank's tokens, as stored; the caller frees it. */
static void *combine_returned(const split *s, way how, sender *from) {
    const model_spec *spec = &s->whole->spec;
    const size_t row = (size_t)spec->hidden_size * model_dtype_size(spec->dtype), back = how == SLOTS_F32 ? (size_t)spec->hidden_size * 4 : row;
    const uint32_t num_rows = (uint32_t)from->offsets[s->num_ranks * 2 + (how != SUMS)];
    device_buffer rows = device_create_aligned(&device, (num_rows ? num_rows : 1) * back, 16), y = device_create_aligned(&device, from->num_tokens * row, 16);
    moe_route_combine_args args;
    void *result = model_alloc(from->num_tokens * row + 1);
    device_upload(&device, &rows, from->returned, num_rows * back);
    memset(&args, 0, sizeof args);
    args.num_tokens = from->num_tokens;
    args.rows = rows.address;
    args.num_rows = num_rows ? num_rows : 1;
    args.pair_to_row = how == SUMS ? from->pair_to_row.address : from->pair_to_slot_row.address;
    args.weights = from->weights.address;
    args.weighted_rows = how == SUMS;
    args.y = y.address;
    args.ids = from->ids.address;
    args.x = from->x.address;
    args.stream = device.stream;
    CHECK(moe_route_combine(s->front[how != SLOTS_F32], &args) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_synchronize(&device);
    device_download(&device, result, &y, from->num_tokens * row);
    device_destroy(&device, &rows);
    device_destroy(&device, &y);
    return result;
}

/* All ranks' y, one after the other. */
static void *run_ranks(const split *s, way how, uint32_t capacity, const uint32_t *num_tokens, const model_input *input) {
    const model_spec *spec = &s->whole->spec;
    const size_t row = (size_t)spec->hidden_size * model_dtype_size(spec->dtype);
    static sender senders[MAX_RANKS];
    model_input parts[MAX_RANKS];
    unsigned char *all = (unsigned char *)model_alloc(input->num_tokens * row + 1);
    uint32_t r, first = 0;
    memset(senders, 0, sizeof senders);
    for (r = 0; r < s->num_ranks; r++) {
        size_t rows;
        parts[r] = *input;
        parts[r].logits = input->logits + (size_t)first * spec->num_experts;
        parts[r].x = (const char *)input->x + first * row;
        senders[r].num_tokens = num_tokens[r];
        senders[r].input = &parts[r];
        send_tokens(s, capacity, &senders[r]);
        rows = (size_t)senders[r].offsets[s->num_ranks * 2 + (how != SUMS)];
        senders[r].returned = (unsigned char *)model_alloc(rows * spec->hidden_size * 4 + 1);
        memset(senders[r].returned, DEVICE_POISON, rows * spec->hidden_size * 4);
        first += num_tokens[r];
    }
    for (r = 0; r < s->num_ranks; r++) compute_rank(s, r, how, capacity, senders);
    for (r = 0, first = 0; r < s->num_ranks; r++) {
        void *y = combine_returned(s, how, &senders[r]);
        memcpy(all + first * row, y, num_tokens[r] * row);
        first += num_tokens[r];
        free(y);
        free(senders[r].rows);
        free(senders[r].row_ids);
        free(senders[r].row_weights);
        free(senders[r].returned);
        device_destroy(&device, &senders[r].x);
        device_destroy(&device, &senders[r].logits);
        device_destroy(&device, &senders[r].ids);
        device_destroy(&device, &senders[r].weights);
        device_destroy(&device, &senders[r].pair_to_row);
        device_destroy(&device, &senders[r].pair_to_slot_row);
    }
    return all;
}

/* The largest sum over slots of |weight * row| of a token, roughly: of |y| and of the other ways' differences it is what counts. */
static double largest_value(const model *m, const void *y, uint32_t num_tokens) {
    const size_t count = (size_t)num_tokens * m->spec.hidden_size;
    float *values = (float *)model_alloc(count * 4 + 4);
    double largest = 0;
    size_t i;
    quantize_convert(values, QUANTIZE_F32, y, model_storage(m->spec.dtype), count);
    for (i = 0; i < count; i++) largest = fmax(largest, fabs((double)values[i]));
    free(values);
    return largest;
}

static double largest_difference(const model *m, const void *a, const void *b, uint32_t num_tokens) {
    const size_t count = (size_t)num_tokens * m->spec.hidden_size;
    float *left = (float *)model_alloc(count * 4 + 4), *right = (float *)model_alloc(count * 4 + 4);
    double largest = 0;
    size_t i;
    quantize_convert(left, QUANTIZE_F32, a, model_storage(m->spec.dtype), count);
    quantize_convert(right, QUANTIZE_F32, b, model_storage(m->spec.dtype), count);
    for (i = 0; i < count; i++) {
        const double difference = fabs((double)left[i] - (double)right[i]);
        largest = difference == difference ? fmax(largest, difference) : HUGE_VAL;
    }
    free(left);
    free(right);
    return largest;
}

static void run_ranks_case(const ranks_case *c, uint64_t seed) {
    model_spec spec = c->spec;
    model whole;
    model_input input;
    model_output one;
    test_random random;
    float *logits;
    void *x, *slots_alone = NULL;
    uint32_t r, i, total = 0, most = 0, pass, max_tokens;
    random_seed(&random, seed);
    for (r = 0; r < c->num_ranks; r++) {
        total += c->tokens[r];
        most = c->tokens[r] > most ? c->tokens[r] : most;
    }
    max_tokens = most <= 16 ? 16 : most;
    spec.max_tokens = c->max_tokens;
    spec.operations = MOE_ROUTE_OPERATION_LAYER;
    model_create(&device, &spec, seed, &whole);
    REQUIRE(whole.layer, "no layer");
    model_random_input(&random, &spec, total, &input, &logits, &x);
    if (c->skewed)
        for (i = 0; i < total * spec.num_experts; i++) logits[i] -= (float)(i % spec.num_experts) * 0.5f;
    { /* the one device, a few tokens at a time: above 512 pairs it has other kernels, which round otherwise */
        const size_t row = (size_t)spec.hidden_size * model_dtype_size(spec.dtype);
        uint32_t first;
        memset(&one, 0, sizeof one);
        one.y = model_alloc(total * row);
        for (first = 0; first < total; first += 16) {
            model_input part = input;
            model_output output;
            part.num_tokens = total - first < 16 ? total - first : 16;
            part.logits = logits + (size_t)first * spec.num_experts;
            part.x = (const char *)x + first * row;
            CHECK(model_run(&device, &whole, &part, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
            memcpy((char *)one.y + first * row, output.y, part.num_tokens * row);
            model_output_free(&output);
        }
    }
    for (pass = 0; pass < 2; pass++) { /* the second: one rank that does everything, for 16-bit rows */
        const uint32_t *rank_experts = c->rank_experts[0] ? c->rank_experts : NULL;
        const uint32_t num_ranks = pass ? 1 : c->num_ranks;
        const double largest = largest_value(&whole, one.y, total);
        uint32_t capacity, how;
        split s;
        if (pass && (max_tokens * c->num_ranks > 512 || spec.dtype == MOE_ROUTE_F32)) break;
        split_create(&s, &whole, num_ranks, pass ? NULL : rank_experts, pass ? 0 : c->replicas, pass ? total : max_tokens);
        for (capacity = 0; capacity <= most && s.front[0] && s.front[1]; capacity += most)
            for (how = pass ? SLOTS : SLOTS_F32; how < (pass ? SUMS : NUM_WAYS); how++) {
                void *y = run_ranks(&s, (way)how, pass && capacity ? total : capacity, pass ? &total : c->tokens, &input);
                const size_t bytes = total * spec.hidden_size * model_dtype_size(spec.dtype);
                const double difference = largest_difference(&whole, y, one.y, total);
                const double unit = how == SLOTS_F32 ? 0 : spec.dtype == MOE_ROUTE_F32 ? 0x1p-22 : spec.dtype == MOE_ROUTE_F16 ? 0x1p-9 : 0x1p-6;
                char what[96];
                snprintf(what, sizeof what, "E %u ranks %u, way %u, capacity %u", spec.num_experts, num_ranks, how, capacity);
                if (how == SLOTS_F32) CHECK_BYTES(y, one.y, bytes, what);
                else CHECK(difference <= unit * (largest + 1), "%s: %g of %g from one device", what, difference, largest);
                if (how == SLOTS && !pass && !slots_alone) {
                    slots_alone = y;
                    continue;
                }
                if (how == SLOTS && slots_alone) CHECK_BYTES(y, slots_alone, bytes, what); /* whatever the number of ranks and the sizes */
                free(y);
            }
        split_destroy(&s);
    }
    free(slots_alone);
    free(one.y);
    free(logits);
    free(x);
    model_destroy(&device, &whole);
}

TEST(ranks_give_what_one_device_gives) {
    uint32_t i;
    for (i = 0; i < NUM_CASES(ranks_cases); i++)
        if (!small_size || ranks_cases[i].in_small) run_ranks_case(&ranks_cases[i], 300 + i);
}

/* The f32 sum of a token: an fma a slot, in the order of slots, with the same bits on every device. */
TEST(combine_adds_in_slot_order) {
    enum { T = 5, K = 4, H = 24, ROWS_GIVEN = 9 };
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_combine_args args;
    float rows[ROWS_GIVEN * H], weights[T * K], residual[T * H], got[T * H], want[T * H];
    int32_t pair_to_row[T * K];
    device_buffer row_buffer, weight_buffer, residual_buffer, map_buffer, y;
    test_random random;
    uint32_t t, j, n, weighted;
    random_seed(&random, 21);
    for (n = 0; n < ROWS_GIVEN * H; n++) rows[n] = random_normal(&random) * (n % 3 ? 1.0f : 1000.0f);
    for (n = 0; n < T * K; n++) {
        weights[n] = random_normal(&random);
        pair_to_row[n] = (int32_t)random_below(&random, ROWS_GIVEN + 3) - 1; /* also none, and beyond */
    }
    for (n = 0; n < T * H; n++) residual[n] = random_normal(&random);
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 8;
    desc.router.top_k = K;
    desc.experts.hidden_size = H;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.operations = MOE_ROUTE_OPERATION_COMBINE;
    REQUIRE(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device));
    row_buffer = device_create_aligned(&device, sizeof rows, 16);
    device_upload(&device, &row_buffer, rows, sizeof rows);
    residual_buffer = device_create_aligned(&device, sizeof residual, 16);
    device_upload(&device, &residual_buffer, residual, sizeof residual);
    weight_buffer = device_create_from(&device, weights, sizeof weights);
    map_buffer = device_create_from(&device, pair_to_row, sizeof pair_to_row);
    y = device_create_aligned(&device, sizeof got, 16);
    for (weighted = 0; weighted < 2; weighted++) {
        memset(&args, 0, sizeof args);
        args.num_tokens = T;
        args.rows = row_buffer.address;
        args.num_rows = ROWS_GIVEN;
        args.pair_to_row = map_buffer.address;
        args.weights = weighted ? 0 : weight_buffer.address;
        args.weighted_rows = (int32_t)weighted;
        args.residual = residual_buffer.address;
        args.y = y.address;
        args.stream = device.stream;
        CHECK(moe_route_combine(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
        device_synchronize(&device);
        device_download(&device, got, &y, sizeof got);
        for (t = 0; t < T; t++)
            for (n = 0; n < H; n++) {
                float sum = 0.0f;
                for (j = 0; j < K; j++) {
                    const int32_t row = pair_to_row[t * K + j];
                    if (row >= 0 && row < ROWS_GIVEN) sum = fmaf(weighted ? 1.0f : weights[t * K + j], rows[row * H + (int32_t)n], sum);
                }
                want[t * H + n] = sum + residual[t * H + n];
            }
        CHECK_BYTES(got, want, sizeof want, weighted ? "y of weighted rows" : "y");
    }
    device_destroy(&device, &row_buffer);
    device_destroy(&device, &residual_buffer);
    device_destroy(&device, &weight_buffer);
    device_destroy(&device, &map_buffer);
    device_destroy(&device, &y);
    moe_route_layer_destroy(layer);
}

/* Layers of different max_tokens cut the down matmul's sums differently, unless they agree. */
TEST(layers_agree_on_their_sums) {
    model_spec spec = layer_cases[8].spec; /* F32, so that no rounding hides a difference */
    const uint32_t sizes[] = {8, 128, 64, 500};
    model m;
    model_input input;
    model_output first, output;
    test_random random;
    float *logits;
    void *x;
    uint32_t i;
    random_seed(&random, 12);
    spec.num_experts = 16;
    spec.top_k = 4;
    spec.hidden_size = 256;
    spec.intermediate_size = 512; /* long enough to be cut into parts */
    spec.max_tokens = 8;
    model_create(&device, &spec, 12, &m);
    REQUIRE(m.layer, "no layer");
    model_random_input(&random, &spec, 8, &input, &logits, &x);
    CHECK(model_run(&device, &m, &input, &first) == MOE_ROUTE_OK, "%s", device_message(&device));
    for (i = 0; i < (small_size ? 2u : 4u); i++) {
        moe_route_layer_desc desc;
        model other = m;
        model_describe(&spec, &desc);
        desc.experts.gate_up.data = m.gate_up.data_buffer.address;
        desc.experts.down.data = m.down.data_buffer.address;
        desc.max_tokens = sizes[i];
        desc.sums_of_max_tokens = 8;
        CHECK(moe_route_layer_create(device.context, &desc, &other.layer) == MOE_ROUTE_OK, "%s", device_message(&device));
        if (!other.layer) continue;
        CHECK(model_run(&device, &other, &input, &output) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK_BYTES(output.y, first.y, 8 * spec.hidden_size * 4, "y of a layer of other max_tokens");
        model_output_free(&output);
        moe_route_layer_destroy(other.layer);
        if (sizes[i] != 128) continue; /* more partial sums than the fused kernel has room for */
        desc.fused_combine = MOE_ROUTE_ON;
        CHECK(moe_route_layer_create(device.context, &desc, &other.layer) == MOE_ROUTE_ERROR_ARGUMENT && strstr(device_message(&device), "sums_of_max_tokens is 8"), "%s", device_message(&device));
    }
    model_output_free(&first);
    free(logits);
    free(x);
    model_destroy(&device, &m);
}

/* Pairs beyond what a source's rows have room for aren't written, and neither are rows without a pair. */
TEST(expert_rows_keep_to_their_room) {
    model_spec spec = layer_cases[8].spec; /* F32, 8 experts, top-2 */
    static const int32_t ids[12] = {2, 7, -1, 3, 2, 2, 9, 4, 0, 1, 3, 2147483647}; /* 2 to 4 are local: 1, 1, 2 and 1, 0, 1 of two sources */
    static const int32_t pair_rows[2][12] = {{0, -1, -1, 1, 2, 3, -1, 4, -1, -1, 5, -1}, {0, -1, -1, 1, 2, -1, -1, 3, -1, -1, 4, -1}};
    float *values, x[6 * 64], *all, *rows;
    model m;
    test_random random;
    device_buffer id_buffer, x_buffer, out, workspace;
    size_t size = 0;
    uint32_t run, n, p;
    random_seed(&random, 3);
    for (n = 0; n < 6 * 64; n++) x[n] = random_normal(&random);
    spec.hidden_size = 64;
    spec.intermediate_size = 48;
    spec.first_expert = 2;
    spec.num_local = 3;
    spec.operations = MOE_ROUTE_OPERATION_EXPERT_ROWS;
    model_create(&device, &spec, 4, &m);
    REQUIRE(m.layer, "no layer");
    CHECK(moe_route_layer_workspace_size(m.layer, 6, &size) == MOE_ROUTE_OK, "%s", device_message(&device));
    id_buffer = device_create_from(&device, ids, sizeof ids);
    x_buffer = device_create_aligned(&device, sizeof x, 16);
    device_upload(&device, &x_buffer, x, sizeof x);
    workspace = device_create_workspace(&device, size);
    values = (float *)model_alloc(12 * 64 * 4);
    all = (float *)model_alloc(12 * 64 * 4);
    for (run = 0; run < 2; run++) {
        const uint32_t num_rows = run ? 6 : 8; /* 3 for each of two sources; more than needed for one */
        moe_route_expert_rows_args args;
        out = device_create_aligned(&device, (size_t)num_rows * 64 * 4, 16);
        memset(&args, 0, sizeof args);
        args.num_tokens = 6;
        args.ids = id_buffer.address;
        args.x = x_buffer.address;
        args.rows = out.address;
        args.num_rows = num_rows;
        args.num_sources = run ? 2 : 0;
        args.workspace = workspace.address;
        args.workspace_size = size;
        args.stream = device.stream;
        CHECK(moe_route_expert_rows(m.layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
        device_synchronize(&device);
        rows = run ? values : all;
        device_download(&device, rows, &out, (size_t)num_rows * 64 * 4);
        for (p = 0; p < 12; p++) {
            const int32_t row = pair_rows[run][p];
            if (row < 0) continue;
            if (run) CHECK_BYTES(values + row * 64, all + pair_rows[0][p] * 64, 256, "a row of one of two sources");
            for (n = 0; n < 64 && !run; n++) {
                double y[64], h[48];
                uint32_t i;
                for (i = 0; i < 48; i++) {
                    const size_t base = (size_t)(ids[p] - 2) * 96;
                    h[i] = (double)(float)model_activate(&spec.choices, model_dot(&m.gate_up, base + i, x + p / 2 * 64, 1), model_dot(&m.gate_up, base + i + 48, x + p / 2 * 64, 1));
                }
                y[n] = 0;
                for (i = 0; i < 48; i++) y[n] += h[i] * (double)m.down.stored.values[((size_t)(ids[p] - 2) * 64 + n) * 48 + i];
                if (!CHECK(fabs(y[n] - (double)rows[row * 64 + (int32_t)n]) < 1e-4 * (1 + fabs(y[n])), "pair %u, column %u: %g instead of %g", p, n, (double)rows[row * 64 + (int32_t)n], y[n])) break;
            }
        }
        for (n = run ? 5 * 64 : 6 * 64; n < num_rows * 64; n++) {
            int32_t bits;
            memcpy(&bits, &rows[n], 4);
            if (!CHECK(bits == (int32_t)0xCBCBCBCB, "a row without a pair was written")) break;
        }
        device_destroy(&device, &out);
    }
    free(values);
    free(all);
    device_destroy(&device, &id_buffer);
    device_destroy(&device, &x_buffer);
    device_destroy(&device, &workspace);
    model_destroy(&device, &m);
}

/* Fixed sizes, captured once and replayed with other tokens: dispatch, experts and combine of one rank. */
TEST(ranks_replay_in_a_graph) {
    model_spec spec = ranks_cases[0].spec;
    const uint32_t num_tokens = 8, pairs = 32, hidden = 256;
    model whole;
    split s;
    test_random random;
    device_buffer x, ids, weights, rows, row_ids, back, pair_to_slot_row, y, workspace;
    moe_route_dispatch_args dispatch;
    moe_route_expert_rows_args experts;
    moe_route_combine_args combine;
    moe_route_plan plan;
    gpu_graph graph = NULL;
    size_t size = 0;
    uint32_t replay, i;
    if (device.kind != MOE_ROUTE_DEVICE_GPU) SKIP("the CPU backend has no graphs");
    random_seed(&random, 8);
    spec.max_tokens = 16;
    spec.operations = MOE_ROUTE_OPERATION_LAYER | MOE_ROUTE_OPERATION_EXPERTS;
    model_create(&device, &spec, 8, &whole);
    REQUIRE(whole.layer, "no layer");
    split_create(&s, &whole, 1, NULL, 0, 16);
    REQUIRE(s.front[0] && s.experts[0][0], "no layers");
    x = device_create_aligned(&device, num_tokens * hidden * 2, 16);
    ids = device_create(&device, pairs * 4);
    weights = device_create(&device, pairs * 4);
    rows = device_create_aligned(&device, num_tokens * hidden * 2, 16);
    row_ids = device_create(&device, pairs * 4);
    back = device_create_aligned(&device, pairs * hidden * 4, 16);
    pair_to_slot_row = device_create(&device, pairs * 4);
    y = device_create_aligned(&device, num_tokens * hidden * 2, 16);
    CHECK(moe_route_layer_workspace_size(s.experts[0][0], num_tokens, &size) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(moe_route_layer_explain(s.front[0], MOE_ROUTE_OPERATION_DISPATCH, num_tokens, &plan) == MOE_ROUTE_OK && plan.num_launches == 1, "a dispatch has %u launches", plan.num_launches);
    CHECK(moe_route_layer_explain(s.experts[0][0], MOE_ROUTE_OPERATION_EXPERT_ROWS, num_tokens, &plan) == MOE_ROUTE_OK && plan.num_launches == 4, "expert rows have %u launches", plan.num_launches);
    workspace = device_create_workspace(&device, size);
    memset(&dispatch, 0, sizeof dispatch);
    dispatch.num_tokens = dispatch.capacity = num_tokens;
    dispatch.ids = ids.address;
    dispatch.x = x.address;
    dispatch.rows = rows.address;
    dispatch.row_ids = row_ids.address;
    dispatch.pair_to_slot_row = pair_to_slot_row.address;
    memset(&experts, 0, sizeof experts);
    experts.num_tokens = num_tokens;
    experts.ids = row_ids.address;
    experts.x = rows.address;
    experts.rows = back.address;
    experts.num_rows = pairs;
    experts.num_sources = 1;
    experts.workspace = workspace.address;
    experts.workspace_size = size;
    memset(&combine, 0, sizeof combine);
    combine.num_tokens = num_tokens;
    combine.rows = back.address;
    combine.pair_to_row = pair_to_slot_row.address;
    combine.weights = weights.address;
    combine.y = y.address;
    dispatch.stream = experts.stream = combine.stream = device.stream;
    device_must(&device, gpu_capture_begin(&device.gpu, device.stream));
    CHECK(moe_route_dispatch(s.front[0], &dispatch) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(moe_route_expert_rows(s.experts[0][0], &experts) == MOE_ROUTE_OK, "%s", device_message(&device));
    CHECK(moe_route_combine(s.front[0], &combine) == MOE_ROUTE_OK, "%s", device_message(&device));
    device_must(&device, gpu_capture_end(&device.gpu, device.stream, &graph));
    for (replay = 0; replay < 3; replay++) {
        int32_t new_ids[32];
        float new_weights[32], *values = (float *)model_alloc(num_tokens * hidden * 4);
        void *new_x = model_random_array(&random, num_tokens * hidden, MOE_ROUTE_F16, 1.0f, values);
        void *got = model_alloc(num_tokens * hidden * 2);
        model_input input;
        model_output direct;
        for (i = 0; i < pairs; i++) {
            new_ids[i] = (int32_t)random_below(&random, 18) - 1;
            new_weights[i] = (float)random_normal(&random);
        }
        device_upload(&device, &x, new_x, num_tokens * hidden * 2);
        device_upload(&device, &ids, new_ids, sizeof new_ids);
        device_upload(&device, &weights, new_weights, sizeof new_weights);
        device_must(&device, gpu_graph_launch(&device.gpu, graph, device.stream));
        device_synchronize(&device);
        device_download(&device, got, &y, num_tokens * hidden * 2);
        memset(&input, 0, sizeof input);
        input.num_tokens = num_tokens;
        input.x = new_x;
        input.ids = new_ids;
        input.weights = new_weights;
        CHECK(model_run(&device, &whole, &input, &direct) == MOE_ROUTE_OK, "%s", device_message(&device));
        CHECK_BYTES(got, direct.y, num_tokens * hidden * 2, "y of a replay");
        model_output_free(&direct);
        free(values);
        free(new_x);
        free(got);
    }
    device_must(&device, gpu_graph_destroy(&device.gpu, graph));
    device_destroy(&device, &x);
    device_destroy(&device, &ids);
    device_destroy(&device, &weights);
    device_destroy(&device, &rows);
    device_destroy(&device, &row_ids);
    device_destroy(&device, &back);
    device_destroy(&device, &pair_to_slot_row);
    device_destroy(&device, &y);
    device_destroy(&device, &workspace);
    split_destroy(&s);
    model_destroy(&device, &whole);
}

int main(int argc, char **argv) {
    small_size = test_is_small();
    test_begin(argc, argv);
    device_open_wanted(&device);
    RUN(ranks_give_what_one_device_gives);
    RUN(combine_adds_in_slot_order);
    RUN(layers_agree_on_their_sums);
    RUN(expert_rows_keep_to_their_room);
    RUN(ranks_replay_in_a_graph);
    device_close(&device);
    return test_end();
}
