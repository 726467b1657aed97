"""Keyword search: BM25 (Robertson and others, TREC-3, 1994), by bm25s."""

from __future__ import annotations

import collections
import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd.document.letters import WIDE
from pypcd.find.asked import Asked, Ranked

__all__ = ["by_words", "load", "ranked", "words"]

# accents, vowel points, lengthened letters
_MARKS = re.compile(r"[\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670]")
_SIGNS = r"\u0900-\u0963\u0966-\u0dff"  # vowel signs are no \w
_TERM = re.compile(rf"[{WIDE}]+|(?:(?![{WIDE}])[\w{_SIGNS}])+")
_IDEOGRAPHS = "\u2e80"  # the first of them; the scripts without spaces before them have letters


def words(text: str) -> list[str]:
    """What is compared: words in lower case, without accents and vowel points; in scripts without spaces pairs of characters, or three
    letters in a row."""
    found: list[str] = []
    for term in _TERM.findall(_plain(text)):
        if re.match(rf"[{WIDE}]", term):
            found += _runs(term, 2 if term >= _IDEOGRAPHS else 3)
        else:
            found.append(term)
    return found


def _plain(text: str) -> str:
    bare = _MARKS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFC", bare.casefold())


def _runs(text: str, n: int) -> list[str]:
    return [text[i : i + n] for i in range(max(len(text) - n + 1, 1))]


def _terms(found: Iterable[str], stop: Collection[str]) -> list[str]:
    """Words but stop words, and each three letters in a row of a word, with the spaces around it: what its forms share, a compound
    (Nordseeküste) and its parts, and a word with its article in one (والكتاب)."""
    terms: list[str] = []
    for word in found:
        if word not in stop:
            terms += [word] if re.match(rf"[{WIDE}]", word) else [word, *_runs(f" {word} ", 3)]
    return terms


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


def _stop_words(counts: Mapping[str, int]) -> frozenset[str]:
    """The words that say little in the language of a text: the list that most of its words are in. Words of questions are among them,
    which are rare in most texts and would count much.

    Args:
        counts: of the text's words.
    """
    lists = [
        frozenset(map(_plain, some)) for name, some in vars(load().stopwords).items() if name.startswith("STOPWORDS_")
    ]
    return max(lists, key=lambda some: sum(counts.get(word, 0) for word in some))


@functools.lru_cache(maxsize=4)
def _index(segments: tuple[str, ...]) -> tuple[Any, frozenset[str]]:
    """What bm25s searches, None if no segment has a word; and the stop words. The same for all questions about a text."""
    texts = [words(segment) for segment in segments]
    counts = collections.Counter(itertools.chain.from_iterable(texts))
    stop, numbers = _stop_words(counts), dict[str, int]()
    terms = {word: [numbers.setdefault(term, len(numbers)) for term in _terms([word], stop)] for word in counts}
    if not numbers:
        return None, stop
    index = load().BM25()
    index.index(([[n for word in text for n in terms[word]] for text in texts], numbers), show_progress=False)
    return index, stop


def ranked(segments: tuple[str, ...], question: str, earlier: str = "") -> npt.NDArray[np.float64]:
    """How well each segment fits a question, by their words; 0: it has none of them. It needs no model.

    Args:
        earlier: the question before this one, whose words count less.
    """
    index, stop = _index(segments)
    query = _terms(words(earlier) + words(question) * (2 if earlier else 1), stop)
    if index is None or not query:
        return np.zeros(len(segments))
    return np.asarray(index.get_scores(query), np.float64)


def by_words(asked: Asked) -> Ranked:
    """It needs no model."""
    return Ranked.of(asked, ranked(asked.segments, asked.own, asked.prompt.earlier.strip()), "bm25")
