"""Pictures in the prompt: llama-cpp-python's libmtmd turns them into embeddings and decodes these with our library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Load, Tiny, check_contrast, close, native_row, rounding
from llama_cpp.llama_chat_format import Llava15ChatHandler
from pictures import data_uri, png, write_projector

import pypcd


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf")


def question(seed: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": data_uri(png(seed))}}
    return [{"role": "user", "content": [{"type": "text", "text": "bada"}, image, {"type": "text", "text": "what?"}]}]


def answer(llm: pypcd.Llama, seed: int = 0, **kwargs: Any) -> str:
    reply = llm.create_chat_completion(question(seed), max_tokens=8, temperature=0, **kwargs)
    assert reply["usage"]["prompt_tokens"] > 17 + 16, "the picture is a part of the prompt"
    return reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("cache", ["rerotated", "shared"])
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


def test_libmtmd_uses_the_library_with_pcd(projector: Path) -> None:
    import llama_cpp.mtmd_cpp

    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is loaded")
    paths = (fields[5] for fields in (line.split(maxsplit=5) for line in maps.read_text().splitlines()) if fields[5:])
    [loaded] = {path for path in paths if "libllama" in path}
    assert Path(loaded).samefile(llama_cpp.llama_cpp._lib._name)  # which has the hooks, or pypcd would not be here
