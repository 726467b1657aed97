// The rows of the last decode: L, L* and their contrast, and which batch entry each belongs to; and which of them stay L, since a
// floor (min_context, min_entropy, min_first_entropy) leaves their tokens plain. Knows nothing of how they were evaluated.

#pragma once

#include "llama-pcd-impl.h"
#include "twins/settings.h"
#include "twins/twins.h"

#include <vector>

struct llama_pcd_rows {
    llama_pcd_rows(llama_context & lctx, llama_pcd_stats & stats) : lctx(lctx), stats(stats) {}

    std::vector<int32_t>       out_ids;   // batch index of each row, ascending
    std::vector<llama_pcd_seq_setting> contrasts; // as they were

    std::vector<int32_t> plain_ids; // batch index of each row that stays as llama.cpp wrote it, ascending

    size_t size() const { return out_ids.size(); }

    void forget() { out_ids.clear(); contrasts.clear(); firsts.clear(); plain_ids.clear(); }

    // the same, and free their memory
    void trim();

    size_t n_bytes() const;

    // first: the row of the first token of its answer, if that is in this batch, be it this one; else -1
    void add(int32_t batch_index, const llama_pcd_seq_setting & contrast, int32_t first);
    void add_plain(int32_t batch_index) { plain_ids.push_back(batch_index); }

    // whether row i is that of an answer's first token, whose entropy matters: to its own sequence, or another one it is in
    bool is_first(size_t i) const { return firsts[i] == (int32_t) i; }

    // in the statistics
    void count() const;

    // make room for the rows that were added
    void reserve();

    // the first row of an entry of the batch from this one on; size(): there is none
    size_t first_from(size_t batch_index) const;

    // the row of an entry of the batch; size(): it has none
    size_t find(int32_t batch_index) const;

    // copy row i from an entry of the batch that was just decoded; the rows of its twins
    void take_standard(size_t i, int32_t batch_index);
    void take_local   (const llama_pcd_twins & twins);

    // whether the contrast can change the outcome of row i, whose standard row is there
    bool needs_twin(size_t i);

    // over the caller's rows of the context: the contrast, or with combine = false the standard row
    void show();

    // of L, in bits
    float entropy(size_t i);

    // the row of an index that means what llama_get_logits_ith's does; size(): that output has none
    size_t resolve(int32_t i) const;

    // the same for one of plain_ids: its batch index; -1: it is none
    int32_t resolve_plain(int32_t i) const;

    // see llama_pcd_get_logits_ith and llama_pcd_get_strength_ith
    const float * get(int32_t i, int32_t which);
    float         get_strength(int32_t i);

private:
    llama_context   & lctx;
    llama_pcd_stats & stats;

    // [size()][n_vocab]
    std::vector<float> standard;
    std::vector<float> local;
    std::vector<bool>  has_local;
    std::vector<float> strengths; // of the rows that were contrasted
    std::vector<float> entropies; // of each row's present L; NaN: not known yet

    std::vector<int32_t> firsts;  // see add()

    std::vector<std::vector<float>> contrasted; // each row is made when it is asked for

    size_t n_vocab() const;

    const float * standard_row    (size_t i) const { return standard.data() + i*n_vocab(); }
    const float * local_row(size_t i) const { return has_local[i] ? local.data() + i*n_vocab() : nullptr; }

    // whether a floor of entropy leaves the row plain
    bool sure(size_t i);

    // returns how many tokens are plausible; 1 where L is sure
    int32_t contrast(size_t i, float behind, float * dst);
};
