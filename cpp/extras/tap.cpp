// Chooses tensors by name, and converts them to floats.

#include "extras/extras.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cctype>
#include <cstring>

// A tensor's own name, as its model gave it; ggml marks views and copies with a word in brackets. A prefix that ends in a
// digit names a layer, and layer 1 is not layer 10.
bool llama_pcd_tap::wants(const char * name) const {
    for (const auto & prefix : prefixes) {
        const char * rest = name + prefix.size();

        if (strncmp(name, prefix.c_str(), prefix.size()) == 0 && !strstr(name, " (") &&
                !(isdigit((unsigned char) prefix.back()) && isdigit((unsigned char) *rest))) {
            return true;
        }
    }
    return false;
}

// a tensor of any type and layout, as contiguous numbers
static std::vector<float> to_floats(const ggml_tensor * t) {
    const auto * traits = ggml_get_type_traits(t->type);

    std::vector<uint8_t> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());

    const size_t  n_elem  = ggml_nelements(t);
    const int64_t n_row   = t->ne[0];
    const bool    in_line = t->nb[0] == ggml_type_size(t->type);

    std::vector<float>   res(n_elem);
    std::vector<uint8_t> row(ggml_row_size(t->type, n_row));

    for (size_t at = 0; at < n_elem; at += n_row) {
        const int64_t i  = at/n_row;
        const int64_t i1 = i % t->ne[1];
        const int64_t i2 = i / t->ne[1] % t->ne[2];
        const int64_t i3 = i / t->ne[1] / t->ne[2];

        const uint8_t * src = data.data() + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3];
        if (!in_line) {
            for (int64_t i0 = 0; i0 < n_row; ++i0) {
                memcpy(row.data() + i0*ggml_type_size(t->type), src + i0*t->nb[0], ggml_type_size(t->type));
            }
            src = row.data();
        }

        float * dst = res.data() + at;
        if (t->type == GGML_TYPE_F32) {
            memcpy(dst, src, n_row*sizeof(float));
        } else if (t->type == GGML_TYPE_I32) {
            for (int64_t i0 = 0; i0 < n_row; ++i0) {
                int32_t value;
                memcpy(&value, src + i0*sizeof(value), sizeof(value));
                dst[i0] = value;
            }
        } else {
            traits->to_float(src, dst, n_row);
        }
    }

    return res;
}

static bool can_convert(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_I32 || ggml_get_type_traits(type)->to_float;
}

bool llama_pcd_tap::on_eval(ggml_tensor * t, bool ask, void * user_data) {
    const auto & tap = *(const llama_pcd_tap *) user_data;

    if (!ask) {
        const auto data = to_floats(t);
        tap.callback(t, data.data(), tap.user_data);
        return true;
    }
    return tap.wants(t->name) && can_convert(t->type) && ggml_nelements(t) > 0;
}

//
// settings
//

std::string llama_pcd_tap::needs_flash_attn() const {
    if (pcd.lctx.get_model().split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "split_mode \"tensor\" needs flash attention, which has no attention weights to read; use another split_mode";
    }
    for (const auto * kv : memory.kvs) {
        for (const auto & layer : llama_pcd::layers(*kv)) {
            // with MLA values are a part of the cached keys
            const auto * values = layer.v ? layer.v : layer.k;

            if (ggml_is_quantized(values->type)) {
                return format("cached values are of type %s, which needs flash attention, and that has no attention weights to read; "
                        "use %s f16 or f32", ggml_type_name(values->type), layer.v ? "type_v" : "type_k and type_v");
            }
        }
    }
    return {};
}

int32_t llama_pcd_tap::check(const std::vector<std::string> & wanted, llama_pcd_tap_callback fn, std::string & err) const {
    const auto & cparams = pcd.lctx.get_cparams();

    for (const auto & prefix : wanted) {
        if (prefix.empty()) {
            err = "a prefix is empty, allowed: the beginning of a tensor's name, such as \"kq_soft_max\"";
            return LLAMA_PCD_INVALID;
        }
    }
    if (wanted.empty()) {
        return LLAMA_PCD_OK;
    }
    if (!fn) {
        err = "the callback is null, allowed: a function; to take the tap off, give no prefix";
        return LLAMA_PCD_INVALID;
    }
    if (cparams.cb_eval && cparams.cb_eval != on_eval) {
        err = "this context has a callback of its own (llama_context_params.cb_eval), and it can have only one; "
            "create the context without it";
    } else if (prefixes.empty() && cparams.flash_attn) {
        err = needs_flash_attn();
    }
    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

int32_t llama_pcd_tap::set(const std::vector<std::string> & wanted, llama_pcd_tap_callback fn, void * data, std::string & err) {
    if (wanted.empty() && prefixes.empty()) {
        return LLAMA_PCD_OK;
    }
    const int32_t status = check(wanted, fn, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    pcd.lctx.synchronize();

    auto & cparams = llama_pcd::cparams(pcd.lctx);

    if (prefixes.empty()) {
        flash_attn = cparams.flash_attn;
    }

    prefixes  = wanted;
    callback  = fn;
    user_data = data;

    const bool is_on = !prefixes.empty();

    cparams.flash_attn        = flash_attn && !is_on;
    cparams.cb_eval           = is_on ? on_eval : nullptr;
    cparams.cb_eval_user_data = is_on ? this    : nullptr;

    pcd.reset_graphs();  // the scheduler learns of its callback when a graph is built
    pcd.reserve_later(); // without flash attention graphs are others

    return LLAMA_PCD_OK;
}

int32_t llama_pcd_tap::watch(ggml_backend_sched_eval_callback fn, void * data, std::string & err) {
    auto & cparams = llama_pcd::cparams(pcd.lctx);

    if (fn && cparams.cb_eval && cparams.cb_eval != watching) {
        err = "this context has a callback already, a tap or its own (llama_context_params.cb_eval), and it can have only one";
        return LLAMA_PCD_UNSUPPORTED;
    }
    if (fn == watching && (!fn || data == cparams.cb_eval_user_data)) {
        return LLAMA_PCD_OK;
    }
    pcd.lctx.synchronize();

    watching = fn;

    cparams.cb_eval           = fn;
    cparams.cb_eval_user_data = data;

    pcd.reset_graphs(); // the scheduler learns of its callback when a graph is built

    return LLAMA_PCD_OK;
}
