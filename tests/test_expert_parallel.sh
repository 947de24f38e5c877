#!/bin/sh
# test_expert_parallel.sh: examples/expert_parallel.c with ranks as processes. Over sockets on the CPU backend: the bits of one
# device for any number of ranks, empty ranks, replicas and skewed tokens; started by itself and by a launcher's environment. Then
# what goes wrong: every other rank ends with an error that names the reason, within its own deadline. Over a stand-in for NCCL
# and the emulated driver: the same. Run from the repository root.
set -u
work=$(mktemp -d "${TMPDIR:-/tmp}/expert_parallel.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
pass() { echo "PASS $1"; }
fail() {
    echo "FAIL $1: $2: $(tail -n 4 "$work/out" | tr '\n' ' ')"
    failed=1
}

program=build/sanitized_expert_parallel
small="--device cpu --hidden 64 --intermediate 64 --deadline 60"

# name, then options: all must be as expected, with as many lines of equal bits as the first word says
good() {
    name=$1 equal=$2
    shift 2
    timeout 300 $program "$@" >"$work/out" 2>&1
    status=$?
    if [ $status -ne 0 ]; then fail "$name" "status $status"
    elif [ "$(grep -c 'the same bits$' "$work/out")" -lt "$equal" ]; then fail "$name" "fewer than $equal lines have the same bits"
    elif ! grep -q 'All as expected' "$work/out"; then fail "$name" "it doesn't say so"
    else pass "$name"; fi
}

# name, how many ranks must fail, a text that stderr must hold, seconds, then options
bad() {
    name=$1 ranks=$2 text=$3 seconds=$4
    shift 4
    begin=$(date +%s)
    timeout 120 $program "$@" >"$work/out" 2>&1
    status=$?
    took=$(($(date +%s) - begin))
    if [ $status -ne 1 ]; then fail "$name" "status $status instead of 1"
    elif [ "$(grep -c 'ended with status 1$' "$work/out")" -ne "$ranks" ]; then fail "$name" "not $ranks ranks failed"
    elif ! grep -q "$text" "$work/out"; then fail "$name" "nobody says \"$text\""
    elif [ $took -gt "$seconds" ]; then fail "$name" "it took $took seconds"
    else pass "$name"; fi
}

for ranks in 1 2 3 4 7; do
    good "ranks_${ranks}_trained" 2 $small --ranks $ranks --layer trained --tokens 5 --steps 3
    good "ranks_${ranks}_synthetic" 2 $small --ranks $ranks --layer synthetic --tokens 3 --steps 2
done
good empty_ranks 2 $small --ranks 4 --layer trained --tokens 6 --steps 3 --rank-experts 0,20,0,12
good replicas 2 $small --ranks 3 --layer trained --tokens 6 --steps 3 --replicas 7
good skewed_tokens 2 $small --ranks 4 --layer synthetic --tokens 4 --steps 2 --skew
good skewed_to_one_rank 1 $small --ranks 3 --layer synthetic --tokens 4 --steps 2 --skew --rank-experts 250,6,0 --rows f32
good more_than_512_pairs 1 $small --ranks 2 --layer trained --tokens 80 --steps 1 --rows f32 --sizes exact
good more_pairs_than_one_launch_dispatches 1 $small --ranks 2 --layer synthetic --tokens 260 --steps 1 --rows f32 --sizes exact

make ranks RANKS="$small --layer trained --tokens 4 --steps 1 --rows f32" >"$work/out" 2>&1
if [ $? -eq 0 ] && grep -q '^2 ranks' "$work/out"; then pass make_ranks; else fail make_ranks "it failed"; fi

# Ranks that somebody else starts, which find each other through the first one's address.
launch() { # world size of the last rank
    port=$((20000 + $$ % 20000))
    for rank in 0 1 2; do
        world=3
        [ $rank -eq 2 ] && world=$1
        env RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 100 $program $small --deadline "$2" --layer trained --tokens 4 --steps 1 --rows f32 \
            >"$work/launched.$rank" 2>&1 &
        eval "pid$rank=$!"
    done
    statuses=
    for rank in 0 1 2; do
        eval "wait \$pid$rank"
        statuses="$statuses$?"
    done
    cat "$work"/launched.* >"$work/out"
}
launch 3 60
if [ "$statuses" = 000 ] && grep -q 'All as expected' "$work/out"; then pass launched_ranks; else fail launched_ranks "statuses $statuses"; fi
launch 4 5
if [ "$statuses" = 111 ]; then pass launched_ranks_of_different_numbers; else fail launched_ranks_of_different_numbers "statuses $statuses"; fi
env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 timeout 100 $program $small --rendezvous 127.0.0.1:1 --layer trained --tokens 4 --steps 1 --rows f32 >"$work/out" 2>&1
if [ $? -eq 0 ]; then pass mpirun_sets_the_rank; else fail mpirun_sets_the_rank "it failed"; fi

# What goes wrong on one rank ends all others. A rank that is gone is noticed at once, one that is silent within the deadline.
faulty="--device cpu --hidden 64 --intermediate 64 --layer trained --tokens 4 --steps 4 --rows f32 --sizes fixed --ranks 3"
bad a_rank_dies 2 'rank 1 has gone' 20 $faulty --deadline 30 --fault die:1
bad a_rank_dies_at_once 2 'rank 0 has gone' 20 $faulty --deadline 30 --fault die-early:0
bad a_rank_dies_once_open 2 'rank 2 has gone' 20 $faulty --deadline 30 --fault die-opened:2
bad a_rank_hangs 2 "rank 1 doesn't answer" 40 $faulty --deadline 3 --fault hang:1
bad a_rank_hangs_at_once 2 "rank 2 doesn't answer" 40 $faulty --deadline 3 --fault hang-early:2
for kind in ranks:number tokens:tokens hidden:hidden top-k:top_k; do
    bad "a_rank_has_other_${kind%%:*}" 3 "has another .*${kind##*:}" 20 $faulty --deadline 30 --fault "mismatch-${kind%%:*}:1"
done
timeout 20 $program --nonsense >"$work/out" 2>&1
if [ $? -eq 64 ]; then pass expert_parallel_refuses_a_wrong_option; else fail expert_parallel_refuses_a_wrong_option "status isn't 64"; fi

# NCCL's side, without NCCL: the library that is opened is a stand-in, the GPU is emulated.
LD_LIBRARY_PATH=build/emulation MOE_ROUTE_NVRTC_PATH=$PWD/build/emulation/libnvrtc.so.13 MOE_ROUTE_CACHE_DIR=$PWD/build/emulation/cache NCCL_LIBRARY=$PWD/build/stand_in/libnccl.so.2
export LD_LIBRARY_PATH MOE_ROUTE_NVRTC_PATH MOE_ROUTE_CACHE_DIR NCCL_LIBRARY
nccl="--device gpu --share-gpu --ranks 2 --layer trained --tokens 4 --steps 2"
good nccl_with_alltoall 2 $nccl --deadline 120
if grep -q 'ncclAlltoAll: [1-9]' "$work/out"; then pass nccl_calls_alltoall; else fail nccl_calls_alltoall "it doesn't"; fi
good nccl_more_than_512_pairs 1 --device gpu --share-gpu --ranks 2 --layer trained --tokens 80 --steps 1 --rows f32 --sizes exact --deadline 120
good nccl_by_send_and_receive 1 $nccl --deadline 120 --no-alltoall --rows f32
bad nccl_rank_dies 1 'rank 1 has gone' 60 $nccl --deadline 30 --rows f32 --fault die:1
bad nccl_rank_hangs 1 'no end within the deadline' 80 $nccl --deadline 10 --rows f32 --fault hang:1
for how in init:ncclCommInitRankConfig send:exchange async:'told to fail' silent:'within the deadline'; do
    STAND_IN_NCCL=${how%%:*} STAND_IN_NCCL_RANK=1
    export STAND_IN_NCCL STAND_IN_NCCL_RANK
    bad "nccl_fails_${how%%:*}" 2 "${how##*:}" 80 $nccl --deadline 10 --rows f32
done
unset STAND_IN_NCCL STAND_IN_NCCL_RANK
NCCL_LIBRARY=/nonexistent/libnccl.so.2 bad nccl_is_missing 2 "NCCL_LIBRARY can't be opened" 60 $nccl --deadline 10
exit $failed
