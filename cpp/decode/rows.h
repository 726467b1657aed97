// The rows of the last decode: L, L* and their contrast, and which batch entry each belongs to; and which of them stay L, since a
// floor (min_context, min_entropy, min_first_entropy) leaves their tokens plain. Knows nothing of how they were evaluated.

#pragma once

#include "twins/twins.h"

#include <cmath>
#include <vector>

struct llama_pcd_kept_row {
    int32_t               id;      // the entry of the batch
    llama_pcd_seq_setting setting; // as it was
    int32_t               first;   // the row of the first token of its answer, if that is in this batch, be it this one; else -1

    std::vector<float> standard   = {};
    std::vector<float> local      = {}; // empty: its twin was not needed
    std::vector<float> contrasted = {}; // made when it is asked for

    float strength = NAN; // of the contrast
    float entropy  = NAN; // of L; NaN: not known yet
};

struct llama_pcd_rows {
    llama_pcd_rows(llama_context & lctx, llama_pcd_stats & stats) : lctx(lctx), stats(stats) {}

    std::vector<llama_pcd_kept_row> all;       // in the order of the batch
    std::vector<int32_t>            plain_ids; // batch index of each row that stays as llama.cpp wrote it, ascending

    size_t size() const { return all.size(); }

    void forget() { all.clear(); plain_ids.clear(); }

    size_t n_bytes() const;

    // the first row of an entry of the batch from this one on; size(): there is none
    size_t first_from(int32_t batch_index) const;

    // copy row i from an entry of the batch that was just decoded; the rows of its twins
    void take_standard(size_t i, int32_t batch_index);
    void take_local   (const llama_pcd_twins & twins);

    // whether the contrast can change the outcome of row i, whose standard row is there
    bool needs_twin(size_t i);

    // over the caller's rows of the context: the contrast, or with combine = false the standard row
    void show();

    // of L, in bits
    float entropy(llama_pcd_kept_row & row);

    // the row of an index that means what llama_get_logits_ith's does; null: that output has none
    llama_pcd_kept_row * resolve(int32_t i);

    // the same for one of plain_ids: its batch index; -1: it is none
    int32_t resolve_plain(int32_t i) const;

    // see llama_pcd_get_logits_ith and llama_pcd_get_strength_ith
    const float * get(int32_t i, int32_t which);
    float         get_strength(int32_t i);

private:
    llama_context   & lctx;
    llama_pcd_stats & stats;

    int32_t n_vocab() const;

    std::vector<float> copy_of(int32_t batch_index) const;

    // whether a floor of entropy leaves the row plain
    bool sure(llama_pcd_kept_row & row);

    void contrast(llama_pcd_kept_row & row, float behind, float * dst);
};
