#!/bin/sh
# test_docs.sh: what README.md and docs/ say is there: their C compiles, their links lead somewhere, the functions, values and make
# targets that they name exist, and every example is mentioned in the README. Prints PASS, FAIL and SKIP lines; run from the repository root.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
documents="README.md CHANGELOG.md bench/NOTES.md $(ls docs/*.md tests/emulation/README.md tests/data/README.md)"

# result NAME FILE: passes when the file with what is wrong is empty.
result() {
    if [ -s "$2" ]; then
        echo "FAIL $1: $(head -n 6 "$2" | cut -c 1-300 | tr '\n' ' ')"
        failed=1
    else
        echo "PASS $1"
    fi
}
# compiles NAME DOCUMENT WORD PARAMETERS: its C blocks, which must hold the word, as the body of a function with those parameters,
# or as they are where there are none.
compiles() {
    { sed -n '/^```c$/,/^```$/p' "$2" | sed '/^```/d'; } >"$work/block"
    if [ -n "$4" ]; then
        { printf '#include "moe_route.h"\n#include <stdio.h>\nint body(%s);\nint body(%s) {\n' "$4" "$4"
          cat "$work/block"
          echo 'return 0; }'; } >"$work/code.c"
    else
        { grep -q '^#include "moe_route.h"' "$work/block" || echo '#include "moe_route.h"'
          cat "$work/block"; } >"$work/code.c"
    fi
    if ! grep -q "$3" "$work/block"; then
        echo "$2 has no C with $3" >"$work/found"
    else
        gcc -std=c11 -Wall -Wextra -Werror -I. -c "$work/code.c" -o "$work/code.o" >"$work/found" 2>&1
    fi
    result "$1" "$work/found"
}
compiles readme_c_compiles README.md moe_route_layer_run ""
compiles operating_c_compiles docs/operating.md moe_route_pack_save "moe_route_layer_desc *layers, int num_layers"
compiles expert_parallelism_c_compiles docs/expert_parallelism.md moe_route_dispatch ""
compiles tuning_c_compiles docs/tuning.md moe_route_plan_text \
    "moe_route_context *context, moe_route_layer_desc desc, moe_route_address (*device_alloc)(size_t), const moe_route_layer *layer, uint32_t num_tokens"

# ---- links, without those to other sites ----
for document in $documents; do
    grep -o '](\([^)]*\))' "$document" | sed 's/^](//; s/)$//' | grep -v '^https\?:' | while read -r link; do
        file=${link%%#*}
        [ -z "$file" ] || [ -e "$(dirname "$document")/$file" ] || echo "$document: $link leads nowhere"
    done
done >"$work/found"
result links_lead_somewhere "$work/found"

# ---- names: of the header, the environment, the emulation, Python's module, CMake's targets ----
cat $documents | grep -oE '\b(moe_route_[a-z0-9_]*[a-z0-9]|MOE_ROUTE_[A-Z0-9_]*[A-Z0-9])\b' | sort -u | while read -r name; do
    grep -rqE "\b$name\b" moe_route.h tests/emulation kernels_src tests/support || echo "$name isn't anywhere"
done >"$work/found"
result names_exist "$work/found"
cat $documents | grep -oE '(^ +|`|&& )make [a-z][a-z_-]*' | sed 's/.*make //' | sort -u | while read -r target; do
    make -n "$target" >/dev/null 2>&1 || echo "there is no make $target"
done >"$work/found"
result make_targets_exist "$work/found"

for example in examples/*.c examples/*.cpp examples/*_layer.py; do
    name=$(basename "$example")
    grep -qw "${name%.*}" README.md || echo "README.md doesn't mention $example"
done >"$work/found"
result readme_mentions_every_example "$work/found"
exit $failed
