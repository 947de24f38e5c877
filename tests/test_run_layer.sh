#!/bin/sh
# test_run_layer.sh: examples/run_layer.c on checkpoints that the PyPI packages safetensors and gguf write, and on damaged ones.
# tests/tools/check_run_layer.py does the work. The packages are kept in build/checkpoint_packages. TEST_DEVICE chooses the device.
# Prints PASS, FAIL and SKIP lines; run from the repository root.
set -u
packages=$PWD/build/checkpoint_packages
status=0
build/run_layer >/dev/null 2>&1
if [ $? -eq 64 ]; then echo "PASS run_layer_needs_a_model"; else echo "FAIL run_layer_needs_a_model: status isn't 64"; status=1; fi
command=$(sed -n 's/^    \(build\/run_layer .*\)$/\1/p' README.md)
if [ -n "$command" ] && $command --device "${TEST_DEVICE:-cpu}" | grep -q '32 experts, top-4'; then echo "PASS run_layer_as_in_the_readme"; else echo "FAIL run_layer_as_in_the_readme: $command"; status=1; fi
if [ ! -d "$packages" ]; then
    rm -rf "$packages.part"
    if python3 -m pip install --quiet --timeout 30 --retries 1 --target "$packages.part" safetensors==0.8.0 gguf==0.19.0 ml_dtypes==0.6.0 numpy >build/packages.log 2>&1; then
        mv "$packages.part" "$packages"
    else
        echo "SKIP run_layer: PyPI can't be reached, or hasn't safetensors, gguf and ml_dtypes for this Python: $(tail -n 1 build/packages.log | head -c 200)"
        exit $status
    fi
fi
check() { # PROGRAM [PART...]
    program=$1
    shift
    PYTHONPATH=$packages python3 tests/tools/check_run_layer.py "$program" build/run_layer_files "$@" >build/run_layer.out 2>build/run_layer.log || {
        status=1
        grep -q '^FAIL' build/run_layer.out || echo "FAIL run_layer: $(tail -n 3 build/run_layer.log | head -c 400 | tr '\n' ' ')"
    }
    cat build/run_layer.out
}
check build/run_layer
check build/sanitized_run_layer damage
if [ -z "${TEST_DEVICE:-}" ] && [ -e build/emulation/libcuda.so.1 ]; then # the GPU's path, on the emulated one
    export TEST_DEVICE=gpu LD_LIBRARY_PATH="$PWD/build/emulation" MOE_ROUTE_CACHE_DIR="$PWD/build/emulation/cache" \
        MOE_ROUTE_NVRTC_PATH="$PWD/build/emulation/libnvrtc.so.13"
    check build/sanitized_run_layer gpt_oss_model
fi
exit $status
