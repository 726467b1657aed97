# llama.cpp's own server as one executable beside our libllama, compiled from the same patched source (llama-server.cmake says how).

include(cmake/llama-server.cmake)
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cpp/server/*.cpp")
target_sources(llama-server PRIVATE ${sources})
target_include_directories(llama-server PRIVATE cpp cpp/server "${PYPCD_FIELDS_DIR}")

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
    string(REGEX REPLACE ".*\\.m?js$" "javascript" type "${name}")
    string(REGEX REPLACE ".*\\.(html|css)$" "\\1" type "${type}")
    string(APPEND table
        "    { \"${served}\", FILE_${i}, sizeof(FILE_${i}), \"\\\"${page_version}\\\"\", \"text/${type}; charset=utf-8\" },\n")
endforeach()
string(APPEND header "static const std::vector<llama_ui_asset> ASSETS = {\n${table}};\n")
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/server/page.h" CONTENT "${header}" @ONLY)

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
foreach(license IN ITEMS lit-html marked dompurify idb-keyval highlight.js katex)
    install(FILES "${page_dir}/assets/vendor/${license}/LICENSE" COMPONENT pypcd DESTINATION pypcd/bin RENAME "LICENSE-${license}")
endforeach()
