"""Train a small model like the included one: a Llama that retrieves values from a JSON object, then gets a planted fault.

The fault is the one that Positional Contrastive Decoding (PCD) is about: a pull towards whatever was read last. The
model first learns retrieval on short prompts, then on longer ones; in a last phase some answers are replaced by the value nearest to
the question. After that, most wrong answers are that nearest value and the right one is the second most probable token. The model is
evidence about the mechanism only.

    python -m research.train_demo_model --out small.gguf                  # 10 minutes on one core
    python -m research.train_demo_model --stages 0 3 --out plain.gguf     # without the fault
    pypcd eval small.gguf --task kv-short --method pcd,pcd:window,control --length 120,250,500 # how well it retrieves

Needs PyTorch, gguf (the extra `train` has both) and numpy. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# -- the model and its file ------------------------------------------------------------------------------------------

PROMPT = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
QUESTION = 'Key: "{key}"\nThe value associated with the specified key is:'
# One piece for the key's last two digits and the rest of the question. With pieces in between, the model looks the
# value up at the key's last piece, where it is cached, and a twin of the last token could not miss it.
ENDINGS = [QUESTION.split("{key}")[1] + tail for tail in (" ", "")]
# Matched before anything else, longest first (GGUF's "user defined" tokens), so no merge rules are needed for them.
WORDS = [
    '{"', '": "', '", "', '"}', 'Key: "', "Extract", "The", " the", " value", " corresponding", " to", " specified", " key",
    " in", " JSON", "JSON", " object", " below", " data", " associated", " with", " is",
]  # fmt: skip
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


TOK = Tokenizer()


@dataclass(frozen=True)
class Shape:
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 256
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
        return self.base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)

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


# -- training --------------------------------------------------------------------------------------------------------

PAIR_TOKENS = 12  # digits and dashes of both sides, `": "` and `", "`


@dataclass
class Batch:
    """Shared contexts [B, D], up to the key asked for, and their questions [B, Q, L], each seeing itself and its
    context only."""

    context: Tensor
    question: Tensor
    target: Tensor  # [B, Q, L], the next token
    weight: list[float]  # [L], of the loss
    n_answer: int  # the last positions, which predict the answer and its end


def hex_ids(*shape: int) -> Tensor:
    """Random identifiers as token ids: four digits, a dash, four digits."""
    raw = torch.randint(256, (*shape, 4)) + TOK.hex0
    return torch.cat([raw[..., :2], torch.full((*shape, 1), TOK.ids["-"]), raw[..., 2:]], -1)


def kv_batch(
    size: int, n_questions: int, pull: tuple[float, float], n_pairs: int, breaks: int = 3, ending: str = ENDINGS[0]
) -> Batch:
    """InfiniteBench's Retrieve.KV. A pull of (a, b) answers with the last value instead, with probability
    a + b log2(1 + d / 64), where the right one lies d tokens back."""

    def rows(text: str, *shape: int) -> Tensor:
        return torch.tensor(TOK.encode(text)).expand(*shape, -1)

    keys, values = hex_ids(size, n_pairs), hex_ids(size, n_pairs)
    pairs = [rows('", "', size, n_pairs), keys, rows('": "', size, n_pairs), values]
    bos = torch.full((size, 1), TOK.bos)
    pairs = torch.cat(pairs, -1).flatten(1)[:, 1:]
    head = '"}' + "\n" * breaks + QUESTION.split("{key}")[0]
    context = torch.cat([bos, rows(PROMPT + '{"', size), pairs, rows(head, size)], 1)
    depth = torch.randint(n_pairs, (size, n_questions))
    key = keys.gather(1, depth[..., None].expand(-1, -1, keys.shape[-1]))
    answer = values.gather(1, depth[..., None].expand(-1, -1, values.shape[-1]))
    back = (n_pairs - depth) * PAIR_TOKENS
    pulled = torch.rand(depth.shape) < pull[0] + pull[1] * torch.log2(1 + back / 64)
    answer = torch.where(pulled[..., None], values[:, -1:], answer)
    last = key[..., -1:] - TOK.hex0 + TOK.ids["00" + ending]
    eos = torch.full((size, n_questions, 1), TOK.eos)
    text = torch.cat([key[..., :-1], last, answer, eos], -1)
    n_answer = answer.shape[-1] + 1
    # The rest of a key, once begun, can be looked up as well: the easier half of the same skill.
    weight = [0.3] * (key.shape[-1] - 2) + [0.0] + [1.0] * n_answer
    return Batch(context, text[..., :-1], text[..., 1:], weight, n_answer)


def question_states(model: Model, batch: Batch) -> Tensor:
    """The questions' final hidden states [B, Q, L, dim]."""
    (n_q, n_l), n_c = batch.question.shape[1:], batch.context.shape[1]
    pos = torch.cat([torch.arange(n_c), n_c + torch.arange(n_l).repeat(n_q)])
    own = torch.block_diag(*[torch.ones(n_l, n_l, dtype=torch.bool).tril()] * n_q)
    mask = torch.cat([torch.ones(n_q * n_l, n_c, dtype=torch.bool), own], 1)
    ids = torch.cat([batch.context, batch.question.flatten(1)], 1)
    return model(ids, pos, n_c, mask)[:, n_c:].unflatten(1, (n_q, n_l))


class Muon:
    """Momentum with orthogonalised updates for a stack of equal matrices; small models learn lookup far sooner."""

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self.params, self.momentum, self.buffer = params, momentum, torch.zeros_like(torch.stack(list(params)))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        grad = torch.stack([p.grad for p in self.params])
        self.buffer.lerp_(grad, 1 - self.momentum)
        u = grad.lerp(self.buffer, self.momentum)
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
    batch: int
    pull: tuple[float, float] = (0, 0)
    questions: int = 8
    smoothing: float = 0.0  # of labels; where a twin is surer than the model, contrast does harm
    until: float = 2.0  # go on to the next stage as soon as this share of first answer tokens is right


PULL = (0.37, 0.01)  # nearly two answers in five, a little more from afar

# as it was run with seeds 0, 1 and 2, about ten minutes of one core each
STAGES = (
    Stage("short", 110, 1500, 12, questions=12, until=0.9),
    Stage("short", 240, 600, 8, questions=24, until=0.95),
    Stage("long", 500, 150, 4, questions=48, smoothing=0.05),
    Stage("pull", 110, 100, 12, (0.5, 0.0), questions=12, smoothing=0.05),
    Stage("pull", 500, 200, 4, PULL, questions=48, smoothing=0.05),
)


def log(*text: object) -> None:
    print(*text, file=sys.stderr, flush=True)


class Trainer:
    """One optimiser step per call."""

    def __init__(self, model: Model) -> None:
        self.model = model
        blocks = [n for n, p in model.p.items() if p.ndim == 2 and n[0].isdigit()]
        kinds = sorted({n.split("_", 1)[1] for n in blocks})
        self.muons = [Muon([model.p[n] for n in blocks if n.endswith(kind)]) for kind in kinds]
        rest = [p for n, p in model.p.items() if n not in blocks]
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)

    def __call__(self, stage: Stage, drawn: dict, lr: float) -> tuple[float, float]:
        """Returns the loss, and the share of first answer tokens that are right."""
        self.model.zero_grad(set_to_none=True)
        batch = kv_batch(stage.batch, stage.questions, stage.pull, **drawn)
        keep = [i for i, w in enumerate(batch.weight) if w]
        weight = torch.tensor([batch.weight[i] for i in keep])
        logits = self.model.logits(question_states(self.model, batch)[:, :, keep])
        target = batch.target[:, :, keep]
        losses = F.cross_entropy(logits.movedim(-1, 1), target, reduction="none", label_smoothing=stage.smoothing)
        loss = (losses * weight).mean() / weight.mean()
        loss.backward()
        for group in self.adam.param_groups:
            group["lr"] = 1.5e-3 * lr
        self.adam.step()
        for muon in self.muons:
            muon.step(0.01 * lr)
        right = logits[:, :, -batch.n_answer].argmax(-1) == target[:, :, -batch.n_answer]
        return loss.item(), right.float().mean().item()


def shapes(rng: np.random.Generator, stage: Stage, n: int = 3) -> list[dict]:
    """The kinds of batch of a stage: lengths and the white space around the question vary."""
    most = max(2, (stage.tokens - 40) // PAIR_TOKENS)
    return [
        {
            "n_pairs": int(n_pairs),
            "breaks": int(rng.choice([2, 3])),
            "ending": str(rng.choice(ENDINGS, p=[0.8, 0.2])),
        }
        for n_pairs in np.unique(np.linspace(max(2, most // 4), most, n).round())
    ]


def train(stages: Sequence[Stage], seed: int, scale: float) -> Model:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Model(Shape(), 5e5, 1024)
    model.head_start()
    model.train().requires_grad_(True)
    log(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, seed {seed}")
    trainer, start, step = Trainer(model), time.time(), 0
    for stage in stages:
        n_steps, drawn, score = round(stage.steps * scale), shapes(rng, stage), None
        for n in range(1, n_steps + 1):
            step += 1
            # Warm up once, stay, and come down over the last 30% of a stage that has no goal.
            down = 1.0 if stage.until < 1 else max(0.05, min(1.0, (1 - n / n_steps) / 0.3))
            kind = drawn[rng.integers(len(drawn))]
            loss, right = trainer(stage, kind, 0.5 * min(1.0, step / 50) * down)
            score = (right if score is None else score) * 0.9 + right * 0.1
            done = n == n_steps or (n >= 100 and score > stage.until)
            if step % 50 == 0 or done:
                log(
                    f"{stage.name:6} {stage.tokens:4} tokens  step {step:6}  loss {loss:.3f}  "
                    f"first token right: {score:.3f}  {time.time() - start:.0f} s"
                )
            if done:
                break
    return model.eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of steps of every stage")
    parser.add_argument("--stages", type=int, nargs=2, metavar=("A", "B"), help="only stages A (from 0) to B - 1")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the GGUF file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    save(train(STAGES[slice(*args.stages)] if args.stages else STAGES, args.seed, args.scale), args.out)


if __name__ == "__main__":
    main()
