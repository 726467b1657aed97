// Tables on the device: the frequency factors that rotate to theta* (Eq. 4), and the inverse of learned weights. Turns stored
// keys with them. Knows nothing of twins and cells.
//
// ggml divides an angle by its frequency factor. So with the model's own factor ff, theta* = theta / (ff / rho), and
// theta* - theta = theta / (ff / (rho - 1)): no kernel has to be added.

#pragma once

#include "upstream/rotation.h"
#include "twins/settings.h"

#include "ggml-cpp.h"

#include <vector>

struct llama_pcd_tables {
    enum table_kind {
        DIFFERENCE, // theta* - theta
        WHOLE,      // theta*
    };

    llama_pcd_tables(const llama_model & model, const llama_pcd_settings & settings) : model(model), settings(settings) {}

    ggml_tensor * table(table_kind kind, ggml_tensor * factors, int n_dims);

    // 1/w for learned weights w
    ggml_tensor * inverse(ggml_tensor * weights);

    // what all tables hold with these parameters; filling them with it, which cannot fail
    using contents = std::vector<std::vector<float>>;

    contents contents_for(const llama_pcd_params & p) const;
    void     write(const contents & data);

    // forget the tables that came after the first n
    size_t size() const { return tables.size(); }
    void   cut(size_t n) { tables.resize(n); }

    // turn a whole key, as it is stored, by pos with a table; hadamard: the transform of the cache, null if it has none
    ggml_tensor * turn_key(ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos,
            const llama_pcd_rotation & r, ggml_tensor * hadamard, table_kind kind);

private:
    struct entry {
        table_kind    kind    = WHOLE;
        ggml_tensor * factors = nullptr; // or weights
        ggml_tensor * t       = nullptr;

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    const llama_model        & model;
    const llama_pcd_settings & settings;

    std::vector<entry> tables;
    std::vector<entry> inverses;

    static entry make(ggml_tensor * factors, int64_t n, ggml_backend_buffer_type_t buft, const char * name);

    static std::vector<float> content_of(const entry & cur, const llama_pcd_params & p);
};
