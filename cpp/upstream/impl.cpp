// What every part does with its context: build its graphs anew, decode as llama.cpp would. Knows nothing of the parts.

#include "llama-pcd-impl.h"

#include "llama-impl.h"

#include <algorithm>
#include <stdexcept>

static constexpr uint32_t N_RESERVED = 8; // tokens that cached graphs have memory for from the first

void llama_pcd::reset_graphs() {
    lctx.gf_res_prev_active = nullptr;
    generation++;
    cached = {};
}

ggml_cgraph * llama_pcd::build_graph() {
    lctx.synchronize();

    const uint32_t n    = std::min(lctx.n_ubatch(), N_RESERVED);
    const auto     mctx = lctx.memory->init_full();
    if (!mctx) {
        throw std::runtime_error("pcd: no graph can be built for this memory");
    }
    return lctx.graph_reserve(n, 1, 1, mctx.get(), true);
}

void llama_pcd::prepare() {
    lctx.sched_reserve();
    lctx.memory_update(false);
}

int llama_pcd::decode_plain(const llama_batch_ext & batch, bool in_cached) {
    const llama_pcd_while inside(nested, true);
    if (!in_cached || !make_cached(batch.tokens.size())) {
        return lctx.decode(batch);
    }
    const swapped graphs(*this);
    return lctx.decode(batch);
}

//
// graphs that take turns
//

void llama_pcd::swap_cached() {
    std::swap(lctx.sched,              cached.sched);
    std::swap(lctx.gf_res_prev,        cached.results);
    std::swap(lctx.gf_res_prev_active, cached.active);
}

bool llama_pcd_forget_layout(ggml_backend_sched_t sched) {
    const ggml_init_params params = { 4*ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false), nullptr, true };

    const ggml_context_ptr ctx { ggml_init(params) };
    if (!ctx) {
        return false;
    }
    auto * gf = ggml_new_graph_custom(ctx.get(), 8, false);
    ggml_build_forward_expand(gf, ggml_dup(ctx.get(), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 1)));

    return ggml_backend_sched_reserve(sched, gf);
}

bool llama_pcd::make_cached(uint32_t n_tokens) {
    if (cached.made_for == n_schedulers) {
        return cached.sched != nullptr;
    }
    cached = {};
    cached.made_for = n_schedulers;
    cached.sched.reset(ggml_backend_sched_new(lctx.backend_ptrs.data(), lctx.backend_buft.data(), lctx.backend_ptrs.size(),
        lctx.gf_res_reserve->get_max_nodes(), false, lctx.cparams.op_offload));

    // memory for a few tokens without twins and a full context: what is needed beyond it is added then
    const uint32_t n    = std::min(n_tokens, N_RESERVED);
    const auto     mctx = lctx.memory->init_full();

    bool done = false;
    {
        const swapped graphs(*this);
        done = mctx && lctx.graph_reserve(n, 1, n, mctx.get()) && llama_pcd_forget_layout(lctx.sched.get());
    }
    if (!done) {
        LLAMA_LOG_WARN("%s: no memory to keep the graphs of twins beside the others: each is built anew when its turn comes\n", __func__);
        cached.sched.reset();
    }
    return done;
}

size_t llama_pcd::cached_bytes() const {
    size_t res = 0;
    for (auto * backend : lctx.backend_ptrs) {
        res += cached.sched ? ggml_backend_sched_get_buffer_size(cached.sched.get(), backend) : 0;
    }
    return res;
}
