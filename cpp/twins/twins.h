// Twins: which sequence ids they have, and those in the batch that is being decoded. A twin is a token's second evaluation,
// over-rotated or with a restricted view. And which cells of the memory a twin sees (view.cpp). Knows nothing of how a twin is evaluated.

#pragma once

#include "twins/settings.h"
#include "upstream/memory.h"

#include <array>
#include <vector>

// Twins get sequence ids of their own, so that they never see one another: the last ones there are. Recurrent layers keep a state
// for each id up to the highest, so there they are the next after the context's own.
struct llama_pcd_twin_ids {
    explicit llama_pcd_twin_ids(const llama_pcd_memory & memory);

    llama_seq_id first;
    uint32_t     n_max; // in one pass

    bool is_twin(llama_seq_id seq_id) const { return seq_id >= first; }
};

struct llama_pcd_twin {
    llama_seq_id seq_id; // its own
    llama_seq_id parent; // its token's, whose cells it sees
    int32_t      token;  // the entry of its token, where that one is in the same batch; -1: it is not
    size_t       row;    // which of llama_pcd_rows it gives

    // of the setting in force for it
    bool      rotated; // over-rotated
    llama_pos window;
    llama_pos n_sink;

    // where it is, once its micro-batch is in memory
    int32_t   i       = -1; // its entry of the micro-batch; -1: it is in another one
    int32_t   token_i = -1; // its token's; -1: none
    llama_pos pos     = 0;
    bool      is_2d   = false;

    llama_kv_cell_ext ext = {}; // its place in an image, if is_2d

    std::array<int32_t, llama_pcd_memory::MAX_CACHES> cells = { -1, -1 }; // with its own keys, in each cache

    // the first position in its window
    llama_pos begin() const { return window == 0 || pos < window ? 0 : pos - window + 1; }
};

// The cells that the attention of twins has to look at: [begin, end) and, where begin > 0, the first `head` ones, for the first
// positions of a text. No cell from `end` on is in use.
struct llama_pcd_cell_range {
    // Whole blocks, so that the graph changes only now and then: of so many cells as llama.cpp's own, which the kernels of GPUs want,
    // or, for a single twin on the CPU, of fewer.
    static constexpr uint32_t BLOCK      = 256;
    static constexpr uint32_t HOST_BLOCK = 64;

    uint32_t begin = 0;
    uint32_t end   = 0;
    uint32_t head  = 0;

    bool operator==(const llama_pcd_cell_range & other) const { return begin == other.begin && end == other.end && head == other.head; }
};

// The twins of one batch that llama.cpp decodes, which are its last entries. Made when they are added to the batch, and dropped with the
// pass. Those that are not over-rotated come before those that are, since attention is split between them.
struct llama_pcd_twins {
    uint32_t first    = 0;     // the entry of the first one
    bool     together = false; // they are in the batch of their tokens

    std::vector<llama_pcd_twin> all;

    bool misplaced = false; // found in a micro-batch while the batch is decoded, see layout

    // The end of a micro-batch: so many are twins, so many of these over-rotated. misplaced: twins cannot be evaluated in it. Attention is
    // split, so all of them have to come after the standard tokens, and those that are over-rotated last. If a batch does not fit as it
    // is, sliding-window memory splits it anew (split_equal), so that each sequence gets as many tokens in a micro-batch: then a twin
    // may come before the tokens that it should see.
    struct layout {
        uint32_t n_twin      = 0;
        uint32_t n_rotated = 0;
        bool     misplaced   = false;
    };
    layout layout_of(const llama_pcd_memory & memory, const llama_ubatch & ubatch) const;

    //
    // what they see
    //

    // find those of a micro-batch, which is in memory by now
    void place(const llama_pcd_memory & memory, const llama_ubatch & ubatch);

    // for each cache, of the cells up to the last used one those that placed twins see
    std::vector<llama_pcd_cell_range> visible(const llama_pcd_memory & memory) const;

    // fill the rows of the placed twins in a KQ mask of a cache
    void mask(const llama_pcd_memory & memory, size_t i_cache, ggml_tensor * dst) const;
};

// The states that recurrent layers keep for twins: room for them, a twin's own, and those of its tokens as they were before.
//
// A recurrent layer has one state for each sequence and cannot go back to an earlier one. So a twin starts from a copy of its
// parent's. Copying is a note that two sequences have the same state: numbers move only when one of them is evaluated.
struct llama_pcd_states {
    llama_pcd_states(const llama_pcd_memory & memory, const llama_pcd_twin_ids & ids) : memory(memory), ids(ids) {}

    int64_t n_bytes = 0; // of what was added

    // make room beside the context's own states, if there are any; called once; an exception if there is no memory
    void make();

    // a twin starts with the state that its parent had when it was saved, else with the one it has now
    void branch(llama_seq_id parent, llama_seq_id twin) const;

    // Keep the states of these sequences to go back to. Meanwhile there is room for one twin. More than ids.n_max are not kept: such
    // tokens are evaluated without twins, or one token, which all of these share, after its twin.
    void save(const std::vector<llama_seq_id> & seqs);
    void drop();

    bool restore() const; // false: none were saved

private:
    const llama_pcd_memory   & memory;
    const llama_pcd_twin_ids & ids;

    std::vector<llama_seq_id> saved; // the i-th one's state is kept by backup(i)

    llama_seq_id backup(size_t i) const { return ids.first + 1 + (llama_seq_id) i; }

    void copy(llama_seq_id from, llama_seq_id to) const;
};
