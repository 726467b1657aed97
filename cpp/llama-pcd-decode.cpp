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
    pcd->exits.forget();

    if (pcd->graphs_on != pcd->on) { // a graph built without PCD does not know that it cannot serve one with it
        pcd->graphs_on = pcd->on;
        pcd->reset_graphs();
    }
    if (!pcd->on) {
        pcd->stale = true; // keys stored from here on have no second
        pcd->forget_rows();
        return pcd->heads.on && pcd->decode_heads(batch, ret);
    }
    ret = pcd->decode(batch);
    return true;
}

int llama_pcd::decode(const llama_batch_ext & batch) {
    forget_rows();

    const size_t n_tokens = batch.tokens.size();
    const size_t n_free   = n_free_cells();

    // what upstream refuses is refused here too: in its own words, and before anything has changed
    bool refused = n_tokens == 0 || n_tokens > lctx.n_batch() || n_tokens > n_free;

    size_t n_outputs = 0;

    for (size_t i = 0; i < n_tokens; ++i) {
        const auto & token = batch.tokens[i];

        for (llama_seq_id s : token.seq_ids) {
            if (is_twin(s)) {
                LLAMA_LOG_ERROR("%s: sequence id %d: ids from %d on belong to PCD's twins\n", __func__, s, seq_first);
                return -1;
            }
            refused |= s < 0 || s >= batch.n_seq_max;
        }
        refused |= token.seq_ids.empty();

        if (token.output && !refused) {
            n_outputs++;
            const llama_pcd_seq contrast = contrast_of(llama_pcd_parent_of(token));
            if (contrast.on) {
                rows.out_ids.push_back(i);
                rows.contrasts.push_back(contrast);
            }
        }
    }

    stale |= !rerotated(); // keys stored from here on have no second

    if (refused) {
        forget_rows();
        return decode_nested(batch);
    }
    if (suspended) {
        forget_rows();
    }

    const size_t n_out = rows.out_ids.size();

    // with a second stream every token has its twin, at once or, with alternate evaluation, when a row first needs it;
    // at once all the same where that may be too late: sliding-window layers forget, and embeddings are not kept
    const bool streams = separate() && (params.evaluation == LLAMA_PCD_EVALUATION_FUSED || slides() ||
            batch.tokens[0].id == LLAMA_TOKEN_NULL);

    if (streams && !lctx.cparams.causal_attn && end_of_part(batch, 0, SIZE_MAX) < n_tokens) {
        LLAMA_LOG_ERROR("%s: cache = separate has to evaluate the %zu embeddings of this picture and their twins at once; "
                "create the context with n_ubatch = %zu or more\n", __func__, n_tokens, 2*n_tokens);
        forget_rows();
        return -1;
    }

    if (n_out == 0 && !streams) {
        return decode_nested(batch);
    }

    if (n_out > 0) {
        const std::string reason = conflict();
        if (!reason.empty()) {
            LLAMA_LOG_ERROR("%s: PCD is on, but %s; turn it off first\n", __func__, reason.c_str());
            forget_rows();
            return -1;
        }
    }

    // a pending K-shift will move the first keys before this batch is computed
    for_each_kv([&](llama_kv_cache * kv) { stale |= kv->get_has_shift(); });

    if (stale && rerotated()) {
        const ggml_status status = derive_second_keys();
        if (status != GGML_STATUS_SUCCESS) {
            LLAMA_LOG_ERROR("%s: failed to derive the second keys\n", __func__);
            forget_rows();
            return status == GGML_STATUS_ABORTED ? 2 : -3;
        }
    }

    stats.n_tokens += n_out;

    rows.resize(n_out, lctx.model.vocab.n_tokens());

    const size_t n_fit = n_room();

    // rows that a fused batch computes: the twins' beside the caller's
    const size_t n_rows = (lctx.cparams.embeddings ? n_tokens : n_outputs) + n_out;

    bool needs_none = true;
    for (const auto & cur : rows.contrasts) {
        needs_none &= cur.gamma == 1;
    }

    int ret = 1;

    branch(llama_pcd_parent_of(batch.tokens[0]));

    if (separate()) {
        ret = streams || n_tokens + 1 > n_fit ? decode_streams(batch) : decode_alternate(batch);
    } else if (needs_none) {
        ret = decode_alternate(batch);
    } else if (recr && n_tokens > 1) {
        ret = 1; // a twin goes on from the state before its token, and there is one state
    } else if (forgets(n_tokens + n_out) && (n_out > 1 || rows.out_ids[0] + 1 != (int32_t) n_tokens)) {
        ret = 1; // what an early twin must see may be gone once the batch's last token is in
    } else if (params.evaluation == LLAMA_PCD_EVALUATION_FUSED && n_out <= LLAMA_PCD_MAX_TWINS &&
            n_rows <= lctx.cparams.n_outputs_max && n_tokens + n_out <= std::min<size_t>(lctx.n_batch(), n_fit)) {
        ret = decode_fused(batch);
    } else if (n_tokens + 1 <= n_fit) {
        ret = decode_alternate(batch);
    }

    // each twin before its token, in the token's cell
    if (ret == 1 && !separate()) {
        ret = decode_sequential(batch);
    }
    if (recr) {
        lctx.memory->seq_rm(seq_first, -1, -1); // of a twin that was not needed
    }
    if (ret != 0) {
        forget_rows();
        return ret;
    }

    const size_t n_vocab = lctx.model.vocab.n_tokens();
    for (size_t i = 0; i < n_out; ++i) {
        write_row(i, lctx.logits.data + lctx.output_ids[rows.out_ids[i]]*n_vocab);
    }

    return 0;
}

int llama_pcd::decode_nested(const llama_batch_ext & batch, bool is_together) {
    nested    = true;
    misplaced = false;
    together  = is_together;

    int ret;
    try {
        ret = lctx.decode(batch);
    } catch (...) {
        nested = false;
        drop_twins();
        throw;
    }
    nested = false;

    if (ret == 0 && !parents.empty() && separate() && !misplaced) {
        set_fresh();
    }
    drop_twins();

    return ret;
}

// one batch with all tokens and, behind them, their twins
int llama_pcd::decode_fused(const llama_batch_ext & batch) {
    const size_t n_std = batch.tokens.size();
    const size_t n_out = rows.out_ids.size();

    llama_batch_ext both = batch_like(batch);
    both.tokens = batch.tokens;
    both.embd   = batch.embd;
    both.n_embd = batch.n_embd;
    add_twins(both, batch, 0, n_out);

    const int ret = decode_nested(both, true);
    if (ret != 0) {
        return ret;
    }

    if (misplaced) {
        // the memory split the batch in its own way; go one by one
        take_back(batch, n_std);
        return recr ? -2 : 1;
    }

    lctx.n_queued_tokens -= n_out; // twins are not the caller's tokens
    lctx.synchronize();
    lctx.output_reorder();

    for (size_t i = 0; i < n_out; ++i) {
        copy_row(rows.standard,     i, rows.out_ids[i]);
        copy_row(rows.over_rotated, i, n_std + i);
    }

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
        if (needs_twin(i, l1)) {
            todo.push_back(i);
        } else {
            stats.n_skipped++;
        }
    }

    const size_t n_logits = todo.empty() ? 0 : n_outputs*n_vocab;
    const size_t n_embd   = todo.empty() || !lctx.embd.data ? 0 : n_outputs*lctx.model.hparams.n_embd_out();

    const std::vector<float> logits(lctx.logits.data, lctx.logits.data + n_logits);
    const std::vector<float> embd  (lctx.embd.data,   lctx.embd.data   + n_embd);

    const int status = separate() ? catch_up_rows(batch, todo) : decode_twins_of(batch, todo);

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

// neighbours go together
int llama_pcd::decode_twins_of(const llama_batch_ext & batch, const std::vector<size_t> & todo) {
    const size_t n_max = std::min<size_t>({ recr ? size_t(1) : LLAMA_PCD_MAX_TWINS, lctx.n_batch(), n_room(), lctx.cparams.n_outputs_max });

    int status = 0;
    for (size_t k = 0; k < todo.size() && status == 0; ) {
        size_t n = 1;
        while (n < n_max && k + n < todo.size() && todo[k + n] == todo[k] + n) {
            n++;
        }
        status = decode_twins(batch, todo[k], n);
        k += n;
    }
    return status;
}

// For a cache that is full up to the tokens themselves, or that forgets: each twin is evaluated before its token, in
// the cell that the token takes after it.
int llama_pcd::decode_sequential(const llama_batch_ext & batch) {
    const size_t n_tokens = batch.tokens.size();
    const size_t n_out    = rows.out_ids.size();

    outputs all;

    int    ret  = 0;
    size_t done = 0;

    const auto decode_to = [&](size_t end) {
        ret = decode_nested(part_of(batch, done, end));
        if (ret == 0) {
            take_outputs(all, done, end);
            done = end;
        }
    };

    for (size_t i = 0; i < n_out && ret == 0; ++i) {
        const size_t at = rows.out_ids[i];

        if (at > done) {
            decode_to(at);
        }
        if (ret == 0) {
            branch(llama_pcd_parent_of(batch.tokens[at]));
            ret = decode_twins(batch, i, 1);
        }
        if (ret == 0) {
            decode_to(at + 1);
        }
        if (ret == 0) {
            copy_row(rows.standard, i, 0);
        }
    }
    if (ret == 0 && done < n_tokens) {
        decode_to(n_tokens);
    }
    if (ret != 0) {
        take_back(batch, done);
        return ret;
    }

    return put_outputs(all);
}

// evaluate the twins of outputs [i0, i0 + n) alone and keep their rows
int llama_pcd::decode_twins(const llama_batch_ext & batch, size_t i0, size_t n) {
    llama_batch_ext twins = batch_like(batch);
    add_twins(twins, batch, i0, n);

    const int ret = decode_nested(twins);
    if (ret != 0) {
        return ret;
    }

    finish_twins();

    for (size_t i = 0; i < n; ++i) {
        copy_row(rows.over_rotated, i0 + i, i);
    }

    return 0;
}

// the rows of twins decoded alone are there; twins are not the caller's tokens
void llama_pcd::finish_twins() {
    lctx.n_queued_tokens = 0;
    lctx.synchronize();
    lctx.output_reorder();
}

//
// parts of a batch
//

llama_batch_ext llama_pcd::batch_like(const llama_batch_ext & batch) const {
    return llama_batch_ext(batch.n_tokens_max + LLAMA_PCD_MAX_TWINS, batch.n_embd_inp, batch.n_embd_inp_enc,
            LLAMA_MAX_SEQ, batch.mem, batch.n_vocab, batch.n_pos_per_embd);
}

llama_batch_ext llama_pcd::part_of(const llama_batch_ext & batch, size_t i0, size_t i1) const {
    llama_batch_ext res = batch_like(batch);

    res.n_embd = batch.n_embd;
    res.tokens.assign(batch.tokens.begin() + i0, batch.tokens.begin() + i1);
    for (auto & token : res.tokens) {
        copy_embd(res, batch, token);
    }

    return res;
}

void llama_pcd::copy_embd(llama_batch_ext & dst, const llama_batch_ext & src, llama_batch_ext::token & token) const {
    if (token.has_embd) {
        const auto first = src.embd.begin() + token.embd_off;
        token.embd_off = dst.embd.size();
        dst.embd.insert(dst.embd.end(), first, first + src.n_embd);
    }
}

// behind the others; its sequence is chosen by that of its token
void llama_pcd::add_twin(llama_batch_ext & dst, const llama_batch_ext & src, const llama_batch_ext::token & token, llama_seq_id twin, bool output) {
    llama_batch_ext::token res = token;

    copy_embd(dst, src, res);
    res.seq_ids = { twin };
    res.output  = output;

    dst.n_embd = src.n_embd;
    dst.tokens.push_back(res);
}

// a twin starts with the state that recurrent layers have now
void llama_pcd::branch(llama_seq_id parent) {
    if (recr) {
        recr->seq_cp(parent, seq_first, -1, -1);
    }
}

void llama_pcd::add_twins(llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n) {
    parents.clear();

    for (size_t i = 0; i < n; ++i) {
        const auto & token = src.tokens[rows.out_ids[i0 + i]];

        parents.push_back(llama_pcd_parent_of(token));
        add_twin(dst, src, token, seq_first + (llama_seq_id) i, true);
    }
}

// the outputs of a part that was just decoded; call before anything else is
void llama_pcd::take_outputs(outputs & dst, size_t i0, size_t i1) {
    lctx.synchronize();
    lctx.output_reorder();

    const size_t n_vocab = lctx.model.vocab.n_tokens();
    const size_t n_embd  = lctx.embd.data ? lctx.model.hparams.n_embd_out() : 0;

    for (size_t i = i0; i < i1; ++i) {
        const int32_t j = lctx.output_ids[i - i0];
        if (j >= 0) {
            dst.ids.push_back(i);
            dst.logits.insert(dst.logits.end(), lctx.logits.data + j*n_vocab, lctx.logits.data + (j + 1)*n_vocab);
            dst.embd  .insert(dst.embd.end(),   lctx.embd.data   + j*n_embd,  lctx.embd.data   + (j + 1)*n_embd);
        }
    }
}

// make them the context's
int llama_pcd::put_outputs(const outputs & src) {
    const size_t n = src.ids.size();

    if (lctx.output_reserve(n) < n) {
        return -2;
    }
    std::copy(src.logits.begin(), src.logits.end(), lctx.logits.data);
    std::copy(src.embd.begin(),   src.embd.end(),   lctx.embd.data);

    lctx.output_swaps.clear();
    lctx.n_outputs = n;
    for (size_t i = 0; i < n; ++i) {
        lctx.output_ids[src.ids[i]] = i;
    }

    return 0;
}

// as if the first n tokens had not been decoded; recurrent layers cannot go back, there they stay
void llama_pcd::take_back(const llama_batch_ext & batch, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        for (llama_seq_id s : batch.tokens[i].seq_ids) {
            lctx.memory->seq_rm(s, batch.tokens[i].pos[0], -1);
        }
    }
}

// logits of an entry of the batch that was just decoded
void llama_pcd::copy_row(std::vector<float> & dst, size_t i, int32_t batch_index) {
    const size_t  n_vocab = lctx.model.vocab.n_tokens();
    const float * src     = lctx.logits.data + lctx.output_ids[batch_index]*n_vocab;

    std::copy(src, src + n_vocab, dst.begin() + i*n_vocab);

    if (&dst == &rows.over_rotated) {
        rows.has_over_rotated[i] = true;
        stats.n_twins++;
    }
}

void llama_pcd::drop_twins() {
    for (size_t i = 0; i < parents.size(); ++i) {
        lctx.memory->seq_rm(seq_first + (llama_seq_id) i, -1, -1);
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

// how many tokens fit as they are: sliding-window caches also give away what fell out of the window of one sequence
uint32_t llama_pcd::n_room() const {
    uint32_t res = n_free_cells();
    for_each_kv([&](llama_kv_cache * kv) {
        const auto & cells = kv->v_cells[0];
        if (kv->n_swa == 0) {
            return;
        }
        uint32_t n = cells.size() - cells.get_used();
        for (uint32_t j = 0; j < cells.used_max_p1() && n < res; ++j) {
            n += !cells.is_empty(j) && cells.seq_count(j) == 1 &&
                llama_hparams::is_masked_swa(kv->n_swa, kv->swa_type, cells.pos_get(j), cells.seq_pos_max(cells.seq_get(j)) + 1);
        }
        res = std::min(res, n);
    });
    return res;
}

// Whether a sliding-window cache may give away cells that fell out of the window when n more are placed: it does so as
// soon as its search does not start behind all that is in use, even where other cells are free.
bool llama_pcd::forgets(size_t n) const {
    bool res = false;
    for_each_kv([&](llama_kv_cache * kv) {
        const auto & cells = kv->v_cells[0];
        const size_t used  = cells.get_used();

        res |= kv->n_swa > 0 && (cells.used_max_p1() != used || kv->v_heads[0] != used || used + n > cells.size());
    });
    return res;
}

bool llama_pcd::slides() const {
    bool res = false;
    for_each_kv([&](llama_kv_cache * kv) { res |= kv->n_swa > 0; });
    return res;
}

bool llama_pcd::needs_twin(size_t i, const float * standard) const {
    const auto & c = rows.contrasts[i];

    return c.gamma > 1 && (c.relative_top == 0.0f ||
        llama_pcd_contrast(standard, nullptr, lctx.model.vocab.n_tokens(), 0.0f, c.gamma, c.relative_top, 0.0f, nullptr) > 1);
}

//
// rows
//

void llama_pcd::write_row(size_t i, float * dst) {
    const size_t n_vocab = lctx.model.vocab.n_tokens();

    const float * l1 = rows.standard.data() + i*n_vocab;
    const float * l2 = rows.has_over_rotated[i] ? rows.over_rotated.data() + i*n_vocab : nullptr;

    if (params.combine) {
        const auto & c = rows.contrasts[i];
        llama_pcd_contrast(l1, l2, n_vocab, c.beta, c.gamma, c.relative_top, OUTSIDE, dst);
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
                    n_vocab, rows.contrasts[k].beta, rows.contrasts[k].gamma, rows.contrasts[k].relative_top, -INFINITY, rows.contrasted.data());
            return rows.contrasted.data();
        default:
            return nullptr;
    }
}
