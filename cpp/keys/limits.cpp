// What a model and a context can run: one sentence for everything that they cannot, with the remedy.

#include "keys/core.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

std::string llama_pcd_core::conflict() const {
    const auto & cparams = pcd.lctx.get_cparams();
    const auto & inputs  = cparams.embeddings_layer_inp;

    if (!cparams.causal_attn) {
        return "attention is not causal in this context (llama_set_causal_attn)";
    }
    if (cparams.pooling_type != LLAMA_POOLING_TYPE_NONE && cparams.embeddings) {
        return "this context pools embeddings and computes no logits";
    }
    if (cparams.embeddings_nextn || std::find(inputs.begin(), inputs.end(), true) != inputs.end()) {
        return "this context hands hidden states to a draft model";
    }
    for (const auto * kv : memory.kvs) { // llama.cpp lets callers use the twins' ids while PCD is off, in a copy, and in a loaded state
        for (llama_seq_id s = ids.first; s < LLAMA_MAX_SEQ; ++s) {
            if (!llama_pcd::cells(*kv).seq_pos_get(s).empty()) {
                return format("sequence %d has tokens, and the ids from %d on are for PCD's twins (llama_memory_seq_rm takes it out of "
                        "memory)", s, ids.first);
            }
        }
    }
    return {};
}

std::string llama_pcd_core::conflict_of(llama_seq_id seq_id) const {
    if (llama_pcd::samplers(pcd.lctx).count(seq_id) == 0) {
        return {};
    }
    return format("sequence %d has a backend sampler, which bypasses the logits PCD works on; turn PCD off for this sequence "
            "(llama_pcd_set_seq), or take the sampler off (llama_set_sampler)", seq_id);
}

// why no context, and no sequence, has keys as p asks for them
static std::string check_cache(const llama_pcd_params & p) {
    return p.cache != LLAMA_PCD_CACHE_SEPARATE ? "" :
        "cache=\"separate\" is evaluated by the stock engine alone; open the model with engine=\"stock\", or use cache=\"rerotated\" "
        "or \"shared\"";
}

// whether this model is on a backend that uses the table of a graph's first rotation for the later ones too
static bool on_cann(const llama_model & model) {
    return std::any_of(model.devices.begin(), model.devices.end(), [](const auto & cur) {
        return std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(cur.dev))) == "CANN";
    });
}

// what the context as it was opened keeps PCD from
std::string llama_pcd_core::check_memory(const llama_pcd_params & p) const {
    const auto & cparams   = pcd.lctx.get_cparams();
    const auto & hparams   = pcd.lctx.get_model().hparams;
    const int    n_seq_max = cparams.n_seq_max;

    const std::string arch = "the architecture '" + pcd.lctx.get_model().arch_name() + "' ";

    if (memory.kvs.empty()) {
        return arch + "has recurrent or otherwise special memory alone, which cannot drop a twin's state; "
            "PCD needs a KV cache, plain, sliding-window or beside recurrent layers";
    }
    if (!memory.recr && n_seq_max > LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS) {
        return format("twins take the last %d of the %d sequence ids; n_seq_max is %d, allowed: at most %d",
                LLAMA_PCD_MAX_TWINS, LLAMA_MAX_SEQ, n_seq_max, LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS);
    }
    if (memory.recr && n_seq_max > LLAMA_MAX_SEQ - 2) {
        return arch + format("has recurrent layers, where twins take the sequence ids after the context's own, and there are %d in all; "
            "n_seq_max is %d, allowed: at most %d", LLAMA_MAX_SEQ, n_seq_max, LLAMA_MAX_SEQ - 2);
    }
    // a sliding-window cache splits batches by the context's flag
    if ((!cparams.kv_unified && memory.kvs.size() > 1) || memory.any([](const auto & kv) { return kv.get_n_stream() != 1; })) {
        return "this context keeps one KV stream per sequence; create it with kv_unified = true";
    }
    if (memory.any(llama_pcd::borrows) || cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        return "this context drafts for another one and shares its KV cache";
    }
    for (const auto * kv : memory.kvs) {
        for (const uint32_t il : kv->get_layer_ids()) {
            // a block of second keys must not reach over the end of a head
            const bool typed = p.type_k_over >= 0 && llama_pcd_settings::rerotated(p) && hparams.n_head_kv(il) > 0;
            const int  block = typed ? ggml_blck_size((ggml_type) p.type_k_over) : 1;

            if (hparams.n_embd_head_k(il) % block != 0) {
                return format("type_k_over is %s, stored in blocks of %d, but a head has %d dimensions; use f16",
                        ggml_type_name((ggml_type) p.type_k_over), block, (int) hparams.n_embd_head_k(il));
            }
        }
    }
    return {};
}

std::string llama_pcd_core::check_model(const llama_pcd_params & p) const {
    const auto & model    = pcd.lctx.get_model();
    const bool   rotates = llama_pcd_settings::rotates(p);
    const bool   weighs  = std::any_of(second.layers.begin(), second.layers.end(), [](const auto & cur) { return cur.rotation.weighed; });

    const std::string arch = "the architecture '" + model.arch_name() + "' ";

    if ((model.hparams.rope_type == LLAMA_ROPE_TYPE_NONE || (has_graph && !has_rotations)) && rotates) {
        return arch + "has no rotary positions to over-rotate; use perturbation=\"none\" with a window";
    }
    if (hides_rotation && rotates) {
        return arch + "rotates queries or keys in a way that PCD does not follow, so L* would be wrong; "
            "use perturbation=\"none\" with a window";
    }
    if (llama_model_has_encoder(&model)) {
        return arch + "has an encoder, and a twin cannot attend to it";
    }
    if (weighs && llama_pcd_settings::rerotated(p)) {
        return arch + "changes its keys after rotating them, so a stored key cannot be rotated further; "
            "use cache=\"shared\"";
    }
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR && llama_pcd_settings::rerotated(p)) {
        return "second keys cannot be split over devices tensor by tensor; use another split_mode or cache=\"shared\"";
    }
    if (on_cann(model) && rotates) {
        return "the CANN backend keeps one table for all rotations of a graph; use perturbation=\"none\" with a window";
    }
    return {};
}

void llama_pcd_core::probe() {
    const llama_pcd_while inside(probing, true);

    seen.clear();

    ggml_cgraph * gf = pcd.build_graph();
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (node->op == GGML_OP_ROPE && std::find(seen.begin(), seen.end(), node) == seen.end()) {
            hides_rotation = true; // it was not handed to us
        }
    }
    has_graph = true;
}

int32_t llama_pcd_core::check(const llama_pcd_params & p, std::string & err) {
    err = llama_pcd_settings::check_range(p);
    if (err.empty()) {
        err = sequences.check(p);
    }
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }
    err = check_cache(p);
    err = err.empty() ? check_memory(p) : err;
    err = err.empty() ? check_model(p) : err;
    err = err.empty() ? conflict() : err;
    for (const auto & [seq_id, _] : llama_pcd::samplers(pcd.lctx)) {
        err = err.empty() && sequences.setting_of(seq_id, p).on ? conflict_of(seq_id) : err;
    }
    if (err.empty() && !has_graph) {
        probe();
        err = check_model(p);
    }
    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

int32_t llama_pcd_core::set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err) {
    err = p ? check_cache(*p) : "";
    if (p && err.empty()) {
        err = conflict_of(seq_id);
    }
    return err.empty() ? sequences.set(seq_id, p, ids.first, err) : (int32_t) LLAMA_PCD_UNSUPPORTED;
}
