// What the hooks in upstream's files call, and the state behind them. See README.md for every hook.

#pragma once

#include "llama-pcd.h"

#include "llama-batch.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

// a windowed twin's attention looks at cells in whole blocks, so that the graph changes only now and then
static constexpr uint32_t LLAMA_PCD_CELL_BLOCK = 256;

// one rotary call as a model's graph made it
struct llama_pcd_rotation {
    ggml_tensor * out     = nullptr; // the rotated tensor; null: this layer does not rotate
    ggml_tensor * factors = nullptr; // the model's own frequency factors

    ggml_tensor * weights = nullptr; // what multiplies the key after its rotation

    bool  multi      = false;
    bool  weighed    = false; // the key is changed after its rotation otherwise than by one such multiplication
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

// what is kept beside one KV cache, in the same cells
struct llama_pcd_kv {
    struct layer {
        uint32_t      il;
        bool          rotates; // the model rotates this layer's keys
        ggml_tensor * k1;
        ggml_tensor * v1;            // null: the values are a part of the keys
        ggml_tensor * k2 = nullptr;  // null: not kept
        ggml_tensor * v2 = nullptr;

        llama_pcd_rotation rotation = {}; // as last seen in a graph
    };

    llama_kv_cache * kv;

    std::vector<layer> layers;

    // cache = separate: whether the second keys and values of a cell were evaluated for the token in it
    std::vector<uint8_t> fresh;

    // where the keys of the twins in flight go
    std::vector<int32_t> twin_cells;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;
};

// hidden states of some layers, read through the output head
struct llama_pcd_exits {
    struct row {
        size_t at;     // in logits, that of the first layer
        size_t stride; // from one layer to the next
    };

    std::vector<int32_t> layers; // empty: off

    // what only a graph shows: by layer, whether the hidden state that enters it is there; empty: not looked for yet
    std::vector<bool> found;
    bool              probing = false;

    // of the last decode
    std::map<int32_t, row> rows; // by batch index
    std::vector<float>     logits;

    void forget() { rows.clear(); logits.clear(); }
};

// which tensors of an evaluation somebody reads
struct llama_pcd_tap {
    std::vector<std::string> prefixes; // of their names; empty: none

    llama_pcd_tap_callback callback  = nullptr;
    void *                 user_data = nullptr;

    bool flash_attn = false; // as it was before
};

// a ratio of positions for each attention head
struct llama_pcd_heads {
    struct table {
        int32_t       il; // the layer whose order it has; -1: an order that needs no layer
        ggml_tensor * factors;
        ggml_tensor * t;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    bool on = false;

    llama_pcd_head_ratios params = {};

    std::vector<table> tables;

    // order = outlier
    bool    finding   = false; // the next decode is the prompt that tells the order
    bool    has_order = false;
    int64_t n_prompt  = 0;     // its tokens, while it is decoded

    // what only a graph shows
    int64_t     n_rotated = 0; // rotations done head by head
    std::string reason;        // why it cannot be done; empty: it can
};

// the contrast of one sequence, where it differs from the context's
struct llama_pcd_seq {
    bool    on;
    float   beta;
    int32_t gamma;
    float   relative_top;
};

struct llama_pcd {
    explicit llama_pcd(llama_context & lctx);

    // where a context keeps its state; empty until something of this is first turned on
    static std::shared_ptr<llama_pcd> & of(llama_context & lctx);

    // the same, made if need be
    static llama_pcd & made(llama_context & lctx);

    llama_context & lctx;

    // the state of recurrent layers beside the KV cache; null: none
    llama_memory_recurrent * recr = nullptr;

    // Twins get the last sequence ids, one each, so that they never see one another. Recurrent layers have a state for
    // each of the context's sequences and for no others: there the last of these is the twin's.
    llama_seq_id seq_first = LLAMA_MAX_SEQ - LLAMA_PCD_MAX_TWINS;

    bool is_twin(llama_seq_id seq_id) const { return seq_id >= seq_first; }

    llama_pcd_params params = {};

    std::map<llama_seq_id, llama_pcd_seq> seqs;

    bool on        = false;
    bool suspended = false; // keep the second keys up to date, evaluate no rows for them
    bool graphs_on = false; // what the last graphs were built for
    bool nested    = false; // inside our own call of llama_context::decode
    bool stale     = false; // cache = rerotated: some second keys no longer follow from the first
    bool together  = false; // twins ride in the batch of their tokens
    bool misplaced = false; // an ubatch came with its twins in another place than its end

    // what only a graph shows
    bool weighs_keys   = false; // see llama_pcd_rotation::weighed
    bool offsets_pairs = false; // a rotation does not start at the first dimension of its tensor
    bool has_rotations = false; // some layer rotates
    bool has_graph     = false; // one was built, so the above is known

    uint32_t generation = 0; // changes with the topology of the graphs

    std::vector<llama_pcd_kv> kvs; // one for each cache of the memory

    std::vector<llama_seq_id> parents; // sequence of the tokens behind twin sequence i of the batch in flight

    llama_pcd_stats stats = {};

    llama_pcd_exits exits;
    llama_pcd_tap   tap;
    llama_pcd_heads heads;

    static bool rotates  (const llama_pcd_params & p) { return p.perturbation == LLAMA_PCD_PERTURBATION_OVER_ROTATION; }
    static bool rerotated(const llama_pcd_params & p) { return p.cache == LLAMA_PCD_CACHE_REROTATED && rotates(p); }
    static bool separate (const llama_pcd_params & p) { return p.cache == LLAMA_PCD_CACHE_SEPARATE; }

    bool rotates()   const { return rotates(params); }
    bool rerotated() const { return rerotated(params); }
    bool separate()  const { return separate(params); }

    //
    // settings (llama-pcd.cpp)
    //

    int32_t     check     (const llama_pcd_params & p, std::string & err) const;
    std::string check_type(const llama_pcd_params & p) const;

    // what the context is set to that twins cannot live with; empty: nothing
    std::string conflict() const;

    int32_t set    (const llama_pcd_params & p, std::string & err);
    int32_t set_seq(llama_seq_id seq_id, const llama_pcd_params * p, std::string & err);
    void    off();

    llama_pcd_seq contrast_of(llama_seq_id seq_id) const;

    //
    // decode (llama-pcd-decode.cpp)
    //

    int decode(const llama_batch_ext & batch);

    const float * get_row(int32_t i, int32_t which);

    void forget_rows() { rows.out_ids.clear(); rows.contrasts.clear(); }

    //
    // graph (llama-pcd-graph.cpp)
    //

    // frequency factors, times the model's own, kept on the device
    enum table_kind {
        TABLE_DIFFERENCE, // theta* - theta
        TABLE_WHOLE,      // theta*
    };

    ggml_tensor * table(table_kind kind, ggml_tensor * factors, int n_dims);

    void write_tables();

    // 1/w for learned weights w, kept on the device
    ggml_tensor * inverse(ggml_tensor * weights);

    void reset_graphs();
    void build_graphs(const std::function<void()> & undo); // the ones memory is reserved for; undo if that fails

    //
    // early exits (llama-pcd-exits.cpp)
    //

    int32_t set_exits(const std::vector<int32_t> & layers, std::string & err);

    void build_exits(const llama_model & model, const llm_graph_context & gctx);
    void take_exits (const llm_graph_result & res, const llama_ubatch & ubatch);

    const float * get_exit(int32_t i_layer, int32_t i) const;

    //
    // tap (llama-pcd-tap.cpp)
    //

    int32_t set_tap(const std::vector<std::string> & prefixes, llama_pcd_tap_callback callback, void * user_data, std::string & err);

    bool taps(const char * name) const;

    static bool on_eval(ggml_tensor * t, bool ask, void * user_data);

    //
    // ratios of heads (llama-pcd-heads.cpp)
    //

    int32_t check_heads    (const llama_pcd_head_ratios & p, std::string & err) const;
    int32_t set_head_ratios(const llama_pcd_head_ratios * p, std::string & err);
    int32_t find_head_order(std::string & err);
    int32_t get_head_ratios(int32_t il, float * out, int32_t n) const;

    bool decode_heads(const llama_batch_ext & batch, int & ret);

    ggml_tensor * head_table(int32_t il, ggml_tensor * factors, int n_dims, int64_t n_head);

    //
    // second keys and values (llama-pcd-kv.cpp)
    //

    void for_each_kv(const std::function<void(llama_kv_cache *)> & fn) const;

    int64_t kv_bytes() const;

    llama_pcd_kv        * find_kv   (const llama_kv_cache * kv);
    llama_pcd_kv::layer * find_layer(const llama_kv_cache * kv, int32_t il);
    llama_pcd_kv::layer * find_layer(const ggml_tensor * k1);

    bool v_is_transposed(const llama_kv_cache & kv) const { return kv.v_trans; }

    int32_t set_tokens(llama_seq_id seq_id, const llama_token * tokens, int32_t n) const;

    void find_twin_cells(const llama_ubatch & ubatch);

    // the twin at entry i of an ubatch
    struct twin_view {
        uint32_t     i;
        llama_seq_id parent;
        llama_pos    pos;
        int32_t      own; // the cell with its own keys
        bool         is_2d;
        llama_pos    x;
        llama_pos    y;
    };

    std::vector<twin_view> twin_views(const llama_pcd_kv & cur, const llama_ubatch & ubatch) const;

    bool sees(const llama_kv_cache & kv, const twin_view & v, uint32_t j) const;

    struct cell_range {
        uint32_t begin = 0;
        bool     head  = false;

        bool operator==(const cell_range & other) const { return begin == other.begin && head == other.head; }
    };

    cell_range visible_cells(const llama_pcd_kv & cur, const llama_ubatch & ubatch) const;

    bool sees_one_more(const llama_kv_cache & kv, const twin_view & prev, const twin_view & v) const;

    template <typename T>
    void fill_mask(T * mask, int64_t n_kv, const llama_kv_cache & kv, const std::vector<twin_view> & views) const;

    // rewrite the twins' rows of a KQ mask
    void mask_twins(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const;

    void cells_placed(const llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo);
    void cells_loaded(llama_seq_id seq_id);
    void keys_shift  (llama_kv_cache & kv);

private:
    struct table_entry {
        table_kind    kind = TABLE_WHOLE;
        ggml_tensor * factors;
        ggml_tensor * t;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    std::vector<table_entry> tables;
    std::vector<table_entry> inverses; // of weights in place of factors

    // rows of the last decode: [n_rows][n_vocab]
    struct {
        std::vector<int32_t>       out_ids;   // batch index of each row
        std::vector<llama_pcd_seq> contrasts; // as they were
        std::vector<float> standard;
        std::vector<float> over_rotated;
        std::vector<bool>  has_over_rotated;
        std::vector<float> contrasted; // made when asked for

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

    // outputs of the parts of a batch, in the order of its tokens
    struct outputs {
        std::vector<size_t> ids;
        std::vector<float>  logits;
        std::vector<float>  embd;
    };

    //
    // second keys and values (llama-pcd-kv.cpp)
    //

    llama_pcd_params second_params = {}; // what they were made with
    bool             has_second    = false;

    bool alloc_second(const llama_pcd_params & p, std::vector<llama_pcd_kv> & res, int64_t & n_bytes, std::string & err) const;

    bool follows_settings() const; // whether second_params and params ask for the same rotation

    ggml_status derive_second_keys();
    ggml_status turn_range(const llama_pcd_kv & kv, uint32_t c0, uint32_t c1, bool shift);

    //
    // decode (llama-pcd-decode.cpp)
    //

    int decode_nested    (const llama_batch_ext & batch, bool together = false);
    int decode_fused     (const llama_batch_ext & batch);
    int decode_alternate (const llama_batch_ext & batch);
    int decode_sequential(const llama_batch_ext & batch);
    int decode_twins     (const llama_batch_ext & batch, size_t i0, size_t n);
    int decode_twins_of  (const llama_batch_ext & batch, const std::vector<size_t> & todo);

    llama_batch_ext batch_like(const llama_batch_ext & batch) const;
    llama_batch_ext part_of   (const llama_batch_ext & batch, size_t i0, size_t i1) const;

    void take_outputs(outputs & dst, size_t i0, size_t i1);
    int  put_outputs (const outputs & src);
    void take_back   (const llama_batch_ext & batch, size_t n);

    void copy_embd (llama_batch_ext & dst, const llama_batch_ext & src, llama_batch_ext::token & token) const;
    void add_twin  (llama_batch_ext & dst, const llama_batch_ext & src, const llama_batch_ext::token & token, llama_seq_id twin, bool output);
    void branch    (llama_seq_id parent);
    void add_twins (llama_batch_ext & dst, const llama_batch_ext & src, size_t i0, size_t n);
    void drop_twins();
    void finish_twins();

    void copy_row(std::vector<float> & dst, size_t i, int32_t batch_index);

    uint32_t n_free_cells() const;
    uint32_t n_room() const;

    bool forgets(size_t n) const;
    bool slides() const;
    bool has_all_before(llama_seq_id parent, llama_pos pos, llama_pos end) const;
    bool needs_twin(size_t i, const float * standard) const;

    void write_row(size_t i, float * dst);

    //
    // the second stream of cache = separate (llama-pcd-stream.cpp)
    //

    int decode_streams(const llama_batch_ext & batch);
    int decode_both   (const llama_batch_ext & batch, size_t i0, size_t i1, outputs & all);
    int decode_in_turn(const llama_batch_ext & batch, size_t i, outputs & all);

    size_t end_of_part(const llama_batch_ext & batch, size_t i0, size_t n_max) const;

    int catch_up     (const llama_batch_ext & batch, llama_seq_id parent, llama_pos end, const std::map<llama_pos, size_t> & wanted);
    int catch_up_rows(const llama_batch_ext & batch, const std::vector<size_t> & todo);

    void set_fresh();
};

// the sequences of one token are equal up to it: any of them tells what its twin may see
static inline llama_seq_id llama_pcd_parent_of(const llama_batch_ext::token & token) {
    return *std::min_element(token.seq_ids.begin(), token.seq_ids.end());
}

// turn a whole key, as it is stored, by pos with a table
ggml_tensor * llama_pcd_turn_key(llama_pcd & pcd, ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos,
        const llama_pcd_rotation & r, ggml_tensor * hadamard, llama_pcd::table_kind kind);

// whether t is made from `from` without another rotation in between, in at most so many steps
bool llama_pcd_descends_from(const ggml_tensor * t, const ggml_tensor * from, int depth);

// this backend caches the first rotation's table without looking at the frequency factors of the next one
bool llama_pcd_on_cann(const llama_model & model);

//
// heads, as a graph is built (llama-pcd-heads.cpp)
//

void llama_pcd_heads_begin(const llm_graph_context & gctx);
void llama_pcd_heads_end  ();

// `a` rotated by pos, each head with its ratio; null: as the model does it
ggml_tensor * llama_pcd_heads_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor);

// true if a was rotated head by head, where a rotation starts at the first dimension
bool llama_pcd_heads_offset(const ggml_tensor * a, int n_offs);

void llama_pcd_heads_stored(const ggml_context * ctx, const ggml_tensor * k_cur, int32_t il);

//
// hooks
//

// llm_graph_context's constructor: which graph is being built
void llama_pcd_graph_begin(const llm_graph_context & gctx);

// llama_model::build_graph: what is added to a whole graph
void llama_pcd_graph_end(const llama_model & model, const llm_graph_context & gctx);

// llm_graph_context::build_attn_mha: attention of standard tokens and twins side by side; null: nothing to do
ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il);

// llama_kv_cache::cpy_k, cpy_v: store the second ones too
void llama_pcd_store_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il);
void llama_pcd_store_v(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * v_cur, int32_t il);

// llama_context::decode: true if the batch was decoded here, with the result in ret
bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret);

// llama_context::process_ubatch: whether it is prompt processing; one token and its twin are not
bool llama_pcd_is_batched(const llama_cparams & cparams, const llama_ubatch & ubatch);

// llama_context::graph_max_nodes
uint32_t llama_pcd_max_nodes(const llama_context & lctx);
