"""The fields of a setting of Positional Contrastive Decoding (PCD), each stated once: type, default, range, and what it does.

All else that lists them is made from this table: what PCDConfig checks and `help()` shows of it; the C struct with its enums, defaults
and ranges (`cmake/fields.py`) and the same struct in ctypes; what a request to `pypcd serve` may change; the table in
docs/settings.md.

To add one: a line in Fields, the formula (in `cpp/` and, for the tests, in numpy), and a test of it. Then
`python cmake/fields.py --docs` writes the table in the docs. As the struct in C changes, LLAMA_PCD_VERSION and library.API_VERSION are
raised by one. If the field changes what twins see, `cpp/twins/settings.cpp` has to know (same_table, find_difference).

Knows nothing of what a setting is used for. CMake runs it, so it needs the standard library alone.
"""

# ruff: noqa: RUF009  _field() makes a dataclasses.field

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pypcd.settings.ranges import Check, Choice, Integer, Number, OrNone

__all__ = ["FIELDS", "RANGES", "Field", "Fields", "names"]

# each in the order of its numbers in C
Cache = Literal["rerotated", "shared", "separate"]
Evaluation = Literal["fused", "alternate", "auto"]
Transition = Literal["exponential", "none"]
Perturbation = Literal["over-rotation", "none"]
Sequences = Literal["all", "chosen"]
KeyType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
_GGML = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}  # enum ggml_type

Range = Number | Integer | Choice | OrNone
Part = Literal["twin", "contrast", "floor", "work"]


@dataclasses.dataclass(frozen=True)
class Field:
    """What is known of a field.

    Attributes:
        name: as in PCDConfig, in C and in a text.
        default: the paper's value.
        range: what is allowed.
        part: "twin": it makes L*. "contrast": it is an argument of pypcd.settings.formula.contrast(), which makes one row of L and L*. "floor": it says
            which tokens are contrasted at all (so does min_entropy, which contrast() applies). "work": how the twins are evaluated, or for whom.
        what: what it does, and what that costs, in sentences.
        own: whether a sequence can have another value than its context.
        numbers: the numbers that stand for names, or for None, in C.
    """

    name: str
    default: Any
    range: Range
    part: Part
    what: str
    own: bool
    numbers: Mapping[Any, int]

    @property
    def is_float(self) -> bool:
        return isinstance(self.default, float)

    @property
    def is_choice(self) -> bool:
        """Whether its values are names."""
        return any(isinstance(name, str) for name in self.numbers)

    def to_number(self, value: Any) -> Any:
        """A value as C has it."""
        return self.numbers.get(value, value)


def _field(
    default: Any,
    allowed: Range,
    part: Part,
    what: str,
    *,
    own: bool = False,
    numbers: Mapping[Any, int] | None = None,
) -> Any:
    if numbers is None and isinstance(allowed, Choice):
        numbers = {name: number for number, name in enumerate(allowed.names)}
    known = Field("", default, allowed, part, what, own, numbers or {})
    return dataclasses.field(default=default, metadata={"field": known})


@dataclasses.dataclass(frozen=True)
class Fields:
    """The table. Its order is that of the docs and of the struct in C."""

    alpha: float = _field(
        0.2,
        Number(0, 10),
        "twin",
        "The slope of the transition T(x) = 2 - exp(alpha x) from the model's own to faster frequencies (Eq. 4). More over-rotates "
        "more; 0 leaves `L* = L`.",
    )
    beta: float = _field(
        2.5,
        Number(0, 1000),
        "contrast",
        "The strength of the contrast (Eq. 6). 0 is plain decoding.",
        own=True,
    )
    gamma: int = _field(
        30,
        Integer(1),
        "contrast",
        "Top-k: how many of the most probable tokens of `L` stay in play. 1 is plain, greedy decoding.",
        own=True,
    )
    base_ratio: float = _field(
        1e-4,
        Number(0, 1, open_below=True),
        "twin",
        "The lowered RoPE base over the model's own, B'/B (Eq. 4): how far the slow frequencies are over-rotated. 1 leaves `L* = L`.",
    )
    relative_top: float = _field(
        0.0,
        Number(0, 1),
        "contrast",
        "A cut: only tokens with at least this share of the highest probability stay in play. The paper has none. It "
        "saves the local passes that cannot change the outcome.",
        own=True,
    )
    cache: Cache = _field(
        "rerotated",
        Choice(get_args(Cache)),
        "twin",
        "What the local pass sees of the prompt. rerotated: *second keys*, the cached keys rotated again to the over-rotated "
        "frequencies, and the same values. shared: cached keys and values as they are (the authors' public code). separate: keys and "
        "values of a second, over-rotated evaluation of the whole prompt, which takes as long again; in the stock engine alone, without a "
        "window. The KV cache takes 1.5 times the memory with rerotated.",
    )
    evaluation: Evaluation = _field(
        "auto",
        Choice(get_args(Evaluation)),
        "work",
        "fused: both passes in one batch. alternate: one after the other, and no local pass if only one token stays in play. auto: "
        "alternate with `relative_top` or `min_entropy`, else fused. Prompts are always fused. The logits differ by "
        "rounding only.",
    )
    transition: Transition = _field(
        "exponential",
        Choice(get_args(Transition)),
        "twin",
        "How the two tables of frequencies are blended. exponential: Eq. 4. none: all of them have the base B'.",
    )
    perturbation: Perturbation = _field(
        "over-rotation",
        Choice(get_args(Perturbation)),
        "twin",
        "What is done to the rotation of the local pass. over-rotation: the paper. none: the local pass differs by its window alone, "
        "which works without RoPE too.",
        own=True,
    )
    window: int | None = _field(
        None,
        OrNone(Integer(1)),
        "twin",
        "The local pass sees this many of the last positions, its own included. None: all. A window saves time "
        "in long contexts.",
        own=True,
        numbers={None: 0},
    )
    n_sink: int = _field(
        4,
        Integer(0),
        "twin",
        "How many of the first positions a local pass with a window sees too.",
        own=True,
    )
    type_k_over: KeyType | None = _field(
        None,
        OrNone(Choice(get_args(KeyType))),
        "twin",
        "The type of the second keys. None: that of the cached keys. Types with a q need a head size that is a multiple of 32.",
        numbers={None: -1, **_GGML},
    )
    sequences: Sequences = _field(
        "all",
        Choice(get_args(Sequences)),
        "work",
        "For batches of several sequences. chosen: PCD is off for those that got no setting of their own by `llama_pcd_set_seq`, as in `pypcd serve`.",
    )
    min_context: int = _field(
        0,
        Integer(0),
        "floor",
        "Decode plainly until the context has this many tokens.",
        own=True,
    )
    min_entropy: float = _field(
        0.0,
        Number(0, 100),
        "contrast",
        "Decode a token plainly if softmax(`L`) has less entropy than this, in bits. One bit is a choice between two equally probable "
        "tokens.",
        own=True,
    )
    min_first_entropy: float = _field(
        0.0,
        Number(0, 100),
        "floor",
        "Decode a whole answer plainly if softmax(`L`) has less entropy than this at its first token, in bits. An answer that begins "
        "before `min_context` is plain too.",
        own=True,
    )


FIELDS: Mapping[str, Field] = {
    one.name: dataclasses.replace(one.metadata["field"], name=one.name) for one in dataclasses.fields(Fields)
}
RANGES: Mapping[str, Check] = {name: field.range for name, field in FIELDS.items()}


def names(*parts: Part) -> tuple[str, ...]:
    """The fields of some parts; see Field.part."""
    return tuple(name for name, field in FIELDS.items() if field.part in parts)
