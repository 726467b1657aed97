# How llama-cpp-python is best built for pypcd: its build runs this file with CMAKE_PROJECT_llama_cpp_INCLUDE=<this file>, as
# scripts/install.py does. The wheel is as good for everybody else, so it may stay in pip's cache.

# llama.cpp's library "common" takes two fifths of the time, and makes one file, site-packages/lib/libllama-common.so, that nothing loads.
# llama-cpp-python sets this by force, but in the cache; a variable goes before it.
set(LLAMA_BUILD_COMMON OFF)

set(CMAKE_PROJECT_ggml_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/amx.cmake")
