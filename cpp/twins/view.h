// Which cells of the memory a token or a twin sees, and which cell is a twin's own.

#pragma once

#include "twins/settings.h"
#include "twins/twins.h"

#include <vector>

struct llama_pcd_view {
    // Attention with twins looks at cells in whole blocks, so that the graph changes only now and then: blocks of so many cells as
    // llama.cpp's own, which the kernels of GPUs want, or, for a single twin on the CPU, of fewer.
    static constexpr uint32_t CELL_BLOCK = 256;
    static constexpr uint32_t HOST_BLOCK = 64;

    llama_pcd_view(const llama_pcd_memory & memory, const llama_pcd_settings & settings) : memory(memory), settings(settings) {}

    // Find where the keys of each twin of a micro-batch go, which is in memory by now. cache = separate: to the cell of its token,
    // where that one is in memory already. Else to its own.
    void place(llama_pcd_twins & twins, const llama_ubatch & ubatch) const;

    // The cells that the attention of twins has to look at: [begin, end) and, where begin > 0, the first `head` ones, for the
    // first positions of a text. No cell from `end` on is in use.
    struct cell_range {
        uint32_t begin = 0;
        uint32_t end   = 0;
        uint32_t head  = 0;
        uint32_t block = CELL_BLOCK; // they are multiples of it

        bool operator==(const cell_range & other) const { return begin == other.begin && end == other.end && head == other.head; }
    };

    // for each cache, of the cells up to the last used one those that placed twins see
    std::vector<cell_range> visible(const llama_pcd_twins & twins, const llama_ubatch & ubatch) const;

    // fill the rows of the placed twins at the end of a KQ mask
    void mask(const llama_pcd_twins & twins, const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const;

private:
    const llama_pcd_memory   & memory;
    const llama_pcd_settings & settings;

    // the twin at entry i of a micro-batch, as one cache sees it
    struct row {
        uint32_t     i;
        llama_seq_id seq_id; // whose cells it sees: its parent's
        llama_pos    pos;
        llama_pos    window;
        llama_pos    n_sink;
        int32_t      own;    // the cell with its own keys
        int32_t      token;  // the entry of its token, where that one is in the same micro-batch; -1: it is not

        bool      is_2d;
        llama_pos x;
        llama_pos y;

        // the first position in its window
        llama_pos begin() const { return window == 0 || pos < window ? 0 : pos - window + 1; }
    };

    bool causal(const llama_kv_cache & kv) const;
    bool sees  (const llama_kv_cache & kv, const row & v, uint32_t j) const;

    std::vector<row> list(const llama_pcd_twins & twins, const llama_kv_cache & kv, const llama_ubatch & ubatch) const;

    bool sees_one_more(const llama_kv_cache & kv, const row & prev, const row & v) const;

    // fn(j) for each cell that a twin with a window sees; false: it may see others, look at each one
    template <typename F>
    bool in_window(const llama_kv_cache & kv, const row & v, const F & fn) const;

    void restrict(const llama_kv_cache & kv, const std::vector<row> & all, cell_range & range) const;

    static float bias(const llama_kv_cache & kv, const row & v, uint32_t j); // of a cell that one sees

    template <typename T>
    void fill(T * mask, int64_t n_kv, const llama_kv_cache & kv, const std::vector<row> & all) const;
};
