"""Finding the passages of a text that a question is about.

    found = find(asked, finder="both")
    found.passages        # in the order in which they stand in the text

A finder ranks the segments of the texts in a prompt; each is one file here and one row of FINDERS:

    attention   the segments that the question's own tokens attend to, by the heads of this model that retrieve
    bm25        keyword search
    both        the best of each, in turn
"""

from __future__ import annotations

import dataclasses

from pypcd.errors import InputError, did_you_mean
from pypcd.find.asked import Asked, Finder, Hit, Ranked
from pypcd.find.attention import Attention
from pypcd.find.bm25 import BM25
from pypcd.find.both import Both

__all__ = ["FINDERS", "Asked", "Finder", "Found", "Hit", "Passage", "Ranked", "find"]

FINDERS: dict[str, Finder] = {"attention": Attention(), "bm25": BM25(), "both": Both()}


@dataclasses.dataclass(frozen=True)
class Passage:
    """A segment that was found.

    Attributes:
        index: of all segments of the prompt.
        score: how well it fits, in its finder's own units.
        finder: the name of what found it.
    """

    index: int
    text: str
    score: float
    finder: str


@dataclasses.dataclass(frozen=True)
class Found:
    """
    Attributes:
        passages: in the order in which they stand in the prompt.
        note: what was done in another way than asked for, or why nothing was found, in a sentence; empty: all is as asked.
    """

    passages: tuple[Passage, ...] = ()
    note: str = ""


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
        return Found(note="the text is too short to have passages" if segments and asked.question else "")
    ranked = FINDERS[finder].find(asked)
    best: list[Hit] = []
    left = n_tokens
    for hit in ranked.hits:
        text = segments[hit.index].strip()
        if any(segments[other.index].strip() == text for other in best):  # of a text that stands there twice
            continue
        left -= len(asked.llm.tokenize(text.encode("utf-8", "replace"), add_bos=False, special=False))
        if len(best) == (n or ranked.n) or (best and left < 0):
            break
        best.append(hit)
    if len(best) == len({segment.strip() for segment in segments}):
        return Found(note="the text has no more than these passages")
    chosen = sorted(best, key=lambda hit: hit.index)
    passages = tuple(Passage(hit.index, segments[hit.index].strip(), hit.score, hit.finder) for hit in chosen)
    notes = "" if passages else "no passage has a word of the question", ranked.note
    return Found(passages, "; ".join(filter(None, notes)))
