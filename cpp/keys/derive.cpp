// Second keys that are turned in memory, by a small graph of its own: derived from the first keys, or shifted with them.

#include "keys/second.h"

#include "llama-model.h"

#include <algorithm>
#include <memory>

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
    pcd.graph_computed(sched, gf);

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
