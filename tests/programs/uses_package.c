/* uses_package.c: a user's program, in C and in C++: says its version when a layer can be made and header and library agree. */
#include "moe_route.h"

#include <stdio.h>
#include <string.h>

int main(void) {
    moe_route_context_desc context_desc;
    moe_route_context *context = NULL;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    int ok;
    memset(&context_desc, 0, sizeof context_desc);
    memset(&desc, 0, sizeof desc);
    context_desc.device = MOE_ROUTE_DEVICE_CPU;
    desc.router.num_experts = 8;
    desc.router.top_k = 2;
    ok = moe_route_context_create(&context_desc, &context) == MOE_ROUTE_OK && moe_route_layer_create(context, &desc, &layer) == MOE_ROUTE_OK &&
         strcmp(moe_route_version(), MOE_ROUTE_VERSION) == 0;
    if (ok) printf("moe_route %s\n", moe_route_version());
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return ok ? 0 : 1;
}
