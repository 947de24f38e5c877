/*
  test_old_gpu.c: a GPU older than SM80 is refused, with a message that says what it is, what is needed and what to do. Run
  over the emulated driver with MOE_ROUTE_EMULATION_TARGET=75.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"

TEST(an_old_gpu_is_refused) {
    static const moe_route_device kinds[] = {MOE_ROUTE_DEVICE_GPU, MOE_ROUTE_DEVICE_DEFAULT};
    int i;
    for (i = 0; i < 2; i++) {
        moe_route_context_desc desc;
        moe_route_context *context = NULL;
        moe_route_context_info info;
        moe_route_layer_desc layer_desc;
        moe_route_layer *layer = NULL;
        moe_route_status status;
        char message[512];
        memset(&desc, 0, sizeof desc);
        desc.device = kinds[i];
        status = moe_route_context_create(&desc, &context);
        moe_route_message(context, message, sizeof message);
        CHECK(status == MOE_ROUTE_ERROR_UNSUPPORTED && strstr(message, "7.5") && strstr(message, "8.0") && strstr(message, "MOE_ROUTE_DEVICE_CPU"), "%s: %s", moe_route_status_name(status), message);
        moe_route_context_get_info(context, &info);
        CHECK(info.device == MOE_ROUTE_DEVICE_GPU && info.target == 75, "the context is of device %d, sm_%u", (int)info.device, info.target);
        memset(&layer_desc, 0, sizeof layer_desc);
        layer_desc.router.num_experts = 8;
        layer_desc.router.top_k = 2;
        CHECK(moe_route_layer_create(context, &layer_desc, &layer) == MOE_ROUTE_ERROR_ARGUMENT && layer == NULL, "a layer on it");
        moe_route_context_destroy(context);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    RUN(an_old_gpu_is_refused);
    return test_end();
}
