#!/usr/bin/env python3
"""Train the demo model: a small Llama that retrieves values from a JSON dictionary, then gets a planted fault.

The fault is the one that Positional Contrastive Decoding (PCD) is about: a pull towards whatever was read last. The
model first learns retrieval on short prompts, then on long ones with a raised RoPE base, as long-context models do;
in a last phase some answers are replaced by the value nearest to the question. After that, most wrong answers are that
nearest value and the right one is the second most probable token. The model is evidence about the mechanism only.

    python scripts/recipes/train_demo_model.py --preset cpu --out small.gguf              # 10 minutes on one core
    python scripts/recipes/train_demo_model.py --preset gpu --device cuda --out demo.gguf # a model like the shipped one
    pypcd eval small.gguf --task kv-short --method pcd,pcd:window,control --length 120,250,500 # how well it retrieves

Needs PyTorch, gguf (the extra `train` has both) and numpy. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_model import ENDINGS, PROMPT, QUESTION, TOK, Model, Shape, check, load, save
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------- text
FORMATS = {"short": (2, 2), "uuid": (4, 2, 2, 2, 6)}  # bytes in each group between dashes


@dataclass
class Batch:
    """Shared contexts [B, D], up to the key asked for, and their questions [B, Q, L], each seeing itself and its
    context only."""

    context: Tensor
    question: Tensor
    target: Tensor  # [B, Q, L], the next token
    weight: list[float]  # [L], of the loss
    n_answer: int  # the last positions, which predict the answer and its end


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
    return Batch(context, text[..., :-1], text[..., 1:], weight, n_answer)


# -------------------------------------------------------------------------------------------------------- training
def question_states(model: Model, batch: Batch) -> Tensor:
    """The questions' final hidden states [B, Q, L, dim]."""
    (n_q, n_l), n_c = batch.question.shape[1:], batch.context.shape[1]
    dev = batch.context.device
    pos = torch.cat([torch.arange(n_c, device=dev), n_c + torch.arange(n_l, device=dev).repeat(n_q)])
    own = torch.block_diag(*[torch.ones(n_l, n_l, dtype=torch.bool, device=dev).tril()] * n_q)
    mask = torch.cat([torch.ones(n_q * n_l, n_c, dtype=torch.bool, device=dev), own], 1)
    ids = torch.cat([batch.context, batch.question.flatten(1)], 1)
    return model(ids, pos, n_c, mask)[:, n_c:].unflatten(1, (n_q, n_l))


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
            hidden = question_states(self.model, batch)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="size and curriculum (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of steps of every stage")
    parser.add_argument("--stages", type=int, nargs=2, metavar=("A", "B"), help="only stages A (from 0) to B - 1")
    parser.add_argument("--load", type=Path, metavar="FILE", help="go on from this GGUF file")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the GGUF file to write")
    parser.add_argument("--check", action="store_true", help="then compare the file with llama.cpp (needs pypcd)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    preset, model = PRESETS[args.preset], load(args.load, args.device) if args.load else None
    if args.stages:
        preset = replace(preset, stages=preset.stages[slice(*args.stages)])
    save(train(preset, args.seed, args.device, args.scale, model), args.out)
    if args.check:
        sys.exit(not check(args.out))


if __name__ == "__main__":
    main()
