// What PCD keeps beside the KV caches, in the same cells: second keys (cache = rerotated), the keys rotated to theta*; and which of
// them are stale, cell by cell. They follow from the first keys, so what is stale is derived from them. Knows nothing of batches:
// only cells.

#pragma once

#include "upstream/memory.h"
#include "keys/tables.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct llama_pcd_layer {
    size_t        i_cache;
    uint32_t      il;
    bool          rotates; // the model rotates this layer's keys
    ggml_tensor * k1;
    ggml_tensor * k2 = nullptr;  // null: not kept

    llama_pcd_rotation rotation = {}; // as last seen in a graph
};

// The cells whose second keys are not those of the token that is in the cell. An empty cell may count as either: it is
// stale again once a token is placed in it.
struct llama_pcd_stale {
    explicit llama_pcd_stale(uint32_t n_cells) : flags(n_cells, 0) {}

    bool any() const { return n > 0; } // without looking at the cells

    void set(uint32_t i, bool stale) {
        n       += stale - flags[i];
        flags[i] = stale;
        first    = stale ? std::min(first, i) : first;
    }
    void set_all() {
        flags.assign(flags.size(), 1);
        n     = flags.size();
        first = 0;
    }

    // those that are in use, in order; forgets those that are not
    std::vector<uint32_t> list(const llama_kv_cells & cells);

private:
    std::vector<uint8_t> flags;

    uint32_t n     = 0;
    uint32_t first = 0; // none before it is
};

// the second keys of one cache
struct llama_pcd_tensors {
    std::vector<ggml_tensor *> of; // of each layer; null: none

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs; // one for each kind of memory
};

// what is kept beside one KV cache
struct llama_pcd_kv {
    llama_pcd_kv(llama_kv_cache & kv, size_t index);

    llama_kv_cache * kv;

    std::vector<llama_pcd_layer> layers;

    llama_pcd_stale       stale;
    std::vector<uint32_t> placed; // cells of the micro-batch that was placed last
};

struct llama_pcd_second {
    llama_pcd_second(llama_pcd & pcd, const llama_pcd_memory & memory, const llama_pcd_settings & settings, llama_pcd_tables & tables);

    std::vector<llama_pcd_kv> kvs; // one for each cache of the memory

    llama_pcd_layer * find_layer(const llama_kv_cache & kv, int32_t il);
    llama_pcd_layer * find_layer(const ggml_tensor * k1);

    bool has_weighed_keys() const; // see llama_pcd_rotation::weighed

    //
    // other settings
    //

    // the tensors of each cache; null: it has none
    using tensors = std::vector<std::shared_ptr<llama_pcd_tensors>>;

    // What parameters p need: what is there and serves them, else it is allocated. None: there is no memory. Nothing in force changes.
    // But while PCD is off, second keys of another type are freed first.
    std::optional<tensors> allocate(const llama_pcd_params & p, std::string & err);

    // exchange all tensors for others
    void swap(tensors & other) noexcept;

    // The settings are in force, with others of these tensors (changed) or not. If they need second keys, what was made for other
    // settings is stale, and what they do not need is freed. Else all stays for the settings before them. This cannot fail.
    void keep(bool changed);

    // free what the settings in force do not need
    void trim();

    const tensors & in_force() const { return all; }

    size_t n_bytes() const;

    //
    // what happens to the cells
    //

    void cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells);
    void cells_loaded(llama_seq_id seq_id);

    // With PCD on, the graph of the micro-batch that was placed last stores second keys beside the first, with cache = rerotated. (If it
    // fails, llama.cpp empties these cells.)
    void cells_stored();

    // positions are about to change under the first keys
    void keys_shift();

    bool any_stale() const;

    // derive the second keys that are stale from the first, which no shift may be about to move (llama_pcd::prepare); n counts the cells
    ggml_status derive(int64_t & n);

private:
    llama_pcd & pcd;

    const llama_pcd_memory   & memory;
    const llama_pcd_settings & settings;
    llama_pcd_tables         & tables;

    llama_pcd_params from = {}; // what the tensors were made for

    tensors all;

    void link(); // show them to the layers
    void drop(size_t i);

    // the same for some cells of one cache
    ggml_status derive_piece(const llama_pcd_kv & cur, const std::vector<uint32_t> & cells);
};
