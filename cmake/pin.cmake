# The only pin: "llama-cpp-python==X" in pyproject.toml's native-requires.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" pin_line REGEX "llama-cpp-python==" LIMIT_COUNT 1)
string(REGEX REPLACE ".*llama-cpp-python==([^\"]+)\".*" "\\1" PYPCD_PIN "${pin_line}")

if(NOT PYPCD_PIN MATCHES "^[0-9]+\\.[0-9]+")
    message(FATAL_ERROR "no llama-cpp-python==VERSION in pyproject.toml's native-requires")
endif()
