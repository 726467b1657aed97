// The contrast as a llama_sampler, which replaces logits by the contrasted row; for callers who build their own chains.

#include "context/context.h"

struct llama_sampler_pcd {
    llama_context * lctx;
    int32_t         row;
};

static const char * sampler_name(const llama_sampler * /*smpl*/) {
    return "pcd";
}

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

    const size_t row = rows.resolve(self->row);
    if (row < rows.size() && rows.contrasts[row].combine) {
        LLAMA_LOG_ERROR("%s: the context has contrasted row %d already; set it, or the sequence, with combine = false\n",
                __func__, self->row);
        return;
    }

    const float * contrasted = llama_pcd_guarded_value<const float *>(__func__, nullptr, [&]() {
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

static llama_sampler * make(llama_context * ctx, int32_t row);

static llama_sampler * sampler_clone(const llama_sampler * smpl) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    return llama_pcd_guarded_value<llama_sampler *>(__func__, nullptr, [&]() {
        return make(self->lctx, self->row);
    });
}

static void sampler_free(llama_sampler * smpl) {
    delete (llama_sampler_pcd *) smpl->ctx;
}

static llama_sampler_i llama_sampler_pcd_i = {
    /* .name              = */ sampler_name,
    /* .accept            = */ nullptr,
    /* .apply             = */ sampler_apply,
    /* .reset             = */ nullptr,
    /* .clone             = */ sampler_clone,
    /* .free              = */ sampler_free,
    /* .backend_init      = */ nullptr,
    /* .backend_accept    = */ nullptr,
    /* .backend_apply     = */ nullptr,
    /* .backend_set_input = */ nullptr,
    /* .backend_reset     = */ nullptr,
    /* .copy_state        = */ nullptr,
};

static llama_sampler * make(llama_context * ctx, int32_t row) {
    return llama_sampler_init(&llama_sampler_pcd_i, new llama_sampler_pcd { ctx, row });
}

llama_sampler * llama_sampler_init_pcd(llama_context * ctx) {
    return llama_pcd_guarded_value<llama_sampler *>(__func__, nullptr, [&]() {
        return make(ctx, -1);
    });
}

void llama_sampler_pcd_set_row(llama_sampler * smpl, int32_t i) {
    if (smpl->iface == &llama_sampler_pcd_i) {
        ((llama_sampler_pcd *) smpl->ctx)->row = i;
    }
}
