// The page at "/", as llama-server asks for it (tools/server/server-http.cpp). Its bytes come from the folder page, by cmake/server.cmake.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

#define LLAMA_UI_HAS_ASSETS 1

struct llama_ui_asset {
    std::string           name;
    const unsigned char * data;
    std::size_t           size;
    std::string           etag;
    std::string           type;
};

const std::vector<llama_ui_asset> & llama_ui_get_assets();

const llama_ui_asset * llama_ui_find_asset(const std::string & name);

bool llama_ui_use_gzip();
