// Copies rows out of the context, and writes the contrast over them.

#include "llama-pcd-rows.h"
#include "llama-pcd-math.h"
#include "llama-pcd-outputs.h"

#include "llama-model.h"

#include <algorithm>
#include <cmath>

// Added to the logits outside the plausible tokens. Finite, so that a grammar or a logit processor that forbids all plausible
// tokens still finds the model's own order among the rest; e^-10000 is 0 at any sane temperature.
static constexpr float OUTSIDE = -1e4f;

size_t llama_pcd_rows::n_vocab() const {
    return lctx.get_model().vocab.n_tokens();
}

void llama_pcd_rows::add(int32_t batch_index, const llama_pcd_seq & contrast) {
    out_ids.push_back(batch_index);
    contrasts.push_back(contrast);
}

void llama_pcd_rows::reserve() {
    const size_t n = n_vocab();

    for (auto * cur : { &standard, &over_rotated }) {
        if (cur->capacity() > 64*n && cur->capacity() > 4*size()*n) {
            *cur = {}; // a long prompt's rows are not kept for single tokens
        }
        cur->resize(size()*n);
    }
    has_over_rotated.assign(size(), false);
}

size_t llama_pcd_rows::find(int32_t batch_index) const {
    const auto it = std::lower_bound(out_ids.begin(), out_ids.end(), batch_index);
    return it != out_ids.end() && *it == batch_index ? it - out_ids.begin() : size();
}

void llama_pcd_rows::take_standard(size_t i, int32_t batch_index) {
    std::copy_n(llama_pcd_outputs_row(lctx, batch_index), n_vocab(), standard.begin() + i*n_vocab());
}

void llama_pcd_rows::take_over_rotated(size_t i, int32_t batch_index) {
    std::copy_n(llama_pcd_outputs_row(lctx, batch_index), n_vocab(), over_rotated.begin() + i*n_vocab());
    has_over_rotated[i] = true;
    stats.n_twins++;
}

bool llama_pcd_rows::needs_twin(size_t i) const {
    const auto & c = contrasts[i];

    return c.gamma > 1 && (c.relative_top == 0.0f ||
        pcd_contrast(standard_row(i), nullptr, n_vocab(), 0.0f, c.gamma, c.relative_top, 0.0f, nullptr) > 1);
}

int32_t llama_pcd_rows::contrast(size_t i, float outside, float * dst) const {
    const auto & c = contrasts[i];
    return pcd_contrast(standard_row(i), over_rotated_row(i), n_vocab(), c.beta, c.gamma, c.relative_top, outside, dst);
}

void llama_pcd_rows::show(bool combine) {
    n_needed = 0;

    for (size_t i = 0; i < size(); ++i) {
        float * dst = llama_pcd_outputs_row(lctx, out_ids[i]);
        if (combine) {
            n_needed += contrast(i, OUTSIDE, dst) > 1;
        } else {
            n_needed += needs_twin(i);
            std::copy_n(standard_row(i), n_vocab(), dst);
        }
    }
}

const float * llama_pcd_rows::get(int32_t i, int32_t which) {
    const int64_t n   = size();
    const int64_t row = i >= 0 ? (int64_t) find(i) : n + i; // a negative index counts back from the last row

    if (row < 0 || row >= n) {
        return nullptr;
    }
    switch (which) {
        case LLAMA_PCD_ROW_STANDARD:
            return standard_row(row);
        case LLAMA_PCD_ROW_OVER_ROTATED:
            return over_rotated_row(row);
        case LLAMA_PCD_ROW_CONTRASTED:
            contrasted.resize(n_vocab());
            contrast(row, -INFINITY, contrasted.data());
            return contrasted.data();
        default:
            return nullptr;
    }
}
