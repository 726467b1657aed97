// The setting of PCD in a context: parameters, their ranges, what two settings have in common. Knows nothing of models.

#pragma once

#include "llama-pcd.h"

#include <string>

// the setting of one sequence
struct llama_pcd_seq : llama_pcd_params {
    bool on;

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

    // A field that only the context can change, in which a sequence's setting differs from the context's: which one, and both values;
    // empty: none. What the twins of the sequence do not use may differ.
    static std::string find_difference(const llama_pcd_params & own, const llama_pcd_params & p);
};
