// Reads a batch, and chooses a way to evaluate it.

#include "decode/decode.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

using outcome = llama_pcd_outcome;

llama_pcd_decoder::llama_pcd_decoder(llama_pcd_core & core) :
    rows(core.pcd.lctx, core.stats), core(core), parts(core, rows), pass(core, rows), streams(core, rows, pass) {}

outcome llama_pcd_decoder::decode(const llama_batch_ext & batch) {
    const request req = read(batch);

    if (req.by_us) {
        rows.forget();
        return outcome::INVALID;
    }

    if (req.by_llama || core.settings.suspended) {
        rows.forget();
    }
    if (req.by_llama) {
        return pass.run(batch);
    }
    if (req.in_streams && refuses_picture(batch)) {
        rows.forget();
        return outcome::INVALID;
    }
    if (refuses_context(batch)) {
        rows.forget();
        return outcome::INVALID;
    }
    if (rows.size() == 0 && !req.in_streams) {
        rows.count();
        const outcome res = pass.run(batch);
        if (res != outcome::DONE) {
            rows.forget();
        }
        return res;
    }

    core.pcd.prepare();

    outcome res = refresh_second_keys();
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
                    core.answers.put_entropy(s, rows.entropy(i));
                }
            }
        }
    } else {
        rows.forget();
        llama_pcd_outputs_forget(core.pcd.lctx);
    }
    return res;
}

llama_pcd_decoder::request llama_pcd_decoder::read(const llama_batch_ext & batch) {
    const auto & lctx     = core.pcd.lctx;
    const auto & settings = core.settings;
    const size_t n_tokens = batch.tokens.size();

    rows.forget();

    request res;
    std::map<llama_seq_id, int32_t> firsts; // rows of first tokens of answers

    res.by_llama = n_tokens == 0 || n_tokens > lctx.n_batch() || n_tokens > core.memory.n_free_cells();

    for (size_t i = 0; i < n_tokens; ++i) {
        const auto & token = batch.tokens[i];

        for (llama_seq_id s : token.seq_ids) {
            if (core.twins.is_twin(s)) {
                LLAMA_LOG_ERROR("%s: sequence id %d: ids from %d on belong to PCD's twins\n", __func__, s, core.twins.seq_first);
                res.by_us = true;
                return res;
            }
            res.by_llama |= s < 0 || s >= batch.n_seq_max;
        }
        res.by_llama |= token.seq_ids.empty();

        if (res.by_llama) {
            continue;
        }
        const auto parent   = llama_pcd_parent_of(token);
        const auto contrast = settings.contrast_of(parent);
        const auto pos      = token.pos[0];
        const bool asked    = token.output && contrast.on && !settings.suspended;

        for (llama_seq_id s : token.seq_ids) {
            core.answers.read(s, pos, asked);
        }
        if (asked) {
            const bool plain = contrast.is_early(pos) || core.answers.is_sure(parent, pos, contrast);
            const auto first = firsts.find(parent);
            if (plain) {
                rows.add_plain(i);
            } else if (core.answers.is_first(parent, pos)) {
                for (llama_seq_id s : token.seq_ids) {
                    firsts[s] = rows.size();
                }
                rows.add(i, contrast, rows.size());
            } else {
                rows.add(i, contrast, first == firsts.end() ? -1 : first->second);
            }
        }
    }

    res.in_streams = settings.separate() && !res.by_llama && streams.has_twins(batch);

    return res;
}

bool llama_pcd_decoder::refuses_picture(const llama_batch_ext & batch) const {
    const size_t n_tokens = batch.tokens.size();

    if (core.pcd.lctx.get_cparams().causal_attn || streams.end_of_part(batch, 0, SIZE_MAX) == n_tokens) {
        return false;
    }
    LLAMA_LOG_ERROR("%s: cache = separate has to evaluate the %zu embeddings of this picture and their twins at once; "
            "create the context with n_ubatch = %zu or more\n", __func__, n_tokens, 2*n_tokens);
    return true;
}

bool llama_pcd_decoder::refuses_context(const llama_batch_ext & batch) const {
    std::string reason = rows.size() > 0 ? core.limits.conflict() : "";

    if (reason.empty() && (rows.size() > 0 || core.settings.separate())) {
        const llama_seq_id id = core.twins.find_taken(core.memory); // by a copy, or a loaded state
        if (id >= 0) {
            reason = format("sequence %d has tokens, and the ids from %d on are for twins (llama_memory_seq_rm takes it out of memory)",
                    id, core.twins.seq_first);
        }
    }

    for (const auto * ids : { &rows.out_ids, &rows.plain_ids }) {
        for (size_t i = 0; i < ids->size() && reason.empty(); ++i) {
            reason = core.limits.conflict_of(llama_pcd_parent_of(batch.tokens[(*ids)[i]]));
        }
    }
    if (reason.empty()) {
        return false;
    }
    LLAMA_LOG_ERROR("%s: PCD is on, but %s; turn it off first\n", __func__, reason.c_str());
    return true;
}

outcome llama_pcd_decoder::refresh_second_keys() {
    if (!core.second.demand.keys || !core.second.any_stale()) {
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

    if (core.settings.separate()) {
        const bool after = core.settings.params.evaluation == LLAMA_PCD_EVALUATION_ALTERNATE && has_room_after(batch) &&
            streams.too_late(batch) == LLAMA_PCD_FALLBACK_NONE;
        return after ? way::ALTERNATE : way::STREAMS;
    }
    if (std::all_of(contrasts.begin(), contrasts.end(), [](const auto & cur) { return cur.gamma == 1; })) {
        return way::ALTERNATE; // none of its rows needs a twin
    }
    switch (core.settings.params.evaluation) {
        case LLAMA_PCD_EVALUATION_FUSED:     return way::FUSED;
        case LLAMA_PCD_EVALUATION_ALTERNATE: return way::ALTERNATE;
        default:                             return fuses(batch) ? way::FUSED : way::ALTERNATE;
    }
}

bool llama_pcd_decoder::has_room_after(const llama_batch_ext & batch) const {
    const size_t n = batch.tokens.size() + 1;
    return core.memory.n_room(n) >= n;
}

// In a prompt a twin is one token more. In a step it is left out, if twins come later, where its row turns out not to need it; a floor
// on the first token of an answer leaves rows plain before they are evaluated.
bool llama_pcd_decoder::fuses(const llama_batch_ext & batch) const {
    return batch.tokens.size() > 2*rows.size() || std::any_of(rows.contrasts.begin(), rows.contrasts.end(), [](const auto & cur) {
        return cur.gamma > 1 && cur.relative_top == 0.0f && cur.min_entropy == 0.0f;
    });
}

outcome llama_pcd_decoder::evaluate(const llama_batch_ext & batch) {
    const size_t n_tokens = batch.tokens.size();
    const way    how      = choose(batch);

    if (how == way::STREAMS) {
        if (core.settings.params.evaluation == LLAMA_PCD_EVALUATION_ALTERNATE) {
            const auto reason = streams.too_late(batch);
            pass.note_fallback(reason == LLAMA_PCD_FALLBACK_NONE ? LLAMA_PCD_FALLBACK_NO_ROOM : reason);
        }
        core.stats.n_streams++;
        return streams.decode(batch);
    }

    llama_pcd_outputs all;

    for (size_t done = 0; done < n_tokens; ) {
        const auto    cur   = parts.next(batch, done, how == way::FUSED);
        const bool    whole = cur.i1 - cur.i0 == n_tokens;
        const outcome res   = evaluate_part(batch, cur, how);

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
        if (cur.i1 == n_tokens && cur.i0 > 0 && !all.put(core.pcd.lctx)) {
            return outcome::BROKEN;
        }
        done = cur.i1;
    }
    return outcome::DONE;
}

outcome llama_pcd_decoder::evaluate_part(const llama_batch_ext & batch, const llama_pcd_part & cur, way how) {
    auto & stats = core.stats;

    if (cur.r0 == cur.r1 && !core.settings.separate()) {
        return pass.run(llama_pcd_batch_part(batch, cur.i0, cur.i1));
    }

    auto reason = LLAMA_PCD_FALLBACK_NO_ROOM;

    if (cur.fits) {
        const outcome res = evaluate_twins(batch, cur, how);

        if (res != outcome::NO_ROOM) {
            return res;
        }
        if (core.settings.separate()) { // the part is the whole batch
            pass.note_fallback(reason);
            stats.n_streams++;
            return streams.decode(batch);
        }
        if (core.memory.slides()) {
            reason = how == way::FUSED ? LLAMA_PCD_FALLBACK_DEALT : LLAMA_PCD_FALLBACK_SLIDES;
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
