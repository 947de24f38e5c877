# The emulated driver and NVRTC, for the kernels to run on the CPU. Included by the Makefile; all paths are relative to the
# folder that make runs in. Programs that use them are linked with $(SANITIZE) and run with $(EMULATION_ENVIRONMENT): the
# driver and NVRTC, even where real ones are installed, and a cubin cache of their own, which goes when they are rebuilt.

SANITIZE ?= -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
EMULATION := build/emulation
EMULATION_SOURCES := tests/emulation
EMULATION_WARNINGS := -Wall -Wextra -Wconversion -Wshadow
EMULATION_CFLAGS := -std=gnu11 -O2 -g -fPIC -fvisibility=hidden $(EMULATION_WARNINGS)
EMULATION_INCLUDES := $(patsubst %,$(EMULATION)/include/%,device.h machine.h numbers.h cub/block/block_radix_rank.cuh cub/block/block_scan.cuh)
EMULATION_LIBRARIES := $(EMULATION)/libcuda.so.1 $(EMULATION)/libnvrtc.so.13 $(EMULATION_INCLUDES)
EMULATION_ENVIRONMENT := LD_LIBRARY_PATH=$(EMULATION) MOE_ROUTE_NVRTC_PATH=$(CURDIR)/$(EMULATION)/libnvrtc.so.13 \
	MOE_ROUTE_CUB_PATH=$(CURDIR)/$(EMULATION)/include MOE_ROUTE_CACHE_DIR=$(CURDIR)/$(EMULATION)/cache
EMULATION_TESTS := $(EMULATION)/emulation_test $(EMULATION)/emulation_faults

.PHONY: emulation emulation-test
emulation: $(EMULATION_LIBRARIES)

emulation-test: $(EMULATION_TESTS) $(EMULATION_LIBRARIES)
	$(EMULATION_ENVIRONMENT) $(EMULATION)/emulation_test
	$(EMULATION_ENVIRONMENT) $(EMULATION)/emulation_faults

$(EMULATION)/libcuda.so.1: $(patsubst %,$(EMULATION_SOURCES)/%,driver.c memory.c streams.c modules.c machine.c driver.h launch.h \
		machine.h numbers.h emulation.mk)
	@mkdir -p $(@D)
	$(CC) $(EMULATION_CFLAGS) $(SANITIZE) -shared -Wl,-soname,libcuda.so.1 -o $@ $(filter %.c,$^) -ldl -lpthread

$(EMULATION)/libnvrtc.so.13: $(EMULATION_SOURCES)/nvrtc.c $(EMULATION_SOURCES)/emulation.mk
	@mkdir -p $(@D)
	@rm -rf $(EMULATION)/cache
	$(CC) $(EMULATION_CFLAGS) $(SANITIZE) -DEMULATION_CXX='"$(CXX)"' -DEMULATION_SANITIZE='"$(SANITIZE)"' \
		-shared -Wl,-soname,libnvrtc.so.13 -o $@ $(filter %.c,$^) -ldl

$(EMULATION)/include/%: $(EMULATION_SOURCES)/%
	@mkdir -p $(@D)
	@rm -rf $(EMULATION)/cache
	cp $< $@

$(EMULATION)/emulation_%: tests/emulation_%.c $(EMULATION_SOURCES)/harness.h $(EMULATION_SOURCES)/numbers.h
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O1 -g $(EMULATION_WARNINGS) -I$(EMULATION_SOURCES) $(SANITIZE) -o $@ $< -ldl -lm
