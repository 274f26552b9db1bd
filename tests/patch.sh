#!/bin/sh
# Do the patches apply to the pinned llama.cpp, twice without harm, and come off again without a trace?
#
# usage: tests/patch.sh [LLAMA_CPP_DIR]   (a pristine tree, left alone; default: one that is downloaded)
set -eu
LES_ROOT=$(cd "$(dirname "$0")/.." && pwd)
. "$LES_ROOT/cmake/setup.sh"

if [ $# -gt 0 ]; then
    les_stock=$1
else
    les_bring_stock
fi
work=$LES_BUILD/patch-test
tree=$work/tree
rm -rf "$work"
mkdir -p "$work/bin"
trap 'rm -rf "$work"' EXIT
# Inside of our own repository, on purpose: git must not take that for the tree's.
les_copy_tree "$les_stock" "$tree"

digest() {
    (cd "$tree" && find . -type f ! -path './.les-*' -exec cksum {} + | LC_ALL=C sort | cksum)
}

check() { # WHAT EXPECTED ACTUAL
    if [ "$2" != "$3" ]; then
        echo "FAILED: $1" >&2
        exit 1
    fi
    echo "ok: $1"
}

apply() {
    sh "$LES_ROOT/cmake/apply-patch.sh" "$@" "$tree"
}

before=$(digest)

# The whole way, with the tools in PATH.
round_trip() { # TOOL
    apply
    patched=$(digest)
    check "$1: applied" yes "$([ "$patched" = "$before" ] || echo yes)"
    check "$1: applied twice: nothing said" "" "$(apply)"
    check "$1: applied twice: nothing changed" "$patched" "$(digest)"

    rm -rf "$tree/.les-patches"
    check "$1: recognized without its record" "" "$(apply)"
    check "$1: recognized without its record: nothing changed" "$patched" "$(digest)"

    apply --reverse
    check "$1: taken back" "$before" "$(digest)"
    check "$1: taken back twice: nothing said" "" "$(apply --reverse)"
}

if [ -z "$(find "$LES_ROOT/ggml-patch" -name '*.patch')" ]; then
    echo "there are no patches"
    exit 0
fi

! les_have git || round_trip git
git_patched=${patched:-}
if les_have patch; then
    # all that the script needs, but not git
    for tool in sh basename cat cksum cp dirname find head mkdir patch rm sed sort; do
        ln -s "$(command -v $tool)" "$work/bin/$tool"
    done
    path=$PATH
    PATH=$work/bin
    # digest() and check() use these tools only, too
    round_trip patch
    PATH=$path
    check "both tools make the same tree" "${git_patched:-$patched}" "$patched"
fi

# A patch that went away is taken back when the others are applied.
mkdir -p "$work/old/cmake" "$work/old/ggml-patch"
cp "$LES_ROOT/cmake/apply-patch.sh" "$work/old/cmake"
cp "$LES_ROOT"/ggml-patch/*.patch "$work/old/ggml-patch"
cat >"$work/old/ggml-patch/9999-old.patch" <<'END'
--- /dev/null
+++ b/les-old.txt
@@ -0,0 +1 @@
+from a patch of yesterday
END
sh "$work/old/cmake/apply-patch.sh" "$tree"
check "one patch more" yes "$([ -f "$tree/les-old.txt" ] && echo yes)"
apply
check "the patch that went away is taken back" "$patched" "$(digest)"
apply --reverse

# What does not apply says so, and fails.
file=$(sed -n 's,^+++ b/\([^	]*\).*,\1,p' "$LES_ROOT"/ggml-patch/*.patch | head -n 1)
echo "not the file that the patch knows" >"$tree/$file"
status=0
apply >"$work/out" 2>&1 || status=$?
check "a tree that does not fit: failure" 1 "$status"
check "a tree that does not fit: a message" yes "$(grep -q 'does not apply to' "$work/out" && echo yes)"
