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
    view(memory, settings),
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
    struct guard {
        explicit guard(bool & flag) : flag(flag) { flag = true; }
        ~guard() { flag = false; }

        bool & flag;
    } const inside(probing);

    pcd.build_graph();

    limits.has_graph   = true;
    limits.has_weighed_keys = second.has_weighed_keys();
}

int32_t llama_pcd_core::check(const llama_pcd_params & p, const std::string & taken, std::string & err) {
    int32_t status = limits.check(p, taken, err);
    if (status == LLAMA_PCD_OK && !limits.has_graph) {
        probe();
        status = limits.check(p, taken, err);
    }
    const llama_seq_id id = ids.find_taken(memory);
    if (status == LLAMA_PCD_OK && id >= 0) {
        err = format("sequence %d has tokens, and the ids from %d on are for PCD's twins; "
                "take it out of memory first (llama_memory_seq_rm)", id, ids.first);
        return LLAMA_PCD_UNSUPPORTED;
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

    const auto   old         = settings.params;
    const auto   old_demand  = second.demand;
    const bool   was_on      = settings.on;
    const bool   other_table = !llama_pcd_settings::same_table(p, old);
    const size_t n_tables    = tables.size();

    // made before anything changes, since making them may fail
    const auto old_tables = other_table ? tables.contents_for(old) : llama_pcd_tables::contents {};
    const auto new_tables = other_table ? tables.contents_for(p)   : llama_pcd_tables::contents {};

    llama_pcd_second::changes done;

    bool reserve = !has_reserved;

    const auto undo = [&]() {
        settings.params = old;
        settings.on     = was_on;
        second.demand   = old_demand;
        second.undo(done);
        tables.write(old_tables);
        tables.cut(n_tables);
        if (reserve) {
            pcd.reserve_later();
        }
        pcd.reset_graphs();
    };

    const auto change = [&]() {
        const bool fits = second.allocate(p, done, err);

        reserve |= !done.empty();
        if (!fits) {
            return false;
        }

        second.demand = second.demand_of(p);

        if (reserve || second.demand.keys != old_demand.keys || !llama_pcd_settings::same_topology(p, old)) {
            pcd.reset_graphs();
        }
        if (p.evaluation != old.evaluation) {
            pcd.drop_cached(); // other graphs take turns now
        }

        settings.params = p;
        settings.on     = true;

        tables.write(new_tables);

        if (reserve) {
            pcd.reserve_now([]() {}); // all is undone below
        }
        return true;
    };

    try {
        if (!change()) {
            undo();
            return LLAMA_PCD_NO_MEMORY;
        }
    } catch (...) {
        undo();
        throw;
    }
    has_reserved = true;

    sequences.confirm();
    second.keep(done);

    return LLAMA_PCD_OK;
}

int32_t llama_pcd_core::set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err) {
    err = p ? limits.conflict_of(seq_id) : "";
    return err.empty() ? sequences.set(seq_id, p, ids.first, err) : (int32_t) LLAMA_PCD_UNSUPPORTED;
}
