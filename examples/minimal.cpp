// minimal.cpp: the same header from C++: three experts for a batch of tokens, on the CPU backend.
// Build: c++ -I. examples/minimal.cpp -lm -ldl -lpthread
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include <cstdio>
#include <vector>

template <class T> static moe_route_address address_of(T &array) { return static_cast<moe_route_address>(reinterpret_cast<uintptr_t>(array.data())); }

int main() {
    const uint32_t num_tokens = 3, num_experts = 16, top_k = 3;
    std::vector<float> logits(num_tokens * num_experts), weights(num_tokens * top_k);
    std::vector<int32_t> ids(num_tokens * top_k);
    for (uint32_t i = 0; i < logits.size(); i++) logits[i] = static_cast<float>(i * 7 % 13);

    moe_route_context_desc context_desc{};
    context_desc.device = MOE_ROUTE_DEVICE_CPU;
    moe_route_layer_desc desc{};
    desc.router.num_experts = num_experts;
    desc.router.top_k = top_k;
    desc.router.score = MOE_ROUTE_SCORE_SIGMOID;
    moe_route_route_args args{};
    args.num_tokens = num_tokens;
    args.logits = address_of(logits);
    args.ids = address_of(ids);
    args.weights = address_of(weights);

    moe_route_context *context = nullptr;
    moe_route_layer *layer = nullptr;
    const bool ok = moe_route_context_create(&context_desc, &context) == MOE_ROUTE_OK &&
                    moe_route_layer_create(context, &desc, &layer) == MOE_ROUTE_OK && moe_route_route(layer, &args) == MOE_ROUTE_OK;
    for (uint32_t i = 0; ok && i < ids.size(); i++) std::printf("%d%s", ids[i], i % top_k == top_k - 1 ? "\n" : " ");
    moe_route_layer_destroy(layer);
    moe_route_context_destroy(context);
    return ok ? 0 : 1;
}
