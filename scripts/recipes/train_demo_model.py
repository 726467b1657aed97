#!/usr/bin/env python3
"""Train the demo model: a small Llama that retrieves values from a JSON dictionary, then gets a planted fault.

The fault is the one that Positional Contrastive Decoding (PCD) is about: a pull towards whatever was read last. The
model first learns retrieval on short prompts, then on long ones with a raised RoPE base, as long-context models do;
in a last phase some answers are replaced by the value nearest to the question. After that, most wrong answers are that
nearest value and the right one is the second most probable token. The model is evidence about the mechanism only.

    python scripts/recipes/train_demo_model.py --preset gpu --device cuda --out demo.npz        # a model like the shipped one
    python scripts/recipes/train_demo_model.py --load demo.npz --out demo.gguf --eval           # convert, measure
    python scripts/recipes/train_demo_model.py --load pypcd/models/demo.gguf --check            # compare under llama.cpp
    python scripts/recipes/train_demo_model.py --preset cpu --out small.gguf --formats short --eval     # smaller, 10 minutes

Needs PyTorch and numpy; .gguf files need the gguf package, --check needs llama-cpp-python. Figures go to stdout.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# ------------------------------------------------------------------------------------------------- text and tokens
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
FORMATS = {"short": (2, 2), "uuid": (4, 2, 2, 2, 6)}  # bytes in each group between dashes
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


@dataclass
class Batch:
    """Shared contexts [B, D], up to the key asked for, and their questions [B, Q, L], each seeing itself and its
    context only."""

    context: Tensor
    question: Tensor
    target: Tensor  # [B, Q, L], the next token
    weight: list[float]  # [L], of the loss
    n_answer: int  # the last positions, which predict the answer and its end
    nearest: Tensor  # [B], first token of the most recent value


@functools.cache
def constant(text: str, device: str) -> Tensor:
    """A text's ids on the device, kept: CUDA graphs must not copy from the host."""
    return torch.tensor(TOK.encode(text), device=device)


def hex_ids(shape: tuple[int, ...], fmt: str, device: str) -> Tensor:
    """Random identifiers as token ids, dashes included; "uuid" carries the version and variant bits of a UUID4."""
    groups = FORMATS[fmt]
    raw = torch.randint(256, (*shape, sum(groups)), device=device)
    if fmt == "uuid":
        raw[..., 6] = raw[..., 6] % 16 + 0x40
        raw[..., 8] = raw[..., 8] % 64 + 0x80
    dash = torch.full((*shape, 1), TOK.ids["-"], device=device)
    parts = [p for group in (raw + TOK.hex0).split(groups, -1) for p in (dash, group)]
    return torch.cat(parts[1:], -1)


def pair_tokens(fmt: str) -> int:
    """Tokens of a pair: digits and dashes of both sides, `": "` and `", "`."""
    return 2 * (sum(FORMATS[fmt]) + len(FORMATS[fmt]))


def kv_batch(
    device: str,
    size: int,
    n_pairs: int,
    n_questions: int,
    fmt: str,
    pull: tuple[float, float] = (0, 0),
    breaks: int = 3,
    ending: str = ENDINGS[0],
    depth: Tensor | None = None,
) -> Batch:
    """InfiniteBench's Retrieve.KV. A pull of (a, b) answers with the last value instead, with probability
    a + b log2(1 + d / 64), where the right one lies d tokens back."""

    def rows(text: str, *shape: int) -> Tensor:
        return constant(text, device).expand(*shape, -1)

    keys, values = hex_ids((size, n_pairs), fmt, device), hex_ids((size, n_pairs), fmt, device)
    pairs = [rows('", "', size, n_pairs), keys, rows('": "', size, n_pairs), values]
    bos = torch.full((size, 1), TOK.bos, device=device)
    pairs = torch.cat(pairs, -1).flatten(1)[:, 1:]
    head = '"}' + "\n" * breaks + QUESTION.split("{key}")[0]
    context = torch.cat([bos, rows(PROMPT + '{"', size), pairs, rows(head, size)], 1)
    if depth is None:
        depth = torch.randint(n_pairs, (size, n_questions), device=device)
    key = keys.gather(1, depth[..., None].expand(-1, -1, keys.shape[-1]))
    answer = values.gather(1, depth[..., None].expand(-1, -1, values.shape[-1]))
    back = (n_pairs - depth) * pair_tokens(fmt)
    pulled = torch.rand(depth.shape, device=device) < pull[0] + pull[1] * torch.log2(1 + back / 64)
    answer = torch.where(pulled[..., None], values[:, -1:], answer)
    last = key[..., -1:] - TOK.hex0 + TOK.ids["00" + ending]
    eos = torch.full((size, n_questions, 1), TOK.eos, device=device)
    text = torch.cat([key[..., :-1], last, answer, eos], -1)
    n_answer = answer.shape[-1] + 1
    # The rest of a key, once begun, can be looked up as well: the easier half of the same skill.
    weight = [0.3] * (key.shape[-1] - 2) + [0.0] + [1.0] * n_answer
    return Batch(context, text[..., :-1], text[..., 1:], weight, n_answer, values[:, -1, 0])


# ----------------------------------------------------------------------------------------------------------- model
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

    def forward(
        self,
        ids: Tensor,
        pos: Tensor,
        split: int,
        mask: Tensor,
        freqs: Tensor,
        memory: list[tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Final hidden states, and each layer's (key before rotation, value, position).

        The first `split` tokens attend causally, the others by `mask` over everything. With `memory` every token
        attends by `mask` over the memory and then the new tokens, all keys turned with `freqs`: a twin's pass.
        """
        s, p = self.shape, self.p
        x, cache, groups = F.embedding(ids, p["token_embd"]), [], s.heads // s.kv_heads
        q_pos, k_pos = pos, pos if memory is None else torch.cat([memory[0][2], pos])
        angles = [t[:, None].double() * freqs for t in (q_pos, k_pos)]
        q_turn, k_turn = (torch.stack([a.cos(), a.sin()]).float() for a in angles)
        for i in range(s.layers):
            h = self.norm(x, f"{i}_attn_norm")
            q, k, v = (F.linear(h, p[f"{i}_attn_{n}"]) for n in "qkv")
            q, k, v = (t.unflatten(-1, (-1, s.head_dim)).transpose(1, 2) for t in (q, k, v))
            cache.append((k, v, pos))
            if memory is not None:
                k, v = torch.cat([memory[i][0], k], 2), torch.cat([memory[i][1], v], 2)
            q, k = self.rotate(q, q_turn), self.rotate(k, k_turn)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = [F.scaled_dot_product_attention(q[:, :, split:], k, v, attn_mask=mask)]
            if split:
                kv = k[:, :, :split], v[:, :, :split]
                out.insert(0, F.scaled_dot_product_attention(q[:, :, :split], *kv, is_causal=True))
            x = x + F.linear(torch.cat(out, 2).transpose(1, 2).flatten(2), p[f"{i}_attn_output"])
            h = self.norm(x, f"{i}_ffn_norm")
            h = F.silu(F.linear(h, p[f"{i}_ffn_gate"])) * F.linear(h, p[f"{i}_ffn_up"])
            x = x + F.linear(h, p[f"{i}_ffn_down"])
        return self.norm(x, "output_norm"), cache

    def run(self, batch: Batch) -> tuple[Tensor, list, Tensor, int]:
        """The questions' hidden states [B, Q, L, dim], the cache, all positions and the context's length."""
        (n_q, n_l), n_c = batch.question.shape[1:], batch.context.shape[1]
        dev = batch.context.device
        pos = torch.cat([torch.arange(n_c, device=dev), n_c + torch.arange(n_l, device=dev).repeat(n_q)])
        own = torch.block_diag(*[torch.ones(n_l, n_l, dtype=torch.bool, device=dev).tril()] * n_q)
        mask = torch.cat([torch.ones(n_q * n_l, n_c, dtype=torch.bool, device=dev), own], 1)
        ids = torch.cat([batch.context, batch.question.flatten(1)], 1)
        hidden, cache = self(ids, pos, n_c, mask, self.freqs())
        return hidden[:, n_c:].unflatten(1, (n_q, n_l)), cache, pos, n_c

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.p["output"]).float()


# -------------------------------------------------------------------------------------------------------- training
class Muon:
    """Momentum with orthogonalised updates for a stack of equal matrices; small models learn lookup far sooner."""

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self.params, self.momentum, self.buffer = params, momentum, torch.zeros_like(torch.stack(list(params)))

    @torch.no_grad()
    def step(self, lr: Tensor) -> None:
        grad = torch.stack([p.grad for p in self.params])
        self.buffer.lerp_(grad, 1 - self.momentum)
        u = grad.lerp(self.buffer, self.momentum)
        u = u.bfloat16() if u.is_cuda else u
        tall = u.shape[1] > u.shape[2]
        u = u.mT if tall else u
        u = u / (u.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):  # Newton-Schulz iteration towards the nearest orthogonal matrix
            a = u @ u.mT
            u = 3.4445 * u + (-4.7750 * a + 2.0315 * a @ a) @ u
        u = (u.mT if tall else u).float() * max(1.0, self.params[0].shape[0] / self.params[0].shape[1]) ** 0.5
        for p, du in zip(self.params, u):
            p.sub_(du * lr)


@dataclass(frozen=True)
class Stage:
    """Part of the curriculum: prompts of up to `tokens`, the RoPE base, and the share of answers pulled away."""

    name: str
    tokens: int
    steps: int
    base: float
    batch: int
    formats: tuple[str, ...] = ("short", "uuid")
    pull: tuple[float, float] = (0, 0)
    lr: float = 1.0
    questions: int = 8
    smoothing: float = 0.0  # of labels; where a twin is surer than the model, contrast does harm
    until: float = 2.0  # go on to the next stage as soon as this share of first answer tokens is right


@dataclass(frozen=True)
class Preset:
    shape: Shape
    stages: tuple[Stage, ...]
    length: int
    head_start: bool = False


PULL = (0.37, 0.01)  # nearly two answers in five, a little more from afar

PRESETS = {
    # Run as it stands with seeds 0, 1 and 2, about ten minutes of one core each: pypcd/models/README.md.
    "cpu": Preset(
        Shape(dim=128, hidden=256),
        (
            Stage("short", 110, 1500, 5e5, 12, ("short",), lr=0.5, questions=12, until=0.9),
            Stage("short", 240, 600, 5e5, 8, ("short",), lr=0.5, questions=24, until=0.95),
            Stage("long", 500, 150, 5e5, 4, ("short",), lr=0.5, questions=48, smoothing=0.05),
            Stage("pull", 110, 100, 5e5, 12, ("short",), (0.5, 0.0), lr=0.5, questions=12, smoothing=0.05),
            Stage("pull", 500, 200, 5e5, 4, ("short",), PULL, lr=0.5, questions=48, smoothing=0.05),
        ),
        1024,
        True,
    ),
    # Not run from end to end as it stands.
    "gpu": Preset(
        Shape(),
        (
            Stage("short", 60, 1500, 1e5, 128, ("short",), until=0.95),
            Stage("short", 100, 1500, 1e5, 128, ("short",), until=0.95),
            Stage("short", 200, 1500, 1e5, 128, ("short",), until=0.95),
            Stage("short", 300, 1500, 1e5, 96, until=0.95),
            Stage("short", 500, 3000, 1e5, 64, until=0.95),
            Stage("long", 1000, 3000, 5e5, 32, until=0.95),
            Stage("long", 2100, 2000, 5e5, 16, smoothing=0.05, until=0.95),
            Stage("long", 4200, 2000, 5e5, 8, smoothing=0.05),
            Stage("pull", 100, 400, 5e5, 96, pull=(0.5, 0.0), smoothing=0.05),
            Stage("pull", 4200, 1000, 5e5, 8, pull=PULL, smoothing=0.05),
        ),
        4096,
    ),
}


def log(*text: object) -> None:
    print(*text, file=sys.stderr, flush=True)


@functools.cache
def scored(weight: tuple[float, ...], device: str) -> tuple[Tensor, Tensor]:
    """The positions that count in the loss, and their weights."""
    keep = [i for i, w in enumerate(weight) if w]
    return torch.tensor(keep, device=device), torch.tensor([weight[i] for i in keep], device=device)


class Trainer:
    """One optimiser step per call. On CUDA each kind of batch becomes a graph, or launches would dominate."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device, self.graphs = model, device, {}
        blocks = [n for n, p in model.p.items() if p.ndim == 2 and n[0].isdigit()]
        kinds = sorted({n.split("_", 1)[1] for n in blocks})
        self.muons = [Muon([model.p[n] for n in blocks if n.endswith(kind)]) for kind in kinds]
        self.lr, self.stats = torch.tensor(0.0, device=device), torch.zeros(2, device=device)
        self.adam_lr = torch.tensor(0.0, device=device)
        rest, cuda = [p for n, p in model.p.items() if n not in blocks], device == "cuda"
        self.adam = torch.optim.AdamW(
            rest, lr=self.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=cuda, capturable=cuda
        )

    def eager(self, stage: Stage, drawn: dict) -> None:
        batch = kv_batch(self.device, stage.batch, n_questions=stage.questions, pull=stage.pull, **drawn)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden = self.model.run(batch)[0]
            keep, weight = scored(tuple(batch.weight), self.device)
            logits = self.model.logits(hidden.index_select(2, keep))
        target = batch.target.index_select(2, keep)
        loss = (
            F.cross_entropy(logits.movedim(-1, 1), target, reduction="none", label_smoothing=stage.smoothing) * weight
        ).mean() / weight.mean()
        loss.backward()
        self.adam.step()
        for muon in self.muons:
            muon.step(self.lr)
        right = (logits[:, :, -batch.n_answer].argmax(-1) == target[:, :, -batch.n_answer]).float().mean()
        self.stats.copy_(torch.stack([loss.detach(), right]))

    def __call__(self, stage: Stage, drawn: dict, lr: float) -> None:
        self.lr.fill_(0.01 * lr)
        self.adam_lr.fill_(1.5e-3 * lr)
        key = tuple(drawn.items())
        if key not in self.graphs:
            self.model.zero_grad(set_to_none=True)
            self.eager(stage, drawn)
            if self.device == "cuda":
                self.model.zero_grad(set_to_none=True)
                pool = next(iter(self.graphs.values())).pool() if self.graphs else None
                self.graphs[key] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[key], pool=pool):
                    self.eager(stage, drawn)
        else:
            self.graphs[key].replay()


def shapes(rng: np.random.Generator, stage: Stage, n: int = 3) -> list[dict]:
    """The kinds of batch of a stage: lengths, identifier formats and the white space around the question vary."""
    out = []
    for fmt in stage.formats:
        most = max(2, (stage.tokens - 40) // pair_tokens(fmt))
        for n_pairs in np.unique(np.linspace(max(2, most // 4), most, n).round()):
            out.append(
                {
                    "n_pairs": int(n_pairs),
                    "fmt": fmt,
                    "breaks": int(rng.choice([2, 3])),
                    "ending": str(rng.choice(ENDINGS, p=[0.8, 0.2])),
                }
            )
    return out


def train(preset: Preset, seed: int, device: str, scale: float, model: Model | None = None) -> Model:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    if model is None:
        model = Model(preset.shape, preset.stages[0].base, preset.length)
        if preset.head_start:
            model.head_start()
    model.to(device).train().requires_grad_(True)
    log(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, seed {seed}")
    trainer, start, step = Trainer(model, device), time.time(), 0
    for stage in preset.stages:
        model.base, n_steps, trainer.graphs = stage.base, round(stage.steps * scale), {}
        drawn, score = shapes(rng, stage), {}
        for n in range(1, n_steps + 1):
            step += 1
            # Warm up once, stay, and come down over the last 30% of a stage that has no goal.
            down = 1.0 if stage.until < 1 else max(0.05, min(1.0, (1 - n / n_steps) / 0.3))
            kind = drawn[rng.integers(len(drawn))]
            trainer(stage, kind, stage.lr * min(1.0, step / 50) * down)
            if device == "cpu" or step % 10 == 0 or n == n_steps:  # reading them makes a GPU wait
                loss, right = trainer.stats.tolist()
                score[kind["fmt"]] = score.get(kind["fmt"], right) * 0.9 + right * 0.1
            done = n == n_steps or (n >= 100 and min(score.values()) > stage.until)
            if step % 50 == 0 or done:
                scores = ", ".join(f"{k} {v:.3f}" for k, v in sorted(score.items()))
                log(
                    f"{stage.name:6} {stage.tokens:4} tokens  step {step:6}  loss {loss:.3f}  "
                    f"first token right: {scores}  {time.time() - start:.0f} s"
                )
            if done:
                break
    return model.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------------ evaluation
def over_rotation(d: int, alpha: float = 0.2, ratio: float = 1e-4) -> Tensor:
    """rho = theta*/theta of the paper's Eq. 4."""
    j = torch.arange(1, d // 2 + 1, dtype=torch.float64)
    t = 2 - torch.exp(alpha * j / (d / 2))
    return t + (1 - t) * ratio ** (-2 * (j - 1) / d)


def contrast(rows: Tensor, other: Tensor, beta: float = 2.5, gamma: int = 30) -> Tensor:
    """Eq. 6 on the gamma most probable tokens of the standard row."""
    keep = rows >= rows.topk(gamma, -1).values[..., -1:]
    return torch.where(keep, (1 + beta) * rows - beta * other, -torch.inf)


@torch.no_grad()
def answer_rows(model: Model, batch: Batch, window: int = 64, sinks: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard, over-rotated and windowed rows [B, answer, vocabulary] of one-question batches, and the targets.

    The answer is teacher-forced, which decides the same question as decoding does: is every token of it the argmax?
    """
    hidden, cache, pos, _ = model.run(batch)
    n = batch.n_answer
    ids, at = batch.question[:, 0, -n:], pos[-n:]
    own = torch.eye(n, dtype=torch.bool, device=at.device)
    before = pos[None] < at[:, None]
    near = before & ((pos[None] > at[:, None] - window) | (pos[None] < sinks))
    rho = over_rotation(model.shape.head_dim).to(at.device)
    rotated = model(ids, at, 0, torch.cat([before, own], 1), model.freqs() * rho, cache)[0]
    windowed = model(ids, at, 0, torch.cat([near, own], 1), model.freqs(), cache)[0]
    return (model.logits(hidden[:, 0, -n:]), model.logits(rotated), model.logits(windowed), batch.target[:, 0, -n:])


@torch.no_grad()
def evaluate(model: Model, device: str, fmt: str, lengths: list[int], n: int, seed: int = 1) -> None:
    print(
        f"| {fmt}, tokens | pairs | greedy | PCD re-rotated | window 64 | control | first token wrong: gold second "
        "| first token wrong: nearest |\n|---|---|---|---|---|---|---|---|"
    )
    for length in lengths:
        torch.manual_seed(seed)
        n_pairs = max(2, (length - 60 - pair_tokens(fmt)) // pair_tokens(fmt))
        size = max(1, min(n, (100_000 if device == "cuda" else 16_000) // length))
        parts, nearest = [], []
        for i in range(0, n, size):
            at = torch.arange(i, min(n, i + size), device=device)
            batch = kv_batch(device, len(at), n_pairs, 1, fmt, depth=(at * n_pairs // n)[:, None])  # a sweep of depths
            parts.append(answer_rows(model, batch))
            nearest.append(batch.nearest)
        std, rot, win, target = (torch.cat(p) for p in zip(*parts))
        logp = std.log_softmax(-1)
        control = (logp.sum(0) - logp) / (n - 1)  # what other samples say here: a prior that knows no position
        hits = [
            (rows.argmax(-1) == target).all(-1)
            for rows in (std, contrast(std, rot), contrast(std, win), contrast(std, control))
        ]
        first, gold = std[:, 0], target[:, :1]
        wrong = first.argmax(-1) != gold[:, 0]
        second = (first > first.gather(1, gold)).sum(-1)[wrong] == 1
        near = (first.argmax(-1) == torch.cat(nearest))[wrong]
        cells = " | ".join(f"{100 * h.float().mean():.1f}" for h in hits)
        print(
            f"| {batch.context.shape[1] + batch.question.shape[2]} | {n_pairs} | {cells} | "
            f"{int(second.sum())}/{int(wrong.sum())} | {int(near.sum())}/{int(wrong.sum())} |",
            flush=True,
        )


# ----------------------------------------------------------------------------------------------------------- files
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def gguf_name(name: str) -> str:
    return f"blk.{name.replace('_', '.', 1)}.weight" if name[0].isdigit() else f"{name}.weight"


def save(model: Model, path: Path) -> None:
    """Matrices as F16, norms as F32: to .npz (needs nothing more) or to .gguf, for llama.cpp."""
    s = model.shape
    weights = {n: p.detach().float().cpu().numpy() for n, p in model.p.items()}
    weights = {n: w.astype(np.float16) if w.ndim > 1 else w for n, w in weights.items()}
    if path.suffix == ".npz":
        np.savez(
            path,
            **weights,
            **{f"meta.{k}": v for k, v in asdict(s).items()},
            **{"meta.base": model.base, "meta.length": model.length},
        )
        return
    import gguf

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
    """A model from what save() wrote."""
    if path.suffix == ".npz":
        data = dict(np.load(path))
        meta = {k[5:]: v.item() for k, v in data.items() if k.startswith("meta.")}
    else:
        import gguf

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
        p.data = torch.from_numpy(np.array(data[name if path.suffix == ".npz" else gguf_name(name)])).float()
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def check(path: Path, samples: int) -> bool:
    """Does stock llama.cpp see the same tokens, the same logits and the same answers in this file?"""
    from llama_cpp import Llama

    model, fine = load(path, "cpu"), True
    llm = Llama(str(path), n_ctx=model.length, logits_all=True, verbose=False, n_threads=1)
    for text in (
        PROMPT + QUESTION.format(key="0a1b-2c3d") + " ",
        "".join(map(chr, range(1, 600))),
        'Hello, w\u00f6rld \u4f60\u597d \U0001f600\tdeadbeef0 {"a": "b", ""}',
        "  two spaces, 12345, VAR ABC = VAR XYZ\r\n\n",
    ):
        fine &= (same := llm.tokenize(text.encode(), add_bos=False) == TOK.encode(text))
        print(f"tokens equal: {same}: {text[:40]!r}")
    for fmt, n_pairs in (("short", 40), ("uuid", 20)):
        torch.manual_seed(2)
        batch = kv_batch("cpu", samples, n_pairs, 1, fmt, depth=torch.arange(samples)[:, None] * n_pairs // samples)
        ours = answer_rows(model, batch)[0]
        right, worst, chat = [], 0.0, True
        for i in range(samples):
            prompt = batch.context[i].tolist() + batch.question[i, 0, : 1 - batch.n_answer].tolist()
            answer = TOK.decode(batch.target[i, 0, -batch.n_answer :].tolist())
            text = TOK.decode(prompt)
            fine &= llm.tokenize(text.encode()) == prompt
            got = llm(text, max_tokens=40, temperature=0)["choices"][0]["text"]
            theirs = torch.from_numpy(llm.scores[len(prompt) - 1].copy())
            worst = max(worst, float((theirs - ours[i, 0]).norm() / ours[i, 0].norm()))
            right.append((got == answer, bool((ours[i].argmax(-1) == batch.target[i, 0, -batch.n_answer :]).all())))
            if i < 3:
                reply = llm.create_chat_completion([{"role": "user", "content": text}], max_tokens=40, temperature=0)
                chat &= reply["choices"][0]["message"]["content"] == got
        fine &= chat and worst < 0.01
        print(
            f"{fmt}, {len(prompt)} tokens, greedy right: llama.cpp {sum(a for a, _ in right)}, PyTorch "
            f"{sum(b for _, b in right)} of {samples}, differing {sum(a != b for a, b in right)}; logits differ by "
            f"at most {worst:.1e} (relative norm); chat answers the same: {chat}"
        )
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="size and curriculum (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every stage's number of steps")
    parser.add_argument("--load", type=Path, metavar="FILE", help="use this .npz or .gguf instead of training")
    parser.add_argument(
        "--stages",
        type=int,
        nargs=2,
        metavar=("A", "B"),
        help="train stages A (counted from 0) up to B - 1 only, --load further if given",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the model as .npz or .gguf")
    parser.add_argument("--eval", action="store_true", help="print exact match of each way of decoding, by length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[120, 250, 500, 1000, 2000], help="for --eval")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["short", "uuid"], help="for --eval")
    parser.add_argument("--samples", type=int, default=300, help="a cell for --eval; a tenth of it for --check")
    parser.add_argument("--check", action="store_true", help="compare the --load or --out .gguf under llama.cpp")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    preset, model = PRESETS[args.preset], load(args.load, args.device) if args.load else None
    if model is None or args.stages:
        preset = replace(preset, stages=preset.stages[slice(*args.stages or (None,))])
        model = train(preset, args.seed, args.device, args.scale, model)
    if args.out:
        save(model, args.out)
    if args.eval:
        for fmt in args.formats:
            evaluate(model, args.device, fmt, [n for n in args.lengths if n <= model.length], args.samples)
    if args.check:
        sys.exit(not check(args.out or args.load, args.samples // 10))


if __name__ == "__main__":
    main()
