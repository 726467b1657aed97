// Looks at computed graphs, and leaves AMX out.

#include "bench/measure.h"

#include "ggml.h"

#include <atomic>
#include <cstring>
#include <vector>

//
// graphs
//

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
// the CPU
//

static std::atomic<bool> amx_on { false };

void llama_pcd_cpu::set_amx(bool on) {
    amx_on = on;
}

bool llama_pcd_cpu::skips(ggml_backend_buffer_type_t buft) {
    return !amx_on && strcmp(ggml_backend_buft_name(buft), "AMX") == 0;
}
