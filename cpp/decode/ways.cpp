// The ways to evaluate a part of a batch and its twins.

#include "decode/decode.h"

#include <algorithm>

using outcome = llama_pcd_outcome;

outcome llama_pcd_decoder::evaluate_twins(const llama_batch_ext & batch, const llama_pcd_part & cur, way how) {
    auto &     stats  = core.stats;
    const auto before = stats;

    const outcome res = how == way::FUSED ? fused(batch, cur) : alternate(batch, cur);

    if (res == outcome::DONE) {
        (how == way::FUSED ? stats.n_fused : stats.n_alternate)++;
    }
    if (res == outcome::NO_ROOM) { // another way will evaluate them, and count
        stats.n_twins   = before.n_twins;
        stats.n_skipped = before.n_skipped;
    }
    return res;
}

outcome llama_pcd_decoder::fused(const llama_batch_ext & batch, const llama_pcd_part & cur) {
    auto & lctx = core.pcd.lctx;

    llama_batch_ext both = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const size_t n_std = both.tokens.size();
    const size_t n_out = cur.r1 - cur.r0;

    const auto order = pass.add_twins(both, batch, cur.r0, n_out);

    const outcome res = pass.run(both, true);
    if (res != outcome::DONE) {
        return res;
    }
    if (core.twins.misplaced) { // the memory split the batch in its own way
        pass.take_back(both, n_std);
        return core.memory.recr ? outcome::BROKEN : outcome::NO_ROOM;
    }

    llama_pcd::n_queued_tokens(lctx) -= n_out; // twins are not the caller's tokens
    llama_pcd_outputs_wait(lctx);

    for (size_t i = 0; i < n_out; ++i) {
        rows.take_standard    (cur.r0 + i, rows.out_ids[cur.r0 + i] - cur.i0);
        rows.take_over_rotated(order[i], n_std + i);
    }
    llama_pcd_outputs_hide(lctx, n_std, n_out);

    return outcome::DONE;
}

outcome llama_pcd_decoder::alternate(const llama_batch_ext & batch, const llama_pcd_part & cur) {
    const llama_batch_ext tokens = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const llama_pcd_kept_states kept(core.states, tokens);

    outcome res = pass.run(tokens);
    if (res != outcome::DONE) {
        return res;
    }

    llama_pcd_outputs_backup backup(core.pcd.lctx);

    std::vector<size_t> todo;
    for (size_t i = cur.r0; i < cur.r1; ++i) {
        rows.take_standard(i, rows.out_ids[i] - cur.i0);
        if (rows.needs_twin(i)) {
            todo.push_back(i);
        } else {
            core.stats.n_skipped++;
        }
    }
    const bool separate = core.settings.separate();

    if (!todo.empty() || separate) {
        backup.copy_rows();
    }

    res = separate ? streams.catch_up_after(batch, todo) : run_twins_of(batch, todo);

    backup.restore();

    if (res != outcome::DONE) {
        pass.take_back(tokens, tokens.tokens.size()); // a token without its twin is not evaluated
    }
    return res;
}

// neighbours go together
outcome llama_pcd_decoder::run_twins_of(const llama_batch_ext & batch, const std::vector<size_t> & todo) {
    const auto & lctx   = core.pcd.lctx;
    const auto & memory = core.memory;
    const size_t n_max  = std::min({
        memory.recr ? 1u : core.twins.n_max, lctx.n_batch(), memory.n_room(core.twins.n_max), lctx.get_cparams().n_outputs_max });

    outcome res = outcome::DONE;
    for (size_t k = 0; k < todo.size() && res == outcome::DONE; ) {
        size_t n = 1;
        while (n < n_max && k + n < todo.size() && todo[k + n] == todo[k] + n) {
            n++;
        }
        for (size_t i = todo[k]; i < todo[k] + n; ++i) {
            const auto & token = batch.tokens[rows.out_ids[i]];
            if (memory.forgets(n, llama_pcd_parent_of(token), token.pos[0])) {
                return outcome::NO_ROOM;
            }
        }
        res = pass.run_twins(batch, todo[k], n);
        k += n;
    }
    return res;
}

// for a memory that is full up to the tokens themselves, or that forgets
outcome llama_pcd_decoder::sequential(const llama_batch_ext & batch, const llama_pcd_part & cur) {
    auto & lctx = core.pcd.lctx;

    const llama_batch_ext tokens = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const llama_pcd_kept_states kept(core.states, tokens);

    llama_pcd_outputs all;

    outcome res  = outcome::DONE;
    size_t  done = 0;

    const auto decode_to = [&](size_t end) {
        if (res == outcome::DONE && end > done) {
            res = pass.run(llama_pcd_batch_part(tokens, done, end));
            if (res == outcome::DONE) {
                all.take(lctx, done, end);
                done = end;
            }
        }
    };

    for (size_t i = cur.r0; i < cur.r1 && res == outcome::DONE; ++i) {
        const size_t at = rows.out_ids[i] - cur.i0;

        decode_to(at);
        if (res == outcome::DONE) {
            res = pass.run_twins(batch, i, 1);
        }
        decode_to(at + 1);
        if (res == outcome::DONE) {
            rows.take_standard(i, 0);
        }
    }
    decode_to(tokens.tokens.size());

    if (res != outcome::DONE) {
        pass.take_back(tokens, done);
        return res;
    }

    return all.put(lctx) ? outcome::DONE : outcome::BROKEN;
}
