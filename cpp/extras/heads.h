// Ms-PoE: from some layer on, each attention head sees positions t / r with a ratio r of its own. The ratios, their tables
// on the device, and the prompt that tells the order of the heads. Knows nothing of twins, nor how a graph is built.
//
//   ratio   r_i = min + (max - min) i / H, i = 0 .. H-1. A rotation divides its angle by its frequency factors, so with its
//           factors multiplied by r a head sees position t / r: one rotation for each head, on every backend.
//   keys    of a group of query heads have the ratio of the group's first head; the other queries keep their own.
//   order   static: head h has ratio r_(H-1-h). outlier: r_order[h], where order sorts the heads by how many keys get more
//           than three times the mean of the last token's attention, before any rotation. Each layer finds its order while
//           the prompt is evaluated, and keeps it.

#pragma once

#include "llama-pcd.h"
#include "upstream/memory.h"

#include "ggml-cpp.h"

#include <string>
#include <vector>

struct llama_pcd_heads {
    llama_pcd_heads(llama_pcd & pcd, const llama_pcd_memory & memory) : pcd(pcd), memory(memory) {}

    llama_pcd & pcd; // whether ratios are on is pcd.heads.on, where a hook reads it

    bool on() const { return pcd.heads.on; }

    // see llama_pcd_set_head_ratios, llama_pcd_find_head_order and llama_pcd_get_head_ratios; pcd_on: PCD is on
    int32_t set       (const llama_pcd_head_ratios * p, bool pcd_on, std::string & err);
    int32_t find_order(std::string & err);
    int32_t get       (int32_t il, float * out, int32_t n) const;

    // true if the batch was decoded here, or refused, with the result in ret
    bool decode(const llama_batch_ext & batch, int & ret);

    // nodes that a graph may need more
    uint32_t n_nodes() const;

    //
    // for the graph
    //

    const llama_pcd_head_ratios & params() const { return cur.params; }

    bool by_outliers() const { return cur.params.order == LLAMA_PCD_HEAD_ORDER_OUTLIER; }
    bool is_finding()  const { return cur.finding; }

    int64_t n_prompt() const { return cur.n_prompt; }

    // Frequency factors [n_dims/2, n_head], on the device. il = -1: those of static heads, or of the ratios in their order.
    // Else those of a layer whose order is found while a prompt is evaluated, which writes them.
    ggml_tensor * table(int32_t il, ggml_tensor * factors, int n_dims, int64_t n_head);

    // what only a graph shows: a rotation was done head by head, or why it cannot be
    void rotated() { cur.n_rotated++; }
    void refuse(const std::string & reason);

private:
    struct table_entry {
        int32_t       il; // the layer whose order it has; -1: an order that needs no layer
        ggml_tensor * factors;
        ggml_tensor * t;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    struct state {
        llama_pcd_head_ratios params = {}; // max_ratio = 0: never set

        std::vector<table_entry> tables;

        // order = outlier
        bool    finding   = false; // the next decode is the prompt that tells the order
        bool    has_order = false;
        int64_t n_prompt  = 0;     // its tokens, while it is decoded

        int64_t     n_rotated = 0;
        std::string reason;        // why it cannot be done; empty: it can
    };

    const llama_pcd_memory & memory;

    state cur;

    int32_t check(const llama_pcd_head_ratios & p, bool pcd_on, std::string & err) const;

    // why a batch cannot be decoded; empty: it can
    std::string refusal(const llama_batch_ext & batch) const;

    int decode_prompt(const llama_batch_ext & batch);
};
