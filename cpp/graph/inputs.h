// The inputs of a graph with twins: positions, noise, and the rows that twins write; and whether the graph can be used again.

#pragma once

#include "keys/core.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

class llm_graph_input_pcd : public llm_graph_input_i {
public:
    llm_graph_input_pcd(llama_pcd_core & core, uint32_t n_tokens, uint32_t n_twin, uint32_t n_perturbed, uint32_t n_pos) :
        core(core), generation(core.pcd.generation), n_tokens(n_tokens), n_twin(n_twin), n_perturbed(n_perturbed), n_pos(n_pos) {}

    // Whether twins cannot be evaluated in this micro-batch. Attention is split, so all of them have to come after the standard tokens, and
    // those that are perturbed last. If a batch does not fit as it is, sliding-window memory splits it anew (split_equal), so that each
    // sequence gets as many tokens in a micro-batch: then a twin may come before the tokens that it should see. (With
    // cache = separate that does not matter: twins see twins.)
    static bool is_misplaced(const llama_pcd_core & core, const llama_ubatch & ubatch);

    // choose the cells of a graph that is begun, whose twins are placed
    void look(const llama_ubatch & ubatch);

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    llama_pcd_core & core;

    const uint32_t generation;
    const uint32_t n_tokens;
    const uint32_t n_twin;
    const uint32_t n_perturbed;
    const uint32_t n_pos;

    ggml_tensor * twin_pos = nullptr; // I32 [n_tokens*n_pos] the position of a twin that is turned, 0 for others
    ggml_tensor * key_pos  = nullptr; // I32 [n_tokens*n_pos] the position of a standard token, 0 for a twin
    ggml_tensor * offsets  = nullptr; // I32 [n_tokens*n_pos] by how much the position of such a twin is moved

    std::map<std::pair<int32_t, int32_t>, ggml_tensor *> noise; // (layer, n_dims) -> F32 [n_dims/2, 2, n_perturbed]

    std::vector<std::pair<const llama_kv_cache *, ggml_tensor *>> k_rot;

    // of each cache, what the twins' attention looks at
    std::vector<llama_pcd_view::cell_range> visible;

    // I64: the rows of the second keys that twins write, [n_twin], or of transposed values, [n_embd*n_twin]
    std::vector<std::pair<const llama_kv_cache *, ggml_tensor *>> twin_rows;

private:
    void set_pos    (ggml_tensor * t, const llama_ubatch & ubatch, bool of_twins) const;
    void set_offsets(const llama_ubatch & ubatch) const;
    void set_noise  (const llama_ubatch & ubatch) const;
    void set_rows   (ggml_tensor * t, const llama_ubatch & ubatch, const llama_kv_cache & kv) const;
};
