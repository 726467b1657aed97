// PCD as a property of a context: settings, their checks, and the C API around them.

#include "llama-pcd-impl.h"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

//
// checks
//

static std::string check_range(const llama_pcd_params & p) {
    if (p.cache < 0 || p.cache > LLAMA_PCD_CACHE_SHARED)                           { return format("cache is %d, not an enum llama_pcd_cache", p.cache); }
    if (p.evaluation < 0 || p.evaluation > LLAMA_PCD_EVALUATION_ALTERNATE)         { return format("evaluation is %d, not an enum llama_pcd_evaluation", p.evaluation); }
    if (p.perturbation < 0 || p.perturbation > LLAMA_PCD_PERTURBATION_NONE)        { return format("perturbation is %d, not an enum llama_pcd_perturbation", p.perturbation); }
    if (p.transition < 0 || p.transition > LLAMA_PCD_TRANSITION_NONE)              { return format("transition is %d, not an enum llama_pcd_transition", p.transition); }
    if (!std::isfinite(p.alpha) || p.alpha < 0.0f || p.alpha > 10.0f)              { return format("alpha is %g, allowed: 0 to 10", p.alpha); }
    if (!std::isfinite(p.base_ratio) || p.base_ratio <= 0.0f || p.base_ratio > 1.0f) { return format("base_ratio is %g, allowed: more than 0 and at most 1", p.base_ratio); }
    if (!std::isfinite(p.beta) || p.beta < 0.0f || p.beta > 1000.0f)               { return format("beta is %g, allowed: 0 to 1000", p.beta); }
    if (p.gamma < 1)                                                               { return format("gamma is %d, allowed: at least 1", p.gamma); }
    if (!(p.relative_top >= 0.0f && p.relative_top <= 1.0f))                       { return format("relative_top is %g, allowed: 0 to 1", p.relative_top); }
    if (p.window < 0)                                                              { return format("window is %d, allowed: 0 (off) or more", p.window); }
    if (p.n_sink < 0)                                                              { return format("n_sink is %d, allowed: 0 or more", p.n_sink); }
    if (p.perturbation == LLAMA_PCD_PERTURBATION_NONE && p.window == 0)            { return "perturbation \"none\" without a window leaves the twin equal to its token; set window"; }
    return {};
}

void llama_pcd::for_each_kv(const std::function<void(llama_kv_cache *)> & fn) const {
    llama_memory_i * mem = lctx.get_memory();

    if (auto * kv = dynamic_cast<llama_kv_cache *>(mem)) {
        fn(kv);
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
        fn(iswa->get_base());
        fn(iswa->get_swa());
    }
}

std::string llama_pcd::conflict() const {
    const auto & cparams = lctx.cparams;
    const auto & inputs  = cparams.embeddings_layer_inp;

    if (!lctx.sampling.samplers.empty()) {
        return "backend samplers bypass the logits PCD works on (llama_context_params.samplers, llama_set_sampler)";
    }
    if (!cparams.causal_attn) {
        return "attention is not causal in this context (llama_set_causal_attn)";
    }
    if (cparams.pooling_type != LLAMA_POOLING_TYPE_NONE && cparams.embeddings) {
        return "this context pools embeddings and computes no logits";
    }
    if (cparams.embeddings_nextn || std::find(inputs.begin(), inputs.end(), true) != inputs.end()) {
        return "this context hands hidden states to a draft model";
    }
    return {};
}

// it caches the first rotation's table without looking at the frequency factors of the next one
static bool on_cann(const llama_model & model) {
    for (const auto & cur : model.devices) {
        if (std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(cur.dev))) == "CANN") {
            return true;
        }
    }
    return false;
}

int64_t llama_pcd::kv_bytes() const {
    int64_t res = 0;
    for_each_kv([&](llama_kv_cache * kv) { res += kv->size_k_bytes() + kv->size_v_bytes(); });
    return res;
}

int32_t llama_pcd::check(const llama_pcd_params & p, std::string & err) const {
    err = check_range(p);
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }

    const auto & model   = lctx.get_model();
    const auto & cparams = lctx.get_cparams();
    const auto   arch    = model.arch_name();

    int  n_kv    = 0;
    bool unified = true;
    bool shared  = false;
    for_each_kv([&](llama_kv_cache * kv) {
        n_kv++;
        unified &= kv->get_n_stream() == 1;
        shared  |= kv->other != nullptr;
    });
    unified &= cparams.kv_unified || n_kv == 1; // a sliding-window cache splits batches by this flag

    if (!lctx.get_memory()) {
        err = "the architecture '" + arch + "' keeps no KV cache, so there is no context to contrast";
    } else if (n_kv == 0) {
        err = "the architecture '" + arch + "' has recurrent or otherwise special memory, which cannot drop a twin's state; PCD needs a plain or sliding-window KV cache";
    } else if (model.hparams.rope_type == LLAMA_ROPE_TYPE_NONE && p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION) {
        err = "the architecture '" + arch + "' has no rotary positions to over-rotate; use perturbation=\"none\" with a window";
    } else if (llama_model_has_encoder(&model)) {
        err = "the architecture '" + arch + "' has an encoder, and a twin cannot attend to it";
    } else if (weighs_keys && p.cache == LLAMA_PCD_CACHE_REROTATED && p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION) {
        err = "the architecture '" + arch + "' weighs its keys after rotating them, so a stored key cannot be turned further; use cache=\"shared\"";
    } else if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR && p.cache == LLAMA_PCD_CACHE_REROTATED && p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION) {
        err = "second keys cannot be split over devices tensor by tensor; use another split_mode or cache=\"shared\"";
    } else if (on_cann(model) && p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION) {
        err = "the CANN backend keeps one table for all rotations of a graph; use perturbation=\"none\" with a window";
    } else if (!unified) {
        err = "this context keeps one KV stream per sequence; create it with kv_unified = true";
    } else if (shared || cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        err = "this context drafts for another one and shares its KV cache";
    } else {
        err = conflict();
    }

    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

//
// settings
//

std::shared_ptr<llama_pcd> & llama_pcd::of(llama_context & lctx) {
    return lctx.cparams.pcd;
}

void llama_pcd::reset_graphs() {
    lctx.gf_res_prev_active = nullptr;
    generation++;
}

bool llama_pcd::alloc_second_keys(std::string & err) {
    if (!kvs.empty()) {
        return true;
    }

    const auto & model = lctx.get_model();

    std::vector<llama_pcd_kv> res;
    size_t n_bytes = 0;
    bool   ok      = true;

    for_each_kv([&](llama_kv_cache * kv) {
        llama_pcd_kv cur;
        cur.kv = kv;

        // one buffer for each kind of memory the first keys live in
        std::map<ggml_backend_buffer_type_t, ggml_context *> ctxs;

        for (const auto & layer : kv->layers) {
            if (!model.hparams.has_rope(layer.il) || model.hparams.n_head_kv(layer.il) == 0) {
                continue;
            }

            auto *& ctx = ctxs[ggml_backend_buffer_get_type(layer.k->buffer)];
            if (!ctx) {
                ggml_init_params ip = { kv->layers.size()*ggml_tensor_overhead(), nullptr, true };
                ctx = ggml_init(ip);
            }

            ggml_tensor * k2 = ggml_new_tensor_2d(ctx, layer.k->type, layer.k->ne[0], layer.k->ne[1]);
            ggml_format_name(k2, "cache_k_over_l%d", layer.il);

            cur.layers.push_back({ layer.il, layer.k, k2, {} });
        }

        for (const auto & [buft, ctx] : ctxs) {
            ggml_context_ptr        ctx_own(ctx);
            ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));

            if (buf) {
                ggml_backend_buffer_clear(buf.get(), 0); // no NaN may lurk in unused cells
                n_bytes += ggml_backend_buffer_get_size(buf.get());
            }
            ok &= buf != nullptr;

            cur.ctxs_bufs.emplace_back(std::move(ctx_own), std::move(buf));
        }

        res.push_back(std::move(cur));
    });

    if (!ok) {
        size_t n_k = 0;
        for_each_kv([&](llama_kv_cache * kv) { n_k += kv->size_k_bytes(); });
        err = format("the second keys need another %.0f MiB; use a smaller n_ctx, cache=\"shared\" or perturbation=\"none\" with a window", n_k/1024.0/1024.0);
        return false;
    }

    kvs = std::move(res);
    stats.second_key_bytes = n_bytes;

    return true;
}

int32_t llama_pcd::set(const llama_pcd_params & p, std::string & err) {
    const int32_t status = check(p, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    lctx.synchronize();

    // one stream holds all cells, so a mask over several sequences is one mask
    lctx.cparams.kv_unified = true;

    const bool first = kvs.empty() && p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION && p.cache == LLAMA_PCD_CACHE_REROTATED;
    if (first && !alloc_second_keys(err)) {
        return LLAMA_PCD_NO_MEMORY;
    }

    const llama_pcd_params old       = params;
    const bool             old_on    = on;
    const bool             old_stale = stale;

    const auto undo = [&]() {
        params = old;
        on     = old_on;
        stale  = old_stale;
        write_difference_tables();
        if (first) {
            kvs.clear();
            stats.second_key_bytes  = 0;
            lctx.sched_need_reserve = true;
        }
        reset_graphs();
    };

    params = p;

    if (p.alpha != old.alpha || p.base_ratio != old.base_ratio || p.transition != old.transition) {
        write_difference_tables();
        stale = true;
    }

    stale |= first;
    if (p.cache != old.cache || p.perturbation != old.perturbation) {
        reset_graphs();
    }

    on = true;

    if (first) {
        // the graphs built here also tell each layer's rotation
        try {
            lctx.sched_need_reserve = true;
            lctx.sched_reserve();
        } catch (...) {
            undo();
            throw;
        }

        for (const auto & cur : kvs) {
            for (const auto & layer : cur.layers) {
                weighs_keys |= layer.rotation.weighed;
            }
        }
        if (weighs_keys) {
            undo();
            return check(p, err);
        }
    }

    return LLAMA_PCD_OK;
}

void llama_pcd::off() {
    on = false;
}

uint32_t llama_pcd_max_nodes(const llama_context & lctx) {
    return lctx.get_cparams().pcd ? 64*lctx.get_model().hparams.n_layer_all : 0;
}

void llama_pcd_set_stale(llama_pcd * pcd) {
    if (pcd) {
        pcd->stale = true;
    }
}

void llama_pcd_state_loaded(llama_pcd * pcd) {
    if (pcd) {
        pcd->stale = true;
        pcd->forget_rows();
    }
}

//
// C API
//

int32_t llama_pcd_version(void) {
    return LLAMA_PCD_VERSION;
}

llama_pcd_params llama_pcd_default_params(void) {
    return {
        /* .cache        = */ LLAMA_PCD_CACHE_REROTATED,
        /* .evaluation   = */ LLAMA_PCD_EVALUATION_FUSED,
        /* .perturbation = */ LLAMA_PCD_PERTURBATION_OVER_ROTATION,
        /* .transition   = */ LLAMA_PCD_TRANSITION_EXPONENTIAL,
        /* .alpha        = */ 0.2f,
        /* .base_ratio   = */ 1e-4f,
        /* .beta         = */ 2.5f,
        /* .gamma        = */ 30,
        /* .relative_top = */ 0.0f,
        /* .window       = */ 0,
        /* .n_sink       = */ 4,
        /* .combine      = */ true,
    };
}

static int32_t report(int32_t status, const std::string & text, char * err, size_t n_err) {
    if (err && n_err > 0) {
        snprintf(err, n_err, "%s", text.c_str());
    }
    return status;
}

static bool is_disabled() {
    const char * value = getenv("PYPCD_DISABLE");
    return value && *value && strcmp(value, "0") != 0;
}

int32_t llama_pcd_set(llama_context * ctx, const llama_pcd_params * params, char * err, size_t n_err) {
    auto & pcd = llama_pcd::of(*ctx);

    if (!params) {
        if (pcd) {
            pcd->off();
        }
        return LLAMA_PCD_OK;
    }
    if (is_disabled()) {
        return report(LLAMA_PCD_DISABLED, "PYPCD_DISABLE is set in the environment", err, n_err);
    }
    if (!pcd) {
        auto made = std::make_shared<llama_pcd>(*ctx);

        std::string text;
        const int32_t status = made->check(*params, text);
        if (status != LLAMA_PCD_OK) {
            return report(status, text, err, n_err);
        }

        pcd = made;
        pcd->for_each_kv([&](llama_kv_cache * kv) { kv->pcd = pcd.get(); });
    }

    std::string text;
    try {
        return report(pcd->set(*params, text), text, err, n_err);
    } catch (const std::exception & e) {
        return report(LLAMA_PCD_NO_MEMORY, e.what(), err, n_err);
    }
}

int32_t llama_pcd_check(llama_context * ctx, const llama_pcd_params * params, char * err, size_t n_err) {
    if (is_disabled()) {
        return report(LLAMA_PCD_DISABLED, "PYPCD_DISABLE is set in the environment", err, n_err);
    }
    const auto & pcd = llama_pcd::of(*ctx);

    std::string text;
    const int32_t status = pcd ? pcd->check(*params, text) : llama_pcd(*ctx).check(*params, text);
    return report(status, text, err, n_err);
}

void llama_pcd_suspend(llama_context * ctx, bool suspend) {
    if (auto & pcd = llama_pcd::of(*ctx)) {
        pcd->suspended = suspend;
    }
}

const float * llama_pcd_get_logits_ith(llama_context * ctx, int32_t i, int32_t which) {
    auto & pcd = llama_pcd::of(*ctx);
    return pcd ? pcd->get_row(i, which) : nullptr;
}

llama_pcd_stats llama_pcd_get_stats(llama_context * ctx) {
    auto & pcd = llama_pcd::of(*ctx);

    llama_pcd_stats res = pcd ? pcd->stats : llama_pcd_stats {};
    res.kv_bytes = llama_pcd(*ctx).kv_bytes();
    return res;
}
