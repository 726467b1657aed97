// Reads a batch, chooses a way to evaluate it, and goes the way.

#include "llama-pcd-decode.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

using outcome = llama_pcd_outcome;

llama_pcd_decoder::llama_pcd_decoder(llama_pcd_core & core) :
    rows(core.pcd.lctx, core.stats), core(core), pass(core, rows), streams(core, rows, pass) {}

outcome llama_pcd_decoder::decode(const llama_batch_ext & batch) {
    const request req = read(batch);

    if (req.by_us) {
        rows.forget();
        return outcome::INVALID;
    }

    if (!core.settings.rerotated()) {
        core.second.mark_stale(); // keys stored from here on have no second
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
    if (rows.size() == 0 && !req.in_streams) {
        return pass.run(batch);
    }
    if (rows.size() > 0 && refuses_context()) {
        rows.forget();
        return outcome::INVALID;
    }

    outcome res = refresh_second_keys();
    if (res == outcome::DONE) {
        core.stats.n_tokens += rows.size();
        rows.reserve();
        res = evaluate(batch, req);
    }
    if (res == outcome::DONE) {
        rows.show(core.settings.params.combine);
    } else {
        rows.forget();
    }
    return res;
}

llama_pcd_decoder::request llama_pcd_decoder::read(const llama_batch_ext & batch) {
    const auto & lctx     = core.pcd.lctx;
    const auto & settings = core.settings;
    const size_t n_tokens = batch.tokens.size();

    rows.forget();

    request res;
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

        if (token.output && !res.by_llama) {
            res.n_outputs++;
            const llama_pcd_seq contrast = settings.contrast_of(llama_pcd_parent_of(token));
            if (contrast.on) {
                rows.add(i, contrast);
            }
        }
    }

    // with a second stream every token has its twin, at once or, with alternate evaluation, when a row first needs it;
    // at once all the same where that may be too late: sliding-window layers forget, and embeddings are not kept
    res.in_streams = settings.separate() && !res.by_llama && (settings.params.evaluation == LLAMA_PCD_EVALUATION_FUSED ||
            core.memory.slides() || batch.tokens[0].id == LLAMA_TOKEN_NULL);

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

bool llama_pcd_decoder::refuses_context() const {
    const std::string reason = core.limits.conflict();
    if (reason.empty()) {
        return false;
    }
    LLAMA_LOG_ERROR("%s: PCD is on, but %s; turn it off first\n", __func__, reason.c_str());
    return true;
}

outcome llama_pcd_decoder::refresh_second_keys() {
    // a pending K-shift will move the first keys before this batch is computed
    if (core.memory.has_shift()) {
        core.second.mark_stale();
    }

    if (!core.second.stale || !core.settings.rerotated()) {
        return outcome::DONE;
    }
    const ggml_status status = core.second.derive();
    if (status != GGML_STATUS_SUCCESS) {
        LLAMA_LOG_ERROR("%s: failed to derive the second keys\n", __func__);
        return status == GGML_STATUS_ABORTED ? outcome::ABORTED : outcome::FAILED;
    }
    core.stats.n_derived++;
    return outcome::DONE;
}

//
// the ways
//

llama_pcd_decoder::way llama_pcd_decoder::choose(const llama_batch_ext & batch, const request & req) const {
    const auto & lctx     = core.pcd.lctx;
    const auto & cparams  = lctx.get_cparams();
    const auto & memory   = core.memory;
    const size_t n_tokens = batch.tokens.size();
    const size_t n_out    = rows.size();
    const size_t n_fit    = memory.n_room(n_tokens + n_out);

    if (core.settings.separate()) {
        return req.in_streams || n_tokens + 1 > n_fit ? way::STREAMS : way::ALTERNATE;
    }
    if (std::all_of(rows.contrasts.begin(), rows.contrasts.end(), [](const auto & cur) { return cur.gamma == 1; })) {
        return way::ALTERNATE; // none of its rows needs a twin
    }
    if (memory.recr && n_tokens > 1) {
        return way::SEQUENTIAL; // a twin goes on from the state before its token, and there is one state
    }
    if (memory.forgets(n_tokens + n_out) && (n_out > 1 || rows.out_ids[0] + 1 != (int32_t) n_tokens)) {
        return way::SEQUENTIAL; // what an early twin must see may be gone once the batch's last token is in
    }

    // rows that a fused batch computes: the twins' beside the caller's
    const size_t n_rows = (cparams.embeddings ? n_tokens : req.n_outputs) + n_out;

    if (core.settings.params.evaluation == LLAMA_PCD_EVALUATION_FUSED && n_out <= LLAMA_PCD_MAX_TWINS &&
            n_rows <= cparams.n_outputs_max && n_tokens + n_out <= std::min<size_t>(lctx.n_batch(), n_fit)) {
        return way::FUSED;
    }
    return n_tokens + 1 <= n_fit ? way::ALTERNATE : way::SEQUENTIAL;
}

outcome llama_pcd_decoder::evaluate(const llama_batch_ext & batch, const request & req) {
    const way first = choose(batch, req);

    pass.branch(llama_pcd_parent_of(batch.tokens[0]));

    outcome res = outcome::NO_ROOM;
    switch (first) {
        case way::FUSED:      res = fused(batch);          break;
        case way::ALTERNATE:  res = alternate(batch);      break;
        case way::STREAMS:    res = streams.decode(batch); break;
        case way::SEQUENTIAL: res = sequential(batch);     break;
    }
    if (res == outcome::NO_ROOM && (first == way::FUSED || (first == way::ALTERNATE && !core.settings.separate()))) {
        res = sequential(batch);
    }

    if (core.memory.recr) {
        core.memory.remove(core.twins.seq_first); // of a twin that was not needed
    }
    return res;
}

outcome llama_pcd_decoder::fused(const llama_batch_ext & batch) {
    auto & lctx = core.pcd.lctx;

    const size_t n_std = batch.tokens.size();
    const size_t n_out = rows.size();

    llama_batch_ext both = llama_pcd_batch_like(batch);
    both.tokens = batch.tokens;
    both.embd   = batch.embd;
    both.n_embd = batch.n_embd;
    pass.add_twins(both, batch, 0, n_out);

    const outcome res = pass.run(both, true);
    if (res != outcome::DONE) {
        return res;
    }
    if (core.twins.misplaced) { // the memory split the batch in its own way
        pass.take_back(batch, n_std);
        return core.memory.recr ? outcome::BROKEN : outcome::NO_ROOM;
    }

    llama_pcd::n_queued_tokens(lctx) -= n_out; // twins are not the caller's tokens
    llama_pcd_outputs_wait(lctx);

    for (size_t i = 0; i < n_out; ++i) {
        rows.take_standard    (i, rows.out_ids[i]);
        rows.take_over_rotated(i, n_std + i);
    }
    llama_pcd_outputs_hide(lctx, n_std, n_out);

    return outcome::DONE;
}

outcome llama_pcd_decoder::alternate(const llama_batch_ext & batch) {
    outcome res = pass.run(batch);
    if (res != outcome::DONE) {
        return res;
    }

    llama_pcd_outputs_backup backup(core.pcd.lctx);

    std::vector<size_t> todo;
    for (size_t i = 0; i < rows.size(); ++i) {
        rows.take_standard(i, rows.out_ids[i]);
        if (rows.needs_twin(i)) {
            todo.push_back(i);
        } else {
            core.stats.n_skipped++;
        }
    }
    if (!todo.empty()) {
        backup.copy_rows();
    }

    res = core.settings.separate() ? streams.catch_up_rows(batch, todo) : run_twins_of(batch, todo);

    backup.restore();

    return res == outcome::NO_ROOM ? outcome::BROKEN : res; // the batch is in memory: no other way can be tried
}

// neighbours go together
outcome llama_pcd_decoder::run_twins_of(const llama_batch_ext & batch, const std::vector<size_t> & todo) {
    const auto & lctx  = core.pcd.lctx;
    const size_t n_max = std::min<size_t>({
        core.memory.recr ? size_t(1) : LLAMA_PCD_MAX_TWINS, lctx.n_batch(), core.memory.n_room(LLAMA_PCD_MAX_TWINS),
        lctx.get_cparams().n_outputs_max });

    outcome res = outcome::DONE;
    for (size_t k = 0; k < todo.size() && res == outcome::DONE; ) {
        size_t n = 1;
        while (n < n_max && k + n < todo.size() && todo[k + n] == todo[k] + n) {
            n++;
        }
        res = pass.run_twins(batch, todo[k], n);
        k += n;
    }
    return res;
}

// for a memory that is full up to the tokens themselves, or that forgets
outcome llama_pcd_decoder::sequential(const llama_batch_ext & batch) {
    auto & lctx = core.pcd.lctx;

    const size_t n_tokens = batch.tokens.size();

    llama_pcd_outputs all;

    outcome res  = outcome::DONE;
    size_t  done = 0;

    const auto decode_to = [&](size_t end) {
        if (res == outcome::DONE && end > done) {
            res = pass.run(llama_pcd_batch_part(batch, done, end));
            if (res == outcome::DONE) {
                all.take(lctx, done, end);
                done = end;
            }
        }
    };

    for (size_t i = 0; i < rows.size() && res == outcome::DONE; ++i) {
        const size_t at = rows.out_ids[i];

        decode_to(at);
        if (res == outcome::DONE) {
            pass.branch(llama_pcd_parent_of(batch.tokens[at]));
            res = pass.run_twins(batch, i, 1);
        }
        decode_to(at + 1);
        if (res == outcome::DONE) {
            rows.take_standard(i, 0);
        }
    }
    decode_to(n_tokens);

    if (res != outcome::DONE) {
        pass.take_back(batch, done);
        return res;
    }

    return all.put(lctx) ? outcome::DONE : outcome::BROKEN;
}
