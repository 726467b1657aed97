"""Keyword search: BM25 (Robertson and others, TREC-3, 1994), by bm25s."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pypcd.find.asked import Asked, Passage, Ranked
from pypcd.find.segments import WIDE

__all__ = ["by_words", "load", "ranked", "words"]

# vowel signs are no \w
_SIGNS = r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_TERM = re.compile(rf"[{WIDE}]+|(?:(?![{WIDE}])[\w{_SIGNS}])+")


def words(text: str) -> list[str]:
    """What is compared: words in lower case, and pairs of characters in scripts without spaces."""
    found: list[str] = []
    for term in _TERM.findall(unicodedata.normalize("NFKC", text).casefold()):
        if re.match(rf"[{WIDE}]", term):
            found += [term[i : i + 2] for i in range(max(len(term) - 1, 1))]
        else:
            found.append(term)
    return found


@functools.cache
def load() -> Any:
    """bm25s, without JAX: if that is installed, bm25s begins with it, which takes three quarters of a GPU's memory, for what is not used
    here."""
    before = sys.modules.get("jax")
    sys.modules["jax"] = None  # type: ignore[assignment]  # to import it is an ImportError now
    try:
        import bm25s  # type: ignore[import-untyped]
        from bm25s import stopwords  # type: ignore[import-untyped]  # noqa: F401
    finally:
        del sys.modules["jax"]
        if before:
            sys.modules["jax"] = before
    return bm25s


def _stop_words(texts: Iterable[Sequence[str]]) -> frozenset[str]:
    """The words that say little in the language of these texts: the list that most of their words are in. Words of questions are among
    them, which are rare in most texts and would count much."""
    lists = [frozenset(some) for name, some in vars(load().stopwords).items() if name.startswith("STOPWORDS_")]
    flat = [word for text in texts for word in text]
    return max(lists, key=lambda some: sum(word in some for word in flat))


@functools.lru_cache(maxsize=4)
def _index(segments: tuple[str, ...]) -> tuple[Any, frozenset[str]]:
    """What bm25s searches, None if no segment has a word; and the stop words. The same for all questions about a text."""
    texts = [words(segment) for segment in segments]
    stop = _stop_words(texts)
    texts = [[word for word in text if word not in stop] for text in texts]
    if not any(texts):
        return None, stop
    index = load().BM25()
    index.index(texts, show_progress=False)
    return index, stop


def ranked(segments: tuple[str, ...], question: str, earlier: str = "") -> dict[int, float]:
    """The segments that have words of a question, the best first, with their scores. It needs no model.

    Args:
        earlier: the question before this one, whose words count less.
    """
    index, stop = _index(segments)
    asks = words(earlier) + words(question) * (2 if earlier else 1)
    query = [word for word in asks if word not in stop]
    if index is None or not query:
        return {}
    scores = np.asarray(index.get_scores(query), np.float64)
    return {int(i): float(scores[i]) for i in np.argsort(-scores, kind="stable") if scores[i] > 0}


def by_words(asked: Asked) -> Ranked:
    """It needs no model."""
    found = ranked(asked.segments, asked.own, asked.earlier.strip())
    return Ranked([Passage(i, asked.segments[i].strip(), score, "bm25") for i, score in found.items()])
