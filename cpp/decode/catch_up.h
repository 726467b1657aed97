// cache = separate: every token has a twin that attends to the twins before it, and whose keys and values are a second evaluation
// of the whole prompt.
//
// A twin takes a cell while it is evaluated, like any other token, but its keys and values go to the second ones of its token's
// cell. So whatever happens to cells (seq_rm, seq_cp, reuse of a prefix) happens to both.
//
// Twins are evaluated with their tokens, whether rows need them yet or not. From then on their keys and values are what llama.cpp's
// own are: a K-shift rotates them, and what is removed from the text leaves the rest as it was made.
//
// Which cells lack them is written down (llama_pcd_kv::stale). If some do (decoded with PCD off, a state was loaded, other
// settings), their twins are evaluated before they are needed, from the tokens that are in the cells then.

#pragma once

#include "decode/pass.h"

#include <map>
#include <vector>

struct llama_pcd_catch_up {
    llama_pcd_catch_up(llama_pcd_core & core, llama_pcd_rows & rows, llama_pcd_pass & pass) : core(core), rows(rows), pass(pass) {}

    // why twins cannot be evaluated after the batch: sliding-window layers forget, and embeddings are not kept
    llama_pcd_fallback too_late(const llama_batch_ext & batch) const;

    // before the batch: evaluate the twins that are missing of the tokens that it continues
    llama_pcd_outcome before(const llama_pcd_request & req);

    // after the batch: evaluate the twins of its tokens, and all before them that is missing; of these rows also L*
    llama_pcd_outcome after(const llama_pcd_request & req, const std::vector<size_t> & todo);

private:
    using rows_at = std::map<llama_pos, size_t>; // which row a position gives

    llama_pcd_core & core;
    llama_pcd_rows & rows;
    llama_pcd_pass & pass;

    // evaluate the twins that a sequence misses before position `end`; those in `wanted` also give their row
    llama_pcd_outcome catch_up(const llama_batch_ext & batch, llama_seq_id parent, llama_pos end, const rows_at & wanted);

    // which tokens these are; false: it cannot be done, and the log says why
    using tokens_at = std::map<llama_pos, llama_token>;
    bool find_missing(llama_seq_id parent, llama_pos end, tokens_at & res) const;
};
