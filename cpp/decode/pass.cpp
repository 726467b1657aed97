// Decodes with twins in the batch, and never leaves one behind.

#include "decode/pass.h"

#include "llama-impl.h"

#include <algorithm>
#include <optional>
#include <set>

llama_pcd_saved_states::llama_pcd_saved_states(llama_pcd_states & states, const llama_batch_ext & tokens) : states(states) {
    std::set<llama_seq_id> seqs;
    for (const auto & token : tokens.tokens) {
        seqs.insert(token.seq_ids.begin(), token.seq_ids.end());
    }
    states.save({ seqs.begin(), seqs.end() });
}

llama_pcd_outcome llama_pcd_pass::run(const llama_batch_ext & batch) {
    return (llama_pcd_outcome) core.pcd.decode_plain(batch);
}

llama_pcd_outcome llama_pcd_pass::run(const llama_batch_ext & batch, llama_pcd_twins & twins) {
    struct guard {
        guard(llama_pcd_core & core, llama_pcd_twins & twins) : core(core) { core.twins = &twins; }
        ~guard() {
            for (llama_seq_id i = 0; i < core.twins->n_seqs; ++i) {
                core.memory.remove(core.ids.first + i);
            }
            core.twins = nullptr;
        }

        llama_pcd_core & core;
    } const in_flight(core, twins);

    // twins alone have graphs of their own, which take turns with their tokens'
    const bool alone = !twins.together && batch.tokens.size() <= LLAMA_PCD_MAX_TWINS;

    std::optional<llama_pcd::step_threads> threads;
    if (std::max(twins.all.size(), batch.tokens.size() - twins.all.size()) <= 1) {
        threads.emplace(core.pcd.lctx);
    }
    const auto res = (llama_pcd_outcome) core.pcd.decode_plain(batch, alone ? &core.pcd.cached : nullptr);

    if (res == llama_pcd_outcome::DONE && core.settings.separate() && !twins.misplaced) {
        core.second.set_fresh(twins.cells(core.memory.kvs.size()));
    }
    return res;
}

llama_pcd_outcome llama_pcd_pass::run_alone(
        const llama_batch_ext & batch, const std::vector<llama_pcd_pair> & pairs, llama_pcd_twins & twins) {
    llama_batch_ext alone = llama_pcd_batch_like(batch);
    twins = add_twins(alone, batch, 0, pairs);

    return run_alone(alone, twins);
}

llama_pcd_outcome llama_pcd_pass::run_alone(const llama_batch_ext & alone, llama_pcd_twins & twins) {
    const auto res = run(alone, twins);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }
    llama_pcd::n_queued_tokens(core.pcd.lctx) = 0; // they are not the caller's tokens
    llama_pcd_outputs_wait(core.pcd.lctx);
    rows.take_local(twins);

    return res;
}

llama_pcd_twins llama_pcd_pass::add_twins(
        llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, const std::vector<llama_pcd_pair> & pairs) const {
    llama_pcd_twins res;
    res.first    = dst.tokens.size();
    res.together = res.first > 0;

    std::vector<llama_pcd_pair> order = pairs;
    if (!core.settings.separate()) { // there they are alike
        std::stable_partition(order.begin(), order.end(), [&](const auto & cur) {
            return rows.contrasts[cur.row].perturbation == LLAMA_PCD_PERTURBATION_NONE;
        });
    }
    for (const auto & cur : order) {
        const auto & token = src.tokens[cur.token];
        add_twin(dst, res, src, token, llama_pcd_parent_of(token), res.together ? (int32_t) (cur.token - i0) : -1, cur.row);
    }
    return res;
}

void llama_pcd_pass::add_twin(llama_batch_ext & dst, llama_pcd_twins & twins, const llama_batch_ext & src,
        const llama_batch_ext::token & token, llama_seq_id parent, int32_t entry, size_t row) const {
    llama_pcd_twin twin = {};
    twin.parent = parent;
    twin.token  = entry;
    twin.row    = row;

    if (core.settings.separate()) { // those of one text share a sequence, and all have the context's view
        const auto same = std::find_if(twins.all.rbegin(), twins.all.rend(), [&](const auto & cur) { return cur.parent == parent; });

        twin.seq_id    = same != twins.all.rend() ? same->seq_id : core.ids.first + twins.n_seqs++;
        twin.perturbed = true;
        twin.window    = core.settings.params.window;
        twin.n_sink    = core.settings.params.n_sink;
    } else {
        const auto & setting = rows.contrasts[row];

        twin.seq_id    = core.ids.first + twins.n_seqs++;
        twin.perturbed = setting.perturbation != LLAMA_PCD_PERTURBATION_NONE;
        twin.window    = setting.window;
        twin.n_sink    = setting.n_sink;
        core.states.branch(parent, twin.seq_id);
    }
    twins.all.push_back(twin);
    llama_pcd_batch_add_twin(dst, src, token, twin.seq_id, row != llama_pcd_twin::NO_ROW);
}

void llama_pcd_pass::take_back(const llama_batch_ext & batch, size_t n) {
    if (core.memory.recr && !core.states.restore()) {
        return;
    }
    for (size_t i = 0; i < n; ++i) {
        for (llama_seq_id s : batch.tokens[i].seq_ids) {
            for (auto * kv : core.memory.kvs) {
                kv->seq_rm(s, batch.tokens[i].pos[0], -1);
            }
        }
    }
}

const char * llama_pcd_pass::why(llama_pcd_fallback reason) {
    switch (reason) {
        case LLAMA_PCD_FALLBACK_NO_ROOM:
            return "no free cells for twins beside their tokens, so each twin is evaluated before its token; use a larger n_ctx";
        case LLAMA_PCD_FALLBACK_NARROW:
            return "no room for a token and its twin in one pass, so one is evaluated after the other; use a larger n_batch and n_ubatch";
        case LLAMA_PCD_FALLBACK_SLIDES:
            return "sliding-window layers forget what a twin would see behind its token, or deal the batch out in an order that twins "
                "cannot be in, so each twin is evaluated before its token; use swa_full = true";
        default:
            return "";
    }
}

void llama_pcd_pass::note_fallback(llama_pcd_fallback reason) {
    core.stats.n_fallbacks++;
    core.stats.last_fallback = reason;

    const bool again = noted & (1u << reason);
    noted |= 1u << reason;

    llama_log_internal(again ? GGML_LOG_LEVEL_DEBUG : GGML_LOG_LEVEL_WARN, "PCD: %s%s\n",
            why(reason), again ? "" : " (said once; llama_pcd_stats.n_fallbacks counts on)");
}
