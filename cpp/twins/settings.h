// The setting of PCD: its fields as a table (which cmake/fields.py makes from pypcd/settings/fields.py), their ranges, the setting of
// a context, and what each of its sequences has of its own: a setting, and where its answer begins. Knows nothing of models, and
// positions alone of texts.
//
// An answer begins at the first row that is asked for behind text. Text is tokens whose rows nobody asks for, tokens that are decoded
// with PCD off, a loaded state, and whatever is before the position that llama_pcd_begin names.

#pragma once

#include "llama-pcd.h"

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

// a number with a name; text: nullptr where Python has None
struct pcd_name {
    int32_t      number;
    const char * text;
};

struct pcd_field {
    const char *                name;
    int32_t llama_pcd_params::* integer; // one of the two
    float   llama_pcd_params::* number;
    double                      default_value;

    // the range; is_open: without its lowest number
    double low;
    double high;
    bool   is_open;

    std::vector<pcd_name> names;

    bool is_own; // a sequence can have another value than its context

    double get(const llama_pcd_params & p) const { return integer ? p.*integer : p.*number; }

    void put(llama_pcd_params & p, double value) const {
        if (integer) {
            p.*integer = (int32_t) value;
        } else {
            p.*number = (float) value;
        }
    }

    bool is(int32_t llama_pcd_params::* field) const { return integer == field; }
    bool is(float   llama_pcd_params::* field) const { return number  == field; }

    // whether its values are names
    bool is_choice() const { return !names.empty() && names.back().text; }
};

inline const std::vector<pcd_field> pcd_fields = {
#include "llama-pcd-fields.inc"
};

// the setting of one sequence
struct llama_pcd_seq_setting : llama_pcd_params {
    bool on;

    // whether a token at this position is early: its row is L, without a twin
    bool is_early(int32_t pos) const { return pos < min_context - 1; }
};

struct llama_pcd_settings {
    llama_pcd_params params = {};

    bool on        = false;
    bool suspended = false; // keep the second keys up to date, evaluate no rows for them

    //
    // what parameters ask for
    //

    static bool rotates  (const llama_pcd_params & p) { return p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION; }
    static bool rerotated(const llama_pcd_params & p) { return p.cache == LLAMA_PCD_CACHE_REROTATED && rotates(p); }

    bool rotates()   const { return on && rotates(params); }
    bool rerotated() const { return on && rerotated(params); }

    // whether two settings rotate alike
    static bool same_table(const llama_pcd_params & a, const llama_pcd_params & b);

    // which field is out of range; empty: none
    static std::string check_range(const llama_pcd_params & p);

    // A field that only the context can change, in which a sequence's setting differs from the context's: which one, and both values;
    // empty: none. What the twins of the sequence do not use may differ.
    static std::string find_difference(const llama_pcd_params & own, const llama_pcd_params & p);
};

struct llama_pcd_seq_table {
    explicit llama_pcd_seq_table(const llama_pcd_settings & context) : context(context) {}

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

    llama_pcd_seq_setting setting_of(llama_seq_id seq_id) const { return setting_of(seq_id, context.params); }

    // the same, if the context's parameters were p
    llama_pcd_seq_setting setting_of(llama_seq_id seq_id, const llama_pcd_params & p) const;

    //
    // answers
    //

    // see llama_pcd_begin
    void begin(llama_seq_id seq_id, llama_pos pos);

    // a token comes; asked: for its row. True: that is the first row of an answer.
    bool note_token(llama_seq_id seq_id, llama_pos pos, bool asked);

    // the entropy of softmax(L) there, in bits
    void put_entropy(llama_seq_id seq_id, float entropy);

    // whether the model was so sure at the first row of the answer that the rows behind it are left plain
    bool is_sure(llama_seq_id seq_id, const llama_pcd_seq_setting & setting) const;

    // a state was loaded (-1: all sequences), which does not say where its answer began
    void forget_answer(llama_seq_id seq_id);

    // everything as it is now, to go back to where a batch is not decoded
    struct sequence;
    using state = std::map<llama_seq_id, sequence>;

    const state & save() const { return all; }
    void          restore(state & saved) noexcept { all.swap(saved); }

    //
    // the memory was edited, as callers name whole sequences (-1: all)
    //

    void remove(llama_seq_id seq_id);
    void copy  (llama_seq_id src, llama_seq_id dst);
    void keep  (llama_seq_id seq_id);

    struct own_setting {
        bool             on;
        bool             confirmed; // all but the fields that a sequence can have of its own was the context's, and follows it
        llama_pcd_params params;
    };
    struct answer {
        llama_pos first   = 0;        // where it begins
        bool      begun   = false;    // its first row was asked for
        float     entropy = INFINITY; // of that row: nothing is known that would leave the answer plain
    };
    struct sequence {
        std::optional<own_setting> setting; // none: the context's
        std::optional<answer>      current; // none: the next row that is asked for begins one
    };

private:
    const llama_pcd_settings & context;

    state all;

    const answer * answer_of(llama_seq_id seq_id) const;

    // for a sequence, or all of them (-1)
    template <typename F>
    void each(llama_seq_id seq_id, const F & fn) {
        for (auto & [id, cur] : all) {
            if (seq_id < 0 || id == seq_id) {
                fn(cur);
            }
        }
    }

    static llama_pcd_params merged(const own_setting & own, const llama_pcd_params & p);
    static std::string      check (llama_seq_id seq_id, const own_setting & own, const llama_pcd_params & p);
};
