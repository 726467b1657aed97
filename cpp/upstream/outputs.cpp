// Moves rows in and out of the output buffer of a context.

#include "upstream/outputs.h"

#include "llama-model.h"

#include <algorithm>

static size_t n_vocab_of(const llama_context & lctx) {
    return lctx.get_model().vocab.n_tokens();
}

void llama_pcd::outputs::wait(llama_context & lctx) {
    lctx.synchronize();
    lctx.output_reorder();
}

float * llama_pcd::outputs::row(llama_context & lctx, int32_t batch_index) {
    return lctx.logits.data + lctx.output_ids[batch_index]*n_vocab_of(lctx);
}

int32_t llama_pcd::outputs::index(llama_context & lctx, int32_t i) {
    const int64_t j   = (int64_t) lctx.n_outputs + i;
    const auto  & ids = lctx.output_ids;
    const auto    it  = j < 0 ? ids.end() : std::find(ids.begin(), ids.end(), (int32_t) j);

    return it != ids.end() ? it - ids.begin() : -1;
}

void llama_pcd::outputs::hide(llama_context & lctx, size_t i0, size_t n) {
    for (size_t i = i0; i < i0 + n; ++i) {
        int32_t & id = lctx.output_ids[i];
        lctx.n_outputs -= id >= 0;
        id = -1;
    }
}

void llama_pcd::outputs::forget(llama_context & lctx) {
    auto & ids = lctx.output_ids;

    lctx.n_outputs = 0;
    lctx.output_swaps.clear();
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

void llama_pcd::outputs::take(llama_context & lctx, size_t i0, size_t i1) {
    wait(lctx);

    const auto & s       = lctx.sampling;
    const bool   sampled = !s.samplers.empty() && s.sampled.has_data();
    const size_t n_vocab = n_vocab_of(lctx);
    const size_t n_embd  = lctx.embd.data ? lctx.get_model().hparams.n_embd_out() : 0;

    for (size_t i = i0; i < i1; ++i) {
        const int32_t j = lctx.output_ids[i - i0];
        if (j < 0) {
            continue;
        }
        output cur = {};
        cur.i      = i;
        cur.logits = row_of(lctx.logits.data, j, n_vocab, n_vocab);
        cur.embd   = row_of(lctx.embd.data,   j, n_embd,  n_embd);
        if (sampled) {
            cur.token          = s.sampled.data[j];
            cur.sampled_logits = row_of(s.logits.data,     j, n_vocab, s.logits_count[j]);
            cur.probs          = row_of(s.probs.data,      j, n_vocab, s.probs_count[j]);
            cur.candidates     = row_of(s.candidates.data, j, n_vocab, s.candidates_count[j]);
        }
        all.push_back(std::move(cur));
    }
}

bool llama_pcd::outputs::put(llama_context & lctx) const {
    if (lctx.output_reserve(all.size()) < all.size()) {
        return false;
    }
    auto &       s       = lctx.sampling;
    const bool   sampled = !s.samplers.empty() && s.sampled.has_data();
    const size_t n_vocab = n_vocab_of(lctx);
    const size_t n_embd  = lctx.embd.data ? lctx.get_model().hparams.n_embd_out() : 0;

    lctx.output_swaps.clear();
    lctx.n_outputs = all.size();
    for (size_t j = 0; j < all.size(); ++j) {
        const auto & cur = all[j];

        lctx.output_ids[cur.i] = j;

        put_row(cur.logits, lctx.logits.data, j, n_vocab);
        put_row(cur.embd,   lctx.embd.data,   j, n_embd);
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
