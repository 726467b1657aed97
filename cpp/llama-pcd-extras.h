// What is not PCD: the C API of what other decoding methods need of llama.cpp, which is early exits (DoLa), tensors by their names, and
// ratios of attention heads (Ms-PoE); and of what pypcd bench, its tests and the choice of threads measure, which changes nothing that is
// computed. (LLAMA_PCD_VERSION of llama-pcd.h counts changes of these functions too.)

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Early exits: what the output head makes of the hidden states of earlier layers, computed with the logits of the same
// tokens. No final norm, no scale and no cap: the head's matrix, its bias and its adapters alone. DoLa contrasts with them.
//
// layers: 0 is the embeddings as they enter the first block, i the output of block i, up to the number of layers less 1;
// n = 0 turns them off. Not together with PCD. On failure the former setting stays and `err` holds one sentence.
LLAMA_API int32_t llama_pcd_set_exits(struct llama_context * ctx, const int32_t * layers, int32_t n, char * err, size_t n_err);

// Row of layers[i_layer] for batch entry i of the last decode (negative i counts from the last output), n_vocab floats
// that live until the next decode; NULL where there is none.
LLAMA_API const float * llama_pcd_get_exit_logits(struct llama_context * ctx, int32_t i_layer, int32_t i);

// Whether the output head is the matrix of the embeddings: the file has no head of its own.
LLAMA_API bool llama_pcd_has_tied_head(const struct llama_context * ctx);

// A tensor of an evaluation: its name, its dimensions as ggml has them (ne[0] are neighbours), and its elements without
// gaps. They live until the callback returns.
typedef void (*llama_pcd_tap_callback)(const char * name, const int64_t ne[4], const float * data, void * user_data);

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

// Ms-PoE: each attention head sees position t as t / r, with a ratio of its own. ratios: of all query heads, layer by layer, n in all; the
// keys of a group of heads have its first head's. A layer whose ratios are all 1 is left as the model has it. What is in memory was
// evaluated with the ratios of its time: clear it after a change. NULL: off. Not together with PCD. On failure the former setting stays and
// `err` holds one sentence.
LLAMA_API int32_t llama_pcd_set_head_ratios(
        struct llama_context * ctx, const float * ratios, int32_t n, char * err, size_t n_err);

// Other ratios for the heads of one layer, of which some are not 1. That may happen in the callback of a tap, once the tensors
// "pcd_q-<layer>" and "pcd_k-<layer>" were handed over: these are then rotated with the new ones.
LLAMA_API int32_t llama_pcd_set_layer_ratios(
        struct llama_context * ctx, int32_t il, const float * ratios, int32_t n, char * err, size_t n_err);

// The ratios of a layer's query heads into out[n], 1 where ratios are off. Returns how many heads there are; -1: there is no such layer.
LLAMA_API int32_t llama_pcd_get_head_ratios(struct llama_context * ctx, int32_t il, float * out, int32_t n);

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
