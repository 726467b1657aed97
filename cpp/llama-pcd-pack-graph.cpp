// Second keys that are made in the graph, of the cells that twins with a window see: nothing of them is kept.

#include "llama-pcd-graph.h"

bool llama_pcd_graph::makes_keys(const llama_pcd_layer & layer) const {
    return n_turned > 0 && core->second.makes_keys() && layer.rotates && layer.rotation.out;
}

// the blocks are rows of t; F32, whatever t is
static ggml_tensor * pick(ggml_context * ctx, ggml_tensor * t, int64_t ne0, ggml_tensor * rows) {
    return ggml_get_rows(ctx, ggml_reshape_2d(ctx, t, ne0, ggml_nelements(t)/ne0), rows);
}

// the values of the same cells, laid out as those that llama.cpp gives to attention
ggml_tensor * llama_pcd_graph::packed_values(
        const attn & args, const llama_pcd_layer & layer, llama_pcd_pack & pack, ggml_tensor * k) const {
    const auto *  v = args.v;
    const int64_t n = pack.n_cells();

    if (v->view_src == layer.k1) {
        return ggml_view_3d(ctx, k, v->ne[0], v->ne[1], n, k->nb[1], k->nb[2], 0);
    }
    GGML_ASSERT(v->view_src == layer.v1);

    if (v->nb[1] > v->nb[2]) { // transposed
        const int64_t n_embd = v->ne[1]*v->ne[2];

        ggml_tensor * rows = input(pack.channels[n_embd], GGML_TYPE_I32, n_embd*pack.n_blocks, "pcd_pack_channels");
        ggml_tensor * res  = pick(ctx, layer.v1, llama_pcd_pack::BLOCK, rows);
        return ggml_view_3d(ctx, res, n, v->ne[1], v->ne[2], n*v->ne[2]*res->nb[0], n*res->nb[0], 0);
    }
    ggml_tensor * res = pick(ctx, layer.v1, layer.v1->ne[0]*llama_pcd_pack::BLOCK, pack.rows);
    return ggml_view_3d(ctx, res, v->ne[0], v->ne[1], n, v->ne[0]*res->nb[0], layer.v1->ne[0]*res->nb[0], 0);
}

llama_pcd_graph::attended llama_pcd_graph::packed(const attn & args, const llama_pcd_layer & layer) const {
    const size_t  i    = core->second.cache_of(layer);
    auto &        pack = inp->packs.at(i);
    const int64_t n    = pack.n_cells();

    input(pack.rows, GGML_TYPE_I32, pack.n_blocks, "pcd_pack_rows");
    input(pack.pos,  GGML_TYPE_I32, n*inp->n_pos,  "pcd_pack_pos");
    input(pack.mask, args.kq_mask->type, n,        "pcd_pack_mask", n_turned);

    // twins alone may need no other mask, but some of llama.cpp's inputs fill theirs whether or not it is in the graph
    ggml_build_forward_expand(gf, ggml_view_1d(ctx, args.kq_mask, 1, 0));

    ggml_tensor * rot = layer.rotation.hadamard ? input_k_rot(*pack.kv) : nullptr;
    ggml_tensor * k   = pick(ctx, layer.k1, layer.k1->ne[0]*llama_pcd_pack::BLOCK, pack.rows);

    k = ggml_reshape_3d(ctx, k, args.k->ne[0], args.k->ne[1], n);

    return {
        core->tables.turn_key(ctx, k, pack.pos, layer.rotation, rot, llama_pcd_tables::DIFFERENCE),
        packed_values(args, layer, pack, k),
        pack.mask,
    };
}
