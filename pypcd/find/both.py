"""Attention and keyword search: the best of each, in turn."""

from __future__ import annotations

import itertools

from pypcd.errors import UnsupportedError
from pypcd.find.asked import Asked, Ranked
from pypcd.find.attention import Attention
from pypcd.find.bm25 import BM25

__all__ = ["Both"]


class Both:
    """A union: each finds what the other one cannot, such as a reworded question, or a name. Ranks are not added, which loses to either.
    If the two disagree on the best segment, three are repeated."""

    def find(self, asked: Asked) -> Ranked:
        by_words = BM25().find(asked)
        try:
            by_attention = Attention().find(asked)
        except UnsupportedError as error:
            return Ranked(by_words.hits, note=f"found by keyword search alone: {error}")
        pairs = itertools.zip_longest(by_attention.hits, by_words.hits)
        order = dict.fromkeys(hit.index for pair in pairs for hit in pair if hit)
        hits = {hit.index: hit for hit in (*by_words.hits, *by_attention.hits)}
        firsts = {tuple(hit.index for hit in ranked.hits[:1]) for ranked in (by_attention, by_words)}
        return Ranked([hits[i] for i in order], 1 + len(firsts))
