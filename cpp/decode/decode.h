// From a batch to contrasted rows: which ways of evaluating its twins there are, and which one is right. The caller sees only the
// rows that were asked for.

#pragma once

#include "decode/batch.h"
#include "decode/pass.h"

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

    // which rows a batch asks for, and which of them have twins
    verdict read(const llama_batch_ext & batch);

    // why a batch cannot be evaluated with twins, in a sentence; empty: it can
    std::string refusal(const llama_batch_ext & batch) const;

    llama_pcd_outcome refresh_second_keys();

    way choose(const llama_batch_ext & batch) const;

    // evaluation = auto: whether a batch and its twins go together
    bool fuses(const llama_batch_ext & batch) const;

    llama_pcd_outcome evaluate     (const llama_batch_ext & batch);
    llama_pcd_outcome evaluate_part(const llama_batch_ext & batch, const llama_pcd_part & cur, way how);
    llama_pcd_outcome fused        (const llama_batch_ext & batch, const llama_pcd_part & cur);
    llama_pcd_outcome alternate    (const llama_batch_ext & batch, const llama_pcd_part & cur);

    // each twin before its token, in the cell that the token takes after it
    llama_pcd_outcome sequential(const llama_batch_ext & batch, const llama_pcd_part & cur);

    llama_pcd_outcome run_twins_of(const llama_batch_ext & batch, const std::vector<size_t> & todo);
};
