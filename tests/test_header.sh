#!/bin/sh
# test_header.sh: moe_route.h is what src/ and kernels_src/ make, and compiles everywhere without a warning: alone and
# beside a second translation unit, as C and C++, with gcc, clang and mingw-w64, without and beside CUDA's headers.
# Prints PASS, FAIL and SKIP lines; run from the repository root.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
warnings="-Wall -Wextra -Wconversion -Wshadow -pedantic -Werror"
failed=0

# check NAME COMMAND...: passes when the command does.
check() {
    name=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        echo "PASS $name"
    else
        echo "FAIL $name: $(head -c 300 "$work/out" | tr '\n' ' ')"
        failed=1
    fi
}
have() { command -v "$1" >/dev/null 2>&1; }

# ---- the committed header ----
fresh() { make -s FRESH="$work/fresh.h" fresh && cmp moe_route.h "$work/fresh.h"; }
check header_is_fresh fresh
if git rev-parse --git-dir >/dev/null 2>&1; then
    if git diff --quiet HEAD -- src kernels_src tools Makefile LICENSE; then
        check header_is_committed git diff --stat --exit-code HEAD -- moe_route.h
    else
        echo "SKIP header_is_committed: the sources differ from the last commit"
    fi
else
    echo "SKIP header_is_committed: not a git checkout"
fi
no_cuda_headers() { ! cc -M -I. examples/minimal.c | grep -i '/cuda'; }
check header_needs_no_cuda_headers no_cuda_headers

# ---- every compiler and standard ----
# two_units COMPILER STANDARD LANGUAGE
two_units() {
    "$1" "$2" -x "$3" $warnings -I. -c tests/programs/first_unit.c -o "$work/first.o" &&
        "$1" "$2" -x "$3" $warnings -I. -c tests/programs/second_unit.c -o "$work/second.o" &&
        "$1" "$work/first.o" "$work/second.o" -o "$work/units" -lm -ldl -lpthread && "$work/units"
}
program() {
    source=$3
    "$1" "$2" $warnings -I. "$source" -o "$work/program" -lm -ldl -lpthread && "$work/program"
}
static_mode() { "$1" "$2" $warnings -DMOE_ROUTE_STATIC -I. examples/minimal.c -o "$work/program" -lm -ldl -lpthread && "$work/program"; }
for compiler in gcc clang; do
    have $compiler || { echo "SKIP compile_with_$compiler: $compiler isn't installed"; continue; }
    for standard in c99 c11 gnu17; do
        check "compile_${compiler}_$standard" program $compiler -std=$standard examples/minimal.c
        check "two_units_${compiler}_$standard" two_units $compiler -std=$standard c
    done
    check "static_$compiler" static_mode $compiler -std=c99
done
for compiler in g++ clang++; do
    have $compiler || { echo "SKIP compile_with_$compiler: $compiler isn't installed"; continue; }
    for standard in c++11 c++17 c++20; do
        check "compile_${compiler}_$standard" program $compiler -std=$standard examples/minimal.cpp
    done
    check "two_units_$compiler" two_units $compiler -std=c++17 c++
done
mixed() {
    gcc -std=c99 $warnings -I. -c tests/programs/first_unit.c -o "$work/first.o" &&
        g++ -std=c++17 -x c++ $warnings -I. -c tests/programs/second_unit.c -o "$work/second.o" &&
        g++ "$work/first.o" "$work/second.o" -o "$work/units" -lm -ldl -lpthread && "$work/units"
}
if have gcc && have g++; then check c_and_cpp_units mixed; fi
windows() { x86_64-w64-mingw32-gcc -std=c99 $warnings -I. examples/minimal.c -o "$work/program.exe" -lm; }
if have x86_64-w64-mingw32-gcc; then check compile_mingw windows; else echo "SKIP compile_mingw: x86_64-w64-mingw32-gcc isn't installed"; fi

# ---- beside CUDA's own headers ----
cuda=${CUDA_HOME:-/usr/local/cuda}/include
abi() { gcc -std=c11 -I. -I"$cuda" -fsyntax-only tests/check_cuda_abi.c && g++ -std=c++17 -x c++ -I. -I"$cuda" -fsyntax-only tests/check_cuda_abi.c; }
if [ -f "$cuda/cuda.h" ] && have gcc && have g++; then check agrees_with_cuda_h abi; else echo "SKIP agrees_with_cuda_h: no cuda.h"; fi
nccl_abi() { gcc -std=c11 -I. -I"$cuda" -fsyntax-only tests/check_nccl_abi.c && g++ -std=c++17 -x c++ -I. -I"$cuda" -fsyntax-only tests/check_nccl_abi.c; }
nccl_header() { [ -f "$cuda/cuda_runtime.h" ] && printf '#include <nccl.h>\n' | gcc -I"$cuda" -fsyntax-only -x c - 2>/dev/null; }
if have gcc && have g++ && nccl_header; then check agrees_with_nccl_h nccl_abi; else echo "SKIP agrees_with_nccl_h: no nccl.h"; fi

exit $failed
