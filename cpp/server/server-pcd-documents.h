// Documents in requests. Python reads them, finds the passages that stand once more before the question, and writes the prompt
// (pypcd/server/worker.py): in a process of its own, which asks this one for tokens and for what the chat template makes of messages.

#pragma once

#include "json.h"

#include "llama.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

struct common_params;

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
    std::vector<std::string> names;

    int32_t     n_kept    = 0;    // tokens of the prompt's beginning that are kept for other questions
    bool        is_kept   = true; // on disk, or not to be
    std::string path;             // of a file that has the first of them
    int32_t     n_on_disk = 0;    // there
    int32_t     n_spared  = 0;    // that have to be saved from being read, so that the file is

    std::shared_ptr<server_pcd_look> look; // null: the request is for an answer

    common_json passages; // that were repeated, and where they stand
    std::string note;     // what was done in another way than asked for; empty: nothing
};

using server_pcd_documents_ptr = std::shared_ptr<const server_pcd_documents>; // null: no documents

// has a slot take a request without an answer, whose documents it gives; empty, or why there is no result
using server_pcd_run = std::function<std::string(
    const std::vector<llama_token> & prompt, const common_json & params, const std::function<bool()> & is_gone, server_pcd_documents_ptr & documents)>;

// the model is loaded
void server_pcd_documents_load(const llama_context * ctx, const common_params & params, const server_pcd_run & run);

// whose request this thread reads from now on: whether its client has gone
void server_pcd_client(const std::function<bool()> & is_gone);

// A worker's answer to a request; own replies to its calls. Throws std::invalid_argument if the client is to blame.
common_json server_pcd_ask_worker(const common_json & request, const std::function<common_json(const common_json & call)> & own);

// have a thread do something, behind what it has to do already
void server_pcd_later(std::function<void()> what);

// A chat with documents: res is its parameters, which parse makes of a chat without any. False: it has none, and what speaks of them is
// taken out of the body. Throws std::invalid_argument.
bool server_pcd_chat(common_json & body, const std::function<common_json(common_json &)> & parse, common_json & res);

// what server_pcd_chat() added to the parameters of a task
server_pcd_documents_ptr server_pcd_documents_of(const common_json & params);

// a file of /v1/responses or /v1/messages as a part of a chat's message
common_json server_pcd_file(const common_json & part);

// the answer of /documents
common_json server_pcd_read_document(const common_json & body);
