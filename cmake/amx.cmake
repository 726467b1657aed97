# Builds ggml's AMX kernels rightly with a compiler that loses part of their set-up. ggml's own build runs this file, when
# llama-cpp-python is built with CMAKE_PROJECT_ggml_INCLUDE=<this file>, as llama-cpp-python.cmake says.
#
# _tile_loadconfig reads 64 bytes. Some compilers (GCC 12) believe that it reads 8, and remove the stores of the others. The
# address of a function that does not exist is stored behind the first 8: if a program with it can be linked, the store is gone.

include(CheckCXXSourceCompiles)

set(PYPCD_TILE_CONFIG "
    #include <immintrin.h>
    extern \"C\" void the_store_survives();
    struct alignas(64) tile_config { unsigned char palette, start_row, reserved[14]; const void * marker; unsigned char rest[40]; };
    void configure() {
        tile_config config = {};
        config.palette = 1;
        config.marker  = reinterpret_cast<const void *>(&the_store_survives);
        _tile_loadconfig(&config);
    }
    int main(int argc, char **) { if (argc > 99) { configure(); } return 0; }")
set(PYPCD_AMX_CURE -fno-tree-dse -fno-dse) # removes no store as dead

set(CMAKE_REQUIRED_FLAGS "-O3 -mamx-tile") # a compiler without AMX links nothing
check_cxx_source_compiles("${PYPCD_TILE_CONFIG}" PYPCD_COMPILER_BREAKS_AMX)
string(JOIN " " CMAKE_REQUIRED_FLAGS "${CMAKE_REQUIRED_FLAGS}" ${PYPCD_AMX_CURE})
if(PYPCD_COMPILER_BREAKS_AMX)
    check_cxx_source_compiles("${PYPCD_TILE_CONFIG}" PYPCD_AMX_CURE_FAILS)
endif()
unset(CMAKE_REQUIRED_FLAGS)

function(pypcd_cure_amx source folder)
    if(NOT EXISTS "${source}")
        message(FATAL_ERROR "ggml has no ${source}, where its AMX kernels were; cmake/amx.cmake has to follow it")
    endif()
    set_property(SOURCE "${source}" DIRECTORY "${folder}" APPEND PROPERTY COMPILE_OPTIONS ${PYPCD_AMX_CURE})
    string(JOIN " " text ${PYPCD_AMX_CURE})
    message(STATUS "AMX: this compiler loses stores before _tile_loadconfig; compiling ${source} with ${text}")
endfunction()

if(PYPCD_AMX_CURE_FAILS)
    message(WARNING "AMX: this compiler loses stores before _tile_loadconfig, with ${PYPCD_AMX_CURE} too; AMX will not work")
elseif(PYPCD_COMPILER_BREAKS_AMX)
    # deferred: the folder with ggml's targets is entered later
    cmake_language(DEFER CALL pypcd_cure_amx
        "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/mmq.cpp" "${CMAKE_CURRENT_SOURCE_DIR}/src")
endif()
