// How strong the contrast of one step is: what its two rows say of each other, as a factor of beta (enum llama_pcd_adaptive). Each
// measure is a function here; so is the entropy of one row, which says how sure the model is. Knows nothing of which tokens are
// plausible, nor of contexts.

#pragma once

#include <cstdint>

// beta_t, from L and L* [n_vocab]; see llama_pcd_strength
float pcd_strength(const float * standard, const float * over_rotated, int32_t n_vocab, float beta, int32_t adaptive);

// The Jensen-Shannon divergence of softmax(L) and softmax(L*), base 2: 0 (they are alike) to 1. Of the tokens that both have a logit
// for; 0 where there are none. To about 1e-6.
float pcd_jsd(const float * standard, const float * over_rotated, int32_t n_vocab);

// The entropy of softmax(row) in bits, of the tokens that have a logit; 0 where there are none. To about 1e-6 of log2(n_vocab).
float pcd_entropy(const float * row, int32_t n_vocab);
