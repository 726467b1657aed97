"""Pictures in the prompt: llama-cpp-python's libmtmd turns them into embeddings and decodes these with our library."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import Load, Tiny, check_contrast, close, native_row, rounding, run_python
from llama_cpp.llama_chat_format import Llava15ChatHandler
from own_process import run

import pypcd

N_EMBD, N_FF, SIZE, PATCH = 32, 64, 28, 7


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random vision encoder with LLaVA's projector: pictures of 28 pixels become 16 embeddings of 64 numbers."""
    path, rng = tmp_path_factory.mktemp("vision") / "mmproj.gguf", np.random.default_rng(1)
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
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def picture(seed: int) -> str:
    """A PNG of random pixels as a data URI."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    out = io.BytesIO()
    out.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)))
    out.write(chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))) + chunk(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def question(seed: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": picture(seed)}}
    return [{"role": "user", "content": [{"type": "text", "text": "bada"}, image, {"type": "text", "text": "what?"}]}]


def answer(llm: pypcd.Llama, seed: int = 0, **kwargs: Any) -> str:
    reply = llm.create_chat_completion(question(seed), max_tokens=8, temperature=0, **kwargs)
    assert reply["usage"]["prompt_tokens"] > 17 + 16, "the picture is a part of the prompt"
    return reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("cache", ["rerotated", "shared", "separate"])
def test_a_picture_is_answered_with_pcd(cache: str, projector: Path, tiny: Tiny, load: Load) -> None:
    def model(pcd: Any, **kwargs: Any) -> pypcd.Llama:
        handler = Llava15ChatHandler(str(projector), verbose=False)
        return load(tiny("llama"), pcd, chat_handler=handler, n_ctx=512, n_batch=128, **kwargs)

    plain, fused, alternate = model(False), model({"cache": cache}), model({"cache": cache, "evaluation": "alternate"})
    assert answer(plain, 0) != answer(plain, 1), "what is in the picture must matter, or this test shows nothing"
    for seed in (0, 1):
        assert answer(fused, seed) != answer(plain, seed)
        rows = fused.pcd_logits()
        assert np.abs(rows.standard - rows.local).max() > 0.05
        check_contrast(rows, fused.pcd, native_row(fused))
        assert answer(fused, seed, pcd=False) == answer(plain, seed)
        assert answer(fused, seed, pcd={"beta": 0}) == answer(plain, seed)
        assert answer(fused, seed, pcd={"base_ratio": 1}) == answer(plain, seed)
    assert answer(alternate, 0) == answer(fused, 0)
    close(alternate.pcd_logits().local, fused.pcd_logits().local, rounding(tiny("llama")))


def test_a_projector_that_is_missing_or_damaged_is_refused_when_the_model_is_opened(
    projector: Path, tmp_path: Path, tiny: Tiny
) -> None:
    """In a process: at a missing tensor libmtmd ends it."""
    data = projector.read_bytes()
    made = {
        "mm": data.replace(b"mm.2.weight", b"mm.9.weight"),
        "layer": data.replace(b"v.blk.0.attn_q.weight", b"v.blk.7.attn_q.weight"),
        "head": data[:300],
        "text": b"<html>",
    }
    for name, content in made.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    tries = [*(tmp_path / f"{name}.gguf" for name in made), tiny("llama"), tmp_path]
    lines = run(
        tiny("llama"),
        "from llama_cpp.llama_chat_format import Llava15ChatHandler\n"
        + "\n".join(
            f"said(lambda: new(chat_handler=Llava15ChatHandler({str(path)!r}, verbose=False), n_ctx=512, n_batch=128)"
            f".create_chat_completion({question(0)!r}, max_tokens=2))"
            for path in tries
        )
        + f"""
handler = Llava15ChatHandler({str(tmp_path / "text.gguf")!r}, verbose=False); os.remove(handler.clip_model_path)
said(lambda: new(chat_handler=handler))""",
    )
    for line, message in zip(
        lines,
        [
            "ModelError: the projector .* is damaged: it has no mm.2.weight",
            "ModelError: the projector .* is damaged: it has no v.blk.0.attn_q.weight",
            "ModelError: the projector .* is not a GGUF file, or is damaged",
            "ModelError: the projector .* is not a GGUF file, or is damaged",
            "ModelError: the projector .* is of the architecture 'llama'; allowed: 'clip'",
            "ModelError: the projector .* is a folder",
            "FileNotFoundError: there is no projector .* file",
        ],
    ):
        assert re.match(message, line), line
    assert len(lines) == len(tries) + 1


def test_libmtmd_uses_the_library_with_pcd(projector: Path) -> None:
    import llama_cpp.mtmd_cpp

    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is loaded")
    paths = (fields[5] for fields in (line.split(maxsplit=5) for line in maps.read_text().splitlines()) if fields[5:])
    [loaded] = {path for path in paths if "libllama" in path}
    assert Path(loaded).samefile(llama_cpp.llama_cpp._lib._name)  # which has the hooks, or pypcd would not be here


def test_it_does_so_too_where_llama_cpp_was_imported_before_pypcd(projector: Path, tiny: Tiny) -> None:
    """The stock library is loaded then, with the soname that libmtmd names."""
    if sys.platform != "linux":
        pytest.skip("it is refused there")
    code = """if True:
        import json, sys
        from llama_cpp.llama_chat_format import Llava15ChatHandler
        import pypcd
        llm = pypcd.Llama(sys.argv[1], pcd="paper", chat_handler=Llava15ChatHandler(sys.argv[2], verbose=False), n_ctx=512,
                          n_batch=128, n_threads=1, n_threads_batch=1)
        reply = llm.create_chat_completion(json.loads(sys.argv[3]), max_tokens=8, temperature=0)
        print(reply["choices"][0]["message"]["content"].encode(), llm.pcd_stats().n_twins)"""
    said = []
    for program in (code, f"import pypcd\n{code}", code.replace('pcd="paper"', "pcd=False")):
        done = run_python(program, tiny("llama"), projector, json.dumps(question(0)))
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] != said[2]
