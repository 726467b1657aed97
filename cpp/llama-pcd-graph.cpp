// What PCD adds to a compute graph.
//
//   rotation   a twin's q and k are turned a second time, by their position with the table theta* - theta; standard
//              tokens by 0, which is the identity. One batch carries both on every backend. Or noise is added to them.
//   keys       rerotated: beside each stored key its copy turned the same way (standard tokens by their position, twins
//              by 0: theirs are turned already). separate: a twin's own keys and values, in the cell of its token.
//   attention  where there are second keys: standard tokens attend with (q, K, V), twins with (q*, K*, V or V*).

#include "llama-pcd-impl.h"
#include "llama-pcd-rope.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

// the wrappers below build on the real functions
#undef ggml_rope_ext
#undef ggml_rope_multi
#undef ggml_rope
#undef ggml_rope_set_offset

// stands for "does not turn": finite, since an infinity is not safe under fast math
static constexpr float FACTOR_STILL = 1e30f;

//
// inputs
//

class llm_graph_input_pcd : public llm_graph_input_i {
public:
    llm_graph_input_pcd(llama_pcd * pcd, uint32_t n_tokens, uint32_t n_twin, uint32_t n_pos)
        : pcd(pcd), generation(pcd->generation), n_tokens(n_tokens), n_twin(n_twin), n_pos(n_pos) {}

    void set_input(const llama_ubatch * ubatch) override {
        pcd->find_twin_cells(*ubatch);

        set_pos(twin_pos, ubatch, true);
        set_pos(key_pos,  ubatch, false);
        set_offsets(ubatch);
        set_noise(ubatch);

        for (auto & [kv, rot] : k_rot) {
            if (rot && rot->buffer) {
                kv->set_input_k_rot(rot);
            }
        }
        for (auto & [kv, rows] : twin_rows) {
            set_rows(rows, pcd->find_kv(kv)->twin_cells, kv->get_size());
        }
    }

    bool can_reuse(const llm_graph_params & params) override;

    llama_pcd * pcd;

    const uint32_t generation;
    const uint32_t n_tokens;
    const uint32_t n_twin;
    const uint32_t n_pos;

    ggml_tensor * twin_pos = nullptr; // I32 [n_tokens*n_pos] the position of a twin, 0 for a standard token
    ggml_tensor * key_pos  = nullptr; // I32 [n_tokens*n_pos] the other way round
    ggml_tensor * offsets  = nullptr; // I32 [n_tokens*n_pos] by how much a twin's position is moved

    std::map<std::pair<int32_t, int32_t>, ggml_tensor *> noise; // (layer, n_dims) -> F32 [n_dims/2, 2, n_twin]

    std::vector<std::pair<const llama_kv_cache *, ggml_tensor *>> k_rot;

    // of each cache, what the twins' attention looks at
    std::vector<llama_pcd::cell_range> visible;

    // I64: the rows of the second keys that twins write, [n_twin], or of transposed values, [n_embd*n_twin]
    std::vector<std::pair<const llama_kv_cache *, ggml_tensor *>> twin_rows;

private:
    static void set(ggml_tensor * t, const void * data) {
        ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
    }

    void set_pos(ggml_tensor * t, const llama_ubatch * ubatch, bool of_twins) const {
        if (!t || !t->buffer) {
            return;
        }

        const uint32_t n = ubatch->n_tokens;

        std::vector<int32_t> data(n*n_pos, 0);

        for (uint32_t i = 0; i < n; ++i) {
            if (pcd->is_twin(ubatch->seq_id[i][0]) != of_twins) {
                continue;
            }
            for (uint32_t j = 0; j < n_pos; ++j) {
                // as llm_graph_input_pos does: a text token has the same position in all sections but the last
                const bool text = ubatch->token && n_pos == 4;
                data[j*n + i] = text ? (j < 3 ? ubatch->pos[i] : 0) : ubatch->pos[j*n + i];
            }
        }

        set(t, data.data());
    }

    void set_offsets(const llama_ubatch * ubatch) const {
        if (!offsets || !offsets->buffer) {
            return;
        }

        const auto & p = pcd->params;

        std::vector<int32_t> data(n_tokens*n_pos, 0);

        for (uint32_t i = n_tokens - n_twin; i < n_tokens; ++i) {
            for (uint32_t j = 0; j < std::min(n_pos, 3u); ++j) {
                data[j*n_tokens + i] = llama_pcd_offset(p.seed, ubatch->pos[i], p.offset_min, p.offset_max);
            }
        }

        set(offsets, data.data());
    }

    void set_noise(const llama_ubatch * ubatch) const {
        const auto & p = pcd->params;

        for (const auto & [key, t] : noise) {
            if (!t->buffer) {
                continue;
            }
            const auto [layer, n_dims] = key;

            std::vector<float> data(ggml_nelements(t));
            for (uint32_t i = 0; i < n_twin; ++i) {
                float * cur = data.data() + (size_t) i*2*(n_dims/2);
                llama_pcd_noise(p.seed, ubatch->pos[n_tokens - n_twin + i], layer, n_dims, p.noise, p.band, cur, cur + n_dims/2);
            }

            set(t, data.data());
        }
    }

    void set_rows(ggml_tensor * t, const std::vector<int32_t> & cells, int64_t kv_size) const {
        if (!t->buffer) {
            return;
        }

        const int64_t n_embd = t->ne[0]/n_twin;

        std::vector<int64_t> data;
        data.reserve(t->ne[0]);
        for (const int32_t idx : cells) {
            GGML_ASSERT(idx >= 0);
            for (int64_t j = 0; j < n_embd; ++j) {
                data.push_back(j*kv_size + idx);
            }
        }

        set(t, data.data());
    }
};

static uint32_t count_twins(const llama_pcd & pcd, const llama_ubatch & ubatch) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens && !pcd.parents.empty(); ++i) { // no twins: a graph to reserve memory for
        n += pcd.is_twin(ubatch.seq_id[i][0]);
    }
    return n;
}

bool llama_pcd_is_batched(const llama_cparams & cparams, const llama_ubatch & ubatch) {
    const uint32_t n_twin = cparams.pcd && cparams.pcd->on ? count_twins(*cparams.pcd, ubatch) : 0;
    return std::max(n_twin, ubatch.n_tokens - n_twin) > 1;
}

static std::vector<llama_pcd::cell_range> visible_cells(llama_pcd & pcd, const llama_ubatch & ubatch) {
    std::vector<llama_pcd::cell_range> res(pcd.params.window == 0 ? pcd.kvs.size() : 0);
    if (!res.empty()) {
        return res; // all of them
    }

    pcd.find_twin_cells(ubatch);

    for (const auto & cur : pcd.kvs) {
        res.push_back(pcd.visible_cells(cur, ubatch));
    }
    return res;
}

// Where a batch does not fit as it is, sliding-window memory deals it out anew, so that each sequence gets as many tokens
// in a micro-batch: then a twin may come before the tokens that it should see. (With a second stream it does not matter:
// twins see twins.)
static bool is_dealt_out(const llama_pcd & pcd, const llama_ubatch & ubatch) {
    return pcd.together && !pcd.recr && !pcd.separate() && ubatch.equal_seqs();
}

bool llm_graph_input_pcd::can_reuse(const llm_graph_params & params) {
    const llama_pcd * cur = params.cparams.pcd.get();

    return cur == pcd && cur->on && cur->generation == generation &&
        params.ubatch.n_tokens == n_tokens && count_twins(*pcd, params.ubatch) == n_twin && !is_dealt_out(*pcd, params.ubatch) &&
        (n_twin == 0 || visible_cells(*pcd, params.ubatch) == visible);
}

//
// the graph being built
//

struct pcd_graph {
    llama_pcd           * pcd = nullptr;
    llm_graph_input_pcd * inp = nullptr;

    ggml_context * ctx = nullptr;
    ggml_cgraph  * gf  = nullptr;

    uint32_t n_tokens = 0;
    uint32_t n_twin   = 0;
    int32_t  n_attn   = 0; // attentions built so far: the layer, where each has one

    std::vector<llama_pcd_rotation> rotations; // built and not yet claimed by a layer

    bool splitting = false; // inside our own calls of build_attn_mha

    ggml_tensor * input(ggml_tensor *& t, ggml_type type, int64_t ne0, const char * name, int64_t ne1 = 1, int64_t ne2 = 1) const {
        if (!t) {
            t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
            ggml_set_input(t);
            ggml_set_name(t, name);
        }
        return t;
    }

    ggml_tensor * input_pos(ggml_tensor *& t, const char * name) const {
        return input(t, GGML_TYPE_I32, (int64_t) n_tokens*inp->n_pos, name);
    }

    // n_embd rows for each twin
    ggml_tensor * input_rows(const llama_kv_cache * kv, int64_t n_embd) const {
        for (const auto & [cur, t] : inp->twin_rows) {
            if (cur == kv && t->ne[0] == n_embd*n_twin) {
                return t;
            }
        }
        ggml_tensor * t = nullptr;
        inp->twin_rows.push_back({ kv, input(t, GGML_TYPE_I64, n_embd*n_twin, "pcd_twin_rows") });
        return t;
    }
};

static thread_local pcd_graph graph;

void llama_pcd_graph_begin(const llm_graph_context & gctx) {
    graph = {};
    llama_pcd_heads_begin(gctx);

    llama_pcd * pcd = gctx.cparams.pcd.get();
    if (!pcd || !pcd->on) {
        return;
    }

    const auto & ubatch = gctx.ubatch;

    uint32_t n_twin = count_twins(*pcd, ubatch);

    // the split below needs the twins behind all standard tokens
    bool misplaced = n_twin > 0 && is_dealt_out(*pcd, ubatch);
    for (uint32_t i = 0; n_twin > 0 && i + n_twin < ubatch.n_tokens; ++i) {
        misplaced |= pcd->is_twin(ubatch.seq_id[i][0]);
    }
    if (misplaced) {
        pcd->misplaced = true;
        n_twin = 0;
    }

    auto inp = std::make_unique<llm_graph_input_pcd>(pcd, ubatch.n_tokens, n_twin, gctx.hparams.n_pos_per_embd());

    graph.pcd      = pcd;
    graph.inp      = inp.get();
    graph.ctx      = gctx.ctx0;
    graph.gf       = gctx.gf;
    graph.n_tokens = ubatch.n_tokens;
    graph.n_twin   = n_twin;

    if (n_twin > 0) {
        inp->visible = visible_cells(*pcd, ubatch);
    }

    gctx.res->add_input(std::move(inp));
}

void llama_pcd_graph_end(const llama_model & model, const llm_graph_context & gctx) {
    llama_pcd_heads_end();

    if (llama_pcd * pcd = gctx.cparams.pcd.get()) {
        pcd->build_exits(model, gctx);
    }
}

//
// rotation
//

// turn `a` by pos with these frequency factors, as the rotation r does
static ggml_tensor * build_turn(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, ggml_tensor * factors, const llama_pcd_rotation & r, int offset) {
    // ggml scales the magnitude in every rope with YaRN; the first one did it already
    const float attn_factor = r.ext_factor == 0.0f ? 1.0f : 1.0f/(1.0f + 0.1f*logf(1.0f/r.freq_scale));

    ggml_tensor * res;
    if (r.multi) {
        int sections[GGML_MROPE_SECTIONS];
        std::copy(r.sections, r.sections + GGML_MROPE_SECTIONS, sections);
        res = ggml_rope_multi(ctx, a, pos, factors, r.n_dims, sections, r.mode, r.n_ctx_orig,
                r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow);
    } else {
        res = ggml_rope_ext(ctx, a, pos, factors, r.n_dims, r.mode, r.n_ctx_orig,
                r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow);
    }

    return offset > 0 ? ggml_rope_set_offset(res, offset) : res;
}

ggml_tensor * llama_pcd_turn_key(llama_pcd & pcd, ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos,
        const llama_pcd_rotation & r, ggml_tensor * hadamard, llama_pcd::table_kind kind) {
    // most layers of a quantised cache store Hadamard-rotated keys; the transform is its own inverse
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    // a norm behind the rotation does not mind it, its weights do
    if (r.weights) {
        k = ggml_mul(ctx, k, pcd.inverse(r.weights));
    }
    k = build_turn(ctx, k, pos, pcd.table(kind, r.factors, r.n_dims), r, r.offset);
    if (r.weights) {
        k = ggml_mul(ctx, k, r.weights);
    }
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    return k;
}

// the twins at the end of cur, which is a rotated: cos and sin of the first component of each pair get noise, that is
//   y1 = (cos + n1) a1 - (sin + n2) a2
static ggml_tensor * build_noise(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * a, const llama_pcd_rotation & r) {
    const int64_t n_half = r.n_dims/2;
    const int64_t n_head = a->ne[1];
    const int64_t n_twin = graph.n_twin;
    const int64_t i0     = graph.n_tokens - n_twin;

    ggml_tensor * noise = graph.input(graph.inp->noise[{ graph.n_attn, r.n_dims }], GGML_TYPE_F32, n_half, "pcd_noise", 2, n_twin);

    // pairs are neighbours, or half the rotated dimensions apart
    const bool   pairs  = r.mode == GGML_ROPE_TYPE_NORMAL;
    const size_t stride = pairs ? 2*a->nb[0] : a->nb[0];

    const auto component = [&](size_t offs) {
        return ggml_cont(ctx, ggml_view_4d(ctx, a, 1, n_half, n_head, n_twin, stride, a->nb[1], a->nb[2], i0*a->nb[2] + offs*a->nb[0]));
    };
    const auto part = [&](int64_t k) {
        return ggml_view_4d(ctx, noise, 1, n_half, 1, n_twin, noise->nb[0], noise->nb[1], noise->nb[2], k*noise->nb[1]);
    };

    ggml_tensor * delta = ggml_sub(ctx,
            ggml_mul(ctx, component(0),                  part(0)),
            ggml_mul(ctx, component(pairs ? 1 : n_half), part(1)));

    return ggml_acc(ctx, cur, delta, pairs ? 2*cur->nb[0] : cur->nb[0], cur->nb[1], cur->nb[2], i0*cur->nb[2]);
}

static ggml_tensor * rotated(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * a, llama_pcd_rotation r) {
    llama_pcd * pcd = graph.pcd;
    if (!pcd || graph.ctx != ctx || cur->ne[2] != graph.n_tokens) {
        return cur;
    }

    const auto & p = pcd->params;

    if (graph.n_twin > 0 && pcd->rotates()) {
        cur = build_turn(ctx, cur, graph.input_pos(graph.inp->twin_pos, "pcd_twin_pos"),
                pcd->table(llama_pcd::TABLE_DIFFERENCE, r.factors, r.n_dims), r, 0);
    }
    if (graph.n_twin > 0 && p.perturbation == LLAMA_PCD_PERTURBATION_NOISE) {
        if (p.offset_min != 0 || p.offset_max != 0) {
            cur = build_turn(ctx, cur, graph.input_pos(graph.inp->offsets, "pcd_offsets"), r.factors, r, 0);
        }
        cur = build_noise(ctx, cur, a, r);
    }

    r.out = cur;
    graph.rotations.push_back(r);
    pcd->has_rotations = true;

    return cur;
}

ggml_tensor * llama_pcd_rope_ext(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    llama_pcd_rotation r;
    r.factors    = c;
    r.n_dims     = n_dims;
    r.mode       = mode;
    r.n_ctx_orig = n_ctx_orig;
    r.freq_base  = freq_base;
    r.freq_scale = freq_scale;
    r.ext_factor = ext_factor;
    r.beta_fast  = beta_fast;
    r.beta_slow  = beta_slow;

    if (ggml_tensor * cur = llama_pcd_heads_rope(ctx, a, b, r, attn_factor)) {
        return cur;
    }

    return rotated(ctx, ggml_rope_ext(ctx, a, b, c, n_dims, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow), a, r);
}

ggml_tensor * llama_pcd_rope_multi(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c,
        int n_dims, int sections[GGML_MROPE_SECTIONS], int mode, int n_ctx_orig, float freq_base, float freq_scale,
        float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    llama_pcd_rotation r;
    r.factors    = c;
    r.multi      = true;
    r.n_dims     = n_dims;
    r.mode       = mode;
    r.n_ctx_orig = n_ctx_orig;
    r.freq_base  = freq_base;
    r.freq_scale = freq_scale;
    r.ext_factor = ext_factor;
    r.beta_fast  = beta_fast;
    r.beta_slow  = beta_slow;
    std::copy(sections, sections + GGML_MROPE_SECTIONS, r.sections);

    llama_pcd_heads_rope(ctx, a, b, r, attn_factor); // refuses it

    return rotated(ctx, ggml_rope_multi(ctx, a, b, c, n_dims, sections, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow), a, r);
}

ggml_tensor * llama_pcd_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int n_dims, int mode) {
    // the defaults of ggml_rope()
    return llama_pcd_rope_ext(ctx, a, b, nullptr, n_dims, mode, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
}

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs) {
    if (llama_pcd_heads_offset(a, n_offs)) {
        return a;
    }
    if (graph.pcd && !graph.rotations.empty() && graph.rotations.back().out == a) {
        graph.rotations.back().offset = n_offs;
        graph.pcd->offsets_pairs |= n_offs > 0;

        if (a->op != GGML_OP_ROPE) {
            return a; // noise, which is refused for such a model: this graph is never computed
        }
        if (graph.n_twin > 0 && graph.pcd->rotates()) {
            ggml_rope_set_offset(a->src[0], n_offs); // ours was built on top of the model's
        }
    }
    return ggml_rope_set_offset(a, n_offs);
}

ggml_tensor * llama_pcd::table(table_kind kind, ggml_tensor * factors, int n_dims) {
    for (const auto & cur : tables) {
        if (cur.kind == kind && cur.factors == factors && cur.t->ne[0] == n_dims/2) {
            return cur.t;
        }
    }

    // beside the model's own factors; without any, where the first layer lives
    ggml_backend_buffer_type_t buft = factors && factors->buffer ?
        ggml_backend_buffer_get_type(factors->buffer) : ggml_backend_dev_buffer_type(lctx.model.dev_layer(0));

    ggml_init_params ip = { ggml_tensor_overhead(), nullptr, true };

    table_entry cur;
    cur.kind    = kind;
    cur.factors = factors;
    cur.ctx.reset(ggml_init(ip));
    cur.t = ggml_new_tensor_1d(cur.ctx.get(), GGML_TYPE_F32, n_dims/2);
    ggml_set_name(cur.t, kind == TABLE_DIFFERENCE ? "pcd_difference_table" : "pcd_table");
    cur.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(cur.ctx.get(), buft));
    if (!cur.buf) {
        throw std::runtime_error("pcd: no memory for a frequency table");
    }

    tables.push_back(std::move(cur));
    write_tables();

    return tables.back().t;
}

ggml_tensor * llama_pcd::inverse(ggml_tensor * weights) {
    for (const auto & cur : inverses) {
        if (cur.factors == weights) {
            return cur.t;
        }
    }

    const int64_t n = ggml_nelements(weights);

    ggml_init_params ip = { ggml_tensor_overhead(), nullptr, true };

    table_entry cur;
    cur.factors = weights;
    cur.ctx.reset(ggml_init(ip));
    cur.t = ggml_new_tensor_1d(cur.ctx.get(), GGML_TYPE_F32, n);
    ggml_set_name(cur.t, "pcd_inverse_weights");
    cur.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(cur.ctx.get(), ggml_backend_buffer_get_type(weights->buffer)));
    if (!cur.buf) {
        throw std::runtime_error("pcd: no memory for inverse weights");
    }

    std::vector<float> data(n);
    ggml_backend_tensor_get(weights, data.data(), 0, n*sizeof(float));
    for (float & w : data) {
        w = w == 0.0f ? 0.0f : 1.0f/w; // what was multiplied by 0 is lost, and does not matter
    }
    ggml_backend_tensor_set(cur.t, data.data(), 0, n*sizeof(float));

    inverses.push_back(std::move(cur));

    return inverses.back().t;
}

void llama_pcd::write_tables() {
    for (const auto & cur : tables) {
        const int64_t n = cur.t->ne[0];

        std::vector<double> rho(n, 1.0);
        if (rotates()) {
            llama_pcd_rho(2*n, params.alpha, params.base_ratio, params.transition, params.band, rho.data());
        }

        std::vector<float> own(n, 1.0f);
        if (cur.factors) {
            GGML_ASSERT(cur.factors->type == GGML_TYPE_F32 && cur.factors->ne[0] >= n);
            ggml_backend_tensor_get(cur.factors, own.data(), 0, n*sizeof(float));
        }

        // rope divides the angle by its factor: theta* = theta / (ff / rho), theta* - theta = theta / (ff / (rho - 1))
        std::vector<float> data(n);
        for (int64_t j = 0; j < n; ++j) {
            const double turn = cur.kind == TABLE_DIFFERENCE ? rho[j] - 1.0 : rho[j];
            data[j] = std::abs(turn)*FACTOR_STILL > own[j] ? (float) (own[j]/turn) : FACTOR_STILL;
        }

        ggml_backend_tensor_set(cur.t, data.data(), 0, n*sizeof(float));
    }
}

//
// second keys
//

// a key is never rotated twice, so the search ends at the first rotation; `on_path` sees the operations on the way back
template <typename F>
static bool descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth, const F & on_path) {
    if (!t || depth == 0) {
        return false;
    }
    if (t == from) {
        return true;
    }
    if (t->op == GGML_OP_ROPE) {
        return false;
    }
    if (descends_from(t->src[0], from, depth - 1, on_path) || descends_from(t->src[1], from, depth - 1, on_path)) {
        on_path(t);
        return true;
    }
    return false;
}

bool llama_pcd_descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth) {
    return descends_from(t, from, depth, [](const ggml_tensor *) {});
}

// the rotation behind this key; the layer's last one where the key does not show it
static llama_pcd_rotation claim_rotation(const ggml_tensor * k_cur) {
    llama_pcd_rotation res;

    for (auto it = graph.rotations.rbegin(); it != graph.rotations.rend(); ++it) {
        ggml_tensor * weights = nullptr;

        bool weighed  = false;
        bool hadamard = false;

        const auto on_path = [&](const ggml_tensor * t) {
            if (t->op == GGML_OP_MUL || t->op == GGML_OP_ADD) {
                ggml_tensor * w = t->src[1];
                weighed |= weights || t->op == GGML_OP_ADD || w->op != GGML_OP_NONE || w->type != GGML_TYPE_F32 || ggml_nelements(w) != t->ne[0];
                weights  = w;
            }
            hadamard |= t->op == GGML_OP_MUL_MAT;
        };
        if (descends_from(k_cur, it->out, 10, on_path)) {
            res = *it;
            res.weighed  = weighed;
            res.weights  = weights;
            res.hadamard = hadamard;
            break;
        }
    }
    if (!res.out && !graph.rotations.empty()) {
        res = graph.rotations.back();
    }
    graph.rotations.clear();

    return res;
}

// where the rotated dimensions start in a whole key: behind the unrotated ones where a model concatenates them (MLA)
static int rotation_offset(const ggml_tensor * k_cur, const llama_pcd_rotation & r) {
    for (const ggml_tensor * t = k_cur; t; t = t->src[0]) {
        if (t == r.out) {
            return r.offset;
        }
        if (t->op == GGML_OP_CONCAT && t->op_params[0] == 0) {
            const bool behind = !llama_pcd_descends_from(t->src[0], r.out, 10) && llama_pcd_descends_from(t->src[1], r.out, 10);
            return r.offset + (behind ? (int) t->src[0]->ne[0] : 0);
        }
    }
    return r.offset;
}

void llama_pcd_store_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) {
    llama_pcd_heads_stored(ctx, k_cur, il);

    llama_pcd * pcd = graph.pcd;
    if (!pcd || graph.ctx != ctx) {
        return;
    }

    auto * layer = pcd->find_layer(&kv, il);
    if (!layer || !layer->k2) {
        return;
    }

    llama_pcd_rotation r = claim_rotation(k_cur);

    r.offset = r.out ? rotation_offset(k_cur, r) : 0;
    layer->rotation = r;

    if (pcd->rerotated() && layer->rotates) {
        if (r.out) {
            ggml_tensor * rot = nullptr;
            if (r.hadamard) {
                for (const auto & cur : graph.inp->k_rot) {
                    if (cur.first == &kv) {
                        rot = cur.second;
                    }
                }
                if (!rot) {
                    rot = kv.build_input_k_rot(ctx);
                    graph.inp->k_rot.push_back({ &kv, rot });
                }
            }

            k_cur = llama_pcd_turn_key(*pcd, ctx, k_cur, graph.input_pos(graph.inp->key_pos, "pcd_key_pos"), r, rot, llama_pcd::TABLE_DIFFERENCE);
        }

        k_cur = ggml_view_2d(ctx, k_cur, k_cur->ne[0]*k_cur->ne[1], k_cur->ne[2], k_cur->nb[2], 0);

        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, layer->k2, k_cur, k_idxs));
    }

    if (pcd->separate() && graph.n_twin > 0) {
        k_cur = ggml_view_2d(ctx, k_cur, k_cur->ne[0]*k_cur->ne[1], graph.n_twin, k_cur->nb[2], (graph.n_tokens - graph.n_twin)*k_cur->nb[2]);

        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, layer->k2, k_cur, graph.input_rows(&kv, 1)));
    }
}

void llama_pcd_store_v(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * v_cur, int32_t il) {
    llama_pcd * pcd = graph.pcd;
    if (!pcd || graph.ctx != ctx || graph.n_twin == 0 || !pcd->separate()) {
        return;
    }

    auto * layer = pcd->find_layer(&kv, il);
    if (!layer || !layer->v2) {
        return;
    }

    ggml_tensor * v2 = layer->v2;

    const int64_t n_embd = v_cur->ne[0]*v_cur->ne[1];

    v_cur = ggml_view_2d(ctx, v_cur, n_embd, graph.n_twin, v_cur->nb[2], (graph.n_tokens - graph.n_twin)*v_cur->nb[2]);

    if (pcd->v_is_transposed(kv)) {
        // each element is a row of its own, and all layers are as wide as the widest
        v_cur = ggml_cont(ctx, v_cur);
        if (n_embd < v2->ne[0]) {
            v_cur = ggml_pad(ctx, v_cur, v2->ne[0] - n_embd, 0, 0, 0);
        }
        ggml_tensor * rows = graph.input_rows(&kv, v2->ne[0]);

        v_cur = ggml_reshape_2d(ctx, v_cur, 1, ggml_nelements(v_cur));
        v2    = ggml_reshape_2d(ctx, v2,    1, ggml_nelements(v2));
        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, v2, v_cur, rows));
    } else {
        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, v2, v_cur, graph.input_rows(&kv, 1)));
    }
}

// the cells in a range, along one dimension of t
static ggml_tensor * build_cells(ggml_context * ctx, ggml_tensor * t, int dim, const llama_pcd::cell_range & cells, bool contiguous) {
    const auto part = [&](int64_t i0, int64_t n) {
        int64_t ne[4] = { t->ne[0], t->ne[1], t->ne[2], t->ne[3] };
        ne[dim] = n;
        return ggml_view_4d(ctx, t, ne[0], ne[1], ne[2], ne[3], t->nb[1], t->nb[2], t->nb[3], i0*t->nb[dim]);
    };

    ggml_tensor * tail = part(cells.begin, t->ne[dim] - cells.begin);
    if (cells.head) {
        return ggml_concat(ctx, part(0, LLAMA_PCD_CELL_BLOCK), tail, dim);
    }
    return contiguous ? ggml_cont(ctx, tail) : tail;
}

ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il) {
    llama_pcd * pcd = graph.pcd;
    if (!pcd || graph.ctx != gctx.ctx0 || graph.splitting) {
        return nullptr;
    }

    // a layer that shares another's cells stores no keys: its rotation must not reach the next layer
    graph.rotations.clear();
    graph.n_attn++;

    if (graph.n_twin == 0) {
        return nullptr;
    }

    const auto * layer = pcd->find_layer(k->view_src);
    if (!layer) {
        return nullptr;
    }

    const bool second = layer->k2 && (pcd->separate() || (pcd->rerotated() && layer->rotates));

    llama_pcd::cell_range cells;
    for (size_t i = 0; i < pcd->kvs.size(); ++i) {
        const auto & layers = pcd->kvs[i].layers;
        if (!kq_b && layer >= layers.data() && layer < layers.data() + layers.size()) {
            cells = graph.inp->visible[i];
        }
    }
    if (!second && cells.begin == 0) {
        return nullptr;
    }

    ggml_context * ctx = gctx.ctx0;

    ggml_tensor * k2 = k;
    ggml_tensor * v2 = v;

    // the same cells of other tensors
    if (second) {
        k2 = ggml_view_4d(ctx, layer->k2, k->ne[0], k->ne[1], k->ne[2], k->ne[3],
                ggml_row_size(layer->k2->type, k->ne[0]), layer->k2->nb[1], layer->k2->nb[2], k->view_offs/layer->k1->nb[1]*layer->k2->nb[1]);
    }
    if (second && pcd->separate()) {
        v2 = layer->v2 ?
            ggml_view_4d(ctx, layer->v2, v->ne[0], v->ne[1], v->ne[2], v->ne[3], v->nb[1], v->nb[2], v->nb[3], v->view_offs) :
            ggml_view_4d(ctx, k2,        v->ne[0], v->ne[1], v->ne[2], v->ne[3], k2->nb[1], k2->nb[2], k2->nb[3], 0);
        if (!layer->v2 && ggml_is_quantized(k2->type) && !gctx.cparams.flash_attn) {
            v2 = ggml_cast(ctx, v2, GGML_TYPE_F32); // it will be transposed, which blocks cannot be
        }
    }

    const int64_t n_twin = graph.n_twin;
    const int64_t n_std  = graph.n_tokens - n_twin;

    // the tokens [i0, i0 + n) of q, of the mask and of the bias
    const auto part_q = [&](int64_t i0, int64_t n) {
        return ggml_view_3d(ctx, q, q->ne[0], q->ne[1], n, q->nb[1], q->nb[2], i0*q->nb[2]);
    };
    const auto part_rows = [&](ggml_tensor * t, int64_t i0, int64_t n) -> ggml_tensor * {
        if (!t) {
            return nullptr;
        }
        const bool flat = t->ne[2] == 1 && t->ne[3] == 1;
        return ggml_view_4d(ctx, t, t->ne[0], n, t->ne[2], t->ne[3],
                t->nb[1], flat ? n*t->nb[1] : t->nb[2], flat ? n*t->nb[1] : t->nb[3], i0*t->nb[1]);
    };

    ggml_tensor * mask = part_rows(kq_mask, n_std, n_twin);

    if (cells.begin > 0) {
        const bool v_trans = v2->nb[1] > v2->nb[2];

        mask = build_cells(ctx, mask, 0, cells, true);
        k2   = build_cells(ctx, k2,   2, cells, false);
        // transposed values are put together with their dimensions in the order of memory
        v2   = v_trans ?
            ggml_permute(ctx, build_cells(ctx, ggml_permute(ctx, v2, 0, 2, 1, 3), 0, cells, false), 0, 2, 1, 3) :
            build_cells(ctx, v2, 2, cells, false);
    }

    graph.splitting = true;

    ggml_tensor * cur = gctx.build_attn_mha(part_q(n_std, n_twin), k2, v2, part_rows(kq_b, n_std, n_twin),
            mask, sinks, v_mla, n_kv_max, kq_scale, il);

    if (n_std > 0) {
        ggml_tensor * std = gctx.build_attn_mha(part_q(0, n_std), k, v, part_rows(kq_b, 0, n_std),
                part_rows(kq_mask, 0, n_std), sinks, v_mla, n_kv_max, kq_scale, il);

        cur = ggml_concat(ctx, std, cur, 1);
    }

    graph.splitting = false;

    ggml_build_forward_expand(gctx.gf, cur);

    return cur;
}
