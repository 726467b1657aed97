// Copies rows out of the context, and writes the contrast over them.

#include "decode/rows.h"
#include "upstream/outputs.h"

#include "llama-model.h"

#include <algorithm>

int32_t llama_pcd_rows::n_vocab() const {
    return lctx.get_model().vocab.n_tokens();
}

size_t llama_pcd_rows::n_bytes() const {
    size_t res = 0;
    for (const auto & row : all) {
        res += row.standard.size() + row.local.size() + row.contrasted.size();
    }
    return res*sizeof(float);
}

size_t llama_pcd_rows::first_from(int32_t batch_index) const {
    return std::lower_bound(all.begin(), all.end(), batch_index, [](const auto & row, int32_t id) { return row.id < id; }) - all.begin();
}

std::vector<float> llama_pcd_rows::copy_of(int32_t batch_index) const {
    const float * row = llama_pcd::outputs::row(lctx, batch_index);
    return { row, row + n_vocab() };
}

void llama_pcd_rows::take_standard(size_t i, int32_t batch_index) {
    all[i].standard = copy_of(batch_index);
    all[i].entropy  = NAN;
}

void llama_pcd_rows::take_local(const llama_pcd_twins & twins) {
    for (size_t k = 0; k < twins.all.size(); ++k) {
        all[twins.all[k].row].local = copy_of(twins.first + k);
        stats.n_twins++;
    }
}

float llama_pcd_rows::entropy(llama_pcd_kept_row & row) {
    if (std::isnan(row.entropy)) {
        row.entropy = llama_pcd_entropy(row.standard.data(), n_vocab());
    }
    return row.entropy;
}

bool llama_pcd_rows::sure(llama_pcd_kept_row & row) {
    const auto & c = row.setting;

    return (c.min_entropy > 0.0f && entropy(row) < c.min_entropy) ||
        (row.first >= 0 && c.min_first_entropy > 0.0f && entropy(all[row.first]) < c.min_first_entropy);
}

bool llama_pcd_rows::needs_twin(size_t i) {
    const auto & c = all[i].setting;

    return c.gamma > 1 && !sure(all[i]) && (c.relative_top == 0.0f ||
        llama_pcd_contrast(all[i].standard.data(), nullptr, n_vocab(), &c, 0.0f, nullptr, nullptr) > 1);
}

void llama_pcd_rows::contrast(llama_pcd_kept_row & row, float behind, float * dst) {
    if (sure(row)) {
        std::copy(row.standard.begin(), row.standard.end(), dst);
    } else {
        const float * local = row.local.empty() ? nullptr : row.local.data();
        llama_pcd_contrast(row.standard.data(), local, n_vocab(), &row.setting, behind, dst, &row.strength);
    }
}

void llama_pcd_rows::show() {
    for (auto & row : all) {
        float * dst = llama_pcd::outputs::row(lctx, row.id);
        if (row.setting.combine) {
            contrast(row, LLAMA_PCD_BEHIND, dst);
        } else {
            std::copy(row.standard.begin(), row.standard.end(), dst);
        }
    }
}

llama_pcd_kept_row * llama_pcd_rows::resolve(int32_t i) {
    const int32_t id = i >= 0 || all.empty() ? i : llama_pcd::outputs::index(lctx, i);
    const size_t row = first_from(id);

    return id >= 0 && row < size() && all[row].id == id ? &all[row] : nullptr;
}

int32_t llama_pcd_rows::resolve_plain(int32_t i) const {
    const int32_t id = plain_ids.empty() || i >= 0 ? i : llama_pcd::outputs::index(lctx, i);
    return std::binary_search(plain_ids.begin(), plain_ids.end(), id) ? id : -1;
}

const float * llama_pcd_rows::get(int32_t i, int32_t which) {
    const int32_t plain = resolve_plain(i);
    if (plain >= 0 && which != LLAMA_PCD_ROW_LOCAL) {
        llama_pcd::outputs::wait(lctx);
        return llama_pcd::outputs::row(lctx, plain);
    }
    auto * row = resolve(i);
    if (!row || (which == LLAMA_PCD_ROW_LOCAL && row->local.empty())) {
        return nullptr;
    }
    if (which == LLAMA_PCD_ROW_CONTRASTED && row->contrasted.empty()) {
        row->contrasted.resize(n_vocab());
        contrast(*row, INFINITY, row->contrasted.data());
    }
    switch (which) {
        case LLAMA_PCD_ROW_STANDARD:   return row->standard.data();
        case LLAMA_PCD_ROW_LOCAL:      return row->local.data();
        case LLAMA_PCD_ROW_CONTRASTED: return row->contrasted.data();
        default:                       return nullptr;
    }
}

float llama_pcd_rows::get_strength(int32_t i) {
    auto * row = resolve(i);
    if (row && !row->setting.combine) { // nothing was contrasted yet
        get(i, LLAMA_PCD_ROW_CONTRASTED);
    }
    return row ? row->strength : NAN;
}
