"""scripts/recipes/compare_transformers.py: when both sides compute the same, and what is timed. The run itself needs torch and
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import module_at

FILE = Path(__file__).parents[2] / "scripts/recipes/compare_transformers.py"
if not FILE.exists():
    pytest.skip("the scripts lie in a checkout only", allow_module_level=True)

program = module_at(FILE)
PLAIN, PASSES, OURS, SHARED, REROTATED = program.WAYS


def sides(noise: float = 0.0, shift: float = 0.0) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(0)
    first, second, off = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
    rows = {PLAIN: [first], PASSES: [first, second], OURS: [first + noise * off + shift]}
    rows[SHARED] = rows[REROTATED] = [first, second + noise * off + shift]
    return {name: {"rows": np.stack(r), "chosen": [1, 2, 3]} for name, r in rows.items()}


def test_sides_agree_if_their_rows_differ_by_rounding_alone() -> None:
    found = sides(0.1, shift=5.0)  # no probability depends on a shift of all logits
    found[OURS]["chosen"] = [1, 2, 4]
    agreement = program.Agreement.of(found)
    assert agreement and agreement.same == (2, 3)
    assert agreement.plain == pytest.approx(0.01, rel=0.2) and agreement.effect == pytest.approx(2, rel=0.2)
    for way, i in ((OURS, 0), (SHARED, 1)):  # one row that is off is enough for them not to agree
        found = sides()
        found[way]["rows"] = found[way]["rows"].copy()
        found[way]["rows"][i] += 0.6 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
        assert not program.Agreement.of(found)


def test_only_the_second_row_may_be_off_by_a_share_of_what_over_rotation_does() -> None:
    found = sides(0.3)  # 0.09, where L* and L differ by 2
    assert not program.Agreement.of(found)
    found[OURS] = found[PLAIN]
    assert program.Agreement.of(found) and program.Agreement.of(found).second > program.LIMIT
    found[PASSES] = {**found[PASSES], "rows": found[SHARED]["rows"][[0, 0]]}  # over-rotation without any effect
    assert not program.Agreement.of(found)
