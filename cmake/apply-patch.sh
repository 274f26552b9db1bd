#!/bin/sh
# Applies ggml-patch/*.patch to a llama.cpp source tree. Doing it again changes nothing, and after the patches changed
# the old ones are taken back first, so that a tree that was patched once can be kept.
#
# usage: cmake/apply-patch.sh [--reverse] LLAMA_CPP_DIR
set -eu
# in a git hook these would name another repository
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
export LC_ALL=C # one order of the patches everywhere

patches=$(cd "$(dirname "$0")/../ggml-patch" && pwd)
reverse=no
if [ "${1:-}" = --reverse ]; then
    reverse=yes
    shift
fi
if [ $# -ne 1 ] || [ ! -f "$1/ggml/src/CMakeLists.txt" ]; then
    echo "usage: cmake/apply-patch.sh [--reverse] LLAMA_CPP_DIR   (a llama.cpp source tree)" >&2
    exit 2
fi
tree=$(cd "$1" && pwd -P)
# The patches as they were applied: only they can take back what they did.
applied=$tree/.les-patches

# git apply is stricter than patch(1), and knows renames. The ceiling keeps it from taking a repository around the tree
# for the tree's own: it would then silently skip files.
if command -v git >/dev/null 2>&1; then
    run_patch() { # PATCH [--check] [--reverse]
        file=$1
        shift
        (cd "$tree" && GIT_CEILING_DIRECTORIES=$(dirname "$tree") git apply "$@" "$file")
    }
elif command -v patch >/dev/null 2>&1; then
    run_patch() {
        file=$1 options="-p1 --batch --force"
        shift
        for option in "$@"; do
            case $option in
            --check) options="$options --dry-run" ;;
            --reverse) options="$options -R" ;;
            esac
        done
        # shellcheck disable=SC2086 # the options are words
        (cd "$tree" && patch $options -i "$file" >/dev/null)
    }
else
    echo "error: neither git nor patch is installed; install one of them, e.g. apt-get install git" >&2
    exit 1
fi

fail() { # PATCH WHAT [--reverse]
    echo "error: $(basename "$1") does not $2 $tree" >&2
    run_patch "$1" --check ${3:+"$3"} 2>&1 | sed 's/^/  /' >&2 || true
    echo "  The patches are made for the llama.cpp commit in ggml-patch/LLAMA_CPP_VERSION. Is the tree of that commit," >&2
    echo "  and unchanged otherwise? A tree under build/ can be deleted: the next run brings a new one." >&2
    exit 1
}

apply() { # PATCH
    run_patch "$1" --check 2>/dev/null || fail "$1" "apply to"
    run_patch "$1"
    echo "applied $(basename "$1")"
}

take_back() { # PATCH
    run_patch "$1" --check --reverse 2>/dev/null || fail "$1" "come off" --reverse
    run_patch "$1" --reverse
    echo "took back $(basename "$1")"
}

# The paths of DIR/*.patch, in order or the other way round.
list() { # DIR [-r]
    find "$1" -name '*.patch' 2>/dev/null | sort ${2:+"$2"}
}

digest() { # DIR
    list "$1" | while IFS= read -r file; do cksum <"$file"; done
}

# A tree that was patched by other means has no record. If the last patch is in, so are those before it.
last=$(list "$patches" -r | head -n 1)
if [ ! -d "$applied" ] && [ -n "$last" ] && run_patch "$last" --check --reverse 2>/dev/null; then
    mkdir "$applied"
    cp "$patches"/*.patch "$applied"
fi

if [ $reverse = no ] && [ -d "$applied" ] && [ "$(digest "$applied")" = "$(digest "$patches")" ]; then
    exit 0
fi
list "$applied" -r | while IFS= read -r file; do
    take_back "$file"
    rm "$file"
done
rm -rf "$applied"
if [ $reverse = no ]; then
    mkdir "$applied"
    list "$patches" | while IFS= read -r file; do
        apply "$file"
        cp "$file" "$applied"
    done
fi
