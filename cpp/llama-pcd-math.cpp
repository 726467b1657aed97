// Eq. 4, Eq. 6 and the noise, in double precision where the tables need it.

#include "llama-pcd-math.h"
#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

//
// Eq. 4
//

void pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, int32_t band, double * out) {
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
// Eq. 6
//

struct pcd_candidate {
    float   logit;
    int32_t id;
};

// fn(v) for each logit above `cut`, in order; fn may raise `cut`. Once that has been found, most blocks have none: they cost one
// comparison for each logit, in vectors.
template <typename F>
static void for_each_above(const float * logits, int32_t n, const float & cut, const F & fn) {
    constexpr int32_t N_BLOCK = 128;

    for (int32_t v0 = 0; v0 < n; v0 += N_BLOCK) {
        const int32_t v1 = std::min(v0 + N_BLOCK, n);
        const float   c  = cut;

        int32_t n_above = 0;
        for (int32_t v = v0; v < v1; ++v) {
            n_above += logits[v] > c;
        }
        for (int32_t v = v0; v < v1 && n_above > 0; ++v) {
            if (logits[v] > cut) {
                fn(v);
            }
        }
    }
}

// the gamma best of L, the lower id first where logits are equal; of these, those at least relative_top times as probable as
// the best
static std::vector<pcd_candidate> plausible(const float * standard, int32_t n_vocab, int32_t gamma, float relative_top) {
    const auto better = [](const pcd_candidate & a, const pcd_candidate & b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };

    const size_t n_keep = std::max<int32_t>(1, std::min(gamma, n_vocab));

    std::vector<pcd_candidate> top; // a heap, the worst of them at its front
    top.reserve(n_keep);

    for (int32_t v = 0; v < (int32_t) n_keep; ++v) {
        top.push_back({ standard[v], v });
    }
    std::make_heap(top.begin(), top.end(), better);

    float cut = top.front().logit;

    for_each_above(standard + n_keep, n_vocab - (int32_t) n_keep, cut, [&](int32_t i) {
        const int32_t v = i + (int32_t) n_keep;

        std::pop_heap(top.begin(), top.end(), better);
        top.back() = { standard[v], v };
        std::push_heap(top.begin(), top.end(), better);
        cut = top.front().logit;
    });

    if (relative_top > 0.0f) {
        float best = top[0].logit;
        for (const pcd_candidate & c : top) {
            best = std::max(best, c.logit);
        }
        const float cut = best + std::log(relative_top);

        top.erase(std::remove_if(top.begin(), top.end(), [cut, best](const pcd_candidate & c) {
            return c.logit < cut && c.logit < best;
        }), top.end());
    }

    return top;
}

int32_t pcd_contrast(
        const float * standard, const float * over_rotated, int32_t n_vocab,
        float beta, int32_t gamma, float relative_top, float outside, float * out) {
    const auto top = plausible(standard, n_vocab, gamma, relative_top);

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

//
// noise: random numbers without a state; each is a hash (splitmix64) of what it belongs to
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

void pcd_noise(int32_t seed, int32_t pos, int32_t layer, int32_t n_rot, float sigma, int32_t band, float * cos, float * sin) {
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

int32_t pcd_offset(int32_t seed, int32_t pos, int32_t offset_min, int32_t offset_max) {
    return offset_min + (int32_t) (hash(~hash_of(seed, pos)) % (uint64_t) ((int64_t) offset_max - offset_min + 1));
}
