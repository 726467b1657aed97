// How much attention tokens pay to the positions before them: in the graph of their batch, by whatever it computes attention
// (graph/graph.cpp). pypcd/engine/_attention.py does the same from outside of a context.

#include "context/context.h"

#include <algorithm>
#include <numeric>

static constexpr int32_t N_TOKENS = 64; // that are evaluated at once: a number for each head, token and cell is in memory
static constexpr int32_t N_NODES  = 16; // that the graph has at most for one head

// No layer behind the last one is needed. But it is the rest of this device's operations that is left out, and those of others follow: experts
// on another device would be chosen by numbers that were not computed.
static bool is_not_last(ggml_tensor * t, bool ask, void * data) {
    const auto & read = *(const llama_pcd_core::reading *) data;
    const bool   last = read.found.size() == read.heads.size() && read.found.rbegin()->second.pays == t;
    return ask == last || (!ask && read.to_end);
}

// The end of a block in which attention is read, also if an exception comes by before llama.cpp hands the batch to us.
struct unwatched {
    ~unwatched() {
        std::string none;
        pcd.core.read = nullptr;
        pcd.set_eval_callback(nullptr, nullptr, false, none); // and the graph is not used again
    }

    llama_pcd_context & pcd;
};

// Adds what a layer's tokens pay, on average, to the positions before `end`. False: they do not see all of these.
static bool add_by_position(
        const llama_kv_cache & kv, llama_seq_id seq_id, int32_t end, const ggml_tensor * t, double share, double * pays) {
    const llama_pcd_cells_at cells(kv, seq_id, 0, end);

    if (std::distance(cells.begin(), cells.end()) != end || (end > 0 && llama_pcd::is_masked(kv, 0, end - 1))) {
        return false;
    }
    std::vector<float> data(ggml_nelements(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size()*sizeof(float));

    for (const auto & [pos, cell] : cells) {
        for (size_t at = cell; at < data.size(); at += t->ne[0]) {
            pays[pos] += share*data[at];
        }
    }
    return true;
}

int32_t llama_pcd_context::attention(
        llama_seq_id seq_id, const llama_token * tokens, int32_t n_all, llama_pos pos,
        const int32_t * heads, int32_t n_heads, double * pays, std::string & err) {
    if (n_all < 1 || n_heads < 1 || pos < 0) {
        err = format("there are %d tokens, %d heads, and the position is %d; allowed: 1, 1 and 0, or more", n_all, n_heads, pos);
        return LLAMA_PCD_INVALID;
    }
    const int32_t n_max = n_nodes()/N_NODES;
    if (n_heads > n_max) {
        err = format("there are %d heads to read, allowed for this model: at most %d", n_heads, n_max);
        return LLAMA_PCD_INVALID;
    }
    llama_pcd_core::reading cur;
    cur.to_end = lctx.get_model().hparams.n_expert > 0;
    for (int32_t i = 0; i < n_heads; ++i) {
        cur.heads[heads[2*i]].push_back(heads[2*i + 1]);
    }
    std::fill(pays, pays + pos + n_all, 0.0);
    if (n_schedulers == 1) {
        reserve_later(); // llama.cpp's graphs have no room for more nodes yet
    }
    core.second.keys_shift(); // before the shifts are done, after which nobody knows them
    prepare();                // while these graphs read nothing

    for (int32_t i = 0; i < n_all; ) {
        const int32_t n = std::min({ n_all - i, N_TOKENS, (int32_t) lctx.n_ubatch() });

        std::vector<llama_token>    ids(tokens + i, tokens + i + n);
        std::vector<llama_pos>      at(n);
        std::vector<int32_t>        n_seqs(n, 1);
        std::vector<llama_seq_id *> seqs(n, &seq_id);
        std::vector<int8_t>         asked(n, false);

        std::iota(at.begin(), at.end(), pos + i);

        cur.found.clear();
        if (const int32_t status = set_eval_callback(is_not_last, &cur, true, err); status != LLAMA_PCD_OK) {
            return status;
        }
        int32_t ret;
        {
            const unwatched at_end { *this };
            core.read = &cur;
            ret = llama_decode(&lctx, { n, ids.data(), nullptr, at.data(), n_seqs.data(), seqs.data(), asked.data() });
        }
        if (ret != 0) {
            err = ret == 1 ? "the context has no room for the question, whose attention would be read"
                           : "the question was not evaluated to its end, so its attention is not known";
            return LLAMA_PCD_NO_MEMORY;
        }
        i += n;

        bool all = cur.refusal.empty() && cur.found.size() == cur.heads.size();
        for (const auto & [il, layer] : cur.found) {
            all = all && add_by_position(*memory.kvs[layer.i_cache], seq_id, pos + i, layer.pays, 1.0/n_all, pays);
        }
        if (!all) {
            err = cur.refusal.empty() ? "the attention of this model cannot be read in this context" : cur.refusal;
            return LLAMA_PCD_UNSUPPORTED;
        }
    }
    return LLAMA_PCD_OK;
}
