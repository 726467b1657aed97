// Early exits, for DoLa: what the output head makes of the hidden states of earlier layers, in the same graph as the logits.
// Knows nothing of twins: exits are read beside plain rows.

#pragma once

#include "llama-pcd-impl.h"

#include <map>
#include <string>
#include <vector>

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
