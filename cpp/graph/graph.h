// What PCD adds to the graph that is being built. Its inputs are what changes from one use to
// the next.
//
//   rotation   a twin's q and k are rotated a second time, by their position with the table theta* - theta; standard tokens by
//              0, which is the identity. So one batch carries both on every backend.
//   keys       rerotated: beside each stored key its copy rotated the same way (standard tokens by their position, twins by 0:
//              theirs are rotated already).
//   attention  where there are second keys: standard tokens and twins that are not over-rotated attend with (q, K, V), the others with
//              (q*, K*, V).

#pragma once

#include "keys/core.h"

#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

// Goes with a graph that was built for a context with PCD, behind the inputs of attention: it is not used again for others.
class llm_graph_input_pcd : public llm_graph_input_i {
public:
    llm_graph_input_pcd(llama_pcd_core & core, uint32_t n_tokens, uint32_t n_twin, uint32_t n_rotated, uint32_t n_pos) :
        core(core), generation(core.pcd.generation), n_tokens(n_tokens), n_twin(n_twin), n_rotated(n_rotated), n_pos(n_pos) {}

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    llama_pcd_core & core;

    const uint32_t generation;
    const uint32_t n_tokens;
    const uint32_t n_twin;      // the last tokens
    const uint32_t n_rotated; // the last of these: over-rotated
    const uint32_t n_pos;       // numbers that a position has

    ggml_tensor * twin_pos = nullptr; // I32 [n_tokens*n_pos] the position of a twin that is turned, 0 for others
    ggml_tensor * key_pos  = nullptr; // I32 [n_tokens*n_pos] the position of a standard token, 0 for a twin

    std::map<size_t,        ggml_tensor *> k_rot; // of each cache
    std::map<ggml_tensor *, size_t>        masks; // the KQ masks of the graph, and whose they are

    // of each cache, what the twins' attention looks at
    std::vector<llama_pcd_cell_range> visible;

private:
    void set_positions(const llama_ubatch & ubatch) const;
};

struct llama_pcd_graph {
    static llama_pcd_graph & current(); // the graph that this thread builds

    // a graph is begun; null: not one of ours
    static void begin(const llm_graph_context & gctx, llama_pcd_core * core);

    bool builds_in(const ggml_context * c) const { return core && ctx == c; }

    // `cur`, which the model rotated, with a twin's rotation
    ggml_tensor * rotated(ggml_context * c, ggml_tensor * cur);

    // the model has the rotation `a` start at another dimension
    void offset(ggml_tensor * a, int n_offs);

    // the arguments of llm_graph_context::build_attn_mha
    struct attn {
        const llm_graph_context & gctx;

        ggml_tensor * q;
        ggml_tensor * k;
        ggml_tensor * v;
        ggml_tensor * kq_b;
        ggml_tensor * kq_mask;
        ggml_tensor * sinks;
        ggml_tensor * v_mla;
        int64_t       n_kv_max;
        float         kq_scale;
        int           il;
    };

    // store second keys, and have standard tokens and twins attend side by side; null: as llama.cpp does it
    ggml_tensor * build_attn(const attn & args);

private:
    llama_pcd_core      * core = nullptr; // null: no graph of ours
    llm_graph_input_pcd * inp  = nullptr;

    std::unique_ptr<llm_graph_input_pcd> inp_own; // until the inputs of attention are in the graph

    ggml_context * ctx = nullptr;
    ggml_cgraph  * gf  = nullptr;

    int n_nodes = 0; // of the graph, up to the last attention

    int32_t n_attn = 0; // attentions built so far: the layer, where each has one

    std::vector<llama_pcd_rotation> rotations; // built and not yet claimed by a layer

    bool splitting = false; // inside our own calls of build_attn_mha

    // mask, first row, rows, first and last cell, heads of a group, where the keys are
    using mask_key = std::tuple<const ggml_tensor *, int64_t, int64_t, uint32_t, uint32_t, int64_t, ggml_backend_buffer_type_t>;

    std::map<mask_key, ggml_tensor *> masks;

    ggml_tensor * input_pos(ggml_tensor *& t, const char * name) const;

    llama_pcd_rotation claim_rotation(const ggml_tensor * k_cur, bool hadamard);

    void store_k(llama_pcd_layer & layer, ggml_tensor * k_cur, ggml_tensor * k_idxs);

    // what one head of all tokens pays to the cells, [n_kv, n_tokens]; what llama_pcd_attention reads of a layer
    ggml_tensor * build_head(const attn & args, ggml_tensor * keys, int64_t head) const;
    void          build_read(const attn & args, const llama_pcd_layer * layer);

    // the same cells of the second keys
    ggml_tensor * second_of(const attn & args, const llama_pcd_layer & layer) const;

    // the tokens [i0, i0 + n), which attend to cells in a range, with these keys
    struct part {
        ggml_tensor *        k;
        llama_pcd_cell_range range;
        int64_t              i0;
        int64_t              n;
    };

    bool    multiplies(const attn & args) const;
    int64_t n_grouped (const attn & args, int64_t n) const;

    ggml_tensor * build_mask   (const attn & args, const part & p);
    ggml_tensor * build_weights(const attn & args, const part & p);
    ggml_tensor * build_values (const attn & args, const part & p, ggml_tensor * weights) const;
    ggml_tensor * build_mha    (const attn & args, const part & p);
    ggml_tensor * build_parts  (const attn & args, const std::vector<part> & parts);
};
