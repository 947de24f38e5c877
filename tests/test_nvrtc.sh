#!/bin/sh
# test_nvrtc.sh: several versions of NVRTC from PyPI: what each compiles, and in which places one is found. Where toolkits are
# installed they are hidden in a mount namespace of this test's own, so that only the places that it prepares have one.
# Prints PASS, FAIL and SKIP lines; run from the repository root. Downloads are kept in build/nvrtc-VERSION.
set -u
versions="12.0.140 12.4.127 12.9.86 13.0.88 newest"
root=$PWD
status=0
pass() { echo "PASS $1"; }
fail() {
    echo "FAIL $1: $(echo "$2" | head -c 400 | tr '\n' ' ')"
    status=1
}

lib_of() { ls -d "$root/build/nvrtc-$1"/nvidia/*/lib 2>/dev/null | head -n 1; }

# fetch VERSION: into build/nvrtc-VERSION, in one step.
fetch() {
    [ -n "$(lib_of "$1")" ] && return 0
    case $1 in
        12.*) package=nvidia-cuda-nvrtc-cu12==$1 ;;
        newest) package=nvidia-cuda-nvrtc ;;
        *) package=nvidia-cuda-nvrtc==$1 ;;
    esac
    rm -rf "build/nvrtc-$1.part"
    python3 -m pip install --quiet --no-deps --timeout 30 --retries 1 --target "build/nvrtc-$1.part" "$package" >build/nvrtc.log 2>&1 || return 1
    mv "build/nvrtc-$1.part" "build/nvrtc-$1"
}

# ---- what each version compiles ----
each_version() {
    for version in $versions; do
        if ! fetch "$version"; then
            echo "SKIP nvrtc_$version: PyPI can't be reached: $(tail -n 1 build/nvrtc.log | head -c 200)"
            continue
        fi
        LOCPATH=$root/build/locale MOE_ROUTE_NVRTC_PATH=$(lib_of "$version") build/test_nvrtc >build/nvrtc.out 2>build/nvrtc.log || {
            status=1
            grep -q '^FAIL' build/nvrtc.out || fail "nvrtc_$version" "$(tail -n 3 build/nvrtc.log)"
        }
        sed "s/^\(PASS\|FAIL\|SKIP\) /&nvrtc_$version /" build/nvrtc.out
    done
}

# ---- where it is found ----
# run [NAME=VALUE]... -- [ARGUMENT]...: the program with these variables and no others.
run() {
    variables=
    while [ "$1" != -- ]; do
        variables="$variables $1"
        shift
    done
    shift
    env -i PATH="$PATH" HOME="$work/home" MOE_ROUTE_CACHE_DIR=off $variables "$program" "$@" 2>&1
}

# finds NAME VERSION FOLDER [NAME=VALUE]... -- [ARGUMENT]...
finds() {
    name=$1
    wanted="nvrtc $2 $3"
    shift 3
    out=$(run "$@")
    case $out in
        OK*"$wanted") pass "finds_$name" ;;
        *) fail "finds_$name" "wanted $wanted, got: $out" ;;
    esac
}

. tests/support/says.sh

finding() {
    a=$(lib_of 12.4.127)
    b=$(lib_of 13.0.88)
    program=$root/build/one_layer
    work=$(mktemp -d) || exit 1
    trap 'rm -rf "$work"' EXIT
    site=lib/python3.11/site-packages/nvidia
    mkdir -p "$work/home/.local/$site" "$work/venv/$site/cu13" "$work/venv12/$site/cuda_nvrtc" "$work/both/$site/cu13" "$work/both/$site/cuda_nvrtc" \
        "$work/toolkit12" "$work/toolkit13/targets/x86_64-linux" "$work/conda" "$work/beside" "$work/empty" "$work/alone"
    ln -s "$b" "$work/venv/$site/cu13/lib"
    ln -s "$a" "$work/venv12/$site/cuda_nvrtc/lib"
    ln -s "$b" "$work/both/$site/cu13/lib"
    ln -s "$a" "$work/both/$site/cuda_nvrtc/lib"
    ln -s "$a" "$work/toolkit12/lib64"
    ln -s "$b" "$work/toolkit13/targets/x86_64-linux/lib"
    ln -s "$b" "$work/conda/lib"

    says nothing_is_there pip~install~nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 CUDA~toolkit MOE_ROUTE_NVRTC_PATH the~system\'s~library~path "$root/build" -- --
    says where_it_looked "$work/empty/lib64" "$work/empty/lib" -- "CUDA_HOME=$work/empty" --
    says a_named_file_that_is_missing MOE_ROUTE_NVRTC_PATH /nonexistent/libnvrtc.so -- MOE_ROUTE_NVRTC_PATH=/nonexistent/libnvrtc.so --
    says a_named_folder_that_is_empty MOE_ROUTE_NVRTC_PATH "$work/empty" -- "MOE_ROUTE_NVRTC_PATH=$work/empty" --
    echo text >"$work/libnvrtc.so.12"
    says a_file_that_is_no_library "$work/libnvrtc.so.12" can\'t~be~loaded -- "MOE_ROUTE_NVRTC_PATH=$work/libnvrtc.so.12" --
    says another_library libm.so.6 no~function~nvrtcVersion -- MOE_ROUTE_NVRTC_PATH=libm.so.6 --
    cp "$a/libnvrtc.so.12" "$work/alone/"
    says builtins_are_missing libnvrtc-builtins.so.12.4 NVRTC_ERROR_BUILTIN_OPERATION_FAILURE failed~to~open -- "MOE_ROUTE_NVRTC_PATH=$work/alone" --

    finds a_named_folder 12040 "$a" "MOE_ROUTE_NVRTC_PATH=$a" "CUDA_HOME=$work/toolkit13" --
    finds a_named_file 12040 "$a" "MOE_ROUTE_NVRTC_PATH=$a/libnvrtc.so.12" "CUDA_HOME=$work/toolkit13" --
    finds what_is_loaded 12040 "$a" "CUDA_HOME=$work/toolkit13" -- --load "$a/libnvrtc.so.12"
    finds cuda_home 12040 "$work/toolkit12/lib64" "CUDA_HOME=$work/toolkit12" "LD_LIBRARY_PATH=$b" --
    finds cuda_path 13000 "$work/toolkit13/targets/x86_64-linux/lib" "CUDA_PATH=$work/toolkit13" "VIRTUAL_ENV=$work/venv12" --
    finds the_library_path 12040 "$a" "LD_LIBRARY_PATH=$a" "VIRTUAL_ENV=$work/venv" --
    finds pip_of_cuda_13 13000 "$work/venv/$site/cu13/lib" "VIRTUAL_ENV=$work/venv" --
    finds pip_of_cuda_12 12040 "$work/venv12/$site/cuda_nvrtc/lib" "VIRTUAL_ENV=$work/venv12" --
    finds conda 13000 "$work/conda/lib" "CONDA_PREFIX=$work/conda" --
    rmdir "$work/home/.local/$site"
    ln -s "$work/venv12/$site" "$work/home/.local/$site"
    finds pip_for_the_user 12040 "$work/home/.local/$site/cuda_nvrtc/lib" --
    rm "$work/home/.local/$site"
    cp "$program" "$work/beside/"
    program=$work/beside/one_layer
    ln -s "$a/libnvrtc.so.12" "$a/libnvrtc-builtins.so.12.4" "$work/beside/"
    finds the_programs_folder 12040 "$work/beside" --
    program=$root/build/one_layer

    # a major no newer than the driver's, where there is a choice
    finds 12_for_a_driver_of_12 12040 "$work/both/$site/cuda_nvrtc/lib" "VIRTUAL_ENV=$work/both" -- --driver 12080
    finds 13_for_a_driver_of_13 13000 "$work/both/$site/cu13/lib" "VIRTUAL_ENV=$work/both" -- --driver 13000
    finds 13_for_a_driver_of_12_without_choice 13000 "$work/venv/$site/cu13/lib" "VIRTUAL_ENV=$work/venv" -- --driver 12080
    finds 12_in_a_later_place_for_a_driver_of_12 12040 "$work/venv12/$site/cuda_nvrtc/lib" "CUDA_HOME=$work/toolkit13" "VIRTUAL_ENV=$work/venv12" -- --driver 12080

    # the toolkit's usual folder, which is empty in this namespace
    if [ -d /usr/local/cuda ] && [ "$hidden" = 1 ] && ln -s "$a" /usr/local/cuda/lib64 2>/dev/null; then
        finds the_usual_toolkit 12040 /usr/local/cuda/lib64 "LD_LIBRARY_PATH=$b" --
        rm /usr/local/cuda/lib64
    else
        echo "SKIP finds_the_usual_toolkit: there is no /usr/local/cuda that can be replaced"
    fi
}

# Covers every folder in which the system would find NVRTC.
hide() {
    for place in /usr/local/cuda /usr/local/cuda-12 /usr/local/cuda-13 $(ldconfig -p | sed -n 's/.*libnvrtc[^ ]* .*=> \(.*\)\/[^/]*$/\1/p' | sort -u); do
        [ ! -d "$place" ] || mount -t tmpfs none "$place" || return 1
    done
}
visible() { [ -d /usr/local/cuda ] || [ -d /usr/local/cuda-12 ] || [ -d /usr/local/cuda-13 ] || ldconfig -p | grep -q libnvrtc; }

if [ "${1:-}" = hidden ]; then
    hide || exit 99
    hidden=1
    finding
    exit $status
fi
mkdir -p build
each_version
if [ -z "$(lib_of 12.4.127)" ] || [ -z "$(lib_of 13.0.88)" ]; then
    echo "SKIP finding_nvrtc: PyPI can't be reached, and there is no NVRTC in build/"
elif ! visible; then
    hidden=0
    finding
elif unshare -m true 2>/dev/null; then
    unshare -m "$0" hidden
    result=$?
    if [ $result -eq 99 ]; then echo "SKIP finding_nvrtc: the installed toolkit can't be hidden"; elif [ $result -ne 0 ]; then status=1; fi
else
    echo "SKIP finding_nvrtc: a toolkit is installed, and hiding it takes a mount namespace"
fi
exit $status
