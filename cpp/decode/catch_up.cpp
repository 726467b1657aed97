// cache = separate: finds out which twins are missing, and evaluates them.

#include "decode/catch_up.h"

#include "llama-impl.h"

#include <algorithm>

llama_pcd_fallback llama_pcd_catch_up::too_late(const llama_batch_ext & batch) const {
    if (core.memory.slides()) {
        return LLAMA_PCD_FALLBACK_SLIDES;
    }
    return batch.tokens[0].id == LLAMA_TOKEN_NULL ? LLAMA_PCD_FALLBACK_PICTURE : LLAMA_PCD_FALLBACK_NONE;
}

llama_pcd_outcome llama_pcd_catch_up::before(const llama_pcd_request & req) {
    std::map<llama_seq_id, llama_pos> begin; // of each sequence in this batch
    for (size_t i = 0; i < req.size(); ++i) {
        if (req.has_twin[i]) {
            begin.emplace(llama_pcd_parent_of(req.batch.tokens[i]), req.batch.tokens[i].pos[0]);
        }
    }
    for (const auto & [parent, pos] : begin) {
        const auto res = catch_up(req.batch, parent, pos, {});
        if (res != llama_pcd_outcome::DONE) {
            return res;
        }
    }
    return llama_pcd_outcome::DONE;
}

//
// what is missing
//

bool llama_pcd_catch_up::find_missing(llama_seq_id parent, llama_pos end, tokens_at & res) const {
    for (auto & cur : core.second.kvs) {
        const auto & cells = llama_pcd::cells(*cur.kv);

        for (const uint32_t j : cur.stale.list(cells)) {
            if (!cells.seq_has(j, parent) || cells.pos_get(j) >= end ||
                    llama_pcd::is_masked(*cur.kv, cells.pos_get(j), end - 1)) {
                continue;
            }
            const llama_token token = cells.ext_get(j).tok;
            if (token == LLAMA_TOKEN_NULL) {
                LLAMA_LOG_ERROR("%s: cache = separate has to evaluate position %d of sequence %d again, but does not know its token "
                        "(a state was loaded, or it is a part of an image); evaluate the prompt again\n",
                        __func__, cells.pos_get(j), parent);
                return false;
            }
            res[cells.pos_get(j)] = token;
        }
    }

    const auto & memory = core.memory;
    if (!res.empty() && (!memory.has_all_before(parent, res.begin()->first, end) ||
            memory.forgets(std::min<size_t>(res.size(), memory.n_room(core.pcd.lctx.n_ubatch()))))) {
        LLAMA_LOG_ERROR("%s: cache = separate has to evaluate position %d of sequence %d again, but sliding-window layers may have "
                "forgotten what is before it; evaluate the prompt again (in a context with swa_full = true, if it is to happen later)\n",
                __func__, res.begin()->first, parent);
        return false;
    }
    return true;
}

static llama_pos begin_of(const llama_batch_ext & batch, llama_seq_id parent) {
    const auto it = std::find_if(batch.tokens.begin(), batch.tokens.end(), [&](const auto & token) {
        return llama_pcd_parent_of(token) == parent;
    });
    return it == batch.tokens.end() ? 0 : it->pos[0];
}

llama_pcd_outcome llama_pcd_catch_up::catch_up(const llama_batch_ext & batch, llama_seq_id parent, llama_pos end, const rows_at & wanted) {
    const auto & cparams = core.pcd.lctx.get_cparams();

    tokens_at missing;
    if (!find_missing(parent, end, missing)) {
        return llama_pcd_outcome::INVALID;
    }

    const size_t    n_max_rows = cparams.n_outputs_max;
    const llama_pos now        = begin_of(batch, parent); // what is before it is evaluated later than its token

    for (auto it = missing.begin(); it != missing.end(); ) {
        const size_t n_max = std::min<size_t>(core.memory.n_room(cparams.n_ubatch), cparams.embeddings ? n_max_rows : SIZE_MAX);
        if (n_max == 0) {
            return llama_pcd_outcome::NO_ROOM;
        }

        llama_batch_ext alone = llama_pcd_batch_like(batch);
        llama_pcd_twins twins;

        size_t  n_rows = 0;
        int64_t n_late = 0;

        // a run of neighbours: upstream refuses gaps
        for (llama_pos p = it->first; it != missing.end() && it->first == p &&
                alone.tokens.size() < n_max && n_rows < n_max_rows; ++it, ++p) {
            llama_batch_ext::token token;
            token.id  = it->second;
            token.pos = { p, p, p, 0 };

            const auto row = wanted.find(p);
            pass.add_twin(alone, twins, batch, token, parent, -1, row == wanted.end() ? llama_pcd_twin::NO_ROW : row->second);
            n_rows += row != wanted.end();
            n_late += p < now;
        }

        const auto res = pass.run_alone(alone, twins);
        if (res != llama_pcd_outcome::DONE) {
            return res;
        }
        core.stats.n_caught_up += n_late;
    }

    return llama_pcd_outcome::DONE;
}

llama_pcd_outcome llama_pcd_catch_up::after(const llama_pcd_request & req, const std::vector<size_t> & todo) {
    std::map<llama_seq_id, llama_pos> end; // of each sequence in this batch
    std::map<llama_seq_id, rows_at>   wanted;

    for (size_t i = 0; i < req.size(); ++i) {
        if (req.has_twin[i]) {
            end[llama_pcd_parent_of(req.batch.tokens[i])] = req.batch.tokens[i].pos[0] + 1;
        }
    }
    for (const size_t row : todo) {
        const auto & token = req.batch.tokens[rows.out_ids[row]];
        wanted[llama_pcd_parent_of(token)][token.pos[0]] = row;
    }
    for (const auto & [parent, pos] : end) {
        const auto res = catch_up(req.batch, parent, pos, wanted[parent]);
        if (res != llama_pcd_outcome::DONE) {
            return res;
        }
    }

    return llama_pcd_outcome::DONE;
}
