// The outputs of a context (logits, embeddings, what backend samplers chose), as its caller reads them: saved, put together from
// parts, hidden. Knows nothing of the contrast.

#pragma once

#include "llama-pcd-impl.h"

#include <vector>

// the outputs of a batch, as far as it is decoded: in parts, or before its twins
struct llama_pcd::outputs {
    // those of entries [i0, i1) of the batch, which were the part just decoded; call before anything else is
    void take(llama_context & lctx, size_t i0, size_t i1);

    // make them the context's; false: no memory
    bool put(llama_context & lctx) const;

    //
    // of the last decode
    //

    // wait for them, and have them in the order of its batch
    static void wait(llama_context & lctx);

    // logits of an entry of the batch
    static float * row(llama_context & lctx, int32_t batch_index);

    // the batch entry of the output that llama_get_logits_ith(lctx, i) gives for a negative i; -1: there is none
    static int32_t index(llama_context & lctx, int32_t i);

    // those of the batch entries [i0, i0 + n), which are the last ones, are not the caller's
    static void hide(llama_context & lctx, size_t i0, size_t n);

    // the caller has none
    static void forget(llama_context & lctx);

private:
    struct output {
        size_t             i; // entry of the batch
        std::vector<float> logits;
        std::vector<float> embd;

        // what the backend sampler of its sequence gave
        llama_token              token;
        std::vector<float>       sampled_logits;
        std::vector<float>       probs;
        std::vector<llama_token> candidates;
    };

    std::vector<output> all;
};
