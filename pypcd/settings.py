"""PCD settings as text, the presets, and settings kept in a file (profiles).

One spelling everywhere, words joined by colons (commas stand between the methods of a list):

    on  off  gentle  window:relative_top=0.1  beta=1.5:window=64  tuned.json

`--pcd`, `/pcd` in the chat and `pcd=` in Python take it; a method has it after `pcd:`; PCDConfig.describe() prints it.
Knows the names of fields, but not their ranges or what they do: PCDConfig does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pypcd.checks import literal
from pypcd.errors import InputError, did_you_mean

__all__ = [
    "PRESETS",
    "RECOMMENDED",
    "Preset",
    "Profile",
    "is_profile",
    "joined",
    "load",
    "not_a_setting",
    "read_text",
    "read_values",
    "write_text",
]


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
    "gentle": Preset(
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
    "blog": Preset(
        {"perturbation": "noise", "cache": "shared", "band": "all", "beta": 1.5, "gamma": 100},
        "the method's first version: noise on cos and sin of all pairs, the cached keys as they are, beta 1.5, gamma 100",
    ),
}

RECOMMENDED = "gentle"  # what True and "on" mean

_NONE = {  # field -> how its None is typed
    "window": ("none", "off", "0"),
    "type_k_over": ("none", "off"),
    "adaptive": ("none", "off"),
}


# -- text ------------------------------------------------------------------------------------------------------------


def read_text(text: str, base: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields that a text sets, by name; None for "off".

    Args:
        text: words joined by colons. The first one may be a preset, or "on", which is the recommended one: these start from
            the paper's setting. Values alone change `base`.

    Raises:
        ValueError: it is not a setting; the message says what is allowed.
    """
    words = text.split(":")
    first = words[0].lower()
    if "=" in first:
        return {**base, **read_values(words)}
    if first == "off" and len(words) == 1:
        return None
    if first != "on" and first not in PRESETS:
        raise InputError(not_a_setting(text, first))
    return {**PRESETS[RECOMMENDED if first == "on" else first].fields, **read_values(words[1:])}


def not_a_setting(text: str, name: str) -> str:
    """The error message for a text whose first word is unknown."""
    names = ["on", "off", *PRESETS]
    if name == "pcd":
        return f"pcd is {text!r}, which is a method's name; write {text[len('pcd:') :] or 'paper'}"
    return (
        f"pcd is {text!r}, which is not a setting{did_you_mean(name, names)}; allowed: {', '.join(names)}, values such as "
        "beta=1.5:window=64, or a profile's file (.json)"
    )


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


def write_text(fields: Mapping[str, Any]) -> str:
    """What differs from the paper's setting, as read_text() reads it."""
    return ":".join(f"{name}={value}" for name, value in fields.items()) or "paper"


def joined(text: str) -> str:
    """The words of a text joined by colons, whatever joined them: earlier versions took commas and spaces."""
    return ":".join(re.findall(r"[^\s,:]+", re.sub(r"\s*=\s*", "=", text)))


# -- profiles --------------------------------------------------------------------------------------------------------

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
            record = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("pypcd_profile") != _VERSION or "pcd" not in record:
            raise InputError(f"{file} is not a profile written by pypcd tune")
        fields, evidence = record["pcd"], record.get("evidence", {})
        if fields is not None and not isinstance(fields, dict):
            raise InputError(f"{file} is damaged: its pcd is neither null nor a mapping")
        if not isinstance(evidence, dict):
            raise InputError(f"{file} is damaged: its evidence is not a mapping")
        return cls(str(path), fields, evidence)

    def write(self) -> None:
        record = {"pypcd_profile": _VERSION, "pcd": self.fields, "evidence": self.evidence}
        pathlib.Path(self.path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

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
    """A profile for the path of one, so that its file is read once; any other setting unchanged.

    Raises:
        FileNotFoundError, ValueError: as Profile.read().
    """
    return Profile.read(setting.strip()) if isinstance(setting, str) and is_profile(setting) else setting


def is_profile(text: str) -> bool:
    """Whether a text is the path of a profile."""
    return text.strip().endswith(".json")
