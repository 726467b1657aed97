// Repeats a rotation with other factors, and follows tensors through a graph.

#include "upstream/rotation.h"

#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

ggml_tensor * llama_pcd_rotation::build(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, float attn_factor) const {
    if (!multi) {
        return ggml_rope_ext(ctx, a, pos, factors, n_dims, mode, n_ctx_orig,
                freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow);
    }
    int sections_in[GGML_MROPE_SECTIONS];
    std::copy(sections, sections + GGML_MROPE_SECTIONS, sections_in);

    return ggml_rope_multi(ctx, a, pos, factors, n_dims, sections_in, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow);
}

ggml_tensor * llama_pcd_rotation::turn(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, int offset) const {
    // with YaRN ggml scales the magnitude in every rotation
    ggml_tensor * res = build(ctx, a, pos, factors, ext_factor == 0.0f ? 1.0f : 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)));

    return offset > 0 ? ggml_rope_set_offset(res, offset) : res;
}

bool llama_pcd_descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth,
        const std::function<void(const ggml_tensor *)> & on_path) {
    if (!t || depth == 0) {
        return false;
    }
    if (t == from) {
        return true;
    }
    if (t->op == GGML_OP_ROPE) { // a key is never rotated twice, so the search ends at its rotation
        return false;
    }
    if (llama_pcd_descends_from(t->src[0], from, depth - 1, on_path) || llama_pcd_descends_from(t->src[1], from, depth - 1, on_path)) {
        if (on_path) {
            on_path(t);
        }
        return true;
    }
    return false;
}

std::vector<float> llama_pcd_own_factors(const ggml_tensor * factors, int64_t n) {
    std::vector<float> res(n, 1.0f);
    if (factors) {
        GGML_ASSERT(factors->type == GGML_TYPE_F32 && factors->ne[0] >= n);
        ggml_backend_tensor_get(factors, res.data(), 0, n*sizeof(float));
    }
    return res;
}

llama_pcd_table::llama_pcd_table(
        const llama_model & model, const ggml_tensor * factors, int64_t n, const char * name) :
    ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true })) {
    const bool beside = factors && factors->buffer;

    t = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n);
    ggml_set_name(t, name);
    buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            ctx.get(), beside ? ggml_backend_buffer_get_type(factors->buffer) : ggml_backend_dev_buffer_type(model.dev_layer(0))));
    if (!buf) {
        throw std::runtime_error(std::string("pcd: no memory for the tensor ") + name);
    }
}

bool llama_pcd_on_cann(const llama_model & model) {
    return std::any_of(model.devices.begin(), model.devices.end(), [](const auto & cur) {
        return std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(cur.dev))) == "CANN";
    });
}
