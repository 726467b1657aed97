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
    void    unset_seq(llama_seq_id seq_id);

    llama_pcd_seq contrast_of(llama_seq_id seq_id) const;

private:
    static llama_pcd_seq seq_of(const llama_pcd_params & p, bool on);

    std::map<llama_seq_id, llama_pcd_seq> seqs; // where they differ from the context's
};
