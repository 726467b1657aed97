"""The settings that tune() searches, in the order in which it tries them. Knows nothing of models or answers.

A setting is a *view*, which is what makes L* (window, rotation, cache), and a way to contrast it: how strong, with which
cut, from which position on, and whether also where the model is sure of its answer's beginning. A view costs another
pass over each question; all ways to contrast it come for nothing then (`_screen`). So views are in the order of what they
promise: twins with a window, which gain most on the released model tried so far; gentle over-rotation; the other readings
of the cache; and what the presets have besides.

gamma is the default's: beside a cut, it decides next to nothing. Of a preset with a larger one (blog) there is only the
view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pypcd.config import Cache, PCDConfig
from pypcd.lab.recorded import view_of
from pypcd.settings import PRESETS

__all__ = ["K", "floors", "settings", "views"]

K = 32
"""Tokens of each row that have to be known to judge every setting here."""

_WINDOWS = (64, 32, 128, 256, 512)
_ROTATIONS = ((0.1, 0.2), (0.5, 0.2), (0.01, 0.2), (0.1, 0.5))  # base_ratio, alpha; the paper's are 0.0001, 0.2
_CACHES: tuple[Cache, ...] = ("shared", "separate")
# the mild ones first
_STRENGTHS: tuple[Mapping[str, Any], ...] = (
    *({"adaptive": "jsd", "beta": beta} for beta in (1.0, 2.5, 5.0, 10.0)),
    *({"beta": beta} for beta in (0.5, 1.0, 1.5, 2.5)),
)
_CUTS = (0.5, 0.3, 0.1, 0.0)
_SURE = (2.25, 1.5, 0.0)  # values of min_first_entropy
_STEP, _SPACE = 32, 1.2  # of floors: tokens; how far they are from prompts, as a factor


def views(lengths: Sequence[int], *, quick: bool = False) -> list[PCDConfig]:
    """The views, the most promising first.

    Args:
        lengths: tokens of the prompts. A window of more than half of the longest one is left out.
        quick: only three windows, one over-rotation and the paper's.
    """
    windows = [PCDConfig.windowed().replace(window=window) for window in _WINDOWS]
    gentle = [PCDConfig(base_ratio=ratio, alpha=alpha) for ratio, alpha in _ROTATIONS]
    found = [*windows[:3], gentle[0], PCDConfig.paper()]
    if not quick:
        shared = [base.replace(cache=cache) for cache in _CACHES for base in (gentle[0], PCDConfig.paper())]
        found = [*windows, *gentle, PCDConfig.paper(), *shared, *map(PCDConfig.preset, PRESETS)]
    unique = list(dict.fromkeys(map(view_of, found)))
    return [view for view in unique if view.window is None or view.window <= max(lengths) // 2]


def floors(lengths: Sequence[int]) -> tuple[int, ...]:
    """Values of min_context that leave the shorter ones of these prompts alone and no others: about the geometric mean of
    each two neighbouring lengths, a power of two if one is near. Prompts may be somewhat shorter than their length, so
    lengths near to each other have none.
    """
    known = sorted(set(lengths))
    return tuple(_between(a, b) for a, b in zip(known, known[1:]) if b >= _SPACE**2 * a)


def _between(a: int, b: int) -> int:
    middle = math.sqrt(a * b)
    power = 2 ** round(math.log2(middle))
    return power if _SPACE * a <= power <= b / _SPACE else _STEP * round(middle / _STEP)


def settings(view: PCDConfig, floors: Sequence[int] = ()) -> list[PCDConfig]:
    """All ways to contrast a view, the mild ones before the strong ones: of settings with the same results the first one is
    to be preferred. Presets that are not among them come last.

    Args:
        floors: values of min_context; the higher, the more prompts are left alone. 0 is tried in any case.
    """
    presets = [
        preset
        for preset in map(PCDConfig.preset, PRESETS)
        if view_of(preset) == view and preset.gamma <= K and preset.min_context <= max((0, *floors))
    ]
    grid = [
        view.replace(**strength, relative_top=cut, min_first_entropy=least, min_context=floor)
        for floor in (*sorted(floors, reverse=True), 0)
        for least in _SURE
        for strength in _STRENGTHS
        for cut in _CUTS
    ]
    return list(dict.fromkeys([*grid, *presets]))
