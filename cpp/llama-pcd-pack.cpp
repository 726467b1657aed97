// Chooses blocks of cells, and fills the inputs of a graph that picks them.

#include "llama-pcd-pack.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// Room for n blocks and some more: with many windows their number goes up and down from step to step. On a GPU as many cells as
// llama.cpp's own blocks have, or multiples of them: with others CUDA's flash attention is slower, and has no kernel for some heads.
uint32_t llama_pcd_pack::room_for(uint32_t n) const {
    uint32_t step = llama_pcd::on_host(*kv) ? 4 : llama_pcd_view::CELL_BLOCK/BLOCK;
    while (step*8 <= n) {
        step *= 2;
    }
    return std::max((n + step - 1)/step, 1u)*step;
}

std::vector<uint32_t> llama_pcd_pack::blocks_of(const std::vector<llama_pcd_view::seen_cell> & seen) {
    std::vector<uint32_t> res;
    for (const auto & cur : seen) {
        if (res.empty() || res.back() != cur.cell/BLOCK) { // most come in the order of the cells
            res.push_back(cur.cell/BLOCK);
        }
    }
    std::sort(res.begin(), res.end());
    res.erase(std::unique(res.begin(), res.end()), res.end());

    return res;
}

llama_pcd_pack::llama_pcd_pack(const llama_kv_cache & kv, std::vector<llama_pcd_view::seen_cell> seen) :
    kv(&kv), seen(std::move(seen)), blocks(blocks_of(this->seen)) {
    n_blocks = std::min(room_for(blocks.size()), kv.get_size()/BLOCK);
}

bool llama_pcd_pack::change(std::vector<llama_pcd_view::seen_cell> other) {
    seen   = std::move(other);
    blocks = blocks_of(seen);

    return blocks.size() <= n_blocks && n_blocks <= 2*room_for(blocks.size());
}

uint32_t llama_pcd_pack::place_of(uint32_t cell) const {
    const auto it = std::lower_bound(blocks.begin(), blocks.end(), cell/BLOCK);
    return (it - blocks.begin())*BLOCK + cell % BLOCK;
}

// the spare blocks repeat the first one; nobody sees them
std::vector<uint32_t> llama_pcd_pack::cells() const {
    std::vector<uint32_t> res(n_cells());
    for (uint32_t i = 0; i < res.size(); ++i) {
        const uint32_t k = i/BLOCK < blocks.size() ? i/BLOCK : 0;
        res[i] = blocks.at(k)*BLOCK + i % BLOCK;
    }
    return res;
}

template <typename T>
static void set_data(ggml_tensor * t, const std::vector<T> & data) {
    if (t && t->buffer) {
        GGML_ASSERT(ggml_nbytes(t) == data.size()*sizeof(T));
        ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
    }
}

template <typename T>
void llama_pcd_pack::set_mask() const {
    std::vector<T> data(ggml_nelements(mask), llama_cast<T>(-INFINITY));
    for (const auto & cur : seen) {
        data[(size_t) cur.twin*n_cells() + place_of(cur.cell)] = llama_cast<T>(cur.bias);
    }
    set_data(mask, data);
}

void llama_pcd_pack::set_inputs(uint32_t n_pos) const {
    if (!rows || !rows->buffer) {
        return;
    }
    const auto all = cells();

    std::vector<int32_t> ids(n_blocks);
    for (uint32_t i = 0; i < n_blocks; ++i) {
        ids[i] = all[i*BLOCK]/BLOCK;
    }
    set_data(rows, ids);

    auto turns = llama_pcd_positions_of(*kv, all, n_pos);
    for (const auto & cur : seen) {
        for (uint32_t d = 0; d < n_pos && cur.own; ++d) {
            turns[d*n_cells() + place_of(cur.cell)] = 0;
        }
    }
    set_data(pos, turns);

    for (const auto & [n_embd, t] : channels) {
        std::vector<int32_t> data;
        data.reserve(n_embd*n_blocks);
        for (int64_t j = 0; j < n_embd; ++j) {
            for (const int32_t id : ids) {
                data.push_back(j*(kv->get_size()/BLOCK) + id);
            }
        }
        set_data(t, data);
    }

    if (mask->type == GGML_TYPE_F16) {
        set_mask<ggml_fp16_t>();
    } else {
        set_mask<float>();
    }
}
