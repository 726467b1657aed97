// Writes tiny random models, one per architecture: arch_models DIR
//
// test-llama-archs writes most of them, but none of those it cannot read back, nor of those its metadata does not suit.
// Both are made here, with the metadata mended, and saved without its llama_model_saver; so are models of a single layer
// where scripts/recipes/arch_checks.py has no better way to know what turned keys give.

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "llama-model.h"

#include <cstdarg>

// What the tests say to llama.cpp's library "common", which is not built: nothing, but for errors. The rest of what they want of it
// is used by their own main alone, which the linker leaves out.
common_log * common_log_main() { return nullptr; }
void         common_log_flush(common_log * /*log*/) {}
int          common_log_get_verbosity_thold() { return LOG_LEVEL_ERROR; }
int          common_log_get_verbosity(ggml_log_level level) { return level == GGML_LOG_LEVEL_ERROR ? LOG_LEVEL_ERROR : LOG_LEVEL_DEBUG; }

void common_log_add(common_log * /*log*/, ggml_log_level /*level*/, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
}

static const size_t SEED  = 1;
static const float  STDEV = 0.3f; // so large that attention is far from uniform, and a wrong angle shows

struct variant {
    llm_arch     arch;
    const char * suffix  = "";
    uint32_t     n_layer = 0; // 0: as test-llama-archs has it
};

static const variant VARIANTS[] = {
    { LLM_ARCH_APERTUS },
    { LLM_ARCH_BAICHUAN, "-7b", 32 }, // of another depth, it does not rotate
    { LLM_ARCH_BITNET },
    { LLM_ARCH_DEEPSEEK2OCR },
    { LLM_ARCH_GEMMA3N },
    { LLM_ARCH_GEMMA4 },
    { LLM_ARCH_STEP35 },
    { LLM_ARCH_GLM4,          "-single", 1 },
    { LLM_ARCH_GLM4_MOE,      "-single", 1 },
    { LLM_ARCH_HUNYUAN_DENSE, "-single", 1 },
    { LLM_ARCH_HUNYUAN_MOE,   "-single", 1 },
    { LLM_ARCH_HUNYUAN_VL,    "-single", 1 },
    { LLM_ARCH_MAINCODER,     "-single", 1 },
    { LLM_ARCH_PADDLEOCR,     "-single", 1 },
    { LLM_ARCH_PANGU_EMBED,   "-single", 1 },
    { LLM_ARCH_QWEN2VL,       "-single", 1 },
    { LLM_ARCH_QWEN3TTS,      "-single", 1 },
    { LLM_ARCH_QWEN3VL,       "-single", 1 },
    { LLM_ARCH_QWEN3VLMOE,    "-single", 1 },
};

static void mend(const variant & v, gguf_context * meta) {
    llama_model_saver ms(v.arch, meta);

    if (v.n_layer > 0) {
        ms.add_kv(LLM_KV_BLOCK_COUNT, v.n_layer);
    }
    if (v.arch == LLM_ARCH_GEMMA4) { // the last two layers use the keys of others
        ms.add_kv(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, std::vector<uint32_t>({ 1, 1, 0, 1, 0 }));
        ms.add_kv(LLM_KV_ATTENTION_SHARED_KV_LAYERS, uint32_t(2));
    }
}

static void write(const variant & v, const std::string & dir) {
    const bool moe = moe_mandatory(v.arch) || v.arch == LLM_ARCH_DEEPSEEK2OCR;

    gguf_context_ptr meta = get_gguf_ctx(v.arch, moe);
    mend(v, meta.get());

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
    llama_log_set([](ggml_log_level level, const char * text, void * /*data*/) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);

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
