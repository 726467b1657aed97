// Ms-PoE: each attention head sees position t as t / r, with a ratio r of its own. The ratios, their tables on the device, and the
// rotations of a graph, head by head. Knows nothing of twins, nor of who should have which ratio.
//
//   ratio   A rotation divides its angle by its frequency factors, so with its factors multiplied by r a head sees position t / r: one
//           rotation for each head, on every backend. A layer whose ratios are all 1 is left as the model has it.
//   keys    of a group of query heads have the ratio of the group's first head; the other queries keep their own.
//   names   What is rotated is called pcd_q-<layer> and pcd_k-<layer> in the graph, and is computed before either rotation is: so a tap
//           can look at both and then set the ratios that they are rotated with (llama_pcd_set_layer_ratios).

#pragma once

#include "llama-pcd-extras.h"
#include "llama-pcd.h"
#include "upstream/memory.h"
#include "upstream/rotation.h"

#include "ggml-cpp.h"

#include <string>
#include <vector>

struct llama_pcd_heads {
    llama_pcd_heads(llama_pcd & pcd, const llama_pcd_memory & memory) : pcd(pcd), memory(memory) {}

    llama_pcd & pcd; // whether ratios are on is pcd.heads.on, where a hook reads it

    bool on() const { return pcd.heads.on; }

    // see llama_pcd_set_head_ratios, llama_pcd_set_layer_ratios and llama_pcd_get_head_ratios; pcd_on: PCD is on
    int32_t set      (const float * values, int32_t n, bool pcd_on, std::string & err);
    int32_t set_layer(int32_t il, const float * values, int32_t n, std::string & err);

    // heads: null where none of this was ever turned on
    static int32_t get(const llama_model & model, const llama_pcd_heads * heads, int32_t il, float * out, int32_t n);

    // why nothing can be decoded now; empty: it can
    std::string refusal() const;

    // nodes that a graph may need more
    uint32_t n_nodes() const;

    //
    // the graph that is being built
    //

    // a graph is begun, and is whole; null: without ratios
    static void begin(const llm_graph_context & gctx, llama_pcd_heads * heads);
    static void end();

    // `a` rotated by pos, each head with its ratio; null: as the model does it
    static ggml_tensor * rotated(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor);

    // true if `a` was rotated head by head, where a rotation starts at the first dimension
    static bool offset(const ggml_tensor * a, int n_offs);

    // a layer stores this key
    static void stored(const ggml_context * ctx, const ggml_tensor * k_cur, int32_t il);

private:
    // frequency factors [n_dims/2, n_head] of a layer
    struct table {
        int32_t       il;
        ggml_tensor * factors; // the model's own
        ggml_tensor * t;

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    struct state {
        std::vector<std::vector<float>> ratios; // of each layer's query heads; empty: never set
        std::vector<table>              tables;

        // what only a graph shows
        int64_t     n_rotated = 0;
        std::string reason;        // why it cannot be done; empty: it can
    };

    const llama_pcd_memory & memory;

    state cur;

    int32_t check(const float * values, int32_t n, bool pcd_on, std::string & err) const;

    bool scales(int32_t il) const; // some ratio of a layer is not 1

    ggml_tensor * find_table(int32_t il, ggml_tensor * factors, int n_dims);
    void          write(const table & entry) const;

    void refuse(const std::string & reason);
};
