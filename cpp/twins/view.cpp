// Places twins in cells, and decides cell by cell what they see.

#include "twins/twins.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>

//
// placement
//

static bool is_same_place(const llama_kv_cell_ext & ext, const llama_pcd_twin & twin) {
    return !twin.is_2d || (ext.x == twin.x && ext.y == twin.y);
}

// the first cell of a twin's own sequence that holds it; -1: none
static int32_t cell_of(const llama_kv_cache & kv, const llama_pcd_twin & twin) {
    for (const auto & [pos, j] : llama_pcd_cells_at(kv, twin.seq_id, twin.pos, twin.pos + 1)) {
        if (is_same_place(llama_pcd::cells(kv).ext_get(j), twin)) {
            return j;
        }
    }
    return -1;
}

void llama_pcd_view::place(llama_pcd_twins & twins, const llama_ubatch & ubatch) const {
    const auto & entries = ubatch.data->batch_idxs;
    const auto   find    = [&](int32_t entry) {
        const auto it = std::find(entries.begin(), entries.end(), entry);
        return it == entries.end() ? -1 : (int32_t) (it - entries.begin());
    };
    const uint32_t n = ubatch.n_tokens;

    for (size_t t = 0; t < twins.all.size(); ++t) {
        auto & twin = twins.all[t];

        twin.i = find(twins.first + t);
        if (twin.i < 0) {
            continue;
        }
        twin.token_i = twin.token < 0 ? -1 : find(twin.token);
        twin.pos     = ubatch.pos[twin.i];
        twin.is_2d   = ubatch.is_pos_2d();
        if (twin.is_2d) {
            twin.x = ubatch.pos[2*n + twin.i];
            twin.y = ubatch.pos[1*n + twin.i];
        }
        for (size_t k = 0; k < memory.kvs.size(); ++k) {
            twin.cells[k] = cell_of(*memory.kvs[k], twin);
        }
    }
}

//
// what a twin sees
//

bool llama_pcd_view::causal(const llama_kv_cache & kv) const {
    return memory.lctx.get_cparams().causal_attn ||
        (llama_pcd::hparams(kv).non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY && !llama_pcd::has_swa_type(kv));
}

bool llama_pcd_view::sees(const llama_kv_cache & kv, const llama_pcd_twin & twin, int32_t own, uint32_t j) const {
    const auto & cells = llama_pcd::cells(kv);

    if ((int32_t) j == own) {
        return true;
    }
    if (cells.is_empty(j) || !cells.seq_has(j, twin.parent)) {
        return false;
    }
    const llama_pos p0 = cells.pos_get(j);

    if (p0 >= twin.pos && causal(kv)) {
        // patches of one image share their position in time: what counts is their place in it. A twin does not see its token.
        const auto & ext = cells.ext_get(j);

        if (p0 > twin.pos || (twin.is_2d && ext.is_2d_gt(twin.x, twin.y)) || is_same_place(ext, twin)) {
            return false;
        }
    }

    return (p0 >= twin.begin() || p0 < twin.n_sink) && !llama_pcd::is_masked(kv, p0, twin.pos);
}

template <typename F>
bool llama_pcd_view::in_window(const llama_kv_cache & kv, const llama_pcd_twin & twin, int32_t own, const F & fn) const {
    if (twin.window == 0 || !causal(kv)) {
        return false;
    }
    const auto walk = [&](llama_pos p0, llama_pos p1) {
        for (const auto & [pos, j] : llama_pcd_cells_at(kv, twin.parent, p0, p1)) {
            if ((int32_t) j != own && sees(kv, twin, own, j)) {
                fn(j);
            }
        }
    };

    walk(0, std::min(twin.n_sink, twin.begin()));
    walk(twin.begin(), twin.pos + 1);
    if (own >= 0) {
        fn((uint32_t) own);
    }
    return true;
}

//
// mask
//

// From the row of its token, which llama.cpp has filled, to that of a twin without a window only cells at their own position change:
// a twin sees its own cell in place of its token's. A window is gone through in the order of positions.
template <typename T>
void llama_pcd_view::fill(T * mask, int64_t n_kv, size_t i_cache, const llama_pcd_twins & twins) const {
    const T hidden = llama_cast<T>(-INFINITY);

    const auto & kv    = *memory.kvs[i_cache];
    const auto & cells = llama_pcd::cells(kv);
    const bool   alibi = llama_pcd::hparams(kv).use_alibi;

    for (const auto & twin : twins.all) {
        if (twin.i < 0) {
            continue;
        }
        const int32_t own = twin.cells[i_cache];
        T *           row = mask + twin.i*n_kv;

        const auto show = [&](uint32_t j) {
            row[j] = llama_cast<T>(alibi ? -std::abs(float(cells.pos_get(j) - twin.pos)) : 0.0f);
        };

        if (twin.token_i >= 0 && twin.window == 0 && causal(kv)) {
            std::copy_n(mask + twin.token_i*n_kv, n_kv, row);
            for (const auto & [pos, j] : llama_pcd_cells_at(kv, twin.parent, twin.pos, twin.pos + 1)) {
                row[j] = hidden;
                if (sees(kv, twin, own, j)) {
                    show(j);
                }
            }
            if (own >= 0) {
                show(own);
            }
            continue;
        }
        std::fill_n(row, n_kv, hidden);
        if (!in_window(kv, twin, own, show)) {
            for (int64_t j = 0; j < n_kv; ++j) {
                if (sees(kv, twin, own, j)) {
                    show(j);
                }
            }
        }
    }
}

void llama_pcd_view::mask(const llama_pcd_twins & twins, size_t i_cache, ggml_tensor * dst) const {
    if (dst->type == GGML_TYPE_F16) {
        fill((ggml_fp16_t *) dst->data, dst->ne[0], i_cache, twins);
    } else {
        fill((float *) dst->data, dst->ne[0], i_cache, twins);
    }
}

//
// the cells to look at
//

// all keys are in the CPU's memory
static bool on_host(const llama_kv_cache & kv) {
    const auto & layers = llama_pcd::layers(kv);
    return std::all_of(layers.begin(), layers.end(), [](const auto & layer) { return ggml_backend_buffer_is_host(layer.k->buffer); });
}

std::vector<llama_pcd_view::cell_range> llama_pcd_view::visible(const llama_pcd_twins & twins) const {
    const auto n_placed = std::count_if(twins.all.begin(), twins.all.end(), [](const auto & twin) { return twin.i >= 0; });

    // a twin without a window may see every cell
    const bool windows = std::all_of(twins.all.begin(), twins.all.end(), [](const auto & twin) { return twin.window > 0; });

    std::vector<cell_range> res;
    for (size_t k = 0; k < memory.kvs.size(); ++k) {
        const auto & kv = *memory.kvs[k];

        // many texts fill a small block at each step
        const uint32_t block = on_host(kv) && n_placed == 1 ? HOST_BLOCK : CELL_BLOCK;
        res.push_back({ 0, std::min<uint32_t>(GGML_PAD(llama_pcd::cells(kv).used_max_p1(), block), kv.get_size()), 0, block });
        if (windows) {
            restrict(twins, k, res.back());
        }
    }
    return res;
}

void llama_pcd_view::restrict(const llama_pcd_twins & twins, size_t i_cache, cell_range & range) const {
    const auto & kv    = *memory.kvs[i_cache];
    const auto & cells = llama_pcd::cells(kv);

    uint32_t begin = range.end;
    bool     head  = false; // some of the first positions are in the first block

    for (const auto & twin : twins.all) {
        const int32_t own = twin.cells[i_cache];

        const bool complete = twin.i < 0 || in_window(kv, twin, own, [&](uint32_t j) {
            if (j < range.block && (int32_t) j != own && cells.pos_get(j) < twin.n_sink) {
                head = true;
            } else {
                begin = std::min(begin, j);
            }
        });
        if (!complete) {
            return;
        }
    }
    begin = begin/range.block*range.block;

    // an attention of its own takes more operations: it has to leave out more than it looks at, and so many cells besides
    const uint32_t n_head = head ? range.block : 0;
    if (begin > n_head + (range.end - begin) + CELL_BLOCK) {
        range.begin = begin;
        range.head  = n_head;
    }
}
