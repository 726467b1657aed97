// Second keys that are turned in memory, by a small graph of its own: derived from the first keys, or shifted with them.

#include "llama-pcd-second.h"

#include "llama-model.h"

#include <algorithm>
#include <memory>

// in pieces: a whole layer at once would need as much scratch memory again
static constexpr uint32_t N_CHUNK = 4096;

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

// the cells [c0, c0 + n) of a layer's keys, as heads
static ggml_tensor * view_cells(ggml_context * ctx, ggml_tensor * t, int64_t n_head, uint32_t c0, uint32_t n) {
    const int64_t n_embd = t->ne[0]/n_head;
    return ggml_view_3d(ctx, t, n_embd, n_head, n, ggml_row_size(t->type, n_embd), t->nb[1], c0*t->nb[1]);
}

ggml_status llama_pcd_second::turn_range(const llama_pcd_kv & cur, uint32_t c0, uint32_t c1, llama_pcd_tables::table_kind kind) {
    auto &       lctx    = pcd.lctx;
    const auto & hparams = lctx.get_model().hparams;

    const bool     shift = kind == llama_pcd_tables::WHOLE;
    const uint32_t n     = c1 - c0;
    const uint32_t n_pos = hparams.n_pos_per_embd();

    auto * sched = lctx.get_sched();
    auto * res   = lctx.get_gf_res_reserve();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    auto inp = std::make_unique<llm_graph_input_pcd_cells>(cur.kv, cell_positions(llama_pcd::cells(*cur.kv), c0, n, n_pos, shift));

    inp->pos = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (int64_t) n*n_pos);
    ggml_set_input(inp->pos);
    inp->rot = cur.kv->build_input_k_rot(ctx);

    for (const auto & layer : cur.layers) {
        if (!layer.k2 || (shift && !layer.rotation.out)) {
            continue;
        }

        const int64_t n_head = hparams.n_head_kv(layer.il);

        ggml_tensor * k = view_cells(ctx, shift ? layer.k2 : layer.k1, n_head, c0, n);

        if (k->type != GGML_TYPE_F32 && (layer.rotation.out || k->type != layer.k2->type)) {
            k = ggml_cast(ctx, k, GGML_TYPE_F32);
        }
        if (layer.rotation.out) {
            k = tables.turn_key(ctx, k, inp->pos, layer.rotation, layer.rotation.hadamard ? inp->rot : nullptr, kind);
        }

        ggml_build_forward_expand(gf, ggml_cpy(ctx, k, view_cells(ctx, layer.k2, n_head, c0, n)));
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

ggml_status llama_pcd_second::turn(const llama_pcd_kv & cur, llama_pcd_tables::table_kind kind) {
    const uint32_t n_used = llama_pcd::cells(*cur.kv).used_max_p1();

    ggml_status status = GGML_STATUS_SUCCESS;
    for (uint32_t c0 = 0; c0 < n_used && status == GGML_STATUS_SUCCESS; c0 += N_CHUNK) {
        status = turn_range(cur, c0, std::min(c0 + N_CHUNK, n_used), kind);
    }
    return status;
}

ggml_status llama_pcd_second::derive() {
    auto & lctx = pcd.lctx;

    lctx.synchronize();
    lctx.sched_reserve();
    lctx.memory_update(false); // a pending K-shift comes first

    ggml_status status = GGML_STATUS_SUCCESS;
    for (const auto & cur : store.kvs) {
        if (status == GGML_STATUS_SUCCESS) {
            status = turn(cur, llama_pcd_tables::DIFFERENCE);
        }
    }

    pcd.reset_graphs();

    if (status == GGML_STATUS_SUCCESS) {
        stale = false;
    }
    return status;
}
