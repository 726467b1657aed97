// What PCD keeps beside a KV cache, in the same cells: second keys and, for cache = separate, second values; and which
// cells a twin sees.

#include "llama-pcd-impl.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <cmath>
#include <limits>
#include <typeinfo>
#include <unordered_map>

// itself, not what some architectures derive from it: an indexer that picks the keys would miss the twin's
static llama_memory_hybrid * hybrid_of(llama_memory_i * mem) {
    auto * res = dynamic_cast<llama_memory_hybrid *>(mem);
    return res && typeid(*res) == typeid(llama_memory_hybrid) ? res : nullptr;
}

llama_pcd::llama_pcd(llama_context & lctx) : lctx(lctx) {
    llama_memory_i * mem = lctx.get_memory();

    if (auto * hybrid = hybrid_of(mem)) {
        recr = hybrid->get_mem_recr();
    } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(mem)) {
        recr = hybrid->get_mem_recr();
    }
    if (recr) {
        seq_first = (llama_seq_id) lctx.get_cparams().n_seq_max - 1;
    }
}

void llama_pcd::for_each_kv(const std::function<void(llama_kv_cache *)> & fn) const {
    llama_memory_i * mem = lctx.get_memory();

    if (auto * hybrid = hybrid_of(mem)) {
        mem = hybrid->get_mem_attn();
    } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(mem)) {
        mem = hybrid->get_mem_attn();
    }

    if (auto * kv = dynamic_cast<llama_kv_cache *>(mem)) {
        fn(kv);
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
        fn(iswa->get_base());
        fn(iswa->get_swa());
    }
}

int64_t llama_pcd::kv_bytes() const {
    int64_t res = 0;
    for_each_kv([&](llama_kv_cache * kv) { res += kv->size_k_bytes() + kv->size_v_bytes(); });
    return res;
}

llama_pcd_kv * llama_pcd::find_kv(const llama_kv_cache * kv) {
    for (auto & cur : kvs) {
        if (cur.kv == kv) {
            return &cur;
        }
    }
    return nullptr;
}

llama_pcd_kv::layer * llama_pcd::find_layer(const llama_kv_cache * kv, int32_t il) {
    const auto it = kv->map_layer_ids.find(il);
    return it == kv->map_layer_ids.end() ? nullptr : find_layer(kv->layers[it->second].k);
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
// memory
//

// rerotated needs second keys where keys are rotated; separate needs second keys and values in all layers
static bool needs_k2(const llama_pcd_params & p, const llama_pcd_kv::layer & layer) {
    return llama_pcd::separate(p) || (llama_pcd::rerotated(p) && layer.rotates);
}

static bool needs_v2(const llama_pcd_params & p, const llama_pcd_kv::layer & layer) {
    return llama_pcd::separate(p) && layer.v1;
}

static ggml_type type_k2(const llama_pcd_params & p, const llama_pcd_kv::layer & layer) {
    return p.type_k_over < 0 ? layer.k1->type : (ggml_type) p.type_k_over;
}

// what p needs, where it is more than there is; else res stays empty
bool llama_pcd::alloc_second(const llama_pcd_params & p, std::vector<llama_pcd_kv> & res, int64_t & n_bytes, std::string & err) const {
    const auto & hparams = lctx.get_model().hparams;

    bool enough = !kvs.empty();
    for (const auto & cur : kvs) {
        for (const auto & layer : cur.layers) {
            enough &= !needs_k2(p, layer) || (layer.k2 && layer.k2->type == type_k2(p, layer));
            enough &= !needs_v2(p, layer) || layer.v2;
        }
    }
    if (enough) {
        return true;
    }

    bool   ok       = true;
    size_t n_wanted = 0;

    n_bytes = 0;

    for_each_kv([&](llama_kv_cache * kv) {
        llama_pcd_kv cur;
        cur.kv = kv;
        cur.fresh.assign(kv->get_size(), 0);

        // one buffer for each kind of memory the first ones live in
        std::map<ggml_backend_buffer_type_t, ggml_context *> ctxs;

        for (const auto & own : kv->layers) {
            if (hparams.n_head_kv(own.il) == 0) {
                continue;
            }
            cur.layers.push_back({ own.il, hparams.has_rope(own.il), own.k, own.v });

            auto & layer = cur.layers.back();
            if (!needs_k2(p, layer)) {
                continue;
            }

            auto *& ctx = ctxs[ggml_backend_buffer_get_type(own.k->buffer)];
            if (!ctx) {
                ggml_init_params ip = { 2*kv->layers.size()*ggml_tensor_overhead(), nullptr, true };
                ctx = ggml_init(ip);
            }

            layer.k2 = ggml_new_tensor_2d(ctx, type_k2(p, layer), own.k->ne[0], own.k->ne[1]);
            ggml_format_name(layer.k2, "cache_k_over_l%d", own.il);
            n_wanted += ggml_nbytes(layer.k2);

            if (needs_v2(p, layer)) {
                layer.v2 = ggml_new_tensor_2d(ctx, own.v->type, own.v->ne[0], own.v->ne[1]);
                ggml_format_name(layer.v2, "cache_v_over_l%d", own.il);
                n_wanted += ggml_nbytes(layer.v2);
            }
        }

        for (const auto & [buft, ctx] : ctxs) {
            ggml_context_ptr        ctx_own(ctx);
            ggml_backend_buffer_ptr buf(ok ? ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft) : nullptr);

            if (buf) {
                ggml_backend_buffer_clear(buf.get(), 0); // no NaN may lurk in unused cells
                n_bytes += ggml_backend_buffer_get_size(buf.get());
            }
            ok &= buf != nullptr;

            cur.ctxs_bufs.emplace_back(std::move(ctx_own), std::move(buf));
        }

        res.push_back(std::move(cur));
    });

    if (!ok) {
        err = format("the second keys%s need another %.0f MiB; use a smaller n_ctx, %scache=\"shared\" or perturbation=\"none\" with a window",
                separate(p) ? " and values" : "", n_wanted/1024.0/1024.0, separate(p) ? "cache=\"rerotated\", " : "");
    }

    return ok;
}

int32_t llama_pcd::set_tokens(llama_seq_id seq_id, const llama_token * tokens, int32_t n) const {
    int32_t res = 0;

    for_each_kv([&](llama_kv_cache * kv) {
        auto & cells = kv->v_cells[0];

        int32_t n_set = 0;
        for (uint32_t j = 0; j < cells.used_max_p1(); ++j) {
            if (!cells.is_empty(j) && cells.seq_has(j, seq_id) && cells.pos_get(j) < n) {
                auto ext = cells.ext_get(j);
                ext.tok = tokens[cells.pos_get(j)];
                cells.ext_set(j, ext);
                n_set++;
            }
        }
        res = std::max(res, n_set);
    });

    return res;
}

//
// what happens to the cells
//

void llama_pcd::cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo) {
    if (auto * cur = find_kv(&kv)) {
        for (const auto idx : sinfo.idxs[0]) {
            cur->fresh[idx] = 0;
        }
    }
}

void llama_pcd::cells_loaded(llama_seq_id seq_id) {
    stale = true;
    forget_rows();

    for (auto & cur : kvs) {
        if (seq_id == -1) {
            std::fill(cur.fresh.begin(), cur.fresh.end(), 0);
        }
    }
}

void llama_pcd::set_fresh() {
    for (auto & cur : kvs) {
        for (const int32_t idx : cur.twin_cells) {
            if (idx >= 0) {
                cur.fresh[idx] = 1;
            }
        }
    }
}

// Where the keys of each twin of an ubatch go, in their order. cache = separate: to the cell of its token, where that is
// in memory already. Else to its own.
void llama_pcd::find_twin_cells(const llama_ubatch & ubatch) {
    const bool     is_2d = ubatch.is_pos_2d();
    const uint32_t n     = ubatch.n_tokens;

    std::unordered_multimap<llama_pos, uint32_t> at;

    uint32_t  i0    = n;
    llama_pos p_min = std::numeric_limits<llama_pos>::max();
    llama_pos p_max = -1;
    for (uint32_t i = 0; i < n; ++i) {
        if (is_twin(ubatch.seq_id[i][0])) {
            i0    = std::min(i0, i);
            p_min = std::min(p_min, ubatch.pos[i]);
            p_max = std::max(p_max, ubatch.pos[i]);
            at.emplace(ubatch.pos[i], i);
        }
    }

    for (auto & cur : kvs) {
        const auto & cells = cur.kv->v_cells[0];

        cur.twin_cells.assign(n - i0, -1);
        std::vector<bool> is_own(n - i0, true);

        for (uint32_t j = 0; j < cells.used_max_p1() && !at.empty(); ++j) {
            if (!cells.pos_in(j, p_min, p_max + 1)) {
                continue;
            }

            const auto [first, last] = at.equal_range(cells.pos_get(j));
            for (auto it = first; it != last; ++it) {
                const uint32_t     i    = it->second;
                const llama_seq_id twin = ubatch.seq_id[i][0];

                if (is_2d && (cells.ext_get(j).x != ubatch.pos[2*n + i] || cells.ext_get(j).y != ubatch.pos[n + i])) {
                    continue;
                }
                if (separate() && is_own[i - i0] && cells.seq_has(j, parents.at(twin - seq_first))) {
                    cur.twin_cells[i - i0] = j;
                    is_own[i - i0] = false;
                    break;
                }
                if (cur.twin_cells[i - i0] < 0 && cells.seq_has(j, twin)) {
                    cur.twin_cells[i - i0] = j;
                    break;
                }
            }
        }

        // its token comes later
        misplaced |= separate() && together && std::find(is_own.begin(), is_own.end(), true) != is_own.end();
    }
}

//
// mask
//

std::vector<llama_pcd::twin_view> llama_pcd::twin_views(const llama_pcd_kv & cur, const llama_ubatch & ubatch) const {
    const bool     is_2d = ubatch.is_pos_2d();
    const uint32_t n     = ubatch.n_tokens;
    const uint32_t i0    = n - cur.twin_cells.size();

    std::vector<twin_view> res;
    for (uint32_t i = i0; i < n; ++i) {
        const llama_seq_id twin = ubatch.seq_id[i][0];
        if (is_twin(twin)) {
            res.push_back({ i, parents.at(twin - seq_first), ubatch.pos[i], cur.twin_cells[i - i0],
                    is_2d, is_2d ? ubatch.pos[2*n + i] : 0, is_2d ? ubatch.pos[n + i] : 0 });
        }
    }
    return res;
}

bool llama_pcd::sees(const llama_kv_cache & kv, const twin_view & v, uint32_t j) const {
    const auto & cells  = kv.v_cells[0];
    const bool   causal = lctx.cparams.causal_attn ||
        (kv.hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY && kv.swa_type == LLAMA_SWA_TYPE_NONE);

    if ((int32_t) j == v.own) {
        return true;
    }
    if (cells.is_empty(j) || !cells.seq_has(j, v.parent)) {
        return false;
    }
    const llama_pos p0 = cells.pos_get(j);

    if (causal && p0 >= v.pos) {
        // patches of one image share their position in time: what counts is their place in it
        const auto & ext = cells.ext_get(j);
        if (p0 > v.pos || !v.is_2d || ext.is_2d_gt(v.x, v.y) || (ext.x == v.x && ext.y == v.y)) {
            return false;
        }
    }

    return (params.window == 0 || v.pos - p0 < params.window || p0 < params.n_sink) &&
        !llama_hparams::is_masked_swa(kv.n_swa, kv.swa_type, p0, v.pos);
}

// A twin one position further sees what the twin before it saw: the token before, whose cell was that one's own, and
// its own. Then a long prompt's rows need not each go through all cells.
bool llama_pcd::sees_one_more(const llama_kv_cache & kv, const twin_view & prev, const twin_view & v) const {
    const auto & cells = kv.v_cells[0];

    return params.window == 0 && kv.swa_type == LLAMA_SWA_TYPE_NONE && !kv.hparams.use_alibi && !v.is_2d &&
        v.parent == prev.parent && v.pos == prev.pos + 1 &&
        prev.own >= 0 && cells.seq_has(prev.own, prev.parent) && cells.pos_get(prev.own) == prev.pos;
}

template <typename T>
void llama_pcd::fill_mask(T * mask, int64_t n_kv, const llama_kv_cache & kv, const std::vector<twin_view> & views) const {
    const twin_view * prev = nullptr;

    for (const twin_view & v : views) {
        T * row = mask + v.i*n_kv;

        if (prev && v.own >= 0 && sees_one_more(kv, *prev, v)) {
            std::copy_n(mask + prev->i*n_kv, n_kv, row);
            row[v.own] = llama_cast<T>(0.0f);
        } else {
            for (int64_t j = 0; j < n_kv; ++j) {
                row[j] = llama_cast<T>(!sees(kv, v, j) ? -INFINITY :
                        kv.hparams.use_alibi ? -std::abs(float(kv.v_cells[0].pos_get(j) - v.pos)) : 0.0f);
            }
        }
        prev = &v;
    }
}

void llama_pcd::mask_twins(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const {
    if (parents.empty()) {
        return;
    }

    for (const auto & cur : kvs) {
        if (cur.kv != &kv) {
            continue;
        }
        if (dst->type == GGML_TYPE_F16) {
            fill_mask((ggml_fp16_t *) dst->data, dst->ne[0], kv, twin_views(cur, ubatch));
        } else {
            fill_mask((float *) dst->data, dst->ne[0], kv, twin_views(cur, ubatch));
        }
    }
}

// The cells that the twins' attention has to look at: all from `begin` on and, where begin > 0 and `head`, the first
// block, for the first positions of a text.
llama_pcd::cell_range llama_pcd::visible_cells(const llama_pcd_kv & cur, const llama_ubatch & ubatch) const {
    if (params.window == 0) {
        return {};
    }

    const auto & cells = cur.kv->v_cells[0];
    const auto   views = twin_views(cur, ubatch);

    uint32_t begin    = UINT32_MAX;
    uint32_t end_head = 0; // of the first positions

    for (uint32_t j = 0; j < cells.used_max_p1() && views.size() <= LLAMA_PCD_MAX_TWINS; ++j) {
        for (const twin_view & v : views) {
            if (!sees(*cur.kv, v, j)) {
                continue;
            }
            if (begin == UINT32_MAX && (int32_t) j != v.own && cells.pos_get(j) < params.n_sink && j < LLAMA_PCD_CELL_BLOCK) {
                end_head = j + 1;
            } else {
                begin = std::min(begin, j);
            }
        }
    }

    begin = begin == UINT32_MAX ? 0 : begin/LLAMA_PCD_CELL_BLOCK*LLAMA_PCD_CELL_BLOCK;
    if (begin <= LLAMA_PCD_CELL_BLOCK && end_head > 0) {
        begin = 0; // nothing gained
    }

    return { begin, begin > 0 && end_head > 0 };
}

//
// turning keys in memory
//

// positions, or what is still to be added to them, as the cells have them: [n*n_pos]
static std::vector<int32_t> cell_positions(const llama_kv_cells & cells, uint32_t c0, uint32_t n, uint32_t n_pos, bool shift) {
    std::vector<int32_t> res(n*n_pos, 0);

    for (uint32_t i = 0; i < n; ++i) {
        if (cells.is_empty(c0 + i)) {
            continue;
        }
        res[i] = shift ? cells.get_shift(c0 + i) : cells.pos_get(c0 + i);
        if (n_pos == 4 && !shift) {
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

// The cells [c0, c1): second keys = first keys, turned by their position with theta* - theta; or, with shift, second keys
// turned by what is to be added to their position.
ggml_status llama_pcd::turn_range(const llama_pcd_kv & cur, uint32_t c0, uint32_t c1, bool shift) {
    const auto & hparams = lctx.model.hparams;

    const uint32_t n     = c1 - c0;
    const uint32_t n_pos = hparams.n_pos_per_embd();

    const table_kind kind = shift ? TABLE_WHOLE : TABLE_DIFFERENCE;

    auto * sched = lctx.get_sched();
    auto * res   = lctx.get_gf_res_reserve();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    auto inp = std::make_unique<llm_graph_input_pcd_cells>(cur.kv, cell_positions(cur.kv->v_cells[0], c0, n, n_pos, shift));

    inp->pos = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (int64_t) n*n_pos);
    ggml_set_input(inp->pos);
    inp->rot = cur.kv->build_input_k_rot(ctx);

    for (const auto & layer : cur.layers) {
        if (!layer.k2 || (shift && !layer.rotation.out)) {
            continue;
        }

        const int64_t n_head = hparams.n_head_kv(layer.il);
        const int64_t n_embd = layer.k1->ne[0]/n_head;

        const auto part = [&](ggml_tensor * t) {
            return ggml_view_3d(ctx, t, n_embd, n_head, n, ggml_row_size(t->type, n_embd), t->nb[1], c0*t->nb[1]);
        };

        ggml_tensor * k = part(shift ? layer.k2 : layer.k1);

        if (k->type != GGML_TYPE_F32 && (layer.rotation.out || k->type != layer.k2->type)) {
            k = ggml_cast(ctx, k, GGML_TYPE_F32);
        }
        if (layer.rotation.out) {
            k = llama_pcd_turn_key(*this, ctx, k, inp->pos, layer.rotation, layer.rotation.hadamard ? inp->rot : nullptr, kind);
        }

        ggml_build_forward_expand(gf, ggml_cpy(ctx, k, part(layer.k2)));
    }

    res->add_input(std::move(inp));

    if (ggml_graph_n_nodes(gf) == 0) {
        return GGML_STATUS_SUCCESS;
    }
    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    res->set_inputs(nullptr);

    const ggml_status status = lctx.graph_compute(gf, false);
    ggml_backend_sched_synchronize(sched);

    return status;
}

// in pieces: a whole layer at once would need as much scratch memory again
static constexpr uint32_t N_CHUNK = 4096;

ggml_status llama_pcd::derive_second_keys() {
    lctx.synchronize();
    lctx.sched_reserve();
    lctx.memory_update(false); // a pending K-shift comes first

    ggml_status status = GGML_STATUS_SUCCESS;

    for (const auto & cur : kvs) {
        const uint32_t n_used = cur.kv->v_cells[0].used_max_p1();

        for (uint32_t c0 = 0; c0 < n_used && status == GGML_STATUS_SUCCESS; c0 += N_CHUNK) {
            status = turn_range(cur, c0, std::min(c0 + N_CHUNK, n_used), false);
        }
    }

    reset_graphs();

    if (status == GGML_STATUS_SUCCESS) {
        stale = false;
        stats.n_derived++;
    }

    return status;
}

// positions are about to change under the first keys
void llama_pcd::keys_shift(llama_kv_cache & kv) {
    stale = true;

    auto * cur = find_kv(&kv);
    if (!cur || !has_second || second_params.cache != LLAMA_PCD_CACHE_SEPARATE) {
        return;
    }
    if (!follows_settings()) { // the tables are of other settings by now
        std::fill(cur->fresh.begin(), cur->fresh.end(), 0);
        return;
    }

    const uint32_t n_used = kv.v_cells[0].used_max_p1();

    for (uint32_t c0 = 0; c0 < n_used; c0 += N_CHUNK) {
        if (turn_range(*cur, c0, std::min(c0 + N_CHUNK, n_used), true) != GGML_STATUS_SUCCESS) {
            LLAMA_LOG_WARN("%s: failed to shift the second keys; they will be evaluated anew\n", __func__);
            std::fill(cur->fresh.begin(), cur->fresh.end(), 0);
            return;
        }
    }
}
