#!/bin/sh
# From a fresh checkout to a streamed model: builds llama.cpp with ggml-les, then lets the bundled model write with
# a cache far smaller than its experts. The first run takes some minutes, the next ones seconds.
#
# usage: cmake/quickstart.sh [PROMPT]
#
# LES_LLAMA_CPP_DIR=DIR  take llama.cpp from there instead of downloading it (DIR itself is left alone)
# LES_JOBS=N             compile N files at a time
# LES_CMAKE_FLAGS=...    more options for cmake, e.g. -DGGML_NATIVE=OFF
set -eu
LES_ROOT=$(cd "$(dirname "$0")/.." && pwd)
. "$LES_ROOT/cmake/setup.sh"

les_find_tools
# shellcheck disable=SC2119 # our prompt is not for it
les_build

prompt=${1:-The function returns a new list that}
model=$LES_ROOT/tests/data/docmoe-53m-q4_k_m.gguf
les_say "running $(basename "$model") with the smallest cache that works"
# -c: the context that it was trained with; a fixed seed, so that stock llama.cpp would write the very same text
set -- "$LES_BUILD/bin/llama-completion" -m "$model" --les on --les-cache min \
    -c 256 -n 128 --seed 1 -no-cnv --no-display-prompt -p "$prompt"
printf '%s' "$prompt"
log=$LES_BUILD/quickstart.log
"$@" 2>"$log" </dev/null || {
    echo
    tail -n 20 "$log" >&2
    les_die "the model did not run" "the whole log is in $log" "the command was: $*"
}
echo
# what was decided, the summary, and llama.cpp's own times
grep -E '(^| )les: |eval time' "$log" | sed 's/^[0-9.]* [A-Z] //' || true
echo
echo "The programs are in $LES_BUILD/bin. Try your own model:"
echo "  $LES_BUILD/bin/llama-cli -m MODEL.gguf"
