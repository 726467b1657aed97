// The contrast as a custom sampler, for callers who build their own chains.

#include "llama-pcd-impl.h"

#include "llama-context.h"

#include <unordered_map>

struct llama_sampler_pcd {
    llama_context * lctx;
    int32_t         row;
};

static const char * llama_sampler_pcd_name(const llama_sampler * /*smpl*/) {
    return "pcd";
}

static void llama_sampler_pcd_apply(llama_sampler * smpl, llama_token_data_array * cur_p) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    llama_pcd * pcd = self->lctx->get_cparams().pcd.get();
    if (!pcd || !pcd->on) {
        return;
    }
    if (pcd->params.combine) {
        LLAMA_LOG_ERROR("%s: the context contrasts its rows already; set it with combine = false\n", __func__);
        return;
    }

    const float * contrasted = pcd->get_row(self->row, LLAMA_PCD_ROW_CONTRASTED);
    if (!contrasted) {
        return;
    }

    for (size_t i = 0; i < cur_p->size; ++i) {
        cur_p->data[i].logit = contrasted[cur_p->data[i].id];
    }
    cur_p->sorted = false;
}

static llama_sampler * llama_sampler_pcd_clone(const llama_sampler * smpl) {
    const auto * self = (const llama_sampler_pcd *) smpl->ctx;

    llama_sampler * res = llama_sampler_init_pcd(self->lctx);
    llama_sampler_pcd_set_row(res, self->row);
    return res;
}

static void llama_sampler_pcd_free(llama_sampler * smpl) {
    delete (llama_sampler_pcd *) smpl->ctx;
}

static llama_sampler_i llama_sampler_pcd_i = {
    /* .name              = */ llama_sampler_pcd_name,
    /* .accept            = */ nullptr,
    /* .apply             = */ llama_sampler_pcd_apply,
    /* .reset             = */ nullptr,
    /* .clone             = */ llama_sampler_pcd_clone,
    /* .free              = */ llama_sampler_pcd_free,
    /* .backend_init      = */ nullptr,
    /* .backend_accept    = */ nullptr,
    /* .backend_apply     = */ nullptr,
    /* .backend_set_input = */ nullptr,
    /* .backend_reset     = */ nullptr,
    /* .copy_state        = */ nullptr,
};

llama_sampler * llama_sampler_init_pcd(llama_context * ctx) {
    return llama_sampler_init(&llama_sampler_pcd_i, new llama_sampler_pcd { ctx, -1 });
}

void llama_sampler_pcd_set_row(llama_sampler * smpl, int32_t i) {
    if (smpl->iface == &llama_sampler_pcd_i) {
        ((llama_sampler_pcd *) smpl->ctx)->row = i;
    }
}
