// The memory of a context: its KV caches, its recurrent state, and how much fits. Knows nothing of what is decoded into it.

#pragma once

#include "llama-pcd-impl.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

// The (position, cell) pairs of a sequence at positions [p0, p1), in their order: llama.cpp keeps them sorted, so nothing else is
// looked at.
struct llama_pcd_cells_at {
    llama_pcd_cells_at(const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
        const auto & all = llama_pcd::cells(kv).seq_pos_get(seq_id);
        first = all.lower_bound({ p0, 0 });
        last  = all.lower_bound({ std::max(p0, p1), 0 });
    }

    auto begin() const { return first; }
    auto end()   const { return last; }

private:
    std::set<std::pair<llama_pos, uint32_t>>::const_iterator first, last;
};

struct llama_pcd_memory {
    explicit llama_pcd_memory(llama_context & lctx);

    llama_context & lctx;

    static constexpr size_t MAX_CACHES = 2; // with sliding-window layers there are two

    std::vector<llama_kv_cache *> kvs; // none: memory of a kind that a twin cannot be in

    // the state of recurrent layers beside the KV cache; null: none
    llama_memory_recurrent * recr = nullptr;

    template <typename F> bool any(const F & fn) const { return std::any_of(kvs.begin(), kvs.end(), [&](auto * kv) { return fn(*kv); }); }

    bool slides() const { return any(llama_pcd::slides); } // some layers have a sliding window

    // cells that are free as they are
    uint32_t n_free_cells() const;

    // How many tokens fit: a sliding-window cache also gives away what fell out of the window of one sequence. Counts no further
    // than n_max.
    uint32_t n_room(uint32_t n_max) const;

    // Whether placing n more takes a cell that a token of a sequence at position pos still sees. A sliding-window cache gives away cells
    // that fell out of the window as soon as its search does not start behind all that is in use, even where other cells are free.
    bool forgets(size_t n, llama_seq_id seq_id, llama_pos pos) const;

    // the last positions of a batch's sequences, as they are now; and forgetting all after them, where that is possible
    using ends = std::map<llama_seq_id, llama_pos>;

    ends ends_of(const llama_batch_ext & batch) const;
    void cut(const ends & last) const;

    // take a whole sequence out, as seq_rm does, but without looking at the cells of others
    void remove(llama_seq_id seq_id) const;
};
