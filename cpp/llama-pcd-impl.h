// Every private member of llama.cpp that is used outside of upstream/. It does not know what a member is used for.

#pragma once

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-pcd-hooks.h"
#include "llama-pcd.h"

#include <array>

// a variable has another value as long as this lives
template <typename T>
struct llama_pcd_while {
    llama_pcd_while(T & variable, T value) : variable(variable), before(variable) { variable = value; }
    ~llama_pcd_while() { variable = before; }

private:
    T &     variable;
    const T before;
};

// What hangs on a context, as our parts see it; llama_pcd_context joins the parts.
struct llama_pcd : llama_pcd_hooks {
    explicit llama_pcd(llama_context & lctx) : lctx(lctx) {}

    llama_context & lctx;

    //
    // the graphs of the context
    //

    uint32_t generation = 0; // changes with the topology of the graphs

    bool is_counted = false; // by a callback that looks at operations, not at numbers

    // build the next graph anew; or that of llama.cpp's own scheduler alone, in which another one was computed
    void reset_graphs();
    void reset_own_graph() { lctx.gf_res_prev_active = nullptr; }

    // llama.cpp has one scheduler, whose memory is the last graph's. Graphs of twins alone, which take turns with its own, keep a
    // small scheduler of their own, so that each graph is used again.
    struct cached_graphs {
        ggml_backend_sched_ptr              sched;
        std::array<llm_graph_result_ptr, 2> results;
        llm_graph_result *                  active = nullptr;

        uint32_t made_for = 0; // n_schedulers at that time; no scheduler: there was no memory
    };

    cached_graphs cached;

    uint32_t n_schedulers = 1; // of llama.cpp's so far: it makes another when its graphs become larger or others

    size_t cached_bytes() const;

    // reserve memory for the graphs again: later, before the next one is computed, or now, by building the largest ones
    void reserve_later() { lctx.sched_need_reserve = true; }
    void reserve_now()   { reserve_later(); lctx.sched_reserve(); }

    // build a graph of a few tokens, one of which gives a row, for those who look on; no memory is laid out for it
    ggml_cgraph * build_graph();

    //
    // decode
    //

    bool nested = false; // inside our own call of llama_context::decode

    // What llama.cpp puts off until it decodes: a new scheduler, moved positions. It builds graphs for all of the context's sequences
    // then, in its own scheduler: so before there are twins, whose ids some of these may have, and before graphs are cached.
    void prepare();

    // as llama.cpp does it, without our hook; in graphs of their own (cached), unless there is no memory for them
    int decode_plain(const llama_batch_ext & batch, bool in_cached = false);

    //
    // private members of llama.cpp
    //

    struct outputs; // upstream/outputs.h

    // the state of recurrent layers
    static uint32_t & n_seq_max(llama_memory_recurrent & m) { return m.n_seq_max; }
    static auto     & ctxs_bufs(llama_memory_recurrent & m) { return m.ctxs_bufs; }

    // settings
    static llama_cparams & cparams(llama_context & c) { return c.cparams; }

    static ggml_threadpool_t & threadpool      (llama_context & c) { return c.threadpool; }
    static ggml_threadpool_t & threadpool_batch(llama_context & c) { return c.threadpool_batch; }

    static const auto & samplers(const llama_context & c) { return c.sampling.samplers; } // of the backend

    // timings
    static int64_t & n_queued_tokens   (llama_context & c) { return c.n_queued_tokens; }
    static int64_t & t_compute_start_us(llama_context & c) { return c.t_compute_start_us; }

    // a KV cache; with kv_unified there is one stream of cells
    static llama_kv_cells       & cells   (llama_kv_cache & kv)       { return kv.v_cells[0]; }
    static const llama_kv_cells & cells   (const llama_kv_cache & kv) { return kv.v_cells[0]; }
    static uint32_t             & head    (llama_kv_cache & kv)       { return kv.v_heads[0]; }
    static const llama_hparams  & hparams (const llama_kv_cache & kv) { return kv.hparams; }
    static bool                   slides  (const llama_kv_cache & kv) { return kv.n_swa > 0; }
    static bool                   borrows (const llama_kv_cache & kv) { return kv.other != nullptr; }
    static size_t                 n_bytes (const llama_kv_cache & kv) { return kv.size_k_bytes() + kv.size_v_bytes(); }

    static bool                   transforms_keys(const llama_kv_cache & kv) { return kv.attn_rot_k; } // by a Hadamard matrix

    static const auto & layers(const llama_kv_cache & kv) { return kv.layers; }

    // whether a token at p1 does not see one at p0 because of the sliding window
    static bool is_masked(const llama_kv_cache & kv, llama_pos p0, llama_pos p1) {
        return llama_hparams::is_masked_swa(kv.n_swa, kv.swa_type, p0, p1);
    }

private:
    bool make_cached(uint32_t n_tokens);
    void swap_cached();

    struct swapped { // while it lives, llama.cpp works with the cached graphs
        explicit swapped(llama_pcd & pcd) : pcd(pcd) { pcd.swap_cached(); }
        ~swapped() { pcd.swap_cached(); }

        llama_pcd & pcd;
    };
};

// ggml lays a graph out in memory as it did the last one with as many nodes and leafs, whatever they do: a tensor of one may then
// lie where another that is still needed lies. After this there is no last one. False: no memory.
bool llama_pcd_forget_layout(ggml_backend_sched_t sched);
