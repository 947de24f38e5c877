#!/bin/sh
# test_demo.sh: the demo on the CPU backend: it succeeds, and says what it promises to say. Run from the repository root.
set -u
out=$(build/demo --cpu 2>&1)
status=$?
if [ $status -eq 0 ]; then echo "PASS demo_runs_on_the_cpu"; else echo "FAIL demo_runs_on_the_cpu: status $status: $(echo "$out" | tail -n 3 | tr '\n' ' ')"; fi
for text in "4096 of 4096 chosen experts" "distinct" "CPU" "Tokens that chose each expert"; do
    if echo "$out" | grep -q "$text"; then echo "PASS demo_says $text"; else echo "FAIL demo_says $text: it isn't in the output"; status=1; fi
done
build/demo --nonsense >/dev/null 2>&1
if [ $? -eq 64 ]; then echo "PASS demo_refuses_a_wrong_option"; else echo "FAIL demo_refuses_a_wrong_option: status isn't 64"; status=1; fi
exit $status
