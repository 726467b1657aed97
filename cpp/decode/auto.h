// evaluation = auto: whether the next step is fused or alternates, by what both took here and by how often a row needs its twin.
// Knows times and counts. Knows nothing of batches, graphs and clocks, so it can be tried with any times.

#pragma once

#include "llama-pcd.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

// What the latest steps of one kind took: a low quantile, since what disturbs a step only makes it longer.
struct llama_pcd_cost {
    void   add(double seconds, int64_t step);
    double get() const; // 0: none yet

    int64_t n    = 0; // steps so far
    int64_t last = 0; // the latest one

private:
    static constexpr size_t  N_LATEST = 7;
    static constexpr int64_t STALE    = 64; // steps after which older times count as one

    std::array<double, N_LATEST> latest = {};
    size_t n_latest = 0;
};

struct llama_pcd_auto {
    // one evaluation of a batch in which most tokens give a row
    struct step {
        size_t n_tokens = 0;
        size_t n_rows   = 0;     // that may need a twin; 0: not such a batch
        bool   fused    = false;
        size_t n_needed = 0;     // rows that needed their twin: more than one token was plausible, and L not sure
        double first    = 0.0;   // seconds: all of a fused step, or the batch without twins
        double twins    = 0.0;   // seconds: the twins alone
    };

    // whether a step of this shape is to be fused
    bool fuses(size_t n_tokens, size_t n_rows) const;

    void took(const step & cur);

    // With other settings costs or rows may be others. Costs of the latest settings are remembered, so that a caller who takes turns
    // with two settings does not have both ways tried at each change.
    void follow(const llama_pcd_params & p);

    // a prompt was read: how sure the model is of what follows is less known
    void read_prompt();

private:
    // steps of about the same shape
    struct shape {
        llama_pcd_cost fused;
        llama_pcd_cost plain;
        llama_pcd_cost twin; // of one row
        double         spare   = 0.0; // seconds set aside for trying the other way again

        bool goes_on    = false; // the latest step had the same settings; it was:
        bool last_fused = true;
        bool counted    = false; // after one of its kind

        bool tried() const; // both ways, often enough to choose
    };
    using key = std::pair<int, int>;

    static key key_of(size_t n_tokens, size_t n_rows);

    double alternate_cost(const shape & cur, size_t n_rows) const;

    // what was measured with one setting
    struct costs {
        llama_pcd_params     params = {};
        std::map<key, shape> shapes;
        int64_t              last = 0; // the latest step
    };
    static constexpr size_t N_SETTINGS = 8;

    std::vector<costs> known = { {} };
    size_t             now   = 0; // which of them is in force

    int64_t n_steps = 0;

    double  p_needed = 1.0; // share of rows that need their twin, a decayed mean
    int64_t n_needed = 0;   // steps behind it
};
