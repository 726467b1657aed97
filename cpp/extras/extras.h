// The tap: tensors of an evaluation are handed over by their names, through the scheduler's callback. Attention weights exist as tensors
// only without flash attention, so it is off while a tap is on. Knows nothing of twins, nor of what is read for what.

#pragma once

#include "llama-pcd-extras.h"
#include "llama-pcd-impl.h"
#include "upstream/memory.h"

#include <string>
#include <vector>

struct llama_pcd_tap {
    llama_pcd_tap(llama_pcd & pcd, const llama_pcd_memory & memory) : pcd(pcd), memory(memory) {}

    // see llama_pcd_set_tap; no prefixes: off
    int32_t set(const std::vector<std::string> & prefixes, llama_pcd_tap_callback callback, void * user_data, std::string & err);

    // see llama_pcd_set_eval_callback; null: off
    int32_t watch(ggml_backend_sched_eval_callback callback, void * user_data, std::string & err);

private:
    llama_pcd & pcd;

    const llama_pcd_memory & memory;

    std::vector<std::string> prefixes; // of the names; empty: off

    llama_pcd_tap_callback callback  = nullptr;
    void *                 user_data = nullptr;

    ggml_backend_sched_eval_callback watching = nullptr; // the callback of watch()

    bool flash_attn = false; // as it was before the tap was set

    int32_t check(const std::vector<std::string> & prefixes, llama_pcd_tap_callback callback, std::string & err) const;

    // why flash attention cannot be turned off; empty: it can
    std::string needs_flash_attn() const;

    bool wants(const char * name) const;

    // the scheduler's callback; user_data is the tap
    static bool on_eval(ggml_tensor * t, bool ask, void * user_data);
};
