// What every part does with its context: build its graphs anew, decode as llama.cpp would. Knows nothing of the parts.

#include "llama-pcd-impl.h"

void llama_pcd::reset_graphs() {
    lctx.gf_res_prev_active = nullptr;
    generation++;
}

void llama_pcd::reserve_now(const std::function<void()> & undo) {
    try {
        reserve_later();
        lctx.sched_reserve();
    } catch (...) {
        undo();
        throw;
    }
}

int llama_pcd::decode_plain(const llama_batch_ext & batch) {
    struct guard {
        explicit guard(bool & flag) : flag(flag) { flag = true; }
        ~guard() { flag = false; }

        bool & flag;
    } const inside(nested);

    const section theirs(*this, false);

    return lctx.decode(batch);
}

ggml_tensor * llama_pcd::keys_of(const llama_kv_cache & kv, int32_t il) {
    const auto it = kv.map_layer_ids.find(il);
    return it == kv.map_layer_ids.end() ? nullptr : kv.layers[it->second].k;
}
