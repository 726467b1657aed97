// Documents in requests. Python reads them, finds the passages that stand once more before the question, and writes the prompt
// (pypcd/server/worker.py): in a process of its own, which asks this one for tokens and for what the chat template makes of messages.

#pragma once

#include "json.h"

#include "llama.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct common_params;
struct server_queue;
struct server_response;

// What a question attends to, for the finder of passages. Its request is over when that is read: it is for no answer.
struct server_pcd_look {
    std::vector<int32_t> heads;      // a layer, a head, …
    int32_t              n_past = 0; // tokens of the prompt before the question, which is the rest of it
    std::vector<double>  pays;       // to each position
    std::string          refusal;    // why nobody can tell; empty: somebody can

    // Evaluates the question behind what the sequence holds, which has to be taken out of it again. False: there is no room.
    bool read(llama_context * ctx, llama_seq_id id, const std::vector<llama_token> & prompt);
};

// what a request hands over to its slot
struct server_pcd_documents {
    common_json told; // by Python (worker.py, _chat()): the passages that were repeated, and what of the prompt's beginning is kept

    std::shared_ptr<server_pcd_look> look; // null: the request is for an answer
};

using server_pcd_documents_ptr = std::shared_ptr<const server_pcd_documents>; // null: no documents

// The model is loaded. What a question attends to is read in a slot, as a task of this queue.
void server_pcd_documents_load(
        const llama_context * ctx, const common_params & params, server_queue & tasks, server_response & results, bool has_mtmd);

// A worker's answer to a request; own replies to its calls. Throws std::invalid_argument if the client is to blame.
common_json server_pcd_ask_worker(const common_json & request, const std::function<common_json(const common_json & call)> & own = nullptr);

// When a worker was last at work, in ggml_time_ms(): a server that sleeps has no model, which a worker asks.
int64_t server_pcd_last_busy();

// have a thread do something, behind what it has to do already
void server_pcd_later(std::function<void()> what);

// A chat with documents: res is its parameters, which parse makes of a chat without any. False: it has none, and what speaks of them is
// taken out of the body. Throws std::invalid_argument.
bool server_pcd_chat(common_json & body, const std::function<common_json(common_json &)> & parse, common_json & res);

// This thread begins to read a request; whether its client has gone.
void server_pcd_client(const std::function<bool()> & is_gone);

// What server_pcd_chat() found in the request that this thread reads. Throws std::invalid_argument if it is no chat, but has documents.
server_pcd_documents_ptr server_pcd_documents_of(const common_json & params);

//
// prompts on disk: the keys and values behind the documents of a request are read back in place of being computed again
//

// What tells the files of a context from others, for Python; null: nothing is kept or read back. weights: what tells the model's file.
common_json server_pcd_disk(const std::string & weights, const llama_context * ctx, const common_params & params);

// the beginning of one prompt, nearly to the end of its last document
class server_pcd_beginning {
public:
    // A slot takes a request. Nothing is kept of a prompt without documents. marks: the sequence's last tokens cannot be taken out, so
    // that its slot keeps a checkpoint of the beginning.
    void begin(const server_pcd_documents_ptr & documents, const std::vector<llama_token> & prompt, bool marks);

    bool is_marked() const { return marks && size() > 0; }

    // Replace the sequence by the longest part of it that is on disk, if that saves reading more than a few tokens behind the n that
    // it has in common with the prompt. make_room: whether there is more room in memory now. False: the sequence is as before; else it
    // holds these tokens, none if they did not fit.
    bool restore(
            llama_context * ctx, llama_seq_id id, int32_t n, const std::function<bool()> & make_room, std::vector<llama_token> & held);

    // whether the sequence is as it was when it had n_past tokens: nothing has to be taken out of it
    bool is_just_loaded(int32_t n_past) const { return n_loaded > 0 && n_past == n_loaded; }

    // how many tokens are to be read next, before any others, so that it can be kept; 0: no stop is needed
    int32_t n_next(int32_t n_read) const { return n_read < size() ? size() : 0; }

    // The sequence holds n_read tokens of the prompt. Whether these are just the beginning; then they are written, once, by a thread.
    bool keep(llama_context * ctx, llama_seq_id id, int32_t n_read);

private:
    int32_t size() const { return tokens ? (int32_t) tokens->size() : 0; }

    std::shared_ptr<const std::vector<llama_token>> tokens; // null: none are kept; shared, since answers are copied with this
    server_pcd_documents_ptr documents;

    bool    marks     = false;
    bool    is_kept   = false; // on disk, or not to be
    int32_t n_on_disk = 0; // of the tokens, in a file
    int32_t n_loaded  = 0; // from it
    int32_t n_held    = 0; // tokens that did not have to be read
    int64_t t_start   = 0; // us
};
