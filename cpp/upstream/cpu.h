// The CPU beneath all models of a process: whether weights may be kept in the buffer type of ggml's AMX kernels, which some
// compilers break, and how long a step takes with a number of threads. Knows nothing of models, contexts or PCD.

#pragma once

#include "ggml-backend.h"

#include <cstdint>
#include <vector>

namespace llama_pcd_cpu {

// AMX is ggml's: compiled into it, and given by this CPU and system
bool has_amx();

// for all models that are loaded from now on; off at first, because broken kernels crash
void set_amx(bool on);

bool skips(ggml_backend_buffer_type_t buft);

// Microseconds that a chain of matrix products, [n_embd x n_embd] by [n_embd x n_tokens], takes with each of these numbers of
// threads: the mean of what fits into min_us, at least one, in turns.
std::vector<double> step_times(const std::vector<int32_t> & n_threads, int64_t n_embd, int64_t n_tokens, int64_t min_us);

} // namespace llama_pcd_cpu
