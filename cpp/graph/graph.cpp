// The graph that a thread builds: its inputs, and the rotations of twins.

#include "graph/graph.h"

#include "llama-model.h"

#include <algorithm>

llama_pcd_graph & llama_pcd_graph::current() {
    static thread_local llama_pcd_graph graph;
    return graph;
}

void llama_pcd_graph::begin(const llm_graph_context & gctx, llama_pcd_core * core) {
    auto & graph = current();
    graph = {};

    if (!core || !(core->settings.on || core->probing)) {
        return;
    }
    const auto & ubatch = gctx.ubatch;

    // a graph that memory is reserved for is of no batch
    uint32_t n_twin = core->twins && !ubatch.data->batch_idxs.empty() ? core->twins->count(ubatch) : 0;

    if (n_twin > 0) {
        core->view.place(*core->twins, ubatch);
    }
    if (n_twin > 0 && llm_graph_input_pcd::is_misplaced(*core, ubatch)) {
        core->twins->misplaced = true;
        n_twin = 0;
    }
    const uint32_t n_turned = n_twin > 0 ? core->twins->count_perturbed(ubatch) : 0;

    auto inp = std::make_unique<llm_graph_input_pcd>(*core, ubatch.n_tokens, n_twin, n_turned, gctx.hparams.n_pos_per_embd());

    graph.core     = core;
    graph.inp      = inp.get();
    graph.ctx      = gctx.ctx0;
    graph.gf       = gctx.gf;
    graph.n_tokens = ubatch.n_tokens;
    graph.n_twin   = n_twin;
    graph.n_turned = n_turned;

    inp->look(ubatch);
    gctx.res->add_input(std::move(inp));
}

//
// inputs
//

ggml_tensor * llama_pcd_graph::input(ggml_tensor *& t, ggml_type type, int64_t ne0, const char * name, int64_t ne1, int64_t ne2) const {
    if (!t) {
        t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
        ggml_set_input(t);
        ggml_set_name(t, name);
    }
    return t;
}

ggml_tensor * llama_pcd_graph::input_pos(ggml_tensor *& t, const char * name) const {
    return input(t, GGML_TYPE_I32, (int64_t) n_tokens*inp->n_pos, name);
}

ggml_tensor * llama_pcd_graph::input_k_rot(const llama_kv_cache & kv) const {
    for (const auto & [cur, rot] : inp->k_rot) {
        if (cur == &kv && rot) {
            return rot;
        }
    }
    ggml_tensor * rot = kv.build_input_k_rot(ctx);
    inp->k_rot.push_back({ &kv, rot });
    return rot;
}

ggml_tensor * llama_pcd_graph::input_rows(const llama_kv_cache & kv, int64_t n_embd) const {
    for (const auto & [cur, t] : inp->twin_rows) {
        if (cur == &kv && t->ne[0] == n_embd*n_twin) {
            return t;
        }
    }
    ggml_tensor * t = nullptr;
    inp->twin_rows.push_back({ &kv, input(t, GGML_TYPE_I64, n_embd*n_twin, "pcd_twin_rows") });
    return t;
}

//
// rotation
//

// cos and sin of the first component of each pair of a twin get noise:
//   y1 = (cos + n1) a1 - (sin + n2) a2
ggml_tensor * llama_pcd_graph::build_noise(ggml_tensor * cur, ggml_tensor * a, const llama_pcd_rotation & r) {
    const int64_t n_half = r.n_dims/2;
    const int64_t n_head = a->ne[1];
    const int64_t i0     = n_tokens - n_turned;

    ggml_tensor * noise = input(inp->noise[{ n_attn, r.n_dims }], GGML_TYPE_F32, n_half, "pcd_noise", 2, n_turned);

    // pairs are neighbours, or half the rotated dimensions apart
    const bool   pairs  = r.mode == GGML_ROPE_TYPE_NORMAL;
    const size_t stride = pairs ? 2*a->nb[0] : a->nb[0];

    const auto component = [&](size_t offs) {
        return ggml_cont(ctx, ggml_view_4d(ctx, a, 1, n_half, n_head, n_turned, stride, a->nb[1], a->nb[2], i0*a->nb[2] + offs*a->nb[0]));
    };
    const auto part = [&](int64_t k) {
        return ggml_view_4d(ctx, noise, 1, n_half, 1, n_turned, noise->nb[0], noise->nb[1], noise->nb[2], k*noise->nb[1]);
    };

    ggml_tensor * delta = ggml_sub(ctx,
            ggml_mul(ctx, component(0),                  part(0)),
            ggml_mul(ctx, component(pairs ? 1 : n_half), part(1)));

    return ggml_acc(ctx, cur, delta, pairs ? 2*cur->nb[0] : cur->nb[0], cur->nb[1], cur->nb[2], i0*cur->nb[2]);
}

ggml_tensor * llama_pcd_graph::rotated(ggml_context * c, ggml_tensor * cur, ggml_tensor * a, llama_pcd_rotation r) {
    if (!builds_in(c)) {
        return cur;
    }
    if (cur->ne[2] != n_tokens) {
        core->limits.hides_rotation = true; // no token is known for its rows, so twins would not be turned
        return cur;
    }
    if (core->probing) {
        seen.push_back(cur);
    }

    const auto & settings = core->settings;

    if (n_turned > 0 && settings.rotates()) {
        cur = r.turn(ctx, cur, input_pos(inp->twin_pos, "pcd_twin_pos"),
                core->tables.table(llama_pcd_tables::DIFFERENCE, r.factors, r.n_dims), 0);
    }
    if (n_turned > 0 && settings.params.perturbation == LLAMA_PCD_PERTURBATION_NOISE) {
        if (llama_pcd_settings::offsets(settings.params)) {
            cur = r.turn(ctx, cur, input_pos(inp->offsets, "pcd_offsets"), r.factors, 0);
        }
        cur = build_noise(cur, a, r);
    }

    r.out = cur;
    rotations.push_back(r);
    core->limits.has_rotations = true;

    return cur;
}

void llama_pcd_graph::end() {
    auto & graph = current();

    const bool probing = graph.core && graph.core->probing;
    for (int i = 0; probing && i < ggml_graph_n_nodes(graph.gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph.gf, i);
        if (node->op == GGML_OP_ROPE && std::find(graph.seen.begin(), graph.seen.end(), node) == graph.seen.end()) {
            graph.core->limits.hides_rotation = true; // it did not come by here
        }
    }
    graph = {};
}

bool llama_pcd_graph::offset(ggml_tensor * a, int n_offs) {
    if (!core || rotations.empty() || rotations.back().out != a) {
        return false;
    }
    rotations.back().offset = n_offs;
    core->limits.offsets_pairs |= n_offs > 0;

    if (a->op != GGML_OP_ROPE) {
        return true; // noise, which is refused for such a model: this graph is never computed
    }
    if (n_turned > 0 && core->settings.rotates()) {
        ggml_rope_set_offset(a->src[0], n_offs); // ours was built on top of the model's
    }
    return false;
}
