#!/usr/bin/env python3
"""Write a GGUF file of the Llama architecture with random weights, for timing: speed does not depend on their values.

python scripts/recipes/make_random_model.py random-1b.gguf             # 1.1B parameters, Q4_0, 620 MB
python scripts/recipes/make_random_model.py --shape 8b random-8b.gguf  # 8B parameters, Q4_0, 4.5 GB

Needs gguf, which the extra `test` has.
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
    parser.add_argument("out", help="the GGUF file to write")
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="size of the model (default %(default)s)")
    parser.add_argument("--type", choices=TYPES, default="q4_0", help="of the weights (default %(default)s)")
    args = parser.parse_args()

    n_layer, n_embd, n_head, n_head_kv, n_ff, n_vocab = SHAPES[args.shape]
    n_kv = n_head_kv * n_embd // n_head
    rng = np.random.default_rng(0)

    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_name(f"random {args.shape}")
    writer.add_block_count(n_layer)
    writer.add_context_length(131072)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_file_type(TYPES[args.type])
    _add_tokenizer(writer, n_vocab)

    # name: rows and columns of a matrix, None for a norm
    tensors: dict[str, tuple[int, int] | None] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output.weight": (n_vocab, n_embd),
        "output_norm.weight": None,
    }
    for i in range(n_layer):
        tensors[f"blk.{i}.attn_norm.weight"] = tensors[f"blk.{i}.ffn_norm.weight"] = None
        for name, rows, columns in (
            ("attn_q", n_embd, n_embd), ("attn_k", n_kv, n_embd), ("attn_v", n_kv, n_embd), ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_ff, n_embd), ("ffn_up", n_ff, n_embd), ("ffn_down", n_embd, n_ff),
        ):  # fmt: skip
            tensors[f"blk.{i}.{name}.weight"] = (rows, columns)

    # Names and shapes are written first, then each tensor as it is drawn: memory for one is enough.
    quantised = None if args.type == "f16" else gguf.GGMLQuantizationType[args.type.upper()]
    for name, matrix in tensors.items():
        if matrix is None:
            writer.add_tensor_info(name, (n_embd,), np.dtype(np.float32), 4 * n_embd)
        elif quantised is None:
            writer.add_tensor_info(name, matrix, np.dtype(np.float16), 2 * matrix[0] * matrix[1])
        else:
            shape = (matrix[0], matrix[1] // 32 * _BLOCK[args.type][0])
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), shape[0] * shape[1], raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for matrix in tensors.values():
        writer.write_tensor_data(np.ones(n_embd, np.float32) if matrix is None else _draw(rng, args.type, *matrix))
    writer.close()


_BLOCK = {"q4_0": (18, 4.6), "q8_0": (34, 74.0)}  # bytes of 32 weights, the spread of uniform random codes


def _draw(rng: np.random.Generator, kind: str, rows: int, columns: int) -> np.ndarray:
    """Weights of about 1 / sqrt(columns), in blocks of 32 behind an f16 scale if quantised."""
    scale = columns**-0.5
    if kind == "f16":
        return (rng.standard_normal((rows, columns), np.float32) * np.float32(scale)).astype(np.float16)
    n_bytes, spread = _BLOCK[kind]
    n = rows * columns // 32
    words = rng.integers(0, 2**64, n * n_bytes // 8 + 1, dtype=np.uint64)  # seven times as fast as drawing bytes
    blocks = words.view(np.uint8)[: n * n_bytes].reshape(n, n_bytes)
    scales = rng.uniform(0.5, 1.5, n) * scale / spread
    blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


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
