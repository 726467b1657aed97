// Settings of single sequences beside the context's, and which of their rows begin answers.

#include "twins/sequences.h"

#include "twins/fields.h"

#include "llama-impl.h"

#include <iterator>

//
// settings
//

llama_pcd_params llama_pcd_seqs::merged(const own_setting & own, const llama_pcd_params & p) {
    llama_pcd_params res = p;

    const bool turns = own.params.perturbation == LLAMA_PCD_PERTURBATION_NONE;

    for (const auto & field : pcd_fields) {
        if (field.is_own && (turns || !field.is(&llama_pcd_params::perturbation))) {
            field.put(res, field.get(own.params));
        }
    }
    res.combine = own.params.combine && p.combine;
    return res;
}

std::string llama_pcd_seqs::check(llama_seq_id seq_id, const own_setting & own, const llama_pcd_params & p) {
    if (!own.on) {
        return {};
    }
    std::string err = own.confirmed ? "" : llama_pcd_settings::find_difference(own.params, p);
    if (!err.empty()) {
        err += "; only the context can change it (llama_pcd_set)";
    } else if (llama_pcd_settings::separate(p) && (own.params.window != p.window || own.params.n_sink != p.n_sink)) {
        err = format("window, n_sink are %d, %d, the context's are %d, %d; with cache \"separate\" the second keys follow them, "
                "and only the context can change them (llama_pcd_set)", own.params.window, own.params.n_sink, p.window, p.n_sink);
    } else {
        err = llama_pcd_settings::check_range(merged(own, p));
    }
    return err.empty() ? "" : format("sequence %d: ", seq_id) + err;
}

std::string llama_pcd_seqs::check(const llama_pcd_params & p) const {
    for (const auto & [seq_id, cur] : all) {
        const std::string err = cur.setting ? check(seq_id, *cur.setting, p) : "";
        if (!err.empty()) {
            return err;
        }
    }
    return {};
}

void llama_pcd_seqs::confirm() {
    for (auto & [_, cur] : all) {
        if (cur.setting) {
            cur.setting->confirmed = true;
        }
    }
}

int32_t llama_pcd_seqs::set(llama_seq_id seq_id, const llama_pcd_params * p, llama_seq_id end, std::string & err) {
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

void llama_pcd_seqs::unset(llama_seq_id seq_id) {
    for (auto & [id, cur] : all) {
        if (seq_id < 0 || id == seq_id) {
            cur.setting.reset();
        }
    }
}

llama_pcd_seq llama_pcd_seqs::setting_of(llama_seq_id seq_id, const llama_pcd_params & p) const {
    const auto it    = all.find(seq_id);
    const bool has   = it != all.end() && it->second.setting;
    const bool is_on = has ? it->second.setting->on : p.sequences == LLAMA_PCD_SEQUENCES_ALL;
    const auto cur   = has ? merged(*it->second.setting, p) : p;

    return { cur, is_on };
}

//
// answers
//

const llama_pcd_seqs::answer * llama_pcd_seqs::answer_of(llama_seq_id seq_id) const {
    const auto it = all.find(seq_id);
    return it != all.end() && it->second.current ? &*it->second.current : nullptr;
}

void llama_pcd_seqs::begin(llama_seq_id seq_id, llama_pos pos) {
    all[seq_id].current = answer { pos };
}

bool llama_pcd_seqs::read(llama_seq_id seq_id, llama_pos pos, bool asked) {
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

void llama_pcd_seqs::put_entropy(llama_seq_id seq_id, float entropy) {
    auto & cur = all[seq_id].current;
    if (cur) {
        cur->entropy = entropy;
    }
}

bool llama_pcd_seqs::is_sure(llama_seq_id seq_id, const llama_pcd_seq & setting) const {
    const auto * cur = answer_of(seq_id);

    return cur && cur->begun && setting.min_first_entropy > 0.0f &&
        (setting.is_early(cur->first) || cur->entropy < setting.min_first_entropy);
}

void llama_pcd_seqs::forget_answer(llama_seq_id seq_id) {
    for (auto & [id, cur] : all) {
        if (seq_id < 0 || id == seq_id) {
            cur.current.reset();
        }
    }
}

llama_pcd_seqs::answers llama_pcd_seqs::save_answers() const {
    answers res;
    for (const auto & [id, cur] : all) {
        if (cur.current) {
            res[id] = *cur.current;
        }
    }
    return res;
}

void llama_pcd_seqs::restore(const answers & saved) noexcept {
    for (auto & [id, cur] : all) {
        const auto it = saved.find(id);
        cur.current = it == saved.end() ? std::nullopt : std::optional<answer>(it->second);
    }
}

//
// the memory was edited
//

void llama_pcd_seqs::remove(llama_seq_id seq_id) {
    if (seq_id < 0) {
        all.clear();
    } else {
        all.erase(seq_id);
    }
}

void llama_pcd_seqs::copy(llama_seq_id src, llama_seq_id dst) {
    const auto it = all.find(src);
    if (it == all.end()) {
        all.erase(dst);
    } else {
        const sequence cur = it->second;
        all[dst] = cur;
    }
}

void llama_pcd_seqs::keep(llama_seq_id seq_id) {
    for (auto it = all.begin(); it != all.end(); ) {
        it = it->first == seq_id ? std::next(it) : all.erase(it);
    }
}
