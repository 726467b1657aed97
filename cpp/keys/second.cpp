// Allocates second keys, keeps track of their cells, and derives them from the first.

#include "keys/second.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

//
// cells
//

std::vector<uint32_t> llama_pcd_stale::list(const llama_kv_cells & cells) {
    std::vector<uint32_t> res;

    const uint8_t * begin = flags.data();
    const uint8_t * end   = begin + flags.size();

    for (const uint8_t * at = begin + first; n > res.size(); ++at) {
        at = (const uint8_t *) memchr(at, 1, end - at);

        const uint32_t i = at - begin;
        if (cells.is_empty(i)) {
            set(i, false);
        } else {
            res.push_back(i);
        }
    }
    first = res.empty() ? flags.size() : res[0];
    return res;
}

llama_pcd_kv::llama_pcd_kv(llama_kv_cache & kv, size_t index) : kv(&kv), stale(kv.get_size()) {
    const auto & hparams = llama_pcd::hparams(kv);

    for (const auto & own : llama_pcd::layers(kv)) {
        if (hparams.n_head_kv(own.il) > 0) {
            layers.push_back({ index, own.il, hparams.has_rope(own.il), own.k });
        }
    }
}

llama_pcd_second::llama_pcd_second(
        llama_pcd & pcd, const llama_pcd_memory & memory, const llama_pcd_settings & settings, llama_pcd_tables & tables) :
    pcd(pcd), memory(memory), settings(settings), tables(tables), all(memory.kvs.size()) {
    for (auto * kv : memory.kvs) {
        kvs.emplace_back(*kv, kvs.size());
    }
}

//
// other settings
//

// the type that parameters want a layer's second keys in; GGML_TYPE_COUNT: they want none
static ggml_type type_for(const llama_pcd_params & p, const llama_pcd_layer & layer) {
    if (!llama_pcd_settings::rerotated(p) || !layer.rotates) {
        return GGML_TYPE_COUNT;
    }
    return p.type_k_over >= 0 ? (ggml_type) p.type_k_over : layer.k1->type;
}

static size_t n_bytes_for(const llama_pcd_params & p, const llama_pcd_kv & cur) {
    size_t res = 0;
    for (const auto & layer : cur.layers) {
        const ggml_type type = type_for(p, layer);

        res += type == GGML_TYPE_COUNT ? 0 : ggml_row_size(type, layer.k1->ne[0])*layer.k1->ne[1];
    }
    return res;
}

static bool serves(const llama_pcd_tensors * there, const llama_pcd_params & p, const llama_pcd_kv & cur) {
    bool res = there != nullptr;
    for (size_t i = 0; i < cur.layers.size() && res; ++i) {
        const ggml_type type = type_for(p, cur.layers[i]);
        res = type == GGML_TYPE_COUNT || (there->of[i] && there->of[i]->type == type);
    }
    return res;
}

// null: no memory
static std::shared_ptr<llama_pcd_tensors> make_tensors(const llama_pcd_params & p, const llama_pcd_kv & cur) {
    auto res = std::make_shared<llama_pcd_tensors>();

    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs; // by the kind of memory that the first ones live in

    for (const auto & layer : cur.layers) {
        const ggml_type type = type_for(p, layer);

        res->of.push_back(nullptr);
        if (type == GGML_TYPE_COUNT) {
            continue;
        }
        auto & ctx = ctxs[ggml_backend_buffer_get_type(layer.k1->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ cur.layers.size()*ggml_tensor_overhead(), nullptr, true }));
        }
        res->of.back() = ggml_new_tensor_2d(ctx.get(), type, layer.k1->ne[0], layer.k1->ne[1]);
        ggml_format_name(res->of.back(), "cache_k_over_l%d", layer.il);
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buf) {
            return nullptr;
        }
        ggml_backend_buffer_clear(buf.get(), 0); // no NaN may lurk in unused cells
        res->ctxs_bufs.emplace_back(std::move(ctx), std::move(buf));
    }
    return res;
}

std::optional<llama_pcd_second::tensors> llama_pcd_second::allocate(const llama_pcd_params & p, std::string & err) {
    size_t n_wanted = 0;
    bool   beside   = false; // others are in force meanwhile
    bool   ok       = true;

    tensors res = all;
    for (size_t i = 0; i < kvs.size(); ++i) {
        const size_t n_bytes = n_bytes_for(p, kvs[i]);
        if (n_bytes == 0 || serves(res[i].get(), p, kvs[i])) {
            continue;
        }
        res[i].reset();
        if (!settings.on) {
            drop(i); // off is what a failure leaves in force
        }
        n_wanted += n_bytes;
        beside   |= all[i] != nullptr;
        if (ok) {
            res[i] = make_tensors(p, kvs[i]);
            ok = res[i] != nullptr;
        }
    }
    if (ok) {
        return res;
    }
    err = format("the second keys need another %.0f MiB%s; use a smaller n_ctx, cache=\"shared\" or perturbation=\"none\" "
            "with a window", n_wanted/1024.0/1024.0,
            beside ? " beside those in force; turn PCD off before this change, which then frees them" : "");
    return std::nullopt;
}

void llama_pcd_second::swap(tensors & other) noexcept {
    std::swap(all, other);
    link();
}

void llama_pcd_second::link() {
    for (auto & cur : kvs) {
        for (size_t j = 0; j < cur.layers.size(); ++j) {
            auto &       layer = cur.layers[j];
            const auto & keys  = all[layer.i_cache];

            layer.k2 = keys ? keys->of[j] : nullptr;
        }
    }
}

void llama_pcd_second::keep(bool changed) {
    if (settings.rerotated()) {
        if (changed || !llama_pcd_settings::same_table(settings.params, from)) {
            cells_loaded(-1);
        }
        from = settings.params;
        trim();
    }
}

void llama_pcd_second::drop(size_t i) {
    if (all[i]) {
        all[i].reset();
        link();
        pcd.reset_graphs();
    }
}

void llama_pcd_second::trim() {
    for (size_t i = 0; i < kvs.size(); ++i) {
        if (!settings.on || n_bytes_for(settings.params, kvs[i]) == 0) {
            drop(i);
        }
    }
}

size_t llama_pcd_second::n_bytes() const {
    size_t res = 0;
    for (const auto & cur : all) {
        for (size_t i = 0; cur && i < cur->ctxs_bufs.size(); ++i) {
            res += ggml_backend_buffer_get_size(cur->ctxs_bufs[i].second.get());
        }
    }
    return res;
}

//
// layers
//

llama_pcd_layer * llama_pcd_second::find_layer(const llama_kv_cache & kv, int32_t il) {
    const ggml_tensor * k1 = llama_pcd::keys_of(kv, il);
    return k1 ? find_layer(k1) : nullptr;
}

llama_pcd_layer * llama_pcd_second::find_layer(const ggml_tensor * k1) {
    for (auto & cur : kvs) {
        for (auto & layer : cur.layers) {
            if (layer.k1 == k1) {
                return &layer;
            }
        }
    }
    return nullptr;
}

bool llama_pcd_second::has_weighed_keys() const {
    bool res = false;
    for (const auto & cur : kvs) {
        for (const auto & layer : cur.layers) {
            res |= layer.rotation.weighed;
        }
    }
    return res;
}

//
// what happens to the cells
//

void llama_pcd_second::cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells) {
    const size_t i = memory.index_of(&kv);
    if (i == kvs.size()) {
        return;
    }
    kvs[i].placed = cells;
    for (const auto idx : cells) {
        kvs[i].stale.set(idx, true);
    }
}

void llama_pcd_second::cells_loaded(llama_seq_id seq_id) {
    for (auto & cur : kvs) {
        if (seq_id == -1) { // else they are placed
            cur.stale.set_all();
        }
    }
}

void llama_pcd_second::cells_stored() {
    for (auto & cur : kvs) {
        for (const auto idx : cur.placed) {
            cur.stale.set(idx, !settings.rerotated());
        }
    }
}

bool llama_pcd_second::any_stale() const {
    return std::any_of(kvs.begin(), kvs.end(), [](const auto & cur) { return cur.stale.any(); });
}

// They are derived again: that costs what turning them would, and a coarse type is not rounded twice.
void llama_pcd_second::keys_shift() {
    for (auto & cur : kvs) {
        const auto & cells = llama_pcd::cells(*cur.kv);

        for (uint32_t j = 0; j < cells.used_max_p1(); ++j) {
            if (!cells.is_empty(j) && cells.get_shift(j) != 0) {
                cur.stale.set(j, true);
            }
        }
    }
}

//
// second keys that are derived in memory, by a small graph of its own
//

// in pieces: a whole layer at once would need as much scratch memory again
static constexpr size_t N_PIECE = 4096;

template <typename T>
static void set_data(ggml_tensor * t, const std::vector<T> & data) {
    if (t->buffer) {
        ggml_backend_tensor_set(t, data.data(), 0, data.size()*sizeof(T));
    }
}

// A graph reads and writes any cells by their index, so that scattered ones take no more graphs than neighbours.
ggml_status llama_pcd_second::derive_piece(const llama_pcd_kv & cur, const std::vector<uint32_t> & cells) {
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
    auto * rot  = cur.kv->build_input_k_rot(ctx);

    for (const auto & layer : cur.layers) {
        if (!layer.k2) {
            continue;
        }

        ggml_tensor * k = ggml_get_rows(ctx, layer.k1, from);

        if (layer.rotation.out) {
            const int64_t n_head = hparams.n_head_kv(layer.il);
            const int64_t n_embd = k->ne[0];

            k = ggml_reshape_3d(ctx, k, n_embd/n_head, n_head, n);
            k = tables.turn_key(ctx, k, pos, layer.rotation, layer.rotation.hadamard ? rot : nullptr);
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
    set_data<int32_t>(pos,  llama_pcd_positions_of(*cur.kv, cells, hparams.n_pos_per_embd()));
    if (rot && rot->buffer) {
        cur.kv->set_input_k_rot(rot);
    }

    const ggml_status status = lctx.graph_compute(gf, false);
    ggml_backend_sched_synchronize(sched);

    return status;
}

ggml_status llama_pcd_second::derive(int64_t & n) {
    pcd.lctx.synchronize();

    ggml_status status = GGML_STATUS_SUCCESS;
    for (auto & cur : kvs) {
        const auto cells = cur.stale.list(llama_pcd::cells(*cur.kv));

        for (size_t done = 0; done < cells.size() && status == GGML_STATUS_SUCCESS; ) {
            const size_t end = std::min(done + N_PIECE, cells.size());

            status = derive_piece(cur, { cells.begin() + done, cells.begin() + end });

            for (; done < end && status == GGML_STATUS_SUCCESS; ++done, ++n) {
                cur.stale.set(cells[done], false);
            }
        }
    }

    pcd.reset_own_graph();

    return status;
}
