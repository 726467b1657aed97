// Fills the inputs from the micro-batch that is about to be computed.

#include "graph/graph.h"
#include "formulas/formulas.h"

#include <algorithm>

static void set_data(ggml_tensor * t, const void * data) {
    ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
}

bool llm_graph_input_pcd::is_misplaced(const llama_pcd_core & core, const llama_ubatch & ubatch) {
    const auto & twins = *core.twins;

    const auto place = [&](uint32_t i) {
        const auto * twin = twins.at(ubatch, i);
        return !twin ? 0 : !twin->perturbed ? 1 : 2;
    };
    bool res = twins.together && !core.memory.recr && ubatch.equal_seqs();
    for (uint32_t i = 1; i < ubatch.n_tokens; ++i) {
        res |= place(i) < place(i - 1);
    }
    return res;
}

bool llm_graph_input_pcd::can_reuse(const llm_graph_params & params) {
    const auto & ubatch = params.ubatch;

    const bool same = llm_graph_input_of_pcd::can_reuse(params) && core.settings.on && ubatch.n_tokens == n_tokens;

    if (!same || !core.twins) {
        return same && n_twin == 0;
    }
    auto & twins = *core.twins;

    if (twins.count(ubatch) != n_twin || twins.count_perturbed(ubatch) != n_perturbed || is_misplaced(core, ubatch)) {
        return false;
    }
    core.view.place(twins, ubatch);
    return core.view.visible(twins, ubatch) == visible;
}

void llm_graph_input_pcd::look(const llama_ubatch & ubatch) {
    if (n_twin > 0) {
        visible = core.view.visible(*core.twins, ubatch);
    }
}

void llm_graph_input_pcd::set_input(const llama_ubatch * ubatch) {
    core.second.cells_stored();

    set_pos(twin_pos, *ubatch, true);
    set_pos(key_pos,  *ubatch, false);
    set_offsets(*ubatch);
    set_noise(*ubatch);

    for (auto & [kv, rot] : k_rot) {
        if (rot && rot->buffer) {
            kv->set_input_k_rot(rot);
        }
    }
}

void llm_graph_input_pcd::set_pos(ggml_tensor * t, const llama_ubatch & ubatch, bool of_twins) const {
    if (!t || !t->buffer) {
        return;
    }

    const uint32_t n = ubatch.n_tokens;

    std::vector<int32_t> data(n*n_pos, 0);

    for (uint32_t i = 0; i < n; ++i) {
        const auto * twin = core.twins ? core.twins->at(ubatch, i) : nullptr;
        if (of_twins ? !twin || !twin->perturbed : twin != nullptr) {
            continue;
        }
        for (uint32_t j = 0; j < n_pos; ++j) {
            // as llm_graph_input_pos does: a text token has the same position in all sections but the last
            const bool text = ubatch.token && n_pos == 4;
            data[j*n + i] = text ? (j < 3 ? ubatch.pos[i] : 0) : ubatch.pos[j*n + i];
        }
    }

    set_data(t, data.data());
}

void llm_graph_input_pcd::set_offsets(const llama_ubatch & ubatch) const {
    if (!offsets || !offsets->buffer) {
        return;
    }

    const auto & p = core.settings.params;

    std::vector<int32_t> data(n_tokens*n_pos, 0);

    for (uint32_t i = n_tokens - n_perturbed; i < n_tokens; ++i) {
        for (uint32_t j = 0; j < std::min(n_pos, 3u); ++j) {
            data[j*n_tokens + i] = pcd_offset(p.seed, ubatch.pos[i], p.offset_min, p.offset_max);
        }
    }

    set_data(offsets, data.data());
}

void llm_graph_input_pcd::set_noise(const llama_ubatch & ubatch) const {
    const auto & p = core.settings.params;

    for (const auto & [key, t] : noise) {
        if (!t->buffer) {
            continue;
        }
        const auto [layer, n_dims] = key;

        std::vector<float> data(ggml_nelements(t));
        for (uint32_t i = 0; i < n_perturbed; ++i) {
            float * cur = data.data() + (size_t) i*2*(n_dims/2);
            pcd_noise(p.seed, ubatch.pos[n_tokens - n_perturbed + i], layer, n_dims, p.noise, p.band, cur, cur + n_dims/2);
        }

        set_data(t, data.data());
    }
}
