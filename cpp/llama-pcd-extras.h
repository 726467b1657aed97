// What other decoding methods need of llama.cpp, beside PCD: the C API of early exits (DoLa), of tensors by their names, and of ratios
// of attention heads (Ms-PoE). (LLAMA_PCD_VERSION of llama-pcd.h counts changes of these functions too.)

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

#ifdef __cplusplus
}
#endif
