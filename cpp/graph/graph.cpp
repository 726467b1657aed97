// The graph that a thread builds: the rotations of twins, second keys, and attention of standard tokens and twins side by side.

#include "graph/graph.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

llama_pcd_graph & llama_pcd_graph::current() {
    static thread_local llama_pcd_graph graph;
    return graph;
}

void llama_pcd_graph::begin(const llm_graph_context & gctx, llama_pcd_core * core) {
    auto & graph = current();
    graph = {};

    if (!core || !(core->settings.on || core->probing || core->read)) {
        return;
    }
    const auto & ubatch = gctx.ubatch;

    // a graph that memory is reserved for is of no batch, so it has none
    auto last = core->twins ? core->twins->layout_of(core->memory, ubatch) : llama_pcd_twins::layout {};
    if (last.misplaced) {
        core->twins->misplaced = true;
        last = {};
    }
    graph.inp_own = std::make_unique<llm_graph_input_pcd>(
        *core, ubatch.n_tokens, last.n_twin, last.n_rotated, gctx.hparams.n_pos_per_embd());
    if (last.n_twin > 0) {
        core->twins->place(core->memory, ubatch);
        graph.inp_own->visible = core->twins->visible(core->memory);
    }
    graph.core = core;
    graph.inp  = graph.inp_own.get();
    graph.ctx  = gctx.ctx0;
    graph.gf   = gctx.gf;
}

//
// inputs
//

ggml_tensor * llama_pcd_graph::input_pos(ggml_tensor *& t, const char * name) const {
    if (!t) {
        t = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (int64_t) inp->n_tokens*inp->n_pos);
        ggml_set_input(t);
        ggml_set_name(t, name);
    }
    return t;
}

bool llm_graph_input_pcd::can_reuse(const llm_graph_params & params) {
    const auto & ubatch = params.ubatch;

    const bool same = core.pcd.generation == generation && core.settings.on && ubatch.n_tokens == n_tokens;

    if (!same || !core.twins) {
        return same && n_twin == 0;
    }
    auto & twins = *core.twins;

    const auto last = twins.layout_of(core.memory, ubatch);
    if (last.n_twin != n_twin || last.n_rotated != n_rotated || last.misplaced) {
        return false;
    }
    twins.place(core.memory, ubatch);
    return twins.visible(core.memory) == visible;
}

void llm_graph_input_pcd::set_input(const llama_ubatch * ubatch) {
    core.second.cells_stored();

    set_positions(*ubatch);

    for (const auto & [i, rot] : k_rot) {
        if (rot && rot->buffer) {
            core.memory.kvs[i]->set_input_k_rot(rot);
        }
    }
    for (const auto & [mask, i] : masks) {
        if (mask->buffer) {
            core.twins->mask(core.memory, i, mask);
        }
    }
}

void llm_graph_input_pcd::set_positions(const llama_ubatch & ubatch) const {
    // as llm_graph_input_pos does: a text token has the same position in all sections but the last
    const bool text = ubatch.token && n_pos == 4;

    // those of the tokens [i0, i1); others have 0
    const auto set = [&](ggml_tensor * t, uint32_t i0, uint32_t i1) {
        if (!t || !t->buffer) {
            return;
        }
        std::vector<int32_t> data(n_tokens*n_pos, 0);
        for (uint32_t j = 0; j < (text ? 3 : n_pos); ++j) {
            for (uint32_t i = i0; i < i1; ++i) {
                data[j*n_tokens + i] = ubatch.pos[text ? i : j*n_tokens + i];
            }
        }
        ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
    };

    set(twin_pos, n_tokens - n_rotated, n_tokens);
    set(key_pos,  0, n_tokens - n_twin);
}

//
// rotation
//

ggml_tensor * llama_pcd_graph::rotated(ggml_context * c, ggml_tensor * cur) {
    if (!builds_in(c)) {
        return cur;
    }
    if (cur->ne[2] != inp->n_tokens) {
        core->hides_rotation = true; // no token is known for its rows, so twins would not be turned
        return cur;
    }
    if (core->probing) {
        core->seen.push_back(cur);
    }

    llama_pcd_rotation r(cur);

    if (inp->n_rotated > 0) {
        cur = r.turn(ctx, cur, input_pos(inp->twin_pos, "pcd_twin_pos"),
                core->second.difference(r.factors, r.n_dims()/2), 0);
    }

    r.out = cur;
    rotations.push_back(r);
    core->has_rotations = true;

    return cur;
}

void llama_pcd_graph::offset(ggml_tensor * a, int n_offs) {
    if (!core || rotations.empty() || rotations.back().out != a) {
        return;
    }
    rotations.back().offset = n_offs;

    if (inp->n_rotated > 0) {
        ggml_rope_set_offset(a->src[0], n_offs); // ours was built on top of the model's
    }
}

//
// second keys: which rotation a key went through, and where its copy is stored
//

// An operation behind a rotation that another rotation, of pairs by angles, may be exchanged with: one that moves numbers, or
// multiplies a head by one number
static bool commutes(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONCAT:
        case GGML_OP_REPEAT:
        case GGML_OP_SCALE:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
            return true;
        default:
            return false;
    }
}

// learned weights, one for each dimension
static bool is_weights(const ggml_tensor * w, const ggml_tensor * key) {
    return w->op == GGML_OP_NONE && w->type == GGML_TYPE_F32 && w->buffer && ggml_nelements(w) == key->ne[0];
}

// Whether t is made from `from`, in at most so many steps and without another rotation in between; `on_path` is called for each operation
// on the way, the first one first.
template <typename F>
static bool descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth, const F & on_path) {
    if (!t || depth == 0) {
        return false;
    }
    if (t == from) {
        return true;
    }
    if (t->op == GGML_OP_ROPE) { // a key is never rotated twice, so the search ends at its rotation
        return false;
    }
    if (descends_from(t->src[0], from, depth - 1, on_path) || descends_from(t->src[1], from, depth - 1, on_path)) {
        on_path(t);
        return true;
    }
    return false;
}

// the rotation behind this key
llama_pcd_rotation llama_pcd_graph::claim_rotation(const ggml_tensor * k_cur, bool hadamard) {
    const auto built = std::exchange(rotations, {});

    for (auto it = built.rbegin(); it != built.rend(); ++it) {
        llama_pcd_rotation res = *it;

        const auto on_path = [&](const ggml_tensor * t) {
            if (t->op == GGML_OP_MUL && !res.weights && is_weights(t->src[1], t)) {
                res.weights = t->src[1];
            } else if (t->op == GGML_OP_MUL_MAT && hadamard && !res.hadamard) {
                res.hadamard = true; // the cache's own
            } else {
                res.weighed |= !commutes(t);
            }
        };
        if (descends_from(k_cur, it->out, 10, on_path)) {
            return res;
        }
    }
    core->hides_rotation |= !built.empty(); // or the key shows it later than ten operations behind it

    return {};
}

// where the rotated dimensions start in a whole key: behind the unrotated ones where a model concatenates them (MLA)
static int rotation_offset(const ggml_tensor * k_cur, const llama_pcd_rotation & r) {
    for (const ggml_tensor * t = k_cur; t; t = t->src[0]) {
        if (t == r.out) {
            return r.offset;
        }
        if (t->op == GGML_OP_CONCAT && t->op_params[0] == 0) {
            const auto is_in  = [&](const ggml_tensor * part) { return descends_from(part, r.out, 10, [](const ggml_tensor *) {}); };
            const bool behind = !is_in(t->src[0]) && is_in(t->src[1]);
            return r.offset + (behind ? (int) t->src[0]->ne[0] : 0);
        }
    }
    return r.offset;
}

void llama_pcd_graph::store_k(llama_pcd_layer & layer, ggml_tensor * k_cur, ggml_tensor * k_idxs) {
    const auto & kv = *core->memory.kvs[layer.i_cache];

    llama_pcd_rotation r = claim_rotation(k_cur, llama_pcd::transforms_keys(kv));

    r.offset = r.out ? rotation_offset(k_cur, r) : 0;
    layer.rotation = r;

    if (core->settings.rerotated() && layer.k2) {
        if (r.out) {
            auto & rot = inp->k_rot[layer.i_cache];
            if (r.hadamard && !rot) {
                rot = kv.build_input_k_rot(ctx);
            }
            k_cur = core->second.turn_key(ctx, k_cur, input_pos(inp->key_pos, "pcd_key_pos"), r, r.hadamard ? rot : nullptr);
        }
        // heads side by side, as the cache stores them
        k_cur = ggml_view_2d(ctx, k_cur, k_cur->ne[0]*k_cur->ne[1], k_cur->ne[2], k_cur->nb[2], 0);
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, layer.k2, k_cur, k_idxs));
    }
}

//
// attention, where twins have second keys or look at fewer cells
//

ggml_tensor * llama_pcd_graph::second_of(const attn & args, const llama_pcd_layer & layer) const {
    const ggml_tensor * k = args.k;

    return ggml_view_4d(ctx, layer.k2, k->ne[0], k->ne[1], k->ne[2], k->ne[3],
            ggml_row_size(layer.k2->type, k->ne[0]), layer.k2->nb[1], layer.k2->nb[2], k->view_offs/layer.k1->nb[1]*layer.k2->nb[1]);
}

// the cells [i0, i1) along one dimension of t
static ggml_tensor * view_cells(ggml_context * ctx, ggml_tensor * t, int dim, int64_t i0, int64_t i1) {
    int64_t ne[4] = { t->ne[0], t->ne[1], t->ne[2], t->ne[3] };
    ne[dim] = i1 - i0;
    return ggml_view_4d(ctx, t, ne[0], ne[1], ne[2], ne[3], t->nb[1], t->nb[2], t->nb[3], i0*t->nb[dim]);
}

// the cells in a range
static ggml_tensor * build_cells(ggml_context * ctx, ggml_tensor * t, int dim, const llama_pcd_cell_range & cells) {
    ggml_tensor * tail = view_cells(ctx, t, dim, cells.begin, cells.end);
    return cells.head ? ggml_concat(ctx, view_cells(ctx, t, dim, 0, cells.head), tail, dim) : tail;
}

static bool is_transposed(const ggml_tensor * v) {
    return v->nb[1] > v->nb[2];
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
// (cb_eval) sees the weights of each head as llama.cpp lays them out, unless the operations alone are counted.
bool llama_pcd_graph::multiplies(const attn & args) const {
    const auto & gctx = args.gctx;

    const bool alike = !args.kq_b && !args.sinks && !args.v_mla && gctx.hparams.f_max_alibi_bias == 0.0f && gctx.arch != LLM_ARCH_GROK;

    const bool is_read = gctx.cparams.cb_eval && !core->pcd.is_counted;

    return alike && !is_read && !gctx.cparams.flash_attn && is_transposed(args.v) && args.k->ne[3] == 1;
}

// The query heads that share one head of keys, where they attend together, as rows of one product: that is so where they are more
// than the tokens, which are the rows otherwise. A product reads its keys once for all rows. 1: they do not.
int64_t llama_pcd_graph::n_grouped(const attn & args, int64_t n) const {
    const int64_t n_group = args.q->ne[1]/args.k->ne[1];

    return multiplies(args) && n < n_group ? n_group : 1;
}

// where a tensor is that has memory already, as that of a cache has
static ggml_backend_buffer_type_t type_of_buffer(const ggml_tensor * t) {
    const auto * base = t->view_src ? t->view_src : t;
    return base->buffer ? ggml_backend_buffer_get_type(base->buffer) : nullptr;
}

// The mask of a part; the rows of grouped queries once for each head of a group. The layers of one device with this mask share it;
// another device makes its own from the input, since what one has made would go to the others through the host at each step.
ggml_tensor * llama_pcd_graph::build_mask(const attn & args, const part & p) {
    const int64_t n_group = n_grouped(args, p.n);

    ggml_tensor *& res = masks[{ args.kq_mask, p.i0, p.n, p.range.begin, p.range.end, n_group, type_of_buffer(args.k) }];
    if (!res) {
        res = build_cells(ctx, view_rows(ctx, args.kq_mask, p.i0, p.n), 0, p.range);
        if (!ggml_is_contiguous(res)) {
            res = ggml_cont(ctx, res);
        }
        if (n_group > 1) {
            res = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, res, res->ne[0], 1, p.n), res->ne[0], n_group, p.n, 1);
            res = ggml_reshape_2d(ctx, res, res->ne[0], n_group*p.n);
        }
    }
    return res;
}

// Keys times queries. Some devices do not multiply blocks whose heads lie apart: there the keys are copied as floats, or else the
// CPU would multiply, and all keys would be copied to it.
static ggml_tensor * build_product(ggml_context * ctx, ggml_tensor * k, ggml_tensor * q) {
    ggml_tensor * res = ggml_mul_mat(ctx, k, q);

    ggml_backend_buffer_t buffer = k->view_src ? k->view_src->buffer : nullptr;
    if (ggml_is_quantized(k->type) && buffer) {
        auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
        if (dev && !ggml_backend_dev_supports_op(dev, res)) {
            res = ggml_mul_mat(ctx, ggml_cast(ctx, k, GGML_TYPE_F32), q);
        }
    }
    ggml_prec_set_acc(res, GGML_PREC_F32);

    return res;
}

// The first product and the softmax: as llama.cpp does it, but the rows are the heads of a group or the tokens, whichever are more.
ggml_tensor * llama_pcd_graph::build_weights(const attn & args, const part & p) {
    const auto &  hparams   = args.gctx.hparams;
    const int64_t n_head_kv = args.k->ne[1];
    const int64_t n_group   = args.q->ne[1]/n_head_kv;
    const bool    grouped   = n_grouped(args, p.n) > 1;

    // [., heads of a group, tokens, groups]
    ggml_tensor * q = ggml_view_4d(ctx, args.q, args.q->ne[0], n_group, p.n, n_head_kv,
            args.q->nb[1], args.q->nb[2], n_group*args.q->nb[1], p.i0*args.q->nb[2]);
    if (!grouped) {
        q = ggml_permute(ctx, q, 0, 2, 1, 3);
    }

    const auto product = [&](int64_t i0, int64_t i1) {
        return build_product(ctx, ggml_permute(ctx, view_cells(ctx, p.k, 2, i0, i1), 0, 3, 1, 2), q);
    };

    ggml_tensor * cur = product(p.range.begin, p.range.end);
    if (p.range.head) {
        cur = ggml_concat(ctx, product(0, p.range.head), cur, 0);
    }
    if (hparams.attn_soft_cap) {
        cur = ggml_tanh (ctx, ggml_scale(ctx, cur, 1.0f/hparams.f_attn_logit_softcapping));
        cur = ggml_scale(ctx, cur, hparams.f_attn_logit_softcapping);
    }
    if (grouped) {
        cur = ggml_reshape_4d(ctx, cur, cur->ne[0], n_group*p.n, 1, n_head_kv);
    }
    return ggml_soft_max_ext(ctx, cur, build_mask(args, p), args.kq_scale, 0.0f);
}

// the second product
ggml_tensor * llama_pcd_graph::build_values(const attn & args, const part & p, ggml_tensor * weights) const {
    const auto &  gctx      = args.gctx;
    const int64_t n_head    = args.q->ne[1];
    const int64_t n_head_kv = args.k->ne[1];

    // the weights of the cells [i0, i1) begin at w0
    const auto product = [&](int64_t i0, int64_t i1, int64_t w0) {
        ggml_tensor * v = ggml_permute(ctx, view_cells(ctx, args.v, 0, i0, i1), 0, 3, 1, 2);
        return ggml_mul_mat(ctx, v, view_cells(ctx, weights, 0, w0, w0 + i1 - i0));
    };

    ggml_tensor * cur = product(p.range.begin, p.range.end, p.range.head);
    if (p.range.head) {
        cur = ggml_add(ctx, cur, product(0, p.range.head, 0));
    }
    if (!gctx.cparams.offload_kqv) {
        ggml_backend_sched_set_tensor_backend(gctx.sched, cur, gctx.backend_cpu); // as llama.cpp does
    }

    const int64_t n_embd = cur->ne[0]*n_head;

    if (p.n == 1) { // its heads are in order
        return ggml_reshape_2d(ctx, cur, n_embd, 1);
    }

    cur = n_grouped(args, p.n) > 1 ?
        ggml_permute(ctx, ggml_reshape_4d(ctx, cur, cur->ne[0], n_head/n_head_kv, p.n, n_head_kv), 0, 1, 3, 2) :
        ggml_permute(ctx, cur, 0, 3, 1, 2);
    return ggml_cont_2d(ctx, cur, n_embd, p.n);
}

// a part as llama.cpp does it
ggml_tensor * llama_pcd_graph::build_mha(const attn & args, const part & p) {
    ggml_tensor * k = p.k;
    ggml_tensor * v = args.v;
    if (p.range.begin > 0 || p.range.end < k->ne[2]) {
        k = build_cells(ctx, k, 2, p.range);
        // transposed values are put together with their dimensions in the order of memory
        v = is_transposed(v) ?
            ggml_permute(ctx, build_cells(ctx, ggml_permute(ctx, v, 0, 2, 1, 3), 0, p.range), 0, 2, 1, 3) :
            build_cells(ctx, v, 2, p.range);
    }
    ggml_tensor * q = ggml_view_3d(ctx, args.q, args.q->ne[0], args.q->ne[1], p.n, args.q->nb[1], args.q->nb[2], p.i0*args.q->nb[2]);

    const llama_pcd_while inside(splitting, true);

    return args.gctx.build_attn_mha(q, k, v, view_rows(ctx, args.kq_b, p.i0, p.n), build_mask(args, p),
            args.sinks, args.v_mla, args.n_kv_max, args.kq_scale, args.il);
}

ggml_tensor * llama_pcd_graph::build_parts(const attn & args, const std::vector<part> & parts) {
    const bool ours = multiplies(args);

    // all keys first: values that the parts share are then read twice in a row, the second time from the CPU's caches
    std::vector<ggml_tensor *> weights;
    for (const auto & p : parts) {
        weights.push_back(ours ? build_weights(args, p) : nullptr);
        if (ours) {
            ggml_build_forward_expand(gf, weights.back());
        }
    }

    ggml_tensor * cur = nullptr;
    for (size_t i = 0; i < parts.size(); ++i) {
        ggml_tensor * rows = ours ? build_values(args, parts[i], weights[i]) : build_mha(args, parts[i]);
        cur = cur ? ggml_concat(ctx, cur, rows, 1) : rows;
    }
    ggml_build_forward_expand(gf, cur);

    return cur;
}

// the input that a mask is made from
static ggml_tensor * input_of(ggml_tensor * mask) {
    while (mask->src[0] && !(mask->flags & GGML_TENSOR_FLAG_INPUT)) {
        mask = mask->src[0];
    }
    return mask;
}

ggml_tensor * llama_pcd_graph::build_attn(const attn & args) {
    if (!builds_in(args.gctx.ctx0) || splitting) {
        return nullptr;
    }
    if (inp_own) {
        args.gctx.res->add_input(std::move(inp_own));
    }
    auto * layer = core->second.find_layer(args.k->view_src);

    for (int i = n_nodes; layer && i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (node->op == GGML_OP_SET_ROWS && node->view_src == layer->k1) { // llama_kv_cache::cpy_k, which views the key as rows
            store_k(*layer, node->src[0]->src[0], node->src[1]);
            break;
        }
    }
    n_nodes = ggml_graph_n_nodes(gf);

    if (core->read) {
        build_read(args, layer);
    }

    // a layer that shares another's cells stores no keys: its rotation must not reach the next layer
    rotations.clear();
    n_attn++;

    if (inp->n_twin == 0 || !layer) {
        return nullptr;
    }
    inp->masks[input_of(args.kq_mask)] = layer->i_cache;

    const bool second = layer->k2 && core->settings.rerotated() && inp->n_rotated > 0;

    // On the CPU flash attention passes over hidden cells, which takes less time than to leave them out.
    const bool passes_over = args.gctx.cparams.flash_attn && ggml_backend_buffer_is_host(layer->k1->buffer);

    llama_pcd_cell_range range = inp->visible[layer->i_cache];
    if (args.kq_b) {
        range.end = args.k->ne[2];
    }
    const llama_pcd_cell_range all = { 0, range.end, 0 };
    if (args.kq_b || passes_over) {
        range = all;
    }
    // the same cells for all tokens: only a few of them gain by heads in groups
    if (!second && range.begin == 0) {
        return n_grouped(args, inp->n_tokens) > 1 ? build_parts(args, { { args.k, all, 0, inp->n_tokens } }) : nullptr;
    }

    // twins that look at the first keys are with the standard tokens if others look at the second ones
    const int64_t n_last  = second ? inp->n_rotated : inp->n_twin;
    const int64_t n_first = inp->n_tokens - n_last;

    const part own   = { args.k, all, 0, n_first };
    const part twins = { second ? second_of(args, *layer) : args.k, range, n_first, n_last };

    return n_first > 0 ? build_parts(args, { own, twins }) : build_parts(args, { twins });
}

//
// what llama_pcd_attention reads
//

// ALiBi's factor of the mask, as ggml has it
static float slope_of(float max_bias, int64_t head, int64_t n_heads) {
    const double n = std::exp2(std::floor(std::log2((double) n_heads)));
    return (float) (head < n ? std::exp2(-max_bias*(head + 1)/n) : std::exp2(-max_bias/2*(2*(head - n) + 1)/n));
}

// as llama.cpp does it, but of floats
ggml_tensor * llama_pcd_graph::build_head(const attn & args, ggml_tensor * keys, int64_t head) const {
    const auto &  hparams = args.gctx.hparams;
    const int64_t n_head  = args.q->ne[1];
    const int64_t i_k     = head/(n_head/args.k->ne[1]); // heads of one group share their keys

    ggml_tensor * q = ggml_view_2d(ctx, args.q, args.q->ne[0], inp->n_tokens,    args.q->nb[2], head*args.q->nb[1]);
    ggml_tensor * k = ggml_view_2d(ctx, keys,   keys->ne[0],   keys->ne[2], keys->nb[2],   i_k*keys->nb[1]);

    ggml_tensor * cur = build_product(ctx, k->type == GGML_TYPE_F32 ? k : ggml_cast(ctx, k, GGML_TYPE_F32), q);

    float scale = args.kq_scale;
    if (hparams.attn_soft_cap || args.gctx.arch == LLM_ARCH_GROK) {
        const float cap = hparams.f_attn_logit_softcapping;
        const float own = args.gctx.arch == LLM_ARCH_GROK && !args.gctx.cparams.flash_attn ? hparams.f_attn_out_scale : args.kq_scale;

        cur   = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, cur, own/cap)), cap);
        scale = 1.0f;
    }
    ggml_tensor * mask = args.kq_mask;
    if (hparams.f_max_alibi_bias > 0.0f) {
        mask = mask->type == GGML_TYPE_F32 ? mask : ggml_cast(ctx, mask, GGML_TYPE_F32);
        mask = ggml_scale(ctx, mask, slope_of(hparams.f_max_alibi_bias, head, n_head));
    }
    cur = ggml_soft_max_ext(ctx, cur, mask, scale, 0.0f);
    if (args.sinks) {
        ggml_tensor * sink = ggml_view_1d(ctx, args.sinks, 1, head*args.sinks->nb[0]);
        ggml_soft_max_add_sinks(cur, ggml_cont(ctx, sink)); // a copy, since Vulkan's softmax ends the process at one in the middle
    }
    return cur;
}

void llama_pcd_graph::build_read(const attn & args, const llama_pcd_layer * layer) {
    const auto it = core->read->heads.find(n_attn);

    const bool readable = it != core->read->heads.end() && layer && args.kq_mask && args.kq_mask->ne[2] == 1 && args.k->ne[3] == 1 && !args.kq_b;
    if (!readable) {
        return; // or all cells are seen, heads each see another choice of cells, or there is a cache for each sequence
    }
    const int64_t n_head = args.q->ne[1];

    // all heads at once: on Vulkan the blocks of one may begin where none can be read
    ggml_tensor * keys = ggml_is_quantized(args.k->type) ? ggml_cast(ctx, args.k, GGML_TYPE_F32) : args.k;
    ggml_tensor * sum  = nullptr;
    for (const int32_t head : it->second) {
        if (head < 0 || head >= n_head) {
            core->read->refusal = format("layer %d of this model has %d heads, so its head %d cannot be read", n_attn, (int) n_head, head);
            return;
        }
        ggml_tensor * cur = build_head(args, keys, head);
        sum = sum ? ggml_add(ctx, sum, cur) : cur;
    }
    ggml_set_output(sum);
    ggml_build_forward_expand(gf, sum);
    core->read->found[n_attn] = { layer->i_cache, sum };
}
