#!/bin/sh
# test_examples.sh: the small examples run: on the CPU backend, and on the emulated device with the environment that
# MOE_ROUTE_TEST_EMULATION gives; `tests/test_examples.sh --gpu` runs those of build/examples on a GPU instead. They compare what
# they compute themselves, and say so by their exit status. Prints PASS, FAIL and SKIP lines; run from the repository root.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0

# expect NAME TEXT COMMAND...: passes when the command succeeds and says the text.
expect() {
    name=$1
    text=$2
    shift 2
    if "$@" >"$work/out" 2>&1 && grep -q "$text" "$work/out"; then
        echo "PASS $name"
    else
        echo "FAIL $name: $(tail -n 5 "$work/out" | cut -c 1-300 | tr '\n' ' ')"
        failed=1
    fi
}
# says_no NAME STATUS TEXT COMMAND...: passes when the command ends with that status and says the text.
says_no() {
    name=$1 status=$2 text=$3
    shift 3
    "$@" >"$work/out" 2>&1
    if [ $? -eq "$status" ] && grep -q "$text" "$work/out"; then echo "PASS $name"; else echo "FAIL $name: $(tail -n 3 "$work/out" | tr '\n' ' ')"; failed=1; fi
}
# bytes FILE: as elements of a C array.
bytes() { od -An -v -tx1 "$1" | sed 's/ *\([0-9a-f][0-9a-f]\)/0x\1,/g'; }
# with_pack FLAGS...: builds the program that carries the pack.
with_pack() { cc "$@" -DPACK="\"$work/model_pack.inc\"" -I. examples/pack.c -o "$work/pack_run" -lm -ldl -lpthread; }

# everywhere PLACE PROGRAMS ENVIRONMENT...: what runs on a GPU, or what stands for one.
everywhere() {
    place=$1 programs=$2
    shift 2
    expect "replace_loop_on_the_$place" "from the loop" env "$@" "$programs/replace_loop"
    expect "graph_decode_on_the_$place" "the same bits" env "$@" "$programs/graph_decode"
    expect "verify_batch_on_the_$place" "the same bits" env "$@" "$programs/verify_batch"
    expect "router_only_on_the_$place" "40 rows" env "$@" "$programs/router_only"
    expect "mul_mat_id_on_the_$place" "largest difference" env "$@" "$programs/mul_mat_id"
    expect "two_gpus_on_the_$place" "thread 1" env "$@" "$programs/two_gpus"
}

if [ "${1:-}" = --gpu ]; then
    everywhere gpu build/examples TEST=1
    expect pack_is_made "sm_90" build/examples/pack_make "$work/model.moep" 80 86 89 90 100 120
    bytes "$work/model.moep" >"$work/model_pack.inc"
    with_pack -O2 && expect pack_runs_without_nvrtc "0 compiled, NVRTC not loaded" env MOE_ROUTE_NVRTC_PATH=/nowhere MOE_ROUTE_CACHE_DIR=off "$work/pack_run"
    [ ! -x build/examples/cudart ] || expect cudart "y\[0\]" build/examples/cudart
    if python3 -c 'import torch' 2>/dev/null; then
        expect python_with_torch "PyTorch's GPU" env MOE_ROUTE_LIBRARY=build/libmoe_route.so python3 examples/torch_layer.py
    else
        echo "SKIP python_with_torch: no PyTorch"
    fi
    exit $failed
fi

programs=build/sanitized_examples
expect replace_loop_on_the_cpu "from the loop" $programs/replace_loop --cpu
expect verify_batch_on_the_cpu "the same bits" $programs/verify_batch --cpu
expect router_only_on_the_cpu "40 rows" $programs/router_only --cpu
expect mul_mat_id_on_the_cpu "largest difference" $programs/mul_mat_id --cpu
says_no graph_decode_says_that_it_needs_a_gpu 3 "need a GPU" $programs/graph_decode --cpu

if [ -n "${MOE_ROUTE_TEST_EMULATION:-}" ]; then
    emulation=$MOE_ROUTE_TEST_EMULATION
    everywhere emulated_gpu $programs $emulation
    expect pack_is_made_with_the_emulated_nvrtc "sm_90: 3 variants" env $emulation $programs/pack "$work/model.moep" 80 90
    bytes "$work/model.moep" >"$work/model_pack.inc"
    with_pack -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined &&
        expect pack_runs_without_nvrtc "3 variants from the pack, 0 compiled, NVRTC not loaded" \
            env $emulation MOE_ROUTE_NVRTC_PATH=/nowhere MOE_ROUTE_CACHE_DIR=off "$work/pack_run"
fi

# ---- with the real NVRTC, for images of machines with other GPUs ----
if $programs/pack "$work/real.moep" 80 90 >"$work/real" 2>&1; then
    expect pack_for_sm_80_and_sm_90 "sm_80: [0-9]* variants" cat "$work/real"
    says_no pack_names_an_architecture_that_there_is_not 1 "compile_target" $programs/pack "$work/none.moep" 7
elif grep -q "NVRTC" "$work/real"; then
    echo "SKIP pack_for_sm_80_and_sm_90: no NVRTC"
else
    echo "FAIL pack_for_sm_80_and_sm_90: $(head -c 300 "$work/real")"
    failed=1
fi
says_no missing_nvrtc_is_explained 1 "/nowhere" env MOE_ROUTE_NVRTC_PATH=/nowhere $programs/pack "$work/none.moep" 90

# ---- C++ beside the CUDA runtime ----
if [ -x build/examples/cudart ]; then
    cuda=${CUDA_HOME:-/usr/local/cuda}
    clean() { g++ -std=c++17 -Wall -Wextra -Wconversion -Wshadow -pedantic -Werror -fsyntax-only -I. -isystem "$cuda/include" examples/cudart.cpp && echo clean; }
    expect cudart_example_is_clean clean clean
    build/examples/cudart >"$work/out" 2>&1
    case $? in
    0) echo "PASS cudart_example" ;;
    3) says_no cudart_example_says_that_there_is_no_gpu 3 "no GPU" build/examples/cudart ;;
    *) echo "FAIL cudart_example: $(head -c 300 "$work/out")"; failed=1 ;;
    esac
else
    echo "SKIP cudart_example: no CUDA toolkit"
fi

# ---- Python ----
if command -v python3 >/dev/null 2>&1; then
    expect python_structs_are_those_of_the_header "structs" python3 tests/check_ctypes.py
    if PYTHONPATH=build/python python3 -c 'import torch' 2>/dev/null || PYTHONPATH=build/python python3 -c 'import numpy' 2>/dev/null; then
        expect python_example "largest difference" env PYTHONPATH=build/python MOE_ROUTE_LIBRARY=build/libmoe_route.so python3 examples/torch_layer.py --cpu
    else
        echo "SKIP python_example: neither PyTorch nor numpy"
    fi
else
    echo "SKIP python_example: no python3"
fi
exit $failed
