// Tables of ratios, the prompt that tells the order, and what cannot have ratios.

#include "extras/heads.h"
#include "upstream/rotation.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <stdexcept>

void llama_pcd_heads::refuse(const std::string & reason) {
    if (cur.reason.empty()) {
        cur.reason = reason;
    }
}

uint32_t llama_pcd_heads::n_nodes() const {
    const auto & hparams = pcd.lctx.get_model().hparams;

    uint32_t res = 0;
    if (cur.params.max_ratio > 0.0f) { // on by now or before: three nodes for each head
        for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
            res += 3*(hparams.n_head(il) + hparams.n_head_kv(il));
        }
    }
    return res;
}

//
// frequency factors of each head
//

// r_0 .. r_(H-1)
static std::vector<float> ratios_of(const llama_pcd_head_ratios & p, int64_t n_head) {
    std::vector<float> res(n_head);
    for (int64_t i = 0; i < n_head; ++i) {
        res[i] = p.min_ratio + (p.max_ratio - p.min_ratio)*i/n_head;
    }
    return res;
}

ggml_tensor * llama_pcd_heads::table(int32_t il, ggml_tensor * factors, int n_dims, int64_t n_head) {
    for (const auto & entry : cur.tables) {
        if (entry.il == il && entry.factors == factors && entry.t->ne[0] == n_dims/2 && entry.t->ne[1] == n_head) {
            return entry.t;
        }
    }

    ggml_backend_buffer_type_t buft = factors && factors->buffer ?
        ggml_backend_buffer_get_type(factors->buffer) :
        ggml_backend_dev_buffer_type(pcd.lctx.get_model().dev_layer(std::max(il, 0)));

    ggml_init_params ip = { ggml_tensor_overhead(), nullptr, true };

    table_entry entry;
    entry.il      = il;
    entry.factors = factors;
    entry.ctx.reset(ggml_init(ip));
    entry.t = ggml_new_tensor_2d(entry.ctx.get(), GGML_TYPE_F32, n_dims/2, n_head);
    ggml_set_name(entry.t, "pcd_head_factors");
    entry.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(entry.ctx.get(), buft));
    if (!entry.buf) {
        throw std::runtime_error("pcd: no memory for the frequency factors of each head");
    }

    const auto own    = llama_pcd_own_factors(factors, n_dims/2);
    const auto ratios = ratios_of(cur.params, n_head);

    std::vector<float> data;
    for (int64_t h = 0; h < n_head; ++h) {
        const float ratio = by_outliers() ? ratios[h] : ratios[n_head - 1 - h];
        for (const float f : own) {
            data.push_back(f*ratio);
        }
    }
    ggml_backend_tensor_set(entry.t, data.data(), 0, data.size()*sizeof(float));

    cur.tables.push_back(std::move(entry));

    return cur.tables.back().t;
}

int32_t llama_pcd_heads::get(int32_t il, float * out, int32_t n) const {
    const auto & hparams = pcd.lctx.get_model().hparams;

    if (!on() || il < 0 || il >= (int32_t) hparams.n_layer()) {
        return -1;
    }
    const int32_t n_head = hparams.n_head(il);

    if (il < cur.params.first_layer) {
        std::fill_n(out, std::min(n, n_head), 1.0f);
        return n_head;
    }
    for (const auto & entry : cur.tables) {
        if (entry.il != (by_outliers() ? il : -1) || entry.t->ne[1] != n_head || (by_outliers() && !cur.has_order)) {
            continue;
        }
        const float own = llama_pcd_own_factors(entry.factors, 1)[0];
        for (int32_t h = 0; h < std::min(n, n_head); ++h) {
            ggml_backend_tensor_get(entry.t, out + h, h*entry.t->nb[1], sizeof(float));
            out[h] /= own;
        }
        return n_head;
    }
    return -1;
}

//
// decode
//

std::string llama_pcd_heads::refusal(const llama_batch_ext & batch) const {
    const auto & tokens = batch.tokens;

    if (by_outliers() && cur.finding) {
        bool is_prompt = !tokens.empty();
        for (size_t i = 0; i < tokens.size(); ++i) {
            is_prompt &= tokens[i].pos[0] == (llama_pos) i && tokens[i].seq_ids == tokens[0].seq_ids;
        }
        if (!is_prompt) {
            return "the order of the heads is found in a whole prompt, one sequence from position 0 on, and this batch is not one";
        }
        if (tokens.size() > pcd.lctx.n_ubatch()) {
            return format("the order of the heads is found in a prompt that is evaluated at once, and this one has %d tokens; "
                    "create the context with n_batch and n_ubatch of as many (n_ubatch is %d)",
                    (int) tokens.size(), (int) pcd.lctx.n_ubatch());
        }
    } else if (by_outliers() && !cur.has_order) {
        return "the order of the heads is not known; call llama_pcd_find_head_order() and evaluate a prompt";
    }
    if (memory.has_shift()) {
        return "keys that were rotated head by head cannot move to other positions; clear the memory and evaluate the text again";
    }
    return {};
}

bool llama_pcd_heads::decode(const llama_batch_ext & batch, int & ret) {
    const std::string reason = refusal(batch);

    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, reason.c_str());
        ret = -1;
        return true;
    }
    if (!cur.finding) {
        return false;
    }
    ret = decode_prompt(batch);
    return true;
}

int llama_pcd_heads::decode_prompt(const llama_batch_ext & batch) {
    struct guard {
        explicit guard(int64_t & n) : n(n) {}
        ~guard() { n = 0; }

        int64_t & n;
    } const inside(cur.n_prompt);

    cur.has_order = false;
    cur.n_prompt  = batch.tokens.size();
    cur.reason.clear();

    const int ret = pcd.decode_plain(batch);

    if (ret == 0 && !cur.reason.empty()) {
        LLAMA_LOG_ERROR("%s: the order of the heads was not found: %s\n", __func__, cur.reason.c_str());
        cur.reason.clear();
        return -2;
    }
    if (ret == 0) {
        cur.has_order = true;
        cur.finding   = false;
    }
    return ret;
}

//
// settings
//

static bool same_ratios(const llama_pcd_head_ratios & a, const llama_pcd_head_ratios & b) {
    return a.min_ratio == b.min_ratio && a.max_ratio == b.max_ratio && a.first_layer == b.first_layer && a.order == b.order;
}

int32_t llama_pcd_heads::check(const llama_pcd_head_ratios & p, bool pcd_on, std::string & err) const {
    const auto &  model   = pcd.lctx.get_model();
    const auto &  hparams = model.hparams;
    const int32_t n_layer = hparams.n_layer();

    if (p.order < 0 || p.order > LLAMA_PCD_HEAD_ORDER_OUTLIER) {
        err = format("order is %d, not an enum llama_pcd_head_order", p.order);
    } else if (!(p.min_ratio > 0.0f && p.min_ratio <= 1000.0f)) {
        err = format("min_ratio is %g, allowed: more than 0 and at most 1000", p.min_ratio);
    } else if (!(p.max_ratio >= p.min_ratio && p.max_ratio <= 1000.0f)) {
        err = format("max_ratio is %g, allowed: min_ratio (%g) to 1000", p.max_ratio, p.min_ratio);
    } else if (p.first_layer < 0 || p.first_layer >= n_layer) {
        err = format("first_layer is %d, allowed: 0 to %d, for this model has %d layers", p.first_layer, n_layer - 1, n_layer);
    }
    if (!err.empty()) {
        return LLAMA_PCD_INVALID;
    }

    const std::string arch = "the architecture '" + model.arch_name() + "' ";

    if (pcd_on) {
        err = "PCD is on, and over-rotates positions that all heads share; turn it off first";
    } else if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
        err = arch + "has no rotary positions to scale";
    } else if (hparams.n_pos_per_embd() > 1) {
        err = arch + "has positions of several sections (M-RoPE), which one ratio does not scale";
    } else if (hparams.is_mla()) {
        err = arch + "has one latent key for all heads (MLA), which cannot be rotated for each of them";
    } else if (llama_model_has_encoder(&model)) {
        err = arch + "has an encoder, and ratios are for the heads of a decoder alone";
    } else if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        err = "heads that are split over devices tensor by tensor cannot be rotated one by one; use another split_mode";
    } else if (llama_pcd_on_cann(model)) {
        err = "the CANN backend keeps one table for all rotations of a graph";
    } else if (p.order == LLAMA_PCD_HEAD_ORDER_OUTLIER && hparams.swa_type != LLAMA_SWA_TYPE_NONE) {
        err = arch + "has sliding-window layers, where outliers among all keys are not defined; use order=\"static\"";
    }
    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

int32_t llama_pcd_heads::set(const llama_pcd_head_ratios * p, bool pcd_on, std::string & err) {
    bool & is_on = pcd.heads.on;

    if (!p) {
        if (is_on) {
            is_on       = false;
            cur.finding = false;
            pcd.reset_graphs();
        }
        return LLAMA_PCD_OK;
    }
    const int32_t status = check(*p, pcd_on, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }

    pcd.lctx.synchronize();

    if (cur.n_rotated > 0 && same_ratios(*p, cur.params)) {
        if (!is_on) {
            is_on = true; // an order that was found is still there
            pcd.reset_graphs();
        }
        return LLAMA_PCD_OK;
    }

    const bool was_on = is_on;
    state      old    = std::move(cur);

    cur         = {};
    cur.params  = *p;
    cur.finding = p->order == LLAMA_PCD_HEAD_ORDER_OUTLIER;
    is_on       = true;

    const auto undo = [&]() {
        cur   = std::move(old);
        is_on = was_on;
        pcd.reserve_later();
        pcd.reset_graphs();
    };

    pcd.reset_graphs();

    // the graphs built here show what cannot run
    pcd.reserve_now(undo);
    cur.finding = false;

    if (cur.n_rotated == 0) {
        refuse("it has no rotary positions to scale");
    }
    if (!cur.reason.empty()) {
        err = "the architecture '" + pcd.lctx.get_model().arch_name() + "' cannot have a ratio for each head: " + cur.reason;
        undo();
        return LLAMA_PCD_UNSUPPORTED;
    }

    return LLAMA_PCD_OK;
}

int32_t llama_pcd_heads::find_order(std::string & err) {
    if (!on() || !by_outliers()) {
        err = "there is no order to be found; set ratios with order = LLAMA_PCD_HEAD_ORDER_OUTLIER first (llama_pcd_set_head_ratios)";
        return LLAMA_PCD_INVALID;
    }
    cur.finding   = true;
    cur.has_order = false;
    return LLAMA_PCD_OK;
}
