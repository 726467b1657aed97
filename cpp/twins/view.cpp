// Places twins in cells, and decides cell by cell what they see.

#include "twins/twins.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>

//
// placement
//

static bool is_same_place(const llama_kv_cell_ext & ext, const llama_ubatch & ubatch, uint32_t i) {
    return !ubatch.is_pos_2d() || (ext.x == ubatch.pos[2*ubatch.n_tokens + i] && ext.y == ubatch.pos[ubatch.n_tokens + i]);
}

// the first cell of a sequence that holds entry i of a micro-batch; -1: none
static int32_t cell_of(const llama_kv_cache & kv, llama_seq_id seq_id, const llama_ubatch & ubatch, uint32_t i) {
    for (const auto & [pos, j] : llama_pcd_cells_at(kv, seq_id, ubatch.pos[i], ubatch.pos[i] + 1)) {
        if (is_same_place(llama_pcd::cells(kv).ext_get(j), ubatch, i)) {
            return j;
        }
    }
    return -1;
}

void llama_pcd_view::place(llama_pcd_twins & twins, const llama_ubatch & ubatch) const {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        auto * twin = twins.at(ubatch, i);
        if (!twin) {
            continue;
        }
        for (size_t k = 0; k < memory.kvs.size(); ++k) {
            twin->cells[k] = cell_of(*memory.kvs[k], twin->seq_id, ubatch, i);
        }
    }
}

std::vector<llama_pcd_view::row> llama_pcd_view::list(
        const llama_pcd_twins & twins, const llama_kv_cache & kv, const llama_ubatch & ubatch) const {
    const uint32_t n     = ubatch.n_tokens;
    const bool     is_2d = ubatch.is_pos_2d();
    const size_t   k     = memory.index_of(&kv);

    std::vector<row> res;
    for (uint32_t i = n - twins.count_last(ubatch); i < n; ++i) {
        const auto & twin = *twins.at(ubatch, i);
        res.push_back({ i, twin.parent, ubatch.pos[i], twin.window, twin.n_sink, twin.cells[k], twins.token_of(ubatch, twin),
            is_2d, is_2d ? ubatch.pos[2*n + i] : 0, is_2d ? ubatch.pos[n + i] : 0 });
    }
    return res;
}

//
// what a twin sees
//

bool llama_pcd_view::causal(const llama_kv_cache & kv) const {
    return memory.lctx.get_cparams().causal_attn ||
        (llama_pcd::hparams(kv).non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY && !llama_pcd::has_swa_type(kv));
}

bool llama_pcd_view::sees(const llama_kv_cache & kv, const row & v, uint32_t j) const {
    const auto & cells = llama_pcd::cells(kv);

    if ((int32_t) j == v.own) {
        return true;
    }
    if (cells.is_empty(j) || !cells.seq_has(j, v.seq_id)) {
        return false;
    }
    const llama_pos p0 = cells.pos_get(j);

    if (p0 >= v.pos && causal(kv)) {
        // patches of one image share their position in time: what counts is their place in it. A twin does not see its token.
        const auto & ext     = cells.ext_get(j);
        const bool   is_same = !v.is_2d || (ext.x == v.x && ext.y == v.y);

        if (p0 > v.pos || (v.is_2d && ext.is_2d_gt(v.x, v.y)) || is_same) {
            return false;
        }
    }

    return (p0 >= v.begin() || p0 < v.n_sink) && !llama_pcd::is_masked(kv, p0, v.pos);
}

template <typename F>
bool llama_pcd_view::in_window(const llama_kv_cache & kv, const row & v, const F & fn) const {
    if (v.window == 0 || !causal(kv)) {
        return false;
    }
    const auto walk = [&](llama_pos p0, llama_pos p1) {
        for (const auto & [pos, j] : llama_pcd_cells_at(kv, v.seq_id, p0, p1)) {
            if ((int32_t) j != v.own && sees(kv, v, j)) {
                fn(j);
            }
        }
    };

    walk(0, std::min(v.n_sink, v.begin()));
    walk(v.begin(), v.pos + 1);
    if (v.own >= 0) {
        fn((uint32_t) v.own);
    }
    return true;
}

//
// mask
//

float llama_pcd_view::bias(const llama_kv_cache & kv, const row & v, uint32_t j) {
    return llama_pcd::hparams(kv).use_alibi ? -std::abs(float(llama_pcd::cells(kv).pos_get(j) - v.pos)) : 0.0f;
}

// From the row of its token, which llama.cpp has filled, to that of a twin without a window only cells at their own position change:
// a twin sees its own cell in place of its token's. A window is gone through in the order of positions.
template <typename T>
void llama_pcd_view::fill(T * mask, int64_t n_kv, const llama_kv_cache & kv, const std::vector<row> & all) const {
    const T hidden = llama_cast<T>(-INFINITY);

    for (const row & v : all) {
        T * row = mask + v.i*n_kv;

        const auto show = [&](uint32_t j) {
            row[j] = llama_cast<T>(bias(kv, v, j));
        };

        if (v.window > 0 && causal(kv)) {
            std::fill_n(row, n_kv, hidden);
            in_window(kv, v, show);
        } else if (v.token >= 0 && causal(kv)) {
            std::copy_n(mask + v.token*n_kv, n_kv, row);
            for (const auto & [pos, j] : llama_pcd_cells_at(kv, v.seq_id, v.pos, v.pos + 1)) {
                row[j] = hidden;
                if (sees(kv, v, j)) {
                    show(j);
                }
            }
            if (v.own >= 0) {
                show(v.own);
            }
        } else {
            std::fill_n(row, n_kv, hidden);
            for (int64_t j = 0; j < n_kv; ++j) {
                if (sees(kv, v, j)) {
                    show(j);
                }
            }
        }
    }
}

void llama_pcd_view::mask(
        const llama_pcd_twins & twins, const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const {
    const auto all = list(twins, kv, ubatch);

    if (dst->type == GGML_TYPE_F16) {
        fill((ggml_fp16_t *) dst->data, dst->ne[0], kv, all);
    } else {
        fill((float *) dst->data, dst->ne[0], kv, all);
    }
}

//
// the cells to look at
//

std::vector<llama_pcd_view::cell_range> llama_pcd_view::visible(const llama_pcd_twins & twins, const llama_ubatch & ubatch) const {
    const uint32_t n_twin = twins.count(ubatch);

    // a twin without a window may see every cell
    const bool windows = std::all_of(twins.all.begin(), twins.all.end(), [](const auto & twin) { return twin.window > 0; });

    std::vector<cell_range> res;
    for (const auto * kv : memory.kvs) {
        // many texts fill a small block at each step
        const uint32_t block = llama_pcd::on_host(*kv) && n_twin == 1 ? HOST_BLOCK : CELL_BLOCK;
        res.push_back({ 0, std::min<uint32_t>(GGML_PAD(llama_pcd::cells(*kv).used_max_p1(), block), kv->get_size()), 0, block });
        if (windows) {
            restrict(*kv, list(twins, *kv, ubatch), res.back());
        }
    }
    return res;
}

void llama_pcd_view::restrict(const llama_kv_cache & kv, const std::vector<row> & all, cell_range & range) const {
    const auto & cells = llama_pcd::cells(kv);

    uint32_t begin = range.end;
    bool     head  = false; // some of the first positions are in the first block

    for (const row & v : all) {
        const bool complete = in_window(kv, v, [&](uint32_t j) {
            if (j < range.block && (int32_t) j != v.own && cells.pos_get(j) < v.n_sink) {
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
