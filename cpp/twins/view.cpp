// Places twins in cells, and decides cell by cell what they see.

#include "twins/twins.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>

//
// placement
//

static bool is_same_place(const llama_kv_cell_ext & ext, const llama_pcd_twin & twin) {
    return !twin.is_2d || (ext.x == twin.ext.x && ext.y == twin.ext.y);
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

void llama_pcd_twins::place(const llama_pcd_memory & memory, const llama_ubatch & ubatch) {
    const auto & entries = ubatch.data->batch_idxs;
    const auto   find    = [&](int32_t entry) {
        const auto it = std::find(entries.begin(), entries.end(), entry);
        return it == entries.end() ? -1 : (int32_t) (it - entries.begin());
    };
    const uint32_t n = ubatch.n_tokens;

    for (size_t t = 0; t < all.size(); ++t) {
        auto & twin = all[t];

        twin.i = find(first + t);
        if (twin.i < 0) {
            continue;
        }
        twin.token_i = twin.token < 0 ? -1 : find(twin.token);
        twin.pos     = ubatch.pos[twin.i];
        twin.is_2d   = ubatch.is_pos_2d();
        if (twin.is_2d) {
            twin.ext.x = ubatch.pos[2*n + twin.i];
            twin.ext.y = ubatch.pos[1*n + twin.i];
        }
        for (size_t k = 0; k < memory.kvs.size(); ++k) {
            twin.cells[k] = cell_of(*memory.kvs[k], twin);
        }
    }
}

//
// what a twin sees
//

static bool sees(const llama_kv_cache & kv, const llama_pcd_twin & twin, int32_t own, uint32_t j) {
    const auto & cells = llama_pcd::cells(kv);

    if ((int32_t) j == own) {
        return true;
    }
    if (cells.is_empty(j) || !cells.seq_has(j, twin.parent)) {
        return false;
    }
    const llama_pos p0 = cells.pos_get(j);

    if (p0 >= twin.pos) {
        // patches of one image share their position in time: what counts is their place in it. A twin does not see its token.
        const auto & ext = cells.ext_get(j);

        if (p0 > twin.pos || (twin.is_2d && ext.is_2d_gt(twin.ext.x, twin.ext.y)) || is_same_place(ext, twin)) {
            return false;
        }
    }

    return (p0 >= twin.begin() || p0 < twin.n_sink) && !llama_pcd::is_masked(kv, p0, twin.pos);
}

// fn(j) for each cell that a twin with a window sees
template <typename F>
static void in_window(const llama_kv_cache & kv, const llama_pcd_twin & twin, int32_t own, const F & fn) {
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
}

//
// mask
//

// From the row of its token, which llama.cpp has filled, to that of a twin without a window only cells at their own position change:
// a twin sees its own cell in place of its token's. A window is gone through in the order of positions.
template <typename T>
static void fill(T * mask, int64_t n_kv, const llama_kv_cache & kv, size_t i_cache, const llama_pcd_twins & twins) {
    const T hidden = llama_cast<T>(-INFINITY);

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

        if (twin.token_i >= 0 && twin.window == 0) {
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
        if (twin.window > 0) {
            in_window(kv, twin, own, show);
            continue;
        }
        for (int64_t j = 0; j < n_kv; ++j) {
            if (sees(kv, twin, own, j)) {
                show(j);
            }
        }
    }
}

void llama_pcd_twins::mask(const llama_pcd_memory & memory, size_t i_cache, ggml_tensor * dst) const {
    if (dst->type == GGML_TYPE_F16) {
        fill((ggml_fp16_t *) dst->data, dst->ne[0], *memory.kvs[i_cache], i_cache, *this);
    } else {
        fill((float *) dst->data, dst->ne[0], *memory.kvs[i_cache], i_cache, *this);
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

// leave out blocks that no twin sees, all of which have windows
static void leave_out_blocks(
        const llama_pcd_twins & twins, const llama_kv_cache & kv, size_t i_cache, uint32_t block, llama_pcd_cell_range & range) {
    const auto & cells = llama_pcd::cells(kv);

    uint32_t begin = range.end;
    uint32_t head  = 0; // the first block, if some of the first positions are in it

    for (const auto & twin : twins.all) {
        const int32_t own = twin.cells[i_cache];
        if (twin.i < 0) {
            continue;
        }
        in_window(kv, twin, own, [&](uint32_t j) {
            if (j < block && (int32_t) j != own && cells.pos_get(j) < twin.n_sink) {
                head = block;
            } else {
                begin = std::min(begin, j);
            }
        });
    }
    begin = begin/block*block;

    // an attention of its own takes more operations: it has to leave out more than it looks at, and so many cells besides
    if (begin > head + (range.end - begin) + llama_pcd_cell_range::BLOCK) {
        range.begin = begin;
        range.head  = head;
    }
}

std::vector<llama_pcd_cell_range> llama_pcd_twins::visible(const llama_pcd_memory & memory) const {
    const auto n_placed = std::count_if(all.begin(), all.end(), [](const auto & twin) { return twin.i >= 0; });

    // a twin without a window may see every cell
    const bool windows = std::all_of(all.begin(), all.end(), [](const auto & twin) { return twin.window > 0; });

    std::vector<llama_pcd_cell_range> res;
    for (size_t k = 0; k < memory.kvs.size(); ++k) {
        const auto & kv = *memory.kvs[k];

        // many texts fill a small block at each step
        const uint32_t block = on_host(kv) && n_placed == 1 ? llama_pcd_cell_range::HOST_BLOCK : llama_pcd_cell_range::BLOCK;
        res.push_back({ 0, std::min<uint32_t>(GGML_PAD(llama_pcd::cells(kv).used_max_p1(), block), kv.get_size()), 0 });
        if (windows) {
            leave_out_blocks(*this, kv, k, block, res.back());
        }
    }
    return res;
}
