// Attention of standard tokens and of twins side by side, where twins have second keys or look at fewer cells.

#include "llama-pcd-graph.h"

// the same cells of second tensors
llama_pcd_graph::attended llama_pcd_graph::second_of(const attn & args, const llama_pcd_layer & layer) const {
    const ggml_tensor * k = args.k;
    const ggml_tensor * v = args.v;

    attended res = { args.k, args.v, nullptr };

    res.k = ggml_view_4d(ctx, layer.k2, k->ne[0], k->ne[1], k->ne[2], k->ne[3],
            ggml_row_size(layer.k2->type, k->ne[0]), layer.k2->nb[1], layer.k2->nb[2], k->view_offs/layer.k1->nb[1]*layer.k2->nb[1]);

    if (core->settings.separate()) {
        res.v = layer.v2 ?
            ggml_view_4d(ctx, layer.v2, v->ne[0], v->ne[1], v->ne[2], v->ne[3], v->nb[1], v->nb[2], v->nb[3], v->view_offs) :
            ggml_view_4d(ctx, res.k,    v->ne[0], v->ne[1], v->ne[2], v->ne[3], res.k->nb[1], res.k->nb[2], res.k->nb[3], 0);
        if (!layer.v2 && ggml_is_quantized(res.k->type) && !args.gctx.cparams.flash_attn) {
            res.v = ggml_cast(ctx, res.v, GGML_TYPE_F32); // it will be transposed, which blocks cannot be
        }
    }
    return res;
}

// the cells in a range, along one dimension of t
static ggml_tensor * build_cells(ggml_context * ctx, ggml_tensor * t, int dim, const llama_pcd_view::cell_range & cells) {
    const auto part = [&](int64_t i0, int64_t i1) {
        int64_t ne[4] = { t->ne[0], t->ne[1], t->ne[2], t->ne[3] };
        ne[dim] = i1 - i0;
        return ggml_view_4d(ctx, t, ne[0], ne[1], ne[2], ne[3], t->nb[1], t->nb[2], t->nb[3], i0*t->nb[dim]);
    };

    ggml_tensor * tail = part(cells.begin, cells.end);
    return cells.head ? ggml_concat(ctx, part(0, llama_pcd_view::CELL_BLOCK), tail, dim) : tail;
}

static bool is_transposed(const ggml_tensor * v) {
    return v->nb[1] > v->nb[2];
}

llama_pcd_graph::attended llama_pcd_graph::restricted(const attended & all, const llama_pcd_view::cell_range & range) const {
    return {
        build_cells(ctx, all.k, 2, range),
        // transposed values are put together with their dimensions in the order of memory
        is_transposed(all.v) ?
            ggml_permute(ctx, build_cells(ctx, ggml_permute(ctx, all.v, 0, 2, 1, 3), 0, range), 0, 2, 1, 3) :
            build_cells(ctx, all.v, 2, range),
        all.mask,
    };
}

// the rows [i0, i0 + n) of a mask or of a bias
static ggml_tensor * view_rows(ggml_context * ctx, ggml_tensor * t, int64_t i0, int64_t n) {
    if (!t) {
        return nullptr;
    }
    const bool flat = t->ne[2] == 1 && t->ne[3] == 1;
    return ggml_view_4d(ctx, t, t->ne[0], n, t->ne[2], t->ne[3],
            t->nb[1], flat ? n*t->nb[1] : t->nb[2], flat ? n*t->nb[1] : t->nb[3], i0*t->nb[1]);
}

// Whether attention is two products here, around a softmax. Heads must not differ otherwise, and who watches the computation
// (cb_eval, a tap) sees the weights of each head as llama.cpp lays them out.
static bool multiplies(const llama_pcd_graph::attn & args) {
    const auto & gctx = args.gctx;

    const bool alike = !args.kq_b && !args.sinks && !args.v_mla && gctx.hparams.f_max_alibi_bias == 0.0f && gctx.arch != LLM_ARCH_GROK;

    return alike && !gctx.cparams.flash_attn && !gctx.cparams.cb_eval && is_transposed(args.v) && args.k->ne[3] == 1;
}

// The query heads that share one head of keys, where they attend together, as rows of one product: that is so where they are more
// than the tokens, which are the rows otherwise. A product reads its keys once for all rows. 1: they do not.
static int64_t n_grouped(const llama_pcd_graph::attn & args, int64_t n) {
    const int64_t n_group = args.q->ne[1]/args.k->ne[1];

    return multiplies(args) && n < n_group ? n_group : 1;
}

// Rows [i0, i0 + n) of the mask, of the cells in a range; those of grouped queries once for each head of a group. All layers with
// this mask share it.
ggml_tensor * llama_pcd_graph::build_mask(const attn & args, int64_t i0, int64_t n, const llama_pcd_view::cell_range & range) {
    const int64_t n_group = n_grouped(args, n);

    ggml_tensor *& res = masks[{ args.kq_mask, i0, n, range.begin, range.end, n_group }];
    if (!res) {
        res = build_cells(ctx, view_rows(ctx, args.kq_mask, i0, n), 0, range);
        if (n_group > 1) {
            res = ggml_reshape_3d(ctx, res = ggml_is_contiguous(res) ? res : ggml_cont(ctx, res), res->ne[0], 1, n);
            res = ggml_reshape_2d(ctx, ggml_repeat_4d(ctx, res, res->ne[0], n_group, n, 1), res->ne[0], n_group*n);
        } else if (!ggml_is_contiguous(res)) {
            res = ggml_cont(ctx, res);
        }
    }
    return res;
}

// Attention of the tokens [i0, i0 + n) as llama.cpp's, but with rows for the heads of a group or for tokens, whichever are more.
ggml_tensor * llama_pcd_graph::build_products(const attn & args, const attended & cells, int64_t i0, int64_t n) const {
    const auto &  gctx      = args.gctx;
    const auto &  hparams   = gctx.hparams;
    const int64_t n_head_kv = cells.k->ne[1];
    const int64_t n_group   = args.q->ne[1]/n_head_kv;
    const bool    grouped   = n < n_group;

    // [., heads of a group, tokens, groups]
    ggml_tensor * q = ggml_view_4d(ctx, args.q, args.q->ne[0], n_group, n, n_head_kv,
            args.q->nb[1], args.q->nb[2], n_group*args.q->nb[1], i0*args.q->nb[2]);
    if (!grouped) {
        q = ggml_permute(ctx, q, 0, 2, 1, 3);
    }

    ggml_tensor * kq = ggml_mul_mat(ctx, ggml_permute(ctx, cells.k, 0, 3, 1, 2), q);
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    if (hparams.attn_soft_cap) {
        kq = ggml_tanh (ctx, ggml_scale(ctx, kq, 1.0f/hparams.f_attn_logit_softcapping));
        kq = ggml_scale(ctx, kq, hparams.f_attn_logit_softcapping);
    }
    if (grouped) {
        kq = ggml_reshape_4d(ctx, kq, kq->ne[0], n_group*n, 1, n_head_kv);
    }
    kq = ggml_soft_max_ext(ctx, kq, cells.mask, args.kq_scale, 0.0f);

    ggml_tensor * cur = ggml_mul_mat(ctx, ggml_permute(ctx, cells.v, 0, 3, 1, 2), kq);
    if (!gctx.cparams.offload_kqv) {
        ggml_backend_sched_set_tensor_backend(gctx.sched, cur, gctx.backend_cpu); // as llama.cpp does
    }

    const int64_t n_embd = cur->ne[0]*args.q->ne[1];

    cur = grouped ?
        ggml_permute(ctx, ggml_reshape_4d(ctx, cur, cur->ne[0], n_group, n, n_head_kv), 0, 1, 3, 2) :
        ggml_permute(ctx, cur, 0, 3, 1, 2);
    return ggml_is_contiguous(cur) ? ggml_reshape_2d(ctx, cur, n_embd, n) : ggml_cont_2d(ctx, cur, n_embd, n);
}

// attention of the tokens [i0, i0 + n) to these cells in a range
ggml_tensor * llama_pcd_graph::build_part(
        const attn & args, attended cells, int64_t i0, int64_t n, const llama_pcd_view::cell_range & range) {
    if (range.begin > 0 || range.end < args.k->ne[2]) {
        cells = restricted(cells, range);
    }
    cells.mask = build_mask(args, i0, n, range);

    if (multiplies(args)) {
        return build_products(args, cells, i0, n);
    }
    ggml_tensor * q = ggml_view_3d(ctx, args.q, args.q->ne[0], args.q->ne[1], n, args.q->nb[1], args.q->nb[2], i0*args.q->nb[2]);

    splitting = true;
    ggml_tensor * cur = args.gctx.build_attn_mha(q, cells.k, cells.v, view_rows(ctx, args.kq_b, i0, n), cells.mask,
            args.sinks, args.v_mla, args.n_kv_max, args.kq_scale, args.il);
    splitting = false;

    return cur;
}

ggml_tensor * llama_pcd_graph::build_attn(const attn & args) {
    if (!builds_in(args.gctx.ctx0) || splitting) {
        return nullptr;
    }

    // a layer that shares another's cells stores no keys: its rotation must not reach the next layer
    rotations.clear();
    n_attn++;

    const auto * layer = n_twin > 0 ? core->second.find_layer(args.k->view_src) : nullptr;
    if (!layer) {
        return nullptr;
    }

    const bool separate = core->settings.separate();
    const bool second   = layer->k2 && (separate || (core->settings.rerotated() && layer->rotates && n_turned > 0));

    llama_pcd_view::cell_range of_twins = inp->visible[core->second.cache_of(*layer)];
    if (args.kq_b) {
        of_twins = { 0, false, (uint32_t) args.k->ne[2] };
    }
    const llama_pcd_view::cell_range all = { 0, false, of_twins.end };

    const attended own = { args.k, args.v, nullptr };

    ggml_tensor * cur = nullptr;

    if (!second && of_twins.begin == 0) {
        // the same cells for all: only few tokens gain by grouped heads
        if (n_grouped(args, n_tokens) == 1) {
            return nullptr;
        }
        cur = build_part(args, own, 0, n_tokens, all);
    } else {
        // twins that look at the first keys are with the standard tokens if others look at the second ones
        const int64_t n_last  = second && !separate ? n_turned : n_twin;
        const int64_t n_first = n_tokens - n_last;

        cur = build_part(args, second ? second_of(args, *layer) : own, n_first, n_last, of_twins);
        if (n_first > 0) {
            cur = ggml_concat(ctx, build_part(args, own, 0, n_first, all), cur, 1);
        }
    }

    ggml_build_forward_expand(gf, cur);

    return cur;
}
