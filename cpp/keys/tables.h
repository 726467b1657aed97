// Tables on the device: the frequency factors that rotate to theta* (Eq. 4), and the inverse of learned weights. Turns stored
// keys with them. Knows nothing of twins and cells.
//
// ggml divides an angle by its frequency factor. So with the model's own factor ff, theta* = theta / (ff / rho), and
// theta* - theta = theta / (ff / (rho - 1)): no kernel has to be added.

#pragma once

#include "upstream/rotation.h"
#include "twins/settings.h"

#include <vector>

struct llama_pcd_tables {
    enum table_kind {
        DIFFERENCE, // theta* - theta
        INVERSE,    // 1/w for learned weights w
    };

    llama_pcd_tables(const llama_model & model, const llama_pcd_settings & settings) : model(model), settings(settings) {}

    // n numbers for the model's own frequency factors (null: it has none), or for weights
    ggml_tensor * table(table_kind kind, ggml_tensor * source, int64_t n);

    // other frequencies are in force: graphs that are built from now on get tables of them
    void forget() { tables.clear(); }

    // turn a whole key, as it is stored, to theta*; hadamard: the transform of the cache, null if it has none
    ggml_tensor * turn_key(
            ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos, const llama_pcd_rotation & r, ggml_tensor * hadamard);

private:
    struct entry {
        table_kind      kind;
        ggml_tensor *   source;
        llama_pcd_table table;
    };

    const llama_model        & model;
    const llama_pcd_settings & settings;

    std::vector<entry> tables;

    std::vector<float> content_of(table_kind kind, const ggml_tensor * source, int64_t n) const;
};
