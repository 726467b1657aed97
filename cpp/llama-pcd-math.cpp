// The two formulas of the method. Nothing here knows of models, graphs or contexts.

#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <vector>

void llama_pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, double * out) {
    const int32_t n = n_rot/2;

    for (int32_t j = 1; j <= n; ++j) {
        const double lowered = std::pow((double) base_ratio, -2.0*(j - 1)/n_rot); // theta'_j / theta_j
        const double T = transition == LLAMA_PCD_TRANSITION_NONE ? 0.0 : 2.0 - std::exp((double) alpha*j/n);

        out[j - 1] = T + (1.0 - T)*lowered;
    }
}

int32_t llama_pcd_contrast(
        const float * standard, const float * over_rotated, int32_t n_vocab,
        float beta, int32_t gamma, float relative_top, float outside, float * out) {
    // the gamma best of L, the lower id first where logits are equal; the worst of them at the heap's front
    using candidate = std::pair<float, int32_t>;

    const auto better = [](const candidate & a, const candidate & b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };

    const size_t n_keep = std::max<int32_t>(1, std::min(gamma, n_vocab));

    std::vector<candidate> top;
    top.reserve(n_keep);

    for (int32_t v = 0; v < n_vocab; ++v) {
        if (top.size() < n_keep) {
            top.push_back({ standard[v], v });
            std::push_heap(top.begin(), top.end(), better);
        } else if (standard[v] > top.front().first) {
            std::pop_heap(top.begin(), top.end(), better);
            top.back() = { standard[v], v };
            std::push_heap(top.begin(), top.end(), better);
        }
    }

    if (relative_top > 0.0f) {
        const float best = std::max_element(top.begin(), top.end())->first;
        const float cut  = best + std::log(relative_top);

        top.erase(std::remove_if(top.begin(), top.end(), [cut, best](const candidate & c) {
            return c.first < cut && c.first < best;
        }), top.end());
    }

    if (out) {
        for (int32_t v = 0; v < n_vocab; ++v) {
            out[v] = standard[v] + outside;
        }
        // a single plausible token is decided whatever L* says: its logit stays
        const bool contrast = over_rotated && top.size() > 1;
        for (const auto & [logit, v] : top) {
            out[v] = contrast ? (1.0f + beta)*logit - beta*over_rotated[v] : logit;
        }
    }

    return (int32_t) top.size();
}
