# Set-up shared by cmake/quickstart.sh and tests/run.sh: brings the tools and llama.cpp, patches it, builds it with
# ggml-les. POSIX sh, to be sourced with LES_ROOT set to this repository. Each function may be called again: it does
# only what is missing. Everything lands under build/:
#
#   build/download         what was downloaded
#   build/llama.cpp-stock  llama.cpp as it is at the pinned commit
#   build/llama.cpp        the same, patched
#   build/bin              llama.cpp's programs with ggml-les, and `les`
#   build/NAME/bin         other builds, to compare with (tests only)
#
# shellcheck shell=sh

: "${LES_ROOT:?setup.sh: LES_ROOT must name the repository}"
LES_BUILD=$LES_ROOT/build
LES_TOOLS=$LES_BUILD/download/tools
# makes llama.cpp's own project() read our CMake file
LES_ATTACH=-DCMAKE_PROJECT_llama.cpp_INCLUDE=$LES_ROOT/cmake/ggml-les.cmake
# shellcheck source=ggml-patch/LLAMA_CPP_VERSION
. "$LES_ROOT/ggml-patch/LLAMA_CPP_VERSION"

les_say() {
    printf '==> %s\n' "$*" >&2
}

# LINE...: the first says what is wrong, the others what to do.
les_die() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

les_have() {
    command -v "$1" >/dev/null 2>&1
}

# A.B.C >= X.Y.Z?
les_version_ge() {
    printf '%s.0.0.0\n%s.0.0.0\n' "$1" "$2" | awk -F. '
        NR == 1 { split($0, a) }
        NR == 2 { for (i = 1; i <= 3; i++) if (a[i] + 0 != $i + 0) exit !(a[i] + 0 > $i + 0) }'
}

les_jobs() {
    echo "${LES_JOBS:-$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)}"
}

# PACKAGE...: installs Debian packages where that is possible.
les_apt() {
    [ "$(id -u)" -eq 0 ] && les_have apt-get || return 1
    les_say "apt-get install $*"
    mkdir -p "$LES_BUILD"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
        >"$LES_BUILD/apt.log" 2>&1 </dev/null || {
        tail -n 5 "$LES_BUILD/apt.log" >&2
        return 1
    }
}

# Sets LES_PIP to a pip that works.
les_find_pip() {
    les_have python3 || les_apt python3 ||
        les_die "python3 is missing" "install it, e.g. apt-get install python3 python3-pip python3-venv"
    python3 -m pip --version >/dev/null 2>&1 && LES_PIP="python3 -m pip" && return
    # Debian's python3 has no pip, but with python3-venv each new environment has one.
    if python3 -m venv "$LES_TOOLS/pip" >/dev/null 2>&1; then
        LES_PIP="$LES_TOOLS/pip/bin/python -m pip" && return
    fi
    les_apt python3-pip && LES_PIP="python3 -m pip" && return
    les_die "python3 has no pip" "install it, e.g. apt-get install python3-pip (or python3-venv)"
}

# cmake >= 3.21 and ninja, from a package where they are missing.
les_find_cmake() {
    # first what an earlier run installed
    PATH=$LES_TOOLS/cmake/bin:$PATH
    export PATH
    les_cmake_works && return
    les_say "cmake >= 3.21 or ninja is missing: installing both under build/download/tools"
    les_find_pip
    # A folder instead of an environment: needs neither venv nor root, and Debian's "externally managed" guard does
    # not mind. The programs are called where the packages keep them, as their launchers would need PYTHONPATH.
    if $LES_PIP install --disable-pip-version-check --quiet --upgrade --target "$LES_TOOLS/python" cmake ninja; then
        mkdir -p "$LES_TOOLS/cmake/bin"
        for les_tool in cmake ninja; do
            for les_file in "$LES_TOOLS/python/$les_tool/data/bin/$les_tool" "$LES_TOOLS/python/bin/$les_tool"; do
                [ ! -x "$les_file" ] || { ln -sf "$les_file" "$LES_TOOLS/cmake/bin/$les_tool" && break; }
            done
        done
    fi
    les_cmake_works && return
    les_apt cmake ninja-build && hash -r && les_cmake_works && return
    les_die "cmake >= 3.21 and ninja are needed" "install them, e.g. apt-get install cmake ninja-build, or pip install cmake ninja"
}

les_cmake_works() {
    les_have ninja || return 1
    les_version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')
    [ -n "$les_version" ] && les_version_ge "$les_version" 3.21
}

les_find_compilers() {
    les_have cargo || PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    les_rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$LES_ROOT/Cargo.toml")
    les_have cargo ||
        les_die "Rust is missing (cargo is not in PATH)" "install Rust >= $les_rust: https://rustup.rs"
    les_version=$(cargo --version | sed 's/^cargo \([0-9.]*\).*/\1/')
    les_version_ge "$les_version" "$les_rust" ||
        les_die "cargo $les_version is too old" "Rust >= $les_rust is needed: rustup update, or https://rustup.rs"
    les_have "${CXX:-c++}" || les_apt g++ ||
        les_die "no C++ compiler (${CXX:-c++} is not in PATH)" "install one, e.g. apt-get install g++, or name yours in CXX"
}

les_find_tools() {
    les_find_compilers
    les_find_cmake
}

les_sha256() {
    if les_have sha256sum; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1
}

# FROM TO: a copy of a source tree, all files new: ninja goes by file times, and would take a replaced tree's older
# files for compiled.
les_copy_tree() {
    rm -rf "$2.part"
    mkdir -p "$2.part"
    (cd "$1" && tar -cf - --exclude=./build --exclude=./.git .) | (cd "$2.part" && tar -xmf -)
    rm -rf "$2"
    mv "$2.part" "$2"
}

# DIR: is it a llama.cpp tree?
les_is_llama_cpp() {
    [ -f "$1/ggml/src/CMakeLists.txt" ] && [ -f "$1/common/CMakeLists.txt" ]
}

# DIR: the pinned commit by git. Quiet where there is no network: there are other ways.
les_clone() {
    les_have git || return 1
    # a host that cannot be reached must not hold us up for minutes; a slow download may take its time
    les_limit=
    ! les_have timeout || les_limit="timeout 20"
    GIT_TERMINAL_PROMPT=0 $les_limit git ls-remote --exit-code "$LLAMA_CPP_REPO" HEAD >/dev/null 2>&1 || return 1
    les_say "git: llama.cpp at $LLAMA_CPP_COMMIT"
    rm -rf "$1.git"
    git init --quiet "$1.git" &&
        git -C "$1.git" fetch --progress --depth 1 "$LLAMA_CPP_REPO" "$LLAMA_CPP_COMMIT" &&
        git -C "$1.git" -c core.autocrlf=false checkout --quiet FETCH_HEAD &&
        les_copy_tree "$1.git" "$1" && rm -rf "$1.git"
}

# DIR: the same tree out of a Python package's source distribution.
les_unpack_sdist() {
    les_tar=$LES_BUILD/download/$(echo "$LLAMA_CPP_SDIST" | sed 's/==/-/; s/-\([a-z]\)/_\1/g').tar.gz
    if [ ! -f "$les_tar" ] || [ "$(les_sha256 "$les_tar")" != "$LLAMA_CPP_SDIST_SHA256" ]; then
        les_find_pip
        les_say "pip: $LLAMA_CPP_SDIST, which carries llama.cpp at the same commit (77 MB)"
        mkdir -p "$LES_BUILD/download"
        # Given a hash, pip checks it before it runs anything of the package.
        echo "$LLAMA_CPP_SDIST --hash=sha256:$LLAMA_CPP_SDIST_SHA256" >"$LES_BUILD/download/sdist.txt"
        $LES_PIP download --disable-pip-version-check --no-deps --no-binary "${LLAMA_CPP_SDIST%%=*}" \
            -d "$LES_BUILD/download" -r "$LES_BUILD/download/sdist.txt" >&2 || return 1
    fi
    [ "$(les_sha256 "$les_tar")" = "$LLAMA_CPP_SDIST_SHA256" ] ||
        les_die "$les_tar is not what was expected (SHA-256)" "delete it and try again"
    les_say "unpacking llama.cpp"
    rm -rf "$LES_BUILD/download/sdist"
    mkdir -p "$LES_BUILD/download/sdist"
    tar -xzf "$les_tar" -C "$LES_BUILD/download/sdist" || return 1
    for les_tree in "$LES_BUILD"/download/sdist/*/vendor/llama.cpp; do
        les_copy_tree "$les_tree" "$1"
    done
    rm -rf "$LES_BUILD/download/sdist"
}

# The pristine tree. LES_LLAMA_CPP_DIR names a copy to take instead of downloading one.
les_bring_stock() {
    les_stock=$LES_BUILD/llama.cpp-stock
    les_want="$LLAMA_CPP_COMMIT ${LES_LLAMA_CPP_DIR:-}"
    if [ "$(cat "$les_stock/.les-origin" 2>/dev/null)" = "$les_want" ]; then
        return
    fi
    if [ -n "${LES_LLAMA_CPP_DIR:-}" ]; then
        les_is_llama_cpp "$LES_LLAMA_CPP_DIR" ||
            les_die "LES_LLAMA_CPP_DIR=$LES_LLAMA_CPP_DIR is not a llama.cpp source tree"
        les_say "copying $LES_LLAMA_CPP_DIR"
        les_copy_tree "$LES_LLAMA_CPP_DIR" "$les_stock"
    else
        les_clone "$les_stock" || les_unpack_sdist "$les_stock" ||
            les_die "llama.cpp at commit $LLAMA_CPP_COMMIT could not be had" \
                "tried: git ($LLAMA_CPP_REPO), pip ($LLAMA_CPP_SDIST)" \
                "download the commit by hand and name its folder: LES_LLAMA_CPP_DIR=/path/to/llama.cpp"
    fi
    les_is_llama_cpp "$les_stock" || les_die "$les_stock is not a llama.cpp source tree" "delete it and try again"
    echo "$les_want" >"$les_stock/.les-origin"
}

# The patched tree.
les_bring_patched() {
    les_bring_stock
    les_patched=$LES_BUILD/llama.cpp
    if ! cmp -s "$les_stock/.les-origin" "$les_patched/.les-origin"; then
        les_copy_tree "$les_stock" "$les_patched"
    fi
    sh "$LES_ROOT/cmake/apply-patch.sh" "$les_patched" >&2 || exit 1
}

# Prints what the C++ compiler is told so that llama.cpp runs here. GCC 12.2 drops most of the tile configuration that a program
# gives to AMX, and llama.cpp ends with an illegal instruction where the processor has AMX. Said to be its bug 114098, mended in these
# versions.
les_cxx_flags() {
    "${CXX:-c++}" --version 2>/dev/null | grep -q 'Free Software Foundation' || return 0
    case $("${CXX:-c++}" -dumpmachine) in x86_64*) ;; *) return 0 ;; esac
    les_version=$("${CXX:-c++}" -dumpfullversion)
    case $les_version in
    11.*) les_mended=11.5 ;;
    12.*) les_mended=12.4 ;;
    13.*) les_mended=13.3 ;;
    *) return 0 ;;
    esac
    les_version_ge "$les_version" $les_mended || echo -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
}

# SOURCE BUILD [OPTION...]: configures once for these options; ninja runs cmake again when its files change.
les_configure() {
    les_source=$1 les_dir=$2
    shift 2
    # The commit is told, as llama.cpp would take that of the repository around its tree.
    les_flags=$(les_cxx_flags)
    [ -z "$les_flags" ] || set -- "-DCMAKE_CXX_FLAGS=${CXXFLAGS:-} $les_flags" "$@"
    set -- -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_NUMBER=0 "-DLLAMA_BUILD_COMMIT=$(echo "$LLAMA_CPP_COMMIT" | cut -c1-9)" "$@"
    if [ -f "$les_dir/build.ninja" ] && [ "$(cat "$les_dir/.les-options" 2>/dev/null)" = "$*" ]; then
        return
    fi
    les_say "configuring $les_source"
    mkdir -p "$les_dir"
    GIT_CEILING_DIRECTORIES=$LES_BUILD cmake -S "$les_source" -B "$les_dir" "$@" >"$les_dir/configure.log" 2>&1 || {
        tail -n 30 "$les_dir/configure.log" >&2
        les_die "llama.cpp could not be configured" "the whole log is in $les_dir/configure.log"
    }
    echo "$*" >"$les_dir/.les-options"
}

# BUILD TARGET...
les_compile() {
    les_dir=$1
    shift
    les_say "building $*"
    # ccache compares paths relative to this: the objects of another build or checkout fit
    CCACHE_BASEDIR="${CCACHE_BASEDIR:-$LES_ROOT}" NINJA_STATUS="[%f/%t %es] " cmake --build "$les_dir" --parallel "$(les_jobs)" --target "$@" >&2 ||
        les_die "the build in $les_dir failed" "its output is above"
}

# [TARGET...]: llama.cpp with ggml-les in build/bin, with the programs of every day and more TARGETs.
# LES_CMAKE_FLAGS: more options for cmake, separated by spaces.
les_build() {
    les_bring_patched
    # shellcheck disable=SC2086 # the flags are words
    les_configure "$les_patched" "$LES_BUILD" ${LES_CMAKE_FLAGS:-} "$LES_ATTACH"
    les_compile "$LES_BUILD" llama-cli llama-completion llama-bench llama-server llama-perplexity llama-quantize \
        llama-imatrix "$@"
    les_build_program
}

# The program `les`, in build/bin. It has a folder of its own: with its features, cargo would build the library anew.
les_build_program() {
    les_say "building les"
    (cd "$LES_ROOT" && CARGO_TARGET_DIR=$LES_BUILD/cargo-les cargo build --release --locked --bin les --message-format json-render-diagnostics) \
        >"$LES_BUILD/les.json" || les_die "cargo could not build the program les" "its output is above"
    # where cargo puts it depends on the user's configuration: cargo tells
    les_program=$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' "$LES_BUILD/les.json")
    mkdir -p "$LES_BUILD/bin"
    cmp -s "$les_program" "$LES_BUILD/bin/les" || cp -f "$les_program" "$LES_BUILD/bin/les"
}

# NAME SOURCE "TARGET..." OPTION...: another build, in build/NAME. It sees its source as ./llama.cpp, just as the main
# build does: so ccache has most of the objects of the one when it made those of the other.
les_build_beside() {
    les_name=$1 les_source=$2 les_targets=$3
    shift 3
    mkdir -p "$LES_BUILD/$les_name"
    ln -sfn "../$(basename "$les_source")" "$LES_BUILD/$les_name/llama.cpp"
    # shellcheck disable=SC2086 # the flags and the targets are words
    {
        les_configure "$LES_BUILD/$les_name/llama.cpp" "$LES_BUILD/$les_name" ${LES_CMAKE_FLAGS:-} "$@"
        les_compile "$LES_BUILD/$les_name" $les_targets
    }
}
