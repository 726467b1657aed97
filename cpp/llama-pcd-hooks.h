// What llama.cpp's files call (see README.md), by names that they know already. With nothing of ours turned on in a context, each is a
// test of a null pointer.

#pragma once

#include <cstdint>
#include <vector>

class llama_kv_cache;

struct ggml_tensor;
struct llama_batch_ext;
struct llama_context;
struct llama_memory_i;
struct llm_graph_context;

typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;

// What hangs on a context, its memory and its caches; null until something of ours is first turned on.
struct llama_pcd_hooks {
    virtual ~llama_pcd_hooks() = default;

    // llama_kv_cache: cells were given to other tokens, decoded or loaded ones; a state is loaded (-1: of all sequences, whose cells
    // are not given one by one)
    virtual void cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells) = 0;
    virtual void cells_loaded(int32_t seq_id) = 0;

    // llama_memory_*, as callers use them: a whole sequence (-1: all) was removed; copied; all others were removed
    virtual void seq_removed(int32_t seq_id) = 0;
    virtual void seq_copied (int32_t src, int32_t dst) = 0;
    virtual void seq_kept   (int32_t seq_id) = 0;
};

// llm_graph_context's constructor: which graph is being built
void llama_pcd_graph_begin(const llm_graph_context & gctx);

// llm_graph_context::build_attn_mha: second keys are stored, and standard tokens and twins attend side by side; null: as llama.cpp does
ggml_tensor * llama_pcd_build_attn(
        const llm_graph_context & gctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, int64_t n_kv_max, float kq_scale, int il);

// llama_context::decode: true if the batch was decoded here, with the result in ret
bool llama_pcd_decode(llama_context & lctx, const llama_batch_ext & batch, int & ret);

// llama_context::graph_max_nodes: room for the nodes that we add; llama.cpp asks when it makes a scheduler
uint32_t llama_pcd_max_nodes(const llama_context & lctx);

// llama_memory_seq_rm, after a removal (recurrent memory may refuse): settings go with a whole sequence; true
bool llama_pcd_seq_removed(llama_memory_i & memory, int32_t seq_id, int32_t p0, int32_t p1);

// llama-model.cpp, make_cpu_buft_list: weights are not kept in this buffer type
bool llama_pcd_skips_buft(ggml_backend_buffer_type_t buft);
