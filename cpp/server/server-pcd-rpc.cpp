// ggml's RPC backend where it is a module of pypcd's (cmake/rpc.cmake): loaded before main() reads --rpc, which asks for a backend that is
// there. Knows only the variable in which pypcd serve names the file.

#include "ggml-backend.h"

#include <cstdlib>

static const bool loaded = [] {
    const char * path = std::getenv("PYPCD_RPC");
    return path && ggml_backend_load(path);
}();
