// Follows the positions of each sequence.

#include "llama-pcd-answers.h"

void llama_pcd_answers::read(llama_seq_id seq_id, llama_pos pos, bool asked, bool moved) {
    const auto it = all.find(seq_id);

    if (it != all.end()) {
        auto & cur = it->second;

        if (!cur.has_begun() && pos < cur.first) {
            return; // text before the position that was named
        }
        if (asked && moved && cur.has_begun() && pos <= cur.last) { // a context shift: the same text, further to the front
            cur.first -= cur.last + 1 - pos;
            cur.last   = pos - 1;
        }
        const bool goes_on = cur.has_begun() ? pos > cur.first && pos <= cur.last + 1 : pos == cur.first;
        if (asked && goes_on) {
            cur.last = pos;
            return;
        }
        all.erase(it);
    }
    if (asked) {
        all[seq_id] = { pos, pos, INFINITY };
    }
}

void llama_pcd_answers::begin(llama_seq_id seq_id, llama_pos pos) {
    all[seq_id] = { pos, pos - 1, INFINITY };
}

llama_pos llama_pcd_answers::first_of(llama_seq_id seq_id, llama_pos pos) const {
    const auto it = all.find(seq_id);
    return it != all.end() && it->second.has_begun() && pos >= it->second.first ? it->second.first : -1;
}

bool llama_pcd_answers::is_sure(llama_seq_id seq_id, llama_pos pos, const llama_pcd_seq & contrast) const {
    const llama_pos first = first_of(seq_id, pos);

    return first >= 0 && pos > first && contrast.min_first_entropy > 0.0f &&
        (contrast.is_early(first) || all.at(seq_id).entropy < contrast.min_first_entropy);
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
