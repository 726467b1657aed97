// Finds the hidden states in a graph that knows nothing of exits, and reads them through the head.

#include "extras/extras.h"
#include "llama-pcd-extras.h"
#include "llama-pcd.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cstring>
#include <iterator>
#include <unordered_map>

// says that a graph has exits, and where
struct llm_graph_input_exits : llm_graph_input_of_pcd {
    llm_graph_input_exits(const llama_pcd & pcd, ggml_tensor * logits) : llm_graph_input_of_pcd(pcd), logits(logits) {}

    ggml_tensor * logits; // [n_vocab, n_outputs*n_layers], all rows of the first layer first
};

//
// finding them
//

// the one tensor of this name
static ggml_tensor * find_named(ggml_cgraph * gf, const std::string & name) {
    ggml_tensor * res = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        if (name == ggml_graph_node(gf, i)->name) {
            if (res) {
                return nullptr;
            }
            res = ggml_graph_node(gf, i);
        }
    }
    return res;
}

// The neck of the graph before a block: the last tensor before the block's first weight through which everything that follows
// passes. This finds the input of block 0 where a model scales its embeddings, norms them or adds positions.
static ggml_tensor * find_neck(const llm_graph_context & gctx, int32_t il) {
    ggml_tensor * embd = gctx.res->t_inp_embd;
    if (!embd) {
        return nullptr;
    }

    const std::string prefix = format("blk.%d.", il);

    std::unordered_map<const ggml_tensor *, int> last_use = { { embd, -1 } }; // of each tensor that comes from the embeddings
    std::vector<std::pair<int, ggml_tensor *>>   before;                      // those of them before the first weight

    bool inside = false;
    for (int i = 0; i < ggml_graph_n_nodes(gctx.gf); ++i) {
        ggml_tensor * node = ggml_graph_node(gctx.gf, i);

        bool descends = false;
        for (const ggml_tensor * src : node->src) {
            const auto it = last_use.find(src);
            if (it != last_use.end()) {
                it->second = i;
                descends   = true;
            }
            inside |= src && strncmp(src->name, prefix.c_str(), prefix.size()) == 0;
        }
        if (!descends) {
            continue;
        }
        last_use.emplace(node, -1);
        if (!inside) {
            before.emplace_back(i, node);
        }
    }

    ggml_tensor * res = inside ? embd : nullptr;
    int           end = last_use[embd]; // the last use of all tensors before this one

    for (const auto & [i, node] : before) {
        if (end <= i) {
            res = node;
        }
        end = std::max(end, last_use[node]);
    }

    return res;
}

// the hidden state that enters a block; null: not found
static ggml_tensor * find_input(const llm_graph_context & gctx, int32_t il) {
    ggml_tensor * res = gctx.res->get_layer_inp(il);

    if (!res && il > 0) {
        res = find_named(gctx.gf, format("l_out-%d", il - 1));
    }
    if (!res) {
        res = find_neck(gctx, il);
    }

    // other shapes hold several streams side by side; late layers may hold only the rows that were asked for
    const bool fits = res && res->type == GGML_TYPE_F32 && ggml_n_dims(res) <= 2 && res->ne[0] == gctx.n_embd &&
        (res->ne[1] == gctx.n_tokens || res->ne[1] == gctx.n_outputs);

    return fits ? res : nullptr;
}

static ggml_tensor * head_of(const llama_model & model) {
    return model.output ? model.output : model.tok_embd;
}

static bool uses(ggml_cgraph * gf, const ggml_tensor * weights) {
    for (int i = ggml_graph_n_nodes(gf) - 1; i >= 0; --i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (node->op == GGML_OP_MUL_MAT && node->src[0] == weights) {
            return true;
        }
    }
    return false;
}

static ggml_tensor * find_out_ids(const llm_graph_context & gctx) {
    for (const auto & cur : gctx.res->inputs) {
        if (auto * inp = dynamic_cast<llm_graph_input_out_ids *>(cur.get())) {
            return inp->out_ids;
        }
    }
    return nullptr;
}

//
// graph
//

void llama_pcd_exits::build(const llama_model & model, const llm_graph_context & gctx) {
    if ((layers.empty() && !probing) || !gctx.res->t_logits) {
        return;
    }

    auto * out_ids = find_out_ids(gctx);

    if (probing) {
        const bool has_head = head_of(model) && uses(gctx.gf, head_of(model)) && out_ids;

        found.clear();
        for (uint32_t il = 0; il < gctx.hparams.n_layer(); ++il) {
            found.push_back(has_head && find_input(gctx, il));
        }
        return;
    }

    // memory is not reserved for the exits of every token, because nobody asks for all of them
    if (gctx.n_outputs == 0 || gctx.res == pcd.lctx.get_gf_res_reserve()) {
        return;
    }

    ggml_context * ctx = gctx.ctx0;

    ggml_tensor * cur = nullptr;
    for (const int32_t il : layers) {
        ggml_tensor * h = find_input(gctx, il);
        if (h->ne[1] == gctx.n_tokens) {
            h = ggml_get_rows(ctx, ggml_is_contiguous(h) ? h : ggml_cont(ctx, h), out_ids);
        }
        cur = cur ? ggml_concat(ctx, cur, h, 1) : h;
    }

    cur = gctx.build_lora_mm(head_of(model), cur, model.output_s);
    if (model.output_b) {
        cur = ggml_add(ctx, cur, model.output_b);
    }
    ggml_set_name(cur, "pcd_exit_logits");
    ggml_set_output(cur);

    ggml_build_forward_expand(gctx.gf, cur);

    gctx.res->add_input(std::make_unique<llm_graph_input_exits>(pcd, cur));
}

//
// rows
//

void llama_pcd_exits::take(const llm_graph_result & res, const llama_ubatch & ubatch) {
    const llm_graph_input_exits * inp = nullptr;
    for (const auto & cur : res.inputs) {
        if (auto * found = dynamic_cast<llm_graph_input_exits *>(cur.get())) {
            inp = found;
        }
    }
    if (!inp || layers.empty()) {
        return;
    }

    const size_t n_vocab = inp->logits->ne[0];
    const size_t n_rows  = inp->logits->ne[1]/layers.size();
    const size_t start   = logits.size();

    size_t k = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        if (ubatch.output[i] || n_rows == ubatch.n_tokens) {
            rows[ubatch.data->batch_idxs[i]] = { start + n_vocab*k++, n_vocab*n_rows };
        }
    }
    GGML_ASSERT(k == n_rows);

    logits.resize(start + ggml_nelements(inp->logits));

    ggml_backend_sched_synchronize(pcd.lctx.get_sched());
    ggml_backend_tensor_get(inp->logits, logits.data() + start, 0, ggml_nbytes(inp->logits));
}

const float * llama_pcd_exits::get(int32_t i_layer, int32_t i) const {
    const int32_t n_rows = rows.size();

    if (i_layer < 0 || i_layer >= (int32_t) layers.size() || i < -n_rows) {
        return nullptr;
    }
    const auto row = i < 0 ? std::next(rows.begin(), n_rows + i) : rows.find(i);
    return row == rows.end() ? nullptr : logits.data() + row->second.at + i_layer*row->second.stride;
}

//
// settings
//

int32_t llama_pcd_exits::check(const std::vector<int32_t> & layers, bool pcd_on, std::string & err) const {
    const auto &  model   = pcd.lctx.get_model();
    const int32_t n_layer = model.hparams.n_layer();

    for (const int32_t il : layers) {
        if (il < 0 || il >= n_layer) {
            err = format("an exit's layer is %d, allowed: 0 (the embeddings) to %d, for this model has %d layers",
                    il, n_layer - 1, n_layer);
            return LLAMA_PCD_INVALID;
        }
    }
    if ((int32_t) layers.size() > n_layer) {
        err = format("%d exits were asked for, allowed: at most %d, one for each layer", (int) layers.size(), n_layer);
        return LLAMA_PCD_INVALID;
    }
    if (layers.empty()) {
        return LLAMA_PCD_OK;
    }
    if (pcd_on) {
        err = "PCD is on, and an exit is compared with a plain row; turn PCD off first";
    } else if (!pcd.lctx.get_memory() || llama_model_has_encoder(&model)) {
        err = "the architecture '" + model.arch_name() + "' does not decode token by token (it has an encoder, or no cache), "
            "and exits are of decoded tokens";
    }
    return err.empty() ? LLAMA_PCD_OK : LLAMA_PCD_UNSUPPORTED;
}

int32_t llama_pcd_exits::set(const std::vector<int32_t> & wanted, bool pcd_on, std::string & err) {
    const int32_t status = check(wanted, pcd_on, err);
    if (status != LLAMA_PCD_OK) {
        return status;
    }
    const auto & model = pcd.lctx.get_model();

    pcd.lctx.synchronize();

    if (!wanted.empty() && found.empty()) {
        // the graphs built here show where the hidden states are
        probing = true;
        pcd.reserve_now([&]() { probing = false; });
        probing = false;
        found.resize(model.hparams.n_layer(), false);
    }
    for (const int32_t il : wanted) {
        if (!found[il]) {
            err = format("the graph of the architecture '%s' does not show the hidden state that enters block %d, "
                    "or how its head reads it; early exits need both", model.arch_name().c_str(), il);
            return LLAMA_PCD_UNSUPPORTED;
        }
    }

    if (wanted != layers) {
        layers = wanted;
        pcd.reset_graphs();
        // a graph with as many nodes would get the memory plan of the last one, which may reuse the memory of these layers
        pcd.reserve_later();
    }
    forget();

    return LLAMA_PCD_OK;
}

bool llama_pcd_exits::has_tied_head(const llama_model & model) {
    const ggml_tensor * head = head_of(model);
    return head && strcmp(head->name, "output.weight") != 0;
}
