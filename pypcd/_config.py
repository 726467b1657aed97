"""The settings of Positional Contrastive Decoding, with their ranges. Knows nothing of models or libraries.

How a setting is written as text, the presets and the files are in `_settings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Union

from pypcd import _settings
from pypcd._checks import Check, Choice, Integer, Number, OrNone, check
from pypcd._errors import did_you_mean
from pypcd._settings import PRESETS, Profile

__all__ = ["RANGES", "PCDConfig", "PCDSetting"]

CACHES = ("rerotated", "shared", "separate")
EVALUATIONS = ("fused", "alternate")
TRANSITIONS = ("exponential", "none")
PERTURBATIONS = ("over-rotation", "noise", "none")
BANDS = ("low", "high", "all")
KEY_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

_OFFSET = 2**20  # positions

# field -> what it may be; offset_max is also at least offset_min
RANGES: Mapping[str, Check] = {
    "alpha": Number(0, 10),
    "beta": Number(0, 1000),
    "gamma": Integer(1),
    "base_ratio": Number(0, 1, open_below=True),
    "relative_top": Number(0, 1),
    "cache": Choice(CACHES),
    "evaluation": Choice(EVALUATIONS),
    "transition": Choice(TRANSITIONS),
    "perturbation": Choice(PERTURBATIONS),
    "window": OrNone(Integer(1)),
    "n_sink": Integer(0),
    "band": Choice(BANDS),
    "type_k_over": OrNone(Choice(KEY_TYPES)),
    "noise": Number(0, 10),
    "offset_min": Integer(-_OFFSET, _OFFSET),
    "offset_max": Integer(-_OFFSET, _OFFSET),
    "seed": Integer(0),
}


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
        window: the twin attends to the last `window` positions, at least 1, its own included, and the first n_sink;
            None: to all.
        n_sink: first positions a windowed twin still sees, at least 0.
        band: which frequencies are perturbed. "low" is the paper; "high": the table of Eq. 4 in reverse order; "all":
            of both the larger. Of noise: the slower half of the pairs, the faster, or all, as in the first version.
        type_k_over: type of the second keys: "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1" or "q4_0"; None: that of
            the cached keys.
        noise: its standard deviation, 0 to 10.
        offset_min: with noise, the twin's position is also moved by a random number from offset_min to offset_max; from
            -1048576 to 1048576.
        offset_max: from offset_min to 1048576; 0 and 0 leave the position.
        seed: at least 0; of noise and offset, which are functions of seed, position and layer: evaluated again, they are
            the same.

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
        check(self, **RANGES)
        check(self, offset_max=Integer(self.offset_min, _OFFSET))
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
        return cls.preset("paper")

    @classmethod
    def cautious(cls) -> PCDConfig:
        """Milder, with a plausibility cut: beta 1.5, relative_top 0.1."""
        return cls.preset("cautious")

    @classmethod
    def windowed(cls) -> PCDConfig:
        """A twin that sees the last 64 positions, without any rotation."""
        return cls.preset("window")

    @classmethod
    def blog(cls) -> PCDConfig:
        """The method's first version: noise on cos and sin of all pairs, the cached keys as they are, beta 1.5, gamma 100."""
        return cls.preset("blog")

    @classmethod
    def preset(cls, name: str) -> PCDConfig:
        """The preset called `name`: "paper", "blog", "cautious" or "window".

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            near = did_you_mean(name, PRESETS)
            raise ValueError(f"preset is {name!r}{near}; allowed: {', '.join(map(repr, PRESETS))}")
        return cls(**PRESETS[name].fields)

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
        """What a user's `pcd=` means.

        Args:
            setting: None and False are off, True is `base` or the default. A text is "on", "off", a preset, values such
                as "beta=1.5:window=64", a preset followed by values, or the file of a profile (.json, as `pypcd tune`
                writes it). A mapping changes fields of `base` or the default, and so do values without a preset.
            base: the setting in force.

        Raises:
            ValueError: a text that is not a setting, or a value out of range.
            TypeError: something else, or a field that does not exist; the message names the nearest.
            FileNotFoundError: there is no such profile.
        """
        setting = _settings.load(setting)
        if setting is None or setting is False:
            return None
        if setting is True:
            return base or cls()
        if isinstance(setting, PCDConfig):
            return setting
        if isinstance(setting, Profile):
            return cls._of_profile(setting)
        if isinstance(setting, str):
            return cls._of_text(setting, base or cls())
        if isinstance(setting, Mapping):
            return (base or cls()).replace(**setting)
        raise TypeError(
            f"pcd={setting!r} is a {type(setting).__name__}; allowed: bool, text such as 'cautious' or "
            "'beta=1.5:window=64', a mapping, PCDConfig"
        )

    @classmethod
    def from_profile(cls, path: str) -> PCDConfig | None:
        """The setting of a profile that `pypcd tune` wrote; None where it found PCD best left off.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a profile, or has a value out of range.
        """
        return cls._of_profile(Profile.read(path))

    @classmethod
    def _of_profile(cls, profile: Profile) -> PCDConfig | None:
        try:
            return None if profile.fields is None else cls().replace(**profile.fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{profile.path}: {error}") from error

    @classmethod
    def _of_text(cls, text: str, base: PCDConfig) -> PCDConfig | None:
        new = _settings.joined(text)
        fields = _settings.read_text(new, base.as_dict())
        config = None if fields is None else cls().replace(**fields)
        if new != text.strip():  # said last: what is advised is then known to be right
            raise ValueError(f"pcd is {text!r}; allowed: words joined by colons; write {new}")
        return config

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """The fields that differ from the default, as resolve() reads them: "beta=1.5:window=64"; "on" if none does."""
        fields = dataclasses.fields(self)
        return _settings.write_text(
            {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
        )


PCDSetting = Union[None, bool, str, Mapping[str, Any], PCDConfig, Profile]
