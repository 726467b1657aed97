# llama.cpp's own server (tools/server with the parts of common that it needs), as one executable beside our libllama. It is
# compiled from the same patched source; nothing is downloaded, and llama.cpp's own build files of these folders are not used:
# they would build a library of common's C++ interface, and a page that has to be fetched.

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

# The page at "/", as bytes in the executable: so it needs no key, and is there while the model loads. Browsers keep all but index.html
# for ever, so the name of its folder says which version it is.
set(page_dir "${PROJECT_SOURCE_DIR}/cpp/server/page")
file(GLOB_RECURSE page_files RELATIVE "${page_dir}" CONFIGURE_DEPENDS "${page_dir}/*.html" "${page_dir}/*.css" "${page_dir}/*.js" "${page_dir}/*.mjs")
list(SORT page_files)
set(hashes "")
foreach(name IN LISTS page_files)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${page_dir}/${name}")
    file(SHA256 "${page_dir}/${name}" hash)
    string(APPEND hashes "${name} ${hash}\n")
endforeach()
string(SHA256 page_version "${hashes}")
string(SUBSTRING "${page_version}" 0 12 page_version)

set(header "")
set(table "")
foreach(name IN LISTS page_files)
    file(READ "${page_dir}/${name}" bytes HEX)
    if(name STREQUAL "index.html")
        string(HEX "\"assets/" old)
        string(HEX "\"assets-${page_version}/" new)
        string(REPLACE "${old}" "${new}" bytes "${bytes}")
    endif()
    string(REGEX REPLACE "^assets/" "assets-${page_version}/" served "${name}")
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
    list(FIND page_files "${name}" i)
    string(APPEND header "static const unsigned char FILE_${i}[] = {${bytes}};\n")
    string(APPEND table "    { \"${served}\", FILE_${i}, sizeof(FILE_${i}) },\n")
endforeach()
string(APPEND header "static const struct { const char * name; const unsigned char * data; size_t size; } FILES[] = {\n${table}};\n"
    "static const char * const VERSION = \"\\\"${page_version}\\\"\";\n")
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/server/page.h" CONTENT "${header}" @ONLY)

file(GLOB sources CONFIGURE_DEPENDS
    "${common_src}/*.cpp" "${common_src}/jinja/*.cpp" "${common_src}/parsers/*.cpp" "${server_src}/*.cpp"
    "${PYPCD_LLAMA_DIR}/vendor/cpp-httplib/httplib.cpp" "${PROJECT_SOURCE_DIR}/cpp/server/*.cpp")
list(FILTER sources EXCLUDE REGEX "/common/(console|debug|imatrix-loader|llguidance)\\.cpp$") # for llama.cpp's other tools
list(APPEND sources "${CMAKE_BINARY_DIR}/server/build-info.cpp")

add_executable(llama-server EXCLUDE_FROM_ALL ${sources})
target_include_directories(llama-server PRIVATE
    "${common_src}" "${server_src}" "${PYPCD_LLAMA_DIR}/vendor" "${PYPCD_LLAMA_DIR}/tools/mtmd" "${PYPCD_LLAMA_DIR}"
    "${CMAKE_BINARY_DIR}/server" cpp cpp/server)
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

# Our libllama is installed as libllama.so, under the soname of the stock one, libllama.so.0: by that name the loader would find the
# stock one, which lies in llama_cpp/lib. So the executable first asks for libllama.so, which an empty library without a soname
# stands for while it is linked. What is loaded then answers to the soname too, for the executable and for libmtmd.
if(APPLE)
    set(rpath "@loader_path/../lib;@loader_path/../../llama_cpp/lib")
    add_custom_command(TARGET llama-server POST_BUILD COMMAND ${CMAKE_INSTALL_NAME_TOOL}
        -change "@rpath/libllama.${llama_soversion}.dylib" "@rpath/libllama.dylib" "$<TARGET_FILE:llama-server>")
else()
    set(rpath "$ORIGIN/../lib:$ORIGIN/../../llama_cpp/lib")
    file(WRITE "${CMAKE_BINARY_DIR}/server/empty.c" "")
    add_library(pypcd_name SHARED EXCLUDE_FROM_ALL "${CMAKE_BINARY_DIR}/server/empty.c")
    set_target_properties(pypcd_name PROPERTIES
        OUTPUT_NAME llama NO_SONAME ON LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/server")
    add_dependencies(llama-server pypcd_name)
    target_link_options(llama-server PRIVATE
        "LINKER:--push-state,--no-as-needed" "-L${CMAKE_BINARY_DIR}/server" -l:libllama.so "LINKER:--pop-state")
endif()
set_target_properties(llama-server PROPERTIES INSTALL_RPATH "${rpath}" BUILD_WITH_INSTALL_RPATH ON)

install(TARGETS llama-server COMPONENT pypcd RUNTIME DESTINATION pypcd/bin)
install(FILES "${PYPCD_LLAMA_DIR}/licenses/LICENSE-jsonhpp" COMPONENT pypcd DESTINATION pypcd/bin)
install(FILES "${PYPCD_LLAMA_DIR}/vendor/cpp-httplib/LICENSE" COMPONENT pypcd DESTINATION pypcd/bin RENAME LICENSE-cpp-httplib)
foreach(license IN ITEMS lit-html marked dompurify idb-keyval)
    install(FILES "${page_dir}/assets/vendor/${license}/LICENSE" COMPONENT pypcd DESTINATION pypcd/bin RENAME "LICENSE-${license}")
endforeach()
