// Turns PCD on, or leaves everything as it was if that fails.

#include "keys/core.h"

#include <algorithm>

llama_pcd_core::llama_pcd_core(llama_pcd & pcd, const llama_pcd_memory & memory) :
    pcd(pcd),
    memory(memory),
    sequences(settings),
    second(pcd, memory, settings),
    ids(memory),
    states(memory, ids) {}

void llama_pcd_core::make_room() {
    if (has_room) {
        return;
    }
    states.make();

    // each of the caller's rows may have a twin's beside it, so that a limit the caller set for its own does not part them
    auto & cparams = llama_pcd::cparams(pcd.lctx);
    const uint32_t n_both = cparams.n_outputs_max + std::min(cparams.n_outputs_max, ids.n_max);
    cparams.n_outputs_max = std::max(cparams.n_outputs_max, std::min(cparams.n_batch, n_both));

    pcd.reset_graphs();
    pcd.reserve_later();

    has_room = true;
}

void llama_pcd_core::set(const llama_pcd_params & p) {
    pcd.lctx.synchronize();

    // one stream holds all cells, so a mask over several sequences is one mask
    llama_pcd::cparams(pcd.lctx).kv_unified = true;

    make_room();

    auto tensors = second.allocate(p);

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
            second.forget_tables();
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
}
