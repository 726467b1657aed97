// PCD in llama-server: what a request asks for, the slot that it runs in, and what PCD did for it. The hooks of
// patches/llama-server-hooks.patch call this. Knows llama.cpp's sequences and the JSON of requests, but not the server's structs.
//
// Settings come from one place, pypcd's Python: the environment variable LLAMA_ARG_PCD, which `pypcd serve` writes, has the
// server's setting and the presets; and a request's setting is read by pypcd/server/worker.py. Without the variable a request with
// PCD is refused. The fields are those of twins/settings.h, which the build makes from pypcd/settings/fields.py.

#pragma once

#include "json.h"
#include "llama-pcd.h"
#include "server-pcd-disk.h"
#include "server-pcd-documents.h"
#include "server-pcd-origin.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

// what a request asks for
struct server_pcd_request {
    bool             on     = false;
    llama_pcd_params params = {};
    std::string      text   = "off"; // the setting, as it can be typed

    bool constrained = false; // off, since a grammar constrains the answer and the request itself does not ask for PCD

    common_json to_json() const; // false, or what a request may set, by name
};

// what PCD did: for an answer, or since the start
struct server_pcd_counts {
    uint64_t n_twins      = 0; // rows that a twin was evaluated for
    uint64_t n_skipped    = 0; // rows that needed none
    uint64_t n_contrasted = 0; // rows that are not the model's own: more than one token was plausible, and no floor kept them plain

    uint64_t n_changed     = 0; // tokens that are not the model's own most probable one, because of the contrast
    uint64_t n_constrained = 0; // rows of answers that a grammar left plain

    void add(const server_pcd_counts & other);
};

// what PCD did for one answer
struct server_pcd_answer {
    server_pcd_request request;
    server_pcd_counts  counts;

    server_pcd_beginning     beginning = {};
    server_pcd_documents_ptr documents = {};

    // Up to where the prompt's tokens are read next, of which n_read are: to where it is kept, or to its end. A prompt that is asked again
    // has its last token by itself, so with documents it is read by itself the first time, too; and with a contrast, which multiplies
    // rounding.
    int32_t n_next(int32_t n_prompt, int32_t n_read) const;

    // The question whose attention is read next, when n_read tokens of the prompt are; null: none. And how many tokens that the slot has
    // may stay: not those of the question, which are evaluated to look at them.
    server_pcd_look * look(int32_t n_read) const;
    int32_t n_usable(int32_t n) const { return documents && documents->look ? std::min(n, documents->look->n_past) : n; }

    // Row i of the last decode, and the token that was chosen from it; LLAMA_TOKEN_NULL: a drafted one was not, so it is no token of the
    // answer.
    void count(llama_context * ctx, int32_t i, llama_token token);
    void count(llama_context * ctx, const std::vector<int32_t> & rows, const std::vector<llama_token> & tokens);

    // n_prompt, n_tokens: of the prompt and the answer
    void to_json(common_json & timings, uint64_t n_prompt, uint64_t n_tokens) const;
};

// the candidates of one token, before and after the contrast: natural logarithms of probabilities
struct server_pcd_probs {
    struct candidate {
        llama_token id;
        std::string text;
        float       standard;     // of softmax(L)
        float       local; // of softmax(L*); NaN: no twin
        float       contrasted;   // of softmax(L~); -inf: not among the plausible tokens
    };
    std::vector<candidate> candidates; // those of the answer first
    size_t                 n_pushed_out = 0;

    float strength = 0.0f; // of this contrast; NaN: none was needed

    // row i of the last decode: the sampled token, the candidates of the answer, and those of the n most probable tokens of L that are
    // not among them
    template <typename T>
    void read(llama_context * ctx, int32_t i, llama_token sampled, const std::vector<T> & probs, size_t n) {
        std::vector<llama_token> ids = { sampled };
        for (const auto & cur : probs) {
            if (cur.tok != sampled) {
                ids.push_back(cur.tok);
            }
        }
        read(ctx, i, ids, n);
    }
    void read(llama_context * ctx, int32_t i, const std::vector<llama_token> & ids, size_t n);

    // adds what is known of a token to its entry in the answer; is_sampled: and what was pushed out
    void to_json(common_json & entry, bool is_sampled) const;
};

// How much of a model is loaded, 0 to 1: a line on stdout for `pypcd serve`.
void server_pcd_loading(const std::string & stage, float progress);

// The context was made: read the settings and try them. False: PCD is on for all requests, but cannot run here.
bool server_pcd_load(llama_context * ctx, const common_params & params);

// What a body asks for: its field "pcd", else the end of "model" (name:pcd, name:pcd-preset, name:pcd-off), else the server's setting,
// but nothing where a grammar constrains the answer from its first token on. Throws std::invalid_argument.
server_pcd_request server_pcd_of(const common_json & body, bool constrained);

// Throws std::invalid_argument if a body is nested more deeply than recursion over it stands, before anything parses it; or if it asks
// for PCD and its route decodes nothing.
void server_pcd_check_route(const std::string & path, const std::string & body);

// A slot takes a request, or gives it back. False: it cannot have this setting, and err is a sentence for its client.
bool server_pcd_begin(
        llama_context * ctx, llama_seq_id id, const server_pcd_request & request, server_pcd_answer & answer, std::string & err);
void server_pcd_end  (llama_context * ctx, llama_seq_id id);

// A slot begins with its prompt, whose last token lies at `last`: there the answer begins, whatever is cached. tokens: those of the
// prompt that are in memory; states that were loaded do not have them.
void server_pcd_prompt(
        llama_context * ctx, llama_seq_id id, const server_pcd_request & request, const std::vector<llama_token> & tokens, llama_pos last);

// the answers of /v1/models, with an entry for each setting behind the model's, and of /props
common_json server_pcd_models(common_json models);
common_json server_pcd_props();

//
// several models: a router and a server for each of them, its child
//

// the model that a request names: without the end that asks for a setting
std::string server_pcd_model_of(const std::string & name);

// What stands in front of the last colon of a name; and why a name is refused that no model has. entry: /v1/models has it for the model
// that is called like the front; null: there is none.
std::string server_pcd_front_of (const std::string & name);
std::string server_pcd_not_found(const std::string & name, const common_json & told, bool has_front);

// what may stand behind a colon of a model's name, as far as its server has told
std::vector<std::string> server_pcd_suffixes(const common_json & told);

// adds a model to those of /v1/models, and the names of its settings, as far as its server has told them when it was last ready
void server_pcd_list(common_json & models, common_json entry, const common_json & told);

// what a client gets whose model's server ended: the rest of a stream, or the whole answer
std::string server_pcd_ended(const std::string & why, bool in_stream);

// what a client gets whose model did not load
std::string server_pcd_not_loaded(const std::string & name);
