/*
  cub_maps.c: compiles the maps by CUB for each TARGET:EXPERTS that it is called with, such as 90:256, and prints a line for each: a digest of the
  cubin, so that two ways to come by CUB's headers can be compared. Fails with the library's message, or where a kernel uses local memory.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include <stdio.h>
#include <stdlib.h>

#include "../support/cubin.h"

static int compile(uint32_t target, uint32_t num_experts) {
    moe_route_context_desc context_desc;
    moe_route_layer_desc desc;
    moe_route_context *context = NULL;
    moe_route_layer *layer = NULL;
    char message[8192];
    uint32_t i, k;
    int found = 0;
    memset(&context_desc, 0, sizeof context_desc);
    memset(&desc, 0, sizeof desc);
    context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = target;
    desc.router.num_experts = num_experts;
    desc.router.top_k = 8;
    desc.max_tokens = 4096;
    desc.operations = MOE_ROUTE_OPERATION_MAPS;
    desc.cub_maps = MOE_ROUTE_ON;
    if (moe_route_context_create(&context_desc, &context) != MOE_ROUTE_OK || moe_route_layer_create(context, &desc, &layer) != MOE_ROUTE_OK) {
        moe_route_message(context, message, sizeof message);
        printf("%s\n", message);
    }
    for (i = 0; layer && i < layer->num_variants; i++) {
        const moer_variant *variant = layer->variants[i];
        moer_entry entry;
        resources taken;
        unsigned char digest[32];
        if (strcmp(variant->family->name, "maps_cub") != 0 || !moer_entry_parse(variant->entry.data, variant->entry.size, &entry)) continue;
        if (!read_resources(entry.payload, entry.payload_size, &taken)) continue;
        moer_digest(entry.payload, entry.payload_size, digest);
        printf("sm_%u %u experts: ", (unsigned)target, (unsigned)num_experts);
        for (k = 0; k < 32; k++) printf("%02x", digest[k]);
        printf(", %u bytes of local memory\n", (unsigned)taken.local_bytes);
        found = taken.local_bytes == 0;
    }
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return found;
}

int main(int argc, char **argv) {
    int i, failed = argc < 2;
    for (i = 1; i < argc; i++) {
        const char *colon = strchr(argv[i], ':');
        failed |= !colon || !compile((uint32_t)strtoul(argv[i], NULL, 10), (uint32_t)strtoul(colon + 1, NULL, 10));
    }
    return failed;
}
