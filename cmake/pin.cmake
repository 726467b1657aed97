# The only pin: "llama-cpp-python==X" in pyproject.toml's native-requires, and native-sha256, the hash of its source distribution.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" pin_line REGEX "llama-cpp-python==" LIMIT_COUNT 1)
string(REGEX REPLACE ".*llama-cpp-python==([^\"]+)\".*" "\\1" PYPCD_PIN "${pin_line}")

if(NOT PYPCD_PIN MATCHES "^[0-9]+\\.[0-9]+")
    message(FATAL_ERROR "no llama-cpp-python==VERSION in pyproject.toml's native-requires")
endif()

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" hash_line REGEX "^native-sha256" LIMIT_COUNT 1)
string(REGEX REPLACE "^native-sha256 = \"([0-9a-f]+)\".*" "\\1" PYPCD_PIN_SHA256 "${hash_line}")
