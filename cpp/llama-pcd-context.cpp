// Joins the parts of a context, and hands hooks on to them.

#include "llama-pcd-context.h"

#include "llama-model.h"

llama_pcd_context::llama_pcd_context(llama_context & lctx) :
    llama_pcd(lctx),
    memory(lctx),
    core(*this, memory),
    decoder(core),
    exits(*this),
    head_ratios(*this, memory),
    tap(*this, memory) {}

llama_pcd_context * llama_pcd_context::of(const llama_cparams & cparams) {
    return static_cast<llama_pcd_context *>(cparams.pcd.get());
}

llama_pcd_context & llama_pcd_context::made(llama_context & lctx) {
    auto & slot = llama_pcd::slot(lctx);
    if (!slot) {
        auto res = std::make_shared<llama_pcd_context>(lctx);
        for (auto * kv : res->memory.kvs) {
            kv->pcd = res.get();
        }
        slot = std::move(res);
    }
    return *of(lctx);
}

std::string llama_pcd_context::taken() const {
    if (head_ratios.on()) {
        return "the heads of this context have ratios of their own (Ms-PoE), which over-rotation knows nothing of; "
            "take them off first (llama_pcd_set_head_ratios)";
    }
    if (exits.on()) {
        return "early exits are read in this context, and they are compared with plain rows; take them off first (llama_pcd_set_exits)";
    }
    return {};
}

bool llama_pcd_context::decode(const llama_batch_ext & batch, int & ret) {
    if (nested) {
        return false;
    }
    exits.forget();

    const bool on = core.settings.on;

    if (graphs_on != on) { // a graph built without PCD does not know that it cannot serve one with it
        graphs_on = on;
        reset_graphs();
    }
    if (on) {
        ret = (int) decoder.decode(batch);
        return true;
    }
    core.second.mark_stale(); // keys stored from here on have no second
    decoder.rows.forget();

    return head_ratios.on() && head_ratios.decode(batch, ret);
}

uint32_t llama_pcd_context::n_nodes() const {
    return 64*lctx.get_model().hparams.n_layer_all + head_ratios.n_nodes();
}

void llama_pcd_context::take_exits(const llm_graph_result & res, const llama_ubatch & ubatch) {
    exits.take(res, ubatch);
}

void llama_pcd_context::cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo) {
    core.second.cells_placed(kv, sinfo);
}

void llama_pcd_context::cells_loaded(llama_seq_id seq_id) {
    core.second.cells_loaded(seq_id);
    decoder.rows.forget();
}

void llama_pcd_context::keys_shift(llama_kv_cache & kv) {
    core.second.keys_shift(kv);
}

uint32_t llama_pcd_context::n_mask_rows(const llama_kv_cache & kv, const llama_ubatch & ubatch) const {
    return core.view.n_rows(kv, ubatch);
}

void llama_pcd_context::mask_twins(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const {
    core.view.mask(kv, dst, ubatch);
}
