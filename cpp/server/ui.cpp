#include "ui.h"

#include "page.h" // made of the folder page: ASSETS

const std::vector<llama_ui_asset> & llama_ui_get_assets() {
    return ASSETS;
}

const llama_ui_asset * llama_ui_find_asset(const std::string & name) {
    for (const auto & cur : ASSETS) {
        if (cur.name == name) {
            return &cur;
        }
    }
    return nullptr;
}

bool llama_ui_use_gzip() {
    return false;
}
