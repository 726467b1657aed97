// How a batch becomes contrasted rows: add the twins, decode, combine, drop the twins, show the caller only
// the rows that were asked for.

#include "llama-pcd-impl.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

// Added to the logits outside the plausible tokens. Finite, so that a grammar or a logit processor that forbids all
// plausible tokens still finds the model's own order among the rest; e^-10000 is 0 at any sane temperature.
static constexpr float OUTSIDE = -1e4f;

bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret) {
    llama_pcd * pcd = lctx.get_cparams().pcd.get();
    if (!pcd || pcd->nested) {
        return false;
    }
    if (pcd->graphs_on != pcd->on) { // a graph built without PCD does not know that it cannot serve one with it
        pcd->graphs_on = pcd->on;
        pcd->reset_graphs();
    }
    if (!pcd->on) {
        pcd->stale = true; // keys stored from here on have no second
        pcd->forget_rows();
        return false;
    }
    ret = pcd->decode(batch);
    return true;
}

int llama_pcd::decode(const llama_batch_ext & batch) {
    rows.out_ids.clear();

    const size_t n_tokens = batch.tokens.size();
    const size_t n_free   = n_free_cells();

    // what upstream refuses is refused here too: in its own words, and before anything has changed
    bool refused = n_tokens == 0 || n_tokens > lctx.n_batch() || n_tokens > n_free;

    for (size_t i = 0; i < n_tokens; ++i) {
        for (llama_seq_id s : batch.tokens[i].seq_ids) {
            if (llama_pcd_is_twin(s)) {
                LLAMA_LOG_ERROR("%s: sequence id %d: ids from %d on belong to PCD's twins\n", __func__, s, LLAMA_PCD_SEQ_FIRST);
                return -1;
            }
            refused |= s < 0 || s >= batch.n_seq_max;
        }
        if (batch.tokens[i].output) {
            rows.out_ids.push_back(i);
        }
    }

    const size_t n_out = rows.out_ids.size();

    stale |= !has_second_keys(); // keys stored from here on have no second

    if (n_out == 0 || suspended || refused) {
        rows.out_ids.clear();
        return decode_nested(batch);
    }

    const std::string reason = conflict();
    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: PCD is on, but %s; turn it off first\n", __func__, reason.c_str());
        rows.out_ids.clear();
        return -1;
    }

    // a pending K-shift will move the first keys before this batch is computed
    for_each_kv([&](llama_kv_cache * kv) { stale |= kv->get_has_shift(); });

    if (stale && has_second_keys()) {
        const ggml_status status = derive_second_keys();
        if (status != GGML_STATUS_SUCCESS) {
            LLAMA_LOG_ERROR("%s: failed to derive the second keys\n", __func__);
            rows.out_ids.clear();
            return status == GGML_STATUS_ABORTED ? 2 : -3;
        }
    }

    stats.n_tokens += n_out;

    rows.resize(n_out, lctx.model.vocab.n_tokens());
    rows.params = params;

    // rows that a fused batch computes: the twins' beside the caller's
    const size_t n_rows = (lctx.cparams.embeddings ? n_tokens : n_out) + n_out;

    int ret = 1;

    if (params.gamma == 1) {
        ret = decode_alternate(batch); // never needs a twin
    } else if (forgets() && (n_out > 1 || rows.out_ids[0] + 1 != (int32_t) n_tokens)) {
        ret = 1; // what an early twin must see may be gone once the batch's last token is in
    } else if (params.evaluation == LLAMA_PCD_EVALUATION_FUSED && n_out <= LLAMA_PCD_MAX_TWINS &&
            n_rows <= lctx.cparams.n_outputs_max && n_tokens + n_out <= std::min<size_t>(lctx.n_batch(), n_free)) {
        ret = decode_fused(batch);
    } else if (n_tokens + 1 <= n_free) {
        ret = decode_alternate(batch);
    }

    // each twin before its token, in the token's cell
    if (ret == 1) {
        ret = decode_sequential(batch);
    }
    if (ret != 0) {
        rows.out_ids.clear();
        return ret;
    }

    const size_t n_vocab = lctx.model.vocab.n_tokens();
    for (size_t i = 0; i < n_out; ++i) {
        write_row(i, lctx.logits.data + lctx.output_ids[rows.out_ids[i]]*n_vocab);
    }

    return 0;
}

int llama_pcd::decode_nested(const llama_batch_ext & batch) {
    nested    = true;
    misplaced = false;

    int ret;
    try {
        ret = lctx.decode(batch);
    } catch (...) {
        nested = false;
        drop_twins();
        throw;
    }
    nested = false;

    drop_twins();

    return ret;
}

// one batch with all tokens and, behind them, their twins
int llama_pcd::decode_fused(const llama_batch_ext & batch) {
    const size_t n_std   = batch.tokens.size();
    const size_t n_out   = rows.out_ids.size();
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    llama_batch_ext both = batch_like(batch);
    both.tokens = batch.tokens;
    both.embd   = batch.embd;
    both.n_embd = batch.n_embd;
    add_twins(both, batch, 0, n_out);

    const int ret = decode_nested(both);
    if (ret != 0) {
        return ret;
    }

    if (misplaced) {
        // the memory split the batch in its own way; take the tokens back and go one by one
        for (const auto & token : batch.tokens) {
            for (llama_seq_id s : token.seq_ids) {
                lctx.memory->seq_rm(s, token.pos[0], -1);
            }
        }
        return 1;
    }

    lctx.n_queued_tokens -= n_out; // twins are not the caller's tokens
    lctx.synchronize();
    lctx.output_reorder();

    for (size_t i = 0; i < n_out; ++i) {
        const float * l1 = lctx.logits.data + lctx.output_ids[rows.out_ids[i]]*n_vocab;
        const float * l2 = lctx.logits.data + lctx.output_ids[n_std + i]*n_vocab;

        std::copy(l1, l1 + n_vocab, rows.standard.begin()     + i*n_vocab);
        std::copy(l2, l2 + n_vocab, rows.over_rotated.begin() + i*n_vocab);
        rows.has_over_rotated[i] = true;
    }
    stats.n_twins += n_out;

    // the twins' rows are the last ones: forget them
    lctx.n_outputs -= n_out;
    for (size_t i = 0; i < n_out; ++i) {
        lctx.output_ids[n_std + i] = -1;
    }

    return 0;
}

// the batch first, then the twins that can still change an outcome
int llama_pcd::decode_alternate(const llama_batch_ext & batch) {
    const size_t n_out   = rows.out_ids.size();
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    const int ret = decode_nested(batch);
    if (ret != 0) {
        return ret;
    }

    const auto n_queued = lctx.n_queued_tokens;
    const auto t_start  = lctx.t_compute_start_us;

    lctx.n_queued_tokens = 0; // counted below, together with the twins' time
    lctx.synchronize();
    lctx.output_reorder();

    // the second pass overwrites the outputs of the first
    const auto n_outputs  = lctx.n_outputs;
    const auto output_ids = lctx.output_ids;

    std::vector<size_t> todo;
    for (size_t i = 0; i < n_out; ++i) {
        const float * l1 = lctx.logits.data + output_ids[rows.out_ids[i]]*n_vocab;

        std::copy(l1, l1 + n_vocab, rows.standard.begin() + i*n_vocab);
        if (needs_twin(l1)) {
            todo.push_back(i);
        } else {
            stats.n_skipped++;
        }
    }

    const size_t n_logits = todo.empty() ? 0 : n_outputs*n_vocab;
    const size_t n_embd   = todo.empty() || !lctx.embd.data ? 0 : n_outputs*lctx.model.hparams.n_embd_out();

    const std::vector<float> logits(lctx.logits.data, lctx.logits.data + n_logits);
    const std::vector<float> embd  (lctx.embd.data,   lctx.embd.data   + n_embd);

    const size_t n_max = std::min<size_t>({ LLAMA_PCD_MAX_TWINS, lctx.n_batch(), n_free_cells(), lctx.cparams.n_outputs_max });

    int status = 0;
    for (size_t k = 0; k < todo.size() && status == 0; ) {
        // neighbours go together
        size_t n = 1;
        while (n < n_max && k + n < todo.size() && todo[k + n] == todo[k] + n) {
            n++;
        }
        status = decode_twins(batch, todo[k], n);
        k += n;
    }

    if (!todo.empty()) {
        lctx.output_reserve(n_outputs); // fewer rows lie in another layout
        std::copy(logits.begin(), logits.end(), lctx.logits.data);
        std::copy(embd.begin(),   embd.end(),   lctx.embd.data);
    }

    lctx.n_outputs          = n_outputs;
    lctx.output_ids         = output_ids;
    lctx.n_queued_tokens    = n_queued;
    lctx.t_compute_start_us = t_start;

    lctx.synchronize();

    return status == 1 ? -2 : status;
}

// For a cache that is full up to the tokens themselves, or that forgets: each twin is evaluated before its token, in
// the cell that the token takes after it.
int llama_pcd::decode_sequential(const llama_batch_ext & batch) {
    const size_t n_out   = rows.out_ids.size();
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    // the outputs of all parts, in the order of their tokens
    std::vector<size_t> ids;
    std::vector<float>  logits;
    std::vector<float>  embd;

    int    ret  = 0;
    size_t done = 0;

    const auto decode_to = [&](size_t end) {
        llama_batch_ext part = batch_like(batch);
        part.tokens.assign(batch.tokens.begin() + done, batch.tokens.begin() + end);
        part.n_embd = batch.n_embd;
        if (!batch.embd.empty()) {
            part.embd.assign(batch.embd.begin() + done*batch.n_embd, batch.embd.begin() + end*batch.n_embd);
        }

        ret = decode_nested(part);
        if (ret != 0) {
            return;
        }
        lctx.synchronize();
        lctx.output_reorder();

        const size_t n_embd = lctx.embd.data ? lctx.model.hparams.n_embd_out() : 0;

        for (size_t i = done; i < end; ++i) {
            const int32_t j = lctx.output_ids[i - done];
            if (j >= 0) {
                ids.push_back(i);
                logits.insert(logits.end(), lctx.logits.data + j*n_vocab, lctx.logits.data + (j + 1)*n_vocab);
                embd  .insert(embd.end(),   lctx.embd.data   + j*n_embd,  lctx.embd.data   + (j + 1)*n_embd);
            }
        }
        done = end;
    };

    for (size_t i = 0; i < n_out && ret == 0; ++i) {
        const size_t at = rows.out_ids[i];

        if (at > done) {
            decode_to(at);
        }
        if (ret == 0) {
            ret = decode_twins(batch, i, 1);
        }
        if (ret == 0) {
            decode_to(at + 1);
        }
        if (ret == 0) {
            std::copy(logits.end() - n_vocab, logits.end(), rows.standard.begin() + i*n_vocab);
        }
    }
    if (ret == 0 && done < batch.tokens.size()) {
        decode_to(batch.tokens.size());
    }

    if (ret != 0) {
        // as if nothing had been decoded
        for (size_t i = 0; i < done; ++i) {
            for (llama_seq_id s : batch.tokens[i].seq_ids) {
                lctx.memory->seq_rm(s, batch.tokens[i].pos[0], -1);
            }
        }
        return ret;
    }

    if (lctx.output_reserve(ids.size()) < ids.size()) {
        return -2;
    }
    std::copy(logits.begin(), logits.end(), lctx.logits.data);
    std::copy(embd.begin(),   embd.end(),   lctx.embd.data);

    lctx.output_swaps.clear();
    lctx.n_outputs = ids.size();
    for (size_t i = 0; i < ids.size(); ++i) {
        lctx.output_ids[ids[i]] = i;
    }

    return 0;
}

// evaluate the twins of outputs [i0, i0 + n) alone and keep their rows
int llama_pcd::decode_twins(const llama_batch_ext & batch, size_t i0, size_t n) {
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    llama_batch_ext twins = batch_like(batch);
    add_twins(twins, batch, i0, n);

    const int ret = decode_nested(twins);
    if (ret != 0) {
        return ret;
    }

    lctx.n_queued_tokens = 0;
    lctx.synchronize();
    lctx.output_reorder();

    for (size_t i = 0; i < n; ++i) {
        const float * l2 = lctx.logits.data + lctx.output_ids[i]*n_vocab;

        std::copy(l2, l2 + n_vocab, rows.over_rotated.begin() + (i0 + i)*n_vocab);
        rows.has_over_rotated[i0 + i] = true;
    }
    stats.n_twins += n;

    return 0;
}

llama_batch_ext llama_pcd::batch_like(const llama_batch_ext & batch) const {
    return llama_batch_ext(batch.n_tokens_max + LLAMA_PCD_MAX_TWINS, batch.n_embd_inp, batch.n_embd_inp_enc,
            LLAMA_MAX_SEQ, batch.mem, batch.n_vocab, batch.n_pos_per_embd);
}

void llama_pcd::add_twins(llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n) {
    parents.clear();
    dst.n_embd = src.n_embd;

    for (size_t i = 0; i < n; ++i) {
        llama_batch_ext::token twin = src.tokens[rows.out_ids[i0 + i]];

        // the sequences of one token are equal up to it: any of them tells what its twin may see
        parents.push_back(*std::min_element(twin.seq_ids.begin(), twin.seq_ids.end()));

        if (twin.has_embd) {
            const auto first = src.embd.begin() + twin.embd_off;
            twin.embd_off = dst.embd.size();
            dst.embd.insert(dst.embd.end(), first, first + src.n_embd);
        }

        twin.seq_ids = { LLAMA_PCD_SEQ_FIRST + (llama_seq_id) i };
        twin.output  = true;
        dst.tokens.push_back(twin);
    }
}

void llama_pcd::drop_twins() {
    for (size_t i = 0; i < parents.size(); ++i) {
        lctx.memory->seq_rm(LLAMA_PCD_SEQ_FIRST + (llama_seq_id) i, -1, -1);
    }
    parents.clear();
}

uint32_t llama_pcd::n_free_cells() const {
    uint32_t res = UINT32_MAX;
    for_each_kv([&](llama_kv_cache * kv) {
        const auto & cells = kv->v_cells[0];
        if (kv->n_swa == 0) { // a sliding-window cache makes its own room
            res = std::min(res, cells.size() - cells.get_used());
        }
    });
    return res;
}

// whether a sliding-window cache drops cells as it goes
bool llama_pcd::forgets() const {
    uint32_t n_max = 0;
    uint32_t n_swa = UINT32_MAX;
    for_each_kv([&](llama_kv_cache * kv) {
        n_max = std::max(n_max, kv->get_size());
        if (kv->n_swa > 0) {
            n_swa = std::min(n_swa, kv->get_size());
        }
    });
    return n_swa < n_max;
}

bool llama_pcd::needs_twin(const float * standard) const {
    if (params.gamma == 1) {
        return false;
    }
    return params.relative_top == 0.0f ||
        llama_pcd_contrast(standard, nullptr, lctx.model.vocab.n_tokens(), 0.0f, params.gamma, params.relative_top, 0.0f, nullptr) > 1;
}

//
// rows
//

void llama_pcd::write_row(size_t i, float * dst) {
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    const float * l1 = rows.standard.data() + i*n_vocab;
    const float * l2 = rows.has_over_rotated[i] ? rows.over_rotated.data() + i*n_vocab : nullptr;

    if (params.combine) {
        llama_pcd_contrast(l1, l2, n_vocab, params.beta, params.gamma, params.relative_top, OUTSIDE, dst);
    } else {
        std::copy(l1, l1 + n_vocab, dst);
    }
}

const float * llama_pcd::get_row(int32_t i, int32_t which) {
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    const auto & ids = rows.out_ids;
    const auto   it  = i >= 0 ? std::find(ids.begin(), ids.end(), i) :
        ids.end() - std::min<size_t>(ids.size(), i == INT32_MIN ? ids.size() : (size_t) -i);

    if (it == ids.end() || (i < 0 && (size_t) -(int64_t) i > ids.size())) {
        return nullptr;
    }
    const size_t k = it - ids.begin();

    switch (which) {
        case LLAMA_PCD_ROW_STANDARD:
            return rows.standard.data() + k*n_vocab;
        case LLAMA_PCD_ROW_OVER_ROTATED:
            return rows.has_over_rotated[k] ? rows.over_rotated.data() + k*n_vocab : nullptr;
        case LLAMA_PCD_ROW_CONTRASTED:
            rows.contrasted.resize(n_vocab);
            llama_pcd_contrast(rows.standard.data() + k*n_vocab,
                    rows.has_over_rotated[k] ? rows.over_rotated.data() + k*n_vocab : nullptr,
                    n_vocab, rows.params.beta, rows.params.gamma, rows.params.relative_top, -INFINITY, rows.contrasted.data());
            return rows.contrasted.data();
        default:
            return nullptr;
    }
}
