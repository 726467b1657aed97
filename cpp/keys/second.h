// Tables on the device, which rotate to theta* (Eq. 4), and what PCD keeps beside the KV caches in the same cells: second keys
// (cache = rerotated), the keys rotated to theta*; and which of them are stale, cell by cell. They follow from the first keys, so what is
// stale is derived from them. Knows nothing of batches: only cells.

#pragma once

#include "twins/settings.h"
#include "upstream/memory.h"
#include "upstream/rotation.h"

#include <memory>
#include <vector>

struct llama_pcd_layer {
    size_t        i_cache;
    uint32_t      il;
    bool          rotates; // the model rotates this layer's keys
    ggml_tensor * k1;
    ggml_tensor * k2 = nullptr;  // null: not kept

    llama_pcd_rotation rotation = {}; // as last seen in a graph
};

struct llama_pcd_second {
    llama_pcd_second(llama_pcd & pcd, const llama_pcd_memory & memory, const llama_pcd_settings & settings);

    std::vector<llama_pcd_layer> layers; // of all caches

    llama_pcd_layer * find_layer(const ggml_tensor * k1);

    //
    // tables
    //
    // ggml divides an angle by its frequency factor. So with the model's own factor ff, theta* = theta / (ff / rho), and
    // theta* - theta = theta / (ff / (rho - 1)): no kernel has to be added.
    //

    // theta* - theta, beside n of the model's own frequency factors (null: it has none)
    ggml_tensor * difference(const ggml_tensor * factors, int64_t n) { return table("pcd_difference_table", factors, n); }

    // other frequencies are in force: graphs that are built from now on get tables of them
    void forget_tables() { tables.clear(); }

    // turn a whole key, as it is stored, to theta*; hadamard: the transform of the cache, null if it has none
    ggml_tensor * turn_key(
            ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos, const llama_pcd_rotation & r, ggml_tensor * hadamard);

    //
    // other settings
    //

    // second keys
    struct tensors {
        std::vector<ggml_tensor *> of; // of each layer; null: none

        std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs; // one for each kind of memory
    };
    using tensors_ptr = std::shared_ptr<tensors>;

    // What parameters p need: what is there and serves them, or something new; an exception if there is no memory. Nothing in force
    // changes. But while PCD is off, second keys of another type are freed first.
    tensors_ptr allocate(const llama_pcd_params & p);

    // exchange all tensors for others
    void swap(tensors_ptr & other) noexcept;

    // The settings are in force, with others of these tensors (changed) or not. If they need second keys, what was made for other
    // settings is stale. Else all stays for the settings before them. This cannot fail.
    void keep(bool changed);

    // free what the settings in force do not need
    void trim();

    const tensors_ptr & in_force() const { return all; }

    size_t n_bytes() const;

    //
    // what happens to the cells
    //

    void cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells);
    void cells_loaded(); // all of them

    // With PCD on, the graph of the micro-batch that was placed last stores second keys beside the first, with cache = rerotated. (If it
    // fails, llama.cpp empties these cells.)
    void cells_stored();

    // positions have changed, and the first keys are yet to follow
    void keys_shift();

    // derive the second keys that are stale from the first, which no shift may be about to move (llama_pcd::prepare); n counts the cells
    ggml_status derive(int64_t & n);

private:
    llama_pcd & pcd;

    const llama_pcd_memory   & memory;
    const llama_pcd_settings & settings;

    struct entry {
        const ggml_tensor *     source;
        ggml_tensor *           t;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };
    std::vector<entry> tables;

    ggml_tensor * table(const char * name, const ggml_tensor * source, int64_t n);

    llama_pcd_params from = {}; // what the tensors were made for

    tensors_ptr all; // null: none

    // of one cache
    struct cells_of {
        // Whether a cell's second keys are not those of the token that is in the cell. An empty cell may count as either: it is stale
        // again once a token is placed in it.
        std::vector<uint8_t> stale;

        std::vector<uint32_t> placed; // of the micro-batch that was placed last
    };
    std::vector<cells_of> caches;

    void drop();

    // some cells of one cache
    ggml_status derive_piece(size_t i_cache, const std::vector<uint32_t> & cells);
};
