// Walks the cells of KV caches.

#include "upstream/memory.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include <algorithm>
#include <typeinfo>

// The memory as a class that twins are known to work in, and none derived from it: those pick keys in ways of their own, by an
// indexer say, which would miss the twin's.
template <typename T>
static T * exactly(llama_memory_i * mem) {
    return mem && typeid(*mem) == typeid(T) ? static_cast<T *>(mem) : nullptr;
}

llama_pcd_memory::llama_pcd_memory(llama_context & lctx) : lctx(lctx) {
    llama_memory_i * mem = lctx.get_memory();

    if (auto * hybrid = exactly<llama_memory_hybrid>(mem)) {
        recr = hybrid->get_mem_recr();
        mem  = hybrid->get_mem_attn();
    } else if (auto * sliding = exactly<llama_memory_hybrid_iswa>(mem)) {
        recr = sliding->get_mem_recr();
        mem  = sliding->get_mem_attn();
    }

    if (auto * kv = exactly<llama_kv_cache>(mem)) {
        kvs = { kv };
    } else if (auto * iswa = exactly<llama_kv_cache_iswa>(mem)) {
        kvs = { iswa->get_base(), iswa->get_swa() };
    }
}

uint32_t llama_pcd_memory::n_free_cells() const {
    uint32_t res = UINT32_MAX;
    for (const auto * kv : kvs) {
        if (!llama_pcd::slides(*kv)) { // a sliding-window cache makes its own room
            const auto & cells = llama_pcd::cells(*kv);
            res = std::min(res, cells.size() - cells.get_used());
        }
    }
    return res;
}

// the cells of a sequence that fell out of its sliding window and are in no other sequence, up to n_max of them
static uint32_t n_given_away(const llama_kv_cache & kv, llama_seq_id seq_id, uint32_t n_max) {
    const auto & cells = llama_pcd::cells(kv);

    uint32_t n = 0;
    for (const auto & [pos, j] : cells.seq_pos_get(seq_id)) {
        if (n >= n_max || !llama_pcd::is_masked(kv, pos, cells.seq_pos_max(seq_id) + 1)) {
            break; // later positions are in the window too
        }
        n += cells.seq_count(j) == 1;
    }
    return n;
}

uint32_t llama_pcd_memory::n_room(uint32_t n_max) const {
    uint32_t res = std::min(n_free_cells(), n_max);
    for (const auto * kv : kvs) {
        if (!llama_pcd::slides(*kv)) {
            continue;
        }
        const auto & cells = llama_pcd::cells(*kv);

        uint32_t n = cells.size() - cells.get_used();
        for (llama_seq_id s = 0; s < LLAMA_MAX_SEQ && n < res; ++s) {
            n += n_given_away(*kv, s, res - n);
        }
        res = std::min(res, n);
    }
    return res;
}

bool llama_pcd_memory::forgets(size_t n, llama_seq_id seq_id, llama_pos pos) const {
    llama_seq_id which  = 0; // all sequences are in one stream
    llama_ubatch ubatch = {};

    ubatch.n_tokens   = n;
    ubatch.n_seqs_unq = 1;
    ubatch.seq_id_unq = &which;

    return any([&](const llama_kv_cache & kv) {
        if (!llama_pcd::slides(kv)) {
            return false; // it gives nothing away
        }
        const auto & cells = llama_pcd::cells(kv);
        const auto   slot  = kv.find_slot(ubatch, false);

        return !slot.empty() && std::any_of(slot.idxs[0].begin(), slot.idxs[0].end(), [&](uint32_t j) {
            return !cells.is_empty(j) && cells.seq_has(j, seq_id) && !llama_pcd::is_masked(kv, cells.pos_get(j), pos);
        });
    });
}

llama_pcd_memory::ends llama_pcd_memory::ends_of(const llama_batch_ext & batch) const {
    ends res;
    for (const auto & token : batch.tokens) {
        for (const llama_seq_id s : token.seq_ids) {
            if (s >= 0 && s < LLAMA_MAX_SEQ && res.count(s) == 0) {
                res[s] = lctx.get_memory()->seq_pos_max(s);
            }
        }
    }
    return res;
}

void llama_pcd_memory::cut(const ends & last) const {
    for (const auto & [s, pos] : last) {
        lctx.get_memory()->seq_rm(s, pos + 1, -1);
    }
}

void llama_pcd_memory::remove(llama_seq_id seq_id) const {
    if (recr) {
        recr->seq_rm(seq_id, -1, -1);
    }
    for (auto * kv : kvs) {
        auto & cells = llama_pcd::cells(*kv);
        auto & head  = llama_pcd::head(*kv);

        const auto & all = cells.seq_pos_get(seq_id);
        while (!all.empty() && !llama_pcd::borrows(*kv)) {
            const uint32_t j = all.begin()->second;
            if (cells.seq_rm(j, seq_id)) {
                head = std::min(head, j);
            }
        }
    }
}
