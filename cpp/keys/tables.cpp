// Writes rho into frequency factors, and keeps them on the device.

#include "keys/tables.h"
#include "formulas/formulas.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>
#include <stdexcept>
#include <string>

// stands for "does not turn": finite, since an infinity is not safe under fast math
static constexpr float FACTOR_STILL = 1e30f;

llama_pcd_tables::entry llama_pcd_tables::make(ggml_tensor * factors, int64_t n, ggml_backend_buffer_type_t buft, const char * name) {
    ggml_init_params ip = { ggml_tensor_overhead(), nullptr, true };

    entry res;
    res.factors = factors;
    res.ctx.reset(ggml_init(ip));
    res.t = ggml_new_tensor_1d(res.ctx.get(), GGML_TYPE_F32, n);
    ggml_set_name(res.t, name);
    res.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(res.ctx.get(), buft));
    if (!res.buf) {
        throw std::runtime_error(std::string("pcd: no memory for the tensor ") + name);
    }
    return res;
}

ggml_tensor * llama_pcd_tables::table(table_kind kind, ggml_tensor * factors, int n_dims) {
    for (const auto & cur : tables) {
        if (cur.kind == kind && cur.factors == factors && cur.t->ne[0] == n_dims/2) {
            return cur.t;
        }
    }

    // beside the model's own factors; without any, where the first layer lives
    ggml_backend_buffer_type_t buft = factors && factors->buffer ?
        ggml_backend_buffer_get_type(factors->buffer) : ggml_backend_dev_buffer_type(model.dev_layer(0));

    entry cur = make(factors, n_dims/2, buft, kind == DIFFERENCE ? "pcd_difference_table" : "pcd_table");
    cur.kind = kind;

    const auto data = content_of(cur, settings.params);
    ggml_backend_tensor_set(cur.t, data.data(), 0, data.size()*sizeof(float));

    tables.push_back(std::move(cur));

    return tables.back().t;
}

ggml_tensor * llama_pcd_tables::inverse(ggml_tensor * weights) {
    for (const auto & cur : inverses) {
        if (cur.factors == weights) {
            return cur.t;
        }
    }

    const int64_t n = ggml_nelements(weights);

    entry cur = make(weights, n, ggml_backend_buffer_get_type(weights->buffer), "pcd_inverse_weights");

    std::vector<float> data(n);
    ggml_backend_tensor_get(weights, data.data(), 0, n*sizeof(float));
    for (float & w : data) {
        w = w == 0.0f ? 0.0f : 1.0f/w; // what was multiplied by 0 is lost, and does not matter
    }
    ggml_backend_tensor_set(cur.t, data.data(), 0, n*sizeof(float));

    inverses.push_back(std::move(cur));

    return inverses.back().t;
}

std::vector<float> llama_pcd_tables::content_of(const entry & cur, const llama_pcd_params & p) {
    const int64_t n = cur.t->ne[0];

    std::vector<double> rho(n, 1.0);
    if (llama_pcd_settings::rotates(p)) {
        pcd_rho(2*n, p.alpha, p.base_ratio, p.transition, p.band, rho.data());
    }

    const auto own = llama_pcd_own_factors(cur.factors, n);

    std::vector<float> res(n);
    for (int64_t j = 0; j < n; ++j) {
        const double turn = cur.kind == DIFFERENCE ? rho[j] - 1.0 : rho[j];
        res[j] = std::abs(turn)*FACTOR_STILL > own[j] ? (float) (own[j]/turn) : FACTOR_STILL;
    }
    return res;
}

llama_pcd_tables::contents llama_pcd_tables::contents_for(const llama_pcd_params & p) const {
    contents res;
    for (const auto & cur : tables) {
        res.push_back(content_of(cur, p));
    }
    return res;
}

void llama_pcd_tables::write(const contents & data) {
    for (size_t i = 0; i < data.size(); ++i) {
        ggml_backend_tensor_set(tables[i].t, data[i].data(), 0, data[i].size()*sizeof(float));
    }
}

ggml_tensor * llama_pcd_tables::turn_key(ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos,
        const llama_pcd_rotation & r, ggml_tensor * hadamard, table_kind kind) {
    // most layers of a quantised cache store Hadamard-rotated keys; the transform is its own inverse
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    // a norm after the rotation commutes with another rotation, its weights do not
    if (r.weights) {
        k = ggml_mul(ctx, k, inverse(r.weights));
    }
    k = r.turn(ctx, k, pos, table(kind, r.factors, r.n_dims), r.offset);
    if (r.weights) {
        k = ggml_mul(ctx, k, r.weights);
    }
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    return k;
}
