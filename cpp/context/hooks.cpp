// What llama.cpp calls: the hooks that are functions (llama-pcd-hooks.h) and the wrappers around ggml's rotations (llama-pcd-rope.h).
// Each finds its part and calls it. With nothing turned on in a context, each is a test of a null pointer.

#include "context/context.h"
#include "graph/graph.h"
#include "llama-pcd-rope.h"

#include <algorithm>
#include <stdexcept>

bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret) {
    auto * pcd = llama_pcd_context::of(lctx);
    if (!pcd || pcd->nested) {
        return false;
    }
    ret = pcd->decode(batch);
    return true;
}

uint32_t llama_pcd_max_nodes(const llama_context & lctx) {
    auto * pcd = llama_pcd_context::of(lctx);
    if (!pcd) {
        return 0;
    }
    pcd->n_schedulers++;
    return pcd->n_nodes();
}

void llama_pcd_graph_begin(const llm_graph_context & gctx) {
    auto * pcd = llama_pcd_context::of(gctx.cparams);

    // graphs with twins and without, of one token and of many, may have as many nodes
    if (pcd && !pcd->core.probing && pcd->mixes_graphs() && !llama_pcd_forget_layout(gctx.sched)) {
        throw std::runtime_error("pcd: no memory to lay a graph out");
    }
    llama_pcd_graph::begin(gctx, pcd ? &pcd->core : nullptr);
}

void llama_pcd_store_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) {
    auto & graph = llama_pcd_graph::current();
    if (graph.builds_in(ctx)) {
        graph.store_k(kv, k_cur, k_idxs, il);
    }
}

ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il) {
    return llama_pcd_graph::current().build_attn({ gctx, q, k, v, kq_b, kq_mask, sinks, v_mla, n_kv_max, kq_scale, il });
}

bool llama_pcd_seq_removed(llama_memory_i & memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (memory.pcd && p0 < 0 && p1 < 0) {
        memory.pcd->seq_removed(seq_id);
    }
    return true;
}

//
// rotations: each builds what was asked for, and lets the parts add to it
//

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

static ggml_tensor * rotated(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor) {
    return llama_pcd_graph::current().rotated(ctx, r.build(ctx, a, pos, r.factors, attn_factor), a, r);
}

ggml_tensor * llama_pcd_rope_ext(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    const llama_pcd_rotation r = rotation_of(c, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, beta_fast, beta_slow);

    return rotated(ctx, a, b, r, attn_factor);
}

ggml_tensor * llama_pcd_rope_multi(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int sections[GGML_MROPE_SECTIONS], int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    llama_pcd_rotation r = rotation_of(c, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, beta_fast, beta_slow);
    r.multi = true;
    std::copy(sections, sections + GGML_MROPE_SECTIONS, r.sections);

    return rotated(ctx, a, b, r, attn_factor);
}

ggml_tensor * llama_pcd_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int n_dims, int mode) {
    // the defaults of ggml_rope()
    return llama_pcd_rope_ext(ctx, a, b, nullptr, n_dims, mode, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
}

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs) {
    if (llama_pcd_graph::current().offset(a, n_offs)) {
        return a;
    }
    return ggml_rope_set_offset(a, n_offs);
}
