#!/bin/sh
# The library as a C program sees it: les.h and libles.a, plain, under the sanitizers and under valgrind.
#
# usage: tests/c/run.sh
#
# CC, CXX and CARGO_TARGET_DIR are honoured. Without valgrind its part is skipped, or fails where CI is set.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
cd "$root"
target=${CARGO_TARGET_DIR:-$root/target}
lib=$target/release/libles.a
model=$root/tests/data/docmoe-53m-q4_k_m.gguf
cc=${CC:-gcc} cxx=${CXX:-g++}
warnings="-Wall -Wextra -Wpedantic -Werror"
# as cmake/ggml-les.cmake has them
native="-lpthread -ldl -lm -lrt"
# such as LES_FAULT=... of the one who calls us would fail every test
unset LES_FAULT
failed=0

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT TERM

# NAME COMMAND...: both engines
engines() {
    name=$1
    shift
    for engine in pread uring; do
        echo "$name, $engine"
        mkdir "$tmp/files"
        status=0
        "$@" "$model" "$tmp/files" "$engine" || status=$?
        rm -rf "$tmp/files"
        case $status in
        0 | 77) ;;
        *)
            echo "FAILED: $name, $engine: exit status $status"
            failed=1
            ;;
        esac
    done
}

# OUT FLAG...
compile() {
    out=$1
    shift
    # shellcheck disable=SC2086 # several words each
    "$cc" -std=c99 $warnings -g -Iinclude "$@" -o "$tmp/$out" "$here"/*.c "$lib" $native
}

echo "build"
cargo build --release --lib --no-default-features --locked

# What rustc says must be in our list, or be linked by every C compiler unasked (libutil has been part of libc since
# glibc 2.34, and nothing of it is used).
said=$(cargo rustc --release --lib --no-default-features --locked --crate-type staticlib \
    --target-dir "$target/native-libs" -- --print native-static-libs 2>&1 | sed -n 's/^note: native-static-libs: //p')
echo "native libraries: ${said:-rustc does not say}"
for flag in $said; do
    case " $native -lc -lgcc_s -lutil " in
    *" $flag "*) ;;
    *)
        echo "FAILED: $flag is not among the documented libraries ($native)"
        failed=1
        ;;
    esac
done
[ -n "$said" ] || failed=1
for flag in $native; do
    grep -q "set(libs .*\b${flag#-l}\b" cmake/ggml-les.cmake || {
        echo "FAILED: cmake/ggml-les.cmake does not link ${flag#-l}"
        failed=1
    }
done

echo "header"
# shellcheck disable=SC2086
for language in "$cc -x c -std=c99" "$cxx -x c++ -std=c++17"; do
    $language $warnings -Iinclude -c -o "$tmp/header.o" "$here/header.h"
done

compile plain -O2
engines plain "$tmp/plain"

# with what nobody calls thrown away
compile sections -O2 -ffunction-sections -fdata-sections -Wl,--gc-sections
engines gc-sections "$tmp/sections"

compile sanitized -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-} \
    UBSAN_OPTIONS=print_stacktrace=1 engines sanitizers "$tmp/sanitized"

if command -v valgrind >/dev/null; then
    engines valgrind valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite,possible \
        "$tmp/plain"
elif [ -n "${CI:-}" ]; then
    echo "FAILED: there is no valgrind"
    failed=1
else
    echo "skipped: valgrind is not installed"
fi

[ "$failed" -eq 0 ] && echo "all passed"
exit "$failed"
