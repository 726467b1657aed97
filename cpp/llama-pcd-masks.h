// KQ masks that stay in memory from one step to the next, so that only what changed is written: the cells in llama.cpp's log of
// changes, those at the positions that a row moved over, and those that fell out of its window. llama.cpp, and llama_pcd_view, look
// at every cell for a row. Knows nothing of what is done with a mask.

#pragma once

#include "llama-pcd-view.h"

#include <memory>
#include <vector>

struct llama_pcd_mask {
    ggml_backend_buffer_ptr buffer;

    ggml_type type   = GGML_TYPE_COUNT;
    int64_t   n_kv   = 0;
    int64_t   n_rows = 0;

    // what it holds, of which cache, and how many changes of the cells are in it; no rows: not known
    std::vector<llama_pcd_view::row> rows;

    const llama_kv_cache * kv      = nullptr;
    uint64_t               n_known = 0;
};

struct llama_pcd_masks {
    llama_pcd_masks(const llama_pcd_memory & memory, const llama_pcd_view & view) : memory(memory), view(view) {}

    // Memory for the mask of a graph that is being built, which no other tensor is laid out in; it is the mask's as long as this lives.
    // null: the mask is too large, or there is no memory; then each step fills it.
    std::shared_ptr<llama_pcd_mask> place(ggml_tensor * mask);

    // bring all rows up to date; false: they have to be filled
    bool update(const llama_kv_cache & kv, const ggml_tensor * dst, const llama_ubatch & ubatch) const;

    // all rows were filled
    void filled(const llama_kv_cache & kv, const ggml_tensor * dst, const llama_ubatch & ubatch) const;

    mutable int64_t n_updated = 0; // so far

    size_t n_bytes() const;

    // free what no graph uses
    void trim();

private:
    static constexpr size_t    N_BYTES_MAX = 8*1024*1024; // of one mask: beyond it, what its rows cost is little beside their computation
    static constexpr llama_pos N_MOVED_MAX = 64;          // positions that a row moves over

    const llama_pcd_memory & memory;
    const llama_pcd_view   & view;

    std::vector<std::shared_ptr<llama_pcd_mask>> all;

    llama_pcd_mask * find(const ggml_tensor * dst) const;

    // whether the rows of this cache can be kept at all
    bool keeps(const llama_kv_cache & kv) const;

    template <typename T>
    void update(T * data, const llama_pcd_mask & mask, const std::vector<llama_pcd_view::row> & rows) const;
};
