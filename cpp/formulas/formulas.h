// The formulas of the method: Eq. 4 (rho), Eq. 6 (the contrast) and its strength, and the noise of its first version. Knows nothing of
// models, graphs or contexts.

#pragma once

#include <cstdint>

// Eq. 4: rho_j = theta*_j / theta_j, j = 1 .. n_rot/2, into out[n_rot/2]
void pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, int32_t band, double * out);

// what Eq. 6 asks for; fields as in llama_pcd_params
struct pcd_contrast_params {
    float   beta;
    int32_t adaptive;
    int32_t gamma;
    float   relative_top;
};

// Eq. 6: L~ = (1 + beta_t) L - beta_t L* on the plausible tokens of L; see llama_pcd_contrast. Returns how many are plausible. The
// strength beta_t goes to *strength, NaN where nothing is contrasted.
int32_t pcd_contrast(
        const float * standard, const float * local, int32_t n_vocab,
        const pcd_contrast_params & params, float behind, float * out, float * strength = nullptr);

// see llama_pcd_noise and llama_pcd_offset
void    pcd_noise (int32_t seed, int32_t pos, int32_t layer, int32_t n_rot, float sigma, int32_t band, float * cos, float * sin);
int32_t pcd_offset(int32_t seed, int32_t pos, int32_t offset_min, int32_t offset_max);

//
// What two rows say of each other, as a factor of beta (enum llama_pcd_adaptive): each measure is a function here. And what one row
// says of how sure the model is. (formulas/strength.cpp)
//

// beta_t, from L and L* [n_vocab]; see llama_pcd_strength
float pcd_strength(const float * standard, const float * local, int32_t n_vocab, float beta, int32_t adaptive);

// The Jensen-Shannon divergence of softmax(L) and softmax(L*), base 2: 0 (they are alike) to 1. Of the tokens that both have a logit
// for; 0 where there are none. To about 1e-6.
float pcd_jsd(const float * standard, const float * local, int32_t n_vocab);

// The entropy of softmax(row) in bits, of the tokens that have a logit; 0 where there are none. To about 1e-6 of log2(n_vocab).
float pcd_entropy(const float * row, int32_t n_vocab);
