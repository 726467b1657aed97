// Decodes with twins in the batch, and never leaves one behind: batches with twins, which copy tokens with their embeddings, and passes.

#include "decode/decode.h"

#include "llama-impl.h"

#include <algorithm>
#include <set>

//
// batches
//

llama_seq_id llama_pcd_parent_of(const llama_batch_ext::token & token) {
    return *std::min_element(token.seq_ids.begin(), token.seq_ids.end());
}

// an empty batch for the same context, with room for twins
static llama_batch_ext batch_like(const llama_batch_ext & batch) {
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
    llama_batch_ext res = batch_like(batch);

    res.n_embd = batch.n_embd;
    res.tokens.assign(batch.tokens.begin() + i0, batch.tokens.begin() + i1);
    for (auto & token : res.tokens) {
        copy_embd(res, batch, token);
    }

    return res;
}

llama_pcd_twins llama_pcd_decoder::add_twins(
        llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, std::vector<size_t> which) const {
    llama_pcd_twins res;
    res.first    = dst.tokens.size();
    res.together = res.first > 0;

    std::stable_partition(which.begin(), which.end(), [&](size_t row) {
        return !llama_pcd_settings::rotates(rows.all[row].setting);
    });
    for (const size_t row : which) {
        const auto & setting = rows.all[row].setting;
        const auto & token   = src.tokens[rows.all[row].id];

        llama_pcd_twin twin = {};
        twin.seq_id    = core.ids.first + (llama_seq_id) res.all.size();
        twin.parent    = llama_pcd_parent_of(token);
        twin.token     = res.together ? rows.all[row].id - (int32_t) i0 : -1;
        twin.row       = row;
        twin.rotated   = llama_pcd_settings::rotates(setting);
        twin.window    = setting.window;
        twin.n_sink    = setting.n_sink;

        core.states.branch(twin.parent, twin.seq_id);
        res.all.push_back(twin);

        llama_batch_ext::token added = token;
        copy_embd(dst, src, added);
        added.seq_ids = { twin.seq_id };
        added.output  = true;
        dst.tokens.push_back(added);
    }
    dst.n_embd = src.n_embd;
    return res;
}

//
// passes
//

llama_pcd_decoder::saved_states::saved_states(llama_pcd_states & states, const llama_batch_ext & tokens) : states(states) {
    std::set<llama_seq_id> seqs;
    for (const auto & token : tokens.tokens) {
        seqs.insert(token.seq_ids.begin(), token.seq_ids.end());
    }
    states.save({ seqs.begin(), seqs.end() });
}

llama_pcd_outcome llama_pcd_decoder::run(const llama_batch_ext & batch, llama_pcd_twins & twins) {
    struct guard {
        guard(llama_pcd_core & core, llama_pcd_twins & twins) : core(core) { core.twins = &twins; }
        ~guard() {
            for (const auto & twin : core.twins->all) {
                core.memory.remove(twin.seq_id);
            }
            core.twins = nullptr;
        }

        llama_pcd_core & core;
    } const in_flight(core, twins);

    // twins alone have graphs of their own, which take turns with their tokens'
    const bool alone = !twins.together && batch.tokens.size() <= LLAMA_PCD_MAX_TWINS;

    // a micro-batch of at most one token and its twin is no prompt: it runs with the threads for generation
    const bool is_step = std::max(twins.all.size(), batch.tokens.size() - twins.all.size()) <= 1;

    auto & cparams = llama_pcd::cparams(core.pcd.lctx);
    auto & pool    = llama_pcd::threadpool_batch(core.pcd.lctx);

    const llama_pcd_while step_threads(cparams.n_threads_batch, is_step ? cparams.n_threads : cparams.n_threads_batch);
    const llama_pcd_while step_pool(pool, is_step ? llama_pcd::threadpool(core.pcd.lctx) : pool);

    return (llama_pcd_outcome) core.pcd.decode_plain(batch, alone);
}

llama_pcd_outcome llama_pcd_decoder::run_alone(const llama_batch_ext & batch, const std::vector<size_t> & which) {
    llama_batch_ext alone = batch_like(batch);
    llama_pcd_twins twins = add_twins(alone, batch, 0, which);

    const auto res = run(alone, twins);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }
    llama_pcd::n_queued_tokens(core.pcd.lctx) = 0; // they are not the caller's tokens
    llama_pcd::outputs::wait(core.pcd.lctx);
    rows.take_local(twins);

    return res;
}

void llama_pcd_decoder::take_back(const llama_batch_ext & batch, size_t n) {
    if (core.memory.recr && !core.states.restore()) {
        return;
    }
    for (size_t i = 0; i < n; ++i) {
        for (llama_seq_id s : batch.tokens[i].seq_ids) {
            for (auto * kv : core.memory.kvs) {
                kv->seq_rm(s, batch.tokens[i].pos[0], -1);
            }
        }
    }
}

const char * llama_pcd_fallback_text(int32_t reason) {
    switch (reason) {
        case LLAMA_PCD_FALLBACK_NO_ROOM:
            return "no free cells for twins beside their tokens, so each twin is evaluated before its token; use a larger n_ctx";
        case LLAMA_PCD_FALLBACK_NARROW:
            return "no room for a token and its twin in one pass, so one is evaluated after the other; use a larger n_batch and n_ubatch";
        case LLAMA_PCD_FALLBACK_SLIDES:
            return "sliding-window layers forget what a twin would see behind its token, or deal the batch out in an order that twins "
                "cannot be in, so each twin is evaluated before its token; use swa_full = true";
        default:
            return "";
    }
}

void llama_pcd_decoder::note_fallback(llama_pcd_fallback reason) {
    core.stats.n_fallbacks++;
    core.stats.last_fallback = reason;

    const bool again = noted & (1u << reason);
    noted |= 1u << reason;

    llama_log_internal(again ? GGML_LOG_LEVEL_DEBUG : GGML_LOG_LEVEL_WARN, "PCD: %s%s\n",
            llama_pcd_fallback_text(reason), again ? "" : " (said once; llama_pcd_stats.n_fallbacks counts on)");
}
