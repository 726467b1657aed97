// One rotary call of a model's graph, and how to repeat it with other factors. Knows nothing of twins, tables and caches.

#pragma once

#include "ggml.h"

struct llama_pcd_rotation {
    ggml_tensor * out     = nullptr; // the rotated tensor; null: this layer does not rotate
    ggml_tensor * factors = nullptr; // the model's own frequency factors

    ggml_tensor * weights = nullptr; // what multiplies the key after its rotation

    bool weighed  = false; // the key is changed after its rotation otherwise than by one such multiplication
    bool hadamard = false; // the cache stores the key Hadamard-rotated
    int  offset   = 0;

    int32_t params[GGML_MAX_OP_PARAMS/sizeof(int32_t)] = {}; // of the operation, as ggml_rope_impl orders them

    llama_pcd_rotation() = default;
    explicit llama_pcd_rotation(const ggml_tensor * rope);

    int  n_dims() const { return params[1]; }
    int  mode()   const { return params[2]; }

    // `a`, which was rotated so, turned further by pos with these frequency factors, from another dimension on
    ggml_tensor * turn(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, int offset) const;
};
