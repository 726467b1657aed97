// Looks at computed graphs, and places cells.

#include "bench/measure.h"

#include <algorithm>
#include <set>
#include <vector>

//
// graphs
//

// the inputs that a tensor is computed from, and that `seen` lacks
static size_t bytes_of_inputs(const ggml_tensor * t, std::set<const ggml_tensor *> & seen) {
    size_t res = 0;
    for (const ggml_tensor * cur : t->src) {
        while (cur && cur->view_src) {
            cur = cur->view_src;
        }
        if (cur && (cur->flags & GGML_TENSOR_FLAG_INPUT) && seen.insert(cur).second) {
            res += ggml_nbytes(cur);
        }
    }
    return res;
}

llama_pcd_graph_stats llama_pcd_stats_of(const llama_pcd & pcd) {
    llama_pcd_graph_stats res = {};
    res.n_computed = pcd.n_computed;
    res.t_graph_us = pcd.t_graph_us;
    res.t_own_ns   = pcd.own_time.ns();

    auto * last = pcd.last_graph();
    if (!last) {
        return res;
    }

    std::set<const ggml_tensor *> seen;
    for (int i = 0; i < ggml_graph_n_nodes(last->get_gf()); ++i) {
        res.bytes_in += bytes_of_inputs(ggml_graph_node(last->get_gf(), i), seen);
    }
    for (const ggml_tensor * t : { last->get_logits(), pcd.lctx.get_cparams().embeddings ? last->get_embd() : nullptr }) {
        res.bytes_out += t ? ggml_nbytes(t) : 0;
    }
    res.n_nodes  = ggml_graph_n_nodes(last->get_gf());
    res.n_splits = ggml_backend_sched_get_n_splits(pcd.last_sched());
    res.n_tokens = pcd.computed.n_tokens;
    res.n_twins  = pcd.computed.n_twins;

    return res;
}

// another look at the same numbers: nothing is computed
static bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE ||
        t->op == GGML_OP_TRANSPOSE;
}

void llama_pcd_graph_computed(const llama_pcd & pcd, ggml_backend_sched_t sched, ggml_cgraph * gf) {
    if (!pcd.watch.callback) {
        return;
    }
    std::vector<llama_pcd_node> nodes;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * t = ggml_graph_node(gf, i);
        if (is_view(t) || ggml_nelements(t) == 0) {
            continue;
        }
        const ggml_backend_dev_t dev  = ggml_backend_get_device(ggml_backend_sched_get_tensor_backend(sched, t));
        const auto               type = ggml_backend_dev_type(dev);
        nodes.push_back({ t->name, ggml_op_desc(t), ggml_backend_dev_name(dev),
            type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_ACCEL });
    }
    pcd.watch.callback(nodes.data(), nodes.size(), ggml_backend_sched_get_n_splits(sched), pcd.watch.data);
}

//
// cells
//

bool llama_pcd_can_fill(const llama_pcd_memory & memory, int32_t n) {
    return n >= 0 && !memory.recr && !memory.kvs.empty() && std::all_of(memory.kvs.begin(), memory.kvs.end(), [n](const auto * kv) {
        return !llama_pcd::borrows(*kv) && (llama_pcd::slides(*kv) || (uint32_t) n <= llama_pcd::cells(*kv).size());
    });
}

int32_t llama_pcd_fill(const llama_pcd_memory & memory, int32_t n) {
    int32_t res = 0;
    for (auto * kv : memory.kvs) {
        auto & cells = llama_pcd::cells(*kv);

        const int32_t n_cells = cells.size();
        for (int32_t pos = std::max(0, n - n_cells); pos < n; ++pos) {
            cells.pos_set(pos % n_cells, pos);
            cells.seq_add(pos % n_cells, 0);
        }
        llama_pcd::head(*kv) = n % n_cells;
        res = std::max(res, std::min(n, n_cells));
    }
    return res;
}
