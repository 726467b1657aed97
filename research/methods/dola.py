"""DoLa: contrast with what an earlier layer would predict, the premature layer (arXiv 2309.03883).

It follows Hugging Face's transformers-community/dola, which PCD's authors ran: the premature layer's hidden state goes
through the output head without the final norm, and the layer is chosen again for each token. See exits.py for what that costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.decode import values_of
from pypcd.decode.rows import RowSource, Stream
from pypcd.decode.session import Rows2D, Session
from pypcd.errors import InputError, UnsupportedError
from pypcd.prompt import Prompt
from pypcd.settings.fields import RANGES
from pypcd.settings.formula import log_softmax, put_behind
from pypcd.settings.ranges import Integer, check
from research.methods.exits import Exits, has_tied_head

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["DoLa", "candidate_layers", "dola_contrast", "parse", "premature_layer"]

Array = npt.NDArray[np.float64]

_FILTERED = -1e-3  # the premature layer's value where the final one is cut off; the original code has -1000


@dataclasses.dataclass(frozen=True)
class DoLa(RowSource):
    """Decoding by contrasting layers.

    Args:
        layers: "low" or "high" (see candidate_layers()), or the candidate layers themselves, 0 for the embeddings.
        relative_top: keep only tokens with at least this share of the highest probability; 0 keeps all.

    Raises:
        ValueError: a value is out of range.
    """

    layers: str | tuple[int, ...] = "low"
    relative_top: float = 0.1

    forks = False

    def __post_init__(self) -> None:
        check(self, layers=_layers, relative_top=RANGES["relative_top"])

    def refusal(self, llm: Llama) -> str | None:
        with llm._pcd_set_to(None):
            try:
                Exits(llm, self.candidates(llm)).close()
            except (UnsupportedError, InputError) as error:
                return str(error)
        return None

    def candidates(self, llm: Llama) -> tuple[int, ...]:
        """The layers from which one is chosen at each step.

        Raises:
            ValueError: this model has none of them.
        """
        return candidate_layers(self.layers, engine.n_layer(llm), tied=has_tied_head(llm))

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        session.plainly()
        exits = Exits(session.llm, self.candidates(session.llm))
        session.on_finish(exits.close)

        def change(t: int, rows: Rows2D) -> Rows2D:
            (row,) = rows  # of the one answer
            return self._row(row, exits.rows())[None]

        return Stream(session, session.start(tokens), change)

    def _row(self, final: npt.ArrayLike, exits: Rows2D) -> npt.NDArray[np.float32]:
        base = exits[premature_layer(final, exits)]
        kept = dola_contrast(final, base, relative_top=self.relative_top)
        return put_behind(kept, log_softmax(final)).astype(np.float32)


def _layers(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if value not in ("low", "high"):
            raise InputError(f"{name} is {value!r}; allowed: 'low', 'high' or a tuple of layers")
        return value
    layers = tuple(Integer(0)(name, i) for i in value)
    if not layers or len(set(layers)) < len(layers):
        raise InputError(f"{name} is {value!r}; allowed: one layer or more, each layer once")
    return layers


def candidate_layers(layers: str | Sequence[int], n_layer: int, *, tied: bool) -> tuple[int, ...]:
    """The layers to choose from (Hugging Face's _dola_decoding), 0 for the embeddings.

    "low" is every second layer of the lower half, or of the first 20 if the model has more than 40; "high" is every
    second layer of the upper half, or of the last 20. If the output head is the embedding matrix (tied), "low" starts at
    2 (at 1 with two layers), since the embeddings would predict the token that was just read. A list is used as it is,
    without layers that the model does not have.

    Raises:
        ValueError: none is left.
    """
    half = n_layer // 2
    start = 0 if not tied or n_layer <= 1 else 1 if n_layer == 2 else 2
    if layers == "low":
        found = (start,) if start == half else tuple(range(start, half if n_layer <= 40 else 20, 2))
    elif layers == "high":
        found = tuple(range(half if n_layer <= 40 else n_layer - 20, n_layer, 2))
    else:
        found = tuple(i for i in layers if isinstance(i, int) and i < n_layer)
    if not found:
        head = " and the embeddings for its head" if tied else ""
        allowed = f"; name layers from 0 to {n_layer - 1}"
        raise InputError(f"layers={layers!r} leaves no candidate in a model of {n_layer} layers{head}{allowed}")
    return found


def premature_layer(final: npt.ArrayLike, exits: npt.ArrayLike) -> int:
    """The index of the candidate whose distribution is furthest from the final one, by Jensen-Shannon divergence.

    With M = (P + Q) / 2 it is (KL(M || P) + KL(M || Q)) / 2, with the mean over the vocabulary instead of the sum: that
    is the order of arguments that Hugging Face's _dola_select_contrast gives to PyTorch's kl_div. Ties go to the first.

    Args:
        final: float[n_vocab], logits.
        exits: float[n_candidates, n_vocab], logits.
    """
    rows = np.asarray(exits)
    if len(rows) == 1:
        return 0
    log_p = log_softmax(final)

    def divergence(row: npt.ArrayLike) -> float:
        log_q = log_softmax(row)
        log_m = np.logaddexp(log_p, log_q) - np.log(2)
        return float((np.exp(log_m) * (log_m - (log_p + log_q) / 2)).mean())

    return int(np.argmax([divergence(row) for row in rows]))


def dola_contrast(final: npt.ArrayLike, base: npt.ArrayLike, *, relative_top: float = 0.1) -> Array:
    """log_softmax(final) - log_softmax(base), -inf where final is improbable (Hugging Face's _relative_top_filter).

    Args:
        final: float[n_vocab], the last layer's logits.
        base: float[n_vocab], the premature layer's.
        relative_top: the share of the highest probability that a token must have; 0 keeps all tokens.

    Returns:
        float64[n_vocab]
    """
    first, second = log_softmax(final), log_softmax(base)
    with np.errstate(divide="ignore"):
        cut = first < first.max() + np.log(relative_top)
    first[cut], second[cut] = -np.inf, _FILTERED
    return first - second


def parse(words: Sequence[str], layers: str | None = None) -> DoLa:
    """From the words behind the names dola, dola-low and dola-high: dola:16:18:20:relative_top=0.1."""
    numbers = [word for word in words if "=" not in word]
    if layers is not None and numbers:
        raise InputError(f"{numbers[0]!r} follows a method that chooses its own layers; write dola:{numbers[0]}")
    if layers is None and not (numbers and all(word.isdecimal() for word in numbers)):
        raise InputError(
            f"layers is {':'.join(numbers)!r}; allowed: integers, as in dola:16:18:20, or dola-low, dola-high"
        )
    values = values_of(DoLa, [word for word in words if "=" in word])
    return dataclasses.replace(values, layers=layers or tuple(map(int, numbers)))
