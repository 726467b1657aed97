// Documents in requests. Python reads them, finds the passages that stand once more before the question, and writes the prompt
// (pypcd/server/worker.py): in a process of its own, which asks this one for tokens and for what the chat template makes of messages.

#pragma once

#include "json.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

// what a request hands over to its slot
struct server_pcd_documents {
    std::vector<std::string> names;

    int32_t     n_kept    = 0;    // tokens of the prompt's beginning that are kept for other questions
    bool        is_kept   = true; // on disk, or not to be
    std::string path;             // of a file that has the first of them
    int32_t     n_on_disk = 0;    // there
    int32_t     n_spared  = 0;    // that have to be saved from being read, so that the file is

    common_json passages; // that were repeated, and where they stand
    std::string note;     // what was done in another way than asked for; empty: nothing
};

using server_pcd_documents_ptr = std::shared_ptr<const server_pcd_documents>; // null: no documents

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
