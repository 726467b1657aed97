"""What the comparison found, as numbers and as text. Knows nothing of processes, torch or pypcd's engine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]

# Kernels for quantised weights round their inputs to 8 bits: rows differ by about a thousandth (normalised squared
# error). Another model makes tenths. Over-rotation makes more of the rounding the longer the prompt is, so L* may also
# differ by a share of what over-rotation does; a wrong rotation would differ by about all of that.
LIMIT, SHARE = 0.02, 0.1


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        name: as the table has it.
        side: "theirs" or "ours", the module that runs it.
        pcd: fields of PCDConfig; None: plain decoding.
    """

    name: str
    side: str
    pcd: dict[str, Any] | None


# the first of each kind, plain and contrasted, is what pypcd's are compared with
WAYS = (
    Way("transformers", "theirs", None),
    Way("transformers, two passes", "theirs", {}),
    Way("pypcd", "ours", None),
    Way("pypcd, pcd:cache=shared", "ours", {"cache": "shared"}),
    Way("pypcd, pcd", "ours", {}),
)


@dataclasses.dataclass(frozen=True)
class Figures:
    """One way at one length. Ratios are medians over rounds.

    Attributes:
        prompt_tokens_per_second: reading the prompt; with PCD its last token has both rows.
        tokens_per_second: decoding.
        of_plain: time of a token divided by that of the same side's plain decoding.
        prompt_speedup: transformers' time for the prompt divided by this one, plain or two passes as this one is.
        speedup: the same of decoding.
        peak_bytes: the most main memory of its process.
    """

    way: str
    n_prompt: int
    prompt_tokens_per_second: float
    tokens_per_second: float
    of_plain: float
    prompt_speedup: float
    speedup: float
    peak_bytes: int


def figures(
    n_prompt: int, prompts: dict[str, list[float]], steps: dict[str, list[float]], peaks: dict[str, int]
) -> list[Figures]:
    """
    Args:
        prompts: seconds for the prompt by way, round by round.
        steps: seconds for a token.
        peaks: bytes.
    """
    made = []
    for way in WAYS:
        plain = next(other.name for other in WAYS if other.side == way.side and other.pcd is None)
        theirs = next(
            other.name for other in WAYS if other.side == "theirs" and (other.pcd is None) == (way.pcd is None)
        )
        made.append(
            Figures(
                way=way.name,
                n_prompt=n_prompt,
                prompt_tokens_per_second=n_prompt / statistics.median(prompts[way.name]),
                tokens_per_second=1 / statistics.median(steps[way.name]),
                of_plain=_ratio(steps[way.name], steps[plain]),
                prompt_speedup=_ratio(prompts[theirs], prompts[way.name]),
                speedup=_ratio(steps[theirs], steps[way.name]),
                peak_bytes=peaks[way.name],
            )
        )
    return made


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others))


HEAD = ("", "prompt tok/s", "decode tok/s", "time / plain", "prompt speedup", "decode speedup", "peak MiB")


def cells(found: Sequence[Figures]) -> list[tuple[str, ...]]:
    """The lines of a table below HEAD."""
    return [
        (
            f.way,
            f"{f.prompt_tokens_per_second:.0f}",
            f"{f.tokens_per_second:.1f}",
            f"{f.of_plain:.2f}x",
            f"{f.prompt_speedup:.2f}x",
            f"{f.speedup:.2f}x",
            f"{f.peak_bytes / 2**20:.0f}",
        )
        for f in found
    ]


# -- do both sides compute the same? ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near pypcd's rows after the prompt are to transformers'. Differences are normalised squared errors.

    Attributes:
        plain: of L.
        second: of L*, with cache=shared.
        effect: of L* and L on transformers' side: what there is to see.
        n_tokens: tokens decoded.
        same_plain, same_contrasted: after how many of them both sides would choose the same next one.
    """

    plain: float
    second: float
    effect: float
    n_tokens: int
    same_plain: int
    same_contrasted: int

    @property
    def allowed(self) -> float:
        """Of L*."""
        return max(LIMIT, SHARE * self.effect)

    @property
    def agrees(self) -> bool:
        return self.plain <= LIMIT and self.second <= self.allowed

    def __str__(self) -> str:
        rows = (
            f"L by {self.plain:.1g} and L* by {self.second:.1g} (normalised squared error; allowed: {LIMIT} and "
            f"{self.allowed:.1g}), where L* and L differ by {self.effect:.1g}"
        )
        tokens = f"the same token after {self.same_plain} of {self.n_tokens} plain and {self.same_contrasted} contrasted ones"
        if self.agrees:
            return f"Both sides compute the same: their rows differ as rounding does, {rows}; {tokens}."
        return f"The sides do not compute the same: their rows differ by more than rounding, {rows}; {tokens}."


def agreement(rows: dict[str, Rows], chosen: dict[str, list[int]]) -> Agreement:
    """
    Args:
        rows: the logits after the prompt by way, L and with PCD L*.
        chosen: what each would choose after each of the same tokens.
    """
    plain, passes, ours, shared, _ = (way.name for way in WAYS)
    return Agreement(
        plain=squared_error(rows[ours][0], rows[plain][0]),
        second=squared_error(rows[shared][1], rows[passes][1]),
        effect=squared_error(rows[passes][1], rows[passes][0]),
        n_tokens=len(chosen[plain]),
        same_plain=sum(a == b for a, b in zip(chosen[ours], chosen[plain])),
        same_contrasted=sum(a == b for a, b in zip(chosen[shared], chosen[passes])),
    )


def squared_error(row: Rows, wanted: Rows) -> float:
    """The squared difference over the squared row, each less its mean, which no probability depends on."""
    n = min(len(row), len(wanted))  # a file may pad the vocabulary
    a, b = row[:n].astype(np.float64), wanted[:n].astype(np.float64)
    a, b = a - a.mean(), b - b.mean()
    return float(((a - b) ** 2).sum() / (b**2).sum())
