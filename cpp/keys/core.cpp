// Turns PCD on, or leaves everything as it was if that fails.

#include "keys/core.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

llama_pcd_core::llama_pcd_core(llama_pcd & pcd, const llama_pcd_memory & memory) :
    pcd(pcd),
    memory(memory),
    sequences(settings),
    limits(memory, sequences),
    tables(pcd.lctx.get_model(), settings),
    second(pcd, memory, settings, tables),
    ids(memory),
    states(memory, ids) {}

bool llama_pcd_core::make_room(std::string & err) {
    if (has_room) {
        return true;
    }
    if (!states.make(err)) {
        return false;
    }

    // each of the caller's rows may have a twin's beside it, so that a limit the caller set for its own does not part them
    auto & cparams = llama_pcd::cparams(pcd.lctx);
    const uint32_t n_both = cparams.n_outputs_max + std::min(cparams.n_outputs_max, ids.n_max);
    cparams.n_outputs_max = std::max(cparams.n_outputs_max, std::min(cparams.n_batch, n_both));

    pcd.reset_graphs();
    pcd.reserve_later();

    has_room = true;
    return true;
}

void llama_pcd_core::probe() {
    const llama_pcd_while inside(probing);

    limits.seen.clear();

    ggml_cgraph * gf = pcd.build_graph();
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (node->op == GGML_OP_ROPE && std::find(limits.seen.begin(), limits.seen.end(), node) == limits.seen.end()) {
            limits.hides_rotation = true; // it was not handed to us
        }
    }
    limits.has_graph        = true;
    limits.has_weighed_keys = second.has_weighed_keys();
}

int32_t llama_pcd_core::check(const llama_pcd_params & p, std::string & err) {
    int32_t status = limits.check(p, err);
    if (status == LLAMA_PCD_OK && !limits.has_graph) {
        probe();
        status = limits.check(p, err);
    }
    if (status == LLAMA_PCD_OK) {
        err    = ids.find_taken(memory);
        status = err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
    }
    return status;
}

int32_t llama_pcd_core::set(const llama_pcd_params & p, std::string & err) {
    pcd.lctx.synchronize();

    // one stream holds all cells, so a mask over several sequences is one mask
    llama_pcd::cparams(pcd.lctx).kv_unified = true;

    if (!make_room(err)) {
        return LLAMA_PCD_NO_MEMORY;
    }

    llama_pcd_second::tensors_ptr tensors;
    if (!second.allocate(p, tensors, err)) {
        return LLAMA_PCD_NO_MEMORY;
    }
    const bool changed = tensors != second.in_force();
    const bool other   = !llama_pcd_settings::same_table(p, settings.params);

    llama_pcd_settings next = settings;
    next.params = p;
    next.on     = true;

    // what is in force for what is to be: nothing in this can fail
    const auto swap = [&]() noexcept {
        std::swap(settings, next);
        second.swap(tensors);
        if (other) {
            tables.forget();
        }
        pcd.reset_graphs();
    };

    swap();
    try {
        if (changed || !has_reserved) {
            pcd.reserve_now();
        }
    } catch (...) {
        swap();
        pcd.reserve_later();
        throw;
    }
    has_reserved = true;

    sequences.confirm();
    second.keep(changed);

    return LLAMA_PCD_OK;
}

int32_t llama_pcd_core::set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err) {
    err = p ? limits.check_cache(*p) : "";
    if (p && err.empty()) {
        err = limits.conflict_of(seq_id);
    }
    return err.empty() ? sequences.set(seq_id, p, ids.first, err) : (int32_t) LLAMA_PCD_UNSUPPORTED;
}
