// Which sequence ids are twins.

#include "llama-pcd-twins.h"
#include "llama-pcd.h"

llama_pcd_twins::llama_pcd_twins(const llama_pcd_memory & memory) :
    seq_first(memory.recr ? (llama_seq_id) memory.lctx.get_cparams().n_seq_max - 1 : LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS) {}

uint32_t llama_pcd_twins::count(const llama_ubatch & ubatch) const {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens && !parents.empty(); ++i) { // no parents: a graph to reserve memory for
        n += is_twin(ubatch.seq_id[i][0]);
    }
    return n;
}
