# ggml's RPC backend, which spreads a model over several machines, as a module of its own: compiled as ggml's GGML_BACKEND_DL compiles it,
# linked to the installed libggml-base, and loaded by ggml when somebody asks for it (pypcd/engine/_rpc.py). So a llama-cpp-python
# that was built without GGML_RPC, as most are, need not be built again. One that has the backend keeps its own.

set(rpc_src "${PYPCD_LLAMA_DIR}/ggml/src")
find_library(PYPCD_GGML_BASE ggml-base PATHS "${PYPCD_SITE_DIR}/llama_cpp/lib" NO_DEFAULT_PATH NO_CACHE)
if(NOT EXISTS "${rpc_src}/ggml-rpc/ggml-rpc.cpp" OR NOT PYPCD_GGML_BASE)
    message(FATAL_ERROR
        "this llama.cpp source has no ggml/src/ggml-rpc, or the installed llama-cpp-python no libggml-base; "
        "-C cmake.define.PYPCD_RPC=OFF builds pypcd without what several machines need")
endif()

find_package(Threads REQUIRED)
add_library(ggml-rpc MODULE EXCLUDE_FROM_ALL "${rpc_src}/ggml-rpc/ggml-rpc.cpp" "${rpc_src}/ggml-rpc/transport.cpp")
target_include_directories(ggml-rpc PRIVATE "${rpc_src}" "${PYPCD_LLAMA_DIR}/ggml/include")
target_compile_features(ggml-rpc PRIVATE cxx_std_17)
target_compile_definitions(ggml-rpc PRIVATE GGML_BACKEND_DL GGML_BACKEND_BUILD GGML_BACKEND_SHARED GGML_SHARED)
target_link_libraries(ggml-rpc PRIVATE "${PYPCD_GGML_BASE}" Threads::Threads)
set_target_properties(ggml-rpc PROPERTIES PREFIX lib SUFFIX .so BUILD_WITH_INSTALL_RPATH ON) # the name ggml looks for, on macOS too
if(APPLE)
    set_property(TARGET ggml-rpc PROPERTY INSTALL_RPATH "@loader_path/../../llama_cpp/lib")
else()
    set_property(TARGET ggml-rpc PROPERTY INSTALL_RPATH "$ORIGIN/../../llama_cpp/lib")
endif()

install(TARGETS ggml-rpc COMPONENT pypcd LIBRARY DESTINATION pypcd/lib)
