# Puts a private copy of llama.cpp's source at PYPCD_LLAMA_DIR, with PYPCD_PATCHES. The user's own source tree is never changed.

set(PYPCD_LLAMA_DIR "${CMAKE_BINARY_DIR}/llama.cpp-${PYPCD_PIN}")

# If a patch, the source or what is taken of it differs from the last build in this folder, start from a fresh copy.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PYPCD_PATCHES})
set(stamp "${PYPCD_LLAMA_DIR}/pypcd-source")
set(wanted "${PYPCD_LLAMA_CPP_SOURCE}")
foreach(file IN LISTS PYPCD_PATCHES CMAKE_CURRENT_LIST_FILE)
    file(SHA256 "${file}" hash)
    string(APPEND wanted " ${hash}")
endforeach()
set(found "")
if(EXISTS "${stamp}")
    file(READ "${stamp}" found)
endif()

if(NOT found STREQUAL wanted)
    set(source "${PYPCD_LLAMA_CPP_SOURCE}")

    if(NOT source)
        file(GLOB source "${CMAKE_BINARY_DIR}/sdist/llama_cpp_python-${PYPCD_PIN}.tar.gz")
    endif()
    if(NOT source)
        message(STATUS "Downloading the source of llama-cpp-python ${PYPCD_PIN}")
        execute_process(
            COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --no-deps --no-build-isolation
                --no-binary llama-cpp-python "llama-cpp-python==${PYPCD_PIN}" --dest "${CMAKE_BINARY_DIR}/sdist"
            RESULT_VARIABLE failed)
        file(GLOB source "${CMAKE_BINARY_DIR}/sdist/llama_cpp_python-*.tar.gz")
        if(failed OR NOT source)
            message(FATAL_ERROR
                "The source of llama-cpp-python ${PYPCD_PIN} could not be downloaded.\n"
                "Without a network, give a llama.cpp tree or that version's sdist: "
                "PYPCD_LLAMA_CPP_SOURCE=/path pip install .")
        endif()
        file(SHA256 "${source}" hash)
        if(NOT hash STREQUAL PYPCD_PIN_SHA256)
            file(REMOVE "${source}")
            message(FATAL_ERROR
                "The source of llama-cpp-python ${PYPCD_PIN} that was downloaded has the SHA-256 ${hash}, and pyproject.toml's "
                "native-sha256 is ${PYPCD_PIN_SHA256}: it is not the published one.")
        endif()
    endif()

    if(NOT EXISTS "${source}")
        message(FATAL_ERROR "PYPCD_LLAMA_CPP_SOURCE is '${source}', which does not exist.")
    endif()

    set(unpacked "${CMAKE_BINARY_DIR}/unpacked")
    file(REMOVE_RECURSE "${unpacked}" "${PYPCD_LLAMA_DIR}")

    if(IS_DIRECTORY "${source}")
        set(tree "${source}")
    else()
        file(ARCHIVE_EXTRACT INPUT "${source}" DESTINATION "${unpacked}" PATTERNS
            "*/vendor/llama.cpp/CMakeLists.txt" "*/vendor/llama.cpp/LICENSE" "*/vendor/llama.cpp/licenses/*"
            "*/vendor/llama.cpp/cmake/*" "*/vendor/llama.cpp/ggml/cmake/*" "*/vendor/llama.cpp/include/*" "*/vendor/llama.cpp/src/*"
            "*/vendor/llama.cpp/vendor/*" "*/vendor/llama.cpp/common/*" "*/vendor/llama.cpp/tools/server/*"
            "*/vendor/llama.cpp/tools/mtmd/*"
            "*/vendor/llama.cpp/ggml/include/*" "*/vendor/llama.cpp/ggml/src/*.h" "*/vendor/llama.cpp/ggml/src/ggml-rpc/*")
        file(GLOB tree "${unpacked}/*/vendor/llama.cpp")
    endif()

    if(NOT EXISTS "${tree}/src/llama-kv-cache.cpp")
        message(FATAL_ERROR "'${source}' is not a llama.cpp source tree or sdist (src/llama-kv-cache.cpp is missing).")
    endif()

    string(REGEX REPLACE "([][+.*()^$?|\\])" "\\\\\\1" tree_regex "${tree}") # a path may be called c++
    file(COPY "${tree}/" DESTINATION "${PYPCD_LLAMA_DIR}.new"
        PATTERN ".git" EXCLUDE PATTERN "*.gguf" EXCLUDE REGEX "^${tree_regex}/(build|tests|tools|docs|media)" EXCLUDE)
    if(EXISTS "${tree}/tools/server") # a tree for the library alone may lack it: cmake/server.cmake asks for it
        file(COPY "${tree}/tools/server" "${tree}/tools/mtmd" DESTINATION "${PYPCD_LLAMA_DIR}.new/tools"
            REGEX "/(tests|bench)$" EXCLUDE)
    endif()
    file(RENAME "${PYPCD_LLAMA_DIR}.new" "${PYPCD_LLAMA_DIR}")
    file(REMOVE_RECURSE "${unpacked}")
endif()

if(PYPCD_SERVER AND NOT EXISTS "${PYPCD_LLAMA_DIR}/tools/server")
    message(FATAL_ERROR
        "this llama.cpp source has no tools/server; -C cmake.define.PYPCD_SERVER=OFF builds pypcd without llama-server")
endif()

# Safe to run again: apply_patch.py leaves a patched copy alone.
foreach(patch IN LISTS PYPCD_PATCHES)
    get_filename_component(name "${patch}" NAME)
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/apply_patch.py" "${patch}" "${PYPCD_LLAMA_DIR}"
        RESULT_VARIABLE failed OUTPUT_VARIABLE text ERROR_VARIABLE text OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(failed)
        message(FATAL_ERROR
            "The hook patch does not apply to this llama.cpp source:\n${text}\n"
            "pypcd is written for llama-cpp-python ${PYPCD_PIN}; build from that version's source, "
            "or move the pin as cpp/README.md describes.")
    endif()
    message(STATUS "The PCD hooks of llama.cpp, ${name}: ${text}")
endforeach()
file(WRITE "${stamp}" "${wanted}")
