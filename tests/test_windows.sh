#!/bin/sh
# test_windows.sh: test_windows.c, built with mingw-w64 and run with wine. Prints PASS, FAIL and SKIP lines; run from the
# repository root.
set -u
work=$(mktemp -d) || exit 1
trap 'WINEPREFIX="$work/prefix" wineserver -k >/dev/null 2>&1; rm -rf "$work"' EXIT
for tool in x86_64-w64-mingw32-gcc wine; do
    command -v $tool >/dev/null || { echo "SKIP windows: $tool isn't installed"; exit 0; }
done
if ! x86_64-w64-mingw32-gcc -O1 -g -Wall -Wextra -Werror -I. -static -o "$work/test_windows.exe" tests/test_windows.c -lm -lpthread 2>"$work/log"; then
    echo "FAIL windows: $(head -c 400 "$work/log" | tr '\n' ' ')"
    exit 1
fi
mkdir "$work/tmp"
export WINEPREFIX="$work/prefix" WINEDEBUG=-all TMPDIR="$work/tmp" HOME="$work"
timeout 300 wine "$work/test_windows.exe" 2>"$work/log" | tr -d '\r' >"$work/out"
cat "$work/out"
grep -q '^PASS libraries\|^FAIL libraries' "$work/out" || { echo "FAIL windows: the program didn't end: $(tail -n 2 "$work/log" | tr '\n' ' ')"; exit 1; }
! grep -q '^FAIL' "$work/out"
