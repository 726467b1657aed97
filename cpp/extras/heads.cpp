// Keeps ratios of heads and their tables, and rotates head by head.

#include "extras/extras.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

void llama_pcd_heads::refuse(const std::string & reason) {
    if (cur.reason.empty()) {
        cur.reason = reason;
    }
}

uint32_t llama_pcd_heads::n_nodes() const {
    const auto & hparams = pcd.lctx.get_model().hparams;

    uint32_t res = 0;
    if (!cur.ratios.empty()) { // on by now or before: three nodes for each head
        for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
            res += 3*(hparams.n_head(il) + hparams.n_head_kv(il));
        }
    }
    return res;
}

std::string llama_pcd_heads::refusal() const {
    return on() && memory.has_shift() ?
        "keys that were rotated head by head cannot move to other positions; clear the memory and evaluate the text again" : "";
}

//
// settings
//

static bool is_ratio(float r) {
    return r > 0.0f && r <= 1000.0f; // not NaN
}

static std::string check_ratios(const float * values, int32_t n) {
    const float * wrong = std::find_if_not(values, values + n, is_ratio);
    return wrong == values + n ? "" : format("a ratio is %g, allowed: more than 0 and at most 1000", *wrong);
}

static uint32_t count_heads(const llama_hparams & hparams) {
    uint32_t res = 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        res += hparams.n_head(il);
    }
    return res;
}

int32_t llama_pcd_heads::check(const float * values, int32_t n, bool pcd_on, std::string & err) const {
    const auto & model   = pcd.lctx.get_model();
    const auto & hparams = model.hparams;

    if (n != (int32_t) count_heads(hparams)) {
        err = format("%d ratios are given; allowed: %u, one for each query head of each layer", n, count_heads(hparams));
    } else {
        err = check_ratios(values, n);
    }
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }

    const std::string arch = "the architecture '" + model.arch_name() + "' ";

    if (pcd_on) {
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
    }
    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

int32_t llama_pcd_heads::set(const float * values, int32_t n, bool pcd_on, std::string & err) {
    bool & is_on = pcd.heads.on;

    if (!values) {
        if (is_on) {
            is_on = false;
            pcd.reset_graphs();
        }
        return LLAMA_PCD_OK;
    }
    const int32_t status = check(values, n, pcd_on, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    pcd.lctx.synchronize();

    const auto & hparams = pcd.lctx.get_model().hparams;

    const bool was_on = is_on;
    state      old    = std::move(cur);

    cur = {};
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        cur.ratios.emplace_back(values, values + hparams.n_head(il));
        values += hparams.n_head(il);
    }
    is_on = true;

    const auto undo = [&]() {
        cur   = std::move(old);
        is_on = was_on;
        pcd.reserve_later();
        pcd.reset_graphs();
    };

    pcd.reset_graphs();

    // the graphs built here show what cannot run
    pcd.reserve_now(undo);

    bool any = false;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        any |= scales(il);
    }
    if (any && cur.n_rotated == 0) {
        refuse("it has no rotary positions to scale");
    }
    if (!cur.reason.empty()) {
        err = "the architecture '" + pcd.lctx.get_model().arch_name() + "' cannot have a ratio for each head: " + cur.reason;
        undo();
        return LLAMA_PCD_UNSUPPORTED;
    }

    return LLAMA_PCD_OK;
}

int32_t llama_pcd_heads::set_layer(int32_t il, const float * values, int32_t n, std::string & err) {
    if (!on() || il < 0 || il >= (int32_t) cur.ratios.size() || !scales(il)) {
        err = format("layer %d has no ratios to be changed; set some first (llama_pcd_set_head_ratios)", il);
    } else if (n != (int32_t) cur.ratios[il].size()) {
        err = format("%d ratios are given; allowed: %d, one for each query head of layer %d", n, (int) cur.ratios[il].size(), il);
    } else {
        err = check_ratios(values, n);
    }
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }
    cur.ratios[il].assign(values, values + n);
    for (const auto & entry : cur.tables) {
        if (entry.il == il) {
            write(entry);
        }
    }
    return LLAMA_PCD_OK;
}

int32_t llama_pcd_heads::get(const llama_model & model, const llama_pcd_heads * heads, int32_t il, float * out, int32_t n) {
    const auto & hparams = model.hparams;

    if (il < 0 || il >= (int32_t) hparams.n_layer()) {
        return -1;
    }
    const int32_t n_head = hparams.n_head(il);

    std::fill_n(out, std::min(n, n_head), 1.0f);
    if (heads && heads->on()) {
        std::copy_n(heads->cur.ratios[il].begin(), std::min(n, n_head), out);
    }
    return n_head;
}

//
// tables
//

bool llama_pcd_heads::scales(int32_t il) const {
    const auto & own = cur.ratios[il];
    return std::any_of(own.begin(), own.end(), [](float r) { return r != 1.0f; });
}

void llama_pcd_heads::write(const table & entry) const {
    const auto own = llama_pcd_own_factors(entry.factors, entry.values.t->ne[0]);

    std::vector<float> data;
    for (const float r : cur.ratios[entry.il]) {
        for (const float f : own) {
            data.push_back(f*r);
        }
    }
    entry.values.write(data);
}

ggml_tensor * llama_pcd_heads::find_table(int32_t il, ggml_tensor * factors, int n_dims) {
    for (const auto & entry : cur.tables) {
        if (entry.il == il && entry.factors == factors && entry.values.t->ne[0] == n_dims/2) {
            return entry.values.t;
        }
    }

    const auto & model = pcd.lctx.get_model();

    cur.tables.push_back({ il, factors, llama_pcd_table(model, il, factors, n_dims/2, cur.ratios[il].size(), "pcd_head_factors") });
    write(cur.tables.back());

    return cur.tables.back().values.t;
}

//
// the graph
//

struct pcd_heads_graph {
    llama_pcd_heads * heads = nullptr;

    ggml_context * ctx = nullptr;
    ggml_cgraph  * gf  = nullptr;

    int64_t n_tokens = 0;

    // what a layer has rotated so far
    struct rotation {
        ggml_tensor * in;
        ggml_tensor * out;
    };
    int32_t               il = -1;
    std::vector<rotation> rotations;
};

static thread_local pcd_heads_graph graph;

void llama_pcd_heads::begin(const llm_graph_context & gctx, llama_pcd_heads * heads) {
    graph = {};

    if (heads && heads->on()) {
        graph.heads    = heads;
        graph.ctx      = gctx.ctx0;
        graph.gf       = gctx.gf;
        graph.n_tokens = gctx.n_tokens;

        gctx.res->add_input(std::make_unique<llm_graph_input_of_pcd>(heads->pcd));
    }
}

void llama_pcd_heads::end() {
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

// each head of `a` with its factors, of which there are as many as query heads
static ggml_tensor * build_rotations(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, const llama_pcd_rotation & r, float attn_factor) {
    const int64_t n_each = factors->ne[1]/a->ne[1]; // query heads for each head of a

    std::vector<ggml_tensor *> parts;
    for (int64_t h = 0; h < a->ne[1]; ++h) {
        parts.push_back(r.build(ctx,
                ggml_view_3d(ctx, a, a->ne[0], 1, a->ne[2], a->nb[1], a->nb[2], h*a->nb[1]), pos,
                ggml_view_1d(ctx, factors, factors->ne[0], h*n_each*factors->nb[1]), attn_factor));
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

ggml_tensor * llama_pcd_heads::rotated(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor) {
    if (!graph.heads || graph.ctx != ctx) {
        return nullptr;
    }

    auto &       heads   = *graph.heads;
    const auto & hparams = heads.pcd.lctx.get_model().hparams;

    const int32_t il = layer_of(a);
    if (il < 0 || il >= (int32_t) hparams.n_layer()) {
        heads.refuse("it rotates something that does not belong to a layer");
        return nullptr;
    }
    if (!heads.scales(il)) {
        return nullptr;
    }
    if (r.multi) {
        heads.refuse("its positions have several sections (M-RoPE)");
        return nullptr;
    }
    if ((a->ne[1] != hparams.n_head(il) && a->ne[1] != hparams.n_head_kv(il)) || a->ne[2] != graph.n_tokens || a->ne[3] != 1) {
        heads.refuse(format("layer %d rotates something else than the queries and keys of its heads", il));
        return nullptr;
    }

    ggml_tensor * res = build_rotations(ctx, a, pos, heads.find_table(il, r.factors, r.n_dims), r, attn_factor);
    heads.cur.n_rotated++;

    ggml_build_forward_expand(graph.gf, a); // before either rotation, which follow where a model uses them

    if (graph.il != il) {
        graph.il = il;
        graph.rotations.clear();
    }
    graph.rotations.push_back({ a, res });

    return res;
}

bool llama_pcd_heads::offset(const ggml_tensor * a, int n_offs) {
    if (!graph.heads || a->op == GGML_OP_ROPE) {
        return false;
    }
    if (n_offs != 0) {
        graph.heads->refuse("it rotates a part of each head in place");
    }
    return true;
}

void llama_pcd_heads::stored(const ggml_context * ctx, const ggml_tensor * k_cur, int32_t il) {
    if (!graph.heads || graph.ctx != ctx || graph.il != il) {
        return;
    }
    for (const auto & cur : graph.rotations) {
        ggml_format_name(cur.in, "pcd_%s-%d", llama_pcd_descends_from(k_cur, cur.out, 12) ? "k" : "q", il);
    }
}
