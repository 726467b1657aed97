#include "server-pcd-settings.h"

#include "common.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

using json = common_json;

server_pcd_settings server_pcd;

// a setting as pypcd's Python writes it: its text, and what differs from the paper's; null: off
static server_pcd_request request_from(const json & given) {
    server_pcd_request res = { !given.is_null(), llama_pcd_default_params() };
    if (res.on) {
        res.text = given.at("text").get<std::string>();
        for (const auto & field : pcd_fields) {
            if (given.at("numbers").contains(field.name)) {
                field.put(res.params, given.at("numbers").at(field.name).get<double>());
            }
        }
    }
    return res;
}

std::string server_pcd_wrong_name(const std::string & name, const std::string & model, const std::vector<std::string> & suffixes) {
    std::string res = "it is " + json(name).dump_safe() + "; allowed: " + json(model).dump_safe();
    for (const auto & cur : suffixes) {
        res += ", " + json(model + ":" + cur).dump_safe();
    }
    return res;
}

void server_pcd_settings::read(const json & all, const llama_context * ctx, const common_params & params) {
    names = params.model_alias;
    const int32_t version = all.at("version").get<int32_t>();
    if (version != llama_pcd_version()) {
        throw std::runtime_error(string_format("it has version %d of the PCD interface, this server has %d", version, llama_pcd_version()));
    }
    json given = all;
    for (const auto & name : names) {
        if (all.contains("models") && all.at("models").contains(name)) {
            for (const auto & [key, value] : all.at("models").at(name).items()) { // what differs
                given[key] = value;
            }
        }
    }
    sentences   = all.at("sentences");
    recommended = all.at("recommended").get<std::string>();
    by_default = given.at("default").get<bool>();
    required   = given.at("required").get<bool>();
    setting    = request_from(given.at("setting"));
    fixed      = given.at("fixed");

    for (const auto & cur : given.at("contexts")) {
        contexts.push_back(request_from(cur).params);
    }
    for (const auto & [name, cur] : given.at("presets").items()) {
        presets.emplace_back(name, request_from(cur));
    }
    vocab = llama_model_get_vocab(llama_get_model(ctx));
    n_ctx = (int32_t) llama_n_ctx_seq(ctx);
    if (params.kv_unified_per_slot > 0) {
        n_ctx = std::min(n_ctx, params.kv_unified_per_slot);
    }
    disk = server_pcd_disk(given.at("weights").get<std::string>(), ctx, params);
    is_given = true;
}

const server_pcd_request * server_pcd_settings::preset(const std::string & name) const {
    const auto it = std::find_if(presets.begin(), presets.end(), [&](const auto & cur) { return cur.first == name; });
    return it == presets.end() ? nullptr : &it->second;
}

static constexpr size_t N_KNOWN = 1000; // settings, and letters of one, that are remembered

server_pcd_request server_pcd_settings::of(const json & given, const server_pcd_request & base) const {
    static std::mutex mutex;
    static std::map<std::string, server_pcd_request> known; // what was asked for before

    if (given == json(false) || given == json("off")) {
        return {};
    }
    const std::string name = given == json(true) || given == json("on") ? recommended : given.is_string() ? given.get<std::string>() : "";
    if (const auto * res = preset(name)) {
        return *res;
    }
    const std::string key = (given.is_object() ? base.text : "") + given.dump_safe();
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (const auto it = known.find(key); it != known.end()) {
            return it->second;
        }
    }
    const auto res = request_from(server_pcd_ask_worker({ { "setting", given }, { "base", base.text }, { "fixed", fixed } }));

    std::lock_guard<std::mutex> lock(mutex);
    if (known.size() >= N_KNOWN) {
        known.clear();
    }
    if (key.size() <= N_KNOWN) {
        known[key] = res;
    }
    return res;
}
