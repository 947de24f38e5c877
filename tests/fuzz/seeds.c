/*
  seeds.c: writes the inputs that fuzzing starts from: sound entries and packs, of code that the stand-in for NVRTC makes, with
  each of the ways to make them plausible in front. Called with the folders of the two corpora.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../../moe_route.h"

#include "../support/test.h"
#include "../support/stand_ins.h"

static void write_seed(const char *to, const char *name, int plausible, const moer_bytes *bytes) {
    char path[1024];
    FILE *file;
    snprintf(path, sizeof path, "%s/%s_%d", to, name, plausible);
    file = fopen(path, "wb");
    if (!file || fputc(plausible, file) == EOF || fwrite(bytes->data, 1, bytes->size, file) != bytes->size || fclose(file) != 0) exit(1);
}

int main(int argc, char **argv) {
    moe_route_context_desc desc;
    moe_route_context *contexts[2] = {NULL, NULL};
    moe_route_layer *layers[2] = {NULL, NULL};
    static unsigned char data[65536];
    moer_bytes bytes;
    outcome o;
    FILE *file;
    int i, k;
    if (argc != 3) return 64;
    stand_in_reset();
    memset(&desc, 0, sizeof desc);
    memset(&o, 0, sizeof o);
    desc.cache_dir = "off";
    for (i = 0; i < 2; i++) {
        desc.compile_target = i ? 120 : 90;
        if (stand_in_context(&desc, STAND_IN_COMPILE, &o, &contexts[i]) != MOE_ROUTE_OK || stand_in_layer(contexts[i], ONE_OPERATION, &layers[i]) != MOE_ROUTE_OK) return 1;
        for (k = 0; k < 3; k++) write_seed(argv[1], i ? "sm_120" : "sm_90", k, &contexts[i]->variants->entry);
    }
    for (i = 1; i <= 2; i++) {
        if (moe_route_pack_save(contexts, (uint32_t)i, "build/seed.moep") != MOE_ROUTE_OK) return 1;
        file = fopen("build/seed.moep", "rb");
        if (!file) return 1;
        bytes.data = data;
        bytes.size = fread(data, 1, sizeof data, file);
        fclose(file);
        for (k = 0; k < 3; k++) write_seed(argv[2], i == 1 ? "one" : "two", k, &bytes);
    }
    for (i = 0; i < 2; i++) {
        moe_route_layer_destroy(layers[i]);
        moe_route_context_destroy(contexts[i]);
    }
    return 0;
}
