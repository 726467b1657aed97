// From a batch to contrasted rows: which ways of evaluating its twins there are, and which one is right. The caller sees only the
// rows that were asked for.

#pragma once

#include "decode/rows.h"
#include "keys/core.h"
#include "upstream/outputs.h"

#include "llama-batch.h"

// How an evaluation ended; the numbers are what llama_decode returns.
enum class llama_pcd_outcome : int {
    DONE    = 0,
    NO_ROOM = 1,  // The memory is full, or deals the tokens out in a way that twins cannot be in. Nothing has changed: another way
                  // of evaluating the batch may still work.
    ABORTED = 2,  // by the caller's callback
    INVALID = -1, // refused: nothing has changed
    BROKEN  = -2, // an error in between
    FAILED  = -3, // a graph was not computed
};

struct llama_pcd_decoder {
    explicit llama_pcd_decoder(llama_pcd_core & core) : rows(core.pcd.lctx, core.stats), core(core) {}

    llama_pcd_rows rows;

    // a batch on a context with PCD on
    llama_pcd_outcome decode(const llama_batch_ext & batch);

private:
    using batch_t = llama_batch_ext;
    using outcome = llama_pcd_outcome;

    llama_pcd_core & core;

    uint32_t noted = 0; // reasons that were warned of, as bits

    // tokens [i0, i1) of a batch, and their rows [r0, r1), each of which has a twin
    struct part {
        size_t i0, i1;
        size_t r0, r1;

        bool fits = true; // false: a single token, whose twin has no room beside it
    };

    // Which rows a batch asks for, and which of them have twins. reason: why it cannot be evaluated with twins, in a sentence. False:
    // llama.cpp will refuse it, in its own words, and before anything has changed.
    bool read(const batch_t & batch, std::string & reason);

    outcome refresh_second_keys();

    // whether a batch and its twins go together: in one batch with all tokens and, behind them, their twins (fused). Else the batch comes
    // first, then the twins that can still change an outcome (alternate).
    bool fuses(const batch_t & batch) const;

    // The part that starts at token i0, with its twins in the same pass (together) or after it. Usually it is the whole batch. It
    // ends where another twin has no room; where sliding-window layers would give away cells that a twin sees; and, beside recurrent
    // layers, where a twin would start from a state that the part itself makes.
    part next_part(const batch_t & batch, size_t i0, bool together) const;

    outcome evaluate     (const batch_t & batch);
    outcome evaluate_part(const batch_t & batch, const part & cur, bool together);
    outcome fused        (const batch_t & batch, const part & cur);
    outcome alternate    (const batch_t & batch, const part & cur);

    // each twin before its token, in the cell that the token takes after it
    outcome sequential(const batch_t & batch, const part & cur);

    outcome run_twins_of(const batch_t & batch, const std::vector<size_t> & todo);

    //
    // passes: a batch decoded by llama.cpp, and no twin left behind
    //

    // The states that recurrent layers have before these tokens, kept to go back to as long as this lives.
    struct saved_states {
        saved_states(llama_pcd_states & states, const batch_t & tokens);
        ~saved_states() { states.drop(); }

        llama_pcd_states & states;
    };

    // decode a batch without twins; with twins, which are its last entries, and drop these
    outcome run(const batch_t & batch) { return (outcome) core.pcd.decode_plain(batch); }
    outcome run(const batch_t & batch, llama_pcd_twins & twins);

    // evaluate the twins of some rows alone, and keep what they give
    outcome run_alone(const batch_t & batch, const std::vector<size_t> & which);

    // Add the twins of some rows to a batch: first those that are not over-rotated. i0: the entry of src that the first one of dst was, if
    // dst has tokens.
    llama_pcd_twins add_twins(batch_t & dst, const batch_t & src, size_t i0, std::vector<size_t> which) const;

    // as if the first n tokens had not been decoded; beside recurrent layers they stay, unless the states before them were saved
    void take_back(const batch_t & batch, size_t n);

    // a batch, or a part of one, is evaluated in another way than the settings ask for: count it, and say so in the log
    void note_fallback(llama_pcd_fallback reason);
};

// the sequences of one token are equal up to it: any of them tells what its twin may see
llama_seq_id llama_pcd_parent_of(const llama_batch_ext::token & token);

// the tokens [i0, i1) of a batch, with room for twins
llama_batch_ext llama_pcd_batch_part(const llama_batch_ext & batch, size_t i0, size_t i1);
