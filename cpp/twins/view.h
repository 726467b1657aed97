// Which cells of the memory a token or a twin sees, and which cell is a twin's own. Changes nothing: what it finds is stored by
// those who ask.

#pragma once

#include "twins/settings.h"
#include "twins/twins.h"

#include <vector>

struct llama_pcd_view {
    // Attention with twins looks at cells in whole blocks, so that the graph changes only now and then: blocks of so many cells as
    // llama.cpp's own, which the kernels of GPUs want, or, for a single twin on the CPU, of fewer.
    static constexpr uint32_t CELL_BLOCK = 256;
    static constexpr uint32_t HOST_BLOCK = 64;

    llama_pcd_view(const llama_pcd_memory & memory, const llama_pcd_settings & settings, const llama_pcd_twins & twins) :
        memory(memory), settings(settings), twins(twins) {}

    // Where the keys of each twin of a micro-batch go, for each cache. cache = separate: to the cell of its token, where that
    // one is in memory already. Else to its own.
    struct placement {
        std::vector<std::vector<int32_t>> cells;

        bool any_own = false; // some twin went to a cell of its own
    };

    placement place(const llama_ubatch & ubatch) const;

    // The cells that the attention of twins has to look at: [begin, end) and, where begin > 0, the first `head` ones, for the
    // first positions of a text. No cell from `end` on is in use.
    struct cell_range {
        uint32_t begin = 0;
        uint32_t end   = 0;
        uint32_t head  = 0;
        uint32_t block = CELL_BLOCK; // they are multiples of it

        bool operator==(const cell_range & other) const { return begin == other.begin && end == other.end && head == other.head; }
    };

    // for each cache, of the cells up to the last used one those that twins see
    std::vector<cell_range> visible(const llama_ubatch & ubatch) const;

    // The rows of the twins in a KQ mask: how many there are at its end, which llama.cpp leaves to us, and what they hold.
    uint32_t n_rows(const llama_kv_cache & kv, const llama_ubatch & ubatch) const;
    void     mask  (const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const;

private:
    const llama_pcd_memory   & memory;
    const llama_pcd_settings & settings;
    const llama_pcd_twins    & twins;

    // the twin at entry i of a micro-batch
    struct row {
        uint32_t     i;
        llama_seq_id seq_id; // whose cells it sees: its parent's
        llama_pos    pos;
        bool         is_2d;
        llama_pos    x;
        llama_pos    y;

        int32_t   own    = -1; // the cell with its own keys
        int32_t   token  = -1; // the entry of its token, where that one is in the same micro-batch
        llama_pos window = 0;  // its sequence's
        llama_pos n_sink = 0;

        // the first position in its window
        llama_pos begin() const { return window == 0 || pos < window ? 0 : pos - window + 1; }
    };

    bool causal(const llama_kv_cache & kv) const;
    bool sees  (const llama_kv_cache & kv, const row & v, uint32_t j) const;

    std::vector<row> list(const std::vector<int32_t> & cells, const llama_ubatch & ubatch) const; // of the twins

    bool sees_one_more(const llama_kv_cache & kv, const row & prev, const row & v) const;

    // fn(j) for each cell that a twin with a window sees; false: it may see others, look at each one
    template <typename F>
    bool in_window(const llama_kv_cache & kv, const row & v, const F & fn) const;

    // all cells up to the last used one; restricted to what these twins see
    std::vector<cell_range> in_use(const llama_ubatch & ubatch) const;
    void restrict(const llama_kv_cache & kv, const std::vector<row> & all, cell_range & range) const;

    static float bias(const llama_kv_cache & kv, const row & v, uint32_t j); // of a cell that one sees

    bool masks(const llama_kv_cache & kv) const; // the rows of twins in flight are known

    template <typename T>
    void fill(T * mask, int64_t n_kv, const llama_kv_cache & kv, const std::vector<row> & all) const;
};
