#include "ui.h"

#include "page.h" // made of page.html: PAGE, PAGE_ETAG

const std::array<llama_ui_asset, 1> & llama_ui_get_assets() {
    static const std::array<llama_ui_asset, 1> assets = {{
        { "index.html", PAGE, sizeof(PAGE), PAGE_ETAG, "text/html; charset=utf-8" },
    }};
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
