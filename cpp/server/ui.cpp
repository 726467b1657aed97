#include "ui.h"

#include "page.h" // made of the folder page: FILES, VERSION

static std::string type_of(const std::string & name) {
    const std::string end = name.substr(name.rfind('.') + 1);
    return end == "html" ? "text/html; charset=utf-8" : end == "css" ? "text/css; charset=utf-8" : "text/javascript; charset=utf-8";
}

const std::vector<llama_ui_asset> & llama_ui_get_assets() {
    static const std::vector<llama_ui_asset> assets = [] {
        std::vector<llama_ui_asset> res;
        for (const auto & file : FILES) {
            res.push_back({ file.name, file.data, file.size, VERSION, type_of(file.name) });
        }
        return res;
    }();
    return assets;
}

const llama_ui_asset * llama_ui_find_asset(const std::string & name) {
    for (const auto & cur : llama_ui_get_assets()) {
        if (cur.name == name) {
            return &cur;
        }
    }
    return nullptr;
}

bool llama_ui_use_gzip() {
    return false;
}
