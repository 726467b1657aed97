// Prompts on disk. Which files there are Python knows (pypcd/decode/prompt_cache.py, through pypcd/server/worker.py); `pypcd chat` and the
// server read each other's. Here sequences are written and read back. Knows sequences and tokens, but nothing of slots.

#include "server-pcd-documents.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

namespace fs = std::filesystem;
using json = common_json;

json server_pcd_disk(const std::string & weights, const llama_context * ctx, const common_params & params) {
    // a draft model would have to read the documents all the same; the others change keys and values in ways that no name has
    const bool has_more = !params.lora_adapters.empty() || !params.control_vectors.empty() || !params.kv_overrides.empty();
    if (has_more || params.speculative.draft.ctx_dft) {
        return json(nullptr);
    }
    const llama_model * model = llama_get_model(ctx);
    std::vector<std::string> names;
    char name[256];
    for (int32_t i = 0; i < llama_model_meta_count(model); ++i) {
        if (llama_model_meta_key_by_index(model, i, name, sizeof(name)) > 0 && strstr(name, ".rope.scaling.")) {
            names.push_back(name);
        }
    }
    const auto given = common_context_params_to_llama(params);
    return json {
        { "weights",  weights },
        { "settings", {
            { "rope_scaling_type", given.rope_scaling_type },
            { "rope_freq_base",    given.rope_freq_base },
            { "rope_freq_scale",   given.rope_freq_scale },
            { "yarn_ext_factor",   given.yarn_ext_factor },
            { "yarn_attn_factor",  given.yarn_attn_factor },
            { "yarn_beta_fast",    given.yarn_beta_fast },
            { "yarn_beta_slow",    given.yarn_beta_slow },
            { "yarn_orig_ctx",     given.yarn_orig_ctx },
            { "attention_type",    given.attention_type },
            { "type_k",            given.type_k },
            { "type_v",            given.type_v },
            { "flash_attn_type",   given.flash_attn_type },
            { "swa_full",          given.swa_full },
        } },
        { "scaling",  names },
        { "slides",   llama_model_n_swa(model) > 0 },
        { "n_ctx",    llama_n_ctx_seq(ctx) },
        { "model",    fs::u8path(params.model.path).filename().u8string() },
        { "head",     std::vector<int64_t> { LLAMA_STATE_SEQ_MAGIC, LLAMA_STATE_SEQ_VERSION } },
    };
}

void server_pcd_beginning::begin(const server_pcd_documents_ptr & given, const std::vector<llama_token> & prompt, bool given_marks) {
    *this = {};
    if (!given) {
        return;
    }
    const int32_t n_kept = given->told.at("n_kept").get<int32_t>();
    is_kept   = given->told.at("is_kept").get<bool>();
    n_on_disk = given->told.at("n_on_disk").get<int32_t>();
    marks     = given_marks;
    documents = given;
    if (n_kept > 0 && (!is_kept || n_on_disk > 0 || marks)) {
        tokens = std::make_shared<const std::vector<llama_token>>(prompt.begin(), prompt.begin() + n_kept);
    }
}

bool server_pcd_beginning::restore(
        llama_context * ctx, llama_seq_id id, int32_t n, const std::function<bool()> & make_room, std::vector<llama_token> & held) {
    t_start  = ggml_time_us();
    n_loaded = 0;
    n_held   = n;
    if (size() == 0 || n_on_disk == 0 || n + documents->told.at("n_spared").get<int32_t>() > n_on_disk) {
        return false;
    }
    const auto path  = documents->told.at("path").get<std::string>();
    const auto empty = [&]() { llama_memory_seq_rm(llama_get_memory(ctx), id, 0, -1); }; // its setting stays; not so from -1 on
    empty();
    held.resize(n_on_disk);
    std::error_code ec;
    bool ok = false, is_there = true;
    do {
        size_t n_read = 0;
        ok = llama_state_seq_load_file(ctx, path.c_str(), id, held.data(), held.size(), &n_read) > 0;
        is_there = ok || fs::exists(fs::u8path(path), ec); // another process may remove it
    } while (!ok && is_there && make_room());
    if (!ok || !std::equal(held.begin(), held.end(), tokens->begin())) {
        empty();
        held.clear();
        n_held  = 0;
        is_kept = is_there;
        LOG_WRN("%s: %s %s, and the prompt is read again\n", __func__, path.c_str(), is_there ? "does not fit into memory" : "is gone");
        return true;
    }
    n_loaded = n_held = n_on_disk;
    return true;
}

// writes what llama_state_seq_get_data() gave as llama_state_seq_save_file() does; the number of bytes
static size_t write_state(const std::string & path, const std::vector<llama_token> & tokens, const std::vector<uint8_t> & data) {
    const std::unique_ptr<FILE, int (*)(FILE *)> file(ggml_fopen(path.c_str(), "wb"), fclose);
    const size_t   n_first = 2*sizeof(uint32_t); // a mark and the sequence, which files do not have
    const uint32_t head[]  = { LLAMA_STATE_SEQ_MAGIC, LLAMA_STATE_SEQ_VERSION, (uint32_t) tokens.size() };
    if (!file) {
        return 0;
    }
    return fwrite(head, 1, sizeof(head), file.get()) + sizeof(llama_token)*fwrite(tokens.data(), sizeof(llama_token), tokens.size(), file.get()) +
        fwrite(data.data() + n_first, 1, data.size() - n_first, file.get());
}

bool server_pcd_beginning::keep(llama_context * ctx, llama_seq_id id, int32_t n_read) {
    if (n_read == 0 || n_read != size()) {
        return false;
    }
    if (std::exchange(is_kept, true)) {
        return true;
    }
    const double seconds = (ggml_time_us() - t_start)*1e-6;
    auto data = std::make_shared<std::vector<uint8_t>>(llama_state_seq_get_size(ctx, id));
    if (llama_state_seq_get_data(ctx, data->data(), data->size(), id) != data->size()) {
        LOG_ERR("%s: the prompt is not kept: its state cannot be read\n", __func__);
        return true;
    }
    const json request = {
        { "keep", *tokens },
        { "disk", server_pcd.disk },
        { "about", {
            { "model",             server_pcd.disk.at("model") },
            { "documents",         documents->told.at("names") },
            { "tokens_per_second", (n_read - n_held)/std::max(seconds, 1e-3) },
        } },
    };
    server_pcd_later([request, data, tokens = tokens]() {
        server_pcd_ask_worker(request, [&](const json & call) {
            return json(write_state(call.at("save").get<std::string>(), *tokens, *data));
        });
    });
    return true;
}
