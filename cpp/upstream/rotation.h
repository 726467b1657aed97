// One rotary call of a model's graph, and how to repeat it with other factors. Knows nothing of twins, tables and caches.

#pragma once

#include "ggml.h"

#include <cmath>
#include <cstring>

#ifndef LLAMA_PCD_OWN_SOURCE
#error "here ggml_rope_ext would be PCD's (llama-pcd-rope.h)"
#endif

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

inline llama_pcd_rotation::llama_pcd_rotation(const ggml_tensor * rope) : factors(rope->src[2]) {
    memcpy(params, rope->op_params, sizeof(params));
}

inline ggml_tensor * llama_pcd_rotation::turn(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, int offset) const {
    int sections[GGML_MROPE_SECTIONS] = {};

    ggml_tensor * res = mode() & GGML_ROPE_TYPE_MROPE ?
        ggml_rope_multi(ctx, a, pos, factors, n_dims(), sections, mode(), 0, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f) :
        ggml_rope_ext  (ctx, a, pos, factors, n_dims(), mode(), 0, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f);
    memcpy(res->op_params, params, sizeof(params));

    // with YaRN ggml scales the magnitude in every rotation
    float freq_scale, ext_factor;
    memcpy(&freq_scale, params + 6, sizeof(float));
    memcpy(&ext_factor, params + 7, sizeof(float));
    const float attn_factor = ext_factor == 0.0f ? 1.0f : 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale));
    memcpy(res->op_params + 8, &attn_factor, sizeof(float));

    return offset > 0 ? ggml_rope_set_offset(res, offset) : res;
}
