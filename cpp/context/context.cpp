// Joins the parts of a context, and hands on to them what llama.cpp calls: hooks (llama-pcd-hooks.h) and ggml's rotations
// (llama-pcd-rope.h).

#include "context/context.h"
#include "graph/graph.h"
#include "llama-pcd-rope.h"

#include <stdexcept>

llama_pcd_context::llama_pcd_context(llama_context & lctx) :
    llama_pcd(lctx),
    memory(lctx),
    core(*this, memory),
    decoder(core) {}

llama_pcd_context * llama_pcd_context::made(llama_context & lctx, std::string & err) {
    auto * mem = lctx.get_memory();
    if (!mem) {
        err = "the architecture '" + lctx.get_model().arch_name() + "' keeps no KV cache, so there is no context to contrast";
        return nullptr;
    }
    if (!of(lctx)) {
        auto res = std::make_shared<llama_pcd_context>(lctx);

        mem->pcd = res;
        for (auto * kv : res->memory.kvs) {
            kv->pcd = res;
        }
        llama_pcd::cparams(lctx).pcd = res.get();
    }
    return of(lctx);
}

int llama_pcd_context::decode(const llama_batch_ext & batch) noexcept {
    llama_pcd_memory::ends     before;
    llama_pcd_seq_table::state sequences; // as they were

    bool kept = false;
    bool done = false;

    const int res = llama_pcd_guarded("PCD: decoding failed", (int) llama_pcd_outcome::BROKEN, [&]() {
        sequences = core.sequences.save();
        kept      = true;
        before    = memory.ends_of(batch);

        const int status = decode_unguarded(batch);
        done = true;
        return status;
    });
    if (!done) {
        llama_pcd_guarded(__func__, false, [&]() { recover(before); return true; });
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
    llama_pcd::outputs::forget(lctx);
}

int llama_pcd_context::decode_unguarded(const llama_batch_ext & batch) {
    core.second.keys_shift();
    if (core.settings.on) {
        return (int) decoder.decode(batch);
    }
    decoder.rows.forget();
    for (const auto & token : batch.tokens) {
        for (const llama_seq_id s : token.seq_ids) {
            core.sequences.note_token(s, token.pos[0], false);
        }
    }

    return decode_plain(batch);
}

bool llama_pcd_context::mixes_graphs() {
    const bool mixed = core.settings.on || core.read;
    return std::exchange(last_mixed, mixed) || mixed;
}

void llama_pcd_context::cells_loaded(llama_seq_id seq_id) {
    if (seq_id == -1) { // else they are placed
        core.second.cells_loaded();
    }
    core.sequences.forget_answer(seq_id); // a state does not say where its answer began
    decoder.rows.forget();
}

// the one of these that needs memory, and llama_memory_seq_cp cannot fail
void llama_pcd_context::seq_copied(llama_seq_id src, llama_seq_id dst) {
    llama_pcd_guarded(__func__, false, [&]() {
        core.sequences.copy(src, dst);
        return true;
    });
}

//
// hooks that are functions
//

bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret) {
    auto * pcd = llama_pcd_context::of(lctx);
    if (!pcd || pcd->nested) {
        return false;
    }
    ret = pcd->decode(batch);
    return true;
}

uint32_t llama_pcd_max_nodes(const llama_context & lctx) {
    auto * pcd = llama_pcd_context::of(lctx);
    if (!pcd) {
        return 0;
    }
    pcd->n_schedulers++;
    return pcd->n_nodes();
}

void llama_pcd_graph_begin(const llm_graph_context & gctx) {
    auto * pcd = llama_pcd_context::of(gctx.cparams);

    // graphs with twins and without, of one token and of many, may have as many nodes
    if (pcd && !pcd->core.probing && pcd->mixes_graphs() && !llama_pcd_forget_layout(gctx.sched)) {
        throw std::runtime_error("pcd: no memory to lay a graph out");
    }
    llama_pcd_graph::begin(gctx, pcd ? &pcd->core : nullptr);
}

ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il) {
    return llama_pcd_graph::current().build_attn({ gctx, q, k, v, kq_b, kq_mask, sinks, v_mla, n_kv_max, kq_scale, il });
}

bool llama_pcd_seq_removed(llama_memory_i & memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (memory.pcd && p0 < 0 && p1 < 0) {
        memory.pcd->seq_removed(seq_id);
    }
    return true;
}

ggml_tensor * llama_pcd_rotated(ggml_context * ctx, ggml_tensor * rotated) {
    return llama_pcd_graph::current().rotated(ctx, rotated);
}

ggml_tensor * llama_pcd_rope_set_offset(ggml_tensor * a, int n_offs) {
    llama_pcd_graph::current().offset(a, n_offs);
    return ggml_rope_set_offset(a, n_offs);
}
