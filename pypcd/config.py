"""The settings of Positional Contrastive Decoding (PCD), with their ranges. Knows nothing of models or libraries.

`settings` has the presets, and how a setting is written as text or kept in a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union, get_args

from pypcd import settings
from pypcd.checks import Check, Choice, Integer, Number, OrNone, check
from pypcd.errors import ArgumentError, InputError, did_you_mean
from pypcd.settings import PRESETS, Profile

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RANGES", "PCDConfig", "PCDFields", "PCDSetting"]

Cache = Literal["rerotated", "shared", "separate"]
Evaluation = Literal["auto", "fused", "alternate"]
Transition = Literal["exponential", "none"]
Perturbation = Literal["over-rotation", "noise", "none"]
Band = Literal["low", "high", "all"]
Sequences = Literal["all", "chosen"]
Adaptive = Literal["jsd"]
KeyType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

_OFFSET = 2**20  # positions

# field -> its range; offset_max must also be at least offset_min
RANGES: Mapping[str, Check] = {
    "alpha": Number(0, 10),
    "beta": Number(0, 1000),
    "gamma": Integer(1),
    "base_ratio": Number(0, 1, open_below=True),
    "relative_top": Number(0, 1),
    "cache": Choice(get_args(Cache)),
    "evaluation": Choice(get_args(Evaluation)),
    "transition": Choice(get_args(Transition)),
    "perturbation": Choice(get_args(Perturbation)),
    "window": OrNone(Integer(1)),
    "n_sink": Integer(0),
    "band": Choice(get_args(Band)),
    "type_k_over": OrNone(Choice(get_args(KeyType))),
    "noise": Number(0, 10),
    "offset_min": Integer(-_OFFSET, _OFFSET),
    "offset_max": Integer(-_OFFSET, _OFFSET),
    "seed": Integer(0),
    "sequences": Choice(get_args(Sequences)),
    "adaptive": OrNone(Choice(get_args(Adaptive))),
    "min_context": Integer(0),
    "min_entropy": Number(0, 100),
    "min_first_entropy": Number(0, 100),
}


class PCDFields(TypedDict, total=False):
    """Some fields of PCDConfig, for `pcd={"beta": 1.5}`: a mapping that type checkers look into."""

    alpha: float
    beta: float
    gamma: int
    base_ratio: float
    relative_top: float
    cache: Cache
    evaluation: Evaluation
    transition: Transition
    perturbation: Perturbation
    window: int | None
    n_sink: int
    band: Band
    type_k_over: KeyType | None
    noise: float
    offset_min: int
    offset_max: int
    seed: int
    sequences: Sequences
    adaptive: Adaptive | None
    min_context: int
    min_entropy: float
    min_first_entropy: float


@dataclasses.dataclass(frozen=True)
class PCDConfig:
    """How the local-aware logits L* are made and how they are contrasted with the standard logits L.

    L* are the logits of the twin: the same token, evaluated a second time so that near text weighs more. In the paper
    the twin is over-rotated: its RoPE frequencies theta* are higher than the model's own, theta. The result is
    ``(1 + beta) L - beta L*`` (Eq. 6 of the paper, arXiv 2506.08371) on the plausible tokens of L; the others are
    excluded. The defaults are the paper's.

    Args:
        alpha: slope of the transition function T(x) = 2 - exp(alpha x) (Eq. 4), 0 to 10. 0 leaves L* = L.
        beta: strength of the contrast, 0 to 1000. 0 is plain decoding among the top gamma tokens.
        gamma: how many of the most probable tokens of L stay in play, at least 1. 1 is greedy decoding.
        base_ratio: B'/B, the lowered RoPE base over the model's own; more than 0 and at most 1. 1 leaves L* = L.
        relative_top: of the top gamma, keep only tokens with p(v) >= relative_top * max p, 0 to 1. 0 is the paper;
            0.1 is the plausibility cut of contrastive decoding and DoLa.
        cache: what the twin sees of the prompt. "rerotated": the cached keys, rotated again to theta* (Eq. 5 on the
            shared prompt cache). These second keys make the KV cache 1.5 times as large. "shared": the cached keys as they
            are. "separate": keys and values of a second, over-rotated evaluation of the whole prompt (Eq. 5 in every
            layer); it takes a second prefill and twice the memory.
        evaluation: "fused": token and twin in one batch, so the weights are read once; "alternate": one after the
            other, without the twin when only one token is plausible; "auto": alternate for steps with a cut
            (relative_top) or min_entropy, else fused. The logits of the two differ by rounding.
        transition: "exponential" (Eq. 4) or "none": theta* = theta', the frequencies of the base B'.
        perturbation: what is done to the twin's rotation. "over-rotation" (the paper); "noise" (the method's first
            version: noise on cos and sin of the first component of each pair; with cache "shared" or "separate");
            "none" (the twin differs only by its window; works for models without RoPE too).
        window: the twin attends to the last `window` positions, at least 1, its own included, and to the first n_sink;
            None: to all.
        n_sink: how many of the first positions a twin with a window still sees, at least 0.
        band: which frequencies are perturbed. "low" is the paper; "high": the table of Eq. 4 in reverse order; "all":
            the larger of the two for each pair. With noise: the slower half of the pairs, the faster half, or all
            pairs, as in the first version.
        type_k_over: ggml type of the second keys: "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1" or "q4_0"; None:
            the type of the cached keys.
        noise: standard deviation of the noise, 0 to 10.
        offset_min: with noise, the twin's position is also moved by a random number from offset_min to offset_max; from
            -1048576 to 1048576.
        offset_max: from offset_min to 1048576; if both are 0, the position stays.
        seed: seed of noise and offset, at least 0. They depend only on seed, position and layer: a token evaluated
            again gets the same ones.
        sequences: of a context that decodes several, "all", or "chosen": only those that Llama.set_sequence_pcd gave a setting.
        adaptive: what the strength of the contrast follows from token to token. None: nothing, it is beta. "jsd": beta
            times the Jensen-Shannon divergence of the two distributions, softmax(L) and softmax(L*), which is 0 where
            they are alike and 1 where they share no token (AdaCAD, arXiv 2409.07394). So it wants a larger beta.
        min_context: decode plainly, without a twin, until there are so many tokens of context: a token's position, counted
            from 1, must be at least this. 0: contrast from the first token on.
        min_entropy: decode plainly where the model is sure: where softmax(L) has less entropy than this, in bits, 0 to 100.
            0: contrast at every step.
        min_first_entropy: decode an answer plainly to its end where the model is sure of its first token: where softmax(L)
            has less entropy there, in bits, 0 to 100, or where it is before min_context. 0: contrast in every answer.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and what is allowed.
    """

    alpha: float = 0.2
    beta: float = 2.5
    gamma: int = 30
    base_ratio: float = 1e-4
    relative_top: float = 0.0
    cache: Cache = "rerotated"
    evaluation: Evaluation = "auto"
    transition: Transition = "exponential"
    perturbation: Perturbation = "over-rotation"
    window: int | None = None
    n_sink: int = 4
    band: Band = "low"
    type_k_over: KeyType | None = None
    noise: float = 0.03
    offset_min: int = 0
    offset_max: int = 0
    seed: int = 0
    sequences: Sequences = "all"
    adaptive: Adaptive | None = None
    min_context: int = 0
    min_entropy: float = 0.0
    min_first_entropy: float = 0.0

    def __post_init__(self) -> None:
        check(self, **RANGES)
        check(self, offset_max=Integer(self.offset_min, _OFFSET))
        if self.perturbation == "noise" and self.cache == "rerotated":
            raise InputError(
                "cache is 'rerotated', which rotates keys to other frequencies, but perturbation=\"noise\" has no other "
                "frequencies; allowed with noise: 'shared', 'separate'"
            )
        if self.perturbation == "none" and self.window is None:
            raise InputError(
                'window is None, but perturbation="none" leaves the twin equal to its token without one; set window to 1 or more'
            )

    # -- presets ---------------------------------------------------------------------------------------------------

    @classmethod
    def paper(cls) -> PCDConfig:
        """The paper's optimum: alpha 0.2, beta 2.5, gamma 30, base_ratio 1e-4."""
        return cls.preset("paper")

    @classmethod
    def gentle(cls) -> PCDConfig:
        """A window twin, where the model is unsure how to begin its answer to 300 tokens or more."""
        return cls.preset("gentle")

    @classmethod
    def cautious(cls) -> PCDConfig:
        """Over-rotation, milder and with a plausibility cut: beta 1.5, relative_top 0.1."""
        return cls.preset("cautious")

    @classmethod
    def windowed(cls) -> PCDConfig:
        """A twin that sees only the last 64 positions (and the first 4), without over-rotation."""
        return cls.preset("window")

    @classmethod
    def blog(cls) -> PCDConfig:
        """The method's first version: noise on cos and sin of all pairs, the cached keys as they are, beta 1.5, gamma 100."""
        return cls.preset("blog")

    @classmethod
    def preset(cls, name: str) -> PCDConfig:
        """The preset called `name`: "paper", "gentle", "cautious", "window" or "blog".

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            near = did_you_mean(name, PRESETS)
            raise InputError(f"preset is {name!r}{near}; allowed: {', '.join(map(repr, PRESETS))}")
        return cls(**PRESETS[name].fields)

    # -- making one from another -----------------------------------------------------------------------------------

    def replace(self, **changes: Unpack[PCDFields]) -> PCDConfig:
        """A copy with some fields changed.

        Raises:
            TypeError: a field does not exist; the message names the nearest.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise ArgumentError(
                    f"PCDConfig has no field {name!r}{did_you_mean(name, names)}; its fields: {', '.join(names)}"
                )
        return dataclasses.replace(self, **changes)

    def repeatable(self) -> PCDConfig:
        """The same with "fused" in place of "auto", so that a text is evaluated in one way whatever is decoded beside it."""
        return self.replace(evaluation="fused") if self.evaluation == "auto" else self

    @classmethod
    def resolve(cls, setting: PCDSetting, base: PCDConfig | None = None) -> PCDConfig | None:
        """The setting that a user's `pcd=` means; None for off.

        Args:
            setting: None and False are off, True is `base` or the recommended preset. A text is "on" (the recommended
                preset), "off", a preset, values such as "beta=1.5:window=64", a preset followed by values, or the path of a
                profile (.json, as `pypcd tune` writes it). A mapping, or values without a preset, change fields of `base` or
                of the paper's setting.
            base: the setting in force.

        Raises:
            ValueError: the text is not a setting, or a value is out of range.
            TypeError: it is of another type, or a field does not exist; the message names the nearest.
            FileNotFoundError: there is no such profile.
        """
        setting = settings.load(setting)
        if setting is None or setting is False:
            return None
        if setting is True:
            return base or cls.preset(settings.RECOMMENDED)
        if isinstance(setting, PCDConfig):
            return setting
        if isinstance(setting, Profile):
            return cls._of_profile(setting)
        if isinstance(setting, str):
            return cls._of_text(setting, base or cls())
        if isinstance(setting, Mapping):
            return (base or cls()).replace(**setting)
        raise ArgumentError(
            f"pcd={setting!r} is a {type(setting).__name__}; allowed: bool, text such as 'gentle' or "
            "'beta=1.5:window=64', a mapping, PCDConfig"
        )

    @classmethod
    def from_profile(cls, path: str) -> PCDConfig | None:
        """The setting of a profile that `pypcd tune` wrote; None if tune found that PCD is best left off.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a profile, or has a value out of range.
        """
        return cls._of_profile(Profile.read(path))

    @classmethod
    def _of_profile(cls, profile: Profile) -> PCDConfig | None:
        try:
            return None if profile.fields is None else cls().replace(**profile.fields)
        except InputError as error:
            raise InputError(f"{profile.path}: {error}") from error

    @classmethod
    def _of_text(cls, text: str, base: PCDConfig) -> PCDConfig | None:
        new = settings.joined(text)
        fields = settings.read_text(new, base.as_dict())
        config = None if fields is None else cls().replace(**fields)
        if new != text.strip():  # checked last, so that the advised spelling is known to be valid
            raise InputError(f"pcd is {text!r}; allowed: words joined by colons; write {new}")
        return config

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """The fields that differ from the paper's, as resolve() reads them: "beta=1.5:window=64"; "paper" if none differs."""
        fields = dataclasses.fields(self)
        return settings.write_text(
            {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
        )


PCDSetting = Union[None, bool, str, PCDFields, PCDConfig, Profile]
"""What `pcd=` takes: off, on, a text, a mapping of fields, a whole setting, or a profile that was read."""
