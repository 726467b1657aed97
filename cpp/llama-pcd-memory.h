// The memory of a context: its KV caches, its recurrent state, and how much fits. Knows nothing of what is decoded into it.

#pragma once

#include "llama-pcd-impl.h"

#include <utility>
#include <vector>

struct llama_pcd_memory {
    explicit llama_pcd_memory(llama_context & lctx);

    llama_context & lctx;

    std::vector<llama_kv_cache *> kvs; // none: memory of a kind that a twin cannot be in

    // the state of recurrent layers beside the KV cache; null: none
    llama_memory_recurrent * recr = nullptr;

    // which of kvs; kvs.size(): none of them
    size_t index_of(const llama_kv_cache * kv) const;

    size_t n_bytes() const;

    bool has_shift() const; // positions changed, and the keys are yet to follow
    bool slides()    const; // some layers have a sliding window

    // cells that are free as they are
    uint32_t n_free_cells() const;

    // how many tokens fit: a sliding-window cache also gives away what fell out of the window of one sequence
    uint32_t n_room() const;

    // Whether a sliding-window cache may give away cells that fell out of the window when n more are placed: it does so as
    // soon as its search does not start behind all that is in use, even where other cells are free.
    bool forgets(size_t n) const;

    // the same, exactly: whether placing n more takes a cell that a token of a sequence at position pos still sees
    bool forgets(size_t n, llama_seq_id seq_id, llama_pos pos) const;

    // the last positions of a batch's sequences, as they are now; and forgetting all after them, where that is possible
    using ends = std::vector<std::pair<llama_seq_id, llama_pos>>;

    ends ends_of(const llama_batch_ext & batch) const;
    void cut(const ends & last) const;

    // whether sliding-window layers still have all that the tokens of a sequence at positions [pos, end) see
    bool has_all_before(llama_seq_id seq_id, llama_pos pos, llama_pos end) const;

    // write down which tokens lie at positions 0 .. n-1 of a sequence; returns how many of them are there
    int32_t set_tokens(llama_seq_id seq_id, const llama_token * tokens, int32_t n) const;
};
