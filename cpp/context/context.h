// What hangs on a context: the parts of PCD, side by side. Knows nothing of how they work.
//
// llama.cpp's structs point to `llama_pcd_hooks`; `llama_pcd_context` is what these are. That owns the
// `llama_pcd_core`, which has all that lasts from batch to batch (settings, second keys, ids of twins), and the `llama_pcd_decoder`,
// which evaluates a batch.

#pragma once

#include "decode/decode.h"

#include "llama-impl.h"

#include <cstdio>
#include <exception>
#include <utility>

//
// the one guard between C++ and C: no exception of ours reaches a caller
//

// run fn; if it throws, write what it says into text[n_text] (null: nowhere) and return false
template <typename F>
bool llama_pcd_guarded(char * text, size_t n_text, const F & fn) noexcept {
    const auto failed = [&](const char * what) {
        if (text && n_text > 0) {
            snprintf(text, n_text, "%s", what);
        }
        return false;
    };
    try {
        fn();
        return true;
    } catch (const std::exception & e) {
        return failed(e.what());
    } catch (...) {
        return failed("unknown exception");
    }
}

// run fn for its value; if it throws, log a line in the name of `caller` and return `failed`
template <typename T, typename F>
T llama_pcd_guarded_value(const char * caller, T failed, const F & fn) noexcept {
    char text[256] = {};
    T    res       = failed;

    if (!llama_pcd_guarded(text, sizeof(text), [&]() { res = fn(); })) {
        llama_pcd_guarded(nullptr, 0, [&]() { LLAMA_LOG_ERROR("%s: %s\n", caller, text); }); // the log needs memory too
        return failed;
    }
    return res;
}

struct llama_pcd_context : llama_pcd {
    explicit llama_pcd_context(llama_context & lctx);

    // that of a context; null: nothing of this was turned on yet
    static llama_pcd_context * of(const llama_cparams & cparams);
    static llama_pcd_context * of(const llama_context & lctx) { return of(lctx.get_cparams()); }

    // the same, made if need be
    static llama_pcd_context & made(llama_context & lctx);

    llama_pcd_memory  memory;
    llama_pcd_core    core;
    llama_pcd_decoder decoder;

    // Decode a batch, whatever of this is on. Returns what llama_decode does. Nothing is thrown through it: an error of ours, or of
    // llama.cpp inside our call, becomes a line in the log and a status, and the memory is as it was.
    int decode(const llama_batch_ext & batch) noexcept;

    // see llama_pcd_set_eval_callback
    int32_t set_eval_callback(ggml_backend_sched_eval_callback callback, void * user_data, bool counts, std::string & err);

    // see llama_pcd_attention; heads: layer, head
    int32_t attention(
            llama_seq_id seq_id, const std::vector<llama_token> & tokens, llama_pos pos,
            const std::vector<std::pair<int32_t, int32_t>> & heads, double * pays, std::string & err);

    // Whether the graph that is begun, or the one before it, is of PCD, which has several kinds. Else nothing has to be forgotten between
    // them, the scheduler need not wait for the last one to be computed, and nothing can fail: no exception leaves llama_encode, since PCD
    // cannot be on with an encoder.
    bool mixes_graphs();

    // nodes that a graph may need more
    uint32_t n_nodes() const;

    //
    // hooks
    //

    void cells_placed(const llama_kv_cache & kv, const std::vector<uint32_t> & cells) override { core.second.cells_placed(kv, cells); }
    void cells_loaded(llama_seq_id seq_id) override;

    void seq_removed(llama_seq_id seq_id) override                { core.sequences.remove(seq_id); }
    void seq_copied (llama_seq_id src, llama_seq_id dst) override;
    void seq_kept   (llama_seq_id seq_id) override                { core.sequences.keep(seq_id); }

    void fill_mask(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) const override;

private:
    bool last_mixed = false; // the last graph that was begun is not llama.cpp's own

    bool is_watched = false; // by what set_eval_callback set

    int  decode_unguarded(const llama_batch_ext & batch);
    void recover(const llama_pcd_memory::ends & before); // from an exception in the midst of a decode
};
