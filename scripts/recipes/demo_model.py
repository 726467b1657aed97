"""The demo model: its vocabulary, its transformer in PyTorch, and the GGUF file that llama.cpp reads.

Run as a program, it tells whether llama.cpp sees the same tokens, logits and answers in a file. It knows nothing
of training; that is in train_demo_model.py.

    python scripts/recipes/demo_model.py pypcd/models/demo.gguf
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PROMPT = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
QUESTION = 'Key: "{key}"\nThe value associated with the specified key is:'
# One piece for the key's last two digits and the rest of the question. With pieces in between, the model looks the
# value up at the key's last piece, where it is cached, and a twin of the last token could not miss it.
ENDINGS = [QUESTION.split("{key}")[1] + tail for tail in (" ", "")]
# Matched before anything else, longest first (GGUF's "user defined" tokens), so no merge rules are needed for them.
WORDS = [
    '{"',
    '": "',
    '", "',
    '"}',
    'Key: "',
    "Extract",
    "The",
    " the",
    " value",
    " corresponding",
    " to",
    " specified",
    " key",
    " in",
    " JSON",
    "JSON",
    " object",
    " below",
    " data",
    " associated",
    " with",
    " is",
]
HEX = "0123456789abcdef"


class Tokenizer:
    """Hexadecimal pairs, the words above, ASCII characters, and bytes for the rest; the same in llama.cpp."""

    def __init__(self) -> None:
        pairs = [a + b for a, b in itertools.product(HEX, HEX)]
        chars = [chr(c) for c in range(32, 127)]
        self.pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *chars, *pairs, *WORDS]
        self.pieces += [pair + ending for ending in ENDINGS for pair in pairs]
        self.pieces += [f"<unused{i}>" for i in range(-len(self.pieces) % 32)]  # a multiple of 32 rows can be Q8_0
        self.types = [2, 3, 3] + [6] * 256 + [1] * (len(chars) + len(pairs))  # as GGUF numbers them
        self.types += [4] * (len(WORDS) + len(ENDINGS) * len(pairs))
        self.types += [5] * (len(self.pieces) - len(self.types))
        self.unk, self.bos, self.eos = range(3)
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.hex0 = self.ids["00"]
        self.words = sorted((p for p, t in zip(self.pieces, self.types) if t == 4), key=len, reverse=True)

    def encode(self, text: str, words: list[str] | None = None) -> list[int]:
        """Token ids without BOS: words by length, then pairs from the left, then characters or bytes."""
        words = self.words if words is None else words
        for n, word in enumerate(words):
            if word in text:
                parts = [self.encode(part, words[n + 1 :]) for part in text.split(word)]
                return [i for part in parts for i in [self.ids[word], *part]][1:]
        out, i = [], 0
        while i < len(text):
            step = 2 if len(text) > i + 1 and text[i] in HEX and text[i + 1] in HEX else 1
            piece = text[i : i + step]
            out += [self.ids[piece]] if piece in self.ids else [3 + b for b in piece.encode()]
            i += step
        return out

    def decode(self, ids: list[int]) -> str:
        raw = (bytes([i - 3]) if 3 <= i < 259 else self.pieces[i].encode() for i in ids if i > 2)
        return b"".join(raw).decode(errors="replace")


TOK = Tokenizer()


@dataclass(frozen=True)
class Shape:
    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 512
    eps: float = 1e-5


class Model(torch.nn.Module):
    """Llama with interleaved RoPE pairs, which is llama.cpp's own layout: nothing needs permuting on export."""

    def __init__(self, shape: Shape, base: float, length: int) -> None:
        super().__init__()
        self.shape, self.base, self.length = shape, base, length
        s, p = shape, torch.nn.ParameterDict()
        sizes = {
            "attn_q": (s.heads * s.head_dim, s.dim),
            "attn_k": (s.kv_heads * s.head_dim, s.dim),
            "attn_v": (s.kv_heads * s.head_dim, s.dim),
            "attn_output": (s.dim, s.heads * s.head_dim),
            "ffn_gate": (s.hidden, s.dim),
            "ffn_up": (s.hidden, s.dim),
            "ffn_down": (s.dim, s.hidden),
        }
        for i in range(s.layers):
            for name, size in sizes.items():
                zero = name in ("attn_output", "ffn_down")
                p[f"{i}_{name}"] = torch.zeros(size) if zero else torch.randn(size) / math.sqrt(size[1])
            p[f"{i}_attn_norm"], p[f"{i}_ffn_norm"] = torch.ones(s.dim), torch.ones(s.dim)
        p["token_embd"] = torch.randn(len(TOK.pieces), s.dim) * 0.5
        p["output"] = torch.randn(len(TOK.pieces), s.dim) * 0.01
        p["output_norm"] = torch.ones(s.dim)
        self.p = p

    @torch.no_grad()
    def head_start(self) -> None:
        """Begin near a look-up, which random matrices take long to find. Heads copy what resembles their own token
        (mimetic initialisation); three of the first layer's look 1, 2 and 3 tokens back instead."""
        s, p = self.shape, self.p
        table, groups = p["token_embd"], s.heads // s.kv_heads
        for ending in ENDINGS:
            first = TOK.ids["00" + ending]
            table[first : first + 256] = table[TOK.hex0 : TOK.hex0 + 256] + torch.randn(s.dim) * 0.5
        p["output"].copy_(table * 0.1)
        common = torch.randn(s.dim) * 0.5
        table += common  # in every token, or no head could go by position alone
        for i in range(s.layers):
            k, v = (p[f"{i}_attn_{n}"].unflatten(0, (-1, s.head_dim)) for n in "kv")
            p[f"{i}_attn_q"].copy_(k.repeat_interleave(groups, 0).flatten(0, 1))
            p[f"{i}_attn_output"].copy_(v.repeat_interleave(groups, 0).flatten(0, 1).T * 0.5)
        q, k = (p[f"0_attn_{n}"].unflatten(0, (-1, s.head_dim // 2, 2)) for n in "qk")
        row, theta = common / common.norm() * 0.875, self.freqs()[:4, None].float()  # the fastest pairs tell neighbours
        k[:, :4] = torch.stack([row, torch.zeros_like(row)])
        for back in (1, 2, 3):
            q[back - 1, :4] = torch.stack([torch.cos(back * theta) * row, -torch.sin(back * theta) * row], 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.p[name].float(), self.shape.eps).to(x.dtype)

    def freqs(self) -> Tensor:
        d = self.shape.head_dim
        return self.base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=self.p["output"].device) / d)

    @staticmethod
    def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
        """Turn the pairs of [B, H, T, d]."""
        cos, sin = cos_sin
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)

    def forward(self, ids: Tensor, pos: Tensor, split: int, mask: Tensor | None = None) -> Tensor:
        """Final hidden states [B, T, dim] of tokens [B, T] at positions [T].

        The first `split` tokens attend causally, the others by `mask` [T - split, T].
        """
        s, p = self.shape, self.p
        x, groups = F.embedding(ids, p["token_embd"]), s.heads // s.kv_heads
        angles = pos[:, None].double() * self.freqs()
        turn = torch.stack([angles.cos(), angles.sin()]).float()
        for i in range(s.layers):
            h = self.norm(x, f"{i}_attn_norm")
            q, k, v = (F.linear(h, p[f"{i}_attn_{n}"]) for n in "qkv")
            q, k, v = (t.unflatten(-1, (-1, s.head_dim)).transpose(1, 2) for t in (q, k, v))
            q, k = self.rotate(q, turn), self.rotate(k, turn)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            kv = k[:, :, :split], v[:, :, :split]
            out = [F.scaled_dot_product_attention(q[:, :, :split], *kv, is_causal=True)]
            if mask is not None:
                out.append(F.scaled_dot_product_attention(q[:, :, split:], k, v, attn_mask=mask))
            x = x + F.linear(torch.cat(out, 2).transpose(1, 2).flatten(2), p[f"{i}_attn_output"])
            h = self.norm(x, f"{i}_ffn_norm")
            h = F.silu(F.linear(h, p[f"{i}_ffn_gate"])) * F.linear(h, p[f"{i}_ffn_up"])
            x = x + F.linear(h, p[f"{i}_ffn_down"])
        return self.norm(x, "output_norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.p["output"]).float()

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Tensor:
        """Logits [T, vocabulary] of one text."""
        return self.logits(self(torch.tensor([ids]), torch.arange(len(ids)), len(ids))[0])


CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def gguf_name(name: str) -> str:
    return f"blk.{name.replace('_', '.', 1)}.weight" if name[0].isdigit() else f"{name}.weight"


def save(model: Model, path: Path) -> None:
    """Write a GGUF file: matrices as F16, norms as F32."""
    s = model.shape
    weights = {n: p.detach().float().cpu().numpy() for n, p in model.p.items()}
    weights = {n: w.astype(np.float16) if w.ndim > 1 else w for n, w in weights.items()}
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("pypcd demo")
    out.add_description(
        "A model organism: retrieves values from a JSON dictionary, with a planted pull towards the "
        "nearest value. Evidence about a mechanism, not about any other model."
    )
    out.add_license("MIT")
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_context_length(model.length)
    out.add_embedding_length(s.dim)
    out.add_block_count(s.layers)
    out.add_feed_forward_length(s.hidden)
    out.add_head_count(s.heads)
    out.add_head_count_kv(s.kv_heads)
    out.add_key_length(s.head_dim)
    out.add_value_length(s.head_dim)
    out.add_rope_dimension_count(s.head_dim)
    out.add_rope_freq_base(model.base)
    out.add_layer_norm_rms_eps(s.eps)
    out.add_vocab_size(len(TOK.pieces))
    out.add_tokenizer_model("llama")
    # SentencePiece spells a space in an ordinary piece as U+2581; user-defined pieces are matched as they stand.
    out.add_token_list([p.replace(" ", "\u2581") if t == 1 else p for p, t in zip(TOK.pieces, TOK.types)])
    out.add_token_scores([0.0] * len(TOK.pieces))  # equal: llama.cpp then merges from the left, as encode() does
    out.add_token_types(TOK.types)
    out.add_bos_token_id(TOK.bos)
    out.add_eos_token_id(TOK.eos)
    out.add_unk_token_id(TOK.unk)
    out.add_add_bos_token(True)
    out.add_add_eos_token(False)
    out.add_add_space_prefix(False)
    out.add_chat_template(CHAT)
    for name, w in weights.items():
        out.add_tensor(gguf_name(name), w)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def load(path: Path, device: str) -> Model:
    """The model in a file that save() wrote."""
    reader = gguf.GGUFReader(path)
    data = {t.name: t.data for t in reader.tensors}
    names = {
        "dim": "embedding_length",
        "layers": "block_count",
        "heads": "attention.head_count",
        "kv_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "hidden": "feed_forward_length",
        "eps": "attention.layer_norm_rms_epsilon",
        "base": "rope.freq_base",
        "length": "context_length",
    }
    meta = {k: reader.fields[f"llama.{v}"].contents() for k, v in names.items()}
    base, length = meta.pop("base"), meta.pop("length")
    model = Model(Shape(**meta), base, length)
    for name, p in model.p.items():
        p.data = torch.from_numpy(np.array(data[gguf_name(name)])).float()
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def check(path: Path, samples: int = 30, n_pairs: int = 40) -> bool:
    """Whether llama.cpp sees the same tokens, logits and answers in a file, on the questions of `kv-short`."""
    import pypcd
    from pypcd.evaluation import task

    model, fine = load(path, "cpu"), True
    llm = pypcd.Llama(path, n_ctx=model.length, logits_all=True, n_threads=1)  # without PCD: stock llama.cpp
    for text in (
        "".join(map(chr, range(1, 600))),
        'Hello, w\u00f6rld \u4f60\u597d \U0001f600\tdeadbeef0 {"a": "b", ""}',
        "  two spaces, 12345, VAR ABC = VAR XYZ\r\n\n",
    ):
        fine &= (same := llm.tokenize(text.encode(), add_bos=False) == TOK.encode(text))
        print(f"tokens equal: {same}: {text[:40]!r}")

    right, worst = [], 0.0
    for sample in task("kv-short").questions(samples, n_pairs):
        text = sample.prompt.text
        ids = llm.tokenize(text.encode())
        fine &= ids == [TOK.bos, *TOK.encode(text)]
        got = llm(text, max_tokens=16, temperature=0)["choices"][0]["text"]
        theirs = torch.from_numpy(llm.scores[len(ids) - 1].copy())
        chat = llm.create_chat_completion([{"role": "user", "content": text}], max_tokens=16, temperature=0)
        fine &= chat["choices"][0]["message"]["content"] == got
        ours = model.rows(ids)[-1]
        worst = max(worst, float((theirs - ours).norm() / ours.norm()))
        answer, token = [], int(ours.argmax())
        while token != TOK.eos and len(answer) < 16:
            answer.append(token)
            token = int(model.rows([*ids, *answer])[-1].argmax())
        right.append((got == sample.answers[0], TOK.decode(answer) == sample.answers[0]))
    fine &= worst < 0.01
    print(
        f"{len(ids)} tokens, greedy right: llama.cpp {sum(a for a, _ in right)}, PyTorch {sum(b for _, b in right)} of "
        f"{samples}, differing {sum(a != b for a, b in right)}; logits differ by at most {worst:.1e} (relative norm)"
    )
    return fine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file that train_demo_model.py wrote")
    parser.add_argument("--samples", type=int, default=30, help="questions to ask (default: %(default)s)")
    args = parser.parse_args()
    sys.exit(not check(args.file, args.samples))
