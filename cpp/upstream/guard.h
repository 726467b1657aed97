// The one guard between C++ and C: no exception of ours reaches a caller. Knows nothing of what it guards.

#pragma once

#include "llama-impl.h"

#include <cstdio>
#include <exception>

// run fn; if it throws, write what it says into text[n_text] (null: nowhere) and return false
template <typename F>
bool llama_pcd_guarded(char * text, size_t n_text, const F & fn) noexcept {
    const auto failed = [&](const char * what) {
        if (text && n_text > 0) {
            snprintf(text, n_text, "%s", what);
        }
        return false;
    };
    try {
        fn();
        return true;
    } catch (const std::exception & e) {
        return failed(e.what());
    } catch (...) {
        return failed("unknown exception");
    }
}

// run fn for its value; if it throws, log a line in the name of `caller` and return `failed`
template <typename T, typename F>
T llama_pcd_guarded_value(const char * caller, T failed, const F & fn) noexcept {
    char text[256] = {};
    T    res       = failed;

    if (!llama_pcd_guarded(text, sizeof(text), [&]() { res = fn(); })) {
        llama_pcd_guarded(nullptr, 0, [&]() { LLAMA_LOG_ERROR("%s: %s\n", caller, text); }); // the log needs memory too
        return failed;
    }
    return res;
}
