/* minimal.c: routes two tokens to 2 of 4 experts on the CPU backend. Build: cc -I. examples/minimal.c -lm -ldl -lpthread */
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

static moe_route_address address_of(void *p) { return (moe_route_address)(uintptr_t)p; }

int main(void) {
    float logits[2][4] = {{0.5f, 2.0f, -1.0f, 1.0f}, {3.0f, 0.0f, 0.0f, 1.0f}}, weights[2][2];
    int32_t ids[2][2];
    char message[512];
    moe_route_context_desc context_desc;
    moe_route_context *context;
    moe_route_layer *layer = NULL;
    moe_route_layer_desc desc;
    moe_route_route_args args;
    int t;
    memset(&context_desc, 0, sizeof context_desc);
    memset(&desc, 0, sizeof desc);
    memset(&args, 0, sizeof args);
    context_desc.device = MOE_ROUTE_DEVICE_CPU;
    desc.router.num_experts = 4;
    desc.router.top_k = 2;
    desc.router.renormalize = MOE_ROUTE_RENORMALIZE_SUM;
    args.num_tokens = 2;
    args.logits = address_of(logits);
    args.ids = address_of(ids);
    args.weights = address_of(weights);
    if (moe_route_context_create(&context_desc, &context) != MOE_ROUTE_OK || moe_route_layer_create(context, &desc, &layer) != MOE_ROUTE_OK ||
        moe_route_route(layer, &args) != MOE_ROUTE_OK) {
        moe_route_message(context, message, sizeof message);
        return puts(message), 1;
    }
    for (t = 0; t < 2; t++) printf("token %d: expert %d weighs %.3f, expert %d %.3f\n", t, (int)ids[t][0], (double)weights[t][0], (int)ids[t][1], (double)weights[t][1]);
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return 0;
}
