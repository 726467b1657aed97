// How much attention tokens pay to the positions before them, beside any kind of attention: what pypcd/engine/_attention.py does, and says
// more of, for contexts that Python does not have.

#include "context/context.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <future>
#include <map>

static constexpr int64_t N_CELLS  = 4096; // whose keys are read at once
static constexpr int32_t N_TOKENS = 64;   // that are evaluated at once: a number for each head, token and cell is in memory

// a tensor of any type and layout, as contiguous numbers
static std::vector<float> floats_of(const ggml_tensor * t) {
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
        } else {
            traits->to_float(src, dst, n_row);
        }
    }

    return res;
}

static std::vector<float> part_of(const ggml_tensor * t, int dim, int64_t begin, int64_t n) {
    ggml_tensor part = *t;
    part.ne[dim] = n;
    part.data    = (char *) t->data + begin*t->nb[dim];
    return floats_of(&part);
}

static float dot(const float * a, const float * b, int64_t n) {
    float sums[16] = {}; // which are vectors
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 16; ++j) {
            sums[j] += a[i + j]*b[i + j];
        }
    }
    float res = 0.0f;
    for (; i < n; ++i) {
        res += a[i]*b[i];
    }
    for (const float sum : sums) {
        res += sum;
    }
    return res;
}

// ALiBi's factor of the mask, as ggml has it; 1 without ALiBi
static float slope_of(float max_bias, int64_t head, int64_t n_heads) {
    if (max_bias == 0.0f) {
        return 1.0f;
    }
    const double n = std::exp2(std::floor(std::log2((double) n_heads)));
    return (float) (head < n ? std::exp2(-max_bias*(head + 1)/n) : std::exp2(-max_bias/2*(2*(head - n) + 1)/n));
}

namespace {

struct reader {
    std::map<int32_t, std::vector<int32_t>> heads; // by layer

    int32_t n     = 0; // tokens that are evaluated
    double  share = 0; // of each in the average

    struct layer {
        std::vector<double>   pays; // by cell
        std::vector<uint32_t> seen; // the cells that the last token sees
    };
    std::map<int32_t, layer> found;
    std::string              refusal;
    std::exception_ptr       failed;

    int32_t n_seen = 0; // layers with attention

    static bool on_eval(ggml_tensor * t, bool ask, void * data) {
        auto & self = *(reader *) data;
        const bool is_flash = t->op == GGML_OP_FLASH_ATTN_EXT;
        if (!is_flash && !(t->op == GGML_OP_SOFT_MAX && t->src[1])) { // a softmax of experts has no mask
            return !ask;
        }
        try {
            if (ask) {
                return self.heads.count(self.n_seen++) > 0;
            }
            if (self.refusal.empty() && !self.failed) {
                self.read(self.n_seen - 1, t, is_flash);
            }
        } catch (...) { // it cannot pass through the scheduler
            self.failed = std::current_exception();
        }
        return !ask && self.n_seen <= self.heads.rbegin()->first; // no layer behind the last one is needed
    }

    void read(int32_t il, const ggml_tensor * t, bool is_flash) {
        const ggml_tensor * mask = t->src[is_flash ? 3 : 1];
        if (!mask || mask->ne[2] != 1 || t->src[0]->ne[3] != 1) {
            return; // it sees all, or heads that each see another choice of cells, or there is a cache for each sequence
        }
        const int64_t n_heads = t->src[0]->ne[2], n_cells = mask->ne[0];
        for (const int32_t head : heads.at(il)) {
            if (head < 0 || head >= n_heads) {
                refusal = format("layer %d of this model has %d heads, so its head %d cannot be read", il, (int) n_heads, head);
                return;
            }
        }
        const auto rows = part_of(mask, 1, 0, n);
        auto & to = found[il];
        to.pays.assign(n_cells, 0.0);
        for (int64_t c = 0; c < n_cells; ++c) {
            if (std::isfinite(rows[(n - 1)*n_cells + c])) {
                to.seen.push_back(c);
            }
        }
        auto weights = is_flash ? scores(il, t, n_cells) : std::vector<std::vector<float>>();
        if (!is_flash) {
            for (const int32_t head : heads.at(il)) {
                weights.push_back(part_of(t, 2, head, 1));
            }
        }
        const auto sinks = is_flash && t->src[4] ? floats_of(t->src[4]) : std::vector<float>(n_heads, -INFINITY);
        each(weights, [&](size_t i, std::vector<float> & x) {
            for (int32_t k = 0; is_flash && k < n; ++k) {
                const int64_t head = heads.at(il)[i];
                soften(t, head, n_cells, &rows[k*n_cells], sinks[head], &x[k*n_cells]);
            }
        });
        for (const auto & x : weights) {
            for (int64_t i = 0; i < n*n_cells; ++i) {
                to.pays[i % n_cells] += share*x[i];
            }
        }
    }

    // fn for the numbers of each head, at the same time
    template <typename F>
    static void each(std::vector<std::vector<float>> & all, const F & fn) {
        std::vector<std::future<void>> done;
        for (size_t i = 0; i < all.size(); ++i) {
            done.push_back(std::async(std::launch::async, [&fn, &all, i]() { fn(i, all[i]); }));
        }
        for (auto & one : done) {
            one.get();
        }
    }

    static float param(const ggml_tensor * t, int i) {
        float res;
        memcpy(&res, t->op_params + i, sizeof(res));
        return res;
    }

    // q K of each head, [n][n_cells]
    std::vector<std::vector<float>> scores(int32_t il, const ggml_tensor * t, int64_t n_cells) const {
        const ggml_tensor * q = t->src[0], * k = t->src[1];
        const int64_t width = q->ne[0], n_shared = q->ne[2]/k->ne[2]; // heads with the same keys
        const auto queries = floats_of(q);

        std::vector<std::vector<float>> res(heads.at(il).size(), std::vector<float>(n*n_cells));
        for (int64_t begin = 0; begin < n_cells; begin += N_CELLS) {
            const int64_t size = std::min(N_CELLS, n_cells - begin);
            const auto    keys = part_of(k, 1, begin, size);
            each(res, [&](size_t i, std::vector<float> & x) {
                const int64_t head = heads.at(il)[i];
                for (int64_t row = 0; row < n; ++row) {
                    for (int64_t c = 0; c < size; ++c) {
                        x[row*n_cells + begin + c] =
                            dot(&queries[(head*q->ne[1] + row)*width], &keys[(head/n_shared*size + c)*width], width);
                    }
                }
            });
        }
        return res;
    }

    // one row of q K to weights
    static void soften(const ggml_tensor * t, int64_t head, int64_t n_cells, const float * mask, float sink, float * x) {
        const float scale = param(t, 0), cap = param(t, 2), slope = slope_of(param(t, 1), head, t->src[0]->ne[2]);

        float top = sink;
        for (int64_t c = 0; c < n_cells; ++c) {
            x[c] = (cap != 0.0f ? std::tanh(x[c]*scale/cap)*cap : x[c]*scale) + slope*mask[c];
            top  = std::max(top, x[c]);
        }
        double sum = std::exp(sink - top);
        for (int64_t c = 0; c < n_cells; ++c) {
            sum += x[c] = std::exp(x[c] - top);
        }
        for (int64_t c = 0; c < n_cells; ++c) {
            x[c] = (float) (x[c]/sum);
        }
    }
};

}

// Adds what a layer's tokens pay to the positions before `end`. False: nobody can tell which cell holds which of them.
static bool add_by_position(const llama_pcd_memory & memory, llama_seq_id seq_id, int32_t end, const reader::layer & from, double * pays) {
    std::map<uint32_t, llama_pos> at; // by cell
    for (const auto * kv : memory.kvs) {
        std::map<uint32_t, llama_pos> own;
        if (kv->get_n_stream() == 1) {
            for (const auto & [pos, cell] : llama_pcd_cells_at(*kv, seq_id, 0, end)) {
                own[cell] = pos;
            }
        }
        const bool is_it = own.size() == from.seen.size() &&
            std::equal(own.begin(), own.end(), from.seen.begin(), [](const auto & one, uint32_t cell) { return one.first == cell; });
        if (is_it && !at.empty() && at != own) {
            return false; // layers with a window order their cells by themselves
        }
        at = is_it ? own : at;
    }
    if (at.size() != (size_t) end) {
        return false;
    }
    for (const auto & [cell, pos] : at) {
        pays[pos] += from.pays[cell];
    }
    return true;
}

int32_t llama_pcd_context::attention(
        llama_seq_id seq_id, const std::vector<llama_token> & tokens, llama_pos pos, const std::vector<std::pair<int32_t, int32_t>> & heads,
        double * pays, std::string & err) {
    const int32_t n_all = (int32_t) tokens.size();
    std::fill(pays, pays + pos + n_all, 0.0);

    for (int32_t i = 0; i < n_all; ) {
        reader cur;
        for (const auto & [il, head] : heads) {
            cur.heads[il].push_back(head);
        }
        cur.n     = std::min({ n_all - i, N_TOKENS, (int32_t) lctx.n_ubatch() });
        cur.share = 1.0/n_all;

        if (const int32_t status = set_eval_callback(reader::on_eval, &cur, false, err); status != LLAMA_PCD_OK) {
            return status;
        }
        llama_batch batch = llama_batch_init(cur.n, 0, 1);
        batch.n_tokens = cur.n;
        for (int32_t j = 0; j < cur.n; ++j) {
            batch.token[j]     = tokens[i + j];
            batch.pos[j]       = pos + i + j;
            batch.n_seq_id[j]  = 1;
            batch.seq_id[j][0] = seq_id;
            batch.logits[j]    = false;
        }
        const int32_t ret = llama_decode(&lctx, batch);
        llama_batch_free(batch);
        set_eval_callback(nullptr, nullptr, false, err);

        if (cur.failed) {
            std::rethrow_exception(cur.failed);
        }
        if (ret != 0) {
            err = "the context has no room for the question, whose attention would be read";
            return LLAMA_PCD_NO_MEMORY;
        }
        i += cur.n;
        for (const auto & [il, own] : cur.heads) {
            const auto it = cur.found.find(il);
            if (cur.refusal.empty() && (it == cur.found.end() || !add_by_position(memory, seq_id, pos + i, it->second, pays))) {
                cur.refusal = "the attention of this model cannot be read in this context";
            }
        }
        if (!cur.refusal.empty()) {
            err = cur.refusal;
            return LLAMA_PCD_UNSUPPORTED;
        }
    }
    return LLAMA_PCD_OK;
}
