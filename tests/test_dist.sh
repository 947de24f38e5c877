#!/bin/sh
# test_dist.sh: dist/moe_route.h, with CUB's headers in it: its size, its licences, that it compiles without a warning, and that its code is
# that of the headers on disk, to the byte, for each architecture. And where moe_route.h finds CUB, and what it says where there is none.
# Where toolkits are installed they are hidden in a mount namespace of this test's own, so that only the places that it prepares have one.
# Needs NVRTC and CUB (CCCL of the Makefile), no GPU. Prints PASS, FAIL and SKIP lines; run from the repository root.
set -u
root=$PWD
status=0
if [ "${1:-}" = hidden ]; then
    work=$2 # the caller's, who removes it: a toolkit's folder is mounted in it here
else
    work=$(mktemp -d) || exit 1
    trap 'rm -rf "$work"' EXIT
fi
pass() { echo "PASS $1"; }
fail() {
    echo "FAIL $1: $(echo "$2" | tail -c 500 | tr '\n' ' ')"
    status=1
}

# check NAME COMMAND...: passes when the command does.
check() {
    name=$1
    shift
    if "$@" >"$work/out" 2>&1; then pass "$name"; else fail "$name" "$(cut -c 1-300 "$work/out")"; fi
}
have() { command -v "$1" >/dev/null 2>&1; }

# ---- where moe_route.h finds CUB ----
# A folder whose CUB can be told from others: to compile with it fails, and the message names it.
stand_in() {
    mkdir -p "$1/cub/block"
    echo '#error a stand-in for CUB' >"$1/cub/block/block_radix_rank.cuh"
}

# run [NAME=VALUE]...: compiles maps by CUB with these variables and no others.
run() { env -i PATH="$PATH" HOME="$work/home" MOE_ROUTE_CACHE_DIR=off "MOE_ROUTE_NVRTC_PATH=$alone" "$@" "$root/build/cub_maps" 90:16 2>&1; }

# finds NAME FOLDER [NAME=VALUE]...
finds() {
    name=$1
    folder=$2
    shift 2
    out=$(run "$@")
    case $out in
        *"CUB is from $folder. "*) pass "finds_cub_$name" ;;
        *) fail "finds_cub_$name" "wanted $folder, got: $out" ;;
    esac
}

. tests/support/says.sh

finding() {
    site=lib/python3.11/site-packages/nvidia
    stand_in "$work/named"
    stand_in "$work/toolkit13/include/cccl"
    stand_in "$work/toolkit12/include"
    stand_in "$work/targets/targets/x86_64-linux/include/cccl"
    stand_in "$work/venv/$site/cu13/include/cccl"
    stand_in "$work/venv12/$site/cuda_nvrtc/../cuda_cccl/include"
    stand_in "$work/conda/include"
    stand_in "$work/home/.local/$site/cu13/include/cccl"
    mkdir -p "$work/empty" "$work/beside/lib" "$work/beside12/cuda_nvrtc"
    finds named "$work/named" "MOE_ROUTE_CUB_PATH=$work/named" "CUDA_HOME=$work/toolkit13"
    says cub_is_not_where_named MOE_ROUTE_CUB_PATH "$work/empty" cub/block/block_radix_rank.cuh -- "MOE_ROUTE_CUB_PATH=$work/empty" "CUDA_HOME=$work/toolkit13"
    finds cuda_home "$work/toolkit13/include/cccl" "CUDA_HOME=$work/toolkit13" "CUDA_PATH=$work/toolkit12"
    finds cuda_path "$work/toolkit12/include" "CUDA_PATH=$work/toolkit12" "VIRTUAL_ENV=$work/venv"
    finds targets "$work/targets/targets/x86_64-linux/include/cccl" "CUDA_HOME=$work/targets"
    # beside NVRTC, of a toolkit and of pip's packages for CUDA 12, before what the environment says
    ln -s "$alone"/libnvrtc* "$work/beside/lib/"
    stand_in "$work/beside/include/cccl"
    finds beside_nvrtc "$work/beside/include/cccl" "MOE_ROUTE_NVRTC_PATH=$work/beside/lib" "CUDA_HOME=$work/toolkit12"
    ln -s "$work/beside/lib" "$work/beside12/cuda_nvrtc/lib"
    stand_in "$work/beside12/cuda_cccl/include"
    finds beside_nvrtc_by_pip "$work/beside12/cuda_cccl/include" "MOE_ROUTE_NVRTC_PATH=$work/beside12/cuda_nvrtc/lib" "CUDA_HOME=$work/toolkit13"
    if [ "$hidden" = 0 ] && [ -e /usr/local/cuda/include ]; then
        echo "SKIP finds_cub_of_pip: a toolkit is installed, and hiding it takes a mount namespace"
        return
    fi
    finds pip_of_cuda_13 "$work/venv/$site/cu13/include/cccl" "VIRTUAL_ENV=$work/venv"
    finds pip_of_cuda_12 "$work/venv12/$site/cuda_cccl/include" "VIRTUAL_ENV=$work/venv12"
    finds conda "$work/conda/include" "CONDA_PREFIX=$work/conda"
    finds pip_for_the_user "$work/home/.local/$site/cu13/include/cccl"
    says cub_is_not_there CUDA~toolkit pip~install~nvidia-cuda-cccl MOE_ROUTE_CUB_PATH dist/moe_route.h make~dist cub_maps~OFF "$work/empty/include" -- HOME=/nonexistent "CUDA_HOME=$work/empty"
}

# NVRTC's folder: what the environment names, or the toolkit's.
nvrtc=${MOE_ROUTE_NVRTC_PATH:-${CUDA_HOME:-/usr/local/cuda}/lib64}
# The same where it can't be seen that it belongs to a toolkit.
alone=$work/alone/nvrtc/lib
mkdir -p "$alone" "$work/empty/include"
if [ "${1:-}" = hidden ]; then
    mount --bind -o ro "$nvrtc" "$alone" || exit 99
    for place in /usr/local/cuda /usr/local/lib; do
        [ ! -d "$place" ] || mount -t tmpfs none "$place" || exit 99
    done
    hidden=1
    finding
    exit $status
fi
if [ ! -d "$nvrtc" ]; then
    echo "SKIP finds_cub: no folder with NVRTC"
elif unshare -m true 2>/dev/null; then
    unshare -m "$0" hidden "$work"
    result=$?
    if [ $result -eq 99 ]; then echo "SKIP finds_cub: the installed toolkit can't be hidden"; elif [ $result -ne 0 ]; then status=1; fi
else
    ln -s "$nvrtc"/libnvrtc* "$alone/"
    hidden=0
    finding
fi

# ---- dist/moe_route.h ----
if ! make -s dist/moe_route.h >"$work/out" 2>&1; then
    if grep -q "CUB isn't found" "$work/out"; then
        echo "SKIP dist: CUB isn't installed"
    else
        fail dist_is_made "$(cat "$work/out")"
    fi
    exit $status
fi
size=$(wc -c <dist/moe_route.h)
check "dist_is_below_2_MB" test "$size" -lt 2000000
check dist_is_moe_route_h_otherwise sh -c 'sed "/^#define MOE_ROUTE_IMPLEMENTED/q" dist/moe_route.h | cmp -n "$(sed "/^#define MOE_ROUTE_IMPLEMENTED/q" moe_route.h | wc -c)" - moe_route.h'
licences() {
    for text in 'Redistribution and use in source and binary forms' 'Duane Merrill' 'Apache License v2.0 with LLVM Exceptions' 'Licensed under the Apache License, Version 2.0' \
        'TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION'; do
        grep -q "$text" dist/moe_route.h || { echo "$text is missing"; return 1; }
    done
}
check dist_has_the_licences licences
cccl=$(make -s --eval='print: ; @echo $(CCCL)' print 2>/dev/null) # a make within a make -j has warnings to give
no_licence() { ! build/embed_cub "$work/none.h" moe_route.h "$cccl" LICENSE && test ! -e "$work/none.h"; }
check dist_needs_the_licences no_licence

warnings="-Wall -Wextra -Wconversion -Wshadow -pedantic -Werror"
program() {
    compiler=$1
    standard=$2
    source=$3
    "$compiler" -std="$standard" $warnings -Idist "$source" -o "$work/program" -lm -ldl -lpthread && "$work/program"
}
for compiler in gcc clang; do
    if have $compiler; then
        check "dist_compiles_${compiler}_c99" program $compiler c99 examples/minimal.c
        check "dist_compiles_${compiler}++" program "$(echo $compiler | sed 's/gcc/g++/; s/clang/clang++/')" c++17 examples/minimal.cpp
    else
        echo "SKIP dist_compiles_$compiler: $compiler isn't installed"
    fi
done
windows() { x86_64-w64-mingw32-gcc -std=c99 $warnings -Idist examples/minimal.c -o "$work/program.exe" -lm; }
if have x86_64-w64-mingw32-gcc; then check dist_compiles_mingw windows; else echo "SKIP dist_compiles_mingw: x86_64-w64-mingw32-gcc isn't installed"; fi

# The same cubins as with the headers on disk, without a look at the disk.
gcc -O1 -Idist -o "$work/embedded" tests/programs/cub_maps.c -lm -ldl -lpthread 2>"$work/out" || fail dist_compiles_the_test "$(cut -c 1-300 "$work/out")"
variants="80:256 86:256 89:256 90:256 100:256 120:256 90:64 120:64 120:768"
if [ -d "$nvrtc" ]; then
    MOE_ROUTE_CACHE_DIR=$work/cache MOE_ROUTE_CUB_PATH=/nonexistent CUDA_HOME=/nonexistent MOE_ROUTE_NVRTC_PATH=$nvrtc "$work/embedded" $variants >"$work/embedded.txt" 2>&1 &
    MOE_ROUTE_CACHE_DIR=off MOE_ROUTE_CUB_PATH=$cccl build/cub_maps $variants >"$work/disk.txt" 2>&1
    on_disk=$?
    wait
    check cub_on_disk_compiles sh -c "cat '$work/disk.txt'; exit $on_disk"
    check dist_makes_the_same_cubins diff "$work/disk.txt" "$work/embedded.txt"
    check no_spills test "$(grep -c ', 0 bytes of local memory' "$work/embedded.txt")" -eq "$(echo $variants | wc -w)"
    # What is kept needs neither NVRTC nor CUB, and is found by either build.
    kept() { MOE_ROUTE_CACHE_DIR=$work/cache MOE_ROUTE_CUB_PATH=/nonexistent MOE_ROUTE_NVRTC_PATH=/nonexistent build/cub_maps $variants | diff "$work/embedded.txt" -; }
    check kept_maps_need_no_cub kept
else
    echo "SKIP dist_makes_the_same_cubins: no folder with NVRTC"
fi
exit $status
