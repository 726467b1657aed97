// Decodes with twins in the batch, and never leaves one behind.

#include "llama-pcd-pass.h"

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
    const size_t n_twins = core.twins.parents.size();

    if (n_twins > 0 && !core.twins.together && batch.tokens.size() <= LLAMA_PCD_MAX_TWINS) {
        return &core.pcd.kept[llama_pcd::TWINS_ALONE];
    }
    // steps that auto fuses take turns with those that it does not; prompts, and other evaluations, fuse all or none
    const bool turns = n_twins > 0 && core.twins.together && batch.tokens.size() <= 3*n_twins &&
        core.settings.params.evaluation == LLAMA_PCD_EVALUATION_AUTO && !core.settings.separate();

    return turns ? &core.pcd.kept[llama_pcd::TWINS_BESIDE] : nullptr;
}

llama_pcd_outcome llama_pcd_pass::run_twins(const llama_batch_ext & batch, size_t i0, size_t n) {
    llama_batch_ext alone = llama_pcd_batch_like(batch);
    add_twins(alone, batch, i0, n);

    const auto res = run(alone);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }

    finish_twins();

    for (size_t i = 0; i < n; ++i) {
        rows.take_over_rotated(i0 + i, i);
    }

    return res;
}

void llama_pcd_pass::add_twins(llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n) {
    auto & twins = core.twins;

    twins.parents.clear();

    for (size_t i = 0; i < n; ++i) {
        const auto & token = src.tokens[rows.out_ids[i0 + i]];

        twins.parents.push_back(llama_pcd_parent_of(token));
        llama_pcd_batch_add_twin(dst, src, token, twins.seq_first + (llama_seq_id) i, true);
    }
}

void llama_pcd_pass::branch(llama_seq_id parent) {
    if (core.memory.recr) {
        core.memory.recr->seq_cp(parent, core.twins.seq_first, -1, -1);
    }
}

void llama_pcd_pass::finish_twins() {
    llama_pcd::n_queued_tokens(core.pcd.lctx) = 0;
    llama_pcd_outputs_wait(core.pcd.lctx);
}

void llama_pcd_pass::take_back(const llama_batch_ext & batch, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        for (llama_seq_id s : batch.tokens[i].seq_ids) {
            core.pcd.lctx.get_memory()->seq_rm(s, batch.tokens[i].pos[0], -1);
        }
    }
}

void llama_pcd_pass::drop_twins() {
    auto & twins = core.twins;

    for (size_t i = 0; i < twins.parents.size(); ++i) {
        core.pcd.lctx.get_memory()->seq_rm(twins.seq_first + (llama_seq_id) i, -1, -1);
    }
    twins.parents.clear();
}
