// ggml's RPC backend where it is a module of pypcd's (cmake/rpc.cmake): loaded before main() reads --rpc, which asks for a backend that is
// there. Knows only the variable in which pypcd serve names the file.

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>

static bool load(const char * path) {
    ggml_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) { // llama-server's own log begins later
            std::fputs(text, stderr);
        }
    }, nullptr);
    const bool res = ggml_backend_load(path);
    ggml_log_set(nullptr, nullptr);
    return res;
}

static const char * path = std::getenv("PYPCD_RPC");

static const bool loaded = path && load(path);
