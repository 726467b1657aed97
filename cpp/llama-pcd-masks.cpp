// Judges again only those cells of a row that can have changed.

#include "llama-pcd-masks.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>

//
// memory
//

std::shared_ptr<llama_pcd_mask> llama_pcd_masks::place(ggml_tensor * mask) {
    const size_t n_bytes = ggml_nbytes(mask);
    if (n_bytes > N_BYTES_MAX) {
        return nullptr;
    }

    const auto is_free = [](const auto & cur) { return cur.use_count() == 1; };
    const auto is_like = [&](const auto & cur) {
        return is_free(cur) && cur->type == mask->type && cur->n_kv == mask->ne[0] && cur->n_rows == mask->ne[1];
    };
    const auto is_room = [&](const auto & cur) { return is_free(cur) && ggml_backend_buffer_get_size(cur->buffer.get()) >= n_bytes; };

    // a graph that is built anew may find its rows as they were
    auto it = std::find_if(all.begin(), all.end(), is_like);
    if (it == all.end()) {
        it = std::find_if(all.begin(), all.end(), is_room);
        if (it == all.end()) {
            trim();
            auto cur = std::make_shared<llama_pcd_mask>();
            cur->buffer.reset(ggml_backend_buft_alloc_buffer(llama_pcd::input_buft(memory.lctx), n_bytes));
            if (!cur->buffer) {
                return nullptr;
            }
            it = all.insert(all.end(), std::move(cur));
        }
        (*it)->type   = mask->type;
        (*it)->n_kv   = mask->ne[0];
        (*it)->n_rows = mask->ne[1];
        (*it)->rows.clear();
    }

    auto * buffer = (*it)->buffer.get();
    return ggml_backend_tensor_alloc(buffer, mask, ggml_backend_buffer_get_base(buffer)) == GGML_STATUS_SUCCESS ? *it : nullptr;
}

size_t llama_pcd_masks::n_bytes() const {
    size_t res = 0;
    for (const auto & cur : all) {
        res += ggml_backend_buffer_get_size(cur->buffer.get());
    }
    return res;
}

void llama_pcd_masks::trim() {
    all.erase(std::remove_if(all.begin(), all.end(), [](const auto & cur) { return cur.use_count() == 1; }), all.end());
}

llama_pcd_mask * llama_pcd_masks::find(const ggml_tensor * dst) const {
    for (const auto & cur : all) {
        if (cur.use_count() > 1 && cur->buffer.get() == dst->buffer) {
            return cur.get();
        }
    }
    return nullptr;
}

//
// rows
//

bool llama_pcd_masks::keeps(const llama_kv_cache & kv) const {
    return view.causal(kv) && !llama_pcd::hparams(kv).use_alibi && llama_pcd::cells(kv).pcd_log;
}

// whether a row became another one by moving on, or back
static bool is_moved(const llama_pcd_view::row & from, const llama_pcd_view::row & to, llama_pos n_max) {
    return from.is_twin == to.is_twin && from.seq_id == to.seq_id && from.is_2d == to.is_2d && from.window == to.window &&
        from.n_sink == to.n_sink && std::abs(from.pos - to.pos) <= n_max;
}

// fn(j) for each cell that such a row may see otherwise than before, though the cell did not change
template <typename F>
static void for_moved(const llama_kv_cache & kv, const llama_pcd_view::row & from, const llama_pcd_view::row & to, const F & fn) {
    const auto between = [&](llama_pos a, llama_pos b) { // [a, b) or [b, a)
        for (const auto & [pos, j] : llama_pcd_cells_at(kv, to.seq_id, std::min(a, b), std::max(a, b))) {
            fn(j);
        }
    };

    between(std::min(from.pos, to.pos), std::max(from.pos, to.pos) + 1);
    between(from.begin(), to.begin());
    if (llama_pcd::has_swa_type(kv)) {
        between(llama_pcd_first_seen(kv, from.pos), llama_pcd_first_seen(kv, to.pos));
    }
    for (const int32_t own : { from.own, to.own }) {
        if (own >= 0) {
            fn((uint32_t) own);
        }
    }
}

template <typename T>
void llama_pcd_masks::update(T * data, const llama_pcd_mask & mask, const std::vector<llama_pcd_view::row> & rows) const {
    const auto & kv  = *mask.kv;
    const auto & log = *llama_pcd::cells(kv).pcd_log;

    const T shown  = llama_cast<T>(0.0f);
    const T hidden = llama_cast<T>(-INFINITY);

    for (size_t k = 0; k < rows.size(); ++k) {
        const auto judge = [&](uint32_t j) {
            if (j < mask.n_kv) {
                data[rows[k].i*mask.n_kv + j] = view.sees(kv, rows[k], j) ? shown : hidden;
            }
        };

        for (uint64_t i = mask.n_known; i < log.count(); ++i) {
            if (log.at(i).seq_id == rows[k].seq_id) {
                judge(log.at(i).cell);
            }
        }
        for_moved(kv, mask.rows[k], rows[k], judge);
    }
}

bool llama_pcd_masks::update(const llama_kv_cache & kv, const ggml_tensor * dst, const llama_ubatch & ubatch) const {
    auto * mask = find(dst);
    if (!mask || mask->kv != &kv || mask->rows.empty() || !keeps(kv) || !llama_pcd::cells(kv).pcd_log->has_all(mask->n_known)) {
        return false;
    }
    auto rows = view.rows(kv, ubatch);

    bool moved = rows.size() == mask->rows.size();
    for (size_t k = 0; k < rows.size() && moved; ++k) {
        moved = is_moved(mask->rows[k], rows[k], N_MOVED_MAX);
    }
    if (!moved) {
        return false;
    }

    if (mask->type == GGML_TYPE_F16) {
        update((ggml_fp16_t *) dst->data, *mask, rows);
    } else {
        update((float *) dst->data, *mask, rows);
    }
    mask->rows    = std::move(rows);
    mask->n_known = llama_pcd::cells(kv).pcd_log->count();
    n_updated++;
    return true;
}

void llama_pcd_masks::filled(const llama_kv_cache & kv, const ggml_tensor * dst, const llama_ubatch & ubatch) const {
    if (auto * mask = find(dst)) {
        mask->rows.clear();
        if (keeps(kv)) {
            mask->rows    = view.rows(kv, ubatch);
            mask->kv      = &kv;
            mask->n_known = llama_pcd::cells(kv).pcd_log->count();
        }
    }
}
