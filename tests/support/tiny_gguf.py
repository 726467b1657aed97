"""Tiny random GGUF models, one per kind of position encoding, written in a few milliseconds.

    write_tiny_gguf(Path("m.gguf"), "qwen2", seed=1, yarn=(4.0, 64))

The weights are random but scaled: logits have a standard deviation of about 2 and attention is far from
uniform, so that rotating a key by a wrong angle moves the logits by tenths, not by rounding errors.
The tokenizer is complete (byte fallback), so any text tokenizes and any token prints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Arch:
    """How an architecture differs from a plain llama block. `rope`: 'norm', 'neox' or None."""

    rope: str | None
    layer_norm: bool = False  # LayerNorm with a bias, in place of RMSNorm
    fused_qkv: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norm: bool = False  # gemma: a norm after attention and after the feed-forward, too
    gated: bool = True  # else a plain two-matrix feed-forward, with biases
    fused_ffn: bool = False  # the gate is the first half of ffn_up
    tied: bool = False  # the output matrix is the embedding
    swa_pattern: tuple[bool, ...] = ()  # which layers slide, repeated over the layers
    rotary: float = 1.0  # the share of a head's dimensions that is rotated
    recurrent: bool = False  # has layers whose state cannot drop a token
    n_layer: int = 3


ARCHS: dict[str, Arch] = {
    "llama": Arch("norm"),
    "qwen2": Arch("neox", qkv_bias=True),
    "qwen2vl": Arch("neox", qkv_bias=True),  # M-RoPE: on text it equals NEOX, through another ggml op
    "qwen3": Arch("neox", qk_norm=True),
    "smollm3": Arch("norm", n_layer=4),  # every fourth layer has no RoPE
    "phi3": Arch("neox", fused_qkv=True, fused_ffn=True),
    "stablelm": Arch("neox", layer_norm=True, rotary=0.5),
    "gemma2": Arch("neox", post_norm=True, tied=True, swa_pattern=(True, False)),
    "gemma3": Arch("neox", post_norm=True, tied=True, qk_norm=True, swa_pattern=(True, True, False)),
    "hunyuan-dense": Arch("neox", qk_norm=True),  # its norms come after the rotation
    # nothing to over-rotate: learned positions, ALiBi, a recurrence
    "gpt2": Arch(None, layer_norm=True, fused_qkv=True, qkv_bias=True, gated=False),
    "bloom": Arch(None, layer_norm=True, fused_qkv=True, qkv_bias=True, gated=False),
    "mamba": Arch(None, recurrent=True),
    # RoPE attention layers between short convolutions: a recurrent state that no twin can leave again
    "lfm2": Arch("neox", qk_norm=True, recurrent=True),
}
ODD_ARCHS: dict[str, Arch] = {  # unknown to the reference
    "starcoder": Arch("norm", layer_norm=True, fused_qkv=True, qkv_bias=True, gated=False),  # in name; never rotates
    "deci": Arch("norm"),  # its second layer has no attention
    "deepseek2": Arch("norm"),  # all heads share a latent key: 96 dimensions as they are, then 32 rotated
    "t5": Arch(None, n_layer=2),  # an encoder, and a decoder that attends to it
}
MLA_LATENT, MLA_ROT = 96, 32
ROPE_ARCHS = [a for a, s in ARCHS.items() if s.rope and not s.recurrent]
HYBRID_ARCHS = ["lfm2"]
ATTENTION_ARCHS = [a for a, s in ARCHS.items() if not s.recurrent]


def write_tiny_gguf(
    path: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    n_vocab: int = 384,  # at least 300: 3 special tokens, 256 bytes, letters
    n_embd: int = 64,
    n_layer: int | None = None,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 128,
    rope_freq_base: float = 10000.0,
    rope_freqs: Sequence[float] | np.ndarray | None = None,  # llama only: divides theta; n_rot / 2 values
    yarn: tuple[float, int] | None = None,  # (factor, original context)
    longrope: int | None = None,  # llama only: the original context; a longer one gets slower rotation
    linear_scale: float | None = None,
    sliding_window: int | None = None,  # gemma only; 16 unless given
    weight_type: str = "F32",
    n_ctx_train: int = 1024,
    tied: bool | None = None,  # None: the architecture's usual value
    chat_template: str | None = None,
    defined: Sequence[str] = (),
    pre: str | None = None,  # a BPE tokenizer that splits texts as llama.cpp does for this name
) -> Path:
    """Write a random model to `path`; equal arguments give equal bytes. head_dim = n_embd / n_head."""
    spec = {**ARCHS, **ODD_ARCHS}[arch]
    spec = replace(spec, tied=spec.tied if tied is None else tied)
    n_layer = n_layer or spec.n_layer
    n_head_kv = n_head_kv or (n_head if not spec.gated or arch == "t5" else n_head // 2)
    head_dim = n_embd // n_head
    n_rot = MLA_ROT if arch == "deepseek2" else int(head_dim * spec.rotary)

    w = _Writer(path, arch, weight_type, seed)
    kv = w.gguf
    kv.add_context_length(n_ctx_train)
    kv.add_embedding_length(n_embd)
    kv.add_block_count(n_layer)
    kv.add_feed_forward_length(n_ff)
    kv.add_vocab_size(n_vocab)
    if spec.layer_norm:
        kv.add_layer_norm_eps(1e-5)
    else:
        # llama.cpp at this pin forgets to read qwen2vl's epsilon and uses 0: make it not matter
        kv.add_layer_norm_rms_eps(1e-12 if arch == "qwen2vl" else 1e-6)
    kinds = ["attention"] * n_layer
    if arch == "mamba":
        kinds = ["mamba"] * n_layer
        kv.add_head_count(0)
        kv.add_ssm_conv_kernel(4)
        kv.add_ssm_inner_size(2 * n_embd)
        kv.add_ssm_state_size(16)
        kv.add_ssm_time_step_rank(4)
    elif arch == "deepseek2":
        kinds = ["mla"] * n_layer
        kv.add_head_count(n_head)
        kv.add_head_count_kv(1)
        kv.add_key_length(MLA_LATENT + MLA_ROT)
        kv.add_value_length(MLA_LATENT)
        kv.add_key_length_mla(head_dim + MLA_ROT)
        kv.add_value_length_mla(head_dim)
        kv.add_q_lora_rank(n_embd // 2)
        kv.add_kv_lora_rank(MLA_LATENT)
        kv.add_leading_dense_block_count(n_layer)  # no experts, but llama.cpp requires their numbers
        kv.add_expert_feed_forward_length(32)
        kv.add_expert_shared_count(1)
    else:
        if arch == "lfm2":
            kinds = ["attention" if i % 2 else "conv" for i in range(n_layer)]
        elif arch == "deci":
            kinds[1] = "none"
        n_heads, n_heads_kv = ([n if k == "attention" else 0 for k in kinds] for n in (n_head, n_head_kv))
        kv.add_head_count(n_heads if arch == "deci" else n_head)
        kv.add_head_count_kv(n_heads_kv if 0 in n_heads_kv else n_head_kv)
        if arch == "lfm2":
            kv.add_shortconv_l_cache(3)
        kv.add_key_length(head_dim)
        kv.add_value_length(head_dim)
    if spec.rope:
        kv.add_rope_dimension_count(n_rot)
        kv.add_rope_freq_base(rope_freq_base)
    if arch == "t5":
        kinds = []  # all of its own
        kv.add_relative_attn_buckets_count(32)
        kv.add_decoder_start_token_id(0)
    if arch == "qwen2vl":
        kv.add_rope_dimension_sections([n_rot // 4, n_rot // 8, n_rot // 8, 0])
    if spec.swa_pattern:
        kv.add_sliding_window(sliding_window or 16)
        kv.add_sliding_window_pattern([spec.swa_pattern[i % len(spec.swa_pattern)] for i in range(n_layer)])
    if arch == "gemma3":
        kv.add_rope_freq_base_swa(1000.0)
    if arch == "gemma2":  # low enough to bend tiny logits; a 9B model has 50 and 30
        kv.add_attn_logit_softcapping(5.0)
        kv.add_final_logit_softcapping(8.0)
    if yarn:
        kv.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        kv.add_rope_scaling_factor(yarn[0])
        kv.add_rope_scaling_orig_ctx_len(yarn[1])
    elif longrope:
        kv.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        kv.add_rope_scaling_orig_ctx_len(longrope)
    elif linear_scale:
        kv.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        kv.add_rope_scaling_factor(linear_scale)
    if pre is None:
        _add_tokenizer(kv, n_vocab, defined)
    else:
        _add_bpe(kv, n_vocab, pre)
    if chat_template is not None:
        kv.add_chat_template(chat_template)

    # gemma multiplies its embeddings by sqrt(n_embd)
    embeddings = w.normal(n_vocab, n_embd, 1 / math.sqrt(n_embd) if spec.tied else 1.0)
    embeddings[:3] *= 0.1  # <unk>, <s> and </s> are never likely: generation runs to max_tokens
    w.add("token_embd.weight", embeddings)
    if arch in ("gpt2", "starcoder"):
        w.add("position_embd.weight", w.normal(n_ctx_train, n_embd), quantize=False)
    if arch == "bloom":
        w.norm("token_embd_norm", n_embd, bias=True)
    if rope_freqs is not None:
        assert len(rope_freqs) == n_rot // 2
        w.add("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    if longrope:
        w.add("rope_factors_short.weight", np.ones(n_rot // 2, np.float32))
        w.add("rope_factors_long.weight", np.full(n_rot // 2, 4, np.float32))
    for i, kind in enumerate(kinds):
        block = f"blk.{i}."
        if kind != "none":
            w.norm(block + "attn_norm", n_embd, bias=spec.layer_norm)
        if kind == "mamba":
            _add_mamba(w, block, n_embd)
            continue
        if kind == "conv":
            w.add(block + "shortconv.conv.weight", w.normal(n_embd, 3), quantize=False)
            w.matrix(block + "shortconv.in_proj", 3 * n_embd, n_embd)
            w.matrix(block + "shortconv.out_proj", n_embd, n_embd)
        elif kind == "mla":
            _add_mla(w, block, n_embd, n_head, head_dim)
        elif kind == "attention":
            _add_attention(w, block, spec, n_embd, n_head, n_head_kv, head_dim)
        if spec.post_norm:
            w.norm(block + "post_attention_norm", n_embd)
            w.norm(block + "post_ffw_norm", n_embd)
        w.norm(block + "ffn_norm", n_embd, bias=spec.layer_norm)
        w.matrix(block + "ffn_up", 2 * n_ff if spec.fused_ffn else n_ff, n_embd, bias=not spec.gated)
        if spec.gated and not spec.fused_ffn:
            w.matrix(block + "ffn_gate", n_ff, n_embd)
        w.matrix(block + "ffn_down", n_embd, n_ff, bias=not spec.gated)
    if arch == "t5":
        _add_t5_layers(w, n_layer, n_embd, n_head, n_ff)
    # lfm2's is a historical name
    final_norm = {"lfm2": "token_embd_norm", "t5": "dec.output_norm"}.get(arch, "output_norm")
    w.norm(final_norm, n_embd, bias=spec.layer_norm, gain=2.0 if spec.tied else 1.0)
    if not spec.tied:
        output = w.normal(n_vocab, n_embd, 2 / math.sqrt(n_embd))
        output[:3] *= 0.1
        w.add("output.weight", output)
    finish(kv)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what it was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_lora(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    arch: str = "llama",
    *,
    alpha: float = 1.0,
    seed: int = 5,
) -> dict[str, np.ndarray]:
    """A random LoRA; its matrices, which have numpy's shapes: rows, columns."""
    rng, w = np.random.default_rng(seed), gguf.GGUFWriter(str(path), arch)
    w.add_string("general.type", "adapter")
    w.add_string("adapter.type", "lora")
    w.add_float32("adapter.lora.alpha", alpha)
    made = {name: (0.15 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in made.items():
        w.add_tensor(name, tensor)
    finish(w)
    return made


def _add_attention(w: _Writer, block: str, spec: Arch, n_embd: int, n_head: int, n_head_kv: int, head_dim: int) -> None:
    # a score q.k / sqrt(head_dim) has a standard deviation of the product of the two gains, that is 2.5
    n_q, n_kv, gain = n_head * head_dim, n_head_kv * head_dim, 1.0 if spec.qk_norm else 1.6
    if spec.fused_qkv:
        rows = [w.normal(n, n_embd, g / math.sqrt(n_embd)) for n, g in ((n_q, gain), (n_kv, gain), (n_kv, 1.0))]
        w.add(block + "attn_qkv.weight", np.concatenate(rows))
        if spec.qkv_bias:
            w.add(block + "attn_qkv.bias", w.normal(1, n_q + 2 * n_kv, 0.3)[0])
    else:
        for name, n, g in (("attn_q", n_q, gain), ("attn_k", n_kv, gain), ("attn_v", n_kv, 1.0)):
            w.matrix(block + name, n, n_embd, gain=g, bias=spec.qkv_bias)
    if spec.qk_norm:
        w.norm(block + "attn_q_norm", head_dim, gain=1.6)
        w.norm(block + "attn_k_norm", head_dim, gain=1.6)
    w.matrix(block + "attn_output", n_embd, n_q, bias=spec.fused_qkv and spec.qkv_bias)


def _add_mla(w: _Writer, block: str, n_embd: int, n_head: int, head_dim: int) -> None:
    n_low = n_embd // 2
    w.matrix(block + "attn_q_a", n_low, n_embd)
    w.norm(block + "attn_q_a_norm", n_low)
    w.matrix(block + "attn_q_b", n_head * (head_dim + MLA_ROT), n_low, gain=2.0)
    w.matrix(block + "attn_kv_a_mqa", MLA_LATENT + MLA_ROT, n_embd, gain=2.0)
    w.norm(block + "attn_kv_a_norm", MLA_LATENT)
    for name, rows, columns in (("attn_k_b", MLA_LATENT, head_dim), ("attn_v_b", head_dim, MLA_LATENT)):
        tensor = w.normal(n_head * rows, columns, 1 / math.sqrt(columns))
        w.add(f"{block}{name}.weight", tensor.reshape(n_head, rows, columns))
    w.matrix(block + "attn_output", n_embd, n_head * head_dim)


def _add_t5_layers(w: _Writer, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    w.norm("enc.output_norm", n_embd)
    for side, i in itertools.product(("enc", "dec"), range(n_layer)):
        block = f"{side}.blk.{i}."
        for kind in ("attn_", "cross_attn_") if side == "dec" else ("attn_",):
            w.norm(f"{block}{kind}norm", n_embd)
            for name in "qkvo":
                w.matrix(f"{block}{kind}{name}", n_embd, n_embd, gain=0.7)
        if i == 0:
            w.matrix(block + "attn_rel_b", 32, n_head)
        w.norm(block + "ffn_norm", n_embd)
        for name, rows, columns in (("gate", n_ff, n_embd), ("up", n_ff, n_embd), ("down", n_embd, n_ff)):
            w.matrix(f"{block}ffn_{name}", rows, columns)


def _add_mamba(w: _Writer, block: str, n_embd: int) -> None:
    d_inner, d_state, d_conv, dt_rank = 2 * n_embd, 16, 4, 4
    w.matrix(block + "ssm_in", 2 * d_inner, n_embd)
    w.add(block + "ssm_conv1d.weight", w.normal(d_inner, d_conv, 0.5), quantize=False)
    w.add(block + "ssm_conv1d.bias", w.normal(1, d_inner, 0.1)[0])
    w.matrix(block + "ssm_x", dt_rank + 2 * d_state, d_inner)
    w.add(block + "ssm_dt.weight", w.normal(d_inner, dt_rank, 0.5), quantize=False)
    w.add(block + "ssm_dt.bias", w.normal(1, d_inner, 0.1)[0])
    decay = -np.tile(np.arange(1, d_state + 1, dtype=np.float32), (d_inner, 1))
    w.add(block + "ssm_a", decay, quantize=False)
    w.add(block + "ssm_d", np.ones(d_inner, np.float32))
    w.matrix(block + "ssm_out", n_embd, d_inner)


class _Writer:
    """A GGUF writer that draws, quantises and checks tensors. Shapes are numpy's: rows x columns."""

    def __init__(self, path: Path, arch: str, weight_type: str, seed: int) -> None:
        self.gguf = gguf.GGUFWriter(str(path), arch)
        self.type = gguf.GGMLQuantizationType[weight_type]
        self.rng = np.random.default_rng(seed)
        self.gguf.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def normal(self, rows: int, columns: int, std: float = 1.0) -> np.ndarray:
        return self.rng.standard_normal((rows, columns), np.float32) * np.float32(std)

    def matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False) -> None:
        self.add(name + ".weight", self.normal(rows, columns, gain / math.sqrt(columns)))
        if bias:
            self.add(name + ".bias", self.normal(1, rows, 0.3)[0])

    def norm(self, name: str, n: int, *, bias: bool = False, gain: float = 1.0) -> None:
        self.add(name + ".weight", np.float32(gain) * (1 + self.normal(1, n, 0.1)[0]))
        if bias:
            self.add(name + ".bias", self.normal(1, n, 0.1)[0])

    def add(self, name: str, tensor: np.ndarray, *, quantize: bool = True) -> None:
        # NumPy 2 promotes float32 * np.sqrt(n) to float64, and ggml aborts on an F64 tensor
        assert tensor.dtype == np.float32, (name, tensor.dtype)
        if quantize and tensor.ndim == 2 and self.type != gguf.GGMLQuantizationType.F32:
            self.gguf.add_tensor(name, gguf.quants.quantize(tensor, self.type), raw_dtype=self.type)
        else:
            self.gguf.add_tensor(name, tensor)


def _pieces() -> Iterator[str]:
    """Letters, then syllables, then pairs of syllables: SentencePiece reaches each by merging two pieces."""
    yield from "▁abcdefghijklmnopqrstuvwxyz0123456789"
    syllables = [c + v for c in "tnsrldmhkgbpfvwzjcqx" for v in "eaoiu"]
    yield from syllables
    yield from ("▁" + s for s in syllables)
    yield from (a + b for a, b in itertools.product(syllables, syllables))


def _add_tokenizer(kv: gguf.GGUFWriter, n_vocab: int, defined: Sequence[str]) -> None:
    """SentencePiece ('llama'): <unk> <s> </s>, the 256 bytes, then pieces, the last of which are `defined`, read wherever they stand."""
    kind = gguf.TokenType
    pieces = [*itertools.islice(_pieces(), n_vocab - 259 - len(defined)), *defined]
    kv.add_tokenizer_model("llama")
    kv.add_tokenizer_pre("default")
    kv.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces])
    kv.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(pieces))])
    kinds = [kind.NORMAL] * (len(pieces) - len(defined)) + [kind.USER_DEFINED] * len(defined)
    kv.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256 + kinds)
    kv.add_bos_token_id(1)
    kv.add_eos_token_id(2)
    kv.add_unk_token_id(0)
    kv.add_add_bos_token(True)
    kv.add_add_eos_token(False)


def _add_bpe(kv: gguf.GGUFWriter, n_vocab: int, pre: str) -> None:
    """GPT-2's kind: <s> </s>, the 256 bytes as letters, then two of a letter. So a text's tokens show where it was split."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others have letters behind these
    letters = [*map(chr, shown), *(chr(256 + i) for i in range(256 - len(shown)))]
    pairs = [(letter, letter) for letter in letters[: n_vocab - 258]]
    kind = gguf.TokenType
    kv.add_tokenizer_model("gpt2")
    kv.add_tokenizer_pre(pre)
    kv.add_token_list(["<s>", "</s>", *letters, *map("".join, pairs)])
    kv.add_token_types([kind.CONTROL] * 2 + [kind.NORMAL] * (n_vocab - 2))
    kv.add_token_merges([" ".join(pair) for pair in pairs])
    kv.add_bos_token_id(0)
    kv.add_eos_token_id(1)
    kv.add_add_bos_token(True)
