// The settings of PCD in a context: parameters, their ranges, and what one sequence has instead. Knows nothing of models.

#pragma once

#include "llama-pcd.h"

#include <map>
#include <string>

// what one sequence may have of its own: its twins' view and perturbation, and how their rows are contrasted
struct llama_pcd_seq {
    bool    on;
    bool    combine;
    int32_t perturbation; // the context's, or none
    int32_t window;
    int32_t n_sink;
    float   beta;
    int32_t gamma;
    float   relative_top;
    int32_t adaptive;
    int32_t min_context;
    float   min_entropy;
    float   min_first_entropy;

    // whether a token at this position is early: its row is L, without a twin
    bool is_early(int32_t pos) const { return pos < min_context - 1; }

    bool perturbs() const { return on && perturbation != LLAMA_PCD_PERTURBATION_NONE; }
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
    static bool separate (const llama_pcd_params & p) { return p.cache == LLAMA_PCD_CACHE_SEPARATE; }
    static bool offsets  (const llama_pcd_params & p) { return p.offset_min != 0 || p.offset_max != 0; }

    bool rotates()   const { return rotates(params); }
    bool rerotated() const { return rerotated(params); }
    bool separate()  const { return separate(params); }

    // whether two settings rotate alike; whether second keys (and values) made with a can go on serving b; whether their graphs
    // have the same operations
    static bool same_table   (const llama_pcd_params & a, const llama_pcd_params & b);
    static bool same_second  (const llama_pcd_params & a, const llama_pcd_params & b);
    static bool same_topology(const llama_pcd_params & a, const llama_pcd_params & b);

    // which field is out of range; empty: none
    static std::string check_range(const llama_pcd_params & p);

    //
    // one sequence
    //

    // see llama_pcd_set_seq; end: the first id that belongs to twins
    int32_t set_seq  (llama_seq_id seq_id, const llama_pcd_params * p, llama_seq_id end, std::string & err);
    void    unset_seq(llama_seq_id seq_id); // -1: all of them

    // the memory was edited: a whole sequence was copied, or all others were removed
    void copy_seq(llama_seq_id src, llama_seq_id dst);
    void keep_seq(llama_seq_id seq_id);

    // what some sequence has and cannot have in a context with parameters p; empty: nothing
    std::string check_seqs(const llama_pcd_params & p) const;

    // that was checked for the parameters now in force
    void confirm_seqs();

    llama_pcd_seq contrast_of(llama_seq_id seq_id) const { return contrast_of(seq_id, params); }

    // the same, if the context's parameters were p
    llama_pcd_seq contrast_of(llama_seq_id seq_id, const llama_pcd_params & p) const;

private:
    // what was set for a sequence
    struct own_setting {
        bool             on;
        bool             confirmed; // all but the fields that a sequence can have of its own was the context's, and follows it
        llama_pcd_params params;
    };

    static llama_pcd_params merged   (const own_setting & own, const llama_pcd_params & p);
    static std::string      check_seq(llama_seq_id seq_id, const own_setting & own, const llama_pcd_params & p);

    std::map<llama_seq_id, own_setting> seqs;
};
