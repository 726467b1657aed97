// What is measured, and not needed to decode: the graphs that are computed, and a cache that is filled without evaluating anything.

#pragma once

#include "llama-pcd-bench.h"
#include "upstream/memory.h"

// see llama_pcd_get_graph_stats
llama_pcd_graph_stats llama_pcd_stats_of(const llama_pcd & pcd);

// a graph was computed: tell the one who watches, if there is one; before another graph is laid out in this scheduler
void llama_pcd_graph_computed(const llama_pcd & pcd, ggml_backend_sched_t sched, ggml_cgraph * gf);

// give sequence 0 the cells of positions 0 .. n-1 in empty memory, if that is possible; returns how many it has then
bool    llama_pcd_can_fill(const llama_pcd_memory & memory, int32_t n);
int32_t llama_pcd_fill    (const llama_pcd_memory & memory, int32_t n);
