// Ranges of parameters, and what two settings have in common.

#include "twins/settings.h"

#include "twins/fields.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <map>

// what is allowed, in words
static std::string range_of(const pcd_field & field) {
    if (field.is_choice()) {
        std::string res;
        for (const auto & cur : field.names) {
            res += format("%s%d (%s)", res.empty() ? "" : ", ", cur.number, cur.text ? cur.text : "none");
        }
        return res;
    }
    if (field.integer && field.high == INT32_MAX) {
        return format("at least %d", (int32_t) field.low);
    }
    const char * form = field.is_open ? "more than %.7g and at most %.7g" : "%.7g to %.7g";
    return format(form, field.low, field.high);
}

static bool is_in_range(const pcd_field & field, double value) {
    const auto has = [&](const auto & cur) { return cur.number == value; };
    if (field.is_choice()) {
        return std::any_of(field.names.begin(), field.names.end(), has);
    }
    return std::isfinite(value) && value >= field.low && value <= field.high && !(field.is_open && value == field.low);
}

std::string llama_pcd_settings::check_range(const llama_pcd_params & p) {
    for (const auto & field : pcd_fields) {
        if (!is_in_range(field, field.get(p))) {
            return format("%s is %.7g, allowed: %s", field.name, field.get(p), range_of(field).c_str());
        }
    }
    if (p.offset_min > p.offset_max) {
        return format("offset_max is %d, allowed: at least offset_min, %d", p.offset_max, p.offset_min);
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

// a value for people
static std::string text(const pcd_field & field, const llama_pcd_params & p) {
    const double value = field.get(p);
    for (const auto & [number, name] : field.names) {
        if (number == value) {
            return name ? "\"" + std::string(name) + "\"" : "none";
        }
    }
    return format(field.integer ? "%.0f" : "%.7g", value);
}

std::string llama_pcd_settings::find_difference(const llama_pcd_params & own, const llama_pcd_params & p) {
    const bool rotates  = llama_pcd_settings::rotates(own);
    const bool noise    = own.perturbation == LLAMA_PCD_PERTURBATION_NOISE;
    const bool plain    = own.perturbation == LLAMA_PCD_PERTURBATION_NONE; // its twins see the first keys
    const bool separate = llama_pcd_settings::separate(own) || llama_pcd_settings::separate(p);

    // where these matter to its twins; all others always do
    const std::map<std::string, bool> used = {
        { "cache",       !plain || separate },
        { "transition",  rotates },
        { "band",        !plain },
        { "alpha",       rotates },
        { "base_ratio",  rotates },
        { "type_k_over", rotates && own.cache != LLAMA_PCD_CACHE_SHARED },
        { "noise",       noise },
        { "offset_min",  noise },
        { "offset_max",  noise },
        { "seed",        noise },
        { "sequences",   false },
    };
    for (const auto & field : pcd_fields) {
        const auto it      = used.find(field.name);
        const bool is_used = it == used.end() || it->second;
        const bool is_own  = field.is(&llama_pcd_params::perturbation) ? plain && !separate : field.is_own;

        if (is_used && !is_own && field.get(own) != field.get(p)) {
            return std::string(field.name) + " is " + text(field, own) + ", the context's is " + text(field, p);
        }
    }
    return {};
}
