// cache = separate: the over-rotated evaluation as a second stream of tokens, with keys and values of its own.
//
// Every token has a twin that attends to the twins before it. A twin takes a cell while it is evaluated, like any other,
// but its keys and values go to the second ones of its token's cell. So a cell holds both streams, and whatever happens
// to cells (seq_rm, seq_cp, reuse of a prefix) happens to both.
//
// Which cells hold a second stream is written down (llama_pcd_kv::fresh). Where it is missing (decoded with PCD off, a
// state was loaded, other settings), it is evaluated from the tokens in the cells before it is needed.

#include "llama-pcd-impl.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <set>

int llama_pcd::decode_streams(const llama_batch_ext & batch) {
    const size_t n_tokens = batch.tokens.size();

    std::map<llama_seq_id, llama_pos> begin; // of each sequence in this batch
    for (const auto & token : batch.tokens) {
        begin.emplace(llama_pcd_parent_of(token), token.pos[0]);
    }
    for (const auto & [parent, pos] : begin) {
        if (contrast_of(parent).on) {
            const int ret = catch_up(batch, parent, pos, {});
            if (ret != 0) {
                return ret;
            }
        }
    }

    outputs all;

    int    ret   = 0;
    size_t done  = 0;
    size_t n_max = SIZE_MAX;

    while (done < n_tokens && ret == 0) {
        const size_t end = end_of_part(batch, done, n_max);

        ret = end > done ? decode_both(batch, done, end, all) : decode_in_turn(batch, done, all);
        if (ret == 0) {
            done = std::max(end, done + 1);
        } else if (ret == 1 && end > done && lctx.cparams.causal_attn) {
            n_max = (end - done)/2; // no room beside the twins in a sliding-window cache: fewer, in the end in turn
            ret   = 0;
        }
    }
    if (ret != 0) {
        take_back(batch, done);
        return ret;
    }

    return put_outputs(all);
}

// at most n_max tokens [i0, end) and their twins are evaluated at once; end == i0: there is no room for a token beside its twin
size_t llama_pcd::end_of_part(const llama_batch_ext & batch, size_t i0, size_t n_max) const {
    const size_t n_cells = std::min(lctx.cparams.n_ubatch, n_room());

    std::vector<llama_seq_id> seen;

    size_t n      = 0;
    size_t n_rows = 0;
    size_t i      = i0;

    for (; i < batch.tokens.size(); ++i) {
        const auto & token  = batch.tokens[i];
        const auto   parent = llama_pcd_parent_of(token);
        const size_t n_cur  = contrast_of(parent).on ? 2 : 1;

        if (std::find(seen.begin(), seen.end(), parent) == seen.end()) {
            seen.push_back(parent);
        }
        n      += n_cur;
        n_rows += token.output || lctx.cparams.embeddings ? n_cur : 0;

        if (i - i0 >= n_max || n > n_cells || n_rows > lctx.cparams.n_outputs_max || seen.size() > LLAMA_PCD_MAX_TWINS) {
            break;
        }
    }

    return i;
}

int llama_pcd::decode_both(const llama_batch_ext & batch, size_t i0, size_t i1, outputs & all) {
    llama_batch_ext both = part_of(batch, i0, i1);

    std::vector<std::pair<size_t, size_t>> of_row; // row, entry of the twin

    parents.clear();
    for (size_t i = i0; i < i1; ++i) {
        const auto & token  = batch.tokens[i];
        const auto   parent = llama_pcd_parent_of(token);
        if (!contrast_of(parent).on) {
            continue;
        }

        const auto at = std::find(parents.begin(), parents.end(), parent);
        const auto k  = (llama_seq_id) (at - parents.begin());
        if (at == parents.end()) {
            parents.push_back(parent);
        }

        const auto row    = std::lower_bound(rows.out_ids.begin(), rows.out_ids.end(), (int32_t) i);
        const bool output = row != rows.out_ids.end() && *row == (int32_t) i;
        if (output) {
            of_row.push_back({ row - rows.out_ids.begin(), both.tokens.size() });
        }
        add_twin(both, batch, token, seq_first + k, output);
    }

    const int ret = decode_nested(both, true);
    if (ret != 0) {
        return ret;
    }
    if (misplaced) {
        take_back(part_of(batch, i0, i1), i1 - i0);
        return 1;
    }

    lctx.n_queued_tokens -= both.tokens.size() - (i1 - i0); // twins are not the caller's tokens
    take_outputs(all, i0, i1);

    for (const auto & [row, entry] : of_row) {
        copy_row(rows.standard,     row, rows.out_ids[row] - i0);
        copy_row(rows.over_rotated, row, entry);
    }

    return 0;
}

// the twin first, in the cell that its token takes after it
int llama_pcd::decode_in_turn(const llama_batch_ext & batch, size_t i, outputs & all) {
    const auto & token  = batch.tokens[i];
    const auto   parent = llama_pcd_parent_of(token);
    const bool   twin   = contrast_of(parent).on;

    const auto   found = std::lower_bound(rows.out_ids.begin(), rows.out_ids.end(), (int32_t) i);
    const bool   output = found != rows.out_ids.end() && *found == (int32_t) i;
    const size_t row    = found - rows.out_ids.begin();

    std::vector<int32_t> own;

    if (twin) {
        llama_batch_ext alone = batch_like(batch);

        parents = { parent };
        add_twin(alone, batch, token, seq_first, output);

        const int ret = decode_nested(alone);
        if (ret != 0) {
            return ret;
        }
        finish_twins();
        if (output) {
            copy_row(rows.over_rotated, row, 0);
        }
        for (const auto & cur : kvs) {
            own.push_back(cur.twin_cells[0]);
        }
    }

    const int ret = decode_nested(part_of(batch, i, i + 1));
    if (ret != 0) {
        return ret;
    }
    take_outputs(all, i, i + 1);
    if (output) {
        copy_row(rows.standard, row, 0);
    }

    for (size_t k = 0; k < own.size(); ++k) {
        const auto & cells = kvs[k].kv->v_cells[0];

        kvs[k].fresh[own[k]] = cells.seq_has(own[k], parent) && cells.pos_get(own[k]) == token.pos[0];
    }

    return 0;
}

// whether sliding-window layers still have what the twins of positions [pos, end) are to see
bool llama_pcd::has_all_before(llama_seq_id parent, llama_pos pos, llama_pos end) const {
    std::set<llama_pos> all;
    for (const auto & cur : kvs) {
        for (uint32_t j = 0; j < cur.kv->v_cells[0].used_max_p1(); ++j) {
            const auto & cells = cur.kv->v_cells[0];
            if (!cells.is_empty(j) && cells.seq_has(j, parent) && cells.pos_get(j) < end) {
                all.insert(cells.pos_get(j));
            }
        }
    }
    for (const auto & cur : kvs) {
        std::set<llama_pos> missing = all;
        for (uint32_t j = 0; j < cur.kv->v_cells[0].used_max_p1(); ++j) {
            const auto & cells = cur.kv->v_cells[0];
            if (!cells.is_empty(j) && cells.seq_has(j, parent)) {
                missing.erase(cells.pos_get(j));
            }
        }
        for (const llama_pos p : missing) {
            if (!llama_hparams::is_masked_swa(cur.kv->n_swa, cur.kv->swa_type, p, pos)) {
                return false;
            }
        }
    }
    return true;
}

// evaluate the twins that a sequence misses before position `end`; those in `wanted` also give their row
int llama_pcd::catch_up(const llama_batch_ext & batch, llama_seq_id parent, llama_pos end, const std::map<llama_pos, size_t> & wanted) {
    std::map<llama_pos, llama_token> missing;

    for (const auto & cur : kvs) {
        const auto & cells = cur.kv->v_cells[0];

        for (uint32_t j = 0; j < cells.used_max_p1(); ++j) {
            if (cur.fresh[j] || cells.is_empty(j) || !cells.seq_has(j, parent) || cells.pos_get(j) >= end ||
                    llama_hparams::is_masked_swa(cur.kv->n_swa, cur.kv->swa_type, cells.pos_get(j), end - 1)) {
                continue;
            }
            const llama_token token = cells.ext_get(j).tok;
            if (token == LLAMA_TOKEN_NULL) {
                LLAMA_LOG_ERROR("%s: cache = separate has to evaluate position %d of sequence %d again, but does not know its token "
                        "(a state was loaded, or it is a part of an image); evaluate the prompt again\n", __func__, cells.pos_get(j), parent);
                return -1;
            }
            missing[cells.pos_get(j)] = token;
        }
    }
    if (!missing.empty() && (!has_all_before(parent, missing.begin()->first, end) ||
            forgets(std::min<size_t>({ missing.size(), lctx.cparams.n_ubatch, n_room() })))) {
        LLAMA_LOG_ERROR("%s: cache = separate has to evaluate position %d of sequence %d again, but sliding-window layers may have "
                "forgotten what is before it; evaluate the prompt again (in a context with swa_full = true, if it is to happen later)\n",
                __func__, missing.begin()->first, parent);
        return -1;
    }

    const size_t n_max_rows = lctx.cparams.n_outputs_max;

    for (auto it = missing.begin(); it != missing.end(); ) {
        const size_t n_max = std::min<size_t>({ lctx.cparams.n_ubatch, n_room(), lctx.cparams.embeddings ? n_max_rows : SIZE_MAX });
        if (n_max == 0) {
            return 1;
        }

        llama_batch_ext twins = batch_like(batch);
        parents = { parent };

        std::vector<std::pair<size_t, size_t>> of_row;

        // a run of neighbours: upstream refuses gaps
        for (llama_pos p = it->first; it != missing.end() && it->first == p && twins.tokens.size() < n_max && of_row.size() < n_max_rows; ++it, ++p) {
            llama_batch_ext::token token;
            token.id  = it->second;
            token.pos = { p, p, p, 0 };

            const auto row = wanted.find(p);
            if (row != wanted.end()) {
                of_row.push_back({ row->second, twins.tokens.size() });
            }
            add_twin(twins, batch, token, seq_first, row != wanted.end());
        }

        const int ret = decode_nested(twins);
        if (ret != 0) {
            return ret;
        }

        finish_twins();

        for (const auto & [row, entry] : of_row) {
            copy_row(rows.over_rotated, row, entry);
        }
        stats.n_caught_up += twins.tokens.size() - of_row.size();
    }

    return 0;
}

int llama_pcd::catch_up_rows(const llama_batch_ext & batch, const std::vector<size_t> & todo) {
    std::map<llama_seq_id, std::map<llama_pos, size_t>> wanted;

    for (const size_t row : todo) {
        const auto & token = batch.tokens[rows.out_ids[row]];
        wanted[llama_pcd_parent_of(token)][token.pos[0]] = row;
    }
    for (const auto & [parent, at] : wanted) {
        const int ret = catch_up(batch, parent, at.rbegin()->first + 1, at);
        if (ret != 0) {
            return ret;
        }
    }

    return 0;
}
