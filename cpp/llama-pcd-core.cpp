// Turns PCD on, or leaves everything as it was where that fails.

#include "llama-pcd-core.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

llama_pcd_core::llama_pcd_core(llama_pcd & pcd, const llama_pcd_memory & memory) :
    pcd(pcd),
    memory(memory),
    limits(memory, settings),
    tables(pcd.lctx.get_model(), settings),
    second(pcd, memory, settings, tables),
    twins(memory),
    view(memory, settings, twins),
    masks(memory, view),
    states(memory, twins) {}

bool llama_pcd_core::make_room(std::string & err) {
    if (has_room) {
        return true;
    }
    if (!states.make(err)) {
        return false;
    }

    // each of the caller's rows may have a twin's beside it, so that a limit the caller set for its own does not part them
    auto & cparams = llama_pcd::cparams(pcd.lctx);
    const uint32_t n_both = cparams.n_outputs_max + std::min(cparams.n_outputs_max, twins.n_max);
    cparams.n_outputs_max = std::max(cparams.n_outputs_max, std::min(cparams.n_batch, n_both));

    pcd.reset_graphs();
    pcd.reserve_later();

    has_room = true;
    return true;
}

int32_t llama_pcd_core::set(const llama_pcd_params & p, const std::string & taken, std::string & err) {
    const int32_t status = limits.check(p, taken, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    pcd.lctx.synchronize();

    // one stream holds all cells, so a mask over several sequences is one mask
    llama_pcd::cparams(pcd.lctx).kv_unified = true;

    if (!make_room(err)) {
        return LLAMA_PCD_NO_MEMORY;
    }

    const auto old         = settings.params;
    const auto old_demand  = second.demand;
    const bool was_on      = settings.on;
    const bool other_table = !llama_pcd_settings::same_table(p, old);

    llama_pcd_second::changes done;

    bool reserve = !limits.has_graph;

    const auto undo = [&]() {
        settings.params = old;
        settings.on     = was_on;
        second.demand   = old_demand;
        if (other_table) {
            tables.write();
        }
        if (!second.undo(done) && (second.demand.keys || second.demand.stream)) {
            settings.on = false;
            err += "; nor is there room any more for the former ones, so PCD is off now";
        }
        if (reserve) {
            pcd.reserve_later();
        }
        pcd.reset_graphs();
    };

    const bool fits = second.allocate(p, done, err);

    reserve |= !done.empty();
    if (!fits) {
        undo();
        return LLAMA_PCD_NO_MEMORY;
    }

    second.demand = second.demand_of(p);

    if (reserve || second.demand.keys != old_demand.keys || !llama_pcd_settings::same_topology(p, old)) {
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
    if (reserve) {
        // the graphs built here also show how each layer rotates, if it does
        pcd.reserve_now(undo);

        limits.has_graph    = true;
        limits.weighs_keys |= second.weighs_keys();
    }
    if (limits.check(p, taken, err) != LLAMA_PCD_OK) { // what only a graph shows
        undo();
        return LLAMA_PCD_UNSUPPORTED;
    }
    settings.confirm_seqs();
    second.keep(done);
    masks.trim();

    return LLAMA_PCD_OK;
}

int32_t llama_pcd_core::set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err) {
    err = p ? limits.conflict_of(seq_id) : "";
    if (!err.empty()) {
        return LLAMA_PCD_UNSUPPORTED;
    }
    const auto before = settings;

    int32_t status = settings.set_seq(seq_id, p, twins.seq_first, err);

    if (status != LLAMA_PCD_OK || !settings.on || second.demand.keys || !second.demand_of(settings.params).keys) {
        return status;
    }
    try {
        status = set(settings.params, {}, err); // the first sequence that second keys have to be kept for
    } catch (...) {
        settings = before;
        throw;
    }
    if (status != LLAMA_PCD_OK) {
        settings = before;
        err      = format("sequence %d sees too much for second keys to be made as they are needed: ", seq_id) + err;
    }
    return status;
}

uint32_t llama_pcd_core::count_turned(const llama_ubatch & ubatch) const {
    uint32_t n = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens && !twins.parents.empty(); ++i) {
        const llama_seq_id id = ubatch.seq_id[i][0];
        n += twins.is_twin(id) && turns(id);
    }
    return n;
}
