// What PCD adds to a compute graph.
//
//   rotation   a twin's q and k are turned a second time, by their position with the table theta* - theta;
//              standard tokens by 0, which is the identity. One batch carries both on every backend.
//   keys       rerotated: beside each stored key its copy turned the same way (standard tokens by their
//              position, twins by 0: theirs are turned already).
//   attention  rerotated: standard tokens attend with (q, K, V), twins with (q*, K*, V).
//   mask       a twin sees the cells of its token's sequence before its position, and its own cell.

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
    llm_graph_input_pcd(const llama_pcd * pcd, uint32_t n_tokens, uint32_t n_twin, uint32_t n_pos)
        : pcd(pcd), generation(pcd->generation), n_tokens(n_tokens), n_twin(n_twin), n_pos(n_pos) {}

    void set_input(const llama_ubatch * ubatch) override {
        set_pos(twin_pos, ubatch, true);
        set_pos(key_pos,  ubatch, false);

        for (auto & [kv, rot] : k_rot) {
            if (rot && rot->buffer) {
                kv->set_input_k_rot(rot);
            }
        }
    }

    bool can_reuse(const llm_graph_params & params) override;

    const llama_pcd * pcd;

    const uint32_t generation;
    const uint32_t n_tokens;
    const uint32_t n_twin;
    const uint32_t n_pos;

    ggml_tensor * twin_pos = nullptr; // I32 [n_tokens*n_pos] the position of a twin, 0 for a standard token
    ggml_tensor * key_pos  = nullptr; // I32 [n_tokens*n_pos] the other way round

    std::vector<std::pair<const llama_kv_cache *, ggml_tensor *>> k_rot;

private:
    void set_pos(ggml_tensor * t, const llama_ubatch * ubatch, bool of_twins) const {
        if (!t || !t->buffer) {
            return;
        }

        const uint32_t n = ubatch->n_tokens;

        std::vector<int32_t> data(n*n_pos, 0);

        for (uint32_t i = 0; i < n; ++i) {
            if (llama_pcd_is_twin(ubatch->seq_id[i][0]) != of_twins) {
                continue;
            }
            for (uint32_t j = 0; j < n_pos; ++j) {
                // as llm_graph_input_pos does: a text token has the same position in all sections but the last
                const bool text = ubatch->token && n_pos == 4;
                data[j*n + i] = text ? (j < 3 ? ubatch->pos[i] : 0) : ubatch->pos[j*n + i];
            }
        }

        ggml_backend_tensor_set(t, data.data(), 0, data.size()*sizeof(int32_t));
    }
};

static uint32_t count_twins(const llama_ubatch & ubatch) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        n += llama_pcd_is_twin(ubatch.seq_id[i][0]);
    }
    return n;
}

bool llama_pcd_is_batched(const llama_cparams & cparams, const llama_ubatch & ubatch) {
    const uint32_t n_twin = cparams.pcd && cparams.pcd->on ? count_twins(ubatch) : 0;
    return std::max(n_twin, ubatch.n_tokens - n_twin) > 1;
}

bool llm_graph_input_pcd::can_reuse(const llm_graph_params & params) {
    const llama_pcd * cur = params.cparams.pcd.get();

    return cur == pcd && cur->on && cur->generation == generation &&
        params.ubatch.n_tokens == n_tokens && count_twins(params.ubatch) == n_twin;
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

    std::vector<llama_pcd_rotation> rotations; // built and not yet claimed by a layer

    bool splitting = false; // inside our own calls of build_attn_mha

    ggml_tensor * input_pos(ggml_tensor *& t, const char * name) const {
        if (!t) {
            t = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (int64_t) n_tokens*inp->n_pos);
            ggml_set_input(t);
            ggml_set_name(t, name);
        }
        return t;
    }
};

static thread_local pcd_graph graph;

void llama_pcd_graph_begin(const llm_graph_context & gctx) {
    graph = {};

    llama_pcd * pcd = gctx.cparams.pcd.get();
    if (!pcd || !pcd->on) {
        return;
    }

    const auto & ubatch = gctx.ubatch;

    uint32_t n_twin = count_twins(ubatch);

    // the split below needs the twins behind all standard tokens
    for (uint32_t i = 0; i + n_twin < ubatch.n_tokens; ++i) {
        if (llama_pcd_is_twin(ubatch.seq_id[i][0])) {
            pcd->misplaced = true;
            n_twin = 0;
            break;
        }
    }

    auto inp = std::make_unique<llm_graph_input_pcd>(pcd, ubatch.n_tokens, n_twin, gctx.hparams.n_pos_per_embd());

    graph.pcd      = pcd;
    graph.inp      = inp.get();
    graph.ctx      = gctx.ctx0;
    graph.gf       = gctx.gf;
    graph.n_tokens = ubatch.n_tokens;
    graph.n_twin   = n_twin;

    gctx.res->add_input(std::move(inp));
}

//
// rotation
//

// turn `a` by pos with the difference table of the rotation r
static ggml_tensor * build_turn(
        llama_pcd & pcd, ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, int offset) {
    ggml_tensor * t = pcd.difference_table(r.factors, r.n_dims);

    // ggml scales the magnitude in every rope with YaRN; the first one did it already
    const float attn_factor = r.ext_factor == 0.0f ? 1.0f : 1.0f/(1.0f + 0.1f*logf(1.0f/r.freq_scale));

    ggml_tensor * res;
    if (r.multi) {
        int sections[GGML_MROPE_SECTIONS];
        std::copy(r.sections, r.sections + GGML_MROPE_SECTIONS, sections);
        res = ggml_rope_multi(ctx, a, pos, t, r.n_dims, sections, r.mode, r.n_ctx_orig,
                r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow);
    } else {
        res = ggml_rope_ext(ctx, a, pos, t, r.n_dims, r.mode, r.n_ctx_orig,
                r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow);
    }

    return offset > 0 ? ggml_rope_set_offset(res, offset) : res;
}

static ggml_tensor * rotated(ggml_context * ctx, ggml_tensor * cur, llama_pcd_rotation r) {
    if (!graph.pcd || graph.ctx != ctx || !graph.pcd->rotates() || cur->ne[2] != graph.n_tokens) {
        return cur;
    }

    if (graph.n_twin > 0) {
        cur = build_turn(*graph.pcd, ctx, cur, graph.input_pos(graph.inp->twin_pos, "pcd_twin_pos"), r, 0);
    }

    r.out = cur;
    graph.rotations.push_back(r);

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

    return rotated(ctx, ggml_rope_ext(ctx, a, b, c, n_dims, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow), r);
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

    return rotated(ctx, ggml_rope_multi(ctx, a, b, c, n_dims, sections, mode, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow), r);
}

ggml_tensor * llama_pcd_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int n_dims, int mode) {
    // the defaults of ggml_rope()
    return llama_pcd_rope_ext(ctx, a, b, nullptr, n_dims, mode, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
}

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs) {
    if (graph.pcd && !graph.rotations.empty() && graph.rotations.back().out == a) {
        graph.rotations.back().offset = n_offs;
        if (graph.n_twin > 0) {
            ggml_rope_set_offset(a->src[0], n_offs); // ours was built on top of the model's
        }
    }
    return ggml_rope_set_offset(a, n_offs);
}

ggml_tensor * llama_pcd::difference_table(ggml_tensor * factors, int n_dims) {
    for (const auto & cur : tables) {
        if (cur.factors == factors && cur.t->ne[0] == n_dims/2) {
            return cur.t;
        }
    }

    // beside the model's own factors; without any, where the first layer lives
    ggml_backend_buffer_type_t buft = factors && factors->buffer ?
        ggml_backend_buffer_get_type(factors->buffer) : ggml_backend_dev_buffer_type(lctx.model.dev_layer(0));

    ggml_init_params ip = { ggml_tensor_overhead(), nullptr, true };

    table cur;
    cur.factors = factors;
    cur.ctx.reset(ggml_init(ip));
    cur.t = ggml_new_tensor_1d(cur.ctx.get(), GGML_TYPE_F32, n_dims/2);
    ggml_set_name(cur.t, "pcd_difference_table");
    cur.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(cur.ctx.get(), buft));
    if (!cur.buf) {
        throw std::runtime_error("pcd: no memory for a frequency table");
    }

    tables.push_back(std::move(cur));
    write_difference_tables();

    return tables.back().t;
}

void llama_pcd::write_difference_tables() {
    for (const auto & cur : tables) {
        const int64_t n = cur.t->ne[0];

        std::vector<double> rho(n);
        llama_pcd_rho(2*n, params.alpha, params.base_ratio, params.transition, rho.data());

        std::vector<float> own(n, 1.0f);
        if (cur.factors) {
            GGML_ASSERT(cur.factors->type == GGML_TYPE_F32 && cur.factors->ne[0] >= n);
            ggml_backend_tensor_get(cur.factors, own.data(), 0, n*sizeof(float));
        }

        // rope divides the angle by its factor: theta* - theta = (rho - 1) theta = theta / (ff / (rho - 1))
        std::vector<float> data(n);
        for (int64_t j = 0; j < n; ++j) {
            const double turn = rho[j] - 1.0;
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
        on_path(t->op);
        return true;
    }
    return false;
}

static bool descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth) {
    return descends_from(t, from, depth, [](ggml_op) {});
}

// the rotation behind this key; the layer's last one where the key does not show it
static llama_pcd_rotation claim_rotation(const ggml_tensor * k_cur) {
    llama_pcd_rotation res;

    for (auto it = graph.rotations.rbegin(); it != graph.rotations.rend(); ++it) {
        bool weighed  = false;
        bool hadamard = false;
        const auto on_path = [&](ggml_op op) {
            weighed  |= op == GGML_OP_MUL;
            hadamard |= op == GGML_OP_MUL_MAT;
        };
        if (descends_from(k_cur, it->out, 10, on_path)) {
            res = *it;
            res.weighed  = weighed;
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
            const bool behind = !descends_from(t->src[0], r.out, 10) && descends_from(t->src[1], r.out, 10);
            return r.offset + (behind ? (int) t->src[0]->ne[0] : 0);
        }
    }
    return r.offset;
}

void llama_pcd_store_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) {
    llama_pcd * pcd = graph.pcd;
    if (!pcd || graph.ctx != ctx || !pcd->has_second_keys()) {
        return;
    }

    auto * layer = pcd->find_layer(&kv, il);
    if (!layer) {
        return;
    }

    llama_pcd_rotation r = claim_rotation(k_cur);

    r.offset = r.out ? rotation_offset(k_cur, r) : 0;
    layer->rotation = r;

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

        // most layers of a quantised cache store Hadamard-rotated keys; the transform is its own inverse
        if (rot) {
            k_cur = llama_mul_mat_hadamard(ctx, k_cur, rot);
        }
        k_cur = build_turn(*pcd, ctx, k_cur, graph.input_pos(graph.inp->key_pos, "pcd_key_pos"), r, r.offset);
        if (rot) {
            k_cur = llama_mul_mat_hadamard(ctx, k_cur, rot);
        }
    }

    k_cur = ggml_view_2d(ctx, k_cur, k_cur->ne[0]*k_cur->ne[1], k_cur->ne[2], k_cur->nb[2], 0);

    ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, layer->k2, k_cur, k_idxs));
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

    if (graph.n_twin == 0 || !pcd->has_second_keys()) {
        return nullptr;
    }

    const auto * layer = pcd->find_layer(k->view_src);
    if (!layer) {
        return nullptr;
    }

    ggml_context * ctx = gctx.ctx0;

    const ggml_tensor * k2 = layer->k2;

    const size_t n_skip = k->view_offs/layer->k1->nb[1]; // whole rows; the view starts at a cell

    k = ggml_view_4d(ctx, layer->k2, k->ne[0], k->ne[1], k->ne[2], k->ne[3],
            ggml_row_size(k2->type, k->ne[0]), k2->nb[1], k2->nb[2], n_skip*k2->nb[1]);

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

    graph.splitting = true;

    ggml_tensor * cur = gctx.build_attn_mha(part_q(n_std, n_twin), k, v, part_rows(kq_b, n_std, n_twin),
            part_rows(kq_mask, n_std, n_twin), sinks, v_mla, n_kv_max, kq_scale, il);

    if (n_std > 0) {
        ggml_tensor * k1 = ggml_view_4d(ctx, layer->k1, k->ne[0], k->ne[1], k->ne[2], k->ne[3],
                ggml_row_size(layer->k1->type, k->ne[0]), layer->k1->nb[1], layer->k1->nb[2], n_skip*layer->k1->nb[1]);

        ggml_tensor * std = gctx.build_attn_mha(part_q(0, n_std), k1, v, part_rows(kq_b, 0, n_std),
                part_rows(kq_mask, 0, n_std), sinks, v_mla, n_kv_max, kq_scale, il);

        cur = ggml_concat(ctx, std, cur, 1);
    }

    graph.splitting = false;

    ggml_build_forward_expand(gctx.gf, cur);

    return cur;
}

llama_pcd_kv::layer * llama_pcd::find_layer(const llama_kv_cache * kv, int32_t il) {
    for (auto & cur : kvs) {
        if (cur.kv == kv) {
            const auto it = kv->map_layer_ids.find(il);
            const ggml_tensor * k1 = it == kv->map_layer_ids.end() ? nullptr : kv->layers[it->second].k;
            for (auto & layer : cur.layers) {
                if (layer.k1 == k1) {
                    return &layer;
                }
            }
        }
    }
    return nullptr;
}

llama_pcd_kv::layer * llama_pcd::find_layer(const ggml_tensor * k1) {
    for (auto & cur : kvs) {
        for (auto & layer : cur.layers) {
            if (layer.k1 == k1) {
                return &layer;
            }
        }
    }
    return nullptr;
}

//
// mask
//

template <typename T>
static void mask_twins_impl(const llama_pcd & pcd, T * data, int64_t n_kv, const llama_ubatch * ubatch,
        const llama_kv_cells & cells, uint32_t n_swa, llama_swa_type swa_type, bool use_alibi) {
    const auto & p = pcd.params;

    const auto sees = [&](llama_pos p0, llama_pos p1) {
        return !llama_hparams::is_masked_swa(n_swa, swa_type, p0, p1) &&
            (p.window == 0 || p1 - p0 < p.window || p0 < p.n_sink);
    };

    const bool     is_2d = ubatch->is_pos_2d();
    const uint32_t n     = ubatch->n_tokens;

    // patches of one image share their position in time: what counts is their place in it
    const auto is_before = [&](int64_t j, uint32_t i) {
        const llama_pos p0 = cells.pos_get(j);
        const llama_pos p1 = ubatch->pos[i];
        if (p0 != p1 || !is_2d) {
            return p0 < p1;
        }
        const llama_pos x = ubatch->pos[2*n + i];
        const llama_pos y = ubatch->pos[1*n + i];
        const auto & ext = cells.ext_get(j);
        return !ext.is_2d_gt(x, y) && (ext.x != x || ext.y != y);
    };

    for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
        const llama_seq_id twin = ubatch->seq_id[i][0];
        if (!llama_pcd_is_twin(twin)) {
            continue;
        }

        const llama_seq_id parent = pcd.parents.at(twin - LLAMA_PCD_SEQ_FIRST);
        const llama_pos    p1     = ubatch->pos[i];

        for (int64_t j = 0; j < n_kv; ++j) {
            float value = -INFINITY;

            if (!cells.is_empty(j)) {
                const llama_pos p0 = cells.pos_get(j);

                if (cells.seq_has(j, twin) || (cells.seq_has(j, parent) && is_before(j, i) && sees(p0, p1))) {
                    value = use_alibi ? -std::abs(float(p0 - p1)) : 0.0f;
                }
            }

            data[i*n_kv + j] = llama_cast<T>(value);
        }
    }
}

void llama_pcd::mask_twins(ggml_tensor * dst, const llama_ubatch * ubatch, const llama_kv_cells & cells,
        uint32_t n_swa, llama_swa_type swa_type, bool use_alibi) const {
    if (parents.empty()) {
        return;
    }
    if (dst->type == GGML_TYPE_F16) {
        mask_twins_impl(*this, (ggml_fp16_t *) dst->data, dst->ne[0], ubatch, cells, n_swa, swa_type, use_alibi);
    } else {
        mask_twins_impl(*this, (float       *) dst->data, dst->ne[0], ubatch, cells, n_swa, swa_type, use_alibi);
    }
}

//
// the second keys from the first, for all cells at once
//

// positions as the cells have them, [n*n_pos]
static std::vector<int32_t> cell_positions(const llama_kv_cells & cells, uint32_t c0, uint32_t n, uint32_t n_pos) {
    std::vector<int32_t> res(n*n_pos, 0);

    for (uint32_t i = 0; i < n; ++i) {
        if (cells.is_empty(c0 + i)) {
            continue;
        }
        res[i] = cells.pos_get(c0 + i);
        if (n_pos == 4) {
            res[1*n + i] = cells.ext_get(c0 + i).y;
            res[2*n + i] = cells.ext_get(c0 + i).x;
        }
    }

    return res;
}

class llm_graph_input_pcd_cells : public llm_graph_input_i {
public:
    llm_graph_input_pcd_cells(const llama_kv_cache * kv, std::vector<int32_t> data) : kv(kv), data(std::move(data)) {}

    void set_input(const llama_ubatch * /*ubatch*/) override {
        if (pos->buffer) {
            ggml_backend_tensor_set(pos, data.data(), 0, data.size()*sizeof(int32_t));
        }
        if (rot && rot->buffer) {
            kv->set_input_k_rot(rot);
        }
    }

    const llama_kv_cache * kv;

    const std::vector<int32_t> data;

    ggml_tensor * pos = nullptr;
    ggml_tensor * rot = nullptr;
};

ggml_status llama_pcd::derive_range(const llama_pcd_kv & cur, uint32_t c0, uint32_t c1) {
    const auto & hparams = lctx.model.hparams;

    const uint32_t n     = c1 - c0;
    const uint32_t n_pos = hparams.n_pos_per_embd();

    auto * sched = lctx.get_sched();
    auto * res   = lctx.get_gf_res_reserve();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    auto inp = std::make_unique<llm_graph_input_pcd_cells>(cur.kv, cell_positions(cur.kv->v_cells[0], c0, n, n_pos));

    inp->pos = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (int64_t) n*n_pos);
    ggml_set_input(inp->pos);
    inp->rot = cur.kv->build_input_k_rot(ctx);

    for (const auto & layer : cur.layers) {
        const int64_t n_head  = hparams.n_head_kv(layer.il);
        const int64_t n_embd  = layer.k1->ne[0]/n_head;

        const auto part = [&](ggml_tensor * t) {
            return ggml_view_3d(ctx, t, n_embd, n_head, n, ggml_row_size(t->type, n_embd), t->nb[1], c0*t->nb[1]);
        };

        ggml_tensor * k = part(layer.k1);

        if (layer.rotation.out) {
            if (k->type != GGML_TYPE_F32 && k->type != GGML_TYPE_F16) {
                k = ggml_cast(ctx, k, GGML_TYPE_F32);
            }
            ggml_tensor * rot = layer.rotation.hadamard ? inp->rot : nullptr;
            if (rot) {
                k = llama_mul_mat_hadamard(ctx, k, rot);
            }
            k = build_turn(*this, ctx, k, inp->pos, layer.rotation, layer.rotation.offset);
            if (rot) {
                k = llama_mul_mat_hadamard(ctx, k, rot);
            }
        }

        ggml_build_forward_expand(gf, ggml_cpy(ctx, k, part(layer.k2)));
    }

    res->add_input(std::move(inp));

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    res->set_inputs(nullptr);

    return lctx.graph_compute(gf, false);
}

ggml_status llama_pcd::derive_second_keys() {
    lctx.synchronize();
    lctx.sched_reserve();
    lctx.memory_update(false); // a pending K-shift comes first

    // in pieces: a whole layer at once would need as much scratch memory again
    const uint32_t n_chunk = 4096;

    for (const auto & cur : kvs) {
        const uint32_t n_used = cur.kv->v_cells[0].used_max_p1();

        for (uint32_t c0 = 0; c0 < n_used; c0 += n_chunk) {
            const ggml_status status = derive_range(cur, c0, std::min(c0 + n_chunk, n_used));
            if (status != GGML_STATUS_SUCCESS) {
                reset_graphs();
                return status;
            }
            ggml_backend_sched_synchronize(lctx.get_sched());
        }
    }

    reset_graphs();

    stale = false;
    stats.n_derived++;

    return GGML_STATUS_SUCCESS;
}
