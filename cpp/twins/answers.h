// Where the answer in each sequence begins, and how sure the model was of its first token. Knows positions, not what they hold.
//
// An answer begins at the first row that is asked for behind text: behind tokens whose rows nobody asked for, tokens that were
// decoded with PCD off, or nothing. It goes on as long as each token that comes is asked for and lies at the next position, or at an
// earlier one behind the first: drafted tokens that were wrong are written again. At the first position it begins anew.

#pragma once

#include "twins/settings.h"

#include <cmath>
#include <map>

struct llama_pcd_answers {
    // a token comes; asked: for its row
    void read(llama_seq_id seq_id, llama_pos pos, bool asked);

    // see llama_pcd_begin
    void begin(llama_seq_id seq_id, llama_pos pos);

    // whether the token at this position is the first one of an answer
    bool is_first(llama_seq_id seq_id, llama_pos pos) const;

    // the entropy of softmax(L) there, in bits
    void put_entropy(llama_seq_id seq_id, float entropy) { all[seq_id].entropy = entropy; }

    // whether the model was so sure at the first token of an answer that the token at this position, behind it, is left plain
    bool is_sure(llama_seq_id seq_id, llama_pos pos, const llama_pcd_seq & contrast) const;

    // the memory was edited, as callers name whole sequences (-1: all)
    void remove(llama_seq_id seq_id);
    void copy  (llama_seq_id src, llama_seq_id dst);
    void keep  (llama_seq_id seq_id);

    // the positions from p0 to p1 - 1 of a sequence (negative: from the first, to the last) were moved by delta, then divided by d
    void move(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta, int d);

private:
    struct answer {
        llama_pos first   = -1;
        llama_pos last    = -1;       // the latest token; before first: the answer has not begun
        llama_pos begun   = -1;       // where first was before positions were moved: so much text was before it
        float     entropy = INFINITY; // of the first token: nothing is known that would leave the answer plain

        bool has_begun() const { return last >= first; }
    };

    std::map<llama_seq_id, answer> all;
};
