// From a batch to contrasted rows: which ways of evaluating its twins there are, and which one is right. The caller sees only the
// rows that were asked for.

#pragma once

#include "decode/batch.h"
#include "decode/pass.h"

#include <map>

struct llama_pcd_decoder {
    explicit llama_pcd_decoder(llama_pcd_core & core);

    llama_pcd_rows rows;

    // a batch on a context with PCD on
    llama_pcd_outcome decode(const llama_batch_ext & batch);

private:
    // ways to evaluate a batch and its twins
    enum class way {
        FUSED,     // one batch with all tokens and, behind them, their twins
        ALTERNATE, // the batch first, then the twins that can still change an outcome
    };

    llama_pcd_core & core;
    llama_pcd_parts  parts;
    llama_pcd_pass   pass;

    enum class verdict {
        FINE,
        REFUSED,  // here, with a line in the log
        UPSTREAM, // llama.cpp will refuse it: in its own words, and before anything has changed
    };

    // which rows a batch asks for, and which of its tokens have twins
    verdict read(llama_pcd_request & req);

    // why a batch cannot be evaluated with twins, in a sentence; empty: it can
    std::string refusal(const llama_pcd_request & req) const;

    llama_pcd_outcome refresh_second_keys();

    way choose(const llama_pcd_request & req);

    // evaluation = auto: whether a batch and its twins go together
    bool fuses(const llama_batch_ext & batch) const;

    llama_pcd_outcome evaluate     (const llama_pcd_request & req);
    llama_pcd_outcome evaluate_part(const llama_pcd_request & req, const llama_pcd_part & cur, way how);
    llama_pcd_outcome fused        (const llama_pcd_request & req, const llama_pcd_part & cur);
    llama_pcd_outcome alternate    (const llama_pcd_request & req, const llama_pcd_part & cur);

    // each twin before its token, in the cell that the token takes after it
    llama_pcd_outcome sequential(const llama_pcd_request & req, const llama_pcd_part & cur);

    llama_pcd_outcome run_twins_of(const llama_batch_ext & batch, const std::vector<size_t> & todo);

    //
    // cache = separate: every token has a twin that attends to the twins before it, and whose keys and values are a second evaluation
    // of the whole prompt
    //
    // A twin takes a cell while it is evaluated, like any other token, but its keys and values go to the second ones of its token's
    // cell. So whatever happens to cells (seq_rm, seq_cp, reuse of a prefix) happens to both.
    //
    // Twins are evaluated with their tokens, whether rows need them yet or not. From then on their keys and values are what llama.cpp's
    // own are: a K-shift rotates them, and what is removed from the text leaves the rest as it was made.
    //
    // Which cells lack them is written down (llama_pcd_kv::stale). If some do (decoded with PCD off, a state was loaded, other
    // settings), their twins are evaluated before they are needed, from the tokens that are in the cells then.
    //

    // before the batch: evaluate the twins that are missing of the tokens that it continues; those of one sequence before `end`
    llama_pcd_outcome catch_up(const llama_pcd_request & req);
    llama_pcd_outcome catch_up(const llama_batch_ext & batch, llama_seq_id parent, llama_pos end);

    // which tokens these are; false: it cannot be done, and the log says why
    using tokens_at = std::map<llama_pos, llama_token>;
    bool find_missing(llama_seq_id parent, llama_pos end, tokens_at & res) const;
};
