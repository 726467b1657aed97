// Copies tokens with their embeddings, which a batch keeps in a buffer of its own.

#include "upstream/batch.h"
#include "llama-pcd.h"

#include <algorithm>

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
        llama_batch_ext & dst, const llama_batch_ext & src, const llama_batch_ext::token & token, llama_seq_id twin, bool output) {
    llama_batch_ext::token res = token;

    copy_embd(dst, src, res);
    res.seq_ids = { twin };
    res.output  = output;

    dst.n_embd = src.n_embd;
    dst.tokens.push_back(res);
}
