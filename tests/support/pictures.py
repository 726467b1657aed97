"""Pictures, and a small random model that sees them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np
from tiny_gguf import finish

N_EMBD, N_FF, SIZE, PATCH = 32, 64, 28, 7


def write_projector(path: Path) -> Path:
    """A random vision encoder with LLaVA's projector: pictures of 28 pixels become 16 embeddings of 64 numbers."""
    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(str(path), "clip")
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", "mlp")
    w.add_bool("clip.use_gelu", True)
    for name, value in {
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "block_count": 2,  # the last one is not used
        "projection_dim": 64,
        "attention.head_count": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
    }.items():
        w.add_uint32(f"clip.vision.{name}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    w.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    w.add_array("clip.vision.image_std", [0.25, 0.25, 0.25])

    def add(name: str, *shape: int, around: float = 0.0, scale: float | None = None) -> None:
        scale = shape[-1] ** -0.5 if scale is None else scale
        w.add_tensor(name, (around + scale * rng.standard_normal(shape)).astype(np.float32))

    add("v.patch_embd.weight", N_EMBD, 3, PATCH, PATCH, scale=0.1)
    add("v.class_embd", N_EMBD)
    add("v.position_embd.weight", (SIZE // PATCH) ** 2 + 1, N_EMBD)
    norms = ["v.pre_ln", *(f"v.blk.{i}.ln{k}" for i in range(2) for k in (1, 2))]
    for name in norms:
        add(name + ".weight", N_EMBD, around=1.0)
        add(name + ".bias", N_EMBD)
    for i in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"v.blk.{i}.{name}.weight", N_EMBD, N_EMBD)
            add(f"v.blk.{i}.{name}.bias", N_EMBD)
        for name, rows, columns in (("ffn_up", N_FF, N_EMBD), ("ffn_down", N_EMBD, N_FF)):
            add(f"v.blk.{i}.{name}.weight", rows, columns)
            add(f"v.blk.{i}.{name}.bias", rows)
    add("mm.0.weight", 64, N_EMBD)
    add("mm.0.bias", 64)
    add("mm.2.weight", 64, 64)
    add("mm.2.bias", 64)
    finish(w)
    return path


def png(seed: int, size: int = SIZE) -> bytes:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    out = io.BytesIO()
    out.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)))
    out.write(chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))) + chunk(b"IEND", b""))
    return out.getvalue()


def data_uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()
