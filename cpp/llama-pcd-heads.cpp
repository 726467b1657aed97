// Ms-PoE: from some layer on, each attention head sees positions t / r with a ratio r of its own.
//
//   ratio      r_i = min + (max - min) i / H, i = 0 .. H-1. A rotation divides its angle by its frequency factors, so
//              that a head's factors times its ratio are position t / r: one rotation for each head, on every backend.
//   keys       of a group of query heads have the ratio of the group's first; the other queries keep their own.
//   order      static: head h has ratio r_(H-1-h). outlier: r_order[h], where order sorts the heads by how many keys get
//              more than three times the mean of the last token's attention, before any rotation. It is found in each
//              layer in the evaluation of the prompt, and kept.

#include "llama-pcd-impl.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>
#include <cstdio>
#include <stdexcept>

//
// the graph being built
//

// goes with a graph, to say whether it finds the order
class llm_graph_input_heads : public llm_graph_input_i {
public:
    llm_graph_input_heads(const llama_pcd * pcd) : pcd(pcd), generation(pcd->generation), finding(pcd->heads.finding) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);
    }

    bool can_reuse(const llm_graph_params & params) override {
        return params.cparams.pcd.get() == pcd && pcd->generation == generation && pcd->heads.finding == finding;
    }

    const llama_pcd * pcd;

    const uint32_t generation;
    const bool     finding;
};

struct heads_graph {
    llama_pcd * pcd = nullptr;

    ggml_context * ctx = nullptr;
    ggml_cgraph  * gf  = nullptr;

    int64_t n_tokens = 0;

    // The order of a layer's heads depends on its queries and keys, and whichever are rotated first need it already:
    // sort_by gets its operands once the others are there.
    int32_t       il      = -1;
    ggml_tensor * q       = nullptr; // before rotation
    ggml_tensor * k       = nullptr;
    ggml_tensor * k_out   = nullptr; // after it
    ggml_tensor * sort_by = nullptr;
    ggml_tensor * factors = nullptr; // [n_dims/2, n_head]

    bool is_whole() const { return il < 0 || (q && k); }
};

static thread_local heads_graph graph;

static void refuse(const std::string & reason) {
    if (graph.pcd->heads.reason.empty()) {
        graph.pcd->heads.reason = reason;
    }
}

void llama_pcd_heads_begin(const llm_graph_context & gctx) {
    graph = {};

    llama_pcd * pcd = gctx.cparams.pcd.get();
    if (!pcd || !pcd->heads.on) {
        return;
    }

    graph.pcd      = pcd;
    graph.ctx      = gctx.ctx0;
    graph.gf       = gctx.gf;
    graph.n_tokens = gctx.n_tokens;

    if (pcd->heads.n_prompt > 0 && pcd->heads.n_prompt != gctx.n_tokens) {
        refuse("the memory splits the prompt");
    }

    gctx.res->add_input(std::make_unique<llm_graph_input_heads>(pcd));
}

void llama_pcd_heads_end() {
    if (graph.pcd && !graph.is_whole()) {
        refuse(format("layer %d does not rotate both queries and keys", graph.il));
    }
    graph = {};
}

// the layer whose weights a tensor was made with
static int32_t layer_of(const ggml_tensor * t, int depth = 12) {
    int il = -1;
    if (!t || depth == 0 || sscanf(t->name, "blk.%d.", &il) == 1) {
        return il;
    }
    for (const ggml_tensor * src : t->src) {
        il = layer_of(src, depth - 1);
        if (il >= 0) {
            break;
        }
    }
    return il;
}

// what sorts the heads: most outliers first, of equal counts the lower head first
static ggml_tensor * build_sort_by(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k) {
    const int64_t n_head   = q->ne[1];
    const int64_t n_tokens = q->ne[2];

    // the last token's attention to all of them, [n_tokens, 1, n_head]
    q = ggml_cont(ctx, ggml_view_3d(ctx, q, q->ne[0], 1, n_head, q->nb[2], q->nb[1], (n_tokens - 1)*q->nb[2]));

    ggml_tensor * cur = ggml_mul_mat(ctx, ggml_permute(ctx, k, 0, 2, 1, 3), q);
    ggml_prec_set_acc(cur, GGML_PREC_F32);
    cur = ggml_soft_max_ext(ctx, cur, nullptr, 1.0f/sqrtf(float(q->ne[0])), 0.0f);

    // a softmax over n keys has the mean 1/n
    cur = ggml_step(ctx, ggml_scale_bias(ctx, cur, 1.0f, -3.0f/n_tokens));
    cur = ggml_reshape_1d(ctx, ggml_sum_rows(ctx, cur), n_head);

    return ggml_add(ctx, ggml_scale(ctx, cur, -float(n_head)), ggml_arange(ctx, 0.0f, float(n_head), 1.0f));
}

// frequency factors of a layer's heads, while its order is not known yet: q or k is a
static bool build_order(ggml_context * ctx, ggml_tensor * a, const llama_pcd_rotation & r, int32_t il) {
    auto &        pcd     = *graph.pcd;
    const auto &  hparams = pcd.lctx.get_model().hparams;
    const int64_t n_head  = hparams.n_head(il);

    if (graph.il != il) {
        if (!graph.is_whole()) {
            refuse(format("layer %d does not rotate both queries and keys", graph.il));
        }
        graph.il      = il;
        graph.q       = nullptr;
        graph.k       = nullptr;
        graph.k_out   = nullptr;
        graph.sort_by = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head);
        graph.factors = ggml_get_rows(ctx, pcd.head_table(-1, r.factors, r.n_dims, n_head),
                ggml_argsort(ctx, graph.sort_by, GGML_SORT_ORDER_ASC));

        ggml_set_name(graph.sort_by, "pcd_sort_by");
    }

    // with as many key heads as query heads, queries come first; that is checked where keys are stored
    const bool is_q = a->ne[1] == n_head && (n_head != hparams.n_head_kv(il) || !graph.q);
    auto *&    mine = is_q ? graph.q : graph.k;

    if (mine || graph.factors->ne[0] != r.n_dims/2) {
        refuse(format("layer %d rotates more than its queries and keys", il));
        return false;
    }
    mine = a;

    if (graph.is_whole()) {
        // as ggml_cont() would have done
        graph.sort_by->op     = GGML_OP_CONT;
        graph.sort_by->src[0] = build_sort_by(ctx, graph.q, graph.k);

        ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, graph.factors, pcd.head_table(il, r.factors, r.n_dims, n_head)));
    }

    return true;
}

ggml_tensor * llama_pcd_heads_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor) {
    if (!graph.pcd || graph.ctx != ctx) {
        return nullptr;
    }

    auto &       pcd     = *graph.pcd;
    auto &       heads   = pcd.heads;
    const auto & hparams = pcd.lctx.get_model().hparams;

    const int32_t il = layer_of(a);
    if (il >= 0 && il < heads.params.first_layer) {
        return nullptr;
    }
    if (il < 0 || il >= (int32_t) hparams.n_layer()) {
        refuse("it rotates something that is no layer's own");
        return nullptr;
    }

    const int64_t n_head    = hparams.n_head(il);
    const int64_t n_head_kv = hparams.n_head_kv(il);

    if (r.multi) {
        refuse("its positions have several sections (M-RoPE)");
        return nullptr;
    }
    if ((a->ne[1] != n_head && a->ne[1] != n_head_kv) || a->ne[2] != graph.n_tokens || a->ne[3] != 1) {
        refuse(format("layer %d rotates something else than the queries and keys of its heads", il));
        return nullptr;
    }

    const bool outlier = heads.params.order == LLAMA_PCD_HEAD_ORDER_OUTLIER;
    const bool finding = outlier && heads.finding;

    if (finding && !build_order(ctx, a, r, il)) {
        return nullptr;
    }
    ggml_tensor * factors = finding ? graph.factors : pcd.head_table(outlier ? il : -1, r.factors, r.n_dims, n_head);

    const int64_t n_each = n_head/a->ne[1]; // query heads for each head of a

    std::vector<ggml_tensor *> parts;
    for (int64_t h = 0; h < a->ne[1]; ++h) {
        parts.push_back(ggml_rope_ext(ctx,
                ggml_view_3d(ctx, a, a->ne[0], 1, a->ne[2], a->nb[1], a->nb[2], h*a->nb[1]), pos,
                ggml_view_1d(ctx, factors, factors->ne[0], h*n_each*factors->nb[1]),
                r.n_dims, r.mode, r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow));
    }
    // neighbours first, so that no head is copied more than log2(n_head) times
    while (parts.size() > 1) {
        std::vector<ggml_tensor *> pairs;
        for (size_t i = 0; i < parts.size(); i += 2) {
            pairs.push_back(i + 1 < parts.size() ? ggml_concat(ctx, parts[i], parts[i + 1], 1) : parts[i]);
        }
        parts = std::move(pairs);
    }

    if (finding && a == graph.k) {
        graph.k_out = parts[0];
    }
    heads.n_rotated++;

    return parts[0];
}

bool llama_pcd_heads_offset(const ggml_tensor * a, int n_offs) {
    if (!graph.pcd || a->op == GGML_OP_ROPE) {
        return false;
    }
    if (n_offs != 0) {
        refuse("it rotates a part of each head in place");
    }
    return true;
}

void llama_pcd_heads_stored(const ggml_context * ctx, const ggml_tensor * k_cur, int32_t il) {
    if (graph.pcd && graph.ctx == ctx && graph.il == il && !(graph.k_out && llama_pcd_descends_from(k_cur, graph.k_out, 12))) {
        refuse(format("layer %d does not show which of its rotations is the key's", il));
    }
}

//
// frequency factors of each head
//

// r_0 .. r_(H-1)
static std::vector<float> ratios_of(const llama_pcd_head_ratios & p, int64_t n_head) {
    std::vector<float> res(n_head);
    for (int64_t i = 0; i < n_head; ++i) {
        res[i] = p.min_ratio + (p.max_ratio - p.min_ratio)*i/n_head;
    }
    return res;
}

// the model's own factors, 1 where it has none
static std::vector<float> own_factors(const ggml_tensor * factors, int64_t n) {
    std::vector<float> res(n, 1.0f);
    if (factors) {
        GGML_ASSERT(factors->type == GGML_TYPE_F32 && factors->ne[0] >= n);
        ggml_backend_tensor_get(factors, res.data(), 0, n*sizeof(float));
    }
    return res;
}

// [n_dims/2, n_head], kept on the device. il = -1: those of static heads, or of the ratios in their order. Else the ones
// of a layer whose order is found in the evaluation of a prompt, which writes them.
ggml_tensor * llama_pcd::head_table(int32_t il, ggml_tensor * factors, int n_dims, int64_t n_head) {
    for (const auto & cur : heads.tables) {
        if (cur.il == il && cur.factors == factors && cur.t->ne[0] == n_dims/2 && cur.t->ne[1] == n_head) {
            return cur.t;
        }
    }

    ggml_backend_buffer_type_t buft = factors && factors->buffer ?
        ggml_backend_buffer_get_type(factors->buffer) : ggml_backend_dev_buffer_type(lctx.model.dev_layer(std::max(il, 0)));

    ggml_init_params ip = { ggml_tensor_overhead(), nullptr, true };

    llama_pcd_heads::table cur;
    cur.il      = il;
    cur.factors = factors;
    cur.ctx.reset(ggml_init(ip));
    cur.t = ggml_new_tensor_2d(cur.ctx.get(), GGML_TYPE_F32, n_dims/2, n_head);
    ggml_set_name(cur.t, "pcd_head_factors");
    cur.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(cur.ctx.get(), buft));
    if (!cur.buf) {
        throw std::runtime_error("pcd: no memory for the frequency factors of each head");
    }

    const auto own    = own_factors(factors, n_dims/2);
    const auto ratios = ratios_of(heads.params, n_head);

    std::vector<float> data;
    for (int64_t h = 0; h < n_head; ++h) {
        const float ratio = heads.params.order == LLAMA_PCD_HEAD_ORDER_STATIC ? ratios[n_head - 1 - h] : ratios[h];
        for (const float f : own) {
            data.push_back(f*ratio);
        }
    }
    ggml_backend_tensor_set(cur.t, data.data(), 0, data.size()*sizeof(float));

    heads.tables.push_back(std::move(cur));

    return heads.tables.back().t;
}

int32_t llama_pcd::get_head_ratios(int32_t il, float * out, int32_t n) const {
    const auto & hparams = lctx.get_model().hparams;
    const bool   outlier = heads.params.order == LLAMA_PCD_HEAD_ORDER_OUTLIER;

    if (!heads.on || il < 0 || il >= (int32_t) hparams.n_layer()) {
        return -1;
    }
    const int32_t n_head = hparams.n_head(il);

    if (il < heads.params.first_layer) {
        std::fill_n(out, std::min(n, n_head), 1.0f);
        return n_head;
    }
    for (const auto & cur : heads.tables) {
        if (cur.il != (outlier ? il : -1) || cur.t->ne[1] != n_head || (outlier && !heads.has_order)) {
            continue;
        }
        const float own = own_factors(cur.factors, 1)[0];
        for (int32_t h = 0; h < std::min(n, n_head); ++h) {
            ggml_backend_tensor_get(cur.t, out + h, h*cur.t->nb[1], sizeof(float));
            out[h] /= own;
        }
        return n_head;
    }
    return -1;
}

//
// decode
//

// true if the batch was decoded here, or refused, with the result in ret
bool llama_pcd::decode_heads(const llama_batch_ext & batch, int & ret) {
    const bool outlier = heads.params.order == LLAMA_PCD_HEAD_ORDER_OUTLIER;

    std::string reason;

    for_each_kv([&](llama_kv_cache * kv) {
        if (kv->get_has_shift()) {
            reason = "keys that were rotated head by head cannot move to other positions; clear the memory and evaluate the text again";
        }
    });

    if (outlier && heads.finding) {
        const auto & tokens = batch.tokens;

        bool is_prompt = !tokens.empty();
        for (size_t i = 0; i < tokens.size(); ++i) {
            is_prompt &= tokens[i].pos[0] == (llama_pos) i && tokens[i].seq_ids == tokens[0].seq_ids;
        }
        if (!is_prompt) {
            reason = "the order of the heads is found in a whole prompt, one sequence from position 0 on, and this batch is none";
        } else if (tokens.size() > lctx.n_ubatch()) {
            reason = format("the order of the heads is found in a prompt that is evaluated at once, and this one has %d tokens; create the context with n_batch and n_ubatch of as many (n_ubatch is %d)",
                    (int) tokens.size(), (int) lctx.n_ubatch());
        }
    } else if (outlier && !heads.has_order) {
        reason = "the order of the heads is not known; call llama_pcd_find_head_order() and evaluate a prompt";
    }

    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason.c_str());
        ret = -1;
        return true;
    }
    if (!heads.finding) {
        return false;
    }

    heads.has_order = false;
    heads.n_prompt  = batch.tokens.size();
    heads.reason.clear();

    nested = true;
    try {
        ret = lctx.decode(batch);
    } catch (...) {
        nested         = false;
        heads.n_prompt = 0;
        throw;
    }
    nested         = false;
    heads.n_prompt = 0;

    if (ret == 0 && !heads.reason.empty()) {
        LLAMA_LOG_ERROR("%s: the order of the heads was not found: %s\n", __func__, heads.reason.c_str());
        heads.reason.clear();
        ret = -2;
    }
    if (ret == 0) {
        heads.has_order = true;
        heads.finding   = false;
    }
    return true;
}

//
// settings
//

static bool same_ratios(const llama_pcd_head_ratios & a, const llama_pcd_head_ratios & b) {
    return a.min_ratio == b.min_ratio && a.max_ratio == b.max_ratio && a.first_layer == b.first_layer && a.order == b.order;
}

int32_t llama_pcd::check_heads(const llama_pcd_head_ratios & p, std::string & err) const {
    const auto &  model   = lctx.get_model();
    const auto &  hparams = model.hparams;
    const int32_t n_layer = hparams.n_layer();

    if (p.order < 0 || p.order > LLAMA_PCD_HEAD_ORDER_OUTLIER) {
        err = format("order is %d, not an enum llama_pcd_head_order", p.order);
    } else if (!(p.min_ratio > 0.0f && p.min_ratio <= 1000.0f)) {
        err = format("min_ratio is %g, allowed: more than 0 and at most 1000", p.min_ratio);
    } else if (!(p.max_ratio >= p.min_ratio && p.max_ratio <= 1000.0f)) {
        err = format("max_ratio is %g, allowed: min_ratio (%g) to 1000", p.max_ratio, p.min_ratio);
    } else if (p.first_layer < 0 || p.first_layer >= n_layer) {
        err = format("first_layer is %d, allowed: 0 to %d, for this model has %d layers", p.first_layer, n_layer - 1, n_layer);
    }
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }

    const std::string arch = "the architecture '" + model.arch_name() + "' ";

    if (on) {
        err = "PCD is on, and over-rotates positions that all heads share; turn it off first";
    } else if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
        err = arch + "has no rotary positions to scale";
    } else if (hparams.n_pos_per_embd() > 1) {
        err = arch + "has positions of several sections (M-RoPE), which one ratio does not scale";
    } else if (hparams.is_mla()) {
        err = arch + "has one latent key for all heads (MLA), which cannot be rotated for each of them";
    } else if (llama_model_has_encoder(&model)) {
        err = arch + "has an encoder, and ratios are for the heads of a decoder alone";
    } else if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        err = "heads that are split over devices tensor by tensor cannot be rotated one by one; use another split_mode";
    } else if (llama_pcd_on_cann(model)) {
        err = "the CANN backend keeps one table for all rotations of a graph";
    } else if (p.order == LLAMA_PCD_HEAD_ORDER_OUTLIER && hparams.swa_type != LLAMA_SWA_TYPE_NONE) {
        err = arch + "has sliding-window layers, where outliers among all keys are not defined; use order=\"static\"";
    }
    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

int32_t llama_pcd::set_head_ratios(const llama_pcd_head_ratios * p, std::string & err) {
    if (!p) {
        if (heads.on) {
            heads.on      = false;
            heads.finding = false;
            reset_graphs();
        }
        return LLAMA_PCD_OK;
    }
    const int32_t status = check_heads(*p, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    lctx.synchronize();

    if (heads.n_rotated > 0 && same_ratios(*p, heads.params)) {
        if (!heads.on) {
            heads.on = true; // an order that was found is still there
            reset_graphs();
        }
        return LLAMA_PCD_OK;
    }

    llama_pcd_heads old = std::move(heads);

    heads         = {};
    heads.on      = true;
    heads.params  = *p;
    heads.finding = p->order == LLAMA_PCD_HEAD_ORDER_OUTLIER;

    const auto undo = [&]() {
        heads = std::move(old);
        lctx.sched_need_reserve = true;
        reset_graphs();
    };

    reset_graphs();

    // the graphs built here show what cannot run
    build_graphs(undo);
    heads.finding = false;

    if (heads.n_rotated == 0 && heads.reason.empty()) {
        heads.reason = "it has no rotary positions to scale";
    }
    if (!heads.reason.empty()) {
        err = "the architecture '" + lctx.get_model().arch_name() + "' cannot have a ratio for each head: " + heads.reason;
        undo();
        return LLAMA_PCD_UNSUPPORTED;
    }

    return LLAMA_PCD_OK;
}

int32_t llama_pcd::find_head_order(std::string & err) {
    if (!heads.on || heads.params.order != LLAMA_PCD_HEAD_ORDER_OUTLIER) {
        err = "there is no order to be found; set ratios with order = LLAMA_PCD_HEAD_ORDER_OUTLIER first (llama_pcd_set_head_ratios)";
        return LLAMA_PCD_INVALID;
    }
    heads.finding   = true;
    heads.has_order = false;
    return LLAMA_PCD_OK;
}
