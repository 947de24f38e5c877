/*
  test_activations.c: the activations on their own: how far they are from f64, what they do at the edges, and that every
  device gives the bits that the host's text gives. Whole layers with activations belong to test_layer.c.
  TEST_DEVICE chooses the device, TEST_SIZE=small a selection for slow (emulated) devices. TEST_SEED replaces the seed.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../moe_route.h"

#include "support/test.h"
#include "support/device.h"

static test_device device;
static int small_size;
static uint64_t seed = 1;

/* The functions in f64, without differences that cancel. *argument is that of the sigmoid. */
static double activation_f64(int activation, double x, double alpha, double *argument) {
    *argument = activation == MOER_SILU ? alpha * x : sqrt(8 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
    if (activation == MOER_GELU_ERF) return x * erfc(-x / sqrt(2.0)) / 2;
    if (activation == MOER_RELU2) return x > 0 ? x * x : 0;
    if (activation == MOER_SITU) {
        *argument = x;
        return alpha * tanh(x / alpha) / (1 + exp(-x));
    }
    return x / (1 + exp(-*argument));
}

/* Half of them anywhere among the finite floats, half where the functions bend. */
static float random_argument(test_random *random) {
    float x;
    if (random_below(random, 2)) return (random_uniform(random) - 0.5f) * 60;
    do x = moer_f32_from_bits((unsigned int)(random_next(random) >> 32));
    while (!(x - x == 0));
    return x;
}

TEST(activations_are_as_accurate_as_they_say) {
    const double unit = 1.0 / 16777216, least = 1.2e-38; /* the least normal float: below it units of 2^-24 mean nothing */
    test_random random;
    long n;
    int activation;
    random_seed(&random, seed);
    for (n = 0; n < (small_size ? 100000 : 2000000); n++) {
        const float x = random_argument(&random), alpha = n % 3 ? 1.0f : n % 2 ? 1.702f : 4.0f;
        for (activation = MOER_SILU; activation <= MOER_SITU; activation++) {
            double argument, relative;
            const double want = activation_f64(activation, (double)x, (double)alpha, &argument), got = (double)moer_activation(activation, x, alpha), error = fabs(got - want);
            if (activation == MOER_RELU2) {
                if (!CHECK(got == (double)(float)want, "seed %llu: RELU2 of %.9g is %.9g instead of %.9g", (unsigned long long)seed, (double)x, got, want)) return;
                continue;
            }
            if (!CHECK(error <= 4 * unit * fmax(fabs((double)x), least), "seed %llu: activation %d of %.9g (alpha %g) is %.9g instead of %.9g", (unsigned long long)seed, activation, (double)x,
                       (double)alpha, got, want))
                return;
            if (activation == MOER_GELU_ERF ? x < -12.9f : argument < -87) continue;
            relative = activation == MOER_GELU_ERF ? 8 : (activation == MOER_SITU ? 9 : 4) + 3 * fabs(argument);
            if (!CHECK(error <= relative * unit * fmax(fabs(want), least), "seed %llu: activation %d of %.9g (alpha %g) is %.9g instead of %.9g", (unsigned long long)seed, activation, (double)x,
                       (double)alpha, got, want))
                return;
        }
    }
}

TEST(activations_keep_their_edges) {
    static const float large[] = {1e10f, 1e20f, 3.4e38f};
    int activation, i;
    for (activation = MOER_SILU; activation <= MOER_SITU; activation++) {
        const float nan = moer_f32_from_bits(0x7fc00000u), inf = moer_f32_from_bits(MOER_INFINITY_BITS);
        const float of_nan = moer_activation(activation, nan, 1.0f), of_inf = moer_activation(activation, inf, 1.0f);
        CHECK(of_nan != of_nan, "activation %d of NaN is %g", activation, (double)of_nan);
        CHECK(of_inf == (activation == MOER_SITU ? 1.0f : inf), "activation %d of +inf is %g", activation, (double)of_inf);
        CHECK(moer_activation(activation, 0.0f, 1.0f) == 0.0f, "activation %d of 0", activation);
        for (i = 0; i < 3; i++) {
            CHECK(moer_activation(activation, -large[i], 1.0f) == 0.0f, "activation %d of %g is %g", activation, (double)-large[i], (double)moer_activation(activation, -large[i], 1.0f));
            CHECK(activation >= MOER_RELU2 || moer_activation(activation, large[i], 1.0f) == large[i], "activation %d of %g", activation, (double)large[i]);
        }
    }
    CHECK(moer_activated_gate(MOER_SILU, MOER_CLAMP_BEFORE, moer_f32_from_bits(0x7fc00000u), 1.0f, 7.0f) != 7.0f, "a clamp hides a NaN");
    CHECK(moer_shifted_up(MOER_CLAMP_AFTER, moer_f32_from_bits(0x7fc00000u), 0.0f, 1.0f, 7.0f) != 8.0f, "a clamp hides a NaN");
    CHECK(moer_shifted_up(MOER_CLAMP_NONE, moer_f32_from_bits(MOER_INFINITY_BITS), 25.0f, 1.0f, 0.0f) == 26.0f, "tanh of +inf");
    CHECK(moer_shifted_up(MOER_CLAMP_NONE, -3.0e38f, 25.0f, 1.0f, 0.0f) == -24.0f, "tanh of a large number");
}

/* ---- the same bits on every device ---- */

/* A layer that shows its activation: gate is x itself, up a bias, and y is h. E and k are 1. */
static void check_bits(moe_route_activation activation, moe_route_gate_up_order order, float alpha, float up_beta, float offset, float clamp, moe_route_clamp_position position, uint64_t salt) {
    enum { SIZE = 32, TOKENS = 64 };
    static float gate_up[2 * SIZE * SIZE], down[SIZE * SIZE], bias[2 * SIZE], x[TOKENS * SIZE], y[TOKENS * SIZE];
    static int32_t ids[TOKENS];
    static float weights[TOKENS];
    const int gated = order != MOE_ROUTE_GATE_UP_NO_GATE, interleaved = order == MOE_ROUTE_GATE_UP_INTERLEAVED;
    const int kind = clamp == 0 ? MOER_CLAMP_NONE : (int)position + 1;
    moe_route_layer_desc desc;
    moe_route_layer *layer = NULL;
    moe_route_layer_args args;
    device_buffer b[7];
    test_random random;
    size_t size = 0;
    uint32_t i, n;
    random_seed(&random, seed * 100 + salt);
    memset(gate_up, 0, sizeof gate_up);
    memset(down, 0, sizeof down);
    memset(bias, 0, sizeof bias);
    for (n = 0; n < SIZE; n++) {
        gate_up[(interleaved ? n * 2 : n) * SIZE + n] = down[n * SIZE + n] = 1;
        if (gated) bias[interleaved ? n * 2 + 1 : SIZE + n] = random_normal(&random) * 10;
    }
    for (i = 0; i < TOKENS * SIZE; i++) { /* h stays finite: the down matmul multiplies it by 0, too */
        x[i] = random_argument(&random);
        if (fabsf(x[i]) > 1e15f) x[i] *= 1e-30f;
    }
    for (i = 0; i < TOKENS; i++) {
        ids[i] = 0;
        weights[i] = 1;
    }
    memset(&desc, 0, sizeof desc);
    b[0] = device_create_from(&device, gate_up, sizeof gate_up / (gated ? 1 : 2));
    b[1] = device_create_from(&device, down, sizeof down);
    b[2] = device_create_from(&device, bias, sizeof bias / (gated ? 1 : 2));
    desc.router.num_experts = desc.router.top_k = 1;
    desc.experts.hidden_size = desc.experts.intermediate_size = SIZE;
    desc.experts.dtype = MOE_ROUTE_F32;
    desc.experts.gate_up.format = desc.experts.down.format = MOE_ROUTE_FORMAT_F32;
    desc.experts.gate_up.data = b[0].address;
    desc.experts.gate_up.bias = b[2].address;
    desc.experts.down.data = b[1].address;
    desc.experts.gate_up_order = order;
    desc.experts.activation = activation;
    if (activation == MOE_ROUTE_ACTIVATION_SITU) desc.experts.situ_beta = alpha;
    else desc.experts.activation_alpha = alpha;
    desc.experts.situ_up_beta = up_beta;
    desc.experts.up_offset = offset;
    desc.experts.clamp = clamp;
    desc.experts.clamp_position = position;
    desc.max_tokens = TOKENS;
    desc.operations = MOE_ROUTE_OPERATION_EXPERTS;
    b[3] = device_create_from(&device, ids, sizeof ids);
    b[4] = device_create_from(&device, weights, sizeof weights);
    b[5] = device_create_aligned(&device, sizeof x, 16);
    device_upload(&device, &b[5], x, sizeof x);
    b[6] = device_create_aligned(&device, sizeof y, 16);
    if (CHECK(moe_route_layer_create(device.context, &desc, &layer) == MOE_ROUTE_OK, "%s", device_message(&device))) {
        device_buffer workspace;
        moe_route_layer_workspace_size(layer, TOKENS, &size);
        workspace = device_create_workspace(&device, size);
        memset(&args, 0, sizeof args);
        args.num_tokens = TOKENS;
        args.ids = b[3].address;
        args.weights = b[4].address;
        args.x = b[5].address;
        args.y = b[6].address;
        args.workspace = workspace.address;
        args.workspace_size = size;
        args.stream = device.stream;
        CHECK(moe_route_layer_run(layer, &args) == MOE_ROUTE_OK, "%s", device_message(&device));
        device_synchronize(&device);
        device_download(&device, y, &b[6], sizeof y);
        for (i = 0; i < TOKENS * SIZE; i++) {
            float want = moer_activated_gate((int)activation, kind, x[i], alpha == 0 ? 1 : alpha, clamp);
            if (gated) want *= moer_shifted_up(kind, bias[interleaved ? i % SIZE * 2 + 1 : SIZE + i % SIZE], up_beta, offset, clamp);
            want += 0.0f; /* -0 as the sums leave it */
            if (!CHECK(moer_f32_bits(y[i]) == moer_f32_bits(want), "seed %llu: activation %d order %d alpha %g offset %g clamp %g %d: of %.9g is %.9g instead of %.9g", (unsigned long long)seed,
                       (int)activation, (int)order, (double)alpha, (double)offset, (double)clamp, (int)position, (double)x[i], (double)y[i], (double)want))
                break;
        }
        device_destroy(&device, &workspace);
    }
    moe_route_layer_destroy(layer);
    for (i = 0; i < 7; i++) device_destroy(&device, &b[i]);
}

TEST(activations_have_the_same_bits_on_every_device) {
    uint32_t salt = 0;
    int activation;
    for (activation = MOE_ROUTE_ACTIVATION_SILU; activation <= MOE_ROUTE_ACTIVATION_SITU; activation++) {
        check_bits((moe_route_activation)activation, MOE_ROUTE_GATE_UP_HALVES, 0, 0, 0, 0, MOE_ROUTE_CLAMP_BEFORE, salt++);
        check_bits((moe_route_activation)activation, MOE_ROUTE_GATE_UP_NO_GATE, 0, 0, 0, 5, MOE_ROUTE_CLAMP_AFTER, salt++);
    }
    check_bits(MOE_ROUTE_ACTIVATION_SILU, MOE_ROUTE_GATE_UP_INTERLEAVED, 1.702f, 0, 1, 7, MOE_ROUTE_CLAMP_BEFORE, salt++);
    check_bits(MOE_ROUTE_ACTIVATION_SILU, MOE_ROUTE_GATE_UP_HALVES, 0, 0, 0, 7, MOE_ROUTE_CLAMP_AFTER, salt++);
    check_bits(MOE_ROUTE_ACTIVATION_SILU, MOE_ROUTE_GATE_UP_NO_GATE, 0.5f, 0, 0, 3, MOE_ROUTE_CLAMP_BEFORE, salt++);
    check_bits(MOE_ROUTE_ACTIVATION_SITU, MOE_ROUTE_GATE_UP_HALVES, 4, 25, 1, 0, MOE_ROUTE_CLAMP_BEFORE, salt++);
}

int main(int argc, char **argv) {
    const char *text = getenv("TEST_SEED");
    test_begin(argc, argv);
    small_size = test_is_small();
    if (text) seed = strtoull(text, NULL, 10);
    device_open_wanted(&device);
    RUN(activations_are_as_accurate_as_they_say);
    RUN(activations_keep_their_edges);
    RUN(activations_have_the_same_bits_on_every_device);
    device_close(&device);
    return test_end();
}
