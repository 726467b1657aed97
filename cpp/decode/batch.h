// A batch of the caller's: which of its tokens are evaluated at once, and batches with twins in them. Knows nothing of how a part is
// evaluated.

#pragma once

#include "keys/core.h"
#include "decode/rows.h"

#include "llama-batch.h"

// the sequences of one token are equal up to it: any of them tells what its twin may see
llama_seq_id llama_pcd_parent_of(const llama_batch_ext::token & token);

// an empty batch for the same context, with room for twins
llama_batch_ext llama_pcd_batch_like(const llama_batch_ext & batch);

// the tokens [i0, i1)
llama_batch_ext llama_pcd_batch_part(const llama_batch_ext & batch, size_t i0, size_t i1);

// the twin of a token of src, behind the tokens of dst
void llama_pcd_batch_add_twin(
        llama_batch_ext & dst, const llama_batch_ext & src, const llama_batch_ext::token & token, llama_seq_id twin);

// tokens [i0, i1) of a batch, and their rows [r0, r1), each of which has a twin
struct llama_pcd_part {
    size_t i0, i1;
    size_t r0, r1;

    bool fits = true; // false: a single token, whose twin has no room beside it
};

struct llama_pcd_parts {
    llama_pcd_parts(const llama_pcd_core & core, const llama_pcd_rows & rows) : core(core), rows(rows) {}

    // The part that starts at token i0, with its twins in the same pass (together) or after it. Usually it is the whole batch. It
    // ends where another twin has no room; where sliding-window layers would give away cells that a twin sees; and, beside recurrent
    // layers, where a twin would start from a state that the part itself makes.
    llama_pcd_part next(const llama_batch_ext & batch, size_t i0, bool together) const;

private:
    // what a part has, up to some token
    struct count {
        size_t n_tokens = 0;
        size_t n_twins  = 0; // that it has, or may need
        size_t n_rows   = 0; // of the caller
    };

    const llama_pcd_core & core;
    const llama_pcd_rows & rows;

    bool fits(const count & n, size_t n_room, bool together) const;
};
