// Decodes with twins in the batch, and never leaves one behind.

#include "decode/pass.h"

#include "llama-impl.h"

#include <algorithm>
#include <numeric>
#include <set>

llama_pcd_kept_states::llama_pcd_kept_states(llama_pcd_states & states, const llama_batch_ext & tokens) : states(states) {
    std::set<llama_seq_id> seqs;
    for (const auto & token : tokens.tokens) {
        seqs.insert(token.seq_ids.begin(), token.seq_ids.end());
    }
    states.save({ seqs.begin(), seqs.end() });
}

llama_pcd_outcome llama_pcd_pass::run(const llama_batch_ext & batch, bool together) {
    struct guard {
        explicit guard(llama_pcd_pass & pass) : pass(pass) {}
        ~guard() { pass.drop_twins(); }

        llama_pcd_pass & pass;
    } const drop(*this);

    auto & twins = core.twins;

    twins.misplaced = false;
    twins.together  = together;

    const auto res = (llama_pcd_outcome) core.pcd.decode_plain(batch, kept_for(batch));

    if (res == llama_pcd_outcome::DONE && !twins.parents.empty() && core.settings.separate() && !twins.misplaced) {
        core.second.set_fresh(twins.cells);
    }
    return res;
}

llama_pcd::kept_graphs * llama_pcd_pass::kept_for(const llama_batch_ext & batch) const {
    const bool alone = !core.twins.parents.empty() && !core.twins.together;

    return alone && batch.tokens.size() <= LLAMA_PCD_MAX_TWINS ? &core.pcd.kept : nullptr;
}

llama_pcd_outcome llama_pcd_pass::run_twins(const llama_batch_ext & batch, size_t i0, size_t n) {
    llama_batch_ext alone = llama_pcd_batch_like(batch);
    const auto order = add_twins(alone, batch, i0, n);

    const auto res = run(alone);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }

    finish_twins();

    for (size_t i = 0; i < n; ++i) {
        rows.take_over_rotated(order[i], i);
    }

    return res;
}

std::vector<size_t> llama_pcd_pass::add_twins(llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n) {
    auto & twins = core.twins;

    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), i0);
    std::stable_partition(order.begin(), order.end(), [&](size_t row) {
        return rows.contrasts[row].perturbation == LLAMA_PCD_PERTURBATION_NONE;
    });

    twins.parents.clear();

    for (const size_t row : order) {
        const auto &       token  = src.tokens[rows.out_ids[row]];
        const llama_seq_id parent = llama_pcd_parent_of(token);
        const llama_seq_id twin   = twins.seq_first + (llama_seq_id) twins.parents.size();

        twins.parents.push_back(parent);
        core.states.branch(parent, twin);
        llama_pcd_batch_add_twin(dst, src, token, twin, true);
    }
    return order;
}

void llama_pcd_pass::finish_twins() {
    llama_pcd::n_queued_tokens(core.pcd.lctx) = 0;
    llama_pcd_outputs_wait(core.pcd.lctx);
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
        case LLAMA_PCD_FALLBACK_DEALT:
            return "the memory deals the batch out in an order that twins cannot be in, so each is evaluated before its token; "
                "use swa_full = true";
        case LLAMA_PCD_FALLBACK_SLIDES:
            return "sliding-window layers forget what a later twin would see, so twins are not evaluated after their tokens; "
                "use swa_full = true or evaluation=\"fused\"";
        case LLAMA_PCD_FALLBACK_PICTURE:
            return "embeddings are not kept for a later evaluation, so their twins are evaluated at once";
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

void llama_pcd_pass::drop_twins() {
    auto & twins = core.twins;

    for (size_t i = 0; i < twins.parents.size(); ++i) {
        core.memory.remove(twins.seq_first + (llama_seq_id) i);
    }
    twins.parents.clear();
}
