// Finds twins in micro-batches, which know the entry of the batch that each of theirs was.

#include "twins/twins.h"
#include "llama-pcd.h"

#include <algorithm>

llama_pcd_twin_ids::llama_pcd_twin_ids(const llama_pcd_memory & memory) :
    first(memory.recr ? llama_pcd::n_seq_max(*memory.recr) : LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS),
    n_max(LLAMA_PCD_MAX_TWINS) {
    if (memory.recr) { // one for each of the context's sequences, and one id is for llama_pcd_states
        n_max = std::max(0, std::min({ LLAMA_PCD_MAX_TWINS, first, LLAMA_MAX_SEQ - 1 - first }));
    }
}

llama_seq_id llama_pcd_twin_ids::find_taken(const llama_pcd_memory & memory) const {
    for (const auto * kv : memory.kvs) {
        for (llama_seq_id s = first; s < LLAMA_MAX_SEQ; ++s) {
            if (!llama_pcd::cells(*kv).seq_pos_get(s).empty()) {
                return s;
            }
        }
    }
    return -1;
}

const llama_pcd_twin * llama_pcd_twins::at(const llama_ubatch & ubatch, uint32_t i) const {
    const uint32_t entry = ubatch.data->batch_idxs[i];
    return entry >= first ? &all[entry - first] : nullptr;
}

llama_pcd_twin * llama_pcd_twins::at(const llama_ubatch & ubatch, uint32_t i) {
    const uint32_t entry = ubatch.data->batch_idxs[i];
    return entry >= first ? &all[entry - first] : nullptr;
}

uint32_t llama_pcd_twins::count(const llama_ubatch & ubatch) const {
    const auto & entries = ubatch.data->batch_idxs;
    return std::count_if(entries.begin(), entries.end(), [&](int32_t entry) { return (uint32_t) entry >= first; });
}

uint32_t llama_pcd_twins::count_perturbed(const llama_ubatch & ubatch) const {
    const auto & entries = ubatch.data->batch_idxs;
    return std::count_if(entries.begin(), entries.end(), [&](int32_t entry) {
        return (uint32_t) entry >= first && all[entry - first].perturbed;
    });
}

uint32_t llama_pcd_twins::count_last(const llama_ubatch & ubatch) const {
    uint32_t n = 0;
    while (n < ubatch.n_tokens && at(ubatch, ubatch.n_tokens - 1 - n)) {
        n++;
    }
    return n;
}

int32_t llama_pcd_twins::token_of(const llama_ubatch & ubatch, const llama_pcd_twin & twin) const {
    const auto & entries = ubatch.data->batch_idxs;
    if (twin.token < 0 || entries.empty()) {
        return -1;
    }
    // mostly the entries of a micro-batch are neighbours
    const int64_t guess = (int64_t) twin.token - entries[0];
    if (guess >= 0 && guess < (int64_t) entries.size() && entries[guess] == twin.token) {
        return guess;
    }
    const auto it = std::find(entries.begin(), entries.end(), twin.token);
    return it == entries.end() ? -1 : it - entries.begin();
}

std::vector<std::vector<int32_t>> llama_pcd_twins::cells(size_t n_caches) const {
    std::vector<std::vector<int32_t>> res(n_caches);
    for (const auto & twin : all) {
        for (size_t k = 0; k < n_caches; ++k) {
            if (twin.cells[k] >= 0) {
                res[k].push_back(twin.cells[k]);
            }
        }
    }
    return res;
}
