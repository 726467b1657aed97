// Reads a batch, chooses a way to evaluate it, and evaluates it part by part.

#include "decode/decode.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <bitset>
#include <map>
#include <numeric>

using outcome = llama_pcd_outcome;

outcome llama_pcd_decoder::decode(const llama_batch_ext & batch) {
    rows.forget();

    std::string reason;
    if (!read(batch, reason)) {
        rows.forget();
        return run(batch);
    }
    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason.c_str());
        rows.forget();
        return outcome::INVALID;
    }
    const bool has_twins = rows.size() > 0;

    outcome res = outcome::DONE;
    if (has_twins) {
        core.pcd.prepare();
        res = refresh_second_keys();
    }
    if (res == outcome::DONE) {
        core.stats.n_tokens  += rows.size() + rows.plain_ids.size();
        core.stats.n_skipped += rows.plain_ids.size();
        res = has_twins ? evaluate(batch) : run(batch);
    }
    if (res != outcome::DONE) {
        rows.forget();
        if (has_twins) {
            llama_pcd::outputs::forget(core.pcd.lctx);
        }
        return res;
    }
    rows.show();
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows.all[i].first == (int32_t) i) { // its entropy matters: to its own sequence, or another one it is in
            for (llama_seq_id s : batch.tokens[rows.all[i].id].seq_ids) {
                core.sequences.put_entropy(s, rows.entropy(rows.all[i]));
            }
        }
    }
    return res;
}

bool llama_pcd_decoder::read(const llama_batch_ext & batch, std::string & reason) {
    const size_t n = batch.tokens.size();

    if (n == 0 || n > core.pcd.lctx.n_batch() || n > core.memory.n_free_cells()) {
        return false;
    }
    std::map<llama_seq_id, int32_t> firsts; // rows of first tokens of answers

    for (size_t i = 0; i < n; ++i) {
        const auto & token = batch.tokens[i];

        for (llama_seq_id s : token.seq_ids) {
            if (core.ids.is_twin(s)) {
                reason = format("sequence id %d: ids from %d on belong to PCD's twins", s, core.ids.first);
                return true;
            }
            if (s < 0 || s >= batch.n_seq_max) {
                return false;
            }
        }
        if (token.seq_ids.empty()) {
            return false;
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

        if (asked && reason.empty()) {
            reason = core.conflict_of(parent);
        }
        if (asked && plain) {
            rows.plain_ids.push_back(i);
        } else if (asked) {
            if (is_first) {
                for (llama_seq_id s : token.seq_ids) {
                    firsts[s] = rows.size();
                }
            }
            const auto first = firsts.find(parent);
            rows.all.push_back({ (int32_t) i, setting, first == firsts.end() ? -1 : first->second });
        }
    }
    if (rows.size() > 0 && reason.empty()) {
        reason = core.conflict();
    }
    reason = reason.empty() ? "" : "PCD is on, but " + reason + "; turn it off first";
    return true;
}

outcome llama_pcd_decoder::refresh_second_keys() {
    if (!core.settings.rerotated()) {
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

// With evaluation = auto: in a prompt a twin is one token more. In a step it is left out, if twins come later, where its row turns out not to
// need it; a floor on the first token of an answer leaves rows plain before they are evaluated.
bool llama_pcd_decoder::fuses(const llama_batch_ext & batch) const {
    const auto any = [&](const auto & fn) {
        return std::any_of(rows.all.begin(), rows.all.end(), [&](const auto & row) { return fn(row.setting); });
    };
    if (!any([](const auto & cur) { return cur.gamma > 1; })) {
        return false; // no row needs a twin
    }
    if (core.settings.params.evaluation != LLAMA_PCD_EVALUATION_AUTO) {
        return core.settings.params.evaluation == LLAMA_PCD_EVALUATION_FUSED;
    }
    return batch.tokens.size() > 2*rows.size() ||
        any([](const auto & cur) { return cur.gamma > 1 && cur.relative_top == 0.0f && cur.min_entropy == 0.0f; });
}

//
// parts
//

llama_pcd_decoder::part llama_pcd_decoder::next_part(const llama_batch_ext & batch, size_t i0, bool together) const {
    const auto & memory  = core.memory;
    const auto & cparams = core.pcd.lctx.get_cparams();
    const size_t n_room  = memory.n_room(2*batch.tokens.size());

    // find_slot gives away cells that are masked for the first new position of their sequence. No twin in the same micro-batch sees
    // them, but one that is placed in a later micro-batch than its token may.
    const size_t n_pass = memory.slides() ? cparams.n_ubatch : cparams.n_batch;

    // twins are dealt out evenly: parts of one size share a graph
    const size_t n_parts = (rows.size() + core.ids.n_max - 1)/core.ids.n_max;

    // of the part, up to some token
    size_t n_tokens = 0;
    size_t n_twins  = 0; // that it has, or may need
    size_t n_rows   = 0; // of the caller

    const auto fits = [&]() {
        if (n_twins == 0) {
            return true;
        }
        if (!together) {
            return n_tokens <= n_pass && n_tokens + 1 <= n_room;
        }
        return n_tokens + n_twins <= std::min(n_pass, n_room) && n_rows + n_twins <= cparams.n_outputs_max &&
            n_twins <= (rows.size() + n_parts - 1)/n_parts;
    };

    std::bitset<LLAMA_MAX_SEQ> seen; // sequences

    part res = { i0, i0, rows.first_from(i0), rows.first_from(i0) };

    for (; res.i1 < batch.tokens.size() && res.fits; ++res.i1) {
        const auto & token = batch.tokens[res.i1];

        std::bitset<LLAMA_MAX_SEQ> own;
        for (const llama_seq_id s : token.seq_ids) {
            own.set(s);
        }

        const bool has_row  = res.r1 < rows.size() && rows.all[res.r1].id == (int32_t) res.i1;
        const bool has_twin = has_row && (together || rows.all[res.r1].setting.gamma > 1);

        n_tokens += 1;
        n_rows   += token.output || cparams.embeddings;
        n_twins  += has_twin;

        // states are kept for so many sequences, and a twin's is that before the part
        const bool has_state = !memory.recr || n_twins == 0 ||
            (!(has_twin && (seen & own).any()) && (seen | own).count() <= core.ids.n_max);

        if (!has_state || !fits()) {
            if (res.i1 > i0) {
                break;
            }
            res.fits = false;
        }
        seen |= own;
        res.r1 += has_row;
    }
    return res;
}

outcome llama_pcd_decoder::evaluate(const llama_batch_ext & batch) {
    const size_t n        = batch.tokens.size();
    const bool   together = fuses(batch);

    llama_pcd::outputs all;

    outcome res = outcome::DONE;

    for (size_t done = 0; done < n && res == outcome::DONE; ) {
        const auto cur   = next_part(batch, done, together);
        const bool whole = cur.i1 - cur.i0 == n;

        res = evaluate_part(batch, cur, together);

        if (res == outcome::NO_ROOM || res == outcome::INVALID) { // as if nothing had been decoded
            take_back(batch, done);
            return core.memory.recr && done > 0 ? outcome::BROKEN : res;
        }
        if (res != outcome::DONE) {
            return res; // parts before this one stay, as llama.cpp's micro-batches do
        }
        if (!whole) {
            all.take(core.pcd.lctx, cur.i0, cur.i1);
        }
        if (cur.i1 == n && cur.i0 > 0 && !all.put(core.pcd.lctx)) {
            take_back(batch, n);
            return outcome::BROKEN;
        }
        done = cur.i1;
    }
    return res;
}

outcome llama_pcd_decoder::evaluate_part(const llama_batch_ext & batch, const part & cur, bool together) {
    auto & stats = core.stats;

    if (cur.r0 == cur.r1) {
        return run(llama_pcd_batch_part(batch, cur.i0, cur.i1));
    }

    auto reason = LLAMA_PCD_FALLBACK_NO_ROOM;

    if (cur.fits) {
        const auto    before = stats;
        const outcome res    = together ? fused(batch, cur) : alternate(batch, cur);

        if (res == outcome::DONE) {
            stats.n_fused     += together;
            stats.n_alternate += !together;
        }
        if (res != outcome::NO_ROOM) {
            return res;
        }
        stats.n_twins   = before.n_twins; // another way will evaluate them, and count
        stats.n_skipped = before.n_skipped;
        if (core.memory.slides()) {
            reason = LLAMA_PCD_FALLBACK_SLIDES;
        }
    } else if (core.memory.n_room(2) >= 2) {
        reason = LLAMA_PCD_FALLBACK_NARROW;
    }

    const outcome res = sequential(batch, cur);
    if (res == outcome::DONE) {
        stats.n_sequential++;
        note_fallback(reason);
    }
    return res;
}

outcome llama_pcd_decoder::fused(const llama_batch_ext & batch, const part & cur) {
    auto & lctx = core.pcd.lctx;

    llama_batch_ext both = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    std::vector<size_t> which(cur.r1 - cur.r0);
    std::iota(which.begin(), which.end(), cur.r0);

    auto twins = add_twins(both, batch, cur.i0, which);

    const outcome res = run(both, twins);
    if (res != outcome::DONE) {
        return res;
    }
    if (twins.misplaced) { // the memory split the batch in its own way
        take_back(both, twins.first);
        return core.memory.recr ? outcome::BROKEN : outcome::NO_ROOM;
    }

    llama_pcd::n_queued_tokens(lctx) -= twins.all.size(); // twins are not the caller's tokens
    llama_pcd::outputs::wait(lctx);

    for (size_t i = cur.r0; i < cur.r1; ++i) {
        rows.take_standard(i, rows.all[i].id - cur.i0);
    }
    rows.take_local(twins);
    llama_pcd::outputs::hide(lctx, twins.first, twins.all.size());

    return outcome::DONE;
}

outcome llama_pcd_decoder::alternate(const llama_batch_ext & batch, const part & cur) {
    const llama_batch_ext tokens = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const saved_states saved(core.states, tokens);

    outcome res = run(tokens);
    if (res != outcome::DONE) {
        return res;
    }

    // these tokens are counted after their twins, whose time counts with theirs
    auto & lctx     = core.pcd.lctx;
    auto & n_queued = llama_pcd::n_queued_tokens(lctx);
    auto & t_start  = llama_pcd::t_compute_start_us(lctx);

    const auto n_queued_before = n_queued;
    const auto t_start_before  = t_start;

    n_queued = 0;
    llama_pcd::outputs::wait(lctx);

    std::vector<size_t> todo;
    for (size_t i = cur.r0; i < cur.r1; ++i) {
        rows.take_standard(i, rows.all[i].id - cur.i0);
        if (rows.needs_twin(i)) {
            todo.push_back(i);
        } else {
            core.stats.n_skipped++;
        }
    }
    if (!todo.empty()) { // what is decoded next overwrites the rows
        llama_pcd::outputs all;
        all.take(lctx, 0, tokens.tokens.size());
        res = run_twins_of(batch, todo);
        if (!all.put(lctx)) {
            res = outcome::BROKEN;
        }
    }
    n_queued = n_queued_before;
    t_start  = t_start_before;
    lctx.synchronize();

    if (res != outcome::DONE) {
        take_back(tokens, tokens.tokens.size()); // a token without its twin is not evaluated
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
            const auto & token = batch.tokens[rows.all[row].id];
            if (memory.forgets(which.size(), llama_pcd_parent_of(token), token.pos[0])) {
                return outcome::NO_ROOM;
            }
        }
        res = run_alone(batch, which);
    }
    return res;
}

// for a memory that is full up to the tokens themselves, or that forgets
outcome llama_pcd_decoder::sequential(const llama_batch_ext & batch, const part & cur) {
    auto & lctx = core.pcd.lctx;

    const llama_batch_ext tokens = llama_pcd_batch_part(batch, cur.i0, cur.i1);

    const saved_states saved(core.states, tokens);

    llama_pcd::outputs all;

    outcome res  = outcome::DONE;
    size_t  done = 0;

    const auto decode_to = [&](size_t end) {
        if (res == outcome::DONE && end > done) {
            res = run(llama_pcd_batch_part(tokens, done, end));
            if (res == outcome::DONE) {
                all.take(lctx, done, end);
                done = end;
            }
        }
    };

    for (size_t row = cur.r0; row < cur.r1; ++row) {
        const size_t at = rows.all[row].id - cur.i0;

        decode_to(at);
        if (res == outcome::DONE) {
            res = run_alone(batch, { row });
        }
        decode_to(at + 1);
        if (res != outcome::DONE) {
            break;
        }
        rows.take_standard(row, 0);
    }
    decode_to(tokens.tokens.size());

    if (res == outcome::DONE && !all.put(lctx)) {
        res = outcome::BROKEN;
    }
    if (res != outcome::DONE) {
        take_back(tokens, done);
    }
    return res;
}
