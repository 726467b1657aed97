// Second keys and values in the graph: which rotation a key went through, and where its copy is stored.

#include "graph/graph.h"

#include "llama-impl.h"

// An operation behind a rotation that another rotation, of pairs by angles, may be exchanged with: one that moves numbers, or
// multiplies a head by one number
static bool commutes(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONCAT:
        case GGML_OP_REPEAT:
        case GGML_OP_SCALE:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
            return true;
        default:
            return false;
    }
}

// learned weights, one for each dimension
static bool is_weights(const ggml_tensor * w, const ggml_tensor * key) {
    return w->op == GGML_OP_NONE && w->type == GGML_TYPE_F32 && w->buffer && ggml_nelements(w) == key->ne[0];
}

// the rotation behind this key
llama_pcd_rotation llama_pcd_graph::claim_rotation(const ggml_tensor * k_cur, bool hadamard) {
    llama_pcd_rotation res;

    for (auto it = rotations.rbegin(); it != rotations.rend(); ++it) {
        ggml_tensor * weights = nullptr;

        bool weighed     = false;
        bool transformed = false;

        const auto on_path = [&](const ggml_tensor * t) {
            if (t->op == GGML_OP_MUL && !weights && is_weights(t->src[1], t)) {
                weights = t->src[1];
            } else if (t->op == GGML_OP_MUL_MAT && hadamard && !transformed) {
                transformed = true; // the cache's own
            } else {
                weighed |= !commutes(t);
            }
        };
        if (llama_pcd_descends_from(k_cur, it->out, 10, on_path)) {
            res = *it;
            res.weighed  = weighed;
            res.weights  = weights;
            res.hadamard = transformed;
            break;
        }
    }
    if (!res.out && !rotations.empty()) { // or the key shows it later than ten operations behind it
        core->limits.hides_rotation = true;
    }
    rotations.clear();

    return res;
}

// where the rotated dimensions start in a whole key: behind the unrotated ones where a model concatenates them (MLA)
static int rotation_offset(const ggml_tensor * k_cur, const llama_pcd_rotation & r) {
    for (const ggml_tensor * t = k_cur; t; t = t->src[0]) {
        if (t == r.out) {
            return r.offset;
        }
        if (t->op == GGML_OP_CONCAT && t->op_params[0] == 0) {
            const bool behind = !llama_pcd_descends_from(t->src[0], r.out, 10) && llama_pcd_descends_from(t->src[1], r.out, 10);
            return r.offset + (behind ? (int) t->src[0]->ne[0] : 0);
        }
    }
    return r.offset;
}

// heads side by side, as the cache stores them
static ggml_tensor * flat(ggml_context * ctx, ggml_tensor * t, int64_t i0, int64_t n) {
    return ggml_view_2d(ctx, t, t->ne[0]*t->ne[1], n, t->nb[2], i0*t->nb[2]);
}

ggml_tensor * llama_pcd_graph::view_twins(ggml_tensor * t) const {
    return flat(ctx, t, n_tokens - n_twin, n_twin);
}

void llama_pcd_graph::store_k(const llama_kv_cache & kv, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) {
    auto * layer = core->second.find_layer(kv, il);
    if (!layer) {
        return;
    }

    llama_pcd_rotation r = claim_rotation(k_cur, llama_pcd::transforms_keys(kv));

    r.offset = r.out ? rotation_offset(k_cur, r) : 0;
    layer->rotation = r;

    if (core->second.demand.keys && layer->k2 && layer->rotates) {
        if (r.out) {
            ggml_tensor * rot = r.hadamard ? input_k_rot(kv) : nullptr;
            k_cur = core->tables.turn_key(ctx, k_cur, input_pos(inp->key_pos, "pcd_key_pos"), r, rot, llama_pcd_tables::DIFFERENCE);
        }
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, layer->k2, flat(ctx, k_cur, 0, k_cur->ne[2]), k_idxs));
    }

    if (core->settings.separate() && layer->k2 && n_twin > 0) {
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, layer->k2, view_twins(k_cur), input_rows(kv, 1)));
    }
}

void llama_pcd_graph::store_v(const llama_kv_cache & kv, ggml_tensor * v_cur, int32_t il) {
    if (n_twin == 0 || !core->settings.separate()) {
        return;
    }

    auto * layer = core->second.find_layer(kv, il);
    if (!layer || !layer->v2) {
        return;
    }

    ggml_tensor * v2 = layer->v2;

    v_cur = view_twins(v_cur);

    if (llama_pcd::v_trans(kv)) {
        const int64_t n_embd = v_cur->ne[0];

        // each element is a row of its own, and all layers are as wide as the widest
        v_cur = ggml_cont(ctx, v_cur);
        if (n_embd < v2->ne[0]) {
            v_cur = ggml_pad(ctx, v_cur, v2->ne[0] - n_embd, 0, 0, 0);
        }
        ggml_tensor * rows = input_rows(kv, v2->ne[0]);

        v_cur = ggml_reshape_2d(ctx, v_cur, 1, ggml_nelements(v_cur));
        v2    = ggml_reshape_2d(ctx, v2,    1, ggml_nelements(v2));
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, v2, v_cur, rows));
    } else {
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, v2, v_cur, input_rows(kv, 1)));
    }
}
