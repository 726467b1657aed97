// What hangs on a context: the parts of PCD, side by side. Knows nothing of how they work.
//
// llama.cpp's structs point to `llama_pcd_hooks`, which this is. `llama_pcd_core` has all that lasts from batch to batch, and
// `llama_pcd_decoder` evaluates a batch.

#pragma once

#include "decode/decode.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cstdio>
#include <exception>
#include <utility>

// The one guard between C++ and C: run fn for its value; if it throws, log a line in the name of `caller`, write what the exception says into
// text[n_text] (null: nowhere) and return `failed`.
template <typename T, typename F>
T llama_pcd_guarded(const char * caller, T failed, const F & fn, char * text = nullptr, size_t n_text = 0) noexcept {
    const auto say = [&](const char * what) noexcept {
        if (text && n_text > 0) {
            snprintf(text, n_text, "%s", what);
        }
        try {
            LLAMA_LOG_ERROR("%s: %.100s\n", caller, what); // a longer line is put together in memory, which may be what is missing
        } catch (...) {}
        return failed;
    };
    try {
        return fn();
    } catch (const std::exception & e) {
        return say(e.what());
    } catch (...) {
        return say("unknown exception");
    }
}

struct llama_pcd_context : llama_pcd {
    explicit llama_pcd_context(llama_context & lctx);

    // that of a context; null: nothing of this was turned on yet
    static llama_pcd_context * of(const llama_cparams & cparams) { return static_cast<llama_pcd_context *>(cparams.pcd); }
    static llama_pcd_context * of(const llama_context & lctx)    { return of(lctx.get_cparams()); }

    // the same, made if need be; null: this context has no memory that it could hang on, and err says so
    static llama_pcd_context * made(llama_context & lctx, std::string & err);

    llama_pcd_memory  memory;
    llama_pcd_core    core;
    llama_pcd_decoder decoder;

    // Decode a batch, whatever of this is on. Returns what llama_decode does. Nothing is thrown through it: an error of ours, or of
    // llama.cpp inside our call, becomes a line in the log and a status, and the memory is as it was.
    int decode(const llama_batch_ext & batch) noexcept;

    // see llama_pcd_set_eval_callback
    int32_t set_eval_callback(ggml_backend_sched_eval_callback callback, void * user_data, bool counts, std::string & err);

    // see llama_pcd_attention
    int32_t attention(
            llama_seq_id seq_id, const llama_token * tokens, int32_t n_all, llama_pos pos,
            const int32_t * heads, int32_t n_heads, double * pays, std::string & err);

    // Whether the graph that is begun, or the one before it, is of PCD, which has several kinds. Else nothing has to be forgotten between
    // them, the scheduler need not wait for the last one to be computed, and nothing can fail: no exception leaves llama_encode, since PCD
    // cannot be on with an encoder.
    bool mixes_graphs();

    // nodes that a graph may need more
    uint32_t n_nodes() const { return 64*lctx.get_model().hparams.n_layer_all; }

    //
    // hooks
    //

    void cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells) override { core.second.cells_placed(kv, cells); }
    void cells_loaded(llama_seq_id seq_id) override;

    void seq_removed(llama_seq_id seq_id) override                { core.sequences.remove(seq_id); }
    void seq_copied (llama_seq_id src, llama_seq_id dst) override;
    void seq_kept   (llama_seq_id seq_id) override                { core.sequences.keep(seq_id); }

private:
    bool last_mixed = false; // the last graph that was begun is not llama.cpp's own

    bool is_watched = false; // by what set_eval_callback set

    int  decode_unguarded(const llama_batch_ext & batch);
    void recover(const llama_pcd_memory::ends & before); // from an exception in the midst of a decode
};
