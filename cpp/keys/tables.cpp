// Writes rho into frequency factors, and keeps them on the device.

#include "keys/tables.h"
#include "formulas/formulas.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>

// stands for "does not turn": finite, since an infinity is not safe under fast math
static constexpr float FACTOR_STILL = 1e30f;

ggml_tensor * llama_pcd_tables::table(table_kind kind, ggml_tensor * source, int64_t n) {
    for (const auto & cur : tables) {
        if (cur.kind == kind && cur.source == source && cur.table.t->ne[0] == n) {
            return cur.table.t;
        }
    }
    static const char * const names[] = { "pcd_difference_table", "pcd_inverse_weights" };

    llama_pcd_table res(model, source, n, names[kind]);
    res.write(content_of(kind, source, n));

    tables.push_back({ kind, source, std::move(res) });

    return tables.back().table.t;
}

std::vector<float> llama_pcd_tables::content_of(table_kind kind, const ggml_tensor * source, int64_t n) const {
    std::vector<float> res = llama_pcd_own_factors(source, n);

    if (kind == INVERSE) {
        for (float & w : res) {
            w = w == 0.0f ? 0.0f : 1.0f/w; // what was multiplied by 0 is lost, and does not matter
        }
        return res;
    }
    const auto & p = settings.params;

    std::vector<double> rho(n);
    pcd_rho(2*n, p.alpha, p.base_ratio, p.transition, p.band, rho.data());
    for (int64_t j = 0; j < n; ++j) {
        const double turn = rho[j] - 1.0;
        res[j] = std::abs(turn)*FACTOR_STILL > res[j] ? (float) (res[j]/turn) : FACTOR_STILL;
    }
    return res;
}

ggml_tensor * llama_pcd_tables::turn_key(
        ggml_context * ctx, ggml_tensor * k, ggml_tensor * pos, const llama_pcd_rotation & r, ggml_tensor * hadamard) {
    // most layers of a quantised cache store Hadamard-rotated keys; the transform is its own inverse
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    // a norm after the rotation commutes with another rotation, its weights do not
    if (r.weights) {
        k = ggml_mul(ctx, k, table(INVERSE, r.weights, ggml_nelements(r.weights)));
    }
    k = r.turn(ctx, k, pos, table(DIFFERENCE, r.factors, r.n_dims/2), r.offset);
    if (r.weights) {
        k = ggml_mul(ctx, k, r.weights);
    }
    if (hadamard) {
        k = llama_mul_mat_hadamard(ctx, k, hadamard);
    }
    return k;
}
