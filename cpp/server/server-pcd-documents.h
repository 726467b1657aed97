// Documents in requests, and replay: the passages of them that the question attends to most stand once more in front of it.
//
//   a chat       Parts of messages that are files, and the field "documents", become text in front of the message's own. Python reads
//                them (pypcd/document.py): one place knows PDF and DOCX, and what a document's segments are.
//   its slot     The prompt is read up to its last tokens. These are evaluated with a tap on the attention weights, and taken out again:
//                what they attend to most is put into the prompt, which is then begun anew. Its beginning is in the cache.
//
// What replay takes of the attention is what pypcd/decode/replay.py takes, with the numbers that Python gives (LLAMA_ARG_PCD).

#pragma once

#include "json.h"
#include "llama.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

struct server_pcd_document {
    std::string name;
    std::vector<std::string> segments;
    std::string joiner;

    std::string text() const;
};

// what a request hands over to its slot
struct server_pcd_replay {
    std::vector<server_pcd_document> documents;

    std::string prompt;   // with a mark where the passages go; empty: nothing is replayed
    std::string mark;
    std::string left_out; // why, if not by choice
};

// where documents stand in a prompt
struct server_pcd_places {
    std::vector<size_t> ends;   // the byte at which each token ends
    std::vector<size_t> begins; // the byte at which each document begins; npos: it is not there as it is

    // each document is looked for behind the one before it: what comes later, such as the question, may quote it
    server_pcd_places(
            const llama_vocab * vocab, const std::vector<llama_token> & prompt, const std::vector<server_pcd_document> & documents);

    bool has_all() const;
    int32_t token_at(size_t byte) const; // the index of its token
};

using server_pcd_replay_ptr = std::shared_ptr<const server_pcd_replay>; // null: no documents

// the passages of an answer
struct server_pcd_passages {
    std::vector<std::string> texts;
    std::string left_out; // why there are none, if not by choice

    bool has_documents = false;

    // A slot takes a request. several: it asks for more than one answer. goes_back: the last tokens of a sequence can be taken out; if
    // not, is_marked: there will be a checkpoint to begin anew from.
    void begin(const server_pcd_replay_ptr & replay, int32_t n_prompt, bool several, bool goes_back, bool is_marked);

    bool is_waiting() const { return waiting; } // the passages are not chosen yet
    bool is_again  () const { return again; }   // the prompt has begun anew with them

    // how many of the prompt's tokens are read before the passages are chosen, if they are to be
    int32_t n_before(int32_t n_prompt) const;

    // Choose them by the attention of the prompt's last tokens, of whose others the sequence holds n_before(). Returns the tokens of the
    // prompt to begin anew with: with the passages, or as it is if the sequence cannot go back; none: it goes on. make_room: whether there
    // is more room in memory now.
    std::vector<llama_token> choose(
            llama_context * ctx, llama_seq_id id, const server_pcd_replay & replay, const std::vector<llama_token> & prompt, int32_t n_ctx,
            const std::function<bool()> & make_room);

    // The prompt is begun, n_cached of its tokens are in the cache. Where it begins anew, what was evaluated before is no cache.
    void count(uint64_t & n_cached, uint64_t & n_processed);

    void to_json(common_json & timings) const;

private:
    bool waiting   = false;
    bool again     = false;
    bool goes_back = true;

    // the prompt with the passages, if there are any
    std::vector<llama_token> find(
            llama_context * ctx, llama_seq_id id, const server_pcd_replay & replay, const std::vector<llama_token> & prompt, int32_t n_ctx,
            const std::function<bool()> & make_room);

    uint64_t n_cached_first = 0; // of the prompt's tokens, when it first began
};

// The documents of a chat. In the body they become text; "documents" and "replay" are taken out of it.
struct server_pcd_chat {
    explicit server_pcd_chat(common_json & body); // throws std::invalid_argument

    // with what prompt_of makes of a body, the prompt: adds what the slot gets
    void add_replay(common_json & params, const std::function<std::string(common_json &)> & prompt_of);

private:
    std::shared_ptr<server_pcd_replay> replay; // null: no documents
    common_json marked;                        // the body with a mark; null: nothing is replayed
};

// what add_replay() added to the parameters of a task
server_pcd_replay_ptr server_pcd_replay_of(const common_json & params);

// file parts of other interfaces as OpenAI's chat has them: /v1/responses, and /v1/messages
common_json server_pcd_input_file(const common_json & part);
common_json server_pcd_anthropic_file(const common_json & part);

// the answer of /documents: count tells the tokens of a text
common_json server_pcd_read_document(const common_json & body, const std::function<size_t(const std::string &)> & count);
