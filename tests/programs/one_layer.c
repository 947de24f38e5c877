/*
  one_layer.c: creates one layer for sm_90 without a GPU and says where its code came from, for tests that look at the whole
  process. What it does besides is said by its arguments:
    --load LIBRARY   loads a library first, as a program that uses NVRTC itself
    --driver N       behaves as with a driver of that CUDA version, 12040 for 12.4
    --pack FILE      loads a pack
    --save FILE      writes one
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../../moe_route.h"

#include <dlfcn.h>

static void print_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    printf("%.*s", slash ? (int)(slash - path) : (int)strlen(path), path);
}

int main(int argc, char **argv) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_context_info info;
    moe_route_statistics s;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_status status;
    const char *save = NULL;
    char message[8192];
    int i;
    memset(&context_desc, 0, sizeof context_desc);
    context_desc.device = MOE_ROUTE_DEVICE_COMPILE;
    context_desc.compile_target = 90;
    status = moe_route_context_create(&context_desc, &context);
    for (i = 1; i + 1 < argc && status == MOE_ROUTE_OK; i += 2) {
        if (strcmp(argv[i], "--load") == 0 && !dlopen(argv[i + 1], RTLD_NOW | RTLD_LOCAL)) {
            printf("%s\n", dlerror());
            return 1;
        }
        if (strcmp(argv[i], "--driver") == 0) context->driver_version = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--pack") == 0) status = moe_route_pack_load(context, argv[i + 1]);
        if (strcmp(argv[i], "--save") == 0) save = argv[i + 1];
    }
    memset(&desc, 0, sizeof desc);
    desc.router.num_experts = 32;
    desc.router.top_k = 4;
    desc.experts.hidden_size = 64;
    desc.operations = MOE_ROUTE_OPERATION_EXPAND | MOE_ROUTE_OPERATION_COMBINE;
    if (status == MOE_ROUTE_OK) status = moe_route_layer_create(context, &desc, &layer);
    if (status == MOE_ROUTE_OK && save) status = moe_route_pack_save(&context, 1, save);
    moe_route_message(context, message, sizeof message);
    moe_route_context_get_info(context, &info);
    moe_route_context_get_statistics(context, &s);
    if (status == MOE_ROUTE_OK) {
        printf("OK hits %lu misses %lu packs %lu compiled %lu nvrtc %u ", (unsigned long)s.cache_hits, (unsigned long)s.cache_misses, (unsigned long)s.pack_hits, (unsigned long)s.compiles,
               info.nvrtc_version);
        print_folder(info.nvrtc_path);
        printf("\n");
    } else {
        printf("%s %s\n", moe_route_status_name(status), message);
    }
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return status == MOE_ROUTE_OK ? 0 : 1;
}
