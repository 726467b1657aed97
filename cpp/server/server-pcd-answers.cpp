// What a server with PCD says of it: the setting of a request, counts, the candidates of a token, /v1/models and /props.

#include "server-pcd.h"

#include "server-pcd-settings.h"

#include "common.h"

#include <algorithm>
#include <cmath>

using json = common_json;

static json value_of(const pcd_field & field, const llama_pcd_params & p) {
    if (field.number) {
        return json(std::stod(string_format("%.7g", p.*field.number))); // 0.1, not 0.10000000149
    }
    for (const auto & [number, text] : field.names) {
        if (number == p.*field.integer) {
            return text ? json(text) : json(nullptr);
        }
    }
    return json(p.*field.integer);
}

json server_pcd_request::to_json() const {
    if (!on) {
        return json(false);
    }
    json res = json::object();
    for (const auto & field : pcd_fields) {
        if (field.is_own) {
            res[field.name] = value_of(field, params);
        }
    }
    return res;
}

json server_pcd_models(json models) {
    const json entry = models.at("data").at(0);

    models["data"] = json::array();
    server_pcd_list(models["data"], entry, entry);
    return models;
}

json server_pcd_props() {
    if (!server_pcd.is_given) {
        return json(nullptr);
    }
    if (!server_pcd.refusal.empty()) {
        return json { { "refusal", server_pcd.refusal } };
    }
    json setting = json::object();
    json own     = json::array(); // what a request may change
    for (const auto & field : pcd_fields) {
        setting[field.name] = value_of(field, server_pcd.setting.params);
        if (field.is_own) {
            own.push_back(field.name);
        }
    }
    json presets = json::object();
    for (const auto & name : server_pcd.runs) {
        presets[name] = server_pcd.preset(name)->to_json();
    }
    return json {
        { "default",     server_pcd.by_default },
        { "setting",     setting },
        { "presets",     presets },
        { "recommended", server_pcd.recommended },
        { "per_request", own },
    };
}

static const struct {
    const char * name;
    const char * about;
    uint64_t server_pcd_counts::* of;
} COUNTS[] = {
    { "pcd_twins",       "Rows that a twin was evaluated for", &server_pcd_counts::n_twins },
    { "pcd_skipped",     "Rows that needed no twin", &server_pcd_counts::n_skipped },
    // more than one token was plausible, and no floor kept them plain
    { "pcd_contrasted",  "Rows that are not the model's own", &server_pcd_counts::n_contrasted },
    { "pcd_changed",     "Tokens that are not the model's own most probable one", &server_pcd_counts::n_changed }, // because of the contrast
    { "pcd_constrained", "Rows left plain under a grammar", &server_pcd_counts::n_constrained },
};

void server_pcd_counts::add(const server_pcd_counts & other) {
    for (const auto & cur : COUNTS) {
        this->*cur.of += other.*cur.of;
    }
}

std::string server_pcd_counts::to_metrics() const {
    std::string res;
    for (const auto & cur : COUNTS) {
        const std::string name = string_format("llamacpp:%s_total", cur.name);
        res += "# HELP " + name + " PCD: " + cur.about + "\n# TYPE " + name + " counter\n" + name + " " + std::to_string(this->*cur.of) + "\n";
    }
    return res;
}

int32_t server_pcd_answer::n_next(int32_t n_prompt, int32_t n_read) const {
    if (const int32_t n = beginning.n_next(n_read); n > 0) {
        return n;
    }
    if (look()) {
        return look()->n_past;
    }
    return (request.on || request.documents) && n_read < n_prompt - 1 ? n_prompt - 1 : n_prompt;
}

void server_pcd_answer::count(llama_context * ctx, int32_t i, llama_token token) {
    counts.n_constrained += request.constrained;

    const float * l = llama_pcd_get_logits_ith(ctx, i, LLAMA_PCD_ROW_STANDARD);
    if (!l) {
        return;
    }
    ++(llama_pcd_get_logits_ith(ctx, i, LLAMA_PCD_ROW_LOCAL) ? counts.n_twins : counts.n_skipped);

    const float * l_con = llama_pcd_get_logits_ith(ctx, i, LLAMA_PCD_ROW_CONTRASTED);
    if (!l_con || token == LLAMA_TOKEN_NULL || std::isnan(llama_pcd_get_strength_ith(ctx, i))) {
        return;
    }
    ++counts.n_contrasted;

    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    const auto    best    = [&](const float * row) { return (llama_token) (std::max_element(row, row + n_vocab) - row); };

    const llama_token plain = best(l);
    counts.n_changed += plain != token && plain != best(l_con);
}

void server_pcd_answer::count(llama_context * ctx, const std::vector<int32_t> & rows, const std::vector<llama_token> & tokens) {
    for (size_t k = 0; k < rows.size(); ++k) {
        count(ctx, rows[k], k < tokens.size() ? tokens[k] : LLAMA_TOKEN_NULL);
    }
}

// what PCD did, as Python says it (str() of pypcd.PCDAnswer)
static std::string sentence(const server_pcd_answer & answer, uint64_t n_prompt, uint64_t n_tokens) {
    const auto & counts = answer.counts;
    const bool is_one   = answer.request.params.min_first_entropy > 0; // an answer that begins too early is plain to its end
    const bool is_short = n_prompt + (is_one ? 1 : n_tokens) <= (uint64_t) answer.request.params.min_context;

    const char * name = !answer.request.on ? "off" : counts.n_contrasted > 0 ? "changed" : is_short ? "short" : "sure";
    std::string  res  = server_pcd.sentences.at(name).get<std::string>();
    string_replace_all(res, "{n_changed}",   std::to_string(counts.n_changed));
    string_replace_all(res, "{n_tokens}",    std::to_string(n_tokens));
    string_replace_all(res, "{min_context}", std::to_string(answer.request.params.min_context));
    string_replace_all(res, "{setting}",     answer.request.text);
    return res;
}

void server_pcd_answer::to_json(json & timings, uint64_t n_prompt, uint64_t n_tokens) const {
    if (!server_pcd.is_given) {
        return;
    }
    timings["pcd_setting"]     = request.text;
    timings["pcd_answer"]      = sentence(*this, n_prompt, n_tokens);
    for (const auto & cur : COUNTS) {
        timings[cur.name] = counts.*cur.of;
    }
    if (request.documents) {
        for (const char * name : { "passages", "passages_note", "documents_read", "documents_note" }) {
            timings[name] = request.documents->told.at(name);
        }
    }
}

//
// candidates
//

// log of the sum of exp(row)
static double log_sum(const float * row, int32_t n) {
    const float best = *std::max_element(row, row + n);

    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp((double) row[i] - best);
    }
    return best + std::log(sum);
}

// null: not finite
static json number(double x) {
    return std::isfinite(x) ? json((float) x) : json(nullptr);
}

void server_pcd_probs::read(llama_context * ctx, int32_t i, const std::set<llama_token> & ids, size_t n) {
    const float * l     = llama_pcd_get_logits_ith(ctx, i, LLAMA_PCD_ROW_STANDARD);
    const float * l_ovr = llama_pcd_get_logits_ith(ctx, i, LLAMA_PCD_ROW_LOCAL); // null: no twin
    const float * l_con = llama_pcd_get_logits_ith(ctx, i, LLAMA_PCD_ROW_CONTRASTED);
    if (!l || !l_con) {
        return;
    }
    const llama_vocab * vocab   = llama_model_get_vocab(llama_get_model(ctx));
    const int32_t       n_vocab = llama_vocab_n_tokens(vocab);

    std::vector<llama_token> best(n_vocab);
    for (int32_t id = 0; id < n_vocab; ++id) {
        best[id] = id;
    }
    n = std::min<size_t>(n, n_vocab);
    std::partial_sort(best.begin(), best.begin() + n, best.end(), [&](llama_token a, llama_token b) { return l[a] > l[b]; });

    const double sum     = log_sum(l, n_vocab);
    const double sum_ovr = l_ovr ? log_sum(l_ovr, n_vocab) : NAN;
    const double sum_con = log_sum(l_con, n_vocab);

    const auto row_of = [&](llama_token id) {
        return json {
            { "standard",   number(l[id] - sum) },
            { "local",      l_ovr ? number(l_ovr[id] - sum_ovr) : json(nullptr) },
            { "contrasted", number(l_con[id] - sum_con) }, // null: not among the plausible tokens
        };
    };
    json pushed_out = json::array();
    for (const auto id : ids) {
        rows[id] = row_of(id);
    }
    for (size_t k = 0; k < n; ++k) {
        if (ids.count(best[k]) == 0) {
            pushed_out.push_back(row_of(best[k]));
            pushed_out.back()["id"]    = best[k];
            pushed_out.back()["token"] = common_token_to_piece(vocab, best[k]);
        }
    }
    about["strength"]   = number(llama_pcd_get_strength_ith(ctx, i)); // null: no contrast was needed
    about["pushed_out"] = pushed_out;
}

void server_pcd_probs::to_json(json & entry, bool is_sampled) const {
    const auto found = rows.find(entry.at("id").get<llama_token>());
    if (found == rows.end()) {
        return;
    }
    entry["pcd"] = found->second;
    if (is_sampled) {
        entry["pcd"]["strength"]   = about.at("strength");
        entry["pcd"]["pushed_out"] = about.at("pushed_out");
    }
}
