// Eq. 4 and Eq. 6, in double precision where the tables need it. llama-pcd.h says what each function is.

#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <vector>

//
// Eq. 4
//

void llama_pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, double * out) {
    const int32_t n = n_rot/2;

    for (int32_t j = 1; j <= n; ++j) {
        const double lowered = std::pow((double) base_ratio, -2.0*(j - 1)/n_rot); // theta'_j / theta_j
        const double T = transition == LLAMA_PCD_TRANSITION_NONE ? 0.0 : 2.0 - std::exp((double) alpha*j/n);

        out[j - 1] = T + (1.0 - T)*lowered;
    }
}

//
// Eq. 6
//

// Greater numbers are no logits, nor is NaN: they mask a token, as -INFINITY and the least float do.
static constexpr float LIMIT = 1e30f;

static bool is_logit(float x) {
    return std::abs(x) < LIMIT;
}

struct candidate {
    float   logit;
    int32_t id;

    bool operator<(const candidate & other) const { // the better one first, and of equal ones that with the lower id
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

// The gamma best of L; of these, those at least relative_top times as probable as the best. next: the best logit that is not among them.
static std::vector<candidate> plausible(const float * standard, int32_t n_vocab, const llama_pcd_params & params, float & next) {
    const size_t n_keep = std::max<int32_t>(1, std::min(params.gamma, n_vocab));

    std::vector<candidate> top; // a heap, the worst of them at its front; one more than is kept
    top.reserve(n_keep + 1);

    const auto add = [&](int32_t v) {
        if (top.size() > n_keep) {
            std::pop_heap(top.begin(), top.end());
            top.pop_back();
        }
        top.push_back({ standard[v], v });
        std::push_heap(top.begin(), top.end());

        return top.size() > n_keep ? top.front().logit : -LIMIT;
    };
    float cut = -LIMIT; // once the heap is full, its worst
    for (int32_t v = 0; v < n_vocab; ++v) {
        if (standard[v] > cut && is_logit(standard[v])) {
            cut = add(v);
        }
    }
    if (top.size() > n_keep) {
        std::pop_heap(top.begin(), top.end()); // the one too many comes last
    }
    auto end = top.begin() + std::min(top.size(), n_keep);
    if (params.relative_top > 0.0f && !top.empty()) {
        const float least = std::min_element(top.begin(), end)->logit + std::min(0.0f, std::log(params.relative_top));
        end = std::partition(top.begin(), end, [&](const candidate & c) { return c.logit >= least; });
    }
    next = end == top.end() ? -LIMIT : std::min_element(end, top.end())->logit;
    top.erase(end, top.end());

    return top;
}

// L* that is no logit says nothing about a token
static float eq6(float logit, float local, float beta) {
    return is_logit(local) ? (1.0f + beta)*logit - beta*local : logit;
}

// The tokens that are not plausible: the first of them, whose logit is `next`, at `first`, the others as far behind it as in L. But
// what is more than 30 behind is pressed together, so that all of them lie within 39.
static void put_behind(const float * standard, int32_t n_vocab, float next, float first, float * out) {
    for (int32_t v = 0; v < n_vocab; ++v) {
        const float d   = next - standard[v];
        const float far = std::max(d - 30.0f, 0.0f);

        out[v] = is_logit(standard[v]) ? first - (d - (far - 9.0f + 81.0f/(far + 9.0f))) : -INFINITY;
    }
}

int32_t llama_pcd_contrast(
        const float * standard, const float * local, int32_t n_vocab,
        const llama_pcd_params * params, float behind, float * out, float * strength) {
    float next = 0.0f;
    const auto top = plausible(standard, n_vocab, *params, next);

    // a single plausible token is decided whatever L* says: its logit stays
    const bool  contrasts = out && local && top.size() > 1;
    const float beta      = contrasts ? params->beta : NAN;
    if (strength) {
        *strength = beta;
    }
    if (!out) {
        return (int32_t) top.size();
    }
    if (top.empty()) { // not one logit
        std::copy_n(standard, n_vocab, out);
        return 0;
    }
    const auto value = [&](const candidate & c) { return contrasts ? eq6(c.logit, local[c.id], beta) : c.logit; };

    float best = value(top[0]);
    for (const auto & c : top) {
        best = std::max(best, value(c));
    }

    put_behind(standard, n_vocab, next, best - behind, out);
    for (const auto & c : top) {
        out[c.id] = value(c);
    }

    return (int32_t) top.size();
}
