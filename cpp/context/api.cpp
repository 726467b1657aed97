// The public C API (llama-pcd.h): every extern "C" function but the sampler's, each behind the guard. What a
// function does is written in the part that it calls.

#include "llama-pcd.h"
#include "context/context.h"
#include "formulas/formulas.h"
#include "twins/settings.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

using pcd_context = llama_pcd_context;

// fn returns a status and may write a sentence; an exception counts as no memory, which is what throws
template <typename F>
static int32_t with_status(char * err, size_t n_err, const F & fn) {
    int32_t status = LLAMA_PCD_NO_MEMORY;

    const bool done = llama_pcd_guarded(err, n_err, [&]() {
        std::string text;
        status = fn(text);
        if (err && n_err > 0) {
            snprintf(err, n_err, "%s", text.c_str());
        }
    });
    return done ? status : (int32_t) LLAMA_PCD_NO_MEMORY;
}

static bool is_disabled(std::string & text) {
    const char * value = getenv("PYPCD_DISABLE");

    const bool res = value && *value && strcmp(value, "0") != 0;
    if (res) {
        text = "PYPCD_DISABLE is set in the environment";
    }
    return res;
}

//
// PCD
//

int32_t llama_pcd_version(void) {
    return LLAMA_PCD_VERSION;
}

llama_pcd_params llama_pcd_default_params(void) {
    llama_pcd_params res = {};
    for (const auto & field : pcd_fields) {
        field.put(res, field.default_value);
    }
    res.combine = true;
    return res;
}

static int32_t check_alone(llama_context & ctx, const llama_pcd_params & params, std::string & text) {
    const llama_pcd_memory    memory(ctx);
    const llama_pcd_settings  settings;
    const llama_pcd_seq_table sequences(settings);

    return llama_pcd_limits(memory, sequences).check(params, text);
}

// whether the parameters can be set; a context that nothing of ours was turned on in and that cannot run them is left alone
static int32_t check(llama_context & ctx, const llama_pcd_params & params, std::string & text) {
    if (!pcd_context::of(ctx)) {
        const int32_t status = check_alone(ctx, params, text);
        if (status != LLAMA_PCD_OK) {
            return status;
        }
    }
    auto & pcd = pcd_context::made(ctx);
    return pcd.core.check(params, text);
}

int32_t llama_pcd_set(llama_context * ctx, const llama_pcd_params * params, char * err, size_t n_err) {
    return with_status(err, n_err, [&](std::string & text) -> int32_t {
        auto * pcd = pcd_context::of(*ctx);

        if (!params) {
            if (pcd && pcd->core.settings.on) {
                pcd->core.settings.on = false;
                pcd->reset_graphs(); // they have the operations of PCD
            }
            return LLAMA_PCD_OK;
        }
        if (is_disabled(text)) {
            return LLAMA_PCD_DISABLED;
        }
        const int32_t status = check(*ctx, *params, text);
        if (status != LLAMA_PCD_OK) {
            return status;
        }
        auto & made = pcd_context::made(*ctx);
        return made.core.set(*params, text);
    });
}

bool llama_pcd_get(llama_context * ctx, llama_pcd_params * params) {
    const auto * pcd = pcd_context::of(*ctx);
    if (!pcd || !pcd->core.settings.on) {
        return false;
    }
    *params = pcd->core.settings.params;
    return true;
}

void llama_pcd_trim(llama_context * ctx) {
    llama_pcd_guarded_value(__func__, false, [&]() {
        if (auto * pcd = pcd_context::of(*ctx)) {
            ctx->synchronize();
            pcd->core.second.trim();
            if (!pcd->core.settings.on) {
                pcd->decoder.rows.trim();
            }
        }
        return true;
    });
}

int32_t llama_pcd_check(llama_context * ctx, const llama_pcd_params * params, char * err, size_t n_err) {
    return with_status(err, n_err, [&](std::string & text) -> int32_t {
        return is_disabled(text) ? LLAMA_PCD_DISABLED : check(*ctx, *params, text);
    });
}

void llama_pcd_suspend(llama_context * ctx, bool suspend) {
    if (auto * pcd = pcd_context::of(*ctx)) {
        pcd->core.settings.suspended = suspend;
    }
}

int32_t llama_pcd_set_seq(llama_context * ctx, llama_seq_id seq_id, const llama_pcd_params * params, char * err, size_t n_err) {
    return with_status(err, n_err, [&](std::string & text) -> int32_t {
        return pcd_context::made(*ctx).core.set_seq(seq_id, params, text);
    });
}

void llama_pcd_unset_seq(llama_context * ctx, llama_seq_id seq_id) {
    if (auto * pcd = pcd_context::of(*ctx)) {
        pcd->core.sequences.unset(seq_id);
    }
}

void llama_pcd_begin(llama_context * ctx, llama_seq_id seq_id, llama_pos pos) {
    llama_pcd_guarded_value(__func__, false, [&]() {
        if (auto * pcd = pcd_context::of(*ctx)) { // without one nothing is decoded with PCD
            pcd->core.sequences.begin(seq_id, pos);
        }
        return true;
    });
}

const float * llama_pcd_get_logits_ith(llama_context * ctx, int32_t i, int32_t which) {
    return llama_pcd_guarded_value<const float *>(__func__, nullptr, [&]() {
        auto * pcd = pcd_context::of(*ctx);
        return pcd ? pcd->decoder.rows.get(i, which) : nullptr;
    });
}

float llama_pcd_get_strength_ith(llama_context * ctx, int32_t i) {
    return llama_pcd_guarded_value(__func__, NAN, [&]() {
        auto * pcd = pcd_context::of(*ctx);
        return pcd ? pcd->decoder.rows.get_strength(i) : NAN;
    });
}

llama_pcd_stats llama_pcd_get_stats(llama_context * ctx) {
    return llama_pcd_guarded_value(__func__, llama_pcd_stats {}, [&]() {
        llama_pcd_stats res = {};
        if (const auto * pcd = pcd_context::of(*ctx)) {
            res = pcd->core.stats;
            res.second_bytes = pcd->core.second.n_bytes();
            res.state_bytes  = pcd->core.states.n_bytes;
            res.graph_bytes  = pcd->cached_bytes();
            res.row_bytes    = pcd->decoder.rows.n_bytes();
        }
        res.kv_bytes = llama_pcd_memory(*ctx).n_bytes();
        return res;
    });
}

const char * llama_pcd_fallback_text(int32_t reason) {
    return llama_pcd_pass::why((llama_pcd_fallback) reason);
}

int32_t llama_pcd_set_eval_callback(
        llama_context * ctx, ggml_backend_sched_eval_callback callback, void * user_data, bool counts, char * err, size_t n_err) {
    return with_status(err, n_err, [&](std::string & text) -> int32_t {
        if (!callback && !pcd_context::of(*ctx)) {
            return LLAMA_PCD_OK;
        }
        return pcd_context::made(*ctx).set_eval_callback(callback, user_data, counts, text);
    });
}

int32_t llama_pcd_attention(
        llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, int32_t n, llama_pos pos,
        const int32_t * heads, int32_t n_heads, double * pays, char * err, size_t n_err) {
    return with_status(err, n_err, [&](std::string & text) -> int32_t {
        if (n < 1 || n_heads < 1 || pos < 0) {
            text = format("there are %d tokens, %d heads, and the position is %d; allowed: 1, 1 and 0, or more", n, n_heads, pos);
            return LLAMA_PCD_INVALID;
        }
        std::vector<std::pair<int32_t, int32_t>> pairs;
        for (int32_t i = 0; i < n_heads; ++i) {
            pairs.push_back({ heads[2*i], heads[2*i + 1] });
        }
        return pcd_context::made(*ctx).attention(seq_id, { tokens, tokens + n }, pos, pairs, pays, text);
    });
}

//
// formulas
//

void llama_pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, int32_t band, double * out) {
    llama_pcd_guarded_value(__func__, false, [&]() {
        pcd_rho(n_rot, alpha, base_ratio, transition, band, out);
        return true;
    });
}

void llama_pcd_noise(int32_t seed, int32_t pos, int32_t layer, int32_t n_rot, float sigma, int32_t band, float * cos, float * sin) {
    pcd_noise(seed, pos, layer, n_rot, sigma, band, cos, sin);
}

int32_t llama_pcd_offset(int32_t seed, int32_t pos, int32_t offset_min, int32_t offset_max) {
    return pcd_offset(seed, pos, offset_min, offset_max);
}

int32_t llama_pcd_contrast(
        const float * standard, const float * local, int32_t n_vocab,
        float beta, int32_t gamma, float relative_top, float behind, float * out) {
    return llama_pcd_guarded_value(__func__, 0, [&]() {
        const pcd_contrast_params params = { beta, LLAMA_PCD_ADAPTIVE_NONE, gamma, relative_top };
        return pcd_contrast(standard, local, n_vocab, params, behind, out);
    });
}

float llama_pcd_strength(const float * standard, const float * local, int32_t n_vocab, float beta, int32_t adaptive) {
    return llama_pcd_guarded_value(__func__, NAN, [&]() {
        return pcd_strength(standard, local, n_vocab, beta, adaptive);
    });
}

float llama_pcd_entropy(const float * row, int32_t n_vocab) {
    return llama_pcd_guarded_value(__func__, NAN, [&]() { return pcd_entropy(row, n_vocab); });
}

//
// the CPU
//

static std::atomic<bool> amx_on { false };

void llama_pcd_set_amx(bool on) {
    amx_on = on;
}

bool llama_pcd_skips_buft(ggml_backend_buffer_type_t buft) {
    return !amx_on && strcmp(ggml_backend_buft_name(buft), "AMX") == 0;
}
