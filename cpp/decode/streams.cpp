// Evaluates tokens and their twins part by part, and catches up on twins that are missing.

#include "decode/streams.h"

#include "llama-impl.h"

#include <algorithm>

bool llama_pcd_streams::has_twins(const llama_batch_ext & batch) const {
    return std::any_of(batch.tokens.begin(), batch.tokens.end(), [&](const auto & token) {
        return has_twins(llama_pcd_parent_of(token));
    });
}

llama_pcd_fallback llama_pcd_streams::too_late(const llama_batch_ext & batch) const {
    if (core.memory.slides()) {
        return LLAMA_PCD_FALLBACK_SLIDES;
    }
    return batch.tokens[0].id == LLAMA_TOKEN_NULL ? LLAMA_PCD_FALLBACK_PICTURE : LLAMA_PCD_FALLBACK_NONE;
}

llama_pcd_outcome llama_pcd_streams::decode(const llama_batch_ext & batch) {
    const size_t n_tokens = batch.tokens.size();

    llama_pcd_outcome res = catch_up_before(batch);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }

    llama_pcd_outputs all;

    size_t done  = 0;
    size_t n_max = SIZE_MAX;

    while (done < n_tokens && res == llama_pcd_outcome::DONE) {
        const size_t end = end_of_part(batch, done, n_max);

        if (end == done) {
            const auto & cparams = core.pcd.lctx.get_cparams();
            pass.note_fallback(std::min(cparams.n_ubatch, cparams.n_outputs_max) < 2 ?
                LLAMA_PCD_FALLBACK_NARROW : LLAMA_PCD_FALLBACK_NO_ROOM);
        }
        res = end > done ? decode_both(batch, done, end, all) : decode_in_turn(batch, done, all);
        if (res == llama_pcd_outcome::DONE) {
            done = std::max(end, done + 1);
        } else if (res == llama_pcd_outcome::NO_ROOM && end > done && core.pcd.lctx.get_cparams().causal_attn) {
            n_max = (end - done)/2; // no room beside the twins in a sliding-window cache: fewer, in the end in turn
            res   = llama_pcd_outcome::DONE;
        }
    }
    if (res != llama_pcd_outcome::DONE) {
        pass.take_back(batch, done);
        return res;
    }

    return all.put(core.pcd.lctx) ? llama_pcd_outcome::DONE : llama_pcd_outcome::BROKEN;
}

llama_pcd_outcome llama_pcd_streams::catch_up_before(const llama_batch_ext & batch) {
    std::map<llama_seq_id, llama_pos> begin; // of each sequence in this batch
    for (const auto & token : batch.tokens) {
        begin.emplace(llama_pcd_parent_of(token), token.pos[0]);
    }
    for (const auto & [parent, pos] : begin) {
        if (has_twins(parent)) {
            const auto res = catch_up(batch, parent, pos, {});
            if (res != llama_pcd_outcome::DONE) {
                return res;
            }
        }
    }
    return llama_pcd_outcome::DONE;
}

size_t llama_pcd_streams::end_of_part(const llama_batch_ext & batch, size_t i0, size_t n_max) const {
    const auto & cparams = core.pcd.lctx.get_cparams();
    const size_t n_cells = core.memory.n_room(cparams.n_ubatch);

    std::vector<llama_seq_id> seen;

    size_t n      = 0;
    size_t n_rows = 0;
    size_t i      = i0;

    for (; i < batch.tokens.size(); ++i) {
        const auto & token  = batch.tokens[i];
        const auto   parent = llama_pcd_parent_of(token);
        const size_t n_cur  = has_twins(parent) ? 2 : 1;

        if (std::find(seen.begin(), seen.end(), parent) == seen.end()) {
            seen.push_back(parent);
        }
        n      += n_cur;
        n_rows += token.output || cparams.embeddings ? n_cur : 0;

        if (i - i0 >= n_max || n > n_cells || n_rows > cparams.n_outputs_max || seen.size() > LLAMA_PCD_MAX_TWINS) {
            break;
        }
    }

    return i;
}

llama_pcd_outcome llama_pcd_streams::decode_both(const llama_batch_ext & batch, size_t i0, size_t i1, llama_pcd_outputs & all) {
    auto & parents = core.twins.parents;

    llama_batch_ext both = llama_pcd_batch_part(batch, i0, i1);

    std::vector<std::pair<size_t, size_t>> of_row; // row, entry of the twin

    parents.clear();
    for (size_t i = i0; i < i1; ++i) {
        const auto & token  = batch.tokens[i];
        const auto   parent = llama_pcd_parent_of(token);
        if (!has_twins(parent)) {
            continue;
        }

        const auto at = std::find(parents.begin(), parents.end(), parent);
        const auto k  = (llama_seq_id) (at - parents.begin());
        if (at == parents.end()) {
            parents.push_back(parent);
        }

        const size_t row    = rows.find(i);
        const bool   output = row < rows.size();
        if (output) {
            of_row.push_back({ row, both.tokens.size() });
        }
        llama_pcd_batch_add_twin(both, batch, token, core.twins.seq_first + k, output);
    }

    const auto res = pass.run(both, true);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }
    if (core.twins.misplaced) {
        pass.take_back(llama_pcd_batch_part(batch, i0, i1), i1 - i0);
        return llama_pcd_outcome::NO_ROOM;
    }

    llama_pcd::n_queued_tokens(core.pcd.lctx) -= both.tokens.size() - (i1 - i0); // twins are not the caller's tokens
    all.take(core.pcd.lctx, i0, i1);

    for (const auto & [row, entry] : of_row) {
        rows.take_standard    (row, rows.out_ids[row] - i0);
        rows.take_over_rotated(row, entry);
    }

    return llama_pcd_outcome::DONE;
}

llama_pcd_outcome llama_pcd_streams::decode_twin(const llama_batch_ext & batch, size_t i, size_t row) {
    const auto & token  = batch.tokens[i];
    const bool   output = row < rows.size();

    llama_batch_ext alone = llama_pcd_batch_like(batch);

    core.twins.parents = { llama_pcd_parent_of(token) };
    llama_pcd_batch_add_twin(alone, batch, token, core.twins.seq_first, output);

    const auto res = pass.run(alone);
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }
    pass.finish_twins();
    if (output) {
        rows.take_over_rotated(row, 0);
    }
    return res;
}

// the twin first, in the cell that its token takes after it
llama_pcd_outcome llama_pcd_streams::decode_in_turn(const llama_batch_ext & batch, size_t i, llama_pcd_outputs & all) {
    const auto & token  = batch.tokens[i];
    const auto   parent = llama_pcd_parent_of(token);
    const size_t row    = rows.find(i);

    std::vector<int32_t> own; // the twin's cell in each cache

    if (has_twins(parent)) {
        const auto res = decode_twin(batch, i, row);
        if (res != llama_pcd_outcome::DONE) {
            return res;
        }
        for (const auto & cells : core.twins.cells) {
            own.push_back(cells[0]);
        }
    }

    const auto res = pass.run(llama_pcd_batch_part(batch, i, i + 1));
    if (res != llama_pcd_outcome::DONE) {
        return res;
    }
    all.take(core.pcd.lctx, i, i + 1);
    if (row < rows.size()) {
        rows.take_standard(row, 0);
    }

    for (size_t k = 0; k < own.size(); ++k) {
        auto &       cur   = core.second.kvs[k];
        const auto & cells = llama_pcd::cells(*cur.kv);

        cur.stale.set(own[k], !cells.seq_has(own[k], parent) || cells.pos_get(own[k]) != token.pos[0]);
    }

    return llama_pcd_outcome::DONE;
}

//
// what is missing
//

bool llama_pcd_streams::find_missing(llama_seq_id parent, llama_pos end, tokens_at & res) const {
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

llama_pcd_outcome llama_pcd_streams::catch_up(const llama_batch_ext & batch, llama_seq_id parent, llama_pos end, const rows_at & wanted) {
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
        core.twins.parents = { parent };

        std::vector<std::pair<size_t, size_t>> of_row;

        int64_t n_late = 0;

        // a run of neighbours: upstream refuses gaps
        for (llama_pos p = it->first; it != missing.end() && it->first == p &&
                alone.tokens.size() < n_max && of_row.size() < n_max_rows; ++it, ++p) {
            llama_batch_ext::token token;
            token.id  = it->second;
            token.pos = { p, p, p, 0 };

            const auto row = wanted.find(p);
            if (row != wanted.end()) {
                of_row.push_back({ row->second, alone.tokens.size() });
            }
            llama_pcd_batch_add_twin(alone, batch, token, core.twins.seq_first, row != wanted.end());
            n_late += p < now;
        }

        const auto res = pass.run(alone);
        if (res != llama_pcd_outcome::DONE) {
            return res;
        }

        pass.finish_twins();

        for (const auto & [row, entry] : of_row) {
            rows.take_over_rotated(row, entry);
        }
        core.stats.n_caught_up += n_late;
    }

    return llama_pcd_outcome::DONE;
}

llama_pcd_outcome llama_pcd_streams::catch_up_after(const llama_batch_ext & batch, const std::vector<size_t> & todo) {
    std::map<llama_seq_id, llama_pos> end; // of each sequence in this batch
    std::map<llama_seq_id, rows_at>   wanted;

    for (const auto & token : batch.tokens) {
        const auto parent = llama_pcd_parent_of(token);
        if (has_twins(parent)) {
            end[parent] = token.pos[0] + 1;
        }
    }
    for (const size_t row : todo) {
        const auto & token = batch.tokens[rows.out_ids[row]];
        wanted[llama_pcd_parent_of(token)][token.pos[0]] = row;
    }
    for (const auto & [parent, pos] : end) {
        const auto res = catch_up(batch, parent, pos, wanted[parent]);
        if (res != llama_pcd_outcome::DONE) {
            return res;
        }
    }

    return llama_pcd_outcome::DONE;
}
