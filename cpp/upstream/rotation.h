// One rotary call of a model's graph, and what can be said of tensors around it. Knows nothing of twins, tables and caches.

#pragma once

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>
#include <functional>
#include <vector>

struct llama_model;

struct llama_pcd_rotation {
    ggml_tensor * out     = nullptr; // the rotated tensor; null: this layer does not rotate
    ggml_tensor * factors = nullptr; // the model's own frequency factors

    ggml_tensor * weights = nullptr; // what multiplies the key after its rotation

    bool  multi      = false; // positions of several sections (M-RoPE)
    bool  weighed    = false; // the key is changed after its rotation otherwise than by one such multiplication
    bool  hadamard   = false; // the cache stores the key Hadamard-rotated
    int   n_dims     = 0;
    int   mode       = 0;
    int   n_ctx_orig = 0;
    int   offset     = 0;
    int   sections[GGML_MROPE_SECTIONS] = {};
    float freq_base  = 0.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float beta_fast  = 0.0f;
    float beta_slow  = 0.0f;

    // `a` rotated by pos with these frequency factors, otherwise as this rotation does it; attn_factor: what the magnitude is scaled by
    ggml_tensor * build(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, float attn_factor) const;

    // the same behind this rotation, which scaled the magnitude already, from another dimension on
    ggml_tensor * turn(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, int offset) const;
};

// whether t is made from `from`, in at most so many steps and without another rotation in between;
// `on_path` is called for each operation on the way, the first one first
bool llama_pcd_descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth,
        const std::function<void(const ggml_tensor *)> & on_path = {});

// the first n of a model's own frequency factors (or other numbers), 1 where it has none
std::vector<float> llama_pcd_own_factors(const ggml_tensor * factors, int64_t n);

// A table on the device: n floats beside a model's own frequency factors, or, if it has none (null), where the first layer lives
struct llama_pcd_table {
    llama_pcd_table(const llama_model & model, const ggml_tensor * factors, int64_t n, const char * name);

    void write(const std::vector<float> & data) const { ggml_backend_tensor_set(t, data.data(), 0, data.size()*sizeof(float)); }

    ggml_tensor * t;

private:
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
};

// whether this model is on a backend that uses the table of a graph's first rotation for the later ones too
bool llama_pcd_on_cann(const llama_model & model);
