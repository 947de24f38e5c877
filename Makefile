# moe_route: builds the header, the demo and the tests. Needs a C compiler and make; the GPU, the CUDA driver and NVRTC are
# found at run time.
#
#   make            moe_route.h, from src/ and kernels_src/
#   make demo       one layer of a trained model, on the GPU where there is one
#   make ranks      layers whose experts are spread over two ranks, on GPUs where there are some; more by RANKS="--ranks 4"
#   make test       the tests that need no GPU
#   make test-gpu   the same assertions on the GPU
#   make clean

CC ?= cc
CFLAGS ?= -O2 -g
LDLIBS = -lm -ldl -lpthread
WARNINGS = -Wall -Wextra -Wconversion -Wshadow -pedantic

# What NVRTC compiles: headers in the order in which they build on each other, then a kernel family a file.
KERNELS = $(addprefix kernels_src/,device.h args.h tokens.h placement.h scores.h activations.h select.h formats.h packed.h gguf.h values.h \
    tile.h vector.h epilogue.h route.cu topk.cu maps.cu matmul.cu down.cu combine.cu expand.cu \
    dispatch.cu slots.cu)
# What the parts share: the first includes the others.
HEADERS = $(addprefix src/,internal.h platform.h cache.h)
# The implementation, each part after those that it uses.
PARTS = $(addprefix src/,base.c platform_posix.c platform_windows.c platform.c sha256.c driver.c nvrtc_find.c nvrtc.c \
    cache_entry.c cache_folder.c cache_file.c cache_trim.c pack.c pack_write.c cache.c cache_calls.c context.c variant.c wanted.c \
    formats.c cpu_route.c cpu_maps.c cpu_gguf.c cpu_formats.c cpu_experts.c cpu_ranks.c router.c preset_table.c presets.c layer.c sequence.c \
    cpu_operations.c operations.c ranks.c explain.c)

all: moe_route.h

build:
	@mkdir -p build

build/amalgamate: tools/amalgamate.c src/api.h $(HEADERS) src/sha256.c kernels_src/args.h | build
	$(CC) $(CFLAGS) -std=c99 -w -o $@ tools/amalgamate.c

AMALGAMATE = --public src/intro.h src/api.h --private $(HEADERS) --kernels $(KERNELS) --parts $(PARTS) --licence LICENSE

moe_route.h: build/amalgamate src/intro.h src/api.h $(HEADERS) LICENSE $(KERNELS) $(PARTS)
	build/amalgamate $@ $(AMALGAMATE)

# The header again, elsewhere, to compare.
fresh: build/amalgamate
	build/amalgamate $(FRESH) $(AMALGAMATE)

# ---- the demo ----

build/demo: examples/demo.c examples/gpu.h examples/quantize.h examples/safetensors.h moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ examples/demo.c $(LDLIBS)

# NVRTC comes from the toolkit, from the process's library path, or with pip into build/ when there is a GPU and none is found.
demo: build/demo
	@tools/with_nvrtc.sh build/demo

# ---- experts over several ranks ----

EXPERT_PARALLEL = examples/expert_parallel.c $(wildcard examples/expert_parallel/*.h)

build/expert_parallel: $(EXPERT_PARALLEL) examples/gpu.h examples/quantize.h examples/safetensors.h moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ examples/expert_parallel.c $(LDLIBS)

ranks: build/expert_parallel
	build/expert_parallel $(RANKS)

# The same under AddressSanitizer and UndefinedBehaviorSanitizer, and a stand-in for NCCL.
build/sanitized_expert_parallel: $(EXPERT_PARALLEL) examples/gpu.h examples/quantize.h examples/safetensors.h moe_route.h | build
	$(CC) $(SANITIZED) $(SANITIZE) -Wall -Wextra -I. -o $@ examples/expert_parallel.c $(LDLIBS)

build/stand_in/libnccl.so.2: tests/programs/stand_in_nccl.c | build
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(WARNINGS) -fPIC -shared -Wl,-soname,libnccl.so.2 -o $@ $< -ldl

# ---- the benchmark ----

build/bench: bench/bench.c bench/floors.h examples/gpu.h moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ bench/bench.c $(LDLIBS)

bench: build/bench
	@tools/with_nvrtc.sh build/bench $(BENCH)

# ---- tests ----

include tests/emulation/emulation.mk

SUPPORT = $(wildcard tests/support/*.h) examples/gpu.h examples/quantize.h examples/safetensors.h moe_route.h
DEVICE_TESTS = test_route test_presets test_maps test_activations test_formats test_layer test_epilogue test_blocks test_dispatch test_ranks
HOST_TESTS = test_safetensors test_errors test_router_errors test_cache test_cache_faults test_cache_threads test_cache_trim test_packs
SANITIZED = -O1 -g -fno-omit-frame-pointer

build/test_%: tests/test_%.c $(SUPPORT) | build
	$(CC) $(CFLAGS) -Wall -Wextra -I. -o $@ $< $(LDLIBS)

# The same under AddressSanitizer and UndefinedBehaviorSanitizer: for the host's own code, and for the emulated device.
build/sanitized_%: tests/test_%.c $(SUPPORT) | build
	$(CC) $(SANITIZED) $(SANITIZE) -Wall -Wextra -I. -o $@ $< $(LDLIBS)

# And under ThreadSanitizer.
build/threads_%: tests/test_%.c $(SUPPORT) | build
	$(CC) $(SANITIZED) -fsanitize=thread -Wall -Wextra -I. -o $@ $< $(LDLIBS)

THREAD_RUNS = build/threads_cache_threads

# A whole process, for the tests that look at one from outside.
build/one_layer: tests/programs/one_layer.c moe_route.h | build
	$(CC) $(CFLAGS) -Wall -Wextra -I. -o $@ $< $(LDLIBS)

SCRIPTS = tests/test_header.sh tests/test_demo.sh tests/test_effects.sh tests/test_nvrtc.sh tests/test_fuzz.sh tests/test_windows.sh \
    tests/test_expert_parallel.sh
PROGRAMS = build/demo build/bench build/bench_startup build/one_layer build/test_nvrtc build/expert_parallel build/sanitized_expert_parallel \
    build/stand_in/libnccl.so.2
OLD_GPU = '$(EMULATION_ENVIRONMENT) MOE_ROUTE_EMULATION_TARGET=75 build/sanitized_old_gpu'
HOST_RUNS = $(HOST_TESTS:test_%=build/sanitized_%) $(THREAD_RUNS) $(DEVICE_TESTS:%=build/%) build/test_compile build/test_resources
SANITIZED_RUNS = $(DEVICE_TESTS:test_%=build/sanitized_%)
# The emulated device draws the order in which warps and lanes run from a seed.
EMULATED_RUNS = $(foreach seed,1 2,$(SANITIZED_RUNS:%='$(EMULATION_ENVIRONMENT) MOE_ROUTE_EMULATION_SEED=$(seed) TEST_DEVICE=gpu TEST_SIZE=small %'))

test: moe_route.h $(PROGRAMS) build/sanitized_old_gpu $(HOST_RUNS) $(SANITIZED_RUNS) $(EMULATION_TESTS) $(EMULATION_LIBRARIES)
	tests/run.sh $(SCRIPTS) $(OLD_GPU) $(HOST_RUNS) $(EMULATION_TESTS:%='$(EMULATION_ENVIRONMENT) %') \
	    $(SANITIZED_RUNS:%='TEST_SIZE=small %') $(EMULATED_RUNS)

# What creating a layer costs: cold, warm, and with a pack.
build/bench_startup: bench/startup.c moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ $< $(LDLIBS)

test-gpu: moe_route.h build/demo $(DEVICE_TESTS:%=build/%)
	tests/run.sh $(DEVICE_TESTS:%='TEST_DEVICE=gpu build/%') 'build/demo --gpu >build/demo.txt && echo PASS demo_on_the_gpu'

clean:
	rm -rf build dist

.PHONY: all fresh demo ranks bench test test-gpu clean
