// For LD_PRELOAD, before libllama and ggml (tests/support/preload.py): has the n-th allocation of a thread fail, shows graphs that no
// architecture has yet, and counts the plans that ggml makes for graphs. Knows nothing of PCD.

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <new>

#include "ggml-alloc.h"
#include "ggml-backend.h"
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

//
// allocations that fail
//

static thread_local long left = -1; // until one fails; negative: none does

// the n-th from now on (0: the next one; negative: none); returns how many are left of the former number
extern "C" long preload_fail_at(long n) {
    const long res = left;
    left = n;
    return res;
}

static bool fails() {
    return left >= 0 && left-- == 0;
}

void * operator new(size_t n) {
    void * res = fails() ? nullptr : malloc(n);
    if (!res) {
        throw std::bad_alloc();
    }
    return res;
}

void operator delete(void * p) noexcept {
    free(p);
}

void operator delete(void * p, size_t /*n*/) noexcept {
    free(p);
}

ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    static const auto next = behind(ggml_backend_alloc_ctx_tensors_from_buft, __func__);
    return fails() ? nullptr : next(ctx, buft);
}

bool ggml_backend_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    static const auto next = behind(ggml_backend_sched_reserve, __func__);
    return !fails() && next(sched, graph);
}

//
// graphs; PRELOAD_GRAPHS says which
//

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
