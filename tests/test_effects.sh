#!/bin/sh
# test_effects.sh: what a process does to its machine when it creates a layer, as strace sees it: compiling starts no driver,
# changes no limit and writes nothing outside the cache; a warm cache and a pack open no NVRTC. Two versions of the library
# share a cache. Prints PASS, FAIL and SKIP lines; run from the repository root. NVRTC is found as usual, or named by
# MOE_ROUTE_NVRTC_PATH.
set -u
program=$PWD/build/one_layer
status=0
pass() { echo "PASS $1"; }
fail() {
    echo "FAIL $1: $(echo "$2" | head -c 400 | tr '\n' ' ')"
    status=1
}
# check NAME TEXT: passes when the text, of what shouldn't have happened, is empty.
check() { if [ -z "$2" ]; then pass "$1"; else fail "$1" "$2"; fi; }

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export MOE_ROUTE_CACHE_DIR="$work/cache"
mkdir "$work/home" "$work/tmp" "$work/here"
export HOME="$work/home" TMPDIR="$work/tmp"
cd "$work/here" || exit 1

# traced NAME [ARGUMENT]...: runs the program; its calls are in $work/NAME, its output in $out.
traced() {
    name=$1
    shift
    out=$(strace -f -qq -o "$work/$name" "$program" "$@" 2>"$work/strace.err")
}

if ! command -v strace >/dev/null || ! strace -o /dev/null true 2>/dev/null; then
    echo "SKIP effects: strace isn't there, or isn't allowed"
    exit 0
fi

# ---- a cold cache ----
traced cold
case $out in
    ERROR_NO_COMPILER*)
        echo "SKIP effects: $(echo "$out" | head -n 1 | head -c 200)"
        exit 0
        ;;
    "OK hits 0 misses 2 packs 0 compiled 2 "*) pass cold_compiles_each_variant ;;
    *) fail cold_compiles_each_variant "$out" ;;
esac
check compiling_opens_nvrtc "$(grep -q 'open.*libnvrtc\.so.*= [0-9]' "$work/cold" || echo "strace doesn't see NVRTC being opened")"
check compiling_starts_no_driver "$(grep -E 'open(at)?\(.*(libcuda\.so|/dev/nvidia)' "$work/cold")"
check compiling_changes_no_limit "$(grep -E 'setrlimit\(|prlimit64\([^,]*, [^,]*, \{' "$work/cold")"
check compiling_stays_in_its_folder "$(grep -E '(^|[^a-z_])f?chdir\(' "$work/cold")"
check compiling_starts_no_process "$(grep -E 'execve\(|vfork\(| fork\(' "$work/cold" | tail -n +2)"
check compiling_uses_no_network "$(grep -E 'connect\(|bind\(' "$work/cold")"
# Calls that change a file system, and succeed, on anything but the cache and the ends of pipes.
changes='open(at)?\(.*(O_WRONLY|O_RDWR|O_CREAT|O_TRUNC)|creat\(|mkdir(at)?\(|rmdir\(|unlink(at)?\(|rename(at2?)?\(|link(at)?\(|chmod|chown|truncate|mknod|utime'
check compiling_writes_nothing_outside_the_cache "$(grep -E "$changes" "$work/cold" | grep -v ' = -1 ' | grep -v -e "\"$work/cache" -e '"/dev/null"' -e '"/dev/tty"' -e 'readlink')"
check nothing_is_left_elsewhere "$(find "$work/home" "$work/tmp" "$work/here" -mindepth 1; find "$work/cache" -type f ! -name '*.moec' ! -name looked_through)"
check every_write_is_flushed "$([ "$(grep -c 'fsync(' "$work/cold")" -eq 2 ] || echo "$(grep -c 'fsync(' "$work/cold") calls of fsync for 2 entries")"
check every_entry_is_renamed "$([ "$(grep -cE 'rename.*\.tmp.*\.moec' "$work/cold")" -eq 2 ] || echo "not 2 entries were renamed")"

# ---- a warm cache, in every further process ----
for i in 1 2 3; do
    traced "warm$i"
    case $out in
        "OK hits 2 misses 0 packs 0 compiled 0 nvrtc 0 "*) pass "process_${i}_hits_every_time" ;;
        *) fail "process_${i}_hits_every_time" "$out" ;;
    esac
    check "process_${i}_opens_no_nvrtc" "$(grep -E 'nvrtc|libcuda|/dev/nvidia' "$work/warm$i")"
    check "process_${i}_opens_each_entry_once" "$([ "$(grep -c '\.moec' "$work/warm$i")" -eq 2 ] || grep '\.moec' "$work/warm$i")"
    check "process_${i}_starts_no_thread" "$(grep -E 'clone' "$work/warm$i")"
    check "process_${i}_writes_nothing" "$(grep -E "$changes" "$work/warm$i" | grep -v ' = -1 ' | grep -v -e '"/dev/null"' -e 'readlink')"
done

# ---- a pack ----
traced save --save "$work/layers.moep"
rm -rf "$work/cache"
MOE_ROUTE_CACHE_DIR=off
traced pack --pack "$work/layers.moep"
case $out in
    "OK hits 0 misses 0 packs 2 compiled 0 nvrtc 0 "*) pass a_pack_serves ;;
    *) fail a_pack_serves "$out" ;;
esac
check a_pack_needs_no_nvrtc "$(grep -E 'nvrtc|libcuda|/dev/nvidia|\.moec' "$work/pack")"
MOE_ROUTE_CACHE_DIR="$work/cache"

# ---- two versions of the library ----
# The same program from a header with other kernel sources, which is what another version is to the cache.
other=$work/other
mkdir -p "$other/tests/programs"
sed 's/^static const char moer_sources_digest\[\] = ".\{8\}/static const char moer_sources_digest[] = "00000000/' "$OLDPWD/moe_route.h" >"$other/moe_route.h"
cp "$OLDPWD/tests/programs/one_layer.c" "$other/tests/programs/"
if ! ${CC:-cc} -w -o "$other/one_layer" "$other/tests/programs/one_layer.c" -lm -ldl -lpthread 2>"$work/cc.err"; then
    fail two_versions "$(cat "$work/cc.err")"
else
    for p in "$program" "$other/one_layer"; do
        out=$($p)
        case $out in "OK hits 0 misses 2 "*) ;; *) fail two_versions "the first time: $out" ;; esac
    done
    out="$($program) $("$other/one_layer")"
    case $out in
        "OK hits 2 misses 0 "*"OK hits 2 misses 0 "*) pass two_versions_share_a_cache ;;
        *) fail two_versions_share_a_cache "$out" ;;
    esac
fi
exit $status
