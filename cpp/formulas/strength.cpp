// The Jensen-Shannon divergence of two rows, and the entropy of one, in vectors. With p and q the two probabilities of a token,
//
//     2 JSD = sum of p log2(2p / (p + q)) + q log2(2q / (p + q)) = sum of max(p, q) ((1 + e)(1 - log2(1 + e)) - d e)
//
// where d = |log2 p - log2 q| and e = 2^-d. So a token takes two powers of 2 and a polynomial, no logarithm and no division; no term
// is negative, and equal rows have 0 exactly. CMakeLists.txt compiles this file for finite numbers: what is none is looked for in
// integers, and taken out first.

#include "formulas/formulas.h"
#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

// The compiler's default x86-64 has vectors of 4 numbers. Functions that all inline into one can have it compiled again for AVX2.
#if defined(__GNUC__) && defined(__x86_64__)
#define PCD_MEMBER inline __attribute__((always_inline))
#define PCD_AVX2   __attribute__((target("avx2,fma")))
#else
#define PCD_MEMBER inline
#endif
#define PCD_INLINE static PCD_MEMBER

static constexpr int32_t N_LANES = 16;  // numbers that go side by side
static constexpr int32_t N_BLOCK = 256; // numbers added in float; more of them in double

static constexpr float LOG2E = 1.44269504f;
static constexpr float LEAST = -126.0f; // 2 to this is the smallest normal float

PCD_INLINE uint32_t bits_of(float x) {
    uint32_t res;
    std::memcpy(&res, &x, sizeof(res));
    return res;
}

PCD_INLINE float at_least(float x, float low) {
    return x > low ? x : low;
}

// 2^x to 1e-7 of it, for x up to 127. A polynomial for the fraction, exactly 1 at 0; the integer goes into the exponent.
PCD_INLINE float pow2(float x) {
    constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: what is added to it loses its fraction

    x = at_least(x, LEAST);

    const float z = x + ROUND;
    const float f = x - (z - ROUND);

    const float y = 1.0f + f*(0.693147004f + f*(0.240222424f + f*(0.0555073358f + f*(0.00967151299f + f*0.00132647273f))));

    const uint32_t bits = bits_of(y) + (bits_of(z) << 23);

    float res;
    std::memcpy(&res, &bits, sizeof(res));
    return res;
}

// (1 + e)(1 - log2(1 + e)) for e from 0 to 1, to 6e-8
PCD_INLINE float one_side(float e) {
    return (1.0f - e)*(1.00000012f + e*(0.557296813f + e*(-0.163866132f + e*(0.0749748126f + e*(-0.0381536782f +
        e*(0.0159408040f + e*-0.00350212376f))))));
}

// a token's share of 2 JSD, from log2 p and log2 q
PCD_INLINE float share(float lp, float lq) {
    const float d = std::abs(lp - lq);
    const float e = pow2(-d);

    return pow2(at_least(lp, lq))*(one_side(e) - d*e);
}

// the sum of fn(v) for v in [0, n)
template <typename F>
PCD_INLINE double sum_of(int32_t n, const F & fn) {
    double res = 0.0;

    int32_t v = 0;
    for (; v + N_BLOCK <= n; v += N_BLOCK) {
        float sums[N_LANES] = {};
        for (int32_t i = v; i < v + N_BLOCK; i += N_LANES) {
            for (int32_t j = 0; j < N_LANES; ++j) {
                sums[j] += fn(i + j);
            }
        }
        float sum = 0.0f;
        for (const float cur : sums) {
            sum += cur;
        }
        res += sum;
    }
    for (; v < n; ++v) {
        res += fn(v);
    }
    return res;
}

// log2 of a probability is LOG2E*(x - top) - sum; large numbers are subtracted first, so that nothing is lost where it counts
struct softmax {
    float top; // the largest x
    float sum; // log2 of the sum of e^(x - top)

    PCD_MEMBER float operator()(float x) const { return LOG2E*(x - top) - sum; }
};

PCD_INLINE softmax softmax_of(const float * x, int32_t n) {
    float lanes[N_LANES];
    std::fill_n(lanes, N_LANES, x[0]);

    int32_t v = 0;
    for (; v + N_LANES <= n; v += N_LANES) {
        for (int32_t j = 0; j < N_LANES; ++j) {
            lanes[j] = at_least(x[v + j], lanes[j]);
        }
    }
    for (; v < n; ++v) {
        lanes[0] = at_least(x[v], lanes[0]);
    }
    const float top = *std::max_element(lanes, lanes + N_LANES);

    return { top, (float) std::log2(sum_of(n, [=](int32_t i) { return pow2(LOG2E*(x[i] - top)); })) };
}

// as in Eq. 6: not NaN, an infinity or beyond 1e30; as integers, since the compiler may take it that no float is one
PCD_INLINE bool is_logit(float x) {
    return (int32_t) (bits_of(x) & 0x7fffffffu) < (int32_t) bits_of(1e30f);
}

// -1: a number is no logit
PCD_INLINE float jsd_of(const float * a, const float * b, int32_t n) {
    int32_t n_none = 0;
    for (int32_t v = 0; v < n; ++v) {
        n_none += !is_logit(a[v]) | !is_logit(b[v]);
    }
    if (n_none > 0) {
        return -1.0f;
    }
    const softmax log2_p = softmax_of(a, n);
    const softmax log2_q = softmax_of(b, n);

    return std::clamp((float) (0.5*sum_of(n, [=](int32_t v) { return share(log2_p(a[v]), log2_q(b[v])); })), 0.0f, 1.0f);
}

// the same of one row: -sum of p log2 p
PCD_INLINE float entropy_of(const float * x, int32_t n) {
    int32_t n_none = 0;
    for (int32_t v = 0; v < n; ++v) {
        n_none += !is_logit(x[v]);
    }
    if (n_none > 0) {
        return -1.0f;
    }
    const softmax log2_p = softmax_of(x, n);

    // a probability is no less than 2^LEAST here, so neither is its logarithm
    return std::max(0.0f, (float) -sum_of(n, [=](int32_t v) { return pow2(log2_p(x[v]))*at_least(log2_p(x[v]), LEAST); }));
}

static float jsd_base(const float * a, const float * b, int32_t n) {
    return jsd_of(a, b, n);
}

static float entropy_base(const float * x, int32_t n) {
    return entropy_of(x, n);
}

#ifdef PCD_AVX2
PCD_AVX2 static float jsd_avx2(const float * a, const float * b, int32_t n) {
    return jsd_of(a, b, n);
}

PCD_AVX2 static float entropy_avx2(const float * x, int32_t n) {
    return entropy_of(x, n);
}

static bool has_avx2() {
    static const bool res = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return res;
}

static float jsd(const float * a, const float * b, int32_t n) {
    return has_avx2() ? jsd_avx2(a, b, n) : jsd_base(a, b, n);
}

static float entropy(const float * x, int32_t n) {
    return has_avx2() ? entropy_avx2(x, n) : entropy_base(x, n);
}
#else
static float entropy(const float * x, int32_t n) {
    return entropy_base(x, n);
}

static float jsd(const float * a, const float * b, int32_t n) {
    return jsd_base(a, b, n);
}
#endif

float pcd_jsd(const float * standard, const float * local, int32_t n_vocab) {
    const float res = jsd(standard, local, n_vocab);
    if (res >= 0.0f) {
        return res;
    }
    std::vector<float> a, b;
    for (int32_t v = 0; v < n_vocab; ++v) {
        if (is_logit(standard[v]) && is_logit(local[v])) {
            a.push_back(standard[v]);
            b.push_back(local[v]);
        }
    }
    return a.empty() ? 0.0f : jsd(a.data(), b.data(), (int32_t) a.size());
}

float pcd_entropy(const float * row, int32_t n_vocab) {
    const float res = entropy(row, n_vocab);
    if (res >= 0.0f) {
        return res;
    }
    std::vector<float> known;
    std::copy_if(row, row + n_vocab, std::back_inserter(known), [](float x) { return is_logit(x); });

    return known.empty() ? 0.0f : entropy(known.data(), (int32_t) known.size());
}

float pcd_strength(const float * standard, const float * local, int32_t n_vocab, float beta, int32_t adaptive) {
    switch (adaptive) {
        case LLAMA_PCD_ADAPTIVE_JSD:
            return beta == 0.0f ? 0.0f : beta*pcd_jsd(standard, local, n_vocab);
        default:
            return beta;
    }
}
