// Reads a batch, chooses a way to evaluate it, and evaluates it part by part.

#include "decode/decode.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <numeric>

using outcome = llama_pcd_outcome;

llama_pcd_decoder::llama_pcd_decoder(llama_pcd_core & core) :
    rows(core.pcd.lctx, core.stats), core(core), parts(core, rows), pass(core, rows) {}

outcome llama_pcd_decoder::decode(const llama_batch_ext & batch) {
    rows.forget();

    const verdict found = read(batch);
    if (found != verdict::FINE) {
        rows.forget();
        return found == verdict::REFUSED ? outcome::INVALID : pass.run(batch);
    }
    const std::string reason = refusal(batch);
    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason.c_str());
        rows.forget();
        return outcome::INVALID;
    }

    outcome res = outcome::DONE;

    if (rows.size() == 0) {
        rows.count();
        res = pass.run(batch);
        if (res != outcome::DONE) {
            rows.forget();
        }
        return res;
    }

    core.pcd.prepare();

    res = refresh_second_keys();
    if (res == outcome::DONE) {
        rows.count();
        rows.reserve();
        res = evaluate(batch);
    }
    if (res == outcome::DONE) {
        rows.show();
        for (size_t i = 0; i < rows.size(); ++i) {
            if (rows.is_first(i)) {
                for (llama_seq_id s : batch.tokens[rows.out_ids[i]].seq_ids) {
                    core.sequences.put_entropy(s, rows.entropy(i));
                }
            }
        }
    } else {
        rows.forget();
        llama_pcd_outputs_forget(core.pcd.lctx);
    }
    return res;
}

llama_pcd_decoder::verdict llama_pcd_decoder::read(const llama_batch_ext & batch) {
    const size_t n = batch.tokens.size();

    if (n == 0 || n > core.pcd.lctx.n_batch() || n > core.memory.n_free_cells()) {
        return verdict::UPSTREAM;
    }
    std::map<llama_seq_id, int32_t> firsts; // rows of first tokens of answers

    for (size_t i = 0; i < n; ++i) {
        const auto & token = batch.tokens[i];

        for (llama_seq_id s : token.seq_ids) {
            if (core.ids.is_twin(s)) {
                LLAMA_LOG_ERROR("%s: sequence id %d: ids from %d on belong to PCD's twins\n", __func__, s, core.ids.first);
                return verdict::REFUSED;
            }
            if (s < 0 || s >= batch.n_seq_max) {
                return verdict::UPSTREAM;
            }
        }
        if (token.seq_ids.empty()) {
            return verdict::UPSTREAM;
        }
        const auto parent  = llama_pcd_parent_of(token);
        const auto setting = core.sequences.setting_of(parent);
        const auto pos     = token.pos[0];
        const bool asked   = token.output && setting.on && !core.settings.suspended;

        bool is_first = false; // of an answer
        for (llama_seq_id s : token.seq_ids) {
            is_first |= core.sequences.note_token(s, pos, asked) && s == parent;
        }
        const bool plain = setting.is_early(pos) || core.sequences.is_sure(parent, setting);

        if (asked && plain) {
            rows.add_plain(i);
        } else if (asked) {
            if (is_first) {
                for (llama_seq_id s : token.seq_ids) {
                    firsts[s] = rows.size();
                }
            }
            const auto first = firsts.find(parent);
            rows.add(i, setting, first == firsts.end() ? -1 : first->second);
        }
    }
    return verdict::FINE;
}

std::string llama_pcd_decoder::refusal(const llama_batch_ext & batch) const {
    std::string reason = rows.size() > 0 ? core.limits.conflict() : "";

    if (reason.empty() && rows.size() > 0) {
        reason = core.ids.find_taken(core.memory); // by a copy, or a loaded state
    }
    for (const auto * ids : { &rows.out_ids, &rows.plain_ids }) {
        for (size_t i = 0; i < ids->size() && reason.empty(); ++i) {
            reason = core.limits.conflict_of(llama_pcd_parent_of(batch.tokens[(*ids)[i]]));
        }
    }
    return reason.empty() ? "" : "PCD is on, but " + reason + "; turn it off first";
}

outcome llama_pcd_decoder::refresh_second_keys() {
    if (!core.settings.rerotated() || !core.second.any_stale()) {
        return outcome::DONE;
    }
    const int64_t     n_before = core.stats.n_derived_cells;
    const ggml_status status   = core.second.derive(core.stats.n_derived_cells);
    if (status != GGML_STATUS_SUCCESS) {
        LLAMA_LOG_ERROR("%s: failed to derive the second keys\n", __func__);
        return status == GGML_STATUS_ABORTED ? outcome::ABORTED : outcome::FAILED;
    }
    core.stats.n_derived += core.stats.n_derived_cells > n_before;
    return outcome::DONE;
}

//
// the ways
//

llama_pcd_decoder::way llama_pcd_decoder::choose(const llama_batch_ext & batch) const {
    const auto & contrasts = rows.contrasts;

    if (std::all_of(contrasts.begin(), contrasts.end(), [](const auto & cur) { return cur.gamma == 1; })) {
        return way::ALTERNATE; // none of its rows needs a twin
    }
    switch (core.settings.params.evaluation) {
        case LLAMA_PCD_EVALUATION_FUSED:     return way::FUSED;
        case LLAMA_PCD_EVALUATION_ALTERNATE: return way::ALTERNATE;
        default:                             return fuses(batch) ? way::FUSED : way::ALTERNATE;
    }
}

// In a prompt a twin is one token more. In a step it is left out, if twins come later, where its row turns out not to need it; a floor
// on the first token of an answer leaves rows plain before they are evaluated.
bool llama_pcd_decoder::fuses(const llama_batch_ext & batch) const {
    return batch.tokens.size() > 2*rows.size() || std::any_of(rows.contrasts.begin(), rows.contrasts.end(), [](const auto & cur) {
        return cur.gamma > 1 && cur.relative_top == 0.0f && cur.min_entropy == 0.0f;
    });
}

//
// parts
//

outcome llama_pcd_decoder::evaluate(const llama_batch_ext & batch) {
    const size_t n   = batch.tokens.size();
    const way    how = choose(batch);

    llama_pcd_outputs all;

    outcome res = outcome::DONE;

    for (size_t done = 0; done < n && res == outcome::DONE; ) {
        const auto cur   = parts.next(batch, done, how == way::FUSED);
        const bool whole = cur.i1 - cur.i0 == n;

        res = evaluate_part(batch, cur, how);

        if (res == outcome::NO_ROOM || res == outcome::INVALID) { // as if nothing had been decoded
            pass.take_back(batch, done);
            return core.memory.recr && done > 0 ? outcome::BROKEN : res;
        }
        if (res != outcome::DONE) {
            return res; // parts before this one stay, as llama.cpp's micro-batches do
        }
        if (!whole) {
            all.take(core.pcd.lctx, cur.i0, cur.i1);
        }
        if (cur.i1 == n && cur.i0 > 0 && !all.put(core.pcd.lctx)) {
            return outcome::BROKEN;
        }
        done = cur.i1;
    }
    return res;
}

outcome llama_pcd_decoder::evaluate_part(const llama_batch_ext & batch, const llama_pcd_part & cur, way how) {
    auto & stats = core.stats;

    if (cur.r0 == cur.r1) {
        return pass.run(llama_pcd_batch_part(batch, cur.i0, cur.i1));
    }

    auto reason = LLAMA_PCD_FALLBACK_NO_ROOM;

    if (cur.fits) {
        const auto    before = stats;
        const outcome res    = how == way::FUSED ? fused(batch, cur) : alternate(batch, cur);

        if (res == outcome::DONE) {
            stats.n_fused     += how == way::FUSED;
            stats.n_alternate += how == way::ALTERNATE;
        }
        if (res == outcome::NO_ROOM) { // another way will evaluate them, and count
            stats.n_twins   = before.n_twins;
            stats.n_skipped = before.n_skipped;
        }
        if (res != outcome::NO_ROOM) {
            return res;
        }
        if (core.memory.slides()) {
            reason = LLAMA_PCD_FALLBACK_SLIDES;
        }
    } else if (core.memory.n_room(2) >= 2) {
        reason = LLAMA_PCD_FALLBACK_NARROW;
    }

    const outcome res = sequential(batch, cur);
    if (res == outcome::DONE) {
        stats.n_sequential++;
        pass.note_fallback(reason);
    }
    return res;
}

outcome llama_pcd_decoder::fused(const llama_batch_ext & batch, const llama_pcd_part & cur) {
    auto & lctx = core.pcd.lctx;

    llama_batch_ext both = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    std::vector<size_t> which(cur.r1 - cur.r0);
    std::iota(which.begin(), which.end(), cur.r0);

    auto twins = pass.add_twins(both, batch, cur.i0, which);

    const outcome res = pass.run(both, twins);
    if (res != outcome::DONE) {
        return res;
    }
    if (twins.misplaced) { // the memory split the batch in its own way
        pass.take_back(both, twins.first);
        return core.memory.recr ? outcome::BROKEN : outcome::NO_ROOM;
    }

    llama_pcd::n_queued_tokens(lctx) -= twins.all.size(); // twins are not the caller's tokens
    llama_pcd_outputs_wait(lctx);

    for (size_t i = cur.r0; i < cur.r1; ++i) {
        rows.take_standard(i, rows.out_ids[i] - cur.i0);
    }
    rows.take_local(twins);
    llama_pcd_outputs_hide(lctx, twins.first, twins.all.size());

    return outcome::DONE;
}

outcome llama_pcd_decoder::alternate(const llama_batch_ext & batch, const llama_pcd_part & cur) {
    const llama_batch_ext tokens = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const llama_pcd_saved_states saved(core.states, tokens);

    outcome res = pass.run(tokens);
    if (res != outcome::DONE) {
        return res;
    }

    const llama_pcd_timings timings(core.pcd.lctx);

    std::vector<size_t> todo;
    for (size_t i = cur.r0; i < cur.r1; ++i) {
        rows.take_standard(i, rows.out_ids[i] - cur.i0);
        if (rows.needs_twin(i)) {
            todo.push_back(i);
        } else {
            core.stats.n_skipped++;
        }
    }
    if (!todo.empty()) { // what is decoded next overwrites the rows
        llama_pcd_outputs all;
        all.take(core.pcd.lctx, 0, tokens.tokens.size());
        res = run_twins_of(batch, todo);
        if (!all.put(core.pcd.lctx)) {
            res = outcome::BROKEN;
        }
    }
    timings.count();

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
        memory.recr ? 1u : core.ids.n_max, lctx.n_batch(), memory.n_room(core.ids.n_max), lctx.get_cparams().n_outputs_max });

    outcome res = outcome::DONE;
    for (size_t k = 0; k < todo.size() && res == outcome::DONE; ) {
        std::vector<size_t> which;
        do {
            which.push_back(todo[k]);
            k++;
        } while (k < todo.size() && which.size() < n_max && todo[k] == todo[k - 1] + 1);

        for (const size_t row : which) {
            const auto & token = batch.tokens[rows.out_ids[row]];
            if (memory.forgets(which.size(), llama_pcd_parent_of(token), token.pos[0])) {
                return outcome::NO_ROOM;
            }
        }
        res = pass.run_alone(batch, which);
    }
    return res;
}

// for a memory that is full up to the tokens themselves, or that forgets
outcome llama_pcd_decoder::sequential(const llama_batch_ext & batch, const llama_pcd_part & cur) {
    auto & lctx = core.pcd.lctx;

    const llama_batch_ext tokens = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const llama_pcd_saved_states saved(core.states, tokens);

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

    for (size_t row = cur.r0; row < cur.r1; ++row) {
        const size_t at = rows.out_ids[row] - cur.i0;

        decode_to(at);
        if (res == outcome::DONE) {
            res = pass.run_alone(batch, { row });
        }
        decode_to(at + 1);
        if (res != outcome::DONE) {
            break;
        }
        rows.take_standard(row, 0);
    }
    decode_to(tokens.tokens.size());

    if (res != outcome::DONE) {
        pass.take_back(tokens, done);
        return res;
    }

    return all.put(lctx) ? outcome::DONE : outcome::BROKEN;
}
