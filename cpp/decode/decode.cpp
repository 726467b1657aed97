// Reads a batch, chooses a way to evaluate it, and evaluates it part by part.

#include "decode/decode.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <map>

using outcome = llama_pcd_outcome;

llama_pcd_decoder::llama_pcd_decoder(llama_pcd_core & core) :
    rows(core.pcd.lctx, core.stats), core(core), parts(core, rows), pass(core, rows) {}

outcome llama_pcd_decoder::decode(const llama_batch_ext & batch) {
    llama_pcd_request req = { batch, {} };

    rows.forget();

    const verdict found = read(req);
    if (found != verdict::FINE) {
        rows.forget();
        return found == verdict::REFUSED ? outcome::INVALID : pass.run(batch);
    }
    const std::string reason = refusal(req);
    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason.c_str());
        rows.forget();
        return outcome::INVALID;
    }

    outcome res = outcome::DONE;

    if (!req.has_twins()) {
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
        res = evaluate(req);
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

llama_pcd_decoder::verdict llama_pcd_decoder::read(llama_pcd_request & req) {
    const auto & lctx     = core.pcd.lctx;
    const bool   separate = core.settings.separate();

    if (req.size() == 0 || req.size() > lctx.n_batch() || req.size() > core.memory.n_free_cells()) {
        return verdict::UPSTREAM;
    }
    req.has_twin.resize(req.size());

    std::map<llama_seq_id, int32_t> firsts; // rows of first tokens of answers

    for (size_t i = 0; i < req.size(); ++i) {
        const auto & token = req.batch.tokens[i];

        for (llama_seq_id s : token.seq_ids) {
            if (core.ids.is_twin(s)) {
                LLAMA_LOG_ERROR("%s: sequence id %d: ids from %d on belong to PCD's twins\n", __func__, s, core.ids.first);
                return verdict::REFUSED;
            }
            if (s < 0 || s >= req.batch.n_seq_max) {
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

        req.has_twin[i] = separate ? setting.on : asked && !plain;
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

std::string llama_pcd_decoder::refusal(const llama_pcd_request & req) const {
    const auto & tokens = req.batch.tokens;

    if (core.settings.separate() && req.has_twins() && !core.pcd.lctx.get_cparams().causal_attn) {
        const auto whole = parts.next(req, 0, true);
        if (!whole.fits || whole.i1 < req.size()) {
            return format("cache = separate has to evaluate the %zu embeddings of this picture and their twins at once; "
                    "create the context with n_ubatch = %zu or more", req.size(), 2*req.size());
        }
    }

    std::string reason = rows.size() > 0 ? core.limits.conflict() : "";

    if (reason.empty() && (rows.size() > 0 || core.settings.separate())) {
        reason = core.ids.find_taken(core.memory); // by a copy, or a loaded state
    }
    for (const auto * ids : { &rows.out_ids, &rows.plain_ids }) {
        for (size_t i = 0; i < ids->size() && reason.empty(); ++i) {
            reason = core.limits.conflict_of(llama_pcd_parent_of(tokens[(*ids)[i]]));
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

llama_pcd_decoder::way llama_pcd_decoder::choose(const llama_pcd_request & req) {
    const auto & contrasts = rows.contrasts;

    if (core.settings.separate()) {
        return way::FUSED; // twins are for the twins behind them, too
    }
    if (std::all_of(contrasts.begin(), contrasts.end(), [](const auto & cur) { return cur.gamma == 1; })) {
        return way::ALTERNATE; // none of its rows needs a twin
    }
    switch (core.settings.params.evaluation) {
        case LLAMA_PCD_EVALUATION_FUSED:     return way::FUSED;
        case LLAMA_PCD_EVALUATION_ALTERNATE: return way::ALTERNATE;
        default:                             return fuses(req.batch) ? way::FUSED : way::ALTERNATE;
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

outcome llama_pcd_decoder::evaluate(const llama_pcd_request & req) {
    const bool separate = core.settings.separate();

    llama_pcd_outputs all;

    const way how = choose(req);

    size_t  n_max = SIZE_MAX; // tokens of a part
    outcome res   = outcome::DONE;

    if (separate) {
        core.stats.n_separate++;
        res = catch_up(req);
    }
    for (size_t done = 0; done < req.size() && res == outcome::DONE; ) {
        const auto cur   = parts.next(req, done, how == way::FUSED, n_max);
        const bool whole = cur.i1 - cur.i0 == req.size();

        res = evaluate_part(req, cur, how);

        if (res == outcome::NO_ROOM && separate && cur.fits && core.pcd.lctx.get_cparams().causal_attn) {
            n_max = (cur.i1 - cur.i0)/2; // no room beside the twins in a sliding-window cache: fewer, in the end in turn
            res   = outcome::DONE;
            continue;
        }
        if (res == outcome::NO_ROOM || res == outcome::INVALID) { // as if nothing had been decoded
            pass.take_back(req.batch, done);
            return core.memory.recr && done > 0 ? outcome::BROKEN : res;
        }
        if (res != outcome::DONE) {
            return res; // parts before this one stay, as llama.cpp's micro-batches do
        }
        if (!whole) {
            all.take(core.pcd.lctx, cur.i0, cur.i1);
        }
        if (cur.i1 == req.size() && cur.i0 > 0 && !all.put(core.pcd.lctx)) {
            return outcome::BROKEN;
        }
        done = cur.i1;
    }
    return res;
}

outcome llama_pcd_decoder::evaluate_part(const llama_pcd_request & req, const llama_pcd_part & cur, way how) {
    auto & stats = core.stats;

    const bool separate = core.settings.separate();

    if (cur.pairs.empty()) {
        return pass.run(llama_pcd_batch_part(req.batch, cur.i0, cur.i1));
    }

    auto reason = LLAMA_PCD_FALLBACK_NO_ROOM;

    if (cur.fits) {
        const auto    before = stats;
        const outcome res    = how == way::FUSED ? fused(req, cur) : alternate(req, cur);

        if (res == outcome::DONE) {
            stats.n_fused     += how == way::FUSED && !separate;
            stats.n_alternate += how == way::ALTERNATE;
        }
        if (res == outcome::NO_ROOM) { // another way will evaluate them, and count
            stats.n_twins   = before.n_twins;
            stats.n_skipped = before.n_skipped;
        }
        if (res != outcome::NO_ROOM || separate) {
            return res;
        }
        if (core.memory.slides()) {
            reason = LLAMA_PCD_FALLBACK_SLIDES;
        }
    } else if (core.memory.n_room(2) >= 2) {
        reason = LLAMA_PCD_FALLBACK_NARROW;
    }

    const outcome res = sequential(req, cur);
    if (res == outcome::DONE) {
        stats.n_sequential += !separate;
        pass.note_fallback(reason);
    }
    return res;
}

outcome llama_pcd_decoder::fused(const llama_pcd_request & req, const llama_pcd_part & cur) {
    auto & lctx = core.pcd.lctx;

    llama_batch_ext both = llama_pcd_batch_part(req.batch, cur.i0, cur.i1);

    auto twins = pass.add_twins(both, req.batch, cur.i0, cur.pairs);

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

outcome llama_pcd_decoder::alternate(const llama_pcd_request & req, const llama_pcd_part & cur) {
    const llama_batch_ext tokens = llama_pcd_batch_part(req.batch, cur.i0, cur.i1);

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
        res = run_twins_of(req.batch, todo);
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
        std::vector<llama_pcd_pair> pairs;
        do {
            pairs.push_back({ (size_t) rows.out_ids[todo[k]], todo[k] });
            k++;
        } while (k < todo.size() && pairs.size() < n_max && todo[k] == todo[k - 1] + 1);

        for (const auto & cur : pairs) {
            const auto & token = batch.tokens[cur.token];
            if (memory.forgets(pairs.size(), llama_pcd_parent_of(token), token.pos[0])) {
                return outcome::NO_ROOM;
            }
        }
        llama_pcd_twins twins;
        res = pass.run_alone(batch, pairs, twins);
    }
    return res;
}

// for a memory that is full up to the tokens themselves, or that forgets
outcome llama_pcd_decoder::sequential(const llama_pcd_request & req, const llama_pcd_part & cur) {
    auto & lctx = core.pcd.lctx;

    const llama_batch_ext tokens = llama_pcd_batch_part(req.batch, cur.i0, cur.i1);

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

    for (const auto & pair : cur.pairs) {
        const size_t at = pair.token - cur.i0;

        llama_pcd_twins twins;

        decode_to(at);
        if (res == outcome::DONE) {
            res = pass.run_alone(req.batch, { pair }, twins);
        }
        decode_to(at + 1);
        if (res != outcome::DONE) {
            break;
        }
        if (pair.row != llama_pcd_twin::NO_ROW) {
            rows.take_standard(pair.row, 0);
        }
        for (size_t k = 0; k < core.second.kvs.size() && core.settings.separate(); ++k) {
            core.second.settle(k, twins.all[0].cells[k], twins.all[0].parent, tokens.tokens[at].pos[0]);
        }
    }
    decode_to(tokens.tokens.size());

    if (res != outcome::DONE) {
        pass.take_back(tokens, done);
        return res;
    }

    return all.put(lctx) ? outcome::DONE : outcome::BROKEN;
}

//
// cache = separate: twins of tokens that are in memory already
//

bool llama_pcd_decoder::find_missing(llama_seq_id parent, llama_pos end, tokens_at & res) const {
    for (auto & cur : core.second.kvs) {
        const auto & cells = llama_pcd::cells(*cur.kv);

        for (const uint32_t j : cur.stale.list(cells)) {
            if (!cells.seq_has(j, parent) || cells.pos_get(j) >= end ||
                    llama_pcd::is_masked(*cur.kv, cells.pos_get(j), end - 1)) {
                continue;
            }
            const llama_token token = cells.ext_get(j).tok;
            if (token == LLAMA_TOKEN_NULL) {
                LLAMA_LOG_ERROR("%s: cache = separate has to evaluate position %d of sequence %d again, but does not know its token "
                        "(a state was loaded, or it is a part of an image); evaluate the prompt again\n",
                        __func__, cells.pos_get(j), parent);
                return false;
            }
            res[cells.pos_get(j)] = token;
        }
    }

    const auto & memory = core.memory;
    if (!res.empty() && (!memory.has_all_before(parent, res.begin()->first, end) ||
            memory.forgets(std::min<size_t>(res.size(), memory.n_room(core.pcd.lctx.n_ubatch())), parent, res.begin()->first))) {
        LLAMA_LOG_ERROR("%s: cache = separate has to evaluate position %d of sequence %d again, but sliding-window layers may have "
                "forgotten what is before it; evaluate the prompt again (in a context with swa_full = true, if it is to happen later)\n",
                __func__, res.begin()->first, parent);
        return false;
    }
    return true;
}

outcome llama_pcd_decoder::catch_up(const llama_pcd_request & req) {
    std::map<llama_seq_id, llama_pos> begin; // of each sequence in this batch
    for (size_t i = 0; i < req.size(); ++i) {
        if (req.has_twin[i]) {
            begin.emplace(llama_pcd_parent_of(req.batch.tokens[i]), req.batch.tokens[i].pos[0]);
        }
    }
    outcome res = outcome::DONE;
    for (auto it = begin.begin(); it != begin.end() && res == outcome::DONE; ++it) {
        res = catch_up(req.batch, it->first, it->second);
    }
    return res;
}

outcome llama_pcd_decoder::catch_up(const llama_batch_ext & batch, llama_seq_id parent, llama_pos end) {
    const auto & cparams = core.pcd.lctx.get_cparams();

    tokens_at missing;
    if (!find_missing(parent, end, missing)) {
        return outcome::INVALID;
    }

    for (auto it = missing.begin(); it != missing.end(); ) {
        const size_t n_max = std::min(core.memory.n_room(cparams.n_ubatch), cparams.embeddings ? cparams.n_outputs_max : UINT32_MAX);
        if (n_max == 0) {
            return outcome::NO_ROOM;
        }

        llama_batch_ext alone = llama_pcd_batch_like(batch);
        llama_pcd_twins twins;

        // a run of neighbours: upstream refuses gaps
        for (llama_pos p = it->first; it != missing.end() && it->first == p && alone.tokens.size() < n_max; ++it, ++p) {
            llama_batch_ext::token token;
            token.id  = it->second;
            token.pos = { p, p, p, 0 };

            pass.add_twin(alone, twins, batch, token, parent, -1, llama_pcd_twin::NO_ROW);
        }

        const outcome res = pass.run_alone(alone, twins);
        if (res != outcome::DONE) {
            return res;
        }
        core.stats.n_caught_up += twins.all.size();
    }

    return outcome::DONE;
}
