// What a model and a context can run. Changes nothing, but remembers what only a graph shows.

#pragma once

#include "upstream/memory.h"
#include "twins/settings.h"

#include <string>

struct llama_pcd_limits {
    llama_pcd_limits(const llama_pcd_memory & memory, const llama_pcd_seq_table & sequences) :
        memory(memory), sequences(sequences) {}

    // what only a graph shows
    bool has_graph        = false; // one was built, so the rest is known
    bool has_rotations    = false; // some layer rotates
    bool offsets_pairs    = false; // a rotation does not start at the first dimension of its tensor
    bool has_weighed_keys = false; // see llama_pcd_rotation::weighed
    bool hides_rotation   = false; // a query or a key is rotated where we do not see it, so that its twin's would not be

    std::vector<const ggml_tensor *> seen; // while a graph is probed: its rotations, as the model built them

    // whether p can run, and with it what sequences have of their own
    int32_t check(const llama_pcd_params & p, std::string & err) const;

    // why no context, and no sequence, has keys as p asks for them, in a sentence; empty: they can be had
    static std::string check_cache(const llama_pcd_params & p);

    // what the context is set to that twins cannot be evaluated with; empty: nothing. Changes between decodes.
    std::string conflict() const;

    // the same for one sequence
    std::string conflict_of(llama_seq_id seq_id) const;

private:
    const llama_pcd_memory    & memory;
    const llama_pcd_seq_table & sequences;

    std::string check_memory(const llama_pcd_params & p) const;
    std::string check_model (const llama_pcd_params & p) const;
};
