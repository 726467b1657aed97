// The contrast as a llama_sampler, which replaces logits by the contrasted row; for callers who build their own chains.

#include "context/context.h"

struct llama_sampler_pcd {
    llama_context * lctx;
    int32_t         row;
};

// There is no row to contrast, and plain logits must not be taken for contrasted ones. A sampler cannot fail, but it can leave a
// chain with nothing to choose but "no token", which llama_decode refuses.
static void refuse(int32_t row, llama_token_data_array * cur_p) {
    LLAMA_LOG_ERROR("%s: row %d of the last batch has no contrast to sample from: its logits were not asked for, or PCD was off for "
            "its sequence or suspended; LLAMA_TOKEN_NULL is sampled\n", __func__, row);

    if (cur_p->size > 0) {
        cur_p->data[0] = { LLAMA_TOKEN_NULL, 0.0f, 1.0f };
        cur_p->size    = 1;
        cur_p->sorted  = true;
    }
}

static void sampler_apply(llama_sampler * smpl, llama_token_data_array * cur_p) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    auto * pcd = llama_pcd_context::of(*self->lctx);
    if (!pcd || !pcd->core.settings.on) {
        return;
    }

    auto & rows = pcd->decoder.rows;

    if (rows.resolve_plain(self->row) >= 0) {
        return; // plain is what its setting asks for
    }

    const auto * row = rows.resolve(self->row);
    if (row && row->setting.combine) {
        LLAMA_LOG_ERROR("%s: the context has contrasted row %d already; set it, or the sequence, with combine = false\n",
                __func__, self->row);
        return;
    }

    const float * contrasted = llama_pcd_guarded<const float *>(__func__, nullptr, [&]() {
        return rows.get(self->row, LLAMA_PCD_ROW_CONTRASTED);
    });
    if (!contrasted) {
        refuse(self->row, cur_p);
        return;
    }

    for (size_t i = 0; i < cur_p->size; ++i) {
        cur_p->data[i].logit = contrasted[cur_p->data[i].id];
    }
    cur_p->sorted = false;
}

static llama_sampler * sampler_clone(const llama_sampler * smpl) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    auto * res = llama_sampler_init_pcd(self->lctx);
    if (res) {
        llama_sampler_pcd_set_row(res, self->row);
    }
    return res;
}

static void sampler_free(llama_sampler * smpl) {
    delete (llama_sampler_pcd *) smpl->ctx;
}

static llama_sampler_i llama_sampler_pcd_i = []() {
    llama_sampler_i res = {};
    res.name  = [](const llama_sampler *) { return "pcd"; };
    res.apply = sampler_apply;
    res.clone = sampler_clone;
    res.free  = sampler_free;
    return res;
}();

llama_sampler * llama_sampler_init_pcd(llama_context * ctx) {
    return llama_pcd_guarded<llama_sampler *>(__func__, nullptr, [&]() {
        return llama_sampler_init(&llama_sampler_pcd_i, new llama_sampler_pcd { ctx, -1 });
    });
}

void llama_sampler_pcd_set_row(llama_sampler * smpl, int32_t i) {
    if (smpl->iface == &llama_sampler_pcd_i) {
        ((llama_sampler_pcd *) smpl->ctx)->row = i;
    }
}
