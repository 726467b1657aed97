"""The queries and keys that a model's layers rotate, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, close, reference, tolerance

import pypcd
from research.layers import read_layers


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_queries_and_keys_are_the_references_before_rotation(
    arch: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    path, text = tiny(arch), TOKENS[:40]
    ref, llm = reference(path), load(path, "paper", flash_attn=flash_attn)
    layers = read_layers(llm, text)
    assert list(layers) == list(range(ref.n_layer))
    assert llm.pcd is not None
    for il, hidden in enumerate(ref.trace(text).hidden[:-1]):
        q, k, _ = ref._qkv(il, ref._norm(hidden, f"blk.{il}.attn_norm"))
        if arch == "gemma2":  # scales its queries before they are rotated
            q = q * (np.abs(layers[il].q).max() / np.abs(q[-1]).max())
        close(layers[il].q, q[-1], tolerance(path, of=q, flash_attn=flash_attn))
        close(layers[il].k, k, tolerance(path, of=k, flash_attn=flash_attn))
        close(layers[il].theta, ref._rope[il][0], 1e-12)


@pytest.mark.parametrize("arch", ["gpt2", "bloom"])
def test_models_that_rotate_nothing_are_refused(arch: str, tiny: Tiny, load: Load) -> None:
    with pytest.raises(
        pypcd.UnsupportedError, match="none of this model.s layers has queries and keys that are rotated"
    ):
        read_layers(load(tiny(arch), False), TOKENS[:20])


def test_a_text_is_one_micro_batch(tiny: Tiny, load: Load) -> None:
    with pytest.raises(ValueError, match="the text has 100 tokens; allowed: 2 to 64, one micro-batch"):
        read_layers(load(tiny("llama"), False), TOKENS[:100])
