// What each sequence of a context has of its own: a setting, and where its answer begins. Knows positions, not what they hold.
//
// An answer begins at the first row that is asked for behind text. Text is tokens whose rows nobody asks for, tokens that are decoded
// with PCD off, a loaded state, and whatever is before the position that llama_pcd_begin names.

#pragma once

#include "twins/settings.h"

#include <cmath>
#include <map>
#include <optional>
#include <string>

struct llama_pcd_seqs {
    explicit llama_pcd_seqs(const llama_pcd_settings & context) : context(context) {}

    //
    // settings
    //

    // see llama_pcd_set_seq; end: the first id that belongs to twins
    int32_t set  (llama_seq_id seq_id, const llama_pcd_params * p, llama_seq_id end, std::string & err);
    void    unset(llama_seq_id seq_id); // -1: all of them

    // what some sequence has and cannot have in a context with parameters p; empty: nothing
    std::string check(const llama_pcd_params & p) const;

    // that was checked for the parameters now in force
    void confirm();

    llama_pcd_seq setting_of(llama_seq_id seq_id) const { return setting_of(seq_id, context.params); }

    // the same, if the context's parameters were p
    llama_pcd_seq setting_of(llama_seq_id seq_id, const llama_pcd_params & p) const;

    //
    // answers
    //

    // see llama_pcd_begin
    void begin(llama_seq_id seq_id, llama_pos pos);

    // a token comes; asked: for its row. True: that is the first row of an answer.
    bool read(llama_seq_id seq_id, llama_pos pos, bool asked);

    // the entropy of softmax(L) there, in bits
    void put_entropy(llama_seq_id seq_id, float entropy);

    // whether the model was so sure at the first row of the answer that the rows behind it are left plain
    bool is_sure(llama_seq_id seq_id, const llama_pcd_seq & setting) const;

    // a state was loaded (-1: all sequences), which does not say where its answer began
    void forget_answer(llama_seq_id seq_id);

    // the answers as they are now, to go back to where a batch is not decoded
    struct answer {
        llama_pos first   = 0;        // where it begins
        bool      begun   = false;    // its first row was asked for
        float     entropy = INFINITY; // of that row: nothing is known that would leave the answer plain
    };
    using answers = std::map<llama_seq_id, answer>;

    answers save_answers() const;
    void    restore(const answers & saved) noexcept;

    //
    // the memory was edited, as callers name whole sequences (-1: all)
    //

    void remove(llama_seq_id seq_id);
    void copy  (llama_seq_id src, llama_seq_id dst);
    void keep  (llama_seq_id seq_id);

private:
    struct own_setting {
        bool             on;
        bool             confirmed; // all but the fields that a sequence can have of its own was the context's, and follows it
        llama_pcd_params params;
    };
    struct sequence {
        std::optional<own_setting> setting; // none: the context's
        std::optional<answer>      current; // none: the next row that is asked for begins one
    };

    const llama_pcd_settings & context;

    std::map<llama_seq_id, sequence> all;

    const answer * answer_of(llama_seq_id seq_id) const;

    static llama_pcd_params merged(const own_setting & own, const llama_pcd_params & p);
    static std::string      check (llama_seq_id seq_id, const own_setting & own, const llama_pcd_params & p);
};
