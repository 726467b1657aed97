#include "server-pcd.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "ggml-backend.h"
#include "log.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

using json = common_json;

// before main(), for `pypcd serve`: AMX is decided before a model is loaded, and --rpc asks for a backend that is there
static const bool is_prepared = [] {
    const char * amx = std::getenv("PYPCD_AMX");
    const char * rpc = std::getenv("PYPCD_RPC"); // where it is a module of pypcd's (cmake/rpc.cmake)
    llama_pcd_set_amx(amx && std::string(amx) == "1");
    return !rpc || ggml_backend_load(rpc);
}();

//
// the context
//

void server_pcd_loading(const std::string & stage, float progress) {
    if (stage == "text_model" && std::getenv("LLAMA_ARG_PCD")) {
        printf("loaded %d%%\n", (int) (100.0f*progress));
        fflush(stdout);
    }
}

// an error of libllama's, for a client: without the names of C functions, and with the server's own names of options
static std::string reason(std::string res) {
    if (res.rfind("sequence ", 0) == 0 && res.find(": ") != std::string::npos) {
        res = res.substr(res.find(": ") + 2);
    }
    for (size_t start; (start = res.find(" (llama_")) != std::string::npos && res.find(')', start) != std::string::npos; ) {
        res.erase(start, res.find(')', start) + 1 - start);
    }
    string_replace_all(res, "kv_unified = true", "--kv-unified");
    string_replace_all(res, "the context's", "this server's");
    string_replace_all(res, "the context can change", "`pypcd serve --pcd` can change");
    return res;
}

// Puts PCD in force in a new context, where it is off for every sequence until its request asks for it. Empty, or why it cannot run.
static std::string try_context(llama_context * ctx) {
    char err[512] = "";
    const auto try_setting = [&](llama_pcd_params params) {
        const bool ok = llama_pcd_set_seq(ctx, 0, &params, err, sizeof(err)) == LLAMA_PCD_OK;
        llama_pcd_unset_seq(ctx, 0);
        return ok;
    };
    const auto set = [&](const llama_pcd_params & cur) { return llama_pcd_set(ctx, &cur, err, sizeof(err)) == LLAMA_PCD_OK; };
    const auto found = std::find_if(server_pcd.contexts.begin(), server_pcd.contexts.end(), set);
    if (found == server_pcd.contexts.end()) {
        return err;
    }
    server_pcd.context = *found;
    server_pcd.is_on   = server_pcd.by_default;
    for (const auto & [name, preset] : server_pcd.presets) {
        llama_pcd_params params = preset.params;
        if (params.cache == LLAMA_PCD_CACHE_REROTATED) {
            params.window = 1; // nothing is allocated for the trial
        }
        if (try_setting(params)) {
            server_pcd.runs.push_back(name);
        }
    }
    if (server_pcd.by_default) {
        return try_setting(server_pcd.setting.params) ? "" : err; // its second keys stay
    }
    llama_pcd_set(ctx, nullptr, nullptr, 0); // plain requests cost what they cost in llama.cpp, until the first one with PCD
    llama_pcd_trim(ctx);
    return "";
}

bool server_pcd_load(llama_context * ctx, const common_params & params) {
    server_pcd = {};

    const char * given = std::getenv("LLAMA_ARG_PCD");
    if (!given || !*given) {
        return true;
    }
    try {
        server_pcd.read(json::parse(given), ctx, params);
    } catch (const std::exception & e) {
        LOG_ERR("%s: LLAMA_ARG_PCD cannot be read: %s; `pypcd serve` writes it\n", __func__, e.what());
        return false;
    }
    // --backend-sampling gives every sequence a sampler, beside which PCD is refused; a slot gets its own with each request
    for (llama_seq_id id = 0; id < (llama_seq_id) llama_n_seq_max(ctx); ++id) {
        llama_set_sampler(ctx, id, nullptr);
    }
    const std::string err = params.speculative.need_n_rs_seq() > 0 ?
        "this server speculates with the model's hidden states (EAGLE-3, MTP, DFlash, DSpark)" : reason(try_context(ctx));
    if (err.empty()) {
        return true;
    }
    server_pcd.refusal = "PCD cannot run here: " + err;
    LOG_ERR("%s: %s\n", __func__, server_pcd.refusal.c_str());
    const bool goes_on = !server_pcd.by_default || !server_pcd.required;
    server_pcd.by_default = false;
    return goes_on;
}

bool server_pcd_begin(
        llama_context * ctx, llama_seq_id id, const server_pcd_request & request, server_pcd_answer & answer, std::string & err) {
    answer = { request, {} };
    if (!request.on) {
        llama_pcd_unset_seq(ctx, id);
        return true;
    }
    char text[512] = "";
    // the first one sets the context; what other threads read stays as it is
    server_pcd.is_on = server_pcd.is_on || llama_pcd_set(ctx, &server_pcd.context, text, sizeof(text)) == LLAMA_PCD_OK;
    if (server_pcd.is_on && llama_pcd_set_seq(ctx, id, &request.params, text, sizeof(text)) == LLAMA_PCD_OK) {
        return true;
    }
    err = std::string("Field 'pcd': ") + (server_pcd.is_on ? "" : "PCD cannot run here: ") + reason(text);
    return false;
}

void server_pcd_prompt(llama_context * ctx, llama_seq_id id, const server_pcd_request & request, llama_pos last) {
    if (request.on) {
        llama_pcd_begin(ctx, id, last); // the slot may hold an earlier answer, which libllama would go on with
    }
}

//
// requests
//

// The setting that the end of a model's name asks for, "pcd" or "pcd-<preset>"; empty: none. Clients send any name, such as "gpt-4", but
// another end behind the name of this server's model is a mistake.
static std::string suffix_of(const json & body) {
    if (!body.contains("model") || !body.at("model").is_string()) {
        return {};
    }
    const std::string model = body.at("model").get<std::string>();

    std::string own; // of the names that it begins with the longest
    for (const auto & name : server_pcd.names) {
        if (model == name) {
            return {};
        }
        if (model.rfind(name + ":", 0) == 0 && name.size() > own.size()) {
            own = name;
        }
    }
    const std::string front = own.empty() ? server_pcd_model_of(model) : own;
    if (front.size() == model.size()) {
        return {};
    }
    const std::string suffix  = model.substr(front.size() + 1);
    const auto        ends    = server_pcd_suffixes({ { "pcd", server_pcd_props() } });
    const bool        can_run = server_pcd.is_given && server_pcd.refusal.empty(); // else all that ask for PCD hear why not
    const bool        asks    = server_pcd_model_of(model) == front;
    if (std::find(ends.begin(), ends.end(), suffix) == ends.end() && (can_run || !asks)) {
        throw std::invalid_argument(server_pcd_wrong_name(model, front, ends));
    }
    return suffix;
}

static bool suffix_asks(const std::string & suffix) {
    return !suffix.empty() && suffix != "pcd-off";
}

static server_pcd_request request_of(const json & body, bool constrained, const char *& field) {
    field = "model";
    const std::string suffix = suffix_of(body);

    const bool is_preset = suffix_asks(suffix);
    const auto & base = is_preset ? *server_pcd.preset(suffix == "pcd" ? server_pcd.recommended : suffix.substr(4)) : server_pcd.setting;

    field = "pcd";
    if (body.contains("pcd") && !body.at("pcd").is_null()) {
        return server_pcd.of(body.at("pcd"), base);
    }
    if (is_preset || (suffix.empty() && server_pcd.by_default && !constrained)) {
        return base;
    }
    server_pcd_request res;
    res.constrained = suffix.empty() && server_pcd.by_default;
    return res;
}

static bool asks(const json & body) {
    const json given = body.contains("pcd") ? body.at("pcd") : json(nullptr);
    return !given.is_null() && given != json(false) && given != json("off");
}

// How deeply a client may nest: llama.cpp copies, writes and compiles what it parsed by recursion, which ends the process at some ten
// thousand levels. JSON Schemas and tools have some dozens.
static const size_t MAX_DEPTH = 500;

static void check_depth(size_t depth, const std::string & what) {
    if (depth > MAX_DEPTH) {
        throw std::invalid_argument(what + " has brackets in brackets, more than " + std::to_string(MAX_DEPTH) + " deep; allowed: at most "
                "that; send what is inside as a text");
    }
}

// The depth of brackets in a text whose backslashes take the meaning from what follows them. A surplus of closing ones counts as none.
static size_t depth_of(const std::string & text) {
    size_t depth = 0, most = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        switch (text[i]) {
            case '\\': ++i; break;
            case '(': case '[': case '{': most = std::max(most, ++depth); break;
            case ')': case ']': case '}': depth -= depth > 0; break;
        }
    }
    return most;
}

// Of a body in JSON, and of its texts that llama.cpp compiles by recursion too: a grammar, a schema's pattern, a call's arguments.
static void check_nesting(const std::string & body) {
    size_t depth = 0;
    std::string key; // the last one
    for (size_t i = 0; i < body.size(); ++i) {
        if (body[i] == '[' || body[i] == '{') {
            check_depth(++depth, "the body of this request");
        } else if (body[i] == ']' || body[i] == '}') {
            depth -= depth > 0;
            key.clear();
        } else if (body[i] == '"') {
            const size_t begin = i + 1;
            for (i = begin; i < body.size() && body[i] != '"'; ++i) {
                i += body[i] == '\\';
            }
            const size_t next = body.find_first_not_of(" \t\r\n", i + 1); // a document is long, and not copied
            if (next != std::string::npos && body[next] == ':') {
                key = body.substr(begin, i - begin);
            } else if (begin < body.size() && (key == "grammar" || key == "pattern" || key == "arguments")) {
                check_depth(depth_of(body.substr(begin, i - begin)), "field '" + key + "'");
            }
        }
    }
}

void server_pcd_request_comes(const std::string & path, const std::string & body, const std::function<bool()> & is_gone) {
    server_pcd_client(is_gone);
    const size_t first = body.find_first_not_of(" \t\r\n");
    if (first != std::string::npos && (body[first] == '{' || body[first] == '[')) {
        check_nesting(body);
    }

    // those that decode, and those whose bodies are for other programs
    static const auto takes_it = { "/completion", "/completions", "/infill", "/responses", "/messages", "/transcriptions",
        "/cors-proxy", "/tools" };

    if (body.find("\"pcd\"") == std::string::npos ||
            std::any_of(takes_it.begin(), takes_it.end(), [&](const char * end) { return string_ends_with(path, end); })) {
        return;
    }
    const json given = json::parse_no_throw(body); // what cannot be read the route itself refuses
    if (given.is_object() && asks(given)) {
        throw std::invalid_argument("Field 'pcd': it is " + given.at("pcd").dump_safe() + ", but " + path + " decodes nothing; allowed: "
                "null, false, \"off\"; or leave it out: it belongs to requests for an answer, such as /v1/chat/completions");
    }
}

server_pcd_request server_pcd_of(const json & body, bool constrained) {
    server_pcd_request res;
    const auto documents = server_pcd_documents_of(body);
    const char * field = "pcd";
    try {
        if (server_pcd.is_given && server_pcd.refusal.empty()) {
            res = request_of(body, constrained, field);
        } else {
            const bool has_field = body.contains("pcd") && !body.at("pcd").is_null(); // it comes before the model's name
            field = has_field ? "pcd" : "model";
            if (has_field ? asks(body) : suffix_asks(suffix_of(body))) {
                throw std::invalid_argument(server_pcd.is_given ? server_pcd.refusal :
                        "this server was started without settings for PCD; `pypcd serve` has them");
            }
        }
    } catch (const std::invalid_argument & e) {
        throw std::invalid_argument(std::string("Field '") + field + "': " + e.what());
    }
    res.documents = documents;
    return res;
}
