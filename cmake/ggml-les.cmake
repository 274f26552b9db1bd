# Builds ggml-les into a patched llama.cpp, without touching llama.cpp's own CMake files. Two ways in:
#
#   cmake -S llama.cpp -B build -DCMAKE_PROJECT_llama.cpp_INCLUDE=/path/to/ggml-les/cmake/ggml-les.cmake
#
#   add_subdirectory(llama.cpp)                     # in a project that embeds llama.cpp
#   include(/path/to/ggml-les/cmake/ggml-les.cmake)
#   ggml_les_attach()
#
# The tree must have been patched with cmake/apply-patch.sh. What is made: the target les::les (libles.a), built by
# cargo whenever the Rust sources change, and our glue files as sources of llama.cpp's own targets.

include_guard(GLOBAL)

# include() gives this file a policy scope of its own: llama.cpp's stays as it is. CMP0079 lets a target of another
# directory be linked.
cmake_policy(VERSION 3.21)

option(LES         "les: build ggml-les into llama.cpp" ON)
option(LES_INSTALL "les: install libles.a, les.h and their CMake and pkg-config files" OFF)
set(LES_LIBRARY     "" CACHE FILEPATH "les: a libles.a that was built before, instead of building it with cargo")
set(LES_RUST_TARGET "" CACHE STRING   "les: Rust target triple (default: the host's)")
set(LES_CARGO_FLAGS "" CACHE STRING   "les: more arguments for cargo build, separated by semicolons")

get_filename_component(LES_ROOT "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
set_property(GLOBAL PROPERTY LES_ROOT "${LES_ROOT}")

# The system libraries that the Rust standard library needs (rustc --print native-static-libs).
function(ggml_les_native_libs out)
    if (WIN32)
        set(libs kernel32 ntdll userenv ws2_32 dbghelp bcrypt)
    elseif (APPLE)
        set(libs System m)
    elseif (ANDROID)
        set(libs dl m)
    elseif (CMAKE_SYSTEM_NAME STREQUAL "Linux")
        set(libs pthread dl m rt)
    else()
        set(libs pthread m)
    endif()
    set(${out} ${libs} PARENT_SCOPE)
endfunction()

# Sets OUT to the archive that the target ggml-les-cargo makes.
function(ggml_les_cargo_build root out)
    find_program(LES_CARGO cargo HINTS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin" "$ENV{USERPROFILE}/.cargo/bin")
    find_program(LES_RUSTC rustc HINTS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin" "$ENV{USERPROFILE}/.cargo/bin")
    if (NOT LES_CARGO OR NOT LES_RUSTC)
        message(FATAL_ERROR
            "ggml-les needs Rust: install it (https://rustup.rs), or name a built archive with -DLES_LIBRARY=libles.a, "
            "or build llama.cpp without it with -DLES=OFF")
    endif()

    # The triple is always passed: where cargo puts the archive must not depend on the user's cargo configuration.
    set(triple "${LES_RUST_TARGET}")
    if (NOT triple)
        if (CMAKE_CROSSCOMPILING)
            message(FATAL_ERROR "ggml-les: name the Rust target when cross-compiling, "
                "e.g. -DLES_RUST_TARGET=aarch64-linux-android (rustc --print target-list shows all)")
        endif()
        execute_process(COMMAND "${LES_RUSTC}" -vV WORKING_DIRECTORY "${root}"
            OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY)
        if (NOT version MATCHES "host: ([^\r\n]+)")
            message(FATAL_ERROR "ggml-les: ${LES_RUSTC} -vV names no host")
        endif()
        set(triple "${CMAKE_MATCH_1}")
    endif()

    set(name libles.a)
    if (triple MATCHES "-msvc$")
        set(name les.lib)
    endif()
    # Not the checkout's target/: several builds may share a checkout, and it may be read-only.
    set(target_dir "${CMAKE_BINARY_DIR}/cargo")
    set(archive "${target_dir}/${triple}/release/${name}")

    set(env "CARGO_TARGET_DIR=${target_dir}")
    if (APPLE AND CMAKE_OSX_DEPLOYMENT_TARGET)
        list(APPEND env "MACOSX_DEPLOYMENT_TARGET=${CMAKE_OSX_DEPLOYMENT_TARGET}")
    endif()

    # Cargo is run in every build, as only it knows what is out of date; it leaves the archive alone when nothing is,
    # and then nothing is linked again. The program `les` and its dependencies are not for the library.
    add_custom_target(ggml-les-cargo
        COMMAND "${CMAKE_COMMAND}" -E env ${env}
            "${LES_CARGO}" build --release --locked --lib --no-default-features --target "${triple}" ${LES_CARGO_FLAGS}
        WORKING_DIRECTORY "${root}"
        BYPRODUCTS "${archive}"
        COMMENT "Building ggml-les (${triple})"
        VERBATIM)
    message(STATUS "ggml-les: cargo for ${triple}")
    set(${out} "${archive}" PARENT_SCOPE)
endfunction()

# The target les::les.
function(ggml_les_library root)
    if (TARGET les::les)
        return()
    endif()
    add_library(les::les STATIC IMPORTED GLOBAL)
    if (LES_LIBRARY)
        set(archive "${LES_LIBRARY}")
        if (NOT EXISTS "${archive}")
            message(FATAL_ERROR "ggml-les: LES_LIBRARY=${archive} does not exist")
        endif()
    else()
        ggml_les_cargo_build("${root}" archive)
        add_dependencies(les::les ggml-les-cargo)
    endif()
    ggml_les_native_libs(libs)
    set_target_properties(les::les PROPERTIES
        IMPORTED_LOCATION             "${archive}"
        INTERFACE_INCLUDE_DIRECTORIES "${root}/include"
        INTERFACE_LINK_LIBRARIES      "${libs}")
endfunction()

# Stops when none of the files that the patches change has heard of us: everything would build, and never stream.
function(ggml_les_check_patched root tree)
    file(GLOB patches "${root}/ggml-patch/*.patch")
    foreach (patch IN LISTS patches)
        file(STRINGS "${patch}" names REGEX "^[+][+][+] b/")
        foreach (name IN LISTS names)
            string(REGEX REPLACE "^[+][+][+] b/([^\t]+).*" "\\1" name "${name}")
            if (EXISTS "${tree}/${name}")
                file(STRINGS "${tree}/${name}" found REGEX "GGML_USE_LES" LIMIT_COUNT 1)
                if (found)
                    return()
                endif()
            endif()
        endforeach()
    endforeach()
    if (patches)
        message(FATAL_ERROR "ggml-les: ${tree} is not patched; run: sh ${root}/cmake/apply-patch.sh ${tree}")
    endif()
endfunction()

function(ggml_les_add_glue target root file)
    target_sources(${target} PRIVATE "${root}/ggml-patch/${file}")
    target_compile_features(${target} PRIVATE cxx_std_17)
endfunction()

function(ggml_les_install root)
    include(GNUInstallDirs)
    include(CMakePackageConfigHelpers)
    file(STRINGS "${root}/Cargo.toml" version REGEX "^version *= *\"" LIMIT_COUNT 1)
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" LES_VERSION "${version}")
    get_target_property(archive les::les IMPORTED_LOCATION)
    get_filename_component(LES_ARCHIVE "${archive}" NAME)
    ggml_les_native_libs(LES_NATIVE_LIBS)
    list(TRANSFORM LES_NATIVE_LIBS PREPEND "-l" OUTPUT_VARIABLE flags)
    list(JOIN flags " " LES_PC_LIBS)

    set(out "${CMAKE_BINARY_DIR}/ggml-les")
    set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/les")
    configure_package_config_file("${root}/cmake/lesConfig.cmake.in" "${out}/lesConfig.cmake"
        INSTALL_DESTINATION "${config_dir}"
        PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
    # before 1.0 a minor version may break
    write_basic_package_version_file("${out}/lesConfigVersion.cmake"
        VERSION "${LES_VERSION}" COMPATIBILITY SameMinorVersion)
    configure_file("${root}/cmake/les.pc.in" "${out}/les.pc" @ONLY)

    install(FILES "${archive}" DESTINATION "${CMAKE_INSTALL_LIBDIR}")
    install(FILES "${root}/include/les.h" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
    install(FILES "${out}/lesConfig.cmake" "${out}/lesConfigVersion.cmake" DESTINATION "${config_dir}")
    install(FILES "${out}/les.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
endfunction()

# Adds the library and the glue to llama.cpp's targets, which must exist.
function(ggml_les_attach)
    get_property(attached GLOBAL PROPERTY LES_ATTACHED)
    if (attached)
        return()
    endif()
    set_property(GLOBAL PROPERTY LES_ATTACHED ON)
    if (NOT LES)
        message(STATUS "ggml-les: off")
        return()
    endif()
    if (NOT TARGET ggml-base)
        message(FATAL_ERROR "ggml-les: there is no target ggml-base; call ggml_les_attach() after llama.cpp was added")
    endif()

    get_property(root GLOBAL PROPERTY LES_ROOT)
    get_target_property(ggml_src ggml-base SOURCE_DIR)
    get_filename_component(tree "${ggml_src}/../.." ABSOLUTE)
    ggml_les_check_patched("${root}" "${tree}")
    ggml_les_library("${root}")

    # One library owns LES and its state; the others reach it through the glue's own functions. The archive's symbols
    # stay inside, as those of the Rust standard library would meet another Rust library's.
    ggml_les_add_glue(ggml-base "${root}" ggml-les.cpp)
    ggml_les_add_glue(ggml-base "${root}" ggml-les-walk.cpp)
    ggml_les_add_glue(ggml-base "${root}" ggml-les-spec.cpp)
    target_link_libraries(ggml-base PRIVATE les::les)
    target_compile_definitions(ggml-base PUBLIC GGML_USE_LES)
    target_include_directories(ggml-base PUBLIC "$<BUILD_INTERFACE:${root}/ggml-patch>" "$<BUILD_INTERFACE:${root}/include>")
    get_target_property(type ggml-base TYPE)
    if (type STREQUAL "SHARED_LIBRARY" AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND NOT APPLE AND NOT MSVC)
        get_target_property(archive les::les IMPORTED_LOCATION)
        get_filename_component(archive "${archive}" NAME)
        target_link_options(ggml-base PRIVATE "LINKER:--exclude-libs,${archive}")
    endif()

    # ggml-cpu, or with GGML_CPU_ALL_VARIANTS one library per instruction set
    get_property(targets DIRECTORY "${ggml_src}" PROPERTY BUILDSYSTEM_TARGETS)
    list(FILTER targets INCLUDE REGEX "^ggml-cpu(-|$)")
    foreach (target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        if (type MATCHES "^(STATIC|SHARED|MODULE)_LIBRARY$")
            ggml_les_add_glue(${target} "${root}" ggml-les-cpu.cpp)
        endif()
    endforeach()

    if (TARGET llama-common)
        ggml_les_add_glue(llama-common "${root}" common-les.cpp)
        ggml_les_add_glue(llama-common "${root}" common-les-spec.cpp)
    endif()

    if (LES_INSTALL)
        ggml_les_install("${root}")
    endif()
endfunction()

# Included by llama.cpp's own project(): its targets come later, and the end of its CMakeLists.txt is the first moment
# when all of them are there.
if (PROJECT_NAME STREQUAL "llama.cpp" AND CMAKE_CURRENT_SOURCE_DIR STREQUAL PROJECT_SOURCE_DIR AND NOT TARGET ggml-base)
    cmake_language(DEFER CALL ggml_les_attach)
    # A tree without a repository of its own must not take the commit of one around it for its version: all of ggml
    # would be compiled anew after each of our commits.
    if (NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.git")
        get_filename_component(LES_CEILING "${CMAKE_CURRENT_SOURCE_DIR}" DIRECTORY)
        set(ENV{GIT_CEILING_DIRECTORIES} "${LES_CEILING}")
    endif()
endif()
