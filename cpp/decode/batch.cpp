// Copies tokens with their embeddings, which a batch keeps in a buffer of its own, and walks a batch up to the first token that does
// not fit.

#include "decode/batch.h"
#include "llama-pcd.h"

#include <algorithm>
#include <bitset>

llama_seq_id llama_pcd_parent_of(const llama_batch_ext::token & token) {
    return *std::min_element(token.seq_ids.begin(), token.seq_ids.end());
}

llama_batch_ext llama_pcd_batch_like(const llama_batch_ext & batch) {
    return llama_batch_ext(batch.n_tokens_max + LLAMA_PCD_MAX_TWINS, batch.n_embd_inp, batch.n_embd_inp_enc,
            LLAMA_MAX_SEQ, batch.mem, batch.n_vocab, batch.n_pos_per_embd);
}

static void copy_embd(llama_batch_ext & dst, const llama_batch_ext & src, llama_batch_ext::token & token) {
    if (token.has_embd) {
        const auto first = src.embd.begin() + token.embd_off;
        token.embd_off = dst.embd.size();
        dst.embd.insert(dst.embd.end(), first, first + src.n_embd);
    }
}

llama_batch_ext llama_pcd_batch_part(const llama_batch_ext & batch, size_t i0, size_t i1) {
    llama_batch_ext res = llama_pcd_batch_like(batch);

    res.n_embd = batch.n_embd;
    res.tokens.assign(batch.tokens.begin() + i0, batch.tokens.begin() + i1);
    for (auto & token : res.tokens) {
        copy_embd(res, batch, token);
    }

    return res;
}

void llama_pcd_batch_add_twin(
        llama_batch_ext & dst, const llama_batch_ext & src, const llama_batch_ext::token & token, llama_seq_id twin) {
    llama_batch_ext::token res = token;

    copy_embd(dst, src, res);
    res.seq_ids = { twin };
    res.output  = true;

    dst.n_embd = src.n_embd;
    dst.tokens.push_back(res);
}

//
// parts
//

bool llama_pcd_parts::fits(const count & n, size_t n_room, bool together) const {
    const auto & cparams = core.pcd.lctx.get_cparams();

    if (n.n_twins == 0) {
        return true;
    }
    // find_slot gives away cells that are masked for the first new position of their sequence. No twin in the same micro-batch sees
    // them, but one that is placed in a later micro-batch than its token may.
    const size_t n_pass = core.memory.slides() ? cparams.n_ubatch : cparams.n_batch;

    if (!together) {
        return n.n_tokens <= n_pass && n.n_tokens + 1 <= n_room;
    }
    if (n.n_tokens + n.n_twins > std::min(n_pass, n_room) || n.n_rows + n.n_twins > cparams.n_outputs_max) {
        return false;
    }
    // twins are dealt out evenly: parts of one size share a graph
    const size_t n_parts = (rows.size() + core.ids.n_max - 1)/core.ids.n_max;

    return n.n_twins <= (rows.size() + n_parts - 1)/n_parts;
}

llama_pcd_part llama_pcd_parts::next(const llama_batch_ext & batch, size_t i0, bool together) const {
    const auto & memory = core.memory;
    const bool   embd   = core.pcd.lctx.get_cparams().embeddings;
    const size_t n_room = memory.n_room(2*batch.tokens.size());

    std::bitset<LLAMA_MAX_SEQ> seen; // sequences

    llama_pcd_part res = { i0, i0, rows.first_from(i0), rows.first_from(i0) };

    for (count n; res.i1 < batch.tokens.size() && res.fits; ++res.i1) {
        const auto & token = batch.tokens[res.i1];

        std::bitset<LLAMA_MAX_SEQ> own;
        for (const llama_seq_id s : token.seq_ids) {
            own.set(s);
        }

        const bool has_row  = res.r1 < rows.size() && rows.out_ids[res.r1] == (int32_t) res.i1;
        const bool has_twin = has_row && (together || rows.contrasts[res.r1].gamma > 1);

        n.n_tokens += 1;
        n.n_rows   += token.output || embd;
        n.n_twins  += has_twin;

        // states are kept for so many sequences, and a twin's is that before the part
        const bool has_state = !memory.recr || n.n_twins == 0 ||
            (!(has_twin && (seen & own).any()) && (seen | own).count() <= core.ids.n_max);

        if (!has_state || !fits(n, n_room, together)) {
            if (res.i1 > i0) {
                break;
            }
            res.fits = false;
        }
        seen |= own;
        res.r1 += has_row;
    }
    return res;
}
