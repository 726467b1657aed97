#include "server-pcd-disk.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <stdexcept>

#ifndef _WIN32
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace fs = std::filesystem;
using json = common_json;

static const char   MARK[]     = "pypcd-kv";
static const size_t TAIL       = 4 + 4 + 8; // the JSON's length, the CRC-32 of all before, the mark
static const size_t PIECE      = 1 << 24;
static const auto   STALE      = std::chrono::hours(1); // after which a file that was not finished is left over

//
// CRC-32, eight bytes at a time
//

using crc_tables = std::array<std::array<uint32_t, 256>, 8>;

static crc_tables make_tables() {
    crc_tables t;
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int k = 0; k < 8; ++k) {
            crc = crc & 1 ? 0xedb88320u ^ (crc >> 1) : crc >> 1;
        }
        t[0][i] = crc;
    }
    for (int k = 1; k < 8; ++k) {
        for (uint32_t i = 0; i < 256; ++i) {
            t[k][i] = t[0][t[k - 1][i] & 0xff] ^ (t[k - 1][i] >> 8);
        }
    }
    return t;
}

static uint32_t crc32(const void * data, size_t n, uint32_t before = 0) {
    static const crc_tables t = make_tables();

    auto * p = (const uint8_t *) data;
    uint32_t crc = ~before;
    for (; n >= 8; n -= 8, p += 8) {
        crc ^= p[0] | p[1] << 8 | p[2] << 16 | (uint32_t) p[3] << 24;
        crc = t[7][crc & 0xff] ^ t[6][crc >> 8 & 0xff] ^ t[5][crc >> 16 & 0xff] ^ t[4][crc >> 24]
            ^ t[3][p[4]] ^ t[2][p[5]] ^ t[1][p[6]] ^ t[0][p[7]];
    }
    for (; n > 0; --n, ++p) {
        crc = t[0][(crc ^ *p) & 0xff] ^ (crc >> 8);
    }
    return ~crc;
}

static uint32_t sum(const std::vector<llama_token> & tokens, size_t n) {
    return crc32(tokens.data(), n*sizeof(llama_token));
}

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

void server_pcd_disk::read(const json & given, const std::string & weights, const llama_context * ctx, const common_params & params) {
    *this = {};
    n_left = given.at("n_left").get<int32_t>();
    // a draft model would have to read the documents all the same; the others change keys and values in ways that no name has
    const bool has_more = !params.lora_adapters.empty() || !params.control_vectors.empty() || !params.kv_overrides.empty();
    if (has_more || params.speculative.draft.ctx_dft) {
        return;
    }
    const std::string text = settings_text(ctx, params);

    model  = fs::u8path(params.model.path).filename().u8string();
    folder = given.at("folder").get<std::string>();
    limit  = given.at("limit").get<uint64_t>();
    n_min  = given.at("n_min").get<int32_t>();
    prefix = weights + string_format("-%08x-", crc32(text.data(), text.size()));
}

//
// files
//

namespace {

struct entry {
    fs::path path;
    int32_t  n_tokens;
    uint64_t n_bytes;
    fs::file_time_type used;
};

}

static fs::path folder_of(const server_pcd_disk & disk) {
    return fs::u8path(disk.folder);
}

// whether it is a plain file, or a folder, of this user: links are never followed, and what is foreign is left alone
static bool is_own(const fs::path & path, fs::file_type type) {
    std::error_code ec; // another process removed it
    if (fs::symlink_status(path, ec).type() != type || ec) {
        return false;
    }
#ifndef _WIN32
    struct stat found;
    return lstat(path.c_str(), &found) == 0 && found.st_uid == getuid();
#else
    return true;
#endif
}

// those that are there, with names that begin so
static std::vector<entry> entries(const server_pcd_disk & disk, const std::string & prefix) {
    std::vector<entry> res;
    std::error_code ec;
    for (fs::directory_iterator it(folder_of(disk), ec), end; !ec && it != end; it.increment(ec)) {
        const std::string name = it->path().filename().u8string();
        unsigned weights[2], settings, tokens;
        int32_t  n;
        char     rest;
        std::error_code gone; // another process removed it
        if (string_starts_with(name, prefix) && string_ends_with(name, ".state") &&
                sscanf(name.c_str(), "%8x%8x-%8x-%d-%8x.stat%c", &weights[0], &weights[1], &settings, &n, &tokens, &rest) == 6 &&
                is_own(it->path(), fs::file_type::regular)) {
            const entry cur = { it->path(), n, (uint64_t) it->file_size(gone), it->last_write_time(gone) };
            if (!gone) {
                res.push_back(cur);
            }
        }
    }
    return res;
}

static std::string name_of(const server_pcd_disk & disk, const std::vector<llama_token> & tokens, size_t n) {
    return disk.prefix + string_format("%zu-%08x.state", n, sum(tokens, n));
}

using file_ptr = std::unique_ptr<FILE, int (*)(FILE *)>;

static file_ptr open_file(const fs::path & path, const char * mode) {
    return { ggml_fopen(path.u8string().c_str(), mode), fclose };
}

// the CRC-32 of a file's first n bytes; throws where it has fewer
static uint32_t crc32_of(FILE * file, uint64_t n) {
    std::vector<char> piece(std::min<uint64_t>(n, PIECE));
    uint32_t crc = 0;
    rewind(file);
    while (n > 0) {
        const size_t size = fread(piece.data(), 1, std::min<uint64_t>(n, piece.size()), file);
        if (size == 0) {
            throw std::runtime_error("it cannot be read to its end");
        }
        crc = crc32(piece.data(), size, crc);
        n -= size;
    }
    return crc;
}

static void put_u32(std::string & text, uint32_t value) {
    for (int k = 0; k < 4; ++k) {
        text.push_back((char) (value >> 8*k & 0xff));
    }
}

static uint32_t get_u32(const char * p) {
    const auto * b = (const uint8_t *) p;
    return b[0] | b[1] << 8 | b[2] << 16 | (uint32_t) b[3] << 24;
}

// throws where it is damaged, or of other tokens
static void check(const fs::path & path, const std::vector<llama_token> & tokens, size_t n) {
    const auto file = open_file(path, "rb");
    if (!file) {
        throw std::runtime_error(strerror(errno));
    }
    const uint64_t size = fs::file_size(path);

    std::vector<char> head(3*4 + n*sizeof(llama_token)); // llama.cpp's: magic, version, number of tokens
    std::array<char, TAIL> tail;
    bool ok = size >= head.size() + TAIL && fread(head.data(), 1, head.size(), file.get()) == head.size();
    if (ok && (get_u32(&head[0]) != LLAMA_STATE_SEQ_MAGIC || get_u32(&head[4]) != LLAMA_STATE_SEQ_VERSION)) {
        throw std::runtime_error("another version of llama.cpp wrote it");
    }
    ok = ok && get_u32(&head[8]) == n && memcmp(&head[12], tokens.data(), n*sizeof(llama_token)) == 0;

    const uint32_t crc = ok ? crc32_of(file.get(), size - TAIL) : 0; // stands at the tail then
    ok = ok && fread(tail.data(), 1, TAIL, file.get()) == TAIL && memcmp(&tail[8], MARK, 8) == 0 && get_u32(&tail[4]) == crc;
    if (!ok) {
        throw std::runtime_error("it is damaged, or of other tokens");
    }
}

// writes what stands behind the state; throws where the disk is full
static void seal(const fs::path & path, uint64_t n_bytes, const json & about) {
    const std::string text = about.dump_safe();

    const auto file = open_file(path, "r+b");
    if (!file || fs::file_size(path) != n_bytes) { // llama.cpp does not see whether its last bytes were written
        throw std::runtime_error("the disk is full");
    }
    std::string tail;
    put_u32(tail, (uint32_t) text.size());
    put_u32(tail, crc32(text.data(), text.size(), crc32_of(file.get(), n_bytes)));
    tail += MARK;

    fseek(file.get(), 0, SEEK_CUR); // from reading to writing
    tail = text + tail;
    if (fwrite(tail.data(), 1, tail.size(), file.get()) != tail.size() || fflush(file.get()) != 0) {
        throw std::runtime_error("the disk is full");
    }
}

// keeps to the limit, and removes what a process has left that ended while it wrote
static void prune(const server_pcd_disk & disk) {
    auto all = entries(disk, "");
    std::sort(all.begin(), all.end(), [](const entry & a, const entry & b) { return a.used > b.used; });

    uint64_t total = 0;
    std::error_code ec; // on Windows another process may read it
    for (const auto & cur : all) {
        total += cur.n_bytes;
        if (total > disk.limit) {
            fs::remove(cur.path, ec);
        }
    }
    const auto now = fs::file_time_type::clock::now();
    for (fs::directory_iterator it(folder_of(disk), ec), end; !ec && it != end; it.increment(ec)) {
        std::error_code gone;
        if (string_starts_with(it->path().filename().u8string(), "writing-") && is_own(it->path(), fs::file_type::directory) &&
                now - it->last_write_time(gone) > STALE && !gone) {
            fs::remove_all(it->path(), gone);
        }
    }
}

// writes a sequence that has just these tokens; throws where it cannot be written
static void write_file(
        const server_pcd_disk & disk, llama_context * ctx, llama_seq_id id, const std::vector<llama_token> & tokens, const json & about) {
    const fs::path folder = folder_of(disk);
    const fs::path path   = folder / fs::u8path(name_of(disk, tokens, tokens.size()));

    if (fs::create_directories(folder)) {
        fs::permissions(folder, fs::perms::owner_all);
    }
    std::random_device rd;
    const fs::path beside = folder / string_format("writing-%08x", rd());
    fs::create_directory(beside);
    fs::permissions(beside, fs::perms::owner_all); // only this user may enter
    try {
        const fs::path made = beside / path.filename();
        const size_t n_bytes = llama_state_seq_save_file(ctx, made.u8string().c_str(), id, tokens.data(), tokens.size());
        if (n_bytes == 0) {
            throw std::runtime_error("the disk is full, or the folder cannot be written");
        }
        if (n_bytes > disk.limit) {
            throw std::runtime_error(string_format("it takes %.0f MiB, and the limit is %.0f (PYPCD_CACHE_GIB)",
                        n_bytes/1048576.0, disk.limit/1048576.0));
        }
        seal(made, n_bytes, about);
        fs::permissions(made, fs::perms::owner_read | fs::perms::owner_write); // the folder may be of another time, and open
        fs::rename(made, path);
    } catch (...) {
        std::error_code ec;
        fs::remove_all(beside, ec);
        throw;
    }
    fs::remove_all(beside);
    prune(disk);
}

//
// a request
//

// how many tokens it takes to the end of the last document, without one that goes beyond; 0: a document is not there as it is
static size_t n_through(const llama_vocab * vocab, const server_pcd_replay & replay, const std::vector<llama_token> & prompt) {
    const server_pcd_places places(vocab, prompt, replay.documents);
    if (!places.has_all()) {
        return 0;
    }
    size_t last = 0;
    for (size_t i = 0; i < replay.documents.size(); ++i) {
        last = std::max(last, places.begins[i] + replay.documents[i].text().size());
    }
    return places.token_at(last);
}

void server_pcd_beginning::begin(
        const server_pcd_replay_ptr & replay, const llama_vocab * vocab, const std::vector<llama_token> & prompt, int32_t n_prompt,
        bool given_marks) {
    *this = {};
    const auto & disk = server_pcd.disk;
    marks = given_marks;
    if (!replay || (disk.limit == 0 && !marks) || (int32_t) prompt.size() < n_prompt) {
        return;
    }
    const size_t n = n_through(vocab, *replay, prompt);
    is_kept = disk.limit == 0 || n < (size_t) (disk.n_min + disk.n_left);
    if ((is_kept && !marks) || n <= (size_t) disk.n_left) {
        return;
    }
    tokens = std::make_shared<const std::vector<llama_token>>(prompt.begin(), prompt.begin() + (n - disk.n_left));
    for (const auto & document : replay->documents) {
        names.push_back(document.name);
    }
}

bool server_pcd_beginning::restore(
        llama_context * ctx, llama_seq_id id, int32_t n, const std::function<bool()> & make_room, std::vector<llama_token> & held) {
    const auto & disk = server_pcd.disk;

    t_start  = ggml_time_us();
    n_loaded = 0;
    n_held   = n;
    std::vector<entry> found;
    if (disk.limit > 0 && n_held + disk.n_min <= size()) {
        found = entries(disk, disk.prefix);
    }
    std::sort(found.begin(), found.end(), [](const entry & a, const entry & b) { return a.n_tokens > b.n_tokens; });

    for (const auto & cur : found) {
        if (cur.n_tokens > size() || cur.path.filename().u8string() != name_of(disk, *tokens, cur.n_tokens)) {
            continue;
        }
        if (cur.n_tokens < n_held + disk.n_min) {
            break;
        }
        std::error_code ec;
        if (!fs::exists(cur.path, ec)) { // another process removed it
            continue;
        }
        try {
            check(cur.path, *tokens, cur.n_tokens);
        } catch (const std::exception & e) {
            LOG_ERR("%s: %s is removed, and the prompt is read again: %s\n", __func__, cur.path.u8string().c_str(), e.what());
            fs::remove(cur.path, ec);
            continue;
        }
        const auto empty = [&]() { llama_memory_seq_rm(llama_get_memory(ctx), id, 0, -1); }; // its setting stays; not so from -1 on
        empty();
        held.resize(cur.n_tokens);
        size_t n_read = 0;
        const auto load = [&]() {
            return llama_state_seq_load_file(ctx, cur.path.u8string().c_str(), id, held.data(), held.size(), &n_read) > 0;
        };
        bool ok = load();
        while (!ok && make_room()) {
            ok = load();
        }
        if (!ok) {
            empty();
            held.clear();
            n_held = 0;
            LOG_WRN("%s: %s does not fit into memory, and the prompt is read again\n", __func__, cur.path.u8string().c_str());
            return true;
        }
        fs::last_write_time(cur.path, fs::file_time_type::clock::now(), ec);
        n_loaded = n_held = cur.n_tokens;
        is_kept  = n_loaded == size();
        return true;
    }
    return false;
}

int32_t server_pcd_beginning::n_again(int32_t n_past, int32_t n_before) const {
    if (n_past < n_before) {
        return n_past;
    }
    const bool is_near = size() > 0 && size() < n_before && n_before - size() <= server_pcd.disk.n_min;
    return is_near ? size() : n_before - 1;
}

bool server_pcd_beginning::keep(llama_context * ctx, llama_seq_id id, int32_t n_read) {
    if (n_read == 0 || n_read != size()) {
        return false;
    }
    if (is_kept) {
        return true;
    }
    is_kept = true;
    const auto & disk = server_pcd.disk;
    try {
        if (fs::exists(folder_of(disk) / fs::u8path(name_of(disk, *tokens, size())))) {
            return true;
        }
        const double seconds = (ggml_time_us() - t_start)*1e-6;
        write_file(disk, ctx, id, *tokens, json {
            { "model",             disk.model },
            { "documents",         names },
            { "tokens_per_second", (n_read - n_held)/std::max(seconds, 1e-3) },
            { "n_tokens",          n_read },
        });
    } catch (const std::exception & e) {
        LOG_ERR("%s: the prompt is not kept in %s, and will be read again next time: %s\n", __func__, disk.folder.c_str(), e.what());
    }
    return true;
}
