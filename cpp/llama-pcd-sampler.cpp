// A llama_sampler that replaces logits by the contrasted row.

#include "llama-pcd-sampler.h"
#include "llama-pcd-context.h"
#include "llama-pcd-guard.h"

struct llama_sampler_pcd {
    llama_context * lctx;
    int32_t         row;
};

static const char * sampler_name(const llama_sampler * /*smpl*/) {
    return "pcd";
}

static void sampler_apply(llama_sampler * smpl, llama_token_data_array * cur_p) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    auto * pcd = llama_pcd_context::of(*self->lctx);
    if (!pcd || !pcd->core.settings.on) {
        return;
    }
    if (pcd->core.settings.params.combine) {
        LLAMA_LOG_ERROR("%s: the context contrasts its rows already; set it with combine = false\n", __func__);
        return;
    }

    const float * contrasted = llama_pcd_guarded_value<const float *>(__func__, nullptr, [&]() {
        return pcd->decoder.rows.get(self->row, LLAMA_PCD_ROW_CONTRASTED);
    });
    if (!contrasted) {
        return;
    }

    for (size_t i = 0; i < cur_p->size; ++i) {
        cur_p->data[i].logit = contrasted[cur_p->data[i].id];
    }
    cur_p->sorted = false;
}

static llama_sampler * sampler_clone(const llama_sampler * smpl) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    return llama_pcd_guarded_value<llama_sampler *>(__func__, nullptr, [&]() {
        return llama_pcd_sampler_make(self->lctx, self->row);
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

llama_sampler * llama_pcd_sampler_make(llama_context * ctx, int32_t row) {
    return llama_sampler_init(&llama_sampler_pcd_i, new llama_sampler_pcd { ctx, row });
}

void llama_pcd_sampler_set_row(llama_sampler * smpl, int32_t row) {
    if (smpl->iface == &llama_sampler_pcd_i) {
        ((llama_sampler_pcd *) smpl->ctx)->row = row;
    }
}
