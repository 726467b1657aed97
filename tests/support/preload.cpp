// For LD_PRELOAD, before libllama and ggml (tests/support/preload.py): graphs that no architecture has yet; PRELOAD_GRAPHS says which.
// Knows nothing of PCD.

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "ggml.h"

// the function that stands behind one of ours
template <typename F>
static F behind(F /*ours*/, const char * name) {
    static void * lib = nullptr;
    lib = lib ? lib : dlopen("libggml-base.so.0", RTLD_NOLOAD | RTLD_LAZY);
    void * res = lib ? dlsym(lib, name) : nullptr;
    if (!res) {
        abort();
    }
    return (F) res;
}

static bool wants(const char * what) {
    const char * value = getenv("PRELOAD_GRAPHS");
    return value && strcmp(value, what) == 0;
}

// scale: a rotation is followed by a multiplication, in one call
ggml_tensor * ggml_rope_ext(
        ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c, int n_dims, int mode, int n_ctx_orig,
        float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    static const auto next = behind(ggml_rope_ext, __func__);
    ggml_tensor * res = next(ctx, a, b, c, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow);
    return wants("scale") ? ggml_scale(ctx, res, 1.0f) : res;
}

// reshape: the weights of a key's norm are not what the file holds, but made of it
ggml_tensor * ggml_mul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    static const auto next = behind(ggml_mul, __func__);
    const bool is_norm = a->op == GGML_OP_RMS_NORM && strstr(b->name, "attn_k_norm");
    return next(ctx, a, is_norm && wants("reshape") ? ggml_reshape_1d(ctx, b, b->ne[0]) : b);
}
