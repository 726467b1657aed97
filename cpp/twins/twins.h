// The twins of the batch that is being decoded: their sequences, whose twins they are, and where their keys go. A twin is a
// token's second evaluation, over-rotated or with a restricted view. Knows nothing of how it is evaluated.

#pragma once

#include "upstream/memory.h"

#include <vector>

struct llama_pcd_twins {
    explicit llama_pcd_twins(const llama_pcd_memory & memory);

    // Twins get sequence ids of their own, one each, so that they never see one another: the last ones there are. Recurrent
    // layers keep a state for each id up to the highest, so there they are the next after the context's own.
    llama_seq_id seq_first;

    uint32_t n_max; // in one pass

    std::vector<llama_seq_id> parents; // the sequence of the tokens behind twin sequence i; empty: no twins in flight

    // where the keys of each twin of the last micro-batch went, for each cache of the memory
    std::vector<std::vector<int32_t>> cells;

    bool together  = false; // twins are in the batch of their tokens
    bool misplaced = false; // the memory put the twins of a micro-batch in another place than its end

    bool is_twin(llama_seq_id seq_id) const { return seq_id >= seq_first; }

    llama_seq_id parent_of(llama_seq_id twin) const { return parents.at(twin - seq_first); }

    uint32_t count(const llama_ubatch & ubatch) const;

    // one of these ids in which a caller has tokens, as llama.cpp lets it while PCD is off; -1: none
    llama_seq_id find_taken(const llama_pcd_memory & memory) const;
};
