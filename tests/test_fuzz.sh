#!/bin/sh
# test_fuzz.sh: the loaders of cache entries and packs under libFuzzer, with AddressSanitizer and UndefinedBehaviorSanitizer:
# the committed corpus and seeds made afresh, and FUZZ_RUNS (default 30000) mutations, the same in each run of the same build.
# For a long run: FUZZ_RUNS=100000000 FUZZ_KEEP=folder tests/test_fuzz.sh, which keeps what it finds in that folder.
set -u
runs=${FUZZ_RUNS:-30000}
status=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
flags="-O1 -g -w -I. -fsanitize=address,undefined -fno-sanitize-recover=undefined"
echo 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return d && n ? 0 : 0; }' >"$work/try.c"
if ! clang -fsanitize=fuzzer "$work/try.c" -o "$work/try" 2>/dev/null; then
    echo "SKIP fuzz: clang with libFuzzer isn't installed"
    exit 0
fi
mkdir -p build "$work/seed_entry" "$work/seed_pack"
if ! ${CC:-cc} -w -I. -o "$work/seeds" tests/fuzz/seeds.c -lm -ldl -lpthread || ! "$work/seeds" "$work/seed_entry" "$work/seed_pack"; then
    echo "FAIL fuzz_seeds: they can't be made"
    exit 1
fi
for name in entry pack; do
    found=${FUZZ_KEEP:-$work/found}_$name
    mkdir -p "$found"
    if ! clang $flags -fsanitize=fuzzer -o "build/fuzz_$name" "tests/fuzz/fuzz_$name.c" -lm -ldl -lpthread 2>"$work/log"; then
        echo "FAIL fuzz_$name: $(head -n 3 "$work/log" | tr '\n' ' ')"
        status=1
    elif "build/fuzz_$name" -runs="$runs" -seed=1 -max_len=4096 -timeout=20 -print_final_stats=1 -artifact_prefix=build/fuzz_ "$found" "tests/fuzz/corpus_$name" "$work/seed_$name" >"$work/log" 2>&1; then
        echo "PASS fuzz_$name"
    else
        echo "FAIL fuzz_$name: $(grep -m 1 -E 'ERROR|runtime error|libFuzzer' "$work/log" | head -c 300); $(grep -m 1 'Test unit written' "$work/log")"
        status=1
    fi
    grep 'stat::number_of_executed_units' "$work/log" >&2
done
exit $status
