// Prompts on disk: the keys and values behind the documents of a request are read back in place of being computed again. Which files there
// are Python knows (pypcd/decode/prompt_cache.py, through pypcd/server/worker.py); `pypcd chat` and the server read each other's. Here
// sequences are written and read back. Knows sequences and tokens, but nothing of slots.

#pragma once

#include "json.h"
#include "server-pcd-documents.h"

#include "llama.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct common_params;

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

    bool    marks    = false;
    bool    is_kept  = false; // on disk, or not to be
    int32_t n_loaded = 0; // from disk
    int32_t n_held   = 0; // tokens that did not have to be read
    int64_t t_start  = 0; // us
};
