// What is not PCD: the C API of watching what is computed, and attention; and of what tests look at, which changes nothing.
// (LLAMA_PCD_VERSION of llama-pcd.h counts changes of these functions too.)

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Have `callback` asked about each operation that this context computes, as by llama_context_params.cb_eval, which a context can be opened
// with alone. What the graph computes from a tensor comes later: a callback may put other numbers into it. NULL: no more.
LLAMA_API int32_t llama_pcd_set_eval_callback(
        struct llama_context * ctx, ggml_backend_sched_eval_callback callback, void * user_data, char * err, size_t n_err);

// How much attention n tokens pay to each position, evaluated behind the `pos` that a sequence holds: the sum over heads, averaged over the
// tokens, into pays[pos + n]. heads: n_heads pairs of a layer and a head, counted from 0, layers without attention not. Layers behind the
// last of them are not computed, so the tokens have to be taken out of the sequence before anything else, also if this fails:
// LLAMA_PCD_UNSUPPORTED if it cannot be read, LLAMA_PCD_NO_MEMORY if the tokens have no room.
LLAMA_API int32_t llama_pcd_attention(
        struct llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, int32_t n, llama_pos pos,
        const int32_t * heads, int32_t n_heads, double * pays, char * err, size_t n_err);

//
// measuring
//

// One operation of a computed graph, and where it ran. The texts live as long as the call they are passed to.
struct llama_pcd_node {
    const char * name;
    const char * op;
    const char * device; // ggml's name of it
    bool         on_cpu; // not in a device of another kind
};

// The operations of a graph that was computed (views are none), in how many parts that run on one device each
typedef void (*llama_pcd_graph_callback)(const struct llama_pcd_node * nodes, int32_t n, int32_t n_splits, void * data);

// After each graph that this context computes, PCD's small ones of their own among them, call this with its operations. NULL: no more.
LLAMA_API void llama_pcd_watch_graphs(struct llama_context * ctx, llama_pcd_graph_callback callback, void * data);

#ifdef __cplusplus
}
#endif
