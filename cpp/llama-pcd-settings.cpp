// Ranges of parameters, and what two settings have in common.

#include "llama-pcd-settings.h"

#include "llama-impl.h"

#include <cmath>
#include <tuple>

static constexpr int32_t OFFSET_MAX = 1 << 20;

static bool is_in(float x, float lo, float hi) {
    return std::isfinite(x) && x >= lo && x <= hi;
}

// which enum field has a value that its type does not have; empty: none
static std::string check_enums(const llama_pcd_params & p) {
    const struct {
        const char * name;
        int32_t      value;
        int32_t      last;
    } fields[] = {
        { "cache",        p.cache,        LLAMA_PCD_CACHE_SEPARATE },
        { "evaluation",   p.evaluation,   LLAMA_PCD_EVALUATION_ALTERNATE },
        { "perturbation", p.perturbation, LLAMA_PCD_PERTURBATION_NOISE },
        { "transition",   p.transition,   LLAMA_PCD_TRANSITION_NONE },
        { "band",         p.band,         LLAMA_PCD_BAND_ALL },
    };
    for (const auto & cur : fields) {
        if (cur.value < 0 || cur.value > cur.last) {
            return format("%s is %d, not an enum llama_pcd_%s", cur.name, cur.value, cur.name);
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

int32_t llama_pcd_settings::set_seq(llama_seq_id seq_id, const llama_pcd_params * p, llama_seq_id end, std::string & err) {
    if (seq_id < 0 || seq_id >= end) {
        err = format("seq_id is %d, allowed: 0 to %d", seq_id, end - 1);
        return LLAMA_PCD_INVALID;
    }
    llama_pcd_params all = params;
    if (p) {
        all.beta         = p->beta;
        all.gamma        = p->gamma;
        all.relative_top = p->relative_top;
        all.window       = p->window;
        all.n_sink       = p->n_sink;

        err = check_range(all);
        if (!err.empty()) {
            return LLAMA_PCD_INVALID;
        }
    }
    seqs[seq_id] = seq_of(all, p != nullptr);

    return LLAMA_PCD_OK;
}

void llama_pcd_settings::unset_seq(llama_seq_id seq_id) {
    if (seq_id < 0) {
        seqs.clear();
    } else {
        seqs.erase(seq_id);
    }
}

llama_pcd_seq llama_pcd_settings::contrast_of(llama_seq_id seq_id) const {
    const auto it = seqs.find(seq_id);
    return it != seqs.end() ? it->second : seq_of(params, true);
}

llama_pcd_seq llama_pcd_settings::seq_of(const llama_pcd_params & p, bool on) {
    return { on, p.combine, p.perturbation, p.window, p.n_sink, p.beta, p.gamma, p.relative_top };
}
