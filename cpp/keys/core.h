// What the evaluation with twins stands on: settings, second keys and twins, each part owning its functions; what of this a model and
// a context can run (limits.cpp); and what has to happen to all of it when PCD is set (core.cpp). Knows nothing of batches.

#pragma once

#include "keys/second.h"
#include "twins/twins.h"

#include <map>

struct llama_pcd_core {
    llama_pcd_core(llama_pcd & pcd, const llama_pcd_memory & memory);

    llama_pcd & pcd;

    const llama_pcd_memory & memory;

    llama_pcd_settings  settings;
    llama_pcd_seq_table sequences;
    llama_pcd_second    second;
    llama_pcd_twin_ids  ids;
    llama_pcd_states    states;

    llama_pcd_stats stats = {};

    llama_pcd_twins * twins = nullptr; // those of the batch that llama.cpp decodes; null: it has none

    // what llama_pcd_attention reads in the graph of a batch
    struct reading {
        std::map<int32_t, std::vector<int32_t>> heads; // by layer

        struct layer {
            size_t        i_cache;
            ggml_tensor * pays; // F32 [n_kv, n_tokens], the sum over the heads
        };
        std::map<int32_t, layer> found; // what of these the graph has
        std::string              refusal;
        bool                     to_end = false; // all of the graph is computed
    };
    reading * read = nullptr; // null: nothing

    // what only a graph shows
    bool has_rotations  = false; // some layer rotates
    bool hides_rotation = false; // a query or a key is rotated where we do not see it, so that its twin's would not be

    bool probing = false; // a graph is built to see this; nothing is added to it

    std::vector<const ggml_tensor *> seen; // meanwhile: its rotations, as the model built them

    // see llama_pcd_check
    int32_t check(const llama_pcd_params & p, std::string & err);

    // see llama_pcd_set; for parameters that check() found nothing wrong with. An exception if there is no memory.
    void set(const llama_pcd_params & p);

    // see llama_pcd_set_seq
    int32_t set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err);

    // what the context is set to, or holds, that twins cannot be evaluated with; empty: nothing. Changes between decodes.
    std::string conflict() const;

    // the same for one sequence
    std::string conflict_of(llama_seq_id seq_id) const;

private:
    bool has_graph    = false; // one was built, so what it shows is known
    bool has_room     = false;
    bool has_reserved = false; // memory for graphs with PCD

    void probe();

    std::string check_memory(const llama_pcd_params & p) const;
    std::string check_model (const llama_pcd_params & p) const;

    // once: rows and states for twins beside the caller's
    void make_room();
};
