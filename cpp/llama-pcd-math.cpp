// The formulas of the method. Nothing here knows of models, graphs or contexts.

#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

void llama_pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, int32_t band, double * out) {
    const int32_t n = n_rot/2;

    std::vector<double> low(n);

    for (int32_t j = 1; j <= n; ++j) {
        const double lowered = std::pow((double) base_ratio, -2.0*(j - 1)/n_rot); // theta'_j / theta_j
        const double T = transition == LLAMA_PCD_TRANSITION_NONE ? 0.0 : 2.0 - std::exp((double) alpha*j/n);

        low[j - 1] = T + (1.0 - T)*lowered;
    }

    for (int32_t j = 0; j < n; ++j) {
        const double high = low[n - 1 - j];

        out[j] = band == LLAMA_PCD_BAND_LOW ? low[j] : band == LLAMA_PCD_BAND_HIGH ? high : std::max(low[j], high);
    }
}

//
// random numbers without a state: each is a hash (splitmix64) of what it belongs to
//

static uint64_t hash(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30))*0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27))*0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static uint64_t hash_of(int32_t seed, int32_t pos) {
    return hash(hash((uint32_t) seed) + (uint32_t) pos);
}

// more than 0 and at most 1
static double uniform(uint64_t x) {
    return ((hash(x) >> 11) + 1)*0x1.0p-53;
}

void llama_pcd_noise(int32_t seed, int32_t pos, int32_t layer, int32_t n_rot, float sigma, int32_t band, float * cos, float * sin) {
    const int32_t  n   = n_rot/2;
    const uint64_t key = hash(hash_of(seed, pos) + (uint32_t) layer);

    for (int32_t j = 0; j < n; ++j) {
        const bool slow = j >= n/2;
        const bool on   = band == LLAMA_PCD_BAND_ALL || slow == (band == LLAMA_PCD_BAND_LOW);

        // two uniform numbers make two normal ones (Box and Muller)
        const double r   = on ? sigma*std::sqrt(-2.0*std::log(uniform(key + 2*j))) : 0.0;
        const double phi = 2.0*3.14159265358979323846*uniform(key + 2*j + 1);

        cos[j] = r*std::cos(phi);
        sin[j] = r*std::sin(phi);
    }
}

int32_t llama_pcd_offset(int32_t seed, int32_t pos, int32_t offset_min, int32_t offset_max) {
    return offset_min + (int32_t) (hash(~hash_of(seed, pos)) % (uint64_t) ((int64_t) offset_max - offset_min + 1));
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
