// Ranges of parameters, and what two settings have in common.

#include "twins/settings.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <vector>

static constexpr int32_t OFFSET_MAX = 1 << 20;

static bool is_in(float x, float lo, float hi) {
    return std::isfinite(x) && x >= lo && x <= hi;
}

// the fields that are enums, and what their values are called
struct pcd_enum {
    const char *              name;
    int32_t llama_pcd_params::* field;
    std::vector<const char *> values;

    std::string text(const llama_pcd_params & p) const { return values.at(p.*field); }
};

static const pcd_enum CACHE        = { "cache",        &llama_pcd_params::cache,        { "rerotated", "shared", "separate" } };
static const pcd_enum EVALUATION   = { "evaluation",   &llama_pcd_params::evaluation,   { "fused", "alternate", "auto" } };
static const pcd_enum PERTURBATION = { "perturbation", &llama_pcd_params::perturbation, { "over-rotation", "none", "noise" } };
static const pcd_enum TRANSITION   = { "transition",   &llama_pcd_params::transition,   { "exponential", "none" } };
static const pcd_enum BAND         = { "band",         &llama_pcd_params::band,         { "low", "high", "all" } };
static const pcd_enum ADAPTIVE     = { "adaptive",     &llama_pcd_params::adaptive,     { "none", "jsd" } };
static const pcd_enum SEQUENCES    = { "sequences",    &llama_pcd_params::sequences,    { "all", "chosen" } };

// which enum field has a value that its type does not have; empty: none
static std::string check_enums(const llama_pcd_params & p) {
    for (const auto * cur : { &CACHE, &EVALUATION, &PERTURBATION, &TRANSITION, &BAND, &ADAPTIVE, &SEQUENCES }) {
        const int32_t value = p.*cur->field;
        if (value < 0 || value >= (int32_t) cur->values.size()) {
            return format("%s is %d, not an enum llama_pcd_%s", cur->name, value, cur->name);
        }
    }
    if (p.type_k_over < -1 || p.type_k_over >= GGML_TYPE_COUNT) {
        return format("type_k_over is %d, not an enum ggml_type, nor -1", p.type_k_over);
    }
    return {};
}

static std::string check_numbers(const llama_pcd_params & p) {
    if (!is_in(p.alpha, 0.0f, 10.0f)) {
        return format("alpha is %g, allowed: 0 to 10", p.alpha);
    }
    if (!is_in(p.base_ratio, 0.0f, 1.0f) || p.base_ratio == 0.0f) {
        return format("base_ratio is %g, allowed: more than 0 and at most 1", p.base_ratio);
    }
    if (!is_in(p.beta, 0.0f, 1000.0f)) {
        return format("beta is %g, allowed: 0 to 1000", p.beta);
    }
    if (p.gamma < 1) {
        return format("gamma is %d, allowed: at least 1", p.gamma);
    }
    if (!is_in(p.relative_top, 0.0f, 1.0f)) {
        return format("relative_top is %g, allowed: 0 to 1", p.relative_top);
    }
    if (p.window < 0) {
        return format("window is %d, allowed: 0 (off) or more", p.window);
    }
    if (p.n_sink < 0) {
        return format("n_sink is %d, allowed: 0 or more", p.n_sink);
    }
    if (p.min_context < 0) {
        return format("min_context is %d, allowed: 0 or more", p.min_context);
    }
    if (!is_in(p.min_entropy, 0.0f, 100.0f)) {
        return format("min_entropy is %g, allowed: 0 to 100", p.min_entropy);
    }
    if (!is_in(p.min_first_entropy, 0.0f, 100.0f)) {
        return format("min_first_entropy is %g, allowed: 0 to 100", p.min_first_entropy);
    }
    if (!is_in(p.noise, 0.0f, 10.0f)) {
        return format("noise is %g, allowed: 0 to 10", p.noise);
    }
    if (p.offset_min < -OFFSET_MAX || p.offset_max > OFFSET_MAX || p.offset_min > p.offset_max) {
        return format("offset_min, offset_max are %d, %d, allowed: -%d to %d, the smaller one first",
                p.offset_min, p.offset_max, OFFSET_MAX, OFFSET_MAX);
    }
    return {};
}

std::string llama_pcd_settings::check_range(const llama_pcd_params & p) {
    std::string err = check_enums(p);
    if (err.empty()) {
        err = check_numbers(p);
    }
    if (!err.empty()) {
        return err;
    }

    if (p.perturbation == LLAMA_PCD_PERTURBATION_NOISE && p.cache == LLAMA_PCD_CACHE_REROTATED) {
        return "cache \"rerotated\" turns keys to other frequencies, and perturbation \"noise\" has none; "
            "use cache \"shared\" or \"separate\"";
    }
    if (p.perturbation == LLAMA_PCD_PERTURBATION_NONE && p.window == 0) {
        return "perturbation \"none\" without a window leaves the twin equal to its token; set window";
    }
    return {};
}

bool llama_pcd_settings::same_table(const llama_pcd_params & a, const llama_pcd_params & b) {
    return a.perturbation == b.perturbation && a.alpha == b.alpha && a.base_ratio == b.base_ratio &&
        a.transition == b.transition && a.band == b.band;
}

bool llama_pcd_settings::same_second(const llama_pcd_params & a, const llama_pcd_params & b) {
    const bool same_twins = a.window == b.window && a.n_sink == b.n_sink && a.noise == b.noise &&
        a.offset_min == b.offset_min && a.offset_max == b.offset_max && a.seed == b.seed;

    return a.cache == b.cache && same_table(a, b) && (!separate(a) || same_twins);
}

bool llama_pcd_settings::same_topology(const llama_pcd_params & a, const llama_pcd_params & b) {
    return a.cache == b.cache && a.perturbation == b.perturbation && offsets(a) == offsets(b);
}

static std::string text(const std::string & value) { return "\"" + value + "\""; }
static std::string text(int32_t             value) { return std::to_string(value); }
static std::string text(float               value) { return format("%.7g", value); }

std::string llama_pcd_settings::find_difference(const llama_pcd_params & own, const llama_pcd_params & p) {
    const bool rotates  = llama_pcd_settings::rotates(own);
    const bool noise    = own.perturbation == LLAMA_PCD_PERTURBATION_NOISE;
    const bool plain    = own.perturbation == LLAMA_PCD_PERTURBATION_NONE; // its twins see the first keys
    const bool separate = llama_pcd_settings::separate(own) || llama_pcd_settings::separate(p);
    const bool second   = rotates && own.cache != LLAMA_PCD_CACHE_SHARED;

    std::string res;

    const auto same = [&](const char * name, const auto & a, const auto & b, bool used) {
        if (used && a != b && res.empty()) {
            res = std::string(name) + " is " + text(a) + ", the context's is " + text(b);
        }
    };
    const auto same_enum = [&](const pcd_enum & e, bool used) { same(e.name, e.text(own), e.text(p), used); };

    same_enum(EVALUATION, true);
    same_enum(CACHE,        !plain || separate);
    same_enum(PERTURBATION, !plain || separate);
    same_enum(TRANSITION,   rotates);
    same_enum(BAND,         !plain);
    same("alpha",       own.alpha,       p.alpha,       rotates);
    same("base_ratio",  own.base_ratio,  p.base_ratio,  rotates);
    same("type_k_over", own.type_k_over, p.type_k_over, second);
    same("noise",       own.noise,       p.noise,       noise);
    same("offset_min",  own.offset_min,  p.offset_min,  noise);
    same("offset_max",  own.offset_max,  p.offset_max,  noise);
    same("seed",        own.seed,        p.seed,        noise);

    return res;
}
