// Parts of a batch, and batches with twins in them. Knows nothing of contexts.

#pragma once

#include "llama-batch.h"

// the sequences of one token are equal up to it: any of them tells what its twin may see
llama_seq_id llama_pcd_parent_of(const llama_batch_ext::token & token);

// an empty batch for the same context, with room for twins
llama_batch_ext llama_pcd_batch_like(const llama_batch_ext & batch);

// the tokens [i0, i1)
llama_batch_ext llama_pcd_batch_part(const llama_batch_ext & batch, size_t i0, size_t i1);

// the twin of a token of src, behind the tokens of dst
void llama_pcd_batch_add_twin(
        llama_batch_ext & dst, const llama_batch_ext & src, const llama_batch_ext::token & token, llama_seq_id twin, bool output);
