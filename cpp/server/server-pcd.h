// PCD in llama-server: what a request asks for, the slot that it runs in, and what PCD did for it. The hooks of
// patches/llama-server-hooks.patch call this. Knows llama.cpp's sequences and the JSON of requests, but not the server's structs.
//
// Settings come from one place, pypcd's Python: the environment variable LLAMA_ARG_PCD, which `pypcd serve` writes, has the
// server's setting and the presets; and a request's setting is read by pypcd/server/worker.py. Without the variable a request with
// PCD is refused. The fields are those of twins/settings.h, which the build makes from pypcd/settings/fields.py.

#pragma once

#include "json.h"
#include "llama-pcd.h"
#include "server-pcd-documents.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace httplib {
struct Request;
struct Response;
}

// what a request asks for
struct server_pcd_request {
    bool             on     = false;
    llama_pcd_params params = {};
    std::string      text   = "off"; // the setting, as it can be typed

    bool constrained = false; // off, since a grammar constrains the answer and the request itself does not ask for PCD

    server_pcd_documents_ptr documents = {};

    common_json to_json() const; // false, or what a request may set, by name
};

// what PCD did: for an answer, or since the start; the table in server-pcd-answers.cpp says of what they are the number
struct server_pcd_counts {
    uint64_t n_twins       = 0;
    uint64_t n_skipped     = 0;
    uint64_t n_contrasted  = 0;
    uint64_t n_changed     = 0;
    uint64_t n_constrained = 0;

    void add(const server_pcd_counts & other);
    std::string to_metrics() const; // for Prometheus
};

// what PCD did for one answer
struct server_pcd_answer {
    server_pcd_request request;
    server_pcd_counts  counts;

    server_pcd_beginning beginning = {};

    // Up to where the prompt's tokens are read next, of which n_read are: to where it is kept, or to its end. A prompt that is asked again
    // has its last token by itself, so with documents it is read by itself the first time, too; and with a contrast, which multiplies
    // rounding.
    int32_t n_next(int32_t n_prompt, int32_t n_read) const;

    // The question whose attention is read, in place of an answer; null: none. And how many tokens that the slot has may stay: not those of
    // the question, which are evaluated to look at them.
    server_pcd_look * look() const { return request.documents ? request.documents->look.get() : nullptr; }
    int32_t n_usable(int32_t n) const { return look() ? std::min(n, look()->n_past) : n; }

    // Row i of the last decode, and the token that was chosen from it; LLAMA_TOKEN_NULL: a drafted one was not, so it is no token of the
    // answer.
    void count(llama_context * ctx, int32_t i, llama_token token);
    void count(llama_context * ctx, const std::vector<int32_t> & rows, const std::vector<llama_token> & tokens);

    // n_prompt, n_tokens: of the prompt and the answer
    void to_json(common_json & timings, uint64_t n_prompt, uint64_t n_tokens) const;
};

// what is known of the candidates of one token: natural logarithms of probabilities, before and after the contrast
struct server_pcd_probs {
    std::map<llama_token, common_json> rows; // of those of the answer
    common_json about; // strength: of this contrast; pushed_out: of the n most probable tokens of L those that are not in the answer

    // row i of the last decode: the sampled token, the candidates of the answer, and n
    template <typename T>
    void read(llama_context * ctx, int32_t i, llama_token sampled, const std::vector<T> & probs, size_t n) {
        std::set<llama_token> ids = { sampled };
        for (const auto & cur : probs) {
            ids.insert(cur.tok);
        }
        read(ctx, i, ids, n);
    }
    void read(llama_context * ctx, int32_t i, const std::set<llama_token> & ids, size_t n);

    // adds what is known of a token to its entry in the answer; is_sampled: and about
    void to_json(common_json & entry, bool is_sampled) const;
};

// How much of a model is loaded, 0 to 1: a line on stdout for `pypcd serve`.
void server_pcd_loading(const std::string & stage, float progress);

// The context was made: read the settings and try them. False: PCD is on for all requests, but cannot run here.
bool server_pcd_load(llama_context * ctx, const common_params & params);

// What a body asks for: its field "pcd", else the end of "model" (name:pcd, name:pcd-preset, name:pcd-off), else the server's setting,
// but nothing where a grammar constrains the answer from its first token on. Throws std::invalid_argument.
server_pcd_request server_pcd_of(const common_json & body, bool constrained);

// Whether the request may be answered; else it has been, with 403. Each answer tells browsers to show it in no other page, which could have
// the buttons of ours clicked, and to take it for nothing but what it says it is.
bool server_pcd_admits(const common_params & params, const httplib::Request & req, httplib::Response & res);

// This thread begins to read a request. is_gone: whether its client has gone. Throws std::invalid_argument if the body is nested more deeply
// than recursion over it stands, before anything parses it; or if it asks for PCD and its route decodes nothing.
void server_pcd_request_comes(const std::string & path, const std::string & body, const std::function<bool()> & is_gone);

// A slot takes a request. False: it cannot have this setting, and err is a sentence for its client.
bool server_pcd_begin(
        llama_context * ctx, llama_seq_id id, const server_pcd_request & request, server_pcd_answer & answer, std::string & err);

// a slot begins with its prompt, whose last token lies at `last`: there the answer begins, whatever is cached
void server_pcd_prompt(llama_context * ctx, llama_seq_id id, const server_pcd_request & request, llama_pos last);

// the answers of /v1/models, with an entry for each setting behind the model's, and of /props
common_json server_pcd_models(common_json models);
common_json server_pcd_props();

//
// several models: a router and a server for each of them, its child
//

// the model that a request names: without the end that asks for a setting
std::string server_pcd_model_of(const std::string & name);

// why a name is refused that no model has; told: of the model that is called like what is in front of the last colon, null: there is none
std::string server_pcd_not_found(const std::string & name, const common_json * told);

template <typename Models>
std::string server_pcd_not_found(const std::string & name, Models & models) {
    const auto found = models.get_meta(name.substr(0, name.rfind(':')));
    return server_pcd_not_found(name, found ? &found->loaded_info : nullptr);
}

// what may stand behind a colon of a model's name, as far as its server has told
std::vector<std::string> server_pcd_suffixes(const common_json & told);

// adds a model to those of /v1/models, and the names of its settings, as far as its server has told them when it was last ready
void server_pcd_list(common_json & models, common_json entry, const common_json & told);

// what a client gets whose model's server ended: the rest of a stream, or the whole answer
std::string server_pcd_ended(const std::string & why, bool in_stream);
