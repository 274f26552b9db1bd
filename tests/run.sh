#!/bin/sh
# Every test, with the set-up that it needs. The first run builds llama.cpp twice, which takes some minutes.
#
# usage: tests/run.sh [STEP...]     all steps, or the named ones (and what they need)
#
# The output of each step is kept in build/test-logs/STEP.log. With CI=true a missing tool is a failure, otherwise
# what needs it is left out. LES_LLAMA_CPP_DIR, LES_JOBS and LES_CMAKE_FLAGS as in cmake/quickstart.sh.
# shellcheck disable=SC2329 # functions are run by step
set -u
LES_ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$LES_ROOT" || exit 1
. "$LES_ROOT/cmake/setup.sh"

only=" $* "
# what the named ones need
[ $# -eq 0 ] || only=" tools$only"
case $only in *" seam "*) only="$only build others " ;; esac

logs=$LES_BUILD/test-logs
mkdir -p "$logs"
passed=0 failed=0 ran=

# NAME COMMAND...: runs it unless others were asked for. A long one shows now and then how far it is.
step() {
    name=$1
    shift
    case $only in "  " | *" $name "*) ;; *) return ;; esac
    log=$logs/$name.log
    start=$(date +%s)
    ran="$ran $name "
    echo "--- $name"
    : >"$log"
    # nothing of the ticker may keep our output open when it is killed in its sleep
    (while sleep 30 >/dev/null 2>&1; do
        echo "    $(($(date +%s) - start)) s: $(tail -n 1 "$log" | cut -c 1-100)"
    done) &
    ticker=$!
    # not as a condition: set -e would be without effect in it
    (set -e && "$@") >"$log" 2>&1 </dev/null
    status=$?
    kill "$ticker" 2>/dev/null
    wait "$ticker" 2>/dev/null
    seconds=$(($(date +%s) - start))
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
        # the Python and Rust runners' own counts, and what a step has left out
        grep -E '^(test result:|Ran [0-9]+ tests|skipped:)' "$log" | sed 's/^/    /'
        echo "    passed ($seconds s)"
    else
        failed=$((failed + 1))
        tail -n 60 "$log" | sed 's/^/    | /'
        echo "    FAILED: exit status $status ($seconds s), the whole output is in $log"
    fi
    return $status
}

finish() {
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
    exit
}

# Where numpy goes, which gguf-py needs; a directory of its own, so that nothing else of ours is seen by Python.
numpy=$LES_TOOLS/numpy
export PYTHONPATH="$numpy${PYTHONPATH:+:$PYTHONPATH}"

# Installs what is missing. Without valgrind, ccache and numpy the tests still run, but fewer of them, and slower.
tools() {
    les_find_tools
    les_missing=
    for tool in ccache valgrind; do
        les_have "$tool" || les_apt "$tool" || les_missing="$les_missing $tool"
    done
    python3 -c 'import numpy' 2>/dev/null || {
        les_find_pip
        $LES_PIP install --disable-pip-version-check --quiet --target "$numpy" numpy || les_missing="$les_missing numpy"
    }
    [ -n "$les_missing" ] || return 0
    echo "skipped: what needs$les_missing; to install: apt-get install (or pip install)$les_missing"
    [ "${CI:-}" != true ]
}

ascii() {
    # others' text, and what a tool writes, are left out
    found=$(git ls-files --cached --others --exclude-standard -- . ':!tests/data' ':!Cargo.lock' |
        while IFS= read -r file; do
            [ ! -f "$file" ] || LC_ALL=C grep -nH '[^	 -~]' "$file" || :
        done)
    [ -z "$found" ] || {
        echo "these lines are not plain ASCII:"
        echo "$found"
        return 1
    }
}

doc() {
    RUSTDOCFLAGS=-Dwarnings cargo doc --locked --no-deps
}

build() {
    les_build llama-gguf-split
}

# The user's first command: text, and how fast it came.
quickstart() {
    prompt="The list"
    out=$(sh cmake/quickstart.sh "$prompt")
    printf '%s\n' "$out"
    text=$(printf '%s\n' "$out" | sed '/^les: /,$d')
    case $text in "$prompt"?*) ;; *) false ;; esac
    [ ${#text} -gt $((${#prompt} + 40)) ]
    printf '%s\n' "$out" | grep -q '^les: .* tok/s'
}

# What tests/seam compares with: llama.cpp as it is, with its maker of small random models of every architecture, and
# the patched tree built without ggml-les.
others() {
    les_bring_patched
    les_build_beside stock "$les_stock" "llama llama-quantize test-llama-archs" -DLLAMA_BUILD_TESTS=ON
    les_build_beside noles "$les_patched" llama "$LES_ATTACH" -DLES=OFF
}

step tools tools || finish
les_find_tools # again, as a step cannot change our PATH

step fmt cargo fmt --check -- --color never
step clippy cargo clippy --locked --all-targets -- -D warnings
step test cargo test --locked
# schedules of threads, at random: the same scheduler over locks that yield everywhere
step shuttle cargo test --locked --features shuttle --lib sched
step doc doc
step ascii ascii
step patch sh tests/patch.sh
step bench python3 -m unittest discover -v -s tests/bench
step quality python3 -m unittest discover -v -s tests/quality
step build build
step quickstart quickstart
step others others
[ ! -f tests/c/run.sh ] || step c sh tests/c/run.sh
[ ! -d tests/seam ] || step seam python3 -m unittest discover -v -s tests/seam

for name in "$@"; do
    case $ran in
    *" $name "*) ;;
    *)
        echo "error: there is no step called $name"
        failed=$((failed + 1))
        ;;
    esac
done
finish
