// The wrappers around ggml's rotations (llama-pcd-rope.h): each builds what was asked for, and lets the parts add to it.

#include "llama-pcd-rope.h"
#include "graph/graph.h"
#include "extras/heads.h"

#include <algorithm>

static llama_pcd_rotation rotation_of(
        ggml_tensor * factors, int n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float beta_fast, float beta_slow) {
    llama_pcd_rotation r;
    r.factors    = factors;
    r.n_dims     = n_dims;
    r.mode       = mode;
    r.n_ctx_orig = n_ctx_orig;
    r.freq_base  = freq_base;
    r.freq_scale = freq_scale;
    r.ext_factor = ext_factor;
    r.beta_fast  = beta_fast;
    r.beta_slow  = beta_slow;
    return r;
}

ggml_tensor * llama_pcd_rope_ext(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    const llama_pcd_rotation r = rotation_of(c, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, beta_fast, beta_slow);

    if (ggml_tensor * cur = llama_pcd_heads::rotated(ctx, a, b, r, attn_factor)) {
        return cur;
    }

    return llama_pcd_graph::current().rotated(ctx, ggml_rope_ext(ctx, a, b, c, n_dims, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow), a, r);
}

ggml_tensor * llama_pcd_rope_multi(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int sections[GGML_MROPE_SECTIONS], int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    llama_pcd_rotation r = rotation_of(c, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, beta_fast, beta_slow);
    r.multi = true;
    std::copy(sections, sections + GGML_MROPE_SECTIONS, r.sections);

    llama_pcd_heads::rotated(ctx, a, b, r, attn_factor); // refuses it

    return llama_pcd_graph::current().rotated(ctx, ggml_rope_multi(ctx, a, b, c, n_dims, sections, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow), a, r);
}

ggml_tensor * llama_pcd_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int n_dims, int mode) {
    // the defaults of ggml_rope()
    return llama_pcd_rope_ext(ctx, a, b, nullptr, n_dims, mode, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
}

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs) {
    if (llama_pcd_heads::offset(a, n_offs) || llama_pcd_graph::current().offset(a, n_offs)) {
        return a;
    }
    return ggml_rope_set_offset(a, n_offs);
}
