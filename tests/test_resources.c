/*
  test_resources.c: what the kernels of a decode step and of a large batch take, read from their cubins: registers, shared memory,
  local memory and instructions, held against tests/data/resources.txt. A kernel that spills, or that has grown, is noticed where
  there is no GPU.
  The table is of one NVRTC: with another only spilling is looked for. TEST_RESOURCES=write writes the table anew.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/cubin.h"

#define TABLE "tests/data/resources.txt"

typedef struct resource_shape {
    const char *name;
    uint32_t num_experts, top_k, hidden_size, intermediate_size;
    moe_route_dtype dtype;
    moe_route_format gate_up, down;
    uint32_t group_size, max_tokens; /* 0: a decode step; otherwise of a layer the kernels of large batches alone */
    uint32_t operations;             /* 0: the layer */
} resource_shape;

static const resource_shape shapes[] = {
    {"qwen3.6-int4", 256, 8, 2048, 512, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 0, 0},
    {"qwen3.6-bf16", 256, 8, 2048, 512, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, MOE_ROUTE_FORMAT_BF16, 0, 0, 0},
    {"qwen3.6-q4_k-q6_k", 256, 8, 2048, 512, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_GGUF_Q4_K, MOE_ROUTE_FORMAT_GGUF_Q6_K, 0, 0, 0},
    {"gpt-oss-20b-mxfp4", 32, 4, 2880, 2880, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_MXFP4, MOE_ROUTE_FORMAT_MXFP4, 0, 0, 0},
    {"gpt-oss-20b-int4", 32, 4, 2880, 2880, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 0, 0},
    {"gemma-4-26b-int4", 128, 8, 2816, 704, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 0, 0},
    {"qwen3.6-bf16", 256, 8, 2048, 512, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_BF16, MOE_ROUTE_FORMAT_BF16, 0, 4096, 0},
    {"qwen3.6-int4", 256, 8, 2048, 512, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_INT4, MOE_ROUTE_FORMAT_INT4, 64, 4096, 0},
    {"qwen3.6-q4_k-q6_k", 256, 8, 2048, 512, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_GGUF_Q4_K, MOE_ROUTE_FORMAT_GGUF_Q6_K, 0, 4096, 0},
    {"gpt-oss-20b-mxfp4", 32, 4, 2880, 2880, MOE_ROUTE_BF16, MOE_ROUTE_FORMAT_MXFP4, MOE_ROUTE_FORMAT_MXFP4, 0, 4096, 0},
    {"qwen3.6-dispatch", 256, 8, 2048, 0, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_NONE, MOE_ROUTE_FORMAT_NONE, 0, 0, MOE_ROUTE_OPERATION_DISPATCH},
    {"qwen3.6-maps", 256, 8, 2048, 0, MOE_ROUTE_F16, MOE_ROUTE_FORMAT_NONE, MOE_ROUTE_FORMAT_NONE, 0, 4096, MOE_ROUTE_OPERATION_MAPS},
};
static const uint32_t targets[] = {80, 90, 120};

/* ---- the table: target, shape, kernel, registers, shared bytes, instructions ---- */

/* Whether the table has the kernel. */
static int find_row(const char *table, uint32_t target, const char *shape, const char *kernel, resources *r) {
    char wanted[128];
    const char *row;
    snprintf(wanted, sizeof wanted, "\nsm_%u %s %s ", (unsigned)target, shape, kernel);
    row = strstr(table, wanted);
    return row && sscanf(row + strlen(wanted), "%u %u %u", &r->registers, &r->shared_bytes, &r->instructions) == 3;
}

static char *read_table(void) {
    FILE *file = fopen(TABLE, "rb");
    char *text = (char *)calloc(1, 65536);
    if (file && text) {
        size_t length = fread(text, 1, 65535, file);
        text[length] = 0;
    }
    if (file) fclose(file);
    return text;
}

static void describe(moe_route_layer_desc *desc, const resource_shape *shape) {
    memset(desc, 0, sizeof *desc);
    desc->router.num_experts = shape->num_experts;
    desc->router.top_k = shape->top_k;
    desc->router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    desc->experts.hidden_size = shape->hidden_size;
    desc->experts.intermediate_size = shape->intermediate_size;
    desc->experts.dtype = shape->dtype;
    desc->experts.num_ranks = 8;
    desc->operations = shape->operations;
    desc->experts.gate_up.format = shape->gate_up;
    desc->experts.down.format = shape->down;
    desc->experts.gate_up.group_size = desc->experts.down.group_size = shape->group_size;
    desc->max_tokens = shape->max_tokens;
    desc->experts.gate_up.data = desc->experts.down.data = 256;
    desc->experts.gate_up.scales = desc->experts.down.scales = shape->group_size || shape->gate_up == MOE_ROUTE_FORMAT_MXFP4 ? 256 : 0;
}

static void check_shape(moe_route_context *context, uint32_t target, const resource_shape *shape, const char *table, FILE *out) {
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    char message[1024];
    uint32_t i;
    describe(&desc, shape);
    if (moe_route_layer_create(context, &desc, &layer) != MOE_ROUTE_OK) {
        moe_route_message(context, message, sizeof message);
        CHECK(0, "sm_%u %s: %s", (unsigned)target, shape->name, message);
        return;
    }
    for (i = 0; i < layer->num_variants; i++) {
        const moer_variant *variant = layer->variants[i];
        char kernel[64];
        moer_bytes code;
        resources got, row;
        const char *tile = strstr(variant->defines, "TILE_ROWS=");
        if (shape->max_tokens && !shape->operations && !tile) continue;
        snprintf(kernel, sizeof kernel, "%s", variant->family->name);
        if (!tile && strncmp(variant->family->name, "matmul", 6) == 0) snprintf(kernel, sizeof kernel, "%s-%s", variant->family->name, strstr(variant->defines, "GATED=1") ? "gate_up" : "down");
        if (tile) snprintf(kernel, sizeof kernel, "%s-%d-%s", variant->family->name, atoi(tile + 10), strstr(variant->defines, "GATED=1") ? "gate_up" : "down");
        if (!CHECK(moer_nvrtc_compile(context, variant->family->file, variant->defines, &code) == MOE_ROUTE_OK, "sm_%u %s %s doesn't compile again", (unsigned)target, shape->name, kernel)) continue;
        if (CHECK(read_resources((const unsigned char *)code.data, code.size, &got), "sm_%u %s %s: its cubin isn't understood", (unsigned)target, shape->name, kernel)) {
            got.shared_bytes += variant->dynamic_shared_bytes;
            /* A few loop-invariant words cost a kernel of large batches nothing. */
            CHECK(got.local_bytes <= (tile ? 64u : 0u), "sm_%u %s %s uses %u bytes of local memory a thread", (unsigned)target, shape->name, kernel, (unsigned)got.local_bytes);
            if (out) {
                fprintf(out, "sm_%u %s %s %u %u %u\n", (unsigned)target, shape->name, kernel, (unsigned)got.registers, (unsigned)got.shared_bytes, (unsigned)got.instructions);
            } else if (table && CHECK(find_row(table, target, shape->name, kernel, &row), "sm_%u %s %s isn't in " TABLE, (unsigned)target, shape->name, kernel)) {
                CHECK(got.registers <= row.registers + 8, "sm_%u %s %s takes %u registers; the table has %u", (unsigned)target, shape->name, kernel, (unsigned)got.registers, (unsigned)row.registers);
                CHECK(got.shared_bytes <= row.shared_bytes + 1024, "sm_%u %s %s takes %u bytes of shared memory; the table has %u", (unsigned)target, shape->name, kernel, (unsigned)got.shared_bytes, (unsigned)row.shared_bytes);
                CHECK(got.instructions <= row.instructions + row.instructions / 8, "sm_%u %s %s has %u instructions; the table has %u", (unsigned)target, shape->name, kernel, (unsigned)got.instructions,
                      (unsigned)row.instructions);
            }
        }
        moer_free(context, code.data);
    }
    moe_route_layer_destroy(layer);
}

TEST(kernels_take_no_more_than_they_did) {
    const char *mode = getenv("TEST_RESOURCES");
    char *table = read_table(), version[32];
    FILE *out = mode && strcmp(mode, "write") == 0 ? fopen(TABLE, "wb") : NULL;
    int known = 0;
    size_t t, s;
    for (t = 0; t < sizeof targets / sizeof targets[0]; t++)
        for (s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            moe_route_context_desc desc;
            moe_route_context *context = NULL;
            memset(&desc, 0, sizeof desc);
            desc.device = MOE_ROUTE_DEVICE_COMPILE;
            desc.compile_target = targets[t];
            desc.cache_dir = "off";
            REQUIRE(moe_route_context_create(&desc, &context) == MOE_ROUTE_OK, "no context");
            if (t == 0 && s == 0) { /* which NVRTC it is, is known once something has been compiled */
                moe_route_layer_desc layer_desc;
                moe_route_layer *layer = NULL;
                describe(&layer_desc, &shapes[0]);
                if (moe_route_layer_create(context, &layer_desc, &layer) == MOE_ROUTE_ERROR_NO_COMPILER) SKIP("NVRTC isn't here");
                moe_route_layer_destroy(layer);
                snprintf(version, sizeof version, "NVRTC %d\n", context->nvrtc.version);
                known = table && strstr(table, version) != NULL;
                if (out) fprintf(out, "target, shape, kernel, registers, bytes of shared memory, instructions; by NVRTC %d\n", context->nvrtc.version);
            }
            check_shape(context, targets[t], &shapes[s], known ? table : NULL, out);
            moe_route_context_destroy(context);
        }
    if (out) fclose(out);
    free(table);
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(kernels_take_no_more_than_they_did);
    return test_end();
}
