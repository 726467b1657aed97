// The cells that twins with a window see, packed: a graph takes them out of a cache in blocks, by number, so that its work and its
// memory are bounded by the windows and not by the context. Knows nothing of what is done with them.

#pragma once

#include "llama-pcd-view.h"

#include <map>
#include <vector>

struct llama_pcd_pack {
    static constexpr uint32_t BLOCK = 32; // neighbouring cells; llama.cpp's caches have a multiple of 256

    llama_pcd_pack(const llama_kv_cache & kv, std::vector<llama_pcd_view::seen_cell> seen);

    // let other cells come into its place; false: they take more blocks than it has, or far fewer
    bool change(std::vector<llama_pcd_view::seen_cell> seen);

    const llama_kv_cache * kv;

    uint32_t n_blocks; // with some to spare, so that the graph changes only now and then

    uint32_t n_cells() const { return n_blocks*BLOCK; }

    //
    // inputs of the graph, made where they are needed
    //

    ggml_tensor * rows = nullptr; // I32 [n_blocks] which blocks
    ggml_tensor * pos  = nullptr; // I32 [n_cells*n_pos] the position by which a cell's key is turned: 0 for a twin's own, which is
    ggml_tensor * mask = nullptr; // F32 or F16 [n_cells, n_twin]

    std::map<int64_t, ggml_tensor *> channels; // n_embd -> I32 [n_blocks*n_embd] the blocks of transposed values

    void set_inputs(uint32_t n_pos) const;

private:
    std::vector<llama_pcd_view::seen_cell> seen;
    std::vector<uint32_t>                  blocks; // those that have any of these cells, in order

    static std::vector<uint32_t> blocks_of(const std::vector<llama_pcd_view::seen_cell> & seen);

    uint32_t room_for(uint32_t n) const;
    uint32_t place_of(uint32_t cell) const;

    std::vector<uint32_t> cells() const;

    template <typename T>
    void set_mask() const;
};
