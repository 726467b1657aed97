// Places twins in cells, and decides cell by cell what they see.

#include "llama-pcd-view.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

//
// placement
//

// the twins of a micro-batch by their positions
struct pcd_twins_at {
    std::unordered_multimap<llama_pos, uint32_t> entries;

    uint32_t  i0; // the first one
    llama_pos p_min = std::numeric_limits<llama_pos>::max();
    llama_pos p_max = -1;

    pcd_twins_at(const llama_pcd_twins & twins, const llama_ubatch & ubatch) : i0(ubatch.n_tokens) {
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            if (twins.is_twin(ubatch.seq_id[i][0])) {
                i0    = std::min(i0, i);
                p_min = std::min(p_min, ubatch.pos[i]);
                p_max = std::max(p_max, ubatch.pos[i]);
                entries.emplace(ubatch.pos[i], i);
            }
        }
    }
};

llama_pcd_view::placement llama_pcd_view::place(const llama_ubatch & ubatch) const {
    const bool     is_2d    = ubatch.is_pos_2d();
    const bool     separate = settings.separate();
    const uint32_t n        = ubatch.n_tokens;

    const pcd_twins_at at(twins, ubatch);

    placement res;

    for (const auto * kv : memory.kvs) {
        const auto & cells = llama_pcd::cells(*kv);

        std::vector<int32_t> found(n - at.i0, -1);
        std::vector<bool>    is_own(n - at.i0, true);

        for (uint32_t j = 0; j < cells.used_max_p1() && !at.entries.empty(); ++j) {
            if (!cells.pos_in(j, at.p_min, at.p_max + 1)) {
                continue;
            }

            const auto [first, last] = at.entries.equal_range(cells.pos_get(j));
            for (auto it = first; it != last; ++it) {
                const uint32_t     i    = it->second;
                const uint32_t     k    = i - at.i0;
                const llama_seq_id twin = ubatch.seq_id[i][0];

                if (is_2d && (cells.ext_get(j).x != ubatch.pos[2*n + i] || cells.ext_get(j).y != ubatch.pos[n + i])) {
                    continue;
                }
                if (separate && is_own[k] && cells.seq_has(j, twins.parent_of(twin))) {
                    found[k]  = j;
                    is_own[k] = false;
                    break;
                }
                if (found[k] < 0 && cells.seq_has(j, twin)) {
                    found[k] = j;
                    break;
                }
            }
        }

        res.any_own |= std::find(is_own.begin(), is_own.end(), true) != is_own.end();
        res.cells.push_back(std::move(found));
    }

    return res;
}

std::vector<llama_pcd_view::twin> llama_pcd_view::list(const std::vector<int32_t> & cells, const llama_ubatch & ubatch) const {
    const bool     is_2d = ubatch.is_pos_2d();
    const uint32_t n     = ubatch.n_tokens;
    const uint32_t i0    = n - cells.size();

    std::vector<twin> res;
    for (uint32_t i = i0; i < n; ++i) {
        const llama_seq_id id = ubatch.seq_id[i][0];
        if (twins.is_twin(id)) {
            res.push_back({ i, twins.parent_of(id), ubatch.pos[i], cells[i - i0],
                    is_2d, is_2d ? ubatch.pos[2*n + i] : 0, is_2d ? ubatch.pos[n + i] : 0,
                    settings.contrast_of(twins.parent_of(id)) });
        }
    }
    return res;
}

//
// what a twin sees
//

bool llama_pcd_view::sees(const llama_kv_cache & kv, const twin & v, uint32_t j) const {
    const auto & cells  = llama_pcd::cells(kv);
    const auto & params = v.seq;
    const bool   causal = memory.lctx.get_cparams().causal_attn ||
        (llama_pcd::hparams(kv).non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY && !llama_pcd::has_swa_type(kv));

    if ((int32_t) j == v.own) {
        return true;
    }
    if (cells.is_empty(j) || !cells.seq_has(j, v.parent)) {
        return false;
    }
    const llama_pos p0 = cells.pos_get(j);

    if (causal && p0 >= v.pos) {
        // patches of one image share their position in time: what counts is their place in it
        const auto & ext = cells.ext_get(j);
        if (p0 > v.pos || !v.is_2d || ext.is_2d_gt(v.x, v.y) || (ext.x == v.x && ext.y == v.y)) {
            return false;
        }
    }

    return (params.window == 0 || v.pos - p0 < params.window || p0 < params.n_sink) && !llama_pcd::is_masked(kv, p0, v.pos);
}

// Where both keep their keys in the cells of their tokens, a twin one position further sees what the twin before it saw, and its
// own cell. So the rows of a long prompt need not each go through all cells.
bool llama_pcd_view::sees_one_more(const llama_kv_cache & kv, const twin & prev, const twin & v) const {
    const auto & cells = llama_pcd::cells(kv);

    return v.seq.window == 0 && prev.seq.window == 0 && !llama_pcd::has_swa_type(kv) && !llama_pcd::hparams(kv).use_alibi && !v.is_2d &&
        v.parent == prev.parent && v.pos == prev.pos + 1 &&
        prev.own >= 0 && cells.seq_has(prev.own, prev.parent) && cells.pos_get(prev.own) == prev.pos;
}

//
// mask
//

template <typename T>
void llama_pcd_view::fill(T * mask, int64_t n_kv, const llama_kv_cache & kv, const std::vector<twin> & all) const {
    const bool use_alibi = llama_pcd::hparams(kv).use_alibi;

    const twin * prev = nullptr;

    for (const twin & v : all) {
        T * row = mask + v.i*n_kv;

        if (prev && v.own >= 0 && sees_one_more(kv, *prev, v)) {
            std::copy_n(mask + prev->i*n_kv, n_kv, row);
            row[v.own] = llama_cast<T>(0.0f);
        } else {
            for (int64_t j = 0; j < n_kv; ++j) {
                row[j] = llama_cast<T>(!sees(kv, v, j) ? -INFINITY :
                        use_alibi ? -std::abs(float(llama_pcd::cells(kv).pos_get(j) - v.pos)) : 0.0f);
            }
        }
        prev = &v;
    }
}

void llama_pcd_view::mask(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const {
    const size_t i_kv = memory.index_of(&kv);

    if (twins.parents.empty() || i_kv >= twins.cells.size()) {
        return;
    }
    const auto all = list(twins.cells[i_kv], ubatch);

    if (dst->type == GGML_TYPE_F16) {
        fill((ggml_fp16_t *) dst->data, dst->ne[0], kv, all);
    } else {
        fill((float *) dst->data, dst->ne[0], kv, all);
    }
}

//
// the cells to look at
//

std::vector<llama_pcd_view::cell_range> llama_pcd_view::visible(const llama_ubatch & ubatch) const {
    if (settings.params.window == 0) {
        return std::vector<cell_range>(memory.kvs.size()); // all of them
    }
    const auto placed = place(ubatch);

    std::vector<cell_range> res;
    for (size_t i = 0; i < memory.kvs.size(); ++i) {
        res.push_back(visible(*memory.kvs[i], list(placed.cells[i], ubatch)));
    }
    return res;
}

llama_pcd_view::cell_range llama_pcd_view::visible(const llama_kv_cache & kv, const std::vector<twin> & all) const {
    const auto & cells = llama_pcd::cells(kv);

    uint32_t begin    = UINT32_MAX;
    uint32_t end_head = 0; // of the first positions

    for (uint32_t j = 0; j < cells.used_max_p1() && all.size() <= LLAMA_PCD_MAX_TWINS; ++j) {
        for (const twin & v : all) {
            if (!sees(kv, v, j)) {
                continue;
            }
            if (begin == UINT32_MAX && (int32_t) j != v.own && cells.pos_get(j) < settings.params.n_sink && j < CELL_BLOCK) {
                end_head = j + 1;
            } else {
                begin = std::min(begin, j);
            }
        }
    }

    begin = begin == UINT32_MAX ? 0 : begin/CELL_BLOCK*CELL_BLOCK;
    if (begin <= CELL_BLOCK && end_head > 0) {
        begin = 0; // nothing gained
    }

    return { begin, begin > 0 && end_head > 0 };
}
