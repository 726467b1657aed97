// Which tokens of a batch are evaluated at once: how many fit with their twins, and what a twin has to find in memory. Knows
// nothing of how a part is evaluated.

#pragma once

#include "keys/core.h"
#include "decode/rows.h"

#include "llama-batch.h"

// tokens [i0, i1) of a batch and their rows [r0, r1)
struct llama_pcd_part {
    size_t i0, i1;
    size_t r0, r1;

    bool fits = true; // false: a single token, whose twin has no room beside it
};

struct llama_pcd_parts {
    llama_pcd_parts(const llama_pcd_core & core, const llama_pcd_rows & rows) : core(core), rows(rows) {}

    // The part that starts at token i0, with its twins in the same pass (together) or after it. Usually it is the whole batch. It
    // ends where another twin has no room; where sliding-window layers would give away cells that a twin sees; and, beside
    // recurrent layers, where a twin would start from a state that the part itself makes.
    llama_pcd_part next(const llama_batch_ext & batch, size_t i0, bool together) const;

private:
    // what a part has, up to some token
    struct count {
        size_t n_tokens = 0;
        size_t n_rows   = 0; // of the caller
        size_t n_twins  = 0; // that it has, or may need
    };

    const llama_pcd_core & core;
    const llama_pcd_rows & rows;

    bool fits(const count & n, size_t n_room, bool together) const;
};
