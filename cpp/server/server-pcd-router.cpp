// Several models: llama-server without a model of its own, the router, starts a server for each, its child, and passes requests on.
// Knows names of models and the JSON of answers, but no settings: a child has them, and tells which ones run.

#include "server-pcd.h"

#include "server-pcd-settings.h"

#include <cstdlib>
#include <thread>

#ifndef _WIN32
#include <poll.h>
#include <unistd.h>
#endif

using json = common_json;

std::string server_pcd_model_of(const std::string & name) {
    const size_t      colon = name.rfind(':');
    const std::string end   = colon == std::string::npos ? "" : name.substr(colon + 1);

    return end == "pcd" || end.rfind("pcd-", 0) == 0 ? name.substr(0, colon) : name;
}

std::vector<std::string> server_pcd_suffixes(const json & told) {
    if (!told.is_object() || !told.contains("pcd") || !told.at("pcd").is_object() || !told.at("pcd").contains("presets")) {
        return {}; // never loaded, or PCD cannot run
    }
    const json & pcd = told.at("pcd");

    std::vector<std::string> res = { "pcd-off" };
    if (pcd.at("presets").contains(pcd.at("recommended").get<std::string>())) {
        res.insert(res.begin(), "pcd");
    }
    for (const auto & [preset, values] : pcd.at("presets").items()) {
        res.push_back("pcd-" + preset);
    }
    return res;
}

void server_pcd_list(json & models, json entry, const json & told) {
    if (told.is_object() && told.contains("pcd") && !told.at("pcd").is_null()) {
        entry["pcd"] = told.at("pcd");
    }
    models.push_back(entry);

    const std::string name = entry.at("id").get<std::string>();
    entry["aliases"] = json::array();
    entry.erase("pcd");
    for (const auto & suffix : server_pcd_suffixes(told)) {
        entry["id"] = name + ":" + suffix;
        models.push_back(entry);
    }
}

std::string server_pcd_not_found(const std::string & name, const json * told) {
    if (!told) {
        return "model '" + name + "' not found";
    }
    auto suffixes = server_pcd_suffixes(*told);
    if (suffixes.empty()) {
        suffixes = { "pcd", "pcd-off" };
    }
    return "Field 'model': " + server_pcd_wrong_name(name, name.substr(0, name.rfind(':')), suffixes);
}

std::string server_pcd_ended(const std::string & why, bool in_stream) {
    const json error = {
        { "type",  "error" }, // for clients of /v1/messages
        { "error", {
            { "code",    500 },
            { "type",    "server_error" },
            { "message", "the model's server ended before the answer did (" + why + "); the next request loads the model again" },
        } },
    };
    return in_stream ? "\n\nevent: error\ndata: " + error.dump_safe() + "\n\n" : error.dump_safe();
}

#ifndef _WIN32
// A child reads its standard input, and so learns of its router's end, once its model is loaded. This one knows it while it loads, too.
static const bool ends_with_router = [] {
    const bool is_child = std::getenv("LLAMA_SERVER_ROUTER_PORT") != nullptr;
    if (is_child) {
        std::thread([] {
            pollfd input = { 0, 0, 0 }; // nothing but that the other end is closed
            while (poll(&input, 1, -1) < 0) {}
            _exit(1);
        }).detach();
    }
    return is_child;
}();
#endif
