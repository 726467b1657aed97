// What is not PCD: the C API of reading tensors by their names; and of what pypcd bench, its tests and the choice of threads measure, which
// changes nothing that is computed. (LLAMA_PCD_VERSION of llama-pcd.h counts changes of these functions too.)

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// A tensor of an evaluation, and its elements as floats without gaps. They live until the callback returns. What the graph computes from
// the tensor comes later: a callback may put other numbers into it (ggml_backend_tensor_set).
typedef void (*llama_pcd_tap_callback)(struct ggml_tensor * tensor, const float * data, void * user_data);

// Have the tensors whose names begin so handed over as they are computed, of every type that has numbers. A prefix that
// ends in a digit is a whole number: "l_out-1" is not "l_out-10". n = 0 takes the tap off. While it is on, flash
// attention is off, so that attention weights exist ("kq_soft_max-<layer>"), and evaluation waits for each tensor.
LLAMA_API int32_t llama_pcd_set_tap(
        struct llama_context * ctx, const char * const * prefixes, size_t n,
        llama_pcd_tap_callback callback, void * user_data, char * err, size_t n_err);

// The cells of a layer's cache that hold positions 0 .. n-1 of a sequence, into cells[n]; -1 where there is none. They are the columns of
// its attention weights. Returns how many there are; 0 also for memory that PCD knows nothing of, or without kv_unified.
LLAMA_API int32_t llama_pcd_get_cells(
        struct llama_context * ctx, int32_t il, llama_seq_id seq_id, int32_t * cells, int32_t n);

//
// measuring
//

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
