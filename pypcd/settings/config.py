"""A setting of Positional Contrastive Decoding (PCD): its checks, its presets, how it is written as text, and how it is kept in a file.

One spelling everywhere, words joined by colons (commas stand between the methods of a list):

    on  off  unsure  window:relative_top=0.1  paper:beta=1.5:window=64  tuned.json

`--pcd`, `/pcd` in the chat, `pcd=` in Python and `"pcd"` in a request take it; a method has it after `pcd:`; PCDConfig.describe()
prints it. A text is a whole setting: what it does not name is as in the preset that it begins with.

The fields themselves are in pypcd/settings/fields.py. Knows nothing of models or libraries.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from pypcd import files
from pypcd.errors import ArgumentError, InputError, did_you_mean, rename
from pypcd.settings.fields import FIELDS, RANGES, Fields
from pypcd.settings.ranges import check, literal

__all__ = [
    "PRESETS",
    "RECOMMENDED",
    "PCDConfig",
    "PCDSetting",
    "Preset",
    "Profile",
    "is_profile",
    "load",
    "read_values",
    "typed",
    "write_values",
]


# -- presets -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Preset:
    """A setting with a name.

    Attributes:
        fields: what differs from the default of PCDConfig.
        what: a description in one line.
    """

    fields: Mapping[str, Any]
    what: str


PRESETS: Mapping[str, Preset] = {
    "paper": Preset({}, "the paper's optimum: alpha 0.2, beta 2.5, gamma 30, base_ratio 1e-4"),
    "unsure": Preset(
        {
            "perturbation": "none",
            "window": 64,
            "beta": 0.75,
            "relative_top": 0.3,
            "min_first_entropy": 2.25,
            "min_context": 300,
        },
        "a window, where the model is unsure how to begin its answer to a prompt of 300 tokens or more; the same as on",
    ),
    "cautious": Preset(
        {"beta": 1.5, "relative_top": 0.1}, "over-rotation, milder and with a cut: beta 1.5, relative_top 0.1"
    ),
    "window": Preset(
        {"perturbation": "none", "window": 64},
        "the twin sees only the last 64 positions and the first 4; no over-rotation",
    ),
}

RECOMMENDED = "unsure"  # what True and "on" mean: of the presets, the one that spoils fewest answers


# -- the setting -------------------------------------------------------------------------------------------------------

_BLOG = "the first version of the method gained nothing; docs/evidence/table2 names the commit that has it"
# fields that there were: the value that is still true, and what to know of others
_FORMER = {
    "adaptive": (None, "the strength is beta in every step; docs/evidence/when names the commit that has others"),
    "band": ("low", "the low frequencies are over-rotated, as in the paper"),
    "noise": (0.03, _BLOG),
    "offset_min": (0, _BLOG),
    "offset_max": (0, _BLOG),
    "seed": (0, _BLOG),
}


@dataclasses.dataclass(frozen=True)
class PCDConfig(Fields):
    """How the local-aware logits L* are made and how they are contrasted with the standard logits L.

    L* are the logits of the twin: the same token, evaluated a second time so that near text weighs more. In the paper
    the twin is over-rotated: its RoPE frequencies theta* are higher than the model's own, theta. The result is
    ``(1 + beta) L - beta L*`` (Eq. 6 of the paper, arXiv 2506.08371) on the plausible tokens of L; the others are
    excluded. The defaults are the paper's.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and what is allowed.
    """

    def __post_init__(self) -> None:
        if self.perturbation == "noise":
            raise InputError(f'there is no perturbation="noise" any more: {_BLOG}')
        check(self, **RANGES)
        if self.perturbation == "none" and self.window is None:
            raise InputError(
                'window is None, but perturbation="none" leaves the twin equal to its token without one; set window to 1 or more'
            )
        if self.cache == "separate" and self.window is not None:
            raise InputError(
                f'window is {self.window}, but cache="separate" evaluates the whole text over-rotated; allowed with it: None and '
                'perturbation="over-rotation"'
            )

    @classmethod
    def preset(cls, name: str) -> PCDConfig:
        """The preset called `name`: "paper", "unsure", "cautious" or "window"."""
        if name == "blog":
            raise InputError(f"there is no preset {name!r} any more: {_BLOG}")
        if name not in PRESETS:
            raise InputError(
                f"preset is {name!r}{did_you_mean(name, PRESETS)}; allowed: {', '.join(map(repr, PRESETS))}"
            )
        return cls(**PRESETS[name].fields)

    @classmethod
    def resolve(cls, setting: PCDSetting, base: PCDConfig | None = None) -> PCDConfig | None:
        """The setting that a user's `pcd=` means; None for off.

        Args:
            setting: None and False are off, True is the preset "unsure". A text is "on" (that preset), "off", a
                preset, a preset followed by values, such as "paper:beta=1.5:window=64", or the path of a profile (.json, as
                `pypcd tune` writes it). A mapping changes fields of `base`.
            base: the setting in force; None: PCD is off.

        Raises:
            ValueError: the text is not a setting, or a value is out of range.
            TypeError: it is of another type, or a field does not exist; the message names the nearest.
            FileNotFoundError: there is no such profile.
        """
        setting = load(setting)
        if setting is None or setting is False:
            return None
        if setting is True:
            return cls.preset(RECOMMENDED)
        if isinstance(setting, PCDConfig):
            return setting
        if isinstance(setting, Profile):
            return setting.config()
        if isinstance(setting, str):
            return cls._of_text(setting.strip())
        if isinstance(setting, Mapping):
            return cls._changed(base, setting)
        raise ArgumentError(
            f"pcd={setting!r} is of the type {type(setting).__name__}; allowed: bool, text such as 'unsure' or "
            "'paper:beta=1.5', a mapping, PCDConfig"
        )

    @classmethod
    def _of_text(cls, text: str) -> PCDConfig | None:
        first, *values = words = text.split(":")
        name = first.lower()
        if name == "off" and not values:
            return None
        if name in ("on", "blog", *PRESETS):
            return cls.preset(RECOMMENDED if name == "on" else name).replace(**read_values(values))
        if "=" in name:
            cls().replace(**read_values(words))  # what is wrong besides is said first
            raise InputError(f"pcd is {text!r}, values without a preset; {_with_preset(text)}")
        if name == "pcd":
            raise InputError(f"pcd is {text!r}, which is a method's name; write {':'.join(values) or 'paper'}")
        names = ["on", "off", *PRESETS]
        raise InputError(
            f"pcd is {text!r}, which is not a setting{did_you_mean(name, names)}; allowed: {', '.join(names)}, a preset with "
            "values such as paper:beta=1.5:window=64, or a profile's file (.json)"
        )

    @classmethod
    def _changed(cls, base: PCDConfig | None, fields: Mapping[str, Any]) -> PCDConfig | None:
        if base is None and not fields:
            return None
        made = (base or cls()).replace(**fields)
        if base is None and FIELDS.keys() - fields.keys():  # all of them are a whole setting
            values = write_values(fields)
            raise InputError(
                f"pcd is {dict(fields)!r}, which changes the setting in force, but PCD is off; {_with_preset(values)}"
            )
        return made

    def replace(self, /, **changes: Any) -> PCDConfig:
        """A copy with some fields changed."""
        for name in [*changes]:
            if name in _FORMER:
                neutral, why = _FORMER[name]
                if changes.pop(name) != neutral:
                    raise ArgumentError(f"PCDConfig has no field {name!r} any more: {why}")
            elif name not in RANGES:
                raise ArgumentError(
                    f"PCDConfig has no field {name!r}{did_you_mean(name, RANGES)}; its fields: {', '.join(RANGES)}"
                )
        return dataclasses.replace(self, **changes)

    def repeatable(self) -> PCDConfig:
        """The same with "fused" in place of "auto", so that a text is evaluated in one way whatever is decoded beside it."""
        return self.replace(evaluation="fused") if self.evaluation == "auto" else self

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def differences(self) -> dict[str, Any]:
        """The fields that differ from the paper's."""
        return {field.name: value for field in FIELDS.values() if (value := getattr(self, field.name)) != field.default}

    def describe(self) -> str:
        """As resolve() reads it, in the fewest values: a preset and what differs from it, such as "paper:beta=1.5:window=64"."""
        texts = []
        for name in PRESETS:
            start = PCDConfig.preset(name)
            changed = {field: value for field, value in self.as_dict().items() if value != getattr(start, field)}
            is_other = "perturbation" in changed  # another kind of twin: its preset would mislead
            texts.append((is_other, len(changed), ":".join(filter(None, [name, write_values(changed)]))))
        return min(texts, key=lambda text: text[:2])[-1]


def _arguments() -> str:
    """What `help()` shows of the fields, from the table."""
    lines = ["Args:"]
    for field in FIELDS.values():
        text = f"{field.name}: {field.what} Allowed: {field.range.allowed}."
        lines += textwrap.wrap(text, 116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "\n".join(lines)


if PCDConfig.__doc__:  # python -OO has none
    PCDConfig.__doc__ = inspect.cleandoc(PCDConfig.__doc__).replace("Raises:", f"{_arguments()}\n\nRaises:")


rename(PCDConfig, {name: f"preset({name!r})" for name in ("paper", "cautious")})
rename(PCDConfig, {"windowed": "preset('window')", "gentle": "preset('unsure')", "from_profile": "resolve(path)"})

# -- text --------------------------------------------------------------------------------------------------------------

# field -> how its None is typed
_NONE = {
    field.name: ("none", "off") if field.is_choice else ("none", "off", "0")
    for field in FIELDS.values()
    if None in field.numbers
}


def typed(config: PCDConfig | None) -> str:
    """A setting as it can be typed, off included."""
    return "off" if config is None else config.describe()


def _with_preset(values: str) -> str:
    """What to write in place of values alone: they meant the paper's other fields, which nearly nobody wants."""
    return "write " + " or ".join(":".join(filter(None, [name, values])) for name in ("paper", RECOMMENDED))


def read_values(words: Iterable[str]) -> dict[str, Any]:
    """Values by name, from words such as beta=1.5.

    Raises:
        ValueError: a word has no name or no value, or a name is given twice.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            raise InputError(f"{word!r} is not a value; write it as name=value, such as beta=1.5")
        if name in values:
            raise InputError(f"{name} is given twice, {values[name]} and {value}; give it once")
        values[name] = None if value.lower() in _NONE.get(name, ()) else literal(value)
    return values


def write_values(fields: Mapping[str, Any]) -> str:
    """Values as read_values() reads them, joined by colons."""
    return ":".join(f"{name}={value}" for name, value in fields.items())


# -- profiles ----------------------------------------------------------------------------------------------------------

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Profile:
    """A setting in a file, with the measurements it was chosen by, as `pypcd tune` writes it.

    Attributes:
        path: the file.
        fields: the fields of PCDConfig that it sets; None: PCD is best left off.
        evidence: the model it was chosen with, and its results.
    """

    path: str
    fields: Mapping[str, Any] | None
    evidence: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """
        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a profile.
        """
        file = pathlib.Path(path).expanduser()
        if not file.exists():
            raise FileNotFoundError(f"there is no profile {file}; `pypcd tune` writes one")
        try:
            record = files.parsed(file.read_text(encoding="utf-8"))
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("pypcd_profile") != _VERSION or "pcd" not in record:
            raise InputError(f"{file} is not a profile written by pypcd tune")
        fields, evidence = record["pcd"], record.get("evidence", {})
        if not isinstance(fields, (dict, type(None))) or not isinstance(evidence, dict):
            raise InputError(f"{file} is damaged; `pypcd tune` writes another")
        return cls(str(path), fields, evidence)

    def config(self) -> PCDConfig | None:
        try:
            return None if self.fields is None else PCDConfig().replace(**self.fields)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error

    def write(self) -> None:
        record = {"pypcd_profile": _VERSION, "pcd": self.fields, "evidence": self.evidence}
        files.write(self.path, json.dumps(record, indent=2) + "\n")

    def remark(self, model_path: str) -> str | None:
        """A warning if the profile was chosen with a model file of another size; else None."""
        theirs, ours = self.evidence.get("model_bytes"), os.path.getsize(model_path)
        if theirs in (None, ours):
            return None
        return (
            f"{self.path} was chosen with another model ({self.evidence.get('model')}, {theirs} bytes; this one has {ours}) "
            "and says nothing about this one; `pypcd tune` makes a profile for it"
        )


def load(setting: Any) -> Any:
    """A profile for the path of one, so that its file is read once; any other setting unchanged."""
    return Profile.read(setting.strip()) if isinstance(setting, str) and is_profile(setting) else setting


def is_profile(text: str) -> bool:
    """Whether a text is the path of a profile."""
    return text.strip().endswith(".json")


PCDSetting = None | bool | str | Mapping[str, Any] | PCDConfig | Profile
"""What `pcd=` takes: off, on, a text, a mapping of fields, a whole setting, or a profile that was read."""
