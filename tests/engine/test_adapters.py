"""A LoRA beside a model: a right one changes the rows as the merged weights would, with PCD; a wrong one is refused in a sentence."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, close, follow, native_row, rounding
from tiny_gguf import write_lora

import pypcd

ALPHA, SCALE = 6.0, 0.5
Q, DOWN, EMBD = "blk.0.attn_q.weight", "blk.1.ffn_down.weight", "token_embd.weight"
SHAPES: dict[str, tuple[int, ...]] = {
    f"{Q}.lora_a": (4, 64),
    f"{Q}.lora_b": (64, 4),
    f"{DOWN}.lora_a": (2, 128),
    f"{DOWN}.lora_b": (64, 2),
    f"{EMBD}.lora_a": (384, 3),  # of embeddings both are transposed
    f"{EMBD}.lora_b": (64, 3),
}


def merged(model: Path, lora: dict[str, np.ndarray], path: Path) -> Path:
    """The model with W + scale * alpha / rank * B A, added in float64."""
    shutil.copy(model, path)
    for tensor in gguf.GGUFReader(str(path), "r+").tensors:
        if f"{tensor.name}.lora_a" in lora:
            a, b = (lora[f"{tensor.name}.lora_{which}"].astype(np.float64) for which in "ab")
            rank = b.shape[-1]
            change = a @ b.T if tensor.name == EMBD else b @ a
            tensor.data[:] = tensor.data.astype(np.float64) + SCALE * ALPHA / rank * change
    return path


@pytest.mark.parametrize(
    ("pcd", "engine"),
    [({}, "native"), ({"window": 16, "perturbation": "none"}, "native"), ({"cache": "shared"}, "stock")],
    ids=str,
)
def test_rows_are_those_of_the_merged_weights(
    pcd: dict[str, Any], engine: str, tmp_path: Path, tiny: Tiny, load: Load
) -> None:
    """The merged model in float64, with PCD; and the merged model in llama.cpp, without."""
    lora = write_lora(tmp_path / "lora.gguf", SHAPES, alpha=ALPHA)
    whole = merged(tiny("llama"), lora, tmp_path / "merged.gguf")
    llm = load(tiny("llama"), pcd, engine=engine, lora_path=str(tmp_path / "lora.gguf"), lora_scale=SCALE)
    follow(llm, whole, TOKENS, 60)
    llm.pcd = False
    llm.reset()
    llm.eval(TOKENS[:60])
    plain, other = load(tiny("llama"), False), load(whole, False)
    plain.eval(TOKENS[:60]), other.eval(TOKENS[:60])
    # three products more of numbers of the same size: as many roundings again
    close(native_row(llm), native_row(other), 2 * rounding(whole))
    assert np.abs(native_row(llm) - native_row(plain)).max() > 0.5, "the LoRA must matter, or this test shows nothing"


def test_a_second_context_which_would_not_have_it_is_refused(tmp_path: Path, tiny: Tiny, load: Load) -> None:
    """Before it is opened, and at the next row if the LoRA comes later; other contexts are not concerned."""
    write_lora(tmp_path / "lora.gguf", SHAPES)
    llm = load(tiny("llama"), False, engine="stock", lora_path=str(tmp_path / "lora.gguf"))
    with pytest.raises(pypcd.UnsupportedError, match="does not have the LoRA or control vector of this one"):
        llm.pcd = "paper:cache=separate"
    other = load(tiny("llama"), "paper:cache=separate", engine="stock")
    follow(other, tiny("llama"), TOKENS, 60)
    vector = (ctypes.c_float * 128)(*[1.0] * 128)
    assert llama_cpp.llama_set_adapter_cvec(other.ctx, vector, 65, 65, 1, 2) != 0, "rows of this model have 64 numbers"
    other.eval(TOKENS[60:61])
    assert llama_cpp.llama_set_adapter_cvec(other.ctx, vector, 128, 64, 1, 2) == 0
    with pytest.raises(pypcd.UnsupportedError, match="does not have the LoRA or control vector of this one"):
        other.eval(TOKENS[61:62])


def test_a_context_with_one_is_not_opened_again_for_over_rotation(tiny: Tiny, load: Load) -> None:
    """A LoRA or a control vector that came through the low-level API would be lost."""
    llm = load(tiny("llama"), False, engine="stock")
    vector = (ctypes.c_float * 128)(*[1.0] * 128)
    assert llama_cpp.llama_set_adapter_cvec(llm.ctx, vector, 128, 64, 1, 2) == 0
    for ask in llm.check_pcd, lambda setting: setattr(llm, "pcd", setting):
        with pytest.raises(pypcd.UnsupportedError, match="opened for plain decoding.*open the model with the setting"):
            ask("paper")
    assert llm.pcd is None


def test_a_lora_that_does_not_fit_is_missing_or_is_cut_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    """With llama.cpp's reason; llama_cpp goes on without it."""
    write_lora(tmp_path / "other.gguf", SHAPES, arch="qwen2")
    write_lora(tmp_path / "columns.gguf", {f"{Q}.lora_a": (4, 32), f"{Q}.lora_b": (64, 4)})
    write_lora(tmp_path / "lora.gguf", SHAPES)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "lora.gguf").read_bytes()[:-400])
    wanted = {
        "other.gguf": "model arch and LoRA arch mismatch",
        "columns.gguf": "incorrect shape",
        "cut.gguf": "not within the file bounds",
        "nowhere.gguf": "No such file",
    }
    for name, reason in wanted.items():
        with pytest.raises(pypcd.ModelError, match=f"the LoRA {tmp_path / name} cannot be used with .*{reason}"):
            pypcd.Llama(tiny("llama"), lora_path=str(tmp_path / name), n_ctx=256)
