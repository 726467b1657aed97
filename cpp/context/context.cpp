// Joins the parts of a context, and hands hooks on to them.

#include "context/context.h"

#include "llama-model.h"

llama_pcd_context::llama_pcd_context(llama_context & lctx) :
    llama_pcd(lctx),
    memory(lctx),
    core(*this, memory),
    decoder(core) {}

llama_pcd_context * llama_pcd_context::of(const llama_cparams & cparams) {
    return static_cast<llama_pcd_context *>(cparams.pcd);
}

llama_pcd_context & llama_pcd_context::made(llama_context & lctx) {
    auto & slot = llama_pcd::slot(lctx);
    if (!slot) {
        auto res = std::make_unique<llama_pcd_context>(lctx);
        if (auto * mem = lctx.get_memory()) {
            mem->pcd = res.get();
        }
        for (auto * kv : res->memory.kvs) {
            kv->pcd = res.get();
        }
        llama_pcd::cparams(lctx).pcd = res.get();
        slot = std::move(res);
    }
    return *of(lctx);
}

int llama_pcd_context::decode(const llama_batch_ext & batch) noexcept {
    llama_pcd_memory::ends before;

    llama_pcd_seq_table::state sequences; // as they were
    bool kept = false;

    int  res       = (int) llama_pcd_outcome::BROKEN;
    char text[100] = {}; // a long line would be put together in memory, which may be what is missing

    const bool done = llama_pcd_guarded(text, sizeof(text), [&]() {
        sequences = core.sequences.save();
        kept      = true;
        before    = memory.ends_of(batch);
        res       = decode_unguarded(batch);
    });
    if (!done) {
        llama_pcd_guarded(nullptr, 0, [&]() { recover(before); });
        llama_pcd_guarded(nullptr, 0, [&]() { LLAMA_LOG_ERROR("PCD: decoding failed: %s\n", text); });
    }
    if (res != 0 && kept) {
        core.sequences.restore(sequences);
    }
    return res;
}

int32_t llama_pcd_context::set_eval_callback(ggml_backend_sched_eval_callback callback, void * user_data, bool counts, std::string & err) {
    auto & cparams = llama_pcd::cparams(lctx);

    if (callback && cparams.cb_eval) {
        err = "this context has a callback already, this function's or its own (llama_context_params.cb_eval), and it can have only one";
        return LLAMA_PCD_UNSUPPORTED;
    }
    if (!callback && !is_watched) {
        return LLAMA_PCD_OK;
    }
    lctx.synchronize();

    is_watched = callback;
    is_counted = callback && counts;

    cparams.cb_eval           = callback;
    cparams.cb_eval_user_data = user_data;

    ggml_backend_sched_set_eval_callback(lctx.get_sched(), callback, user_data); // llama.cpp does so when it builds a graph
    reset_graphs();

    return LLAMA_PCD_OK;
}

void llama_pcd_context::recover(const llama_pcd_memory::ends & before) {
    decoder.rows.forget();
    core.states.drop();

    memory.cut(before);

    reset_graphs();
    reserve_later();
    llama_pcd_outputs_forget(lctx);
}

int llama_pcd_context::decode_unguarded(const llama_batch_ext & batch) {
    if (memory.has_shift()) { // positions have changed, and the keys are yet to follow
        core.second.keys_shift();
    }
    if (core.settings.on) {
        return (int) decoder.decode(batch);
    }
    decoder.rows.trim();
    for (const auto & token : batch.tokens) {
        for (const llama_seq_id s : token.seq_ids) {
            core.sequences.note_token(s, token.pos[0], false);
        }
    }

    return decode_plain(batch);
}

bool llama_pcd_context::mixes_graphs() {
    const bool mixed = core.settings.on;
    return std::exchange(last_mixed, mixed) || mixed;
}

uint32_t llama_pcd_context::n_nodes() const {
    return 64*lctx.get_model().hparams.n_layer_all;
}

void llama_pcd_context::cells_loaded(llama_seq_id seq_id) {
    core.second.cells_loaded(seq_id);
    core.sequences.forget_answer(seq_id); // a state does not say where its answer began
    decoder.rows.forget();
}

// the one of these that needs memory, and llama_memory_seq_cp cannot fail
void llama_pcd_context::seq_copied(llama_seq_id src, llama_seq_id dst) {
    llama_pcd_guarded_value(__func__, false, [&]() {
        core.sequences.copy(src, dst);
        return true;
    });
}

void llama_pcd_context::fill_mask(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const {
    if (core.twins && memory.index_of(&kv) < memory.kvs.size()) {
        core.view.mask(*core.twins, kv, dst, ubatch);
    }
}
