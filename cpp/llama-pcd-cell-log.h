// The latest changes of a KV cache's cells: which sequence got a cell or lost it, or has it at another position. llama_kv_cells writes
// it (a hook), whoever changes cells. Knows nothing of who reads it.

#pragma once

#include <array>
#include <cstdint>

struct llama_pcd_cell_log {
    struct change {
        int32_t  seq_id;
        uint32_t cell;
    };

    void add(int32_t seq_id, uint32_t cell) { latest[n++ % latest.size()] = { seq_id, cell }; }

    // all sequences, all cells
    void add_all() { n += latest.size() + 1; }

    // changes so far; and whether all from that many on are still here
    uint64_t count() const { return n; }
    bool     has_all(uint64_t since) const { return n - since <= latest.size(); }

    const change & at(uint64_t i) const { return latest[i % latest.size()]; }

private:
    std::array<change, 1024> latest;

    uint64_t n = 0;
};
