// What is measured, and not needed to decode: the graphs that are computed, and how long a step takes with a number of
// threads.

#pragma once

#include "llama-pcd-extras.h"
#include "upstream/memory.h"

#include "ggml-backend.h"

#include <cstdint>
#include <vector>

// a graph was computed: tell the one who watches, if there is one; before another graph is laid out in this scheduler
void llama_pcd_graph_computed(const llama_pcd & pcd, ggml_backend_sched_t sched, ggml_cgraph * gf);

namespace llama_pcd_cpu {

// whether models use AMX, for all that are loaded from now on; off at first, because broken kernels crash
void set_amx(bool on);

bool skips(ggml_backend_buffer_type_t buft);

// Microseconds that a chain of matrix products, [n_embd x n_embd] by [n_embd x n_tokens], takes with each of these numbers of
// threads: the mean of what fits into min_us, at least one, in turns.
std::vector<double> step_times(const std::vector<int32_t> & n_threads, int64_t n_embd, int64_t n_tokens, int64_t min_us);

} // namespace llama_pcd_cpu
