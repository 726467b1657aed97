#include "server-pcd-disk.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

namespace fs = std::filesystem;
using json = common_json;

//
// settings
//

// whether a model has metadata with this in its name
static bool has_metadata(const llama_model * model, const char * name) {
    char key[256];
    for (int32_t i = 0; i < llama_model_meta_count(model); ++i) {
        if (llama_model_meta_key_by_index(model, i, key, sizeof(key)) > 0 && strstr(key, name)) {
            return true;
        }
    }
    return false;
}

static std::string settings_text(const llama_context * ctx, const common_params & params) {
    const llama_model * model = llama_get_model(ctx);
    const auto usual = llama_context_default_params();
    const auto given = common_context_params_to_llama(params);

    std::vector<std::string> words;
    const auto add = [&](const char * name, double value, double other) {
        if (value != other) {
            words.push_back(string_format("%s=%g", name, value));
        }
    };
    const bool is_scaled = has_metadata(model, ".rope.scaling.");
    const auto add_yarn = [&](const char * name, float value, float other) { // below 0: the model's own, or this one
        is_scaled ? add(name, value, -1.0) : add(name, value >= 0 ? value : other, other);
    };
    add("rope_scaling_type", given.rope_scaling_type, usual.rope_scaling_type);
    add("rope_freq_base",    given.rope_freq_base,    usual.rope_freq_base);
    add("rope_freq_scale",   given.rope_freq_scale,   usual.rope_freq_scale);
    add("yarn_ext_factor",   given.yarn_ext_factor,   usual.yarn_ext_factor);
    add_yarn("yarn_attn_factor", given.yarn_attn_factor, 1.0f);
    add_yarn("yarn_beta_fast",   given.yarn_beta_fast,  32.0f);
    add_yarn("yarn_beta_slow",   given.yarn_beta_slow,   1.0f);
    add("yarn_orig_ctx",     given.yarn_orig_ctx,     usual.yarn_orig_ctx);
    add("attention_type",    given.attention_type,    usual.attention_type);
    add("type_k",            given.type_k,            usual.type_k);
    add("type_v",            given.type_v,            usual.type_v);
    add("flash_attn_type",   given.flash_attn_type,   usual.flash_attn_type);
    if (llama_model_n_swa(model) > 0) {
        add("swa_full", given.swa_full, usual.swa_full);
    }
    if (has_metadata(model, ".rope.scaling.original_context_length")) { // LongRoPE has other factors beyond that length
        words.push_back(string_format("n_ctx=%u", llama_n_ctx_seq(ctx)));
    }
    return string_join(words, " ");
}

json server_pcd_disk(const std::string & weights, const llama_context * ctx, const common_params & params) {
    // a draft model would have to read the documents all the same; the others change keys and values in ways that no name has
    const bool has_more = !params.lora_adapters.empty() || !params.control_vectors.empty() || !params.kv_overrides.empty();
    if (has_more || params.speculative.draft.ctx_dft) {
        return json(nullptr);
    }
    return json {
        { "weights",  weights },
        { "settings", settings_text(ctx, params) },
        { "model",    fs::u8path(params.model.path).filename().u8string() },
        { "head",     std::vector<int64_t> { LLAMA_STATE_SEQ_MAGIC, LLAMA_STATE_SEQ_VERSION } },
    };
}

//
// a request
//

void server_pcd_beginning::begin(const server_pcd_documents_ptr & given, const std::vector<llama_token> & prompt, bool given_marks) {
    *this = {};
    if (!given || given->n_kept == 0 || (given->is_kept && given->n_on_disk == 0 && !given_marks)) {
        return;
    }
    documents = given;
    marks     = given_marks;
    is_kept   = given->is_kept;
    tokens    = std::make_shared<const std::vector<llama_token>>(prompt.begin(), prompt.begin() + given->n_kept);
}

bool server_pcd_beginning::restore(
        llama_context * ctx, llama_seq_id id, int32_t n, const std::function<bool()> & make_room, std::vector<llama_token> & held) {
    t_start  = ggml_time_us();
    n_loaded = 0;
    n_held   = n;
    if (size() == 0 || documents->n_on_disk == 0 || n + documents->n_spared > documents->n_on_disk) {
        return false;
    }
    const auto path  = fs::u8path(documents->path);
    const auto empty = [&]() { llama_memory_seq_rm(llama_get_memory(ctx), id, 0, -1); }; // its setting stays; not so from -1 on
    empty();
    held.resize(documents->n_on_disk);
    std::error_code ec;
    bool ok = false, is_there = true;
    do {
        size_t n_read = 0;
        ok = llama_state_seq_load_file(ctx, documents->path.c_str(), id, held.data(), held.size(), &n_read) > 0;
        is_there = ok || fs::exists(path, ec); // another process may remove it
    } while (!ok && is_there && make_room());
    if (!ok || !std::equal(held.begin(), held.end(), tokens->begin())) {
        empty();
        held.clear();
        n_held  = 0;
        is_kept = is_there;
        LOG_WRN("%s: %s %s, and the prompt is read again\n", __func__, documents->path.c_str(), is_there ? "does not fit into memory" : "is gone");
        return true;
    }
    fs::last_write_time(path, fs::file_time_type::clock::now(), ec);
    n_loaded = n_held = documents->n_on_disk;
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
            { "documents",         documents->names },
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
