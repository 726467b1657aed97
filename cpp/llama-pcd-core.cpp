// Turns PCD on, or leaves everything as it was where that fails.

#include "llama-pcd-core.h"

#include "llama-model.h"

#include <tuple>

llama_pcd_core::llama_pcd_core(llama_pcd & pcd, const llama_pcd_memory & memory) :
    pcd(pcd),
    memory(memory),
    limits(memory),
    tables(pcd.lctx.get_model(), settings),
    second(pcd, memory, settings, tables),
    twins(memory),
    view(memory, settings, twins) {}

int32_t llama_pcd_core::set(const llama_pcd_params & p, const std::string & taken, std::string & err) {
    const int32_t status = limits.check(p, taken, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    pcd.lctx.synchronize();

    // one stream holds all cells, so a mask over several sequences is one mask
    llama_pcd::cparams(pcd.lctx).kv_unified = true;

    llama_pcd_second::storage made;

    const bool is_new = !second.is_enough(p);
    if (is_new && !second.make(p, made, err)) {
        return LLAMA_PCD_NO_MEMORY;
    }

    const auto old = std::make_tuple(settings.params, settings.on, second.stale, second.from);

    if (is_new) {
        std::swap(second.store, made);
        second.from.made = false;
    }

    const bool other_table = !llama_pcd_settings::same_table(p, settings.params);

    const auto undo = [&]() {
        std::tie(settings.params, settings.on, second.stale, second.from) = old;
        if (other_table) {
            tables.write();
        }
        if (is_new) {
            std::swap(second.store, made);
            pcd.reserve_later();
        }
        pcd.reset_graphs();
    };

    if (is_new || !llama_pcd_settings::same_topology(p, settings.params)) {
        pcd.reset_graphs();
    }

    if (p.evaluation != settings.params.evaluation) {
        pcd.drop_kept(); // other graphs take turns now
    }

    settings.params = p;
    settings.on     = true;

    if (other_table) {
        tables.write();
    }
    if (settings.rerotated() || settings.separate()) {
        second.follow_settings();
    }

    if (is_new) {
        // the graphs built here also show how each layer rotates, if it does
        pcd.reserve_now(undo);

        limits.has_graph    = true;
        limits.weighs_keys |= second.weighs_keys();
    }
    if (limits.check(p, taken, err) != LLAMA_PCD_OK) { // what only a graph shows
        undo();
        return LLAMA_PCD_UNSUPPORTED;
    }

    return LLAMA_PCD_OK;
}
