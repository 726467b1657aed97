// The Jensen-Shannon divergence of two rows, and the entropy of one. With p and q the two probabilities of a token,
//
//     2 JSD = sum of p log2(2p / (p + q)) + q log2(2q / (p + q)) = sum of max(p, q) ((1 + e)(1 - log2(1 + e)) - d e)
//
// where d = |log2 p - log2 q| and e = 2^-d. So a token takes two powers of 2 and a polynomial, no logarithm and no division; no term
// is negative, and equal rows have 0 exactly. CMakeLists.txt compiles this file for finite numbers in any order: what is none is looked
// for in integers, and taken out first.

#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <cstring>

static constexpr float LOG2E = 1.44269504f;
static constexpr float LEAST = -126.0f; // 2 to this is the smallest normal float
static constexpr float NONE  = -1e30f;  // less than every logit

// 2^x to 1e-7 of it, for x up to 0. A polynomial for the fraction, exactly 1 at 0; the integer goes into the exponent.
static float pow2(float x) {
    x = std::max(x, LEAST);

    const int32_t i = (int32_t) (x - 0.5f);
    const float   f = x - i;
    const float   y = 1.0f + f*(0.693147004f + f*(0.240222424f + f*(0.0555073358f + f*(0.00967151299f + f*0.00132647273f))));

    uint32_t bits;
    std::memcpy(&bits, &y, sizeof(bits));
    bits += (uint32_t) i << 23;

    float res;
    std::memcpy(&res, &bits, sizeof(res));
    return res;
}

// (1 + e)(1 - log2(1 + e)) for e from 0 to 1, to 6e-8
static float one_side(float e) {
    return (1.0f - e)*(1.00000012f + e*(0.557296813f + e*(-0.163866132f + e*(0.0749748126f + e*(-0.0381536782f +
        e*(0.0159408040f + e*-0.00350212376f))))));
}

// the sum of fn(v) for v in [0, n)
template <typename F>
static double sum_of(int32_t n, const F & fn) {
    double res = 0.0;
    for (int32_t v = 0; v < n; ++v) {
        res += fn(v);
    }
    return res;
}

// as in Eq. 6: not NaN, an infinity or beyond 1e30; as integers, since the compiler may take it that no float is one
static bool is_logit(float x) {
    uint32_t bits[2];
    const float limit = 1e30f;
    std::memcpy(&bits[0], &x,     sizeof(float));
    std::memcpy(&bits[1], &limit, sizeof(float));
    return (bits[0] & 0x7fffffffu) < bits[1];
}

// row a, in which tokens that have no logit in one of the two are as good as impossible
struct known {
    const float * a;
    const float * b;

    float operator[](int32_t v) const { return is_logit(a[v]) & is_logit(b[v]) ? a[v] : NONE; }
};

// log2 of a probability is LOG2E*(x - top) - sum; large numbers are subtracted first, so that nothing is lost where it counts
struct softmax {
    float top = NONE; // the largest x
    float sum;        // log2 of the sum of e^(x - top)

    softmax(const known & x, int32_t n) {
        for (int32_t v = 0; v < n; ++v) {
            top = std::max(top, x[v]);
        }
        sum = (float) std::log2(sum_of(n, [=, top = top](int32_t v) { return pow2(LOG2E*(x[v] - top)); }));
    }

    float operator()(float x) const { return LOG2E*(x - top) - sum; }
};

static float jsd(const float * standard, const float * local, int32_t n_vocab) {
    const known a = { standard, local }, b = { local, standard };
    const softmax log2_p(a, n_vocab), log2_q(b, n_vocab);
    if (log2_p.top == NONE) {
        return 0.0f; // no token has two logits
    }
    const double sum = sum_of(n_vocab, [=](int32_t v) {
        const float lp = log2_p(a[v]);
        const float lq = log2_q(b[v]);
        const float d  = std::abs(lp - lq);
        const float e  = pow2(-d);

        return pow2(std::max(lp, lq))*(one_side(e) - d*e);
    });
    return std::clamp((float) (0.5*sum), 0.0f, 1.0f);
}

float llama_pcd_strength(const float * standard, const float * local, int32_t n_vocab, float beta, int32_t adaptive) {
    return adaptive == LLAMA_PCD_ADAPTIVE_JSD && beta != 0.0f ? beta*jsd(standard, local, n_vocab) : beta;
}

float llama_pcd_entropy(const float * row, int32_t n_vocab) {
    const known x = { row, row };
    const softmax log2_p(x, n_vocab);
    if (log2_p.top == NONE) {
        return 0.0f; // no token has a logit
    }
    // a probability is no less than 2^LEAST here, so neither is its logarithm
    const double sum = sum_of(n_vocab, [=](int32_t v) { return pow2(log2_p(x[v]))*std::max(log2_p(x[v]), LEAST); });
    return std::max(0.0f, (float) -sum);
}
