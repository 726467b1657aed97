// The states that recurrent layers keep for twins: room for them, a twin's own, and those of its tokens as they were before. Knows
// nothing of KV caches.
//
// A recurrent layer has one state for each sequence and cannot go back to an earlier one. So a twin starts from a copy of its
// parent's. Copying is a note that two sequences have the same state: numbers move only when one of them is evaluated.

#pragma once

#include "twins/twins.h"

#include <string>
#include <vector>

struct llama_pcd_states {
    llama_pcd_states(const llama_pcd_memory & memory, const llama_pcd_twin_ids & ids) : memory(memory), ids(ids) {}

    int64_t n_bytes = 0; // of what was added

    // make room beside the context's own states, if there are any; false: no memory for it, and err says so in a sentence
    bool make(std::string & err);

    // a twin starts with the state that its parent had when it was saved, else with the one it has now
    void branch(llama_seq_id parent, llama_seq_id twin) const;

    // Keep the states of these sequences to go back to. Meanwhile there is room for one twin. More than ids.n_max are not kept: such
    // tokens are evaluated without twins, or one token, which all of these share, after its twin.
    void save(const std::vector<llama_seq_id> & seqs);
    void drop();

    bool restore() const; // false: none were saved

private:
    const llama_pcd_memory   & memory;
    const llama_pcd_twin_ids & ids;

    std::vector<llama_seq_id> saved; // the i-th one's state is kept by kept(i)

    llama_seq_id kept(size_t i) const { return ids.first + 1 + (llama_seq_id) i; }

    void copy(llama_seq_id from, llama_seq_id to) const;
};
