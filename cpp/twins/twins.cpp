// Finds twins in micro-batches, which know the entry of the batch that each of theirs was; widens the memory of recurrent layers, and
// copies states in it.

#include "twins/twins.h"
#include "llama-pcd.h"

#include "llama-impl.h"

#include <algorithm>
#include <stdexcept>

llama_pcd_twin_ids::llama_pcd_twin_ids(const llama_pcd_memory & memory) :
    first(memory.recr ? llama_pcd::n_seq_max(*memory.recr) : LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS),
    n_max(LLAMA_PCD_MAX_TWINS) {
    if (memory.recr) { // one for each of the context's sequences, and one id is for llama_pcd_states
        n_max = std::max(0, std::min({ LLAMA_PCD_MAX_TWINS, first, LLAMA_MAX_SEQ - 1 - first }));
    }
}

llama_pcd_twins::layout llama_pcd_twins::layout_of(const llama_pcd_memory & memory, const llama_ubatch & ubatch) const {
    layout res;
    for (const uint32_t entry : ubatch.data->batch_idxs) {
        const bool is_twin   = entry >= first;
        const bool rotated = is_twin && all[entry - first].rotated;

        res.misplaced   |= (res.n_twin > 0 && !is_twin) || (res.n_rotated > 0 && !rotated);
        res.n_twin      += is_twin;
        res.n_rotated += rotated;
    }
    res.misplaced |= res.n_twin > 0 && together && !memory.recr && ubatch.equal_seqs();
    return res;
}

//
// states of recurrent layers
//

// the rows of one tensor: a group of rows for each of the states that it can go back to by itself (n_rs_seq), and one for the present
static size_t copy_rows(const ggml_tensor * src, ggml_tensor * dst, size_t n_groups) {
    if (!src) {
        return 0;
    }
    const size_t n_src = ggml_nbytes(src)/n_groups;
    const size_t n_dst = ggml_nbytes(dst)/n_groups;

    std::vector<uint8_t> rows(n_src);
    for (size_t i = 0; i < n_groups; ++i) {
        ggml_backend_tensor_get(src, rows.data(), i*n_src, n_src);
        ggml_backend_tensor_set(dst, rows.data(), i*n_dst, n_src);
    }
    return ggml_nbytes(dst) - ggml_nbytes(src);
}

void llama_pcd_states::make() {
    if (!memory.recr) {
        return;
    }
    auto & cur = *memory.recr;

    const auto & lctx  = memory.lctx;
    const size_t n_old = llama_pcd::n_seq_max(cur);
    const size_t n_new = n_old + ids.n_max + 1;

    const auto first = std::find_if(cur.r_l.begin(), cur.r_l.end(), [](const auto * t) { return t != nullptr; });
    const bool any   = first != cur.r_l.end();

    const ggml_type type_r = any ? (*first)->type                         : GGML_TYPE_F32;
    const ggml_type type_s = any ? cur.s_l[first - cur.r_l.begin()]->type : GGML_TYPE_F32;

    try {
        llama_memory_recurrent wider(lctx.get_model(), type_r, type_s, lctx.get_cparams().offload_kqv, n_new, n_new, cur.n_rs_seq,
                [&](int32_t il) { return cur.r_l[il] != nullptr; });

        for (size_t il = 0; il < cur.r_l.size(); ++il) {
            for (const auto & [src, dst] : { std::pair(cur.r_l[il], wider.r_l[il]), std::pair(cur.s_l[il], wider.s_l[il]),
                                             std::pair(cur.p_l[il], wider.p_l[il]) }) {
                n_bytes += copy_rows(src, dst, 1 + cur.n_rs_seq);
            }
        }

        cur.cells .resize(n_new);
        cur.rs_idx.resize(n_new, 0);
        cur.size = n_new;
        llama_pcd::n_seq_max(cur) = n_new;

        std::swap(cur.r_l, wider.r_l);
        std::swap(cur.s_l, wider.s_l);
        std::swap(cur.p_l, wider.p_l);
        std::swap(llama_pcd::ctxs_bufs(cur), llama_pcd::ctxs_bufs(wider));
    } catch (const std::exception & e) {
        n_bytes = 0;
        throw std::runtime_error(format("the states of recurrent layers for %u twins cannot be kept (%s); use a smaller n_seq_max",
                ids.n_max, e.what()));
    }
}

void llama_pcd_states::copy(llama_seq_id from, llama_seq_id to) const {
    auto & recr = *memory.recr;

    recr.seq_cp(from, to, -1, -1);
    recr.set_rs_idx(to, recr.rs_idx[from]);
}

void llama_pcd_states::branch(llama_seq_id parent, llama_seq_id twin) const {
    if (memory.recr) {
        const auto it = std::find(saved.begin(), saved.end(), parent);
        copy(it == saved.end() ? parent : backup(it - saved.begin()), twin);
    }
}

void llama_pcd_states::save(const std::vector<llama_seq_id> & seqs) {
    if (memory.recr && seqs.size() <= ids.n_max) {
        saved = seqs;
        for (size_t i = 0; i < saved.size(); ++i) {
            copy(saved[i], backup(i));
        }
    }
}

bool llama_pcd_states::restore() const {
    for (size_t i = 0; i < saved.size(); ++i) {
        copy(backup(i), saved[i]);
    }
    return !saved.empty();
}

void llama_pcd_states::drop() {
    for (size_t i = 0; i < saved.size(); ++i) {
        memory.recr->seq_rm(backup(i), -1, -1);
    }
    saved.clear();
}
