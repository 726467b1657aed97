// The contrast as a custom sampler, for callers who build their own chains. Knows only the rows of a context.

#pragma once

#include "llama.h"

// see llama_sampler_init_pcd and llama_sampler_pcd_set_row
llama_sampler * llama_pcd_sampler_make   (llama_context * ctx, int32_t row);
void            llama_pcd_sampler_set_row(llama_sampler * smpl, int32_t row);
