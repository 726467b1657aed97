"""Finding the passages of a text that a question is about.

    found = find(asked, finder="both")
    found.passages        # in the order in which they stand in the text

A finder ranks the segments of the texts in a prompt; each is one function and one row of FINDERS:

    attention   the segments that the question's own tokens attend to, by the heads of this model that retrieve
    bm25        keyword search
    both        the best of each, in turn
"""

from __future__ import annotations

import dataclasses
import itertools

from pypcd.errors import InputError, UnsupportedError, did_you_mean
from pypcd.find.asked import Asked, Finder, Passage, Ranked
from pypcd.find.attention import by_attention
from pypcd.find.bm25 import by_words

__all__ = ["FINDERS", "Asked", "Finder", "Found", "Passage", "Ranked", "find"]


def both(asked: Asked) -> Ranked:
    """A union: each finds what the other one cannot, such as a reworded question, or a name. Ranks are not added, which loses to either.
    If the two disagree on the best segment, three are repeated."""
    words = by_words(asked)
    try:
        attention = by_attention(asked)
    except UnsupportedError as error:
        return Ranked(words.hits, note=f"found by keyword search alone: {error}")
    pairs = itertools.zip_longest(attention.hits, words.hits)
    order = dict.fromkeys(hit.index for pair in pairs for hit in pair if hit)
    hits = {hit.index: hit for hit in (*words.hits, *attention.hits)}
    firsts = {tuple(hit.index for hit in ranked.hits[:1]) for ranked in (attention, words)}
    return Ranked([hits[i] for i in order], 1 + len(firsts))


FINDERS: dict[str, Finder] = {"attention": by_attention, "bm25": by_words, "both": both}


@dataclasses.dataclass(frozen=True)
class Found:
    """
    Attributes:
        passages: in the order in which they stand in the prompt.
        note: what was done in another way than asked for, or why nothing was found, in a sentence; empty: all is as asked.
        is_all: there are none because they would be the whole text.
    """

    passages: tuple[Passage, ...] = ()
    note: str = ""
    is_all: bool = False


def find(asked: Asked, *, finder: str = "both", n: int | None = None, n_tokens: int = 512) -> Found:
    """The passages that a question is about; none if that would be the whole text: small models take a text that stands there twice for a
    pattern to go on with.

    Args:
        n: how many at most; None: as many as the finder says.
        n_tokens: how many tokens they have together at most. The first one has as many as it has.

    Raises:
        ValueError: there is no such finder.
        UnsupportedError: this finder cannot work with this model.
        PCDError: llama_decode failed.
    """
    if finder not in FINDERS:
        raise InputError(f"finder is {finder!r}{did_you_mean(finder, FINDERS)}; allowed: {', '.join(FINDERS)}")
    segments = asked.segments
    if len(segments) < 2 or not asked.question:
        is_short = bool(segments and asked.question)
        return Found(note="the text is too short to have passages" if is_short else "", is_all=is_short)
    ranked = FINDERS[finder](asked)
    best: list[Passage] = []
    left = n_tokens
    for hit in ranked.hits:
        if hit.text in [other.text for other in best]:  # of a text that stands there twice
            continue
        left -= len(asked.llm.tokenize(hit.text.encode("utf-8", "replace"), add_bos=False, special=False))
        if len(best) == (n or ranked.n) or (best and left < 0):
            break
        best.append(hit)
    if len(best) == len({segment.strip() for segment in segments}):
        return Found(note="the text has no more than these passages", is_all=True)
    passages = tuple(sorted(best, key=lambda passage: passage.index))
    notes = "" if passages else "no passage has a word of the question", ranked.note
    return Found(passages, "; ".join(filter(None, notes)))
