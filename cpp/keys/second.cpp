// Writes rho into frequency factors; allocates second keys, keeps track of their cells, and derives them from the first.

#include "keys/second.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

//
// tables
//

// stands for "does not turn": finite, since an infinity is not safe under fast math
static constexpr float FACTOR_STILL = 1e30f;

static const char * const INVERSE = "pcd_inverse_weights"; // 1/w for learned weights w

ggml_tensor * llama_pcd_second::table(const char * name, const ggml_tensor * source, int64_t n) {
    for (const auto & cur : tables) {
        if (cur.source == source && cur.t->ne[0] == n) {
            return cur.t;
        }
    }
    // beside its source, or where the first layer lives
    auto * buft = source && source->buffer ?
        ggml_backend_buffer_get_type(source->buffer) : ggml_backend_dev_buffer_type(pcd.lctx.get_model().dev_layer(0));

    entry res = { source, nullptr, ggml_context_ptr(ggml_init({ ggml_tensor_overhead(), nullptr, true })), nullptr };
    res.t = ggml_new_tensor_1d(res.ctx.get(), GGML_TYPE_F32, n);
    ggml_set_name(res.t, name);
    res.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(res.ctx.get(), buft));
    if (!res.buf) {
        throw std::runtime_error(std::string("pcd: no memory for the tensor ") + name);
    }

    std::vector<float> data(n, 1.0f);
    if (source) {
        GGML_ASSERT(source->type == GGML_TYPE_F32 && source->ne[0] >= n);
        ggml_backend_tensor_get(source, data.data(), 0, n*sizeof(float));
    }
    if (name == INVERSE) {
        for (float & w : data) {
            w = w == 0.0f ? 0.0f : 1.0f/w; // what was multiplied by 0 is lost, and does not matter
        }
    } else {
        const auto & p = settings.params;

        std::vector<double> rho(n);
        llama_pcd_rho(2*n, p.alpha, p.base_ratio, p.transition, rho.data());
        for (int64_t j = 0; j < n; ++j) {
            const double turn = rho[j] - 1.0;
            data[j] = std::abs(turn)*FACTOR_STILL > data[j] ? (float) (data[j]/turn) : FACTOR_STILL;
        }
    }
    ggml_backend_tensor_set(res.t, data.data(), 0, n*sizeof(float));

    tables.push_back(std::move(res));

    return tables.back().t;
}

ggml_tensor * llama_pcd_second::turn_key(
        ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos, const llama_pcd_rotation & r, ggml_tensor * hadamard) {
    // most layers of a quantised cache store Hadamard-rotated keys; the transform is its own inverse
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    // a norm after the rotation commutes with another rotation, its weights do not
    if (r.weights) {
        k = ggml_mul(ctx, k, table(INVERSE, r.weights, ggml_nelements(r.weights)));
    }
    k = r.turn(ctx, k, pos, difference(r.factors, r.n_dims()/2), r.offset);
    if (r.weights) {
        k = ggml_mul(ctx, k, r.weights);
    }
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    return k;
}

//
// layers
//

llama_pcd_second::llama_pcd_second(
        llama_pcd & pcd, const llama_pcd_memory & memory, const llama_pcd_settings & settings) :
    pcd(pcd), memory(memory), settings(settings) {
    for (const auto * kv : memory.kvs) {
        const auto & hparams = llama_pcd::hparams(*kv);
        for (const auto & own : llama_pcd::layers(*kv)) {
            if (hparams.n_head_kv(own.il) > 0) {
                layers.push_back({ caches.size(), own.il, hparams.has_rope(own.il), own.k });
            }
        }
        caches.push_back({ std::vector<uint8_t>(kv->get_size(), 0), {} });
    }
}

llama_pcd_layer * llama_pcd_second::find_layer(const ggml_tensor * k1) {
    const auto it = std::find_if(layers.begin(), layers.end(), [&](const auto & layer) { return layer.k1 == k1; });
    return it == layers.end() ? nullptr : &*it;
}

//
// other settings
//

llama_pcd_second::tensors_ptr llama_pcd_second::allocate(const llama_pcd_params & p) {
    // the type that these parameters want a layer's second keys in; GGML_TYPE_COUNT: they want none
    const auto type_of = [&](const llama_pcd_layer & layer) {
        const bool wanted = llama_pcd_settings::rerotated(p) && layer.rotates;
        return !wanted ? GGML_TYPE_COUNT : p.type_k_over >= 0 ? (ggml_type) p.type_k_over : layer.k1->type;
    };
    size_t n_wanted = 0;
    bool   serves   = all != nullptr;
    for (size_t i = 0; i < layers.size(); ++i) {
        const ggml_type type = type_of(layers[i]);
        if (type != GGML_TYPE_COUNT) {
            n_wanted += ggml_row_size(type, layers[i].k1->ne[0])*layers[i].k1->ne[1];
            serves   &= all && all->of[i] && all->of[i]->type == type;
        }
    }
    if (n_wanted == 0 || serves) {
        return all;
    }
    if (!settings.on) {
        drop(); // off is what a failure leaves in force
    }

    auto res = std::make_shared<tensors>();

    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs; // by the kind of memory that the first ones live in
    for (const auto & layer : layers) {
        const ggml_type type = type_of(layer);

        res->of.push_back(nullptr);
        if (type == GGML_TYPE_COUNT) {
            continue;
        }
        auto & ctx = ctxs[ggml_backend_buffer_get_type(layer.k1->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ layers.size()*ggml_tensor_overhead(), nullptr, true }));
        }
        res->of.back() = ggml_new_tensor_2d(ctx.get(), type, layer.k1->ne[0], layer.k1->ne[1]);
        ggml_format_name(res->of.back(), "cache_k_over_l%d", layer.il);
    }
    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buf) {
            throw std::runtime_error(format("the second keys need another %.0f MiB%s; use a smaller n_ctx, cache=\"shared\" or "
                    "perturbation=\"none\" with a window", n_wanted/1024.0/1024.0,
                    all ? " beside those in force; turn PCD off before this change, which then frees them" : ""));
        }
        ggml_backend_buffer_clear(buf.get(), 0); // no NaN may lurk in unused cells
        res->ctxs_bufs.emplace_back(std::move(ctx), std::move(buf));
    }
    return res;
}

void llama_pcd_second::swap(tensors_ptr & other) noexcept {
    std::swap(all, other);
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].k2 = all ? all->of[i] : nullptr;
    }
}

void llama_pcd_second::keep(bool changed) {
    if (settings.rerotated()) {
        if (changed || !llama_pcd_settings::same_table(settings.params, from)) {
            cells_loaded();
        }
        from = settings.params;
    }
}

void llama_pcd_second::drop() {
    if (all) {
        tensors_ptr none;
        swap(none);
        pcd.reset_graphs();
    }
}

void llama_pcd_second::trim() {
    if (!settings.rerotated()) {
        drop();
    }
}

size_t llama_pcd_second::n_bytes() const {
    size_t res = 0;
    for (size_t i = 0; all && i < all->ctxs_bufs.size(); ++i) {
        res += ggml_backend_buffer_get_size(all->ctxs_bufs[i].second.get());
    }
    return res;
}

//
// what happens to the cells
//

void llama_pcd_second::cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells) {
    const size_t i = std::find(memory.kvs.begin(), memory.kvs.end(), &kv) - memory.kvs.begin();
    if (i == caches.size()) {
        return; // of memory that twins cannot be in
    }
    caches[i].placed = cells;
    for (const auto j : cells) {
        caches[i].stale[j] = 1;
    }
}

void llama_pcd_second::cells_loaded() {
    for (auto & cur : caches) {
        std::fill(cur.stale.begin(), cur.stale.end(), 1);
    }
}

void llama_pcd_second::cells_stored() {
    for (auto & cur : caches) {
        for (const auto j : cur.placed) {
            cur.stale[j] = !settings.rerotated();
        }
    }
}

// They are derived again: that costs what turning them would, and a coarse type is not rounded twice.
void llama_pcd_second::keys_shift() {
    for (size_t i = 0; i < caches.size(); ++i) {
        const auto & cells = llama_pcd::cells(*memory.kvs[i]);

        const uint32_t n_used = memory.kvs[i]->get_has_shift() ? cells.used_max_p1() : 0;
        for (uint32_t j = 0; j < n_used; ++j) {
            if (!cells.is_empty(j) && cells.get_shift(j) != 0) {
                caches[i].stale[j] = 1;
            }
        }
    }
}

//
// second keys that are derived in memory, by a small graph of its own
//

// the positions of these cells as a rotation takes them, n_pos for each (M-RoPE: 4)
static std::vector<int32_t> positions_of(const llama_kv_cache & kv, const std::vector<uint32_t> & idxs, uint32_t n_pos) {
    const auto & cells = llama_pcd::cells(kv);
    const size_t n     = idxs.size();

    std::vector<int32_t> res(n*n_pos, 0);
    for (size_t i = 0; i < n; ++i) {
        res[i] = cells.pos_get(idxs[i]);
        if (n_pos == 4) {
            res[1*n + i] = cells.ext_get(idxs[i]).y;
            res[2*n + i] = cells.ext_get(idxs[i]).x;
        }
    }
    return res;
}

// in pieces: a whole layer at once would need as much scratch memory again
static constexpr size_t N_PIECE = 4096;

template <typename T>
static void set_data(ggml_tensor * t, const std::vector<T> & data) {
    if (t->buffer) {
        ggml_backend_tensor_set(t, data.data(), 0, data.size()*sizeof(T));
    }
}

// A graph reads and writes any cells by their index, so that scattered ones take no more graphs than neighbours.
ggml_status llama_pcd_second::derive_piece(size_t i_cache, const std::vector<uint32_t> & cells) {
    const auto & kv = *memory.kvs[i_cache];

    auto &       lctx    = pcd.lctx;
    const auto & hparams = lctx.get_model().hparams;

    auto * sched = lctx.get_sched();
    auto * res   = lctx.get_gf_res_reserve();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    const int64_t n     = cells.size();
    const auto    input = [&](ggml_type type, int64_t n_elements) {
        auto * t = ggml_new_tensor_1d(ctx, type, n_elements);
        ggml_set_input(t);
        return t;
    };
    auto * from = input(GGML_TYPE_I32, n);
    auto * to   = input(GGML_TYPE_I64, n);
    auto * pos  = input(GGML_TYPE_I32, n*hparams.n_pos_per_embd());
    auto * rot  = kv.build_input_k_rot(ctx);

    for (const auto & layer : layers) {
        if (layer.i_cache != i_cache || !layer.k2) {
            continue;
        }

        ggml_tensor * k = ggml_get_rows(ctx, layer.k1, from);

        if (layer.rotation.out) {
            const int64_t n_head = hparams.n_head_kv(layer.il);
            const int64_t n_embd = k->ne[0];

            k = ggml_reshape_3d(ctx, k, n_embd/n_head, n_head, n);
            k = turn_key(ctx, k, pos, layer.rotation, layer.rotation.hadamard ? rot : nullptr);
            k = ggml_reshape_2d(ctx, k, n_embd, n);
        }

        ggml_build_forward_expand(gf, ggml_set_rows(ctx, layer.k2, k, to));
    }

    if (ggml_graph_n_nodes(gf) == 0) {
        return GGML_STATUS_SUCCESS;
    }
    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    set_data<int32_t>(from, { cells.begin(), cells.end() });
    set_data<int64_t>(to,   { cells.begin(), cells.end() });
    set_data<int32_t>(pos,  positions_of(kv, cells, hparams.n_pos_per_embd()));
    if (rot && rot->buffer) {
        kv.set_input_k_rot(rot);
    }

    const ggml_status status = lctx.graph_compute(gf, false);
    ggml_backend_sched_synchronize(sched);

    return status;
}

ggml_status llama_pcd_second::derive(int64_t & n) {
    for (size_t i = 0; i < caches.size(); ++i) {
        const auto & cells = llama_pcd::cells(*memory.kvs[i]);
        auto       & stale = caches[i].stale;

        const uint32_t n_used = cells.used_max_p1(); // not once a cell: it is looked up in a tree

        std::vector<uint32_t> found;
        for (uint32_t j = 0; j < n_used; ++j) {
            if (stale[j] && !cells.is_empty(j)) {
                found.push_back(j);
            }
        }
        for (size_t done = 0; done < found.size(); ) {
            const size_t end = std::min(done + N_PIECE, found.size());

            pcd.lctx.synchronize();
            const ggml_status status = derive_piece(i, { found.begin() + done, found.begin() + end });
            pcd.reset_own_graph();
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            for (; done < end; ++done, ++n) {
                stale[found[done]] = 0;
            }
        }
    }
    return GGML_STATUS_SUCCESS;
}
