// Repeats a rotation with other factors.

#include "upstream/rotation.h"

#include <cmath>
#include <cstring>

llama_pcd_rotation::llama_pcd_rotation(const ggml_tensor * rope) : factors(rope->src[2]) {
    memcpy(params, rope->op_params, sizeof(params));
}

ggml_tensor * llama_pcd_rotation::turn(
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
