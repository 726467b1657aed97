// Ranges of parameters, settings of single sequences beside the context's, and which of their rows begin answers.

#include "twins/settings.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <iterator>

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
    if (!rotates(p) && p.window == 0) {
        return "perturbation \"none\" without a window leaves the twin equal to its token; set window";
    }
    return {};
}

bool llama_pcd_settings::same_table(const llama_pcd_params & a, const llama_pcd_params & b) {
    return a.perturbation == b.perturbation && a.alpha == b.alpha && a.base_ratio == b.base_ratio &&
        a.transition == b.transition;
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
    using params = llama_pcd_params;

    const bool plain = !rotates(own); // its twins see the first keys

    for (const auto & field : pcd_fields) {
        const auto is = [&](auto ... members) { return (field.is(members) || ...); };

        const bool unused =
            (plain && is(&params::cache, &params::transition, &params::alpha, &params::base_ratio)) ||
            (!rerotated(own) && is(&params::type_k_over)) || is(&params::sequences);
        const bool is_own = is(&params::perturbation) ? plain : field.is_own;

        if (!unused && !is_own && field.get(own) != field.get(p)) {
            return std::string(field.name) + " is " + text(field, own) + ", the context's is " + text(field, p);
        }
    }
    return {};
}

//
// settings
//

llama_pcd_params llama_pcd_seq_table::merged(const own_setting & own, const llama_pcd_params & p) {
    llama_pcd_params res = p;

    const bool to_none = !llama_pcd_settings::rotates(own.params);

    for (const auto & field : pcd_fields) {
        if (field.is_own && (to_none || !field.is(&llama_pcd_params::perturbation))) {
            field.put(res, field.get(own.params));
        }
    }
    res.combine = own.params.combine && p.combine;
    return res;
}

std::string llama_pcd_seq_table::check(llama_seq_id seq_id, const own_setting & own, const llama_pcd_params & p) {
    if (!own.on) {
        return {};
    }
    std::string err = own.confirmed ? "" : llama_pcd_settings::find_difference(own.params, p);
    if (!err.empty()) {
        err += "; only the context can change it (llama_pcd_set)";
    } else {
        err = llama_pcd_settings::check_range(merged(own, p));
    }
    return err.empty() ? "" : format("sequence %d: ", seq_id) + err;
}

std::string llama_pcd_seq_table::check(const llama_pcd_params & p) const {
    for (const auto & [seq_id, cur] : all) {
        const std::string err = cur.setting ? check(seq_id, *cur.setting, p) : "";
        if (!err.empty()) {
            return err;
        }
    }
    return {};
}

void llama_pcd_seq_table::confirm() {
    each(-1, [](sequence & cur) {
        if (cur.setting) {
            cur.setting->confirmed = true;
        }
    });
}

int32_t llama_pcd_seq_table::set(llama_seq_id seq_id, const llama_pcd_params * p, llama_seq_id end, std::string & err) {
    if (seq_id < 0 || seq_id >= end) {
        err = format("seq_id is %d, allowed: 0 to %d", seq_id, end - 1);
        return LLAMA_PCD_INVALID;
    }
    own_setting own = { p != nullptr, false, p ? *p : context.params };

    err = p ? llama_pcd_settings::check_range(*p) : "";
    if (err.empty() && context.on) {
        err = check(seq_id, own, context.params);
        own.confirmed = true;
    }
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }
    all[seq_id].setting = own;

    return LLAMA_PCD_OK;
}

void llama_pcd_seq_table::unset(llama_seq_id seq_id) {
    each(seq_id, [](sequence & cur) { cur.setting.reset(); });
}

llama_pcd_seq_setting llama_pcd_seq_table::setting_of(llama_seq_id seq_id, const llama_pcd_params & p) const {
    const auto it = all.find(seq_id);
    if (it == all.end() || !it->second.setting) {
        return { p, p.sequences == LLAMA_PCD_SEQUENCES_ALL };
    }
    return { merged(*it->second.setting, p), it->second.setting->on };
}

//
// answers
//

const llama_pcd_seq_table::answer * llama_pcd_seq_table::answer_of(llama_seq_id seq_id) const {
    const auto it = all.find(seq_id);
    return it != all.end() && it->second.current ? &*it->second.current : nullptr;
}

void llama_pcd_seq_table::begin(llama_seq_id seq_id, llama_pos pos) {
    all[seq_id].current = answer { pos };
}

bool llama_pcd_seq_table::note_token(llama_seq_id seq_id, llama_pos pos, bool asked) {
    const auto * cur = answer_of(seq_id);

    if (cur && !cur->begun && pos < cur->first) {
        return false; // text before the position that was named
    }
    if (!asked) {
        forget_answer(seq_id);
        return false;
    }
    if (cur && cur->begun) {
        return false;
    }
    all[seq_id].current = answer { pos, true };
    return true;
}

void llama_pcd_seq_table::put_entropy(llama_seq_id seq_id, float entropy) {
    auto & cur = all[seq_id].current;
    if (cur) {
        cur->entropy = entropy;
    }
}

bool llama_pcd_seq_table::is_sure(llama_seq_id seq_id, const llama_pcd_seq_setting & setting) const {
    const auto * cur = answer_of(seq_id);

    return cur && cur->begun && setting.min_first_entropy > 0.0f &&
        (setting.is_early(cur->first) || cur->entropy < setting.min_first_entropy);
}

void llama_pcd_seq_table::forget_answer(llama_seq_id seq_id) {
    each(seq_id, [](sequence & cur) { cur.current.reset(); });
}

//
// the memory was edited
//

void llama_pcd_seq_table::remove(llama_seq_id seq_id) {
    if (seq_id < 0) {
        all.clear();
    } else {
        all.erase(seq_id);
    }
}

void llama_pcd_seq_table::copy(llama_seq_id src, llama_seq_id dst) {
    const auto it = all.find(src);
    all[dst] = it == all.end() ? sequence {} : sequence(it->second);
}

void llama_pcd_seq_table::keep(llama_seq_id seq_id) {
    for (auto it = all.begin(); it != all.end(); ) {
        it = it->first == seq_id ? std::next(it) : all.erase(it);
    }
}
