# moe_route: builds the header, the demo and the tests. Needs a C compiler and make, and cJSON for run_layer and the tests; the
# GPU, the CUDA driver and NVRTC are found at run time.
#
#   make            moe_route.h, from src/ and kernels_src/
#   make demo       one layer of a trained model, on the GPU where there is one
#   make run_layer  build/run_layer, which runs a layer of any checkpoint
#   make build/moe_route   the command: what a machine has, kernels compiled ahead, benchmark, routing, self-test (docs/command.md)
#   make bench      its benchmark; BENCH="--layer --svg layers.svg" passes options on
#   make ranks      layers whose experts are spread over two ranks, on GPUs where there are some; more by RANKS="--ranks 4"
#   make test       the tests that need no GPU
#   make test-gpu   the same assertions on the GPU
#   make examples   the small programs of examples/, into build/examples
#   make dist       dist/moe_route.h, with the headers of CUB that some kernels include, for programs to ship; CCCL=FOLDER names theirs
#   make lib        build/libmoe_route.so, for languages that can't include a header
#   make install    header, pkg-config and CMake files into PREFIX (/usr/local), below DESTDIR where that is given
#   make install-lib   the same, and the shared library into LIBDIR (PREFIX/lib)
#   make clean

CC ?= cc
CFLAGS ?= -O2 -g
LDLIBS = -lm -ldl -lpthread
# cJSON, for what reads safetensors files: tests and examples/run_layer.c. The library and the demo do without.
CJSON_CFLAGS ?= $(shell pkg-config --cflags libcjson 2>/dev/null)
CJSON_LIBS ?= $(shell pkg-config --libs libcjson 2>/dev/null || echo -lcjson)
WARNINGS = -Wall -Wextra -Wconversion -Wshadow -pedantic

# What NVRTC compiles: headers in the order in which they build on each other, then a kernel family a file.
KERNELS = $(addprefix kernels_src/,device.h args.h scan.h tokens.h placement.h scores.h activations.h select.h formats.h packed.h gguf.h values.h \
    sums.h tile.h held.h copied.h stream.h unpacked.h grouped.h output.h passes.h parts.h vector.h epilogue.h dispatch.h sort.h route.cu topk.cu maps.cu maps_cub.cu matmul.cu matmul_bulk.cu grouped.cu grouped_warpgroups.cu \
    down.cu combine.cu expand.cu dispatch.cu dispatch_large.cu slots.cu)
# What the parts share: the first includes the others.
HEADERS = $(addprefix src/,internal.h platform.h cache.h)
# The implementation, each part after those that it uses.
PARTS = $(addprefix src/,base.c platform_posix.c platform_windows.c platform.c sha256.c driver.c nvrtc_find.c cub_find.c cub_embedded.c nvrtc.c \
    cache_entry.c cache_folder.c cache_file.c cache_trim.c pack.c pack_write.c cache.c cache_calls.c context.c variant.c wanted.c \
    formats.c cpu_route.c cpu_maps.c cpu_gguf.c cpu_formats.c cpu_experts.c cpu_ranks.c router.c preset_table.c presets.c layer.c choices.c sequence.c \
    cpu_operations.c operations.c ranks.c explain.c tune.c)

all: moe_route.h

build:
	@mkdir -p build

# Says what to do where cJSON is missing.
build/cjson: | build
	@echo '#include <cjson/cJSON.h>' >$@.c; echo 'int main(void) { return cJSON_Version() == 0; }' >>$@.c
	@$(CC) $(CJSON_CFLAGS) -o $@ $@.c $(CJSON_LIBS) 2>$@.log || { rm -f $@; echo "cJSON isn't found: install it (Debian and Ubuntu: apt install libcjson-dev; Fedora: dnf install cjson-devel; brew install cjson)"; \
	    echo "or set CJSON_CFLAGS=-IFOLDER and CJSON_LIBS='-LFOLDER -lcjson'; the library and make demo do without it"; exit 1; }

build/amalgamate: tools/amalgamate.c src/api.h $(HEADERS) src/sha256.c kernels_src/args.h | build
	$(CC) $(CFLAGS) -std=c99 -w -o $@ tools/amalgamate.c

AMALGAMATE = --public src/intro.h src/api.h --private $(HEADERS) --kernels $(KERNELS) --parts $(PARTS) --licence LICENSE

moe_route.h: build/amalgamate src/intro.h src/api.h $(HEADERS) LICENSE $(KERNELS) $(PARTS)
	build/amalgamate $@ $(AMALGAMATE)

# The header again, elsewhere, to compare.
fresh: build/amalgamate
	build/amalgamate $(FRESH) $(AMALGAMATE)

# ---- dist/moe_route.h: moe_route.h, and CUB's headers in it ----

# The folder that holds cub/ and cuda/: the toolkit's, or that of pip's nvidia-cuda-cccl.
CUDA ?= $(or $(CUDA_HOME),/usr/local/cuda)
PYTHON_PACKAGES = build/cccl $(VIRTUAL_ENV)/lib/python3*/site-packages $(HOME)/.local/lib/python3*/site-packages /usr/local/lib/python3*/*-packages
CCCL_PLACES = $(CUDA)/include/cccl $(CUDA)/include $(PYTHON_PACKAGES:%=%/nvidia/cu13/include/cccl) $(PYTHON_PACKAGES:%=%/nvidia/cuda_cccl/include)
CCCL ?= $(patsubst %/cub/version.cuh,%,$(firstword $(wildcard $(CCCL_PLACES:%=%/cub/version.cuh))))
# Files with the licences that the headers don't have in them: the package's where it has one, or the Apache License 2.0.
CCCL_LICENCES ?= $(firstword $(wildcard $(CCCL)/../../cccl/LICENSE /usr/share/common-licenses/Apache-2.0))

build/embed_cub: tools/embed_cub.c | build
	$(CC) $(CFLAGS) -std=c99 $(WARNINGS) -o $@ $<

dist: dist/moe_route.h
dist/moe_route.h: build/embed_cub moe_route.h
	@test -n "$(CCCL)" || { echo "CUB isn't found: install the CUDA toolkit, or pip install nvidia-cuda-cccl, or set CCCL=FOLDER to the one that holds cub/ and cuda/"; exit 1; }
	@mkdir -p $(@D)
	build/embed_cub $@ moe_route.h $(CCCL) $(CCCL_LICENCES)

# ---- for other programs ----

PREFIX ?= /usr/local
VERSION = $(shell sed -n 's/^.define MOE_ROUTE_VERSION "\(.*\)"/\1/p' moe_route.h)
SONAME = libmoe_route.so.$(basename $(VERSION))
SHARE = $(DESTDIR)$(PREFIX)/share
LIBDIR ?= $(PREFIX)/lib

# The layout is vcpkg's, too.
install: moe_route.h
	install -d $(DESTDIR)$(PREFIX)/include $(SHARE)/moe_route $(SHARE)/pkgconfig
	install -m 644 moe_route.h $(DESTDIR)$(PREFIX)/include
	install -m 644 packaging/moe_route-config.cmake packaging/moe_route-config-version.cmake packaging/moe_route.c $(SHARE)/moe_route
	install -m 644 LICENSE $(SHARE)/moe_route/copyright
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' packaging/moe_route.pc.in >$(SHARE)/pkgconfig/moe_route.pc
	chmod 644 $(SHARE)/pkgconfig/moe_route.pc

# The file has the whole version; by the soname programs find it when they run, by the plain name when they are linked.
install-lib: install build/libmoe_route.so
	install -d $(DESTDIR)$(LIBDIR)
	install -m 755 build/libmoe_route.so $(DESTDIR)$(LIBDIR)/libmoe_route.so.$(VERSION)
	ln -sf libmoe_route.so.$(VERSION) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libmoe_route.so

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/include/moe_route.h $(SHARE)/pkgconfig/moe_route.pc
	rm -f $(DESTDIR)$(LIBDIR)/libmoe_route.so $(DESTDIR)$(LIBDIR)/$(SONAME) $(DESTDIR)$(LIBDIR)/libmoe_route.so.$(VERSION)
	rm -rf $(SHARE)/moe_route

# Its soname changes when its ABI does: docs/abi.md.
EXPORTED = -fPIC -fvisibility=hidden '-DMOE_ROUTE_API=extern __attribute__((visibility("default")))'
lib: build/libmoe_route.so
build/libmoe_route.so: packaging/moe_route.c moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) $(EXPORTED) -I. -shared -Wl,-soname,$(SONAME) -o $@ $< $(LDLIBS)

# ---- the demo ----

build/demo: examples/demo.c examples/files.h examples/gguf.h examples/gpu.h examples/quantize.h moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ examples/demo.c $(LDLIBS)

# NVRTC comes from the toolkit, from the process's library path, or with pip into build/ when there is a GPU and none is found.
demo: build/demo
	@tools/with_nvrtc.sh build/demo

# ---- experts over several ranks ----

EXPERT_PARALLEL = examples/expert_parallel.c $(wildcard examples/expert_parallel/*.h) examples/files.h examples/gguf.h examples/gpu.h examples/quantize.h moe_route.h

build/expert_parallel: $(EXPERT_PARALLEL) | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ examples/expert_parallel.c $(LDLIBS)

ranks: build/expert_parallel
	build/expert_parallel $(RANKS)

# The same under AddressSanitizer and UndefinedBehaviorSanitizer, and a stand-in for NCCL.
build/sanitized_expert_parallel: $(EXPERT_PARALLEL) | build
	$(CC) $(SANITIZED) $(SANITIZE) -Wall -Wextra -I. -o $@ examples/expert_parallel.c $(LDLIBS)

build/stand_in/libnccl.so.2: tests/programs/stand_in_nccl.c | build
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(WARNINGS) -fPIC -shared -Wl,-soname,libnccl.so.2 -o $@ $< -ldl

# ---- the small examples, each showing one thing ----

EXAMPLES = replace_loop graph_decode verify_batch router_only mul_mat_id two_gpus
EXAMPLE_HEADERS = examples/example.h examples/gpu.h examples/quantize.h moe_route.h
CUDART = $(if $(and $(wildcard $(CUDA)/include/cuda_runtime.h),$(wildcard $(CUDA)/lib64/libcudart_static.a)),build/examples/cudart)

examples: $(EXAMPLES:%=build/examples/%) build/examples/pack_make $(CUDART) lib
	@echo "built in build/examples; examples/torch_layer.py uses build/libmoe_route.so"

build/examples/%: examples/%.c $(EXAMPLE_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ $< $(LDLIBS)

build/examples/pack_make: examples/pack.c $(EXAMPLE_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ $< $(LDLIBS)

build/examples/cudart: examples/cudart.cpp moe_route.h
	@mkdir -p $(@D)
	$(CXX) $(CFLAGS) $(WARNINGS) -std=c++17 -I. -isystem $(CUDA)/include -o $@ $< -L$(CUDA)/lib64 -lcudart_static -lrt $(LDLIBS)

build/sanitized_examples/%: examples/%.c $(EXAMPLE_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZED) $(SANITIZE) $(WARNINGS) -Werror -std=c99 -D_POSIX_C_SOURCE=200809L -I. -o $@ $< $(LDLIBS)

# ---- a layer of any checkpoint ----

build/run_layer: examples/run_layer.c $(wildcard examples/*.h) moe_route.h | build/cjson
	$(CC) $(CFLAGS) $(CJSON_CFLAGS) $(WARNINGS) -I. -o $@ examples/run_layer.c $(CJSON_LIBS) $(LDLIBS)

run_layer: build/run_layer

build/sanitized_run_layer: examples/run_layer.c $(wildcard examples/*.h) moe_route.h | build/cjson
	$(CC) $(SANITIZED) $(SANITIZE) $(CJSON_CFLAGS) $(WARNINGS) -I. -o $@ examples/run_layer.c $(CJSON_LIBS) $(LDLIBS)

# ---- the command: info, warm, bench, route, check ----

# Without cJSON there is no --config, and the command says so.
WITH_CJSON = $(if $(shell printf '\043include <cjson/cJSON.h>\n' | $(CC) $(CJSON_CFLAGS) -E - >/dev/null 2>&1 && echo yes),-DHAVE_CJSON $(CJSON_CFLAGS))
COMMAND_SOURCES = $(wildcard tools/moe_route/*) $(wildcard tests/support/*.h) bench/draws.h bench/floors.h examples/gpu.h examples/quantize.h moe_route.h
COMMAND = -I. $(WITH_CJSON) -o $@ tools/moe_route/main.c $(LDLIBS) $(if $(WITH_CJSON),$(CJSON_LIBS))

build/moe_route: $(COMMAND_SOURCES) | build
	$(CC) $(CFLAGS) $(WARNINGS) $(COMMAND)

build/sanitized_command: $(COMMAND_SOURCES) | build
	$(CC) $(SANITIZED) $(SANITIZE) -Wall -Wextra $(COMMAND)

bench: build/moe_route
	@tools/with_nvrtc.sh -s 4 build/moe_route bench $(BENCH)

# ---- the benchmark of large batches ----

build/bench_large: bench/large.c bench/draws.h bench/floors.h examples/gpu.h moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ bench/large.c $(LDLIBS)

# ---- tests ----

include tests/emulation/emulation.mk

SUPPORT = $(wildcard tests/support/*.h examples/*.h) moe_route.h
DEVICE_TESTS = test_route test_presets test_maps test_activations test_formats test_sizes test_layer test_large test_epilogue test_blocks \
    test_dispatch test_ranks
GPU_TESTS = test_tune # of what only GPUs have
HOST_TESTS = test_safetensors test_gguf test_errors test_router_errors test_cache test_cache_faults test_cache_threads test_cache_trim test_packs
SANITIZED = -O1 -g -fno-omit-frame-pointer

build/test_%: tests/test_%.c $(SUPPORT) | build/cjson
	$(CC) $(CFLAGS) $(CJSON_CFLAGS) -Wall -Wextra -I. -o $@ $< $(CJSON_LIBS) $(LDLIBS)

# The same under AddressSanitizer and UndefinedBehaviorSanitizer: for the host's own code, and for the emulated device.
build/sanitized_%: tests/test_%.c $(SUPPORT) | build/cjson
	$(CC) $(SANITIZED) $(SANITIZE) $(CJSON_CFLAGS) -Wall -Wextra -I. -o $@ $< $(CJSON_LIBS) $(LDLIBS)

# And under ThreadSanitizer.
build/threads_%: tests/test_%.c $(SUPPORT) | build
	$(CC) $(SANITIZED) -fsanitize=thread -Wall -Wextra -I. -o $@ $< $(LDLIBS)

THREAD_RUNS = build/threads_cache_threads

# A whole process, for the tests that look at one from outside.
build/one_layer build/cub_maps: build/%: tests/programs/%.c tests/support/cubin.h moe_route.h | build
	$(CC) $(CFLAGS) -Wall -Wextra -I. -o $@ $< $(LDLIBS)

SCRIPTS = tests/test_header.sh tests/test_demo.sh tests/test_run_layer.sh tests/test_effects.sh tests/test_nvrtc.sh tests/test_fuzz.sh \
    tests/test_windows.sh tests/test_command.sh tests/test_install.sh tests/test_dist.sh tests/test_static.sh tests/test_docs.sh \
    tests/test_expert_parallel.sh \
    'MOE_ROUTE_TEST_EMULATION="$(EMULATION_ENVIRONMENT)" tests/test_examples.sh'
PROGRAMS = build/demo build/run_layer build/sanitized_run_layer build/moe_route build/sanitized_command build/bench_large build/bench_startup build/one_layer build/cub_maps build/test_nvrtc build/embed_cub \
    build/expert_parallel build/sanitized_expert_parallel build/stand_in/libnccl.so.2
OLD_GPU = '$(EMULATION_ENVIRONMENT) MOE_ROUTE_EMULATION_TARGET=75 build/sanitized_old_gpu'
HOST_RUNS = $(HOST_TESTS:test_%=build/sanitized_%) $(GPU_TESTS:test_%=build/sanitized_%) $(THREAD_RUNS) $(DEVICE_TESTS:%=build/%) build/test_compile build/test_resources
SANITIZED_RUNS = $(DEVICE_TESTS:test_%=build/sanitized_%)
# The emulated device draws the order in which warps and lanes run from a seed. Before compute capability 9.0, other kernels multiply quantized weights.
EMULATED_RUNS = $(foreach seed,1 2,$(SANITIZED_RUNS:%='$(EMULATION_ENVIRONMENT) MOE_ROUTE_EMULATION_SEED=$(seed) TEST_DEVICE=gpu TEST_SIZE=small %')) \
    $(GPU_TESTS:test_%='$(EMULATION_ENVIRONMENT) TEST_DEVICE=gpu build/sanitized_%') \
    $(foreach test,formats layer sizes,'$(EMULATION_ENVIRONMENT) MOE_ROUTE_EMULATION_TARGET=80 TEST_DEVICE=gpu TEST_SIZE=small build/sanitized_$(test)')

test: moe_route.h $(PROGRAMS) $(EXAMPLES:%=build/sanitized_examples/%) build/sanitized_examples/pack examples build/sanitized_old_gpu $(HOST_RUNS) $(SANITIZED_RUNS) $(EMULATION_TESTS) $(EMULATION_LIBRARIES)
	tests/run.sh $(SCRIPTS) $(OLD_GPU) $(HOST_RUNS) $(EMULATION_TESTS:%='$(EMULATION_ENVIRONMENT) %') \
	    $(SANITIZED_RUNS:%='TEST_SIZE=small %') $(EMULATED_RUNS)

# What creating a layer costs: cold, warm, and with a pack.
build/bench_startup: bench/startup.c moe_route.h | build
	$(CC) $(CFLAGS) $(WARNINGS) -I. -o $@ $< $(LDLIBS)

test-gpu: moe_route.h build/demo build/run_layer build/sanitized_run_layer build/moe_route $(DEVICE_TESTS:%=build/%) $(GPU_TESTS:%=build/%) examples
	tests/run.sh $(DEVICE_TESTS:%='TEST_DEVICE=gpu build/%') $(GPU_TESTS:%='TEST_DEVICE=gpu build/%') 'tests/test_examples.sh --gpu' 'TEST_DEVICE=gpu tests/test_run_layer.sh' \
	    'build/demo --gpu >build/demo.txt && echo PASS demo_on_the_gpu' 'build/moe_route check >build/check.txt && echo PASS check_of_the_gpu'

# The files that .clang-format can keep as they are.
format:
	clang-format -i --style=file $$(cat tests/static/formatted.txt)

clean:
	rm -rf build dist

.PHONY: all fresh dist dist/moe_route.h install install-lib uninstall lib demo ranks run_layer examples bench test test-gpu format clean
