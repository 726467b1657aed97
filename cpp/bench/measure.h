// What is looked at, and not needed to decode: the graphs that are computed; and whether models use AMX.

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

} // namespace llama_pcd_cpu
