// PCD as a property of a context: settings, their checks, and the C API around them.

#include "llama-pcd-impl.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>

//
// checks
//

static constexpr int32_t OFFSET_MAX = 1 << 20;

static std::string check_range(const llama_pcd_params & p) {
    if (p.cache < 0 || p.cache > LLAMA_PCD_CACHE_SEPARATE)                         { return format("cache is %d, not an enum llama_pcd_cache", p.cache); }
    if (p.evaluation < 0 || p.evaluation > LLAMA_PCD_EVALUATION_ALTERNATE)         { return format("evaluation is %d, not an enum llama_pcd_evaluation", p.evaluation); }
    if (p.perturbation < 0 || p.perturbation > LLAMA_PCD_PERTURBATION_NOISE)       { return format("perturbation is %d, not an enum llama_pcd_perturbation", p.perturbation); }
    if (p.transition < 0 || p.transition > LLAMA_PCD_TRANSITION_NONE)              { return format("transition is %d, not an enum llama_pcd_transition", p.transition); }
    if (p.band < 0 || p.band > LLAMA_PCD_BAND_ALL)                                 { return format("band is %d, not an enum llama_pcd_band", p.band); }
    if (p.type_k_over < -1 || p.type_k_over >= GGML_TYPE_COUNT)                    { return format("type_k_over is %d, not an enum ggml_type, nor -1", p.type_k_over); }
    if (!std::isfinite(p.alpha) || p.alpha < 0.0f || p.alpha > 10.0f)              { return format("alpha is %g, allowed: 0 to 10", p.alpha); }
    if (!std::isfinite(p.base_ratio) || p.base_ratio <= 0.0f || p.base_ratio > 1.0f) { return format("base_ratio is %g, allowed: more than 0 and at most 1", p.base_ratio); }
    if (!std::isfinite(p.beta) || p.beta < 0.0f || p.beta > 1000.0f)               { return format("beta is %g, allowed: 0 to 1000", p.beta); }
    if (p.gamma < 1)                                                               { return format("gamma is %d, allowed: at least 1", p.gamma); }
    if (!(p.relative_top >= 0.0f && p.relative_top <= 1.0f))                       { return format("relative_top is %g, allowed: 0 to 1", p.relative_top); }
    if (p.window < 0)                                                              { return format("window is %d, allowed: 0 (off) or more", p.window); }
    if (p.n_sink < 0)                                                              { return format("n_sink is %d, allowed: 0 or more", p.n_sink); }
    if (!std::isfinite(p.noise) || p.noise < 0.0f || p.noise > 10.0f)              { return format("noise is %g, allowed: 0 to 10", p.noise); }
    if (p.offset_min < -OFFSET_MAX || p.offset_max > OFFSET_MAX || p.offset_min > p.offset_max) { return format("offset_min, offset_max are %d, %d, allowed: -%d to %d in this order", p.offset_min, p.offset_max, OFFSET_MAX, OFFSET_MAX); }
    if (p.perturbation == LLAMA_PCD_PERTURBATION_NOISE && p.cache == LLAMA_PCD_CACHE_REROTATED) { return "cache \"rerotated\" turns keys to other frequencies, and perturbation \"noise\" has none; use cache \"shared\" or \"separate\""; }
    if (p.perturbation == LLAMA_PCD_PERTURBATION_NONE && p.window == 0)            { return "perturbation \"none\" without a window leaves the twin equal to its token; set window"; }
    return {};
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

bool llama_pcd_on_cann(const llama_model & model) {
    for (const auto & cur : model.devices) {
        if (std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(cur.dev))) == "CANN") {
            return true;
        }
    }
    return false;
}

// whether second keys can be stored in this type: a block must not reach over the end of a head
std::string llama_pcd::check_type(const llama_pcd_params & p) const {
    const ggml_type type = (ggml_type) p.type_k_over;
    const auto & hparams = lctx.get_model().hparams;

    if (type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_BF16 && type != GGML_TYPE_Q8_0 &&
        type != GGML_TYPE_Q5_1 && type != GGML_TYPE_Q5_0 && type != GGML_TYPE_Q4_1 && type != GGML_TYPE_Q4_0) {
        return format("type_k_over is %s; allowed: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0", ggml_type_name(type));
    }

    std::string err;
    for_each_kv([&](llama_kv_cache * kv) {
        for (const uint32_t il : kv->get_layer_ids()) {
            if (hparams.n_head_kv(il) > 0 && hparams.n_embd_head_k(il) % ggml_blck_size(type) != 0) {
                err = format("type_k_over is %s, stored in blocks of %d, but a head has %d dimensions; use f16",
                        ggml_type_name(type), (int) ggml_blck_size(type), (int) hparams.n_embd_head_k(il));
            }
        }
    });
    return err;
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
        err = "the architecture '" + arch + "' has recurrent or otherwise special memory alone, which cannot drop a twin's state; PCD needs a KV cache, plain, sliding-window or beside recurrent layers";
    } else if (recr && cparams.n_seq_max < 2) {
        err = "the architecture '" + arch + "' has recurrent layers, where a twin needs a sequence of its own; create the context with n_seq_max = 2 or more";
    } else if (recr && separate(p)) {
        err = "the architecture '" + arch + "' has recurrent layers, and a second state for them is not kept; use cache=\"rerotated\"";
    } else if ((model.hparams.rope_type == LLAMA_ROPE_TYPE_NONE || (has_graph && !has_rotations)) && p.perturbation != LLAMA_PCD_PERTURBATION_NONE) {
        err = "the architecture '" + arch + "' has no rotary positions to " + (rotates(p) ? "over-rotate" : "add noise to") + "; use perturbation=\"none\" with a window";
    } else if (llama_model_has_encoder(&model)) {
        err = "the architecture '" + arch + "' has an encoder, and a twin cannot attend to it";
    } else if (weighs_keys && rerotated(p)) {
        err = "the architecture '" + arch + "' changes its keys after rotating them, so a stored key cannot be turned further; use cache=\"shared\" or \"separate\"";
    } else if (model.arch == LLM_ARCH_COGVLM && separate(p)) {
        err = "asked for some rows of a batch, the architecture '" + arch + "' gives those of other tokens; use cache=\"rerotated\"";
    } else if (offsets_pairs && p.perturbation == LLAMA_PCD_PERTURBATION_NOISE) {
        err = "the architecture '" + arch + "' rotates a part of each head in place, where noise is not built; use perturbation=\"over-rotation\"";
    } else if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR && (rerotated(p) || separate(p))) {
        err = "second keys cannot be split over devices tensor by tensor; use another split_mode or cache=\"shared\"";
    } else if (llama_pcd_on_cann(model) && p.perturbation != LLAMA_PCD_PERTURBATION_NONE) {
        err = "the CANN backend keeps one table for all rotations of a graph; use perturbation=\"none\" with a window";
    } else if (!unified) {
        err = "this context keeps one KV stream per sequence; create it with kv_unified = true";
    } else if (heads.on) {
        err = "the heads of this context have ratios of their own (Ms-PoE), which over-rotation knows nothing of; take them off first (llama_pcd_set_head_ratios)";
    } else if (!exits.layers.empty()) {
        err = "early exits are read in this context, and they are compared with plain rows; take them off first (llama_pcd_set_exits)";
    } else if (shared || cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        err = "this context drafts for another one and shares its KV cache";
    } else {
        err = conflict();
    }

    if (err.empty() && p.type_k_over >= 0 && (rerotated(p) || separate(p))) {
        err = check_type(p);
    }

    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

//
// settings
//

std::shared_ptr<llama_pcd> & llama_pcd::of(llama_context & lctx) {
    return lctx.cparams.pcd;
}

llama_pcd & llama_pcd::made(llama_context & lctx) {
    auto & pcd = of(lctx);
    if (!pcd) {
        pcd = std::make_shared<llama_pcd>(lctx);
        pcd->for_each_kv([&](llama_kv_cache * kv) { kv->pcd = pcd.get(); });
    }
    return *pcd;
}

void llama_pcd::reset_graphs() {
    lctx.gf_res_prev_active = nullptr;
    generation++;
}

void llama_pcd::build_graphs(const std::function<void()> & undo) {
    try {
        lctx.sched_need_reserve = true;
        lctx.sched_reserve();
    } catch (...) {
        undo();
        throw;
    }
}

static bool same_table(const llama_pcd_params & a, const llama_pcd_params & b) {
    return a.perturbation == b.perturbation && a.alpha == b.alpha && a.base_ratio == b.base_ratio &&
        a.transition == b.transition && a.band == b.band;
}

bool llama_pcd::follows_settings() const {
    return same_table(params, second_params);
}

// whether second keys (and values) made with a can go on serving b
static bool same_second(const llama_pcd_params & a, const llama_pcd_params & b) {
    const bool same_twins = a.window == b.window && a.n_sink == b.n_sink && a.noise == b.noise &&
        a.offset_min == b.offset_min && a.offset_max == b.offset_max && a.seed == b.seed;

    return a.cache == b.cache && same_table(a, b) && (!llama_pcd::separate(a) || same_twins);
}

int32_t llama_pcd::set(const llama_pcd_params & p, std::string & err) {
    const int32_t status = check(p, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    lctx.synchronize();

    // one stream holds all cells, so a mask over several sequences is one mask
    lctx.cparams.kv_unified = true;

    std::vector<llama_pcd_kv> made;
    int64_t n_bytes = stats.second_bytes;

    if (!alloc_second(p, made, n_bytes, err)) {
        return LLAMA_PCD_NO_MEMORY;
    }
    const bool is_new = !made.empty();

    const auto old = std::make_tuple(params, on, stale, has_second, second_params, stats.second_bytes);

    if (is_new) {
        std::swap(kvs, made);
        has_second = false;
    }

    const bool other_table = !same_table(p, params);

    const auto undo = [&]() {
        std::tie(params, on, stale, has_second, second_params, stats.second_bytes) = old;
        if (other_table) {
            write_tables();
        }
        if (is_new) {
            std::swap(kvs, made);
            lctx.sched_need_reserve = true;
        }
        reset_graphs();
    };

    const auto topology = [](const llama_pcd_params & a) {
        return std::make_tuple(a.cache, a.perturbation, a.offset_min != 0 || a.offset_max != 0);
    };
    if (is_new || topology(p) != topology(params)) {
        reset_graphs();
    }

    params = p;
    on     = true;
    stats.second_bytes = n_bytes;

    if (other_table) {
        write_tables();
    }

    if ((rerotated() || separate()) && !(has_second && same_second(p, second_params))) {
        for (auto & cur : kvs) {
            std::fill(cur.fresh.begin(), cur.fresh.end(), 0);
        }
        stale         = true;
        has_second    = true;
        second_params = p;
    }

    if (is_new) {
        // the graphs built here also tell how each layer rotates, if it does
        build_graphs(undo);

        has_graph = true;
        for (const auto & cur : kvs) {
            for (const auto & layer : cur.layers) {
                weighs_keys |= layer.rotation.weighed;
            }
        }
    }
    if (check(p, err) != LLAMA_PCD_OK) { // what only a graph shows
        undo();
        return LLAMA_PCD_UNSUPPORTED;
    }

    return LLAMA_PCD_OK;
}

int32_t llama_pcd::set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err) {
    if (seq_id < 0 || is_twin(seq_id)) {
        err = format("seq_id is %d, allowed: 0 to %d", seq_id, seq_first - 1);
        return LLAMA_PCD_INVALID;
    }
    if (p) {
        llama_pcd_params all = params;
        all.beta         = p->beta;
        all.gamma        = p->gamma;
        all.relative_top = p->relative_top;

        err = check_range(all);
        if (!err.empty()) {
            return LLAMA_PCD_INVALID;
        }
    }
    seqs[seq_id] = p ? llama_pcd_seq { true, p->beta, p->gamma, p->relative_top } : llama_pcd_seq { false, 0.0f, 1, 0.0f };

    return LLAMA_PCD_OK;
}

llama_pcd_seq llama_pcd::contrast_of(llama_seq_id seq_id) const {
    const auto it = seqs.find(seq_id);
    return it != seqs.end() ? it->second : llama_pcd_seq { true, params.beta, params.gamma, params.relative_top };
}

void llama_pcd::off() {
    on = false;
}

uint32_t llama_pcd_max_nodes(const llama_context & lctx) {
    const auto & pcd     = lctx.get_cparams().pcd;
    const auto & hparams = lctx.get_model().hparams;

    uint32_t res = 0;
    for (uint32_t il = 0; pcd && il < hparams.n_layer_all; ++il) {
        res += 64;
        if (pcd->heads.params.max_ratio > 0.0f) { // on by now or before: three nodes for each head
            res += 3*(hparams.n_head(il) + hparams.n_head_kv(il));
        }
    }
    return res;
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
        /* .band         = */ LLAMA_PCD_BAND_LOW,
        /* .type_k_over  = */ -1,
        /* .alpha        = */ 0.2f,
        /* .base_ratio   = */ 1e-4f,
        /* .beta         = */ 2.5f,
        /* .gamma        = */ 30,
        /* .relative_top = */ 0.0f,
        /* .window       = */ 0,
        /* .n_sink       = */ 4,
        /* .noise        = */ 0.03f,
        /* .offset_min   = */ 0,
        /* .offset_max   = */ 0,
        /* .seed         = */ 0,
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
    std::string text;
    if (!pcd) {
        const int32_t status = llama_pcd(*ctx).check(*params, text);
        if (status != LLAMA_PCD_OK) {
            return report(status, text, err, n_err);
        }
    }
    try {
        return report(llama_pcd::made(*ctx).set(*params, text), text, err, n_err);
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

int32_t llama_pcd_set_seq(llama_context * ctx, llama_seq_id seq_id, const llama_pcd_params * params, char * err, size_t n_err) {
    auto & pcd = llama_pcd::of(*ctx);
    if (!pcd) {
        return report(LLAMA_PCD_INVALID, "PCD was never turned on in this context; call llama_pcd_set() first", err, n_err);
    }
    std::string text;
    return report(pcd->set_seq(seq_id, params, text), text, err, n_err);
}

void llama_pcd_unset_seq(llama_context * ctx, llama_seq_id seq_id) {
    if (auto & pcd = llama_pcd::of(*ctx)) {
        if (seq_id < 0) {
            pcd->seqs.clear();
        } else {
            pcd->seqs.erase(seq_id);
        }
    }
}

int32_t llama_pcd_set_tokens(llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, int32_t n) {
    return llama_pcd(*ctx).set_tokens(seq_id, tokens, n);
}

const float * llama_pcd_get_logits_ith(llama_context * ctx, int32_t i, int32_t which) {
    auto & pcd = llama_pcd::of(*ctx);
    return pcd ? pcd->get_row(i, which) : nullptr;
}

int32_t llama_pcd_set_exits(llama_context * ctx, const int32_t * layers, int32_t n, char * err, size_t n_err) {
    if (n <= 0 && !llama_pcd::of(*ctx)) {
        return LLAMA_PCD_OK;
    }
    std::string text;
    try {
        return report(llama_pcd::made(*ctx).set_exits({ layers, layers + std::max(n, 0) }, text), text, err, n_err);
    } catch (const std::exception & e) {
        return report(LLAMA_PCD_NO_MEMORY, e.what(), err, n_err);
    }
}

const float * llama_pcd_get_exit_logits(llama_context * ctx, int32_t i_layer, int32_t i) {
    const auto & pcd = llama_pcd::of(*ctx);
    return pcd ? pcd->get_exit(i_layer, i) : nullptr;
}

int32_t llama_pcd_set_head_ratios(llama_context * ctx, const llama_pcd_head_ratios * params, char * err, size_t n_err) {
    if (!params && !llama_pcd::of(*ctx)) {
        return LLAMA_PCD_OK;
    }
    std::string text;
    try {
        return report(llama_pcd::made(*ctx).set_head_ratios(params, text), text, err, n_err);
    } catch (const std::exception & e) {
        return report(LLAMA_PCD_NO_MEMORY, e.what(), err, n_err);
    }
}

int32_t llama_pcd_find_head_order(llama_context * ctx, char * err, size_t n_err) {
    std::string text;
    return report(llama_pcd::made(*ctx).find_head_order(text), text, err, n_err);
}

int32_t llama_pcd_get_head_ratios(llama_context * ctx, int32_t il, float * out, int32_t n) {
    const auto & pcd = llama_pcd::of(*ctx);
    return pcd ? pcd->get_head_ratios(il, out, n) : -1;
}

int32_t llama_pcd_set_tap(llama_context * ctx, const char * const * prefixes, size_t n, llama_pcd_tap_callback callback, void * user_data, char * err, size_t n_err) {
    if (n == 0 && !llama_pcd::of(*ctx)) {
        return LLAMA_PCD_OK;
    }
    std::string text;
    try {
        return report(llama_pcd::made(*ctx).set_tap({ prefixes, prefixes + n }, callback, user_data, text), text, err, n_err);
    } catch (const std::exception & e) {
        return report(LLAMA_PCD_NO_MEMORY, e.what(), err, n_err);
    }
}

llama_pcd_stats llama_pcd_get_stats(llama_context * ctx) {
    auto & pcd = llama_pcd::of(*ctx);

    llama_pcd_stats res = pcd ? pcd->stats : llama_pcd_stats {};
    res.kv_bytes = llama_pcd(*ctx).kv_bytes();
    return res;
}
