// Rotates head by head, and sorts the heads of a layer by what its queries and keys show.

#include "extras/heads-graph.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>
#include <cstdio>

// goes with a graph, to say whether it finds the order
class llm_graph_input_heads : public llm_graph_input_i {
public:
    explicit llm_graph_input_heads(const llama_pcd_heads & heads) :
        heads(heads), generation(heads.pcd.generation), finding(heads.is_finding()) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);
    }

    bool can_reuse(const llm_graph_params & params) override {
        return params.cparams.pcd.get() == &heads.pcd && heads.pcd.generation == generation && heads.is_finding() == finding;
    }

    const llama_pcd_heads & heads;

    const uint32_t generation;
    const bool     finding;
};

struct pcd_heads_graph {
    llama_pcd_heads * heads = nullptr;

    ggml_context * ctx = nullptr;
    ggml_cgraph  * gf  = nullptr;

    int64_t n_tokens = 0;

    // The order of a layer's heads depends on its queries and keys, but whichever of them is rotated first needs it already:
    // so sort_by gets its operands when the other one is there.
    int32_t       il      = -1;
    ggml_tensor * q       = nullptr; // before rotation
    ggml_tensor * k       = nullptr;
    ggml_tensor * k_out   = nullptr; // after it
    ggml_tensor * sort_by = nullptr;
    ggml_tensor * factors = nullptr; // [n_dims/2, n_head]

    bool is_whole() const { return il < 0 || (q && k); }

    void refuse_half_layer() const {
        if (!is_whole()) {
            heads->refuse(format("layer %d does not rotate both queries and keys", il));
        }
    }

    void begin_layer(int32_t il, const llama_pcd_rotation & r, int64_t n_head);
    bool build_order(ggml_tensor * a, const llama_pcd_rotation & r, int32_t il);
};

static thread_local pcd_heads_graph graph;

void llama_pcd_heads_begin(const llm_graph_context & gctx, llama_pcd_heads * heads) {
    graph = {};

    if (!heads || !heads->on()) {
        return;
    }

    graph.heads    = heads;
    graph.ctx      = gctx.ctx0;
    graph.gf       = gctx.gf;
    graph.n_tokens = gctx.n_tokens;

    if (heads->n_prompt() > 0 && heads->n_prompt() != gctx.n_tokens) {
        heads->refuse("the memory splits the prompt");
    }

    gctx.res->add_input(std::make_unique<llm_graph_input_heads>(*heads));
}

void llama_pcd_heads_end() {
    if (graph.heads) {
        graph.refuse_half_layer();
    }
    graph = {};
}

//
// the order of the heads
//

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

void pcd_heads_graph::begin_layer(int32_t layer, const llama_pcd_rotation & r, int64_t n_head) {
    refuse_half_layer();

    il      = layer;
    q       = nullptr;
    k       = nullptr;
    k_out   = nullptr;
    sort_by = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head);
    factors = ggml_get_rows(ctx, heads->table(-1, r.factors, r.n_dims, n_head), ggml_argsort(ctx, sort_by, GGML_SORT_ORDER_ASC));

    ggml_set_name(sort_by, "pcd_sort_by");
}

// frequency factors of a layer's heads, while its order is not known yet; `a` is its q or its k
bool pcd_heads_graph::build_order(ggml_tensor * a, const llama_pcd_rotation & r, int32_t layer) {
    const auto &  hparams = heads->pcd.lctx.get_model().hparams;
    const int64_t n_head  = hparams.n_head(layer);

    if (il != layer) {
        begin_layer(layer, r, n_head);
    }

    // with as many key heads as query heads, queries come first; that is checked where keys are stored
    const bool is_q = a->ne[1] == n_head && (n_head != hparams.n_head_kv(layer) || !q);
    auto *&    mine = is_q ? q : k;

    if (mine || factors->ne[0] != r.n_dims/2) {
        heads->refuse(format("layer %d rotates more than its queries and keys", layer));
        return false;
    }
    mine = a;

    if (is_whole()) {
        // as ggml_cont() would have done
        sort_by->op     = GGML_OP_CONT;
        sort_by->src[0] = build_sort_by(ctx, q, k);

        ggml_build_forward_expand(gf, ggml_cpy(ctx, factors, heads->table(layer, r.factors, r.n_dims, n_head)));
    }

    return true;
}

//
// rotation
//

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

// each head of `a` with its factors, of which there are as many as query heads
static ggml_tensor * build_rotations(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, const llama_pcd_rotation & r, float attn_factor) {
    const int64_t n_each = factors->ne[1]/a->ne[1]; // query heads for each head of a

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

    return parts[0];
}

ggml_tensor * llama_pcd_heads_rope(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor) {
    if (!graph.heads || graph.ctx != ctx) {
        return nullptr;
    }

    auto &       heads   = *graph.heads;
    const auto & hparams = heads.pcd.lctx.get_model().hparams;

    const int32_t il = layer_of(a);
    if (il >= 0 && il < heads.params().first_layer) {
        return nullptr;
    }
    if (il < 0 || il >= (int32_t) hparams.n_layer()) {
        heads.refuse("it rotates something that does not belong to a layer");
        return nullptr;
    }

    const int64_t n_head    = hparams.n_head(il);
    const int64_t n_head_kv = hparams.n_head_kv(il);

    if (r.multi) {
        heads.refuse("its positions have several sections (M-RoPE)");
        return nullptr;
    }
    if ((a->ne[1] != n_head && a->ne[1] != n_head_kv) || a->ne[2] != graph.n_tokens || a->ne[3] != 1) {
        heads.refuse(format("layer %d rotates something else than the queries and keys of its heads", il));
        return nullptr;
    }

    const bool finding = heads.by_outliers() && heads.is_finding();

    if (finding && !graph.build_order(a, r, il)) {
        return nullptr;
    }
    ggml_tensor * factors = finding ? graph.factors : heads.table(heads.by_outliers() ? il : -1, r.factors, r.n_dims, n_head);

    ggml_tensor * res = build_rotations(ctx, a, pos, factors, r, attn_factor);

    if (finding && a == graph.k) {
        graph.k_out = res;
    }
    heads.rotated();

    return res;
}

bool llama_pcd_heads_offset(const ggml_tensor * a, int n_offs) {
    if (!graph.heads || a->op == GGML_OP_ROPE) {
        return false;
    }
    if (n_offs != 0) {
        graph.heads->refuse("it rotates a part of each head in place");
    }
    return true;
}

void llama_pcd_heads_stored(const ggml_context * ctx, const ggml_tensor * k_cur, int32_t il) {
    if (graph.heads && graph.ctx == ctx && graph.il == il && !(graph.k_out && llama_pcd_descends_from(k_cur, graph.k_out, 12))) {
        graph.heads->refuse(format("layer %d does not show which of its rotations is the key's", il));
    }
}
