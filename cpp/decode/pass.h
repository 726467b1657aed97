// One pass: a batch with twins, decoded by llama.cpp. Adds twins, drops them afterwards, and keeps their rows. Knows nothing of
// which way of evaluating a batch is right.

#pragma once

#include "upstream/batch.h"
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
struct llama_pcd_kept_states {
    llama_pcd_kept_states(llama_pcd_states & states, const llama_batch_ext & tokens);
    ~llama_pcd_kept_states() { states.drop(); }

private:
    llama_pcd_states & states;
};

struct llama_pcd_pass {
    llama_pcd_pass(llama_pcd_core & core, llama_pcd_rows & rows) : core(core), rows(rows) {}

    // decode a batch, and drop its twins; together: they are in the batch of their tokens
    llama_pcd_outcome run(const llama_batch_ext & batch, bool together = false);

    // evaluate the twins of rows [i0, i0 + n) alone, and keep their rows
    llama_pcd_outcome run_twins(const llama_batch_ext & batch, size_t i0, size_t n);

    // Add the twins of rows [i0, i0 + n), each in a sequence of its own: first those that are not turned (llama_pcd_core::turns).
    // Returns their rows in the order of the twins.
    std::vector<size_t> add_twins(llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n);

    // a batch of twins alone was decoded: wait for its rows; it does not count as the caller's tokens
    void finish_twins();

    // as if the first n tokens had not been decoded; beside recurrent layers they stay, unless the states before them were saved
    void take_back(const llama_batch_ext & batch, size_t n);

    // a batch, or a part of one, is evaluated in another way than the settings ask for: count it, and say so in the log
    void note_fallback(llama_pcd_fallback reason);

    static const char * why(llama_pcd_fallback reason); // in a sentence; "": none

private:
    llama_pcd_core & core;
    llama_pcd_rows & rows;

    uint32_t noted = 0; // reasons that were warned of, as bits

    void drop_twins();

    // the graphs of twins alone, which take turns with their tokens'; null: llama.cpp's own
    llama_pcd::kept_graphs * kept_for(const llama_batch_ext & batch) const;
};
