// The entropy of a row. A token takes two powers of 2, no logarithm and no division. CMakeLists.txt compiles this file for finite numbers in
// any order: what is none is looked for in integers, and taken out first.

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

float llama_pcd_entropy(const float * row, int32_t n_vocab) {
    const auto known = [=](int32_t v) { return is_logit(row[v]) ? row[v] : NONE; };

    float top = NONE;
    for (int32_t v = 0; v < n_vocab; ++v) {
        top = std::max(top, known(v));
    }
    if (top == NONE) {
        return 0.0f; // no token has a logit
    }
    // large numbers are subtracted first, so that nothing is lost where it counts
    const auto log2_p = [=](int32_t v) { return LOG2E*(known(v) - top); };
    const float total = (float) std::log2(sum_of(n_vocab, [=](int32_t v) { return pow2(log2_p(v)); }));

    // a probability is no less than 2^LEAST here, so neither is its logarithm
    const double sum = sum_of(n_vocab, [=](int32_t v) {
        const float x = log2_p(v) - total;
        return pow2(x)*std::max(x, LEAST);
    });
    return std::max(0.0f, (float) -sum);
}
