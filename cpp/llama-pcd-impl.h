// What the hooks in upstream's files call, and the state behind them. See README.md for every hook.

#pragma once

#include "llama-pcd.h"

#include "llama-batch.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"

#include "ggml-cpp.h"

#include <string>
#include <vector>

// twins get the last sequence ids, one each, so that they never see one another
static constexpr llama_seq_id LLAMA_PCD_SEQ_FIRST = LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS;

static inline bool llama_pcd_is_twin(llama_seq_id seq_id) {
    return seq_id >= LLAMA_PCD_SEQ_FIRST;
}

// one rotary call as a model's graph made it
struct llama_pcd_rotation {
    ggml_tensor * out     = nullptr; // the rotated tensor; null: this layer does not rotate
    ggml_tensor * factors = nullptr; // the model's own frequency factors

    bool  multi      = false;
    bool  weighed    = false; // learned weights multiply the key after its rotation
    bool  hadamard   = false; // the cache stores the key Hadamard-rotated
    int   n_dims     = 0;
    int   mode       = 0;
    int   n_ctx_orig = 0;
    int   offset     = 0;
    int   sections[GGML_MROPE_SECTIONS] = {};
    float freq_base  = 0.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float beta_fast  = 0.0f;
    float beta_slow  = 0.0f;
};

// the second keys of one KV cache: K turned from theta to theta*, in the same cells
struct llama_pcd_kv {
    struct layer {
        uint32_t           il;
        ggml_tensor      * k1;
        ggml_tensor      * k2;
        llama_pcd_rotation rotation; // as last seen in a graph
    };

    llama_kv_cache * kv;

    std::vector<layer> layers;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;
};

struct llama_pcd {
    explicit llama_pcd(llama_context & lctx) : lctx(lctx) {}

    // where a context keeps its state; empty until PCD is first turned on
    static std::shared_ptr<llama_pcd> & of(llama_context & lctx);

    llama_context & lctx;

    llama_pcd_params params = {};

    bool on        = false;
    bool suspended = false; // keep the second keys up to date, evaluate no twins
    bool graphs_on = false; // what the last graphs were built for
    bool nested    = false; // inside our own call of llama_context::decode
    bool stale     = false; // some second keys no longer follow from the first
    bool weighs_keys = false; // see llama_pcd_rotation::weighed; known once a graph was built
    bool misplaced = false; // an ubatch came with its twins in another place than its end

    uint32_t generation = 0; // changes with the topology of the graphs

    std::vector<llama_pcd_kv> kvs; // of the memory; with second keys once cache = rerotated was asked for

    std::vector<llama_seq_id> parents; // sequence of the token behind twin i of the batch in flight

    llama_pcd_stats stats = {};

    bool rotates() const { return params.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION; }
    bool has_second_keys() const { return rotates() && params.cache == LLAMA_PCD_CACHE_REROTATED; }

    //
    // settings (llama-pcd.cpp)
    //

    int32_t check(const llama_pcd_params & p, std::string & err) const;

    // what the context is set to that twins cannot live with; empty: nothing
    std::string conflict() const;

    int32_t set  (const llama_pcd_params & p, std::string & err);
    void    off();

    //
    // decode (llama-pcd-decode.cpp)
    //

    int decode(const llama_batch_ext & batch);

    const float * get_row(int32_t i, int32_t which);

    void forget_rows() { rows.out_ids.clear(); }

    //
    // graph (llama-pcd-graph.cpp)
    //

    // the difference table theta* - theta as frequency factors, times the model's own; kept on the device
    ggml_tensor * difference_table(ggml_tensor * factors, int n_dims);

    void write_difference_tables();

    llama_pcd_kv::layer * find_layer(const llama_kv_cache * kv, int32_t il);
    llama_pcd_kv::layer * find_layer(const ggml_tensor * k1);

    // rewrite the twins' rows of a KQ mask
    void mask_twins(ggml_tensor * dst, const llama_ubatch * ubatch, const llama_kv_cells & cells,
            uint32_t n_swa, llama_swa_type swa_type, bool use_alibi) const;

    ggml_status derive_second_keys();

    void for_each_kv(const std::function<void(llama_kv_cache *)> & fn) const;

    int64_t kv_bytes() const;

    void reset_graphs();

private:
    struct table {
        ggml_tensor * factors;
        ggml_tensor * t;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    std::vector<table> tables;

    // rows of the last decode: [n_rows][n_vocab]
    struct {
        llama_pcd_params     params;    // as they were
        std::vector<int32_t> out_ids;   // batch index of each row
        std::vector<float>   standard;
        std::vector<float>   over_rotated;
        std::vector<bool>    has_over_rotated;
        std::vector<float>   contrasted; // made when asked for

        void resize(size_t n_rows, size_t n_vocab) {
            for (auto * cur : { &standard, &over_rotated }) {
                if (cur->capacity() > 64*n_vocab && cur->capacity() > 4*n_rows*n_vocab) {
                    *cur = {}; // a long prompt's rows are not kept for single tokens
                }
                cur->resize(n_rows*n_vocab);
            }
            has_over_rotated.assign(n_rows, false);
        }
    } rows;

    bool alloc_second_keys(std::string & err);
    ggml_status derive_range(const llama_pcd_kv & kv, uint32_t c0, uint32_t c1);

    int decode_nested    (const llama_batch_ext & batch);
    int decode_fused     (const llama_batch_ext & batch);
    int decode_alternate (const llama_batch_ext & batch);
    int decode_sequential(const llama_batch_ext & batch);
    int decode_twins     (const llama_batch_ext & batch, size_t i0, size_t n);

    llama_batch_ext batch_like(const llama_batch_ext & batch) const;

    void add_twins (llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n);
    void drop_twins();

    uint32_t n_free_cells() const;

    bool forgets() const;
    bool needs_twin(const float * standard) const;

    void write_row(size_t i, float * dst);
};

//
// hooks
//

// llm_graph_context's constructor: which graph is being built
void llama_pcd_graph_begin(const llm_graph_context & gctx);

// llm_graph_context::build_attn_mha: attention of standard tokens and twins side by side; null: nothing to do
ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il);

// llama_kv_cache::cpy_k: store the second keys too
void llama_pcd_store_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il);

// llama_context::decode: true if the batch was decoded here, with the result in ret
bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret);

// llama_context::process_ubatch: whether it is prompt processing; one token and its twin are not
bool llama_pcd_is_batched(const llama_cparams & cparams, const llama_ubatch & ubatch);

// llama_context::graph_max_nodes
uint32_t llama_pcd_max_nodes(const llama_context & lctx);

// llama_kv_cache::update: the first keys changed under the second
void llama_pcd_set_stale(llama_pcd * pcd);

// llama_kv_cache::state_read_sinfo: other cells from here on
void llama_pcd_state_loaded(llama_pcd * pcd);
