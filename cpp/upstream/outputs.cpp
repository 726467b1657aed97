// Moves rows in and out of the output buffer of a context.

#include "upstream/outputs.h"

#include "llama-model.h"

#include <algorithm>

static size_t n_vocab_of(const llama_context & lctx) {
    return lctx.get_model().vocab.n_tokens();
}

static size_t n_embd_of(llama_context & lctx) {
    return llama_pcd::embd(lctx) ? lctx.get_model().hparams.n_embd_out() : 0;
}

void llama_pcd_outputs_wait(llama_context & lctx) {
    lctx.synchronize();
    llama_pcd::output_reorder(lctx);
}

float * llama_pcd_outputs_row(llama_context & lctx, int32_t batch_index) {
    return llama_pcd::logits(lctx) + llama_pcd::output_ids(lctx)[batch_index]*n_vocab_of(lctx);
}

int32_t llama_pcd_outputs_index(llama_context & lctx, int32_t i) {
    const int64_t j   = (int64_t) llama_pcd::n_outputs(lctx) + i;
    const auto  & ids = llama_pcd::output_ids(lctx);
    const auto    it  = j < 0 ? ids.end() : std::find(ids.begin(), ids.end(), (int32_t) j);

    return it != ids.end() ? it - ids.begin() : -1;
}

void llama_pcd_outputs_hide(llama_context & lctx, size_t i0, size_t n) {
    for (size_t i = i0; i < i0 + n; ++i) {
        int32_t & id = llama_pcd::output_ids(lctx)[i];
        llama_pcd::n_outputs(lctx) -= id >= 0;
        id = -1;
    }
}

void llama_pcd_outputs_forget(llama_context & lctx) {
    auto & ids = llama_pcd::output_ids(lctx);

    llama_pcd::n_outputs(lctx) = 0;
    llama_pcd::output_swaps_clear(lctx);
    std::fill(ids.begin(), ids.end(), -1);
}

//
// backend samplers
//

// row i of one of their buffers, of which n are there
template <typename T, typename B>
static std::vector<T> row_of(const B & buffer, int32_t i, size_t n_vocab, uint32_t n) {
    return { buffer.data + i*n_vocab, buffer.data + i*n_vocab + n };
}

void llama_pcd_sampled::take(llama_context & lctx, int32_t i) {
    const auto & s = llama_pcd::sampling(lctx);
    const size_t n = n_vocab_of(lctx);

    if (!s.samplers.empty() && s.sampled.has_data()) {
        all.push_back({ s.sampled.data[i],
                row_of<float>      (s.logits,     i, n, s.logits_count[i]),
                row_of<float>      (s.probs,      i, n, s.probs_count[i]),
                row_of<llama_token>(s.candidates, i, n, s.candidates_count[i]) });
    }
}

void llama_pcd_sampled::put(llama_context & lctx, size_t n_outputs) const {
    auto &       s = llama_pcd::sampling(lctx);
    const size_t n = n_vocab_of(lctx);

    for (size_t i = 0; i < std::min(all.size(), n_outputs); ++i) {
        const auto & cur = all[i];

        s.sampled.data[i]     = cur.token;
        s.logits_count[i]     = cur.logits.size();
        s.probs_count[i]      = cur.probs.size();
        s.candidates_count[i] = cur.candidates.size();

        std::copy(cur.logits.begin(),     cur.logits.end(),     s.logits.data     + i*n);
        std::copy(cur.probs.begin(),      cur.probs.end(),      s.probs.data      + i*n);
        std::copy(cur.candidates.begin(), cur.candidates.end(), s.candidates.data + i*n);
    }
}

//
// parts
//

void llama_pcd_outputs::take(llama_context & lctx, size_t i0, size_t i1) {
    llama_pcd_outputs_wait(lctx);

    const float * src_logits = llama_pcd::logits(lctx);
    const float * src_embd   = llama_pcd::embd(lctx);

    const size_t n_vocab = n_vocab_of(lctx);
    const size_t n_embd  = n_embd_of(lctx);

    for (size_t i = i0; i < i1; ++i) {
        const int32_t j = llama_pcd::output_ids(lctx)[i - i0];
        if (j >= 0) {
            ids.push_back(i);
            logits.insert(logits.end(), src_logits + j*n_vocab, src_logits + (j + 1)*n_vocab);
            embd  .insert(embd.end(),   src_embd   + j*n_embd,  src_embd   + (j + 1)*n_embd);
            sampled.take(lctx, j);
        }
    }
}

bool llama_pcd_outputs::put(llama_context & lctx) const {
    const size_t n = ids.size();

    if (llama_pcd::output_reserve(lctx, n) < n) {
        return false;
    }
    std::copy(logits.begin(), logits.end(), llama_pcd::logits(lctx));
    std::copy(embd.begin(),   embd.end(),   llama_pcd::embd(lctx));
    sampled.put(lctx, n);

    llama_pcd::output_swaps_clear(lctx);
    llama_pcd::n_outputs(lctx) = n;
    for (size_t i = 0; i < n; ++i) {
        llama_pcd::output_ids(lctx)[ids[i]] = i;
    }

    return true;
}

//
// timings
//

llama_pcd_timings::llama_pcd_timings(llama_context & lctx) :
    lctx(lctx),
    n_queued_tokens(llama_pcd::n_queued_tokens(lctx)),
    t_compute_start_us(llama_pcd::t_compute_start_us(lctx)) {
    llama_pcd::n_queued_tokens(lctx) = 0; // counted later
    llama_pcd_outputs_wait(lctx);
}

void llama_pcd_timings::count() const {
    llama_pcd::n_queued_tokens(lctx)    = n_queued_tokens;
    llama_pcd::t_compute_start_us(lctx) = t_compute_start_us;

    lctx.synchronize();
}
