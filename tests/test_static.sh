#!/bin/sh
# test_static.sh: what can be found without running anything: clang-tidy (.clang-tidy), cppcheck and gcc's -fanalyzer over the
# implementation, clang-format (.clang-format) over the files that it can keep, and the symbols that an object and the shared
# library export. Leaves the size of a program in build/binary_size.txt. Prints PASS, FAIL and SKIP lines; run from the root.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
have() { command -v "$1" >/dev/null 2>&1; }

# result NAME FILE: passes when the file with the findings is empty.
result() {
    if [ -s "$2" ]; then
        echo "FAIL $1: $(wc -l <"$2") findings: $(head -n 5 "$2" | cut -c 1-250 | tr '\n' ' ')"
        failed=1
    else
        echo "PASS $1"
    fi
}

# The implementation as a .c file: the tools look less closely at headers.
cp moe_route.h "$work/moe_route.c"

# ---- clang-tidy: a finding is its check and the text of its line ----
if have clang-tidy; then
    version=$(clang-tidy --version | sed -n 's/.*version \([0-9]*\)\..*/\1/p' | head -n 1)
    clang-tidy --config-file=.clang-tidy "$work/moe_route.c" -- -std=c99 -DMOE_ROUTE_IMPLEMENTATION >"$work/out" 2>"$work/err"
    sed -n 's/^[^ ]*moe_route\.c:\([0-9]*\):[0-9]*: \(warning\|error\): .*\[\([^]]*\)\]$/\1 \3/p' "$work/out" | sort -u | while read -r line check; do
        echo "$check	$(sed -n "${line}p" moe_route.h | sed 's/^ *//')"
    done | sort -u >"$work/found"
    grep -v '^#' tests/static/accepted.txt | grep -v '^$' | sort -u >"$work/accepted"
    comm -23 "$work/found" "$work/accepted" >"$work/new"
    grep ': error: ' "$work/out" >>"$work/new"
    if [ "$version" = 14 ] || [ ! -s "$work/new" ]; then
        result clang_tidy "$work/new"
    else
        echo "SKIP clang_tidy: tests/static/accepted.txt is for version 14, and version $version has other findings"
    fi
else
    echo "SKIP clang_tidy: clang-tidy isn't installed"
fi

# ---- cppcheck, as on Linux and as on Windows ----
if have cppcheck; then
    for system in "linux -D__linux__ -D__GNUC__=12 -D__x86_64__ -U_WIN32 -U_MSC_VER" "windows -D_WIN32 -D_WIN64 -D_MSC_VER=1930"; do
        cppcheck -q --enable=warning,style,performance,portability --std=c99 --suppressions-list=tests/static/cppcheck.txt \
            --suppress=unmatchedSuppression --suppress=toomanyconfigs --template='{file}:{line}: {id}: {message}' -DMOE_ROUTE_IMPLEMENTATION ${system#* } "$work/moe_route.c" >"$work/found" 2>&1
        result "cppcheck_${system%% *}" "$work/found"
    done
else
    echo "SKIP cppcheck: cppcheck isn't installed"
fi

# ---- gcc's analyzer, as far as its limits let it go: the implementation is one large unit ----
if have gcc && gcc -fanalyzer -x c -c /dev/null -o "$work/null.o" 2>/dev/null; then
    gcc -std=c11 -O1 -fanalyzer -DMOE_ROUTE_IMPLEMENTATION -c "$work/moe_route.c" -o "$work/analyzed.o" >"$work/found" 2>&1
    result gcc_analyzer "$work/found"
else
    echo "SKIP gcc_analyzer: this compiler has no -fanalyzer"
fi

# ---- clang-format ----
if have clang-format; then
    version=$(clang-format --version | sed -n 's/.*version \([0-9]*\)\..*/\1/p')
    while read -r file; do
        clang-format --style=file --assume-filename=x.c <"$file" | cmp -s - "$file" || echo "$file: run make format"
    done <tests/static/formatted.txt >"$work/found"
    if [ "$version" = 14 ] || [ ! -s "$work/found" ]; then
        result clang_format "$work/found"
    else
        echo "SKIP clang_format: tests/static/formatted.txt is for version 14; version $version breaks other lines"
    fi
else
    echo "SKIP clang_format: clang-format isn't installed"
fi
grep -nE '	| $' src/* kernels_src/* examples/*.[ch]* tools/*.c packaging/*.c bench/*.[ch] tests/*.c tests/support/*.h tests/programs/*.c >"$work/found"
result no_tabs_and_no_blanks_at_line_ends "$work/found"

# ---- symbols ----
cc -O2 -I. -c packaging/moe_route.c -o "$work/moe_route.o"
nm --defined-only --extern-only "$work/moe_route.o" | awk '{print $3}' | grep -v '^moe_route_' >"$work/found"
result object_exports_only_moe_route "$work/found"
sed -n 's/^MOE_ROUTE_API .*[ *]\(moe_route_[a-z0-9_]*\)(.*/\1/p' src/api.h | sort >"$work/declared"
make -s lib >/dev/null 2>&1
nm --dynamic --defined-only build/libmoe_route.so | awk '{print $3}' | sort | diff "$work/declared" - >"$work/found"
result library_exports_what_the_header_declares "$work/found"

# ---- size ----
echo 'int main(void) { return 0; }' >"$work/empty.c"
cc -O2 -s "$work/empty.c" -o "$work/empty"
cc -O2 -s -I. examples/minimal.c -o "$work/minimal" -lm -ldl -lpthread
echo "the header adds $((($(wc -c <"$work/minimal") - $(wc -c <"$work/empty")) / 1024)) KiB to a program (-O2, stripped)" >build/binary_size.txt
echo "PASS binary_size $(cat build/binary_size.txt)"
exit $failed
