// Included last by llama.cpp's src/models/models.h: every rotary embedding of every architecture is built as it was asked for, and
// handed to PCD, which leaves it as it is where it is not on. Our own files are compiled with LLAMA_PCD_OWN_SOURCE (CMakeLists.txt):
// in them ggml_rope_ext is ggml's, whatever they include.

#pragma once

#include "ggml.h"

// what the model rotated, with what PCD adds
ggml_tensor * llama_pcd_rotated(ggml_context * ctx, ggml_tensor * rotated);

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs);

// a macro's own name is not expanded again
#ifndef LLAMA_PCD_OWN_SOURCE
#define ggml_rope_ext(ctx, ...)   llama_pcd_rotated(ctx, ggml_rope_ext  (ctx, __VA_ARGS__))
#define ggml_rope_multi(ctx, ...) llama_pcd_rotated(ctx, ggml_rope_multi(ctx, __VA_ARGS__))
#define ggml_rope(ctx, ...)       llama_pcd_rotated(ctx, ggml_rope      (ctx, __VA_ARGS__))
#define ggml_rope_set_offset      llama_pcd_rope_set_offset
#endif
