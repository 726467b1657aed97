"""The settings of Positional Contrastive Decoding. Knows nothing of models or libraries."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Union

from pypcd._errors import did_you_mean
from pypcd._profile import is_profile, read_profile

__all__ = ["PCDConfig", "PCDSetting", "parse_pcd"]

CACHES = ("rerotated", "shared", "separate")
EVALUATIONS = ("fused", "alternate")
TRANSITIONS = ("exponential", "none")
PERTURBATIONS = ("over-rotation", "noise", "none")
BANDS = ("low", "high", "all")
KEY_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

_OFFSET = 2**20  # positions


@dataclasses.dataclass(frozen=True)
class PCDConfig:
    """How the local-aware logits L* are made and how they are contrasted with the standard logits L.

    The result is ``(1 + beta) L - beta L*`` (Eq. 6 of the paper, arXiv 2506.08371) on the plausible tokens of L;
    the others are excluded. The defaults are the paper's.

    Args:
        alpha: slope of the transition function T(x) = 2 - exp(alpha x) (Eq. 4), 0 to 10. 0 leaves L* = L.
        beta: contrast intensity, 0 to 1000. 0 decodes plainly among the top gamma.
        gamma: how many of the most probable tokens of L stay in play, at least 1. 1 is greedy decoding.
        base_ratio: B'/B, more than 0 and at most 1. 1 leaves L* = L.
        relative_top: keep only tokens with p(v) >= relative_top * max p beside the top gamma, 0 to 1. 0 is the
            paper; 0.1 is contrastive decoding's and DoLa's plausibility cut.
        cache: what the twin sees of the prompt. "rerotated": the cached keys turned to theta* (Eq. 5 on the shared
            prompt cache; keys and values take 1.5 times the memory); "shared": the cached keys as they are;
            "separate": keys and values of a second, over-rotated evaluation of the whole prompt (Eq. 5 in every
            layer; a second prefill, twice the memory).
        evaluation: "fused": token and twin in one batch, the weights read once; "alternate": one after the other,
            skipping the twin when a single token is plausible.
        transition: "exponential" (Eq. 4) or "none": theta* = theta'.
        perturbation: "over-rotation" (the paper), "noise" (the method's first version: noise on cos and sin of the
            first component of each pair; with cache "shared" or "separate") or "none" (the twin differs by its window
            alone; exists for models without RoPE too).
        window: the twin attends to the last `window` positions, its own included, and the first n_sink; None: to all.
        n_sink: first positions a windowed twin still sees.
        band: which frequencies are perturbed. "low" is the paper; "high": the table of Eq. 4 in reverse order; "all":
            of both the larger. Of noise: the slower half of the pairs, the faster, or all, as in the first version.
        type_k_over: type of the second keys, "f16", "q8_0", "q4_0" ...; None: that of the cached keys.
        noise: its standard deviation, 0 to 10.
        offset_min: with noise, the twin's position is also moved by a random number from offset_min to offset_max.
        offset_max: see offset_min; 0 and 0 leave the position.
        seed: of noise and offset, which are functions of seed, position and layer: evaluated again, they are the same.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and what is allowed.
    """

    alpha: float = 0.2
    beta: float = 2.5
    gamma: int = 30
    base_ratio: float = 1e-4
    relative_top: float = 0.0
    cache: str = "rerotated"
    evaluation: str = "fused"
    transition: str = "exponential"
    perturbation: str = "over-rotation"
    window: int | None = None
    n_sink: int = 4
    band: str = "low"
    type_k_over: str | None = None
    noise: float = 0.03
    offset_min: int = 0
    offset_max: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self._number("alpha", 0, 10)
        self._number("beta", 0, 1000)
        self._number("base_ratio", 0, 1, open_below=True)
        self._number("relative_top", 0, 1)
        self._integer("gamma", 1)
        self._integer("n_sink", 0)
        if self.window is not None:
            self._integer("window", 1)
        self._number("noise", 0, 10)
        self._integer("offset_min", -_OFFSET, _OFFSET)
        self._integer("offset_max", self.offset_min, _OFFSET)
        self._integer("seed", 0)
        self._choice("cache", CACHES)
        self._choice("evaluation", EVALUATIONS)
        self._choice("transition", TRANSITIONS)
        self._choice("perturbation", PERTURBATIONS)
        self._choice("band", BANDS)
        if self.type_k_over is not None:
            self._choice("type_k_over", KEY_TYPES)
        if self.perturbation == "noise" and self.cache == "rerotated":
            raise ValueError(
                "cache is 'rerotated', which turns keys to other frequencies, and perturbation=\"noise\" has none; "
                "allowed with it: 'shared', 'separate'"
            )
        if self.perturbation == "none" and self.window is None:
            raise ValueError(
                'window is None, but perturbation="none" leaves the twin equal to its token without one; set window to 1 or more'
            )

    # -- presets ---------------------------------------------------------------------------------------------------

    @classmethod
    def paper(cls) -> PCDConfig:
        """The paper's optimum: alpha 0.2, beta 2.5, gamma 30, base_ratio 1e-4."""
        return cls()

    @classmethod
    def cautious(cls) -> PCDConfig:
        """Milder, with a plausibility cut: beta 1.5, relative_top 0.1."""
        return cls(beta=1.5, relative_top=0.1)

    @classmethod
    def windowed(cls) -> PCDConfig:
        """A twin that sees the last 64 positions, without any rotation."""
        return cls(perturbation="none", window=64)

    @classmethod
    def blog(cls) -> PCDConfig:
        """The method's first version: noise on cos and sin of all pairs, the cached keys as they are, beta 1.5, gamma 100."""
        return cls(perturbation="noise", cache="shared", band="all", beta=1.5, gamma=100)

    @classmethod
    def preset(cls, name: str) -> PCDConfig:
        """The preset called `name`: "paper", "blog", "cautious" or "window".

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"pcd={name!r} is no preset{did_you_mean(name, PRESETS)}; allowed: {', '.join(PRESETS)}")
        return getattr(cls, PRESETS[name])()

    # -- making one from another -----------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> PCDConfig:
        """A copy with some fields changed.

        Raises:
            TypeError: a field does not exist; the message names the nearest.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise TypeError(
                    f"PCDConfig has no field {name!r}{did_you_mean(name, names)}; its fields: {', '.join(names)}"
                )
        return dataclasses.replace(self, **changes)

    @classmethod
    def resolve(cls, setting: PCDSetting, base: PCDConfig | None = None) -> PCDConfig | None:
        """What a user's `pcd=` means: None and False are off, True is `base` or the default, a string is a preset or
        the file of a profile (.json, as `pypcd tune` writes it), a mapping changes fields of `base` or the default."""
        if setting is None or setting is False:
            return None
        if setting is True:
            return base or cls()
        if isinstance(setting, PCDConfig):
            return setting
        if isinstance(setting, str):
            return cls.from_profile(setting) if is_profile(setting) else cls.preset(setting)
        if isinstance(setting, Mapping):
            return (base or cls()).replace(**setting)
        raise TypeError(
            f"pcd={setting!r} is a {type(setting).__name__}; allowed: bool, a preset's name, a mapping, PCDConfig"
        )

    @classmethod
    def from_profile(cls, path: str) -> PCDConfig | None:
        """The setting of a profile that `pypcd tune` wrote; None where it found PCD best left off.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no profile, or has a value out of range.
        """
        changes = read_profile(path)
        try:
            return None if changes is None else cls().replace(**changes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """The fields that differ from the default, as `beta=1.5 window=64`; "default" if none does."""
        changed = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return " ".join(changed) or "default"

    # -- checks ----------------------------------------------------------------------------------------------------

    def _number(self, name: str, low: float, high: float, *, open_below: bool = False) -> None:
        value = getattr(self, name)
        allowed = f"{'more than' if open_below else 'from'} {low} {'and at most' if open_below else 'to'} {high}"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's scalars are Real too
            raise ValueError(f"{name} is {value!r}, not a number; allowed: {allowed}")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or not low <= value <= high or (open_below and value == low):
            raise ValueError(f"{name} is {value:g}; allowed: {allowed}")
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value.__index__() <= high:
            allowed = f"of at least {low}" if high == 2**31 - 1 else f"from {low} to {high}"
            raise ValueError(f"{name} is {value!r}; allowed: an integer {allowed}")
        object.__setattr__(self, name, value.__index__())

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(
                f"{name} is {value!r}{did_you_mean(value, allowed)}; allowed: {', '.join(map(repr, allowed))}"
            )


PRESETS = {"paper": "paper", "cautious": "cautious", "window": "windowed", "blog": "blog"}

PCDSetting = Union[None, bool, str, Mapping[str, Any], PCDConfig]


def parse_pcd(text: str, base: PCDConfig | None = None) -> PCDConfig | None:
    """A PCD setting as typed: on, off, a preset's name, name=value pairs, a preset followed by pairs, or a profile's file.

    Raises:
        ValueError, TypeError: it is none of these, or a value is out of range.
    """
    if is_profile(text.strip()):
        return PCDConfig.from_profile(text.strip())
    words = text.replace(",", " ").split() or [""]
    config = base or PCDConfig()
    if "=" not in words[0]:
        first = words.pop(0).lower()
        if first == "off" and not words:
            return None
        if first in PRESETS:
            config = PCDConfig.preset(first)
        elif first != "on":
            names = ["on", "off", *PRESETS]
            near = did_you_mean(first, names)
            raise ValueError(
                f"{text!r} is no PCD setting{near}; allowed: {', '.join(names)}, or values such as beta=1.5,window=64"
            )
    pairs = [word.partition("=") for word in words]
    for name, equals, value in pairs:
        if not equals or not value:
            raise ValueError(f"{name!r} is no PCD value; write it as name=value, such as beta=1.5")
    return config.replace(**{name: _value(name, value) for name, _, value in pairs})


def _value(name: str, text: str) -> Any:
    if name == "window" and text.lower() in ("none", "off", "0"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
