"""The segments that a question's own tokens attend to, by the heads of the model that retrieve.

After in-context re-ranking (arXiv 2410.02642): what the same prompt with an empty question attends to is subtracted, so that neither a place
that is always attended to nor an instruction counts. Which heads retrieve differs from model to model (CoRe, arXiv 2510.02219); they are
found once by `pypcd probe`, and ship with pypcd for some models (heads.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pypcd.errors import UnsupportedError
from pypcd.find.asked import Asked, Ranked
from pypcd.find.heads import Heads, heads_of

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["NULL", "attended", "by_attention"]

NULL = "N/A"  # in the place of a question: the empty question


def by_attention(asked: Asked) -> Ranked:
    """It looks with the model itself, and so finds reworded questions too."""
    heads = heads_of(asked.llm)
    if heads is None:
        raise UnsupportedError(f"pypcd probe {asked.llm.model_path} finds out which heads of this model look, too")
    pays, nothing = attended(asked, asked.question, heads), _null(asked, heads)
    return Ranked.of(asked, np.concatenate([pays[il] - nothing[il] for il in pays]).sum(axis=0), "attention")


Pays = Mapping[int, npt.NDArray[np.float64]]  # as attended() gives it


# of each model, what the empty question pays in the prompt that was asked last, by the heads that looked
_NULLS: weakref.WeakKeyDictionary[Llama, tuple[Any, Pays]] = weakref.WeakKeyDictionary()


def _null(asked: Asked, heads: Heads) -> Pays:
    """What the empty question pays: the same for all questions about a text."""
    *others, (role, message) = asked.turns
    beside = tuple(piece for piece in message if piece.kind != "question"), asked.chat, asked.prompt.answer_prefix
    key = others, role, beside, heads
    known, pays = _NULLS.get(asked.llm, (None, {}))
    if known != key:
        pays = attended(asked, NULL, heads)
        _NULLS[asked.llm] = key, pays
    return pays


def attended(asked: Asked, question: str, heads: Heads | None = None) -> dict[int, npt.NDArray[np.float64]]:
    """How much of its attention a question pays to each segment, on average over its tokens.

    Args:
        question: in the place of the prompt's own.
        heads: by layer, as in engine.attention(); None: all.

    Returns:
        layer -> float64[n_heads, n_segments]

    Raises:
        UnsupportedError: the attention cannot be read, or the tokenizer changes the text.
    """
    laid = asked.laid(question)
    if laid.question is None or not laid.segments:
        raise UnsupportedError("this model's tokenizer changes the text, so its parts cannot be found among the tokens")
    first, last = laid.question
    past, tokens = laid.tokens[:first], laid.tokens[first:last]
    sums = asked.look(past, tokens, laid.n_text, heads)
    begins, ends = np.array(laid.segments).T
    found = {}
    for il, pays in sums.items():
        total = np.concatenate([np.zeros((len(pays), 1)), pays.cumsum(axis=1, dtype=np.float64)], axis=1)
        found[il] = total[:, ends] - total[:, begins]
    return found
