// Positional Contrastive Decoding (PCD) for llama.cpp: the public C API.
//
// PCD is a property of a llama_context. Once it is on, llama_decode() evaluates beside every token whose
// logits were asked for a "twin": the same token, over-rotated and/or restricted to a window. It then writes
//
//     L~ = (1 + beta) L - beta L*        on the plausible tokens of L (paper, Eq. 6)
//
// over the caller's logits row and drops the twins again. Callers need to know nothing of it.
//
// llama_decode() returns what it does without PCD, and its rules hold: on 1 and -1 nothing has changed; on 2 and below -1 the
// micro-batches that were finished stay in memory, and there are no rows. A token whose twin fails or is aborted was not finished
// and is taken back, beside recurrent layers too if the twin was evaluated by itself. (Together with its token it fails like any
// token in llama.cpp: recurrent layers cannot go back, so clear the sequence.) What would be an exception, such as too little memory,
// is -2 and a line in the log, and all tokens of the batch are taken back.

#pragma once

#include "llama.h"
#include "llama-pcd-fields.h" // struct llama_pcd_params; made by cmake/fields.py

#ifdef __cplusplus
extern "C" {
#endif

// bumped whenever llama_pcd_params or the meaning of a function changes
#define LLAMA_PCD_VERSION 21

// how far behind the best plausible token the others begin in the rows that callers read; see llama_pcd_contrast
#define LLAMA_PCD_BEHIND 60.0f

// the most twins evaluated in one pass; further ones take further passes
#define LLAMA_PCD_MAX_TWINS 64

enum llama_pcd_row {
    LLAMA_PCD_ROW_STANDARD   = 0, // L
    LLAMA_PCD_ROW_LOCAL      = 1, // L*
    LLAMA_PCD_ROW_CONTRASTED = 2, // L~, with -inf outside the plausible tokens
};

enum llama_pcd_status {
    LLAMA_PCD_OK          =  0,
    LLAMA_PCD_INVALID     = -1, // a parameter is out of range
    LLAMA_PCD_UNSUPPORTED = -2, // this model or context cannot run it
    LLAMA_PCD_NO_MEMORY   = -3, // what it needs could not be allocated, or another exception was caught
    LLAMA_PCD_DISABLED    = -4, // PYPCD_DISABLE is set in the environment
};

// why a batch, or a part of one, was evaluated in another way than llama_pcd_params.evaluation asks for
enum llama_pcd_fallback {
    LLAMA_PCD_FALLBACK_NONE    = 0,
    LLAMA_PCD_FALLBACK_NO_ROOM = 1, // no free cells for twins beside their tokens: each twin before its token, in the same cell
    LLAMA_PCD_FALLBACK_NARROW  = 2, // n_batch, n_ubatch or n_outputs_max has no room for a token and its twin: one after the other
    LLAMA_PCD_FALLBACK_SLIDES  = 3, // sliding-window layers forget what a later twin would see, or their memory took the tokens in another
                                    // order (split_equal): each twin before its token
};

struct llama_pcd_stats {
    int64_t n_tokens;      // rows the caller asked for while PCD was on
    int64_t n_twins;       // twins evaluated
    int64_t n_skipped;     // twins not needed: a single token was plausible, or a floor (min_context, min_entropy, min_first_entropy)
    int64_t n_derived;     // times second keys were derived from the first, later than these were stored
    int64_t second_bytes;  // of the second keys
    int64_t kv_bytes;      // of the first; 0 for memory PCD knows nothing of

    int64_t n_derived_cells; // of how many cells, all caches together
    int64_t n_fused;       // batches that were evaluated together with their twins, as a whole or in parts: each part counts
    int64_t n_alternate;   // the same, twins after the batch, where one was needed
    int64_t n_sequential;  // the same, each twin before its token
    int64_t n_fallbacks;   // of all these, how many were asked for in another way
    int64_t last_fallback; // enum llama_pcd_fallback: why the last of them was
    int64_t state_bytes;   // of the states that recurrent layers keep for twins
    int64_t graph_bytes;   // compute memory of the graphs of twins alone, which are kept beside llama.cpp's own
    int64_t row_bytes;     // of the rows L, L* and L~ of the last decode, beside llama.cpp's own
};

// LLAMA_PCD_VERSION of the loaded library; a stock libllama lacks the symbol
LLAMA_API int32_t llama_pcd_version(void);

LLAMA_API struct llama_pcd_params llama_pcd_default_params(void);

// Turn PCD on with these parameters, change them, or (params == NULL) turn it off. May be called between any
// two decodes. A change holds whole or not at all: on failure the former setting stays in force, and `err` holds one sentence.
//
// Twins have sequence ids of their own, from 192 on (in a model with recurrent layers: from n_seq_max on). A context in which one of
// these has tokens is refused, and so is a batch with such an id while PCD is on.
//
// Second keys that the new parameters need too are kept, and others are allocated. Parameters that need none, and NULL, leave them for
// the parameters before, see llama_pcd_trim. Second keys of another type are allocated beside the former ones, which are freed then.
// Where there is no room for both, turn PCD off first: then the former ones are freed before.
LLAMA_API int32_t llama_pcd_set(struct llama_context * ctx, const struct llama_pcd_params * params, char * err, size_t n_err);

// The parameters in force. False: PCD is off, and nothing is written.
LLAMA_API bool llama_pcd_get(struct llama_context * ctx, struct llama_pcd_params * params);

// Free the second keys that the parameters in force do not need. While PCD is off that is all of them, and the rows of the
// last decode go too (which the next decode frees in any case).
LLAMA_API void llama_pcd_trim(struct llama_context * ctx);

// Whether this context could run these parameters, but for the memory that they take. The setting in force stays, and what it has
// in memory. (The first time a graph is built, since only that shows how a model rotates.)
LLAMA_API int32_t llama_pcd_check(struct llama_context * ctx, const struct llama_pcd_params * params, char * err, size_t n_err);

// Hold the twins back (true) or let them be evaluated again. For the parts of a prompt whose logits nobody reads.
LLAMA_API void llama_pcd_suspend(struct llama_context * ctx, bool suspend);

// Row `which` of output i of the last decode, where i means what it means to llama_get_logits_ith(): an entry of the batch, or
// negative, counted back over the outputs. n_vocab floats that live until the next decode or llama_pcd_trim(); NULL where there is
// none (PCD was off for the context or the sequence, no such output, twin skipped). The contrasted row is that of the parameters it
// was decoded with; where a floor (min_context, min_entropy, min_first_entropy) leaves the token plain, it is L.
LLAMA_API const float * llama_pcd_get_logits_ith(struct llama_context * ctx, int32_t i, int32_t which);

// The strength that output i was contrasted with, i as above: beta. NaN where there is no contrast: no such output, a single token is
// plausible, or a floor leaves the token plain.
LLAMA_API float llama_pcd_get_strength_ith(struct llama_context * ctx, int32_t i);

LLAMA_API struct llama_pcd_stats llama_pcd_get_stats(struct llama_context * ctx);

// For min_first_entropy: an answer in a sequence begins at this position; rows before it are text. Call it for each prompt. A caller who
// does not gets an answer at the first row that is asked for behind tokens whose rows are not, or that were decoded with PCD off, or
// behind a loaded state. An answer goes on until such a token comes, or the sequence is removed; a copy of the sequence goes on with it.
LLAMA_API void llama_pcd_begin(struct llama_context * ctx, llama_seq_id seq_id, llama_pos pos);

// A reason (enum llama_pcd_fallback) in a sentence, "" for none
LLAMA_API const char * llama_pcd_fallback_text(int32_t reason);

// PCD for one sequence, where it is to differ from the context's. NULL: no twins for its tokens. Else params is a whole setting,
// of which the sequence has beta, gamma, relative_top, the floors, window, n_sink and combine of its own, and perturbation where
// it is LLAMA_PCD_PERTURBATION_NONE. (combine = false of the context holds for all its sequences.) All else has
// to be as in the context, as far as the sequence's twins use it.
//
// While PCD is on that is checked at once. A setting that is given before is kept, and checked by llama_pcd_set(), which refuses
// what its sequences cannot have. Later changes of the context hold for its sequences too, but for what they have of their own.
//
// A setting stays with its sequence while the memory is edited, with two exceptions, in which llama_memory_* is told of a whole
// sequence. llama_memory_seq_cp(mem, a, b, -1, -1) gives b the setting that a has, or none. And the setting goes with its sequence:
// by llama_memory_seq_rm(mem, a, -1, -1), llama_memory_seq_keep() of another one, and llama_memory_clear(). A range that starts at
// a position, be it 0, is a rewind or a common prefix and leaves settings alone; so does loading a state.
LLAMA_API int32_t llama_pcd_set_seq(
        struct llama_context * ctx, llama_seq_id seq_id, const struct llama_pcd_params * params, char * err, size_t n_err);

// Let a sequence (-1: all of them) follow the context again.
LLAMA_API void llama_pcd_unset_seq(struct llama_context * ctx, llama_seq_id seq_id);

// rho_j = theta*_j / theta_j, j = 1 .. n_rot/2, into out[n_rot/2]
LLAMA_API void llama_pcd_rho(int32_t n_rot, float alpha, float base_ratio, int32_t transition, double * out);

// L~ from L and L* (NULL: no contrast) into out (NULL: nowhere), all [n_vocab], with the beta, gamma and relative_top of params.
// Returns the number of plausible tokens. beta goes to *strength (or NULL): NaN where nothing is contrasted.
//
// The other tokens keep L's order, and their first one lies `behind` below the best of L~ (INFINITY excludes them all). They are
// as far apart as in L, but for what is more than 30 below their first one, which is pressed together so that none lies more than
// 39 below it. So with LLAMA_PCD_BEHIND they are improbable (150,000 of them have less than 1e-7 of the probability at temperature
// 2), but a logit bias of 100 lifts each above all others. A plausible token that the contrast itself puts as far below the best
// one keeps its L~, and may lie among them.
//
// What is no number between -1e30 and 1e30 (NaN, an infinity, the least float) is no logit. In L it masks a token, which is never
// plausible and gets -INFINITY (where nothing else is left the row stays as it is, and 0 is returned). In L* it says nothing of its
// token, which keeps L.
LLAMA_API int32_t llama_pcd_contrast(
        const float * standard, const float * local, int32_t n_vocab,
        const struct llama_pcd_params * params, float behind, float * out, float * strength);

// The entropy of softmax(row) in bits, 0 to log2(n_vocab), over the tokens that have a logit; 0 where none has one.
LLAMA_API float llama_pcd_entropy(const float * row, int32_t n_vocab);

// The same combination as a sampler, for callers who build their own chain: put it first, and set the context
// with combine = false so that the contrast is not applied twice. It reads the last output row unless told another; an index
// means what llama_get_logits_ith()'s does. Where PCD is on but that row has no contrast, plain logits would pass for contrasted
// ones: then the log says so, and all that is left to choose is LLAMA_TOKEN_NULL (-1), which llama_decode() refuses. (llama.cpp's
// grammar sampler, further on in the same chain, ends the process at that token.) A row below min_context,
// min_entropy or min_first_entropy is plain, as its setting asks for.
LLAMA_API struct llama_sampler * llama_sampler_init_pcd(struct llama_context * ctx);
LLAMA_API void                   llama_sampler_pcd_set_row(struct llama_sampler * smpl, int32_t i);

//
// not PCD: watching what is computed, and attention
//

// Have `callback` asked about each operation that this context computes, as by llama_context_params.cb_eval, which a context can be opened
// with alone. What the graph computes from a tensor comes later: a callback may put other numbers into it. NULL: no more. counts: it looks
// at the operations, not at numbers, so the graph stays as it is; else the weights of attention are laid out as llama.cpp's own.
LLAMA_API int32_t llama_pcd_set_eval_callback(
        struct llama_context * ctx, ggml_backend_sched_eval_callback callback, void * user_data, bool counts, char * err, size_t n_err);

// How much attention n tokens pay to each position, evaluated behind the `pos` that a sequence holds: the sum over heads, averaged over the
// tokens, into pays[pos + n]. heads: n_heads pairs of a layer and a head, counted from 0, layers without attention not. Layers behind the
// last of them are not computed, so the tokens have to be taken out of the sequence before anything else, also if this fails:
// LLAMA_PCD_UNSUPPORTED if it cannot be read, LLAMA_PCD_NO_MEMORY if the tokens have no room. At most 4 heads for each layer of the model.
LLAMA_API int32_t llama_pcd_attention(
        struct llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, int32_t n, llama_pos pos,
        const int32_t * heads, int32_t n_heads, double * pays, char * err, size_t n_err);

// AMX, the matrix unit of some CPUs. Some compilers break ggml's kernels for it, which then crash. So models are loaded without
// them, and with ggml's other kernels for the CPU, unless this process has said that they compute rightly.
LLAMA_API void llama_pcd_set_amx(bool on);

#ifdef __cplusplus
}
#endif
