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

void llama_pcd::reserve_now(const std::function<void()> & undo) {
    try {
        reserve_later();
        lctx.sched_reserve();
    } catch (...) {
        undo();
        throw;
    }
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

int llama_pcd::decode_plain(const llama_batch_ext & batch, cached_graphs * own) {
    const llama_pcd_while inside(nested);
    if (!own || !make_cached(*own, batch.tokens.size())) {
        return lctx.decode(batch);
    }
    const swapped swap(*this, *own);
    return lctx.decode(batch);
}

llama_pcd::step_threads::step_threads(llama_context & c) :
    c(c), n_threads_batch(c.cparams.n_threads_batch), threadpool_batch(c.threadpool_batch) {
    c.cparams.n_threads_batch = c.cparams.n_threads;
    c.threadpool_batch        = c.threadpool;
}

llama_pcd::step_threads::~step_threads() {
    c.cparams.n_threads_batch = n_threads_batch;
    c.threadpool_batch        = threadpool_batch;
}

//
// graphs that take turns
//

llama_pcd::swapped::swapped(llama_pcd & pcd, cached_graphs & own) : pcd(pcd), own(own) {
    swap();
}

llama_pcd::swapped::~swapped() {
    swap();
}

void llama_pcd::swapped::swap() const {
    std::swap(pcd.lctx.sched,              own.sched);
    std::swap(pcd.lctx.gf_res_prev,        own.results);
    std::swap(pcd.lctx.gf_res_prev_active, own.active);
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

bool llama_pcd::make_cached(cached_graphs & own, uint32_t n_tokens) {
    if (own.made_for == n_schedulers) {
        return own.sched != nullptr;
    }
    own = {};
    own.made_for = n_schedulers;
    own.sched.reset(ggml_backend_sched_new(lctx.backend_ptrs.data(), lctx.backend_buft.data(), lctx.backend_ptrs.size(),
        lctx.gf_res_reserve->get_max_nodes(), false, lctx.cparams.op_offload));

    bool done = false;
    {
        const swapped swap(*this, own);

        // memory for a few tokens without twins and a full context: what is needed beyond it is added then
        const uint32_t n    = std::min(n_tokens, N_RESERVED);
        const auto     mctx = lctx.memory->init_full();
        done = mctx && lctx.graph_reserve(n, 1, n, mctx.get()) && llama_pcd_forget_layout(lctx.sched.get());
    }
    if (!done) {
        LLAMA_LOG_WARN("%s: no memory to keep the graphs of twins beside the others: each is built anew when its turn comes\n", __func__);
        own.sched.reset();
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

ggml_tensor * llama_pcd::keys_of(const llama_kv_cache & kv, int32_t il) {
    const auto it = kv.map_layer_ids.find(il);
    return it == kv.map_layer_ids.end() ? nullptr : kv.layers[it->second].k;
}

bool llama_pcd::on_host(const llama_kv_cache & kv) {
    return std::all_of(kv.layers.begin(), kv.layers.end(), [](const auto & layer) { return ggml_backend_buffer_is_host(layer.k->buffer); });
}
