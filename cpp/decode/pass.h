// One pass: a batch with twins, decoded by llama.cpp. Adds twins, drops them afterwards, and keeps their rows. Knows nothing of
// which way of evaluating a batch is right.

#pragma once

#include "decode/batch.h"
#include "keys/core.h"
#include "upstream/outputs.h"
#include "decode/rows.h"

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

// The states that recurrent layers have before these tokens, kept to go back to as long as this lives.
struct llama_pcd_saved_states {
    llama_pcd_saved_states(llama_pcd_states & states, const llama_batch_ext & tokens);
    ~llama_pcd_saved_states() { states.drop(); }

private:
    llama_pcd_states & states;
};

struct llama_pcd_pass {
    llama_pcd_pass(llama_pcd_core & core, llama_pcd_rows & rows) : core(core), rows(rows) {}

    // decode a batch without twins; with twins, which are its last entries, and drop these
    llama_pcd_outcome run(const llama_batch_ext & batch);
    llama_pcd_outcome run(const llama_batch_ext & batch, llama_pcd_twins & twins);

    // evaluate the twins of some rows alone, and keep what they give
    llama_pcd_outcome run_alone(const llama_batch_ext & batch, const std::vector<size_t> & which);

    // Add the twins of some rows to a batch: first those that are not perturbed. i0: the entry of src that the first one of dst was, if
    // dst has tokens.
    llama_pcd_twins add_twins(llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, std::vector<size_t> which) const;

    // as if the first n tokens had not been decoded; beside recurrent layers they stay, unless the states before them were saved
    void take_back(const llama_batch_ext & batch, size_t n);

    // a batch, or a part of one, is evaluated in another way than the settings ask for: count it, and say so in the log
    void note_fallback(llama_pcd_fallback reason);

    static const char * why(llama_pcd_fallback reason); // in a sentence; "": none

private:
    llama_pcd_core & core;
    llama_pcd_rows & rows;

    uint32_t noted = 0; // reasons that were warned of, as bits
};
