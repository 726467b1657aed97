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
static ggml_tensor * build_cells(ggml_context * ctx, ggml_tensor * t, int dim, const llama_pcd_view::cell_range & cells, bool contiguous) {
    const auto part = [&](int64_t i0, int64_t n) {
        int64_t ne[4] = { t->ne[0], t->ne[1], t->ne[2], t->ne[3] };
        ne[dim] = n;
        return ggml_view_4d(ctx, t, ne[0], ne[1], ne[2], ne[3], t->nb[1], t->nb[2], t->nb[3], i0*t->nb[dim]);
    };

    ggml_tensor * tail = part(cells.begin, t->ne[dim] - cells.begin);
    if (cells.head) {
        return ggml_concat(ctx, part(0, llama_pcd_view::CELL_BLOCK), tail, dim);
    }
    return contiguous ? ggml_cont(ctx, tail) : tail;
}

llama_pcd_graph::attended llama_pcd_graph::restricted(const attended & all, const llama_pcd_view::cell_range & range) const {
    const bool v_trans = all.v->nb[1] > all.v->nb[2];

    return {
        build_cells(ctx, all.k, 2, range, false),
        // transposed values are put together with their dimensions in the order of memory
        v_trans ?
            ggml_permute(ctx, build_cells(ctx, ggml_permute(ctx, all.v, 0, 2, 1, 3), 0, range, false), 0, 2, 1, 3) :
            build_cells(ctx, all.v, 2, range, false),
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

// The query heads that share one head of keys and attend together; 1: n queries do not. Heads must not differ otherwise, and who
// watches the computation (cb_eval, a tap) sees the weights of each head as llama.cpp lays them out.
static int64_t n_grouped(const llama_pcd_graph::attn & args, int64_t n) {
    const auto & cparams = args.gctx.cparams;

    const bool alike = !args.kq_b && !args.sinks && !args.v_mla && args.gctx.hparams.f_max_alibi_bias == 0.0f;
    const bool can   = n == 1 && alike && !cparams.flash_attn && !cparams.cb_eval && args.q->ne[1] % args.k->ne[1] == 0;

    return can ? args.q->ne[1]/args.k->ne[1] : 1;
}

// Rows [i0, i0 + n) of the mask, of the cells in a range; that of a grouped query once for each head of its group. All layers with
// this mask share it.
ggml_tensor * llama_pcd_graph::build_mask(const attn & args, int64_t i0, int64_t n, const llama_pcd_view::cell_range & range) {
    const int64_t n_group = n_grouped(args, n);

    ggml_tensor *& res = masks[{ args.kq_mask, i0, n, range.begin, n_group }];
    if (!res) {
        res = view_rows(ctx, args.kq_mask, i0, n);
        if (range.begin > 0) {
            res = build_cells(ctx, res, 0, range, true);
        }
        if (n_group > 1) {
            res = ggml_repeat_4d(ctx, res, res->ne[0], n_group, 1, 1);
        }
    }
    return res;
}

// A single query: the heads that share keys become rows of one multiplication, which reads these keys once for all of them. Alone,
// each head would be a multiplication of a matrix with a vector.
ggml_tensor * llama_pcd_graph::build_grouped(const attn & args, const attended & cells, int64_t i0, int64_t n_group) const {
    const int64_t n_head_kv = cells.k->ne[1];

    const ggml_tensor * q = args.q;
    ggml_tensor * heads = ggml_view_3d(ctx, args.q, q->ne[0], n_head_kv, n_group, n_group*q->nb[1], q->nb[1], i0*q->nb[2]);

    ggml_tensor * cur = args.gctx.build_attn_mha(heads, cells.k, cells.v, nullptr, cells.mask,
            nullptr, nullptr, args.n_kv_max, args.kq_scale, args.il);

    cur = ggml_permute(ctx, ggml_reshape_3d(ctx, cur, cur->ne[0]/n_head_kv, n_head_kv, n_group), 0, 2, 1, 3);
    return ggml_cont_2d(ctx, cur, cur->ne[0]*q->ne[1], 1);
}

// attention of the tokens [i0, i0 + n) to these cells
ggml_tensor * llama_pcd_graph::build_part(const attn & args, const attended & cells, int64_t i0, int64_t n) const {
    const int64_t n_group = n_grouped(args, n);
    if (n_group > 1) {
        return build_grouped(args, cells, i0, n_group);
    }
    ggml_tensor * q = ggml_view_3d(ctx, args.q, args.q->ne[0], args.q->ne[1], n, args.q->nb[1], args.q->nb[2], i0*args.q->nb[2]);

    return args.gctx.build_attn_mha(q, cells.k, cells.v, view_rows(ctx, args.kq_b, i0, n), cells.mask,
            args.sinks, args.v_mla, args.n_kv_max, args.kq_scale, args.il);
}

ggml_tensor * llama_pcd_graph::build_attn(const attn & args) {
    if (!builds_in(args.gctx.ctx0) || splitting) {
        return nullptr;
    }

    // a layer that shares another's cells stores no keys: its rotation must not reach the next layer
    rotations.clear();
    n_attn++;
    keep_mask(args.kq_mask);

    const auto * layer = n_twin > 0 ? core->second.find_layer(args.k->view_src) : nullptr;
    if (!layer) {
        return nullptr;
    }

    const bool separate = core->settings.separate();
    const bool second   = layer->k2 && (separate || (core->settings.rerotated() && layer->rotates && n_turned > 0));

    llama_pcd_view::cell_range range;
    if (!args.kq_b) {
        range = inp->visible[core->second.cache_of(*layer)];
    }
    // a token and its twin: each by itself, its heads grouped
    const bool apart = n_tokens == 2 && n_twin == 1 && n_grouped(args, 1) > 1;

    if (!second && range.begin == 0 && !apart) {
        return nullptr;
    }

    // twins that look at the first keys are with the standard tokens if others look at the second ones
    const int64_t n_last  = second && !separate ? n_turned : n_twin;
    const int64_t n_first = n_tokens - n_last;

    attended cells = second ? second_of(args, *layer) : attended { args.k, args.v, nullptr };

    if (range.begin > 0) {
        cells = restricted(cells, range);
    }
    cells.mask = build_mask(args, n_first, n_last, range);

    splitting = true;

    ggml_tensor * cur = build_part(args, cells, n_first, n_last);

    if (n_first > 0) {
        const attended own = { args.k, args.v, build_mask(args, 0, n_first, {}) };

        cur = ggml_concat(ctx, build_part(args, own, 0, n_first), cur, 1);
    }

    splitting = false;

    ggml_build_forward_expand(gf, cur);

    return cur;
}
