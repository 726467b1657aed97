"""Ranges of values, each declared once: what is allowed, the check, and the words of the error message.

    check(self, beta=Number(0, 1000), gamma=Integer(1), cache=Choice(("rerotated", "shared")))

A check is called with a value's name and the value, and returns it as a plain float, int or str. It raises ValueError, with the name,
the value and what is allowed. Knows nothing of what the values mean.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from pypcd.errors import InputError, did_you_mean

__all__ = ["Choice", "Integer", "Number", "OrNone", "check", "literal"]

_MAX = 2**31 - 1  # the library's integers have 32 bits


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`; a bool is not a number.

    Args:
        open_below: whether `low` itself is excluded.
        note: added to the range in the message.
    """

    low: float
    high: float = math.inf
    open_below: bool = False
    note: str = ""

    @property
    def allowed(self) -> str:
        text = f"{'more than' if self.open_below else 'from'} {_shown(self.low)}"
        if self.high < math.inf:
            text += f" {'and at most' if self.open_below else 'to'} {_shown(self.high)}"
        return f"{text}; {self.note}" if self.note else text

    def __call__(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's scalars are Real too
            raise InputError(f"{name} is {value!r}, not a number; allowed: {self.allowed}")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or not self.low <= result <= self.high or (self.open_below and result == self.low):
            shown = value if isinstance(value, int) and math.isfinite(result) else result  # without numpy's type
            raise InputError(f"{name} is {shown!r}; allowed: {self.allowed}")
        return result


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer from `low` to `high`; a bool or 2.0 does not count as one.

    Args:
        multiple_of: the value must be a multiple of this.
        note: added to the range in the message.
    """

    low: int
    high: int = _MAX
    multiple_of: int = 1
    note: str = ""

    @property
    def allowed(self) -> str:
        kind = {1: "an integer", 2: "an even integer"}.get(self.multiple_of, f"a multiple of {self.multiple_of}")
        text = f"{kind} from {self.low} to {self.high}" if self.high != _MAX else f"{kind} of at least {self.low}"
        return f"{text}; {self.note}" if self.note else text

    def __call__(self, name: str, value: Any) -> int:
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise InputError(f"{name} is {value!r}; allowed: {self.allowed}")
        number = int(value)
        if number > self.high == _MAX:  # only then it is worth saying that the library's integers end
            raise InputError(f"{name} is {number}; allowed: an integer from {self.low} to {_MAX}")
        if not self.low <= number <= self.high or number % self.multiple_of:
            raise InputError(f"{name} is {number}; allowed: {self.allowed}")
        return number


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of some names; for another one the message has the nearest."""

    names: Sequence[str]

    @property
    def allowed(self) -> str:
        return ", ".join(map(repr, self.names))

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise InputError(f"{name} is {value!r}{did_you_mean(value, self.names)}; allowed: {self.allowed}")
        return value


@dataclasses.dataclass(frozen=True)
class OrNone:
    """None, or what another check allows."""

    kind: Number | Integer | Choice

    @property
    def allowed(self) -> str:
        return f"{self.kind.allowed}, or None"

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.kind(name, value)


Check = Number | Integer | Choice | OrNone | Callable[[str, Any], Any]


def check(of: object, **checks: Check) -> None:
    """Check fields of a (frozen) dataclass, and keep them as plain int, float and str."""
    for name, kind in checks.items():
        object.__setattr__(of, name, kind(name, getattr(of, name)))


def literal(text: str) -> int | float | str:
    """A text as a typed value: an integer or a float if it reads as one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _shown(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
