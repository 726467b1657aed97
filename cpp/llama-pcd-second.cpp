// Allocates second keys and values, and keeps track of their cells.

#include "llama-pcd-second.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <map>

//
// the store
//

// rerotated needs second keys where keys are rotated; separate needs second keys and values in all layers
static bool needs_k2(const llama_pcd_params & p, const llama_pcd_layer & layer) {
    return llama_pcd_settings::separate(p) || (llama_pcd_settings::rerotated(p) && layer.rotates);
}

static bool needs_v2(const llama_pcd_params & p, const llama_pcd_layer & layer) {
    return llama_pcd_settings::separate(p) && layer.v1;
}

static ggml_type type_k2(const llama_pcd_params & p, const llama_pcd_layer & layer) {
    return p.type_k_over < 0 ? layer.k1->type : (ggml_type) p.type_k_over;
}

bool llama_pcd_second::is_enough(const llama_pcd_params & p) const {
    bool res = !store.kvs.empty();
    for (const auto & cur : store.kvs) {
        for (const auto & layer : cur.layers) {
            res &= !needs_k2(p, layer) || (layer.k2 && layer.k2->type == type_k2(p, layer));
            res &= !needs_v2(p, layer) || layer.v2;
        }
    }
    return res;
}

// the tensors that one layer needs, without memory; returns their bytes
static size_t make_tensors(const llama_pcd_params & p, llama_pcd_layer & layer, ggml_context * ctx) {
    layer.k2 = ggml_new_tensor_2d(ctx, type_k2(p, layer), layer.k1->ne[0], layer.k1->ne[1]);
    ggml_format_name(layer.k2, "cache_k_over_l%d", layer.il);

    if (!needs_v2(p, layer)) {
        return ggml_nbytes(layer.k2);
    }
    layer.v2 = ggml_new_tensor_2d(ctx, layer.v1->type, layer.v1->ne[0], layer.v1->ne[1]);
    ggml_format_name(layer.v2, "cache_v_over_l%d", layer.il);

    return ggml_nbytes(layer.k2) + ggml_nbytes(layer.v2);
}

bool llama_pcd_second::make(const llama_pcd_params & p, storage & res, std::string & err) const {
    const auto & hparams = pcd.lctx.get_model().hparams;

    bool   ok       = true;
    size_t n_wanted = 0;

    for (auto * kv : memory.kvs) {
        llama_pcd_kv cur;
        cur.kv = kv;
        cur.fresh.assign(kv->get_size(), 0);

        // one buffer for each kind of memory that the first ones live in
        std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

        for (const auto & own : llama_pcd::layers(*kv)) {
            if (hparams.n_head_kv(own.il) == 0) {
                continue;
            }
            cur.layers.push_back({ own.il, hparams.has_rope(own.il), own.k, own.v });

            auto & layer = cur.layers.back();
            if (!needs_k2(p, layer)) {
                continue;
            }

            auto & ctx = ctxs[ggml_backend_buffer_get_type(own.k->buffer)];
            if (!ctx) {
                ggml_init_params ip = { 2*llama_pcd::layers(*kv).size()*ggml_tensor_overhead(), nullptr, true };
                ctx.reset(ggml_init(ip));
            }
            n_wanted += make_tensors(p, layer, ctx.get());
        }

        for (auto & [buft, ctx] : ctxs) {
            ggml_backend_buffer_ptr buf(ok ? ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft) : nullptr);

            if (buf) {
                ggml_backend_buffer_clear(buf.get(), 0); // no NaN may lurk in unused cells
                res.n_bytes += ggml_backend_buffer_get_size(buf.get());
            }
            ok &= buf != nullptr;

            cur.ctxs_bufs.emplace_back(std::move(ctx), std::move(buf));
        }

        res.kvs.push_back(std::move(cur));
    }

    if (!ok) {
        const bool values = llama_pcd_settings::separate(p);
        err = format("the second keys%s need another %.0f MiB; use a smaller n_ctx, %scache=\"shared\" or perturbation=\"none\" "
                "with a window", values ? " and values" : "", n_wanted/1024.0/1024.0, values ? "cache=\"rerotated\", " : "");
    }

    return ok;
}

void llama_pcd_second::follow_settings() {
    if (from.made && llama_pcd_settings::same_second(settings.params, from.params)) {
        return;
    }
    for (auto & cur : store.kvs) {
        cur.forget();
    }
    mark_stale();
    from = { true, settings.params };
}

llama_pcd_layer * llama_pcd_second::find_layer(const llama_kv_cache & kv, int32_t il) {
    const ggml_tensor * k1 = llama_pcd::keys_of(kv, il);
    return k1 ? find_layer(k1) : nullptr;
}

llama_pcd_layer * llama_pcd_second::find_layer(const ggml_tensor * k1) {
    for (auto & cur : store.kvs) {
        for (auto & layer : cur.layers) {
            if (layer.k1 == k1) {
                return &layer;
            }
        }
    }
    return nullptr;
}

size_t llama_pcd_second::cache_of(const llama_pcd_layer & layer) const {
    size_t i = 0;
    while (&layer < store.kvs[i].layers.data() || &layer >= store.kvs[i].layers.data() + store.kvs[i].layers.size()) {
        i++;
    }
    return i;
}

bool llama_pcd_second::weighs_keys() const {
    bool res = false;
    for (const auto & cur : store.kvs) {
        for (const auto & layer : cur.layers) {
            res |= layer.rotation.weighed;
        }
    }
    return res;
}

//
// what happens to the cells
//

void llama_pcd_second::cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo) {
    for (auto & cur : store.kvs) {
        if (cur.kv == &kv) {
            for (const auto idx : sinfo.idxs[0]) {
                cur.fresh[idx] = 0;
            }
        }
    }
}

void llama_pcd_second::cells_loaded(llama_seq_id seq_id) {
    mark_stale();

    for (auto & cur : store.kvs) {
        if (seq_id == -1) {
            cur.forget();
        }
    }
}

void llama_pcd_second::set_fresh(const std::vector<std::vector<int32_t>> & cells) {
    for (size_t i = 0; i < store.kvs.size(); ++i) {
        for (const int32_t idx : cells[i]) {
            if (idx >= 0) {
                store.kvs[i].fresh[idx] = 1;
            }
        }
    }
}

void llama_pcd_second::keys_shift(const llama_kv_cache & kv) {
    mark_stale();

    if (!from.made || !llama_pcd_settings::separate(from.params)) {
        return;
    }
    for (auto & cur : store.kvs) {
        if (cur.kv != &kv) {
            continue;
        }
        if (!llama_pcd_settings::same_table(settings.params, from.params)) { // the tables are those of other settings by now
            cur.forget();
        } else if (turn(cur, llama_pcd_tables::WHOLE) != GGML_STATUS_SUCCESS) {
            LLAMA_LOG_WARN("%s: failed to shift the second keys; they will be evaluated anew\n", __func__);
            cur.forget();
        }
    }
}
