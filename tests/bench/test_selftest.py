"""The self-test of `pypcd info`: a right engine passes on any model, however coarse its rounding, and a wrong one fails."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from conftest import Tiny, native_row
from tiny_gguf import ATTENTION_ARCHS

import pypcd
from pypcd import PCDConfig
from pypcd.bench import self_test, selftest
from pypcd.engine import _native

Load = Callable[..., pypcd.Llama]
ARCH_MODELS = sorted(Path(os.environ["PYPCD_ARCH_MODELS"]).glob("*.gguf")) if "PYPCD_ARCH_MODELS" in os.environ else []

CHECKS = {
    "beta": "beta=0 decodes as without PCD",
    "still": "base_ratio=1 leaves the twin equal to its token",
    "ways": "fused equals alternate",
    "effect": "the twin differs from its token",
}
# what is done to a setting on its way to the library, and the check that notices it
FAULTS: dict[str, Callable[[PCDConfig], PCDConfig]] = {
    "beta": lambda c: c.replace(beta=2.5) if c.beta == 0 else c,
    "still": lambda c: c.replace(base_ratio=0.01) if c.base_ratio == 1 else c,
    "ways": lambda c: c.replace(cache="shared", alpha=0.5) if c.evaluation == "alternate" else c,
    "effect": lambda c: c.replace(base_ratio=1.0),
}


def failed(result: dict[str, Any]) -> list[str]:
    assert result["checks"], result
    return [check["what"] for check in result["checks"] if not check["passed"]]


def break_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library computes the twins of another setting."""
    native = _native.native_params
    monkeypatch.setattr(_native, "native_params", lambda c, **more: native(FAULTS[fault](c), **more))


def round_coarsely(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every evaluation is off by this share of the logits' standard deviation, and each by another error: as on a model whose
    small differences grow from layer to layer."""
    rng, logits = np.random.default_rng(1), pypcd.Llama.pcd_logits

    def off(row: Any) -> Any:
        shown = np.isfinite(row)
        return (row + share * row[shown].std() * rng.normal(size=row.shape)).astype(np.float32)

    def rows(llm: pypcd.Llama, i: int = -1) -> Any:
        exact = logits(llm, i)
        standard = off(exact.standard)
        moved = {"standard": standard, "contrasted": exact.contrasted + (standard - exact.standard)}
        return dataclasses.replace(exact, **moved, local=off(exact.local))

    monkeypatch.setattr(selftest.engine, "row", lambda llm: off(native_row(llm)))
    monkeypatch.setattr(pypcd.Llama, "pcd_logits", rows)


@pytest.mark.parametrize(("engine", "weight_type"), [("native", "F32"), ("native", "Q4_0"), ("stock", "Q4_0")])
@pytest.mark.parametrize("arch", ATTENTION_ARCHS)
def test_it_passes_on_every_kind_of_model(arch: str, weight_type: str, engine: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny(arch, weight_type=weight_type), False, f16=True, engine=engine)
    assert failed(self_test(llm)) == [] and llm.pcd is None


@pytest.mark.parametrize(("arch", "n_layer"), [("gemma3", 48), ("smollm3", 24)])  # with sliding windows, and without
def test_it_passes_where_rounding_grows_through_many_layers(arch: str, n_layer: int, tiny: Tiny, load: Load) -> None:
    assert failed(self_test(load(tiny(arch, weight_type="Q4_0", n_layer=n_layer), False, f16=True))) == []


@pytest.mark.skipif(not ARCH_MODELS, reason="PYPCD_ARCH_MODELS does not name a folder; scripts/test does")
@pytest.mark.parametrize("path", ARCH_MODELS, ids=lambda path: path.stem)
def test_it_passes_on_llama_cpps_architectures(path: Path) -> None:
    try:
        llm = pypcd.Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1)
    except pypcd.PCDError as error:
        pytest.skip(f"not a model that decodes text: {error}")
    result = self_test(llm)
    llm.close()
    assert "skipped" in result or failed(result) == []


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_it_passes_with_coarse_rounding_and_a_wrong_twin_fails(
    share: float, tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(tiny("llama"), False, f16=True)
    if share:
        round_coarsely(share, monkeypatch)
    assert failed(self_test(llm)) == []
    for fault, what in CHECKS.items():
        with monkeypatch.context() as patch:
            break_it(fault, patch)
            assert failed(self_test(llm)) == [what]


def test_where_plain_decoding_is_noise_nothing_is_told(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny("llama"), False, f16=True)
    round_coarsely(0.5, monkeypatch)
    result = self_test(llm)
    assert result["checks"] == [] and "plain decoding of this model differs from itself by 0.6" in result["skipped"]


def test_info_says_what_failed_and_ends_with_status_1(tiny: Tiny, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it("ways", monkeypatch)
    lines = run("info", tiny("llama"), status=1)[0].splitlines()
    found = [line.partition(" (")[0] for line in lines if line.startswith("FAIL")]
    assert found == [f"FAIL           {CHECKS['ways']}"]
