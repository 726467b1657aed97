// Copies rows out of the context, and writes the contrast over them.

#include "decode/rows.h"
#include "formulas/formulas.h"
#include "upstream/outputs.h"

#include "llama-model.h"

#include <algorithm>
#include <cmath>

size_t llama_pcd_rows::n_vocab() const {
    return lctx.get_model().vocab.n_tokens();
}

void llama_pcd_rows::add(int32_t batch_index, const llama_pcd_seq_setting & contrast, int32_t first) {
    out_ids.push_back(batch_index);
    contrasts.push_back(contrast);
    firsts.push_back(first);
}

// v = {} would keep it
template <typename T>
static void free_memory(std::vector<T> & v) {
    std::vector<T>().swap(v);
}

void llama_pcd_rows::trim() {
    forget();
    free_memory(standard);
    free_memory(local);
    free_memory(contrasted);
}

size_t llama_pcd_rows::n_bytes() const {
    size_t res = standard.capacity() + local.capacity();
    for (const auto & row : contrasted) {
        res += row.capacity();
    }
    return res*sizeof(float);
}

void llama_pcd_rows::count() const {
    stats.n_tokens  += size() + plain_ids.size();
    stats.n_skipped += plain_ids.size();
}

void llama_pcd_rows::reserve() {
    const size_t n = n_vocab();

    for (auto * cur : { &standard, &local }) {
        if (cur->capacity() > 64*n && cur->capacity() > 4*size()*n) {
            free_memory(*cur); // a long prompt's rows are not kept for single tokens
        }
        cur->resize(size()*n);
    }
    contrasted.assign(size(), {});
    has_local.assign(size(), false);
    strengths.assign(size(), NAN);
    entropies.assign(size(), NAN);
}

size_t llama_pcd_rows::first_from(size_t batch_index) const {
    return std::lower_bound(out_ids.begin(), out_ids.end(), (int32_t) batch_index) - out_ids.begin();
}

size_t llama_pcd_rows::find(int32_t batch_index) const {
    const size_t i = first_from(batch_index);
    return i < size() && out_ids[i] == batch_index ? i : size();
}

void llama_pcd_rows::take_standard(size_t i, int32_t batch_index) {
    std::copy_n(llama_pcd_outputs_row(lctx, batch_index), n_vocab(), standard.begin() + i*n_vocab());
    entropies[i] = NAN;
}

void llama_pcd_rows::take_local(const llama_pcd_twins & twins) {
    for (size_t k = 0; k < twins.all.size(); ++k) {
        const size_t i = twins.all[k].row;
        std::copy_n(llama_pcd_outputs_row(lctx, twins.first + k), n_vocab(), local.begin() + i*n_vocab());
        has_local[i] = true;
        stats.n_twins++;
    }
}

static pcd_contrast_params params_of(const llama_pcd_seq_setting & c) {
    return { c.beta, c.adaptive, c.gamma, c.relative_top };
}

float llama_pcd_rows::entropy(size_t i) {
    if (std::isnan(entropies[i])) {
        entropies[i] = pcd_entropy(standard_row(i), n_vocab());
    }
    return entropies[i];
}

bool llama_pcd_rows::sure(size_t i) {
    const auto & c = contrasts[i];

    return (c.min_entropy > 0.0f && entropy(i) < c.min_entropy) ||
        (firsts[i] >= 0 && c.min_first_entropy > 0.0f && entropy(firsts[i]) < c.min_first_entropy);
}

bool llama_pcd_rows::needs_twin(size_t i) {
    const auto & c = contrasts[i];

    return c.gamma > 1 && !sure(i) && (c.relative_top == 0.0f ||
        pcd_contrast(standard_row(i), nullptr, n_vocab(), params_of(c), 0.0f, nullptr) > 1);
}

int32_t llama_pcd_rows::contrast(size_t i, float behind, float * dst) {
    if (sure(i)) {
        std::copy_n(standard_row(i), n_vocab(), dst);
        return 1;
    }
    return pcd_contrast(standard_row(i), local_row(i), n_vocab(), params_of(contrasts[i]), behind, dst, &strengths[i]);
}

void llama_pcd_rows::show() {
    for (size_t i = 0; i < size(); ++i) {
        float * dst = llama_pcd_outputs_row(lctx, out_ids[i]);
        if (contrasts[i].combine) {
            contrast(i, LLAMA_PCD_BEHIND, dst);
        } else {
            std::copy_n(standard_row(i), n_vocab(), dst);
        }
    }
}

size_t llama_pcd_rows::resolve(int32_t i) const {
    return size() == 0 ? 0 : find(i >= 0 ? i : llama_pcd_outputs_index(lctx, i));
}

int32_t llama_pcd_rows::resolve_plain(int32_t i) const {
    const int32_t id = plain_ids.empty() || i >= 0 ? i : llama_pcd_outputs_index(lctx, i);
    return std::binary_search(plain_ids.begin(), plain_ids.end(), id) ? id : -1;
}

const float * llama_pcd_rows::get(int32_t i, int32_t which) {
    const int32_t plain = resolve_plain(i);
    if (plain >= 0 && which != LLAMA_PCD_ROW_LOCAL) {
        llama_pcd_outputs_wait(lctx);
        return llama_pcd_outputs_row(lctx, plain);
    }

    const size_t row = resolve(i);

    if (row == size()) {
        return nullptr;
    }
    switch (which) {
        case LLAMA_PCD_ROW_STANDARD:
            return standard_row(row);
        case LLAMA_PCD_ROW_LOCAL:
            return local_row(row);
        case LLAMA_PCD_ROW_CONTRASTED:
            if (contrasted[row].empty()) {
                contrasted[row].resize(n_vocab());
                contrast(row, INFINITY, contrasted[row].data());
            }
            return contrasted[row].data();
        default:
            return nullptr;
    }
}

float llama_pcd_rows::get_strength(int32_t i) {
    const size_t row = resolve(i);

    if (row == size()) {
        return NAN;
    }
    if (!contrasts[row].combine) { // nothing was contrasted yet
        get(i, LLAMA_PCD_ROW_CONTRASTED);
    }
    return strengths[row];
}
