// Measuring PCD in llama.cpp: the C API of what pypcd bench, its tests and the choice of threads look at. Nothing here changes what is
// computed. (LLAMA_PCD_VERSION of llama-pcd.h counts changes of these functions too.)

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// What llama.cpp computed last, and how long computing took, with PCD on and off alike
struct llama_pcd_graph_stats {
    int64_t n_nodes;    // of the last graph
    int64_t n_splits;   // its parts that run on one device each
    int64_t bytes_in;   // of its inputs: on a device with memory of its own, what is copied to it
    int64_t bytes_out;  // of its logits and embeddings, which are copied back
    int64_t n_computed; // graphs since the statistics were first asked for
    int64_t t_graph_us; // computing them, and waiting for them
    int64_t t_own_ns;   // in PCD's own code while batches were decoded with PCD on, without both of that; nanoseconds
    int64_t n_tokens;   // of the last graph, which is what n_nodes, n_splits and the bytes are of: tokens and twins
    int64_t n_twins;    // of these: with 0 tokens were evaluated alone, with n_tokens twins
};

// One operation of a computed graph, and where it ran. The texts live as long as the call they are passed to.
struct llama_pcd_node {
    const char * name;
    const char * op;
    const char * device; // ggml's name of it
    bool         on_cpu; // not in a device of another kind
};

// The operations of a graph that was computed (views are none), in how many parts that run on one device each
typedef void (*llama_pcd_graph_callback)(const struct llama_pcd_node * nodes, int32_t n, int32_t n_splits, void * data);

// The time of a call of llama_decode() less t_graph_us is the host's own work.
LLAMA_API struct llama_pcd_graph_stats llama_pcd_get_graph_stats(struct llama_context * ctx);

// After each graph that this context computes, PCD's small ones of their own among them, call this with its operations. NULL: no more.
LLAMA_API void llama_pcd_watch_graphs(struct llama_context * ctx, llama_pcd_graph_callback callback, void * data);

// For measurements: clear the memory and have sequence 0 take n cells, at positions 0 .. n-1, without evaluating anything. Their
// keys and values are zeros. Returns how many cells there are then; a sliding-window cache has the last ones, as many as it can
// hold. 0: this memory, or one this small, cannot, and is not cleared.
LLAMA_API int32_t llama_pcd_fill_cells(struct llama_context * ctx, int32_t n);

// Microseconds that matrix products in the shape of a model's step take with each of n numbers of threads: of a width of n_embd,
// for n_tokens tokens, averaged over about min_us for each, into us[n]; a number is 1 to GGML_MAX_N_THREADS. Returns a llama_pcd_status.
LLAMA_API int32_t llama_pcd_step_times(
        const int32_t * n_threads, int32_t n, int32_t n_embd, int32_t n_tokens, int32_t min_us, double * us, char * err, size_t n_err);

#ifdef __cplusplus
}
#endif
