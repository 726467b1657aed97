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
// parts
//

// n numbers of row i of a buffer
template <typename T>
static std::vector<T> row_of(const T * data, size_t i, size_t n_row, size_t n) {
    return { data + i*n_row, data + i*n_row + n };
}

template <typename T>
static void put_row(const std::vector<T> & row, T * data, size_t i, size_t n_row) {
    std::copy(row.begin(), row.end(), data + i*n_row);
}

void llama_pcd_outputs::take(llama_context & lctx, size_t i0, size_t i1) {
    llama_pcd_outputs_wait(lctx);

    const auto & s       = llama_pcd::sampling(lctx);
    const bool   sampled = !s.samplers.empty() && s.sampled.has_data();
    const size_t n_vocab = n_vocab_of(lctx);
    const size_t n_embd  = n_embd_of(lctx);

    for (size_t i = i0; i < i1; ++i) {
        const int32_t j = llama_pcd::output_ids(lctx)[i - i0];
        if (j < 0) {
            continue;
        }
        output cur = {};
        cur.i      = i;
        cur.logits = row_of(llama_pcd::logits(lctx), j, n_vocab, n_vocab);
        cur.embd   = row_of(llama_pcd::embd(lctx),   j, n_embd,  n_embd);
        if (sampled) {
            cur.token          = s.sampled.data[j];
            cur.sampled_logits = row_of(s.logits.data,     j, n_vocab, s.logits_count[j]);
            cur.probs          = row_of(s.probs.data,      j, n_vocab, s.probs_count[j]);
            cur.candidates     = row_of(s.candidates.data, j, n_vocab, s.candidates_count[j]);
        }
        all.push_back(std::move(cur));
    }
}

bool llama_pcd_outputs::put(llama_context & lctx) const {
    if (llama_pcd::output_reserve(lctx, all.size()) < all.size()) {
        return false;
    }
    auto &       s       = llama_pcd::sampling(lctx);
    const bool   sampled = !s.samplers.empty() && s.sampled.has_data();
    const size_t n_vocab = n_vocab_of(lctx);
    const size_t n_embd  = n_embd_of(lctx);

    llama_pcd::output_swaps_clear(lctx);
    llama_pcd::n_outputs(lctx) = all.size();
    for (size_t j = 0; j < all.size(); ++j) {
        const auto & cur = all[j];

        llama_pcd::output_ids(lctx)[cur.i] = j;

        put_row(cur.logits, llama_pcd::logits(lctx), j, n_vocab);
        put_row(cur.embd,   llama_pcd::embd(lctx),   j, n_embd);
        if (sampled) {
            s.sampled.data[j]     = cur.token;
            s.logits_count[j]     = cur.sampled_logits.size();
            s.probs_count[j]      = cur.probs.size();
            s.candidates_count[j] = cur.candidates.size();

            put_row(cur.sampled_logits, s.logits.data,     j, n_vocab);
            put_row(cur.probs,          s.probs.data,      j, n_vocab);
            put_row(cur.candidates,     s.candidates.data, j, n_vocab);
        }
    }

    return true;
}
