#!/bin/sh
# expert_parallel.sh [RANKS [FILE]]: experts over RANKS GPUs (default 2) with NCCL, and what goes wrong on purpose. Writes all that the
# runs print to FILE (default bench/results/h200x2-expert-parallel.txt) as well. Every run has a limit and none stops the others; together they
# take less than four minutes. NVLink multicast stays off (NCCL_NVLS_ENABLE=0). Run from the repository root.
set -u
ranks=${1:-2}
file=${2:-bench/results/h200x2-expert-parallel.txt}
NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_NVLS_ENABLE=0
export NCCL_DEBUG NCCL_NVLS_ENABLE
# NCCL, where the environment doesn't say: pip's, of a PyTorch that is here.
if [ -z "${NCCL_LIBRARY:-}" ]; then
    for found in /opt/*/.venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2 /opt/*/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2; do
        if [ -e "$found" ]; then NCCL_LIBRARY=$found && export NCCL_LIBRARY && break; fi
    done
fi
# NVRTC likewise, where there is no toolkit.
if [ -z "${MOE_ROUTE_NVRTC_PATH:-}" ] && ! ls "${CUDA_HOME:-/usr/local/cuda}"/lib64/libnvrtc.so* >/dev/null 2>&1; then
    for found in /opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.1[23] /opt/*/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.1[23]; do
        if [ -e "$found" ]; then MOE_ROUTE_NVRTC_PATH=$found && export MOE_ROUTE_NVRTC_PATH && break; fi
    done
fi
MOE_ROUTE_CACHE_DIR=${MOE_ROUTE_CACHE_DIR:-$PWD/build/cubins}
export MOE_ROUTE_CACHE_DIR
mkdir -p "$(dirname "$file")" build
begin=$(date +%s)
: >"$file"
say() { echo "$@" | tee -a "$file"; }

run() { # limit in seconds, then a command
    limit=$1
    shift
    left=$((230 - $(date +%s) + begin))
    if [ $left -lt 5 ]; then say "" && say "not run, the time is up: $*" && return; fi
    [ "$limit" -gt $left ] && limit=$left
    say ""
    say "\$ $*"
    start=$(date +%s)
    timeout -k 5 "$limit" "$@" >build/expert_parallel.out 2>&1
    status=$?
    cat build/expert_parallel.out >>"$file"
    cat build/expert_parallel.out
    say "(status $status, $(($(date +%s) - start)) s)"
}

say "experts over $ranks GPUs, $(uname -srm)"
nvidia-smi --query-gpu=index,name,driver_version,clocks.sm,clocks.mem --format=csv,noheader >>"$file" 2>&1
nvidia-smi topo -m >>"$file" 2>&1
say "NCCL_LIBRARY=${NCCL_LIBRARY:-} NCCL_NVLS_ENABLE=$NCCL_NVLS_ENABLE"
run 60 make build/expert_parallel build/test_dispatch build/test_ranks
program="build/expert_parallel --device gpu --ranks $ranks"

# Small first: one layer, one way. Then everything.
run 40 $program --layer trained --rows f32 --sizes fixed --deadline 15
run 60 $program --deadline 20
run 40 $program --deadline 20 --no-alltoall --sizes fixed --layer synthetic
run 30 $program --deadline 20 --layer synthetic --tokens 1 --sizes fixed
run 30 $program --deadline 20 --layer synthetic --tokens 64 --steps 2
run 30 $program --deadline 20 --layer synthetic --rows sums --skew --replicas 16
run 40 $program --deadline 15 --graph --sizes fixed
# A launcher's environment, without a launcher.
run 30 sh -c "for r in \$(seq 0 $((ranks - 1))); do RANK=\$r LOCAL_RANK=\$r WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=29611 build/expert_parallel --device gpu --layer trained --rows f32 --deadline 15 & done; wait"
# What goes wrong: status 1, and every other rank says why within the deadline.
for fault in die:1 hang:1 die-opened:0 mismatch-hidden:1; do
    run 30 $program --layer trained --rows f32 --sizes fixed --deadline 5 --fault $fault
done
# The library's own tests of this, on the first GPU.
run 40 env TEST_DEVICE=gpu build/test_dispatch
run 120 env TEST_DEVICE=gpu build/test_ranks
say ""
say "all in $(($(date +%s) - begin)) s"
