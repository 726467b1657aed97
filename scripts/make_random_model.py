#!/usr/bin/env python3
"""Write a random Llama-architecture GGUF, for timing: speed does not depend on what weights say.

python scripts/make_random_model.py random-1b.gguf             # 1.1B parameters, Q4_0, 620 MB
python scripts/make_random_model.py --shape 8b random-8b.gguf  # 8B parameters, Q4_0, 4.5 GB
python scripts/make_random_model.py --sure sure-1b.gguf        # nearly all probability on one token
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

# layers, embedding, heads, KV heads, feed-forward, vocabulary
SHAPES = {"1b": (22, 2048, 32, 4, 5632, 32000), "8b": (32, 4096, 32, 8, 14336, 128256)}

TYPES = {
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--type", choices=TYPES, default="q4_0", help="of the weights (default %(default)s)")
    parser.add_argument(
        "--sure", action="store_true", help="spread the logits until one token holds nearly all probability"
    )
    parser.add_argument(
        "--n-ctx", type=int, default=131072, help="context length in the metadata (default %(default)s)"
    )
    args = parser.parse_args()

    n_layer, n_embd, n_head, n_head_kv, n_ff, n_vocab = SHAPES[args.shape]
    n_kv = n_head_kv * n_embd // n_head
    rng = np.random.default_rng(0)

    writer = gguf.GGUFWriter(args.out, "llama", use_temp_file=True)
    writer.add_name(f"random {args.shape}")
    writer.add_block_count(n_layer)
    writer.add_context_length(args.n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_file_type(TYPES[args.type])
    _add_tokenizer(writer, n_vocab)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        """Weights of about scale / sqrt(columns), in blocks of 32 behind an f16 scale where quantised."""
        if args.type == "f16":
            writer.add_tensor(
                name,
                (rng.standard_normal((rows, columns), np.float32) * np.float32(scale / columns**0.5)).astype(
                    np.float16
                ),
            )
            return
        n_bytes, spread = {"q4_0": (16, 4.6), "q8_0": (32, 74.0)}[args.type]  # the spread of uniform random codes
        blocks = np.empty((rows * columns // 32, 2 + n_bytes), np.uint8)
        scales = rng.uniform(0.5, 1.5, len(blocks)) * scale / (spread * columns**0.5)
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
        blocks[:, 2:] = rng.integers(0, 256, (len(blocks), n_bytes), dtype=np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[args.type.upper()])

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(n_embd, np.float32))

    matrix("token_embd.weight", n_vocab, n_embd)
    matrix("output.weight", n_vocab, n_embd, scale=100.0 if args.sure else 1.0)
    norm("output_norm.weight")
    for i in range(n_layer):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name, rows, columns in (
            ("attn_q", n_embd, n_embd), ("attn_k", n_kv, n_embd), ("attn_v", n_kv, n_embd), ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_ff, n_embd), ("ffn_up", n_ff, n_embd), ("ffn_down", n_embd, n_ff),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}.weight", rows, columns)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    pieces += [f"t{i}" for i in range(n_vocab - len(pieces))]
    types += [gguf.TokenType.NORMAL] * (n_vocab - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    main()
