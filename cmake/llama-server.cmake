# How llama.cpp's own server is compiled: tools/server with the parts of common that it needs, as one executable. Nothing is
# downloaded, and llama.cpp's own build files of these folders are not used: they would build a library of common's C++ interface,
# and a page that has to be fetched. The target `llama` and the header "ui.h" are the caller's.

find_library(PYPCD_MTMD mtmd PATHS "${PYPCD_SITE_DIR}/llama_cpp/lib" NO_DEFAULT_PATH NO_CACHE)
if(NOT PYPCD_MTMD)
    message(FATAL_ERROR
        "the installed llama-cpp-python has no libmtmd, which llama-server needs; "
        "-C cmake.define.PYPCD_SERVER=OFF builds pypcd without llama-server")
endif()

set(server_src "${PYPCD_LLAMA_DIR}/tools/server")
set(common_src "${PYPCD_LLAMA_DIR}/common")

set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT "llama-cpp-python-${PYPCD_PIN}")
set(BUILD_COMPILER     "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
set(BUILD_TARGET       "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}")
configure_file("${common_src}/build-info.cpp.in" "${CMAKE_BINARY_DIR}/server/build-info.cpp")

file(GLOB sources CONFIGURE_DEPENDS
    "${common_src}/*.cpp" "${common_src}/jinja/*.cpp" "${common_src}/parsers/*.cpp" "${server_src}/*.cpp"
    "${PYPCD_LLAMA_DIR}/vendor/cpp-httplib/httplib.cpp")
list(FILTER sources EXCLUDE REGEX "/common/(console|debug|imatrix-loader|llguidance)\\.cpp$") # for llama.cpp's other tools

add_executable(llama-server EXCLUDE_FROM_ALL ${sources} "${CMAKE_BINARY_DIR}/server/build-info.cpp")
target_include_directories(llama-server PRIVATE
    "${common_src}" "${server_src}" "${PYPCD_LLAMA_DIR}/vendor" "${PYPCD_LLAMA_DIR}/tools/mtmd" "${PYPCD_LLAMA_DIR}"
    "${CMAKE_BINARY_DIR}/server")
target_compile_features(llama-server PRIVATE cxx_std_17)
target_compile_definitions(llama-server PRIVATE
    LLAMA_SUBPROCESS # router mode starts a server for each model
    # as llama.cpp builds cpp-httplib
    CPPHTTPLIB_FORM_URL_ENCODED_PAYLOAD_MAX_LENGTH=1048576
    CPPHTTPLIB_LISTEN_BACKLOG=512
    CPPHTTPLIB_REQUEST_URI_MAX_LENGTH=32768
    CPPHTTPLIB_TCP_NODELAY=1)

find_package(Threads REQUIRED)
target_link_libraries(llama-server PRIVATE llama "${PYPCD_MTMD}" Threads::Threads ${CMAKE_DL_LIBS})

# All of this waits for the model most of the time, so it need not be compiled for the last bit of speed.
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(llama-server PRIVATE -O1)
endif()
