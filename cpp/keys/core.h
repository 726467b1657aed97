// What the evaluation with twins stands on: settings, tables, second keys and twins, each part owning its
// functions; and what has to happen to all of them when PCD is set. Knows nothing of graphs and batches.

#pragma once

#include "keys/second.h"
#include "twins/limits.h"
#include "twins/twins.h"

#include <map>

struct llama_pcd_core {
    llama_pcd_core(llama_pcd & pcd, const llama_pcd_memory & memory);

    llama_pcd & pcd;

    const llama_pcd_memory & memory;

    llama_pcd_settings  settings;
    llama_pcd_seq_table sequences;
    llama_pcd_limits    limits;
    llama_pcd_tables    tables;
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

    bool probing = false; // a graph is built to see what only a graph shows; nothing is added to it

    // see llama_pcd_check, and llama_pcd_set for parameters that check() found nothing wrong with
    int32_t check(const llama_pcd_params & p, std::string & err);
    int32_t set  (const llama_pcd_params & p, std::string & err);

    // see llama_pcd_set_seq
    int32_t set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err);

private:
    bool has_room     = false;
    bool has_reserved = false; // memory for graphs with PCD

    void probe();

    // once: rows and states for twins beside the caller's; false: no memory, and err says so
    bool make_room(std::string & err);
};
