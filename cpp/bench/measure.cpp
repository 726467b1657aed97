// Looks at computed graphs, and times matrix products.

#include "bench/measure.h"

#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
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

static ggml_backend_dev_t cpu_device() {
    auto * dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!dev) {
        throw std::runtime_error("ggml has no CPU backend");
    }
    return dev;
}

template <typename F>
static F cpu_function(const char * name) {
    auto * fn = (F) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), name);
    if (!fn) {
        throw std::runtime_error(std::string("ggml's CPU backend has no ") + name);
    }
    return fn;
}

void llama_pcd_cpu::set_amx(bool on) {
    amx_on = on;
}

bool llama_pcd_cpu::skips(ggml_backend_buffer_type_t buft) {
    return !amx_on && strcmp(ggml_backend_buft_name(buft), "AMX") == 0;
}

// a model's matrices are read once a step, from memory: so many bytes of them that the caches hold few
static const int64_t WEIGHT_BYTES = 16*1024*1024; // for one token; fewer for more, since each multiplies them all
static const int     N_PRODUCTS   = 16; // at most: after each the threads wait for each other, for milliseconds on a busy machine

// a chain of matrix products, which is most of a step
struct step_graph {
    ggml_context_ptr        ctx;
    ggml_backend_ptr        backend;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           gf = nullptr;

    step_graph(int64_t n_embd, int64_t n_tokens) {
        const auto    type = GGML_TYPE_Q8_0;
        const int64_t side = std::max<int64_t>(1, n_embd/ggml_blck_size(type))*ggml_blck_size(type);
        const int     n    = std::clamp<int64_t>(WEIGHT_BYTES/(ggml_row_size(type, side)*side*n_tokens), 1, N_PRODUCTS);

        ctx.reset(ggml_init({ (2*n + 1)*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        backend.reset(ggml_backend_dev_init(cpu_device(), nullptr));
        if (!ctx || !backend) {
            throw std::runtime_error("ggml's CPU backend does not start");
        }

        gf = ggml_new_graph(ctx.get());
        ggml_tensor * cur = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, side, n_tokens);
        for (int i = 0; i < n; ++i) {
            cur = ggml_mul_mat(ctx.get(), ggml_new_tensor_2d(ctx.get(), type, side, side), cur);
        }
        ggml_build_forward_expand(gf, cur);

        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        if (!buffer) {
            throw std::bad_alloc();
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
    }

    // microseconds, at least 1
    int64_t run() const {
        const int64_t start = ggml_time_us();
        if (ggml_backend_graph_compute(backend.get(), gf) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("ggml's CPU backend does not multiply");
        }
        return std::max<int64_t>(1, ggml_time_us() - start);
    }
};

struct candidate {
    int32_t n_threads;
    int64_t sum    = 0;
    int     count  = 0;
    bool    warm   = false;

    double mean() const { return count ? (double) sum/count : 0.0; }
};

std::vector<double> llama_pcd_cpu::step_times(
        const std::vector<int32_t> & n_threads, int64_t n_embd, int64_t n_tokens, int64_t min_us) {
    const step_graph graph(n_embd, n_tokens);

    std::vector<candidate> candidates;
    for (const int32_t n : n_threads) {
        candidates.push_back({ n });
    }
    auto * set_n_threads = cpu_function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads");

    // in turns, since what else runs on the machine comes and goes: no candidate gets a quiet moment for itself
    const int n_turns = 4;
    double    best    = 0.0;
    for (int turn = 0; turn < n_turns; ++turn) {
        for (auto & c : candidates) {
            if (turn > 0 && c.mean() > 2.0*best) {
                continue; // it has lost
            }
            set_n_threads(graph.backend.get(), c.n_threads);
            for (int64_t left = min_us/n_turns; left > 0 || c.count == 0;) {
                const int64_t us = graph.run();
                left -= us;
                if (c.warm || us > min_us) { // the first pass starts threads, which matters if it is short
                    c.sum += us;
                    c.count++;
                }
                c.warm = true;
            }
        }
        best = std::min_element(candidates.begin(), candidates.end(),
                [](const candidate & a, const candidate & b) { return a.mean() < b.mean(); })->mean();
    }

    std::vector<double> res;
    for (const auto & c : candidates) {
        res.push_back(c.mean());
    }
    return res;
}
