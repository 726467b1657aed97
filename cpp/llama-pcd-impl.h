// The seam between llama.cpp and this folder, both ways: what llama.cpp's files call (the hooks, see README.md), and every
// private member of llama.cpp that we use. It does not know what a hook does, nor what a member is used for.

#pragma once

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-pcd.h"

#include <array>
#include <functional>
#include <map>

// a flag that is set as long as this lives
struct llama_pcd_while {
    explicit llama_pcd_while(bool & flag) : flag(flag) { flag = true; }
    ~llama_pcd_while() { flag = false; }

private:
    bool & flag;
};

// What hangs on a context (cparams.pcd), empty until something of ours is first turned on.
// llama.cpp's files, and our parts below, see this much of it; llama_pcd_context joins the parts.
struct llama_pcd {
    explicit llama_pcd(llama_context & lctx) : lctx(lctx) {}

    virtual ~llama_pcd() = default;

    llama_context & lctx;

    //
    // hooks
    //

    // llama_context::decode, after each micro-batch
    virtual void ubatch_computed() = 0;

    // llama_kv_cache::memory_breakdown: what lies beside this cache
    virtual void add_memory(const llama_kv_cache & kv, std::map<ggml_backend_buffer_type_t, size_t> & sizes) const = 0;

    // llama_kv_cache: cells were given to other tokens, decoded or loaded ones; a state is loaded (-1: of all sequences, whose cells
    // are not given one by one); positions are about to change
    virtual void cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo) = 0;
    virtual void cells_loaded(llama_seq_id seq_id) = 0;
    virtual void keys_shift  (llama_kv_cache & kv) = 0;

    // llama_memory_*, as callers use them: a whole sequence (-1: all) was removed; copied; all others were removed
    virtual void seq_removed(llama_seq_id seq_id) = 0;
    virtual void seq_copied (llama_seq_id src, llama_seq_id dst) = 0;
    virtual void seq_kept   (llama_seq_id seq_id) = 0;

    // llama_kv_cache::set_input_kq_mask: the last rows, those of the twins, are filled here
    virtual uint32_t n_mask_rows(const llama_kv_cache & kv, const llama_ubatch & ubatch) const = 0;
    virtual void     fill_mask  (const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const = 0;

    //
    // the graphs of the context
    //

    uint32_t generation = 0; // changes with the topology of the graphs

    // build the next graph anew
    void reset_graphs();

    // the same for llama.cpp's own graph alone: another one was computed in its scheduler
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

    void   drop_cached() { cached = {}; }
    size_t cached_bytes() const;

    // reserve memory for the graphs again: later, before the next one is computed, or now, by building the largest ones.
    // `undo` runs if that throws.
    void reserve_later() { lctx.sched_need_reserve = true; }
    void reserve_now(const std::function<void()> & undo);

    // build a graph of a few tokens, one of which gives a row, for those who look on; no memory is laid out for it
    void build_graph();

    //
    // decode
    //

    bool nested = false; // inside our own call of llama_context::decode

    // What llama.cpp puts off until it decodes: a new scheduler, moved positions. It builds graphs for all of the context's sequences
    // then, in its own scheduler: so before there are twins, whose ids some of these may have, and before graphs are cached.
    void prepare();

    // as llama.cpp does it, without our hook; in graphs of their own, unless there is no memory for them
    int decode_plain(const llama_batch_ext & batch, cached_graphs * own = nullptr);

    //
    // private members of llama.cpp
    //

    // rows that the context holds
    static float *                logits       (llama_context & c) { return c.logits.data; }
    static float *                embd         (llama_context & c) { return c.embd.data; }
    static uint32_t             & n_outputs    (llama_context & c) { return c.n_outputs; }
    static std::vector<int32_t> & output_ids   (llama_context & c) { return c.output_ids; }

    static uint32_t output_reserve    (llama_context & c, size_t n) { return c.output_reserve(n); }
    static void     output_reorder    (llama_context & c)           { c.output_reorder(); }
    static void     output_swaps_clear(llama_context & c)           { c.output_swaps.clear(); }

    // the state of recurrent layers
    static uint32_t & n_seq_max(llama_memory_recurrent & m) { return m.n_seq_max; }
    static auto     & ctxs_bufs(llama_memory_recurrent & m) { return m.ctxs_bufs; }

    // the kind of memory that inputs of graphs are in: the CPU's, from which a device copies them
    static ggml_backend_buffer_type_t input_buft(const llama_context & c) { return c.backend_buft.back(); }

    // settings
    static llama_cparams              & cparams(llama_context & c) { return c.cparams; }
    static std::shared_ptr<llama_pcd> & slot   (llama_context & c) { return c.cparams.pcd; }

    // backend samplers, and what they gave for the outputs of the last batch
    static const auto & samplers(const llama_context & c) { return c.sampling.samplers; }
    static       auto & sampling(llama_context & c)       { return c.sampling; }

    // timings
    static int64_t & n_queued_tokens   (llama_context & c) { return c.n_queued_tokens; }
    static int64_t & t_compute_start_us(llama_context & c) { return c.t_compute_start_us; }

    // a KV cache; with kv_unified there is one stream of cells
    static llama_kv_cells       & cells   (llama_kv_cache & kv)       { return kv.v_cells[0]; }
    static const llama_kv_cells & cells   (const llama_kv_cache & kv) { return kv.v_cells[0]; }
    static uint32_t             & head    (llama_kv_cache & kv)       { return kv.v_heads[0]; }
    static uint32_t               head    (const llama_kv_cache & kv) { return kv.v_heads[0]; }
    static const llama_hparams  & hparams (const llama_kv_cache & kv) { return kv.hparams; }
    static bool                   v_trans (const llama_kv_cache & kv) { return kv.v_trans; }
    static bool                   slides  (const llama_kv_cache & kv) { return kv.n_swa > 0; }
    static bool                   borrows (const llama_kv_cache & kv) { return kv.other != nullptr; }
    static size_t                 n_bytes (const llama_kv_cache & kv) { return kv.size_k_bytes() + kv.size_v_bytes(); }

    static bool                   transforms_keys(const llama_kv_cache & kv) { return kv.attn_rot_k; } // by a Hadamard matrix

    static const auto & layers(const llama_kv_cache & kv) { return kv.layers; }

    static ggml_tensor * keys_of(const llama_kv_cache & kv, int32_t il); // null: the layer has none in this cache
    static bool          on_host(const llama_kv_cache & kv);             // all keys are in the CPU's memory

    // whether a token at p1 does not see one at p0 because of the sliding window
    static bool is_masked(const llama_kv_cache & kv, llama_pos p0, llama_pos p1) {
        return llama_hparams::is_masked_swa(kv.n_swa, kv.swa_type, p0, p1);
    }
    static bool has_swa_type(const llama_kv_cache & kv) { return kv.swa_type != LLAMA_SWA_TYPE_NONE; }

private:
    // while it lives, llama.cpp works with these graphs
    struct swapped {
        swapped(llama_pcd & pcd, cached_graphs & own);
        ~swapped();

    private:
        llama_pcd   & pcd;
        cached_graphs & own;

        void swap() const;
    };

    bool make_cached(cached_graphs & own, uint32_t n_tokens);
};

// Goes with a graph that was built for a context with parts of ours: it is not used again for others.
class llm_graph_input_of_pcd : public llm_graph_input_i {
public:
    explicit llm_graph_input_of_pcd(const llama_pcd & pcd) : pcd(pcd), generation(pcd.generation) {}

    void set_input(const llama_ubatch * /*ubatch*/) override {}

    bool can_reuse(const llm_graph_params & params) override {
        return params.cparams.pcd.get() == &pcd && pcd.generation == generation;
    }

    const llama_pcd & pcd;

    const uint32_t generation;
};

// ggml lays a graph out in memory as it did the last one with as many nodes and leafs, whatever they do: a tensor of one may then
// lie where another that is still needed lies. After this there is no last one. False: no memory.
bool llama_pcd_forget_layout(ggml_backend_sched_t sched);

//
// hooks that are functions
//

// llm_graph_context's constructor: which graph is being built
void llama_pcd_graph_begin(const llm_graph_context & gctx);

// llama_model::build_graph: the graph is whole
void llama_pcd_graph_end();

// llm_graph_context::build_attn_mha: attention of standard tokens and twins side by side; null: nothing to do
ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il);

// llama_kv_cache::cpy_k, cpy_v: store the second keys and values too
void llama_pcd_store_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il);
void llama_pcd_store_v(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * v_cur, int32_t il);

// llama_context::decode: true if the batch was decoded here, with the result in ret
bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret);

// llama_context::process_ubatch: compute a graph. One token and its twin are no prompt: they run with the threads for generation.
ggml_status llama_pcd_compute(llama_context & lctx, ggml_cgraph * gf, const llama_ubatch & ubatch);

// llama_context::graph_max_nodes: room for the nodes that we add; llama.cpp asks when it makes a scheduler
uint32_t llama_pcd_max_nodes(const llama_context & lctx);

// llama_memory_seq_rm, after a removal (recurrent memory may refuse): settings go with a whole sequence; true
bool llama_pcd_seq_removed(llama_memory_i & memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

// llama-model.cpp, make_cpu_buft_list: weights are not kept in this buffer type
bool llama_pcd_skips_buft(ggml_backend_buffer_type_t buft);
