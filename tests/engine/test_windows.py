"""Over-rotated twins with a window: held to the float64 reference, and many windows in one batch to each alone."""

from __future__ import annotations

from typing import Any

import llama_cpp
import pytest
from batches import Native, Setting, ask, decode_batch, decode_in, set_seq
from conftest import TOKENS, Load, Tiny, check_rows, close, tolerance, turn
from test_engine import EVALUATIONS, SCALED
from tiny_gguf import HYBRID_ARCHS, ROPE_ARCHS

import pypcd
from pypcd.engine import _bindings as _native

OK = (_native.OK, "")
FLASH = {"flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED}


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("name", [*ROPE_ARCHS, *HYBRID_ARCHS, *SCALED])
def test_the_rows_are_the_references(name: str, evaluation: str, flash_attn: bool, tiny: Tiny, load: Load) -> None:
    arch, kwargs = SCALED.get(name, (name, {}))
    path = tiny(arch, **kwargs)
    llm = load(path, {"window": 20, "evaluation": evaluation}, n_batch=32, flash_attn=flash_attn)
    for first, last in ((0, 100), (100, 101), (101, 102)):
        llm.eval(TOKENS[first:last])
        check_rows(llm, path, TOKENS[:last])


@pytest.mark.parametrize("flash", [{}, FLASH], ids=["", "flash"])
def test_64_sequences_with_windows_of_their_own_have_the_rows_of_each_alone(
    flash: dict[str, Any], native: Native
) -> None:
    """One has no perturbation, one no PCD, and the cells of some lie between those of others."""
    sizes: dict[str, Any] = {"n_seq_max": 64, "n_ctx": 4096, "n_batch": 4096, "n_ubatch": 256, **flash}
    base: Setting = {"window": 9, "evaluation": "fused"}
    own = {seq: {**base, "window": 1 + 5 * seq, "n_sink": seq % 4} for seq in range(1, 64)}
    own[7] |= {"perturbation": "none"}
    together, alone = native("llama", base, **sizes), native("llama", base, **{**sizes, "n_seq_max": 1})
    text = {seq: [TOKENS[(7 * seq + i) % len(TOKENS)] for i in range(40)] for seq in range(64)}
    for seq, setting in own.items():
        assert set_seq(together, seq, None if seq == 11 else setting) == OK
    for i in range(37):
        assert decode_batch(together, [(text[seq][i], i, [seq], False) for seq in text]) == 0
    for i in range(37, 40):
        assert decode_batch(together, [(text[seq][i], i, [seq], True) for seq in text]) == 0
    # either may be as far from the exact rows as this
    limit = (
        2 * tolerance(together.path, 40, flash_attn=True) * turn(together.path, pypcd.PCDConfig())
        if flash
        else together.limit
    )
    for seq in text:
        if seq == 11:
            assert not _native.pcd_get_logits_ith(together.ctx, seq, 1)
            continue
        llama_cpp.llama_memory_clear(alone.memory, True)
        assert ask(alone, own.get(seq, base)) == OK
        decode_in([alone], text[seq][:39], out=[])
        decode_in([alone], text[seq][39:])
        close(together.rows(seq), alone.rows(), limit)
