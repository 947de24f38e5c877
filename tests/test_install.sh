#!/bin/sh
# test_install.sh: installs into a temporary folder, and builds a program in C and in C++ against it as users do: by pkg-config,
# by CMake's find_package with the header alone and with the compiled library, by FetchContent from the source tree, and with the
# shared library. Prints
# PASS, FAIL and SKIP lines; run from the repository root.
set -u
root=$(pwd)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0

# check NAME COMMAND...: passes when the command does.
check() {
    name=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        echo "PASS $name"
    else
        echo "FAIL $name: $(tail -c 400 "$work/out" | tr '\n' ' ')"
        failed=1
    fi
}
have() { command -v "$1" >/dev/null 2>&1; }

# ---- the files ----
installed() { find "$1" ! -type d | sed "s|^$1/||" | sort; }
expected="include/moe_route.h
share/moe_route/copyright
share/moe_route/moe_route-config-version.cmake
share/moe_route/moe_route-config.cmake
share/moe_route/moe_route.c
share/pkgconfig/moe_route.pc"
places_files() {
    make -s install PREFIX="$work/usr" && test "$(installed "$work/usr")" = "$expected" &&
        make -s install DESTDIR="$work/stage" PREFIX=/opt/moe && test "$(installed "$work/stage/opt/moe")" = "$expected" &&
        grep -qx 'prefix=/opt/moe' "$work/stage/opt/moe/share/pkgconfig/moe_route.pc" &&
        ! grep -r "$work/stage" "$work/stage"
}
check make_install_places_its_files places_files
removes_files() { make -s uninstall DESTDIR="$work/stage" PREFIX=/opt/moe && test -z "$(installed "$work/stage")"; }
check make_uninstall_removes_them removes_files

# ---- the shared library ----
version=$(sed -n 's/^#define MOE_ROUTE_VERSION "\(.*\)"/\1/p' moe_route.h)
soname=libmoe_route.so.${version%.*}
places_library() {
    make -s install-lib DESTDIR="$work/stage" PREFIX=/opt/moe LIBDIR=/opt/moe/lib64 && test "$(installed "$work/stage/opt/moe")" = "$(echo "$expected
lib64/libmoe_route.so
lib64/$soname
lib64/libmoe_route.so.$version" | sort)" && test -f "$work/stage/opt/moe/lib64/libmoe_route.so" -a ! -L "$work/stage/opt/moe/lib64/libmoe_route.so.$version" &&
        mv "$work/stage/opt/moe" "$work/shared" # links that name no folder survive it
}
check make_install_lib_places_the_library places_library
links_with_library() { # linked by the plain name, it is found by its soname
    ${CC:-cc} -Wall -Wextra -Werror -I"$work/shared/include" tests/programs/uses_package.c -L"$work/shared/lib64" -lmoe_route -o "$work/linked" || return 1
    rm "$work/shared/lib64/libmoe_route.so"
    test "$(LD_LIBRARY_PATH="$work/shared/lib64" "$work/linked")" = "moe_route $version"
}
check program_runs_with_the_installed_library links_with_library
removes_library() {
    make -s install-lib DESTDIR="$work/stage" PREFIX=/opt/moe && test -L "$work/stage/opt/moe/lib/$soname" &&
        make -s uninstall DESTDIR="$work/stage" PREFIX=/opt/moe && test -z "$(installed "$work/stage")"
}
check make_uninstall_removes_the_library removes_library

# ---- pkg-config ----
header_only() { printf '#define MOE_ROUTE_IMPLEMENTATION\n#include "moe_route.h"\n' | cat - "$root/tests/programs/uses_package.c" >"$1"; }
header_only "$work/program.c"
header_only "$work/program.cpp"
by_pkg_config() {
    export PKG_CONFIG_PATH="$work/usr/share/pkgconfig"
    test "$(pkg-config --modversion moe_route)" = "$version" &&
        $1 -Wall -Wextra -Werror "$2" $(pkg-config --cflags --libs moe_route) -o "$work/program" && test "$("$work/program")" = "moe_route $version"
}
if have pkg-config; then
    check pkg_config_c by_pkg_config "${CC:-cc}" "$work/program.c"
    check pkg_config_cpp by_pkg_config "${CXX:-c++}" "$work/program.cpp"
else
    echo "SKIP pkg_config_c: pkg-config isn't installed"
fi

# ---- CMake ----
if ! have cmake; then
    echo "SKIP cmake: cmake isn't installed"
    exit $failed
fi
# project NAME LANGUAGE HOW: a project with a program by the header and one by the compiled library.
project() {
    mkdir -p "$work/$1"
    { echo 'cmake_minimum_required(VERSION 3.14)'
      echo "project(user LANGUAGES $2)"
      echo "$3"
      echo "add_executable(by_header $work/program.$4)"
      echo 'target_link_libraries(by_header PRIVATE moe_route::moe_route)'
      echo "add_executable(by_library $work/uses_package.$4)"
      echo 'target_link_libraries(by_library PRIVATE moe_route::impl)'; } >"$work/$1/CMakeLists.txt"
    cp tests/programs/uses_package.c "$work/uses_package.$4"
}
builds() {
    cmake -S "$work/$1" -B "$work/$1/build" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_PREFIX_PATH=$work/moved" >"$work/log" 2>&1 &&
        cmake --build "$work/$1/build" >>"$work/log" 2>&1 || { cat "$work/log"; return 1; }
    test "$("$work/$1/build/by_header")" = "moe_route $version" && test "$("$work/$1/build/by_library")" = "moe_route $version"
}
mv "$work/usr" "$work/moved" # an installed tree may be moved
minor=${version%.*}
for language in c:C cpp:CXX; do
    suffix=${language%:*}
    project "find_$suffix" "${language#*:}" "find_package(moe_route $minor REQUIRED)" "$suffix"
    check "cmake_find_package_$suffix" builds "find_$suffix"
    project "fetch_$suffix" "${language#*:}" "include(FetchContent)
FetchContent_Declare(moe_route SOURCE_DIR \"$root\")
FetchContent_MakeAvailable(moe_route)" "$suffix"
    check "cmake_fetch_content_$suffix" builds "fetch_$suffix"
done
refuses() {
    project refused C "find_package(moe_route $1 REQUIRED)" c
    ! cmake -S "$work/refused" -B "$work/refused/build" "-DCMAKE_PREFIX_PATH=$work/moved" >"$work/log" 2>&1 && grep -q 'moe_route' "$work/log" && grep -q "$version" "$work/log"
}
check cmake_refuses_a_newer_version refuses "${minor%.*}.$((${minor#*.} + 1))"
check cmake_refuses_another_major_version refuses "$((${version%%.*} + 1)).0"
same_files() {
    cmake -S "$root" -B "$work/own" "-DCMAKE_INSTALL_PREFIX=$work/by_cmake" && cmake --install "$work/own" || return 1
    rm -rf "$work/moved" && make -s install PREFIX="$work/by_cmake" DESTDIR="$work/by_make" && diff -r "$work/by_make$work/by_cmake" "$work/by_cmake"
}
check cmake_installs_what_make_does same_files
exit $failed
