// Eq. 4, Eq. 6 and the entropy against the same written plainly in long double, on rows with ties, masks and numbers that are no logits.
// tests/engine/test_cpp.py compiles and runs it under the sanitizers.

#include "llama-pcd.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

using row = std::vector<float>;

static int n_failed = 0;

#define CHECK(x) ((x) ? (void) 0 : (void) (++n_failed, std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x)))

static bool near(long double a, long double b, long double tolerance) {
    return std::abs(a - b) <= tolerance*std::max(1.0L, std::abs(b));
}

static bool is_logit(float x) {
    return std::isfinite(x) && std::abs(x) < 1e30f;
}

static void test_rho() {
    for (const int32_t n_rot : { 2, 4, 64, 128, 130 }) {
        const int32_t n = n_rot/2;
        for (const float ratio : { 1e-4f, 0.5f, 1.0f }) {
            for (const float alpha : { 0.0f, 0.2f, 1.0f }) {
                std::vector<double> blended(n), none(n);
                llama_pcd_rho(n_rot, alpha, ratio, LLAMA_PCD_TRANSITION_EXPONENTIAL, blended.data());
                llama_pcd_rho(n_rot, alpha, ratio, LLAMA_PCD_TRANSITION_NONE, none.data());
                for (int32_t j = 1; j <= n; ++j) {
                    const long double base  = 10000, theta = std::pow(base, -2.0L*(j - 1)/n_rot);
                    const long double other = std::pow(ratio*base, -2.0L*(j - 1)/n_rot);
                    const long double T     = 2 - std::exp((long double) alpha*j/n);
                    CHECK(near(blended[j - 1], (T*theta + (1 - T)*other)/theta, 1e-10L));
                    CHECK(near(none[j - 1], other/theta, 1e-10L));
                    CHECK((ratio != 1.0f && alpha != 0.0f) || blended[j - 1] == 1.0);
                }
            }
        }
    }
}

// A row of few different logits, so that there are ties; some are masked, or no number.
static row drawn(std::mt19937 & rng, size_t n) {
    const float odd[] = { -INFINITY, INFINITY, NAN, std::numeric_limits<float>::lowest(), 3e38f };
    row res(n);
    for (auto & x : res) {
        x = rng() % 7 == 0 ? odd[rng() % 5] : (float) (rng() % 40)*0.75f - 12.0f;
    }
    return res;
}

static void test_contrast() {
    std::mt19937 rng(1);
    for (int i = 0; i < 4000; ++i) {
        const size_t n = 1 + rng() % 70;
        const row    standard = drawn(rng, n), local = drawn(rng, n);
        const float  beta = (float) (rng() % 5), relative_top = rng() % 2 ? 0.0f : 0.05f*(1 + rng() % 20);
        const int32_t gamma = 1 + rng() % 40;

        llama_pcd_params params = {};
        params.beta         = beta;
        params.gamma        = gamma;
        params.relative_top = relative_top;

        std::vector<int32_t> ids(n);
        std::iota(ids.begin(), ids.end(), 0);
        ids.erase(std::remove_if(ids.begin(), ids.end(), [&](int32_t v) { return !is_logit(standard[v]); }), ids.end());
        std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return standard[a] > standard[b]; });
        size_t n_top = std::min(ids.size(), (size_t) gamma);
        while (relative_top > 0 && n_top > 1 && std::exp((long double) standard[ids[n_top - 1]] - standard[ids[0]]) < relative_top*(1 - 1e-6L)) {
            --n_top;
        }

        row   out(n);
        float strength = 0.0f;
        const int32_t got = llama_pcd_contrast(standard.data(), local.data(), n, &params,
                INFINITY, out.data(), &strength);
        CHECK(got == (int32_t) n_top);
        CHECK(n_top > 1 ? strength == beta : std::isnan(strength));
        for (size_t k = 0; k < ids.size(); ++k) {
            const float L = standard[ids[k]], other = local[ids[k]];
            const bool  is_contrast = n_top > 1 && is_logit(other);
            CHECK(k < n_top ? near(out[ids[k]], is_contrast ? (1.0L + beta)*L - (long double) beta*other : L, 1e-5L) : out[ids[k]] == -INFINITY);
        }
        CHECK(llama_pcd_contrast(standard.data(), local.data(), n, &params, 0.0f, nullptr, nullptr) == got);

        // what callers read: the others keep L's order, behind the best by 60 to 99
        row behind(n);
        llama_pcd_contrast(standard.data(), local.data(), n, &params, LLAMA_PCD_BEHIND, behind.data(), nullptr);
        float best = -INFINITY;
        for (size_t k = 0; k < n_top; ++k) {
            CHECK(behind[ids[k]] == out[ids[k]]);
            best = std::max(best, out[ids[k]]);
        }
        for (size_t k = n_top; k < ids.size(); ++k) {
            CHECK(behind[ids[k]] <= best - 59.9f && behind[ids[k]] >= best - 99.1f);
            CHECK(k == n_top || behind[ids[k]] <= behind[ids[k - 1]]);
        }
    }
}

static void test_entropy() {
    std::mt19937 rng(2);
    for (int i = 0; i < 2000; ++i) {
        const row a = drawn(rng, 1 + rng() % 300);
        long double sum = 0, entropy = 0;
        for (const float x : a) {
            sum += is_logit(x) ? std::exp((long double) x) : 0;
        }
        for (const float x : a) {
            const long double p = is_logit(x) ? std::exp((long double) x)/sum : 0;
            entropy -= p > 0 ? p*std::log2(p) : 0;
        }
        CHECK(near(llama_pcd_entropy(a.data(), a.size()), entropy, 1e-5L));
    }
}

int main() {
    test_rho();
    test_contrast();
    test_entropy();
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
