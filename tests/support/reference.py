"""The method in float64 numpy: a transformer that reads a GGUF file, its local-aware twin, and the contrast.

Written from the definitions, as documentation and as an oracle for the engine; it shares no code with pypcd. The twin of a
token is the token evaluated a second time, with other rotary frequencies or fewer positions.

    ref = Reference("m.gguf")
    standard = ref.standard(tokens)[-1]
    over = ref.twin(tokens, len(tokens) - 1, rho=lambda n_rot: rho(n_rot, alpha=0.2, base_ratio=1e-4))
    next_token = contrast(standard, over, beta=2.5, gamma=30).argmax()
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RhoTable = Callable[[int], Array]

# which two dimensions of a head are rotated together: (2j, 2j+1), or (j, j + n_rot/2); None: the model has no RoPE
ROPE_LAYOUT: dict[str, str | None] = {
    **dict.fromkeys(("llama", "smollm3"), "norm"),
    **dict.fromkeys(("qwen2", "qwen2vl", "qwen3", "phi3", "stablelm", "gemma2", "gemma3"), "neox"),
    **dict.fromkeys(("hunyuan-dense", "lfm2"), "neox"),
    **dict.fromkeys(("gpt2", "bloom")),
}
_GGML = gguf.GGMLQuantizationType
GELU_ARCHS = {"gemma2", "gemma3", "gpt2", "bloom"}


def rho(n_rot: int, alpha: float, base_ratio: float, transition: str = "exponential") -> Array:
    """theta*_j / theta_j, float64[n_rot/2]: how far each pair over-rotates, for any base of the model."""
    j = np.arange(1, n_rot // 2 + 1, dtype=np.float64)
    # T: the weight of the model's own frequency
    keep = {"exponential": 2.0 - np.exp(alpha * j / (n_rot / 2)), "none": np.zeros_like(j)}[transition]
    return keep + (1.0 - keep) * base_ratio ** (-2.0 * (j - 1.0) / n_rot)


def softmax(x: Array) -> Array:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def contrast(standard: Array, over: Array, beta: float, gamma: int, relative_top: float = 0.0) -> Array:
    """(1 + beta) L - beta L* on the kept tokens, -inf on the others; all float64[n_vocab].

    Kept: the gamma largest of `standard` (the lower token id first if equal) whose probability
    is at least relative_top times the largest."""
    kept = np.argsort(-standard, kind="stable")[:gamma]
    if relative_top > 0.0:
        kept = kept[standard[kept] >= standard.max() + math.log(relative_top)]
    out = np.full(standard.shape, -np.inf)
    out[kept] = (1.0 + beta) * standard[kept] - beta * over[kept]
    return out


def behind(contrasted: Array, standard: Array) -> Array:
    """The row that callers read: where `contrasted` is -inf, the first token in the order of `standard` lies 60 behind the
    best one, another one d further on d behind that first one, but from 30 on 30 + 9x/(x + 9), where x = d - 30."""
    rest = contrasted == -np.inf
    out, best = contrasted.copy(), contrasted.max()
    for v in np.flatnonzero(rest):
        d = standard[rest].max() - standard[v]
        x = max(d - 30.0, 0.0)
        out[v] = best - 60.0 - min(d, 30.0) - 9.0 * x / (x + 9.0)
    return out


@dataclasses.dataclass(frozen=True)
class Heads:
    """Ms-PoE: from first_layer on, head h rotates by position / ratios[order[h]]; a key head has its group's first ratio.

    The order is that of the heads from the last to the first or, with outliers=True, an argsort: of minus the share of
    keys that get more than three times the mean of the attention of the prompt's last token, before rotation."""

    low: float = 1.2
    high: float = 1.8
    first_layer: int = 2
    outliers: bool = False

    def of(self, q: Array, k: Array) -> Array:
        """float64[n_head], from a prompt's q [n, n_head, head_dim] and k [n, n_head_kv, head_dim]."""
        n_head, d = q.shape[1:]
        order = np.arange(n_head)[::-1]
        if self.outliers:
            scores = np.einsum("hd,nhd->hn", q[-1], np.repeat(k, n_head // k.shape[1], axis=1)) / math.sqrt(d)
            p = softmax(scores)
            order = np.argsort(-(p > 3 * p.mean(axis=1, keepdims=True)).mean(axis=1), kind="stable")
        return (self.low + (self.high - self.low) * np.arange(n_head) / n_head)[order]


@dataclasses.dataclass
class Trace:
    """Intermediate values of an evaluation.

    hidden[i] [n, n_embd] enters block i, the last one the final norm; attention[i] [n_head, n, n_keys] are its weights."""

    hidden: list[Array] = dataclasses.field(default_factory=list)
    attention: list[Array] = dataclasses.field(default_factory=list)
    ratios: list[Array] = dataclasses.field(default_factory=list)  # of the query heads


class Reference:
    """A decoder-only transformer, exact unless told to round.

    `cpu_rounding=True` rounds as ggml's CPU backend does: GELU, looked up in a float16 table, and activations multiplied
    with float16 or quantised weights.
    `rope_freq_base`, `rope_freq_scale`: a context's overrides; sliding-window layers keep the model's."""

    def __init__(
        self,
        path: str | Path,
        *,
        cpu_rounding: bool = False,
        rope_freq_base: float | None = None,
        rope_freq_scale: float | None = None,
    ) -> None:
        reader = gguf.GGUFReader(str(path))
        self._meta = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
        self.arch: str = self._meta["general.architecture"]
        self._w: dict[str, Array] = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        self._types = {t.name: t.tensor_type for t in reader.tensors}
        self.cpu_rounding = cpu_rounding

        n_embd, self.n_layer = self._key("embedding_length"), self._key("block_count")
        self.n_head = self._key("attention.head_count")
        heads = self._key("attention.head_count_kv", self.n_head)
        self.n_head_kv = max(heads) if isinstance(heads, list) else heads  # 0 if a layer has no attention
        self.head_dim = self._key("attention.key_length", n_embd // self.n_head)
        self.n_rot = self._key("rope.dimension_count", self.head_dim) if ROPE_LAYOUT[self.arch] else 0
        self.window: int = self._key("attention.sliding_window", 0)
        self.sliding = self._sliding_layers()
        self._rope = [self._layer_rope(il, rope_freq_base, rope_freq_scale) for il in range(self.n_layer)]
        self._known: dict[tuple[int, ...], tuple[Array, list[tuple[Array, Array]]]] = {}  # the latest texts, see _plain

    # --- the method ---

    def standard(self, tokens: Sequence[int], positions: Sequence[int] | None = None) -> Array:
        """Logits of the unperturbed model at every position, float64[n_tokens, n_vocab]; `positions` if not 0, 1, 2 ...

        A key is seen from its own position on, so tokens must not share one with an earlier token that matters."""
        return (self._plain(tokens) if positions is None else self._evaluate(tokens, positions=positions))[0]

    def trace(self, tokens: Sequence[int], heads: Heads | None = None) -> Trace:
        trace = Trace()
        self._evaluate(tokens, trace=trace, heads=heads)
        return trace

    def with_heads(self, tokens: Sequence[int], heads: Heads, n_prompt: int | None = None) -> Array:
        """Logits at every position; the order of the heads is found from the first n_prompt tokens."""
        return self._evaluate(tokens, heads=heads, n_prompt=n_prompt)[0]

    def exits(self, tokens: Sequence[int], layers: Sequence[int]) -> Array:
        """The output head's logits for the states that enter these blocks, float64[len(layers), n_tokens, n_vocab]."""
        hidden = self.trace(tokens).hidden
        return np.stack([self._head(hidden[il]) for il in layers])

    def twin(
        self,
        tokens: Sequence[int],
        i: int,
        *,
        rho: RhoTable | None = None,
        cache: str = "rerotated",
        window: int | None = None,
        n_sink: int = 4,
    ) -> Array:
        """Logits of the local-aware twin of the token at position i, float64[n_vocab].

        The twin attends to the positions n < i and to itself, never to the standard token at i.
        `cache` says which keys and values are at n < i (theta* = rho theta):
          'rerotated'  keys of the standard pass, rotated by theta* instead of theta, and its values;
          'shared'     keys and values of the standard pass as they are;
          'separate'   keys and values of a second pass that used theta* at every position in every layer.
        `window=W` hides the positions with i - n >= W, except the first n_sink. In the second pass of
        'separate' every position is a twin, so each sees only its own window.
        `rho=None` is a twin without rotation."""
        if rho is not None and not self.n_rot:
            raise ValueError(f"{self.arch} has no RoPE to over-rotate")
        ones = np.ones(self.n_rot // 2)
        over = ones if rho is None else rho(self.n_rot)
        if cache not in ("rerotated", "shared", "separate"):
            raise ValueError(f"cache is 'rerotated', 'shared' or 'separate', not {cache!r}")
        memory = None
        if i > 0 and cache == "separate":
            memory = self._evaluate(tokens[:i], over, window=window, n_sink=n_sink)[1]
        elif i > 0:
            memory = self._plain(tokens[:i])[1]
        memory_rho = ones if cache == "shared" else over
        return self._evaluate(tokens[i : i + 1], over, memory, memory_rho, window=window, n_sink=n_sink)[0][0]

    # --- the transformer ---

    def _plain(self, tokens: Sequence[int]) -> tuple[Array, list[tuple[Array, Array]]]:
        """_evaluate(tokens), kept for the next twin of this text; no position sees a later one, so a longer text has it too."""
        text, n = tuple(tokens), len(tokens)
        longer = next((known for known in self._known if known[:n] == text), text)
        if longer not in self._known:
            self._known[longer] = self._evaluate(longer)
        if len(self._known) > 4:
            del self._known[next(iter(self._known))]
        logits, layers = self._known[longer]
        return logits[:n], [(k[:n], v[:n]) for k, v in layers]

    def _evaluate(
        self,
        tokens: Sequence[int],
        rho: Array | None = None,
        memory: list[tuple[Array, Array]] | None = None,
        memory_rho: Array | None = None,
        *,
        window: int | None = None,
        n_sink: int = 0,
        positions: Sequence[int] | None = None,
        trace: Trace | None = None,
        heads: Heads | None = None,
        n_prompt: int | None = None,
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Evaluate `tokens` after the positions that `memory` holds.

        Returns the logits, and per layer the keys *before* rotation and the values, [n, n_head_kv, head_dim].
        Every query and its own key is rotated by rho theta, the keys in memory by memory_rho theta."""
        n_past = len(memory[0][0]) if memory else 0  # a recurrent layer's state has as many rows here
        n_all = n_past + len(tokens)
        pos = np.arange(n_all, dtype=np.float64) if positions is None else np.asarray(positions, np.float64)
        ones = np.ones(self.n_rot // 2)
        rho_at = np.empty((n_all, self.n_rot // 2))
        rho_at[:n_past] = ones if memory_rho is None else memory_rho
        rho_at[n_past:] = ones if rho is None else rho

        distance = pos[n_past:, None] - pos
        visible = distance >= 0
        if window is not None:
            visible &= (distance < window) | (pos < n_sink)

        x = self._embed(np.asarray(tokens, dtype=np.int64), n_past)
        layers, trace = [], trace or Trace()
        for il in range(self.n_layer):
            trace.hidden.append(x)
            if f"blk.{il}.shortconv.conv.weight" in self._w:
                y, state = self._short_conv(il, self._norm(x, f"blk.{il}.attn_norm"), memory[il][0] if memory else None)
                layers.append((state, state))
                x = self._feed_forward(il, x + y)
                continue
            theta, magnitude = self._rope[il]
            q, k, v = self._qkv(il, self._norm(x, f"blk.{il}.attn_norm"))
            layers.append((k, v))
            if memory:
                k, v = np.concatenate([memory[il][0], k]), np.concatenate([memory[il][1], v])
            angle = (pos[:, None] * rho_at * theta)[:, None]
            ratio = np.ones(self.n_head)
            if heads and il >= heads.first_layer:
                ratio = heads.of(q[:n_prompt], k[:n_prompt])
            trace.ratios.append(ratio)
            q = self._rotate(q, angle[n_past:] / ratio[:, None], magnitude)
            k = self._rotate(k, angle / ratio[:: self.n_head // self.n_head_kv, None], magnitude)
            if self.arch == "hunyuan-dense":
                q, k = self._norm(q, f"blk.{il}.attn_q_norm"), self._norm(k, f"blk.{il}.attn_k_norm")
            mask = visible & (distance < self.window) if il in self.sliding else visible
            x = self._feed_forward(il, x + self._attention(il, q, k, v, mask, distance, trace))
        trace.hidden.append(x)

        final_norm = "token_embd_norm" if self.arch == "lfm2" else "output_norm"  # a historical name
        logits = self._head(self._norm(x, final_norm))
        return _soft_cap(logits, self._key("final_logit_softcapping", 0.0)), layers

    def _head(self, x: Array) -> Array:
        return self._linear(x, "output" if "output.weight" in self._w else "token_embd")

    def _embed(self, tokens: NDArray[np.int64], n_past: int) -> Array:
        x = self._w["token_embd.weight"][tokens]
        if self.arch.startswith("gemma"):
            x = x * math.sqrt(x.shape[1])
        if self.arch == "gpt2":
            x = x + self._w["position_embd.weight"][n_past : n_past + len(tokens)]
        if self.arch == "bloom":
            x = self._norm(x, "token_embd_norm")
        return x

    def _qkv(self, il: int, x: Array) -> tuple[Array, Array, Array]:
        """[n, n_head, head_dim] and twice [n, n_head_kv, head_dim], before rotation."""
        block, d = f"blk.{il}.", self.head_dim
        if block + "attn_qkv.weight" in self._w:
            joined = self._linear(x, block + "attn_qkv")
            q, k, v = np.split(joined, [self.n_head * d, (self.n_head + self.n_head_kv) * d], axis=1)
        else:
            q, k, v = (self._linear(x, block + name) for name in ("attn_q", "attn_k", "attn_v"))
        q, k, v = (y.reshape(len(x), -1, d) for y in (q, k, v))
        if block + "attn_q_norm.weight" in self._w and self.arch != "hunyuan-dense":
            q, k = self._norm(q, block + "attn_q_norm"), self._norm(k, block + "attn_k_norm")
        return q, k, v

    def _attention(
        self, il: int, q: Array, k: Array, v: Array, mask: NDArray[np.bool_], distance: Array, trace: Trace
    ) -> Array:
        """q, k rotated; mask, distance [n_queries, n_keys]; returns [n_queries, n_embd]."""
        group = self.n_head // self.n_head_kv  # consecutive query heads share a key head
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        q, k, v = (y.transpose(1, 0, 2) for y in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(self.head_dim)
        scores = _soft_cap(scores, self._key("attn_logit_softcapping", 50.0 if self.arch == "gemma2" else 0.0))
        if self.arch == "bloom":
            scores = scores - _alibi_slopes(self.n_head)[:, None, None] * distance
        p = softmax(np.where(mask, scores, -np.inf))
        trace.attention.append(p)
        y = self._linear((p @ v).transpose(1, 0, 2).reshape(len(distance), -1), f"blk.{il}.attn_output")
        return self._norm_if(y, f"blk.{il}.post_attention_norm")

    def _short_conv(self, il: int, x: Array, before: Array | None) -> tuple[Array, Array]:
        """LFM2's recurrent layer, [n, n_embd]: a gated convolution over this position and those before it.

        Also returns the inputs of the convolution so far; the layer's state is the last rows."""
        block, kernel = f"blk.{il}.shortconv.", self._w[f"blk.{il}.shortconv.conv.weight"]
        b, c, y = np.split(self._linear(x, block + "in_proj"), 3, axis=1)
        n = kernel.shape[1]
        past = np.zeros((0, y.shape[1])) if before is None else before
        state = np.concatenate([past, b * y])
        padded = np.concatenate([np.zeros((n - 1, y.shape[1])), state])[-(len(x) + n - 1) :]
        convolved = sum(padded[i : i + len(x)] * kernel[:, i] for i in range(n))
        return self._linear(c * convolved, block + "out_proj"), state

    def _feed_forward(self, il: int, x: Array) -> Array:
        block = f"blk.{il}."
        h = self._norm(x, block + "ffn_norm")
        act, up = self._gelu if self.arch in GELU_ARCHS else _silu, self._linear(h, block + "ffn_up")
        gated = block + "ffn_gate.weight" in self._w
        if self.arch == "phi3":
            gate, up = np.split(up, 2, axis=1)
            return x + self._linear(act(gate) * up, block + "ffn_down")
        hidden = act(self._linear(h, block + "ffn_gate")) * up if gated else act(up)
        return x + self._norm_if(self._linear(hidden, block + "ffn_down"), block + "post_ffw_norm")

    # --- rotation ---

    def _layer_rope(self, il: int, freq_base: float | None, freq_scale: float | None) -> tuple[Array, float]:
        """(theta, magnitude): the model's own angle per position, float64[n_rot/2], all factors applied."""
        if not self.n_rot or (self.arch == "smollm3" and (il + 1) % 4 == 0):
            return np.zeros(self.n_rot // 2), 1.0
        yarn = self._key("rope.scaling.type", "linear") == "yarn"
        base = train_base = self._key("rope.freq_base", 10000.0)
        scale = train_scale = 1.0 / self._key("rope.scaling.factor", 1.0)
        base, scale = freq_base or base, freq_scale or scale
        context_factor = 1.0 / scale
        if il in self.sliding:  # these ignore the context's settings; gemma3's are not even scaled
            base = self._key("rope.freq_base_swa", train_base if self.arch == "gemma2" else 10000.0)
            scale = train_scale if self.arch == "gemma2" else 1.0

        j = np.arange(self.n_rot // 2, dtype=np.float64)
        theta = base ** (-2.0 * j / self.n_rot) / self._w.get("rope_freqs.weight", 1.0)
        magnitude: float = self._key("rope.scaling.attn_factor", 1.0)
        if not yarn:
            return theta * scale, magnitude
        # YaRN: keep the pairs that turn more than 32 times in the original context, slow those below one turn
        n_orig = self._key("rope.scaling.original_context_length", self._key("context_length"))

        def pair_with(turns: float) -> float:
            return self.n_rot * math.log(n_orig / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0, math.floor(pair_with(32))), min(self.n_rot - 1, math.ceil(pair_with(1)))
        kept = 1.0 - np.clip((j - low) / max(0.001, high - low), 0.0, 1.0)
        theta = theta * (scale * (1.0 - kept) + kept)
        # llama-context.cpp cancels what ggml's rope multiplies with, so 1 + 0.1 ln(factor) is applied once
        magnitude *= max(1.0, 1.0 + 0.1 * math.log(context_factor)) / (1.0 + 0.1 * math.log(context_factor))
        return theta, magnitude * (1.0 + 0.1 * math.log(1.0 / scale))

    def _rotate(self, x: Array, angle: Array, magnitude: float) -> Array:
        """Rotate x [n, heads, head_dim] by angle [n, heads, n_rot/2]; dimensions past n_rot stay."""
        half, y = self.n_rot // 2, x.copy()
        norm = ROPE_LAYOUT[self.arch] == "norm"
        a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if norm else (slice(half), slice(half, 2 * half))
        cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., a] * sin + x[..., b] * cos
        return y

    # --- small parts ---

    def _key(self, name: str, default: Any = None) -> Any:
        return self._meta.get(f"{self.arch}.{name}", default)

    def _sliding_layers(self) -> set[int]:
        if not self.window:
            return set()
        pattern = self._key("attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}.get(self.arch))
        if isinstance(pattern, list):
            return {il for il, slides in enumerate(pattern) if slides}
        return {il for il in range(self.n_layer) if pattern and il % pattern < pattern - 1}

    def _linear(self, x: Array, name: str) -> Array:
        kind = self._types[name + ".weight"]
        if self.cpu_rounding and kind != _GGML.F32:
            kind = _GGML.F16 if kind == _GGML.F16 else _GGML.Q8_0  # ggml's partner of the quantised types used here
            x = gguf.quants.dequantize(gguf.quants.quantize(x.astype(np.float32), kind), kind).astype(np.float64)
        return x @ self._w[name + ".weight"].T + self._w.get(name + ".bias", 0.0)

    def _norm(self, x: Array, name: str) -> Array:
        """RMSNorm, or LayerNorm if the model has biases."""
        bias = self._w.get(name + ".bias")
        if bias is None:
            eps = self._key("attention.layer_norm_rms_epsilon")
            return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self._w[name + ".weight"]
        x = x - x.mean(axis=-1, keepdims=True)
        eps = self._key("attention.layer_norm_epsilon")
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self._w[name + ".weight"] + bias

    def _norm_if(self, x: Array, name: str) -> Array:
        return self._norm(x, name) if name + ".weight" in self._w else x

    def _gelu(self, x: Array) -> Array:
        if not self.cpu_rounding:
            return _gelu(x)
        rounded = _gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)
        return np.where(x <= -10.0, 0.0, np.where(x >= 10.0, x, rounded))


def _soft_cap(x: Array, cap: float) -> Array:
    return np.tanh(x / cap) * cap if cap else x


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _alibi_slopes(n_head: int) -> Array:
    """A head's penalty per position of distance: 2^-8/n, 2^-16/n, ...; beyond a power of two, in between."""
    n = 2 ** math.floor(math.log2(n_head))
    h = np.arange(n_head)
    return np.where(h < n, 2.0 ** (-8.0 / n * (h + 1)), 2.0 ** (-4.0 / n * (2 * (h - n) + 1)))


def bits(row: np.ndarray) -> float:
    """The entropy of softmax(row), by its definition."""
    p = softmax(row.astype(float))
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())
