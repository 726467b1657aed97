// Ms-PoE in the graph that is being built: a rotation for each head, and the order of the heads found in a prompt. See
// extras/heads.h for what is computed.

#pragma once

#include "extras/heads.h"
#include "upstream/rotation.h"

// a graph is begun, and is whole; null: without ratios
void llama_pcd_heads_begin(const llm_graph_context & gctx, llama_pcd_heads * heads);
void llama_pcd_heads_end  ();

// `a` rotated by pos, each head with its ratio; null: as the model does it
ggml_tensor * llama_pcd_heads_rope(ggml_context * ctx, ggml_tensor * a, ggml_tensor * pos, const llama_pcd_rotation & r, float attn_factor);

// true if `a` was rotated head by head, where a rotation starts at the first dimension
bool llama_pcd_heads_offset(const ggml_tensor * a, int n_offs);

// a layer stores this key
void llama_pcd_heads_stored(const ggml_context * ctx, const ggml_tensor * k_cur, int32_t il);
