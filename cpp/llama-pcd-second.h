// What PCD keeps beside the KV caches, in the same cells: second keys and, for cache = separate, second values; and whether they
// are up to date. Knows nothing of batches: only cells.
//
//   rerotated   the keys turned to theta*, derived from the first keys. One flag says that some may be stale.
//   separate    the keys and values of the twins. Each cell is fresh, or its twin has to be evaluated again.

#pragma once

#include "llama-pcd-memory.h"
#include "llama-pcd-tables.h"

#include <algorithm>
#include <string>
#include <vector>

struct llama_pcd_layer {
    uint32_t      il;
    bool          rotates; // the model rotates this layer's keys
    ggml_tensor * k1;
    ggml_tensor * v1;            // null: the values are a part of the keys
    ggml_tensor * k2 = nullptr;  // null: not kept
    ggml_tensor * v2 = nullptr;

    llama_pcd_rotation rotation = {}; // as last seen in a graph
};

// what is kept beside one KV cache
struct llama_pcd_kv {
    llama_kv_cache * kv;

    std::vector<llama_pcd_layer> layers;

    // cache = separate: whether the second keys and values of a cell were evaluated for the token in it
    std::vector<uint8_t> fresh;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;

    void forget() { std::fill(fresh.begin(), fresh.end(), 0); }
};

struct llama_pcd_second {
    // one entry for each cache of the memory, and what they take
    struct storage {
        std::vector<llama_pcd_kv> kvs;
        int64_t                   n_bytes = 0;
    };

    // for what the stored keys and values were made
    struct origin {
        bool             made   = false;
        llama_pcd_params params = {};
    };

    llama_pcd_second(llama_pcd & pcd, const llama_pcd_memory & memory, const llama_pcd_settings & settings, llama_pcd_tables & tables) :
        pcd(pcd), memory(memory), settings(settings), tables(tables) {}

    storage store;
    origin  from;

    bool stale = false; // cache = rerotated: some second keys no longer follow from the first

    void mark_stale() { stale = true; } // first keys change, or are stored without second ones

    // whether the store has what p needs; a store that has it, or why there is none
    bool is_enough(const llama_pcd_params & p) const;
    bool make     (const llama_pcd_params & p, storage & res, std::string & err) const;

    // the settings now in force need second keys: keep those that still serve them, forget others
    void follow_settings();

    llama_pcd_layer * find_layer(const llama_kv_cache & kv, int32_t il);
    llama_pcd_layer * find_layer(const ggml_tensor * k1);

    // the index of the cache that a layer belongs to
    size_t cache_of(const llama_pcd_layer & layer) const;

    bool weighs_keys() const; // see llama_pcd_rotation::weighed

    //
    // what happens to the cells
    //

    void cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo);
    void cells_loaded(llama_seq_id seq_id);

    // the twins of these cells were evaluated, for each cache; -1: none
    void set_fresh(const std::vector<std::vector<int32_t>> & cells);

    // positions are about to change under the first keys
    void keys_shift(const llama_kv_cache & kv);

    // cache = rerotated: derive all second keys from the first anew (llama-pcd-derive.cpp)
    ggml_status derive();

private:
    llama_pcd & pcd;

    const llama_pcd_memory   & memory;
    const llama_pcd_settings & settings;
    llama_pcd_tables         & tables;

    // The cells [c0, c1) (llama-pcd-derive.cpp). DIFFERENCE: second keys = first keys, turned by their position.
    // WHOLE: second keys, turned by what is to be added to their position.
    ggml_status turn_range(const llama_pcd_kv & cur, uint32_t c0, uint32_t c1, llama_pcd_tables::table_kind kind);

    // all cells in use, in pieces
    ggml_status turn(const llama_pcd_kv & cur, llama_pcd_tables::table_kind kind);
};
