// Writes tiny random models, one per architecture: arch_models DIR
//
// test-llama-archs writes most of them, but none of those it cannot read back, nor of those its metadata does not suit.
// Both are made here, with the metadata mended, and saved without its llama_model_saver.

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "llama-model.h"

static const size_t SEED  = 1;
static const float  STDEV = 0.3f; // so large that attention is far from uniform, and a wrong angle shows

struct variant {
    llm_arch     arch;
    const char * suffix;
};

static const variant VARIANTS[] = {
    { LLM_ARCH_APERTUS,      "" },
    { LLM_ARCH_BAICHUAN,     "-7b" }, // of another depth, it does not rotate
    { LLM_ARCH_BITNET,       "" },
    { LLM_ARCH_DEEPSEEK2OCR, "" },
    { LLM_ARCH_GEMMA3N,      "" },
    { LLM_ARCH_GEMMA4,       "" },
    { LLM_ARCH_STEP35,       "" },
};

static void mend(llm_arch arch, gguf_context * meta) {
    llama_model_saver ms(arch, meta);

    switch (arch) {
        case LLM_ARCH_BAICHUAN:
            ms.add_kv(LLM_KV_BLOCK_COUNT, uint32_t(32));
            break;
        case LLM_ARCH_GEMMA4: // the last two layers use the keys of others
            ms.add_kv(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, std::vector<uint32_t>({ 1, 1, 0, 1, 0 }));
            ms.add_kv(LLM_KV_ATTENTION_SHARED_KV_LAYERS, uint32_t(2));
            break;
        default:
            break;
    }
}

static void write(const variant & v, const std::string & dir) {
    const bool moe = moe_mandatory(v.arch) || v.arch == LLM_ARCH_DEEPSEEK2OCR;

    gguf_context_ptr meta = get_gguf_ctx(v.arch, moe);
    mend(v.arch, meta.get());

    const auto model_and_ctx = get_model_and_ctx(meta.get(), nullptr, SEED, STDEV, {});

    gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), meta.get());
    for (const auto & [name, t] : model_and_ctx.first->tensors_by_name) {
        if (gguf_find_tensor(out.get(), name.c_str()) < 0) { // an output matrix may be the embedding
            gguf_add_tensor(out.get(), t);
        }
    }

    const std::string path = dir + "/" + llm_arch_name(v.arch) + v.suffix + (moe ? "-moe.gguf" : "-dense.gguf");
    if (!gguf_write_to_file(out.get(), path.c_str(), false)) {
        throw std::runtime_error("cannot write " + path);
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s DIR\n", argv[0]);
        return 1;
    }
    common_log_set_verbosity_thold(LOG_LEVEL_ERROR);
    common_init();

    const std::string dir = argv[1];
    try {
        save_models("", SEED, STDEV, LOG_LEVEL_ERROR, dir);
        for (const variant & v : VARIANTS) {
            write(v, dir);
        }
    } catch (const std::exception & e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
    return 0;
}
