// Which sequence ids are twins.

#include "twins/twins.h"
#include "llama-pcd.h"

#include <algorithm>

llama_pcd_twins::llama_pcd_twins(const llama_pcd_memory & memory) :
    seq_first(memory.recr ? llama_pcd::n_seq_max(*memory.recr) : LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS),
    n_max(LLAMA_PCD_MAX_TWINS) {
    if (memory.recr) { // one for each of the context's sequences, and one id is for llama_pcd_states
        n_max = std::max(0, std::min({ LLAMA_PCD_MAX_TWINS, seq_first, LLAMA_MAX_SEQ - 1 - seq_first }));
    }
}

llama_seq_id llama_pcd_twins::find_taken(const llama_pcd_memory & memory) const {
    for (const auto * kv : memory.kvs) {
        for (llama_seq_id s = seq_first; s < LLAMA_MAX_SEQ; ++s) {
            if (!llama_pcd::cells(*kv).seq_pos_get(s).empty()) {
                return s;
            }
        }
    }
    return -1;
}

uint32_t llama_pcd_twins::count(const llama_ubatch & ubatch) const {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens && !parents.empty(); ++i) { // no parents: a graph to reserve memory for
        n += is_twin(ubatch.seq_id[i][0]);
    }
    return n;
}
