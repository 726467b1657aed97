// What belongs to other methods: a tap, early exits and ratios of heads. None knows anything of twins, nor of who should have which ratio.
//
//   tap      The tensors of an evaluation are handed over by their names, through the scheduler's callback. Attention weights exist
//            as tensors only without flash attention, so it is off while a tap is on.
//   exits    For DoLa: what the output head makes of the hidden states of earlier layers, in the same graph as the logits. They are
//            read beside plain rows.
//   ratios   For Ms-PoE: each attention head sees position t as t / r, with a ratio r of its own. The ratios, their tables on the
//            device, and the rotations of a graph, head by head. A rotation divides its angle by its frequency factors, so with its
//            factors multiplied by r a head sees position t / r: one rotation for each head, on every backend. A layer whose ratios
//            are all 1 is left as the model has it. The keys of a group of query heads have the ratio of the group's first head; the
//            other queries keep their own. What is rotated is called pcd_q-<layer> and pcd_k-<layer> in the graph, and is computed
//            before either rotation is: so a tap can look at both and then set the ratios that they are rotated with
//            (llama_pcd_set_layer_ratios).

#pragma once

#include "llama-pcd-extras.h"
#include "llama-pcd-impl.h"
#include "llama-pcd.h"
#include "upstream/memory.h"
#include "upstream/rotation.h"

#include <map>
#include <string>
#include <vector>

struct llama_pcd_tap {
    llama_pcd_tap(llama_pcd & pcd, const llama_pcd_memory & memory) : pcd(pcd), memory(memory) {}

    // see llama_pcd_set_tap; no prefixes: off
    int32_t set(const std::vector<std::string> & prefixes, llama_pcd_tap_callback callback, void * user_data, std::string & err);

private:
    llama_pcd & pcd;

    const llama_pcd_memory & memory;

    std::vector<std::string> prefixes; // of the names; empty: off

    llama_pcd_tap_callback callback  = nullptr;
    void *                 user_data = nullptr;

    bool flash_attn = false; // as it was before the tap was set

    int32_t check(const std::vector<std::string> & prefixes, llama_pcd_tap_callback callback, std::string & err) const;

    // why flash attention cannot be turned off; empty: it can
    std::string needs_flash_attn() const;

    bool wants(const char * name) const;

    // the scheduler's callback; user_data is the tap
    static bool on_eval(ggml_tensor * t, bool ask, void * user_data);
};

struct llama_pcd_exits {
    explicit llama_pcd_exits(llama_pcd & pcd) : pcd(pcd) {}

    // whether the output head is the matrix of the embeddings
    static bool has_tied_head(const llama_model & model);

    bool on() const { return !layers.empty(); }

    // see llama_pcd_set_exits; pcd_on: PCD is on in this context
    int32_t set(const std::vector<int32_t> & layers, bool pcd_on, std::string & err);

    // add them to a whole graph
    void build(const llama_model & model, const llm_graph_context & gctx);

    // copy the rows of a micro-batch out
    void take(const llm_graph_result & res, const llama_ubatch & ubatch);

    // row of layers[i_layer] for entry i of the last batch (negative: counted from the last row); null: there is none
    const float * get(int32_t i_layer, int32_t i) const;

    void forget() { rows.clear(); logits.clear(); }

private:
    struct row {
        size_t at;     // in logits, that of the first layer
        size_t stride; // from one layer to the next
    };

    llama_pcd & pcd;

    std::vector<int32_t> layers; // empty: off

    // what only a graph shows: by layer, whether the hidden state that enters it is there; empty: not looked for yet
    std::vector<bool> found;
    bool              probing = false;

    // of the last decode
    std::map<int32_t, row> rows; // by batch index
    std::vector<float>     logits;

    int32_t check(const std::vector<int32_t> & layers, bool pcd_on, std::string & err) const;
};

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
        int32_t         il;
        ggml_tensor *   factors; // the model's own
        llama_pcd_table values;
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
