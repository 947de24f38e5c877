/*
  cudart.cpp: from C++ in a program that uses the CUDA runtime: its streams, its cudaMalloc memory and its device are the
  library's. The library needs no header of CUDA; cuda_runtime.h beside it does no harm.

      c++ -std=c++17 -I. -I$CUDA_HOME/include examples/cudart.cpp -o cudart -L$CUDA_HOME/lib64 -lcudart -lm -ldl -lpthread
*/
#include <cuda_runtime.h>

#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

static void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/* A device array that frees itself; its address is what descriptions and arguments take. */
template <class T> class array {
  public:
    explicit array(const std::vector<T> &values) : array(values.size()) {
        check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    explicit array(size_t count) { check(cudaMalloc(&data_, count * sizeof(T) + 1)); }
    array(const array &) = delete;
    array &operator=(const array &) = delete;
    ~array() { cudaFree(data_); }
    moe_route_address address() const { return reinterpret_cast<uintptr_t>(data_); }
    const T *data() const { return data_; }

  private:
    T *data_ = nullptr;
};

/* Context and layer, with errors as exceptions. */
class moe_layer {
  public:
    explicit moe_layer(const moe_route_layer_desc &desc) {
        check(cudaFree(nullptr)); /* the runtime makes its context, the device's primary one, which the library then uses */
        moe_route_status status = moe_route_context_create(nullptr, &context_);
        if (status == MOE_ROUTE_OK) status = moe_route_layer_create(context_, &desc, &layer_);
        if (status == MOE_ROUTE_OK) return;
        const std::string why = message();
        moe_route_context_destroy(context_);
        throw std::runtime_error(why);
    }
    moe_layer(const moe_layer &) = delete;
    moe_layer &operator=(const moe_layer &) = delete;
    ~moe_layer() {
        moe_route_layer_destroy(layer_);
        moe_route_context_destroy(context_);
    }
    size_t workspace_size(uint32_t num_tokens) const {
        size_t size = 0;
        moe_route_layer_workspace_size(layer_, num_tokens, &size);
        return size;
    }
    void run(const moe_route_layer_args &args) const {
        if (moe_route_layer_run(layer_, &args) != MOE_ROUTE_OK) throw std::runtime_error(message());
    }

  private:
    std::string message() const {
        std::string text(context_ ? moe_route_message(context_, nullptr, 0) : 0, '\0');
        if (context_) moe_route_message(context_, &text[0], text.size() + 1);
        return text;
    }
    moe_route_context *context_ = nullptr;
    moe_route_layer *layer_ = nullptr;
};

static std::vector<float> numbers(size_t count, float scale) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; i++) values[i] = scale * (static_cast<float>(i * 2654435761u % 1009) / 504.5f - 1.0f);
    return values;
}

int main() {
    const uint32_t num_tokens = 4, num_experts = 16, top_k = 4, hidden = 64, intermediate = 32;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return std::fprintf(stderr, "no GPU\n"), 3;
    try {
        const array<float> gate_up(numbers(num_experts * 2 * intermediate * hidden, 0.2f));
        const array<float> down(numbers(num_experts * hidden * intermediate, 0.2f));
        moe_route_layer_desc desc{};
        desc.router.num_experts = num_experts;
        desc.router.top_k = top_k;
        desc.experts.hidden_size = hidden;
        desc.experts.intermediate_size = intermediate;
        desc.experts.dtype = MOE_ROUTE_F32;
        desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
        desc.experts.gate_up.data = gate_up.address();
        desc.experts.down.data = down.address();
        const moe_layer layer(desc);

        const array<float> logits(numbers(num_tokens * num_experts, 2.0f)), x(numbers(num_tokens * hidden, 1.0f)), y(num_tokens * hidden);
        const array<char> workspace(layer.workspace_size(num_tokens));
        cudaStream_t stream;
        check(cudaStreamCreate(&stream));
        moe_route_layer_args args{};
        args.num_tokens = num_tokens;
        args.logits = logits.address();
        args.x = x.address();
        args.y = y.address();
        args.workspace = workspace.address();
        args.workspace_size = layer.workspace_size(num_tokens);
        args.stream = stream; /* a cudaStream_t is a moe_route_stream */
        layer.run(args);
        std::vector<float> result(num_tokens * hidden);
        check(cudaMemcpyAsync(result.data(), y.data(), result.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
        check(cudaStreamSynchronize(stream));
        check(cudaStreamDestroy(stream));
        std::printf("y[0] = %.5f, y[%zu] = %.5f\n", static_cast<double>(result.front()), result.size() - 1, static_cast<double>(result.back()));
    } catch (const std::exception &error) {
        return std::fprintf(stderr, "%s\n", error.what()), 1;
    }
    return 0;
}
