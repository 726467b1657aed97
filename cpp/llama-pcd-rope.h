// Included last by llama.cpp's src/models/models.h: every rotary embedding of every architecture is built through these wrappers.
// Without PCD on the context they build exactly what was asked for. Our own files are compiled with LLAMA_PCD_OWN_SOURCE
// (CMakeLists.txt): in them ggml_rope_ext is ggml's, whatever they include.

#pragma once

#include "ggml.h"

ggml_tensor * llama_pcd_rope_ext(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow);

ggml_tensor * llama_pcd_rope_multi(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int sections[GGML_MROPE_SECTIONS], int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow);

ggml_tensor * llama_pcd_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int n_dims, int mode);

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs);

#ifndef LLAMA_PCD_OWN_SOURCE
#define ggml_rope_ext        llama_pcd_rope_ext
#define ggml_rope_multi      llama_pcd_rope_multi
#define ggml_rope            llama_pcd_rope
#define ggml_rope_set_offset llama_pcd_rope_set_offset
#endif
