#!/bin/sh
# run.sh: runs test programs and sums up what they print.
#
#   tests/run.sh build/test_cpu 'TEST_DEVICE=gpu build/test_layer' tests/test_script.sh
#
# Each argument is a shell command: a program or script, after its own environment and before its own arguments. It
# prints a line "PASS name", "FAIL name: why" or "SKIP name: why" for each test. A command that crashes, that fails
# without a FAIL line, or that prints no such line at all counts as one more failure. Shows the FAIL lines, then why
# tests were skipped, and closes with "N passed, N failed, N skipped". The exit status is 1 when anything failed. As many commands
# run at once as there are processors, or as TEST_JOBS says; they are reported in order.
set -u

if [ $# -eq 0 ]; then
    echo "usage: tests/run.sh COMMAND..." >&2
    exit 64
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/moe_route_tests.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'trap - TERM; kill 0; exit 130' INT
trap 'trap - TERM; kill 0; exit 143' TERM
: >"$work/skips"
passed=0
failed=0
skipped=0

# Each worker takes the next command that nobody has taken.
worker() {
    number=0
    for command in "$@"; do
        number=$((number + 1))
        mkdir "$work/$number" 2>/dev/null || continue
        sh -c "$command" >"$work/$number/out" 2>"$work/$number/err" </dev/null
        echo $? >"$work/$number/status.new"
        mv "$work/$number/status.new" "$work/$number/status"
    done
}
jobs=${TEST_JOBS:-$(nproc 2>/dev/null || echo 1)}
while [ "$jobs" -gt 0 ]; do
    worker "$@" &
    jobs=$((jobs - 1))
done

number=0
for command in "$@"; do
    number=$((number + 1))
    until [ -e "$work/$number/status" ]; do sleep 0.2; done
    status=$(cat "$work/$number/status")
    cp "$work/$number/out" "$work/$number/err" "$work"
    pass=$(grep -c '^PASS ' "$work/out")
    fail=$(grep -c '^FAIL ' "$work/out")
    skip=$(grep -c '^SKIP ' "$work/out")
    trouble=
    if [ "$status" -gt 128 ]; then
        trouble="crashed: signal $((status - 128))"
    elif [ "$status" -ne 0 ] && [ "$fail" -eq 0 ]; then
        trouble="exit status $status without a FAIL line"
    elif [ $((pass + fail + skip)) -eq 0 ]; then
        trouble="printed no PASS, FAIL or SKIP line"
    fi
    [ -n "$trouble" ] && fail=$((fail + 1))

    line="$pass passed"
    [ "$fail" -gt 0 ] && line="$line, $fail failed"
    [ "$skip" -gt 0 ] && line="$line, $skip skipped"
    if [ "$fail" -gt 0 ]; then word=FAIL; else word=ok; fi
    printf '%-4s  %s: %s\n' "$word" "$command" "$line"
    if [ "$fail" -gt 0 ]; then
        sed -n 's/^FAIL /      /p' "$work/out"
        if [ -n "$trouble" ]; then
            echo "      $trouble"
            last=$(grep '^PASS \|^FAIL \|^SKIP ' "$work/out" | tail -n 1)
            [ -n "$last" ] && echo "      the last line before: $last"
        fi
        tail -n 40 "$work/err" | sed 's/^/      | /'
    fi
    sed -n 's/^SKIP [^:]*: *//p' "$work/out" >>"$work/skips"

    passed=$((passed + pass))
    failed=$((failed + fail))
    skipped=$((skipped + skip))
done

if [ -s "$work/skips" ]; then
    echo "skipped:"
    sort "$work/skips" | uniq -c | sort -rn | sed 's/^ *\([0-9]*\) /  \1 x /'
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
