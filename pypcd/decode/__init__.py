"""Decoding methods, for any GGUF model.

    method = pypcd.decode.parse("replay+pcd:paper:beta=1.5")
    method.generate(llm, Prompt(before, segments, joiner, after)).text

A method has four parts: an edit of the prompt, the source of the rows (the logits of each step), the search that
chooses tokens from them, and the types of the KV cache. A name is one part, or several joined by "+"; its values follow, each after a colon:

    greedy  sample:temperature=0.7:seed=1                     search: how tokens are chosen
    pcd  pcd:cautious  pcd:paper:cache=separate:beta=1.5  control   rows: where logits come from
    recite  replay:4                                          edit: how the prompt is changed
    kv:q8_0  kv:q8_0:q4_0                                     cache: the types of keys and values

register() adds others, as research/ does with those that the paper compares with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pypcd.decode import cache
from pypcd.decode.method import Answer, Edit, Method
from pypcd.decode.recite import Recite
from pypcd.decode.replay import Replay
from pypcd.decode.rows import OF_CONTROL, PCD, Control, Plain
from pypcd.decode.search import Greedy, Sampling, Search
from pypcd.decode.session import Session
from pypcd.errors import InputError, did_you_mean
from pypcd.prompt import Prompt
from pypcd.settings.config import PCDConfig, is_profile, read_values

__all__ = [
    "PCD",
    "Answer",
    "Control",
    "Edit",
    "Greedy",
    "Method",
    "Plain",
    "Prompt",
    "Sampling",
    "Search",
    "Session",
    "names",
    "parse",
    "register",
    "setting_of",
    "values_of",
]


def values_of(make: Any, words: Sequence[str], first: str = "") -> Any:
    """An instance of a dataclass from name=value words; a bare word is the field `first`."""
    kind = getattr(make, "func", make)
    fields = [
        f.name
        for f in dataclasses.fields(kind)
        if isinstance(f.default, (int, float, str, type(None))) and not isinstance(f.default, bool)
    ]
    for word in words:
        name, equals, _ = word.partition("=")
        if (name if equals else first) not in fields:
            near = did_you_mean(name, fields)
            raise InputError(f"{kind.__name__} has no value {name!r}{near}; it has: {', '.join(fields)}")
    return make(**read_values(word if "=" in word else f"{first}={word}" for word in words))


def _control(words: Sequence[str]) -> Control:
    values = read_values(word if "=" in word else f"beta={word}" for word in words)
    for name in values:
        if name not in OF_CONTROL:
            raise InputError(
                f"Control has no value {name!r}{did_you_mean(name, OF_CONTROL)}; it has: {', '.join(OF_CONTROL)}"
            )
    n_steps = values.pop("n_steps", Control.n_steps)
    return Control(pcd=PCDConfig(**values), n_steps=n_steps)


def _pcd(words: Sequence[str]) -> PCD:
    if any(is_profile(word) for word in words):
        raise InputError(
            "a profile's file may change, so a method does not take one; write its values, such as pcd:paper:beta=1.5:window=64"
        )
    config = PCDConfig.resolve(":".join(words)) if words else PCDConfig()
    if config is None:
        raise InputError("pcd:off is plain decoding; write greedy")
    return PCD(config)


# name -> (which part of a Method it is, how to make it from the words after the name)
_PARTS: dict[str, tuple[str, Callable[[Sequence[str]], Any]]] = {
    "greedy": ("search", lambda words: values_of(Greedy, words)),
    "sample": ("search", lambda words: values_of(Sampling, words, "temperature")),
    "pcd": ("rows", _pcd),
    "control": ("rows", _control),
    "recite": ("edit", lambda words: values_of(Recite, words, "n_tokens")),
    "replay": ("edit", lambda words: values_of(Replay, words, "n")),
    "kv": ("cache", cache.parse),
}


def names() -> tuple[str, ...]:
    """Of all parts that there are."""
    return tuple(_PARTS)


def register(name: str, kind: str, make: Callable[[Sequence[str]], Any]) -> None:
    """Add a part of methods; one of the same name is replaced.

    Args:
        kind: "search", "rows", "edit" or "cache".
        make: from the words behind the name, split at colons: ["4", "width=512"] of "self-extend:4:width=512".
    """
    _PARTS[name] = (kind, make)


def parse(text: str) -> Method:
    """A method from its name.

    Raises:
        ValueError: there is no such method, a value is out of range, or two parts exclude each other.
    """
    parts: dict[str, Any] = {}
    for part in text.strip().split("+"):
        name, *words = part.strip().split(":")
        if name not in _PARTS:
            raise InputError(
                f"there is no method {name!r}{_instead(name, _PARTS)}; there are: {', '.join(_PARTS)}; python -m research.eval, in a clone "
                "of pypcd's repository, has those that pypcd is compared with"
            )
        kind, make = _PARTS[name]
        if kind in parts:
            same = ", ".join(other for other, (its_kind, _) in _PARTS.items() if its_kind == kind)
            raise InputError(f"{text!r} has two parts of one kind; allowed: one of {same}")
        try:
            parts[kind] = make(words)
        except InputError as error:
            raise InputError(f"{part.strip()}: {error}") from error
    return Method(text.strip(), **parts)


def setting_of(name: str) -> PCDConfig | None:
    """The PCD setting of a method that is only that; None for "greedy".

    Raises:
        ValueError: there is no such method, it is more than a PCD setting, or a value is out of range.
    """
    kind = name.strip().split(":")[0]
    method = parse(name) if kind in ("greedy", "pcd") else None
    if method is None or method.edit or method.search != Greedy() or not isinstance(method.rows, (Plain, PCD)):
        raise InputError(
            f"method is {name!r}{_instead(kind, ('greedy', 'pcd'))}; allowed: greedy, pcd; pcd with any setting, such as pcd:paper:beta=1.5:window=64"
        )
    return method.rows.pcd


def _instead(name: str, names: Iterable[str]) -> str:
    if "=" in name:
        return ", a value follows its method and a colon"
    return " (write greedy)" if name == "plain" else did_you_mean(name, names)
