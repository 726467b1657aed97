// Allocates second keys and values, keeps track of their cells, and turns second keys in memory.

#include "keys/second.h"
#include "bench/measure.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <memory>

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

llama_pcd_kv::llama_pcd_kv(llama_kv_cache & kv) : kv(&kv), stale(kv.get_size()) {
    const auto & hparams = llama_pcd::hparams(kv);

    for (const auto & own : llama_pcd::layers(kv)) {
        if (hparams.n_head_kv(own.il) > 0) {
            layers.push_back({ own.il, hparams.has_rope(own.il), own.k, own.v });
        }
    }
}

void llama_pcd_kv::link() {
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].k2 = parts[KEYS].empty()   ? nullptr : parts[KEYS].of[i];
        layers[i].v2 = parts[VALUES].empty() ? nullptr : parts[VALUES].of[i];
    }
}

llama_pcd_second::llama_pcd_second(
        llama_pcd & pcd, const llama_pcd_memory & memory, const llama_pcd_settings & settings, llama_pcd_tables & tables) :
    pcd(pcd), memory(memory), settings(settings), tables(tables) {
    for (auto * kv : memory.kvs) {
        kvs.emplace_back(*kv);
    }
}

//
// other settings
//

// The type of a layer's second keys or values; GGML_TYPE_COUNT: none are wanted.
static ggml_type type_for(const llama_pcd_demand & want, const llama_pcd_layer & layer, llama_pcd_kv::part part) {
    if (part == llama_pcd_kv::VALUES) {
        return want.separate && layer.v1 ? layer.v1->type : GGML_TYPE_COUNT;
    }
    if (!want.separate && !(want.keys && layer.rotates)) {
        return GGML_TYPE_COUNT;
    }
    return want.type < 0 ? layer.k1->type : (ggml_type) want.type;
}

llama_pcd_demand llama_pcd_second::demand_of(const llama_pcd_params & p) const {
    return { llama_pcd_settings::rerotated(p), llama_pcd_settings::separate(p), p.type_k_over };
}

static bool is_needed(const llama_pcd_demand & want, const llama_pcd_kv & cur, llama_pcd_kv::part part) {
    return std::any_of(cur.layers.begin(), cur.layers.end(), [&](const auto & layer) {
        return type_for(want, layer, part) != GGML_TYPE_COUNT;
    });
}

static bool serves(const llama_pcd_demand & want, const llama_pcd_kv & cur, llama_pcd_kv::part part) {
    bool res = !cur.parts[part].empty();
    for (size_t i = 0; i < cur.layers.size() && res; ++i) {
        const ggml_tensor * t    = cur.parts[part].of[i];
        const ggml_type     type = type_for(want, cur.layers[i], part);

        res = type == GGML_TYPE_COUNT || (t && t->type == type);
    }
    return res;
}

static size_t n_bytes_for(const llama_pcd_demand & want, const llama_pcd_kv & cur, llama_pcd_kv::part part) {
    size_t res = 0;
    for (const auto & layer : cur.layers) {
        const ggml_tensor * own  = part == llama_pcd_kv::KEYS ? layer.k1 : layer.v1;
        const ggml_type     type = type_for(want, layer, part);

        res += type == GGML_TYPE_COUNT ? 0 : ggml_row_size(type, own->ne[0])*own->ne[1];
    }
    return res;
}

bool llama_pcd_second::allocate(llama_pcd_kv & cur, llama_pcd_kv::part part, const llama_pcd_demand & want) const {
    llama_pcd_tensors res;

    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs; // by the kind of memory that the first ones live in

    for (const auto & layer : cur.layers) {
        ggml_tensor *   own  = part == llama_pcd_kv::KEYS ? layer.k1 : layer.v1;
        const ggml_type type = type_for(want, layer, part);

        res.of.push_back(nullptr);
        if (type == GGML_TYPE_COUNT) {
            continue;
        }
        auto & ctx = ctxs[ggml_backend_buffer_get_type(own->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ cur.layers.size()*ggml_tensor_overhead(), nullptr, true }));
        }
        res.of.back() = ggml_new_tensor_2d(ctx.get(), type, own->ne[0], own->ne[1]);
        ggml_format_name(res.of.back(), "cache_%s_over_l%d", part == llama_pcd_kv::KEYS ? "k" : "v", layer.il);
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buf) {
            return false;
        }
        ggml_backend_buffer_clear(buf.get(), 0); // no NaN may lurk in unused cells
        res.ctxs_bufs.emplace_back(std::move(ctx), std::move(buf));
    }
    cur.parts[part] = std::move(res);

    return true;
}

bool llama_pcd_second::allocate(const llama_pcd_params & p, changes & done, std::string & err) {
    const auto want = demand_of(p);

    size_t n_wanted = 0;
    bool   ok       = true;

    done.reserve(kvs.size()*llama_pcd_kv::N_PARTS);

    for (auto & cur : kvs) {
        for (const auto part : { llama_pcd_kv::KEYS, llama_pcd_kv::VALUES }) {
            if (!is_needed(want, cur, part) || serves(want, cur, part)) {
                continue;
            }
            done.push_back({ &cur, part, std::move(cur.parts[part]) });
            cur.parts[part] = {};
            if (!settings.on && !settings.separate()) {
                done.back().former = {}; // off is what a failure leaves in force
            }
            n_wanted += n_bytes_for(want, cur, part);
            ok = ok && allocate(cur, part, want);
        }
        cur.link();
    }

    if (!ok) {
        const bool beside = std::any_of(done.begin(), done.end(), [](const auto & cur) { return !cur.former.empty(); });
        err = format("the second keys%s need another %.0f MiB%s; use a smaller n_ctx, %scache=\"shared\" or perturbation=\"none\" "
                "with a window", want.separate ? " and values" : "", n_wanted/1024.0/1024.0,
                beside ? " beside those in force; turn PCD off before this change, which then frees them" : "",
                want.separate ? "cache=\"rerotated\", " : "");
    }
    return ok;
}

void llama_pcd_second::keep(changes & done) {
    if (demand.keys || demand.separate) {
        if (!done.empty() || !llama_pcd_settings::same_second(settings.params, from)) {
            for (auto & cur : kvs) {
                cur.stale.set_all();
            }
        }
        from = settings.params;
        trim();
    }
    done.clear();
}

void llama_pcd_second::undo(changes & done) noexcept {
    for (auto & [cur, part, former] : done) {
        cur->parts[part] = std::move(former);
        cur->link();
    }
    done.clear();
}

void llama_pcd_second::trim() {
    demand = settings.on ? demand_of(settings.params) : llama_pcd_demand {};
    for (auto & cur : kvs) {
        for (const auto part : { llama_pcd_kv::KEYS, llama_pcd_kv::VALUES }) {
            if (!cur.parts[part].empty() && !is_needed(demand, cur, part)) {
                cur.parts[part] = {};
                pcd.reset_graphs();
            }
        }
        cur.link();
    }
}

size_t llama_pcd_second::n_bytes() const {
    std::map<ggml_backend_buffer_type_t, size_t> sizes;
    for (const auto & cur : kvs) {
        add_bytes(*cur.kv, sizes);
    }
    size_t res = 0;
    for (const auto & [buft, size] : sizes) {
        res += size;
    }
    return res;
}

void llama_pcd_second::add_bytes(const llama_kv_cache & kv, std::map<ggml_backend_buffer_type_t, size_t> & sizes) const {
    for (const auto & cur : kvs) {
        for (const auto & part : cur.parts) {
            for (const auto & [ctx, buf] : part.ctxs_bufs) {
                sizes[ggml_backend_buffer_get_type(buf.get())] += cur.kv == &kv ? ggml_backend_buffer_get_size(buf.get()) : 0;
            }
        }
    }
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

size_t llama_pcd_second::cache_of(const llama_pcd_layer & layer) const {
    size_t i = 0;
    while (&layer < kvs[i].layers.data() || &layer >= kvs[i].layers.data() + kvs[i].layers.size()) {
        i++;
    }
    return i;
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

llama_pcd_kv * llama_pcd_second::find(const llama_kv_cache & kv) {
    const auto it = std::find_if(kvs.begin(), kvs.end(), [&](const auto & cur) { return cur.kv == &kv; });
    return it == kvs.end() ? nullptr : &*it;
}

void llama_pcd_second::cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo) {
    if (auto * cur = find(kv)) {
        cur->placed = sinfo.idxs[0];
        for (const auto idx : cur->placed) {
            cur->stale.set(idx, true);
        }
    }
}

void llama_pcd_second::cells_loaded(llama_seq_id seq_id) {
    for (auto & cur : kvs) {
        if (seq_id == -1) { // else they are placed
            cur.stale.set_all();
        }
    }
}

void llama_pcd_second::cells_computed() {
    for (auto & cur : kvs) {
        if (settings.on && demand.keys) { // the graph stored second keys beside the first
            for (const auto idx : cur.placed) {
                cur.stale.set(idx, false);
            }
        }
        cur.placed.clear();
    }
}

void llama_pcd_second::set_fresh(const std::vector<std::vector<int32_t>> & cells) {
    for (size_t i = 0; i < kvs.size(); ++i) {
        for (const int32_t idx : cells[i]) {
            kvs[i].stale.set(idx, false);
        }
    }
}

void llama_pcd_second::settle(size_t i_cache, int32_t cell, llama_seq_id parent, llama_pos pos) {
    const auto & cells = llama_pcd::cells(*kvs[i_cache].kv);
    kvs[i_cache].stale.set(cell, !cells.seq_has(cell, parent) || cells.pos_get(cell) != pos);
}

bool llama_pcd_second::any_stale() const {
    return std::any_of(kvs.begin(), kvs.end(), [](const auto & cur) { return cur.stale.any(); });
}

// Derived keys are derived again: that costs what turning them would, and a coarse type is not rounded twice.
void llama_pcd_second::keys_shift(const llama_kv_cache & kv) {
    auto * cur = find(kv);
    if (!cur || cur->parts[llama_pcd_kv::KEYS].empty()) {
        return;
    }
    const auto & cells = llama_pcd::cells(kv);

    std::vector<uint32_t> moved;
    for (uint32_t j = 0; j < cells.used_max_p1(); ++j) {
        if (!cells.is_empty(j) && cells.get_shift(j) != 0) {
            moved.push_back(j);
        }
    }
    // separate: not with the tables of other settings
    if (llama_pcd_settings::separate(from) && llama_pcd_settings::same_table(settings.params, from)) {
        size_t n_done = 0;
        if (turn(*cur, moved, llama_pcd_tables::WHOLE, n_done) == GGML_STATUS_SUCCESS) {
            return;
        }
        LLAMA_LOG_WARN("%s: failed to shift the second keys; they will be evaluated anew\n", __func__);
    }
    for (const uint32_t j : moved) {
        cur->stale.set(j, true);
    }
}

//
// second keys that are rotated in memory, by a small graph of its own: derived from the first keys, or shifted with them
//

// in pieces: a whole layer at once would need as much scratch memory again
static constexpr size_t N_PIECE = 4096;

// Which cells, and their positions or what is still to be added to these. A graph reads and writes any cells by their index, so
// that scattered ones take no more graphs than neighbours.
class llm_graph_input_pcd_cells : public llm_graph_input_i {
public:
    llm_graph_input_pcd_cells(ggml_context * ctx, const llama_kv_cache * kv, std::vector<uint32_t> idxs, uint32_t n_pos, bool shift) :
        kv(kv), idxs(std::move(idxs)), n_pos(n_pos), shift(shift),
        from(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, this->idxs.size())),
        to  (ggml_new_tensor_1d(ctx, GGML_TYPE_I64, this->idxs.size())),
        pos (ggml_new_tensor_1d(ctx, GGML_TYPE_I32, this->idxs.size()*n_pos)),
        rot (kv->build_input_k_rot(ctx)) {
        for (auto * t : { from, to, pos }) {
            ggml_set_input(t);
        }
    }

    void set_input(const llama_ubatch * /*ubatch*/) override {
        set_data<int32_t>(from, { idxs.begin(), idxs.end() });
        set_data<int64_t>(to,   { idxs.begin(), idxs.end() });
        set_data<int32_t>(pos,  positions());
        if (rot && rot->buffer) {
            kv->set_input_k_rot(rot);
        }
    }

private:
    const llama_kv_cache * kv;

    const std::vector<uint32_t> idxs;

    const uint32_t n_pos;
    const bool     shift;

public:
    ggml_tensor * from;
    ggml_tensor * to;
    ggml_tensor * pos;
    ggml_tensor * rot;

private:
    template <typename T>
    static void set_data(ggml_tensor * t, const std::vector<T> & data) {
        if (t->buffer) {
            ggml_backend_tensor_set(t, data.data(), 0, data.size()*sizeof(T));
        }
    }

    std::vector<int32_t> positions() const {
        if (!shift) {
            return llama_pcd_positions_of(*kv, idxs, n_pos);
        }
        std::vector<int32_t> res(idxs.size()*n_pos, 0);
        for (size_t i = 0; i < idxs.size(); ++i) {
            res[i] = llama_pcd::cells(*kv).get_shift(idxs[i]);
        }
        return res;
    }
};

ggml_status llama_pcd_second::turn_piece(
        const llama_pcd_kv & cur, const std::vector<uint32_t> & cells, llama_pcd_tables::table_kind kind) {
    auto &       lctx    = pcd.lctx;
    const auto & hparams = lctx.get_model().hparams;
    const bool   shift   = kind == llama_pcd_tables::WHOLE;

    auto * sched = lctx.get_sched();
    auto * res   = lctx.get_gf_res_reserve();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    auto inp = std::make_unique<llm_graph_input_pcd_cells>(ctx, cur.kv, cells, hparams.n_pos_per_embd(), shift);

    for (const auto & layer : cur.layers) {
        if (!layer.k2 || (shift && !layer.rotation.out)) {
            continue;
        }

        ggml_tensor * k = ggml_get_rows(ctx, shift ? layer.k2 : layer.k1, inp->from);

        if (layer.rotation.out) {
            const int64_t n_head = hparams.n_head_kv(layer.il);
            const int64_t n_embd = k->ne[0];

            k = ggml_reshape_3d(ctx, k, n_embd/n_head, n_head, cells.size());
            k = tables.turn_key(ctx, k, inp->pos, layer.rotation, layer.rotation.hadamard ? inp->rot : nullptr, kind);
            k = ggml_reshape_2d(ctx, k, n_embd, cells.size());
        }

        ggml_build_forward_expand(gf, ggml_set_rows(ctx, layer.k2, k, inp->to));
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
    llama_pcd_graph_computed(pcd, sched, gf);

    return status;
}

ggml_status llama_pcd_second::turn(
        const llama_pcd_kv & cur, const std::vector<uint32_t> & cells, llama_pcd_tables::table_kind kind, size_t & n_done) {
    for (n_done = 0; n_done < cells.size(); ) {
        const size_t end = std::min(n_done + N_PIECE, cells.size());

        const ggml_status status = turn_piece(cur, { cells.begin() + n_done, cells.begin() + end }, kind);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        n_done = end;
    }
    return GGML_STATUS_SUCCESS;
}

ggml_status llama_pcd_second::derive(int64_t & n) {
    pcd.lctx.synchronize();

    ggml_status status = GGML_STATUS_SUCCESS;
    for (auto & cur : kvs) {
        if (status != GGML_STATUS_SUCCESS) {
            break;
        }
        const auto cells  = cur.stale.list(llama_pcd::cells(*cur.kv));
        size_t     n_done = 0;

        status = turn(cur, cells, llama_pcd_tables::DIFFERENCE, n_done);

        for (size_t i = 0; i < n_done; ++i) {
            cur.stale.set(cells[i], false);
        }
        n += n_done;
    }

    pcd.reset_own_graph();

    return status;
}
