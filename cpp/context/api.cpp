// The public C API (llama-pcd.h): the extern "C" functions that work on a context, but for the sampler's, each behind the guard. What a
// function does is written in the part that it calls.

#include "context/context.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

using pcd_context = llama_pcd_context;

// fn(parts of the context, sentence) returns a status and may write a sentence; an exception counts as no memory, which is what throws
template <typename F>
static int32_t with_parts(llama_context * ctx, char * err, size_t n_err, const F & fn) {
    return llama_pcd_guarded("PCD", (int32_t) LLAMA_PCD_NO_MEMORY, [&]() {
        std::string   text;
        auto *        pcd    = pcd_context::made(*ctx, text);
        const int32_t status = pcd ? fn(*pcd, text) : (int32_t) LLAMA_PCD_UNSUPPORTED;
        if (err && n_err > 0) {
            snprintf(err, n_err, "%s", text.c_str());
        }
        return status;
    }, err, n_err);
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

static int32_t check(pcd_context & pcd, const llama_pcd_params & params, std::string & text) {
    const char * value = getenv("PYPCD_DISABLE");
    if (value && *value && strcmp(value, "0") != 0) {
        text = "PYPCD_DISABLE is set in the environment";
        return LLAMA_PCD_DISABLED;
    }
    return pcd.core.check(params, text);
}

int32_t llama_pcd_set(llama_context * ctx, const llama_pcd_params * params, char * err, size_t n_err) {
    if (params) {
        return with_parts(ctx, err, n_err, [&](pcd_context & pcd, std::string & text) {
            const int32_t status = check(pcd, *params, text);
            if (status == LLAMA_PCD_OK) {
                pcd.core.set(*params);
            }
            return status;
        });
    }
    auto * pcd = pcd_context::of(*ctx);
    if (pcd && pcd->core.settings.on) {
        pcd->core.settings.on = false;
        pcd->reset_graphs(); // they have the operations of PCD
    }
    return LLAMA_PCD_OK;
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
    llama_pcd_guarded(__func__, false, [&]() {
        if (auto * pcd = pcd_context::of(*ctx)) {
            ctx->synchronize();
            pcd->core.second.trim();
            if (!pcd->core.settings.on) {
                pcd->decoder.rows.forget();
            }
        }
        return true;
    });
}

int32_t llama_pcd_check(llama_context * ctx, const llama_pcd_params * params, char * err, size_t n_err) {
    return with_parts(ctx, err, n_err, [&](pcd_context & pcd, std::string & text) { return check(pcd, *params, text); });
}

void llama_pcd_suspend(llama_context * ctx, bool suspend) {
    if (auto * pcd = pcd_context::of(*ctx)) {
        pcd->core.settings.suspended = suspend;
    }
}

int32_t llama_pcd_set_seq(llama_context * ctx, llama_seq_id seq_id, const llama_pcd_params * params, char * err, size_t n_err) {
    return with_parts(ctx, err, n_err, [&](pcd_context & pcd, std::string & text) { return pcd.core.set_seq(seq_id, params, text); });
}

void llama_pcd_unset_seq(llama_context * ctx, llama_seq_id seq_id) {
    if (auto * pcd = pcd_context::of(*ctx)) {
        pcd->core.sequences.unset(seq_id);
    }
}

void llama_pcd_begin(llama_context * ctx, llama_seq_id seq_id, llama_pos pos) {
    llama_pcd_guarded(__func__, false, [&]() {
        if (auto * pcd = pcd_context::of(*ctx)) { // without one nothing is decoded with PCD
            pcd->core.sequences.begin(seq_id, pos);
        }
        return true;
    });
}

const float * llama_pcd_get_logits_ith(llama_context * ctx, int32_t i, int32_t which) {
    return llama_pcd_guarded<const float *>(__func__, nullptr, [&]() {
        auto * pcd = pcd_context::of(*ctx);
        return pcd ? pcd->decoder.rows.get(i, which) : nullptr;
    });
}

float llama_pcd_get_strength_ith(llama_context * ctx, int32_t i) {
    return llama_pcd_guarded(__func__, NAN, [&]() {
        auto * pcd = pcd_context::of(*ctx);
        return pcd ? pcd->decoder.rows.get_strength(i) : NAN;
    });
}

llama_pcd_stats llama_pcd_get_stats(llama_context * ctx) {
    return llama_pcd_guarded(__func__, llama_pcd_stats {}, [&]() {
        llama_pcd_stats res = {};
        if (const auto * pcd = pcd_context::of(*ctx)) {
            res = pcd->core.stats;
            res.second_bytes = pcd->core.second.n_bytes();
            res.state_bytes  = pcd->core.states.n_bytes;
            res.graph_bytes  = pcd->cached_bytes();
            res.row_bytes    = pcd->decoder.rows.n_bytes();
        }
        for (const auto * kv : llama_pcd_memory(*ctx).kvs) {
            res.kv_bytes += llama_pcd::n_bytes(*kv);
        }
        return res;
    });
}

int32_t llama_pcd_set_eval_callback(
        llama_context * ctx, ggml_backend_sched_eval_callback callback, void * user_data, bool counts, char * err, size_t n_err) {
    if (!callback && !pcd_context::of(*ctx)) {
        return LLAMA_PCD_OK;
    }
    return with_parts(ctx, err, n_err, [&](pcd_context & pcd, std::string & text) {
        return pcd.set_eval_callback(callback, user_data, counts, text);
    });
}

int32_t llama_pcd_attention(
        llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, int32_t n, llama_pos pos,
        const int32_t * heads, int32_t n_heads, double * pays, char * err, size_t n_err) {
    return with_parts(ctx, err, n_err, [&](pcd_context & pcd, std::string & text) {
        return pcd.attention(seq_id, tokens, n, pos, heads, n_heads, pays, text);
    });
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
