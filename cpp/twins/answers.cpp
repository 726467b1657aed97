// Follows the positions of each sequence.

#include "twins/answers.h"

#include <algorithm>

void llama_pcd_answers::read(llama_seq_id seq_id, llama_pos pos, bool asked) {
    const auto it = all.find(seq_id);

    if (it != all.end()) {
        auto & cur = it->second;

        if (!cur.has_begun() && pos < cur.first) {
            return; // text before the position that was named
        }
        const bool goes_on = cur.has_begun() ? pos > cur.first && pos <= cur.last + 1 : pos == cur.first;
        if (asked && goes_on) {
            cur.last = pos;
            return;
        }
        all.erase(it);
    }
    if (asked) {
        all[seq_id] = { pos, pos, pos, INFINITY };
    }
}

void llama_pcd_answers::begin(llama_seq_id seq_id, llama_pos pos) {
    all[seq_id] = { pos, pos - 1, pos, INFINITY };
}

bool llama_pcd_answers::is_first(llama_seq_id seq_id, llama_pos pos) const {
    const auto it = all.find(seq_id);
    return it != all.end() && it->second.has_begun() && pos == it->second.first;
}

bool llama_pcd_answers::is_sure(llama_seq_id seq_id, llama_pos pos, const llama_pcd_seq & contrast) const {
    const auto it = all.find(seq_id);

    return it != all.end() && it->second.has_begun() && pos > it->second.first && contrast.min_first_entropy > 0.0f &&
        (contrast.is_early(it->second.begun) || it->second.entropy < contrast.min_first_entropy);
}

void llama_pcd_answers::remove(llama_seq_id seq_id) {
    if (seq_id < 0) {
        all.clear();
    } else {
        all.erase(seq_id);
    }
}

void llama_pcd_answers::copy(llama_seq_id src, llama_seq_id dst) {
    const auto it = all.find(src);
    if (it == all.end()) {
        all.erase(dst);
    } else {
        const answer cur = it->second;
        all[dst] = cur;
    }
}

void llama_pcd_answers::keep(llama_seq_id seq_id) {
    for (auto it = all.begin(); it != all.end(); ) {
        it = it->first == seq_id ? std::next(it) : all.erase(it);
    }
}

void llama_pcd_answers::move(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta, int d) {
    const auto it = all.find(seq_id);
    if (it == all.end()) {
        return;
    }
    auto & cur = it->second;

    const auto moved = [&](llama_pos pos) { return pos >= p0 && (p1 < 0 || pos < p1) ? (pos + delta)/d : pos; };

    if (!cur.has_begun()) { // where it is named to begin, right behind the text that moves
        cur.begun = cur.first = cur.first > 0 ? moved(cur.first - 1) + 1 : cur.first;
        cur.last  = cur.first - 1;
        return;
    }
    const llama_pos last = moved(cur.last);
    if (cur.first < p0 && last != cur.last) { // what is between may have been removed, the first token with it
        cur.first = std::min(cur.first, (p0 + delta)/d);
    } else {
        cur.first = moved(cur.first);
    }
    cur.last = last;
}
